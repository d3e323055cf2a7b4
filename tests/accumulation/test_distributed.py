"""DDP and FSDP2 on two gloo ranks, started once for all checks."""

import json
import time

import accumulation_ranks
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE = 120  # seconds; it takes about 10

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this PyTorch has no gloo",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What each rank says about each check: None, or a traceback."""
    folder = tmp_path_factory.mktemp("ranks")
    context = mp.spawn(
        accumulation_ranks.worker,
        (str(folder),),
        nprocs=accumulation_ranks.WORLD,
        join=False,
    )
    end, failure, done = time.monotonic() + DEADLINE, "", False
    try:
        while not done and time.monotonic() < end:
            done = context.join(timeout=1)
    except Exception as error:  # a process died
        failure = str(error)
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    if not done:
        failure += f"\nnot finished after {DEADLINE} s"
    ranks = []
    for rank in range(accumulation_ranks.WORLD):
        lines = (folder / f"{rank}.jsonl").read_text().splitlines()
        entries = map(json.loads, lines)
        ranks.append({e["name"]: e.get("problem", "began") for e in entries})
    return ranks, failure


@pytest.mark.parametrize("name", accumulation_ranks.checks())
def test_on_two_ranks(outcome, name):
    ranks, failure = outcome
    said = {
        "began": f"hung or died{failure}",
        "did not begin": f"did not begin{failure}",
    }
    problems = [found.get(name, "did not begin") for found in ranks]
    if any(problems):
        pytest.fail(
            "\n".join(
                f"rank {rank}: {said.get(problem, problem)}"
                for rank, problem in enumerate(problems)
            ),
            pytrace=False,
        )


def test_the_ranks_end_cleanly(outcome):
    assert outcome[1] == ""
