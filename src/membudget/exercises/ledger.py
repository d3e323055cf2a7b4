"""The exercises on the ledger: bytes predicted before they are measured."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from math import ceil, floor, inf, prod

import torch
import torch.nn.functional as F
from torch import nn

from membudget import ledger
from membudget.exercises.compare import Seen
from membudget.exercises.core_old import (
    Case,
    Exercise,
    variants,
)
from membudget.exercises.observe import answer
from membudget.ledger import Transformer
from membudget.measuring import SavedBytes
from membudget.models import Llama

EXACT = 1e-12
"""Relative tolerance of bytes: none."""


def _given(told: str = "", **arguments: object) -> Case:
    """Arguments by name; ``told`` stands for them where they are long."""
    words = [f"{name} = {value}" for name, value in arguments.items()]
    return Case(
        told or ", ".join(words),
        lambda: tuple(copy.deepcopy(list(arguments.values()))),
    )


# Parameters, gradients, optimizer states

Flags = Sequence[bool]
Shapes = Sequence[tuple[int, ...]]


def _measured_states(shapes: Shapes, trained: Flags) -> tuple[int, int, int]:
    """Bytes after a step of the real AdamW."""
    parameters = [
        nn.Parameter(torch.zeros(shape), learns)
        for shape, learns in zip(shapes, trained, strict=True)
    ]
    learning = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(learning)
    for p in learning:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    kept = [t for state in optimizer.state.values() for t in state.values()]
    return (
        sum(p.nbytes for p in parameters),
        sum(p.grad.nbytes for p in learning),
        sum(t.nbytes for t in kept),
    )


def _all(shapes: Shapes, trained: Flags) -> Shapes:
    return shapes


def _trained(shapes: Shapes, trained: Flags) -> Shapes:
    return [s for s, learns in zip(shapes, trained, strict=True) if learns]


Chosen = Callable[[Shapes, Flags], Shapes]


def _model_states(
    shapes: Shapes,
    trained: Flags,
    there: Chosen = _all,
    graded: Chosen = _trained,
    kept: Chosen = _trained,
    counted: Chosen = _trained,
    number: int = 4,
    gradient: int = 4,
    state: int = 8,
    counter: int = 4,
    size: Callable[[tuple], int] = prod,
) -> tuple[int, int, int]:
    """Parameters, gradients and optimizer states, in bytes.

    Args:
        shapes, trained: of the exercise.
        there, graded, kept, counted: which tensors are parameters, have a
            gradient, have states, and have a counter.
        number, gradient, state, counter: bytes of each.
        size: numbers in a tensor of a shape.
    """

    def total(chosen: Chosen) -> int:
        return sum(map(size, chosen(shapes, trained)))

    counters = counter * len(counted(shapes, trained))
    return (
        number * total(there),
        gradient * total(graded),
        state * total(kept) + counters,
    )


FROZEN = (
    "a frozen parameter is there, but it has neither a gradient nor "
    "optimizer states."
)

check_model_states = Exercise(
    signature="model_states(shapes, trained)",
    cases=[
        _given(
            shapes=[(50, 16), (64, 16), (64,), (64,)],
            trained=[False, True, True, True],
        ),
        _given(shapes=[(3, 5, 7), (5,)], trained=[True, True]),
        _given(
            shapes=[(16, 3, 3, 3), (16,), (16,), (40, 16), ()],
            trained=[True, True, False, True, True],
        ),
    ],
    observe=answer,
    solution=_measured_states,
    mistakes=[
        (
            "this is the rule of 16 bytes for every parameter. Frozen "
            "parameters need 4 of them, and Adam counts its steps besides.",
            partial(_model_states, graded=_all, kept=_all, counter=0),
        ),
        (
            FROZEN,
            partial(_model_states, graded=_all, kept=_all, counted=_all),
        ),
        *variants(
            _model_states,
            [
                (
                    "Adam's counters are missing: it counts the steps of "
                    "each trained tensor, in 4 bytes.",
                    {"counter": 0},
                ),
                (
                    "Adam has not one counter for the whole model, but one "
                    "of 4 bytes for each trained tensor.",
                    {"counted": lambda shapes, trained: [()]},
                ),
                (
                    "a frozen tensor has no counter: AdamW keeps nothing for "
                    "it.",
                    {"counted": _all},
                ),
                (
                    "a counter is one fp32 number for each trained tensor: 4 "
                    "bytes, not 8.",
                    {"counter": 8},
                ),
                (FROZEN, {"graded": _all}),
                (FROZEN, {"kept": _all}),
                (FROZEN, {"kept": _all, "counted": _all}),
                (
                    "frozen parameters are parameters too: the forward pass "
                    "needs them.",
                    {"there": _trained},
                ),
                (
                    "Adam keeps two numbers for each trained parameter, the "
                    "means of the gradient and of its square: 8 bytes.",
                    {"state": 4},
                ),
                (
                    "12 bytes for Adam are those of a recipe with an fp32 "
                    "copy. Here the parameters are fp32 already: 8.",
                    {"state": 12},
                ),
                (
                    "16 bytes are parameter, gradient and states together: "
                    "the optimizer's share is 8.",
                    {"state": 16},
                ),
                (
                    "a gradient is one fp32 number for each trained "
                    "parameter: 4 bytes, not 8.",
                    {"gradient": 8},
                ),
                (
                    "these are numbers, not bytes: in fp32 each takes 4.",
                    {"number": 1, "gradient": 1, "state": 2, "counter": 1},
                ),
                (
                    "a tensor holds the product of its dimensions, not their "
                    "sum.",
                    {"size": sum},
                ),
            ],
        ),
    ],
    shown=(
        "That is what the real AdamW has after its first step, to the byte: "
        "16 bytes for a trained parameter, 4 for a frozen one, and 4 for "
        "each trained tensor."
    ),
    tolerance=EXACT,
)


# Parameters of a Llama


@cache
def _built_llama(*sizes: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Llama(*sizes).parameters())


def _llama_parameters(
    vocabulary: int,
    width: int,
    depth: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    tables: int = 2,
    square: int = 2,
    narrow: int = 2,
    shared: Callable[[int, int, int], int] = lambda d, a, k: d // a * k,
    mlp: int = 3,
    norms: int = 2,
    norm: int = 1,
    last: int = 1,
    biases: int = 0,
    number: int = 1,
) -> int:
    """The parameters by formula.

    Args:
        vocabulary, width, depth, heads, kv_heads, hidden: of the exercise.
        tables: matrices of vocabulary × width.
        square: matrices of width × width in a block.
        narrow: matrices of width × the width of keys.
        shared: the width of keys, from width, heads and kv_heads.
        mlp: matrices of width × hidden.
        norms: in a block.
        norm: vectors in a norm.
        last: norms after the blocks.
        biases: whether linear layers in blocks have one.
        number: what a parameter counts.
    """
    keys = shared(width, heads, kv_heads)
    block = square * width * width + narrow * width * keys
    block += mlp * width * hidden + norms * norm * width
    block += biases * (3 * width + 2 * keys + 2 * hidden)
    after = last * norm * width
    return number * (tables * vocabulary * width + depth * block + after)


check_llama_parameters = Exercise(
    signature=(
        "llama_parameters(vocabulary, width, depth, heads, kv_heads, hidden)"
    ),
    cases=[
        _given(
            vocabulary=1000,
            width=96,
            depth=5,
            heads=12,
            kv_heads=4,
            hidden=250,
        ),
        _given(
            vocabulary=128_256,
            width=4096,
            depth=32,
            heads=32,
            kv_heads=8,
            hidden=14_336,
        ),
        _given(
            vocabulary=50,
            width=24,
            depth=1,
            heads=6,
            kv_heads=6,
            hidden=40,
        ),
    ],
    observe=answer,
    solution=_built_llama,
    mistakes=variants(
        _llama_parameters,
        [
            (
                "keys and values are narrower than queries: they have "
                "`kv_heads` heads of width / heads numbers, so their "
                "matrices are not square.",
                {"shared": lambda d, a, k: d},
            ),
            (
                "the width of the keys is that of one head, width / heads, "
                "times `kv_heads`.",
                {"shared": lambda d, a, k: d // k},
            ),
            (
                "this is one head of keys and one of values: there are "
                "`kv_heads` of each.",
                {"shared": lambda d, a, k: d // a},
            ),
            (
                "keys and values have a matrix each: two.",
                {"narrow": 1},
            ),
            (
                "attention ends with a linear layer, width × width, besides "
                "that of the queries.",
                {"square": 1},
            ),
            (
                "the gated MLP has three matrices: gate, up and down.",
                {"mlp": 2},
            ),
            (
                "the norms of the blocks are missing: two for each, of "
                "`width` numbers.",
                {"norms": 0},
            ),
            (
                "a block has two norms: before attention and before the MLP.",
                {"norms": 1},
            ),
            (
                "the norm after the last block is missing: `width` numbers.",
                {"last": 0},
            ),
            (
                "a norm counts twice here. RMSNorm has a weight and no bias: "
                "`width` numbers.",
                {"norm": 2},
            ),
            (
                "the head is not tied to the token embedding: each has "
                "vocabulary × width parameters.",
                {"tables": 1},
            ),
            (
                "the token embedding and the head are missing, vocabulary × "
                "width each.",
                {"tables": 0},
            ),
            (
                "biases are counted: a Llama's linear layers have none.",
                {"biases": 1},
            ),
            (
                "these are bytes: the number of parameters is asked.",
                {"number": 4},
            ),
            (
                "these are bytes: the number of parameters is asked.",
                {"number": 2},
            ),
        ],
    ),
    shown=(
        "As many as the model on `meta` has. The second case is Llama 3 8B: "
        "8030261248 parameters. Grouped keys and values spare it 805306368."
    ),
    tolerance=EXACT,
)


# What a chain saves

LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "relu": lambda width: nn.ReLU(),
    "gelu": lambda width: nn.GELU(),
    "layernorm": nn.LayerNorm,
    "tanh": lambda width: nn.Tanh(),
}
CHAINS = (
    ("linear", "relu", "linear"),
    ("linear", "gelu", "linear"),
    ("linear", "tanh", "linear"),
    ("linear", "tanh"),
    ("relu", "linear"),
    ("linear", "layernorm", "linear", "relu", "gelu", "tanh"),
)


def _measured_saved(layers: Sequence[str], rows: int, width: int) -> int:
    model = nn.Sequential(*[LAYERS[word](width) for word in layers])
    x = torch.zeros(rows, width, requires_grad=True)
    with SavedBytes(model, x) as saved:
        output = model(x)
    del output
    return saved.total


def _needs(
    layers: Sequence[str], of: Mapping[str, int] | None = None
) -> list[int]:
    """The boundary that each layer saves; boundary k is read by layer k.

    Args:
        layers: words.
        of: 0 for a layer that saves its input, 1 for its output, where that
            is not right.
    """
    right = {"relu": 1, "tanh": 1, **(of or {})}
    return [k + right.get(layer, 0) for k, layer in enumerate(layers)]


def _saved_bytes(
    layers: Sequence[str],
    rows: int,
    width: int,
    of: Mapping[str, int] | None = None,
    each: Callable[[Iterable[int]], Iterable[int]] = set,
    first: int = 1,
    cut: int = 0,
    stats: int = 2,
    number: int = 4,
    boundaries: Callable[[int], Iterable[int]] | None = None,
) -> int:
    """The bytes by formula.

    Args:
        layers, rows, width: of the exercise.
        of: as for :func:`_needs`.
        each: ``set`` to count a tensor once.
        first: the first boundary that counts.
        cut: boundaries at the end that do not count.
        stats: numbers of a layernorm for each row.
        number: bytes of a number.
        boundaries: those that are saved, from the number of layers, where
            it is not those that layers need.
    """
    end = len(layers) + 1 - cut
    kept = boundaries(len(layers)) if boundaries else each(_needs(layers, of))
    held = sum(first <= k < end for k in kept)
    norms = layers.count("layernorm")
    return number * rows * (held * width + stats * norms)


def _every(count: int) -> range:
    return range(count + 1)


def _chains(fn: Callable, args: tuple) -> Seen:
    """The answers of a function for several chains."""
    chains, *rest = args
    parts = {}
    for layers in chains:
        name = f"answer for {layers}".replace("'", '"')
        seen = answer(fn, (layers, *rest))
        if not seen.parts:
            return seen
        parts[name] = seen.parts["answer"]
    return Seen(parts)


def _of_chains(rows: int, width: int, *chains: Sequence[str]) -> Case:
    return _given(
        f"{len(chains)} chains, rows = {rows}, width = {width}",
        chains=list(map(list, chains)),
        rows=rows,
        width=width,
    )


OUTPUT_OF_RELU = (
    "ReLU and tanh save their outputs, from which their derivatives are "
    "computed, and not their inputs."
)
EVERY = (
    "not the output of every layer is saved: only what some layer needs for "
    "its backward pass. Linear layers, GELU and layer norms need their "
    "inputs, ReLU and tanh their outputs."
)

check_saved_bytes = Exercise(
    signature="saved_bytes(layers, rows, width)",
    cases=[
        _of_chains(6, 10, *CHAINS),
        _of_chains(
            3,
            8,
            ["layernorm", "linear", "gelu", "linear", "layernorm"],
            ["relu", "relu", "linear", "tanh", "linear", "relu"],
            ["linear"] * 5,
            ["gelu", "layernorm", "tanh", "gelu", "linear"],
        ),
    ],
    observe=_chains,
    solution=_measured_saved,
    mistakes=[
        *[
            (EVERY, partial(_saved_bytes, boundaries=_every, **change))
            for change in ({}, {"first": 0}, {"stats": 0})
        ],
        (
            "every layer's need is added up, but two layers can need the "
            "same tensor: the output of ReLU is the input of the next "
            "linear layer, and it is saved once.",
            partial(_saved_bytes, each=list),
        ),
        *variants(
            _saved_bytes,
            [
                (
                    "every layer's need is added up, and the chain's input "
                    "with it: a tensor that two layers need counts once, and "
                    "the input does not count.",
                    {"each": list, "first": 0},
                ),
                (
                    "the input of the chain is there anyway, and does not "
                    "count.",
                    {"first": 0},
                ),
                (
                    "GELU is not like ReLU: its derivative needs its input, "
                    "not its output.",
                    {"of": {"gelu": 1}},
                ),
                (OUTPUT_OF_RELU, {"of": {"relu": 0}}),
                (OUTPUT_OF_RELU, {"of": {"tanh": 0}}),
                (OUTPUT_OF_RELU, {"of": {"relu": 0, "tanh": 0}}),
                (
                    "a layer norm saves its input, and two numbers for each "
                    "row.",
                    {"of": {"layernorm": 1}},
                ),
                (
                    "a linear layer saves its input: the gradient of its "
                    "weight is computed from it.",
                    {"of": {"linear": 1}},
                ),
                (
                    "the last layer's output is saved as well, if that "
                    "layer is a ReLU or tanh.",
                    {"cut": 1},
                ),
                (
                    "a layer norm's two numbers for each row are missing: "
                    "mean and 1/deviation.",
                    {"stats": 0},
                ),
                (
                    "a layer norm saves two numbers for each row: mean and "
                    "1/deviation.",
                    {"stats": 1},
                ),
                (
                    "these are numbers, not bytes: in fp32 each takes 4.",
                    {"number": 1},
                ),
            ],
        ),
    ],
    shown=(
        "That is what autograd saves in the real modules: each tensor once, "
        "whether one layer needs it or two."
    ),
    tolerance=EXACT,
)


# A transformer block


class _GatedBlock(nn.Module):
    """A pre-norm block with fused attention and a gated GELU MLP."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        n = self.norm2(x)
        return x + self.down(F.gelu(self.gate(n)) * self.up(n))


