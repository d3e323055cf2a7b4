"""The last exercise on the ledger: that of a model of the reader's own."""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from membudget import ledger
from membudget.exercises import guard
from membudget.exercises.core_old import (
    CORRECT,
    NOT_ATTEMPTED,
    NOT_RIGHT,
    Outcome,
)
from membudget.exercises.observe import NO_RETURN
from membudget.ledger import Account
from membudget.measuring import Allocation

ENTRIES = ("parameters", "gradients", "optimizer", "activations")
ORDER = "model, optimizer, loss, batch, guess"


@dataclass(frozen=True)
class _Step:
    """What the reader's function returned, looked through."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    loss: Callable[..., torch.Tensor]
    batch: tuple[torch.Tensor, ...]
    guess: Mapping[str, object]


class _Problem(Exception):
    """Something is not as it has to be; the message says what."""


class OwnLedger:
    """The checker of a ledger that the reader filled in for any model.

    The function returns ``model, optimizer, loss, batch, guess``: a module,
    its optimizer or None, a function called as ``loss(model, *batch)``, a
    tensor or several, and a dictionary of bytes with the keys ``parameters``
    (with the buffers), ``gradients``, ``optimizer`` and ``activations`` (when
    the forward pass is over). A dry run tells what is right: nothing is
    allocated, and the model may be on ``meta``.
    """

    signature = "own_ledger()"

    def __call__(self, fn: Callable | None = None, hint: bool = True) -> None:
        """Print the outcome; with ``hint=False`` without the diagnosis."""
        outcome = self.judge(fn)
        if not hint and outcome.state == NOT_RIGHT:
            outcome = Outcome(NOT_RIGHT, "take `hint=False` away for a hint.")
        for line in str(outcome).split("\n"):
            print(
                textwrap.fill(
                    line,
                    width=79,
                    subsequent_indent="  " if line.startswith("- ") else "",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )

    def __repr__(self) -> str:
        return "check_own_ledger"

    def judge(self, fn: Callable | None) -> Outcome:
        """The outcome; whatever ``fn`` does, nothing is raised."""
        with guard.sealed():
            try:
                return self._judge(fn)
            except KeyboardInterrupt:
                raise
            except _Problem as problem:
                return Outcome(NOT_RIGHT, str(problem))
            except BaseException as error:
                if guard.is_stub(error):
                    return Outcome(NOT_ATTEMPTED)
                return Outcome(NOT_RIGHT, guard.describe(error, fn))

    def _judge(self, fn: Callable | None) -> Outcome:
        if not callable(fn) or inspect.isclass(fn):
            raise _Problem(
                "hand over the function itself, "
                f"`check_own_ledger(own_ledger)`; this is {guard.kind(fn)}."
            )
        result = fn()
        if _is_empty(result):
            if result is None and guard.uses_arguments(fn):
                raise _Problem(NO_RETURN)
            return Outcome(NOT_ATTEMPTED)
        step = _looked_through(result)
        if all(_is_empty(value) for value in step.guess.values()):
            return Outcome(NOT_ATTEMPTED)
        guess = _read(step.guess)
        account = _accounted(step)
        right = _right(account)
        if guess == right:
            phase = account.moment[2]
            return Outcome(
                CORRECT,
                "All four entries are right to the byte. The peak of this "
                f"step is {account.peak} bytes, {PHASES[phase]}.",
            )
        causes = _causes(step, account)
        otherwise = {"activations": _places(account)}
        if step.optimizer is None:
            causes["optimizer"] = []
            otherwise["optimizer"] = "There is no optimizer."
        lines = [
            f"- {name}: "
            + _compared(
                guess[name],
                right[name],
                causes[name],
                otherwise.get(name, ""),
            )
            for name in ENTRIES
        ]
        number = sum(guess[name] == right[name] for name in ENTRIES)
        verb = "is" if number == 1 else "are"
        return Outcome(
            NOT_RIGHT,
            "\n".join(
                [f"{number} of 4 entries {verb} right to the byte.", *lines]
            ),
        )


PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
    "": "before it begins",
}


def _is_empty(value: object) -> bool:
    return any(value is empty for empty in (None, ..., NotImplemented))


def _looked_through(result: object) -> _Step:
    """The parts of the result, each of the right kind."""
    if not isinstance(result, list | tuple) or len(result) != 5:
        held = guard.kind(result)
        if isinstance(result, list | tuple):
            held += f" of {len(result)}"
        raise _Problem(
            f"your function returns {held}: `return {ORDER}` is needed."
        )
    model, optimizer, loss, batch, guess = result
    if not isinstance(model, nn.Module):
        raise _Problem(
            f"the model is {guard.kind(model)}: a torch.nn.Module is needed. "
            f"The order is {ORDER}."
        )
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise _Problem(
                f"the optimizer is {guard.kind(optimizer)}: a "
                "torch.optim.Optimizer is needed, or None. The order is "
                f"{ORDER}."
            )
        known = set(map(id, model.parameters()))
        groups = optimizer.param_groups
        if not known.issuperset(id(p) for g in groups for p in g["params"]):
            raise _Problem(
                "the optimizer has parameters that are not the model's: "
                "build it from `model.parameters()`."
            )
    if not callable(loss):
        raise _Problem(
            f"the loss is {guard.kind(loss)}: a function is needed, which is "
            "called as `loss(model, *batch)`."
        )
    tensors = (batch,) if isinstance(batch, torch.Tensor) else batch
    if not isinstance(tensors, list | tuple) or not tensors:
        raise _Problem(
            f"the batch is {guard.kind(batch)}: a tensor is needed, or a "
            "tuple of tensors."
        )
    for item in tensors:
        if not isinstance(item, torch.Tensor):
            raise _Problem(
                f"the batch holds {guard.kind(item)}: tensors are needed."
            )
    if not isinstance(guess, Mapping):
        raise _Problem(
            f"the guess is {guard.kind(guess)}: a dictionary is needed, with "
            f"the keys {', '.join(ENTRIES)}."
        )
    return _Step(model, optimizer, loss, tuple(tensors), guess)


def _read(guess: Mapping[str, object]) -> dict[str, int]:
    """The guess as whole numbers of bytes."""
    if unknown := [key for key in guess if key not in ENTRIES]:
        raise _Problem(
            f"the guess has the key {unknown[0]!r}; its keys are "
            f"{', '.join(ENTRIES)}."
        )
    read = {}
    for name in ENTRIES:
        value = guess.get(name)
        if _is_empty(value):
            raise _Problem(f"the guess for {name} is missing.")
        try:
            if isinstance(value, str | bytes | bool):
                raise TypeError
            number = float(value)
        except Exception:
            raise _Problem(
                f"the guess for {name} is {guard.kind(value)}: a number of "
                "bytes is needed."
            ) from None
        if not number.is_integer():
            raise _Problem(
                f"the guess for {name} is {number}: bytes are whole numbers."
            )
        read[name] = int(number)
    return read


def _accounted(step: _Step) -> Account:
    try:
        return ledger.account(
            step.model, step.loss, *step.batch, optimizer=step.optimizer
        )
    except Exception as error:
        text = guard.message(error) or "no message"
        raise _Problem(
            f"a dry run of this step fails. {type(error).__name__}: {text}."
        ) from None


def _right(account: Account) -> dict[str, int]:
    return {
        "parameters": account.states.parameters,
        "gradients": account.states.gradients,
        "optimizer": account.states.optimizer,
        "activations": account.activations,
    }


Cause = tuple[int, str]
"""A wrong number of bytes, and what is likely behind it."""


def _compared(
    guess: int, right: int, causes: Iterable[Cause], otherwise: str
) -> str:
    """Say how far off an entry is, and why.

    Args:
        guess: bytes.
        right: bytes.
        causes: the first that fits is told.
        otherwise: told if none does.
    """
    if guess == right:
        return "right."
    off = guess - right
    text = f"{abs(off)} bytes too {'many' if off > 0 else 'few'}."
    factors = [
        (0, "Nothing is counted."),
        (2 * right, "Twice what is right: how many bytes has a number?"),
        (right / 2, "Half of what is right: how many bytes has a number?"),
        (right / 4, "A quarter of what is right: are these numbers?"),
        (right * 8, "These are bits."),
    ]
    found = [why for value, why in [*causes, *factors] if value == guess]
    return f"{text} {[*found, otherwise][0]}".strip()


def _causes(step: _Step, account: Account) -> dict[str, list[Cause]]:
    """Likely mistakes of each entry."""
    everything = list(step.model.parameters())
    trained = [p for p in everything if p.requires_grad]
    all_bytes, right = _bytes(everything), account.states
    buffers = right.parameters - all_bytes
    return {
        "parameters": [
            (all_bytes, "The buffers are missing: they count here, too."),
            (
                right.gradients + buffers,
                "Frozen parameters are missing: they are there, too.",
            ),
            (right.gradients, "Frozen parameters and buffers are missing."),
            *_of_tensors(step, everything, buffers),
        ],
        "gradients": [
            (all_bytes, "Frozen parameters have no gradients."),
            (right.parameters, "Only trained parameters have gradients."),
            *_of_tensors(step, trained, 0),
        ],
        "optimizer": _of_states(step, account),
        "activations": _of_activations(account),
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _of_tensors(
    step: _Step, tensors: Sequence[torch.Tensor], more: int
) -> list[Cause]:
    """What can be wrong with tensors that are there once each.

    Args:
        step: the reader's.
        tensors: parameters of the model.
        more: bytes that belong to the entry besides.
    """
    right, numbers = _bytes(tensors), sum(t.numel() for t in tensors)
    names = step.model.named_parameters(remove_duplicate=False)
    twice = _bytes(p for _, p in names) - _bytes(step.model.parameters())
    vectors = _bytes(t for t in tensors if t.ndim < 2)
    ids = set(map(id, tensors))
    sizes = [
        (p.nbytes, f"As much as `{name}` has.")
        for name, p in step.model.named_parameters()
        if id(p) in ids
    ]
    return [
        (right + twice + more, "A shared weight is one tensor, not two."),
        (
            right - vectors + more,
            "Those of one dimension are missing: biases and norms.",
        ),
        (numbers, "These are numbers, not bytes."),
        (4 * numbers + more, "In fp32, yes; these are not."),
        *[(right - size + more, text) for size, text in sizes],
        *[(right + size + more, text) for size, text in sizes],
    ]


def _of_states(step: _Step, account: Account) -> list[Cause]:
    right, gradients = account.states.optimizer, account.states.gradients
    kept = [a for a in account.tracker.at(-1) if a.category == "optimizer"]
    trained = [p for p in step.model.parameters() if p.requires_grad]
    small = sum(a.bytes == 4 for a in kept)
    counters = 4 * small if small == len(trained) else 0
    numbers = right - counters
    each = numbers // gradients
    name = type(step.optimizer).__name__
    counts = (
        f"{name} counts its steps in 4 bytes for each trained tensor, "
        f"{counters} in all."
    )
    tensors = list(step.model.parameters())
    everything = each * _bytes(tensors)
    frozen = "Frozen parameters have no states."
    causes = [(everything + counters, frozen)]
    if counters:
        causes += [
            (numbers, counts),
            (numbers + 4, counts),
            (numbers + 4 * len(tensors), "A frozen tensor has no counter."),
            (numbers + 2 * counters, counts),
            (everything + 4 * len(tensors), frozen),
            (everything, f"{frozen} {counts}"),
        ]
    words = {0: "nothing", 1: "one number", 2: "two numbers"}
    keeps = words.get(each, f"{each} numbers")
    for other in {1, 2} - {each}:
        text = f"{name} keeps {keeps} for each trained parameter."
        causes.append((other * gradients, text))
        causes.append((other * gradients + 4 * len(trained), text))
    for more in (gradients, account.states.parameters):
        text = "Parameters and gradients have entries of their own."
        causes.append((right + more, text))
        causes.append((numbers + more, text))
    return causes


def _of_activations(account: Account) -> list[Cause]:
    right, tracker = account.activations, account.tracker
    ends = next(i for i, label in tracker.marks if label == "backward") - 1
    held = [a for a in tracker.at(ends) if a.category == "activations"]
    small = sum(a.bytes for a in held if a.bytes <= 8)
    inputs = tracker.split(-1)["inputs"]
    loss = f"The loss keeps {small} bytes for itself, its value among them."
    batch = "The batch has an entry of its own, inputs."
    causes = [
        (right - small, loss),
        (right - 4, loss),
        (right + inputs, batch),
        (right + inputs - small, f"{batch} {loss}"),
    ]
    for less, text in ((0, ""), (small, f" {loss}")):
        causes += [
            (right - less - a.bytes, f"{_made(a)} is missing.{text}")
            for a in held
        ]
        causes += [
            (
                right - less + a.bytes,
                f"{_made(a)} is not kept: nothing needs it.{text}",
            )
            for a in tracker.allocations
            if 0 <= a.birth <= ends and not a.alive(ends)
        ]
    return causes


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


check_own_ledger = OwnLedger()
