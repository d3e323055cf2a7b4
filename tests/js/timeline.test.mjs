import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  envelope,
  layout,
  momentAt,
  sentence,
} from "../../src/membudget/widgets/timeline.mjs";
import { read, says, untouched, within } from "./grid.mjs";

const groups = read("timeline");
const cases = groups.flatMap(({ state, moments }) =>
  moments.map(({ step, moment, numbers, sentence }) => ({
    state: { ...state, step, moment },
    numbers,
    sentence,
  })),
);
const example = (step, moment) => ({ ...groups[0].state, step, moment });
const steps = groups.flatMap(({ state }) =>
  state.steps.steps.map(({ label }) => ({ ...state, step: label, moment: 0 })),
);
const near = (a, b, place = "") => {
  const allowed = 1e-6 * Math.max(1, Math.abs(b));
  assert.ok(Math.abs(a - b) < allowed, `${place} ${a} ${b}`);
};

test("describe gives Python's numbers at every moment of every step", () => {
  for (const { state, numbers } of cases) {
    assert.deepEqual(describe(state), numbers);
  }
});

test("the sentence is Python's, to the letter", () => {
  for (const { state, sentence: expected } of cases) {
    assert.equal(sentence(state), expected);
  }
  says(cases.map((one) => one.sentence), [
    "before the first operator. ", " of module 13, in the backward pass. ",
    " outside of the model, in the forward pass", " of the optimizer step. ",
    " of blocks.1.", " of module 11, in the recomputation", ", the peak. ",
    " below the peak of ", "This is the end of the forward pass.",
    "That is ", " more than at the end", " less than at the end",
    "As much as at the end of the forward pass",
    "recomputed activations +", "gradients +", "activations −",
  ]);
});

test("describe and layout leave the state as it is", () => {
  untouched(example("checkpointed", 100), layout, describe);
});

test("a moment beyond the step, or a step that is gone, does no harm", () => {
  // So it is for an instant while a kernel changes both.
  const late = describe(example("plain", 600));
  assert.equal(late.moment, late.operators - 1);
  assert.equal(describe(example("gone", 3)).step, "plain");
});

test("everything is inside the picture, at every width", () => {
  for (const state of steps) {
    for (const width of [288, 358, 760]) {
      const all = layout(state, width);
      const { plot } = all;
      const inside = within(plot);
      for (const { lower, upper } of all.bands) {
        [...lower, ...upper].forEach((y) => inside({ y }));
      }
      for (const { edges, heights, peak } of all.outlines) {
        edges.forEach((x) => inside({ x }));
        heights.forEach((y) => inside({ y }));
        inside(peak);
      }
      all.phases.forEach(({ x, width }) => inside({ x: x + width }));
      all.ticks.forEach(inside);
      [all.cursor, all.forwardEnd].forEach(inside);
    }
  }
});

test("heights are proportional to bytes, on one scale for all steps", () => {
  for (const { state, numbers } of cases.filter((_, i) => i % 17 === 0)) {
    const { plot, perByte, cursor, forwardEnd, outlines } = layout(state, 640);
    const bytes = ({ y }) => (plot.bottom - y) / perByte;
    near(bytes(cursor), numbers.now.total, "cursor");
    near(bytes(forwardEnd), numbers.forward_end.total, "end of forward");
    for (const { label, peak, heights } of outlines) {
      near(bytes(peak), numbers.peaks[label], label);
      near(bytes({ y: Math.min(...heights) }), numbers.peaks[label], label);
    }
  }
});

test("bands are stacked without gaps, from the axis to the total", () => {
  for (const state of steps) {
    const { plot, bands, ours, perByte } = layout(state, 640);
    const top = bands.reduce((floor, { lower, upper }) => {
      assert.deepEqual(lower, floor);
      upper.forEach((y, i) => assert.ok(y <= lower[i] + 1e-9));
      return upper;
    }, ours.heights.map(() => plot.bottom));
    top.forEach((y, i) => near(y, ours.heights[i]));
    assert.ok(bands.length || perByte > 0);
  }
});

