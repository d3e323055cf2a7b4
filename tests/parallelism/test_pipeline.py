"""Stages are the model, cut."""

import pytest
import torch
import torch.nn.functional as F

from membudget.models import GPT, Llama
from membudget.parallelism import (
    SCHEDULES,
    bubble,
    cut,
    in_flight,
    replay,
    table,
)
from membudget.parallelism.pipeline import stages_of

TOKENS = torch.arange(24).view(2, 12)
MODELS = {
    "gpt": lambda **rest: GPT(32, 16, 16, 5, 2, **rest),
    "llama": lambda **rest: Llama(32, 16, 5, 4, 2, 24, **rest),
}


def gradients(model, parts):
    model.zero_grad()
    x = TOKENS
    for part in parts:
        x = part(x)
    F.cross_entropy(x.flatten(0, 1), TOKENS.flatten()).backward()
    return x, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_the_stages_one_after_the_other_are_the_model(kind, stages):
    torch.manual_seed(0)
    model = MODELS[kind]()
    out, wanted = gradients(model, [model])
    cut_out, found = gradients(model, cut(model, stages))
    assert torch.equal(out, cut_out)
    assert all(map(torch.equal, wanted, found))


@pytest.mark.parametrize("kind", MODELS)
def test_each_parameter_is_in_one_stage_under_its_name(kind):
    model = MODELS[kind]()
    parts = [dict(part.named_parameters()) for part in cut(model, 3)]
    merged = {name: p for part in parts for name, p in part.items()}
    assert merged == dict(model.named_parameters())
    assert sum(map(len, parts)) == len(merged)


def test_blocks_that_do_not_divide_go_to_the_first_stages():
    assert [len(part.blocks) for part in cut(MODELS["gpt"](), 3)] == [2, 2, 1]


def test_a_model_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="6 stages are more than the 5 bl"):
        cut(MODELS["gpt"](), 6)
    with pytest.raises(ValueError, match="tied"):
        cut(MODELS["llama"](tied=True), 2)
    assert len(cut(MODELS["llama"](tied=True), 1)) == 1
    with pytest.raises(TypeError, match="the model is"):
        cut(torch.nn.Linear(2, 2), 1)


def cases():
    """Schedules, ranks, micro-batches and chunks, some odd and few."""
    for schedule, least in SCHEDULES.items():
        fixed = least == 1 or schedule in ("ZBVZeroBubble", "DualPipeV")
        for ranks in (2, 3, 4, 8):
            for m in sorted({1, 3, ranks, ranks + 1, 2 * ranks, 4 * ranks}):
                for chunks in (least,) if fixed else (2, 3, 4):
                    if fits(schedule, ranks, m, chunks):
                        yield schedule, ranks, m, chunks


def fits(schedule, ranks, micro_batches, chunks):
    try:
        return bool(table(schedule, ranks, micro_batches, chunks))
    except ValueError:
        return False


CASES = list(cases())


def test_the_cases_have_every_schedule_and_few_micro_batches():
    assert {case[0] for case in CASES} == set(SCHEDULES)
    assert {case[0] for case in CASES if case[2] < case[1]} == set(
        SCHEDULES
    ) - {"1F1B", "DualPipeV"}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.few(8)
def test_the_law_of_tapes_is_what_the_table_holds(case):
    schedule, ranks, m, chunks = case
    rows = table(*case)
    assert replay(rows).peaks == pytest.approx(
        [in_flight(schedule, ranks, m, r, chunks) for r in range(ranks)]
    )
    assert [stages_of(schedule, ranks, r, chunks) for r in range(ranks)] == [
        sorted({o.stage for o in row}) for row in rows
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.few(8)
def test_the_law_of_the_bubble_is_that_of_the_replay_or_refuses(case):
    measured = replay(table(*case)).bubble
    try:
        assert bubble(*case) == pytest.approx(measured)
    except ValueError as error:
        assert "too few for the law" in str(error)
        schedule, ranks, m, chunks = case
        split = 3 if "Zero" in schedule else 1
        wrong = (ranks - 1) / (split * chunks * m + ranks - 1)
        assert measured > wrong + 1e-9


def test_the_bubble_moves_with_what_the_parts_take():
    """A zero bubble is one of equal parts only."""
    rows = table("ZBVZeroBubble", 4, 8)
    even, uneven = replay(rows), replay(rows, inputs=1.5, weights=0.5)
    assert uneven.bubble > 1.5 * even.bubble


def test_a_law_refuses_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match="rank is 4"):
        in_flight("GPipe", 4, 8, 4)
