import {
  HOLDERS,
  bar,
  byteCell,
  checkBox,
  choice,
  drag,
  filled,
  formatBytes,
  formatNumber,
  grouped,
  html,
  laid,
  legend,
  lengthAxis,
  lengths,
  line,
  numberList,
  percent,
  plural,
  ragged,
  slider,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";

/* A card that a transformer's training step fills, or overflows.

   Python sends for each model the moments that can be the worst, as rows of
   coefficients in the sequences and the tokens.

   describe(state): the numbers.
   layout(state, width): where everything stands in the picture. */

const BARS = {
  forward: t`forward pass`,
  backward: t`backward pass`,
  update: t`optimizer’s step`,
};
const HEAD = [t`worst moment of`, t`forward`, t`backward`, t`update`];

const ADAM = "adam"; // the optimizer that can work on all at once
const NONE = "none"; // no card
const MOST_STEPS = 64;

/** The places of the slider of sequences: all to 16, then 4 an octave. */
export const BATCHES = Array.from({ length: 1024 }, (_, i) => i + 1).filter(
  (n) => n <= 16 || n % 2 ** (Math.floor(Math.log2(n)) - 2) === 0,
);

// ---- numbers -------------------------------------------------------------

/* The sequences of the first micro-batch, and of a later one. What is the same
   for another, or less, is left out. */
function sizesOf({ batch, steps }) {
  const size = Math.ceil(batch / steps);
  return size === batch ? [size] : [size, Math.min(size, batch - size)];
}

/* How many micro-batches there are. */
const partsOf = (state) => Math.ceil(state.batch / sizesOf(state)[0]);

/* The accumulation steps: each has a sequence. */
const stepsOf = ({ batch, steps }) => Math.min(batch, steps);

/* What a card decides: an optimizer that works on all parameters at once. */
const onGpu = (state) => state.card !== NONE;
const atOnce = (state) =>
  state.optimizer === ADAM && (state.foreach || onGpu(state));

const sum = (split) => Object.values(split).reduce((a, b) => a + b, 0);

const worst = (moments) =>
  moments
    .map(({ row, split }) => ({ row, split, bytes: sum(split) }))
    .reduce((most, one) => (one.bytes > most.bytes ? one : most));

/* The worst moment of each bar, and which bar has the peak. */
function moments(state) {
  const { batch, tokens, tables } = state;
  const model = tables.models[state.model];
  const recipe = model.recipes[state.recipe];
  const [states, one, all] = recipe.optimizers[state.optimizer];
  const update = {
    parameters: recipe.parameters,
    gradients: recipe.gradients,
    optimizer: states,
    activations: 0,
    inputs: tables.token * batch * tokens,
    temporaries: atOnce(state) ? all : one,
  };
  const kinds = model.rows[recipe.rows][Number(state.checkpointed)];
  const sizes = sizesOf(state);
  const moment = ([row, gradients, ...coefficients], size) => {
    const [activations, temporaries] = [0, 3].map((at) => {
      const [c0, c1, c2] = coefficients.slice(at);
      return c0 + c1 * tokens + c2 * size * tokens;
    });
    return { row, split: { ...update, gradients, activations, temporaries } };
  };
  const pass = (bar) =>
    sizes.flatMap((size, i) => {
      const kind = kinds[sizes.length > 1 ? i + 1 : 0];
      return kind[bar].map((row) => moment(row, size));
    });
  const bars = {
    forward: worst(pass(0)),
    backward: worst(pass(1)),
    update: worst([{ row: "update", split: update }]),
  };
  const larger = (a, b) => (bars[b].bytes > bars[a].bytes ? b : a);
  const phase = Object.keys(bars).reduce(larger);
  return { ...bars, phase, peak: bars[phase] };
}

const peakOf = (state) => moments(state).peak.bytes;

/** The most sequences whose step stays within the budget; 0 for none. More
    sequences never need less. */
export function largest(state, budget) {
  const fits = (batch) => peakOf({ ...state, batch }) <= budget;
  let [low, high] = [0, 1];
  while (fits(high)) [low, high] = [high, 2 * high];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}

/** What the widget shows. Sizes are bytes. */
export function describe(state) {
  const { model, card, tables } = state;
  const found = moments(state);
  const { parameters, gradients, optimizer } = found.update.split;
  const budget = tables.cards[card]?.usable ?? null;
  return {
    ...found,
    parameters: tables.models[model].parameters,
    states: parameters + gradients + optimizer,
    budget,
    over: Math.max(found.peak.bytes - (budget ?? Infinity), 0),
    largest: budget && largest({ ...state, steps: stepsOf(state) }, budget),
  };
}

// ---- words ---------------------------------------------------------------

/* "3 × up to 4": micro-batches, and their sequences. */
function microBatchWords(state) {
  const parts = partsOf(state);
  const [size] = sizesOf(state);
  if (parts * size === state.batch) return `${parts} × ${size}`;
  return t`${parts} × up to ${size}`;
}

/** The key numbers in words. */
export function sentence(state) {
  const n = describe(state);
  const { batch, tokens, card } = state;
  const { bytes, row, split } = n.peak;
  const parts = partsOf(state);
  const bar = BARS[n.phase];
  const at =
    n.phase === "update" ? t`in the ${bar}` : t`in the ${bar}, at ${row}`;
  const all = [plural(batch, "sequence"), plural(grouped(tokens), "token")];
  const needs = [formatBytes(bytes), at];
  let need = t("{0} of {1} need {2} at the peak, {3}.", ...all, ...needs);
  if (batch === 1) {
    need = t("{0} of {1} needs {2} at the peak, {3}.", ...all, ...needs);
  } else if (parts > 1) {
    need = t(
      "{0} of {1} in {2} micro-batches need {3} at the peak, {4}.",
      ...[...all, parts, ...needs],
    );
  }
  const shares = Object.keys(HOLDERS)
    .sort((a, b) => split[b] - split[a])
    .slice(0, 2)
    .flatMap((part) => [percent(split[part], bytes), HOLDERS[part]]);
  const told = [need, t("That is {0} {1} and {2} {3}.", ...shares)];
  if (n.budget !== null) told.push(fitWords(n, state, card));
  return told.join(t` `);
}

/* Whether it fits, and what would. */
function fitWords({ over, largest }, state, card) {
  if (!largest) {
    return t`It does not fit the ${card}: not even one sequence does.`;
  }
  const all = plural(largest, "sequence");
  const size = Math.ceil(largest / stepsOf(state));
  const most = size < largest ? t`${all}, ${size} at a time` : all;
  return over
    ? t`It does not fit the ${card}, which holds at most ${most}.`
    : t`It fits the ${card}, which holds at most ${most}.`;
}

/* What everybody sees. */
function verdict({ budget, over, peak: { bytes } }) {
  if (budget === null) return t`needs ${formatBytes(bytes)}`;
  if (over) return t`${formatBytes(over)} too much`;
  return t`fits: ${formatBytes(budget - bytes)} free`;
}

// ---- layout --------------------------------------------------------------

const [CARD, TALL] = [52, 76]; // where the card begins, and its height
const AXIS = 154;
const [FIRST, EACH, THIN] = [213, 33, 10]; // the bars

/* The end of the axis: beyond the card; without one, beyond what 8 sequences
   take in fp32. No other control moves it. */
function topOf(state) {
  const { tables, model, card } = state;
  if (onGpu(state)) return 1.5 * tables.cards[card].usable;
  const tokens = Math.min(1024, tables.models[model].tokens.at(-1));
  const sizes = { batch: 8, steps: 1, tokens, checkpointed: false };
  const plain = { recipe: "fp32", optimizer: ADAM, foreach: false };
  return 1.5 * peakOf({ ...state, ...sizes, ...plain });
}

/** Where everything stands in the picture. */
export function layout(state, width, before = null) {
  const n = describe(state);
  const plot = { left: 3, right: width - 3 };
  const top = topOf(state);
  const filling = ({ split, bytes }, x) =>
    ({ parts: laid(split, x), end: x(bytes) });
  const { x, ...axis } = lengths(plot, top, width);
  const beyond = n.peak.bytes > top;
  // whole in any case
  const inBars = lengths(plot, Math.max(top, n.peak.bytes), width).x;
  const old = before ? peakOf(before) : n.peak.bytes;
  const barOf = (phase) => ({ phase, ...filling(n[phase], inBars) });
  return {
    ...{ width, height: FIRST + 3 * EACH + 14, plot, top, axis, beyond },
    fill: filling(n.peak, x),
    bars: Object.keys(BARS).map(barOf),
    edge: n.budget && x(n.budget),
    limit: n.budget && inBars(n.budget),
    ghost: old !== n.peak.bytes && old <= top && x(old),
  };
}

/** The sequences whose peak ends nearest below a place in the picture. */
export function batchAt(state, { plot, top }, x) {
  const size = ((x - plot.left) * top) / (plot.right - plot.left);
  const fits = (batch) => peakOf({ ...state, batch }) <= size;
  return BATCHES.findLast(fits) ?? 1;
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };

/* The card, what fills it, and what does not fit. */
function* drawCard(id, state, n, { plot, fill, edge, ghost }) {
  yield* bar(id, fill.parts, CARD, TALL);
  if (n.over) {
    const over = { x: edge, y: CARD - 5, height: TALL + 10 };
    const shape = { ...over, width: fill.end - edge };
    yield* filled(id, "over", "rect", shape);
    yield svg("rect", { ...shape, class: "mb-outline" });
  }
  for (const { part, x, width } of fill.parts) {
    const name = HOLDERS[part];
    if (wideOf(name) + 10 < width) {
      const look = { ...MIDDLE, class: "mb-halo" };
      yield text(x + width / 2, CARD + TALL / 2 + 4, name, look);
    }
  }
  if (n.budget) {
    const { recipe, card, tables } = state;
    const box = { x: plot.left, y: CARD, width: edge - plot.left };
    yield svg("rect", { ...box, height: TALL, rx: 4, class: "mb-card" });
    const emulated = recipe !== "fp32" && !tables.cards[card].bf16;
    const size = formatBytes(n.budget);
    const label = emulated
      ? t`${card}: ${size}, bf16 emulated`
      : t`${card}: ${size} usable`;
    yield text(edge, CARD - 12, label, END);
  }
  if (ghost) yield line(ghost, CARD - 6, ghost, CARD + TALL + 6, "mb-ghost");
}

/* What can be dragged: the end of the filling. */
function* drawGrip({ fill: { end }, width }, size) {
  const [y, left] = [CARD + TALL + 4, end > width / 2];
  yield line(end, CARD - 4, end, y, "mb-cursor");
  yield svg("path", { d: `M${end} ${y}l-7 12h14z`, class: "mb-grip" });
  const look = { class: "mb-value", ...(left ? END : {}) };
  yield text(end + (left ? -11 : 11), y + 12, t`drag: ${size}`, look);
}

/* The end of a filling that goes on beyond the picture. */
function* drawBreak({ plot }, size) {
  yield ragged(plot.right - 16, CARD - 8, TALL + 16);
  const look = { ...END, class: "mb-value" };
  yield text(plot.right, CARD + TALL + 18, `${size} →`, look);
}

/* The worst moments, to the same scale while they are within it. */
function* drawBars(id, n, { bars, beyond, limit, plot, width }, size) {
  const head = beyond
    ? t`worst moments, to a scale of ${size}`
    : t`worst moments, to the same scale`;
  yield text(plot.left, FIRST - 20, head);
  for (const [i, { phase, parts }] of bars.entries()) {
    const y = FIRST + i * EACH;
    yield* bar(id, parts, y + 6, THIN);
    const of = [BARS[phase], formatBytes(n[phase].bytes)];
    const short = t("{0}: {1}", ...of);
    const long = t("{0}: {1}, at {2}", ...of, n[phase].row);
    const fits = phase !== "update" && wideOf(long) < width;
    const look = phase === n.phase ? { class: "mb-value" } : {};
    yield text(plot.left, y, fits ? long : short, look);
    if (limit) yield line(limit, y + 5, limit, y + THIN + 8, "mb-limit");
  }
}

function draw(id, state, n, plan) {
  const { plot, axis, height, beyond } = plan;
  const size = formatBytes(n.peak.bytes);
  const broken = n.over ? " mb-broken" : "";
  return [
    text(plot.left, 20, verdict(n), { class: `mb-verdict${broken}` }),
    ...drawCard(id, state, n, plan),
    ...(beyond ? drawBreak : drawGrip)(plan, size),
    ...lengthAxis(plot, AXIS, axis),
    ...drawBars(id, n, plan, size),
    text(plot.right, height - 3, t`computed, not measured on a GPU`, END),
  ];
}

function results(id, n) {
  const bars = Object.keys(BARS);
  const rows = Object.entries(HOLDERS).map(([part, label]) => ({
    part,
    label,
    cells: bars.map((of) => byteCell(`${of}.${part}`, n[of].split[part])),
  }));
  const all = bars.map((of) => byteCell(`${of}.bytes`, n[of].bytes));
  const each = `${formatNumber(n.states / n.parameters)} B`;
  const most = n.largest ? grouped(n.largest) : t`none`;
  return [
    table(id, HEAD, [
      ...rows,
      { sum: true, label: t`together`, cells: all },
    ]),
    numberList([
      [t`parameters`, "parameters", n.parameters, grouped(n.parameters)],
      [t`peak`, "peak", n.peak.bytes, `${grouped(n.peak.bytes)} B`],
      [t`model states, per parameter`, "states", n.states, each],
      ...(n.budget
        ? [[t`most sequences that fit`, "largest", n.largest, most]]
        : []),
    ]),
  ];
}

const NOTE = t(
  "The frame is the card: its memory less a reserve for what is no tensor. " +
    "It is filled by what is alive at the peak. What does not fit stands " +
    "out on the right, hatched. Drag the end of the filling to choose the " +
    "sequences. The dotted line is the peak before the last change. Below " +
    "are the worst moments of the three phases; the longest is the peak.",
);

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["model", "batch", "tokens", "steps", "checkpointed", "recipe"],
  ...["optimizer", "foreach", "card", "tables"],
];

