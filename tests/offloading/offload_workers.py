"""What ranks do under FSDP2, with what they save in another memory."""

import torch
from torch.distributed.fsdp import fully_shard

from membudget import models
from membudget.offloading import Offload


def gradients(around):
    """This rank's shards of the gradients, after a step."""
    torch.manual_seed(0)
    model = models.GPT(16, 8, 8, 3, 2)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    tokens = torch.arange(16).view(2, 8)
    with around:
        value = model(tokens).square().sum()
    value.backward()
    return [p.grad.to_local() for p in model.parameters()]


def same():
    plain = gradients(torch.enable_grad())
    moved = Offload()
    found = gradients(moved)
    return all(map(torch.equal, plain, found)), moved.out, moved.back
