"""The solutions of chapter 3 against whole batches, and other answers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from membudget import accumulation, exercises
from membudget.accumulation import windows

from .judging import accepts, checker, rejects


def mean_loss(model, *batches):
    """Mean cross-entropy over all samples, or all non-padding tokens."""
    logits = [model(x).flatten(0, -2) for x, _ in batches]
    labels = [y.flatten() for _, y in batches]
    return F.cross_entropy(torch.cat(logits), torch.cat(labels))


def whole_batch(model, x, y, micro_batch):
    mean_loss(model, (x, y)).backward()


def whole_window(model, micro_batches):
    mean_loss(model, *micro_batches).backward()


def whole_epoch(model, optimizer, loader, steps):
    for window in windows(loader, steps):
        mean_loss(model, *window).backward()
        optimizer.step()
        optimizer.zero_grad()


def all_pairs(model, loss, x, micro_batch):
    loss(model(x)).backward()


def scan(peak, budget, global_batch):
    fits = [s for s in range(1, global_batch + 1) if peak(s) <= budget]
    if not fits:
        raise ValueError
    return fits[-1]


RIGHT = {
    "cached_backward": all_pairs,
    "accumulate": whole_batch,
    "padded_gradient": whole_window,
    "train_epoch": whole_epoch,
    "mean_of_means_error": accumulation.mean_of_means_error,
    "largest_micro_batch": scan,
}


@pytest.mark.parametrize("name", RIGHT)
def test_solution_does_what_the_whole_batch_does(name):
    check = checker(name)
    for case in check.cases:
        mine = check.see(check.solution, case)
        right = check.see(RIGHT[name], case)
        assert type(mine.raised) is type(right.raised)
        assert mine.parts.keys() == right.parts.keys()
        for part, numbers in right.parts.items():
            room = check.tolerance * numbers.norm().item()
            torch.testing.assert_close(
                mine.parts[part], numbers, rtol=0, atol=room
            )


def test_a_whole_batch_is_too_large():
    words = "10 samples ran through the model at once"
    rejects("accumulate", whole_batch, words)


def test_what_is_drawn_counts_as_the_window_does():
    counts, probabilities, draws = [6, 3, 1], [0.5, 0.2, 0.3], 4
    args = counts, probabilities, draws
    found = torch.tensor(exercises.check_selection_weights.solution(*args))
    expected = draws * torch.tensor(probabilities) * found
    torch.testing.assert_close(expected, torch.tensor([0.6, 0.3, 0.1]))


def test_noise_scale_of_exact_squares():
    square, variance, b, batch = 3.0, 40.0, 2, 8
    found = exercises.check_noise_scale.solution(
        square + variance / b, square + variance / batch, b, batch
    )
    assert found == pytest.approx(variance / square)


def test_slow_search_is_correct_with_a_remark():
    check = exercises.check_largest_micro_batch
    slow, quick = check.judge(scan), check.judge(check.solution)
    assert "It measured 1000 times" in slow.text
    assert "measured" not in quick.text


def autograd(model, x, y, micro_batch):
    parameters = list(model.parameters())
    parts = zip(x.split(micro_batch), y.split(micro_batch), strict=True)
    for a, b in parts:
        model(a)  # looked at, and not used
        loss = F.cross_entropy(model(a), b, reduction="sum") / len(x)
        grads = torch.autograd.grad(loss, parameters)
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad if p.grad is None else p.grad + grad


def array(counts, probabilities, draws):
    shares = np.array(counts) / np.sum(counts)
    return shares / (draws * np.array(probabilities))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("accumulate", autograd),
        ("largest_micro_batch", scan),
        ("selection_weights", array),
        ("selection_weights", lambda *args: tuple(array(*args).tolist())),
        ("selection_weights", lambda *args: torch.tensor(array(*args))),
    ],
)
def test_other_right_answers(name, answer):
    accepts(name, answer)
