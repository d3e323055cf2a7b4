"""Experiments on a vision-language-action policy."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from membudget import tabletop
from membudget.accumulation import Accumulator, partition
from membudget.ledger import account
from membudget.measuring import PeakTracker
from membudget.planning import largest_micro_batch
from membudget.policy import Policy, loss, planner
from membudget.tabletop import (
    REACH,
    SEEN,
    SIDE,
    UNSEEN,
    Scenes,
    rollout,
    scenes,
)
from membudget_experiments.definition import experiment
from membudget_experiments.sizes import VLA_POLICY

Plans = Callable[[Scenes], torch.Tensor]
PIECES = 20
"""Of a curve of losses."""


@experiment(
    sizes=VLA_POLICY,
    units={
        "run": "how the policy came about",
        "peak": "bytes of a step that finds optimizer states; or none",
        "losses": "mean error of an action, each over a twentieth of the "
        "steps",
        "new": "episodes solved, of new scenes with pairs from training",
        "unseen": "episodes solved, of pairs that training did not have",
        "actions": "pixels along x and y, and 1 to close; step by step, of "
        "the first episodes with new scenes",
    },
    over="runs",
)
def vla_policy(
    device: torch.device,
    *,
    shape: dict,
    batch: int,
    limit: int,
    steps: int,
    rate: float,
    episodes: int,
    neighbours: int,
    replayed: int,
    runs: list[str],
    warm_up: int,
    repeats: int,
) -> Iterator[dict]:
    """A policy trained on the whole batch, and under a limit; and two others.

    ``whole`` runs each batch at once. ``accumulated`` checkpoints every block
    and takes the largest micro-batch that the limit leaves room for
    (:func:`membudget.planning.largest_micro_batch`). Both begin with the same
    weights and see the same examples. ``random`` draws its actions;
    ``nearest neighbour`` does what the expert did in the most similar of so
    many examples. All act in the same scenes in closed loop. Predicted are
    the peaks of the first two (:func:`membudget.ledger.account`).
    """
    examples = [t.to(device) for t in tabletop.examples(batch, _seeded(1))]
    model, optimizer = _made("accumulated", shape, rate, device)
    micro_batch = largest_micro_batch(
        model, loss, *examples, budget=limit, optimizer=optimizer
    )
    sizes = {"whole": batch, "accumulated": micro_batch}
    rows = []
    for run in runs:
        peak, size = None, sizes.get(run)
        if size:
            model, optimizer = _made(run, shape, rate, device)
            given = {"optimizer": optimizer, "micro_batch": size}
            peak = account(model, loss, *examples, **given).peak
        rows.append({"run": run, "peak": peak, "micro_batch": size})
    yield {"limit": limit, "rows": rows}
    for run in runs:
        peak, losses = None, None
        if run in sizes:
            made, size = _made(run, shape, rate, device), sizes[run]
            peak = _peak(*made, examples, size)
            made = _made(run, shape, rate, device)
            losses = _train(*made, batch, size, steps)
            plan = planner(made[0])
        elif run == "random":
            plan = _at_random(_seeded(3))
        else:
            plan = _nearest_neighbour(neighbours, _seeded(1))
        seen, unseen = (
            rollout(scenes(episodes, _seeded(2), pairs), plan)
            for pairs in (SEEN, UNSEEN)
        )
        yield {
            "run": run,
            "peak": peak,
            "losses": losses,
            "new": int(seen[-1].solved.sum()),
            "unseen": int(unseen[-1].solved.sum()),
            "actions": _actions(seen, replayed),
        }


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _made(run: str, shape: dict, rate: float, device: torch.device) -> tuple:
    """A run's model and its optimizer."""
    torch.manual_seed(0)
    model = Policy(**shape).to(device)
    if run == "accumulated":
        model.checkpointed = len(model.blocks)
    parameters = model.parameters()
    return model, torch.optim.AdamW(parameters, lr=rate, foreach=False)


def _step(accumulator: Accumulator, examples: list, micro_batch: int) -> float:
    """A step in micro-batches; the loss of the whole batch."""
    with accumulator.window() as window:
        for part in partition(len(examples[0]), micro_batch):
            here = [t[part] for t in examples]
            window.backward(loss(accumulator.model, *here), here[4].sum())
            del here
        return window.step().loss


def _peak(model, optimizer, examples: list, micro_batch: int) -> int:
    """The most bytes alive in a step whose optimizer has its states."""
    accumulator = Accumulator(model, optimizer)
    _step(accumulator, examples, micro_batch)
    with PeakTracker(model, optimizer, *examples) as tracker:
        _step(accumulator, examples, micro_batch)
    return tracker.peak


def _train(
    model, optimizer, batch: int, micro_batch: int, steps: int
) -> list[float]:
    """Train on new examples in each step.

    Returns:
        The mean loss over each of :data:`PIECES` equal parts of the steps.
        The learning rate rises for one of them, and falls to 0.
    """
    device = next(model.parameters()).device
    generator = _seeded(1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda n: min(1, 20 * (n + 1) / steps) * (1 - n / steps),
    )
    accumulator, losses = Accumulator(model, optimizer), []
    for _ in range(steps):
        examples = tabletop.examples(batch, generator)
        examples = [t.to(device) for t in examples]
        losses.append(_step(accumulator, examples, micro_batch))
        schedule.step()
    pieces = torch.tensor(losses).view(PIECES, -1)
    return pieces.mean(1).tolist()


def _actions(seen: list[Scenes], count: int) -> list[int]:
    """What moved the first ``count`` of the episodes: the gripper's way."""
    ways = torch.stack([now.gripper[:count] for now in seen])
    closed = torch.stack([now.closed[:count] for now in seen[1:]])
    return (
        torch.cat([ways.diff(dim=0), closed[..., None]], 2).flatten().tolist()
    )


def _at_random(generator: torch.Generator) -> Plans:
    """A policy that draws each action."""

    def plan(now: Scenes) -> torch.Tensor:
        count = len(now)
        moves = torch.randint(
            -REACH, REACH + 1, (count, 2, 2), generator=generator
        )
        close = torch.randint(2, (count, 2, 1), generator=generator)
        return torch.cat([moves, close], 2)

    return plan


def _nearest_neighbour(count: int, generator: torch.Generator) -> Plans:
    """A policy that does what the expert did in the most similar example.

    Pictures, words and senses count alike: each distance is in units of the
    mean between two examples.
    """
    kept = tabletop.examples(count, generator)
    memory = _features(*kept[:3])
    units = [torch.cdist(part, part).square().mean() for part in memory]
    half = torch.tensor([SIDE // 2, SIDE // 2, 1])
    places = (kept[3] * half).long()

    def plan(now: Scenes) -> torch.Tensor:
        seen = tabletop.render(now), now.words, tabletop.senses(now)
        away = sum(
            torch.cdist(here, there).square() / unit
            for here, there, unit in zip(
                _features(*seen), memory, units, strict=True
            )
        )
        found = places[away.argmin(1)]
        moves = found[..., :2].diff(
            dim=1, prepend=torch.zeros(len(now), 1, 2, dtype=torch.int64)
        )
        return torch.cat([moves, found[..., 2:]], 2)

    return plan


def _features(pictures, words, senses) -> tuple[torch.Tensor, ...]:
    """Half as many pixels a side, which words there are, and the senses."""
    small = F.avg_pool2d(pictures.float(), 2).flatten(1)
    spoken = F.one_hot(words, len(tabletop.VOCABULARY)).amax(1)[:, 1:]
    return small, spoken.float(), senses
