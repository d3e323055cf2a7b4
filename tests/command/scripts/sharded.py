"""FSDP2 on two processes; the second has the larger batch."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(int(sys.argv[1 + rank]), 64)
model(x).sum().backward()
optimizer.step()
print(f"rank {rank} trained")
dist.barrier()
dist.destroy_process_group()
