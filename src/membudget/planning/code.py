"""The program of a plan, to paste."""

from collections.abc import Iterable, Iterator

from membudget.ledger import RECIPES, Adapter

OPTIMIZERS = {
    "sgd": "torch.optim.SGD({}, lr=1e-3)",
    "momentum": "torch.optim.SGD({}, lr=1e-3, momentum=0.9)",
    "adam": "torch.optim.AdamW({}, lr=1e-3{})",
    "adam-8bit": "bitsandbytes.optim.Adam8bit({}, lr=1e-3)",
    "lion-8bit": "bitsandbytes.optim.Lion8bit({}, lr=1e-4)",
}
"""How each of :data:`membudget.ledger.PLANNED` is made."""

WIDTH = 79
"""Of a line, at most."""


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
    copied = copies(plan)
    parts = [
        _imports(job, plan, several, share),
        _model(
            job,
            recipe.parameters == 2 and (not sharded or not recipe.master),
            sharded,
            plan.adapter is not None and plan.adapter.four_bits,
        ),
        _adapter(job, plan),
        _checkpoints(plan),
        _loss(plan, recipe),
        _ranks(plan, recipe, several),
        optimizer(plan, recipe, copied),
        step(plan, recipe, copied, share),
        [
            f"shape = ({share}, {job.tokens})  # your data comes here",
            f"tokens = torch.randint({job.network.vocabulary}, shape)",
            "tokens = tokens.to(device)",
            "targets = tokens.roll(-1, 1)",
            "for _ in range(3):",
            "    step(tokens, targets)",
            *(["dist.destroy_process_group()"] if several else []),
        ],
    ]
    return joined(parts)


def joined(parts: Iterable[Iterable[str]]) -> str:
    """The lines of each part, with an empty one between."""
    texts = ["\n".join(part) for part in parts]
    return "\n\n".join(text for text in texts if text) + "\n"


def _is_ddp(plan) -> bool:
    return plan.ranks > 1 and plan.stage == "ddp"


def _imports(job, plan, several: bool, share: int) -> Iterator[str]:
    if _is_ddp(plan) and plan.micro_batch < share:
        yield "from contextlib import nullcontext"
    summed = plan.recipe == "master-fp32-gradients" and plan.stage == "ddp"
    if plan.checkpointed or summed or plan.optimizer_on_host:
        yield "from functools import partial\n"
    packed = plan.adapter is not None and plan.adapter.four_bits
    if "bitsandbytes" in OPTIMIZERS[plan.optimizer] or packed:
        yield "import bitsandbytes"
    yield "import torch"
    if several:
        yield "import torch.distributed as dist"
    if plan.loss_chunks is None:
        yield "import torch.nn.functional as F"
    if plan.adapter:
        yield "from peft import LoraConfig, get_peft_model"
    if several or packed:
        yield "from torch import nn"
    if plan.stage != "ddp":
        names = ["MixedPrecisionPolicy"] * (RECIPES[plan.recipe].master > 0)
        names.append("fully_shard")
        yield f"from torch.distributed.fsdp import {', '.join(names)}"
    elif several:
        yield "from torch.nn.parallel import DistributedDataParallel"
    kept = plan.checkpointed and plan.kept_attention
    if plan.checkpointed:
        names = ["checkpoint"]
        names += ["create_selective_checkpoint_contexts"] * kept
        yield from imported("torch.utils.checkpoint", names)
    names = ["GPT" if job.network.family == "gpt" else "Llama"]
    names += ["chunked_loss"] * (plan.loss_chunks is not None)
    yield ""
    if kept:
        yield "from membudget.checkpointing import ATTENTION"
    yield f"from membudget.models import {', '.join(names)}"
    yield from on_host(plan)
    yield '\ndevice = "cuda" if torch.cuda.is_available() else "cpu"'
    if several:
        yield "dist.init_process_group()"
        yield 'if device == "cuda":'
        yield "    torch.cuda.set_device(dist.get_node_local_rank())"
    if plan.stage != "ddp":
        yield "else:  # or all ranks would draw the same shards"
        yield "    torch.manual_seed(dist.get_rank())"


