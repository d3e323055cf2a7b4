"""One valid call of every public function, class and method.

An argument without a default is made by its annotation, and a method's
``self`` by a valid call of its class. A row gives what that does not: other
arguments, or others where another value shows more.
"""

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from membudget import (
    accumulation,
    adapters,
    checkpointing,
    data,
    ledger,
    measuring,
    models,
    offloading,
    parallelism,
    planning,
    policy,
    precision,
    schedules,
    sharding,
    tabletop,
    widgets,
)
from membudget.measuring.step import Loss
from membudget.planning.plan import TrainedJob

ROOMS = (
    measuring,
    models,
    data,
    tabletop,
    policy,
    ledger,
    accumulation,
    adapters,
    checkpointing,
    offloading,
    precision,
    schedules,
    sharding,
    parallelism,
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


def stepped() -> dict:
    """A model and its optimizer."""
    of = model()
    return dict(model=of, optimizer=optimizer(of))


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
CONFIG = {
    **{"model_type": "llama", "vocab_size": 9, "hidden_size": 4},
    **{"intermediate_size": 8, "num_hidden_layers": 1},
    "num_attention_heads": 2,
}
CAUSAL = ledger.from_config(
    dict(
        model_type="llama",
        vocab_size=9,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
    )
)
JOB = planning.Job(PAPER, 2, 2)
PLAN = planning.Plan(1)
MACHINE = planning.Machine(1e12, 1e11, 1e-5, 1e10, "made up")
RUN = checkpointing.simulate(2, [0, 1])
TABLE = tabletop.scenes(2, seeded())
EXAMPLES = tabletop.examples(2, seeded())
POLICY = policy.Policy(4, 1, 2, 32)
TENSORS = [torch.ones(3)]
MATRIX = torch.ones(2, 64)
HERE = Path(__file__).parent

STAND_INS = {
    "accumulation.Window.backward": backward,
    "accumulation.Window.over": over,
    "precision.tf32": lambda device: entered(precision.tf32(device)),
    "sharding.Ranks.run": run_ranks,
}
"""What is called instead: it enters the context, or starts no process."""

Several = torch.Tensor | Iterable[torch.Tensor]
Network = ledger.Transformer | ledger.CausalLM | ledger.Chain
Language = ledger.Transformer | ledger.CausalLM
Lengths = Sequence[checkpointing.Stage] | int
Parts = list[torch.Tensor]

OF_A_KIND = {
    int: lambda: 2,
    float: lambda: 2.0,
    Sequence[int]: lambda: [2, 2],
    Sequence[float]: lambda: [1, 2],
    torch.Generator: seeded,
    nn.Module: model,
    nn.Sequential: model,
    Loss: lambda: loss,
    torch.optim.Optimizer: optimizer,
    Parts: lambda: [torch.ones(2)],
    Several: lambda: TENSORS,
    Callable[[], object]: lambda: lambda: 1,
    Callable[[], bool]: lambda: lambda: True,
    Callable[[], nn.Module]: lambda: model,
    measuring.PeakTracker: tracker,
    measuring.Allocation: lambda: tracker().allocations[0],
    tabletop.Scenes: lambda: TABLE,
    policy.Policy: lambda: POLICY,
    Network: lambda: PAPER,
    Language: lambda: PAPER,
    ledger.Transformer: lambda: PAPER,
    ledger.CausalLM: lambda: CAUSAL,
    ledger.Prediction: lambda: ledger.predict(PAPER, 1, 2),
    accumulation.Footprint: footprint,
    accumulation.Window: lambda: None,
    Lengths: lambda: 4,
    checkpointing.Moment: lambda: RUN.moments[0],
    Sequence[sharding.Unit]: units,
    planning.Job: job,
    TrainedJob: job,
    planning.OwnJob: own_job,
    planning.Work: lambda: planning.Work(1, 2, 3, 4),
    planning.Layout: planning.Layout,
    planning.Plan: lambda: PLAN,
    planning.Machine: lambda: MACHINE,
    Sequence[offloading.Block]: lambda: [offloading.Block(1.0, 2)],
    Sequence[Sequence[parallelism.Operation]]: lambda: parallelism.table(
        "GPipe", 2, 2
    ),
    planning.Answer: cache(lambda: planning.search(JOB, 10**6, MACHINE)),
}

OF_A_NAME = {
    "collective": "all-reduce",
    "device": "cpu",
    "format": "fp16",
    "machine": "T4",
    "operator": "linear",
    "phase": "forward",
    "recipe": "fp32",
}
"""Of strings."""

ROWS = {
    # accumulation
    "accumulation.Accumulator": lambda: stepped() | dict(max_norm=1.0),
    "accumulation.Controller": lambda: dict(micro_batch=2, budget=9, most=3),
    "accumulation.Plan": lambda: dict(
        global_batch=5, micro_batch=2, samples=9
    ),
    "accumulation.Window.backward": lambda: dict(
        loss=OF(torch.ones(1, 4)).sum()
    ),
    "accumulation.Window.over": lambda: dict(micro_batches=[1, 2]),
    "accumulation.footprint": lambda: dict(
        build=lambda: (of := model(), optimizer(of)),
        loss=lambda of, size: of(torch.ones(size, 4)).sum(),
    ),
    "accumulation.gradient_noise": lambda: dict(
        gradients=[[torch.ones(2)], [torch.zeros(2)]]
    ),
    "accumulation.recovering_step": lambda: dict(
        accumulator=accumulation.Accumulator(**stepped()),
        micro_batch=1,
        count=lambda x, y: len(x),
    ),
    "accumulation.sum_gradients": lambda: dict(
        losses=[(weight := torch.ones(2, requires_grad=True)).sum()],
        parameters=[weight],
        add=accumulation.new_sum,
    ),
    "accumulation.windows": lambda: dict(micro_batches=[1, 2, 3]),
    # adapters
    "adapters.FourBits.dequantise": lambda: dict(
        self=adapters.quantise(MATRIX), dtype=torch.bfloat16
    ),
    "adapters.LoRA": lambda: dict(base=nn.Linear(4, 3), rank=2),
    "adapters.LoRA.forward": lambda: dict(
        self=adapters.LoRA(nn.Linear(4, 3), 2), x=torch.ones(1, 4)
    ),
    "adapters.Quantised4": lambda: dict(weight=MATRIX),
    "adapters.Quantised4.forward": lambda: dict(x=MATRIX),
    "adapters.adapt": lambda: dict(targets=["0"], rank=2),
    "adapters.check_trained": stepped,
    "adapters.quantise": lambda: dict(weight=MATRIX),
    "adapters.train_only": lambda: dict(patterns=["*"]),
    "adapters.optimizer_in_backward": lambda: dict(optimizer=optimizer()),
    # checkpointing
    "checkpointing.Checkpointed": lambda: dict(
        stages=(nn.Linear(2, 2), nn.ReLU()),
        segments=[[0, 1]],
        keep=checkpointing.MATMULS,
    ),
    "checkpointing.Checkpointed.forward": lambda: dict(x=torch.ones(2)),
    "checkpointing.Moment.part": lambda: dict(name="tapes"),
    "checkpointing.Stage": lambda: dict(
        recompute_workspace=-1, backward_workspace=0
    ),
    "checkpointing.actions": lambda: dict(segments=[[0, 1], 2], length=3),
    "checkpointing.profile": lambda: dict(
        stages=(nn.Linear(2, 2),), x=torch.ones(2)
    ),
    "checkpointing.simulate": lambda: dict(schedule=[[0, 1], 2, 3]),
    # ledger
    "ledger.Adapter": lambda: dict(targets=["out"]),
    "ledger.Chain": lambda: dict(sample=(4,), segments=((0, 1),)),
    "ledger.Transformer": lambda: GPT | dict(context=8, hidden=16, kv_heads=2),
    "ledger.CausalLM": lambda: dict(
        head_size=2, biases=["q_proj"], block="llama", window=9, local=[True]
    ),
    "ledger.account": lambda: stepped() | dict(micro_batch=1),
    "ledger.from_config": lambda: dict(config=CONFIG),
    "ledger.host_step": lambda: dict(model=[3, 4]),
    "ledger.largest_batch": lambda: stepped() | dict(limit=2000, of=2),
    "ledger.optimizer_bytes": lambda: dict(
        sizes=[(3, 4)], optimizer="galore", rank=2
    ),
    "ledger.peak_at": lambda: dict(lines=[ledger.PeakLine(100, 10)]),
    "ledger.peak_lines": lambda: dict(
        sizes=(1, 2), timelines=[[10, 20], [20, 40]]
    ),
    "ledger.predict": lambda: dict(micro_batch=1, buffers=0),
    "ledger.states": lambda: dict(model=[(3, 4)], optimizer="galore", rank=2),
    "ledger.update_workspace": lambda: dict(sizes=[3]),
    # measuring
    "measuring.CachingAllocator.free": lambda: dict(
        self=(allocator := measuring.CachingAllocator()),
        handle=allocator.allocate(1000),
    ),
    "measuring.CatchOutOfMemory": lambda: (
        stepped() | dict(loss=loss, budget=10**6, changes={"another": loss})
    ),
    "measuring.MemoryMonitor": lambda: dict(read=lambda: 1, budget=10),
    "measuring.MemoryMonitor.__call__": lambda: dict(step=3),
    "measuring.PeakTracker": lambda: dict(existing=(model(),), budget=10**6),
    "measuring.PeakTracker.at": lambda: dict(self=tracker()),
    "measuring.PeakTracker.mark": lambda: dict(label="a"),
    "measuring.PeakTracker.split": lambda: dict(self=tracker(), moment=1),
    "measuring.SavedBytes": lambda: dict(exclude=(model(), torch.ones(2))),
    "measuring.dry_run": lambda: stepped() | dict(micro_batch=1, on="cpu"),
    "measuring.replay": lambda: dict(
        events=[("allocate", 1, 5), ("free", 1, 5)]
    ),
    "measuring.summarise": lambda: dict(snapshot=snapshot(), largest=3),
    "measuring.time_calls": lambda: dict(warm_up=1, repeats=2),
    "measuring.trace_events": lambda: dict(snapshot=snapshot()),
    "measuring.trace_step": lambda: (
        stepped() | dict(micro_batch=1, budget=10**6)
    ),
    # models
    "models.Block": lambda: dict(width=4),
    "models.Block.forward": lambda: dict(x=torch.ones(1, 2, 4)),
    "models.GPT": lambda: GPT | dict(context=8),
    "models.Llama": lambda: GPT | dict(kv_heads=1, hidden=8),
    **dict.fromkeys(
        ["models.GPT.hidden", "models.Llama.hidden"],
        lambda: dict(tokens=torch.zeros(1, 2, dtype=torch.int64)),
    ),
    "models.chunked_loss": lambda: dict(
        head=nn.Linear(4, 3),
        hidden=torch.ones(1, 2, 4),
        targets=torch.zeros(1, 2, dtype=torch.int64),
    ),
    # offloading
    "offloading.Block": lambda: dict(again=3),
    "offloading.gpt_block": lambda: dict(batch=2, checkpointed=True),
    "offloading.lanes": lambda: dict(link=1e9),
    "offloading.least_width": lambda: dict(tokens=4),
    "offloading.sustained": lambda: dict(busy=0.5, full=0.5),
    # parallelism
    "parallelism.bubble": lambda: dict(
        schedule="LoopedBFS", ranks=2, micro_batches=2, chunks=2
    ),
    "parallelism.cut": lambda: dict(model=models.GPT(), stages=2),
    "parallelism.in_flight": lambda: dict(
        schedule="LoopedBFS", ranks=2, micro_batches=2, rank=1, chunks=2
    ),
    "parallelism.simulate_pipeline": lambda: dict(
        build=lambda: models.GPT(4, 2, 4, 2, 1),
        loss=lambda logits, y: logits.square().mean(),
        tokens=torch.zeros(1, 2, dtype=torch.int64),
        targets=torch.zeros(1, 2, dtype=torch.int64),
        schedule="GPipe",
        ranks=2,
        micro_batches=2,
        rank=1,
        chunks=1,
    ),
    "parallelism.context_buffers": lambda: dict(kv=0.5),
    "parallelism.context_parallel": lambda: dict(model=models.Llama(8, 8, 1)),
    "parallelism.context_traffic": lambda: dict(kv=0.5),
    "parallelism.Mixture": lambda: dict(experts=4, factor=1.0),
    "parallelism.Mixture.forward": lambda: dict(x=torch.ones(2, 2)),
    "parallelism.Mixture.route": lambda: dict(x=torch.ones(2, 2)),
    "parallelism.expert_parallel": lambda: dict(
        mixture=parallelism.Mixture(2, 2, 2)
    ),
    "parallelism.balance_loss": lambda: dict(
        scores=torch.ones(2, 3), chosen=torch.zeros(2, 1, dtype=torch.int64)
    ),
    "parallelism.capacity": lambda: dict(active=1, factor=1.0),
    "parallelism.dropped": lambda: dict(counts=[[1, 2], [3, 4]]),
    "parallelism.places": lambda: dict(tokens=8, rank=1),
    "parallelism.received": lambda: dict(counts=[[1, 2], [3, 4]], most=2),
    "parallelism.ring_attention": lambda: dict(
        q=torch.ones(1, 2, 4, 2),
        k=torch.ones(1, 1, 4, 2),
        v=torch.ones(1, 1, 4, 2),
    ),
    "parallelism.tiles": lambda: dict(tokens=8),
    "parallelism.table": lambda: dict(
        schedule="LoopedBFS", ranks=2, micro_batches=2, chunks=2
    ),
    "parallelism.tensor_tape": lambda: dict(gathers="again", ranks=1),
    "parallelism.tensor_traffic": lambda: dict(gathers="each"),
    # planning
    "planning.Machine": lambda: dict(
        flops=1e9, operator=1e-6, source="a sheet"
    ),
    "planning.Machine.of_card": lambda: dict(name="T4", link=1e9),
    "planning.OwnJob": lambda: stepped() | dict(blocks=[]),
    "planning.Plan": lambda: dict(loss_chunks=2),
    "planning.calibrate": lambda: dict(run=lambda plan: 1.0),
    "planning.largest_micro_batch": lambda: dict(
        what=(of := model()), how=loss, budget=10**6, optimizer=optimizer(of)
    ),
    "planning.layouts": lambda: dict(card="T4", cards=2),
    "planning.search": lambda: dict(budget=10**6, locks={}),
    # policy
    "policy.Policy": lambda: dict(width=4, depth=1, heads=2, patch=32),
    "policy.Policy.forward": lambda: dict(
        pictures=EXAMPLES[0], words=EXAMPLES[1], senses=EXAMPLES[2]
    ),
    "policy.errors": lambda: dict(
        plans=EXAMPLES[3], actions=EXAMPLES[3], real=EXAMPLES[4]
    ),
    "policy.loss": lambda: dict(batch=EXAMPLES),
    # offloading
    "offloading.FileMemory": lambda: dict(folder="."),
    "offloading.Offload": lambda: dict(exclude=(OF,)),
    "offloading.optimizer_on_host": lambda: dict(
        parameters=list(model().parameters()), make=torch.optim.SGD
    ),
    # precision
    "precision.DynamicScale.scales": lambda: dict(overflows=[True, False]),
    "precision.Format": lambda: dict(
        name="fp16",
        exponent_bits=5,
        fraction_bits=10,
        dtype=torch.float16,
    ),
    "precision.Format.value": lambda: dict(sign=0),
    "precision.MasterWeights": lambda: dict(
        optimizer=lambda copies: torch.optim.SGD(copies, lr=0.1)
    ),
    "precision.ScaleTrace": lambda: dict(scaler=torch.amp.GradScaler("cpu")),
    "precision.format_of": lambda: dict(name="fp16"),
    # schedules
    "schedules.longest_chain": lambda: dict(peak=6, runs=3),
    "schedules.optimal_segments": lambda: dict(budget=4),
    # sharding
    "sharding.Ranks": lambda: dict(deadline=1.0, show=None),
    "sharding.Ranks.run": lambda: dict(worker=print, args=(3,), deadline=2.0),
    "sharding.Unit": lambda: dict(
        name="", shapes=((3, 2), (2,)), itemsizes=(4, 2), frozen=frozenset({1})
    ),
    "sharding.first_rank": lambda: dict(line="a"),
    "sharding.load_checkpoint": lambda: stepped() | dict(folder=HERE),
    "sharding.rank_moments": lambda: dict(
        rank=1, itemsize=4, gathered=2, reduced=4, version="2.13"
    ),
    "sharding.rows": lambda: dict(length=10, ranks=4, rank=3),
    "sharding.simulate_rank": lambda: dict(
        loss=loss,
        shard=lambda of, mesh: sharding.shard(of, [of[0]], mesh=mesh),
        rank=1,
    ),
    "sharding.units_of": lambda: dict(model=(of := model()), blocks=[of[0]]),
    # tabletop
    "tabletop.instruction": lambda: dict(words=TABLE.words[0]),
    "tabletop.rollout": lambda: dict(plan=nothing),
    "tabletop.step": lambda: dict(actions=nothing(TABLE)[:, 0]),
    "tabletop.tokens": lambda: dict(text="red block left bowl"),
    # widgets
    "widgets.Accumulation": lambda: dict(
        footprint=footprint(),
        micro_batch=2,
        steps=2,
        global_batch=4,
        samples=9,
        budget=10**4,
        normalisation="window",
        label="a",
    ),
    "widgets.Fits": lambda: dict(
        **{"model": "Llama 3 8B", "card": "T4", "cut": True},
        **{"forget": True, "half": True, "share": True},
    ),
    "widgets.Ledger": lambda: dict(
        **{"model": "GPT-2 124M", "batch": 2, "tokens": 64, "steps": 2},
        **{"checkpointed": True, "recipe": "bf16", "optimizer": "adam"},
        **{"foreach": True, "card": "T4"},
    ),
    "widgets.Adapters": lambda: dict(
        bf16=True, checkpointed=True, dropout=True, four_bits=True
    ),
    "widgets.Bits": lambda: dict(number=0.5, format="bf16"),
    "widgets.LossScale": lambda: dict(
        gradients=TENSORS, format="bf16", scale=2, label="a"
    ),
    "widgets.Offloading": lambda: dict(
        **{"width": 768, "machine": "T4", "tokens": 1024},
        **{"busy": 50, "full": 50},
    ),
    "widgets.Offloading.block": lambda: dict(what="tapes"),
    "widgets.Offloading.least": lambda: dict(what="checkpoints"),
    "widgets.Offloading.run": lambda: dict(what="nothing"),
    "widgets.Recipes": lambda: dict(batch=1, card="T4", checkpointed=True),
    "widgets.Schedules": lambda: dict(
        level=9, segments=[[0, 1], *range(2, 9)], label="a"
    ),
    "widgets.Planning": lambda: dict(model="small GPT", ranks=2),
    "widgets.Segments": lambda: dict(
        **{"layers": 4, "segments": 2, "cuts": (), "checkpoint": 0.5},
        **{"split": "pytorch", "measured": {}, "label": ""},
    ),
    "widgets.Sharding": lambda: dict(
        **{"model": "7.5 B", "ranks": 4, "stage": "zero-1", "card": "T4"},
        **{"recipe": "fp32", "accumulation_steps": 2},
        synchronise_last=True,
    ),
    "widgets.Timeline": lambda: dict(step="plain", moment=1),
}
"""Arguments that are not made by their annotation."""


def arguments(name: str, thing: Callable) -> dict[str, object]:
    """Of a valid call, those that have no default, and those of the row."""
    given = ROWS.get(name, dict)()
    hints = typing.get_type_hints(
        thing.__init__ if isinstance(thing, type) else thing
    )
    for taken in inspect.signature(thing).parameters.values():
        if taken.name in given or taken.kind is taken.VAR_KEYWORD:
            continue
        if taken.name == "self":
            given["self"] = instance(name.rpartition(".")[0])
        elif taken.kind is taken.VAR_POSITIONAL:
            tensors = taken.name == "batch"
            one = hints[taken.name]
            given[taken.name] = batch() if tensors else (OF_A_KIND[one](),)
        elif taken.default is taken.empty:
            kind = hints[taken.name]
            make = OF_A_KIND.get(kind)
            given[taken.name] = make() if make else OF_A_NAME[taken.name]
    return given


def instance(name: str) -> object:
    """What a method is called on: of its class."""
    room, _, kind = name.partition(".")
    thing = getattr(globals()[room], kind)
    if thing in OF_A_KIND:
        return OF_A_KIND[thing]()
    given = arguments(name, thing)
    several = given.pop(starred(thing), ())
    return thing(*several, **given)


def starred(thing: Callable) -> str | None:
    """The name of its arguments that may be several."""
    taken = inspect.signature(thing).parameters.values()
    names = {p.kind: p.name for p in taken}
    return names.get(inspect.Parameter.VAR_POSITIONAL)
