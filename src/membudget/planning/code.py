"""The program of a plan, to paste."""

from collections.abc import Iterator

from membudget.ledger import RECIPES

OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=1e-3)",
    "momentum": "torch.optim.SGD({}, lr=1e-3, momentum=0.9)",
    "adam": "torch.optim.Adam({}, lr=1e-3)",
    "adam-8bit": "bitsandbytes.optim.Adam8bit({}, lr=1e-3)",
}
"""How each of :data:`membudget.ledger.OPTIMIZERS` is made."""


def write(job, plan, share: int) -> str:
    """The program.

    Args:
        job: what is trained.
        plan: one of its plans.
        share: sequences of each rank.
    """
    several = plan.ranks > 1 or plan.stage != "ddp"
    sharded = plan.stage != "ddp"
    recipe = RECIPES[plan.recipe]
    copied = recipe.master > 0 and not sharded
    parts = [
        _imports(job, plan, several),
        _model(job, recipe.parameters == 2 and (copied or not recipe.master)),
        _checkpoints(plan),
        _loss(plan, recipe),
        _ranks(plan, recipe, several),
        _optimizer(plan, recipe, copied),
        _step(plan, recipe, copied, share),
        [
            f"shape = ({share}, {job.tokens})  # your data comes here",
            f"tokens = torch.randint({job.network.vocabulary}, shape)",
            "tokens = tokens.to(device)",
            "targets = tokens.roll(-1, 1)",
            "for _ in range(3):",
            "    step(tokens, targets)",
        ],
    ]
    texts = ["\n".join(part) for part in parts]
    return "\n\n".join(text for text in texts if text) + "\n"


def _is_ddp(plan) -> bool:
    return plan.ranks > 1 and plan.stage == "ddp"


def _imports(job, plan, several: bool) -> Iterator[str]:
    if _is_ddp(plan):
        yield "from contextlib import nullcontext"
    if plan.checkpointed or plan.recipe == "master-fp32-gradients":
        yield "from functools import partial\n"
    if plan.optimizer == "adam-8bit":
        yield "import bitsandbytes"
    yield "import torch"
    if several:
        yield "import torch.distributed as dist"
    if plan.loss_chunks is None:
        yield "import torch.nn.functional as F"
    if several:
        yield "from torch import nn"
    if plan.stage != "ddp":
        yield "from torch.distributed.fsdp import (\n    MixedPrecisionPolicy,"
        yield "    fully_shard,\n)"
    elif several:
        yield "from torch.nn.parallel import DistributedDataParallel"
    if plan.checkpointed:
        yield "from torch.utils.checkpoint import checkpoint"
    names = ["GPT" if job.network.family == "gpt" else "Llama"]
    names += ["chunked_loss"] * (plan.loss_chunks is not None)
    yield f"\nfrom membudget.models import {', '.join(names)}"
    yield '\ndevice = "cuda" if torch.cuda.is_available() else "cpu"'
    if several:
        yield "dist.init_process_group()"
        yield 'if device == "cuda":'
        yield "    torch.cuda.set_device(dist.get_node_local_rank())"


def _model(job, halved: bool) -> Iterator[str]:
    shape = job.network
    names = ["vocabulary", "width", "depth", "heads", "fused", "tied"]
    sizes = {name: getattr(shape, name) for name in names}
    if shape.family == "gpt":
        sizes["context"] = shape.context
        if shape.dropout:
            sizes["dropout"] = 0.1
        yield "model = GPT("
    else:
        sizes |= {"kv_heads": shape.kv_heads, "hidden": shape.hidden}
        yield "model = Llama("
    yield from (f"    {name}={value}," for name, value in sizes.items())
    yield ").to(device)"
    if halved:
        yield "model.bfloat16()"


def _checkpoints(plan) -> Iterator[str]:
    if plan.checkpointed:
        yield f"for block in model.blocks[:{plan.checkpointed}]:"
        yield "    block.forward = partial("
        yield "        checkpoint, block.forward, use_reentrant=False"
        yield "    )"


def _loss(plan, recipe) -> Iterator[str]:
    body = ["return F.cross_entropy("]
    body += ["    model(tokens).flatten(0, 1), targets.flatten()", ")"]
    if plan.loss_chunks is not None:
        body = ["return chunked_loss("]
        body += ["    model.head,", "    model.hidden(tokens),"]
        body += ["    targets,", f"    chunks={plan.loss_chunks},", ")"]
    if recipe.autocast:
        body = ["    " + line for line in body]
        body.insert(0, "with torch.autocast(device, torch.bfloat16):")
    yield "\ndef loss_of(model, tokens, targets):"
    yield from ("    " + line for line in body)