function build({ id, get, set, bound, picture }) {
  const { tables } = get();
  const bySize = (things, size) =>
    Object.keys(things).sort((a, b) => things[a][size] - things[b][size]);
  const stops = (name = get().model) => tables.models[name].tokens;
  const select = (label, key, options, more) =>
    bound(choice, label, key, { options, ...more });
  const range = (label, key, onInput, min = 0) =>
    slider({ label, key, onInput, min });

  const models = bySize(tables.models, "parameters");
  const model = select(t`Model`, "model", models, {
    onChange(model) {
      const tokens = Math.min(get().tokens, stops(model).at(-1));
      set({ model, tokens });
    },
  });
  const batch = range(t`Sequences (the batch)`, "batch", (place) =>
    set({ batch: BATCHES[place] }),
  );
  const worded = (all) =>
    Object.fromEntries(all.map(([key, label]) => [key, t(label)]));
  const cards = [NONE, ...bySize(tables.cards, "usable")];
  const card = select(t`Card`, "card", worded(cards.map((c) => [c, c])));
  const tokens = range(t`Tokens of each sequence`, "tokens", (place) =>
    set({ tokens: stops()[place] }),
  );
  const divide = (steps) => set({ steps });
  const steps = range(t`Accumulation steps`, "steps", divide, 1);
  const recipes = tables.recipes.map(([name, label]) => {
    const words = label.slice(name.length + 2); // "fp32: everything in fp32"
    return [name, t`${name}: ${t(words)}`];
  });
  const mixes = Object.fromEntries(recipes);
  const recipe = select(t`Precision`, "recipe", mixes);
  const optimizers = worded(Object.entries(tables.optimizers));
  const optimizer = select(t`Optimizer`, "optimizer", optimizers);
  const blocks = t`Checkpoint every block`;
  const checkpointed = bound(checkBox, blocks, "checkpointed");
  const foreach = checkBox({
    label: t`Adam on all at once (foreach)`,
    key: "foreach",
    onChange: (foreach) => set({ foreach }),
  });

  let plan;
  drag(picture, {
    move: ({ x }) => set({ batch: batchAt(get(), plan, x) }),
    drop: () => batch.focus(),
  });

  const show = (state) => {
    batch.update({
      value: BATCHES.findLastIndex((n) => n <= state.batch),
      max: BATCHES.length - 1,
      text: state.batch,
      spoken: plural(state.batch, "sequence"),
    });
    tokens.update({
      value: stops().indexOf(state.tokens),
      max: stops().length - 1,
      text: grouped(state.tokens),
      spoken: plural(state.tokens, "token"),
    });
    steps.update({
      value: stepsOf(state),
      max: Math.min(MOST_STEPS, state.batch),
      text: microBatchWords(state),
      spoken: t`${microBatchWords(state)} sequences`,
      disabled: state.batch === 1 ? t`one sequence is one micro-batch` : "",
    });
    let why = "";
    if (state.optimizer !== ADAM) why = t`only Adam does so`;
    else if (onGpu(state)) why = t`on: PyTorch’s way on a GPU`;
    foreach.update({ value: atOnce(state), disabled: why });
  };

  return {
    controls: [model, batch, card],
    legend: legend(id, HOLDERS),
    more: [tokens, steps, recipe, optimizer, checkpointed, foreach],
    note: html("p", {}, NOTE),
    draw(state, width, before) {
      const n = describe(state);
      plan = layout(state, width, before);
      show(state);
      return {
        title: t`Memory of one training step`,
        sentence: sentence(state),
        height: plan.height,
        drawn: draw(id, state, n, plan),
        numbers: results(id, n),
      };
    },
  };
}

export default widget({ name: "ledger", keys, build });
