import assert from "node:assert/strict";
import { test } from "node:test";

import {
  bitsLayout,
  describe,
  limits,
  numberText,
  parse,
  recipesLayout,
  scaleLayout,
  sentences,
  stored,
} from "../../src/membudget/widgets/precision.mjs";
import { read, says } from "./grid.mjs";

const { grid, cases, borders } = read("precision");
const some = cases.filter((_, i) => i % 9 === 0);
const numbered = (formats) =>
  Object.fromEntries(
    Object.entries(formats).map(([name, { value, bits, error, kind }]) => [
      name,
      { bits, value: Number(value), error, kind },
    ]),
  );

test("every format keeps what Python's keeps, to the bit", () => {
  for (const { number, formats } of grid) {
    const expected = numbered(formats);
    for (const name of Object.keys(formats)) {
      assert.deepEqual(stored(Number(number), name), expected[name], number);
    }
  }
});

test("the grid holds what it has to", () => {
  const names = Object.keys(grid[0].formats);
  assert.equal(names.length, 6);
  for (const name of names) {
    const all = grid.map(({ formats }) => formats[name]);
    const count = (kind) => all.filter((of) => of.kind === kind).length;
    for (const kind of ["subnormal", "underflow", "overflow"]) {
      assert.ok(count(kind) >= 20, `${name} ${kind}`);
    }
    assert.ok(all.some(({ bits }) => bits.startsWith("1 ")));
  }
  assert.ok(cases.some(({ numbers }) => numbers.best < 0));
  assert.ok(cases.some(({ numbers }) => numbers.best > 24));
  assert.ok(cases.some(({ state }) => state.histogram.merged));
  const fits = new Set(
    cases.flatMap(({ numbers }) =>
      Object.values(numbers.recipes).map((of) => of.fits),
    ),
  );
  assert.deepEqual(fits, new Set([true, false, null]));
});

test("a format ends where Python's ends", () => {
  for (const [name, expected] of Object.entries(borders)) {
    assert.deepEqual(limits(name), expected, name);
  }
});

test("numbers are written as Python writes them", () => {
  for (const { number, formats, texts } of grid) {
    const x = Number(number);
    assert.deepEqual([numberText(x), numberText(x, 2)], texts, number);
    for (const { value, text } of Object.values(formats)) {
      assert.equal(numberText(Number(value), 9), text);
    }
  }
});

test("describe gives Python's numbers on every state", () => {
  for (const { state, numbers } of cases) {
    const expected = { ...numbers, formats: numbered(numbers.formats) };
    assert.deepEqual(describe(state), expected);
  }
});

test("the sentences are Python's, to the letter", () => {
  for (const { state, sentences: expected } of cases) {
    assert.deepEqual(sentences(state), expected);
  }
  says(cases.flatMap((one) => one.sentences), [
    " is exact in every format.", " is exact in no format; ", " is exact in fp32",
    "; subnormal in ", "; underflow to 0 in ", "; overflow in ",
    "; elsewhere the relative error is at most ", "; the relative error is ",
    " loss scale of 1, ", "2²⁴ = 16\u202f777\u202f216", " 3\u202f000 gradients",
    "< 0.01 %", "> 99.99 %", " 0 % overflow", "overflow, so a scaler would skip",
    " overflow. The", ", which is beyond the slider.", "the slider: this is its end.",
    ", not checkpointed: ", ", checkpointed: ", "; the least is ",
    " Within the budget of ", ": none.", ": fp32, autocast, bf16, master and ",
  ]);
});

test("a text is a number, or it is not", () => {
  const good = {
    "0.1": 0.1,
    " -3e-5 ": -3e-5,
    "−2.": -2,
    "+.5E2": 50,
    "2^-24": 2 ** -24,
    "-2**10": -1024,
    inf: Infinity,
    "-Infinity": -Infinity,
    "∞": Infinity,
    "1.79e308": 1.79e308,
    "2^-1074": 5e-324,
    "-0": -0,
    "0.0e7": 0,
  };
  for (const [text, value] of Object.entries(good)) {
    assert.ok(Object.is(parse(text), value), text);
  }
  const bad = {
    "is no number":
      ["", " ", "x", "1,5", "1e", ".", "nan", "1 2", "0x10", "3^2", "1/3"],
    "is beyond the largest number, 1.8e308":
      ["1e400", "-1e400", "1.8e308", "2^1024", "-2**1024", "9".repeat(400)],
    "is below the smallest number, 5e-324":
      ["1e-400", "-.2e-323", "2^-1075", `0.${"0".repeat(330)}1`],
  };
  for (const [why, texts] of Object.entries(bad)) {
    for (const text of texts) assert.equal(parse(text), why, text);
  }
  for (const { number } of grid) {
    assert.ok(Object.is(parse(number), Number(number)), number);
  }
});

