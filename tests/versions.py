"""Where versions of PyTorch really differ, and a test has to know it."""

from typing import NamedTuple

import torch
from packaging.specifiers import SpecifierSet


class Difference(NamedTuple):
    """What only some of the tested versions do.

    Attributes:
        place: the file of the tests that ask for it.
        versions: which do it, as in a requirements file.
        what: what they do.
        why: the reason, and what the package makes of it.
    """

    place: str
    versions: str
    what: str
    why: str


DIFFERENT = {
    "e4m3 has an overflow": Difference(
        place="precision/test_formats.py",
        versions="<2.13",
        what="a cast of more than 464 to float8_e4m3fn is NaN and not 448",
        why=(
            "Both are allowed by the format. PyTorch has changed its mind "
            "(pull request 178817); Format.round stops at 448 everywhere, "
            "and its docstring and chapter 6 name both."
        ),
    ),
    "rms_norm is on no list": Difference(
        place="precision/test_casting.py",
        versions="<2.12",
        what="autocast on CUDA runs rms_norm in what it is given",
        why="It came to CUDA's list in 2.12; LISTS asks the dispatcher.",
    ),
    "Adam cannot step on meta": Difference(
        place="measuring/test_step.py",
        versions="<2.13",
        what="Adam's count of steps is on meta, too, and has no value there",
        why=(
            "Models on meta are counted from their first step on (dry_run); "
            "PyTorch itself could not take an earlier one."
        ),
    ),
    "tied weights go on untied": Difference(
        place="sharding/test_shards.py",
        versions="<2.12",
        what="fully_shard takes a weight that two units share, and unties it",
        why="Later versions refuse it; units_of and shard do in all.",
    ),
    "gradients of norms stay in fp32": Difference(
        place="experiments/test_sharding.py",
        versions=">=2.15",
        what=(
            "under fully_shard with bf16 parameters and fp32 reduced, a "
            "gradient that comes in fp32 is not cast to bf16 in between"
        ),
        why=(
            "PyTorch keeps what autograd computed. The experiment knows whole "
            "gradients by their size in bf16, and counts these among the "
            "temporaries; the peak is right."
        ),
    ),
}


def here(name: str) -> bool:
    """Whether this PyTorch differs in that way."""
    versions = SpecifierSet(DIFFERENT[name].versions)
    return versions.contains(str(torch.__version__), prereleases=True)
