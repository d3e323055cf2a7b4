"""Adapters: train less of a model, and see what its step still keeps."""

from membudget.adapters.four_bits import (
    BLOCK,
    GROUP,
    NF4,
    FourBits,
    Quantised4,
    bits_per_weight,
    quantise,
)
from membudget.adapters.lora import LoRA, adapt, train_only

__all__ = [
    "BLOCK",
    "GROUP",
    "NF4",
    "FourBits",
    "LoRA",
    "Quantised4",
    "adapt",
    "bits_per_weight",
    "quantise",
    "train_only",
]
