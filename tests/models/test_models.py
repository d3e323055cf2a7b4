"""The course's models and data."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget import data
from membudget.models import GPT, Block, chain, mlp

torch.set_num_threads(1)


def test_mlp_has_depth_linear_layers_and_no_activation_at_the_end():
    model = mlp(inputs=3, width=5, depth=4, outputs=2)
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Linear, nn.ReLU] * 3 + [nn.Linear]
    shapes = [tuple(m.weight.shape) for m in model if type(m) is nn.Linear]
    assert shapes == [(5, 3), (5, 5), (5, 5), (2, 5)]
    assert model(torch.zeros(7, 3)).shape == (7, 2)


def test_mlp_takes_the_digits_by_default():
    images, _ = data.digits()
    assert mlp()(images[:3]).shape == (3, 10)


@pytest.mark.parametrize("depth", [1, 0, -1])
def test_mlp_of_one_layer_is_refused(depth):
    with pytest.raises(ValueError, match=rf"depth is {depth}: use at least 2"):
        mlp(depth=depth)


def test_a_chain_is_of_equal_stages_with_an_activation_each():
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
    assert model(x).min() == 0


def test_the_stages_of_a_chain_share_no_parameter():
    model = chain(width=4, depth=3)
    parameters = list(model.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters) == 6


def test_the_sizes_of_chains():
    assert len(chain()) == 16
    assert chain()(torch.zeros(2, 64)).shape == (2, 64)
    assert len(chain(8, 1)) == 1
    with torch.device("meta"):
        deep = chain(1024, 20)  # of the lab
    assert sum(p.numel() for p in deep.parameters()) == 20 * 1024 * 1025


@pytest.mark.parametrize("depth", [0, -1])
def test_a_chain_without_stages_is_refused(depth):
    with pytest.raises(ValueError, match=rf"depth is {depth}: use at least 1"):
        chain(depth=depth)


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


def test_a_block_needs_heads_that_divide_its_width():
    with pytest.raises(ValueError, match="width 10 is not a multiple of 4"):
        Block(width=10, heads=4)


def test_gpt_gives_logits_for_every_token():
    model = GPT(vocabulary=11, context=9, width=8, depth=3, heads=2)
    assert model(torch.zeros(2, 6, dtype=torch.int64)).shape == (2, 6, 11)
    assert len(model.blocks) == 3
    assert model.head.bias is None


def test_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(vocabulary=11, context=8, width=8, depth=2, heads=2)
    tokens = torch.randint(11, (1, 8))
    before = model(tokens)
    tokens[0, 5] = (tokens[0, 5] + 1) % 11
    after = model(tokens)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    changed = (before - after).abs().amax(-1)[0]
    assert (changed[5:] > 1e-4).all()


def test_gpt_knows_the_order_of_its_tokens():
    torch.manual_seed(0)
    model = GPT(vocabulary=11, context=8, width=8, depth=1, heads=2)
    a, b = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert (model(a)[0, 2] - model(b)[0, 2]).abs().max() > 1e-3


def test_gpt_learns():
    torch.manual_seed(0)
    model = GPT(vocabulary=4, context=8, width=16, depth=1, heads=2)
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


def test_text_is_bytes_of_english():
    text = data.text()
    assert text.ndim == 1 and text.dtype == torch.int64
    assert text.min() >= 0 and text.max() < 256
    assert 300_000 < len(text) < 2_000_000
    words = bytes(text.tolist()).decode()
    assert words.count(" the ") > 1000
    assert torch.equal(text, data.text())
