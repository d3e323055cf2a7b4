import {
  byteTicks,
  checkBox,
  choice,
  figure,
  formatBytes,
  formatNumber,
  hatching,
  html,
  makeId,
  numberField,
  redraw,
  save,
  slider,
  svg,
} from "./base.mjs";

/* Model states and communication of each rank, by stage.

   describe, sentence and titles: as Python's numbers, sentence and titles.
   layout: where everything stands. The coefficients come from Python, too
   (tables). */

const MOST_PARAMETERS = 2 ** 40;
const MOST_RANKS = 2 ** 10;
const MOST_STEPS = 2 ** 4;

/** The parts of a bar, from the left to the right. */
const PARTS = {
  parameters: "parameters",
  gradients: "gradients",
  waiting: "waiting gradients",
  optimizer: "optimizer states",
};

const KEYS = [
  ...["model", "ranks", "stage", "recipe", "accumulation_steps"],
  ...["synchronise_last", "card", "tables"],
];

// ---- numbers ------------------------------------------------------------

/* The rest of the first row of a table that begins with the name. */
const row = (table, name) => table.find(([first]) => first === name).slice(1);

const countOf = ({ model, tables }) =>
  typeof model === "number" ? model : row(tables.models, model)[0];

const waits = ({ synchronise_last, accumulation_steps }) =>
  synchronise_last && accumulation_steps > 1;

/* What a rank holds; to divide by a power of two is exact. */
function held(state, split, ranks) {
  const [, each] = row(state.tables.recipes, state.recipe);
  const [parameters, gradients, optimizer] = each.map((size, i) =>
    Math.ceil((countOf(state) * size) / (split[i] ? ranks : 1)),
  );
  const whole = waits(state) ? countOf(state) * each[1] : gradients;
  return { parameters, gradients, waiting: whole - gradients, optimizer };
}

const sum = (split) => Object.values(split).reduce((a, b) => a + b, 0);

function fewestRanks(state, split, card) {
  const fits = (ranks) => sum(held(state, split, ranks)) <= card;
  if (!card || !fits(2 ** 50)) return null; // of what is split, a byte is left
  let ranks = 1;
  while (!fits(ranks)) ranks *= 2;
  return ranks;
}

/* Bytes that are sent for each parameter, without (N - 1)/N. */
function sizes({ tables, recipe }, { gathered, reduced }) {
  const [, [parameters, gradients]] = row(tables.recipes, recipe);
  return [gathered * parameters, reduced * gradients];
}

function describeStage(state, [, , , split, gathers]) {
  const { tables, ranks, accumulation_steps: steps, card } = state;
  const [limit] = row(tables.cards, card);
  const reductions = state.synchronise_last ? 1 : steps;
  const traffic = {
    gathered: split[2] && !split[0] ? 1 : gathers * steps,
    reduced: (split[2] ? 1 : 2) * reductions,
  };
  const parts = held(state, split, ranks);
  const bytes = sum(parts);
  const size = countOf(state) * sum(sizes(state, traffic));
  return {
    split: parts,
    bytes,
    sent: size - Math.ceil(size / ranks),
    ...traffic,
    fits: limit ? bytes <= limit : null,
    fewest: fewestRanks(state, split, limit),
  };
}

/** What the widget shows. */
export const describe = (state) => ({
  parameters: countOf(state),
  stages: Object.fromEntries(
    state.tables.stages.map((stage) => [stage[0], describeStage(state, stage)]),
  ),
});

const nameOf = ({ tables }, stage) => row(tables.stages, stage)[0];

const plural = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

/* "851 496", with a narrow no-break space. */
const grouped = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f");

function times(ratio, than) {
  const text = formatNumber(ratio);
  return text === "1" ? "as much as DDP" : `${text} times ${than} DDP`;
}

/* Why the same Ψ are other bytes than DDP's. */
function unequal({ tables, recipe }) {
  const [, [parameter, gradient]] = row(tables.recipes, recipe);
  return parameter === gradient
    ? ""
    : ` (a parameter has ${parameter} bytes, a gradient ${gradient})`;
}

