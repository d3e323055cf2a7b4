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
rows of a table        their places: 8 bytes each
grouped product        its input, and where the groups end: 4 bytes each
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

from membudget.checks import told
from membudget.ledger.paper import Paper, PaperTensor, Step


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


def _row(
    paper: Paper,
    operator: str,
    made: PaperTensor,
    reads: dict[str, PaperTensor],
    **rest,
) -> PaperTensor:
    """Write an operator with a gradient for each of what it reads.

    Args:
        made: what it returns.
        reads: by name, in the order in which the gradients are made; what is
            not trained has none.
        **rest: of :class:`Row`.

    Returns:
        ``made``.
    """
    given = tuple(reads.values())
    paper.write(operator, given, (made,), **_each(**reads), **rest)
    return made


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
    return _row(paper, "cast", y, {"x": x}, watches=watches)


def _factors(x: PaperTensor, y: PaperTensor) -> tuple[PaperTensor, ...]:
    """What a product saves: each factor for the other's gradient."""
    return (x,) * y.trained + (y,) * x.trained


def _autocast(paper: Paper, x: PaperTensor) -> PaperTensor:
    """x as a matrix product under autocast takes it."""
    if paper.autocast is None or paper.autocast == x.itemsize:
        return x
    if x.trained and (x.kind == "parameter" or x in paper.leaves):
        # the copy is cached until autocast ends; a frozen weight's is not
        if id(x) not in paper._casts:
            paper.pinned.append(cast(paper, x, paper.autocast))
            paper._casts[id(x)] = paper.last
        return paper._casts[id(x)].makes[0]
    return cast(paper, x, paper.autocast)


def _fp32(paper: Paper, x: PaperTensor) -> PaperTensor:
    """x as an operator takes it that CUDA's autocast runs in fp32."""
    if paper.autocast is None or paper.lists == "cpu":
        return x
    return cast(paper, x, 4)


def _operands(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    bias: PaperTensor | None,
    added: bool = False,
) -> dict[str, PaperTensor]:
    """What a product reads, by name; the last argument is cast first."""
    given = {"b": bias, "w": weight, "x": x}
    order = ("w", "x", "b") if added else ("b", "w", "x")
    cast = {
        name: _autocast(paper, told(given[name]))
        for name in order
        if given[name] is not None
    }
    return {name: cast[name] for name in ("x", "w", "b") if name in cast}


def linear(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    outputs: int,
    bias: PaperTensor | None = None,
    folds: bool = False,
    added: bool = False,
) -> PaperTensor:
    """``F.linear``: saves its input, for the gradient of a trained weight;
    rows = x.elements / inputs.

    Args:
        folds: whether x has more dimensions than rows and columns.
        added: whether it is ``torch.addmm(bias, x, weight)``.
    """
    rows = x.elements // (weight.elements // outputs)
    reads = _operands(paper, x, weight, bias, added)
    given = reads["x"]
    y = PaperTensor(rows * outputs, given.itemsize)
    steps = {name: t.bytes for name, t in reads.items()} | {"saved": 0}
    order = ["w", "x"] if bias is None else ["x", "w", "saved", "b"]
    paper.write(
        "linear",
        tuple(reads.values()),
        (y,),
        saves=_factors(given, reads["w"]),
        steps=tuple((name, steps[name]) for name in order),
        gives=tuple((t, name) for name, t in reads.items()),
        views=("x", "w") if folds else ("w",),
        watches=(x,),
    )
    return y


