/* "Your model": does it fit a card, and which change makes it fit? The bytes
   are polynomials in the model's sizes, which Python has found. */

import {
  HOLDERS,
  bar,
  byteCell,
  choice,
  formatBytes,
  grouped,
  html,
  laid,
  legend,
  lengthAxis,
  lengths,
  line,
  listed,
  makeId,
  numberList,
  ragged,
  field,
  t,
  table,
  text,
  widget,
} from "./base.mjs";

const GIB = 2 ** 30;
const PARTS = Object.keys(HOLDERS);
const [OTHER, OWN] = ["another", "your own"];

// ---- a config ------------------------------------------------------------

const isEntries = (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value);

function parsed(words) {
  try {
    const entries = JSON.parse(words);
    if (isEntries(entries)) return { entries };
    const wrong = t`The text is no { … }: paste a model’s whole config.json.`;
    return { wrong };
  } catch {
    const wrong = t`The text is no JSON: paste a model’s whole config.json.`;
    return { wrong };
  }
}

/* The rotary positions; null where they are no entries. */
function rotary(entries) {
  const rope = {};
  for (const name of ["rope_scaling", "rope_parameters"]) {
    if (isEntries(entries[name])) Object.assign(rope, entries[name]);
    else if (entries[name]) return null;
  }
  return rope;
}

const show = (value) => {
  const words = JSON.stringify(value) ?? t`missing`;
  return words.length > 40 ? `${words.slice(0, 40)}…` : words;
};

/* The first option that is not among what it may be, in words; or "". */
function without({ fine }, entries) {
  const rope = rotary(entries);
  if (rope === null) return t`rope_scaling is no { … }`;
  const options = {
    ...entries,
    rope_type: rope.rope_type || rope.type,
    partial_rotary_factor:
      rope.partial_rotary_factor ?? entries.partial_rotary_factor,
  };
  for (const [name, allowed] of Object.entries(fine)) {
    const value = options[name];
    const empty = value === undefined || value === "" || value === false;
    if (!allowed.includes(empty ? null : value)) {
      const known = show(allowed[0]);
      return t`${name} is ${show(value)}: only ${known} is known here`;
    }
  }
  const [head] = [entries.architectures ?? []].flat();
  if (head !== undefined && !/^\w+ForCausalLM$/.test(head)) {
    return t`${show(head)} is no …ForCausalLM`;
  }
  return "";
}

/* The sizes by their entries. */
function sizesOf({ sizes }, entries) {
  const heads = entries.num_attention_heads;
  const otherwise = {
    num_key_value_heads: heads,
    head_dim: Math.floor(entries.hidden_size / heads),
  };
  return sizes.map((name) => [name, entries[name] ?? otherwise[name]]);
}

function misfit({ most, least, spans }, sizes) {
  const n = Object.fromEntries(sizes);
  for (const [name, value] of sizes) {
    if (!Number.isInteger(value) || value < 1 || value > most) {
      return t(
        "{0} is {1}: use a whole number from 1 to {2}",
        ...[name, show(value), grouped(most)],
      );
    }
  }
  if (n.num_hidden_layers < least || n.num_hidden_layers > 1000) {
    const depth = n.num_hidden_layers;
    return t`num_hidden_layers is ${depth}: here from ${least} to 1 000`;
  }
  if (n.num_attention_heads % n.num_key_value_heads) {
    return t`num_key_value_heads does not divide num_attention_heads`;
  }
  if (n.head_dim % 2) return t`head_dim is ${n.head_dim}: use an even number`;
  const queries = n.num_attention_heads * n.head_dim;
  const wide = { queries, MLP: n.intermediate_size };
  for (const [name, [low, high]] of Object.entries(spans)) {
    const times = wide[name] / n.hidden_size;
    if (times >= low && times <= high) continue;
    return t(
      "the width of the {0} is {1}: here from {2} to {3} times hidden_size",
      ...[name === "queries" ? t`queries` : name, wide[name], low, high],
    );
  }
  return "";
}

