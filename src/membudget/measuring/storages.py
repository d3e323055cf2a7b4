"""The storages behind tensors."""

import torch
from torch import nn

from membudget.checks import stepper
from membudget.internals import without_modes

_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def tensors(tree: object) -> list[torch.Tensor]:
    """Tensors in lists, tuples and dictionaries, nested or not."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return found
    for item in tree:
        found += tensors(item)
    return found


def module_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that a module holds: its parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer holds: its states."""
    return tensors(list(stepper(optimizer).state.values()))


def storages(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages behind a tensor; two or more for sparse and wrapped.

    Raises:
        NotImplementedError: a layout without storages (``mkldnn``).
    """
    if is_wrapper(type(tensor)):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
    elif tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    elif tensor.layout in _PARTS:
        with without_modes():
            parts = [getattr(tensor, name)() for name in _PARTS[tensor.layout]]
    else:
        raise NotImplementedError(
            f"cannot count a tensor with the layout {tensor.layout}: use "
            "strided (to_dense) or sparse tensors"
        )
    # A DTensor names its mesh, too.
    return [s for part in tensors(parts) for s in storages(part)]


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class hold others, as DTensor does."""
    return hasattr(kind, "__tensor_flatten__")
