"""The shards of FSDP2 on paper; `test_ranks` has the real ones."""

from contextlib import nullcontext
from itertools import product
from math import prod

import pytest
import torch
from fsdp_workers import TiedPair, linear_layers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from membudget.ledger import States
from membudget.models import GPT
from membudget.sharding import (
    Unit,
    held_states,
    rank_states,
    rows,
    shard,
    units_of,
)
from membudget.sharding._private import fake_group
from tests.versions import here


def names(units):
    return [unit.name for unit in units]


def test_the_models_own_unit_is_first():
    model = GPT(vocabulary=5, context=3, width=4, depth=2, heads=1)
    units = units_of(model, model.blocks)
    assert names(units) == ["", "blocks.0", "blocks.1"]
    own = ((5, 4), (3, 4), (4,), (4,), (5, 4))
    assert units[0].shapes == own
    assert units[1].shapes == units[2].shapes
    assert sum(u.numbers for u in units) == sum(
        p.numel() for p in model.parameters()
    )


def test_blocks_in_their_order():
    model = linear_layers(1, 2, 3)
    assert names(units_of(model, [model[1], model[0]])) == ["1", "0"]
    assert names(units_of(model, [model[1]])) == ["", "1"]
    assert units_of(model, []) == [Unit("", ((2, 1), (2,), (3, 2), (3,)))]
    assert units_of(model, (layer for layer in model)) == [
        Unit("0", ((2, 1), (2,))),
        Unit("1", ((3, 2), (3,))),
    ]


def test_on_meta():
    with torch.device("meta"):
        model = linear_layers(1, 2, 3)
    assert names(units_of(model, model)) == ["0", "1"]


def test_tied_weights_count_once():
    model = nn.Sequential(TiedPair(3), nn.Linear(3, 3))
    units = units_of(model, [model[0]])
    assert units[1] == Unit("0", ((3, 3), (3,), (3,)), tied=True)
    assert units[0] == Unit("", ((3, 3), (3,)))
    gpt = GPT(5, 3, 4, 1, 1, tied=True)
    assert units_of(gpt, gpt.blocks)[0].shapes.count((5, 4)) == 1


@pytest.mark.parametrize(
    ("second", "said"),
    [(1, "1 shares a parameter with 0"), (2, "the model shares .* with 0")],
)
def test_weights_tied_across_units_are_refused(second, said):
    model = linear_layers(3, 3, 3, 3)
    model[second].weight = model[0].weight
    with pytest.raises(ValueError, match=said):
        units_of(model, model[:2])
    with pytest.raises(ValueError, match=said):
        shard(model, model[:2])
    assert names(units_of(model, [])) == [""]
    with fake_group(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        for module in (*model[:2], model):
            fully_shard(module, mesh=mesh)
        refused = pytest.raises(ValueError, match="shared")
        with nullcontext() if here("tied weights go on untied") else refused:
            model(torch.ones(1, 3))


def test_a_block_that_runs_twice_is_one():
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert names(units_of(model, [layer])) == ["0"]


def test_modules_without_parameters_make_no_unit():
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Flatten())
    assert names(units_of(model, model)) == ["0"]
    assert units_of(nn.Sequential(nn.ReLU()), []) == []


def test_nested_blocks_inner_ones_first():
    model = nn.Sequential(linear_layers(1, 2, 3), nn.Linear(3, 4))
    inner, outer = model[0][0], model[0]
    assert units_of(model, [inner, outer]) == [
        Unit("", ((4, 3), (4,))),
        Unit("0.0", ((2, 1), (2,))),
        Unit("0", ((3, 2), (3,))),
    ]
    for wrong in ([outer, inner], [inner, inner], [outer, model]):
        with pytest.raises(ValueError, match="inner ones first"):
            units_of(model, wrong)


