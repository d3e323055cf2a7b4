"""The timeline widget in a browser, without a kernel."""

import itertools
import json
import re

import pytest
import timeline_cases as cases
import widget_pages as pages

from membudget.widgets import Timeline, bundle, format_bytes
from membudget.widgets.timeline import SHOWN, example_steps

WIDE_FONT = "body, .mb-root { font-family: 'DejaVu Sans', Verdana; }"
STEPS = list(example_steps())
MODULE = """async () => {
  const text = document.querySelector('[type="text/x-esm"]').textContent;
  const blob = new Blob([text], { type: "text/javascript" });
  window.timeline = await import(URL.createObjectURL(blob));
  const json = document.querySelector(".mb-state").textContent;
  window.state = JSON.parse(json);
}"""


@pytest.fixture
def page(show):
    return show(Timeline())


def slider(page):
    return page.get_by_role("slider", name="Operator")


def radio(page, name):
    return page.get_by_role("radio", name=name, exact=True)


def button(page, name):
    return page.get_by_role("button", name=name, exact=True)


def picture(page):
    return page.get_by_role("img").first


def drag(page, *shares):
    """Press the mouse at a share of the picture's width, move, release."""
    box = picture(page).bounding_box()
    y = box["y"] + box["height"] / 2
    for i, share in enumerate(shares):
        page.mouse.move(box["x"] + share * box["width"], y)
        if i == 0:
            page.mouse.down()
    page.mouse.up()


def agree(page, **state):
    """The page prints the numbers that Python has for this state."""
    widget = Timeline(**state)
    n = widget.numbers()
    printed = page.eval_on_selector_all(
        "[data-number]",
        "all => all.map(e => [e.dataset.number, e.dataset.value,"
        " e.innerText])",
    )
    drawn = {key.split(".")[1] for key, _, _ in printed}
    assert drawn >= {"total", "parameters", "optimizer", "activations"}
    assert len(printed) == 3 * len(drawn)
    for key, value, text in printed:
        moment, category = key.split(".")
        count = n[moment][category]
        assert json.loads(value) == count, key
        assert text == (format_bytes(count) if count else "–")
    for moment in ("now", "forward_end", "peak"):
        hidden = set(SHOWN) - drawn
        assert not any(n[moment][category] for category in hidden)
    assert slider(page).input_value() == str(n["moment"] + 1)
    assert page.locator("output").inner_text() == (
        f"{n['moment'] + 1} of {n['operators']}"
    )
    assert radio(page, n["step"]).is_checked()
    assert picture(page).get_attribute("aria-label") == widget.sentence()
    page.wait_for_function(
        "text => document.querySelector('[aria-live=polite]').innerText"
        " === text",
        arg=widget.sentence(),
    )
    sizes = page.locator("table").nth(1).locator("td:last-child")
    shown, rest = n["largest"][:7], n["largest"][7:]
    expected = [format_bytes(row["bytes"]) for row in shown]
    left = sum(row["bytes"] for row in rest)
    expected.append(format_bytes(left) if rest else "")
    assert sizes.all_inner_texts() == expected


# What it shows -------------------------------------------------------------


def test_first_picture(page):
    agree(page)
    title = page.get_by_text("Memory during one training step")
    assert title.inner_text().endswith(
        ": an MLP on handwritten digits, with Adam"
    )
    assert page.locator(".mb-fallback").count() == 0


def test_every_moment_of_every_step(page):
    """The module in the browser and Python give the same numbers."""
    page.evaluate(MODULE)
    widget = Timeline()
    for widget.step, tracker in example_steps().items():
        last = len(tracker.operators)
        answer = page.evaluate(
            """([step, last]) => {
              const all = [...Array(last + 1).keys()].map((slot) => ({
                ...window.state, step, moment: slot - 1,
              }));
              const { describe, sentence } = window.timeline;
              return JSON.stringify([all.map(describe), all.map(sentence)]);
            }""",
            [widget.step, last],
        )
        numbers, sentences = json.loads(answer)
        assert len(numbers) == last + 1
        for widget.moment in range(-1, last):
            assert numbers[widget.moment + 1] == widget.numbers()
            assert sentences[widget.moment + 1] == widget.sentence()


