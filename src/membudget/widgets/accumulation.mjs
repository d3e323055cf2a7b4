import {
  byteTicks,
  checkBox,
  choice,
  figure,
  formatBytes,
  formatNumber,
  html,
  makeId,
  numberField,
  redraw,
  save,
  slider,
  spread,
  svg,
} from "./base.mjs";

/* One accumulation window: its memory and the weights of its samples.

   describe(state): the numbers; Python's Accumulation.numbers() is the same.
   layout(state, width): where everything stands in the pictures.
   render({ model, el }): controls, pictures and tables. */

const NORMALISATIONS = {
  window: "window (sum ÷ all samples)",
  "mean of means": "mean of means (÷ steps)",
  "no division": "no division (sum of means)",
};

const CONSUMERS = {
  optimizer: "optimizer states",
  parameters: "parameters",
  gradients: "gradients",
  activations: "activations and inputs",
  temporaries: "temporaries",
};

const NOTES = {
  memory:
    "A window is what runs between two optimizer steps. In each micro-batch " +
    "activations grow through the forward pass and are freed through the " +
    "backward pass; gradients appear in the first backward pass and stay " +
    "until the step. Temporaries are a layer’s new gradient before it is added, " +
    "the loss, and what the step needs. The corners are exact, the sides drawn " +
    "straight. The outline is the whole batch at once.",
  weights:
    "A bar is as wide as its micro-batch has samples, so its area is the " +
    "micro-batch’s share of the gradient. The line is the weight in the " +
    "mean over the whole batch; a hatched bar misses it.",
};

const FORWARD = 1 / 3; // of a pass; backward takes about twice as long
const NARROWEST = 3; // pixels; narrower micro-batches are not all drawn
const LARGEST_BATCH = 65536;

// ---- numbers -------------------------------------------------------------

export function describe(state) {
  const { micro_batch: micro, samples, budget, footprint } = state;
  const total = state.locked ? state.global_batch : state.steps * micro;
  const count = Math.ceil(total / micro);
  const size = Math.min(micro, total);
  const last = total - (count - 1) * size;
  const weightOf = {
    window: () => 1 / total,
    "mean of means": (n) => 1 / (count * n),
    "no division": (n) => 1 / n,
  }[state.normalisation];
  const [weight, lastWeight] = [weightOf(size), weightOf(last)];
  const ours = peakOf(footprint, linesOf(footprint, count), size);
  const whole = peakOf(footprint, footprint.alone, total);
  const epochSteps = Math.ceil(samples / total);
  return {
    micro_batches: count,
    micro_batch: size,
    last_micro_batch: last,
    global_batch: total,
    weight,
    last_weight: lastWeight,
    weight_sum: (total - last) * weight + last * lastWeight,
    weight_ratio: Math.max(weight, lastWeight) / Math.min(weight, lastWeight),
    peak: ours.bytes,
    whole_peak: whole.bytes,
    fits: ours.bytes <= budget,
    whole_fits: whole.bytes <= budget,
    memory: ours.memory,
    whole_memory: whole.memory,
    steps_per_epoch: epochSteps,
    last_window: samples - (epochSteps - 1) * total,
  };
}

function linesOf(footprint, count) {
  return count === 1 ? footprint.alone : footprint.later;
}

function peakOf(footprint, lines, size) {
  const height = ([constant, slope]) => constant + slope * size;
  const line = lines.reduce((a, b) => (height(b) > height(a) ? b : a));
  return { bytes: height(line), memory: split(footprint, line, size) };
}

/* Who holds the bytes at one moment. Of the constant above parameters and
   optimizer states, up to one whole gradient is gradients; the rest is
   temporary. */
function split(footprint, [constant, slope], size) {
  const rest = constant - footprint.parameters - footprint.optimizer;
  const gradients = Math.min(footprint.gradients, rest);
  return {
    optimizer: footprint.optimizer,
    parameters: footprint.parameters,
    gradients,
    activations: slope * size,
    temporaries: rest - gradients,
  };
}

const bytesOf = (memory) => Object.values(memory).reduce((a, b) => a + b);

