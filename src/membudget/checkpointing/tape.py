"""The tape machine: a schedule of actions run on a chain of stages.

The cost model. A chain is a list of :class:`Stage`; stage ``i`` turns the
*boundary* ``i`` into the boundary ``i + 1``. Boundary 0 is the input of the
whole chain: it is always there and never counted. What is alive is a set:

* the *value* at work, which the next stage that runs replaces;
* the boundaries that are *kept* (the checkpoints);
* the *tapes*: what autograd holds for the backward pass of a stage that ran
  with recording, which is its ``inner`` bytes and, where the stage says so,
  its input and its output;
* one *gradient* on its way back, as large as the boundary where it stands;
* while a stage is at work, its *workspace*.

A boundary that several of them hold counts once, as a checkpoint before it
counts as tape. In a chain of
``Stage()``, all of whose sizes are 1, this is the model of Chen et al.
(2016, arXiv 1604.06174) with the gradient counted. The sizes of a real
network come from :func:`membudget.checkpointing.profile`; the model with a
size of its own for each stage is that of Beaumont et al. (2019, "Optimal
checkpointing for heterogeneous chains", arXiv 1911.13214).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from membudget.checkpointing.schedule import (
    Action,
    ImpossibleAction,
    as_actions,
    is_list,
)
from membudget.checkpointing.segments import MOST
from membudget.checks import flag, instance, number, one_of, shown, whole

PARTS = ("kept", "value", "tapes", "gradients", "workspace")
"""What a byte can belong to."""


@dataclass(frozen=True)
class Stage:
    """One layer of a chain, or several that are never taken apart.

    All sizes in bytes (or in units, where a picture needs no more), all
    times in FLOPs (or in layer runs). The default is one layer of the chain
    of linear layers with ReLU, in units: its tape is its output.

    Attributes:
        output: its output; 0 where that is a view of its input.
        gradient: the gradient of its output; as large as that by default,
            0 where nothing below is trained.
        inner: what its tape holds besides input and output.
        holds_input: whether its tape holds its input.
        holds_output: whether its tape holds its output.
        forward_workspace: what else is alive at the worst moment of a run
            without recording, on top of input and output.
        record_workspace: the same of a run with recording, on top of the
            input, the inner bytes and the output.
        recompute_workspace: the same of the last stage of a recomputation,
            which ends early; negative where it ends before the output.
        backward_workspace: what else is alive at the worst moment of its
            backward pass, on top of its tape and the arriving gradient.
        again_workspace: the same where its tape was recomputed; as large as
            that by default.
        gradients: what its backward pass leaves behind: the gradients of
            its parameters, where they are not there before.
        time: of a run.
        recompute_time: of a run as the last stage of a recomputation.
        backward_time: of its backward pass.
        name: for pictures and errors.

    Raises:
        TypeError: a size that is no whole number, a time that is no number,
            or another argument of a wrong kind.
        ValueError: a size or a time that cannot be.
    """

    output: int = 1
    inner: int = 0
    holds_input: bool = True
    holds_output: bool = True
    forward_workspace: int = 0
    record_workspace: int = 0
    recompute_workspace: int = 0
    backward_workspace: int = 1
    again_workspace: int = cast("int", None)
    gradients: int = 0
    time: float = 1
    recompute_time: float = cast("float", None)
    backward_time: float = 2
    gradient: int = cast("int", None)
    name: str = ""

    def __post_init__(self) -> None:
        for name, value in (
            ("again_workspace", self.backward_workspace),
            ("recompute_time", self.time),
            ("gradient", self.output),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        flag(self.holds_input, "holds_input of a stage")
        flag(self.holds_output, "holds_output of a stage")
        instance(self.name, str, "name of a stage", "a string")
        for name, least in SIZES.items():
            value = whole(getattr(self, name), f"{name} of a stage", least)
            object.__setattr__(self, name, value)
        for name in ("time", "recompute_time", "backward_time"):
            value = number(getattr(self, name), f"{name} of a stage", 0)
            object.__setattr__(self, name, value)


SIZES = {
    **dict.fromkeys(("output", "inner", "gradients", "gradient"), 0),
    **dict.fromkeys(
        (
            "forward_workspace",
            "record_workspace",
            "recompute_workspace",
            "backward_workspace",
            "again_workspace",
        )
    ),
}
"""The least of each; some runs end before their output is there."""


Stages = Sequence[Stage]
"""Stages, the first of which reads the input."""


class Moment(NamedTuple):
    """What is alive at the worst moment of one action.

    Attributes:
        action: the action.
        parts: bytes of each of :data:`PARTS`, in this order.
        extra: whether it runs a stage again.
        after: bytes alive when it is over.
        recomputed: of the bytes of the tapes, those that were recomputed.
    """

    action: Action
    parts: tuple[int, ...]
    extra: bool
    after: int
    recomputed: int

    @property
    def live(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts)

    def part(self, name: str) -> int:
        """Bytes of one of :data:`PARTS`.

        Raises:
            TypeError: a name that is no string.
            ValueError: another one.
        """
        one_of(name, PARTS, "part")
        return self.parts[PARTS.index(name)]


@dataclass(frozen=True)
class Run:
    """What the tape machine counted.

    Attributes:
        moments: one for each action, in order.
        runs: how often each stage ran.
        time: of all runs and backward passes.
        extra_time: of the runs after each stage's first.
    """

    moments: tuple[Moment, ...]
    runs: tuple[int, ...]
    time: float
    extra_time: float

    @property
    def peak(self) -> int:
        """The most bytes alive."""
        return max(moment.live for moment in self.moments)

    @property
    def peak_moment(self) -> int:
        """Index of the first moment with the peak."""
        return max(
            range(len(self.moments)), key=lambda i: self.moments[i].live
        )

    @property
    def extra_runs(self) -> int:
        """Runs of stages after each stage's first."""
        return sum(self.runs) - len(self.runs)


