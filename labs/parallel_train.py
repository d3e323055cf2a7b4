r"""Train a small Llama on English text, in one of seven layouts.

    python labs/parallel_train.py --steps 10
    torchrun --nproc-per-node 4 labs/parallel_train.py --layout tp --steps 10

A layout says what a rank has of the model and of a step's batch:

    one       one process: all of both
    ddp       the whole model, a share of the sequences
    fsdp2     a shard of every tensor, a share of the sequences
    tp        a slice of every block's matrices, all sequences
    sp        the same, and between the matrices a share of the tokens
    pp        some of the blocks, all sequences in micro-batches
    fsdp+tp   slices for --tp ranks, and a shard of each slice

The batch depends on the step alone and every tensor's first values on its
name alone, so all layouts train the same model on the same text. A checkpoint
has the whole model's names and shapes: save with one layout, and ``--resume``
with another one, on as many ranks as you like. To survive a crash:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 4 \
        --max-restarts 3 labs/parallel_train.py --layout pp --steps 1000 \
        --save-every 100 --checkpoint-dir saves --resume

Rank 0 prints a JSON line for each step, with ``step`` and ``loss``. At the
end every rank prints one, with its ``rank``, ``parameter_bytes``,
``gradient_bytes`` and ``optimizer_bytes``, the ``peak_bytes`` of the last
step, and a ``digest`` of the weights that this rank has. On a GPU the peak is
the allocator's. On a CPU a tracker counts, without the buffers for what a
pipeline's ranks receive.
"""

import argparse
import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from membudget.data import text
from membudget.ledger import States
from membudget.measuring import PeakTracker
from membudget.models import Llama
from membudget.parallelism import cut, simulate_pipeline, tensor_parallel
from membudget.sharding import held_states, shard, simulate_rank
from membudget.sharding.script import (
    ScriptError,
    ScriptParser,
    default_or_note,
    die_if_told,
    drawn,
    resumed,
    run_script,
    save_if_due,
    say,
)

NAME = "parallel_train.py"

LAYOUTS = ("one", "ddp", "fsdp2", "tp", "sp", "pp", "fsdp+tp")

SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}

SIZES = {  # the model, and a step's batch: sequences, and tokens of each
    "tiny": (
        {"width": 128, "depth": 4, "heads": 8, "kv_heads": 4, "hidden": 352},
        (8, 64),
    ),
    "t4": (
        {
            "width": 1024,
            "depth": 16,
            "heads": 16,
            "kv_heads": 8,
            "hidden": 2816,
        },
        (8, 512),
    ),
    "large": (
        {
            "width": 3584,
            "depth": 8,
            "heads": 28,
            "kv_heads": 4,
            "hidden": 9728,
        },
        (4, 512),
    ),
}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """From the command line, and what ``torchrun`` says of this rank.

    Wrong options end the program.
    """
    parser = ScriptParser(NAME, __doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--size",
        choices=SIZES,
        default="tiny",
        help="of the model and the batch (default: tiny)",
    )
    add(
        "--layout",
        choices=LAYOUTS,
        default="one",
        help="what a rank has of the model and the batch (default: one)",
    )
    add(
        "--schedule",
        choices=SCHEDULES,
        help="of the pipeline (default: 1F1B)",
    )
    add(
        "--micro-batches",
        type=int,
        help="into which the pipeline cuts the batch (default: 4)",
    )
    add(
        "--tp",
        type=int,
        help="ranks that share a block's matrices in fsdp+tp (default: 2)",
    )
    args = parser.read(arguments)
    pipeline = args.layout == "pp"
    default_or_note(args, "schedule", "1F1B", "--layout pp", pipeline)
    default_or_note(args, "micro_batches", 4, "--layout pp", pipeline)
    both = args.layout == "fsdp+tp"
    default_or_note(args, "tp", 2, "--layout fsdp+tp", both)
    parser.least_one(args, "micro_batches", "tp")
    if problem := misfit(args):
        parser.error(problem)
    return args