def _measured_block(
    batch: int, tokens: int, width: int, heads: int, hidden: int
) -> int:
    model = _GatedBlock(width, heads, hidden)
    x = torch.zeros(batch, tokens, width, requires_grad=True)
    with SavedBytes(model) as saved:
        output = model(x)
    del output
    return saved.total


def _gated_block(
    batch: int,
    tokens: int,
    width: int,
    heads: int,
    hidden: int,
    wide: int = 8,
    inner: int = 4,
    stats: int = 4,
    sums: int = 1,
    scores: int = 0,
    number: int = 4,
) -> int:
    """The bytes by formula.

    Args:
        batch, tokens, width, heads, hidden: of the exercise.
        wide: tensors of ``width`` numbers for each token.
        inner: tensors of ``hidden`` numbers.
        stats: numbers that the norms save for each token.
        sums: numbers that attention saves for each head of a token.
        scores: matrices of tokens × tokens for each head.
        number: bytes of a number.
    """
    token = wide * width + inner * hidden + stats
    token += heads * (sums + scores * tokens)
    return number * batch * tokens * token


GATED = (
    "the gated MLP saves four tensors of `hidden` numbers for each token: "
    "gate's output (for GELU), GELU's output and up's output (for the "
    "product), and the product (for down)."
)
WIDE = (
    "eight tensors of `width` numbers are saved for each token: the inputs "
    "and outputs of both norms, q, k and v, and attention's output."
)

