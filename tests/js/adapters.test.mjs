import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  layout,
  sentence,
} from "../../src/membudget/widgets/adapters.mjs";
import { read, says, untouched, within } from "./grid.mjs";

const cases = read("adapters");
const widths = [288, 358, 640, 900];
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const near = (a, b) => assert.ok(Math.abs(a - b) < 1e-6, `${a} ${b}`);
const inside = ({ x, y, width, height }) => ({
  ...{ left: x, right: x + width, top: y, bottom: y + height },
});

test("describe gives Python's numbers, and leaves the state alone", () => {
  for (const { state, numbers } of cases) {
    const n = describe(state);
    for (const key of ["block", "saved", "peak", "large_saved", "large_peak"]) {
      assert.equal(n[key], numbers[key], key);
    }
    for (const [part, bytes] of Object.entries(n.parts)) {
      assert.equal(bytes, numbers[`peak.${part}`]);
    }
    assert.equal(sum(Object.values(n.kept)), n.block);
    untouched(state, describe, layout, sentence);
  }
});

test("the sentences say each case", () => {
  says(cases.map(({ state }) => sentence(state)), [
    "A trained linear layer keeps its input", "the whole step",
    "Each fp32 adapter casts its own copy", "bf16 adapters take x as it is",
    "Query and value each keep a copy of x in fp32. A frozen",
    "Query and value share one x. A frozen", "dropped copy of x, both in fp32",
    "dropped copy of x, both in bf16", "All else is made again",
    "In 4 bits the weights shrink, and the tiles stay. One block keeps",
    "nothing. What stays is for the gradients", "107 % of full training’s",
    "Its peak is 150.6 MiB; that of Llama 3 8B 68.4 GiB.",
    "that of Llama 3 8B 52.2 GiB, 76 %.",
  ]);
});

test("a tile's area is its bytes", () => {
  for (const { state } of cases) {
    for (const width of widths) {
      const { tiles, size } = layout(state, width);
      for (const { box, numbers, itemsize, bytes } of tiles) {
        assert.equal(bytes, numbers * itemsize * state.account.tokens);
        near(box.height, itemsize * size.byte);
        if (numbers * size.unit > 1) near(box.width, numbers * size.unit);
        else assert.equal(box.width, 1);
      }
    }
  }
});

test("all tiles are drawn, each in its box or above those that share it", () => {
  for (const { state } of cases) {
    for (const width of widths) {
      const { tiles, boxes, height } = layout(state, width);
      assert.equal(tiles.length, describe(state).tiles.length);
      const picture = { left: 0, right: width, top: 0, bottom: height };
      for (const { at, box, boxes: savers } of tiles) {
        const place = boxes[at] ? inside(boxes[at]) : picture;
        const { left, right, top, bottom } = inside(box);
        within(place)({ x: left, y: top });
        within(place)({ x: right, y: bottom });
        if (at === "shared") assert.ok(bottom < boxes[savers[0]].y);
        if (at === "block") assert.ok(bottom < boxes.norm1.y);
      }
    }
  }
});

test("no tile and no box covers another", () => {
  for (const { state } of cases) {
    for (const width of widths) {
      const { tiles, boxes } = layout(state, width);
      for (const all of [tiles.map(({ box }) => box), Object.values(boxes)]) {
        all.forEach((one, i) => {
          const a = inside(one);
          for (const b of all.slice(i + 1).map(inside)) {
            const across = a.left < b.right && b.left < a.right;
            assert.ok(!(across && a.top < b.bottom && b.top < a.bottom));
          }
        });
      }
    }
  }
});

test("bars are as long as their bytes, on axes that stay", () => {
  const axes = new Map();
  for (const { state } of cases) {
    for (const width of widths) {
      const n = describe(state);
      const { small, large, axis, plot, height } = layout(state, width);
      const each = (small.full - plot.left) / n.full;
      near(small.end - plot.left, each * n.peak);
      const big = (large.full - plot.left) / n.large_full;
      const end = large.parts.at(-1);
      near(end.x + end.width - plot.left, big * n.large_peak);
      axes.set(width, axes.get(width) ?? { axis, height, full: small.full });
      assert.deepEqual({ axis, height, full: small.full }, axes.get(width));
    }
  }
});
