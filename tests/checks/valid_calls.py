"""One valid call of every public function, class and method.

A row is ``(function, arguments)``, made anew for each call.
"""

import types
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from membudget import (
    accumulation,
    checkpointing,
    data,
    ledger,
    measuring,
    models,
    precision,
    sharding,
    widgets,
)

ROOMS = (
    measuring,
    models,
    data,
    ledger,
    accumulation,
    checkpointing,
    precision,
    sharding,
    widgets,
)
"""What a later one exports again is an earlier one's."""


def own(room: types.ModuleType) -> list[str]:
    """What a room exports."""
    if hasattr(room, "__all__"):
        return room.__all__
    return [
        name
        for name, thing in vars(room).items()
        if getattr(thing, "__module__", "") == room.__name__
        and not name.startswith("_")
    ]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)


def optimizer(of: nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((of or model()).parameters(), lr=0.1)


def step(**rest) -> dict:
    of = model()
    return dict(model=of, loss=loss, batch=batch(), optimizer=optimizer(of))


KEPT = {"keep_gradients": False, "inference": False}


def tracker() -> measuring.PeakTracker:
    return measuring.trace_step(model(), loss, *batch())


def snapshot() -> dict:
    allocator = measuring.CachingAllocator()
    allocator.free(allocator.allocate(1000))
    return allocator.snapshot()


def footprint() -> accumulation.Footprint:
    lines = [ledger.PeakLine(100, 10)]
    return accumulation.Footprint(100, 100, 200, lines, lines)


def window() -> accumulation.Window:
    return accumulation.Accumulator(OF, optimizer(OF)).window()


def backward(loss, count):
    with window() as opened:
        opened.backward(loss, count)
        opened.step()


def over(micro_batches):
    with window() as opened:
        list(opened.over(micro_batches))


def mixed() -> precision.MixedPrecision:
    return precision.MixedPrecision(optimizer(), "fp32")


def units() -> list[sharding.Unit]:
    return sharding.units_of(model(), [])


def paper_row() -> dict:
    x = ledger.PaperTensor(4)
    return dict(name="a", operator="a", reads=(x,), makes=(x,))


def run_ranks(worker, *args, deadline=None, **kwargs):
    pool = sharding.Ranks(1)
    with (
        mock.patch.object(pool, "_start"),
        mock.patch.object(pool, "_collect", lambda *rest: []),
    ):
        return pool.run(worker, *args, deadline=deadline, **kwargs)


def launch(worker, *args, ranks=None, **options):
    with mock.patch.object(sharding.Ranks, "run", lambda *rest: []):
        return sharding.launch(worker, *args, ranks=ranks, **options)


def entered(manager):
    with manager:
        return None


OF = model()
GPT = dict(vocabulary=8, width=4, depth=1, heads=2)
PAPER = ledger.Transformer(**GPT, context=8)
RUN = checkpointing.simulate(2, [0, 1])
SCALE = precision.DynamicScale()
FP16 = precision.FORMATS["fp16"]
STAGES = {
    name: 1 for name in ("output", "inner", "gradients", "gradient", "time")
}
TENSORS = [torch.ones(3)]
HERE = Path(__file__).parent

ROWS = {
    # accumulation
    "accumulation.Accumulator": lambda: (
        accumulation.Accumulator,
        dict(
            model=model(),
            optimizer=optimizer(),
            scaler=None,
            max_norm=1.0,
            reduction="mean",
            process_group=None,
        ),
    ),
    "accumulation.Accumulator.window": lambda: (
        accumulation.Accumulator(model(), optimizer()).window,
        dict(total=2),
    ),
    "accumulation.Footprint.peak": lambda: (
        footprint().peak,
        dict(micro_batch=2, steps=2),
    ),
    "accumulation.Plan": lambda: (
        accumulation.Plan,
        dict(
            global_batch=5,
            micro_batch=2,
            samples=9,
            footprint=footprint(),
            normalisation="window",
        ),
    ),
    "accumulation.Plan.sample_weight": lambda: (
        accumulation.Plan(5, 2, 9, footprint()).sample_weight,
        dict(size=2),
    ),
    "accumulation.Window.backward": lambda: (
        backward,
        dict(loss=OF(torch.ones(1, 4)).sum(), count=2),
    ),
    "accumulation.Window.over": lambda: (over, dict(micro_batches=[1, 2])),
    "accumulation.footprint": lambda: (
        accumulation.footprint,
        dict(
            build=lambda: (of := model(), optimizer(of)),
            loss=lambda of, size: of(torch.ones(size, 4)).sum(),
            sizes=(1, 2, 3),
        ),
    ),
    "accumulation.gradient_noise": lambda: (
        accumulation.gradient_noise,
        dict(gradients=[[torch.ones(2)], [torch.zeros(2)]], counts=[1, 2]),
    ),
    "accumulation.in_place": lambda: (
        accumulation.in_place,
        dict(total=[torch.ones(2)], gradients=[torch.ones(2)]),
    ),
    "accumulation.mean_of_means_error": lambda: (
        accumulation.mean_of_means_error,
        dict(counts=[1, 2]),
    ),
    "accumulation.memory_aware": lambda: (
        accumulation.memory_aware,
        dict(is_tight=lambda: True),
    ),
    "accumulation.new_sum": lambda: (
        accumulation.new_sum,
        dict(total=[torch.ones(2)], gradients=[torch.ones(2)]),
    ),
    "accumulation.partition": lambda: (
        accumulation.partition,
        dict(total=5, micro_batch=2),
    ),
    "accumulation.sample_weights": lambda: (
        accumulation.sample_weights,
        dict(counts=[1, 2], normalisation="window"),
    ),
    "accumulation.sum_gradients": lambda: (
        accumulation.sum_gradients,
        dict(
            losses=[(weight := torch.ones(2, requires_grad=True)).sum()],
            parameters=[weight],
            add=accumulation.new_sum,
        ),
    ),
    "accumulation.token_counts": lambda: (
        accumulation.token_counts,
        dict(labels=torch.ones(2, 3), micro_batches=[slice(0, 2)]),
    ),
    "accumulation.weights": lambda: (
        accumulation.weights,
        dict(counts=[1, 2]),
    ),
    "accumulation.windows": lambda: (
        accumulation.windows,
        dict(micro_batches=[1, 2, 3], steps=2),
    ),
    # checkpointing
    "checkpointing.Checkpointed": lambda: (
        checkpointing.Checkpointed,
        dict(
            stages=(nn.Linear(2, 2), nn.ReLU()),
            segments=[[0, 1]],
            keep=checkpointing.MATMULS,
            preserve_rng_state=True,
        ),
    ),
    "checkpointing.Checkpointed.forward": lambda: (
        checkpointing.Checkpointed(nn.ReLU(), segments=[[0]]).forward,
        dict(x=torch.ones(2)),
    ),
    "checkpointing.Moment.part": lambda: (
        RUN.moments[0].part,
        dict(name="tapes"),
    ),
    "checkpointing.Stage": lambda: (
        checkpointing.Stage,
        STAGES
        | dict(
            holds_input=True,
            holds_output=True,
            forward_workspace=0,
            record_workspace=0,
            recompute_workspace=-1,
            backward_workspace=0,
            again_workspace=None,
            recompute_time=None,
            backward_time=2,
            name="",
        ),
    ),
    "checkpointing.actions": lambda: (
        checkpointing.actions,
        dict(segments=[[0, 1], 2], length=3),
    ),
    "checkpointing.equal_segments": lambda: (
        checkpointing.equal_segments,
        dict(length=4, count=2),
    ),
    "checkpointing.least_peak": lambda: (
        checkpointing.least_peak,
        dict(length=4),
    ),
    "checkpointing.no_segments": lambda: (
        checkpointing.no_segments,
        dict(length=4),
    ),
    "checkpointing.peak_of_segments": lambda: (
        checkpointing.peak_of_segments,
        dict(length=4, count=2),
    ),
    "checkpointing.profile": lambda: (
        checkpointing.profile,
        dict(stages=(nn.Linear(2, 2),), x=torch.ones(2), gradients=True),
    ),
    "checkpointing.pytorch_segments": lambda: (
        checkpointing.pytorch_segments,
        dict(length=4, count=2),
    ),
    "checkpointing.segments_of": lambda: (
        checkpointing.segments_of,
        dict(sizes=[2, 2]),
    ),
    "checkpointing.simulate": lambda: (
        checkpointing.simulate,
        dict(chain=2, schedule=[0, 1]),
    ),
    # data
    "data.digits": lambda: (data.digits, dict(dtype=torch.float32)),
    # ledger
    "ledger.Chain": lambda: (
        ledger.Chain,
        dict(model=model(), sample=(4,), segments=((0, 1),)),
    ),
    "ledger.Chain.buffers": lambda: (
        ledger.Chain(model(), (4,)).buffers,
        dict(itemsize=4),
    ),
    "ledger.Chain.write": lambda: (
        ledger.Chain(model(), (4,)).write,
        dict(
            batch=2,
            itemsize=4,
            autocast=None,
            lists="cpu",
            checkpointed=False,
        ),
    ),
    "ledger.Paper": lambda: (ledger.Paper, dict(autocast=2, lists="cpu")),
    "ledger.Paper.checkpoint": lambda: (
        PAPER.write(1, 2).checkpoint,
        dict(start=2),
    ),
    "ledger.Paper.input": lambda: (
        ledger.Paper().input,
        dict(elements=3, itemsize=4),
    ),
    "ledger.Paper.inside": lambda: (ledger.Paper().inside, dict(name="a")),
    "ledger.Paper.parameter": lambda: (
        ledger.Paper().parameter,
        dict(elements=3, itemsize=4),
    ),
    "ledger.Paper.write": lambda: (
        (paper := ledger.Paper()).write,
        dict(operator="a", reads=(paper.input(3),), makes=(paper.input(3),)),
    ),
    "ledger.PaperTensor": lambda: (
        ledger.PaperTensor,
        dict(elements=3, itemsize=4, trained=True, kind="", base=None),
    ),
    "ledger.Prediction.peak_in": lambda: (
        ledger.predict(PAPER, 1, 2).peak_in,
        dict(phase="forward"),
    ),
    "ledger.Row": lambda: (
        ledger.Row,
        paper_row()
        | dict(
            saves=(),
            extra=0,
            needs=True,
            after=False,
            steps=(),
            gives=(),
            watches=(),
            views=(),
        ),
    ),
    "ledger.Segment": lambda: (
        ledger.Segment,
        dict(rows=[ledger.Row(**paper_row())]),
    ),
    "ledger.Transformer": lambda: (
        ledger.Transformer,
        GPT
        | dict(
            context=8,
            hidden=16,
            kv_heads=2,
            family="gpt",
            tied=False,
            fused=True,
            dropout=False,
        ),
    ),
    "ledger.Transformer.buffers": lambda: (PAPER.buffers, dict(itemsize=4)),
    "ledger.Transformer.build": lambda: (PAPER.build, dict(device="meta")),
    "ledger.Transformer.write": lambda: (
        PAPER.write,
        dict(
            batch=1,
            tokens=2,
            itemsize=4,
            autocast=None,
            lists="cpu",
            checkpointed=False,
        ),
    ),
    "ledger.account": lambda: (
        ledger.account,
        step() | dict(micro_batch=1, on="cpu", estimate=False) | KEPT,
    ),
    **{
        f"ledger.{name}": lambda name=name: (
            getattr(ledger, name),
            dict(shape=PAPER, batch=1, tokens=2, itemsize=4),
        )
        for name in ("activations", "block_activations", "head_activations")
    },
    "ledger.bytes_per_parameter": lambda: (
        ledger.bytes_per_parameter,
        dict(recipe="fp32", optimizer="adam"),
    ),
    "ledger.korthikanti": lambda: (
        ledger.korthikanti,
        dict(batch=1, tokens=2, width=4, heads=2, fused=False),
    ),
    "ledger.largest_batch": lambda: (
        ledger.largest_batch,
        step() | dict(limit=2000, on="cpu", check=False) | KEPT,
    ),
    "ledger.loss_peak": lambda: (
        ledger.loss_peak,
        dict(batch=1, tokens=2, vocabulary=8, itemsize=4),
    ),
    "ledger.optimizer_bytes": lambda: (
        ledger.optimizer_bytes,
        dict(sizes=[3], recipe="fp32", optimizer="adam"),
    ),
    "ledger.peak_at": lambda: (
        ledger.peak_at,
        dict(lines=[ledger.PeakLine(100, 10)], size=2),
    ),
    "ledger.peak_lines": lambda: (
        ledger.peak_lines,
        dict(sizes=(1, 2), timelines=[[10, 20], [20, 40]]),
    ),
    "ledger.predict": lambda: (
        ledger.predict,
        dict(
            network=PAPER,
            batch=2,
            sizes=(2,),
            recipe="fp32",
            lists="cpu",
            optimizer="adam",
            micro_batch=1,
            checkpointed=False,
            foreach=False,
            buffers=0,
        ),
    ),
    "ledger.states": lambda: (
        ledger.states,
        dict(model=[3], recipe="fp32", optimizer="adam"),
    ),
    "ledger.update_workspace": lambda: (
        ledger.update_workspace,
        dict(sizes=[3], recipe="fp32", optimizer="adam", foreach=False),
    ),
    "ledger.walk": lambda: (
        ledger.walk,
        dict(
            papers=[PAPER.write(1, 2)],
            states=0,
            inputs=0,
            gradients=0,
            buffers=0,
            workspace=(),
        ),
    ),
    # measuring
    "measuring.Allocation.alive": lambda: (
        tracker().allocations[0].alive,
        dict(moment=1),
    ),
    "measuring.CachingAllocator": lambda: (
        measuring.CachingAllocator,
        dict(capacity=2**30, expandable_segments=False),
    ),
    "measuring.CachingAllocator.allocate": lambda: (
        measuring.CachingAllocator().allocate,
        dict(size=1000),
    ),
    "measuring.CachingAllocator.free": lambda: (
        (allocator := measuring.CachingAllocator()).free,
        dict(handle=allocator.allocate(1000)),
    ),
    "measuring.CatchOutOfMemory": lambda: (
        measuring.CatchOutOfMemory,
        step() | dict(budget=10**6, changes={"another": loss}, device="cpu"),
    ),
    "measuring.MemoryMonitor": lambda: (
        measuring.MemoryMonitor,
        dict(
            device=None,
            read=lambda: 1,
            budget=10,
            window=3,
            warning=0.5,
            critical=0.9,
        ),
    ),
    "measuring.MemoryMonitor.__call__": lambda: (
        measuring.MemoryMonitor(read=lambda: 1, budget=10),
        dict(step=3),
    ),
    "measuring.ModuleStack": lambda: (
        measuring.ModuleStack,
        dict(models=(model(),), called=print),
    ),
    "measuring.PeakTracker": lambda: (
        measuring.PeakTracker,
        dict(existing=(model(),), device="cpu", budget=10**6),
    ),
    "measuring.PeakTracker.at": lambda: (tracker().at, dict(moment=1)),
    "measuring.PeakTracker.mark": lambda: (
        measuring.PeakTracker().mark,
        dict(label="a"),
    ),
    "measuring.PeakTracker.split": lambda: (
        tracker().split,
        dict(moment=1),
    ),
    "measuring.SavedBytes": lambda: (
        measuring.SavedBytes,
        dict(exclude=(model(), torch.ones(2))),
    ),
    "measuring.dry_run": lambda: (
        measuring.dry_run,
        step()
        | dict(micro_batch=1, device=None, on="cpu", estimate=False)
        | KEPT,
    ),
    "measuring.format_bytes": lambda: (
        measuring.format_bytes,
        dict(count=1000),
    ),
    **{
        f"measuring.{name}": lambda name=name: (
            getattr(measuring, name),
            dict(device="cpu"),
        )
        for name in (
            "process_limit",
            "read_memory",
            "reset_peak",
            "resolve_device",
        )
    },
    "measuring.optimizer_tensors": lambda: (
        measuring.optimizer_tensors,
        dict(optimizer=optimizer()),
    ),
    "measuring.replay": lambda: (
        measuring.replay,
        dict(events=[("allocate", 1, 5), ("free", 1, 5)]),
    ),
    "measuring.round_size": lambda: (measuring.round_size, dict(size=1000)),
    "measuring.segment_size": lambda: (
        measuring.segment_size,
        dict(size=1000),
    ),
    "measuring.summarise": lambda: (
        measuring.summarise,
        dict(snapshot=snapshot(), device=0, largest=3),
    ),
    "measuring.time_calls": lambda: (
        measuring.time_calls,
        dict(
            call=lambda: None,
            device="cpu",
            warm_up=1,
            repeats=2,
            synchronise=True,
        ),
    ),
    "measuring.trace_events": lambda: (
        measuring.trace_events,
        dict(snapshot=snapshot(), device=0),
    ),
    "measuring.trace_step": lambda: (
        measuring.trace_step,
        step() | dict(micro_batch=1, device="cpu", budget=10**6) | KEPT,
    ),
    "measuring.unsure": lambda: (
        measuring.unsure,
        dict(tracker=tracker()),
    ),
    # models
    "models.Block": lambda: (
        models.Block,
        dict(width=4, heads=2, fused=True, dropout=0.0),
    ),
    "models.Block.forward": lambda: (
        models.Block(4, 2).forward,
        dict(x=torch.ones(1, 2, 4)),
    ),
    "models.GPT": lambda: (
        models.GPT,
        GPT | dict(context=8, fused=True, dropout=0.0, tied=False),
    ),
    "models.GPT.forward": lambda: (
        models.GPT(**GPT, context=8).forward,
        dict(tokens=torch.zeros(1, 2, dtype=torch.int64)),
    ),
    "models.Llama": lambda: (
        models.Llama,
        GPT | dict(kv_heads=1, hidden=8, fused=True, tied=False),
    ),
    "models.Llama.forward": lambda: (
        models.Llama(**GPT, kv_heads=1, hidden=8).forward,
        dict(tokens=torch.zeros(1, 2, dtype=torch.int64)),
    ),
    "models.LlamaBlock": lambda: (
        models.LlamaBlock,
        dict(width=4, heads=2, kv_heads=1, hidden=8, fused=True),
    ),
    "models.LlamaBlock.forward": lambda: (
        models.LlamaBlock(4, 2, 1, 8).forward,
        dict(x=torch.ones(1, 2, 4), turns=models.rotary(2, 2)),
    ),
    "models.MLPBlock": lambda: (models.MLPBlock, dict(width=4, ratio=2)),
    "models.MLPBlock.forward": lambda: (
        models.MLPBlock(4).forward,
        dict(x=torch.ones(2, 4)),
    ),
    "models.attention": lambda: (
        models.attention,
        dict(
            q=torch.ones(1, 1, 2, 2),
            k=torch.ones(1, 1, 2, 2),
            v=torch.ones(1, 1, 2, 2),
            drop=lambda weights: weights,
        ),
    ),
    "models.chain": lambda: (models.chain, dict(width=4, depth=2)),
    "models.convnet": lambda: (
        models.convnet,
        dict(channels=(2, 3), inputs=3, outputs=2),
    ),
    "models.mlp": lambda: (
        models.mlp,
        dict(inputs=4, width=4, depth=2, outputs=2),
    ),
    "models.mlp_blocks": lambda: (
        models.mlp_blocks,
        dict(width=4, depth=2, outputs=2),
    ),
    "models.rotary": lambda: (
        models.rotary,
        dict(tokens=2, size=4, device=None),
    ),
    "models.rotate": lambda: (
        models.rotate,
        dict(x=torch.ones(1, 2, 4), turns=models.rotary(2, 4)),
    ),
    # precision
    "precision.Autocast": lambda: (
        precision.Autocast,
        dict(device="cuda", dtype=torch.bfloat16),
    ),
    "precision.DynamicScale": lambda: (
        precision.DynamicScale,
        dict(start=4.0, growth=2.0, backoff=0.5, interval=2),
    ),
    "precision.DynamicScale.scales": lambda: (
        SCALE.scales,
        dict(overflows=[True, False]),
    ),
    "precision.DynamicScale.settle": lambda: (
        SCALE.settle,
        dict(limit=8.0, steps=3),
    ),
    "precision.Format": lambda: (
        precision.Format,
        dict(
            name="fp16",
            exponent_bits=5,
            fraction_bits=10,
            bytes=2,
            dtype=torch.float16,
            infinite=True,
        ),
    ),
    **{
        f"precision.Format.{name}": lambda name=name: (
            getattr(FP16, name),
            dict(x=0.1),
        )
        for name in ("encode", "round", "spacing", "text")
    },
    "precision.Format.value": lambda: (
        FP16.value,
        dict(sign=0, exponent=3, fraction=4),
    ),
    "precision.MasterWeights": lambda: (
        precision.MasterWeights,
        dict(
            model=model(),
            optimizer=lambda copies: torch.optim.SGD(copies, lr=0.1),
        ),
    ),
    "precision.MixedPrecision": lambda: (
        precision.MixedPrecision,
        dict(
            optimizer=optimizer(),
            format="fp16",
            max_norm=1.0,
            scaler=None,
            emulated=True,
        ),
    ),
    "precision.MixedPrecision.backward": lambda: (
        mixed().backward,
        dict(loss=torch.ones((), requires_grad=True) * 2, share=0.5),
    ),
    "precision.ScaleTrace": lambda: (
        precision.ScaleTrace,
        dict(scaler=torch.amp.GradScaler("cpu")),
    ),
    "precision.best_scale": lambda: (
        precision.best_scale,
        dict(tensors=TENSORS, format="fp16"),
    ),
    "precision.binades": lambda: (precision.binades, dict(tensors=TENSORS)),
    "precision.format_of": lambda: (precision.format_of, dict(name="fp16")),
    "precision.list_of": lambda: (
        precision.list_of,
        dict(operator="linear", device="cpu"),
    ),
    "precision.lost": lambda: (
        precision.lost,
        dict(tensors=TENSORS, format="fp16", scale=2.0),
    ),
    "precision.support": lambda: (
        precision.support,
        dict(format="fp16", device="cpu"),
    ),
    "precision.tf32": lambda: (
        lambda device: entered(precision.tf32(device)),
        dict(device="cpu"),
    ),
    # sharding
    "sharding.CommunicationCounter.sent": lambda: (
        sharding.CommunicationCounter().sent,
        dict(ranks=2),
    ),
    "sharding.Ranks": lambda: (
        sharding.Ranks,
        dict(ranks=2, backend="gloo", deadline=1.0, show=None),
    ),
    "sharding.Ranks.run": lambda: (
        run_ranks,
        dict(worker=print, args=(3,), deadline=2.0),
    ),
    "sharding.Unit": lambda: (
        sharding.Unit,
        dict(
            name="",
            shapes=((3, 2), (2,)),
            itemsizes=(4, 2),
            frozen=frozenset({1}),
            tied=False,
        ),
    ),
    "sharding.Unit.stored": lambda: (
        units()[0].stored,
        dict(ranks=2, itemsize=2),
    ),
    "sharding.Unit.padded": lambda: (units()[0].padded, dict(ranks=2)),
    "sharding.first_rank": lambda: (
        sharding.first_rank,
        dict(rank=1, line="a"),
    ),
    "sharding.fsdp_traffic": lambda: (
        sharding.fsdp_traffic,
        dict(
            units=units(),
            ranks=2,
            stage="zero-3",
            gathered=4,
            reduced=4,
            accumulation_steps=2,
            synchronise_last=False,
        ),
    ),
    "sharding.held_states": lambda: (
        sharding.held_states,
        dict(model=model(), optimizer=optimizer()),
    ),
    "sharding.joined": lambda: (
        lambda backend: entered(sharding.joined(backend)),
        dict(backend=None),
    ),
    "sharding.launch": lambda: (
        launch,
        dict(worker=print, args=(3,), ranks=2),
    ),
    "sharding.load_checkpoint": lambda: (
        sharding.load_checkpoint,
        dict(folder=HERE, model=(of := model()), optimizer=optimizer(of)),
    ),
    "sharding.rank_moments": lambda: (
        sharding.rank_moments,
        dict(
            units=units(),
            ranks=2,
            rank=1,
            stage="zero-3",
            optimizer="adam",
            itemsize=4,
            gathered=2,
            reduced=4,
            synchronise=True,
            waiting=False,
            embedding=0,
            version="2.13",
        ),
    ),
    "sharding.rank_states": lambda: (
        sharding.rank_states,
        dict(units=units(), ranks=2, rank=1, optimizer="adam", itemsize=4),
    ),
    "sharding.rows": lambda: (
        sharding.rows,
        dict(length=10, ranks=4, rank=3),
    ),
    "sharding.sent": lambda: (
        sharding.sent,
        dict(collective="all-reduce", size=8, ranks=2),
    ),
    "sharding.simulate_rank": lambda: (
        sharding.simulate_rank,
        dict(
            build=model,
            shard=lambda of, mesh: sharding.shard(of, [of[0]], mesh=mesh),
            loss=loss,
            batch=batch(),
            ranks=2,
            rank=1,
            optimizer=None,
            micro_batches=1,
            synchronise_last=False,
            mesh=None,
        ),
    ),
    "sharding.units_of": lambda: (
        sharding.units_of,
        dict(model=(of := model()), blocks=[of[0]]),
    ),
    "sharding.zero_states": lambda: (
        sharding.zero_states,
        dict(
            parameters=10,
            ranks=2,
            stage="zero-3",
            recipe="master",
            optimizer="adam",
            waiting=False,
        ),
    ),
    "sharding.zero_traffic": lambda: (
        sharding.zero_traffic,
        dict(
            parameters=10,
            stage="zero-3",
            recipe="master",
            ranks=2,
            accumulation_steps=2,
            synchronise_last=False,
        ),
    ),
    # widgets
    "widgets.Accumulation": lambda: (
        widgets.Accumulation,
        dict(
            footprint=footprint(),
            micro_batch=2,
            steps=2,
            global_batch=4,
            normalisation="window",
            samples=9,
            budget=10**4,
            label="a",
        ),
    ),
    "widgets.Ledger": lambda: (
        widgets.Ledger,
        dict(preset="GPT-2 124M"),
    ),
    "widgets.Precision": lambda: (
        widgets.Precision,
        dict(
            gradients=TENSORS,
            network=PAPER,
            tokens=2,
            batches=(1, 2),
            number=0.1,
            format="fp16",
            scale=1,
            batch=1,
            checkpointed=False,
            budget=None,
            lists="cpu",
            label="",
        ),
    ),
    "widgets.Precision.show": lambda: (
        widgets.Precision(TENSORS, PAPER, 2).show,
        dict(gradients=TENSORS),
    ),
    "widgets.Segments": lambda: (
        widgets.Segments,
        dict(
            chain=None,
            layers=4,
            segments=2,
            checkpoint=1.0,
            split="balanced",
            measured=None,
            label="",
        ),
    ),
    "widgets.Sharding": lambda: (
        widgets.Sharding,
        dict(
            model="7.5 B",
            ranks=4,
            stage="zero-3",
            recipe="master",
            accumulation_steps=1,
            synchronise_last=False,
            card="none",
        ),
    ),
    "widgets.Timeline": lambda: (
        widgets.Timeline,
        dict(steps={"a": tracker()}, step="a", moment=1, label=""),
    ),
    "widgets.format_number": lambda: (widgets.format_number, dict(value=2.5)),
}
