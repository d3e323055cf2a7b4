"""LoRA of ``peft`` on models of ``transformers``: a dry run, the tracker and
the profiler of PyTorch say the same, but for what has a name."""

import dataclasses
from itertools import product

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


def test_there_are_a_hundred_of_them():
    assert len(CASES) >= 100
