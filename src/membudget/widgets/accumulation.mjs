import {
  LETTER,
  axes,
  budgetLine,
  checkBox,
  dot,
  drag,
  filled,
  formatBytes,
  formatNumber,
  grouped,
  heights,
  html,
  legend,
  line,
  names,
  numberField,
  numberList,
  patterns,
  plural,
  radios,
  slider,
  stacked,
  svg,
  table,
  text,
  widget,
} from "./base.mjs";

/* A batch that is cut into micro-batches: its memory, its weights, its cost.

   describe(state): the numbers; a Plan of Python gives the same.
   layout(state, width): where everything stands in the picture. */

const PARTS = {
  optimizer: "optimizer states",
  parameters: "parameters",
  gradients: "gradients",
  activations: "activations and inputs",
  temporaries: "temporaries",
};

/* The weight of a sample, from its micro-batch's size, the number of
   micro-batches and the global batch. */
const WEIGHTS = {
  window: (size, count, all) => 1 / all,
  "mean of means": (size, count) => 1 / (count * size),
  "no division": (size) => 1 / size,
};

const FORWARD = 1 / 3; // of a pass; backward takes about twice as long
const NARROWEST = 3; // pixels; narrower micro-batches are not all drawn
const MOST_STEPS = 32; // of the slider
const LARGEST_BATCH = 65536;

// ---- numbers -------------------------------------------------------------

export function describe(state) {
  const { micro_batch: micro, samples, budget, footprint } = state;
  const all = state.global_batch;
  const count = Math.ceil(all / micro);
  const size = Math.min(micro, all);
  const last = all - (count - 1) * size;
  const weightOf = WEIGHTS[state.normalisation];
  const weight = weightOf(size, count, all);
  const lastWeight = weightOf(last, count, all);
  const memory = peakOf(footprint, count, size, last);
  const wholeMemory = highest(footprint, footprint.alone, all);
  const windows = Math.ceil(samples / all);
  return {
    micro_batches: count,
    micro_batch: size,
    last_micro_batch: last,
    global_batch: all,
    passes: 2 * count,
    weight,
    last_weight: lastWeight,
    weight_sum: (all - last) * weight + last * lastWeight,
    weight_ratio: Math.max(weight, lastWeight) / Math.min(weight, lastWeight),
    peak: bytesOf(memory),
    whole_peak: bytesOf(wholeMemory),
    over: bytesOf(memory) - budget,
    memory,
    whole_memory: wholeMemory,
    steps_per_epoch: windows,
    last_window: samples - (windows - 1) * all,
  };
}

/* What is alive at the peak: of the first micro-batch, or of the largest after
   it, which adds to the gradients that are there. */
function peakOf(footprint, count, size, last) {
  const first = highest(footprint, footprint.alone, size);
  if (count === 1) return first;
  const after = count > 2 ? size : last;
  const later = highest(footprint, footprint.later, after);
  return bytesOf(later) >= bytesOf(first) ? later : first;
}

const bytesOf = (memory) => Object.values(memory).reduce((a, b) => a + b);

/* Who holds the bytes at the moment of a peak line, as Python sends it. */
const held = (footprint, [slope, gradients, temporaries], size) => ({
  optimizer: footprint.optimizer,
  parameters: footprint.parameters,
  gradients,
  activations: slope * size,
  temporaries,
});

/* The highest of these lines. */
const highest = (footprint, rows, size) =>
  rows
    .map((row) => held(footprint, row, size))
    .reduce((a, b) => (bytesOf(b) > bytesOf(a) ? b : a));

/** The times of a sample that were measured at this size, or at those around
    it, in ascending order; none where there is no such size. */
export function timesOf({ record }, size) {
  const rows = record?.times ?? [];
  const below = rows.findLast(([other]) => other <= size);
  const above = rows.find(([other]) => other >= size);
  if (!below || !above) return [];
  return [below[1], above[1]].sort((a, b) => a - b);
}

