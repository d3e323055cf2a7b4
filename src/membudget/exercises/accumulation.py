"""The exercises on accumulation, of the chapter and of the lab."""

from copy import deepcopy
from math import log2, sqrt

import torch
from torch import nn

from membudget import accumulation
from membudget.accumulation import IGNORE, partition, token_counts, windows
from membudget.exercises import loops
from membudget.exercises.core import Case, Exercise, variants
from membudget.exercises.loops import Window, mean_loss
from membudget.exercises.observe import answer, gradient, search, update


def _given(**arguments) -> Case:
    """A case whose arguments are told as they are."""
    told = ", ".join(f"{name} = {a!r}" for name, a in arguments.items())
    return Case(told, lambda: tuple(deepcopy(arguments).values()))


# Weights

MEAN_OF_MEANS = (
    "every micro-batch weighs 1/K. That is right only if all have the same "
    "count; the mean over n of all N weighs n/N."
)
INVERSE = (
    "the weight falls with the count n. The mean loss is already divided by "
    "n: multiply by n, then divide by N."
)

check_weights = Exercise(
    signature="weights(counts)",
    cases=[
        _given(counts=[6, 3, 1]),
        _given(counts=[4, 4, 2, 5, 1]),
        _given(counts=[7]),
    ],
    observe=answer,
    solution=accumulation.weights,
    mistakes=[
        (MEAN_OF_MEANS, lambda ns: [1 / len(ns) for n in ns]),
        (
            "these are the counts themselves: divide by their sum N, so that "
            "the weights add up to 1.",
            lambda ns: ns,
        ),
        (
            "every micro-batch weighs 1, so the sum is several times too "
            "large: divide by the sum N of the counts.",
            lambda ns: [1 for n in ns],
        ),
        (INVERSE, lambda ns: [1 / n for n in ns]),
        (INVERSE, lambda ns: [1 / n / len(ns) for n in ns]),
        (INVERSE, lambda ns: [1 / n / sum(1 / m for m in ns) for n in ns]),
        (
            "the counts are divided by the number of micro-batches; divide "
            "by their sum N, so that the weights add up to 1.",
            lambda ns: [n / len(ns) for n in ns],
        ),
        (
            "the counts are divided by the largest one; divide by their sum "
            "N, so that the weights add up to 1.",
            lambda ns: [n / max(ns) for n in ns],
        ),
        (
            "the shares n/N are divided by the number of micro-batches once "
            "more: the weights must add up to 1.",
            lambda ns: [n / sum(ns) / len(ns) for n in ns],
        ),
        (
            "this is one weight for each sample; return one for each "
            "micro-batch.",
            lambda ns: [1 / sum(ns)] * sum(ns),
        ),
    ],
    shown=(
        "With the weights n/N the micro-batch means add up to the mean over "
        "the window, whatever the sizes."
    ),
)


def _cut(lengths: list[int], *cuts: int) -> Case:
    """Labels of sentences, padded to the longest, and where to cut them."""

    def make() -> tuple:
        labels = torch.arange(len(lengths) * max(lengths)) % 7
        labels = _pad(labels.view(len(lengths), -1), lengths)
        return labels, list(map(slice, cuts, cuts[1:]))

    return Case(f"sentences of {lengths} tokens, cut at {list(cuts)}", make)


