"""Settings of this room's tests, and the way to their helpers."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

from tests.soak import examples

# The helpers of this folder; the ranks import them, too.
sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    max_examples=examples(25),
)
settings.load_profile("fixed")
