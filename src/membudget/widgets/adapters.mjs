import {
  HOLDERS,
  bar,
  byteCell,
  checkBox,
  come,
  filled,
  formatBytes,
  html,
  laid,
  legend,
  lengthAxis,
  lengths,
  line,
  percent,
  pixels,
  radios,
  still,
  svg,
  t,
  table,
  text,
  wideOf,
  widget,
} from "./base.mjs";

/* A block of a Llama, and as tiles the tensors that autograd keeps of it. A
   switch splits and merges them.

   describe(state): what Python computed for the state of the switches.
   layout(state, width): where everything stands. */

const PARTS = Object.keys(HOLDERS);
const [MIB, GIB] = [2 ** 20, 2 ** 30];

/* The block's boxes: two halves, from top to bottom. */
const HALVES = [
  [["norm1"], ["query", "key", "value"], ["attention"], ["out"]],
  [["norm2"], ["gate", "up"], ["product"], ["down"]],
];
const LABELS = {
  norm1: t`norm`,
  norm2: t`norm`,
  attention: t`attention`,
  product: t`SiLU, product`,
};

/* The boxes of the table's rows. */
const PLACES = {
  block: [t`the block’s input`, ["block"]],
  norms: [t`norms`, ["norm1", "norm2"]],
  linear: [
    t`linear layers, adapters`,
    ["query", "key", "value", "out", "gate", "up", "down"],
  ],
  attention: [t`attention`, ["attention"]],
  product: [t`SiLU, product`, ["product"]],
};

/* How a peak's activations look, of which the tiles show two kinds. */
const seen = (part) => (part === "activations" ? "both" : part);

/* The switches that only adapters have. */
const ADAPTERS = {
  bf16: t`bf16 adapters`,
  dropout: t`Dropout in adapters`,
  four_bits: t`Base in 4 bits`,
};

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

const adaptedIn = ({ account, train }) =>
  account.train.find(([name]) => name === train)[1];

/* What Python computed for a state. */
function rowOf(state) {
  const { train, checkpointed } = state;
  const wanted = { train, checkpointed };
  for (const key of Object.keys(ADAPTERS)) {
    wanted[key] = adaptedIn(state) && state[key];
  }
  const fits = (row) => Object.keys(wanted).every((k) => row[k] === wanted[k]);
  return state.account.steps.find(fits);
}

/* The tensors of one block; `again`: those that a checkpoint's second run
   makes. What layers share stands above them, all else in the first box that
   saves it. */
const tilesOf = ({ account }, row, again) =>
  account.tiles[row.tiles].map(([all, name, numbers, itemsize, anyway]) => {
    const boxes = all.split(" ");
    const at = boxes.length > 1 && name === "x" ? "shared" : boxes[0];
    const bytes = numbers * itemsize * account.tokens;
    const size = { numbers, itemsize, bytes };
    return { key: `${all} ${name}`, name, at, boxes, ...size, anyway, again };
  });

const split = (sizes) =>
  Object.fromEntries(PARTS.map((part, i) => [part, sizes[i]]));

/** What the widget shows. Sizes are bytes. */
export function describe(state) {
  const row = rowOf(state);
  const full = state.account.steps[0];
  const kept = tilesOf(state, row, false);
  const plain = rowOf({ ...state, checkpointed: false });
  const made = state.checkpointed ? tilesOf(state, plain, true) : [];
  const places = Object.entries(PLACES).map(([key, [, boxes]]) => [
    key,
    sum(
      kept
        .filter(({ boxes: [first] }) => boxes.includes(first))
        .map(({ bytes }) => bytes),
    ),
  ]);
  return {
    tiles: [...kept, ...made],
    kept: Object.fromEntries(places),
    block: sum(kept.map(({ bytes }) => bytes)),
    saved: row.saved,
    parts: split(row.peak),
    peak: sum(row.peak),
    full: sum(full.peak),
    large_saved: row.large_saved,
    large_parts: split(row.large_peak),
    large_peak: sum(row.large_peak),
    large_full: sum(full.large_peak),
  };
}

// ---- words ---------------------------------------------------------------

/* As the page prints them: "161.8 MiB". */
const mib = (bytes) => `${(bytes / MIB).toFixed(1)} MiB`;
const gib = (bytes) => `${(bytes / GIB).toFixed(1)} GiB`;

const CHECKPOINT = t(
  "A checkpoint keeps one x, the block’s input. All else is made again, one " +
    "block at a time.",
);
const FOUR_BITS = t`In 4 bits the weights shrink, and the tiles stay.`;

