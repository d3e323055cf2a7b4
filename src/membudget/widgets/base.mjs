/* What the widgets' modules share. A widget's module imports from here; the
   package puts both texts into one module (bundle.py), so a name at the top
   level of this file is taken in every widget's module. */

/** An SVG element; an attribute that is null or false is left out. */
export function svg(tag, attributes = {}, ...children) {
  const name = "http://www.w3.org/2000/svg";
  return fill(document.createElementNS(name, tag), attributes, children);
}

/** An HTML element, likewise. */
export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** An id that no other widget on the page has. */
export function makeId() {
  return `mb-${Math.random().toString(36).slice(2)}`;
}

/** Bytes in binary units, three digits: "2.96 MiB"; as in base.py. */
export function formatBytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (count >= 1024 ** (power + 1) && power + 1 < units.length) power += 1;
  const value = count / 1024 ** power;
  const digits = power === 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${units[power]}`;
}

/** At most two decimals: "25.6"; as in base.py. */
export function formatNumber(value) {
  return String(Number(value.toFixed(2)));
}

/** Round marks of an axis in bytes, 0 included: [{ value, label }], unit. */
export function byteTicks(max, most = 5) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (max >= 1024 ** (power + 1) && power + 1 < units.length) power += 1;
  const unit = 1024 ** power;
  const rough = max / unit / most;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * [1, 2, 5, 10].find((m) => m * ten >= rough);
  const marks = [];
  for (let i = 0; i * step * unit <= max; i += 1) {
    const value = Number((i * step).toPrecision(6));
    marks.push({ value: value * unit, label: String(value) });
  }
  return { unit: units[power], marks };
}

/** Places labels of equal height on a line: nearest to where they belong,
    in order, at least `gap` apart and between `top` and `bottom`. */
export function spread(wanted, gap, top, bottom) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const placed = [];
  let from = top;
  for (const i of order) {
    placed[i] = Math.max(wanted[i], from);
    from = placed[i] + gap;
  }
  let to = bottom;
  for (const i of order.reverse()) {
    placed[i] = Math.min(placed[i], to);
    to = placed[i] - gap;
  }
  return placed;
}

/** A path of stairs through the heights, without the steps that are none;
    there is one edge more than heights. */
export function stairs(edges, heights) {
  let path = `M${edges[0].toFixed(1)} ${heights[0].toFixed(1)}`;
  for (let i = 1; i < heights.length; i += 1) {
    if (heights[i] !== heights[i - 1]) {
      path += `H${edges[i].toFixed(1)}V${heights[i].toFixed(1)}`;
    }
  }
  return `${path}H${edges[heights.length].toFixed(1)}`;
}

/** A path around the area between two stairs. */
export function band(edges, lower, upper) {
  const back = stairs([...edges].reverse(), [...lower].reverse());
  return `${stairs(edges, upper)}L${back.slice(1)}Z`;
}

/** Stacked bands: for each key of `keys` that is ever there its lower and its
    upper heights, from the bottom up. `rows` are the sizes at each place. */
export function stacked(rows, keys, y) {
  const floor = rows.map(() => 0);
  return keys
    .filter((key) => rows.some((row) => row[key]))
    .map((key) => {
      const lower = floor.map(y);
      rows.forEach((row, i) => (floor[i] += row[key]));
      return { key, lower, upper: floor.map(y) };
    });
}

// ---- words ---------------------------------------------------------------

/** Words in the language of the page, which the book has as `mbWords`:
    t`${1} of ${2}` and t("{0} of {1}", 1, 2) both ask for "{0} of {1}". No
    space stays between Chinese ones where a value comes in. */
export const t = (words, ...values) => {
  const put = (all, word, i) => `${all}{${i - 1}}${word}`;
  const key = words.raw ? words.reduce(put) : words;
  return (globalThis.mbWords?.[key] ?? key)
    .replace(/\{(\d)\}/g, (_, i) => values[i])
    .replace(/([\u4e00-\u9fff]) (?=[\u4e00-\u9fff])/g, "$1");
};

/** "1 segment", "4 segments"; `thing` is in English. */
export const plural = (count, thing) =>
  count === 1 && !globalThis.mbWords
    ? `1 ${thing}`
    : t(`{0} ${thing}s`, count);

/** "25 %" */
export const percent = (part, whole) =>
  t`${whole ? Math.floor((100 * part) / whole + 0.5) : 100} %`;

/** "851 496", with a narrow space that does not break. */
export const grouped = (count) =>
  String(count).replace(/\B(?=(\d{3})+$)/g, "\u202f");

/** "2⁻²⁴" */
export const powerOfTwo = (e) =>
  `2${String(e).replace(/./g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)])}`;

/** "a, b and c" */
export const listed = (things) => {
  const some = things.slice(0, -1).join(t`, `);
  return some ? t`${some} and ${things.at(-1)}` : things.join("");
};

// ---- drawing -------------------------------------------------------------

export const LETTER = 7.1; // pixels, on average, in a wide font

export const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, ...attributes }, content);

export const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

export const dot = ({ x, y }, name, r = 4) =>
  svg("circle", { cx: x, cy: y, r, class: name });

/* How a part is hatched, so that no colour has to tell by itself: the size of
   the tile, its path, and how it is turned. What is not here is plain. */
const HATCHES = {
  gradients: [6, "M0 3H6", 45],
  optimizer: [8, "M0 4H8"],
  inputs: [6, "M3 0V6"],
  temporaries: [5, "M1 2.5H2.5"],
  recomputation: [7, "M0 3.5H7M3.5 0V7", 45],
  checkpoints: [7, "M0 3.5H7", -45],
  waiting: [6, "M0 3H6", -45],
  over: [9, "M0 4.5H9", -45],
  subnormal: [4, "M0 2H4", 45],
};

/** The patterns of a picture; `id` is the widget's. */
export function patterns(id) {
  const make = ([name, [size, d, turn]]) =>
    svg(
      "pattern",
      {
        id: `${id}-${name}`,
        width: size,
        height: size,
        patternUnits: "userSpaceOnUse",
        patternTransform: turn && `rotate(${turn})`,
      },
      svg("path", { d, class: `mb-hatching mb-hatching-${name}` }),
    );
  return svg("defs", {}, ...Object.entries(HATCHES).map(make));
}

/** A shape in a part's colour, and again in its pattern. */
export const filled = (id, part, tag, shape) => [
  svg(tag, { ...shape, class: `mb-fill-${part}` }),
  ...(HATCHES[part] ? [svg(tag, { ...shape, fill: `url(#${id}-${part})` })] : []),
];

