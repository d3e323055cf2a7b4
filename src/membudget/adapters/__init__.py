"""Adapters: train less of a model, or keep less while you train it."""

from membudget.adapters.in_backward import optimizer_in_backward

__all__ = ["optimizer_in_backward"]
