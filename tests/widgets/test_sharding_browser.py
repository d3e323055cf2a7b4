"""The sharding widget in a browser, without a kernel."""

from itertools import pairwise, product

import kind
import kind_sharding
import pytest
import widget_pages as pages
from kind_sharding import LONG
from widget_pages import WIDE_FONT, control

from membudget.ledger import RECIPES, bytes_per_parameter
from membudget.widgets import Sharding, format_bytes
from membudget.widgets.sharding import CARDS, MODELS, STAGE_NAMES


@pytest.fixture
def widget():
    return Sharding()


@pytest.fixture
def page(show, widget):
    return show(widget)


def agree(page, widget):
    kind.agree(kind_sharding.KIND, page, widget)
    titles = page.locator("figcaption b").all_inner_texts()
    assert titles == list(widget.titles())


# What it shows -------------------------------------------------------------


def test_first_picture(page, widget):
    agree(page, widget)
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


# How it is moved -----------------------------------------------------------


def test_an_own_number(page, widget):
    """Typed, or begun from a preset; a bad one leaves the last, and why."""
    field = control(page, "parameters")

    def enter(text):
        field.fill(text)
        field.press("Tab")

    words = (
        "The number of parameters has to be whole, from 1 to "
        "1\u202f099\u202f511\u202f627\u202f776 (2⁴⁰); it stays at "
        "7\u202f500\u202f000\u202f000."
    )
    for typed in ("0", "1.5", "", "1099511627777"):
        enter(typed)
        assert field.input_value() == "7500000000"
        (seen,) = pages.walk(page, [[]])
        assert seen["said"] == [words]
        kind.prints(kind_sharding.KIND, widget, seen)
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


# How it looks --------------------------------------------------------------


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
    "width, font", [(320, WIDE_FONT), (1000, "")], ids=["320-wide", "1000"]
)
def test_the_limit_keeps_clear_of_words(show, width, font):
    """`CROSSED` finds what goes through a text, not what touches its edge."""
    page = show(Sharding(), width=width, style=font)
    states = [
        [("ranks", ranks), ("accumulation_steps", steps)]
        + [("model", model), ("card", card)]
        + ([("synchronise_last", True)] if steps else [])
        for ranks, steps in ((1, 0), (6, 2))
        for model, card in product(MODELS, list(CARDS)[1:])
    ]
    found = pages.walk(page, states, NEAR)
    met = [text for texts in found for text, _ in texts]
    assert any(text.startswith("ZeRO-") for text in met)
    assert any(text.endswith(" waiting") for text in met)
    for state, texts in zip(states, found, strict=True):
        assert [text for text, near in texts if near] == [], state


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
@pytest.mark.parametrize(
    "chosen", [{}, {"stage": "ddp", "card": "80 GB"}, LONG]
)
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


@pytest.mark.parametrize("width", [320, 374])
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


def test_the_picture_left_behind_is_legible(show):
    shown = [Sharding(**LONG), Sharding(ranks=1, card="24 GB")]
    several = {"accumulation_steps": 4, "synchronise_last": True}
    shown += [
        Sharding(model, ranks, card=card, **several)
        for model, ranks, card in product(
            list(MODELS)[::2], (2, 64), list(CARDS)[1:]
        )
    ]
    page = show(*shown, java_script_enabled=False, width=360)
    for one in shown:
        size = format_bytes(one.numbers()["stages"]["ddp"]["bytes"])
        words = page.locator("svg text", has_text=f"DDP: {size}")
        assert words.count() >= 1
    overlapping = pages.OVERLAPPING.replace(".mb-picture", "svg")
    assert page.evaluate(overlapping) == []
    met = page.evaluate(NEAR.replace(".mb-limit", "path[stroke-dasharray]"))
    assert "DDP: 112 GiB" in [text for text, _ in met]
    assert [text for text, near in met if near] == []
