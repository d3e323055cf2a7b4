import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  layout,
  sentence,
} from "../../src/membudget/widgets/recipes.mjs";
import { read, says } from "./grid.mjs";

const cases = read("recipes");
const cardOf = ({ account, card }) =>
  account.cards.find(({ name }) => name === card);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

test("describe gives Python's peaks, and what a card has left", () => {
  for (const { state, parts } of cases) {
    const found = describe(state);
    assert.deepEqual(found.map((of) => of.parts), parts);
    for (const { bytes, parts, left } of found) {
      assert.equal(bytes, sum(parts));
      const card = cardOf(state);
      assert.equal(left, card ? card.usable - bytes : null);
    }
  }
});

test("the sentences say what there is to say", () => {
  const big = structuredClone(cases.find(({ state }) => state.card === "T4"));
  cardOf(big.state).usable = 10;
  says([...cases, big].map(({ state }) => sentence(state)), [
    "Batch 8: the peak is ", "Batch 32, checkpointed: ", " in fp32 and ",
    " The T4 has 14.1 GiB: fp32, autocast, bf16, master and ", ": none fits.",
    " master peaks in the optimizer’s step, on fp32", " under autocast, ",
  ]);
});

test("bars are as long as what is alive, over an axis that stays", () => {
  const axes = new Map();
  for (const { state, parts } of cases) {
    for (const width of [288, 640]) {
      const { plot, bars, ticks, limit } = layout(state, width);
      const whole = bars.find(({ beyond }) => !beyond);
      const each = whole && (whole.end - plot.left) / whole.bytes;
      bars.forEach((bar, i) => {
        assert.ok(bar.end <= plot.right + 1e-6);
        const end = bar.parts.reduce((x, part) => {
          assert.ok(Math.abs(part.x - x) < 1e-6);
          return part.x + part.width;
        }, plot.left);
        assert.ok(Math.abs(end - bar.end) < 1e-6);
        const size = (end - plot.left) / each;
        const wanted = sum(parts[i]);
        assert.ok(bar.beyond || Math.abs(size - wanted) < 1e-6 * wanted);
      });
      assert.equal(limit === null, state.card === "");
      const { card } = state;
      const key = `${width} ${card}`;
      axes.set(key, axes.get(key) ?? ticks);
      assert.deepEqual(ticks, axes.get(key));
    }
  }
});

test("what is beyond the axis is cut and marked", () => {
  const { state } = structuredClone(cases.at(-1));
  cardOf(state).usable = 1000;
  const { bars, plot, limit } = layout(state, 640);
  assert.ok(bars.every(({ beyond, end }) => beyond && end === plot.right));
  assert.ok(limit.x < plot.right);
});
