import {
  LETTER,
  band,
  byteCell,
  choice,
  drag,
  filled,
  formatBytes,
  formatNumber,
  grouped,
  html,
  legend,
  line,
  radios,
  ragged,
  slider,
  stairs,
  svg,
  t,
  table,
  text,
  widget,
} from "./base.mjs";

/* Two lanes under a row of blocks: what is computed, and what the link copies
   meanwhile.

   describe(state): times and bytes; the coefficients come from Python.
   layout(state, width): where everything stands. */

const STEP = 256; // of a width
const WIDEST = 16384;
const MOST = 40; // forward passes on the axis of time

const NAMES = {
  nothing: t`nothing`,
  tapes: t`tapes`,
  checkpoints: t`checkpoints`,
};

// ---- numbers -------------------------------------------------------------

/* F and B. */
function speeds({ tables, machine, busy, full }) {
  const [, flops, link] = tables.machines.find(([name]) => name === machine);
  return { flops: (busy / 100) * flops, link: (full / 100) * link };
}

/* Bytes that a block keeps for each token and unit of width. */
const coefficient = ({ tables }, what) =>
  tables.kept.find(([name]) => name === what)[1];

/* A block's seconds and bytes; `again` are those of a second run. */
function blockOf(state, what) {
  const { width, tokens } = state;
  const work = (24 * width ** 2 + 4 * tokens * width) * tokens;
  const size = (kept) => kept * width * tokens;
  const kept = size(coefficient(state, what));
  return {
    forward: work / speeds(state).flops,
    kept,
    again: size(coefficient(state, "nothing")) - kept,
  };
}

/** Who computes and who copies when, as lanes of membudget.offloading, for
    `count` equal blocks. In `moments` are the bytes on the card: kept, and
    made again. */
export function lanes({ forward, kept, again }, count, link) {
  const [compute, copies, changes] = [[], [], []];
  const [left, there] = [[], []]; // when copies are over
  let [now, free, waited] = [0, 0, 0];
  const wait = (until = 0) => {
    waited += Math.max(until - now, 0);
    now = Math.max(now, until);
  };
  const run = (block, kind, seconds) => {
    compute.push({ block, kind, start: now, end: now + seconds });
    now += seconds;
  };
  const copy = (block, kind) => {
    const start = Math.max(now, free);
    free = start + kept / link;
    copies.push({ block, kind, start, end: free });
    return copies.at(-1);
  };
  for (let i = 0; i < count; i += 1) {
    if (i > 1) wait(left[i - 2]);
    changes.push([now, kept, 0]);
    run(i, "forward", forward);
    if (!link || i === count - 1) continue;
    left[i] = copy(i, "out").end;
    changes.push([left[i], -kept, 0]);
  }
  for (let i = count - 1; i >= 0; i -= 1) {
    wait(there[i]);
    if (link && i) {
      const { start, end } = copy(i - 1, "back");
      there[i - 1] = end;
      changes.push([start, kept, 0]);
    }
    changes.push([now, 0, again]);
    if (again) run(i, "recomputation", forward);
    run(i, "backward", 2 * forward);
    changes.push([now, -kept, -again]);
  }
  return { compute, copies, waited, time: now, moments: added(changes) };
}

/* From when on how much is there. */
function added(changes) {
  const moments = new Map();
  const now = { kept: 0, again: 0 };
  for (const [moment, kept, again] of changes.sort(([a], [b]) => a - b)) {
    now.kept += kept;
    now.again += again;
    moments.set(moment, { moment, ...now });
  }
  return [...moments.values()];
}

/** What each choice makes of the settings: seconds, bytes and a width. */
export function describe(state) {
  const { flops, link } = speeds(state);
  const { kept, blocks } = state.tables;
  const of = (what) => {
    const block = blockOf(state, what);
    const moves = what !== "nothing";
    const run = lanes(block, blocks, moves ? link : 0);
    const ratio = (coefficient(state, what) * flops) / link;
    return {
      ...run,
      forward: block.forward,
      copy: moves ? block.kept / link : 0,
      moved: moves ? (blocks - 1) * block.kept : 0,
      peak: Math.max(...run.moments.map(({ kept, again }) => kept + again)),
      least: Math.max(0, (ratio - 4 * state.tokens) / 24),
    };
  };
  return Object.fromEntries(kept.map(([what]) => [what, of(what)]));
}

