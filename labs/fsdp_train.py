r"""Train a small GPT on English text: in one process, or sharded with FSDP2.

    python labs/fsdp_train.py --steps 20
    torchrun --nproc-per-node 4 labs/fsdp_train.py --steps 20 --stage 3

Without ``torchrun`` there is one process and nothing is sharded. With it each
rank takes its share of every batch, and all of them train one model. The
batches depend on the step alone, so any number of ranks sees the same text,
and a run that resumes from a checkpoint goes on where it was. To survive a
crash, start it with a store (the ranks' list of addresses) for each start of
the ranks, and with ``--resume``:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 4 \
        --max-restarts 3 labs/fsdp_train.py --steps 1000 --stage 3 \
        --save-every 100 --checkpoint-dir saves --resume

Without the variable the new ranks meet in the old store, which still has the
addresses of the dead ones, and may fail or hang. Of the checkpoints the newest
two stay; the last step is always saved.

Rank 0 prints a JSON line for each step, with ``step`` and ``loss``. At the
end every rank prints one, with its ``rank``, ``parameter_bytes``,
``gradient_bytes`` and ``optimizer_bytes``, on a GPU the ``peak_bytes`` of the
steps, and a ``digest`` of the whole model's weights, the same on all ranks.
With ``--mixed fp16`` a loss scale keeps small gradients from becoming zero;
each step's line then has it, too, as ``scale``. It is not in the checkpoints:
a run that resumes finds it again within some steps.
"""

import argparse
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from membudget.data import text
from membudget.models import GPT
from membudget.sharding import held_states
from membudget.sharding.script import (
    ScriptParser,
    default_or_note,
    die_if_told,
    drawn,
    note,
    resumed,
    run_script,
    save_if_due,
    say,
)

SIZES = {  # the model, and the sequences of a batch over all ranks
    "tiny": ({"context": 64, "width": 64, "depth": 4, "heads": 4}, 24),
    "t4": ({"context": 512, "width": 768, "depth": 12, "heads": 12}, 24),
    "large": ({"context": 1024, "width": 2048, "depth": 24, "heads": 16}, 48),
}


SHORT = {"bf16": torch.bfloat16, "fp16": torch.float16}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """From the command line, and what ``torchrun`` says of this rank.

    Adds ``sharded``, ``rank``, ``ranks`` and ``device``. Wrong options end
    the program.
    """
    parser = ScriptParser("fsdp_train.py", __doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--size",
        choices=SIZES,
        default="tiny",
        help="of the model and the batch (default: tiny)",
    )
    add(
        "--stage",
        type=int,
        choices=(2, 3),
        help="ZeRO-2 or ZeRO-3 (default: 3)",
    )
    add(
        "--accumulate",
        type=int,
        default=1,
        help="micro-batches in a step (default: 1)",
    )
    add(
        "--synchronise",
        choices=("last", "each"),
        help="after which micro-batch gradients are reduced (default: last)",
    )
    add(
        "--recompute",
        action="store_true",
        help="drop the blocks' activations and compute them again",
    )
    add(
        "--mixed",
        choices=SHORT,
        help="gather and compute in 16 bits; fp16 with a loss scale",
    )
    add(
        "--offload",
        action="store_true",
        help="keep shards and optimizer states in CPU memory",
    )
    args = parser.read(arguments)
    parts = args.sharded and args.accumulate > 1
    default_or_note(args, "stage", 3, "torchrun", args.sharded)
    both = "torchrun and --accumulate"
    default_or_note(args, "synchronise", "last", both, parts)
    parser.least_one(args, "accumulate")
    sequences = SIZES[args.size][1]
    if sequences % (args.ranks * args.accumulate):
        parser.error(
            f"the batch of {sequences} sequences cannot be split evenly "
            f"among {args.ranks} ranks x {args.accumulate} micro-batches: "
            "their product must divide it"
        )
    gpu = args.device.type == "cuda"
    if (args.mixed or args.offload) and not args.sharded:
        parser.error("--mixed and --offload are FSDP2's: start with torchrun")
    if args.offload and not gpu:
        parser.error("--offload needs a GPU for each rank")
    if gpu and args.mixed == "bf16" and not native_bf16():
        note(
            args,
            "this GPU has no units for bf16 and emulates it, slowly and with "
            "more memory for attention: use --mixed fp16",
        )
    return args


def native_bf16() -> bool:
    """Whether the GPU computes in bf16 itself."""
    return torch.cuda.is_bf16_supported(including_emulation=False)


