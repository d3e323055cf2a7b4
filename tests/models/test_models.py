"""The course's models and data."""

import hashlib
import zlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget import data
from membudget.measuring import witness
from membudget.models import (
    GPT,
    Block,
    Llama,
    LlamaBlock,
    MLPBlock,
    attention,
    chain,
    chunked_loss,
    convnet,
    mlp,
    mlp_blocks,
    rotary,
    rotate,
)

torch.set_num_threads(1)


def test_mlp_has_depth_linear_layers_and_no_activation_at_the_end():
    model = mlp(inputs=3, width=5, depth=4, outputs=2)
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Linear, nn.ReLU] * 3 + [nn.Linear]
    shapes = [tuple(m.weight.shape) for m in model if type(m) is nn.Linear]
    assert shapes == [(5, 3), (5, 5), (5, 5), (2, 5)]
    assert model(torch.zeros(7, 3)).shape == (7, 2)
    images, _ = data.digits()
    assert mlp()(images[:3]).shape == (3, 10)


def test_a_chain_is_of_equal_stages_with_an_activation_each():
    torch.manual_seed(0)
    model = chain(width=5, depth=3)
    assert len(model) == 3
    for stage in model:
        linear, activation = stage
        assert type(linear) is nn.Linear and type(activation) is nn.ReLU
        assert linear.weight.shape == (5, 5)
        assert linear.bias.shape == (5,)
    x = torch.randn(7, 5)
    expected = x
    for stage in model:
        expected = (expected @ stage[0].weight.T + stage[0].bias).relu()
    torch.testing.assert_close(model(x), expected)
    assert len({p.data_ptr() for p in model.parameters()}) == 6


def test_the_sizes_of_chains():
    assert len(chain()) == 16
    assert chain()(torch.zeros(2, 64)).shape == (2, 64)
    assert len(chain(8, 1)) == 1
    with torch.device("meta"):
        deep = chain(1024, 20)  # of the lab
    assert sum(p.numel() for p in deep.parameters()) == 20 * 1024 * 1025


def test_an_mlp_block_adds_to_its_input():
    torch.manual_seed(0)
    block = MLPBlock(6)
    x = torch.randn(2, 3, 6)
    normed = F.layer_norm(x, (6,), block.norm.weight, block.norm.bias)
    up = normed @ block.up.weight.T + block.up.bias
    down = F.gelu(up) @ block.down.weight.T + block.down.bias
    torch.testing.assert_close(block(x), x + down)
    assert up.shape == (2, 3, 24)
    names = [name for name, _ in block.named_children()]
    assert names == ["norm", "up", "gelu", "down"]  # in the order they run
    assert block(x[0]).shape == (3, 6)
    nn.init.zeros_(block.down.weight)
    nn.init.zeros_(block.down.bias)
    assert torch.equal(block(x), x)


def test_mlp_blocks_are_blocks_and_a_head():
    model = mlp_blocks(width=6, depth=3, outputs=2)
    assert type(model) is nn.Sequential
    assert [type(m) for m in model] == [MLPBlock] * 3 + [nn.Linear]
    assert len({p.data_ptr() for p in model.parameters()}) == 20
    x = torch.randn(5, 6)
    expected = x
    for layer in model:
        expected = layer(expected)
    assert torch.equal(model(x), expected)
    assert model(x).shape == (5, 2)


def test_the_sizes_of_mlp_blocks():
    assert len(mlp_blocks()) == 5
    assert mlp_blocks()(torch.zeros(2, 64)).shape == (2, 10)
    assert [type(m) for m in mlp_blocks(8, 1)] == [MLPBlock, nn.Linear]
    with torch.device("meta"):
        deep = mlp_blocks(1024, 32)  # of the lab
    of_block = 2 * 1024 + 8 * 1024**2 + 4096 + 1024
    total = sum(p.numel() for p in deep.parameters())
    assert total == 32 * of_block + 10 * 1025


def test_a_block_is_attention_and_mlp_around_a_residual():
    """Written out once more, without the fused operator."""
    torch.manual_seed(0)
    block = Block(width=12, heads=3).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = block.qkv(block.norm1(x)).split(12, dim=-1)
    mask = torch.ones(5, 5).tril().log()
    heads = []
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        scores = q[..., part] @ k[..., part].mT / 2 + mask
        heads.append(scores.softmax(-1) @ v[..., part])
    y = x + block.out(torch.cat(heads, dim=-1))
    y = y + block.down(F.gelu(block.up(block.norm2(y))))
    torch.testing.assert_close(block(x), y, rtol=0, atol=1e-12)


