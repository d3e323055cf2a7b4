import {
  band,
  button,
  byteTicks,
  checkBox,
  choice,
  figure,
  formatBytes,
  formatNumber,
  hatching,
  html,
  makeId,
  redraw,
  save,
  slider,
  svg,
} from "./base.mjs";

/* Bits of a number, gradients under a loss scale, the peak by recipe.

   stored, describe and sentences: as Python's _stored, numbers and sentences.
   bitsLayout, scaleLayout, recipesLayout: where everything stands. */

/** bits of exponent and fraction; whether the largest exponent is finite */
const FORMATS = {
  fp32: [8, 23],
  tf32: [8, 10],
  bf16: [8, 7],
  fp16: [5, 10],
  "fp8-e4m3": [4, 3, true],
  "fp8-e5m2": [5, 2],
};
const SCALED = ["fp16", "bf16", "fp8-e5m2", "fp8-e4m3"];
const MOST_SCALE = 24;
const MOST_BUDGET = 2 ** 50;
const GIB = 2 ** 30;

const RECIPES = "fp32 autocast bf16 master master-fp32-gradients".split(" ");
const CATEGORIES = [
  ...["parameters", "gradients", "optimizer"],
  ...["activations", "inputs", "temporaries"],
];

const called = (word, more) =>
  word === "optimizer" ? `${word} ${more}` : word;

const NOTES = {
  bits:
    "The value that is stored, its relative error, and its bits: sign " +
    "(filled), exponent (framed) and fraction (plain).",
  scale:
    "A bar for each binade, from a power of two to the next. The loss scale " +
    "moves all to the right; dotted: where they stand without. Hatched: what " +
    "becomes zero or too large. Shaded: subnormal, with fewer bits.",
  merged: " The first bar holds what is smaller, too.",
  recipes:
    "What is alive at the peak of a training step with Adam, predicted. The " +
    "peak is one moment: what is not alive then, as gradients still to come, " +
    "is not in the bar. Temporaries are mostly gradients on their way back, " +
    "above all of the logits; in the optimizer step, its workspace. Bytes per " +
    "parameter: parameters + gradients + optimizer states.",
};

// ---- formats ------------------------------------------------------------

/* e of the binade [2^e, 2^(e + 1)) of a size. */
function binade(size) {
  let e = Math.max(Math.floor(Math.log2(size)), -1074);
  while (2 ** e > size) e -= 1;
  while (2 ** (e + 1) <= size) e += 1;
  return e;
}

/** Where a format ends. */
export function limits(name) {
  const [exponent, fraction, finite] = FORMATS[name];
  const bias = 2 ** (exponent - 1) - 1;
  const top = bias + (finite ? 1 : 0);
  const ulp = 2 ** (top - fraction);
  const largest = 2 ** (top + 1) - ulp * (finite ? 2 : 1);
  const normal = 2 ** (1 - bias);
  return {
    largest,
    normal,
    underflow: (normal * 2 ** -fraction) / 2,
    overflow: largest + ulp / 2,
  };
}

/* The format's number nearest to a size, a tie to the even fraction. */
function nearest(size, name) {
  const [exponent, fraction, finite] = FORMATS[name];
  const { largest, overflow } = limits(name);
  if (size >= overflow) return finite ? largest : Infinity;
  const lowest = 2 - 2 ** (exponent - 1);
  const step = 2 ** (Math.max(size ? binade(size) : lowest, lowest) - fraction);
  const steps = size / step;
  const below = Math.floor(steps);
  const rest = steps - below;
  return (below + (rest > 0.5 || (rest === 0.5 && below % 2))) * step;
}

/** What a format keeps of a number. */
export function stored(x, name) {
  const [exponent, fraction] = FORMATS[name];
  const { normal, overflow } = limits(name);
  const size = Math.abs(x);
  const kept = nearest(size, name);
  let kind = "normal";
  if (size && !kept) kind = "underflow";
  else if (kept !== size && size >= overflow) kind = "overflow";
  else if (kept && kept < normal) kind = "subnormal";
  let fields = [2 ** exponent - 1, 0];
  if (kept < normal) fields = [0, (kept / normal) * 2 ** fraction];
  else if (kept < Infinity) {
    const e = binade(kept);
    fields = [e - Math.log2(normal) + 1, (kept / 2 ** e - 1) * 2 ** fraction];
  }
  const negative = x < 0 || Object.is(x, -0);
  const digits = (n, width) => n.toString(2).padStart(width, "0");
  return {
    bits:
      `${negative ? 1 : 0} ${digits(fields[0], exponent)} ` +
      digits(fields[1], fraction),
    value: negative ? -kept : kept,
    error:
      size < Infinity && kept < Infinity
        ? size && Math.abs(kept - size) / size
        : null,
    kind,
  };
}

