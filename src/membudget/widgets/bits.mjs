import {
  button,
  choice,
  dot,
  drag,
  filled,
  html,
  legend,
  line,
  listed,
  makeId,
  patterns,
  powerOfTwo,
  svg,
  table,
  text,
  widget,
} from "./base.mjs";

/* One number in six formats: bits that can be flipped, and below them the
   ranges of the formats, over which the number can be dragged.

   limits, stored, fromBits: as Python's Format.
   layout: where everything stands. */

/** bits of exponent and fraction; whether the largest exponent is finite */
const FORMATS = {
  fp32: [8, 23],
  tf32: [8, 10],
  bf16: [8, 7],
  fp16: [5, 10],
  "fp8-e4m3": [4, 3, true],
  "fp8-e5m2": [5, 2],
};
const NAMES = Object.keys(FORMATS);

// ---- formats -------------------------------------------------------------

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
  const [, fraction, finite] = FORMATS[name];
  const { largest, normal, overflow } = limits(name);
  if (size >= overflow) return finite ? largest : Infinity;
  const step = 2 ** (binade(Math.max(size, normal)) - fraction);
  const steps = size / step;
  const below = Math.floor(steps);
  const rest = steps - below;
  return (below + (rest > 0.5 || (rest === 0.5 && below % 2))) * step;
}

const negative = (x) => x < 0 || Object.is(x, -0);

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
  const digits = (n, width) => n.toString(2).padStart(width, "0");
  const finite = size < Infinity && kept < Infinity;
  return {
    bits:
      `${negative(x) ? 1 : 0} ${digits(fields[0], exponent)} ` +
      digits(fields[1], fraction),
    value: negative(x) ? -kept : kept,
    error: finite ? size && Math.abs(kept - size) / size : null,
    kind,
  };
}

/** The number with these bits, "0 01011 1001100110"; NaN is none. */
export function fromBits(bits, name) {
  const [, fraction, finite] = FORMATS[name];
  const [sign, exponent, steps] = bits.split(" ").map((b) => parseInt(b, 2));
  const [ones, full] = bits.split(" ").slice(1).map((b) => !b.includes("0"));
  const { normal } = limits(name);
  const part = steps / 2 ** fraction;
  const binade = normal * 2 ** (exponent - 1);
  let size = exponent ? binade * (1 + part) : normal * part;
  if (ones && finite && full) size = NaN;
  if (ones && !finite) size = steps ? NaN : Infinity;
  return sign ? -size : size;
}

/* The bits with the one at `place` flipped; blanks are places, too. */
const flipped = (bits, place) =>
  bits.slice(0, place) + (1 - bits[place]) + bits.slice(place + 1);

/** The number that a text means, or in words why it means none. */
export function parse(text) {
  const plain = text.trim().replaceAll("−", "-");
  const infinite = /^([+-]?)(?:inf|infinity|∞)$/i.exec(plain);
  if (infinite) return infinite[1] === "-" ? -Infinity : Infinity;
  const [, sign, power] = /^([+-]?)2(?:\^|\*\*)([+-]?\d+)$/.exec(plain) ?? [];
  const decimal = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(plain);
  if (!power && !decimal) return "is no number";
  const x = power ? (sign === "-" ? -1 : 1) * 2 ** power : Number(plain);
  if (Math.abs(x) === Infinity) return "is beyond the largest number, 1.8e308";
  if (!x && /^[^e]*[1-9]/i.test(plain)) {
    return "is below the smallest number, 5e-324";
  }
  return x;
}

/* As the trait holds it; Python's float() reads it. */
const textOf = (x) => (Object.is(x, -0) ? "-0" : String(x));

// ---- words ---------------------------------------------------------------

/** "0.0999755859", "5.96·10⁻⁸", "∞"; all digits without a number of them. */
export function numberText(x, digits) {
  const sign = negative(x) ? "−" : "";
  const size = Math.abs(x);
  if (!size || size === Infinity) return sign + (size ? "∞" : "0");
  const text = size.toExponential(digits ? digits - 1 : undefined);
  const [mantissa, exponent] = text.split("e");
  if (exponent > -5 && exponent < 9) return sign + Number(text);
  const power = powerOfTwo(Number(exponent)).slice(1);
  return `${sign}${mantissa.replace(/\.?0+$/, "")}·10${power}`;
}

