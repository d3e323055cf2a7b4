"""The rows of each operator: what it saves, and what its backward pass needs.

The rules are PyTorch's on a CPU, read off its derivatives
(``tools/autograd/derivatives.yaml``) and compared with the peak tracker to
the byte. With n numbers of s bytes in the output and b·t tokens:

=====================  ==================================================
operator               bytes saved for backward
=====================  ==================================================
linear, matmul         its inputs (weights are there anyway)
add                    nothing
ReLU, tanh, sigmoid    its output
softmax                its output
GELU, SiLU             its input
product                both factors
LayerNorm              its input, and mean and 1/σ: 8 bytes a token
fused attention        q, k, v, its output, 4 bytes a head of a token
dropout                a mask, of s·n bytes on a CPU
log-softmax            its output
convolution            its input
batch norm             its input, and mean and 1/σ: 8 bytes a channel
max pooling            its input, and the places of the maxima: 8·n
cast to another dtype  nothing; the copy is there as long as it is needed
=====================  ==================================================

Every function writes rows on a :class:`membudget.ledger.Paper` and returns
what the operator returns.
"""

from membudget.ledger.paper import Paper, PaperTensor


def _new(like: PaperTensor, elements: int | None = None) -> PaperTensor:
    elements = like.elements if elements is None else elements
    return PaperTensor(elements, like.itemsize, like.trained)


def _view(of: PaperTensor, elements: int | None = None) -> PaperTensor:
    elements = of.elements if elements is None else elements
    return PaperTensor(elements, of.itemsize, of.trained, of.kind, of.storage)


def _each(**tensors: PaperTensor) -> dict:
    """A backward pass that makes one gradient for each of the tensors."""
    return {
        "steps": tuple((name, t.bytes) for name, t in tensors.items()),
        "gives": tuple((t, name) for name, t in tensors.items()),
    }