check_gated_block = Exercise(
    signature="gated_block(batch, tokens, width, heads, hidden)",
    cases=[
        _given(batch=2, tokens=5, width=12, heads=3, hidden=20),
        _given(batch=1, tokens=16, width=32, heads=1, hidden=7),
        _given(batch=3, tokens=1, width=8, heads=8, hidden=33),
    ],
    observe=answer,
    solution=_measured_block,
    mistakes=[
        (
            "16 × width is the block with an MLP of two matrices and 4 × "
            "width numbers between them. Here hidden stands for that width, "
            "and the MLP is gated.",
            partial(_gated_block, wide=16, inner=0),
        ),
        *variants(
            _gated_block,
            [
                (GATED, {"inner": 2}),
                (GATED, {"inner": 3}),
                (GATED, {"inner": 1}),
                (GATED, {"inner": 5}),
                (
                    "fused attention saves one number for each head of a "
                    "token, the logarithm of its softmax's sum.",
                    {"sums": 0},
                ),
                (
                    "each norm saves two numbers for a token, mean and "
                    "1/deviation.",
                    {"stats": 0},
                ),
                (
                    "each of the two norms saves two numbers for a token, "
                    "mean and 1/deviation: four.",
                    {"stats": 2},
                ),
                (
                    "the scores, tokens × tokens for each head, are not "
                    "saved: fused attention computes them again.",
                    {"scores": 1},
                ),
                (
                    "q, k and v are views of one tensor, qkv's output: they "
                    "count once.",
                    {"wide": 11},
                ),
                (
                    "one tensor of `width` numbers for each token is too "
                    f"much: {WIDE} The block's output is the next block's "
                    "input.",
                    {"wide": 9},
                ),
                (f"two tensors are too much: {WIDE}", {"wide": 10}),
                (f"one tensor is missing: {WIDE}", {"wide": 7}),
                (f"two tensors are missing: {WIDE}", {"wide": 6}),
                (f"three tensors are missing: {WIDE}", {"wide": 5}),
                (
                    "these are numbers, not bytes: in fp32 each takes 4.",
                    {"number": 1},
                ),
                (
                    "these are 2 bytes for each number: fp32 takes 4.",
                    {"number": 2},
                ),
            ],
        ),
    ],
    shown="That is what autograd saves in the real block, to the byte.",
    tolerance=EXACT,
)


