"""The solutions on lean optimizers, against PyTorch's and the ledger."""

import pytest
import torch

from membudget import ledger

from .judging import checker


@pytest.mark.parametrize(
    "shapes", [[(6, 4)], [(5,), (6, 4), (3, 2, 5, 4)], [(1, 1)]]
)
def test_adafactors_states(shapes):
    weights = [torch.rand(shape, requires_grad=True) for shape in shapes]
    for w in weights:
        w.grad = torch.rand_like(w)
    stepper = torch.optim.Adafactor(weights)
    stepper.step()
    kept = sum(
        value.nbytes
        for state in stepper.state.values()
        for value in state.values()
    )
    solution = checker("adafactor_bytes").solution
    assert solution(shapes) == kept
    assert solution(shapes) == ledger.optimizer_bytes(
        shapes, "fp32", "adafactor"
    )


@pytest.mark.parametrize("optimizer", ["adam", "adam-8bit", "lion"])
def test_what_fits_by_the_ledger(optimizer):
    """The states just fit into what the solution leaves."""
    sizes = [10_000, 4096]
    found = ledger.states(sizes, "bf16", optimizer)
    capacity = found.total + 300
    most = checker("most_per_parameter").solution(sum(sizes), 2, 300, capacity)
    assert most * sum(sizes) == pytest.approx(found.optimizer)
