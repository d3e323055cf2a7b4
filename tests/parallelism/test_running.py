"""A simulated rank's step is what a real one needs, to the byte."""

import pipelines as p
import pytest
import torch
import torch.nn.functional as F

from membudget.parallelism import (
    SCHEDULES,
    in_flight,
    run_pipeline,
    simulate_pipeline,
)
from membudget.sharding import Ranks

RUNS = [
    (ranks, kind, schedule, checkpointed)
    for ranks in (2, 4)
    for kind in p.MODELS
    for schedule in SCHEDULES
    for checkpointed in (False, True)
]


def simulated(
    kind, schedule, ranks, rank, micro_batches, checkpointed=False, **how
):
    return simulate_pipeline(
        lambda: p.build(kind, checkpointed),
        p.loss,
        *p.batch(1),
        schedule=schedule,
        ranks=ranks,
        rank=rank,
        micro_batches=micro_batches,
        **how,
    )


@pytest.fixture(scope="module")
def pools():
    pools = {ranks: Ranks(ranks, deadline=120, show=None) for ranks in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("ranks", "kind", "schedule", "checkpointed"), RUNS, ids=str
)
def test_a_simulated_rank_is_a_real_one(
    pools, ranks, kind, schedule, checkpointed
):
    m = 2 * ranks
    runs = pools[ranks].run(
        p.measured, kind, schedule, m, checkpointed=checkpointed
    )
    for rank, (peak, split, *_) in enumerate(runs):
        found = simulated(
            kind, schedule, ranks, rank, m, checkpointed=checkpointed
        )
        assert (found.peak, found.split) == (peak, split)
        assert sum(split.values()) == peak


def whole_gradients(kind, micro_batches):
    """Of the mean of the micro-batches' means, in one process."""
    model = p.build(kind)
    values = []
    for x, y in zip(
        *(t.split(p.SAMPLES) for t in p.batch(micro_batches)), strict=True
    ):
        value = p.loss(model(x), y)
        (value / micro_batches).backward()
        values.append(value.item())
    return values, dict(model.named_parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", p.MODELS)
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "1F1B"])
def test_a_pipeline_is_accumulation_in_one_process(pools, kind, schedule):
    values, parameters = whole_gradients(kind, 4)
    runs = pools[2].run(p.measured, kind, schedule, 4)
    home = 1 if schedule == "1F1B" else 0  # has the last stage
    assert runs[home][2] == pytest.approx(values, abs=1e-6)
    assert runs[1 - home][2] == ()
    found = {name: g for run in runs for name, g in run[3].items()}
    assert set(found) == set(parameters)
    for name, parameter in parameters.items():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6)


def test_a_repeated_step_has_the_same_peak(pools):
    first, second = (
        [run[:2] for run in pools[2].run(p.measured, "gpt", "1F1B", 4)]
        for _ in range(2)
    )
    assert first == second


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("schedule", "each"),
    {"1F1B": 1, "DualPipeV": 4, "ZBVZeroBubble": 4}.items(),
)
def test_further_micro_batches_cost_what_is_received_and_kept(schedule, each):
    """As many tapes as before, and with 1F1B a buffer for each gradient that
    rank 0 receives. With several stages two buffers, and the two messages
    that were sent."""
    few, many = (simulated("gpt", schedule, 2, 0, m) for m in (4, 8))
    assert in_flight(schedule, 2, 4, 0) == in_flight(schedule, 2, 8, 0)
    assert (many.held - few.held) / 4 / p.UNIT == pytest.approx(each, abs=0.01)


def test_the_last_rank_has_the_logits():
    """Three of them at the loss, and 1F1B has them once."""
    ends = [simulated("gpt", "1F1B", 2, r, 4) for r in (0, 1)]
    logits = p.SAMPLES * p.TOKENS * p.VOCABULARY * 4
    sizes = [
        sum(a.bytes == logits for a in step.tracker.allocations)
        for step in ends
    ]
    assert sizes[0] == 0
    assert sizes[1] > 0


def masked(logits, targets):
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1
    )


def summed(logits, targets):
    return F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=-1,
        reduction="sum",
    )


def uneven():
    """Targets of which the micro-batches have different numbers."""
    tokens, targets = p.batch(4)
    targets = targets.clone()
    targets[0, 4:] = targets[3, 20:] = -1
    return tokens, targets


def losses_of(loss):
    step = run_pipeline(
        lambda: p.build("gpt"),
        loss,
        *uneven(),
        schedule="1F1B",
        micro_batches=4,
    )
    return step.losses


def test_with_uneven_labels_the_mean_of_means_is_another_loss(pools):
    tokens, targets = uneven()
    model = p.build("gpt")
    wanted = masked(model(tokens), targets).item()
    means = pools[2].run(losses_of, masked)[1]
    sums = pools[2].run(losses_of, summed)[1]
    assert abs(sum(means) / 4 - wanted) > 1e-3
    labels = int((targets >= 0).sum())
    assert sum(sums) / labels == pytest.approx(wanted, abs=1e-6)


def test_gradients_that_the_step_makes_are_not_there_before():
    """GPipe's first backward pass has the tape of all micro-batches, and of
    the gradients only its own."""
    zeroed, made = (
        simulated("gpt", "GPipe", 2, 1, 4, zeroed=z) for z in (True, False)
    )
    assert made.split["gradients"] < zeroed.split["gradients"]
    assert made.peak < zeroed.peak


def test_it_refuses_what_cannot_be():
    with pytest.raises(RuntimeError, match="no process group"):
        run_pipeline(
            lambda: p.build("gpt"),
            p.loss,
            *p.batch(4),
            schedule="1F1B",
            micro_batches=4,
        )
    with pytest.raises(ValueError, match="10 stages are more than the 8"):
        simulated("gpt", "1F1B", 10, 0, 20)
    with pytest.raises(ValueError, match="rank is 2"):
        simulated("gpt", "1F1B", 2, 2, 4)
