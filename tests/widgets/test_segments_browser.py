"""The segment-count widget in a browser, without a kernel."""

import itertools
import json

import pytest
import segments_cases as cases
import widget_pages as pages

from membudget.checkpointing import Stage
from membudget.widgets import Segments, bundle, format_bytes, format_number

WIDE_FONT = "body, .mb-root { font-family: 'DejaVu Sans', Verdana; }"
SPLITS = {
    "balanced": "balanced, longer first",
    "pytorch": "PyTorch’s checkpoint_sequential",
}
CHAIN = [Stage(output=2**20, inner=3 * 2**20, backward_workspace=2**20)] * 12
MODULE = """async () => {
  const text = document.querySelector('[type="text/x-esm"]').textContent;
  const blob = new Blob([text], { type: "text/javascript" });
  window.segments = await import(URL.createObjectURL(blob));
}"""


@pytest.fixture
def page(show):
    return show(Segments())


def slider(page, name):
    return page.get_by_role("slider", name=name)


def layers(page):
    return slider(page, "Layers L")


def count(page):
    return slider(page, "Segments k")


def cost(page):
    return slider(page, "Cost c of a checkpoint")


def radio(page, split):
    return page.get_by_role("radio", name=SPLITS[split], exact=True)


def curve(page):
    return page.get_by_role("img").nth(1)


def drag(page, *shares):
    """Press the mouse at a share of the curve's axis, move, release."""
    curve(page).scroll_into_view_if_needed()
    box = curve(page).bounding_box()
    left, right = 34, box["width"] - 84
    y = box["y"] + box["height"] / 2
    for i, share in enumerate(shares):
        page.mouse.move(box["x"] + left + share * (right - left), y)
        if i == 0:
            page.mouse.down()
    page.mouse.up()


def agree(page, **state):
    """The page prints the numbers that Python has for this state."""
    widget = Segments(**state)
    n = widget.numbers()
    printed = page.eval_on_selector_all(
        "[data-number]",
        "all => all.map(e => [e.dataset.number, e.dataset.value])",
    )
    printed = {key: json.loads(value) for key, value in printed}
    expected = {key: n[key] for key in ("sizes", "extra_runs", "best")}
    for key in ("peak", "plain_peak", "best_peak"):
        expected[key] = n[key]
    for key in ("parts", "plain_parts"):
        expected |= {f"{key}.{part}": v for part, v in n[key].items()}
    if n["measured"] is not None:
        expected["measured"] = n["measured"]
    assert printed == expected
    size = format_number if widget.chain is None else format_bytes
    shown = page.locator('[data-number="peak"]').inner_text()
    assert shown == (size(n["peak"]) if n["peak"] else "–")
    assert count(page).input_value() == str(n["segments"])
    assert count(page).get_attribute("max") == str(n["layers"])
    assert radio(page, widget.split).is_checked()
    picture = page.get_by_role("img").first.get_attribute("aria-label")
    assert picture == widget.sentence()
    page.wait_for_function(
        "text => document.querySelector('[aria-live=polite]').innerText"
        " === text",
        arg=widget.sentence(),
    )


# What it shows -------------------------------------------------------------


def test_first_picture(page):
    agree(page)
    assert page.get_by_text("Memory during one step").is_visible()
    assert page.locator(".mb-fallback").count() == 0
    assert page.get_by_text("In units: a layer’s tape is 1").is_visible()


def test_the_tape_machine_in_the_browser(page):
    """The same moments, numbers and words as Python's, for a sample."""
    page.evaluate(MODULE)
    sample = list(cases.cases(every=9))
    assert len(sample) > 100
    answer = page.evaluate(
        """(all) => {
          const { describe, sentence, simulate } = window.segments;
          return JSON.stringify(all.map(([state, stages, sizes]) => [
            simulate(stages, sizes), describe(state), sentence(state),
          ]));
        }""",
        [[c["state"], c["stages"], c["numbers"]["sizes"]] for c in sample],
    )
    for case, (moments, numbers, sentence) in zip(
        sample, json.loads(answer), strict=True
    ):
        assert moments == case["moments"]
        assert numbers.pop("root") == pytest.approx(case["numbers"]["root"])
        del case["numbers"]["root"]
        assert numbers == case["numbers"]
        assert sentence == case["sentence"]


def test_the_page_shows_the_state_python_gave(show):
    state = {
        "layers": 23,
        "segments": 5,
        "checkpoint": 0.25,
        "split": "pytorch",
        "measured": {5: 9.2, 23: 8},
    }
    page = show(Segments(**state, label="mine <&>"))
    agree(page, **state)
    assert page.get_by_text("Memory during one step: mine <&>").is_visible()
    assert cost(page).input_value() == "5"
    assert layers(page).input_value() == "23"


