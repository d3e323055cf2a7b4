"""The exercises on the ledger: bytes predicted before they are measured."""

from functools import cache

from membudget import ledger
from membudget.exercises.compare import EXACT
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.observe import answer, calls, several
from membudget.ledger import Transformer

NUMBERS = "these are numbers, not bytes: in fp32 each takes 4."

# What a chain saves


def saved_bytes(layers, rows, width):
    saved = set()  # layer k reads tensor k and makes tensor k + 1
    for k, layer in enumerate(layers):
        saved.add(k + 1 if layer in ("relu", "tanh") else k)
    saved.discard(0)  # the input
    norms = layers.count("layernorm")
    return 4 * rows * (len(saved) * width + 2 * norms)


def _chains(rows: int, width: int, *chains: str) -> Case:
    """One call for each chain of words."""
    return Case(
        f"{len(chains)} chains, rows = {rows}, width = {width}",
        lambda: tuple((words.split(), rows, width) for words in chains),
    )


check_saved_bytes = Exercise(
    saved_bytes,
    cases=[
        _chains(
            6,
            10,
            "linear relu linear",
            "linear gelu linear",
            "linear tanh linear",
            "linear tanh",
            "relu linear",
            "linear layernorm linear relu gelu tanh",
        ),
        _chains(
            3,
            8,
            "layernorm linear gelu linear layernorm",
            "relu relu linear tanh linear relu",
            "linear linear linear linear linear",
            "gelu layernorm tanh gelu linear",
        ),
    ],
    observe=calls(lambda layers, *_: f"answer for {layers}".replace("'", '"')),
    mistakes=f"""
        len(saved) => len(layers)
        or len(saved) => (1 + len(layers))
        or len(saved) => len(layers)
        + 2 * norms =>
            not the output of every layer is saved: only what some layer needs
            for its backward pass. Linear layers, GELU and layer norms need
            their inputs, ReLU and tanh their outputs.
        set() => []
        .add( => .append(
        saved.discard(0) => saved = [k for k in saved if k]
            every layer's need is added up, but two layers can need the same
            tensor: the output of ReLU is the input of the next linear layer,
            and it is saved once.
        saved.discard(0) =>
            the input of the chain is there anyway, and does not count.
        "tanh") => "tanh", "gelu")
            GELU is not like ReLU: its derivative needs its input, not its
            output.
        "relu", "tanh" => "tanh",
        or "relu", "tanh" => "relu",
        or "relu", "tanh" =>
            ReLU and tanh save their outputs, from which their derivatives are
            computed, and not their inputs.
        "tanh") => "tanh", "layernorm")
            a layer norm saves its input, and two numbers for each row.
        "tanh") => "tanh", "linear")
            a linear layer saves its input: the gradient of its weight is
            computed from it.
        saved.discard(0) => saved -= {{0, len(layers)}}
            the last layer's output is saved as well, if that layer is a ReLU
            or tanh.
        saved.discard(0) => saved.discard(0); saved.add(len(layers))
            the chain's output is the input of no layer: it is saved only if
            the last layer is a ReLU or tanh.
        + 2 * norms =>
            a layer norm's two numbers for each row are missing: mean and
            1/deviation.
        2 * norms => norms
            a layer norm saves two numbers for each row: mean and 1/deviation.
        width + 2 * norms) => width) + 4 * 2 * norms
            a layer norm saves two numbers for each row: they count `rows`
            times.
        return 4 * => return 4 * layers.count("linear") * width**2 + 4 *
            the weights that linear layers save are parameters: they are there
            anyway, and do not count.
        4 * rows => rows
            {NUMBERS}
        """,
    step=(
        "Write down for each layer which tensor it saves, its input or its "
        "output, and count each tensor once."
    ),
    shown=(
        "That is what autograd saves in the real modules: each tensor once, "
        "whether one layer needs it or two."
    ),
    tolerance=EXACT,
)

# A transformer block


