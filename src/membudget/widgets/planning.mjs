import {
  axes,
  budgetLine,
  button,
  byteTicks,
  choice,
  dot,
  drag,
  filled,
  formatBytes,
  grouped,
  HOLDERS,
  html,
  legend,
  line,
  numberField,
  numberList,
  plural,
  slider,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";

/* The planner: every way to train a model within a budget, and the fastest.

   Python sends rows of coefficients: those of the moments that can be the
   worst, and of what a micro-batch does. A row's bytes are affine in the
   sequences of a micro-batch, and in the blocks that are checkpointed.

   search(state): as membudget.planning.search.
   peakOf(space, plan), timeOf(space, plan): of one plan. A space is what the
   reader asks for, with one recipe of precision.
   layout(state, width): where everything stands in the picture. */

const [MIB, GIB] = [2 ** 20, 2 ** 30];
const [SCALED, TOKEN] = [8, 16]; // bytes: of a scaled loss, of a token
const CHUNKS = [null, 2, 4, 8, 16];
const SHARDED = ["zero-2", "zero-3"];
export const STAGES = ["ddp", ...SHARDED];
const CAUSE_WORDS = {
  recomputation: t`recomputation`,
  "small micro-batches": t`small micro-batches`,
  traffic: t`traffic`,
  precision: t`precision`,
};
export const CAUSES = Object.keys(CAUSE_WORDS);
const TRAINED = { all: t`all weights`, lora: "LoRA", qlora: "QLoRA" };
const FREE = { checkpointed: "any", chunks: "any", micro: 0, stage: "any" };
const WORDS = {
  master: t`bf16 with an fp32 copy`,
  sgd: "SGD",
  momentum: t`SGD with momentum`,
  adam: "Adam",
  "adam-8bit": t`8-bit Adam`,
  "lion-8bit": t`8-bit Lion`,
};

// ---- one plan ------------------------------------------------------------

const most = (values) => values.reduce((a, b) => (b > a ? b : a));

const adapted = ({ trained }) => trained !== "all";

/* The recipes that may be. */
const recipesOf = (state) => {
  const { tables, recipe, trained } = state;
  if (adapted(state)) return [tables.adapters[trained].recipe];
  return recipe === "any" ? Object.keys(tables.recipes) : [recipe];
};

/** What the reader asks for, with one of the recipes. */
export function spaceOf(state, recipe = recipesOf(state)[0]) {
  const { tables, ranks, optimizer, tokens, trained } = state;
  const model = tables.models[state.model];
  const adapter = tables.adapters[trained];
  const kind = adapter ?? tables.recipes[recipe];
  const way = adapter ? trained : recipe;
  const card = tables.cards[state.card];
  const batch = Math.max(state.batch, ranks);
  const step = model.steps[`${tokens} ${adapter ? trained : kind.like}`];
  return {
    ...{ model, kind, card, batch, tokens, ranks, recipe, optimizer, step },
    ...{ adapter, way, trained: adapter ? model.adapted : model.parameters },
    share: batch / ranks,
    budget: (state.budget || Math.floor(card.usable / MIB)) * MIB,
    states: model.states[way][optimizer],
    sharded: model.sharded[kind.sharded]?.[ranks],
    pool: model.pool,
    machine: {
      flops: card.flops[recipe],
      bandwidth: tables.efficiency * card.bandwidth,
      operator: tables.operator,
      link: tables.efficiency * card.link,
    },
  };
}

/* A row is Python's (membudget.planning.rows): the numbers of its name and its
   phase, then the coefficients c, s, c', s' of each part, which begin here. */
const STARTS = { activations: 2, temporaries: 6, gradients: 10 };
const TOTAL = [0, 1, 2, 3].map((i) => Object.values(STARTS).map((at) => at + i));
const sumAt = (row, places) =>
  places.reduce((sum, at) => sum + (row[at] ?? 0), 0);

/* Rows hold for 0, 1, all but two, all but one and all blocks checkpointed,
   and for the numbers between. */
function caseOf(j, depth) {
  if (j < 2) return j;
  return j > depth - 3 ? 5 + j - depth : 2;
}

/* The moments of a group with j blocks checkpointed: constant, slope, row. */
function linesOf(space, group, chunks, j) {
  const { step, pool, model } = space;
  const list = step.rows[CHUNKS.indexOf(chunks)][group][caseOf(j, model.depth)];
  return model.lists[list].map((at) => {
    const row = pool[at];
    const [c, s, d, e] = TOTAL.map((places) => sumAt(row, places));
    return { at: c + d * j, slope: s + e * j, row };
  });
}

const highest = (lines, size) =>
  lines.length ? most(lines.map(({ at, slope }) => at + slope * size)) : 0;

/* The groups of moments that a plan meets: what is there beside them, the
   group, and sequences. Groups 0 to 3: a micro-batch alone, the first, one
   that finds gradients, a later one; then the places of one under FSDP2. */
function* meets({ share, ranks, states, sharded, optimizer }, stage, size) {
  const several = size < share;
  if (stage === "ddp") {
    const [parameters, gradients, own, work] = states;
    const held = { parameters, gradients: 0, optimizer: own, temporaries: 0 };
    const beside = { ...held, gradients };
    yield { held: { ...beside, temporaries: work } };
    if (ranks > 1 || size * 2 <= share) {
      yield { held: beside, group: several ? 3 : 2, size };
      return;
    }
    yield { held, group: several ? 1 : 0, size };
    if (several) yield { held: beside, group: 3, size: share - size };
    return;
  }
  const { held, summed, last, own } = sharded[stage];
  const [optimizer_, work] = own[optimizer];
  const later = size * 2 <= share;
  const passes = later ? [] : [[held, size]];
  if (several) passes.push([summed, later ? size : share - size]);
  for (const [spots, size] of passes) {
    for (const [place, parameters, gradients, buffers] of spots) {
      const temporaries = buffers + (several ? SCALED : 0);
      const beside = { parameters, gradients, temporaries };
      const held = { ...beside, optimizer: optimizer_ };
      yield { held, group: 4 + place, size };
    }
  }
  const [parameters, gradients, buffers] = last;
  const temporaries = buffers + work;
  yield {
    held: { parameters, gradients, optimizer: optimizer_, temporaries },
  };
}

const total = (held) =>
  held.parameters + held.gradients + held.optimizer + held.temporaries;

/** Bytes of a rank at the worst moment. */
export function peakOf(space, { stage, size, blocks, chunks }) {
  const needs = [...meets(space, stage, size)].map((one) => {
    if (one.group === undefined) return total(one.held);
    const lines = linesOf(space, one.group, chunks, blocks);
    return total(one.held) + highest(lines, one.size);
  });
  return TOKEN * space.tokens * space.share + most(needs);
}

/** The worst moment: its row, its phase, and who has the bytes. */
export function momentOf(space, { stage, size, blocks, chunks }) {
  const inputs = TOKEN * space.tokens * space.share;
  let best = null;
  for (const one of meets(space, stage, size)) {
    const lines =
      one.group === undefined
        ? [{ row: null }]
        : linesOf(space, one.group, chunks, blocks);
    for (const { row } of lines) {
      const cell = (from) => {
        const [c, s, d, e] = [0, 1, 2, 3].map((i) => row?.[from + i] ?? 0);
        return c + d * blocks + (s + e * blocks) * (one.size ?? 0);
      };
      const split = {
        parameters: one.held.parameters,
        gradients: one.held.gradients + cell(STARTS.gradients),
        optimizer: one.held.optimizer,
        activations: cell(STARTS.activations),
        inputs,
        temporaries: one.held.temporaries + cell(STARTS.temporaries),
      };
      const bytes = Object.values(split).reduce((a, b) => a + b, 0);
      if (best && bytes <= best.bytes) continue;
      const [name, phase] = row
        ? [space.model.names[row[0]], space.model.phases[row[1]]]
        : ["optimizer", "optimizer"];
      best = { row: name, phase, split, bytes };
    }
  }
  return best;
}

/* FLOPs, bytes, operators and traffic of a rank in a step. */
function workOf(space, { stage, size, blocks, chunks }) {
  const { share, step, ranks, optimizer, way, kind, model } = space;
  const parts = Math.ceil(share / size);
  const [plain, plainEach, cut, cutEach, again, againEach, added, scaled, more]
    = step.work;
  const [first, each] = chunks ? [cut, cutEach] : [plain, plainEach];
  const split = stage !== "ddp";
  const done = [0, 1, 2].map((i) => {
    const accumulated =
      parts > 1 ? (parts - 1) * added[i] + parts * scaled[i] : 0;
    return (
      share * (each[i] + blocks * againEach[i]) +
      parts * (first[i] + blocks * again[i]) +
      accumulated +
      (chunks ? parts * (chunks - 1) * more[i] : 0)
    );
  });
  const [moved, called] = model.updates[way][optimizer];
  const gathers = { ddp: 0, "zero-2": 1, "zero-3": 2 }[stage];
  const sent =
    gathers * parts * kind.parameters + (split ? parts : 2) * kind.gradients;
  return {
    flops: done[0],
    bytes: done[1] + (split ? Math.ceil(moved / ranks) : moved),
    operators: done[2] + called,
    traffic: Math.floor((space.trained * sent * (ranks - 1)) / ranks),
  };
}

const secondsOf = (work, machine) =>
  work.flops / machine.flops +
  work.bytes / machine.bandwidth +
  work.operators * machine.operator +
  work.traffic / machine.link;

/** Seconds of a step. */
export const timeOf = (space, plan) =>
  secondsOf(workOf(space, plan), space.machine);

/* The slowdown less 1, by cause. */
function causesOf(plan, fastest) {
  const spent = (plan, more = {}) => {
    const work = workOf(plan.space, { ...plan, ...more });
    return secondsOf({ ...work, traffic: 0 }, plan.space.machine);
  };
  const once = { blocks: 0, chunks: null };
  const again = (plan) => spent(plan) - spent(plan, once);
  const whole = fastest.seconds;
  const alike = { ...once, size: fastest.size };
  const parts = {
    recomputation: again(plan) - again(fastest),
    "small micro-batches": spent(plan, once) - spent(plan, alike),
    traffic: plan.seconds - spent(plan) - (whole - spent(fastest)),
    precision: spent(plan, alike) - spent(fastest, once),
  };
  return Object.fromEntries(CAUSES.map((key) => [key, parts[key] / whole]));
}

// ---- all plans -----------------------------------------------------------

/* Why nothing is sharded; "" where it can be. */
function whyDdp(state) {
  if (state.ranks === 1) return t`one card is not split`;
  if (state.optimizer.endsWith("8bit")) return t`8-bit states go with ddp`;
  return adapted(state) ? t`an adapter goes with ddp` : "";
}

/** What the locks leave of each axis. */
export function axesOf(state) {
  const { share } = spaceOf(state);
  const { depth } = state.tables.models[state.model];
  const blocks = { none: [0], all: [depth] }[state.checkpointed];
  const equal = Array.from({ length: share }, (_, i) =>
    Math.ceil(share / (i + 1)),
  );
  const sizes = [...new Set(equal)].sort((a, b) => a - b);
  let stages = state.stage === "any" ? STAGES : [state.stage];
  if (whyDdp(state)) stages = ["ddp"];
  const { chunks } = state;
  return {
    stages,
    blocks: blocks ?? Array.from({ length: depth + 1 }, (_, i) => i),
    chunks: chunks === "any" ? CHUNKS : [chunks === "none" ? null : +chunks],
    sizes: state.micro ? [Math.min(state.micro, share)] : sizes,
  };
}

/* Of the plans with two micro-batches the first with the least peak. A longer
   first one needs more, the shorter second one less: the peak falls, may rest
   at its least, and grows. */
function sizeOf({ share, ranks }, size, peak, free) {
  if (!free || ranks > 1 || size * 2 < share || size === share) return size;
  let [low, high] = [size, share - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (peak(middle + 1) < peak(middle)) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* The plans of each micro-batch: peak and seconds. */
function bySize(space, plan, sizes, free) {
  const lines = new Map(); // of a group, for all sizes
  const peak = (size) => {
    let worst = 0;
    for (const { held, group, size: m } of meets(space, plan.stage, size)) {
      if (group !== undefined && !lines.has(group)) {
        lines.set(group, linesOf(space, group, plan.chunks, plan.blocks));
      }
      const need = group === undefined ? 0 : highest(lines.get(group), m);
      worst = Math.max(worst, total(held) + need);
    }
    return TOKEN * space.tokens * space.share + worst;
  };
  return sizes.map((one) => {
    const size = sizeOf(space, one, peak, free);
    const found = { ...plan, space, size, peak: peak(size) };
    return { ...found, seconds: timeOf(space, found) };
  });
}

/** All plans, the fastest first, and the frontier; as Python's search. */
export function search(state) {
  const all = axesOf(state);
  const found = [];
  for (const recipe of recipesOf(state)) {
    const space = spaceOf(state, recipe);
    for (const stage of all.stages) {
      for (const blocks of all.blocks) {
        for (const chunks of all.chunks) {
          found.push(...bySize(space, { stage, blocks, chunks }, all.sizes,
            !state.micro));
        }
      }
    }
  }
  for (const [place, plan] of found.entries()) plan.place = place;
  found.sort(
    (a, b) => a.seconds - b.seconds || a.peak - b.peak || a.place - b.place,
  );
  const [fastest] = found;
  const frontier = [];
  for (const plan of found) {
    if (!frontier.length || plan.peak < frontier.at(-1).peak) {
      frontier.push(plan);
    }
  }
  return {
    ...{ fastest, found, plans: found.length },
    frontier: frontier.reverse(),
  };
}

/* The fastest plans within the budget, each with other savings. */
function bestOf({ share, budget }, found) {
  const best = new Map();
  for (const plan of found) {
    const { size, blocks, chunks, stage, peak, space } = plan;
    const saved = [size < share, blocks > 0, chunks !== null];
    const key = [...saved, space.recipe, stage].join();
    if (peak <= budget && !best.has(key)) best.set(key, plan);
  }
  return [...best.values()].slice(0, 3);
}

let last = {}; // the answers to the last few questions
/* Another budget, or another plan to look at, asks nothing new. */
function answer(state) {
  const { tables, pick, budget, ...asked } = state;
  const key = JSON.stringify(asked);
  if (last.tables !== tables) last = { tables, found: new Map() };
  const { found } = last;
  if (!found.has(key)) {
    if (found.size > 7) found.delete(found.keys().next().value);
    found.set(key, search(state));
  }
  return found.get(key);
}

/* The fastest plan within the budget; the smallest where none is. */
const within = ({ frontier }, size) =>
  frontier.findLast(({ peak }) => peak <= size);

/* The plan that the reader's switches say; null where they say nothing. */
function yoursOf(state, space) {
  if (Object.entries(FREE).every(([key, free]) => state[key] === free)) {
    return null;
  }
  const found = answer(state);
  return within(found, space.budget) ?? found.frontier[0];
}

/** What the widget shows: the answer to the problem, the plan that is looked
    at, and what the reader's switches say. */
export function describe(state) {
  const found = answer({ ...state, ...FREE });
  const { frontier, fastest } = found;
  const space = spaceOf(state);
  const best = bestOf(space, found.found);
  const yours = yoursOf(state, space);
  const offered = [...(yours ? [yours] : []), ...best, ...frontier];
  const plan = offered[state.pick] ?? offered[0];
  const next = within(found, space.budget + GIB) ?? null;
  const buys = next && !(best.length && next.seconds >= best[0].seconds);
  const slowdown = ({ seconds }) => seconds / fastest.seconds;
  return {
    ...{ ...found, space, best, offered, plan, next: buys ? next : null },
    ...{ yours, slowdown },
    gap: yours && best.length ? yours.seconds / best[0].seconds - 1 : null,
    moment: momentOf(plan.space, plan),
    causes: causesOf(plan, fastest),
  };
}

/** Where nothing fits: what another recipe needs at least, and LoRA. */
export function otherwise(state) {
  if (adapted(state)) return [];
  const least = (more) => answer({ ...state, ...FREE, ...more }).frontier[0];
  const found = recipesOf({ ...state, recipe: "any" })
    .filter((recipe) => !recipesOf(state).includes(recipe))
    .map((recipe) => least({ recipe }))
    .sort((a, b) => a.peak - b.peak);
  return [...found.slice(0, 1), least({ trained: "lora" })];
}

// ---- words ---------------------------------------------------------------

/** As Plan.text of Python. */
export function planText(plan) {
  const { size, blocks, chunks, stage, space } = plan;
  const { share, model, recipe, optimizer, adapter, ranks } = space;
  const [full, rest] = [Math.floor(share / size), share % size];
  const { depth } = model;
  const words = [
    rest
      ? t`${full} × ${size} sequences and a last micro-batch of ${rest}`
      : t`${full} × ${size} sequences`,
  ];
  if (blocks === depth) words.push(t`every block checkpointed`);
  else if (blocks) words.push(t`${blocks} of ${depth} blocks checkpointed`);
  if (chunks) words.push(t`the loss in ${chunks} chunks`);
  words.push(WORDS[recipe] ?? recipe, WORDS[optimizer]);
  if (adapter) words.push(t(adapter.told));
  if (ranks > 1) words.push(t`${stage} on ${ranks} ranks`);
  return words.join(t`, `);
}

const times = (slowdown) => `× ${slowdown.toFixed(2)}`;

/* What differs between plans, shortly. */
function shortText({ size, blocks, chunks, stage, space }) {
  const { share, model, ranks, way } = space;
  const parts = Math.ceil(share / size);
  const words = [TRAINED[way] ?? way];
  words.push(parts > 1 ? `${parts} × ${size}` : t`${size} at once`);
  if (blocks) words.push(t`${blocks}/${model.depth} checkpointed`);
  if (chunks) words.push(t`loss in ${chunks}`);
  if (ranks > 1) words.push(stage);
  return words.join(" · ");
}

/** What the reader's switches cost; "" where they say nothing. */
export function gapWords({ yours, gap, space }) {
  if (!yours) return "";
  const over = yours.peak - space.budget;
  if (over > 0) return t`Yours needs ${formatBytes(over)} too much.`;
  const more = Math.round(100 * gap);
  if (!more) return t`Yours is as fast as the best.`;
  return t`Yours takes ${more} % longer than the best that fits.`;
}

/* Where nothing fits: the least, and what another precision would need. */
function leastWords(state, { space, plans, frontier }) {
  const [least] = frontier;
  const told = t(
    "Nothing fits in {0}. The smallest of {1} plans needs {2}: {3}.",
    ...[formatBytes(space.budget), grouped(plans)],
    ...[formatBytes(least.peak), planText(least)],
  );
  const [one, two] = otherwise(state)
    .filter(({ peak }) => peak < least.peak)
    .map(({ space: { way }, peak }) => [
      ...[TRAINED[way] ?? way, formatBytes(peak)],
    ]);
  if (!one) return [told];
  const other = two
    ? t("With {0} the smallest needs {1}, with {2} {3}.", ...one, ...two)
    : t("With {0} the smallest needs {1}.", ...one);
  return [told, other];
}

/** The key numbers in words. */
export function sentence(state) {
  const n = describe(state);
  const { space, best } = n;
  let buys = best.length ? [t`The next GiB buys nothing.`] : [];
  if (n.next) buys = [t`The next GiB buys ${times(n.slowdown(n.next))}.`];
  if (!best.length) return [...leastWords(state, n), ...buys].join(t` `);
  const told = gapWords(n);
  const first = t(
    "The fastest plan in {0}: {1}. It needs {2} and takes {3} as long as " +
      "the fastest of all.",
    ...[formatBytes(space.budget), planText(best[0])],
    ...[formatBytes(best[0].peak), times(n.slowdown(best[0]))],
  );
  return [first, ...(told ? [told] : buys)].join(t` `);
}

/** A program that makes the plan, and prints its whole training loop. */
export function codeOf(plan) {
  const { tokens, batch, ranks, recipe, optimizer, model, adapter } =
    plan.space;
  const given = [String(plan.size)];
  if (plan.blocks) given.push(`checkpointed=${plan.blocks}`);
  if (plan.chunks) given.push(`loss_chunks=${plan.chunks}`);
  if (recipe !== "fp32") given.push(`recipe="${recipe}"`);
  if (optimizer !== "adam") given.push(`optimizer="${optimizer}"`);
  if (plan.stage !== "ddp") given.push(`stage="${plan.stage}"`);
  if (ranks > 1) given.push(`ranks=${ranks}`);
  if (adapter) {
    const targets = `TARGETS["${model.family}"]`;
    given.push(`adapter=Adapter(${targets}, ${adapter.given})`);
  }
  const more = adapter ? ["TARGETS", "Adapter"] : [];
  const names = ["PRESETS", ...more, "Transformer"].join(", ");
  return [
    `from membudget.ledger import ${names}`,
    "from membudget.planning import Job, Plan, memory",
    "",
    `network = ${model.made}`,
    `job = Job(network, tokens=${tokens}, batch=${batch})`,
    "plan = Plan(",
    ...given.map((one) => `    ${one},`),
    ")",
    "print(memory(job, plan))  # bytes at the peak",
    "print(plan.code(job))  # the training loop, in plain PyTorch",
  ].join("\n");
}

// ---- layout --------------------------------------------------------------

const [BAR, TALL] = [44, 36]; // where the bar begins, and its height
const [BOTTOM, HEIGHT] = [226, 272]; // of the frontier, of all
const ROW = 17; // of words
const NARROW = 480;

/* The end of the axis of bytes: the budget does not move it. */
function topOf({ tables, card }, { frontier }) {
  const { usable } = tables.cards[card];
  const far = 1.12 * frontier.at(-1).peak;
  return Math.min(far, 2.5 * Math.max(usable, frontier[0].peak));
}

/** Where everything stands in the picture. */
export function layout(state, width, before = null) {
  const n = describe(state);
  const narrow = width < NARROW;
  const above = BAR + TALL + ROW * (narrow ? 4 : 3); // two rows of causes, or one
  const plot = { left: 46, right: width - 14, top: above, bottom: BOTTOM };
  const top = topOf(state, n);
  const long = plot.right - plot.left;
  const x = (size) => plot.left + (Math.min(size, top) * long) / top;
  const seen = [n.frontier[0], n.plan, ...(n.yours ? [n.yours] : [])];
  const slowest = Math.max(...seen.map(n.slowdown));
  const high = Math.max(1.1, 1 + 1.12 * (slowest - 1));
  const y = (slow) => BOTTOM - ((slow - 1) * (BOTTOM - plot.top)) / (high - 1);
  const step = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50].find(
    (one) => (high - 1) / one <= 5,
  );
  const rises = Array.from(
    { length: Math.floor((high - 1) / (step ?? high) + 1e-9) + 1 },
    (_, i) => 1 + i * step,
  ).map((slow) => ({ y: y(slow), label: `× ${Number(slow.toFixed(2))}` }));
  const { unit, marks } = byteTicks(top, Math.max(2, Math.floor(width / 110)));
  const ticks = marks
    .map(({ value, label }) => ({ label, x: x(value) }))
    .filter((tick) => tick.x < plot.right - 28);
  ticks.at(-1).label += ` ${unit}`;
  let size = 0;
  const parts = Object.keys(HOLDERS).map((part) => {
    const from = x(size);
    size += n.moment.split[part];
    return { part, x: from, width: x(size) - from };
  });
  let slow = 1;
  const causes = CAUSES.filter((key) => n.causes[key] >= 0.005).map((key) => {
    const from = slow;
    slow = Math.min(slow + n.causes[key], n.slowdown(n.plan));
    return { key, y: y(slow), height: y(from) - y(slow) };
  });
  let [left, under] = [3, BAR + TALL + 2 * ROW];
  const told = CAUSES.filter((key) => Math.abs(n.causes[key]) >= 0.005);
  const words = told.map((key) => {
    const sign = n.causes[key] < 0 ? "−" : "+";
    const short = narrow && key.startsWith("small");
    const name = short ? t`small batches` : CAUSE_WORDS[key];
    const label = `${name} ${sign}${Math.abs(n.causes[key]).toFixed(2)}`;
    const long = 18 + wideOf(label);
    if (left + long > width) [left, under] = [3, under + ROW];
    const one = { key, label, x: left, y: under };
    left += long + 10;
    return one;
  });
  const place = (plan) => ({ x: x(plan.peak), y: y(n.slowdown(plan)) });
  const old = before && describe(before).plan;
  const moved = old && (old.peak !== n.plan.peak) && old.peak <= top;
  return {
    ...{ width, plot, top, ticks, rises, parts, causes, words },
    points: n.frontier.filter(({ peak }) => peak <= top).map(place),
    beyond: n.frontier.filter(({ peak }) => peak > top).length,
    at: { ...place(n.plan), cut: n.plan.peak > top },
    ring: n.yours && n.yours.peak <= top ? place(n.yours) : null,
    budget: x(n.space.budget),
    pinned: n.space.budget > top,
    ghost: moved && x(old.peak),
  };
}

/** The budget, in MiB, that a place in the picture is. */
export function budgetAt({ plot, top }, x) {
  const share = (x - plot.left) / (plot.right - plot.left);
  return Math.max(1, Math.round((share * top) / MIB));
}

/** The number of the point of the frontier that is nearest; -1 if none is. */
export function pointAt({ points }, { x, y }) {
  const far = points.map((one) => (one.x - x) ** 2 + (one.y - y) ** 2);
  const near = Math.min(...far);
  return near < 24 ** 2 ? far.indexOf(near) : -1;
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };
const HALO = { class: "mb-halo" };
const PHASES = {
  forward: t`forward pass`,
  backward: t`backward pass`,
  recomputation: t`recomputation`,
  optimizer: t`optimizer’s step`,
};

const FILL = {
  recomputation: "recomputation",
  "small micro-batches": "phase-backward",
  traffic: "inputs",
  precision: "parameters",
};

function* drawBar(id, n, { plot, parts, at, ghost, budget }) {
  for (const { part, x, width } of parts.filter((one) => one.width)) {
    yield* filled(id, part, "rect", { x, y: BAR, width, height: TALL });
    const name = HOLDERS[part];
    if (wideOf(name) + 10 < width) {
      const look = { ...MIDDLE, class: "mb-halo" };
      yield text(x + width / 2, BAR + TALL / 2 + 4, name, look);
    }
  }
  if (n.plan.peak > n.space.budget && at.x > budget) {
    const over = { x: budget, y: BAR - 4, height: TALL + 8 };
    yield* filled(id, "over", "rect", { ...over, width: at.x - budget });
  }
  if (ghost) yield line(ghost, BAR - 4, ghost, BAR + TALL + 4, "mb-ghost");
}

/* A row's name, which is that of an operator. */
const rowText = (row) =>
  row
    .replace(/^a block’s /, t`a block’s `)
    .replace("(sum of gradients)", t`(sum of gradients)`);

function* drawWords(id, n, { plot, words }) {
  const { row, phase } = n.moment;
  const peak = formatBytes(n.plan.peak);
  const short = t`peak ${peak}: ${PHASES[phase]}`;
  const long =
    row === phase
      ? short
      : t`peak ${peak}: ${PHASES[phase]}, at ${rowText(row)}`;
  const fits = wideOf(long) < plot.right;
  yield text(3, BAR + TALL + ROW, fits ? long : short, HALO);
  for (const { key, label, x, y } of words) {
    const box = { x, y: y - 10, width: 12, height: 12 };
    yield* filled(id, FILL[key], "rect", box);
    yield text(x + 18, y, label, HALO);
  }
}

const ringOf = ({ x, y }) => ({ cx: x, cy: y, r: 10, class: "mb-yours" });

function* drawFrontier(id, n, plan) {
  const { plot, points, at, causes, rises, beyond, ring } = plan;
  for (const { y, label } of rises) {
    yield line(plot.left, y, plot.right, y, "mb-grid");
    yield text(plot.left - 6, y + 4, label, END);
  }
  const path = points.map(({ x, y }, i) =>
    i ? `H${x.toFixed(1)}V${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}`,
  );
  if (points.length) {
    const d = `${path.join("")}H${plot.right}`;
    yield svg("path", { d, class: "mb-curve" });
  }
  for (const { key, y, height } of causes) {
    const shape = { x: at.x - 7, y, width: 14, height };
    yield* filled(id, FILL[key], "rect", shape);
  }
  const r = points.length > 30 ? 2.5 : 3.5;
  for (const point of points) yield dot(point, "mb-point", r);
  if (ring) yield svg("circle", ringOf(ring));
  if (!at.cut) {
    yield line(at.x, plot.top - 4, at.x, at.y, "mb-cursor");
    yield dot(at, "mb-chosen", 7);
  }
  const look = { ...END, ...HALO };
  if (beyond) yield text(plot.right, BOTTOM - 8, t`${beyond} more →`, look);
}

function* drawBudget(id, n, state, { plot, budget, pinned }) {
  const beyond = { x: budget, y: plot.top, width: plot.right - budget };
  const shape = { ...beyond, height: BOTTOM - plot.top };
  if (!pinned) yield* filled(id, "over", "rect", shape);
  yield line(budget, BAR - 8, budget, BAR + TALL + 5, "mb-limit");
  yield line(budget, plot.top - 4, budget, BOTTOM + 22, "mb-limit");
  const grip = `M${budget} ${BOTTOM + 22}l-9 14h18z`;
  yield svg("path", { d: grip, class: "mb-grip" });
  const left = budget > (plot.left + plot.right) / 2;
  const name = state.budget ? t`budget` : state.card;
  const bytes = formatBytes(n.space.budget);
  const size = pinned ? t`${bytes} →, drag` : t`${bytes}, drag`;
  const room = left ? budget - 13 : plot.right - budget - 13;
  const long = t`${name}: ${size}`;
  const label = wideOf(long) < room ? long : size;
  const look = { class: "mb-value", ...(left ? END : {}) };
  yield text(budget + (left ? -13 : 13), BOTTOM + 36, label, look);
}

function verdict(n) {
  const { best, plan, yours, frontier, space } = n;
  if (!best.length) {
    return t`nothing fits: least ${formatBytes(frontier[0].peak)}`;
  }
  const free = space.budget - plan.peak;
  const own = plan === yours;
  if (free < 0) {
    const over = formatBytes(-free);
    return own ? t`yours: ${over} too much` : t`${over} too much`;
  }
  if (own) {
    const more = Math.round(100 * n.gap);
    return more ? t`yours: ${more} % longer` : t`yours: as fast as the best`;
  }
  return t`it fits, ${times(n.slowdown(plan))} as long`;
}

function draw(id, state, n, plan) {
  const { plot, ticks } = plan;
  const broken = n.plan.peak > n.space.budget ? " mb-broken" : "";
  return [
    text(3, 22, verdict(n), { class: `mb-verdict${broken}` }),
    ...drawBar(id, n, plan),
    ...drawBudget(id, n, state, plan),
    ...drawFrontier(id, n, plan),
    ...drawWords(id, n, plan),
    line(plot.left, BOTTOM, plot.right, BOTTOM, "mb-axis"),
    ...ticks.flatMap(({ x, label }, i) => [
      line(x, BOTTOM, x, BOTTOM + 4, "mb-axis"),
      text(x, BOTTOM + 17, label, i ? MIDDLE : {}),
    ]),
  ];
}

function results(id, n) {
  const { space, plan, moment, best } = n;
  const size = (key, bytes) => [key, bytes, bytes ? formatBytes(bytes) : "–"];
  const slow = (key, value) => [key, value, times(value)];
  const rows = Object.entries(HOLDERS).map(([part, label]) => ({
    part,
    label,
    cells: [size(part, moment.split[part])],
  }));
  const plans = best.map((one, i) => ({
    label: `${i + 1}.`,
    cells: [
      size(`best.${i}.peak`, one.peak),
      slow(`best.${i}.slowdown`, n.slowdown(one)),
    ],
  }));
  const causes = CAUSES.map((key) => [
    ...[CAUSE_WORDS[key], `cause.${key}`, n.causes[key]],
    n.causes[key].toFixed(2),
  ]);
  return [
    table(id, [t`at the peak`, t`bytes`], [
      ...rows,
      { sum: true, label: t`together`, cells: [size("peak", moment.bytes)] },
    ]),
    table(id, [t`the best plans`, t`peak`, t`slowdown`], plans),
    numberList([
      [t`parameters`, "count", space.model.parameters,
        grouped(space.model.parameters)],
      [t`budget`, ...size("budget", space.budget)],
      [t`a step`, "seconds", plan.seconds, `${plan.seconds.toPrecision(3)} s`],
      [t`slowdown`, ...slow("slowdown", n.slowdown(plan))],
      ...causes,
      [t`the least peak`, ...size("least", n.frontier[0].peak)],
      [t`plans on the frontier`, "frontier", n.frontier.length],
    ]),
  ];
}

const NOTE = t(
  "The bar is what a card holds at the worst moment. Below it, on the same " +
    "axis, stands each plan that no other beats in both bytes and time: the " +
    "more memory, the faster. The ring is the plan of your own switches. " +
    "The dashed line is the budget: drag it. Click a point to look at its " +
    "plan; its column says what takes the time. The time is an estimate " +
    "from data sheets, × 0.4, not measured. LoRA stands in all linear " +
    "layers of the blocks, in fp32 and without dropout, beside frozen " +
    "weights in bf16; with QLoRA the blocks’ are in 4 bits. The bytes are " +
    "tensors with a CPU’s kernels; an allocator’s rounding, libraries and " +
    "NCCL’s buffers come on top. 16 bits are bf16; for autocast on a card " +
    "without it take fp16.",
);

/* Problems, with switches that are set badly: until yours is as fast. */
const MISSION = {
  ...{ budget: 0, trained: "all", optimizer: "adam", pick: 0 },
  ...{ checkpointed: "all", chunks: "16", micro: 1, stage: "any" },
};
const MISSIONS = {
  [t`GPT-2 on an RTX 3070`]: {
    ...{ model: "GPT-2 124M", card: "RTX 3070", ranks: 1, batch: 32 },
    ...{ tokens: 1024, recipe: "autocast" },
  },
  [t`8B on eight H100s`]: {
    ...{ model: "Llama 3 8B", card: "H100 80 GB", ranks: 8, batch: 64 },
    ...{ tokens: 8192, recipe: "master", stage: "zero-3" },
  },
  [t`8B on one A100`]: {
    ...{ model: "Llama 3 8B", card: "A100 80 GB", ranks: 1, batch: 8 },
    ...{ tokens: 8192, recipe: "autocast" },
  },
};

// ---- the widget ----------------------------------------------------------

const keys = [
  ...["model", "card", "ranks", "budget", "batch", "tokens", "recipe"],
  ...["trained", "optimizer", "checkpointed", "chunks", "micro", "stage"],
  "pick",
  "tables",
];

function build({ id, get, set, picture }) {
  const { tables } = get();
  const change = (key) => (value) => set({ [key]: value, pick: 0 });
  const select = (label, key, options, onChange = change(key)) =>
    choice({ label, key, options, onChange });
  const power = (label, key) =>
    slider({
      ...{ label, key, min: 0 },
      onInput: (place) => change(key)(2 ** place),
    });

  const models = Object.keys(tables.models);
  const model = select(t`Model`, "model", models, (name) => {
    const tokens = tables.models[name].tokens.at(-1);
    set({ model: name, tokens, pick: 0 });
  });
  const card = select(t`Card`, "card", Object.keys(tables.cards), (name) =>
    set({ card: name, budget: 0, pick: 0 }),
  );
  const ranks = power(t`Number of cards`, "ranks");
  const budget = numberField({
    label: t`Budget of a card, in MiB`,
    key: "budget",
    max: 2 ** 22,
    onChange: change("budget"),
  });
  const batch = power(t`Sequences of a step`, "batch");
  const texts = Object.entries(tables.recipes);
  const recipes = {
    any: t`any, as is best`,
    ...Object.fromEntries(
      texts.map(([name, { text }]) => [name, t(text.split(",")[0])]),
    ),
  };
  const recipe = select(t`Precision`, "recipe", recipes);
  const trained = select(t`Trained`, "trained", {
    all: TRAINED.all,
    ...Object.fromEntries(
      Object.entries(tables.adapters).map(([name, { given }]) => [
        ...[name, t`${TRAINED[name]}, rank ${parseInt(given, 10)}`],
      ]),
    ),
  });
  const optimizers = Object.fromEntries(
    Object.entries(tables.optimizers).map(([name, text]) => [name, t(text)]),
  );
  const optimizer = select(t`Optimizer`, "optimizer", optimizers);
  const checkpointed = select(t`Checkpoint`, "checkpointed", {
    any: t`as is best`,
    none: t`no block`,
    all: t`every block`,
  });
  const chunks = select(t`Loss in chunks`, "chunks", {
    ...{ any: t`as is best`, none: t`no` },
    ...{ 2: "2", 4: "4", 8: "8", 16: "16" },
  });
  const micro = select(
    t`Micro-batch`,
    "micro",
    { 0: t`as is best`, 1: "1", 2: "2", 4: "4", 8: "8", 16: "16" },
    (value) => change("micro")(Number(value)),
  );
  const stage = select(t`Sharding`, "stage", {
    ...{ any: t`as is best`, ddp: "ddp" },
    ...{ "zero-2": "zero-2", "zero-3": "zero-3" },
  });
  const pick = slider({
    ...{ label: t`Plan that is shown`, key: "pick", min: 0 },
    onInput: (place) => set({ pick: place }),
  });

  const best = [0, 1, 2].map((place) =>
    button({
      ...{ label: "", key: `best-${place}` },
      onClick: () => set({ pick: shift + place }),
    }),
  );
  const none = html(
    "p",
    { class: "mb-none" },
    t`Here stand the three fastest plans that fit, once one does.`,
  );
  const code = html("pre", { class: "mb-code" });
  const whole = html(
    "div",
    {},
    picture,
    html("div", { class: "mb-plans" }, none, ...best.map(({ root }) => root)),
    html(
      "p",
      { class: "mb-missions" },
      html("b", {}, t`Beat the planner: `),
      ...Object.entries(MISSIONS).map(
        ([label, more], i) =>
          button({
            ...{ label, key: `mission-${i + 1}` },
            onClick: () => {
              set({ ...MISSION, ...more });
              whole.parentElement.querySelector("details").open = true;
            },
          }).root,
      ),
    ),
  );

  let plan;
  let [offered, shift] = [0, 0]; // plans before the frontier; yours
  drag(picture, {
    grab: (place) => {
      if (Math.abs(place.x - plan.budget) < 14) return "budget";
      if (place.y > BOTTOM + 4) return "budget";
      return pointAt(plan, place) < 0 ? null : "pick";
    },
    move: (place, held) => {
      if (held === "budget") return change("budget")(budgetAt(plan, place.x));
      const point = pointAt(plan, place);
      if (point >= 0) set({ pick: offered + point });
    },
  });

  const log = Math.log2;
  const show = (state, n) => {
    for (const one of [
      ...[model, card, trained, optimizer, checkpointed, chunks, micro],
    ]) {
      one.update({ value: state[one.key] });
    }
    const cards = plural(state.ranks, "card");
    ranks.update({
      value: log(state.ranks),
      max: log(tables.ranks.at(-1)),
      ...{ text: state.ranks, spoken: cards },
    });
    batch.update({
      value: log(n.space.batch),
      ...{ max: log(tables.most) },
      text: t`${n.space.batch} × ${grouped(state.tokens)} tokens`,
      spoken: plural(n.space.batch, "sequence"),
    });
    budget.update({ value: n.space.budget / MIB });
    const alone = whyDdp(state);
    stage.update({ value: alone ? "any" : state.stage, disabled: alone });
    const fixed = adapted(state);
    recipe.update({
      value: fixed ? n.space.recipe : state.recipe,
      disabled: fixed ? t`but the adapter in fp32` : "",
    });
    const shown = n.offered[state.pick] ? state.pick : 0;
    const first = n.yours ? 1 : 0;
    let text = shown < offered ? t`of the best` : t`on the frontier`;
    if (shown < first) text = t`yours`;
    pick.update({
      ...{ value: shown, max: n.offered.length - 1 },
      ...{ text, spoken: planText(n.plan) },
    });
    none.hidden = n.best.length > 0;
    best.forEach(({ root }, i) => {
      const one = n.best[i];
      root.hidden = !one;
      root.setAttribute("aria-pressed", String(one === n.plan));
      if (!one) return root.replaceChildren();
      root.replaceChildren(
        html("b", {}, times(n.slowdown(one))),
        html("span", {}, shortText(one)),
        html("i", {}, formatBytes(one.peak)),
      );
    });
    code.textContent = codeOf(n.plan);
  };

  return {
    controls: [model, card, ranks, trained],
    picture: whole,
    legend: legend(id, HOLDERS),
    more: [
      ...[recipe, budget, batch, optimizer, checkpointed, chunks],
      ...[micro, stage, pick],
    ],
    note: html(
      "div",
      {},
      html("p", {}, t`Code to paste, for the plan that is shown:`),
      code,
      html("p", {}, NOTE),
    ),
    draw(state, width, before) {
      const n = describe(state);
      shift = n.yours ? 1 : 0;
      offered = n.best.length + shift;
      plan = layout(state, width, before);
      show(state, n);
      return {
        title: t`What fits, and at which price`,
        sentence: sentence(state),
        height: HEIGHT,
        drawn: draw(id, state, n, plan),
        numbers: results(id, n),
      };
    },
  };
}

export default widget({ name: "planning", keys, build });