function fitting({ stage, ranks, card }, { fits, fewest }) {
  if (fits === null) return "";
  const text = ` The states ${fits ? "fit" : "do not fit"} a card of ${card}`;
  if (fewest === ranks) return `${text}.`;
  if (fewest) {
    const of = fewest > 2 ? "of the powers of two, " : "";
    return `${text}; ${of}${plural(fewest, "rank")} would be enough.`;
  }
  const why = stage === "ddp" ? "nothing is" : "too little is";
  return `${text}; no number of ranks helps, as ${why} split.`;
}

/** The chosen stage in words. */
export function sentence(state, n = describe(state)) {
  const { stage, ranks } = state;
  const of = n.stages[stage];
  const { ddp } = n.stages;
  const { waiting } = of.split;
  const than = (words) => (stage === "ddp" ? "" : `, ${words}`);
  const more = sum(sizes(state, of)) / sum(sizes(state, ddp));
  return (
    `${nameOf(state, stage)} on ${plural(ranks, "rank")}: ` +
    `${formatBytes(of.bytes)} of model states per rank` +
    (waiting
      ? ` (${formatBytes(waiting)} of them wait to be reduced)`
      : "") +
    than(times(ddp.bytes / of.bytes, "less than")) +
    (ranks === 1
      ? "; nothing is sent."
      : `; each rank sends ${formatBytes(of.sent)} per step` +
        `${than(times(more, "as much as") + unequal(state))}.`) +
    fitting(state, of) +
    ` Activations${stage === "zero-3" ? ", gathered parameters" : ""} ` +
    "and buffers come on top."
  );
}

/** Of both pictures. */
export function titles(state) {
  const { model, recipe, ranks, accumulation_steps: steps } = state;
  const own = typeof model === "number";
  const what =
    (own ? grouped(model) : model) +
    (own || model.endsWith(" B") ? ` parameter${model === 1 ? "" : "s"}` : "");
  return [
    `Model states per rank: ${what}, ${recipe}, ${plural(ranks, "rank")}`,
    "Sent by each rank per optimizer step: " +
      (steps === 1 ? "one micro-batch" : `${steps} micro-batches`) +
      (waits(state) ? ", reduced once" : ""),
  ];
}

/* What is said of a number of parameters that cannot be. */
const refusal = (state) =>
  "The number of parameters has to be whole, from 1 to " +
  `${grouped(MOST_PARAMETERS)} (2⁴⁰); it stays at ${grouped(countOf(state))}.`;

/** How to read both pictures, and what several micro-batches change. */
export function notes(state) {
  const { tables, recipe, ranks, card, accumulation_steps: steps } = state;
  const [words, each] = row(tables.recipes, recipe);
  const [bytes] = row(tables.cards, card);
  const size = `${bytes / 1e9} · 10⁹ bytes, ${formatBytes(bytes)}`;
  const part = ranks > 1 ? `${ranks - 1}/${ranks}` : 0;
  const more = "(K\u00a0+\u00a01)";
  const [ours, fsdp] = waits(state) ? ["2", more] : [more, "2K"];
  return [
    `Recipe ${recipe} (${words}), with Adam: ${each.join(" + ")} bytes per ` +
      "parameter for parameters, gradients and optimizer states. The chosen " +
      "stage is framed; where a bar is too short to be seen, the number " +
      `tells.${bytes ? ` The card's ${card} are ${size}.` : ""}`,
    `Parameters (${each[0]} bytes each) are sent to gather them, gradients ` +
      `(${each[1]} bytes each) to reduce them. Ψ: one number for each ` +
      `parameter, times (N − 1)/N = ${part}.`,
    steps === 1
      ? ""
      : "ZeRO-2 here is the paper's: its ranks keep whole parameters and " +
        "gather new ones once per step, so K micro-batches send " +
        `${ours}\u00a0Ψ; FSDP2's zero-2 gathers for every micro-batch: ` +
        `${fsdp}\u00a0Ψ.`,
  ];
}

const texts = (state) => [sentence(state), ...titles(state), ...notes(state)];

/** For each text, all that the sliders and the box can make it say; in the
    first note the card, too. */
