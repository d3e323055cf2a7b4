"""The sizes of the experiments: what each is run with.

The standard library only: the book reads this file without torch. A product
or a range stands here once; a size of an experiment is a dictionary for JSON.
"""

from collections.abc import Iterable
from itertools import product


def rows(*columns: Iterable) -> list[list]:
    """Every combination of the columns' values, the last column fastest."""
    return [list(row) for row in product(*columns)]


def doubling(first: int, last: int) -> list[int]:
    """``first``, twice that, and so on to ``last``."""
    values = [first]
    while values[-1] < last:
        values.append(2 * values[-1])
    return values


MLP = dict(inputs=64, width=256, depth=4, outputs=10)
GPT_124M = dict(vocabulary=24576, context=1024, width=768, depth=12, heads=12)


# Accumulation --------------------------------------------------------------

MICRO_BATCH = dict(
    tiny=dict(
        model="mlp",
        shape=MLP,
        window=1024,
        micro_batches=doubling(16, 1024),
        warm_up=1,
        repeats=7,
    ),
    t4=dict(
        model="gpt",
        shape=GPT_124M,
        window=16,
        micro_batches=doubling(1, 8),
        warm_up=0,
        repeats=3,
    ),
    large=dict(
        model="gpt",
        shape=GPT_124M,
        window=256,
        micro_batches=[1, 2, 4, 16, 64],
        warm_up=0,
        repeats=3,
    ),
)


# Checkpointing -------------------------------------------------------------

_BYTES_TINY = dict(vocabulary=256, context=64, width=64, depth=4, heads=4)
_BYTES = dict(vocabulary=256, context=1024, width=768, depth=12, heads=12)

SEGMENTS_UNITS = dict(
    batch="samples",
    count="segments, 0 for no checkpointing",
    seconds="s for a step, each repeat",
    requested="bytes, peak of a step",
    allocated="bytes, peak of a step",
    reserved="bytes, peak of a step",
    workspace="bytes that libraries hold in the allocator",
)


def _chain(large: int) -> dict:
    """A deep MLP with 32 samples and with many."""
    return dict(
        model="chain",
        shape=dict(width=1024, depth=20),
        runs=rows([32], [0, 1, 2, 4, 5, 10, 20])
        + rows([large], [0, 1, 2, 3, 4, 5, 7, 10, 20]),
        warm_up=2,
        repeats=9,
    )


SEGMENTS_MLP = dict(
    tiny=dict(
        model="chain",
        shape=dict(width=64, depth=16),
        runs=rows([32], [0, 4]) + rows([1024], [0, 1, 2, 3, 4, 5, 8, 16]),
        warm_up=3,
        repeats=41,
    ),
    t4=_chain(16384),
    large=_chain(262144),
)


def _blocks(batch: int) -> dict:
    """The blocks of a GPT."""
    return dict(
        model="gpt",
        shape=_BYTES,
        runs=rows([batch], [0, 1, 2, 3, 4, 6, 8, 12]),
        warm_up=0,
        repeats=3,
    )


SEGMENTS_GPT = dict(
    tiny=dict(
        model="gpt",
        shape=_BYTES_TINY,
        runs=rows([16], range(5)),
        warm_up=2,
        repeats=21,
    ),
    t4=_blocks(12),
    large=_blocks(112),
)


def _within(shape: dict, budget: int) -> dict:
    """A GPT under a budget in bytes."""
    return dict(
        model="gpt",
        shape=shape,
        variants=["none", "root", "each"],
        budget=budget,
        warm_up=0,
        repeats=3,
    )


LARGEST_BATCH = dict(
    tiny=_within(_BYTES_TINY, 32 << 20),
    t4=_within({**_BYTES, "context": 256}, 4 << 30),
    large=_within(_BYTES, 32 << 30),
)

# Offloading ----------------------------------------------------------------


def _offload(shape: dict, batch: int, **counts: int) -> dict:
    """A GPT, offloaded, with each block checkpointed, both, and neither."""
    return dict(
        shape=shape,
        batch=batch,
        variants=["plain", "offloaded", "checkpointed", "both"],
        **counts,
    )


OFFLOAD = dict(
    tiny=_offload(_BYTES_TINY, 16, warm_up=2, repeats=21),
    t4=_offload(_BYTES, 12, warm_up=1, repeats=5),
    large=_offload(
        {**_BYTES, "width": 2048, "heads": 16},
        32,
        warm_up=1,
        repeats=5,
    ),
)


# Schedules -----------------------------------------------------------------


def _frontier(shape: dict, batch: int, budgets: list[int], **counts) -> dict:
    """Twelve blocks, some, all or none of them checkpointed.

    Args:
        budgets: in per cent of the plain peak, below what the others need.
    """
    return dict(
        shape=shape,
        batch=batch,
        runs=rows(["first"], [0, 3, 6, 9, 11, 12])
        + rows(["equal"], [2, 3, 4, 6])
        + rows(["optimal"], budgets),
        **counts,
    )


