"""One rank, simulated: against PyTorch's tracker, and without a trace."""

import gc
import sys
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist
from fsdp_workers import (
    BF16,
    OPTIMIZERS,
    gpt,
    linear_layers,
    loss_of,
)
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from membudget.internals import FakeTensor, FakeTensorMode
from membudget.measuring import PeakTracker
from membudget.models import GPT, Block, Llama, mlp
from membudget.sharding import (
    Traffic,
    fsdp_traffic,
    rank_moments,
    rank_states,
    sent,
    shard,
    simulate_rank,
    units_of,
)
from membudget.sharding._private import fake_group

BUILD = partial(GPT, 64, 16, 24, 2, 3)
TOKENS = torch.empty(2, 16, dtype=torch.int64, device="meta")


def sharder(checkpointed=False, bf16=False, stage="zero-3"):
    def apply(model, mesh):
        if checkpointed:
            apply_activation_checkpointing(
                model, check_fn=lambda module: isinstance(module, Block)
            )
        policy = {"mp_policy": BF16} if bf16 else {}
        shard(model, model.blocks, stage, mesh=mesh, **policy)

    return apply


LAYERS = {
    "build": partial(linear_layers, 9, 9, 9, 9),
    "apply": lambda model, mesh: shard(model, model[:2], mesh=mesh),
    "x": torch.empty(2, 9),
}


def simulate(build=BUILD, apply=None, loss=loss_of, x=TOKENS, **options):
    options = {"ranks": 2} | options
    return simulate_rank(build, apply or sharder(), loss, x, **options)


def of_the_peer(apply, ranks, rank):
    """Bytes at the peak, by PyTorch's own tracker of FSDP2."""
    with fake_group(ranks, rank):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode():
            model = BUILD()
            apply(model, mesh)
            optimizer = OPTIMIZERS["adam"](model.parameters())
            x = torch.empty(TOKENS.shape, dtype=TOKENS.dtype)
            loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
            gc.collect()
            tracker = FSDPMemTracker(model, optimizer)
            tracker.track_inputs((x,))
            with tracker:
                loss_of(model, x).backward()
                optimizer.step()
            (at_peak,) = tracker.get_tracker_snapshot("peak").values()
    return {getattr(k, "value", k): size for k, size in at_peak.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {}),
        (8, {"checkpointed": True, "bf16": True}),
        (64, {"bf16": True, "stage": "zero-2"}),
    ],
)
def test_the_tracker_of_pytorch(ranks, options):
    """The same peak, to the byte, and the same parts where they have the
    same names."""
    rank = ranks - 1
    found = simulate(apply=sharder(**options), ranks=ranks, rank=rank)
    said = of_the_peer(sharder(**options), ranks, rank)
    assert found.peak == said["Total"]
    assert found.split["gathered"] == said["Unsharded Param"]
    assert found.split["parameters"] == said["Sharded Param"]
    assert found.split["gradients"] == said["Sharded Grad"]
    assert found.split["optimizer"] == said["OptState"]
    assert found.split["inputs"] == said["Inputs"]
    assert sum(found.split.values()) == found.peak


def test_what_it_says():
    model = BUILD()
    found = simulate(ranks=7, rank=6)
    assert found.ranks == 7
    assert found.states == rank_states(units_of(model, model.blocks), 7, 6)
    assert found.after_forward < found.peak == found.tracker.peak
    assert [label for _, label in found.tracker.marks] == [
        *("forward", "backward", "step")
    ]