/* The moments of one forward and backward pass, in order: { at, memory }
   with `at` from 0 to 1. Each peak line is a moment whose bytes are known;
   activations fall as backward goes on, which says when it is. */
function pass(footprint, lines, size, gradientsBefore) {
  const floor = {
    optimizer: footprint.optimizer,
    parameters: footprint.parameters,
    gradients: gradientsBefore,
    activations: 0,
    temporaries: 0,
  };
  const busy = lines.filter(([, slope]) => slope > 0);
  const steepest = Math.max(...busy.map(([, slope]) => slope));
  const moments = busy
    .sort((a, b) => b[1] - a[1])
    .map((line) => ({
      at: FORWARD + (1 - FORWARD) * (1 - line[1] / steepest),
      memory: split(footprint, line, size),
    }));
  const after = { ...floor, gradients: footprint.gradients };
  return [{ at: 0, memory: floor }, ...moments, { at: 1, memory: after }];
}

/** The key numbers in words; Python's Accumulation.sentence() says the same. */
export function sentence(state) {
  const n = describe(state);
  const [count, all] = [n.micro_batches, n.global_batch];
  const [size, last] = [n.micro_batch, n.last_micro_batch];
  const budget = formatBytes(state.budget);
  const peak =
    `peak ${formatBytes(n.peak)}` +
    (n.memory.activations ? ", " : " (in the optimizer step), ") +
    `${n.fits ? "within" : "above"} the budget of ${budget}`;
  let memory = `One micro-batch, the whole batch of ${all}: ${peak}`;
  if (count > 1) {
    const rest = size === last ? "" : ` each and the last ${last}`;
    memory =
      `${count} micro-batches${rest ? "," : " of"} ${size}${rest}: ${peak}; ` +
      `the whole batch of ${all} needs ${formatBytes(n.whole_peak)} ` +
      (n.whole_fits ? "and fits" : "and does not fit");
  }
  const ratio = formatNumber(n.weight_ratio);
  const bias =
    `sample of the last micro-batch weighs ${ratio} times ` +
    "as much as any other";
  let weights = `Every sample weighs 1/${all}, as in the whole batch`;
  if (Math.abs(n.weight_sum - 1) > 1e-9) {
    weights = `The weights sum to ${formatNumber(n.weight_sum)} instead of 1`;
    if (size !== last) weights += `, and a ${bias}`;
  } else if (size !== last && n.weight_ratio > 1 + 1e-9) weights = `A ${bias}`;
  return `${memory}. ${weights}.`;
}

// ---- geometry ------------------------------------------------------------

/** Geometry of both pictures, in pixels, for a given width. */
export function layout(state, width) {
  const numbers = describe(state);
  const step = width < 480 ? 34 : 84;
  const plot = { left: 36, right: width - 100, top: 22, bottom: 252 };
  const end = plot.right - step; // where the last backward pass ends
  return {
    width,
    plot,
    step: { x: end, width: step },
    memory: memoryLayout(state, numbers, plot, end),
    weights: weightLayout(numbers, plot, end),
  };
}