SCHEDULES_GPT = dict(
    tiny=_frontier(
        {**_BYTES_TINY, "context": 128, "depth": 12},
        16,
        [15, 14, 13],
        warm_up=1,
        repeats=9,
    ),
    t4=_frontier(_BYTES, 12, [15], warm_up=0, repeats=3),
    large=_frontier(_BYTES, 112, [15, 14, 13, 12], warm_up=0, repeats=3),
)


# Planning ------------------------------------------------------------------

_LLAMA_124M = dict(
    family="llama",
    vocabulary=24576,
    width=768,
    depth=12,
    heads=12,
    hidden=2048,
)
PLAN_TIMES = dict(
    tiny=dict(
        shape=dict(
            family="llama",
            vocabulary=256,
            width=192,
            depth=6,
            heads=3,
            hidden=512,
            tied=True,
        ),
        tokens=128,
        batch=16,
        runs=rows([16, 8, 4, 2, 1], [0, 2, 4, 6], [0, 4]),
        warm_up=1,
        repeats=9,
    ),
    t4=dict(
        shape=_LLAMA_124M,
        tokens=1024,
        batch=8,
        runs=rows([4, 2, 1], [0, 6, 12], [0, 8]),
        warm_up=1,
        repeats=5,
    ),
    large=dict(
        shape=_LLAMA_124M,
        tokens=1024,
        batch=64,
        runs=rows([32, 16, 8, 4, 2, 1], [0, 6, 12], [0, 8]),
        warm_up=1,
        repeats=5,
    ),
)


KINDS_OF_MODELS = ["gpt", "llama", "transformers", "mlp", "convnet"]
_QUESTIONS = dict(
    batch=128,
    questions=rows(KINDS_OF_MODELS, range(20)),
    warm_up=0,
    repeats=2,
)
BATCH_QUESTIONS = dict(
    tiny=dict(scale=1, **_QUESTIONS),
    t4=dict(scale=8, **_QUESTIONS),
    large=dict(scale=16, **_QUESTIONS),
)


# A vision-language-action policy -------------------------------------------

_POLICIES = dict(
    runs=["whole", "accumulated", "random", "nearest neighbour"],
    episodes=200,
    replayed=8,
    warm_up=0,
    repeats=1,
)
VLA_POLICY = dict(
    tiny=dict(
        shape=dict(width=64, depth=3, heads=4, patch=16),
        batch=64,
        limit=8 * 2**20,
        steps=6000,
        rate=2e-3,
        neighbours=4096,
        **_POLICIES,
    ),
    t4=dict(
        shape=dict(width=128, depth=4, heads=4, patch=8),
        batch=256,
        limit=96 * 2**20,
        steps=6000,
        rate=1e-3,
        neighbours=16384,
        **_POLICIES,
    ),
    large=dict(
        shape=dict(width=384, depth=6, heads=6, patch=8),
        batch=1024,
        limit=2**30,
        steps=3000,
        rate=5e-4,
        neighbours=16384,
        **_POLICIES,
    ),
)


# Ledger --------------------------------------------------------------------

_METHODS = (
    "plain",
    "accumulated",
    "checkpointed",
    "autocast",
    "16-bit",
    "combined",
)


def _step_peaks(
    mlp: dict,
    convnet: dict,
    gpt: dict,
    llama: dict,
    half: str,
    batches: dict[str, list[int]],
) -> dict:
    """Five networks, each with its batches by every method.

    Args:
        mlp, convnet, gpt, llama: the models' arguments, and the ``side`` of
            pictures. Sequences are as long as the context of the GPT.
        half: the 16-bit dtype.
        batches: of each network, in samples or sequences.
    """
    tokens = gpt["context"]
    unfused = dict(fused=False, dropout=True)
    return dict(
        networks={
            "mlp": dict(model="mlp", **mlp),
            "convnet": dict(model="convnet", **convnet),
            "gpt": dict(model="gpt", **gpt, tied=True, tokens=tokens),
            "gpt-unfused": dict(model="gpt", **gpt, **unfused, tokens=tokens),
            "llama": dict(model="llama", **llama, tokens=tokens),
        },
        half=half,
        runs=[
            [network, method, batch]
            for network, values in batches.items()
            for batch in values
            for method in _METHODS
        ],
        warm_up=1,
        repeats=1,
    )


