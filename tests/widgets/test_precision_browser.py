"""The precision widget in a browser, without a kernel."""

from math import inf

import kind
import kind_precision
import precision_cases as cases
import pytest
import widget_pages as pages
from widget_pages import control

from membudget.ledger import RECIPES
from membudget.precision import FORMATS
from membudget.widgets import format_bytes
from membudget.widgets.precision import MOMENTS, SCALED


@pytest.fixture
def widget():
    return cases.widget()


@pytest.fixture
def page(show, widget):
    return show(widget)


def agree(page, widget, spoken=True):
    """The page shows what Python has, and says it unless a text is wrong."""
    (seen,) = pages.walk(page, [[]])
    kind.prints(kind_precision.KIND, widget, seen)
    assert (set(widget.sentences()) <= set(seen["said"])) == spoken


def enter(page, **settings):
    pages.walk(page, [settings.items()])


# What it shows -------------------------------------------------------------


def test_first_picture(page, widget):
    texts = page.locator(".mb-picture text").all_text_contents()
    assert {"0.100000001", "error 0.00024", "underflow 2⁻²⁵"} <= set(texts)
    assert {"smallest normal 2⁻¹⁴", "overflow 65520"} <= set(texts)
    peak = format_bytes(widget.numbers()["recipes"]["master"]["bytes"])
    assert f"master: {peak}" in texts
    assert page.get_by_text("Gradients in fp16: a test").is_visible()
    name = widget.account["name"]
    assert page.get_by_text(f"Peak by recipe: {name}").is_visible()
    rows = page.locator(".mb-table tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == list(RECIPES)
    assert "2 + 2 + 12 =\u00a016" in rows[3]
    caption = page.locator("figcaption").nth(2).inner_text()
    assert "The peak is one moment: what is not alive then" in caption
    assert "Temporaries are mostly gradients on their way back" in caption
    count = page.locator('[data-number="gradients"]').inner_text()
    assert count == "3\u202f000 (and 7 zeros)"


def test_the_moment_of_each_peak(page, widget):
    seen = set()
    for at, batch in enumerate((1, 8, 20)):
        widget.batch = batch
        enter(page, batch=at)
        recipes = widget.numbers()["recipes"].values()
        words = [MOMENTS[of["phase"]] for of in recipes]
        rows = page.locator(".mb-table tbody tr").all_inner_texts()
        assert [row.split("\t")[-1] for row in rows] == words
        seen |= set(words)
    assert seen == {"backward", "optimizer step"}


def test_bits_in_their_cells(page):
    enter(page, number="-2^-24")
    rows = page.eval_on_selector_all(
        "g[data-number]",
        """all => all.map((g) => [
          g.dataset.number,
          ...["sign", "exponent", "fraction"].map((field) =>
            [...g.querySelectorAll(`text.mb-${field}`)]
              .map((text) => text.textContent).join("")),
        ])""",
    )
    texts = [kind.text(-(2.0**-24)).split() for kind in FORMATS.values()]
    assert rows == [
        [name, *fields] for name, fields in zip(FORMATS, texts, strict=True)
    ]
    words = page.locator('[data-number="fp16.error"]').text_content()
    assert words == "exact, subnormal"
    words = page.locator('[data-number="fp8-e5m2.error"]').text_content()
    assert words == "underflow"
    looks = page.eval_on_selector_all(
        "rect.mb-bit",
        "all => all.map(e => { const s = getComputedStyle(e);"
        " return [s.fill, s.fillOpacity, s.strokeWidth].join(); })",
    )
    assert len(set(looks)) == 3


def test_what_is_shaded(page):
    """From the left end, line to line, and to the right end."""
    right = float(page.locator(".mb-grid").first.get_attribute("x2"))
    for name, marks in (("fp16", 3), ("fp8-e4m3", 3), ("bf16", 0)):
        control(page, "format").select_option(name)
        lines, (low, high), (few,) = page.evaluate(
            """() => [[".mb-mark", "x1"], [".mb-lost", "x", "width"],
              [".mb-few", "x", "width"]].map(([selector, ...names]) =>
                [...document.querySelectorAll(selector)].map((e) =>
                  names.map((name) => Number(e.getAttribute(name)))))"""
        )
        edges = [low[0] + low[1], few[0] + few[1], high[0]]
        assert few[0] == pytest.approx(edges[0])
        assert low[0] == 34
        assert high[0] + high[1] == pytest.approx(right)
        assert len(lines) == marks
        if marks:
            assert [x for (x,) in lines] == pytest.approx(edges)
        else:
            assert (low[1], few[1], high[1]) == (0, 0, 0)


def test_gradients_have_their_colour(page):
    bars = page.locator("path.mb-bars")
    colour = bars.evaluate("e => getComputedStyle(e).fill")
    assert colour == "rgb(230, 159, 0)"


def test_a_first_bar_that_holds_more(show):
    page = show(cases.widget(**cases.SETTINGS[2]), cases.widget())
    note = page.get_by_text("The first bar holds what is smaller, too.")
    assert note.count() == 1


# How it is moved -----------------------------------------------------------


@pytest.mark.parametrize("settings", cases.SETTINGS[:2])
def test_the_largest_scale_without_overflow(show, settings):
    shown = cases.widget(**settings)
    page = show(shown)
    button = page.get_by_role("button", name="Largest scale without overflow")
    for shown.format in SCALED:
        control(page, "format").select_option(shown.format)
        button.press("Enter")
        best = shown.numbers()["best"]
        shown.scale = 2 ** min(max(best, 0), 24)
        agree(page, shown)
        assert shown.numbers()["above"] == 0 or best < 0
        end = page.get_by_text("which is beyond the slider: this is its end.")
        assert end.count() == (not 0 <= best <= 24)


def wrong(page, key):
    """What is said of a text that is not accepted, after it was typed."""
    field = control(page, key)
    assert field.get_attribute("aria-invalid") == "true"  # at once
    other = control(page, "budget" if key == "number" else "number")
    for mine, plain in zip(looks(field), looks(other), strict=True):
        assert mine != plain
    said = page.locator(f"#{field.get_attribute('aria-errormessage')}")
    assert said.get_attribute("aria-live") == "polite"
    page.wait_for_function("document.querySelector('.mb-problem')")
    assert said.is_visible()
    return said.inner_text()


def looks(element):
    return element.evaluate(
        "e => [getComputedStyle(e).border, getComputedStyle(e).boxShadow]"
    )


def accepted(page, key, widget):
    """It says its sentence again, and the field is as it was."""
    agree(page, widget)
    field = control(page, key)
    assert page.locator(".mb-problem").count() == 0
    assert field.get_attribute("aria-invalid") == "false"


@pytest.mark.parametrize(
    "typed, why",
    [
        ("<b>", "“<b>” is no number"),
        ("  ", "An empty field is no number"),
        ("1e-400", "“1e-400” is below the smallest number, 5e-324"),
        (40 * "9.", f"“{15 * '9.'}” is no number"),
    ],
)
def test_a_text_that_is_no_number(page, widget, typed, why):
    field = control(page, "number")
    field.fill("2^-3")
    widget.number = 0.125
    accepted(page, "number", widget)
    field.fill(typed)
    assert wrong(page, "number") == (
        f"{why}: 0.125 stays. Use digits and a point, as 0.1, 1e-5 or 2^-24."
    )
    assert field.input_value() == typed
    field.press("Tab")
    page.keyboard.press("ArrowRight")  # of another part
    widget.scale = 2
    agree(page, widget, spoken=False)
    assert why in wrong(page, "number")
    field.fill("1e-")
    field.fill("-inf")
    widget.number = -inf
    accepted(page, "number", widget)


@pytest.mark.parametrize("typed", ["abc", "0", "1e-11", "1048577", "inf"])
def test_a_text_that_is_no_budget(page, widget, typed):
    field = control(page, "budget")
    for text, widget.budget, stays in (
        ("", None, "no budget"),
        ("2", 2**31, "2.00 GiB"),
    ):
        field.fill(text)
        accepted(page, "budget", widget)
        field.fill(typed)
        assert wrong(page, "budget") == (
            f"“{typed}” is no budget: {stays} stays. Use GiB above 0, as 24 "
            "or 0.5, up to 1048576, or nothing."
        )
        agree(page, widget, spoken=False)
    assert page.locator(".mb-limit").count() == 0  # far beyond the bars
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "budget 2.00 GiB →" in texts
    for text, widget.budget in (("", None), ("1048576", 2**50)):
        field.fill(text)
        accepted(page, "budget", widget)


def test_nothing_jumps_when_a_text_is_wrong(show):
    page = show(cases.widget(**cases.SETTINGS[1]), width=360)
    long = [("number", 30 * "9" + "e400"), ("budget", 30 * "x")]
    before, after = pages.walk(page, [[], long], pages.TOPS)
    assert page.locator(".mb-problem").count() == 2
    assert before == after


def test_a_part_is_drawn_alone(page):
    """A control of one part leaves the pictures of the others as they are."""
    drawn = page.evaluate(
        f"""async () => {{
          const enter = {pages.ENTER};
          const pictures = [...document.querySelectorAll(".mb-picture")];
          const of = {{
            number: "7", scale: 3, format: "bf16",
            batch: 0, budget: "1", checkpointed: true,
          }};
          const drawn = [];
          for (const entry of [["number", "0.10"], ...Object.entries(of)]) {{
            const before = pictures.map((picture) => picture.lastChild);
            enter([0, [entry]]);
            await scheduler.postTask(() => {{}});
            drawn.push([entry[0], pictures
              .map((picture, i) => Number(picture.lastChild !== before[i]))
              .join("")]);
          }}
          return drawn;
        }}"""
    )
    assert drawn == [
        ["number", "000"],  # as it was
        ["number", "100"],
        ["scale", "010"],
        ["format", "010"],
        ["batch", "001"],
        ["budget", "001"],
        ["checkpointed", "001"],
    ]


# How it looks --------------------------------------------------------------


def test_labels_of_other_gradients_fit(show):
    """Nor does a dashed line go through one."""
    others = [
        cases.widget(**cases.SETTINGS[number], format=name, scale=2**exponent)
        for number in (1, 2, 3)
        for name, exponent in (("fp16", 0), ("bf16", 9), ("fp8-e4m3", 24))
    ]
    page = show(*others, width=320)
    pages.walk(page, [[]])
    assert page.evaluate(pages.OVERLAPPING) == []
    assert page.evaluate(pages.OUTSIDE) == []
    assert page.evaluate(pages.CROSSED) == []


def test_a_dashed_line_through_a_label_is_found(page):
    """One at the height of a label."""
    enter(page, format="fp16")
    assert page.evaluate(pages.CROSSED) == []
    page.evaluate(
        """() => {
          const line = document.querySelector(".mb-mark").cloneNode();
          line.setAttribute("x1", 0);
          line.setAttribute("x2", 1000);
          for (const end of ["y1", "y2"]) line.setAttribute(end, 9);
          document.querySelectorAll(".mb-picture")[1].append(line);
        }"""
    )
    assert any("mb-mark" in text for text in page.evaluate(pages.CROSSED))