// ---- words ---------------------------------------------------------------

/* "11.2 ms" */
function timeText(seconds) {
  const [unit, factor] =
    seconds >= 1 ? ["s", 1] : seconds >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
  return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
}

/* How much longer it takes. */
function slower(time, plain) {
  const share = 100 * (time / plain - 1);
  if (share < 1e-6) return t`forward and backward take no longer`;
  if (share < 0.5) return t`forward and backward take less than 1 % longer`;
  return t`forward and backward take ${Math.floor(share + 0.5)} % longer`;
}

/* "from a width of 9 623 on" */
function fromWidth(least) {
  const width = Math.ceil(least - 1e-6);
  if (width < 1) return t`at any width`;
  return t`from a width of ${grouped(width)} on`;
}

const modelOf = ({ tables, width }) =>
  tables.models.find(([, its]) => its === width)?.[0];

/* "4 096, as Llama 3 8B" */
function widthText(state) {
  const model = modelOf(state);
  const width = grouped(state.width);
  return model ? t`${width}, as ${model}` : width;
}

/** The key numbers in words. */
export function sentence(state) {
  const { what } = state;
  const all = describe(state);
  const { nothing: plain, tapes, checkpoints } = all;
  const whole = formatBytes(plain.peak);
  if (what === "nothing") {
    return t(
      "Nothing moves: the eight tapes take {0} on the card. On this one, " +
        "copies of tapes hide {1}, those of checkpoints {2}.",
      ...[whole, fromWidth(tapes.least), fromWidth(checkpoints.least)],
    );
  }
  const { waited, time, peak, least } = all[what];
  let took = slower(time, plain.time);
  if (what === "checkpoints") {
    took = waited
      ? t`${took}, of which 33 % are the second forward pass,`
      : t`${took}, which is the second forward pass,`;
  }
  const keep = [took, formatBytes(peak), whole];
  const told = waited
    ? [
        t("The copies stick out: {0} and keep {1} in place of {2}.", ...keep),
        t`On this card they hide ${fromWidth(least)}.`,
      ]
    : [
        t("The copies hide: {0} and keep {1} in place of {2}.", ...keep),
        t`On this card they do ${fromWidth(least)}.`,
      ];
  return told.join(t` `);
}

// ---- geometry ------------------------------------------------------------

const LANE = { compute: 20, link: 70, tall: 28, half: 16 };

/* The pieces of a lane that can be seen. */
const seen = (pieces, x) =>
  pieces
    .map(({ start, end, ...piece }) => ({ ...piece, ...span(start, end, x) }))
    .filter(({ width }) => width > 0);

function span(start, end, x) {
  return { x: x(start), width: x(end) - x(start) };
}

/* What lies between the pieces of a lane. */
const gaps = (pieces) =>
  pieces
    .slice(1)
    .map(({ start }, i) => ({ start: pieces[i].end, end: start }))
    .filter(({ start, end }) => end - start > 1e-9 * end);

/* The stairs of the bytes on the card: their edges, and two heights. */
function memory({ moments, time }, x, y) {
  const shown = moments.filter(({ moment }) => x(moment) < x(Infinity));
  return {
    edges: [...shown.map(({ moment }) => x(moment)), x(time)],
    floor: shown.map(() => y(0)),
    kept: shown.map(({ kept }) => y(kept)),
    all: shown.map(({ kept, again }) => y(kept + again)),
  };
}

/** Where everything stands: times are in forward passes of a block and bytes
    in its tapes, so that no axis moves. */
