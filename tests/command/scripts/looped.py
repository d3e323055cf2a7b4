"""A plain loop, whose model does not know its loss."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(*layers, nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(int(sys.argv[1]), 64)
y = torch.zeros(len(x), dtype=torch.long)
for step in range(2):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print("step", step)
