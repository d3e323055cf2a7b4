"""What is sent: by hand, against PyTorch's counter, and FSDP2's."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from fsdp_workers import CASES, TOKENS, gpt, linear_layers, loss_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from membudget.models import Block
from membudget.sharding import (
    COLLECTIVES,
    CommunicationCounter,
    Traffic,
    Unit,
    fsdp_traffic,
    sent,
    shard,
    units_of,
    zero_traffic,
)
from membudget.sharding._private import fake_group

RANKS = 4


@pytest.fixture
def mesh():
    """Of rank 1 of 4, in a group where the others do not exist."""
    with fake_group(RANKS, 1):
        yield init_device_mesh("cpu", (RANKS,))


def traffic(**calls_and_bytes):
    found = dict.fromkeys(COLLECTIVES, Traffic())
    for name, values in calls_and_bytes.items():
        found[name.replace("_", "-")] = Traffic(*values)
    return found


GATHERED = traffic(all_gather=(1, 128))
SCATTERED = traffic(reduce_scatter=(1, 32))
REDUCED = traffic(all_reduce=(1, 32))


CALLS = [
    (
        GATHERED,
        lambda x, mesh: dist.all_gather(list(torch.zeros(RANKS, 8)), x),
        lambda x, mesh: dist.all_gather_into_tensor(torch.zeros(8 * RANKS), x),
        lambda x, mesh: functional.all_gather_tensor(x, 0, mesh),
    ),
    (
        SCATTERED,
        lambda x, mesh: dist.reduce_scatter(torch.zeros(2), [*x.split(2)]),
        lambda x, mesh: dist.reduce_scatter_tensor(torch.zeros(2), x),
        lambda x, mesh: functional.reduce_scatter_tensor(x, "sum", 0, mesh),
    ),
    (
        REDUCED,
        lambda x, mesh: dist.all_reduce(x),
        lambda x, mesh: functional.all_reduce(x, "sum", mesh),
    ),
]


@pytest.mark.parametrize(
    ("said", "call"),
    [(said, call) for said, *calls in CALLS for call in calls],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_by_hand(mesh, said, call):
    """Eight numbers of each rank: 32 bytes, 128 of all."""
    with CommunicationCounter() as counter:
        call(torch.ones(8), mesh)
    assert counter.traffic == said
    assert not counter.others
    kind = next(name for name in said if said[name].calls)
    ring = {"all-gather": 96, "reduce-scatter": 24, "all-reduce": 48}
    assert counter.sent(RANKS) == ring[kind]


def test_other_collectives_are_named(mesh):
    with CommunicationCounter() as counter:
        dist.broadcast(torch.ones(8), 0)
        dist.broadcast(torch.ones(8), 0)
        dist.barrier()
        torch.ones(8).sum()
    assert counter.others == {"broadcast_": 2, "barrier": 1}
    assert counter.traffic == traffic()
    assert counter.sent(RANKS) == 0


def test_several_blocks_add_up(mesh):
    counter = CommunicationCounter()
    for _ in range(3):
        with counter:
            dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(8))  # outside
    assert counter.traffic == traffic(all_reduce=(3, 96))


PEER = {  # what PyTorch's counter calls them
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "all_reduce": "all-reduce",
}


def test_the_counter_of_pytorch(mesh):
    """FSDP2, and the collectives inside DTensor: the norm of all gradients
    and a parameter that is made whole."""

    def work():
        model = gpt().build()
        shard(model, model.blocks, mesh=mesh)
        loss_of(model, TOKENS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.head.weight.full_tensor()

    with CommDebugMode() as peer:
        work()
    with CommunicationCounter() as counter:
        work()
    said = dict.fromkeys(COLLECTIVES, 0)
    for operator, calls in peer.get_comm_counts().items():
        said[PEER[operator.__name__.split(".")[-1]]] += calls
    assert {k: t.calls for k, t in counter.traffic.items()} == said
    assert said == {"all-gather": 7, "reduce-scatter": 3, "all-reduce": 1}
    assert not counter.others


def test_it_changes_nothing(mesh):
    found = []
    for counter in (CommunicationCounter(), torch.no_grad()):
        model = linear_layers(3, 3)
        with counter:
            out = model(torch.ones(1, 3))
        found.append(type(out))
    assert found == [torch.Tensor] * 2
    with pytest.raises(ZeroDivisionError), CommunicationCounter():
        1 / 0  # noqa: B018


def counted(mesh, case, change=lambda model: None):
    model = case.build()
    change(model)
    case.shard(model, mesh)
    with CommunicationCounter() as counter:
        loss_of(model, case.x).backward()
    return counter.traffic


def checkpointed(model):
    apply_activation_checkpointing(
        model, check_fn=lambda module: isinstance(module, Block)
    )


@pytest.mark.parametrize("name", ["GPT", "GPT, bf16"])
def test_a_recomputation_gathers_nothing_more(mesh, name):
    """The blocks are whole anyway when their backward pass begins."""
    case = CASES[name]
    model = case.build()
    said = fsdp_traffic(
        units_of(model, case.blocks(model)),
        RANKS,
        gathered=2 if case.bf16 else 4,
    )
    assert counted(mesh, case) == said
    assert counted(mesh, case, checkpointed) == said


def test_a_block_that_runs_twice_is_gathered_twice_as_often(mesh):
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    units = units_of(model, [layer])
    shard(model, [layer], mesh=mesh)
    with CommunicationCounter() as counter:
        model(torch.ones(1, 8)).sum().backward()
    said = fsdp_traffic(units, RANKS)
    gathered = counter.traffic["all-gather"]
    assert gathered.calls == 2 * said["all-gather"].calls
    assert gathered.bytes == 2 * said["all-gather"].bytes
    assert counter.traffic["reduce-scatter"] == said["reduce-scatter"]


def test_fsdp_traffic_by_hand():
    """A bias of 2 on 4 ranks is gathered as 4 numbers."""
    units = [Unit("", ((2,),)), Unit("0", ((4, 3), (3,)))]
    whole = 4 + 12 + 4
    assert fsdp_traffic(units, 4) == traffic(
        all_gather=(4, 2 * 4 * whole), reduce_scatter=(2, 4 * whole)
    )
    assert fsdp_traffic(units, 4, "zero-2") == traffic(
        all_gather=(2, 4 * whole), reduce_scatter=(2, 4 * whole)
    )
    assert fsdp_traffic(
        units, 4, gathered=2, accumulation_steps=3, synchronise_last=True
    ) == traffic(all_gather=(12, 6 * 2 * whole), reduce_scatter=(2, 4 * whole))
    assert fsdp_traffic(
        units, 4, "zero-2", reduced=2, accumulation_steps=3
    ) == traffic(
        all_gather=(6, 3 * 4 * whole), reduce_scatter=(6, 3 * 2 * whole)
    )
    assert fsdp_traffic(units, 1) == traffic()


@given(
    st.integers(1, 50),
    st.integers(2, 9),
    st.integers(1, 5),
    st.booleans(),
)
def test_without_padding_it_is_the_papers(rows, ranks, steps, last):
    """ZeRO-3's 3 Ψ; FSDP2's ZeRO-2 gathers before each forward pass, not
    after the step, which is the same with one micro-batch."""
    units = [Unit("", ((rows * ranks, 3),)), Unit("0", ((2 * ranks,),))]
    numbers = sum(unit.numbers for unit in units)
    options = {"accumulation_steps": steps, "synchronise_last": last}
    for stage in ("zero-2", "zero-3"):
        found = fsdp_traffic(units, ranks, stage, **options)
        moved = sum(sent(k, t.bytes, ranks) for k, t in found.items())
        said = zero_traffic(numbers, stage, "fp32", ranks=ranks, **options)
        if stage == "zero-2":
            said += (steps - 1) * 4 * numbers * (ranks - 1) // ranks
        assert moved == said
    options |= {"gathered": 2, "reduced": 4}  # a mixed-precision policy
    for kept in ("fp32", "bf16"):
        found = fsdp_traffic(units, ranks, **options)
        moved = sum(sent(k, t.bytes, ranks) for k, t in found.items())
        said = zero_traffic(numbers, "zero-3", kept, ranks=ranks, **options)
        assert moved == said


def test_a_ring():
    sizes = {"all-gather": 9, "reduce-scatter": 9, "all-reduce": 18}
    for kind, said in sizes.items():
        assert sent(kind, 12, 4) == said
        assert sent(kind, 12, 1) == sent(kind, 0, 4) == 0


def test_a_first_block_that_is_frozen():
    units = [Unit("0", ((2,),), (4,), frozenset({0}))]
    said = "0, the first block, is frozen: .* simulate_rank"
    with pytest.raises(ValueError, match=said):
        fsdp_traffic(units, 2)
    assert fsdp_traffic(units, 2, "zero-2")["all-gather"].calls == 1
