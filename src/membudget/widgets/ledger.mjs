import {
  byteTicks,
  checkBox,
  choice,
  figure,
  formatBytes,
  formatNumber,
  hatching,
  html,
  makeId,
  redraw,
  save,
  slider,
  svg,
} from "./base.mjs";

/* The ledger of a transformer's training step, in bytes.

   step(state): the moments of a step; Python's predict() is the same.
   describe(state): the numbers; Python's Ledger.numbers() is the same.
   problem(state): what cannot be, in the words of Python's errors.
   layout(state, width): where everything stands in the picture.
   render({ model, el }): controls, picture and table. */

const SHOWN = {
  parameters: "parameters",
  gradients: "gradients",
  optimizer: "optimizer states",
  activations: "activations",
  inputs: "inputs",
  temporaries: "temporaries",
};
const CATEGORIES = Object.keys(SHOWN);
const [PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, INPUTS, TEMPORARIES] =
  CATEGORIES.keys();

const PHASES = {
  forward: "forward pass",
  backward: "backward pass",
  recomputation: "recomputation",
  optimizer: "optimizer’s step",
};

/** family, vocabulary, width, depth, heads, kv_heads, hidden, tied, context */
export const PRESETS = {
  "GPT-2 124M": ["gpt", 50257, 768, 12, 12, 12, 3072, true, 1024],
  "GPT-2 XL 1.5B": ["gpt", 50257, 1600, 48, 25, 25, 6400, true, 1024],
  "Llama 3.2 1B": ["llama", 128256, 2048, 16, 32, 8, 8192, true],
  "Llama 2 7B": ["llama", 32000, 4096, 32, 32, 32, 11008, false],
  "Mistral 7B": ["llama", 32000, 4096, 32, 32, 8, 14336, false],
  "Llama 3 8B": ["llama", 128256, 4096, 32, 32, 8, 14336, false],
  "Llama 3 70B": ["llama", 128256, 8192, 80, 64, 8, 28672, false],
};
const SHAPE =
  "family vocabulary width depth heads kv_heads hidden tied context".split(" ");

/** bytes of a parameter, a gradient, the fp32 copy, autocast's numbers; text */
export const RECIPES = {
  fp32: [4, 4, 0, 0, "everything in fp32"],
  autocast: [4, 4, 0, 2, "fp32 parameters, matrix products in 16 bits"],
  bf16: [2, 2, 0, 0, "everything in bf16"],
  master: [2, 2, 4, 0, "bf16 model, fp32 copy for the optimizer"],
  "master-fp32-gradients": [
    2, 4, 4, 0, "bf16 model, fp32 copy, gradients summed in fp32",
  ],
};

/** numbers kept, bytes of each (0: the parameter's), block, counter; text */
export const OPTIMIZERS = {
  sgd: [0, 0, 0, 0, "SGD"],
  momentum: [1, 0, 0, 0, "SGD with momentum"],
  adam: [2, 0, 0, 4, "Adam, AdamW"],
  "adam-8bit": [2, 1, 256, 0, "Adam with 8-bit states"],
};
const SMALL = 4096; // numbers, below which 8-bit states stay in fp32

const FAMILIES = { gpt: "GPT-2’s block", llama: "Llama’s block" };
const GIB = 2 ** 30;
const BUDGETS = {
  0: "none",
  [15 * GIB]: "15 GiB (T4)",
  [24 * GIB]: "24 GiB (RTX 4090)",
  [40 * GIB]: "40 GiB (A100)",
  [80 * GIB]: "80 GiB (A100, H100)",
  [140 * GIB]: "140 GiB (H200)",
};

/** The largest sizes; MOST_NUMBERS bounds what the activations hold. */
export const MOST = {
  vocabulary: 2 ** 20,
  width: 2 ** 16,
  depth: 256,
  heads: 1024,
  kv_heads: 1024,
  hidden: 2 ** 18,
  context: 2 ** 20,
  batch: 2 ** 16,
  tokens: 2 ** 20,
  steps: 2 ** 16,
};
const MOST_NUMBERS = 2 ** 48; // bytes stay whole numbers below 2 ** 53

const NOTE =
  "Each bar is the worst moment of its phase, by what is alive then. The " +
  "framed one is the peak. ";
const LETTER = 7.1; // pixels, on average, in a wide font

// ---- what cannot be -------------------------------------------------------

/** Why no step can have these sizes, or "". */
export function problem(state) {
  const gpt = state.family === "gpt";
  const { width, heads, kv_heads: shared, tokens, context } = state;
  for (const [name, most] of Object.entries(MOST)) {
    const value = state[name];
    if (!Number.isInteger(value) || value < 1) {
      return `${name} is ${value}: use a whole number of at least 1`;
    }
    if (value > most) return `${name} is ${value}: use at most ${most}`;
  }
  if (width % heads) {
    return (
      `width ${width} is not a multiple of ${heads} heads: use a number of ` +
      "heads that divides it"
    );
  }
  if (!gpt && heads % shared) {
    return (
      `${heads} heads cannot share ${shared} heads of keys and values: use ` +
      "a number that divides the heads"
    );
  }
  if (!gpt && (width / heads) % 2) {
    return (
      `${width / heads} numbers for each head cannot be paired for rotary ` +
      "positions: use an even number"
    );
  }
  if (gpt && tokens > context) {
    return (
      `${tokens} tokens are more than the ${context} learned positions: use ` +
      "fewer tokens or a larger context"
    );
  }
  const hidden = gpt ? 4 * width : state.hidden;
  const scores = state.fused ? 0 : heads * tokens;
  const numbers = state.depth * (16 * width + 4 * hidden + scores);
  return state.batch * tokens * (numbers + state.vocabulary) > MOST_NUMBERS
    ? "a step of these sizes holds more than 2**48 numbers: use smaller ones"
    : "";
}

// ---- autograd on paper ----------------------------------------------------

/* A tensor of which only the size is known; a view shows its base's memory. */
function tensor(elements, item, trained = true, base = null) {
  const bytes = elements * item;
  const t = { elements, item, bytes, trained, view: Boolean(base) };
  t.storage = base ?? t;
  t.number = -1; // of a parameter
  t.due = 0; // gradients that are yet to arrive
  t.pending = t.copy = null;
  t.pinned = false;
  return t;
}

