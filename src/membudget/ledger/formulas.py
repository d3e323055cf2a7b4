"""Activations in closed form: what the rows of the ledger add up to.

Symbols: b sequences of t tokens, width D, a heads, E the width of keys (and
of values; D_kv in chapter 2), F the hidden width of the MLP, V the
vocabulary, s bytes of a number, 2 or 4. All results in bytes, for models
without autocast. A block's own input counts, its output does not: that is the
next block's input.
"""

from membudget.checks import instance, whole
from membudget.ledger.networks import Transformer


def block_activations(
    shape: Transformer, batch: int, tokens: int, itemsize: int = 4
) -> int:
    """What one block of the course's models saves for the backward pass.

    GPT-2's block with fused attention: b·t·(16·s·D + 4·s + 4·a). The 16: the
    inputs of two norms, of qkv and of up (4), q, k and v (3), attention's
    output (1), the input and the output of GELU (4 + 4). Two numbers for
    each norm of a token, and 4 bytes for each head of a token.

    Llama's: b·t·(s·(4·D + 2·E + 4·F) + 16·D + 8 + 4·a): in s bytes the
    outputs of the norms, q, k, v, attention's output and the four tensors of
    the gated MLP; in fp32, in a 16-bit model too, the input of each norm and
    the normalised input (4 bytes each), and 1/rms.

    Without fused attention the 4·a go, and b·a·t² scores of s bytes come,
    with a mask of t² bytes; with dropout three times as many scores, and two
    masks of D numbers for each token.
    (Compare Korthikanti et al. 2022, arXiv 2205.05198, section 4.1, and
    :func:`korthikanti`.)
    """
    batch, tokens, s = _checked(shape, batch, tokens, itemsize)
    d, n = shape.width, batch * tokens
    scores = batch * shape.heads * tokens * tokens
    if shape.family == "gpt":
        total = n * (16 * s * d + 4 * s)
        if shape.dropout:
            total += 2 * s * n * d
    else:
        k, f = shape.shared, shape.hidden
        if not shape.fused:  # k and v are repeated for every head
            k = d
        norms = 2 * (4 * d + 4 * d + 4)  # two, in fp32
        total = n * (s * (4 * d + 2 * k + 4 * f) + norms)
    if shape.fused:
        return total + 4 * n * shape.heads
    return total + tokens**2 + s * scores * (3 if shape.dropout else 1)


def head_activations(
    shape: Transformer, batch: int, tokens: int, itemsize: int = 4
) -> int:
    """What is saved after the blocks: norm, head and loss.

    b·t·s·V for the log-probabilities, the last norm's tensors, and two
    numbers of the loss. (The loss's own backward pass needs three tensors of
    b·t·V numbers at once.)
    """
    d, n, s = shape.width, batch * tokens, itemsize
    norm = n * (2 * s * d + 2 * s)
    if shape.family == "llama":
        norm = n * (s * d + 4 * d + 4 * d + 4)
    return norm + n * s * shape.vocabulary + 2 * s


def activations(
    shape: Transformer, batch: int, tokens: int, itemsize: int = 4
) -> int:
    """All activations when the forward pass is over, in closed form.

    The blocks, what comes after them, and before them the positions: 8·t
    bytes of their numbers (``"gpt"``), or of the turns, 8 bytes for each
    pair of a head's numbers (``"llama"``).
    """
    batch, tokens, itemsize = _checked(shape, batch, tokens, itemsize)
    blocks = shape.depth * block_activations(shape, batch, tokens, itemsize)
    place = 8 * tokens
    if shape.family == "llama":
        place *= shape.width // shape.heads // 2
    return blocks + place + head_activations(shape, batch, tokens, itemsize)


def korthikanti(batch: int, tokens: int, width: int, heads: int) -> int:
    """s·b·h·(34 + 5·a·s/h): the usual formula for a block in 16 bits.

    Of Korthikanti et al. (2022, arXiv 2205.05198, equation 1), in its
    letters: s tokens, batch b, width h, a heads. It holds for a 16-bit
    GPT-2 block with dropout, masks of one byte and attention operator by
    operator; fused attention does away with the second term.
    """
    s, b = whole(tokens, "tokens"), whole(batch, "batch")
    h, a = whole(width, "width"), whole(heads, "heads")
    return s * b * (34 * h + 5 * a * s)


def _checked(
    shape: Transformer, batch: int, tokens: int, itemsize: int
) -> tuple[int, int, int]:
    instance(shape, Transformer, "the shape", "a Transformer")
    return (
        whole(batch, "batch"),
        whole(tokens, "tokens"),
        whole(itemsize, "itemsize"),
    )
