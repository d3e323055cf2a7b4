"""Bytes saved for backward, against hand counts."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from membudget.measuring import SavedBytes
from membudget.models import GPT, Block

torch.set_num_threads(1)

BATCH, WIDTH = 32, 8
UNIT = 4 * BATCH * WIDTH


def chain(depth, activation):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), activation()]
    return nn.Sequential(*layers)


def saved_by(model, x, *exclude):
    with SavedBytes(*model.parameters(), *exclude) as saved:
        y = model(x)
    y.sum().backward()
    return saved.total


@pytest.mark.parametrize("depth", [1, 2, 4, 9])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
def test_activations_known_by_their_output_save_one_unit_a_layer(
    depth, activation
):
    """The input, and each layer's output: L + 1 units."""
    x = torch.randn(BATCH, WIDTH)
    model = chain(depth, activation)
    assert saved_by(model, x) == (depth + 1) * UNIT
    assert saved_by(model, x, x) == depth * UNIT


@pytest.mark.parametrize("depth", [1, 2, 4, 9])
@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU])
def test_activations_known_by_their_input_save_two(depth, activation):
    """Each layer's input, and the input of its activation: 2L units."""
    x = torch.randn(BATCH, WIDTH)
    assert saved_by(chain(depth, activation), x) == 2 * depth * UNIT


def test_a_transformer_block_saves_sixteen_units_and_its_statistics():
    """1 and 1 (norm's in and out), 3 (q, k, v), 1 (attended), 1 and 1
    (second norm), 4 and 4 (GELU's in and out); mean and deviation of two
    norms; the attention's log-sum-exp for each head."""
    batch, tokens, width, heads = 3, 5, 16, 2
    x = torch.randn(batch, tokens, width, requires_grad=True)
    unit, statistic = 4 * x.numel(), 4 * batch * tokens
    total = saved_by(Block(width, heads), x)
    assert total == 16 * unit + 4 * statistic + heads * statistic


def test_the_blocks_of_a_gpt_share_nothing_but_what_lies_between_them():
    """Each block adds the same bytes: its input is another's output."""
    batch, tokens, width = 2, 4, 8

    def total(depth):
        model = GPT(
            vocabulary=5, context=tokens, width=width, depth=depth, heads=2
        )
        return saved_by(model, torch.zeros(batch, tokens, dtype=torch.int64))

    unit, statistic = 4 * batch * tokens * width, 4 * batch * tokens
    assert total(2) - total(1) == 16 * unit + 6 * statistic
    assert total(3) - total(2) == 16 * unit + 6 * statistic


def test_a_storage_counts_once():
    x = torch.randn(10, requires_grad=True)
    with SavedBytes() as saved:
        y = x * x  # saves x twice
        z = y.view(2, 5)[0] * y[:5]  # two views of y
        w = z.exp()  # saves its result
    assert saved.total == 40 + 40 + 20
    w.sum().backward()


def test_a_view_counts_with_all_of_its_storage():
    x = torch.randn(1000)
    weight = torch.randn(3, requires_grad=True)
    with SavedBytes(weight) as saved:
        y = x[:3] * weight
    assert saved.total == 4000
    y.sum().backward()


def test_excluded_tensors_and_their_views_are_left_out():
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    with SavedBytes(x, weight.t()) as saved:
        y = x @ weight
        z = x[0] * y
    assert saved.total == 0  # the gradients of both need x and weight only
    z.sum().backward()
    with SavedBytes(weight) as saved:
        y = x @ weight
    assert saved.total == x.nbytes
    y.sum().backward()


def test_nothing_is_saved_without_a_graph():
    model, x = chain(3, nn.ReLU), torch.randn(BATCH, WIDTH)
    with SavedBytes() as saved, torch.no_grad():
        model(x)
    assert saved.total == 0


def test_counting_does_not_change_the_gradient():
    model, x = chain(3, nn.GELU), torch.randn(BATCH, WIDTH)
    model(x).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with SavedBytes(*model.parameters()):
        loss = model(x).square().mean()
    loss.backward()
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)


def test_what_is_saved_outside_the_block_is_not_counted():
    x = torch.randn(10, requires_grad=True)
    before = x.exp()
    with SavedBytes() as saved:
        pass
    after = x.exp()
    assert saved.total == 0
    (before + after).sum().backward()


def test_total_grows_while_the_block_runs():
    x = torch.randn(10, requires_grad=True)
    with SavedBytes() as saved:
        totals = []
        for _ in range(3):
            x = x.exp()
            totals.append(saved.total)
    assert totals == [40, 80, 120]


@pytest.mark.parametrize("batch", [4, 64])
def test_autocast_halves_activations_and_adds_copies_of_the_weights(batch):
    """A Linear under bf16 keeps input and weight in 16 bits."""
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(batch, WIDTH)
    x.requires_grad_()
    with (
        SavedBytes(*model.parameters()) as saved,
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = model(x)
    assert saved.total == 2 * batch * WIDTH + 2 * WIDTH * WIDTH
    y.sum().backward()


def test_outside_a_checkpoint_only_its_inputs_are_seen():
    model, x = chain(4, nn.ReLU), torch.randn(BATCH, WIDTH)
    x.requires_grad_()
    with SavedBytes(*model.parameters()) as saved:
        y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    assert saved.total == UNIT
    assert saved_by(model, x) == 5 * UNIT


def test_attention_without_fusion_saves_the_square_of_the_tokens():
    """What fused attention spares: the tokens × tokens matrix."""

    def attend(q):
        return (q @ q.transpose(1, 2)).softmax(-1) @ q

    def total(tokens, function):
        q = torch.randn(1, tokens, 4, requires_grad=True)
        with SavedBytes() as saved:
            y = function(q)
        y.sum().backward()
        return saved.total

    def fused(q):
        q = q[:, None]
        return F.scaled_dot_product_attention(q, q, q)

    assert total(64, attend) == 64 * 4 * 4 + 64 * 64 * 4
    assert total(64, fused) == 64 * 4 * 4 * 2 + 64 * 4


def test_leaves_no_graph_behind():
    """An output that its own operator saves must not keep the graph alive."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with SavedBytes():
        kept = weakref.ref(model(torch.ones(2, 4)).untyped_storage())
    gc.collect()
    assert kept() is None
