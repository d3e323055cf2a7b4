"""The ledger widget in a browser, without a kernel."""

import itertools
import json

import ledger_cases as cases
import pytest
import widget_pages as pages

from membudget.ledger import OPTIMIZERS, RECIPES
from membudget.widgets import Ledger, bundle, format_bytes
from membudget.widgets.ledger import BARS

GIB = 2**30
WIDE_FONT = "body, .mb-root { font-family: 'DejaVu Sans', Verdana; }"
MODULE = """async () => {
  const text = document.querySelector('[type="text/x-esm"]').textContent;
  const blob = new Blob([text], { type: "text/javascript" });
  window.ledger = await import(URL.createObjectURL(blob));
}"""
KEYS = [
    *("preset", "batch", "tokens", "steps", "recipe", "optimizer", "budget"),
    *("checkpointed", "fused", "foreach", None),
]


@pytest.fixture
def page(show):
    return show(Ledger())


def control(page, key):
    return page.locator(f'[data-key="{key}"]')


def shape(page):
    """Open the folded part."""
    page.locator("summary").click()
    return page


def enter(page, key, value):
    control(page, key).fill(str(value))
    control(page, key).press("Tab")


def agree(page, **state):
    """The page prints the numbers that Python has for this state."""
    widget = Ledger(**state)
    n = widget.numbers()
    page.wait_for_function(
        "text => document.querySelector('[aria-live=polite]').textContent"
        " === text",
        arg=widget.sentence(),
    )
    printed = page.eval_on_selector_all(
        "[data-number]",
        "all => all.map(e => [e.dataset.number, e.dataset.value])",
    )
    printed = {key: json.loads(value) for key, value in printed}
    expected = {"peak": n["peak"]["bytes"]}
    expected |= {key: n[key] for key in ("parameters", "states")}
    if widget.budget:
        expected["largest"] = n["largest"]
    for bar in BARS:
        expected[f"{bar}.bytes"] = n[bar]["bytes"]
        expected |= {f"{bar}.{c}": v for c, v in n[bar]["split"].items()}
    assert printed == expected
    assert page.get_by_role("img").get_attribute("aria-label") == (
        widget.sentence()
    )
    texts = page.locator(".mb-picture text").all_text_contents()
    for bar in BARS:
        (text,) = [t for t in texts if t.startswith(f"{bar}: ")]
        assert format_bytes(n[bar]["bytes"]) in text
        assert ("peak" in text) == (n[bar] == n["peak"])
    for key in ("preset", "family", "recipe", "optimizer"):
        assert control(page, key).input_value() == getattr(widget, key)
    for key in ("tied", "fused", "checkpointed", "foreach"):
        assert control(page, key).is_checked() == getattr(widget, key)
    for key in ("depth", "width", "heads", "vocabulary"):
        assert control(page, key).input_value() == str(getattr(widget, key))
    shown = page.locator("output").all_text_contents()
    assert shown == [str(widget.batch), str(widget.tokens), str(widget.steps)]


# What it shows -------------------------------------------------------------


def test_first_picture(page):
    agree(page)
    assert page.get_by_text("Memory at the worst moment").is_visible()
    assert page.locator(".mb-fallback").count() == 0
    assert page.locator(".mb-problem").is_hidden()
    assert not control(page, "width").is_visible()  # folded


def test_the_ledger_in_the_browser(page):
    """The same numbers and words as Python's, for a sample."""
    page.evaluate(MODULE)
    sample = list(cases.cases(every=5))
    assert len(sample) > 100
    answer = page.evaluate(
        """(all) => JSON.stringify(all.map((state) => [
            window.ledger.describe(state), window.ledger.sentence(state),
          ]))""",
        [case["state"] for case in sample],
    )
    for case, answers in zip(sample, json.loads(answer), strict=True):
        assert answers == [case["numbers"], case["sentence"]]


def test_the_page_shows_the_state_python_gave(show):
    state = {
        "preset": "Llama 3 8B",
        "batch": 5,
        "tokens": 3000,
        "steps": 2,
        "checkpointed": True,
        "fused": False,
        "foreach": True,
        "recipe": "master",
        "budget": 137 * GIB,
    }
    page = show(Ledger(**state))
    agree(page, **state)
    options = control(page, "budget").locator("option").all_text_contents()
    assert options[-1] == "137 GiB"
    assert control(page, "budget").input_value() == str(137 * GIB)
    shape(page)
    assert control(page, "kv_heads").is_visible()
    assert control(page, "context").is_hidden()


