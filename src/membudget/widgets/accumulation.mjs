import {
  LETTER,
  axes,
  band,
  budgetLine,
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
  plural,
  radios,
  slider,
  stacked,
  svg,
  t,
  table,
  text,
  widget,
} from "./base.mjs";

/* A batch that is cut into micro-batches: its memory, its weights, its cost.

   describe(state): the numbers; a Plan of Python gives the same.
   layout(state, width): where everything stands in the picture. */

const PARTS = {
  optimizer: t`optimizer states`,
  parameters: t`parameters`,
  gradients: t`gradients`,
  activations: t`activations and inputs`,
  temporaries: t`temporaries`,
};

/* The weight of a sample in units of 1/N, from its micro-batch's size, the
   number of micro-batches and the global batch N. */
const WEIGHTS = {
  window: () => 1,
  "mean of means": (size, count, all) => all / (count * size),
  "no division": (size, count, all) => all / size,
};

const BACKWARD = 2 / 3; // of a pass: about twice as long as forward
const NARROWEST = 3; // pixels; narrower micro-batches are not all drawn
const MOST_STEPS = 32; // of the slider
const LARGEST_BATCH = 65536;

// ---- numbers -------------------------------------------------------------

export function describe(state) {
  const { global_batch: all, samples, footprint } = state;
  const count = Math.ceil(all / state.micro_batch);
  const size = Math.min(state.micro_batch, all);
  const last = all - (count - 1) * size;
  const weightOf = WEIGHTS[state.normalisation];
  const weights = [size, last].map((n) => weightOf(n, count, all));
  const held = (rows, n) => rows.map((row) => memoryOf(footprint, row, n));
  const first = held(footprint.alone, size);
  // the largest after the first adds to the gradients that are there
  const after = held(footprint.later, count > 2 ? size : last);
  const memory = highest(count > 1 ? [...after, ...first] : first);
  const whole_memory = highest(held(footprint.alone, all));
  const peak = bytesOf(memory);
  const windows = Math.ceil(samples / all);
  return {
    micro_batches: count,
    micro_batch: size,
    last_micro_batch: last,
    global_batch: all,
    passes: 2 * count,
    weights,
    weight_sum: ((all - last) * weights[0] + last * weights[1]) / all,
    weight_ratio: Math.max(...weights) / Math.min(...weights),
    ...{ memory, peak, over: peak - state.budget },
    ...{ whole_memory, whole_peak: bytesOf(whole_memory) },
    steps_per_epoch: windows,
    last_window: samples - (windows - 1) * all,
  };
}

const bytesOf = (memory) => Object.values(memory).reduce((a, b) => a + b);

/* Who holds the bytes at the moment of a peak line, as Python sends it. */
const memoryOf = (footprint, [slope, gradients, temporaries], size) => ({
  optimizer: footprint.optimizer,
  parameters: footprint.parameters,
  gradients,
  activations: slope * size,
  temporaries,
});

const highest = (memories) =>
  memories.reduce((a, b) => (bytesOf(b) > bytesOf(a) ? b : a));

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
  return t`${[...found].join("–")} ${state.record.unit} a sample`;
}

/* "3 micro-batches (2 × 500 + 24)" */
function cutText({ micro_batches: count, micro_batch, last_micro_batch }) {
  const [size, last] = [grouped(micro_batch), grouped(last_micro_batch)];
  if (count === 1) return t`1 micro-batch of ${size}`;
  if (size === last) return t`${grouped(count)} micro-batches of ${size}`;
  return t(
    "{0} micro-batches ({1} × {2} + {3})",
    ...[count, count - 1].map(grouped),
    ...[size, last],
  );
}

const isOne = (factor) => Math.abs(factor - 1) < 1e-9;

/* A weight: "0.68 × 1/N", and "1.004 × 1/N" where two decimals would hide
   that it is not 1/N. */
function factorText(factor) {
  if (isOne(factor)) return "1/N";
  if (factor >= 100) return `${grouped(Math.round(factor))} × 1/N`;
  const digits = [2, 3, 4, 5].find((d) => Number(factor.toFixed(d)) !== 1);
  return `${Number(factor.toFixed(digits ?? 6))} × 1/N`;
}

