import {
  axes,
  byteTicks,
  choice,
  dot,
  drag,
  field,
  filled,
  formatBytes,
  formatNumber,
  heights,
  legend,
  line,
  names,
  numberList,
  percent,
  plural,
  slider,
  svg,
  t,
  table,
  text,
  widget,
} from "./base.mjs";
import {
  OUTPUT,
  PARTS,
  chooser,
  deed,
  drawStep,
  heldAt,
  momentAt,
  peakOf,
  peakPlace,
  shownOf,
  simulate,
  stepLayout,
  sum,
} from "./tape.mjs";

/* A chain of layers in checkpointed segments: its peak and its extra runs.

   describe(state): the numbers.
   layout(state, width): where everything stands in the picture. */

const SPLITS = {
  balanced: t`balanced, longer first`,
  pytorch: t`PyTorch’s checkpoint_sequential`,
};

const UNIT = 100; // a layer's tape, so that sizes are whole numbers
const MOST_LAYERS = 100;

// ---- numbers -------------------------------------------------------------

/* The chain and its segments, whatever the state says; sizes are in bytes,
   or `unit` of them are one. */
function chosen({ chain, layers, checkpoint, segments, cuts, split }) {
  const c = Math.round(UNIT * checkpoint);
  const row = [c, UNIT - c, 1, 1, 0, 0, 0, c, c, 0, c];
  const stages = chain ?? Array(layers).fill(row);
  const ends = [...cuts, stages.length];
  const sizes = cuts.length
    ? ends.map((end, i) => end - (ends[i - 1] ?? 0))
    : sizesOf(stages.length, Math.min(segments, stages.length), split);
  return { stages, sizes, unit: chain ? 1 : UNIT };
}

/* Sizes of as many checkpointed segments. */
function sizesOf(length, count, split) {
  if (!count) return [];
  const small = Math.floor(length / count);
  if (split === "pytorch") return Array(count - 1).fill(small);
  return Array.from({ length: count }, (_, i) => small + (i < length % count));
}

/* Segments of these sizes; what remains keeps its tapes. */
function segmentsOf(length, sizes) {
  const stages = [...Array(length).keys()];
  const segments = sizes.map((size) => stages.splice(0, size));
  return [...segments, ...stages];
}

const run = (stages, sizes) =>
  simulate(stages, segmentsOf(stages.length, sizes));

const curves = new Map();

/* The peak of every number of segments, from 0. */
function curveOf(stages, split) {
  const key = `${split} ${stages.join(";")}`;
  if (!curves.has(key)) {
    const peak = (_, k) =>
      peakOf(run(stages, sizesOf(stages.length, k, split)));
    curves.set(key, Array.from({ length: stages.length + 1 }, peak));
  }
  return curves.get(key);
}

/* A run, its peak and what is alive there, in the state's unit. */
function atPeak(moments, unit) {
  const peak = peakOf(moments);
  const place = peakPlace(moments);
  const parts = shownOf(moments)[place];
  for (const part of Object.keys(parts)) parts[part] /= unit;
  return { moments, place, peak: peak / unit, parts };
}

/** What the widget shows. Sizes are bytes with a chain, else units. */
export function describe(state) {
  const { stages, sizes, unit } = chosen(state);
  const layers = stages.length;
  const plain = atPeak(run(stages, []), unit);
  const ours = atPeak(run(stages, sizes), unit);
  const curve = curveOf(stages, state.split).map((peak) => peak / unit);
  const least = Math.min(...curve);
  const most = Math.max(layers - 1, 1); // as many can be checkpoints
  const outputs = sum(stages.slice(0, most).map((stage) => stage[OUTPUT]));
  const tapes = plain.moments[layers - 1].parts[2];
  const own = state.cuts.length > 0;
  const count = own ? sizes.length : Math.min(state.segments, layers);
  return {
    layers,
    unit,
    moments: ours.moments,
    segments: count,
    sizes,
    rest: layers - sum(sizes),
    peak: ours.peak,
    peak_moment: ours.place,
    parts: ours.parts,
    plain_peak: plain.peak,
    plain_parts: plain.parts,
    extra_runs: ours.moments.filter(({ extra }) => extra).length,
    curve,
    best: [...curve.keys()].filter((k) => curve[k] === least),
    best_peak: least,
    root: outputs ? Math.sqrt((tapes * most) / outputs) : null,
    measured: own ? null : (state.measured[count] ?? null),
  };
}

// ---- words ---------------------------------------------------------------

