import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  layout,
  modelName,
  peaks,
  problem,
  read,
  sentence,
} from "../../src/membudget/widgets/yours.mjs";
import { read as readGrid, says } from "./grid.mjs";

const cases = readGrid("yours");
const [{ state: start }] = cases;
const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

test("the numbers and the words are Python's", () => {
  for (const { state, numbers, said } of cases) {
    const found = { ...peaks(state), budget: describe(state).budget };
    for (const [key, wanted] of Object.entries(numbers)) {
      assert.equal(found[key.replace("peaks.", "")], wanted);
    }
    says([sentence(state)], said);
  }
});

test("a bar's parts are its peak, and it ends where the axis says", () => {
  for (const { state } of cases) {
    for (const width of [310, 740]) {
      const { bars, plot, edge } = layout(state, width);
      assert.ok(edge > plot.left && edge < plot.right);
      for (const { parts, peak, runs, fits, beyond } of bars) {
        assert.equal(sum(parts), peak);
        const end = plot.left + runs.reduce((s, { width }) => s + width, 0);
        assert.ok(end <= plot.right + 1e-6);
        assert.equal(beyond || end > edge, !fits);
      }
    }
  }
});

test("the longest sequence is the longest that fits", () => {
  for (const { state } of cases) {
    const { longest, budget } = describe(state);
    const least = (tokens) =>
      Math.min(...Object.values(peaks({ ...state, tokens })));
    if (longest) assert.ok(least(longest) <= budget);
    if (longest < 2 ** 20) assert.ok(least(longest + 64) > budget);
  }
});

test("where nothing fits, what is named fits", () => {
  const config = new Map(start.tables.choices).get("Llama 3.1 8B");
  const state = { ...start, config, train: "lora", card: "RTX 3060" };
  const n = describe({ ...state, tokens: 2048, batch: 8 });
  assert.equal(n.first, null);
  assert.equal(n.other.key, "qlora");
  assert.ok(n.other.peak <= n.budget);
  assert.ok(state.tables.cards[n.larger] >= n.smallest.peak);
  const words = sentence({ ...state, tokens: 2048, batch: 8 });
  assert.match(words, /What would fit: QLoRA \(.* GiB\).* or a card/);
});

test("a config that is not understood gets a sentence", () => {
  const { tables } = start;
  for (const [text, why] of [
    ["", "no JSON"],
    ["{} {}", "no JSON"],
    ["[]", "no { … }"],
    ["{}", 'no "model_type"'],
    ['{"model_type": "clip"}', '"clip" is not known here'],
    ['{"model_type": "toString"}', "is not known here"],
    ['{"model_type": "llama", "vocab_size": 9}', "lacks hidden_size"],
  ]) {
    const { wrong } = read(tables, text);
    assert.ok(wrong.includes(why) && wrong.endsWith("."), text);
  }
  const whole = JSON.parse(new Map(tables.choices).get("Phi-4"));
  const odd = JSON.stringify({ ...whole, hidden_act: "gelu" });
  assert.match(read(tables, odd).wrong, /^Hidden_act is "gelu".*membudget fits/);
  assert.equal(modelName({ tables, ...read(tables, JSON.stringify(whole)) }), "Phi-4");
});

test("what there are no rows for is said", () => {
  const rank = { ...start, train: "qlora", rank: 1024 };
  assert.equal(problem({ ...rank, train: "half" }), "");
  const config = JSON.stringify({ ...JSON.parse(start.config), head_dim: 2 });
  assert.match(problem({ ...rank, config }), /wide: use a rank up to that/);
});