// ---- words ---------------------------------------------------------------

/* "11.5–12.3 µs a sample", or "" where nothing was measured */
function timeText(state, size) {
  const found = new Set(timesOf(state, size).map((time) => time.toFixed(1)));
  if (!found.size) return "";
  return `${[...found].join("–")} ${state.record.unit} a sample`;
}

/* "3 micro-batches (2 × 500 + 24)" */
function cutText({ micro_batches: count, micro_batch, last_micro_batch }) {
  const things = `${grouped(count)} micro-batch${count === 1 ? "" : "es"}`;
  const [size, last] = [grouped(micro_batch), grouped(last_micro_batch)];
  if (size === last) return `${things} of ${size}`;
  return `${things} (${grouped(count - 1)} × ${size} + ${last})`;
}

const verdict = ({ over }) =>
  over > 0
    ? `✗ ${formatBytes(over)} too much`
    : `✓ fits, ${formatBytes(-over)} free`;

const isOne = (factor) => Math.abs(factor - 1) < 1e-9;

/* A weight in units of 1/N: "0.68 × 1/N", and "1.004 × 1/N" where two
   decimals would hide that it is not 1/N. */
function factorText(factor) {
  if (isOne(factor)) return "1/N";
  if (factor >= 100) return `${grouped(Math.round(factor))} × 1/N`;
  const digits = [2, 3, 4, 5, 6].find((d) => Number(factor.toFixed(d)) !== 1);
  return `${Number(factor.toFixed(digits ?? 6))} × 1/N`;
}

function weightText(n) {
  const [others, last] = [n.weight, n.last_weight].map((weight) =>
    factorText(weight * n.global_batch),
  );
  const uneven = n.weight_ratio > 1 + 1e-9;
  const [who, rest] = uneven
    ? ["a sample of the last micro-batch", `, any other ${others}`]
    : ["every sample", ""];
  const counts = `${who} counts ${last}${rest}`;
  if (!isOne(n.weight_sum)) {
    const sum = formatNumber(n.weight_sum);
    return `The weights sum to ${sum}, not to 1: ${counts}`;
  }
  const as = uneven ? ": not the gradient of the" : ", as in the whole";
  return `${counts[0].toUpperCase()}${counts.slice(1)}${as} batch`;
}

function costText(state, n) {
  if (!n.memory.activations) {
    return (
      "The peak is the optimizer step’s: more cuts save nothing and cost " +
      `passes (now ${grouped(n.passes)})`
    );
  }
  const time = timeText(state, n.micro_batch);
  const place = state.record?.gpu ? "a GPU" : "a CPU";
  const measured = time && `, at ${time} on ${place}`;
  const count = grouped(n.micro_batches);
  const often = n.micro_batches === 1 ? "once" : `${count} times`;
  return `A step runs forward and backward ${often}${measured}`;
}

/** The key numbers in words. */
export function sentence(state) {
  const n = describe(state);
  const than = n.over > 0 ? "above" : "below";
  const by = formatBytes(Math.abs(n.over));
  const peak = `the peak is ${formatBytes(n.peak)}`;
  const room = `${by} ${than} the budget`;
  const first = `${cutText(n)}: ${peak}, ${room}`;
  return `${first}. ${weightText(n)}. ${costText(state, n)}.`;
}

// ---- geometry ------------------------------------------------------------

/** Geometry of the picture, in pixels, for a given width: the memory; under
    it the strip of samples and their weights; beside it, or at the bottom,
    what it costs. */
