"""The front page's widget: its sentence, and its file of rows."""

from itertools import product

import pytest

from membudget.ledger import PRESETS
from membudget.planning import Machine, seconds, work
from membudget.widgets import Fits, fits_rows
from tests.soak import SOAK


def test_the_first_picture_overflows_and_can_be_made_to_fit():
    widget = Fits()
    assert not widget.fits and widget.slowdown == 1
    assert "which does not fit the 23.1 GiB of the RTX 4090." in (
        widget.sentence()
    )
    widget.cut = widget.forget = True
    assert widget.fits
    assert repr(widget) == (
        "Fits(model='Llama 3.2 1B', card='RTX 4090', cut=True, forget=True)"
    )


def share_of_blocks(network):
    """Of the weights that multiply: all but the embedding and the head."""
    words = network.vocabulary * network.width
    embedding = 0 if network.tied else words
    return 1 - words / (network.parameters - embedding)


@pytest.mark.parametrize("model", fits_rows.SIZES)
def test_every_saving_costs_or_saves_what_its_chapter_says(model):
    """By the rows: the blocks' forward pass again is a third of their work,
    and less of the time, which has more in it; 16 bits halve the products next
    to TF32, and not all bytes. Each further micro-batch reads
    the weights twice, writes their gradients, and adds them to the others."""
    times = fits_rows.slowdowns(model, "A100 80 GB")
    by_state = dict(zip(fits_rows.STATES, times, strict=True))
    plain, *_ = by_state.values()
    assert plain == 1
    again = by_state[False, True, False, False, False] - 1
    assert 0.7 < again / (share_of_blocks(PRESETS[model]) / 3) < 1
    assert 0.5 < by_state[False, False, True, False, False] < 0.65  # than TF32
    whole, size = fits_rows.plan(model, *5 * [False]), fits_rows.SIZES[model]
    machine = Machine.of_card("A100 80 GB")
    took = seconds(work(fits_rows.job(model), whole), machine)
    passes = 4 * PRESETS[model].parameters * (2 + 1 + 3)
    split = (size.batch - 1) * passes / machine.bandwidth / took
    assert 0 < by_state[True, False, False, False, False] - 1 - split < 0.035
    assert by_state[False, False, False, False, True] > 1


# Those that are quick to compute, for CI; all in the soak.
SAMPLE = [
    *product(
        fits_rows.SIZES,
        [s for s in fits_rows.STATES if s[4] > s[1] and not s[3]],
    ),
    *product(["Llama 3.2 1B"], [s for s in fits_rows.STATES if s[0] > s[4]]),
]


@pytest.mark.parametrize(
    ("model", "state"),
    product(fits_rows.SIZES, fits_rows.STATES) if SOAK else SAMPLE,
)
def test_the_file_is_what_planning_says(model, state):
    """``python -m membudget.widgets.fits_rows`` writes it."""
    rows = dict(zip(fits_rows.STATES, fits_rows.known()[model], strict=True))
    assert fits_rows.row(model, *state) == rows[state]
