import {
  band,
  byteTicks,
  figure,
  formatBytes,
  formatNumber,
  hatching,
  html,
  makeId,
  radios,
  redraw,
  save,
  slider,
  spread,
  svg,
} from "./base.mjs";

/* A chain of layers in k checkpointed segments: its peak and its extra runs.

   simulate(chain, sizes): the tape machine; Python's simulate() is the same.
   describe(state): the numbers; Python's Segments.numbers() is the same.
   layout(state, width): where everything stands in the pictures.
   render({ model, el }): controls, pictures and tables. */

const SHOWN = {
  kept: "checkpoints",
  tapes: "tapes",
  recomputed: "recomputed tapes",
  value: "value at work",
  gradients: "gradients",
  workspace: "workspace",
};

const SPLITS = {
  balanced: "balanced, longer first",
  pytorch: "PyTorch’s checkpoint_sequential",
};

const PHASES = {
  forward: ["forward pass", "forward", "F"],
  recomputation: ["recomputation", "R"],
  backward: ["backward pass", "backward", "B"],
};

const NOTES = {
  units:
    "In units: a layer’s tape is 1, of which its output, and so a " +
    "checkpoint, is c; as large as c are the gradient on its way back and " +
    "the one that the layer at work makes (workspace). ",
  bytes: "In bytes, from the sizes of the stages. ",
  passes:
    "One step for each action: a layer runs, a checkpoint is kept or " +
    "dropped, a layer goes backward. F forward, R recomputation, B backward.",
  curve:
    "The line is the peak for each number of segments, 0 for no " +
    "checkpointing; the ring is the one chosen, diamonds are the least. " +
    "The dotted line is √(L·a/c): a is a layer’s tape, c a checkpoint.",
  points: " Points were measured.",
};

const UNIT = 100; // a layer's tape, so that sizes are whole numbers
const MOST_LAYERS = 100;
const LETTER = 7.1; // pixels, on average, in a wide font

// ---- the tape machine ----------------------------------------------------

/* A stage's row, as Python sends it. */
const [OUTPUT, INNER, HOLDS_INPUT, HOLDS_OUTPUT, FORWARD, RECORD, RECOMPUTE] =
  [0, 1, 2, 3, 4, 5, 6];
const [BACKWARD, AGAIN, GRADIENTS, GRADIENT] = [7, 8, 9, 10];

/** The moments of a chain whose first stages are checkpointed in segments of
    these sizes; what remains keeps its tapes. A moment's parts are those of
    PARTS in tape.py. */