def test_the_pictures_say_what_is_where(page):
    texts = page.locator(".mb-picture text").all_text_contents()
    assert {"peak", "with k = 0", "forward pass", "R", "backward"} <= set(
        texts
    )
    assert texts[texts.index("peak") + 1] == "8"
    assert texts[texts.index("with k = 0") + 1] == "17"
    assert texts[texts.index("k = 4") + 1] == "8"
    assert "√L = 4" in texts
    assert "least" not in texts  # the one chosen is among them
    assert page.locator(".mb-best").count() == 4
    cost(page).press("ArrowLeft")
    count(page).press("Home")
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "√(L·a/c) = 4.1" in texts
    assert texts[texts.index("least") + 1] == "7.75"
    assert "with k = 0" not in texts


def test_a_mark_beyond_the_curve(show):
    page = show(Segments(layers=3, checkpoint=0.1), width=320)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "√(L·a/c) = 5.48 →" in texts
    assert page.locator(".mb-mark").count() == 0


def test_recomputation_has_its_colour(page):
    band, *strip = page.locator(".mb-picture .mb-part-recomputed").all()
    assert len(strip) == 4
    purple = "rgb(204, 121, 167)"
    assert band.evaluate("e => getComputedStyle(e).fill") == purple
    count(page).press("Home")
    assert page.locator(".mb-picture .mb-part-recomputed").count() == 0


def test_no_part_is_told_by_colour_alone(show):
    page = show(Segments(segments=3, split="pytorch"))
    bands = page.eval_on_selector_all(
        ".mb-picture path[fill]",
        "all => all.map((path) => {"
        " const id = path.getAttribute('fill').slice(5, -1);"
        " const pattern = document.getElementById(id);"
        " const turn = pattern?.getAttribute('patternTransform');"
        " return [id, `${pattern?.innerHTML ?? 'plain'} ${turn}`];"
        "})",
    )
    assert len({id for id, _ in bands}) == 6
    assert len({look for _, look in bands}) == 6


def test_a_chain_in_bytes(show):
    page = show(Segments(CHAIN, segments=3, label="12 blocks"))
    agree(page, chain=CHAIN, segments=3)
    assert layers(page).count() == cost(page).count() == 0  # hidden
    assert page.get_by_text("In bytes, from the sizes").is_visible()
    texts = page.locator(".mb-picture text").all_text_contents()
    assert texts.count("MiB") == 2
    assert texts[texts.index("peak") + 1] == "19.0 MiB"
    assert "√(L·a/c) = 6.93" in texts
    radio(page, "pytorch").check()
    agree(page, chain=CHAIN, segments=3, split="pytorch")


# How it is moved -----------------------------------------------------------


def test_sliders_by_keyboard(page):
    count(page).press("ArrowRight")
    agree(page, segments=5)
    count(page).press("Home")
    agree(page, segments=0)
    count(page).press("End")
    agree(page, segments=16)
    layers(page).press("ArrowLeft")
    agree(page, layers=15, segments=15)
    layers(page).press("Home")
    agree(page, layers=1, segments=1)
    layers(page).press("End")
    agree(page, layers=100, segments=1)
    cost(page).press("ArrowLeft")
    agree(page, layers=100, segments=1, checkpoint=0.95)
    cost(page).press("Home")
    agree(page, layers=100, segments=1, checkpoint=0.05)


def test_sliders_by_mouse(page):
    box = count(page).bounding_box()
    y = box["height"] / 2
    count(page).click(position={"x": box["width"] * 0.5, "y": y})
    agree(page, segments=8)
    layers(page).click(position={"x": box["width"] * 0.4, "y": y})
    many = int(layers(page).input_value())
    assert 35 < many < 46
    agree(page, layers=many, segments=8)


def test_every_cost(page):
    for n in range(1, 21):
        cost(page).fill(str(n))
        root = page.locator(".mb-picture text", has_text="√")
        widget = Segments(checkpoint=n / 20)
        number = format_number(widget.numbers()["root"])
        assert f" = {number}" in root.text_content()
        output = page.locator("output").nth(2).inner_text()
        assert output == format_number(n / 20)


def test_split_by_keyboard_and_mouse(page):
    radio(page, "balanced").press("ArrowRight")
    agree(page, split="pytorch")
    page.get_by_text("balanced, longer first").click()
    agree(page)