/** A part's colour and pattern, before its name. */
export const swatch = (id, part) =>
  svg(
    "svg",
    { viewBox: "0 0 14 14", class: "mb-swatch", "aria-hidden": "true" },
    ...filled(id, part, "rect", { width: 14, height: 14 }),
  );

/** What the colours mean: { part: its name }; then other words. */
export const legend = (id, parts, ...words) =>
  html(
    "div",
    { class: "mb-legend" },
    ...Object.entries(parts).map(([part, name]) =>
      html("span", {}, swatch(id, part), name),
    ),
    ...words.map((word) => html("span", {}, word)),
  );

/** A vertical axis of bytes, from 0 to `top`. */
export function heights(plot, top, unit) {
  const y = (size) => plot.bottom - (size * (plot.bottom - plot.top)) / top;
  const ticks = byteTicks(top);
  return {
    y,
    unit: unit ?? ticks.unit,
    ticks: ticks.marks.map(({ value, label }) => ({ label, y: y(value) })),
  };
}

/** The marks of a vertical axis, and the horizontal one. */
export const axes = (plot, { ticks, unit }) => [
  ...ticks.flatMap(({ y, label }) => [
    line(plot.left, y, plot.right, y, "mb-grid"),
    text(plot.left - 6, y + 4, label, { "text-anchor": "end" }),
  ]),
  text(plot.left - 6, plot.top - 11, unit, { "text-anchor": "middle" }),
  line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis"),
];