export function simulate(chain, sizes) {
  const moments = [];
  const last = chain.length - 1;
  const root = [0]; // a view is counted where its storage is
  chain.forEach((stage, i) => root.push(stage[OUTPUT] ? i + 1 : root[i]));
  const size = (boundary) => (boundary ? chain[boundary - 1][OUTPUT] : 0);
  const taped = root.map(() => 0); // by how many tapes a boundary is held
  const kept = root.map(() => 0); // as how many checkpoints
  let [keptBytes, tapeBytes, left, next] = [0, 0, 0, last];
  let value = 0; // the boundary at work; -1 for none

  const tape = (boundary, by) => {
    const before = taped[boundary];
    taped[boundary] += by;
    if (before > 0 === taped[boundary] > 0 || kept[boundary]) return;
    tapeBytes += by * size(boundary);
  };
  const keep = (boundary, by) => {
    const before = kept[boundary];
    kept[boundary] += by;
    if (before > 0 === kept[boundary] > 0) return;
    keptBytes += by * size(boundary);
    if (taped[boundary]) tapeBytes -= by * size(boundary);
  };
  const tapes = (i, by) => {
    if (chain[i][HOLDS_INPUT]) tape(root[i], by);
    if (chain[i][HOLDS_OUTPUT]) tape(root[i + 1], by);
    tapeBytes += by * chain[i][INNER];
  };
  const alone = (boundary) =>
    boundary < 0 || taped[boundary] || kept[boundary] ? 0 : size(boundary);
  const add = (kind, stage, extra, workspace = 0, more = value) => {
    const values = alone(value) + (more === value ? 0 : alone(more));
    const moving = next >= 0 && next < last ? chain[next][GRADIENT] : 0;
    const parts = [keptBytes, values, tapeBytes, left + moving, workspace];
    moments.push({ kind, stage, parts, extra });
  };

  const run = (kind, i, workspace, extra = false) => {
    value = root[i];
    if (kind === "record") tapes(i, 1);
    add(kind, i, extra, chain[i][workspace], root[i + 1]);
    value = root[i + 1];
  };
  const backward = (i, workspace) => {
    value = -1;
    add("backward", i, false, chain[i][workspace]);
    tapes(i, -1);
    left += chain[i][GRADIENTS];
    next -= 1;
  };

  let end = 0;
  const segments = sizes.map((count) => [end, (end += count)]);
  for (const [start, stop] of segments) {
    if (start) {
      keep(root[start], 1);
      add("keep", start, false);
    }
    for (let i = start; i < stop; i += 1) run("forward", i, FORWARD);
  }
  for (let i = end; i <= last; i += 1) run("record", i, RECORD);
  for (let i = last; i >= end; i -= 1) backward(i, BACKWARD);
  for (const [start, stop] of segments.reverse()) {
    for (let i = start; i < stop; i += 1) {
      run("record", i, i === stop - 1 ? RECOMPUTE : RECORD, true);
    }
    for (let i = stop - 1; i >= start; i -= 1) backward(i, AGAIN);
    if (start) {
      add("drop", start, false);
      keep(root[start], -1);
    }
  }
  return moments;
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const live = ({ parts: [a, b, c, d, e] }) => a + b + c + d + e;
const peakOf = (moments) =>
  moments.reduce((peak, moment) => Math.max(peak, live(moment)), 0);

// ---- numbers -------------------------------------------------------------

/* The chain and the number of segments, whatever the state says. */
function chosen({ chain, layers, checkpoint, segments }) {
  const c = Math.round(UNIT * checkpoint);
  const row = [c, UNIT - c, 1, 1, 0, 0, 0, c, c, 0, c];
  const stages = chain ?? Array(layers).fill(row);
  return {
    stages,
    count: Math.min(segments, stages.length),
    unit: chain ? 1 : UNIT,
  };
}

/** Sizes of the checkpointed segments. */
export function sizesOf(length, count, split) {
  if (!count) return [];
  const small = Math.floor(length / count);
  if (split === "pytorch") return Array(count - 1).fill(small);
  return Array.from({ length: count }, (_, i) => small + (i < length % count));
}

const curves = new Map();

/* The peak of every number of segments, from 0. */
function curveOf(stages, split, unit) {
  const what = unit === 1 ? stages.join(";") : [stages.length, stages[0]];
  const key = `${split} ${what}`;
  if (!curves.has(key)) {
    const peak = (_, k) =>
      peakOf(simulate(stages, sizesOf(stages.length, k, split)));
    curves.set(key, Array.from({ length: stages.length + 1 }, peak));
  }
  return curves.get(key);
}

const phaseOf = ({ kind, extra }) => {
  if (extra) return "recomputation";
  return kind === "backward" || kind === "drop" ? "backward" : "forward";
};

/* Sizes of what is shown at each moment. */
function shownOf(moments) {
  let again = false;
  return moments.map(({ parts, extra }) => {
    let [kept, value, tapes, gradients, workspace] = parts;
    again ||= extra;
    // A recomputation that ends early does not make all of it.
    const less = Math.min(value, Math.max(0, -workspace));
    const fewer = Math.min(tapes, Math.max(0, -workspace - less));
    [value, tapes, workspace] = [
      value - less,
      tapes - fewer,
      workspace + less + fewer,
    ];
    const [first, recomputed] = again ? [0, tapes] : [tapes, 0];
    return { kept, tapes: first, recomputed, value, gradients, workspace };
  });
}

export function describe(state) {
  const { stages, count, unit } = chosen(state);
  const layers = stages.length;
  const sizes = sizesOf(layers, count, state.split);
  const plain = atPeak(simulate(stages, []), unit);
  const ours = atPeak(simulate(stages, sizes), unit);
  const curve = curveOf(stages, state.split, unit).map((peak) => peak / unit);
  const least = Math.min(...curve);
  const most = Math.max(layers - 1, 1); // as many can be checkpoints
  const outputs = stages.slice(0, most).map((stage) => stage[OUTPUT]);
  const tapes = plain.moments[layers - 1].parts[2];
  return {
    layers,
    segments: count,
    sizes,
    rest: layers - sum(sizes),
    peak: ours.peak,
    phase: phaseOf(ours.moment),
    parts: ours.parts,
    plain_peak: plain.peak,
    plain_parts: plain.parts,
    extra_runs: ours.moments.filter(({ extra }) => extra).length,
    curve,
    best: [...curve.keys()].filter((k) => curve[k] === least),
    best_peak: least,
    root: sum(outputs)
      ? Math.sqrt((tapes * outputs.length) / sum(outputs))
      : null,
    measured: state.measured[count] ?? null,
  };
}

function atPeak(moments, unit) {
  const peak = peakOf(moments);
  const place = moments.findIndex((moment) => live(moment) === peak);
  const parts = shownOf(moments)[place];
  for (const part of Object.keys(parts)) parts[part] /= unit;
  return { moments, moment: moments[place], peak: peak / unit, parts };
}

const plural = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

const percent = (part, whole) =>
  `${whole ? Math.floor((100 * part) / whole + 0.5) : 100} %`;

/* A size in words. */
function sizeText({ chain }, value) {
  if (chain) return formatBytes(value);
  const number = formatNumber(value);
  return `${number} unit${number === "1" ? "" : "s"}`;
}

/* "3 × 6 + 1 × 5" */
function sizesText({ sizes, rest }) {
  const many = new Map();
  sizes.forEach((size) => many.set(size, (many.get(size) ?? 0) + 1));
  const parts = [...many].map(([size, count]) => `${count} × ${size}`);
  if (rest) parts.push(`${rest} not checkpointed`);
  return parts.join(" + ");
}

/* "3 to 5, 7, 8" */
function ranges(numbers) {
  const starts = numbers.filter((n) => !numbers.includes(n - 1));
  const ends = numbers.filter((n) => !numbers.includes(n + 1));
  return starts
    .map((n, i) => {
      if (ends[i] === n) return `${n}`;
      return `${n}${ends[i] === n + 1 ? "," : " to"} ${ends[i]}`;
    })
    .join(", ");
}

/** The key numbers in words; Python's Segments.sentence() says the same. */
export function sentence(state) {
  const n = describe(state);
  const thing = state.chain ? "stage" : "layer";
  const size = (value) => sizeText(state, value);
  let place = "without checkpointing";
  let peak = `the peak is ${size(n.peak)}, in the ${PHASES[n.phase][0]}`;
  if (n.segments) {
    place = `in ${plural(n.segments, "segment")} (${sizesText(n)})`;
    peak +=
      `: ${percent(n.peak, n.plain_peak)} of the ${size(n.plain_peak)} ` +
      "without checkpointing";
  }
  const [extra, share] = [n.extra_runs, percent(n.extra_runs, n.layers)];
  const again = extra
    ? `${extra} ${thing}${extra > 1 ? "s run" : " runs"} again, ${share} of ` +
      "a forward pass"
    : `No ${thing} runs again`;
  const best = n.best.includes(n.segments)
    ? "No number of segments has a lower peak"
    : `The least peak is ${size(n.best_peak)}, with k = ${ranges(n.best)}`;
  const measured =
    n.measured === null ? "" : ` Measured here: ${size(n.measured)}.`;
  return (
    `${plural(n.layers, thing)} ${place}: ${peak}. ${again}. ${best}.` +
    measured
  );
}

// ---- geometry ------------------------------------------------------------

/** Geometry of both pictures, in pixels, for a given width. */
export function layout(state, width) {
  const n = describe(state);
  const { stages, unit } = chosen(state);
  const measured = Object.entries(state.measured)
    .map(([k, peak]) => ({ k: Number(k), peak }))
    .filter(({ k }) => k <= n.layers);
  const plot = { left: 34, right: width - 84, top: 22, bottom: 232 };
  const top =
    1.04 * Math.max(1, ...n.curve, ...measured.map(({ peak }) => peak));
  const perSize = (plot.bottom - plot.top) / top;
  const y = (size) => plot.bottom - size * perSize;
  const ticks = byteTicks(top);
  return {
    width,
    plot,
    perSize,
    passes: passesLayout(simulate(stages, n.sizes), n, plot, unit, y),
    curve: curveLayout(n, measured, plot, y),
    unit: state.chain ? ticks.unit : "units",
    ticks: ticks.marks.map(({ value, label }) => ({ label, y: y(value) })),
  };
}

function passesLayout(moments, n, plot, unit, y) {
  const wide = (plot.right - plot.left) / moments.length;
  const edges = [...moments, 0].map((_, i) => plot.left + i * wide);
  const shown = shownOf(moments);
  const floor = shown.map(() => 0);
  const bands = Object.keys(SHOWN)
    .filter((part) => shown.some((now) => now[part]))
    .map((part) => {
      const lower = floor.map(y);
      shown.forEach((now, i) => (floor[i] += now[part] / unit));
      return { part, lower, upper: floor.map(y) };
    });
  const phases = [];
  moments.forEach((moment, i) => {
    const phase = phaseOf(moment);
    if (phase !== phases.at(-1)?.phase) phases.push({ phase, x: edges[i] });
    phases.at(-1).width = edges[i + 1] - phases.at(-1).x;
  });
  const place = moments.findIndex((m) => live(m) / unit === n.peak);
  return {
    edges,
    bands,
    phases,
    peak: { x: (edges[place] + edges[place + 1]) / 2, y: y(n.peak) },
    plain: { x: plot.left, y: y(n.plain_peak) },
  };
}

function curveLayout(n, measured, plot, y) {
  const x = (k) => plot.left + ((plot.right - plot.left) * k) / n.layers;
  const points = n.curve.map((peak, k) => ({ x: x(k), y: y(peak) }));
  const room = Math.max(2, Math.floor((plot.right - plot.left) / 36));
  const marks = byteTicks(n.layers, room).marks;
  return {
    points,
    now: points[n.segments],
    best: n.best.map((k) => points[k]),
    size: Math.min(Math.max(points[1].x - points[0].x, 2.5), 5), // of a mark
    measured: measured.map(({ k, peak }) => ({ x: x(k), y: y(peak) })),
    root: n.root === null || n.root > n.layers ? null : { x: x(n.root) },
    ticks: marks
      .filter(({ value }) => Number.isInteger(value))
      .map(({ value, label }) => ({ label, x: x(value) })),
  };
}

/** The number of segments at a place in the curve's picture. */
export function countAt({ plot, curve }, x) {
  const most = curve.points.length - 1;
  const share = (x - plot.left) / (plot.right - plot.left);
  return Math.round(Math.min(Math.max(share, 0), 1) * most);
}

// ---- drawing -------------------------------------------------------------

const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, ...attributes }, content);

