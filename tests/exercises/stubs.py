"""What the reader is given: nothing yet, or a broken loop to repair."""

import torch
import torch.nn.functional as F
from torch import nn


def own_ledger():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.rand(32, 64), torch.zeros(32, dtype=torch.long)
    guess = {"parameters": ..., "gradients": ...}
    guess["optimizer"] = ...
    guess["activations"] = ...
    return model, optimizer, cross_entropy, batch, guess


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)