# The peak as a maximum of lines

Lines = Sequence[tuple[int, int]]
GPT2 = "the lines of GPT-2's shape with 128 tokens"


@cache
def _gpt2_lines() -> tuple[tuple[int, int], ...]:
    """Those of the moments that are the peak at some batch size."""
    shape = Transformer(50257, 768, 12, 12, context=1024)
    sizes = 2, 4, 7
    timelines = [
        [moment.live for moment in ledger.predict(shape, size, 128).moments]
        for size in sizes
    ]
    return tuple(map(tuple, ledger.peak_lines(sizes, timelines)))


def _with_gpt2(**arguments: int) -> Case:
    words = ", ".join(f"{name} = {n}" for name, n in arguments.items())
    return Case(
        f"{GPT2}, {words}",
        lambda: (list(_gpt2_lines()), *arguments.values()),
    )


def _sum_of_lines(lines: Lines, size: int) -> int:
    return sum(constant + slope * size for constant, slope in lines)


def _highest_of_both(lines: Lines, size: int) -> int:
    constants, slopes = zip(*lines, strict=True)
    return max(constants) + max(slopes) * size


Peak = Callable[[Lines, int], int]


def _extrapolate(
    lines: Lines,
    first: int,
    second: int,
    batch: int,
    peak: Peak = ledger.peak_at,
    divided: bool = True,
    start: int = 1,
    through_zero: bool = False,
    whole: bool = False,
    told: Callable[[float, float], object] = lambda line, true: (line, true),
) -> object:
    """What the line through two peaks says, and the peak.

    Args:
        lines, first, second, batch: of the exercise.
        peak: at a size.
        divided: whether the rise is divided by the difference of the sizes.
        start: the line goes on from the second peak (1), or from the first
            as if that were the second's (0).
        through_zero: whether the line goes through zero.
        whole: whether its slope is rounded down.
        told: the result, from what the line says and the peak.
    """
    low, high = peak(lines, first), peak(lines, second)
    slope = (high - low) / (second - first if divided else 1)
    if whole:
        slope //= 1
    line = (low, high)[start] + slope * (batch - second)
    if through_zero:
        line = high * batch / second
    return told(line, peak(lines, batch))


