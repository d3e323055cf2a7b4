"""What runs on two gloo ranks; started by ``test_distributed``.

Each of ``CHECKS`` runs on both ranks. It compares with a single process that
has the samples of all ranks.
"""

from contextlib import suppress
from functools import partial
from math import nan
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accumulation_helpers import (
    classifier,
    differences,
    everything,
    flat,
    gradients,
    relative,
    samples,
    slices,
    whole_gradient,
)
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from membudget.accumulation import Accumulator, Window, recovering_step

WORLD = 2
SIZES = [[5, 9, 3, 4], [13, 7]]
"""The samples of each rank, by micro-batch."""


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def no_gradients(model):
    return all(p.grad is None for p in model.parameters())


def share(dtype=torch.float64):
    """All samples, and this rank's micro-batches of them."""
    rank = dist.get_rank()
    x, y = samples(sum(map(sum, SIZES)), dtype=dtype)
    first = sum(map(sum, SIZES[:rank]))
    own = slices(SIZES[rank])
    return x, y, [(x[first:][part], y[first:][part]) for part in own]


def run(window, model, parts, **options):
    for x, y in window.over(parts):
        window.backward(F.cross_entropy(model(x), y, **options), len(x))


def whole_window(accumulator, parts, total=None, **options):
    """The gradient before the step, and the report."""
    with accumulator.window(total) as window:
        run(window, accumulator.model, parts, **options)
        window.finish()
        found = gradients(accumulator.model)
        return found, window.step()


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def gradient_of_the_union():
    rank = dist.get_rank()
    x, y, parts = share()
    single = classifier()
    expected = whole_gradient(single, x, y)
    own = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    loss = F.cross_entropy(single(own[0]), own[1]).item()
    model = DistributedDataParallel(classifier())
    for reduction, total in (
        ("mean", None),
        ("mean", 1000 + rank),
        ("sum", sum(SIZES[rank])),
    ):
        accumulator = Accumulator(model, sgd(model, 0.0), reduction=reduction)
        found, report = whole_window(
            accumulator, parts, total, reduction=reduction
        )
        assert relative(found, expected) <= 1e-12, (reduction, total)
        norm = flat(expected).norm().item()
        assert abs(report.norm / norm - 1) < 1e-12
        assert report.count == len(x)
        assert report.micro_batches == len(parts)
        assert abs(report.loss / loss - 1) < 1e-12, (report.loss, loss)
        assert report.stepped and not report.clipped
        assert no_gradients(model)


def a_plain_model_of_each_rank():
    """Nobody averages its gradients: its window has its own samples alone."""
    _, _, parts = share()
    own = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    expected = whole_gradient(classifier(), *own)
    model = classifier()
    found, report = whole_window(Accumulator(model, sgd(model)), parts)
    assert relative(found, expected) <= 1e-12
    assert report.count == sum(SIZES[dist.get_rank()])


def fully_shard_is_refused():
    mesh = init_device_mesh("cpu", (WORLD,))
    model = fully_shard(classifier(), mesh=mesh)
    with pytest.raises(ValueError, match=r"^the model is sharded by fully_"):
        Accumulator(model, sgd(model))


def synchronises_once():
    """It reads one micro-batch ahead for that, and no more."""
    model, reductions, read = DistributedDataParallel(classifier()), [], []

    def hook(state, bucket):
        reductions.append(bucket.index())
        return allreduce_hook(state, bucket)

    def loader():
        for part in parts:
            read.append(part)
            yield part

    model.register_comm_hook(None, hook)
    accumulator = Accumulator(model, sgd(model))
    _, _, parts = share()
    with accumulator.window() as window:
        for i, (x, y) in enumerate(window.over(loader()), start=1):
            assert len(read) == min(i + 1, len(parts))
            window.backward(F.cross_entropy(model(x), y), len(x))
            assert reductions == [0] * (i == len(parts))
        window.step()
    # Without `over` it is done for every micro-batch, and is right, too.
    with accumulator.window() as window:
        for x, y in parts[:2]:
            window.backward(F.cross_entropy(model(x), y), len(x))
        window.step()
    assert reductions == [0] * 3


# After an error ----------------------------------------------------------


def nothing_is_left(model):
    """Synchronisation is back: one plain backward pass is the ranks' mean."""
    assert model.require_backward_grad_sync is True
    model.zero_grad()
    x, y = samples(8)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    expected = whole_gradient(model.module, x, y)
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    assert relative(gradients(model), expected) <= 1e-12
    model.zero_grad()