def test_the_largest_things_alive(page):
    """Equal storages of like modules stand in one row."""
    rows = page.locator("table").nth(1).locator("tbody tr").all_inner_texts()
    rows = [re.split(r"\t+", row) for row in rows]
    assert rows[0] == [
        "activations: relu of modules 1 … 13",
        "7 × 1.00 MiB",
        "7.00 MiB",
    ]
    assert rows[2][:2] == ["parameters: from before the step", "16 storages"]
    assert rows[4][0] == "temporaries: threshold_backward of module 13"
    assert rows[7][0] == "and 3 smaller"
    radio(page, "checkpointed").check()
    names = page.locator("table").nth(1).locator("tbody th")
    assert names.all_inner_texts()[1:3] == [
        "activations: relu of modules 3, 7",
        "recomputed activations: relu of modules 9, 11",
    ]
    radio(page, "accumulated").check()  # what the chapter names is there
    assert names.all_inner_texts()[4:7:2] == [
        "temporaries: mm of module 12",
        "temporaries: threshold_backward of module 13",
    ]
    slider(page).press("Home")
    assert page.get_by_text("nothing else").is_visible()


def test_the_picture_says_what_is_where(page):
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "threshold_backward of module 13: 14.0 MiB" in texts
    assert {"peak", "end of forward pass", "MiB", "backward pass"} <= set(
        texts
    )
    for name, tracker in example_steps().items():
        at = texts.index(name)
        assert texts[at + 1] == format_bytes(tracker.peak)
    assert page.locator(".mb-picture .mb-recomputation").count() == 0
    radio(page, "checkpointed").check()
    band, *strip = page.locator(".mb-picture .mb-recomputation").all()
    assert len(strip) == 4
    purple = "rgb(204, 121, 167)"
    assert band.evaluate("e => getComputedStyle(e).fill") == purple


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("width", [390, 1000])
def test_the_other_steps_reach_their_peaks(show, step, width):
    page = show(Timeline(step=step), width=width)
    tops = page.eval_on_selector_all(
        ".mb-picture .mb-other",
        "all => all.map((path) => path.getBBox().y)",
    )
    others = [tracker for name, tracker in example_steps().items()]
    others.remove(example_steps()[step])
    most = max(tracker.peak for tracker in example_steps().values())
    heights = [228 / 1.04 * tracker.peak / most for tracker in others]
    assert [268 - top for top in tops] == pytest.approx(heights, abs=0.06)
    looks = page.eval_on_selector_all(
        ".mb-picture .mb-other",
        "all => all.map((path) => getComputedStyle(path).strokeDasharray)",
    )
    assert len(set(looks)) == 2


def test_no_category_is_told_by_colour_alone(show):
    """Neighbours differ in their pattern as well."""
    page = show(Timeline(step="checkpointed"))
    bands = page.eval_on_selector_all(
        ".mb-picture path[fill]",
        "all => all.map((path) => {"
        " const id = path.getAttribute('fill').slice(5, -1);"
        " const pattern = document.getElementById(id);"
        " return [id.split('-').at(-1), pattern?.innerHTML ?? 'plain'];"
        "})",
    )
    assert [name for name, _ in bands] == list(SHOWN)
    looks = [look for _, look in bands]
    assert looks.count("plain") == 2
    for one, next_ in itertools.pairwise(looks):
        assert one != next_


def test_the_page_shows_the_state_python_gave(show):
    state = {"step": "accumulated", "moment": 500}
    page = show(Timeline(**state, label="mine <&>"))
    agree(page, **state)
    assert page.get_by_text("Memory during one training step: mine <&>")


@pytest.mark.parametrize("name", list(cases.odd_steps()))
def test_odd_steps(show, name):
    page = show(Timeline(cases.odd_steps(), step=name), width=390)
    widget = Timeline(cases.odd_steps(), step=name)
    assert picture(page).get_attribute("aria-label") == widget.sentence()
    slider(page).press("End")
    slider(page).press("ArrowLeft")
    for key in ("End of forward", "Peak"):
        button(page, key).click()
    assert slider(page).input_value() == str(widget.moment + 1)
    assert page.evaluate(pages.OUTSIDE) == []
    assert page.evaluate(pages.OVERLAPPING) == []


# How it is moved -----------------------------------------------------------


def test_slider_by_keyboard(page):
    slider(page).press("ArrowRight")
    agree(page, moment=49)
    slider(page).press("ArrowLeft")
    slider(page).press("ArrowLeft")
    agree(page, moment=47)
    slider(page).press("Home")
    agree(page, moment=-1)
    slider(page).press("ArrowLeft")
    agree(page, moment=-1)
    slider(page).press("End")
    agree(page, moment=274)


