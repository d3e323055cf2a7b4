"""Parallelism: a layer, a sequence or a network over several ranks."""

from membudget.parallelism.pipeline import cut

__all__ = ["cut"]
