"""Cards, and the memory that a training step can have on each.

What a card is sold as and what its driver reports differ. The capacities here
are those that PyTorch printed in error messages which people posted, with two
decimals of a GiB; the table says where and when.
"""

from dataclasses import dataclass

GIB = 2**30

KEPT = GIB // 2
"""Bytes of a card that a step cannot have: the context of CUDA, its
libraries, and what the allocator keeps in parts too small to use. A round
number of the right size; no GPU was measured for it."""


@dataclass(frozen=True)
class Card:
    """One kind of GPU.

    Args:
        capacity: bytes that the driver reports.
        bf16: whether it computes in bf16 natively (compute capability 8.0
            and above; before, PyTorch emulates it).
        source: where the capacity was printed.
        date: when, year and month.
    """

    capacity: int
    bf16: bool
    source: str
    date: str

    @property
    def usable(self) -> int:
        """Bytes for a training step: the capacity less :data:`KEPT`."""
        return self.capacity - KEPT


def _card(gib: float, bf16: bool, thread: str, date: str) -> Card:
    return Card(round(gib * GIB), bf16, f"https://github.com/{thread}", date)


CARDS = {
    "T4": _card(14.56, False, "Zheng-Chong/CatVTON/issues/133", "2025-11"),
    "RTX 4090": _card(23.64, True, "ali-vilab/VGen/issues/104", "2024-04"),
    "RTX 5090": _card(31.37, True, "Wan-Video/Wan2.1/issues/465", "2025-07"),
    "A100 40 GB": _card(39.50, True, "TianheWu/CoSeR/issues/10", "2025-01"),
    "A100 80 GB": _card(
        79.25, True, "levihsu/OOTDiffusion/issues/235", "2025-03"
    ),
    "H100 80 GB": _card(
        79.11, True, "vllm-project/vllm/issues/27508", "2025-10"
    ),
}
"""Cards by name, the smallest first."""
