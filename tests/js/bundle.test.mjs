import assert from "node:assert/strict";
import { readdirSync } from "node:fs";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const GRID = process.env.MB_GRID; // tests/widgets/test_javascript.py writes it
const SOURCE = new URL("../../src/membudget/widgets/", import.meta.url);

for (const name of readdirSync(GRID).filter((file) => /\.mjs$/.test(file))) {
  test(`the composed ${name} is the same module`, async () => {
    const ours = await import(new URL(name, SOURCE));
    const composed = await import(pathToFileURL(`${GRID}/${name}`));
    assert.deepEqual(Object.keys(composed), Object.keys(ours));
    assert.equal(String(composed.default.render), String(ours.default.render));
    for (const [key, value] of Object.entries(ours)) {
      if (key === "default") continue;
      if (typeof value !== "function") assert.deepEqual(composed[key], value);
      else assert.equal(String(composed[key]), String(value), key);
    }
  });
}
