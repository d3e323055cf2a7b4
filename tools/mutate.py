"""Plant small faults in the package: which ones do its tests not notice?

    python tools/mutate.py [FILE …] [-n 150] [--seed 0] [--again]

A fault is one small change of a room's code: `<` becomes `<=`, a sum a
difference, a number the next one, a statement is gone. It is planted in a copy
of the tree, and the tests that execute its line run until one fails. Which
these are is traced once for each file of tests. A fault that no test notices
is printed: then a test is missing, or the code is not needed, or nobody could
see the fault, and `mutate.toml` says why. (mutmut 3 follows no process that a
test starts, and its faults are to half in the words of messages; cosmic-ray
starts every test anew for each fault.)
"""

import argparse
import ast
import difflib
import gc
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
ON_TOP = ("exercises", "experiments", "widgets")
"""Rooms that no other imports: their tests are asked about them alone."""

IMPORTED = ("src", "experiments")
"""Folders that packages are imported from."""

PRELOADED = (
    "nbval.plugin",
    "xdist.plugin",
    "hypothesis",
    "playwright.sync_api",
    "sklearn.datasets",
    "torch.distributed.fsdp",
    "torch.utils.flop_counter",
)
"""What takes long to import and is not ours: once, not for each fault."""

SLOW = 20
"""Tests that take more seconds than this are left out."""

FAR = 60
"""Seconds for tests that only might notice a fault (see `selected`)."""

PATIENCE = 60
"""Seconds after which a test hangs, besides three times what it takes."""

IMPORT = -1
"""In place of a test's number: the line is executed by an import."""

# Faults, by syntax ----------------------------------------------------------

SWAPS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
EQUAL = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
GONE = (
    ast.Expr,
    ast.AugAssign,
    ast.Raise,
    ast.Assert,
    ast.Break,
    ast.Continue,
    ast.Delete,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Fault:
    """The bytes `start` to `end` of a file become `text`.

    A test of it has to execute one of the lines `first` to `last`.
    """

    file: str
    start: int
    end: int
    text: str
    first: int
    last: int

    def planted(self, source):
        """The bytes of the file with the fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def change(self, source):
        """The lines that go and those that come: (number, gone, come)."""
        old, new = (
            text.decode().splitlines()
            for text in (source, self.planted(source))
        )
        match = difflib.SequenceMatcher(None, old, new, autojunk=False)
        places = [o for o in match.get_opcodes() if o[0] != "equal"]
        (_, a, _, c, _), (_, _, b, _, d) = places[0], places[-1]
        return a + 1, old[a:b], new[c:d]

    def key(self, source):
        """What a fault is called where lines move: its file and its text."""
        _, *sides = self.change(source)
        return self.file, *(
            " ".join(line.strip() for line in side) for side in sides
        )


class Sites:
    """The places of a source that could be wrong, and how at each."""

    def __init__(self, file, source):
        self.file, self.source = file, source
        self.starts = [
            0,
            *itertools.accumulate(map(len, source.splitlines(True))),
        ]
        self.found = []
        self.walk(ast.parse(source), (1, 1), Counter())

    def at(self, node):
        """Where a node starts and where it ends."""
        return tuple(
            self.starts[line - 1] + column
            for line, column in (
                (node.lineno, node.col_offset),
                (node.end_lineno, node.end_col_offset),
            )
        )

    def walk(self, node, lines, stored):
        """Find the sites in `node`, which is executed at `lines`.

        stored: how often a name is assigned in the function around it.
        """
        if isinstance(node, FUNCTIONS):
            names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
            stored = Counter(
                n.id for n in names if isinstance(n.ctx, ast.Store)
            ) + Counter(
                n.arg for n in ast.walk(node) if isinstance(n, ast.arg)
            )
        if isinstance(node, (ast.stmt, ast.match_case)):
            lines = executed(node, lines)
        edits = list(self.edits(node, stored))
        if edits:
            self.found.append([Fault(self.file, *e, *lines) for e in edits])
        for child in children(node):
            self.walk(child, lines, stored)

    def edits(self, node, stored):
        """Yields (start, end, text) for each way to make `node` wrong."""
        match node:
            case ast.Compare():
                both = itertools.pairwise([node.left, *node.comparators])
                for op, (left, right) in zip(node.ops, both, strict=True):
                    yield from self.swap(op, left, right)
            case ast.BoolOp():
                for left, right in itertools.pairwise(node.values):
                    yield from self.swap(node.op, left, right)
            case ast.BinOp():
                yield from self.swap(node.op, node.left, node.right)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self.at(node)
                yield start, start + len("not "), ""
            case ast.Constant(value=bool(value)):
                yield *self.at(node), str(not value)
            case ast.Constant(value=int(value) | float(value)):
                for wrong in (value + 1, value - 1):
                    if wrong != value:  # as it is where a float is large
                        yield *self.at(node), repr(wrong)
            case ast.Call(func=ast.Name(id="min" | "max" | "any" | "all")):
                yield *self.at(node.func), NAMES[node.func.id]
            case ast.Slice():
                for end in (node.lower, node.upper):
                    if end and not isinstance(end, ast.Constant):
                        _, stop = self.at(end)
                        yield stop, stop, " + 1"
                        yield stop, stop, " - 1"
            case ast.Return(value=ast.expr()) if not none(node.value):
                yield *self.at(node.value), "None"
            case ast.arguments():
                for default in (*node.defaults, *node.kw_defaults):
                    if default is not None and not number(default):
                        wrong = "..." if none(default) else "None"
                        yield *self.at(default), wrong
            case ast.AugAssign():
                yield from self.swap(node.op, node.target, node.value)
        for test in conditions(node):
            start, stop = self.at(test)
            inside = self.source[start:stop].decode()
            yield start, stop, f"not ({inside})"
        if deletable(node, stored):
            yield *self.at(node), "pass"

    def swap(self, op, left, right):
        """The operator between two operands becomes another one."""
        if type(op) not in SWAPS:
            return
        old, new = SWAPS[type(op)]
        start, stop = self.at(left)[1], self.at(right)[0]
        found = self.source.find(old.encode(), start, stop)
        if found >= 0:
            yield found, found + len(old), new


def none(node):
    return isinstance(node, ast.Constant) and node.value is None


def number(node):
    """Whether this is a number, for which there are other faults."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(
        node.value, (int, float)
    )


def docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def conditions(node):
    """The conditions of `node` that no swap of an operator turns round."""
    tests = []
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        tests = [node.test]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    for test in tests:
        match test:
            case ast.UnaryOp(op=ast.Not()) | ast.Constant():
                pass
            case ast.Compare(ops=[op]) if isinstance(op, EQUAL):
                pass
            case _:
                yield test


def deletable(node, stored):
    """Whether this statement can go without a name that is not there then."""
    if isinstance(node, ast.Assign):
        return all(
            isinstance(target, (ast.Attribute, ast.Subscript))
            or (isinstance(target, ast.Name) and stored[target.id] > 1)
            for target in node.targets
        )
    return isinstance(node, GONE) and not docstring(node)


def executed(node, lines):
    """The first and last line of a statement without those in its body.

    What is in the head of a function is executed with its first statement.
    """
    body = getattr(node, "body", None)
    if isinstance(node, FUNCTIONS):
        first = body[docstring(body[0]) and len(body) > 1]
        return first.lineno, executed(first, lines)[1]
    first = getattr(node, "lineno", lines[0])
    if body:
        return first, max(first, body[0].lineno - 1)
    return first, node.end_lineno


def children(node):
    """The nodes in `node` that are code: no type, no text, no message."""
    match node:
        case ast.JoinedStr() | ast.Raise():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Call(func=ast.Attribute(attr="warn")):
            return
        case ast.keyword(arg="slots"):  # they save memory, nothing else
            return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def sample(sites, n, seed):
    """`n` faults (None: of every site one), at most one of each site."""
    dice = random.Random(seed)
    n = len(sites) if n is None else min(n, len(sites))
    places = dice.sample(sites, n)
    return sorted(
        (dice.choice(place) for place in places),
        key=lambda fault: (fault.file, fault.start),
    )