function memoryLayout(state, numbers, plot, end) {
  const { footprint, budget } = state;
  const { global_batch: all, micro_batches: count } = numbers;
  const top = Math.max(numbers.peak, numbers.whole_peak, budget);
  const perByte = (plot.bottom - plot.top) / (top * 1.04);
  const y = (bytes) => plot.bottom - bytes * perByte;
  const perSample = (end - plot.left) / all;
  const shown = Math.min(count, Math.floor((end - plot.left) / NARROWEST));
  const cut = all / shown;
  const blocks = [];
  const corners = [];
  for (let i = 0; i < shown; i += 1) {
    const last = i === count - 1;
    const size = last ? numbers.last_micro_batch : numbers.micro_batch;
    const start = shown < count ? i * cut : i * numbers.micro_batch;
    const moments = pass(
      footprint,
      i === 0 ? footprint.alone : footprint.later,
      size,
      i === 0 ? 0 : footprint.gradients,
    );
    const x = plot.left + start * perSample;
    const width = (shown < count ? cut : size) * perSample;
    corners.push(
      ...moments.map(({ at, memory }) => ({ x: x + at * width, memory })),
    );
    const bytes = Math.max(...moments.map(({ memory }) => bytesOf(memory)));
    blocks.push({ x, width, size, bytes, y: y(bytes) });
  }
  const stepEnd = end + (plot.right - end) * 0.6;
  const step = stepCorners(footprint, linesOf(footprint, count), [
    end,
    stepEnd,
    plot.right,
  ]);
  corners.push(...step);
  const whole = [
    ...pass(footprint, footprint.alone, all, 0).map(({ at, memory }) => ({
      x: plot.left + at * (end - plot.left),
      memory,
    })),
    ...stepCorners(footprint, footprint.alone, [end, stepEnd, plot.right]),
  ];
  const mark = ({ x, memory }) => ({
    x: x === end ? (end + stepEnd) / 2 : x,
    y: y(bytesOf(memory)),
  });
  const ticks = byteTicks(top);
  return {
    perByte,
    blocks,
    count,
    outline: whole.map(({ x, memory }) => ({ x, y: y(bytesOf(memory)) })),
    bands: bandsOf(corners, y),
    peak: mark(highest(corners)),
    whole: mark(highest(whole)),
    budget: { y: y(budget) },
    unit: ticks.unit,
    ticks: ticks.marks.map(({ value, label }) => ({ label, y: y(value) })),
  };
}

/* The optimizer step is the moment that no batch size changes; after it the
   gradients are freed. */
function stepCorners(footprint, lines, [begin, end, last]) {
  const { parameters, optimizer, gradients } = footprint;
  const flat = lines.filter(([, slope]) => slope === 0).map(([bytes]) => bytes);
  const bytes = Math.max(parameters + optimizer + gradients, ...flat);
  const during = split(footprint, [bytes, 0], 0);
  const before = { ...during, temporaries: 0 };
  const after = { ...before, gradients: 0 };
  return [
    { x: begin, memory: before },
    { x: begin, memory: during },
    { x: end, memory: during },
    { x: end, memory: after },
    { x: last, memory: after },
  ];
}

const highest = (corners) =>
  corners.reduce((a, b) => (bytesOf(b.memory) > bytesOf(a.memory) ? b : a));

/* One closed polygon for each consumer, stacked from the bottom. */
function bandsOf(corners, y) {
  const floor = corners.map(() => 0);
  return Object.keys(CONSUMERS).map((consumer) => {
    const lower = corners.map(({ x }, i) => ({ x, y: y(floor[i]) }));
    corners.forEach(({ memory }, i) => (floor[i] += memory[consumer]));
    const upper = corners.map(({ x }, i) => ({ x, y: y(floor[i]) }));
    return { consumer, lower, upper };
  });
}

function weightLayout(numbers, plot, end) {
  const { micro_batches: count, global_batch: all } = numbers;
  const [top, bottom] = [20, 110];
  const largest = Math.max(numbers.weight, numbers.last_weight) * all;
  const perUnit = (bottom - top) / Math.max(1.5, largest * 1.2);
  const perSample = (end - plot.left) / all;
  const bar = (start, size, weight, many) => ({
    x: plot.left + start * perSample,
    width: size * perSample,
    y: bottom - weight * all * perUnit,
    height: weight * all * perUnit,
    factor: weight * all,
    many,
  });
  const { last_micro_batch: last } = numbers;
  const uneven = count > 1 && last !== numbers.micro_batch;
  const even = uneven ? all - last : all;
  const bars = [bar(0, even, numbers.weight, uneven ? count - 1 : count)];
  if (uneven) bars.push(bar(even, last, numbers.last_weight, 1));
  return { top, bottom, bars, one: { y: bottom - perUnit } };
}

// ---- drawing -------------------------------------------------------------

const points = (list) =>
  list.map(({ x, y }) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");

const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, ...attributes }, content);

const tick = (fits) => (fits ? "✓" : "✗");

