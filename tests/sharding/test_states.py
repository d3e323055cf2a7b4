"""ZeRO on paper, against the paper and an independent computation."""

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membudget import sharding
from membudget.ledger import PLANNED, RECIPES, States
from membudget.sharding import STAGES, zero_states, zero_traffic

BILLION = 10**9
PSI = 7_500_000_000  # the example of figure 1


def gigabytes(ranks, stage):
    return zero_states(PSI, ranks, stage).total / BILLION


@pytest.mark.parametrize(
    ("ranks", "stage", "said"),
    [
        (64, "ddp", 120),
        (64, "zero-1", 31.4),
        (64, "zero-2", 16.6),
        (64, "zero-3", 1.9),
        # Of table 1, column 7.5B.
        (1, "zero-3", 120),
        (4, "zero-1", 52.5),
        (8, "zero-2", 28.125),
        (1024, "zero-3", 0.12),
    ],
)
def test_the_figures_of_the_paper(ranks, stage, said):
    assert gigabytes(ranks, stage) == pytest.approx(said, abs=0.051)


def test_fp32_by_hand():
    """4 numbers of 4 bytes, and two moments each, on 4 ranks."""
    assert zero_states(4, 4, "zero-2", "fp32") == States(16, 4, 8)


SPLIT = {
    "ddp": (False, False, False),
    "zero-1": (False, False, True),
    "zero-2": (False, True, True),
    "zero-3": (True, True, True),
}
EACH = {  # bytes of a parameter, a gradient, a stepped number, the copy
    "fp32": (4, 4, 4, 0),
    "autocast": (4, 4, 4, 0),
    "bf16": (2, 2, 2, 0),
    "master": (2, 2, 4, 4),
    "master-fp32-gradients": (2, 4, 4, 4),
}

sizes = st.integers(1, 10**12)
groups = st.integers(1, 5000)
stages = st.sampled_from(sorted(STAGES))
recipes = st.sampled_from(sorted(RECIPES))


@given(
    sizes,
    groups,
    stages,
    recipes,
    st.sampled_from(sorted(PLANNED)),
    st.booleans(),
)
def test_states_are_fractions_rounded_up(
    parameters, ranks, stage, recipe, optimizer, waiting
):
    first, second, stepped, copy = EACH[recipe]
    kept = {"sgd": 0, "momentum": stepped, "adam": 2 * stepped}
    kept |= {"adam-8bit": 2, "lion-8bit": 1}
    last = copy + kept[optimizer]
    split = list(SPLIT[stage])
    split[1] = split[1] and not waiting
    said = [
        math.ceil(Fraction(parameters * size, ranks if is_split else 1))
        for size, is_split in zip((first, second, last), split, strict=True)
    ]
    found = zero_states(
        parameters, ranks, stage, recipe, optimizer, waiting=waiting
    )
    assert found == States(*said)


def test_a_stage_says_what_it_splits():
    for name, said in STAGES.items():
        assert (said.parameters, said.gradients, said.optimizer) == SPLIT[name]


@pytest.mark.parametrize(
    ("stage", "said"),
    [("ddp", 2), ("zero-1", 2), ("zero-2", 2), ("zero-3", 3)],
)
def test_traffic_of_the_paper(stage, said):
    """2 Ψ, 2 Ψ, 2 Ψ and 3 Ψ numbers (section 7)."""
    assert zero_traffic(PSI, stage, "fp32") == said * PSI * 4
    assert zero_traffic(PSI, stage, "master") == said * PSI * 2
    assert zero_traffic(PSI, stage, "fp32", ranks=1) == 0
    assert zero_traffic(PSI, stage, "fp32", ranks=4) == said * PSI * 3


def test_what_is_sent_in_another_precision():
    """ZeRO-3 gathers what it computes with; what stays is sent as kept."""

    def each(stage, **sizes):
        return zero_traffic(1, stage, "fp32", **sizes)

    assert each("zero-3", gathered=2, reduced=4) == 2 * 2 + 4
    assert each("zero-3", reduced=2) == 2 * 4 + 2
    assert each("zero-2", gathered=2, reduced=1) == 4 + 1
    assert each("ddp", gathered=1, reduced=2) == 2 * 2


def test_what_is_meant_where_nothing_is_said():
    said = zero_states(PSI, 64, "zero-3", "master", "adam", waiting=False)
    assert zero_states(PSI, 64) == said
    assert zero_traffic(PSI) == zero_traffic(PSI, "zero-3", "master")


@pytest.mark.parametrize(
    ("stage", "each", "last"),
    [
        ("ddp", 2 * 3, 2),
        ("zero-1", 3 + 1, 1 + 1),
        ("zero-2", 3 + 1, 1 + 1),
        ("zero-3", 3 * (2 + 1), 3 * 2 + 1),
    ],
)
def test_traffic_of_three_micro_batches(stage, each, last):
    def numbers(**options):
        sent = zero_traffic(
            PSI, stage, "fp32", accumulation_steps=3, **options
        )
        return sent / (4 * PSI)

    assert numbers() == each
    assert numbers(synchronise_last=True) == last


@given(
    sizes,
    stages,
    recipes,
    groups,
    st.integers(1, 100),
    st.booleans(),
)
def test_traffic_is_a_sum_of_collectives(
    parameters, stage, recipe, ranks, steps, last
):
    """An all-reduce is two collectives, all others are one."""
    first, second, *_ = EACH[recipe]
    reductions = 1 if last else steps
    gathers = {"ddp": 0, "zero-1": 1, "zero-2": 1, "zero-3": 2 * steps}
    scatters = (2 if stage == "ddp" else 1) * reductions
    moved = parameters * (first * gathers[stage] + second * scatters)
    found = zero_traffic(
        parameters,
        stage,
        recipe,
        ranks=ranks,
        accumulation_steps=steps,
        synchronise_last=last,
    )
    assert found == math.floor(moved * Fraction(ranks - 1, ranks))


def test_results_cannot_be_changed():
    made = [k for k in vars(sharding).values() if isinstance(k, type)]
    made = [k for k in made if dataclasses.is_dataclass(k)]
    changing = [k for k in made if not k.__dataclass_params__.frozen]
    assert made and changing == []