def test_the_halves_of_a_block_are_the_block():
    block, x = Block(8, heads=2), torch.rand(2, 3, 8)
    attention, mlp = block.halves()
    assert torch.equal(mlp(attention(x)), block(x))
    ours = [p for half in (attention, mlp) for p in half.parameters()]
    assert set(ours) == set(block.parameters())
    assert len(ours) == len(set(ours))


def test_attention_operator_by_operator_is_the_fused_one():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(q, k, v), fused)
    twice = attention(q, k, v, lambda weights: 2 * weights)
    torch.testing.assert_close(twice, 2 * fused)


def test_the_weights_of_attention_see_no_later_token():
    seen = []
    q, k, v = torch.randn(3, 2, 3, 5, 4)
    attention(q, k, v, lambda weights: seen.append(weights) or weights)
    (weights,) = seen
    assert weights.shape == (2, 3, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    assert (weights.triu(1) == 0).all() and (weights.tril() > 0).sum() == 90


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda fused: Block(12, 3, fused), ()),
        (lambda fused: LlamaBlock(12, 3, 1, 20, fused), (rotary(5, 4),)),
    ],
)
def test_fused_or_not_a_block_is_the_same(make, given):
    torch.manual_seed(0)
    fused, other = make(True), make(False)
    other.load_state_dict(fused.state_dict())
    fused, other = fused.double(), other.double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(fused(x, *given), other(x, *given))


@pytest.mark.parametrize(("fused", "places"), [(True, 2), (False, 3)])
def test_dropout_in_a_block(fused, places, monkeypatch):
    """After the softmax (not fused only) and before each of the sums."""
    torch.manual_seed(0)
    block, plain = Block(8, 2, fused, 0.5), Block(8, 2, fused)
    plain.load_state_dict(block.state_dict())
    x = torch.randn(2, 5, 8)
    assert not torch.equal(block(x), block(x))
    torch.testing.assert_close(block.eval()(x), plain(x))
    calls, drop = [], F.dropout

    def dropout(*args):
        calls.append(args[1:])
        return drop(*args)

    monkeypatch.setattr(F, "dropout", dropout)
    block.train()(x)
    assert calls == [(0.5, True)] * places
    plain(x)
    assert len(calls) == places


@pytest.mark.parametrize("make", [GPT, Llama])
def test_language_models_give_logits_for_every_token(make):
    model = make(11, width=8, depth=3, heads=2)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    logits = model(tokens)
    assert logits.shape == (2, 6, 11)
    assert torch.equal(model.head(model.hidden(tokens)), logits)
    assert len(model.blocks) == 3
    assert model.head.bias is None
    assert make().head.out_features == 256  # bytes, by default


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [GPT, Llama])
def test_language_models_do_not_look_ahead(make, fused):
    torch.manual_seed(0)
    model = make(11, width=8, depth=2, heads=2, fused=fused)
    tokens = torch.randint(11, (1, 8))
    before = model(tokens)
    tokens[0, 5] = (tokens[0, 5] + 1) % 11
    after = model(tokens)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    changed = (before - after).abs().amax(-1)[0]
    assert (changed[5:] > 1e-4).all()


@pytest.mark.parametrize("make", [GPT, Llama])
def test_language_models_know_the_order_of_their_tokens(make):
    torch.manual_seed(0)
    model = make(11, width=8, depth=1, heads=2)
    a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert (model(a)[0, 2] - model(b)[0, 2]).abs().max() > 1e-3


