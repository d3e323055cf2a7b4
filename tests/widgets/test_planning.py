"""The planner's traits, and the rows that it sends to the page."""

import json

import pytest

from membudget.cards import CARDS
from membudget.planning import Job
from membudget.widgets import Planning
from membudget.widgets import planning_rows as rows


def test_defaults():
    widget = Planning()
    assert (widget.model, widget.card, widget.ranks) == ("GPT-2 124M", "T4", 1)
    assert widget.bytes == CARDS["T4"].usable // 2**20 * 2**20
    assert widget.job == Job(rows.SHOWN["GPT-2 124M"], 1024, 16)
    assert widget.locks == {"recipe": "fp32", "optimizer": "adam"}
    assert widget.sentence() == (
        "GPT-2 124M, 16 × 1024 tokens: its states alone need 1.85 GiB, and "
        "the budget is 14.1 GiB of one T4. The planner finds the fastest way "
        "to train it."
    )


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


def test_a_models_tokens():
    widget = Planning()
    for model, network in rows.SHOWN.items():
        widget.model = model
        assert widget.tokens in rows.TOKENS[network.family]


def test_rows_that_another_beats_are_left_out():
    lines = [(100, 0), (50, 10), (0, 20), (0, 20), (-900, 30)]
    assert rows._upper(lines) == {0, 2, 4}


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
