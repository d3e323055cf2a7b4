"""What the tests of the ledger share: the same step, traced and on paper."""

from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from membudget import adapters, ledger
from membudget.checkpointing import ATTENTION
from membudget.ledger import operators as op
from membudget.ledger.paper import Paper, PaperTensor
from membudget.ledger.walk import walk
from membudget.measuring import PeakTracker, trace_step
from membudget.models import chunked_loss
from membudget.offloading import Offload
from membudget.precision import Autocast

DTYPES = {4: torch.float32, 2: torch.bfloat16}

MAKE = {
    "sgd": lambda p, foreach: torch.optim.SGD(p, lr=0.1, foreach=foreach),
    "momentum": lambda p, foreach: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, foreach=foreach
    ),
    "adam": lambda p, foreach: torch.optim.AdamW(p, foreach=foreach),
    None: lambda p, foreach: None,
}
"""PyTorch's optimizers by the ledger's names."""


# Losses ------------------------------------------------------------------


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def next_token(model, x, y, chunks=None):
    if chunks:
        return chunked_loss(model.head, model.hidden(x), y, chunks)
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def autocast(lists):
    """PyTorch's on a CPU, or one by a device's lists."""
    return Autocast(lists) if lists else torch.autocast("cpu", torch.bfloat16)


def within(context, loss):
    """The loss, its forward pass in a context."""

    def run(model, *batch):
        with context():
            return loss(model, *batch)

    return run


def offloading(loss, moved, *batch):
    """The loss, with what its forward pass saves in another memory.

    Args:
        moved: a list to which each call adds its ``Offload``.
        *batch: all samples.
    """

    def run(model, *parts):
        with Offload(model, *batch) as block:
            value = loss(model, *parts)
        moved.append(block)
        return value

    return run


# One operator alone ------------------------------------------------------


class Alone(nn.Module):
    """2 · operator(2 · x, …): what it saves and makes is no parameter."""

    def __init__(self, run, shapes, weights, dtype):
        super().__init__()
        self.run = run
        self.xs = _parameters(shapes, dtype)
        self.ws = _parameters(weights, dtype)

    def forward(self, *batch):
        return self.run(*(2 * x for x in self.xs), *self.ws, *batch) * 2


def _parameters(shapes, dtype):
    return nn.ParameterList(torch.rand(s, dtype=dtype) for s in shapes)


def alone(run, write, *shapes, weights=(), batch=(), itemsize=4, cast=None):
    """An operator by the tracker and by its row; they have to agree.

    Args:
        run: from the trained tensors, the weights and the batch.
        write: the same on paper; the paper comes first.
        *shapes: of the trained tensors.
        weights: shapes of parameters.
        batch: tensors that are not trained.
        itemsize: bytes of a number.
        cast: bytes of a number under autocast.

    Returns:
        Bytes saved for the backward pass, without the loss.
    """
    torch.manual_seed(0)
    model = Alone(run, shapes, weights, DTYPES[itemsize])

    def loss(model, *batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast is not None):
            return model(*batch).sum()

    tracker = trace_step(model, loss, *batch)
    paper = Paper(cast)
    parameters = [
        paper.parameter(p.numel(), itemsize) for p in model.parameters()
    ]
    inputs = [paper.input(t.numel(), t.element_size()) for t in batch]
    xs = [op.scale(paper, p) for p in parameters[: len(shapes)]]
    y = write(paper, *xs, *parameters[len(shapes) :], *inputs)
    paper.rows[-1].watches += tuple(xs)  # arguments live until it returns
    total(paper, op.scale(paper, y))
    predicted = walk([paper], inputs=sum(t.nbytes for t in batch))
    agree(predicted, tracker)
    return predicted.saved - paper.rows[-1].makes[0].bytes


def total(paper, x):
    """``x.sum()``: its gradient is one number, shown as often as needed."""
    loss = PaperTensor(1, x.itemsize)
    paper.write("sum", (x,), (loss,), gives=((x, "g"),))