/* The entry of local attention, if it is switched on: null without one. */
function windowOf({ window }, entries) {
  const size = entries.sliding_window ?? null;
  if (window === null || size === null) return null;
  return window === "" || entries[window] === true ? size : null;
}

/** What a text says: { config }, a text with no more than what is needed; or
    { wrong }, a sentence. */
export function read(tables, words) {
  const { entries, wrong } = parsed(words);
  const refuse = (why) => ({
    wrong: t`${why}; the command membudget fits knows more models.`,
  });
  if (wrong) return { wrong };
  const kind = entries.model_type;
  if (kind === undefined || kind === null) {
    const name = show("model_type");
    return {
      wrong: t`The text has no ${name}: paste a model’s whole config.json.`,
    };
  }
  const rules = Object.hasOwn(tables.kinds, kind) && tables.kinds[kind];
  if (!rules) {
    const known = listed(Object.keys(tables.kinds));
    return refuse(
      t`The model_type ${show(kind)} is not known here, only ${known}`,
    );
  }
  const lacks = rules.needed.filter((name) => (entries[name] ?? null) === null);
  if (lacks.length) return { wrong: t`The config lacks ${listed(lacks)}.` };
  const sizes = sizesOf(tables, entries);
  const bad = misfit(tables, sizes) || without(rules, entries);
  if (bad) return refuse(bad[0].toUpperCase() + bad.slice(1));
  const tied = entries.tie_word_embeddings ?? false;
  const switched = entries[rules.window] ?? false;
  if (typeof tied !== "boolean" || typeof switched !== "boolean") {
    const name = typeof tied === "boolean" ? rules.window : "tie_word_embeddings";
    return { wrong: t`${name} is ${show(entries[name])}: use true or false.` };
  }
  const window = windowOf(rules, entries);
  if (window !== null && !(Number.isInteger(window) && window > 1)) {
    return refuse(t`Sliding_window is ${show(window)}`);
  }
  const on = { use_sliding_window: true, max_window_layers: 1 };
  const told = {
    model_type: kind,
    ...Object.fromEntries(sizes),
    tie_word_embeddings: tied,
    ...(window !== null && rules.window ? on : {}),
    ...(window !== null ? { sliding_window: window } : {}),
  };
  return { config: JSON.stringify(told, null, 1) };
}

// ---- bytes ---------------------------------------------------------------

const files = new Map();

/* The rows of Python's file. */
function known({ file }) {
  if (!files.has(file)) files.set(file, JSON.parse(file));
  return files.get(file);
}

/* Of a config: the sizes by the letters of the monomials, and what else. */
function modelOf({ kinds, least }, config) {
  const e = JSON.parse(config);
  const { rows, linears } = kinds[e.model_type];
  const [s, h, g] = [e.head_dim, e.num_attention_heads, e.num_key_value_heads];
  const [d, f] = [e.hidden_size, e.intermediate_size];
  const widths = [d, g * s, h * s, f];
  const wide = (times) => times.reduce((sum, n, i) => sum + n * widths[i], 0);
  return {
    ...{ rows, tied: e.tie_word_embeddings, window: e.sliding_window ?? null },
    ...{ depth: e.num_hidden_layers, beyond: e.num_hidden_layers - least },
    linears: linears.map((pair) => pair.map(wide)),
    letters: { V: e.vocab_size, d, f, q: h * s, k: g * s, h, g, s },
  };
}

/* Values of all monomials: alone, times the blocks beyond the least, times
   the rank, times both. */
function monomials({ monomials }, { letters, beyond }, rank, n, m) {
  const sizes = { ...letters, n, m };
  const alone = monomials.map((word) =>
    [...word].reduce((product, letter) => product * sizes[letter], 1),
  );
  const factors = [1, beyond, rank, beyond * rank];
  return factors.flatMap((factor) => alone.map((value) => factor * value));
}

function value(terms, values) {
  let sum = 0;
  for (let i = 0; i < terms.length; i += 2) sum += terms[i + 1] * values[terms[i]];
  return sum;
}

