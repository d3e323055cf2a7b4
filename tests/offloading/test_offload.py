"""Saved tensors elsewhere: the same gradients, and every byte once."""

import gc
import os
import subprocess
import sys
from functools import partial
from itertools import product

import offload_workers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from membudget import models
from membudget.measuring import FlopCounter, PeakTracker, SavedBytes, witness
from membudget.offloading import FileMemory, HostMemory, Offload
from membudget.sharding import Ranks


def words(model, tokens):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def squares(model, x):
    return model(x).square().mean()


TOKENS = torch.arange(24).view(4, 6) % 16
NETWORKS = {
    "gpt": (lambda: models.GPT(16, 8, 8, 3, 2), words, TOKENS),
    "gpt, own attention": (
        lambda: models.GPT(16, 8, 8, 3, 2, fused=False),
        words,
        TOKENS,
    ),
    "gpt, dropout": (
        lambda: models.GPT(16, 8, 8, 3, 2, dropout=0.5),
        words,
        TOKENS,
    ),
    "llama": (lambda: models.Llama(16, 8, 3, 2, 1, 24), words, TOKENS),
    "mlp": (lambda: models.mlp(8, 8, 4, 8), squares, torch.ones(64, 8)),
}
PLACES = {"host": HostMemory, "file": lambda: FileMemory(os.curdir)}


def build(name, checkpointed=False):
    """The model, its loss and its batch, always with the same weights."""
    make, loss, batch = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    for block in getattr(model, "blocks", ()) if checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model, loss, batch