/** The number that a text means, or in words why it means none. */
export function parse(text) {
  const plain = text.trim().replaceAll("−", "-");
  const infinite = /^([+-]?)(?:inf|infinity|∞)$/i.exec(plain);
  if (infinite) return infinite[1] === "-" ? -Infinity : Infinity;
  const [, sign, power] = /^([+-]?)2(?:\^|\*\*)([+-]?\d+)$/.exec(plain) ?? [];
  const decimal = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(plain);
  if (!power && !decimal) return "is no number";
  const x = power ? (sign === "-" ? -1 : 1) * 2 ** power : Number(plain);
  if (Math.abs(x) === Infinity)
    return "is beyond the largest number, 1.8e308";
  if (!x && /^[^e]*[1-9]/i.test(plain))
    return "is below the smallest number, 5e-324";
  return x;
}

/* As the trait holds it; Python's float() reads it. */
const textOf = (x) => (Object.is(x, -0) ? "-0" : String(x));

// ---- numbers ------------------------------------------------------------

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

const ofFp32 = ({ fp32 }, { bytes }) =>
  `${Math.floor((bytes / fp32.bytes) * 100 + 0.5)} %`;

const bitsOf = ({ number }) =>
  Object.fromEntries(
    Object.keys(FORMATS).map((name) => [name, stored(Number(number), name)]),
  );

function sharesOf({ histogram, format, scale }) {
  const { gradients } = histogram;
  const lost = histogram.lost[format][Math.log2(scale)];
  const [below, subnormal, above] = lost.map((count) => count / gradients);
  const best = histogram.best[format];
  return { gradients, below, subnormal, above, best };
}

function recipesOf({ account, batch, checkpointed, budget }) {
  const { batches, peaks, phases, states } = account;
  const of = (table) => table[checkpointed ? 1 : 0][batches.indexOf(batch)];
  const [splits, moments] = [of(peaks), of(phases)];
  return Object.fromEntries(
    RECIPES.map((recipe, i) => {
      const bytes = sum(splits[i]);
      const fits = budget === null ? null : bytes <= budget;
      const split = CATEGORIES.map((c, k) => [c, splits[i][k]]);
      const all = { split: Object.fromEntries(split), bytes, fits };
      return [recipe, { ...all, phase: moments[i], states: states[i] }];
    }),
  );
}

/** What the widget shows. */
export const describe = (state) => ({
  formats: bitsOf(state),
  ...sharesOf(state),
  recipes: recipesOf(state),
});

const superscript = (n) =>
  String(n).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);

const two = (e) => `2${superscript(e)}`;

/* "851 496", with a narrow no-break space. */
const grouped = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f");

const power = (e) => (e ? `${two(e)} = ${grouped(2 ** e)}` : "1");

/** "0.0999755859", "5.96·10⁻⁸", "∞"; all digits without a number of them. */
export function numberText(x, digits) {
  const sign = x < 0 || Object.is(x, -0) ? "−" : "";
  const size = Math.abs(x);
  if (!size || size === Infinity) return sign + (size ? "∞" : "0");
  const text = size.toExponential(digits ? digits - 1 : undefined);
  const [mantissa, exponent] = text.split("e");
  if (exponent > -5 && exponent < 9) return sign + Number(text);
  const short = mantissa.replace(/\.?0+$/, "");
  return `${sign}${short}·10${superscript(Number(exponent))}`;
}

function percent(share) {
  if (share > 0 && share < 0.0001) return "< 0.01 %";
  if (share > 0.9999 && share < 1) return "> 99.99 %";
  return `${formatNumber(share * 100)} %`;
}

const and = (things) =>
  things.length > 1
    ? `${things.slice(0, -1).join(", ")} and ${things.at(-1)}`
    : things.join("");