def gated_block(batch, tokens, width, heads, hidden):
    numbers = 4 * width + 2 * 2  # input and output of two norms
    numbers += 3 * width  # q, k and v
    numbers += width + heads  # attention's output, one number per head
    numbers += 4 * hidden  # gate, gelu(gate), up, and their product
    return 4 * batch * tokens * numbers


WIDE = (
    "eight tensors of `width` numbers are saved for each token: the inputs "
    "and outputs of both norms, q, k and v, and attention's output."
)

check_gated_block = Exercise(
    gated_block,
    cases=[
        given(batch=2, tokens=5, width=12, heads=3, hidden=20),
        given(batch=1, tokens=16, width=32, heads=1, hidden=7),
        given(batch=3, tokens=1, width=8, heads=8, hidden=33),
    ],
    observe=answer,
    mistakes=f"""
        3 * width => 11 * width
        4 * hidden => 0
            16 × width is the block with an MLP of two matrices and 4 × width
            numbers between them. Here hidden stands for that width, and the
            MLP is gated.
        4 * hidden => 2 * hidden
        or 4 * hidden => 3 * hidden
        or 4 * hidden => 1 * hidden
        or 4 * hidden => 5 * hidden
            the gated MLP saves four tensors of `hidden` numbers for each
            token: gate's output (for GELU), GELU's output and up's output
            (for the product), and the product (for down).
        + heads =>
            fused attention saves one number for each head of a token, the
            logarithm of its softmax's sum.
        + 2 * 2 =>
            each norm saves two numbers for a token, mean and 1/deviation.
        2 * 2 => 2
            each of the two norms saves two numbers for a token, mean and
            1/deviation: four.
        + heads => + heads + heads * tokens
            the scores, tokens × tokens for each head, are not saved: fused
            attention computes them again.
        3 * width => 6 * width
            q, k and v are views of one tensor, qkv's output: they count once.
        = 4 * width => = 5 * width
        or = 4 * width => = 6 * width
            these are too many: {WIDE} The block's output is the next block's
            input.
        = 4 * width => = 3 * width
        or = 4 * width => = 2 * width
        or = 4 * width => = 1 * width
            these are too few: {WIDE}
        return 4 * => return
            {NUMBERS}
        return 4 * => return 2 *
            these are 2 bytes for each number: fp32 takes 4.
        """,
    shown="That is what autograd saves in the real block, to the byte.",
    tolerance=EXACT,
)

# The peak as a maximum of lines


def extrapolate(lines, first, second, batch):
    def peak(n):
        return max(constant + slope * n for constant, slope in lines)

    slope = (peak(second) - peak(first)) / (second - first)
    line = peak(second) + slope * (batch - second)
    return line, peak(batch)


@cache
def _gpt2_lines() -> list[tuple[int, int]]:
    """Those of the moments that are the peak at some batch size."""
    shape = Transformer(50257, 768, 12, 12, context=1024)
    sizes = 2, 4, 7
    timelines = [
        [moment.live for moment in ledger.predict(shape, size, 128).moments]
        for size in sizes
    ]
    return [(c, slope) for c, slope in ledger.peak_lines(sizes, timelines)]


def _with_gpt2(**arguments: int) -> Case:
    words = [f"{name} = {n}" for name, n in arguments.items()]
    return Case(
        ", ".join(["the lines of GPT-2's shape with 128 tokens", *words]),
        lambda: (list(_gpt2_lines()), *arguments.values()),
    )


THREE_LINES = [(900, 1), (640, 12), (300, 31)]
STEEPEST = "[max(lines, key=lambda line: line[1])]"
TURNED = "a line is (constant, slope): the constant comes first."

