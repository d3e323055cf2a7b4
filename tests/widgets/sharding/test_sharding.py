"""The sharding widget's traits and numbers."""

import ast
import inspect

import pytest
import sharding_cases

from membudget import cards, sharding
from membudget.ledger import PRESETS, RECIPES, bytes_per_parameter
from membudget.widgets import Sharding
from membudget.widgets import sharding as module
from membudget.widgets.sharding import (
    CARDS,
    HOW,
    MODELS,
    POLICY,
    STAGE_NAMES,
    TEXTS,
)


@pytest.fixture
def widget():
    return Sharding()


def test_defaults(widget):
    assert (widget.model, widget.ranks, widget.stage) == (
        "7.5 B",
        64,
        "zero-3",
    )
    assert (widget.recipe, widget.accumulation_steps) == ("master", 1)
    assert (widget.synchronise_last, widget.card) == (False, "none")
    assert widget.sentence() == (
        "ZeRO-3 on 64 ranks: each holds 1.75 GiB of model states, borrows up "
        "to 894 MiB for a block, and sends 41.3 GiB per step."
    )
    assert Sharding(stage="ddp").sentence() == (
        "DDP on 64 ranks: each holds 112 GiB of model states and sends "
        "27.5 GiB per step."
    )
    alone = Sharding(ranks=1).sentence()
    assert alone == "ZeRO-3 on 1 rank: it holds all 112 GiB."


def test_names_are_the_rooms():
    assert list(STAGE_NAMES) == list(sharding.STAGES)
    assert list(HOW) == [*RECIPES, POLICY]
    assert {name: of.text for name, of in RECIPES.items()} == TEXTS
    assert list(CARDS) == ["none", *cards.CARDS]
    assert CARDS["T4"] == cards.CARDS["T4"].usable
    for name, count in MODELS.items():
        assert name not in PRESETS or PRESETS[name].parameters == count
    assert MODELS["GPT-2 124M"] == 124_439_808


def test_what_the_browser_sends(widget):
    widget.set_state({"model": 12345, "ranks": 8, "card": "RTX 4090"})
    assert (widget.parameters, widget.ranks) == (12345, 8)
    widget.set_state({"model": "1.3 B"})
    assert widget.parameters == 1_300_000_000


def test_the_papers_example():
    """Figure 1 of Rajbhandari et al. (2020): 7.5 B on 64 ranks, in GB."""
    sizes = [
        round(Sharding(stage=stage).states().total / 1e9, 1)
        for stage in STAGE_NAMES
    ]
    assert sizes == [120.0, 31.4, 16.6, 1.9]


def test_its_own_numbers_are_those_of_every_stage():
    for state in sharding_cases.settings(1009):
        widget = Sharding(**state)
        of = sharding_cases.numbers(widget)[widget.stage]
        assert widget.sent() == of.pop("sent")
        assert widget.borrowed() == of.pop("borrowed")
        assert widget.states().total == sum(of.values())


@pytest.mark.parametrize("blocks", [1, 8, 128])
def test_fsdp_borrows_more(blocks):
    """It begins the next block before one is done, so it holds at least what
    the widget says, but for a shard that is not yet reduced."""
    count = 2**20
    widget = Sharding(count, ranks=64, recipe="fp32", blocks=blocks)
    units = [sharding.Unit("", ((count // blocks,),))] * blocks
    most = sharding.rank_moments(units, 64, version="2.13").backward
    extra = most.total - sharding.rank_states(units, 64).total
    shard = widget.states().gradients // blocks
    assert widget.borrowed() - shard <= extra


def test_the_policy_is_fsdps():
    """As chapter 9 measures it: 4 + 4 + 8 bytes in shards, 8 bytes moved."""
    widget = Sharding(2**20, ranks=4, recipe=POLICY)
    assert widget.states().total == 16 * 2**20 // 4
    assert widget.sent() == (2 + 2 + 4) * 2**20 * 3 // 4
    unit = sharding.Unit("", ((2**20,),))
    moved = sharding.fsdp_traffic([unit], 4, gathered=2, reduced=4)
    assert widget.sent() == sum(
        sharding.sent(name, t.bytes, 4) for name, t in moved.items()
    )
    held = sharding.rank_states([unit], 4)  # fp32; Adam counts in 4 bytes
    assert widget.states().total == held.total - 4


def test_what_the_page_computes_with(widget):
    """Coefficients of bytes that are sent: in fp32 how many Ψ, times 4."""
    rows = {name: rest for name, *rest in widget.tables["recipes"]}
    for name, (_, each, sent, gathered) in rows.items():
        assert gathered == (2 if name == POLICY else each[0])
        kept = bytes_per_parameter(HOW[name][0])
        assert each == [kept.parameters, kept.gradients, kept.optimizer]
        assert len(sent) == len(STAGE_NAMES)
    assert rows["fp32"][2] == [[0, 0, 8], [4, 0, 4], [4, 0, 4], [0, 8, 4]]
    assert rows[POLICY][2][3] == [0, 4, 4]


def test_other_widgets_do_not_wait_for_fsdp():
    """PyTorch's takes most of a second: it is imported with the first one."""
    tree = ast.parse(inspect.getsource(module))
    at_once = [
        f"{getattr(node, 'module', None)} {name.name}"
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    assert len(at_once) > 5
    assert [text for text in at_once if "sharding" in text] == []
