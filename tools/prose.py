"""Sentences of the notebooks, against what their pages show.

A figure in a sentence is one of its page's: an output, a piece of code or a
formula shows it, perhaps with more digits, or an equation in the sentence
itself ends in it. Folded answers are worked out by hand. What else stands in a
sentence is listed in `GIVEN`, with where it comes from. And a link, or the
number of a section, leads where its words say.
"""

import re
import sys
from functools import cache
from pathlib import Path

import nbformat
from project import ROOT, notebooks

BESIDE = "worked out from what stands beside it"
WIDGET = "the widget shows it"
EXAMPLE = "a number of an example"
GIVEN = {
    "01_measuring": {BESIDE: "0.03", WIDGET: "8.07"},
    "02_ledger": {BESIDE: "1.5"},
    "03_accumulation": {WIDGET: "650, 524, 425, 589, 257"},
    "04_checkpointing": {BESIDE: "15.1", WIDGET: "24.6", EXAMPLE: "0.4"},
    "05_schedules": {BESIDE: "15.1"},
    "06_precision": {
        "PyTorch's default": "65 536",
    },
    "07b_which_optimizer": {"Wen et al. 2025": "1.4, 1.1"},
    "08a_the_loss": {"the authors' benchmark": "1 164"},
    "09_sharding": {"the record's parameters": "2 048"},
    "09c_a_thousand_ranks": {"the record's parameters": "2 048"},
    "lab2_checkpointing": {BESIDE: "57, 0.06, 3.9", WIDGET: "2.27"},
    "lab4_fsdp": {BESIDE: "14.5"},
}

SPACE = "[\\u00a0\\u202f ]"  # no-break, narrow no-break, plain
NOT_PROSE = re.compile(
    r"<details>.*?</details>|\$\$.*?\$\$|\$[^$\n]*\$|```.*?```|`[^`]*`"
    r"|\]\([^)]*\)|^#[^\n]*|arXiv\s+[\d.]+|doi\s+\S+|PyTorch \d\.\d+"
    r"|[sS]ections?\s+\d+\.\d+(?:(?:,| and| to)\s+\d+\.\d+)*",
    re.S | re.M,
)
NOT_WORDS = re.compile(r"```.*?```|\$\$.*?\$\$|\]\([^)]*\)", re.S)
WORD = re.compile(r"\b[\w’'-]+\b")
SHOWN = re.compile(r"\$[^$]*\$|```.*?```|`[^`]*`", re.S)
FIGURE = re.compile(
    rf"(?<![\w.^/])(\d{{1,3}}(?:{SPACE}\d{{3}})+|\d+\.\d+"
    r"|\d+(?= (?:%|per cent|[KMGT]i?B|ms)(?!\w)))(?![\d.]*\d)"
)
NUMBER = re.compile(r"\d[\d,_]*\.?\d*")
LINK = re.compile(
    r"\[([^\]]+)\]\(([^)\s#]+)[^)]*\)(?:,\s+section\s+(\d+\.\d+))?"
)
SECTION = re.compile(r"[sS]ections?\s+\d+\.\d+(?:(?:,| and| to)\s+\d+\.\d+)*")


def problems(path, root=ROOT):
    """What is wrong with the sentences of one notebook."""
    path = Path(path)
    cells = nbformat.read(path, as_version=4).cells
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    groups = GIVEN.get(path.stem, {}).values()
    given = {figure for group in groups for figure in group.split(", ")}
    absent = dict(figures(prose, numbers(cells)))
    found = [
        f"{figure} in {absent[figure]!r} is not on the page"
        for figure in absent.keys() - given
    ]
    found += [f"{one} need not be given" for one in given - absent.keys()]
    found += links("\n".join(prose), root)
    return [f"{path.name}: {sentence}" for sentence in found]


def size(path):
    """Words of prose, code cells and their lines, of one notebook."""
    cells = nbformat.read(path, as_version=4).cells
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    words = WORD.findall(NOT_WORDS.sub(" ", "\n".join(prose)))
    lines = [line for cell in code for line in cell.splitlines() if line]
    return len(words), len(code), len(lines)


def numbers(cells):
    """All numbers in outputs that stay, in code and in formulas."""
    parts = []
    for cell in cells:
        if cell.cell_type == "markdown":
            parts += SHOWN.findall(cell.source)
            continue
        parts.append(cell.source)
        moves = "nbval-ignore-output" in cell.metadata.get("tags", [])
        for output in () if moves else cell.outputs:
            plain = output.get("data", {}).get("text/plain", "")
            parts.append(output.get("text", plain))
    text = "\n".join(parts)
    joined = re.sub(rf"(?<=\d){SPACE}(?=\d{{3}}\b)", "", text)
    found = NUMBER.findall(f"{text}\n{joined}")
    return {float(one.replace(",", "").replace("_", "")) for one in found}


def figures(prose, shown):
    """Figures of the sentences that no number shown rounds to."""
    text = "\n".join(prose)
    sections = set(re.findall(r"^#+ (\d+\.\d+)", text, re.M))
    for source in prose:
        text = NOT_PROSE.sub(" ", source)
        for found in FIGURE.finditer(text):
            figure = re.sub(SPACE, " ", found[1])
            before, after = text[: found.start()], text[found.end() :]
            if figure in sections or re.search(r"[=≈→] *$", before):
                continue
            if re.fullmatch(r"\d[ 0]+", figure):
                continue  # a round number
            share = re.match(r" (%|per cent)", after)
            if not any(rounds_to(figure, x, share) for x in shown):
                around = f"{before[-30:]}{found[0]}{after[:20]}"
                yield figure, " ".join(around.split())


def rounds_to(figure, x, share):
    """Whether a number, as a share also in per cent, is the figure."""
    value = float(figure.replace(" ", ""))
    if " " in figure:
        return x == value
    margin = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
    others = (100 * x, 100 - x, abs(100 - 100 * x)) if share else ()
    return any(abs(one - value) <= margin for one in (x, *others))


def links(text, root=ROOT):
    """Links and sections that are not what their words say."""
    for words, target, section in LINK.findall(text):
        page = target.rpartition("/")[2]
        for kind, name in ("chapter", "0?{}[a-d]?_"), ("lab", "lab{}_"):
            if named := re.search(rf"\b{kind}( \d+)?\b", words, re.I):
                number = (named[1] or r"\d+").strip()
                if not re.match(name.format(number), page):
                    yield f"[{words}] leads to {target}"
        if section and section not in sections_of(page[:2], root):
            yield f"{target} has no section {section}"
    for found in SECTION.finditer(text):
        for number in re.findall(r"\d+\.\d+", found[0]):
            chapter = number.partition(".")[0]
            if number not in sections_of(chapter.zfill(2), root):
                yield f"there is no section {number}"


@cache
def sections_of(start, root):
    """The numbers of the headings of the chapter that begins so."""
    found = set()
    for path in notebooks(root):
        if path.name.startswith(start):
            for cell in nbformat.read(path, as_version=4).cells:
                found |= set(re.findall(r"^#+ (\d+\.\d+)", cell.source, re.M))
    return found


if __name__ == "__main__":
    found = [text for path in notebooks() for text in problems(path)]
    sys.exit("\n".join(found) or None)
