import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  layout,
  sentence,
} from "../../src/membudget/widgets/accumulation.mjs";
import { read, says, untouched, within } from "./grid.mjs";

const cases = read("accumulation");
const state = (changes) => ({
  ...cases[0].state,
  normalisation: "window",
  samples: 1797,
  budget: 4 * 2 ** 20,
  ...changes,
});
const locked = (micro_batch, global_batch, more = {}) =>
  state({ locked: true, micro_batch, global_batch, ...more });

function same(actual, expected, place) {
  if (expected !== null && typeof expected === "object") {
    assert.deepEqual(Object.keys(actual).sort(), Object.keys(expected).sort());
    for (const key of Object.keys(expected)) {
      same(actual[key], expected[key], `${place}.${key}`);
    }
  } else if (Number.isInteger(expected) || typeof expected !== "number") {
    const near = /weight/.test(place) && Math.abs(actual - expected) < 1e-12;
    assert.ok(actual === expected || near, `${place}: ${actual}, ${expected}`);
  } else {
    const error = Math.abs(actual - expected) / Math.abs(expected);
    assert.ok(error <= 1e-12, `${place}: ${actual}, Python ${expected}`);
  }
}

test("describe gives Python's numbers on the whole grid", () => {
  for (const { state, numbers } of cases) {
    same(describe(state), numbers, JSON.stringify(state));
  }
});

test("the sentence is Python's, to the letter", () => {
  for (const { state, sentence: expected } of cases) {
    assert.equal(sentence(state), expected);
  }
  says(cases.map((one) => one.sentence), [
    "One micro-batch, the whole batch of ", " micro-batches of ",
    " each and the last ", " and fits.", " and does not fit.",
    " (in the optimizer step), ", ", above the budget", ", within the budget",
    "The weights sum to ", " instead of 1, and a sample of the last",
    ". A sample of the last", ". Every sample weighs 1/",
  ]);
});

test("describe and layout leave the state as it is", () => {
  untouched(state(), layout, describe);
});

test("everything is inside the picture, at every width", () => {
  for (const { state } of cases.filter((_, i) => i % 7 === 0)) {
    for (const width of [288, 358, 760]) {
      const { plot, step, memory, weights } = layout(state, width);
      const inside = within(plot);
      memory.bands.forEach(({ lower, upper }) => {
        lower.forEach(inside);
        upper.forEach(inside);
      });
      memory.outline.forEach(inside);
      inside(memory.peak);
      inside(memory.whole);
      inside(memory.budget);
      memory.ticks.forEach(inside);
      memory.blocks.forEach((block) => {
        inside(block);
        assert.ok(block.x + block.width <= step.x + 1e-6);
      });
      weights.bars.forEach(({ x, y, width, height }) => {
        assert.ok(x >= plot.left && x + width <= step.x + 1e-6);
        assert.ok(y >= weights.top && height > 0);
        assert.ok(Math.abs(y + height - weights.bottom) < 1e-9);
      });
    }
  }
});

test("heights are proportional to bytes", () => {
  for (const { state } of cases.filter((_, i) => i % 11 === 0)) {
    const { plot, memory } = layout(state, 640);
    const n = describe(state);
    const bytes = ({ y }) => (plot.bottom - y) / memory.perByte;
    const near = (a, b) => assert.ok(Math.abs(a - b) <= 1e-6 * b, `${a} ${b}`);
    near(bytes(memory.budget), state.budget);
    near(bytes(memory.whole), n.whole_peak);
    near(bytes(memory.peak), n.peak);
    memory.blocks.forEach((block) => near(bytes(block), block.bytes));
    memory.blocks.forEach((block) => assert.ok(block.bytes <= n.peak));
  }
});

test("bands are stacked without gaps, from the axis up", () => {
  const { plot, memory } = layout(state({ steps: 3 }), 640);
  memory.bands[0].lower.forEach(({ y }) => assert.equal(y, plot.bottom));
  memory.bands.slice(1).forEach(({ lower }, i) => {
    assert.deepEqual(lower, memory.bands[i].upper);
  });
  memory.bands.forEach(({ lower, upper }) =>
    upper.forEach(({ y }, i) => assert.ok(y <= lower[i].y + 1e-9)),
  );
});

test("gradients appear in the first backward pass and stay", () => {
  const { memory, step } = layout(state({ micro_batch: 64, steps: 4 }), 640);
  const { lower, upper } = memory.bands.find((b) => b.consumer === "gradients");
  const height = upper.map(({ y }, i) => lower[i].y - y);
  const { x, width } = memory.blocks[1];
  assert.ok(Math.abs(height[0]) < 1e-9);
  const full = state().footprint.gradients * memory.perByte;
  upper.forEach((point, i) => {
    if (point.x >= x && point.x < step.x) {
      assert.ok(Math.abs(height[i] - full) < 1e-9);
    }
  });
  assert.ok(width > 0);
  assert.ok(Math.abs(height.at(-1)) < 1e-9); // freed after the step
});

test("a remainder is narrower, lower, and weighs more", () => {
  const { memory, weights } = layout(
    locked(96, 500, { normalisation: "mean of means" }),
    640,
  );
  assert.equal(memory.blocks.length, 6);
  const [full, last] = [memory.blocks[4], memory.blocks[5]];
  assert.ok(Math.abs(last.width / full.width - 20 / 96) < 1e-9);
  assert.ok(last.bytes < full.bytes);
  const [even, rest] = weights.bars;
  assert.ok(Math.abs(rest.factor / even.factor - 96 / 20) < 1e-9);
  assert.ok(rest.y < weights.one.y && even.y > weights.one.y);
});

test("the bars' areas are the shares of the gradient", () => {
  for (const normalisation of ["window", "mean of means", "no division"]) {
    const set = locked(96, 500, { normalisation });
    const { plot, step, weights } = layout(set, 640);
    const one = (step.x - plot.left) * (weights.bottom - weights.one.y);
    const area = weights.bars.reduce((sum, b) => sum + b.width * b.height, 0);
    assert.ok(Math.abs(area / one - describe(set).weight_sum) < 1e-9);
  }
});

test("one micro-batch is the whole batch", () => {
  const { memory } = layout(locked(512, 512), 640);
  const top = memory.bands.at(-1).upper;
  assert.deepEqual(top, memory.outline);
  assert.deepEqual(memory.peak, memory.whole);
});

test("many micro-batches: few are drawn, the numbers stay exact", () => {
  const set = locked(1, 65536);
  const { memory } = layout(set, 640);
  assert.ok(memory.blocks.length < 200);
  assert.equal(memory.count, 65536);
  assert.equal(describe(set).micro_batches, 65536);
});