/** A horizontal axis of bytes, from 0 to `top`; what is more ends there. */
export function lengths(plot, top, width) {
  const x = (size) =>
    plot.left + (Math.min(size, top) * (plot.right - plot.left)) / top;
  const { unit, marks } = byteTicks(top, Math.max(2, Math.floor(width / 90)));
  const ticks = marks
    .map(({ value, label }) => ({ label, x: x(value) }))
    .filter((tick) => tick.x < plot.right - 28);
  return { x, unit, ticks };
}

/** The axis at a height, with the unit at its last mark. */
export const lengthAxis = (plot, y, { ticks, unit }) => [
  line(plot.left, y, plot.right, y, "mb-axis"),
  ...ticks.flatMap(({ x, label }, i) => [
    line(x, y, x, y + 4, "mb-axis"),
    text(
      x,
      y + 17,
      i + 1 < ticks.length ? label : `${label} ${unit}`,
      i ? { "text-anchor": "middle" } : {},
    ),
  ]),
];

/** A bar's parts one after the other, from their sizes. */
export function laid(sizes, x) {
  let size = 0;
  return Object.entries(sizes).map(([part, more]) => {
    const from = x(size);
    size += more;
    return { part, x: from, width: x(size) - from };
  });
}

/** The bar. */
export const bar = (id, parts, y, height) =>
  parts.flatMap(({ part, x, width }) =>
    filled(id, part, "rect", { x, y, width, height }),
  );

/** A card as one plugs it in: its frame, and contacts below. */
export function cardFrame(box) {
  const count = Math.min(8, Math.floor(box.width / 14));
  const below = box.y + box.height + 2;
  const contacts = Array.from({ length: count }, (_, i) => {
    const x = box.x + 12 + i * 9;
    return line(x, below, x, below + 7, "mb-contact");
  });
  return [svg("rect", { ...box, rx: 6, class: "mb-frame" }), ...contacts];
}

/** What has no room in the card. */
export const spill = (id, box) => [
  ...filled(id, "over", "rect", box),
  svg("rect", { ...box, class: "mb-spill" }),
];

/** The end of what goes on beyond a picture. */
export function ragged(x, y, height) {
  const tooth = `l7 ${height / 8}l-7 ${height / 8}`;
  const d = `M${x} ${y}${tooth.repeat(4)}`;
  return svg("path", { d, class: "mb-break" });
}

/** Heights by name, beside the picture: [where, name, value]. */
export function names(plot, marks) {
  const wanted = marks.map(([{ y }]) => y);
  const places = spread(wanted, 33, plot.top, plot.bottom - 16);
  const x = plot.right;
  return marks.flatMap(([at, name, value], i) => [
    line(at.x, at.y, x, at.y, "mb-leader"),
    line(x, at.y, x + 9, places[i] + 4, "mb-leader"),
    text(x + 12, places[i], name),
    text(x + 12, places[i] + 14, value, { class: "mb-value" }),
  ]);
}

/** The line of a budget, and above it, where `over` says that it is broken,
    what everybody sees. */
export const budgetLine = (id, plot, y, over) => {
  const box = { x: plot.left, width: plot.right - plot.left };
  const above = { ...box, y: plot.top, height: Math.max(y - plot.top, 0) };
  return [
    ...(over ? filled(id, "over", "rect", above) : []),
    line(plot.left, y, plot.right, y, "mb-limit"),
  ];
};

/** How wide words are, in pixels; a Chinese character is two letters. */
export const wideOf = (words) =>
  LETTER * words.replace(/[\u2e80-\uffef]/g, "xx").length;

/** The first words of a run that have room. */
export const labelOf = ({ width, words }) =>
  words.find((word) => wideOf(word) + 4 < width);

