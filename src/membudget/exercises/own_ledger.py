"""The last exercise on the ledger: that of a model of the reader's own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple, SupportsFloat

import torch
import torch.nn.functional as F
from torch import nn

from membudget import ledger
from membudget.exercises import guard
from membudget.exercises.core import (
    CORRECT,
    NOT_ATTEMPTED,
    NOT_RIGHT,
    Checker,
    Outcome,
)
from membudget.exercises.guard import Problem
from membudget.exercises.observe import is_empty, returned
from membudget.ledger import Account
from membudget.measuring import Allocation

ENTRIES = ("parameters", "gradients", "optimizer", "activations")
ORDER = "model, optimizer, loss, batch, guess"
NEEDED = {
    "model": (nn.Module, f"a torch.nn.Module. The order is {ORDER}"),
    "optimizer": (
        torch.optim.Optimizer | None,
        f"a torch.optim.Optimizer or None. The order is {ORDER}",
    ),
    "loss": (Callable, "a function, called as `loss(model, *batch)`"),
    "batch": (list | tuple, "a tensor or a tuple of tensors"),
    "guess": (Mapping, f"a dictionary with the keys {', '.join(ENTRIES)}"),
}
"""Of each part of the result: its kind, and that in words."""
PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "": "before it begins",
}


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def own_ledger():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.rand(32, 64), torch.zeros(32, dtype=torch.long)
    n = 64 * 256 + 256 + 256 * 10 + 10
    guess = {"parameters": 4 * n, "gradients": 4 * n}
    guess["optimizer"] = 8 * n + 4 * 4  # four tensors
    guess["activations"] = 4 * 32 * 256 + 4 * 32 * 10 + 8  # ReLU, loss
    return model, optimizer, cross_entropy, batch, guess


class OwnLedger(Checker):
    """The checker of a ledger that the reader filled in for any model.

    The function returns ``model, optimizer, loss, batch, guess``: a module,
    its optimizer or None, a function called as ``loss(model, *batch)``, a
    tensor or several, and a dictionary of bytes with the keys ``parameters``
    (with the buffers), ``gradients``, ``optimizer`` and ``activations`` (when
    the forward pass is over). A dry run tells what is right: nothing is
    allocated, and the model may be on ``meta``.
    """

    def judge(self, fn: Callable | None) -> Outcome:
        """The outcome; whatever ``fn`` does, nothing is raised."""
        problem = guard.unusable(fn, self.signature)
        if fn is None or problem:
            return Outcome(NOT_RIGHT, problem)
        with guard.sealed():
            try:
                return _outcome(fn)
            except KeyboardInterrupt:
                raise
            except Problem as found:
                if not found.args:
                    return Outcome(NOT_ATTEMPTED)
                return Outcome(NOT_RIGHT, str(found))
            except BaseException as error:
                if guard.is_stub(error):
                    return Outcome(NOT_ATTEMPTED)
                return Outcome(NOT_RIGHT, guard.describe(error, fn))


def _outcome(fn: Callable) -> Outcome:
    step = _looked_through(returned(fn, fn()))
    guess = _read(step.guess)
    account = _accounted(step)
    states = account.states
    right = {
        "parameters": states.parameters,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": account.activations,
    }
    if guess == right:
        return Outcome(
            CORRECT,
            "All four entries are right to the byte. The peak of this step "
            f"is {account.peak} bytes, {PHASES[account.moment[2]]}.",
        )
    number = sum(guess[name] == right[name] for name in ENTRIES)
    verb = "is" if number == 1 else "are"
    lines = [f"{number} of 4 entries {verb} right to the byte."]
    for name, causes in _causes(step, account).items():
        told = _compared(guess[name], right[name], *causes)
        lines.append(f"- {name}: {told}")
    return Outcome(NOT_RIGHT, "\n".join(lines))


class _Step(NamedTuple):
    """What the reader's function returned."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    loss: Callable[..., torch.Tensor]
    batch: Sequence[torch.Tensor]
    guess: Mapping[str, object]


