"""A model of one's own: against real steps, and against the ledger's jobs."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from membudget.ledger import Transformer, account
from membudget.measuring import PeakTracker
from membudget.models import mlp
from membudget.planning import (
    Job,
    Machine,
    OwnJob,
    Plan,
    WorkCounter,
    calibrate,
    largest_micro_batch,
    memory,
    search,
    seconds,
    static,
    step,
    work,
)

MACHINE = Machine(1e12, 1e11, 1e-5, 1e10, "a made-up machine")
SHAPE = Transformer(40, 16, 2, 2, context=8)


def next_token(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def job_of(samples, make=torch.optim.AdamW, shape=SHAPE, **way):
    torch.manual_seed(0)
    model = shape.build("cpu")
    way = way or {"foreach": False}
    optimizer = make(model.parameters(), lr=0.1, **way)
    x, y = (torch.randint(40, (samples, 8)) for _ in range(2))
    given = {"optimizer": optimizer, "blocks": model.blocks}
    return OwnJob(model, next_token, x, y, **given)


@pytest.fixture(scope="module")
def own():
    return job_of(11)


@pytest.mark.parametrize("fused", [False, True])
def test_its_plans_are_those_of_the_same_network(own, fused):
    """By the ledger, and where straight lines fill in: 3 of 11, 9."""
    other = Job(SHAPE, 8, 11, "cpu")
    own = job_of(11, fused=True) if fused else own
    for choice in [(11,), (9,), (4, 1), (3, 2)]:
        plan, same = Plan(*choice), Plan(*choice, fused=fused)
        assert memory(own, plan) == memory(other, same), plan
        assert work(own, plan) == work(other, same), plan
    assert static(own, Plan(1)) == static(other, Plan(1))


@pytest.mark.parametrize("size", [2, 6, 11])
def test_a_step_needs_and_does_what_its_plan_says(own, size):
    plan = Plan(size, checkpointed=1)
    step(own, plan)  # makes Adam's states
    held = own.model, own.optimizer, *own.examples
    with PeakTracker(*held) as tracker, WorkCounter() as counter:
        step(own, plan)
    assert tracker.peak == memory(own, plan)
    assert counter.counts == work(own, plan)[:3]
    found = account(
        own.model,
        own.loss_of(plan),
        *own.examples,
        optimizer=own.optimizer,
        micro_batch=size,
    )
    assert found.peak == tracker.peak


def test_counting_the_work_changes_no_peak():
    """The counter takes SiLU's backward pass apart; the step does not."""
    shape = Transformer(40, 16, 2, 2, hidden=128, family="llama", tied=True)
    own, plan = job_of(4, shape=shape), Plan(2, checkpointed=2)
    step(own, plan)
    with PeakTracker(own.model, own.optimizer, *own.examples) as tracker:
        step(own, plan)
    assert tracker.peak == memory(own, plan)


def test_every_plan_takes_the_step_of_the_whole_batch():
    after = []
    for plan in (Plan(11), Plan(4, 2), Plan(1, 1)):
        own = job_of(11, torch.optim.SGD)
        losses = [step(own, plan) for _ in range(3)]
        assert all(p.grad is None for p in own.model.parameters())
        assert all("forward" not in vars(m) for m in own.model.modules())
        weights = [p.detach().flatten() for p in own.model.parameters()]
        after.append(torch.cat([*weights, torch.tensor(losses)]))
    for other in after[1:]:
        torch.testing.assert_close(other, after[0], rtol=1e-4, atol=1e-5)