const like = (x, elements = x.elements) => tensor(elements, x.item, x.trained);

/* A gradient for each of these, as large as it is. */
const toEach = (named) => ({
  steps: Object.entries(named).map(([name, t]) => [name, t.bytes]),
  gives: Object.entries(named).map(([name, t]) => [t, name]),
});

const FREE = { needs: false }; // the backward pass asks for nothing saved

/* The rows of a step; operators.py of membudget.ledger says why. A row's
   steps are what its backward pass allocates, or with 0 bytes frees. */
class Paper {
  rows = [];
  weights = [];
  block = -1;
  module = "";

  constructor(item, autocast) {
    Object.assign(this, { item, autocast });
  }

  weight(elements) {
    const w = tensor(elements, this.item);
    w.number = this.weights.push(w) - 1;
    return w;
  }

  write(operator, reads, makes, more = {}) {
    this.rows.push({
      name: `${this.module && "."}${this.module} ${operator}`,
      block: this.block,
      makes,
      uses: reads.concat(more.watches ?? []).map((t) => t.storage),
      saves: (more.saves ?? []).map((t) => t.storage),
      steps: more.steps ?? [],
      gives: more.gives ?? [],
      views: more.views ?? [],
      extra: more.extra ?? 0,
      needs: more.needs ?? true,
      after: more.after ?? false,
      rows: null,
    });
    return makes[0];
  }

  /* A row whose gradient is as large as what it reads. */
  plain(operator, x, y, more) {
    return this.write(operator, [x], [y], { ...toEach({ x }), ...more });
  }

  checkpoint(start) {
    const rows = this.rows.splice(start);
    const [made, all] = [new Set(), new Set()];
    for (const row of rows) {
      for (const t of row.uses) if (!made.has(t)) all.add(t);
      for (const t of row.makes) made.add(t);
    }
    const [uses, { makes }] = [[...all], rows.at(-1)];
    this.rows.push({ rows, uses, saves: uses, makes });
  }

  cast(x, item, watches = []) {
    if (x.item === item) return x;
    const y = tensor(x.elements, item, x.trained);
    return this.plain("cast", x, y, { ...FREE, watches });
  }

  auto(x) {
    if (!this.autocast) return x;
    if (x.number < 0) return this.cast(x, this.autocast);
    x.copy ??= this.cast(x, this.autocast);
    x.copy.pinned = true;
    return x.copy;
  }

  linear(x, weight, outputs, bias) {
    const rows = x.elements / (weight.elements / outputs);
    const b = bias && this.auto(bias);
    const w = this.auto(weight);
    const given = this.auto(x);
    const steps = [["x", given.bytes], ["w", w.bytes]];
    const gives = [[given, "x"], [w, "w"]];
    if (b) {
      steps.push(["saved", 0], ["b", b.bytes]);
      gives.push([b, "b"]);
    } else steps.reverse();
    const reads = b ? [given, w, b] : [given, w];
    const more = { saves: [given, w], steps, gives, watches: [x] };
    more.views = ["x", "w"]; // x has more dimensions than rows and columns
    const y = tensor(rows * outputs, given.item);
    return this.write("linear", reads, [y], more);
  }

  add(x, y, watches = [], broadcast = false) {
    const item = Math.max(x.item, y.item);
    const [steps, gives] = [[], []];
    for (const [name, t] of [["x", x], ["y", y]]) {
      const made = (broadcast && t === y) || t.item < item; // a sum, a cast
      if (made) steps.push([name, t.bytes]);
      gives.push([t, made ? name : "g"]);
    }
    const more = { ...FREE, steps, gives, watches };
    return this.write("add", [x, y], [tensor(x.elements, item)], more);
  }

  elementwise(x, name) {
    return this.plain(name, x, like(x), { saves: [x] });
  }

  multiply(x, y) {
    const more = { saves: [x, y], ...toEach({ x, y }) };
    return this.write("mul", [x, y], [like(x)], more);
  }

  scale(x) {
    return this.plain("scale", x, like(x), FREE);
  }

  layerNorm(x, w, b) {
    return this.write("layer_norm", [x, w, b], [like(x)], {
      saves: [x],
      extra: 2 * (x.elements / w.elements) * w.item,
      after: true,
      ...toEach({ x, w, b }),
    });
  }

  rmsNorm(x, w, watches) {
    const whole = this.cast(x, 4);
    const [squares, normed] = [like(whole), like(whole)];
    const mean = like(whole, x.elements / w.elements);
    const [root, n, t] = [like(mean), whole.bytes, mean.bytes];
    const product = (size) =>
      [["a", size], ["b", size], ["x", size], ["a", 0], ["b", 0]];
    const saves = [whole];
    this.plain("square", whole, squares, { saves, steps: product(n) });
    this.plain("mean", squares, mean, FREE);
    this.plain("rsqrt", mean, root, {
      saves: [root],
      after: true,
      steps: product(t),
      watches: [squares],
    });
    this.write("mul", [whole, root], [normed], {
      saves: [whole, root],
      steps: [["x", n], ["a", n], ["r", t], ["a", 0]],
      gives: [[whole, "x"], [root, "r"]],
    });
    const held = [...watches, whole, root]; // until the norm returns
    const small = w.item < 4 ? [["s", w.elements * 4], ["a", 0]] : [];
    const last = [small.length ? "s" : "a", 0];
    const out = this.write("mul", [normed, w], [like(normed)], {
      saves: [normed],
      steps: [
        ...[["a", n], ["x", n], ["saved", 0]],
        ...[...small, ["w", w.bytes], last],
      ],
      gives: [[normed, "x"], [w, "w"]],
      watches: held,
    });
    return this.cast(out, x.item, held);
  }

  split(x, count) {
    const part = () => tensor(x.elements / count, x.item, true, x.storage);
    const views = Array.from({ length: count }, part);
    this.write("split", [x], views, { ...FREE, ...toEach({ x }) });
    return views;
  }