function weightText({ weights, weight_ratio }) {
  const [others, last] = weights.map(factorText);
  if (!isOne(weight_ratio)) {
    return t(
      "A sample of the last micro-batch counts {0}, any other {1}: not the " +
        "gradient of the batch.",
      ...[last, others],
    );
  }
  return weights.every(isOne)
    ? t`Every sample counts ${last}, as in the whole batch.`
    : t`Every sample counts ${last}: not the gradient of the batch.`;
}

function costText(state, n) {
  if (!n.memory.activations) {
    return t`The peak is the optimizer step’s: more cuts only cost passes.`;
  }
  const time = timeText(state, n.micro_batch);
  const count = grouped(n.micro_batches);
  const runs =
    n.micro_batches === 1
      ? t`A step runs forward and backward once`
      : t`A step runs forward and backward ${count} times`;
  if (!time) return t`${runs}.`;
  return state.record.gpu
    ? t`${runs}, at ${time} on a GPU.`
    : t`${runs}, at ${time} on a CPU.`;
}

/** The key numbers in words. */
export function sentence(state) {
  const n = describe(state);
  const [cut, peak] = [cutText(n), formatBytes(n.peak)];
  const room = formatBytes(Math.abs(n.over));
  const fits =
    n.over > 0
      ? t`${cut}: the peak is ${peak}, ${room} above the budget.`
      : t`${cut}: the peak is ${peak}, ${room} below the budget.`;
  return [fits, weightText(n), costText(state, n)].join(t` `);
}

// ---- geometry ------------------------------------------------------------

/** Geometry of the picture, in pixels, for a given width: the memory; under
    it the micro-batches and their weights; beside it, or at the bottom, what
    they cost. */
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
  const curve = (of) => {
    const point = ({ x, memory }) => ({ x, y: axis.y(bytesOf(memory)) });
    return cornersOf(of, plot, end).map(point);
  };
  const highestOf = (list) => {
    const { x, y } = list.reduce((a, b) => (b.y < a.y ? b : a));
    return { x, y: Math.max(y, plot.top) };
  };
  const corners = cornersOf(state, plot, end);
  const memories = corners.map(({ memory }) => memory);
  const once = curve({ ...state, micro_batch: state.global_batch });
  const cut = ({ micro_batch, global_batch }) => micro_batch / global_batch;
  return {
    ...{ plot, axis, end, once },
    height: wide ? 352 : 567,
    before: before && cut(before) !== cut(state) ? curve(before) : [],
    xs: corners.map(({ x }) => x),
    bands: stacked(memories, Object.keys(PARTS), axis.y),
    peak: highestOf(curve(state)),
    whole: highestOf(once),
    budget: axis.y(state.budget),
    blocks: blocksOf(n, plot, end),
    handles: handlesOf(n, plot, end),
    cost: { ...panel, ...(state.record && costLayout(state.record, panel)) },
  };
}

/* The micro-batches; where they are too many, the first of them. */
function blocksOf(n, { left }, end) {
  const { micro_batches: count, global_batch: all } = n;
  const shown = Math.min(count, Math.floor((end - left) / NARROWEST));
  const every = shown < count ? all / shown : n.micro_batch;
  const place = (i) => left + (Math.min(i * every, all) * (end - left)) / all;
  return Array.from({ length: shown }, (_, i) => {
    const last = i === count - 1;
    const size = last ? n.last_micro_batch : n.micro_batch;
    const weight = n.weights[Number(last)];
    return { x: place(i), width: place(i + 1) - place(i), size, weight };
  });
}

/* The corners of the memory over one window: { x, memory }. Each peak line is
   a moment of a forward and backward pass whose bytes are known; activations
   fall as backward goes on, which says when it is. The optimizer step is the
   moment that no batch size changes; then it frees the gradients. */
function cornersOf(state, plot, end) {
  const { footprint } = state;
  const { alone, later, gradients } = footprint;
  const idle = (kept) => memoryOf(footprint, [0, kept, 0], 0);
  const blocks = blocksOf(describe(state), plot, end);
  const passes = blocks.flatMap(({ x, width, size }, i) => {
    const rows = (i ? later : alone).filter(([slope]) => slope > 0);
    rows.sort((a, b) => b[0] - a[0]);
    const moments = rows.map((row) => ({
      x: x + width * (1 - (BACKWARD * row[0]) / rows[0][0]),
      memory: memoryOf(footprint, row, size),
    }));
    return [
      { x, memory: idle(i ? gradients : 0) },
      ...moments,
      { x: x + width, memory: idle(gradients) },
    ];
  });
  const flat = (blocks.length > 1 ? later : alone).filter(([slope]) => !slope);
  const updates = flat.map((row) => memoryOf(footprint, row, 0));
  const step = highest([idle(gradients), ...updates]);
  const over = end + 0.6 * (plot.right - end);
  return [
    ...passes,
    { x: end, memory: step },
    { x: over, memory: step },
    { x: over, memory: idle(0) },
    { x: plot.right, memory: idle(0) },
  ];
}