def test_slider_by_mouse(page):
    box = slider(page).bounding_box()
    slider(page).click(
        position={"x": box["width"] * 0.6, "y": box["height"] / 2}
    )
    moment = int(slider(page).input_value()) - 1
    assert 150 < moment < 180
    agree(page, moment=moment)


def test_another_step_goes_to_its_peak(page):
    radio(page, "accumulated").click()
    agree(page, step="accumulated")
    slider(page).press("End")
    agree(page, step="accumulated", moment=677)
    page.get_by_text("checkpointed", exact=True).first.click()
    agree(page, step="checkpointed")


def test_steps_by_keyboard(page):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.value") == "plain"
    page.keyboard.press("ArrowRight")
    agree(page, step="accumulated")
    page.keyboard.press("ArrowRight")
    agree(page, step="checkpointed")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    end = Timeline(step="checkpointed").numbers()["forward_end_moment"]
    agree(page, step="checkpointed", moment=end)
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    agree(page, step="checkpointed")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    agree(page, step="checkpointed", moment=76)


@pytest.mark.parametrize("step", STEPS)
def test_buttons(show, step):
    page = show(Timeline(step=step, moment=3))
    end = Timeline(step=step).numbers()["forward_end_moment"]
    button(page, "End of forward").click()
    agree(page, step=step, moment=end)
    button(page, "Peak").click()
    agree(page, step=step)


def test_the_picture_can_be_dragged(page):
    drag(page, 0.5)
    moment = int(slider(page).input_value()) - 1
    assert 60 < moment < 100
    agree(page, moment=moment)
    page.keyboard.press("ArrowRight")  # the keys go on from there
    agree(page, moment=moment + 1)
    drag(page, 0.5, 0.3, 0.001)
    agree(page, moment=-1)
    drag(page, 0.1, 0.999)
    agree(page, moment=274)
    page.mouse.move(300, 300)  # without a button nothing moves
    agree(page, moment=274)


def test_the_line_stands_where_the_mouse_is(page):
    box = picture(page).bounding_box()
    for share in (0.2, 0.45, 0.6, 0.8):
        drag(page, share)
        line = page.locator(".mb-cursor").bounding_box()
        middle = line["x"] + line["width"] / 2
        assert abs(middle - box["x"] - share * box["width"]) < 4


def test_the_sentence_is_said_once_it_rests(page):
    """A screen reader hears where the slider stops, not each moment."""
    said = pages.said(page, "[type=range]")
    assert said == [Timeline(moment=53).sentence()]


def test_two_widgets_do_not_mix(show):
    page = show(Timeline(), Timeline(step="checkpointed"))
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 10
    slider(page).nth(1).press("ArrowRight")
    radio(page, "accumulated").nth(1).check()
    assert radio(page, "plain").first.is_checked()
    values = [s.input_value() for s in slider(page).all()]
    assert values == ["49", str(Timeline(step="accumulated").moment + 1)]


def test_a_kernel_may_bring_other_steps(page):
    """The choice, the picture and the tables follow the trait."""
    page.evaluate(MODULE)
    other = Timeline(cases.odd_steps(), step="two steps", label="other")
    shown = page.evaluate(
        """async (other) => {
          const calls = [];
          const state = { ...window.state };
          const model = {
            get: (key) => state[key],
            set: (key, value) => (state[key] = value),
            save_changes() {},
            on: (event, call) => calls.push(call),
            off() {},
          };
          const el = document.createElement("div");
          document.body.append(el);
          window.timeline.default.render({ model, el });
          Object.assign(state, other);
          calls.forEach((call) => call());
          await Promise.resolve();
          return [
            [...el.querySelectorAll("[type=radio]")].map((e) => e.value),
            el.querySelector("[type=radio]:checked").value,
            el.querySelector(".mb-picture").getAttribute("aria-label"),
            el.querySelector("[type=range]").max,
            el.querySelectorAll(".mb-other").length,
          ];
        }""",
        other.state(),
    )
    assert shown == [
        list(other.steps),
        "two steps",
        other.sentence(),
        str(len(other.steps["two steps"].operators)),
        4,
    ]


# How it looks --------------------------------------------------------------