def test_all_by_tab(page):
    for name in ("layers", "segments", "checkpoint", "split"):
        page.keyboard.press("Tab")
        focus = "document.activeElement.dataset.key"
        assert page.evaluate(focus) == name
        outline = "getComputedStyle(document.activeElement).outline"
        assert "solid 2px" in page.evaluate(outline)


def test_the_curve_can_be_dragged(page):
    drag(page, 0.5)
    agree(page, segments=8)
    page.keyboard.press("ArrowRight")  # the keys go on from there
    agree(page, segments=9)
    drag(page, 0.3, 0.6, -0.02)
    agree(page, segments=0)
    drag(page, 0.2, 1.05)
    agree(page, segments=16)
    page.mouse.move(300, 300)  # without a button nothing moves
    agree(page, segments=16)


def test_the_sentence_is_said_once_it_rests(page):
    """A screen reader hears where the slider stops, not each number."""
    said = pages.said(page, '[data-key="segments"]')
    assert said == [Segments(segments=9).sentence()]


def test_two_widgets_do_not_mix(show):
    page = show(Segments(), Segments(layers=9, segments=3))
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 10
    count(page).nth(1).press("ArrowRight")
    radio(page, "pytorch").nth(1).check()
    assert radio(page, "balanced").first.is_checked()
    assert [k.input_value() for k in count(page).all()] == ["4", "4"]


# What was measured ---------------------------------------------------------


def test_measured_points_stand_where_they_were_measured(show):
    measured = {4: 8, 2: 10}
    page = show(Segments(measured=measured))
    agree(page, measured=measured)
    centres = page.eval_on_selector_all(
        ".mb-measured, .mb-now",
        "all => all.map((e) => [e.cx.baseVal.value, e.cy.baseVal.value])",
    )
    assert len(centres) == 3
    assert centres[1] == centres[2]  # the prediction is right
    assert page.get_by_text("Points were measured.").is_visible()


def test_measured_points_belong_to_their_setting(show):
    state = {"measured": {4: 8.25}}
    page = show(Segments(**state))
    radio(page, "pytorch").check()
    agree(page, split="pytorch")
    assert page.locator(".mb-measured").count() == 0
    assert page.get_by_text("Points were measured.").count() == 0
    radio(page, "balanced").check()
    agree(page, **state)
    layers(page).press("ArrowRight")
    agree(page, layers=17)
    layers(page).press("ArrowLeft")
    cost(page).press("ArrowLeft")
    agree(page, checkpoint=0.95)
    cost(page).press("ArrowRight")
    agree(page, **state)
    count(page).press("ArrowRight")
    agree(page, segments=5, **state)
    assert page.locator(".mb-measured").count() == 1


def test_a_kernel_may_measure_and_bring_a_chain(page):
    page.evaluate(MODULE)
    measured = Segments(split="pytorch", measured={4: 8.5})
    chain = Segments(CHAIN, segments=3, measured={3: 9 * 2**20}, label="it")
    labels = page.evaluate(
        """async (changes) => {
          const calls = [];
          const json = document.querySelector(".mb-state").textContent;
          const state = JSON.parse(json);
          const sent = [];
          const model = {
            get: (key) => state[key],
            set: (key, value) => {
              state[key] = value;
              sent.push(key);
              calls.forEach((call) => call());
            },
            save_changes() {},
            on: (event, call) => calls.push(call),
            off() {},
          };
          const el = document.createElement("div");
          document.body.append(el);
          window.segments.default.render({ model, el });
          el.querySelectorAll("[type=radio]")[1].click();
          await Promise.resolve();
          const seen = [[...sent]];
          for (const change of changes) {
            Object.assign(state, change);
            calls.forEach((call) => call());
            await Promise.resolve();
            seen.push([
              el.querySelector(".mb-picture").getAttribute("aria-label"),
              el.querySelectorAll(".mb-measured").length,
            ]);
          }
          return [...seen, el.querySelector('[data-key="segments"]').max];
        }""",
        [
            {"measured": {}},
            {"measured": measured.state()["measured"]},
            chain.state(),
        ],
    )
    assert labels == [
        ["split"],
        [Segments(split="pytorch").sentence(), 0],
        [measured.sentence(), 1],
        [chain.sentence(), 1],
        "12",
    ]


# How it looks --------------------------------------------------------------