const shortText = ({ chain }, value) =>
  chain ? formatBytes(value) : formatNumber(value);

/* A size in words. */
const sizeText = ({ chain }, value) =>
  chain ? formatBytes(value) : plural(Number(formatNumber(value)), "unit");

/* "3 × 6 + 1 × 5", or in their order "5 + 4 + 3" */
function sizesText({ sizes, rest }, own) {
  const count = (size) => sizes.filter((other) => other === size).length;
  const parts = own
    ? [...sizes]
    : [...new Set(sizes)].map((size) => `${count(size)} × ${size}`);
  if (rest) parts.push(t`${rest} not checkpointed`);
  return parts.join(" + ");
}

/* "3 to 5, 7, 8" */
function ranges(numbers) {
  const starts = numbers.filter((n) => !numbers.includes(n - 1));
  const ends = numbers.filter((n) => !numbers.includes(n + 1));
  return starts
    .map((n, i) => {
      if (ends[i] === n) return `${n}`;
      return ends[i] === n + 1 ? t`${n}, ${ends[i]}` : t`${n} to ${ends[i]}`;
    })
    .join(t`, `);
}

const thingOf = ({ chain }) => (chain ? "stage" : "layer");

const counted = (count, thing) =>
  thing === "stage" ? plural(count, "stage") : plural(count, "layer");

/* What runs again. */
function againText({ extra_runs, layers }, thing) {
  if (!extra_runs) {
    return thing === "stage" ? t`No stage runs again` : t`No layer runs again`;
  }
  const share = percent(extra_runs, layers);
  const runs = counted(extra_runs, thing);
  return extra_runs === 1
    ? t`${runs} runs again, ${share} of a forward pass`
    : t`${runs} run again, ${share} of a forward pass`;
}

/** The key numbers in words. */
export function sentence(state) {
  const n = describe(state);
  const thing = thingOf(state);
  const size = (value) => sizeText(state, value);
  const own = state.cuts.length > 0;
  const layers = counted(n.layers, thing);
  let peak = t`${layers} without checkpointing: the peak is ${size(n.peak)}`;
  if (n.segments) {
    const share = percent(n.peak, n.plain_peak);
    peak = t(
      "{0} in {1} ({2}): the peak is {3}, {4} of the {5} without checkpointing",
      ...[layers, plural(n.segments, "segment"), sizesText(n, own)],
      ...[size(n.peak), share, size(n.plain_peak)],
    );
  }
  const again = againText(n, thing);
  const least = t`${size(n.best_peak)}, with k = ${ranges(n.best)}`;
  let best = t`The least peak is ${least}`;
  if (own) best = t`Equal segments reach ${least}`;
  if (n.peak < n.best_peak) best = t`That beats equal segments: ${least}`;
  else if (!own && n.best.includes(n.segments)) {
    best = t`No number of equal segments has a lower peak`;
  }
  const said = [peak, again, best];
  if (n.measured !== null) said.push(t`Measured here: ${size(n.measured)}`);
  return said.map((one) => t`${one}.`).join(t` `);
}

/* Where the checkpoints are. */
function cutsOf({ layers, sizes }) {
  let end = 0;
  return sizes.map((size) => (end += size)).filter((cut) => cut < layers);
}

// ---- geometry ------------------------------------------------------------

/** Geometry of the picture, in pixels, for a given width: the layers, below
    them the step, below it the curve. The axis goes in large steps. */
export function layout(state, width, moment = null, before = null) {
  const n = describe(state);
  const measured = Object.entries(state.measured)
    .map(([k, peak]) => ({ k: Number(k), peak }))
    .filter(({ k }) => k <= n.layers);
  const sides = { left: 34, right: width - 84 };
  const most = Math.max(1, ...n.curve, ...measured.map(({ peak }) => peak));
  const top = state.chain ? 1.04 * most : 20 * Math.ceil(most / 20);
  const step = { ...sides, top: 82, bottom: 228 };
  const curve = { ...sides, top: 280, bottom: 358 };
  const units = state.chain ? undefined : t`units`;
  const axis = heights(step, top, units);
  const below = heights(curve, top, units);
  const at = Math.min(moment ?? n.peak_moment, n.moments.length - 1);
  const stepOf = ({ moments, unit }) =>
    stepLayout(moments, step, (size) => axis.y(size / unit));
  const { stage } = n.moments[at];
  const thing = state.chain ? t`stage ${stage + 1}` : t`layer ${stage + 1}`;
  const words = deed(n.moments[at], thing);
  return {
    width,
    height: 398,
    layers: layersLayout(n, at, sides),
    step: stepOf(n),
    axis,
    plain: { x: step.left, y: axis.y(n.plain_peak) },
    cursor: { at, words, count: n.moments.length },
    before: before && stepOf(describe(before)),
    curve: {
      plot: curve,
      axis: below,
      ...curveLayout(n, measured, curve, below.y),
    },
  };
}

