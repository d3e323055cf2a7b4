import {
  HOLDERS,
  PHASE_WORDS,
  byteCell,
  checkBox,
  choice,
  dot,
  drag,
  filled,
  formatBytes,
  formatNumber,
  grouped,
  html,
  labelOf,
  laid,
  legend,
  lengthAxis,
  lengths,
  line,
  numberField,
  phaseRuns,
  player,
  plural,
  radios,
  ragged,
  slider,
  still,
  strip,
  svg,
  t,
  table,
  text,
  widget,
} from "./base.mjs";

/* Ranks as cards in a ring: what each keeps, what it borrows for the block at
   work, and the slices that they send each other.

   describe(state): the bytes; their coefficients come from Python (tables).
   step(state): the moments of a training step.
   layout(state, width, tick): where everything stands in the picture. */

const RANKS = Array.from({ length: 11 }, (_, i) => 2 ** i);
const OWN = "own number"; // of parameters
const TICKS = 10; // of a moment that is played
const KEY = t`F is forward, B is backward.`; // where the letters stand

const PARTS = {
  parameters: t`parameters (P)`,
  gradients: t`gradients (G)`,
  waiting: t`not yet reduced`,
  optimizer: t`optimizer states (O)`,
};

const ROWS = ["parameters", "gradients", "optimizer"]; // kept
const TRAYS = { block: "parameters", whole: "gradients" }; // borrowed

// ---- numbers -------------------------------------------------------------

/* The rest of the first row of a table that begins with the name. */
const row = (table, name) => table.find(([first]) => first === name).slice(1);

const nameOf = ({ tables }, stage) => row(tables.stages, stage)[0];

const splitOf = ({ tables }, stage) => row(tables.stages, stage)[1];

const cardOf = ({ tables, card }) => row(tables.cards, card)[0];

const countOf = ({ model, tables }) =>
  typeof model === "number" ? model : row(tables.models, model)[0];

const waits = ({ synchronise_last, accumulation_steps }) =>
  synchronise_last && accumulation_steps > 1;

const sum = (parts) => Object.values(parts).reduce((a, b) => a + b, 0);

/* What a rank holds; to divide by a power of two is exact. */
function held(state, stage, ranks) {
  const [, each] = row(state.tables.recipes, state.recipe);
  const split = splitOf(state, stage);
  const [parameters, gradients, optimizer] = each.map((size, i) =>
    Math.ceil((countOf(state) * size) / (split[i] ? ranks : 1)),
  );
  const whole = waits(state) ? countOf(state) * each[1] : gradients;
  return { parameters, gradients, waiting: whole - gradients, optimizer };
}

/* What a rank has on top of it while a block is at work: the whole block, where
   it keeps slices. */
function borrowed(state, stage, ranks) {
  const [, each, , gathered] = row(state.tables.recipes, state.recipe);
  const [parameters, gradients] = splitOf(state, stage);
  const count = ranks > 1 ? Math.ceil(countOf(state) / state.blocks) : 0;
  return {
    block: parameters ? count * gathered : 0,
    whole: gradients && !waits(state) ? count * each[1] : 0,
  };
}

/* Bytes that are sent for each parameter, without (N - 1)/N. */
function moved({ tables, recipe, ...state }, stage) {
  const place = tables.stages.findIndex(([name]) => name === stage);
  const [once, gather, reduction] = row(tables.recipes, recipe)[2][place];
  const { synchronise_last: last, accumulation_steps: steps } = state;
  const parameters = once + gather * steps;
  return { parameters, gradients: reduction * (last ? 1 : steps) };
}

/** What each stage makes of the settings. */
export function describe(state) {
  const card = cardOf(state);
  const of = (stage) => {
    const parts = held(state, stage, state.ranks);
    const lent = borrowed(state, stage, state.ranks);
    const each = moved(state, stage);
    const whole = countOf(state) * sum(each);
    const most = (ranks) =>
      sum(held(state, stage, ranks)) + sum(borrowed(state, stage, ranks));
    const fits = (ranks) => most(ranks) <= card;
    return {
      ...{ parts, lent, each, bytes: sum(parts), most: most(state.ranks) },
      sent: whole - Math.ceil(whole / state.ranks),
      fits: card ? fits(state.ranks) : null,
      fewest: (card && RANKS.find(fits)) || null,
    };
  };
  const { stages } = state.tables;
  return Object.fromEntries(stages.map(([stage]) => [stage, of(stage)]));
}