/** A strip that names what runs where: { part, x, width, words }, of which
    the first words that have room are written. */
export const strip = (id, y, runs) =>
  runs.flatMap(({ part, x, width, words }) => {
    const wide = width > 3 ? width - 1 : width;
    const box = { x: x + (width - wide) / 2, y, width: wide, height: 7 };
    const label = labelOf({ width, words });
    const look = { "text-anchor": "middle" };
    return [
      ...filled(id, part, "rect", box),
      ...(label ? [text(x + width / 2, y + 21, label, look)] : []),
    ];
  });

/* Words for a phase of a step, the longest first. */
export const PHASE_WORDS = {
  forward: [t`forward pass`, t`forward`, "F"],
  recomputation: [t`recomputation`, "R"],
  backward: [t`backward pass`, t`backward`, "B"],
  optimizer: [t`optimizer step`, t`step`, "S"],
};

/** What runs where, from the phase of each moment and where moments begin. */
export function phaseRuns(phases, edges) {
  const runs = [];
  phases.forEach((phase, i) => {
    if (phase !== phases[i - 1]) runs.push({ phase, x: edges[i] });
    runs.at(-1).width = edges[i + 1] - runs.at(-1).x;
  });
  return runs;
}

/** The strip of phases below a picture. */
export const phaseStrip = (id, plot, runs) =>
  strip(
    id,
    plot.bottom + 5,
    runs.map(({ phase, x, width }) => ({
      ...{ x, width, words: PHASE_WORDS[phase] },
      part: phase === "recomputation" ? phase : `phase-${phase}`,
    })),
  );

/** What holds the bytes of a step. */
export const HOLDERS = {
  parameters: t`parameters`,
  gradients: t`gradients`,
  optimizer: t`optimizer states`,
  activations: t`activations`,
  inputs: t`inputs`,
  temporaries: t`temporaries`,
};

// ---- numbers beside a picture --------------------------------------------

/** A number that tests can read. */
export const number = (key, value, shown) =>
  html(
    "span",
    { "data-number": key, "data-value": String(value) },
    shown ?? String(value),
  );

/** A cell of a table: bytes, or a dash where there are none. */
export const byteCell = (key, size) => [
  key,
  size,
  size ? formatBytes(size) : "–",
];

/** A table: the headings of its columns; for each row its part (a colour) or
    null, its label, and for each cell the key, the number and how it is
    written; a row with `sum` is the total. */
export function table(id, head, rows) {
  const column = (label) => html("th", { scope: "col" }, label);
  const row = ({ part, label, cells, sum }) =>
    html(
      "tr",
      { class: sum && "mb-sum" },
      html(
        "th",
        { scope: "row" },
        ...(part ? [swatch(id, part)] : []),
        label,
      ),
      ...cells.map((cell) => html("td", {}, number(...cell))),
    );
  return html(
    "table",
    { class: "mb-table" },
    html("thead", {}, html("tr", {}, ...head.map(column))),
    html("tbody", {}, ...rows.map(row)),
  );
}

/** A list of [label, key, number, how it is written]. */
export const numberList = (entries) =>
  html(
    "dl",
    { class: "mb-numbers" },
    ...entries.map(([label, ...of]) =>
      html("div", {}, html("dt", {}, label), html("dd", {}, number(...of))),
    ),
  );

// ---- controls ------------------------------------------------------------

/* Every control has `root`, its `key`, `update` (which shows a state without
   an event), `held` (what it holds, as text) and `enter`, which takes such a
   text as the reader would give it, if it can be taken. `disabled` is the
   reason why it cannot be used, in words, or "". */

/* A native control. JupyterLab would else take its arrow keys for shortcuts. */
function control(tag, attributes, ...children) {
  const more = { ...attributes, "data-lm-suppress-shortcuts": "true" };
  return html(tag, more, ...children);
}

