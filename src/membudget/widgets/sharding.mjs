import {
  PHASE_WORDS,
  axes,
  budgetLine,
  checkBox,
  choice,
  dot,
  drag,
  filled,
  formatBytes,
  formatNumber,
  grouped,
  heights,
  html,
  legend,
  numberField,
  phaseRuns,
  player,
  plural,
  radios,
  slider,
  strip,
  svg,
  table,
  text,
  widget,
} from "./base.mjs";

/* Ranks as cards: what each holds, and the shards that they send each other.

   describe(state): the bytes; their coefficients come from Python (tables).
   step(state): the moments of a training step.
   layout(state, width, moment): where everything stands in the picture. */

const RANKS = Array.from({ length: 11 }, (_, i) => 2 ** i);
const OWN = "own number"; // of parameters

const PARTS = {
  parameters: "parameters (P)",
  gradients: "gradients (G)",
  waiting: "not yet reduced",
  optimizer: "optimizer states (O)",
};

const ROWS = ["parameters", "gradients", "optimizer"];

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
    const each = moved(state, stage);
    const whole = countOf(state) * sum(each);
    const fits = (ranks) => sum(held(state, stage, ranks)) <= card;
    return {
      ...{ parts, bytes: sum(parts), each },
      sent: whole - Math.ceil(whole / state.ranks),
      fits: card ? fits(state.ranks) : null,
      fewest: (card && RANKS.find(fits)) || null,
    };
  };
  const { stages } = state.tables;
  return Object.fromEntries(stages.map(([stage]) => [stage, of(stage)]));
}

// ---- a training step -----------------------------------------------------

/** Of each phase: its colour, its names and what happens, in two lines. */
export const PHASES = {
  rest: ["rest", ["Between two steps"],
    ["Play a step, or drag along it.", "F is forward, B is backward."]],
  gather: ["parameters", ["gather"],
    ["All-gather: each passes its slice on,", "block by block."]],
  forward: ["phase-forward", PHASE_WORDS.forward,
    ["Each rank runs this", "on its own samples."]],
  free: ["phase-optimizer", ["free"],
    ["After each block, each keeps", "its own slice alone."]],
  backward: ["phase-backward", PHASE_WORDS.backward,
    ["Each rank has whole gradients,", "of its own samples alone."]],
  reduce: ["gradients", ["reduce"],
    ["Reduce-scatter: each passes a slice on,", "the next adds its own."]],
  spread: ["gradients", ["gather"],
    ["All-gather ends the all-reduce:", "each passes a sum on."]],
  optimizer: ["phase-optimizer", ["optimizer step", "step"],
    ["Each rank updates what it has", "the optimizer states of."]],
  renew: ["parameters", ["gather"],
    ["All-gather: each passes its new", "parameters on, until all have all."]],
};

/** The ranks that are drawn: their numbers, and null for those between. */
export const drawnOf = (ranks) =>
  ranks > 4 ? [0, 1, 2, null, ranks - 1] : [...Array(ranks).keys()];

/* What each drawn rank has of each slice: its "own", "lent" for a while,
   a "part" of a sum that is not done, or nothing. */
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
  const cells = { parameters, gradients: all, optimizer };
  return { phase: "rest", batch: "", moves: [], cells };
}

/** The moments of a step. In each round of a ring every rank sends a slice to
    the next (`moves`), and in the moment after it the slice is there. */
export function step(state) {
  const [parameters, gradients, optimizer] = splitOf(state, state.stage);
  const steps = state.accumulation_steps;
  const { cells } = atRest(state);
  cells.gradients = slices(state, false, "");
  const count = cells.gradients.length;
  const moments = [];
  let batch = "";
  const add = (phase, moves = []) =>
    moments.push({ phase, batch, moves, cells: structuredClone(cells) });
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
  const reduce = () =>
    ring("reduce", "gradients", 0, (of, { from, to, slice }, last) => {
      of[from][slice] = gradients ? "" : "part";
      of[to][slice] = last ? "own" : "part";
    });
  const free = () => (cells.parameters = slices(state, parameters));
  for (const number of new Set([1, steps])) {
    if (steps > 1) batch = `micro-batch ${number}`;
    if (parameters) gather("gather", "parameters", "lent");
    add("forward");
    free();
    if (parameters) add("free");
    if (parameters) gather("gather", "parameters", "lent");
    cells.gradients = slices(state, false, count > 1 ? "part" : "own");
    add("backward");
    free();
    if (waits(state) && number < steps) continue;
    reduce();
    if (!optimizer) gather("spread", "gradients", "own");
  }
  batch = "";
  add("optimizer");
  if (optimizer && !parameters) {
    cells.parameters = slices(state, true);
    gather("renew", "parameters", "own");
  }
  return moments;
}

