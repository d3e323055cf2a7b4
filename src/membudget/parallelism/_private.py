"""What is used of PyTorch's pipelines beyond the public interface."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

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


class _Alone(PipelineStage):
    """A stage whose neighbours do not exist: it asks none of them for the
    shapes, which it was given."""

    def _warmup_forward_vote(
        self, has_backward: bool, received_acc: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.tensor([1], dtype=torch.int32)

    def _warmup_backward_result(
        self, received_result: torch.Tensor | None = None
    ) -> torch.Tensor:
        return torch.tensor([1], dtype=torch.int32)


class _Kept:
    """What stands for a message: done at once, and it keeps its tensors, as
    gloo's and NCCL's do until nobody needs to know whether it is done."""

    def __init__(self, operations: Sequence[dist.P2POp]) -> None:
        self.operations = operations

    def wait(self) -> None:
        pass


@contextmanager
def messages_kept() -> Iterator[None]:
    """Pipelines send and receive nothing, and keep what they would send.

    Raises:
        RuntimeError: this PyTorch sends in another way.
    """
    if not hasattr(schedules, "_batch_p2p"):
        raise RuntimeError(
            f"torch {torch.__version__} sends a pipeline's messages in "
            f"another way: use torch {TORCH[0]} to {TORCH[1]}, or start real "
            "ranks with membudget.sharding.Ranks"
        )

    def keep(ops: Sequence[dist.P2POp], desc: str | None = None) -> list:
        return [_Kept(ops)]

    with patch.object(schedules, "_batch_p2p", keep):
        yield


def pipeline_stage(
    part: nn.Module,
    number: int,
    stages: int,
    inputs: torch.Tensor,
    output: torch.Tensor,
    alone: bool,
) -> PipelineStage:
    """A stage with known shapes, of the default group's pipeline.

    Args:
        part: its module.
        number: of all ``stages``.
        inputs, output: of a micro-batch, as examples.
        alone: whether the other ranks do not exist.
    """
    kind = _Alone if alone else PipelineStage
    return kind(
        part,
        number,
        stages,
        inputs.device,
        input_args=inputs,
        output_args=output,
    )


def receive_buffers(stages: Sequence[PipelineStage]) -> list[torch.Tensor]:
    """What stages keep between steps for what other ranks send."""
    found = []
    for stage in stages:
        for rows in stage.args_recv_info, stage.grad_recv_info:
            for info in (one for row in rows.values() for one in row):
                found.append(getattr(info, "buffer", None))
    return [b for b in found if isinstance(b, torch.Tensor)]


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