test("a band is as thick as its category has bytes", () => {
  for (const { state, numbers } of cases.filter((_, i) => i % 29 === 0)) {
    const { bands, perByte } = layout(state, 640);
    const slot = numbers.moment + 1;
    const shown = Object.fromEntries(
      bands.map(({ category, lower, upper }) => [
        category,
        lower[slot] - upper[slot],
      ]),
    );
    for (const [category, bytes] of Object.entries(numbers.now)) {
      if (category === "total") continue;
      near(shown[category] ?? 0, bytes * perByte, category);
    }
  }
});

test("moments stand in order, and each can be found by its place", () => {
  for (const state of steps) {
    const plan = layout(state, 640);
    const { edges, plot } = plan;
    assert.equal(edges.length, describe(state).operators + 2);
    near(edges[0], plot.left);
    near(edges.at(-1), plot.right);
    for (let slot = 0; slot + 1 < edges.length; slot += 1) {
      assert.ok(edges[slot + 1] > edges[slot]);
      const middle = (edges[slot] + edges[slot + 1]) / 2;
      assert.equal(momentAt(plan, middle), slot - 1);
      if (slot % 13) continue;
      near(layout({ ...state, moment: slot - 1 }, 640).cursor.x, middle);
    }
    assert.equal(momentAt(plan, -100), -1);
    assert.equal(momentAt(plan, 1e4), edges.length - 3);
  }
});

test("moments stand where Python's picture has them", () => {
  for (const { state, edges } of groups) {
    for (const [step, expected] of Object.entries(edges)) {
      const plan = layout({ ...state, step, moment: -1 }, 640);
      const { left, right } = plan.plot;
      assert.equal(plan.edges.length, expected.length);
      plan.edges.forEach((x, i) => {
        near((x - left) / (right - left), expected[i]);
      });
    }
  }
});

test("an outline is never below what it stands for, and as high", () => {
  for (const state of steps) {
    for (const outline of layout(state, 358).outlines) {
      const [edges, heights] = envelope(outline);
      assert.equal(edges.length, heights.length + 1);
      near(edges[0], outline.edges[0]);
      near(edges.at(-1), outline.edges.at(-1));
      heights.forEach((height, i) => {
        const last = i === heights.length - 1;
        assert.ok(last || edges[i + 1] - edges[i] >= 6);
        const under = outline.heights.filter((_, k) => {
          const x = outline.edges[k];
          return x >= edges[i] && x < edges[i + 1];
        });
        assert.equal(height, Math.min(...under)); // y grows downwards
      });
    }
  }
});

test("the optimizer step begins at the same place in all steps", () => {
  const places = ["plain", "accumulated", "checkpointed"].map((step) => {
    const { phases, plot } = layout(example(step, 0), 640);
    const last = phases.at(-1);
    assert.equal(last.phase, "optimizer");
    near(last.x + last.width, plot.right);
    assert.ok(last.width <= 0.22 * (plot.right - plot.left) + 1e-6);
    return last.x;
  });
  near(places[1], places[0]);
  near(places[2], places[0]);
});

test("the phases follow each other without gaps", () => {
  for (const state of steps) {
    const { phases, edges } = layout(state, 640);
    let from = edges[1];
    phases.forEach(({ phase, x, width }, i) => {
      near(x, from);
      from = x + width;
      assert.notEqual(phase, phases[i - 1]?.phase);
    });
    if (phases.length) near(from, edges.at(-1));
  }
});

test("the steps differ as they should", () => {
  const kinds = (step) => {
    const { bands, phases } = layout(example(step, 0), 640);
    return [
      bands.some(({ category }) => category === "recomputation"),
      phases.filter(({ phase }) => phase === "forward").length,
      phases.filter(({ phase }) => phase === "recomputation").length,
    ];
  };
  assert.deepEqual(kinds("plain"), [false, 1, 0]);
  assert.deepEqual(kinds("accumulated"), [false, 4, 0]);
  assert.deepEqual(kinds("checkpointed"), [true, 1, 4]);
});