test("cells of bits stand in order and inside, at every width", () => {
  for (const { state } of some) {
    const { formats } = describe(state);
    for (const width of [288, 358, 760]) {
      const { rows, cell, height } = bitsLayout(state, formats, width);
      assert.equal(rows.length, 6);
      for (const { cells, top, bits } of rows) {
        assert.equal(cells.map(({ bit }) => bit).join(""), bits.replaceAll(" ", ""));
        cells.slice(1).forEach(({ x }, i) => {
          assert.ok(x - cells[i].x >= cell - 1e-9);
        });
        assert.ok(cells.at(-1).x + cell <= width + 1 && top + 20 <= height);
      }
    }
  }
});

test("bars move with the scale; lines and axis stay", () => {
  for (const { state } of some) {
    for (const width of [288, 760]) {
      const n = describe(state);
      const plan = scaleLayout(state, n, width);
      const { plot, edges, unscaled, heights, marks, ticks } = plan;
      const one = scaleLayout({ ...state, scale: 1 }, n, width);
      const two = scaleLayout({ ...state, scale: 2 }, n, width);
      const last = scaleLayout({ ...state, scale: 2 ** 24 }, n, width);
      const each = two.edges[0] - one.edges[0];
      assert.deepEqual(one.edges, unscaled);
      assert.deepEqual([one.marks, one.ticks], [marks, ticks]);
      edges.forEach((x, i) => {
        const moved = x - unscaled[i];
        assert.ok(Math.abs(moved - each * Math.log2(state.scale)) < 1e-6);
      });
      assert.ok(unscaled[0] >= plot.left - 1e-6);
      assert.ok(last.edges.at(-1) <= plot.right + 1e-6);
      assert.equal(heights.length, edges.length - 1);
      assert.ok(heights.every((y) => y >= plot.top && y <= plot.bottom));
      for (const { x } of [...marks, ...ticks]) {
        assert.ok(x >= plot.left - 1e-6 && x <= plot.right + 1e-6);
      }
      // a line is where a bar of that size begins
      const { start } = state.histogram;
      for (const { e, x, beyond } of marks) {
        const at = unscaled[0] + (e - start) * each;
        assert.ok(beyond || Math.abs(at - x) < 1e-6);
      }
    }
  }
});

test("a label is above its line, and no line goes through it", () => {
  const wide = 7.1; // pixels of a letter
  for (const { state } of some) {
    const n = describe(state);
    for (const format of ["fp16", "bf16", "fp8-e5m2", "fp8-e4m3"]) {
      for (const width of [288, 358, 560, 960]) {
        const { marks, plot } = scaleLayout({ ...state, format }, n, width);
        assert.equal(new Set(marks.map(({ y }) => y)).size, 3);
        for (const { x, y, at, label, left } of marks) {
          const far = wide * label.length;
          const [from, to] = left ? [at - far, at] : [at, at + far];
          const where = `${label} at ${width}`;
          assert.ok(from >= -1e-6 && to <= width + 1e-6, where);
          assert.ok(from - 1e-6 <= x && x <= to + 1e-6, where);
          assert.ok(y >= 12 && y <= plot.top - 16, where);
          const crossed = marks.some(
            (other) =>
              !other.beyond && other.y < y && other.x > from && other.x < to,
          );
          assert.ok(!crossed, where);
        }
      }
    }
  }
});

test("heights are shares of the gradients", () => {
  for (const { state } of some) {
    const { plot, heights } = scaleLayout(state, describe(state), 640);
    const { counts, gradients } = state.histogram;
    assert.equal(counts.reduce((a, b) => a + b), gradients);
    const most = Math.max(...counts);
    heights.forEach((y, i) => {
      const share = ((plot.bottom - y) / (plot.bottom - plot.top)) * 1.04;
      assert.ok(Math.abs(share - counts[i] / most) < 1e-9);
    });
  }
});

test("bars of recipes are as long as what is alive, category by category", () => {
  for (const { state, numbers } of some) {
    const { recipes } = numbers;
    const { plot, bars, budget } = recipesLayout(state, recipes, 640);
    const all = Object.values(recipes).map(({ bytes }) => bytes);
    const longest = bars[all.indexOf(Math.max(...all))].parts.at(-1);
    const each = (longest.x + longest.width - plot.left) / Math.max(...all);
    for (const { recipe, parts } of bars) {
      let x = plot.left;
      for (const part of parts) {
        assert.ok(Math.abs(part.x - x) < 1e-6);
        const size = recipes[recipe].split[part.category] * each;
        assert.ok(Math.abs(part.width - size) < 1e-6);
        x += part.width;
      }
      assert.ok(x <= plot.right + 1e-6);
      assert.ok(Math.abs(x - plot.left - recipes[recipe].bytes * each) < 1e-6);
    }
    assert.equal(budget === null, state.budget === null);
    if (budget && !budget.beyond) {
      assert.ok(Math.abs(budget.x - plot.left - state.budget * each) < 1e-6);
    }
  }
});
