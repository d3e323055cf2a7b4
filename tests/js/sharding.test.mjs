import assert from "node:assert/strict";
import { test } from "node:test";

import {
  describe,
  layout,
  notes,
  sayings,
  sentence,
  titles,
} from "../../src/membudget/widgets/sharding.mjs";
import { read, says } from "./grid.mjs";

const { tables, ...answers } = read("sharding");
const wide = 7.1; // pixels of a letter

/* Each so-manieth state of a grid; the last control changes fastest. */
function states(grid, every = 1) {
  let all = [{ tables }];
  for (const [key, values] of Object.entries(grid)) {
    all = all.flatMap((one) => values.map((value) => ({ ...one, [key]: value })));
  }
  return all.filter((_, i) => i % every === 0);
}

const [first] = answers.numbers;
const some = [
  ...answers.numbers.flatMap(({ grid }) => states(grid)),
  ...states({ ...first.grid, model: ["7.5 B"], card: ["24 GB", "80 GB"] }),
].filter((_, i) => i % 37 === 0);
const total = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

test("describe gives Python's numbers on every state, to the byte", () => {
  const seen = { fits: new Set(), fewest: new Set(), waiting: new Set() };
  for (const { grid, every, answers: numbers } of answers.numbers) {
    const all = states(grid, every);
    assert.equal(all.length, numbers.length);
    all.forEach((state, i) => {
      const { stages } = describe(state);
      const found = Object.values(stages).map(({ split, ...of }) => [
        ...Object.values(split),
        ...Object.values(of),
      ]);
      assert.deepEqual(found, numbers[i], JSON.stringify({ ...state, tables: 0 }));
      for (const { fits, fewest, split } of Object.values(stages)) {
        seen.fits.add(fits);
        seen.fewest.add(fewest);
        seen.waiting.add(split.waiting > 0);
      }
    });
  }
  assert.deepEqual(seen.fits, new Set([true, false, null]));
  assert.deepEqual(seen.waiting, new Set([true, false]));
  for (const ranks of [null, 1, 2, 64, 128]) assert.ok(seen.fewest.has(ranks));
});

test("every number is safe and whole", () => {
  const most = { model: [2 ** 40], card: ["141 GB"] };
  for (const state of states({ ...first.grid, ...most })) {
    for (const { split, bytes, sent } of Object.values(describe(state).stages)) {
      for (const number of [...Object.values(split), bytes, sent]) {
        assert.ok(Number.isSafeInteger(number) && number >= 0);
      }
    }
  }
});

test("the sentence and the titles are Python's, to the letter", () => {
  for (const { grid, every, answers: sentences } of answers.sentences) {
    const all = states(grid, every);
    assert.equal(all.length, sentences.length);
    all.forEach((state, i) => {
      assert.deepEqual([sentence(state), ...titles(state)], sentences[i]);
    });
  }
  const texts = answers.sentences.flatMap(({ answers }) => answers.flat());
  says(texts, [
    "; 1 rank would be enough.", "; of the powers of two, 4 ranks would be",
    "fit", "nothing is split.", "too little is split.", "as much as",
    "nothing is sent", "wait to be reduced", "a gradient 4)", "1 parameter,",
    "gathered parameters", "reduced once", "one micro-batch", " 16 micro-batches",
  ]);
});

test("the notes say the bytes, the fraction, and what each ZeRO-2 sends", () => {
  const seen = { sent: new Set(), parts: new Set(), cards: new Set() };
  for (const state of some) {
    const { ranks, recipe, accumulation_steps: K, synchronise_last } = state;
    const [states, traffic, several] = notes(state).map((note) =>
      note.replaceAll("\u00a0", " "),
    );
    const [, words, each] = tables.recipes.find(([name]) => name === recipe);
    const [parameter, gradient, optimizer] = each;
    const bytes = `${parameter} + ${gradient} + ${optimizer} bytes per parameter`;
    assert.ok(states.startsWith(`Recipe ${recipe} (${words}), with Adam: ${bytes}`));
    const [, size] = tables.cards.find(([name]) => name === state.card);
    assert.match(states, size ? / GiB\.$/ : /the number tells\.$/);
    if (size) {
      const [gigabytes] = state.card.split(" ");
      const exactly = ` ${state.card} are ${gigabytes} · 10⁹ bytes, `;
      const [before, after] = states.split(exactly);
      assert.ok(before.endsWith("tells. The card's"));
      const about = Number(after.match(/^([\d.]+) GiB\.$/)[1]);
      assert.ok(Math.abs(about - size / 2 ** 30) <= 0.5);
    }
    seen.cards.add(state.card);
    assert.ok(traffic.startsWith(`Parameters (${parameter} bytes each)`));
    assert.ok(traffic.includes(`gradients (${gradient} bytes each)`));
    const part = ranks === 1 ? "0" : `${ranks - 1}/${ranks}`;
    assert.ok(traffic.endsWith(` (N − 1)/N = ${part}.`));
    seen.parts.add(part);
    if (K === 1) {
      assert.equal(several, "");
      continue;
    }
    const sends = /send (.*) Ψ; FSDP2's zero-2 .*: (.*) Ψ\.$/;
    const [ours, fsdp] = several.match(sends).slice(1);
    seen.sent.add(ours);
    const value = { 2: 2, "(K + 1)": K + 1, "2K": 2 * K };
    const { gathered, reduced } = describe(state).stages["zero-2"];
    assert.equal(value[ours], gathered + reduced);
    assert.equal(value[fsdp], K + (synchronise_last ? 1 : K));
  }
  assert.deepEqual(seen.sent, new Set(["2", "(K + 1)"]));
  assert.equal(seen.parts.size, 11);
  assert.equal(seen.cards.size, tables.cards.length);
});

