"""Loops that clear the gradients first, as most people's do."""

import pytest

from membudget import exercises
from membudget.exercises.core import CORRECT, NOT_RIGHT
from membudget.exercises.mistakes import mistakes

FIRST = {
    "train": "loss = => optimizer.zero_grad(); loss =",
    "train_step": "loss = => optimizer.zero_grad(); loss =",
    "clipped_amp_step": "loss = => optimizer.zero_grad(); loss =",
    "sensitive_step": "loss.backward() => \
        optimizer.zero_grad(); loss.backward()",
    "train_epoch": "total = => optimizer.zero_grad(); total =",
    "two_losses": "logits = => optimizer.zero_grad(); logits =",
}


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("how", ["", "set_to_none=False"])
def test_gradients_may_be_cleared_before_they_are_made(name, how):
    check = getattr(exercises, f"check_{name}")
    text = FIRST[name].replace("zero_grad()", f"zero_grad({how})")
    ((_, loop),) = mistakes(
        check.solution, f"{text}\noptimizer.zero_grad() =>\nit is right"
    )
    outcome = check.judge(loop)
    assert outcome.state == CORRECT, outcome.text


@pytest.mark.parametrize("name", FIRST)
def test_gradients_that_nobody_clears(name):
    check = getattr(exercises, f"check_{name}")
    ((_, loop),) = mistakes(check.solution, "optimizer.zero_grad() =>\nwrong")
    assert check.judge(loop).state == NOT_RIGHT