THREE_LINES = [(900, 1), (640, 12), (300, 31)]
BOTH = "two numbers are asked: what the line says, and the peak."

check_extrapolate = Exercise(
    signature="extrapolate(lines, first, second, batch)",
    cases=[
        _given(lines=THREE_LINES, first=2, second=26, batch=100),
        _with_gpt2(first=1, second=2, batch=32),
        _given(lines=THREE_LINES, first=20, second=24, batch=64),
        _given(
            lines=[(300, 31), (10, 50), (900, 1)],
            first=1,
            second=4,
            batch=12,
        ),
    ],
    observe=answer,
    solution=_extrapolate,
    mistakes=variants(
        _extrapolate,
        [
            (BOTH, {"told": lambda line, true: line}),
            (BOTH, {"told": lambda line, true: true}),
            (BOTH, {"told": lambda line, true: true - line}),
            (
                "first what the line says, then the peak.",
                {"told": lambda line, true: (true, line)},
            ),
            (
                "the lines are added up, but they are different moments of "
                "one step: the peak is the largest of them.",
                {"peak": _sum_of_lines},
            ),
            (
                "the largest constant and the largest slope belong to "
                "different lines: take the largest of the sums constant + "
                "slope × batch.",
                {"peak": _highest_of_both},
            ),
            (
                "the peak is the highest line at that batch size, and not "
                "always the steepest.",
                {
                    "peak": lambda lines, size: ledger.peak_at(
                        _steepest(lines), size
                    )
                },
            ),
            (
                "the lines cross: at each batch size the peak is the highest "
                "of them, and not always the same.",
                {"peak": lambda lines, size: ledger.peak_at(lines[:1], size)},
            ),
            (
                "the line rises by the difference of the peaks over second − "
                "first samples, not over one.",
                {"divided": False},
            ),
            (
                "the line goes on from the peak at `second`; or from that at "
                "`first`, but then over batch − first samples.",
                {"start": 0},
            ),
            (
                "this line goes through zero. Parameters and states do not "
                "grow with the batch: draw the line through both peaks.",
                {"through_zero": True},
            ),
            (
                "the slope of the line need not be a whole number: do not "
                "round it.",
                {"whole": True},
            ),
        ],
    ),
    shown=(
        "GPT-2's shape with 32 sequences of 128 tokens needs 6.87 billion "
        "bytes. The line through its peaks at 1 and 2 says 2.92: there the "
        "optimizer's step decides, which hardly grows with the batch. A "
        "maximum of lines is convex, so beyond both sizes the line is never "
        "too high."
    ),
    tolerance=1e-9,
)