/* What becomes of a number. */
function fate({ kind, error, value }) {
  if (kind === "underflow") return "underflow: lost";
  if (kind === "overflow") {
    return Math.abs(value) < Infinity ? "overflow: cut" : "overflow: ∞";
  }
  const words = error ? `error ${numberText(100 * error, 2)} %` : "exact";
  return kind === "subnormal" ? `${words}, subnormal` : words;
}

/* Sign, exponent and fraction as they are multiplied. */
function factors({ bits, value }, name) {
  const sign = bits[0] === "1" ? "−" : "+";
  if (Math.abs(value) === Infinity) return [sign, "all ones", "0: infinity"];
  const { normal } = limits(name);
  const e = binade(Math.max(Math.abs(value), normal));
  return [sign, powerOfTwo(e), numberText(Math.abs(value) / 2 ** e, 7)];
}

const describe = ({ number }) =>
  Object.fromEntries(
    NAMES.map((name) => [name, stored(Number(number), name)]),
  );

/** The key numbers in words. */
export function sentence({ number }) {
  const x = Number(number);
  const kinds = {};
  let worst;
  for (const [name, of] of Object.entries(describe({ number }))) {
    const exact = of.kind === "normal" && of.value === x;
    (kinds[exact ? "exact" : of.kind] ??= []).push(name);
    if (of.kind === "normal" && of.error > (worst?.error ?? 0)) {
      worst = { name, error: of.error };
    }
  }
  const { exact = [] } = kinds;
  const where = exact.length === NAMES.length ? "every format" : listed(exact);
  const named = (kind, words = kind) =>
    kinds[kind] ? `; ${words} in ${listed(kinds[kind])}` : "";
  const error = worst && numberText(100 * worst.error, 2);
  return (
    `${numberText(x)} is exact in ${where || "no format"}` +
    named("subnormal") +
    named("underflow", "lost to underflow") +
    named("overflow") +
    "." +
    (worst
      ? ` The largest rounding error is ${error} %, in ${worst.name}.`
      : "")
  );
}

// ---- geometry ------------------------------------------------------------

const [LOW, HIGH] = [-155, 135]; // of the axis, as powers of two

const among = (value, low, high) => Math.min(Math.max(value, low), high);

/** The ranges: a row for each format over one axis, which never moves. */
export function layout(state, width) {
  const plot = { left: 12, right: width - 12, top: 56 };
  const lines = width < 480 ? 2 : 1; // of words, above a range
  const wide = plot.right - plot.left;
  const per = (HIGH - LOW) / wide; // binades of a pixel
  const x = (e) => plot.left + (among(e, LOW, HIGH) - LOW) / per;
  const place = (value) => x(Math.log2(Math.abs(value)));
  const rows = Object.entries(describe(state)).map(([name, of], i) => {
    const { underflow, normal, largest } = limits(name);
    const ends = [2 * underflow, normal, largest].map(place);
    const y = plot.top + i * (15 * lines + 20);
    const bar = y + 15 * lines - 9;
    return { name, ...of, y, bar, ends, at: place(of.value) };
  });
  plot.bottom = rows.at(-1).bar + 18;
  const step = wide < 480 ? 64 : 32;
  const ticks = [];
  for (let e = -128; e <= 128; e += step) ticks.push({ e, x: x(e) });
  return {
    plot,
    rows,
    ticks,
    lines,
    now: place(Number(state.number)),
    per,
    height: plot.bottom + 40,
  };
}

/** The number as it is after it was dragged to `x`. */
export function dragged({ plot, per }, number, x) {
  const from = among(x, plot.left, plot.right) - plot.left;
  const size = Math.abs(number);
  const mantissa = size && size < Infinity ? size / 2 ** binade(size) : 1;
  const e = Math.round(LOW + from * per - Math.log2(mantissa));
  return (negative(number) ? -1 : 1) * mantissa * 2 ** e;
}

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

