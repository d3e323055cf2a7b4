"""Settings of this room's tests."""

import torch

torch.set_num_threads(1)