export function layout(state, width, before = null) {
  const n = describe(state);
  const wide = width >= 600;
  const right = width - (wide ? 290 : 92);
  const plot = { left: 36, right, top: 64, bottom: 212 };
  const end = right - (wide ? 60 : 34); // where the last backward pass ends
  const panel = wide
    ? { left: width - 176, right: width - 18, top: 18, tall: 150 }
    : { left: 0, right: width - 18, top: 374, tall: 64 };
  const axis = heights(plot, 2 * state.budget); // it does not move
  const cut = (of) => `${of.micro_batch}/${of.global_batch}`;
  const differs = before && cut(describe(before)) !== cut(n);
  const samples = (count) =>
    plot.left + (count * (end - plot.left)) / n.global_batch;
  return {
    width,
    height: wide ? 352 : 582,
    ...{ plot, axis, end, samples },
    memory: memoryLayout(state, n, plot, end, axis.y),
    before: differs && tops(cornersOf(before, plot, end).corners, axis.y),
    strip: { y: 220, tall: 18, handles: handlesOf(n, samples) },
    weights: weightLayout(n, samples),
    cost: { ...panel, ...(state.record && costLayout(state.record, n, panel)) },
  };
}

/* The moments of one forward and backward pass, in order: { at, memory }
   with `at` from 0 to 1. Each peak line is a moment whose bytes are known;
   activations fall as backward goes on, which says when it is. */
function pass(footprint, rows, size, gradientsBefore) {
  const busy = rows.filter(([slope]) => slope > 0);
  const steepest = Math.max(...busy.map(([slope]) => slope));
  const moments = busy
    .sort((a, b) => b[0] - a[0])
    .map((row) => ({
      at: FORWARD + (1 - FORWARD) * (1 - row[0] / steepest),
      memory: held(footprint, row, size),
    }));
  const idle = (gradients) => held(footprint, [0, gradients, 0], 0);
  return [
    { at: 0, memory: idle(gradientsBefore) },
    ...moments,
    { at: 1, memory: idle(footprint.gradients) },
  ];
}

/* The optimizer step is the moment that no batch size changes; after it the
   gradients are freed. */
function stepCorners(footprint, rows, begin, right) {
  const calm = [0, footprint.gradients, 0];
  const flat = rows.filter(([slope]) => slope === 0);
  const during = highest(footprint, [calm, ...flat], 0);
  const before = { ...during, temporaries: 0 };
  const after = { ...before, gradients: 0 };
  const end = begin + (right - begin) * 0.6;
  return [
    { x: begin, memory: before },
    { x: begin, memory: during },
    { x: end, memory: during },
    { x: end, memory: after },
    { x: right, memory: after },
  ];
}

/* The corners of the memory over one window, and its micro-batches, of which
   the first are drawn where they are too many. */
function cornersOf(state, plot, end) {
  const { footprint } = state;
  const n = describe(state);
  const [count, all] = [n.micro_batches, n.global_batch];
  const shown = Math.min(count, Math.floor((end - plot.left) / NARROWEST));
  const every = shown < count ? all / shown : n.micro_batch;
  const place = (samples) => plot.left + (samples * (end - plot.left)) / all;
  const blocks = Array.from({ length: shown }, (_, i) => {
    const size = i === count - 1 ? n.last_micro_batch : n.micro_batch;
    const x = place(i * every);
    return { x, width: place(Math.min((i + 1) * every, all)) - x, size };
  });
  const passes = blocks.flatMap(({ x, width, size }, i) =>
    pass(
      footprint,
      i ? footprint.later : footprint.alone,
      size,
      i ? footprint.gradients : 0,
    ).map(({ at, memory }) => ({ x: x + at * width, memory })),
  );
  const rows = count === 1 ? footprint.alone : footprint.later;
  const step = stepCorners(footprint, rows, end, plot.right);
  return { blocks, corners: [...passes, ...step] };
}

const tops = (corners, y) =>
  corners.map(({ x, memory }) => ({ x, y: y(bytesOf(memory)) }));

function memoryLayout(state, n, plot, end, y) {
  const { blocks, corners } = cornersOf(state, plot, end);
  const all = n.global_batch;
  const once = { locked: true, global_batch: all, micro_batch: all };
  const whole = cornersOf({ ...state, ...once }, plot, end).corners;
  const mark = (list) => {
    const top = tops(list, y).reduce((a, b) => (b.y < a.y ? b : a));
    return { x: top.x, y: Math.max(top.y, plot.top) };
  };
  return {
    blocks,
    xs: corners.map(({ x }) => x),
    bands: stacked(corners.map(({ memory }) => memory), Object.keys(PARTS), y),
    outline: tops(whole, y),
    peak: mark(corners),
    whole: mark(whole),
    budget: y(state.budget),
  };
}

