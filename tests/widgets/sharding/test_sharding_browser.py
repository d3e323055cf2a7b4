"""The sharding widget in a browser, without a kernel."""

from itertools import pairwise

import kind
import kind_sharding
import pytest
import widget_pages as pages
from widget_pages import control, drag, texts, unfold

from membudget.widgets import Sharding
from membudget.widgets.sharding import STAGE_NAMES

FITS = {"ranks": 64, "stage": "zero-2", "card": "RTX 4090"}


@pytest.fixture
def page(show):
    return show(Sharding(**FITS))


def agree(page, **state):
    kind.agree(kind_sharding.KIND, page, Sharding(**FITS | state))


def choose(page, stage):
    page.get_by_role("radio", name=STAGE_NAMES[stage]).check()


def verdict(page):
    return page.locator(".mb-verdict").text_content()


def head(page):
    """Which moment of the step is shown."""
    return page.locator(".mb-moment").text_content()


def track(page):
    """The box of the strip of phases, on the page."""
    first = page.locator(".mb-picture [class^=mb-fill-phase]").first
    first.scroll_into_view_if_needed()
    boxes = [
        rect.bounding_box()
        for rect in page.locator(".mb-picture rect[height='7']").all()
    ]
    left = min(box["x"] for box in boxes)
    right = max(box["x"] + box["width"] for box in boxes)
    return left, right - left, boxes[0]["y"] + 3


# What it shows -------------------------------------------------------------


def test_a_budget_is_seen_across_the_room(page):
    assert verdict(page) == "fits, 7.21 GiB left"
    assert page.locator(".mb-fill-over").count() == 0
    choose(page, "ddp")
    agree(page, stage="ddp")
    assert verdict(page) == "88.6 GiB too much"
    assert page.locator(".mb-fill-over").count() == 1
    assert page.locator(".mb-break").count() == 1
    assert "RTX 4090: 23.1 GiB usable" in texts(page)
    size = "e => parseFloat(getComputedStyle(e).fontSize)"
    assert page.locator(".mb-verdict").evaluate(size) >= 20


def test_ranks_do_not_move_the_axis(page):
    look = """() => [...document.querySelectorAll(".mb-axis, .mb-limit")]
      .map((e) => e.getAttribute("x1")).join()"""
    states = [[("ranks", power)] for power in (6, 0, 3, 10)]
    assert len(set(pages.walk(page, states, look))) == 1


def test_what_was_before(page):
    assert page.locator(".mb-ghost").count() == 0
    choose(page, "zero-3")
    agree(page, stage="zero-3")
    assert page.locator(".mb-ghost").count() == 1


@pytest.mark.parametrize(
    "ranks, names",
    [
        (1, ["rank 0"]),
        (4, ["rank 0", "1", "2", "3"]),
        (64, ["rank 0", "1", "2", "60 more", "63"]),
    ],
)
def test_the_ranks_that_are_drawn(show, ranks, names):
    page = show(Sharding(ranks=ranks))
    found = [text.split(":")[0] for text in texts(page)]
    assert [text for text in found if text in names] == names
    cells = page.locator(".mb-picture :is(.mb-cell, .mb-room)")
    assert cells.count() == 3 * len(names) ** 2
    ways = page.locator(".mb-way").count()
    assert ways == (len(names) if len(names) > 1 else 0)


@pytest.mark.parametrize("width", [390, 811])
def test_nothing_below_moves(show, width):
    page = show(Sharding(**FITS), width=width, style=pages.BOOK_FONT)
    states = [
        [("stage", stage), ("ranks", power)]
        for stage in STAGE_NAMES.values()
        for power in (0, 3, 6, 10)
    ]
    assert len(set(pages.walk(page, states, pages.BELOW))) == 1


@pytest.mark.parametrize("width", [390, 660, 811])
def test_letters_are_explained_where_they_stand(show, width):
    page = show(Sharding(**FITS), width=width)
    for stage in STAGE_NAMES:
        choose(page, stage)
        found = texts(page)
        short = bool({"F", "B"} & set(found))
        assert ("F is forward, B is backward." in found) == short
        assert short or width > 390


# How it is moved -----------------------------------------------------------


def test_a_step_is_played_by_hand(page):
    """Who wants less motion goes on moment by moment."""
    page.emulate_media(reduced_motion="reduce")
    choose(page, "zero-3")
    seen, blocks = [], []
    for _ in range(19):
        control(page, "play").click()
        phase, *block = head(page).split(", ")
        seen.append(phase)
        blocks += block
        assert f"{len(seen)} of 19: " in " ".join(texts(page))
        moves = page.locator(".mb-token").count()
        assert moves == (5 if phase in ("all-gather", "reduce-scatter") else 0)
        assert page.locator(".mb-still").count() == 5 - moves
    control(page, "play").click()
    assert head(page) == "Between two steps"
    page.emulate_media(reduced_motion="no-preference")
    gather, reduce = ["all-gather"] * 4, ["reduce-scatter"] * 4
    assert seen == [
        *(*gather, "forward pass", "free", "and so on"),
        *(*gather, "backward pass", "free", *reduce, "and so on"),
        "optimizer step",
    ]
    assert sorted(set(blocks)) == [
        "31 more",
        "block 1 of 32",
        "block 32 of 32",
    ]


