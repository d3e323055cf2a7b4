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

   stored(x, name): what a format keeps of x; Python's _stored() is the same.
   describe(state): the numbers; Python's Precision.numbers() is the same.
   sentences(state): one for each picture, to the letter Python's.
   bitsLayout, scaleLayout, recipesLayout: where everything stands.
   render({ model, el }): controls, pictures and tables. */

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

const NOTES = {
  bits:
    "The value that is stored, its relative error, and its bits: sign " +
    "(filled), exponent (framed) and fraction (plain).",
  scale:
    "A bar for each binade, from a power of two to the next. The loss scale " +
    "moves all of them to the right; the dotted outline is where they stand " +
    "without. Hatched: what becomes zero or too large. Shaded: subnormal, " +
    "with fewer bits.",
  merged: " The first bar holds what is smaller, too.",
  recipes:
    "What is alive at the peak of a training step with Adam, predicted. The " +
    "peak is one moment: what is not alive then, as gradients that are still " +
    "to come, is not in the bar. Temporaries are mostly gradients on their " +
    "way back, of the logits above all; in the optimizer step its workspace. " +
    "Bytes per parameter are those of parameters, gradients and optimizer " +
    "states.",
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

const percentOf = (part, whole) => Math.floor((part / whole) * 100 + 0.5);

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

/* "851 496", with a narrow no-break space. */
const grouped = (n) => String(n).replace(/\B(?=(\d{3})+$)/g, "\u202f");

const power = (e) => (e ? `2${superscript(e)} = ${grouped(2 ** e)}` : "1");

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
  const kinds = { exact: [], normal: [] };
  let worst = null;
  for (const [name, { kind, value, error }] of Object.entries(formats)) {
    const group = kind === "normal" && value === x ? "exact" : kind;
    kinds[group] = [...(kinds[group] ?? []), name];
    if (group === "normal" && error > (worst?.error ?? 0))
      worst = { name, error };
  }
  const all = kinds.exact.length === Object.keys(FORMATS).length;
  const exact = all ? "every format" : and(kinds.exact) || "no format";
  const { subnormal, underflow, overflow } = kinds;
  const elsewhere =
    kinds.normal.length < Object.keys(FORMATS).length ? "elsewhere " : "";
  return (
    `${numberText(x)} is exact in ${exact}` +
    (subnormal ? `; subnormal in ${and(subnormal)}` : "") +
    (underflow ? `; underflow to 0 in ${and(underflow)}` : "") +
    (overflow ? `; overflow in ${and(overflow)}` : "") +
    (worst
      ? `; ${elsewhere}the relative error is at most ` +
        `${numberText(worst.error, 2)}, in ${worst.name}`
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
    `${percent(n.below)} of the ${grouped(n.gradients)} gradients to underflow; ` +
    `${percent(n.subnormal)} are subnormal, and ` +
    `${percent(n.above)} overflow` +
    (n.above && !FORMATS[format][2]
      ? ", so a scaler would skip the step"
      : "") +
    `. The largest scale without overflow is 2${superscript(n.best)}` +
    (n.best === end ? "" : ", which is beyond the slider") +
    (n.best === end || scale !== 2 ** end ? "." : ": this is its end.")
  );
}

function recipesSentence({ account, batch, checkpointed, budget }, recipes) {
  const whole = recipes.fp32.bytes;
  const bytes = (recipe) => recipes[recipe].bytes;
  const least = RECIPES.reduce((a, b) => (bytes(b) < bytes(a) ? b : a));
  const share = (recipe) =>
    `${formatBytes(bytes(recipe))} (` +
    `${percentOf(bytes(recipe), whole)} % of fp32’s)`;
  const fit = RECIPES.filter((recipe) => recipes[recipe].fits);
  return (
    `${account.name}, batch ${batch}, ` +
    `${checkpointed ? "" : "not "}checkpointed: the peak is ` +
    `${formatBytes(whole)} in fp32 and ${share("autocast")} under autocast` +
    (["fp32", "autocast"].includes(least)
      ? "."
      : `; the least is ${least}’s, ${share(least)}.`) +
    (budget === null
      ? ""
      : ` Within the budget of ${formatBytes(budget)}: ${and(fit) || "none"}.`)
  );
}

/** One for each picture; Python's Precision.sentences() are the same. */
export const sentences = (state) => [
  bitsSentence(state, bitsOf(state)),
  scaleSentence(state, sharesOf(state)),
  recipesSentence(state, recipesOf(state)),
];

// ---- geometry -----------------------------------------------------------

const LETTER = 7.1; // pixels, on average, in a wide font

/** The bits: a row for each format, its cells as wide as there is room. */
export function bitsLayout(formats, width) {
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
  return { rows, cell, lines, width, height: y - 8 };
}

/* Where a line begins there is its label: at the left of the first lines, each
   higher than the last, at the right of the others, each lower. So no line
   crosses a label. `first` lines are where there is most room. */
function placeLabels(marks, width) {
  const room = ({ x, label }, before) =>
    (before ? x : width - x) - LETTER * label.length;
  const rooms = [0, 1, 2, 3].map((first) =>
    Math.min(...marks.map((mark, i) => room(mark, i < first))),
  );
  const first = rooms.indexOf(Math.max(...rooms));
  return marks.map((mark, i) => {
    const before = i < first;
    return { ...mark, before, y: 12 + 16 * (before ? first - 1 - i : i - first) };
  });
}

/** The histogram: bars move with the scale, the axis stays. */
export function scaleLayout({ histogram, format, scale }, width) {
  const { start, counts, gradients } = histogram;
  const plot = { left: 34, right: width - 8, top: 60, bottom: 200 };
  const low = Math.min(start, -27);
  const high = Math.max(start + counts.length + MOST_SCALE, 18);
  const each = (plot.right - plot.left) / (high - low);
  const x = (e) => plot.left + (e - low) * each;
  const most = Math.max(...counts) / gradients;
  const y = (share) =>
    plot.bottom - ((plot.bottom - plot.top) * share) / (1.04 * most);
  const edges = (shift) =>
    [...counts, 0].map((_, i) => x(start + i + shift));
  const { underflow, normal, overflow } = limits(format);
  const marks = [
    ["underflow", underflow],
    ["smallest normal", normal],
    ["overflow", overflow],
  ].map(([name, size], i) => {
    const e = Math.log2(size);
    const beyond = e < low ? -1 : e > high ? 1 : 0;
    const end = i < 2 ? `2${superscript(e)}` : numberText(size, 5);
    const words = `${name} ${end}`;
    const label = [`← ${words}`, words, `${words} →`][beyond + 1];
    const at = x(Math.min(Math.max(e, low), high));
    return { e, beyond, label, x: at };
  });
  const by = [4, 8, 16, 32, 64, 128].find((step) => step * each >= 48);
  const ticks = [];
  for (let e = Math.ceil(low / by) * by; e <= high; e += by) {
    if (x(e) > width - 20) break;
    ticks.push({ x: x(e), label: `2${superscript(e)}` });
  }
  return {
    width,
    height: 240,
    plot,
    edges: edges(Math.log2(scale)),
    unscaled: edges(0),
    heights: counts.map((count) => y(count / gradients)),
    marks: placeLabels(marks, width),
    ticks,
    shares: byteTicks(100 * most, 3).marks.map(({ value, label }) => ({
      label,
      y: y(value / 100),
    })),
  };
}

/** A bar for each recipe, to one scale. */
export function recipesLayout(recipes, budget, width) {
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
    const { bytes, fits } = recipes[recipe];
    return { recipe, bytes, fits, parts, y: plot.top + 18 + 46 * i };
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
    budget: budget
      ? { x: x(Math.min(budget, top)), beyond: budget > top }
      : null,
  };
}

