"""LoRA of ``peft`` on models of ``transformers``: a dry run, the tracker and
the profiler of PyTorch say the same, but for what has a name."""

import dataclasses
from itertools import pairwise, product

import peft
import pytest
import torch
import zoo
import zoo_models

from membudget.measuring import trace_step

MODELS = {
    "Llama": zoo_models.GROUPED,
    "Qwen2": zoo_models.GROUPED,
    "GPT2": {},
}
TARGETS = {
    "two": {"Llama": ["q_proj", "v_proj"], "GPT2": ["c_attn"]},
    "all": {"Llama": "all-linear", "GPT2": "all-linear"},
}
FORMS = {
    "plain": {},
    "with dropout": {"lora_dropout": 0.1},
    "DoRA": {"use_dora": True},
}
PRECISIONS = "fp32", "bf16", "autocast"
CASES = [
    case
    for case in product(MODELS, TARGETS, FORMS, PRECISIONS, [False, True])
    if case[:2] + case[3:] != ("GPT2", "two", "autocast", True)
]
"""Three are left out: at their peak autocast casts the bias of an ``addmm``,
which the profiler cannot tell from a workspace of that operator."""


def adapted(name, targets, form, precision, checkpointed, state=False):
    """A case of the zoo with adapters, whose optimizer steps them alone.

    Args:
        state: whether a checkpoint keeps the generator's state.
    """
    torch.manual_seed(0)
    case = zoo_models.text(name, **MODELS[name])
    case = dataclasses.replace(case, autocast=precision == "autocast")
    if precision == "bf16":
        case = case.in_bf16()
    if checkpointed:
        how = {"use_reentrant": False, "preserve_rng_state": state}
        case.model.gradient_checkpointing_enable(how)
    family = TARGETS[targets].get(name) or TARGETS[targets]["Llama"]
    config = peft.LoraConfig(r=4, target_modules=family, **FORMS[form])
    return dataclasses.replace(
        case, model=peft.get_peft_model(case.model, config).train()
    )


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "targets", "form", "precision", "checkpointed"), CASES
)
def test_an_adapted_model(name, targets, form, precision, checkpointed):
    case = adapted(name, targets, form, precision, checkpointed)
    row = beside_profiler(case)
    assert not row.wrong, (row.cells, row.notes)


def beside_profiler(case):
    """What the zoo finds of a case."""
    batch = case.batch(zoo.SAMPLES)
    trained = [p for p in case.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0, foreach=False)
    tracker = trace_step(case.model, case.value, *batch, optimizer=optimizer)
    row = zoo.Row("adapted", tracker.peak)
    zoo.beside_profiler(row, case, batch, optimizer, tracker)
    zoo.beside_dry_run(row, case, batch, optimizer, tracker)
    return row


def test_a_checkpoint_keeps_the_generators_state_which_no_mode_sees():
    """Of a CPU, once for each of two blocks: the one residual with a name."""
    case = adapted("Llama", "two", "plain", "fp32", True, state=True)
    alike = adapted("Llama", "two", "plain", "fp32", True)
    more, none = (
        int(beside_profiler(c).cells["PeakTracker"]) for c in (case, alike)
    )
    assert more - none == 2 * torch.get_rng_state().nbytes


def test_what_generates_under_checkpoints_sees_one_token():
    """In training mode the layers drop the cache, so that each new token
    comes from the one before alone. Under ``eval()`` it is right."""
    model = adapted("Llama", "two", "plain", "fp32", True).model
    plain = adapted("Llama", "two", "plain", "fp32", False).model
    for weights in (*model.parameters(), *plain.parameters()):
        weights.data.mul_(3)  # else all tokens are as likely
    x = torch.arange(5, 25)[None]

    def written(model):
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        return model.generate(input_ids=x, eos_token_id=None, **how)[0, 20:]

    right, found = written(plain), written(model)
    assert right[0] == found[0] and not torch.equal(right, found)
    for token, after in pairwise(found):
        assert plain(token.view(1, 1)).logits.argmax() == after
    assert torch.equal(written(model.eval()), right)


def test_the_reference_is_the_model_without_its_adapter():
    case = adapted("Llama", "all", "plain", "fp32", False)
    x = torch.arange(5, 25)[None]
    with torch.no_grad():
        with case.model.disable_adapter():
            base = case.model(input_ids=x).logits
        for name, weights in case.model.named_parameters():
            if "lora_" in name:
                weights.normal_()
        assert not torch.equal(case.model(input_ids=x).logits, base)
        with case.model.disable_adapter():
            assert torch.equal(case.model(input_ids=x).logits, base)


def test_there_are_a_hundred_of_them():
    assert len(CASES) >= 100
