"""What ``test_torchrun`` starts under ``torchrun``, in several ways."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def say(**what):
    """In one piece: `torchrun` runs scripts unbuffered, so that a line that
    is printed and its end are two, and lines of two ranks may mix."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def place():
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def results(sign):
    """Rank 1 dies on the first attempt, and leaves a sign."""
    rank = int(os.environ["RANK"])
    if rank == 1 and not Path(sign).exists():
        Path(sign).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    from membudget.sharding import launch

    try:
        launch(place, ranks=99)
    except ValueError as error:
        refused = str(error)
    world = int(os.environ["WORLD_SIZE"])
    say(
        rank=rank,
        local=os.environ["LOCAL_RANK"],
        world=os.environ["WORLD_SIZE"],
        found=launch(place),
        again=[launch(place, ranks=world) for _ in range(3)],
        refused=refused,
        threads=os.environ["OMP_NUM_THREADS"],
    )


def failure():
    say(pid=os.getpid())
    if os.environ["RANK"] == "1":
        raise ValueError("boom")
    time.sleep(86_400)


def wait():
    say(pid=os.getpid(), agent=os.getppid())
    time.sleep(86_400)


{"results": results, "failure": failure, "wait": wait}[sys.argv[1]](
    *sys.argv[2:]
)
