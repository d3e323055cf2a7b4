"""Real data that needs no download."""

import torch


def digits(
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The 1 797 handwritten digits that ship inside scikit-learn.

    Returns:
        Images, 1 797 × 64, from 0 to 1 in steps of 1/16; labels 0 to 9.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.as_tensor(bunch.data, dtype=dtype) / 16
    return images, torch.as_tensor(bunch.target, dtype=torch.int64)


def text() -> torch.Tensor:
    """Bytes of the help topics that ship inside Python, one long tensor.

    English prose about Python, about 700 000 bytes. The wording changes a
    little between versions of Python.

    Returns:
        Integers 0 to 255, one dimension.
    """
    from pydoc_data.topics import topics

    joined = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(joined.encode()), dtype=torch.int64)