const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

/* Hatching, so that no consumer is told by its colour alone. */
function patterns(id) {
  const make = (name, size, d, turn, look = "mb-hatch") =>
    svg(
      "pattern",
      {
        id: `${id}-${name}`,
        width: size,
        height: size,
        patternUnits: "userSpaceOnUse",
        patternTransform: turn && `rotate(${turn})`,
      },
      svg("path", { d, class: look }),
    );
  return svg(
    "defs",
    {},
    make("optimizer", 8, "M0 4H8"),
    make("gradients", 6, "M0 3H6", 45),
    make("temporaries", 5, "M1 2.5H2.5"),
    make("biased", 6, "M0 3H6", -45, "mb-biased"),
  );
}

function drawMemory(root, id, state, width) {
  const { plot, step, memory } = layout(state, width);
  const n = describe(state);
  root.setAttribute("viewBox", `0 0 ${width} 292`);
  root.setAttribute("aria-label", sentence(state));
  const parts = [patterns(id)];
  for (const { y, label } of memory.ticks) {
    parts.push(
      line(plot.left, y, plot.right, y, "mb-grid"),
      text(plot.left - 6, y + 4, label, { "text-anchor": "end" }),
    );
  }
  parts.push(text(plot.left - 6, 12, memory.unit, { "text-anchor": "end" }));
  for (const { consumer, lower, upper } of memory.bands) {
    const shape = points([...upper, ...lower.reverse()]);
    parts.push(
      svg("polygon", { points: shape, class: `mb-${consumer}` }),
      svg("polygon", { points: shape, fill: `url(#${id}-${consumer})` }),
    );
  }
  parts.push(
    line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis"),
    svg("polyline", { points: points(memory.outline), class: "mb-outline" }),
    line(plot.left, memory.budget.y, plot.right, memory.budget.y, "mb-limit"),
    svg("circle", {
      cx: memory.peak.x,
      cy: memory.peak.y,
      r: 4,
      class: "mb-peak",
    }),
    ...passStrip(memory, plot, step.x),
    text(
      step.x + step.width / 2,
      plot.bottom + 21,
      step.width < 104 ? "step" : "optimizer step",
      { "text-anchor": "middle" },
    ),
  );
  const marks = [
    [memory.whole, "whole batch", n.whole_peak, tick(n.whole_fits)],
    [{ x: plot.right, y: memory.budget.y }, "budget", state.budget, ""],
    [memory.peak, "window", n.peak, tick(n.fits)],
  ];
  const places = spread(
    marks.map(([at]) => at.y),
    32,
    plot.top - 4,
    plot.bottom - 16,
  );
  marks.forEach(([at, name, bytes, sign], i) => {
    const x = plot.right;
    const value = `${formatBytes(bytes)} ${sign}`;
    parts.push(
      line(at.x, at.y, x, at.y, "mb-leader"),
      line(x, at.y, x + 10, places[i] + 4, "mb-leader"),
      text(x + 13, places[i], name),
      text(x + 13, places[i] + 14, value, { class: "mb-value" }),
    );
  });
  root.replaceChildren(...parts);
}

/* Under the picture: which micro-batch is where. */
function passStrip({ blocks, count }, plot, end) {
  const middle = { "text-anchor": "middle" };
  const y = plot.bottom + 21;
  const fits = (label, width) => width > 7 * label.length + 5;
  if (!fits(`${count}`, blocks[0].width)) {
    const room = end - plot.left;
    const drawn =
      blocks.length < count && room > 200 ? ` (${blocks.length} drawn)` : "";
    const label = `${count} micro-batches${drawn}`;
    return [text(plot.left + room / 2, y, label, middle)];
  }
  return blocks.flatMap(({ x, width }, i) => {
    const label = width > 92 ? `micro-batch ${i + 1}` : `${i + 1}`;
    return [
      svg("rect", {
        x: x + 1,
        y: plot.bottom + 4,
        width: Math.max(width - 2, 1),
        height: 3,
        class: "mb-strip",
      }),
      ...(fits(label, width) ? [text(x + width / 2, y, label, middle)] : []),
    ];
  });
}

