"""Running out of memory: the report, the recovery and the predictions.

A budget stands for the device, so all of it runs on a CPU. CUDA is a stub.
"""

import gc
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from measuring_helpers import classify as loss
from measuring_helpers import hooked
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from membudget.measuring import (
    CATEGORIES,
    CatchOutOfMemory,
    Fit,
    PeakTracker,
    dry_run,
    format_bytes,
    monitor,
    out_of_memory,
    trace_step,
)
from membudget.measuring.device import MemoryReading
from membudget.measuring.out_of_memory import Predictor
from membudget.models import GPT, mlp
from tests.soak import examples

KIB = 1024
SAMPLES = 64
PLENTY = 10**9


def checkpointed(model, x, y):
    return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)


def wide(model, x, y):
    """The loss itself needs more than the model."""
    return model(x).repeat(1, 50).square().mean()


def setting(warm=True, optimizer=torch.optim.Adam):
    """A model, a batch and an optimizer; warm: with its states."""
    torch.manual_seed(0)
    model = mlp(16, 64, 4)
    x, y = torch.randn(SAMPLES, 16), torch.randint(10, (SAMPLES,))
    optimizer = optimizer(model.parameters(), lr=1e-2)
    if warm:
        loss(model, x[:1], y[:1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, x, y, optimizer


def guarded(existing, above, **options):
    """A guard of a model, a batch and perhaps an optimizer.

    ``above``: its budget, in bytes beyond what exists.
    """
    budget = PeakTracker(*existing).start + above
    if isinstance(existing[-1], torch.optim.Optimizer):
        *existing, options["optimizer"] = existing
    return CatchOutOfMemory(*existing, budget=budget, **options)


def attempt(above, fn=loss, warm=True, **options):
    """One step under a guard; the guard and all of the setting."""
    model, x, y, optimizer = made = setting(warm)
    guard = guarded(made, above, **options)
    with guard:
        fn(model, x, y).backward()
        optimizer.step()
    return guard, made


def alive(guard):
    """Bytes from the block that are still there."""
    return guard.tracker.live - guard.tracker.start


# What happens with the exception -----------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        ValueError("DefaultCPUAllocator: tried to allocate 5 bytes"),
        KeyboardInterrupt(),
    ],
)
def test_other_exceptions_are_passed_on_and_nothing_is_undone(error):
    model, x, y, _ = made = setting()
    guard = guarded(made, PLENTY, loss=loss)
    with pytest.raises(type(error)) as caught, guard:
        loss(model, x, y).backward()
        raise error
    assert caught.value is error
    assert caught.traceback[-1].name == sys._getframe().f_code.co_name
    assert guard.report is None
    assert all(p.grad is not None for p in model.parameters())


# What the report says ----------------------------------------------------

PHASES = {
    # phase: (function, warm, operator, budget above the start)
    "forward": (loss, True, "aten.relu", 20 * KIB),
    "loss": (wide, True, "aten.repeat", 80 * KIB),
    "backward": (loss, True, "aten.threshold_backward", 80 * KIB),
    "recomputation": (checkpointed, True, "aten.relu", 34 * KIB),
    "optimizer": (loss, False, "aten.zeros_like", 85 * KIB),
}


def fail(phase, **options):
    """A step that runs out of memory in the given phase."""
    fn, warm, _, above = PHASES[phase]
    return attempt(above, fn, warm, **options)


@pytest.mark.parametrize("phase", PHASES)
def test_the_report_tells_what_the_full_step_does(phase):
    """Except what a full step would have settled later."""
    guard, _ = fail(phase)
    report, (fn, warm, operator, above) = guard.report, PHASES[phase]
    assert report.operator.name == operator
    assert report.operator.phase == phase.replace("loss", "forward")
    full = attempt(PLENTY, fn, warm)[0].tracker
    timeline = full.timeline
    moment = next(i for i, n in enumerate(timeline) if n > report.budget)
    assert timeline[:moment] == guard.tracker.timeline[:moment]
    assert full.operators[moment] == report.operator
    made = [a.bytes for a in full.allocations if a.birth == moment]
    assert report.asked == sum(made) > 0
    assert report.exact
    assert report.budget == full.start + above
    assert report.in_use <= report.budget < report.in_use + report.asked

    split = dict.fromkeys(CATEGORIES, 0)
    for a in full.allocations:
        if a.birth < moment and (a.death is None or a.death > moment):
            split[a.category] += a.bytes
    assert report.in_use == sum(split.values())
    live = dict(report.live)
    assert live.keys() == split.keys()
    for account in (split, live):
        account["made"] = account.pop("activations")
        account["made"] += account.pop("temporaries")
        if phase == "optimizer":  # states of half a step
            account["made"] += account.pop("optimizer")
    assert live == split


