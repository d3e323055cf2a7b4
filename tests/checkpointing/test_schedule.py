"""Schedules: actions, segments, and what is wrong with them."""

import pytest

from membudget.checkpointing import (
    Action,
    ImpossibleAction,
    actions,
    simulate,
)


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([0, 1], "record 0, record 1, backward 1, backward 0"),
        (  # one segment runs twice
            [[0, 1]],
            "forward 0, forward 1, record 0, record 1, backward 1, backward 0",
        ),
        (  # it keeps its input until its backward pass is over
            [0, [1, 2], 3],
            "record 0, keep 1, forward 1, forward 2, record 3, backward 3, "
            "record 1, record 2, backward 2, backward 1, drop 1, backward 0",
        ),
        (  # a recomputation ends before the segment within, whose own
            # recomputation uses up its input
            [[0, [1, 2]]],
            "forward 0, forward 1, forward 2, record 0, keep 1, record 1, "
            "record 2, drop 1, backward 2, backward 1, backward 0",
        ),
        (  # a segment within that is not the last runs on
            [[[0], 1]],
            "forward 0, forward 1, forward 0, record 1, backward 1, record 0, "
            "backward 0",
        ),
    ],
    ids=str,
)
def test_the_actions_of_segments(segments, expected):
    assert ", ".join(map(str, actions(segments))) == expected


def test_ranges_and_tuples_are_segments_too():
    expected = actions([[0, 1], [2, 3]])
    assert actions([range(2), range(2, 4)]) == expected
    assert actions(((0, 1), (2, 3))) == expected
    for segments in ([range(2), range(2, 4)], ((0, 1), (2, 3))):
        assert simulate(4, segments) == simulate(4, expected)


def test_text_in_a_list_or_in_lines_is_a_schedule():
    lines = ["record 0", "  record   1 ", "backward 1", "backward 0"]
    expected = simulate(2, actions([0, 1]))
    assert simulate(2, lines) == expected
    assert simulate(2, "\n" + "\n".join(lines) + "\n  ") == expected
    assert simulate(2, [Action("record", 0), *lines[1:]]) == expected
    assert simulate(2, iter(lines)) == expected


# Bad input ---------------------------------------------------------------


@pytest.mark.parametrize("segments", [[0, 2], [0, 1, 2, 3], [[1, 0], 2]])
def test_each_stage_is_there_once_and_in_order(segments):
    sentence = r"hold the stages \[.*\]: use 0 to 2, each once, in order"
    with pytest.raises(ValueError, match=sentence):
        actions(segments, 3)
    with pytest.raises(ValueError, match=sentence):
        simulate(3, segments)


def test_an_empty_segment_is_refused():
    with pytest.raises(ValueError, match=r"^a segment is empty: it has at"):
        actions([0, [1, []]])
    with pytest.raises(ValueError, match=r"^there are no segments"):
        actions([])


@pytest.mark.parametrize("item", ["0", 1.0, True])
def test_what_is_no_stage_and_no_segment_is_refused(item):
    with pytest.raises(TypeError, match=r"^the segments hold .*: use st"):
        actions([0, [item]])


def test_actions_and_segments_do_not_mix():
    with pytest.raises(TypeError, match="hold 'record 1': use stage numbers"):
        simulate(2, [0, "record 1"])
    with pytest.raises(TypeError, match="hold 'record 1': use stage numbers"):
        simulate(2, ["record 1", [0]])


@pytest.mark.parametrize(
    "bad",
    [
        "sideways 0",
        "forward",
        "forward -1",
        None,
        Action("sideways", 0),
        Action("forward", 0.0),
    ],
)
def test_what_is_no_action_is_refused(bad):
    with pytest.raises(ImpossibleAction) as error:
        simulate(2, ["record 0", bad])
    assert error.value.index == 1
    assert str(error.value) == (
        f"action 1, {bad!r}: an action is one of forward, record, keep, "
        'drop, backward and the number of a stage, such as "forward 3"'
    )
