"""The walk through the rows: forward, backward, the optimizer's step."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from membudget.checks import one_of, told
from membudget.ledger.paper import Paper, PaperTensor, Row, Segment
from membudget.measuring import CATEGORIES, PHASES


@dataclass(frozen=True, slots=True)
class PaperMoment:
    """What is alive while one row is at work, at its worst.

    Attributes:
        row: the row's name.
        phase: one of :data:`membudget.measuring.PHASES`.
        bytes: bytes of each of the tracker's categories, in their order.
    """

    row: str
    phase: str
    bytes: tuple[int, ...]

    @property
    def live(self) -> int:
        """All bytes."""
        return sum(self.bytes)

    @property
    def split(self) -> dict[str, int]:
        """Bytes by category, as ``PeakTracker.split`` returns them."""
        return dict(zip(CATEGORIES, self.bytes, strict=True))


@dataclass(frozen=True)
class Prediction:
    """What a step needs, by the ledger.

    Attributes:
        moments: one for each row at work, in order.
        start: bytes that are there before the step.
        saved: bytes of activations when the forward pass is over, the loss
            included; of the first micro-batch where there are several.
        between: what is alive when a pass enters a block, under the block's
            name, or leaves the last one, under ``""``; a ``""`` of the
            backward pass also stands at its end.
        moved: bytes that leave for another memory in the forward passes of
            the step, and come back in its backward passes.
    """

    moments: tuple[PaperMoment, ...]
    start: int
    saved: int
    between: tuple[PaperMoment, ...] = ()
    moved: int = 0

    @property
    def at_peak(self) -> PaperMoment:
        """The first moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.live)

    @property
    def peak(self) -> int:
        """The most bytes alive."""
        return self.at_peak.live

    def peak_in(self, phase: str) -> int:
        """The most bytes alive in a phase; 0 where it does not occur."""
        one_of(phase, PHASES, "phase")
        return max(
            (m.live for m in self.moments if m.phase == phase), default=0
        )


def walk(
    papers: Sequence[Paper],
    *,
    states: int = 0,
    inputs: int = 0,
    gradients: int = 0,
    buffers: int = 0,
    workspace: Sequence[int] = (),
    offloaded: bool = False,
) -> Prediction:
    """Go through a step: every micro-batch forward and backward, then update.

    Args:
        papers: what the micro-batches run, one after the other, all with the
            same parameters in the same order. The last row makes the loss.
        states: bytes of the optimizer's states.
        inputs: bytes of the whole batch.
        gradients: bytes of gradients that are there before the step and that
            the new ones are added to; 0 where the step makes them.
        buffers: bytes of buffers; counted as parameters.
        workspace: bytes that the optimizer's step allocates, at each of its
            moments.
        offloaded: whether what autograd saves waits in another memory
            (:class:`membudget.offloading.Offload`).
    """
    machine = _Walk(offloaded)
    weights = papers[0].parameters
    machine.live.update(
        parameters=buffers + sum(w.bytes for w in weights + papers[0].frozen),
        optimizer=states,
        inputs=inputs,
        gradients=gradients,
    )
    machine.begun = set(range(len(weights))) if gradients else set()
    start = machine.total = sum(machine.live.values())
    for paper in papers:
        machine.micro_batch(paper)
    for size in workspace:
        held = machine.make(size, "temporaries")
        machine.moment("update", "optimizer")
        machine.release(held)
    return Prediction(
        tuple(machine.moments), start, machine.saved, tuple(machine.between)
    )


@dataclass(eq=False, slots=True)
class _Held:
    """Memory, and how many hold it; of a gradient, if it is a view."""

    bytes: int
    category: str
    holders: int = 1
    view: bool = False


