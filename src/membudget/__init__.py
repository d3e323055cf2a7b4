"""The package behind *The Memory Budget*: one room per subject.

Every public function and class refuses a wrong argument with a TypeError or
ValueError that says what was wrong and what is allowed. Docstrings name the
errors that come besides.
"""

__version__ = "0.2.0"
TORCH = "2.11", "2.15"
"""The oldest and the newest PyTorch that everything is tested with."""


def setup(seed: int = 0) -> None:
    """Prepare a notebook: seed, one CPU thread, the course's figure style.

    One thread because the order of a parallel sum, and with it the last bits
    of a result, depends on the number of cores; the sizes used on a CPU are
    small enough not to miss the others.

    Args:
        seed: seed of PyTorch's generators, on every device.

    Warns:
        UserWarning: PyTorch is not of :data:`TORCH`, or this package has been
            replaced by another version since it was imported.
    """
    import warnings
    from pathlib import Path

    import torch

    from membudget import plotting

    version, oldest, newest = (
        [int(number) for number in text.split(".")[:2]]
        for text in (torch.__version__, *TORCH)
    )
    if not oldest <= version <= newest:
        warnings.warn(
            f"The course is tested with torch {TORCH[0]} to {TORCH[1]}, and "
            f"with torch {torch.__version__} numbers may differ.",
            stacklevel=2,
        )
    if f'"{__version__}"' not in Path(__file__).read_text("utf-8"):
        warnings.warn(
            f"membudget {__version__} is running, and another version has "
            "been installed: restart the kernel.",
            stacklevel=2,
        )
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    plotting.use_style()