  rotate(x, turns, fused, watches) {
    const whole = this.cast(x, 4);
    const [n, t] = [whole.bytes, turns.bytes];
    const [copy, freed] = [[["c", n], ["g", 0]], [["c", 0]]];
    const steps = [["t", t], ["x", n]];
    if (fused) {
      steps.unshift(...copy);
      steps.push(...freed);
    }
    steps.push(["t", 0]);
    const y = this.write("rotate", [whole, turns], [like(whole)], {
      saves: [turns],
      steps,
      gives: [[whole, "x"]],
      watches,
    });
    return this.cast(y, x.item, [whole, ...watches]);
  }

  heads(x) {
    const view = tensor(x.elements, x.item, true, x.storage);
    return this.plain("heads", x, view, FREE);
  }

  fused(q, k, v, statistics) {
    const y = like(q);
    return this.write("attention", [q, k, v], [y], {
      saves: [q, k, v, y],
      extra: 4 * statistics,
      after: true,
      ...toEach({ q, k, v }),
    });
  }

  contiguous(x, copied = true) {
    const handed = copied ? {} : { steps: [], gives: [[x, "g"]] };
    return this.plain("contiguous", x, like(x), { ...FREE, ...handed });
  }

  matmul(left, right, elements, watches) {
    const [x, y] = [this.auto(left), this.auto(right)];
    return this.write("matmul", [x, y], [like(x, elements)], {
      saves: [x, y],
      steps: [["y", y.bytes], ["x", x.bytes]],
      gives: [[x, "x"], [y, "y"]],
      watches,
    });
  }

  attention(q, k, v, scores, tokens, times, folds) {
    if (times > 1) {
      const repeat = (x) =>
        this.plain("repeat", x, like(x, x.elements * times), FREE);
      [k, v] = [repeat(k), repeat(v)];
    }
    const kept = [k, v];
    if (!folds) {
      q = this.contiguous(q, times === 1 && tokens > 1);
      if (times === 1) k = this.contiguous(k, tokens > 1);
    }
    const scaled = this.scale(this.matmul(q, k, scores, []));
    const mask = this.constant(tokens * tokens, 1);
    const more = { saves: [mask], ...toEach({ x: scaled }) };
    const masked = this.write("mask", [scaled, mask], [like(scaled)], more);
    const weights = like(masked);
    this.plain("softmax", masked, weights, { saves: [weights], after: true });
    if (times === 1 && !folds) v = this.contiguous(v, false);
    const held = [...kept, scaled, mask, weights];
    return this.matmul(weights, v, q.elements, held);
  }

  crossEntropy(logits, targets) {
    const given = this.autocast ? this.cast(logits, 4) : logits;
    const logp = like(given);
    this.plain("log_softmax", given, logp, { saves: [logp], after: true });
    return this.plain("nll_loss", logp, like(given, 1), {
      saves: [logp, targets],
      extra: given.item,
      after: true,
      watches: [logits, given],
    });
  }

  embedding(table, places, width) {
    const y = tensor(places.elements * width, table.item);
    const more = { saves: [places], ...toEach({ w: table }) };
    return this.write("embedding", [table, places], [y], more);
  }

  constant(elements, item) {
    return this.write("constant", [], [tensor(elements, item, false)], FREE);
  }
}

/* A transformer's micro-batch on paper. */
function write(shape, batch, depth) {
  const { family, vocabulary, width: d, heads, tokens, fused } = shape;
  const [item, , , autocast] = RECIPES[shape.recipe];
  const gpt = family === "gpt";
  const paper = new Paper(item, autocast);
  const ids = tensor(batch * tokens, 8, false);
  const targets = tensor(batch * tokens, 8, false);
  const table = paper.weight(vocabulary * d);
  const inside = (module, make) => {
    paper.module = module;
    const made = make();
    paper.module = "";
    return made;
  };
  const linear = (x, name, inputs, outputs) => {
    const weight = paper.weight(inputs * outputs);
    const bias = gpt ? paper.weight(outputs) : null;
    return inside(name, () => paper.linear(x, weight, outputs, bias));
  };
  const norm = (x, ...watches) =>
    gpt
      ? paper.layerNorm(x, paper.weight(d), paper.weight(d))
      : paper.rmsNorm(x, paper.weight(d), watches);
  const attend = (q, k, v) => {
    const rows = batch * heads * tokens;
    if (fused) return paper.fused(q, k, v, rows);
    const times = gpt ? 1 : heads / shape.kv_heads;
    const folds = batch === 1 || heads === 1 || (!gpt && tokens === 1);
    const y = paper.attention(q, k, v, rows * tokens, tokens, times, folds);
    return heads === 1 || tokens === 1 ? y : paper.contiguous(y);
  };
  const gptBlock = (given) => {
    const qkv = linear(norm(given), "qkv", d, 3 * d);
    const [q, k, v] = paper.split(qkv, 3);
    const attended = attend(q, k, v);
    const x = paper.add(given, linear(attended, "out", d, d));
    const up = linear(norm(x), "up", d, 4 * d);
    const y = linear(paper.elementwise(up, "gelu"), "down", 4 * d, d);
    return paper.add(x, y, [q, k, v, attended]);
  };
  let turns;
  const llamaBlock = (given) => {
    const { hidden, kv_heads: shared } = shape;
    const small = (d / heads) * shared;
    const normed = norm(given);
    const first = linear(normed, "query", d, d);
    const second = linear(normed, "key", d, small);
    let v = linear(normed, "value", d, small);
    const parts = [first, second];
    const [q, k] = parts.map((part) =>
      paper.rotate(paper.heads(part), turns, fused, parts),
    );
    if (!fused) v = paper.heads(v);
    const attended = attend(q, k, v);
    const x = paper.add(given, linear(attended, "out", d, d));
    const again = norm(x, normed);
    let gate = linear(again, "gate", d, hidden);
    gate = paper.elementwise(gate, "silu");
    const up = paper.multiply(gate, linear(again, "up", d, hidden));
    const y = linear(up, "down", hidden, d);
    return paper.add(x, y, [q, k, v, attended, again]);
  };
  let x;
  if (gpt) {
    const places = paper.constant(tokens, 8);
    const learned = paper.weight(shape.context * d);
    x = inside("token", () => paper.embedding(table, ids, d));
    const y = inside("position", () => paper.embedding(learned, places, d));
    x = paper.add(x, y, [], true);
  } else {
    turns = paper.constant(tokens * Math.floor(d / heads / 2), 8);
    x = paper.embedding(table, ids, d);
  }
  for (let index = 0; index < depth; index += 1) {
    const start = paper.rows.length;
    paper.block = index;
    x = gpt ? gptBlock(x) : llamaBlock(x);
    if (shape.checkpointed) paper.checkpoint(start);
  }
  paper.block = -1;
  const last = x;
  x = norm(x);
  const head = shape.tied ? table : paper.weight(table.elements);
  const logits = inside("head", () => paper.linear(x, head, vocabulary));
  // a variable of the model's holds it until it returns
  if (!gpt) paper.rows.at(-1).uses.push(last.storage);
  paper.crossEntropy(logits, targets);
  return paper;
}