/* What weights in 4 bits have beyond their polynomial: begun blocks. */
function begun({ packed }, { linears, depth }) {
  const more = (weights) =>
    packed.reduce(
      (sum, [count, bytes]) =>
        sum + bytes * (Math.ceil(weights / count) - weights / count),
      0,
    );
  return depth * linears.reduce((sum, [a, b]) => sum + more(a * b), 0);
}

/** The worst moment of a step, of so many tokens in each sequence: its peak,
    its parts, and the moment: row and phase. */
export function worst(state, model, way, tokens = state.tokens) {
  const { tables, train, batch, rank } = state;
  const { moments, polynomials, rows } = known(tables);
  const [, , split, checkpointed] = wayOf(tables, way);
  const marks = [model.tied && "tied", checkpointed && "checkpointed"];
  const key = [model.rows, train, ...marks.filter(Boolean)].join(" ");
  const found = batch === 1 ? "one" : split ? "split" : "whole";
  const at = split ? 1 : batch;
  const values = monomials(tables, model, rank, tokens, at);
  let most = { peak: -1 };
  for (const [moment, ...numbers] of rows[key][found]) {
    const sizes = numbers.map((i) => value(polynomials[i], values));
    const peak = sizes.reduce((a, b) => a + b, 0);
    if (peak > most.peak) most = { peak, moment, sizes };
  }
  const parts = Object.fromEntries(PARTS.map((p, i) => [p, most.sizes[i]]));
  parts.inputs += tables.inputs * tokens * batch;
  if (train === "qlora") parts.parameters += begun(tables, model);
  const peak = PARTS.reduce((sum, part) => sum + parts[part], 0);
  return { peak, parts, moment: moments[most.moment] };
}

/** Why there is no answer; "" where there is one. */
export function problem(state, model = modelOf(state.tables, state.config)) {
  const { window, linears } = model;
  const narrow = Math.min(...linears.flat());
  if (window !== null && state.tokens >= window) {
    return t(
      "attention is local beyond {0} tokens: use fewer tokens, or the " +
        "command membudget fits",
      grouped(window - 1),
    );
  }
  if (state.train.includes("lora") && state.rank > narrow) {
    return t`a linear layer is ${narrow} wide: use a rank up to that`;
  }
  return "";
}

const wayOf = ({ ways }, way) => ways.find(([key]) => key === way);

const waysOf = ({ tables, batch }) =>
  tables.ways.filter(([, , split]) => batch > 1 || !split).map(([way]) => way);

const trainWords = ({ tables, train }) =>
  t(tables.train.find(([key]) => key === train)[1]);

/** Bytes of each way. */
export function peaks(state) {
  const model = modelOf(state.tables, state.config);
  if (problem(state, model)) return {};
  return Object.fromEntries(
    waysOf(state).map((way) => [way, worst(state, model, way).peak]),
  );
}

const least = (state, model, tokens) =>
  Math.min(...waysOf(state).map((w) => worst(state, model, w, tokens).peak));

/* The longest sequence that fits, in steps of 64 tokens; 0 where none does. */
function longest(state, model, budget) {
  let [low, high] = [0, 2 ** 14 + 1]; // times 64
  if (model.window !== null) high = Math.ceil(model.window / 64);
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    const fits = least(state, model, 64 * middle) <= budget;
    [low, high] = fits ? [middle, high] : [low, middle];
  }
  return 64 * low;
}

