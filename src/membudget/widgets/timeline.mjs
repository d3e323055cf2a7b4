import {
  band,
  button,
  byteTicks,
  figure,
  formatBytes,
  hatching,
  html,
  makeId,
  radios,
  redraw,
  save,
  slider,
  spread,
  stairs,
  svg,
} from "./base.mjs";

/* One training step, operator by operator; moment −1 is before the first.

   describe(state): the numbers; Python's Timeline.numbers() is the same.
   layout(state, width): where everything stands in the picture.
   render({ model, el }): controls, picture and tables. */

const SHOWN = {
  optimizer: "optimizer states",
  parameters: "parameters",
  inputs: "inputs",
  gradients: "gradients",
  activations: "activations",
  recomputation: "recomputed activations",
  temporaries: "temporaries",
};

const PHASES = {
  forward: ["forward pass", "forward", "F"],
  backward: ["backward pass", "backward", "B"],
  recomputation: ["recomputation", "R"],
  optimizer: ["optimizer step", "step", "S"],
};

const NOTE =
  "Bytes alive after each operator, in the order in which they ran; those of " +
  "the optimizer step are drawn narrower. Temporaries include the gradients " +
  "on their way back through the layers. The thin lines are the other steps, " +
  "over the same width. F forward, B backward, R recomputation.";

const LARGEST_STEP_SHARE = 0.22; // of the width
const ROWS = 7; // of the largest things alive
const LETTER = 7.1; // pixels, on average, in a wide font

// ---- numbers -------------------------------------------------------------

const unpacked = new WeakMap();

/* The steps, from the tables and integers that Python sends. */
function unpack(data) {
  if (!unpacked.has(data)) {
    const phases = Object.keys(PHASES);
    const kinds = [];
    for (let i = 0; i < data.kinds.length; i += 3) {
      const [name, module, phase] = data.kinds.slice(i, i + 3);
      kinds.push({
        name: data.names[name],
        module: data.modules[module],
        phase: phases[phase],
      });
    }
    const all = data.steps.map((step) => unpackStep(step, kinds, data.sizes));
    unpacked.set(data, all);
  }
  return unpacked.get(data);
}

function unpackStep(step, kinds, sizes) {
  const operators = step.operators.map((kind) => kinds[kind]);
  const before = { name: "", module: "", phase: "" };
  const operator = (moment) => operators[moment] ?? before;
  const allocations = [];
  const changes = [-1, ...operators].map(() => ({}));
  const change = (slot, category, bytes) => {
    if (slot < changes.length) {
      changes[slot][category] = (changes[slot][category] ?? 0) + bytes;
    }
  };
  for (let i = 0; i < step.allocations.length; i += 4) {
    const [birth, life, size, kind] = step.allocations.slice(i, i + 4);
    const category = Object.keys(SHOWN)[kind];
    const bytes = sizes[size];
    allocations.push({ birth, death: birth + life, bytes, category });
    change(birth + 1, category, bytes);
    change(birth + life + 1, category, -bytes);
  }
  const memory = [];
  const sums = [...Object.keys(SHOWN), "total"];
  let now = Object.fromEntries(sums.map((sum) => [sum, 0]));
  for (const slot of changes) {
    now = { ...now };
    for (const [category, bytes] of Object.entries(slot)) {
      now[category] += bytes;
      now.total += bytes;
    }
    memory.push(now);
  }
  const peak = memory.reduce((a, b) => (b.total > a.total ? b : a));
  return {
    label: step.label,
    operators,
    operator,
    allocations,
    memory,
    forwardEnd: step.forward_end,
    peakMoment: memory.indexOf(peak) - 1,
    peak: peak.total,
  };
}

const at = (step, moment) => step.memory[moment + 1];

/* The chosen step and a moment of it, whatever the state says. */
function chosen({ steps, step, moment }) {
  const all = unpack(steps);
  const now = all.find(({ label }) => label === step) ?? all[0];
  return { all, now, moment: Math.min(moment, now.operators.length - 1) };
}

export function describe(state) {
  const { all, now, moment } = chosen(state);
  const { name, module, phase } = now.operator(moment);
  return {
    step: now.label,
    moment,
    operators: now.operators.length,
    operator: name,
    module,
    phase,
    forward_end_moment: now.forwardEnd,
    peak_moment: now.peakMoment,
    now: at(now, moment),
    forward_end: at(now, now.forwardEnd),
    peak: at(now, now.peakMoment),
    peaks: Object.fromEntries(all.map(({ label, peak }) => [label, peak])),
    largest: largest(now, moment),
  };
}