// ---- a training step -----------------------------------------------------

const GATHER = [t`all-gather`, t`gather`];
const lines = (words) => words.split(" | ");

/** Of each phase: its colour, its names and what happens, in two lines. */
export const PHASES = {
  rest: ["rest", [t`Between two steps`],
    [t`Play a step, or drag along it.`]],
  gather: ["parameters", GATHER,
    lines(t`Each passes a slice on, until | all have the whole block.`)],
  forward: ["phase-forward", PHASE_WORDS.forward,
    lines(t`Each rank runs this | on its own samples.`)],
  free: ["phase-optimizer", [t`free`],
    lines(t`The block’s parameters go. | Each keeps its own slice.`)],
  others: ["rest", [t`and so on`, "…"],
    lines(t`The other blocks do the same, | one after the other.`)],
  backward: ["phase-backward", PHASE_WORDS.backward,
    lines(t`Each rank has whole gradients, | of its own samples alone.`)],
  reduce: ["gradients", [t`reduce-scatter`, t`reduce`],
    lines(t`Each passes a slice on, | and the next adds its own.`)],
  spread: ["gradients", GATHER,
    lines(t`This ends the all-reduce: | each passes a sum on.`)],
  optimizer: ["phase-optimizer", [t`optimizer step`, t`step`],
    lines(t`Each rank updates what it has | the optimizer states of.`)],
  renew: ["parameters", GATHER,
    lines(t`Each passes its new parameters | on, until all have all.`)],
};

/** The ranks that are drawn: their numbers, and null for those between. */
export const drawnOf = (ranks) =>
  ranks > 4 ? [0, 1, 2, null, ranks - 1] : [...Array(ranks).keys()];

/* What each drawn rank has of each slice: its "own", "lent" for a while,
   a "part" of a sum that is not done, "room" for one, or nothing. */
function slices({ ranks }, split, have = "own") {
  const all = drawnOf(ranks).map((_, i) => i);
  return all.map((s) => all.map((j) => (!split || s === j ? have : "")));
}

/** What is held between two steps; between two micro-batches, where gradients
    wait for the last. */
export function atRest(state) {
  const [parameters, gradients, optimizer] =
    splitOf(state, state.stage).map((split) => slices(state, split));
  const others = waits(state) ? "part" : "";
  const all = gradients.map((row) => row.map((have) => have || others));
  const none = slices(state, false, "");
  const cells = { parameters, gradients: all, optimizer };
  const trays = { block: none, whole: none };
  return { phase: "rest", moves: [], cells: { ...cells, ...trays } };
}

/** The moments of a step. In each round of a ring every rank sends a slice to
    the next (`moves`), and in the moment after it the slice is there. Of the
    blocks the first of each pass is followed. */
