/* "Will it fit?": a card that a training step overflows, and five savings.
   Everything is looked up in rows that Python computed. */

import {
  HOLDERS,
  bar,
  button,
  byteCell,
  cardFrame,
  checkBox,
  choice,
  formatBytes,
  grouped,
  html,
  laid,
  legend,
  lengthAxis,
  lengths,
  line,
  number,
  numberList,
  percent,
  plural,
  ragged,
  spill,
  still,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";

const PARTS = Object.keys(HOLDERS);
const NAMES = { ...HOLDERS, optimizer: t`optimizer` };

/* The tokens are too few to be seen. */
const SEEN = PARTS.filter((part) => part !== "inputs");

/* The switches, in the order of the rows: words, what they do, and where they
   are taught. */
const SWITCHES = {
  cut: [t`Split the batch`, t`one sequence at a time`, "03_accumulation"],
  forget: [
    ...[t`Forget activations`, t`keep each block’s input`],
    "04_checkpointing",
  ],
  half: [t`Mix precisions`, t`16-bit products, fp32 Adam`, "06_precision"],
  adapt: [t`Train an adapter`, t`LoRA, weights in 4 bits`, "07_adapters"],
  share: [t`Share over cards`, t`weights, Adam and batch`, "09_sharding"],
};
const KEYS = Object.keys(SWITCHES);

/* What to make fit, one after the other: a model and a card. */
const CHALLENGES = [
  ["Llama 3.2 1B", "RTX 4090"],
  ["Llama 3 8B", "RTX 3060"],
  ["Llama 3 70B", "H100 80 GB"],
];

const place = (state) =>
  KEYS.reduce((found, key) => 2 * found + Number(state[key]), 0);

const sum = (sizes) => sizes.reduce((a, b) => a + b, 0);

/** What the widget shows. Sizes are bytes, times multiples of the first
    row's. */
export function describe(state) {
  const { tables, model, card } = state;
  const { peaks, times } = tables.models[model];
  const budget = tables.cards[card];
  const all = peaks.map(sum);
  const at = place(state);
  const time = (changes) => times[card][place({ ...state, ...changes })];
  const switches = (row) => row.toString(2).replaceAll("0", "").length;
  const fitting = [...all.keys()].filter((row) => all[row] <= budget);
  const split = (sizes) =>
    Object.fromEntries(PARTS.map((part, i) => [part, sizes[i]]));
  return {
    now: split(peaks[at]),
    plain: split(peaks[0]),
    peak: all[at],
    budget,
    over: Math.max(all[at] - budget, 0),
    fitting: fitting.length,
    count: all.length,
    used: switches(at),
    fewest: Math.min(...fitting.map(switches)),
    fastest: Math.min(...fitting.map((row) => times[card][row])),
    least: Math.min(...all),
    time: times[card][at],
    unsplit: all[place({ ...state, cut: false })],
    costs: Object.fromEntries(
      KEYS.map((key) => [
        key,
        time({ [key]: true }) / time({ [key]: false }),
      ]),
    ),
  };
}

/** A saving's time in words: "+28 % GPU time". */
export function costWords(ratio) {
  const change = Math.round(100 * (ratio - 1));
  if (!change) return t`same GPU time`;
  const sign = change > 0 ? "+" : "−";
  return t`${sign}${Math.abs(change)} % GPU time`;
}

/* Why a saving may not be seen. */
function stepWords({ now, peak, unsplit }, { cut, forget }) {
  if ((cut || forget) && now.activations < 0.001 * peak) {
    return t`The peak is Adam’s update, when no activation is alive.`;
  }
  if (cut && peak > unsplit) {
    return t`Here splitting adds memory: gradients wait for the next part.`;
  }
  return "";
}

/** The key numbers in words. */
export function sentence(state) {
  const { tokens, batch } = state.tables.models[state.model];
  const n = describe(state);
  const told = t(
    "A step of {0} × {1} tokens with Adam needs {2} on a card of {3}.",
    ...[batch, grouped(tokens), formatBytes(n.peak), formatBytes(n.budget)],
  );
  const least = formatBytes(n.least);
  let count = t`${n.fitting} of ${n.count} combinations fit.`;
  if (n.fitting === 1) count = t`1 of ${n.count} combinations fits.`;
  if (!n.fitting) {
    count = t`No combination of these fits: the least needs ${least}.`;
  }
  return [told, stepWords(n, state), count].filter(Boolean).join(t` `);
}

/** What is left to try where it fits; "" where nothing is. */
export function goals({ over, used, fewest, time, fastest }) {
  if (over) return "";
  const [fewer, faster] = [used > fewest, time > fastest];
  const savings = plural(fewest, "saving");
  const share = percent(fastest, 1);
  if (fewer && faster) {
    return t`It also fits with ${savings}, or in ${share} of the GPU time.`;
  }
  if (fewer) return t`It also fits with ${savings}.`;
  if (faster) return t`It also fits in ${share} of the GPU time.`;
  return t`Nothing else fits with fewer savings, or in less GPU time.`;
}

/** The challenge that follows: a model and a card; null after the last. */
export function following({ model, card }) {
  const at = CHALLENGES.findIndex(([m, c]) => m === model && c === card);
  return CHALLENGES[at + 1] ?? null;
}

const verdict = ({ over, peak, budget }) =>
  over
    ? t`${formatBytes(over)} too much`
    : t`It fits: ${formatBytes(budget - peak)} free`;

// ---- layout --------------------------------------------------------------

const [CARD, TALL, AXIS] = [44, 104, 172];
const MOST = 4.4; // cards that the picture is wide

/** Where everything stands in the picture. No switch moves the axis. */
export function layout(state, width) {
  const n = describe(state);
  const plot = { left: 3, right: width - 3 };
  const whole = Math.max(1.04 * sum(Object.values(n.plain)), 1.3 * n.budget);
  const top = Math.min(whole, MOST * n.budget);
  const { x, ...axis } = lengths(plot, top, width);
  return {
    ...{ width, height: AXIS + 24, plot, axis, parts: laid(n.now, x) },
    ...{ edge: x(n.budget), end: x(n.peak), beyond: n.peak > top },
  };
}

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

/* The card's face, as wide as the card allows. */
function* drawFace({ plot, edge }, happy) {
  const [x, y] = [(plot.left + edge) / 2, CARD + TALL / 2];
  const r = Math.min(9, (edge - plot.left) / 11);
  for (const side of [-1, 1]) {
    const cx = x + side * 2.6 * r;
    const eye = { cx, cy: y - 1.6 * r };
    yield svg("circle", { ...eye, r, class: "mb-eye" });
    const pupil = { cx, cy: eye.cy + (happy ? 0 : 0.3 * r), r: 0.45 * r };
    yield svg("circle", { ...pupil, class: "mb-pupil" });
  }
  const bend = happy ? 2.6 * r : -2.2 * r;
  const from = y + (happy ? 1.6 : 3) * r;
  const d = `M${x - 2.6 * r} ${from}q${2.6 * r} ${bend} ${5.2 * r} 0`;
  yield svg("path", { d, class: "mb-mouth mb-under" });
  yield svg("path", { d, class: "mb-mouth" });
}

function draw(id, state, n, plan) {
  const { plot, axis, parts, beyond } = plan;
  const broken = n.over ? " mb-broken" : " mb-fine";
  const card = { x: plot.left, y: CARD, width: plan.edge - plot.left };
  const over = { x: plan.edge, y: CARD - 2, width: plan.end - plan.edge };
  const takes = t`GPU time: ${percent(n.time, 1)} of the plain step’s`;
  const named = parts.filter(
    ({ part, x, width }) =>
      x >= plan.edge && wideOf(NAMES[part]) + 12 < width,
  );
  return [
    text(plot.left, 24, verdict(n), { class: `mb-verdict${broken}` }),
    ...(plan.width < 480 || n.time === 1
      ? []
      : [text(plot.right, 24, takes, END)]),
    ...bar(id, parts, CARD + 3, TALL - 6),
    ...(n.over ? spill(id, { ...over, height: TALL + 4 }) : []),
    ...named.map(({ part, x, width }) =>
      text(x + width / 2, CARD + TALL / 2 + 4, NAMES[part], {
        ...MIDDLE,
        class: "mb-halo",
      }),
    ),
    ...cardFrame({ ...card, height: TALL }),
    ...drawFace(plan, !n.over),
    ...(beyond ? [ragged(plot.right - 14, CARD - 6, TALL + 12)] : []),
    ...lengthAxis(plot, AXIS - 8, axis),
  ];
}

/* Lets the picture go to where it is from where it was. */
function move(drawn, from) {
  const shapes = drawn.filter((element) => element.tagName === "rect");
  const sizeOf = (rect) => {
    const [x, width] = ["x", "width"].map((key) => rect.getAttribute(key));
    return { x: `${x}px`, width: `${width}px` };
  };
  const now = new Map();
  for (const rect of shapes) {
    const look = rect.getAttribute("class") ?? rect.getAttribute("fill");
    const size = sizeOf(rect);
    now.set(look, size);
    const old = from && from.get(look);
    if (!old || still()) continue;
    if (old.x === size.x && old.width === size.width) continue;
    rect.animate([old, size], { duration: 450, easing: "ease-out" });
  }
  return now;
}

function results(id, n) {
  const rows = PARTS.map((part) => ({
    part,
    label: NAMES[part],
    cells: ["now", "plain"].map((of) =>
      byteCell(`${of}.${part}`, n[of][part]),
    ),
  }));
  return [
    table(id, [t`at the peak`, t`now`, t`plain`], rows),
    numberList([
      [t`peak on a card`, "peak", n.peak, formatBytes(n.peak)],
      [t`the card has`, "budget", n.budget, formatBytes(n.budget)],
      [
        ...[t`combinations that fit`, "fitting", n.fitting],
        t`${n.fitting} of ${n.count}`,
      ],
      [t`GPU time of the plain step’s`, "time", n.time, percent(n.time, 1)],
    ]),
  ];
}

const NOTES = [
  t(
    "The plain step runs in fp32 with Adam, all sequences at once, on one " +
      "card.",
  ),
  t(
    "The frame is the memory that a step can use. The fill is what is alive " +
      "at the worst moment, by a CPU’s kernels. Where that moment comes " +
      "before the first gradient, none is drawn.",
  ),
  t(
    "GPU time is seconds × cards, by the card’s data sheet, not measured; " +
      "fp32 is TF32 where the card can, Adam is fused. Beside a switch " +
      "stands what it changes now, the others as they are.",
  ),
  t(
    "Mixed precision is autocast on one card. Over several, bf16 weights " +
      "are gathered from fp32 shards. A T4 has no bf16: emulated, it is " +
      "given the speed of fp32, but beside an adapter fp16. Weights and " +
      "Adam’s states in bf16 alone need half as much and can hurt training: " +
      "page 6b says when, the planner has them.",
  ),
  t(
    "The adapter is LoRA of rank 16 in all linear layers, over weights in 4 " +
      "bits (QLoRA). Beside it mixed precision keeps the other weights in " +
      "bf16, and each card has all of them.",
  ),
  t`The page’s address holds the switches: copy it to share.`,
];

// ---- the widget ----------------------------------------------------------

const keys = ["model", "card", ...KEYS, "tables"];

/* In the book the chapters stand beside the page. */
const inBook = () =>
  document.querySelector('script[type="text/x-esm"][data-widget]') !== null;

function build({ id, get, set, bound, picture }) {
  const { tables } = get();
  const switches = KEYS.map((key) => {
    const [label, does, chapter] = SWITCHES[key];
    const box = bound(checkBox, label, key);
    const doing = html("small", { class: "mb-does" }, does);
    box.root.append(doing);
    const cost = html("span", { class: "mb-cost" });
    const words = t`ch. ${Number(chapter.slice(0, 2))}`;
    const href = `../chapters/${chapter}.html`;
    const where = inBook() ? html("a", { href }, words) : words;
    const told = html("small", { class: "mb-price" }, cost, " · ", where);
    return {
      ...box,
      root: html("div", { class: "mb-switch" }, box.root, told),
      show(ratio, count, adapt) {
        const alone = key === "share" && adapt;
        doing.textContent = alone ? t`the batch alone` : does;
        const words = key === "share" ? t`Share over ${count} cards` : label;
        box.root.childNodes[1].textContent = words;
        cost.replaceChildren(number(`costs.${key}`, ratio, costWords(ratio)));
      },
    };
  });
  const sized = (things, size) =>
    Object.keys(things).sort((a, b) => size(things[a]) - size(things[b]));
  const models = sized(tables.models, ({ peaks }) => sum(peaks[0]));
  const model = bound(choice, t`Model`, "model", { options: models });
  const cards = sized(tables.cards, (size) => size);
  const card = bound(choice, t`Card`, "card", { options: cards });

  const tried = html("span", {});
  const next = button({
    ...{ label: t`Next`, key: "next" },
    onClick: () => {
      const [model, card] = following(get());
      const off = Object.fromEntries(KEYS.map((key) => [key, false]));
      set({ ...off, model, card });
    },
  });
  const goal = html("p", { class: "mb-goal" }, tried, t` `, next.root);
  const whole = html("div", {}, picture, goal);

  let last = {};
  return {
    controls: switches,
    legend: legend(
      id,
      Object.fromEntries(SEEN.map((part) => [part, NAMES[part]])),
    ),
    more: [model, card],
    picture: whole,
    note: html("ul", {}, ...NOTES.map((words) => html("li", {}, words))),
    draw(state, width) {
      const n = describe(state);
      const plan = layout(state, width);
      const count = tables.models[state.model].cards;
      for (const one of switches) {
        one.show(n.costs[one.key], count, state.adapt);
      }
      tried.textContent = goals(n);
      const then = n.over ? null : following(state);
      next.root.hidden = !then;
      next.root.textContent = then
        ? t`Next: ${then[0]} on an ${then[1]}`
        : t`Next`;
      const drawn = draw(id, state, n, plan);
      const axis = `${width} ${state.model} ${state.card}`;
      last = { axis, shapes: move(drawn, last.axis === axis && last.shapes) };
      return {
        title: t`Will training ${state.model} fit the ${state.card}?`,
        sentence: sentence(state),
        height: plan.height,
        drawn,
        numbers: results(id, n),
      };
    },
  };
}

export default widget({ name: "fits", keys, build });
