"""A plan as arguments of the Trainer of Hugging Face."""

from membudget.ledger import RECIPES

OPTIMIZERS = {
    "sgd": {"optim": "sgd"},
    "momentum": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adam": {"optim": "adamw_torch"},
    "adam-8bit": {"optim": "adamw_bnb_8bit"},
    "lion-8bit": {"optim": "lion_8bit"},
}
"""How each of :data:`membudget.ledger.PLANNED` is named there."""


def arguments(job, plan, share: int) -> dict[str, object]:
    """Keyword arguments of ``transformers.TrainingArguments``.

    Args:
        job: what is trained.
        plan: one of its plans.
        share: sequences of each rank.
    """
    sharded, recipe = plan.stage != "ddp", RECIPES[plan.recipe]
    depth, given = job.depth, getattr(job, "hub", False)
    every = plan.checkpointed == depth
    _refuse(
        {
            f"{share} sequences are no multiple of the micro-batch, "
            f"{plan.micro_batch}": share % plan.micro_batch,
            f"{plan.checkpointed} of {depth} blocks are checkpointed, and the "
            "Trainer knows all or none": plan.checkpointed and not every,
            "its adapter is no argument (hand over get_peft_model's model)": (
                plan.adapter and not given
            ),
            "its attention is kept under the checkpoints": plan.kept_attention,
            "something waits in the host's memory": (
                plan.offloaded or plan.optimizer_on_host
            ),
            "the loss is in chunks (use_liger_kernel=True has a loss of its "
            "own)": plan.loss_chunks,
            "the model is kept in bf16 (load it so, and plan with fp32)": (
                plan.recipe == "bf16" and not given
            ),
            "autocast would keep a copy of each gathered weight: use master": (
                sharded and recipe.autocast
            ),
            "one card has fp32 weights or bf16 ones: use autocast": (
                recipe.master and not sharded
            ),
            "the Trainer reduces gradients in bf16: use master": (
                recipe.master and recipe.gradients == 4
            ),
        }
    )
    steps = share // plan.micro_batch
    found: dict[str, object] = {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": steps,
        **OPTIMIZERS[plan.optimizer],
    }
    if plan.optimizer == "adam" and plan.fused:
        found["optim"] = "adamw_torch_fused"
    if plan.recipe not in ("fp32", "bf16"):
        found["bf16"] = True  # autocast
    if not sharded:
        return found | ({"gradient_checkpointing": True} if every else {})
    shards: dict[str, object] = {
        "reshard_after_forward": plan.stage == "zero-3"
    }
    if every:
        shards["activation_checkpointing"] = True
    found |= {"fsdp": True, "fsdp_config": shards}
    if steps > 1:  # or whole gradients would wait for the last micro-batch
        kept = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        found["accelerator_config"] = kept
    return found


def _refuse(reasons: dict[str, object]) -> None:
    for reason, true in reasons.items():
        if true:
            raise ValueError(
                f"the Trainer cannot do this plan, {reason}: choose another "
                "one, or run Plan.code"
            )
