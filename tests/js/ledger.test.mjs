import assert from "node:assert/strict";
import { test } from "node:test";

import {
  MOST,
  OPTIMIZERS,
  PRESETS,
  RECIPES,
  describe,
  layout,
  problem,
  sentence,
  step,
} from "../../src/membudget/widgets/ledger.mjs";
import { read, says, untouched } from "./grid.mjs";

const cases = read("ledger");
const tables = read("ledger-tables");
const state = (changes) => ({ ...tables.state, ...changes });
const preset = (name, changes) => {
  const names = "family vocabulary width depth heads kv_heads hidden tied";
  const traits = `${names} context`.split(" ");
  const shape = PRESETS[name].map((value, i) => [traits[i], value]);
  return state({ ...Object.fromEntries(shape), preset: name, ...changes });
};
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const live = ({ bytes }) => sum(bytes);
const some = cases.filter((_, i) => i % 4 === 0);

test("describe gives Python's numbers, to the byte", () => {
  for (const { state, numbers } of cases) {
    assert.deepEqual(describe(state), numbers, JSON.stringify(state));
  }
});

test("every moment of a step is Python's", () => {
  const small = cases.filter(({ moments }) => moments);
  assert.ok(small.length);
  for (const { state, moments } of small) {
    const ours = step(state)
      .moments.filter(({ phase }) => phase !== "optimizer")
      .map(({ name, block, phase, bytes }) => [
        block < 0 ? name.replace(/^[ .]/, "") : `blocks.${block}${name}`,
        phase,
        bytes,
      ]);
    assert.deepEqual(ours, moments);
  }
});

test("the sentence is Python's, to the letter", () => {
  for (const { state, sentence: expected } of cases) {
    assert.equal(sentence(state), expected);
  }
  says(cases.map((one) => one.sentence), [
    "1 block of ", " blocks of GPT-2’s kind, ", " of Llama’s kind, ",
    "Mistral 7B, ", " sequences of ", " tokens", "1 token",
    " micro-batches", ", every block checkpointed: ", "in the forward pass, ",
    "in the backward pass, at ", "in the optimizer’s step, and is ",
    "It fits the budget of ", "It does not fit ", "that does is ",
    "; not even one sequence does.",
  ]);
});

test("the grid holds what it has to", () => {
  const seen = (key) => new Set(cases.map(({ state }) => state[key]));
  for (const key of ["fused", "tied", "checkpointed", "foreach", "family"]) {
    assert.equal(seen(key).size, 2, key);
  }
  assert.equal(seen("recipe").size, Object.keys(RECIPES).length);
  assert.equal(seen("optimizer").size, Object.keys(OPTIMIZERS).length);
  assert.equal(seen("preset").size, Object.keys(PRESETS).length + 1);
  for (const steps of [1, 2, 3, 4]) assert.ok(seen("steps").has(steps));
  assert.ok(Math.max(...seen("depth")) === 80);
  const phases = new Set(cases.map(({ numbers }) => numbers.peak.phase));
  assert.deepEqual([...phases].sort().length, 4);
  const largest = cases.map(({ numbers }) => numbers.largest);
  assert.ok(largest.includes(0) && largest.some((n) => n > 1));
  assert.ok(largest.includes(null));
  const uneven = ({ state: { batch, steps } }) =>
    steps > 1 && batch % Math.ceil(batch / steps);
  assert.ok(cases.filter(uneven).length > cases.length / 10);
});

test("every number is whole", () => {
  for (const { state } of cases) {
    for (const { bytes } of step(state).moments) {
      assert.ok(bytes.every(Number.isSafeInteger));
      assert.ok(bytes.every((n) => n >= 0));
    }
  }
});

test("tables and limits are Python's", () => {
  assert.deepEqual(PRESETS, tables.presets);
  assert.deepEqual(RECIPES, tables.recipes);
  assert.deepEqual(OPTIMIZERS, tables.optimizers);
  assert.deepEqual(MOST, tables.most);
});

test("problem says what Python says", () => {
  assert.ok(tables.bad.length >= 10);
  for (const [state, said] of tables.bad) assert.equal(problem(state), said);
  for (const { state } of cases) assert.equal(problem(state), "");
});