class Adapted(nn.Module):
    """A frozen layer in bf16, and a small trained one in fp32, as in LoRA."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width, dtype=torch.bfloat16)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.base(x.bfloat16()).float() + self.adapter(x)


@pytest.mark.parametrize("stage", ["zero-2", "zero-3"])
def test_a_frozen_base_in_another_dtype(stage):
    """Only what is trained has gradients, states, and reductions."""

    def build():
        return nn.Sequential(Adapted(5), Adapted(5), nn.Linear(5, 4))

    def apply(model, mesh):
        shard(model, list(model)[:2], stage, mesh=mesh)

    model = build()
    units = units_of(model, list(model)[:2])
    found = simulate(build, apply, x=torch.empty(2, 5), ranks=3, rank=2)
    assert found.states == rank_states(units, 3, 2)
    assert found.traffic == fsdp_traffic(units, 3, stage)
    with pytest.raises(ValueError, match=r"^0 has frozen .* simulate_rank$"):
        rank_moments(units, 3)


def test_the_gradient_of_a_tied_weight_waits_for_the_other_one():
    """What the rules of the moments do not know."""
    gpt = GPT(64, 16, 24, 2, 3, tied=True)
    with pytest.raises(ValueError, match=r"^the model has tied .* simulate"):
        rank_moments(units_of(gpt, gpt.blocks), 2, embedding=2)


def test_a_model_that_is_converted_while_it_is_built():
    """PyTorch fails at times; it depends on who else knows the tensors."""

    def build():
        raise RuntimeError("_apply(): Couldn't swap Linear.weight")

    with pytest.raises(RuntimeError, match=r"^build converts .*: make it as"):
        simulate(build)


def test_a_model_in_bf16_and_one_in_two_dtypes():
    units = units_of(model := linear_layers(3, 2, 1).bfloat16(), [model[0]])
    assert rank_states(units, 2) == rank_states(units, 2, itemsize=2)
    assert fsdp_traffic(units, 2) == fsdp_traffic(
        units, 2, gathered=2, reduced=2
    )
    assert rank_moments(units, 2) == rank_moments(units, 2, itemsize=2)
    model[0].float()
    with pytest.raises(ValueError, match=r"of 2 and 4 bytes .* one dtype"):
        rank_moments(units_of(model, [model[0]]), 2)


def test_activations_do_not_shrink_with_the_ranks():
    """The widths are multiples of 8: nothing is padded at 2, 4 and 8."""
    build = partial(mlp, 64, 64, 3, 64)
    x = torch.empty(32, 64)

    def apply(model, mesh):
        shard(model, [model[0], model[2]], "zero-2", mesh=mesh)

    after = [
        simulate(build, apply, x=x, ranks=n, optimizer=OPTIMIZERS["sgd"])
        for n in (2, 4, 8)
    ]
    held = {
        s.after_forward - s.states.parameters for s in after
    }  # all parameters are gathered
    assert len(held) == 1


def test_two_replicas_of_four_shards():
    """A rank holds as much as on four; its shards are all-reduced."""
    rows = simulate(ranks=4, rank=2, mesh=[4], **LAYERS)
    assert rows.peak == simulate(ranks=4, rank=2, **LAYERS).peak
    found = simulate(ranks=8, rank=6, mesh=(2, 4), **LAYERS)
    assert found.states == rows.states
    for kind in ("all-gather", "reduce-scatter"):
        assert found.traffic[kind] == rows.traffic[kind]
    scattered = found.traffic["reduce-scatter"]
    reduced = found.traffic["all-reduce"]
    assert reduced == Traffic(scattered.calls, scattered.bytes // 4)
    assert sent("all-reduce", reduced.bytes, 2) == reduced.bytes
    assert rows.traffic["all-reduce"] == Traffic()


def test_micro_batches():
    one = simulate(**LAYERS)
    three = simulate(micro_batches=3, **LAYERS)
    for kind in ("all-gather", "reduce-scatter"):
        assert three.traffic[kind].calls == 3 * one.traffic[kind].calls
    assert three.states == one.states
    labels = [label for _, label in three.tracker.marks]
    assert labels == ["forward", "backward"] * 3 + ["step"]
    after_the_first = three.tracker.marks[1][0]
    held = three.tracker.timeline[after_the_first - 1] - three.tracker.start
    # All that is there more than before the step.
    assert held == one.states.gradients


def test_the_optimizer_is_the_callers():
    seen: list = []

    def optimizer(parameters):
        seen.extend(parameters)
        return torch.optim.SGD(parameters, lr=0.1)

    found = simulate(optimizer=optimizer, **LAYERS)
    assert found.states.optimizer == 0
    assert len(seen) == 6
    assert all(isinstance(p.to_local(), FakeTensor) for p in seen)


def test_by_default_adam_steps_one_tensor_after_the_other():
    def apply(model, mesh):
        shard(model, model, mesh=mesh)

    adam = [partial(torch.optim.Adam, foreach=foreach) for foreach in (0, 1)]
    layers = {"build": partial(linear_layers, *[9] * 8), "apply": apply}
    found, one, many = (
        simulate(optimizer=optimizer, **LAYERS | layers).peak
        for optimizer in (None, *adam)
    )
    assert found == one < many


def test_nothing_is_allocated():
    """States of 3.7 GB, and 1.9 GB of gathered parameters."""
    build = partial(Llama, 32000, 4096, 1, 32, 32, 11008)
    process = psutil.Process()
    simulate(ranks=4)  # imports what it needs
    before = process.memory_info().rss
    found = simulate(build, ranks=2, x=TOKENS[:, :4])
    assert found.states.total > 3.5e9
    assert found.peak > found.states.total + 1e9
    assert process.memory_info().rss - before < 3e8


THERE_BEFORE = BUILD()


def offload(model, mesh):
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(False))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"rank": 2}, ValueError, "rank is 2: use .* 0 to 1"),
        (
            {"ranks": 8, "mesh": (2, 3)},
            ValueError,
            "2 × 3 is not 8 ranks: the",
        ),
        (
            {"ranks": 8, "mesh": (2, 2, 2)},
            ValueError,
            r"mesh is \(2, 2, 2\): use one number, the shards, or two",
        ),
        (
            {"loss": lambda model, x: loss_of(model, x).detach()},
            ValueError,
            "the loss has no graph",
        ),
        (
            {"loss": lambda model, x: model(x)},
            ValueError,
            "backward needs a tensor with one element",
        ),
        ({"loss": lambda model, x: 1 // 0}, ZeroDivisionError, "by zero"),
        ({"build": lambda: THERE_BEFORE}, ValueError, "it must make"),
        ({"apply": offload}, ValueError, "the simulation has no other"),
    ],
)
def test_errors_leave_nothing_behind(options, error, said):
    with pytest.raises(error, match=said):
        simulate(**options)
    assert not dist.is_initialized()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not isinstance(torch.empty(1), FakeTensor)


def test_in_a_group_already():
    with (
        fake_group(2, 0),
        pytest.raises(RuntimeError, match="in a process group already"),
    ):
        simulate()
    assert not dist.is_initialized()


def test_a_private_interface_is_missing(monkeypatch):
    module = "torch.testing._internal.distributed.fake_pg"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeError, match=f"has no {module}.*use torch"):
        simulate()
    assert not dist.is_initialized()


def test_the_state_of_the_process_is_as_before():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    dtype = torch.get_default_dtype()
    simulate(partial(GPT, 64, 16, 24, 2, 3, dropout=0.1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == dtype
    assert torch.is_grad_enabled()


def test_a_first_step_of_real_shards_takes_what_later_ones_take():
    """DTensor works out with fake tensors what a result will be like: the
    first time, and in torch 2.11 whenever a number changes.
    """
    with fake_group(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        model = shard(nn.Linear(64, 64), [], mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        held = []
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
            with PeakTracker(model, optimizer) as tracker:
                optimizer.step()
            optimizer.zero_grad()
            held.append(tracker.peak - tracker.live)
    assert held[0] == held[1]


def test_shapes_and_types_are_those_of_the_batch():
    seen = []

    def loss(model, x, y):
        seen.append((x, y))
        return model(x).sum() * y.sum()

    simulate_rank(
        partial(nn.Linear, 3, 3),
        lambda model, mesh: shard(model, [], mesh=mesh),
        loss,
        torch.empty(4, 3),
        torch.empty(2, dtype=torch.float64),
        ranks=2,
    )
    x, y = seen[0]
    assert (x.shape, x.dtype) == ((4, 3), torch.float32)
    assert (y.shape, y.dtype) == ((2,), torch.float64)
    assert all(isinstance(t, FakeTensor) for t in (x, y))
    assert gpt().x.device.type == "cpu"