def sources(root, files=()):
    """The bytes of what has tests, or of the files named, by path."""
    found = {
        str(path.relative_to(root)): path.read_bytes()
        for folder in IMPORTED
        for path in sorted((root / folder).rglob("*.py"))
    }
    tested = {path.name for path in root.glob("tests/*/")}
    return {
        file: source
        for file, source in found.items()
        if (file in files if files else room(file) in tested)
    }


def room(file):
    """`ledger` of src/membudget/ledger/walk.py, `cards` of …/cards.py."""
    first, _, name, *_ = Path(file).with_suffix("").parts
    return name if first == "src" else first


# Tests that execute a line --------------------------------------------------


def follow(out, folders, test=""):
    """Write each line in `folders` that is executed, and by which test.

    A row of the file `out` is the test ("": none, an import), the file and the
    line. Processes that a test starts write into the same one, at once: of one
    that is killed coverage.py keeps nothing. Gives the function that says
    which test begins.
    """
    out = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    seen = set()

    def enter(frame, event, arg):
        name = frame.f_code.co_filename
        return line if name.startswith(folders) else None

    def line(frame, event, arg):
        what = test, frame.f_code.co_filename, frame.f_lineno
        if event == "line" and what not in seen:
            seen.add(what)
            os.write(out, json.dumps(what).encode() + b"\n")
        return line

    def begin(name):
        nonlocal test
        test = name

    threading.settrace(enter)
    sys.settrace(enter)
    return begin


FOLLOWED = """import os, sys
sys.path.append({tools!r})
from mutate import follow
test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
follow({lines!r}, {folders!r}, test)
"""


class Recorder:
    """A plugin for pytest: which tests pass, how long, over which lines."""

    def __init__(self, folder):
        self.folder, self.seconds = folder, Counter()
        self.failed, self.skipped = set(), set()
        lines, paths = str(folder / "lines"), os.environ["PYTHONPATH"]
        folders = tuple(paths.split(os.pathsep))
        started = FOLLOWED.format(
            tools=str(Path(__file__).parent), lines=lines, folders=folders
        )
        (folder / "sitecustomize.py").write_text(started)
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{paths}"
        self.begin = follow(lines, folders)

    def pytest_runtest_logstart(self, nodeid):
        self.begin(nodeid)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)

    def pytest_sessionfinish(self):
        passed = {
            test: round(seconds, 3)
            for test, seconds in self.seconds.items()
            if test not in self.failed | self.skipped
        }
        said = {"passed": passed, "failed": sorted(self.failed)}
        (self.folder / "report.json").write_text(json.dumps(said))


class Chosen:
    """A plugin for pytest: these tests in this order, and none that hangs.

    tests: how many seconds each takes. The alarm ends the process.
    """

    def __init__(self, tests):
        self.tests = tests
        self.rank = {test: number for number, test in enumerate(tests)}
        signal.alarm(PATIENCE)  # for the imports

    def pytest_runtest_logstart(self, nodeid):
        signal.alarm(PATIENCE + math.ceil(3 * self.tests[nodeid]))

    def pytest_collection_modifyitems(self, items):
        items[:] = sorted(
            (item for item in items if item.nodeid in self.rank),
            key=lambda item: self.rank[item.nodeid],
        )


def test_files(root, faulty):
    """The tests of rooms: of one on top, if a file of `faulty` is in it."""
    asked = {room(file) for file in faulty}
    asked |= {room(file) for file in sources(root)} - {*ON_TOP}
    return [
        str(path.relative_to(root))
        for path in sorted(root.glob("tests/*/test_*.py"))
        if path.parent.name in asked
    ]