def four_bits(
    paper: Paper,
    x: PaperTensor,
    weights: int,
    outputs: int,
    bias: PaperTensor | None = None,
) -> PaperTensor:
    """A product with a frozen weight in NF4, as bitsandbytes computes it.

    Forward and backward it makes the scales of each 64 weights in fp32, and
    then the weight in x's dtype. It saves nothing: autograd sees neither.
    Dettmers et al. (2023, arXiv 2305.14314), equation 5.

    Args:
        weights: inputs · outputs.
    """
    scales = constant(paper, -(-weights // 64), 4)
    weight = constant(paper, weights, x.itemsize)
    paper.last.watches += (scales,)
    y = PaperTensor(x.elements // (weights // outputs) * outputs, x.itemsize)
    paper.write(
        "four bits",
        (x, weight) if bias is None else (x, weight, bias),
        (y,),
        steps=(
            ("scales", scales.bytes),
            ("weight", weight.bytes),
            ("scales", 0),
            ("x", x.bytes),
            ("weight", 0),
        ),
        gives=((x, "x"),),
        watches=(scales,),
    )
    return y


def low_rank(
    paper: Paper,
    x: PaperTensor,
    y: PaperTensor,
    down: PaperTensor,
    up: PaperTensor,
    rank: int,
    drop: bool,
    apart: bool = False,
) -> PaperTensor:
    """``y + up(down(dropout(x))) · scale``, LoRA's branch beside y.

    Hu et al. (2021, arXiv 2106.09685). The input is first cast to the dtype
    of the adapter, as ``peft`` does; so is y before the sum, and the sum is
    cast back.

    Args:
        apart: as ``peft`` does it beside 4 bits: y is copied first, and the
            branch, not the sum, is cast back.
    """
    if apart:
        copied = _new(y)
        paper.write("clone", (y,), (copied,), gives=((y, "g"),))
        y = copied
    given = cast(paper, x, down.itemsize, watches=(x, y))
    dropped = dropout(paper, given) if drop else given
    thin = linear(paper, dropped, down, rank, folds=True)
    branch = linear(paper, thin, up, up.elements // rank, folds=True)
    branch = scale(paper, branch)
    if apart:
        branch = cast(paper, branch, y.itemsize)
    total = add(paper, y, branch)
    out = cast(paper, total, y.itemsize)
    paper.last.watches += (x, given)
    return out


def dora(
    paper: Paper,
    x: PaperTensor,
    y: PaperTensor,
    own: tuple[PaperTensor, PaperTensor | None],
    trained: tuple[PaperTensor, PaperTensor, PaperTensor],
    rank: int,
    drop: bool,
) -> PaperTensor:
    """``y + (m − 1) · W x + m · up(down(x)) · scale``, as ``peft`` has DoRA.

    Of each output m is its trained magnitude divided by the norm of a row of
    W + up · down · scale, a constant. Liu et al. (2024, arXiv 2402.09353),
    equations 5 and 11. Saved are W x and the branch, beside what LoRA saves.
    With dropout W x is done again in the adapter's dtype, for which W may
    have to be copied; the copy stays.

    Args:
        own: the frozen weight, and the bias, if there is one.
        trained: down, up and the magnitudes.
    """
    (weight, bias), (down, up, magnitude) = own, trained
    outputs = magnitude.elements
    given = cast(paper, x, down.itemsize, watches=(x, y))
    dropped = dropout(paper, given) if drop else given
    delta, graph = _delta(paper, down, up, rank, given.itemsize)
    weight = cast(paper, weight, given.itemsize)
    norms = _row_norms(paper, weight, delta, outputs)
    m = _row(
        paper,
        "div",
        _new(magnitude),
        {"m": magnitude, "norms": norms},
        saves=(norms,),
    )
    thin = linear(paper, dropped, down, rank, folds=True)
    branch = linear(paper, thin, up, outputs, folds=True)
    base = y
    if drop:
        base = linear(paper, dropped, weight, outputs, folds=True)
    elif bias is not None:
        base = _moved(paper, y, bias)
    first = _scaled(paper, _moved(paper, m), base)
    second = scale(paper, _scaled(paper, m, branch))
    more = add(paper, first, second)
    paper.last.watches += (delta, weight, norms, m, branch, base)
    paper.last.holds = graph
    total = add(paper, y, more, watches=(dropped,))
    out = cast(paper, total, y.itemsize)
    paper.last.watches += (x, given)
    return out


def _delta(
    paper: Paper, down: PaperTensor, up: PaperTensor, rank: int, itemsize: int
) -> tuple[PaperTensor, tuple[PaperTensor, ...]]:
    """The product of the thin weights, from a unit matrix; and what its
    graph keeps, which nobody goes back through."""
    inputs, outputs = down.elements // rank, up.elements // rank
    eye = constant(paper, inputs * inputs, itemsize)
    _autocast(paper, down)  # each of the weights is cast once
    unit = _autocast(paper, eye)
    thin = constant(paper, inputs * rank, unit.itemsize)
    paper.last.watches += (unit,)
    _autocast(paper, up)
    wide = constant(paper, inputs * outputs, unit.itemsize)
    paper.last.watches += (eye, thin)
    return cast(paper, wide, itemsize), (unit, thin)


def _row_norms(
    paper: Paper, weight: PaperTensor, delta: PaperTensor, outputs: int
) -> PaperTensor:
    """Those of W + the difference · scale."""
    scaled = scale(paper, delta)
    both = add(paper, weight, scaled)
    norms = PaperTensor(outputs, both.itemsize)
    paper.write("norm", (both,), (norms,))
    return norms


def _moved(paper: Paper, x: PaperTensor, *less: PaperTensor) -> PaperTensor:
    """x less a constant, in the wider dtype."""
    y = PaperTensor(x.elements, max(t.itemsize for t in (x, *less)))
    if y.itemsize > x.itemsize:
        return _row(paper, "sub", y, {"x": x}, watches=less)
    paper.write("sub", (x, *less), (y,), gives=((x, "g"),))
    return y


def _scaled(paper: Paper, m: PaperTensor, x: PaperTensor) -> PaperTensor:
    """Each output of x times its trained number."""
    out = PaperTensor(x.elements, max(m.itemsize, x.itemsize))
    narrow = x.itemsize < out.itemsize
    steps: list[Step] = [("f", out.bytes)] * (narrow and x.trained)
    steps += [("x", out.bytes)] * (not narrow)
    steps += [("a", out.bytes), ("saved", 0), ("m", m.bytes), ("a", 0)]
    if narrow and x.trained:
        steps += [("x", x.bytes), ("f", 0)]
    paper.write(
        "mul",
        (m, x),
        (out,),
        saves=_factors(m, x),
        steps=tuple(steps),
        gives=((m, "m"), (x, "x")),
        views=("m",),
    )
    return out


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
        steps=tuple(steps),
        gives=tuple(gives),
        watches=watches,
    )
    return out


def of_output(paper: Paper, x: PaperTensor, name: str) -> PaperTensor:
    """ReLU, tanh and sigmoid: they save their output."""
    y = _new(x)
    return _row(paper, name, y, {"x": x}, saves=(y,))


def of_input(paper: Paper, x: PaperTensor, name: str) -> PaperTensor:
    """GELU and SiLU: they save their input."""
    return _row(paper, name, _new(x), {"x": x}, saves=(x,))


def new_gelu(paper: Paper, x: PaperTensor) -> PaperTensor:
    """GELU by tanh, written out in Python as in transformers' GPT-2.

    ``0.5 * x * (1 + tanh(c * (x + 0.044715 * x**3)))``: it saves x, tanh and
    both factors of the last product. (Hendrycks and Gimpel 2016, arXiv
    1606.08415, section 2.)
    """
    half = scale(paper, x)
    cube = _cube(paper, x)
    small = scale(paper, cube)
    inner = scale(paper, add(paper, x, small))
    raised = of_output(paper, inner, "tanh")
    moved = _new(raised)
    paper.write("add", (raised,), (moved,), gives=((raised, "g"),))
    return multiply(paper, half, moved)


def _cube(paper: Paper, x: PaperTensor) -> PaperTensor:
    y, n = _new(x), x.bytes
    steps = ("a", n), ("b", n), ("x", n), ("a", 0), ("b", 0)
    paper.write("pow", (x,), (y,), saves=(x,), steps=steps, gives=((x, "x"),))
    return y


def multiply(paper: Paper, x: PaperTensor, y: PaperTensor) -> PaperTensor:
    """``x * y`` of the same shape: saves both."""
    reads = {"x": x, "y": y}
    return _row(paper, "mul", _new(x), reads, saves=_factors(x, y))


def scale(paper: Paper, x: PaperTensor) -> PaperTensor:
    """x times or divided by a number: saves nothing."""
    return _row(paper, "scale", _new(x), {"x": x})


def dropout(paper: Paper, x: PaperTensor) -> PaperTensor:
    """Saves a mask, on a CPU in the dtype of x (1 byte for each on a GPU)."""
    itemsize = 1 if paper.kernels == "cuda" else x.itemsize
    mask = constant(paper, x.elements, itemsize)
    reads = {"x": x, "mask": mask}
    return _row(paper, "dropout", _new(x), reads, saves=(mask,))


def _statistic(paper: Paper, weight: PaperTensor) -> int:
    """Bytes of a norm's mean, and of its 1/σ."""
    return 4 if paper.kernels == "cuda" else weight.itemsize


def layer_norm(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    bias: PaperTensor,
) -> PaperTensor:
    """Saves its input, mean and 1/σ of each token in the weight's dtype.

    A GPU has them in fp32. CUDA's autocast runs it in fp32, on a copy of
    16-bit numbers.
    """
    tokens = x.elements // weight.elements
    given = _fp32(paper, x)
    return _row(
        paper,
        "layer_norm",
        _new(given),
        {"x": given, "w": weight, "b": bias},
        saves=(given,),
        extra=2 * tokens * _statistic(paper, weight),
        watches=(x,),
    )


def rms_norm(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """``F.rms_norm``, which a CPU runs as a chain of small operators.

    It saves its input and, for the gradient of a trained weight, the
    normalised input, both in fp32, and 1/rms of each token. On a GPU it is
    one operator: :func:`fused_rms_norm`.
    """
    whole = cast(paper, x, 4)
    tokens = x.elements // weight.elements
    squares = _square(paper, whole)
    means = mean(paper, squares, tokens)
    root = _inverse_root(paper, means, squares)
    normed = _unit(paper, whole, root)
    watches += (x, whole, root)  # variables until the norm returns
    out = _times_weight(paper, normed, weight, watches)
    return cast(paper, out, x.itemsize, watches)


def _times_weight(
    paper: Paper,
    normed: PaperTensor,
    weight: PaperTensor,
    watches: tuple[PaperTensor, ...],
) -> PaperTensor:
    """The product in fp32; the gradient of a narrow weight is cast."""
    n, w = normed.bytes, weight.elements * 4
    out = _new(normed)
    small = weight.itemsize < 4
    steps: tuple[Step, ...] = (
        ("a", n),
        ("x", n),
        ("saved", 0),
        *([("s", w), ("a", 0)] if small else []),
        ("w", weight.bytes),
        ("s" if small else "a", 0),
    )
    paper.write(
        "mul",
        (normed, weight),
        (out,),
        saves=_factors(normed, weight),
        steps=steps if weight.trained else (("x", n), ("saved", 0)),
        gives=((normed, "x"), (weight, "w")),
        watches=watches,
    )
    return out


def wide_rms_norm(
    paper: Paper, x: PaperTensor, weight: PaperTensor
) -> PaperTensor:
    """RMSNorm as transformers' OLMo 2 has it, in fp32 to its end.

    ``(weight * (x.float() * rsqrt(mean of squares + ε))).to(x.dtype)``.
    """
    normed, means = _normed(paper, x, weight)
    out = _times_weight(paper, normed, weight, (x, means, normed))
    return cast(paper, out, x.itemsize, watches=(x, means, normed))


def _normed(
    paper: Paper, x: PaperTensor, weight: PaperTensor
) -> tuple[PaperTensor, PaperTensor]:
    """``x.float() * rsqrt(mean of squares + ε)``, and the mean."""
    whole = cast(paper, x, 4)
    squares = _square(paper, whole)
    means = mean(paper, squares, x.elements // weight.elements)
    moved = _new(means)
    paper.write("add", (means,), (moved,), gives=((means, "g"),))
    return _unit(paper, whole, _inverse_root(paper, moved)), means


def _square(paper: Paper, x: PaperTensor) -> PaperTensor:
    y, n = _new(x), x.bytes
    paper.write(
        "square",
        (x,),
        (y,),
        saves=(x,),
        steps=(("a", n), ("b", n), ("x", n), ("a", 0), ("b", 0)),
        gives=((x, "x"),),
    )
    return y


def _inverse_root(
    paper: Paper, x: PaperTensor, *watches: PaperTensor
) -> PaperTensor:
    y, n = _new(x), x.bytes
    paper.write(
        "rsqrt",
        (x,),
        (y,),
        saves=(y,),
        steps=(("a", n), ("b", n), ("x", n), ("a", 0), ("b", 0)),
        gives=((x, "x"),),
        watches=watches,
    )
    return y


def _unit(paper: Paper, x: PaperTensor, root: PaperTensor) -> PaperTensor:
    """x times 1/rms of each token."""
    y, n = _new(x), x.bytes
    paper.write(
        "mul",
        (x, root),
        (y,),
        saves=(x, root),
        steps=(("x", n), ("a", n), ("r", root.bytes), ("a", 0)),
        gives=((x, "x"), (root, "r")),
    )
    return y


def cast_rms_norm(
    paper: Paper, x: PaperTensor, weight: PaperTensor
) -> PaperTensor:
    """RMSNorm as the library transformers writes it, on any device.

    ``weight * (x.float() * rsqrt(mean of squares + ε)).to(x.dtype)``: it
    saves x in fp32, 1/rms of each token and, for the gradient of a trained
    weight, the normalised x in the dtype of x.
    """
    normed, means = _normed(paper, x, weight)
    narrow = cast(paper, normed, x.itemsize)
    itemsize = max(weight.itemsize, x.itemsize)
    out, wide = PaperTensor(x.elements, itemsize), x.elements * itemsize
    steps: list[Step] = [("a", wide)] if weight.trained else []
    steps += [("f" if itemsize > x.itemsize else "x", wide), ("saved", 0)]
    if weight.trained:
        steps += [("w", weight.bytes), ("a", 0)]
    if itemsize > x.itemsize:
        steps += [("x", x.bytes), ("f", 0)]
    paper.write(
        "mul",
        (narrow, weight),
        (out,),
        saves=_factors(narrow, weight),
        steps=tuple(steps),
        gives=((weight, "w"), (narrow, "x")),
        watches=(x, means, normed),  # variables until the norm returns
    )
    return out


def shifted_rms_norm(
    paper: Paper, x: PaperTensor, weight: PaperTensor
) -> PaperTensor:
    """RMSNorm as transformers' Gemma has it, in fp32 to its end.

    ``(x.float() * rsqrt(mean of squares + ε) * (1 + weight.float()))``, cast
    to the dtype of x: it saves x and, for the gradient of a trained weight,
    the normalised x in fp32, 1/rms of each token, and 1 + weight.
    """
    normed, _ = _normed(paper, x, weight)
    paper.last.watches += (x,)
    wide = cast(paper, weight, 4)
    raised = constant(paper, weight.elements, 4)  # 1 + weight
    out, n = _new(normed), normed.bytes
    steps: tuple[Step, ...] = ("x", n), ("saved", 0)
    if weight.trained:
        steps = ("x", n), ("a", n), ("saved", 0), ("w", raised.bytes), ("a", 0)
    paper.write(
        "mul",
        (normed, raised, wide),
        (out,),
        saves=(normed,) * weight.trained + (raised,) * normed.trained,
        steps=steps,
        gives=((normed, "x"), (wide, "w")),
        watches=(x, normed),
    )
    return cast(paper, out, x.itemsize, watches=(x,))


def fused_rms_norm(
    paper: Paper, x: PaperTensor, weight: PaperTensor
) -> PaperTensor:
    """``F.rms_norm`` as one operator, ``aten::_fused_rms_norm`` on a GPU.

    It saves its input, and 1/rms of each token in 4 bytes (PyTorch's
    ``derivatives.yaml``). CUDA's autocast runs it in fp32.
    """
    given = _fp32(paper, x)
    return _row(
        paper,
        "rms_norm",
        _new(given),
        {"x": given, "w": weight},
        saves=(given,),
        extra=4 * (x.elements // weight.elements),
        watches=(x,),
    )


def split(
    paper: Paper, x: PaperTensor, elements: tuple[int, ...]
) -> tuple[PaperTensor, ...]:
    """``x.split``: views; the backward pass joins their gradients."""
    views = tuple(_view(x, n) for n in elements)
    paper.write("split", (x,), views, **_each(x=x))
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


def rotate_halves(
    paper: Paper,
    x: PaperTensor,
    cos: PaperTensor,
    sin: PaperTensor,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """Rotary positions in halves, as the library transformers has them:
    ``x * cos + cat(-second, first) * sin``.

    cos and sin have a number for each of a token of one head; both are
    saved. (Su et al. 2021, arXiv 2104.09864.)
    """
    straight = _turn(paper, x, cos)
    half = x.elements // 2
    first, second = piece(paper, x, half), piece(paper, x, half)
    negative = _row(paper, "neg", _new(second), {"x": second})
    crossed = _new(x)
    both = (negative, "g"), (first, "g")
    paper.write("cat", (negative, first), (crossed,), gives=both)
    turned = _turn(paper, crossed, sin)
    return add(paper, straight, turned, watches=watches)


def piece(paper: Paper, x: PaperTensor, elements: int) -> PaperTensor:
    """``x[..., start:end]``, a view; its gradient is written into a whole one
    of zeros, even that of no numbers."""
    return _row(paper, "slice", _view(x, elements), {"x": x})


def leaf(paper: Paper, x: PaperTensor) -> PaperTensor:
    """``x.requires_grad_()``: autograd keeps x, whose gradient it makes."""
    x.trained = True
    y = _view(x)
    paper.write("leaf", (x,), (y,), saves=(x,), seen=(), gives=((x, "g"),))
    paper.leaves.append(y)
    return y


def alias(paper: Paper, x: PaperTensor) -> PaperTensor:
    """``x[..., :all]``, a view, whose gradient is handed on."""
    y = _view(x)
    paper.write("alias", (x,), (y,), gives=((x, "g"),))
    return y


def all_reduce(paper: Paper, x: PaperTensor) -> PaperTensor:
    """The sum of x over the ranks, whose gradient is handed on."""
    y = _new(x)
    paper.write("all-reduce", (x,), (y,), gives=((x, "g"),))
    return y


def entered(paper: Paper, x: PaperTensor) -> PaperTensor:
    """x itself, whose gradient is summed over the ranks."""
    y = _view(x)
    paper.write("enter", (x,), (y,), **_each(x=x))
    return y


def all_gather(
    paper: Paper,
    x: PaperTensor,
    ranks: int,
    copied: bool = True,
    summed: bool = True,
) -> PaperTensor:
    """All ranks' parts of x, joined.

    Args:
        ranks: of the group.
        copied: whether what was gathered must be put in order of memory.
        summed: whether its gradient is a sum over the ranks, of which each
            gets its part; otherwise each has the whole one, and takes it.
    """
    wide = _new(x, x.elements * ranks)
    steps: tuple[Step, ...] = (("x", x.bytes),)
    if summed and copied:
        steps = (("c", wide.bytes), ("x", x.bytes), ("c", 0))
    paper.write("all-gather", (x,), (wide,), steps=steps, gives=((x, "x"),))
    if not copied:
        return wide
    y = _new(wide)
    paper.write("cat", (wide,), (y,), gives=((wide, "g"),), watches=(x,))
    return y


def reduce_scatter(
    paper: Paper, x: PaperTensor, ranks: int, copied: bool = True
) -> PaperTensor:
    """A rank's part of the sum of x over the ranks; as ``all_gather``."""
    given = x
    if copied:
        given = _new(x)
        paper.write("cat", (x,), (given,), gives=((x, "g"),))
    y = _new(x, x.elements // ranks)
    paper.write(
        "reduce-scatter",
        (given,),
        (y,),
        steps=_gathered(x, copied),
        gives=((given, "x"),),
        watches=(x,),
    )
    return y


def taken(
    paper: Paper, x: PaperTensor, ranks: int, copied: bool = True
) -> PaperTensor:
    """A rank's part of x, copied; as ``all_gather``."""
    y = _new(x, x.elements // ranks)
    steps = _gathered(x, copied)
    paper.write("clone", (x,), (y,), steps=steps, gives=((x, "x"),))
    return y


def _gathered(x: PaperTensor, copied: bool) -> tuple[Step, ...]:
    """Its gradient, from the parts of all ranks."""
    if not copied:
        return (("x", x.bytes),)
    return (("c", x.bytes), ("x", x.bytes), ("c", 0))


def joined(paper: Paper, x: PaperTensor, still: PaperTensor) -> PaperTensor:
    """``torch.cat([x, still])``: a copy; the gradients are views. The wider
    dtype wins."""
    itemsize = max(x.itemsize, still.itemsize)
    y = PaperTensor(x.elements + still.elements, itemsize)
    steps, gives = [], []
    for name, part in (("x", x), ("still", still)):
        narrow = part.itemsize < itemsize and part.elements > 0
        if narrow:
            steps.append((name, part.bytes))
        gives.append((part, name if narrow else "g"))
    paper.write(
        "cat", (x, still), (y,), steps=tuple(steps), gives=tuple(gives)
    )
    return y


def _turn(paper: Paper, x: PaperTensor, by: PaperTensor) -> PaperTensor:
    """x times a constant, which it saves; the wider dtype wins."""
    y = PaperTensor(x.elements, max(x.itemsize, by.itemsize))
    steps: tuple[Step, ...] = (("x", x.bytes),)
    if x.itemsize < y.itemsize:
        steps = ("f", y.bytes), ("saved", 0), *steps, ("f", 0)
    paper.write(
        "mul", (x, by), (y,), saves=(by,), steps=steps, gives=((x, "x"),)
    )
    return y


def lowered(paper: Paper, *tensors: PaperTensor) -> tuple[PaperTensor, ...]:
    """The arguments of an operator that autocast runs in 16 bits, as it
    takes them: the last is cast first."""
    return tuple(_autocast(paper, t) for t in tensors[::-1])[::-1]


def heads_of(paper: Paper, x: PaperTensor) -> PaperTensor:
    """``x.view(b, t, heads, -1).transpose(1, 2)``.

    For a gradient that comes back in another order of memory, which the
    backward pass of the view has to copy.
    """
    return _row(paper, "heads", _view(x), {"x": x})


def fused_attention(
    paper: Paper,
    q: PaperTensor,
    k: PaperTensor,
    v: PaperTensor,
    statistics: int,
    *masks: PaperTensor,
) -> PaperTensor:
    """``F.scaled_dot_product_attention`` where it is one operator.

    Saves q, k, v, its output, and the logarithm of each row's sum:
    ``statistics`` = batch · heads · tokens numbers of 4 bytes. (Dao et al.
    2022, arXiv 2205.14135.)

    Args:
        masks: what is added to the scores, if anything, which it saves.
    """
    y = _new(q)
    reads = {"q": q, "k": k, "v": v}
    # the kernel makes all three gradients, wanted or not
    idle = tuple((name, 0) for name, t in reads.items() if not t.trained)
    paper.write(
        "attention",
        (q, k, v, *masks),
        (y,),
        saves=(q, k, v, y, *masks),
        extra=4 * statistics,
        steps=tuple((name, t.bytes) for name, t in reads.items()) + idle,
        gives=tuple((t, name) for name, t in reads.items() if t.trained),
    )
    return y


def addend(
    paper: Paper, mask: PaperTensor, elements: int, itemsize: int
) -> PaperTensor:
    """0 where a mask is true and -∞ elsewhere, for all of a batch."""
    y = PaperTensor(elements, itemsize, False)
    return _row(paper, "where", y, {"mask": mask})


def contiguous(
    paper: Paper, x: PaperTensor, copied: bool = True
) -> PaperTensor:
    """A copy in order of memory, which matrix products of heads need.

    Args:
        copied: whether the gradient has to be copied, too.
    """
    y = _new(x)
    if copied:
        return _row(paper, "contiguous", y, {"x": x})
    paper.write("contiguous", (x,), (y,), gives=((x, "g"),))
    return y


def repeat(
    paper: Paper, x: PaperTensor, times: int, copied: bool = True
) -> PaperTensor:
    """``x.repeat_interleave(times)``: saves nothing.

    Args:
        copied: whether forward it is a copy, and no view of x.
    """
    y = (_new if copied else _view)(x, x.elements * times)
    return _row(paper, "repeat", y, {"x": x})


def matmul(
    paper: Paper,
    x: PaperTensor,
    y: PaperTensor,
    elements: int,
    watches: tuple[PaperTensor, ...] = (),
) -> PaperTensor:
    """``x @ y``: saves both."""
    x, y = _autocast(paper, x), _autocast(paper, y)
    return _row(
        paper,
        "matmul",
        _new(x, elements),
        {"y": y, "x": x},
        saves=_factors(x, y),
        watches=watches,
    )


def softmax(paper: Paper, x: PaperTensor) -> PaperTensor:
    """Saves its output: under autocast 16 bits on a CPU, fp32 on CUDA."""
    given = _fp32(paper, x)
    y = _new(given)
    return _row(paper, "softmax", y, {"x": given}, saves=(y,), watches=(x,))


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
    kept: tuple[PaperTensor, ...] = (k, v)
    if not folds:
        # the gradient of one token is in order of memory
        q = contiguous(paper, q, copied=times == 1 and tokens > 1)
        if times == 1:
            k = contiguous(paper, k, copied=tokens > 1)
    raw = matmul(paper, q, k, scores)
    scaled = scale(paper, raw)
    mask = constant(paper, tokens * tokens, 1)
    reads = {"x": scaled, "mask": mask}
    masked = _row(paper, "mask", _new(scaled), reads, saves=(mask,))
    weights = softmax(paper, masked)
    kept += (scaled, mask, weights)  # variables until attention returns
    if drop:
        weights = dropout(paper, weights)
        kept += (weights,)
    if times == 1 and not folds:
        v = contiguous(paper, v, copied=False)
    return matmul(paper, weights, v, q.elements, watches=kept)


def dropped_attention(
    paper: Paper,
    q: PaperTensor,
    k: PaperTensor,
    v: PaperTensor,
    *,
    scores: int,
    tokens: int,
    folds: bool,
) -> PaperTensor:
    """``F.scaled_dot_product_attention`` with dropout on a CPU, which has no
    fused kernel for it: PyTorch's ``_scaled_dot_product_attention_math``.

    It computes in fp32, under autocast, too, and saves copies of q, k and v,
    the softmax of the scores, dropout's mask, and the product of both. On a
    GPU it is :func:`fused_attention`.

    Args:
        scores: batch · heads · tokens².
        tokens: of a sequence.
        folds: whether batch and heads are one dimension without a copy.
    """
    itemsize = q.itemsize
    autocast, paper.autocast = paper.autocast, None
    wide = tuple(cast(paper, t, 4) for t in (q, k, v))
    query = scale(paper, wide[0])
    held = query, *wide
    if tokens > 1:
        held += (constant(paper, tokens * tokens, 4),)  # the causal mask
    key, value = scale(paper, wide[1]), wide[2]
    left, right = query, key
    dense = folds or tokens == 1  # what was scaled or cast
    if not dense:
        left, right = (
            contiguous(paper, t, copied=False) for t in (query, key)
        )
    raw = matmul(paper, left, right, scores, watches=(key,))
    weights = dropout(paper, softmax(paper, raw))
    given = cast(paper, weights, itemsize)  # what it returns beside y
    if not (dense if itemsize < 4 else folds):
        value = contiguous(paper, value, copied=False)
    held += (given,)
    y = matmul(paper, weights, value, q.elements, watches=held)
    paper.autocast = autocast
    return cast(paper, y, itemsize, watches=held)


def cap(paper: Paper, x: PaperTensor) -> PaperTensor:
    """``tanh(x / c) * c``: saves the tanh."""
    return scale(paper, of_output(paper, scale(paper, x), "tanh"))


def capped_attention(
    paper: Paper,
    q: PaperTensor,
    k: PaperTensor,
    v: PaperTensor,
    mask: PaperTensor,
    *,
    scores: int,
    kv_heads: int,
    times: int,
    batch: int,
    copies: bool,
) -> tuple[PaperTensor, PaperTensor]:
    """Attention operator by operator, its scores capped, as transformers'
    Gemma 2 has it.

    Saves copies of q, k and v, the tanh of the scores, their softmax in fp32,
    and its cast to the dtype of q.

    Args:
        mask: what is added to the scores.
        scores: numbers in the matrix of scores.
        kv_heads: heads of keys and values, each shared by ``times`` queries.
        batch: sequences.
        copies: whether heads and tokens change places in the result.

    Returns:
        The softmax, and the result.
    """
    itemsize, folds = q.itemsize, 1 in (batch, kv_heads * times)
    shared = k, v
    if times > 1:
        k, v = (repeat(paper, t, times, kv_heads > 1) for t in (k, v))
    dense = folds or (times > 1 and kv_heads > 1)
    left = q if folds else contiguous(paper, q, copied=False)
    right = k if dense else contiguous(paper, k, copied=False)
    raw = matmul(paper, left, right, scores)
    masked = add(paper, cap(paper, scale(paper, raw)), mask)
    weights = softmax(paper, cast(paper, masked, 4))
    paper.last.watches += (masked,)
    weights = cast(paper, weights, itemsize, watches=(masked,))
    value = v if dense else contiguous(paper, v, copied=False)
    y = matmul(paper, weights, value, q.elements)
    held = *shared, k, v, weights
    paper.last.watches += held
    if copies:
        y = contiguous(paper, y)
        paper.last.watches += held
    return weights, y


def cross_entropy(
    paper: Paper, logits: PaperTensor, targets: PaperTensor
) -> PaperTensor:
    """``F.cross_entropy``: saves the log-probabilities.

    Autocast has them in fp32. CUDA's leaves the log-softmax in 16 bits, and
    saves its result and an fp32 copy of it. At the worst moment of the
    backward pass three tensors of the logits' size are alive: what it saved,
    and two gradients.
    """
    given = logits
    if paper.autocast is not None and paper.lists == "cpu":
        given = cast(paper, logits, 4)
    logp = of_output(paper, given, "log_softmax")
    last = _fp32(paper, logp)
    return _row(
        paper,
        "nll_loss",
        _new(last, 1),
        {"x": last},
        saves=(last, targets),
        extra=last.itemsize,
        watches=(logits, given, logp),
    )


def loss_in_chunks(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    targets: PaperTensor,
    vocabulary: int,
    chunks: int,
) -> PaperTensor:
    """The head and the loss as in ``membudget.models.chunked_loss``.

    Each chunk is checkpointed and saves its rows of x, which are there as a
    whole. So at most one chunk's logits and their gradients are alive.
    """
    size = -(-targets.elements // chunks)
    sizes = [
        min(size, targets.elements - start)
        for start in range(0, targets.elements, size)
    ]
    width = x.elements // targets.elements
    parts = split(paper, x, tuple(width * size for size in sizes))
    loss: PaperTensor | None = None
    labelled = split(paper, targets, tuple(sizes))
    for rows, labels in zip(parts, labelled, strict=True):
        start = len(paper.rows)
        with paper.inside("head"):
            logits = linear(paper, rows, weight, vocabulary)
        part = cross_entropy(paper, logits, labels)
        paper.checkpoint(start)
        if loss is None:  # the sum begins with a zero of Python's
            loss = _new(part)
            paper.write("add", (part,), (loss,), gives=((part, "g"),))
        else:
            loss = add(paper, loss, part)
    return scale(paper, told(loss))


def embedding(
    paper: Paper,
    table: PaperTensor,
    places: PaperTensor,
    width: int,
) -> PaperTensor:
    """Rows of a table: saves the places; the gradient is a whole table."""
    y = PaperTensor(places.elements * width, table.itemsize)
    reads = {"w": table, "places": places}
    return _row(paper, "embedding", y, reads, saves=(places,))


def take(
    paper: Paper, x: PaperTensor, places: PaperTensor, elements: int
) -> PaperTensor:
    """``x[places]``: saves the places; the gradient is written into zeros."""
    reads = {"x": x, "places": places}
    return _row(paper, "index", _new(x, elements), reads, saves=(places,))


def routed(
    paper: Paper,
    logits: PaperTensor,
    tokens: int,
    active: int,
    normalized: bool,
) -> tuple[PaperTensor, PaperTensor]:
    """The experts with the most probability, as transformers' routers have
    them: of ``softmax(logits.float())`` the largest, in fp32.

    It saves the softmax, the places of the largest and, where they are
    divided by their sum, a copy of them, and the sum.

    Args:
        tokens: in the batch.
        active: experts that are taken for each.
        normalized: whether they are divided by their sum.

    Returns:
        The probabilities, and the places, 8 bytes each.
    """
    weights = softmax(paper, cast(paper, logits, 4))
    count = tokens * active
    largest, places = _new(weights, count), PaperTensor(count, 8, False)
    paper.write(
        "topk",
        (weights,),
        (largest, places),
        saves=(places,),
        **_each(x=weights),
    )
    places.trained = False
    if normalized:
        largest = _shares(paper, largest, tokens)
    return largest, places


def _shares(paper: Paper, x: PaperTensor, rows: int) -> PaperTensor:
    """``x /= x.sum(dim=-1)``, in place, with a copy of x for backward."""
    total = _new(x, rows)
    paper.write("sum", (x,), (total,), gives=((x, "g"),))
    y, n = _view(x), x.bytes
    copied = (_new(x),) if x.trained else ()
    made = "a", "b", "c", "r"
    paper.write(
        "div",
        (x, total),
        (y, *copied),
        saves=(*copied, total),
        steps=(
            *((name, n) for name in made),
            *((name, 0) for name in made[:3]),
            ("x", n),
            ("saved", 0),
            ("t", total.bytes),
            ("r", 0),
        ),
        gives=((x, "x"), (total, "t")),
    )
    return y


def grouped(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    ends: PaperTensor,
    outputs: int,
) -> PaperTensor:
    """``F.grouped_mm``: the rows of x in groups, each times a matrix of its
    own. It saves x and where the groups end, 4 bytes each.

    Args:
        outputs: numbers in the output.
    """
    x = cast(paper, x, weight.itemsize)
    reads = {"w": weight, "x": x, "ends": ends}
    saves = *_factors(x, weight), ends
    return _row(paper, "grouped_mm", _new(x, outputs), reads, saves=saves)


def weigh(paper: Paper, x: PaperTensor, by: PaperTensor) -> PaperTensor:
    """Rows of x times a number each: saves both; the wider dtype wins."""
    y = PaperTensor(x.elements, max(x.itemsize, by.itemsize))
    narrow = [t.itemsize < y.itemsize for t in (x, by)]
    steps: list[Step] = [("f" if narrow[0] else "x", y.bytes)]
    if by.trained:
        steps.append(("a", y.bytes))
    steps.append(("saved", 0))
    if narrow[0]:
        steps += [("x", x.bytes), ("f", 0)]
    if by.trained:
        total = "s" if narrow[1] else "w"
        steps += [(total, by.elements * y.itemsize), ("a", 0)]
        steps += [("w", by.bytes), ("s", 0)] if narrow[1] else []
    paper.write(
        "mul",
        (x, by),
        (y,),
        saves=_factors(x, by),
        steps=tuple(steps),
        gives=((x, "x"), (by, "w")),
    )
    return y


def sum_of(paper: Paper, x: PaperTensor, elements: int) -> PaperTensor:
    """The sum of neighbouring rows: saves nothing."""
    y = _new(x, elements)
    if elements < x.elements:
        return _row(paper, "sum", y, {"x": x})
    paper.write("sum", (x,), (y,), gives=((x, "g"),))
    return y


def constant(paper: Paper, elements: int, itemsize: int) -> PaperTensor:
    """A tensor that the forward pass makes from nothing."""
    y = PaperTensor(elements, itemsize, False)
    return _row(paper, "constant", y, {})


def convolution(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    elements: int,
    bias: PaperTensor | None = None,
) -> PaperTensor:
    """``F.conv2d`` with ``elements`` numbers of output: saves its input."""
    reads = _operands(paper, x, weight, bias)
    return _row(
        paper,
        "convolution",
        PaperTensor(elements, reads["x"].itemsize),
        reads,
        saves=(reads["x"], reads["w"]),
        watches=(x,),
    )


def batch_norm(
    paper: Paper,
    x: PaperTensor,
    weight: PaperTensor,
    bias: PaperTensor,
) -> PaperTensor:
    """Saves its input, mean and 1/σ of each channel in the weight's dtype."""
    return _row(
        paper,
        "batch_norm",
        _new(x),
        {"x": x, "w": weight, "b": bias},
        saves=(x,),
        extra=2 * weight.elements * _statistic(paper, weight),
    )


def max_pool(paper: Paper, x: PaperTensor, elements: int) -> PaperTensor:
    """Saves its input, and 8 bytes for the place of each maximum."""
    return _row(
        paper,
        "max_pool",
        _new(x, elements),
        {"x": x},
        saves=(x,),
        extra=8 * elements,
    )


def mean(paper: Paper, x: PaperTensor, elements: int) -> PaperTensor:
    """The mean over some dimensions: saves nothing."""
    return _row(paper, "mean", _new(x, elements), {"x": x})
