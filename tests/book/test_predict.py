"""Questions to predict: the options, the answer, and a click."""

import re

import pytest
import site_checks as checks
from docutils import nodes
from docutils.utils import new_document
from project import notebooks

from book._ext import predict
from tests.soak import SOAK

PAGE = "chapters/02_ledger"
QUIZ = "chapters/12_claims"
PAGES = [f"{path.parent.name}/{path.stem}" for path in notebooks()]


def split(*parts):
    """A paragraph's options, and its text after they are marked."""
    paragraph = nodes.paragraph("", "", *parts)
    before = paragraph.astext().split()
    letters = predict.mark_options(paragraph)
    assert paragraph.astext().split() == before
    return letters, [
        node.astext()
        for node in paragraph.findall(nodes.inline)
        if "mb-option" in node["classes"]
    ]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("So: (a) 1, the last, (b) 7, or (c) 14?", ["1, the last", "7", "14"]),
        (
            "So? (a) Never. (b) 3.5 GiB. (c) Both.",
            ["Never.", "3.5 GiB.", "Both."],
        ),
        ("(a) one; (b) two", ["one", "two"]),
        ("Is it (a) x or (b) y? And where?", ["x", "y"]),
    ],
)
def test_the_options_of_a_text(text, options):
    letters, found = split(nodes.Text(text))
    assert letters == list("abc")[: len(options)]
    assert [option[4:] for option in found] == options


def test_options_over_lines_and_with_nodes():
    code = nodes.literal("", "f(x)")
    parts = ["Is (a)", "\n", "all of ", code, ", or", "\n", "(b) none?"]
    made = [nodes.Text(p) if isinstance(p, str) else p for p in parts]
    assert split(*made)[1] == ["(a) all of f(x)", "(b) none"]


@pytest.mark.parametrize(
    "text", ["Why?", "(a) one", "(b) two, (a) one", "(a), b"]
)
def test_what_has_no_options_stays(text):
    assert split(nodes.Text(text)) == ([], [])


@pytest.mark.parametrize(
    ("question", "warnings"),
    [
        ("Predict. Is it (a) one or (b) two?", 0),
        ("Predict. Is it (a) one or (b) two? Then try.", 0),
        ("Predict. Is it (a) one or (b) two? And how large?", 1),
        ("Predict. Is it one or two?", 1),
    ],
)
def test_a_question_asks_one_thing(monkeypatch, question, warnings):
    said = []
    monkeypatch.setattr(
        predict.logger, "warning", lambda *a, **_: said.append(a)
    )
    page = new_document("page")
    page += [
        nodes.paragraph("", question),
        nodes.paragraph("", "Reading. (b)."),
    ]
    predict.mark(None, page, "page")
    assert len(said) == warnings


