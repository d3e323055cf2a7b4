"""The solutions of the page on 4 bits against real tensors."""

import pytest
import torch

from membudget.adapters import Quantised4, quantise
from membudget.exercises.four_bits import four_bit_bytes, product

from .judging import rejects


@pytest.mark.parametrize(
    "shapes", [[(64, 64)], [(300, 320), (8, 8), (1, 64)], []]
)
def test_bytes_are_those_of_tensors(shapes):
    held = sum(quantise(torch.randn(shape)).nbytes for shape in shapes)
    others = torch.zeros(1000, dtype=torch.bfloat16)
    counts = [torch.Size(shape).numel() for shape in shapes]
    assert four_bit_bytes(counts, 1000) == held + others.nbytes


def test_product_is_the_layer():
    layer = Quantised4(torch.randn(128, 64))
    x = torch.randn(5, 64)
    results = []
    for way in (layer, lambda x: product(x, layer.bits)):
        leaf = x.clone().requires_grad_()
        y = way(leaf)
        y.square().sum().backward()
        results.append((y, leaf.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda x, bits: bits.dequantise(x.dtype), "no graph"),
        (lambda x, bits: x.detach() @ bits.dequantise(x.dtype).T, "no graph"),
        (lambda x, bits: 3, "a tensor is needed"),
        (
            lambda x, bits: torch.zeros(5, 64, requires_grad=True) * 1,
            "no gradient comes back",
        ),
    ],
)
def test_what_is_no_product(answer, words):
    rejects("product", answer, words)
