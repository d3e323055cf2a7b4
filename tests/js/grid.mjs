import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

/* What Python answers: tests/widgets/test_javascript.py writes it. Nothing
   can change it: functions leave a state as it is. */
export const read = (name) =>
  JSON.parse(
    readFileSync(`${process.env.MB_GRID}/${name}.json`, "utf8"),
    (_, value) => Object.freeze(value),
  );

/* Each of the words is in one of the texts: the grid meets every branch. */
export function says(texts, words) {
  const missing = (word) => !texts.some((text) => text.includes(word));
  assert.deepEqual(words.filter(missing), []);
}

/* The functions leave the state as it is. */
export function untouched(state, ...functions) {
  const copy = structuredClone(state);
  for (const call of functions) call(state, 640);
  assert.deepEqual(state, copy);
}

/* Asserts that a point is within the axes; x or y alone will do. */
export const within = (plot) => ({ x = plot.left, y = plot.top }) => {
  assert.ok(x >= plot.left - 1e-6 && x <= plot.right + 1e-6, `x ${x}`);
  assert.ok(y >= plot.top - 1e-6 && y <= plot.bottom + 1e-6, `y ${y}`);
};