/* What is alive, grouped by category and by what made it. */
function largest({ allocations, operator }, moment) {
  const groups = new Map();
  for (const { birth, death, bytes, category } of allocations) {
    if (birth > moment || death <= moment) continue;
    const { name, module, phase } = operator(birth);
    const like = module.replace(/[0-9]+/g, "#");
    const key = [category, name, phase, like].join();
    if (!groups.has(key)) {
      const made = { category, operator: name, phase, modules: [] };
      groups.set(key, { ...made, count: 0, size: bytes, bytes: 0 });
    }
    const group = groups.get(key);
    group.count += 1;
    group.bytes += bytes;
    if (group.size !== bytes) group.size = null;
    if (!group.modules.includes(module)) group.modules.push(module);
  }
  return [...groups.values()].sort((a, b) => b.bytes - a.bytes);
}

/** The moment in words; Python's Timeline.sentence() says the same. */
export function sentence(state) {
  const n = describe(state);
  const [now, end, peak] = [n.now.total, n.forward_end.total, n.peak.total];
  let rank = "the peak";
  if (now !== peak) {
    const below = formatBytes(peak - now);
    rank = `${below} below the peak of ${formatBytes(peak)}`;
  }
  let against = "This is the end of the forward pass";
  if (n.moment !== n.forward_end_moment) {
    const more = now > end ? "more" : "less";
    const by = formatBytes(Math.abs(now - end));
    const much = now === end ? "As much as" : `That is ${by} ${more} than`;
    const changes = Object.keys(SHOWN)
      .map((c) => [c, n.now[c] - n.forward_end[c]])
      .filter(([, change]) => change)
      .sort(([, a], [, b]) => Math.abs(b) - Math.abs(a))
      .map(([c, change]) => {
        const sign = change > 0 ? "+" : "−";
        return `${SHOWN[c]} ${sign}${formatBytes(Math.abs(change))}`;
      });
    against =
      `${much} at the end of the forward pass` +
      (changes.length ? `: ${changes.join(", ")}` : "");
  }
  return (
    `Step ${n.step}, ${place(n)}. ${formatBytes(now)} are alive, ${rank}. ` +
    `${against}.`
  );
}

function place(n) {
  if (n.moment < 0) return "before the first operator";
  const words = `operator ${n.moment + 1} of ${n.operators}: ${whatRuns(n)}`;
  if (!n.module && n.phase === "optimizer") return words;
  return `${words}, in the ${PHASES[n.phase][0]}`;
}

const shortName = ({ operator }) => operator.replace(/^aten\./, "");

/* An operator and the modules that it belongs to. */
function whatRuns({ operator, phase, module, modules = [module] }) {
  const name = shortName({ operator });
  if (modules[0]) return `${name} of ${modulesInWords(modules)}`;
  if (phase === "optimizer") return `${name} of the optimizer step`;
  return `${name} outside of the model`;
}

function modulesInWords(modules) {
  const few = modules.length <= 4;
  const names = few ? modules.join(", ") : `${modules[0]} … ${modules.at(-1)}`;
  if (!/^[0-9]/.test(names)) return names;
  return `module${modules.length > 1 ? "s" : ""} ${names}`;
}

// ---- geometry ------------------------------------------------------------

/** Geometry of the picture, in pixels, for a given width. */
export function layout(state, width) {
  const { all, now, moment } = chosen(state);
  const longest = Math.max(8, ...all.map(({ label }) => label.length));
  const margin = 16 + LETTER * Math.min(longest, 14);
  const plot = { left: 30, right: width - margin, top: 40, bottom: 268 };
  const top = 1.04 * Math.max(1, ...all.map(({ peak }) => peak));
  const perByte = (plot.bottom - plot.top) / top;
  const y = (bytes) => plot.bottom - bytes * perByte;
  const share = stepShare(all);
  const outlines = all.map((step) => {
    const edges = edgesOf(step, share, plot);
    const mark = (moment) => ({
      x: (edges[moment + 1] + edges[moment + 2]) / 2,
      y: y(at(step, moment).total),
    });
    return {
      label: step.label,
      bytes: step.peak,
      edges,
      heights: step.memory.map(({ total }) => y(total)),
      peak: mark(step.peakMoment),
      mark,
    };
  });
  const ours = outlines[all.indexOf(now)];
  const ticks = byteTicks(top);
  return {
    width,
    plot,
    perByte,
    edges: ours.edges,
    ours,
    outlines,
    bands: bandsOf(now, y),
    forwardEnd: ours.mark(now.forwardEnd),
    cursor: ours.mark(moment),
    phases: phaseRuns(now, ours.edges),
    unit: ticks.unit,
    ticks: ticks.marks.map(({ value, label }) => ({ label, y: y(value) })),
  };
}