function drawWeights(root, id, state, width) {
  const { plot, weights } = layout(state, width);
  const n = describe(state);
  root.setAttribute("viewBox", `0 0 ${width} 132`);
  const factors = weights.bars.map(({ factor }) => formatNumber(factor));
  root.setAttribute(
    "aria-label",
    `Weight of one sample, as a multiple of 1/${n.global_batch}: ` +
      factors.join("; in the last micro-batch "),
  );
  const parts = [patterns(id)];
  const { bars, one, bottom } = weights;
  bars.forEach(({ x, y, width: wide, height, factor, many }, i) => {
    const wrong = Math.abs(factor - 1) > 1e-9;
    const box = { x, y, width: wide, height };
    parts.push(svg("rect", { ...box, class: "mb-weight" }));
    if (wrong) {
      parts.push(svg("rect", { ...box, fill: `url(#${id}-biased)` }));
    }
    for (let k = 1; k < many && wide / many > 4; k += 1) {
      const at = x + (wide * k) / many;
      parts.push(line(at, y, at, bottom, "mb-cut"));
    }
    const middle = i === 0;
    if (middle || factor !== bars[0].factor) {
      parts.push(
        text(
          middle ? x + wide / 2 : x + wide,
          Math.min(y, one.y) - 5,
          `× ${formatNumber(factor)}`,
          { "text-anchor": middle ? "middle" : "end", class: "mb-value" },
        ),
      );
    }
  });
  parts.push(
    line(plot.left, bottom, plot.right, bottom, "mb-axis"),
    line(plot.left, one.y, plot.right, one.y, "mb-one"),
    text(plot.left - 6, bottom + 4, "0", { "text-anchor": "end" }),
    text(plot.right + 6, one.y + 4, `1/${n.global_batch}`, {
      class: "mb-value",
    }),
  );
  root.replaceChildren(...parts);
}

// ---- the widget ----------------------------------------------------------

function number(key, value, shown) {
  return html(
    "span",
    { "data-number": key, "data-value": String(value) },
    shown ?? String(value),
  );
}

function memoryTable(id, state) {
  const n = describe(state);
  const swatch = (consumer) =>
    svg(
      "svg",
      { viewBox: "0 0 14 14", class: "mb-swatch", "aria-hidden": "true" },
      svg("rect", { width: 14, height: 14, class: `mb-${consumer}` }),
      svg("rect", { width: 14, height: 14, fill: `url(#${id}-${consumer})` }),
    );
  const cell = (key, bytes) =>
    html("td", {}, number(key, bytes, formatBytes(bytes)));
  const heading = (...children) => html("th", { scope: "row" }, ...children);
  const rows = Object.entries(CONSUMERS).reverse().map(([consumer, label]) =>
    html(
      "tr",
      {},
      heading(swatch(consumer), label),
      cell(`memory.${consumer}`, n.memory[consumer]),
      cell(`whole_memory.${consumer}`, n.whole_memory[consumer]),
    ),
  );
  const verdict = (key, fits) =>
    html("td", {}, number(key, fits, fits ? "✓ fits" : "✗ does not fit"));
  const column = (label) => html("th", { scope: "col" }, label);
  return [
    html(
      "thead",
      {},
      html(
        "tr",
        {},
        column("bytes at the peak"),
        column("window"),
        column("whole batch"),
      ),
    ),
    html(
      "tbody",
      {},
      ...rows,
      html(
        "tr",
        { class: "mb-sum" },
        heading("peak"),
        cell("peak", n.peak),
        cell("whole_peak", n.whole_peak),
      ),
      html(
        "tr",
        {},
        heading(`budget of ${formatBytes(state.budget)}`),
        verdict("fits", n.fits),
        verdict("whole_fits", n.whole_fits),
      ),
    ),
  ];
}

