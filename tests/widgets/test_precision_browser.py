"""The precision widget in a browser, without a kernel."""

import json
from itertools import product
from math import inf

import precision_cases as cases
import pytest
import torch
import widget_pages as pages

from membudget.ledger import RECIPES
from membudget.precision import FORMATS
from membudget.widgets import bundle, format_bytes
from membudget.widgets.precision import MOMENTS, SCALED, _number

WIDE_FONT = "body, .mb-root { font-family: 'DejaVu Sans', Verdana; }"

NUMBERS = (
    *(0.1, 1.0, -3.5, 0.0, 65519.9, 65520.0, 460.0, -1e-5, 6e-8, 1e39),
    *(1.2345678901234567e-7, -1.2345678901234567e-40, 2049.0, 5e-324, -inf),
)
LONGEST = ("-1.2345678901234567e-39", "-1.2345678901234567e38", "-inf", "6e-8")

SWEEP = f"""async (states) => {{
  const enter = {pages.ENTER};
  const shown = [];
  for (const settings of states) {{
    enter([0, settings]);
    await scheduler.postTask(() => {{}});
    const of = (e) => [e.dataset.number, e.dataset.value];
    const all = [...document.querySelectorAll("[data-number]")].map(of);
    const labels = [...document.querySelectorAll(".mb-picture")]
      .map((picture) => picture.getAttribute("aria-label"));
    shown.push([Object.fromEntries(all), labels]);
  }}
  return shown;
}}"""
"""Enters each state; the numbers printed then, and the pictures' labels."""


@pytest.fixture(scope="module")
def widget():
    return cases.widget()


@pytest.fixture
def page(show, widget):
    return show(widget)


@pytest.fixture(autouse=True)
def as_it_was(widget):
    names = "number", "format", "scale", "batch", "checkpointed", "budget"
    before = {name: getattr(widget, name) for name in names}
    yield
    for name, value in before.items():
        setattr(widget, name, value)


def expected(widget):
    """The numbers that the page prints, and the labels of its pictures."""
    n = widget.numbers()
    numbers = {k: n[k] for k in ("gradients", "below", "subnormal", "above")}
    numbers["best"] = n["best"]
    for name, of in n["formats"].items():
        numbers[name] = of["bits"]
        numbers[f"{name}.value"] = of["value"]
        numbers[f"{name}.error"] = of["error"]
    for recipe, of in n["recipes"].items():
        numbers[f"{recipe}.bytes"] = of["bytes"]
    return numbers, list(widget.sentences())


def parsed(shown):
    """The page's texts as numbers; bits stay texts."""
    numbers, labels = shown
    return {
        key: value if key in FORMATS else value and float(value)
        for key, value in numbers.items()
    }, labels


def agree(page, widget):
    """The page shows and says what Python has."""
    (shown,) = page.evaluate(SWEEP, [[]])
    assert parsed(shown) == expected(widget)
    said(page, *widget.sentences())


def said(page, *sentences):
    """Each sentence is to be seen where it is read out, or soon will be."""
    page.wait_for_function(
        """(sentences) => {
          const live = [...document.querySelectorAll("[aria-live=polite]")]
            .filter((e) => e.checkVisibility({ visibilityProperty: true }))
            .map((e) => e.innerText);
          return sentences.every((sentence) => live.includes(sentence));
        }""",
        arg=sentences,
    )


def control(page, key):
    return page.locator(f'[data-key="{key}"]')


def sweep(page, widget, states):
    """Every state shows what Python has for it.

    Args:
        states: pairs of what is entered and the traits that it means.
    """
    answers = page.evaluate(SWEEP, [settings for settings, _ in states])
    assert len(answers) == len(states) > 0
    for (settings, traits), answer in zip(states, answers, strict=True):
        for name, value in traits.items():
            setattr(widget, name, value)
        assert parsed(answer) == expected(widget), settings


# What it shows -------------------------------------------------------------


