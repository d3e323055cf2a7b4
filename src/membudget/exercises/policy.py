"""The exercises of the lab on a vision-language-action policy."""

import torch
from torch import nn

from membudget.exercises.core import Case, Exercise
from membudget.exercises.observe import answer, gradient


def chunk_gradient(policy, x, actions, real, micro_batch):
    for start in range(0, len(x), micro_batch):
        part = slice(start, start + micro_batch)
        away = (policy(x[part]) - actions[part]).abs() * real[part]
        (away.sum() / real.sum()).backward()


def _chunks(lengths: list[int], micro_batch: int) -> Case:
    """Chunks of four actions, of which some are real."""

    def make() -> tuple:
        policy = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        count = len(lengths)
        x = torch.randn(count, 3).double()
        actions = torch.randn(count, 4).double()
        real = torch.arange(4) < torch.tensor(lengths)[:, None]
        return policy.double(), x, actions, real, micro_batch

    return Case(
        f"chunks with {lengths} real actions, micro_batch = {micro_batch}",
        make,
    )


check_chunk_gradient = Exercise(
    chunk_gradient,
    cases=[_chunks([4, 4, 1, 2, 3], 2), _chunks([1, 4, 4, 2], 3)],
    observe=gradient,
    mistakes="""
        away.sum() / real.sum() => away.sum() / real[part].sum()
            each micro-batch is divided by its own actions, so what is left is
            a sum of means: divide by the real actions of the whole batch.
        away.sum() / real.sum() => \
        away.sum() / real[part].sum() * len(x[part]) / len(x)
            each mean is weighted by its samples. The error is a mean over
            actions, and samples have different numbers of them.
        away.sum() / real.sum() => \
        away.sum() / real[part].sum() / len(range(0, len(x), micro_batch))
            this is the mean of the means: a micro-batch with few real actions
            counts as much as one with many.
        real.sum() => real.numel()
            padding is counted: divide by the actions that are real.
        away.sum() / real.sum() => away.sum()
            this is the sum of the errors: divide by the number of real
            actions in the batch.
        * real[part] =>
            the errors of the padding count, too: set them to 0.
        range(0, len(x), micro_batch) => \
        range(0, len(x) - micro_batch + 1, micro_batch)
            the last micro-batch is left out: it has fewer samples, and it
            counts.
        """,
    shown=(
        "A sum, divided by the batch's count, needs no weights: what a "
        "micro-batch adds is its share already."
    ),
)


def closed_loop(plan, move, state, look, steps):
    done = 0
    while done < steps:
        for action in plan(state)[: min(look, steps - done)]:
            state = move(state, action)
            done += 1
    return state


def _target(goal: int, look: int, steps: int) -> Case:
    """On a line, with a wind that no plan knows of."""

    def plan(state):
        return [(goal - state) / (k + 2) for k in range(5)]

    def move(state, action):
        return state + action + 1

    return Case(
        f"a goal at {goal}, look = {look}, steps = {steps}",
        lambda: (plan, move, 0, look, steps),
    )


check_closed_loop = Exercise(
    closed_loop,
    cases=[_target(33, 2, 7), _target(16, 1, 6), _target(14, 3, 3)],
    observe=answer,
    mistakes="""
        [: min(look, steps - done)] => [: steps - done]
            every plan is carried out to its end: do the first `look` actions,
            and plan again.
        min(look, steps - done) => look
            too many steps are done: the last plan may have to stop early.
        plan(state)[: min(look, steps - done)] => \
        (plan(state) * steps)[:steps]
            only one plan is made: plan again after `look` actions.
        move(state, action) => move(state, plan(state)[0])
            a new plan is made for every action: look again after `look` of
            them.
        """,
    shown=(
        "What the world does to the gripper between two looks is seen at the "
        "next, so errors do not add up for longer than that."
    ),
)
