"""What is used of PyTorch's pipelines and kernels that is not public."""

import re

import torch

from membudget import TORCH


def torch_table(
    schedule: str, ranks: int, micro_batches: int, chunks: int
) -> list[list[tuple[str, int, int]]]:
    """PyTorch's own order of a schedule, by rank.

    Each entry is a letter ("F" forward, "B" the whole backward pass, "I" and
    "W" its two parts), a stage and a micro-batch. Of what PyTorch overlaps
    one stands after the other.

    Raises:
        ValueError: PyTorch refuses the numbers.
        RuntimeError: this PyTorch has no such tables.
    """
    try:
        from torch.distributed.pipelining import _schedule_visualizer
    except ImportError as error:
        raise RuntimeError(
            f"torch {torch.__version__} has no {error.name}: use torch "
            f"{TORCH[0]} to {TORCH[1]}"
        ) from error
    rows = _schedule_visualizer.get_schedule_ops(
        schedule, ranks, micro_batches, chunks
    )
    found = []
    for row in rows:
        parts: list = []
        for action in filter(None, row):
            parts += getattr(action, "sub_actions", None) or [action]
        named = [re.fullmatch(r"(\d+)([FBIW])(\d+)", str(p)) for p in parts]
        found.append(
            [(m[2], int(m[1]), int(m[3])) for m in named if m is not None]
        )
    return found


def tile_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused attention, and the logarithms of its softmaxes' sums."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = fused(q, k, v, 0.0, causal)
    return out, sums


def tile_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
) -> list[torch.Tensor]:
    """The gradients of q, k and v by these keys alone.

    ``out`` and ``sums`` are those of all keys.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return list(fused(dout, q, k, v, out, sums, 0.0, causal))
