"""Chains and settings for the tests of the segment-count widget."""

import random
from itertools import islice, product

import kind_segments

from membudget.checkpointing import Stage
from membudget.widgets import Segments
from membudget.widgets.segments import SPLITS
from tests.soak import SOAK

UNIFORM = (
    *product((1, 2, 3, 5, 8, 16), (0.05, 0.25, 0.6, 1.0)),
    (23, 0.35),
)
LARGE = (0, 7, 10, 99, 100)


def random_stage(rng):
    """A stage, all of whose fields are drawn."""
    output = rng.choice([0, rng.randrange(1, 4000)])
    return Stage(
        output=output,
        inner=rng.choice([0, rng.randrange(5000)]),
        holds_input=rng.random() < 0.6,
        holds_output=rng.random() < 0.6,
        forward_workspace=rng.randrange(500),
        record_workspace=rng.randrange(500),
        recompute_workspace=rng.randrange(-output, 500),
        backward_workspace=rng.randrange(4000),
        again_workspace=rng.choice([None, rng.randrange(4000)]),
        gradients=rng.choice([0, rng.randrange(900)]),
        gradient=rng.choice([None, 0, rng.randrange(4000)]),
    )


def chains(count=48 if SOAK else 24):
    """Random chains, of 1 to 12 stages."""
    rng = random.Random(0)
    return [
        [random_stage(rng) for _ in range(1 + i % 12)] for i in range(count)
    ]


def widgets():
    """Widgets in their settings, over all numbers of segments."""
    rng = random.Random(1)
    widget = Segments()
    for (layers, checkpoint), split in product(UNIFORM, SPLITS):
        widget.set_trait("layers", layers)
        widget.checkpoint = checkpoint
        widget.split = split
        widget.measured = {0: layers + 0.125, layers: rng.randrange(9)}
        for widget.segments in range(layers + 1):
            yield widget
    widget.layers = 100
    for widget.split, widget.segments in product(SPLITS, LARGE):
        yield widget
    for chain, split in product(chains(), SPLITS):
        widget = Segments(chain, segments=0, split=split)
        widget.measured = {len(chain): rng.randrange(10**6)}
        for widget.segments in range(len(chain) + 1):
            yield widget
        if len(chain) > 3:
            widget.cuts = sorted(rng.sample(range(1, len(chain)), 3))
            yield widget
        widget.close()


def cases():
    """Each fifth with the numbers of the package."""
    for widget in islice(widgets(), 0, None, 1 if SOAK else 5):
        yield {
            "state": widget.state(),
            "numbers": kind_segments.printed(widget),
        }