def test_first_picture(page, widget):
    agree(page, widget)
    assert page.locator(".mb-fallback").count() == 0
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
    columns = page.locator(".mb-table th[scope=col]").all_inner_texts()
    assert columns[-1] == "moment"
    caption = page.locator("figcaption").nth(2).inner_text()
    assert "The peak is one moment: what is not alive then" in caption
    assert "Temporaries are mostly gradients on their way back" in caption
    count = page.locator('[data-number="gradients"]').inner_text()
    assert count == "3\u202f000 (and 7 zeros)"


def test_the_page_shows_the_state_python_gave(show):
    shown = cases.widget(
        number=-1e-8,
        format="fp8-e5m2",
        scale=2**7,
        batch=20,
        checkpointed=True,
        budget=3 * 2**19,
        label="mine <&>",
    )
    page = show(shown)
    agree(page, shown)
    assert page.get_by_text("Gradients in fp8-e5m2: mine <&>").is_visible()
    assert control(page, "number").input_value() == "-1e-8"
    assert control(page, "scale").input_value() == "7"
    assert control(page, "format").input_value() == "fp8-e5m2"
    assert control(page, "batch").input_value() == "2"
    assert control(page, "checkpointed").is_checked()
    budget = float(control(page, "budget").input_value())
    assert budget == 3 * 2**19 / 2**30


def test_every_scale_and_format(page, widget):
    states = [
        ([("format", f), ("scale", e)], {"format": f, "scale": 2**e})
        for f, e in product(SCALED, range(25))
    ]
    sweep(page, widget, states)


def test_every_recipe_and_many_numbers(page, widget):
    """Also with a budget, which is typed in GiB."""
    peak = widget.numbers()["recipes"]["bf16"]["bytes"]
    states = []
    for at, (x, i) in enumerate(product(NUMBERS, range(3))):
        budget = (None, peak, peak - 1, 2**30, 2**50)[at % 5]
        typed = "" if budget is None else repr(budget / 2**30)
        settings = [("number", repr(x)), ("batch", i), ("budget", typed)]
        settings.append(("checkpointed", at % 2 == 1))
        traits = {"number": x, "batch": (1, 8, 20)[i], "budget": budget}
        states.append((settings, traits | {"checkpointed": at % 2 == 1}))
    sweep(page, widget, states)


def test_the_moment_of_each_peak(page, widget):
    seen = set()
    for at, batch in enumerate((1, 8, 20)):
        widget.batch = batch
        page.evaluate(f"({pages.ENTER})([0, [['batch', {at}]]])")
        agree(page, widget)
        recipes = widget.numbers()["recipes"].values()
        words = [MOMENTS[of["phase"]] for of in recipes]
        rows = page.locator(".mb-table tbody tr").all_inner_texts()
        assert [row.split("\t")[-1] for row in rows] == words
        seen |= set(words)
    assert seen == {"backward", "optimizer step"}


def test_bits_in_their_cells(page):
    page.evaluate(f"({pages.ENTER})([0, [['number', '-2^-24']]])")
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


def test_where_the_bars_stand_without_a_scale(page):
    assert page.locator(".mb-ghost").count() == 0
    control(page, "scale").press("End")
    assert page.locator(".mb-ghost").count() == 1
    control(page, "scale").press("Home")
    assert page.locator(".mb-ghost").count() == 0


def test_no_category_is_told_by_colour_alone(page):
    looks = page.eval_on_selector_all(
        ".mb-legend svg rect:last-child",
        "all => all.map((rect) => {"
        " const id = rect.getAttribute('fill').slice(5, -1);"
        " const pattern = document.getElementById(id);"
        " const turn = pattern?.getAttribute('patternTransform');"
        " return `${pattern?.innerHTML ?? 'plain'} ${turn}`;"
        "})",
    )
    assert len(looks) == len(set(looks)) == 6


def test_gradients_have_their_colour(page):
    bars = page.locator("path.mb-bars")
    colour = bars.evaluate("e => getComputedStyle(e).fill")
    assert colour == "rgb(230, 159, 0)"


def test_a_first_bar_that_holds_more(show):
    page = show(cases.widget(**cases.SETTINGS[2]), cases.widget())
    note = page.get_by_text("The first bar holds what is smaller, too.")
    assert note.count() == 1


