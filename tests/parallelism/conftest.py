"""Settings of this room's tests, and the way to their helpers."""

import sys
from pathlib import Path

import torch

# The ranks import them, too.
sys.path.insert(0, str(Path(__file__).parent))

torch.set_num_threads(1)