export function step(state) {
  const { blocks, accumulation_steps: steps } = state;
  const [parameters, gradients, optimizer] = splitOf(state, state.stage);
  const { cells } = structuredClone(atRest(state));
  const count = cells.gradients.length;
  const all = (have) => slices(state, false, have);
  const [gathers, reduces] = [parameters, gradients && !waits(state)].map(
    (split) => split && count > 1,
  );
  cells.gradients = slices(state, gradients && !waits(state), "room");
  const moments = [];
  const alone = (words) => words; // what is said of a moment, and no more
  let [batch, block] = [alone, alone];
  const add = (phase, moves = []) =>
    moments.push({ phase, batch, block, moves, cells: structuredClone(cells) });
  const ring = (phase, part, first, arrive) => {
    for (let round = 1; round < count; round += 1) {
      const moves = cells[part].map((_, from) => {
        const slice = (from - round - first + 2 * count) % count;
        return { part, from, to: (from + 1) % count, slice };
      });
      add(phase, moves);
      for (const move of moves) arrive(cells[part], move, round === count - 1);
    }
  };
  const gather = (phase, part, have) =>
    ring(phase, part, -1, (of, { to, slice }) => (of[to][slice] = have));
  const reduce = (part, frees) =>
    ring("reduce", part, 0, (of, { from, to, slice }, last) => {
      of[from][slice] = frees ? "" : "part";
      of[to][slice] = last ? "own" : "part";
    });
  const borrow = () => {
    if (!gathers) return;
    cells.block = slices(state, true, "lent");
    gather("gather", "block", "lent");
  };
  const free = () => {
    cells.block = all("");
    if (gathers) add("free");
  };
  const others = (lent) => {
    Object.assign(cells, lent);
    block = (head) => t`${head}, ${blocks - 1} more`;
    if (blocks > 1) add("others");
    Object.assign(cells, { block: all(""), whole: all("") });
    block = alone;
  };
  const numbered = (number, one) => {
    if (one) block = (head) => t`${head}, block ${number} of ${blocks}`;
  };
  for (const number of new Set([1, steps])) {
    if (steps > 1) batch = (place) => t`${place}, micro-batch ${number}`;
    numbered(1, gathers);
    borrow();
    add("forward");
    free();
    if (gathers) others({ block: all("lent") });
    numbered(blocks, gathers || reduces);
    borrow();
    if (reduces) cells.whole = all("part");
    else cells.gradients = all(count > 1 ? "part" : "own");
    add("backward");
    free();
    if (reduces) {
      reduce("whole", true);
      cells.whole = all("");
      cells.gradients = slices(state, true);
    }
    if (gathers || reduces) {
      others({
        block: all(gathers ? "lent" : ""),
        whole: all(reduces ? "part" : ""),
      });
    }
    if (waits(state) && number < steps) continue;
    if (!reduces) reduce("gradients", gradients);
    if (!optimizer) gather("spread", "gradients", "own");
  }
  batch = alone;
  add("optimizer");
  if (optimizer && !parameters) {
    cells.parameters = slices(state, true);
    gather("renew", "parameters", "own");
  }
  return moments;
}

/** Bytes that a rank holds at a moment: its own, and of the block what has
    come, or is not yet gone. */
export function bytesAt({ bytes, lent }, { cells }) {
  const have = (tray) => {
    const [row] = cells[tray];
    return (lent[tray] * row.filter(Boolean).length) / row.length;
  };
  return bytes + have("block") + have("whole");
}

// ---- words ---------------------------------------------------------------

/** The chosen stage in words. */
export function sentence(state, all = describe(state)) {
  const { stage, ranks, card } = state;
  const [n, ddp] = [all[stage], all.ddp];
  const wait = n.parts.waiting;
  const whole = wait
    ? t`${formatBytes(n.bytes)} (${formatBytes(wait)} not yet reduced)`
    : formatBytes(n.bytes);
  const on = [nameOf(state, stage), plural(ranks, "rank")];
  const told =
    ranks > 1
      ? sharedWords(stage, n, ddp, on, whole)
      : [
          t("{0} on {1}: it holds all {2}.", ...on, whole),
          t`There is no other to share with.`,
        ];
  if (card !== "none" && !n.fewest) {
    told.push(t`However many ranks there are, it does not fit.`);
  }
  if (!wait && ranks > 1 && n.fewest === ranks) {
    told.push(t`Half the ranks would be too few.`);
  }
  return told.join(t` `);
}

/* What each of several ranks holds and sends, beside DDP. */
function sharedWords(stage, n, ddp, on, all) {
  const times = (ratio) => (stage === "ddp" ? null : formatNumber(ratio));
  const less = times(ddp.bytes / n.bytes);
  let holds = t`each holds ${all}`;
  if (less === "1") holds = t`each holds ${all}, as much as DDP`;
  else if (less) holds = t`each holds ${all}, ${less} times less than DDP`;
  const lent = sum(n.lent);
  if (lent) holds = t`${holds}, and borrows ${formatBytes(lent)} for a block`;
  const more = times(sum(n.each) / sum(ddp.each));
  const size = formatBytes(n.sent);
  let sends = t`Each sends ${size} per step.`;
  if (more === "1") sends = t`Each sends ${size} per step, as much as DDP.`;
  else if (more) {
    sends = t`Each sends ${size} per step, ${more} times as much as DDP.`;
  }
  return [t("{0} on {1}: {2}.", ...on, holds), sends];
}