def build(args: argparse.Namespace) -> GPT:
    """The model, alike on all ranks; sharded under torchrun.

    No GPU ever holds the whole model: it is sharded on ``meta``, which takes
    no memory, and then the shards get theirs. Rank 0 makes the weights on
    the CPU, those of one process, and sends them tensor by tensor.
    """
    torch.manual_seed(0)
    shape, _ = SIZES[args.size]
    with torch.device("meta" if args.sharded else "cpu"):
        model = GPT(**shape)
    if args.recompute:
        recompute(model.blocks)
    if not args.sharded:
        return model.to(args.device)
    shard(model, args)
    model.to_empty(device="cpu" if args.offload else args.device)
    set_model_state_dict(
        model,
        GPT(**shape).state_dict() if args.rank == 0 else {},
        options=StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True
        ),
    )
    return model


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Make each block forget its activations and compute them again."""
    for block in blocks:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(
            plain, x, use_reentrant=False
        )


def shard(model: GPT, args: argparse.Namespace) -> None:
    """Every block is gathered on its own, the rest with the model."""
    policies = {}
    if args.mixed:
        policies["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=SHORT[args.mixed], reduce_dtype=torch.float32
        )
    if args.offload:
        policies["offload_policy"] = CPUOffloadPolicy()
    mesh = init_device_mesh(args.device.type, (args.ranks,))
    for module in [*model.blocks, model]:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=args.stage == 3,
            **policies,
        )


def micro_batches(
    data: torch.Tensor, step: int, args: argparse.Namespace
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share of a step's batch: inputs and targets."""
    shape, sequences = SIZES[args.size]
    length = shape["context"]
    x, y = drawn(data, step, sequences, length)
    own = torch.stack([x, y]).chunk(args.ranks, dim=1)[args.rank]
    for part in own.to(args.device).chunk(args.accumulate, dim=1):
        yield part[0], part[1]


def train_step(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    data: torch.Tensor,
    step: int,
    args: argparse.Namespace,
    scaler: torch.amp.GradScaler | None = None,
) -> float:
    """One optimizer step; the mean loss of the whole batch."""
    scaler = scaler or loss_scale(args)
    optimizer.zero_grad()
    mean = torch.zeros((), device=args.device)
    parts = micro_batches(data, step, args)
    for number, (x, y) in enumerate(parts, start=1):
        if args.sharded and args.synchronise == "last":
            model.set_requires_gradient_sync(number == args.accumulate)
        logits = model(x).float()  # 16 bits under --mixed
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        die_if_told(step, args)
        scaler.scale(loss / args.accumulate).backward()
        mean += loss.detach() / args.accumulate
    scaler.step(optimizer)  # without a step where a gradient overflowed
    scaler.update()
    if args.sharded:
        dist.all_reduce(mean)
    return mean.item() / args.ranks


def loss_scale(args: argparse.Namespace) -> torch.amp.GradScaler:
    """For fp16; otherwise one that does nothing.

    The gradients are DTensors, so all ranks learn of an overflow on one.
    """
    enabled = args.mixed == "fp16"
    return torch.amp.GradScaler(args.device.type, enabled=enabled)


def train(args: argparse.Namespace) -> None:
    """All steps, and what each rank holds at the end."""
    model, scaler = build(args), loss_scale(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    first = resumed(args, model, optimizer)
    if args.device.type == "cuda":  # without what built the model
        torch.cuda.reset_peak_memory_stats()
    data = text()
    for step in range(first, args.steps):
        scale = {"scale": scaler.get_scale()} if scaler.is_enabled() else {}
        loss = train_step(model, optimizer, data, step, args, scaler)
        if args.rank == 0:
            say(step=step, loss=loss, **scale)
        save_if_due(args, step + 1, model, optimizer)
    report(model, optimizer, args)


def report(
    model: GPT, optimizer: torch.optim.Optimizer, args: argparse.Namespace
) -> None:
    """What this rank holds: bytes of its shards, wherever they live."""
    held = held_states(model, optimizer)
    found = {
        "parameter_bytes": held.parameters,
        "gradient_bytes": held.gradients,
        "optimizer_bytes": held.optimizer,
    }
    if args.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    say(rank=args.rank, **found, digest=digest(model, args))


def digest(model: GPT, args: argparse.Namespace) -> str:
    """A hash of all weights: equal, as good as certainly, if these are."""
    found = hashlib.sha256()
    for p in model.parameters():
        whole = p.detach().to(args.device)  # offloaded: from the CPU
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()  # one at a time; all ranks call it
        found.update(whole.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    run_script("fsdp_train.py", options(), train)