/* Why the tiles are as they are. */
function why(state) {
  const { account, train, bf16, dropout, checkpointed } = state;
  const [all, lora] = account.train.map(([name]) => name);
  if (checkpointed) return CHECKPOINT;
  if (train === all) {
    return t(
      "A trained linear layer keeps its input: query, key and value share " +
        "one x, gate and up another.",
    );
  }
  if (!adaptedIn(state)) {
    return t(
      "A frozen linear layer keeps nothing. What stays is for the gradients " +
        "that pass through.",
    );
  }
  if (dropout) {
    return t(
      "With dropout each adapter keeps a mask and a dropped copy of x, both " +
        "in {0}.",
      bf16 ? "bf16" : "fp32",
    );
  }
  if (train === lora) {
    return bf16
      ? t(
          "bf16 adapters take x as it is: query, key and value share one, " +
            "gate and up another.",
        )
      : t(
          "Each fp32 adapter casts its own copy of x: query, key and value " +
            "keep three, gate and up two.",
        );
  }
  return bf16
    ? t`Query and value share one x. A frozen linear layer keeps nothing.`
    : t(
        "Query and value each keep a copy of x in fp32. A frozen linear " +
          "layer keeps nothing.",
      );
}

/** The key numbers in words. */
export function sentence(state) {
  const n = describe(state);
  const large = gib(n.large_peak);
  const peak =
    n.peak === n.full
      ? t`Its peak is ${mib(n.peak)}; that of Llama 3 8B ${large}.`
      : t(
          "Its peak is {0}, {1} of full training’s; that of Llama 3 8B {2}, " +
            "{3}.",
          ...[mib(n.peak), percent(n.peak, n.full)],
          ...[large, percent(n.large_peak, n.large_full)],
        );
  return [
    why(state),
    ...(adaptedIn(state) && state.four_bits ? [FOUR_BITS] : []),
    t`One block keeps ${mib(n.block)}, the whole step ${mib(n.saved)}.`,
    peak,
  ].join(t` `);
}

// ---- geometry ------------------------------------------------------------

const GAP = 8; // between boxes, and around what is in them
const NAME = 17; // of a box whose tiles stand below its name
const ASIDE = 72; // where tiles begin beside a name
const BETWEEN = 3; // tiles
const LOW = ["attention", "product"]; // all of their tiles are in 16 bits

/* The boxes of a half, and where what layers share stands above them. */
function placed(rows, { left, top, width, byte }) {
  const [boxes, shared] = [{}, {}];
  let y = top;
  for (const names of rows) {
    const below = names.length > 1 || names[0] === "product";
    const tall = (LOW.includes(names[0]) ? 2 : 4) * byte;
    const height = tall + (below ? NAME + 6 : 10);
    if (names.length > 1) {
      for (const name of names) shared[name] = { x: left + width / 2, y };
      y += 2 * byte + 14;
    }
    const each = (width + GAP) / names.length - GAP;
    for (const [i, name] of names.entries()) {
      const x = left + i * (each + GAP);
      const tiles = below
        ? { x: x + GAP, y: y + NAME + tall / 2 }
        : { x: x + ASIDE, y: y + height / 2 };
      boxes[name] = { name, x, y, width: each, height, below, tiles };
    }
    y += height + GAP;
  }
  return { boxes, shared, bottom: y - GAP };
}

/* Tiles beside each other, their middle at y; each is as wide as a token's
   numbers, and as tall as the bytes of one. */
function beside(tiles, { x, y }, { unit, byte }) {
  return tiles.map((tile) => {
    const width = Math.max(tile.numbers * unit, 1);
    const height = tile.itemsize * byte;
    const box = { x, y: y - height / 2, width, height };
    x += width + BETWEEN;
    return { ...tile, box };
  });
}

/* Every tile in its box, or above those that share it. */
function tiled(tiles, boxes, shared, size) {
  const inside = Object.values(boxes).flatMap((box) =>
    beside(
      tiles.filter(({ at }) => at === box.name),
      box.tiles,
      size,
    ),
  );
  const alone = tiles
    .filter(({ at }) => !boxes[at])
    .flatMap((tile) => {
      const { x, y } = shared[tile.boxes[0]];
      const middle = y + size.byte + 2;
      const left = x - (tile.numbers * size.unit) / 2;
      return beside([tile], { x: left, y: middle }, size);
    });
  return [...inside, ...alone];
}