export function layout(state, width) {
  const n = describe(state);
  const run = n[state.what];
  const { forward } = n.nothing;
  const count = state.tables.blocks;
  const tape = n.nothing.peak / count;
  const plot = { left: 40, right: width - 6, top: 142, bottom: 246 };
  const wide = plot.right - plot.left;
  const x = (seconds) =>
    plot.left + (Math.min(seconds / forward, MOST) * wide) / MOST;
  const y = (bytes) =>
    plot.bottom - ((bytes / tape) * (plot.bottom - plot.top)) / (count + 0.5);
  const across = (h) => plot.left + (Math.min(h, WIDEST) * wide) / WIDEST;
  const marks = [0, 2, 4, 6, 8].map((n) => ({ label: `${n}`, y: y(n * tape) }));
  const ruler = plot.bottom + 92;
  const timeWords = (n) => {
    if (n === MOST) return t`${n} passes`;
    return wide < 400 && n === 32 ? "" : `${n}`;
  };
  const hide = {
    tapes: t`tapes hide ${fromWidth(n.tapes.least)}`,
    checkpoints: t`checkpoints hide ${fromWidth(n.checkpoints.least)}`,
  };
  return {
    ...{ n, run, plot, tape, x, width },
    compute: seen(run.compute, x),
    waits: seen(gaps(run.compute), x),
    copies: seen(run.copies, x),
    beyond: run.time / forward > MOST,
    end: x(run.time),
    unhindered: x(run.time - run.waited),
    memory: memory(run, x, y),
    marks,
    whole: y(count * tape),
    times: [0, 8, 16, 24, 32, 40].map((n) => ({
      ...{ n, x: x(n * forward) },
      words: timeWords(n),
    })),
    ruler: {
      y: ruler,
      here: across(state.width),
      bars: Object.keys(hide).map((what, i) => ({
        what,
        y: ruler - 39 + 24 * i,
        x: across(n[what].least),
        words: hide[what],
      })),
      models: modelMarks(state, across, wide),
    },
    height: ruler + 26,
  };
}

/* The names that have room. */
const NAMED = {
  "Llama 3 8B": "Llama 3 8B",
  "Llama 3 405B": "405B",
  "Llama 3 70B": "70B",
  "GPT-2": "GPT-2",
  "GPT-3": "GPT-3",
};

const modelMarks = ({ tables }, across, wide) =>
  tables.models
    .filter(([name]) => NAMED[name] && (wide > 300 || name !== "GPT-2"))
    .map(([name, h]) => ({ name: NAMED[name], x: across(h) }));

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };
const BOLD = { class: "mb-value" };

const PART = {
  forward: "phase-forward",
  recomputation: "recomputation",
  backward: "phase-backward",
};
const KEPT = {
  nothing: "activations",
  tapes: "activations",
  checkpoints: "checkpoints",
};

const WAYS = { out: t`out`, back: t`back` };

/* A heading of a row: what it is, and a number at its end. */
const heading = (plot, y, name, words) => [
  text(1, y, name, BOLD),
  text(plot.right, y, words, END),
];

/* A piece, with the number of its block where it has room. */
function* drawPiece(id, part, { x, width, block }, y, height, look) {
  const wide = width > 3 ? width - 1 : width;
  yield* filled(id, part, "rect", { x, y, width: wide, height });
  const label = `${block + 1}`;
  if (LETTER * label.length + 4 > wide || part === "recomputation") return;
  const middle = y + height / 2 + 4;
  yield text(x + wide / 2, middle, label, { ...MIDDLE, class: look });
}

const lane = ({ plot }, y, height) =>
  svg("rect", {
    ...{ x: plot.left, y, width: plot.right - plot.left, height },
    class: "mb-lane",
  });

function* drawCompute(id, plan) {
  const { plot, n, run, beyond } = plan;
  const y = LANE.compute;
  const passes = formatNumber(
    Math.round((10 * run.time) / n.nothing.forward) / 10,
  );
  const ends = beyond
    ? t`ends → after ${passes} passes`
    : t`ends after ${passes} passes`;
  yield* heading(plot, y - 7, t`compute`, ends);
  yield lane(plan, y, LANE.tall);
  for (const { x, width } of plan.waits) {
    yield* filled(id, "over", "rect", { x, y, width, height: LANE.tall });
  }
  for (const piece of plan.compute) {
    const look = piece.kind === "backward" ? "mb-off" : "";
    yield* drawPiece(id, PART[piece.kind], piece, y, LANE.tall, look);
  }
  if (beyond) yield ragged(plot.right, y, LANE.tall);
}

function* drawLink(id, plan, what) {
  const { plot, run, beyond } = plan;
  const { link: y, half } = LANE;
  const words = run.copy
    ? t`pass ${timeText(run.forward)}, copy ${timeText(run.copy)}`
    : t`pass ${timeText(run.forward)}, no copy`;
  const name = plan.width < 380 ? t`link` : t`link to the host`;
  yield* heading(plot, y - 7, name, words);
  for (const [i, [way, label]] of Object.entries(WAYS).entries()) {
    const top = y + i * (half + 2);
    yield lane(plan, top, half);
    yield text(plot.left - 5, top + 12, label, END);
    for (const piece of plan.copies.filter(({ kind }) => kind === way)) {
      yield* drawPiece(id, KEPT[what], piece, top, half, "mb-on");
    }
  }
  if (beyond) yield ragged(plot.right, y, 2 * half + 2);
}

