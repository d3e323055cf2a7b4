"""What stays on one line, and how a formula is drawn."""

import pytest
import site_checks as checks
from docutils import nodes
from docutils.utils import new_document
from fontTools.ttLib import TTFont

from book._ext.memory_budget import formulas, words


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("needs 1.00\nMiB or 43 %", "needs 1.00~MiB or 43~%"),
        ("2 048 tokens in 5 ms", "2^048 tokens in 5~ms"),
        (
            "chapter 3, Lab 2 and section 4.1",
            "chapter~3, Lab~2 and section~4.1",
        ),
        ("see arXiv 1604.06174", "see arXiv~1604.06174"),
        ("7.5 · 10⁹ parameters", "7.5~·~10⁹ parameters"),
        ("in 16 bits, by 3 B/s, at 4 blocks", None),
        ("a chapter of 60 minutes, 3 minor faults", None),
    ],
)
def test_a_number_stays_with_its_unit(text, held):
    held = (held or text).replace("~", "\u00a0").replace("^", "\u202f")
    assert words.held(text) == held


def test_a_line_of_the_source_ends_nowhere_but_in_code():
    page = new_document("page")
    parts = [nodes.Text("up to 60"), nodes.Text("\n"), nodes.Text("% and ")]
    code = nodes.literal("", "", nodes.Text("5 %"))
    page += nodes.paragraph("", "", *parts, code)
    words.hold_numbers(None, page, "page")
    assert page.astext() == "up to 60\u00a0% and 5 %"


def test_a_table_and_a_title_may_break_anywhere_but_in_a_number():
    page = new_document("page")
    page += [
        nodes.title("", "Of chapter 3"),
        nodes.entry("", nodes.paragraph("", "1 024 of chapter 3")),
    ]
    words.hold_numbers(None, page, "page")
    assert page.astext().split("\n\n") == [
        "Of chapter 3",
        "1\u202f024 of chapter 3",
    ]


@pytest.mark.parametrize(
    ("body", "held"),
    [
        ("({}), {} and", '<span class="mb-hold">({}),</span> {} and'),
        ("{}.", '<span class="mb-hold">{}.</span>'),
        ("<b>{}</b>", "<b>{}</b>"),
    ],
)
def test_a_bracket_and_a_full_stop_stay_with_a_formula(body, held):
    formula = '<span class="math"><math><mi>k</mi></math></span>'
    one, other = (text.replace("{}", formula) for text in (body, held))
    assert words.hold_formulas(one) == other


@pytest.mark.parametrize(
    ("tex", "drawn"),
    [
        (r"\widehat{x}", "&#x00302;</mo></mover>"),  # the accent grows
        ("A: r", "<mi>A</mi><mo lspace='0' rspace='0.278em'>:</mo>"),
        (r"\binom{2r}{r}", 'r</mi><mspace depth="0.4em" /></mrow>'),
        (r"\operatorname{tr} A", "<mo lspace='0' rspace='0.167em'>tr</mo>"),
        (
            r"\lvert G \rvert^2",
            "<mo stretchy=\"false\" lspace='0' rspace='0'>",
        ),
    ],
)
def test_a_formula_is_drawn_as_tex_draws_it(tex, drawn):
    assert drawn in formulas.mathml(tex, "inline")


def test_the_font_has_the_sign_of_a_root():
    """A browser draws it, though it is no letter of the formula."""
    assert formulas.characters(formulas.mathml("2 x", "inline")) >= {"2", "x"}
    for tex in r"\sqrt{x}", r"\sqrt[3]{x}":
        assert "√" in formulas.characters(formulas.mathml(tex, "inline"))


def test_each_sign_of_a_root_is_as_wide():
    """Or Chromium leaves a gap behind each root."""
    font = TTFont(formulas.FONT)
    before = font["hmtx"]["uni221A.s2"]
    formulas.narrow_roots(font)
    widths = {font["hmtx"][f"uni221A{size}"][0] for size in ("", ".s2", ".x")}
    assert len(widths) == 1 and before[0] > widths.pop()


def test_a_page_holds_them(site):
    article = checks.soup(site, "chapters/03c_who_chooses").article
    assert "60\u00a0%" in article.get_text()