def undone(fail, error, message):
    """After the failure the gradients are gone, and the next window works."""
    x, y, parts = share()
    expected = whole_gradient(classifier(), x, y)
    model = DistributedDataParallel(classifier())
    accumulator = Accumulator(model, sgd(model, 0.0))
    for _ in range(2):
        with (
            pytest.raises(error, match=message),
            accumulator.window() as window,
        ):
            fail(window, model, parts)
        assert no_gradients(model)
        found, _ = whole_window(accumulator, parts)
        assert relative(found, expected) <= 1e-12
        with suppress(error), accumulator.window() as window:
            fail(window, model, parts)
        nothing_is_left(model)


def loop_left_early(window, model, parts):
    for x, y in window.over(parts):
        window.backward(F.cross_entropy(model(x), y), len(x))
        break
    window.step()


def nan_loss(window, model, parts):
    for i, (x, y) in enumerate(window.over(parts)):
        loss = F.cross_entropy(model(x), y)
        window.backward(loss * nan if i == 1 else loss, len(x))


def interrupted(window, model, parts):
    run(window, model, parts)
    window.finish()
    raise KeyboardInterrupt


FAILURES = [
    (loop_left_early, RuntimeError, "the ranks were not synchronised: let"),
    (nan_loss, ValueError, "the loss is nan"),
    (interrupted, KeyboardInterrupt, ""),
]


def buffers_and_random_numbers_are_restored():
    def rig():
        torch.manual_seed(5 + dist.get_rank())
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        model = nn.Sequential(*layers, nn.Dropout(0.3)).double()
        model = DistributedDataParallel(model)
        return model, Accumulator(model, sgd(model))

    def good(accumulator):
        """A window; returns what there is after it."""
        whole_window(accumulator, parts)
        return everything(accumulator.model, accumulator.optimizer)

    _, _, parts = share()
    _, accumulator = rig()
    expected = [good(accumulator), good(accumulator)]
    model, accumulator = rig()
    assert differences(expected[0], good(accumulator)) == []
    with suppress(ValueError), accumulator.window() as window:
        nan_loss(window, model, parts)
    state = everything(model, accumulator.optimizer)
    assert differences(expected[0], state) == []
    assert differences(expected[1], good(accumulator)) == []


