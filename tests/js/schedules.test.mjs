import assert from "node:assert/strict";
import { test } from "node:test";

import {
  barAt,
  crossed,
  describe,
  drawn,
  layout,
  nested,
  read as parse,
  result,
  revealed,
  sentence,
  spansOf,
  stageAt,
  written,
} from "../../src/membudget/widgets/schedules.mjs";
import {
  extraTime,
  momentAt,
  simulate,
} from "../../src/membudget/widgets/tape.mjs";
import { read, says, within } from "./grid.mjs";

const { machine, games, tables, lengths } = read("schedules");
const full = (state) => Object.freeze({ ...state, tables });
const states = games.map(({ state }) => full(state));
const near = (a, b) => assert.ok(Math.abs(a - b) < 1e-9, `${a} ${b}`);
const bare = (level) =>
  full({ level, segments: nested(lengths[level], []), label: "" });

test("the tape machine gives Python's moments, nested or not", () => {
  assert.ok(machine.length >= 500);
  const depths = new Set();
  for (const { chain, segments, moments, extra_time } of machine) {
    const found = simulate(chain, segments);
    const all = found.map(({ kind, stage, parts, extra, recomputed }) => {
      return [kind, stage, parts, extra, recomputed];
    });
    assert.deepEqual(all, moments, JSON.stringify(segments));
    assert.equal(extraTime(chain, found), extra_time);
    depths.add(Math.max(0, ...spansOf(segments).map((span) => span.height)));
  }
  assert.ok(depths.size >= 4);
  const all = machine.flatMap(({ moments }) => moments);
  assert.equal(new Set(all.map(([kind]) => kind)).size, 5);
  assert.ok(all.some(([, , parts]) => parts[4] < 0));
});

test("describe gives Python's numbers and words", () => {
  for (const [i, { numbers, said }] of games.entries()) {
    const n = describe(states[i]);
    const { won, ...rest } = numbers;
    assert.deepEqual(n.won, JSON.parse(won));
    for (const [key, value] of Object.entries(rest)) {
      assert.equal(n[key], value, key);
    }
    says([sentence(n)], said);
  }
});

test("the sentence names what is won, and the next medal", () => {
  const at = (level, spans) =>
    describe(full({ level, segments: parse(spans, lengths[level]) }));
  const said = (n, had) => sentence(n, had).split(". ").slice(-2).join(". ");
  const silver = at(16, "0-4.5-8.9-11.12-13");
  const next = "with 14 extra runs: silver. Next,";
  assert.match(said(silver), RegExp(`${next} gold: ≤ 6 units \\(nest deep`));
  const last = " platinum: ≤ 6 units (nest deeper).";
  assert.ok(said(silver, 3).endsWith(`${next}${last}`));
  assert.match(said(silver, 4), /: silver. All medals of this level are/);
  assert.match(sentence(at(9, "0-2.0-4.5-6")), /10 extra runs: platinum\.$/);
  const slow = at(9, "0-1.0-3.0-5");
  assert.match(said(slow), /extra runs: gold. Next, platinum: ≤ 10 extra runs\.$/);
  assert.match(said(at(16, "")), /^The peak is 17.* Next, bronze: ≤ 8 units.$/);
  assert.equal(result(silver), "16 stages: 7 units, 14 runs, silver");
  assert.equal(result(at(9, "0-0")), "9 stages: 10 units, 1 run");
  assert.match(result(at("boss", "")), /^The boss: 198 units, 0 passes$/);
});

test("segments and their spans are the same", () => {
  for (const [i, { segments }] of states.entries()) {
    const length = segments.flat(Infinity).length;
    assert.deepEqual(nested(length, spansOf(segments)), segments);
    assert.equal(written(segments), games[i].written);
    assert.deepEqual(parse(written(segments), length), segments);
  }
  assert.deepEqual(parse("4, 0-2  0-1", 5), [[[0, 1], 2], 3, [4]]);
  assert.deepEqual(parse("", 2), [0, 1]);
  for (const wrong of ["0-5", "3-2", "0-2.1-3", "a", "0-", "-1", "1.5-2.9"]) {
    assert.equal(parse(wrong, 5), undefined, wrong);
  }
});