function* drawRanges(id, plan, state, then) {
  const { plot, rows, ticks, now, lines } = plan;
  const across = (x) => rows.map(({ bar }) => `M${x} ${bar - 3}v15`).join("");
  const chosen = rows.find(({ name }) => name === state.format);
  const value = numberText(chosen.value, lines > 1 ? 6 : 9);
  const big = { class: "mb-value mb-big" };
  yield text(0, 17, `${state.format}: ${value}`, big);
  yield text(0, 36, fate(chosen), { class: `mb-value mb-${chosen.kind}` });
  for (const { name, y, bar, ends, at, ...of } of rows) {
    const [low, normal, high] = ends;
    const box = { y: bar, height: 9 };
    const whole = { ...box, x: normal, width: high - normal };
    const few = { ...box, x: low, width: normal - low };
    yield* filled(id, "parameters", "rect", whole);
    yield* filled(id, "subnormal", "rect", few);
    yield text(0, y, name, { class: name === state.format && "mb-value" });
    const look = { class: `mb-${of.kind}` };
    yield text(76, y, numberText(of.value, 9), look);
    yield text(...(lines > 1 ? [0, y + 15] : [226, y]), fate(of), look);
    const lost = of.kind === "underflow" || of.kind === "overflow";
    const d = `M${now - 5} ${bar - 1}l10 10m0 -10l-10 10`;
    yield lost
      ? svg("path", { d, class: "mb-gone" })
      : dot({ x: at, y: bar + 4.5 }, "mb-peak", 5);
  }
  if (then !== now) yield svg("path", { d: across(then), class: "mb-ghost" });
  yield svg("path", { d: across(now), class: "mb-cursor" });
  yield line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis");
  const d = `M${now} ${plot.bottom}l-7 12h14z`;
  yield svg("path", { d, class: "mb-handle" });
  for (const { e, x } of ticks) {
    yield line(x, plot.bottom, x, plot.bottom + 4, "mb-axis");
    yield text(x, plot.bottom + 28, powerOfTwo(e), MIDDLE);
  }
  yield text(plot.right, 17, "◀ drag ▶", END);
}

function results(id, state) {
  const rows = Object.entries(describe(state)).map(([name, of]) => ({
    label: name,
    cells: [
      [`${name}.value`, of.value, numberText(of.value, 7)],
      [`${name}.error`, of.error, fate(of)],
      [name, of.bits],
    ],
  }));
  return [table(id, ["format", "stored", "kept", "bits"], rows)];
}

// ---- the bits ------------------------------------------------------------

const FIELDS = ["sign", "exponent", "fraction"];

/* The bits of one format as buttons in a group: one of them is reached by the
   tabulator, the others from it by the arrow keys. */
function bitButtons({ onFlip }) {
  const root = html("div", { class: "mb-word", role: "group" });
  let [shown, all] = ["", []];
  const focus = (by) => {
    const open = all.filter(({ root }) => !root.disabled);
    const here = open.findIndex(({ root }) => root === document.activeElement);
    const next = open[among(here + by, 0, open.length - 1)];
    for (const { root } of all) root.tabIndex = root === next.root ? 0 : -1;
    next.root.focus();
  };
  root.addEventListener("keydown", ({ key }) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (by) focus(by);
  });
  const build = (bits) => {
    const counts = bits.split(" ").map((field) => field.length);
    let place = 0;
    all = [];
    const fields = FIELDS.map((field, k) => {
      const buttons = Array.from({ length: counts[k] }, (_, i) => {
        const at = place + i;
        const { root } = button({ label: "0", onClick: () => onFlip(at) });
        all.push({ root, at, name: `${field} bit ${i + 1} of ${counts[k]}` });
        root.tabIndex = all.length === 1 ? 0 : -1;
        return root;
      });
      place += counts[k] + 1;
      return html(
        "div",
        { class: `mb-field mb-${field}` },
        html("small", {}),
        html("div", {}, ...buttons),
      );
    });
    root.replaceChildren(...fields);
  };
  const update = (name, of) => {
    if (name !== shown) build(of.bits);
    shown = name;
    root.setAttribute("aria-label", `Bits of ${name}: arrow keys move`);
    root.querySelectorAll("small").forEach((small, k) => {
      const value = factors(of, name)[k];
      small.textContent = k ? `${FIELDS[k]} ${value}` : `sign ${value}`;
    });
    for (const { root: bit, at, name: label } of all) {
      const none = Number.isNaN(fromBits(flipped(of.bits, at), name));
      bit.textContent = of.bits[at];
      bit.setAttribute("aria-label", `${label}: ${of.bits[at]}`);
      bit.classList.toggle("mb-one", of.bits[at] === "1");
      bit.disabled = none;
      bit.title = none ? "flipped, it would be NaN: no number" : "";
    }
  };
  return { root, update };
}