def overflow_on_one_rank():
    """No rank takes the step; the next one is that of a single process."""
    max_norm = 0.05
    model = DistributedDataParallel(classifier(dtype=torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    accumulator = Accumulator(
        model, sgd(model), scaler=scaler, max_norm=max_norm
    )
    start = weights(model)
    x, y, parts = share(torch.float32)
    for overflow in (True, False):
        with accumulator.window() as window:
            for images, labels in window.over(parts):
                output = model(images)
                loss = F.cross_entropy(output, labels)
                if overflow and dist.get_rank() == 1:
                    loss = loss + 1e30 * (output.sum() * 1e10).sin()
                window.backward(loss, len(images))
            report = window.step()
        assert report.stepped is not overflow
        assert all(map(torch.equal, start, weights(model))) is overflow
        assert scaler.get_scale() == 2.0**15
    single = classifier(dtype=torch.float32)
    optimizer = sgd(single)
    F.cross_entropy(single(x), y).backward()
    norm = nn.utils.clip_grad_norm_(single.parameters(), max_norm).item()
    optimizer.step()
    assert report.clipped is (norm > max_norm) is True
    steps = [
        [end - begin for begin, end in zip(start, ends, strict=True)]
        for ends in (weights(model), weights(single))
    ]
    assert relative(*steps) <= 1e-4


# Out of memory -----------------------------------------------------------


def unlucky(rank, *calls, error=torch.OutOfMemoryError):
    """A loss that fails on one rank, in these of its micro-batches."""
    seen = []

    def loss(model, x, y):
        seen.append(len(x))
        if dist.get_rank() == rank and len(seen) in calls:
            raise error("another process took it")
        return F.cross_entropy(model(x), y)

    return loss


def recovering(accumulator, loss, x, y, first=21):
    """A step, rank 0 with the first samples; the movement, what it took."""
    before = weights(accumulator.model)
    mine = slice(first) if dist.get_rank() == 0 else slice(first, None)
    own = x[mine], y[mine]
    done = recovering_step(accumulator, loss, *own, micro_batch=8)
    after = weights(accumulator.model)
    return [p - q for p, q in zip(after, before, strict=True)], done


def both_ranks_recover():
    """From an error of one; then their size is the same."""
    x, y = samples(34)
    single = classifier()
    expected = whole_gradient(single, x, y)
    for rank, calls, took, first in (
        (1, (2,), 1, 21),
        (0, (3, 4), 2, 21),
        (1, (1, 2, 3), 3, 21),
        (0, (), 0, 31),  # the other's micro-batch has 3 samples
    ):
        for scale in (0, 2.0**10):
            model = DistributedDataParallel(classifier())
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scaler = torch.amp.GradScaler("cpu", scale) if scale else None
            accumulator = Accumulator(model, optimizer, scaler=scaler)
            loss = unlucky(rank, *calls)
            moved, done = recovering(accumulator, loss, x, y, first)
            moved = [-m for m in moved]
            assert relative(moved, expected) <= 1e-12, (rank, calls)
            assert done.failures == took
            own = first if dist.get_rank() == 0 else 34 - first
            assert done.micro_batch == min(8 >> took, own)
            assert done.report.count == 34
            nothing_is_left(model)


def a_parameter_without_a_gradient_on_one_rank():
    x, y = samples(34)
    model = DistributedDataParallel(classifier())
    extra = model.module[0].bias

    def loss(model, x, y):
        if dist.get_rank() == 1:
            return sum(p.sum() for p in model.parameters() if p is not extra)
        return F.cross_entropy(model(x), y)

    moved, _ = recovering(Accumulator(model, sgd(model, 1.0)), loss, x, y)
    both = flat(moved).clone()
    dist.all_reduce(both)
    assert torch.equal(both, 2 * flat(moved))


def buffers_are_rank_0s():
    """As DistributedDataParallel has them, though no forward pass sends them:
    they are there before a rank may fail."""
    torch.manual_seed(dist.get_rank())
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
    model = DistributedDataParallel(nn.Sequential(*layers).double())
    norm, (x, y) = model.module[1], samples(32)
    accumulator = Accumulator(model, sgd(model))
    recovering(accumulator, unlucky(1, 1), x, y, first=20)
    begun = []

    def loss(model, x, y):
        begun.append(norm.running_mean.clone())
        return F.cross_entropy(model(x), y)

    recovering(accumulator, loss, x, y, first=20)
    means = [torch.empty_like(begun[0]) for _ in range(WORLD)]
    dist.all_gather(means, begun[0])
    assert torch.equal(*means)
    micro_batches = {0: 20 // 4 + 3, 1: 20 // 4 + 2}  # 4s, then 8s
    assert norm.num_batches_tracked == micro_batches[dist.get_rank()]
    model(x[:4])  # and DDP sends them again
    dist.all_gather(means, norm.running_mean)
    assert torch.equal(*means)


def too_late_to_begin_again():
    """Once they have agreed, a rank that repeats would be alone."""
    x, y = samples(34)
    model = DistributedDataParallel(classifier())
    short = torch.OutOfMemoryError("another process took it")
    with (
        mock.patch.object(Window, "finish", side_effect=short) as finish,
        pytest.raises(RuntimeError, match=r"^every micro-batch fitted, and"),
    ):
        recovering(Accumulator(model, sgd(model)), unlucky(0), x, y)
    assert finish.call_count == 1
    assert no_gradients(model)


def errors_that_no_smaller_size_mends():
    x, y = samples(34)
    for loss, error, of_others in (
        (
            unlucky(1, *range(1, 99)),
            (torch.OutOfMemoryError, "one sample does not fit"),
            (torch.OutOfMemoryError, "one sample does not fit"),
        ),
        (
            unlucky(1, 2, error=KeyError),
            (KeyError, "another process took it"),
            (RuntimeError, "another rank met an error: look there"),
        ),
    ):
        model = DistributedDataParallel(classifier())
        kind, message = error if dist.get_rank() == 1 else of_others
        with pytest.raises(kind, match=message):
            recovering(Accumulator(model, sgd(model)), loss, x, y)
        assert no_gradients(model)
        nothing_is_left(model)


CHECKS = {
    check.__name__: check
    for check in (
        gradient_of_the_union,
        a_plain_model_of_each_rank,
        fully_shard_is_refused,
        synchronises_once,
        buffers_and_random_numbers_are_restored,
        overflow_on_one_rank,
        both_ranks_recover,
        a_parameter_without_a_gradient_on_one_rank,
        buffers_are_rank_0s,
        too_late_to_begin_again,
        errors_that_no_smaller_size_mends,
    )
} | {fail.__name__: partial(undone, fail, *error) for fail, *error in FAILURES}


def run_check(name):
    CHECKS[name]()
