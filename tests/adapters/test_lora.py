"""The course's LoRA beside ``peft``'s, and what is frozen."""

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget.adapters import (
    LoRA,
    Quantised4,
    adapt,
    check_trained,
    train_only,
)
from membudget.ledger import TARGETS
from membudget.measuring import SavedBytes, format_bytes, trace_step
from membudget.models import GPT, Llama

X = torch.arange(24).view(2, 12) % 40


def loss(model, x):
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def pair(family, dtype, wide):
    """The same model with the course's adapters, and with ``peft``'s."""
    kind = {"gpt": GPT, "llama": Llama}[family]
    width = {"context": 16} if family == "gpt" else {"hidden": 44}
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind(40, width=16, **width).to(dtype))
    ours, theirs = models
    targets = list(TARGETS[family])
    adapt(ours, targets, 4, dtype=torch.float32 if wide else dtype)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets)
    peft.get_peft_model(theirs, config, autocast_adapter_dtype=wide)
    with torch.no_grad():
        for mine, other in zip(trained(ours), trained(theirs), strict=True):
            other.copy_(mine.normal_(std=0.1))
    return ours, theirs


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)],
)
def test_bytes_and_gradients_are_those_of_peft(family, dtype, wide):
    found = []
    for model in pair(family, dtype, wide):
        with SavedBytes(model, X) as saved:
            value = loss(model, X)
        value.backward()
        gradients = [p.grad for p in trained(model)]
        found.append((saved.total, value, gradients))
    (saved, value, mine), (theirs, other, others) = found
    assert saved == theirs and torch.equal(value, other)
    assert all(map(torch.equal, mine, others))
    first, second = (
        trace_step(model, loss, X).peak for model in pair(family, dtype, wide)
    )
    assert first == second


def test_nothing_changes_at_first():
    torch.manual_seed(0)
    model = Llama(40, 16)
    before = model(X)
    assert torch.equal(adapt(model, ["query", "value"])(X), before)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * 2 * 2
    assert all(".lora_" in name for name in names)


def test_a_layer_is_adapted_once_wherever_it_stands():
    """Its own two layers are no targets, whatever they are called."""
    model = adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["0"], 2)
    assert [type(layer) for layer in model] == [LoRA, nn.Linear]
    assert model[0].base.weight.requires_grad is False


def test_dropout_reaches_the_adapter_alone():
    torch.manual_seed(0)
    layer = LoRA(nn.Linear(64, 64), dropout=0.5)
    nn.init.normal_(layer.lora_b.weight)
    x = torch.ones(1, 64)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_only_what_matches_is_trained():
    model = GPT(40, 16, 16, depth=3)
    train_only(model, ["blocks.[12].*", "norm.bias"])
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert names == {
        n
        for n, _ in model.named_parameters()
        if n.startswith(("blocks.1.", "blocks.2.")) or n == "norm.bias"
    }
    tied = train_only(GPT(40, 16, 16, tied=True), ["head.weight"])
    assert tied.token.weight.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda model: adapt(model, ["qkv", "q_proj"]),
        lambda model: adapt(model, ["head", "qkv"], 17),
        lambda model: train_only(model, ["head.*", "*.wight"]),
    ],
)
def test_what_is_refused_changes_nothing(change):
    model = GPT(40, 16, 16)
    with pytest.raises(ValueError):
        change(model)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(isinstance(m, LoRA) for m in model.modules())


def test_a_base_in_four_bits():
    """The same as on the dequantised weight, gradients too."""
    torch.manual_seed(0)
    four = Quantised4(torch.randn(8, 64))
    plain = nn.Linear(64, 8, bias=False)
    plain.weight.data = four.bits.dequantise(torch.float32)
    found = []
    for base in (four, plain):
        torch.manual_seed(1)
        layer = LoRA(base, 3)
        nn.init.normal_(layer.lora_b.weight)
        x = torch.ones(5, 64, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in trained(layer))])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other)


def by(way):
    """A model with adapters, of the course or of ``peft``."""
    model = GPT(40, 16, 16)
    if way == "ours":
        return adapt(model, ["qkv"], 2)
    config = peft.LoraConfig(r=2, target_modules=["qkv"])
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("way", ["ours", "peft"])
def test_frozen_weights_in_the_optimizer_cost_nothing(way):
    model = by(way)
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    check_trained(model, optimizer)
    model(X).sum().backward()
    optimizer.step()
    assert set(optimizer.state) == set(trained(model))
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.requires_grad or torch.equal(p, old)
    check_trained(model, torch.optim.SGD(trained(model)))


@pytest.mark.parametrize("way", ["ours", "peft"])
def test_a_base_that_is_trained_by_mistake(way):
    model = by(way).requires_grad_()
    size = format_bytes(2 * 4 * 16 * 48)
    words = rf"qkv\.base\S*weight is trained .* one of 2 .* have {size}"
    with pytest.raises(ValueError, match=words):
        check_trained(model, torch.optim.SGD(model.parameters()))
    adapted = by(way)
    for name, p in adapted.named_parameters():
        p.requires_grad_(p.requires_grad or name.endswith("norm.weight"))
    check_trained(adapted, torch.optim.SGD(trained(adapted)))


def test_an_optimizer_that_was_made_before_the_adapters():
    model = GPT(40, 16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    adapt(model, ["qkv"], 2)
    words = (
        "the optimizer holds token.weight, which is frozen, and lacks "
        "blocks.0.qkv.lora_a.weight, which is trained: make it after"
    )
    with pytest.raises(ValueError, match=words):
        check_trained(model, optimizer)
    first = torch.optim.AdamW(trained(model)[:1])
    with pytest.raises(ValueError, match=r"optimizer lacks .*lora_b\.w"):
        check_trained(model, first)
    with pytest.raises(ValueError, match="add adapters, and train them"):
        check_trained(model.requires_grad_(False), optimizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: adapt(GPT(40, 16, 16), ["q_proj"]),
            "no linear layer is named 'q_proj': use down, head, out, qkv, up",
        ),
        (
            lambda: LoRA(nn.Linear(16, 4), 5),
            "rank is 5: use a whole number from 1 to 4",
        ),
        (
            lambda: LoRA(nn.Linear(4, 4), 2, dtype=torch.int8),
            "dtype is torch.int8: use a torch.dtype with a fraction",
        ),
        (
            lambda: train_only(GPT(40, 16, 16), ["*.wight"]),
            r"no parameter is named '\*.wight': use names such as token",
        ),
    ],
)
def test_what_cannot_be(call, message):
    with pytest.raises(ValueError, match=message):
        call()
