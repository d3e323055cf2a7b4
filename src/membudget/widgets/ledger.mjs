import {
  byteTicks,
  checkBox,
  choice,
  drag,
  filled,
  formatBytes,
  formatNumber,
  grouped,
  html,
  legend,
  line,
  LETTER,
  listed,
  numberList,
  patterns,
  percent,
  plural,
  slider,
  svg,
  table,
  text,
  widget,
} from "./base.mjs";

/* A card that a transformer's training step fills, or overflows.

   Python sends for each model the moments that can be the worst, as rows of
   coefficients in the sequences and the tokens.

   describe(state): the numbers.
   layout(state, width): where everything stands in the picture. */

const SHOWN = {
  parameters: "parameters",
  gradients: "gradients",
  optimizer: "optimizer states",
  activations: "activations",
  inputs: "inputs",
  temporaries: "temporaries",
};

const BARS = {
  forward: "forward pass",
  backward: "backward pass",
  update: "optimizer’s step",
};

const ADAM = "adam"; // the optimizer that can work on all at once
const NONE = "none"; // no card
const MOST_STEPS = 64;

/** The places of the slider of sequences: all to 16, then 4 an octave. */
export const BATCHES = Array.from({ length: 1024 }, (_, i) => i + 1).filter(
  (n) => n <= 16 || n % 2 ** (Math.floor(Math.log2(n)) - 2) === 0,
);

// ---- numbers -------------------------------------------------------------

/* A row of a moment, as Python sends it. */
const [NAME, GRADIENTS, ACTIVATIONS, TEMPORARIES] = [0, 1, 2, 5];

/* Which rows a step has: the kind of micro-batch, and its sequences. What is
   the same for a later one, or less, is left out. */
function microBatches({ batch, steps }) {
  const size = Math.ceil(batch / steps);
  if (size === batch) return [{ kind: 0, size }];
  const later = Math.min(size, batch - size);
  return [{ kind: 1, size }, { kind: 2, size: later }];
}

/* The accumulation steps: each has a sequence. */
const stepsOf = ({ batch, steps }) => Math.min(batch, steps);

/* How many micro-batches there are. */
const partsOf = (state) =>
  Math.ceil(state.batch / microBatches(state)[0].size);

/* What a card decides: an optimizer that works on all parameters at once. */
const atOnce = ({ optimizer, foreach, card }) =>
  optimizer === ADAM && (foreach || card !== NONE);

const sum = (split) => Object.values(split).reduce((a, b) => a + b, 0);

/* What is alive in the optimizer's step. */
function constant(state) {
  const { batch, tokens, recipe, optimizer, tables } = state;
  const model = tables.models[state.model].recipes[recipe];
  const [kept, one, all = one] = model.optimizers[optimizer];
  return {
    parameters: model.parameters,
    gradients: model.gradients,
    optimizer: kept,
    activations: 0,
    inputs: tables.token * batch * tokens,
    temporaries: atOnce(state) ? all : one,
  };
}

/* The moments of a bar that can be its worst, with the micro-batch's size. */
function rowsOf(state, bar) {
  const { model, recipe, checkpointed, tables } = state;
  const { rows, recipes } = tables.models[model];
  const kinds = rows[recipes[recipe].rows][Number(checkpointed)];
  const index = Object.keys(BARS).indexOf(bar);
  return microBatches(state).flatMap(({ kind, size }) =>
    kinds[kind][index].map((row) => ({ row, size })),
  );
}

/* c₀ + c₁·t + c₂·b·t */
const bytesOf = (row, at, size, tokens) =>
  row[at] + row[at + 1] * tokens + row[at + 2] * size * tokens;

