import {
  HOLDERS,
  bar,
  cardFrame,
  checkBox,
  choice,
  come,
  drag,
  filled,
  formatBytes,
  html,
  laid,
  legend,
  lengthAxis,
  lengths,
  listed,
  percent,
  pixels,
  radios,
  ragged,
  slider,
  spill,
  still,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";

/* One weight's numbers, a square for each byte, which fall into a card.

   describe(state): what Python predicted, for every recipe.
   layout(state, width): where everything stands. */

const PARTS = Object.keys(HOLDERS);
const SHORT = { ...HOLDERS, optimizer: t`optimizer` };

/* A weight's numbers, in Python's order, and what they count as. */
const TILES = [
  [t`weight`, "parameters"],
  [t`16-bit copy`, "activations"],
  [t`gradient`, "gradients"],
  [t`fp32 copy`, "optimizer"],
  [t`Adam’s mean`, "optimizer"],
  [t`Adam’s square`, "optimizer"],
];

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

const cardOf = ({ account, card }) =>
  account.cards.find(({ name }) => name === card);

/** Every recipe: its tiles, its peak, and what the card has beyond it. */
export function describe(state) {
  const { account, batch, checkpointed } = state;
  const place = account.batches.indexOf(batch);
  const of = (rows) => rows[Number(checkpointed)][place];
  return account.recipes.map((recipe, i) => {
    const parts = of(account.peaks)[i];
    const phase = of(account.phases)[i];
    const bytes = sum(parts);
    const left = cardOf(state).usable - bytes;
    const tiles = TILES.map(([name, part], k) => {
      const size = account.tiles[i][k];
      // a checkpointed block casts its weights again, after this moment
      const again = part === "activations" && checkpointed;
      const there = size > 0 && parts[PARTS.indexOf(part)] > 0 && !again;
      return { name, part, bytes: size, there };
    });
    return { recipe, tiles, parts, phase, bytes, left };
  });
}

const chosen = (state) =>
  describe(state).find(({ recipe }) => recipe === state.recipe);

// ---- words ---------------------------------------------------------------

/* Which tiles halve, and which are new. */
function tileWords({ tiles }, full) {
  const names = (test) =>
    tiles
      .filter(({ bytes }, i) => bytes && test(bytes, full.tiles[i].bytes))
      .map(({ name }) => name);
  const halved = names((now, then) => now === then / 2);
  const [added] = names((now, then) => !then); // at most one
  const all = listed(halved);
  let words = all ? t`the ${all} halves` : t`no tile halves`;
  if (halved.length > 1) words = t`the ${all} halve`;
  return added ? t`${words}, and the ${added} is new.` : t`${words}.`;
}

/* What the rest of the peak takes of fp32's. */
function partWords({ phase, recipe, parts }, full) {
  if (phase === "optimizer") {
    return recipe === "master"
      ? t(
          "At the peak, Adam’s update, on fp32 copies of the gradients, no " +
            "activation is alive.",
        )
      : t`At the peak, Adam’s update, no activation is alive.`;
  }
  const share = (part) => {
    const i = PARTS.indexOf(part);
    return percent(parts[i], full.parts[i]);
  };
  return t(
    "Activations take {0} of fp32’s, temporaries {1}.",
    ...[share("activations"), share("temporaries")],
  );
}

/* What a card that emulates bf16 means for a recipe. */
function advice(state) {
  const { card, recipe } = state;
  if (recipe === "fp32" || cardOf(state).bf16) return "";
  return recipe === "autocast"
    ? t`The ${card} has no bf16 units: use fp16, same bytes.`
    : t`The ${card} has no bf16 units: it emulates it.`;
}

const verdict = ({ left }) =>
  left < 0
    ? t`${formatBytes(-left)} too much`
    : t`it fits, ${formatBytes(left)} free`;

/** The key numbers in words. */
export function sentence(state) {
  const { batch, card, checkpointed, recipe } = state;
  const of = chosen(state);
  const [full] = describe(state);
  const plain = recipe === full.recipe;
  const what = plain
    ? t`each of a weight’s numbers takes 4 bytes.`
    : [tileWords(of, full), partWords(of, full)].join(t` `);
  const [size, share] = [formatBytes(of.bytes), percent(of.bytes, full.bytes)];
  const usable = formatBytes(cardOf(state).usable);
  return [
    checkpointed
      ? t`${recipe}, batch ${batch}, checkpointed: ${what}`
      : t`${recipe}, batch ${batch}: ${what}`,
    plain
      ? t`The peak is ${size}.`
      : t`The peak is ${size}, ${share} of fp32’s.`,
    t`The ${card} has ${usable}: ${verdict(of)}.`,
    ...(advice(state) ? [advice(state)] : []),
  ].join(t` `);
}

// ---- geometry ------------------------------------------------------------

const BYTE = 22; // pixels of a square
const TALL = 64; // of the card

/* A square for each byte of a tile, in two columns. */
function placed(tiles, width) {
  const columns = width < 480 ? 3 : 6;
  return tiles.map((tile, i) => {
    const left = ((i % columns) * width) / columns + 2;
    const bottom = 100 + 92 * Math.floor(i / columns);
    const squares = Array.from({ length: tile.bytes }, (_, k) => ({
      x: left + (k % 2) * (BYTE + 1),
      y: bottom - (Math.floor(k / 2) + 1) * (BYTE + 1),
    }));
    return { ...tile, left, bottom, squares };
  });
}

/* Where the tiles that are there come down, each within its part. */
function landed(tiles, parts, size) {
  const from = Object.fromEntries(parts.map(({ part, x }) => [part, x]));
  return tiles.map((tile) => {
    if (!tile.there) return { ...tile, lands: null };
    const lands = { x: from[tile.part], width: size(tile.bytes) };
    from[tile.part] += lands.width;
    return { ...tile, lands };
  });
}

/** The tiles above the card, whose axis the batch does not move. */
export function layout(state, width) {
  const { account, recipe, checkpointed } = state;
  const { weights, recipes, peaks } = account;
  const { usable } = cardOf(state);
  const now = chosen(state);
  const tiles = placed(now.tiles, width);
  const plot = { left: 3, right: width - 3, top: tiles.at(-1).bottom + 58 };
  plot.bottom = plot.top + TALL;
  const top = 1.4 * usable;
  const { x, ...axis } = lengths(plot, top, width);
  const parts = laid(
    Object.fromEntries(PARTS.map((part, i) => [part, now.parts[i]])),
    x,
  );
  const endOf = (batch) => x(sum(batch[recipes.indexOf(recipe)]));
  return {
    ...{ ...now, width, weights, plot, axis, parts, sizes: now.parts },
    tiles: landed(tiles, parts, (bytes) => x(bytes * weights) - plot.left),
    ends: peaks[Number(checkpointed)].map(endOf),
    edge: x(usable),
    end: x(now.bytes),
    beyond: now.bytes > top,
    height: plot.bottom + 42,
  };
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const SIZE = { width: BYTE, height: BYTE };

/* A tile's way into the card; then nothing is left of it. */
function drop({ part, left, bottom, bytes, lands }, { plot }) {
  const height = (bytes / 2) * (BYTE + 1);
  const tile = { x: left, width: 2 * BYTE, y: bottom - height, height };
  const box = { ...lands, y: plot.top, height: TALL };
  const look = { ...box, class: `mb-fill-${part}`, opacity: 0 };
  const seen = { opacity: 1 };
  return come(svg("rect", look), { ...pixels(tile), ...seen }, 200, seen);
}

/* The tiles. `before` is the plan before the last change, for its ghost, and
   `from` the plan they come from, where they move. */
function* drawTiles(id, plan, before, from) {
  const count = Math.round(plan.weights / 1e6);
  yield text(0, 14, t`One of ${count} million weights: a square is a byte`);
  for (const [i, tile] of plan.tiles.entries()) {
    const { name, part, bytes, lands, left, bottom, squares } = tile;
    const later = bytes && !lands;
    let words = bytes ? `${bytes} B` : t`none`;
    if (later) {
      const gone = plan.phase === "optimizer";
      words = gone ? t`${bytes} B, gone` : t`${bytes} B, later`;
    }
    yield text(left, bottom - 64, name, { class: bytes && "mb-value" });
    yield text(left, bottom - 50, words);
    for (const [k, square] of squares.entries()) {
      const look = { class: `mb-tile${later ? " mb-later" : ""}` };
      const box = { ...square, ...SIZE };
      const drawn = svg("g", look, ...filled(id, part, "rect", box));
      const known = !from || k < from.tiles[i].bytes;
      const above = { transform: "translateY(-40px)", opacity: 0 };
      yield known ? drawn : come(drawn, above);
    }
    for (const square of before?.tiles[i].squares.slice(bytes) ?? []) {
      yield svg("rect", { ...square, ...SIZE, class: "mb-ghost" });
    }
    if (from && lands) yield drop(tile, plan);
  }
}

/* What is alive at the peak, in the card or beyond it. */
function* drawStep(id, plan, before, from) {
  const { plot, parts, edge, end } = plan;
  for (const [i, part] of parts.entries()) {
    const then = from?.parts[i];
    const old = then && pixels({ x: then.x, width: then.width });
    for (const rect of bar(id, [part], plot.top, TALL)) {
      yield then ? come(rect, old, 400) : rect;
    }
  }
  const over = { x: edge, y: plot.top, width: end - edge, height: TALL };
  for (const shape of plan.left < 0 ? spill(id, over) : []) {
    yield from ? come(shape, { opacity: 0 }, 400) : shape;
  }
  for (const [i, { part, x, width }] of parts.entries()) {
    const words = [SHORT[part], formatBytes(plan.sizes[i])];
    if (Math.max(...words.map(wideOf)) + 8 > width) continue;
    const look = { "text-anchor": "middle", class: "mb-halo" };
    const y = plot.top + TALL / 2;
    yield text(x + width / 2, y - 4, words[0], look);
    yield text(x + width / 2, y + 12, words[1], look);
  }
  const frame = { x: plot.left, y: plot.top - 3, width: edge - plot.left };
  yield* cardFrame({ ...frame, height: TALL + 6 });
  if (plan.beyond) yield ragged(plot.right - 14, plot.top - 4, TALL + 8);
  if (before) {
    const box = { x: plot.left, y: plot.top - 5, height: TALL + 10 };
    const width = before.end - plot.left;
    yield svg("rect", { ...box, width, class: "mb-ghost" });
  }
  yield text(plot.right, plot.bottom + 12, t`◀ drag ▶`, END);
  yield* lengthAxis(plot, plot.bottom + 17, plan.axis);
}

function* draw(id, plan, state, before, from) {
  const { plot, bytes, left } = plan;
  yield* drawTiles(id, plan, before, from);
  const look = `mb-value mb-big${left < 0 ? " mb-broken" : ""}`;
  const words = t`${formatBytes(bytes)}: ${verdict(plan)}`;
  yield text(0, plot.top - 32, words, { class: look });
  const usable = formatBytes(cardOf(state).usable);
  const told = t`${state.card}: ${usable}; not measured on a GPU`;
  yield text(0, plot.top - 12, told);
  yield* drawStep(id, plan, before, from);
}

/* The parts that are ever long enough to be seen. */
function visible({ peaks }) {
  const seen = (_, k) =>
    peaks.flat(2).some((parts) => parts[k] > 0.002 * sum(parts));
  return Object.fromEntries(Object.entries(HOLDERS).filter(seen));
}

function results(id, state) {
  const all = describe(state);
  const row = ({ recipe, bytes, tiles, phase }) => {
    const states = ["parameters", "gradients", "optimizer"].map((part) =>
      sum(tiles.filter((tile) => tile.part === part).map((tile) => tile.bytes)),
    );
    const each = sum(states);
    const cells = [
      [`${recipe}.states`, each, `${states.join(" + ")} = ${each}`],
      [`${recipe}.bytes`, bytes, formatBytes(bytes)],
      [`${recipe}.share`, bytes / all[0].bytes, percent(bytes, all[0].bytes)],
      [`${recipe}.phase`, phase, t(phase)],
    ];
    return { label: recipe, cells };
  };
  const head = [t`bytes per parameter`, t`peak`, t`of fp32’s`, t`moment`];
  return [table(id, [t`recipe`, ...head], all.map(row))];
}

// ---- the widget ----------------------------------------------------------

const NOTE = t(
  "The card holds what is alive at the peak of a training step with Adam, " +
    "predicted by a GPU’s rules and not measured on a GPU. The peak is one " +
    "moment: a pale tile is not there yet, or not any more. The 16-bit copy " +
    "is kept for the backward pass and counts among the activations. " +
    "Temporaries are mostly gradients of the logits, which take 4 bytes " +
    "under autocast, too: at the peak there are two in fp32 and one under " +
    "autocast. In the optimizer’s step they are its workspace. Bytes per " +
    "parameter: parameters + gradients + optimizer states.",
);

function build({ id, get, set, bound, picture }) {
  const { recipes, batches, cards } = get().account;
  const recipe = radios({
    ...{ label: t`Recipe`, key: "recipe" },
    onChange: (value) => set({ recipe: value }),
  });
  const batch = slider({
    label: t`Batch`,
    key: "batch",
    min: 0,
    onInput: (place) => set({ batch: batches[place] }),
  });
  const checkpointed = bound(checkBox, t`Checkpointed`, "checkpointed");
  const names = cards.map(({ name }) => name);
  const onCard = bound(choice, t`Card`, "card", { options: names });
  let plan; // as it is drawn
  drag(picture, {
    grab: ({ y }) => (y > plan.plot.top - 8 ? true : null),
    move({ x }) {
      const off = plan.ends.map((end) => Math.abs(end - x));
      set({ batch: batches[off.indexOf(Math.min(...off))] });
    },
    drop: () => batch.focus(),
  });
  return {
    controls: [recipe, batch, checkpointed],
    more: [onCard],
    legend: legend(id, visible(get().account)),
    note: html("p", { class: "mb-note" }, NOTE),
    draw(state, width, before) {
      const last = plan;
      plan = layout(state, width);
      const other = last?.width === width && last.recipe !== state.recipe;
      const from = other && !still() ? last : null;
      const same = before && before.card === state.card;
      recipe.update({ value: state.recipe, options: recipes });
      batch.update({
        value: batches.indexOf(state.batch),
        max: batches.length - 1,
        text: state.batch,
        spoken: t`batch ${state.batch}`,
      });
      const then = same ? layout(before, width) : null;
      const step = t(state.account.name);
      return {
        title: t`Predicted peak of a training step: ${step}`,
        sentence: sentence(state),
        height: plan.height,
        drawn: draw(id, plan, state, then, from),
        numbers: results(id, state),
      };
    },
  };
}

const keys = ["account", "recipe", "batch", "card", "checkpointed"];

export default widget({ name: "recipes", keys, build });
