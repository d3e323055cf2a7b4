"""The exercises on measuring memory."""

import gc
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean

import torch
import torch.nn.functional as F
from torch import nn

from membudget.exercises import loops_old as loops
from membudget.exercises.core_old import Case, Exercise, variants
from membudget.exercises.loops_old import Window
from membudget.exercises.observe import (
    answer,
    collection,
    table,
    training,
    words,
)
from membudget.measuring import (
    CATEGORIES,
    Allocation,
    Operator,
    round_size,
    trace_step,
)

# A leak in a loop


def _loop(momentum: float, *sizes: int) -> Case:
    def make() -> tuple:
        model = loops.small_model()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.1, momentum=momentum
        )
        return model, optimizer, loops.samples(*sizes)

    return Case(f"batches of {list(sizes)} samples, {momentum = }", make)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Window,
    loss: Callable[..., torch.Tensor] = F.cross_entropy,
    share: Callable[[int], float] = lambda steps: 1,
    each: str = "step wipe",
    end: str = "",
    late: bool = False,
    told: Callable[[list[float]], object] = list,
) -> object:
    """Train.

    Args:
        model: its parameters change.
        optimizer: of the model.
        batches: pairs of inputs and labels.
        loss: of the outputs and the labels.
        share: what a loss is multiplied by, from the number of batches.
        each: actions after every backward pass.
        end: actions after the last one.
        late: whether the losses are those after the step.
        told: what is returned, from the losses.
    """
    actions = {"step": optimizer.step, "wipe": optimizer.zero_grad}
    losses = []
    for x, y in batches:
        value = loss(model(x), y)
        (value * share(len(batches))).backward()
        for name in each.split():
            actions[name]()
        losses.append((loss(model(x), y) if late else value).item())
    for name in end.split():
        actions[name]()
    return told(losses)


def _running(losses: Sequence[float]) -> list[float]:
    return [mean(losses[: k + 1]) for k in range(len(losses))]


STILL = (
    "the parameters have not moved: each batch needs `loss.backward()`, "
    "`optimizer.step()` and `optimizer.zero_grad()`, in this order."
)

check_train = Exercise(
    signature="train(model, optimizer, batches)",
    cases=[_loop(0.9, 8, 8, 8, 8, 8), _loop(0, 5, 2, 1)],
    observe=training,
    solution=_train,
    mistakes=[
        (
            "these are running means: return the loss of each batch.",
            partial(_train, told=_running),
        ),
        (
            "this is the mean of the losses: return the list of them.",
            partial(_train, told=mean),
        ),
        (
            "this is the sum of the losses: return the list of them.",
            partial(_train, told=sum),
        ),
        *variants(
            _train,
            [
                (
                    "the gradients are never set to None, so each step "
                    "adds to those of all batches before: call "
                    "`optimizer.zero_grad()` after each step.",
                    {"each": "step"},
                ),
                (STILL, {"each": "wipe"}),
                (STILL, {"each": "wipe step"}),
                (
                    "the parameters move once, after the last batch: the "
                    "optimizer steps on every batch.",
                    {"each": "", "end": "step wipe"},
                ),
                (
                    "the losses are those after the step: return the ones "
                    "that `backward()` was called on.",
                    {"late": True},
                ),
                (
                    "the losses are summed over the samples: "
                    "`F.cross_entropy(model(x), y)` is their mean.",
                    {
                        "loss": lambda outputs, y: F.cross_entropy(
                            outputs, y, reduction="sum"
                        )
                    },
                ),
                (
                    "the losses are divided by the number of batches "
                    "before the backward pass: each batch is a step of its "
                    "own.",
                    {"share": lambda steps: 1 / steps},
                ),
            ],
        ),
    ],
    shown=(
        "No step's activations outlive it, and at the end nothing is left "
        "but the parameters, the data and the optimizer's states."
    ),
)


# The peak of a step


def _setting(batch: int, width: int, depth: int) -> Case:
    told = f"{batch = }, {width = }, {depth = }"
    return Case(told, lambda: (batch, width, depth))


