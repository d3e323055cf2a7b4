"""The experiment on planning, small, on a CPU; and its sizes for a GPU."""

import pytest
import torch
from experiments_helpers import ran

from membudget.cards import CARDS
from membudget.ledger import Transformer, predict
from membudget.planning import Job, Plan, WorkCounter, work
from membudget_experiments import planning

CPU = torch.device("cpu")
SHAPE = dict(vocabulary=32, width=16, depth=2, heads=2, family="llama")


def test_the_work_of_each_plan_is_predicted_and_timed(monkeypatch):
    """What is timed does the work that is predicted."""
    counted = []

    def count(train, device, warm_up, repeats):
        with WorkCounter() as counter:
            train()
        counted.append(counter.counts)
        return [1.0] * repeats

    monkeypatch.setattr(planning, "seconds", count)
    runs = [[4, 0, 0], [3, 1, 2]]
    given = dict(shape=SHAPE, tokens=8, batch=4, warm_up=0, repeats=2)
    rows, samples = ran(planning.plan_times, CPU, runs=runs, **given)
    job = Job(Transformer(**SHAPE), 8, 4)
    plans = [Plan(4), Plan(3, 1, 2)]
    for row, plan, found in zip(rows, plans, counted, strict=True):
        assert (row["flops"], row["bytes"], row["operators"]) == found
        assert work(job, plan)[:3] == found
    assert rows[0]["peak"] == predict(job.network, 4, 8, fused=True).peak
    assert [sample["seconds"] for sample in samples] == [[1.0, 1.0]] * 2


@pytest.mark.few(0)
def test_no_question_about_the_batch_runs_out_of_memory(monkeypatch):
    """The answer is the largest; accelerate fails its way down."""
    memory = pytest.importorskip("accelerate.utils.memory")
    pytest.importorskip("transformers")
    monkeypatch.setattr(memory, "clear_device_cache", lambda **_: None)
    given = planning.batch_questions.experiment.sizes["tiny"]
    rows, samples = ran(planning.batch_questions, CPU, **given)
    for row, found in zip(rows, samples, strict=True):
        assert found["out_of_memory"] == 0
        assert found["largest"] == row["largest"] >= found["accelerate"]
        assert found["failures"] == row["failures"] == found["attempts"] - 1


@pytest.mark.parametrize(
    ("size", "card"), [("t4", "T4"), ("large", "H100 80 GB")]
)
def test_a_gpu_has_room_for_the_largest_plan(size, card):
    given = planning.plan_times.experiment.sizes[size]
    micro, checkpointed, chunks = given["runs"][0]
    assert (checkpointed, chunks) == (0, 0)
    peak = predict(
        Transformer(**given["shape"]),
        given["batch"],
        given["tokens"],
        micro_batch=micro,
    ).peak
    assert CARDS[card].usable / 3 < peak < 0.9 * CARDS[card].usable