def state(root, file):
    """A hash of all that decides what the tests of a file execute."""
    paths = [path for n in IMPORTED for path in (root / n).rglob("*.py")]
    for path in (root / file).parent.glob("*.py"):
        if not path.name.startswith("test_"):
            paths.append(path)
    digest = hashlib.sha256((root / file).read_bytes())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def traced(workers, root, kept, faulty):
    """What the tests execute: {file of tests: what `Worker.trace` gives}.

    What is in the file `kept` is not traced again while its state is the same.
    """
    known = json.loads(kept.read_text()) if kept.exists() else {}
    states = {file: state(root, file) for file in test_files(root, faulty)}
    traces = {
        file: known[file]
        for file, now in states.items()
        if known.get(file, {}).get("state") == now
    }
    new = [file for file in states if file not in traces]

    def trace(worker, file):
        return file, worker.trace(file) | {"state": states[file]}

    for file, found in workers.map(trace, new):
        traces[file] = found
        passed, failed = found["passed"], found["failed"]
        said = f"{file}: {len(passed)} tests, {sum(passed.values()):.0f} s"
        print(said, *failed and ["fail without a fault:", *failed], flush=True)
        kept.write_text(json.dumps(known | traces))
    return traces


def selected(fault, traces):
    """The tests of a fault, in their order: {test: its seconds}.

    First the file of the same name, then the room's, fast tests first. Then,
    a minute each, what might notice it, too: others of these files, which
    share fixtures and caches, and other rooms' tests.
    """
    path = Path(fault.file)
    named = f"test_{path.stem.strip('_')}.py"
    near, shared, others = [], [], []
    for file, trace in traces.items():
        lines = trace["lines"].get(fault.file, {})
        by = set()
        for line in range(fault.first, fault.last + 1):
            by.update(lines.get(str(line), ()))
        here = Path(file).parent.name == room(fault.file)
        other = Path(file).name != named
        for number, (test, seconds) in enumerate(trace["passed"].items()):
            if by and seconds <= SLOW:
                if here and by & {number, IMPORT}:
                    near.append((other, file, seconds, test))
                elif here:
                    shared.append((seconds, test))
                elif number in by:
                    others.append((seconds, test))
    tests = {test: seconds for _, _, seconds, test in sorted(near)}
    for group in (shared, others):
        left = FAR
        for seconds, test in sorted(group):
            left -= seconds
            if left >= 0:
                tests[test] = seconds
    return tests


# Processes that run tests ---------------------------------------------------


class Worker:
    """A process with a copy of the tree; it forks for each run of tests."""

    def __init__(self, folder, root, preloaded):
        self.folder, self.root = folder, folder / "tree"
        skipped = shutil.ignore_patterns(".*", "_build", "__pycache__")
        shutil.copytree(root, self.root, ignore=skipped)
        paths = os.pathsep.join(str(self.root / name) for name in IMPORTED)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *preloaded],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self):
        self.process.stdin.close()
        self.process.wait()

    def ask(self, **job):
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def trace(self, file):
        """Run the tests of a file; gives "passed", "failed" and "lines"."""
        with tempfile.TemporaryDirectory(dir=self.folder) as record:
            self.ask(files=[file], record=record)
            record = Path(record)
            said = json.loads((record / "report.json").read_text())
            number = {test: n for n, test in enumerate(said["passed"])}
            number[""] = IMPORT
            lines = defaultdict(lambda: defaultdict(set))
            for row in (record / "lines").read_text().splitlines():
                test, path, line = json.loads(row)
                if test in number:
                    path = str(Path(path).relative_to(self.root))
                    lines[path][str(line)].add(number[test])
        said["lines"] = {
            path: {line: sorted(by) for line, by in of_path.items()}
            for path, of_path in lines.items()
        }
        return said

    def survives(self, fault, source, tests):
        """Whether all these tests pass with the fault."""
        path = self.root / fault.file
        files = list(dict.fromkeys(test.split("::")[0] for test in tests))
        try:
            write(path, fault.planted(source))
            code = self.ask(files=files, tests=tests)
            return code in (0, 5)  # 5: none has its old name any more
        finally:
            write(path, source)


TICKS = itertools.count(1)


def write(path, source):
    """Write a module; no older bytecode is taken for it."""
    path.write_bytes(source)
    tick = next(TICKS)
    os.utime(path, (tick, tick))