/* A control with its label, and the reason while it is disabled. */
function labelled(label, input, ...parts) {
  const id = makeId();
  const why = html("small", { id: `${id}-why`, class: "mb-why" });
  input.id = id;
  const root = html(
    "div",
    { class: "mb-control" },
    html("label", { for: id }, label),
    ...parts,
    why,
  );
  const disable = (reason = "") => {
    input.disabled = Boolean(reason);
    why.textContent = reason;
    if (reason) input.setAttribute("aria-describedby", why.id);
    else input.removeAttribute("aria-describedby");
  };
  return { root, disable };
}

const whole = (text) => (/^-?\d+$/.test(text) ? Number(text) : NaN);

/** A labelled range input; `text` stands beside it, `spoken` is read out. */
export function slider({ label, key, unit = "", min = 1, onInput }) {
  const input = control("input", { type: "range", min, "data-key": key });
  const output = html("output");
  const { root, disable } = labelled(label, input, output, input);
  output.setAttribute("for", input.id);
  input.addEventListener("input", () => onInput(Number(input.value)));
  return {
    root,
    key,
    update({ value, max, disabled, text, spoken }) {
      input.max = max;
      input.value = value;
      input.setAttribute("aria-valuetext", spoken ?? `${value}${unit}`);
      output.textContent = text ?? value;
      disable(disabled);
    },
    held: () => input.value,
    enter(text) {
      const value = whole(text);
      const fits = value >= Number(input.min) && value <= Number(input.max);
      if (fits && !input.disabled) onInput(value);
    },
    focus: () => input.focus({ preventScroll: true }),
  };
}

/** A labelled field. `read` gives what a text means, or undefined: then the
    text stays, and `how` says what to write. `write` is its inverse. */
export function field({ label, key, read, write, how, onChange, ...more }) {
  const input = control("input", { type: "text", ...more, "data-key": key });
  const wrong = html("small", { class: "mb-wrong", "aria-live": "polite" });
  const { root, disable } = labelled(label, input, input, wrong);
  const refuse = (text) => {
    if (text) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
    wrong.textContent = text;
  };
  const take = (text) => {
    const value = read(text);
    refuse(value === undefined ? how : "");
    if (value !== undefined) onChange(value);
  };
  input.addEventListener("change", () => take(input.value));
  let shown;
  return {
    root,
    key,
    update({ value, disabled }) {
      disable(disabled);
      if (Object.is(value, shown)) return;
      shown = value;
      input.value = write(value);
      refuse("");
    },
    held: () => write(shown),
    enter: (text) => input.disabled || read(text) === undefined || take(text),
  };
}

/** A labelled field for a whole number from 1 to `max`. */
export function numberField({ max, ...more }) {
  const fits = (value) => value >= 1 && value <= max;
  return field({
    ...{ type: "number", min: 1, max, write: String, ...more },
    read: (text) => (fits(whole(text)) ? whole(text) : undefined),
    how: t`use a whole number from 1 to ${grouped(max)}`,
  });
}

/** A labelled check box. */
export function checkBox({ label, key, onChange }) {
  const input = control("input", { type: "checkbox", "data-key": key });
  const why = html("small", { class: "mb-why" });
  const root = html("label", { class: "mb-check" }, input, label, why);
  input.addEventListener("change", () => onChange(input.checked));
  return {
    root,
    key,
    update({ value, disabled = "" }) {
      input.checked = value;
      input.disabled = Boolean(disabled);
      why.textContent = disabled;
    },
    held: () => String(input.checked),
    enter(text) {
      const known = text === "true" || text === "false";
      if (known && !input.disabled) onChange(text === "true");
    },
  };
}

/** A labelled choice; `options` maps each value to its text, or is a list of
    values that are texts. */
export function choice({ label, key, options, onChange }) {
  const values = Array.isArray(options) ? options : Object.keys(options);
  const option = (value) =>
    html("option", { value }, values === options ? value : options[value]);
  const input = control("select", { "data-key": key }, ...values.map(option));
  const { root, disable } = labelled(label, input, input);
  input.addEventListener("change", () => onChange(input.value));
  return {
    root,
    key,
    update({ value, disabled }) {
      input.value = value;
      disable(disabled);
    },
    held: () => input.value,
    enter: (text) =>
      values.includes(text) && !input.disabled && onChange(text),
  };
}

