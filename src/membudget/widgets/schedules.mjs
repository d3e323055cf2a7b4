import {
  axes,
  budgetLine,
  button,
  celebrate,
  dot,
  drag,
  field,
  filled,
  heights,
  html,
  legend,
  line,
  numberList,
  plural,
  radios,
  remember,
  remembered,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";
import {
  PARTS,
  TIME,
  chooser,
  deed,
  drawStep,
  extraTime,
  heldAt,
  momentAt,
  peakOf,
  peakPlace,
  shownOf,
  simulate,
  stepLayout,
  sum,
} from "./tape.mjs";

/* A game: the player draws the segments of a chain, and wins medals with a
   low peak and few extra runs. Who wins one has won those before it as well.

   spansOf(segments), nested(length, spans): segments as pairs of stages.
   describe(state): the numbers. layout(state, width): where all stands. */

// ---- segments ------------------------------------------------------------

/** The segments, an outer one before those within: its first and last stage,
    and how high it stands above the strip. */
export function spansOf(segments) {
  return segments.filter(Array.isArray).flatMap((item) => {
    const stages = item.flat(Infinity);
    const inner = spansOf(item);
    const height = 1 + Math.max(0, ...inner.map(({ height }) => height));
    return [{ from: stages[0], to: stages.at(-1), height }, ...inner];
  });
}

/** Segments from their spans, none of which crosses another. */
export function nested(length, spans) {
  const order = [...spans].sort((a, b) => a.from - b.from || b.to - a.to);
  const fill = (from, to) => {
    const result = [];
    for (let stage = from; stage <= to; ) {
      const inner = order[0]?.from === stage && order[0].to <= to;
      const span = inner ? order.shift() : null;
      result.push(span ? fill(span.from, span.to) : stage);
      stage = (span?.to ?? stage) + 1;
    }
    return result;
  };
  return fill(0, length - 1);
}

/** The span that crosses this one, if there is one. */
export const crossed = (spans, { from, to }) =>
  spans.find(
    (one) =>
      (one.from < from && from <= one.to && one.to < to) ||
      (from < one.from && one.from <= to && to < one.to),
  );

/** The segments as text: "0-5.0-2.3-5". */
export const written = (segments) =>
  spansOf(segments)
    .map(({ from, to }) => `${from}-${to}`)
    .join(".");

/** The segments that a text means, or undefined. */
export function read(words, length) {
  const spans = [];
  for (const word of words.split(/[.,;\s]+/).filter(Boolean)) {
    const [all, first, last] = word.match(/^(\d{1,3})(?:-(\d{1,3}))?$/) ?? [];
    const span = { from: Number(first), to: Number(last ?? first) };
    const fits = all && span.from <= span.to && span.to < length;
    if (!fits || crossed(spans, span)) return undefined;
    spans.push(span);
  }
  return nested(length, spans);
}

const same = (one, other) => one.from === other.from && one.to === other.to;

/** The segments after one was drawn: a new one, or a stage alone that was
    one already is none any more; null where it cannot be. */
export function drawn(length, segments, span) {
  const spans = spansOf(segments);
  const twin = spans.findIndex((one) => same(one, span));
  if (crossed(spans, span)) return null;
  if (twin < 0) return nested(length, [...spans, span]);
  return span.from === span.to ? without(length, segments, span) : null;
}

const without = (length, segments, span) =>
  nested(length, spansOf(segments).filter((one) => !same(one, span)));

// ---- numbers -------------------------------------------------------------

/** What the segments cost, and what they win. */
export function describe({ level, segments, tables }) {
  const { stages, frontier, medals } = tables[level];
  const length = stages.length;
  // while a kernel changes both, they may not fit for an instant
  const fits = segments.flat(Infinity).length === length;
  const ours = fits ? segments : nested(length, []);
  const moments = simulate(stages, ours);
  const plain = simulate(stages, nested(length, []));
  const [peak, extra] = [peakOf(moments), extraTime(stages, moments)];
  const runs = stages.map(() => 0);
  for (const { kind, stage } of moments) {
    if (kind === "forward" || kind === "record") runs[stage] += 1;
  }
  const most = Math.max(...runs);
  const place = peakPlace(moments);
  return {
    ...{ level, stages, length, frontier, medals, moments, place },
    ...{ peak, segments: ours, spans: spansOf(ours), most_extra: most - 1 },
    plain_peak: peakOf(plain),
    extra_time: extra,
    extra_runs: sum(runs) - length,
    forward: sum(stages.map((stage) => stage[TIME])),
    parts: shownOf(moments)[place],
    plain_parts: shownOf(plain)[peakPlace(plain)],
    optimal: frontier.some(([p, time]) => p === peak && time === extra),
    won: medals
      .filter((m) => peak <= m.peak && extra <= m.extra)
      .map(({ name }) => name),
  };
}

/* A time: in extra runs, or for the boss in forward passes. */
const boss = ({ level }) => level === "boss";
const timeText = (n, time) =>
  String(boss(n) ? Number((time / n.forward).toFixed(3)) : time);

const extraText = (n) =>
  boss(n)
    ? t`${timeText(n, n.extra_time)} extra passes`
    : plural(n.extra_time, "extra run");

/* "8 u, 12 extra runs", with arrows where it is beyond the axes. */
const score = (n, { up, right }) => {
  const peak = t`${n.peak} u` + (up ? " ↑" : "");
  return t`${peak}, ${extraText(n) + (right ? " →" : "")}`;
};

/** "16 stages: 7 units, 14 runs, silver" */
export function result(n) {
  const [peak, time] = [plural(n.peak, "unit"), timeText(n, n.extra_time)];
  const of = boss(n) ? t`The boss` : nameOf(n.level);
  let told = t`${peak}, ${time} runs`;
  if (time === "1") told = t`${peak}, 1 run`;
  if (boss(n)) told = t`${peak}, ${time} passes`;
  const won = n.won.slice(-1).map((name) => t(name));
  const all = [told, ...won].join(t`, `);
  return t`${of}: ${all}`;
}

/* What a medal asks for beside its peak, from long to short. */
function asked(n, { extra }) {
  const time = timeText(n, extra);
  const all = boss(n) ? t`≤ ${time} extra passes` : t`≤ ${time} extra runs`;
  return [all, t`≤ ${time} extra`, `≤ ${time}`];
}

/** The score in words, and the next goal for who had so many medals. */
export function sentence(n, had = 0) {
  const best = n.won.at(-1);
  const [peak, extra] = [plural(n.peak, "unit"), extraText(n)];
  const said = [
    best
      ? t`The peak is ${peak} with ${extra}: ${t(best)}.`
      : t`The peak is ${peak} with ${extra}.`,
  ];
  const next = n.medals[Math.max(had, n.won.length)];
  if (next) {
    const name = t(next.name);
    const missed = [
      ...(n.peak > next.peak ? [t`≤ ${next.peak} units`] : []),
      ...(n.extra_time > next.extra ? asked(n, next).slice(0, 1) : []),
    ].join(t`, `);
    const deep = next.name === "platinum" || next.peak < n.medals[1].peak;
    said.push(
      deep && n.most_extra < 2
        ? t`Next, ${name}: ${missed} (nest deeper).`
        : t`Next, ${name}: ${missed}.`,
    );
  }
  if (had === n.medals.length) {
    said.push(t`All medals of this level are yours.`);
  }
  return said.join(t` `);
}

const stagesOf = ({ from, to }) =>
  from === to ? t`Stage ${from}` : t`Stages ${from} to ${to}`;

/* Why a segment cannot be drawn, or null: it crosses another, or is there. */
function refusal({ length, segments, spans }, span) {
  if (drawn(length, segments, span)) return null;
  const other = crossed(spans, span);
  const words = other
    ? t(
        "{0} would cross the segment {1} to {2}: segments nest or stand " +
          "side by side.",
        ...[stagesOf(span), other.from, other.to],
      )
    : t`${stagesOf(span)} are a segment: click its bar to remove it.`;
  return { words, wrong: true };
}

/* Where a level's numbers come from, and what to beat. */
function about(n) {
  const [cut, best] = n.medals.slice(-2).map((m) => timeText(n, m.extra));
  return boss(n)
    ? t(
        "The {0} stages are the attention and MLP halves of {1} GPT blocks; " +
          "a unit is a block’s input, a pass the forward FLOPs of all. Gold " +
          "is the best without nesting, {2} extra passes; the optimum is {3}.",
        ...[n.length, n.length / 2, cut, best],
      )
    : t(
        "A unit is one stage’s output. Equal segments reach bronze, " +
          "segments side by side silver, only nested ones gold; platinum is " +
          "the optimum.",
      );
}

// ---- geometry ------------------------------------------------------------

/* Heights of what stands in the picture, and the least width of a cell: on a
   phone that of a finger. */
const BOTH = { bars: 2, medals: 102 };
const WIDE = { ...BOTH, cells: 56, tall: 36, height: 370, least: 0 };
const NARROW = { ...BOTH, cells: 58, tall: 34, height: 488, least: 22 };

/* The axes of the memory and of the score: beside or below each other. */
function plots(width) {
  const [left, right, half] = [34, width - 10, Math.round(width / 2)];
  const plot = ([left, right, top, bottom]) => ({ left, right, top, bottom });
  const narrow = [[left, right, 212, 300], [left, right, 360, 450]];
  const wide = [[left, half - 14, 182, 332], [half + 26, right, 182, 332]];
  return (width < 480 ? narrow : wide).map(plot);
}

/** Geometry of the picture, in pixels: the strip below its segments, the
    medals, the memory at every moment, and the plane of the score. The axes
    follow from the level alone. Where the strip is longer than the picture,
    `pan` pixels of it are beyond the left edge. */
export function layout(state, width, moment = null, before = null, pan = 0) {
  const n = describe(state);
  const form = width < 480 ? NARROW : WIDE;
  const [step, plane] = plots(width);
  const top = Math.min(boss(n) ? 45 : 25, n.plain_peak);
  const axis = heights(step, top, t`units`);
  const y = (plot) => (size) => Math.max(heights(plot, top).y(size), plot.top);
  const old = before && describe(before);
  const at = Math.min(moment ?? n.place, n.moments.length - 1);
  return {
    ...{ n, width, form, axis, at, moment, height: form.height },
    strip: stripLayout(n, at, width, form, pan),
    step: stepLayout(n.moments, step, y(step)),
    plane: planeLayout(n, plane, top, y(plane)),
    ghost: before && {
      ...stepLayout(old.moments, step, y(step)),
      ...planeLayout(old, plane, top, y(plane)).now,
    },
  };
}

/* The cells at a moment, and the bars of the segments above them. */
function stripLayout(n, at, width, { bars, cells, least }, pan) {
  const room = width - 4;
  const wide = Math.max(room / n.length, least);
  const more = Math.max(n.length * least - room, 0); // of what can be seen
  const gone = Math.min(Math.max(pan, 0), more);
  const { holds, kept, running } = heldAt(n.moments, at, n.length);
  const x = (stage) => 2 + stage * wide - gone;
  const deepest = Math.max(1, ...n.spans.map(({ height }) => height));
  const step = Math.min(18, (cells - bars - 4) / deepest);
  return {
    ...{ wide, x, room, more, gone },
    cells: holds.map((part, i) => {
      return { part, x: x(i), runs: i === running };
    }),
    bars: n.spans.map((span) => ({
      ...{ span, x: x(span.from), height: Math.max(step - 3, 2) },
      width: (span.to - span.from + 1) * wide,
      y: cells - 4 - span.height * step,
      kept: !span.from || kept.has(span.from), // the input is always there
    })),
  };
}

function planeLayout(n, plot, top, y) {
  const most = 1.12 * Math.max(...n.medals.map(({ extra }) => extra));
  const [first, room] = [plot.left + 10, plot.right - plot.left - 10];
  const x = (time) => first + Math.min(time / most, 1) * room;
  const points = n.frontier
    .filter(([peak, time]) => peak <= top && time <= most)
    .map(([peak, time]) => {
      return { key: `${peak} ${time}`, x: x(time), y: y(peak) };
    })
    .reverse(); // from few extra runs to many
  return {
    ...{ plot, points },
    axis: heights(plot, top, t`peak`),
    now: { x: x(n.extra_time), y: y(n.peak) },
    cut: { up: n.peak > top, right: n.extra_time > most },
    goals: n.medals.map((m) => ({ ...m, x: x(m.extra), y: y(m.peak) })),
    ticks: [0, 0.5, 1, 1.5, 2].flatMap((share) => {
      const time = Math.floor(share * n.forward);
      const label = String(boss(n) ? share : time);
      return time <= most ? [{ x: x(time), label }] : [];
    }),
  };
}

const inside = (value, most) => Math.min(Math.max(Math.floor(value), 0), most);

/** The stage at a place in the strip. */
export const stageAt = ({ strip, n }, x) =>
  inside((x - strip.x(0)) / strip.wide, n.length - 1);

/** How far the strip has to be moved for a stage to be seen with its
    neighbours. */
export function revealed({ strip }, stage) {
  const { wide, room, gone } = strip;
  const least = (stage + 2) * wide - room;
  return Math.min(Math.max(gone, least), (stage - 1) * wide);
}

/** The bar at a place, the innermost of those that are near. */
export const barAt = ({ strip }, { x, y }) =>
  strip.bars.findLast(
    (bar) =>
      Math.abs(x - bar.x - bar.width / 2) <= bar.width / 2 &&
      Math.abs(y - bar.y - bar.height / 2) <= bar.height / 2 + 2,
  );

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

/* How many medals stand up to the one of a name. */
const rankOf = ({ medals }, name) =>
  1 + medals.findIndex((medal) => medal.name === name);

const fits = (words, width) => wideOf(words) <= width;
const fitting = (all, width) => all.find((w) => fits(w, width)) ?? all.at(-1);

const didAt = ({ moments }, at) =>
  deed(moments[at], t`stage ${moments[at].stage}`);

/* What is done, where there is less room. */
const KINDS = {
  forward: t`forward`,
  record: t`record`,
  keep: t`keep`,
  drop: t`drop`,
  backward: t`backward`,
};

function* drawStrip(id, plan, mark) {
  const { strip, form } = plan;
  const { bars, cells: top, tall } = form;
  const room = { x: 3, y: bars, width: plan.width - 6, height: top - bars - 4 };
  yield svg("rect", { ...room, rx: 4, class: "mb-tray" });
  if (!strip.bars.length) {
    const words = t`Drag across the cells: they become a segment`;
    const look = { ...MIDDLE, class: "mb-value" };
    yield text(plan.width / 2, (top + bars) / 2 + 2, words, look);
  }
  for (const { span, x, y, width, height, kept } of strip.bars) {
    const key = `${span.from}-${span.to}`;
    const box = { x: x + 1, y, width: width - 3, height, rx: 4 };
    yield svg("rect", { ...box, class: "mb-bar", "data-span": key });
    const knob = { ...box, width: Math.min(strip.wide - 3, 14) };
    const middle = knob.x + knob.width / 2;
    yield line(middle, y + height, middle, top, "mb-grid");
    yield svg("rect", { ...knob, class: "mb-knob" });
    if (kept) yield* filled(id, "checkpoints", "rect", knob);
  }
  for (const [i, { part, x, runs }] of strip.cells.entries()) {
    const wide = strip.wide - 2;
    const box = { x: x + 1, y: top, width: wide, height: tall, rx: 3 };
    yield svg("rect", { ...box, class: "mb-cell" });
    if (part) yield* filled(id, part, "rect", box);
    if (runs) yield svg("rect", { ...box, class: "mb-runs" });
    const look = { ...MIDDLE, class: "mb-halo" };
    const some = i % 5 === 0 && i < strip.cells.length - 1;
    if (!some && !fits("00", wide - 2)) continue;
    const middle = x + strip.wide / 2;
    const seen = middle > 8 && middle < plan.width - 8;
    if (seen) yield text(middle, top + tall / 2 + 4, String(i), look);
  }
  if (strip.more) yield* drawPan(plan);
  if (!mark) return;
  const width = (mark.to - mark.from + 1) * strip.wide;
  const { from, to } = mark;
  const words = from < to ? t`${from} to ${to}` : from;
  const middle = strip.x(mark.from) + width / 2;
  const x = Math.min(Math.max(middle, 28), plan.width - 28);
  yield text(x, bars + 14, words, { ...MIDDLE, class: "mb-value mb-halo" });
  yield svg("rect", {
    ...{ x: strip.x(mark.from), y: top - 3, width, height: tall + 6, rx: 5 },
    class: mark.wrong ? "mb-mark mb-cross" : "mb-mark",
  });
}

/* Which part of the strip is seen. */
function* drawPan({ strip: { room, more, gone }, form }) {
  const box = { x: 2, y: form.cells + form.tall + 3, height: 5, rx: 2.5 };
  const share = room / (room + more);
  yield svg("rect", { ...box, width: room, class: "mb-tray" });
  const part = { ...box, x: 2 + gone * share, width: room * share };
  yield svg("rect", { ...part, class: "mb-pan" });
}

function* drawMedals({ n, width, form }, had) {
  const room = width / n.medals.length;
  const wide = room > 165;
  const r = wide ? 17 : 11;
  const y = form.medals + r + 8;
  for (const [i, medal] of n.medals.entries()) {
    const { name, peak } = medal;
    const x = i * room + r + 6;
    const now = n.won.includes(name);
    const look = i < had ? "mb-had" : "";
    const d = `M${x - 12} ${y - r - 7}h24l-8 12h-8Z`;
    yield svg("path", { d, class: "mb-ribbon" });
    yield dot({ x, y }, `mb-medal mb-${name} ${look}`, r);
    if (now) yield text(x, y + 5, "✓", { ...MIDDLE, class: "mb-won" });
    const [left, top] = wide ? [x + r + 8, y - 8] : [x - r, y + r + 15];
    const long = wide ? room - 2 * r - 14 : room - 6;
    yield text(left, top, t(name), { class: "mb-value" });
    yield text(left, top + 14, t`≤ ${peak} units`);
    yield text(left, top + 28, fitting(asked(n, medal), long));
  }
}

function* drawMemory(id, { n, step, axis, at, ghost, moment }, goal) {
  const { plot } = step;
  const reached = moment === null ? n.moments.length : at + 1;
  yield* drawStep(id, { step, axis, at, reached, before: ghost });
  const y = axis.y(goal.peak);
  yield* budgetLine(id, plot, y, n.peak > goal.peak);
  const look = { ...END, class: "mb-value mb-halo" };
  const limit = t`${t(goal.name)}: ${goal.peak} u`;
  yield text(plot.right - 2, y - 5, limit, look);
  const count = n.moments.length;
  const told = (words) => t`${at + 1} of ${count}: ${words}`;
  const did = didAt(n, at);
  const x = plot.left + 22;
  const all = [told(did), did, told(KINDS[n.moments[at].kind])];
  const words = fitting(all, plot.right - x);
  yield text(x, plot.top - 11, words, { class: "mb-value" });
}

function* drawPlane({ n, plane, step, ghost, width }, goal, scores) {
  const { plot, axis, points, now, goals, ticks } = plane;
  yield* axes(plot, axis);
  for (const { x, label } of ticks) {
    yield text(x, plot.bottom + 17, label, MIDDLE);
  }
  const unit = boss(n) ? t`extra passes` : t`extra runs`;
  yield text(plot.right, plot.bottom + 33, unit, END);
  const steps = points.map(({ x, y }) => `H${x.toFixed(1)}V${y.toFixed(1)}`);
  const d = `M${plot.left} ${plot.top}${steps.join("")}H${plot.right}`;
  const below = `${d}V${plot.bottom}H${plot.left}Z`;
  yield svg("path", { d: below, class: "mb-never" });
  const { x, y } = goals[n.medals.indexOf(goal)];
  const area = { x: plot.left, y, width: x - plot.left };
  const look = `mb-goal mb-${goal.name}`;
  yield svg("rect", { ...area, height: plot.bottom - y, class: look });
  yield svg("path", { d, class: "mb-frontier" });
  for (const point of points) {
    const had = scores.has(point.key);
    const r = had ? 4 : Math.min(2.5, 40 / points.length);
    yield dot(point, had ? "mb-reached" : "mb-faint", r);
  }
  for (const [i, { name, x, y }] of goals.entries()) {
    const near = (other) => Math.hypot(other.x - x, other.y - y) < 8;
    const r = 7 + 5 * goals.slice(i + 1).filter(near).length; // around those
    const d = `M${x} ${y - r}l${r} ${r}l${-r} ${r}l${-r} ${-r}Z`;
    yield svg("path", { d, class: `mb-medal mb-had mb-${name}` });
  }
  const { peak } = step;
  if (width >= 480) yield line(peak.x, peak.y, now.x, now.y, "mb-leader");
  if (ghost) yield dot(ghost, "mb-ghost", 6);
  yield dot(now, "mb-now", 8);
  const big = { ...END, class: "mb-value mb-big" };
  yield text(plot.right, plot.top - 11, score(n, plane.cut), big);
}

function results(id, n) {
  const { parts, plain_parts: plain } = n;
  const cells = (key, ours, bare) => [[key, ours], [`plain_${key}`, bare]];
  const rows = Object.entries(PARTS).map(([part, label]) => {
    const both = cells(`parts.${part}`, parts[part], plain[part]);
    return { part, label, cells: both };
  });
  const peaks = cells("peak", n.peak, n.plain_peak);
  const total = { sum: true, label: t`peak`, cells: peaks };
  const head = [t`units at the peak`, t`yours`, t`no segments`];
  const passes = (n.extra_time / n.forward).toFixed(3);
  const won = n.won.map((name) => t(name)).join(t`, `);
  return [
    table(id, head, [...rows.reverse(), total]),
    numberList([
      [t`extra runs`, "extra_runs", n.extra_runs],
      [t`most extra runs of one stage`, "most_extra", n.most_extra],
      [t`extra forward passes`, "extra_time", n.extra_time, passes],
      [t`medals`, "won", JSON.stringify(n.won), won || t`none`],
    ]),
  ];
}

const NOTE = t(
  "Drag across cells: they become a segment, whose input is kept and " +
    "whose stages are recomputed together. Drag inside a segment to nest, " +
    "around it to wrap it, on one cell for a segment of one. Click a bar to " +
    "remove it; its tile is the input, hollow while not kept. By keyboard: " +
    "arrows choose a cell, with Shift more, Enter makes a segment, Delete " +
    "removes it. A long strip moves with the space above its cells, or the " +
    "bar below. Left: the memory at every action; drag there to see each. " +
    "Right: the ring is your score, ↑ or → beyond an axis. Dots are the " +
    "best scores, yours blue. Diamonds are the medals’ limits, shaded the " +
    "next one.",
);

// ---- medals that stay ----------------------------------------------------

/* By level what this browser keeps: the best medal, or the best scores. */
const [MEDALS, SCORES] = ["mb-medals", "mb-scores"];

// ---- the widget ----------------------------------------------------------

const nameOf = (level) =>
  level === "boss" ? t`boss: a GPT` : t`${level} stages`;

function build({ id, get, set, picture, again, address }) {
  let plan;
  const count = () => plan.n.moments.length;
  const moment = chooser({ again, count, every: 160 });
  const { see, play, when } = moment;
  let draft = null; // the stages that are being marked, and `wrong`
  let spot = null; // those that the keyboard marks
  let told = null; // words instead of the score, and `wrong`
  let history = [];
  let pan = 0; // how far a long strip is moved
  let followed = null; // the stage that was last brought into view
  let creeping; // while a segment is drawn beyond the edge
  let medals = remembered(MEDALS);
  let scores = remembered(SCORES); // those on the frontier, as "peak time"
  const scoresOf = (level) => new Set([scores[level] ?? []].flat());
  const fresh = () => {
    play.stop();
    moment.at = draft = told = null;
  };
  const go = (traits, keep = true) => {
    const { level, segments } = get();
    fresh();
    if (keep) history.push({ level, segments });
    set(traits);
    again();
  };
  const had = (n) => rankOf(n, medals[n.level]);
  const collect = ({ level, peak, extra_time, optimal }) => {
    scores = { ...scores, ...remembered(SCORES) };
    if (!optimal) return;
    const all = scoresOf(level).add(`${peak} ${extra_time}`);
    remember(SCORES, Object.assign(scores, { [level]: [...all] }));
  };
  // the reader's own move: what it wins stays
  const place = (segments) => {
    const n = describe({ ...get(), segments });
    medals = { ...medals, ...remembered(MEDALS) };
    const more = n.won.slice(had(n));
    if (more.length) {
      remember(MEDALS, Object.assign(medals, { [n.level]: more.at(-1) }));
    }
    collect(n);
    go({ segments });
    celebrate(picture, more);
  };
  const mark = (span) => {
    const n = describe(get());
    fresh();
    told = refusal(n, span);
    if (told) again();
    else place(drawn(n.length, n.segments, span));
  };
  const remove = (span) => {
    const { length, segments } = describe(get());
    place(without(length, segments, span));
  };

  const enter = (name) => {
    spot = null;
    pan = 0;
    const level = name === "boss" ? name : Number(name);
    const length = get().tables[name].stages.length;
    go({ level, segments: nested(length, []) });
  };
  const level = radios({ label: t`Stages`, key: "level", onChange: enter });
  const names = Object.keys(get().tables);
  const after = () => names[1 + names.indexOf(String(get().level))];
  const onward = button({
    label: t`Next level`,
    key: "next",
    onClick: () => enter(after()),
  });
  const undo = button({
    label: t`Undo`,
    key: "undo",
    onClick: () => history.length && go(history.pop(), false),
  });
  const clear = button({
    label: t`Clear`,
    key: "clear",
    onClick: () => go({ segments: nested(plan.n.length, []) }),
  });
  const share = button({
    label: t`Share`,
    key: "share",
    async onClick() {
      const n = describe(get());
      const plan = { level: n.level, segments: written(n.segments) };
      const link = address?.link(plan) ?? "";
      const words = `${result(n)} ${link}`.trim();
      fresh();
      try {
        await navigator.clipboard.writeText(words);
        told = {
          words: link
            ? t`Copied, with a link: ${result(n)}.`
            : t`Copied: ${result(n)}.`,
        };
      } catch {
        prompt(t`To share:`, words);
      }
      again();
    },
  });
  const all = [play.root, undo.root, clear.root, share.root];
  const buttons = { root: html("div", { class: "mb-buttons" }, ...all) };
  const typed = field({
    label: t`Segments, by first and last stage`,
    key: "segments",
    how: t`use its stages, such as 0-5.0-2.3-5; none may cross another`,
    write: (words) => words,
    read(words) {
      const found = read(words, describe(get()).length);
      return found && written(found);
    },
    onChange: (words) => place(read(words, describe(get()).length)),
  });
  typed.held = () => written(describe(get()).segments);
  typed.enter = (given) => {
    const segments = read(given, describe(get()).length);
    if (!segments) return;
    go({ segments }, false);
    const n = describe(get());
    if (n.won.length <= had(n)) return; // maybe the reader's own
    told = {
      words: t(
        "This plan came with the link. {0}. Clear it, and win that yourself.",
        result(n),
      ),
    };
  };
  const forget = button({
    label: t`Forget them`,
    key: "forget",
    onClick() {
      [medals, scores] = [{}, {}];
      remember(MEDALS, medals);
      remember(SCORES, scores);
      again();
    },
  });
  const tally = html("span");
  const mine = html("p", { class: "mb-tally" }, tally, forget.root);

  const words = html("p", { class: "mb-about" });
  picture.tabIndex = 0;
  picture.dataset.lmSuppressShortcuts = true;
  picture.addEventListener("mousedown", (event) => event.preventDefault());
  picture.addEventListener("keydown", (event) => {
    const { length, spans } = plan.n;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const { from, to } = spot ?? { from: 0, to: 0 };
    if (step) {
      const more = event.shiftKey;
      const edge = step < 0 && !more ? from : to;
      const next = inside(edge + (spot ? step : 0), length - 1);
      const first = more ? from : next;
      spot = { from: first, to: Math.max(first, next) };
      fresh();
      told = {
        words: t`${stagesOf(spot)}: Enter makes a segment, Delete removes it.`,
      };
    } else if (event.key === "Enter" && spot) mark(spot);
    else if (/^(Delete|Backspace)$/.test(event.key) && spot) {
      const span = spans.findLast((s) => s.from <= from && to <= s.to);
      if (span) remove(span);
    } else return;
    event.preventDefault();
    again();
  });
  const shift = (to) => {
    pan = to;
    again();
  };
  // what is marked from the stage that is held to where the pointer is
  const stretch = ({ from: one, x }) => {
    const [from, to] = [one, stageAt(plan, x)].sort((a, b) => a - b);
    const span = { from, to };
    if (draft && same(draft, span)) return;
    fresh();
    draft = span;
    told = refusal(describe(get()), span);
    again();
  };
  const creep = (held) => {
    const way = (held.x > plan.width - 20) - (held.x < 20);
    if (!way || !draft || draft.from === draft.to) return;
    shift(plan.strip.gone + 7 * way);
    stretch(held);
  };
  const halt = () => clearInterval(creeping);
  picture.addEventListener("pointercancel", halt);
  drag(picture, {
    grab({ x, y }) {
      const { cells, tall } = plan.form;
      const { plot } = plan.step;
      const { more, gone, room } = plan.strip;
      draft = spot = null;
      play.stop();
      halt();
      const bar = barAt(plan, { x, y });
      if (bar) return { bar: bar.span, x, gone, speed: -1 };
      const below = more ? cells + tall : cells + tall + 10;
      if (y > cells - 6 && y < below) {
        const held = { from: stageAt(plan, x), x };
        if (more) creeping = setInterval(() => creep(held), 40);
        return held;
      }
      if (more && y < cells) return { x, gone, speed: -1 };
      if (more && y < below + 24) return { x, gone, speed: 1 + more / room };
      const step = x < plot.right + 8 && y > plot.top - 12;
      return step && y < plot.bottom + 30 ? { step } : null;
    },
    move({ x }, held) {
      if (held.step) return see(momentAt(plan.step, x));
      if (held.speed) {
        held.off ||= Math.abs(x - held.x) > 12;
        const to = held.gone + held.speed * (x - held.x);
        return held.bar && !held.off ? undefined : shift(to);
      }
      held.x = x;
      stretch(held);
    },
    drop(held) {
      halt();
      if (held.bar && !held.off) remove(held.bar);
      if (held.from !== undefined && draft) mark(draft);
    },
  });

  // beside each level, and all together
  const showMedals = () => {
    const { tables } = get();
    let count = 0;
    for (const input of level.root.querySelectorAll("input")) {
      const { value: name } = input;
      const rank = had({ level: name, medals: tables[name].medals });
      const best = tables[name].medals[rank - 1]?.name ?? "no medal";
      const won = rank ? t(best) : t`no medal`;
      input.parentElement.dataset.medal = best;
      input.setAttribute("aria-label", t`${nameOf(name)}, ${won}`);
      count += rank;
    }
    const most = sum(names.map((name) => tables[name].medals.length));
    tally.textContent =
      t`Your medals, ${count} of ${most}, stay in this browser.`;
    forget.root.disabled = !count;
  };

  const draw = (state, width, before) => {
    const now = describe(state);
    // while it is dragged, the segment is shown as if it were there
    const next = draft && drawn(now.length, now.segments, draft);
    const shown = next ? { ...state, segments: next } : state;
    const ours = before?.level === state.level ? before : null;
    const lay = () =>
      (plan = layout(shown, width, moment.at, draft ? state : ours, pan));
    const { n, at } = lay();
    const stage = moment.at === null ? undefined : n.moments[at].stage;
    const follow = stage ?? spot?.to;
    if (follow !== undefined && follow !== followed) {
      pan = revealed(plan, follow);
      lay();
    }
    followed = follow;
    const best = had(n);
    const goal = n.medals[best] ?? n.medals.at(-1);
    level.update({ value: String(state.level), options: names });
    showMedals();
    onward.root.disabled = !after();
    onward.root.classList.toggle("mb-onward", best > 0);
    undo.root.disabled = !history.length;
    clear.root.disabled = !now.spans.length;
    typed.update({ value: written(now.segments) });
    when.update({
      value: plan.at + 1,
      max: n.moments.length,
      spoken: didAt(n, plan.at),
    });
    const mark = draft ? { ...draft, wrong: told } : spot;
    words.textContent = about(n);
    return {
      title: t`Place your own checkpoints`,
      sentence: told?.words ?? sentence(n, best),
      wrong: told?.wrong,
      height: plan.height,
      drawn: [
        ...drawStrip(id, plan, mark),
        ...drawMedals(plan, best),
        ...drawMemory(id, plan, goal),
        ...drawPlane(plan, goal, scoresOf(n.level)),
      ],
      numbers: results(id, n),
    };
  };
  return {
    controls: [level, onward, buttons],
    picture: html("div", {}, picture, words),
    legend: legend(id, PARTS),
    more: [typed, when, { root: mine }],
    note: html("p", { class: "mb-note" }, NOTE),
    draw,
    stop() {
      fresh();
      halt();
      [history, spot] = [[], null];
    },
  };
}

export default widget({
  name: "schedules",
  keys: ["level", "segments", "label", "tables"],
  build,
});
