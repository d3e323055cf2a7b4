"""Plans as arguments of Hugging Face's Trainer, by the Trainer itself."""

import pytest
import torch

from membudget.ledger import Adapter, Transformer
from membudget.planning import Job, Plan

transformers = pytest.importorskip("transformers")
JOB = Job(Transformer(40, 16, 2, 4, family="llama", kv_heads=2), 8, 12)


def arguments(plan, folder):
    return transformers.TrainingArguments(
        **plan.trainer(JOB), output_dir=str(folder), use_cpu=True, max_steps=1
    )


@pytest.mark.parametrize(
    "plan",
    [
        Plan(12),
        Plan(4, 2, recipe="autocast"),
        Plan(3, fused=False),
        Plan(6, 2, optimizer="momentum"),
    ],
    ids=str,
)
def test_the_trainer_does_the_plan(plan, tmp_path):
    """One step: the sequences at once, how often a block runs, in which
    dtype, and who steps."""
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    seen, dtypes = [], set()
    mlp = model.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    mlp.register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
    rows = [dict.fromkeys(("input_ids", "labels"), [1] * 8)] * 12
    trainer = transformers.Trainer(
        model, arguments(plan, tmp_path), train_dataset=rows
    )
    trainer.train()
    runs = 12 // plan.micro_batch * (2 if plan.checkpointed else 1)
    assert seen == [plan.micro_batch] * runs
    autocast = plan.recipe == "autocast"
    assert dtypes == {torch.bfloat16 if autocast else torch.float32}
    group = trainer.optimizer.param_groups[0]
    if plan.optimizer == "adam":
        assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)
        assert bool(group["fused"]) == plan.fused
    else:
        assert group["momentum"] == 0.9


@pytest.mark.parametrize("stage", ["zero-2", "zero-3"])
@pytest.mark.parametrize("checkpointed", [0, 2])
def test_the_trainers_shards(stage, checkpointed, tmp_path):
    """As the plugin of accelerate reads them."""
    plan = Plan(2, checkpointed, recipe="master", stage=stage, ranks=2)
    made = arguments(plan, tmp_path)
    assert made.fsdp and made.bf16
    read = made.fsdp_plugin_args
    assert read["fsdp_version"] == 2
    assert read["reshard_after_forward"] == (stage == "zero-3")
    assert read.get("activation_checkpointing", False) == bool(checkpointed)
    assert made.gradient_accumulation_steps == 3
    summed = made.accelerator_config.gradient_accumulation_kwargs
    assert summed == {"sync_each_batch": True}  # as FSDP2 does by itself


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (Plan(5), "12 sequences are no multiple of the micro-batch, 5"),
        (Plan(4, 1), "1 of 2 blocks are checkpointed"),
        (Plan(4, 2, kept_attention=True), "its attention is kept"),
        (Plan(4, adapter=Adapter(("up",))), "its adapter is no argument"),
        (Plan(4, loss_chunks=2), "use_liger_kernel"),
        (Plan(4, recipe="bf16"), "load it so, and plan with fp32"),
        (Plan(4, recipe="master"), "use autocast"),
        (Plan(2, recipe="autocast", stage="zero-3", ranks=2), "use master"),
        (
            Plan(2, recipe="master-fp32-gradients", stage="zero-3", ranks=2),
            "reduces gradients in bf16",
        ),
    ],
    ids=str,
)
def test_what_the_trainer_has_no_arguments_for(plan, why):
    with pytest.raises(ValueError, match=why):
        plan.trainer(JOB)