// ---- words ---------------------------------------------------------------

/** The chosen stage in words. */
export function sentence(state, all = describe(state)) {
  const { stage, ranks, card } = state;
  const [n, ddp] = [all[stage], all.ddp];
  const against = (ratio, more) => {
    if (stage === "ddp") return "";
    const times = formatNumber(ratio);
    return times === "1" ? ", as much as DDP" : `, ${times} times ${more} DDP`;
  };
  const wait = n.parts.waiting;
  const waiting = wait ? ` (${formatBytes(wait)} wait to be reduced)` : "";
  const less = against(ddp.bytes / n.bytes, "less than");
  const more = against(sum(n.each) / sum(ddp.each), "as much as");
  const sends = `Each sends ${formatBytes(n.sent)} per step${more}.`;
  const never = card !== "none" && !n.fewest;
  const least = ranks > 1 && n.fewest === ranks;
  return (
    `${nameOf(state, stage)} on ${plural(ranks, "rank")}: each holds ` +
    `${formatBytes(n.bytes)} of model states${waiting}${less}. ` +
    (ranks === 1 ? "Nothing is sent." : sends) +
    (never ? " No number of ranks makes them fit." : "") +
    (least ? " Half as many ranks would be too few." : "")
  );
}

function titleOf({ model, recipe, tables }) {
  const name = typeof model === "number" ? grouped(model) : model;
  const what = /( B|\d)$/.test(name) ? `${name} parameters` : name;
  return `Model states of ${what}: ${row(tables.recipes, recipe)[0]}`;
}

/* What everybody sees, what it is of, and what it is compared with. */
function verdict(state, { bytes, fits, parts }) {
  const [size, card] = [formatBytes(bytes), cardOf(state)];
  const what = parts.waiting
    ? "States between micro-batches"
    : "Model states between two steps";
  if (fits === null) return [`${size} per rank`, what, "no card is chosen"];
  const over = formatBytes(Math.abs(card - bytes));
  const big = fits ? `fits, ${over} left` : `${over} too much`;
  const usable = `${state.card}: ${formatBytes(card)} usable`;
  return [big, `${what}: ${size}`, usable];
}

const NOTE =
  "Each box is a card’s usable memory. A bar with a break is not to scale " +
  "above it. Of the cells below, a column is a slice: a " +
  "filled one is on this rank, a pale one for a while, a hatched pale one " +
  "is not yet reduced, a dotted one stands for many. Ranks send in a ring. " +
  "Split gradients are reduced after each block of the backward pass. " +
  "Activations, gathered blocks and buffers are not counted. ZeRO-1 and " +
  "ZeRO-2 are the paper’s: they gather new parameters once in a step, and " +
  "FSDP2’s zero-2 for every micro-batch.";

// ---- geometry ------------------------------------------------------------

/* Parts on each other: where each begins and ends. */
function pile(parts, at) {
  let end = 0;
  return Object.entries(parts)
    .filter(([, size]) => size)
    .map(([part, size]) => ({ part, from: at(end), to: at((end += size)) }));
}

/* The drawn ranks, their bars and their cells. */
function stations({ ranks }, { left, right, tall }) {
  const drawn = drawnOf(ranks);
  const slot = (right - left) / drawn.length;
  const cell = Math.min(tall, (slot - 20) / drawn.length);
  const width = Math.min(0.66 * slot, 70);
  const half = (cell * drawn.length) / 2;
  return drawn.map((rank, i) => {
    const middle = left + (i + 0.5) * slot;
    const bar = { x: middle - width / 2, width };
    return { rank, middle, bar, cell, from: middle - half, to: middle + half };
  });
}

/* Where moments begin; a round of a ring is short. */
function edgesOf(moments, { left, right }) {
  const ends = [0];
  for (const { phase, moves } of moments) {
    const short = moves.length || phase === "rest";
    ends.push(ends.at(-1) + (short ? 1 : 3));
  }
  return ends.map((end) => left + ((right - left) * end) / ends.at(-1));
}

/* The heights of bytes. What is too high is pressed together above the card,
   so that all of its parts are seen. */
function scale(axis, { top }, card, bytes) {
  if (axis.y(bytes) >= top) return axis.y;
  const edge = axis.y(card);
  const press = (edge - top) / (bytes - card);
  return (size) => (size > card ? edge - (size - card) * press : axis.y(size));
}

