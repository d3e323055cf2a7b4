"""What runs on two gloo ranks; started by ``test_distributed``.

Every function named ``check_…`` runs on both ranks. It compares
with a single process that has the samples of all ranks.
"""

from contextlib import suppress
from math import nan

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accumulation_helpers import (
    classifier,
    differences,
    everything,
    flat,
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from membudget.accumulation import Accumulator

WORLD = 2
# The samples of each rank, by micro-batch. Numbers may differ under DDP;
# fully_shard gathers parameters in each, so there they may not.
RAGGED = [[5, 9, 3, 4], [13, 7]]
ALIKE = [[5, 9, 7], [13, 4, 3]]


def shard(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAP = {"ddp": DistributedDataParallel, "fsdp": shard}
SIZES = {"ddp": RAGGED, "fsdp": ALIKE}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model):
    return [full(p.grad) for p in model.parameters()]


def no_gradients(model):
    return all(p.grad is None for p in model.parameters())


def share(rank, sizes, seed=0, dtype=torch.float64):
    """All samples, and this rank's micro-batches of them."""
    x, y = samples(sum(map(sum, sizes)), seed, dtype=dtype)
    first = sum(map(sum, sizes[:rank]))
    return (
        x,
        y,
        [(x[first:][part], y[first:][part]) for part in slices(sizes[rank])],
    )


def run(window, model, parts, **options):
    for x, y in window.over(parts):
        window.backward(F.cross_entropy(model(x), y, **options), len(x))


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def gradient_of_the_union(kind, rank):
    sizes = SIZES[kind]
    x, y, parts = share(rank, sizes)
    single = classifier()
    expected = whole_gradient(single, x, y)
    own = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    loss = F.cross_entropy(single(own[0]), own[1]).item()
    model = WRAP[kind](classifier())
    for reduction in ("mean", "sum"):
        for total in (None, sum(sizes[rank]), 1000 + rank):
            accumulator = Accumulator(
                model, sgd(model, 0.0), reduction=reduction
            )
            with accumulator.window(total) as window:
                run(window, model, parts, reduction=reduction)
                norm = window.finish()
                error = relative(gradients(model), expected)
                report = window.step()
            assert error <= 1e-12, (reduction, total, error)
            assert abs(norm / flat(expected).norm().item() - 1) < 1e-12
            assert report.norm == norm
            assert report.count == sum(map(sum, sizes))
            assert report.micro_batches == len(parts)
            assert abs(report.loss / loss - 1) < 1e-12, (report.loss, loss)
            assert report.stepped and not report.clipped
            assert no_gradients(model)


def check_ddp_gradient(rank):
    gradient_of_the_union("ddp", rank)


def check_fsdp_gradient(rank):
    gradient_of_the_union("fsdp", rank)


def check_fsdp_on_some_of_the_ranks(rank):
    """Each rank has a model of its own, and counts its own samples."""
    names = ("model", "shard")
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=names)["shard"]
    _, _, parts = share(rank, ALIKE)
    own = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    expected = whole_gradient(classifier(), *own)
    model = fully_shard(classifier(), mesh=mesh)
    group = mesh.get_group()
    accumulator = Accumulator(model, sgd(model), process_group=group)
    with accumulator.window() as window:
        run(window, model, parts)
        window.finish()
        error = relative(gradients(model), expected)
        report = window.step()
    assert error <= 1e-12
    assert report.count == sum(ALIKE[rank])


def train(kind, rank):
    """Three clipped windows end where a single process ends."""
    single, model = classifier(), WRAP[kind](classifier())
    optimizer = sgd(single)
    max_norm = 0.05
    accumulator = Accumulator(model, sgd(model), max_norm=max_norm)
    for seed in range(3):
        x, y, parts = share(rank, SIZES[kind], seed)
        optimizer.zero_grad()
        F.cross_entropy(single(x), y).backward()
        norm = nn.utils.clip_grad_norm_(single.parameters(), max_norm).item()
        optimizer.step()
        with accumulator.window() as window:
            run(window, model, parts)
            report = window.step()
        assert abs(report.norm / norm - 1) < 1e-12
        assert report.clipped is (norm > max_norm) is True
    ends = [full(p) for p in model.parameters()]
    error = relative(ends, single.parameters())
    assert error <= 1e-12, error
    assert relative(ends, classifier().parameters()) > 0.01


def check_ddp_training(rank):
    train("ddp", rank)


def check_fsdp_training(rank):
    train("fsdp", rank)