// ---- drawing ------------------------------------------------------------

const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, ...attributes }, content);

const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

const show = (root, { width, height }, label, parts) => {
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("aria-label", label);
  root.replaceChildren(...parts);
};

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

function* scaleParts(id, plan, scale) {
  const { plot, edges, unscaled, heights, marks } = plan;
  const { left, right, top, bottom } = plot;
  yield svg(
    "defs",
    {},
    hatching(`${id}-bars`, 6, "M0 3H6", 45),
    hatching(`${id}-lost`, 5, "M0 2.5H5", -45, "mb-lost-lines"),
  );
  for (const { y, label } of plan.shares) {
    yield line(left, y, right, y, "mb-grid");
    yield text(left - 6, y + 4, label, { "text-anchor": "end" });
  }
  yield text(left - 6, top - 8, "%", { "text-anchor": "end" });
  const d = band(edges, heights.map(() => bottom), heights);
  yield svg("path", { d, class: "mb-bars" });
  yield svg("path", { d, fill: `url(#${id}-bars)` });
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
  if (scale > 1) {
    const outline = band(unscaled, heights.map(() => bottom), heights);
    yield svg("path", { d: outline, class: "mb-ghost" });
  }
  yield line(left, bottom, right, bottom, "mb-axis");
  for (const { x, label } of plan.ticks) {
    yield line(x, bottom, x, bottom + 4, "mb-axis");
    yield text(x, bottom + 18, label, { "text-anchor": "middle" });
  }
  const middleOf = { "text-anchor": "middle" };
  yield text((left + right) / 2, bottom + 36, "size × loss scale", middleOf);
  for (const { x, y, beyond } of marks) {
    if (!beyond) yield line(x, y - 8, x, bottom, "mb-mark");
  }
  for (const { x, y, before, beyond, label } of marks) {
    const gap = beyond ? 0 : before ? -4 : 4;
    const anchor = before ? "end" : "start";
    yield text(x + gap, y, label, { "text-anchor": anchor, class: "mb-halo" });
  }
}

