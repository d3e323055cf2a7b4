"""Loops that clear the gradients first, as most people's do."""

import pytest

from membudget.exercises.mistakes import mistakes

from .judging import accepts, checker, rejects

FIRST = {
    "train": "loss = => optimizer.zero_grad(); loss =",
    "train_step": "loss = => optimizer.zero_grad(); loss =",
    "clipped_amp_step": "loss = => optimizer.zero_grad(); loss =",
    "sensitive_step": "loss.backward() => \
        optimizer.zero_grad(); loss.backward()",
    "train_epoch": "total = => optimizer.zero_grad(); total =",
    "two_losses": "logits = => optimizer.zero_grad(); logits =",
}


def edited(name, text):
    ((_, loop),) = mistakes(checker(name).solution, f"{text}\na hint")
    return loop


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("how", ["", "set_to_none=False"])
def test_gradients_may_be_cleared_before_they_are_made(name, how):
    text = FIRST[name].replace("zero_grad()", f"zero_grad({how})")
    accepts(name, edited(name, f"{text}\noptimizer.zero_grad() =>"))


@pytest.mark.parametrize("name", FIRST)
def test_gradients_that_nobody_clears(name):
    rejects(name, edited(name, "optimizer.zero_grad() =>"), "")
