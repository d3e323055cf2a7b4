"""Measure the budgets and print them beside their limits.

Nothing fails here: timings depend on the machine.
"""

import re
import shutil
import subprocess
import sys
import time
from statistics import median

import browser as browsers
import prose
import site_checks as checks
import torch
import torch.nn.functional as F
from project import ROOT, SITE, notebooks, pages

from membudget import ledger
from membudget.measuring import PeakTracker
from membudget.models import GPT

LONGER = {
    "lab4_fsdp": 60,
    "lab8_parallel": 60,
    "lab5_capstone": 60,
    "lab6_vla": 60,
}
"""Seconds for notebooks that start many processes, or train."""
PAGE = {"words": 3200, "code cells": 28, "lines of code": 260}
"""Of a chapter or a lab: about an hour."""
DEEPER = {"words": 2400, "code cells": 21, "lines of code": 195}
"""Of a page that goes deeper: at most three quarters of it."""
CODE = {".py", ".mjs", ".css"}
# A fresh Python's ledger of a model of 8 billion parameters: the seconds of
# its parts, and the real memory of the process when it has both.
LARGE_LEDGER = """
import psutil
import time
from membudget.ledger import LLAMA3_8B, predict, states
def timed(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
built = timed(lambda: states(LLAMA3_8B.build(), "autocast"))
predicted = timed(lambda: predict(LLAMA3_8B, 1, 8192, recipe="autocast"))
print(built, predicted, psutil.Process().memory_info().rss)
"""
# The time from the start of the page to the first widget's first change of
# what is shown, with the slider moved as soon as it exists.
FIRST_REACTION = """
new Promise((resolve) => {
  const all = { subtree: true, childList: true, attributes: true };
  const appeared = new MutationObserver(() => {
    const slider = document.querySelector(".mb-widget input[type=range]");
    if (!slider) return;
    appeared.disconnect();
    const reacted = new MutationObserver(() => resolve(performance.now()));
    reacted.observe(slider.closest(".mb-widget"), all);
    slider.stepUp();
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  });
  appeared.observe(document, all);
})
"""
# The median time from an input to the picture drawn and laid out, over 50
# inputs. Widgets draw in a microtask, so one is waited for.
INPUT_WORK = """
(async () => {
  const slider = document.querySelector(".mb-widget input[type=range]");
  const times = [];
  for (let i = 0; i < 50; i++) {
    const start = performance.now();
    i % 2 ? slider.stepDown() : slider.stepUp();
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    await Promise.resolve();
    document.body.getBoundingClientRect();
    times.push(performance.now() - start);
  }
  return times.sort((a, b) => a - b)[25];
})()
"""


def row(what, value, limit, unit):
    """Print one line of the table."""
    mark = "" if value <= limit else "  over"
    print(f"{what:48}{value:10.1f} {unit:3} (limit {limit:g}){mark}")


def seconds(command):
    """How long a command takes; it must succeed."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\n{command} failed")
    return time.perf_counter() - start


def bench_pages():
    """What a reader has to read."""
    for path in notebooks():
        limits = DEEPER if re.match(r"\d\d[a-z]_", path.name) else PAGE
        for (what, limit), value in zip(
            limits.items(), prose.size(path), strict=True
        ):
            row(f"{path.stem}: {what}", value, limit, "")


def lines(folder):
    """Lines of code in a folder."""
    paths = (path for path in folder.rglob("*") if path.suffix in CODE)
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def bench_lines():
    """The rooms' size, and that of their tests."""
    package, tests = ROOT / "src/membudget", ROOT / "tests"
    for room in sorted(path for path in package.iterdir() if lines(path)):
        own, checked = lines(room), lines(tests / room.name)
        print(f"{room.name:48}{own:8} lines {checked:8} of tests")
    wheel, beside = lines(package), lines(ROOT / "experiments")
    row("lines in the wheel", wheel, 32_000, "")
    row("lines with the experiments", wheel + beside, 37_000, "")
    row("lines of tests", lines(tests), 35_000, "")


def bench_book():
    """Building, and the pages' weight."""
    build = [sys.executable, "tools/build_book.py"]
    shutil.rmtree(SITE.parent, ignore_errors=True)
    row("book: clean build", seconds(build), 60, "s")
    row("book: build without a change", seconds(build), 5, "s")
    for page in pages():
        weight = checks.page_weight(SITE, page) / 1000
        row(f"weight of {page}", weight, checks.MAX_WEIGHT / 1000, "kB")


def count_foreign(page, address):
    """Open a page; how many of its requests go to other hosts."""
    addresses = []
    page.on("request", lambda request: addresses.append(request.url))
    page.goto(address)
    return sum(map(checks.is_foreign, addresses))


def bench_browser():
    """Requests to other hosts and the widgets' reactions."""
    with browsers.launch() as browser:
        foreign = 0
        for name in pages():
            page = browser.new_page()
            page.add_init_script(f"window.reaction = {FIRST_REACTION}")
            foreign += count_foreign(page, (SITE / f"{name}.html").as_uri())
            if page.locator(".mb-widget").count():
                reaction = page.evaluate("window.reaction")
                row(f"widget on {name}: first reaction", reaction, 500, "ms")
                work = page.evaluate(INPUT_WORK)
                row(f"widget on {name}: input to layout", work, 16, "ms")
            page.close()
        row("requests to other hosts", foreign, 0, "")


def bench_notebooks():
    """Each notebook under strict nbval."""
    for path in notebooks():
        command = [sys.executable, "-m", "pytest", "--nbval", "-q", path]
        usual = 15 if path.parent.name == "chapters" else 30
        limit = LONGER.get(path.stem, usual)
        row(f"{path.stem} under nbval", seconds(command), limit, "s")


def bench_tracker():
    """A training step of a 10-block transformer, tracked and not."""
    model = GPT(width=128, depth=10, heads=4, context=128)
    optimizer = torch.optim.Adam(model.parameters())
    tokens = torch.randint(256, (4, 129))

    def step():
        logits = model(tokens[:, :-1]).flatten(0, 1)
        F.cross_entropy(logits, tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def tracked():
        with PeakTracker(model, optimizer, tokens):
            step()

    ratios = []
    for _ in range(15):
        times = []
        for run in (step, tracked):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        ratios.append(times[1] / times[0])
    row("a tracked step against an untracked", median(ratios), 2, "×")


def bench_ledger():
    """The ledger of a large model, and predictions of a step's peak."""
    command = [sys.executable, "-c", LARGE_LEDGER]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    built, predicted, most = map(float, done.stdout.split())
    what = "ledger of an 8 B-shaped model"
    row(what, built + predicted, 2, "s")
    row(f"{what}: real memory", most / 1e6, 500, "MB")
    row("a prediction of its step's peak", predicted, 1, "s")
    with torch.device("meta"):
        model = GPT(depth=12)
        tokens = torch.zeros(4, 128, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters())

    def loss(model, tokens):
        logits = model(tokens[:, :-1]).flatten(0, 1)
        return F.cross_entropy(logits, tokens[:, 1:].flatten())

    start = time.perf_counter()
    ledger.account(model, loss, tokens, optimizer=optimizer)
    used = time.perf_counter() - start
    row("a dry run of a step, 12 blocks", used, 1, "s")


if __name__ == "__main__":
    bench_pages()
    bench_lines()
    bench_tracker()
    bench_ledger()
    bench_book()
    bench_browser()
    bench_notebooks()
