import {
  LETTER,
  axes,
  band,
  button,
  celebrate,
  checkBox,
  choice,
  dot,
  drag,
  field,
  filled,
  formatBytes,
  formatNumber,
  heights,
  html,
  legend,
  line,
  listed,
  numberList,
  percent,
  player,
  remember,
  remembered,
  slider,
  spread,
  stairs,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";

/* A pipeline's schedule in time, each rank's bytes beneath it, and a game:
   operations can be moved within their rank's row.

   replay(rows, lasts): when each operation runs, and what a rank holds.
   describe(state): the numbers. layout(state, width): where all stands. */

const DIGITS = "0123456789abcdefghijklmnopqrstuv";

// ---- orders --------------------------------------------------------------

/* An operation of a rank, from its letter: a small one is of the rank's
   second stage. */
function operation(letter, m, rank, { ranks, vshaped }) {
  const kind = letter.toUpperCase();
  const second = vshaped ? 2 * ranks - 1 - rank : ranks + rank;
  const stage = letter === kind ? rank : second;
  return { kind, stage, m, key: letter + DIGITS[m] };
}

/* Rows of letters, whose micro-batches count up, or `down` backward. A whole
   backward pass and one in two parts count together; the k-th part for the
   weights follows the k-th for the inputs. */
function counted(rows, shape, down) {
  return rows.map((row, rank) => {
    const [found, parts] = [{}, { w: [], W: [] }];
    const count = (letter) => (found[letter] = (found[letter] ?? -1) + 1);
    return [...row].map((letter) => {
      const of = { i: "b", I: "B" }[letter] ?? letter;
      let m = parts[letter] ? parts[letter].shift() : count(of);
      if (down && /b/i.test(letter)) m = shape.micro - 1 - m;
      if (letter === "I") parts.W.push(m);
      if (letter === "i") parts.w.push(m);
      return operation(letter, m, rank, shape);
    });
  });
}

/** The operations as text: "F0F1B0B1.F0B0F1B1". */
export const written = (rows) =>
  rows.map((row) => row.map(({ key }) => key).join("")).join(".");

/** The inverse, for rows of the same operations; else undefined. */
export function parse(words, base) {
  const rows = words.split(".");
  if (rows.length !== base.length) return undefined;
  const found = rows.map((row, rank) => {
    const at = new Map(base[rank].map((o) => [o.key, o]));
    const keys = row.match(/../g) ?? [];
    const whole = row.length === 2 * at.size && new Set(keys).size === at.size;
    return whole && keys.every((key) => at.has(key))
      ? keys.map((key) => at.get(key))
      : null;
  });
  return found.every(Boolean) ? found : undefined;
}

/** The rows with one operation of a rank at another place. */
export const moved = (rows, rank, from, to) =>
  rows.map((row, r) => {
    if (r !== rank) return row;
    const others = row.filter((_, i) => i !== from);
    return [...others.slice(0, to), row[from], ...others.slice(to)];
  });

// ---- time ----------------------------------------------------------------

const nameOf = (kind, { m, stage }) => t`${kind}${m} of stage ${stage}`;

/** When each operation runs, as parallelism/tables.py says; or `waits`, what
    each rank waits for, if the order cannot run: { rank, words }. */
export function replay(rows, lasts) {
  const chunks = rows.map((row) => new Set(row.map((o) => o.stage)).size);
  const last = Math.max(...rows.flat().map(({ stage }) => stage));
  const whole = new Set(rows.flat().map(({ kind }) => kind)).has("B");
  const done = new Map();
  const id = (kind, stage, m) => `${kind} ${stage} ${m}`;
  const needs = ({ kind, stage, m }) => {
    if (kind === "F") return stage ? [["F", stage - 1, m]] : [];
    if (kind === "W") return [["I", stage, m]];
    const behind = stage < last ? [["I", stage + 1, m]] : [];
    return [["F", stage, m], ...behind];
  };
  const [starts, ends] = [rows.map(() => []), rows.map(() => [])];
  const next = (rank) => rows[rank][ends[rank].length];
  const missing = (o) => needs(o).find((need) => !done.has(id(...need)));
  for (let ran = true; ran; ) {
    ran = false;
    rows.forEach((_, rank) => {
      for (let o = next(rank); o && !missing(o); o = next(rank)) {
        const ready = needs(o).map((need) => done.get(id(...need)));
        const start = Math.max(0, ends[rank].at(-1) ?? 0, ...ready);
        const end = start + lasts[o.kind] / chunks[rank];
        starts[rank].push(start);
        ends[rank].push(end);
        done.set(id(o.kind === "B" ? "I" : o.kind, o.stage, o.m), end);
        ran = true;
      }
    });
  }
  const waits = rows.flatMap((_, rank) => {
    const o = next(rank);
    if (!o) return [];
    const [kind, stage, m] = missing(o);
    const other = rows.flat().some(
      (one) => one.kind === kind && one.stage === stage && one.m === m,
    );
    const named = nameOf(!other && whole ? "B" : kind, { m, stage });
    const words = t`rank ${rank} waits at ${nameOf(o.kind, o)} for ${named}`;
    return [{ rank, words }];
  });
  if (waits.length) return { waits };
  const time = Math.max(...ends.map((row) => row.at(-1)));
  const busy = rows.flatMap((row, r) => row.map((o) => lasts[o.kind] / chunks[r]));
  const held = rows.map((row, r) => heldBy(row, chunks[r]));
  return {
    ...{ starts, ends, held, time, waits },
    bubble: 1 - busy.reduce((a, b) => a + b, 0) / (time * rows.length),
    peaks: held.map((row) => Math.max(...row)),
  };
}

/* Tapes of a rank while each of its operations runs. */
function heldBy(row, chunks) {
  let now = 0;
  return row.map(({ kind }) => {
    if (kind === "F") now += 1;
    const held = now / chunks;
    if (kind === "B" || kind === "W") now -= 1;
    return held;
  });
}

// ---- numbers -------------------------------------------------------------

/* Ranks, rounds and the rows of what is shown, without the reader's moves. */
function boardOf({ schedule, ranks, rounds, tables }) {
  const level = tables.levels[schedule];
  const of = level ?? { schedule, ranks, micro: ranks * rounds };
  const { micro } = of;
  const shape = {
    ...{ ranks: of.ranks, rounds: micro / of.ranks, micro, level },
    ...{ from: of.schedule, vshaped: tables.vshaped.includes(of.schedule) },
  };
  const rows = level?.rows ?? tables.orders[schedule][`${ranks} ${micro}`];
  const down = tables.down.includes(of.schedule);
  return { ...shape, base: counted(rows, shape, down) };
}

/* PyTorch's schedules for these ranks and micro-batches, if they can. */
const points = new WeakMap();
function pointsOf(tables, ranks, rounds) {
  if (!points.has(tables)) points.set(tables, {});
  const key = `${ranks} ${ranks * rounds}`;
  const can = (name) => key in tables.orders[name];
  const find = (name) => {
    const { base } = boardOf({ schedule: name, ranks, rounds, tables });
    const { bubble, peaks } = replay(base, { F: 1, B: 2, I: 1, W: 1 });
    return { name, bubble, tapes: Math.max(...peaks) };
  };
  return (points.get(tables)[key] ??= Object.keys(tables.orders)
    .filter(can)
    .map(find));
}

/** What the order costs: times in forward passes of a rank. */
export function describe(state) {
  const { tables, checkpointed, order } = state;
  const board = boardOf(state);
  const { base, ranks, level, rounds, micro } = board;
  const split = base.flat().some(({ kind }) => kind === "I");
  const again = checkpointed && !split && !level;
  const lasts = { F: 1, B: again ? 3 : 2, I: 1, W: 1 };
  // while a kernel changes both, they may not fit for an instant
  const mine = order && parse(order, base);
  const own = mine && !replay(mine, lasts).waits.length;
  const rows = own ? mine : base;
  const run = replay(rows, lasts);
  const blocks = tables.blocks / ranks;
  const bytes = (held) =>
    blocks * (tables.states + held * (again ? tables.input : tables.tape));
  const once = (o) => (again && o.kind === "B" ? tables.tape : 0);
  const loads = rows.map((row, r) =>
    row.map((o, i) => bytes(run.held[r][i]) + once(o)),
  );
  const tapes = Math.max(...run.peaks);
  const medals = level?.medals ?? [];
  return {
    ...{ ...board, rows, run, loads, again, split, own: Boolean(own), tapes },
    ...{ bytes, once, lasts, medals, micro, rounds, card: tables.card },
    states: bytes(0),
    peaks: loads.map((row) => Math.max(...row)),
    points: pointsOf(tables, ranks, rounds),
    won: medals
      .filter((m) => tapes <= m.tapes && run.time <= m.time)
      .map(({ name }) => name),
  };
}

/** What a rank does and has at a time: the bytes of its tapes, too. */
export function rankAt({ rows, run, bytes, once }, rank, time) {
  const [starts, ends] = [run.starts[rank], run.ends[rank]];
  let held = 0;
  const stages = new Set(rows[rank].map((o) => o.stage)).size;
  rows[rank].forEach(({ kind }, i) => {
    if (kind === "F" && starts[i] <= time) held += 1 / stages;
    if (/[BW]/.test(kind) && ends[i] <= time) held -= 1 / stages;
  });
  const at = starts.findIndex((start, i) => start <= time && time < ends[i]);
  const running = rows[rank][at];
  const load = bytes(held) + (running ? once(running) : 0);
  return { held, running, load };
}

/** The first moment at which the fullest rank is at its peak; a moment is
    half a forward pass of a rank. */
export function worst({ loads, peaks, run }) {
  const most = Math.max(...peaks);
  const times = loads.flatMap((row, r) =>
    row.flatMap((load, i) => (load === most ? [run.starts[r][i]] : [])),
  );
  return 2 * Math.min(...times);
}

// ---- words ---------------------------------------------------------------

const tapesText = (count) =>
  count === 1 ? t`1 tape` : t`${formatNumber(count)} tapes`;
const inputsText = (count) =>
  count === 1
    ? t`inputs of 1 micro-batch`
    : t`inputs of ${formatNumber(count)} micro-batches`;
const keptOf = ({ again }) => (again ? t`inputs` : t`tapes`);
const bubbleText = (bubble) => percent(bubble, 1);

/* What these ranks of so many have at their peak. */
function rankText(ranks, count, size, kept) {
  if (ranks.length === count) {
    return t`Each rank has ${size} at its peak, with ${kept}`;
  }
  const all = listed(ranks.map(String));
  return ranks.length > 1
    ? t`Ranks ${all} have ${size} at their peak, with ${kept}`
    : t`Rank ${all} has ${size} at its peak, with ${kept}`;
}

/* Who has most and who has least. */
function sharesText({ peaks, run, again }) {
  const at = (bytes) =>
    peaks.flatMap((peak, rank) => (peak === bytes ? [rank] : []));
  const [most, least] = [Math.max(...peaks), Math.min(...peaks)];
  const ranks = at(most);
  const kept = (again ? inputsText : tapesText)(run.peaks[ranks[0]]);
  const words = rankText(ranks, peaks.length, formatBytes(most), kept);
  return least < most
    ? t`${words}; rank ${at(least)[0]} has ${formatBytes(least)}.`
    : t`${words}.`;
}

function fitText({ peaks, card }) {
  const over = peaks.filter((peak) => peak > card).length;
  if (!over) return t`All fit a card of 80 GB.`;
  return over === peaks.length
    ? t`None fits a card of 80 GB.`
    : t`${over} of ${peaks.length} do not fit a card of 80 GB.`;
}

const askedText = ({ tapes, time }) =>
  t`≤ ${tapesText(tapes)}, ends by ${formatNumber(time)}`;

/** The key numbers in words, and in a level the next medal for who had so
    many. */
export function sentence(state, had = 0) {
  const n = describe(state);
  const { run, micro, ranks, own, level, medals, won } = n;
  const bubble = bubbleText(run.bubble);
  if (level) {
    const of = [tapesText(n.tapes), formatNumber(run.time), bubble];
    const said = won.length
      ? t(
          "The fullest rank holds {0}, and the last operation ends at {1}, " +
            "a bubble of {2}: {3}.",
          ...[...of, t(won.at(-1))],
        )
      : t(
          "The fullest rank holds {0}, and the last operation ends at {1}, " +
            "a bubble of {2}.",
          ...of,
        );
    const next = medals[Math.max(had, won.length)];
    const more = next
      ? t`Next, ${t(next.name)}: ${askedText(next)}.`
      : t`All medals of this level are yours.`;
    return [said, more].join(t` `);
  }
  const order = own ? t`Your order, from ${n.from}` : state.schedule;
  const who = n.again ? t`${order} with checkpointed blocks` : order;
  const said = t(
    "{0}: {1} micro-batches on {2} ranks, and a bubble of {3}.",
    ...[who, micro, ranks, bubble],
  );
  return [said, sharesText(n), fitText(n)].join(t` `);
}

const LEVELS = {
  "level 1": t`Level 1: 1F1B by hand`,
  "level 2": t`Level 2: on four ranks`,
  "level 3": t`Level 3: fill the bubble`,
  "level 4": t`Level 4: on four ranks`,
  "level 5": t`Level 5: less than ZBV`,
};
const shownAs = (name) => LEVELS[name] ?? name;

// ---- geometry ------------------------------------------------------------

const FORM = {
  wide: { left: 50, gauge: 104, top: 24, tall: 220, plane: 96 },
  narrow: { left: 24, gauge: 66, top: 24, tall: 264, plane: 104 },
};

const clamp = (value, least, most) => Math.min(Math.max(value, least), most);

/* Heights of a rank's row: its strip, and the bytes beneath it. */
function rowsOf({ top, tall }, ranks) {
  const pitch = tall / ranks;
  const strip = clamp(0.32 * pitch, 12, 26);
  return Array.from({ length: ranks }, (_, rank) => {
    const y = top + rank * pitch;
    return { y, strip, top: y + strip + 1, bottom: y + pitch - 5 };
  });
}

/* The stairs of a rank's bytes, as heights. */
function memoryOf(n, rank, x, y) {
  const times = [...new Set([0, ...n.run.starts[rank], ...n.run.ends[rank]])];
  times.sort((a, b) => a - b);
  if (times.at(-1) < n.run.time) times.push(n.run.time);
  const at = times.slice(0, -1).map((time) => rankAt(n, rank, time).load);
  return {
    edges: times.map(x),
    loads: at,
    upper: at.map(y),
    lower: at.map(() => y(n.states)),
    floor: at.map(() => y(0)),
  };
}

/* The points of PyTorch's schedules, of which some stand on each other. */
const SHORT = {
  "GPipe": "GPipe",
  "1F1B": "1F1B",
  "LoopedBFS": "Looped",
  "Interleaved1F1B": "Interl.",
  "InterleavedZeroBubble": "IZB",
  "ZBVZeroBubble": "ZBV",
  "DualPipeV": "Dual",
};

const shortened = () =>
  Object.entries(SHORT)
    .filter(([name, short]) => name !== short)
    .map(([name, short]) => t`${short} is ${name}`)
    .join(t`, `);

/* Whether the names of a point would hide a medal. */
function covers({ x, label, names }, goals) {
  const right = x + 18 + wideOf(names.join(t`, `));
  const beside = (goal) => goal.x > x && goal.x < right;
  return goals.some((g) => beside(g) && Math.abs(g.y + 4 - label) < 11);
}

function planeOf(n, plot) {
  const top = 1.12 * n.micro;
  const work = n.run.time * (1 - n.run.bubble);
  const asked = n.medals.map(({ time }) => 1 - work / time);
  const drawn = Math.max(...n.points.map(({ bubble }) => bubble));
  const most = Math.max(1.3 * drawn, ...asked.map((bubble) => 1.1 * bubble));
  const axis = heights(plot, top, keptOf(n));
  const wide = plot.right - plot.left;
  const x = (bubble) => plot.left + (clamp(bubble, 0, most) / most) * wide;
  const y = (tapes) => axis.y(Math.min(tapes, top));
  const spots = new Map();
  for (const { name, bubble, tapes } of n.points) {
    const key = `${bubble.toFixed(6)} ${tapes}`;
    const spot = spots.get(key) ?? { x: x(bubble), y: y(tapes), names: [] };
    spot.names.push(SHORT[name]);
    spots.set(key, spot);
  }
  const all = [...spots.values()];
  for (const at of new Set(all.map((spot) => spot.x))) {
    const column = all.filter((spot) => spot.x === at);
    const wanted = column.map((spot) => spot.y + 4);
    const placed = spread(wanted, 14, plot.top + 9, plot.bottom - 3);
    column.forEach((spot, i) => (spot.label = placed[i]));
  }
  const goals = n.medals.map((m, i) => ({ ...m, x: x(asked[i]), y: y(m.tapes) }));
  for (const spot of all) {
    const places = [spot.label, spot.label + 16];
    const free = places.find((label) => !covers({ ...spot, label }, goals));
    spot.label = free ?? spot.label;
  }
  const step = [0.02, 0.05, 0.1, 0.2].find((size) => most / size < 6);
  return {
    ...{ plot, axis, goals, spots: all },
    now: { x: x(n.run.bubble), y: y(n.tapes) },
    cut: n.run.bubble > most || n.tapes > top,
    ticks: [1, 2, 3, 4, 5]
      .map((i) => i * step)
      .filter((bubble) => bubble < most)
      .map((bubble) => ({ x: x(bubble), label: percent(bubble, 1) })),
  };
}

/** Where everything stands. The axis of time follows from the ranks, the
    micro-batches and what runs again, and grows for an order that takes
    longer; a card is as high, and as long, as its bytes. */
export function layout(state, width, moment = null) {
  const n = describe(state);
  const narrow = width < 480;
  const { left, gauge, top, tall, plane } = FORM[narrow ? "narrow" : "wide"];
  const right = width - gauge - 10;
  const usual = (n.again ? 4 : 3) * (n.micro + n.ranks);
  const whole = Math.max(usual, n.run.time);
  const x = (time) => left + (time * (right - left)) / whole;
  const bottom = top + tall;
  const most = Math.round(2 * n.run.time) - 1;
  const at = clamp(moment ?? worst(n), 0, most);
  const rows = rowsOf({ top, tall }, n.ranks).map((row, rank) => {
    const y = (bytes) =>
      row.bottom - (Math.min(bytes / n.card, 1) * (row.bottom - row.top));
    const now = rankAt(n, rank, at / 2);
    return {
      ...row,
      now,
      boxes: n.rows[rank].map((o, i) => {
        const [from, to] = [x(n.run.starts[rank][i]), x(n.run.ends[rank][i])];
        return { o, x: from, width: to - from, y: row.y, height: row.strip };
      }),
      memory: memoryOf(n, rank, x, y),
      fill: Math.min(now.load / n.card, 1) * gauge,
      base: Math.min(n.states / n.card, 1) * gauge,
      peak: Math.min(n.peaks[rank] / n.card, 1) * gauge,
    };
  });
  const step = [1, 2, 5, 10, 20, 50, 100].find((size) => whole / size < 9);
  const ticks = [];
  for (let time = 0; time <= whole; time += step) {
    ticks.push({ x: x(time), label: String(time) });
  }
  const under = bottom + 30;
  const side = narrow
    ? { left: 4, right: width - 4, y: under }
    : { left: Math.round(0.6 * width) + 16, right: width - 4, y: under + 6 };
  const planeTop = narrow ? under + 90 : under + 20;
  const plot = {
    ...{ left: 40, right: narrow ? width - 8 : Math.round(0.6 * width) - 10 },
    ...{ top: planeTop, bottom: planeTop + plane },
  };
  return {
    ...{ n, rows, at, x, left, right, gauge, top, bottom, ticks, side, narrow },
    ...{ width, whole, moments: most + 1, cursor: x(at / 2 + 0.25) },
    end: x(n.run.time),
    ideal: x(n.run.time * (1 - n.run.bubble)),
    plane: planeOf(n, plot),
    height: plot.bottom + 24,
  };
}

/** The operation at a place, as its rank and its place in the row. */
export function operationAt({ rows }, { x, y }) {
  const rank = rows.findIndex((r) => y >= r.y - 3 && y <= r.y + r.strip + 2);
  if (rank < 0) return null;
  const index = rows[rank].boxes.findIndex(
    (box) => x >= box.x && x < box.x + box.width,
  );
  return index < 0 ? null : { rank, index };
}

/** Where in its row an operation would stand that is let go at x. */
export const placeAt = ({ rows }, { rank, index }, x) =>
  rows[rank].boxes.filter(
    (box, i) => i !== index && box.x + box.width / 2 < x,
  ).length;

/** The moment at a place. */
export function momentAt({ left, right, whole, moments }, x) {
  const time = ((x - left) / (right - left)) * whole;
  return clamp(Math.floor(2 * time), 0, moments - 1);
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };
const BOLD = { class: "mb-value" };
const FILLS = {
  F: "phase-forward",
  B: "phase-backward",
  I: "phase-backward",
  W: "subnormal",
};

function* drawBox(id, { o, x, y, width, height }, look) {
  const wide = width > 3 ? width - 1 : width;
  yield* filled(id, FILLS[o.kind], "rect", { x, y, width: wide, height });
  if (look) {
    const box = { x, y: y - 1, width: wide, height: height + 2, rx: 2 };
    yield svg("rect", { ...box, class: look });
  }
  const [short, long] = [String(o.m), `${o.kind}${o.m}`];
  const label = LETTER * long.length + 3 < wide ? long : short;
  if (LETTER * label.length + 1 > wide) return;
  const dark = FILLS[o.kind] === "phase-backward";
  const tone = dark ? "mb-off" : o.kind === "W" ? "mb-halo" : "mb-on";
  const second = o.key[0] !== o.kind ? " mb-second" : "";
  const at = [x + wide / 2, y + height / 2 + 4];
  yield text(...at, label, { ...MIDDLE, class: tone + second });
}

function* drawRow(id, plan, rank, mark) {
  const { left, right, n, narrow, x } = plan;
  const row = plan.rows[rank];
  const label = narrow ? String(rank) : t`rank ${rank}`;
  yield text(2, row.y + row.strip / 2 + 4, label, BOLD);
  const lane = { x: left, width: x(n.run.time) - left };
  yield svg("rect", { ...lane, y: row.y, height: row.strip, class: "mb-lane" });
  for (const [i, box] of row.boxes.entries()) {
    const marked = mark?.rank === rank && mark.index === i;
    const cross = mark?.wrong ? "mb-mark mb-cross" : "mb-mark";
    yield* drawBox(id, box, marked && cross);
  }
  const { edges, floor, lower, upper, loads } = row.memory;
  const part = n.again ? "checkpoints" : "activations";
  yield* filled(id, "parameters", "path", { d: band(edges, floor, lower) });
  yield* filled(id, part, "path", { d: band(edges, lower, upper) });
  for (const [i, load] of loads.entries()) {
    if (load <= n.card) continue;
    const box = { x: edges[i], width: edges[i + 1] - edges[i] };
    const height = row.bottom - row.top;
    yield* filled(id, "over", "rect", { ...box, y: row.top, height });
  }
  yield line(left, row.bottom, right, row.bottom, "mb-grid");
}

function* drawGauge(id, plan, rank) {
  const { right, gauge, n } = plan;
  const { y, strip, fill, base, peak } = plan.rows[rank];
  const x = right + 8;
  const height = Math.min(strip, 13);
  const part = n.again ? "checkpoints" : "activations";
  const bar = { y, height };
  const rest = { ...bar, x: x + base, width: Math.max(fill - base, 0) };
  yield* filled(id, "parameters", "rect", { ...bar, x, width: base });
  yield* filled(id, part, "rect", rest);
  const over = n.peaks[rank] > n.card;
  yield svg("rect", {
    ...{ ...bar, x, width: gauge },
    class: over ? "mb-spill" : "mb-outline",
  });
  yield line(x + peak, y - 2, x + peak, y + height + 2, "mb-end");
  const look = over ? "mb-value mb-broken" : "mb-value";
  const words = formatBytes(n.peaks[rank]);
  yield text(x + gauge, y + height + 12, words, { ...END, class: look });
}

function* drawTime(plan) {
  const { n, left, right, top, bottom, end, ideal, cursor, narrow } = plan;
  const work = formatNumber(n.run.time * (1 - n.run.bubble));
  const time = formatNumber(n.run.time);
  const ends = narrow
    ? t`ends at ${time}`
    : t`ends at ${time}; ${work} is work`;
  yield text(left, top - 9, ends, BOLD);
  const bubble = t`bubble ${bubbleText(n.run.bubble)}`;
  yield text(right, top - 9, bubble, { ...END, class: "mb-value" });
  yield text(right + 8, top - 9, narrow ? "80 GB" : t`card of 80 GB`);
  yield line(left, bottom, right, bottom, "mb-axis");
  for (const { x, label } of plan.ticks) {
    yield line(x, bottom, x, bottom + 4, "mb-axis");
    yield text(x, bottom + 16, label, MIDDLE);
  }
  yield line(ideal, top - 3, ideal, bottom, "mb-leader");
  yield line(end, top - 3, end, bottom, "mb-end");
  yield line(cursor, top - 4, cursor, bottom, "mb-here");
  yield dot({ x: cursor, y: bottom }, "mb-handle", 7);
}

function* drawSide(plan, had) {
  const { n, side, narrow } = plan;
  if (!n.level) {
    const words = t(
      "Grab the line: the cards fill and empty. | Grab an operation, move " +
        "it in its row: | the bubble and each peak move along.",
    );
    for (const [i, word] of words.split(" | ").entries()) {
      yield text(side.left, side.y + 12 + 17 * i, word);
    }
    return;
  }
  const r = narrow ? 10 : 14;
  const wide = (side.right - side.left) / n.medals.length;
  for (const [i, medal] of n.medals.entries()) {
    const left = side.left + (narrow ? i * wide : 0);
    const y = side.y + r + 2 + (narrow ? 0 : 45 * i);
    const look = `mb-medal mb-${medal.name} ${i < had ? "mb-had" : ""}`;
    yield dot({ x: left + r + 2, y }, look, r);
    const won = n.won.includes(medal.name);
    const at = [left + r + 2, y + 5, "✓"];
    if (won) yield text(...at, { ...MIDDLE, class: "mb-won" });
    const x = left + 2 * r + 10;
    yield text(x, y - (narrow ? -4 : 2), t(medal.name), BOLD);
    const limits = narrow
      ? [t`≤ ${tapesText(medal.tapes)}`, t`by ${formatNumber(medal.time)}`]
      : [askedText(medal)];
    for (const [j, words] of limits.entries()) {
      const below = narrow ? y + r + 16 + 15 * j : y + 14;
      yield text(narrow ? left : x, below, words);
    }
  }
}

function* drawPlane(plan, before, had) {
  const { plane } = plan;
  const { plot, axis, spots, now, goals, ticks } = plane;
  yield* axes(plot, axis);
  for (const { x, label } of ticks) {
    yield text(x, plot.bottom + 16, label, MIDDLE);
  }
  yield text(plot.right, plot.top - 8, t`bubble →`, END);
  const goal = goals[Math.min(had, goals.length - 1)];
  if (goal) {
    const box = { x: plot.left, width: goal.x - plot.left, y: goal.y };
    const look = `mb-goal mb-${goal.name}`;
    const height = plot.bottom - goal.y;
    yield svg("rect", { ...box, height, class: look });
  }
  for (const spot of spots) yield dot(spot, "mb-torch", 4);
  for (const { name, x, y } of goals) {
    const d = `M${x} ${y - 7}l7 7l-7 7l-7 -7Z`;
    yield svg("path", { d, class: `mb-medal mb-had mb-${name}` });
  }
  for (const { x, names, label } of spots) {
    yield text(x + 11, label, names.join(t`, `), { class: "mb-halo" });
  }
  const was = before?.plane.now;
  if (was && (was.x !== now.x || was.y !== now.y)) yield dot(was, "mb-ghost", 6);
  yield dot(now, "mb-now", 8);
}

function* draw(id, plan, { mark, before, had }) {
  for (const rank of plan.rows.keys()) {
    yield* drawRow(id, plan, rank, mark);
    yield* drawGauge(id, plan, rank);
  }
  const same = before && before.n.ranks === plan.n.ranks;
  for (const [rank, { memory }] of same ? before.rows.entries() : []) {
    if (memory.upper.join() === plan.rows[rank].memory.upper.join()) continue;
    const d = stairs(memory.edges, memory.upper);
    yield svg("path", { d, class: "mb-ghost" });
  }
  yield* drawTime(plan);
  yield* drawSide(plan, had);
  yield* drawPlane(plan, same ? before : null, had);
}

function results(id, n) {
  const most = n.again ? t`inputs at most` : t`tapes at most`;
  const head = [t`rank`, most, t`bytes at most`];
  const rows = n.peaks.map((peak, rank) => ({
    label: String(rank),
    cells: [
      [`tapes.${rank}`, n.run.peaks[rank]],
      [`peak.${rank}`, peak, formatBytes(peak)],
    ],
  }));
  const others = n.points.map(({ name, bubble, tapes }) => ({
    label: name,
    cells: [
      [`bubble.${name}`, bubble, bubbleText(bubble)],
      [`worst.${name}`, tapes],
    ],
  }));
  const won = n.won.map((name) => t(name)).join(t`, `);
  return [
    table(id, head, rows),
    table(id, [t`schedule`, t`bubble`, keptOf(n)], others),
    numberList([
      [t`the last operation ends at`, "time", n.run.time],
      [t`bubble`, "bubble", n.run.bubble, bubbleText(n.run.bubble)],
      [
        t`weights, gradients and optimizer`,
        ...["states", n.states, formatBytes(n.states)],
      ],
      [t`medals`, "won", JSON.stringify(n.won), won || t`none`],
    ]),
  ];
}

// ---- the widget ----------------------------------------------------------

/* For a card that has so many bytes. */
const noteOf = (card) =>
  t(
    "A row is a rank, with its operations in PyTorch’s own order: F a " +
      "forward pass, B a whole backward pass, I its part for the inputs and" +
      " W its part for the weights; the number is the micro-batch, and " +
      "italics are the rank’s second stage. F, I and W take a time of one " +
      "each, of a rank’s share of the network; a second stage halves it, " +
      "and messages take none. What is blank in a row is bubble; the dotted" +
      " line is where the step would end without one. Beneath a row are the" +
      " rank’s bytes, as high as an H100 of 80 GB, on which a step can have" +
      " {0}: its blocks’ weights, gradients and optimizer states, 16 bytes " +
      "for each weight, and a tape for each micro-batch that is in flight, " +
      "from the beginning of F to the end of B or W. The blocks are those " +
      "of Llama 2 7B, with 4 096 tokens of a micro-batch and in bf16; " +
      "embeddings, head and what an operation needs for itself stay out. At" +
      " the right the card is filled as at the blue line; its tick and its " +
      "number are the peak. Below is the plane of bubble and of the fullest" +
      " rank’s tapes, or inputs with checkpoints: dots are PyTorch’s " +
      "schedules ({1}), the ring is what you see. By keyboard: in the " +
      "picture the arrows choose an operation, with Shift they move it.",
    ...[formatBytes(card), shortened()],
  );

const LEGEND = {
  "phase-forward": t`forward`,
  subnormal: t`weights’ part`,
  "phase-backward": t`backward`,
  checkpoints: t`checkpoints`,
  parameters: t`states`,
  over: t`no room`,
  activations: t`tapes`,
};

/* Which of them the picture has. */
function seen({ rows, again, peaks, card }) {
  const kinds = new Set(rows.flat().map(({ kind }) => FILLS[kind]));
  const kept = again ? "checkpoints" : "activations";
  const over = peaks.some((peak) => peak > card) ? ["over"] : [];
  return new Set([...kinds, "parameters", kept, ...over]);
}

const MEDALS = "mb-pipelines"; // what this browser keeps: by level, how many

function build({ id, get, set, bound, picture, again }) {
  const { tables } = get();
  let plan; // as it is drawn
  let at = null; // the moment that is shown; null is the peak
  let draft = null; // rows while an operation is dragged
  let spot = null; // the operation that is chosen
  let told = null; // words instead of the sentence, and `wrong`
  let history = [];
  let medals = remembered(MEDALS);
  const had = () => medals[get().schedule] ?? 0;

  const fresh = () => {
    play.stop();
    draft = told = null;
  };
  const see = (moment) => {
    at = moment;
    again();
  };
  const go = (order, keep = true) => {
    const old = get().order;
    fresh();
    if (keep) history.push(old);
    set({ order });
    again();
  };
  const change = (traits) => {
    fresh();
    [spot, at, history] = [null, null, []];
    set({ ...traits, order: "" });
    again();
  };
  // the reader's own move: what it wins stays
  const place = (rows) => {
    const base = written(describe({ ...get(), order: "" }).rows);
    const order = written(rows) === base ? "" : written(rows);
    const n = describe({ ...get(), order });
    const more = n.won.slice(had());
    if (more.length) {
      medals = { ...medals, ...remembered(MEDALS), [get().schedule]: n.won.length };
      remember(MEDALS, medals);
    }
    go(order);
    celebrate(picture, more);
  };
  const refusal = (n, rows) => {
    const { waits } = replay(rows, n.lasts);
    if (!waits.length) return null;
    const own = waits.find(({ rank }) => rank === spot.rank) ?? waits[0];
    return { words: t`That order cannot run: ${own.words}.`, wrong: true };
  };

  const level = (traits) => tables.levels[traits.schedule];
  const names = [...Object.keys(tables.orders), ...Object.keys(tables.levels)];
  const schedule = choice({
    ...{ label: t`Schedule`, key: "schedule" },
    options: Object.fromEntries(names.map((name) => [name, shownAs(name)])),
    onChange: (value) => change({ schedule: value }),
  });
  const ranks = choice({
    ...{ label: t`Ranks`, key: "ranks", options: ["2", "4", "8"] },
    onChange: (value) => change({ ranks: Number(value) }),
  });
  const rounds = slider({
    ...{ label: t`Micro-batches`, key: "rounds", min: 2 },
    onInput: (value) => change({ rounds: value }),
  });
  const checkpointed = checkBox({
    ...{ label: t`Checkpoint each block`, key: "checkpointed" },
    onChange: (value) => set({ checkpointed: value }),
  });
  const moment = slider({
    ...{ label: t`Time`, key: "moment", min: 0, onInput: see },
  });
  moment.held = () => (at === null ? "" : String(at));
  const play = player({
    ...{ key: "play", every: 120 },
    step() {
      const next = at === null ? 0 : at + 1;
      const more = next < plan.moments;
      see(more ? next : null); // in the end the peak again
      return more;
    },
  });
  const undo = button({
    ...{ label: t`Undo`, key: "undo" },
    onClick: () => history.length && go(history.pop(), false),
  });
  const clear = button({
    ...{ label: t`As it was`, key: "clear" },
    onClick: () => go(""),
  });
  const onward = button({
    ...{ label: t`Play the game`, key: "next" },
    onClick: () => change({ schedule: after() }),
  });
  const after = () => {
    const levels = Object.keys(tables.levels);
    return levels[1 + levels.indexOf(get().schedule)];
  };
  const typed = field({
    ...{ label: t`Your order`, key: "order", write: (words) => words },
    how: t`write each operation of a rank once, ranks apart by a point`,
    read(words) {
      const n = describe({ ...get(), order: "" });
      const rows = words ? parse(words, n.rows) : n.rows;
      return rows && !replay(rows, n.lasts).waits.length ? words : undefined;
    },
    onChange: (words) => {
      const n = describe({ ...get(), order: "" });
      if (words) place(parse(words, n.rows));
      else go("");
    },
  });
  typed.held = () => get().order;
  typed.enter = (words) => {
    const n = describe({ ...get(), order: "" });
    const rows = parse(words, n.rows);
    if (rows && !replay(rows, n.lasts).waits.length) go(words, false);
  };
  const forget = button({
    ...{ label: t`Forget them`, key: "forget" },
    onClick() {
      medals = {};
      remember(MEDALS, medals);
      again();
    },
  });
  const tally = html("span");
  const mine = html("p", { class: "mb-tally" }, tally, forget.root);
  const all = [play, undo, clear, onward].map(({ root }) => root);
  const buttons = html("div", { class: "mb-buttons" }, ...all);

  const shift = (rows, next) => {
    const n = describe(get());
    told = refusal(n, rows);
    if (told) return again();
    spot = next;
    place(rows);
    told = { words: [chosenText(), sentence(get(), had())].join(t` `) };
    again();
  };
  const chosenText = () => {
    const { rank, index } = spot;
    const row = describe(get()).rows[rank];
    const { kind, m } = row[index];
    return t`${kind}${m} of rank ${rank}, ${index + 1} of ${row.length}.`;
  };
  picture.setAttribute("tabindex", "0");
  picture.setAttribute("data-lm-suppress-shortcuts", "true");
  picture.addEventListener("mousedown", (event) => event.preventDefault());
  picture.addEventListener("keydown", (event) => {
    const along = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const across = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!along && !across) return;
    event.preventDefault();
    const { rows } = describe(get());
    const first = !spot;
    spot ??= { rank: 0, index: 0 };
    const rank = clamp(spot.rank + (across ?? 0), 0, rows.length - 1);
    const most = rows[rank].length - 1;
    const step = first ? 0 : (along ?? 0);
    const index = clamp(spot.index + step, 0, most);
    if (event.shiftKey && along && !first) {
      const to = moved(rows, spot.rank, spot.index, index);
      if (index !== spot.index) shift(to, { rank, index });
      return;
    }
    fresh();
    spot = first ? spot : { rank, index };
    const how = t`Shift and an arrow move it.`;
    told = { words: [chosenText(), how].join(t` `) };
    again();
  });
  drag(picture, {
    grab(place_) {
      const found = operationAt(plan, place_);
      fresh();
      if (found) {
        spot = found;
        const { rows } = describe(get());
        return { ...found, rows, plan };
      }
      spot = null;
      return place_.y < plan.bottom + 26 && place_.x < plan.right + 12
        ? { cursor: true }
        : null;
    },
    move({ x }, held) {
      if (held.cursor) return see(momentAt(plan, x));
      const to = placeAt(held.plan, held, x);
      const rows = moved(held.rows, held.rank, held.index, to);
      spot = { rank: held.rank, index: to };
      told = refusal(describe(get()), rows);
      draft = told ? null : rows;
      if (told) spot = { rank: held.rank, index: held.index };
      again();
    },
    drop(held) {
      if (held.cursor) return;
      if (!told && draft && written(draft) !== written(held.rows)) place(draft);
      else {
        const wrong = told;
        fresh();
        const how = t`Drag it, or Shift and an arrow.`;
        told = wrong ?? { words: [chosenText(), how].join(t` `) };
        again();
      }
    },
  });

  const parts = legend(id, LEGEND);
  const spans = Object.keys(LEGEND).map((part, i) => [part, parts.children[i]]);
  const drawn = (state, width, before) => {
    const shown = draft ? { ...state, order: written(draft) } : state;
    plan = layout(shown, width, at);
    const { n } = plan;
    const ours = draft ? state : before;
    const ghost = ours && layout({ ...ours, tables }, width, at);
    const theirs = level(state) ? t`the level’s` : "";
    const rank = had();
    schedule.update({ value: state.schedule });
    ranks.update({ value: String(n.ranks), disabled: theirs });
    rounds.update({
      ...{ value: state.rounds, max: 4, disabled: theirs },
      text: String(n.micro),
      spoken: level(state)
        ? String(n.micro)
        : t`${n.micro}, ${n.rounds} for each rank`,
    });
    const split = n.split && t`not with a backward pass in two parts`;
    const cannot = split || theirs;
    checkpointed.update({ value: state.checkpointed, disabled: cannot });
    moment.update({
      ...{ value: plan.at, max: plan.moments - 1 },
      text: formatNumber(plan.at / 2),
      spoken: t`${formatNumber(plan.at / 2)} of ${formatNumber(n.run.time)}`,
    });
    typed.update({ value: state.order });
    undo.root.disabled = !history.length;
    clear.root.disabled = !n.own;
    onward.root.textContent = n.level ? t`Next level` : t`Play the game`;
    onward.root.disabled = !after();
    const count = Object.values(medals).reduce((a, b) => a + b, 0);
    const most = 3 * Object.keys(tables.levels).length;
    tally.textContent =
      t`Your medals, ${count} of ${most}, stay in this browser.`;
    forget.root.disabled = !count;
    const here = seen(n);
    for (const [part, span] of spans) span.hidden = !here.has(part);
    const mark = spot && { ...spot, wrong: told?.wrong };
    return {
      title: n.level
        ? shownAs(state.schedule)
        : t`A pipeline, and what its ranks hold`,
      sentence: told?.words ?? sentence(shown, rank),
      wrong: told?.wrong,
      height: plan.height,
      drawn: [...draw(id, plan, { mark, before: ghost, had: rank })],
      numbers: results(id, n),
    };
  };
  return {
    controls: [schedule, ranks, rounds],
    picture: html("div", {}, picture, buttons),
    legend: parts,
    more: [checkpointed, moment, typed, { root: mine }],
    note: html("p", { class: "mb-note" }, noteOf(tables.card)),
    draw: drawn,
    stop() {
      fresh();
      [history, spot, at] = [[], null, null];
    },
  };
}

const keys = ["schedule", "ranks", "rounds", "checkpointed", "order", "tables"];

export default widget({ name: "parallelism", keys, build });