function* drawMemory(id, plan, what, before) {
  const { plot, memory, run, n } = plan;
  const most = t`at most ${formatBytes(run.peak)}`;
  yield* heading(plot, plot.top - 14, t`on the card, in tapes`, most);
  for (const { y, label } of plan.marks) {
    const name = y < plot.bottom ? "mb-grid" : "mb-axis";
    yield line(plot.left, y, plot.right, y, name);
    yield text(plot.left - 6, y + 4, label, END);
  }
  const { edges, floor, kept, all } = memory;
  yield* filled(id, KEPT[what], "path", { d: band(edges, floor, kept) });
  yield* filled(id, "recomputation", "path", { d: band(edges, kept, all) });
  yield line(plot.left, plan.whole, plot.right, plan.whole, "mb-limit");
  if (before) {
    const was = before.memory;
    yield svg("path", { d: stairs(was.edges, was.all), class: "mb-ghost" });
  }
  const { unhindered: x, end } = plan;
  yield line(x, plan.whole + 22, x, plot.bottom, "mb-leader");
  yield line(end, plot.top, end, plot.bottom, "mb-end");
  const words = t`eight tapes: ${formatBytes(n.nothing.peak)}`;
  const look = { ...END, class: "mb-halo" };
  yield text(plot.right, plan.whole + 15, words, look);
  for (const { n: passes, x: at, words: label } of plan.times) {
    yield line(at, plot.bottom, at, plot.bottom + 4, "mb-axis");
    const place = passes === MOST ? END : passes ? MIDDLE : {};
    if (label) yield text(at, plot.bottom + 17, label, place);
  }
}

/* From which width copies hide, and where we are. */
function* drawRuler(id, { plot, ruler }) {
  const { y: axis, here } = ruler;
  yield line(here, axis - 52, here, axis, "mb-here");
  for (const { what, x, y, words } of ruler.bars) {
    yield text(plot.left, y, words, { class: "mb-halo" });
    yield svg("rect", {
      ...{ x: plot.left, y: y + 4, width: plot.right - plot.left, height: 7 },
      class: "mb-lane",
    });
    const width = plot.right - x;
    const bar = { x, y: y + 4, width, height: 7 };
    yield* filled(id, KEPT[what], "rect", bar);
  }
  yield line(plot.left, axis, plot.right, axis, "mb-axis");
  yield text(plot.left - 6, axis + 4, t`width`, END);
  for (const { name, x } of ruler.models) {
    yield line(x, axis, x, axis + 5, "mb-axis");
    const last = x > plot.right - 1;
    yield text(x, axis + 19, name, last ? END : MIDDLE);
  }
  yield svg("circle", { cx: here, cy: axis, r: 7, class: "mb-handle" });
}

const draw = (id, plan, what, before) => [
  ...drawCompute(id, plan),
  ...drawLink(id, plan, what),
  ...drawMemory(id, plan, what, before),
  ...drawRuler(id, plan),
];

/* The three choices beside each other. */
function results(id, n) {
  const seconds = (key, value) => [key, value, value ? timeText(value) : "–"];
  const row = (label, key, cell) => ({
    label,
    cells: Object.entries(n).map(([what, of]) =>
      cell(`${what}.${key}`, of[key]),
    ),
  });
  const width = (key, value) => {
    const words = grouped(Math.ceil(value - 1e-6));
    return [key, value, key.startsWith("nothing") ? "–" : words];
  };
  const all = [
    row(t`forward pass of a block`, "forward", seconds),
    row(t`copy of a block`, "copy", seconds),
    row(t`forward and backward`, "time", seconds),
    row(t`of which it waits`, "waited", seconds),
    row(t`moved, each way`, "moved", byteCell),
    row(t`on the card at most`, "peak", byteCell),
    row(t`copies hide from width`, "least", width),
  ];
  const head = Object.keys(n).map((what) => NAMES[what]);
  return [table(id, [t`in the host’s memory`, ...head], all)];
}

// ---- the widget ----------------------------------------------------------