def questions(site, page):
    article = checks.soup(site, page).article
    return [
        paragraph
        for paragraph in article.find_all("p")
        if paragraph.get_text().startswith("Predict")
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_question_has_options_one_right_and_a_reading(site, page):
    """A question without is a warning, which ends the build."""
    names = set()
    for question in questions(site, page):
        (right,) = (c[-1] for c in question["class"] if "mb-right" in c)
        inside = question.select(".mb-option")
        options = inside or question.find_next("p").select(".mb-option")
        letters = [option.get_text()[1] for option in options]
        assert letters == list("abcd")[: len(letters)]
        assert right in letters
        reading = question.find_next(class_="mb-reading")
        assert re.search(r"\((\w)\)", reading.get_text())[1] == right
        names.add(question["id"])
    assert len(names) == len(questions(site, page))


@pytest.mark.parametrize("page", PAGES)
def test_no_output_stands_between_a_question_and_its_reading(site, page):
    """All that answers opens with the click: folds, and then the reading."""
    for question in questions(site, page):
        for node in question.find_all_next(
            class_=["mb-reading", "cell_output"]
        ):
            if "mb-reading" in node["class"]:
                break
            assert node.find_parent("details")


def test_there_are_many_questions(site):
    assert sum(len(questions(site, page)) for page in PAGES) >= 150


@pytest.fixture
def opened(browser, site):
    """Opens a page in a browser of a reader's own, which keeps what it is
    given."""
    with browser.new_context() as context:
        context.set_default_timeout(20_000)
        page = context.new_page()

        def opened(name, hash=""):
            page.goto("about:blank")
            page.goto(f"{(site / name).as_uri()}.html{hash}")
            return page

        yield opened


def test_a_click_locks_opens_and_tells(opened, site):
    page = opened(PAGE)
    question = page.locator(".mb-predict").nth(1)
    reading = page.locator(".mb-reading").nth(1)
    fold = question.locator("xpath=following::details").first
    assert not reading.is_visible()
    assert fold.get_attribute("open") is None
    question.get_by_role("button", name="(a) 30 GiB").press("Enter")
    assert reading.is_visible()
    assert fold.get_attribute("open") is not None
    told = question.get_by_role("status").inner_text()
    assert told == "Not quite: it is (c). Off by a factor of 4: too low."
    other = question.get_by_role("button", name="(b)")
    assert other.is_disabled()
    of = len(questions(site, PAGE))
    assert (
        page.locator(".mb-score")
        .inner_text()
        .startswith(f"You have predicted 1 of {of}, 0 right.")
    )
    page.reload()  # what was chosen is kept
    assert question.get_by_role("status").inner_text() == told
    assert reading.is_visible()
    page.get_by_role("button", name="Start over").click()
    assert not reading.is_visible()
    assert not other.is_disabled()
    assert fold.get_attribute("open") is None


JOINED = "chapters/06_precision", "labs/lab3_mixed_precision"


@pytest.mark.parametrize("name", JOINED)
def test_one_bar_opens_two_outputs_in_a_row(opened, name):
    """The lower one has no bar of its own; in lab 3 a reading is between."""
    page = opened(name)
    lower = page.locator("details.mb-joined").first
    head = lower.locator(
        "xpath=../preceding-sibling::*"
        "[contains(@class, 'tag_hide-output')][1]/details"
    )
    output = lower.locator(".cell_output").first
    assert not output.is_visible()
    head.locator(":scope > summary").click()
    output.wait_for(state="visible")
    assert not lower.locator(":scope > summary").is_visible()
    head.locator(":scope > summary").click()
    output.wait_for(state="hidden")


def test_a_near_number_is_off_by_a_difference(opened, site):
    page = opened("chapters/01_measuring")
    question = page.locator(".mb-predict").filter(has_text="100 pairs")
    question.get_by_role("button", name="(a) 100").click()
    told = question.get_by_role("status").inner_text()
    assert told == "Not quite: it is (b). Off by 1: too low."


def test_the_answer_can_be_seen_without_a_choice(opened, site):
    page = opened(PAGE)
    reading = page.locator(".mb-reading").nth(1)
    page.get_by_role("button", name="Show the answer").nth(0).click()
    assert reading.is_visible()
    assert (
        page.locator(".mb-score")
        .inner_text()
        .startswith(f"{len(questions(site, PAGE))} predictions wait")
    )


def answers(site, page):
    return [
        next(c[-1] for c in question["class"] if "mb-right" in c)
        for question in questions(site, page)
    ]


def test_a_quiz_counts_and_shares(opened, site):
    right = answers(site, QUIZ)
    page = opened(QUIZ)
    for number, letter in enumerate(right):
        said = letter if number else "b" if letter == "a" else "a"
        button = page.locator(".mb-predict").nth(number)
        button.get_by_role("button", name=f"({said})").click()
    of = len(right)
    line = page.locator(".mb-score").inner_text()
    assert f"predicted {of} of {of}, {of - 1} right" in line
    assert page.locator(".mb-missed").inner_text() == "Missed: Claim 1"
    page = opened(QUIZ, f"#result={''.join(right)}")
    said = page.locator(".mb-quiz").inner_text()
    assert said.startswith(f"Whoever sent you this link got {of} of {of}")


def test_the_map_tells_how_many_were_right(opened, site):
    page = opened(PAGE)
    right = answers(site, PAGE)[0]
    first = page.locator(".mb-predict").first
    first.get_by_role("button", name=f"({right})").click()
    for game in ("mb-medals", "mb-scores"):
        page.evaluate("key => localStorage.setItem(key, '{}')", game)
    opened("book/map")
    of = len(questions(site, PAGE))
    mark = page.locator(f"[data-page='{PAGE}'] .mb-opened")
    mark.filter(has_text=f"✓ opened, 1 of {of} right").wait_for()
    page.get_by_role("button", name="Forget").click()
    for kept in ("mb-predicted", "mb-medals", "mb-scores"):
        assert page.evaluate("key => localStorage.getItem(key)", kept) is None


@pytest.mark.parametrize("page", PAGES if SOAK else [PAGE])
def test_without_javascript_it_reads_as_written(window, site, page):
    shown = window("no javascript")
    shown.goto((site / f"{page}.html").as_uri())
    assert shown.locator("button.mb-option").count() == 0
    for reading in shown.locator(".mb-reading").all():
        assert reading.get_attribute("hidden") is None


def test_a_widgets_own_options_stay_in_a_row(opened):
    page = opened("chapters/03_accumulation")
    tops = page.locator(".mb-radios .mb-options label").evaluate_all(
        "all => all.map((label) => label.getBoundingClientRect().top)"
    )
    assert len(tops) > 1 and len(set(tops)) == 1