HEIGHTS = """all => [...new Set(all.map((e) => e.getBBox().height))]"""


def test_the_cards_swell_and_a_mark_stays(page):
    """By the block that is gathered; it is freed, and the mark is left."""
    choose(page, "zero-3")
    unfold(page)
    moment, cards = control(page, "moment"), page.locator(".mb-card")

    def at(place):
        moment.evaluate(f"e => e.value = {place}")
        moment.dispatch_event("input")
        (height,) = cards.evaluate_all(HEIGHTS)
        (now,) = {t.split(": ")[1] for t in texts(page) if t[:3] == "63:"}
        return height, now

    rest, free = at(0), at(6)
    assert page.locator(".mb-mark").count() == 5
    gathered, backward = at(5), at(12)
    assert rest == free
    assert rest[0] < gathered[0] < backward[0]
    sizes = [rest[1], gathered[1], backward[1]]
    assert sizes == ["1.75 GiB", "2.18 GiB", "2.62 GiB"]
    top = "all => all.map((e) => e.getBBox().y)"
    after = at(19)
    assert after[0] < backward[0]
    marks = page.locator(".mb-mark").evaluate_all(top)
    at(12)
    assert cards.evaluate_all(top) == marks


def test_slices_travel_while_it_plays(page):
    """From card to card, by a clock of the page's own."""
    choose(page, "zero-3")
    page.evaluate(
        "() => { window.setInterval = (act) => (window.tick = act); }"
    )
    control(page, "play").click()
    place = "all => all.map((e) => e.getBBox().x)"
    token = page.locator(".mb-token")
    seen = [token.evaluate_all(place)]
    for _ in range(9):
        page.evaluate("tick()")
        page.wait_for_timeout(0)
        seen.append(token.evaluate_all(place))
    first = [places[0] for places in seen]  # rank 0 sends to the right
    assert all(one < other for one, other in pairwise(first))
    steps = {round(b - a) for a, b in pairwise(first)}
    assert max(steps) - min(steps) <= 1


@pytest.mark.few(0)
def test_a_step_is_played_by_keyboard(page):
    unfold(page)
    moment = control(page, "moment")
    for key, where in {
        "ArrowRight": ("forward pass", "1 of 12"),
        "End": ("Between two steps",),
        "ArrowLeft": ("all-gather", "12 of 12"),
    }.items():
        moment.press(key)
        assert head(page) == where[0]
        assert moment.get_attribute("aria-valuetext") == ", ".join(where)


def test_the_step_can_be_dragged(page):
    left, wide, y = track(page)
    ways = (0.1, 0), (0.92, 40), (0.99, 40)
    places = [(left + share * wide, y + down) for share, down in ways]
    drag(page, places[0], drop=False)
    assert head(page) == "forward pass"
    page.mouse.up()
    drag(page, *places[:2])
    assert head(page) == "all-gather"
    drag(page, *places)
    assert head(page) == "Between two steps"
    choose(page, "zero-3")  # another step: it begins anew
    assert head(page) == "Between two steps"


def test_an_own_number(page):
    """Typed, or begun from a preset; a bad one is said to be."""
    unfold(page)
    field = control(page, "parameters")
    assert not field.is_visible()
    control(page, "model").select_option("own number")
    for typed in ("1099511627777", "7"):
        field.fill(typed)
        field.press("Tab")
        wrong = page.get_by_text("use a whole number from 1")
        assert wrong.is_visible() == (typed != "7")
    agree(page, model=7)
    control(page, "model").select_option("1.3 B")
    agree(page, model="1.3 B")
    control(page, "model").select_option("own number")
    agree(page, model=1_300_000_000)


def test_the_box_needs_several_micro_batches(page):
    """It keeps what it was while there is one."""
    unfold(page)
    box = control(page, "synchronise_last")
    assert box.is_disabled()
    assert page.get_by_text("there is one micro-batch").is_visible()
    control(page, "accumulation_steps").press("ArrowRight")
    box.check()
    agree(page, accumulation_steps=2, synchronise_last=True)
    waiting = page.locator(".mb-picture .mb-fill-waiting")
    assert waiting.count() > 5 * 4  # their bytes, and 4 slices on each rank
    assert head(page) == "Between micro-batches"
    control(page, "accumulation_steps").press("Home")
    agree(page, synchronise_last=True)
    assert box.is_disabled()
    assert waiting.count() == 1  # the block in the bar, in its pattern


# How much room it takes ----------------------------------------------------


def test_it_fits_the_screen(show):
    page = show(Sharding(**FITS), width=776)
    assert page.locator(".mb-root").bounding_box()["height"] <= 700
    page = show(Sharding(**FITS), width=374)
    root = page.locator(".mb-root").bounding_box()
    picture = page.locator(".mb-picture").bounding_box()
    assert picture["y"] + picture["height"] - root["y"] <= 844
