"""One thread, and the way to the helpers."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("measuring_helpers")

torch.set_num_threads(1)