/* The layers at a moment: what each holds, and where the checkpoints are. */
function layersLayout(n, at, { left, right }) {
  const wide = (right - left) / n.layers;
  const { holds, kept, running } = heldAt(n.moments, at, n.layers);
  const cuts = cutsOf(n);
  return {
    wide,
    cells: holds.map((part, i) => ({
      part,
      x: left + i * wide,
      runs: i === running,
      odd: cuts.filter((cut) => cut <= i).length % 2 === 1,
    })),
    cuts: cuts.map((cut) => {
      return { cut, x: left + cut * wide, kept: kept.has(cut) };
    }),
  };
}

function curveLayout(n, measured, plot, y) {
  const x = (k) => plot.left + ((plot.right - plot.left) * k) / n.layers;
  const points = n.curve.map((peak, k) => ({ x: x(k), y: y(peak) }));
  const room = Math.max(2, Math.floor((plot.right - plot.left) / 36));
  return {
    points,
    now: { x: x(n.segments), y: y(n.peak) },
    best: n.best.map((k) => points[k]),
    size: Math.min(Math.max(points[1].x - points[0].x, 2.5), 5), // of a mark
    measured: measured.map(({ k, peak }) => ({ x: x(k), y: y(peak) })),
    root: n.root === null || n.root > n.layers ? null : x(n.root),
    ticks: byteTicks(n.layers, room)
      .marks.filter(({ value }) => Number.isInteger(value))
      .map(({ value, label }) => ({ label, x: x(value) })),
  };
}

const inside = (value, most) => Math.min(Math.max(Math.round(value), 0), most);

const share = ({ left, right }, x) => (x - left) / (right - left);

/** The number of segments at a place in the curve. */
export const countAt = ({ curve }, x) => {
  const most = curve.points.length - 1;
  return inside(share(curve.plot, x) * most, most);
};

/** The cuts after the one at `index` went to `x`: between its neighbours. */
export function moved({ layers, step }, cuts, index, x) {
  const count = layers.cells.length;
  const low = (cuts[index - 1] ?? 0) + 1;
  const high = (cuts[index + 1] ?? count) - 1;
  const cut = Math.round(share(step.plot, x) * count);
  return cuts.with(index, Math.min(Math.max(cut, low), high));
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };

function* drawLayers(id, { layers, cursor, step }, thing) {
  const [top, tall] = [24, 20];
  const { at, count, words } = cursor;
  yield text(0, 12, t`${at + 1} of ${count}: ${words}`, {
    class: "mb-value",
  });
  for (const { part, x, odd, runs } of layers.cells) {
    const gap = layers.wide > 5 ? 1 : 0;
    const box = { x, y: top, width: layers.wide - gap, height: tall };
    yield svg("rect", { ...box, class: odd ? "mb-cell mb-odd" : "mb-cell" });
    if (part) yield* filled(id, part, "rect", box);
    if (runs) yield svg("rect", { ...box, class: "mb-runs" });
  }
  for (const { x, kept } of layers.cuts) {
    yield svg("path", {
      d: `M${x} ${top - 3}V${top + tall + 4}l-7 13h14l-7 -13`,
      class: kept ? "mb-cut mb-kept" : "mb-cut",
    });
  }
  if (!layers.cuts.length) return;
  const { right } = step.plot;
  yield text(right + 12, top + 14, thing === "stage" ? t`stages` : t`layers`);
  yield text(right + 12, top + 33, t`drag ▲`);
}

function* drawMemory(id, { step, axis, plain, before, cursor }, state, n) {
  const { at, count } = cursor;
  yield* drawStep(id, { step, axis, at, reached: count, before });
  const marks = [[step.peak, t`peak`, shortText(state, n.peak)]];
  const other = [plain, t`with k = 0`, shortText(state, n.plain_peak)];
  yield* names(step.plot, n.segments ? [...marks, other] : marks);
}