class _Walk:
    def __init__(self, offloaded: bool = False) -> None:
        self.offloaded = offloaded
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.total = 0  # of what is alive
        self.moments: list[PaperMoment] = []
        self.between: list[PaperMoment] = []
        self.saved = -1
        self.begun: set[int] = set()  # parameters with a gradient
        self.worst = -1  # since the last moment
        self.parts: tuple[int, ...] = ()

    # The account

    def make(self, size: int, category: str) -> _Held:
        self.live[category] += size
        self.total += size
        if self.total > self.worst:
            self.worst = self.total
            self.parts = tuple(self.live.values())
        return _Held(size, category)

    def release(self, held: _Held | None) -> None:
        if held is not None:
            held.holders -= 1
            if not held.holders:
                self.live[held.category] -= held.bytes
                self.total -= held.bytes

    def moment(self, name: str, phase: str) -> None:
        """Note the worst since the last moment."""
        if self.worst < 0:
            self.parts = tuple(self.live.values())
        self.moments.append(PaperMoment(name, phase, self.parts))
        self.worst = -1

    def boundary(self, row: Row | Segment, then: str, phase: str) -> None:
        """Note what is alive if the next row is of another block."""
        if _block(row) != then:
            held = tuple(self.live.values())
            self.between.append(PaperMoment(then, phase, held))

    # One micro-batch

    def micro_batch(self, paper: Paper) -> None:
        loss = self.forward(paper)
        if self.saved < 0:
            self.saved = self.live["activations"]
        seed = self.make(loss.bytes, "activations")
        self.moment("loss gradient", "backward")
        self.backward(paper, loss)
        self.between.append(
            PaperMoment("", "backward", tuple(self.live.values()))
        )
        self.release(seed)
        self.release(self.scopes[0][id(loss)])

    def forward(self, paper: Paper) -> PaperTensor:
        """Its forward pass; what the last row makes, which stays."""
        loss = paper.rows[-1].makes[0]
        self.weights = {id(w): i for i, w in enumerate(paper.parameters)}
        self.pinned = {id(t) for t in paper.pinned}
        # gradients that are yet to arrive at each tensor
        self.due = Counter(
            id(tensor) for row in _flat(paper.rows) for tensor, _ in row.gives
        )
        # what was made; a segment's recomputation has a scope of its own
        self.scopes: list[dict[int, _Held]] = [{}]
        self.extras: dict[int, _Held] = {}
        # what rows under a checkpoint keep, by row
        self.kept: dict[int, dict[int, _Held]] = {}
        # what waits in another memory, by how many will ask for it, and what
        # came back
        self.away: Counter[int] = Counter()
        self.back: dict[int, _Held] = {}
        self.pending: dict[int, _Held] = {}
        for held in self._forward(paper.rows, "forward", keep=loss):
            self.release(held)
        return loss

    def backward(self, paper: Paper, loss: PaperTensor) -> None:
        """Its backward pass; the gradient of the loss is counted by itself."""
        self.pending[id(loss)] = _Held(0, "temporaries")
        self._backward(paper.rows)

    def _find(self, tensor: PaperTensor) -> _Held | None:
        """Its memory; None for what exists before the step."""
        key = id(tensor.storage)
        for scope in (*self.scopes[:0:-1], self.back, self.scopes[0]):
            if key in scope and scope[key].holders:
                return scope[key]
        return None

    def _forward(
        self,
        rows: Sequence[Row | Segment],
        phase: str,
        *,
        tape: bool = True,
        keep: PaperTensor | None = None,
        saved: frozenset[int] = frozenset(),
    ) -> list[_Held]:
        """Run rows; what they save stays where there is a tape.

        A variable holds what a row makes until the last row that uses it is
        over, or until ``keep``, what is returned, is all that is left. A
        recomputation ends early: before the last row that saves something,
        or after it if it saves what it makes.

        Args:
            saved: storages that rows outside save.

        Returns:
            What autocast holds until it ends.
        """
        scope = self.scopes[-1]
        last = {
            id(t.storage): i
            for i, row in enumerate(rows)
            for t in _uses(row) + _holds(row) * tape
        }
        if tape:
            saved |= {id(t.storage) for row in rows for t in self._stays(row)}
            saved |= {id(keep)}
        end = len(rows)
        if phase == "recomputation":
            end = max(
                i
                for i, row in enumerate(rows)
                if isinstance(row, Row) and row.needs
            )
        late: list[_Held] = []
        variables: dict[int, _Held] = {}
        for index, row in enumerate(rows):
            if isinstance(row, Row) and index == end and not row.after:
                self._save(row)
                break
            if isinstance(row, Segment):
                output = row.makes[-1]
                self.scopes.append({})
                late += self._forward(
                    row.rows, phase, tape=False, keep=output, saved=saved
                )
                scope[id(output)] = self.scopes.pop()[id(output)]
                variables[id(output)] = scope[id(output)]
            else:
                variables |= self._run(row, phase, tape, saved)
            if tape:
                self._save(row)
            for key in [k for k in variables if last.get(k, index) <= index]:
                if keep is None or key != id(keep):
                    held = variables.pop(key)
                    if key in self.pinned:
                        late.append(held)
                    else:
                        self.release(held)
            if index == end:
                break
            if index + 1 < end and len(self.scopes) == 1:
                self.boundary(row, _block(rows[index + 1]), phase)
        variables.pop(id(keep), None)
        for held in variables.values():
            self.release(held)
        return late

    def _run(
        self, row: Row, phase: str, tape: bool, saved: frozenset[int]
    ) -> dict[int, _Held]:
        """Run one row; what it makes."""
        if id(row) in self.kept:  # its results are there
            made = self.kept.pop(id(row))
            self.scopes[-1] |= made
            if not row.gives:  # no backward pass will let go of them
                self.release(self.extras.pop(id(row), None))
            return made
        made = {}
        kept = row.kept and not tape
        keeps = (tape and row.gives and not self._leaves) or kept
        if row.extra:
            extra = self.make(
                row.extra, "activations" if keeps else "temporaries"
            )
        for t in row.makes:
            if t.base is None:
                made[id(t)] = self.make(
                    t.bytes,
                    "activations" if kept or id(t) in saved else "temporaries",
                )
        self.scopes[-1] |= made
        self.moment(row.name, phase)
        if row.extra and keeps:
            self.extras[id(row)] = extra
        elif row.extra:
            self.release(extra)
        if kept:
            self.kept[id(row)] = dict(made)
            for held in made.values():
                held.holders += 1
        return made

    @property
    def _leaves(self) -> bool:
        """Whether what a row saves goes to another memory; what a
        recomputation saves does not."""
        return self.offloaded and len(self.scopes) == 1

    def _stays(self, row: Row | Segment) -> tuple[PaperTensor, ...]:
        """What a row keeps here."""
        if not self._leaves:
            return _saves(row)
        away = _seen(row)
        return tuple(t for t in _saves(row) if t not in away)

    def _save(self, row: Row | Segment) -> None:
        if self._leaves:
            self.away.update(id(t.storage) for t in _seen(row))
        for t in self._stays(row):
            held = self._find(t)
            if held is not None:
                held.holders += 1

    def _let_go(self, saved: tuple[PaperTensor, ...]) -> None:
        """Each of these was used once."""
        for t in saved:
            self.release(self._find(t))

    def _unpack(self, row: Row | Segment) -> None:
        """What a row saved comes back whole; all that ask for it hold it."""
        for t in _seen(row):
            storage = t.storage
            asked = self.away.pop(id(storage), 0)
            if asked and not storage.kind:
                held = self.make(storage.bytes, "temporaries")
                held.holders = asked
                self.back[id(storage)] = held
        if isinstance(row, Row) and row.extra:
            self.extras[id(row)] = self.make(row.extra, "temporaries")

    def _backward(self, rows: Sequence[Row | Segment]) -> None:
        names = [_block(row) for row in rows]
        for row, then in zip(rows[::-1], [*names[-2::-1], ""], strict=True):
            if isinstance(row, Segment):
                self._segment(row)
            else:
                self._row(row)
            self.boundary(row, then, "backward")

    def _segment(self, segment: Segment) -> None:
        needed = [row for row in segment.rows if row.needs]
        held = self._stays(segment)
        self.scopes.append({})
        for row in reversed(segment.rows):
            # the first that asks for what was saved
            if needed and row is needed[-1]:
                rows = [*segment.casts, *segment.rows]
                self._unpack(segment)
                for late in self._forward(rows, "recomputation"):
                    self.release(late)
                if self.offloaded:  # its arguments
                    self._let_go(_seen(segment))
            last = needed and row is needed[0]
            self._row(row, held if last else ())
        self.scopes.pop()

    def _row(self, row: Row, also: tuple[PaperTensor, ...] = ()) -> None:
        """The backward pass of a row; afterwards ``also``, which stayed
        here, is let go."""
        pending = (self.pending.pop(id(t), None) for t in row.makes)
        arriving = [held for held in pending if held is not None]
        if not arriving:
            return
        names: dict[str, _Held | None] = {}
        gives = {name: tensor for tensor, name in row.gives}
        saved, early = row.saves, self.offloaded or len(self.scopes) > 1
        if self._leaves:
            saved, also = _seen(row), self._stays(row)
            self._unpack(row)
        for name, size in row.steps:
            if size:
                held = self.make(size, self._category(gives.get(name)))
                held.view = name in row.views
                names[name] = held
            elif name == "g":
                for held in arriving:
                    self.release(held)
                arriving = []
            elif name != "saved":
                self.release(names.pop(name))
            elif early:  # unpacked, used, and let go
                self._let_go(saved)
                saved = ()
        self.moment(row.name, "backward")
        self._let_go(saved)
        for t in also:  # not what came back
            self.release(self.scopes[0].get(id(t.storage)))
        if row.extra:
            self.release(self.extras.pop(id(row)))
        for _, name in row.gives:
            if name == "g":
                arriving[0].holders += 1
        for held in arriving:
            self.release(held)
        given = dict(names, g=arriving[0] if arriving else None)
        for tensor, name in row.gives:
            self._give(tensor, told(given[name]), row.name)

    def _category(self, tensor: PaperTensor | None) -> str:
        """What a gradient of this tensor is, once it is there."""
        key = id(tensor)
        number = None if tensor is None else self.weights.get(key)
        if number is None or number in self.begun or self.due[key] > 1:
            return "temporaries"
        return "temporaries" if key in self.pending else "gradients"

    def _give(self, tensor: PaperTensor, held: _Held, name: str) -> None:
        """A gradient arrives at a tensor; the second is added to the first."""
        key = id(tensor)
        before = self.pending.pop(key, None)
        self.due[key] -= 1
        if before is not None:
            alone = before.holders == 1 and not before.view
            if alone:  # the sum stays where the first was
                self.release(before)
            self.due[key] += 1  # the sum is yet to arrive
            both = self.make(tensor.bytes, self._category(tensor))
            self.due[key] -= 1
            self.moment(name + " (sum of gradients)", "backward")
            if not alone:
                self.release(before)
            self.release(held)
            held = both
        number = self.weights.get(key)
        if number is None or self.due[key]:
            self.pending[key] = held
            return
        if number in self.begun:  # added to the existing one
            self.release(held)
        self.begun.add(number)