// ---- the walk -------------------------------------------------------------

/* Through the rows, forward and backward; walk.py of membudget.ledger. */
class Walk {
  live = CATEGORIES.map(() => 0);
  total = 0;
  moments = [];
  begun = new Set(); // numbers of the parameters that have a gradient
  worst = -1; // since the last moment
  parts = CATEGORIES.map(() => 0);

  make(bytes, category) {
    this.live[category] += bytes;
    this.total += bytes;
    if (this.total > this.worst) {
      this.worst = this.total;
      for (const i of CATEGORIES.keys()) this.parts[i] = this.live[i];
    }
    return { bytes, category, holders: 1 };
  }

  release(held) {
    if (!held) return;
    held.holders -= 1;
    if (held.holders) return;
    this.live[held.category] -= held.bytes;
    this.total -= held.bytes;
  }

  moment(name, phase, block = -1) {
    const bytes = (this.worst < 0 ? this.live : this.parts).slice();
    this.moments.push({ name, phase, block, bytes });
    this.worst = -1;
  }

  microBatch({ rows }) {
    const loss = rows.at(-1).makes[0];
    for (const row of rows) {
      for (const { gives } of row.rows ?? [row]) {
        for (const [t] of gives) t.due += 1;
      }
    }
    this.scopes = [new Map()];
    this.extras = new Map();
    const late = this.forward(rows, "forward", true, loss, new Set());
    late.forEach((held) => this.release(held));
    const seed = this.make(loss.bytes, ACTIVATIONS);
    this.moment("loss gradient", "backward");
    loss.pending = { bytes: 0, category: TEMPORARIES, holders: 1 };
    this.backward(rows);
    this.release(seed);
    this.release(this.scopes[0].get(loss));
  }

  find(t) {
    for (let i = this.scopes.length - 1; i >= 0; i -= 1) {
      const held = this.scopes[i].get(t);
      if (held) return held;
    }
    return null; // there before the step
  }

  /* Run rows; what they save stays where there is a tape. `keep` is what
     they return. A recomputation ends early. Returns what autocast holds. */
  forward(rows, phase, tape, keep, outside) {
    const scope = this.scopes.at(-1);
    const saved = new Set(outside);
    const last = new Map();
    rows.forEach((row, i) => row.uses.forEach((t) => last.set(t, i)));
    if (tape) rows.forEach((row) => row.saves.forEach((t) => saved.add(t)));
    if (tape && keep) saved.add(keep);
    let end = rows.length;
    if (phase === "recomputation") end = rows.findLastIndex((r) => r.needs);
    const late = [];
    const variables = new Map();
    for (const [index, row] of rows.entries()) {
      if (index === end && !row.after) {
        this.save(row);
        break;
      }
      if (row.rows) {
        const output = row.makes.at(-1);
        this.scopes.push(new Map());
        late.push(...this.forward(row.rows, phase, false, output, saved));
        const held = this.scopes.pop().get(output);
        scope.set(output, held);
        variables.set(output, held);
      } else this.run(row, phase, tape, saved, variables);
      if (tape) this.save(row);
      for (const [t, held] of variables) {
        if (t === keep || (last.get(t) ?? index) > index) continue;
        variables.delete(t);
        if (t.pinned) late.push(held);
        else this.release(held);
      }
      if (index === end) break;
    }
    variables.delete(keep);
    variables.forEach((held) => this.release(held));
    return late;
  }

  run(row, phase, tape, saved, variables) {
    let extra;
    if (row.extra) {
      extra = this.make(row.extra, tape ? ACTIVATIONS : TEMPORARIES);
    }
    for (const t of row.makes) {
      if (t.view) continue;
      const category = saved.has(t) ? ACTIVATIONS : TEMPORARIES;
      const held = this.make(t.bytes, category);
      this.scopes.at(-1).set(t, held);
      variables.set(t, held);
    }
    this.moment(row.name, phase, row.block);
    if (extra && tape) this.extras.set(row, extra);
    else this.release(extra);
  }

  save(row) {
    for (const t of row.saves) {
      const held = this.find(t);
      if (held) held.holders += 1;
    }
  }

  letGo(tensors) {
    for (const t of tensors) this.release(this.find(t));
  }

  backward(rows) {
    for (const row of [...rows].reverse()) {
      if (row.rows) this.segment(row);
      else this.row(row);
    }
  }

  segment({ rows, uses }) {
    const needed = rows.filter((row) => row.needs);
    this.scopes.push(new Map());
    for (const row of [...rows].reverse()) {
      if (row === needed.at(-1)) {
        const late = this.forward(rows, "recomputation", true, null, []);
        late.forEach((held) => this.release(held));
      }
      this.row(row, row === needed[0] ? uses : []);
    }
    this.scopes.pop();
  }