def _pad(labels: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    place = torch.arange(labels.shape[1])
    return labels.where(place < torch.tensor(lengths)[:, None], IGNORE)


check_token_weights = Exercise(
    signature="token_weights(labels, micro_batches)",
    cases=[_cut([8, 7, 2, 1, 5], 0, 2, 4, 5), _cut([3, 1, 4], 0, 1, 3)],
    observe=answer,
    solution=lambda y, parts: accumulation.weights(token_counts(y, parts)),
    mistakes=[
        (
            "these are the shares of the samples, or of all tokens with the "
            "padding: only labels other than -100 count.",
            lambda y, parts: [len(y[part]) / len(y) for part in parts],
        ),
        (MEAN_OF_MEANS, lambda y, parts: [1 / len(parts) for _ in parts]),
        (
            "these are the counts themselves: divide by their sum, so that "
            "the weights add up to 1.",
            token_counts,
        ),
        (
            "the counts are divided by all tokens, padding included; divide "
            "by the number of non-padding tokens.",
            lambda y, parts: [n / y.numel() for n in token_counts(y, parts)],
        ),
        (
            "this is the share of non-padding tokens within each "
            "micro-batch; divide by those of the whole window.",
            lambda y, parts: [(y[p] != IGNORE).float().mean() for p in parts],
        ),
        (
            "this weighs the padding: count the labels that are *not* -100.",
            lambda y, parts: [
                (y[p] == IGNORE).sum() / (y == IGNORE).sum() for p in parts
            ],
        ),
        (
            "label 0 is a token like any other: only -100 is padding.",
            lambda y, parts: [(y[p] > 0).sum() / (y > 0).sum() for p in parts],
        ),
    ],
    shown=(
        "Weighted by non-padding tokens, every token counts alike, wherever "
        "the micro-batches are cut."
    ),
)


# The gradient of a window


def _batch(size: int, micro_batch: int) -> Case:
    def make() -> tuple:
        x, y = loops.whole(loops.samples(*[1] * size))
        return loops.small_model(), x, y, micro_batch

    return Case(f"{size} samples in micro-batches of {micro_batch}", make)


def _accumulate(
    model, x, y, size, keep=lambda window: window, recount=False, **change
) -> None:
    window = [(x[part], y[part]) for part in partition(len(x), size)]
    kept = keep(window)
    loops.run(model, kept, window=kept if recount else window, **change)


def _full(window: Window) -> Window:
    return [(x, y) for x, y in window if len(x) == len(window[0][0])]


REMAINDER = (
    "the samples left over after the last full micro-batch are missing: they "
    "form a smaller one."
)

check_accumulate = Exercise(
    signature="accumulate(model, x, y, micro_batch)",
    cases=[_batch(10, 4), _batch(7, 2), _batch(6, 3), _batch(3, 8)],
    observe=gradient(lambda model, x, y, micro_batch: micro_batch),
    solution=lambda model, x, y, _: mean_loss(model, (x, y)).backward(),
    mistakes=variants(
        _accumulate,
        [
            (REMAINDER, {"keep": _full}),
            (REMAINDER, {"keep": _full, "recount": True}),
            (
                "only the last micro-batch is left in `param.grad`: "
                "`zero_grad()` inside the loop wipes the others.",
                {"keep": lambda window: window[-1:]},
            ),
            *loops.WEIGHTS,
        ],
    ),
    shown=(
        "The gradient is that of the whole batch, and never more than one "
        "micro-batch was alive."
    ),
)


def _sentences(*groups: list[int]) -> Case:
    """One micro-batch for each list of lengths, padded to its longest."""

    def make() -> tuple:
        model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7)).double()
        shapes = [(len(lengths), max(lengths)) for lengths in groups]
        return model, [
            (torch.randint(7, shape), _pad(torch.randint(7, shape), lengths))
            for shape, lengths in zip(shapes, groups, strict=True)
        ]

    told = "; ".join(map(str, groups))
    return Case(f"micro-batches with sentences of {told} tokens", make)


def _real(labels: torch.Tensor) -> int:
    return int((labels != IGNORE).sum())


def _padded(model, window, share_of_all=False, count=_real, **change) -> None:
    if share_of_all:
        every = sum(y.numel() for _, y in window)
        change["weigh"] = lambda n, counts: n / every
    loops.run(model, window, count=count, **change)


check_padded_gradient = Exercise(
    signature="padded_gradient(model, micro_batches)",
    cases=[
        _sentences([9, 2], [3, 1, 1], [2, 6]),
        _sentences([4], [1, 1, 2, 1]),
        _sentences([3, 3], [3, 3]),
    ],
    observe=gradient(lambda model, window: loops.largest(window)),
    solution=lambda model, window: mean_loss(model, *window).backward(),
    mistakes=variants(
        _padded,
        [
            (
                "the mean of each micro-batch is divided by the number of "
                "micro-batches, so a token among few weighs more than one "
                "among many: weigh by non-padding tokens.",
                {"weigh": lambda n, counts: 1 / len(counts)},
            ),
            (
                "the means are weighted by samples, but they are means over "
                "non-padding tokens: weigh by those.",
                {"count": len},
            ),
            (
                "the means are weighted by all tokens: the padding (-100) "
                "does not count.",
                {"count": torch.numel},
            ),
            (
                "the summed loss is divided by all tokens: the padding "
                "(-100) does not count.",
                {"share_of_all": True},
            ),
            *loops.WEIGHTS[1:],
        ],
    ),
    shown=(
        "The gradient is that of the mean over all non-padding tokens of the "
        "window, however they are grouped."
    ),
)