class Workers:
    """Some workers, of whom each is asked by one thread at a time."""

    def __init__(self, number, root, preloaded):
        self.made = number, root, preloaded
        self.free, self.stack = SimpleQueue(), ExitStack()

    def __enter__(self):
        number, *rest = self.made
        for _ in range(number):
            folder = self.stack.enter_context(tempfile.TemporaryDirectory())
            worker = Worker(Path(folder).resolve(), *rest)
            self.stack.callback(worker.close)
            self.free.put(worker)
        return self

    def __exit__(self, *error):
        self.stack.close()

    def map(self, function, items):
        """`function(worker, item)` for each item, in the order they end."""

        def run(item):
            worker = self.free.get()
            try:
                return function(worker, item)
            finally:
                self.free.put(worker)

        with ThreadPoolExecutor(self.made[0]) as pool:
            runs = [pool.submit(run, item) for item in items]
            for done in as_completed(runs):
                yield done.result()


def serve(preloaded):
    """Read runs from stdin; write the exit code of each."""
    for name in preloaded:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    for job in map(json.loads, sys.stdin):
        print(json.dumps(run_apart(**job)), flush=True)


def run_apart(**job):
    """The exit code of `run_tests` in a process of its own."""
    child = os.fork()
    if child == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        try:
            code = run_tests(**job)
        except BaseException:
            code = 1
        os._exit(code)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):  # what it started and left behind
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status)


def run_tests(files, tests=None, record=None):
    import pytest

    plugin = Recorder(Path(record)) if record else Chosen(tests)
    stop = () if record else ("-x",)
    return pytest.main(
        ["-q", *stop, "-p", "no:cacheprovider", *files], plugins=[plugin]
    )


# The command ----------------------------------------------------------------


def report(fault, source, tests):
    """Print a fault that survived, as a difference."""
    number, gone, come = fault.change(source)
    unrun = "" if tests else ", which no test executes"
    print(f"{fault.file}:{number}{unrun}")
    for sign, lines in (("-", gone), ("+", come)):
        print(*(f"  {sign} {line.strip()}" for line in lines), sep="\n")
    print(flush=True)


def equivalents(file):
    """What `mutate.toml` says changes nothing, as keys of faults."""
    listed = tomllib.loads(file.read_text()) if file.exists() else {}
    return {
        (entry["file"], entry["was"], entry["becomes"])
        for entry in listed.get("equivalent", ())
    }


def main(args=None, root=ROOT, preloaded=PRELOADED):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of the package; else all")
    parser.add_argument("-n", type=int, help="how many faults; else all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--again", action="store_true", help="those that survived last time"
    )
    asked = parser.parse_args(args)
    start = time.monotonic()
    kept = root / "_build/mutate"
    kept.mkdir(parents=True, exist_ok=True)
    survivors = kept / "survivors.json"
    texts = sources(root, asked.files)
    sites = [s for f, text in texts.items() for s in Sites(f, text).found]
    if asked.again:
        keys = {tuple(key) for key in json.loads(survivors.read_text())}
        every = [fault for site in sites for fault in site]
        faults = [f for f in every if f.key(texts[f.file]) in keys]
    else:
        faults = sample(sites, asked.n, asked.seed)
    same = equivalents(root / "tools/mutate.toml")
    skipped = [f for f in faults if f.key(texts[f.file]) in same]
    faults = [f for f in faults if f not in skipped]

    left = []
    with Workers(asked.workers, root, preloaded) as workers:
        traces = traced(workers, root, kept / "traces.json", texts)

        def survives(worker, fault):
            tests = selected(fault, traces)
            source = texts[fault.file]
            survived = not tests or worker.survives(fault, source, tests)
            return fault, tests, survived

        for fault, tests, survived in workers.map(survives, faults):
            print(".", end="", file=sys.stderr, flush=True)
            if survived:
                left.append(fault.key(texts[fault.file]))
                report(fault, texts[fault.file], tests)
    survivors.write_text(json.dumps(sorted(left), indent=1))
    print(
        f"{len(faults)} faults of {len(sites)} places in "
        f"{time.monotonic() - start:.0f} s: {len(faults) - len(left)} caught, "
        f"{len(left)} survived; {len(skipped)} that change nothing not tried"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        main()