// ---- the widget ----------------------------------------------------------

/* A labelled field for a number. What is no number stays in the field and is
   said to be wrong; the last number stays. */
function exactField({ label, key, onChange }) {
  const id = makeId();
  const input = html("input", {
    ...{ type: "text", id, "data-key": key, autocomplete: "off" },
    ...{ spellcheck: "false", "data-lm-suppress-shortcuts": "true" },
  });
  const wrong = html("small", { class: "mb-wrong", "aria-live": "polite" });
  const title = html("label", { for: id }, label);
  const root = html("div", { class: "mb-control" }, title, input, wrong);
  const refuse = (words) => {
    input.setAttribute("aria-invalid", Boolean(words));
    wrong.textContent = words;
  };
  const take = () => {
    const value = parse(input.value);
    const why = typeof value === "string";
    refuse(why ? `${value}: write 0.1, 1e-5 or 2^-24` : "");
    if (!why) onChange(value);
  };
  input.addEventListener("input", take);
  let shown;
  return {
    root,
    key,
    update(value) {
      if (Object.is(value, shown)) return;
      shown = value;
      if (!Object.is(parse(input.value), value)) input.value = textOf(value);
      refuse("");
    },
    held: () => textOf(shown),
    enter: (text) => typeof parse(text) === "number" && onChange(parse(text)),
  };
}

const NOTE =
  "Click a bit to flip it: the number becomes what the bits make, the " +
  "product of the three fields. A grey bit would make NaN. Each bar below " +
  "is the range of a format, over powers of two. The line is the number, " +
  "the dot is what the format stores; a cross says that the number is lost.";

function build({ id, get, set }) {
  const setNumber = (x) => set({ number: textOf(x) });
  const field = exactField({
    label: "Number",
    key: "number",
    onChange: setNumber,
  });
  const format = choice({
    label: "Format whose bits are shown",
    key: "format",
    options: Object.fromEntries(NAMES.map((name) => [name, name])),
    onChange: (value) => set({ format: value }),
  });
  const bits = bitButtons({
    onFlip(place) {
      const { number, format } = get();
      const now = stored(Number(number), format).bits;
      setNumber(fromBits(flipped(now, place), format));
    },
  });
  const picture = svg("svg", { role: "img", class: "mb-picture" });
  let plan;
  drag(picture, {
    move: ({ x }) => setNumber(dragged(plan, Number(get().number), x)),
  });
  const draw = (state, width, before) => {
    plan = layout(state, width);
    const said = sentence(state);
    picture.setAttribute("viewBox", `0 0 ${width} ${plan.height}`);
    picture.setAttribute("aria-label", said);
    picture.replaceChildren(
      patterns(id),
      ...drawRanges(id, plan, state, layout(before ?? state, width).now),
    );
    field.update(Number(state.number));
    format.update({ value: state.format });
    bits.update(state.format, stored(Number(state.number), state.format));
    return {
      title: "One number in six formats",
      sentence: said,
      numbers: results(id, state),
    };
  };
  return {
    controls: [field, format],
    picture: html("div", {}, bits.root, picture),
    legend: legend(id, {
      parameters: "normal numbers",
      subnormal: "subnormal numbers: fewer bits",
    }),
    note: html("p", { class: "mb-note" }, NOTE),
    draw,
  };
}

export default widget({ name: "bits", keys: ["number", "format"], build });
