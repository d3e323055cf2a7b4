"""Machines: from a data sheet, and from a few runs."""

from dataclasses import replace
from math import inf

import pytest
import torch

from membudget.cards import CARDS
from membudget.ledger import PRESETS, Transformer
from membudget.planning import (
    Job,
    Machine,
    Plan,
    Work,
    calibrate,
    search,
    seconds,
    work,
)
from membudget.planning.machine import EFFICIENCY, LAUNCH, least_squares

JOB = Job(Transformer(40, 16, 2, 4), 16, 8)
MADE_UP = Machine(2e9, 3e9, 4e-6, inf, "made up")


def test_a_step_takes_the_sum_of_its_four_costs():
    one = Work(flops=10**9, bytes=6 * 10**9, operators=10**6, traffic=10**8)
    linked = replace(MADE_UP, link=1e9)
    assert seconds(one, MADE_UP) == pytest.approx(0.5 + 2 + 4)
    assert seconds(one, linked) == pytest.approx(0.5 + 2 + 4 + 0.1)


def test_calibration_finds_the_machine_that_made_the_times():
    tried = []

    def run(plan):
        tried.append(plan)
        return seconds(work(JOB, plan), MADE_UP)

    found = calibrate(run, JOB)
    assert len(set(tried)) == 4
    assert found.flops == pytest.approx(2e9)
    assert found.bandwidth == pytest.approx(3e9)
    assert found.operator == pytest.approx(4e-6)
    assert found.link == inf
    assert "4 runs" in found.source


def test_a_cost_is_never_negative():
    """Times that fall with the operators: these are left out."""
    plans = [Plan(8), Plan(4), Plan(1), Plan(8, 2)]

    def run(plan):
        one = work(JOB, plan)
        return one.flops / 2e9 - one.operators * 1e-8

    found = calibrate(run, JOB, plans)
    assert found.operator == 0
    assert found.flops > 0 and found.bandwidth > 0


def test_least_squares_against_many_guesses():
    """Of a thousand points around it none is better."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows = torch.randn(4, 3, generator=generator, dtype=torch.double)
        x = torch.tensor(least_squares(rows), dtype=torch.double)
        assert (x >= 0).all()
        steps = torch.randn(1000, 3, generator=generator, dtype=torch.double)
        others = (x + 0.3 * steps).clamp(min=0)
        errors = (others @ rows.t() - 1).norm(dim=1)
        assert (rows @ x - 1).norm() <= errors.min() + 1e-12


def test_a_calibration_is_refused():
    with pytest.raises(ValueError, match="2 ranks: calibrate on one"):
        calibrate(lambda plan: 1.0, JOB, [Plan(1, ranks=2)] * 3)
    with pytest.raises(ValueError, match="has 2: use 3 plans or more"):
        calibrate(lambda plan: 1.0, JOB, [Plan(1)] * 2)


def test_a_card_by_its_data_sheet():
    card = Machine.of_card("A100 80 GB")
    assert card.rate("fp32") == EFFICIENCY * 156e12  # TF32
    assert card.rate("autocast") == EFFICIENCY * 312e12
    assert card.bandwidth == EFFICIENCY * 2039e9
    assert card.operator == LAUNCH
    linked = Machine.of_card("A100 80 GB", link=1e11)
    assert (card.link, linked.link) == (EFFICIENCY * 300e9, 1e11)
    assert "2021" in card.source and "not measured" in card.source


@pytest.mark.parametrize(
    ("card", "recipe", "rate", "said"),
    [
        ("T4", "fp32", 8.1, "fp32 products in fp32"),
        ("T4", "autocast", 65, "16-bit ones in fp16 (autocast)"),
        ("T4", "master", 8.1, "or emulated bf16"),
        ("H100 80 GB", "fp32", 494.7, "fp32 products in TF32"),
        ("H100 80 GB", "bf16", 989.4, "16-bit ones in bf16,"),
    ],
)
def test_each_recipe_has_its_own_rate(card, recipe, rate, said):
    found = Machine.of_card(card)
    assert found.rate(recipe) == pytest.approx(EFFICIENCY * rate * 1e12)
    assert said in found.source
    done = Work(10**12, 0, 0, 0)
    assert seconds(done, found, recipe) == 1e12 / found.rate(recipe)


def test_a_machine_that_lacks_a_rate():
    made = Machine({"fp32": 1e12}, 1e11, 1e-5, inf, "made up")
    with pytest.raises(ValueError, match="no recipe 'bf16'"):
        made.rate("bf16")
    with pytest.raises(ValueError, match="no recipe 'half'"):
        Machine({"half": 1e12}, 1e11, 1e-5, inf, "made up")


def test_the_search_knows_that_16_bits_are_faster():
    """Twice as fast as TF32, and what is not a product takes its time."""
    job = Job(PRESETS["Llama 3.2 1B"], 512, 8)
    locks = {"checkpointed": 0, "loss_chunks": None}  # there is room
    both = locks | {"recipe": ["fp32", "autocast"]}
    machine = Machine.of_card("A100 80 GB")
    found = search(job, 10**12, machine, locks=both)
    fp32 = search(job, 10**12, machine, locks=locks)
    assert found.best[0].plan.recipe == "autocast"
    assert 0.5 < found.best[0].seconds / fp32.best[0].seconds < 0.75


def test_newer_cards_are_faster():
    """Of those with the same purpose, in the order of their sheets."""
    for older, newer in (("T4", "A100 40 GB"), ("A100 80 GB", "H100 80 GB")):
        a, b = CARDS[older], CARDS[newer]
        assert a.half_flops < b.half_flops and a.flops < b.flops
        assert a.bandwidth < b.bandwidth and a.link < b.link
        assert a.flops < a.half_flops
