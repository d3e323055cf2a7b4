"""Train a small GPT on real text: in one process, or sharded with FSDP2.

    python labs/fsdp_train.py --steps 20
    torchrun --nproc-per-node 4 labs/fsdp_train.py --steps 20 --stage 3

Without ``torchrun`` there is one process and nothing is sharded. With it each
rank takes its share of every batch, and all of them train one model. The
batches depend on the step alone, so any number of ranks sees the same text,
and a run that resumes from a checkpoint goes on where it was.

Rank 0 prints a JSON line for each step, with ``step`` and ``loss``. At the
end every rank prints one, with its ``rank``, ``parameter_bytes``,
``gradient_bytes`` and ``optimizer_bytes``, and a ``digest`` of its weights.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from membudget.sharding import (
    held_states,
    joined,
    load_checkpoint,
    save_checkpoint,
)

SIZES = {  # the model, and the sequences of a batch over all ranks
    "tiny": ({"context": 64, "width": 64, "depth": 4, "heads": 4}, 24),
    "t4": ({"context": 512, "width": 768, "depth": 12, "heads": 12}, 24),
    "large": ({"context": 1024, "width": 2048, "depth": 24, "heads": 16}, 48),
}


def options() -> argparse.Namespace:
    """What to do, from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny")
    add("--steps", type=int, default=10, help="optimizer steps in all")
    add("--stage", type=int, choices=(2, 3), default=3, help="of ZeRO")
    add("--accumulate", type=int, default=1, help="micro-batches in a step")
    add("--synchronise", choices=("last", "each"), default="last")
    add("--recompute", action="store_true", help="checkpoint activations")
    add("--mixed", action="store_true", help="gather and compute in bf16")
    add("--offload", action="store_true", help="shards live in CPU memory")
    add("--checkpoint-dir", help="where the state is saved")
    add("--save-every", type=int, default=2, help="steps")
    add("--resume", action="store_true", help="from the last checkpoint")
    add("--die", metavar="RANK:STEP", help="kill a rank, to see what happens")
    args = parser.parse_args()
    for name in ("steps", "accumulate", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.resume and not args.checkpoint_dir:
        parser.error("--resume needs --checkpoint-dir")
    args.ranks = int(os.environ.get("WORLD_SIZE", 1))
    args.rank = int(os.environ.get("RANK", 0))
    batch = SIZES[args.size][1]
    if batch % (args.ranks * args.accumulate):
        parser.error(
            f"the batch of {batch} sequences cannot be split evenly among "
            f"{args.ranks} ranks x {args.accumulate} micro-batches: their "
            "product must divide it"
        )
    local = int(os.environ.get("LOCAL_RANK", 0))
    each_has_one = torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    )
    args.device = torch.device(f"cuda:{local}" if each_has_one else "cpu")
    if (args.mixed or args.offload) and "RANK" not in os.environ:
        parser.error("--mixed and --offload are FSDP2's: start with torchrun")
    if args.offload and args.device.type == "cpu":
        parser.error("--offload needs a GPU for each rank")
    args.die = tuple(map(int, args.die.split(":"))) if args.die else None
    return args


def build(args: argparse.Namespace) -> GPT:
    """The model, alike on all ranks; sharded under torchrun."""
    torch.manual_seed(0)
    shape, _ = SIZES[args.size]
    model = GPT(**shape).to(args.device)
    if args.recompute:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(
                plain, x, use_reentrant=False
            )
    if dist.is_initialized():
        policies = {}
        if args.mixed:
            policies["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
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
    return model


def batch(data: torch.Tensor, step: int, args: argparse.Namespace):
    """This rank's micro-batches of a step: inputs and targets."""
    shape, sequences = SIZES[args.size]
    generator = torch.Generator().manual_seed(step)
    length = shape["context"]
    starts = torch.randint(
        len(data) - length, (sequences,), generator=generator
    )
    rows = torch.stack([data[s : s + length + 1] for s in starts.tolist()])
    own = rows.chunk(args.ranks)[args.rank].to(args.device)
    for part in own.chunk(args.accumulate):
        yield part[:, :-1], part[:, 1:]


def train(args: argparse.Namespace) -> None:
    """All steps, and what each rank holds at the end."""
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sharded = dist.is_initialized()
    first = 0
    if args.resume:
        loaded = load_checkpoint(args.checkpoint_dir, model, optimizer)
        first = loaded.step or 0
        if args.rank == 0:
            print(f"begin at step {first}", *loaded.skipped, file=sys.stderr)
    data = text()
    for step in range(first, args.steps):
        optimizer.zero_grad()
        mean = torch.zeros((), device=args.device)
        for i, (x, y) in enumerate(batch(data, step, args), start=1):
            if sharded and args.synchronise == "last":
                model.set_requires_gradient_sync(i == args.accumulate)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            if args.die == (args.rank, step) and first_attempt():
                os.kill(os.getpid(), signal.SIGKILL)
            (loss / args.accumulate).backward()
            mean += loss.detach() / args.accumulate
        optimizer.step()
        if sharded:
            dist.all_reduce(mean)
        if args.rank == 0:
            say(step=step, loss=mean.item() / args.ranks)
        done = step + 1
        if args.checkpoint_dir and (
            done % args.save_every == 0 or done == args.steps
        ):
            save_checkpoint(args.checkpoint_dir, done, model, optimizer)
    held = held_states(model, optimizer)
    say(
        rank=args.rank,
        parameter_bytes=held.parameters,
        gradient_bytes=held.gradients,
        optimizer_bytes=held.optimizer,
        digest=digest(model),
    )


def first_attempt() -> bool:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def digest(model: torch.nn.Module) -> str:
    """Of this rank's weights: equal if and only if they are."""
    found = hashlib.sha256()
    for p in model.parameters():
        own = p.to_local() if isinstance(p, DTensor) else p
        found.update(own.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def say(**values: object) -> None:
    """A line of JSON, in one piece even where ranks share the output."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    arguments = options()
    with joined() if "RANK" in os.environ else nullcontext():
        train(arguments)
