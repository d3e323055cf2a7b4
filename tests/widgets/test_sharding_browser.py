"""The sharding widget in a browser, without a kernel."""

import json
from itertools import pairwise, product

import pytest
import sharding_cases as cases
import widget_pages as pages

from membudget.ledger import RECIPES, bytes_per_parameter
from membudget.widgets import Sharding, bundle, format_bytes
from membudget.widgets.sharding import CARDS, MODELS, STAGE_NAMES

WIDE_FONT = "body, .mb-root { font-family: 'DejaVu Sans', Verdana; }"

SWEEP = f"""async (states) => {{
  const enter = {pages.ENTER};
  const shown = [];
  for (const settings of states) {{
    enter([0, settings]);
    await scheduler.postTask(() => {{}});
    const of = (e) => [e.dataset.number, Number(e.dataset.value)];
    const all = [...document.querySelectorAll("[data-number]")].map(of);
    const label = document.querySelector(".mb-picture")
      .getAttribute("aria-label");
    const titles = [...document.querySelectorAll("figcaption b")]
      .map((title) => title.innerText);
    shown.push([Object.fromEntries(all), label, titles]);
  }}
  return shown;
}}"""
"""Enters each state; the table, the picture's label, the titles."""

LONG = {
    "model": 2**40 - 1,
    "ranks": 1024,
    "stage": "zero-3",
    "recipe": "master-fp32-gradients",
    "accumulation_steps": 16,
    "synchronise_last": True,
    "card": "141 GB",
}
"""A long sentence."""


@pytest.fixture
def widget():
    return Sharding()


@pytest.fixture
def page(show, widget):
    return show(widget)


def control(page, key):
    return page.locator(f'[data-key="{key}"]')


def entries(traits):
    """The settings of controls that give the widget these traits."""
    found = []
    order = ("model", "ranks", "accumulation_steps")  # before what they allow
    for key in sorted(traits, key=lambda key: key not in order):
        value = traits[key]
        if key in ("ranks", "accumulation_steps"):
            value = value.bit_length() - 1
        if key == "model" and isinstance(value, int):
            key = "parameters"
        if key != "synchronise_last" or traits.get("accumulation_steps") != 1:
            found.append((key, value))
    return found


def expected(widget):
    """What the page prints."""
    numbers = {}
    for stage, of in widget.numbers()["stages"].items():
        split = of["split"]
        numbers[f"{stage}.parameters"] = split["parameters"]
        whole = split["gradients"] + split["waiting"]
        numbers[f"{stage}.gradients"] = whole
        numbers[f"{stage}.optimizer"] = split["optimizer"]
        numbers[f"{stage}.sent"] = of["sent"]
    return [numbers, widget.sentence(), list(widget.titles())]


def agree(page, widget):
    """The page shows and says what Python has."""
    assert page.evaluate(SWEEP, [[]]) == [expected(widget)]
    page.wait_for_function(
        """(sentence) => document.querySelector("[aria-live=polite]")
             .innerText === sentence""",
        arg=widget.sentence(),
    )


# What it shows -------------------------------------------------------------