def test_other_errors_of_units():
    model = linear_layers(1, 2)
    with pytest.raises(ValueError, match="a Linear among the blocks is not"):
        units_of(model, [nn.Linear(1, 1)])
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"the model has a parameter .*\(1,"):
        units_of(model, [])
    with pytest.raises(ValueError, match=r"^0 has a parameter without"):
        units_of(nn.Sequential(model), [model])
    with pytest.raises(ValueError, match="no stage of FSDP2 'zero-1'"):
        shard(model, [], "zero-1")
    model.scale = nn.Parameter(torch.empty(1, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"trains .* bfloat16 and float32"):
        units_of(model, [])
    assert type(model) is nn.Sequential  # nothing was done


def test_rows_are_those_of_chunk():
    for ranks, length in product((1, 2, 3, 7, 64), (*range(1, 20), 101)):
        chunks = [len(part) for part in torch.zeros(length).chunk(ranks)]
        chunks += [0] * (ranks - len(chunks))
        assert [rows(length, ranks, rank) for rank in range(ranks)] == chunks


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
units = st.lists(
    st.lists(shapes, min_size=1, max_size=3).map(
        lambda each: Unit("x", tuple(each))
    ),
    min_size=1,
    max_size=4,
)


@given(units, st.integers(1, 12), st.sampled_from(["sgd", "momentum", "adam"]))
def test_states_add_up_to_the_whole_model(units, ranks, optimizer):
    """Counted from `torch.chunk` of every parameter."""
    kept = {"sgd": 0, "momentum": 1, "adam": 2}[optimizer]
    every = [torch.zeros(s) for unit in units for s in unit.shapes]
    chunks = [p.chunk(ranks) for p in every]
    stored = sum(parts[0].numel() for parts in chunks)
    counts = len(every) * (optimizer == "adam")
    for itemsize in (2, 4):
        found = [
            rank_states(units, ranks, rank, optimizer, itemsize)
            for rank in range(ranks)
        ]
        for rank, states in enumerate(found):
            own = sum(p[rank].numel() for p in chunks if rank < len(p))
            assert states == States(
                itemsize * stored,
                itemsize * stored,
                itemsize * kept * own + 4 * counts,
            )
        whole = itemsize * sum(p.numel() for p in every)
        assert sum(s.optimizer - 4 * counts for s in found) == kept * whole
    assert sum(unit.padded(ranks) for unit in units) == stored
    assert sum(unit.padded(1) for unit in units) == sum(
        prod(s) for unit in units for s in unit.shapes
    )


def test_a_bias_of_two_on_four_ranks():
    """Rank 3 stores its padding and steps nothing."""
    unit = Unit("", ((2,),))
    assert rank_states([unit], 4, 1) == States(4, 4, 8 + 4)
    assert rank_states([unit], 4, 3) == States(4, 4, 0 + 4)


def test_errors_of_states():
    unit = Unit("", ((2,),))
    for call in (
        lambda: rank_states([unit], 4, 4),
        lambda: rows(5, 4, 4),
    ):
        with pytest.raises(ValueError, match=r"^rank is 4: use .* 0 to 3$"):
            call()
    with pytest.raises(ValueError, match=r"^a position in frozen is 1: use"):
        Unit("", ((2,),), (4,), frozenset({1}))
    with pytest.raises(ValueError, match="no optimizer 'adam-8bit'"):
        rank_states([unit], 4, 0, "adam-8bit")


def test_held_states_of_a_model_that_is_not_sharded():
    model = nn.Sequential(TiedPair(3))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    assert held_states(model) == States(60, 0, 0)
    assert held_states(model, optimizer) == States(60, 0, 0)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert held_states(model, optimizer) == States(60, 60, 120 + 12)
    assert held_states(model) == States(60, 60, 0)


def test_shard_says_which_stage():
    for stage, again in (("zero-2", False), ("zero-3", True)):
        with fake_group(2, 1):
            mesh = init_device_mesh("cpu", (2,))
            model = linear_layers(2, 2, 2)
            layers = iter(model[:1])
            assert shard(model, layers, stage, mesh=mesh) is model
            for module in (model, model[0]):
                group = module._get_fsdp_state()._fsdp_param_group
                assert group._reshard_after_forward is again