const NOTE = t(
  "Above is what the card computes, below what its link to the host copies " +
    "meanwhile; the numbers are those of the blocks. A copy out begins when " +
    "the block’s forward pass is over and the link is free. A copy back " +
    "begins with the backward pass of the block above. Two blocks’ tapes or " +
    "checkpoints are on the card at a time, so who is ahead waits. The last " +
    "block’s stays. Time is counted in forward passes of a block and memory " +
    "in its tapes, so that the axes stay: a wider block takes longer, and " +
    "its copy less of that time. The dashed line is all eight tapes. Blocks " +
    "are GPT’s, in 16 bits and with fused attention: 24·h² + 4·T·h FLOPs " +
    "for a token, 32·h bytes of tape, 2·h of a checkpoint. The micro-batch " +
    "is one sequence. Cards sustain 40 % of their data sheet’s FLOP/s and " +
    "links 80 % of their bytes/s, unless you say otherwise; nothing was " +
    "measured. The models’ names stand for their widths.",
);

const LEGEND = {
  "phase-forward": t`forward`,
  recomputation: t`made again`,
  "phase-backward": t`backward`,
  over: t`waits for the link`,
  activations: t`tape`,
  checkpoints: t`checkpoint`,
};

function build({ id, get, set, bound, picture }) {
  const { machines, kept } = get().tables;
  const choices = kept.map(([name]) => name);
  const options = choices.map((name) => NAMES[name]);
  const choose = (value) => choices.includes(value) && set({ what: value });
  const what = {
    ...radios({
      ...{ label: t`In the host’s memory`, key: "what" },
      onChange: (words) => choose(choices[options.indexOf(words)]),
    }),
    held: () => get().what, // a link is the same in every language
    enter: choose,
  };
  const width = slider({
    ...{ label: t`Width`, key: "width" },
    onInput: (value) => set({ width: value * STEP }),
  });
  const machine = bound(choice, t`Card`, "machine", {
    options: machines.map(([name]) => name),
  });
  const tokens = slider({
    ...{ label: t`Tokens of the sequence`, key: "tokens", min: 10 },
    onInput: (value) => set({ tokens: 2 ** value }),
  });
  const share = (label, key) =>
    slider({ label, key, min: 10, onInput: (value) => set({ [key]: value }) });
  const busy = share(t`Sustained of the card’s FLOP/s`, "busy");
  const full = share(t`Sustained of the link’s bytes/s`, "full");

  let plan; // as it is drawn
  drag(picture, {
    grab: ({ y }) => (y > plan.ruler.y - 50 ? true : null),
    move({ x }) {
      const { left, right } = plan.plot;
      const at = ((x - left) / (right - left)) * (WIDEST / STEP);
      const steps = Math.min(Math.max(Math.round(at), 1), WIDEST / STEP);
      set({ width: steps * STEP });
    },
    drop: () => width.focus(),
  });

  const draw_ = (state, size, before) => {
    plan = layout(state, size);
    const { flops, link } = speeds(state);
    const words = widthText(state);
    let spoken = words;
    if (state.what !== "nothing") {
      spoken = plan.run.waited
        ? t`${words}: the copies stick out`
        : t`${words}: the copies hide`;
    }
    what.update({ value: NAMES[state.what], options });
    width.update({
      ...{ value: state.width / STEP, max: WIDEST / STEP, text: words },
      spoken,
    });
    tokens.update({
      ...{ value: Math.log2(state.tokens), max: 17 },
      ...{ text: grouped(state.tokens), spoken: String(state.tokens) },
    });
    const shares = [
      [busy, state.busy, `${formatNumber(flops / 1e12)} TFLOP/s`],
      [full, state.full, `${formatNumber(link / 1e9)} GB/s`],
    ];
    for (const [control, value, speed] of shares) {
      const told = t`${value} %: ${speed}`;
      control.update({ value, max: 100, text: told, spoken: told });
    }
    return {
      title: t`Compute and copy, side by side`,
      sentence: sentence(state),
      height: plan.height,
      drawn: draw(id, plan, state.what, before && layout(before, size)),
      numbers: results(id, plan.n),
    };
  };
  return {
    controls: [what, width, machine],
    more: [tokens, busy, full],
    legend: legend(id, LEGEND, t`dotted: the end without waiting`),
    note: html("p", { class: "mb-note" }, NOTE),
    draw: draw_,
  };
}

const keys = ["what", "width", "machine", "tokens", "busy", "full", "tables"];

export default widget({ name: "offloading", keys, build });