function titleOf({ model, recipe, tables }) {
  const name = typeof model === "number" ? grouped(model) : model;
  const what = /( B|\d)$/.test(name) ? t`${name} parameters` : name;
  return t`Model states of ${what}: ${t(row(tables.recipes, recipe)[0])}`;
}

/* What everybody sees, what it is of, and what it is compared with. */
function verdict(state, { bytes, fits, lent, most }) {
  const card = cardOf(state);
  const small = sum(lent)
    ? t`keeps ${formatBytes(bytes)}, borrows ${formatBytes(sum(lent))}`
    : t`keeps ${formatBytes(bytes)}`;
  if (fits === null) return [t`${formatBytes(most)} at most`, small, ""];
  const over = formatBytes(Math.abs(card - most));
  const big = fits ? t`fits, ${over} left` : t`${over} too much`;
  return [big, small, t`${state.card}: ${formatBytes(card)} usable`];
}

const NOTE = t(
  "Each card is a rank, and each row a part of the states. A column is a " +
    "slice: a filled one is on this rank, a pale one is borrowed, a hatched " +
    "pale one is not yet reduced, a hollow one is room for a gradient. With " +
    "more than four ranks one card, and its slice, stand for many. The card " +
    "grows by the block that it borrows; the dashed line is the most so " +
    "far. The bar below is to scale: what a rank keeps, then what it " +
    "borrows. The blocks are equal, and one at a time is at work; FSDP2 " +
    "begins the next before one is done. Activations and buffers are not " +
    "counted. ZeRO-1 and ZeRO-2 are the paper’s: they gather new parameters " +
    "once in a step, and FSDP2’s zero-2 for every micro-batch.",
);

// ---- geometry ------------------------------------------------------------

/* Where the cards of a ring stand, as shares of the room for them. */
const RING = {
  1: [[0.5, 0.5]],
  2: [[0.12, 0.5], [0.88, 0.5]],
  4: [[0.12, 0], [0.88, 0], [0.88, 1], [0.12, 1]],
  5: [[0.5, 0], [1, 0.08], [0.88, 1], [0.12, 1], [0, 0.08]],
};

const LETTERS = 17; // beside the slices

/* Sizes of a card; its trays stand above what it keeps. One alone, which
   borrows nothing, is large. */
function sizesOf(count, width, wide) {
  const most = wide ? 176 : 0.26 * width;
  const many = wide ? [18, 22] : [13, 15];
  const [row, tray] = count > 1 ? many : [many[0] * 2, 0];
  const seat = Math.min(3 * row, (most - LETTERS - 4) / count);
  const kept = 3 * row + 6;
  const tall = kept + 2 * tray + 5;
  return { row, tray, seat, kept, tall, wide: LETTERS + 4 + seat * count };
}

/* Boxes of the drawn ranks: with their trays they fill them. */
function stations({ ranks }, size, width, height) {
  const drawn = drawnOf(ranks);
  return drawn.map((rank, i) => {
    const [across, down] = RING[drawn.length][i];
    const x = 2 + across * (width - size.wide - 4);
    return { rank, x, y: 4 + down * (height - size.tall - 26) };
  });
}

/* The rows of the cards at a moment, from the bottom up: { part, y, height },
   where y is above the bottom. */
function rowsAt({ cells }, { row, tray, kept }) {
  const own = [...ROWS].reverse().map((part, i) => ({ part, at: i * row + 3 }));
  const open = Object.keys(TRAYS).filter((key) =>
    cells[key].flat().some(Boolean),
  );
  const lent = open.map((part, i) => ({ part, at: kept + 3 + i * tray }));
  return [
    ...own.map(({ part, at }) => ({ part, y: at + row - 2, height: row - 3 })),
    ...lent.map(({ part, at }) => ({ part, y: at + tray - 2, height: tray - 3 })),
  ];
}

/* How tall the cards are at a moment. */
const tallAt = (moment, size) => {
  const open = rowsAt(moment, size).length - ROWS.length;
  return size.kept + (open ? 5 + open * size.tray : 0);
};

/* Where moments begin; a round of a ring is short. */
function edgesOf(moments, { left, right }) {
  const ends = [0];
  for (const { phase, moves } of moments) {
    const short = moves.length || phase === "rest";
    ends.push(ends.at(-1) + (short ? 1 : 3));
  }
  return ends.map((end) => left + ((right - left) * end) / ends.at(-1));
}

