"""Where the course is published: its repository and its site.

The sources say neither. The repository's address comes from the environment
(`MEMBUDGET_REPOSITORY`, which `publish.yml` sets) or from the clone's
`origin`, the site's from `MEMBUDGET_SITE`. They end in links and in a command
that readers run, so nothing gets through that is not of a strict form.
"""

import os
import re
import subprocess
import tomllib
from urllib.parse import urlsplit

from project import ROOT

SOURCES = "main"
"""The branch that is edited."""
PUBLISHED = "published"
"""The branch that Colab opens."""

NAME = r"[a-z0-9_][a-z0-9_.-]*"
REPOSITORY = re.compile(
    r"(?:(git@)|(?:https|ssh)://(?:[\w.~%:-]+@)?)"
    r"(github\.com|gitlab\.com|bitbucket\.org)(?(1):|/)"
    rf"({NAME}(?:/{NAME})+)/?",
    re.ASCII | re.IGNORECASE,
)
SITE = re.compile(
    r"(https://[a-z0-9][a-z0-9.-]*|http://(?:127\.0\.0\.1|localhost))"
    rf"(:\d+)?(/{NAME})*/?",
    re.ASCII | re.IGNORECASE,
)


def repository(root=ROOT):
    """The repository's address, such as `https://github.com/owner/name`.

    It is "" where none is known: `MEMBUDGET_REPOSITORY` is empty, or it is
    not set and the clone's `origin` is on none of the forges.

    Raises:
        ValueError: `MEMBUDGET_REPOSITORY` is not an address of that form.
    """
    given = os.environ.get("MEMBUDGET_REPOSITORY")
    if given is None:
        return normal(origin(root))
    if given and not normal(given):
        raise ValueError(
            f"MEMBUDGET_REPOSITORY is {given!r}, which is no repository's "
            "address: give https://github.com/OWNER/NAME (or gitlab.com, or "
            "bitbucket.org), or nothing for a book without an address"
        )
    return normal(given)


def normal(text):
    """An address in its one form, without a user or a password, or ""."""
    found = REPOSITORY.fullmatch(text)
    if not found:
        return ""
    host, path = found[2].lower(), found[3].removesuffix(".git")
    groups = path.count("/") > 1  # which only one of the forges has
    return "" if groups and host != "gitlab.com" else f"https://{host}/{path}"


def origin(root=ROOT):
    """What the clone's `origin` says, or "" where this is no clone."""
    return ask_git(root, "remote", "get-url", "origin")


def ask_git(root, *command):
    """What git says of the clone in a folder, or "" if it cannot tell.

    Sources without a `.git` of their own may lie in another repository.
    """
    try:
        done = subprocess.run(
            ["git", f"--git-dir={root}/.git", *command],
            capture_output=True,
            text=True,
        )
    except OSError:
        return ""  # there is no git
    return done.stdout.removesuffix("\n") if done.returncode == 0 else ""


def forge(repository):
    """The forge of a repository: "github", "gitlab" or "bitbucket"."""
    return urlsplit(repository).netloc.partition(".")[0]


def site():
    """The site's address without a slash at its end, or "" if it is not known.

    Raises:
        ValueError: `MEMBUDGET_SITE` is not an address of a site.
    """
    given = os.environ.get("MEMBUDGET_SITE", "")
    if given and not SITE.fullmatch(given):
        raise ValueError(
            f"MEMBUDGET_SITE is {given!r}, which is no site's address: give "
            "https://HOST/PATH (or http://localhost:PORT), or nothing; for "
            "a domain of your own, switch on Enforce HTTPS in the settings of "
            "GitHub Pages"
        )
    return given.removesuffix("/")


def colab(root=ROOT):
    """Whether Colab finds the notebooks: on GitHub, on the branch that is
    published beside the site, or that the clone knows its `origin` to have.
    """
    url = repository(root)
    if forge(url) != "github":
        return False
    branch = f"refs/remotes/origin/{PUBLISHED}"
    return bool(site()) or (
        url == normal(origin(root))
        and ask_git(root, "rev-parse", "--verify", "--quiet", branch) != ""
    )


def version():
    """The package's, three whole numbers and the dots between them."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    return tomllib.loads(text)["project"]["version"]


def wheel():
    """The name of the package's wheel."""
    return f"membudget-{version()}-py3-none-any.whl"


def requirement():
    """What pip installs for a reader of the book, or "" if nothing is known.

    On a site it is the wheel that lies there, elsewhere the repository.
    """
    if site():
        return f"{site()}/{wheel()}"
    return f"git+{repository()}" if repository() else ""


def installs(name="membudget"):
    """The commands that install the package, the site's wheel first.

    Args:
        name: of the package, with an extra or without.
    """
    sources = f"git+{repository()}" if repository() else ""
    places = dict.fromkeys(filter(None, (requirement(), sources)))
    return [f'pip install "{name} @ {place}"' for place in places]