function* drawCurve({ curve, width }, n, state) {
  const { plot, axis, points, now, best, measured, size: r } = curve;
  const size = (value) => shortText(state, value);
  yield* axes(plot, axis);
  for (const { x, label } of curve.ticks) {
    yield text(x, plot.bottom + 17, label, MIDDLE);
  }
  yield text(width, plot.bottom + 17, t`segments`, END);
  if (n.root !== null) {
    const plain = !state.chain && state.checkpoint === 1;
    const label = `${plain ? "√L" : "√(L·a/c)"} = ${formatNumber(n.root)}`;
    const y = plot.bottom + 35;
    const bold = { class: "mb-value" };
    if (curve.root === null) {
      yield text(plot.right, y, `${label} →`, { ...END, ...bold });
    } else {
      const x = Math.min(Math.max(curve.root, 58), plot.right);
      yield line(curve.root, plot.top, curve.root, plot.bottom + 5, "mb-mark");
      yield text(x, y, label, { ...MIDDLE, ...bold });
    }
  }
  const path = points.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`);
  yield svg("polyline", { points: path.join(" "), class: "mb-curve" });
  const least = n.best.includes(n.segments) && n.peak === n.best_peak;
  yield* names(plot, [
    [now, `k = ${n.segments}`, size(n.peak)],
    ...(least ? [] : [[best.at(-1), t`least`, size(n.best_peak)]]),
  ]);
  for (const point of measured) yield dot(point, "mb-measured", 4);
  for (const { x, y } of best) {
    const d = `M${x} ${y - r}l${r} ${r}l${-r} ${r}l${-r} ${-r}Z`;
    yield svg("path", { d, class: "mb-best" });
  }
  yield dot(now, "mb-now", 8);
}

function results(id, state, n) {
  const unit = state.chain ? t`bytes at the peak` : t`units at the peak`;
  const size = (value) => shortText(state, value);
  const cell = (key, value) => [key, value, value ? size(value) : "–"];
  const rows = Object.entries(PARTS).map(([part, label]) => ({
    part,
    label,
    cells: [
      cell(`parts.${part}`, n.parts[part]),
      cell(`plain_parts.${part}`, n.plain_parts[part]),
    ],
  }));
  const peaks = [cell("peak", n.peak), cell("plain_peak", n.plain_peak)];
  const total = { sum: true, label: t`peak`, cells: peaks };
  const head = [unit, `k = ${n.segments}`, "k = 0"];
  const sizes = sizesText(n, state.cuts.length > 0);
  const again = t`${n.extra_runs} (${percent(n.extra_runs, n.layers)} of L)`;
  const least = t`least peak of equal segments`;
  const extra = state.chain ? t`extra stage runs` : t`extra layer runs`;
  const list = [
    [t`segment sizes`, "sizes", JSON.stringify(n.sizes), sizes],
    [extra, "extra_runs", n.extra_runs, again],
    [t`best k`, "best", JSON.stringify(n.best), ranges(n.best)],
    [least, "best_peak", n.best_peak, size(n.best_peak)],
  ];
  const { measured } = n;
  if (measured !== null) {
    list.push([t`measured peak`, "measured", measured, size(measured)]);
  }
  return [table(id, head, [...rows.reverse(), total]), numberList(list)];
}

const NOTES = {
  units: t(
    "In units: a layer’s tape is 1, of which its output, and so a " +
      "checkpoint, is c. As large as c are the gradient on its way back and " +
      "the one that the layer at work makes (workspace). ",
  ),
  bytes: t`In bytes, from the sizes of the stages. `,
  all: t(
    "At the top are the layers at the chosen moment: a filled one has its " +
      "tape, the framed one runs, a filled triangle is a checkpoint that is " +
      "kept. Below is the memory at every moment; click there to choose " +
      "one. The curve is the peak of each number of equal segments: diamonds " +
      "are the least, the dotted line is √(L·a/c) with a layer’s tape a and a " +
      "checkpoint c. Click it to choose k.",
  ),
  points: t` Points were measured.`,
};

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["chain", "layers", "segments", "cuts"],
  ...["checkpoint", "split", "measured", "label"],
];

function build({ id, get, set, bound, picture, again }) {
  // What was measured belongs to the setting that it came with.
  let came = {};
  const known = (state) => {
    const { chain, layers, checkpoint, split, measured } = state;
    const setting = JSON.stringify([chain, layers, checkpoint, split]);
    if (measured !== came.measured) came = { measured, setting };
    return came.setting === setting ? state : { ...state, measured: {} };
  };
  let plan;
  const count = () => plan.cursor.count;
  const moment = chooser({ again, count, every: 180 });
  const { see, play, when } = moment;
  const go = (traits) => {
    moment.at = null;
    set(get().cuts.length ? { cuts: [], ...traits } : traits);
  };

  const layers = slider({
    label: t`Layers L`,
    key: "layers",
    unit: t` layers`,
    onInput: (value) =>
      go({ layers: value, segments: Math.min(get().segments, value) }),
  });
  const segments = slider({
    label: t`Segments k`,
    key: "segments",
    min: 0,
    onInput: (value) => go({ segments: value }),
  });
  const checkpoint = slider({
    label: t`Cost c of a checkpoint (a layer’s tape is 1)`,
    key: "checkpoint",
    onInput: (value) => go({ checkpoint: value / 20 }),
  });
  const split = bound(choice, t`Split`, "split", {
    options: SPLITS,
    onChange: (value) => go({ split: value }),
  });
  const cuts = field({
    label: t`Checkpoints before`,
    key: "cuts",
    how: t`use numbers in ascending order, such as 5-9-12`,
    write: (list) => list.join("-"),
    read(text) {
      const found = text.trim() ? text.split(/[-,\s]+/).map(Number) : [];
      const rise = found.every((cut, i) => cut > (found[i - 1] ?? 0));
      const fits = (found.at(-1) ?? 0) < describe(get()).layers;
      return rise && fits && found.every(Number.isInteger) ? found : undefined;
    },
    onChange: (list) =>
      go(list.length ? { cuts: list, segments: list.length + 1 } : {}),
  });
  // a link holds what the reader chose, not what follows from it
  cuts.held = () => get().cuts.join("-");

  const note = html("p", { class: "mb-note" });
  drag(picture, {
    grab({ x, y }) {
      if (y > plan.step.plot.bottom + 25) return { zone: "curve" };
      if (y > plan.step.plot.top - 10) return { zone: "step" };
      const far = plan.layers.cuts.map((cut) => Math.abs(cut.x - x));
      const index = far.indexOf(Math.min(...far));
      return far[index] < 24 ? { zone: "layers", index } : null;
    },
    move({ x }, { zone, index }) {
      if (zone === "step") return see(momentAt(plan.step, x));
      if (zone === "curve") {
        const count = countAt(plan, x);
        const other = count !== get().segments || get().cuts.length;
        return other && go({ segments: count });
      }
      const cuts = plan.layers.cuts.map(({ cut }) => cut);
      const next = moved(plan, cuts, index, x);
      if (next[index] === cuts[index]) return;
      go({ cuts: next, segments: cuts.length + 1 });
    },
    drop: ({ zone }) => zone === "curve" && segments.focus(),
  });

  const draw = (raw, width, before) => {
    const state = known(raw);
    const n = describe(state);
    const size = (value) => sizeText(state, value);
    const same =
      before?.layers === state.layers && before.chain === state.chain;
    plan = layout(state, width, moment.at, same ? before : null);
    when.update({
      value: plan.cursor.at + 1,
      max: plan.cursor.count,
      spoken: plan.cursor.words,
    });
    layers.root.hidden = checkpoint.root.hidden = Boolean(state.chain);
    layers.update({ value: n.layers, max: Math.max(MOST_LAYERS, n.layers) });
    checkpoint.update({
      value: Math.round(20 * state.checkpoint),
      max: 20,
      text: formatNumber(state.checkpoint),
      spoken: formatNumber(state.checkpoint),
    });
    segments.update({
      value: n.segments,
      max: n.layers,
      spoken: t`${plural(n.segments, "segment")}: peak ${size(n.peak)}`,
    });
    cuts.update({ value: cutsOf(n) });
    note.textContent =
      NOTES[state.chain ? "bytes" : "units"] +
      NOTES.all +
      (Object.keys(state.measured).length ? NOTES.points : "");
    return {
      title: t`Memory during one step`,
      sentence: sentence(state),
      height: plan.height,
      drawn: [
        ...drawLayers(id, plan, thingOf(state)),
        ...drawMemory(id, plan, state, n),
        ...drawCurve(plan, n, state),
      ],
      numbers: results(id, state, n),
    };
  };
  return {
    controls: [layers, segments, play],
    legend: legend(
      id,
      PARTS,
      t`R recomputation, B backward pass`,
      ...(Object.keys(get().measured).length ? [t`● measured`] : []),
    ),
    more: [when, cuts, checkpoint, split],
    note,
    draw,
    stop() {
      play.stop();
      moment.at = null;
    },
  };
}

export default widget({ name: "segments", keys, build });
