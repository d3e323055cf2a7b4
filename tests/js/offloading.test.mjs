import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  lanes,
  layout,
  sentence,
} from "../../src/membudget/widgets/offloading.mjs";
import { read, says, untouched, within } from "./grid.mjs";

const cases = read("offloading");
const widths = [288, 358, 640, 900];
const near = (a, b) =>
  assert.ok(Math.abs(a - b) <= 1e-9 * Math.max(Math.abs(b), 1e-12), `${a} ${b}`);

test("describe gives Python's numbers, and leaves the state alone", () => {
  for (const { state, numbers } of cases) {
    const n = describe(state);
    for (const [key, wanted] of Object.entries(numbers)) {
      const [what, name] = key.split(".");
      if (wanted === 0) assert.equal(n[what][name], 0, key);
      else near(n[what][name], wanted);
    }
    untouched(state, describe, layout, sentence);
  }
});

test("lanes are Python's, piece by piece and byte by byte", () => {
  for (const { state, compute, link, on_card } of cases) {
    const run = describe(state)[state.what];
    for (const [ours, theirs] of [
      [run.compute, compute],
      [run.copies, link],
    ]) {
      assert.equal(ours.length, theirs.length);
      theirs.forEach(([block, kind, start, end], i) => {
        assert.deepEqual([ours[i].block, ours[i].kind], [block, kind]);
        near(ours[i].start, start);
        near(ours[i].end, end);
      });
    }
    assert.equal(run.moments.length, on_card.length);
    on_card.forEach(([moment, bytes], i) => {
      near(run.moments[i].moment, moment);
      assert.equal(run.moments[i].kept + run.moments[i].again, bytes);
    });
  }
});

test("the copies of three blocks or more hide from the least width on", () => {
  for (const { state } of cases) {
    for (const what of ["tapes", "checkpoints"]) {
      const { waited, least } = describe(state)[what];
      assert.equal(waited === 0, state.width >= least);
    }
  }
});

test("a single block copies nothing", () => {
  const run = lanes({ forward: 1, kept: 10, again: 0 }, 1, 1);
  assert.deepEqual([run.copies, run.waited, run.time], [[], 0, 3]);
});

test("sentences are Python's, and say each case", () => {
  for (const { state, said } of cases) {
    const words = sentence(state);
    assert.deepEqual(said.filter((word) => !words.includes(word)), []);
    assert.ok(words.length < 250, words);
  }
  says(cases.map(({ state }) => sentence(state)), [
    "The copies hide: forward and backward take no longer and keep",
    "The copies stick out", "Nothing moves", "they do at any width",
    "33 % longer, which is the second forward pass,",
    "of which 33 % are the second forward pass,", "they do from a width of",
    "they hide from a width of", "those of checkpoints at any width",
  ]);
});

test("everything stands within the axes, and no axis moves", () => {
  const still = new Map();
  for (const { state } of cases) {
    for (const width of widths) {
      const plan = layout(state, width);
      const { plot, ruler, height } = plan;
      const inside = within(plot);
      for (const box of [...plan.compute, ...plan.copies, ...plan.waits]) {
        inside({ x: box.x });
        inside({ x: box.x + box.width });
      }
      const { edges, kept, all, floor } = plan.memory;
      assert.equal(edges.length, all.length + 1);
      for (const x of edges) inside({ x });
      for (const y of [...floor, ...kept, ...all]) inside({ y });
      for (const { x } of ruler.bars) inside({ x });
      inside({ x: ruler.here });
      const marks = plan.marks.map(({ label, y }) => [label, y.toFixed(6)]);
      const times = plan.times.map(({ n, x }) => [n, x.toFixed(6)]);
      const axes = JSON.stringify({ plot, height, marks, times });
      assert.equal(axes, still.get(width) ?? axes);
      still.set(width, axes);
    }
  }
});

test("lengths are times, heights are bytes", () => {
  for (const { state } of cases) {
    const plan = layout(state, 640);
    const { plot, n, run, memory, beyond } = plan;
    const pass = plan.compute[0].width;
    near(pass, (plot.right - plot.left) / 40);
    assert.equal(beyond, run.time > 40 * n.nothing.forward);
    if (beyond) continue;
    for (const [i, { width }] of plan.copies.entries()) {
      const { start, end } = run.copies[i];
      assert.ok(
        Math.abs(width / pass - (end - start) / run.forward) < 1e-6,
      );
    }
    const gaps = plan.waits.reduce((sum, { width }) => sum + width, 0);
    assert.ok(Math.abs(gaps / pass - run.waited / run.forward) < 1e-6);
    const tape = plan.marks[0].y - plan.marks[1].y; // two of them
    const most = plot.bottom - Math.min(...memory.all);
    assert.ok(Math.abs(most / tape - run.peak / plan.tape / 2) < 1e-9);
    assert.ok(Math.abs(plan.end - plan.unhindered - gaps) < 1e-6);
  }
});
