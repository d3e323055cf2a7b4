"""Other calculators on the same steps: the record, and its table.

``tools/peers.py`` runs them in an environment of their own and writes
``peers.json``, ``tools/published.py`` predicts runs that others measured and
writes ``published.json``; this module reads both and needs no other package.
"""

import json
from importlib.resources import files

from membudget.checks import one_of

TRUTHS = ("course", "transformers", "transformers_mask")
"""What a step's bytes are compared with.

``"course"`` is the course's model of the shape, the others the model of the
library transformers: called with tokens and labels, and also with an
attention mask of ones, as a data collator hands one over.
"""

CALCULATORS = (
    "membudget",
    "accelerate",
    "vramcalc",
    "eleutherai",
    "llm_analysis",
)
"""The columns."""

NAMES = {"eleutherai": "EleutherAI", "llm_analysis": "llm-analysis"}


def peers() -> dict:
    """The record of the comparison.

    Returns:
        ``"versions"`` of the packages that ran; ``"truths"``, what each
        truth is; ``"peers"``, what each calculator is and leaves out;
        ``"why"``, for each family and part of a model, why the library's
        needs other bytes than the course's; ``"adam_8bit"``, bytes of the
        states of bitsandbytes' AdamW8bit beside ours; and ``"rows"``, for
        each step its shape and settings, the bytes of each of
        :data:`TRUTHS` (of the library's model also those ``"beyond"`` the
        course's at the peak, by part), and of each of :data:`CALCULATORS`
        its settings, ``"total"`` and ``"parts"`` in bytes, or why it
        ``"cannot"`` express the step.
    """
    return read("peers.json")


def published() -> dict:
    """Runs on a GPU that others measured and published, and our prediction.

    Returns:
        ``"source"``, ``"device"``, ``"measured_on"``, ``"measured_with"``
        (versions) and ``"loop"`` of the measurements; ``"versions"`` of the
        packages that predict; ``"models"``, the shapes; and ``"runs"``, each
        with its settings and bytes: ``"measured"``, ``"vramcalc"`` (its
        estimate), and of ``"account"`` what is ``"requested"`` and
        ``"allocated"`` at the peak and what is allocated in the ``"plain"``
        account, which is not told what the loop keeps; None in inference.
    """
    return read("published.json")


def read(name: str) -> dict:
    """One of the room's records."""
    return json.loads((files("membudget.ledger") / name).read_text("utf-8"))


def comparison(truth: str = "course") -> list[list[str]]:
    """The table of the page: signed errors of the calculators.

    Args:
        truth: one of :data:`TRUTHS`.

    Returns:
        A header, then for each row of the record its name, the truth in GiB
        and each calculator's error in percent of it; ``"–"`` where a
        calculator cannot express the step.
    """
    one_of(truth, TRUTHS, "truth")
    table = [["step", "GiB", *(NAMES.get(c, c) for c in CALCULATORS)]]
    for row in peers()["rows"]:
        peak = row["truths"][truth]["peak"]
        line = [row["name"], f"{peak / 2**30:.2f}"]
        for calculator in CALCULATORS:
            total = row["calculators"][calculator].get("total")
            if total is None:
                line.append("–")
            else:
                error = round(100 * (total / peak - 1), 1)
                line.append(f"{error + 0.0:+.1f}")  # no -0.0
        table.append(line)
    return table