def test_a_budget_is_a_dashed_line(show):
    page = show(Ledger(budget=15 * GIB))
    agree(page, budget=15 * GIB)
    line = page.locator(".mb-picture .mb-limit")
    assert line.count() == 1
    dashes = line.evaluate("e => getComputedStyle(e).strokeDasharray")
    assert dashes != "none"
    control(page, "budget").select_option("140 GiB (H200)")
    agree(page, budget=140 * GIB)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "budget 140 GiB →" in texts
    assert line.count() == 0
    control(page, "budget").select_option("none")
    agree(page)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert not any("budget" in text for text in texts)


def test_categories_have_their_colours_and_patterns(page):
    boxes = page.eval_on_selector_all(
        ".mb-table .mb-swatch",
        """all => all.map((swatch) => {
          const [plain, over] = swatch.querySelectorAll("rect");
          const id = over.getAttribute("fill").slice(5, -1);
          const pattern = document.getElementById(id);
          const turn = pattern?.getAttribute("patternTransform");
          const look = `${pattern?.innerHTML ?? "plain"} ${turn}`;
          return [getComputedStyle(plain).fill, look];
        })""",
    )
    assert [colour for colour, _ in boxes] == [
        "rgb(0, 114, 178)",
        "rgb(230, 159, 0)",
        "rgb(0, 158, 115)",
        "rgb(213, 94, 0)",
        "rgb(86, 180, 233)",
        "rgb(138, 138, 138)",
    ]
    assert len({look for _, look in boxes}) == 6


# How it is moved -----------------------------------------------------------


def test_sliders_by_keyboard(page):
    before = page.locator(".mb-picture").inner_html()
    control(page, "batch").press("ArrowRight")
    agree(page, batch=9)
    assert page.locator(".mb-picture").inner_html() != before
    control(page, "batch").press("Home")
    agree(page, batch=1)
    control(page, "tokens").press("ArrowLeft")
    agree(page, batch=1, tokens=512)
    control(page, "batch").press("End")
    agree(page, batch=1024, tokens=512)
    control(page, "steps").press("ArrowRight")
    agree(page, batch=1024, tokens=512, steps=2)


def test_a_slider_by_mouse(page):
    box = control(page, "batch").bounding_box()
    control(page, "batch").click(
        position={"x": box["width"] * 0.7, "y": box["height"] / 2}
    )
    many = int(page.locator("output").first.inner_text())
    assert 64 < many < 512
    agree(page, batch=many)


def test_choices(page):
    control(page, "preset").select_option("Llama 3 70B")
    agree(page, preset="Llama 3 70B")
    for recipe in RECIPES:
        control(page, "recipe").select_option(recipe)
        agree(page, preset="Llama 3 70B", recipe=recipe)
    for optimizer in OPTIMIZERS:
        control(page, "optimizer").select_option(optimizer)
        agree(page, preset="Llama 3 70B", recipe=recipe, optimizer=optimizer)
    state = {"preset": "Llama 3 70B", "recipe": recipe}
    state["optimizer"] = optimizer
    for key in ("checkpointed", "fused", "foreach"):
        control(page, key).press("Space")
        state[key] = key != "fused"
        agree(page, **state)


def test_a_shape_of_its_own(page):
    shape(page)
    enter(page, "depth", 24)
    agree(page, depth=24)
    assert control(page, "preset").input_value() == ""
    control(page, "tied").press("Space")
    agree(page, depth=24, tied=False)
    control(page, "preset").select_option("GPT-2 124M")
    agree(page)
    control(page, "family").select_option("llama")
    agree(page, family="llama")
    enter(page, "hidden", 2000)
    enter(page, "kv_heads", 3)
    agree(page, family="llama", hidden=2000, kv_heads=3)


def test_own_shape_opens_the_fold(page):
    control(page, "preset").select_option("own shape")
    assert control(page, "width").is_visible()


