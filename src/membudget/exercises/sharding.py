"""The exercises on sharding: bytes per rank, and steps on two real ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from membudget import sharding as sh
from membudget.exercises.compare import EXACT, Seen
from membudget.exercises.core import Case, Exercise
from membudget.exercises.guard import Problem, kind
from membudget.exercises.loops import samples, small_model
from membudget.exercises.observe import calls, flat, is_empty
from membudget.exercises.on_ranks import RANKS, together
from membudget.models import mlp

BIT_CLOSE = 1e-6
"""Relative tolerance of fp64 gradients; a weight may be in fp32."""

# Bytes of shards


def shard_bytes(shapes, ranks, rank):
    from math import prod

    stored = own = 0
    for rows, *rest in shapes:
        each = -(-rows // ranks)  # rounded up: what rank 0 has
        mine = max(min(each, rows - rank * each), 0)
        stored += each * prod(rest)
        own += mine * prod(rest)
    return 4 * stored, 4 * stored, 8 * own + 4 * len(shapes)


def _shards_case(shapes: Sequence[tuple[int, ...]], ranks: int) -> Case:
    return Case(
        f"all ranks with shapes = {list(shapes)}, ranks = {ranks}",
        lambda: tuple((list(shapes), ranks, rank) for rank in range(ranks)),
    )


BYTES = "4 * stored, 4 * stored, 8 * own"
WHOLE = "4 * sum(map(prod, shapes))"

check_shard_bytes = Exercise(
    shard_bytes,
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
    mistakes=f"""
        4 * stored, 4 * stored => 4 * own, 4 * own
            only the rank's own rows are counted for parameters and gradients:
            they are stored with padding, as many rows as rank 0 has.
        4 * stored, 8 => 4 * own, 8
            gradients are stored with padding, as the parameters are.
        8 * own => 8 * stored
            Adam's moments have no padding: they have the rank's own rows.
        {BYTES} => 4 * own, 4 * own, 8 * stored
            padding and own rows are the wrong way round: parameters and
            gradients are padded, Adam's moments are not.
        + 4 * len(shapes) =>
            Adam also counts its steps: 4 bytes for each parameter tensor, on
            every rank.
        + 4 * len(shapes) => + 4 * len(shapes) * (own > 0)
            a rank that owns no row has Adam's counters all the same, 4 bytes
            for each tensor.
        + 4 * len(shapes) => + 8 * len(shapes)
            the counter of steps has 4 bytes for each tensor, not 8.
        8 * own => 4 * own
            Adam keeps two numbers for each parameter, here there is one.
        8 * own => 12 * own
            Adam keeps two numbers for each parameter; an fp32 copy is there
            only if the parameters themselves have 16 bits.
        {BYTES} => stored, stored, 2 * own
        or {BYTES} => 2 * stored, 2 * stored, 4 * own
            in fp32 each number takes 4 bytes.
        4 * stored, 4 * stored => {WHOLE}, {WHOLE}
            parameters and gradients are cut, too: this is ZeRO-1.
        return 4 * stored => return {WHOLE}
            the parameters are cut, too, between the steps.
        *rest in shapes => *rest in [[prod(shape)] for shape in shapes]
            FSDP2 cuts along the first dimension: whole rows, not single
            numbers.
        -(-rows // ranks) => rows / ranks
        max(min(each, rows - rank * each), 0) => each
            the whole is divided by the ranks: rows are not, they are cut into
            whole ones, and rounded up.
        """,
    shown=(
        "That is what rank_states computes and what a real rank holds. It "
        "says nothing of what is gathered, nor of activations."
    ),
    tolerance=EXACT,
)

# Gradients averaged by hand


def average_gradients(model):
    import torch.distributed as dist

    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def _averaging(
    fn: Callable, sizes: Sequence[int], frozen: bool, told: bool
) -> tuple[torch.Tensor, bool, str]:
    """One rank's part: its backward pass, then the reader's function.

    Args:
        fn: called with the model; if ``told`` also with this rank's samples.
        sizes: samples of each rank.
        frozen: whether the first layer is.

    Returns:
        The gradient, whether it is as it was, and what was returned.
    """
    model, shares = _averaging_start(sizes, frozen)
    rank = dist.get_rank()
    x, y = shares[rank]
    F.cross_entropy(model(x), y).backward()
    own, weights = _gradients(model), _weights(model)
    unused = [p for p in model.parameters() if p.grad is None]
    result = fn(model, sizes[rank]) if told else fn(model)
    if not torch.equal(_weights(model), weights):
        raise Problem(
            "the parameters have changed: only the gradients are asked, in "
            "`p.grad`. The parameters are equal on all ranks as long as the "
            "gradients are."
        )
    if any(p.grad is not None for p in unused):
        raise Problem(
            "a parameter that has no gradient has got one: its `p.grad` must "
            "stay None. An optimizer with momentum or weight decay moves "
            "whatever has a gradient, also one of zero."
        )
    left = _gradients(model)
    return left, torch.equal(left, own), _returned(result)


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
    sizes, *_ = args
    results, called = together(_averaging, fn, *args, ranks=len(sizes))
    left, unchanged, returned = zip(*results, strict=True)
    seen = Seen({f"gradient on rank {rank}": g for rank, g in enumerate(left)})
    if len(sizes) > 1 and all(unchanged):
        why = (
            "`all_reduce` works in place: give it `p.grad` itself, neither a "
            "copy nor the parameter."
        )
        if not called:
            if not any(returned):
                raise Problem
            why = f"Your function returns {max(returned)} instead."
        seen.hint = (
            "each rank still has the gradient of its own share in `p.grad`. "
            f"{why}"
        )
    return seen


def _averaging_case(
    sizes: tuple[int, ...], frozen: bool = False, told: bool = False
) -> Case:
    words = f"{' and '.join(map(str, sizes))} samples on ranks 0 and 1"
    if len(sizes) == 1:
        words = f"{sizes[0]} samples on a single rank"
    if frozen:
        words += "; the first layer is frozen, and its `p.grad` is None"
    return Case(words, lambda: (sizes, frozen, told))


ALL_REDUCE = "dist.all_reduce(p.grad)"
DIVIDE = "p.grad /= dist.get_world_size()"
TRAINED = "[q for q in model.parameters() if q.grad is not None]"
ONE_RANK = (
    "only rank 0 has the result: `dist.reduce` gives it to one rank, "
    "`dist.all_reduce` to all."
)
ALL_PARAMETERS = "every parameter of the model needs an all-reduce."

check_average_gradients = Exercise(
    average_gradients,
    cases=[
        _averaging_case((3, 3)),
        _averaging_case((4, 4), frozen=True),
        _averaging_case((3,)),
    ],
    observe=_observe_averaging,
    mistakes=f"""
        {DIVIDE} =>
            the gradients are added up and not divided: the mean over all
            samples is the mean of the ranks' means, so divide by the number
            of ranks.
        dist.get_world_size() => 2
            the sum is divided by 2, however many ranks there are:
            `dist.get_world_size()` is their number.
        dist.get_world_size() => dist.get_world_size() ** 2
            the gradients are divided by the number of ranks twice, before and
            after the sum, or once more than `all_reduce` needs.
        {ALL_REDUCE} =>
            each rank divides its own gradient, and nothing is added up:
            `dist.all_reduce(p.grad)` makes the sum over the ranks.
        {ALL_REDUCE} => dist.broadcast(p.grad, 0)
        {DIVIDE} =>
        or {ALL_REDUCE} => dist.broadcast(p.grad, 0)
            both ranks have the gradient of rank 0, or a part of it: a
            broadcast copies it, and the samples of the others are lost.
            `all_reduce` adds up.
        {ALL_REDUCE} => dist.reduce(p.grad, 0)
        or {ALL_REDUCE} => dist.reduce(p.grad, 0)
        {DIVIDE} =>
            {ONE_RANK}
        {ALL_REDUCE} => dist.all_reduce(p.grad, dist.ReduceOp.MAX)
        {DIVIDE} =>
            this takes the larger of the ranks' numbers: `all_reduce` adds up
            unless it is told otherwise.
        model.parameters() => {TRAINED}[:1]
        or model.parameters() => {TRAINED}[:1]
        {DIVIDE} =>
            only the first parameter is averaged: {ALL_PARAMETERS}
        model.parameters() => {TRAINED}[-1:]
        or model.parameters() => {TRAINED}[-1:]
        {DIVIDE} =>
            only the last parameter is averaged: {ALL_PARAMETERS}
        not None => not None and p.ndim > 1
        or not None => not None and p.ndim > 1
        {DIVIDE} =>
            the biases are left out: {ALL_PARAMETERS}
        """,
    shown=(
        "All ranks have the gradient that one process has on all samples. "
        "What is still needed for equal weights: the same start and the same "
        "optimizer."
    ),
    tolerance=BIT_CLOSE,
    two=False,
)


def weighted_average(model, samples):
    import torch
    import torch.distributed as dist

    total = torch.tensor(samples)
    dist.all_reduce(total)
    for p in model.parameters():
        p.grad *= samples / total.item()
        dist.all_reduce(p.grad)


check_weighted_average = Exercise(
    weighted_average,
    cases=[
        _averaging_case((5, 2), told=True),
        _averaging_case((1, 6), told=True),
    ],
    observe=_observe_averaging,
    mistakes=f"""
        samples / total.item() => 1 / dist.get_world_size()
            each rank weighs 1/N. That is right only for equal shares: a mean
            over n of all samples weighs n / all.
        samples / total.item() => 1
            the gradients are added up as they are: a mean over n of all
            samples weighs n / all.
        total.item() => total.item() / dist.get_world_size()
            the gradients are weighted by n / all and divided by the number of
            ranks as well: n / all alone is the weight.
        / total.item() =>
            the gradients are multiplied by the samples of their rank, and
            never divided by those of all ranks.
        total.item() => dist.get_world_size()
            the gradients are multiplied by the samples of their rank and
            divided by the number of ranks: divide by the samples of all ranks
            instead.
        samples / total.item() => 1 - samples / total.item()
            the smaller share has the larger weight here: it is n / all, with
            n of the rank itself.
        samples / total.item() => 1 / samples
            each gradient is divided by the samples of its rank: it is a mean
            already, and counts n / all.
        samples / total.item() => 1 / total.item()
            the gradients are divided by all samples, and not multiplied by
            those of their rank first: they are means, not sums.
        {ALL_REDUCE} =>
            each rank weighs its gradient, and nothing is added up:
            `dist.all_reduce(p.grad)` makes the sum over the ranks.
        {ALL_REDUCE} => dist.reduce(p.grad, 0)
            {ONE_RANK}
        """,
    shown=(
        "Every sample of the batch counts the same, whichever rank it is on. "
        "DDP and FSDP2 average over the ranks: with unequal shares they "
        "count the samples of the smaller one more."
    ),
    tolerance=BIT_CLOSE,
    two=False,
)

# A step whose ranks drift apart


def in_step(model, optimizer, x, y, average):
    from torch.nn import functional, utils

    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        average(p.grad)
    norm = utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm.isfinite():  # the same number on all ranks
        optimizer.step()
    optimizer.zero_grad()


def _stepping(
    fn: Callable, steps: int, broken: int | None
) -> tuple[list[torch.Tensor], bool, str]:
    """One rank's part: some steps with the reader's function.

    Returns:
        What the weights have gained after each step, whether anything was
        done, and what was returned.
    """
    model, optimizer, windows = _stepping_start(steps, broken)
    start, after, done, returned = _weights(model), [], False, ""

    def average(tensor: torch.Tensor) -> None:
        nonlocal done
        done = True
        with torch.no_grad():
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()

    for shares in windows:
        result = fn(model, optimizer, *shares[dist.get_rank()], average)
        returned = returned or _returned(result)
        done |= any(p.grad is not None for p in model.parameters())
        after.append(_weights(model) - start)
    return after, done or bool(after[-1].any()), returned


def _stepping_start(
    steps: int, broken: int | None
) -> tuple[nn.Module, torch.optim.Optimizer, list]:
    """Model, optimizer, and the shares of both ranks for each step.

    The first sample of rank 1 is no number in the step ``broken``.
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
    results, _ = together(_stepping, fn, *args)
    (first, second), done, returned = zip(*results, strict=True)
    if not any(done):
        raise _nothing(returned[0])
    name = "update of the weights on rank"
    seen = Seen({f"{name} 0": first[-1], f"{name} 1": second[-1]})
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


def _step_case(steps: int, broken: int | None = None) -> Case:
    words = f"{steps} steps on 2 ranks"
    if broken is not None:
        words += f"; in step {broken} a sample of rank 1 is NaN"
    return Case(words, lambda: (steps, broken))


CLIP = "utils.clip_grad_norm_(model.parameters(), 1.0)"
NORM = "utils.get_total_norm([p.grad for p in model.parameters()])"

check_in_step = Exercise(
    in_step,
    cases=[_step_case(3), _step_case(3, 2), _step_case(3, 1)],
    observe=_observe_stepping,
    mistakes=f"""
        loss.backward() => loss.backward(); {CLIP}
        norm = {CLIP} => norm = {NORM}
            the ranks agree with each other and not with one process. What
            changes a gradient by the numbers of its own rank alone has no
            place before the average.
        average(p.grad) =>
        or average(p.grad) =>
        norm.isfinite() => loss.isfinite()
            the gradients are not averaged: each rank trains a model of its
            own.
        norm = {CLIP} => norm = {NORM}
            the gradient is not clipped: the norm may be 1.0 at most, after
            the average.
        average(p.grad) => average(p.grad); p.grad.div_(2)
            `average` divides by the number of ranks already: it makes the
            mean.
        norm.isfinite() => loss.isfinite()
            each rank decides by its own loss whether it steps. With the
            average the NaN of one rank reaches the gradients of all, and the
            rank whose own loss is finite steps with it: decide by something
            that is equal on all ranks.
        norm.isfinite() => True
            after the step with the NaN no weight of either rank is a number
            any more: leave that step out, on both.
        """,
    shown=(
        "Both ranks have the weights of one process, after every step. What "
        "decides or changes something comes after the average, so that it is "
        "the same on all ranks."
    ),
    tolerance=BIT_CLOSE,
    two=False,
)

# Accumulation with deferred synchronisation


def accumulate_sharded(model, optimizer, micro_batches):
    import torch.nn.functional as F

    for i, (x, y) in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        model.set_requires_gradient_sync(last)
        loss = F.cross_entropy(model(x), y)
        (loss / len(micro_batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


UNITS = 3
"""What ``fully_shard`` is called on: two layers and the model."""

STEPS = 2
"""So that what the first leaves behind is seen in the second."""


def _accumulating(
    fn: Callable, count: int
) -> tuple[torch.Tensor, list[int], int, int, str]:
    """One rank's part: two steps with FSDP2, each of ``count`` micro-batches.

    One of the model's parameters has three rows, on two ranks.

    Returns:
        What the weights have gained; the reduce-scatters of each step; how
        many forward and backward passes there were; what was returned.
    """
    model, windows = _accumulating_start(count)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sh.shard(model, [model[0], model[2]], mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    start, rank = _weights(model), dist.get_rank()
    scattered, returned, forward, backward = [], "", [], []

    def watch(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        forward.append(module)
        if output.requires_grad:
            output.register_hook(lambda grad: backward.append(module))

    with model[-1].register_forward_hook(watch):
        for shares in windows:
            with sh.CommunicationCounter() as counter:
                result = fn(model, optimizer, shares[rank])
            scattered.append(counter.traffic["reduce-scatter"].calls)
            returned = returned or _returned(result)
    update = _weights(model) - start
    return update, scattered, len(forward), len(backward), returned


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
    (count,) = args
    try:
        results, _ = together(_accumulating, fn, *args)
    except Problem as problem:
        if "'no_sync'" in str(problem):
            raise Problem(
                f"{problem} FSDP2 has no `no_sync()`: it has "
                "`model.set_requires_gradient_sync(…)`."
            ) from problem
        raise
    update, calls, forward, backward, returned = results[0]
    if not forward and not update.any():
        raise _nothing(returned)
    seen = Seen({"update of the weights": update})
    if not backward:
        seen.hint = "no backward pass runs: call `backward()` on each loss."
    elif forward < STEPS * count:
        seen.hint = (
            "several micro-batches run in one forward pass: then all their "
            "activations are there at once, which is what accumulation "
            "avoids. Each needs a forward and a backward pass of its own."
        )
    elif calls == [0] * STEPS:
        seen.hint = NEVER
    elif not update.any():
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


def _windows(count: int) -> Case:
    return Case(
        f"{STEPS} steps with {count} micro-batch{'es' * (count > 1)} on each "
        "of 2 ranks",
        lambda: (count,),
    )


NEVER = (
    "there is no reduce-scatter: the gradients of all micro-batches wait, "
    "whole on each rank, and the optimizer has none. Turn the "
    "synchronisation on again for the last one, before its backward pass."
)
WEIGHTED = "loss / len(micro_batches)"
EACH = "gradient_sync(last) => gradient_sync(True)"
STEP = ".backward() => .backward(); optimizer.step(); model.zero_grad()"

check_accumulate_sharded = Exercise(
    accumulate_sharded,
    cases=[
        _windows(3),
        _windows(1),
    ],
    observe=_observe_accumulating,
    mistakes=f"""
        gradient_sync(last) => gradient_sync(not last)
            only the last micro-batch is not synchronised: what waits is
            reduced with the next backward pass that synchronises, so the last
            one must.
        gradient_sync(last) => gradient_sync(i == 0)
            the first micro-batch is synchronised, and the others wait for one
            that never comes in this step: the last one must be it.
        {WEIGHTED} => loss
        or {WEIGHTED} => loss
        {EACH}
            the losses are not divided by the number of micro-batches: the
            gradients of all are added up.
        {WEIGHTED} => {WEIGHTED} / 2
        or {WEIGHTED} => {WEIGHTED} / 2
        {EACH}
            FSDP2 divides by the number of ranks already, when it reduces:
            your loss is divided by it as well. The number of micro-batches
            alone is left.
        {WEIGHTED} => loss / 2
            the losses are divided by the number of ranks, which FSDP2 does
            itself: divide by the number of micro-batches.
        {WEIGHTED} => 2 * {WEIGHTED}
            the losses are multiplied by the number of ranks: what FSDP2
            divides by it are the sums over the ranks, which is right.
        {STEP}
        {EACH}
        or {STEP}
        {EACH}
        {WEIGHTED} => loss
            the optimizer steps after every micro-batch: step once, after the
            last.
        optimizer.zero_grad() =>
            the gradients are not wiped after the step, and the next step adds
            to them.
        """,
    shown=(
        "The weights are those of one process on all samples, and each unit "
        "was reduced once in each step. The price: until then every rank "
        "holds whole gradients."
    ),
    tolerance=BIT_CLOSE,
    two=False,
)

# What is read off a model


def _gradients(model: nn.Module) -> torch.Tensor:
    """All trained gradients in a row.

    Raises:
        Problem: there are not all of them.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(p.grad is None or p.grad.shape != p.shape for p in trained):
        raise Problem(
            "there is no gradient in `p.grad` at the end, or it has another "
            "shape."
        )
    return flat(p.grad for p in trained)


def _weights(model: nn.Module) -> torch.Tensor:
    """All parameters in a row, gathered if they are sharded."""
    weights = [p.detach() for p in model.parameters()]
    return flat(
        w.full_tensor() if isinstance(w, DTensor) else w for w in weights
    )


def _returned(result: object) -> str:
    """What a function returned, if it is anything."""
    return "" if is_empty(result) else kind(result)


def _nothing(returned: str) -> Problem:
    """For a function that does nothing, but may return."""
    if not returned:
        return Problem()
    return Problem(f"your function returns {returned}, and takes no step.")
