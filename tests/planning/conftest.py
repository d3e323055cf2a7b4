"""Settings of this room's tests, and the way to their helpers."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("planning_helpers")

torch.set_num_threads(1)
