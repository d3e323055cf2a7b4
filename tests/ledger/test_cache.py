"""What ``use_cache`` costs in training, as the questions say."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from membudget.measuring import witness


def peak(use_cache, checkpointed):
    """The allocator's, of a second step of GPT-2 with eight layers."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=64, n_head=4, vocab_size=64, n_positions=64,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if checkpointed:
        model.activation_checkpointing_enable()
    tokens = torch.randint(64, (4, 64))

    def step():
        model(tokens, labels=tokens, use_cache=use_cache).loss.backward()

    step()
    return witness(step)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_cache_costs_memory_without_checkpoints_alone(checkpointed):
    """Checkpointed layers of transformers 5 drop it."""
    without, with_cache = (peak(use, checkpointed) for use in (False, True))
    if checkpointed:
        assert with_cache == without
    else:
        assert with_cache > without
