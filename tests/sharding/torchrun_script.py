"""What ``test_torchrun`` starts under ``torchrun``."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def place():
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()


def main(sign):
    """Rank 1 is killed in the first attempt, which leaves a sign; in the
    second one the rank of that agent fails. The others wait."""
    if not Path(sign).exists():
        if os.environ["RANK"] == "1":
            Path(sign).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(86_400)
    from membudget.sharding import joined

    found = []
    for _ in range(4):  # one group after the other
        with joined():
            found.append(place())
    said = {"rank": int(os.environ["RANK"]), "found": found}
    # In one piece: a line and its end are two where nothing is buffered.
    sys.stdout.write(json.dumps(said) + "\n")
    if os.environ["RANK"] == "0":
        Path(sign).unlink()
        time.sleep(86_400)
    while Path(sign).exists():  # until the other one has said it, too
        time.sleep(0.01)
    raise ValueError("boom")


main(*sys.argv[1:])