test("the largest sizes keep every number whole", () => {
  const large = { depth: 256, heads: 1024, vocabulary: 2 ** 20 };
  const states = [
    state({ ...large, width: 2 ** 16, context: 2 ** 20, tokens: 2048 }),
    state({ ...large, width: 2048, tokens: 1024, fused: false, batch: 900 }),
    preset("Llama 3 70B", { tokens: 2 ** 20, batch: 64 }),
    state({ tokens: 1, batch: 2 ** 16, vocabulary: 2 ** 20 }),
    state({ tokens: 2 ** 20, context: 2 ** 20, heads: 1, batch: 1, width: 1,
      depth: 20, fused: false }),
  ];
  let most = 0;
  for (const start of states) {
    for (const recipe of ["autocast", "fp32"]) {
      let large = { ...start, recipe };
      while (problem(large)) {
        assert.match(problem(large), /2\*\*48/);
        large = { ...large, batch: Math.ceil(large.batch / 2) };
        if (problem(large) && large.batch === 1) {
          large = { ...large, depth: Math.ceil(large.depth / 2) };
        }
      }
      const { moments } = step(large);
      const peak = Math.max(...moments.map(live));
      assert.ok(peak < Number.MAX_SAFE_INTEGER, `${peak}`);
      most = Math.max(most, peak);
    }
  }
  assert.ok(most > 2 ** 47); // the limit is not far from what is allowed
});

test("one block more adds as much as the one before", () => {
  // step() walks through 4 and 5 blocks and knows every number of them.
  for (const { state } of some.filter((c) => c.state.depth > 6)) {
    const at = (depth) => describe({ ...state, depth, preset: "" });
    const [a, b] = [at(5).parameters, at(6).parameters];
    assert.equal(at(9).parameters, a + 4 * (b - a));
  }
});

test("the largest batch fits, and one sequence more does not", () => {
  const budgets = [2 ** 31, 15 * 2 ** 30, 80 * 2 ** 30];
  for (const budget of budgets) {
    for (const steps of [1, 2, 3, 7]) {
      for (const fused of [true, false]) {
        const given = state({ budget, steps, fused });
        const n = describe(given).largest;
        const peak = (batch) => describe({ ...given, batch }).peak.bytes;
        assert.ok(n === 0 || peak(n) <= budget);
        assert.ok(peak(n + 1) > budget, `${n} ${steps}`);
      }
    }
  }
});

test("the peak never falls with the batch", () => {
  for (const { state } of some.filter((_, i) => i % 4 === 0)) {
    let before = 0;
    for (let batch = 1; batch < 14; batch += 1) {
      const { bytes } = describe({ ...state, batch, budget: 0 }).peak;
      assert.ok(bytes >= before);
      before = bytes;
    }
  }
});

test("describe and layout leave the state as it is", () => {
  untouched(state({ budget: 2 ** 34 }), layout, describe, sentence);
});

test("bars are as long as what is alive, and inside the picture", () => {
  for (const { state, numbers } of some) {
    for (const width of [288, 358, 760]) {
      const { plot, bars, ticks, budget, height } = layout(state, width);
      assert.ok(plot.right <= width && plot.bottom < height);
      const scale = (bars[0].end - plot.left) / numbers.forward.bytes;
      assert.equal(bars.filter(({ peak }) => peak).length, 1);
      for (const { bar, parts, end, peak, y } of bars) {
        const length = (end - plot.left) / scale;
        assert.ok(Math.abs(length / numbers[bar].bytes - 1) < 1e-9);
        assert.equal(peak, numbers[bar].bytes === numbers.peak.bytes);
        assert.ok(end <= plot.right && y > plot.top && y < plot.bottom);
        let x = plot.left;
        for (const part of parts) {
          assert.ok(Math.abs(part.x - x) < 1e-6);
          const bytes = numbers[bar].split[part.category];
          assert.ok(Math.abs(part.width - bytes * scale) < 1e-6);
          x = part.x + part.width;
        }
        assert.ok(Math.abs(x - end) < 1e-6);
      }
      for (const { x } of ticks) assert.ok(x <= plot.right);
      assert.equal(budget === null, state.budget === 0);
      if (!budget) continue;
      const place = plot.left + state.budget * scale;
      assert.equal(budget.beyond, place > plot.right + 1e-6);
      if (!budget.beyond) assert.ok(Math.abs(budget.x - place) < 1e-6);
    }
  }
});

test("the budget's line is drawn where it is not far beyond the peak", () => {
  const peak = describe(state()).peak.bytes;
  const beyond = (share) => {
    const budget = Math.floor(share * peak);
    return layout(state({ budget }), 640).budget.beyond;
  };
  assert.deepEqual([0.1, 1, 2.4, 2.6].map(beyond), [false, false, false, true]);
});
