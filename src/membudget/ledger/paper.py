"""Autograd on paper: a training step as rows of a ledger, without tensors.

Every operator is a :class:`Row`: what it reads, what it makes, what it saves
for the backward pass, and what its backward pass allocates and frees, in the
order in which PyTorch does it. :mod:`membudget.ledger.operators` writes the
rows, :func:`membudget.ledger.walk` goes through them forward and backward and
adds up.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

LISTS = ("cpu", "cuda")
"""The devices whose autocast and kernels differ."""


@dataclass(eq=False, slots=True)
class PaperTensor:
    """A tensor of which only the size is known.

    Attributes:
        elements: its numbers.
        itemsize: bytes of one.
        trained: whether a gradient flows to it.
        kind: ``"parameter"``, ``"input"`` (both are there before the step)
            or ``""`` for what the step makes.
        base: the tensor whose memory a view shows.
    """

    elements: int
    itemsize: int = 4
    trained: bool = True
    kind: str = ""
    base: "PaperTensor | None" = None

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.elements * self.itemsize

    @property
    def storage(self) -> "PaperTensor":
        """The tensor that owns the memory: itself, or a view's base."""
        return self if self.base is None else self.base


Step = tuple[str, int]
"""Of a backward pass: allocate bytes under a name; 0 bytes frees the name."""


@dataclass(eq=False, slots=True)
class Row:
    """One operator.

    Attributes:
        name: module and operator, for people (``"blocks.0.up linear"``).
        reads: the tensors that it reads; ``watches`` are those that merely
            live as long, because a variable of Python's holds them.
        makes: the tensors that it returns. A view takes no bytes.
        saves: what its backward pass needs of these.
        extra: bytes of further tensors it saves: statistics, masks.
        steps: what its backward pass allocates and frees, in order, besides
            the arriving gradient. What is not freed is in ``gives``.
        gives: for each read tensor, in order, the step whose bytes become
            its gradient; ``"g"`` hands the arriving gradient on.
        views: those steps whose gradient is a view of another tensor, so
            that no second one is added to it in place.
        holds: tensors that live as long where there is a tape: a graph that
            will have no backward pass keeps them.
        kept: whether what it makes stays in spite of a checkpoint around it,
            and is not made again.
        seen: of what it saves, what hooks for saved tensors see; None: all.
    """

    name: str
    reads: tuple[PaperTensor, ...]
    makes: tuple[PaperTensor, ...]
    saves: tuple[PaperTensor, ...] = ()
    extra: int = 0
    steps: tuple[Step, ...] = ()
    gives: tuple[tuple[PaperTensor, str], ...] = ()
    views: tuple[str, ...] = ()
    watches: tuple[PaperTensor, ...] = ()
    holds: tuple[PaperTensor, ...] = ()
    kept: bool = False
    seen: tuple[PaperTensor, ...] | None = None

    @property
    def needs(self) -> bool:
        """Whether its backward pass asks for saved tensors at all.

        Those that cost nothing (parameters) are among them. A recomputation
        runs up to the last row that needs something.
        """
        return bool(self.saves)

    @property
    def after(self) -> bool:
        """Whether some of what it saves is there only after it ran."""
        return bool(self.extra) or any(t in self.makes for t in self.saves)


@dataclass(eq=False, slots=True)
class Segment:
    """Rows that run under a checkpoint.

    It keeps what it reads and did not make. Its rows run again in the
    backward pass.

    Attributes:
        rows: in order.
        casts: rows before it that made copies for autocast, which it reads.
            They are gone by the backward pass and are made again first.
        seen: of what it keeps, what hooks for saved tensors see: the
            arguments of the call. The function holds the rest. None: all.
    """

    rows: list[Row]
    casts: list[Row] = field(default_factory=list)
    seen: tuple[PaperTensor, ...] | None = None

    @property
    def makes(self) -> tuple[PaperTensor, ...]:
        """What its last row makes."""
        return self.rows[-1].makes