/* The cuts that can be grabbed: so many that their marks have room. */
function handlesOf({ micro_batches: count, micro_batch: size }, samples) {
  const every = Math.ceil(16 / (samples(size) - samples(0)));
  const handles = [];
  for (let i = every; i < Math.max(count, 2); i += every) {
    handles.push({ index: i, x: samples(i * size) });
  }
  return handles;
}

/** The size of a micro-batch after its cut at `index` went to `x`. */
export function moved({ plot, end, samples }, all, index, x) {
  const place = ((x - plot.left) / (end - plot.left)) * all;
  return Math.min(Math.max(Math.round(place / index), 1), all);
}

function weightLayout(n, samples) {
  const { micro_batches: count, global_batch: all, last_micro_batch: last } = n;
  const [top, bottom] = [296, 344];
  const unit = (bottom - top) / 3; // an axis that does not move
  const bar = (start, size, weight, many) => {
    const factor = weight * all;
    const height = Math.min(factor, 3) * unit;
    const x = samples(start);
    const width = samples(start + size) - x;
    return { box: { x, y: bottom - height, width, height }, factor, many };
  };
  const uneven = last !== n.micro_batch;
  const even = uneven ? all - last : all;
  const bars = [bar(0, even, n.weight, uneven ? count - 1 : count)];
  if (uneven) bars.push(bar(even, last, n.last_weight, 1));
  return { top, bottom, bars, one: bottom - unit };
}

function costLayout({ times, unit }, n, { left, right, top, tall }) {
  const [above, below] = [top + 72, top + 72 + tall];
  const plot = { left: left + 36, right, top: above, bottom: below };
  const most = Math.max(...times.map(([, time]) => time));
  const axis = heights(plot, 1.1 * most, unit);
  const [least, largest] = [times[0][0], times.at(-1)[0]];
  const x = (size) => {
    const share = Math.log(size) / Math.log(Math.max(largest, 2));
    return plot.left + (plot.right - plot.left) * Math.min(share, 1);
  };
  const marks = least > 4 ? [1, least, largest] : [1, largest];
  return {
    ...{ plot, axis, largest },
    points: times.map(([size, time]) => ({ x: x(size), y: axis.y(time) })),
    marks: marks.map((size) => ({ x: x(size), label: grouped(size) })),
    now: x(n.micro_batch),
  };
}

/** The nearest power of two at a place of the cost's axis. */
export function sizeAt({ cost: { plot, largest } }, x) {
  const share = (x - plot.left) / (plot.right - plot.left);
  const most = Math.log2(largest);
  return 2 ** Math.round(most * Math.min(Math.max(share, 0), 1));
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };
const BOLD = { class: "mb-value" };

const points = (list) =>
  list.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");