  /* The backward pass of a row; afterwards `also` is let go. */
  row(row, also = []) {
    let arriving = row.makes.map((t) => t.pending).filter(Boolean);
    for (const t of row.makes) t.pending = null;
    if (!arriving.length) return;
    const names = new Map();
    let { saves } = row;
    for (const [name, size] of row.steps) {
      if (size) {
        const to = row.gives.find(([, from]) => from === name)?.[0];
        names.set(name, this.make(size, this.category(to)));
        names.get(name).view = row.views.includes(name);
      } else if (name === "g") {
        arriving.forEach((held) => this.release(held));
        arriving = [];
      } else if (name !== "saved") {
        this.release(names.get(name));
        names.delete(name);
      } else if (this.scopes.length > 1) {
        this.letGo(saves); // unpacked, used, and let go
        saves = [];
      }
    }
    this.moment(row.name, "backward", row.block);
    this.letGo(saves);
    this.letGo(also);
    this.release(this.extras.get(row));
    this.extras.delete(row);
    for (const [, name] of row.gives) {
      if (name === "g") arriving[0].holders += 1;
    }
    arriving.forEach((held) => this.release(held));
    for (const [t, name] of row.gives) {
      this.give(t, name === "g" ? arriving[0] : names.get(name), row);
    }
  }

  /* What a gradient of this tensor is, once it is there. */
  category(t) {
    const passing = !t || t.number < 0 || this.begun.has(t.number);
    return passing || t.due > 1 || t.pending ? TEMPORARIES : GRADIENTS;
  }

  /* A gradient arrives; the second is added to the first. */
  give(t, given, row) {
    const before = t.pending;
    let held = given;
    if (before) {
      const alone = before.holders === 1 && !before.view;
      t.pending = null; // and the sum is yet to arrive
      if (alone) this.release(before); // the sum stays where the first was
      held = this.make(t.bytes, this.category(t));
      const name = `${row.name} (sum of gradients)`;
      this.moment(name, "backward", row.block);
      if (!alone) this.release(before);
      this.release(given);
    }
    t.due -= 1;
    t.pending = held;
    if (t.number >= 0 && !t.due) {
      t.pending = null;
      if (this.begun.has(t.number)) this.release(held);
      this.begun.add(t.number);
    }
  }
}

// ---- a step ---------------------------------------------------------------

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function optimizerBytes(sizes, recipe, optimizer) {
  const [parameter, , master] = RECIPES[recipe];
  const [numbers, item, block, counter] = OPTIMIZERS[optimizer];
  const all = sum(sizes);
  const fixed = master * all + counter * sizes.length;
  if (!block) return fixed + numbers * (item || master || parameter) * all;
  const kept = sizes.map((n) =>
    n < SMALL ? 4 * n : n + 4 * Math.ceil(n / block),
  );
  const tables = sizes.some((n) => n >= SMALL) ? 2 * 256 * 4 : 0;
  return fixed + numbers * sum(kept) + tables;
}

/* The most that the optimizer's step allocates. */
function workspace(sizes, { recipe, optimizer, foreach }) {
  const [parameter, gradient, master] = RECIPES[recipe];
  const all = sum(sizes);
  const copies = gradient < master ? master * all : 0;
  const item = master || parameter;
  if (optimizer !== "adam") return copies;
  if (foreach) return copies + item * all;
  const roots = sizes.map((n, i) => 2 * item * n + item * (sizes[i - 1] ?? 0));
  return copies + Math.max(...roots);
}

/* A step of as many blocks, walked through. */
function walked(state, depth) {
  const { batch, tokens, recipe, optimizer } = state;
  const [parameter, gradient] = RECIPES[recipe];
  const size = Math.ceil(batch / state.steps);
  // Where a second is as large, the gradients of the first are there all the
  // time: no other micro-batch needs as much.
  const second = batch >= 2 * size;
  const sizes = second || size === batch ? [size] : [size, batch - size];
  const walk = new Walk();
  let numbers;
  for (const samples of sizes) {
    const paper = write(state, samples, depth);
    if (size < batch) paper.scale(paper.rows.at(-1).makes[0]);
    if (!numbers) {
      numbers = paper.weights.map((w) => w.elements);
      const all = sum(numbers);
      walk.make(parameter * all, PARAMETERS);
      walk.make(optimizerBytes(numbers, recipe, optimizer), OPTIMIZER);
      walk.make(16 * batch * tokens, INPUTS);
      if (second || gradient > parameter) {
        walk.make(gradient * all, GRADIENTS);
        walk.begun = new Set(numbers.keys());
      }
    }
    walk.microBatch(paper);
  }
  const held = walk.make(workspace(numbers, state), TEMPORARIES);
  walk.moment("update", "optimizer");
  walk.release(held);
  const states = [PARAMETERS, OPTIMIZER].map((i) => walk.live[i]);
  return {
    moments: walk.moments,
    counts: [sum(numbers), states[0], gradient * sum(numbers), states[1]],
  };
}

/** The moments of a step, and [parameters, and bytes of these, of gradients,
    of optimizer states]. Blocks in the middle are alike: bytes grow by the
    same from each to the next, so no moment of theirs beats those of the
    second and the last but one, which 4 and 5 blocks tell of any number. */
export function step(state) {
  if (state.depth <= 5) return walked(state, state.depth);
  const [four, five] = [walked(state, 4), walked(state, 5)];
  const more = state.depth - 4;
  const grow = (a, b) => a.map((n, i) => n + more * (b[i] - n));
  const others = five.moments.filter(({ block }) => block !== 2);
  return {
    moments: four.moments.map((m, i) => ({
      ...m,
      block: m.block > 1 ? m.block + more : m.block,
      bytes: grow(m.bytes, others[i].bytes),
    })),
    counts: grow(four.counts, five.counts),
  };
}

const live = (moment) => sum(moment.bytes);
const worst = (moments) =>
  moments.reduce((most, m) => (live(m) > live(most) ? m : most));

/* The most sequences whose step stays within the budget. Every moment's bytes
   are a straight line in the micro-batch (one of 1 needs no more than that),
   so two steps say how many full micro-batches fit; then one by one. */
function largest(state) {
  const { budget, steps } = state;
  const at = (batch) => step({ ...state, batch }).moments.map(live);
  const [two, three] = [at(2 * steps), at(3 * steps)];
  const fit = two.map((bytes, i) => (budget - bytes) / (three[i] - bytes));
  const fits = (n) => Math.max(...at(n)) <= budget;
  let low = steps * Math.max(0, 2 + Math.floor(Math.min(...fit)));
  let [high, by] = [low + 1, 1];
  for (; fits(high); high += by) [low, by] = [high, 2 * by];
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (fits(middle)) low = middle;
    else high = middle;
  }
  return low;
}

