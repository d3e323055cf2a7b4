"""The record of the comparison with other calculators, and its table."""

import math

import peers as tool
import published
import pytest
import torch
import torch.nn.functional as F

from membudget.ledger import (
    Transformer,
    account,
    korthikanti,
    optimizer_bytes,
    predict,
)
from membudget.ledger import peers as room
from membudget.measuring import trace_step

RECORD = room.peers()
ROWS = {row["name"]: row for row in RECORD["rows"]}
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))


def shape_of(row):
    return Transformer(**row["shape"])


def course_step(row, device):
    """The course's model of a row's shape, and what a step is given."""
    model = shape_of(row).build(device)
    if row["recipe"] == "bf16":
        model = model.to(torch.bfloat16)
    x = torch.zeros(row["batch"], row["tokens"], dtype=int, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def loss(model, x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return (model, loss, x, x.clone()), optimizer


def test_the_record_is_what_the_tool_writes():
    for part in ("versions", "peers", "truths", "why"):
        assert RECORD[part] == getattr(tool, part.upper())
    assert tuple(tool.TRUTHS) == room.TRUTHS
    assert tuple(tool.PEERS) == room.CALCULATORS
    asked = [tuple(row[1:]) for row in tool.ROWS]
    keys = ("batch", "tokens", "recipe", "checkpointed")
    assert [tuple(row[k] for k in keys) for row in ROWS.values()] == asked
    for (preset, *_), name in zip(tool.ROWS, ROWS, strict=True):
        assert name.startswith(preset + ",")
    assert all(
        version.replace(".", "").isdigit()
        for version in RECORD["versions"].values()
    )


@each_row
def test_every_calculator_answers_or_says_why_not(row):
    assert set(row["truths"]) == set(room.TRUTHS)
    assert set(row["calculators"]) == set(room.CALCULATORS)
    for name, found in row["calculators"].items():
        if "cannot" in found:
            assert found["cannot"] and "total" not in found
            continue
        parts = dict(found["parts"])
        assert all(type(n) is int and n >= 0 for n in parts.values())
        assert found["settings"] is not None
        if name == "accelerate":
            assert found["total"] == max(parts.values())
        elif name == "vramcalc":
            step = parts.pop("step_workspace")
            extra = parts.pop("activations") + parts.pop("autocast_cache")
            assert found["total"] == sum(parts.values()) + max(extra, step)
        else:
            assert found["total"] == sum(parts.values())


@each_row
def test_our_column_is_predicted_again_to_the_byte(row):
    found = row["calculators"]["membudget"]
    again = predict(
        shape_of(row), row["batch"], row["tokens"], **found["settings"]
    )
    assert found["settings"]["foreach"]
    assert found["settings"]["recipe"] == row["recipe"]
    assert found["settings"]["checkpointed"] == row["checkpointed"]
    assert found["total"] == again.peak == row["truths"]["course"]["peak"]
    assert found["parts"] == again.at_peak.split
    assert found["parts"] == row["truths"]["course"]["split"]
    assert found["moment"] == [again.at_peak.row, again.at_peak.phase]


@pytest.mark.few(0)
def test_the_small_step_is_really_run_again():
    row = ROWS["small GPT, 8 × 256, fp32"]
    truth = row["truths"]["course"]
    step, optimizer = course_step(row, "cpu")
    tracker = trace_step(*step, optimizer=optimizer)
    assert truth["how"] == "run"
    assert truth["peak"] == tracker.peak
    assert truth["split"] == tracker.split()


@pytest.mark.few(0)  # takes long; so does a published run
def test_a_large_step_is_dry_run_again():
    row = ROWS["Llama 3.2 1B, 1 × 2048, bf16"]
    truth = row["truths"]["course"]
    step, optimizer = course_step(row, "meta")
    found = account(*step, optimizer=optimizer)
    assert truth["how"] == "dry run"
    assert truth["peak"] == found.peak
    assert truth["split"] == found.split
    assert truth["moment"] == [found.moment[0], found.moment[2]]


@each_row
def test_the_difference_to_the_library_is_named(row):
    truths = row["truths"]
    beyond = truths["transformers"]["beyond"]
    course, library = truths["course"], truths["transformers"]
    assert sum(beyond.values()) == library["peak"] - course["peak"]
    assert all(beyond.values())
    assert set(beyond) <= set(RECORD["why"][row["shape"]["family"]])
    for truth in truths.values():
        assert sum(truth["split"].values()) == truth["peak"]
    assert course["peak"] <= truths["transformers_mask"]["peak"]
    assert truths["transformers_mask"]["peak"] <= library["peak"] + 2**15


def test_parts_of_the_difference_in_closed_form():
    row = ROWS["Llama 3.2 1B, 1 × 2048, bf16"]
    s, n = row["shape"], row["tokens"]
    d, keys = s["width"], s["width"] // s["heads"] * s["kv_heads"]
    assert row["truths"]["transformers"]["beyond"] == {
        # 2 → 4 bytes: log-probabilities and two gradients; and two counts
        "logits and loss": 3 * 2 * n * s["vocabulary"] + 4,
        # two norms a layer and the last: fp32 → bf16
        "norms": -(2 * s["depth"] + 1) * 2 * n * d,
        # keys and values for every head, and the mask, in bf16
        "attention": s["depth"] * 2 * (2 * n * (d - keys) + n * n),
        "parameters": 64,
    }


@each_row
def test_eleutherai_again(row):
    found = row["calculators"]["eleutherai"]
    if row["recipe"] == "bf16":
        assert "12 bytes" in found["cannot"]
        return
    shape = shape_of(row)
    step = row["batch"], row["tokens"]
    again = tool.eleutherai(shape, *step, row["recipe"], row["checkpointed"])
    parts = again["parts"]
    assert found["parts"] == parts
    h, depth, t = shape.width, shape.depth, row["tokens"]
    mlp = (3 if shape.family == "llama" else 2) * h * shape.hidden
    block = 2 * h * h + 2 * h * shape.shared + mlp + 8 * h
    parameters = 2 * shape.vocabulary * h + t * h + 2 * h + depth * block
    low = 4 if row["recipe"] == "fp32" else 2
    assert parts["model"] == low * parameters
    assert parts["gradients"] == 4 * parameters
    assert parts["optimizer"] == 12 * parameters
    if low == 2:
        block = korthikanti(*step, h, shape.heads)
        if row["checkpointed"]:  # without the scores
            block = 34 * t * row["batch"] * h
    else:
        block = t * row["batch"] * (66 * h + 9 * shape.heads * t)
    assert parts["activations"] == depth * block


@each_row
def test_accelerate_again(row):
    found = row["calculators"]["accelerate"]
    if row["recipe"] == "bf16":
        assert "bf16" in found["cannot"]
        return
    shape = shape_of(row)
    buffers = 4 * shape.width // shape.heads // 2  # rotary frequencies
    if shape.family == "gpt":  # masks, whose booleans count as bits
        buffers = shape.depth * (shape.context**2 // 8 + 4)
    model = 4 * shape.parameters + buffers
    times = 4 if row["recipe"] == "fp32" else 2
    assert found["parts"]["model"] == model
    assert found["total"] == times * model
    head = 0 if shape.tied else 4 * shape.vocabulary * shape.width
    assert found["command"] == times * (model - head)


@each_row
def test_vramcalc_again(row):
    found = row["calculators"]["vramcalc"]
    s = shape_of(row)
    if s.family == "gpt":
        assert "gpt2" in found["cannot"]
        return
    n, h = row["batch"] * row["tokens"], s.width
    kept = 2 if row["recipe"] == "bf16" else 4
    layer = 2 * n * (5 * h + 2 * h + 2 * s.shared + 4 * s.hidden + 2 * h)
    layer += 2 * 4 * n * h
    logits = 14 * n * s.vocabulary
    if row["checkpointed"]:
        activations = s.depth * 2 * n * h + layer + logits
    else:
        activations = s.depth * layer + logits
    cast = s.parameters - (2 * s.depth + 1) * h
    cast -= 0 if s.tied else s.vocabulary * h
    assert found["parts"] == {
        "weights": kept * s.parameters,
        "gradients": kept * s.parameters,
        "optimizer": 2 * kept * s.parameters,
        "activations": activations,
        "autocast_cache": 2 * cast if row["recipe"] == "autocast" else 0,
        "step_workspace": kept * s.parameters,
    }


@each_row
def test_llm_analysis_again(row):
    found = row["calculators"]["llm_analysis"]
    if row["recipe"] == "fp32":
        assert "16 bits" in found["cannot"]
        return
    s = shape_of(row)
    n, h = row["batch"] * row["tokens"], s.width
    wide = s.hidden * (3 if s.family == "llama" else 2) // 2
    block = 2 * h * h + 2 * h * s.shared + 2 * h * wide + 2 * h
    parameters = s.depth * block + s.vocabulary * h + h
    gradients, optimizer = (2, 4) if row["recipe"] == "bf16" else (4, 12)
    last = 2 * n * s.vocabulary
    if row["checkpointed"]:
        layers = s.depth * 2 * n * h
    else:
        layers = s.depth * n * (25 * h + 8 * s.heads + 4 * wide)
        last += 4 * n * h
    if row["batch"] == 1:  # what follows the layers is added twice
        last *= 2
    assert found["parts"] == {
        "weights": 2 * parameters,
        "gradients": gradients * parameters,
        "optimizer": optimizer * parameters,
        "activations": layers + last,
    }


def test_8_bit_adam_of_bitsandbytes_is_ours():
    lists = RECORD["adam_8bit"]
    sizes = [[math.prod(s) for s in entry["shapes"]] for entry in lists]
    assert {4095, 4096, 4097} <= {n for one in sizes for n in one}
    assert max(map(len, sizes)) == 12
    for entry, one in zip(lists, sizes, strict=True):
        ours = optimizer_bytes(one, "fp32", "adam-8bit")
        assert entry["theirs"] == entry["ours"] == ours


def test_the_table():
    header, *lines = room.comparison()
    assert header == [
        "step",
        "GiB",
        "membudget",
        "accelerate",
        "vramcalc",
        "EleutherAI",
        "llm-analysis",
    ]
    assert [line[0] for line in lines] == list(ROWS)
    assert all(line[2] == "+0.0" for line in lines)
    assert all(len(line) == len(header) for line in lines)
    dashes = [sum(line[i] == "–" for line in lines) for i in (3, 4, 5, 6)]
    assert dashes == [2, 3, 2, 2]


def test_the_table_against_another_truth():
    _, *lines = room.comparison(truth="transformers")
    for row, line in zip(ROWS.values(), lines, strict=True):
        truth = row["truths"]["transformers"]["peak"]
        ours = row["calculators"]["membudget"]["total"]
        assert line[1] == f"{truth / 2**30:.2f}"
        error = 100 * (ours - truth) / truth
        assert float(line[2]) == pytest.approx(error, abs=0.0501)


def test_no_error_is_minus_nothing():
    lines = [line for truth in room.TRUTHS for line in room.comparison(truth)]
    assert "-0.0" not in {cell for line in lines for cell in line}


# Published runs ----------------------------------------------------------

PUBLISHED = room.published()
RUNS = {run["name"]: run for run in PUBLISHED["runs"]}


def test_the_published_runs():
    assert len(RUNS) == len(PUBLISHED["runs"]) == 19
    versions, theirs = PUBLISHED["versions"], PUBLISHED["measured_with"]
    assert set(versions) == set(theirs) == set(published.PACKAGES)
    assert versions == theirs | {"torch": versions["torch"]}
    for run in RUNS.values():
        found = run["account"]
        assert found["requested"] <= found["allocated"] < run["measured"]
        assert (found["plain"] is None) is not run["training"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "Llama 3.2 1B, inference, eager",
        "Llama 3.2 1B, autocast, LoRA, checkpointed",
    ],
)
def test_published_runs_are_predicted_again_to_the_byte(name, monkeypatch):
    """By a later version of transformers, which keeps the rotary frequencies
    twice, 32 numbers more, and makes no mask where it can look at positions.
    """
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "is_tracing", lambda *_: True)
    found = published.account_of(PUBLISHED, RUNS[name]).usage
    stored = RUNS[name]["account"]
    assert found.requested == stored["requested"] + 4 * 32
    assert found.allocated == stored["allocated"] + 512
