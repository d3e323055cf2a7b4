"""What is used of PyTorch's pipelines beyond the public interface."""

from enum import Enum

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
        found.append(
            [
                (kind, a.stage_index, a.microbatch_index)
                for a in parts
                if (kind := _letter(a.computation_type)) in "FBIW"
            ]
        )
    return found


def _letter(kind: Enum) -> str:
    """Of an action's kind: its value, or its name in PyTorch 2.11."""
    return kind.value if isinstance(kind.value, str) else str(kind)