/** Where everything stands; the first and the last moment are at rest. */
export function layout(state, width, moment = 0, before = null) {
  const [all, rest] = [describe(state), atRest(state)];
  const moments = [rest, ...step(state), rest];
  const n = all[state.stage];
  const wide = width >= 560;
  const right = wide ? Math.round(0.57 * width) : width - 4;
  const size = wide ? { bottom: 214, tall: 17 } : { bottom: 180, tall: 12 };
  const plot = { left: 34, right, top: 70, ...size };
  const card = cardOf(state);
  const axis = heights(plot, card ? 1.3 * card : 1.05 * all.ddp.bytes);
  if (card) axis.ticks = axis.ticks.filter(({ y }) => y >= axis.y(card));
  const old = before ? describe(before)[before.stage].bytes : n.bytes;
  const ghost = old !== n.bytes && axis.y(old) >= plot.top;
  const track = plot.bottom + 58 + 3 * plot.tall;
  const under = track + (wide ? 82 : 99);
  const charts = wide
    ? { x: right + 24, y: 18, width: width - right - 24, pitch: 28 }
    : { x: 0, y: under + 12, width, pitch: 19 };
  const edges = edgesOf(moments, plot);
  const middle = (edges[moment] + edges[moment + 1]) / 2;
  return {
    ...{ plot, axis, moments, moment, edges, track, charts },
    now: moments[moment],
    cursor: { x: middle, y: track + 3.5 },
    card: card && axis.y(card),
    boxes: pile(n.parts, scale(axis, plot, card, n.bytes)),
    broken: axis.y(n.bytes) < plot.top,
    ghost: ghost ? axis.y(old) : null,
    stations: stations(state, plot),
    rows: ROWS.map((_, i) => plot.bottom + 28 + (plot.tall + 3) * i),
    verdict: verdict(state, n),
    pause: n.parts.waiting ? "Between micro-batches" : PHASES.rest[1][0],
    over: n.fits === false,
    height: wide ? under : charts.y + 7 * charts.pitch + 63,
  };
}

/** The moment at a place on the track. */
export const momentAt = ({ edges }, x) =>
  edges.slice(1, -1).filter((edge) => edge <= x).length;

/** Which moment it is, in words. */
function momentOf({ now, moment, moments, pause }) {
  const [, [head]] = PHASES[now.phase];
  if (now.phase === "rest") return pause;
  const place = `${moment} of ${moments.length - 2}`;
  return [place, now.batch, head].filter(Boolean).join(", ");
}

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

function* drawCards(id, { plot, card, ghost, over, ...plan }, ranks) {
  const { top, bottom } = plot;
  const [big, small, usable] = plan.verdict;
  const look = `mb-value mb-verdict${over ? " mb-bad" : ""}`;
  const rect = (box, name) => svg("rect", { ...box, class: name });
  yield* axes(plot, plan.axis);
  yield text(2, 21, big, { class: look });
  yield text(2, 41, small);
  yield text(plot.right, top - 11, usable, END);
  const budget = card ? budgetLine(id, plot, card, over) : [];
  yield* budget.slice(0, -1);
  for (const { rank, bar, middle } of plan.stations) {
    const name = rank === null ? `${ranks - 4} more` : rank || "rank 0";
    yield text(middle, bottom + 18, name, MIDDLE);
    if (rank === null) {
      yield text(middle, (top + bottom) / 2, "…", MIDDLE);
      continue;
    }
    const above = (y) => ({ ...bar, y, height: bottom - y });
    if (card) yield rect(above(card), "mb-card");
    for (const { part, from, to } of plan.boxes) {
      yield* filled(id, part, "rect", { ...bar, y: to, height: from - to });
    }
    if (ghost !== null) yield rect(above(ghost), "mb-ghost");
    const tooth = `l${bar.width / 12} -4l${bar.width / 12} 4`;
    const d = `M${bar.x} ${card - 4}${tooth.repeat(6)}`;
    if (plan.broken) yield svg("path", { d, class: "mb-break" });
  }
  yield* budget.slice(-1);
}

