"""The game of schedules: the player places the checkpoints."""

from functools import cache
from typing import Any, NamedTuple

import traitlets

from membudget.checkpointing import (
    Run,
    Segments,
    Stage,
    actions,
    least_peak,
    no_segments,
    simulate,
)
from membudget.checkpointing.schedule import flatten, is_list
from membudget.checks import one_of, whole
from membudget.schedules import frontier, peak_of_runs
from membudget.widgets.base import Checked, Widget, later
from membudget.widgets.segments import ROW

LENGTHS = (9, 12, 16, 20, 24, 36)
"""Of the levels whose stages are all alike."""

TIMES = ("time", "recompute_time")

BOSS = later("boss")
LEVELS = (*LENGTHS, BOSS)
BUDGET = 28
"""Of the boss, in units: the input of a block is one."""

_SCORES = 8  # thirds: 2·T/D times the FLOPs of a D × D matrix, T/D = 4/3
_ALIKE = {"holds_output": False, "record_workspace": 1}
_ALIKE |= {"recompute_workspace": -1}
ATTENTION = Stage(
    **{"inner": 5, "forward_workspace": 5, "backward_workspace": 3, **_ALIKE},
    **{"time": 12 + _SCORES, "recompute_time": 9 + _SCORES},
)
MLP = Stage(
    **{"inner": 9, "forward_workspace": 7, "backward_workspace": 7, **_ALIKE},
    **{"time": 24, "recompute_time": 12},
)
"""The halves of GPT-2's first block with fused attention and 1 024 tokens, in
units of its input and thirds of the FLOPs of one D × D matrix, without the few
bytes of the norms: what :func:`membudget.checkpointing.profile` measures."""

ONE_LEVEL = [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10], [11, 12], [13, 14]]
ONE_LEVEL += [[15, 16], [17, 18], [19, 20], [21], [22], 23]
"""The best segments under the budget of the boss that are not nested."""

Points = tuple[tuple[int, int], ...]
"""The best that segments can do: peak and extra time, the least peak first."""


class Medal(NamedTuple):
    """It is won with at most this peak and this time of what runs again."""

    name: str
    peak: int
    extra: int


class Level(NamedTuple):
    """A level of the game: its chain in units, the best, and the medals, of
    which each asks for more than the one before and for nothing less."""

    stages: tuple[Stage, ...]
    frontier: Points
    medals: tuple[Medal, ...]


@cache
def level_of(level: int | str) -> Level:
    """The level of this name, one of :data:`LEVELS`."""
    stages = (ATTENTION, MLP) * 12 if level == BOSS else (Stage(),) * level
    points = tuple((int(p), int(time)) for p, time, _ in frontier(stages))
    medals = _boss(stages, points) if level == BOSS else _pars(level, points)
    return Level(stages, points, medals)


def _pars(length: int, points: Points) -> tuple[Medal, ...]:
    """A peak that falls, with at most 2·L extra runs: equal segments reach
    bronze's, others side by side silver's, and only nested ones the next.
    Platinum is the least peak of all, and the fewest runs that it takes."""
    most, silver = 2 * length, peak_of_runs(length, 2)
    best, fewest = min(point for point in points if point[1] <= most)
    return (
        Medal(later("bronze"), max(least_peak(length), silver + 1), most),
        Medal(later("silver"), silver, most),
        Medal(later("gold"), silver - 1, most),
        Medal(later("platinum"), best, fewest),
    )


def _boss(stages: tuple[Stage, ...], points: Points) -> tuple[Medal, ...]:
    """All under the budget: one and a half forward passes again, one, what
    segments take that are not nested, and the least."""
    forward = sum(stage.time for stage in stages)
    return (
        Medal("bronze", BUDGET, 3 * forward // 2),
        Medal("silver", BUDGET, forward),
        Medal("gold", BUDGET, simulate(stages, ONE_LEVEL).extra_time),
        Medal("platinum", BUDGET, min(t for p, t in points if p <= BUDGET)),
    )


def _row(stage: Stage) -> list[int]:
    """Of numbers; ``simulate`` of ``tape.mjs`` reads it."""
    return [int(getattr(stage, name)) for name in (*ROW, *TIMES)]


def _tables() -> dict[str, dict[str, Any]]:
    """The levels by their names, as the module reads them."""
    return {
        str(name): {
            "stages": [_row(stage) for stage in level.stages],
            "frontier": [list(point) for point in level.frontier],
            "medals": [medal._asdict() for medal in level.medals],
        }
        for name, level in ((name, level_of(name)) for name in LEVELS)
    }


def _level(value: Any, name: str) -> int | str:
    known = one_of(str(value), map(str, LEVELS), name)
    return BOSS if known == BOSS else whole(value, name)


def _plain(segments: Any) -> Any:
    return [_plain(s) if is_list(s) else s for s in segments]


class Schedules(Widget):
    """A chain of stages, whose checkpoints the player places.

    Segments stand in or beside each other, and the tape machine runs all such:
    no output is made again while the old one is kept or on a tape, of which
    PyTorch would hold two.

    Args:
        level: the number of stages, one of :data:`LENGTHS`, all of size 1;
            or ``"boss"``: 24 halves of GPT blocks under a budget of 28 units.
        segments: as :func:`membudget.checkpointing.actions` takes them; by
            default every stage keeps its tape. A level with other stages
            takes them along.
        label: what it is about, in a few words; shown as text.

    Example:
        >>> game = Schedules(9, [[[0, 1, 2], 3, 4], [5, 6], 7, 8])
        >>> game.run().peak, game.run().extra_runs, game.medals()[-1]
        (5, 10, 'platinum')
    """

    name = "schedules"
    positional = ("level", "segments")

    level = Checked(_level, LEVELS[0]).tag(sync=True)
    segments = traitlets.Any().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    tables = traitlets.Dict(read_only=True).tag(sync=True)

    def __init__(
        self,
        level: int | str = LEVELS[0],
        segments: Segments | None = None,
        **traits: Any,
    ) -> None:
        self.set_trait("tables", _tables())
        if segments is not None:
            traits["segments"] = segments
        super().__init__(level=level, **traits)

    @traitlets.default("segments")
    def _no_segments(self) -> list:
        return no_segments(self.length)

    @traitlets.validate("segments")
    def _check_segments(self, proposal: Any) -> list:
        segments = proposal["value"]
        try:
            actions(segments, self.length)
        except (TypeError, ValueError) as error:
            raise traitlets.TraitError(f"segments: {error}") from None
        return _plain(segments)

    @traitlets.observe("level")
    def _follow(self, change: Any) -> None:
        """Segments of other stages go."""
        if len(list(flatten(self.segments))) != self.length:
            self.segments = no_segments(self.length)

    @property
    def length(self) -> int:
        """Stages of the chain."""
        return len(level_of(self.level).stages)

    def run(self) -> Run:
        """What the tape machine makes of the step, in units; its times in
        runs of a stage, or in parts of the boss's."""
        return simulate(level_of(self.level).stages, self.segments)

    def medals(self) -> list[str]:
        """Those that the segments win, from bronze on."""
        run = self.run()
        return [
            medal.name
            for medal in level_of(self.level).medals
            if run.peak <= medal.peak and run.extra_time <= medal.extra
        ]

    def sentence(self) -> str:
        """The peak, the extra runs and the best medal."""
        run, won = self.run(), self.medals()
        best = won[-1] if won else "no medal"
        return (
            f"{self.length} stages: the peak is {run.peak} units with "
            f"{run.extra_runs} extra runs, {best}."
        )