def _ranks(plan, recipe, several: bool) -> Iterator[str]:
    """The model that is called, and what is done to it."""
    if not several:
        return
    yield "\nclass WithLoss(nn.Module):"
    yield "    def __init__(self, model):"
    yield "        super().__init__()"
    yield "        self.model = model\n"
    yield "    def forward(self, tokens, targets):"
    yield "        return loss_of(self.model, tokens, targets)\n\n"
    if plan.stage == "ddp":
        yield "model = DistributedDataParallel("
        yield "    WithLoss(model), gradient_as_bucket_view=True\n)"
        return
    yield "model = WithLoss(model)"
    yield "policy = MixedPrecisionPolicy("
    if recipe.master:
        reduced = "bfloat16" if recipe.gradients == 2 else "float32"
        yield "    param_dtype=torch.bfloat16,"
        yield f"    reduce_dtype=torch.{reduced},"
    yield ")"
    yield "for part in [*model.model.blocks, model]:"
    yield "    fully_shard("
    yield "        part,"
    yield f"        reshard_after_forward={plan.stage == 'zero-3'},"
    yield "        mp_policy=policy,"
    yield "    )"


def _optimizer(plan, recipe, copied: bool) -> Iterator[str]:
    stepped = "model.parameters()"
    if copied:
        yield "weights = list(model.parameters())"
        yield "copies = [weight.detach().float() for weight in weights]"
        stepped = "copies"
    if copied and recipe.gradients == 4:
        yield "sums = [torch.zeros_like(copy) for copy in copies]\n\n"
        yield "def add_to(total, weight):"
        yield "    total.add_(weight.grad)"
        yield "    weight.grad = None\n\n"
        yield "for total, weight in zip(sums, weights, strict=True):"
        yield "    weight.register_post_accumulate_grad_hook("
        yield "        partial(add_to, total)"
        yield "    )"
    yield f"optimizer = {OPTIMIZERS[plan.optimizer].format(stepped)}"


def _step(plan, recipe, copied: bool, share: int) -> Iterator[str]:
    yield "\ndef step(tokens, targets):"
    call = "loss_of(model, {})"
    if plan.ranks > 1 or plan.stage != "ddp":
        call = "model({})"
    if plan.micro_batch < share:
        size, ddp = plan.micro_batch, _is_ddp(plan)
        yield f"    parts = tokens.split({size}), targets.split({size})"
        if ddp:  # the last micro-batch alone reduces the gradients
            yield f"    waits = [model.no_sync] * {-(-share // size) - 1}"
            yield "    parts = *parts, [*waits, nullcontext]"
            yield "    for *part, context in zip(*parts, strict=True):"
            yield "        with context():"
        else:
            yield "    for part in zip(*parts, strict=True):"
        indent = 12 if ddp else 8
        yield " " * indent + f"loss = {call.format('*part')}"
        yield " " * indent + "loss = loss * (len(part[0]) / len(tokens))"
        yield " " * indent + "loss.backward()"
        yield " " * indent + "del loss"
    else:
        yield f"    loss = {call.format('tokens, targets')}"
        yield "    loss.backward()"
        yield "    del loss"
    if not copied:
        yield "    optimizer.step()"
        kept = "set_to_none=False" if _is_ddp(plan) else ""  # its buckets
        yield f"    optimizer.zero_grad({kept})\n"
        return
    if recipe.gradients == 4:
        yield "    for copy, total in zip(copies, sums, strict=True):"
        yield "        copy.grad = total"
    else:
        yield "    for copy, weight in zip(copies, weights, strict=True):"
        yield "        copy.grad = weight.grad.float()"
    yield "    optimizer.step()"
    yield "    with torch.no_grad():"
    yield "        for copy, weight in zip(copies, weights, strict=True):"
    yield "            weight.copy_(copy)"
    if recipe.gradients == 4:
        yield "            copy.grad.zero_()\n"
    elif _is_ddp(plan):
        yield "            weight.grad.zero_()"
        yield "            copy.grad = None\n"
    else:
        yield "            weight.grad = copy.grad = None\n"