/* The worst moment of a bar. */
function worst(state, bar) {
  const all = constant(state);
  if (bar === "update") return { row: "update", split: all, bytes: sum(all) };
  const moments = rowsOf(state, bar).map(({ row, size }) => {
    const split = {
      ...all,
      gradients: row[GRADIENTS],
      activations: bytesOf(row, ACTIVATIONS, size, state.tokens),
      temporaries: bytesOf(row, TEMPORARIES, size, state.tokens),
    };
    return { row: state.tables.names[row[NAME]], split, bytes: sum(split) };
  });
  return moments.reduce((most, one) => (one.bytes > most.bytes ? one : most));
}

/* The worst moments, and which bar has the peak. */
function moments(state) {
  const bars = {};
  for (const bar of Object.keys(BARS)) bars[bar] = worst(state, bar);
  const most = Math.max(...Object.values(bars).map(({ bytes }) => bytes));
  const phase = Object.keys(BARS).find((bar) => bars[bar].bytes === most);
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
  const { model, recipe, tables } = state;
  const found = moments(state);
  const { parameters, gradients, optimizer } = constant(state);
  const budget = tables.cards[state.card]?.usable ?? null;
  const split = { ...state, steps: stepsOf(state) };
  return {
    ...found,
    parameters: tables.models[model].parameters,
    states: parameters + gradients + optimizer,
    budget,
    over: budget === null ? 0 : Math.max(found.peak.bytes - budget, 0),
    largest: budget === null ? null : largest(split, budget),
  };
}

// ---- words ---------------------------------------------------------------

const placeOf = ({ phase, peak }) =>
  phase === "update" ? BARS.update : `${BARS[phase]}, at ${peak.row}`;

/* "3 × up to 4": micro-batches, and their sequences. */
function microBatchWords(state) {
  const parts = partsOf(state);
  const [{ size }] = microBatches(state);
  const upTo = parts * size === state.batch ? "" : "up to ";
  return `${parts} × ${upTo}${size}`;
}

/* Whether a card computes the recipe's 16 bits natively. */
const emulated = ({ card, recipe, tables }) =>
  recipe !== "fp32" && tables.cards[card]?.bf16 === false;

/* What the card holds. */
function mostOf(state, { largest }) {
  const steps = stepsOf(state);
  if (!largest) return ": not even one sequence does";
  const most = `, which holds at most ${plural(largest, "sequence")}`;
  if (steps === 1) return most;
  const size = Math.ceil(largest / steps);
  return `${most}, ${size} at a time`;
}

/** The key numbers in words. */
export function sentence(state) {
  const n = describe(state);
  const { batch, tokens, card } = state;
  const { bytes, split } = n.peak;
  const parts = partsOf(state);
  const cut = parts > 1 ? ` in ${parts} micro-batches` : "";
  const shares = Object.keys(SHOWN)
    .sort((a, b) => split[b] - split[a])
    .slice(0, 2)
    .map((part) => `${percent(split[part], bytes)} ${SHOWN[part]}`);
  const need = batch === 1 ? "needs" : "need";
  const told =
    `${plural(batch, "sequence")} of ${plural(grouped(tokens), "token")}` +
    `${cut} ${need} ${formatBytes(bytes)} at the peak, in the ` +
    `${placeOf(n)}. That is ${listed(shares)}.`;
  if (n.budget === null) return told;
  const fits = `It ${n.over ? "does not fit" : "fits"} the ${card}`;
  return `${told} ${fits}${mostOf(state, n)}.`;
}

/* What everybody sees. */
function verdict(n) {
  if (n.budget === null) return `needs ${formatBytes(n.peak.bytes)}`;
  if (n.over) return `${formatBytes(n.over)} too much`;
  return `fits: ${formatBytes(n.budget - n.peak.bytes)} free`;
}

// ---- layout --------------------------------------------------------------

const [CARD, TALL] = [52, 76]; // where the card begins, and its height
const AXIS = 154;
const [FIRST, EACH, THIN] = [213, 33, 10]; // the bars

/* The end of the axis: beyond the card; without one, beyond what 8 sequences
   take in fp32. No other control moves it. */
