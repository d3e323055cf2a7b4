"""Offloading: what a step keeps waits in another memory."""

from membudget.offloading.offload import Offload
from membudget.offloading.places import FileMemory, HostMemory

__all__ = ["FileMemory", "HostMemory", "Offload"]
