"""Three running sums: the same gradient, different peaks."""

from functools import partial
from itertools import cycle

import pytest
import torch
from accumulation_helpers import refused

from membudget.accumulation import (
    in_place,
    memory_aware,
    new_sum,
    sum_gradients,
)
from membudget.measuring import PeakTracker
from membudget.models import mlp

ROWS = 2  # in each micro-batch


class Setting:
    """An MLP and ``k`` micro-batches, small against its parameters."""

    def __init__(self, width=32, depth=3, k=3):
        torch.manual_seed(0)
        self.model = mlp(8, width, depth, 4)
        self.parameters = list(self.model.parameters())
        self.x = torch.randn(k * ROWS, 8)

    def losses(self):
        for part in self.x.split(ROWS):
            yield self.model(part).square().sum()

    def bytes_of(self, run):
        """Peak, above parameters and inputs, and what stays."""
        with PeakTracker(self.x, *self.parameters) as tracker:
            result = run()
        after = tracker.live
        del result
        return tracker.peak - tracker.start, after - tracker.start


turns = cycle([True, False, False, True])
STRATEGIES = {
    "new sum": new_sum,
    "in place": in_place,
    "changing": memory_aware(lambda: next(turns)),
}
each_strategy = pytest.mark.parametrize(
    "add", STRATEGIES.values(), ids=STRATEGIES
)


@each_strategy
@pytest.mark.parametrize("k", [1, 5])
def test_every_strategy_gives_the_sum_of_the_gradients(add, k):
    setting = Setting(k=k)
    found = sum_gradients(setting.losses(), setting.parameters, add)
    assert all(p.grad is None for p in setting.parameters)
    for loss in setting.losses():
        loss.backward()
    for ours, p in zip(found, setting.parameters, strict=True):
        assert torch.equal(ours, p.grad)  # the same additions, in order


@pytest.mark.parametrize(
    ("width", "depth", "k"), [(32, 3, 2), (64, 4, 3), (32, 4, 7)]
)
def test_peak_bytes(width, depth, k):
    """Hand counts, for micro-batches that are small against the gradient.

    With u the bytes of one hidden activation and G those of a gradient:

    - new sum: old sum, gradient and new sum, and the scalar loss;
    - in place: sum and gradient, while the first layer's backward still
      holds its output's gradient, the loss and the square's gradient;
    - ``param.grad`` adds each parameter's gradient as it comes, so only the
      largest is alive beside the sum. The moment is the backward of the
      last square layer: its weight's and bias's gradient, its output's and
      input's gradient, and the outputs of the layers before it.
    """
    setting = Setting(width, depth, k)

    def losses():
        for part in setting.x.split(ROWS):
            yield setting.model(part).sum()

    def loop():
        for loss in losses():
            loss.backward()

    u = 4 * ROWS * width
    g = sum(p.nbytes for p in setting.parameters)
    scalars = 4 + 4  # the loss and its gradient
    largest = 4 * width * width + 4 * width
    peaks = {
        "new sum": 3 * g + 4,
        "in place": 2 * g + u + scalars,
        "param.grad": g + largest + 2 * u + (depth - 2) * u + scalars,
    }
    for add, name in (
        (new_sum, "new sum"),
        (in_place, "in place"),
        (memory_aware(lambda: True), "in place"),
        (memory_aware(lambda: False), "new sum"),
    ):
        sums = partial(sum_gradients, losses(), setting.parameters, add)
        assert setting.bytes_of(sums) == (peaks[name], g)
    peak, _ = setting.bytes_of(loop)
    assert peak == peaks["param.grad"]
    assert sum(p.grad.nbytes for p in setting.parameters) == g
    assert peaks["param.grad"] < peaks["in place"] < peaks["new sum"]


def test_memory_aware_asks_before_every_addition():
    setting, asked = Setting(k=5), []

    def is_tight():
        asked.append(True)
        return len(asked) % 2 == 0

    sum_gradients(setting.losses(), setting.parameters, memory_aware(is_tight))
    assert len(asked) == 4


def test_in_place_keeps_the_tensors_and_a_new_sum_does_not():
    total, more = [torch.ones(3)], [torch.ones(3)]
    assert in_place(total, more)[0] is total[0]
    assert torch.equal(total[0], torch.full((3,), 2.0))
    assert new_sum(total, more)[0] is not total[0]
    assert torch.equal(total[0], torch.full((3,), 2.0))
    message = (
        "the sum has 1 tensors and the gradient 2: use one for each "
        "parameter in both"
    )
    for add in (in_place, new_sum):
        with refused(ValueError, message):
            add(total, [*more, *more])


@each_strategy
def test_gradients_that_share_their_memory(add):
    """Autograd hands one tensor to both summands, and an expanded one."""
    a, b, c = (torch.ones(3, requires_grad=True) for _ in range(3))
    x = torch.tensor([1.0, 2.0, 3.0])
    losses = (((a + b) * x).sum() + c.sum() for _ in range(3))
    found = sum_gradients(losses, [a, b, c], add)
    expected = [3 * x, 3 * x, torch.full((3,), 3.0)]
    assert all(map(torch.equal, found, expected))


def test_no_losses():
    message = "losses is empty: give at least one micro-batch"
    with refused(ValueError, message):
        sum_gradients(iter(()), [torch.ones(1, requires_grad=True)], new_sum)
