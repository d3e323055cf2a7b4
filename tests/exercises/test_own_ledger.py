"""The checker of a reader's own ledger, on models of several kinds."""

from functools import cache
from itertools import zip_longest

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget import models
from membudget.exercises import check_own_ledger as own
from membudget.exercises.core import CORRECT, NOT_ATTEMPTED, NOT_RIGHT
from membudget.exercises.own_ledger import cross_entropy, own_ledger
from membudget.measuring import trace_step

from .pages import on_its_page
from .test_exercises import (
    EMPTY,
    another_state,
    raises,
    recursive,
    refuses,
)


def of_words(model, tokens):
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def frozen_mlp():
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad]
    )
    batch = torch.rand(5, 6), torch.zeros(5, dtype=torch.long)
    return model, optimizer, cross_entropy, batch


def norm_net():
    model = models.convnet((4,), inputs=2, outputs=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.rand(5, 2, 4, 4), torch.zeros(5, dtype=torch.long)
    return model, optimizer, cross_entropy, batch


def tied_gpt():
    model = models.GPT(vocabulary=30, context=8, width=8, depth=1, tied=True)
    optimizer = torch.optim.Adam(model.parameters())
    return model, optimizer, of_words, torch.zeros(2, 8, dtype=torch.long)


def half_llama(device="meta"):
    with torch.device(device):
        model = models.Llama(depth=1).bfloat16()
        tokens = torch.zeros(2, 8, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, of_words, (tokens,)


def without_optimizer():
    model, _, loss, batch = frozen_mlp()
    return model, None, loss, batch


def plain_sgd():
    model, _, loss, batch = frozen_mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch


def example():
    return own_ledger()[:4]


@cache
def right_ledger(build):
    """By a step that runs."""
    made = build("cpu") if build is half_llama else build()
    model, optimizer, loss, batch = made
    if not isinstance(batch, tuple):
        batch = (batch,)
    tracker = trace_step(model, loss, *batch, optimizer=optimizer)
    (begin,) = [i for i, label in tracker.marks if label == "backward"]
    steps = [i for i, label in tracker.marks if label == "step"]
    step = steps[0] if steps else len(tracker.timeline)
    return {
        "parameters": tracker.split(-1)["parameters"],
        "gradients": tracker.split(step - 1)["gradients"],
        "optimizer": tracker.split(-1)["optimizer"],
        "activations": tracker.split(begin - 1)["activations"],
    }


def judged(build, **change):
    """The outcome for a right ledger with some entries changed."""
    guess = dict(right_ledger(build))
    for name, new in change.items():
        guess[name] = new(guess[name]) if callable(new) else guess[name] + new
    return own.judge(lambda: (*build(), guess))


def test_solution(capsys):
    assert own(on_its_page(own_ledger)) is None
    model, optimizer, loss, batch, _ = own_ledger()
    peak = trace_step(model, loss, *batch, optimizer=optimizer).peak
    assert f"is {peak} bytes" in " ".join(capsys.readouterr().out.split())
    assert repr(own) == "check_own_ledger"


MISTAKES = {
    example: {
        "parameters": [
            (lambda n: n // 4, "numbers, not bytes"),
            (-4 * (256 + 10), "biases and norms"),
            (-4 * 2560, "As much as `2.weight` has"),
            (lambda n: 2 * n, "Twice what is right"),
            (1, "- parameters: 1 bytes too many.\n"),
        ],
        "gradients": [
            (lambda n: 0, "Nothing is counted"),
            (lambda n: 8 * n, "These are bits"),
        ],
        "optimizer": [
            (-16, "4 bytes for each trained tensor, 16 in all."),
            (-12, "4 bytes for each trained tensor, 16 in all."),
            (-4 * 19210, "AdamW keeps two numbers"),
            (4 * 19210, "entries of their own"),
        ],
        "activations": [
            (-8, "The loss keeps 8 bytes for itself"),
            (-4, "The loss keeps 8 bytes for itself"),
            (4 * 32 * 64 + 8 * 32, "The batch has an entry"),
            (
                4 * 32 * 64 + 8 * 32 - 8,
                "The batch has an entry of its own, inputs. The loss keeps 8",
            ),
            (
                4 * 32 * 256,
                "`aten.addmm` makes in layer 0, 32768 bytes, is not kept",
            ),
            (
                -4 * 32 * 256 - 8,
                "`aten.relu` makes in layer 1, 32768 bytes, is missing. The l",
            ),
            (99, "1 (32768), the loss (1288)."),
        ],
    },
    frozen_mlp: {
        "parameters": [(-4 * 70, "Frozen parameters are missing")],
        "gradients": [(4 * 70, "Frozen parameters have no gradients")],
        "optimizer": [
            (8, "A frozen tensor has no counter"),
            (8 * 70, "Frozen parameters have no states"),
            (8 * 70 + 8, "no states. A frozen tensor has no counter"),
        ],
    },
    norm_net: {
        "parameters": [
            (-(4 + 4) * 4 - 8, "buffers are missing"),
            (-4 * 11, "biases and norms"),
        ],
        "gradients": [(40, "Buffers have no gradients")],
        "optimizer": [(lambda n: 2 * n, "SGD keeps one number")],
    },
    tied_gpt: {
        "parameters": [(4 * 30 * 8, "shared weight is one tensor")],
        "gradients": [(4 * 30 * 8, "shared weight is one tensor")],
    },
    half_llama: {
        "parameters": [(lambda n: 2 * n, "In fp32, yes")],
        "activations": [(99, "Most bytes are made in these layers")],
    },
    plain_sgd: {"optimizer": [(8 * 33 + 8, "SGD keeps nothing")]},
    without_optimizer: {"optimizer": [(8, "There is no optimizer")]},
}
"""Of an entry: what is added or done to it, and words of the hint."""


@pytest.mark.parametrize("build", MISTAKES)
def test_right(build):
    outcome = judged(build)
    assert outcome.state == CORRECT
    assert "The peak of this step is " in outcome.text


@pytest.mark.parametrize("build", MISTAKES)
def test_mistakes(build):
    entries = MISTAKES[build]
    for row in zip_longest(*entries.values()):
        wrong = {n: w for n, w in zip(entries, row, strict=True) if w}
        outcome = judged(build, **{n: new for n, (new, _) in wrong.items()})
        assert outcome.state == NOT_RIGHT
        assert outcome.text.startswith(f"{4 - len(wrong)} of 4 entries ")
        assert outcome.text.count(": right.") == 4 - len(wrong)
        for name, (_, words) in wrong.items():
            _, rest = f"{outcome.text}\n".split(f"- {name}: ")
            line = f"- {name}: {rest.splitlines(True)[0]}"
            assert " bytes too " in line
            assert words in line


def test_is_printed_line_by_line(capsys):
    guess = dict.fromkeys(right_ledger(example), 100)
    own(lambda: (*example(), guess))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{NOT_RIGHT} 0 of 4 entries are right to the byte."
    assert [x.split(":")[0] for x in lines if x.startswith("- ")] == [
        f"- {name}" for name in guess
    ]
    assert all(len(line) < 80 for line in lines)


def with_parts(**parts):
    """The solution's result with parts that are replaced."""
    names = ["model", "optimizer", "loss", "batch", "guess"]
    result = dict(zip(names, own_ledger(), strict=True))
    return lambda: tuple((result | parts).values())


def with_guess(**entries):
    return with_parts(guess=own_ledger()[4] | entries)


BROKEN = {
    "arguments": (lambda model: 1, "takes (model); keep `own_ledger()`."),
    "a string": (lambda: "abcde", "your function returns a str: `return mod"),
    "too short": (lambda: (1, 2), "your function returns a tuple of 2: "),
    "no model": (with_parts(model=3), "the model is an int"),
    "no optimizer": (with_parts(optimizer="adam"), "the optimizer is a str"),
    "an optimizer of others": (
        with_parts(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        "parameters that are not the model's",
    ),
    "no loss": (with_parts(loss=0.5), "the loss is a float"),
    "no batch": (
        with_parts(batch=()),
        "the batch holds a tuple: tensors are needed",
    ),
    "numbers": (with_parts(batch=([1, 2], 3)), "the batch holds a list"),
    "one tensor": (with_parts(batch=torch.rand(32, 64)), "TypeError: "),
    "a loss of values": (
        with_parts(loss=lambda model, x, y: model(x).sum().item()),
        "use no .item()",
    ),
    "no operator": (with_parts(loss=raises(NotImplementedError())), "dry run"),
    "a guess of words": (with_parts(guess="many"), "the guess is a str"),
    "an unknown key": (with_guess(total=3), "the guess has the key 'total'"),
    "a missing key": (with_parts(guess={"parameters": 3}), "gradients is mi"),
    "a word": (with_guess(optimizer="4"), "the guess for optimizer is a str"),
    "a truth": (with_guess(optimizer=True), "optimizer is a bool"),
    "nan": (with_guess(optimizer=float("nan")), "bytes are whole numbers"),
    "a half": (with_guess(optimizer=0.5), "optimizer is 0.5: bytes are whol"),
    "unknown and unprintable": (
        with_parts(guess={type("K", (), {"__repr__": recursive})(): 3}),
        "RecursionError",
    ),
}


@pytest.mark.few(7)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_ledger(kind, capsys):
    refuses(own, *BROKEN[kind], capsys)


EMPTY_LEDGERS = [
    *EMPTY.values(),
    with_parts(guess={}),
    with_parts(guess={"parameters": ..., "gradients": None}),
]


@pytest.mark.parametrize("empty", EMPTY_LEDGERS)
def test_not_attempted(empty):
    assert own.judge(empty).state == NOT_ATTEMPTED


def test_forgotten_return():
    def forgets():
        result = own_ledger()
        len(result)

    assert "returns None: end it with `return`" in own.judge(forgets).text


def test_takes_numbers_of_any_kind():
    guess = own_ledger()[4]
    for kind in (float, np.int64, torch.tensor, np.float64):
        outcome = own.judge(
            with_parts(guess={name: kind(n) for name, n in guess.items()})
        )
        assert outcome.state == CORRECT


def test_leaves_everything_as_it_is():
    result = own_ledger()
    model, optimizer, *_ = result
    before = [p.clone() for p in model.parameters()]
    with another_state():
        assert own.judge(own_ledger).state == CORRECT
        assert own.judge(lambda: result).state == CORRECT
    assert not optimizer.state
    assert all(map(torch.equal, model.parameters(), before))