def simulate(chain: Stages | int, schedule: Sequence) -> Run:
    """Run a schedule on the tape machine.

    Args:
        chain: the stages; a number stands for that many ``Stage()``.
        schedule: actions, as :class:`Action` or as text (``"forward 3"``),
            or segments as :func:`membudget.checkpointing.actions` takes them.

    The loss is ``sum()``: its gradient is a single number and takes nothing.

    Raises:
        ImpossibleAction: an action that needs what is not there, that does
            again what is done, or of a stage or kind that does not exist; or
            a schedule that ends before the backward pass does.
        ValueError: a chain without stages or of more than 10 000, or bytes
            below 0.
        TypeError: a chain that is neither stages nor a whole number, or
            another argument of a wrong kind.
    """
    stages = as_chain(chain)
    return _Machine(stages).run(as_actions(schedule, len(stages)))


def as_chain(chain: Stages | int) -> tuple[Stage, ...]:
    """The stages; a number stands for that many ``Stage()``."""
    if isinstance(chain, int) and not isinstance(chain, bool):
        chain = [Stage()] * whole(chain, "the number of stages", 0, MOST)
    if not is_list(chain):
        raise TypeError(
            f"the chain is {shown(chain)}: use a list of stages, or their "
            "number"
        )
    if not len(chain):
        raise ValueError("the chain is empty: it needs at least one stage")
    for item in chain:
        if not isinstance(item, Stage):
            raise TypeError(
                f"the chain holds {shown(item)}: use Stage(…), or profile(…) "
                "for the stages of a model"
            )
    return tuple(chain)


