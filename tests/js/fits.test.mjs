import assert from "node:assert/strict";
import { test } from "node:test";

import {
  costWords,
  describe,
  following,
  goals,
  layout,
  sentence,
} from "../../src/membudget/widgets/fits.mjs";
import { read, says } from "./grid.mjs";

const cases = read("fits");
const { state: start } = cases.find(
  ({ state }) => state.model === "Llama 3.2 1B" && state.card === "RTX 4090",
);

/* The value at "now.parameters". */
const inner = (found, key) =>
  key.split(".").reduce((of, name) => of[name], found);

test("the numbers and the words are Python's", () => {
  for (const { state, numbers, said } of cases) {
    const found = describe(state);
    for (const [key, wanted] of Object.entries(numbers)) {
      assert.ok(Math.abs(inner(found, key) - wanted) <= 1e-9 * wanted, key);
    }
    says([sentence(state)], said);
  }
});

test("what does not fit ends beyond the card, on an axis that stays", () => {
  const edges = new Map();
  for (const { state } of cases) {
    for (const width of [310, 740]) {
      const { edge, end, parts, plot, axis: { ticks } } = layout(state, width);
      assert.equal(end > edge, describe(state).over > 0);
      assert.ok(end <= plot.right && edge - plot.left > 0.2 * (width - 6));
      const filled = parts.reduce((sum, part) => sum + part.width, 0);
      assert.ok(Math.abs(plot.left + filled - end) < 1e-6);
      const axis = `${state.model} ${state.card} ${width}`;
      const stays = JSON.stringify([edge, ticks]);
      assert.equal(edges.get(axis) ?? stays, stays);
      edges.set(axis, stays);
    }
  }
});

test("where it fits, what is left to try is said, and what comes next", () => {
  for (const { state, least } of cases) {
    const n = describe(state);
    const [fewest, fastest] = least;
    assert.equal(goals(n) === "", n.over > 0);
    if (n.over) continue;
    const [fewer, faster] = [n.used > fewest, n.time > fastest];
    assert.equal(/with \d savings?\b/.test(goals(n)), fewer);
    assert.equal(/in \d+ % of/.test(goals(n)), faster);
    assert.equal(goals(n).startsWith("Nothing else"), !fewer && !faster);
  }
  const seen = [start];
  for (let then; (then = following(seen.at(-1))); ) {
    const [model, card] = then;
    seen.push({ ...seen.at(-1), model, card });
    assert.ok(describe(seen.at(-1)).fitting > 0);
  }
  assert.equal(seen.length, 3);
});

test("a cost is said as a reader would", () => {
  assert.equal(costWords(1.004), "same GPU time");
  assert.equal(costWords(1.277), "+28 % GPU time");
  assert.equal(costWords(1 / 11.83), "−92 % GPU time");
});
