"""bf16 weights, and the fp32 copies that are stepped."""

from collections.abc import Callable

import torch
from torch import nn

from membudget.checks import function, stepper, trained


class MasterWeights:
    """A bf16 model, and the fp32 copies that its optimizer steps.

    The recipe ``"master"`` of :data:`membudget.ledger.RECIPES`
    (Micikevicius et al. 2018, arXiv 1710.03740, section 3.1).

    Args:
        model: in fp32; it is cast to bf16, its buffers too.
        optimizer: makes one from the list of copies.

    Attributes:
        copies: the fp32 weights, one for each trained parameter.
        optimizer: theirs.

    Raises:
        ValueError: a model that is not in fp32 or has no trained parameters.

    Example:
        >>> master = MasterWeights(model, torch.optim.AdamW)
        >>> loss_fn(model(x), y).backward()
        >>> master.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    ) -> None:
        self.weights = trained(model, "hand over one that is to be trained")
        function(optimizer, "optimizer")
        others = {p.dtype for p in self.weights} - {torch.float32}
        if others:
            raise ValueError(
                f"some parameters are {', '.join(map(str, others))}: leave "
                "the model in fp32 (no model.half())"
            )
        self.copies = [p.detach().clone() for p in self.weights]
        made = optimizer(self.copies)
        self.optimizer = stepper(made, "what optimizer made")
        model.to(torch.bfloat16)

    def step(self) -> None:
        """Step the copies, round them into the model, clear the gradients.

        Raises:
            RuntimeError: no parameter has a gradient.
        """
        if all(p.grad is None for p in self.weights):
            raise RuntimeError(
                "no parameter has a gradient: run a backward pass before"
            )
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if weight.grad is not None:
                copy.grad = weight.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)
                weight.grad = copy.grad = None