// ---- numbers -------------------------------------------------------------

const remembered = new Map();

const keyOf = (make, state) => `${make.name} ${JSON.stringify(state)}`;

/* What was asked for lately is not computed again. */
function remember(make, state) {
  const key = keyOf(make, state);
  if (!remembered.has(key)) {
    if (remembered.size > 40) remembered.clear();
    remembered.set(key, make(state));
  }
  return remembered.get(key);
}

/** What the widget shows, but for `largest`. */
const account = (state) => remember(numbers, state);

/** What the widget shows. */
export const describe = (state) => ({
  ...account(state),
  largest: state.budget ? remember(largest, state) : null,
});

function numbers(state) {
  const { moments, counts } = step(state);
  const [parameters, ...states] = counts;
  const at = ({ name, phase, block, bytes }) => ({
    row: block < 0 ? name.replace(/^[ .]/, "") : `blocks.${block}${name}`,
    phase,
    split: Object.fromEntries(CATEGORIES.map((c, i) => [c, bytes[i]])),
    bytes: sum(bytes),
  });
  const within = (...phases) =>
    at(worst(moments.filter(({ phase }) => phases.includes(phase))));
  const peak = at(worst(moments));
  return {
    parameters,
    states: sum(states),
    forward: within("forward"),
    backward: within("backward", "recomputation"),
    update: within("optimizer"),
    peak,
    fits: state.budget ? peak.bytes <= state.budget : null,
  };
}

const plural = (count, thing) => `${count} ${thing}${count === 1 ? "" : "s"}`;

const percent = (part, whole) =>
  `${Math.floor((part / whole) * 100 + 0.5)} %`;

/** The key numbers in words; Python's Ledger.sentence() says the same. */
export function sentence(state) {
  const { peak, fits, largest: most } = describe(state);
  const { batch, tokens, steps, budget } = state;
  const own =
    `${plural(state.depth, "block")} of ` +
    `${state.family === "gpt" ? "GPT-2" : "Llama"}’s kind, ` +
    `${state.width} wide`;
  const parts = Math.ceil(batch / Math.ceil(batch / steps));
  const bySize = [...CATEGORIES].sort((a, b) => peak.split[b] - peak.split[a]);
  const shares = bySize
    .slice(0, 2)
    .map((c) => `${percent(peak.split[c], peak.bytes)} ${SHOWN[c]}`);
  const among = most
    ? `the largest batch that does is ${most}`
    : "not even one sequence does";
  return (
    `${state.preset || own}, ${plural(batch, "sequence")} of ` +
    plural(tokens, "token") +
    (parts > 1 ? ` in ${parts} micro-batches` : "") +
    (state.checkpointed ? ", every block checkpointed" : "") +
    `: the peak, ${formatBytes(peak.bytes)}, comes in the ` +
    PHASES[peak.phase] +
    (peak.phase === "optimizer" ? "" : `, at ${peak.row}`) +
    `, and is ${shares.join(" and ")}.` +
    (budget
      ? ` It ${fits ? "fits" : "does not fit"} the budget of ` +
        `${formatBytes(budget)}; ${among}.`
      : "")
  );
}

// ---- geometry ------------------------------------------------------------

const BARS = ["forward", "backward", "update"];
const [TALL, GAP] = [28, 18]; // of a bar, and below it
const WIDE = 480; // pixels, from which a bar's words take one line

/** Geometry of the picture, in pixels, for a given width. */
export function layout(state, width) {
  const n = account(state);
  const peak = n.peak.bytes;
  const { budget } = state;
  const near = budget > peak && budget <= 2.5 * peak;
  const top = 1.04 * (near ? budget : peak);
  const plot = { left: 8, right: width - 40, top: budget ? 24 : 6 };
  const x = (bytes) => plot.left + ((plot.right - plot.left) * bytes) / top;
  const lines = width < WIDE ? 2 : 1;
  let y = plot.top;
  const bars = BARS.map((bar) => {
    const { split, bytes, row } = n[bar];
    const words = bar === "update" ? 1 : lines;
    y += 16 * words + 4;
    let alive = 0;
    const parts = CATEGORIES.map((category) => {
      const left = x(alive);
      alive += split[category];
      return { category, x: left, width: x(alive) - left };
    }).filter((part) => part.width);
    const name = row.replace("sum of gradients", "sum");
    const where = bar === "update" ? "" : `at ${name}`;
    const at = { bar, where, words, bytes, parts, y, end: x(bytes) };
    y += TALL + GAP;
    return { ...at, peak: n[bar].bytes === peak && n[bar].row === n.peak.row };
  });
  plot.bottom = y - GAP + 8;
  const { unit, marks } = byteTicks(top, Math.max(2, Math.floor(width / 90)));
  return {
    width,
    height: plot.bottom + 24,
    plot,
    bars,
    unit,
    ticks: marks.map(({ value, label }) => ({ label, x: x(value) })),
    budget: budget
      ? { x: x(Math.min(budget, top)), beyond: budget > top }
      : null,
  };
}

// ---- drawing -------------------------------------------------------------

const text = (x, y, content, attributes = {}) =>
  svg("text", { x, y, ...attributes }, content);

const line = (x1, y1, x2, y2, name) =>
  svg("line", { x1, y1, x2, y2, class: name });

const patterns = (id) =>
  svg(
    "defs",
    {},
    hatching(`${id}-gradients`, 6, "M0 3H6", 45),
    hatching(`${id}-optimizer`, 8, "M0 4H8"),
    hatching(`${id}-activations`, 7, "M0 3.5H7", -45),
    hatching(`${id}-inputs`, 6, "M3 0V6"),
    hatching(`${id}-temporaries`, 5, "M1 2.5H2.5"),
  );

/* A box in a category's colour, and again in its pattern. */
const filled = (id, category, box) => [
  svg("rect", { ...box, class: `mb-${category}` }),
  svg("rect", { ...box, fill: `url(#${id}-${category})` }),
];