test("sayings are all that the sliders and the box make of a state", () => {
  const chosen = { model: [1001], recipe: ["master-fp32-gradients"] };
  const grid = { ...first.grid, ...chosen, card: ["24 GB"], stage: ["zero-2"] };
  const all = states(grid);
  assert.equal(all.length, 11 * 5 * 2);
  const found = sayings(all[7]);
  const said = all.map((one) => [sentence(one), ...titles(one), ...notes(one)]);
  const wanted = said[0].map((_, i) => new Set(said.map((one) => one[i])));
  for (const [card] of tables.cards) {
    wanted[3].add(notes({ ...all[7], card })[0]); // the first note's place
  }
  found.forEach((texts, i) => {
    assert.deepEqual(new Set(texts), wanted[i]);
    assert.equal(texts.length, new Set(texts).size);
  });
  assert.equal(found.length, 6);
  assert.equal(found[3].length, tables.cards.length);
});

test("bars are as long as what is held and sent, part by part", () => {
  for (const state of some) {
    const n = describe(state);
    const [held, sent] = layout(state, n, 640);
    const each = (plan, sizes) =>
      (Math.max(...plan.bars.map(({ end }) => end)) - plan.left) /
      Math.max(...sizes);
    const stages = Object.values(n.stages);
    const all = [each(held, stages.map(({ bytes }) => bytes))];
    all.push(each(sent, stages.map((of) => of.sent || 1)));
    stages.forEach((of, i) => {
      let x = held.left;
      for (const { part, x: from, width } of held.bars[i].boxes) {
        assert.ok(Math.abs(from - x) < 1e-6);
        assert.ok(Math.abs(width - of.split[part] * all[0]) < 1e-6);
        x += width;
      }
      assert.ok(Math.abs(x - held.left - total(of.split) * all[0]) < 1e-6);
      const { boxes, end } = sent.bars[i];
      assert.ok(Math.abs(end - sent.left - of.sent * all[1]) < 1e-6);
      const sums = boxes.map(({ width }) => width / all[1]);
      assert.ok(Math.abs(total(sums) - of.sent) <= 1e-9 * of.sent + 1e-6);
    });
    for (const { bars, right, ticks, left } of [held, sent]) {
      for (const { end } of bars) assert.ok(end <= right + 1e-6);
      for (const { x } of ticks) assert.ok(x >= left && x <= right + 1e-6);
    }
  }
});

test("what is sent is parameters and gradients, as many as is said", () => {
  const grid = { ...first.grid, model: ["7.5 B"], ranks: [64], card: ["none"] };
  const parts = (state, stage) => {
    const [, sent] = layout(state, describe(state), 640);
    const { boxes } = sent.bars.find((bar) => bar.stage === stage);
    const widths = boxes.map(({ part, width }) => [part, width]);
    return Object.fromEntries(widths);
  };
  for (const state of states({ ...grid, recipe: ["master"] })) {
    const { stages } = describe(state);
    for (const [stage, { gathered, reduced }] of Object.entries(stages)) {
      const { parameters = 0, gradients } = parts(state, stage);
      const ratio = parameters / gradients;
      assert.ok(Math.abs(ratio - gathered / reduced) < 1e-9);
    }
  }
});

test("the limit is where the card's bytes are, or beyond the axis", () => {
  const seen = new Set();
  for (const state of some) {
    const n = describe(state);
    const [plan, sent] = layout(state, n, 640);
    const [, bytes] = tables.cards.find(([name]) => name === state.card);
    assert.equal(sent.card, 0);
    if (!bytes) {
      assert.equal(plan.card, 0);
      continue;
    }
    const most = Object.values(n.stages)[0].bytes; // DDP has the longest
    const each = (plan.bars[0].end - plan.left) / most;
    const { x, beyond } = plan.card;
    seen.add(beyond);
    if (!beyond) assert.ok(Math.abs(x - plan.left - bytes * each) < 1e-6);
    else assert.ok(bytes > 2.5 * most);
  }
  assert.equal(seen.size, 2);
});

test("words stand above their bar, inside, at every width", () => {
  for (const state of some) {
    for (const width of [288, 358, 960]) {
      for (const { bars, height, bottom } of layout(state, describe(state), width)) {
        bars.forEach(({ y, words }, i) => {
          const room = i ? y - bars[i - 1].y - height : y;
          assert.ok(room >= 18);
          assert.ok(8 + wide * ("ZeRO-3: " + words.join("")).length < width);
        });
        assert.ok(bars.at(-1).y + height < bottom);
      }
    }
  }
});