# How it is moved -----------------------------------------------------------


def test_by_keyboard(page, widget):
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("460")
    widget.number = 460
    agree(page, widget)
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    widget.scale = 4
    agree(page, widget)
    page.keyboard.press("End")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    widget.format, widget.scale = "bf16", 2**24
    agree(page, widget)
    for _ in range(2):
        page.keyboard.press("Tab")
    page.keyboard.press("Home")
    widget.batch = 1
    agree(page, widget)
    page.keyboard.press("Tab")
    page.keyboard.type("0.0009765625")
    widget.budget = 2**20
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    widget.checkpointed = True
    agree(page, widget)


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
        ("abc", "“abc” is no number"),
        ("1,5", "“1,5” is no number"),
        ("1/3", "“1/3” is no number"),
        ("<b>", "“<b>” is no number"),
        ("", "An empty field is no number"),
        ("  ", "An empty field is no number"),
        ("1e400", "“1e400” is beyond the largest number, 1.8e308"),
        ("-2^1024", "“-2^1024” is beyond the largest number, 1.8e308"),
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
    (shown,) = page.evaluate(SWEEP, [[]])
    assert parsed(shown) == expected(widget)
    field.press("Tab")
    page.keyboard.press("ArrowRight")  # of another part
    widget.scale = 2
    (shown,) = page.evaluate(SWEEP, [[]])
    assert parsed(shown) == expected(widget)
    said(page, widget.sentences()[1])
    assert why in wrong(page, "number")
    field.fill("0.125")  # the one that stayed
    accepted(page, "number", widget)
    field.fill("1e-")
    field.fill("-inf")
    widget.number = -inf
    accepted(page, "number", widget)


