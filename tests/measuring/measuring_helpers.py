"""What the tests of measuring share."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from membudget.measuring import dry_run, trace_step

WIDTH = 8
KEPT = {"use_reentrant": False, "preserve_rng_state": False}
REENTRANT = KEPT | {"use_reentrant": True}


def chain(depth, activation=nn.ReLU, width=WIDTH):
    """Linear layers and activations by turns."""
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), activation()]
    return nn.Sequential(*layers)


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def mean_square(model, *batch):
    return model(*batch).square().mean()


def hooked(*models):
    """Everything global, or of the models, that measuring hooks into."""
    found = {
        f"{module}.{name}": list(value)
        for module in ("torch.nn.modules.module", "torch.optim.optimizer")
        for name, value in vars(sys.modules[module]).items()
        if name.startswith("_global") and isinstance(value, dict)
    }
    assert len(found) > 6
    found["dispatch"] = list(_get_current_dispatch_mode_stack())
    found["saved"] = torch._C._autograd._top_saved_tensors_default_hooks(True)
    found["resize_"] = torch.UntypedStorage.resize_
    for i, model in enumerate(models):
        for name, p in model.named_parameters():
            # An empty one is made with the first hook and stays.
            hooks = p._post_accumulate_grad_hooks or {}
            found[f"{i}.{name}"] = (list(hooks), p._backward_hooks)
        for name, module in model.named_modules():
            found[f"{i}.{name}."] = (
                list(module._forward_hooks),
                list(module._forward_pre_hooks),
                list(module._backward_hooks),
            )
    return found


def told(tracker):
    """What has to agree; operators that allocate nothing may differ."""
    ends = [i - 1 for i, _ in tracker.marks]
    ends.append(len(tracker.timeline) - 1)
    return {
        "start": tracker.start,
        "peak": tracker.peak,
        "split": tracker.split(),
        "marks": [label for _, label in tracker.marks],
        "at marks": [tracker.split(end) for end in ends],
        "made": sorted(
            (a.bytes, a.category, a.operator.module, a.operator.phase)
            for a in tracker.allocations
        ),
        "at the peak": tracker.at_peak()[0].operator,
    }


def check_both(model, loss, *batch, **options):
    """A dry run and a traced step tell the same; returns it."""
    dry = told(dry_run(model, loss, *batch, **options))
    assert dry == told(trace_step(model, loss, *batch, **options))
    return dry
