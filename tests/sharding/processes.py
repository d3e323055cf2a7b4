"""Which processes are there: Linux says it in /proc."""

import os
import time
from contextlib import suppress
from pathlib import Path

from project import PATIENCE


def entries():
    return [e for e in Path("/proc").glob("[0-9]*") if e.is_dir()]


def state_and_parent(entry):
    with suppress(OSError):
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[1])
    return "X", 0


def alive(number):
    return state_and_parent(Path("/proc", str(number)))[0] not in "XZ"


def ranks():
    """Children of this process's fork server."""
    found = []
    for entry in entries():
        state, parent = state_and_parent(entry)
        with suppress(OSError):
            server = Path("/proc", str(parent))
            named = b"forkserver" in (server / "cmdline").read_bytes()
            mine = state_and_parent(server)[1] == os.getpid()
            if named and mine and state not in "XZ":
                found.append(int(entry.name))
    return found


def marked(mark):
    """Those with this text in their environment."""
    found = []
    for entry in entries():
        with suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def end(mark):
    """What is still there after a wait, which is killed then."""
    limit = time.monotonic() + PATIENCE
    while (found := marked(mark)) and time.monotonic() < limit:
        time.sleep(0.02)
    for number in found:
        with suppress(ProcessLookupError):
            os.kill(number, 9)
    return found
