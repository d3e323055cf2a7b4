"""Which formats a device multiplies matrices in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from membudget.measuring import resolve_device
from membudget.precision.formats import FORMATS, format_of

SINCE = {
    "tf32": (8, 0),
    "bf16": (8, 0),
    "fp16": (7, 0),
    "fp8-e4m3": (8, 9),
    "fp8-e5m2": (8, 9),
}
"""The CUDA capability from which on matrix units take a format (NVIDIA, CUDA
C++ Programming Guide, "Compute Capabilities")."""

EMULATED = {"bf16": (7, 0), "fp16": (5, 3)}
"""From which on PyTorch takes the format at all: cuBLAS refuses bf16 before
(pytorch#57773), though ``torch.cuda.is_bf16_supported()`` is true there."""


def support(format: str, device: str | torch.device | None = None) -> str:
    """How a device multiplies matrices in a format.

    ``"native"``: it has units for it. ``"emulated"``: PyTorch accepts the
    dtype and computes the same through other units, without their speed; a
    T4 does so in bf16, and ``torch.cuda.is_bf16_supported()`` is true there.
    ``"absent"``: PyTorch has no such products there.

    Args:
        format: one of :data:`membudget.precision.FORMATS`.
        device: as :func:`membudget.measuring.resolve_device` takes it.
    """
    format, where = format_of(format).name, resolve_device(device)
    if where.type == "cpu":
        return _on_cpu(format)
    if format == "fp32":
        return "native"
    capability = torch.cuda.get_device_capability(where)
    if capability >= SINCE[format]:
        return "native"
    least = EMULATED.get(format, SINCE[format])
    return "emulated" if capability >= least else "absent"


def _on_cpu(format: str) -> str:
    if format == "fp32":
        return "native"
    if FORMATS[format].bytes != 2:
        return "absent"
    asked = {
        "bf16": (torch.cpu, "_is_avx512_bf16_supported"),
        "fp16": (torch.ops.mkldnn, "_is_mkldnn_fp16_supported"),
    }
    ask = getattr(*asked[format], None)  # private, may go
    return "native" if ask is not None and ask() else "emulated"


@contextmanager
def tf32(device: str | torch.device | None = None) -> Iterator[None]:
    """Let a GPU multiply fp32 matrices in tf32 inside the block.

    Matrix products and convolutions, forward and backward. Tensors stay in
    fp32: no byte is saved.

    Raises:
        ValueError: a device without tf32.
    """
    if support("tf32", device) != "native":
        raise ValueError(
            f"{resolve_device(device)} has no tf32, which CUDA devices of "
            "capability 8.0 and above have: use fp32, or fp16 on a GPU that "
            "is older"
        )
    settings = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "tf32"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
