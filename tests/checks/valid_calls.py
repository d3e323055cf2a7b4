"""One valid call of every public function, class and method.

A row makes the arguments that have no default, anew for each call, others
where another value shows more, and a method's ``self``.
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
    planning,
    policy,
    precision,
    schedules,
    sharding,
    tabletop,
    widgets,
)

ROOMS = (
    measuring,
    models,
    data,
    tabletop,
    policy,
    ledger,
    accumulation,
    checkpointing,
    precision,
    schedules,
    sharding,
    planning,
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


def step() -> dict:
    of = model()
    return dict(model=of, loss=loss, batch=batch(), optimizer=optimizer(of))


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


def job() -> planning.Job:
    return planning.Job(PAPER, 2, 2)


def own_job() -> planning.OwnJob:
    of = model()
    return planning.OwnJob(of, loss, *batch(), optimizer=optimizer(of))


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


def entered(manager):
    with manager:
        return None


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def nothing(scenes) -> torch.Tensor:
    return torch.zeros(len(scenes), 1, 3, dtype=torch.int64)


OF = model()
GPT = dict(vocabulary=8, width=4, depth=1, heads=2)
PAPER = ledger.Transformer(**GPT, context=8)
JOB = planning.Job(PAPER, 2, 2)
PLAN = planning.Plan(1)
MACHINE = planning.Machine(1e12, 1e11, 1e-5, 1e10, "made up")
RUN = checkpointing.simulate(2, [0, 1])
SCALE = precision.DynamicScale()
TABLE = tabletop.scenes(2, seeded())
EXAMPLES = tabletop.examples(2, seeded())
POLICY = policy.Policy(4, 1, 2, 32)
FP16 = precision.FORMATS["fp16"]
STAGES = {
    name: 1 for name in ("output", "inner", "gradients", "gradient", "time")
}
TENSORS = [torch.ones(3)]
HERE = Path(__file__).parent
OF_A_DEVICE = ("process_limit", "read_memory", "reset_peak", "resolve_device")
OF_A_NUMBER = ("encode", "round", "spacing", "text")

STAND_INS = {
    "accumulation.Window.backward": backward,
    "accumulation.Window.over": over,
    "precision.tf32": lambda device: entered(precision.tf32(device)),
    "sharding.Ranks.run": run_ranks,
}
"""What is called instead: it enters the context, or starts no process."""

ROWS = {
    # accumulation
    "accumulation.Accumulator": lambda: dict(
        model=model(), optimizer=optimizer(), max_norm=1.0
    ),
    "accumulation.Accumulator.window": lambda: dict(
        self=accumulation.Accumulator(model(), optimizer()), total=2
    ),
    "accumulation.Controller": lambda: dict(
        micro_batch=2,
        budget=9,
        most=3,
        least=1,
        target=0.7,
        tolerance=0.1,
        shrink=0.8,
        grow=1.2,
    ),
    "accumulation.Controller.__call__": lambda: dict(
        self=accumulation.Controller(2, budget=9, most=3),
        peak=2,
        micro_batch=2,
    ),
    "accumulation.Footprint.peak": lambda: dict(
        self=footprint(), micro_batch=2, steps=2
    ),
    "accumulation.Plan": lambda: dict(
        global_batch=5, micro_batch=2, samples=9, footprint=footprint()
    ),
    "accumulation.Plan.sample_weight": lambda: dict(
        self=accumulation.Plan(5, 2, 9, footprint()), size=2
    ),
    "accumulation.Window.backward": lambda: dict(
        loss=OF(torch.ones(1, 4)).sum(), count=2
    ),
    "accumulation.Window.over": lambda: dict(micro_batches=[1, 2]),
    "accumulation.footprint": lambda: dict(
        build=lambda: (of := model(), optimizer(of)),
        loss=lambda of, size: of(torch.ones(size, 4)).sum(),
        sizes=(1, 2, 3),
    ),
    "accumulation.gradient_noise": lambda: dict(
        gradients=[[torch.ones(2)], [torch.zeros(2)]], counts=[1, 2]
    ),
    "accumulation.in_place": lambda: dict(
        total=[torch.ones(2)], gradients=[torch.ones(2)]
    ),
    "accumulation.mean_of_means_error": lambda: dict(counts=[1, 2]),
    "accumulation.memory_aware": lambda: dict(is_tight=lambda: True),
    "accumulation.new_sum": lambda: dict(
        total=[torch.ones(2)], gradients=[torch.ones(2)]
    ),
    "accumulation.partition": lambda: dict(total=5, micro_batch=2),
    "accumulation.recovering_step": lambda: dict(
        accumulator=accumulation.Accumulator(of := model(), optimizer(of)),
        loss=loss,
        batch=batch(),
        micro_batch=1,
        count=lambda x, y: len(x),
    ),
    "accumulation.sum_gradients": lambda: dict(
        losses=[(weight := torch.ones(2, requires_grad=True)).sum()],
        parameters=[weight],
        add=accumulation.new_sum,
    ),
    "accumulation.weights": lambda: dict(counts=[1, 2]),
    "accumulation.windows": lambda: dict(micro_batches=[1, 2, 3], steps=2),
    # checkpointing
    "checkpointing.Checkpointed": lambda: dict(
        stages=(nn.Linear(2, 2), nn.ReLU()),
        segments=[[0, 1]],
        keep=checkpointing.MATMULS,
    ),
    "checkpointing.Checkpointed.forward": lambda: dict(
        self=checkpointing.Checkpointed(nn.ReLU(), segments=[[0]]),
        x=torch.ones(2),
    ),
    "checkpointing.Moment.part": lambda: dict(
        self=RUN.moments[0], name="tapes"
    ),
    "checkpointing.Stage": lambda: (
        STAGES | dict(recompute_workspace=-1, backward_workspace=0)
    ),
    "checkpointing.actions": lambda: dict(segments=[[0, 1], 2], length=3),
    "checkpointing.equal_segments": lambda: dict(length=4, count=2),
    "checkpointing.least_peak": lambda: dict(length=4),
    "checkpointing.no_segments": lambda: dict(length=4),
    "checkpointing.peak_of_segments": lambda: dict(length=4, count=2),
    "checkpointing.profile": lambda: dict(
        stages=(nn.Linear(2, 2),), x=torch.ones(2)
    ),
    "checkpointing.pytorch_segments": lambda: dict(length=4, count=2),
    "checkpointing.segments_of": lambda: dict(sizes=[2, 2]),
    "checkpointing.simulate": lambda: dict(chain=2, schedule=[0, 1]),
    # ledger
    "ledger.Chain": lambda: dict(
        model=model(), sample=(4,), segments=((0, 1),)
    ),
    "ledger.Chain.buffers": lambda: dict(self=ledger.Chain(model(), (4,))),
    "ledger.Chain.write": lambda: dict(
        self=ledger.Chain(model(), (4,)), batch=2
    ),
    "ledger.Paper": lambda: dict(autocast=2),
    "ledger.Paper.checkpoint": lambda: dict(self=PAPER.write(1, 2), start=2),
    "ledger.Paper.input": lambda: dict(self=ledger.Paper(), elements=3),
    "ledger.Paper.inside": lambda: dict(self=ledger.Paper(), name="a"),
    "ledger.Paper.parameter": lambda: dict(self=ledger.Paper(), elements=3),
    "ledger.Paper.write": lambda: dict(
        self=(paper := ledger.Paper()),
        operator="a",
        reads=(paper.input(3),),
        makes=(paper.input(3),),
    ),
    "ledger.PaperTensor": lambda: dict(elements=3),
    "ledger.Prediction.peak_in": lambda: dict(
        self=ledger.predict(PAPER, 1, 2), phase="forward"
    ),
    "ledger.Row": paper_row,
    "ledger.Segment": lambda: dict(rows=[ledger.Row(**paper_row())]),
    "ledger.Transformer": lambda: GPT | dict(context=8, hidden=16, kv_heads=2),
    "ledger.Transformer.buffers": lambda: dict(self=PAPER),
    "ledger.Transformer.build": lambda: dict(self=PAPER),
    "ledger.Transformer.write": lambda: dict(self=PAPER, batch=1, tokens=2),
    "ledger.account": lambda: step() | dict(micro_batch=1),
    **dict.fromkeys(
        [f"ledger.{of}activations" for of in ("", "block_", "head_")],
        lambda: dict(shape=PAPER, batch=1, tokens=2),
    ),
    "ledger.korthikanti": lambda: dict(batch=1, tokens=2, width=4, heads=2),
    "ledger.largest_batch": lambda: step() | dict(limit=2000, of=2),
    "ledger.optimizer_bytes": lambda: dict(
        sizes=[3], recipe="fp32", optimizer="adam"
    ),
    "ledger.peak_at": lambda: dict(lines=[ledger.PeakLine(100, 10)], size=2),
    "ledger.peak_lines": lambda: dict(
        sizes=(1, 2), timelines=[[10, 20], [20, 40]]
    ),
    "ledger.predict": lambda: dict(
        network=PAPER, batch=2, sizes=(2,), micro_batch=1, buffers=0
    ),
    "ledger.rules": lambda: dict(network=PAPER, device="cpu"),
    "ledger.states": lambda: dict(model=[3]),
    "ledger.update_workspace": lambda: dict(sizes=[3]),
    "ledger.walk": lambda: dict(papers=[PAPER.write(1, 2)]),
    # measuring
    "measuring.Allocation.alive": lambda: dict(
        self=tracker().allocations[0], moment=1
    ),
    "measuring.CachingAllocator": lambda: dict(capacity=2**30),
    "measuring.CachingAllocator.allocate": lambda: dict(
        self=measuring.CachingAllocator(), size=1000
    ),
    "measuring.CachingAllocator.free": lambda: dict(
        self=(allocator := measuring.CachingAllocator()),
        handle=allocator.allocate(1000),
    ),
    "measuring.CatchOutOfMemory": lambda: (
        step() | dict(budget=10**6, changes={"another": loss}, device="cpu")
    ),
    "measuring.MemoryMonitor": lambda: dict(
        read=lambda: 1, budget=10, window=3, warning=0.5
    ),
    "measuring.MemoryMonitor.__call__": lambda: dict(
        self=measuring.MemoryMonitor(read=lambda: 1, budget=10), step=3
    ),
    "measuring.ModuleStack": lambda: dict(models=(model(),), called=print),
    "measuring.PeakTracker": lambda: dict(
        existing=(model(),), device="cpu", budget=10**6
    ),
    "measuring.PeakTracker.at": lambda: dict(self=tracker(), moment=1),
    "measuring.PeakTracker.mark": lambda: dict(
        self=measuring.PeakTracker(), label="a"
    ),
    "measuring.PeakTracker.split": lambda: dict(self=tracker(), moment=1),
    "measuring.SavedBytes": lambda: dict(exclude=(model(), torch.ones(2))),
    "measuring.dry_run": lambda: step() | dict(micro_batch=1, on="cpu"),
    "measuring.format_bytes": lambda: dict(count=1000),
    **dict.fromkeys(
        [f"measuring.{name}" for name in OF_A_DEVICE],
        lambda: dict(device="cpu"),
    ),
    "measuring.optimizer_tensors": lambda: dict(optimizer=optimizer()),
    "measuring.replay": lambda: dict(
        events=[("allocate", 1, 5), ("free", 1, 5)]
    ),
    "measuring.round_size": lambda: dict(size=1000),
    "measuring.segment_size": lambda: dict(size=1000),
    "measuring.summarise": lambda: dict(snapshot=snapshot(), largest=3),
    "measuring.time_calls": lambda: dict(
        call=lambda: None, warm_up=1, repeats=2
    ),
    "measuring.trace_events": lambda: dict(snapshot=snapshot()),
    "measuring.trace_step": lambda: (
        step() | dict(micro_batch=1, device="cpu", budget=10**6)
    ),
    "measuring.unsure": lambda: dict(tracker=tracker()),
    "measuring.witness": lambda: dict(step=lambda: None, device="cpu"),
    # models
    "models.Block": lambda: dict(width=4, heads=2),
    "models.Block.forward": lambda: dict(
        self=models.Block(4, 2), x=torch.ones(1, 2, 4)
    ),
    "models.GPT": lambda: GPT | dict(context=8),
    **dict.fromkeys(
        ["models.GPT.forward", "models.GPT.hidden"],
        lambda: dict(
            self=models.GPT(**GPT, context=8),
            tokens=torch.zeros(1, 2, dtype=torch.int64),
        ),
    ),
    "models.Llama": lambda: GPT | dict(kv_heads=1, hidden=8),
    **dict.fromkeys(
        ["models.Llama.forward", "models.Llama.hidden"],
        lambda: dict(
            self=models.Llama(**GPT, kv_heads=1, hidden=8),
            tokens=torch.zeros(1, 2, dtype=torch.int64),
        ),
    ),
    "models.LlamaBlock": lambda: dict(width=4, heads=2, kv_heads=1, hidden=8),
    "models.LlamaBlock.forward": lambda: dict(
        self=models.LlamaBlock(4, 2, 1, 8),
        x=torch.ones(1, 2, 4),
        turns=models.rotary(2, 2),
    ),
    "models.MLPBlock": lambda: dict(width=4, ratio=2),
    "models.MLPBlock.forward": lambda: dict(
        self=models.MLPBlock(4), x=torch.ones(2, 4)
    ),
    "models.attention": lambda: dict(
        q=torch.ones(1, 1, 2, 2),
        k=torch.ones(1, 1, 2, 2),
        v=torch.ones(1, 1, 2, 2),
        drop=lambda weights: weights,
    ),
    "models.chain": lambda: dict(width=4, depth=2),
    "models.chunked_loss": lambda: dict(
        head=nn.Linear(4, 3),
        hidden=torch.ones(1, 2, 4),
        targets=torch.zeros(1, 2, dtype=torch.int64),
        chunks=2,
    ),
    "models.convnet": lambda: dict(channels=(2, 3), outputs=2),
    "models.mlp": lambda: dict(inputs=4, width=4, depth=2, outputs=2),
    "models.mlp_blocks": lambda: dict(width=4, depth=2, outputs=2),
    "models.rotary": lambda: dict(tokens=2, size=4),
    "models.rotate": lambda: dict(
        x=torch.ones(1, 2, 4), turns=models.rotary(2, 4)
    ),
    # planning
    "planning.Machine": lambda: dict(
        flops=1e9, bandwidth=1e9, operator=1e-6, link=1e9, source="a sheet"
    ),
    "planning.Machine.of_card": lambda: dict(name="T4", link=1e9),
    "planning.Machine.rate": lambda: dict(
        self=planning.Machine.of_card("T4"), recipe="bf16"
    ),
    "planning.calibrate": lambda: dict(run=lambda plan: 1.0, job=job()),
    "planning.seconds": lambda: dict(
        work=planning.Work(1, 2, 3, 4), machine=planning.Machine.of_card("T4")
    ),
    "planning.work": lambda: dict(job=job(), plan=planning.Plan(1)),
    # policy
    "policy.Policy": lambda: dict(width=4, depth=1, heads=2, patch=32),
    "policy.Policy.forward": lambda: dict(
        self=POLICY,
        pictures=EXAMPLES[0],
        words=EXAMPLES[1],
        senses=EXAMPLES[2],
    ),
    "policy.errors": lambda: dict(
        plans=EXAMPLES[3], actions=EXAMPLES[3], real=EXAMPLES[4]
    ),
    "policy.loss": lambda: dict(policy=POLICY, batch=EXAMPLES),
    "policy.planner": lambda: dict(policy=POLICY),
    # precision
    "precision.DynamicScale": lambda: dict(start=4.0, interval=2),
    "precision.DynamicScale.scales": lambda: dict(
        self=SCALE, overflows=[True, False]
    ),
    "precision.Format": lambda: dict(
        name="fp16",
        exponent_bits=5,
        fraction_bits=10,
        bytes=2,
        dtype=torch.float16,
    ),
    **dict.fromkeys(
        [f"precision.Format.{name}" for name in OF_A_NUMBER],
        lambda: dict(self=FP16, x=0.1),
    ),
    "precision.Format.value": lambda: dict(
        self=FP16, sign=0, exponent=3, fraction=4
    ),
    "precision.MasterWeights": lambda: dict(
        model=model(), optimizer=lambda copies: torch.optim.SGD(copies, lr=0.1)
    ),
    "precision.ScaleTrace": lambda: dict(scaler=torch.amp.GradScaler("cpu")),
    "precision.best_scale": lambda: dict(tensors=TENSORS),
    "precision.binades": lambda: dict(tensors=TENSORS),
    "precision.format_of": lambda: dict(name="fp16"),
    "precision.list_of": lambda: dict(operator="linear", device="cpu"),
    "precision.lost": lambda: dict(tensors=TENSORS, scale=2.0),
    "precision.support": lambda: dict(format="fp16", device="cpu"),
    "precision.tf32": lambda: dict(device="cpu"),
    # schedules
    "schedules.binomial_segments": lambda: dict(length=12, runs=3),
    "schedules.every_first": lambda: dict(length=4, count=2),
    "schedules.frontier": lambda: dict(chain=4),
    "schedules.least_budget": lambda: dict(chain=4),
    "schedules.longest_chain": lambda: dict(peak=6, runs=3),
    "schedules.optimal_segments": lambda: dict(chain=4, budget=4),
    "schedules.peak_of_runs": lambda: dict(length=12, runs=3),
    # sharding
    "sharding.CommunicationCounter.sent": lambda: dict(
        self=sharding.CommunicationCounter(), ranks=2
    ),
    "sharding.Ranks": lambda: dict(
        ranks=2, backend="gloo", deadline=1.0, show=None
    ),
    "sharding.Ranks.run": lambda: dict(worker=print, args=(3,), deadline=2.0),
    "sharding.Unit": lambda: dict(
        name="", shapes=((3, 2), (2,)), itemsizes=(4, 2), frozen=frozenset({1})
    ),
    "sharding.Unit.stored": lambda: dict(self=units()[0], ranks=2, itemsize=2),
    "sharding.Unit.padded": lambda: dict(self=units()[0], ranks=2),
    "sharding.first_rank": lambda: dict(rank=1, line="a"),
    "sharding.fsdp_traffic": lambda: dict(
        units=units(), ranks=2, gathered=4, reduced=4, accumulation_steps=2
    ),
    "sharding.held_states": lambda: dict(model=model(), optimizer=optimizer()),
    "sharding.load_checkpoint": lambda: dict(
        folder=HERE, model=(of := model()), optimizer=optimizer(of)
    ),
    "sharding.rank_moments": lambda: dict(
        units=units(),
        ranks=2,
        rank=1,
        itemsize=4,
        gathered=2,
        reduced=4,
        version="2.13",
    ),
    "sharding.rank_states": lambda: dict(
        units=units(), ranks=2, rank=1, itemsize=4
    ),
    "sharding.rows": lambda: dict(length=10, ranks=4, rank=3),
    "sharding.sent": lambda: dict(collective="all-reduce", size=8, ranks=2),
    "sharding.simulate_rank": lambda: dict(
        build=model,
        shard=lambda of, mesh: sharding.shard(of, [of[0]], mesh=mesh),
        loss=loss,
        batch=batch(),
        ranks=2,
        rank=1,
    ),
    "sharding.units_of": lambda: dict(model=(of := model()), blocks=[of[0]]),
    "sharding.zero_states": lambda: dict(parameters=10, ranks=2),
    "sharding.zero_traffic": lambda: dict(
        parameters=10, ranks=2, gathered=2, reduced=4, accumulation_steps=2
    ),
    # planning
    "planning.Answer.within": lambda: dict(
        self=planning.search(JOB, 10**6, MACHINE), budget=10**6
    ),
    "planning.Job": lambda: dict(network=PAPER, tokens=2, batch=2),
    "planning.OwnJob": lambda: step() | dict(blocks=[]),
    "planning.OwnJob.loss_of": lambda: dict(self=own_job(), plan=PLAN),
    "planning.Plan": lambda: dict(micro_batch=1, loss_chunks=2),
    "planning.Plan.code": lambda: dict(self=PLAN, job=JOB),
    "planning.Plan.share": lambda: dict(self=PLAN, job=JOB),
    "planning.Plan.text": lambda: dict(self=PLAN, job=JOB),
    "planning.Plan.trainer": lambda: dict(self=PLAN, job=JOB),
    "planning.at_peak": lambda: dict(job=JOB, plan=PLAN),
    "planning.largest_micro_batch": lambda: dict(
        what=(of := model()),
        how=loss,
        batch=batch(),
        budget=10**6,
        optimizer=optimizer(of),
    ),
    "planning.memory": lambda: dict(job=JOB, plan=PLAN),
    "planning.search": lambda: dict(
        job=JOB, budget=10**6, machine=MACHINE, locks={}
    ),
    "planning.static": lambda: dict(job=JOB, plan=PLAN),
    "planning.step": lambda: dict(job=own_job(), plan=PLAN, batch=batch()),
    # tabletop
    **dict.fromkeys(
        [f"tabletop.{name}" for name in ("examples", "moments", "scenes")],
        lambda: dict(count=2, generator=seeded()),
    ),
    **dict.fromkeys(
        [f"tabletop.{name}" for name in ("expert", "render", "senses")],
        lambda: {"of": TABLE},
    ),
    "tabletop.instruction": lambda: dict(words=TABLE.words[0]),
    "tabletop.interval": lambda: dict(solved=3, episodes=4),
    "tabletop.rollout": lambda: dict(start=TABLE, plan=nothing),
    "tabletop.step": lambda: dict(of=TABLE, actions=nothing(TABLE)[:, 0]),
    "tabletop.tokens": lambda: dict(text="red block left bowl"),
    # widgets
    "widgets.Accumulation": lambda: dict(
        footprint=footprint(),
        micro_batch=2,
        steps=2,
        global_batch=4,
        samples=9,
        budget=10**4,
        label="a",
    ),
    "widgets.Fits": lambda: dict(model="Llama 3 8B", card="T4", cut=True),
    "widgets.Ledger": lambda: dict(shapes="GPT-2 124M", batch=2, card="T4"),
    "widgets.Bits": lambda: dict(number=0.5, format="bf16"),
    "widgets.LossScale": lambda: dict(gradients=TENSORS, scale=2, label="a"),
    "widgets.Recipes": lambda: dict(
        network=PAPER, tokens=2, batches=(1, 2), batch=1, card="T4"
    ),
    "widgets.Planning": lambda: dict(model="small GPT", ranks=2),
    "widgets.Segments": lambda: dict(layers=4, segments=2, cuts=(), label=""),
    "widgets.Segments.run": lambda: dict(self=widgets.Segments()),
    "widgets.Sharding": lambda: dict(ranks=4, stage="zero-1"),
    "widgets.Timeline": lambda: dict(
        steps={"a": tracker()}, step="a", moment=1
    ),
    "widgets.format_number": lambda: dict(value=2.5),
}
