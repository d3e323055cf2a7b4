"""Questions to predict: which options there are, and which one is right.

The source says "**Predict.** …: (a) one, (b) two, or (c) three?", and later
"**Reading.** (b). …". Here each option becomes a node with a class, so that
`predict.js` can make buttons of them; without it the page reads as written.
"""

import hashlib
import re

from docutils import nodes
from language import later, say
from sphinx.util import logging

logger = logging.getLogger(__name__)
OPTION = re.compile(r"\(([a-d])\)(?:\s+|$)")
END = re.compile(r"[.?](?=\s|$)|[。？]")
JOINT = re.compile(
    r"(?:[,;]?\s+or|[,;])\s*$|[，；、]?\s*还是\s*$|[，；、]\s*$|\s+$"
)
ANSWER = re.compile(r"\(([a-d])\)")
ANSWERED = later("Reading."), later("Answer."), later("Verdict.")


def mark(app, doctree, docname):
    """Mark the questions of a page, their options and their readings."""
    paragraphs = list(doctree.findall(nodes.paragraph))
    for number, paragraph in enumerate(paragraphs):
        if not paragraph.astext().startswith(say("Predict.")):
            continue
        after = paragraphs[number + 1 :]
        options = mark_options(paragraph)
        if not options and after and after[0].astext().startswith("(a)"):
            options = mark_options(after[0])
        reading = find_reading(after)
        right = reading and ANSWER.search(reading.astext())
        more = {*after_options(paragraph)} & {*"?？"}
        if len(options) < 2 or not right or right[1] not in options or more:
            logger.warning(
                "a question needs options (a), (b) …, none after them, and a "
                "reading that begins with the letter of one: %s",
                " ".join(paragraph.astext().split())[:70],
                location=paragraph,
            )
            continue
        text = paragraph.astext().encode()
        name = hashlib.sha256(text).hexdigest()[:8]
        paragraph["ids"].append(f"predict-{name}")
        paragraph["classes"] += ["mb-predict", f"mb-right-{right[1]}"]
        reading["classes"].append("mb-reading")


def after_options(paragraph):
    """What a question says after its options."""
    words = ""
    for child in reversed(paragraph.children):
        if "mb-or" in getattr(child, "attributes", {}).get("classes", []):
            return words
        words = child.astext() + words
    return ""


def find_reading(after):
    """The paragraph that answers, if it comes before another question."""
    for paragraph in after:
        text = paragraph.astext()
        if text.startswith(say("Predict.")):
            return None
        answers = text.startswith(tuple(map(say, ANSWERED)))
        if answers or f"{heading(paragraph)}." in ANSWERED:
            return paragraph
    return None


def heading(paragraph):
    """What the fold is called whose first paragraph this is."""
    before = paragraph.previous_sibling()
    raw = before.astext() if isinstance(before, nodes.raw) else ""
    found = re.search(r"<summary>(\w+)</summary>\s*$", raw)
    return found[1] if found else ""


def mark_options(paragraph):
    """Put each option into a node of its own; their letters.

    The words between two, such as ", or", get one as well.
    """
    parts, letters = [[]], []
    for child in merged(paragraph.children):
        pieces = (
            OPTION.split(child.astext())
            if isinstance(child, nodes.Text)
            else [child]
        )
        for turn, piece in enumerate(pieces):
            if turn % 2:
                letters.append(piece)
                parts.append([])
            elif piece:
                parts[-1].append(piece)
    if letters != list("abcd")[: len(letters)] or len(letters) < 2:
        return []
    options = [as_nodes(part) for part in parts[1:]]
    ends = [joint(option) for option in options[:-1]]
    mark, after = rest(options[-1])
    paragraph.children = []
    paragraph += as_nodes(parts[0])
    for letter, option in zip(letters, options, strict=True):
        classes = ["mb-option", f"mb-option-{letter}"]
        inline = nodes.inline("", f"({letter}) ", classes=classes)
        inline += option
        paragraph += inline
        end = ends.pop(0) if ends else [nodes.Text(mark)]
        paragraph += nodes.inline("", "", *end, classes=["mb-or"])
    paragraph += after
    return letters


def merged(children):
    """The nodes, those of a text that goes over a line's end as one."""
    found = []
    for child in children:
        last = found[-1] if found else None
        if isinstance(last, nodes.Text) and isinstance(child, nodes.Text):
            found[-1] = nodes.Text(found[-1].astext() + child.astext())
        else:
            found.append(child)
    return found


def as_nodes(part):
    """Texts and nodes as nodes, none of them with a parent."""
    return [
        nodes.Text(piece) if isinstance(piece, str) else piece
        for piece in part
    ]


def joint(option):
    """Take the words that lead to the next option off the end of one."""
    if not option or not isinstance(option[-1], nodes.Text):
        return []
    text = option[-1].astext()
    found = JOINT.search(text)
    if not found:
        return []
    option[-1] = nodes.Text(text[: found.start()])
    return [nodes.Text(found[0])]


def rest(option):
    """Take a question's mark, and what follows it, off the last option."""
    for number, node in enumerate(option):
        if not isinstance(node, nodes.Text):
            continue
        if found := END.search(node.astext()):
            text, end = node.astext(), found.end()
            left = [nodes.Text(text[end:]), *option[number + 1 :]]
            mark = found[0] if found[0] in "?？" else ""
            option[number:] = [nodes.Text(text[: end - len(mark)])]
            return mark, left
    return "", []