def test_what_cannot_be_is_said_and_the_picture_stays(page):
    shape(page)
    wrong = page.get_by_role("alert")
    picture = page.locator(".mb-picture").inner_html()
    enter(page, "width", 1000)
    assert wrong.inner_text() == (
        "width 1000 is not a multiple of 12 heads: use a number of heads "
        "that divides it"
    )
    assert page.locator(".mb-picture").inner_html() == picture
    assert control(page, "width").input_value() == "1000"
    assert control(page, "width").get_attribute("aria-invalid") == "true"
    assert page.locator(".mb-ledger.mb-stale").count() == 1
    assert control(page, "depth").get_attribute("aria-invalid") == "false"
    enter(page, "heads", 10)  # now both together can be
    assert wrong.count() == 0
    agree(page, width=1000, heads=10)
    assert control(page, "width").get_attribute("aria-invalid") == "false"
    assert page.locator(".mb-stale").count() == 0


@pytest.mark.parametrize("bad", ["0", "-3", "2.5", "", "1e9"])
def test_a_size_that_cannot_be(page, bad):
    shape(page)
    enter(page, "depth", bad)
    said = page.get_by_role("alert").inner_text()
    assert said.startswith(f"depth is {float(bad or 0):.10g}: use ") or (
        said == "depth is 1000000000: use at most 256"
    )
    control(page, "preset").select_option("GPT-2 XL 1.5B")
    assert page.get_by_role("alert").count() == 0
    agree(page, preset="GPT-2 XL 1.5B")


def test_more_tokens_than_positions(page):
    control(page, "tokens").press("ArrowRight")
    said = page.get_by_role("alert").inner_text()
    assert said.startswith("2048 tokens are more than the 1024 learned")
    control(page, "tokens").press("ArrowLeft")
    agree(page)
    control(page, "tokens").press("ArrowRight")
    control(page, "preset").select_option("Mistral 7B")
    agree(page, preset="Mistral 7B", tokens=2048)


def test_all_by_tab(page):
    for key in KEYS:
        page.keyboard.press("Tab")
        focus = "document.activeElement.dataset.key ?? null"
        assert page.evaluate(focus) == key
        outline = "getComputedStyle(document.activeElement).outline"
        assert "solid 2px" in page.evaluate(outline)
    page.keyboard.press("Enter")  # on the summary
    page.keyboard.press("Tab")
    assert page.evaluate(focus) == "family"


def test_the_sentence_is_said_once_it_rests(page):
    """A screen reader hears where the slider stops, not each number."""
    said = pages.said(page, '[data-key="batch"]')
    assert said == [Ledger(batch=13).sentence()]


def test_two_widgets_do_not_mix(show):
    page = show(Ledger(), Ledger("Llama 2 7B", batch=3))
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 20
    control(page, "batch").nth(1).press("ArrowRight")
    shown = page.locator("output").all_text_contents()
    assert shown == ["8", "1024", "1", "4", "1024", "1"]


def test_with_a_kernel(page):
    """The page sends whole shapes; the kernel's changes are shown."""
    page.evaluate(MODULE)
    other = Ledger("Llama 3 8B", batch=2, budget=80 * GIB)
    sent, labels = page.evaluate(
        """async (change) => {
          const calls = [];
          const json = document.querySelector(".mb-state").textContent;
          const state = JSON.parse(json);
          const sent = [];
          let now = {};
          const model = {
            get: (key) => state[key],
            set: (key, value) => {
              now[key] = state[key] = value;
              calls.forEach((call) => call());
            },
            save_changes: () => { sent.push(now); now = {}; },
            on: (event, call) => calls.push(call),
            off() {},
          };
          const el = document.createElement("div");
          document.body.append(el);
          window.ledger.default.render({ model, el });
          const enter = (key, value) => {
            const input = el.querySelector(`[data-key="${key}"]`);
            input.value = value;
            input.dispatchEvent(new Event("change"));
          };
          enter("width", 1000);
          enter("heads", 8);
          Object.assign(state, change);
          calls.forEach((call) => call());
          await new Promise((done) => setTimeout(done, 800));
          const label = el.querySelector(".mb-picture")
            .getAttribute("aria-label");
          return [sent, [label]];
        }""",
        other.state(),
    )
    assert sent == [{"width": 1000, "heads": 8, "preset": ""}]
    assert labels == [other.sentence()]