def cast(
    paper: Paper,
    x: PaperTensor,
    itemsize: int,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """``x.to(dtype)``: saves nothing; x itself where nothing changes."""
    if x.itemsize == itemsize:
        return x
    y = PaperTensor(x.elements, itemsize, x.trained)
    paper.write(
        "cast",
        (x,),
        (y,),
        needs=False,
        **_each(x=x),
        watches=watches,
    )
    return y


def _autocast(paper: Paper, x: PaperTensor | None) -> PaperTensor | None:
    """x as a matrix product under autocast takes it."""
    if x is None or paper.autocast is None:
        return x
    if x.kind == "parameter":
        # the copy is cached until autocast ends
        if id(x) not in paper._casts:
            paper._casts[id(x)] = cast(paper, x, paper.autocast)
            paper.pinned.append(paper._casts[id(x)])
        return paper._casts[id(x)]
    return cast(paper, x, paper.autocast)


def _fp32(paper: Paper, x: PaperTensor) -> PaperTensor:
    """x as an operator takes it that CUDA's autocast runs in fp32."""
    if paper.autocast is None or paper.lists == "cpu":
        return x
    return cast(paper, x, 4)


def linear(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    outputs: int,
    bias: PaperTensor | None = None,
    folds: bool = False,
) -> PaperTensor:
    """``F.linear``: saves its input; rows = x.elements / inputs.

    Args:
        folds: whether x has more dimensions than rows and columns.
    """
    rows = x.elements // (weight.elements // outputs)
    bias = _autocast(paper, bias)  # the last argument first
    weight = _autocast(paper, weight)
    given = _autocast(paper, x)
    y = PaperTensor(rows * outputs, given.itemsize)
    reads = {"x": given, "w": weight}
    if bias is not None:
        reads["b"] = bias
    steps = {name: t.bytes for name, t in reads.items()}
    if bias is None:
        order = ["w", "x"]
    else:
        steps["saved"] = 0
        order = ["x", "w", "saved", "b"]
    paper.write(
        "linear",
        tuple(reads.values()),
        (y,),
        saves=(given, weight) if given.trained else (given,),
        steps=tuple((name, steps[name]) for name in order),
        gives=tuple((t, name) for name, t in reads.items()),
        views=("x", "w") if folds else ("w",),
        watches=(x,),
    )
    return y


def add(
    paper: Paper,
    x: PaperTensor,
    y: PaperTensor,
    broadcast: bool = False,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """``x + y``: saves nothing; the wider dtype wins.

    Args:
        broadcast: whether y lacks a dimension of x; its gradient is a sum.
    """
    itemsize = max(x.itemsize, y.itemsize)
    out = PaperTensor(x.elements, itemsize)
    steps, gives = [], []
    for name, tensor in (("x", x), ("y", y)):
        if (broadcast and tensor is y) or tensor.itemsize < itemsize:
            steps.append((name, tensor.bytes))  # a sum, or a cast
            gives.append((tensor, name))
        else:
            gives.append((tensor, "g"))
    paper.write(
        "add",
        (x, y),
        (out,),
        needs=False,
        steps=tuple(steps),
        gives=tuple(gives),
        watches=watches,
    )
    return out


def of_output(paper: Paper, x: PaperTensor, name: str) -> PaperTensor:
    """ReLU, tanh and sigmoid: they save their output."""
    y = _new(x)
    paper.write(
        name,
        (x,),
        (y,),
        saves=(y,),
        after=True,
        **_each(x=x),
    )
    return y


def of_input(paper: Paper, x: PaperTensor, name: str) -> PaperTensor:
    """GELU and SiLU: they save their input."""
    y = _new(x)
    paper.write(
        name,
        (x,),
        (y,),
        saves=(x,),
        **_each(x=x),
    )
    return y


def multiply(paper: Paper, x: PaperTensor, y: PaperTensor) -> PaperTensor:
    """``x * y`` of the same shape: saves both."""
    out = _new(x)
    paper.write(
        "mul",
        (x, y),
        (out,),
        saves=(x, y),
        **_each(x=x, y=y),
    )
    return out


def scale(paper: Paper, x: PaperTensor) -> PaperTensor:
    """x times or divided by a number: saves nothing."""
    y = _new(x)
    paper.write("scale", (x,), (y,), needs=False, **_each(x=x))
    return y


def dropout(paper: Paper, x: PaperTensor) -> PaperTensor:
    """Saves a mask, on a CPU in the dtype of x (1 byte for each on a GPU)."""
    mask = constant(paper, x.elements, x.itemsize)
    y = _new(x)
    paper.write(
        "dropout",
        (x, mask),
        (y,),
        saves=(mask,),
        **_each(x=x),
    )
    return y


def layer_norm(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    bias: PaperTensor,
) -> PaperTensor:
    """Saves its input, mean and 1/σ of each token in the weight's dtype.

    CUDA's autocast runs it in fp32, on a copy of 16-bit numbers.
    """
    tokens = x.elements // weight.elements
    given = _fp32(paper, x)
    y = _new(given)
    paper.write(
        "layer_norm",
        (given, weight, bias),
        (y,),
        saves=(given,),
        extra=2 * tokens * weight.itemsize,
        after=True,
        **_each(x=given, w=weight, b=bias),
        watches=(x,),
    )
    return y


def rms_norm(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """``F.rms_norm``, which a CPU runs as a chain of small operators.

    It saves its input and the normalised input, both in fp32, and 1/rms of
    each token. On a GPU it is one operator that saves its input and 1/rms.
    """
    whole = cast(paper, x, 4)
    tokens = x.elements // weight.elements
    squares, mean = _new(whole), _new(whole, tokens)
    n, t, w = whole.bytes, mean.bytes, weight.elements * 4
    paper.write(
        "square",
        (whole,),
        (squares,),
        saves=(whole,),
        steps=(("a", n), ("b", n), ("x", n), ("a", 0), ("b", 0)),
        gives=((whole, "x"),),
    )
    paper.write(
        "mean",
        (squares,),
        (mean,),
        needs=False,
        steps=(("x", n),),
        gives=((squares, "x"),),
    )
    root = _new(mean)
    paper.write(
        "rsqrt",
        (mean,),
        (root,),
        saves=(root,),
        after=True,
        steps=(("a", t), ("b", t), ("x", t), ("a", 0), ("b", 0)),
        gives=((mean, "x"),),
        watches=(squares,),
    )
    normed = _new(whole)
    paper.write(
        "mul",
        (whole, root),
        (normed,),
        saves=(whole, root),
        steps=(("x", n), ("a", n), ("r", t), ("a", 0)),
        gives=((whole, "x"), (root, "r")),
    )
    watches += (whole, root)  # variables until the norm returns
    out = _new(normed)
    small = weight.itemsize < 4
    paper.write(
        "mul",
        (normed, weight),
        (out,),
        saves=(normed,),
        steps=(
            ("a", n),
            ("x", n),
            ("saved", 0),
            *([("s", w), ("a", 0)] if small else []),
            ("w", weight.bytes),
            ("s" if small else "a", 0),
        ),
        gives=((normed, "x"), (weight, "w")),
        watches=watches,
    )
    return cast(paper, out, x.itemsize, watches)


def split(
    paper: Paper, x: PaperTensor, elements: tuple[int, ...]
) -> tuple[PaperTensor, ...]:
    """``x.split``: views; the backward pass joins their gradients."""
    views = tuple(_view(x, n) for n in elements)
    paper.write(
        "split",
        (x,),
        views,
        needs=False,
        **_each(x=x),
    )
    return views


def rotate_pairs(
    paper: Paper,
    x: PaperTensor,
    turns: PaperTensor,
    fused: bool = True,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """Rotary positions: x in pairs, as complex numbers, times ``turns``.

    ``turns`` has 8 bytes for each pair of a token of one head; it is saved.
    The product runs in fp32. The gradient of fused attention comes back in
    another order of memory and is copied first.
    """
    whole = cast(paper, x, 4)
    y = _new(whole)
    copied = (("c", whole.bytes), ("g", 0)) if fused else ()
    paper.write(
        "rotate",
        (whole, turns),
        (y,),
        saves=(turns,),
        steps=(
            *copied,
            ("t", turns.bytes),
            ("x", whole.bytes),
            *((("c", 0),) if fused else ()),
            ("t", 0),
        ),
        gives=((whole, "x"),),
        watches=watches,
    )
    return cast(paper, y, x.itemsize, watches=(whole, *watches))


def heads_of(paper: Paper, x: PaperTensor) -> PaperTensor:
    """``x.view(b, t, heads, -1).transpose(1, 2)``.

    For a gradient that comes back in another order of memory, which the
    backward pass of the view has to copy.
    """
    view = _view(x)
    paper.write(
        "heads",
        (x,),
        (view,),
        needs=False,
        **_each(x=x),
    )
    return view


def fused_attention(
    paper: Paper,
    q: PaperTensor,
    k: PaperTensor,
    v: PaperTensor,
    statistics: int,
) -> PaperTensor:
    """``F.scaled_dot_product_attention`` where it is one operator.

    Saves q, k, v, its output, and the logarithm of each row's sum:
    ``statistics`` = batch · heads · tokens numbers of 4 bytes. (Dao et al.
    2022, arXiv 2205.14135.)
    """
    y = _new(q)
    paper.write(
        "attention",
        (q, k, v),
        (y,),
        saves=(q, k, v, y),
        extra=4 * statistics,
        after=True,
        **_each(q=q, k=k, v=v),
    )
    return y


def contiguous(
    paper: Paper, x: PaperTensor, copied: bool = True
) -> PaperTensor:
    """A copy in order of memory, which matrix products of heads need.

    Args:
        copied: whether the gradient has to be copied, too.
    """
    y = _new(x)
    paper.write(
        "contiguous",
        (x,),
        (y,),
        needs=False,
        steps=(("x", x.bytes),) if copied else (),
        gives=((x, "x" if copied else "g"),),
    )
    return y


def repeat(paper: Paper, x: PaperTensor, times: int) -> PaperTensor:
    """``x.repeat_interleave(times)``: saves nothing."""
    y = _new(x, x.elements * times)
    paper.write(
        "repeat",
        (x,),
        (y,),
        needs=False,
        **_each(x=x),
    )
    return y


def matmul(
    paper: Paper,
    x: PaperTensor,
    y: PaperTensor,
    elements: int,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """``x @ y``: saves both."""
    x, y = _autocast(paper, x), _autocast(paper, y)
    out = _new(x, elements)
    paper.write(
        "matmul",
        (x, y),
        (out,),
        saves=(x, y),
        **_each(y=y, x=x),
        watches=watches,
    )
    return out


def softmax(paper: Paper, x: PaperTensor) -> PaperTensor:
    """Saves its output: under autocast 16 bits on a CPU, fp32 on CUDA."""
    given = _fp32(paper, x)
    y = _new(given)
    paper.write(
        "softmax",
        (given,),
        (y,),
        saves=(y,),
        after=True,
        **_each(x=given),
        watches=(x,),
    )
    return y


def unfused_attention(
    paper: Paper,
    q: PaperTensor,
    k: PaperTensor,
    v: PaperTensor,
    *,
    scores: int,
    tokens: int,
    times: int = 1,
    drop: bool = False,
    folds: bool = False,
) -> PaperTensor:
    """Attention operator by operator, as ``membudget.models.attention``.

    Saves copies of q, k and v, the mask, the softmax of the ``scores``
    (batch · heads · tokens²) and with dropout its mask and its output: the
    term 5·a·s²·b of Korthikanti et al. (2022, arXiv 2205.05198) counts 2, 1
    and 2 bytes.

    Args:
        scores: numbers in the matrix of scores.
        tokens: of a sequence.
        times: heads that share a head of keys and values.
        drop: whether dropout follows the softmax.
        folds: whether batch and heads are one dimension without a copy, as
            they are where one of them is 1. (Heads of a single number have
            more such cases, which have no rule.)
    """
    if times > 1:
        k, v = repeat(paper, k, times), repeat(paper, v, times)
    kept = (k, v)
    if not folds:
        # the gradient of one token is in order of memory
        q = contiguous(paper, q, copied=times == 1 and tokens > 1)
        if times == 1:
            k = contiguous(paper, k, copied=tokens > 1)
    raw = matmul(paper, q, k, scores)
    scaled = scale(paper, raw)
    mask = constant(paper, tokens * tokens, 1)
    masked = _new(scaled)
    paper.write(
        "mask",
        (scaled, mask),
        (masked,),
        saves=(mask,),
        **_each(x=scaled),
    )
    weights = softmax(paper, masked)
    kept += (scaled, mask, weights)  # variables until attention returns
    if drop:
        weights = dropout(paper, weights)
    if times == 1 and not folds:
        v = contiguous(paper, v, copied=False)
    return matmul(paper, weights, v, q.elements, watches=kept)


def cross_entropy(
    paper: Paper, logits: PaperTensor, targets: PaperTensor
) -> PaperTensor:
    """``F.cross_entropy``: saves the log-probabilities, in fp32 if autocast.

    At the worst moment of its backward pass three tensors of the logits'
    size are alive: what it saved, and two gradients.
    """
    given = logits
    if paper.autocast is not None:
        given = cast(paper, logits, 4)
    logp = _new(given)
    paper.write(
        "log_softmax",
        (given,),
        (logp,),
        saves=(logp,),
        after=True,
        **_each(x=given),
    )
    loss = _new(given, 1)
    paper.write(
        "nll_loss",
        (logp,),
        (loss,),
        saves=(logp, targets),
        extra=given.itemsize,
        after=True,
        **_each(x=logp),
        watches=(logits, given),
    )
    return loss


def total(paper: Paper, x: PaperTensor) -> PaperTensor:
    """``x.sum()``: its gradient is one number, shown as often as needed."""
    loss = _new(x, 1)
    paper.write("sum", (x,), (loss,), needs=False, gives=((x, "g"),))
    return loss


def embedding(
    paper: Paper,
    table: PaperTensor,
    places: PaperTensor,
    width: int,
) -> PaperTensor:
    """Rows of a table: saves the places; the gradient is a whole table."""
    y = PaperTensor(places.elements * width, table.itemsize)
    paper.write(
        "embedding",
        (table, places),
        (y,),
        saves=(places,),
        **_each(w=table),
    )
    return y


def constant(paper: Paper, elements: int, itemsize: int) -> PaperTensor:
    """A tensor that the forward pass makes from nothing."""
    y = PaperTensor(elements, itemsize, False)
    paper.write("constant", (), (y,), needs=False)
    return y


def convolution(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    elements: int,
    bias: PaperTensor | None = None,
) -> PaperTensor:
    """``F.conv2d`` with ``elements`` numbers of output: saves its input."""
    bias = _autocast(paper, bias)
    weight = _autocast(paper, weight)
    given = _autocast(paper, x)
    y = PaperTensor(elements, given.itemsize)
    gradients = {"x": given, "w": weight}
    if bias is not None:
        gradients["b"] = bias
    paper.write(
        "convolution",
        tuple(t for t in (given, weight, bias) if t is not None),
        (y,),
        saves=(given, weight),
        **_each(**gradients),
        watches=(x,),
    )
    return y


def batch_norm(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    bias: PaperTensor,
) -> PaperTensor:
    """Saves its input, mean and 1/σ of each channel in the weight's dtype."""
    y = _new(x)
    paper.write(
        "batch_norm",
        (x, weight, bias),
        (y,),
        saves=(x,),
        extra=2 * weight.elements * weight.itemsize,
        after=True,
        **_each(x=x, w=weight, b=bias),
    )
    return y


def max_pool(paper: Paper, x: PaperTensor, elements: int) -> PaperTensor:
    """Saves its input, and 8 bytes for the place of each maximum."""
    y = _new(x, elements)
    paper.write(
        "max_pool",
        (x,),
        (y,),
        saves=(x,),
        extra=8 * elements,
        after=True,
        **_each(x=x),
    )
    return y


def mean(paper: Paper, x: PaperTensor, elements: int) -> PaperTensor:
    """The mean over some dimensions: saves nothing."""
    y = _new(x, elements)
    paper.write(
        "mean",
        (x,),
        (y,),
        needs=False,
        **_each(x=x),
    )
    return y