def agree(predicted, tracker, micro=False):
    """Start, saved, peak and its split are the same, and each phase's worst.

    Args:
        micro: whether there are several micro-batches, whose loss is scaled
            after the forward pass.
    """
    backward = next(i for i, label in tracker.marks if label == "backward")
    saved = tracker.split(backward if micro else backward - 1)
    found = predicted.start, predicted.saved, predicted.peak
    assert found == (tracker.start, saved["activations"], tracker.peak)
    assert predicted.at_peak.split == tracker.split()
    assert predicted.at_peak.phase == phase_of(tracker)
    if not micro:
        starts = [index for index, _ in tracker.marks]
        starts.append(len(tracker.timeline))
        worst = [max(tracker.timeline[a:b]) for a, b in pairwise(starts)]
        backward = max(map(predicted.peak_in, ("backward", "recomputation")))
        found = [predicted.peak_in("forward"), backward]
        if len(worst) > 2:
            found.append(predicted.peak_in("optimizer"))
        assert found == worst


def phase_of(tracker):
    """The phase of the peak; a name of the ledger's walk."""
    return tracker.operators[tracker.peak_moment].phase


# Whole steps -------------------------------------------------------------


STEPS = {
    "no optimizer": {},
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "momentum", "foreach": True},
    "adam": {"optimizer": "adam"},
    "adam, all at once": {"optimizer": "adam", "foreach": True},
}
RUNS = {
    "plain": {},
    "accumulated": {"micro_batch": 2},
    "with a remainder": {"micro_batch": 4},
    "checkpointed": {"checkpointed": True},
    "both": {"checkpointed": True, "micro_batch": 4},
    "the first": {"checkpointed": 1},
    "the second": {"checkpointed": (1,), "micro_batch": 4},
}


@st.composite
def transformers(draw):
    """Shapes of both families."""
    family = draw(st.sampled_from(["gpt", "llama"]))
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    size = draw(st.sampled_from([2, 4, 8]))
    options = {"fused": draw(st.booleans()), "tied": draw(st.booleans())}
    if family == "llama":
        shares = [h for h in (1, 2, 4, 8) if heads % h == 0]
        options["kv_heads"] = draw(st.sampled_from(shares))
        options["hidden"] = draw(st.sampled_from([1, 7, 64]))
    else:
        options["dropout"] = draw(st.booleans())
    return ledger.Transformer(
        draw(st.sampled_from([1, 2, 13, 100])),
        heads * size,
        draw(st.integers(1, 3)),
        heads,
        family=family,
        context=20,
        **options,
    )


class Segmented(nn.Module):
    """A ``Sequential`` with some of its children under checkpoints."""

    def __init__(self, model, segments, context):
        super().__init__()
        self.model, self.segments = model, {s[0]: s for s in segments}
        self.context = context

    def forward(self, x):
        number = 0
        while number < len(self.model):
            segment = self.segments.get(number, (number,))
            part = self.model[number : segment[-1] + 1]
            if number in self.segments:
                part = again(part, self.context)
            x, number = part(x), segment[-1] + 1
        return x


def again(run, context, kept_attention=False):
    """The function under a checkpoint; a context is entered once more."""
    contexts = _contexts(context)
    if kept_attention:  # PyTorch enters autocast again by itself
        make = create_selective_checkpoint_contexts
        contexts = partial(make, list(ATTENTION))
    return partial(checkpoint, run, use_reentrant=False, context_fn=contexts)


def _contexts(context):
    return lambda: (nullcontext(), context())


def chosen(parts, checkpointed):
    """Those that ``predict`` would checkpoint."""
    if isinstance(checkpointed, tuple):
        return [parts[number] for number in checkpointed]
    return parts[: len(parts) if checkpointed is True else checkpointed]


def traced(
    network,
    batch,
    *tokens,
    optimizer,
    recipe="fp32",
    lists=None,
    micro_batch=None,
    checkpointed=False,
    loss_chunks=None,
    foreach=False,
    kept_attention=False,
    trained=None,
    adapter=None,
    peft=False,
    moved=None,
):
    """The step that ``predict`` predicts with these arguments.

    Args:
        recipe: one without a master copy.
        lists: whose autocast :class:`membudget.precision.Autocast` is on;
            None: PyTorch's for a CPU.
        peft: whether the adapter is ``peft``'s or the course's.
        moved: a list for the ``Offload`` of each micro-batch, of the step
            before the tracked one, too; None: nothing is offloaded.

    Returns:
        Its tracker, and the bytes of the model's buffers.
    """
    torch.manual_seed(0)
    context = nullcontext
    if recipe == "autocast":
        context = partial(autocast, lists)
    if isinstance(network, ledger.Transformer):
        model = network.build("cpu")
        loss = partial(next_token, chunks=loss_chunks)
        x = torch.zeros(batch, *tokens, dtype=torch.long)
        y = x.clone()
        for block in chosen(model.blocks, checkpointed):
            block.forward = again(block.forward, context, kept_attention)
    else:
        model, loss = network.model, classify
        x = torch.rand(batch, *network.sample)
        y = torch.zeros(batch, dtype=torch.long)
        segments = chosen(network.segments, checkpointed)
        model = Segmented(model, segments, context)
    if recipe == "bf16":
        model = model.to(torch.bfloat16)
        x = x.to(torch.bfloat16) if x.is_floating_point() else x
    if trained is not None or adapter:
        tune(model, trained, adapter, peft)
    buffers = sum(b.nbytes for b in model.buffers())
    run = within(context, loss)
    if moved is not None:
        run = offloading(run, moved, x, y)
    once_more = partial(checkpoint, context_fn=_contexts(context))
    with mock.patch("membudget.models.checkpoint", once_more):
        tracker = trace_step(
            model,
            run,
            x,
            y,
            optimizer=MAKE[optimizer](
                [p for p in model.parameters() if p.requires_grad], foreach
            ),
            micro_batch=micro_batch,
        )
    return tracker, buffers


