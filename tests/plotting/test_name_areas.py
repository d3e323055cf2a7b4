"""Names on areas and bars."""

import matplotlib.pyplot as plt
import pytest

from membudget.plotting import name_areas


@pytest.fixture
def axes():
    figure, axes = plt.subplots(layout="constrained")
    yield axes
    plt.close(figure)


def legend(axes):
    legends = axes.figure.legends
    return [text.get_text() for one in legends for text in one.get_texts()]


def boxes(axes):
    """Where the names stand, in data."""
    axes.figure.draw_without_rendering()
    to_data = axes.transData.inverted()
    return {
        text.get_text(): to_data.transform_bbox(text.get_window_extent())
        for text in axes.texts
    }


def test_a_name_stands_in_its_area(axes):
    """In the part with most room: a hill on the right."""
    axes.fill_between([0, 6, 8, 10], [1, 1, 9, 9], label="low, then high")
    name_areas(axes)
    assert legend(axes) == []
    box = boxes(axes)["low, then high"]
    slope = 1 + 4 * (box.x0 - 6)
    assert box.x1 < 10 and box.y0 > 0 and box.y1 < min(slope, 9)


def test_a_name_stands_in_the_largest_bar(axes):
    axes.bar([0, 1, 2], [1, 5, 3], label="here")
    axes.bar([0, 1, 2], [4, 2, 3], bottom=[1, 5, 3], label="there")
    name_areas(axes)
    assert legend(axes) == []
    here, there = boxes(axes).values()
    assert 0.6 < here.x0 < here.x1 < 1.4 and 0 < here.y0 < here.y1 < 5
    assert -0.4 < there.x0 < there.x1 < 0.4 and 1 < there.y0 < there.y1 < 5


def test_what_has_no_room_is_in_a_legend_above(axes):
    axes.set_ylim(0, 100)
    axes.fill_between([0, 10], [1, 1], label="flat")
    axes.barh([50], [0.01], height=30, label="narrow")
    axes.fill_between([0, 10], [90, 90], [60, 60], label="wide")
    axes.plot([0, 10], [1, 95], label="line")
    name_areas(axes)
    assert sorted(legend(axes)) == ["flat", "line", "narrow"]
    assert [*boxes(axes)] == ["wide"]
    axes.figure.draw_without_rendering()
    below = axes.figure.legends[0].get_window_extent().y0
    assert below >= axes.get_window_extent().y1


def test_several_pictures_have_one_legend():
    figure, axes = plt.subplots(2, layout="constrained")
    axes[0].bar([0], [1], label="both")
    axes[0].bar([1], [1e-3], label="low here")
    axes[1].bar([0], [1], label="both")
    axes[1].bar([1], [1], label="low here")
    axes[1].bar([2], [1e-3], label="low")
    name_areas(*axes)
    assert legend(axes[0]) == ["low"]
    assert [[*boxes(one)] for one in axes] == [["both"], ["both", "low here"]]
    plt.close(figure)


def test_nothing_to_name(axes):
    axes.plot([0, 1])
    axes.fill_between([0, 1], [1, 1])
    name_areas(axes)
    assert legend(axes) == [] and not axes.texts
