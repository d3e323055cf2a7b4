"""Real data that needs no download."""

import torch

from membudget.checks import installed, instance
from membudget.stories import Stories


def digits(
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The 1 797 handwritten digits that ship inside scikit-learn.

    Args:
        dtype: of the images, with fractions.

    Returns:
        Images, 1 797 × 64, from 0 to 1 in steps of 1/16; labels 0 to 9.
    """
    use = "a torch.dtype with fractions"
    if not instance(dtype, torch.dtype, "dtype", use).is_floating_point:
        raise ValueError(f"dtype is {dtype}: use {use}")
    bunch = installed("sklearn.datasets", "data.digits").load_digits()
    images = torch.as_tensor(bunch.data, dtype=dtype) / 16
    return images, torch.as_tensor(bunch.target, dtype=torch.int64)


def text() -> torch.Tensor:
    """Bytes of stories that a grammar makes, half a million, one long tensor.

    The same on every machine and under every version of Python.

    Returns:
        2¹⁹ integers from 0 to 127, one dimension.
    """
    stories, size, found = Stories(seed=0), 2**19, ""
    while len(found) < size:
        found += stories.story() + "\n\n"
    return torch.tensor(list(found[:size].encode()), dtype=torch.int64)