def on_host(plan) -> Iterator[str]:
    """The import of what puts something in the host's memory."""
    names = ["Offload"] * plan.offloaded
    names += ["optimizer_on_host"] * plan.optimizer_on_host
    if names:
        yield f"from membudget.offloading import {', '.join(names)}"


def copies(plan) -> bool:
    """Whether the program makes fp32 copies for the optimizer."""
    alone = plan.stage == "ddp" and not plan.optimizer_on_host
    return RECIPES[plan.recipe].master > 0 and alone


def imported(module: str, names: Iterable[str]) -> Iterator[str]:
    """The lines of an import, as ``ruff format`` breaks them."""
    names = list(names)
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"from {module} import ("
    yield from (f"    {name}," for name in names)
    yield ")"


def call(head: str, *arguments: str, indent: int = 0) -> Iterator[str]:
    """The lines of a call, as ``ruff format`` breaks them."""
    margin, inner = " " * indent, " " * (indent + 4)
    joined = ", ".join(arguments)
    line = f"{margin}{head}({joined})"
    if len(line) <= WIDTH:
        yield line
        return
    yield f"{margin}{head}("
    if len(inner + joined) <= WIDTH:
        yield inner + joined
    else:
        yield from (f"{inner}{argument}," for argument in arguments)
    yield f"{margin})"


def _model(job, halved: bool, sharded: bool, packed: bool) -> Iterator[str]:
    shape = job.network
    names = ["vocabulary", "width", "depth", "heads", "fused", "tied"]
    sizes = {name: getattr(shape, name) for name in names}
    if shape.family == "gpt":
        sizes["context"] = shape.context
        if shape.dropout:
            sizes["dropout"] = 0.1
    else:
        sizes |= {"kv_heads": shape.kv_heads, "hidden": shape.hidden}
    made = "model = GPT" if shape.family == "gpt" else "model = Llama"
    given = [f"{name}={value}" for name, value in sizes.items()]
    if sharded:
        yield 'with torch.device("meta"):  # shapes without memory'
        yield from call(made, *given, indent=4)
        if halved:
            yield "model.bfloat16()"
    else:
        yield from call(made, *given)
        if packed:  # which moves layer by layer
            yield from ["model.bfloat16()"] * halved
        else:
            yield f"model.to(device{', torch.bfloat16' if halved else ''})"


def _adapter(job, plan) -> Iterator[str]:
    """``peft``'s, over layers of bitsandbytes' where they are in 4 bits."""
    if plan.adapter and plan.adapter.four_bits:
        yield from _packed(job.network.family == "gpt")
    if plan.adapter:
        yield from adapted(plan.adapter)


def adapted(
    adapter: Adapter, named: str | None = None, made: str = ""
) -> Iterator[str]:
    """``peft``'s adapter in the model.

    Args:
        adapter: which.
        named: its targets, as they are written.
        made: what the model with it becomes.
    """
    if named is None:
        names = (f'"{name}"' for name in adapter.targets)
        named = f"[{', '.join(names)}]"
    given = [f"r={adapter.rank}", f"target_modules={named}"]
    if adapter.dropout:
        given.append("lora_dropout=0.1")
    yield from call("config = LoraConfig", *given)
    given = ["model", "config"]
    if adapter.itemsize == 2:
        given.append("autocast_adapter_dtype=False")
    yield from call(f"{made}get_peft_model", *given)
    yield "trained = [p for p in model.parameters() if p.requires_grad]"


def _packed(biased: bool) -> Iterator[str]:
    """The linear layers of the blocks, in NF4."""
    yield "\ndef in_four_bits(layer):"
    yield "    packed = bitsandbytes.nn.Linear4bit("
    yield "        layer.in_features,"
    yield "        layer.out_features,"
    yield f"        bias={biased},"
    yield "        compute_dtype=layer.weight.dtype,"
    yield "    )"
    yield "    packed.weight = bitsandbytes.nn.Params4bit("
    yield '        layer.weight.data, requires_grad=False, quant_type="nf4"'
    yield "    )"
    if biased:
        yield "    packed.bias = layer.bias"
    yield "    return packed.to(device)\n\n"
    yield "for block in model.blocks:"
    yield "    for name, layer in list(block.named_children()):"
    yield "        if isinstance(layer, nn.Linear):"
    yield "            setattr(block, name, in_four_bits(layer))"
    yield "model.to(device)"
    yield "model.is_loaded_in_4bit = True  # so that peft knows it"


