import {
  axes,
  band,
  dot,
  filled,
  line,
  phaseRuns,
  phaseStrip,
  player,
  slider,
  stacked,
  stairs,
  svg,
  t,
} from "./base.mjs";

/* The tape machine, for the widgets that run segments: the same as
   checkpointing/schedule.py and tape.py say. */

export const PARTS = {
  checkpoints: t`checkpoints`,
  activations: t`tapes`,
  recomputation: t`recomputed tapes`,
  inputs: t`value at work`,
  gradients: t`gradients`,
  temporaries: t`workspace`,
};

/* A stage's row, as Python sends it. */
export const [OUTPUT, INNER, HOLDS_INPUT, HOLDS_OUTPUT] = [0, 1, 2, 3];
const [FORWARD, RECORD, RECOMPUTE, BACKWARD, AGAIN] = [4, 5, 6, 7, 8];
const [GRADIENTS, GRADIENT, RECOMPUTE_TIME] = [9, 10, 12];
export const TIME = 11;

export const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

// ---- actions -------------------------------------------------------------

/* With recording, except in what is checkpointed; `start` is the stage whose
   input is kept already. A recomputation ends with what is missing last. */
function* forth(segments, start, again) {
  for (const [place, item] of segments.entries()) {
    if (!Array.isArray(item)) {
      yield ["record", item];
      continue;
    }
    const stages = item.flat(Infinity);
    if (stages[0] !== start) yield ["keep", stages[0]];
    if (again && place === segments.length - 1) continue;
    for (const stage of stages) yield ["forward", stage];
  }
}

/* The backward passes, and before each segment's its recomputation; `owed`:
   whether the checkpoint of `start` is to be dropped here. */
function* back(segments, start, again, owed = false) {
  for (const item of [...segments].reverse()) {
    if (!Array.isArray(item)) {
      yield ["backward", item];
      continue;
    }
    const [first] = item.flat(Infinity);
    const mine = first !== start || owed;
    const later = Array.isArray(item[0]); // a segment within needs it
    yield* forth(item, first, true);
    if (mine && again && !later) yield ["drop", first];
    yield* back(item, first, true, again && later && mine);
    if (mine && !again) yield ["drop", first];
  }
}

/** The actions of segments: stage numbers, and lists of them, or of lists,
    for what is checkpointed. */
export const actions = (segments) => [
  ...forth(segments, 0, false),
  ...back(segments, 0, false),
];

// ---- what is alive -------------------------------------------------------

/** The moments of a chain with these segments. A moment's parts are those of
    PARTS in tape.py; of its tapes as much as `recomputed` was. */
export function simulate(chain, segments) {
  const moments = [];
  const last = chain.length - 1;
  const root = [0]; // a view is counted where its storage is
  chain.forEach((stage, i) => root.push(stage[OUTPUT] ? i + 1 : root[i]));
  const size = (boundary) => (boundary ? chain[boundary - 1][OUTPUT] : 0);
  const none = () => ({ count: root.map(() => 0), bytes: 0, inner: 0 });
  const held = none(); // by checkpoints and tapes
  const first = none(); // by checkpoints and first tapes
  const kept = none(); // by checkpoints
  const runs = chain.map(() => 0);
  let [left, next, value] = [0, last, 0];

  const hold = (by, boundary, change) => {
    const before = by.count[boundary] > 0;
    by.count[boundary] += change;
    const after = by.count[boundary] > 0;
    if (before !== after) by.bytes += change * size(boundary);
  };
  const keep = (i, change) => {
    for (const by of [held, first, kept]) hold(by, root[i], change);
  };
  const tape = (i, change) => {
    for (const by of runs[i] > 1 ? [held] : [held, first]) {
      if (chain[i][HOLDS_INPUT]) hold(by, root[i], change);
      if (chain[i][HOLDS_OUTPUT]) hold(by, root[i + 1], change);
      by.inner += change * chain[i][INNER];
    }
  };
  const alone = (boundary) => {
    if (boundary === null || held.count[root[boundary]]) return 0;
    return size(root[boundary]);
  };
  const add = (kind, stage, workspace, values, extra = false, early) => {
    const moving = next >= 0 && next < last ? chain[next][GRADIENT] : 0;
    const tapes = held.inner + held.bytes - kept.bytes;
    const parts = [kept.bytes, values, tapes, left + moving, workspace];
    const others = first.inner + first.bytes;
    const recomputed = held.inner + held.bytes - others;
    moments.push({ kind, stage, parts, extra, recomputed, early });
  };

  const todo = actions(segments);
  const ends = (index) => {
    let after = index + 1;
    while (/keep|drop/.test(todo[after][0])) after += 1;
    return todo[after][0] === "backward";
  };
  for (const [index, [kind, i]] of todo.entries()) {
    if (kind === "keep") keep(i, 1);
    if (kind === "keep" || kind === "drop") add(kind, i, 0, alone(value));
    if (kind === "drop") keep(i, -1);
    if (kind === "backward") {
      add(kind, i, chain[i][runs[i] > 1 ? AGAIN : BACKWARD], 0);
      tape(i, -1);
      left += chain[i][GRADIENTS];
      [next, value] = [next - 1, null];
    }
    if (kind !== "forward" && kind !== "record") continue;
    runs[i] += 1;
    const extra = runs[i] > 1;
    const early = extra && kind === "record" && ends(index);
    if (kind === "record") tape(i, 1);
    const recorded = early ? RECOMPUTE : RECORD;
    const workspace = chain[i][kind === "forward" ? FORWARD : recorded];
    const view = root[i] === root[i + 1]; // one storage
    const values = alone(i) + (view ? 0 : alone(i + 1));
    add(kind, i, workspace, values, extra, early);
    value = early ? null : i + 1;
  }
  return moments;
}

