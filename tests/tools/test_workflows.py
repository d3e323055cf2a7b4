"""What the workflows may do, and whose code they run."""

import os
import re
import subprocess

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


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_who_may_write_has_nothing_of_the_project_to_run(path):
    workflow = read_yaml(path)
    for name, job in workflow["jobs"].items():
        rights = job.get("permissions", workflow["permissions"])
        if "write" in rights.values():
            assert "checkout" not in str(job) and "uses" not in job, name


MEANS = {
    "&&": "and",
    "||": "or",
    "!cancelled()": "True",
    "github.ref == 'refs/heads/main'": "True",
    "needs.site.outputs.address": "address",
}
"""Of what stands in conditions, in Python."""


def outcomes(jobs, address, failing=""):
    """The result of each job, by GitHub's rules, if one of them fails."""
    results = {}
    for name, job in jobs.items():  # which stand in order
        needs = (
            [job["needs"]]
            if isinstance(job.get("needs"), str)
            else (job.get("needs", []))
        )
        condition = job.get("if", "True")
        runs = "cancelled()" in condition or all(
            results[other] == "success" for other in needs
        )
        for said, means in MEANS.items():
            condition = condition.replace(said, means)
        condition = re.sub(
            r"needs\.(\w+)\.result", r"results['\1']", condition
        )
        known = {"results": results, "address": address}
        runs = runs and eval(condition, known)
        result = "failure" if name == failing else "success"
        results[name] = result if runs else "skipped"
    return results


SITE = "https://o.github.io/n"


@pytest.mark.parametrize(
    ("address", "failing", "pushed", "deployed"),
    [
        (SITE, "", True, True),
        ("", "", True, False),  # without Pages
        (SITE, "deploy", False, False),  # their wheel is not there
        (SITE, "build", False, False),
        (SITE, "test", False, False),
        ("", "build", False, False),
        ("", "test", False, False),
    ],
)
def test_who_publishes_what(address, failing, pushed, deployed):
    jobs = read_yaml(WORKFLOWS / "publish.yml")["jobs"]
    found = outcomes(jobs, address, failing)
    assert (found["notebooks"] == "success") is pushed
    assert (found["deploy"] == "success") is deployed


def test_without_pages_the_site_has_no_address_and_nothing_fails():
    jobs = read_yaml(WORKFLOWS / "publish.yml")["jobs"]
    pages, warning = jobs["site"]["steps"]
    assert pages["continue-on-error"] is True
    assert warning["if"] == f"steps.{pages['id']}.outcome == 'failure'"
    uploads = [
        step.get("if", "")
        for step in jobs["build"]["steps"]
        if "upload" in step.get("uses", "")
    ]
    assert uploads == [jobs["deploy"]["if"], ""]


def test_no_robot_moves_what_the_design_fixes():
    actions, pip = read_yaml(".github/dependabot.yml")["updates"]
    ignored = {rule.pop("dependency-name"): rule for rule in pip["ignore"]}
    assert ignored == {"torch": {}, "jupyter-book": {"versions": [">=2"]}}
    assert all((ROOT / path).is_file() for path in pip["exclude-paths"])
    assert actions["schedule"] == pip["schedule"] == {"interval": "weekly"}


GH = """\
#!/bin/sh
echo "$1 $2" >> said
case "$1 $2" in
"repo view") echo $ENABLED ;;
"issue list") echo $ISSUE ;;
esac
"""


@pytest.mark.parametrize(
    ("results", "issue", "said"),
    [
        ("failure", "", ["issue list", "issue create"]),
        ("cancelled", "7", ["issue list", "issue comment"]),
        ("success", "7", ["issue list", "issue close"]),
        ("success", "", ["issue list"]),
        ("failure", None, []),
    ],
)
def test_the_weekly_report(tmp_path, results, issue, said):
    """`None` for an issue: the repository has none at all."""
    gh = tmp_path / "gh"
    gh.write_text(GH)
    gh.chmod(0o755)
    (step,) = read_yaml(WORKFLOWS / "weekly.yml")["jobs"]["report"]["steps"]
    environment = {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "ENABLED": "false" if issue is None else "true",
        "ISSUE": issue or "",
        "RESULTS": f"versions: success, newest: {results}",
    }
    command = ["bash", "-e", "-c", step["run"]]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "said").read_text().splitlines() == ["repo view", *said]