@pytest.mark.parametrize("make", [GPT, Llama])
def test_tied_weights_are_one_parameter(make):
    tied, loose = (
        make(11, width=8, heads=2, tied=True),
        make(11, width=8, heads=2),
    )
    assert tied.head.weight is tied.token.weight
    assert loose.head.weight is not loose.token.weight
    counts = [sum(p.numel() for p in m.parameters()) for m in (tied, loose)]
    assert counts[1] - counts[0] == 11 * 8
    tied(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    assert tied.token.weight.grad.shape == (11, 8)


def test_gpt_hands_its_options_to_its_blocks():
    model = GPT(depth=3, fused=False, dropout=0.25)
    found = [(block.fused, block.dropout) for block in model.blocks]
    assert found == [(False, 0.25)] * 3
    assert [(b.fused, b.dropout) for b in GPT().blocks] == [(True, 0.0)] * 2


# Llama -------------------------------------------------------------------


def test_positions_turn_pairs_of_numbers():
    """Pair i of position t turns by t · 500 000^(−2i/size)."""
    turns = rotary(5, 8)
    assert turns.shape == (5, 4) and turns.dtype == torch.complex64
    torch.testing.assert_close(turns.abs(), torch.ones(5, 4))
    for t in range(5):
        for i in range(4):
            angle = torch.tensor(t * 500_000 ** (-2 * i / 8))
            expected = torch.complex(angle.cos(), angle.sin())
            torch.testing.assert_close(turns[t, i], expected)
    x = torch.randn(2, 3, 5, 8)
    y = rotate(x, turns)
    assert y.shape == x.shape
    torch.testing.assert_close(y[:, :, 0], x[:, :, 0])  # the first: not
    first, second = x[..., 4, 2], x[..., 4, 3]
    c, s = turns[4, 1].real, turns[4, 1].imag
    torch.testing.assert_close(y[..., 4, 2], first * c - second * s)
    torch.testing.assert_close(y[..., 4, 3], first * s + second * c)
    assert rotate(x.bfloat16(), turns).dtype == torch.bfloat16


def test_turned_vectors_know_the_distance_of_their_positions_alone():
    torch.manual_seed(0)
    turns = rotary(20, 6)
    q, k = torch.randn(2, 6)
    q, k = (rotate(v.expand(20, 6), turns) for v in (q, k))
    products = q @ k.T
    for distance in range(-10, 10):
        line = products.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))
    assert products.diagonal().std() < 1e-5 < products[:, 0].std()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_llama_block_written_out_once_more(kv_heads):
    torch.manual_seed(0)
    block = LlamaBlock(16, 4, kv_heads, 20).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    turns = rotary(5, 4)

    def norm(x, weight):
        rms = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return (x / rms) * weight

    normed = norm(x, block.norm1.weight)
    q, k, v = (
        part(normed).unflatten(-1, (-1, 4)).transpose(1, 2)
        for part in (block.query, block.key, block.value)
    )
    q, k = rotate(q, turns), rotate(k, turns)
    assert (q.shape[1], k.shape[1]) == (4, kv_heads)
    heads = []
    for head in range(4):
        shared = head * kv_heads // 4
        scores = q[:, head] @ k[:, shared].mT / 2
        scores = scores + torch.ones(5, 5).tril().log()
        heads.append(scores.softmax(-1) @ v[:, shared])
    y = x + block.out(torch.cat(heads, dim=-1))
    normed = norm(y, block.norm2.weight)
    gate = block.gate(normed)
    y = y + block.down(gate * gate.sigmoid() * block.up(normed))
    torch.testing.assert_close(block(x, turns), y, rtol=0, atol=1e-6)


def test_a_llama_block_has_no_biases():
    block = LlamaBlock(16, 4, 2, 20)
    assert not any("bias" in name for name, _ in block.named_parameters())
    sizes = [tuple(m.weight.shape) for m in block.children()]
    assert sizes == [
        (16,),
        (16, 16),
        (8, 16),
        (8, 16),
        (16, 16),
        (16,),
        (20, 16),
        (20, 16),
        (16, 20),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block(10, 4), "width 10 is not a multiple of 4 heads: use a"),
        (lambda: GPT(width=10, heads=4), "width 10 is not a multiple of 4"),
        (lambda: Llama(width=16, heads=3), "width 16 is not a multiple of 3"),
        (
            lambda: Llama(heads=4, kv_heads=3),
            "4 heads cannot share 3 heads",
        ),
        (
            lambda: Llama(width=12, heads=4),
            "3 numbers for each head cannot",
        ),
    ],
)
def test_heads_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


# Convolutional nets ------------------------------------------------------


