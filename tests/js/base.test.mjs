import assert from "node:assert/strict";
import { test } from "node:test";

import {
  band,
  byteTicks,
  formatBytes,
  formatNumber,
  makeId,
  spread,
  stairs,
} from "../../src/membudget/widgets/base.mjs";

test("bytes in binary units", () => {
  assert.equal(formatBytes(0), "0 B");
  assert.equal(formatBytes(1023), "1023 B");
  assert.equal(formatBytes(1152), "1.13 KiB");
  assert.equal(formatBytes(10 * 1024), "10.0 KiB");
  assert.equal(formatBytes(2938048), "2.80 MiB");
  assert.equal(formatBytes(80e9), "74.5 GiB");
});

test("numbers with at most two decimals", () => {
  assert.equal(formatNumber(1), "1");
  assert.equal(formatNumber(25.6), "25.6");
  assert.equal(formatNumber(1.125), "1.13");
});

test("ids differ", () => {
  const ids = new Set(Array.from({ length: 100 }, makeId));
  assert.equal(ids.size, 100);
});

test("marks of an axis are round, few, and start at 0", () => {
  for (let max = 1; max < 1e14; max *= 1.37) {
    const { marks } = byteTicks(max);
    assert.equal(marks[0].value, 0);
    assert.ok(marks.length >= 3 && marks.length <= 6, `${max}`);
    assert.ok(marks.at(-1).value <= max);
    const step = marks[1].value;
    marks.forEach(({ value }, i) => {
      assert.ok(Math.abs(value - i * step) <= 1e-6 * max);
    });
    assert.ok(marks.every(({ label }) => label.length <= 5), `${max}`);
  }
  assert.equal(byteTicks(5 * 2 ** 20).unit, "MiB");
});

test("labels are spread, in order, and stay where there is room", () => {
  assert.deepEqual(spread([100, 10, 50], 20, 0, 200), [100, 10, 50]);
  assert.deepEqual(spread([10, 12], 20, 0, 200), [10, 30]);
  assert.deepEqual(spread([195, 199], 20, 0, 200), [180, 200]);
  assert.deepEqual(spread([-5, 3], 20, 0, 200), [0, 20]);
});

test("stairs leave out the steps that are none", () => {
  assert.equal(stairs([0, 1, 2, 3], [5, 5, 7]), "M0.0 5.0H2.0V7.0H3.0");
  assert.equal(stairs([2, 4], [1]), "M2.0 1.0H4.0");
});

test("a band goes back below", () => {
  const path = band([0, 1, 2], [9, 8], [5, 6]);
  assert.equal(path, "M0.0 5.0H1.0V6.0H2.0L2.0 8.0H1.0V9.0H0.0Z");
});