def _tracked(batch: int, width: int, depth: int) -> int:
    """The peak as the tracker counts it, of tensors without data."""
    with torch.device("meta"):
        layers = [(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        model = nn.Sequential(*[layer for pair in layers for layer in pair])
        x = torch.empty(batch, width)
    return trace_step(model, lambda model, x: model(x).sum(), x).peak


def _peak(
    batch: int,
    width: int,
    depth: int,
    number: int = 4,
    bias: int = 1,
    parameters: int = 1,
    gradients: int = 1,
    inputs: int = 1,
    saved: int = 1,
    flowing: int = 2,
    to_data: int = 0,
    layers: Callable[[int], Sequence[int]] = lambda depth: range(1, depth + 1),
) -> int:
    """The peak by formula.

    Args:
        batch: samples.
        width: of every layer.
        depth: layers.
        number: bytes of a number.
        bias: whether a layer has one.
        parameters: how often they count.
        gradients: how often the parameters' gradients count.
        inputs: whether the input counts.
        saved: activations that each layer keeps.
        flowing: tensors on their way back, at a layer after the first.
        to_data: whether the first layer computes the gradient of its input.
        layers: those in whose backward pass the peak is looked for.
    """
    activation = number * batch * width
    layer = number * width * (width + bias)

    def alive(k: int) -> int:
        way = min(flowing, 1 + (k > 1 or to_data))
        held = inputs + saved * (k - 1) + way
        return held * activation + gradients * (depth - k + 1) * layer

    return parameters * depth * layer + max(map(alive, layers(depth)))


FLOWING = (
    "the gradient on its way back is missing: while a Linear layer's "
    "backward runs, the gradient of its output and, except in the first "
    "layer, that of its input take batch × width numbers each."
)
SECOND = (
    "the peak of this step is in the second layer's backward pass: the "
    "gradients of its output and of its input are both there, batch × width "
    "numbers each. The first layer makes none of its input."
)
FORWARD_ONLY = (
    "this is what is alive in the forward pass: in the backward pass the "
    "gradients come on top, and each layer's activations go only after its "
    "gradients are there."
)
TOGETHER = (
    "all activations and all gradients are added up, and they are never "
    "alive at once: the backward pass frees a layer's activations as it "
    "makes its gradients."
)
PRE_RELU = (
    "two activations of each layer are counted: ReLU saves its output, which "
    "is the input that the next Linear layer saves; the output of a Linear "
    "layer is freed."
)


SETTING_S = (
    "these are the activations and the gradient on its way back alone, as in "
    "section 1.3. Here the parameters, the input and the parameters' "
    "gradients count as well."
)


def _layer(batch: int, width: int) -> tuple[int, int]:
    """Bytes of an activation, and of a layer's parameters."""
    return 4 * batch * width, 4 * width * (width + 1)


def _sum(more: int) -> Callable[[int, int, int], int]:
    """Everything at once, with some tensors on their way back."""

    def everything(batch: int, width: int, depth: int) -> int:
        activation, layer = _layer(batch, width)
        return (depth + 1 + more) * activation + 2 * depth * layer

    return everything


def _forward(each: int, more: int) -> Callable[[int, int, int], int]:
    """The forward pass, if each layer kept so many activations."""

    def forward(batch: int, width: int, depth: int) -> int:
        activation, layer = _layer(batch, width)
        return (each * depth + more) * activation + depth * layer

    return forward


check_predict_peak = Exercise(
    signature="predict_peak(batch, width, depth)",
    cases=[
        _setting(56, 96, 3),
        _setting(512, 32, 6),
        _setting(12, 48, 3),
        _setting(256, 256, 2),
    ],
    observe=answer,
    solution=_tracked,
    mistakes=[
        (FORWARD_ONLY, _forward(1, 0)),
        (FORWARD_ONLY, _forward(1, 1)),
        (
            SETTING_S,
            lambda batch, width, depth: 4 * batch * width * (depth + 1),
        ),
        (PRE_RELU, _forward(2, 0)),
        (PRE_RELU, _forward(2, 1)),
        *[(TOGETHER, _sum(more)) for more in range(3)],
        *variants(
            _peak,
            [
                (
                    "these are numbers, not bytes: in fp32 each takes 4.",
                    {"number": 1},
                ),
                (
                    "these are bits: a number of fp32 takes 4 bytes.",
                    {"number": 32},
                ),
                (
                    "a number takes 8 bytes here; in fp32 it takes 4.",
                    {"number": 8},
                ),
                (
                    "the parameters are missing: they are alive all the time.",
                    {"parameters": 0},
                ),
                (FORWARD_ONLY, {"gradients": 0}),
                (
                    "only the last layer's backward pass is looked at. It "
                    "has the most activations, but the first layers' has "
                    "more gradients, and they win where the batch is small "
                    "against the width.",
                    {"layers": lambda depth: [depth]},
                ),
                (SECOND, {"layers": lambda depth: [1]}),
                (SECOND, {"layers": lambda depth: [1, depth]}),
                (SECOND, {"flowing": 1}),
                (
                    "only the first layers' backward pass is looked at. It "
                    "has the most gradients, but the last layer's has more "
                    "activations, and they win where the batch is large "
                    "against the width.",
                    {"layers": lambda depth: [1, 2]},
                ),
                (
                    "the first layer's backward pass is left out. When it "
                    "ends all gradients are there, and that is the most "
                    "where the batch is small against the width.",
                    {"layers": lambda depth: range(2, depth + 1)},
                ),
                (
                    "the first layer makes no gradient of its input: the "
                    "data need none.",
                    {"to_data": 1},
                ),
                (FLOWING, {"flowing": 0}),
                (
                    "the input is missing: the first layer saves it, and it "
                    "is alive all the time.",
                    {"inputs": 0},
                ),
                (PRE_RELU, {"saved": 2}),
                (
                    "the bias is missing, and its gradient: `width` numbers "
                    "each in every layer.",
                    {"bias": 0},
                ),
            ],
        ),
    ],
    shown=(
        "That is what the tracker counts, within 1 %, whether the "
        "activations or the gradients decide where the peak is."
    ),
    tolerance=0.01,
)


# What is alive at the peak

Row = tuple[int, int, int | None, str]


def _allocations(*rows: Row) -> Case:
    def make() -> tuple:
        made = Operator("aten.made", "", "forward")
        return (
            [
                Allocation(size, birth, category, made, death)
                for size, birth, death, category in rows
            ],
        )

    told = "; ".join(
        f"{category} {size} ({birth}, {death})"
        for size, birth, death, category in rows
    )
    return Case(f"category, bytes and (birth, death): {told}", make)


def _step() -> tuple:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        x = torch.empty(16, 8)
    optimizer = torch.optim.Adam(model.parameters())
    tracker = trace_step(
        model, lambda model, x: model(x).sum(), x, optimizer=optimizer
    )
    return (tracker.allocations,)


def _alive(a: Allocation, moment: int) -> bool:
    return a.alive(moment)


def _split(
    allocations: Sequence[Allocation],
    alive: Callable[[Allocation, int], bool] = _alive,
    pick: Callable[..., int] = max,
    counts: Callable[[Allocation], int] = lambda a: a.bytes,
    shift: int = 0,
) -> dict[str, int]:
    """Bytes of each category at a moment.

    Args:
        allocations: those that may be alive.
        alive: whether one is alive at a moment.
        pick: chooses among moments, called as ``max`` is.
        counts: what one adds.
        shift: moments between the one that is picked and the one returned.
    """

    def total(moment: int) -> int:
        return sum(a.bytes for a in allocations if alive(a, moment))

    ends = [a.death for a in allocations if a.death is not None]
    last = max([a.birth for a in allocations] + ends)
    moment = pick(range(-1, last + 1), key=total) + shift
    split: Counter[str] = Counter()
    for a in allocations:
        if alive(a, moment):
            split[a.category] += counts(a)
    return dict(split)


def _latest(moments: Sequence[int], key: Callable[[int], int]) -> int:
    return max(reversed(moments), key=key)


def _each_peak(allocations: Sequence[Allocation]) -> dict[str, int]:
    split = {}
    for category in CATEGORIES:
        mine = [a for a in allocations if a.category == category]
        split |= _split(mine) if mine else {}
    return split


DEATH = (
    "a tensor is still counted at the moment of its death, and then it is "
    "gone: it is alive if `birth <= moment` and (`death is None` or `moment "
    "< death`)."
)
BEFORE = (
    "what was there from the start is missing: a birth of -1 lies before "
    "the first operator, and `birth <= moment` holds."
)

check_alive_at_peak = Exercise(
    signature="alive_at_peak(allocations)",
    cases=[
        _allocations(
            (400, -1, None, "parameters"),
            (100, -1, None, "inputs"),
            (300, 0, 5, "activations"),
            (200, 1, 4, "activations"),
            (250, 2, 3, "temporaries"),
            (350, 3, None, "gradients"),
            (150, 4, 6, "temporaries"),
            (200, 5, None, "gradients"),
            (70, 6, None, "optimizer"),
        ),
        _allocations(
            (100, -1, 3, "parameters"),
            (200, 0, 1, "activations"),
            (50, 1, None, "gradients"),
            (150, 2, None, "temporaries"),
        ),
        _allocations(
            (500, -1, 0, "inputs"),
            (50, -1, None, "parameters"),
            (300, 0, 2, "activations"),
            (100, 1, None, "gradients"),
        ),
        Case("a step of a small model with Adam", _step),
    ],
    observe=table("number of bytes of {}", CATEGORIES),
    solution=_split,
    mistakes=[
        (
            "this is the peak of each category by itself; they come at "
            "different moments, and one moment is asked: the one with the "
            "most bytes in all.",
            _each_peak,
        ),
        *variants(
            _split,
            [
                (
                    "everything that was ever made is counted. Alive is what "
                    "has `birth <= moment` and (`death is None` or `moment < "
                    "death`).",
                    {"alive": lambda a, moment: True},
                ),
                (
                    DEATH,
                    {
                        "alive": lambda a, moment: (
                            a.birth <= moment
                            and (a.death is None or moment <= a.death)
                        )
                    },
                ),
                (
                    "what is alive at the end (`death is None`) is left "
                    "out, and it is alive at the peak as well, if it was "
                    "born by then.",
                    {
                        "alive": lambda a, moment: (
                            a.death is not None and a.alive(moment)
                        )
                    },
                ),
                (
                    BEFORE,
                    {
                        "alive": lambda a, moment: (
                            a.birth > -1 and a.alive(moment)
                        )
                    },
                ),
                (
                    "this is the moment before: a tensor is alive from the "
                    "moment `birth` on.",
                    {
                        "alive": lambda a, moment: (
                            a.birth < moment
                            and (a.death is None or moment < a.death)
                        )
                    },
                ),
                (
                    "this is what is alive at the end (`death is None`), "
                    "not at the peak.",
                    {"pick": lambda moments, key: moments[-1]},
                ),
                (
                    "this is the moment before the first operator (-1), "
                    "not the peak.",
                    {"pick": lambda moments, key: moments[0]},
                ),
                (
                    "two moments have the most bytes alive, and the first "
                    "of them is asked.",
                    {"pick": _latest},
                ),
                (
                    "the moments before the first operator are left out: "
                    "what is alive at -1 can be the peak.",
                    {"pick": lambda moments, key: max(moments[1:], key=key)},
                ),
                (
                    "these are numbers of tensors: add up their `bytes`.",
                    {"counts": lambda a: 1},
                ),
                (
                    "this is one moment late: what is alive *at* the peak "
                    "is asked.",
                    {"shift": 1},
                ),
                (
                    "this is one moment early: what is alive *at* the peak "
                    "is asked.",
                    {"shift": -1},
                ),
            ],
        ),
    ],
    shown=(
        "One moment, with everything that is alive then: the categories' own "
        "peaks come at others."
    ),
)


# A monitor

STATUSES = ("normal", "warning", "critical")


def _readings(budget: int, window: int, *readings: int) -> Case:
    told = f"readings = {list(readings)}, budget = {budget}, window = {window}"
    return Case(told, lambda: (list(readings), budget, window))


def _judged(
    value: float,
    budget: float,
    reached: Callable[[float, float], bool] = operator.ge,
    warning: float = 0.8,
    critical: float = 0.9,
) -> str:
    if reached(value, critical * budget):
        return "critical"
    return "warning" if reached(value, warning * budget) else "normal"


def _statuses(
    readings: Sequence[int],
    budget: int,
    window: int,
    figure: Callable[[Sequence[int]], float] = max,
    more: int = 0,
    shift: int = 0,
    full: Callable[[list[str], int], list[str]] = lambda statuses, n: statuses,
    judged: Callable[[float, float], str] = _judged,
) -> list[str]:
    """A status for each reading.

    Args:
        readings: bytes.
        budget: bytes.
        window: readings that count.
        figure: of the readings in a window.
        more: readings in a window above ``window``.
        shift: readings by which the windows end too early.
        full: changes the statuses, from the length of a window.
        judged: the status of a figure.
    """
    statuses = []
    for end in range(1 - shift, len(readings) + 1 - shift):
        seen = readings[max(end - window - more, 0) : max(end, 0)]
        statuses.append(judged(figure(seen) if seen else 0, budget))
    return full(statuses, window)


def _wait(statuses: list[str], window: int) -> list[str]:
    early = min(window - 1, len(statuses))
    return ["normal"] * early + statuses[early:]


def _changed(**change: object) -> dict:
    return {"judged": lambda value, budget: _judged(value, budget, **change)}


EXACTLY = (
    "exactly 80 % is a warning and exactly 90 % is critical: `>=`, not `>`."
)
EARLY = (
    "the first readings are too few for a whole window and get no status: "
    "judge by those that are there."
)

check_statuses = Exercise(
    signature="statuses(readings, budget, window)",
    cases=[
        _readings(1000, 3, 800, 950, 700, 500, 300, 200, 100, 850),
        _readings(250, 2, 100, 225, 200, 199, 0, 260),
        _readings(100, 1, 95, 85, 10),
        _readings(100, 5, 50, 92, 10),
    ],
    observe=words(STATUSES),
    solution=_statuses,
    mistakes=variants(
        _statuses,
        [
            (
                "only the present reading is judged: take the largest of "
                "the last `window`.",
                {"figure": lambda seen: seen[-1]},
            ),
            (
                "the mean of the window is judged, in which a short peak "
                "goes under: take the largest.",
                {"figure": mean},
            ),
            (
                "the smallest of the window is judged: take the largest.",
                {"figure": min},
            ),
            (
                "the sum of the window is judged: take the largest.",
                {"figure": sum},
            ),
            (
                "the window is one reading too long: the present one is "
                "among the last `window`.",
                {"more": 1},
            ),
            (
                "the window is one reading too short: it holds `window` "
                "readings with the present one.",
                {"more": -1},
            ),
            (
                "the window does not slide: readings before the last "
                "`window` are still judged.",
                {"more": 10**6},
            ),
            (
                "the window ends before the present reading: that one is "
                "judged as well.",
                {"shift": 1},
            ),
            (
                "the window is not full at first, and the readings that are "
                "there are ignored: judge by those.",
                {"full": _wait},
            ),
            (EARLY, {"full": lambda statuses, n: statuses[n - 1 :]}),
            (EXACTLY, _changed(reached=operator.gt)),
            (EXACTLY, _changed(critical=0.901)),
            (
                "nothing is ever critical: ask for 90 % before 80 %, which "
                "is reached whenever 90 % is.",
                _changed(critical=float("inf")),
            ),
            (
                "there is never a warning: it begins at 80 % of the budget.",
                _changed(warning=float("inf")),
            ),
            (
                "this is critical from 80 % on: up to 90 % it is a warning.",
                _changed(critical=0.8),
            ),
        ],
    ),
    shown=(
        "A peak counts for a whole window, so a monitor that is looked at "
        "between two steps does not miss it."
    ),
)


# A collector


class _Memory:
    """Tensors that a list holds, and tensors that only hold each other.

    Args:
        held: bytes of the former.
        garbage: bytes of the latter; they sit in two reference cycles.
    """

    def __init__(self, held: int, garbage: int) -> None:
        self.sizes = held, garbage
        self._held: list[torch.Tensor] = []
        self._all: list[weakref.ref[torch.Tensor]] = []

    def fill(self) -> None:
        held, garbage = self.sizes
        self._held.append(self._tensor(held))
        for size in (garbage // 2, garbage - garbage // 2):
            if size:
                cycle: list[object] = [self._tensor(size)]
                cycle.append(cycle)

    def used(self) -> int:
        """Bytes of the tensors that are alive."""
        alive = [ref() for ref in self._all]
        return sum(t.nbytes for t in alive if t is not None)

    def _tensor(self, size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        self._all.append(weakref.ref(tensor))
        return tensor


def _filled(held: int, garbage: int, budget: int, threshold: float) -> Case:
    told = (
        f"{held} bytes in tensors that a list holds, {garbage} in reference "
        f"cycles, {budget = }, {threshold = }"
    )
    return Case(told, lambda: (_Memory(held, garbage), budget, threshold))


def _collect(
    used: Callable[[], int],
    budget: int,
    threshold: float,
    reached: Callable[[float, float], bool] = operator.ge,
    level: Callable[[int, float], float] = operator.mul,
    collect: Callable[[], int] = gc.collect,
    told: Callable[[int, int, int], int] = lambda before, after, n: (
        before - after
    ),
) -> int:
    """Collect garbage.

    Args:
        used: bytes in use.
        budget: bytes.
        threshold: share of the budget.
        reached: whether the first number is high enough for the second.
        level: to reach, from budget and threshold.
        collect: collects.
        told: what is returned, from the bytes before and after and the
            number of objects.
    """
    before = used()
    if not reached(before, level(budget, threshold)):
        return 0
    objects = collect()
    return told(before, used(), objects)


check_collect_above = Exercise(
    signature="collect_above(used, budget, threshold)",
    cases=[
        _filled(400, 600, 1000, 0.8),
        _filled(900, 0, 1000, 0.8),
        _filled(100, 600, 1000, 0.8),
        _filled(500, 250, 1000, 0.75),
    ],
    observe=collection,
    solution=_collect,
    mistakes=variants(
        _collect,
        [
            (
                "it collects below the threshold as well, and a collection "
                "takes time: compare `used()` with threshold × budget first.",
                {"level": lambda budget, threshold: 0},
            ),
            (
                "exactly threshold × budget is enough to collect: `>=`, not "
                "`>`.",
                {"reached": operator.gt},
            ),
            (
                "it waits for the whole budget: collect from threshold × "
                "budget on.",
                {"level": lambda budget, threshold: budget},
            ),
            (
                "nothing was collected, though `used()` is above threshold × "
                "budget: call `gc.collect()`. To delete variables of your "
                "own frees nothing here, because the objects in a cycle hold "
                "each other.",
                {"collect": lambda: 0},
            ),
            (
                "these are the bytes in use before the collection: return "
                "how many fewer there are after it.",
                {"told": lambda before, after, objects: before},
            ),
            (
                "these are the bytes still in use after the collection: "
                "return how many fewer they are than before.",
                {"told": lambda before, after, objects: after},
            ),
            (
                "`gc.collect()` returns a number of objects: measure the "
                "bytes with `used()` before and after it.",
                {"told": lambda before, after, objects: objects},
            ),
            (
                "the sign is wrong: bytes before minus bytes after.",
                {"told": lambda before, after, objects: after - before},
            ),
            (
                "it collects and returns 0: return the bytes that were "
                "freed, so measure with `used()` before and after.",
                {"told": lambda before, after, objects: 0},
            ),
        ],
    ),
    shown=(
        "It freed the tensors that only a reference cycle kept, 600 bytes of "
        "1000, and none of the 900 bytes of tensors that a list still holds: "
        "no collector can, until the last reference goes."
    ),
)


# Rounding


def _requests(*sizes: int) -> Case:
    return Case(f"sizes = {list(sizes)}", lambda: (list(sizes),))


def _allocated(
    sizes: Sequence[int],
    block: Callable[[int], int] = round_size,
    empty: int = 0,
    told: Callable[[list[int]], object] = sum,
) -> object:
    return told([block(size) if size else empty for size in sizes])


check_allocated = Exercise(
    signature="allocated(sizes)",
    cases=[
        _requests(200, 200, 512, 513, 2400, 4096, 5000, 0),
        _requests(4, 4, 4, 4),
        _requests(1024, 512),
    ],
    observe=answer,
    solution=_allocated,
    mistakes=[
        (
            "the sum is rounded, and so a block is shared between tensors: "
            "every tensor is rounded by itself.",
            lambda sizes: round_size(sum(sizes)),
        ),
        *variants(
            _allocated,
            [
                (
                    "these are the bytes that are asked for: round each of "
                    "them up to a multiple of 512.",
                    {"block": lambda size: size},
                ),
                (
                    "the sizes are rounded down: 200 bytes take a whole block "
                    "of 512.",
                    {"block": lambda size: size // 512 * 512},
                ),
                (
                    "the sizes are rounded to the nearest multiple, and must "
                    "be rounded up.",
                    {"block": lambda size: round(size / 512) * 512},
                ),
                (
                    "an exact multiple of 512 is rounded to the next one: it "
                    "fits as it is.",
                    {"block": lambda size: size // 512 * 512 + 512},
                ),
                (
                    "512 bytes are added to each size: round up instead.",
                    {"block": lambda size: size + 512},
                ),
                (
                    "these are numbers of blocks: each has 512 bytes.",
                    {"block": lambda size: round_size(size) // 512},
                ),
                (
                    "every tensor takes one block of 512 here, even a large "
                    "one: round up to a multiple.",
                    {"block": lambda size: 512},
                ),
                (
                    "this is what rounding adds: what is allocated in all is "
                    "asked.",
                    {"block": lambda size: round_size(size) - size},
                ),
                (
                    "the sizes are rounded up to powers of two: multiples of "
                    "512 are enough.",
                    {"block": lambda n: max(512, 1 << (n - 1).bit_length())},
                ),
                (
                    "a tensor of 0 bytes takes nothing.",
                    {"empty": 512},
                ),
                (
                    "this is a list of all blocks: return their sum.",
                    {"told": list},
                ),
            ],
        ),
    ],
    shown=(
        "Four tensors of one number each take 2048 bytes: many small tensors "
        "cost more than they hold."
    ),
)