@pytest.mark.parametrize(
    "typed", ["abc", "0", "-1", "1e-11", "1,5", "1048577", "1e400", "inf"]
)
def test_a_text_that_is_no_budget(page, widget, typed):
    field = control(page, "budget")
    for text, bytes_, stays in (
        ("", None, "no budget"),
        ("2", 2**31, "2.00 GiB"),
    ):
        field.fill(text)
        widget.budget = bytes_
        accepted(page, "budget", widget)
        field.fill(typed)
        assert wrong(page, "budget") == (
            f"“{typed}” is no budget: {stays} stays. Use GiB above 0, as 24 "
            "or 0.5, up to 1048576, or nothing."
        )
        (shown,) = page.evaluate(SWEEP, [[]])
        assert parsed(shown) == expected(widget)
    assert page.locator(".mb-limit").count() == 0  # far beyond the bars
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "budget 2.00 GiB →" in texts
    field.fill("")
    widget.budget = None
    accepted(page, "budget", widget)
    field.fill("1048576")
    widget.budget = 2**50
    accepted(page, "budget", widget)


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
          for (const entry of [["number", "0.1"], ...Object.entries(of)]) {{
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


def test_a_sentence_waits_until_the_slider_rests(page, widget):
    said = page.evaluate(
        """async () => {
          const said = [];
          for (const live of document.querySelectorAll("[aria-live]")) {
            new MutationObserver(() => said.push(live.textContent))
              .observe(live, { childList: true });
          }
          const slider = document.querySelector("[data-key=scale]");
          for (let i = 0; i < 5; i++) {
            slider.stepUp();
            slider.dispatchEvent(new Event("input"));
            await Promise.resolve();
          }
          await new Promise((done) => setTimeout(done, 400));
          return said;
        }"""
    )
    widget.scale = 2**5
    assert said == [widget.sentences()[1]]


def test_a_kernel_changes_it(page, widget):
    """As `widget.show` and the traits do, also several at a time."""
    page.evaluate(
        """async () => {
          const text = document.querySelector('[type="text/x-esm"]');
          const type = "text/javascript";
          const blob = new Blob([text.textContent], { type });
          const module = await import(URL.createObjectURL(blob));
          const json = document.querySelector(".mb-state").textContent;
          const state = JSON.parse(json);
          let changed;
          const model = {
            get: (key) => state[key],
            set: (key, value) => window.change({ [key]: value }),
            save_changes: () => window.saved.push({ ...state }),
            on: (event, call) => (changed = call),
            off() {},
          };
          window.saved = [];
          window.change = (traits) => {
            Object.assign(state, traits);
            changed();
          };
          const el = document.createElement("div");
          document.querySelector(".mb-widget").replaceChildren(el);
          module.default.render({ model, el });
        }"""
    )
    other = cases.widget(**cases.SETTINGS[1], number=3, format="bf16")
    other.scale = 2**9
    page.evaluate("(traits) => window.change(traits)", other.state())
    agree(page, other)
    assert control(page, "number").input_value() == "3"
    control(page, "number").fill("inf")
    saved = page.evaluate("window.saved")
    other.set_state({"number": saved[-1]["number"]})
    assert other.number == inf
    agree(page, other)


# How it looks --------------------------------------------------------------


def test_every_part_has_a_role_and_a_name(page, widget):
    images = page.get_by_role("img").all()
    assert len(images) == 3
    labels = [image.get_attribute("aria-label") for image in images]
    assert labels == list(widget.sentences())
    controls = page.locator("input, select").all()
    assert len(controls) == 6
    for one in controls:
        assert one.evaluate("e => e.labels.length") == 1
    for one in [*controls, page.get_by_role("button")]:
        # JupyterLab would else take the arrow keys for its shortcuts.
        assert one.get_attribute("data-lm-suppress-shortcuts")
    control(page, "scale").press("ArrowRight")
    spoken = control(page, "scale").get_attribute("aria-valuetext")
    assert spoken == "2 to the power of 1"
    spoken = control(page, "batch").get_attribute("aria-valuetext")
    assert spoken == "batch 8"
    assert page.locator("[aria-live=polite]").count() == 3


@pytest.mark.parametrize(
    "width, style",
    [(320, ""), (360, pages.DARK), (1280, ""), (1280, pages.DARK)],
    ids=["320", "360-dark", "1280", "1280-dark"],
)
def test_every_width_and_theme(show, widget, width, style):
    widget.budget = 2**20
    page = show(widget, width=width, style=style)
    page.wait_for_function(
        "document.querySelector('.mb-root svg').viewBox.baseVal.width !== 640"
    )
    control(page, "budget").fill("x")
    control(page, "budget").blur()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(pages.OUTSIDE) == []
    colours = pages.colours(
        page,
        ".mb-root, .mb-root :is(td, dd, label, [type=text], p, figcaption)",
    )
    wanted = "rgb(206, 214, 221)" if style else "rgb(0, 0, 0)"
    assert colours == {wanted}


@pytest.mark.parametrize(
    "width, font",
    [(360, ""), (320, WIDE_FONT), (420, WIDE_FONT), (1000, WIDE_FONT)],
    ids=["360", "320-wide", "420-wide", "1000-wide"],
)
def test_labels_fit(show, widget, width, font):
    """No text overlaps another one or leaves the picture, at the extremes."""
    page = show(widget, width=width, style=font)
    peaks = [of["bytes"] for of in widget.numbers()["recipes"].values()]
    budgets = ["", *(repr(b / 2**30) for b in (1024, *peaks)), "9", "1000000"]
    states = [[("number", text)] for text in (*LONGEST, *map(repr, NUMBERS))]
    states += [
        [("format", f), ("scale", e)]
        for f, e in product(SCALED, (0, 1, 13, 24))
    ]
    states += [
        [("batch", i), ("checkpointed", on), ("budget", text)]
        for i, on, text in product(range(3), (False, True), budgets)
    ]
    assert pages.misfits(page, states) == []


@pytest.mark.parametrize("width", [320, 390, 1000])
def test_labels_of_other_gradients_fit(show, width):
    """Nor does a dashed line go through one."""
    states = [
        [("format", f), ("scale", e)] for f, e in product(SCALED, (0, 9, 24))
    ]
    others = [
        *(cases.widget(**settings) for settings in cases.SETTINGS[1:4]),
        cases.widget(gradients=torch.tensor([1e-30, 1e-38])),
    ]
    page = show(*others, width=width)
    for number in range(len(others)):
        found = pages.misfits(page, states, widget=number, crossed=True)
        assert found == []


@pytest.mark.parametrize("width", [320, 390, 1000])
def test_no_dashed_line_goes_through_a_label(show, widget, width):
    """At every format, and with a budget at every place."""
    page = show(widget, width=width)
    states = [
        [("format", f), ("scale", e)] for f, e in product(SCALED, (0, 24))
    ]
    peak = max(of["bytes"] for of in widget.numbers()["recipes"].values())
    states += [
        [("budget", repr(peak * share / 20 / 2**30))] for share in range(1, 26)
    ]
    assert pages.misfits(page, states, crossed=True) == []
    assert page.locator(".mb-limit").count() == 1
    page.evaluate(  # it would be found: one at the height of a label
        """() => {
          const line = document.querySelector(".mb-mark").cloneNode();
          line.setAttribute("x1", 0);
          line.setAttribute("x2", 1000);
          for (const end of ["y1", "y2"]) line.setAttribute(end, 9);
          document.querySelectorAll(".mb-picture")[1].append(line);
        }"""
    )
    assert any("mb-mark" in text for text in page.evaluate(pages.CROSSED))


@pytest.mark.parametrize("width", [360, 760])
def test_nothing_jumps_while_it_is_moved(show, width):
    """The sentences have room for their longest."""
    page = show(cases.widget(**cases.SETTINGS[1]), width=width)
    tops = page.evaluate(
        f"""async (states) => {{
          const enter = {pages.ENTER};
          const tops = [];
          for (const settings of states) {{
            enter([0, settings]);
            await new Promise((done) => setTimeout(done, 170));
            tops.push([...document.querySelectorAll(".mb-picture")]
              .map((e) => Math.round(e.getBoundingClientRect().top + scrollY))
              .join());
          }}
          return tops;
        }}""",
        [
            [("number", "1.2345678901234567e-7")],
            [("number", 30 * "9" + "e400"), ("budget", 30 * "x")],
            [("number", "1"), ("format", "fp8-e5m2"), ("scale", 24)],
            [("number", "1e-5"), ("format", "bf16"), ("budget", "100")],
            [("format", "fp16"), ("scale", 20), ("budget", "0.0015")],
            [("checkpointed", True), ("budget", "0.000001")],
        ],
    )
    assert len(tops) == 6
    assert len(set(tops)) == 1


def test_nothing_moves_by_itself(page):
    assert page.evaluate("document.getAnimations().length") == 0
    style = bundle.style_text("precision")
    assert "transition" not in style and "animation" not in style


def test_clean_up(page):
    listeners, children, *left = page.evaluate(pages.CLEAN_UP)
    assert listeners >= 1 and children >= 1
    assert left == [0, 0]


@pytest.mark.parametrize("number", [0, 2])
def test_without_javascript(show, number):
    shown = cases.widget(**cases.SETTINGS[number], number=-1.2345e-39)
    page = show(shown, java_script_enabled=False, width=360)
    assert page.get_by_role("img").is_visible()
    assert page.get_by_text(shown.sentence()).is_visible()
    box = page.get_by_role("img").bounding_box()
    assert box["x"] + box["width"] <= 360
    outside = pages.OUTSIDE.replace(".mb-picture", "svg")
    small = "box.height < 11"
    assert small in outside
    assert page.evaluate(outside.replace(small, "false")) == []
    overlapping = pages.OVERLAPPING.replace(".mb-picture", "svg")
    assert page.evaluate(overlapping) == []
    stored = _number(shown.numbers()["formats"]["fp32"]["value"], 9)
    assert page.locator("svg text", has_text=stored).count() >= 1


def test_the_modules_weight(widget):
    """With its state it takes no more than a fifth of a page."""
    text = bundle.module_text("precision") + bundle.style_text("precision")
    assert len(text) + len(json.dumps(widget.state())) < 60_000