STEP_PEAKS = dict(
    tiny=_step_peaks(
        mlp=dict(inputs=64, width=128, depth=5, outputs=10),
        convnet=dict(channels=[8, 16], side=16),
        gpt=dict(vocabulary=256, width=32, depth=2, heads=4, context=32),
        llama=dict(
            vocabulary=256, width=32, depth=2, heads=4, kv_heads=2, hidden=88
        ),
        half="bfloat16",
        batches={
            "mlp": [64, 1024],
            "convnet": [8, 64],
            "gpt": [16],
            "gpt-unfused": [8],
            "llama": [4, 16],
        },
    ),
    t4=_step_peaks(
        mlp=dict(inputs=1024, width=2048, depth=17, outputs=1000),
        convnet=dict(channels=[64, 128, 256, 512], side=64),
        gpt=dict(vocabulary=16384, width=768, depth=6, heads=12, context=512),
        llama=dict(
            vocabulary=16384,
            width=768,
            depth=6,
            heads=12,
            kv_heads=4,
            hidden=2048,
        ),
        half="float16",
        batches={
            "mlp": [4096, 16384],
            "convnet": [128, 512],
            "gpt": [12],
            "gpt-unfused": [4],
            "llama": [4, 8],
        },
    ),
    large=_step_peaks(
        mlp=dict(inputs=1024, width=4096, depth=17, outputs=1000),
        convnet=dict(channels=[64, 128, 256, 512], side=128),
        gpt=dict(
            vocabulary=50257, width=1600, depth=12, heads=25, context=1024
        ),
        llama=dict(
            vocabulary=128256,
            width=2048,
            depth=8,
            heads=32,
            kv_heads=8,
            hidden=8192,
            tied=True,
        ),
        half="bfloat16",
        batches={
            "mlp": [16384, 98304],
            "convnet": [512, 1536],
            "gpt": [16],
            "gpt-unfused": [4],
            "llama": [4, 8],
        },
    ),
)


# Precision -----------------------------------------------------------------

_SCENARIOS = {
    "plain": ("fp32", "tf32"),
    "autocast": ("bf16", "fp16"),
    "checkpointed": ("fp32", "tf32"),
    "both": ("bf16", "fp16"),
}


def _mixed(mlp: dict, gpt: dict, **counts: float) -> dict:
    """Two networks by every scenario in its formats."""
    return dict(
        networks=dict(
            mlp=dict(model="mlp_blocks", **mlp), gpt=dict(model="gpt", **gpt)
        ),
        runs=[
            [network, scenario, format]
            for network in ("mlp", "gpt")
            for scenario, formats in _SCENARIOS.items()
            for format in formats
        ],
        **counts,
    )


_GPT2 = dict(vocabulary=50257, width=768, depth=12, heads=12, context=1024)
MIXED_PRECISION = dict(
    tiny=_mixed(
        mlp=dict(width=64, depth=4, batch=1024),
        gpt=dict(
            vocabulary=256, width=64, depth=4, heads=4, context=64, batch=16
        ),
        steps=12,
        rate=0.001,
        warm_up=1,
        repeats=5,
    ),
    t4=_mixed(
        mlp=dict(width=1024, depth=32, batch=4096),
        gpt=dict(**_GPT2, batch=4),
        steps=8,
        rate=0.0001,
        warm_up=1,
        repeats=3,
    ),
    large=_mixed(
        mlp=dict(width=1024, depth=32, batch=16384),
        gpt=dict(**_GPT2, batch=32),
        steps=10,
        rate=0.0001,
        warm_up=1,
        repeats=7,
    ),
)


def _accumulated(width: int, depth: int) -> dict:
    """Fresh micro-batches, and the same one four times as often."""
    return dict(
        shape=dict(width=width, depth=depth),
        size=8,
        runs=rows(["fresh"], doubling(1, 256))
        + rows(["same"], doubling(1, 1024)),
        warm_up=0,
        repeats=1,
    )


BF16_ACCUMULATION = dict(
    tiny=_accumulated(64, 4),
    t4=_accumulated(256, 8),
    large=_accumulated(1024, 8),
)


# Sharding ------------------------------------------------------------------

_LLAMAS = {
    "tiny": dict(
        vocabulary=512, width=64, depth=2, heads=4, kv_heads=2, hidden=172
    ),
    "7B": dict(
        vocabulary=32000,
        width=4096,
        depth=32,
        heads=32,
        kv_heads=32,
        hidden=11008,
    ),
    "70B": dict(
        vocabulary=32000,
        width=8192,
        depth=80,
        heads=64,
        kv_heads=8,
        hidden=28672,
    ),
}


def _simulated(names: list[str], tokens: int, ranks: list[int]) -> dict:
    """Llamas on each number of ranks, with one sequence."""
    return dict(
        models={name: _LLAMAS[name] for name in names},
        batch=[1, tokens],
        runs=rows(names, ranks),
        warm_up=0,
        repeats=1,
    )


SHARDED_RANKS = dict(
    tiny=_simulated(["tiny"], 128, [2, 4, 64]),
    t4=_simulated(["7B"], 2048, [8, 64, 1024]),
    large=_simulated(["7B", "70B"], 2048, [8, 64, 1024]),
)
