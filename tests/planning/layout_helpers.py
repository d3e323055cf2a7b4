"""One rank of a layout, simulated: PyTorch's own classes, without data."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.pipelining.stage import InferenceMode
from torch.utils.checkpoint import checkpoint

from membudget.internals import FakeTensorMode
from membudget.ledger import RECIPES
from membudget.measuring import PeakTracker
from membudget.parallelism import context_parallel, cut, tensor_parallel
from membudget.sharding import shard, simulate_rank
from membudget.sharding._private import Waits, fake_group, real_meshes

DTYPES = {4: torch.float32, 2: torch.bfloat16}


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def simulated(job, layout, stage):
    """The tracker of a rank's second step, the optimizer's included."""
    shape = layout.pipeline, layout.data, layout.tensor
    ranks, rank = layout.cards, stage * layout.data * layout.tensor
    dtype = DTYPES[RECIPES[layout.recipe].parameters]
    with fake_group(ranks, rank):
        mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=("pipeline", "data", "tensor")
        )
        with FakeTensorMode(), real_meshes(), Waits():
            return _simulated(job, layout, stage, dtype, mesh)


def _simulated(job, layout, stage, dtype, mesh):
    job = replace(job, batch=job.batch // layout.data)
    with default_dtype(dtype):
        model = job.network.build("cpu")
    part = model
    blocks = list(model.blocks)
    if layout.tensor > 1:
        tensor_parallel(model, mesh["tensor"], layout.sequence)
    if layout.pipeline > 1:
        part = cut(model, layout.pipeline)[stage]
        blocks = list(part.blocks.values())
    if layout.checkpointed:
        for block in blocks:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False
            )
    if layout.data > 1:
        shard(part, blocks, "zero-2", mesh=mesh["data"])
    group = mesh.get_group("pipeline")
    make = _pipeline if layout.pipeline > 1 else _plain
    run, more = make(job, layout, stage, part, group, dtype)
    optimizer = torch.optim.Adam(part.parameters(), foreach=False)

    def step():
        run()
        optimizer.step()

    step()
    optimizer.zero_grad()
    with PeakTracker(part, optimizer, *more()) as tracker:
        step()
    return tracker


def _plain(job, layout, stage, model, group, dtype):
    ids = torch.zeros(job.batch, job.tokens, dtype=torch.long)
    targets = torch.zeros(job.batch, job.tokens, dtype=torch.long)

    def run():
        size = layout.micro_batch
        for x, y in zip(ids.split(size), targets.split(size), strict=True):
            loss_of(model(x), y).backward()
            torch.zeros(0)  # the tracker looks at each operator

    return run, lambda: [ids, targets]


def _pipeline(job, layout, stage, part, group, dtype):
    size, many = layout.micro_batch, job.batch // layout.micro_batch
    first, last = stage == 0, stage == layout.pipeline - 1
    ids = torch.zeros(job.batch, job.tokens, dtype=torch.long)
    shared = layout.tensor if layout.sequence else 1
    between = torch.empty(
        size,
        job.tokens // shared,
        job.network.width,
        dtype=dtype,
        requires_grad=True,
    )
    logits = torch.empty(
        size, job.tokens, job.network.vocabulary, dtype=dtype
    ).requires_grad_()
    held = PipelineStage(
        part,
        stage,
        layout.pipeline,
        torch.device("cpu"),
        input_args=(ids[:size] if first else between,),
        output_args=(logits if last else between,),
        output_grads=None if last else (between.detach(),),
        input_grads=None if first else (between.detach(),),
        group=group,
    )
    schedule = get_schedule_class(layout.schedule)(
        held, n_microbatches=many, loss_fn=loss_of
    )

    def static(stages, *rest):  # no other rank answers
        for one in stages:
            one._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = static

    def run():
        more = {"target": ids, "losses": []} if last else {}
        given = (ids,) if first else ()
        schedule.step(*given, return_outputs=False, **more)

    def more():
        infos = held.args_recv_info, held.grad_recv_info
        buffers = [
            info.buffer
            for kind in infos
            for each in kind.values()
            for info in each
            if info.buffer is not None
        ]
        return buffers + [ids] * (first or last)

    return run, more


def sharded(job, layout):
    """The most bytes of a rank's passes under FSDP2 and tensor parallelism.

    Its tensors are real: FSDP2 refuses a mesh of two dimensions on fake ones.
    """
    shape = layout.data, layout.tensor
    dtype = DTYPES[RECIPES[layout.recipe].parameters]
    with fake_group(layout.cards, 0):
        mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=("data", "tensor")
        )
        with default_dtype(dtype):
            model = job.network.build("cpu")
        if layout.tensor > 1:
            tensor_parallel(model, mesh["tensor"], layout.sequence)
        shard(model, model.blocks, "zero-3", mesh=mesh["data"])
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        size = layout.micro_batch
        ids = torch.zeros(size, job.tokens, dtype=torch.long)
        targets = ids.clone()

        def step():
            loss_of(model(ids), targets).backward()
            optimizer.step()

        step()
        optimizer.zero_grad()
        with PeakTracker(model, optimizer, ids, targets) as tracker:
            step()
    return tracker.peak


def in_a_ring(job, layout):
    """The most bytes of the last of a ring's ranks, in a step."""

    def cut_tokens(model, mesh):
        context_parallel(model, group=mesh.get_group())
        for block in model.blocks if layout.checkpointed else ():
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=False
            )

    size, tokens = layout.micro_batch, job.tokens // layout.context
    batch = torch.empty(size, tokens, dtype=torch.long)
    with default_dtype(DTYPES[RECIPES[layout.recipe].parameters]):
        return simulate_rank(
            partial(job.network.build, "cpu"),
            cut_tokens,
            lambda model, x, y: loss_of(model(x), y),
            *(batch, batch.clone()),
            ranks=layout.context,
            rank=layout.context - 1,
            micro_batches=job.batch // size,
        ).peak