/** A choice with all of its options in sight; `update` may change them. They
    are in English. */
export function radios({ label, key, onChange }) {
  const id = makeId();
  const group = html("div", { class: "mb-options" });
  const root = html(
    "div",
    { class: "mb-radios", role: "radiogroup", "aria-labelledby": id },
    html("span", { id }, label),
    group,
  );
  const option = (value) => {
    const more = { type: "radio", name: id, value, "data-key": key };
    const input = control("input", more);
    return html("label", { class: "mb-check" }, input, t(value));
  };
  root.addEventListener("change", (event) => onChange(event.target.value));
  let [shown, held] = [[], ""];
  return {
    root,
    key,
    update({ value, options }) {
      if (options.join("\n") !== shown.join("\n")) {
        shown = options;
        group.replaceChildren(...options.map(option));
      }
      held = value;
      for (const input of group.querySelectorAll("input")) {
        input.checked = input.value === value;
      }
    },
    held: () => held,
    enter: (text) => shown.includes(text) && onChange(text),
  };
}

/** A button. */
export function button({ label, key, onClick }) {
  const root = control("button", { type: "button", "data-key": key }, label);
  root.addEventListener("click", onClick);
  return { root };
}

/** Whether the reader wants less motion. */
export const still = () =>
  matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Lets what is drawn come from elsewhere. */
export function come(element, from, delay = 0, to = {}) {
  element.animate([from, to], {
    ...{ duration: 400, delay, fill: "backwards", easing: "ease-in-out" },
  });
  return element;
}

/** A box as `come` takes it. */
export const pixels = (box) =>
  Object.fromEntries(Object.entries(box).map(([key, n]) => [key, `${n}px`]));

/** A button that plays: `step` goes on by one and returns whether there is
    more; `every` is the time of a step in ms. Who wants less motion gets one
    step for each press. */
export function player({ key, step, every = 90 }) {
  let timer = null;
  const { root } = button({ label: t`Play`, key, onClick: () => press() });
  const stop = () => {
    clearInterval(timer);
    timer = null;
    root.textContent = still() ? t`Step` : t`Play`;
  };
  const press = () => {
    if (timer !== null) return stop();
    if (!step() || still()) return stop();
    root.textContent = t`Pause`;
    timer = setInterval(() => step() || stop(), every);
  };
  stop();
  return { root, stop };
}

/** Lets the reader grab what is in a picture. `grab(place)` says what is held
    (null: nothing); `move(place, held)` follows it; `drop` is told when it is
    let go. A mouse moves at once, a finger when it goes sideways or taps: to
    swipe up or down scrolls the page. Places are in the picture's units. */
export function drag(root, { grab = () => true, move, drop = () => {} }) {
  let held = null;
  let down = null; // where a finger came down that may still scroll
  const place = ({ clientX, clientY }) => {
    const box = root.getBoundingClientRect();
    const scale = root.viewBox.baseVal.width / box.width;
    return { x: (clientX - box.left) * scale, y: (clientY - box.top) * scale };
  };
  root.classList.add("mb-drag");
  root.addEventListener("pointerdown", (event) => {
    held = grab(place(event));
    if (held === null) return;
    root.setPointerCapture(event.pointerId);
    down = event.pointerType === "mouse" ? null : event;
    if (down === null) move(place(event), held);
  });
  root.addEventListener("pointermove", (event) => {
    if (held === null || !event.buttons) return;
    if (down !== null) {
      const across = Math.abs(event.clientX - down.clientX);
      const along = Math.abs(event.clientY - down.clientY);
      if (Math.max(across, along) < 6) return;
      if (along > across) held = null;
      down = null;
      if (held === null) return;
    }
    move(place(event), held);
  });
  root.addEventListener("pointerup", (event) => {
    if (held !== null) move(place(event), held);
    if (held !== null) drop(held);
    held = null;
  });
  root.addEventListener("pointercancel", () => (held = null));
}

