"""Settings of this room's tests, and the way to their helpers."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("precision_helpers")

torch.set_num_threads(1)
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, print_blob=False
)
settings.load_profile("fixed")


@pytest.fixture
def processor(monkeypatch):
    """A CPU with or without units for 16 bits; None: PyTorch cannot tell."""

    def install(bf16, fp16):
        for of, name, answer in (
            (torch.cpu, "_is_avx512_bf16_supported", bf16),
            (torch.ops.mkldnn, "_is_mkldnn_fp16_supported", fp16),
        ):
            ask = None if answer is None else lambda a=answer: a
            monkeypatch.setattr(of, name, ask, raising=False)

    return install
