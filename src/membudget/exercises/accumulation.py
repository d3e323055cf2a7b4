"""The exercises on accumulation, of its pages and of the lab."""

import torch
import torch.nn.functional as F
from torch import nn

from membudget import accumulation
from membudget.accumulation import IGNORE
from membudget.exercises import loops
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.observe import answer, gradient, search, update

# Weights of what was drawn


def selection_weights(counts, probabilities, draws):
    total = sum(counts)
    return [
        n / total / (draws * p)
        for n, p in zip(counts, probabilities, strict=True)
    ]


check_selection_weights = Exercise(
    selection_weights,
    cases=[
        given(counts=[6, 3, 1], probabilities=[0.5, 0.2, 0.3], draws=2),
        given(counts=[4] * 4, probabilities=[0.1, 0.2, 0.3, 0.4], draws=3),
        given(counts=[5, 2], probabilities=[0.25, 0.75], draws=1),
    ],
    observe=answer,
    mistakes="""
        / (draws * p) => / draws
            a micro-batch that is drawn more often counts more often: divide
            by its probability.
        n / total / (draws * p) => n / total
            these are the shares n/N: divide by how often each is expected to
            be drawn.
        n / total => 1 / len(counts)
            every micro-batch has the share 1/K here; its share of the window
            is n/N.
        n / total => 1 / total
            this is the share of one sample; the micro-batch's mean stands for
            all n of them.
        n / total => 1
            the expected sum is that of all mean gradients: weigh each by its
            share n/N.
        n / total => n
            the counts are not divided by their sum N.
        (draws * p) => p
            this is right for a single draw: there are `draws` of them.
        / (draws * p) => * p / draws
        or / (draws * p) => * p * draws
            the probability is multiplied: what is drawn more often then
            counts even more. Divide by it.
        """,
    shown=(
        "Drawn draws·p times on average, each micro-batch counts n/N in "
        "expectation, whatever the probabilities."
    ),
)


# A loss that compares samples


def cached_backward(model, loss, x, micro_batch):
    with torch.no_grad():
        z = torch.cat([model(part) for part in x.split(micro_batch)])
    z.requires_grad_()
    loss(z).backward()
    parts = zip(x.split(micro_batch), z.grad.split(micro_batch), strict=True)
    for part, g in parts:
        model(part).backward(g)


def _contrast(z: torch.Tensor) -> torch.Tensor:
    scores = z[::2] @ z[1::2].T
    return F.cross_entropy(scores, torch.arange(len(scores)))


def _pairs(number: int, micro_batch: int) -> Case:
    def make() -> tuple:
        x, _ = loops.batch(2 * number)
        return loops.small_model(), _contrast, x, micro_batch

    return Case(f"{number} pairs, {micro_batch} rows at a time", make)


check_cached_backward = Exercise(
    cached_backward,
    cases=[_pairs(4, 2), _pairs(5, 4), _pairs(3, 5)],
    observe=gradient,
    mistakes="""
        model(part).backward(g) => model(part).sum().backward()
            this starts from a gradient of one for each number: start from
            the loss's own gradient for these rows, `backward(g)`.
        model(part).backward(g) => model(part).backward(g * len(part) / len(x))
        or loss(z) => (loss(z) / -(-len(x) // micro_batch))
            the loss is one loss of all rows already, and so is the gradient
            of each embedding: neither needs a weight.
        model(part).backward(g) => loss(model(part)).backward()
            each micro-batch is compared with itself alone: take the gradient
            of the loss of all rows.
        """,
    shown=(
        "The gradient is that of all pairs together, and no graph ever held "
        "more than one micro-batch."
    ),
)

# The gradient of a window


def accumulate(model, x, y, micro_batch):
    for start in range(0, len(x), micro_batch):
        part = slice(start, start + micro_batch)
        loss = F.cross_entropy(model(x[part]), y[part])
        (loss * len(x[part]) / len(x)).backward()


def _batch(size: int, micro_batch: int) -> Case:
    def make() -> tuple:
        x, y = loops.batch(size)
        return loops.small_model(), x, y, micro_batch

    return Case(f"{size} samples in micro-batches of {micro_batch}", make)


check_accumulate = Exercise(
    accumulate,
    cases=[_batch(10, 4), _batch(7, 2), _batch(6, 3), _batch(3, 8)],
    observe=gradient,
    mistakes=f"""
        range(0, len(x), => range(0, len(x) - micro_batch + 1,
        or range(0, len(x), => range(0, len(x) - micro_batch + 1,
        / len(x)) => / (len(x) // micro_batch * micro_batch))
            the samples left over after the last full micro-batch are
            missing: they form a smaller one.
        loss = => model.zero_grad(); loss =
            only the last micro-batch is left in `param.grad`: `zero_grad()`
            inside the loop wipes the others.
        {loops.weighing("len(x[part])", "len(x)", "-(-len(x) // micro_batch)")}
        """,
    shown=(
        "The gradient is that of the whole batch, and never more than one "
        "micro-batch was alive."
    ),
)