check_extrapolate = Exercise(
    extrapolate,
    cases=[
        given(lines=THREE_LINES, first=2, second=26, batch=100),
        _with_gpt2(first=1, second=2, batch=32),
        given(lines=THREE_LINES, first=20, second=24, batch=64),
        given(
            lines=[(300, 31), (10, 50), (900, 1)], first=1, second=4, batch=12
        ),
    ],
    observe=several("line at `batch`", "peak at `batch`"),
    mistakes=f"""
        line, peak(batch) => peak(batch), line
            first what the line says, then the peak.
        return max( => return sum(
            the lines are added up, but they are different moments of one
            step: the peak is the largest of them.
        return max( => return min(
            this is the lowest line: the peak is the highest of them.
        max(constant + slope * n for constant, slope in lines) => \
        max(c for c, _ in lines) + max(s for _, s in lines) * n
            the largest constant and the largest slope belong to different
            lines: take the largest of the sums constant + slope × batch.
        in lines => in {STEEPEST}
            the peak is the highest line at that batch size, and not always
            the steepest.
        in lines => in lines[:1]
            the lines cross: at each batch size the peak is the highest of
            them, and not always the same.
        constant, slope in => slope, constant in
            {TURNED}
        / (second - first) =>
            the line rises by the difference of the peaks over second − first
            samples, not over one.
        line = peak(second) => line = peak(first)
        or slope * (batch - second) => slope * (batch - first)
            the line goes on from the peak at `second`; or from that at
            `first`, but then over batch − first samples.
        slope * (batch - second) => slope * batch
            from the peak at `second` the line rises over batch − second
            samples, not over `batch`.
        + slope * (batch - second) => / second * batch
            this line goes through zero. Parameters and states do not grow
            with the batch: draw the line through both peaks.
        / (second - first) => // (second - first)
            the slope of the line need not be a whole number: do not round it.
        line, peak(batch) => line, peak(second)
            the second number is the highest line at `batch`, not at `second`.
        """,
    step=(
        "The peak at a batch size is the highest of the lines there, and the "
        "straight line goes through the peaks at `first` and `second`."
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


def largest_batch(lines, limit):
    if any(constant > limit for constant, slope in lines):
        return 0
    return min((limit - c) // slope for c, slope in lines if slope)


FIVE_LINES = [(700, 1), (664, 20), (300, 31), (50, 2), (600, 0)]

check_largest_batch = Exercise(
    largest_batch,
    cases=[
        given(lines=FIVE_LINES, limit=780),
        given(lines=[(900, 10), (300, 31), (950, 0)], limit=1540),
        _with_gpt2(limit=16 * 10**9),
        given(lines=[(500, 40), (300, 100)], limit=410),
        given(lines=[(500, 40), (300, 100)], limit=520),
        given(lines=[(2000, 0), (300, 31)], limit=1450),
    ],
    observe=answer,
    mistakes=f"""
        constant > limit => constant > limit and not slope
        or return 0 => return 1
        or if slope) => if slope) or 1
            where not even one sample fits, the answer is 0.
        c, slope in lines => c, slope in {STEEPEST}
            only the steepest line is looked at. Each moment of the step must
            stay within the limit.
        c, slope in lines => c, slope in [max(lines, key=sum)]
            only the line that is highest at one sample is looked at. Another
            one is higher at larger batches.
        return min( => \
        p, q = (ledger.peak_at(lines, n) for n in (1, 2)); return min(
        c, slope in lines => c, slope in [(2 * p - q, q - p)]
            this is the line through the peaks at 1 and 2, and the peak does
            not stay on it.
        return min( => return max(
            this is the batch that one of the moments allows: all of them must
            stay within the limit, so take the smallest.
        (limit - c) // slope => -((c - limit) // slope)
        or (limit - c) // slope => round((limit - c) / slope)
        or if slope) => if slope) + 1
            at this batch size the peak is above the limit: round down.
        // slope => / slope
            a batch is a whole number: round down.
        limit - c => limit - 1 - c
            a peak of exactly the limit fits: `<=`, not `<`.
        if slope) => if slope) - 1
            one sample more fits: its peak is within the limit.
        constant > limit => constant > limit and slope
            a line that does not rise can be above the limit too: then no
            batch fits.
        for c, slope in => for slope, c in
            {TURNED}
        """,
    shown=(
        "Each moment allows its own number of samples, and the smallest "
        "is the answer. GPT-2's shape fits 91 sequences of 128 "
        "tokens into 16 billion bytes."
    ),
    tolerance=EXACT,
)

# A calculator to repair


def estimate(parameters, batch, tokens, width, depth, heads, vocabulary):
    n = batch * tokens
    weights = 4 * parameters
    adam = 2 * 4 * parameters
    block = 4 * n * (16 * width + heads)
    logits = 3 * 4 * n * vocabulary
    return weights + adam + depth * block + logits


def _shape(
    batch: int,
    tokens: int,
    vocabulary: int,
    width: int,
    depth: int,
    heads: int,
) -> Case:
    """A step of a GPT of these sizes."""
    shape = Transformer(vocabulary, width, depth, heads, context=tokens)
    return given(
        parameters=shape.parameters,
        batch=batch,
        tokens=tokens,
        width=width,
        depth=depth,
        heads=heads,
        vocabulary=vocabulary,
    )


def _predicted(parameters, batch, tokens, width, depth, heads, vocabulary):
    shape = Transformer(vocabulary, width, depth, heads, context=tokens)
    return ledger.predict(shape, batch, tokens).peak


BLOCK = "4 * n * (16 * width + heads)"
KORTHIKANTI = "n * width * (34 + 5 * heads * tokens / width)"

check_estimate = Exercise(
    estimate,
    cases=[
        _shape(8, 1024, 50257, 768, 28, 12),
        _shape(16, 384, 50257, 512, 24, 16),
        _shape(16, 128, 600, 64, 40, 4),
        _shape(8, 256, 32000, 256, 4, 4),
    ],
    observe=answer,
    right=_predicted,
    mistakes=f"""
        2 * 4 => 4
        or 2 * 4 => 4
        3 * 4 => 4
        {BLOCK} => {KORTHIKANTI}
            Adam keeps two numbers for each parameter, so its states take 8
            bytes.
        3 * 4 => 4
            the logits count once, but in the loss's backward pass three
            tensors of their size are alive: the log-probabilities, their
            gradient and that of the logits.
        {BLOCK} => {KORTHIKANTI}
            34 + 5·heads·tokens/width bytes are those of a 16-bit block with
            dropout and without fused attention. Here it is fp32, without
            dropout, and fused: 16·width + heads numbers for each token.
        {BLOCK} => 2 * {KORTHIKANTI}
            without fused attention the scores would be kept; with it, and
            without dropout, a block saves 16·width + heads numbers for each
            token.
        {BLOCK} => 34 * n * width
            the scores are gone; but 34 bytes for each number of a token's
            vector are those of a 16-bit block with dropout: in fp32 and
            without it they are 16 × 4.
        {BLOCK} => 68 * n * width
            twice 34 is too much: the masks of dropout are 2 of the 34, and
            they do not double. Without dropout it is 2 × 32 = 64 bytes,
            16 × 4. If you have 64, look for gradients: in the loss's backward
            pass none of the parameters has one yet.
        block = 4 * n => block = 2 * n
            the blocks are counted in 16 bits: in fp32 a number takes 4 bytes.
        3 * 4 => 2 * 4
            the logits count twice, but three tensors of their size are alive:
            the log-probabilities, their gradient and that of the logits.
        3 * 4 => 4 * 4
            four tensors of the logits' size are too many: the logits
            themselves are gone when the loss's backward pass begins.
        2 * 4 => 3 * 4
            the parameters' gradients are counted, but in the loss's backward
            pass, where the peak is, none of them is there yet.
        """,
    shown=(
        "Within 2 % of the peak that the ledger predicts, row by row. What is "
        "left out: the last norm, the positions and a few numbers for each "
        "token."
    ),
    tolerance=0.02,
)
