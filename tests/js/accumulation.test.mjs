import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  layout,
  moved,
  sentence,
  sizeAt,
  timesOf,
} from "../../src/membudget/widgets/accumulation.mjs";
import { read, says, within } from "./grid.mjs";

const cases = read("accumulation");
const base = { ...cases[0].state, samples: 1797, budget: 4 * 2 ** 20 };
const cut = (micro_batch, global_batch, normalisation = "window") =>
  ({ ...base, micro_batch, global_batch, normalisation });
const near = (a, b) =>
  assert.ok(Math.abs(a - b) <= 1e-9 * Math.max(Math.abs(b), 1), `${a}, ${b}`);

test("the numbers are those of Python's plans, on the whole grid", () => {
  for (const { state, numbers } of cases) {
    const n = describe(state);
    for (const [key, value] of Object.entries(numbers)) {
      near(key.split(".").reduce((of, part) => of[part], n), value);
    }
    near(n.over, n.peak - state.budget);
  }
});

test("the sentence holds Python's words", () => {
  const texts = cases.map(({ state }) => sentence(state));
  cases.forEach(({ said }, i) => said.forEach((w) => says([texts[i]], [w])));
  texts.push(sentence(cut(2049, 4097, "mean of means")));
  says(texts, [
    "1 micro-batch of ", " micro-batches (3 × 128 + 116", "1.0002 × 1/N",
    "any other 0.9998 × 1/N: not the gradient of the batch.",
    "Every sample counts 3 × 1/N: not the gradient of the batch.",
    "The peak is the optimizer step’s",
    " times, at 12.7–15.2 µs a sample on a CPU.", "forward and backward once",
  ]);
});

test("everything is inside, at every width, and the axes stand still", () => {
  for (const { state } of cases.filter((_, i) => i % 7 === 0)) {
    for (const width of [288, 358, 760]) {
      const plan = layout(state, width, base);
      const { plot, axis, end, bands, blocks, handles } = plan;
      const inside = within(plot);
      [plan.peak, plan.whole, { y: plan.budget }].forEach(inside);
      plan.xs.forEach((x) => inside({ x }));
      near(plan.budget, (plot.top + plot.bottom) / 2);
      near(bands[0].lower[0], plot.bottom);
      near(axis.y(describe(state).peak), Math.min(...bands.at(-1).upper));
      for (const { x, width, weight } of blocks) {
        assert.ok(x >= plot.left && x + width <= end + 1e-6 && weight > 0);
      }
      handles.forEach(({ x }, i) =>
        assert.ok(x - (handles[i - 1]?.x ?? 0) >= 16 && x <= end + 1e-6),
      );
    }
  }
});

test("the bars' areas are the shares of the gradient", () => {
  const state = cut(200, 500, "mean of means");
  const { plot, end, blocks } = layout(state, 640);
  const areas = blocks.map(({ width, weight }) => width * weight);
  const sum = areas.reduce((a, b) => a + b) / (end - plot.left);
  near(sum, describe(state).weight_sum);
});

test("a cut goes where it is dragged", () => {
  const plan = layout(cut(256, 1024), 760);
  for (const { index, x } of plan.handles) {
    assert.equal(moved(plan, 1024, index, x), 256);
    assert.equal(moved(plan, 1024, index, -50), 1);
  }
  assert.equal(moved(plan, 1024, 1, 900), 1024);
  assert.equal(layout(cut(1024, 1024), 760).handles.length, 1);
  const { blocks } = layout(cut(1, 65536), 760);
  assert.ok(blocks.length > 100 && blocks.length < 200);
});

test("times are those measured at the size, or around it", () => {
  const [sixteen, thirty] = base.record.times.map(([, time]) => time);
  assert.deepEqual(timesOf(base, 16), [sixteen, sixteen]);
  assert.deepEqual(timesOf(base, 20), [thirty, sixteen]);
  assert.deepEqual([...timesOf(base, 15), ...timesOf(base, 1025)], []);
  assert.deepEqual(timesOf({ ...base, record: null }, 16), []);
  const plan = layout(cut(256, 1024), 760);
  assert.deepEqual([sizeAt(plan, 0), sizeAt(plan, plan.cost.x(256))], [1, 256]);
});