def _looked_through(result: object) -> _Step:
    """The parts of the result, each of the right kind."""
    held = guard.kind(result)
    if isinstance(result, list | tuple):
        held += f" of {len(result)}"
    if not isinstance(result, list | tuple) or len(result) != len(NEEDED):
        raise Problem(
            f"your function returns {held}: `return {ORDER}` is needed."
        )
    step = _Step(*result)
    if isinstance(step.batch, torch.Tensor):
        step = step._replace(batch=(step.batch,))
    for (name, (needed, words)), value in zip(
        NEEDED.items(), step, strict=True
    ):
        if not isinstance(value, needed):
            raise Problem(
                f"the {name} is {guard.kind(value)}; it must be {words}."
            )
    for item in step.batch or [step.batch]:
        if not isinstance(item, torch.Tensor):
            raise Problem(
                f"the batch holds {guard.kind(item)}: tensors are needed."
            )
    known = set(map(id, step.model.parameters()))
    groups = step.optimizer.param_groups if step.optimizer else []
    if not known.issuperset(id(p) for g in groups for p in g["params"]):
        raise Problem(
            "the optimizer has parameters that are not the model's: build it "
            "from `model.parameters()`."
        )
    return step


def _read(guess: Mapping[str, object]) -> dict[str, int]:
    """The guess as whole numbers of bytes."""
    if all(map(is_empty, guess.values())):
        raise Problem
    if unknown := [key for key in guess if key not in ENTRIES]:
        raise Problem(
            f"the guess has the key {unknown[0]!r}; its keys are "
            f"{', '.join(ENTRIES)}."
        )
    return {name: _whole(name, guess.get(name)) for name in ENTRIES}


def _whole(name: str, value: object) -> int:
    if is_empty(value):
        raise Problem(f"the guess for {name} is missing.")
    try:
        if isinstance(value, bool) or not isinstance(value, SupportsFloat):
            raise TypeError
        number = float(value)
    except Exception:
        raise Problem(
            f"the guess for {name} is {guard.kind(value)}: a number of bytes "
            "is needed."
        ) from None
    if not number.is_integer():
        raise Problem(
            f"the guess for {name} is {number}: bytes are whole numbers."
        )
    return int(number)


def _accounted(step: _Step) -> Account:
    try:
        return ledger.account(
            step.model, step.loss, *step.batch, optimizer=step.optimizer
        )
    except Exception as error:
        text = guard.message(error) or "no message"
        raise Problem(
            f"a dry run of this step fails. {type(error).__name__}: {text}."
        ) from None


Cause = tuple[int, str]
"""Bytes that a likely mistake adds to an entry, and the words for it."""
Causes = tuple[list[Cause], list[Cause], str]
"""Mistakes, others that come together with them, and words if none fits."""


def _compared(
    guess: int,
    right: int,
    some: list[Cause],
    others: list[Cause],
    otherwise: str,
) -> str:
    """Say how far off an entry is, and why."""
    if guess == right:
        return "right."
    off = guess - right
    both = [
        (more + also, f"{why} {because}".strip())
        for (more, why), (also, because) in product(some, others)
    ]
    factors = [
        (-right, "Nothing is counted."),
        (right, "Twice what is right: how many bytes has a number?"),
        (-right / 2, "Half of what is right: how many bytes has a number?"),
        (-right * 3 / 4, "A quarter of what is right: are these numbers?"),
        (7 * right, "These are bits."),
    ]
    causes = [*others, *some, *both, *factors]
    fitting = (why for more, why in causes if more == off and why)
    side = "many" if off > 0 else "few"
    return f"{abs(off)} bytes too {side}. {next(fitting, otherwise)}".strip()


