import {
  axes,
  button,
  choice,
  drag,
  filled,
  formatNumber,
  grouped,
  heights,
  html,
  legend,
  line,
  listed,
  powerOfTwo,
  slider,
  stairs,
  strip,
  svg,
  t,
  table,
  text,
  widget,
} from "./base.mjs";

/* Gradients by binade, which the loss scale moves between two walls.

   describe(state): what Python counted, at this scale.
   layout(state, width): where everything stands. */

const exponentOf = ({ scale }) => Math.log2(scale);

const inside = ({ scales: [least, most] }, e) =>
  Math.min(Math.max(e, least), most);

/** Shares of the gradients that are lost at this scale, for every format. */
export function describe({ histogram, scale }) {
  const { formats, lost, scales, gradients, best } = histogram;
  const row = Math.log2(scale) - scales[0];
  return Object.fromEntries(
    formats.map((name) => {
      const [below, subnormal, above] = lost[name][row].map(
        (count) => count / gradients,
      );
      return [name, { below, subnormal, above, best: best[name] }];
    }),
  );
}

// ---- words ---------------------------------------------------------------

/** Nothing and everything are said only where they are meant. */
export function shareText(share) {
  if (share > 0 && share < 0.0001) return "< 0.01 %";
  if (share > 0.9999 && share < 1) return "> 99.99 %";
  return `${formatNumber(share * 100)} %`;
}

/* Whether the format has infinity, which a scaler sees. */
const skips = ({ histogram, format }, { above }) =>
  above && !histogram.saturates.includes(format);

/* What comes of the largest gradients. */
function verdict(state, n) {
  if (!n.above) return t`no overflow`;
  return skips(state, n) ? t`overflow: step skipped` : t`overflow: clipped`;
}

/** The key numbers in words. */
export function sentence(state) {
  const { histogram, format } = state;
  const n = describe(state)[format];
  const e = exponentOf(state);
  const found = [
    n.below && t`${shareText(n.below)} become zero`,
    n.subnormal && t`${shareText(n.subnormal)} are subnormal`,
    n.above && t`${shareText(n.above)} overflow`,
  ].filter(Boolean);
  const all = grouped(histogram.gradients);
  const what = found.length
    ? t`of ${all} gradients ${listed(found)}`
    : t`all ${all} gradients are normal numbers`;
  const at = [format, e ? powerOfTwo(e) : 1, what];
  const best = powerOfTwo(n.best);
  const beyond = inside(histogram, n.best) !== n.best;
  return [
    skips(state, n)
      ? t(
          "In {0} at a loss scale of {1}, {2}: a scaler would skip the step.",
          ...at,
        )
      : t("In {0} at a loss scale of {1}, {2}.", ...at),
    beyond
      ? t`The largest scale without overflow is ${best}, beyond the slider.`
      : t`The largest scale without overflow is ${best}.`,
  ].join(t` `);
}

// ---- geometry ------------------------------------------------------------

/** The histogram between the walls; axis and walls do not move. */
export function layout({ histogram, format, scale }, width) {
  const { start, counts, gradients, limits } = histogram;
  const plot = { left: 34, right: width - 8, top: 102, bottom: 236 };
  const low = Math.min(start, -40);
  const high = Math.max(start + counts.length, 24);
  const each = (plot.right - plot.left) / (high - low);
  const clamp = (x) => Math.min(Math.max(x, plot.left), plot.right);
  const x = (e) => plot.left + (e - low) * each;
  const shares = counts.map((count) => (100 * count) / gradients);
  const axis = heights(plot, 1.04 * Math.max(...shares), "%");
  const e = Math.log2(scale);
  const edges = [...counts, 0].map((_, i) => clamp(x(start + i + e)));
  const walls = limits[format].map((limit) => clamp(x(limit)));
  const by = [4, 8, 16, 32].find((step) => step * each >= 48);
  const ticks = [];
  for (let at = Math.ceil(low / by) * by; x(at) <= width - 20; at += by) {
    ticks.push({ x: x(at), label: powerOfTwo(at) });
  }
  return {
    plot,
    each,
    edges,
    axis,
    tops: shares.map((share) =>
      Math.min(axis.y(share), plot.bottom - (share ? 3 : 0)),
    ),
    zones: [plot.left, ...walls, plot.right],
    ticks,
    height: plot.bottom + 42,
  };
}

/** The path of those parts of the bars that are between two places. */
export function bars({ edges, tops, plot }, from, to) {
  const bar = (y, i) => {
    const left = Math.max(edges[i], from);
    const right = Math.min(edges[i + 1], to);
    if (right - left < 0.05 || y >= plot.bottom) return "";
    const [a, b, top] = [left, right, y].map((place) => place.toFixed(1));
    return `M${a} ${plot.bottom}V${top}H${b}V${plot.bottom}Z`;
  };
  return tops.map(bar).join("");
}

// ---- drawing -------------------------------------------------------------

const MIDDLE = { "text-anchor": "middle" };
const END = { "text-anchor": "end" };

const ZONES = [
  { part: "over", words: [t`becomes 0`, "→ 0"] },
  { part: "subnormal", words: [t`subnormal`] },
  { part: "phase-forward", words: [t`normal numbers`, t`normal`] },
  { part: "over", words: [t`overflow`, t`over`] },
];

const COLUMNS = [
  ["below", t`lost to underflow`, t`underflow`],
  ["subnormal", t`subnormal: fewer bits`, t`subnormal`],
  ["above", t`lost to overflow`, t`overflow`],
];

