"""What a widget draws at first, for readers without JavaScript.

`tools/pictures.py` wrote it down. A notebook says instead that a cell has to
run.
"""

import re
from pathlib import Path

from language import later, say

FOLDER = Path(__file__).resolve().parents[1] / "_pictures"

UNRUN = "(Run this cell for a picture to play with.)"
STILL = later("(With JavaScript it is a picture to play with.)")
FALLBACK = re.compile(r'(<p class="mb-fallback">.*?</p>)', re.S)


def add(app, pagename, templatename, context, doctree):
    """Give each widget of a page its picture."""
    stem = pagename.rpartition("/")[2]
    number = 0

    def with_picture(found):
        nonlocal number
        number += 1
        path = FOLDER / f"{stem}-{number}.html"
        if not path.exists():  # a new one, before `make pictures`
            return found[1]
        picture = path.read_text("utf-8")
        text = found[1].replace(UNRUN, say(STILL))
        return f"<noscript>{picture}</noscript>{text}"

    if "body" in context:
        context["body"] = FALLBACK.sub(with_picture, context["body"])
