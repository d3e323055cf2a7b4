"""The training script's functions, for ranks to call."""

import sys

import torch

from membudget.measuring import PeakTracker
from membudget.sharding import CommunicationCounter, training_script

if str(training_script().parent) not in sys.path:
    sys.path.insert(0, str(training_script().parent))

import fsdp_train


def main(*options):
    fsdp_train.train(fsdp_train.options(options))


def gathered(*options):
    """The digest of the untrained model, and how many numbers it has."""
    args = fsdp_train.options(options)
    model = fsdp_train.build(args)
    numbers = sum(p.full_tensor().numel() for p in model.parameters())
    return fsdp_train.digest(model, args), numbers


def built(*options):
    """The digest of the untrained model, and the most bytes it took."""
    args = fsdp_train.options(options)
    with PeakTracker(device=args.device) as tracker:
        model = fsdp_train.build(args)
    return fsdp_train.digest(model, args), tracker.peak


def one_step(*options):
    """The whole gradient of the first step, and what was exchanged."""
    args = fsdp_train.options(options)
    model = fsdp_train.build(args)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    with CommunicationCounter() as counter:
        fsdp_train.train_step(model, sgd, fsdp_train.text(), 0, args)
    gradients = [p.grad for p in model.parameters()]
    if args.sharded:
        gradients = [g.full_tensor() for g in gradients]
    return torch.cat([g.flatten() for g in gradients]), counter.traffic