def _block(row: Row | Segment) -> str:
    """The name of its block, as ``"blocks.3"`` or, in a model of the library
    transformers, ``"model.layers.3"``; none has ``""``."""
    first = row.rows[0] if isinstance(row, Segment) else row
    found = re.match(r"(?:blocks|model\.layers)\.\d+", first.name)
    return found[0] if found else ""


def _flat(rows: Sequence[Row | Segment]) -> list[Row]:
    return [
        inner
        for row in rows
        for inner in (row.rows if isinstance(row, Segment) else [row])
    ]


def _uses(row: Row | Segment) -> tuple[PaperTensor, ...]:
    """What a row reads, or keeps alive while it works."""
    if isinstance(row, Segment):
        made = [*row.casts, *row.rows]
        inside = {id(t) for inner in made for t in inner.makes}
        uses = [t.storage for inner in row.rows for t in _uses(inner)]
        outside = {id(t): t for t in uses if id(t) not in inside}
        return tuple(outside.values())
    return row.reads + row.watches


def _holds(row: Row | Segment) -> tuple[PaperTensor, ...]:
    """What a row's graph keeps alive while it works, beside no checkpoint."""
    return () if isinstance(row, Segment) else row.holds


def _saves(row: Row | Segment) -> tuple[PaperTensor, ...]:
    """What a row keeps; of a segment, whatever it is called with."""
    if isinstance(row, Segment):
        return _uses(row) if any(r.needs for r in row.rows) else ()
    return row.saves