function* drawMemory(id, { plot, axis, end, memory, before }, n, state) {
  const over = n.over > 0;
  const look = over ? "mb-verdict mb-broken" : "mb-verdict";
  yield text(0, 18, verdict(n), { class: `mb-value ${look}` });
  yield text(0, 37, cutText(n));
  yield* axes(plot, axis);
  const { left: x, top: y, right, bottom } = plot;
  yield text(x + 12, y - 11, "over time →");
  const box = { x, y, width: right - x, height: bottom - y };
  yield svg("clipPath", { id: `${id}-clip` }, svg("rect", box));
  const inside = svg("g", { "clip-path": `url(#${id}-clip)` });
  for (const { key, lower, upper } of memory.bands) {
    const up = upper.map((y, i) => ({ x: memory.xs[i], y }));
    const down = lower.map((y, i) => ({ x: memory.xs[i], y })).reverse();
    const shape = { points: points([...up, ...down]) };
    inside.append(...filled(id, key, "polygon", shape));
  }
  const lines = { "mb-once": memory.outline, "mb-ghost": before };
  for (const [name, list] of Object.entries(lines)) {
    if (!list) continue;
    inside.append(svg("polyline", { points: points(list), class: name }));
  }
  yield inside;
  yield* budgetLine(id, plot, memory.budget, over);
  const beyond = (bytes) => (bytes > 2 * state.budget ? "↑ " : "");
  const size = (bytes) => beyond(bytes) + formatBytes(bytes);
  yield* names(plot, [
    ...(n.micro_batches > 1
      ? [[memory.whole, "whole batch", size(n.whole_peak)]]
      : []),
    [{ x: right, y: memory.budget }, "budget", formatBytes(state.budget)],
    [memory.peak, "peak", size(n.peak)],
  ]);
  yield dot(memory.peak, "mb-peak");
  yield text((end + right) / 2, bottom + 22, "step", MIDDLE);
}

function* drawStrip({ plot, end, memory, strip }, n) {
  const { y, tall, handles } = strip;
  const fits = (label, width) => LETTER * label.length + 6 < width;
  for (const [i, { x, width, size }] of memory.blocks.entries()) {
    const look = i % 2 ? "mb-cell mb-odd" : "mb-cell";
    yield svg("rect", { x, y, width, height: tall, class: look });
    const label = grouped(size);
    if (fits(label, width)) yield text(x + width / 2, y + 14, label, MIDDLE);
    if (i && width > 4) yield line(x, y, x, y + tall, "mb-between");
  }
  for (const { x } of handles) {
    const d = `M${x} ${y - 2}V${y + tall + 2}l-7 12h14l-7 -12`;
    yield svg("path", { d, class: "mb-cut" });
  }
  const last = grouped(n.last_micro_batch);
  const { width } = memory.blocks.at(-1);
  if (n.last_micro_batch < n.micro_batch && !fits(last, width)) {
    yield line(end - width / 2, y + tall, end + 9, y + 27, "mb-leader");
    yield text(end + 10, y + 31, last);
  }
  yield text(plot.right + 12, y + 14, `N = ${grouped(n.global_batch)}`);
  yield text(plot.right + 12, y + 31, "drag ▲");
}

function* drawWeights({ plot, end, weights }) {
  const { bars, one, bottom, top } = weights;
  yield text(plot.left, top - 22, "weight of one sample", BOLD);
  const labels = bars.map(
    ({ factor }) => (factor > 3 ? "↑ " : "") + factorText(factor),
  );
  const room = (end - plot.left) / LETTER;
  if (labels.join(" ").length > room) labels[0] = labels[0].replace(" 1/N", "");
  for (const [i, { box, factor, many }] of bars.entries()) {
    const wide = box.width / many;
    yield svg("rect", { ...box, class: "mb-weight" });
    for (let k = 1; k < many && wide > 4; k += 1) {
      const at = box.x + k * wide;
      yield line(at, box.y, at, bottom, "mb-between");
    }
    const look = isOne(factor) ? {} : { class: "mb-value mb-broken" };
    if (i === 0) yield text(box.x, top - 5, labels[i], look);
    else yield text(end, top - 5, labels[i], { ...END, ...look });
  }
  yield line(plot.left, bottom, end, bottom, "mb-axis");
  yield line(plot.left, one, end, one, "mb-one");
  yield text(plot.left - 6, bottom + 4, "0", END);
  yield text(end + 6, one + 4, "1/N");
}

