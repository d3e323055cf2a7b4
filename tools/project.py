"""Where things are: the tools and the tests ask here."""

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build/html"
PATIENCE = 600
"""Seconds after which what is waited for will not come. Many: a busy machine
is slow, not broken."""


def read_yaml(name, root=ROOT):
    """One of the two settings files, `_config.yml` or `_toc.yml`."""
    return yaml.safe_load((root / name).read_text("utf-8"))


def pages(root=ROOT):
    """The pages of the book as `_toc.yml` lists them, without suffix."""

    def walk(node):
        if isinstance(node, list):
            return [page for child in node for page in walk(child)]
        found = [node[key] for key in ("root", "file") if key in node]
        for key in ("parts", "chapters", "sections"):
            found += walk(node.get(key, []))
        return found

    return walk(read_yaml("_toc.yml", root))


def notebooks(root=ROOT):
    """Every notebook of the course, in the order of reading."""
    return [
        path
        for folder in ("chapters", "labs")
        for path in sorted((root / folder).glob("*.ipynb"))
    ]
