"""Pipelines, for one process to simulate and for ranks to run."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from membudget.models import GPT, Llama
from membudget.parallelism import run_pipeline

WIDTH, TOKENS, VOCABULARY = 16, 64, 32
MODELS = {
    "gpt": partial(GPT, VOCABULARY, TOKENS, WIDTH, 8, 2),
    "llama": partial(Llama, VOCABULARY, WIDTH, 8, 4, 2, 24),
}
SAMPLES = 2  # of a micro-batch
UNIT = SAMPLES * TOKENS * WIDTH * 4


def build(kind, checkpointed=False):
    torch.manual_seed(0)
    model = MODELS[kind]()
    for block in model.blocks if checkpointed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(micro_batches):
    g = torch.Generator().manual_seed(1)
    shape = micro_batches * SAMPLES, TOKENS
    tokens = torch.randint(VOCABULARY, shape, generator=g)
    return tokens, tokens.roll(-1, 1)


def measured(kind, schedule, micro_batches, chunks=None, checkpointed=False):
    """On a rank: what a step needed, its losses and its gradients."""
    torch.manual_seed(0)
    models = []

    def keep():
        models.append(build(kind, checkpointed))
        return models[-1]

    step = run_pipeline(
        keep,
        loss,
        *batch(micro_batches),
        schedule=schedule,
        micro_batches=micro_batches,
        chunks=chunks,
    )
    names = [
        name for name, p in models[0].named_parameters() if p.grad is not None
    ]
    grads = {n: models[0].get_parameter(n).grad for n in names}
    return step.peak, step.split, step.losses, grads