def test_a_convolutional_net():
    model = convnet((4, 6), inputs=2, outputs=5)
    stage = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]
    end = [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    assert [type(layer) for layer in model] == stage * 2 + end
    convolutions = [m for m in model if type(m) is nn.Conv2d]
    shapes = [tuple(m.weight.shape) for m in convolutions]
    assert shapes == [(4, 2, 3, 3), (6, 4, 3, 3)]
    assert all(m.bias is None for m in convolutions)
    for side in (4, 8, 13):
        assert model(torch.zeros(3, 2, side, side)).shape == (3, 5)
    assert model[:4](torch.zeros(3, 2, 8, 8)).shape == (3, 4, 4, 4)
    assert convnet()(torch.zeros(2, 3, 8, 8)).shape == (2, 10)  # in colour


@pytest.mark.parametrize("make", [GPT, Llama])
def test_a_language_model_learns(make):
    torch.manual_seed(0)
    model = make(vocabulary=4, width=16, depth=1, heads=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.arange(9).remainder(4).expand(8, 9)
    for _ in range(60):
        logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_digits_are_sixteenths(dtype):
    images, labels = data.digits(dtype)
    assert images.shape == (1797, 64)
    assert images.dtype == dtype
    assert labels.dtype == torch.int64
    assert images.min() == 0 and images.max() == 1
    assert torch.equal((images * 16).round() / 16, images)
    assert labels.unique().tolist() == list(range(10))
    assert labels.bincount().min() > 170


def test_text_is_the_same_on_every_machine():
    text = data.text()
    assert text.ndim == 1 and text.dtype == torch.int64
    found = bytes(text.tolist())
    assert hashlib.sha256(found).hexdigest().startswith("2f623e7ab186b385")
    assert found.count(b" the ") > 10_000


def test_text_is_as_hard_as_prose():
    """The help texts of Python are 3.4 to 3.6 times smaller under zlib."""
    text = bytes(data.text().tolist())
    assert 3.5 < len(text) / len(zlib.compress(text, 9)) < 4


# The loss in chunks ------------------------------------------------------


def head_of(shape, vocabulary=13):
    """A head, what it reads, and targets."""
    torch.manual_seed(0)
    hidden = torch.randn(*shape, 6).double().requires_grad_()
    head = nn.Linear(6, vocabulary, bias=False).double()
    return head, hidden, torch.randint(vocabulary, shape)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 15, 100])
def test_a_loss_in_chunks_is_the_loss(chunks):
    """Whether or not the chunks divide the 15 tokens."""
    head, hidden, targets = head_of((3, 5))
    plain = F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    found = chunked_loss(head, hidden, targets, chunks)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-14)
    wanted = [hidden, head.weight]
    torch.testing.assert_close(
        torch.autograd.grad(found, wanted),
        torch.autograd.grad(plain, wanted),
        rtol=0,
        atol=1e-14,
    )


@pytest.mark.parametrize(
    ("chunks", "forward", "backward"),
    [(1, [15], [15]), (4, [4, 4, 4, 3], [3, 4, 4, 4])],
)
def test_each_chunks_logits_are_made_again(chunks, forward, backward):
    head, hidden, targets = head_of((3, 5))
    rows = []
    head.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    loss = chunked_loss(head, hidden, targets, chunks)
    assert rows == forward
    loss.backward()
    assert rows[len(forward) :] == backward


def test_targets_for_other_tokens():
    head, hidden, targets = head_of((3, 5))
    message = r"targets for \[5, 3\] tokens, and hidden is of \[3, 5\]"
    with pytest.raises(ValueError, match=message):
        chunked_loss(head, hidden, targets.mT, 2)


@pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="from torch 2.13 on"
)
def test_pytorchs_own_loss_without_logits():
    """It needs less than a loss in chunks, which needs a part of the plain
    one; without options it chunks nothing. The gradients agree."""
    torch.manual_seed(0)
    head = nn.Linear(256, 8192, bias=False)
    x, y = torch.randn(2048, 256), torch.randint(8192, (2048,))
    x.requires_grad_()
    options = nn.LinearCrossEntropyOptions()
    ways = [
        lambda: F.cross_entropy(head(x), y),
        lambda: F.linear_cross_entropy(x, head.weight, y),
        lambda: chunked_loss(head, x[None], y[None], 16),
        lambda: F.linear_cross_entropy(x, head.weight, y, options=options),
    ]
    most = [witness(lambda loss=loss: loss().backward()) for loss in ways]
    assert most[0] == most[1] > 7 * most[2] and most[2] > most[3]
    gradients = [torch.autograd.grad(loss(), head.weight)[0] for loss in ways]
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0])