const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

const dot = ({ x, y }, name, r) =>
  svg("circle", { cx: x, cy: y, r, class: name });

const patterns = (id) =>
  svg(
    "defs",
    {},
    hatching(`${id}-kept`, 7, "M0 3.5H7", -45),
    hatching(`${id}-recomputed`, 7, "M0 3.5H7M3.5 0V7", 45),
    hatching(`${id}-value`, 6, "M3 0V6"),
    hatching(`${id}-gradients`, 6, "M0 3H6", 45),
    hatching(`${id}-workspace`, 5, "M1 2.5H2.5"),
  );

/* A shape in a part's colour, and again in its pattern. */
const filled = (id, part, tag, shape) => [
  svg(tag, { ...shape, class: `mb-part-${part}` }),
  svg(tag, { ...shape, fill: `url(#${id}-${part})` }),
];

/* The vertical axis, which both pictures share. */
function* frame({ plot, ticks, unit }) {
  for (const { y, label } of ticks) {
    yield line(plot.left, y, plot.right, y, "mb-grid");
    yield text(plot.left - 6, y + 4, label, { "text-anchor": "end" });
  }
  yield text(plot.left - 6, 11, unit, { "text-anchor": "middle" });
}

const axis = ({ left, right, bottom }) =>
  line(left, bottom, right, bottom, "mb-axis");

