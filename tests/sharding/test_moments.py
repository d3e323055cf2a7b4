"""What FSDP2 holds at each moment, against the tracker, to the byte.

On a batch of 0 rows all activations are empty, so that parameters, gradients,
states and buffers are everything there is, but for the loss.
"""

import random
from dataclasses import fields
from functools import partial
from itertools import pairwise, product
from math import prod

import fsdp_workers
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from membudget.internals import FakeTensorMode
from membudget.models import MLPBlock
from membudget.sharding import (
    Held,
    Moments,
    Unit,
    rank_moments,
    rank_states,
    units_of,
)
from membudget.sharding._private import fake_group
from membudget.sharding.moments import RULES
from tests.soak import examples

MOMENTS = [field.name for field in fields(Moments)][:-2]  # no places
POLICIES = {
    "none": (None, {}),
    "bf16, fp32": (torch.float32, {"gathered": 2, "reduced": 4}),
    "bf16": (None, {"gathered": 2}),
    "bf16, bf16": (torch.bfloat16, {"gathered": 2, "reduced": 2}),
}
"""In some version the gradients of "bf16" are reduced as they are stored."""


def layers_of_two(widths, bias, own):
    """Blocks of two layers; the model's own unit is a layer or nothing."""
    blocks = [
        nn.Sequential(nn.Linear(a, b, bias), nn.Linear(b, b, bias))
        for a, b in pairwise(widths)
    ]
    last = [nn.Linear(widths[-1], 3, bias)] if own else []
    return nn.Sequential(*blocks, *last)


def tracked(build, blocks, x, ranks, rank, stage, policy, summed=False):
    """The moments of a step, and its units."""
    options = {}
    if policy != "none":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=POLICIES[policy][0]
        )
    arguments = build, blocks, x, stage, options, summed
    with fake_group(ranks, rank):
        mesh = init_device_mesh("cpu", (ranks,))
        with FakeTensorMode():
            found = fsdp_workers.moments(*arguments, mesh)
    model = build()
    return found, units_of(model, blocks(model))


def predicted(units, ranks, rank, stage, policy, **options):
    moments = rank_moments(
        units, ranks, rank, stage, **POLICIES[policy][1], **options
    )
    return {name: getattr(moments, name).total for name in MOMENTS}


GRID = list(
    product(
        (1, 2, 3, 4, 8),
        ((8, 8, 8, 8), (8, 9, 7, 6), (3, 5, 2, 9)),
        ("zero-2", "zero-3"),
        POLICIES,
        (True, False),  # a bias
        (True, False),  # parameters of the model's own
    )
)

CHOSEN = [
    # The first block is reduced after the model's own unit,
    (2, (8, 9, 7, 6), "zero-2", "bf16, fp32", False, True),
    # and a unit's last whole gradient stays until its shard is there.
    (2, (8, 8, 8, 8), "zero-2", "bf16, bf16", False, False),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("ranks", "widths", "stage", "policy", "bias", "own"),
    CHOSEN + random.Random(7).sample(GRID, examples(12)),
)
def test_all_moments(ranks, widths, stage, policy, bias, own):
    build = partial(layers_of_two, widths, bias, own)

    def blocks(model):
        return list(model)[: len(widths) - 1]

    setting = ranks, ranks - 1, stage, policy
    found, units = tracked(build, blocks, torch.empty(0, widths[0]), *setting)
    assert found == predicted(units, *setting)


@pytest.mark.few(4)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stage", ["zero-2", "zero-3"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_gradients_are_added_to_the_shards_of_those_before(
    ranks, stage, policy, own
):
    build = partial(layers_of_two, (8, 9, 7, 6), False, own)

    def blocks(model):
        return list(model)[:3]

    setting = ranks, ranks - 1, stage, policy
    found, units = tracked(build, blocks, torch.empty(0, 8), *setting, True)
    assert found == predicted(units, *setting, summed=True)


class Words(nn.Module):
    """An embedding, blocks, a norm and a head, as in a GPT.

    (Attention cannot reshape tensors without elements.)
    """

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(40, 12)
        self.blocks = nn.Sequential(*(MLPBlock(12) for _ in range(2)))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 40, bias=False)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens))))


NO_TOKENS = torch.empty(0, dtype=torch.int64)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stage", "policy", "a_block"),
    [
        ("zero-2", "none", False),
        ("zero-2", "none", True),
        ("zero-3", "none", True),
        ("zero-3", "bf16, fp32", False),
        ("zero-3", "bf16", True),
        ("zero-3", "bf16, bf16", False),
    ],
)
def test_an_embedding(stage, policy, a_block):
    """In the model's own unit, and as a block."""

    def blocks(model):
        return [model.token, *model.blocks] if a_block else [*model.blocks]

    setting = 4, 1, stage, policy
    found, units = tracked(Words, blocks, NO_TOKENS, *setting)
    options = {} if a_block else {"embedding": 1}
    assert found == predicted(units, *setting, **options)