# The optimizer step of a window


def _whole_step(model, optimizer, scaler, window, max_norm) -> None:
    batch = [loops.whole(window)]
    loops.step(model, optimizer, scaler, batch, max_norm)


check_clipped_step = Exercise(
    signature="clipped_step(model, optimizer, micro_batches, max_norm)",
    cases=[
        loops.step_case("max_norm", 1000, 4, 4, 2),
        loops.step_case("max_norm", 0.1, 4, 4, 2),
        loops.step_case("max_norm", 0.5, 1, 5),
    ],
    observe=update(lambda model, optimizer, window, _: loops.largest(window)),
    solution=loops.unscaled(_whole_step),
    mistakes=variants(
        loops.unscaled(loops.step), [*loops.STEPS, *loops.WEIGHTS]
    ),
    shown=(
        "The step is that of the whole batch: clipped once, when the sum was "
        "complete."
    ),
)


def _scaled(max_norm: float, init_scale: float) -> Case:
    """In fp32, with a scaler that doubles its scale after every step."""
    case = loops.step_case("max_norm", max_norm, 4, 4, 2)

    def make() -> tuple:
        model, optimizer, window, _ = case.make()
        model.float()
        scaler = torch.amp.GradScaler("cpu", init_scale, growth_interval=1)
        window = [(x.float(), y) for x, y in window]
        return model, optimizer, scaler, window, max_norm

    return Case(f"{case.told}, loss scale {init_scale:.0f}", make)


SCALED_CLIP = (
    "the gradient is clipped while it is still multiplied by the loss scale: "
    "call `scaler.unscale_(optimizer)` before `clip_grad_norm_`."
)
NO_AUTOCAST = (
    "the forward pass does not run in fp16: put it under "
    '`torch.autocast("cpu", torch.float16)`.'
)

check_amp_step = Exercise(
    signature="amp_step(model, optimizer, scaler, micro_batches, max_norm)",
    cases=[_scaled(1000, 2**10), _scaled(0.1, 2**10), _scaled(0.5, 2**40)],
    observe=update(lambda model, o, s, window, _: loops.largest(window)),
    solution=_whole_step,
    mistakes=variants(
        loops.step,
        [
            *loops.STEPS,
            (SCALED_CLIP, {"end": "clip step update wipe"}),
            (SCALED_CLIP, {"end": "clip unscale step update wipe"}),
            (loops.NO_CLIP, {"end": "step update wipe"}),
            (
                "`unscale_` runs after every micro-batch, and later "
                "gradients are added to it still scaled: unscale once, after "
                "the last one.",
                {"each": "unscale"},
            ),
            (
                "`scaler.update()` runs before the scaler has seen a "
                "gradient: `scaler.unscale_` and `scaler.step`, then one "
                "update, after the last micro-batch.",
                {"each": "update"},
            ),
            (
                "the loss scale stays as it was: call `scaler.update()` "
                "once, after the step.",
                {"end": "unscale clip step wipe"},
            ),
            (
                "an overflow must skip the step: `scaler.step(optimizer)` "
                "does, `optimizer.step()` does not.",
                {"end": "unscale clip plain update wipe"},
            ),
            (NO_AUTOCAST, {"dtype": None}),
            (NO_AUTOCAST, {"dtype": torch.bfloat16}),
            *loops.WEIGHTS,
        ],
    ),
    shown=(
        "Unscaled once, clipped once, stepped once, like the whole batch; "
        "and not stepped at all where a gradient overflowed."
    ),
    tolerance=1e-2,
)


# An epoch


def _whole_epoch(model, optimizer, loader, steps) -> None:
    for window in windows(loader, steps):
        mean_loss(model, *window).backward()
        optimizer.step()
        optimizer.zero_grad()


def _epoch(
    model, optimizer, loader, steps, cut=windows, full=None, **change
) -> None:
    if full:
        size = len(loader[0][0])
        change["weigh"] = lambda n, counts: full(n, size) / steps
    change = {"end": "step wipe"} | change
    step = loops.unscaled(loops.step)
    for window in cut(loader, steps):
        step(model, optimizer, window, max_norm=0, **change)


def _complete(loader: Window, steps: int) -> list[Window]:
    return [w for w in windows(loader, steps) if len(w) == steps]