/* The bar of a rank: what it keeps, then what it borrows. */
function barOf(state, plot, n, width, before) {
  const card = cardOf(state);
  const top = card ? 1.3 * card : 1.05 * describe(state).ddp.bytes;
  const { x, ...axis } = lengths(plot, top, width);
  const old = before ? describe(before)[before.stage].most : n.most;
  const middle = n.bytes + n.lent.block;
  return {
    ...{ axis, beyond: n.most > top, limit: card && x(card), end: x(n.most) },
    kept: laid(n.parts, x).filter(({ width }) => width),
    lent: [
      { tray: "block", x: x(n.bytes), width: x(middle) - x(n.bytes) },
      { tray: "whole", x: x(middle), width: x(n.most) - x(middle) },
    ].filter(({ width }) => width),
    ghost: old !== n.most && old <= top ? x(old) : null,
  };
}

/** Where everything stands at a tick of the step; the first and the last
    moment are at rest. */
export function layout(state, width, tick = TICKS / 2, before = null) {
  const rest = atRest(state);
  const moments = [rest, ...step(state), rest];
  const moment = Math.min(Math.floor(tick / TICKS), moments.length - 1);
  const way = Math.min(tick / TICKS - moment, 1); // gone of the moment
  const n = describe(state)[state.stage];
  const wide = width >= 700;
  const count = drawnOf(state.ranks).length;
  const size = sizesOf(count, width, wide);
  const ring = wide ? 304 : 236;
  const words = wide ? { 1: 237, 2: 50, 5: 145 }[count] ?? 118 : ring + 12;
  const plot = { left: 4, right: width - 4 };
  const track = wide ? ring + 10 : words + 74;
  const edges = edgesOf(moments, plot);
  const result = track + (wide ? 52 : 50);
  const bar = result + (wide ? 26 : 53);
  return {
    ...{ plot, size, moments, moment, way, edges, track, words, wide, n },
    ...{ result, now: moments[moment], middle: wide ? width / 2 : 2 },
    stations: stations(state, size, width, ring),
    cursor: { x: edges[moment] + way * (edges[moment + 1] - edges[moment]) },
    bar: { y: bar, ...barOf(state, plot, n, width, before) },
    verdict: verdict(state, n),
    pause: n.parts.waiting ? t`Between micro-batches` : PHASES.rest[1][0],
    over: n.fits === false,
    height: bar + 46,
  };
}

/** The moment at a place on the track. */
export const momentAt = ({ edges }, x) =>
  edges.slice(1, -1).filter((edge) => edge <= x).length;

/* Which moment it is, in words: what runs, and its place in the step. */
function momentOf({ now, moment, moments, pause }) {
  const [, [head]] = PHASES[now.phase];
  if (now.phase === "rest") return [pause, ""];
  const place = t`${moment} of ${moments.length - 2}`;
  return [now.block(head), now.batch(place)];
}

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

/* What is borrowed, or one's own. */
const drawPart = (id, part, have, box) =>
  have === "lent"
    ? [svg("rect", { ...box, class: `mb-fill-${part} mb-lent` })]
    : filled(id, have === "part" ? "waiting" : part, "rect", box);

function* drawSlice(id, part, have, box) {
  if (have && have !== "room") yield* drawPart(id, part, have, box);
  yield svg("rect", { ...box, class: have === "room" ? "mb-room" : "mb-cell" });
}

/* The place of a slice in a card. */
function seat({ size }, { x, y }, { y: up, height }, slice) {
  const left = x + LETTERS + slice * size.seat;
  return { x: left, y: y + size.tall - up, width: size.seat - 2, height };
}

/* The blocks that are not followed come and go while the moment passes. */
const breathes = ({ now, way }) =>
  now.phase === "others" && Math.floor(6 * way + 1) % 2 === 1;

/* Bytes on each rank, as the picture shows them. */
const bytesNow = ({ n, now, ...plan }) =>
  formatBytes(breathes({ now, ...plan }) ? n.bytes : bytesAt(n, now));

/* How tall the cards are, on their way from the moment before, and the most
   so far. */
