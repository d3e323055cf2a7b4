"""Adapters: train less of a model, and see what its step still keeps."""

from membudget.adapters.lora import LoRA, adapt, train_only

__all__ = ["LoRA", "adapt", "train_only"]