/* The two halves: beside each other, or one below the other. */
function blockLayout(tiles, width, widest) {
  const wide = width >= 600;
  const byte = wide ? 7 : 6;
  const half = wide ? width / 2 - 20 : width - 2;
  const top = 26 + 2 * byte + 10;
  const all = { left: 1, top, width: half, byte };
  const one = placed(HALVES[0], all);
  const two = placed(HALVES[1], {
    ...all,
    ...(wide ? { left: width - 1 - half } : { top: one.bottom + 2 * GAP }),
  });
  const boxes = { ...one.boxes, ...two.boxes };
  const input = { x: 1 + half / 2, y: 26 };
  const shared = { ...one.shared, ...two.shared, block: input };
  const unit = (half - 2 * GAP - 2 * BETWEEN) / (3 * widest);
  const size = { unit, byte };
  return {
    ...{ wide, size, boxes, input },
    tiles: tiled(tiles, boxes, shared, size),
    bottom: Math.max(one.bottom, two.bottom),
  };
}

/** The block and its tiles; below them the peaks, whose axes stay. */
export function layout(state, width) {
  const n = describe(state);
  const widest = state.account.tiles.flat().map(([, , numbers]) => numbers);
  const block = blockLayout(n.tiles, width, Math.max(...widest));
  const plot = { left: 1, right: width - 1 };
  const most = (key) =>
    1.04 * Math.max(...state.account.steps.map((row) => sum(row[key])));
  const { x, ...axis } = lengths(plot, most("peak"), width);
  const large = lengths(plot, most("large_peak"), width).x;
  const second = block.wide ? 0 : 15; // where words have a second line
  const y = block.bottom + 28 + second;
  return {
    ...{ ...n, ...block, width, plot, axis, second },
    trained: state.train === state.account.train[0][0],
    small: { y, parts: laid(n.parts, x), full: x(n.full), end: x(n.peak) },
    large: {
      y: y + 80 + second,
      parts: laid(n.large_parts, large),
      full: large(n.large_full),
    },
    height: y + 80 + second + 26,
  };
}

// ---- drawing -------------------------------------------------------------

const END = { "text-anchor": "end" };
const MIDDLE = { "text-anchor": "middle" };
const BOLD = { class: "mb-value" };
const BIG = { class: "mb-value mb-big" };

const wire = (d) => svg("path", { d, class: "mb-wire" });

/* From above the boxes of a row to those of the next. */
function* drawWires({ boxes, wide, input }) {
  const middle = ({ x, width }) => x + width / 2;
  const foot = ({ y, height }) => y + height;
  for (const rows of HALVES) {
    for (const [i, names] of rows.slice(1).entries()) {
      const above = rows[i].map((name) => boxes[name]);
      const under = names.map((name) => boxes[name]);
      if (under.length === 1) {
        for (const a of above) {
          yield wire(`M${middle(a)} ${foot(a)}V${under[0].y}`);
        }
        continue;
      }
      const fork = under[0].y - 5;
      yield wire(`M${middle(above[0])} ${foot(above[0])}V${fork}`);
      for (const b of under) {
        yield wire(`M${middle(above[0])} ${fork}H${middle(b)}V${b.y}`);
      }
    }
  }
  const { norm1, norm2, out } = boxes;
  yield wire(`M${input.x} ${input.y - 2}V${norm1.y}`);
  const aside = (out.x + out.width + norm2.x) / 2;
  const way = wide ? `v6H${aside}V${input.y}H${middle(norm2)}` : "";
  yield wire(`M${middle(out)} ${foot(out)}${way}V${norm2.y}`);
}

/* The boxes, their names, and what each keeps, in MiB. */
function* drawBoxes({ boxes, tiles, trained }) {
  for (const { name, x, y, width, height, below } of Object.values(boxes)) {
    const at = below ? y + 13 : y + height / 2 + 4;
    const label = LABELS[name] ?? name;
    yield svg("rect", { x, y, width, height, rx: 4, class: "mb-box" });
    yield text(x + GAP, at, label);
    const own = tiles.filter((tile) => tile.at === name);
    if (!own.length && name === "out" && trained) {
      yield text(x + ASIDE, at, t`reads what attention keeps`);
    }
    const kept = own.filter(({ again }) => !again);
    if (!kept.length) continue;
    const words = (sum(kept.map(({ bytes }) => bytes)) / MIB).toFixed(2);
    if (wideOf(label + words) + 3 * GAP > width) continue;
    yield text(x + width - GAP, at, words, { ...END, ...BOLD });
  }
}

const partOf = ({ at, anyway }) => {
  if (at === "block") return "checkpoints";
  return anyway ? "anyway" : "activations";
};

