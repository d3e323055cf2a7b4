import assert from "node:assert/strict";
import { test } from "node:test";

import {
  BATCHES,
  batchAt,
  describe,
  largest,
  layout,
  sentence,
} from "../../src/membudget/widgets/ledger.mjs";
import { read, says } from "./grid.mjs";

const { tables, cases: bare } = read("ledger");
const cases = bare.map(({ state, numbers }) =>
  ({ state: Object.freeze({ ...state, tables }), numbers }));
const start = { ...cases[0].state, card: "T4", batch: 8, tokens: 1024,
  steps: 1, recipe: "fp32", optimizer: "adam", checkpointed: false };
const state = (changes) => ({ ...start, ...changes });
const peak = (changes) => describe(state(changes)).peak.bytes;

/* Without the rows' names, of which Python's may be another at a tie. */
function plain({ phase, ...numbers }) {
  const bars = ["forward", "backward", "update", "peak"];
  return Object.fromEntries(
    Object.entries(numbers).map(([key, value]) => {
      if (!bars.includes(key)) return [key, value];
      return [key, { split: value.split, bytes: value.bytes }];
    }),
  );
}

test("the rows give predict's bytes", () => {
  for (const { state, numbers } of cases) {
    const { tables, ...shown } = state;
    assert.deepEqual(plain(describe(state)), numbers, JSON.stringify(shown));
  }
});

test("the grid holds what it has to", () => {
  const seen = (key) => new Set(cases.map(({ state }) => state[key]));
  for (const key of ["checkpointed", "foreach"]) {
    assert.equal(seen(key).size, 2, key);
  }
  assert.equal(seen("recipe").size, 4);
  assert.equal(seen("optimizer").size, 5);
  assert.ok(seen("model").size >= 4 && seen("card").size === 3);
  const most = cases.map(({ numbers }) => numbers.largest);
  assert.ok(most.some((n) => n > 10) && most.includes(null));
  const phases = new Set(cases.map(({ state }) => describe(state).phase));
  assert.ok(phases.has("update") && phases.has("backward"));
});

test("the largest batch fits, and one sequence more does not", () => {
  for (const model of Object.keys(start.tables.models)) {
    for (const steps of [1, 2, 3, 7, 64]) {
      for (const gib of [1, 14, 79, 2000]) {
        const given = { model, steps, tokens: 512 };
        const budget = gib * 2 ** 30;
        const most = largest(state(given), budget);
        assert.ok(most === 0 || peak({ ...given, batch: most }) <= budget);
        assert.ok(peak({ ...given, batch: most + 1 }) > budget);
      }
    }
  }
});

test("every number is whole, and the peak never falls with the batch", () => {
  for (const model of Object.keys(start.tables.models)) {
    for (const recipe of ["fp32", "autocast"]) {
      const tokens = start.tables.models[model].tokens.at(-1);
      let before = 0;
      for (const batch of BATCHES) {
        const { bytes } = describe(state({ model, recipe, tokens, batch })).peak;
        assert.ok(Number.isSafeInteger(bytes) && bytes >= before);
        before = bytes;
      }
    }
  }
});

test("GPT-2 XL in fp32 does not fit an RTX 4090 with one sequence", () => {
  const given = { model: "GPT-2 XL 1.5B", card: "RTX 4090" };
  const n = describe(state({ ...given, batch: 1, tokens: 256 }));
  assert.equal(n.phase, "update");
  assert.equal((n.peak.bytes / 2 ** 30).toFixed(1), "29.0");
  assert.equal(n.largest, 0);
});

test("the sentence says what is there", () => {
  says(cases.map(({ state }) => sentence(state)), [
    "1 sequence of ", " sequences of ", " in 2 micro-batches need ",
    " at the peak, in the backward pass, at ", "in the optimizer’s step. ",
    "It fits the T4, which holds at most ",
    " at a time.",
  ]);
  const large = sentence(state({ model: "Llama 3 70B" }));
  assert.match(large, /does not fit the T4: not even one sequence does\.$/);
});

test("bars are as long as what is alive, and inside the picture", () => {
  for (const { state } of cases.filter((_, i) => i % 3 === 0)) {
    const n = describe(state);
    for (const width of [288, 358, 760]) {
      const { plot, top, bars, fill, beyond, edge, axis } =
        layout(state, width);
      assert.equal(beyond, n.peak.bytes > top);
      const long = plot.right - plot.left;
      const scale = (end) => (size) =>
        plot.left + (Math.min(size, end) * long) / end;
      const whole = scale(Math.max(top, n.peak.bytes));
      const near = (a, b) => assert.ok(Math.abs(a - b) < 1e-6);
      for (const [{ parts, end }, { split, bytes }, x] of [
        [fill, n.peak, scale(top)],
        ...bars.map((bar) => [bar, n[bar.phase], whole]),
      ]) {
        near(end, x(bytes));
        let size = 0;
        for (const { part, x: from, width: wide } of parts) {
          near(from, x(size));
          size += split[part];
          near(from + wide, x(size));
        }
        assert.equal(size, bytes);
      }
      assert.equal(edge === null, state.card === "none");
      assert.ok(axis.ticks.length > 1);
      for (const tick of axis.ticks) assert.ok(tick.x < plot.right);
    }
  }
});

test("the axis stays while the step changes", () => {
  for (const card of ["T4", "none"]) {
    const tops = [{}, { batch: 900 }, { tokens: 16 }, { recipe: "bf16" },
      { checkpointed: true }, { steps: 8 }, { optimizer: "sgd" }]
      .map((changes) => layout(state({ card, ...changes }), 640).top);
    assert.equal(new Set(tops).size, 1);
  }
});

test("a place in the picture is the sequences that reach it", () => {
  const plan = layout(state(), 760);
  for (const batch of [1, 2, 8, 14]) {
    const { fill } = layout(state({ batch }), 760);
    assert.equal(batchAt(start, plan, fill.end + 1e-6), batch);
  }
  assert.equal(batchAt(start, plan, -50), 1);
  assert.equal(batchAt(start, plan, plan.edge), describe(start).largest);
});
