"""Run a training script, and explain it if it runs out of memory."""

import argparse
import builtins
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from membudget.command.refused import Refused

INSIDE = (__file__, runpy.__file__, "<frozen runpy>")
"""Where frames are none of the script's."""


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``membudget run``."""
    parser.add_argument(
        "--limit", metavar="SIZE", help="of the process' data, as 2GiB (Linux)"
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        type=Path,
        help="write the first training step as an HTML page; it is slower",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="SCRIPT is a module"
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER
    )


def run(args: argparse.Namespace) -> int:
    """Run the script as Python does; its exit code.

    Raises:
        SystemExit: the script's own.
        KeyboardInterrupt: it was interrupted, and its traceback is printed.
        Refused: there is no such script, or the limit cannot be set.
    """
    session = _Session(args)
    try:
        session.script()
    except SystemExit as end:
        session.explain(end)
        raise
    except BaseException as error:
        _show(error)
        session.explain(error)
        if isinstance(error, KeyboardInterrupt):
            sys.excepthook = lambda *shown: None
            raise  # so that the process ends as by the signal
        return 1
    finally:
        session.end()
    return 0


def _show(error: BaseException) -> None:
    """Print the traceback as Python does, without our frames."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in INSIDE:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


class _Session:
    """One run of a script."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.watch: Any = None  # since torch is there
        self.limit: int | None = None
        if not args.module and not os.path.exists(args.script):
            raise Refused(
                f"there is no {args.script}: name a script, or -m and a module"
            )
        if args.record and not args.record.resolve().parent.is_dir():
            raise Refused(
                f"there is no folder {args.record.parent} for the record"
            )
        if args.record and not importlib.util.find_spec("anywidget"):
            raise Refused(
                "--record needs what the course's pages need: "
                "pip install 'membudget[course]'"
            )
        if args.limit:
            self._set_limit(args.limit)

    def script(self) -> None:
        """Run it, with what Python gives to a script."""
        name, others = self.args.script, self.args.arguments
        after_import("torch", self._begin)
        if self.args.module:
            sys.argv, sys.path[0] = [name, *others], os.getcwd()
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [name, *others]
            sys.path[0] = os.path.dirname(os.path.realpath(name))
            _execute(os.path.abspath(name))

    def _begin(self) -> None:
        """The script has imported torch."""
        try:
            self.watch = self._watching()
        except Exception as error:  # the script runs all the same
            print(f"membudget: it watches nothing: {error}", file=sys.stderr)

    def _watching(self) -> Any:
        first = os.environ.get("RANK", "0") == "0"
        if self.args.record and first:
            from membudget.command.recording import Recording

            return Recording(self.args.record)
        from membudget.command.watch import Watch

        return Watch()

    def explain(self, error: BaseException) -> None:
        """Report on it, if it is about memory."""
        if self.watch is None:
            return
        self._lift_limit()
        from membudget.command.report import ended_by, report_on

        if short := ended_by(error):
            try:
                report_on(short, self.watch, self.limit)
            except KeyboardInterrupt:
                print("membudget: interrupted", file=sys.stderr)
            except Exception as failed:  # the script's own end stays
                print(f"membudget: no report: {failed!r}", file=sys.stderr)

    def end(self) -> None:
        """The script has ended."""
        if self.watch is not None:
            self.watch.end()

    # A limit of the process' data

    def _set_limit(self, text: str) -> None:
        from membudget.measuring.units import parse_bytes

        try:
            import resource

            self.limit = parse_bytes(text)
            _, self._most = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self._most))
        except (ImportError, ValueError, OSError) as error:
            raise Refused(f"cannot set --limit: {error}") from None

    def _lift_limit(self) -> None:
        if self.limit is not None:
            import resource

            most = (self._most, self._most)
            resource.setrlimit(resource.RLIMIT_DATA, most)


def _execute(path: str) -> None:
    """Run a file as Python's main module."""
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__builtins__=builtins, __file__=path, __loader__=loader)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    exec(code, vars(main))


def after_import(name: str, begin: Callable[[], None]) -> None:
    """Call ``begin`` when a module has been imported; now, if it is.

    A script may set what the module reads when it is imported, such as
    environment variables. So nothing imports it before the script does.
    """
    if name in sys.modules:
        begin()
    else:
        sys.meta_path.insert(0, _Finder(name, begin))


class _Finder:
    """Finds one module once, and says when it is there."""

    def __init__(self, name: str, begin: Callable[[], None]) -> None:
        self.name, self.begin = name, begin

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self.begin()

            spec.loader.exec_module = exec_module  # type: ignore
        return spec
