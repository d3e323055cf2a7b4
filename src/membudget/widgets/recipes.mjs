import {
  HOLDERS,
  LETTER,
  bar,
  checkBox,
  choice,
  filled,
  formatBytes,
  html,
  laid,
  legend,
  lengths,
  line,
  listed,
  percent,
  slider,
  svg,
  table,
  text,
  widget,
} from "./base.mjs";

/* The peak of a training step by recipe, beside what a card has.

   describe(state): what Python predicted, for this batch.
   layout(state, width): where everything stands. */

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

const cardOf = ({ account, card }) =>
  account.cards.find(({ name }) => name === card);

/** The peak of every recipe; `left` is what the card has beyond it. */
export function describe(state) {
  const { account, batch, checkpointed } = state;
  const card = cardOf(state);
  const place = account.batches.indexOf(batch);
  const of = (rows) => rows[Number(checkpointed)][place];
  return account.recipes.map((recipe, i) => {
    const parts = of(account.peaks)[i];
    const bytes = sum(parts);
    const left = card ? card.usable - bytes : null;
    const phase = of(account.phases)[i];
    return { recipe, parts, bytes, left, phase, states: account.states[i] };
  });
}

// ---- words ---------------------------------------------------------------

/** The key numbers in words. */
export function sentence(state) {
  const { batch, card, checkpointed } = state;
  const all = describe(state);
  const [full, low] = all.map(({ bytes }) => bytes);
  const said = [
    `Batch ${batch}${checkpointed ? ", checkpointed" : ""}: the peak is ` +
      `${formatBytes(full)} in fp32 and ${formatBytes(low)} under ` +
      `autocast, ${percent(low, full)} of it.`,
  ];
  if (card) {
    const fit = all.filter(({ left }) => left >= 0).map((of) => of.recipe);
    const fits = `${listed(fit) || "none"} ${fit.length > 1 ? "fit" : "fits"}`;
    const usable = formatBytes(cardOf(state).usable);
    said.push(`The ${card} has ${usable}: ${fits}.`);
  }
  const master = all.find(({ recipe }) => recipe === "master");
  if (master.phase === "optimizer") {
    const copies = "on fp32 copies of the gradients";
    said.push(`master peaks in the optimizer’s step, ${copies}.`);
  }
  return said.join(" ");
}

/* What a card that emulates bf16 means for a recipe. */
function advice(state, recipe) {
  if (recipe === "fp32" || cardOf(state)?.bf16 !== false) return "";
  const same = " (use fp16: same bytes)";
  return recipe === "autocast" ? same : " (bf16 emulated)";
}

// ---- geometry ------------------------------------------------------------

/** A bar for each recipe, over an axis that the batch does not move. */
export function layout(state, width) {
  const { account } = state;
  const usable = cardOf(state)?.usable;
  const largest = Math.max(...account.peaks.flat(2).map(sum));
  const top = usable ? 1.35 * usable : 1.04 * largest;
  const narrow = width < 480;
  const plot = { left: 4, right: width - 14, top: 22 };
  const { x, ...axis } = lengths(plot, top, width);
  const step = narrow ? 57 : 42;
  const bars = describe(state).map((of, i) => {
    const keys = Object.keys(HOLDERS);
    const sizes = Object.fromEntries(of.parts.map((size, k) => [keys[k], size]));
    const parts = laid(sizes, x);
    const y = plot.top + 14 + step * i;
    const at = y + (narrow ? 21 : 6);
    return { ...of, y, at, parts, beyond: of.bytes > top, end: x(of.bytes) };
  });
  plot.bottom = bars.at(-1).at + 26;
  return {
    ...{ plot, narrow, bars, ...axis },
    limit: usable ? { x: x(usable), usable } : null,
    height: plot.bottom + 22,
  };
}

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };
const TALL = 18; // of a bar

/* The card's end; hatched what is beyond it, where something is. */
function* drawLimit(id, { plot, limit, narrow, bars }, card) {
  const { x, usable } = limit;
  const top = plot.top - 6;
  const box = { x, y: top, width: plot.right - x, height: plot.bottom - top };
  const over = bars.filter(({ left }) => left < 0);
  if (over.length) yield* filled(id, "over", "rect", box);
  for (const { at, end } of over) {
    const excess = { x, y: at - 1, width: end - x, height: TALL + 2 };
    yield svg("rect", { ...excess, class: "mb-excess" });
  }
  yield line(x, top, x, plot.bottom, "mb-limit");
  const label = `${card}: ${formatBytes(usable)}${narrow ? "" : " usable"}`;
  const at = Math.min(x, plot.right + 14 - (LETTER * label.length) / 2);
  yield text(at, 12, label, { ...MIDDLE, class: "mb-value" });
  yield text(plot.left, 12, `not measured${narrow ? "" : " on a GPU"}`);
}

