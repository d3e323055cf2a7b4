"""The page that lists the records, and how they travel."""

import importlib.util
import shutil
import sys
import tomllib
from contextlib import contextmanager

import pytest
from docutils import nodes
from project import ROOT
from records_helpers import FILE, NAME, good, on_gpu, place

from membudget.records import record as records

EXTENSION = ROOT / "book/_ext/memory_budget.py"


@pytest.fixture(scope="module")
def extension():
    """The book's extension, loaded anew where there is no torch."""
    spec = importlib.util.spec_from_file_location("extension", EXTENSION)
    module = importlib.util.module_from_spec(spec)
    with without_torch():
        spec.loader.exec_module(module)
    return module


@contextmanager
def without_torch():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("torch", "numpy", "membudget"):
            patch.setitem(sys.modules, name, None)
        yield


@pytest.fixture
def folder(extension, tmp_path, monkeypatch):
    """A folder of records in place of the committed one."""
    for function in (extension.RECORD.load, extension.RECORD.missing):
        *others, last = function.__defaults__
        assert last == records.RECORDS
        monkeypatch.setattr(function, "__defaults__", (*others, tmp_path))
    return tmp_path


def page(extension):
    """The list as the directive makes it: experiment to its lines."""
    directive = object.__new__(extension.RecordsDirective)
    return {
        item[0].astext(): [
            entry.astext() for entry in item.findall(nodes.list_item)
        ]
        for item in directive.experiments().findall(nodes.definition_list_item)
    }


def test_the_committed_records_and_the_missing_ones_are_listed(extension):
    with without_torch():
        found = page(extension)
    assert list(found) == list(records.catalogue())
    for name, lines in found.items():
        files = sorted(records.RECORDS.glob(f"{name}.*.json"))
        assert sorted(line.split(":")[0] for line in lines[: len(files)]) == [
            path.name for path in files
        ]
        missing = records.missing(name)
        assert lines[len(files) :] == ([missing] if missing else [])


def test_a_record_is_listed_with_its_provenance(extension, folder):
    place(folder, good())
    place(folder, on_gpu("large"))
    assert page(extension)[NAME] == [
        f"{FILE}: A CPU (8 cores) @ 3.0, 8.0 GiB, 1 thread, torch "
        "2.13.0+cpu. Size tiny, 2026-03-01, commit 0123456, measured with "
        "an earlier version.",
        f"{NAME}.large.nvidia-h200.json: NVIDIA H200, 140.0 GiB, driver "
        "580.1, torch 2.13.0+cpu, CUDA 13.0. Size large, 2026-03-01, commit "
        "0123456, measured with an earlier version.",
        "Not measured yet: t4, which needs a GPU.",
    ]


def test_a_bad_record_stops_the_build(extension, folder):
    path = place(folder, good())
    path.write_text(path.read_text("utf-8").replace("0.25", "0.24"), "utf-8")
    directive = object.__new__(extension.RecordsDirective)
    directive.error = lambda text: RuntimeError(text)
    with pytest.raises(RuntimeError, match=f"record {FILE} is bad: its dig"):
        directive.run()


def test_a_changed_record_or_experiment_rewrites_the_pages(
    extension, tmp_path, monkeypatch
):
    compiled = shutil.ignore_patterns("__pycache__")  # meanwhile, perhaps
    copy = tmp_path / "copy"
    shutil.copytree(extension.RECORDS, copy, ignore=compiled)
    before = extension.records_digest()
    monkeypatch.setattr(extension, "RECORDS", copy)
    assert extension.records_digest() == before
    record = next(copy.glob("json/*.json"))
    for path in (record, copy / "catalogue.json", copy / "json/new.json"):
        with path.open("a") as file:
            file.write(" ")
        after = extension.records_digest()
        assert after != before
        before = after


def test_records_are_installed_with_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["membudget"]
    package = records.HERE.parent
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert {*records.RECORDS.glob("*.json"), records.CATALOGUE} <= shipped


def test_the_page_names_the_commands():
    text = (ROOT / "book/measurements.md").read_text("utf-8")
    assert "```{mb-records}" in text
    for command in ("list", "run --size t4 --out records", "check records"):
        assert f"python -m membudget_experiments {command}\n" in text