/** The numbers of the widget. */
export function describe(state) {
  const { tables, card, gib, train } = state;
  const model = modelOf(tables, state.config);
  const budget = card === OTHER ? Math.floor(gib * GIB) : tables.cards[card];
  const wrong = problem(state, model);
  if (wrong) return { budget, wrong, ways: [] };
  const ways = waysOf(state).map((way) => {
    const most = worst(state, model, way);
    const words = t(wayOf(tables, way)[1]);
    return { way, words, fits: most.peak <= budget, ...most };
  });
  const first = ways.find(({ fits }) => fits) ?? null;
  const smallest = ways.reduce((a, b) => (b.peak < a.peak ? b : a));
  const kinds = tables.train.map(([key]) => key);
  const other = kinds
    .slice(kinds.indexOf(train) + 1)
    .filter((key) => !problem({ ...state, train: key }, model))
    .map((key) => ({ key, peak: least({ ...state, train: key }, model) }))
    .find(({ peak }) => peak <= budget);
  const sizes = Object.entries(tables.cards).sort(([, a], [, b]) => a - b);
  const larger = sizes.find(([, size]) => size >= smallest.peak)?.[0] ?? null;
  return {
    ...{ budget, wrong, ways, first, smallest, larger },
    other: other ?? null,
    advised: first ?? smallest,
    longest: longest(state, model, budget),
  };
}

// ---- words ---------------------------------------------------------------

export function modelName({ tables, config }) {
  return tables.choices.find(([, text]) => text === config)?.[0] ?? OWN;
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);

const cardName = ({ card }) =>
  card === OTHER ? t`your card` : t`the ${card}`;

/* What would help where nothing fits. */
function helps(state, { other, longest, larger }) {
  const train = other && trainWords({ ...state, train: other.key });
  const all = [
    ...(other ? [t`${train} (${formatBytes(other.peak)})`] : []),
    ...(longest ? [t`sequences of ${grouped(longest)} tokens`] : []),
    ...(larger ? [t`a card as large as the ${larger}`] : []),
  ];
  if (!all.length) return t`No card of the list is large enough either.`;
  if (all.length === 1) return t`What would fit: ${all[0]}.`;
  const before = all.slice(0, -1).join(t`, `);
  return t`What would fit: ${before} or ${all.at(-1)}.`;
}

/** The verdict. */
export function sentence(state) {
  const { train, rank, batch, tokens } = state;
  const n = describe(state);
  const name = modelName(state);
  const model = capital(name === OWN ? t`your own` : name);
  const how = train.includes("lora")
    ? t`${trainWords(state)} of rank ${rank}`
    : trainWords(state);
  const told = t`${model}, ${how}, ${batch} × ${grouped(tokens)} tokens`;
  if (n.wrong) return t`${told}: ${n.wrong}.`;
  const plain = t`${told}: ${formatBytes(n.ways[0].peak)} all at once`;
  const card = [formatBytes(n.budget), cardName(state)];
  if (n.first === n.ways[0]) {
    return t("{0}, which fits the {1} of {2}.", plain, ...card);
  }
  const { words, peak } = n.first ?? n.smallest;
  if (n.first) {
    return t(
      "{0}, too much for the {1} of {2}. {3} it fits in {4}.",
      ...[plain, ...card, capital(words), formatBytes(peak)],
    );
  }
  const least = t(
    "{0}. The least is {1}, {2}: too much for the {3} of {4}.",
    ...[plain, formatBytes(peak), words, ...card],
  );
  return [least, helps(state, n)].join(t` `);
}

const verdict = ({ wrong, first, smallest, budget }) => {
  if (wrong) return t`No answer`;
  if (first) return t`It fits in ${formatBytes(first.peak)}`;
  return t`${formatBytes(smallest.peak - budget)} too much`;
};

// ---- the picture ---------------------------------------------------------

const [TOP, ROW, TALL] = [40, 50, 20];
const END = { "text-anchor": "end" };

/** Where everything stands. */
export function layout(state, width) {
  const n = describe(state);
  const plot = { left: 3, right: width - 3 };
  const all = n.ways.map(({ peak }) => peak);
  const room = Math.max(4 * n.budget, 1.25 * Math.min(...all, Infinity));
  const top = Math.min(Math.max(1.05 * n.budget, ...all), room);
  const { x, ...axis } = lengths(plot, top, width);
  const bars = n.ways.map((way, i) => ({
    ...{ ...way, y: TOP + i * ROW + 17, runs: laid(way.parts, x) },
    beyond: way.peak > top,
  }));
  const bottom = TOP + Math.max(n.ways.length, 2) * ROW;
  return { n, plot, axis, bars, edge: x(n.budget), bottom, height: bottom + 26 };
}

