"""What the tests of the launcher and of checkpoints run on ranks."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from membudget.sharding import (
    CheckpointError,
    Ranks,
    load_checkpoint,
    save_checkpoint,
    saving,
    shard,
)

FOR_EVER = 86_400  # seconds: longer than any deadline of these tests


def place():
    return dist.get_rank(), dist.get_world_size()


def total(x):
    """The sum over the ranks of x + rank."""
    x = torch.as_tensor(x) + dist.get_rank()
    dist.all_reduce(x)
    return x


def echo(*args, **kwargs):
    return dist.get_rank(), args, kwargs


def apply(function, *args):
    return function(*args)


def kept(value):
    """What this process was given before."""
    before = getattr(kept, "value", None)
    kept.value = value
    return before


def talk(*texts):
    for text in texts:
        print(text.format(dist.get_rank()), end="")
    return sys.stderr.write("to stderr, without an end")


def talk_after(sign):
    """One line, then wait until the parent has seen it."""
    print("here")
    while not os.path.exists(sign):
        time.sleep(0.01)


def talk_much(lines, width):
    for i in range(lines):
        print(f"{i} {'.' * width}")


def boom():
    raise ValueError("boom")


def fate(rank, how):
    """One rank ends in some way; the others wait for it."""
    if dist.get_rank() == rank:
        if how == "raise":
            boom()
        if how == "leave":
            sys.exit("enough")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "real time":  # a signal without a name
            os.kill(os.getpid(), 40)
        if how == "exit":
            os._exit(0)
        if how == "crash":
            signal.raise_signal(signal.SIGSEGV)
    dist.barrier()


def fate_while_others_compute(rank, how):
    if dist.get_rank() == rank:
        fate(rank, how)
    time.sleep(FOR_EVER)


def talk_and_fail():
    print("before")
    print("unfinished", end="")
    boom()


def chained():
    try:
        boom()
    except ValueError as error:
        raise RuntimeError("after boom") from error


def hang():
    """A classic: a collective that the others do not call."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 2:
        sleep()


def sleep(seconds=FOR_EVER):
    print(os.getpid())
    time.sleep(seconds)


def parent():
    """Two ranks of this rank: one computes, one is in a collective."""
    pool = Ranks(2, show=lambda rank, line: print(line))
    pool.run(compute_or_wait)


def compute_or_wait():
    print("here")
    if dist.get_rank() == 1:
        time.sleep(FOR_EVER)
    dist.barrier()


def with_a_thread(daemon):
    """A thread that computes and prints, and does not end."""

    def run():
        print("from a thread", flush=True)
        time.sleep(FOR_EVER)

    thread = threading.Thread(target=run, daemon=daemon)
    thread.start()
    return thread.name


# Checkpoints ---------------------------------------------------------------


def network(widths=(7, 5, 3), seed=0):
    """Rows that neither 2 nor 4 ranks divide, frozen ones, and a buffer."""
    torch.manual_seed(seed)
    first, middle, last = widths
    model = nn.Sequential(
        nn.Linear(first, middle),
        nn.BatchNorm1d(middle),
        nn.Linear(middle, last),
        nn.Linear(last, 1),
    )
    model[3].requires_grad_(False)
    return model


def build(optimizer="adamw", **options):
    """Model and optimizer; sharded where there are ranks."""
    model = network(**options)
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        shard(model, [model[0], model[2]], mesh=mesh)
    kinds = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        "dampened": lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.5),
        "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, kinds[optimizer](trained)


def step(model, optimizer):
    """One that is the same, bit by bit, however the model is cut."""
    for p in model.parameters():
        if p.requires_grad:
            p.grad = (0.3 * p * p + 0.2).detach()
    optimizer.step()
    optimizer.zero_grad()
    model[1].running_mean.add_(0.5)


def full(value):
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if torch.is_tensor(value) else value


def everything(model, optimizer):
    """All values by name: parameters, buffers, the optimizer's."""
    found = {name: full(v) for name, v in model.state_dict().items()}
    names = {p: name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            found[f"{names[p]}, {key}"] = full(value)
    found["lr"] = [g["lr"] for g in optimizer.param_groups]
    return found


def train(folder, steps, keep=2, optimizer="adamw"):
    """Everything after each step; a checkpoint after each but the last."""
    model, optimizer = build(optimizer)
    found = []
    for i in range(steps):
        if i:
            step(model, optimizer)
        if i < steps - 1:
            save_checkpoint(folder, i, model, optimizer, keep=keep)
        found.append(everything(model, optimizer))
    return found


def resume(folder, optimizer="adamw", **options):
    """What was loaded, everything then, and after one more step."""
    model, optimizer = build(optimizer, **{"seed": 1, **options})
    loaded = load_checkpoint(folder, model, optimizer)
    found = everything(model, optimizer)
    step(model, optimizer)
    return loaded, found, everything(model, optimizer)


def without_a_layer(folder):
    """Two steps of the first layer alone: everything, saved and loaded."""

    def step(model, optimizer):
        model[0](torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    saved = build()
    step(*saved)
    save_checkpoint(folder, 1, *saved)
    step(*saved)
    loaded = build(seed=1)
    step(*loaded)
    for p in loaded[0][2].parameters():
        loaded[1].state[p] = {"step": torch.ones(())}
    load_checkpoint(folder, *loaded)
    step(*loaded)
    return everything(*saved), everything(*loaded)


def refused(folder, **options):
    """The error's text, and what it changed."""
    model, optimizer = build(**{"seed": 1, **options})
    before = everything(model, optimizer)
    try:
        load_checkpoint(folder, model, optimizer)
    except CheckpointError as error:
        return str(error), before, everything(model, optimizer)


def interrupted(folder, number, where, rank, how):
    """Save after `number` steps; something happens to a rank meanwhile."""
    model, optimizer = build()
    for _ in range(number):
        step(model, optimizer)

    def happen():
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else boom()

    def after(function):
        def call(*args, **kwargs):
            result = function(*args, **kwargs)
            happen()
            return result

        return call

    def before(function):
        def call(*args, **kwargs):
            happen()
            return function(*args, **kwargs)

        return call

    if where == "before":
        saving.dcp.save = before(saving.dcp.save)
    elif where == "writing":
        writer = saving.dcp.FileSystemWriter
        writer.write_data = after(writer.write_data)
    elif where == "after":
        saving.dcp.save = after(saving.dcp.save)
    elif where == "deleting":
        saving.shutil.rmtree = after(saving.shutil.rmtree)
    elif where == "manifest":
        saving.json.dump = after(saving.json.dump)
    save_checkpoint(folder, number, model, optimizer)