function* drawWords(state, { bars, narrow, plot }) {
  const halo = { class: "mb-halo" };
  for (const { recipe, bytes, left, y } of bars) {
    const size = formatBytes(bytes);
    const name = narrow ? recipe : `${recipe}: ${size}`;
    const label = text(plot.left, y, "", halo);
    const bold = svg("tspan", { class: "mb-value" }, name);
    label.append(bold, advice(state, recipe));
    yield label;
    if (narrow) yield text(plot.left, y + 15, size, halo);
    if (left === null) continue;
    const over = left < 0;
    const verdict = over ? `${formatBytes(-left)} too much` : "fits";
    const look = `mb-value mb-halo mb-big${over ? " mb-broken" : ""}`;
    const place = [plot.right, narrow ? y + 15 : y];
    yield text(...place, verdict, { ...END, class: look });
  }
}

function* drawBars(id, plan, state, before) {
  const { plot, bars, ticks, unit, limit } = plan;
  for (const { x, label } of ticks) {
    yield line(x, plot.top, x, plot.bottom, "mb-grid");
    yield text(x, plot.bottom + 17, label, MIDDLE);
  }
  yield text(plot.right + 14, plot.bottom + 17, unit, END);
  yield line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis");
  for (const { at, parts, beyond } of bars) {
    yield* bar(id, parts, at, TALL);
    const d = `M${plot.right + 2} ${at + 2}l9 7l-9 7z`;
    if (beyond) yield svg("path", { d, class: "mb-beyond" });
  }
  if (limit) yield* drawLimit(id, plan, state.card);
  yield* drawWords(state, plan);
  for (const { at, end } of before?.bars ?? []) {
    const box = { x: plot.left, y: at - 2, width: end - plot.left };
    yield svg("rect", { ...box, height: TALL + 4, class: "mb-ghost" });
  }
}

/* The parts that are ever long enough to be seen. */
function visible({ peaks }) {
  const seen = (_, k) =>
    peaks.flat(2).some((parts) => parts[k] > 0.002 * sum(parts));
  return Object.fromEntries(Object.entries(HOLDERS).filter(seen));
}

function results(id, state) {
  const all = describe(state);
  const row = ({ recipe, bytes, states, phase }) => {
    const each = sum(states);
    const cells = [
      [`${recipe}.states`, each, `${states.join(" + ")} = ${each}`],
      [`${recipe}.bytes`, bytes, formatBytes(bytes)],
      [`${recipe}.share`, bytes / all[0].bytes, percent(bytes, all[0].bytes)],
      [`${recipe}.phase`, phase],
    ];
    return { label: recipe, cells };
  };
  const head = ["bytes per parameter", "peak", "of fp32’s", "moment"];
  return [table(id, ["recipe", ...head], all.map(row))];
}

// ---- the widget ----------------------------------------------------------

const NOTE =
  "Each bar is what is alive at the peak of a training step with Adam, " +
  "predicted. The peak is one moment: what is not alive then, as gradients " +
  "still to come, is not in the bar. Temporaries are mostly gradients on " +
  "their way back, above all of the logits; in the optimizer’s step, its " +
  "workspace. Bytes per parameter: parameters + gradients + optimizer " +
  "states. It goes by a GPU’s rules and was not measured on a GPU.";

function build({ id, get, set, bound }) {
  const batch = slider({
    label: "Batch",
    key: "batch",
    min: 0,
    onInput: (place) => set({ batch: get().account.batches[place] }),
  });
  const names = get().account.cards.map(({ name }) => name);
  const card = bound(choice, "Card", "card", {
    options: { "": "none", ...Object.fromEntries(names.map((n) => [n, n])) },
  });
  const checkpointed = bound(checkBox, "Checkpointed", "checkpointed");
  const draw = (state, width, before) => {
    const { account } = state;
    const plan = layout(state, width);
    const same = before && before.card === state.card;
    batch.update({
      value: account.batches.indexOf(state.batch),
      max: account.batches.length - 1,
      text: state.batch,
      spoken: `batch ${state.batch}`,
    });
    return {
      title: `Predicted peak of a training step: ${account.name}`,
      sentence: sentence(state),
      height: plan.height,
      drawn: drawBars(id, plan, state, same && layout(before, width)),
      numbers: results(id, state),
    };
  };
  return {
    controls: [batch, card, checkpointed],
    legend: legend(id, visible(get().account)),
    note: html("p", { class: "mb-note" }, NOTE),
    draw,
  };
}

const keys = ["account", "batch", "card", "checkpointed"];

export default widget({ name: "recipes", keys, build });
