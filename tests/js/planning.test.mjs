import assert from "node:assert/strict";
import { test } from "node:test";

import {
  budgetAt,
  CAUSES,
  codeOf,
  describe,
  gapWords,
  layout,
  momentOf,
  peakOf,
  planText,
  pointAt,
  sentence,
  spaceOf,
  timeOf,
} from "../../src/membudget/widgets/planning.mjs";
import { read, untouched } from "./grid.mjs";

const [{ tables, searches, plans }] = read("planning");
const whole = (state) => ({ ...state, tables });
const start = whole({ ...searches[0].state, model: "small GPT",
  card: "T4", ranks: 1, budget: 0, batch: 16, recipe: "fp32",
  tokens: tables.models["small GPT"].tokens.at(-1),
  trained: "all", optimizer: "adam", stage: "any", chunks: "any", checkpointed: "any",
  micro: 0, pick: 0 });
const near = (a, b, why) =>
  assert.ok(Math.abs(a - b) <= 1e-9 * Math.max(1, Math.abs(b)), why);
const close = (a, b, why) => assert.ok(Math.abs(a / b - 1) <= 1e-9, why);

test("a plan's peak and time are Python's", () => {
  for (const { state, plan, peak, seconds } of plans) {
    const space = spaceOf(whole(state));
    const why = JSON.stringify({ state, plan });
    assert.equal(peakOf(space, plan), peak, why);
    assert.equal(momentOf(space, plan).bytes, peak, why);
    close(timeOf(space, plan), seconds, why);
  }
});

test("the search finds Python's plans", () => {
  for (const { state, numbers } of searches) {
    const n = describe(whole(state));
    const why = JSON.stringify(state);
    for (const key of ["best", "frontier"]) {
      assert.equal(n[key].length, numbers[key].length, `${key} ${why}`);
      for (const [i, wanted] of numbers[key].entries()) {
        const plan = n[key][i];
        for (const part of ["stage", "blocks", "chunks", "size", "peak"]) {
          assert.equal(plan[part], wanted[part], `${part} ${why}`);
        }
        close(plan.seconds, wanted.seconds, why);
        assert.equal(planText(plan), wanted.text);
      }
    }
    assert.equal(n.yours && planText(n.yours), numbers.yours?.text ?? null);
    if (numbers.yours) assert.equal(n.yours.peak, numbers.yours.peak, why);
    if (numbers.gap) near(n.gap, numbers.gap, why);
    const first = n.yours ? 1 : 0;
    for (const [i, wanted] of numbers.best.entries()) {
      const { causes } = describe(whole({ ...state, pick: first + i }));
      CAUSES.forEach((key, j) => near(causes[key], wanted.causes[j], why));
    }
    if (numbers.next === null) assert.equal(n.next, null, why);
    else close(n.slowdown(n.next), numbers.next, why);
  }
});

test("where nothing fits the smallest is named", () => {
  const told = sentence({ ...start, budget: 1 });
  assert.match(told, /^Nothing fits in 1\.00 MiB\. The smallest of /);
  assert.match(sentence(start), /^The fastest plan in 14\.1 GiB: /);
});

test("the gap between the reader's plan and the best is said", () => {
  const state = { ...start, card: "T4", recipe: "autocast" };
  assert.equal(gapWords(describe(state)), "");
  const slow = { ...state, checkpointed: "all", chunks: "16", micro: 1 };
  assert.match(gapWords(describe(slow)), /^Yours takes [1-9]\d* % longer /);
  assert.match(gapWords(describe({ ...slow, budget: 1 })), / too much\.$/);
  const { best } = describe(state);
  const [{ blocks, chunks, size }] = best;
  assert.equal(blocks, 0);
  const same = { checkpointed: "none", chunks: String(chunks ?? "none") };
  const found = describe({ ...state, ...same, micro: size });
  assert.equal(gapWords(found), "Yours is as fast as the best.");
});

test("what another precision would need is said", () => {
  const large = { model: "Llama 3 8B", card: "A100 80 GB", tokens: 8192 };
  const state = { ...start, ...large, recipe: "autocast" };
  const least = /With bf16 the smallest needs [67]\d\.\d GiB, with LoRA 2\d/;
  assert.match(sentence(state), least);
  assert.match(sentence({ ...state, recipe: "any" }), /^The fastest plan /);
  assert.match(sentence({ ...state, trained: "lora" }), /LoRA of rank 16/);
});

test("the axis stays while the budget is dragged", () => {
  const tops = [0, 50, 300, 9000].map(
    (budget) => layout({ ...start, budget }, 640).top,
  );
  assert.equal(new Set(tops).size, 1);
});

test("a place in the picture is a budget, and a point a plan", () => {
  for (const width of [300, 760]) {
    const plan = layout({ ...start, budget: 300 }, width);
    assert.equal(budgetAt(plan, plan.budget), 300);
    plan.points.forEach((point, i) => {
      const { x, y } = plan.points[pointAt(plan, point)];
      assert.ok(Math.hypot(x - point.x, y - point.y) < 1e-6, i);
    });
    assert.equal(pointAt(plan, { x: -99, y: -99 }), -1);
  }
});

test("the code says what the plan is", () => {
  const state = { ...start, budget: 300, recipe: "bf16" };
  const { plan } = describe(state);
  const code = codeOf(plan);
  assert.match(code, /recipe="bf16"/);
  assert.doesNotMatch(code, /Adapter/);
  assert.match(code, new RegExp(`\\n {4}${plan.size},\\n`));
});

test("the code says what alone is trained", () => {
  const state = { ...start, trained: "qlora" };
  const code = codeOf(describe(state).plan);
  assert.match(code, /import PRESETS, TARGETS, Adapter, Transformer\n/);
  const adapter = /adapter=Adapter\(TARGETS\["gpt"\], 16, four_bits=True\),/;
  assert.match(code, adapter);
  assert.match(code, /recipe="bf16"/);
});

test("describe and layout leave the state as it is", () => {
  untouched(start, layout, describe, sentence);
});