def misfit(args: argparse.Namespace) -> str:
    """Why the layout does not fit the ranks or the batch; else nothing."""
    layout, ranks, tp = args.layout, args.ranks, args.tp
    sequences, tokens = SIZES[args.size][1]
    if layout == "one":
        others = ", ".join(LAYOUTS[1:])
        if ranks > 1:
            return f"{ranks} ranks need another layout than one: {others}"
    elif ranks == 1:
        return f"--layout {layout} is for 2 ranks or more: use torchrun"
    if layout == "fsdp+tp" and (ranks % tp or not 1 < tp < ranks):
        return (
            f"--layout fsdp+tp is a mesh of (ranks / tp) x tp, both at least "
            f"2, and {ranks} ranks with --tp {tp} make none: use 4 ranks "
            "with --tp 2, or another layout"
        )
    replicas = data_ranks(args)
    if sequences % replicas:
        return (
            f"the batch of {sequences} sequences cannot be split evenly "
            f"among {replicas} ranks: their number must divide it"
        )
    if layout == "sp" and tokens % ranks:
        return (
            f"sequences of {tokens} tokens cannot be split evenly among "
            f"{ranks} ranks: their number must divide it"
        )
    if layout == "pp" and sequences % args.micro_batches:
        return (
            f"the batch of {sequences} sequences cannot be cut into "
            f"{args.micro_batches} equal micro-batches: their number must "
            "divide it"
        )
    if layout == "pp" and args.micro_batches < ranks:
        return (
            f"{args.micro_batches} micro-batches keep at most that many of "
            f"the {ranks} ranks at work, and PyTorch's 1F1B refuses it: use "
            f"--micro-batches {ranks} or more"
        )
    return ""


def data_ranks(args: argparse.Namespace) -> int:
    """Among how many ranks a step's sequences are shared."""
    if args.layout in ("ddp", "fsdp2"):
        return args.ranks
    return args.ranks // args.tp if args.layout == "fsdp+tp" else 1


def whole_model(args: argparse.Namespace) -> Llama:
    """On ``meta``, where it takes no memory."""
    with torch.device("meta"):
        return Llama(**SIZES[args.size][0])


def mesh_shape(args: argparse.Namespace) -> tuple[int, ...]:
    """The ranks in a row, or (data, tensor)."""
    if args.layout == "fsdp+tp":
        return args.ranks // args.tp, args.tp
    return (args.ranks,)


def lay_out(model: Llama, mesh: DeviceMesh, layout: str) -> nn.Module:
    """The part of the model that this rank has, in place where it can be."""
    if layout == "fsdp2":
        shard(model, model.blocks, mesh=mesh)
    elif layout in ("tp", "sp"):
        tensor_parallel(model, mesh, sequence=layout == "sp")
    elif layout == "pp":
        return cut(model, mesh.size())[mesh.get_rank()]
    elif layout == "fsdp+tp":
        data, tensor = mesh.mesh_dim_names
        tensor_parallel(model, mesh[tensor])
        shard(model, model.blocks, mesh=mesh[data])
    return model


def build(args: argparse.Namespace) -> nn.Module:
    """This rank's part of the model, with its first values.

    Raises:
        ScriptError: a model that cannot be laid out so.
    """
    model = whole_model(args)
    if args.layout != "one":
        shape, names = mesh_shape(args), ("data", "tensor")
        mesh = init_device_mesh(
            args.device.type, shape, mesh_dim_names=names[-len(shape) :]
        )
        try:
            model = lay_out(model, mesh, args.layout)
        except ValueError as error:
            message = f"--layout {args.layout} on {args.ranks} ranks: {error}"
            raise ScriptError(message) from None
    model.to_empty(device=args.device)
    fill(model)
    if args.layout == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Each parameter's first values, by its name; no rank holds them all."""
    for name, p in model.named_parameters():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.ones(p.shape)  # of a norm
        if p.ndim > 1:
            whole.normal_(0, 0.02, generator=random)
        if isinstance(p, DTensor):
            whole = distribute_tensor(
                whole.to(p.device),
                p.device_mesh,
                p.placements,
                src_data_rank=None,
            )
        p.copy_(whole)


