"""Bytes that autograd keeps for the backward pass."""

import torch


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Count the bytes autograd saves for backward inside the block.

    Each storage counts once, however many operators saved it. A tensor saved
    by an operator is held by the graph until backward has used it.

    Args:
        *exclude: tensors that are alive anyway and are not to be counted
            (parameters, the batch).

    Attributes:
        total: bytes saved so far.

    Example:
        >>> with SavedBytes(*model.parameters(), x) as saved:
        ...     loss = model(x).sum()
        >>> saved.total

    The graph has to stay alive until ``total`` is read: a storage that is
    freed inside the block may hand its identity to a new one. Entered inside
    a function that runs under ``torch.utils.checkpoint``, hooks switch the
    checkpointing off; enter it outside.
    """

    def __init__(self, *exclude: torch.Tensor) -> None:
        self.total = 0
        self._seen = {t.untyped_storage()._cdata for t in exclude}
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedBytes":
        super().__enter__()
        return self

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.total += storage.nbytes()
        # Detached: a graph that holds its own output would never be freed.
        return tensor.detach()