/* The cuts that are marked: so many that their marks have room. */
function handlesOf(n, { left }, end) {
  const size = (n.micro_batch * (end - left)) / n.global_batch; // in pixels
  const every = Math.ceil(16 / size);
  const handles = [];
  for (let i = every; i < Math.max(n.micro_batches, 2); i += every) {
    handles.push({ index: i, x: left + i * size });
  }
  return handles;
}

/** The size of a micro-batch after its cut at `index` went to `x`. */
export function moved({ plot, end }, all, index, x) {
  const place = ((x - plot.left) / (end - plot.left)) * all;
  return Math.min(Math.max(Math.round(place / index), 1), all);
}

function costLayout({ times, unit }, { left, right, top, tall }) {
  const plot = { left: left + 36, right, top: top + 72 };
  plot.bottom = plot.top + tall;
  const most = Math.max(...times.map(([, time]) => time));
  const largest = Math.max(times.at(-1)[0], 2);
  const share = (size) => Math.min(Math.log(size) / Math.log(largest), 1);
  const x = (size) => plot.left + (plot.right - plot.left) * share(size);
  return { plot, x, largest, axis: heights(plot, 1.1 * most, unit) };
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
const [STRIP, TALL] = [220, 18]; // where the micro-batches are, their height

const polyline = (list, name) => {
  const points = list.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`);
  return svg("polyline", { points: points.join(" "), class: name });
};

function* drawMemory(id, plan, n, state) {
  const { plot, end, xs } = plan;
  const { left: x, top: y, right, bottom } = plot;
  const over = n.over > 0;
  const verdict = over
    ? t`✗ ${formatBytes(n.over)} too much`
    : t`✓ fits, ${formatBytes(-n.over)} free`;
  const broken = over ? " mb-broken" : "";
  yield text(0, 18, verdict, { class: `mb-value mb-verdict${broken}` });
  yield text(0, 37, cutText(n));
  yield* axes(plot, plan.axis);
  yield text(x + 12, y - 11, t`over time →`);
  const box = { x, y, width: right - x, height: bottom - y };
  yield svg("clipPath", { id: `${id}-clip` }, svg("rect", box));
  const inside = svg("g", { "clip-path": `url(#${id}-clip)` });
  for (const { key, lower, upper } of plan.bands) {
    const there = xs.map((x, i) => `${x.toFixed(1)} ${upper[i].toFixed(1)}`);
    const back = xs.map((x, i) => `${x.toFixed(1)} ${lower[i].toFixed(1)}`);
    const d = `M${[...there, ...back.reverse()].join("L")}Z`;
    inside.append(...filled(id, key, "path", { d }));
  }
  inside.append(polyline(plan.once, "mb-once"));
  if (plan.before.length) inside.append(polyline(plan.before, "mb-ghost"));
  yield inside;
  yield* budgetLine(id, plot, plan.budget, over);
  const size = (bytes) =>
    (bytes > 2 * state.budget ? "↑ " : "") + formatBytes(bytes);
  const marks = [
    [{ x: right, y: plan.budget }, t`budget`, formatBytes(state.budget)],
    [plan.peak, t`peak`, size(n.peak)],
  ];
  if (n.micro_batches > 1) {
    marks.unshift([plan.whole, t`whole batch`, size(n.whole_peak)]);
  }
  yield* names(plot, marks);
  yield dot(plan.peak, "mb-peak");
  yield text((end + right) / 2, bottom + 22, t`step`, MIDDLE);
}

function* drawStrip({ plot, blocks, handles }, n) {
  const y = STRIP;
  for (const [i, { x, width, size }] of blocks.entries()) {
    const look = i % 2 ? "mb-cell mb-odd" : "mb-cell";
    yield svg("rect", { x, y, width, height: TALL, class: look });
    const label = grouped(size);
    if (LETTER * label.length + 6 < width) {
      yield text(x + width / 2, y + 14, label, MIDDLE);
    }
  }
  for (const { x } of handles) {
    const d = `M${x} ${y - 2}V${y + TALL + 2}l-7 12h14l-7 -12`;
    yield svg("path", { d, class: "mb-cut" });
  }
  yield text(plot.right + 12, y + 14, `N = ${grouped(n.global_batch)}`);
  yield text(plot.right + 12, y + 31, t`drag ▲`);
}

/* The weights of the samples, on an axis that does not move. */
function* drawWeights({ plot, end, blocks }, n) {
  const [top, bottom] = [296, 344];
  const y = (weight) => bottom - (Math.min(weight, 3) * (bottom - top)) / 3;
  yield text(plot.left, top - 22, t`weight of one sample`, BOLD);
  const shown = isOne(n.weight_ratio) ? [n.weights[0]] : n.weights;
  for (const [i, weight] of shown.entries()) {
    const label = (weight > 3 ? "↑ " : "") + factorText(weight);
    const look = isOne(weight) ? {} : { class: "mb-value mb-broken" };
    yield text(i ? end + 6 : plot.left, top - 5, label, look);
  }
  const edges = [...blocks.map(({ x }) => x), end];
  const tops = blocks.map(({ weight }) => y(weight));
  const d = band(edges, tops.map(() => bottom), tops);
  yield svg("path", { d, class: "mb-weight" });
  for (const [i, { x, width }] of blocks.entries()) {
    if (i && width > 4) yield line(x, tops[i], x, bottom, "mb-between");
  }
  yield line(plot.left, bottom, end, bottom, "mb-axis");
  yield line(plot.left, y(1), end, y(1), "mb-one");
  yield text(plot.left - 6, bottom + 4, "0", END);
  yield text(end + 6, y(1) + 4, "1/N");
}

function* drawCost({ cost }, n, state) {
  const { left, top, plot, axis, x } = cost;
  const passes = t`${grouped(n.passes)} passes`;
  yield text(left, top, passes, { class: "mb-value mb-verdict" });
  yield text(left, top + 19, t`forward and backward`);
  const time = timeText(state, n.micro_batch);
  yield text(left, top + 44, time || t`time: not measured`, BOLD);
  if (!state.record) return;
  const { times, gpu } = state.record;
  yield* axes(plot, axis);
  const points = times.map(([n, time]) => ({ x: x(n), y: axis.y(time) }));
  yield polyline(points, "mb-once");
  for (const point of points) yield dot(point, "mb-measured", 3);
  const now = x(n.micro_batch);
  yield line(now, plot.top - 4, now, plot.bottom + 5, "mb-cursor");
  for (const size of new Set([1, times[0][0], times.at(-1)[0]])) {
    yield text(x(size), plot.bottom + 16, grouped(size), MIDDLE);
  }
  const middle = (plot.left + plot.right) / 2;
  yield text(middle, plot.bottom + 31, t`micro-batch`, MIDDLE);
  const place = gpu ? t`measured on a GPU` : t`not measured on a GPU`;
  yield text(left, plot.bottom + 52, place);
}

function results(id, { samples, record }, n) {
  const cell = (key, bytes) => [key, bytes, formatBytes(bytes)];
  const rows = Object.entries(PARTS).map(([part, label]) => {
    const of = (key) => cell(`${key}.${part}`, n[key][part]);
    return { part, label, cells: [of("memory"), of("whole_memory")] };
  });
  const sum = [cell("peak", n.peak), cell("whole_peak", n.whole_peak)];
  const shown = (key) =>
    Number.isInteger(n[key]) ? grouped(n[key]) : formatNumber(n[key]);
  const list = {
    micro_batches: t`micro-batches`,
    global_batch: t`global batch`,
    passes: t`passes for one optimizer step`,
    weight_sum: t`sum of the weights`,
    weight_ratio: t`largest ÷ smallest weight`,
    steps_per_epoch: t`optimizer steps in an epoch of ${grouped(samples)}`,
    last_window: t`samples in its last window`,
  };
  return [
    table(id, [t`bytes at the peak`, t`micro-batches`, t`whole batch`], [
      ...rows.reverse(),
      { sum: true, label: t`peak`, cells: sum },
    ]),
    numberList(
      Object.entries(list).map(([key, label]) =>
        [label, key, n[key], shown(key)],
      ),
    ),
    html("p", {}, record ? t`Times: ${record.provenance}.` : ""),
  ];
}

const NOTE = t(
  "A hill is the memory of one micro-batch: activations grow in the forward " +
    "pass and are freed in the backward pass; gradients stay until the " +
    "optimizer step. Corners are exact, sides drawn straight. The thin line " +
    "is the whole batch at once, the dotted one your last setting. Drag a " +
    "triangle to cut elsewhere, or click the times. A bar is the weight of " +
    "a sample in the gradient. Window: the sum of the losses ÷ N. Mean of " +
    "means: each micro-batch’s sum ÷ its samples ÷ the steps. No division: " +
    "each micro-batch’s sum ÷ its samples.",
);

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["micro_batch", "steps", "global_batch", "normalisation", "samples"],
  ...["budget", "footprint", "record", "label"],
];

function build({ id, get, set, bound, picture }) {
  let asked = 1; // steps
  let plan;
  const go = (changes) => {
    const n = describe({ ...get(), ...changes });
    const { micro_batch, micro_batches: steps, global_batch } = n;
    set({ ...changes, micro_batch, steps, global_batch });
  };
  const change = (key) => (value) => go({ [key]: value });

  const steps = slider({
    label: t`Accumulation steps`,
    key: "steps",
    onInput(value) {
      asked = value;
      go({ micro_batch: Math.ceil(get().global_batch / value) });
    },
  });
  const normalisation = radios({
    label: t`Normalisation`,
    key: "normalisation",
    onChange: change("normalisation"),
  });
  const global = bound(numberField, t`Global batch N`, "global_batch", {
    max: LARGEST_BATCH,
    onChange: change("global_batch"),
  });
  const micro = slider({
    label: t`Micro-batch`,
    key: "micro_batch",
    onInput: change("micro_batch"),
  });

  // In the page's address they stand together: 1024/256.
  for (const part of [steps, global, micro]) part.held = () => "";
  const batch = {
    key: "batch",
    held: () => `${get().global_batch}/${get().micro_batch}`,
    enter(text) {
      const [global_batch, micro_batch] = text.split("/").map(Number);
      const fits = (n) => Number.isInteger(n) && n >= 1 && n <= LARGEST_BATCH;
      if (fits(global_batch) && fits(micro_batch)) {
        go({ global_batch, micro_batch });
      }
    },
  };

  drag(picture, {
    grab({ x, y }) {
      const { handles, cost: { plot } } = plan;
      const beside = plot && x > plot.left - 10 && y > plot.top - 10;
      if (beside && y < plot.bottom + 20) return "cost";
      if (y < STRIP - 8 || y > STRIP + TALL + 22) return null;
      const near = ({ x: at }) => Math.abs(at - x);
      const nearest = handles.reduce((a, b) => (near(b) < near(a) ? b : a));
      return near(nearest) < 24 ? nearest.index : null;
    },
    move({ x }, held) {
      const all = get().global_batch;
      const cut = held === "cost" ? sizeAt(plan, x) : moved(plan, all, held, x);
      go({ micro_batch: cut });
    },
  });

  const show = (state, n) => {
    const stays = Math.ceil(n.global_batch / asked) === n.micro_batch;
    const count = n.micro_batches;
    const spoken = plural(count, "step");
    steps.update({
      value: Math.min(stays ? asked : count, MOST_STEPS),
      max: MOST_STEPS,
      text: count > MOST_STEPS ? t`over ${MOST_STEPS}` : count,
      spoken: t`${spoken}: peak ${formatBytes(n.peak)}`,
    });
    normalisation.update({
      value: state.normalisation,
      options: Object.keys(WEIGHTS),
    });
    micro.update({
      value: n.micro_batch,
      max: n.global_batch,
      spoken: plural(n.micro_batch, "sample"),
    });
  };

  return {
    controls: [steps, normalisation],
    legend: legend(id, { ...PARTS, over: t`above the budget` }),
    more: [global, micro, batch],
    note: html("p", {}, NOTE),
    draw(state, width, before) {
      const n = describe(state);
      plan = layout(state, width, before);
      show(state, n);
      return {
        title: t`Memory of one optimizer step`,
        sentence: sentence(state),
        height: plan.height,
        drawn: [
          ...drawMemory(id, plan, n, state),
          ...drawStrip(plan, n),
          ...drawWeights(plan, n),
          ...drawCost(plan, n, state),
        ],
        numbers: results(id, state, n),
      };
    },
  };
}

export default widget({ name: "accumulation", keys, build });