export const live = ({ parts }) => sum(parts);
export const peakOf = (moments) => Math.max(...moments.map(live));

/** The first moment with the peak. */
export function peakPlace(moments) {
  const peak = peakOf(moments);
  return moments.findIndex((moment) => live(moment) === peak);
}

/** The time of what runs again. */
export const extraTime = (chain, moments) =>
  sum(
    moments
      .filter(({ extra }) => extra)
      .map(({ stage, early }) => chain[stage][early ? RECOMPUTE_TIME : TIME]),
  );

/** What each stage's tape is part of at a moment, or "", the checkpoints
    that are kept, and the stage that runs. */
export function heldAt(moments, at, length) {
  const holds = Array(length).fill("");
  const kept = new Set();
  for (const { kind, stage, extra } of moments.slice(0, at + 1)) {
    const tape = extra ? "recomputation" : "activations";
    if (kind === "record") holds[stage] = tape;
    if (kind === "keep") kept.add(stage);
    if (kind === "drop") kept.delete(stage);
  }
  const { kind, stage } = moments[at];
  for (const past of moments.slice(0, at)) {
    if (past.kind === "backward") holds[past.stage] = ""; // afterwards
  }
  const running = kind === "keep" || kind === "drop" ? null : stage;
  return { holds, kept, running };
}

// ---- what is shown -------------------------------------------------------

const phaseOf = ({ kind, extra }) => {
  if (extra) return "recomputation";
  return kind === "backward" || kind === "drop" ? "backward" : "forward";
};

/** Sizes of what is shown at each moment. */
export const shownOf = (moments) =>
  moments.map(({ parts, recomputed }) => {
    const [checkpoints, values, tapes, gradients, workspace] = parts;
    // A recomputation that ends early does not make all of it.
    const early = Math.max(0, -workspace);
    const inputs = Math.max(0, values - early);
    const made = tapes - Math.min(tapes, Math.max(0, early - values));
    const recomputation = Math.min(recomputed, made);
    const activations = made - recomputation;
    const temporaries = workspace + (values - inputs) + (tapes - made);
    return {
      ...{ checkpoints, activations, recomputation },
      ...{ inputs, gradients, temporaries },
    };
  });

/** The moment of a step that is shown, with what plays and chooses it: null
    is the peak. `count` gives how many there are, `every` is in ms. */
export function chooser({ again, count, every }) {
  const see = (at) => {
    chosen.at = at;
    again();
  };
  const play = player({
    key: "play",
    every,
    step() {
      const next = chosen.at === null ? 0 : chosen.at + 1;
      const more = next < count();
      see(more ? next : null); // in the end the peak again
      return more;
    },
  });
  const when = slider({
    label: t`Moment of the step`,
    key: "moment",
    onInput: (value) => see(value - 1),
  });
  when.held = () => (chosen.at === null ? "" : String(chosen.at + 1));
  const chosen = { at: null, see, play, when };
  return chosen;
}

/** Geometry of the memory at every moment; `y` is the height of a size. */
export function stepLayout(moments, plot, y) {
  const wide = (plot.right - plot.left) / moments.length;
  const edges = [...moments, 0].map((_, i) => plot.left + i * wide);
  const middle = (i) => (edges[i] + edges[i + 1]) / 2;
  const place = peakPlace(moments);
  return {
    ...{ plot, edges, middle },
    bands: stacked(shownOf(moments), Object.keys(PARTS), y),
    tops: moments.map((moment) => y(live(moment))),
    phases: phaseRuns(moments.map(phaseOf), edges),
    peak: { x: middle(place), y: y(live(moments[place])) },
  };
}

/** The moment at a place in the step. */
export function momentAt({ plot, edges }, x) {
  const last = edges.length - 2;
  const share = (x - plot.left) / (plot.right - plot.left);
  return Math.min(Math.max(Math.floor(share * (last + 1)), 0), last);
}

/** The memory with the cursor at a moment; what comes after `reached` is
    faint, and dashed is how it was `before`. */
export function* drawStep(id, { step, axis, at, reached, before }) {
  const { plot, edges, middle } = step;
  const part = (count) =>
    step.bands.flatMap(({ key, lower, upper }) => {
      const sides = [lower.slice(0, count), upper.slice(0, count)];
      const d = band(edges.slice(0, count + 1), ...sides);
      return filled(id, key, "path", { d });
    });
  const count = edges.length - 1;
  yield* axes(plot, axis);
  if (reached < count) yield svg("g", { class: "mb-later" }, ...part(count));
  yield* part(Math.min(reached, count));
  if (before) {
    const d = stairs(before.edges, before.tops);
    yield svg("path", { d, class: "mb-ghost" });
  }
  yield* phaseStrip(id, plot, step.phases);
  const x = middle(at);
  yield line(x, plot.top - 6, x, plot.bottom + 12, "mb-cursor");
  yield dot(step.peak, "mb-peak", 4.5);
}

/** What a moment does; `thing` is "layer 3". */
export function deed({ kind, extra }, thing) {
  if (kind === "keep") return t`the input of ${thing} is kept: a checkpoint`;
  if (kind === "drop") return t`the checkpoint before ${thing} is dropped`;
  if (kind === "backward") return t`${thing} goes backward`;
  const runs = extra ? t`${thing} runs again` : t`${thing} runs`;
  if (kind === "forward") return t`${runs}, its tape is not kept`;
  return t`${runs} and keeps its tape`;
}
