"""A model whose linear layers are bitsandbytes', as QLoRA has them."""

import pytest
from torch import nn


def in_four_bits(model: nn.Module, blocks: nn.Module) -> nn.Module:
    """The frozen model, the linear layers in its blocks replaced by NF4's."""
    bnb = pytest.importorskip("bitsandbytes")
    linears = [
        (part, name, old)
        for part in blocks.modules()
        for name, old in part.named_children()
        if isinstance(old, nn.Linear)
    ]
    for part, name, old in linears:
        new = bnb.nn.Linear4bit(
            old.in_features,
            old.out_features,
            bias=old.bias is not None,
            compute_dtype=old.weight.dtype,
        )
        new.weight = bnb.nn.Params4bit(
            old.weight.data, requires_grad=False, quant_type="nf4"
        )
        new.bias = old.bias
        setattr(part, name, new.to("cpu"))
    model.is_loaded_in_4bit = True  # by which peft knows it
    return model.requires_grad_(False)