export function sayings(state) {
  const found = texts(state).map(() => new Set());
  for (const synchronise_last of [false, true]) {
    for (let ranks = 1; ranks <= MOST_RANKS; ranks *= 2) {
      for (let steps = 1; steps <= MOST_STEPS; steps *= 2) {
        const moved = { ranks, accumulation_steps: steps, synchronise_last };
        const said = texts({ ...state, ...moved });
        said.forEach((text, i) => found[i].add(text));
      }
    }
  }
  for (const [card] of state.tables.cards) {
    found[3].add(notes({ ...state, card })[0]);
  }
  return found.map((all) => [...all]);
}

// ---- geometry -----------------------------------------------------------

const LETTER = 7.1; // pixels, on average, in a wide font

/* A bar for each stage, to one scale: [stage, its words, its parts]. */
function bars(rows, { width, card = 0, start, gap, height }) {
  const totals = rows.map(([, , parts]) => sum(parts));
  const most = Math.max(...totals);
  const near = most < card && card <= 2.5 * most;
  const top = 1.04 * (near ? card : most) || 1;
  const [left, right] = [8, width - 40];
  const x = (bytes) => left + ((right - left) * bytes) / top;
  const placed = rows.map(([stage, words, parts], i) => {
    let before = 0;
    const boxes = Object.entries(parts).map(([part, size]) => {
      const from = x(before);
      before += size;
      return { part, x: from, width: x(before) - from };
    });
    const shown = boxes.filter((box) => box.width);
    const end = x(before);
    return { stage, words, boxes: shown, end, y: start + 18 + gap * i };
  });
  const bottom = placed.at(-1).y + height + 8;
  const places = Math.max(2, Math.floor(width / 90));
  const { unit, marks } = byteTicks(top, places);
  const ticks = most ? marks : marks.slice(0, 1);
  return {
    ...{ left, right, top: start, bottom, height, width, unit, bars: placed },
    ticks: ticks.map(({ value, label }) => ({ label, x: x(value) })),
    card: card && { x: x(Math.min(card, top)), beyond: card > top },
  };
}

/** Both pictures. */
export function layout(state, n, width) {
  const [card] = row(state.tables.cards, state.card);
  const all = Object.entries(n.stages);
  const sign = ({ fits }) => (fits === null ? "" : fits ? " ✓" : " ✗");
  const states = all.map(([stage, of]) => {
    const { waiting } = of.split;
    const more = waiting ? `, ${formatBytes(waiting)} waiting` : "";
    const words = `${formatBytes(of.bytes)}${sign(of)}`;
    return [stage, [words, more], of.split];
  });
  const traffic = all.map(([stage, of]) => {
    const [gathered, reduced] = sizes(state, of);
    const parameters = (of.sent * gathered) / (gathered + reduced);
    const more = of.sent ? `, ${of.gathered + of.reduced} Ψ` : "";
    const parts = { parameters, gradients: of.sent - parameters };
    return [stage, [formatBytes(of.sent), more], parts];
  });
  const high = { gap: 48, height: 22, start: 24 }; // room for the card's name
  const low = { gap: 38, height: 14, start: 6 };
  return [
    bars(states, { width, card, ...high }),
    bars(traffic, { width, ...low }),
  ];
}

// ---- drawing ------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

const text = (x, y, content, attributes) =>
  svg("text", { x, y, ...attributes }, content);

const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

/* A box in a part's colour, and again in its pattern. */
const filled = (id, part, box) => [
  svg("rect", { ...box, class: `mb-${part}` }),
  svg("rect", { ...box, fill: `url(#${id}-${part})` }),
];

const patterns = (id) =>
  svg(
    "defs",
    {},
    hatching(`${id}-gradients`, 6, "M0 3H6", 45),
    hatching(`${id}-waiting`, 6, "M0 3H6", -45, "mb-waiting-lines"),
    hatching(`${id}-optimizer`, 8, "M0 4H8"),
  );