@dataclass
class _Machine:
    chain: tuple[Stage, ...]
    value: int | None = 0  # the boundary at work
    kept: set[int] = field(default_factory=set)
    tapes: set[int] = field(default_factory=set)
    left: int = 0  # gradients that backward passes left behind

    def __post_init__(self) -> None:
        self.next = len(self.chain) - 1  # the stage to go backward
        self.runs = [0] * len(self.chain)
        self.time: float = 0
        self.extra_time: float = 0
        # A view is the same storage as its input: count it where that is.
        self.root = [0]
        for index, stage in enumerate(self.chain, 1):
            self.root.append(index if stage.output else self.root[-1])

    def run(self, actions: list[Action]) -> Run:
        moments = []
        for index, action in enumerate(actions):
            kind, stage = action
            if not 0 <= stage < len(self.chain):
                raise ImpossibleAction(
                    index,
                    action,
                    f"the stages are 0 to {len(self.chain) - 1}",
                )
            why = getattr(self, f"_why_not_{kind}")(stage)
            if why:
                raise ImpossibleAction(index, action, why)
            extra = kind in ("forward", "record") and self.runs[stage] > 0
            last = extra and _next_run(actions, index) == "backward"
            tapes, kept = set(self.tapes), set(self.kept)
            parts = getattr(self, f"_{kind}")(stage, last)
            again = self._recomputed(tapes | self.tapes, kept | self.kept)
            after = sum(self._alive())
            moments.append(Moment(action, parts, extra, after, again))
        if self.next >= 0:
            raise ImpossibleAction(
                len(actions),
                None,
                f"the backward pass of stage {self.next} is missing",
            )
        return Run(
            tuple(moments), tuple(self.runs), self.time, self.extra_time
        )

    # What is alive

    def _held(self, tapes: set[int] | None = None) -> Iterator[int]:
        """The boundaries that tapes hold."""
        for index in self.tapes if tapes is None else tapes:
            if self.chain[index].holds_input:
                yield self.root[index]
            if self.chain[index].holds_output:
                yield self.root[index + 1]

    def _size(self, boundaries: set[int]) -> int:
        return sum(self.chain[i - 1].output for i in boundaries if i > 0)

    def _alive(self, more: frozenset[int] = frozenset()) -> list[int]:
        """Bytes of each part, without workspace; ``more`` are values too."""
        kept = {self.root[i] for i in self.kept}
        on_tape = set(self._held()) - kept
        value = {self.root[i] for i in more} - on_tape - kept
        if self.value is not None:
            value |= {self.root[self.value]} - on_tape - kept
        inner = sum(self.chain[i].inner for i in self.tapes)
        # before the last stage stands the loss, and before the first nothing
        moving = 0 <= self.next < len(self.chain) - 1
        gradient = self.chain[self.next].gradient if moving else 0
        return [
            self._size(kept),
            self._size(value),
            self._size(on_tape) + inner,
            self.left + gradient,
            0,
        ]

    def _recomputed(self, tapes: set[int], kept: set[int]) -> int:
        """Bytes that only tapes of stages that ran again hold."""
        again = {index for index in tapes if self.runs[index] > 1}
        others = {self.root[i] for i in kept} | set(self._held(tapes - again))
        inner = sum(self.chain[i].inner for i in again)
        return self._size(set(self._held(again)) - others) + inner

    def _there(self, boundary: int) -> bool:
        """Whether a boundary can be read."""
        root = self.root[boundary]
        known = {self.root[i] for i in self.kept} | set(self._held())
        if self.value is not None:
            known.add(self.root[self.value])
        return root == 0 or root in known

    # Runs

    def _why_not_forward(self, stage: int) -> str:
        if stage > self.next:
            return f"the backward pass of stage {stage} is over"
        if not self._there(stage):
            return (
                f"its input, boundary {stage}, is not there: neither the "
                f"value at work, nor kept, nor on the tape of stage "
                f"{stage - 1}"
            )
        return ""

    def _why_not_record(self, stage: int) -> str:
        if stage in self.tapes:
            return f"stage {stage} has its tape already"
        return self._why_not_forward(stage)

    def _forward(self, stage: int, last: bool) -> tuple[int, ...]:
        return self._ran(stage, self.chain[stage].forward_workspace, False)

    def _record(self, stage: int, last: bool) -> tuple[int, ...]:
        item = self.chain[stage]
        self.tapes.add(stage)
        if last:
            return self._ran(stage, item.recompute_workspace, True)
        return self._ran(stage, item.record_workspace, False)

    def _ran(self, stage: int, workspace: int, last: bool) -> tuple[int, ...]:
        item = self.chain[stage]
        self.value = stage
        *parts, _ = self._alive(more=frozenset([stage + 1]))
        # nothing reads what the last run of a recomputation returns, and
        # where it ends early it returns nothing
        self.value = None if last else stage + 1
        time = item.recompute_time if last else item.time
        self.time += time
        self.extra_time += time if self.runs[stage] else 0
        self.runs[stage] += 1
        return (*parts, workspace)

    # Checkpoints

    def _why_not_keep(self, stage: int) -> str:
        if stage == 0:
            return "boundary 0 is the input, which is always there"
        if stage in self.kept:
            return f"boundary {stage} is kept already"
        if not self._there(stage):
            return (
                f"boundary {stage}, the input of stage {stage}, is not there"
            )
        return ""

    def _keep(self, stage: int, last: bool) -> tuple[int, ...]:
        self.kept.add(stage)
        return tuple(self._alive())

    def _why_not_drop(self, stage: int) -> str:
        if stage not in self.kept:
            return f"boundary {stage} is not kept"
        return ""

    def _drop(self, stage: int, last: bool) -> tuple[int, ...]:
        before = tuple(self._alive())
        self.kept.remove(stage)
        return before

    # Backward

    def _why_not_backward(self, stage: int) -> str:
        if stage < self.next:
            return (
                f"the gradient stands before stage {self.next}, which goes "
                "backward first"
            )
        if stage > self.next:
            return f"the backward pass of stage {stage} is over"
        if stage not in self.tapes:
            return f"stage {stage} has no tape: record it first"
        return ""

    def _backward(self, stage: int, last: bool) -> tuple[int, ...]:
        item = self.chain[stage]
        self.value = None
        *parts, _ = self._alive()
        self.tapes.remove(stage)
        workspace = item.backward_workspace
        if self.runs[stage] > 1:
            workspace = item.again_workspace
        self.left += item.gradients
        self.next -= 1
        self.time += item.backward_time
        return (*parts, workspace)


def _next_run(actions: list[Action], index: int) -> str:
    """The kind of the next action that is neither keep nor drop."""
    after = (kind for kind, _ in actions[index + 1 :])
    return next((kind for kind in after if kind not in ("keep", "drop")), "")
