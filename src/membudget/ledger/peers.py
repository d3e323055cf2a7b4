"""Other calculators on the same steps: the record, and its table.

``tools/peers.py`` runs them in an environment of their own and writes
``peers.json``, ``tools/published.py`` predicts runs that others measured and
writes ``published.json``; this module reads both and needs no other package.
"""

import json
from importlib.resources import files

from membudget.checks import one_of
from membudget.ledger.networks import Transformer

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
    return _read("peers.json")


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
    return _read("published.json")


def _read(name: str) -> dict:
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


def eleutherai(
    shape: Transformer,
    batch: int,
    tokens: int,
    recipe: str,
    checkpointed: bool = False,
) -> dict[str, int]:
    """EleutherAI's calculator, in its own terms, in bytes.

    From ``calc/calc_transformer_mem.py`` of EleutherAI/cookbook (commit
    c2af7db; Anthony and Schoelkopf, "Transformer Math 101", 2023) for one
    GPU, without experts. It is written for mixed precision, 2 + 4 + 12 bytes
    per parameter; in ``"fp32"`` it is asked for 4 bytes of each parameter
    and activation (``--disable-mixed-precision --low-prec-bytes-per-val
    4``), and its optimizer keeps 12. Checkpointing drops the scores and
    nothing else.

    Raises:
        ValueError: a recipe that it cannot express.
    """
    low = {"fp32": 4, "autocast": 2}[
        one_of(recipe, ("fp32", "autocast"), "recipe")
    ]
    h, depth, s = shape.width, shape.depth, tokens
    linears = 3 if shape.family == "llama" else 2
    ratio = shape.kv_heads / shape.heads
    parameters = (
        2 * shape.vocabulary * h  # embedding and head
        + h * s  # positions
        + 8 * h * depth
        + 2 * h
        + int(2 * (1 + ratio) * depth * h * h)
        + int(linears * depth * h * (shape.hidden / h) * h)
    )
    scores = 0 if checkpointed else (2 * low + 1) * shape.heads * s
    return {
        "model": parameters * low,
        "gradients": parameters * 4,
        "optimizer": parameters * 12,
        "activations": s * batch * depth * (h * (16 * low + 2) + scores),
    }
