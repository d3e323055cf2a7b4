import assert from "node:assert/strict";
import { test } from "node:test";

import {
  countAt,
  describe,
  layout,
  sentence,
  simulate,
  sizesOf,
} from "../../src/membudget/widgets/segments.mjs";
import { read, says, untouched, within } from "./grid.mjs";

const cases = read("segments");
const state = (changes) => ({
  chain: null,
  layers: 16,
  segments: 4,
  checkpoint: 1,
  split: "balanced",
  measured: {},
  label: "",
  ...changes,
});
const some = cases.filter((_, i) => i % 5 === 0);
const close = (a, b) => Math.abs(a - b) <= 1e-12 * Math.abs(b);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

test("the tape machine gives Python's moments", () => {
  for (const { state, stages, moments, numbers } of cases) {
    const sizes = sizesOf(stages.length, state.segments, state.split);
    assert.deepEqual(sizes, numbers.sizes);
    assert.deepEqual(simulate(stages, sizes), moments);
  }
});

test("the grid holds what it has to", () => {
  const chains = cases.filter(({ state }) => state.chain);
  const kinds = new Set(
    cases.flatMap(({ moments }) => moments.map(({ kind }) => kind)),
  );
  const share = chains.length / cases.length;
  assert.ok(share > 0.3 && share < 0.7, `${share}`);
  assert.equal(kinds.size, 5);
  assert.ok(cases.some(({ state }) => state.layers === 100));
  assert.ok(cases.some(({ numbers }) => numbers.root === null));
  assert.ok(cases.some(({ moments }) => moments.some((m) => m.parts[4] < 0)));
  const phases = new Set(cases.map(({ numbers }) => numbers.phase));
  assert.equal(phases.size, 3);
});

test("describe gives Python's numbers on the whole grid", () => {
  for (const { state, numbers } of cases) {
    const n = describe(state);
    const root = n.root === numbers.root || close(n.root, numbers.root);
    assert.ok(root, `${n.root} ${numbers.root}`);
    assert.deepEqual({ ...n, root: 0 }, { ...numbers, root: 0 });
  }
});

test("the sentence is Python's, to the letter", () => {
  for (const { state, sentence: expected } of cases) {
    assert.equal(sentence(state), expected);
  }
  says(cases.map((one) => one.sentence), [
    "1 layer in 1 segment (1 × 1)", " not checkpointed): ", " × ", " + 1 × ",
    "without checkpointing: the peak", " layers run again, ", "1 layer runs",
    "No layer runs again", "No stage runs again", " stages run again",
    "No number of segments has a lower peak.", ", with k = ", " to ",
    "Measured here: 1 unit.", "Measured here: ", " units.", " KiB.",
  ]);
  const measured = ({ sentence }) => sentence.includes("Measured");
  assert.ok(!cases.every(measured));
});

test("describe and layout leave the state as it is", () => {
  untouched(some.at(-1).state, layout, describe);
});

test("more segments than layers do no harm", () => {
  // So it is for an instant while a kernel changes both.
  const late = describe(state({ layers: 3, segments: 9 }));
  assert.equal(late.segments, 3);
  const gone = layout(state({ layers: 3, measured: { 2: 3, 16: 17 } }), 640);
  assert.equal(gone.curve.measured.length, 1);
});

test("chains of equal lengths do not share a curve", () => {
  const row = [4, 6, 1, 1, 0, 0, 0, 4, 4, 0, 4];
  const other = [...row];
  other[1] = 60;
  const one = describe(state({ chain: [row, row, row], layers: 3 }));
  const two = describe(state({ chain: [row, row, other], layers: 3 }));
  const mid = describe(state({ layers: 3, checkpoint: 0.4 }));
  assert.notDeepEqual(one.curve, two.curve);
  assert.deepEqual(one.curve.map((peak) => peak / 10), mid.curve);
  assert.notDeepEqual(describe(state({ layers: 3 })).curve, mid.curve);
});

