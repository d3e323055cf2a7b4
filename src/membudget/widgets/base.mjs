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

/** A picture with its title and how to read it. */
export function figure(title, note, picture) {
  const caption = html("figcaption", {}, html("b", {}, title), " ", note);
  return html("figure", { class: "mb-figure" }, caption, picture);
}

/* A native control. JupyterLab would else take its arrow keys for shortcuts. */
function control(tag, attributes, ...children) {
  const more = { ...attributes, "data-lm-suppress-shortcuts": "true" };
  return html(tag, more, ...children);
}

/** A labelled range input. `update` shows a state without an event; `text`
    stands beside the slider, `spoken` is read out. */
export function slider({ label, key, unit = "", min = 1, onInput }) {
  const id = makeId();
  const input = control("input", { type: "range", id, min, "data-key": key });
  const output = html("output", { for: id });
  const root = html(
    "div",
    { class: "mb-control" },
    html("label", { for: id }, label),
    output,
    input,
  );
  input.addEventListener("input", () => onInput(Number(input.value)));
  const update = ({ value, max, disabled = false, text, spoken }) => {
    input.max = max;
    input.value = value;
    input.disabled = disabled;
    input.setAttribute("aria-valuetext", spoken ?? `${value}${unit}`);
    output.textContent = text ?? value;
  };
  return { root, update, focus: () => input.focus({ preventScroll: true }) };
}

/** A labelled field for a whole number of at least 1. */
export function numberField({ label, key, max, onChange }) {
  const id = makeId();
  const input = control("input", {
    type: "number",
    id,
    min: 1,
    max,
    "data-key": key,
  });
  const root = html(
    "div",
    { class: "mb-control" },
    html("label", { for: id }, label),
    input,
  );
  let shown = 1;
  input.addEventListener("change", () => {
    const value = Number(input.value);
    if (Number.isInteger(value) && value >= 1 && value <= max) onChange(value);
    else input.value = shown;
  });
  const update = ({ value, readOnly = false }) => {
    shown = value;
    input.value = value;
    input.readOnly = readOnly;
  };
  return { root, update };
}

/** A labelled check box. */
export function checkBox({ label, key, onChange }) {
  const input = control("input", { type: "checkbox", "data-key": key });
  const root = html("label", { class: "mb-check" }, input, label);
  input.addEventListener("change", () => onChange(input.checked));
  return { root, update: ({ value }) => (input.checked = value) };
}

/** A labelled choice; `options` maps each value to its text. */
export function choice({ label, key, options, onChange }) {
  const id = makeId();
  const input = control(
    "select",
    { id, "data-key": key },
    ...Object.entries(options).map(([value, text]) =>
      html("option", { value }, text),
    ),
  );
  const root = html(
    "div",
    { class: "mb-control" },
    html("label", { for: id }, label),
    input,
  );
  input.addEventListener("change", () => onChange(input.value));
  return { root, update: ({ value }) => (input.value = value) };
}

/** A choice with all of its options in sight; `update` may change them. */
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
    return html("label", { class: "mb-check" }, input, value);
  };
  root.addEventListener("change", (event) => onChange(event.target.value));
  let shown = [];
  const update = ({ value, options }) => {
    if (options.join("\n") !== shown.join("\n")) {
      shown = options;
      group.replaceChildren(...options.map(option));
    }
    for (const input of group.querySelectorAll("input")) {
      input.checked = input.value === value;
    }
  };
  return { root, update };
}

/** A button. */
export function button({ label, key, onClick }) {
  const root = control("button", { type: "button", "data-key": key }, label);
  root.addEventListener("click", onClick);
  return { root };
}

/** A pattern for `fill="url(#id)"`, so that no colour has to tell by itself. */
export function hatching(id, size, d, turn, look = "mb-hatching") {
  return svg(
    "pattern",
    {
      id,
      width: size,
      height: size,
      patternUnits: "userSpaceOnUse",
      patternTransform: turn && `rotate(${turn})`,
    },
    svg("path", { d, class: look }),
  );
}

/** Sets traits and tells the kernel, where there is one. */
export function save(model, traits) {
  for (const [name, value] of Object.entries(traits)) model.set(name, value);
  model.save_changes();
}

/** Calls `draw(width)` now, after every change of a trait (once for several
    at a time) and of the width of `el`. Returns a function that ends it. */
export function redraw(model, el, draw) {
  let width = 0;
  let waiting = false;
  let ended = false;
  const now = () => {
    waiting = false;
    if (!ended) draw(width || 640);
  };
  const soon = () => {
    if (!waiting) queueMicrotask(now);
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
  return () => {
    ended = true;
    model.off("change", soon);
    observer.disconnect();
  };
}