def test_the_largest_are_grouped_by_layer_and_sorted():
    model = GPT(vocabulary=16, context=8, width=16, depth=4, heads=2)
    tokens = torch.randint(16, (8, 8))
    unit = 4 * tokens.numel() * 16
    with PeakTracker(model, tokens) as full:
        model(tokens).logsumexp(-1).mean().backward()
    model.zero_grad()
    operators = [o[:2] for o in full.operators]
    moment = operators.index(("aten.addmm", "blocks.3.up"))
    budget = max(full.timeline[: moment + 1])
    guard = CatchOutOfMemory(model, tokens, budget=budget)
    with guard:
        model(tokens).logsumexp(-1).mean().backward()
    report = guard.report
    assert report.operator == ("aten.gelu", "blocks.3", "forward")
    sizes = [group.bytes for group in report.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == report.in_use
    (up,) = [g for g in report.largest if g.module == "blocks.*.up"]
    assert (up.bytes, up.count) == (4 * 4 * unit, 4)
    assert (up.category, up.operator) == ("activations", "aten.addmm")
    assert str(up) == "4 × activations, by aten.addmm in blocks.*.up"
    (weights,) = [g for g in report.largest if g.category == "parameters"]
    assert weights.count == len(list(model.parameters()))
    assert weights.bytes == sum(p.nbytes for p in model.parameters())
    assert str(weights).endswith("× parameters, there before")


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ("blocks.10.mlp.2 blocks.1.mlp.2", [("blocks.*.mlp.2", 2)]),
        ("3 0 3", [("*", 3)]),
        ("norm1 norm2", [("norm1", 1), ("norm2", 1)]),
        ("3 3", [("3", 2)]),  # one layer goes by its name
    ],
)
def test_only_whole_parts_of_a_path_are_numbers(paths, found):
    operators = [
        out_of_memory.Operator("aten.mm", path, "forward")
        for path in paths.split()
    ]
    groups = out_of_memory.groups(
        [out_of_memory.Allocation(8, 0, "activations", o) for o in operators]
    )
    assert [(g.module, g.count) for g in groups] == found


def test_the_printed_report():
    guard, _ = fail(
        "backward", loss=loss, changes={"in segments": checkpointed}
    )
    assert str(guard.report) == "\n".join(
        [
            "Out of memory: aten.threshold_backward in 5 (backward)",
            "asked for 16.0 KiB, with 189 KiB of 202 KiB in use:",
            "  39.3 KiB  parameters",
            "  2.54 KiB  gradients",
            "  78.6 KiB  optimizer",
            "  48.0 KiB  activations",
            "  4.50 KiB  inputs",
            "  16.0 KiB  temporaries",
            "the largest of these:",
            "  78.6 KiB  24 × optimizer, there before",
            "  48.0 KiB  3 × activations, by aten.relu in *",
            "  39.3 KiB  8 × parameters, there before",
            "  16.0 KiB  temporaries, by aten.mm in 6",
            "  4.50 KiB  2 × inputs, there before",
            "predicted peaks of a step of 64 samples:",
            "  as it is: 205 KiB; micro-batches of 22 fit: 200 KiB",
            "  in segments: 205 KiB; micro-batches of 22 fit: 200 KiB",
            "The gradients of micro-batches are summed by accumulation, and "
            "the optimizer",
            "  steps after the last.",
        ]
    )
    # The first line just fits, and no hyphen breaks the second.
    fit = Fit("in parts", problem=f"{'a' * 52} {'b' * 68} well-known")
    report = replace(guard.report, fits=(fit,), notes=())
    assert str(report).splitlines()[-3:] == [
        "  in parts: no prediction, " + "a" * 52,
        "    " + "b" * 68,
        "    well-known",
    ]


# Recovery ----------------------------------------------------------------