function bitsSentence({ number }, formats) {
  const x = Number(number);
  const kinds = {};
  let worst;
  for (const [name, { kind, value, error }] of Object.entries(formats)) {
    const group = kind === "normal" && value === x ? "exact" : kind;
    (kinds[group] ??= []).push(name);
    if (group === "normal" && !(error <= formats[worst]?.error)) worst = name;
  }
  const all = Object.keys(formats).length;
  const { exact = [], normal } = kinds;
  const where = exact.length === all ? "every format" : and(exact);
  const named = (kind, words = kind) =>
    kinds[kind] ? `; ${words} in ${and(kinds[kind])}` : "";
  return (
    `${numberText(x)} is exact in ${where || "no format"}` +
    named("subnormal") +
    named("underflow", "underflow to 0") +
    named("overflow") +
    (normal
      ? `; ${normal.length < all ? "elsewhere " : ""}the relative error is ` +
        `at most ${numberText(formats[worst].error, 2)}, in ${worst}`
      : "") +
    "."
  );
}

/* The place of the slider next to an exponent. */
const inside = (e) => Math.min(Math.max(e, 0), MOST_SCALE);

function scaleSentence({ format, scale }, n) {
  const end = inside(n.best);
  return (
    `With a loss scale of ${power(Math.log2(scale))}, ${format} loses ` +
    `${percent(n.below)} of the ${grouped(n.gradients)} gradients to ` +
    `underflow; ${percent(n.subnormal)} are subnormal, and ` +
    `${percent(n.above)} overflow` +
    (n.above && !FORMATS[format][2]
      ? ", so a scaler would skip the step"
      : "") +
    `. The largest scale without overflow is ${two(n.best)}` +
    (n.best === end ? "" : ", which is beyond the slider") +
    (n.best === end || scale !== 2 ** end ? "." : ": this is its end.")
  );
}

function recipesSentence({ account, batch, checkpointed, budget }, recipes) {
  const bytes = (recipe) => recipes[recipe].bytes;
  const least = RECIPES.reduce((a, b) => (bytes(b) < bytes(a) ? b : a));
  const share = (recipe) =>
    `${formatBytes(bytes(recipe))} ` +
    `(${ofFp32(recipes, recipes[recipe])} of fp32’s)`;
  const fit = RECIPES.filter((recipe) => recipes[recipe].fits);
  return (
    `${account.name}, batch ${batch}, ` +
    `${checkpointed ? "" : "not "}checkpointed: the peak is ` +
    `${formatBytes(bytes("fp32"))} in fp32 and ${share("autocast")} under autocast` +
    (["fp32", "autocast"].includes(least)
      ? "."
      : `; the least is ${least}’s, ${share(least)}.`) +
    (budget === null
      ? ""
      : ` Within the budget of ${formatBytes(budget)}: ${and(fit) || "none"}.`)
  );
}

/** One for each picture; Python's Precision.sentences() are the same. */
export const sentences = (state) =>
  PARTS.map(([, numbers, sentence]) => sentence(state, numbers(state)));

// ---- geometry -----------------------------------------------------------

const LETTER = 7.1; // pixels, on average, in a wide font

/** The bits: a row for each format, its cells as wide as there is room. */
export function bitsLayout(state, formats, width) {
  const cell = Math.min((width - 10) / 32, 18);
  const lines = width < 400 ? 2 : 1; // of words, above the cells
  let y = 0;
  const rows = Object.entries(formats).map(([name, of]) => {
    const row = { name, ...of, y: y + 12, top: y + 15 * lines + 3 };
    let x = 1;
    row.cells = [];
    of.bits.split(" ").forEach((field, part) => {
      for (const bit of field) {
        row.cells.push({ bit, part, x });
        x += cell;
      }
      x += 4;
    });
    y = row.top + 20 + 10;
    return row;
  });
  return { rows, cell, lines, height: y - 8 };
}

/* A line begins below its label. Labels go to the right, each lower than the
   last, or in the right half to the left, each higher: so none is crossed. */
function placeLabels(marks, width) {
  const left = marks[1].x > width / 2;
  return marks.map((mark, i) => {
    const wide = LETTER * mark.label.length;
    const at = left ? Math.max(mark.x, wide) : Math.min(mark.x, width - wide);
    return { ...mark, left, at, y: 12 + 16 * (left ? 2 - i : i) };
  });
}

