"""Stages are the model, cut."""

import pytest
import torch
import torch.nn.functional as F

from membudget.models import GPT, Llama
from membudget.parallelism import cut

TOKENS = torch.arange(24).view(2, 12)
MODELS = {
    "gpt": lambda **rest: GPT(32, 16, 16, 5, 2, **rest),
    "llama": lambda **rest: Llama(32, 16, 5, 4, 2, 24, **rest),
}


def gradients(model, parts):
    model.zero_grad()
    x = TOKENS
    for part in parts:
        x = part(x)
    F.cross_entropy(x.flatten(0, 1), TOKENS.flatten()).backward()
    return x, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_the_stages_one_after_the_other_are_the_model(kind, stages):
    torch.manual_seed(0)
    model = MODELS[kind]()
    out, wanted = gradients(model, [model])
    cut_out, found = gradients(model, cut(model, stages))
    assert torch.equal(out, cut_out)
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("kind", MODELS)
def test_each_parameter_is_in_one_stage_under_its_name(kind):
    model = MODELS[kind]()
    parts = [dict(part.named_parameters()) for part in cut(model, 3)]
    merged = {name: p for part in parts for name, p in part.items()}
    assert merged == dict(model.named_parameters())
    assert sum(map(len, parts)) == len(merged)


def test_blocks_that_do_not_divide_go_to_the_first_stages():
    assert [len(part.blocks) for part in cut(MODELS["gpt"](), 3)] == [2, 2, 1]


def test_a_model_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="6 stages are more than the 5 bl"):
        cut(MODELS["gpt"](), 6)
    with pytest.raises(ValueError, match="tied"):
        cut(MODELS["llama"](tied=True), 2)
    assert len(cut(MODELS["llama"](tied=True), 1)) == 1
    with pytest.raises(TypeError, match="the model is"):
        cut(torch.nn.Linear(2, 2), 1)
