"""Settings of this room's tests, and the way to their helpers."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("ledger_helpers", "causal_helpers")

torch.set_num_threads(1)
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, print_blob=False
)
settings.load_profile("fixed")