/** The histogram: bars move with the scale, the axis stays. */
export function scaleLayout({ histogram, format, scale }, n, width) {
  const { start, counts } = histogram;
  const plot = { left: 34, right: width - 8, top: 60, bottom: 200 };
  const low = Math.min(start, -27);
  const high = Math.max(start + counts.length + MOST_SCALE, 18);
  const each = (plot.right - plot.left) / (high - low);
  const x = (e) => plot.left + (e - low) * each;
  const most = Math.max(...counts) / n.gradients;
  const y = (share) =>
    plot.bottom - ((plot.bottom - plot.top) * share) / (1.04 * most);
  const edges = (shift) =>
    [...counts, 0].map((_, i) => x(start + i + shift));
  const { underflow, normal, overflow } = limits(format);
  const marks = [
    [underflow, "underflow "],
    [normal, "smallest normal "],
    [overflow, "overflow "],
  ].map(([size, name], i) => {
    const e = Math.log2(size);
    const words = name + (i < 2 ? two(e) : numberText(size, 5));
    const label = e < low ? `← ${words}` : e > high ? `${words} →` : words;
    const near = Math.min(Math.max(e, low), high);
    return { e, beyond: e !== near, label, x: x(near) };
  });
  const by = [4, 8, 16, 32, 64, 128].find((step) => step * each >= 48);
  const ticks = [];
  for (let e = Math.ceil(low / by) * by; x(e) <= width - 20; e += by) {
    ticks.push({ x: x(e), label: two(e) });
  }
  return {
    height: 240,
    plot,
    edges: edges(Math.log2(scale)),
    unscaled: edges(0),
    heights: counts.map((count) => y(count / n.gradients)),
    marks: placeLabels(marks, width),
    ticks,
    shares: byteTicks(100 * most, 3).marks.map(({ value, label }) => ({
      label,
      y: y(value / 100),
    })),
  };
}

/** A bar for each recipe, to one scale. */
export function recipesLayout({ budget }, recipes, width) {
  const peak = Math.max(...RECIPES.map((recipe) => recipes[recipe].bytes));
  const near = budget > peak && budget <= 2.5 * peak;
  const top = 1.04 * (near ? budget : peak);
  const plot = { left: 8, right: width - 40, top: budget ? 24 : 6 };
  const x = (bytes) => plot.left + ((plot.right - plot.left) * bytes) / top;
  const bars = RECIPES.map((recipe, i) => {
    let alive = 0;
    const parts = CATEGORIES.map((category) => {
      const left = x(alive);
      alive += recipes[recipe].split[category];
      return { category, x: left, width: x(alive) - left };
    }).filter((part) => part.width);
    return { recipe, ...recipes[recipe], parts, y: plot.top + 18 + 46 * i };
  });
  plot.bottom = bars.at(-1).y + 30;
  const { unit, marks } = byteTicks(top, Math.max(2, Math.floor(width / 90)));
  return {
    width,
    height: plot.bottom + 24,
    plot,
    bars,
    unit,
    ticks: marks.map(({ value, label }) => ({ label, x: x(value) })),
    budget: budget && { x: x(Math.min(budget, top)), beyond: budget > top },
  };
}

// ---- drawing ------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

const text = (x, y, content, attributes) =>
  svg("text", { x, y, ...attributes }, content);

const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

/* What is said of a number that is stored. */
function errorText({ kind, error }) {
  if (kind === "underflow" || kind === "overflow") return kind;
  const words = error ? `error ${numberText(error, 2)}` : "exact";
  return kind === "subnormal" ? `${words}, subnormal` : words;
}

function* bitsParts({ rows, cell, lines }) {
  const fields = ["sign", "exponent", "fraction"];
  for (const { name, y, top, cells, ...of } of rows) {
    const key = { "data-number": `${name}.value`, "data-value": of.value };
    const error = { "data-number": `${name}.error`, "data-value": of.error };
    const next = lines > 1 ? [76, y + 15] : [216, y];
    yield text(0, y, name, { class: "mb-value" });
    yield text(76, y, numberText(of.value, 9), key);
    yield text(...next, errorText(of), error);
    const bits = svg("g", { "data-number": name, "data-value": of.bits });
    for (const { bit, part, x } of cells) {
      const look = `mb-bit mb-${fields[part]}`;
      bits.append(
        svg("rect", { x, y: top, width: cell - 1, height: 20, class: look }),
        text(x + (cell - 1) / 2, top + 14, bit, { class: look }),
      );
    }
    yield bits;
  }
}

