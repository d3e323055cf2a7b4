"""The exercises of the page on 4 bits: bytes, and a product to repair."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from membudget.adapters import FourBits, quantise
from membudget.exercises.compare import EXACT, Seen
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.guard import Problem
from membudget.exercises.observe import answer, doubles, found, is_empty
from membudget.measuring import PeakTracker

# A model's bytes


def four_bit_bytes(matrices, others):
    total = 2 * others
    for weights in matrices:
        scales = weights // 64
        groups = (scales + 255) // 256
        total += weights // 2 + scales + 4 * groups + 4
    return total


check_four_bit_bytes = Exercise(
    four_bit_bytes,
    cases=[
        given(matrices=[262144, 4096, 19200], others=1000),
        given(matrices=[16384], others=0),
        given(matrices=[4096 * 14336] * 3, others=128256 * 4096),
        given(matrices=[], others=7),
    ],
    observe=answer,
    mistakes="""
        + scales + 4 * groups + 4 =>
            these are the codes alone. Each block of 64 has a scale, a byte,
            each 256 scales share 4 bytes, and a matrix has one mean.
        scales + 4 * groups + 4 => 4 * scales
            the scales are in fp32 here, 4 bytes each: with double
            quantisation a scale is one byte, and 256 of them share 4.
        4 * groups + 4 => 0
            the numbers of the second quantisation are missing: 4 bytes for
            256 scales, and 4 for their mean.
        + 4 * groups =>
            the second quantisation needs a scale itself, 4 bytes for each
            256 scales.
        groups + 4 => groups
            the mean of its scales, 4 bytes for each matrix, is missing.
        (scales + 255) // 256 => scales // 256
            the last group of scales may be smaller than 256, and has its
            4 bytes, too: round up.
        4 * groups => groups
            what 256 scales share is in fp32, 4 bytes.
        weights // 2 => weights * 2
            in 4 bits two weights share a byte.
        weights // 2 => weights
            a weight takes 4 bits, half a byte.
        2 * others => 4 * others
            what stays in 16 bits takes 2 bytes a number.
        2 * others => others // 2
            the others are not in 4 bits: 2 bytes a number.
        2 * others => 0
            what is not in 4 bits is missing: 2 bytes a number.
        """,
    shown=(
        "Those are the bytes of the tensors that `quantise` makes, with the "
        "embeddings and the head beside them."
    ),
    tolerance=EXACT,
)

# A product that keeps its weight


def product(x, bits):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return F.linear(x, bits.dequantise(x.dtype))

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ bits.dequantise(gradient.dtype)

    return Product.apply(x)


def _product(rows: int, outputs: int, inputs: int) -> Case:
    """What goes in is made by an operator, and nothing else holds it."""

    def make() -> tuple[torch.Tensor, FourBits]:
        leaf = torch.randn(rows, inputs).requires_grad_()
        return leaf, quantise(torch.randn(outputs, inputs))

    return Case(f"{rows} rows, a weight of {outputs} × {inputs}", make)


def _kept(fn: Callable, args: tuple) -> Seen:
    """The product, the gradient of x, and what is alive between the two."""
    leaf, bits = args
    tensors = [t for t in bits if isinstance(t, torch.Tensor)]
    with PeakTracker(leaf, *tensors) as tracker:
        result = fn(leaf * 1, bits)
        if is_empty(result):
            raise Problem
        y = found(fn, result, torch.Tensor, "a tensor")
        kept = tracker.live - tracker.start - y.nbytes
    if not y.requires_grad:
        raise Problem(
            "what your function returns has no graph: call `Product.apply`."
        )
    weights = torch.linspace(-1, 1, y.numel()).view_as(y)
    (y * weights).sum().backward()
    if leaf.grad is None:
        raise Problem("no gradient comes back to x.")
    return Seen(
        {
            "product": doubles(y),
            "gradient of x": doubles(leaf.grad),
            "number of bytes kept": doubles(kept),
        }
    )


LINEAR = "return F.linear(x, bits.dequantise(x.dtype))"
AGAIN = "bits.dequantise(gradient.dtype)"

check_product = Exercise(
    product,
    cases=[_product(5, 64, 192), _product(3, 128, 64)],
    observe=_kept,
    mistakes=f"""
        {LINEAR} => w = bits.dequantise(x.dtype); ctx.save_for_backward(x, w);\
 return F.linear(x, w)
        {AGAIN} => ctx.saved_tensors[1]
        or {LINEAR} => w = bits.dequantise(x.dtype); \
ctx.save_for_backward(w); return F.linear(x, w)
        {AGAIN} => ctx.saved_tensors[0]
        or {LINEAR} => ctx.w = bits.dequantise(x.dtype); \
return F.linear(x, ctx.w)
        {AGAIN} => ctx.w
        or return Product.apply(x) => {LINEAR}
            the dequantised weight is kept until the backward pass, as autograd
            does it. Keep the bits, which are there anyway, and dequantise
            again in `backward`.
        {LINEAR} => ctx.save_for_backward(x); {LINEAR}
            x is kept. It is needed for the gradient of a weight, and this
            weight is frozen.
        gradient @ {AGAIN} => gradient @ {AGAIN}.T
            the gradient of x is gradient @ weight: the weight as it is, of
            shape (outputs, inputs), not transposed.
        """,
    shown=(
        "Product and gradient are right, and nothing is kept between them but "
        "the 4 bits, which are there anyway."
    ),
    two=False,
)