/* The slices on each rank. */
function* drawSlices(id, { plot, stations, rows, now }) {
  for (const [i, part] of ROWS.entries()) {
    const [y, height] = [rows[i], plot.tall];
    yield text(plot.left - 6, y + height - 3, part[0].toUpperCase(), END);
    for (const [s, { from, cell }] of stations.entries()) {
      for (const [j, have] of now.cells[part][s].entries()) {
        const box = { x: from + j * cell, y, width: cell - 1, height };
        const lent = `mb-fill-${part} mb-lent`;
        if (have === "lent") yield svg("rect", { ...box, class: lent });
        else if (have) {
          const name = have === "part" ? "waiting" : part;
          yield* filled(id, name, "rect", box);
        }
        yield svg("rect", { ...box, class: "mb-cell" });
        const middle = box.x + (cell - 1) / 2;
        const many = stations[j].rank === null;
        const look = { ...MIDDLE, class: "mb-value" };
        if (many) yield text(middle, y + height / 2 + 1, "…", look);
      }
    }
  }
}

/* The slices on their way: from each rank to the next, and from the last,
   below all of them, to the first. */
function* drawMoves(id, { plot, stations, rows, now }) {
  for (const { part, from, to } of now.moves) {
    const [start, end] = [stations[from].to, stations[to].from];
    const y = rows[ROWS.indexOf(part)] + plot.tall / 2;
    const low = rows[2] + plot.tall + 12;
    const back = to < from;
    const way = back ? `h5V${low}H${end - 6}V${y}` : `H${end - 4}`;
    yield svg("path", { d: `M${start} ${y}${way}`, class: "mb-way" });
    const head = `M${end - 6} ${y - 4}l5 4l-5 4z`;
    yield svg("path", { d: head, class: "mb-head" });
    const room = stations[1].from - stations[0].to;
    const width = Math.min(plot.tall - 3, room - 11);
    const x = (start + end - width) / 2 - (back ? 0 : 3);
    const box = { x, y: (back ? low : y) - width / 2, width, height: width };
    yield* filled(id, part, "rect", box);
  }
}

/* The step, where it is, and what happens. */
function* drawTrack(id, plan) {
  const { moments, edges, track, now } = plan;
  const runs = phaseRuns(moments.map(({ phase }) => phase), edges);
  const named = runs.map(({ phase, ...run }) => {
    const [part, words] = PHASES[phase];
    return { ...run, part, words };
  });
  yield* strip(id, track, named);
  yield dot(plan.cursor, "mb-handle", 6);
  const look = { class: "mb-value mb-moment" };
  yield text(2, track + 41, momentOf(plan), look);
  const [, , [one, two]] = PHASES[now.phase];
  yield text(2, track + 58, one);
  yield text(2, track + 75, two);
}

/* What each stage holds, and what it sends: a bar for each. */
function* drawCharts(id, { charts: { x, y, width, pitch } }, state, all) {
  const stages = Object.entries(all);
  function* chart(title, top, most, bar) {
    const at = (bytes) => x + 54 + ((width - 134) * bytes) / most;
    yield text(x + 2, top, title, { class: "mb-value" });
    for (const [i, [stage, n]] of stages.entries()) {
      const { value, parts } = bar(n);
      const y = top + 10 + pitch * i;
      const row = { x, y: y - 2, width, height: 18, class: "mb-chosen" };
      if (stage === state.stage) yield svg("rect", row);
      yield text(x + 4, y + 11, nameOf(state, stage));
      for (const { part, from, to } of pile(parts, at)) {
        const box = { x: from, y, width: to - from, height: 14 };
        yield* filled(id, part, "rect", box);
      }
      yield text(at(sum(parts)) + 6, y + 11, value);
    }
  }
  const holds = ({ bytes, parts, fits }) => {
    const sign = fits === null ? "" : fits ? " ✓" : " ✗";
    return { value: formatBytes(bytes) + sign, parts };
  };
  const sends = ({ sent, each }) => {
    const gradients = (sent * each.gradients) / sum(each);
    const parts = { parameters: sent - gradients, gradients };
    return { value: formatBytes(sent), parts };
  };
  const most = countOf(state) * Math.max(...stages.map(([, n]) => sum(n.each)));
  const low = y + 4 * pitch + 36;
  yield* chart("held by each rank", y, all.ddp.bytes, holds);
  yield* chart("sent by each rank per step", low, most, sends);
}

function numberTable(id, state, all) {
  const head = ["stage", "parameters", "gradients", "optimizer states", "sent"];
  const rows = Object.entries(all).map(([stage, { parts, sent }]) => {
    const gradients = parts.gradients + parts.waiting;
    const cells = ROWS.concat("sent").map((key) => {
      const size = { ...parts, gradients, sent }[key];
      return [`${stage}.${key}`, size, formatBytes(size)];
    });
    return { label: nameOf(state, stage), sum: stage === state.stage, cells };
  });
  return table(id, head, rows);
}

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["model", "ranks", "stage", "recipe", "accumulation_steps"],
  ...["synchronise_last", "card", "tables"],
];