SHIFTED = (
    "the first step comes after a single micro-batch: count from 1, as "
    "`enumerate(loader, 1)` does."
)

check_train_epoch = Exercise(
    signature="train_epoch(model, optimizer, loader, steps)",
    cases=[
        loops.step_case("steps", 4, 4, 4, 4, 4, 4, 2),
        loops.step_case("steps", 2, 3, 3, 3, 3),
        loops.step_case("steps", 8, 5, 5, 1),
    ],
    observe=update(lambda model, optimizer, loader, _: loops.largest(loader)),
    solution=_whole_epoch,
    mistakes=variants(
        _epoch,
        [
            (
                "the last window is dropped when the loader ends in the "
                "middle of it: step on what is there.",
                {"cut": _complete},
            ),
            (SHIFTED, {"cut": lambda i, k: [i[:1], *_complete(i[1:], k)]}),
            (SHIFTED, {"cut": lambda i, k: [i[:1], *windows(i[1:], k)]}),
            (
                "the whole epoch is one window: step after every `steps` "
                "micro-batches.",
                {"cut": lambda loader, steps: [loader]},
            ),
            (
                "the losses of the last window are divided by `steps`, and "
                "it holds fewer micro-batches: divide by its own samples.",
                {"full": lambda n, size: 1},
            ),
            (
                "the losses of the last window are divided by the samples of "
                "a full one: divide by its own.",
                {"full": lambda n, size: n / size},
            ),
            (loops.STEP_EACH, {"each": "step wipe", "end": ""}),
            (
                "the gradients of one window are still there in the next: "
                "call `optimizer.zero_grad()` after each step.",
                {"end": "step"},
            ),
            *loops.WEIGHTS,
        ],
    ),
    shown=(
        "The parameters are those of whole batches: every sample of the "
        "epoch counted, those of the partial last window too."
    ),
)


# Formulas


def _error(ns, root=sqrt, factor=sum, divisor=lambda n: n, power=2) -> float:
    shares = [n / sum(ns) for n in ns]
    terms = [
        abs(1 / len(ns) - share) ** power / divisor(n)
        for share, n in zip(shares, ns, strict=True)
    ]
    return root(factor(ns) * sum(terms))


check_mean_of_means_error = Exercise(
    signature="mean_of_means_error(counts)",
    cases=[
        _given(counts=[6, 3, 1]),
        _given(counts=[512, 32, 64, 128]),
        _given(counts=[4, 4]),
    ],
    observe=answer,
    solution=accumulation.mean_of_means_error,
    mistakes=variants(
        _error,
        [
            (
                "this is the mean *square*: take the square root.",
                {"root": lambda square: square},
            ),
            (
                "the factor N is missing: without it the error is not "
                "relative to the noise of the whole batch.",
                {"factor": lambda ns: 1},
            ),
            (
                "the sum is divided by N instead of multiplied by it.",
                {"factor": lambda ns: 1 / sum(ns)},
            ),
            (
                "the factor N is the number of samples, not of micro-batches.",
                {"factor": len},
            ),
            (
                "the 1/n_k is missing: the mean over n samples has 1/n of "
                "their variance.",
                {"divisor": lambda n: 1},
            ),
            (
                "the squares are multiplied by n_k: the mean over n samples "
                "has 1/n of their variance.",
                {"divisor": lambda n: 1 / n},
            ),
            (
                "the differences 1/K − n_k/N are not squared.",
                {"power": 1},
            ),
        ],
    ),
    shown=(
        "This is the price of the mean of means in pure noise; it vanishes "
        "for equal counts."
    ),
)


def _noise(square: float, variance: float, b: int, batch: int) -> Case:
    return _given(
        micro_square=square + variance / b,
        batch_square=square + variance / batch,
        micro_batch=b,
        batch=batch,
    )


def _square(micro, whole, b, batch) -> float:
    return (batch * whole - b * micro) / (batch - b)


def _variance(micro, whole, b, batch) -> float:
    return (micro - whole) / (1 / b - 1 / batch)


OF_MICRO_BATCH = (
    "mean |g_k|² − |ḡ|² is about the variance of a micro-batch's gradient, "
    "not of a sample's: divide it by 1/b − 1/B."
)
TIMES_B = (
    "the variance is b·(mean |g_k|² − |ḡ|²), as if |ḡ|² had no noise left: "
    "divide the difference by 1/b − 1/B instead."
)

