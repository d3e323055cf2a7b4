"""Jobs and plans: what is refused, their words, their programs."""

import subprocess
import sys
from random import Random

import pytest
from planning_helpers import any_host, any_plan

from membudget.ledger import GPT2, LLAMA3_8B, Adapter, Transformer
from membudget.planning import Job, Plan

JOB = Job(GPT2, 64, 8)


def test_a_plan_in_words():
    assert Plan(8).text(JOB) == "1 × 8 sequences, fp32, Adam"
    plan = Plan(3, 12, 4, "bf16", "sgd")
    assert plan.text(JOB) == (
        "2 × 3 sequences and a last micro-batch of 2, every block "
        "checkpointed, the loss in 4 chunks, bf16, SGD"
    )
    plan = Plan(1, 2, stage="zero-3", ranks=8)
    assert "2 of 12 blocks checkpointed" in plan.text(JOB)
    assert plan.text(JOB).endswith("zero-3 on 8 ranks")
    plan = Plan(8, offloaded=True, optimizer_on_host=True)
    assert plan.text(JOB).endswith(
        "Adam, what is saved offloaded, the optimizer on the host"
    )


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"stage": "zero-3", "optimizer": "adam-8bit"}, "8-bit states"),
        ({"adapter": Adapter(["up"], dora=True)}, "what DoRA does: use dora"),
        ({"ranks": 2, "recipe": "master-fp32-gradients"}, "DDP's buckets"),
        ({"ranks": 2, "offloaded": True}, "memory beside one rank alone"),
        ({"optimizer_on_host": True, "stage": "zero-3"}, "or use ranks=1"),
        ({"optimizer_on_host": True, "recipe": "bf16"}, "use 'master', 'fp32"),
        (
            {"optimizer_on_host": True, "optimizer": "lion-8bit"},
            "'lion-8bit' steps on a GPU",
        ),
    ],
)
def test_what_is_no_plan(wrong, says):
    with pytest.raises(ValueError, match=says):
        Plan(1, **wrong)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(1, ranks=9), "9 ranks are more than the 8 sequences"),
        (Plan(1, ranks=3), "3 ranks are no divisor of the 8 sequences"),
        (Plan(3, ranks=4), "micro_batch is 3, and a rank has 2 of the 8"),
        (Plan(1, 13), "13 blocks are to be checkpointed.* has 12"),
    ],
)
def test_what_is_no_plan_of_a_job(plan, says):
    for ask in (plan.share, plan.text, plan.code):
        with pytest.raises(ValueError, match=says):
            ask(JOB)


def test_what_is_no_job():
    with pytest.raises(ValueError, match="2000 tokens are more than the 1024"):
        Job(GPT2, 2000, 8)


def test_a_program_says_only_what_the_plan_does():
    """What each line does is compared with the tracker in test_memory."""
    plain = Plan(8).code(JOB)
    for name in ("checkpoint", "chunked", "autocast", "dist", "split"):
        assert name not in plain
    assert Plan(2, 1, 2, "autocast").code(JOB).count("\n") < 70
    sharded = Plan(8, stage="zero-3").code(JOB)
    assert "MixedPrecisionPolicy" not in sharded
    llama = Job(Transformer(40, 16, 2, 4, family="llama", kv_heads=2), 8, 2)
    assert "Llama(" in Plan(1).code(llama)
    for name, made in ("adam-8bit", "Adam8bit"), ("lion-8bit", "Lion8bit"):
        program = Plan(1, optimizer=name).code(llama)
        assert "import bitsandbytes\n" in program
        assert f"bitsandbytes.optim.{made}(" in program


def test_a_program_is_formatted(tmp_path):
    pytest.importorskip("ruff")
    rng, large = Random(0), Job(LLAMA3_8B, 8192, 8)
    pairs = [(large, Plan(3, 2, 16, "autocast"))]
    for kind in ("one rank", "ddp", "shards"):
        pairs += [any_plan(rng, kind) for _ in range(20)]
    pairs += [(job, any_host(rng, plan)) for job, plan in pairs[1:21]]
    for number, (job, plan) in enumerate(pairs):
        (tmp_path / f"{number}.py").write_text(plan.code(job))
    ruff = [sys.executable, "-m", "ruff"]
    shape = ["format", "--check", "--line-length", "79"]
    for what in (shape, ["check", "--select", "E,F"]):
        command = [*ruff, *what, "--no-cache", "--isolated", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
