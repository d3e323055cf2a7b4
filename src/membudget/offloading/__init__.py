"""Offloading: what a step keeps waits in another memory."""

from membudget.offloading.offload import Offload
from membudget.offloading.optimizer import optimizer_on_host
from membudget.offloading.places import FileMemory, HostMemory

__all__ = ["FileMemory", "HostMemory", "Offload", "optimizer_on_host"]
