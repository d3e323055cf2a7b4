"""The solutions of chapter 8 against real hooks, and against seconds."""

from random import Random

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from membudget import models
from membudget.exercises.offloading import (
    check_pack_once,
    check_tokens_to_hide,
    pack_once,
    tokens_to_hide,
)
from membudget.measuring import FlopCounter, SavedBytes
from membudget.offloading import Offload
from tests.soak import examples

from .judging import accepts, judged, rejects


def seconds(width, tokens, flops):
    """Of a block's forward pass, for one token and unit of width."""
    return (24 * width**2 + 4 * tokens * width) / width / flops


def test_from_this_length_on_the_copy_takes_no_longer_than_the_block():
    random = Random(0)
    for _ in range(examples(20)):
        width = random.randint(1, 9000)
        kept, flops = random.randint(1, 64), random.uniform(1e12, 1e15)
        link = random.uniform(1e9, 5e11)
        tokens = tokens_to_hide(kept, width, flops, link)
        assert seconds(width, tokens, flops) >= kept / link * (1 - 1e-12)
        if tokens:
            assert seconds(width, tokens - 1, flops) < kept / link


def test_the_work_is_that_of_a_real_block():
    block, x = models.Block(32, 4), torch.rand(2, 24, 32)
    with FlopCounter() as work:
        block(x)
    assert work.total == 2 * 24 * (24 * 32**2 + 4 * 24 * 32)


def test_packed_once_is_what_offload_moves():
    model = models.Llama(32, 16, 3, hidden=24)
    tokens = torch.arange(24).view(2, 12)
    with SavedBytes(model) as saved:
        model(tokens).square().sum()
    with Offload(model) as moved:
        model(tokens).square().sum()
    seen = check_pack_once.see(pack_once, check_pack_once.cases[1])
    assert seen.parts["number of bytes that leave"] == moved.out == saved.total


def test_hooks_inside_a_checkpoint_switch_it_off():
    """What the third exercise is about, in PyTorch alone."""
    layer, runs = nn.Linear(3, 3), []

    def run(x):
        runs.append(1)
        with saved_tensors_hooks(lambda t: t, lambda t: t):
            return layer(x).sin()

    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda blocks, x, hooks: None, "Not attempted"),
        (lambda blocks, x, hooks: 3, "returns no loss"),
    ],
)
def test_what_is_no_loss(answer, words):
    assert words in str(judged("moved_inputs", answer))


def test_another_answer():
    def whole_numbers(kept, width, flops, link):
        least = (kept * flops / link - 24 * width) / 4
        return 0 if least <= 0 else -int(-least // 1)

    accepts("tokens_to_hide", whole_numbers)
    rejects("tokens_to_hide", lambda *_: 7, "is right")
    assert check_tokens_to_hide.signature.startswith("tokens_to_hide(kept")