def test_first_picture(page, widget):
    agree(page, widget)
    assert page.locator(".mb-fallback").count() == 0
    texts = page.locator(".mb-picture text").all_text_contents()
    assert {"DDP: 112 GiB", "ZeRO-3: 1.75 GiB", "GiB"} <= set(texts)
    assert {"DDP: 27.5 GiB, 2 Ψ", "ZeRO-3: 41.3 GiB, 3 Ψ"} <= set(texts)
    notes = page.locator("figcaption").all_inner_texts()
    assert "Adam: 2 + 2 + 12 bytes per parameter" in notes[0]
    assert notes[0].endswith("the number tells.")
    assert notes[1].endswith("times (N\u00a0−\u00a01)/N = 63/64.")
    rows = page.locator(".mb-table tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == list(STAGE_NAMES.values())
    assert page.locator(".mb-limit").count() == 0


def test_the_page_shows_the_state_python_gave(show):
    shown = Sharding(**LONG)
    page = show(shown)
    agree(page, shown)
    assert control(page, "model").input_value() == "own"
    assert control(page, "parameters").input_value() == str(LONG["model"])
    assert control(page, "ranks").input_value() == "10"
    assert control(page, "accumulation_steps").input_value() == "4"
    for key in ("stage", "recipe", "card"):
        assert control(page, key).input_value() == LONG[key]
    assert control(page, "synchronise_last").is_checked()


def test_many_states(page, widget):
    """Entered by the controls; the whole grid is compared in Node."""
    some = list(cases.settings(cases.GRID))[::947]
    assert len(some) >= 70
    answers = page.evaluate(SWEEP, [entries(traits) for traits in some])
    for traits, answer in zip(some, answers, strict=True):
        steps = traits["accumulation_steps"]
        if steps == 1:  # then the box cannot be changed
            traits["synchronise_last"] = widget.synchronise_last
        cases.set_to(widget, traits)
        assert answer == expected(widget), traits


def test_gradients_that_wait(page):
    """Beside the shard, in a pattern of their own, and named."""
    assert page.locator(".mb-picture .mb-waiting").count() == 0
    page.evaluate(
        f"({pages.ENTER})([0, [['accumulation_steps', 1], "
        "['synchronise_last', true], ['ranks', 2]]])"
    )
    page.wait_for_selector(".mb-picture .mb-waiting")
    boxes = page.locator(".mb-picture .mb-waiting").all()
    assert len(boxes) == 2  # of ZeRO-2 and ZeRO-3
    edges = page.eval_on_selector_all(
        "rect:is(.mb-gradients, .mb-waiting)",
        "all => all.filter((e) => e.closest('figure:first-of-type') &&"
        " !e.closest('.mb-swatch')).slice(-2).map((e) =>"
        " ['x', 'width', 'y'].map((name) => Number(e.getAttribute(name))))",
    )
    (x, wide, y), (waits, more, same) = edges
    assert (waits, same) == (pytest.approx(x + wide), y)
    assert more == pytest.approx(3 * wide)  # of four ranks
    texts = page.locator(".mb-picture text").all_text_contents()
    assert any(text.endswith(" waiting") for text in texts)


@pytest.mark.parametrize("width", [290, 1000])
def test_the_legend_has_what_is_drawn(show, widget, width):
    """And nothing moves when a part comes: it has its place."""
    page = show(widget, width=width, style=WIDE_FONT)
    names = page.locator(".mb-legend > span")
    always = ["parameters", "gradients", "optimizer states"]

    def seen():
        drawn = page.eval_on_selector_all(
            ".mb-picture rect",
            "all => all.map((e) => e.getAttribute('class'))",
        )
        found = [one.inner_text() for one in names.all() if one.is_visible()]
        assert ("waiting gradients" in found) == ("mb-waiting" in drawn)
        return found, page.locator(".mb-table").bounding_box()["y"]

    first, y = seen()
    assert first == always
    control(page, "accumulation_steps").press("ArrowRight")
    control(page, "synchronise_last").check()
    page.wait_for_selector(".mb-picture .mb-waiting")
    assert seen() == ([*always, "waiting gradients"], y)
    control(page, "ranks").press("Home")  # one rank has no shard
    page.wait_for_selector(".mb-picture .mb-waiting", state="detached")
    assert seen() == (always, y)


def test_no_part_is_told_by_colour_alone(page):
    looks = page.eval_on_selector_all(
        ".mb-legend svg rect:last-child",
        "all => all.map((rect) => {"
        " const id = rect.getAttribute('fill').slice(5, -1);"
        " const pattern = document.getElementById(id);"
        " const turn = pattern?.getAttribute('patternTransform');"
        " return `${pattern?.innerHTML ?? 'plain'} ${turn}`;"
        "})",
    )
    assert len(looks) == len(set(looks)) == 4
    colours = page.eval_on_selector_all(
        ".mb-legend svg rect:first-child",
        "all => all.map((rect) => getComputedStyle(rect).fill)",
    )
    assert colours == [
        *("rgb(0, 114, 178)", "rgb(230, 159, 0)"),
        *("rgb(0, 158, 115)", "rgb(230, 159, 0)"),
    ]


def test_the_chosen_stage_is_framed(page, widget):
    for place, (stage, name) in enumerate(STAGE_NAMES.items()):
        control(page, "stage").select_option(stage)
        widget.stage = stage
        agree(page, widget)
        frames = page.locator("rect.mb-frame").all()
        assert len(frames) == 2
        assert float(frames[0].get_attribute("y")) == 42 + 48 * place
        bold = page.locator("text.mb-chosen").all_text_contents()
        assert [words.split(":")[0] for words in bold] == [name, name]
        row = page.locator("tr.mb-chosen").inner_text()
        assert row.split("\t")[0] == name


def test_a_card(page, widget):
    control(page, "card").select_option("24 GB")
    widget.card = "24 GB"
    agree(page, widget)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "card 24 GB = 22.4 GiB" in texts
    assert {"DDP: 112 GiB ✗", "ZeRO-2: 15.5 GiB ✓"} <= set(texts)
    assert page.locator(".mb-limit").count() == 1
    note = page.locator("figcaption").first
    words = "The card's 24 GB are 24 · 10⁹ bytes, 22.4 GiB."
    assert note.inner_text().endswith(f"the number tells. {words}")
    control(page, "model").select_option("GPT-2 124M")
    widget.model = "GPT-2 124M"
    agree(page, widget)
    texts = page.locator(".mb-picture text").all_text_contents()
    assert "card 24 GB = 22.4 GiB →" in texts
    assert page.locator(".mb-limit").count() == 0


@pytest.mark.parametrize("width", [390, 640, 1000])
def test_the_caption_speaks_of_the_chosen_card(show, widget, width):
    """In a place of one size: below it nothing moves."""
    page = show(widget, width=width)
    note, heights = page.locator("figcaption").first, set()
    for card, (size, _) in CARDS.items():
        control(page, "card").select_option(card)
        widget.card = card
        agree(page, widget)
        words = note.inner_text().split("the number tells.")[1].strip()
        wanted = f"{card} are {size // 10**9} · 10⁹ bytes"
        wanted = f"The card's {wanted}, {format_bytes(size)}."
        assert words == (wanted if size else "")
        heights.add(note.bounding_box()["height"])
    assert len(heights) == 1


def test_one_rank(page, widget):
    control(page, "ranks").press("Home")
    widget.ranks = 1
    agree(page, widget)
    note = page.locator("figcaption").last.inner_text()
    assert note.endswith("times (N\u00a0−\u00a01)/N = 0.")


PLACES = """() => [".mb-said", ".mb-picture", ".mb-table", ".mb-root"]
  .flatMap((name) => [...document.querySelectorAll(name)])
  .flatMap((one) => {
    const { top, bottom } = one.getBoundingClientRect();
    return [top, bottom].map((y) => Math.round(y + scrollY));
  })"""
"""Where the large parts of the page begin and end."""


@pytest.mark.parametrize("width", [390, 1000])
def test_one_micro_batch_needs_no_word_of_more(show, widget, width):
    """They come with the second, into the places that are kept for them."""
    page = show(widget, width=width)
    note, root = page.locator(".mb-note"), page.locator(".mb-root")
    label = "Reduce gradients with the last micro-batch only"
    places = page.evaluate(PLACES)
    seen = root.inner_text()
    assert note.inner_text() == ""
    assert not control(page, "synchronise_last").is_visible()
    for words in (label, "FSDP2", "micro-batches", "the paper's"):
        assert words not in seen
    for keys, ours, theirs in (
        (["ArrowRight"], "(K\u00a0+\u00a01)", "2K"),
        ([], "2", "(K\u00a0+\u00a01)"),
    ):
        for key in keys:
            control(page, "accumulation_steps").press(key)
            widget.accumulation_steps *= 2
        if not keys:
            control(page, "synchronise_last").check()
            widget.synchronise_last = True
        agree(page, widget)
        words = note.inner_text()
        assert f"so K micro-batches send {ours}\u00a0Ψ; FSDP2's" in words
        assert words.endswith(f"for every micro-batch: {theirs}\u00a0Ψ.")
        assert label in root.inner_text()
        assert page.evaluate(PLACES) == places
    control(page, "accumulation_steps").press("Home")
    widget.accumulation_steps = 1
    agree(page, widget)
    assert root.inner_text() == seen
    assert page.evaluate(PLACES) == places


# How it is moved -----------------------------------------------------------


def test_by_keyboard(page, widget):
    def press(*keys):
        for key in keys:
            page.keyboard.press(key)

    press("Tab", "ArrowDown")
    widget.model = "Llama 3 8B"
    agree(page, widget)
    press("Tab", "ControlOrMeta+a")
    page.keyboard.type("1000001")
    press("Tab")
    widget.model = 1_000_001
    agree(page, widget)
    press("ArrowRight")
    widget.ranks = 128
    agree(page, widget)
    press("Tab", "ArrowUp", "Tab", "ArrowDown", "Tab", "ArrowDown")
    widget.stage, widget.card = "zero-2", "16 GB"
    widget.recipe = "master-fp32-gradients"
    agree(page, widget)
    press("Tab", "ArrowRight", "ArrowRight", "Tab", "Space")
    widget.accumulation_steps, widget.synchronise_last = 4, True
    agree(page, widget)
    assert page.locator("[data-key]:focus").is_checked()


def test_an_own_number(page, widget):
    """Typed, or begun from a preset; a bad one leaves the last, and why."""
    field = control(page, "parameters")

    def enter(text):
        field.fill(text)
        field.press("Tab")

    for typed in ("0", "1.5", "", "-3", "1099511627777"):
        enter(typed)
        assert field.input_value() == "7500000000"
        words = (
            "The number of parameters has to be whole, from 1 to "
            "1\u202f099\u202f511\u202f627\u202f776 (2⁴⁰); it stays at "
            "7\u202f500\u202f000\u202f000."
        )
        page.wait_for_function(
            "(words) => document.querySelector('.mb-live').textContent"
            " === words",
            arg=words,
        )
        assert page.evaluate(SWEEP, [[]]) == [expected(widget)]
        enter("7500000000")
        agree(page, widget)
    for typed, stays in (("1e6", 1_000_000), ("7", 7)):
        enter(typed)
        widget.model = stays
        agree(page, widget)
        assert field.input_value() == str(stays)
    control(page, "model").select_option("1.3 B")
    widget.model = "1.3 B"
    agree(page, widget)
    assert field.input_value() == "1300000000"
    control(page, "model").select_option("own")
    widget.model = 1_300_000_000
    agree(page, widget)


def test_the_box_needs_several_micro_batches(page, widget):
    """It keeps what it was while there is one."""
    box = control(page, "synchronise_last")
    assert box.is_disabled() and not box.is_visible()
    control(page, "accumulation_steps").press("ArrowRight")
    box.check()  # which can be seen now
    widget.accumulation_steps, widget.synchronise_last = 2, True
    agree(page, widget)
    control(page, "accumulation_steps").press("Home")
    widget.accumulation_steps = 1
    agree(page, widget)
    assert box.is_disabled() and box.is_checked()


def test_a_sentence_waits_until_the_slider_rests(page, widget):
    control(page, "ranks").press("Home")
    widget.ranks = 1
    agree(page, widget)
    said = pages.said(page, "[data-key=ranks]")
    widget.ranks = 32
    assert said == [widget.sentence()]


def test_a_kernel_changes_it(page):
    """Several traits at a time; what the reader sets goes back."""
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
    other = Sharding(**LONG)
    page.evaluate("(traits) => window.change(traits)", other.state())
    agree(page, other)
    control(page, "ranks").press("ArrowLeft")
    control(page, "parameters").fill("123")
    control(page, "parameters").press("Tab")
    (saved,) = page.evaluate("window.saved.slice(-1)")
    other.set_state({key: saved[key] for key in ("ranks", "model")})
    assert (other.ranks, other.model) == (512, 123)
    agree(page, other)


# How it looks --------------------------------------------------------------


def test_every_part_has_a_role_and_a_name(page, widget):
    images = page.get_by_role("img").all()
    labels = [image.get_attribute("aria-label") for image in images]
    assert labels == [widget.sentence(), f"{widget.titles()[1]}."]
    controls = page.locator("input, select").all()
    assert len(controls) == 8
    for one in controls:
        assert one.evaluate("e => e.labels.length") == 1
        # JupyterLab would else take the arrow keys for its shortcuts.
        assert one.get_attribute("data-lm-suppress-shortcuts")
    spoken = [
        control(page, key).get_attribute("aria-valuetext")
        for key in ("ranks", "accumulation_steps")
    ]
    assert spoken == ["64 ranks", "1 accumulation step"]
    assert page.locator("[aria-live=polite]").count() == 1


@pytest.mark.parametrize(
    "width, style",
    [(320, ""), (390, pages.DARK), (1280, ""), (1280, pages.DARK)],
    ids=["320", "390-dark", "1280", "1280-dark"],
)
def test_every_width_and_theme(show, width, style):
    page = show(Sharding(**LONG), width=width, style=style)
    page.wait_for_function(
        "document.querySelector('.mb-picture').viewBox.baseVal.width !== 640"
    )
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(pages.OUTSIDE) == []
    colours = pages.colours(
        page,
        ".mb-root, .mb-root :is(td, th, label, p, figcaption, select, "
        "[type=number])",
    )
    wanted = "rgb(206, 214, 221)" if style else "rgb(0, 0, 0)"
    assert colours == {wanted}


@pytest.mark.parametrize(
    "width, font",
    [(320, WIDE_FONT), (390, ""), (1000, WIDE_FONT)],
    ids=["320-wide", "390", "1000-wide"],
)
def test_labels_fit(show, widget, width, font):
    """None overlaps another, leaves its picture, or has a line through it."""
    page = show(widget, width=width, style=font)
    states = [entries(LONG), [("ranks", 0)], [("ranks", 10)]]
    states += [
        [("card", card), ("model", model), ("synchronise_last", last)]
        for model, last in product(MODELS, (False, True))
        for card in CARDS
    ]
    states += [[("stage", stage)] for stage in STAGE_NAMES]
    assert pages.misfits(page, states, crossed=True) == []


NEAR = """() => [...document.querySelectorAll(".mb-limit")].flatMap((line) => {
  const [at, points] = [line.getScreenCTM(), []];
  for (let way = 0; way <= line.getTotalLength(); way += 1)
    points.push(line.getPointAtLength(way).matrixTransform(at));
  const texts = line.closest("svg").querySelectorAll("text");
  return [...texts].flatMap((text) => {
    const box = text.getBoundingClientRect();
    const over = points.filter(({ x }) =>
      box.left - 2 < x && x < box.right + 2);
    const near = over.some(({ y }) => box.top - 2 < y && y < box.bottom + 2);
    return over.length ? [[text.textContent, near]] : [];
  });
})"""
"""Texts above or below the limit's dashes, and whether one is within 2 px."""


@pytest.mark.parametrize(
    "width, font",
    [(320, WIDE_FONT), (390, ""), (1000, "")],
    ids=["320-wide", "390", "1000"],
)
def test_the_limit_keeps_clear_of_words(show, width, font):
    """`misfits` finds what goes through a text, not what touches its edge."""
    page = show(Sharding(), width=width, style=font)
    states = [
        [("recipe", recipe), ("ranks", ranks), ("accumulation_steps", steps)]
        + [("model", model), ("card", card)]
        + ([("synchronise_last", True)] if steps else [])
        for recipe, ranks, steps in product(("master", "fp32"), (1, 6), (0, 2))
        for model, card in product(MODELS, list(CARDS)[1:])
    ]
    found = page.evaluate(
        f"""async (states) => {{
          const [enter, near] = [{pages.ENTER}, {NEAR}];
          const found = [];
          for (const state of states) {{
            enter([0, state]);
            await scheduler.postTask(() => {{}});
            found.push(near());
          }}
          return found;
        }}""",
        states,
    )
    met = [text for texts in found for text, _ in texts]
    assert any(text.startswith("ZeRO-") for text in met)
    assert any(text.endswith(" waiting") for text in met)
    touched = [
        (state, text)
        for state, texts in zip(states, found, strict=True)
        for text, near in texts
        if near
    ]
    assert touched == []


CHOSEN = [
    {},
    {"stage": "zero-2", "card": "24 GB"},
    {"stage": "ddp", "card": "80 GB", "model": "Llama 3 8B"},
    LONG,
]
"""The parts of a state that no slider changes, and a long one."""


@pytest.mark.parametrize("width", [390, 640, 1000])
@pytest.mark.parametrize("chosen", CHOSEN, ids=["", "zero-2", "ddp", "long"])
def test_nothing_jumps_while_it_is_moved(show, width, chosen):
    """Each text has room for what the sliders and the box make it say."""
    widget = Sharding(**chosen)
    page = show(widget, width=width)
    shown = []
    moves = product((1, 4, 64, 1024), (1, 2, 16), (False, True))
    for ranks, steps, last in moves:
        traits = {"ranks": ranks, "accumulation_steps": steps}
        traits |= {"synchronise_last": last} if steps > 1 else {}
        cases.set_to(widget, traits)
        shown.append((entries(traits), widget.sentence()))
    assert len(pages.places(page, ".mb-picture, .mb-table", shown)) == 1


ROOM = """() => {
  const live = document.querySelector(".mb-live");
  const range = document.createRange();
  range.selectNodeContents(live);
  const text = range.getBoundingClientRect().height;
  const line = parseFloat(getComputedStyle(live).lineHeight);
  const box = document.querySelector(".mb-said").getBoundingClientRect();
  return Math.round((box.height - text) / line);
}"""
"""The empty lines below the sentence."""


@pytest.mark.parametrize("width", [390, 640, 1000])
@pytest.mark.parametrize("chosen", CHOSEN, ids=["", "zero-2", "ddp", "long"])
def test_no_gap_below_the_sentence(show, width, chosen):
    page = show(Sharding(**chosen), width=width)
    assert page.evaluate(ROOM) <= 1


@pytest.mark.parametrize("width", [390, 1200])
def test_no_choice_is_cut_off(show, widget, width):
    """Every text of a list has room in it, and says the recipe's bytes."""
    page = show(widget, width=width, style=WIDE_FONT)
    cut = page.eval_on_selector_all(
        "select",
        """(all) => all.filter((select) => {
          const [given, style] = [select.offsetWidth, select.style];
          Object.assign(style, { width: "max-content", maxWidth: "none" });
          return select.offsetWidth > given;
        }).map((select) => select.dataset.key)""",
    )
    assert cut == []
    offered = control(page, "recipe").locator("option").all_inner_texts()
    for text, recipe in zip(offered, RECIPES, strict=True):
        each = bytes_per_parameter(recipe)
        sizes = (each.parameters, each.gradients, each.optimizer)
        assert text == f"{recipe}: {' + '.join(map(str, sizes))}"


CELLS = """() => [...document.querySelectorAll(".mb-table tr")].map((tr) =>
  [...tr.cells].map((cell) => {
    const range = document.createRange();
    range.selectNodeContents(cell);
    const words = cell.textContent.split(" ").length;
    const tops = new Set([...range.getClientRects()].map(({ top }) => top));
    const { left, right } = range.getBoundingClientRect();
    return { left, right, broken: tops.size > words };
  }))"""
"""Where the texts of the table are, and whether a word is broken."""


@pytest.mark.parametrize("width", [320, 374, 1000])
@pytest.mark.parametrize("traits", [{"stage": "zero-2"}, LONG])
def test_the_table_is_legible(show, width, traits):
    """No word is broken, and columns are apart; 374 is the book's 390."""
    page = show(Sharding(**traits), width=width, style=WIDE_FONT)
    rows = page.evaluate(CELLS)
    assert len(rows) == 5
    assert not any(cell["broken"] for row in rows for cell in row)
    edges = [
        (
            min(row[i]["left"] for row in rows),
            max(row[i]["right"] for row in rows),
        )
        for i in range(5)
    ]
    for (_, right), (left, _) in pairwise(edges):
        assert left - right >= 5
    assert edges[-1][1] <= width - 12


def test_nothing_moves_by_itself(page):
    assert page.evaluate("document.getAnimations().length") == 0
    style = bundle.style_text("sharding")
    assert "transition" not in style and "animation" not in style


def test_clean_up(page):
    listeners, children, *left = page.evaluate(pages.CLEAN_UP)
    assert listeners >= 1 and children >= 1
    assert left == [0, 0]


@pytest.mark.parametrize("font", ["", WIDE_FONT], ids=["", "wide"])
def test_without_javascript(show, font):
    shown = [Sharding(**LONG), Sharding(ranks=1, card="24 GB")]
    page = show(*shown, java_script_enabled=False, width=360, style=font)
    assert page.get_by_role("img").count() == 2
    for one in shown:
        assert page.get_by_text(one.sentence(), exact=True).is_visible()
        size = format_bytes(one.numbers()["stages"]["ddp"]["bytes"])
        words = page.locator("svg text", has_text=f"DDP: {size}")
        assert words.count() >= 1
    box = page.get_by_role("img").first.bounding_box()
    assert box["x"] + box["width"] <= 360
    outside = pages.OUTSIDE.replace(".mb-picture", "svg")
    small = "box.height < 11"
    assert small in outside
    assert page.evaluate(outside.replace(small, "false")) == []
    overlapping = pages.OVERLAPPING.replace(".mb-picture", "svg")
    assert page.evaluate(overlapping) == []
    met = page.evaluate(NEAR.replace(".mb-limit", "path[stroke-dasharray]"))
    assert "DDP: 112 GiB" in [text for text, _ in met]
    assert [text for text, near in met if near] == []


def test_the_modules_weight(widget):
    """A small one: a page has 300 kB."""
    module = bundle.HERE / "sharding.mjs"
    assert len(module.read_text()) < 20_000
    assert len(json.dumps(widget.state())) < 2_500


def test_every_choice_is_offered(page):
    for key, places in (
        ("model", [*MODELS, "own"]),
        ("stage", list(STAGE_NAMES)),
        ("recipe", list(RECIPES)),
        ("card", list(CARDS)),
    ):
        offered = (
            control(page, key)
            .locator("option")
            .evaluate_all("all => all.map((one) => one.value)")
        )
        assert offered == places
    assert control(page, "ranks").get_attribute("max") == "10"
    assert control(page, "accumulation_steps").get_attribute("max") == "4"
