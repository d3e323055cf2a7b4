"""What the tests have to know of the front page's widget."""

from kind import Kind

from membudget.cards import CARDS
from membudget.widgets import Fits, format_bytes
from membudget.widgets.fits_rows import (
    PARTS,
    SIZES,
    STATES,
    SWITCHES,
    known,
    slowdowns,
)


def controls(widget):
    on = {key: getattr(widget, key) for key in SWITCHES}
    return {"model": widget.model, "card": widget.card, **on}


def fitting(widget):
    """How many combinations the card holds."""
    peaks = [sum(split) for split, _ in known()[widget.model]]
    return sum(peak <= CARDS[widget.card].usable for peak in peaks)


def costs(widget):
    """What each saving changes, the others as they are."""
    times = slowdowns(widget.model, widget.card)
    state = {key: getattr(widget, key) for key in SWITCHES}

    def time(**changes):
        return times[STATES.index(tuple((state | changes).values()))]

    return {
        f"costs.{key}": time(**{key: True}) / time(**{key: False})
        for key in SWITCHES
    }


def printed(widget):
    rows = known()[widget.model]
    now, plain = rows[widget.place][0], rows[0][0]
    return {
        **{f"now.{p}": size for p, size in zip(PARTS, now, strict=True)},
        **{f"plain.{p}": size for p, size in zip(PARTS, plain, strict=True)},
        "peak": widget.peak,
        "budget": widget.budget,
        "fitting": fitting(widget),
        "time": widget.slowdown,
        **costs(widget),
    }


def fewest(widget):
    """Savings of the combinations that fit, and their GPU time: the least."""
    rows = zip(
        STATES,
        known()[widget.model],
        slowdowns(widget.model, widget.card),
        strict=True,
    )
    fits = [
        (sum(state), time)
        for state, (split, _), time in rows
        if sum(split) <= CARDS[widget.card].usable
    ]
    return [min(column) for column in zip(*fits, strict=True)]


def said(widget):
    peak, card = format_bytes(widget.peak), format_bytes(widget.budget)
    count = fitting(widget)
    return [
        f"needs {peak} on a card of {card}.",
        f"{count} of 32" if count else "No combination of these fits",
    ]


ALL = [dict(zip(SWITCHES, state, strict=True)) for state in STATES]

KIND = Kind(
    "fits",
    Fits,
    "Will training Llama 3.2 1B fit the RTX 4090?",
    controls,
    printed,
    said,
    states=[
        *ALL[1:],
        {"card": "T4"},
        *({"model": model, **ALL[0]} for model in SIZES),
        {"card": "H100 80 GB", **ALL[9]},
    ],
    given=[
        {"model": next(iter(SIZES)), "card": "RTX 4090", **ALL[17]},
        {"model": list(SIZES)[-1], "card": "T4"},
        {"cut": True, "half": True},
    ],
    tabs=("cut",),
    rest=None,
    spoken={},
    columns=("at the peak", "now", "plain"),
    parts=5,
    moves=[({}, ALL)],
)


def cases():
    """All states on two cards, and what Python says of each."""
    widget = Fits()
    for widget.model in SIZES:
        for widget.card in ("T4", "RTX 4090", "H100 80 GB"):
            for state in ALL:
                for key, on in state.items():
                    setattr(widget, key, on)
                yield {
                    "state": {**controls(widget), "tables": widget.tables},
                    "numbers": printed(widget),
                    "said": said(widget),
                    "least": fewest(widget),
                }