function* drawing(plan, state, id) {
  const { left, right, top, bottom, height, width, card } = plan;
  for (const { x, label } of plan.ticks) {
    yield line(x, top, x, bottom, "mb-grid");
    yield text(x, bottom + 17, label, MIDDLE);
  }
  yield text(width, bottom + 17, plan.unit, END);
  yield line(left, bottom, right, bottom, "mb-axis");
  for (const { stage, y, boxes, end } of plan.bars) {
    for (const { part, ...place } of boxes) {
      yield* filled(id, part, { ...place, y, height });
    }
    if (stage === state.stage) {
      const frame = { x: left, y, width: end - left, height };
      yield svg("rect", { ...frame, class: "mb-frame" });
    }
  }
  if (card) {
    const { x, beyond } = card;
    const [bytes] = row(state.tables.cards, state.card);
    const size = `card ${state.card} = ${formatBytes(bytes)}`;
    const label = `${size}${beyond ? " →" : ""}`;
    const half = (LETTER * label.length) / 2;
    const at = Math.min(Math.max(x, half), beyond ? right : width - half);
    // beside the bars, not through their words
    const d = plan.bars.map(({ y }) => `M${x} ${y}v${height + 4}`).join("");
    if (!beyond) yield svg("path", { d, class: "mb-limit" });
    yield text(at, 12, label, beyond ? END : MIDDLE);
  }
  for (const { stage, y, words: [size, more] } of plan.bars) {
    const chosen = stage === state.stage;
    const mark = chosen ? "mb-halo mb-chosen" : "mb-halo";
    const name = `${nameOf(state, stage)}: `;
    const words = text(left, y - 6, name, { class: mark });
    words.append(svg("tspan", { class: "mb-value" }, size), more);
    yield words;
  }
}

// ---- the widget ---------------------------------------------------------

/* What the pictures show, in numbers. */
function table(state, n) {
  const column = (label) => html("th", { scope: "col" }, label);
  const head = ["stage", "parameters", "gradients", "optimizer states", "sent"];
  const rows = Object.entries(n.stages).map(([stage, of]) => {
    const { parameters, gradients, waiting, optimizer } = of.split;
    const cell = (key, value) => {
      const data = { "data-number": `${stage}.${key}`, "data-value": value };
      return html("td", data, formatBytes(value));
    };
    return html(
      "tr",
      { class: stage === state.stage && "mb-chosen" },
      html("th", { scope: "row" }, nameOf(state, stage)),
      cell("parameters", parameters),
      cell("gradients", gradients + waiting),
      cell("optimizer", optimizer),
      cell("sent", of.sent),
    );
  });
  return [
    html("thead", {}, html("tr", {}, ...head.map(column))),
    html("tbody", {}, ...rows),
  ];
}

/* What is not always drawn comes last, so that no gap stands for it. */
const legend = (id) =>
  html(
    "div",
    { class: "mb-legend" },
    ...["parameters", "gradients", "optimizer", "waiting"].map((part) => {
      const box = { viewBox: "0 0 14 14", class: "mb-swatch" };
      const shape = filled(id, part, { width: 14, height: 14 });
      const swatch = svg("svg", { ...box, "aria-hidden": "true" }, ...shape);
      return html("span", { "data-part": part }, swatch, PARTS[part]);
    }),
  );

/* A text with room for the longest of several: what is below does not jump. */
function roomy(shown) {
  const room = html("span", { class: "mb-room", "aria-hidden": "true" });
  const root = html("span", { class: "mb-roomy" }, shown, room);
  const hold = (all) =>
    room.replaceChildren(...all.map((text) => html("span", {}, text)));
  return { root, hold };
}