@pytest.mark.parametrize("above", [1 * KIB, 36 * KIB, 72 * KIB])
@pytest.mark.parametrize("fn", [loss, checkpointed])
def test_nothing_of_a_failed_step_stays_wherever_it_fails(fn, above):
    before = hooked()
    guard, (model, *_) = attempt(above, fn)
    assert guard.report
    assert alive(guard) == 0
    assert all(p.grad is None for p in model.parameters())
    assert not any("still held" in note for note in guard.report.notes)
    assert hooked() == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


KEPT = []


def in_variables(model, x, y):
    """Of functions that have ended; somebody keeps the traceback."""

    def inner(hidden):
        big = [torch.ones(100), hidden]
        raise torch.OutOfMemoryError(f"{len(big)} are too many")

    try:
        inner(model(x))
    except torch.OutOfMemoryError as error:
        KEPT.append(error.__traceback__)
        raise


def in_a_cause(model, x, y):
    hidden = model(x)
    try:
        loss(nn.Identity(), hidden, x)  # the shapes do not fit
    except RuntimeError as error:
        before = error
    del hidden
    raise torch.OutOfMemoryError("enough") from before


def in_a_context(model, x, y):
    hidden = model(x)
    try:
        loss(nn.Identity(), hidden, x)
    except RuntimeError:
        raise torch.OutOfMemoryError("enough")  # noqa: B904


def in_a_circle(model, x, y):
    circle = [model(x)]
    circle.append(circle)
    raise torch.OutOfMemoryError("enough")


@pytest.mark.parametrize(
    "held", [in_variables, in_a_cause, in_a_context, in_a_circle]
)
def test_what_is_held_by_what_failed_is_let_go(held):
    gc.disable()
    try:
        guard, _ = attempt(PLENTY, held)
        assert guard.report.live["activations"] > 3 * SAMPLES * 64 * 4
        assert guard.report.notes == ()
        assert alive(guard) == 0
    finally:
        gc.enable()


def test_a_chain_of_exceptions_outside_of_the_block_is_left_alone():
    model, x, y, _ = setting()
    try:
        raise KeyError("before")
    except KeyError as before:
        with CatchOutOfMemory(model, x, y, budget=PLENTY) as guard:
            raise torch.OutOfMemoryError("then")  # noqa: B904
        assert guard.report
        assert before.__traceback__ is not None


def test_what_the_block_binds_stays_and_is_reported():
    model, x, y, _ = setting()
    guard = CatchOutOfMemory(model, x, y, budget=130_000)
    with guard:
        hidden = model(x)
        value = F.cross_entropy(hidden, y)
        value.backward()
    report, held = guard.report, alive(guard)
    assert report.operator.phase == "backward"
    assert held > 3 * SAMPLES * 64 * 4
    (note,) = [n for n in report.notes if "still held" in n]
    assert note == (
        f"{format_bytes(held)} of the failed step are still held by a "
        "variable (3 × activations, by aten.relu in *): delete it, and bind "
        "no loss and no output in the block."
    )
    assert note[:20] in str(report)
    del hidden, value
    assert alive(guard) == 0


def test_gradients_from_before_stay_and_are_reported_if_changed():
    model, x, y, _ = made = setting()
    loss(model, x, y).backward()
    first = next(model.parameters())
    first.grad = None
    before = {p: p.grad for p in model.parameters()}
    values = {p: g.clone() for p, g in before.items() if g is not None}
    guard = guarded(made, 52 * KIB)
    with guard:  # in the forward pass
        loss(model, x, y).backward()
    assert guard.report.operator.phase == "forward"
    assert guard.report.notes == ()
    assert {p: p.grad for p in model.parameters()} == before

    guard = guarded(made, 80 * KIB)
    with guard:
        loss(model, x, y).backward()
    assert guard.report.operator.phase == "backward"
    assert {p: p.grad for p in model.parameters()} == before
    assert alive(guard) == 0
    changed = sum(not torch.equal(p.grad, g) for p, g in values.items())
    assert 0 < changed < len(values)
    assert guard.report.notes == (
        f"Gradients of {changed} parameters existed before and may hold a "
        "part of the failed step: clear them (zero_grad) before it is "
        "repeated.",
    )


def test_gradients_made_anew_in_the_block_are_removed():
    """As with ``zero_grad`` first in the block."""
    model, x, y, _ = made = setting()
    loss(model, x, y).backward()
    guard = guarded(made, 30 * KIB)
    with guard:
        model.zero_grad()
        loss(model, x, y).backward()
    assert guard.report.operator.phase == "backward"
    assert guard.report.live["gradients"] > 0
    assert all(p.grad is None for p in model.parameters())
    assert not any("existed before" in n for n in guard.report.notes)


