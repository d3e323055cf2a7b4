"""What the workflows may do, and whose code they run."""

import re

import pytest
from project import ROOT, read_yaml

WORKFLOWS = ROOT / ".github/workflows"
PATHS = sorted(WORKFLOWS.iterdir())
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_leave_no_credentials(path):
    for used in re.findall(r"uses: (.*)", path.read_text("utf-8")):
        assert used.startswith("./") or PINNED.fullmatch(used)
    for job in read_yaml(path)["jobs"].values():
        for step in job.get("steps", []):
            if "checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_publishing_waits_for_the_tests_and_what_builds_only_reads():
    jobs = read_yaml(WORKFLOWS / "publish.yml")["jobs"]
    assert "test" in jobs["build"]["needs"]
    assert jobs["notebooks"]["needs"] == "build"
    assert jobs["deploy"]["needs"] == "notebooks"
    for name, job in jobs.items():
        rights = job["permissions"]
        if "checkout" in str(job) or job.get("uses"):
            assert rights == {"contents": "read"}, name
        elif "write" in rights.values():
            assert "make " not in str(job) and "python" not in str(job)