// ---- medals ----------------------------------------------------------------

/** What this browser keeps under a key: an object. */
export function remembered(key) {
  try {
    return { ...JSON.parse(localStorage.getItem(key)) };
  } catch {
    return {};
  }
}

/** Keeps it. */
export function remember(key, all) {
  try {
    localStorage.setItem(key, JSON.stringify(all));
  } catch {
    // nothing is kept: it lasts as long as the page is open
  }
}

/** New medals jump, and sparks fly; not for who wants less motion. */
export function celebrate(picture, names) {
  if (still()) return;
  for (const name of names) {
    const medal = picture.querySelector(`circle.mb-${name}`);
    const grow = ["scale(1)", "scale(1.3)", "scale(1)"];
    medal.animate({ transform: grow }, { duration: 500, easing: "ease-out" });
    const at = { x: medal.cx.baseVal.value, y: medal.cy.baseVal.value };
    for (let i = 0; i < 10; i += 1) {
      const spark = dot(at, `mb-spark mb-${name}`, 3);
      const way = `rotate(${36 * i}deg) translate`;
      const transform = [`${way}(14px)`, `${way}(44px)`];
      const fly = { transform, opacity: [1, 0] };
      picture.append(spark);
      const end = { duration: 900, easing: "ease-out" };
      spark.animate(fly, end).finished.then(() => spark.remove(), () => {});
    }
  }
}

// ---- the widget ----------------------------------------------------------

/* Calls `draw(width)` now, after every change of a trait (once for several
   at a time) and of the width of `el`. Returns a function that ends it. */
function redraw(model, el, draw) {
  let width = el.clientWidth ?? 0;
  let waiting = false;
  let ended = false;
  const now = () => {
    waiting = false;
    if (!ended) draw(width || 640);
  };
  const soon = () => {
    if (!waiting) queueMicrotask(() => waiting && now());
    waiting = true;
  };
  const observer = new ResizeObserver(([entry]) => {
    const next = Math.round(entry.contentRect.width);
    if (next > 0 && next !== width) {
      width = next;
      now();
    }
  });
  model.on("change", soon);
  observer.observe(el);
  now();
  const end = () => {
    ended = true;
    model.off("change", soon);
    observer.disconnect();
  };
  return { now, end };
}

/** A widget's module.

    @param name of its style and its class
    @param keys the traits it reads
    @param build gets { id, get, set, bound, picture, again, address }: an id,
      the state now, how to change traits, a way to make a control that holds
      a trait and is shown by itself, the picture, how to draw it again, and
      in the book the page's address, whose `link` takes what controls hold.
      It returns
      what stands on the page, from top to bottom: `controls`, at most three;
      `picture`, where something stands around it; `legend`; then what is
      folded: `more`, other controls, and `note`, how to read it. A control
      without `root` is something in the picture that can be grabbed; it has
      its key in the page's address like the others. And `draw(state, width,
      before)`, which returns two texts and elements: { title, sentence,
      numbers, drawn }, and the `height` of what is `drawn` in the picture;
      `wrong`, if the sentence refuses what the reader did.
      `before` is the state before the last change, or null. `stop`, if there
      is one, is called at the end. */
