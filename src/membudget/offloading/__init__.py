"""Offloading: what a step keeps waits in another memory."""

from membudget.offloading.law import (
    BUSY,
    CHECKPOINT,
    FULL,
    MACHINES,
    TAPE,
    Block,
    Lanes,
    Piece,
    forward_flops,
    gpt_block,
    lanes,
    least_width,
    sustained,
)
from membudget.offloading.offload import Offload
from membudget.offloading.optimizer import optimizer_on_host
from membudget.offloading.places import FileMemory, HostMemory

__all__ = [
    "BUSY",
    "CHECKPOINT",
    "FULL",
    "MACHINES",
    "TAPE",
    "Block",
    "FileMemory",
    "HostMemory",
    "Lanes",
    "Offload",
    "Piece",
    "forward_flops",
    "gpt_block",
    "lanes",
    "least_width",
    "optimizer_on_host",
    "sustained",
]
