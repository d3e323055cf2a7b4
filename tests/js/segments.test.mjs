import assert from "node:assert/strict";
import { test } from "node:test";

import {
  countAt,
  describe,
  layout,
  moved,
  sentence,
} from "../../src/membudget/widgets/segments.mjs";
import { momentAt } from "../../src/membudget/widgets/tape.mjs";
import { read, says, within } from "./grid.mjs";

const cases = read("segments");
const state = (changes) => ({
  chain: null,
  layers: 16,
  segments: 4,
  cuts: [],
  checkpoint: 1,
  split: "balanced",
  measured: {},
  label: "",
  ...changes,
});
const some = cases.filter((_, i) => i % 5 === 0);
const close = (a, b) => Math.abs(a - b) <= 1e-12 * Math.abs(b);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

test("the grid holds what it has to", () => {
  const chains = cases.filter(({ state }) => state.chain);
  const share = chains.length / cases.length;
  assert.ok(share > 0.3 && share < 0.7, `${share}`);
  assert.ok(cases.some(({ state }) => state.layers === 100));
  assert.ok(cases.some(({ state }) => state.cuts.length));
});

test("describe gives Python's numbers on the whole grid", () => {
  for (const { state, numbers } of cases) {
    const n = describe(state);
    const { measured = null, ...rest } = numbers;
    assert.equal(n.measured, measured);
    for (const [key, value] of Object.entries(rest)) {
      assert.deepEqual(n[key], value, key);
    }
    assert.ok(close(sum(Object.values(n.parts)), n.peak) || !n.peak);
    assert.equal(n.rest, n.layers - sum(n.sizes));
  }
});

test("√(L·a/c), where checkpoints cost something", () => {
  assert.equal(describe(state()).root, 4);
  const root = describe(state({ layers: 11, checkpoint: 0.35 })).root;
  assert.ok(close(root, Math.sqrt(11 / 0.35)));
  const free = [0, 8, 1, 1, 0, 0, 0, 0, 0, 0, 4];
  assert.equal(describe(state({ chain: [free, free], layers: 2 })).root, null);
});

test("the sentence says each case", () => {
  const said = cases.map(({ state }) => sentence(state));
  says([...said, sentence(state({ cuts: [5, 9, 12, 14], segments: 5 }))], [
    "1 layer in 1 segment (1 × 1)", " not checkpointed): ", " × ", " + 1 × ",
    "without checkpointing: the peak", " layers run again, ", "1 layer runs",
    "No layer runs again", "No stage runs again", " stages run again",
    "No number of equal segments has a lower peak.", ", with k = ", " to ",
    "Measured here: 1 unit.", " units.", " KiB.",
    "(5 + 4 + 3 + 2 + 2): the peak is 7 units",
    "That beats equal segments: 8 units, with k = 3 to 6",
  ]);
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
      const plan = layout(state, width, null, state);
      const { step, axis, plain, curve, layers } = plan;
      const inside = within(step.plot);
      for (const { lower, upper } of step.bands) {
        [...lower, ...upper].forEach((y) => inside({ y }));
      }
      step.edges.forEach((x) => inside({ x }));
      [step.peak, plain].forEach(inside);
      axis.ticks.forEach(inside);
      [...layers.cells, ...layers.cuts].forEach(({ x }) => inside({ x }));
      const below = within(curve.plot);
      [...curve.points, ...curve.best, ...curve.measured].forEach(below);
      [curve.now, ...curve.ticks, ...curve.axis.ticks].forEach(below);
      below({ x: curve.root ?? curve.plot.left });
    }
  }
});

test("bands are stacked from the axis up, as high as what is alive", () => {
  for (const { state } of some) {
    const { moments } = describe(state);
    const { step, axis } = layout(state, 640);
    const { bands, edges, plot } = step;
    assert.equal(edges.length, moments.length + 1);
    assert.ok(bands[0].lower.every((y) => y === plot.bottom));
    bands.slice(1).forEach(({ lower }, i) => {
      assert.deepEqual(lower, bands[i].upper);
    });
    bands.at(-1).upper.forEach((y, i) => {
      const alive = sum(moments[i].parts) / (state.chain ? 1 : 100);
      assert.ok(Math.abs(y - axis.y(alive)) <= 1e-6);
    });
  }
});

test("the axis stays while segments, and a few layers, are moved", () => {
  const ticks = (changes) =>
    layout(state(changes), 640).axis.ticks.map(({ y }) => y);
  for (let segments = 0; segments <= 16; segments += 1) {
    assert.deepEqual(ticks({ segments }), ticks({ segments: 1 }));
  }
  assert.deepEqual(ticks({ cuts: [5, 9] }), ticks({ segments: 1 }));
  assert.deepEqual(ticks({ layers: 12 }), ticks({ layers: 19 }));
});

test("phases cover the picture in order", () => {
  for (const { state } of some) {
    const { plot, phases } = layout(state, 640).step;
    let x = plot.left;
    for (const phase of phases) {
      assert.ok(Math.abs(phase.x - x) < 1e-6);
      x = phase.x + phase.width;
    }
    assert.ok(Math.abs(x - plot.right) < 1e-6);
    const names = phases.map(({ phase }) => phase);
    const count = (name) => names.filter((one) => one === name).length;
    assert.equal(names[0], "forward");
    assert.equal(count("forward"), 1);
    assert.equal(count("recomputation"), describe(state).sizes.length);
  }
});

test("a layer is filled while it has its tape", () => {
  const at = (moment) => layout(state({ layers: 4, segments: 2 }), 640, moment);
  const parts = (moment) => at(moment).layers.cells.map(({ part }) => part);
  const count = at(null).cursor.count;
  const words = (i) => at(i).cursor.words;
  const every = Array.from({ length: count }, (_, i) => words(i));
  assert.deepEqual(parts(0), ["", "", "", ""]);
  const again = every.indexOf("layer 3 runs again and keeps its tape");
  const last = "recomputation";
  assert.deepEqual(parts(again + 1), ["", "", last, last]);
  assert.equal(words(again + 2), "layer 4 goes backward");
  assert.deepEqual(parts(again + 2), ["", "", last, last]);
  assert.deepEqual(parts(again + 3), ["", "", last, ""]);
  const kept = (moment) => at(moment).layers.cuts[0].kept;
  assert.ok(kept(again) && !kept(0) && !kept(count - 1));
});

test("a cut goes where it is dragged, between its neighbours", () => {
  const plan = layout(state({ cuts: [4, 8, 12] }), 640);
  const { left, right } = plan.step.plot;
  const x = (layer) => left + ((right - left) * layer) / 16;
  assert.deepEqual(moved(plan, [4, 8, 12], 1, x(6.2)), [4, 6, 12]);
  assert.deepEqual(moved(plan, [4, 8, 12], 1, x(1)), [4, 5, 12]);
  assert.deepEqual(moved(plan, [4, 8, 12], 2, x(99)), [4, 8, 15]);
  assert.deepEqual(moved(plan, [4, 8, 12], 0, -50), [1, 8, 12]);
});

test("a place in the step is a moment", () => {
  const plan = layout(state(), 640);
  for (let i = 0; i < plan.cursor.count; i += 1) {
    assert.equal(momentAt(plan.step, plan.step.middle(i)), i);
  }
  assert.equal(momentAt(plan.step, -9), 0);
});

test("the mark stands at √(L·a/c), if there is room", () => {
  const { curve } = layout(state(), 640);
  const { left, right } = curve.plot;
  assert.ok(close(curve.root, left + (right - left) / 4));
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