function* scaleParts(plan, { scale }, id) {
  const { plot, edges, unscaled, heights, marks } = plan;
  const { left, right, top, bottom } = plot;
  const lost = hatching(`${id}-lost`, 5, "M0 2.5H5", -45, "mb-lost-lines");
  yield svg("defs", {}, lost);
  for (const { y, label } of plan.shares) {
    yield line(left, y, right, y, "mb-grid");
    yield text(left - 6, y + 4, label, END);
  }
  yield text(left - 6, top - 8, "%", END);
  const shape = (at) => band(at, heights.map(() => bottom), heights);
  const d = shape(edges);
  yield svg("path", { d, class: "mb-bars" });
  yield svg("path", { d, fill: `url(#${id}-gradients)` });
  const [low, middle, high] = marks.map((mark) => mark.x);
  const shade = (from, to, look) =>
    svg("rect", {
      ...{ x: from, width: Math.max(to - from, 0) },
      ...{ y: top, height: bottom - top, ...look },
    });
  for (const [from, to] of [[left, low], [high, right]]) {
    yield shade(from, to, { class: "mb-lost" });
    yield shade(from, to, { fill: `url(#${id}-lost)` });
  }
  yield shade(low, middle, { class: "mb-few" });
  if (scale > 1) yield svg("path", { d: shape(unscaled), class: "mb-ghost" });
  yield line(left, bottom, right, bottom, "mb-axis");
  for (const { x, label } of plan.ticks) {
    yield line(x, bottom, x, bottom + 4, "mb-axis");
    yield text(x, bottom + 18, label, MIDDLE);
  }
  yield text((left + right) / 2, bottom + 36, "size × loss scale", MIDDLE);
  for (const { x, y, at, beyond, label, ...mark } of marks) {
    if (!beyond) yield line(x, y + 4, x, bottom, "mb-mark");
    yield text(at, y, label, mark.left && END);
  }
}

/* A box in a category's colour, and again in its pattern. */
const filled = (id, category, box) => [
  svg("rect", { ...box, class: `mb-${category}` }),
  svg("rect", { ...box, fill: `url(#${id}-${category})` }),
];

function* recipesParts(plan, state, id) {
  const { plot, bars, ticks, unit, width, budget } = plan;
  yield svg(
    "defs",
    {},
    hatching(`${id}-gradients`, 6, "M0 3H6", 45),
    hatching(`${id}-optimizer`, 8, "M0 4H8"),
    hatching(`${id}-activations`, 7, "M0 3.5H7", -45),
    hatching(`${id}-inputs`, 6, "M3 0V6"),
    hatching(`${id}-temporaries`, 5, "M1 2.5H2.5"),
  );
  for (const { x, label } of ticks) {
    yield line(x, plot.top, x, plot.bottom, "mb-grid");
    yield text(x, plot.bottom + 17, label, MIDDLE);
  }
  yield text(width, plot.bottom + 17, unit, END);
  yield line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis");
  for (const { y, parts } of bars) {
    for (const { category, x, width: wide } of parts) {
      yield* filled(id, category, { x, y, width: wide, height: 22 });
    }
  }
  if (budget) {
    const { x, beyond } = budget;
    const label = `budget ${formatBytes(state.budget)}${beyond ? " →" : ""}`;
    const half = (LETTER * label.length) / 2;
    const at = Math.min(Math.max(x, half), beyond ? plot.right : width - half);
    const d = bars.map(({ y }) => `M${x} ${y - 2}v28`).join("");
    if (!beyond) yield svg("path", { d, class: "mb-limit" });
    yield text(at, 12, label, beyond ? END : MIDDLE);
  }
  for (const { recipe, bytes, fits, y } of bars) {
    const sign = fits === null ? "" : fits ? " ✓" : " ✗";
    const words = text(plot.left, y - 5, `${recipe}: `, { class: "mb-halo" });
    const value = `${formatBytes(bytes)}${sign}`;
    words.append(svg("tspan", { class: "mb-value" }, value));
    yield words;
  }
}

// ---- the widget ---------------------------------------------------------

function shareList({ histogram, format }, n) {
  const { zeros } = histogram;
  const more = zeros ? ` (and ${grouped(zeros)} zeros)` : "";
  const entry = (label, key, shown) => {
    const of = { "data-number": key, "data-value": n[key] };
    return html("div", {}, html("dt", {}, label), html("dd", of, shown));
  };
  return [
    entry("gradients", "gradients", grouped(n.gradients) + more),
    entry(`lost to underflow in ${format}`, "below", percent(n.below)),
    entry("subnormal", "subnormal", percent(n.subnormal)),
    entry("lost to overflow", "above", percent(n.above)),
    entry("largest scale without overflow", "best", two(n.best)),
  ];
}

