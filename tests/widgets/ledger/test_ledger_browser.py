"""The ledger widget in a browser, without a kernel."""

import kind
import kind_ledger
import pytest
import widget_pages as pages
from widget_pages import control, drag, texts, unfold

from membudget.widgets import Ledger


@pytest.fixture
def page(show):
    return show(Ledger())


def agree(page, **state):
    kind.agree(kind_ledger.KIND, page, Ledger(**state))


def at(page, selector, share=1.0):
    """A place in the card, at a share of an element's width."""
    box = page.locator(f".mb-picture {selector}").first.bounding_box()
    return box["x"] + share * box["width"], box["y"] + box["height"] / 2


# What it shows -------------------------------------------------------------


def test_what_is_too_much_stands_out(page):
    shown = {"fits: 3.52 GiB free", "T4: 14.1 GiB usable"}
    assert shown <= set(texts(page))
    assert page.locator(".mb-picture .mb-fill-over").count() == 0
    edge, _ = at(page, ".mb-card")
    for _ in range(4):
        control(page, "batch").press("ArrowRight")
    assert "1.06 GiB too much" in texts(page)
    left, _ = at(page, ".mb-fill-over", 0)
    assert left == pytest.approx(edge, abs=2)
    control(page, "model").select_option("Llama 3 70B")
    assert "1.37 TiB too much" in texts(page)
    assert "1.38 TiB →" in texts(page)
    assert "worst moments, to a scale of 1.38 TiB" in texts(page)
    assert page.locator(".mb-picture .mb-grip").count() == 0
    assert at(page, ".mb-card")[0] == edge  # the axis stays


@pytest.mark.few(0)
def test_a_card_that_only_emulates_bf16(page):
    unfold(page)
    control(page, "recipe").select_option("bf16")
    assert "T4: 14.1 GiB, bf16 emulated" in texts(page)
    control(page, "card").select_option("RTX 4090")
    assert "RTX 4090: 23.1 GiB usable" in texts(page)


def test_no_card(page):
    control(page, "card").select_option("none")
    agree(page, card="none")
    assert "needs 10.5 GiB" in texts(page)
    assert page.locator(".mb-picture .mb-card").count() == 0


def test_a_ghost_is_the_peak_before(page):
    ghost = page.locator(".mb-picture .mb-ghost")
    assert ghost.count() == 0
    end, _ = at(page, ".mb-grip", 0.5)
    control(page, "batch").press("ArrowLeft")
    assert at(page, ".mb-ghost")[0] == pytest.approx(end, abs=1)
    control(page, "batch").press("ArrowRight")
    control(page, "card").select_option("RTX 4090")
    assert ghost.count() == 0  # the same peak


@pytest.mark.few(0)
def test_foreach_is_a_gpus_way(page):
    unfold(page)
    box = control(page, "foreach")
    assert box.is_checked() and box.is_disabled()
    assert page.get_by_text("on: PyTorch’s way on a GPU").is_visible()
    control(page, "card").select_option("none")
    assert box.is_enabled() and not box.is_checked()
    box.check()
    agree(page, card="none", foreach=True)
    control(page, "optimizer").select_option("SGD")
    assert box.is_disabled()
    assert page.get_by_text("only Adam does so").is_visible()


def test_gpt2_xl_does_not_fit_an_rtx_4090(show):
    page = show(Ledger("GPT-2 XL 1.5B", batch=1, tokens=256, card="RTX 4090"))
    said = page.locator(".mb-live").inner_text()
    assert "needs 29.0 GiB at the peak, in the optimizer’s step" in said
    assert said.endswith("not even one sequence does.")


@pytest.mark.parametrize("width", [390, 811])
def test_nothing_below_moves(show, width):
    page = show(Ledger(), width=width, style=pages.BOOK_FONT)
    large = ("batch", 20)
    states = [
        [("card", card), ("checkpointed", again), ("steps", steps), large]
        for card in ("T4", "A100 80 GB", "none")
        for again in (False, True)
        for steps in (1, 7)
    ]
    assert len(set(pages.walk(page, states, pages.BELOW))) == 1


# How it is moved -----------------------------------------------------------


def test_the_filling_can_be_dragged_by_mouse(page):
    edge, y = at(page, ".mb-card")
    drag(page, at(page, ".mb-grip", 0.5), (edge - 100, y), (edge + 2, y))
    agree(page, batch=11)  # as many as fit
    page.keyboard.press("ArrowRight")  # the keys go on from there
    agree(page, batch=12)
    assert page.locator(".mb-ghost").count() == 1


def test_there_are_no_more_steps_than_sequences(page):
    unfold(page)
    slider = control(page, "steps")
    slider.press("End")
    agree(page, steps=8)
    slider.press("ArrowLeft")
    assert page.get_by_text("4 × 2", exact=True).is_visible()
    control(page, "batch").press("Home")
    assert slider.is_disabled()
    agree(page, batch=1)


def test_what_is_smallest_stands_first(page):
    """Whatever the order in which the page got them."""
    unfold(page)

    def first(key):
        return control(page, key).locator("option").all_inner_texts()[:2]

    assert first("model") == ["GPT-2 124M", "Llama 3.2 1B"]
    assert first("card") == ["none", "RTX 3070"]
    assert first("recipe")[0] == "fp32: everything in fp32"


@pytest.mark.few(0)
def test_every_stop_of_the_tokens(page):
    """With each model; GPT-2's end at its positions."""
    unfold(page)
    slider = control(page, "tokens")
    slider.press("ArrowRight")  # there is no more
    agree(page, tokens=1024)
    control(page, "model").select_option("Llama 3.2 1B")
    slider.press("End")
    agree(page, model="Llama 3.2 1B", tokens=32768)
    control(page, "model").select_option("GPT-2 124M")
    agree(page, tokens=1024)
    slider.press("Home")
    agree(page, tokens=16)
