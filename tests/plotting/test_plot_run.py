"""The picture of what the tape machine counted."""

import matplotlib.pyplot as plt
import pytest

from membudget.checkpointing import (
    Stage,
    equal_segments,
    no_segments,
    simulate,
)
from membudget.plotting import plot_run


@pytest.fixture
def axes():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def heights(axes):
    """The top of the picture over each action."""
    tops = {}
    for band in axes.collections:
        for x, y in band.get_paths()[0].vertices:
            tops[x] = max(tops.get(x, 0), y)
    return tops


def test_the_bands_reach_what_is_alive(axes):
    run = simulate(9, equal_segments(9, 3))
    plot_run(axes, run)
    tops = heights(axes)
    for index, moment in enumerate(run.moments):
        # at its left edge a step has the height of both neighbours
        before = run.moments[index - 1].live if index else 0
        assert tops[index] == max(moment.live, before)


def test_the_dot_is_the_peak(axes):
    run = simulate(9, equal_segments(9, 3))
    plot_run(axes, run)
    (dot,) = axes.lines
    assert list(dot.get_xdata()) == [run.peak_moment + 0.5]
    assert list(dot.get_ydata()) == [6]


def test_recomputations_have_bands(axes):
    plot_run(axes, simulate(9, equal_segments(9, 3)))
    spans = [(p.get_x(), p.get_width()) for p in axes.patches]
    assert spans == [(11, 3), (18, 3), (25, 3)]
    assert axes.get_legend_handles_labels()[1].count("recomputation") == 1


def test_the_legend_names_what_there_is(axes):
    plot_run(axes, simulate(3, no_segments(3)))
    assert axes.get_legend_handles_labels()[1] == [
        "tapes",
        "gradient on its way back",
        "workspace",
    ]
    assert not axes.patches


def test_gradients_that_stay_are_drawn(axes):
    chain = [Stage(gradients=5), Stage(gradients=5)]
    run = simulate(chain, no_segments(2))
    plot_run(axes, run)
    assert max(heights(axes).values()) == run.peak == 8


def test_recomputed_tapes_have_their_own_colour(axes):
    plot_run(axes, simulate(9, equal_segments(9, 3)))
    labels = axes.get_legend_handles_labels()[1]
    assert "recomputed tapes" in labels and "tapes" not in labels
