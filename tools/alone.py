"""Run a command; another process that asks for the same waits meanwhile.

    python tools/alone.py COMMAND …

Two makes of one clone would write into the same environment and the same book,
which tests read. The lock is on this file, and the system takes it back when
the command ends, however it does.
"""

import fcntl
import os
import signal
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    lock = os.open(__file__, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another make is at work there: this one waits", file=sys.stderr)
        fcntl.flock(lock, fcntl.LOCK_EX)
except OSError as error:
    sys.exit(f"make needs a clone that it can write to: {error}")
os.set_inheritable(lock, True)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error.strerror}")