function* drawCost({ cost }, n, state) {
  const { left, top, plot, axis, points: list, marks, now } = cost;
  const passes = `${grouped(n.passes)} passes`;
  yield text(left, top, passes, { class: "mb-value mb-verdict" });
  yield text(left, top + 19, "forward and backward");
  const time = timeText(state, n.micro_batch);
  yield text(left, top + 44, time || "time: not measured", BOLD);
  if (!plot) return;
  yield* axes(plot, axis);
  yield svg("polyline", { points: points(list), class: "mb-once" });
  for (const point of list) yield dot(point, "mb-measured", 3);
  yield line(now, plot.top - 4, now, plot.bottom + 5, "mb-cursor");
  for (const { x, label } of marks) {
    yield text(x, plot.bottom + 16, label, MIDDLE);
  }
  const middle = (plot.left + plot.right) / 2;
  yield text(middle, plot.bottom + 31, "micro-batch", MIDDLE);
  const place = state.record.gpu ? ["a GPU"] : ["a CPU,", "not on a GPU"];
  for (const [i, words] of place.entries()) {
    const before = i ? "" : "measured on ";
    yield text(left, plot.bottom + 52 + 15 * i, before + words);
  }
}

function results(id, state, n) {
  const cell = (key, bytes) => [key, bytes, formatBytes(bytes)];
  const rows = Object.entries(PARTS).map(([part, label]) => ({
    part,
    label,
    cells: ["memory", "whole_memory"].map((of) =>
      cell(`${of}.${part}`, n[of][part]),
    ),
  }));
  const sum = [cell("peak", n.peak), cell("whole_peak", n.whole_peak)];
  const epoch = `optimizer steps in an epoch of ${grouped(state.samples)}`;
  const list = {
    micro_batches: "micro-batches",
    global_batch: "global batch",
    passes: "passes for one optimizer step",
    weight_sum: "sum of the weights",
    weight_ratio: "largest ÷ smallest weight",
    steps_per_epoch: epoch,
    last_window: "samples in its last window",
  };
  const shown = (value) =>
    Number.isInteger(value) ? grouped(value) : formatNumber(value);
  return [
    table(id, ["bytes at the peak", "micro-batches", "whole batch"], [
      ...rows.reverse(),
      { sum: true, label: "peak", cells: sum },
    ]),
    numberList(
      Object.entries(list).map(([key, label]) => [
        ...[label, key, n[key]],
        shown(n[key]),
      ]),
    ),
  ];
}

const NOTE =
  "A hill is the memory of one micro-batch: activations grow in the forward " +
  "pass and are freed in the backward pass; gradients stay until the " +
  "optimizer step. Corners are exact, sides drawn straight. The thin line is " +
  "the whole batch at once, the dotted one your last setting. Drag a " +
  "triangle to cut elsewhere; that locks N. Close cuts share one. Or click " +
  "the times. A bar is the weight of a sample in the gradient. " +
  "Window: the sum of the losses ÷ N. Mean of means: each micro-batch’s sum " +
  "÷ its samples ÷ the steps. No division: without the last one. A " +
  "micro-batch takes two passes, forward and backward. ";

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["locked", "micro_batch", "steps", "global_batch", "normalisation"],
  ...["samples", "budget", "footprint", "record", "label"],
];

