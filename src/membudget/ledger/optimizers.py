"""What an optimizer keeps: for each parameter, or by a tensor's shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from membudget.checks import listed, whole

Shape = tuple[int, ...]
Sizes = Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps for each parameter.

    Attributes:
        numbers: how many.
        itemsize: bytes of each; None for those of the parameter it steps.
        block: numbers that share one scale of 4 bytes; 0 without.
        counts: whether it counts its steps, in 4 bytes for each tensor.
        text: in words.
        matrix: how many numbers it keeps for a whole tensor of two or more
            dimensions, from its shape and the rank; None where ``numbers``
            says it.
        rest: who steps what is no matrix; None where it does so itself.
        ranked: whether it needs a rank.
    """

    numbers: int
    itemsize: int | None
    block: int
    counts: bool
    text: str
    matrix: Callable[[Shape, int], int] | None = None
    rest: str | None = None
    ranked: bool = False

    @property
    def shaped(self) -> bool:
        """Whether its bytes depend on shapes, and not on sizes alone."""
        return self.matrix is not None or self.rest is not None


def _rows_and_columns(shape: Shape, rank: int) -> int:
    """One number for each row, and one for each column."""
    *more, m, n = shape
    return prod(more) * (m + n)


def _galore(shape: Shape, rank: int) -> int:
    """A projector of the shorter side, two moments of the longer one."""
    if len(shape) > 2:
        return 2 * prod(shape)
    m, n = sorted(shape)
    rank = min(rank, m)  # as many singular vectors as there are
    return rank * (m + 2 * n)


def _apollo(shape: Shape, rank: int) -> int:
    """The same at any rank, and the norm of the update before."""
    if len(shape) > 2:
        return 2 * prod(shape)
    m, n = sorted(shape)
    return rank * (m + 2 * n) + 1


OPTIMIZERS = {
    "sgd": Optimizer(0, None, 0, False, "SGD"),
    "momentum": Optimizer(1, None, 0, False, "SGD with momentum"),
    "adam": Optimizer(2, None, 0, True, "Adam, AdamW"),
    "adam-8bit": Optimizer(2, 1, 256, False, "Adam with 8-bit states"),
    "amsgrad": Optimizer(3, None, 0, True, "AdamW with amsgrad"),
    "lion": Optimizer(1, None, 0, False, "Lion"),
    "lion-8bit": Optimizer(1, 1, 256, False, "Lion with 8-bit states"),
    "adafactor": Optimizer(
        1, None, 0, True, "Adafactor", matrix=_rows_and_columns
    ),
    "muon": Optimizer(
        1, None, 0, False, "Muon, and AdamW for the rest", rest="adam"
    ),
    "galore": Optimizer(
        2, None, 0, False, "GaLore", matrix=_galore, ranked=True
    ),
    "apollo": Optimizer(
        2, None, 0, False, "APOLLO", matrix=_apollo, ranked=True
    ),
}
"""The optimizers by name.

- ``"adam-8bit"`` and ``"lion-8bit"`` keep their states as bitsandbytes does:
  in bytes, with a scale for every block of 256, a table of 256 numbers for
  each of the states, which all parameters share, and in fp32 for tensors of
  fewer than 4 096 numbers (Dettmers et al. 2022, arXiv 2110.02861).
- ``"lion"`` keeps its momentum (Chen et al. 2023, arXiv 2302.06675).
- ``"adafactor"`` keeps, in place of Adam's second moment, its means over
  rows and over columns, and no first one (Shazeer and Stern 2018, arXiv
  1804.04235). A vector keeps all. So does ``torch.optim.Adafactor``; others
  have a first moment to switch on.
- ``"muon"`` keeps a momentum of each matrix and refuses all else, which
  AdamW steps (Jordan et al. 2024, kellerjordan.github.io/posts/muon). Their
  advice is to leave the embedding and the head to AdamW, too: count those as
  ``"adam"``.
- ``"galore"`` of rank r keeps, of a matrix whose shorter side is m and whose
  longer one is n, a projector of r · m numbers, and Adam's two moments of
  r · n (Zhao et al. 2024, arXiv 2403.03507). These are the numbers in use:
  galore-torch 1.0 holds an fp32 projector as a part of the m · m singular
  vectors it comes from, and these stay with it.
- ``"apollo"`` keeps as much, with a random projector, and one number more
  (Zhu et al. 2025, arXiv 2412.05270); APOLLO-Mini is its rank 1.
"""

PLANNED = ("sgd", "momentum", "adam", "adam-8bit", "lion-8bit")
"""Those that plans, sharding and the widgets choose among."""

SMALL = 4096
"""Numbers in a tensor, below which 8-bit states stay in fp32."""


def shapes_of(
    sizes: Sizes, what: str = "sizes or shapes of parameters"
) -> list[Shape]:
    """Shapes; a bare size is the shape of a vector. Sides may be 0."""
    return [_shape(size) for size in listed(sizes, "sizes", what, 0)]


def _shape(size: object) -> Shape:
    if not isinstance(size, tuple | list):
        return (whole(size, "the size of a parameter", 0),)
    return tuple(whole(side, "a side of a shape", 0) for side in size)


def kept_bytes(
    shapes: list[Shape], optimizer: str, itemsize: int, rank: int
) -> int:
    """Bytes of an optimizer's states, without a master copy.

    Args:
        shapes: of the parameters.
        optimizer: one of :data:`OPTIMIZERS`.
        itemsize: bytes of a parameter as the optimizer steps it.
        rank: where it needs one.
    """
    o = OPTIMIZERS[optimizer]
    total = sum(_of_tensor(s, optimizer, itemsize, rank) for s in shapes)
    if o.block and any(prod(shape) >= SMALL for shape in shapes):
        total += o.numbers * 256 * 4  # the tables
    return total


def _of_tensor(shape: Shape, optimizer: str, itemsize: int, rank: int) -> int:
    o, n = OPTIMIZERS[optimizer], prod(shape)
    if o.rest and len(shape) != 2:
        return _of_tensor(shape, o.rest, itemsize, rank)
    if o.block:
        large = n + 4 * -(-n // o.block)
        return o.numbers * (large if n >= SMALL else 4 * n)
    numbers = o.numbers * n
    if o.matrix and len(shape) > 1:
        numbers = o.matrix(shape, rank)
    return itemsize * numbers + 4 * o.counts
