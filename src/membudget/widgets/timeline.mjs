import {
  axes,
  band,
  button,
  dot,
  drag,
  filled,
  formatBytes,
  heights,
  html,
  legend,
  LETTER,
  line,
  names,
  PHASE_WORDS,
  phaseRuns,
  phaseStrip,
  player,
  radios,
  slider,
  stacked,
  stairs,
  still,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";

/* One training step, operator by operator; moment −1 is before the first.

   describe(state): the numbers of a moment.
   layout(state, width, other): where everything stands in the picture, with
   the outline of another step. */

const SHOWN = {
  optimizer: t`optimizer states`,
  parameters: t`parameters`,
  inputs: t`inputs`,
  gradients: t`gradients`,
  activations: t`activations`,
  recomputation: t`recomputed activations`,
  temporaries: t`temporaries`,
};

const PARTS = Object.keys(SHOWN);
const FLOOR = PARTS.slice(0, 3); // no module made them

const NOTE = t(
  "A box is a module of the network. In it are the tensors that it made and " +
    "that are still alive, as high as they are large: one with an outline " +
    "is new, a dashed one was freed just now. The framed box runs now. The " +
    "bar below holds what is there all the time. The curve counts the bytes " +
    "alive after each operator, in colour as far as you have come; the " +
    "optimizer step always has a fifth of the width. The dashed curve is " +
    "the step that you chose before. Temporaries include the gradients on " +
    "their way back through the layers. F forward, B backward, R " +
    "recomputation.",
);

const STEP_SHARE = 0.2; // of the width, for the optimizer step
const OUTSIDE = { loss: t`loss`, step: t`step` }; // boxes of no module
const TICKS = 160; // of a step that is played
const TICK = 30; // ms, where it plays by itself
const REST = 2; // ticks more at a stop, until the sentence is said
const ROWS = 7; // of the largest things alive
const ONLOOKERS = /^(profiler\.|detach$)/;

// ---- numbers -------------------------------------------------------------

const unpacked = new WeakMap();

/* The steps, from the tables and integers that Python sends. */
function unpack(data) {
  if (!unpacked.has(data)) {
    const kinds = rows(data.kinds, 3).map(([name, module, phase]) => ({
      operator: data.names[name].replace(/^aten\./, ""),
      module: data.modules[module],
      phase: data.phases[phase],
    }));
    const all = data.steps.map((step) => unpackStep(step, kinds, data.sizes));
    unpacked.set(data, all);
  }
  return unpacked.get(data);
}

const rows = (numbers, length) =>
  Array.from({ length: numbers.length / length }, (_, i) =>
    numbers.slice(i * length, (i + 1) * length),
  );

function unpackStep(step, kinds, sizes) {
  const operators = shownOperators(step.operators.map((kind) => kinds[kind]));
  const before = { operator: "", module: "", phase: "" };
  const operator = (moment) => operators[moment] ?? before;
  const boxes = boxesOf(operators);
  const allocations = rows(step.allocations, 4).map(
    ([birth, life, size, kind]) => {
      const floor = birth < 0 || kind < FLOOR.length;
      const box = floor ? null : boxes.of(operator(birth));
      const what = { category: PARTS[kind], bytes: sizes[size], box };
      return { birth, death: birth + life, ...what };
    },
  );
  const memory = memoryOf(allocations, operators.length);
  const peak = memory.reduce((a, b) => (b.total > a.total ? b : a));
  const peakMoment = memory.indexOf(peak) - 1;
  const begins = [...operators.keys()].filter(
    (i) => operators[i].phase !== operators[i - 1]?.phase,
  );
  const known = {
    step: step.label,
    operators: operators.length,
    forward_end_moment: step.forward_end,
    forward_end: memory[step.forward_end + 1],
    ...{ peak, peak_moment: peakMoment, stops: [...begins, peakMoment] },
  };
  return {
    ...{ known, operators, operator, boxes, allocations, memory },
    fullest: fullest(allocations),
  };
}

/* The bytes of each part before the first of `count` moments, and after each. */
function memoryOf(allocations, count) {
  const none = { ...Object.fromEntries(PARTS.map((p) => [p, 0])), total: 0 };
  const changes = Array.from({ length: count + 2 }, () => []);
  for (const { birth, death, category, bytes } of allocations) {
    changes[birth + 1].push([category, bytes]);
    changes[Math.min(death, count) + 1].push([category, -bytes]);
  }
  let now = none;
  return changes.slice(0, -1).map((all) => {
    now = { ...now };
    for (const [category, bytes] of all) {
      now[category] += bytes;
      now.total += bytes;
    }
    return now;
  });
}

/* For an operator that only looks on, the one beside it in its phase. */
function shownOperators(operators) {
  return operators.map((one, i) => {
    const does = ({ operator, phase }) =>
      phase === one.phase && !ONLOOKERS.test(operator);
    let last = i;
    while (last >= 0 && !does(operators[last])) last -= 1;
    return operators[last] ?? operators.slice(i).find(does) ?? one;
  });
}

const alive = ({ birth, death }, moment) => birth <= moment && moment < death;
const sum = (all) => all.reduce((bytes, one) => bytes + one.bytes, 0);

/* The modules as boxes, in the order in which they first run. Last, what runs
   outside of the model. */
function boxesOf(operators) {
  const inside = operators.filter(({ module }) => module);
  const name = ({ module, phase }) =>
    module || (phase === "optimizer" ? "step" : "loss");
  const last = operators.filter(({ module }) => !module);
  const labels = [...new Set([...inside, ...last].map(name))];
  return { labels, of: (one) => labels.indexOf(name(one)) };
}

/* The most bytes that a box holds, with what is freed there just then. */
function fullest(allocations) {
  const made = allocations.filter(({ box }) => box !== null);
  const inBox = new Map(made.map(({ box }) => [box, []]));
  for (const one of made) inBox.get(one.box).push(one);
  const beside = ({ box, birth: then }) =>
    inBox
      .get(box)
      .filter(({ birth, death }) => birth <= then && then <= death);
  return Math.max(1, ...made.map((one) => sum(beside(one))));
}

/* The chosen step and a moment of it, whatever the state says. */
function chosen({ steps, step, moment }) {
  const all = unpack(steps);
  const now = all.find(({ known }) => known.step === step) ?? all[0];
  return { all, now, moment: Math.min(moment, now.operators.length - 1) };
}

export function describe(state) {
  const { now: step, moment } = chosen(state);
  const running = step.operator(moment);
  return {
    ...{ ...step.known, ...running, modules: [running.module], moment },
    now: step.memory[moment + 1],
    largest: largest(step, moment),
  };
}

/* What is alive, the most bytes first; together stands what the same operator
   made in modules whose paths differ in numbers alone. */
function largest({ allocations, operator }, moment) {
  const groups = {};
  for (const one of allocations.filter((one) => alive(one, moment))) {
    const { bytes, category } = one;
    const { module, ...made } = operator(one.birth);
    const like = module.replace(/[0-9]+/g, "#");
    const key = [category, made.operator, made.phase, like].join();
    groups[key] ??= { category, ...made, modules: [], sizes: [] };
    groups[key].sizes.push(bytes);
    if (!groups[key].modules.includes(module)) groups[key].modules.push(module);
  }
  return Object.values(groups)
    .map((group) => ({ ...group, bytes: group.sizes.reduce((a, b) => a + b) }))
    .sort((a, b) => b.bytes - a.bytes);
}

// ---- words ---------------------------------------------------------------

/** The moment; once the reader has reached it, the peak against the end of
    the forward pass. */
export function sentence(state, reached = state.moment) {
  const n = describe(state);
  const [now, end, peak] = [n.now, n.forward_end, n.peak].map(
    ({ total }) => formatBytes(total),
  );
  const alive = t`${place(n)}: ${now} alive.`;
  const more = formatBytes(n.peak.total - n.forward_end.total);
  const rest =
    reached < n.peak_moment
      ? t`Play the step, or drag along the curve: the peak is ahead.`
      : t(
          "The forward pass before the peak ends with {0}, the peak is {1}: " +
            "{2} more.",
          ...[end, peak, more],
        );
  return [alive, rest].join(t` `);
}

function place(n) {
  if (n.moment < 0) return t`Before the first operator`;
  const words = [n.moment + 1, n.operators, whatRuns(n)];
  if (!n.module && n.phase === "optimizer") {
    return t("Operator {0} of {1}, {2}", ...words);
  }
  const [phase] = PHASE_WORDS[n.phase];
  return t("Operator {0} of {1}, {2}, {3}", ...words, phase);
}

/* An operator and the modules that it belongs to. */
function whatRuns({ operator, phase, modules }) {
  if (!modules[0]) {
    return phase === "optimizer"
      ? t`${operator} of the optimizer step`
      : t`${operator} in the loss`;
  }
  const ends = `${modules[0]} … ${modules.at(-1)}`;
  const names = modules.length > 4 ? ends : modules.join(t`, `);
  if (!/^[0-9]/.test(names)) return t`${operator} of ${names}`;
  return modules.length > 1
    ? t`${operator} of modules ${names}`
    : t`${operator} of module ${names}`;
}

// ---- geometry ------------------------------------------------------------

/* Cut to what has room. */
function shortened(label, width) {
  const most = Math.floor(width / LETTER);
  return label.length > most ? `${label.slice(0, most - 1)}…` : label;
}

const BOX = { top: 24, bottom: 92 };

/** Geometry of the picture, in pixels, for a given width. */
export function layout(state, width, other = null) {
  const { all, now, moment } = chosen(state);
  const margin = width < 480 ? 98 : 115;
  const plot = { left: 30, right: width - margin, top: 168, bottom: 350 };
  const peaks = all.map(({ known }) => known.peak.total);
  const axis = heights(plot, 1.04 * Math.max(1, ...peaks));
  const place = (step) => {
    const edges = edgesOf(step, plot);
    const tops = step.memory.map(({ total }) => axis.y(total));
    const mark = (moment) => ({
      x: (edges[moment + 1] + edges[moment + 2]) / 2,
      y: tops[moment + 1],
    });
    const { step: name, peak, peak_moment, forward_end_moment } = step.known;
    return {
      ...{ name, bytes: peak.total, edges, tops, mark },
      ...{ peak: mark(peak_moment), forwardEnd: mark(forward_end_moment) },
    };
  };
  const ours = place(now);
  const most = Math.max(...all.map(({ fullest }) => fullest));
  const ghost = all.find((one) => one.known.step === other && one !== now);
  const here = now.memory[moment + 1];
  const always = FLOOR.reduce((bytes, part) => bytes + here[part], 0);
  return {
    ...{ width, height: 380, plot, axis, ...ours, always },
    boxes: network(now, moment, width, most),
    floor: stacked([here], FLOOR, (bytes) => (bytes * width) / always),
    bands: stacked(now.memory, PARTS, axis.y),
    cursor: ours.mark(moment),
    phases: phaseRuns(
      now.operators.map(({ phase }) => phase),
      ours.edges.slice(1),
    ),
    ghost: ghost ? place(ghost) : null,
  };
}

/* The boxes of the modules, and as far as there is room the tensors that are
   alive in them at a moment; `most` bytes fill a box. */
function network({ boxes, allocations, operator }, moment, width, most) {
  const shares = boxes.labels.map((one) => (OUTSIDE[one] ? 1.7 : 1));
  const unit = width / Math.max(shares.reduce((a, b) => a + b, 0), 3);
  const running = moment < 0 ? -1 : boxes.of(operator(moment));
  const perByte = (BOX.bottom - BOX.top - 10) / most;
  const order = ({ category, death }) =>
    PARTS.indexOf(category) + (death === moment ? PARTS.length : 0);
  const seen = allocations
    .filter(({ birth, death }) => birth <= moment && moment <= death)
    .sort((a, b) => order(a) - order(b));
  let x = 0;
  return boxes.labels.map((label, i) => {
    const box = { label, x, width: shares[i] * unit, runs: i === running };
    x += box.width;
    const tensors = [];
    let y = BOX.bottom;
    for (const { category, bytes, birth, death, ...one } of seen) {
      if (one.box !== i) continue;
      const height = Math.max(bytes * perByte - 1, 1);
      if (y - height - 1 < BOX.top + 1) continue;
      y -= height + 1;
      const [freed, born] = [death === moment, birth === moment];
      tensors.push({ category, y, height, freed, born });
    }
    return { ...box, tensors };
  });
}

/* Where each moment begins, and the last one ends. */
function edgesOf({ operators }, { left, right }) {
  const inStep = ({ phase }) => phase === "optimizer";
  const many = operators.filter(inStep).length;
  const rest = operators.length + 1 - many;
  const share = many ? STEP_SHARE : 0;
  const unit = ((right - left) * (1 - share)) / rest;
  const narrow = ((right - left) * share) / many;
  const edges = [left, left + unit];
  for (const one of operators) {
    edges.push(edges.at(-1) + (inStep(one) ? narrow : unit));
  }
  return edges;
}

/** The moment at a place in the picture. */
export function momentAt({ edges }, x) {
  const slot = edges.findLastIndex((edge) => edge <= x);
  return Math.min(Math.max(slot, 0), edges.length - 2) - 1;
}

/** The moment to play after this one: as far on in the picture at each tick,
    but never past a stop. */
export function following(plan, n) {
  const stride = (plan.plot.right - plan.plot.left) / TICKS;
  const next = momentAt(plan, plan.cursor.x + stride);
  const ahead = [Math.max(next, n.moment + 1), ...n.stops];
  return Math.min(...ahead.filter((moment) => moment > n.moment));
}

/** Stairs with no more than one step in six pixels, the highest there. */
function envelope({ edges, tops }) {
  const [few, highest] = [[edges[0]], []];
  let top = Infinity;
  tops.forEach((height, i) => {
    top = Math.min(top, height);
    if (edges[i + 1] - few.at(-1) < 6 && i + 1 < tops.length) return;
    few.push(edges[i + 1]);
    highest.push(top);
    top = Infinity;
  });
  return [few, highest];
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };

/* The first of the texts that has room, or none. */
function fitting(x, y, texts, width, look) {
  const one = texts.find((words) => wideOf(words) <= width);
  return one ? [text(x, y, one, look)] : [];
}

function* drawNetwork(id, { boxes, floor, always, width }, n) {
  const alive = t`${formatBytes(n.now.total)} alive`;
  const room = width - Math.round((11 / LETTER) * wideOf(alive));
  const running = [whatRuns(n), n.operator, shortened(n.operator, room)];
  const words = n.moment < 0 ? [t`before the step`] : running;
  yield* fitting(0, 14, words, room, { class: "mb-value" });
  yield text(width, 15, alive, { ...END, class: "mb-value mb-now" });
  const tall = BOX.bottom - BOX.top;
  for (const { label, x, width, runs, tensors } of boxes) {
    const place = { x: x + 1.5, width: width - 3 };
    const look = runs ? "mb-box mb-runs" : "mb-box";
    yield svg("rect", { ...place, y: BOX.top, height: tall, class: look });
    for (const { category, y, height, freed, born } of tensors) {
      const box = { x: x + 4, width: width - 8, y, height };
      if (!freed) yield* filled(id, category, "rect", box);
      if (freed) yield svg("rect", { ...box, class: "mb-ghost mb-named" });
      else if (born) yield svg("rect", { ...box, class: "mb-born" });
    }
    const name = OUTSIDE[label] ?? label;
    yield* fitting(x + width / 2, BOX.bottom + 14, [name], width - 2, MIDDLE);
  }
  const y = BOX.bottom + 20;
  for (const { key, lower: [x], upper: [right] } of floor) {
    yield* filled(id, key, "rect", { x, width: right - x, y, height: 9 });
  }
  const size = formatBytes(always);
  const texts = [
    t`all the time: parameters, optimizer states and inputs, ${size}`,
    t`all the time: ${size}`,
  ];
  yield* fitting(width, y + 23, texts, width, END);
}

function* drawCurve(id, plan, n, reached) {
  const { plot, edges, peak, forwardEnd, ghost, cursor, width } = plan;
  yield* axes(plot, plan.axis);
  const ground = plan.tops.map(() => plot.bottom);
  const all = band(edges, ground, plan.tops);
  yield svg("path", { d: all, class: "mb-silhouette" });
  const [seen, ends] = [edges.slice(0, reached + 3), reached + 2];
  for (const { key, lower, upper } of plan.bands) {
    const d = band(seen, lower.slice(0, ends), upper.slice(0, ends));
    yield* filled(id, key, "path", { d });
  }
  if (ghost) {
    const d = stairs(...envelope(ghost));
    yield svg("path", { d, class: "mb-under" });
    yield svg("path", { d, class: "mb-ghost mb-named" });
  }
  yield* phaseStrip(id, plot, plan.phases);
  yield text(plot.right + 12, plot.bottom + 11, t`◂ drag ▸`);
  yield text(plot.right + 12, plot.bottom + 26, t`operators`);
  const top = reached >= n.peak_moment;
  const low = reached >= n.forward_end_moment;
  if (top) yield* drawRise(plan, n);
  const end = width < 480 ? t`forward` : t`end of forward`;
  yield* names(plot, [
    ...(top ? [[peak, t`peak`, formatBytes(n.peak.total)]] : []),
    ...(low ? [[forwardEnd, end, formatBytes(n.forward_end.total)]] : []),
    ...(ghost ? [[ghost.peak, t(ghost.name), formatBytes(ghost.bytes)]] : []),
  ]);
  if (low) yield dot(forwardEnd, "mb-open", 4.5);
  if (top) yield dot(peak, "mb-peak", 4.5);
  yield line(cursor.x, plot.top - 6, cursor.x, plot.bottom + 4, "mb-cursor");
  yield dot(cursor, "mb-open", 3);
  const grip = `M${cursor.x} ${plot.bottom - 4}l7 10v7h-14v-7Z`;
  yield svg("path", { d: grip, class: "mb-grip" });
}

/* By how much the peak is above the end of the forward pass. */
function* drawRise({ plot, peak, forwardEnd }, n) {
  yield line(peak.x, forwardEnd.y, peak.x, peak.y, "mb-rise");
  const words = `+${formatBytes(n.peak.total - n.forward_end.total)}`;
  const right = peak.x + 12 + wideOf(words) < plot.right;
  const look = { class: "mb-value mb-halo", ...(right ? {} : END) };
  yield text(peak.x + (right ? 8 : -8), peak.y - 6, words, look);
}

function memoryTable(id, n) {
  const row = (category) => ({
    label: SHOWN[category] ?? t`total`,
    part: SHOWN[category] ? category : null,
    sum: category === "total",
    cells: ["now", "forward_end", "peak"].map((moment) => {
      const bytes = n[moment][category];
      const shown = bytes ? formatBytes(bytes) : "–";
      return [`${moment}.${category}`, bytes, shown];
    }),
  });
  const rows = [...PARTS.map(row).reverse(), row("total")];
  return table(id, [t`bytes alive`, t`now`, t`end of forward`, t`peak`], rows);
}

function largestTable(id, n) {
  const rows = n.largest.slice(0, ROWS).map((group, i) => {
    const { category, operator, sizes, bytes } = group;
    const made = operator ? whatRuns(group) : t`from before the step`;
    const [count, size] = [sizes.length, formatBytes(sizes[0])];
    const equal = sizes.every((one) => one === sizes[0]);
    return {
      part: category,
      label: t`${SHOWN[category]}: ${made}`,
      cells: [
        [`largest.${i}.count`, count, equal ? `${count} × ${size}` : count],
        [`largest.${i}.bytes`, bytes, formatBytes(bytes)],
      ],
    };
  });
  return table(id, [t`the largest alive now`, t`tensors`, t`bytes`], rows);
}

// ---- the widget ----------------------------------------------------------

/* Goes on by itself, once, as soon as the picture is in view: `first` says
   whether it may begin, `step` whether there is more. Any touch ends it, and
   `end` is told whether one did. */
function playOnce(picture, { first, step, end }) {
  let timer = null;
  const touches = ["pointerdown", "keydown", "change"];
  const stop = (touch) => {
    seen.disconnect();
    if (timer === null) return;
    clearInterval(timer);
    timer = null;
    end(Boolean(touch));
  };
  const begin = ([{ isIntersecting: inView }]) => {
    if (!inView) return;
    seen.disconnect();
    if (still() || !first()) return;
    const root = picture.closest(".mb-root");
    for (const touch of touches) root.addEventListener(touch, stop);
    timer = setInterval(() => step() || stop(), TICK);
  };
  const seen = new IntersectionObserver(begin, { threshold: 0.7 });
  seen.observe(picture);
  return stop;
}

function build({ id, get, set, picture, again }) {
  let plan;
  let other = null; // the step that was chosen before
  const reached = new Map(); // by step, the last moment that was shown
  let rest = 0; // ticks to stay at a stop
  const start = get();
  let shown = null; // the moment to be seen while it plays by itself
  const now = () => describe(get());
  const jump = (moment) => {
    play.stop();
    set({ moment });
  };

  const step = radios({
    label: t`Step`,
    key: "step",
    onChange(step) {
      other = now().step;
      play.stop();
      set({ step, moment: -1 });
    },
  });
  const play = player({
    key: "play",
    step() {
      rest -= 1;
      if (rest > 0) return true;
      const n = now();
      const last = n.operators - 1;
      const next = n.moment >= last ? -1 : following(plan, n);
      rest = n.stops.includes(next) ? 1 + REST : 0;
      set({ moment: next });
      return next < last;
    },
  });
  play.root.addEventListener("click", () => (rest = 0), { capture: true });
  const to = (label, key) =>
    button({ label, key, onClick: () => jump(now()[`${key}_moment`]) });
  const buttons = html(
    "div",
    { class: "mb-buttons" },
    play.root,
    to(t`End of forward`, "forward_end").root,
    to(t`Peak`, "peak").root,
  );
  const moment = slider({
    label: t`Operator`,
    key: "moment",
    min: 0,
    onInput: (value) => jump(value - 1),
  });

  const isStart = ({ step, moment }) =>
    moment === -1 && step === start.step && moment === start.moment;
  const leave = playOnce(picture, {
    first: () => isStart(get()) && reached.get(start.step) === -1,
    step() {
      if (!isStart(get())) return false;
      const state = { ...get(), moment: shown ?? -1 };
      shown = following(plan, describe(state));
      again();
      return shown + 1 < now().operators;
    },
    end(touched) {
      const stay = touched && shown !== null && isStart(get());
      if (stay) set({ moment: shown });
      shown = null;
      again();
    },
  });

  drag(picture, {
    grab: ({ y }) => (y > plan.plot.top - 12 ? true : null),
    move: ({ x }) => jump(momentAt(plan, x)),
    drop: () => moment.focus(),
  });

  const draw = ({ ...state }, width, before) => {
    if (!before) other = null;
    state.moment = shown ?? state.moment;
    const n = describe(state);
    const far = Math.max(reached.get(n.step) ?? -1, n.moment);
    reached.set(n.step, far);
    plan = layout(state, width, other);
    const options = state.steps.steps.map(({ label }) => label);
    step.update({ value: n.step, options });
    moment.update({
      value: n.moment + 1,
      max: n.operators,
      text: t`${n.moment + 1} of ${n.operators}`,
      spoken: t`${place(n)}: ${formatBytes(n.now.total)}`,
    });
    return {
      title: t`Memory during one training step`,
      sentence: sentence(state, far),
      numbers: [memoryTable(id, n), largestTable(id, n)],
      height: plan.height,
      drawn: [...drawNetwork(id, plan, n), ...drawCurve(id, plan, n, far)],
    };
  };
  const stop = () => {
    play.stop();
    leave();
    reached.clear();
  };
  return {
    ...{ draw, stop, legend: legend(id, SHOWN) },
    controls: [step, { root: buttons }, moment],
    note: html("p", { class: "mb-note" }, NOTE),
  };
}

const keys = ["steps", "step", "moment", "label"];

export default widget({ name: "timeline", keys, build });
