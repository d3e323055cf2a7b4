"""LoRA by hand: a linear layer with two thin ones beside it."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from membudget.adapters.four_bits import Quantised4
from membudget.checks import (
    instance,
    module,
    number,
    shown,
    stepper,
    strings,
    trained,
    whole,
)
from membudget.measuring.storages import module_tensors
from membudget.measuring.units import format_bytes
from membudget.stepping import parameters_of


class LoRA(nn.Module):
    """``base(x) + b(a(dropout(x))) · alpha / rank``.

    Hu et al. (2021, arXiv 2106.09685, section 4.1), as ``peft`` computes it:
    x is cast to the adapter's dtype, and the sum back to that of ``base(x)``.
    ``lora_b`` begins with zeros, so that nothing changes at first.

    Args:
        base: the layer, which is frozen; :class:`Quantised4` makes it QLoRA
            (Dettmers et al. 2023, arXiv 2305.14314).
        rank: outputs of ``lora_a``, at most the layer's inputs and outputs.
        alpha: the larger, the more the adapter counts.
        dropout: the share of x's numbers that the adapter does not see.
        dtype: of the adapter.
    """

    def __init__(
        self,
        base: nn.Linear | Quantised4,
        rank: int = 8,
        alpha: float = 16,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        use = "a torch.nn.Linear or a Quantised4"
        instance(base, nn.Linear | Quantised4, "the base", use)
        inputs, outputs = base.in_features, base.out_features
        rank = whole(rank, "rank", most=min(inputs, outputs))
        self.scale = number(alpha, "alpha", above=0) / rank
        dropout = number(dropout, "dropout", 0, 1)
        use = "a torch.dtype with a fraction"
        if not instance(dtype, torch.dtype, "dtype", use).is_floating_point:
            raise ValueError(f"dtype is {dtype}: use {use}")
        self.base = base
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        with module_tensors(base)[0].device:
            self.lora_a = nn.Linear(inputs, rank, bias=False, dtype=dtype)
            self.lora_b = nn.Linear(rank, outputs, bias=False, dtype=dtype)
        nn.init.zeros_(self.lora_b.weight)
        base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(instance(x, torch.Tensor, "x", "a tensor"))
        dtype = y.dtype
        x = x.to(self.lora_a.weight.dtype)
        y = y + self.lora_b(self.lora_a(self.drop(x))) * self.scale
        return y.to(dtype)


def adapt(
    model: nn.Module,
    targets: Sequence[str],
    rank: int = 8,
    alpha: float = 16,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Freeze a model, and put a :class:`LoRA` beside each target.

    Args:
        model: changed in place.
        targets: the last names of linear layers, such as ``"query"``.
        rank, alpha, dropout, dtype: of each :class:`LoRA`.

    Returns:
        The model.

    Raises:
        ValueError: a target that is the name of no linear layer, or what
            :class:`LoRA` refuses; the model is as it was.
    """
    module(model)
    layers: dict[str, nn.Linear] = {}
    for target in strings(targets, "targets", "names of linear layers"):
        found = _named(model, target)
        if not found:
            known = sorted(
                {
                    name.rpartition(".")[2]
                    for name, layer in model.named_modules()
                    if isinstance(layer, nn.Linear)
                }
            )
            raise ValueError(
                f"no linear layer is named {shown(target)}: use "
                f"{', '.join(known)}"
            )
        layers |= found
    least = min(n for m in layers.values() for n in m.weight.shape)
    whole(rank, "rank", most=least)
    for name, layer in layers.items():
        branch = LoRA(layer, rank, alpha, dropout, dtype)
        model.set_submodule(name, branch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in f".{name}")
    return model


def _named(model: nn.Module, target: str) -> dict[str, nn.Linear]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] == target
    }


def train_only(model: nn.Module, patterns: Sequence[str]) -> nn.Module:
    """Freeze all parameters but those whose names match.

    Args:
        model: changed in place.
        patterns: names, with ``*`` for any part: ``"blocks.[45].*"``,
            ``"*.bias"``. A tied parameter is trained under either name.

    Returns:
        The model.

    Raises:
        ValueError: a pattern that matches no parameter; the model is as it
            was.
    """
    named = list(module(model).named_parameters(remove_duplicate=False))
    chosen = []
    for wanted in strings(patterns, "patterns", "names of parameters"):
        found = [p for name, p in named if fnmatchcase(name, wanted)]
        if not found:
            raise ValueError(
                f"no parameter is named {shown(wanted)}: use names such as "
                f"{named[0][0]}, with * for any part"
            )
        chosen += found
    model.requires_grad_(False)
    for p in chosen:
        p.requires_grad_()
    return model


def check_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a base that is trained by mistake, and adapters that are not.

    The optimizer may hold frozen parameters beside the trained ones, as
    ``AdamW(model.parameters())`` does: what has no gradient is not stepped,
    has no states and no weight decay.

    Args:
        model: with adapters, of :func:`adapt` or of ``peft``.
        optimizer: the only one.

    Raises:
        ValueError: nothing is trained; the weight of an adapted layer is; or
            the optimizer lacks a trained parameter, as one does that was
            made before the adapters.
    """
    trained(model, "add adapters, and train them")
    named = dict(model.named_parameters())
    if wrong := _trained_bases(named):
        size = format_bytes(sum(named[name].nbytes for name in wrong))
        raise ValueError(
            f"{wrong[0]} is trained beside its adapter, one of {len(wrong)} "
            f"such weights: they have {size} of gradients, and the states of "
            "the optimizer. Freeze them: `requires_grad_(False)`"
        )
    held = {id(p) for p in parameters_of(stepper(optimizer))}
    wants = {n: p.requires_grad for n, p in named.items()}
    frozen = [n for n, p in named.items() if id(p) in held and not wants[n]]
    absent = [n for n, p in named.items() if id(p) not in held and wants[n]]
    if absent:
        holds = f"holds {frozen[0]}, which is frozen, and " if frozen else ""
        raise ValueError(
            f"the optimizer {holds}lacks {absent[0]}, which is trained: make "
            "it after the adapters, of the parameters that require a gradient"
        )


def _trained_bases(named: dict[str, nn.Parameter]) -> list[str]:
    """Names of weights that are trained, though they have an adapter."""
    adapted = {f".{name}".partition(".lora_")[0] for name in named}
    return [
        name
        for name, p in named.items()
        if p.requires_grad
        and name.endswith(".weight")
        and "lora_" not in name
        and f".{name}".rsplit(".", 2)[0] in adapted
    ]
