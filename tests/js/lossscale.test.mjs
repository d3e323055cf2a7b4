import assert from "node:assert/strict";
import { test } from "node:test";

import {
  bars,
  describe,
  layout,
  sentence,
  shareText,
} from "../../src/membudget/widgets/lossscale.mjs";
import { read, says, within } from "./grid.mjs";

const cases = read("lossscale");

test("describe gives Python's shares on every state", () => {
  for (const { state, shares } of cases) {
    const found = Object.entries(describe(state)).map(([name, n]) => [
      name,
      [n.below, n.subnormal, n.above],
    ]);
    assert.deepEqual(Object.fromEntries(found), shares);
  }
});

test("the sentences say what there is to say", () => {
  says(cases.map(({ state }) => sentence(state)), [
    "In fp16 at a loss scale of 2⁻¹², ", " loss scale of 2⁶, ",
    " of 2²⁴, ", " of 3\u202f000 gradients ", "> 99.99 %",
    " overflow: a scaler would skip the step.", " become zero. The",
    " are normal numbers. The",
    ", beyond the slider.",
  ]);
  assert.equal(shareText(0.123456), "12.35 %");
  assert.equal(shareText(1e-5), "< 0.01 %");
});

test("bars move with the scale; walls and axis stay", () => {
  for (const { state } of cases) {
    for (const width of [288, 760]) {
      const plan = layout(state, width);
      const { plot, edges, tops, zones, ticks } = plan;
      const one = layout({ ...state, scale: 1 }, width);
      assert.deepEqual([one.zones, one.ticks], [zones, ticks]);
      assert.deepEqual(one.tops, tops);
      const moved = plan.each * Math.log2(state.scale);
      edges.forEach((x, i) => {
        const to = Math.max(one.edges[i] + moved, plot.left);
        const there = Math.min(to, plot.right);
        const free = one.edges[i] > plot.left && one.edges[i] < plot.right;
        assert.ok(!free || Math.abs(x - there) < 1e-6);
      });
      assert.deepEqual(zones.toSorted((a, b) => a - b), zones);
      const inside = within(plot);
      [...edges, ...zones].forEach((x) => inside({ x }));
      [...ticks, ...plan.axis.ticks].forEach(inside);
      tops.forEach((y) => inside({ y }));
    }
  }
});

test("a wall cuts a bar where it stands", () => {
  const plan = { edges: [0, 10, 20], tops: [5, 0], plot: { bottom: 8 } };
  assert.equal(bars(plan, 0, 15), "M0.0 8V5.0H10.0V8ZM10.0 8V0.0H15.0V8Z");
  assert.equal(bars(plan, 15, 40), "M15.0 8V0.0H20.0V8Z");
  assert.equal(bars(plan, 20, 40), "");
});

test("heights are shares of the gradients", () => {
  for (const { state } of cases) {
    const { plot, tops } = layout(state, 640);
    const { counts, gradients } = state.histogram;
    assert.equal(counts.reduce((a, b) => a + b), gradients);
    const most = Math.max(...counts);
    tops.forEach((y, i) => {
      const per = (plot.bottom - plot.top) / 1.04;
      const high = (per * counts[i]) / most; // what is there is seen
      const wanted = counts[i] ? Math.max(high, 3) : 0;
      assert.ok(Math.abs(plot.bottom - y - wanted) < 1e-6);
    });
  }
});