test("no move makes segments that cross", () => {
  const segments = [[0, 1, [2, 3]], 4, [5]];
  const spans = spansOf(segments);
  const move = (from, to) => drawn(6, segments, { from, to });
  assert.deepEqual(crossed(spans, { from: 3, to: 4 }), spans[0]);
  assert.equal(move(3, 4), null);
  assert.equal(move(1, 2), null);
  assert.equal(move(0, 3), null); // is one already
  assert.deepEqual(move(0, 1), [[[0, 1], [2, 3]], 4, [5]]);
  assert.deepEqual(move(0, 5), [[[0, 1, [2, 3]], 4, [5]]]);
  assert.deepEqual(move(5, 5), [[0, 1, [2, 3]], 4, 5]);
  for (let from = 0; from < 6; from += 1) {
    for (let to = from; to < 6; to += 1) {
      const next = move(from, to) ?? segments;
      assert.deepEqual(next.flat(Infinity), [0, 1, 2, 3, 4, 5]);
    }
  }
});

test("everything is inside the picture, and does not move in a level", () => {
  for (const state of states) {
    for (const width of [288, 358, 760]) {
      const plan = layout(state, width, 3, bare(state.level));
      const [right, bottom] = [width, plan.height];
      const all = within({ left: 0, right, top: 0, bottom });
      const { strip } = plan;
      const long = within({ left: 0, right: right + strip.more, top: 0, bottom });
      assert.equal(strip.more > 0, width < 480 && strip.wide === 22);
      for (const { x, y, width, height } of strip.bars) {
        long({ x, y });
        long({ x: x + width, y: y + height });
        assert.ok(y > plan.form.bars - 1 && y + height < plan.form.cells);
      }
      const { step, axis, plane, ghost } = plan;
      const left = within(step.plot);
      step.bands.forEach(({ upper }) => upper.forEach((y) => left({ y })));
      [step.peak, ...axis.ticks].forEach(left);
      ghost.tops.forEach((y) => left({ y }));
      const score = within(plane.plot);
      [plane.now, ghost, ...plane.points, ...plane.goals].forEach(score);
      [...plane.axis.ticks, ...plane.ticks].forEach(score);
      const other = layout(bare(state.level), width);
      assert.deepEqual(plane.points, other.plane.points);
      assert.deepEqual(plane.goals, other.plane.goals);
      assert.deepEqual(axis.ticks, other.axis.ticks);
    }
  }
});

test("a finger finds each cell of a long strip, which moves to its ends", () => {
  const state = bare("36");
  for (const width of [288, 358]) {
    const { strip } = layout(state, width);
    assert.ok(strip.wide >= 22);
    near(strip.x(36), width - 2 + strip.more);
    for (let stage = 0; stage < 36; stage += 1) {
      let plan = layout(state, width);
      plan = layout(state, width, null, null, revealed(plan, stage));
      const middle = plan.strip.x(stage + 0.5);
      assert.ok(middle > 12 && middle < width - 12);
      assert.equal(stageAt(plan, middle), stage);
    }
    const end = layout(state, width, null, null, 9999).strip;
    near(end.x(36), width - 2);
    assert.equal(layout(state, width, null, null, -9).strip.gone, 0);
  }
  assert.equal(layout(state, 760).strip.more, 0);
});

test("a place is a stage, a moment, a bar", () => {
  const segments = parse("0-4.0-2.5-6", 9);
  const plan = layout(full({ level: 9, segments }), 640);
  for (let i = 0; i < 9; i += 1) {
    assert.equal(stageAt(plan, plan.strip.x(i + 0.5)), i);
  }
  assert.equal(stageAt(plan, -50), 0);
  assert.equal(stageAt(plan, 9999), 8);
  plan.n.moments.forEach((_, i) => {
    assert.equal(momentAt(plan.step, plan.step.middle(i)), i);
  });
  for (const { x, y, width, height, span } of plan.strip.bars) {
    const middle = { x: x + width / 2, y: y + height / 2 };
    assert.deepEqual(barAt(plan, middle).span, span);
  }
  assert.equal(barAt(plan, { x: 320, y: 400 }), undefined);
});