def test_the_parts_by_hand():
    """Two blocks of 4 numbers on 2 ranks, 2 numbers of which each has."""
    units = [Unit("0", ((4,),)), Unit("1", ((4,),))]
    found = rank_moments(units, 2, optimizer="sgd", version="2.13")
    empty = Held(16, 0, 0, 0, 0)
    assert found.after_forward == empty
    # The second is copied out of its buffer, the first's is there still.
    assert found.forward == Held(16, 16, 0, 0, 32)
    # In the first's: both whole, its gradient, and the other's buffer.
    assert found.step == Held(16, 0, 16, 0, 0)
    assert found.backward.total == max(
        16 + 16 + 16 + 16,  # the second with its gradient; prefetched
        16 + 16 + 16 + 32,  # the first with its; the second's, reduced
    ) + (8 - 16)
    assert found.peak.total == max(
        getattr(found, name).total for name in MOMENTS
    )


def test_what_stays_whole():
    """Parameters under ZeRO-2: 64 numbers in each unit."""
    units = [Unit("", ((8, 8),)), Unit("0", ((8, 8),)), Unit("1", ((8, 8),))]
    kept = rank_moments(units, 4, stage="zero-2")
    freed = rank_moments(units, 4, stage="zero-3")
    whole = 3 * 8 * 8 * 4
    assert kept.after_forward.gathered == whole
    assert freed.after_forward.gathered == 0
    assert kept.step == freed.step


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_step_is_that_of_rank_states(optimizer):
    units = [Unit("", ((5, 3), (5,))), Unit("0", ((2,), (7, 2)))]
    for ranks, rank in (1, 0), (3, 0), (3, 2), (5, 4):
        states = rank_states(units, ranks, rank, optimizer)
        step = rank_moments(units, ranks, rank, optimizer=optimizer).step
        assert step.total == states.total
        assert step.gradients == states.gradients
        assert step.optimizer == states.optimizer


def test_the_first_rank_where_none_is_said():
    units = [Unit("", ((1, 3),))]
    first, second = (rank_moments(units, 2, rank) for rank in range(2))
    assert rank_moments(units, 2) == first != second


def test_a_number_in_a_tensor_stays_none():
    moments = rank_moments([Unit("", ((2,),))], 2, itemsize=torch.tensor(4))
    assert type(moments.peak.total) is int


def test_the_last_of_a_units_gradients_stays_until_its_shard_is_there():
    """Where all is one parameter, the whole gradient, the buffer and the
    shard are there together; in torch 2.15 the first two."""
    size = prod((8, 4)) * 4
    unit = [Unit("", ((8, 4),))]
    found = rank_moments(unit, 4, optimizer="sgd", version="2.14").backward
    assert found.total == size // 4 + size + size + size // 4
    found = rank_moments(unit, 4, optimizer="sgd", version="2.15").backward
    assert found.total == size // 4 + size + size


def test_what_the_versions_do_in_their_own_way():
    """Three blocks of 4 numbers on 2 ranks: a whole has 16 bytes."""
    units = [Unit(str(i), ((4,),)) for i in range(3)]

    def found(moment, version):
        moments = rank_moments(units, 2, optimizer="sgd", version=version)
        return getattr(moments, moment).total

    shards = 3 * 8  # and a whole beside two buffers, or beside its own
    assert {version: found("forward", version) for version in RULES} == {
        **dict.fromkeys(RULES, shards + 48),
        "2.15": shards + 32,
    }
    assert found("backward", "2.12") == found("backward", "2.13") + 8


def test_a_version_that_is_not_known(monkeypatch):
    units = [Unit("", ((2,),))]
    with pytest.raises(
        ValueError, match=r"torch 2\.9 .* one of 2\.11, .*2\.15"
    ):
        rank_moments(units, 2, version="2.9")
    monkeypatch.setattr(torch, "__version__", "2.16.0a0+git1")
    with pytest.raises(
        ValueError, match=r"torch 2\.16 holds when is not known"
    ):
        rank_moments(units, 2)
    assert rank_moments(units, 2, version="2.13")


def test_an_embedding_of_more_tensors_than_there_are():
    units = [Unit("", ((2,), (3,))), Unit("0", ((4,), (5,), (6,)))]
    with pytest.raises(ValueError, match=r"^embedding is 3: .* has 2 tensors"):
        rank_moments(units, 2, embedding=3)
