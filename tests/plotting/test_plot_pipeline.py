"""A pipeline's step, drawn: each operation where the replay has it."""

import matplotlib.pyplot as plt
import pytest

from membudget.parallelism import replay, table
from membudget.plotting import plot_pipeline


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_box_for_each_operation_at_its_time(schedule):
    order = table(schedule, 3, 6)
    run = replay(order)
    figure, axes = plt.subplots()
    plot_pipeline(axes, order, run)
    drawn = [
        (box.get_y() + 0.4, box.get_x(), box.get_x() + box.get_width())
        for box in axes.patches
    ]
    wanted = [
        (rank, start, end)
        for rank in range(3)
        for start, end in zip(run.starts[rank], run.ends[rank], strict=True)
    ]
    assert drawn == [pytest.approx(box) for box in wanted]
    numbers = [o.micro_batch for row in order for o in row]
    assert [int(text.get_text()) for text in axes.texts] == numbers
    labels = axes.get_legend_handles_labels()[1]
    split = ["forward", "inputs", "weights"]
    assert labels == (["forward", "backward"] if schedule == "1F1B" else split)
    plt.close(figure)
