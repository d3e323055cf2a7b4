import assert from "node:assert/strict";
import { test } from "node:test";

import {
  atRest,
  describe,
  drawnOf,
  PHASES,
  layout,
  momentAt,
  sentence,
  step,
} from "../../src/membudget/widgets/sharding.mjs";
import { read, says, within } from "./grid.mjs";

const { tables, cases: bare } = read("sharding");
const cases = bare.map(({ state, ...answer }) =>
  ({ state: Object.freeze({ ...state, tables }), ...answer }));
const some = cases.filter((_, i) => i % 7 === 0).map(({ state }) => state);
const plain = {
  ...{ tables, model: "7.5 B", ranks: 64, stage: "zero-2", recipe: "fp32" },
  ...{ accumulation_steps: 1, synchronise_last: false, card: "none" },
};
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const near = (a, b) => assert.ok(Math.abs(a - b) < 1e-6, `${a} ${b}`);

/* Stages, ranks, and how often gradients are reduced. */
function* steps() {
  const ways = [[1, false], [2, false], [2, true]];
  for (const [stage] of tables.stages) {
    for (const ranks of [1, 2, 4, 64]) {
      for (const [accumulation_steps, synchronise_last] of ways) {
        const when = { accumulation_steps, synchronise_last };
        yield { ...plain, stage, ranks, ...when };
      }
    }
  }
}

test("describe gives Python's numbers, to the byte", () => {
  const seen = new Set();
  for (const { state, numbers, fewest } of cases) {
    const all = describe(state);
    for (const [stage, { sent, ...parts }] of Object.entries(numbers)) {
      const n = all[stage];
      assert.deepEqual([n.parts, n.sent], [parts, sent]);
      assert.equal(n.bytes, sum(Object.values(parts)));
      const least = state.card === "none" ? null : fewest[stage];
      assert.equal(n.fewest, least);
      const fits = least !== null && state.ranks >= least;
      assert.equal(n.fits, state.card === "none" ? null : fits);
      seen.add(n.fits).add(n.fewest).add(parts.waiting > 0);
      assert.ok(Number.isSafeInteger(n.bytes) && Number.isSafeInteger(sent));
    }
  }
  for (const one of [true, false, null, 1, 2, 64, 1024]) assert.ok(seen.has(one));
});

test("the sentence says each case", () => {
  const said = cases.map(({ state }) => sentence(state));
  says(said, [
    "on 1 rank: each holds", "Nothing is sent.", "wait to be reduced)",
    "as much as DDP.", "1.5 times as much as DDP", "times less than DDP",
    "Half as many ranks would be too few.", "No number of ranks makes them fit.",
  ]);
});

test("a step moves as many slices as the formula counts", () => {
  for (const state of steps()) {
    const drawn = drawnOf(state.ranks).length;
    const sent = { parameters: 0, gradients: 0 };
    for (const { moves } of step(state)) {
      assert.ok(moves.length === 0 || moves.length === drawn);
      for (const { part } of moves) sent[part] += 1;
    }
    const { each } = describe(state)[state.stage];
    for (const [part, slices] of Object.entries(sent)) {
      const whole = each[part] / 4; // how often all of it is sent, in fp32
      assert.equal(slices, whole * drawn * (drawn - 1));
    }
  }
});

test("ranks send what they have, to those who lack it", () => {
  const found = { gather: "", renew: "", reduce: "part", spread: "part" };
  for (const state of steps()) {
    const moments = step(state);
    for (const { phase, cells, moves } of moments) {
      for (const { part, from, to, slice } of moves) {
        const have = cells[part][from][slice];
        assert.ok(have && (have === "part") === (phase === "reduce"), have);
        assert.equal(cells[part][to][slice], found[phase]);
      }
    }
    const { cells } = moments.find(({ phase }) => phase === "optimizer");
    const { optimizer } = atRest(state).cells;
    assert.deepEqual(cells.optimizer, optimizer);
    // who updates a slice has the sum of its gradients
    optimizer.forEach((row, s) =>
      row.forEach((have, j) => {
        if (have) assert.equal(cells.gradients[s][j], "own");
      }),
    );
  }
});

test("at rest the cells are what the bars count, and the words say when", () => {
  const cells = (state) => atRest(state).cells.gradients.flat().sort().join();
  const deferred = { accumulation_steps: 2, synchronise_last: true, ranks: 2 };
  const of = (stage) => cells({ ...plain, ...deferred, stage });
  assert.equal(of("zero-2"), "own,own,part,part");
  assert.equal(of("zero-1"), "own,own,own,own");
  assert.equal(cells({ ...plain, ranks: 2 }), ",,own,own");
  const words = (stage, more) => {
    const { pause, verdict } = layout({ ...plain, ...more, stage }, 640);
    return [pause, verdict[1]];
  };
  const steps = ["Between two steps", "Model states between two steps"];
  const parts = ["Between micro-batches", "States between micro-batches"];
  assert.deepEqual(words("zero-2"), steps);
  assert.deepEqual(words("zero-2", deferred), parts);
  assert.deepEqual(words("zero-1", deferred), steps);
});

test("everything is inside the picture, at every width", () => {
  for (const state of [...some, ...steps()]) {
    for (const width of [284, 358, 760]) {
      const moment = step(state).length - 1;
      const plan = layout(state, width, moment, plain);
      const inside = within(plan.plot);
      const page = within({ left: 0, right: width, top: 0, bottom: plan.height });
      for (const { bar, from, to } of plan.stations) {
        [bar.x, bar.x + bar.width, from, to].forEach((x) => inside({ x }));
      }
      plan.rows.forEach((y) => page({ y: y + plan.plot.tall }));
      plan.boxes.forEach(({ to }) => inside({ y: to }));
      plan.axis.ticks.forEach(inside);
      inside({ x: plan.cursor.x, y: plan.card || plan.plot.top });
      inside({ y: plan.ghost ?? plan.plot.top });
      near(plan.edges.at(-1), plan.plot.right);
      for (const { phase } of plan.moments) {
        const [, , words] = PHASES[phase];
        words.forEach((line) => page({ x: 2 + 7.1 * line.length }));
      }
    }
  }
});

test("bars are as high as their bytes, on an axis that ranks do not move", () => {
  for (const state of some) {
    const [one, ...more] = [1, 8, 1024].map((ranks) =>
      layout({ ...state, ranks }, 640),
    );
    for (const { axis } of more) assert.deepEqual(axis.ticks, one.axis.ticks);
    const plan = layout(state, 640);
    const { bytes } = describe(state)[state.stage];
    const tall = plan.plot.bottom - plan.axis.y(bytes);
    const drawn = sum(plan.boxes.map(({ from, to }) => from - to));
    if (!plan.broken) near(drawn, tall);
    else near(drawn, plan.plot.bottom - plan.plot.top);
  }
});

test("a bar that is cut shows all of its parts", () => {
  const card = { recipe: "master", stage: "ddp", card: "RTX 4090" };
  const plan = layout({ ...plain, ...card }, 640);
  assert.ok(plan.broken);
  const [parameters, , optimizer] = plan.boxes;
  near(parameters.to, plan.axis.y(15e9)); // below the card: to scale
  assert.ok(optimizer.from - optimizer.to > 20);
  near(optimizer.to, plan.plot.top);
});

test("a place on the track is a moment", () => {
  const plan = layout(plain, 640);
  const many = plan.moments.length;
  plan.moments.forEach((_, at) => {
    assert.equal(momentAt(plan, layout(plain, 640, at).cursor.x), at);
  });
  assert.deepEqual([momentAt(plan, -9), momentAt(plan, 900)], [0, many - 1]);
});