def _seen(row: Row | Segment) -> tuple[PaperTensor, ...]:
    """What of it a hook for saved tensors sees."""
    if row.seen is None:
        return _saves(row)
    seen = [t.storage for t in row.seen]
    return tuple(t for t in _saves(row) if t.storage in seen)


def moved(paper: Paper) -> int:
    """Bytes that leave where what autograd keeps waits elsewhere."""
    return sum(tensor.bytes for tensor, _ in _kept(paper, _seen))


def kept(paper: Paper) -> list[tuple[PaperTensor, list[Row | Segment]]]:
    """What autograd keeps from the forward pass to the backward pass.

    With the loss it is :attr:`Prediction.saved`. Left out is what is there
    anyway, weights and batch, and what a row keeps within a checkpoint.

    Returns:
        Each tensor that is saved, once, with the rows that save it, in
        order. A row's statistics are a tensor of 2 bytes a number.
    """
    return _kept(paper, _saves)


def _kept(
    paper: Paper, saves: Callable[[Row | Segment], tuple[PaperTensor, ...]]
) -> list[tuple[PaperTensor, list[Row | Segment]]]:
    found: dict[int, tuple[PaperTensor, list[Row | Segment]]] = {}
    for row in paper.rows:
        saved = {id(t.storage): t.storage for t in saves(row)}
        if isinstance(row, Row) and row.extra and row.gives:
            statistics = PaperTensor(row.extra // 2, 2)
            saved[id(statistics)] = statistics
        for key, tensor in saved.items():
            if not tensor.kind:
                found.setdefault(key, (tensor, []))[1].append(row)
    return list(found.values())