function* drawShares({ plot }, n, words) {
  const big = (bad) => `mb-value mb-big${bad ? " mb-broken" : ""}`;
  const narrow = plot.right < 440;
  const places = [[0, {}], [(plot.left + plot.right) / 2, MIDDLE]];
  places.push([plot.right, END]);
  yield text(0, 16, words, { class: big(n.above) });
  const grab = narrow ? t`◀ drag ▶` : t`◀ drag the bars ▶`;
  yield text(plot.right, 14, grab, END);
  for (const [i, [key, long, short]] of COLUMNS.entries()) {
    const [x, look] = places[i];
    const lost = key !== "subnormal" && n[key];
    yield text(x, 37, narrow ? short : long, look);
    yield text(x, 57, shareText(n[key]), { ...look, class: big(lost) });
  }
}

function* drawHistogram(id, plan, before) {
  const { plot, zones, tops, ticks } = plan;
  const { left, right, top, bottom } = plot;
  yield* axes(plot, plan.axis);
  const runs = ZONES.map((zone, i) => {
    return { ...zone, x: zones[i], width: zones[i + 1] - zones[i] };
  }).filter(({ width }) => width > 0);
  yield* strip(id, top - 32, runs);
  for (const { part, x, width } of runs) {
    const d = bars(plan, x, x + width);
    const wall = part === "over";
    const box = { x, width, y: top, height: bottom - top };
    if (wall) yield svg("rect", { ...box, class: "mb-wall" });
    yield* filled(id, wall ? "lost" : "gradients", "path", { d });
    if (wall) yield svg("path", { d, fill: `url(#${id}-over)` });
  }
  for (const x of zones.slice(1, -1)) {
    if (x > left && x < right) yield line(x, top, x, bottom, "mb-limit");
  }
  if (before) {
    const d = stairs(before.edges, tops);
    yield svg("path", { d, class: "mb-ghost" });
  }
  for (const { x, label } of ticks) {
    yield line(x, bottom, x, bottom + 4, "mb-axis");
    yield text(x, bottom + 18, label, MIDDLE);
  }
  yield text((left + right) / 2, bottom + 36, t`size × loss scale`, MIDDLE);
}

function results(id, state) {
  const rows = Object.entries(describe(state)).map(([name, n]) => ({
    label: name,
    cells: [
      ...COLUMNS.map(([key]) => [`${name}.${key}`, n[key], shareText(n[key])]),
      [`${name}.best`, n.best, powerOfTwo(n.best)],
    ],
  }));
  const words = COLUMNS.map(([, , word]) => word);
  const head = [t`format`, ...words, t`largest scale without overflow`];
  return [table(id, head, rows)];
}

// ---- the widget ----------------------------------------------------------

const NOTE = t(
  "A bar for each binade, from a power of two to the next. Its height is " +
    "the share of the gradients there, but at least 3 pixels. A factor 2 of " +
    "the loss scale moves all bars by one binade; axis and walls stay. " +
    "Dotted: before the last change. " +
    "A scale below 1 stands for a larger batch, because the mean divides by " +
    "the tokens: 2⁻¹⁰ for 1 024 times as many.",
);

const BEST = t`Largest scale without overflow`;
const ANY = t`No scale here overflows`;

function build({ id, get, set, bound, picture }) {
  const go = (e) => set({ scale: 2 ** inside(get().histogram, e) });
  const { formats, scales } = get().histogram;
  const scale = slider({
    label: t`Loss scale`,
    key: "scale",
    min: scales[0],
    onInput: go,
  });
  const format = bound(choice, t`Format`, "format", { options: formats });
  const best = button({
    label: BEST,
    key: "best",
    onClick: () => go(get().histogram.best[get().format]),
  });
  const note = html("p", { class: "mb-note" });
  let plan;
  drag(picture, {
    grab: ({ x }) => ({ x, e: exponentOf(get()) }),
    move: ({ x }, held) => go(held.e + Math.round((x - held.x) / plan.each)),
    drop: () => scale.focus(),
  });
  const draw = (state, width, before) => {
    const { merged, zeros, best: largest } = state.histogram;
    const n = describe(state)[state.format];
    const moved = before && before.scale !== state.scale;
    plan = layout(state, width);
    const e = exponentOf(state);
    const words = e < 1 ? "" : ` = ${grouped(2 ** e)}`;
    scale.update({
      value: e,
      max: scales[1],
      text: e ? powerOfTwo(e) + words : "1",
      spoken: t`2 to the power of ${e}`,
    });
    const any = largest[state.format] > scales[1];
    best.root.disabled = any;
    best.root.textContent = any ? ANY : BEST;
    const told = [NOTE];
    if (merged) told.push(t`The first bar holds what is smaller, too.`);
    if (zeros) {
      told.push(t`${grouped(zeros)} gradients are zero and not counted.`);
    }
    note.textContent = told.join(t` `);
    return {
      title: t`Gradients × loss scale in ${state.format}`,
      sentence: sentence(state),
      height: plan.height,
      drawn: [
        ...drawShares(plan, n, verdict(state, n)),
        ...drawHistogram(id, plan, moved && layout(before, width)),
      ],
      numbers: results(id, state),
    };
  };
  return {
    controls: [scale, format, best],
    legend: legend(id, {
      gradients: t`gradients`,
      subnormal: t`subnormal`,
      over: t`lost`,
    }),
    note,
    draw,
  };
}

const keys = ["histogram", "format", "scale", "label"];

export default widget({ name: "lossscale", keys, build });
