"""The tool that plants faults, on a package of one function."""

import mutate
from project import ROOT

SOURCE = '''"""A room."""


def share(total: int, ranks: int = 1) -> int:
    """Bytes of a rank; 1 more does not matter here."""
    if total < 0:
        raise ValueError(f"total is {total - 0}: give 0 or more")
    return total // ranks
'''

TEST = """import subprocess
import sys

from toy.ledger.share import share


def test_share():
    assert share(6, 2) == 3


def test_in_a_process():
    code = "from toy.ledger.share import share; print(share(3))"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, text=True) == "3\\n"
"""


REFUSED = """import pytest
from toy.ledger.share import share


def test_refused():
    with pytest.raises(ValueError):
        share(-1)
"""

NOTHING = """[[equivalent]]
file = "src/toy/ledger/share.py"
was = "if total < 0:"
becomes = "if total <= 0:"
why = "nobody trains nothing"
"""


FILES = {
    "source": "src/toy/ledger/share.py",
    "test": "tests/ledger/test_share.py",
    "refused": "tests/ledger/test_refused.py",
    "nothing": "tools/mutate.toml",
    "settings": "pytest.ini",
}


def test_what_no_test_notices_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def mutated(*args, **files):
        for name, text in files.items():
            path = tmp_path / FILES[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        mutate.main(args, tmp_path, preloaded=["pytest"])
        return capsys.readouterr().out

    report = mutated(source=SOURCE, test=TEST, settings="[pytest]")
    survived = [
        "6\n  - if total < 0:\n  + if total <= 0:",
        "6\n  - if total < 0:\n  + if total < -1:",
        "7, which no test executes\n  - raise ValueError",
    ]
    assert all(f"share.py:{fault}" in report for fault in survived)
    assert "7 faults of 7 places" in report
    assert "4 caught, 3 survived; 0 " in report
    assert (tmp_path / FILES["source"]).read_text() == SOURCE

    report = mutated("--again", refused=REFUSED, nothing=NOTHING)
    assert "2 caught, 0 survived; 1 " in report


def test_faults_that_change_nothing_could_still_be_planted():
    for file, was, _ in mutate.equivalents(ROOT / "tools/mutate.toml"):
        lines = (ROOT / file).read_text("utf-8").splitlines()
        assert was in " ".join(map(str.strip, lines)), file