def tune(model, trained, adapter, peft=False):
    """Freeze and adapt a model as ``predict`` is told to."""
    names = dict(model.named_parameters(remove_duplicate=False))
    model.requires_grad_(False)
    if adapter and peft:
        add_peft(model, adapter)
    elif adapter:
        dropout = 0.1 * adapter.dropout
        how = {"rank": adapter.rank, "dtype": DTYPES[adapter.itemsize]}
        adapters.adapt(model, adapter.targets, dropout=dropout, **how)
    for name, parameter in names.items():
        if any(fnmatchcase(name, wanted) for wanted in trained or ()):
            parameter.requires_grad_()


def add_peft(model, adapter):
    """``peft``'s LoRA, in place."""
    config = LoraConfig(
        r=adapter.rank,
        lora_dropout=0.1 * adapter.dropout,
        target_modules=list(adapter.targets),
        use_dora=adapter.dora,
    )
    wide = adapter.itemsize == 4
    get_peft_model(model, config, autocast_adapter_dtype=wide)


def same(
    network,
    batch,
    *tokens,
    optimizer=None,
    peft=False,
    offloaded=False,
    **options,
):
    """Predicted and traced are the same; returns the prediction."""
    step = network, batch, *tokens
    options["optimizer"] = optimizer
    moved = [] if offloaded else None
    tracker, buffers = traced(*step, peft=peft, moved=moved, **options)
    options["offloaded"] = offloaded
    predicted = ledger.predict(*step, buffers=buffers, **options)
    micro = options.get("micro_batch")
    agree(predicted, tracker, bool(micro) and micro < batch)
    agree_on_bytes(predicted, moved or [])
    return predicted


def agree_on_bytes(predicted, moved):
    """What left and came back, in the second of two steps."""
    second = moved[len(moved) // 2 :]
    assert predicted.moved == sum(block.out for block in second)
    assert predicted.moved == sum(block.back for block in second)


def master_step(
    shape, batch, tokens, recipe, optimizer, micro_batch, foreach, loss_chunks
):
    """A step with an fp32 master copy, by hand; its tracker."""
    torch.manual_seed(0)
    model = shape.build("cpu").to(torch.bfloat16)
    x = torch.zeros(batch, tokens, dtype=torch.long)
    y = x.clone()
    weights = list(model.parameters())
    masters = [p.detach().float() for p in weights]
    stepper = MAKE[optimizer](masters, foreach)
    sums = []
    if recipe == "master-fp32-gradients":
        sums = [torch.zeros_like(m) for m in masters]
        for p, total in zip(weights, sums, strict=True):
            p.register_post_accumulate_grad_hook(_add_to(total))

    def step():
        size = micro_batch or batch
        for start in range(0, batch, size):
            parts = x[start : start + size], y[start : start + size]
            value = next_token(model, *parts, loss_chunks)
            if size < batch:
                value = value * (len(parts[0]) / batch)
            value.backward()
            del value
        for i, (p, master) in enumerate(zip(weights, masters, strict=True)):
            master.grad = sums[i] if sums else p.grad.float()
        stepper.step()
        for p, master in zip(weights, masters, strict=True):
            p.data.copy_(master)
            p.grad = master.grad = None
        for total in sums:
            total.zero_()

    step()
    with PeakTracker(model, stepper, *masters, *sums, x, y) as tracker:
        step()
    return tracker


def _add_to(total):
    def hook(p):
        total.add_(p.grad)
        p.grad = None

    return hook
