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
const near = (a, b) => assert.ok(Math.abs(a - b) < 1e-6 * (1 + b), `${a} ${b}`);

test("describe gives Python's peaks, and what the card has left", () => {
  for (const { state, parts } of cases) {
    const found = describe(state);
    assert.deepEqual(found.map((of) => of.parts), parts);
    for (const { bytes, parts, left } of found) {
      assert.equal(bytes, sum(parts));
      assert.equal(left, cardOf(state).usable - bytes);
    }
  }
});

test("a tile is there where its part is, but a copy that is made again", () => {
  for (const { state } of cases) {
    for (const { tiles, parts, recipe, phase } of describe(state)) {
      const [weight, copy, gradient] = tiles.map(({ there }) => there);
      assert.ok(weight);
      assert.equal(gradient, parts[1] > 0);
      const kept = !state.checkpointed && phase === "backward";
      assert.equal(copy, recipe === "autocast" && kept);
      assert.ok(tiles.every(({ bytes, there }) => bytes || !there));
    }
  }
});

test("the sentences say what there is to say", () => {
  says(cases.map(({ state }) => sentence(state)), [
    "fp32, batch 8: each of a weight’s", "autocast, batch 32, checkpointed: ",
    "no tile halves, and the 16-bit", "the weight halves, and the fp32 copy",
    " it fits, ", " too much", "use fp16, same bytes.", ": it emulates it.",
    "At the peak, Adam’s update, on fp32 copies of the gradients, no ",
    "At the peak, Adam’s update, no ", "Activations take 82 % of fp32’s, ",
  ]);
});

test("what is in the card is as long as it is large, and so is a tile", () => {
  const axes = new Map();
  for (const { state } of cases) {
    for (const width of [288, 640]) {
      const plan = layout(state, width);
      const { plot, edge, end, parts, sizes, beyond, axis, ends } = plan;
      const each = (edge - plot.left) / cardOf(state).usable;
      parts.reduce((x, part, i) => {
        near(part.x, x);
        if (!beyond) near(part.width, each * sizes[i]);
        return part.x + part.width;
      }, plot.left);
      near(parts.at(-1).x + parts.at(-1).width, end);
      assert.ok(end <= plot.right + 1e-6 && beyond === (end === plot.right));
      assert.equal(ends[state.account.batches.indexOf(state.batch)], end);
      for (const { there, lands, part, bytes, squares } of plan.tiles) {
        assert.equal(squares.length, bytes);
        assert.equal(there, lands !== null);
        const of = parts.find((one) => one.part === part);
        const last = there && lands.x + lands.width;
        if (there && !beyond) near(lands.width, each * bytes * plan.weights);
        if (there) assert.ok(lands.x >= of.x && last <= of.x + of.width + 0.1);
      }
      const key = `${width} ${state.card}`;
      axes.set(key, axes.get(key) ?? axis);
      assert.deepEqual(axis, axes.get(key));
    }
  }
});

test("no square of a tile covers another, and all are in the picture", () => {
  const { state } = cases[0];
  for (const width of [288, 640]) {
    const { tiles, plot } = layout(state, width);
    const squares = tiles.flatMap((of) => of.squares);
    const places = new Set(squares.map(({ x, y }) => `${x} ${y}`));
    assert.equal(places.size, squares.length);
    for (const { x, y } of squares) {
      assert.ok(x >= 0 && x + 22 <= width && y >= 0 && y + 22 <= plot.top);
    }
  }
});