def _fitting(lines: Lines, limit: int) -> int:
    """By trying one batch size after the other."""
    return next(n for n in count() if ledger.peak_at(lines, n + 1) > limit) * (
        max(constant for constant, _ in lines) <= limit
    )


def _steepest(lines: Lines) -> Lines:
    return [max(lines, key=lambda line: line[1])]


def _through(first: int, second: int) -> Callable[[Lines], Lines]:
    """The line through the peaks of two batch sizes, in place of the lines."""

    def through(lines: Lines) -> Lines:
        low, high = (ledger.peak_at(lines, n) for n in (first, second))
        slope = (high - low) / (second - first)
        return [(low - slope * first, slope)]

    return through


def _largest_batch(
    lines: Lines,
    limit: int,
    of: Callable[[Lines], Lines] = list,
    pick: Callable[[Iterable[float]], float] = min,
    whole: Callable[[float], float] = floor,
    room: int = 0,
    more: int = 0,
    least: float = 0,
    flat: bool = True,
) -> float:
    """The batch by formula.

    Args:
        lines, limit: of the exercise.
        of: the lines that are looked at.
        pick: one of the batches that they allow.
        whole: rounds.
        room: bytes above the limit that are allowed.
        more: added to the batch.
        least: for a batch below.
        flat: whether a line that does not rise can be too high.
    """
    if flat and any(c > limit for c, slope in lines if not slope):
        return 0
    fits = [(limit + room - c) / slope for c, slope in of(lines) if slope]
    return max(least, whole(pick(fits)) + more)