class Normalised(nn.Module):
    """A block that draws random numbers and keeps running statistics."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x, scale=1.0):
        return scale * F.rrelu(self.norm(self.layer(x)), training=True), x


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
        return x


def test_blocks_with_statistics_and_noise_take_the_plain_step():
    torch.manual_seed(0)
    models = [Blocks(Normalised(), Normalised()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(6, 8)

    def loss(model, x):
        return model(x).square().mean()

    for model, checkpointed in zip(models, (0, 2), strict=True):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        job = OwnJob(model, loss, x, optimizer=sgd, blocks=model.blocks)
        torch.manual_seed(1)
        step(job, Plan(6, checkpointed=checkpointed))
    plain, ours = (model.state_dict().values() for model in models)
    assert all(map(torch.equal, plain, ours))


def test_a_block_that_counts_its_calls_is_refused():
    class Counts(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, scale):
            self.calls += 1
            return super().forward(x), x

    model = Blocks(Counts(), Normalised())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job = OwnJob(
        model,
        lambda model, x: model(x).mean(),
        torch.ones(4, 8),
        optimizer=sgd,
        blocks=model.blocks,
    )
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"blocks.0, Counts.calls changes"):
        step(job, Plan(4, checkpointed=1))
    assert all(map(torch.equal, before, model.parameters()))
    assert "forward" not in vars(model.blocks[0])


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused():
    own = job_of(4, torch.optim.SGD)
    for p in own.model.parameters():
        one = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda _, one=one: one.step())
    before = [p.clone() for p in own.model.parameters()]
    with pytest.raises(RuntimeError, match="SGD steps in the backward pass"):
        step(own, Plan(2))
    assert all(map(torch.equal, own.model.parameters(), before))


def test_a_block_that_changes_what_it_is_given_by_name_is_refused():
    class Scales(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(8, 8), Scales(8, 8)

        def forward(self, x):
            return self.block(x=self.first(x))

    model = Named()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    job = OwnJob(
        model,
        lambda model, x: model(x).mean(),
        torch.ones(4, 8),
        optimizer=sgd,
        blocks=[model.block],
    )
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="block changes its input in place"):
        step(job, Plan(4, checkpointed=1))
    assert all(map(torch.equal, before, model.parameters()))


def test_the_search_is_exact(own):
    locks = {"micro_batch": [1, 2, 4, 11]}
    plans = [Plan(*of) for of in product(locks["micro_batch"], (0, 1, 2))]
    fastest = search(own, 10**9, MACHINE, locks=locks).best[0]
    for budget in {memory(own, plan) for plan in plans}:
        best = search(own, budget, MACHINE, locks=locks).best[0]
        assert best.peak == memory(own, best.plan) <= budget
        fits = [plan for plan in plans if memory(own, plan) <= budget]
        least = min(seconds(work(own, plan), MACHINE) for plan in fits)
        assert best.seconds == pytest.approx(least)
        assert best.slowdown == pytest.approx(least / fastest.seconds)
    answer = str(search(own, 10**9, MACHINE))
    assert "11 samples in" in answer and "steps without data" in answer


def test_the_largest_micro_batch(own):
    sizes = [memory(own, Plan(size, 1)) for size in range(1, 12)]
    for size in (1, 3, 6, 11):
        budget = sizes[size - 1]
        right = max(n for n, peak in enumerate(sizes, 1) if peak <= budget)
        found = largest_micro_batch(own, Plan(1, 1), budget=budget)
        assert found == right


def test_it_calibrates_as_other_jobs_do(own):
    found = calibrate(lambda plan: seconds(work(own, plan), MACHINE), own)
    assert found.flops == pytest.approx(MACHINE.flops, rel=1e-3)
    assert found.operator == pytest.approx(MACHINE.operator, rel=1e-3)


def test_what_is_not_straight_runs_at_every_size():
    """This loss makes more where the micro-batch is large."""

    def loss(model, x):
        rows = x if len(x) < 5 else torch.cat([x, x])
        return model(rows).square().mean()

    model = mlp(4, 8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = OwnJob(model, loss, torch.rand(14, 4), optimizer=optimizer)
    for size in (4, 5, 6):
        with PeakTracker(model, *own.examples) as tracker:
            step(own, Plan(size))
        assert tracker.peak == memory(own, Plan(size))


def test_its_words_and_its_program(own):
    plan = Plan(4, 1)
    assert plan.text(own) == (
        "2 × 4 samples and a last micro-batch of 3, 1 of 2 blocks checkpointed"
    )
    before = {"job": own, "batches": [own.examples]}
    exec(plan.code(own), before)
    assert before["plan"] == plan and before["loss"] > 0


def bare(own, **given):
    return OwnJob(own.model, own.loss, torch.ones(2), **given)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda own: memory(own, Plan(1, 3)), "network has 2"),
        (lambda own: memory(own, Plan(12)), "of the 11 samples"),
        (lambda own: work(own, Plan(1, recipe="bf16")), "as they are"),
        (
            lambda own: search(own, 10**9, MACHINE, locks={"recipe": "fp32"}),
            "recipe is locked",
        ),
        (lambda own: search(own, 10**9, MACHINE, ranks=11), "as they are"),
        (lambda own: search(own, 1000, MACHINE), "states alone are"),
        (lambda own: step(own, Plan(1), own.examples[0]), None),
        (lambda own: step(own, Plan(1), torch.ones(3)), "has 3 samples"),
        (
            lambda own: bare(own, blocks=[own.model] * 2),
            "comes twice",
        ),
        (
            lambda own: bare(own, blocks=[nn.ReLU()]),
            "not in the model",
        ),
        (
            lambda own: step(bare(own), Plan(1)),
            "no optimizer",
        ),
    ],
)
def test_what_it_refuses(own, wrong, says):
    with pytest.raises(ValueError if says else TypeError, match=says):
        wrong(own)
