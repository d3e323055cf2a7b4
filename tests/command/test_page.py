"""The page for the reader's own script: what it shows is what comes out."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from project import ROOT

from membudget.command import main
from tests.ledger.real_configs import models

pytest.importorskip("transformers")
pytest.importorskip("peft")

PAGE = (ROOT / "book/your_script.md").read_text("utf-8")
FILES = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.S)
SHOWN = re.findall(r"```console\n\$ (.+?[^\\])\n(.*?)```", PAGE, re.S)
ANY = "…\n"
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the page's scripts, and the configs that it speaks of."""
    folder = tmp_path_factory.mktemp("page")
    for name, text in FILES:
        (folder / name).write_text(text, "utf-8")
    configs = {
        "Qwen2.5-7B": models()["Qwen/Qwen2.5-7B"][0],
        "vit": {"model_type": "vit"},
    }
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def output(command, capfd):
    """What a command prints, on either stream.

    A script that runs out of memory has a process of its own.
    """
    program, *words = shlex.split(command.replace("\\\n", ""))
    if words[0] == "run":
        done = subprocess.run(
            [sys.executable, "-m", program, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            env={**os.environ, **QUIET},
            timeout=300,
        )
        return done.stdout
    if program == "python":
        runpy.run_path(*words, run_name="__main__")
    else:
        assert program == "membudget"
        main(words)
    return "".join(capfd.readouterr())


def pattern(shown):
    """A line ``…`` stands for lines that the page leaves out."""
    parts = map(re.escape, shown.split(ANY))
    return "(?:.*\n)+".join(parts)


def test_a_line_left_out_stands_for_any():
    assert re.fullmatch(pattern("a\n…\nd\n"), "a\nb\nc\nd\n")
    assert not re.fullmatch(pattern("a\n…\nd\n"), "a\nb\nc\nd!\n")
    assert not re.fullmatch(pattern("a.c\n…\n"), "abc\nd\n")


@pytest.mark.skipif(sys.platform != "linux", reason="--limit is Linux'")
@pytest.mark.parametrize(
    ("command", "shown"), SHOWN, ids=[" ".join(c.split()) for c, _ in SHOWN]
)
def test_the_page_shows_what_comes_out(
    command, shown, folder, capfd, monkeypatch
):
    monkeypatch.chdir(folder)
    printed = output(command, capfd)
    assert re.fullmatch(pattern(shown), printed), printed