function render({ model, el }) {
  const read = () =>
    Object.fromEntries(KEYS.map((key) => [key, model.get(key)]));
  const set = (key) => (value) => save(model, { [key]: value });
  const { models, stages, recipes, cards } = model.get("tables");
  const entries = (rows, words) =>
    Object.fromEntries(rows.map((one) => [one[0], words(one)]));

  const preset = choice({
    label: "Model",
    key: "model",
    options: { ...entries(models, ([name]) => name), own: "own number" },
    onChange: (name) => set("model")(name === "own" ? countOf(read()) : name),
  });
  const count = numberField({
    label: "Parameters Ψ",
    key: "parameters",
    max: MOST_PARAMETERS,
    onChange: set("model"),
  });
  const check = ({ type, target: { value, validity } }) => {
    if (type === "input") speakSoon(sentence(read()));
    else if (!value || !validity.valid) speakSoon(refusal(read()), 0);
  };
  count.root.addEventListener("input", check);
  count.root.addEventListener("change", check, true); // before the field does
  const ranks = slider({
    label: "Ranks N",
    key: "ranks",
    min: 0,
    onInput: (i) => set("ranks")(2 ** i),
  });
  const steps = slider({
    label: "Accumulation steps",
    key: "accumulation_steps",
    min: 0,
    onInput: (i) => {
      box.disabled = i === 0;
      set("accumulation_steps")(2 ** i);
    },
  });
  const stage = choice({
    label: "Stage",
    key: "stage",
    options: entries(stages, ([, name, words]) => `${name}: ${words}`),
    onChange: set("stage"),
  });
  const recipe = choice({
    label: "Recipe (bytes per parameter)",
    key: "recipe",
    options: entries(recipes, ([name, , e]) => `${name}: ${e.join(" + ")}`),
    onChange: set("recipe"),
  });
  const card = choice({
    label: "Card",
    key: "card",
    options: entries(cards, ([, , words]) => words),
    onChange: set("card"),
  });
  const last = checkBox({
    label: "Reduce gradients with the last micro-batch only",
    key: "synchronise_last",
    onChange: set("synchronise_last"),
  });
  const box = last.root.querySelector("input");

  const id = makeId();
  const pictures = [0, 1].map(() =>
    svg("svg", { role: "img", class: "mb-picture" }),
  );
  const said = html("span", { "aria-live": "polite", class: "mb-live" });
  const say = (words) => {
    if (said.textContent !== words) said.textContent = words;
  };
  const speakSoon = (words, wait = 150) => {
    clearTimeout(speaking);
    speaking = setTimeout(() => say(words), wait);
  };
  const captions = [1, 2, 3, 4, 5].map(() => html("span"));
  const places = [said, ...captions].map(roomy);
  const [live, ...heads] = places.map(({ root }) => root);
  const numbers = html("table", { class: "mb-table" });
  let speaking, held;

  el.classList.add("mb-root", "mb-sharding");
  el.append(
    svg("svg", { class: "mb-patterns", "aria-hidden": "true" }, patterns(id)),
    html(
      "div",
      { class: "mb-controls" },
      ...[preset, count, ranks, stage, recipe, card, steps, last].map(
        ({ root }) => root,
      ),
    ),
    html("p", { class: "mb-said" }, live),
    figure(heads[0], heads[2], pictures[0]),
    legend(id),
    figure(heads[1], heads[3], pictures[1]),
    numbers,
    html("p", { class: "mb-note" }, heads[4]),
  );

  const end = redraw(model, pictures[0], (width) => {
    const state = read();
    const n = describe(state);
    const { ranks: many, accumulation_steps: micro } = state;
    const own = typeof state.model === "number";
    preset.update({ value: own ? "own" : state.model });
    count.update({ value: n.parameters });
    const place = (value, most, thing) => ({
      value: Math.log2(value),
      max: Math.log2(most),
      text: value,
      spoken: plural(value, thing),
    });
    ranks.update(place(many, MOST_RANKS, "rank"));
    steps.update(place(micro, MOST_STEPS, "accumulation step"));
    stage.update({ value: state.stage });
    recipe.update({ value: state.recipe });
    card.update({ value: state.card });
    last.update({ value: state.synchronise_last });
    box.disabled = micro === 1;

    el.classList.toggle("mb-narrow", width < 480);
    el.classList.toggle("mb-waits", n.stages["zero-2"].split.waiting > 0);
    const chosen = [state.model, state.stage, state.recipe, state.card].join();
    if (chosen !== held) {
      sayings(state).forEach((all, i) => places[i].hold(all));
    }
    held = chosen;
    const [words, ...around] = texts(state);
    captions.forEach((caption, i) => (caption.textContent = around[i]));
    layout(state, n, width).forEach((plan, i) => {
      const picture = pictures[i];
      picture.setAttribute("viewBox", `0 0 ${width} ${plan.bottom + 24}`);
      picture.setAttribute("aria-label", i ? `${around[1]}.` : words);
      picture.replaceChildren(...drawing(plan, state, id));
    });
    numbers.replaceChildren(...table(state, n));
    if (said.textContent) speakSoon(words);
    else say(words);
  });
  return () => {
    end();
    clearTimeout(speaking);
    el.replaceChildren();
  };
}

export default { render };