/* What a tile is, for a mouse that rests on it. */
const told = ({ boxes, name, numbers, itemsize, bytes }) =>
  t(
    "{0}, for {1}: a token’s {2} numbers of {3} bytes; {4} in all",
    ...[t(name), boxes.join(t`, `), numbers, itemsize, formatBytes(bytes)],
  );

const meet = (one, other) =>
  one.name === other.name && one.boxes.some((box) => other.boxes.includes(box));

/* A tile's words: in it where it has room, beside it where it is shared. */
function* drawWords(tile) {
  const { at, box, bytes } = tile;
  const name = t(tile.name);
  const y = box.y + box.height / 2 + 4;
  const free = ["shared", "block"].includes(at);
  if (free) {
    const words = (bytes / MIB).toFixed(2);
    const look = { class: "mb-value mb-halo" };
    yield text(box.x + box.width + 6, y, words, look);
  }
  if (wideOf(name) + 4 > box.width) return;
  const look = tile.again || tile.anyway ? "" : "mb-on";
  yield text(box.x + box.width / 2, y, name, { ...MIDDLE, class: look });
}

/* The tiles, from where they were; what is new splits off what was there. */
function* drawTiles(id, { tiles }, from) {
  for (const tile of tiles) {
    const shapes = tile.again
      ? [svg("rect", { ...tile.box, class: "mb-again" })]
      : filled(id, partOf(tile), "rect", tile.box);
    const old =
      from?.tiles.find(({ key }) => key === tile.key) ??
      from?.tiles.find((other) => meet(tile, other));
    for (const shape of from ? shapes : []) {
      come(shape, old ? pixels(old.box) : { opacity: 0 });
    }
    const title = svg("title", {}, told(tile));
    yield svg("g", { class: "mb-tile" }, title, ...shapes);
    const stays = !from || old?.key === tile.key;
    for (const words of drawWords(tile)) {
      yield stays ? words : come(words, { opacity: 0 }, 300);
    }
  }
}

/* Tiles that are gone merge into what is there, or fade. */
function* drawGone({ tiles }, from) {
  const kept = from.tiles.filter(({ again }) => !again);
  for (const old of kept) {
    if (tiles.some(({ key }) => key === old.key)) continue;
    const to = tiles.find((tile) => meet(old, tile));
    const look = { ...old.box, class: `mb-fill-${partOf(old)}`, opacity: 0 };
    const end = to ? { ...pixels(to.box), opacity: 1 } : { opacity: 0 };
    yield come(svg("rect", look), { opacity: 1 }, 0, end);
  }
}

/* How tall a number is. */
function* drawKey({ plot, size: { byte } }) {
  for (const [name, bytes, right] of [["fp32", 4, 0], ["bf16", 2, 54]]) {
    const x = plot.right - right;
    const height = bytes * byte;
    const box = { x: x - 46, y: 15 - height / 2, width: 12, height };
    yield svg("rect", { ...box, class: "mb-key" });
    yield text(x, 19, name, END);
  }
}

/* A step's peak; under it, how long full training's is. */
function* drawPeak(id, { y, parts, full }, height, label, from) {
  for (const [i, part] of parts.entries()) {
    const old = from?.parts[i];
    const there = old && pixels({ x: old.x, width: old.width });
    const look = { ...part, part: seen(part.part) };
    for (const rect of bar(id, [look], y + 6, height)) {
      yield old ? come(rect, there) : rect;
    }
    const { x, width } = part;
    const words = HOLDERS[part.part];
    if (!label || wideOf(words) + 10 > width) continue;
    const middle = { ...MIDDLE, class: "mb-halo" };
    yield text(x + width / 2, y + height / 2 + 10, words, middle);
  }
  const under = y + height + (label ? 15 : 13);
  yield line(1, under, full, under, "mb-full");
  yield line(full, under - 4, full, under + 4, "mb-full");
  if (label) yield text(full + 6, under + 4, label);
}

function* drawSteps(id, plan, before, from) {
  const { small, large, second, plot } = plan;
  const kept = (y, words) => {
    const told = t`kept for backward: ${words}`;
    return second ? text(1, y, told) : text(plot.right, y, told, END);
  };
  const peak = t`Small Llama: peak ${mib(plan.peak)}`;
  yield text(1, small.y - second, peak, BIG);
  yield kept(small.y, mib(plan.saved));
  yield* drawPeak(id, small, 20, t`full training`, from?.small);
  if (before) {
    const box = { x: 1, y: small.y + 4.5, height: 23 };
    const width = before.small.end - 1;
    yield svg("rect", { ...box, width, class: "mb-ghost" });
  }
  yield* lengthAxis(plot, small.y + 44, plan.axis);
  const words = t`Llama 3 8B: peak ${gib(plan.large_peak)}`;
  yield text(1, large.y - second, words, BOLD);
  yield kept(large.y, gib(plan.large_saved));
  yield* drawPeak(id, large, 10, "", from?.large);
}