test("everything is inside the picture, at every width", () => {
  for (const { state } of some) {
    for (const width of [288, 358, 760]) {
      const { plot, passes, curve, ticks } = layout(state, width);
      const inside = within(plot);
      for (const { lower, upper } of passes.bands) {
        [...lower, ...upper].forEach((y) => inside({ y }));
      }
      passes.edges.forEach((x) => inside({ x }));
      [passes.peak, passes.plain, curve.now].forEach(inside);
      [...curve.points, ...curve.best, ...curve.measured].forEach(inside);
      [...ticks, ...curve.ticks, curve.root ?? {}].forEach(inside);
    }
  }
});

test("bands are stacked from the axis up, as high as what is alive", () => {
  for (const { state, moments } of some) {
    const { plot, passes, perSize } = layout(state, 640);
    const unit = state.chain ? 1 : 100;
    const { bands, edges } = passes;
    assert.equal(edges.length, moments.length + 1);
    assert.ok(bands[0].lower.every((y) => y === plot.bottom));
    bands.slice(1).forEach(({ lower }, i) => {
      assert.deepEqual(lower, bands[i].upper);
    });
    bands.forEach(({ lower, upper }) => {
      upper.forEach((y, i) => assert.ok(y <= lower[i] + 1e-9));
    });
    bands.at(-1).upper.forEach((y, i) => {
      const size = (plot.bottom - y) / perSize;
      const alive = sum(moments[i].parts) / unit;
      assert.ok(Math.abs(size - alive) <= 1e-6 * Math.max(1, alive));
    });
  }
});

test("phases cover the picture in order", () => {
  for (const { state } of some) {
    const { plot, passes } = layout(state, 640);
    let x = plot.left;
    for (const phase of passes.phases) {
      assert.ok(Math.abs(phase.x - x) < 1e-6);
      x = phase.x + phase.width;
    }
    assert.ok(Math.abs(x - plot.right) < 1e-6);
    const names = passes.phases.map(({ phase }) => phase);
    const again = describe(state).sizes.length;
    const count = (name) => names.filter((one) => one === name).length;
    assert.equal(names[0], "forward");
    assert.equal(count("forward"), 1);
    assert.equal(count("recomputation"), again);
  }
});

test("recomputed tapes are what is there after the first recomputation", () => {
  const { passes } = layout(state({ split: "pytorch" }), 640);
  const thick = (name) => {
    const { lower, upper } = passes.bands.find(({ part }) => part === name);
    return lower.map((y, i) => y - upper[i] > 1e-9);
  };
  const [first, again] = [thick("tapes"), thick("recomputed")];
  const starts = passes.phases.find(({ phase }) => phase === "recomputation").x;
  const begin = passes.edges.findIndex((x) => Math.abs(x - starts) < 1e-6);
  assert.ok(begin > 0);
  assert.ok(first.lastIndexOf(true) < begin);
  assert.equal(again.indexOf(true), begin);
});

test("the mark stands at √(L·a/c), if there is room", () => {
  const { plot, curve } = layout(state(), 640);
  assert.ok(close(curve.root.x, plot.left + (plot.right - plot.left) / 4));
  assert.deepEqual(curve.best, [3, 4, 5, 6].map((k) => curve.points[k]));
  const cheap = layout(state({ layers: 4, checkpoint: 0.1 }), 640);
  assert.equal(cheap.curve.root, null);
});

test("a place in the curve is the nearest number of segments", () => {
  for (const layers of [1, 16, 100]) {
    const plan = layout(state({ layers }), 640);
    plan.curve.points.forEach(({ x }, k) => assert.equal(countAt(plan, x), k));
    assert.equal(countAt(plan, -50), 0);
    assert.equal(countAt(plan, 900), layers);
  }
});

test("ticks of the curve are whole numbers, apart from each other", () => {
  for (let layers = 1; layers <= 100; layers += 1) {
    for (const width of [288, 760]) {
      const { ticks } = layout(state({ layers, segments: 1 }), width).curve;
      assert.ok(ticks.length >= 2);
      ticks.slice(1).forEach(({ x }, i) => assert.ok(x - ticks[i].x > 24));
    }
  }
});