def gradients(model, loss, parts, around):
    """Of one pass over micro-batches, with ``around`` about each forward."""
    torch.manual_seed(1)
    for part in parts:
        with around:
            value = loss(model, part)
        value.backward()
    return [p.grad for p in model.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.few(24)
@pytest.mark.parametrize(
    ("name", "place", "checkpointed", "parts", "autocast"),
    list(product(NETWORKS, PLACES, (False, True), (1, 2), (False, True))),
)
def test_gradients_are_the_same_to_the_last_bit(
    name, place, checkpointed, parts, autocast, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, loss, batch = build(name, checkpointed)
        micro_batches = batch.split(len(batch) // parts)
        expected = gradients(plain, loss, micro_batches, torch.enable_grad())
        model, loss, batch = build(name, checkpointed)
        moved = Offload(model, *micro_batches, to=PLACES[place]())
        assert same(gradients(model, loss, micro_batches, moved), expected)
    assert moved.out == moved.back > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_each_byte_that_autograd_saves_moves_once(name):
    model, loss, batch = build(name)
    with SavedBytes(model, batch) as saved:
        loss(model, batch)
    with Offload(model, batch) as moved:
        loss(model, batch).backward()
    assert moved.out == moved.back == saved.total


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_of_a_checkpointed_block_its_input_moves(name):
    model, _, batch = build(name, checkpointed=True)
    turns = models.rotary(batch.shape[1], 4)
    beside = () if name == "gpt" else (turns,)
    with Offload(model, batch) as moved:
        x = model.token(batch)
        for block in model.blocks:
            x = block(x, *beside)
    assert moved.out == 3 * x.nbytes + sum(t.nbytes for t in beside)


def test_what_a_checkpoint_gets_by_keyword_stays():
    x = torch.ones(4, requires_grad=True).exp()

    def run(x):
        return x.sin()

    with Offload() as by_position:
        checkpoint(run, x, use_reentrant=False)
    with Offload() as by_keyword:
        checkpoint(run, x=x, use_reentrant=False)
    assert (by_position.out, by_keyword.out) == (x.nbytes, 0)


class EachTensor(saved_tensors_hooks):
    """The bytes that save_on_cpu copies: of each saved tensor, by itself."""

    def __init__(self):
        super().__init__(self.count, lambda tensor: tensor)
        self.bytes = 0

    def count(self, tensor):
        self.bytes += tensor.cpu().numel() * tensor.element_size()
        return tensor.detach()


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_save_on_cpu_copies_weights_and_duplicates_too(name):
    model, loss, batch = build(name)
    theirs = EachTensor()
    with theirs:
        loss(model, batch)
    with Offload(model, batch) as ours:
        loss(model, batch)
    weights = sum(p.nbytes for p in model.parameters() if p.ndim > 1)
    assert ours.out + weights / 2 < theirs.bytes


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_stay_though_nobody_names_them(name):
    model, loss, batch = build(name)
    moved = []
    for exclude in ([batch], [batch, model]):
        with Offload(*exclude) as elsewhere:
            loss(model, batch)
        moved.append(elsewhere.out)
    assert moved[0] == moved[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_device_keeps_nothing_of_the_tape(name):
    """By the tracker, and by the allocator's own account."""
    model, loss, batch = build(name)

    def kept(around):
        with PeakTracker(model, batch) as tracker:
            with around:
                value = loss(model, batch)
            left = tracker.live - tracker.start
            value.backward()
        return left, tracker.peak

    plain, offloaded = kept(torch.enable_grad()), kept(Offload(model, batch))
    assert offloaded[0] == 4  # the loss
    assert offloaded[1] < plain[1]


def test_the_allocator_says_so_too():
    model, loss, batch = build("mlp")

    def step(around):
        with around:
            value = loss(model, batch)
        value.backward()

    plain = witness(lambda: step(torch.enable_grad()))
    assert witness(lambda: step(Offload(model, batch))) < plain


def test_inside_a_checkpoint_it_refuses_and_says_where_to_stand():
    def forward(x):
        with Offload():
            return x.sin()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="Offload was entered inside"):
        checkpoint(forward, x, use_reentrant=False)


@pytest.mark.skipif(
    not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"),
    reason="from torch 2.13 on",
)
def test_the_policy_of_that_name_makes_its_results_again():
    """Chapter 8 says so; a PyTorch that moves them fails here."""

    def work(chosen):
        def policy(context, operator, *args, **kwargs):
            product = operator is torch.ops.aten.addmm.default
            return chosen if product else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        block, x = models.Block(8, 2), torch.rand(2, 4, 8, requires_grad=True)
        with FlopCounter() as counter:
            checkpoint(
                block, x, use_reentrant=False, context_fn=contexts
            ).sum().backward()
        return counter.total

    moved = work(CheckpointPolicy.MUST_CPU_OFFLOAD)
    assert moved == work(CheckpointPolicy.MUST_RECOMPUTE)
    assert moved > work(CheckpointPolicy.MUST_SAVE)


def test_at_work_it_is_not_entered_again():
    moved = Offload()
    with moved, pytest.raises(RuntimeError, match="use another one inside"):
        moved.__enter__()
    with moved:
        pass


def test_a_graph_that_is_kept_gives_the_same_twice():
    model, loss, batch = build("llama")
    with Offload(model, batch) as moved:
        value = loss(model, batch)
    value.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    value.backward()
    assert same([p.grad for p in model.parameters()], [2 * g for g in first])
    assert moved.back >= 2 * moved.out


def test_a_second_derivative_is_the_same():
    def third(around):
        x = torch.tensor(0.3, requires_grad=True)
        with around:
            y = x.sin().exp()
            (dy,) = torch.autograd.grad(y, x, create_graph=True)
            (d2y,) = torch.autograd.grad(dy, x, create_graph=True)
            return torch.autograd.grad(d2y, x)[0]

    assert torch.equal(third(Offload()), third(torch.enable_grad()))


def test_a_part_of_the_graph_may_be_asked_for():
    x = torch.ones(4, requires_grad=True)
    with Offload() as moved:
        y = x.exp()
        z = y.sin()
    (dy,) = torch.autograd.grad(z, y, torch.ones(4))
    assert torch.equal(dy, y.cos())
    assert (moved.out, moved.back) == (16, 16)


def test_what_is_overwritten_after_it_left_comes_back_as_it_was():
    x = torch.ones(4, requires_grad=True)
    with Offload() as moved:
        y = x * 2
        a = y.sin()
        y.mul_(3)
        b = y.sin()
    (a.sum() + b.sum()).backward()
    two, six = torch.full((4,), 2.0), torch.full((4,), 6.0)
    assert torch.equal(x.grad, 2 * two.cos() + 3 * 2 * six.cos())
    assert moved.out == 32  # each version


def test_a_weight_that_is_overwritten_stays_an_error():
    weight = nn.Parameter(torch.ones(3))
    layer = nn.Module()
    layer.weight = weight
    with Offload(layer):
        y = weight.sin().sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        y.backward()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1:, ::2],
        lambda x: x[:1].expand(5, 4),
        lambda x: x.to(torch.bfloat16)[1:],
        lambda x: torch.view_as_complex(x.view(3, 2, 2)),
        lambda x: x[:0],
    ],
    ids=["turned", "cut", "expanded", "16 bits", "complex", "empty"],
)
def test_a_view_comes_back_as_a_view(view, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.abs().sum()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return torch.zeros_like(seen[0])

    x = torch.arange(12.0).view(3, 4).requires_grad_()
    with Offload(to=PLACES[place]()):
        saved = view(x)
        y = Keeps.apply(saved)
    y.backward()
    assert torch.equal(seen[0], saved)
    assert seen[0].stride() == saved.stride()


def test_on_meta_what_would_move_is_counted():
    x = torch.ones(4, device="meta", requires_grad=True)
    with PeakTracker(x) as tracker, Offload() as moved:
        z = x.sin().cos()
        assert tracker.live == x.nbytes + z.nbytes
        z.sum().backward()
    assert moved.out == moved.back == 32


# A GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 16])
def test_beside_the_computation_the_gradients_are_the_same(
    ahead, checkpointed
):
    plain, loss, batch = build("gpt", checkpointed)
    parts = [batch.cuda()]
    expected = gradients(plain.cuda(), loss, parts, torch.enable_grad())
    model, loss, _ = build("gpt", checkpointed)
    moved = Offload(model.cuda(), *parts, ahead=ahead)
    assert same(gradients(model, loss, parts, moved), expected)
    assert moved.out == moved.back > 0


# A file


def test_the_file_has_no_name_and_does_not_grow_from_step_to_step(tmp_path):
    model, loss, batch = build("gpt")
    memory = FileMemory(tmp_path)
    sizes = set()
    for _ in range(3):
        with Offload(model, batch, to=memory) as moved:
            value = loss(model, batch)
        value.backward()
        sizes.add(memory.size)
        del value
    assert sizes == {moved.out}
    assert not list(tmp_path.iterdir())


def test_gaps_in_the_file_are_filled(tmp_path):
    memory, cpu = FileMemory(tmp_path), torch.device("cpu")
    data = [torch.full((n,), n, dtype=torch.uint8) for n in (5, 7, 3, 4)]
    slots = [memory.slot(len(d), cpu) for d in data]
    for slot, d in zip(slots, data, strict=True):
        slot.write(d)
    del slots[1:3], slot  # 10 bytes between the others
    middle = memory.slot(10, cpu)
    middle.write(torch.zeros(10, dtype=torch.uint8))
    assert memory.size == 19
    for slot, d in zip(slots, [data[0], data[3]], strict=True):
        found = torch.empty_like(d)
        slot.read(found)
        assert torch.equal(found, d)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="no file can be made in"):
        FileMemory(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="use a folder that exists"):
        FileMemory(tmp_path / "file")


