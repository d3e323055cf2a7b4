"""Parallelism: a layer, a sequence or a network over several ranks."""

__all__: list[str] = []