def test_gradients_of_the_optimizers_other_parameters_are_removed_too():
    model, x, y, _ = setting()
    scale = nn.Parameter(torch.ones(64, 1))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    guard = guarded((model, x, y, optimizer), 10**6)
    with guard:
        (loss(model, x, y) + scale.sum()).backward()
        torch.ones(10**6)
    assert guard.report.operator.name == "aten.ones"
    assert scale.grad is None


@pytest.mark.parametrize(
    ("kind", "foreach"),
    [
        (torch.optim.Adam, False),
        (torch.optim.Adam, True),
        (torch.optim.Adagrad, True),  # has its states from the first
    ],
)
def test_half_made_states_are_removed_so_that_the_next_step_works(
    kind, foreach
):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = kind(model.parameters(), lr=0.1, foreach=foreach)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    states = {p: set(s) for p, s in optimizer.state.items()}
    peaks = []
    for above in range(1000, 200_000, 32_000):
        guard = guarded([model, optimizer], above)
        with guard:
            optimizer.step()
        if guard.report is None:
            break
        peaks.append(above)
        assert guard.report.operator.phase == "optimizer"
        assert alive(guard) == 0
        assert {p: set(s) for p, s in optimizer.state.items()} == states
        (note,) = guard.report.notes
        assert note.startswith("The optimizer's step failed halfway, with ")
    assert peaks
    optimizer.step()


def test_a_state_that_joins_others_is_removed_alone():
    class Late(torch.optim.Optimizer):
        """Makes ``b`` in its second step."""

        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    name = "b" if self.state[p] else "a"
                    self.state[p][name] = torch.zeros_like(p)

    model = nn.Linear(8, 64)
    optimizer = Late(model.parameters())
    optimizer.step()
    states = {p: dict(s) for p, s in optimizer.state.items()}
    guard = guarded([model, optimizer], 8 * 64 * 4)
    with guard:
        optimizer.step()
    assert guard.report.live["temporaries"] == 8 * 64 * 4
    assert alive(guard) == 0
    for p, state in optimizer.state.items():
        assert list(state) == ["a"]
        assert state["a"] is states[p]["a"]


def test_a_step_that_fails_halfway_says_what_it_has_updated():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = [p.clone() for p in model.parameters()]
    guard = guarded([model, optimizer], 1 * KIB)
    with guard:
        optimizer.step()
    assert guard.report.operator.phase == "optimizer"
    assert guard.report.notes == (
        "The optimizer's step failed halfway, with 2 of 4 parameters and 9 "
        "of 12 states updated: load a saved state if there are any.",
    )
    moved = [
        not torch.equal(p, b)
        for p, b in zip(model.parameters(), before, strict=True)
    ]
    assert moved == [True, True, False, False]
    assert len(optimizer.state) == 4  # those from before stay


def test_states_of_a_step_that_succeeded_in_the_block_stay():
    model, x, y, optimizer = made = setting(warm=False)
    guard = guarded(made, 2 * 10**6)
    with guard:
        loss(model, x, y).backward()
        optimizer.step()
        torch.ones(10**6)
    assert guard.report.operator.phase == "forward"
    assert guard.report.notes == ()
    weights = [p.nbytes for p in model.parameters()]
    assert len(optimizer.state) == len(weights)
    assert alive(guard) == 2 * sum(weights) + 4 * len(weights)


def test_an_optimizer_that_was_not_handed_over_is_repaired_too():
    model, x, y, optimizer = setting(warm=False)
    guard = guarded([model, x, y], 85 * KIB)
    with guard:
        loss(model, x, y).backward()
        optimizer.step()
    assert guard.report.operator.phase == "optimizer"
    assert len(optimizer.state) == 0
    assert alive(guard) == 0


def test_a_loop_fails_recovers_and_goes_on():
    """With the suggested micro-batch, to the same end as without a budget."""

    def train(budget):
        model, x, y, _ = setting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        size, failures, losses = SAMPLES, [], []
        while len(losses) < 5:
            guard = CatchOutOfMemory(
                model, x, y, loss=loss, optimizer=optimizer, budget=budget
            )
            total = torch.zeros(())
            with guard:
                for a, b in zip(x.split(size), y.split(size), strict=True):
                    part = loss(model, a, b) * (len(a) / SAMPLES)
                    part.backward()
                    total += part.detach()
                    del part
                optimizer.step()
                optimizer.zero_grad()
            if guard.report:
                size = guard.report.micro_batch
                failures.append(size)
                del guard
            else:
                losses.append(total.item())
        return losses, failures

    expected, none = train(PLENTY)
    found, failures = train(150_000)
    assert none == []
    assert len(failures) == 1 and 1 <= failures[0] < SAMPLES
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]