function topOf(state) {
  const { tables, model, card } = state;
  if (card !== NONE) return 1.5 * tables.cards[card].usable;
  const plain = {
    ...{ batch: 8, steps: 1, recipe: "fp32", optimizer: ADAM },
    tokens: Math.min(1024, tables.models[model].tokens.at(-1)),
    ...{ checkpointed: false, foreach: false },
  };
  return 1.5 * peakOf({ ...state, ...plain });
}

/** Where everything stands in the picture. */
export function layout(state, width, before = null) {
  const n = describe(state);
  const plot = { left: 3, right: width - 3 };
  const top = topOf(state);
  const scale = (most) => (size) =>
    plot.left + (Math.min(size, most) * (plot.right - plot.left)) / most;
  const filling = ({ split, bytes }, x) => {
    let end = 0;
    const parts = Object.keys(SHOWN).map((part) => {
      const from = x(end);
      end += split[part];
      return { part, x: from, width: x(end) - from };
    });
    return { parts, end: x(bytes) };
  };
  const x = scale(top);
  const beyond = n.peak.bytes > top;
  const inBars = beyond ? scale(n.peak.bytes) : x; // whole in any case
  const bars = Object.keys(BARS).map((bar, i) => ({
    ...filling(n[bar], inBars),
    ...{ bar, y: FIRST + i * EACH, peak: bar === n.phase },
  }));
  const { unit, marks } = byteTicks(top, Math.max(2, Math.floor(width / 90)));
  const ticks = marks
    .map(({ value, label }) => ({ label, x: x(value) }))
    .filter((tick) => tick.x < plot.right - 28);
  ticks.at(-1).label += ` ${unit}`;
  const old = before && moments(before).peak.bytes;
  return {
    ...{ width, height: FIRST + 3 * EACH + 14, plot, top, ticks, bars },
    ...{ fill: filling(n.peak, x), beyond },
    edge: n.budget === null ? null : x(n.budget),
    limit: n.budget === null ? null : inBars(n.budget),
    ghost: before && old !== n.peak.bytes && old <= top ? x(old) : null,
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

function* drawFilling(id, parts, y, height) {
  for (const { part, x, width } of parts) {
    if (width) yield* filled(id, part, "rect", { x, y, width, height });
  }
}

/* The card, what fills it, and what does not fit. */
function* drawCard(id, state, n, plan) {
  const { plot, fill, edge, ghost } = plan;
  const box = { x: plot.left, y: CARD, height: TALL };
  yield* drawFilling(id, fill.parts, CARD, TALL);
  if (n.over) {
    const over = { x: edge, y: CARD - 5, height: TALL + 10 };
    const shape = { ...over, width: fill.end - edge };
    yield* filled(id, "over", "rect", shape);
    yield svg("rect", { ...shape, class: "mb-outline" });
  }
  for (const { part, x, width } of fill.parts) {
    const name = SHOWN[part];
    if (LETTER * name.length + 10 < width) {
      const look = { ...MIDDLE, class: "mb-halo" };
      yield text(x + width / 2, CARD + TALL / 2 + 4, name, look);
    }
  }
  if (edge !== null) {
    const width = edge - plot.left;
    yield svg("rect", { ...box, width, rx: 4, class: "mb-card" });
    const words = emulated(state) ? ", bf16 emulated" : " usable";
    const label = `${state.card}: ${formatBytes(n.budget)}${words}`;
    yield text(edge, CARD - 12, label, END);
  }
  if (ghost !== null) {
    yield line(ghost, CARD - 6, ghost, CARD + TALL + 6, "mb-ghost");
  }
}

/* What can be dragged: the end of the filling. */
function* drawGrip({ fill, width }, n) {
  const { end } = fill;
  const [y, left] = [CARD + TALL + 4, end > width / 2];
  yield line(end, CARD - 4, end, y, "mb-cursor");
  yield svg("path", { d: `M${end} ${y}l-7 12h14z`, class: "mb-grip" });
  const look = { class: "mb-value", ...(left ? END : {}) };
  const size = `drag: ${formatBytes(n.peak.bytes)}`;
  yield text(end + (left ? -11 : 11), y + 12, size, look);
}

/* The end of a filling that goes on beyond the picture. */
function* drawBreak({ plot }, n) {
  const teeth = Array.from({ length: 8 }, (_, i) => (i % 2 ? -7 : 7));
  const step = (TALL + 16) / teeth.length;
  const zigzag = teeth.map((across) => `l${across} ${step}`).join("");
  const d = `M${plot.right - 16} ${CARD - 8}${zigzag}`;
  yield svg("path", { d, class: "mb-break" });
  const look = { ...END, class: "mb-value" };
  const size = `${formatBytes(n.peak.bytes)} →`;
  yield text(plot.right, CARD + TALL + 18, size, look);
}

/* The worst moments, to the same scale while they are within it. */
function* drawBars(id, n, { bars, beyond, limit, plot, width }) {
  const size = formatBytes(n.peak.bytes);
  const scale = beyond ? `, to a scale of ${size}` : ", to the same scale";
  yield text(plot.left, FIRST - 20, `worst moments${scale}`);
  for (const { bar, y, parts } of bars) {
    yield* drawFilling(id, parts, y + 6, THIN);
    const short = `${BARS[bar]}: ${formatBytes(n[bar].bytes)}`;
    const long = `${short}, at ${n[bar].row}`;
    const fits = bar !== "update" && LETTER * long.length < width;
    const look = bar === n.phase ? { class: "mb-value" } : {};
    yield text(plot.left, y, fits ? long : short, look);
    if (limit === null) continue;
    yield line(limit, y + 5, limit, y + THIN + 8, "mb-limit");
  }
}

function draw(id, state, n, plan) {
  const { plot, ticks, height } = plan;
  const broken = n.over ? " mb-broken" : "";
  const rules =
    state.card === NONE ? "by a CPU’s rules" : "not measured on a GPU";
  return [
    patterns(id),
    text(plot.left, 20, verdict(n), { class: `mb-verdict${broken}` }),
    ...drawCard(id, state, n, plan),
    ...(plan.beyond ? drawBreak : drawGrip)(plan, n),
    line(plot.left, AXIS, plot.right, AXIS, "mb-axis"),
    ...ticks.flatMap(({ x, label }, i) => [
      line(x, AXIS, x, AXIS + 4, "mb-axis"),
      text(x, AXIS + 17, label, i ? MIDDLE : {}),
    ]),
    ...drawBars(id, n, plan),
    text(plot.right, height - 3, `computed, ${rules}`, END),
  ];
}

function results(id, n) {
  const bars = Object.keys(BARS);
  const cell = (key, size) => [key, size, size ? formatBytes(size) : "–"];
  const rows = Object.entries(SHOWN).map(([part, label]) => ({
    part,
    label,
    cells: bars.map((bar) => cell(`${bar}.${part}`, n[bar].split[part])),
  }));
  const all = bars.map((bar) => cell(`${bar}.bytes`, n[bar].bytes));
  const each = `${formatNumber(n.states / n.parameters)} B`;
  const most = n.largest ? grouped(n.largest) : "none";
  return [
    table(id, ["worst moment of", ...bars], [
      ...rows,
      { sum: true, label: "together", cells: all },
    ]),
    numberList([
      ["parameters", "parameters", n.parameters, grouped(n.parameters)],
      ["peak", "peak", n.peak.bytes, `${grouped(n.peak.bytes)} B`],
      ["model states, per parameter", "states", n.states, each],
      ...(n.budget === null
        ? []
        : [["most sequences that fit", "largest", n.largest, most]]),
    ]),
  ];
}

const NOTE =
  "The frame is the card: its memory less a reserve for what is no tensor. " +
  "It is filled by what is alive at the peak. What does not fit stands out " +
  "on the right, hatched. Drag the end of the filling to choose the " +
  "sequences. The dotted line is the peak before the last change. Below are " +
  "the worst moments of the three phases; the longest is the peak.";

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["model", "batch", "tokens", "steps", "checkpointed", "recipe"],
  ...["optimizer", "foreach", "card", "tables"],
];

function build({ id, get, set }) {
  const { tables } = get();
  /* The names, the smallest first. */
  const named = (things, size) => {
    const names = Object.keys(things);
    names.sort((a, b) => things[a][size] - things[b][size]);
    return Object.fromEntries(names.map((name) => [name, name]));
  };
  const stops = (name = get().model) => tables.models[name].tokens;
  const change = (key) => (value) => set({ [key]: value });
  const select = (label, key, options) =>
    choice({ label, key, options, onChange: change(key) });
  const check = (label, key) =>
    checkBox({ label, key, onChange: change(key) });

  const model = choice({
    label: "Model",
    key: "model",
    options: named(tables.models, "parameters"),
    onChange: (value) => {
      const tokens = Math.min(get().tokens, stops(value).at(-1));
      set({ model: value, tokens });
    },
  });
  const batch = slider({
    label: "Sequences (the batch)",
    key: "batch",
    min: 0,
    onInput: (place) => set({ batch: BATCHES[place] }),
  });
  const card = select("Card", "card", {
    [NONE]: "none",
    ...named(tables.cards, "usable"),
  });
  const tokens = slider({
    label: "Tokens of each sequence",
    key: "tokens",
    min: 0,
    onInput: (place) => set({ tokens: stops()[place] }),
  });
  const steps = slider({
    label: "Accumulation steps",
    key: "steps",
    onInput: change("steps"),
  });
  const recipes = Object.fromEntries(tables.recipes);
  const recipe = select("Precision", "recipe", recipes);
  const optimizer = select("Optimizer", "optimizer", tables.optimizers);
  const checkpointed = check("Checkpoint every block", "checkpointed");
  const foreach = check("Adam on all at once (foreach)", "foreach");

  const picture = svg("svg", { role: "img", class: "mb-picture" });
  let plan;
  drag(picture, {
    move: ({ x }) => set({ batch: batchAt(get(), plan, x) }),
    drop: () => batch.focus(),
  });

  const show = (state) => {
    model.update({ value: state.model });
    batch.update({
      value: BATCHES.findLastIndex((n) => n <= state.batch),
      max: BATCHES.length - 1,
      text: state.batch,
      spoken: plural(state.batch, "sequence"),
    });
    card.update({ value: state.card });
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
      spoken: `${microBatchWords(state)} sequences`,
      disabled: state.batch === 1 ? "one sequence is one micro-batch" : "",
    });
    recipe.update({ value: state.recipe });
    optimizer.update({ value: state.optimizer });
    checkpointed.update({ value: state.checkpointed });
    let why = "";
    if (state.optimizer !== ADAM) why = "only Adam does so";
    else if (state.card !== NONE) why = "on: PyTorch’s way on a GPU";
    foreach.update({ value: atOnce(state), disabled: why });
  };

  return {
    controls: [model, batch, card],
    picture,
    legend: legend(id, SHOWN),
    more: [tokens, steps, recipe, optimizer, checkpointed, foreach],
    note: html("p", {}, NOTE),
    draw(state, width, before) {
      const n = describe(state);
      plan = layout(state, width, before);
      show(state);
      const said = sentence(state);
      picture.setAttribute("viewBox", `0 0 ${width} ${plan.height}`);
      picture.setAttribute("aria-label", said);
      picture.replaceChildren(...draw(id, state, n, plan));
      return {
        title: "Memory of one training step",
        sentence: said,
        numbers: results(id, n),
      };
    },
  };
}

export default widget({ name: "ledger", keys, build });
