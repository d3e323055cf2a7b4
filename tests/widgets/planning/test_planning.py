"""The planner's traits, and the rows that it sends to the page."""

import json
from dataclasses import replace

import pytest

from membudget.cards import CARDS
from membudget.ledger import TARGETS, Adapter
from membudget.planning import Job
from membudget.widgets import Planning
from membudget.widgets import planning_rows as rows


def test_defaults():
    """Something that does not fit."""
    widget = Planning()
    assert (widget.model, widget.ranks) == ("Llama 3 8B", 1)
    assert widget.bytes == CARDS["A100 80 GB"].usable // 2**20 * 2**20
    assert widget.job == Job(rows.SHOWN["Llama 3 8B"], 8192, 16)
    free = {"recipe": ["autocast"], "optimizer": "adam", "adapter": None}
    assert widget.free == free
    assert widget.locks == widget.free
    with pytest.raises(ValueError, match="alone are 120 GiB"):
        widget.answer  # noqa: B018
    assert widget.sentence() == (
        "Llama 3 8B, 16 × 8192 tokens: its states alone need 120 GiB, and "
        "the budget is 78.8 GiB of one A100 80 GB. The planner finds the "
        "fastest way to train it."
    )


def test_the_readers_switches():
    switches = {"checkpointed": "all", "micro": 1}
    widget = Planning("small GPT", card="T4", batch=2, **switches)
    assert widget.free["recipe"] == ["autocast"]
    yours, best = widget.yours, widget.answer.best[0]
    assert (yours.plan.checkpointed, yours.plan.micro_batch) == (6, 1)
    assert yours.seconds > best.seconds
    widget.recipe = "any"
    assert widget.free["recipe"] == list(rows.MIXES)


def test_locks():
    widget = Planning("small GPT", ranks=8, batch=4, stage="zero-3", micro=4)
    assert widget.job.batch == 8
    assert widget.locks["micro_batch"] == 1
    assert widget.locks["stage"] == "zero-3"
    widget.optimizer = "adam-8bit"
    assert widget.locks["stage"] == "ddp"
    widget.checkpointed, widget.chunks = "all", "none"
    assert widget.locks["checkpointed"] == 6
    assert widget.locks["loss_chunks"] is None


def test_an_adapter_goes_with_one_recipe_and_with_ddp():
    settings = {"ranks": 2, "batch": 2, "stage": "zero-3"}
    widget = Planning("small GPT", trained="qlora", **settings)
    adapter = Adapter(TARGETS["gpt"], 16, four_bits=True)
    assert widget.free["recipe"] == ["bf16"]
    assert widget.locks["stage"] == "ddp"
    plan = widget.yours.plan
    assert (plan.adapter, plan.recipe) == (adapter, "bf16")
    assert "its states alone need 10.9 MiB" in widget.sentence()
    widget.trained = "lora"
    assert widget.free["adapter"] == replace(adapter, four_bits=False)


def test_a_models_tokens():
    widget = Planning()
    for model, network in rows.SHOWN.items():
        widget.model = model
        assert widget.tokens in rows.TOKENS[network.family]


def test_rows_that_another_beats_are_left_out():
    lines = [(100, 0), (50, 10), (0, 20), (0, 20), (-900, 30)]
    assert rows.upper(lines) == [0, 2, 4]
    assert rows.upper(lines, most=45) == [0, 2]


@pytest.mark.few(0)  # takes minutes
@pytest.mark.parametrize("name", list(rows.SHOWN))
def test_the_file_is_what_the_rows_say(name):
    """``python -m membudget.widgets.planning_rows`` writes it."""
    table = json.loads(json.dumps(rows.table(rows.SHOWN[name])))
    assert table == rows.known()[name]


def test_the_network_that_is_pasted():
    """Its network is the one that is shown."""
    for name, network in rows.SHOWN.items():
        made = Planning().tables["models"][name]["made"]
        space: dict = {}
        exec("from membudget.ledger import PRESETS, Transformer", space)
        assert eval(made, space) == network
