"""What a record says of the machine, and what it does not."""

import getpass
import json
import os
import platform
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from membudget_experiments import machine
from membudget_experiments.checking import SCHEMA

FIELDS = json.loads(SCHEMA.read_text("utf-8"))["properties"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git(folder, *command):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    done = subprocess.run(
        ["git", "-C", folder, *identity, *command],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of the experiments, in a repository of its own."""
    here = tmp_path / "clone/experiments/membudget_experiments"
    here.mkdir(parents=True)
    room = tmp_path / "clone" / machine.RECORDS_IN_SOURCES
    room.mkdir(parents=True)
    monkeypatch.setattr(machine, "HERE", here)
    monkeypatch.delenv(machine.COMMIT, raising=False)
    (here / "machine.py").write_text("x = 1\n")
    (room.parent / "record.py").write_text("x = 1\n")
    git(tmp_path, "init", "-q", "clone")
    return here


def commit_all(package):
    git(package, "add", ":/")
    git(package, "commit", "-q", "-m", "x")
    return git(package, "rev-parse", "HEAD")


def test_a_clean_tree_and_what_is_no_change(package):
    head = commit_all(package)
    assert machine.commit() == (head, True)
    (package.parents[1] / machine.RECORDS_IN_SOURCES / "x.json").write_text(
        "{}"
    )
    (package.parents[1] / "notes.txt").write_text("x")
    assert machine.commit() == (head, True)


@pytest.mark.parametrize(
    ("file", "staged"),
    [
        ("machine.py", False),
        ("../../src/membudget/records/record.py", False),
        ("new.py", True),
    ],
)
def test_a_changed_tree(package, file, staged):
    head = commit_all(package)
    (package / file).write_text("x = 2\n")
    if staged:
        git(package, "add", ":/")
    assert machine.commit() == (head, False)


def test_a_repository_that_does_not_hold_the_package(package):
    assert machine.commit() == (None, None)  # nothing was committed
    (package / "machine.py").rename(package / "other.py")
    commit_all(package)
    (package / "other.py").rename(package / "machine.py")
    assert machine.commit() == (None, None)


def test_the_commit_is_stated_where_there_is_no_git(package, monkeypatch):
    head = commit_all(package)
    monkeypatch.setenv(machine.COMMIT, COMMIT)
    assert machine.commit() == (head, True)  # git knows better
    shutil.rmtree(package.parents[1] / ".git")
    assert machine.commit() == (COMMIT, None)
    monkeypatch.setenv("PATH", "")
    assert machine.commit() == (COMMIT, None)
    monkeypatch.setenv(machine.COMMIT, "")
    assert machine.commit() == (None, None)


@pytest.mark.parametrize(
    ("noted", "commit"),
    [
        (
            {"url": "x", "vcs_info": {"vcs": "git", "commit_id": COMMIT}},
            COMMIT,
        ),
        ({"url": "x", "dir_info": {"editable": True}}, None),
        (None, None),
    ],
)
def test_the_commit_of_a_package_that_pip_took_from_a_repository(
    package, monkeypatch, noted, commit
):
    text = None if noted is None else json.dumps(noted)
    found = SimpleNamespace(read_text={"direct_url.json": text}.get)
    monkeypatch.setattr(
        machine, "distribution", {"membudget-experiments": found}.get
    )
    assert machine.commit() == (commit, None)


def test_the_size_of_a_device(monkeypatch):
    assert machine.size_for(torch.device("cpu")) == "tiny"
    for total, size in ((15_095 << 20, "t4"), (24 << 30, "large")):
        card = SimpleNamespace(total_memory=total)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device, card=card: card
        )
        assert machine.size_for(torch.device("cuda")) == size


@pytest.mark.parametrize("stated", ["main", COMMIT[:7], COMMIT.upper()])
def test_a_stated_commit_that_is_none(package, monkeypatch, stated):
    monkeypatch.setenv(machine.COMMIT, stated)
    with pytest.raises(ValueError, match=f"{stated!r}: set it to the output"):
        machine.commit()


def test_a_cpu():
    device = machine.describe_device(torch.device("cpu"))
    assert set(device) == set(FIELDS["device"]["properties"])
    assert device["kind"] == "cpu"
    assert device["memory"] > 1 << 28
    assert device["threads"] == torch.get_num_threads()
    assert device["cuda"] is device["driver"] is None


def test_the_processors_name(monkeypatch):
    def name(text, **outputs):
        monkeypatch.setattr(machine.Path, "read_text", lambda self: text)
        monkeypatch.setattr(machine, "_output", lambda *c: outputs.get(c[0]))
        return machine._processor()

    text = "processor\t: 0\nmodel name\t: AMD  EPYC 7\nmodel name: B\n"
    assert name(text, sysctl="Apple M3") == "AMD EPYC 7"
    assert name("CPU part: 0xd0c\n", sysctl="Apple M3") == "Apple M3"
    other = platform.processor() or platform.machine()
    assert name("CPU part: 0xd0c\n") == other

    def no_file(self):
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", no_file)
    assert machine._processor() == other


def test_a_gpu(monkeypatch):
    properties = SimpleNamespace(
        name="Tesla T4", total_memory=15828320256, major=7, minor=5
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties
    )
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "_output", lambda *command: "550.1\n550.1")
    assert machine.describe_device(torch.device("cuda:0")) == {
        "kind": "cuda",
        "name": "Tesla T4",
        "memory": 15828320256,
        "capability": "7.5",
        "driver": "550.1",
        "cuda": "12.8",
        "threads": None,
    }
    monkeypatch.setattr(machine, "_output", lambda *command: None)
    assert machine.describe_device(torch.device("cuda"))["driver"] is None


def test_software(monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    software = machine.describe_software()
    assert set(software) == set(FIELDS["software"]["properties"])
    assert software["torch"] == torch.__version__
    assert software["matmul_precision"] == "highest"
    assert software["allocator_settings"] is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert machine.describe_software()["allocator_settings"] == (
        "expandable_segments:True"
    )
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert machine.describe_software()["allocator_settings"] == (
        "backend:native"
    )


def test_a_command_that_fails_or_hangs_says_nothing(monkeypatch):
    assert machine._output("git", "rev-parse", "--verify", "nothing") is None
    assert machine._output("no-such-command") is None

    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired("git", 20)

    monkeypatch.setattr(subprocess, "run", hang)
    assert machine._output("git", "status") is None


def test_nothing_private_is_in_a_description():
    text = json.dumps(
        [
            machine.describe_device(torch.device("cpu")),
            machine.describe_software(),
        ]
    )
    for private in (os.getcwd(), os.path.expanduser("~"), platform.node()):
        assert private not in text
    assert len(getpass.getuser()) < 5 or getpass.getuser() not in text