# How it looks --------------------------------------------------------------


def test_every_part_has_a_role_and_a_name(page):
    shape(page)
    controls = page.locator("input, select").all()
    assert len(controls) == 19
    for one in controls:
        # JupyterLab would else take the arrow keys for its shortcuts.
        assert one.get_attribute("data-lm-suppress-shortcuts")
        assert one.evaluate("e => e.labels.length") == 1
    assert page.locator("summary").get_attribute("data-lm-suppress-shortcuts")
    spoken = control(page, "batch").get_attribute("aria-valuetext")
    assert spoken == "8 sequences"
    rows = page.get_by_role("rowheader").all_inner_texts()
    assert {"optimizer states", "temporaries", "together"} <= set(rows)
    columns = page.get_by_role("columnheader").all_inner_texts()
    assert columns == ["worst moment of", *BARS]


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("style", ["", pages.DARK], ids=["light", "dark"])
def test_every_width_and_theme(show, width, style):
    page = show(
        Ledger("Llama 3 8B", budget=140 * GIB), width=width, style=style
    )
    page.wait_for_function(
        "document.querySelector('.mb-picture').viewBox.baseVal.width !== 640"
    )
    shape(page)
    enter(page, "width", 1000)
    assert page.get_by_role("alert").is_visible()
    inner = page.evaluate("document.documentElement.scrollWidth")
    assert inner == width
    assert page.evaluate(pages.OUTSIDE) == []
    colours = pages.colours(
        page, ".mb-root, .mb-root td, .mb-root dd, .mb-root label, summary"
    )
    expected = "rgb(206, 214, 221)" if style else "rgb(0, 0, 0)"
    assert colours == {expected}


@pytest.mark.parametrize("font", ["", WIDE_FONT], ids=["", "wide"])
@pytest.mark.parametrize("width", [320, 390, 1000])
def test_labels_fit(show, width, font):
    """No text overlaps another one or leaves the picture."""
    page = show(Ledger("Llama 3 70B"), width=width, style=font)
    budgets = ("none", "15 GiB (T4)", "140 GiB (H200)")
    keys = ("preset", "budget", "batch", "checkpointed")
    states = itertools.product(
        ("GPT-2 124M", "Llama 3 70B"), budgets, (0, 9, 40), (True, False)
    )
    states = [list(zip(keys, state, strict=True)) for state in states]
    assert len(states) == 36
    assert pages.misfits(page, states) == []


@pytest.mark.parametrize("width", [390, 760])
def test_nothing_jumps_while_it_is_moved(show, width):
    """The sentence has room for its longest."""
    page = show(Ledger("Llama 3 70B", budget=15 * GIB), width=width)
    keys = ("batch", "steps", "checkpointed")
    moves = [
        (list(zip(keys, state, strict=True)), None)
        for state in itertools.product((0, 40), (0, 15), (True, False))
    ]
    assert len(pages.places(page, ".mb-picture", moves)) == 1


def test_nothing_moves_by_itself(page):
    assert page.evaluate("document.getAnimations().length") == 0
    style = bundle.style_text("ledger")
    assert "transition" not in style and "animation" not in style


def test_clean_up(page):
    listeners, children, *left = page.evaluate(pages.CLEAN_UP)
    assert listeners >= 1 and children >= 1
    assert left == [0, 0]


def test_without_javascript(show):
    widget = Ledger(budget=15 * GIB)
    page = show(widget, java_script_enabled=False, width=390)
    assert page.get_by_role("img").is_visible()
    assert page.get_by_text(widget.sentence()).is_visible()
    box = page.get_by_role("img").bounding_box()
    assert box["x"] + box["width"] <= 390
    outside = pages.OUTSIDE.replace(".mb-picture", "svg")
    small = "box.height < 11"
    assert small in outside
    assert page.evaluate(outside.replace(small, "false")) == []


def test_the_modules_weight():
    """With its state it takes no more than a quarter of a page."""
    text = bundle.module_text("ledger") + bundle.style_text("ledger")
    assert len(text) + len(json.dumps(Ledger().state())) < 75_000