function numberList(state) {
  const n = describe(state);
  const even = n.micro_batch === n.last_micro_batch;
  const full = even ? n.micro_batches : n.micro_batches - 1;
  const entry = (label, ...children) =>
    html("div", {}, html("dt", {}, label), html("dd", {}, ...children));
  return [
    entry(
      "micro-batches",
      number(
        "micro_batches",
        n.micro_batches,
        `${full} × ${n.micro_batch}` + (even ? "" : ` + ${n.last_micro_batch}`),
      ),
    ),
    entry("global batch", number("global_batch", n.global_batch)),
    entry(
      "sum of the sample weights",
      number("weight_sum", n.weight_sum, formatNumber(n.weight_sum)),
    ),
    entry(
      "largest ÷ smallest weight",
      number("weight_ratio", n.weight_ratio, formatNumber(n.weight_ratio)),
    ),
    entry(
      `optimizer steps per epoch of ${state.samples}`,
      number("steps_per_epoch", n.steps_per_epoch),
    ),
    entry("samples in the last window", number("last_window", n.last_window)),
  ];
}

function render({ model, el }) {
  const keys = [
    "locked",
    "micro_batch",
    "steps",
    "global_batch",
    "normalisation",
    "samples",
    "budget",
    "footprint",
    "label",
  ];
  const read = () => Object.fromEntries(keys.map((k) => [k, model.get(k)]));
  const set = (changes) => {
    const state = { ...read(), ...changes };
    const { micro_batches, global_batch } = describe(state);
    save(model, { ...changes, steps: micro_batches, global_batch });
  };

  const micro = slider({
    label: "Micro-batch",
    key: "micro_batch",
    unit: " samples",
    onInput: (value) => set({ micro_batch: value }),
  });
  const steps = slider({
    label: "Accumulation steps",
    key: "steps",
    onInput: (value) => set({ steps: value }),
  });
  const global = numberField({
    label: "Global batch",
    key: "global_batch",
    max: LARGEST_BATCH,
    onChange: (value) => set({ global_batch: value }),
  });
  const locked = checkBox({
    label: "Lock the global batch",
    key: "locked",
    onChange: (value) => set({ locked: value }),
  });
  const normalisation = choice({
    label: "Normalisation",
    key: "normalisation",
    options: NORMALISATIONS,
    onChange: (value) => set({ normalisation: value }),
  });

  const id = makeId();
  const live = html("p", { "aria-live": "polite", class: "mb-live" });
  const memory = svg("svg", { role: "img", class: "mb-picture" });
  const weights = svg("svg", { role: "img", class: "mb-picture" });
  const table = html("table", { class: "mb-table" });
  const list = html("dl", { class: "mb-numbers" });
  const title = html("span");
  let speaking;

  el.classList.add("mb-root", "mb-accumulation");
  el.append(
    html(
      "div",
      { class: "mb-controls" },
      micro.root,
      steps.root,
      html("div", { class: "mb-lock" }, global.root, locked.root),
      normalisation.root,
    ),
    live,
    figure(title, NOTES.memory, memory),
    table,
    figure("Weight of one sample in the gradient", NOTES.weights, weights),
    list,
  );

  const end = redraw(model, memory, (width) => {
    const state = read();
    const n = describe(state);
    micro.update({
      value: state.micro_batch,
      max: Math.max(512, state.micro_batch),
    });
    steps.update({
      value: n.micro_batches,
      max: Math.max(32, n.micro_batches),
      disabled: state.locked,
    });
    global.update({ value: n.global_batch, readOnly: !state.locked });
    locked.update({ value: state.locked });
    normalisation.update({ value: state.normalisation });
    title.textContent = "Memory during one window";
    if (state.label) title.append(": ", state.label);
    drawMemory(memory, `${id}m`, state, width);
    drawWeights(weights, `${id}w`, state, width);
    table.replaceChildren(...memoryTable(`${id}m`, state));
    list.replaceChildren(...numberList(state));
    clearTimeout(speaking);
    const speak = () => (live.textContent = sentence(state));
    if (live.textContent) speaking = setTimeout(speak, 150);
    else speak();
  });
  return () => {
    end();
    clearTimeout(speaking);
    el.replaceChildren();
  };
}

export default { render };