const runsIn = ({ operators }, name) =>
  operators.filter(({ phase }) => phase === name).length;

/* The share of the width for the optimizer step, the same for all, so that
   the passes of all steps have the same width. */
function stepShare(all) {
  const shares = all
    .map((step) => runsIn(step, "optimizer") / step.memory.length)
    .filter((share) => share > 0);
  return Math.min(LARGEST_STEP_SHARE, ...shares);
}

/* Where each moment begins, and the last one ends. */
function edgesOf(step, share, { left, right }) {
  const many = runsIn(step, "optimizer");
  const rest = step.memory.length - many;
  const narrow = many ? (share * rest) / ((1 - share) * many) : 1;
  const unit = (right - left) / (rest + many * narrow);
  const edges = [left, left + unit];
  for (const { phase } of step.operators) {
    edges.push(edges.at(-1) + unit * (phase === "optimizer" ? narrow : 1));
  }
  return edges;
}

/* One band for each category that is ever there, stacked from the bottom. */
function bandsOf({ memory }, y) {
  const floor = memory.map(() => 0);
  return Object.keys(SHOWN)
    .filter((category) => memory.some((now) => now[category]))
    .map((category) => {
      const lower = floor.map(y);
      memory.forEach((now, i) => (floor[i] += now[category]));
      return { category, lower, upper: floor.map(y) };
    });
}

function phaseRuns({ operators }, edges) {
  const runs = [];
  operators.forEach(({ phase }, i) => {
    const begins = phase !== operators[i - 1]?.phase;
    if (begins) runs.push({ phase, x: edges[i + 1] });
    runs.at(-1).width = edges[i + 2] - runs.at(-1).x;
  });
  return runs;
}

/** The moment at a place in the picture. */
export function momentAt({ edges }, x) {
  const slot = edges.findLastIndex((edge) => edge <= x);
  return Math.min(Math.max(slot, 0), edges.length - 2) - 1;
}

// ---- drawing -------------------------------------------------------------

const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, ...attributes }, content);

const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

const dot = ({ x, y }, name, r = 4) =>
  svg("circle", { cx: x, cy: y, r, class: name });

const short = (label, most) =>
  label.length > most ? `${label.slice(0, most - 1)}…` : label;

/** Stairs with no more than one step in six pixels, the highest there. */
export function envelope({ edges, heights }) {
  const [few, highest] = [[edges[0]], []];
  let top = Infinity;
  heights.forEach((height, i) => {
    top = Math.min(top, height);
    if (edges[i + 1] - few.at(-1) < 6 && i + 1 < heights.length) return;
    few.push(edges[i + 1]);
    highest.push(top);
    top = Infinity;
  });
  return [few, highest];
}

const patterns = (id) =>
  svg(
    "defs",
    {},
    hatching(`${id}-optimizer`, 8, "M0 4H8"),
    hatching(`${id}-inputs`, 6, "M3 0V6"),
    hatching(`${id}-gradients`, 6, "M0 3H6", 45),
    hatching(`${id}-recomputation`, 7, "M0 3.5H7M3.5 0V7", 45),
    hatching(`${id}-temporaries`, 5, "M1 2.5H2.5"),
  );

/* A shape in a category's colour, and again in its pattern. */
const filled = (id, category, tag, shape) => [
  svg(tag, { ...shape, class: `mb-${category}` }),
  svg(tag, { ...shape, fill: `url(#${id}-${category})` }),
];