/* A box in a category's colour, and again in its pattern. */
const filled = (id, category, box) => [
  svg("rect", { ...box, class: `mb-${category}` }),
  svg("rect", { ...box, fill: `url(#${id}-${category})` }),
];

const patterns = (id) =>
  svg(
    "defs",
    {},
    hatching(`${id}-gradients`, 6, "M0 3H6", 45),
    hatching(`${id}-optimizer`, 8, "M0 4H8"),
    hatching(`${id}-activations`, 7, "M0 3.5H7", -45),
    hatching(`${id}-inputs`, 6, "M3 0V6"),
    hatching(`${id}-temporaries`, 5, "M1 2.5H2.5"),
  );

function* recipesParts(id, plan, size) {
  const { plot, bars, ticks, unit, width, budget } = plan;
  yield patterns(id);
  for (const { x, label } of ticks) {
    yield line(x, plot.top, x, plot.bottom, "mb-grid");
    yield text(x, plot.bottom + 17, label, { "text-anchor": "middle" });
  }
  yield text(width, plot.bottom + 17, unit, { "text-anchor": "end" });
  yield line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis");
  for (const { y, parts } of bars) {
    for (const { category, x, width: wide } of parts) {
      yield* filled(id, category, { x, y, width: wide, height: 22 });
    }
  }
  if (budget) {
    const { x, beyond } = budget;
    const label = `budget ${formatBytes(size)}${beyond ? " →" : ""}`;
    const half = (LETTER * label.length) / 2;
    const at = Math.min(Math.max(x, half), beyond ? plot.right : width - half);
    const d = bars.map(({ y }) => `M${x} ${y - 2}v28`).join("");
    if (!beyond) yield svg("path", { d, class: "mb-limit" });
    const anchor = beyond ? "end" : "middle";
    yield text(at, 12, label, { "text-anchor": anchor });
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

const number = (key, value, shown) =>
  html("span", { "data-number": key, "data-value": value }, shown);

const entry = (label, ...shown) =>
  html("div", {}, html("dt", {}, label), html("dd", {}, ...shown));

function shareList({ histogram, format }, n) {
  const share = (label, key) =>
    entry(label, number(key, n[key], percent(n[key])));
  const { zeros } = histogram;
  const more = zeros ? ` (and ${grouped(zeros)} zeros)` : "";
  const count = `${grouped(n.gradients)}${more}`;
  return [
    entry("gradients", number("gradients", n.gradients, count)),
    share(`lost to underflow in ${format}`, "below"),
    share("subnormal", "subnormal"),
    share("lost to overflow", "above"),
    entry(
      "largest scale without overflow",
      number("best", n.best, `2${superscript(n.best)}`),
    ),
  ];
}

function recipeTable(recipes) {
  const column = (label) => html("th", { scope: "col" }, label);
  const head = ["recipe", "bytes per parameter", "peak", "of fp32’s", "moment"];
  const rows = RECIPES.map((recipe) => {
    const { bytes, phase, states } = recipes[recipe];
    return html(
      "tr",
      {},
      html("th", { scope: "row" }, recipe),
      html("td", {}, `${states.join(" + ")} = ${sum(states)}`),
      html("td", {}, number(`${recipe}.bytes`, bytes, formatBytes(bytes))),
      html("td", {}, `${percentOf(bytes, recipes.fp32.bytes)} %`),
      html("td", {}, phase === "optimizer" ? "optimizer step" : phase),
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
      return html("span", {}, swatch, category === "optimizer" ? "optimizer states" : category);
    }),
  );

/* What a part says: its sentence, or else what is wrong in its field. */
function voice() {
  const look = { class: "mb-live", "aria-live": "polite", id: makeId() };
  const root = html("p", look);
  let [words, wrong, timer] = ["", "", 0];
  const now = () => {
    const next = wrong || words;
    root.classList.toggle("mb-problem", Boolean(wrong));
    if (root.textContent !== next) root.textContent = next;
  };
  const soon = () => {
    clearTimeout(timer);
    if (root.textContent) timer = setTimeout(now, 150);
    else now();
  };
  return {
    root,
    say: (sentence) => soon((words = sentence)),
    object: (problem) => soon((wrong = problem)),
    end: () => clearTimeout(timer),
  };
}

/* A labelled field. `read` gives a value, or in words why there is none: the
   voice says so, with how to write one, and the last value stays. */
function field({ label, key, read, write, name, how, voice, onValue }) {
  const id = makeId();
  const input = html("input", {
    ...{ type: "text", id, "data-key": key, autocomplete: "off" },
    ...{ spellcheck: "false", "data-lm-suppress-shortcuts": "true" },
    "aria-errormessage": voice.root.id,
  });
  const title = html("label", { for: id }, label);
  const root = html("div", { class: "mb-control" }, title, input);
  const object = (words) => {
    input.setAttribute("aria-invalid", Boolean(words));
    voice.object(words);
  };
  let shown;
  input.addEventListener("input", () => {
    const typed = input.value.trim();
    const value = read(typed);
    if (typeof value === "string") {
      const short = typed.length > 30 ? `${typed.slice(0, 29)}…` : typed;
      const what = typed ? `“${short}”` : "An empty field";
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

/* Of each part. */
const KEYS = [
  ["number"],
  ["histogram", "format", "scale", "label"],
  ["account", "batch", "checkpointed", "budget"],
];

function render({ model, el }) {
  const read = () =>
    Object.fromEntries(KEYS.flat().map((key) => [key, model.get(key)]));
  const set = (key) => (value) => save(model, { [key]: value });
  const voices = [voice(), voice(), voice()];

  const value = field({
    label: "Number",
    key: "number",
    read: parse,
    write: textOf,
    name: (x) => numberText(x),
    how: "Use digits and a point, as 0.1, 1e-5 or 2^-24.",
    voice: voices[0],
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
    onClick: () => {
      const { best } = sharesOf(read());
      set("scale")(2 ** inside(best));
    },
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
    how:
      "Use GiB above 0, as 24 or 0.5, " +
      `up to ${MOST_BUDGET / GIB}, or nothing.`,
    voice: voices[2],
    onValue: (bytes) => set("budget")(bytes || null),
  });

  const id = makeId();
  const picture = () => svg("svg", { role: "img", class: "mb-picture" });
  const pictures = [picture(), picture(), picture()];
  const title = html("span");
  const whose = html("span");
  const list = html("dl", { class: "mb-numbers" });
  const table = html("table", { class: "mb-table" });
  const merged = html("span");

  el.classList.add("mb-root", "mb-precision");
  el.append(
    html("div", { class: "mb-controls mb-one" }, value.root),
    voices[0].root,
    figure("One number in six formats", NOTES.bits, pictures[0]),
    html(
      "div",
      { class: "mb-controls mb-next" },
      scale.root,
      format.root,
      html("div", { class: "mb-buttons" }, stop.root),
    ),
    voices[1].root,
    figure(title, html("span", {}, NOTES.scale, merged), pictures[1]),
    list,
    html(
      "div",
      { class: "mb-controls mb-next" },
      batch.root,
      budget.root,
      checkpointed.root,
    ),
    voices[2].root,
    figure(whose, NOTES.recipes, pictures[2]),
    legend(id),
    table,
  );

  const draws = [
    (state, width) => {
      const formats = bitsOf(state);
      value.update(Number(state.number));
      const plan = bitsLayout(formats, width);
      return [plan, bitsSentence(state, formats), bitsParts(plan)];
    },
    (state, width) => {
      const n = sharesOf(state);
      const e = Math.log2(state.scale);
      const spoken = `2 to the power of ${e}`;
      scale.update({ value: e, max: MOST_SCALE, text: power(e), spoken });
      format.update({ value: state.format });
      title.textContent = `Gradients in ${state.format}`;
      if (state.label) title.append(": ", state.label);
      merged.textContent = state.histogram.merged ? NOTES.merged : "";
      list.replaceChildren(...shareList(state, n));
      const plan = scaleLayout(state, width);
      const drawn = scaleParts(id, plan, state.scale);
      return [plan, scaleSentence(state, n), drawn];
    },
    (state, width) => {
      const { account } = state;
      const recipes = recipesOf(state);
      batch.update({
        value: account.batches.indexOf(state.batch),
        max: account.batches.length - 1,
        text: state.batch,
        spoken: `batch ${state.batch}`,
      });
      checkpointed.update({ value: state.checkpointed });
      budget.update(state.budget ?? 0);
      whose.textContent = `Peak by recipe: ${account.name}`;
      table.replaceChildren(...recipeTable(recipes));
      const plan = recipesLayout(recipes, state.budget, width);
      const drawn = recipesParts(id, plan, state.budget);
      return [plan, recipesSentence(state, recipes), drawn];
    },
  ];
  const last = [[], [], []];
  const end = redraw(model, pictures[0], (width) => {
    const state = read();
    el.classList.toggle("mb-narrow", width < 480);
    draws.forEach((draw, i) => {
      // A part is drawn when what it shows has changed, and only then.
      const now = [width, ...KEYS[i].map((key) => state[key])];
      if (now.every((value, k) => value === last[i][k])) return;
      last[i] = now;
      const [plan, words, drawn] = draw(state, width);
      show(pictures[i], plan, words, drawn);
      voices[i].say(words);
    });
  });
  return () => {
    end();
    for (const { end: quiet } of voices) quiet();
    el.replaceChildren();
  };
}

export default { render };