# Predictions -------------------------------------------------------------


def larger(size):
    """Samples in each micro-batch if there were one fewer of them."""
    count = -(-SAMPLES // size)
    assert size == -(-SAMPLES // count)  # cut evenly
    return -(-SAMPLES // (count - 1))


@pytest.mark.parametrize(
    ("fn", "share"),
    [(checkpointed, 0.3), (wide, 0.9)],  # of it 58 would fit, too
)
def test_the_fewest_even_micro_batches_run_and_one_fewer_do_not(fn, share):
    model, x, y, optimizer = made = setting(optimizer=torch.optim.SGD)
    options = {"optimizer": optimizer}
    low, high = (
        dry_run(model, fn, x, y, micro_batch=n, **options).peak
        for n in (1, SAMPLES)
    )
    room = int(low + share * (high - low)) - PeakTracker(*made).start
    guard = guarded(made, room, loss=fn)
    with guard:
        fn(model, x, y).backward()
        optimizer.step()
    report = guard.report
    (fit,) = report.fits
    assert fit.full == high > report.budget
    size = fit.micro_batch
    assert report.micro_batch == size
    assert 1 <= size < SAMPLES
    # This step's micro-batch has left the model as it was: it runs for real.
    options["budget"] = report.budget
    real = trace_step(model, fn, x, y, micro_batch=size, **options)
    assert real.peak == fit.peak
    with pytest.raises(torch.OutOfMemoryError):
        trace_step(model, fn, x, y, micro_batch=larger(size), **options)


def test_two_micro_batches_tell_the_peak_of_many():
    model, x, y, optimizer = setting()
    x, y = x[:9].clone(), y[:9].clone()
    predictor = Predictor(model, (x, y), optimizer, torch.device("cpu"), 0)
    for size in (1, 4, 9):
        whole = dry_run(
            model, loss, x, y, optimizer=optimizer, micro_batch=size
        )
        assert predictor.peak(loss, size) == whole.peak


def test_a_change_that_fits_and_one_that_does_not():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8))
    )
    x = torch.randn(SAMPLES, 32)

    def plain(model, x):
        return model(x).square().mean()

    def each(model, x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    def twice(model, x):
        return (model(x) + model(x)).square().mean()

    changes = {"each layer checkpointed": each, "twice": twice}
    guard = guarded([model, x], 140 * KIB, loss=plain, changes=changes)
    with guard:
        plain(model, x).backward()
    report = guard.report
    assert [f.change for f in report.fits] == ["as it is", *changes]
    as_is, segments, double = report.fits
    assert segments.micro_batch == SAMPLES
    assert segments.full == segments.peak <= report.budget
    assert 1 <= double.micro_batch < as_is.micro_batch < SAMPLES
    model.zero_grad()
    with guarded([model, x], 140 * KIB) as guard:
        each(model, x).backward()
    assert guard.report is None
    assert guard.tracker.peak == segments.full
    assert "each layer checkpointed: " in str(report)
    assert str(segments).endswith(" KiB, fits")


def test_only_what_is_handed_over_is_predicted():
    report = fail("backward", changes={"in segments": checkpointed})[0].report
    assert [f.change for f in report.fits] == ["in segments"]
    assert report.micro_batch is None
    report = fail("backward")[0].report
    assert report.fits == report.notes == ()
    assert "predicted" not in str(report)


def wrong(model, x, y):
    raise KeyError("nothing here")


@pytest.mark.few(0)
def test_nothing_fits():
    """Which is not said where nothing is known."""
    made = attempt(100, loss=loss, changes={"wrong": wrong})
    guard, (model, x, y, optimizer) = made
    fit, _ = guard.report.fits
    assert fit.micro_batch is guard.report.micro_batch is None
    options = {"optimizer": optimizer, "micro_batch": 1}
    assert fit.peak == dry_run(model, loss, x, y, **options).peak
    assert guard.report.notes == ("Nothing of this fits.",)
    assert str(fit) == (
        f"as it is: {format_bytes(fit.full)}; one sample at once: "
        f"{format_bytes(fit.peak)}"
    )
    assert str(guard.report).endswith("\nNothing of this fits.")
    guard, _ = fail("backward", loss=wrong)
    assert guard.report.notes == ()


@pytest.mark.parametrize("samples", [0, 1])
def test_a_step_that_cannot_be_cut(samples):
    model = nn.Linear(16, 16)
    batch = [torch.ones(samples, 16)] if samples else []

    def fn(model, *batch):
        return model(torch.ones(40, 16)).exp().sum()

    guard = guarded([model, *batch], 3 * KIB, loss=fn)
    with guard:
        fn(model, *batch).backward()
    report = guard.report
    (fit,) = report.fits
    assert fit.micro_batch is None
    assert fit.full == fit.peak == dry_run(model, fn, *batch).peak
    assert report.samples == samples
    assert report.notes == ("Nothing of this fits.",)
    assert str(fit) == f"as it is: {format_bytes(fit.full)}, does not fit"


def test_a_block_that_holds_more_than_its_loss():
    model, x, y, optimizer = setting()
    peak = dry_run(model, loss, x, y, optimizer=optimizer).peak
    guard = CatchOutOfMemory(
        model, x, y, loss=loss, optimizer=optimizer, budget=peak
    )
    with guard:
        kept = torch.ones(100)
        loss(model, x, y).backward()
    assert guard.report.micro_batch == SAMPLES
    assert guard.report.fits[0].peak == peak
    assert guard.report.notes[0] == (
        "The loss fits as it is: the block holds more than it, or the "
        "allocator finds no block of that size."
    )
    assert len(guard.report.notes) == 2  # kept is held
    del kept


def test_a_loss_that_cannot_be_predicted_does_not_spoil_the_report():
    def by_value(model, x, y):
        return loss(model, x, y) * x.sum().item()

    guard, _ = fail(
        "backward",
        loss=by_value,
        changes={"wrong": wrong, "in segments": checkpointed},
    )
    unknown, failed, segments = guard.report.fits
    assert guard.report.micro_batch is None
    assert unknown.full is unknown.micro_batch is unknown.peak is None
    assert "which a dry run has not" in unknown.problem
    assert failed == Fit("wrong", problem="KeyError: 'nothing here'")
    assert segments.micro_batch
    assert not any("fits" in note for note in guard.report.notes)
    text = " ".join(str(guard.report).split())
    assert "wrong: no prediction, KeyError: 'nothing here'" in text


def test_a_device_without_memory_and_a_batch_that_the_loss_moves():
    """On ``meta`` all of it works alike; the batch waits on the CPU."""
    with torch.device("meta"):
        model = mlp(16, 64, 4)
    x = torch.zeros(SAMPLES, 16)

    def fn(model, x):
        return model(x.to("meta")).square().mean()

    start = PeakTracker(model, x, device="meta").start
    assert start == sum(p.nbytes for p in model.parameters())
    guard = CatchOutOfMemory(model, x, loss=fn, budget=start + 60 * KIB)
    with guard:
        fn(model, x).backward()
    (fit,) = guard.report.fits

    def peak(size):
        model.zero_grad()
        with PeakTracker(model, device="meta") as tracker:
            for part in x.split(size):
                share = len(part) / SAMPLES
                (fn(model, part) * share).backward()
        model.zero_grad()
        return tracker.peak

    assert 1 < fit.micro_batch < SAMPLES
    assert fit.peak == pytest.approx(peak(fit.micro_batch), abs=16)
    assert fit.full == pytest.approx(peak(SAMPLES), abs=16)
    assert peak(larger(fit.micro_batch)) + 16 > start + 60 * KIB


# The search --------------------------------------------------------------


def searched(peaks, room):
    """The micro-batch that is found, and the sizes that were asked for."""
    samples, asked = len(peaks) - 1, set()

    class Known(Predictor):
        def peak(self, fn, size):
            asked.add(size)
            return peaks[size]

    batch, cpu = (torch.ones(samples, 1),), torch.device("cpu")
    known = Known(nn.Linear(1, 1), batch, None, cpu, room)
    return known.fit("searched", loss).micro_batch, asked


@settings(max_examples=examples(40))
@given(
    st.lists(st.integers(0, 10_000), min_size=3, max_size=200),
    st.integers(0, 10_000),
)
@example([0, 0, 10_000], 5)
@example([0] * 100 + [10_000], 0)
@example([0, 10, 10_000] + [1] * 100, 5000)  # a guess that is too large
@example([0, 0] + [10_000] * 100, 0)
def test_the_fewest_micro_batches_that_fit_are_found(steps, room):
    """And of sizes with that count, one that divides the batch."""
    peaks = list(accumulate(steps))
    if not peaks[1] <= room < peaks[-1]:
        return
    samples = len(peaks) - 1
    found, asked = searched(peaks, room)
    most = max(n for n in range(samples) if peaks[n] <= room)
    count = -(-samples // most)
    assert -(-samples // found) == count and found <= most
    assert samples % count or samples % found == 0
    assert len(asked) <= 4 + 2 * samples.bit_length()


def test_the_search_needs_few_peaks_where_they_are_on_a_line():
    found, asked = searched([1000 + 77 * n for n in range(8193)], 50_000)
    assert found == 631  # in 13 micro-batches; of 636 there are as many
    assert len(asked) <= 6


# Real errors -------------------------------------------------------------


def test_the_cpus_own_error_is_caught(monkeypatch):
    """More than any address space has: 16 PiB."""
    now = MemoryReading("cpu", process=50_000, free=60_000, total=10**6)
    monkeypatch.setattr(out_of_memory, "read_memory", lambda device: now)
    monkeypatch.setattr(monitor, "read_memory", lambda device: now)

    def huge(model, x, y):
        return loss(model, x, y) + torch.empty(2**52).sum()

    model, x, y, _ = setting()
    guard = CatchOutOfMemory(model, x, y, loss=huge, changes={"small": loss})
    with guard:
        huge(model, x, y).backward()
    report = guard.report
    assert report.operator[::2] == ("aten.empty", "forward")
    assert report.asked == 2**54 and report.exact
    assert report.budget == 110_000
    assert report.others == 50_000 - guard.tracker.start
    assert report.live["activations"] >= 3 * SAMPLES * 64 * 4
    assert report.in_use == sum(report.live.values()) + report.others
    assert alive(guard) == 0
    first, small = report.fits
    assert first.micro_batch is None and first.full > 2**54
    assert 1 <= small.micro_batch < SAMPLES
    assert small.peak + report.others <= report.budget
    size = larger(small.micro_batch)
    assert guard._predictor().peak(loss, size) + report.others > 110_000
    assert "  others" in str(report)
    assert "of 64 samples, without the others:" in str(report)


@pytest.mark.parametrize("before", ["can't allocate", "not enough"])
def test_messages_of_the_cpus_allocator(before):
    error = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: "
        f"{before} memory: you tried to allocate 12345 bytes. Error code 12"
    )
    model, x, *_ = made = setting()
    guard = guarded(made, PLENTY)
    with guard:
        model(x)
        raise error
    assert (guard.report.asked, guard.report.exact) == (12345, True)
    assert guard.report.operator.name == "aten.addmm"  # the last that ran
    assert alive(guard) == 0


CUDA = (
    "CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of "
    "14.75 GiB of which 19.06 MiB is free. Process 123 has 14.72 GiB memory "
    "in use. Of the allocated memory 14.55 GiB is allocated by PyTorch, and "
    "45.06 MiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("message", "asked", "exact"),
    [
        (CUDA.format("2.50 GiB"), int(2.5 * 2**30), False),
        (CUDA.format("1.50 KiB"), 1536, False),
        (CUDA.format("512 bytes"), 512, True),
        ("Allocation on device", None, False),
    ],
)
def test_messages_of_cudas_allocator(message, asked, exact):
    guard = guarded(setting(), PLENTY)
    with guard:
        raise torch.OutOfMemoryError(message)
    report = guard.report
    assert (report.asked, report.exact) == (asked, exact)
    assert report.operator == out_of_memory.Operator("", "", "")
    said = "an unknown size" if asked is None else format_bytes(asked)
    about = "" if exact or asked is None else "a segment of about "
    lines = str(report).splitlines()
    assert lines[0] == "Out of memory: no operator (before the first operator)"
    assert lines[1].startswith(f"asked for {about}{said}, with ")


def test_an_older_failure_that_the_block_survived_is_not_reported():
    model, x, y, _ = made = setting()
    guard = guarded(made, 20 * KIB)
    with guard:
        with suppress(torch.OutOfMemoryError):
            torch.ones(10**6)
        loss(model, x, y).backward()
    assert guard.report.operator.name == "aten.relu"
    with guard:
        with suppress(torch.OutOfMemoryError):
            torch.ones(10**6)
        model(x[:1])
        raise torch.OutOfMemoryError("another")
    assert guard.report.operator.name == "aten.addmm"
    with guard, suppress(torch.OutOfMemoryError):
        torch.ones(10**6)
    assert guard.report is None


# CUDA, as far as it goes without -----------------------------------------


class Fail(TorchDispatchMode):
    """Beneath the tracker: an operator fails once, as CUDA's do."""

    def __init__(self, name, message):
        super().__init__()
        self.name, self.message = name, message

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.message and str(func).startswith(self.name):
            message, self.message = self.message, ""
            raise torch.OutOfMemoryError(message)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def cuda(monkeypatch):
    """CPU tensors count as if they were on ``cuda:0``; notes what is done."""
    done = []
    now = MemoryReading(
        "cuda:0",
        free=20_000,
        total=20_000_000,
        requested=1_000_000,
        allocated=1_050_000,
        reserved=1_060_000,
    )
    for module in (out_of_memory, monitor):
        monkeypatch.setattr(module, "read_memory", lambda device: now)
    device = torch.device("cuda:0")
    monkeypatch.setattr(monitor, "resolve_device", lambda name: device)
    fraction = "get_per_process_memory_fraction"
    monkeypatch.setattr(torch.cuda, fraction, lambda device: 1.0)
    monkeypatch.setattr(
        PeakTracker,
        "_counts",
        lambda self, tensor: str(self.device) == "cuda:0",
    )
    monkeypatch.setattr(
        out_of_memory, "wait_for_autograd", lambda d: done.append("waited")
    )
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: done.append("emptied")
    )
    return done


def fail_on_cuda(**options):
    model, x, y, optimizer = setting()
    guard = CatchOutOfMemory(
        model, x, y, optimizer=optimizer, device="cuda:0", **options
    )
    with Fail("aten.threshold_backward", CUDA.format("20.00 MiB")), guard:
        loss(model, x, y).backward()
    assert alive(guard) == 0
    return guard


def test_cudas_error_and_what_the_process_can_have(cuda):
    guard = fail_on_cuda(loss=loss)
    report = guard.report
    assert report.operator == ("aten.threshold_backward", "5", "backward")
    assert (report.asked, report.exact) == (20 * 2**20, False)
    losses = 2 * 4
    assert report.live["activations"] == 3 * SAMPLES * 64 * 4 + losses
    assert report.live["gradients"] == (64 * 10 + 10) * 4
    said = "asked for a segment of about 20.0 MiB"
    assert str(report).splitlines()[1].startswith(said)
    assert cuda == ["waited", "emptied"]

    assert report.budget == 1_080_000
    assert report.others == 1_000_000 - guard.tracker.start
    room = report.budget - report.others
    (fit,) = report.fits
    assert 1 <= fit.micro_batch < SAMPLES
    assert guard._predictor().peak(loss, fit.micro_batch) == fit.peak <= room
    assert guard._predictor().peak(loss, larger(fit.micro_batch)) > room
    assert report.notes[-1] == (
        "CUDA's allocator rounds each request up and cannot always use what "
        "is free between others: leave a margin."
    )


def test_a_budget_of_its_own_goes_before_cudas(cuda):
    report = fail_on_cuda(budget=400_000).report
    assert (report.budget, report.others) == (400_000, 0)


def test_on_a_cpu_no_cache_is_emptied(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: 1 / 0)
    guard, _ = fail("backward")
    assert not any("CUDA" in note for note in guard.report.notes)


# Bad input ---------------------------------------------------------------


def test_a_change_with_the_name_of_the_step_as_it_is():
    changes = {"as it is": checkpointed}
    with pytest.raises(ValueError, match=r"^a change is called 'as it is': "):
        guarded([nn.Linear(2, 2)], PLENTY, loss=loss, changes=changes)


def test_gradients_can_make_what_exists_too_large_for_the_budget():
    model, x, y, _ = made = setting()
    guard = guarded(made, 100)
    loss(model, x, y).backward()
    with pytest.raises(ValueError, match="what exists already takes"), guard:
        raise AssertionError("the block must not run")
    model.zero_grad()
    with guard:
        pass