function swelling({ moments, moment, way, size, now, ...plan }) {
  const tall = moments.slice(0, moment + 1).map((one) => tallAt(one, size));
  const [before, goal] = [tall.at(-2) ?? tall[0], tall.at(-1)];
  const shut = breathes({ now, way, ...plan }) ? size.kept : goal;
  return {
    height: before + (shut - before) * Math.min(3 * way, 1),
    most: Math.max(...tall),
  };
}

function* drawCard(id, plan, { rank, x, y }, place, ranks) {
  const { size, now, wide } = plan;
  const { height, most } = swelling(plan);
  const bottom = y + size.tall;
  const box = { x, y: bottom - height, width: size.wide, height, rx: 5 };
  const behind = rank === null ? [8, 4] : [];
  for (const by of behind) {
    const deck = { ...box, x: x + by - 4, y: box.y - by + 2, class: "mb-deck" };
    yield svg("rect", deck);
  }
  yield svg("rect", { ...box, class: "mb-card" });
  const rows = rowsAt(now, size).slice(0, breathes(plan) ? 3 : undefined);
  for (const row of rows) {
    const part = TRAYS[row.part] ?? row.part;
    const { y: top } = seat(plan, { x, y }, row, 0);
    yield text(x + 4, top + row.height / 2 + 4, part[0].toUpperCase());
    for (const [slice, have] of now.cells[row.part][place].entries()) {
      const of = seat(plan, { x, y }, row, slice);
      yield* drawSlice(id, part, have, of);
    }
  }
  if (most > size.kept) {
    const y = bottom - most;
    yield line(x, y, x + size.wide, y, "mb-mark");
  }
  const name = rank === null ? t`${ranks - 4} more` : rank || t`rank 0`;
  const bytes = bytesNow(plan);
  const words = wide && rank !== null ? t`${name}: ${bytes}` : name;
  yield text(x + size.wide / 2, bottom + 15, words, MIDDLE);
}

/* The way from each card to the next. */
function* drawWays({ stations, size, now }) {
  if (stations.length < 2) return;
  const [wide, tall] = [size.wide / 2 + 5, size.tall / 2 + 5];
  const name = 17; // below a card
  for (const [i, from] of stations.entries()) {
    const to = stations[(i + 1) % stations.length];
    const [dx, dy] = [to.x - from.x, to.y - from.y];
    const [out, into] = [name, 0].map((more) => {
      const room = tall + (dy > 0 ? more : name - more);
      return Math.min(wide / Math.abs(dx), room / Math.abs(dy));
    });
    const beside = stations.length > 2 ? 0 : Math.sign(dx) * -12;
    const [x, y] = [from.x + wide - 5, from.y + tall - 5 + beside];
    const length = Math.hypot(dx, dy) * (1 - out - into);
    const turn = (Math.atan2(dy, dx) * 180) / Math.PI;
    const look = now.moves.length ? "mb-way" : "mb-way mb-still";
    const d = `M0 0H${length.toFixed(1)}m-6 -4l6 4l-6 4`;
    const at = `translate(${x + out * dx} ${y + out * dy}) rotate(${turn})`;
    yield svg("path", { d, transform: at, class: look });
  }
}

/* The slices on their way. */
function* drawMoves(id, plan) {
  const { now, size, stations, way } = plan;
  const rows = rowsAt(now, size);
  for (const { part, from, to, slice } of now.moves) {
    const row = rows.find((one) => one.part === part);
    const [start, end] = [from, to].map((of) =>
      seat(plan, stations[of], row, slice),
    );
    const go = (a, b) => a + (b - a) * way;
    const box = { ...start, x: go(start.x, end.x), y: go(start.y, end.y) };
    const { phase } = now;
    const kind = phase === "reduce" ? "waiting" : TRAYS[part] ?? part;
    yield svg("rect", { ...box, class: "mb-under" });
    yield* filled(id, kind, "rect", box);
    yield svg("rect", { ...box, class: "mb-token" });
  }
}