function recipeTable(recipes) {
  const column = (label) => html("th", { scope: "col" }, label);
  const head = "recipe,bytes per parameter,peak,of fp32’s,moment".split(",");
  const rows = RECIPES.map((recipe) => {
    const { bytes, phase, states } = recipes[recipe];
    const of = { "data-number": `${recipe}.bytes`, "data-value": bytes };
    return html(
      "tr",
      {},
      html("th", { scope: "row" }, recipe),
      html("td", {}, `${states.join(" + ")} =\u00a0${sum(states)}`),
      html("td", of, formatBytes(bytes)),
      html("td", {}, ofFp32(recipes, recipes[recipe])),
      html("td", {}, called(phase, "step")),
    );
  });
  return [
    html("thead", {}, html("tr", {}, ...head.map(column))),
    html("tbody", {}, ...rows),
  ];
}

const legend = (id) =>
  html(
    "div",
    { class: "mb-legend" },
    ...CATEGORIES.map((category) => {
      const box = { viewBox: "0 0 14 14", class: "mb-swatch" };
      const shape = filled(id, category, { width: 14, height: 14 });
      const swatch = svg("svg", { ...box, "aria-hidden": "true" }, ...shape);
      return html("span", {}, swatch, called(category, "states"));
    }),
  );

/* A labelled field. `read` gives a value, or in words why there is none: this
   is said, with how to write one, and the last value stays. */
function field({ label, key, read, write, name, how, live, say, onValue }) {
  const id = makeId();
  const input = html("input", {
    ...{ type: "text", id, "data-key": key, autocomplete: "off" },
    ...{ spellcheck: "false", "data-lm-suppress-shortcuts": "true" },
    "aria-errormessage": live.id,
  });
  const title = html("label", { for: id }, label);
  const root = html("div", { class: "mb-control" }, title, input);
  const object = (words) => {
    input.setAttribute("aria-invalid", Boolean(words));
    say(words);
  };
  let shown;
  input.addEventListener("input", () => {
    const typed = input.value.trim();
    const value = read(typed);
    if (typeof value === "string") {
      const what = typed ? `“${typed.slice(0, 30)}”` : "An empty field";
      object(`${what} ${value}: ${name(shown)} stays. ${how}`);
    } else {
      object("");
      onValue(value);
    }
  });
  const update = (value) => {
    if (Object.is(value, shown)) return;
    shown = value;
    if (!Object.is(read(input.value), value)) input.value = write(value);
    object("");
  };
  return { root, update };
}

/* What each part shows, says and draws. */
const PARTS = [
  [["number"], bitsOf, bitsSentence, bitsLayout, bitsParts],
  [
    ["histogram", "format", "scale", "label"],
    ...[sharesOf, scaleSentence, scaleLayout, scaleParts],
  ],
  [
    ["account", "batch", "checkpointed", "budget"],
    ...[recipesOf, recipesSentence, recipesLayout, recipesParts],
  ],
];