function draw(id, plan) {
  const { n, plot, axis, bars, edge, bottom } = plan;
  const look = `mb-verdict${n.first ? " mb-fine" : " mb-broken"}`;
  return [
    text(plot.left, 24, verdict(n), { class: look }),
    ...bars.flatMap(({ words, fits, peak, runs, y, beyond }) => [
      text(plot.left, y - 5, capital(words)),
      text(plot.right, y - 5, `${fits ? "✓ " : ""}${formatBytes(peak)}`, {
        ...END,
        class: fits ? "mb-value mb-fine" : "mb-value mb-broken",
      }),
      ...bar(id, runs, y, TALL),
      ...(beyond ? [ragged(plot.right - 14, y - 2, TALL + 4)] : []),
      line(edge, y - 2, edge, y + TALL + 3, "mb-card"),
    ]),
    ...lengthAxis(plot, bottom, axis),
  ];
}

/* A row's name, which is that of an operator. */
const rowText = (row) =>
  row
    .replace(/^a block's /, t`a block's `)
    .replace("(sum of gradients)", t`(sum of gradients)`)
    .replace("four bits", t`four bits`);

const PHASES = {
  forward: t`forward`,
  backward: t`backward`,
  recomputation: t`recomputation`,
  update: t`update`,
};

function results(id, n) {
  if (n.wrong) return [];
  const [whole] = n.ways;
  const of = (key, way) => (part) => byteCell(`${key}.${part}`, way.parts[part]);
  const cells = [of("whole", whole), of("advised", n.advised)];
  const rows = PARTS.map((part) => ({
    ...{ part, label: HOLDERS[part] },
    cells: cells.map((cell) => cell(part)),
  }));
  const head = [t`at the peak`, t`all at once`, n.first ? t`fits` : t`least`];
  const [row, phase] = n.advised.moment;
  return [
    table(id, head, rows),
    numberList([
      ...n.ways.map(({ way, words, peak }) => [
        ...[words, `peaks.${way}`, peak, formatBytes(peak)],
      ]),
      [t`the card has`, "budget", n.budget, formatBytes(n.budget)],
      [
        ...[t`longest sequence that fits`, "longest", n.longest],
        n.longest ? t`${grouped(n.longest)} tokens` : t`none`,
      ],
      [
        ...[t`the peak comes at`, "moment"],
        t`${rowText(row)}, ${PHASES[phase]}`,
      ],
    ]),
  ];
}

const NOTES = [
  t(
    "All of this is computed in your browser. What you paste is sent " +
      "nowhere; only the page’s address holds it, for you to share.",
  ),
  t(
    "The step is that of the library transformers, with AdamW, attention as " +
      "one operator, no padding and no cache, by a GPU’s kernels. LoRA is " +
      "in all linear layers, in fp32 over weights in bf16; QLoRA’s are in " +
      "4 bits.",
  ),
  t(
    "One at a time: micro-batches of one sequence, their gradients summed. " +
      "Checkpointed: every block keeps its input alone and runs again.",
  ),
  t(
    "A step can have the memory of a card but half a GiB, for CUDA and what " +
      "the allocator cannot use.",
  ),
];

// ---- the widget ----------------------------------------------------------

/* The text of a config: what was typed stays, right or wrong. */
function configBox({ label, key, get, set }) {
  const id = makeId();
  const more = { rows: 5, spellcheck: "false", autocomplete: "off" };
  const box = html("textarea", {
    ...{ id, ...more, "data-key": key, "data-lm-suppress-shortcuts": "true" },
    "aria-describedby": `${id}-wrong`,
  });
  const wrong = html("small", {
    ...{ id: `${id}-wrong`, class: "mb-wrong", "aria-live": "polite" },
  });
  const enter = (words) => {
    const found = read(get().tables, words);
    wrong.textContent = found.wrong ?? "";
    if (found.wrong) box.setAttribute("aria-invalid", "true");
    else box.removeAttribute("aria-invalid");
    if (found.config) set({ config: found.config });
  };
  box.addEventListener("input", () => enter(box.value));
  let [shown, own] = [null, false];
  return {
    root: html("div", { class: "mb-config" }, html("label", { for: id }, label), box, wrong),
    key,
    update(config, known) {
      own = !known;
      if (config === shown) return;
      shown = config;
      if (read(get().tables, box.value).config === config) return;
      box.value = config;
      wrong.textContent = "";
      box.removeAttribute("aria-invalid");
    },
    held: () => (own ? shown : ""),
    enter: (words) => words && enter(words),
  };
}

/* A field for a number from `min` to `max`. */
const between = ({ min, max, ...more }) =>
  field({
    ...{ type: "number", min, max, write: String, ...more },
    read: (words) => {
      const value = words.trim() === "" ? NaN : Number(words);
      const fits = value >= min && value <= max;
      return fits && (more.step || Number.isInteger(value)) ? value : undefined;
    },
    how: more.step
      ? t`use a number from ${min} to ${grouped(max)}`
      : t`use a whole number from ${min} to ${grouped(max)}`,
  });

const keys = ["config", "train", "card", "gib", "tokens", "batch", "rank", "tables"];

function build({ id, get, set, bound, again }) {
  const { tables } = get();
  const box = configBox({
    label: t`Its config.json: paste it, or change a number`,
    ...{ key: "config", get, set },
  });
  let pasted = false; // the reader wants to
  const pick = (name) => {
    pasted = name === OWN;
    if (!pasted) set({ config: new Map(tables.choices).get(name) });
    again();
  };
  const model = choice({
    ...{ label: t`Model`, key: "model", onChange: pick },
    options: {
      [OWN]: t`your own: paste its config.json`,
      ...Object.fromEntries(tables.choices.map(([name]) => [name, name])),
    },
  });
  model.root.append(box.root);
  const train = bound(choice, t`Trained`, "train", {
    options: Object.fromEntries(
      tables.train.map(([key, words]) => [key, t(words)]),
    ),
  });
  const sized = Object.entries(tables.cards)
    .sort(([, a], [, b]) => a - b)
    .map(([name, size]) => [name, t`${name}: ${formatBytes(size)}`]);
  const other = { [OTHER]: t`another: type its GiB` };
  const options = { ...Object.fromEntries(sized), ...other };
  const card = bound(choice, t`Card`, "card", { options });
  const gib = bound(between, t`GiB that a step can have`, "gib", {
    ...{ min: 0.5, max: 1000, step: "any" },
  });
  card.root.append(gib.root);
  const { inputs, ...parts } = { ...HOLDERS, optimizer: t`optimizer` };
  const sign = html("i", { class: "mb-card-mark" });
  const mark = html("span", {}, sign, t`the card`);
  const shown = legend(id, parts);
  shown.append(mark);
  return {
    controls: [model, { ...box, root: null }, train, card, { ...gib, root: null }],
    legend: shown,
    more: [
      bound(between, t`Tokens of a sequence`, "tokens", {
        ...{ min: 64, max: 2 ** 20 },
      }),
      bound(between, t`Sequences of a step`, "batch", { min: 1, max: 1024 }),
      bound(between, t`Rank of LoRA`, "rank", { min: 1, max: 1024 }),
    ],
    note: html("ul", {}, ...NOTES.map((words) => html("li", {}, words))),
    draw(state, width) {
      const name = modelName(state);
      const asked = name === OWN ? t`your model` : name;
      const plan = layout(state, width);
      model.update({ value: pasted ? OWN : name });
      box.update(state.config, name !== OWN);
      box.root.hidden = !pasted && name !== OWN;
      gib.root.hidden = state.card !== OTHER;
      return {
        title: t`Will ${asked} fit ${cardName(state)}?`,
        sentence: sentence(state),
        wrong: Boolean(plan.n.wrong),
        height: plan.height,
        drawn: draw(id, plan),
        numbers: results(id, plan.n),
      };
    },
  };
}

export default widget({ name: "yours", keys, build });