/* What happens, and where in the step it is. */
function* drawTrack(id, plan) {
  const { moments, edges, track, now, words, middle, wide } = plan;
  const runs = phaseRuns(moments.map(({ phase }) => phase), edges);
  const named = runs.map(({ phase, ...run }) => {
    const [part, words] = PHASES[phase];
    return { ...run, part, words };
  });
  yield* strip(id, track, named);
  yield dot({ x: plan.cursor.x, y: track + 3.5 }, "mb-handle", 6);
  const look = wide ? MIDDLE : {};
  const [head, place] = momentOf(plan);
  const [, , deed] = PHASES[now.phase];
  const short = named.some((run) => /^[FB]$/.test(labelOf(run)));
  const key = short && now.phase === "rest" ? [KEY] : [];
  const size = bytesNow(plan);
  const one = plan.stations.length < 2;
  const bytes = one ? t`${size} on the rank` : t`${size} on each rank`;
  const last = place ? t`${place}: ${bytes}` : bytes;
  yield text(middle, words, head, { ...look, class: "mb-value mb-moment" });
  for (const [i, one] of [...deed, ...key, last].entries()) {
    yield text(middle, words + 17 + 16 * i, one, look);
  }
}

/* The bytes of a rank, against the card. */
function* drawResult(id, { bar, result, plot, over, wide, ...plan }) {
  const [big, small, usable] = plan.verdict;
  const look = `mb-value mb-verdict${over ? " mb-bad" : ""}`;
  const [y, height] = [bar.y, 15];
  yield text(plot.left, result + 10, big, { class: look });
  const [x, places] = wide ? [plot.right, [-6, 12]] : [plot.left, [28, 44]];
  const beside = [usable, small].map((words, i) =>
    text(x, result + places[i], words, wide ? END : {}),
  );
  yield* beside.slice(usable ? 0 : 1);
  for (const { part, x, width } of bar.kept) {
    yield* filled(id, part, "rect", { x, y, width, height });
  }
  for (const { tray, x, width } of bar.lent) {
    const [part, have] = [TRAYS[tray], tray === "block" ? "lent" : "part"];
    yield* drawPart(id, part, have, { x, y, width, height });
  }
  if (over) {
    const box = { x: bar.limit, y: y - 3, width: bar.end - bar.limit };
    yield* filled(id, "over", "rect", { ...box, height: height + 6 });
  }
  if (bar.beyond) yield ragged(plot.right - 12, y - 3, height + 6);
  if (bar.limit) yield line(bar.limit, y - 5, bar.limit, y + 21, "mb-limit");
  if (bar.ghost !== null) {
    yield line(bar.ghost, y - 3, bar.ghost, y + 18, "mb-ghost");
  }
  yield* lengthAxis(plot, y + 20, bar.axis);
}

function numberTable(id, state, all) {
  const stages = Object.keys(all);
  const bytes = ({ parts, most, sent }) => {
    const gradients = parts.gradients + parts.waiting;
    return { ...parts, gradients, most, sent };
  };
  const row = (key, label, part = null) => {
    const cell = (of) => byteCell(`${of}.${key}`, bytes(all[of])[key]);
    return { part, label, sum: key === "most", cells: stages.map(cell) };
  };
  const head = stages.map((stage) => nameOf(state, stage));
  return table(id, [t`of each rank`, ...head], [
    ...ROWS.map((part) => row(part, HOLDERS[part], part)),
    row("most", t`most in a step`),
    row("sent", t`sent in a step`),
  ]);
}

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["model", "ranks", "stage", "recipe", "accumulation_steps"],
  ...["blocks", "synchronise_last", "card", "tables"],
];