def test_every_part_has_a_role_and_a_name(page):
    images = page.get_by_role("img").all()
    assert len(images) == 2
    assert all(image.get_attribute("aria-label") for image in images)
    label = images[1].get_attribute("aria-label")
    assert label == "Peak for 0 to 16 segments: least at k = 3 to 6, 8 units"
    controls = page.locator("input").all()
    assert len(controls) == 5
    for control in controls:
        # JupyterLab would else take the arrow keys for its shortcuts.
        assert control.get_attribute("data-lm-suppress-shortcuts")
        assert control.evaluate("e => e.labels.length") == 1
    assert page.get_by_role("radiogroup", name="Split").count() == 1
    spoken = count(page).get_attribute("aria-valuetext")
    assert spoken == "4 segments: peak 8 units"
    count(page).press("Home")
    spoken = count(page).get_attribute("aria-valuetext")
    assert spoken == "no checkpointing: peak 17 units"
    rows = page.get_by_role("rowheader").all_inner_texts()
    assert {"checkpoints", "recomputed tapes", "peak"} <= set(rows)
    columns = page.get_by_role("columnheader").all_inner_texts()
    assert columns == ["units at the peak", "k = 0", "k = 0"]


@pytest.mark.parametrize("width", [320, 360, 1280])
@pytest.mark.parametrize("style", ["", pages.DARK], ids=["light", "dark"])
def test_every_width_and_theme(show, width, style):
    page = show(
        Segments(
            layers=23,
            segments=5,
            checkpoint=0.25,
            split="pytorch",
            measured={5: 9.25},
        ),
        width=width,
        style=style,
    )
    page.wait_for_function(
        "document.querySelector('.mb-root svg').viewBox.baseVal.width !== 640"
    )
    inner = page.evaluate("document.documentElement.scrollWidth")
    assert inner == width
    assert page.evaluate(pages.OUTSIDE) == []
    colours = pages.colours(
        page,
        ".mb-root, .mb-root td, .mb-root dd, .mb-root label",
    )
    expected = "rgb(206, 214, 221)" if style else "rgb(0, 0, 0)"
    assert colours == {expected}


@pytest.mark.parametrize("font", ["", WIDE_FONT], ids=["", "wide"])
@pytest.mark.parametrize("width", [320, 360, 1000])
def test_labels_fit(show, width, font):
    """No text overlaps another one or leaves the picture, at many states."""
    page = show(
        Segments(measured={1: 17}),
        Segments(CHAIN, segments=3),
        width=width,
        style=font,
    )
    states = [
        [("layers", many), ("checkpoint", share), ("segments", k)]
        for many, share in itertools.product(
            (1, 2, 9, 16, 47, 100), (1, 7, 20)
        )
        for k in sorted({0, 1, many // 9, many // 2, many})
    ]
    assert len(states) == 69
    assert pages.misfits(page, states) == []
    states = [[("segments", k)] for k in range(13)]
    assert pages.misfits(page, states, widget=1) == []


@pytest.mark.parametrize("width", [360, 760])
def test_nothing_jumps_while_it_is_moved(show, width):
    """The sentence has room for its longest."""
    page = show(Segments(layers=97, checkpoint=0.35), width=width)
    moves = []
    for split, k in itertools.product(SPLITS, (0, 1, 9, 45, 97)):
        widget = Segments(layers=97, checkpoint=0.35, split=split, segments=k)
        settings = [("split", SPLITS[split]), ("segments", k)]
        moves.append((settings, widget.sentence()))
    assert len(pages.places(page, ".mb-picture", moves)) == 1


def test_nothing_moves_by_itself(page):
    assert page.evaluate("document.getAnimations().length") == 0
    style = bundle.style_text("segments")
    assert "transition" not in style and "animation" not in style


def test_clean_up(page):
    listeners, children, *left = page.evaluate(pages.CLEAN_UP)
    assert listeners >= 1 and children >= 1
    assert left == [0, 0]


@pytest.mark.parametrize("segments", [0, 4])
def test_without_javascript(show, segments):
    widget = Segments(segments=segments)
    page = show(widget, java_script_enabled=False, width=360)
    assert page.get_by_role("img").is_visible()
    assert page.get_by_text(widget.sentence()).is_visible()
    box = page.get_by_role("img").bounding_box()
    assert box["x"] + box["width"] <= 360
    outside = pages.OUTSIDE.replace(".mb-picture", "svg")
    small = "box.height < 11"
    assert small in outside
    assert page.evaluate(outside.replace(small, "false")) == []


def test_the_modules_weight():
    """With its state it takes no more than a quarter of a page."""
    text = bundle.module_text("segments") + bundle.style_text("segments")
    assert len(text) + len(json.dumps(Segments().state())) < 75_000