def check_ddp_synchronises_once(rank):
    model = DistributedDataParallel(classifier())
    calls = []

    def hook(state, bucket):
        calls.append(bucket.is_last())
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    accumulator = Accumulator(model, sgd(model))
    _, _, parts = share(rank, RAGGED)
    with accumulator.window() as window:
        for i, (x, y) in enumerate(window.over(parts), start=1):
            window.backward(F.cross_entropy(model(x), y), len(x))
            assert bool(calls) is (i == len(parts))
        window.step()
    once = len(calls)
    # Without `over` it is done for every micro-batch, and is right, too.
    _, _, parts = share(rank, ALIKE)
    with accumulator.window() as window:
        for x, y in parts:
            window.backward(F.cross_entropy(model(x), y), len(x))
        window.step()
    assert len(calls) == once + 3 * once


class Collectives(TorchDispatchMode):
    """Names of the collectives that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))

    def reductions(self):
        return sum("reduce_scatter" in name for name in self.names)


def check_fsdp_synchronises_once(rank):
    model = shard(classifier())
    accumulator = Accumulator(model, sgd(model))
    _, _, parts = share(rank, ALIKE)
    with accumulator.window() as window, Collectives() as collectives:
        for i, (x, y) in enumerate(window.over(parts), start=1):
            window.backward(F.cross_entropy(model(x), y), len(x))
            expected = 3 if i == len(parts) else 0  # one for each layer
            assert collectives.reductions() == expected, collectives.names
        window.step()
    # Without `over` it is done for every micro-batch, and is right, too.
    with accumulator.window() as window, Collectives() as collectives:
        for x, y in parts:
            window.backward(F.cross_entropy(model(x), y), len(x))
        window.step()
    assert collectives.reductions() == 3 * 3, collectives.names


def nothing_is_left(kind, model):
    """Synchronisation is back: one plain backward pass is the ranks' mean."""
    if kind == "ddp":
        assert model.require_backward_grad_sync is True
    x, y = samples(8)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    single = classifier()
    expected = whole_gradient(single, x, y)
    F.cross_entropy(model(x[mine]), y[mine]).backward()
    assert relative(gradients(model), expected) <= 1e-12
    model.zero_grad()


def undone(kind, rank, fail, error, message):
    """After the failure the gradients are gone, and the next window works."""
    x, y, parts = share(rank, SIZES[kind])
    expected = whole_gradient(classifier(), x, y)
    model = WRAP[kind](classifier())
    accumulator = Accumulator(model, sgd(model, 0.0))
    for _ in range(2):
        try:
            with accumulator.window() as window:
                fail(window, model, parts)
        except error as raised:
            assert message in str(raised), raised
        else:
            raise AssertionError("there was no error")
        assert no_gradients(model)
        with accumulator.window() as window:
            run(window, model, parts)
            window.finish()
            assert relative(gradients(model), expected) <= 1e-12
            window.step()
        with suppress(error), accumulator.window() as window:
            fail(window, model, parts)
        nothing_is_left(kind, model)


def break_early(window, model, parts):
    for x, y in window.over(parts):
        window.backward(F.cross_entropy(model(x), y), len(x))
        break
    window.step()


NOT_SYNCHRONISED = (
    "the gradients of the ranks were not synchronised: let the loop over "
    "window.over(...) run to its end"
)


def check_ddp_loop_left_early(rank):
    undone("ddp", rank, break_early, RuntimeError, NOT_SYNCHRONISED)


def check_fsdp_loop_left_early(rank):
    undone("fsdp", rank, break_early, RuntimeError, NOT_SYNCHRONISED)


def nan_loss(window, model, parts):
    for i, (x, y) in enumerate(window.over(parts)):
        loss = F.cross_entropy(model(x), y)
        window.backward(loss * nan if i == 1 else loss, len(x))


def check_ddp_error_in_the_second_micro_batch(rank):
    undone("ddp", rank, nan_loss, ValueError, "the loss is nan")


def check_fsdp_error_in_the_second_micro_batch(rank):
    undone("fsdp", rank, nan_loss, ValueError, "the loss is nan")


def no_memory(window, model, parts):
    def stop(gradient):
        raise MemoryError("in the middle of the backward pass")

    for i, (x, y) in enumerate(window.over(parts)):
        if i == 1:
            x = x.clone().requires_grad_()
            x.register_hook(stop)
        window.backward(F.cross_entropy(model(x), y), len(x))


def check_fsdp_error_inside_the_backward_pass(rank):
    """``fully_shard`` would reduce nothing in the next one."""
    undone("fsdp", rank, no_memory, MemoryError, "in the middle")


