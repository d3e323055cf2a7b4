"""What runs in each process of :class:`membudget.sharding.Ranks`."""

import __future__

import faulthandler
import gc
import inspect
import io
import linecache
import os
import pickle
import signal
import socket
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import FunctionType

import torch
import torch.distributed as dist
import torch.distributed.fsdp

LIMIT = timedelta(days=30)
"""For a collective: the parent's deadline comes first."""

FROM_SOURCE = "function of the notebook"
"""Begins the file name of a function that came as text."""


def pack(*objects: object) -> bytes:
    """The objects for another process.

    Functions of a notebook or a script, which cannot be imported elsewhere,
    travel as their source.

    Raises:
        TypeError: something that cannot travel.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(objects)
    except Exception as error:  # each type has its own way to refuse
        raise TypeError(
            f"this cannot be sent to another process: {error}. Use numbers, "
            "text, tensors, lists and dictionaries of them, and functions "
            "that are written with def at the top level of a module or of "
            "a notebook's cell"
        ) from None
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: object) -> object:
        if getattr(thing, "__module__", None) != "__main__":
            return NotImplemented
        if isinstance(thing, type):
            raise TypeError(
                f"the class {thing.__qualname__} is written in the notebook "
                "or script, where no other process can import it"
            )
        if isinstance(thing, FunctionType):
            name = thing.__qualname__
            if not name.isidentifier() or thing.__closure__:
                raise TypeError(f"{name} is no function of the top level")
            source = textwrap.dedent(inspect.getsource(thing))
            return rebuild, (thing.__name__, source)
        return NotImplemented


def rebuild(name: str, source: str) -> Callable:
    """The function with this name from its source."""
    file = f"<{FROM_SOURCE}: {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    found: dict = {"__name__": "__mp_main__"}
    # Annotations may name what is imported elsewhere: they stay text.
    flags = __future__.annotations.compiler_flag
    exec(compile(source, file, "exec", flags), found)
    return found[name]


class _Lines(io.TextIOBase):
    """Sends each line that the worker prints."""

    def __init__(self, send: Callable[[str, object], None]) -> None:
        self.send, self.rest = send, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.send("line", line)
        return len(text)

    def close(self) -> None:
        if self.rest:
            self.write("\n")


def main(
    rank: int,
    ranks: int,
    port: int,
    backend: str,
    connection: Connection,
    log: str,
) -> None:
    """Join the process group, then run what the connection brings."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file, all_threads=False)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees to it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # what was imported is no garbage: collections are quick
    lock = threading.Lock()

    def send(kind: str, content: object) -> None:
        data = pickle.dumps((kind, content))
        with lock:
            connection.send_bytes(data)

    try:
        _join(rank, ranks, port, backend)
        send("ready", os.getpid())
        while task := connection.recv_bytes():
            send("done", _work(task, send))
            del task
            gc.collect()  # before the others gather: DTensors hold groups
        dist.barrier()
        gc.collect()
        dist.destroy_process_group()
        send("left", None)
    except BaseException as error:
        _report(error, send)
        threading.Event().wait()  # leaving now would fail the others, too


def _end_with_parent() -> None:
    wait([parent_process().sentinel])
    os._exit(1)


def _join(rank: int, ranks: int, port: int, backend: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):  # the loopback of Linux, of macOS
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, None, False, LIMIT)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=LIMIT
    )


def _work(task: bytes, send: Callable[[str, object], None]) -> bytes:
    lines, before = _Lines(send), (sys.stdout, sys.stderr)
    sys.stdout = sys.stderr = lines
    try:
        worker, args, kwargs = pickle.loads(task)
        return pack(worker(*args, **kwargs))
    finally:
        sys.stdout, sys.stderr = before
        lines.close()


def _report(error: BaseException, send: Callable[[str, object], None]) -> None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    frames = traceback.extract_tb(trace)
    hint = ""
    if type(error) is NameError and FROM_SOURCE in frames[-1].filename:
        hint = (
            ". A function written in a notebook travels alone: import "
            "inside it what it uses, and pass the rest as arguments"
        )
    text = f"{type(error).__name__}: {error}{hint}"
    said = traceback.format_exception(type(error), error, trace)
    if not frames:  # the message says it all
        said = []
    send("error", (text, "".join(said)))
