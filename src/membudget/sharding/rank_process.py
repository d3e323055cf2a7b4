"""What runs in each process of :class:`membudget.sharding.Ranks`."""

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
import threading
import traceback
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from membudget.checks import installed

LIMIT = timedelta(days=30)
"""For a collective: the parent's deadline comes first."""

NOTEBOOK = "function of the notebook"
"""Begins what the ranks call the file of a notebook's function."""


def pack(*objects: object) -> bytes:
    """The objects for another process.

    Functions and classes of a notebook or a script, which cannot be imported
    elsewhere, travel with all that they use.

    Raises:
        ModuleNotFoundError: cloudpickle is missing.
        TypeError: something that cannot travel.
    """
    buffer, pickler = io.BytesIO(), _pickler()
    try:
        pickler(buffer).dump(objects)
    except Exception as error:  # each type has its own way to refuse
        bad = [thing for thing in objects if not _travels(thing)]
        what = next(filter(None, map(_culprit, bad)), "this")
        raise TypeError(
            f"{what} cannot be sent to another process: "
            f"{str(error).rstrip('.')}. "
            "Send numbers, text, tensors, lists and dictionaries of them, "
            "functions and classes, and make anything else inside the function"
        ) from None
    return buffer.getvalue()


def _culprit(thing: object, seen: tuple[int, ...] = ()) -> str:
    """The name of what cannot travel, if a function uses it."""
    if not isinstance(thing, FunctionType):
        return ""
    seen = (*seen, id(thing))
    used = inspect.getclosurevars(thing)
    for name, value in {**used.globals, **used.nonlocals}.items():
        if id(value) in seen or _travels(value):
            continue
        if not isinstance(value, FunctionType):
            return f"{name}, which {thing.__name__} uses,"
        if found := _culprit(value, seen):
            return found
    return ""


def _travels(thing: object) -> bool:
    with suppress(Exception):
        _pickler()(io.BytesIO()).dump(thing)
        return True
    return False


def file_of(code: CodeType) -> str:
    """What the ranks call the file of the code.

    A notebook's cell has none that they could read: its name tells whose
    code it is, and its lines travel along.
    """
    file = code.co_filename
    if os.path.exists(file) or not linecache.getlines(file):
        return file
    return f"<{NOTEBOOK}: {code.co_qualname.split('.')[0]}>"


def _reduce_code(code: CodeType) -> tuple:
    file, lines = file_of(code), []
    if file != code.co_filename:
        lines = linecache.getlines(code.co_filename)
    code = code.replace(co_filename=file)
    _, arguments = _pickler().dispatch_table.maps[1][CodeType](code)
    return _rebuild, (arguments, file, lines)


def _rebuild(arguments: tuple, file: str, lines: list[str]) -> CodeType:
    """The code in the rank, where tracebacks show its lines."""
    if lines:
        size = sum(map(len, lines))
        linecache.cache[file] = size, None, lines, file
    # cloudpickle may write a name of its own (3.1.3: "<dynamic-code>")
    return CodeType(*arguments).replace(co_filename=file)


@cache
def _pickler() -> Any:
    """cloudpickle's, for code that keeps its file."""
    module = installed("cloudpickle", "sending a function to ranks")
    base: Any = module.Pickler

    class Pickler(base):
        dispatch_table: ClassVar = ChainMap(
            {CodeType: _reduce_code}, base.dispatch_table
        )

    return Pickler


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
    if parent := parent_process():
        wait([parent.sentinel])
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
    said = traceback.format_exception(type(error), error, trace)
    if not trace:  # the message says it all
        said = []
    send("error", (f"{type(error).__name__}: {error}", "".join(said)))
