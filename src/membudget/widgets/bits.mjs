import {
  button,
  choice,
  dot,
  drag,
  field,
  filled,
  html,
  legend,
  line,
  listed,
  powerOfTwo,
  svg,
  t,
  table,
  text,
  widget,
} from "./base.mjs";

/* One number in six formats: bits that can be flipped, and below them the
   ranges of the formats, over which the number can be dragged.

   stored, fromBits: as Python's Format; `of` is a format, as Python sends it.
   layout: where everything stands. */

// ---- formats -------------------------------------------------------------

/* e of the binade [2^e, 2^(e + 1)) of a size. */
function binade(size) {
  let e = Math.max(Math.floor(Math.log2(size)), -1074);
  while (2 ** e > size) e -= 1;
  while (2 ** (e + 1) <= size) e += 1;
  return e;
}

const negative = (x) => x < 0 || Object.is(x, -0);

/* The format's number nearest to a size, a tie to the even fraction. */
function nearest(size, of) {
  if (size >= of.overflow) return of.infinite ? Infinity : of.largest;
  const step = 2 ** (binade(Math.max(size, of.normal)) - of.fraction);
  const steps = size / step;
  const below = Math.floor(steps);
  const rest = steps - below;
  return (below + (rest > 0.5 || (rest === 0.5 && below % 2))) * step;
}

/* The fields of a size in bits, as if they were one whole number. */
function encode(size, { exponent, fraction, normal }) {
  if (size === Infinity) return (2 ** exponent - 1) * 2 ** fraction;
  const e = binade(Math.max(size, normal));
  return size / 2 ** (e - fraction) + (e - Math.log2(normal)) * 2 ** fraction;
}

/** What a format keeps of a number. */
export function stored(x, of) {
  const size = Math.abs(x);
  const kept = nearest(size, of);
  let kind = "normal";
  if (size && !kept) kind = "underflow";
  else if (kept !== size && size >= of.overflow) kind = "overflow";
  else if (kept && kept < of.normal) kind = "subnormal";
  const width = of.exponent + of.fraction;
  const digits = encode(kept, of).toString(2).padStart(width, "0");
  const [e, f] = [digits.slice(0, of.exponent), digits.slice(of.exponent)];
  const finite = size < Infinity && kept < Infinity;
  return {
    bits: `${negative(x) ? 1 : 0} ${e} ${f}`,
    value: negative(x) ? -kept : kept,
    error: finite ? size && Math.abs(kept - size) / size : null,
    kind,
  };
}

/** The number with these bits, "0 01011 1001100110"; NaN is none. */
export function fromBits(bits, { exponent, fraction, infinite, normal }) {
  const [sign, e, f] = bits.split(" ").map((field) => parseInt(field, 2));
  const part = f / 2 ** fraction;
  let size = (e ? 1 + part : part) * normal * 2 ** (Math.max(e, 1) - 1);
  if (e === 2 ** exponent - 1) {
    if (infinite) size = f ? NaN : Infinity;
    else if (f === 2 ** fraction - 1) size = NaN;
  }
  return sign ? -size : size;
}

/* The bits with the one at `place` flipped; blanks are places, too. */
const flipped = (bits, place) =>
  bits.slice(0, place) + (1 - bits[place]) + bits.slice(place + 1);