/* Heights by name, beside the picture: [where, name, value]. */
function names(plot, marks) {
  const heights = marks.map(([{ y }]) => y);
  const places = spread(heights, 33, plot.top, plot.bottom - 16);
  const x = plot.right;
  return marks.flatMap(([at, name, value], i) => [
    line(at.x, at.y, x, at.y, "mb-leader"),
    line(x, at.y, x + 9, places[i] + 4, "mb-leader"),
    text(x + 12, places[i], name),
    text(x + 12, places[i] + 14, value, { class: "mb-value" }),
  ]);
}

function drawPasses(root, id, plan, n, size) {
  const { plot, passes, width } = plan;
  const { edges, bands, phases, peak, plain } = passes;
  root.setAttribute("viewBox", `0 0 ${width} 264`);
  const parts = [patterns(id), ...frame(plan)];
  for (const { part, lower, upper } of bands) {
    parts.push(...filled(id, part, "path", { d: band(edges, lower, upper) }));
  }
  parts.push(axis(plot));
  for (const { phase, x, width: wide } of phases) {
    const box = {
      x: x + (wide > 3 ? 0.5 : 0),
      y: plot.bottom + 5,
      width: wide > 3 ? wide - 1 : wide,
      height: 7,
    };
    const label = PHASES[phase].find(
      (word) => LETTER * word.length + 4 < wide,
    );
    const middle = { "text-anchor": "middle" };
    if (phase === "recomputation") {
      parts.push(...filled(id, "recomputed", "rect", box));
    } else {
      parts.push(svg("rect", { ...box, class: `mb-phase mb-phase-${phase}` }));
    }
    if (label) parts.push(text(x + wide / 2, plot.bottom + 26, label, middle));
  }
  const marks = [[peak, "peak", size(n.peak)]];
  if (n.segments) marks.push([plain, "with k = 0", size(n.plain_peak)]);
  parts.push(...names(plot, marks), dot(peak, "mb-peak", 4.5));
  root.replaceChildren(...parts);
}