export function widget({ name, keys, build }) {
  const render = ({ model, el }) => {
    const get = () => Object.fromEntries(keys.map((k) => [k, model.get(k)]));
    const start = get();
    let before = null;
    let fresh = true; // the next change begins a new gesture
    const set = (traits) => {
      const changes = Object.entries(traits);
      const other = changes.filter(([key, value]) => value !== model.get(key));
      if (!other.length) return;
      if (fresh) before = get();
      fresh = false;
      for (const [key, value] of other) model.set(key, value);
      model.save_changes();
    };
    const id = makeId();
    const picture = svg("svg", { role: "img", class: "mb-picture" });
    const again = () => now();
    const bound = (make, label, key, more = {}) => {
      const onChange = (value) => set({ [key]: value });
      return { bound: true, ...make({ label, key, onChange, ...more }) };
    };
    const { address } = model;
    const parts = build({ id, get, set, bound, picture, again, address });
    parts.picture ??= picture;
    const controls = [...parts.controls, ...(parts.more ?? [])].filter(
      ({ key }) => key,
    );
    const reset = button({
      label: t`Reset`,
      key: "reset",
      onClick: () => {
        parts.stop?.();
        set(start);
        [before, fresh] = [null, true];
      },
    });
    const title = html("b", { class: "mb-title" });
    const was = html("span", {}, html("i", { class: "mb-was" }), t`before`);
    parts.legend?.append(was);
    // the words at once for the eye, and for the ear where they come to rest
    const said = html("p", { class: "mb-live", "aria-hidden": "true" });
    const live = html("p", { "aria-live": "polite", class: "mb-spoken" });
    const numbers = html("div", { class: "mb-results" });
    const fold = (label, ...content) =>
      html(
        "details",
        { class: "mb-fold" },
        control("summary", {}, label),
        ...content,
      );
    const grid = (all) =>
      html(
        "div",
        { class: "mb-controls" },
        ...all.filter(({ root }) => root).map(({ root }) => root),
      );
    el.classList.add("mb-root", `mb-${name}`);
    el.append(
      html("div", { class: "mb-head" }, title, reset.root),
      grid(parts.controls),
      parts.picture,
      ...(parts.legend ? [parts.legend] : []),
      said,
      live,
      ...(parts.more ? [fold(t`More settings`, grid(parts.more))] : []),
      fold(t`Numbers, and how to read this`, numbers, parts.note ?? ""),
    );
    const anew = () => (fresh = true);
    el.addEventListener("change", anew);
    el.addEventListener("pointerup", anew);

    let begun; // what the controls hold at first
    let ready = false; // the reader's own changes come now
    const held = () => controls.map((control) => [control.key, control.held()]);
    let speaking;
    const { now, end } = redraw(model, parts.picture, (width) => {
      const state = get();
      el.classList.toggle("mb-narrow", width < 480);
      const shown = parts.draw(state, width, before);
      for (const { bound, key, update } of controls) {
        if (bound) update({ value: state[key] });
      }
      if (shown.drawn) {
        picture.setAttribute("viewBox", `0 0 ${width} ${shown.height}`);
        picture.setAttribute("aria-label", shown.sentence);
        picture.replaceChildren(patterns(id), ...shown.drawn);
      }
      const ghost = parts.picture.querySelector(".mb-ghost:not(.mb-named)");
      was.style.visibility = ghost ? "visible" : "hidden";
      const { title: words } = shown;
      title.textContent = state.label
        ? t`${words}: ${t(state.label)}`
        : words;
      numbers.replaceChildren(...shown.numbers);
      reset.root.disabled = keys.every((key) => state[key] === start[key]);
      if (ready) {
        const first = new Map(begun);
        const other = held().filter(([key, text]) => first.get(key) !== text);
        address?.write(Object.fromEntries(other));
      }
      clearTimeout(speaking);
      said.textContent = shown.sentence;
      said.classList.toggle("mb-wrong", Boolean(shown.wrong));
      const speak = () => {
        if (live.textContent === shown.sentence) return;
        live.textContent = shown.sentence;
      };
      if (ready) speaking = setTimeout(speak, 150);
      else speak();
    });
    begun = held();
    for (const [key, text] of Object.entries(address?.read() ?? {})) {
      controls.find((control) => control.key === key)?.enter(text);
      now();
    }
    [before, fresh] = [null, true];
    now();
    ready = true;
    return () => {
      end();
      parts.stop?.();
      clearTimeout(speaking);
      el.replaceChildren();
    };
  };
  return { render };
}
