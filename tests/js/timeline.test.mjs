import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  following,
  layout,
  momentAt,
  sentence,
} from "../../src/membudget/widgets/timeline.mjs";
import { read, within } from "./grid.mjs";

const { state: first, moments } = read("timeline");
const cases = moments.map(([where, numbers, said]) => ({
  state: Object.freeze({ ...first, ...where }),
  numbers,
  said,
}));
const example = (step, moment) => ({ ...first, step, moment });
const steps = first.steps.steps.map(({ label }) => example(label, 0));
const some = cases.filter((_, i) => i % 17 === 0);
const near = (a, b, place = "") => {
  const allowed = 1e-6 * Math.max(1, Math.abs(b));
  assert.ok(Math.abs(a - b) < allowed, `${place} ${a} ${b}`);
};

test("describe gives Python's numbers at every moment of every step", () => {
  for (const { state, numbers } of cases) {
    const n = describe(state);
    for (const key of Object.keys(numbers)) {
      assert.deepEqual(n[key], numbers[key], key);
    }
    const all = n.largest.reduce((bytes, group) => bytes + group.bytes, 0);
    assert.equal(all, numbers.now.total);
  }
});

test("the sentence holds Python's words, in three short sentences", () => {
  for (const { state, said } of cases) {
    const words = sentence(state);
    assert.deepEqual(said.filter((word) => !words.includes(word)), []);
    assert.ok(words.split(". ").length <= 3 && words.length < 330, words);
  }
});

test("a moment beyond the step, or a step that is gone, does no harm", () => {
  // So it is for an instant while a kernel changes both.
  const late = describe(example("plain", 600));
  assert.equal(late.moment, late.operators - 1);
  assert.equal(describe(example("gone", 3)).step, "plain");
  assert.equal(layout(example("plain", 3), 640, "gone").ghost, null);
});

test("everything is inside the picture, at every width", () => {
  for (const { state } of some) {
    for (const width of [288, 760]) {
      const all = layout(state, width, "accumulated");
      const inside = within(all.plot);
      for (const { lower, upper } of all.bands) {
        [...lower, ...upper].forEach((y) => inside({ y }));
      }
      for (const { edges, tops, peak } of [all, all.ghost ?? all]) {
        edges.forEach((x) => inside({ x }));
        tops.forEach((y) => inside({ y }));
        inside(peak);
      }
      all.phases.forEach(({ x, width }) => inside({ x: x + width }));
      [all.cursor, all.forwardEnd, ...all.axis.ticks].forEach(inside);
      const { boxes, floor } = all;
      for (const { x, width: wide } of boxes) {
        assert.ok(x >= 0 && x + wide <= width + 1e-6);
      }
      if (floor.length) near(floor.at(-1).upper[0], width);
      for (const { tensors } of boxes) {
        tensors.forEach(({ y, height }, i) => {
          const under = tensors[i - 1]?.y ?? 92;
          assert.ok(y >= 24 && y + height < under, `${y} ${height}`);
        });
      }
    }
  }
});

test("the axis stands still, and heights are proportional to bytes", () => {
  for (const { state, numbers } of some) {
    const { axis, cursor, forwardEnd, peak, bands } = layout(state, 640);
    const other = state.steps.steps.at(-1).label;
    const { axis: there } = layout({ ...state, step: other, moment: -1 }, 640);
    assert.deepEqual(axis.ticks, there.ticks);
    near(cursor.y, axis.y(numbers.now.total), "cursor");
    near(forwardEnd.y, axis.y(numbers.forward_end.total), "end of forward");
    near(peak.y, axis.y(numbers.peak.total), "peak");
    for (const { key, lower, upper } of bands) {
      const slot = state.moment + 1;
      const thick = axis.y(0) - axis.y(numbers.now[key]);
      near(lower[slot] - upper[slot], thick, key);
    }
  }
});

test("boxes and floor hold all that is alive", () => {
  for (const step of ["plain", "accumulated", "checkpointed"]) {
    for (let moment = -1; moment < 270; moment += 7) {
      const { boxes, always } = layout(example(step, moment), 640);
      const { largest, now } = describe(example(step, moment));
      const count = largest.reduce((all, group) => all + group.sizes.length, 0);
      const { optimizer, parameters, inputs } = now;
      assert.equal(always, optimizer + parameters + inputs);
      const stand = boxes.flatMap(({ tensors }) => tensors);
      const floor = largest
        .filter(({ operator }) => !operator)
        .reduce((all, group) => all + group.sizes.length, 0);
      assert.equal(stand.filter(({ freed }) => !freed).length, count - floor);
    }
  }
});

test("a tensor is new in the box of the module that makes it", () => {
  const { boxes } = layout(example("plain", 48), 640);
  assert.deepEqual(
    boxes.map(({ label }) => label),
    [...Array.from({ length: 15 }, (_, i) => String(i)), "loss", "step"],
  );
  const [running] = boxes.filter(({ runs }) => runs);
  assert.equal(running.label, "13");
  const made = running.tensors.find(({ born }) => born);
  assert.equal(made.category, "temporaries");
  const all = boxes.flatMap(({ tensors }) => tensors);
  assert.equal(all.filter(({ born }) => born).length, 1);
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
    }
    assert.equal(momentAt(plan, -100), -1);
    assert.equal(momentAt(plan, 1e4), edges.length - 3);
  }
});

test("to play goes to the end, by every phase and the peak", () => {
  for (const state of steps) {
    const last = describe(state).operators - 1;
    const seen = [-1];
    while (seen.at(-1) < last) {
      const there = { ...state, moment: seen.at(-1) };
      const next = following(layout(there, 640), describe(there));
      assert.ok(next > seen.at(-1) && next <= last);
      seen.push(next);
    }
    const { stops, peak_moment: peak } = describe(state);
    assert.ok(stops.includes(peak) && stops.length >= (last < 0 ? 1 : 2));
    assert.ok(stops.every((moment) => seen.includes(moment)));
    assert.ok(seen.length < 400);
  }
});

test("the phases follow each other without gaps, the step at the end", () => {
  const kinds = (step) => {
    const { phases, edges, plot } = layout(example(step, 0), 640);
    let from = edges[1];
    phases.forEach(({ x, width }) => {
      near(x, from);
      from = x + width;
    });
    near(from, plot.right);
    near(phases.at(-1).width, 0.2 * (plot.right - plot.left));
    return ["forward", "recomputation", "optimizer"].map(
      (name) => phases.filter(({ phase }) => phase === name).length,
    );
  };
  assert.deepEqual(kinds("plain"), [1, 0, 1]);
  assert.deepEqual(kinds("accumulated"), [4, 0, 1]);
  assert.deepEqual(kinds("checkpointed"), [1, 4, 1]);
});

test("who only looks on is not named", () => {
  for (const state of steps) {
    for (let moment = 0; moment < describe(state).operators; moment += 1) {
      const { operator, phase } = describe({ ...state, moment });
      assert.ok(!/^profiler|detach$/.test(operator), operator);
      assert.ok(phase);
    }
  }
});