def check_fsdp_error_with_mixed_precision(rank):
    """There fully_shard keeps the unsynchronised sum in another place."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)

    def gradient(fail_first):
        model = classifier(dtype=torch.float32)
        mesh = init_device_mesh("cpu", (WORLD,))
        model = fully_shard(model, mesh=mesh, mp_policy=policy)
        accumulator = Accumulator(model, sgd(model))
        _, _, parts = share(rank, ALIKE, dtype=torch.float32)
        if fail_first:
            with suppress(ValueError), accumulator.window() as window:
                nan_loss(window, model, parts)
            assert no_gradients(model)
        with accumulator.window() as window:
            run(window, model, parts)
            window.finish()
            found = gradients(model)
            window.step()
        return found

    assert all(map(torch.equal, gradient(False), gradient(True)))


def stop_after_the_last(window, model, parts):
    run(window, model, parts)
    window.finish()
    raise KeyboardInterrupt


def check_ddp_interrupted(rank):
    undone("ddp", rank, stop_after_the_last, KeyboardInterrupt, "")


def check_fsdp_interrupted(rank):
    undone("fsdp", rank, stop_after_the_last, KeyboardInterrupt, "")


def check_ddp_restores_buffers_and_random_numbers(rank):
    def rig():
        torch.manual_seed(5 + rank)
        model = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.Linear(8, 5),
        )
        model = DistributedDataParallel(model.double())
        return model, Accumulator(model, sgd(model))

    def good(accumulator):
        with accumulator.window() as window:
            run(window, accumulator.model, parts)
            return window.step()

    _, _, parts = share(rank, RAGGED)
    never, accumulator = rig()
    good(accumulator)
    good(accumulator)
    expected = everything(never, accumulator.optimizer)
    model, accumulator = rig()
    good(accumulator)
    before = everything(model, accumulator.optimizer)
    with suppress(ValueError), accumulator.window() as window:
        nan_loss(window, model, parts)
    state = everything(model, accumulator.optimizer)
    assert differences(before, state) == []
    good(accumulator)
    state = everything(model, accumulator.optimizer)
    assert differences(expected, state) == []


def overflow_on_one_rank(kind, rank):
    """The gradient of rank 1 overflows: no rank takes the step."""
    model = WRAP[kind](classifier(dtype=torch.float32))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    accumulator = Accumulator(model, sgd(model), scaler=scaler)
    start = [full(p.detach()).clone() for p in model.parameters()]
    _, _, parts = share(rank, SIZES[kind], dtype=torch.float32)
    for overflow in (True, False):
        with accumulator.window() as window:
            for x, y in window.over(parts):
                output = model(x)
                loss = F.cross_entropy(output, y)
                if overflow and rank == 1:
                    loss = loss + 1e30 * (output.sum() * 1e10).sin()
                window.backward(loss, len(x))
            report = window.step()
        ends = [full(p.detach()) for p in model.parameters()]
        same = all(map(torch.equal, start, ends))
        assert report.stepped is not overflow
        assert same is overflow
        assert scaler.get_scale() == 2.0**15
    single = classifier(dtype=torch.float32)
    x, y, _ = share(rank, SIZES[kind], dtype=torch.float32)
    optimizer = sgd(single)
    F.cross_entropy(single(x), y).backward()
    optimizer.step()
    assert relative(ends, single.parameters()) <= 1e-6


def check_ddp_overflow_on_one_rank(rank):
    overflow_on_one_rank("ddp", rank)


def check_fsdp_overflow_on_one_rank(rank):
    overflow_on_one_rank("fsdp", rank)


def check_fsdp_gradients_left_over_in_one_shard(rank):
    """Every rank sees them, though only rank 0 holds a number."""
    model = shard(classifier())
    optimizer = sgd(model)
    weight = next(model.parameters())
    x, y = samples(4)
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad.mul_(0)
    if rank == 0:
        weight.grad.to_local()[0, 0] = 1.0
    try:
        with Accumulator(model, optimizer).window():
            raise AssertionError("the block must not run")
    except RuntimeError as error:
        assert str(error).startswith("1 parameters had gradients left over")
    assert no_gradients(model)


def check_ddp_reads_one_ahead_and_no_more(rank):
    model = DistributedDataParallel(classifier())
    accumulator = Accumulator(model, sgd(model))
    _, _, parts = share(rank, ALIKE)
    read = []

    def loader():
        for i, part in enumerate(parts):
            read.append(i)
            yield part

    with accumulator.window() as window:
        for i, (x, y) in enumerate(window.over(loader())):
            assert read == list(range(min(i + 2, 3)))
            window.backward(F.cross_entropy(model(x), y), len(x))
        window.step()


def checks():
    return [name for name in globals() if name.startswith("check_")]


def run_check(name):
    globals()[name](dist.get_rank())
