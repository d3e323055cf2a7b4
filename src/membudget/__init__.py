"""The package behind *The Memory Budget*: one room per subject."""

__version__ = "0.1.0"


def setup(seed: int = 0) -> None:
    """Prepare a notebook: seed, one CPU thread, the course's figure style.

    One thread because the order of a parallel sum, and with it the last bits
    of a result, depends on the number of cores; the sizes used on a CPU are
    small enough not to miss the others.

    Args:
        seed: seed of PyTorch's generators, on every device.
    """
    import torch

    from membudget import plotting

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    plotting.use_style()