def _causes(step: _Step, account: Account) -> dict[str, Causes]:
    """Of each entry."""
    states, parameters = account.states, list(step.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    frozen = _bytes(parameters) - states.gradients
    buffers = states.parameters - _bytes(parameters)
    of_parameters = [
        (-frozen, "Frozen parameters are missing: they are there, too."),
        *_of_tensors(step, parameters),
    ]
    of_gradients = [
        (frozen, "Frozen parameters have no gradients."),
        *_of_tensors(step, trained),
    ]
    missing = (-buffers, "The buffers are missing: they count here, too.")
    needless = (buffers, "Buffers have no gradients.")
    return {
        "parameters": (of_parameters, [missing], ""),
        "gradients": (of_gradients, [needless], ""),
        "optimizer": _of_states(step, account),
        "activations": _of_activations(account),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _of_tensors(step: _Step, tensors: list[torch.Tensor]) -> list[Cause]:
    """What can be wrong with some parameters, which are there once each."""
    right, numbers = _bytes(tensors), sum(t.numel() for t in tensors)
    names = step.model.named_parameters(remove_duplicate=False)
    twice = _bytes(p for _, p in names) - _bytes(step.model.parameters())
    vectors = _bytes(t for t in tensors if t.ndim < 2)
    ids = set(map(id, tensors))
    sizes = [
        (sign * p.nbytes, f"As much as `{name}` has.")
        for sign in (-1, 1)
        for name, p in step.model.named_parameters()
        if id(p) in ids
    ]
    return [
        (twice, "A shared weight is one tensor, not two."),
        (-vectors, "Those of one dimension are missing: biases and norms."),
        (numbers - right, "These are numbers, not bytes."),
        (4 * numbers - right, "In fp32, yes; these are not."),
        *sizes,
    ]


def _of_states(step: _Step, account: Account) -> Causes:
    if step.optimizer is None:
        return [], [], "There is no optimizer."
    right, gradients = account.states.optimizer, account.states.gradients
    kept = [a for a in account.tracker.at(-1) if a.category == "optimizer"]
    parameters = list(step.model.parameters())
    trained = sum(p.requires_grad for p in parameters)
    small = sum(a.bytes == 4 for a in kept)
    counters = 4 * small if small == trained else 0
    numbers = right - counters
    each = numbers // gradients
    name = type(step.optimizer).__name__
    words = {0: "nothing", 1: "one number", 2: "two numbers"}
    keeps = (
        f"{name} keeps {words.get(each, f'{each} numbers')} for each trained "
        "parameter."
    )
    counts = (
        f"{name} counts its steps in 4 bytes for each trained tensor, "
        f"{counters} in all."
    )
    entries = "Parameters and gradients have entries of their own."
    frozen = each * _bytes(parameters) - numbers
    of_numbers = [
        (frozen, "Frozen parameters have no states."),
        *[(k * gradients - numbers, keeps) for k in (1, 2) if k != each],
        (gradients, entries),
        (account.states.parameters, entries),
    ]
    of_counters = [
        (-counters, counts),
        (4 - counters, counts),
        (4 * len(parameters) - counters, "A frozen tensor has no counter."),
        (counters, counts),
    ]
    if not counters:
        of_counters = [(4 * trained, "")]
    return of_numbers, of_counters, ""


def _of_activations(account: Account) -> Causes:
    tracker = account.tracker
    ends = next(i for i, label in tracker.marks if label == "backward") - 1
    held = [a for a in tracker.at(ends) if a.category == "activations"]
    gone = [
        a
        for a in tracker.allocations
        if 0 <= a.birth <= ends and not a.alive(ends)
    ]
    small = sum(a.bytes for a in held if a.bytes <= 8)
    loss = f"The loss keeps {small} bytes for itself, its value among them."
    inputs = tracker.split(-1)["inputs"]
    needless = "is not kept: nothing needs it."
    of_layers = [
        (inputs, "The batch has an entry of its own, inputs."),
        *[(-a.bytes, f"{_made(a)} is missing.") for a in held],
        *[(a.bytes, f"{_made(a)} {needless}") for a in gone],
    ]
    of_loss = [(-small, loss), (-4, loss)]
    return of_layers, of_loss, _places(account)


def _made(a: Allocation) -> str:
    name, module, _ = a.operator
    where = f"in layer {module}" if module else "outside of the model"
    return f"What `{name}` makes {where}, {a.bytes} bytes,"


def _places(account: Account) -> str:
    """The layers with the most activations, for a guess without a cause."""
    sizes = sorted(account.by_module.items(), key=lambda item: -item[1])
    told = [f"{name or 'the loss'} ({size})" for name, size in sizes[:4]]
    most = "Most bytes are" if len(sizes) > 4 else "They are"
    return f"{most} made in these layers: {', '.join(told)}."


check_own_ledger = OwnLedger(own_ledger)