function render({ model, el }) {
  const read = () =>
    Object.fromEntries(
      PARTS.flatMap(([keys]) => keys).map((key) => [key, model.get(key)]),
    );
  const set = (key) => (value) => save(model, { [key]: value });
  const picture = () => svg("svg", { role: "img", class: "mb-picture" });
  const pictures = [picture(), picture(), picture()];
  const said = pictures.map(() =>
    html("p", { "aria-live": "polite", class: "mb-live", id: makeId() }),
  );
  const [wrong, timers] = [[], []];
  /* Says the sentence of a part, or what is wrong in its field. */
  const speak = (i) => {
    const now = () => {
      const words = wrong[i] || pictures[i].getAttribute("aria-label");
      said[i].classList.toggle("mb-problem", Boolean(wrong[i]));
      if (said[i].textContent !== words) said[i].textContent = words;
    };
    clearTimeout(timers[i]);
    if (said[i].textContent) timers[i] = setTimeout(now, 150);
    else now();
  };
  const heard = (i) => ({
    live: said[i],
    say: (words) => speak(i, (wrong[i] = words)),
  });

  const value = field({
    label: "Number",
    key: "number",
    read: parse,
    write: textOf,
    name: (x) => numberText(x),
    how: "Use digits and a point, as 0.1, 1e-5 or 2^-24.",
    ...heard(0),
    onValue: (x) => set("number")(textOf(x)),
  });
  const scale = slider({
    label: "Loss scale",
    key: "scale",
    min: 0,
    onInput: (e) => set("scale")(2 ** e),
  });
  const format = choice({
    label: "Format",
    key: "format",
    options: Object.fromEntries(SCALED.map((name) => [name, name])),
    onChange: set("format"),
  });
  const stop = button({
    label: "Largest scale without overflow",
    key: "best",
    onClick: () => set("scale")(2 ** inside(sharesOf(read()).best)),
  });
  const batch = slider({
    label: "Batch",
    key: "batch",
    min: 0,
    onInput: (i) => set("batch")(model.get("account").batches[i]),
  });
  const checkpointed = checkBox({
    label: "Checkpointed",
    key: "checkpointed",
    onChange: set("checkpointed"),
  });
  const budget = field({
    label: "Budget in GiB (empty: none)",
    key: "budget",
    read: (typed) => {
      if (!typed) return 0;
      const bytes = Math.round(parse(typed) * GIB);
      return bytes >= 1 && bytes <= MOST_BUDGET ? bytes : "is no budget";
    },
    write: (bytes) => (bytes ? String(bytes / GIB) : ""),
    name: (bytes) => (bytes ? formatBytes(bytes) : "no budget"),
    how: "Use GiB above 0, as 24 or 0.5, up to 1048576, or nothing.",
    ...heard(2),
    onValue: (bytes) => set("budget")(bytes || null),
  });

  const id = makeId();
  const title = html("span");
  const whose = html("span");
  const list = html("dl", { class: "mb-numbers" });
  const table = html("table", { class: "mb-table" });
  const merged = html("span");

  el.classList.add("mb-root", "mb-precision");
  el.append(
    html("div", { class: "mb-controls mb-one" }, value.root),
    said[0],
    figure("One number in six formats", NOTES.bits, pictures[0]),
    html(
      "div",
      { class: "mb-controls mb-next" },
      scale.root,
      format.root,
      html("div", { class: "mb-buttons" }, stop.root),
    ),
    said[1],
    figure(title, html("span", {}, NOTES.scale, merged), pictures[1]),
    list,
    html(
      "div",
      { class: "mb-controls mb-next" },
      batch.root,
      budget.root,
      checkpointed.root,
    ),
    said[2],
    figure(whose, NOTES.recipes, pictures[2]),
    legend(id),
    table,
  );

  const updates = [
    (state) => value.update(Number(state.number)),
    (state, n) => {
      const e = Math.log2(state.scale);
      const spoken = `2 to the power of ${e}`;
      scale.update({ value: e, max: MOST_SCALE, text: power(e), spoken });
      format.update({ value: state.format });
      title.textContent = `Gradients in ${state.format}`;
      if (state.label) title.append(": ", state.label);
      merged.textContent = state.histogram.merged ? NOTES.merged : "";
      list.replaceChildren(...shareList(state, n));
    },
    (state, recipes) => {
      const { batches, name } = state.account;
      batch.update({
        value: batches.indexOf(state.batch),
        max: batches.length - 1,
        text: state.batch,
        spoken: `batch ${state.batch}`,
      });
      checkpointed.update({ value: state.checkpointed });
      budget.update(state.budget ?? 0);
      whose.textContent = `Peak by recipe: ${name}`;
      table.replaceChildren(...recipeTable(recipes));
    },
  ];
  const last = [[], [], []];
  const end = redraw(model, pictures[0], (width) => {
    const state = read();
    el.classList.toggle("mb-narrow", width < 480);
    PARTS.forEach(([keys, numbers, sentence, layout, parts], i) => {
      // A part is drawn when what it shows has changed, and only then.
      const now = [width, ...keys.map((key) => state[key])];
      if (now.every((value, k) => value === last[i][k])) return;
      last[i] = now;
      const n = numbers(state);
      updates[i](state, n);
      const plan = layout(state, n, width);
      const box = `0 0 ${width} ${plan.height}`;
      pictures[i].setAttribute("viewBox", box);
      pictures[i].setAttribute("aria-label", sentence(state, n));
      pictures[i].replaceChildren(...parts(plan, state, id));
      speak(i);
    });
  });
  return () => {
    end();
    timers.forEach(clearTimeout);
    el.replaceChildren();
  };
}

export default { render };
