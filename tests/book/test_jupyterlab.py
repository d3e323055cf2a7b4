"""A widget in JupyterLab: the reader moves a slider and Python sees it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import nbformat
import pytest
from playwright.sync_api import TimeoutError

SHOW = """\
import json
from pathlib import Path
from membudget.widgets import Accumulation

widget = Accumulation()
seen = {}
widget.observe(lambda change: seen.update({change.name: change.new}))
widget"""

TELL = 'Path("seen.json").write_text(json.dumps(seen))\nprint("told")'


@pytest.fixture
def lab(tmp_path):
    """A running JupyterLab, alone on this machine; gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        f"--ServerApp.root_dir={tmp_path}",
        f"--ServerApp.port={port}",
        "--ServerApp.ip=127.0.0.1",
        "--IdentityProvider.token=",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    settings = {
        name: str(tmp_path / name)
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    }
    settings["JUPYTERLAB_SETTINGS_DIR"] = str(tmp_path / "settings")
    settings["JUPYTERLAB_WORKSPACES_DIR"] = str(tmp_path / "workspaces")
    log = (tmp_path / "lab.log").open("w")
    server = subprocess.Popen(
        command, stdout=log, stderr=log, env={**os.environ, **settings}
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/api", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)
        log.close()


def wait_for(address, server, seconds=40):
    """Wait until the server answers."""
    for _ in range(seconds * 4):
        assert server.poll() is None, "JupyterLab did not start"
        try:
            return urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.25)
    raise AssertionError("JupyterLab does not answer")


def run(editor, output):
    """Run a cell until its output is there."""
    for _ in range(8):
        editor.press("Shift+Enter")
        try:
            return output.wait_for(timeout=5_000)
        except TimeoutError:
            continue
    raise AssertionError("The cell shows no output")


def test_python_sees_a_slider_move(browser, lab, tmp_path):
    cells = [nbformat.v4.new_code_cell(source) for source in (SHOW, TELL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Py"}
    nbformat.write(notebook, tmp_path / "widget.ipynb")

    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(40_000)
        page.goto(f"{lab}/lab/tree/widget.ipynb")
        # The page says idle before the kernel is there: run until it ran.
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        editors = page.locator(".jp-Notebook .jp-CodeCell .cm-content")
        slider = page.locator(".jp-OutputArea input[type=range]").first
        run(editors.nth(0), slider)
        slider.press("ArrowRight")
        value = slider.evaluate("slider => slider.value")
        run(editors.nth(1), page.get_by_text("told", exact=True))

    seen = json.loads((tmp_path / "seen.json").read_text())
    assert float(value) in seen.values(), f"{value} not in {seen}"
