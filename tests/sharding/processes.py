"""Which processes are there."""

import os
import time
from contextlib import suppress

import psutil
from project import PATIENCE


def alive(number):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


def ranks():
    """Children of this process's fork server."""
    return [
        rank.pid
        for server in psutil.Process().children()
        if alive(server.pid) and "forkserver" in " ".join(server.cmdline())
        for rank in server.children()
        if alive(rank.pid)
    ]


def marked(mark):
    """Those with this name in their environment."""
    everyone = psutil.process_iter(["environ"])
    return [p.pid for p in everyone if mark in (p.info["environ"] or ())]


def end(find, *arguments):
    """What `find` finds still after a wait, which is killed then."""
    limit = time.monotonic() + PATIENCE
    while (found := find(*arguments)) and time.monotonic() < limit:
        time.sleep(0.02)
    for number in found:
        with suppress(ProcessLookupError):
            os.kill(number, 9)
    return found