/** The number that a text means; undefined if it means none of fp64. */
export function parse(text) {
  const plain = text.trim().replaceAll("−", "-");
  const infinite = /^([+-]?)(?:inf|infinity|∞)$/i.exec(plain);
  if (infinite) return infinite[1] === "-" ? -Infinity : Infinity;
  const [, sign, power] = /^([+-]?)2(?:\^|\*\*)([+-]?\d+)$/.exec(plain) ?? [];
  const decimal = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(plain);
  if (!power && !decimal) return undefined;
  const x = power ? (sign === "-" ? -1 : 1) * 2 ** power : Number(plain);
  const small = !x && /^[^e]*[1-9]/i.test(plain);
  return small || Math.abs(x) === Infinity ? undefined : x;
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

/** Never so short that it looks like another number, which it replaces. */
export function keptText(value, x) {
  let digits = 9;
  const same = () => Number(value.toPrecision(digits)) === x;
  while (value !== x && same()) digits += 1;
  return numberText(value, digits);
}

/* What becomes of a number. */
function fate({ kind, error, value }) {
  if (kind === "underflow") return t`underflow: lost`;
  if (kind === "overflow") {
    return Math.abs(value) < Infinity
      ? t`clipped to ${numberText(value)}, its largest`
      : t`overflow: ∞`;
  }
  const words = error ? t`error ${numberText(100 * error, 2)} %` : t`exact`;
  return kind === "subnormal" ? t`${words}, subnormal` : words;
}

/* Sign, exponent and fraction as they are multiplied. */
function factors({ bits, value }, { normal }) {
  const size = Math.abs(value);
  const sign = bits[0] === "1" ? "−" : "+";
  if (size === Infinity) return [sign, t`all ones`, t`0: infinity`];
  const e = binade(Math.max(size, normal));
  return [sign, powerOfTwo(e), numberText(size / 2 ** e, 7)];
}

/* What every format makes of the number. */
const describe = ({ number, formats }) =>
  formats.map((of) => {
    const row = stored(Number(number), of);
    const words = [keptText(row.value, Number(number)), fate(row)];
    return { name: of.name, of, words, ...row };
  });

const chosen = (state) =>
  describe(state).find(({ name }) => name === state.format);

/** The key numbers in words. */
export function sentence(state) {
  const x = Number(state.number);
  const where = (test) =>
    listed(describe(state).filter(test).map(({ name }) => name));
  const [exact, ...lost] = [
    where(({ value }) => value === x),
    ...["subnormal", "underflow", "overflow"].map((kind) =>
      where((of) => of.kind === kind),
    ),
  ];
  const [subnormal, underflow, overflow] = lost;
  const all = [
    exact
      ? t`${numberText(x)} is exact in ${exact}`
      : t`${numberText(x)} is exact in no format`,
    subnormal && t`subnormal in ${subnormal}`,
    underflow && t`lost to underflow in ${underflow}`,
    overflow && t`too large for ${overflow}`,
  ];
  const said = all.filter(Boolean).join(t`; `);
  return t`${said}.`;
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
  const rows = describe(state).map((row, i) => {
    const { smallest, normal, largest } = row.of;
    const ends = [smallest, normal, largest].map(place);
    const y = plot.top + i * (15 * lines + 20);
    return { ...row, y, bar: y + 15 * lines - 9, ends, at: place(row.value) };
  });
  plot.bottom = rows.at(-1).bar + 18;
  const step = wide < 480 ? 64 : 32;
  const ticks = [];
  for (let e = -128; e <= 128; e += step) ticks.push({ e, x: x(e) });
  const now = place(Number(state.number));
  return { plot, rows, ticks, lines, now, per, height: plot.bottom + 40 };
}

/** The number as it is after it was dragged to `x`, in three digits. */
export function dragged({ plot, per }, number, x) {
  const from = among(x, plot.left, plot.right) - plot.left;
  const size = Math.abs(number);
  const mantissa = size && size < Infinity ? size / 2 ** binade(size) : 1;
  const e = Math.round(LOW + from * per - Math.log2(mantissa));
  const to = mantissa * 2 ** e;
  const short = to === size ? to : Number(to.toPrecision(3));
  return negative(number) ? -short : short;
}

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

function* drawRanges(id, plan, state, then) {
  const { plot, rows, ticks, now, lines } = plan;
  const across = (x) => rows.map(({ bar }) => `M${x} ${bar - 3}v15`).join("");
  const shown = chosen(state);
  const [kept] = shown.words;
  const big = lines > 1 ? kept : t`${state.format}: ${kept}`;
  yield text(0, 17, big, { class: "mb-value mb-big" });
  yield text(0, 36, shown.words[1], { class: `mb-value mb-${shown.kind}` });
  for (const { name, y, bar, ends, at, kind, words } of rows) {
    const [low, normal, high] = ends;
    const box = { y: bar, height: 9 };
    const whole = { ...box, x: normal, width: high - normal };
    const few = { ...box, x: low, width: normal - low };
    yield* filled(id, "parameters", "rect", whole);
    yield* filled(id, "subnormal", "rect", few);
    const look = { class: `mb-${kind}` };
    yield text(0, y, name, { class: name === state.format && "mb-value" });
    yield text(76, y, words[0], look);
    yield text(...(lines > 1 ? [0, y + 15] : [226, y]), words[1], look);
    const lost = kind === "underflow" || kind === "overflow";
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
  yield text(plot.right, 17, t`◀ drag ▶`, END);
}

function results(id, { rows }) {
  const row = ({ name, value, error, bits, words }) => ({
    label: name,
    cells: [
      [`${name}.value`, value, words[0]],
      [`${name}.error`, error, words[1]],
      [name, bits],
    ],
  });
  const head = [t`format`, t`stored`, t`kept`, t`bits`];
  return [table(id, head, rows.map(row))];
}

// ---- the bits ------------------------------------------------------------

const FIELDS = [
  ["sign", t`sign`],
  ["exponent", t`exponent`],
  ["fraction", t`fraction`],
];

/* The bits of one format as buttons in a group: one of them is reached by the
   tabulator, the others from it by the arrow keys. */
function bitButtons({ onFlip }) {
  const root = html("div", { class: "mb-word", role: "group" });
  let [shown, all] = ["", []];
  root.addEventListener("keydown", ({ key }) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const open = [...root.querySelectorAll("button:enabled")];
    const next = open[open.indexOf(document.activeElement) + by];
    if (!next) return;
    for (const { bit } of all) bit.tabIndex = bit === next ? 0 : -1;
    next.focus();
  });
  const build = (bits) => {
    all = [];
    let from = 0;
    const fields = bits.split(" ").map((digits, k) => {
      const [kind, field] = FIELDS[k];
      const buttons = [...digits].map((_, i) => {
        const at = from + i;
        const label = t`${field} bit ${i + 1} of ${digits.length}`;
        const { root: bit } = button({ label: "", onClick: () => onFlip(at) });
        bit.tabIndex = at ? -1 : 0;
        all.push({ bit, at, label });
        return bit;
      });
      from += digits.length + 1; // and the blank
      const look = `mb-field mb-${kind}`;
      const name = html("small");
      return html("div", { class: look }, name, html("div", {}, ...buttons));
    });
    root.replaceChildren(...fields);
  };
  const update = ({ name, of, bits, value }) => {
    if (name !== shown) build(bits);
    shown = name;
    root.setAttribute("aria-label", t`Bits of ${shown}: arrow keys move`);
    factors({ bits, value }, of).forEach((words, k) => {
      root.children[k].firstChild.textContent = `${FIELDS[k][1]} ${words}`;
    });
    for (const { bit, at, label } of all) {
      const none = Number.isNaN(fromBits(flipped(bits, at), of));
      bit.textContent = bits[at];
      bit.setAttribute("aria-label", t`${label}: ${bits[at]}`);
      bit.classList.toggle("mb-one", bits[at] === "1");
      bit.disabled = none;
      bit.title = none ? t`flipped, it would be NaN: no number` : "";
    }
  };
  return { root, update };
}

// ---- the widget ----------------------------------------------------------

const NOTE = t(
  "Click a bit to flip it: the number becomes what the bits make, the " +
    "product of the three fields. A grey bit would make NaN. Each bar below " +
    "is the range of a format, over powers of two. The line is the number, " +
    "the dot is what the format stores; a cross says that the number is " +
    "lost.",
);

function build({ id, get, set, bound, picture }) {
  const setNumber = (x) => set({ number: textOf(x) });
  const exact = field({
    label: t`Number (↑ doubles, ↓ halves)`.replace(/([↑↓]) /g, "$1\u00a0"),
    key: "number",
    autocomplete: "off",
    read: parse,
    write: textOf,
    how: t`Write a number in fp64’s range, such as 0.1, -1e-5, 2^-24 or inf.`,
    onChange: setNumber,
  });
  exact.root.addEventListener("keydown", (event) => {
    const factor = { ArrowUp: 2, ArrowDown: 0.5 }[event.key];
    if (!factor) return;
    event.preventDefault();
    const next = Number(get().number) * factor;
    if (next && Math.abs(next) < Infinity) setNumber(next);
  });
  const format = bound(choice, t`Format whose bits are shown`, "format", {
    options: get().formats.map(({ name }) => name),
  });
  const bits = bitButtons({
    onFlip(place) {
      const { of, bits } = chosen(get());
      setNumber(fromBits(flipped(bits, place), of));
    },
  });
  let plan;
  drag(picture, {
    grab: () => Number(get().number),
    move: ({ x }, held) => setNumber(dragged(plan, held, x)),
  });
  const draw = (state, width, before) => {
    plan = layout(state, width);
    const { now } = layout(before ?? state, width);
    exact.update({ value: Number(state.number) });
    bits.update(chosen(state));
    return {
      title: t`One number in six formats`,
      sentence: sentence(state),
      height: plan.height,
      drawn: drawRanges(id, plan, state, now),
      numbers: results(id, plan),
    };
  };
  return {
    controls: [exact, format],
    picture: html("div", {}, bits.root, picture),
    legend: legend(id, {
      parameters: t`normal numbers`,
      subnormal: t`subnormal numbers: fewer bits`,
    }),
    note: html("p", { class: "mb-note" }, NOTE),
    draw,
  };
}

const keys = ["number", "format", "formats"];

export default widget({ name: "bits", keys, build });