const draw = (id, plan, before, from) => [
  text(1, 19, t`One block keeps ${mib(plan.block)}`, BIG),
  ...drawKey(plan),
  ...drawWires(plan),
  ...drawBoxes(plan),
  ...(from ? drawGone(plan, from) : []),
  ...drawTiles(id, plan, from),
  ...drawSteps(id, plan, before, from),
];

/* What keeps how much, here and in full training; and the peaks. */
function results(id, state, n) {
  const train = state.account.train[0][0];
  const full = describe({ ...state, train, checkpointed: false });
  const places = Object.entries(PLACES).map(([key, [label]]) => ({
    label,
    cells: [
      byteCell(`kept.${key}`, n.kept[key]),
      byteCell(`full.${key}`, full.kept[key]),
    ],
  }));
  const both = (key, label, more) => ({
    ...{ label, ...more },
    cells: [byteCell(key, n[key]), byteCell(`large_${key}`, n[`large_${key}`])],
  });
  const peaks = Object.entries(HOLDERS).map(([part, label]) => ({
    ...{ part: seen(part), label },
    cells: [
      byteCell(`peak.${part}`, n.parts[part]),
      byteCell(`large_peak.${part}`, n.large_parts[part]),
    ],
  }));
  const block = [byteCell("block", n.block), byteCell("full", full.block)];
  return [
    table(id, [t`one block keeps`, t`now`, t`full training`], [
      ...places,
      { sum: true, label: t`together`, cells: block },
    ]),
    table(id, [t`at the peak`, t`small Llama`, "Llama 3 8B"], [
      ...peaks,
      both("peak", t`together`, { sum: true }),
      both("saved", t`kept for backward`),
    ]),
  ];
}

// ---- the widget ----------------------------------------------------------

const NOTE = t(
  "A tile is a tensor that autograd keeps until the backward pass. It is as " +
    "wide as a token’s numbers and as tall as the bytes of one. The numbers " +
    "are MiB. Stripes are statistics, and the r numbers between an " +
    "adapter’s A and B. A pale tile is kept even where no weight of the " +
    "block is trained. The first block keeps less where nothing below it is " +
    "trained. The last norm, the head and the loss keep what the blocks do " +
    "not. Weights have 16 bits, and adapters rank 8. The small Llama has 8 " +
    "blocks, takes 4 × 256 tokens, and runs by a CPU’s rules: a dropout " +
    "mask is as large as its input. Llama 3 8B takes 4 096 tokens and runs " +
    "by a GPU’s rules, with one byte a number in a mask; it was not " +
    "measured on a GPU.",
);

const LEGEND = {
  activations: t`kept for a weight’s gradient`,
  checkpoints: t`checkpoint`,
  anyway: t`kept in any case`,
  recomputation: t`made again`,
  parameters: t`parameters`,
  gradients: t`gradients`,
  optimizer: t`optimizer states`,
  both: t`all activations`,
  temporaries: t`temporaries`,
};

function build({ id, get, set, bound }) {
  const train = radios({
    ...{ label: t`Train`, key: "train" },
    onChange: (value) => set({ train: value }),
  });
  const own = Object.entries(ADAPTERS).map(([key, label]) =>
    checkBox({ label, key, onChange: (on) => set({ [key]: on }) }),
  );
  const checkpointed = bound(checkBox, t`Checkpoint blocks`, "checkpointed");
  const options = get().account.train.map(([name]) => name);
  let plan; // as it is drawn
  return {
    controls: [train, own[0], checkpointed],
    more: own.slice(1),
    legend: legend(id, LEGEND),
    note: html("p", { class: "mb-note" }, NOTE),
    draw(state, width, before) {
      const last = plan;
      plan = layout(state, width);
      const from = last?.width === width && !still() ? last : null;
      const disabled = adaptedIn(state) ? "" : t`needs LoRA`;
      train.update({ value: state.train, options });
      for (const box of own) box.update({ value: state[box.key], disabled });
      return {
        title: t`What autograd keeps`,
        sentence: sentence(state),
        height: plan.height,
        drawn: draw(id, plan, before && layout(before, width), from),
        numbers: results(id, state, plan),
      };
    },
  };
}

const keys = ["account", "train", "checkpointed", ...Object.keys(ADAPTERS)];

export default widget({ name: "adapters", keys, build });