def own_batch(
    data: torch.Tensor, step: int, args: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's sequences of a step's batch: inputs and targets."""
    pair = torch.stack(drawn(data, step, *SIZES[args.size][1]))
    parts = data_ranks(args)
    number = args.rank * parts // args.ranks  # tensor's ranks are neighbours
    own = pair.chunk(parts, dim=1)[number].clone()  # without the others'
    x, y = own.to(args.device)
    return x, y


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens, whether logits are a DTensor or not."""
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


Passes = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""From inputs, targets and step to this rank's part of the mean loss."""


def passes(model: nn.Module, args: argparse.Namespace) -> Passes:
    """The forward and the backward pass."""
    if args.layout == "pp":
        return pipelined(model, args)

    def run(x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        loss = loss_of(model(x), y)
        die_if_told(step, args)
        loss.backward()
        return loss.detach() / args.ranks

    return run


def pipelined(model: nn.Module, args: argparse.Namespace) -> Passes:
    """By a schedule: the first stage has the inputs, the last the losses."""
    stage = PipelineStage(model, args.rank, args.ranks, args.device)
    schedule = SCHEDULES[args.schedule](
        stage, args.micro_batches, loss_fn=loss_of
    )

    def run(x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        die_if_told(step, args)
        first = (x,) if stage.is_first else ()
        last = {"target": y, "losses": losses} if stage.is_last else {}
        schedule.step(*first, **last, return_outputs=False)
        zero = torch.zeros((), device=args.device)
        return sum((part.detach() for part in losses), zero) / (
            args.micro_batches
        )

    return run


def train(args: argparse.Namespace) -> None:
    """All steps, and what each rank holds at the end."""
    wrapped = build(args)
    model = getattr(wrapped, "module", wrapped)  # not under DDP's names
    optimizer = adamw(model.parameters())
    first = resumed(args, model, optimizer)
    run, data, peak = passes(wrapped, args), text(), {}
    for step in range(first, args.steps):
        x, y = own_batch(data, step, args)
        watch = step == args.steps - 1  # the tracker is slow
        with watched(peak, args, model, optimizer, x, y) if watch else NOTHING:
            # DDP's gradients lie in its buckets, which stay
            optimizer.zero_grad(set_to_none=args.layout != "ddp")
            loss = run(x, y, step)
            optimizer.step()
        if args.sharded:
            dist.all_reduce(loss)
        if args.rank == 0:
            say(step=step, loss=loss.item())
        save_if_due(args, step + 1, model, optimizer)
    report(model, optimizer, peak, args)


NOTHING = nullcontext()


@contextmanager
def watched(
    peak: dict[str, int], args: argparse.Namespace, *existing: object
) -> Iterator[None]:
    """Adds ``peak_bytes`` to ``peak`` at the end.

    On a GPU they are the allocator's, on a CPU the tracker's.
    """
    if args.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        yield
        peak["peak_bytes"] = torch.cuda.max_memory_allocated()
    else:
        with PeakTracker(*existing) as tracker:
            yield
        peak["peak_bytes"] = tracker.peak


def predicted(
    ranks: int,
    layout: str,
    rank: int = 0,
    *,
    size: str = "tiny",
    schedule: str = "1F1B",
    micro_batches: int = 4,
    tp: int = 2,
) -> tuple[States, int]:
    """What ``rank`` will hold and its peak, in bytes; nothing is allocated.

    It simulates this rank's step alone. The buffers for what a pipeline's
    ranks receive, which stay, are not in the peak.
    """
    args = argparse.Namespace(
        ranks=ranks, layout=layout, size=size, tp=tp, rank=rank
    )
    shape, (sequences, tokens) = SIZES[size]
    sequences //= data_ranks(args)
    if layout == "pp":
        sequences //= micro_batches
    x = torch.empty(sequences, tokens, dtype=torch.int64, device="meta")
    if layout == "pp":
        return predicted_stage(args, x, schedule, micro_batches)
    split = layout in ("fsdp2", "tp", "sp", "fsdp+tp")
    step = simulate_rank(
        lambda: Llama(**shape),
        lambda model, mesh: lay_out(model, mesh, layout),
        lambda model, x, y: loss_of(model(x), y),
        *(x, x),
        ranks=ranks if split else 1,
        rank=rank if split else 0,
        optimizer=adamw,
        mesh=mesh_shape(args) if split else (1,),
        # DDP's gradients are there before the step
        micro_batches=2 if layout == "ddp" else 1,
    )
    return step.states, step.peak


def predicted_stage(
    args: argparse.Namespace,
    x: torch.Tensor,
    schedule: str,
    micro_batches: int,
) -> tuple[States, int]:
    """Of a pipeline's rank; the tokens are those of a micro-batch."""
    step = simulate_pipeline(
        lambda: Llama(**SIZES[args.size][0]),
        loss_of,
        *(x, x),
        schedule=schedule,
        ranks=args.ranks,
        micro_batches=micro_batches,
        rank=args.rank,
        zeroed=False,
    )
    part = cut(whole_model(args), args.ranks)[args.rank]
    own = [4 * p.numel() for p in part.parameters()]
    adam = 2 * sum(own) + 4 * len(own)  # and a number of steps for each
    tokens = 2 * micro_batches * x.nbytes  # and targets
    peak = step.peak - step.split["buffers"] + adam + tokens
    return States(sum(own), sum(own), adam), peak


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Tensor by tensor: some are DTensors and others are not."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    peak: dict[str, int],
    args: argparse.Namespace,
) -> None:
    """What this rank holds."""
    held = held_states(model, optimizer)
    say(
        rank=args.rank,
        parameter_bytes=held.parameters,
        gradient_bytes=held.gradients,
        optimizer_bytes=held.optimizer,
        **peak,
        digest=digest(model),
    )


def digest(model: nn.Module) -> str:
    """A hash of this rank's weights: of equal ones it is equal."""
    found = hashlib.sha256()
    for p in model.parameters():
        own = p.to_local() if isinstance(p, DTensor) else p
        found.update(own.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    run_script(NAME, options(), train)