function draw(root, id, plan, { budget }) {
  const { plot, bars, width, height } = plan;
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const [parts, words] = [[patterns(id)], []];
  for (const { x, label } of plan.ticks) {
    parts.push(
      line(x, plot.top, x, plot.bottom, "mb-grid"),
      text(x, plot.bottom + 17, label, { "text-anchor": "middle" }),
    );
  }
  parts.push(
    text(width, plot.bottom + 17, plan.unit, { "text-anchor": "end" }),
    line(plot.left, plot.bottom, plot.right, plot.bottom, "mb-axis"),
  );
  for (const bar of bars) {
    for (const { category, x, width: wide } of bar.parts) {
      const box = { x, y: bar.y, width: wide, height: TALL };
      parts.push(...filled(id, category, box));
    }
    if (bar.peak) {
      const box = { x: plot.left, y: bar.y, height: TALL };
      const wide = bar.end - plot.left;
      parts.push(svg("rect", { ...box, width: wide, class: "mb-outline" }));
    }
    const size = `${bar.peak ? "peak " : ""}${formatBytes(bar.bytes)}`;
    const place = [plot.left, bar.y - 16 * bar.words + 10];
    const first = text(...place, `${bar.bar}: `, { class: "mb-halo" });
    first.append(svg("tspan", { class: "mb-value" }, size));
    words.push(first);
    if (bar.where && bar.words === 1) first.append(`, ${bar.where}`);
    else if (bar.where) {
      words.push(text(plot.left, bar.y - 6, bar.where, { class: "mb-halo" }));
    }
  }
  if (plan.budget) {
    const { x, beyond } = plan.budget;
    const label = `budget ${formatBytes(budget)}`;
    const half = (LETTER * label.length) / 2;
    const middle = Math.min(Math.max(x, half), width - half);
    const look = { "text-anchor": beyond ? "end" : "middle" };
    if (!beyond) {
      parts.push(line(x, plot.top - 6, x, plot.bottom, "mb-limit"));
    }
    const shown = beyond ? `${label} →` : label;
    parts.push(text(beyond ? plot.right : middle, 12, shown, look));
  }
  root.replaceChildren(...parts, ...words);
}

// ---- the widget ----------------------------------------------------------

const number = (key, value, shown) =>
  html("span", { "data-number": key, "data-value": value }, shown);

function table(id, n) {
  const cell = (bar, category, bytes) => {
    const shown = bytes ? formatBytes(bytes) : "–";
    return html("td", {}, number(`${bar}.${category}`, bytes, shown));
  };
  const row = (attributes, label, category, bytes) =>
    html(
      "tr",
      attributes,
      html("th", { scope: "row" }, ...label),
      ...BARS.map((bar) => cell(bar, category, bytes(n[bar]))),
    );
  const swatch = (category) =>
    svg(
      "svg",
      { viewBox: "0 0 14 14", class: "mb-swatch", "aria-hidden": "true" },
      ...filled(id, category, { width: 14, height: 14 }),
    );
  const head = ["worst moment of", ...BARS].map((label) =>
    html("th", { scope: "col" }, label),
  );
  const rows = CATEGORIES.map((category) =>
    row({}, [swatch(category), SHOWN[category]], category, ({ split }) =>
      split[category],
    ),
  );
  const all = row({ class: "mb-sum" }, ["together"], "bytes", (m) => m.bytes);
  return [
    html("thead", {}, html("tr", {}, ...head)),
    html("tbody", {}, ...rows, all),
  ];
}

/* "124 439 808", with spaces that do not break. */
const grouped = (count) =>
  String(count).replace(/\B(?=(\d{3})+$)/g, "\u00a0");

function numberList(n, state) {
  const entry = (label, key, value, shown) =>
    html(
      "div",
      {},
      html("dt", {}, label),
      html("dd", {}, number(key, value, shown)),
    );
  const each = formatNumber(n.states / n.parameters);
  const entries = [
    entry("parameters", "parameters", n.parameters, grouped(n.parameters)),
    entry("peak", "peak", n.peak.bytes, `${grouped(n.peak.bytes)} B`),
    entry("states, per parameter", "states", n.states, `${each} B`),
  ];
  if (state.budget) {
    const label = `largest batch in ${formatBytes(state.budget)}`;
    const most = n.largest;
    const shown = most === undefined ? "…" : `${most || "none"}`;
    entries.push(entry(label, "largest", most ?? null, shown));
  }
  return entries;
}

/* The places of a slider, in which the value has one. */
function* spaced(most, exact, each) {
  for (let n = 1; n <= exact; n += 1) yield n;
  for (let by = exact; by < most; by *= 2) {
    for (let i = 1; i <= each; i += 1) yield by + (by / each) * i;
  }
}
const PLACES = {
  batch: [...spaced(1024, 16, 8)],
  tokens: [...spaced(32768, 1, 1)].filter((n) => n >= 16),
  steps: [...spaced(64, 16, 4)],
};
const placesOf = (key, value) =>
  [...new Set([...PLACES[key], value])].sort((a, b) => a - b);

/* A field for a number; what it may be, `problem` says. */
function field(label, key, onChange) {
  const id = makeId();
  const input = html("input", {
    ...{ type: "number", id, min: 1, max: MOST[key], step: 1 },
    ...{ "data-key": key, "data-lm-suppress-shortcuts": "true" },
  });
  const name = html("label", { for: id }, label);
  const root = html("div", { class: "mb-control" }, name, input);
  input.addEventListener("change", () => onChange(Number(input.value)));
  const update = (value, wrong) => {
    if (Number(input.value) !== value || !input.value) input.value = value;
    input.setAttribute("aria-invalid", wrong);
  };
  return { root, update };
}

const FIELDS = {
  depth: "Blocks",
  width: "Width D",
  heads: "Heads",
  kv_heads: "Heads of keys and values",
  hidden: "Width of the MLP",
  vocabulary: "Vocabulary",
  context: "Learned positions",
};
const UNUSED = { gpt: ["kv_heads", "hidden"], llama: ["context"] };
const CHECKS = {
  checkpointed: "Checkpoint each block",
  fused: "Fused attention",
  foreach: "Adam on all parameters at once",
};
const KEYS = [
  ...["preset", ...SHAPE, "fused", "batch", "tokens", "steps"],
  ...["checkpointed", "recipe", "optimizer", "foreach", "budget"],
];