def _checkpoints(plan) -> Iterator[str]:
    if plan.checkpointed:
        if plan.kept_attention:
            yield from call(
                "attention_kept = partial",
                "create_selective_checkpoint_contexts",
                "list(ATTENTION)",
            )
        yield f"for block in model.blocks[:{plan.checkpointed}]:"
        given = ["checkpoint", "block.forward", "use_reentrant=False"]
        if plan.kept_attention:
            given.append("context_fn=attention_kept")
        yield from call("block.forward = partial", *given, indent=4)


def _loss(plan, recipe) -> Iterator[str]:
    yield "\ndef loss_of(model, tokens, targets):"
    if recipe.autocast:
        cast = "    with torch.autocast(device, torch.bfloat16):"
        yield f"{cast}  # T4: float16, GradScaler"
    head = "return F.cross_entropy"
    given = ["model(tokens).flatten(0, 1)", "targets.flatten()"]
    if plan.loss_chunks is not None:
        head = "return chunked_loss"
        given = ["model.head", "model.hidden(tokens)", "targets"]
        given.append(f"chunks={plan.loss_chunks}")
    yield from call(head, *given, indent=8 if recipe.autocast else 4)
    yield ""


def _ranks(plan, recipe, several: bool) -> Iterator[str]:
    """The model that is called, and what is done to it."""
    if not several:
        return
    yield "class WithLoss(nn.Module):"
    yield "    def __init__(self, model):"
    yield "        super().__init__()"
    yield "        self.model = model\n"
    yield "    def forward(self, tokens, targets):"
    yield "        return loss_of(self.model, tokens, targets)\n\n"
    if plan.stage == "ddp":
        yield from call(
            "model = DistributedDataParallel",
            "WithLoss(model)",
            "gradient_as_bucket_view=True",
        )
        return
    yield "model = WithLoss(model)"
    given = ["part", f"reshard_after_forward={plan.stage == 'zero-3'}"]
    if recipe.master:
        reduced = "bfloat16" if recipe.gradients == 2 else "float32"
        yield from call(
            "policy = MixedPrecisionPolicy",
            "param_dtype=torch.bfloat16",
            f"reduce_dtype=torch.{reduced}",
        )
        given.append("mp_policy=policy")
    yield "for part in [*model.model.blocks, model]:"
    yield from call("fully_shard", *given, indent=4)
    yield "model.to_empty(device=device)  # this rank's shards alone"
    yield "for part in model.modules():"
    yield '    if hasattr(part, "reset_parameters"):'
    yield "        part.reset_parameters()"


def optimizer(plan, recipe, copied: bool) -> Iterator[str]:
    """Made, with the copies that it steps."""
    stepped = "trained" if plan.adapter else "model.parameters()"
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
        hook = "partial(add_to, total)"
        yield f"    weight.register_post_accumulate_grad_hook({hook})"
    way = ", fused=True" if plan.fused else ""
    made = OPTIMIZERS[plan.optimizer].format(stepped, way)
    head, _, given = made.removesuffix(")").partition("(")
    arguments = given.split(", ")
    if plan.optimizer_on_host:
        how = ", ".join([head, *arguments[1:]])
        head, arguments = "optimizer_on_host", [stepped, f"partial({how})"]
    yield from call(f"optimizer = {head}", *arguments)


def _passed(plan, loss: str, indent: int) -> Iterator[str]:
    """The forward pass; its hooks stand outside of all checkpoints."""
    if plan.offloaded:
        yield " " * indent + "with Offload(model, tokens, targets):"
        indent += 4
    yield " " * indent + f"loss = {loss}"


def step(plan, recipe, copied: bool, share: int) -> Iterator[str]:
    """An optimizer step, micro-batch by micro-batch."""
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
        yield from _passed(plan, call.format("*part"), indent)
        yield " " * indent + "loss = loss * (len(part[0]) / len(tokens))"
        yield " " * indent + "loss.backward()"
        yield " " * indent + "del loss"
    else:
        yield from _passed(plan, call.format("tokens, targets"), 4)
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