check_noise_scale = Exercise(
    signature="noise_scale(micro_square, batch_square, micro_batch, batch)",
    cases=[_noise(4, 600, 16, 128), _noise(3, 40, 2, 8)],
    observe=answer,
    solution=lambda *args: _variance(*args) / _square(*args),
    mistakes=[
        (
            "the ratio is upside down: variance over squared gradient.",
            lambda *args: _square(*args) / _variance(*args),
        ),
        ("this is tr Σ alone: divide it by |G|².", _variance),
        ("this is |G|² alone: tr Σ divided by it is asked.", _square),
        (
            "tr Σ is right, but |ḡ|² still holds the noise of the batch: "
            "divide by the corrected |G|².",
            lambda *args: _variance(*args) / args[1],
        ),
        (
            "tr Σ is divided by mean |g_k|², which holds the noise of the "
            "micro-batches: divide by the corrected |G|².",
            lambda *args: _variance(*args) / args[0],
        ),
        (OF_MICRO_BATCH, lambda m, w, *bs: m - w),
        (OF_MICRO_BATCH, lambda m, w, *bs: (m - w) / w),
        (OF_MICRO_BATCH, lambda m, w, *bs: (m - w) / _square(m, w, *bs)),
        (TIMES_B, lambda m, w, *bs: bs[0] * (m - w) / w),
        (TIMES_B, lambda m, w, *bs: bs[0] * (m - w) / _square(m, w, *bs)),
    ],
    shown=(
        "The ratio is a batch size, in samples: well below it noise rules "
        "the step, well above it a larger batch changes little."
    ),
)


# The search for a micro-batch


def _peaks(budget: int, global_batch: int) -> Case:
    def peak(size: int) -> int:
        return max(200 + 3 * size, 40 + 11 * size)

    told = "peak(size) = max(200 + 3·size, 40 + 11·size)"
    return Case(
        f"{told}, budget = {budget}, global_batch = {global_batch}",
        lambda: (peak, budget, global_batch),
    )


def _fitting(peak, budget, global_batch) -> int:
    sizes = range(1, global_batch + 1)
    fits = [size for size in sizes if peak(size) <= budget]
    if not fits:
        raise ValueError("not even one sample fits")
    return fits[-1]


def _on_line(peak, budget, global_batch) -> int:
    slope = peak(2) - peak(1)
    return min(1 + (budget - peak(1)) // slope, global_batch)


check_largest_micro_batch = Exercise(
    signature="largest_micro_batch(peak, budget, global_batch)",
    cases=[
        _peaks(485, 1000),
        _peaks(480, 64),
        _peaks(9999, 12),
        _peaks(200, 64),
        _peaks(203, 1),
    ],
    observe=search,
    solution=_fitting,
    mistakes=[
        (
            "where not even one sample fits, a ValueError must be raised; a "
            "size of 0 would go unnoticed.",
            lambda peak, budget, n: 0,
        ),
        (
            "this is a power of two; a size above it fits too.",
            lambda *args: 2 ** int(log2(_fitting(*args))),
        ),
        (
            "this is the first size that does *not* fit: one too many.",
            lambda *args: _fitting(*args) + 1,
        ),
        (
            "a peak of exactly the budget still fits: `<=`, not `<`.",
            lambda peak, budget, n: _fitting(peak, budget - 1, n),
        ),
        (
            "a micro-batch cannot be larger than the global batch: try sizes "
            "up to global_batch only.",
            lambda peak, budget, n: _fitting(peak, budget, n + budget),
        ),
        (
            "global_batch itself is a size to try, and the search ends "
            "below it.",
            lambda peak, budget, n: _fitting(peak, budget, n - 1),
        ),
        ("one sample more would fit.", lambda *args: _fitting(*args) - 1),
        (
            "the whole global batch does not fit the budget.",
            lambda peak, budget, n: n,
        ),
        (
            "this follows the line through the peaks of sizes 1 and 2, but "
            "the peak has a kink: measure the sizes themselves.",
            _on_line,
        ),
        (
            "this takes the peak to be proportional to the size, but part "
            "of it is there at any size.",
            lambda peak, budget, n: min(budget // peak(1), n),
        ),
    ],
    shown=(
        "This is the largest micro-batch, and so the fewest accumulation "
        "steps, that the budget allows."
    ),
)
