"""A widget in JupyterLab: the reader moves a slider and Python sees it."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import nbformat
import pytest
from playwright.sync_api import TimeoutError, expect
from project import PATIENCE, ROOT

SHOW = """\
import json
from pathlib import Path
from membudget.widgets import Accumulation

widget = Accumulation()
seen = {}
widget.observe(lambda change: seen.update({change.name: change.new}))
widget"""

TELL = 'Path("seen.json").write_text(json.dumps(seen))\nprint("told")'


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """JupyterLab's folder."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def lab(root):
    """A running JupyterLab, alone on this machine; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        f"--ServerApp.root_dir={root}",
        f"--ServerApp.port={port}",
        "--ServerApp.ip=127.0.0.1",
        "--IdentityProvider.token=",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    settings = {
        name: str(root / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    settings["JUPYTERLAB_SETTINGS_DIR"] = str(root / "settings")
    settings["JUPYTERLAB_WORKSPACES_DIR"] = str(root / "workspaces")
    log = (root / "lab.log").open("w")
    server = subprocess.Popen(
        command, stdout=log, stderr=log, env={**os.environ, **settings}
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/api", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=PATIENCE)
        log.close()


def wait_for(address, server):
    """Wait until the server answers."""
    for _ in range(PATIENCE * 4):
        assert server.poll() is None, "JupyterLab did not start"
        try:
            return urllib.request.urlopen(address, timeout=PATIENCE).close()
        except OSError:
            time.sleep(0.25)
    raise AssertionError("JupyterLab does not answer")


def run(editor, output):
    """Run a cell until its output is there.

    A cell that is at work is left alone: to run it again would throw away what
    it shows, so one that takes longer than a try would never show anything.
    """
    working = editor.page.locator(".jp-InputPrompt", has_text="[*]")
    for _ in range(PATIENCE // 5):
        if not working.count():
            editor.press("Shift+Enter")
        try:
            return output.wait_for(timeout=5_000)
        except TimeoutError:
            continue
    raise AssertionError("The cell shows no output")


@pytest.fixture
def folder(root, request):
    """Of the test alone: a notebook elsewhere has a kernel of its own."""
    path = root / request.node.name
    path.mkdir()
    return path


@contextmanager
def opened(browser, lab, folder, *sources):
    """A notebook with these cells in JupyterLab: the page and its editors.

    It stands in the folder, alone in a workspace of the folder's name.
    """
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Py"}
    nbformat.write(notebook, folder / "widget.ipynb")
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        place = f"{folder.name}/tree/{folder.name}/widget.ipynb"
        page.goto(f"{lab}/lab/workspaces/{place}")
        # The page says idle before the kernel is there: run until it ran.
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        yield page, page.locator(".jp-Notebook .jp-CodeCell .cm-content")


@pytest.mark.few(0)
def test_python_sees_a_slider_move(browser, lab, folder):
    with opened(browser, lab, folder, SHOW, TELL) as (page, editors):
        slider = page.locator(".jp-OutputArea input[type=range]").first
        run(editors.nth(0), slider)
        slider.press("ArrowRight")
        value = slider.evaluate("slider => slider.value")
        run(editors.nth(1), page.get_by_text("told", exact=True))

    seen = json.loads((folder / "seen.json").read_text())
    assert float(value) in seen.values(), f"{value} not in {seen}"


@pytest.mark.few(0)  # takes long: nbval runs the cells
def test_the_slider_of_lab_2_runs_a_real_step(browser, lab, folder):
    """The lab's own cells, up to the widget: its sweep, then another split."""
    notebook = nbformat.read(ROOT / "labs/lab2_checkpointing.ipynb", 4)
    sources = [c.source for c in notebook.cells if c.cell_type == "code"]
    end = next(i for i, s in enumerate(sources) if s.endswith("\nwidget"))
    cell = "\n".join(sources[: end + 1])
    with opened(browser, lab, folder, cell) as (page, editors):
        slider = page.get_by_label("Segments k")
        run(editors.nth(0), slider)
        expect.set_options(timeout=1000 * PATIENCE)  # steps run in between
        points = page.locator(".jp-OutputArea .mb-measured")
        expect(points).to_have_count(21)
        page.get_by_text("More settings").click()
        page.get_by_label("Split").select_option("pytorch")
        expect(points).to_have_count(1)
        slider.press("ArrowRight")
        said = page.locator(".jp-OutputArea p[aria-live]")
        expect(said).to_contain_text(re.compile("in 5 segments.*Measured"))
        expect(points).to_have_count(2)