def test_every_part_has_a_role_and_a_name(page):
    images = page.get_by_role("img").all()
    assert [bool(i.get_attribute("aria-label")) for i in images] == [True]
    controls = page.locator("input, button").all()
    assert len(controls) == 6
    for control in controls:
        # JupyterLab would else take the arrow keys for its shortcuts.
        assert control.get_attribute("data-lm-suppress-shortcuts")
        named = "e => e.labels.length === 1 || e.innerText !== ''"
        assert control.evaluate(named)
    assert page.get_by_role("radiogroup", name="Step").count() == 1
    assert slider(page).get_attribute("aria-valuetext") == (
        "operator 49 of 275: threshold_backward of module 13, "
        "in the backward pass: 14.0 MiB"
    )
    rows = page.get_by_role("rowheader").all_inner_texts()
    assert {"gradients", "activations", "total"} <= set(rows)
    columns = page.get_by_role("columnheader").all_inner_texts()
    assert columns[1:4] == ["now", "end of forward", "peak"]


def test_focus_is_visible(page):
    for _ in range(4):
        page.keyboard.press("Tab")
        outline = "getComputedStyle(document.activeElement).outline"
        assert "solid 2px" in page.evaluate(outline)


@pytest.mark.parametrize("width", [320, 390, 1200])
@pytest.mark.parametrize("style", ["", pages.DARK], ids=["light", "dark"])
def test_every_width_and_theme(show, width, style):
    page = show(Timeline(step="checkpointed"), width=width, style=style)
    page.wait_for_function(
        "document.querySelector('.mb-root svg').viewBox.baseVal.width !== 640"
    )
    inner = page.evaluate("document.documentElement.scrollWidth")
    assert inner == width
    assert page.evaluate(pages.OUTSIDE) == []
    colours = pages.colours(
        page,
        ".mb-root, .mb-root td, .mb-root th, .mb-root label, .mb-root button",
    )
    expected = "rgb(206, 214, 221)" if style else "rgb(0, 0, 0)"
    assert colours == {expected}


@pytest.mark.parametrize("font", ["", WIDE_FONT], ids=["", "wide"])
@pytest.mark.parametrize("width", [320, 390, 700, 1000])
def test_labels_fit(show, width, font):
    """No text overlaps another one or leaves the picture, at many moments."""
    page = show(Timeline(), width=width, style=font)
    states = []
    for step in STEPS:
        last = len(example_steps()[step].operators)
        for value in sorted({0, 1, last, *range(5, last, 67)}):
            states.append([("step", step), ("moment", value)])
    assert len(states) > 20
    assert pages.misfits(page, states) == []


@pytest.mark.parametrize("width", [390, 760])
def test_nothing_jumps_while_it_is_moved(show, width):
    """The sentence has room for its longest."""
    page = show(Timeline(), width=width)
    for step in STEPS:
        last = len(example_steps()[step].operators)
        moves = []
        for value in (0, last // 9, last // 3, last - 1):
            sentence = Timeline(step=step, moment=value - 1).sentence()
            settings = [("step", step), ("moment", value)]
            moves.append((settings, sentence))
        assert len(pages.places(page, "table", moves)) == 1


def test_a_cut_label_keeps_the_bytes(show):
    """Where the operator's name has no room, the number has."""
    page = show(Timeline(moment=36), width=320)
    label = page.locator(".mb-picture g").nth(1).locator("text")
    assert label.text_content() == "_log_softmax_backward_data: 12.1 MiB"


def test_nothing_moves_by_itself(page):
    assert page.evaluate("document.getAnimations().length") == 0
    style = bundle.style_text("timeline")
    assert "transition" not in style and "animation" not in style


def test_clean_up(page):
    listeners, children, *left = page.evaluate(pages.CLEAN_UP)
    assert listeners >= 1 and children >= 1
    assert left == [0, 0]


def test_without_javascript(show):
    widget = Timeline(step="checkpointed")
    page = show(widget, java_script_enabled=False, width=390)
    assert page.get_by_role("img").is_visible()
    assert page.get_by_text(widget.sentence()).is_visible()
    box = page.get_by_role("img").bounding_box()
    assert box["x"] + box["width"] <= 390


def test_the_modules_weight():
    """With its state it takes no more than a quarter of a page."""
    text = bundle.module_text("timeline") + bundle.style_text("timeline")
    assert len(text) + len(json.dumps(Timeline().state())) < 75_000
