"""The exercises on sharding: bytes per rank, and steps on two real ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from membudget.exercises.compare import Seen, numbers
from membudget.exercises.core_old import Case, Exercise, variants
from membudget.exercises.guard import kind, uses_arguments
from membudget.exercises.loops_old import (
    mean_loss,
    samples,
    small_model,
    whole,
)
from membudget.exercises.observe import NO_RETURN, calls
from membudget.exercises.on_ranks import RANKS, together
from membudget.models import mlp
from membudget.sharding import (
    CommunicationCounter,
    Unit,
    rank_states,
    rows,
    shard,
    zero_states,
)

EXACT = 1e-12
"""Relative tolerance of what is computed exactly."""

BIT_CLOSE = 1e-6
"""Relative tolerance of fp64 gradients; a weight may be in fp32."""


def alone(*args: object) -> None:
    """Stands for one process that has the data of all ranks."""


def _calls_case(told: str, *arguments: tuple) -> Case:
    """Arguments of several calls."""
    return Case(told, lambda: arguments)


# Bytes per rank

EACH = (2, 2, 12)
"""Bytes of a parameter, its gradient, and its optimizer states."""

SPLIT = {"ddp": "", "zero-1": "o", "zero-2": "go", "zero-3": "pgo"}
"""What is split: parameters, gradients, optimizer states."""


def _right_bytes(count: int, ranks: int, stage: str) -> tuple[int, ...]:
    states = zero_states(count, ranks, stage)
    return states.parameters, states.gradients, states.optimizer


def _rank_bytes(
    count: int,
    ranks: int,
    stage: str,
    each: Sequence[float] = EACH,
    power: int = -1,
    **split: str,
) -> tuple[float, ...]:
    """The bytes, with one thing or another wrong.

    Args:
        count, ranks, stage: of the exercise.
        each: bytes of the three parts for a parameter.
        power: of the ranks, which a split part is multiplied by.
        split: what is split in a stage, if something else; ``zero1`` stands
            for ``"zero-1"``.
    """
    parts = split.get(stage.replace("-", ""), SPLIT[stage])
    return tuple(
        size * count * (ranks**power if name in parts else 1)
        for name, size in zip("pgo", each, strict=True)
    )


FP32_COPY = (
    "the optimizer has 12 bytes for each parameter: two fp32 moments, and "
    "the fp32 copy of the parameter"
)


def _bytes_case(count: int, ranks: int) -> Case:
    return _calls_case(
        f"all stages with numbers = {count}, ranks = {ranks}",
        *[(count, ranks, stage) for stage in SPLIT],
    )


check_rank_bytes = Exercise(
    signature="rank_bytes(numbers, ranks, stage)",
    cases=[_bytes_case(4000, 4), _bytes_case(7_500_000_000, 64)],
    observe=calls(
        lambda count, ranks, stage: f'answer for "{stage}" on {ranks} ranks'
    ),
    solution=_right_bytes,
    mistakes=variants(
        _rank_bytes,
        [
            (
                f"8 bytes are counted for the optimizer: {FP32_COPY}.",
                {"each": (2, 2, 8)},
            ),
            (
                f"4 bytes are counted for the optimizer: {FP32_COPY}.",
                {"each": (2, 2, 4)},
            ),
            (
                "16 bytes are counted for the optimizer: the gradients are "
                "kept in 16 bits only, so 12 are left, two moments and the "
                "fp32 copy.",
                {"each": (2, 2, 16)},
            ),
            (
                "the parameters and gradients of the forward and backward "
                "passes are in 16 bits: 2 bytes each. The fp32 copy belongs "
                "to the optimizer.",
                {"each": (4, 4, 12)},
            ),
            (
                "the parameters and gradients of the forward and backward "
                "passes are in 16 bits: 2 bytes each. The fp32 copy belongs "
                "to the optimizer.",
                {"each": (4, 4, 8)},
            ),
            (
                "DDP splits the batch, and no model state: every rank has "
                "all 16 bytes for each parameter.",
                {"ddp": "pgo"},
            ),
            (
                "ZeRO-1 is DDP here: it splits the optimizer states.",
                {"zero1": ""},
            ),
            (
                "ZeRO-1 splits the optimizer states, and nothing else: "
                "splitting the gradients, too, is ZeRO-2.",
                {"zero1": "go"},
            ),
            (
                "ZeRO-1 begins with the largest part, the optimizer states, "
                "not with the gradients.",
                {"zero1": "g"},
            ),
            (
                "ZeRO-1 begins with the largest part, the optimizer states, "
                "not with the parameters.",
                {"zero1": "p"},
            ),
            (
                "ZeRO-2 leaves the parameters whole on every rank: splitting "
                "them, too, is ZeRO-3.",
                {"zero2": "pgo"},
            ),
            (
                "ZeRO-2 splits the gradients as well as the optimizer states.",
                {"zero2": "o"},
            ),
            (
                "each stage splits what the one before it does, and one part "
                "more: ZeRO-2 gradients and optimizer states.",
                {"zero2": "g"},
            ),
            (
                "ZeRO-3 splits all three parts: with the parameters the "
                "gradients and the optimizer states.",
                {"zero3": "p"},
            ),
            (
                "ZeRO-3 splits the parameters, too.",
                {"zero3": "go"},
            ),
            (
                "each stage splits what the one before it does, and one part "
                "more.",
                {"zero2": "g", "zero3": "p"},
            ),
            (
                "what is split is divided by the ranks, and not multiplied.",
                {"power": 1},
            ),
            (
                "every part is divided by the ranks in every stage, DDP "
                "included: only what the stage splits is.",
                {"ddp": "pgo", "zero1": "pgo", "zero2": "pgo"},
            ),
            (
                "every part is divided by the ranks in every stage of ZeRO: "
                "that is ZeRO-3 alone.",
                {"zero1": "pgo", "zero2": "pgo"},
            ),
            (
                "these are numbers of parameters, moments and so on; each "
                "takes 2 or 4 bytes.",
                {"each": (1, 1, 3)},
            ),
        ],
    ),
    shown=(
        "These are the paper's 16, 4 + 12/N, 2 + 14/N and 16/N bytes for "
        "each parameter. With 7.5 billion of them on 64 ranks that is 120, "
        "31.4, 16.6 and 1.9 GB."
    ),
    tolerance=EXACT,
)


# Rows of a shard


def _stored_rows(
    length: int,
    ranks: int,
    rank: int,
    each: Callable[[int, int], int] = lambda n, ranks: -(-n // ranks),
    least: float = 0,
    own: Callable[[int, int, int], int] | None = None,
    stored: Callable[[int, int], int] = lambda own, each: each,
    first: int = 0,
) -> tuple[float, ...]:
    """Own and stored rows, with one thing or another wrong.

    Args:
        length, ranks, rank: of the exercise.
        each: rows of a full shard, from rows and ranks.
        least: a rank has no fewer rows.
        own: rows of a rank, if others.
        stored: rows that are stored, from those of the rank and of a full
            shard.
        first: number of the first rank.
    """
    n = each(length, ranks)
    mine = max(min(n, length - (rank - first) * n), least)
    if own:
        mine = own(length, ranks, rank)
    return mine, stored(mine, n)


def _right_rows(length: int, ranks: int, rank: int) -> tuple[int, int]:
    return rows(length, ranks, rank), rows(length, ranks, 0)


def _last_has_the_rest(length: int, ranks: int, rank: int) -> int:
    each = length // ranks
    return each + (length % ranks if rank == ranks - 1 else 0)


def _evenly(length: int, ranks: int, rank: int) -> int:
    return length // ranks + (rank < length % ranks)


EQUAL = (
    "every rank stores as many rows as rank 0: the collectives move equal "
    "parts, so what is missing is padding"
)
CHUNK = (
    "`torch.chunk` gives ⌈rows / ranks⌉ to each rank until none are left: "
    "the last ranks have fewer, or none"
)


def _rows_case(length: int, ranks: int) -> Case:
    return _calls_case(
        f"all ranks with rows = {length}, ranks = {ranks}",
        *[(length, ranks, rank) for rank in range(ranks)],
    )


check_stored_rows = Exercise(
    signature="stored_rows(rows, ranks, rank)",
    cases=[
        _calls_case(
            "rows = 10 on 4 ranks, rows = 5 on 4 ranks, rows = 3 on 8 ranks",
            *[(10, 4, rank) for rank in range(4)],
            *[(5, 4, rank) for rank in range(4)],
            *[(3, 8, rank) for rank in range(8)],
        ),
        _rows_case(8, 4),
        _rows_case(50257, 64),
        _rows_case(9, 8),
        _rows_case(7, 1),
    ],
    observe=calls(
        lambda length, ranks, rank: (
            f"answer for {length} rows on rank {rank} of {ranks}"
        )
    ),
    solution=_right_rows,
    mistakes=[
        (
            f"the rank's own rows are stored and nothing more: {EQUAL}.",
            partial(_stored_rows, stored=lambda own, each: own),
        ),
        (
            "a rank without rows still stores a shard of padding: the "
            "collectives move equal parts.",
            partial(_stored_rows, stored=lambda own, each: each if own else 0),
        ),
        (
            "a rank beyond the last row has 0 rows of its own, not fewer.",
            partial(_stored_rows, least=-torch.inf),
        ),
        (
            "every rank has a full shard here: the rows must add up to those "
            f"of the parameter. {CHUNK}.",
            partial(_stored_rows, own=lambda n, ranks, rank: -(-n // ranks)),
        ),
        (
            f"here the last rank has the rest. {CHUNK}.",
            partial(_stored_rows, own=_last_has_the_rest),
        ),
        (
            f"here the last rank has the rest. {CHUNK}.",
            partial(
                _stored_rows,
                own=_last_has_the_rest,
                stored=lambda own, each: own,
            ),
        ),
        (
            "here the first ranks have one row more than the others, which "
            f"would be fairer. {CHUNK}.",
            partial(_stored_rows, own=_evenly),
        ),
        (
            "here the first ranks have one row more than the others, which "
            f"would be fairer. {CHUNK}.",
            partial(_stored_rows, own=_evenly, stored=lambda own, each: own),
        ),
        (
            "rows / ranks is rounded down, and rows are lost: round up.",
            partial(_stored_rows, each=lambda n, ranks: n // ranks),
        ),
        (
            "ranks are numbered from 0.",
            partial(_stored_rows, first=1),
        ),
        (
            "that is one row too many where the ranks divide the rows: round "
            "up, with -(-rows // ranks).",
            partial(_stored_rows, each=lambda n, ranks: n // ranks + 1),
        ),
    ],
    shown=(
        "That is what FSDP2 holds, to the row: all ranks store the same, and "
        "with more ranks than rows some store padding only."
    ),
    tolerance=EXACT,
)


# Bytes of shards (lab 4)


def _right_shard_bytes(
    shapes: Sequence[tuple[int, ...]], ranks: int, rank: int
) -> tuple[int, int, int]:
    held = rank_states([Unit("", tuple(shapes))], ranks, rank)
    return held.parameters, held.gradients, held.optimizer


def _shard_bytes(
    shapes: Sequence[tuple[int, ...]],
    ranks: int,
    rank: int,
    padded: str = "pg",
    moments: int = 2,
    counter: int = 4,
    size: int = 4,
    uncut: str = "",
    flat: bool = False,
    mean: bool = False,
    idle: bool = True,
) -> tuple[float, float, float]:
    """The bytes, with one thing or another wrong.

    Args:
        shapes, ranks, rank: of the exercise.
        padded: which parts have padding, of ``"pgo"``.
        moments, counter: numbers per parameter and bytes per tensor of Adam.
        size: bytes of a number.
        uncut: which parts are not cut.
        flat: whether all numbers of a tensor are cut, instead of its rows.
        mean: whether everything is divided by the ranks, without rounding.
        idle: whether Adam has counters on a rank that owns no row.
    """

    def numbers(part: str) -> float:
        total = 0.0
        for shape in shapes:
            length, each = (
                (prod(shape), 1) if flat else (shape[0], prod(shape[1:]))
            )
            if part in uncut:
                count: float = length
            elif mean:
                count = length / ranks
            else:
                first = 0 if part in padded else rank
                count = rows(length, ranks, first)
            total += count * each
        return total

    return (
        size * numbers("p"),
        size * numbers("g"),
        moments * size * numbers("o")
        + counter * len(shapes) * (idle or numbers("o") > 0),
    )


def _shards_case(shapes: Sequence[tuple[int, ...]], ranks: int) -> Case:
    return Case(
        f"all ranks with shapes = {list(shapes)}, ranks = {ranks}",
        lambda: tuple((list(shapes), ranks, rank) for rank in range(ranks)),
    )


check_shard_bytes = Exercise(
    signature="shard_bytes(shapes, ranks, rank)",
    cases=[
        _shards_case([(10, 8), (10,), (3, 10), (3,)], 4),
        _shards_case([(16, 3, 3, 3), (16,), (1, 5)], 3),
        _shards_case([(64, 64), (64,)], 4),
        _shards_case([(1, 4), (1,)], 3),
        _shards_case([(7, 2)], 1),
        _shards_case([], 2),
    ],
    observe=calls(
        lambda shapes, ranks, rank: f"answer for rank {rank} of {ranks}"
    ),
    solution=_right_shard_bytes,
    mistakes=variants(
        _shard_bytes,
        [
            (
                "only the rank's own rows are counted for parameters and "
                "gradients: they are stored with padding, as many rows as "
                "rank 0 has.",
                {"padded": ""},
            ),
            (
                "gradients are stored with padding, as the parameters are.",
                {"padded": "p"},
            ),
            (
                "Adam's moments have no padding: they have the rank's own "
                "rows.",
                {"padded": "pgo"},
            ),
            (
                "padding and own rows are the wrong way round: parameters "
                "and gradients are padded, Adam's moments are not.",
                {"padded": "o"},
            ),
            (
                "Adam also counts its steps: 4 bytes for each parameter "
                "tensor, on every rank.",
                {"counter": 0},
            ),
            (
                "a rank that owns no row has Adam's counters all the same, "
                "4 bytes for each tensor.",
                {"idle": False},
            ),
            (
                "the counter of steps has 4 bytes for each tensor, not 8.",
                {"counter": 8},
            ),
            (
                "Adam keeps two numbers for each parameter, here there is "
                "one.",
                {"moments": 1},
            ),
            (
                "Adam keeps two numbers for each parameter; an fp32 copy is "
                "there only if the parameters themselves have 16 bits.",
                {"moments": 3},
            ),
            (
                "these are numbers, not bytes: in fp32 each takes 4.",
                {"size": 1},
            ),
            ("a number in fp32 takes 4 bytes, not 2.", {"size": 2}),
            (
                "parameters and gradients are cut, too: this is ZeRO-1.",
                {"uncut": "pg"},
            ),
            (
                "the parameters are cut, too, between the steps.",
                {"uncut": "p"},
            ),
            (
                "FSDP2 cuts along the first dimension: whole rows, not "
                "single numbers.",
                {"flat": True},
            ),
            (
                "the whole is divided by the ranks: rows are not, they are "
                "cut into whole ones, and rounded up.",
                {"mean": True},
            ),
        ],
    ),
    shown=(
        "That is what rank_states computes and what a real rank holds. It "
        "says nothing of what is gathered, nor of activations."
    ),
    tolerance=1e-12,
)


# Gradients averaged by hand


def _averaging(
    fn: Callable, sizes: Sequence[int], frozen: bool, told: bool
) -> dict:
    """One rank's part: its backward pass, then the reader's function.

    Args:
        fn: called with the model.
        sizes: samples of each rank.
        frozen: whether the first layer is.
        told: whether the function gets this rank's number of samples, too.
    """
    model, shares = _averaging_start(sizes, frozen)
    rank = dist.get_rank()
    mean_loss(model, shares[rank]).backward()
    own, weights = _gradients(model), _weights(model)
    unused = [p for p in model.parameters() if p.grad is None]
    result = fn(model, sizes[rank]) if told else fn(model)
    left = _gradients(model)
    return {
        "left": left,
        "filled": any(p.grad is not None for p in unused),
        "as it was": left is not None and torch.equal(left, own),
        "weights moved": not torch.equal(_weights(model), weights),
        "returned": _returned(result),
    }


def _averaging_start(
    sizes: Sequence[int], frozen: bool
) -> tuple[nn.Module, list]:
    torch.manual_seed(0)
    model = small_model()
    if frozen:
        model[0].requires_grad_(False)
    return model, samples(*sizes)


def _observe_averaging(fn: Callable, args: tuple) -> Seen:
    """The gradient that each rank has at the end."""
    sizes, frozen, _ = args
    names = [f"gradient on rank {rank}" for rank in range(len(sizes))]
    if fn is alone:
        model, shares = _averaging_start(sizes, frozen)
        mean_loss(model, whole(shares)).backward()
        return Seen(dict.fromkeys(names, _gradients(model)))
    reports = together(_averaging, fn, *args, ranks=len(sizes))
    if isinstance(reports, Seen):
        return reports
    found = [report.result for report in reports]
    called = any(report.calls for report in reports)
    if any(f["weights moved"] for f in found):
        return Seen(
            hint="the parameters have changed: only the gradients are asked, "
            "in `p.grad`. The parameters are equal on all ranks as long as "
            "the gradients are."
        )
    if any(f["filled"] for f in found):
        return Seen(
            hint="a parameter that has no gradient has got one: its `p.grad` "
            "must stay None. An optimizer with momentum or weight decay "
            "moves whatever has a gradient, also one of zero."
        )
    if any(f["left"] is None for f in found):
        return Seen(
            hint="there is no gradient in `p.grad` at the end, or it has "
            "another shape."
        )
    seen = Seen({n: f["left"] for n, f in zip(names, found, strict=True)})
    if len(sizes) > 1 and all(f["as it was"] for f in found):
        returned = next((f["returned"] for f in found if f["returned"]), "")
        if not called and not returned:
            return Seen(attempted=False)
        seen.hint = (
            "each rank still has the gradient of its own share in `p.grad`. "
        )
        seen.hint += (
            "`all_reduce` works in place: give it `p.grad` itself, neither "
            "a copy nor the parameter."
            if called
            else f"Your function returns {returned} instead."
            if returned
            else ""
        )
    return seen


def _averages(
    model: nn.Module,
    count: int = 0,
    weigh: str = "mean",
    how: str = "all-reduce",
    only: str = "",
    reduction: str = "SUM",
) -> None:
    """All-reduce the gradients, with one thing or another wrong.

    Args:
        model: after its backward pass.
        count: samples of this rank.
        weigh: what each gradient is multiplied by before the sum, by name.
        how: the collective.
        only: which parameters take part: all, the ``"first"``, the
            ``"last"``, or those that are a ``"matrix"``.
        reduction: of :class:`torch.distributed.ReduceOp`.
    """
    ranks = dist.get_world_size()
    total = torch.tensor(count)
    dist.all_reduce(total)
    weight = {
        "mean": 1 / ranks,
        "half": 1 / 2,
        "sum": 1,
        "twice": 1 / ranks**2,
        "share": count / max(total.item(), 1),
        "count": count,
        "share of mean": count / max(total.item(), 1) / ranks,
        "inverse": 1 - count / max(total.item(), 1),
        "divided": 1 / max(count, 1),
        "divided by all": 1 / max(total.item(), 1),
        "count of mean": count / ranks,
    }[weigh]
    trained = [p for p in model.parameters() if p.grad is not None]
    chosen = {
        "": trained,
        "first": trained[:1],
        "last": trained[-1:],
        "matrix": [p for p in trained if p.ndim > 1],
    }[only]
    for p in chosen:
        p.grad *= weight
        if how == "all-reduce":
            dist.all_reduce(p.grad, getattr(dist.ReduceOp, reduction))
        elif how == "broadcast":
            dist.broadcast(p.grad, 0)
        elif how == "reduce":
            dist.reduce(p.grad, 0)


def _averaging_case(
    sizes: tuple[int, ...], frozen: bool = False, told: bool = False
) -> Case:
    words = f"{' and '.join(map(str, sizes))} samples on ranks 0 and 1"
    if len(sizes) == 1:
        words = f"{sizes[0]} samples on a single rank"
    if frozen:
        words += "; the first layer is frozen, and its `p.grad` is None"
    return Case(words, lambda: (sizes, frozen, told))


ALL_PARAMETERS = "every parameter of the model needs an all-reduce."

check_average_gradients = Exercise(
    signature="average_gradients(model)",
    cases=[
        _averaging_case((3, 3)),
        _averaging_case((4, 4), frozen=True),
        _averaging_case((3,)),
    ],
    observe=_observe_averaging,
    solution=alone,
    mistakes=[
        (
            "the gradients are added up and not divided: the mean over all "
            "samples is the mean of the ranks' means, so divide by the "
            "number of ranks.",
            partial(_averages, weigh="sum"),
        ),
        (
            "the sum is divided by 2, however many ranks there are: "
            "`dist.get_world_size()` is their number.",
            partial(_averages, weigh="half"),
        ),
        (
            "the gradients are divided by the number of ranks twice, before "
            "and after the sum, or once more than `all_reduce` needs.",
            partial(_averages, weigh="twice"),
        ),
        (
            "each rank divides its own gradient, and nothing is added up: "
            "`dist.all_reduce(p.grad)` makes the sum over the ranks.",
            partial(_averages, how="none"),
        ),
        (
            "both ranks have the gradient of rank 0: a broadcast copies it, "
            "and the samples of the others are lost. `all_reduce` adds up.",
            partial(_averages, weigh="sum", how="broadcast"),
        ),
        (
            "both ranks have a part of rank 0's gradient: a broadcast copies "
            "it, and the samples of the others are lost. `all_reduce` adds "
            "up.",
            partial(_averages, how="broadcast"),
        ),
        (
            "only rank 0 has the result: `dist.reduce` gives it to one rank, "
            "`dist.all_reduce` to all.",
            partial(_averages, how="reduce"),
        ),
        (
            "only rank 0 has a sum: `dist.reduce` gives it to one rank, "
            "`dist.all_reduce` to all.",
            partial(_averages, weigh="sum", how="reduce"),
        ),
        (
            "this takes the larger of the ranks' numbers: `all_reduce` adds "
            "up unless it is told otherwise.",
            partial(_averages, weigh="sum", reduction="MAX"),
        ),
        *[
            (f"{text}: {ALL_PARAMETERS}", partial(_averages, **change))
            for text, only in (
                ("only the first parameter is averaged", "first"),
                ("only the last parameter is averaged", "last"),
                ("the biases are left out", "matrix"),
            )
            for change in ({"only": only}, {"only": only, "weigh": "sum"})
        ],
    ],
    shown=(
        "All ranks have the gradient that one process has on all samples. "
        "What is still needed for equal weights: the same start and the same "
        "optimizer."
    ),
    tolerance=BIT_CLOSE,
)

check_weighted_average = Exercise(
    signature="weighted_average(model, samples)",
    cases=[
        _averaging_case((5, 2), told=True),
        _averaging_case((1, 6), told=True),
    ],
    observe=_observe_averaging,
    solution=alone,
    mistakes=[
        (
            "each rank weighs 1/N. That is right only for equal shares: a "
            "mean over n of all samples weighs n / all.",
            partial(_averages, weigh="mean"),
        ),
        (
            "the gradients are added up as they are: a mean over n of all "
            "samples weighs n / all.",
            partial(_averages, weigh="sum"),
        ),
        (
            "the gradients are weighted by n / all and divided by the number "
            "of ranks as well: n / all alone is the weight.",
            partial(_averages, weigh="share of mean"),
        ),
        (
            "the gradients are multiplied by the samples of their rank, and "
            "never divided by those of all ranks.",
            partial(_averages, weigh="count"),
        ),
        (
            "the gradients are multiplied by the samples of their rank and "
            "divided by the number of ranks: divide by the samples of all "
            "ranks instead.",
            partial(_averages, weigh="count of mean"),
        ),
        (
            "the smaller share has the larger weight here: it is n / all, "
            "with n of the rank itself.",
            partial(_averages, weigh="inverse"),
        ),
        (
            "each gradient is divided by the samples of its rank: it is a "
            "mean already, and counts n / all.",
            partial(_averages, weigh="divided"),
        ),
        (
            "the gradients are divided by all samples, and not multiplied by "
            "those of their rank first: they are means, not sums.",
            partial(_averages, weigh="divided by all"),
        ),
        (
            "each rank weighs its gradient, and nothing is added up: "
            "`dist.all_reduce(p.grad)` makes the sum over the ranks.",
            partial(_averages, weigh="share", how="none"),
        ),
        (
            "only rank 0 has the result: `dist.reduce` gives it to one rank, "
            "`dist.all_reduce` to all.",
            partial(_averages, weigh="share", how="reduce"),
        ),
    ],
    shown=(
        "Every sample of the batch counts the same, whichever rank it is on. "
        "DDP and FSDP2 average over the ranks: with unequal shares they "
        "count the samples of the smaller one more."
    ),
    tolerance=BIT_CLOSE,
)


# A step whose ranks drift apart


def _stepping(fn: Callable, steps: int, broken: int | None) -> dict:
    """One rank's part: some steps with the reader's function."""
    model, optimizer, windows = _stepping_start(steps, broken)
    start, after = _weights(model), []
    averaged = 0

    def average(tensor: torch.Tensor) -> None:
        nonlocal averaged
        averaged += 1
        with torch.no_grad():
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()

    returned = ""
    touched = False
    for shares in windows:
        result = fn(model, optimizer, *shares[dist.get_rank()], average)
        returned = returned or _returned(result)
        touched = touched or any(
            p.grad is not None for p in model.parameters()
        )
        after.append(_weights(model) - start)
    return {
        "after": after,
        "averaged": averaged,
        "idle": not touched and not averaged and not after[-1].any(),
        "returned": returned,
    }


def _stepping_start(
    steps: int, broken: int | None
) -> tuple[nn.Module, torch.optim.Optimizer, list]:
    """Model, optimizer, and the shares of both ranks for each step.

    Args:
        steps: how many.
        broken: the step whose first sample on rank 1 is no number.
    """
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    windows = [  # the gradients of every second step are short
        [((1 if step % 2 else 4) * x, y) for x, y in samples(4, 4)]
        for step in range(steps)
    ]
    if broken is not None:
        windows[broken][1][0][0] = torch.nan
    return model, optimizer, windows


def _observe_stepping(fn: Callable, args: tuple) -> Seen:
    """What the steps add to the weights of each rank."""
    names = [f"update of the weights on rank {rank}" for rank in range(2)]
    if fn is alone:
        model, optimizer, windows = _stepping_start(*args)
        start = _weights(model)
        for shares in windows:
            _in_step(model, optimizer, *whole(shares), lambda tensor: None)
        return Seen(dict.fromkeys(names, _weights(model) - start))
    reports = together(_stepping, fn, *args)
    if isinstance(reports, Seen):
        return reports
    found = [report.result for report in reports]
    if all(f["idle"] for f in found):
        return _nothing(found[0]["returned"])
    first, second = (f["after"] for f in found)
    seen = Seen({names[0]: first[-1], names[1]: second[-1]})
    apart = [
        step
        for step, (a, b) in enumerate(zip(first, second, strict=True))
        if not torch.allclose(a, b, rtol=0, atol=1e-9, equal_nan=True)
    ]
    if apart:
        seen.hint = (
            f"after step {apart[0]} the weights of the ranks differ, and "
            "nothing brings them together again: what depends on a rank's "
            "own data must be averaged before it decides or changes "
            "anything."
        )
    elif first[-1].isnan().any():
        seen.hint = (
            "the weights of both ranks are no numbers any more: a step whose "
            "gradients are not finite must be left out on both."
        )
    return seen


def _in_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    average: Callable[[torch.Tensor], None],
    order: str = "average clip",
    decide: str = "gradient",
) -> None:
    """A step, with one thing or another wrong.

    Args:
        model, optimizer, x, y, average: of the exercise.
        order: actions after the backward pass.
        decide: what must be finite for a step: this rank's ``"loss"``, the
            ``"gradient"`` at the end, or nothing.
    """
    loss = mean_loss(model, (x, y))
    loss.backward()

    def each(change: Callable[[nn.Parameter], object]) -> None:
        with torch.no_grad():
            for p in model.parameters():
                change(p)

    actions = {
        "average": lambda: each(lambda p: average(p.grad)),
        "clip": lambda: clip_grad_norm_(model.parameters(), 1.0),
        "halve": lambda: each(lambda p: p.grad.div_(RANKS)),
    }
    for name in order.split():
        actions[name]()
    finite = {
        "loss": loss.isfinite(),
        "gradient": all(p.grad.isfinite().all() for p in model.parameters()),
        "": True,
    }[decide]
    if finite:
        optimizer.step()
    optimizer.zero_grad()


def _step_case(steps: int, broken: int | None = None) -> Case:
    words = f"{steps} steps on 2 ranks"
    if broken is not None:
        words += f"; in step {broken} a sample of rank 1 is NaN"
    return Case(words, lambda: (steps, broken))


LOCAL_CLIP = (
    "the ranks agree with each other and not with one process. What changes "
    "a gradient by the numbers of its own rank alone has no place before the "
    "average."
)
OWN_LOSS = (
    "each rank decides by its own loss whether it steps. With the average "
    "the NaN of one rank reaches the gradients of all, and the rank whose "
    "own loss is finite steps with it: decide by something that is equal on "
    "all ranks."
)
check_in_step = Exercise(
    signature="in_step(model, optimizer, x, y, average)",
    cases=[_step_case(3), _step_case(3, 2), _step_case(3, 1)],
    observe=_observe_stepping,
    solution=alone,
    mistakes=[
        (LOCAL_CLIP, partial(_in_step, order="clip average")),
        (
            "the gradients are not averaged: each rank trains a model of its "
            "own.",
            partial(_in_step, order="clip"),
        ),
        (
            "the gradients are not averaged: each rank trains a model of its "
            "own.",
            partial(_in_step, order="clip", decide="loss"),
        ),
        (
            "the gradient is not clipped: the norm may be 1.0 at most, after "
            "the average.",
            partial(_in_step, order="average"),
        ),
        (
            "`average` divides by the number of ranks already: it makes the "
            "mean.",
            partial(_in_step, order="average halve clip"),
        ),
        (OWN_LOSS, partial(_in_step, decide="loss")),
        (
            "after the step with the NaN no weight of either rank is a number "
            "any more: leave that step out, on both.",
            partial(_in_step, decide=""),
        ),
    ],
    shown=(
        "Both ranks have the weights of one process, after every step. What "
        "decides or changes something comes after the average, so that it is "
        "the same on all ranks."
    ),
    tolerance=BIT_CLOSE,
)


# Accumulation with deferred synchronisation

UNITS = 3
"""What ``fully_shard`` is called on: two layers and the model."""

STEPS = 2
"""So that what the first leaves behind is seen in the second."""


def _accumulating(fn: Callable, count: int) -> dict:
    """One rank's part: two steps with FSDP2, each of ``count`` micro-batches.

    One of the model's parameters has three rows, on two ranks.
    """
    model, windows = _accumulating_start(count)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard(model, [model[0], model[2]], mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start, rank = _weights(model), dist.get_rank()
    scattered, returned, forward, backward = [], "", [], []

    def watch(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        forward.append(module)
        if output.requires_grad:
            output.register_hook(lambda grad: backward.append(module))

    with model[-1].register_forward_hook(watch):
        for shares in windows:
            with CommunicationCounter() as counter:
                result = fn(model, optimizer, shares[rank])
            scattered.append(counter.traffic["reduce-scatter"].calls)
            returned = returned or _returned(result)
    return {
        "update": _weights(model) - start,
        "scattered": scattered,
        "forward": len(forward),
        "backward": len(backward),
        "returned": returned,
    }


def _accumulating_start(count: int) -> tuple[nn.Module, list]:
    """The model, and the micro-batches of both ranks for each step."""
    torch.manual_seed(0)
    model = mlp(inputs=4, width=8, depth=3, outputs=3).double()
    windows = [
        [samples(*[2] * count) for _ in range(RANKS)] for _ in range(STEPS)
    ]
    return model, windows


def _observe_accumulating(fn: Callable, args: tuple) -> Seen:
    """What two steps add to the weights, and how often units are reduced."""
    name, (count,) = "update of the weights", args
    if fn is alone:
        model, windows = _accumulating_start(count)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        start = _weights(model)
        for first, second in windows:
            mean_loss(model, *first, *second).backward()
            optimizer.step()
            optimizer.zero_grad()
        return Seen({name: _weights(model) - start})
    reports = together(_accumulating, fn, *args)
    if isinstance(reports, Seen):
        if reports.hint and "'no_sync'" in reports.hint:
            reports.hint += (
                " FSDP2 has no `no_sync()`: it has "
                "`model.set_requires_gradient_sync(…)`."
            )
        return reports
    found = reports[0].result
    if not found["forward"] and not found["update"].any():
        return _nothing(found["returned"])
    seen = Seen({name: found["update"]})
    calls = found["scattered"]
    if not found["backward"]:
        seen.hint = "no backward pass runs: call `backward()` on each loss."
    elif found["forward"] < STEPS * count:
        seen.hint = (
            "several micro-batches run in one forward pass: then all their "
            "activations are there at once, which is what accumulation "
            "avoids. Each needs a forward and a backward pass of its own."
        )
    elif calls == [0] * STEPS:
        seen.hint = NEVER
    elif not found["update"].any():
        seen.hint = (
            "the optimizer does not step: the parameters stay as they are."
        )
    elif calls != [UNITS] * STEPS:
        seen.hint = (
            f"there are {' and '.join(map(str, calls))} reduce-scatters in "
            f"the two steps: the model has {UNITS} units, and each step "
            f"needs to reduce each unit once, {UNITS} in all. Turn the "
            "synchronisation off, with `set_requires_gradient_sync(False)`, "
            "for all micro-batches but the last."
        )
    return seen


def _accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    sync: str = "last",
    weigh: str = "mean",
    each: str = "",
    end: str = "step wipe",
) -> None:
    """Accumulate and step, with one thing or another wrong.

    Args:
        model, optimizer, micro_batches: of the exercise.
        sync: which micro-batches reduce the gradients.
        weigh: what each loss is multiplied by, by name.
        each: actions after each micro-batch.
        end: actions after the last one.
    """
    count = len(micro_batches)
    actions = {"step": optimizer.step, "wipe": optimizer.zero_grad}
    for i, (x, y) in enumerate(micro_batches):
        model.set_requires_gradient_sync(
            {
                "last": i == count - 1,
                "first": i == 0,
                "not last": i < count - 1,
                "all": True,
            }[sync]
        )
        weight = {
            "mean": 1 / count,
            "sum": 1,
            "ranks": 1 / RANKS,
            "both": 1 / count / RANKS,
            "times ranks": RANKS / count,
        }[weigh]
        (mean_loss(model, (x, y)) * weight).backward()
        for name in each.split():
            actions[name]()
    for name in end.split():
        actions[name]()


NEVER = (
    "there is no reduce-scatter: the gradients of all micro-batches wait, "
    "whole on each rank, and the optimizer has none. Turn the "
    "synchronisation on again for the last one, before its backward pass."
)
ADDED_UP = (
    "the losses are not divided by the number of micro-batches: the "
    "gradients of all are added up."
)
RANKS_TWICE = (
    "FSDP2 divides by the number of ranks already, when it reduces: your "
    "loss is divided by it as well. The number of micro-batches alone is "
    "left."
)
STEP_EACH = (
    "the optimizer steps after every micro-batch: step once, after the last."
)

check_accumulate_sharded = Exercise(
    signature="accumulate_sharded(model, optimizer, micro_batches)",
    cases=[
        Case(
            f"{STEPS} steps with {count} micro-batch{'es' * (count > 1)} on "
            "each of 2 ranks",
            lambda count=count: (count,),
        )
        for count in (3, 1)
    ],
    observe=_observe_accumulating,
    solution=alone,
    mistakes=[
        (
            "only the last micro-batch is not synchronised: what waits is "
            "reduced with the next backward pass that synchronises, so the "
            "last one must.",
            partial(_accumulate, sync="not last"),
        ),
        (
            "the first micro-batch is synchronised, and the others wait for "
            "one that never comes in this step: the last one must be it.",
            partial(_accumulate, sync="first"),
        ),
        (ADDED_UP, partial(_accumulate, weigh="sum")),
        (ADDED_UP, partial(_accumulate, weigh="sum", sync="all")),
        (RANKS_TWICE, partial(_accumulate, weigh="both")),
        (RANKS_TWICE, partial(_accumulate, weigh="both", sync="all")),
        (
            "the losses are divided by the number of ranks, which FSDP2 does "
            "itself: divide by the number of micro-batches.",
            partial(_accumulate, weigh="ranks"),
        ),
        (
            "the losses are multiplied by the number of ranks: what FSDP2 "
            "divides by it are the sums over the ranks, which is right.",
            partial(_accumulate, weigh="times ranks"),
        ),
        (
            STEP_EACH,
            partial(_accumulate, sync="all", each="step wipe", end=""),
        ),
        (
            STEP_EACH,
            partial(
                _accumulate, sync="all", weigh="sum", each="step wipe", end=""
            ),
        ),
        (
            "the gradients are not wiped after the step, and the next step "
            "adds to them.",
            partial(_accumulate, end="step"),
        ),
    ],
    shown=(
        "The weights are those of one process on all samples, and each unit "
        "was reduced once in each step. The price: until then every rank "
        "holds whole gradients."
    ),
    tolerance=BIT_CLOSE,
)


# The fewest ranks

NONE = 0.5
"""Stands for None among numbers of ranks."""


def _fewest(fn: Callable, args: tuple) -> Seen:
    """A number of ranks or None, for each of several calls."""
    results = [fn(*call) for call in args]
    if all(result is None for result in results):
        if uses_arguments(fn):
            return Seen(hint=NO_RETURN)
        return Seen(attempted=False)
    if any(result in (..., NotImplemented) for result in results[:1]):
        return Seen(attempted=False)
    parts = {}
    for (count, stage, card, rest), result in zip(args, results, strict=True):
        try:
            found = torch.as_tensor(
                NONE if result is None else result, dtype=torch.float64
            ).detach()
        except Exception:
            return Seen(
                hint=f"your function returns {kind(result)}: a number of "
                "ranks is needed, or None."
            )
        name = (
            f"answer for {count / 1e9:g} billion parameters, {stage}, cards "
            f"of {card / 1e9:g} GB and a rest of {rest / 1e9:g} GB"
        )
        parts[name] = found
    return Seen(
        parts,
        said=lambda x: (
            "None" if x.numel() == 1 and x.item() == NONE else numbers(x)
        ),
    )


def _fewest_ranks(
    count: int,
    stage: str,
    card: float,
    rest: float,
    each: Sequence[float] = EACH,
    share: Callable[[float, int], float] = lambda rest, ranks: rest,
    fits: Callable[[float, float], bool] = lambda need, card: need <= card,
    powers: Sequence[int] = range(11),
    as_stage: Callable[[str], str] = lambda stage: stage,
    none: int | None = None,
    result: Callable[[int], int] = lambda power: 2**power,
) -> int | None:
    """The fewest ranks, with one thing or another wrong.

    Args:
        count, stage, card, rest: of the exercise.
        each: bytes of parameter, gradient and optimizer states.
        share: a rank's part of the rest.
        fits: whether so many bytes fit into a card.
        powers: of two that are tried.
        as_stage: what is computed for a stage.
        none: the answer if nothing fits.
        result: the answer, from the power.
    """
    for power in powers:
        ranks = 2**power
        need = sum(_rank_bytes(count, ranks, as_stage(stage), each))
        if fits(need + share(rest, ranks), card):
            return result(power)
    return none


def _right_ranks(
    count: int, stage: str, card: float, rest: float
) -> int | None:
    for power in range(11):
        states = zero_states(count, 2**power, stage)
        if states.total + rest <= card:
            return 2**power
    return None


def _cards(*rows: tuple[float, str, float, float]) -> Case:
    """Billions of parameters, stage, GB of a card and of the rest."""
    told = "; ".join(
        f"{count:g} billion, {stage}, {card:g} and {rest:g} GB"
        for count, stage, card, rest in rows
    )
    giga = 10**9
    calls = [
        (round(n * giga), stage, round(card * giga), round(rest * giga))
        for n, stage, card, rest in rows
    ]
    return Case(f"numbers, stage, card and rest: {told}", lambda: tuple(calls))


check_fewest_ranks = Exercise(
    signature="fewest_ranks(numbers, stage, card, rest)",
    cases=[
        _cards(
            (7.5, "zero-3", 80, 21),
            (7.5, "zero-3", 80, 20),
            (7.5, "zero-2", 24, 5),
            (7.5, "zero-1", 40, 8),
            (1.5, "ddp", 24, 0),
            (0.5, "ddp", 12, 5),
            (70, "zero-3", 16, 14),
            (70, "zero-3", 16, 15),
            (70, "zero-2", 80, 30),
        ),
        _cards(
            (7.5, "zero-2", 16, 1),
            (7.5, "ddp", 120, 0),
            (1, "zero-1", 10, 0),
            (1, "zero-1", 8, 2.5),
            (1000, "zero-3", 16, 0.375),
            (70, "zero-3", 16, 0),
        ),
    ],
    observe=_fewest,
    solution=_right_ranks,
    mistakes=[
        (
            "the rest is left out: activations, gathered blocks and work "
            "memory need room beside the model states.",
            partial(_fewest_ranks, share=lambda rest, ranks: 0),
        ),
        (
            "the rest is divided by the ranks: `rest` is what every rank "
            "needs beside its model states, and sharding does not shrink it.",
            partial(_fewest_ranks, share=lambda rest, ranks: rest / ranks),
        ),
        (
            f"8 bytes are counted for the optimizer: {FP32_COPY}.",
            partial(_fewest_ranks, each=(2, 2, 8)),
        ),
        (
            "the optimizer states are left out: 12 bytes for each parameter.",
            partial(_fewest_ranks, each=(2, 2, 0)),
        ),
        (
            "only the parameters are counted: model states are parameters, "
            "gradients and optimizer states, 2 + 2 + 12 bytes.",
            partial(_fewest_ranks, each=(2, 0, 0)),
        ),
        (
            "all 16 bytes are divided by the ranks in every stage: that is "
            "ZeRO-3 alone.",
            partial(_fewest_ranks, as_stage=lambda stage: "zero-3"),
        ),
        (
            "what fills the card to the last byte fits: need <= card.",
            partial(_fewest_ranks, fits=lambda need, card: need < card),
        ),
        (
            "1024 ranks are allowed, too.",
            partial(_fewest_ranks, powers=range(10)),
        ),
        (
            "one rank may be enough: begin with 1.",
            partial(_fewest_ranks, powers=range(1, 11)),
        ),
        (
            "1024 ranks are the most: where these are not enough, the answer "
            "is None.",
            partial(_fewest_ranks, powers=range(40)),
        ),
        (
            "where 1024 ranks are not enough, the answer is None.",
            partial(_fewest_ranks, none=1024),
        ),
        (
            "where 1024 ranks are not enough, the answer is None.",
            partial(_fewest_ranks, none=2048),
        ),
        (
            "where 1024 ranks are not enough, the answer is None.",
            partial(_fewest_ranks, none=0),
        ),
        (
            "this is the largest number of ranks, and the fewest are asked.",
            partial(_fewest_ranks, powers=range(10, -1, -1)),
        ),
        (
            "this is the exponent: the number of ranks is 2 to its power.",
            partial(_fewest_ranks, result=lambda power: power),
        ),
    ],
    shown=(
        "A stage that leaves a part whole has an end that no number of ranks "
        "moves: 16, 4 and 2 bytes for each parameter. ZeRO-3 alone goes on, "
        "until the rest fills the card."
    ),
    tolerance=EXACT,
)


# What is read off a model


def _gradients(model: nn.Module) -> torch.Tensor | None:
    """All trained gradients in a row; None if there are not all of them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(p.grad is None or p.grad.shape != p.shape for p in trained):
        return None
    return torch.cat([p.grad.detach().double().flatten() for p in trained])


def _weights(model: nn.Module) -> torch.Tensor:
    """All parameters in a row, gathered if they are sharded."""
    tensors = [p.detach() for p in model.parameters()]
    tensors = [
        t.full_tensor() if isinstance(t, DTensor) else t for t in tensors
    ]
    return torch.cat([t.double().flatten() for t in tensors])


def _returned(result: object) -> str:
    """What a function returned, if it is anything."""
    empty = any(result is value for value in (None, ..., NotImplemented))
    return "" if empty else kind(result)


def _nothing(returned: str) -> Seen:
    """What to say of a function that does nothing, but may return."""
    hint = f"your function returns {returned}, and takes no step."
    return Seen(hint=hint) if returned else Seen(attempted=False)