FIVE_LINES = [(700, 1), (664, 20), (300, 31), (50, 2), (600, 0)]
TOO_MANY = "at this batch size the peak is above the limit: round down."
NONE_FITS = "where not even one sample fits, the answer is 0."

check_largest_batch = Exercise(
    signature="largest_batch(lines, limit)",
    cases=[
        _given(lines=FIVE_LINES, limit=780),
        _given(lines=[(900, 10), (300, 31), (950, 0)], limit=1540),
        _with_gpt2(limit=16 * 10**9),
        _given(lines=[(500, 40), (300, 100)], limit=410),
        _given(lines=[(500, 40), (300, 100)], limit=520),
        _given(lines=[(2000, 0), (300, 31)], limit=1450),
    ],
    observe=answer,
    solution=_fitting,
    mistakes=variants(
        _largest_batch,
        [
            (NONE_FITS, {"least": -inf}),
            (NONE_FITS, {"least": 1}),
            (
                "only the steepest line is looked at. Each moment of the "
                "step must stay within the limit.",
                {"of": _steepest},
            ),
            (
                "only the line that is highest at one sample is looked at. "
                "Another one is higher at larger batches.",
                {
                    "of": lambda lines: [
                        max(lines, key=lambda line: line[0] + line[1])
                    ]
                },
            ),
            (
                "this is the line through the peaks at 1 and 2, and the "
                "peak does not stay on it.",
                {"of": _through(1, 2)},
            ),
            (
                "this is the batch that one of the moments allows: all of "
                "them must stay within the limit, so take the smallest.",
                {"pick": max},
            ),
            (TOO_MANY, {"whole": ceil}),
            (TOO_MANY, {"whole": round}),
            (TOO_MANY, {"more": 1}),
            (
                "a batch is a whole number: round down.",
                {"whole": lambda n: n},
            ),
            (
                "a peak of exactly the limit fits: `<=`, not `<`.",
                {"room": -1},
            ),
            (
                "one sample more fits: its peak is within the limit.",
                {"more": -1},
            ),
            (
                "a line that does not rise can be above the limit too: then "
                "no batch fits.",
                {"flat": False},
            ),
        ],
    ),
    shown=(
        "Each moment allows so many samples, and the smallest of these "
        "numbers is the answer. GPT-2's shape fits 91 sequences of 128 "
        "tokens into 16 billion bytes."
    ),
    tolerance=EXACT,
)


# A calculator to repair


def _estimate(
    parameters: int,
    batch: int,
    tokens: int,
    width: int,
    depth: int,
    heads: int,
    vocabulary: int,
    states: int = 2,
    gradients: int = 0,
    logits: int = 3,
    wide: float = 16,
    heady: float = 1,
    scores: float = 0,
) -> float:
    """The estimate by formula.

    Args:
        parameters, batch, tokens, width, depth, heads, vocabulary: of the
            exercise.
        states: numbers of the optimizer for each parameter.
        gradients: how often the gradients count.
        logits: how often the logits count.
        wide: numbers of a block for each number of a token's vector.
        heady: for each head of a token.
        scores: for each score, tokens × tokens for each head.
    """
    n = batch * tokens
    block = wide * n * width + heady * n * heads + scores * n * heads * tokens
    numbers = (1 + states + gradients) * parameters
    return 4 * (numbers + depth * block + logits * n * vocabulary)


