"""The console command: its table, its exit codes, its errors."""

import json
import subprocess
import sys
import tomllib
from importlib import import_module

import pytest
from project import ROOT

from membudget import command
from membudget.cards import CARDS, GIB


def test_the_script_of_the_package_is_the_function():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    module, _, name = tomllib.loads(text)["project"]["scripts"][
        "membudget"
    ].partition(":")
    assert getattr(import_module(module), name) is command.main


def test_the_module_is_the_command_and_imports_no_torch():
    code = (
        "import runpy, sys; sys.argv = ['membudget', 'cards']\n"
        "try: runpy.run_module('membudget', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 + len(CARDS)


def test_the_cards_are_those_of_the_package(capsys):
    assert command.main(["cards", "--json"]) == command.Code.OK
    cards = {c["name"]: c for c in json.loads(capsys.readouterr().out)}
    assert list(cards) == list(CARDS)
    assert command.main(["cards"]) == command.Code.OK
    _, *lines = capsys.readouterr().out.splitlines()
    for line, (name, card) in zip(lines, CARDS.items(), strict=True):
        assert cards[name]["memory"] == card.capacity
        *_, memory, usable, native = line.split()
        assert line.startswith(name)
        assert float(memory) == pytest.approx(card.capacity / GIB, abs=0.005)
        assert cards[name]["usable"] == card.usable
        assert float(usable) == pytest.approx(card.usable / GIB, abs=0.005)
        assert (native == "native") == cards[name]["bf16"] == card.bf16


@pytest.mark.parametrize(
    "arguments", [[], ["cake"], ["cards", "--cake"], ["cards", "T4"]]
)
def test_wrong_use_is_one_sentence_on_stderr(arguments, capsys):
    assert command.main(arguments) == command.Code.WRONG
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("membudget: ") and error.count("\n") == 1
    assert "--help" in error


def test_every_subcommand_has_a_line_of_help(capsys):
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    assert end.value.code == command.Code.OK
    told = capsys.readouterr().out
    for name, module in command.COMMANDS.items():
        assert f"{name} " in told
        assert module.__doc__.partition("\n")[0].split()[0] in told