function build({ id, get, set }) {
  let asked = 1; // steps, of a locked batch
  let most = 1024; // of the micro-batch
  let plan;
  const go = (changes) => {
    const n = describe({ ...get(), ...changes });
    const { micro_batches: steps, global_batch } = n;
    const micro_batch = n.micro_batch;
    set({ ...changes, micro_batch, steps, global_batch });
  };

  const resize = (micro_batch) => {
    const { locked, steps } = get();
    if (locked) go({ micro_batch });
    else go({ micro_batch, global_batch: steps * micro_batch });
  };

  const steps = slider({
    label: "Accumulation steps",
    key: "steps",
    onInput(value) {
      const { locked, global_batch: all, micro_batch } = get();
      asked = value;
      if (locked) go({ micro_batch: Math.ceil(all / value) });
      else go({ global_batch: value * micro_batch });
    },
  });
  const normalisation = radios({
    label: "Normalisation",
    key: "normalisation",
    onChange: (value) => go({ normalisation: value }),
  });
  const locked = checkBox({
    label: "Lock the global batch",
    key: "locked",
    onChange: (value) => go({ locked: value }),
  });
  const global = numberField({
    label: "Global batch N",
    key: "global_batch",
    max: LARGEST_BATCH,
    onChange: (value) => go({ global_batch: value }),
  });
  const micro = slider({
    label: "Micro-batch",
    key: "micro_batch",
    onInput: resize,
  });

  // In the page's address they stand together: 1024/256, or 1024/256/free.
  for (const part of [steps, locked, global, micro]) part.held = () => "";
  const batch = {
    key: "batch",
    held() {
      const { global_batch, micro_batch, locked } = get();
      return `${global_batch}/${micro_batch}${locked ? "" : "/free"}`;
    },
    enter(text) {
      const [global_batch, micro_batch] = text.split("/").map(Number);
      const fit = (n) => Number.isInteger(n) && n >= 1 && n <= LARGEST_BATCH;
      if (![global_batch, micro_batch].every(fit)) return;
      go({ locked: !text.endsWith("/free"), global_batch, micro_batch });
    },
  };

  const picture = svg("svg", { role: "img", class: "mb-picture" });
  const note = html("p", { class: "mb-note" });
  drag(picture, {
    grab({ x, y }) {
      const { strip, cost: { plot } } = plan;
      const beside = plot && x > plot.left - 10 && y > plot.top - 10;
      if (beside && y < plot.bottom + 20) return { zone: "cost" };
      if (y < strip.y - 8 || y > strip.y + strip.tall + 22) return null;
      const near = ({ x: at }) => Math.abs(at - x);
      const closer = (a, b) => (near(b) < near(a) ? b : a);
      const nearest = strip.handles.reduce(closer);
      return near(nearest) < 24 ? nearest : null;
    },
    move({ x }, { zone, index }) {
      const all = get().global_batch;
      if (zone === "cost") resize(sizeAt(plan, x));
      else go({ locked: true, micro_batch: moved(plan, all, index, x) });
    },
  });

  const draw = (state, width, before) => {
    const n = describe(state);
    plan = layout(state, width, before);
    picture.setAttribute("viewBox", `0 0 ${width} ${plan.height}`);
    picture.replaceChildren(
      patterns(id),
      ...drawMemory(id, plan, n, state),
      ...drawStrip(plan, n),
      ...drawWeights(plan),
      ...drawCost(plan, n, state),
    );
    const said = sentence(state);
    picture.setAttribute("aria-label", said);
    const count = n.micro_batches;
    const stays =
      state.locked && Math.ceil(n.global_batch / asked) === n.micro_batch;
    most = Math.max(most, n.micro_batch);
    steps.update({
      value: Math.min(stays ? asked : count, MOST_STEPS),
      max: MOST_STEPS,
      text: count > MOST_STEPS ? `over ${MOST_STEPS}` : count,
      spoken: `${plural(count, "step")}: peak ${formatBytes(n.peak)}`,
    });
    normalisation.update({
      value: state.normalisation,
      options: Object.keys(WEIGHTS),
    });
    locked.update({ value: state.locked });
    global.update({
      value: n.global_batch,
      disabled: state.locked
        ? ""
        : "follows steps × micro-batch, until it is locked",
    });
    micro.update({
      value: n.micro_batch,
      max: state.locked ? n.global_batch : most,
      spoken: plural(n.micro_batch, "sample"),
    });
    const from = state.record?.provenance;
    note.textContent = NOTE + (from ? `Times: ${from}.` : "");
    return {
      title: "Memory of one optimizer step" +
        (state.label && `: ${state.label}`),
      sentence: said,
      numbers: results(id, state, n),
    };
  };
  return {
    controls: [steps, normalisation],
    picture,
    legend: legend(id, { ...PARTS, over: "above the budget" }),
    more: [locked, global, micro, batch],
    note,
    draw,
  };
}

export default widget({ name: "accumulation", keys, build });
