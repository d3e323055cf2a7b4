"""Where the course is published: who says so, and what is not believed."""

import subprocess

import address
import pytest

GITHUB = "https://github.com/Owner/a.Name-1"
GROUPS = "https://gitlab.com/group/sub/name"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    """Nobody says anything."""
    for name in "MEMBUDGET_REPOSITORY", "MEMBUDGET_SITE":
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clone(tmp_path):
    """A repository, and a function that gives it an `origin`."""
    git = ["git", "-C", tmp_path]
    subprocess.run([*git, "init", "-q"], check=True)

    def set_origin(url):
        subprocess.run([*git, "remote", "add", "origin", url], check=True)
        return tmp_path

    return set_origin


GOOD = {
    GITHUB: GITHUB,
    f"{GITHUB}/": GITHUB,
    f"{GITHUB}.git": GITHUB,
    f"{GITHUB}.git/": GITHUB,
    "https://GitHub.com/Owner/a.Name-1": GITHUB,
    "git@github.com:Owner/a.Name-1.git": GITHUB,
    "git@github.com:Owner/a.Name-1": GITHUB,
    "ssh://git@github.com/Owner/a.Name-1.git": GITHUB,
    "https://x-access-token:s3cr3t@github.com/Owner/a.Name-1": GITHUB,
    GROUPS: GROUPS,
    "git@gitlab.com:group/sub/name.git": GROUPS,
    "https://bitbucket.org/o/n.git": "https://bitbucket.org/o/n",
}

BAD = [
    "github.com/o/n",
    "git+https://github.com/o/n",
    "http://github.com/o/n",
    "https://github.com/o",
    "https://github.com//n",
    "https://github.com/o/n//",
    "https://github.com/o/..",
    "https://github.com/o/n/tree/main",
    "https://gitlab.com/o/n/-/tree/main",
    "https://github.com/o/n?x=1",
    "https://github.com/o/n#x",
    "https://github.com/o/n@main",
    'https://github.com/o/n"',
    "https://github.com/o/n'",
    "https://github.com/o/n; cmd",
    "https://github.com/o/n;cmd",
    "https://github.com/o/n cmd",
    "https://github.com/o/n\n",
    "https://github.com/o/n\n  x: y",
    "https://github.com/o/$(cmd)",
    "https://github.com/o/{cmd}",
    "https://github.com/o/<cmd>",
    "https://github.com/ö/n",
    "https://github.com/o/n\u212a",
    "https://codeberg.org/o/n",
    "https://github.com.example.com/o/n",
    "https://example.com/github.com/o/n",
    "https://github.com@example.com/o/n",
    "git@example.com:o/n",
    "git@github.com/o/n",
    "https://github.com:o/n",
    "/srv/git/n",
    "file:///srv/git/n",
    "../n",
]


@pytest.mark.parametrize(("given", "wanted"), GOOD.items())
def test_an_address_has_one_form(monkeypatch, clone, given, wanted):
    assert address.repository(clone(given)) == wanted
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", given)
    assert address.repository() == wanted


@pytest.mark.parametrize("given", BAD)
def test_nothing_else_is_an_address(monkeypatch, given):
    monkeypatch.setattr(address, "origin", lambda root: given)
    assert address.repository() == ""
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", given)
    with pytest.raises(ValueError, match=r"give https://github.com/OWNER/NA"):
        address.repository()


def test_an_empty_address_is_none_whatever_the_clone_says(monkeypatch, clone):
    root = clone(GITHUB)
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", "")
    assert address.repository(root) == ""


def test_sources_inside_of_another_repository_are_not_its_clone(clone):
    inside = clone(GITHUB) / "memory-budget"
    inside.mkdir()
    assert address.repository(inside) == ""


def test_another_repository_in_the_environment_is_not_asked(
    monkeypatch, clone, tmp_path_factory
):
    monkeypatch.setenv("GIT_DIR", str(clone(GITHUB) / ".git"))
    assert address.repository(tmp_path_factory.mktemp("other")) == ""


def commit(root):
    """Commit nothing in a clone; gives what starts its git."""
    git = ["git", "-C", root, "-c", "user.name=x", "-c", "user.email=x"]
    command = [*git, "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(command, check=True)
    return git


def test_a_work_tree_of_a_clone_is_one(clone, tmp_path_factory):
    root, tree = clone(GITHUB), tmp_path_factory.mktemp("tree") / "x"
    git = commit(root)
    subprocess.run([*git, "worktree", "add", "-q", tree], check=True)
    assert address.repository(tree) == GITHUB


def test_colab_needs_the_branch_that_is_published(monkeypatch, clone):
    root = clone(GITHUB)
    assert not address.colab(root)
    branch = "refs/remotes/origin/published"
    git = [*commit(root), "update-ref", branch, "HEAD"]
    subprocess.run(git, check=True)
    assert address.colab(root)
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", f"{GITHUB}.git")
    assert address.colab(root)
    for other in f"{GITHUB}-2", GROUPS, "":
        monkeypatch.setenv("MEMBUDGET_REPOSITORY", other)
        assert not address.colab(root)


@pytest.mark.parametrize(
    ("given", "wanted"), [(GITHUB, True), (GROUPS, False), ("", False)]
)
def test_colab_reads_what_github_publishes(monkeypatch, given, wanted):
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", given)
    monkeypatch.setenv("MEMBUDGET_SITE", "https://o.github.io/n")
    assert address.colab() is wanted


def test_a_clone_without_origin_and_a_machine_without_git(
    monkeypatch, clone, tmp_path
):
    assert address.repository(tmp_path) == ""
    root = clone(GITHUB)
    monkeypatch.setenv("PATH", "")
    assert address.repository(root) == ""


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", ""),
        ("https://o.github.io/n/", "https://o.github.io/n"),
        ("https://example.com", "https://example.com"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://localhost:8000/a/b", "http://localhost:8000/a/b"),
    ],
)
def test_a_site(monkeypatch, given, wanted):
    monkeypatch.setenv("MEMBUDGET_SITE", given)
    assert address.site() == wanted


@pytest.mark.parametrize(
    "given",
    [
        "http://example.com",
        "http://localhost.example.com",
        "https://",
        "https://example.com/?x",
        "https://example.com/..",
        "https://example.com//",
        "https://example.com/a b",
        "https://example.com;cmd",
        "https://example.com\n",
        "https://u@example.com",
        "example.com",
    ],
)
def test_what_is_no_site(monkeypatch, given):
    monkeypatch.setenv("MEMBUDGET_SITE", given)
    with pytest.raises(ValueError, match=r"give https://HOST/PATH.*Enforce"):
        address.site()


def test_what_pip_installs_for_a_reader(monkeypatch):
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", "")
    assert address.requirement() == ""
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", "git@github.com:o/n.git")
    assert address.requirement() == "git+https://github.com/o/n"
    monkeypatch.setenv("MEMBUDGET_SITE", "https://o.github.io/n/")
    wheel = f"https://o.github.io/n/{address.wheel()}"
    assert address.requirement() == wheel


def test_the_commands_that_install_it(monkeypatch):
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", "")
    assert address.installs() == []
    monkeypatch.setenv("MEMBUDGET_REPOSITORY", GITHUB)
    sources = f'pip install "membudget[course] @ git+{GITHUB}"'
    assert address.installs("membudget[course]") == [sources]
    monkeypatch.setenv("MEMBUDGET_SITE", "https://o.github.io/n")
    site, _ = address.installs("membudget[course]")
    assert site == sources.replace(
        f"git+{GITHUB}", f"https://o.github.io/n/{address.wheel()}"
    )