function build({ id, get, set, bound, picture, again }) {
  const { models, stages, recipes, cards } = get().tables;
  const names = stages.map(([, name]) => name);
  const stage = radios({
    label: "Stage",
    key: "stage",
    onChange: (name) => set({ stage: stages[names.indexOf(name)][0] }),
  });
  const power = (label, key, most, thing) => {
    const onInput = (i) => set({ [key]: 2 ** i });
    const control = slider({ label, key, min: 0, onInput });
    return {
      ...control,
      update: (value) =>
        control.update({
          ...{ value: Math.log2(value), max: Math.log2(most), text: value },
          spoken: plural(value, thing),
        }),
      held: () => String(2 ** control.held()),
      enter: (text) => control.enter(String(Math.log2(text))),
    };
  };
  const ranks = power("Ranks N", "ranks", RANKS.at(-1), "rank");
  const model = choice({
    label: "Model",
    key: "model",
    options: [...models.map(([name]) => name), OWN],
    onChange: (name) => set({ model: name === OWN ? countOf(get()) : name }),
  });
  const count = numberField({
    label: "Parameters Ψ",
    key: "parameters",
    max: 2 ** 40,
    onChange: (model) => model !== countOf(get()) && set({ model }),
  });
  const pick = (label, key, rows, words) => {
    const options = Object.fromEntries(rows.map((one) => [one[0], words(one)]));
    return bound(choice, label, key, { options });
  };
  const card = pick("Card, usable memory", "card", cards, ([name, size]) =>
    size ? `${name}: ${formatBytes(size)}` : name,
  );
  const bytes = ([name, , each]) => `${name}: ${each.join(" + ")}`;
  const recipe = pick("Recipe, bytes per parameter", "recipe", recipes, bytes);
  const micro = "accumulation_steps";
  const steps = power("Accumulation steps", micro, 16, "accumulation step");
  const last = checkBox({
    label: "Reduce gradients with the last micro-batch only",
    key: "synchronise_last",
    onChange: (synchronise_last) => set({ synchronise_last }),
  });

  let moment = 0;
  let plan;
  const play = player({
    key: "play",
    every: 450,
    step() {
      const end = plan.moments.length - 1;
      moment = moment === end ? 1 : moment + 1;
      again();
      return moment < end;
    },
  });
  const seek = (at) => {
    play.stop();
    moment = at;
    again();
  };
  const when = slider({
    label: "Moment of the step",
    key: "moment",
    min: 0,
    onInput: seek,
  });
  drag(picture, {
    grab({ x, y }) {
      const [right, far] = [plan.plot.right + 9, y - plan.track];
      return far > -12 && far < 26 && x < right ? true : null;
    },
    move: ({ x }) => seek(momentAt(plan, x)),
  });
  const note = html("p", { class: "mb-note" });

  const draw = (state, width, before) => {
    if (step(state).length + 2 !== plan?.moments.length) {
      play.stop();
      moment = 0; // it was of another step
    }
    plan = layout(state, width, moment, before);
    const all = describe(state);
    const typed = typeof state.model === "number";
    const alone = state[micro] === 1 ? "there is one micro-batch" : "";
    const max = plan.moments.length - 1;
    when.update({ value: moment, max, spoken: momentOf(plan) });
    stage.update({ value: nameOf(state, state.stage), options: names });
    ranks.update(state.ranks);
    model.update({ value: typed ? OWN : state.model });
    count.root.hidden = !typed;
    count.update({ value: countOf(state) });
    steps.update(state[micro]);
    last.update({ value: state.synchronise_last, disabled: alone });
    const [kept] = row(recipes, state.recipe);
    note.textContent = `The recipe: ${kept}, with Adam. ${NOTE}`;
    return {
      title: titleOf(state),
      sentence: sentence(state, all),
      numbers: [numberTable(id, state, all)],
      height: plan.height,
      drawn: [
        ...drawCards(id, plan, state.ranks),
        ...drawSlices(id, plan),
        ...drawMoves(id, plan),
        ...drawTrack(id, plan),
        ...drawCharts(id, plan, state, all),
      ],
    };
  };
  return {
    ...{ note, draw, stop: play.stop },
    controls: [stage, ranks, play],
    legend: legend(id, PARTS),
    // no key: not in the address
    more: [card, model, count, recipe, steps, last, { root: when.root }],
  };
}

export default widget({ name: "sharding", keys, build });