def padded_gradient(model, micro_batches):
    total = sum((labels != -100).sum() for _, labels in micro_batches)
    for tokens, labels in micro_batches:
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        (loss / total).backward()


def _pad(labels: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    place = torch.arange(labels.shape[1])
    return labels.where(place < torch.tensor(lengths)[:, None], IGNORE)


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


check_padded_gradient = Exercise(
    padded_gradient,
    cases=[
        _sentences([9, 2], [3, 1, 1], [2, 6]),
        _sentences([4], [1, 1, 2, 1]),
        _sentences([3, 3], [3, 3]),
    ],
    observe=gradient,
    mistakes=f"""
        , reduction="sum" =>
        / total) => / len(micro_batches))
            the mean of each micro-batch is divided by the number of
            micro-batches, so a token among few weighs more than one among
            many: weigh by non-padding tokens.
        , reduction="sum" =>
        / total) => * len(tokens) / sum(len(t) for t, _ in micro_batches))
            the means are weighted by samples, but they are means over
            non-padding tokens: weigh by those.
        , reduction="sum" =>
        total) => sum(y.numel() for _, y in micro_batches) * labels.numel())
            the means are weighted by all tokens: the padding (-100) does not
            count.
        (labels != -100).sum() => labels.numel()
            the summed loss is divided by all tokens: the padding (-100) does
            not count.
        , reduction="sum" =>
        / total) => )
            {loops.NO_DIVISION}
        / total) => )
            {loops.SUMMED}
        / total) => / (labels != -100).sum() ** 2)
            {loops.DIVIDED_AGAIN}
        / total) => / total / len(micro_batches))
            {loops.DIVIDED_TWICE}
        """,
    shown=(
        "The gradient is that of the mean over all non-padding tokens of the "
        "window, however they are grouped."
    ),
)

# An epoch


def train_epoch(model, optimizer, loader, steps):
    for window in accumulation.windows(loader, steps):
        total = sum(len(x) for x, _ in window)
        for x, y in window:
            loss = F.cross_entropy(model(x), y)
            (loss * len(x) / total).backward()
        optimizer.step()
        optimizer.zero_grad()


def _epoch(steps: int, *sizes: int) -> Case:
    def make() -> tuple:
        model = loops.small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, loops.samples(*sizes), steps

    return Case(
        f"micro-batches of {list(sizes)} samples, steps = {steps}", make
    )


WINDOWS = "accumulation.windows(loader, steps)"
LATER = "accumulation.windows(loader[1:], steps)"
FULL = "if len(w) == steps"

check_train_epoch = Exercise(
    train_epoch,
    cases=[
        _epoch(4, 4, 4, 4, 4, 4, 2),
        _epoch(2, 3, 3, 3, 3),
        _epoch(8, 5, 5, 1),
    ],
    observe=update,
    mistakes=f"""
        {WINDOWS} => [w for w in {WINDOWS} {FULL}]
            the last window is dropped when the loader ends in the middle of
            it: step on what is there.
        {WINDOWS} => [loader[:1], *{LATER}]
        or {WINDOWS} => [loader[:1], *(w for w in {LATER} {FULL})]
            the first step comes after a single micro-batch: count from 1, as
            `enumerate(loader, 1)` does.
        {WINDOWS} => [loader]
            the whole epoch is one window: step after every `steps`
            micro-batches.
        * len(x) / total => / steps
            the losses of the last window are divided by `steps`, and it holds
            fewer micro-batches: divide by its own samples.
        / total) => / (steps * len(loader[0][0])))
            the losses of the last window are divided by the samples of a full
            one: divide by its own.
        .backward() => .backward(); optimizer.step(); model.zero_grad()
            the optimizer steps after every micro-batch: step once, after the
            last one of the window.
        optimizer.zero_grad() =>
            the gradients of one window are still there in the next: call
            `optimizer.zero_grad()` after each step.
        {loops.weighing("len(x)", "total", "len(window)")}
        """,
    shown=(
        "The parameters are those of whole batches: every sample of the "
        "epoch counted, those of the partial last window too."
    ),
)

# Formulas


def mean_of_means_error(counts):
    total = sum(counts)
    terms = [(1 / len(counts) - n / total) ** 2 / n for n in counts]
    return (total * sum(terms)) ** 0.5


check_mean_of_means_error = Exercise(
    mean_of_means_error,
    cases=[
        given(counts=[6, 3, 1]),
        given(counts=[512, 32, 64, 128]),
        given(counts=[4, 4]),
    ],
    observe=answer,
    mistakes="""
        ** 0.5 =>
            this is the mean *square*: take the square root.
        total * sum(terms) => sum(terms)
        or total * sum(terms) => sum(terms) / total
            the factor N is missing: without it the error is not relative to
            the noise of the whole batch.
        total * sum(terms) => len(counts) * sum(terms)
            the factor N is the number of samples, not of micro-batches.
        ** 2 / n => ** 2
        or ** 2 / n => ** 2 * n
            the squares are not divided by n_k: the mean over n samples has
            1/n of their variance.
        (1 / len(counts) - n / total) ** 2 => abs(1 / len(counts) - n / total)
            the differences 1/K − n_k/N are not squared.
        """,
    shown=(
        "This is the price of the mean of means in pure noise; it vanishes "
        "for equal counts."
    ),
)


def noise_scale(micro_square, batch_square, micro_batch, batch):
    square = batch * batch_square - micro_batch * micro_square
    square /= batch - micro_batch
    variance = micro_square - batch_square
    variance /= 1 / micro_batch - 1 / batch
    return variance / square


def _noise(square: float, variance: float, b: int, batch: int) -> Case:
    return given(
        micro_square=square + variance / b,
        batch_square=square + variance / batch,
        micro_batch=b,
        batch=batch,
    )


check_noise_scale = Exercise(
    noise_scale,
    cases=[_noise(4, 600, 16, 128), _noise(3, 40, 2, 8)],
    observe=answer,
    mistakes="""
        variance / square => square / variance
            the ratio is upside down: variance over squared gradient.
        variance / square => variance
            this is tr Σ alone: divide it by |G|².
        variance / square => square
            this is |G|² alone: tr Σ divided by it is asked.
        variance / square => variance / batch_square
            tr Σ is right, but |ḡ|² still holds the noise of the batch: divide
            by the corrected |G|².
        variance / square => variance / micro_square
            tr Σ is divided by mean |g_k|², which holds the noise of the
            micro-batches: divide by the corrected |G|².
        variance /= 1 / micro_batch - 1 / batch =>
        or variance /= 1 / micro_batch - 1 / batch => return variance
        or variance /= 1 / micro_batch - 1 / batch => variance /= batch_square
        / square => / 1
            mean |g_k|² − |ḡ|² is about the variance of a micro-batch's
            gradient, not of a sample's: divide it by 1/b − 1/B.
        variance /= 1 / micro_batch - 1 / batch => variance *= micro_batch
        or variance /= 1 / micro_batch - 1 / batch => variance *= micro_batch
        / square => / batch_square
            the variance is b·(mean |g_k|² − |ḡ|²), as if |ḡ|² had no noise
            left: divide the difference by 1/b − 1/B instead.
        """,
    shown=(
        "The ratio is a batch size, in samples: well below it noise rules "
        "the step, well above it a larger batch changes little."
    ),
)

# The search for a micro-batch


def largest_micro_batch(peak, budget, global_batch):
    if peak(1) > budget:
        raise ValueError("not even one sample fits")
    fits, fails = 1, global_batch + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if peak(middle) <= budget:
            fits = middle
        else:
            fails = middle
    return fits


def _peaks(budget: int, global_batch: int) -> Case:
    def peak(size: int) -> int:
        return max(200 + 3 * size, 40 + 11 * size)

    told = "peak(size) = max(200 + 3·size, 40 + 11·size)"
    return Case(
        f"{told}, budget = {budget}, global_batch = {global_batch}",
        lambda: (peak, budget, global_batch),
    )


ON_LINE = "min(1 + (budget - peak(1)) // (peak(2) - peak(1)), global_batch)"

check_largest_micro_batch = Exercise(
    largest_micro_batch,
    cases=[
        _peaks(485, 1000),
        _peaks(480, 64),
        _peaks(9999, 12),
        _peaks(200, 64),
        _peaks(203, 1),
    ],
    observe=search,
    mistakes=f"""
        raise ValueError("not even one sample fits") => return 0
            where not even one sample fits, a ValueError must be raised; a
            size of 0 would go unnoticed.
        return fits => return 2 ** (fits.bit_length() - 1)
            this is a power of two; a size above it fits too.
        return fits => return fails
            this is the first size that does *not* fit: one too many.
        peak(1) > budget => peak(1) >= budget
        peak(middle) <= budget => peak(middle) < budget
            a peak of exactly the budget still fits: `<=`, not `<`.
        global_batch + 1 => global_batch + budget
            a micro-batch cannot be larger than the global batch: try sizes up
            to global_batch only.
        global_batch + 1 => global_batch
            global_batch itself is a size to try, and the search ends below it.
        return fits => return fits - 1
            one sample more would fit.
        return fits => return global_batch
            the whole global batch does not fit the budget.
        return fits => return {ON_LINE}
            this follows the line through the peaks of sizes 1 and 2, but the
            peak has a kink: measure the sizes themselves.
        return fits => return min(budget // peak(1), global_batch)
            this takes the peak to be proportional to the size, but part of it
            is there at any size.
        """,
    shown=(
        "This is the largest micro-batch, and so the fewest accumulation "
        "steps, that the budget allows."
    ),
)