/* All but the cursor. */
function drawStep(root, id, plan) {
  const { plot, ours, outlines, edges } = plan;
  const parts = [patterns(id)];
  for (const { y, label } of plan.ticks) {
    parts.push(
      line(plot.left, y, plot.right, y, "mb-grid"),
      text(plot.left - 6, y + 4, label, { "text-anchor": "end" }),
    );
  }
  const unit = { "text-anchor": "end" };
  parts.push(text(plot.left - 6, plot.top - 10, plan.unit, unit));
  for (const { category, lower, upper } of plan.bands) {
    const shape = { d: band(edges, lower, upper) };
    parts.push(...filled(id, category, "path", shape));
  }
  parts.push(line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis"));
  let others = 0;
  for (const outline of outlines) {
    if (outline === ours) continue;
    const d = stairs(...envelope(outline));
    others += 1;
    parts.push(
      svg("path", { d, class: "mb-under" }),
      svg("path", { d, class: `mb-other mb-other-${Math.min(others, 3)}` }),
    );
  }
  parts.push(...phaseStrip(id, plan), ...peaks(plan));
  const { forwardEnd, ours: { peak } } = plan;
  if (forwardEnd.x < peak.x) {
    parts.push(dot(forwardEnd, "mb-open"));
    const room = forwardEnd.x - plot.left;
    const label = ["end of forward pass", "end of forward"].find(
      (label) => LETTER * label.length + 10 < room,
    );
    const end = { "text-anchor": "end", class: "mb-halo" };
    if (label) parts.push(text(forwardEnd.x - 8, forwardEnd.y - 6, label, end));
  }
  root.replaceChildren(...parts);
}

/* Under the picture: which phase is where. */
function phaseStrip(id, { phases, plot }) {
  return phases.flatMap(({ phase, x, width }) => {
    const box = {
      x: x + 0.5,
      y: plot.bottom + 5,
      width: Math.max(width - 1, 0.5),
      height: 7,
    };
    const label = PHASES[phase].find((word) => LETTER * word.length < width);
    const middle = { "text-anchor": "middle" };
    return [
      ...(phase === "recomputation"
        ? filled(id, phase, "rect", box)
        : [svg("rect", { ...box, class: `mb-phase-${phase}` })]),
      ...(label ? [text(x + width / 2, plot.bottom + 26, label, middle)] : []),
    ];
  });
}

/* The peaks of all steps, beside the picture. */
function peaks({ plot, ours, outlines }) {
  const heights = outlines.map(({ peak }) => peak.y);
  const places = spread(heights, 33, plot.top, plot.bottom - 16);
  const parts = outlines.flatMap((outline, i) => {
    const { x, y } = outline.peak;
    const own = outline === ours;
    return [
      line(x, y, plot.right, y, "mb-leader"),
      line(plot.right, y, plot.right + 9, places[i] + 4, "mb-leader"),
      dot(outline.peak, own ? "mb-peak" : "mb-open", own ? 4.5 : 3),
      text(plot.right + 12, places[i], short(outline.label, 14)),
      text(plot.right + 12, places[i] + 14, formatBytes(outline.bytes), {
        class: "mb-value",
      }),
    ];
  });
  const { x, y } = ours.peak;
  const left = x + 40 < plot.right;
  const anchor = left ? "start" : "end";
  const look = { class: "mb-value mb-halo", "text-anchor": anchor };
  return [...parts, text(left ? x + 8 : x - 8, y - 6, "peak", look)];
}

/* The line at the moment, and above it what ran, as far as there is room. */
function drawCursor(root, { cursor, plot, width }, n) {
  const { x, y } = cursor;
  const bytes = formatBytes(n.now.total);
  const label = text(x, 13, "", { class: "mb-value" });
  root.replaceChildren(
    line(x, plot.top - 22, x, plot.bottom + 12, "mb-cursor"),
    dot({ x, y }, "mb-cursor-dot", 3),
    label,
  );
  const words =
    n.moment < 0 ? ["before the step"] : [whatRuns(n), shortName(n)];
  let wide = 0;
  for (const word of [...words.map((word) => `${word}: ${bytes}`), bytes]) {
    label.textContent = word;
    wide = label.getComputedTextLength();
    if (wide <= width) break;
  }
  const left = Math.min(Math.max(x - wide / 2, 0), width - wide);
  label.setAttribute("x", left);
}

// ---- the widget ----------------------------------------------------------

const swatch = (id, category) =>
  svg(
    "svg",
    { viewBox: "0 0 14 14", class: "mb-swatch", "aria-hidden": "true" },
    ...filled(id, category, "rect", { width: 14, height: 14 }),
  );

const heading = (...children) => html("th", { scope: "row" }, ...children);

function columns(...labels) {
  const cells = labels.map((label) => html("th", { scope: "col" }, label));
  return html("thead", {}, html("tr", {}, ...cells));
}

function memoryTable(id, n, bands) {
  const cell = (key, bytes) =>
    html(
      "td",
      { "data-number": key, "data-value": bytes },
      bytes ? formatBytes(bytes) : "–",
    );
  const row = (attributes, category, ...label) =>
    html(
      "tr",
      attributes,
      heading(...label),
      ...["now", "forward_end", "peak"].map((moment) =>
        cell(`${moment}.${category}`, n[moment][category]),
      ),
    );
  const rows = [...bands].reverse().map(({ category }) =>
    row({}, category, swatch(id, category), SHOWN[category]),
  );
  return [
    columns("bytes alive", "now", "end of forward", "peak"),
    html("tbody", {}, ...rows, row({ class: "mb-sum" }, "total", "total")),
  ];
}

function largestTable(id, n) {
  const row = (group) => {
    const { category, operator, count, size, bytes } = group;
    const made = operator ? whatRuns(group) : "from before the step";
    const each = `${count} ${size ? `× ${formatBytes(size)}` : "storages"}`;
    return html(
      "tr",
      {},
      heading(swatch(id, category), `${SHOWN[category]}: ${made}`),
      html("td", {}, count > 1 ? each : ""),
      html("td", {}, formatBytes(bytes)),
    );
  };
  const rest = n.largest.slice(ROWS);
  const bytes = rest.reduce((sum, group) => sum + group.bytes, 0);
  const last = html(
    "tr",
    {},
    heading(rest.length ? `and ${rest.length} smaller` : "nothing else"),
    html("td"),
    html("td", {}, rest.length ? formatBytes(bytes) : ""),
  );
  return [
    columns("the largest alive now", "", "bytes"),
    html("tbody", {}, ...n.largest.slice(0, ROWS).map(row), last),
  ];
}

function render({ model, el }) {
  const read = () =>
    Object.fromEntries(
      ["steps", "step", "moment", "label"].map((key) => [key, model.get(key)]),
    );
  const go = (moment) => {
    if (moment !== model.get("moment")) save(model, { moment });
  };
  const now = () => chosen(read()).now;

  const step = radios({
    label: "Step",
    key: "step",
    onChange: (step) =>
      save(model, { step, moment: chosen({ ...read(), step }).now.peakMoment }),
  });
  const end = button({
    label: "End of forward",
    key: "forward_end",
    onClick: () => go(now().forwardEnd),
  });
  const peak = button({
    label: "Peak",
    key: "peak",
    onClick: () => go(now().peakMoment),
  });
  const moment = slider({
    label: "Operator",
    key: "moment",
    min: 0,
    onInput: (value) => go(value - 1),
  });

  const id = makeId();
  const still = svg("g");
  const cursor = svg("g");
  const look = { role: "img", class: "mb-picture" };
  const picture = svg("svg", look, still, cursor);
  const live = html("p", { "aria-live": "polite", class: "mb-live" });
  const memory = html("table", { class: "mb-table mb-indent" });
  const list = html("table", { class: "mb-table mb-indent" });
  const title = html("span");
  let drawn = {};
  let speaking;

  el.classList.add("mb-root", "mb-timeline");
  const buttons = html("div", { class: "mb-buttons" }, end.root, peak.root);
  const controls = html("div", { class: "mb-row" }, step.root, buttons);
  el.append(
    figure(title, NOTE, html("div", {}, controls, moment.root, picture)),
    live,
    html("div", { class: "mb-tables" }, memory, html("div", {}, list)),
  );

  const seek = (event) => {
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * drawn.plan.width;
    go(momentAt(drawn.plan, x));
  };
  picture.addEventListener("pointerdown", (event) => {
    picture.setPointerCapture(event.pointerId);
    seek(event);
  });
  picture.addEventListener("pointermove", (event) => {
    if (event.buttons) seek(event);
  });
  picture.addEventListener("pointerup", () => moment.focus());

  const stop = redraw(model, picture, (width) => {
    const state = read();
    const n = describe(state);
    const plan = layout(state, width);
    const same = ["steps", "step"].every((key) => drawn[key] === state[key]);
    if (!same || drawn.width !== width) drawStep(still, id, plan);
    drawn = { ...state, width, plan };
    el.classList.toggle("mb-narrow", width < 480);
    drawCursor(cursor, plan, n);
    picture.setAttribute("viewBox", `0 0 ${width} 300`);
    picture.setAttribute("aria-label", sentence(state));
    step.update({ value: n.step, options: Object.keys(n.peaks) });
    moment.update({
      value: n.moment + 1,
      max: n.operators,
      text: `${n.moment + 1} of ${n.operators}`,
      spoken: `${place(n)}: ${formatBytes(n.now.total)}`,
    });
    title.textContent = "Memory during one training step";
    if (state.label) title.append(": ", state.label);
    memory.replaceChildren(...memoryTable(id, n, plan.bands));
    list.replaceChildren(...largestTable(id, n));
    clearTimeout(speaking);
    const speak = () => (live.textContent = sentence(state));
    if (live.textContent) speaking = setTimeout(speak, 150);
    else speak();
  });
  return () => {
    stop();
    clearTimeout(speaking);
    el.replaceChildren();
  };
}

export default { render };