const worded = (entries) =>
  Object.fromEntries(
    Object.entries(entries).map(([key, of]) => [key, of.at(-1)]),
  );

function render({ model, el }) {
  const read = () =>
    Object.fromEntries(KEYS.map((key) => [key, model.get(key)]));
  let draft = {}; // what is asked for while it cannot be
  const change = (traits) => {
    draft = { ...draft, ...traits };
    if (problem({ ...read(), ...draft })) return show();
    const all = draft;
    draft = {};
    save(model, all);
    return show(); // where nothing has changed after all, too
  };
  const reshape = (traits) => change({ ...traits, preset: "" });
  const choose = (preset) => {
    const shape = PRESETS[preset] ?? [];
    const traits = shape.map((value, i) => [SHAPE[i], value]);
    change({ ...Object.fromEntries(traits), preset });
    if (!preset) details.open = true;
  };

  const preset = choice({
    label: "Model",
    key: "preset",
    options: {
      ...Object.fromEntries(Object.keys(PRESETS).map((name) => [name, name])),
      "": "own shape",
    },
    onChange: choose,
  });
  const range = (label, key) => {
    let places;
    const { root, update } = slider({
      label,
      key,
      min: 0,
      onInput: (i) => change({ [key]: places[i] }),
    });
    const set = (value, spoken) => {
      places = placesOf(key, value);
      const place = places.indexOf(value);
      update({ value: place, max: places.length - 1, text: value, spoken });
    };
    return { root, set };
  };
  const select = (label, key, options, to = (value) => value) =>
    choice({ label, key, options, onChange: (v) => change({ [key]: to(v) }) });
  const batch = range("Batch (sequences)", "batch");
  const tokens = range("Tokens of each", "tokens");
  const parts = range("Accumulation steps", "steps");
  const recipe = select("Precision", "recipe", worded(RECIPES));
  const optimizer = select("Optimizer", "optimizer", worded(OPTIMIZERS));
  let budget;
  const family = choice({
    label: "Kind of block",
    key: "family",
    options: FAMILIES,
    onChange: (value) => reshape({ family: value }),
  });
  const fields = Object.entries(FIELDS).map(([key, label]) => [
    key,
    field(label, key, (value) => reshape({ [key]: value })),
  ]);
  const tied = checkBox({
    label: "Head shares the embedding’s weight",
    key: "tied",
    onChange: (value) => reshape({ tied: value }),
  });
  const checks = Object.entries(CHECKS).map(([key, label]) => [
    key,
    checkBox({ label, key, onChange: (value) => change({ [key]: value }) }),
  ]);
  const summary = html("summary", { "data-lm-suppress-shortcuts": "true" });
  const shape = fields.map(([, { root }]) => root);
  const details = html(
    "details",
    { class: "mb-shape" },
    summary,
    html("div", { class: "mb-controls" }, family.root, ...shape, tied.root),
  );
  const place = html("div", { class: "mb-place" });
  const wrong = html("p", { role: "alert", class: "mb-problem" });

  const id = makeId();
  const picture = svg("svg", { role: "img", class: "mb-picture" });
  const said = html("p", { "aria-live": "polite", class: "mb-live" });
  const bytes = html("table", { class: "mb-table" });
  const list = html("dl", { class: "mb-numbers" });
  let speaking;

  el.classList.add("mb-root", "mb-ledger");
  el.append(
    html(
      "div",
      { class: "mb-controls" },
      ...[preset, batch, tokens, parts, recipe, optimizer].map((c) => c.root),
      place,
      html("div", { class: "mb-checks" }, ...checks.map(([, c]) => c.root)),
    ),
    details,
    wrong,
    said,
    figure("Memory at the worst moment of each phase", NOTE, picture),
    bytes,
    list,
  );

  /* The controls: what is asked for. */
  const show = () => {
    const state = { ...read(), ...draft };
    const { family: kind } = state;
    preset.update({ value: state.preset });
    batch.set(state.batch, plural(state.batch, "sequence"));
    tokens.set(state.tokens, plural(state.tokens, "token"));
    parts.set(state.steps, plural(state.steps, "accumulation step"));
    recipe.update({ value: state.recipe });
    optimizer.update({ value: state.optimizer });
    const key = String(state.budget);
    if (!budget || !budget.has(key)) {
      const own = key in BUDGETS ? {} : { [key]: formatBytes(state.budget) };
      const options = { ...BUDGETS, ...own };
      budget = select("Budget", "budget", options, Number);
      budget.has = (value) => value in options;
      place.replaceChildren(budget.root);
    }
    budget.update({ value: key });
    family.update({ value: kind });
    const why = problem(state);
    for (const [name, { root, update }] of fields) {
      root.hidden = UNUSED[kind].includes(name);
      update(state[name], Boolean(why) && name in draft);
    }
    tied.update({ value: state.tied });
    for (const [name, { update }] of checks) update({ value: state[name] });
    if (wrong.textContent !== why) wrong.textContent = why;
    wrong.hidden = !why;
    el.classList.toggle("mb-stale", Boolean(why)); // the last that could be
    summary.textContent =
      `Shape: ${plural(state.depth, "block")} like ` +
      `${kind === "gpt" ? "GPT-2’s" : "Llama’s"}, ${state.width} wide, ` +
      `${plural(state.heads, "head")}, ${state.vocabulary} in the vocabulary`;
  };

  const end = redraw(model, picture, (width) => {
    const state = read();
    el.classList.toggle("mb-narrow", width < WIDE);
    show();
    if (problem(state)) return; // for an instant, while a kernel changes it
    const n = account(state);
    draw(picture, id, layout(state, width), state);
    bytes.replaceChildren(...table(id, n));
    clearTimeout(speaking);
    const speak = () => {
      said.textContent = sentence(state);
      picture.setAttribute("aria-label", said.textContent);
      list.replaceChildren(...numberList(describe(state), state));
    };
    if (said.textContent) {
      const known = remembered.has(keyOf(largest, state));
      const shown = known ? describe(state) : n;
      list.replaceChildren(...numberList(shown, state));
      speaking = setTimeout(speak, 150);
    } else speak();
  });
  return () => {
    end();
    clearTimeout(speaking);
    el.replaceChildren();
  };
}

export default { render };
