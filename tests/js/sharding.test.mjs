import assert from "node:assert/strict";
import { test } from "node:test";

import {
  atRest,
  bytesAt,
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
  blocks: 32,
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
    const stages = Object.entries(numbers);
    for (const [stage, { sent, borrowed, ...parts }] of stages) {
      const n = all[stage];
      assert.deepEqual([n.parts, n.sent], [parts, sent]);
      assert.equal(n.most, n.bytes + borrowed);
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
    "on 1 rank: it holds all", "There is no other to share with.", "not yet reduced)",
    "as much as DDP.", "1.5 times as much as DDP", "times less than DDP",
    "Half the ranks would be too few.",
    "However many ranks there are, it does not fit.",
  ]);
});

const PART = { block: "parameters", whole: "gradients" };

test("the most that a rank holds in a step is what Python says", () => {
  const seen = new Set();
  for (const state of [...some, ...steps()]) {
    const n = describe(state)[state.stage];
    const held = step(state).map((moment) => bytesAt(n, moment));
    near(Math.max(...held) / n.most, 1);
    near(Math.min(...held) / n.bytes, 1);
    assert.equal(bytesAt(n, atRest(state)), n.bytes);
    seen.add(n.most > n.bytes).add(n.lent.whole > 0).add(n.lent.block > 0);
  }
  assert.equal(seen.size, 2);
});

test("only the blocks between are left out", () => {
  for (const state of steps()) {
    const left = (blocks) =>
      step({ ...state, blocks }).filter(({ phase }) => phase === "others");
    assert.deepEqual(left(1), []);
    const passes = new Set(left(32).map(({ block }) => block("so on")));
    assert.ok(passes.size === 0 || [...passes].join() === "so on, 31 more");
  }
});

test("a step moves as many slices as the formula counts", () => {
  for (const state of steps()) {
    const drawn = drawnOf(state.ranks).length;
    const sent = { parameters: 0, gradients: 0 };
    for (const { moves } of step(state)) {
      assert.ok(moves.length === 0 || moves.length === drawn);
      // of a block: the others do the same
      for (const { part } of moves) sent[PART[part] ?? part] += 1;
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
  const rest = ["", "room"];
  for (const state of steps()) {
    const moments = step(state);
    for (const { phase, cells, moves } of moments) {
      for (const { part, from, to, slice } of moves) {
        const have = cells[part][from][slice];
        assert.ok(!rest.includes(have), part);
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
    return layout({ ...plain, ...more, stage }, 640).pause;
  };
  assert.equal(words("zero-2"), "Between two steps");
  assert.equal(words("zero-2", deferred), "Between micro-batches");
  assert.equal(words("zero-1", deferred), "Between two steps");
});

test("everything is inside the picture, at every width", () => {
  for (const state of [...some, ...steps()]) {
    for (const width of [284, 358, 760]) {
      const last = 10 * step(state).length - 5;
      const plan = layout(state, width, last, plain);
      const inside = within({ ...plan.plot, top: 0, bottom: 0 });
      const page = within({ left: 0, right: width, top: 0, bottom: plan.height });
      const { size, bar } = plan;
      for (const { x, y } of plan.stations) {
        page({ x, y });
        page({ x: x + size.wide, y: y + size.tall + 20 });
      }
      for (const { x, width: wide } of [...bar.kept, ...bar.lent]) {
        [x, x + wide].forEach((x) => inside({ x }));
      }
      bar.axis.ticks.forEach(({ x }) => inside({ x }));
      [plan.cursor.x, bar.limit || 4, bar.ghost ?? 4].forEach((x) => inside({ x }));
      near(plan.edges.at(-1), plan.plot.right);
      for (const { phase } of plan.moments) {
        const [, , words] = PHASES[phase];
        const room = width < 700 ? width : 334;
        words.forEach((line) => assert.ok(2 + 7.1 * line.length < room));
      }
    }
  }
});

test("one rank alone stands in the middle, and its words below", () => {
  for (const width of [284, 358, 760, 950]) {
    const plan = layout({ ...plain, stage: "zero-3", ranks: 1 }, width);
    const [{ x, y }] = plan.stations;
    near(x + plan.size.wide / 2, width / 2);
    assert.ok(y + plan.size.tall + 16 < plan.words - 9);
    assert.ok(plan.words + 64 < plan.track);
  }
});

test("cards stand apart, and do not move while they swell", () => {
  for (const ranks of [1, 2, 4, 8, 1024]) {
    for (const width of [284, 358, 760, 950]) {
      const state = { ...plain, stage: "zero-3", ranks };
      const { stations, size } = layout(state, width);
      stations.forEach((a, i) =>
        stations.slice(i + 1).forEach((b) => {
          const across = Math.abs(a.x - b.x) - size.wide;
          const down = Math.abs(a.y - b.y) - size.tall - 16;
          assert.ok(Math.max(across, down) > 8, `${ranks} ${width}`);
        }),
      );
      for (const tick of [35, 75, 125]) {
        const now = layout(state, width, tick);
        assert.deepEqual(now.stations, stations);
      }
    }
  }
});

test("the bar is as long as its bytes, on an axis that ranks do not move", () => {
  for (const state of some) {
    const [one, ...more] = [1, 8, 1024].map((ranks) =>
      layout({ ...state, ranks }, 640),
    );
    for (const { bar } of more) assert.deepEqual(bar.axis, one.bar.axis);
    const { bar, plot } = layout(state, 640);
    const drawn = sum([...bar.kept, ...bar.lent].map(({ width }) => width));
    if (bar.beyond) near(drawn, plot.right - plot.left);
    else near(bar.end - plot.left, drawn);
  }
});

test("a place on the track is a moment", () => {
  const plan = layout(plain, 640);
  const many = plan.moments.length;
  plan.moments.forEach((_, at) => {
    assert.equal(momentAt(plan, layout(plain, 640, 10 * at + 5).cursor.x), at);
  });
  assert.deepEqual([momentAt(plan, -9), momentAt(plan, 900)], [0, many - 1]);
});
