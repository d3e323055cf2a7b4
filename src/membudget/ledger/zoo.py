"""Models that the course did not write: the record, and its summary.

``tools/zoo.py`` runs them and writes ``zoo.json``; this module reads it and
needs no other library.
"""

from collections import Counter

from membudget.ledger.peers import read

TOOLS = (
    "PeakTracker",  # finds the profiler's bytes
    "dry run",  # finds the tracker's bytes
    "SavedBytes",  # finds the tracker's activations
    "Checkpointed",  # leaves the same gradients, to the last bit
    "largest_batch",  # names the last size whose real step fits
)
"""What is compared."""

REFUSED = ("values", "kernel")
"""The names that stand for a refusal; the others differ."""


def zoo() -> dict:
    """The record of the zoo.

    Returns:
        ``"versions"`` of the packages that ran; ``"names"``, the reason for
        each difference that has a name; and ``"rows"``, for each model its
        ``"name"``, the tracker's ``"peak"`` in bytes (None where it depends
        on the processor), and for each of :data:`TOOLS` that was tried
        whether it was right, or the name of its difference.
    """
    return read("zoo.json")


def summary() -> list[list[str]]:
    """The table of the page.

    Returns:
        A header, then for each tool the number of cases that it was tried
        on, and in how many it was right, refused to answer, or differed for
        a known reason; the reasons are named.
    """
    rows = zoo()["rows"]
    table = [["tool", "cases", "right", "refused", "differs"]]
    for tool in TOOLS:
        found = Counter(row[tool] for row in rows if tool in row)
        row = [tool, f"{found.total()}", f"{found.pop(True, 0)}"]
        for refused in (True, False):
            names = {
                k: n for k, n in found.items() if (k in REFUSED) is refused
            }
            row.append(", ".join(f"{n} {k}" for k, n in names.items()))
        table.append(row)
    return table


def operators() -> dict:
    """The record of PyTorch's own operators.

    ``tools/operators.py`` runs those of PyTorch's list (``op_db``) that have a
    gradient, forward and backward, in fp32 on a CPU.

    Returns:
        ``"versions"``; ``"names"``, what each name means; ``"tried"``, how
        many operators; and ``"rows"``, for each that is not equal its
        ``"name"``, of the ``"tracker"`` beside the allocator and of the
        ``"dry run"`` beside the tracker one of the names, and ``"off"``: the
        allocator's peak by the tracker's, where they differ most.
    """
    return read("operators.json")


def operator_counts() -> dict[str, int]:
    """Of the tracker: how many operators have each name, the equal first."""
    record = operators()
    found = Counter(row["tracker"] for row in record["rows"])
    found["equal"] = record["tried"] - found.total() + found["equal"]
    return dict(found.most_common())
