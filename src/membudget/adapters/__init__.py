"""Adapters: train less of a model, or keep less while you train it."""

from membudget.adapters.four_bits import (
    BLOCK,
    GROUP,
    NF4,
    FourBits,
    Quantised4,
    bits_per_weight,
    quantise,
)
from membudget.adapters.in_backward import optimizer_in_backward
from membudget.adapters.lora import LoRA, adapt, check_trained, train_only

__all__ = [
    "BLOCK",
    "GROUP",
    "NF4",
    "FourBits",
    "LoRA",
    "Quantised4",
    "adapt",
    "bits_per_weight",
    "check_trained",
    "optimizer_in_backward",
    "quantise",
    "train_only",
]
