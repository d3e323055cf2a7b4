"""The training script's functions, for ranks to call."""

import sys

import torch

from membudget.sharding import training_script

if str(training_script().parent) not in sys.path:
    sys.path.insert(0, str(training_script().parent))

import parallel_train


def main(*options):
    parallel_train.train(parallel_train.options(options))


def first_gradient(*options):
    """The whole gradient of the first step, by name; of a rank's own part."""
    args = parallel_train.options(options)
    wrapped = parallel_train.build(args)
    model = getattr(wrapped, "module", wrapped)
    x, y = parallel_train.own_batch(parallel_train.text(), 0, args)
    parallel_train.passes(wrapped, args)(x, y, 0)
    return {
        name: p.grad.full_tensor()
        if hasattr(p.grad, "full_tensor")
        else p.grad
        for name, p in model.named_parameters()
    }


def first_values(*options):
    """A rank's whole parameters before the first step, by name."""
    model = parallel_train.build(parallel_train.options(options))
    model = getattr(model, "module", model)
    return {
        name: torch.clone(getattr(p, "full_tensor", lambda p=p: p)().detach())
        for name, p in model.named_parameters()
    }
