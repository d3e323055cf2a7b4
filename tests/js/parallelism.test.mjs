import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  layout,
  moved,
  parse,
  rankAt,
  replay,
  sentence,
  written,
} from "../../src/membudget/widgets/parallelism.mjs";
import { read } from "./grid.mjs";

const { tables, cases } = read("parallelism");
const full = (state) => Object.freeze({ ...state, tables });
const near = (a, b) => assert.ok(Math.abs(a - b) < 1e-9, `${a} ${b}`);

test("describe gives Python's numbers, times and bytes", () => {
  for (const { state, numbers, starts, loads, said } of cases) {
    const n = describe(full(state));
    assert.deepEqual(n.run.starts, starts);
    assert.deepEqual(n.loads, loads);
    assert.equal(n.run.time, numbers.time);
    near(n.run.bubble, numbers.bubble);
    assert.deepEqual(n.won, JSON.parse(numbers.won));
    for (const { name, bubble, tapes } of n.points) {
      near(bubble, numbers[`bubble.${name}`]);
      assert.equal(tapes, numbers[`worst.${name}`]);
    }
    const words = sentence(full(state));
    assert.deepEqual(said.filter((word) => !words.includes(word)), []);
  }
});

test("what a rank has within an operation is what Python says", () => {
  for (const { state, starts, loads } of cases) {
    const n = describe(full(state));
    starts.forEach((row, rank) =>
      row.forEach((start, i) => {
        const middle = (start + n.run.ends[rank][i]) / 2;
        const { running, load } = rankAt(n, rank, middle);
        assert.equal(running, n.rows[rank][i]);
        assert.equal(load, loads[rank][i]);
      }),
    );
  }
});

test("an order of chance runs as in Python, or waits for the same", () => {
  let stuck = 0;
  for (const { state, order, moved: theirs, waits } of cases) {
    const n = describe(full({ ...state, order: "" }));
    const run = replay(parse(order, n.rows), { F: 1, B: 2, I: 1, W: 1 });
    stuck += run.waits.length > 0;
    if (theirs) {
      assert.deepEqual(run.starts, theirs.starts);
      assert.deepEqual(run.held, theirs.held);
      assert.equal(run.time, theirs.time);
    } else {
      const words = run.waits.map((one) => one.words).join("; ");
      assert.ok(waits.includes(words), waits);
    }
  }
  assert.ok(stuck > 10 && stuck < cases.length - 10);
});

test("an order and its text are the same", () => {
  for (const { state } of cases) {
    const { rows } = describe(full(state));
    assert.equal(written(parse(written(rows), rows)), written(rows));
    assert.equal(parse(`${written(rows)}F0`, rows), undefined);
    const other = moved(rows, 0, 0, 1);
    assert.deepEqual(other[0].slice(0, 2), [rows[0][1], rows[0][0]]);
  }
});

test("everything stands within the picture", () => {
  for (const { state } of cases) {
    for (const width of [288, 640]) {
      const plan = layout(full(state), width);
      const ends = plan.rows.flatMap(({ boxes }) =>
        boxes.map((box) => box.x + box.width),
      );
      assert.ok(Math.max(...ends) <= plan.right + 1e-6);
      assert.ok(plan.end <= plan.right + 1e-6 && plan.ideal <= plan.end + 1e-6);
    }
  }
});

test("the axis grows for an order that takes longer", () => {
  const row = "F0B0F1B1F2B2F3B3";
  const { state } = cases.find((one) => one.state.schedule === "level 1");
  const plan = layout(full({ ...state, order: `${row}.${row}` }), 640);
  assert.equal(plan.n.run.time, 24);
  assert.ok(plan.whole === 24 && plan.end === plan.right);
});