def _shape(batch: int, tokens: int, *sizes: int) -> Case:
    """A step of a GPT of these sizes (vocabulary, width, depth, heads)."""
    vocabulary, width, depth, heads = sizes
    shape = Transformer(*sizes, context=tokens)
    return _given(
        parameters=shape.parameters,
        batch=batch,
        tokens=tokens,
        width=width,
        depth=depth,
        heads=heads,
        vocabulary=vocabulary,
    )


@cache
def _predicted(
    parameters: int,
    batch: int,
    tokens: int,
    width: int,
    depth: int,
    heads: int,
    vocabulary: int,
) -> int:
    shape = Transformer(vocabulary, width, depth, heads, context=tokens)
    return ledger.predict(shape, batch, tokens).peak


STATES_ONCE = (
    "Adam keeps two numbers for each parameter, so its states take 8 bytes."
)
LOGITS_ONCE = (
    "the logits count once, but in the loss's backward pass three tensors of "
    "their size are alive: the log-probabilities, their gradient and that of "
    "the logits."
)
IN_16_BITS = (
    "34 + 5·heads·tokens/width bytes are those of a 16-bit block with dropout "
    "and without fused attention. Here it is fp32, without dropout, and "
    "fused: 16·width + heads numbers for each token."
)
KORTHIKANTI = {"wide": 34 / 4, "heady": 0, "scores": 5 / 4}
PLANTED = [
    (STATES_ONCE, {"states": 1}),
    (LOGITS_ONCE, {"logits": 1}),
    (IN_16_BITS, KORTHIKANTI),
]

OTHERS = [
    (
        "without fused attention the scores would be kept; with "
        "it, and without dropout, a block saves 16·width + heads "
        "numbers for each token.",
        KORTHIKANTI | {"wide": 34 / 2, "scores": 5 / 2},
    ),
    (
        "the scores are gone; but 34 bytes for each number of a "
        "token's vector are those of a 16-bit block with "
        "dropout: in fp32 and without it they are 16 × 4.",
        KORTHIKANTI | {"scores": 0},
    ),
    (
        "half of 34 is none of the two: in fp32, without dropout, "
        "a block saves 16 × 4 bytes for each number of a "
        "token's vector.",
        KORTHIKANTI | {"wide": 17 / 4, "scores": 0},
    ),
    (
        "twice 34 is too much: the masks of dropout are 2 of the "
        "34, and they do not double. Without dropout it is 2 × "
        "32 = 64 bytes, 16 × 4.",
        KORTHIKANTI | {"wide": 34 / 2, "scores": 0},
    ),
    (
        "the blocks are counted in 16 bits: in fp32 a number takes 4 bytes.",
        {"wide": 8, "heady": 1 / 2},
    ),
    (
        "the logits count twice, but three tensors of their size "
        "are alive: the log-probabilities, their gradient and "
        "that of the logits.",
        {"logits": 2},
    ),
    (
        "four tensors of the logits' size are too many: the "
        "logits themselves are gone when the loss's backward "
        "pass begins.",
        {"logits": 4},
    ),
    (
        "the parameters' gradients are counted, but in the "
        "loss's backward pass, where the peak is, none of them "
        "is there yet.",
        {"gradients": 1},
    ),
]
"""Mistakes that are not planted, but near."""

check_estimate = Exercise(
    signature=(
        "estimate(parameters, batch, tokens, width, depth, heads, vocabulary)"
    ),
    cases=[
        _shape(16, 384, 50257, 512, 24, 16),
        _shape(4, 1024, 50257, 768, 12, 12),
        _shape(16, 128, 600, 64, 40, 4),
        _shape(8, 256, 32000, 256, 4, 4),
    ],
    observe=answer,
    solution=_predicted,
    mistakes=[
        (
            STATES_ONCE,
            partial(_estimate, states=1, logits=1, **KORTHIKANTI),
        ),
        *variants(_estimate, PLANTED),
        *[(hint, partial(_estimate, **change)) for hint, change in OTHERS],
        *[
            (hint, partial(_estimate, **change, **other))
            for hint, change in PLANTED
            for _, other in OTHERS
            if not change.keys() & other.keys()
            and (change | other).keys() != {"states", "gradients"}
        ],
    ],
    shown=(
        "Within 2 % of the peak that the ledger predicts, row by row. What is "
        "left out: the last norm, the positions and a few numbers for each "
        "token."
    ),
    tolerance=0.02,
)