FULL = """
import resource, sys
import torch
import torch.distributed as dist
from membudget import models
from membudget.offloading import FileMemory, Offload

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
model, x = models.mlp(8, 64, 4, 8), torch.ones(64, 8)
before = [p.clone() for p in model.parameters()]
memory = FileMemory(sys.argv[1])
try:
    with Offload(model, x, to=memory):
        model(x).sum().backward()
except OSError as error:
    print(error)
assert all(p.grad is None for p in model.parameters())
with Offload(model, x[:4], to=memory):
    model(x[:4]).sum().backward()
print("and goes on")
"""


def test_a_disk_that_is_full_says_so_and_the_loop_may_go_on(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{tmp_path} has no room for" in run.stdout
    assert "Make room, use another folder, or checkpoint" in run.stdout
    assert run.stdout.endswith("and goes on\n")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
import torch
import torch.distributed as dist
from membudget.offloading import FileMemory, Offload

x = torch.ones(100_000, requires_grad=True)
with Offload(to=FileMemory(sys.argv[1])):
    y = x.exp()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert run.returncode == -9
    assert not list(tmp_path.iterdir())


def test_a_step_that_is_interrupted_gives_its_room_back(tmp_path):
    model, loss, batch = build("gpt")
    memory = FileMemory(tmp_path)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.blocks[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), Offload(model, batch, to=memory):
        loss(model, batch)
    handle.remove()
    gc.collect()
    with Offload(model, batch, to=memory) as moved:
        loss(model, batch).backward()
    assert memory.size == moved.out


# FSDP


@pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this PyTorch has no gloo",
)
def test_under_fsdp_the_gathered_weights_stay():
    """Their storages are emptied and filled again between the passes."""
    model = models.GPT(16, 8, 8, 3, 2)
    with Offload(model) as alone:
        model(torch.arange(16).view(2, 8)).square().sum()
    with Ranks(2) as pool:
        found = pool.run(offload_workers.same)
    assert found == [(True, alone.out, alone.out)] * 2
