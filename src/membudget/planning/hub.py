"""The program of a plan for a model of the library transformers."""

import json
from collections.abc import Iterator

from membudget.ledger import RECIPES
from membudget.planning import code

FOUR_BITS = (
    "load_in_4bit=True",
    'bnb_4bit_quant_type="nf4"',
    "bnb_4bit_use_double_quant=True",
)


def write(job, plan, share: int) -> str:
    """The program in plain PyTorch.

    Args:
        job: what is trained.
        plan: one of its plans.
        share: sequences of a step.
    """
    recipe = RECIPES[plan.recipe]
    copied = code.copies(plan)
    parts = [
        _imports(plan),
        made(plan),
        _checkpoints(job, plan),
        _adapted(job, plan),
        _loss(recipe),
        code.optimizer(plan, recipe, copied),
        code.step(plan, recipe, copied, share),
        [
            f"shape = ({share}, {job.tokens})  # your data comes here",
            f"tokens = torch.randint({job.network.vocabulary}, shape)",
            "tokens = tokens.to(device)",
            "for _ in range(3):",
            "    step(tokens, tokens)  # the model moves the labels by one",
        ],
    ]
    return code.joined(parts)


def trainer(job, plan, arguments: dict[str, object]) -> str:
    """The program with the Trainer.

    Args:
        job, plan: as for :func:`write`.
        arguments: of ``TrainingArguments``.
    """
    more = "Trainer", "TrainingArguments"
    given = [
        f"{name}={json.dumps(value) if isinstance(value, str) else value}"
        for name, value in arguments.items()
    ]
    parts = [
        _imports(plan, more),
        made(plan),
        _adapted(job, plan, "model = "),
        [
            *code.call("arguments = TrainingArguments", '"out"', *given),
            f"# data: sequences of {job.tokens} tokens, with their labels",
            "trainer = Trainer(model, arguments, train_dataset=data)",
            "trainer.train()",
        ],
    ]
    return code.joined(parts)


def _imports(plan, more: tuple[str, ...] = ()) -> Iterator[str]:
    yield "# For transformers 5. Put in your model, data and learning rate."
    if plan.optimizer_on_host:
        yield "from functools import partial\n"
    if plan.optimizer.endswith("8bit") and not more:
        yield "import bitsandbytes"
    yield "import torch"
    if plan.adapter:
        yield "from peft import LoraConfig, get_peft_model"
    names = ["AutoModelForCausalLM", *more]
    if plan.adapter and plan.adapter.four_bits:
        names.append("BitsAndBytesConfig")
    yield from code.imported("transformers", sorted(names))
    if plan.offloaded or plan.optimizer_on_host:
        yield ""
        yield from code.on_host(plan)
    yield '\ndevice = "cuda" if torch.cuda.is_available() else "cpu"'
    yield 'name = "your/model"  # of the hub, or a folder'


def made(plan) -> Iterator[str]:
    """The model, in training."""
    if plan.adapter and plan.adapter.four_bits:
        yield "# prepare_model_for_kbit_training would cast embedding and head"
        yield "# to fp32: that is not counted"
    halved = RECIPES[plan.recipe].parameters == 2
    dtype = f"torch.{'bfloat16' if halved else 'float32'}"
    if plan.adapter and plan.adapter.four_bits:
        computed = f"bnb_4bit_compute_dtype={dtype}"
        yield from code.call(
            "packed = BitsAndBytesConfig", *FOUR_BITS, computed
        )
    given = ["name", f"dtype={dtype}", 'device_map={"": device}']
    if plan.adapter and plan.adapter.four_bits:
        given.append("quantization_config=packed")
    yield from code.call(
        "model = AutoModelForCausalLM.from_pretrained", *given
    )
    yield "model.train()"


def _adapted(job, plan, made: str = "") -> Iterator[str]:
    """With its adapter; all linear layers have a name in ``peft``."""
    if plan.adapter:
        every = set(job.network.linears) == set(plan.adapter.targets)
        named = '"all-linear"' if every else None
        *lines, trained = code.adapted(plan.adapter, named, made)
        yield from lines
        if not made:
            yield trained


def _checkpoints(job, plan) -> Iterator[str]:
    if not plan.checkpointed:
        return
    yield 'model.gradient_checkpointing_enable({"use_reentrant": False})'
    if plan.checkpointed < job.depth:
        where = job.network.layers
        yield f"for layer in model.{where}[{plan.checkpointed}:]:"
        yield "    layer.gradient_checkpointing = False"


def _loss(recipe) -> Iterator[str]:
    yield "\ndef loss_of(model, tokens, labels):"
    indent = "    "
    if recipe.autocast:
        cast = f"{indent}with torch.autocast(device, torch.bfloat16):"
        yield f"{cast}  # T4: float16, GradScaler"
        indent *= 2
    call = "model(input_ids=tokens, labels=labels, use_cache=False)"
    yield f"{indent}return {call}.loss"
    yield ""