@dataclass
class Paper:
    """A sheet on which a step is written down, row by row.

    Args:
        autocast: bytes of a number in matrix products where they are not
            those of the model: 2 for bf16 or fp16 under autocast.
        lists: whose operators autocast casts to fp32: ``"cpu"`` for the
            losses alone, ``"cuda"`` for softmax and layer norm, too.
        kernels: whose kernels run: ``"cuda"``'s keep a byte of each number
            that dropout may drop, and a norm's statistics in fp32; ``"cpu"``'s
            keep both in the model's dtype.

    Attributes:
        rows: what was written.
        inputs: tensors that are there before the step.
        parameters: the trained weights, in order of use.
        frozen: the other ones.
        module: the names of the modules that the next row is in.
        leaves: what the step makes and asks a gradient of, as of a weight.
        pinned: what stays until the forward pass is over: the copies of
            parameters that autocast keeps.
    """

    autocast: int | None = None
    lists: str = "cpu"
    kernels: str = "cpu"
    rows: list[Row | Segment] = field(default_factory=list, init=False)
    inputs: list[PaperTensor] = field(default_factory=list, init=False)
    parameters: list[PaperTensor] = field(default_factory=list, init=False)
    frozen: list[PaperTensor] = field(default_factory=list, init=False)
    leaves: list[PaperTensor] = field(default_factory=list, init=False)
    pinned: list[PaperTensor] = field(default_factory=list, init=False)
    module: list[str] = field(default_factory=list, init=False)
    _casts: dict[int, Row] = field(default_factory=dict, init=False)

    def input(self, elements: int, itemsize: int = 4) -> PaperTensor:
        """A tensor of the batch: there before the step, not trained."""
        tensor = PaperTensor(elements, itemsize, False, "input")
        self.inputs.append(tensor)
        return tensor

    def parameter(
        self, elements: int, itemsize: int = 4, trained: bool = True
    ) -> PaperTensor:
        """A weight; a frozen one takes its bytes and nothing else."""
        tensor = PaperTensor(elements, itemsize, trained, "parameter")
        (self.parameters if trained else self.frozen).append(tensor)
        return tensor

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """``with paper.inside("blocks.0"):`` names the rows written there."""
        self.module.append(name)
        yield
        self.module.pop()

    def write(
        self,
        operator: str,
        reads: tuple[PaperTensor, ...],
        makes: tuple[PaperTensor, ...],
        **rest,
    ) -> Row:
        """Write a row; the arguments are those of :class:`Row`.

        What is made is trained if something that is read is; where nothing
        is, the row saves nothing. No gradient is computed for a tensor that
        is not trained.
        """
        gives = rest.pop("gives", ())
        idle = {name for tensor, name in gives if not tensor.trained}
        gives = tuple(pair for pair in gives if pair[0].trained)
        steps = rest.pop("steps", ())
        if not gives:
            steps = ()
            rest["saves"] = ()
        name = " ".join([".".join(self.module), operator]).strip()
        row = Row(
            name,
            reads,
            makes,
            steps=tuple(step for step in steps if step[0] not in idle),
            gives=gives,
            **rest,
        )
        for tensor in makes:
            tensor.trained = bool(gives)
        self.rows.append(row)
        return row

    @property
    def last(self) -> Row:
        """The row that was written last, which is no segment."""
        return cast("Row", self.rows[-1])

    def checkpoint(
        self, start: int, given: tuple[PaperTensor, ...] | None = None
    ) -> None:
        """Put the rows from number ``start`` on under one checkpoint, which
        is called with what is ``given``."""
        if not self.rows[start:]:
            return
        rows = cast("list[Row]", self.rows[start:])
        segment = Segment(rows, seen=given)
        read = {id(tensor) for row in segment.rows for tensor in row.reads}
        segment.casts = [
            cast
            for cast in self._casts.values()
            if cast not in segment.rows and id(cast.makes[0]) in read
        ]
        self.rows[start:] = [segment]
