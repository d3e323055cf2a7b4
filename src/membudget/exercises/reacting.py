"""The exercises on reacting to memory while a model trains."""

from collections.abc import Callable

from membudget.exercises.compare import Seen
from membudget.exercises.core import Case, Exercise, given
from membudget.exercises.guard import Problem, kind
from membudget.exercises.observe import answer, doubles, found

# A controller


def next_size(size, peak, budget, most):
    if peak > 0.8 * budget:
        size = int(0.8 * size)
    elif peak < 0.6 * budget:
        size = max(int(1.2 * size), size + 1)
    return min(max(size, 1), most)


check_next_size = Exercise(
    next_size,
    cases=[
        given(size=50, peak=900, budget=1000, most=256),
        given(size=50, peak=400, budget=1000, most=256),
        given(size=50, peak=700, budget=1000, most=256),
        given(size=50, peak=650, budget=1000, most=256),
        given(size=50, peak=750, budget=1000, most=256),
        given(size=50, peak=600, budget=1000, most=256),
        given(size=50, peak=800, budget=1000, most=256),
        given(size=3, peak=100, budget=1000, most=256),
        given(size=1, peak=990, budget=1000, most=256),
        given(size=250, peak=200, budget=1000, most=256),
        given(size=17, peak=990, budget=1000, most=256),
        given(size=23, peak=99, budget=1000, most=256),
    ],
    observe=answer,
    mistakes="""
        size = max(int(1.2 * size), size + 1) => size = int(1.2 * size)
            1.2 × 3 is 3.6, and rounded down that is 3 again: let it grow by
            at least one sample.
        int(0.8 * size) => round(0.8 * size)
        or int(1.2 * size) => round(1.2 * size)
            sizes are rounded down here.
        max(size, 1) => size
            it gives micro-batches of no sample: at least one is needed.
        min(max(size, 1), most) => max(size, 1)
            it gives more than `most`.
        > 0.8 => >= 0.8
        or < 0.6 => <= 0.6
            exactly 80 % and exactly 60 % are still in the range: the size
            stays.
        > 0.8 => > 0.7
        or < 0.6 => < 0.7
        > 0.8 => > 0.7
        < 0.6 => < 0.7
            there is no range in which the size stays: it will never come to
            rest. Leave it between 60 % and 80 %.
        int(0.8 * size) => int(1.2 * size)
        max(int(1.2 * size), size + 1) => int(0.8 * size)
            the directions are swapped: a peak that is too high asks for
            smaller micro-batches.
        int(0.8 * size) => size // 2
            it halves, and the rule multiplies by 0.8.
        size = int(0.8 * size) => pass
            it never shrinks.
        size = max(int(1.2 * size), size + 1) => pass
            it never grows.
        """,
    shown=(
        "The size moves in steps of a fifth and rests where the peak is 60 "
        "to 80 % of the budget."
    ),
)

# A monitor that warns before


def hints(readings, budget, window, ahead):
    result = []
    for end in range(1, len(readings) + 1):
        recent = readings[max(end - window, 0) : end]
        growth = (recent[-1] - recent[0]) / max(len(recent) - 1, 1)
        then = recent[-1] + ahead * growth
        result.append("hint" if then > budget else "ok")
    return result


def _readings(*readings: int, window: int = 4, ahead: int = 3) -> Case:
    return given(
        readings=list(readings), budget=1000, window=window, ahead=ahead
    )


WORDS = ["ok", "hint"]


def _words(fn: Callable, args: tuple) -> Seen:
    """The list of words that a function returns."""
    result = found(fn, fn(*args), (list, tuple), "a list")
    if unknown := [word for word in result if word not in WORDS]:
        word = unknown[0]
        shown = f'"{word}"' if isinstance(word, str) else kind(word)
        raise Problem(
            f'the list may hold "ok" or "hint", and this one holds {shown}.'
        )
    codes = [WORDS.index(word) for word in result]
    return Seen(
        {"answer": doubles(codes)},
        said=lambda codes: str([WORDS[int(code)] for code in codes]),
    )


check_hints = Exercise(
    hints,
    cases=[
        _readings(750, 900, 650, 900, 600, 100, 250, 800, 800, 650),
        _readings(500, 540, 580, 620, 660, 700, 740, ahead=8),
        _readings(300, 700, 660, 650, 640, 600, 690, window=3, ahead=5),
        _readings(600, 800, 900, window=2, ahead=1),
        _readings(1200, 1100, 1000, window=2, ahead=1),
        _readings(900, 910, 950, 980, window=10, ahead=1),
    ],
    observe=_words,
    mistakes="""
        then > budget => then >= budget
            exactly the budget still fits: the hint comes above it.
        max(end - window, 0) => 0
            the window does not slide: look at the last `window` readings
            only.
        max(end - window, 0) => end - window
            Python reads an index below 0 from the other end: at the start
            the window is shorter.
        end - window, => end - window - 1,
            the window is one reading too long.
        max(len(recent) - 1, 1) => len(recent)
            from the first of n readings to the last it is n − 1 steps.
        then = recent[-1] + ahead * growth => then = recent[-1]
            this is where the memory is, and the hint is about where it will
            be in `ahead` steps.
        recent[-1] + ahead => recent[-1] + 1
            this looks one step ahead: look `ahead` steps ahead.
        recent[-1] + ahead * growth => recent[0] + ahead * growth
            the line goes on from the last reading, not from the window's
            first.
        ahead * growth => ahead * abs(growth)
            memory that falls is no reason for a hint.
        recent[-1] - recent[0] => max(recent) - min(recent)
            the growth is that from the window's first reading to its last.
        """,
    shown=(
        "A leak is announced before the limit, and a step that needs much "
        "once is forgotten when it leaves the window."
    ),
)

# A cache of gradients


def kept(sizes, priorities, room):
    chosen = []
    for i in sorted(range(len(sizes)), key=lambda i: -priorities[i]):
        if sizes[i] <= room:
            chosen.append(i)
            room -= sizes[i]
    return sorted(chosen)


check_kept = Exercise(
    kept,
    cases=[
        given(
            sizes=[200, 250, 350, 450, 50],
            priorities=[3.0, 1.0, 4.0, 5.0, 7.0],
            room=800,
        ),
        given(sizes=[100, 100, 100], priorities=[1.0, 1.0, 1.0], room=200),
        given(sizes=[8, 4, 8], priorities=[0.1, 0.3, 0.2], room=100),
    ],
    observe=answer,
    mistakes="""
        -priorities[i] => priorities[i]
            the least important come first.
        -priorities[i] => -sizes[i]
        or -priorities[i] => sizes[i]
            these are chosen by size: the priorities decide.
        -priorities[i] => -priorities[i] / sizes[i]
            these are chosen by priority per byte: the priorities alone
            decide.
        sizes[i] <= room => sizes[i] < room
            what fills the room exactly fits.
        room -= sizes[i] =>
            each of them fits alone, and together they do not: take away what
            is full.
        sizes[i] <= room => sizes[i] <= room or (room := -1) > 0
            it stops at the first one that does not fit: a smaller one with a
            lower priority may.
        return sorted(chosen) => return chosen
            sort the indices.
        -priorities[i] => (-priorities[i], -i)
            of equal priorities the earlier tensor comes first.
        """,
    shown="The cache is filled by priority, and never beyond its room.",
)