function drawCurve(root, plan, n, state) {
  const { plot, curve, width } = plan;
  const { points, now, best, measured, ticks, size: r } = curve;
  const size = (value) => shortText(state, value);
  root.setAttribute("viewBox", `0 0 ${width} 274`);
  const parts = [...frame(plan), axis(plot)];
  for (const { x, label } of ticks) {
    parts.push(text(x, plot.bottom + 17, label, { "text-anchor": "middle" }));
  }
  parts.push(text(plot.right + 18, plot.bottom + 17, "segments"));
  if (n.root !== null) {
    const plain = !state.chain && state.checkpoint === 1;
    const label = `${plain ? "√L" : "√(L·a/c)"} = ${formatNumber(n.root)}`;
    const y = plot.bottom + 35;
    if (curve.root) {
      const { x } = curve.root;
      const place = Math.min(Math.max(x, 58), width - 58);
      const look = { "text-anchor": "middle", class: "mb-value" };
      parts.push(line(x, plot.top, x, plot.bottom + 5, "mb-mark"));
      parts.push(text(place, y, label, look));
    } else {
      const look = { "text-anchor": "end", class: "mb-value" };
      parts.push(text(plot.right, y, `${label} →`, look));
    }
  }
  const path = points.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`);
  parts.push(
    line(now.x, plot.top - 8, now.x, plot.bottom, "mb-cursor"),
    svg("polyline", { points: path.join(" "), class: "mb-curve" }),
    ...names(plot, [
      [now, `k = ${n.segments}`, size(n.peak)],
      ...(n.best.includes(n.segments)
        ? []
        : [[best.at(-1), "least", size(n.best_peak)]]),
    ]),
    ...best.map(({ x, y }) =>
      svg("path", {
        d: `M${x} ${y - r}l${r} ${r}l${-r} ${r}l${-r} ${-r}Z`,
        class: "mb-best",
      }),
    ),
    ...measured.map((point) => dot(point, "mb-measured", 4)),
    dot(now, "mb-now", 8),
  );
  root.replaceChildren(...parts);
}

const shortText = ({ chain }, value) =>
  chain ? formatBytes(value) : formatNumber(value);

// ---- the widget ----------------------------------------------------------

const number = (key, value, shown) =>
  html("span", { "data-number": key, "data-value": value }, shown ?? value);

const swatch = (id, part) =>
  svg(
    "svg",
    { viewBox: "0 0 14 14", class: "mb-swatch", "aria-hidden": "true" },
    ...filled(id, part, "rect", { width: 14, height: 14 }),
  );

function table(id, n, size, unit) {
  const cell = (key, value) =>
    html("td", {}, number(key, value, value ? size(value) : "–"));
  const row = (attributes, label, ...cells) =>
    html(
      "tr",
      attributes,
      html("th", { scope: "row" }, ...label),
      ...cells,
    );
  const column = (label) => html("th", { scope: "col" }, label);
  const head = [unit, `k = ${n.segments}`, "k = 0"].map(column);
  const rows = Object.entries(SHOWN)
    .reverse()
    .map(([part, label]) =>
      row(
        {},
        [swatch(id, part), label],
        cell(`parts.${part}`, n.parts[part]),
        cell(`plain_parts.${part}`, n.plain_parts[part]),
      ),
    );
  const peaks = [cell("peak", n.peak), cell("plain_peak", n.plain_peak)];
  return [
    html("thead", {}, html("tr", {}, ...head)),
    html("tbody", {}, ...rows, row({ class: "mb-sum" }, ["peak"], ...peaks)),
  ];
}

function numberList(n, size, thing) {
  const entry = (label, key, shown, value = n[key]) =>
    html(
      "div",
      {},
      html("dt", {}, label),
      html("dd", {}, number(key, JSON.stringify(value), shown)),
    );
  const again = `${n.extra_runs} (${percent(n.extra_runs, n.layers)} of L)`;
  const entries = [
    entry("segment sizes", "sizes", sizesText(n)),
    entry(`extra ${thing} runs`, "extra_runs", again),
    entry("best k", "best", ranges(n.best)),
    entry("least peak", "best_peak", size(n.best_peak)),
  ];
  if (n.measured !== null) {
    entries.push(entry("measured peak", "measured", size(n.measured)));
  }
  return entries;
}

function render({ model, el }) {
  const keys = [
    "chain",
    "layers",
    "segments",
    "checkpoint",
    "split",
    "measured",
    "label",
  ];
  // What was measured belongs to the setting that it came with.
  let came = {};
  const read = () => {
    const state = Object.fromEntries(keys.map((k) => [k, model.get(k)]));
    const { chain, layers, checkpoint, split, measured } = state;
    const setting = JSON.stringify([chain, layers, checkpoint, split]);
    if (measured !== came.measured) came = { measured, setting };
    return came.setting === setting ? state : { ...state, measured: {} };
  };
  const go = (segments) => {
    if (segments !== model.get("segments")) save(model, { segments });
  };

  const layers = slider({
    label: "Layers L",
    key: "layers",
    unit: " layers",
    onInput: (value) =>
      save(model, {
        layers: value,
        segments: Math.min(model.get("segments"), value),
      }),
  });
  const segments = slider({
    label: "Segments k",
    key: "segments",
    min: 0,
    onInput: go,
  });
  const checkpoint = slider({
    label: "Cost c of a checkpoint (a layer’s tape is 1)",
    key: "checkpoint",
    onInput: (value) => save(model, { checkpoint: value / 20 }),
  });
  const split = radios({
    label: "Split",
    key: "split",
    onChange: (value) => {
      const name = Object.keys(SPLITS).find((key) => SPLITS[key] === value);
      save(model, { split: name });
    },
  });

  const id = makeId();
  const look = { role: "img", class: "mb-picture" };
  const passes = svg("svg", look);
  const curve = svg("svg", { ...look, class: "mb-picture mb-choose" });
  const said = html("p", { "aria-live": "polite", class: "mb-live" });
  const parts = html("table", { class: "mb-table" });
  const list = html("dl", { class: "mb-numbers" });
  const title = html("span");
  const notes = [html("span"), html("span")];
  let plan;
  let speaking;

  el.classList.add("mb-root", "mb-segments");
  el.append(
    html(
      "div",
      { class: "mb-controls" },
      layers.root,
      segments.root,
      checkpoint.root,
      split.root,
    ),
    said,
    figure(title, notes[0], passes),
    parts,
    figure("Peak for each number of segments", notes[1], curve),
    list,
  );

  const seek = (event) => {
    const box = curve.getBoundingClientRect();
    go(countAt(plan, ((event.clientX - box.left) / box.width) * plan.width));
  };
  curve.addEventListener("pointerdown", (event) => {
    curve.setPointerCapture(event.pointerId);
    seek(event);
  });
  curve.addEventListener("pointermove", (event) => {
    if (event.buttons) seek(event);
  });
  curve.addEventListener("pointerup", () => segments.focus());

  const end = redraw(model, passes, (width) => {
    const state = read();
    const n = describe(state);
    const size = (value) => shortText(state, value);
    plan = layout(state, width);
    el.classList.toggle("mb-narrow", width < 480);
    layers.root.hidden = checkpoint.root.hidden = Boolean(state.chain);
    layers.update({ value: n.layers, max: MOST_LAYERS });
    segments.update({
      value: n.segments,
      max: n.layers,
      spoken: n.segments
        ? `${plural(n.segments, "segment")}: peak ${sizeText(state, n.peak)}`
        : `no checkpointing: peak ${sizeText(state, n.peak)}`,
    });
    const share = formatNumber(state.checkpoint);
    checkpoint.update({
      value: Math.round(20 * state.checkpoint),
      max: 20,
      text: share,
      spoken: share,
    });
    const options = Object.values(SPLITS);
    split.update({ value: SPLITS[state.split], options });
    title.textContent = "Memory during one step";
    if (state.label) title.append(": ", state.label);
    notes[0].textContent =
      (state.chain ? NOTES.bytes : NOTES.units) + NOTES.passes;
    notes[1].textContent =
      NOTES.curve + (Object.keys(state.measured).length ? NOTES.points : "");
    passes.setAttribute("aria-label", sentence(state));
    const best = `least at k = ${ranges(n.best)}`;
    curve.setAttribute(
      "aria-label",
      `Peak for 0 to ${n.layers} segments: ${best}, ` +
        sizeText(state, n.best_peak),
    );
    drawPasses(passes, id, plan, n, size);
    drawCurve(curve, plan, n, state);
    const unit = `${state.chain ? "bytes" : "units"} at the peak`;
    parts.replaceChildren(...table(id, n, size, unit));
    const thing = state.chain ? "stage" : "layer";
    list.replaceChildren(...numberList(n, size, thing));
    clearTimeout(speaking);
    const speak = () => (said.textContent = sentence(state));
    if (said.textContent) speaking = setTimeout(speak, 150);
    else speak();
  });
  return () => {
    end();
    clearTimeout(speaking);
    el.replaceChildren();
  };
}

export default { render };
