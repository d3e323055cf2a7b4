"""Cards, and the memory that a training step can have on each.

What a card is sold as and what its driver reports differ. The capacities here
are those that PyTorch printed in error messages which people posted, with two
decimals of a GiB; the table says where and when. How fast a card is stands in
its vendor's data sheet: that is what it can do at most.
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
        half_flops: FLOP/s of its tensor cores on 16-bit numbers, summed in
            fp32, without zeros that are skipped.
        tf32_flops: FLOP/s of its tensor cores on fp32 numbers that they round
            to TF32; 0 where they cannot (before compute capability 8.0).
        flops: FLOP/s on fp32 numbers.
        bandwidth: bytes/s of its memory.
        link: bytes/s that it sends to other cards: over NVLink, or over PCIe
            where it has none.
        host_link: bytes/s one way between its memory and the host's, over
            PCIe with 16 lanes. Data sheets print both directions summed:
            this is half of it (16, 32 and 64 GB/s for PCIe 3, 4 and 5, of
            which the encoding takes 1.5 %).
        sheet: the data sheet that says so, and its year.
    """

    capacity: int
    bf16: bool
    source: str
    date: str
    half_flops: float
    tf32_flops: float
    flops: float
    bandwidth: float
    link: float
    host_link: float
    sheet: str

    @property
    def usable(self) -> int:
        """Bytes for a training step: the capacity less :data:`KEPT`."""
        return self.capacity - KEPT


def _card(
    gib: float,
    bf16: bool,
    thread: str,
    date: str,
    teraflops: tuple[float, float, float],
    gigabytes: tuple[float, float, float],
    sheet: str,
) -> Card:
    """A card by its figures as they are printed.

    Args:
        thread: of GitHub, where ``gib`` was printed.
        teraflops: a second: on 16-bit numbers, TF32 and fp32.
        gigabytes: a second: of its memory, to other cards, and one way to
            the host.
    """
    half, tf32, single = (1e12 * speed for speed in teraflops)
    bandwidth, link, host = (1e9 * speed for speed in gigabytes)
    return Card(
        round(gib * GIB),
        bf16,
        f"https://github.com/{thread}",
        date,
        half,
        tf32,
        single,
        bandwidth,
        link,
        host,
        sheet,
    )


GA10X = "NVIDIA Ampere GA102 GPU Architecture, white paper, 2021"
A100 = "NVIDIA A100 Tensor Core GPU, data sheet, 2021, SXM"

CARDS = {
    "RTX 3070": _card(
        7.78,
        True,
        "meta-llama/codellama/issues/82",
        "2023-11",
        (40.6, 20.3, 20.3),
        (448, 32, 32),
        GA10X,
    ),
    "RTX 3060": _card(
        11.75,
        True,
        "meta-llama/llama/issues/455",
        "2023-07",
        (25.5, 12.7, 12.7),
        (360, 32, 32),
        f"{GA10X}, each of 28 multiprocessors at 1.777 GHz",
    ),
    "T4": _card(
        14.56,
        False,
        "Zheng-Chong/CatVTON/issues/133",
        "2025-11",
        (65, 0, 8.1),
        (320, 16, 16),
        "NVIDIA T4 Tensor Core GPU, data sheet, 2019",
    ),
    "RTX 4080": _card(
        15.99,
        True,
        "aigc-apps/sd-webui-EasyPhoto/issues/281",
        "2023-11",
        (97.5, 48.7, 48.7),
        (716.8, 32, 32),
        "NVIDIA Ada GPU Architecture, white paper, 2022",
    ),
    "RTX 4090": _card(
        23.64,
        True,
        "ali-vilab/VGen/issues/104",
        "2024-04",
        (165.2, 82.6, 82.6),
        (1008, 32, 32),
        "NVIDIA Ada GPU Architecture, white paper, 2022",
    ),
    "RTX 5090": _card(
        31.37,
        True,
        "Wan-Video/Wan2.1/issues/465",
        "2025-07",
        (209.5, 104.8, 104.8),
        (1792, 64, 64),
        "NVIDIA RTX Blackwell GPU Architecture, white paper, 2025",
    ),
    "A100 40 GB": _card(
        39.50,
        True,
        "TianheWu/CoSeR/issues/10",
        "2025-01",
        (312, 156, 19.5),
        (1555, 300, 32),
        A100,
    ),
    "L40S": _card(
        44.42,
        True,
        "stepfun-ai/Step-Video-T2V/issues/8",
        "2025-02",
        (362.05, 183, 91.6),
        (864, 32, 32),
        "NVIDIA L40S GPU, data sheet, 2023",
    ),
    "A100 80 GB": _card(
        79.25,
        True,
        "levihsu/OOTDiffusion/issues/235",
        "2025-03",
        (312, 156, 19.5),
        (2039, 300, 32),
        A100,
    ),
    "H100 80 GB": _card(
        79.11,
        True,
        "vllm-project/vllm/issues/27508",
        "2025-10",
        (989.4, 494.7, 67),
        (3350, 450, 64),
        "NVIDIA H100 Tensor Core GPU, data sheet, 2023, SXM",
    ),
}
"""Cards by name, the smallest first."""
