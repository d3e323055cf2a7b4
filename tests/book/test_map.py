"""The map and the questions, against the pages that they speak of."""

import json
import re
import sys

import pytest
from project import ROOT, pages

sys.path.append(str(ROOT / "book/_ext"))
course_map = pytest.importorskip("course_map")

BLOCK = re.compile(r"```\{mb-map\}\n(.*?)```", re.S)
TABLE = BLOCK.search((ROOT / "book/map.md").read_text("utf-8"))[1]
NUMBER = re.compile(r"\d+(?:[ .]\d+)*")
ANSWER = re.compile(r"^### (.+?)\n(.+?)→ \{mb-see\}`([\w/]+)", re.M | re.S)


def test_every_page_is_on_the_map():
    stages, on_map, _ = course_map.read(TABLE.splitlines())
    missing = set(pages()) - set(on_map) - {"book/map"}
    assert not missing, f"add to the table in book/map.md: {sorted(missing)}"
    gone = set(on_map) - set(pages())
    assert not gone, f"not in _toc.yml, but in book/map.md: {sorted(gone)}"
    listed = [page for *_, held in stages for page in held]
    assert len(listed) == len(on_map), "book/map.md lists a page twice"


def test_a_line_that_is_nothing_is_refused():
    with pytest.raises(ValueError, match="no stage, page or route"):
        course_map.read(["# Measure | it", "chapters/01_measuring"])


@pytest.mark.parametrize(
    "page, time",
    [
        ("chapters/01_measuring", 60),
        ("chapters/04d_puzzles", 45),
        ("labs/lab5_capstone", 50),
        ("book/glossary", 0),
    ],
)
def test_the_times_are_those_printed(page, time):
    assert course_map.minutes(page) == time


def test_every_notebook_prints_a_time():
    assert all(course_map.minutes(p) for p in pages() if p[:5] != "book/")


def test_a_route_sums_its_pages(site):
    html = (site / "book/map.html").read_text("utf-8")
    hour, _, every = re.findall(r"</strong> \((.*?)\)\. ", html)
    assert hour == course_map.duration(60)
    whole = sum(map(course_map.minutes, pages()))
    assert every == course_map.duration(whole)
    assert course_map.duration(345) == "5\u00a0h 45\u00a0min"


def text_of(page):
    """What a notebook says and prints."""
    cells = json.loads((ROOT / f"{page}.ipynb").read_text("utf-8"))["cells"]
    parts = ["".join(cell["source"]) for cell in cells]
    for cell in cells:
        for output in cell.get("outputs", []):
            parts.append("".join(output.get("text", "")))
    return " ".join(" ".join(parts).split())


ANSWERS = ANSWER.findall((ROOT / "book/questions.md").read_text("utf-8"))


def test_there_are_as_many_questions_as_the_title_says():
    text = (ROOT / "book/questions.md").read_text("utf-8")
    assert text.startswith("# Forty-six questions\n")
    assert len(ANSWERS) == text.count("\n### ") == 46


@pytest.mark.parametrize("question, answer, page", ANSWERS)
def test_the_figures_of_an_answer_stand_on_its_page(question, answer, page):
    beside = r"[Cc]hapter \d|\[.*?\]\(\S+\)(?: \(\d{4}\))?"  # and a source
    said = NUMBER.findall(re.sub(beside, "", answer, flags=re.S))
    shown = text_of(page)
    absent = [
        n
        for n in said
        if not re.search(rf"(?<![\d.]){re.escape(n)}(?!\d)", shown)
    ]
    assert absent == []


def test_the_map_knows_what_was_opened(browser, site):
    """In a window of its own: `visitor` finds nothing stored."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto((site / "chapters/01_measuring.html").as_uri())
        page.goto((site / "book/map.html").as_uri())
        chapter = page.locator("[data-page='chapters/01_measuring']")
        chapter.locator(".mb-opened").wait_for()
        assert page.locator(".mb-opened").count() == 1
        page.get_by_role("button", name="Forget").click()
        assert page.locator(".mb-opened").count() == 0
        page.reload()
        assert page.locator(".mb-opened").count() == 0
        with context.new_page() as other:  # a tab in which one reads on
            other.goto((site / "chapters/02_ledger.html").as_uri())
            page.locator(".mb-opened").wait_for()