function build({ id, get, set, bound, picture, again }) {
  const { models, stages, recipes, cards } = get().tables;
  const names = stages.map(([, name]) => name);
  const stage = radios({
    label: t`Stage`,
    key: "stage",
    onChange: (name) => set({ stage: stages[names.indexOf(name)][0] }),
  });
  const power = (label, key, most, spoken) => {
    const onInput = (i) => set({ [key]: 2 ** i });
    const control = slider({ label, key, min: 0, onInput });
    return {
      ...control,
      update: (value) =>
        control.update({
          ...{ value: Math.log2(value), max: Math.log2(most), text: value },
          spoken: spoken(value),
        }),
      held: () => String(2 ** control.held()),
      enter: (text) => control.enter(String(Math.log2(text))),
    };
  };
  const ranks = power(t`Ranks N`, "ranks", RANKS.at(-1), (count) =>
    plural(count, "rank"),
  );
  const model = choice({
    label: t`Model`,
    key: "model",
    options: Object.fromEntries([
      ...models.map(([name]) => [name, name]),
      [OWN, t`own number`],
    ]),
    onChange: (name) => set({ model: name === OWN ? countOf(get()) : name }),
  });
  const count = numberField({
    label: t`Parameters Ψ`,
    key: "parameters",
    max: 2 ** 40,
    onChange: (model) => model !== countOf(get()) && set({ model }),
  });
  const pick = (label, key, rows, words) => {
    const options = Object.fromEntries(rows.map((one) => [one[0], words(one)]));
    return bound(choice, label, key, { options });
  };
  const card = pick(t`Card, usable memory`, "card", cards, ([name, size]) =>
    size ? t`${name}: ${formatBytes(size)}` : t`none`,
  );
  const bytes = ([name, , each]) => t`${t(name)}: ${each.join(" + ")}`;
  const of = t`Recipe, bytes per parameter`;
  const recipe = pick(of, "recipe", recipes, bytes);
  const blocks = power(t`Blocks, one at a time`, "blocks", 128, (count) =>
    plural(count, "block"),
  );
  const micro = "accumulation_steps";
  const steps = power(t`Accumulation steps`, micro, 16, (count) =>
    plural(count, "accumulation step"),
  );
  const last = checkBox({
    label: t`Reduce gradients with the last micro-batch only`,
    key: "synchronise_last",
    onChange: (synchronise_last) => set({ synchronise_last }),
  });

  let tick = TICKS / 2; // half way through a moment where it rests
  let plan;
  const play = player({
    key: "play",
    every: 45,
    step() {
      const end = TICKS * plan.moments.length - TICKS / 2;
      if (tick >= end) tick = TICKS / 2;
      if (still()) tick += TICKS;
      else tick = tick < TICKS ? TICKS : tick + 1;
      again();
      return tick < end;
    },
  });
  const seek = (moment) => {
    play.stop();
    tick = TICKS * (moment + 0.5);
    again();
  };
  const when = slider({
    label: t`Moment of the step`,
    key: "moment",
    min: 0,
    onInput: seek,
  });
  drag(picture, {
    grab({ y }) {
      const far = y - plan.track;
      return far > -12 && far < 26 ? true : null;
    },
    move: ({ x }) => seek(momentAt(plan, x)),
  });
  const note = html("p", { class: "mb-note" });

  const draw = (state, width, before) => {
    if (step(state).length + 2 !== plan?.moments.length) {
      play.stop();
      tick = TICKS / 2; // it was of another step
    }
    plan = layout(state, width, tick, before);
    const all = describe(state);
    const typed = typeof state.model === "number";
    const alone = state[micro] === 1 ? t`there is one micro-batch` : "";
    const max = plan.moments.length - 1;
    const spoken = momentOf(plan).filter(Boolean).join(t`, `);
    when.update({ value: plan.moment, max, spoken });
    stage.update({ value: nameOf(state, state.stage), options: names });
    ranks.update(state.ranks);
    model.update({ value: typed ? OWN : state.model });
    count.root.hidden = !typed;
    count.update({ value: countOf(state) });
    blocks.update(state.blocks);
    steps.update(state[micro]);
    last.update({ value: state.synchronise_last, disabled: alone });
    const [kept] = row(recipes, state.recipe);
    const how = t`The recipe: ${t(kept)}, with Adam.`;
    note.textContent = [how, NOTE].join(t` `);
    return {
      title: titleOf(state),
      sentence: sentence(state, all),
      numbers: [numberTable(id, state, all)],
      height: plan.height,
      drawn: [
        ...drawWays(plan),
        ...plan.stations.flatMap((one, place) => [
          ...drawCard(id, plan, one, place, state.ranks),
        ]),
        ...drawMoves(id, plan),
        ...drawTrack(id, plan),
        ...drawResult(id, plan),
      ],
    };
  };
  return {
    ...{ note, draw, stop: play.stop },
    controls: [stage, ranks, play],
    legend: legend(id, PARTS),
    // no key: not in the address
    more: [card, model, count, recipe, blocks, steps, last, { root: when.root }],
  };
}

export default widget({ name: "sharding", keys, build });
