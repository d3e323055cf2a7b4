import assert from "node:assert/strict";
import { test } from "node:test";

import {
  dragged,
  fromBits,
  layout,
  numberText,
  parse,
  sentence,
  keptText,
  stored,
} from "../../src/membudget/widgets/bits.mjs";
import { read, says, within } from "./grid.mjs";

const { grid, formats } = read("bits");
const all = Object.fromEntries(formats.map((of) => [of.name, of]));
const some = grid.filter((_, i) => i % 9 === 0);
const state = (number) => ({
  number: String(number),
  format: "fp16",
  formats,
});

test("every format keeps what Python's keeps, to the bit", () => {
  for (const { number, formats } of grid) {
    for (const [name, of] of Object.entries(formats)) {
      const expected = { ...of, value: Number(of.value) };
      assert.deepEqual(stored(Number(number), all[name]), expected, number);
    }
  }
});

test("the bits make the number that Python stores", () => {
  for (const { number, formats } of grid) {
    for (const [name, { bits, value }] of Object.entries(formats)) {
      assert.ok(Object.is(fromBits(bits, all[name]), Number(value)), number);
    }
  }
  assert.ok(Number.isNaN(fromBits("0 11111 0000000001", all.fp16)));
  assert.ok(Number.isNaN(fromBits("1 1111 111", all["fp8-e4m3"])));
  assert.equal(fromBits("1 1111 110", all["fp8-e4m3"]), -448);
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
});

test("numbers and sentences are written for people", () => {
  const texts = [0.1, -0, 5.96046e-8, 65504, Infinity].map((x) =>
    numberText(x, 3),
  );
  assert.deepEqual(texts, ["0.1", "−0", "5.96·10⁻⁸", "65500", "∞"]);
  assert.equal(numberText(1.25e-40), "1.25·10⁻⁴⁰");
  assert.equal(keptText(0.1, 0.1), "0.1");
  assert.equal(keptText(stored(0.1, all.fp32).value, 0.1), "0.100000001");
  assert.equal(keptText(1, 1 + 1e-12), "1");
  assert.equal(keptText(1 + 2 ** -40, 1), "1.000000000001");
  says(grid.map(({ number }) => sentence(state(number))), [
    " is exact in fp32, tf32, bf16, fp16, fp8-e4m3 and fp8-e5m2.",
    "0.1 is exact in no format.", "; too large for ",
    "; subnormal in ", "; lost to underflow in ",
  ]);
});

test("a text is a number, or it is not", () => {
  const good = {
    " -3e-5 ": -3e-5,
    "−2.": -2,
    "+.5E2": 50,
    "2^-24": 2 ** -24,
    "-2**10": -1024,
    "-Infinity": -Infinity,
    "∞": Infinity,
    "2^-1074": 5e-324,
    "-0": -0,
    "0.0e7": 0,
  };
  for (const [text, value] of Object.entries(good)) {
    assert.ok(Object.is(parse(text), value), text);
  }
  const bad = ["", "x", "1,5", "1e", ".", "nan", "0x10", "3^2", "1/3"];
  for (const text of [...bad, "1e400", "-2**1024", "1e-400", "2^-1075"]) {
    assert.equal(parse(text), undefined, text);
  }
  for (const { number } of grid) {
    assert.ok(Object.is(parse(number), Number(number)), number);
  }
});

test("ranges are inside the picture, and do not move", () => {
  const first = layout(state(0.1), 640).rows.map(({ ends }) => ends);
  for (const { number } of some) {
    for (const width of [288, 358, 640]) {
      const plan = layout(state(number), width);
      const inside = within({ ...plan.plot, right: width, left: 0 });
      for (const { ends, bar, at } of plan.rows) {
        [...ends, at, plan.now].forEach((x) => inside({ x }));
        inside({ y: bar });
        assert.ok(ends[0] <= ends[1] && ends[1] < ends[2]);
      }
      if (width !== 640) continue;
      assert.deepEqual(plan.rows.map(({ ends }) => ends), first);
    }
  }
});

test("a number is dragged from binade to binade", () => {
  const plan = layout(state(0.1), 640);
  assert.equal(dragged(plan, 0.1, plan.now), 0.1);
  const less = dragged(plan, 0.1, plan.now - 40);
  assert.equal(less, 1.91e-7); // 0.1 * 2 ** -19, in three digits
  assert.equal(dragged(plan, -3, -99), -1.64e-47);
  assert.equal(dragged(plan, Infinity, 9999), 4.36e40);
  assert.equal(dragged(plan, 65519, layout(state(65519), 640).now), 65519);
});
