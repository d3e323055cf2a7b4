"""The recipes widget: what it tells of one weight, and its card."""

import pytest
from widget_pages import control, drag, texts

from membudget import ledger
from membudget.cards import CARDS
from membudget.ledger import GPT2, RECIPES
from membudget.widgets import Recipes, format_bytes

MOVING = """() => document.getAnimations()
    .map((one) => one.effect.target.getAttribute("class") ?? "")"""


def test_defaults():
    made = Recipes()
    assert (made.recipe, made.batch, made.card) == ("fp32", 16, "RTX 4080")
    assert not made.checkpointed
    assert made.account["batches"] == [1, 2, 4, 8, 16, 32]
    assert made.account["name"] == "GPT-2 124M, 1024 tokens"


def test_it_opens_where_autocast_just_fits():
    """fp32 overflows the card by gigabytes; a batch more, and none fits."""
    made = Recipes()
    usable = CARDS[made.card].usable
    peaks = made.account["peaks"][0][made.account["batches"].index(made.batch)]
    full, low = (sum(parts) for parts in peaks[:2])
    assert 0.9 * usable < low < usable < 0.8 * full
    step = ledger.predict(GPT2, 16, 1024, lists="cuda", foreach=True)
    assert full == step.peak
    assert f"{format_bytes(full)} in fp32" in made.sentence()
    assert f"{format_bytes(low)} under autocast" in made.sentence()


@pytest.mark.parametrize("recipe", RECIPES)
def test_tiles_are_the_ledgers(recipe):
    place = list(RECIPES).index(recipe)
    weight, copy, gradient, *kept = Recipes().account["tiles"][place]
    of = ledger.bytes_per_parameter(recipe)
    assert (weight, gradient) == (of.parameters, of.gradients)
    assert sum(kept) == of.optimizer
    assert copy == (2 if recipe == "autocast" else 0)


def test_a_checkpointed_block_has_no_copies_at_the_peak():
    """Without checkpoints those of all blocks are there: pale or not."""
    blocks = GPT2.depth * 12 * GPT2.width**2

    def alive(checkpointed):
        step = ledger.predict(
            *(GPT2, 1, 1),
            recipe="autocast",
            checkpointed=checkpointed,
            **ledger.rules(GPT2, "cuda"),
        )
        first = next(m for m in step.moments if m.phase == "backward")
        return first.split["activations"]

    assert alive(False) - alive(True) == pytest.approx(2 * blocks, rel=0.02)


def test_a_recipe_moves_its_tiles(show):
    """What is new falls, all go into the card, and then nothing moves."""
    page = show(Recipes(), width=760)
    control(page, "recipe").nth(1).check()
    moving = page.evaluate(MOVING)
    assert moving.count("mb-tile") == 2
    assert moving.count("mb-fill-activations") == 2  # the copy, and the bar
    assert moving.count("mb-fill-gradients") == 1  # the bar alone: it is later
    page.wait_for_function("document.getAnimations().length === 0")
    assert page.locator(".mb-tile").count() == 4 * 4 + 2
    assert page.locator(".mb-later").count() == 4
    control(page, "batch").press("ArrowLeft")
    assert page.evaluate(MOVING) == []


def test_less_motion_moves_nothing(show):
    page = show(Recipes(), reduced_motion="reduce")
    control(page, "recipe").nth(2).check()
    assert page.locator(".mb-tile").count() == 4 * 2
    assert page.evaluate(MOVING) == []
    assert page.locator(".mb-ghost").count() == 4 * 2 + 1


def test_a_card_that_is_too_small(show):
    """The verdict, how far, and a frame that the batch does not move."""
    page = show(Recipes(card="T4"), width=760)
    over = sum(Recipes().account["peaks"][0][4][0]) - CARDS["T4"].usable
    verdict = f"{format_bytes(over)} too much"
    assert any(verdict in words for words in texts(page))
    assert any("not measured on a GPU" in words for words in texts(page))
    frame = page.locator(".mb-frame")
    wide = frame.get_attribute("width")
    for key in ("Home", "End"):
        control(page, "batch").press(key)
        assert frame.get_attribute("width") == wide
    assert page.locator(".mb-break").count() == 1
    control(page, "recipe").nth(1).check()
    assert "use fp16, same bytes" in page.locator(".mb-live").inner_text()


def test_the_bar_is_dragged_to_a_batch(show):
    page = show(Recipes("autocast"), width=760)
    box = page.locator(".mb-frame").bounding_box()
    y = box["y"] + 30
    drag(page, (box["x"] + box["width"] - 20, y), (box["x"] + 20, y))
    assert control(page, "batch").input_value() == "0"
    drag(page, (box["x"] + 20, y), (box["x"] + box["width"] + 200, y))
    assert control(page, "batch").input_value() == "5"
    drag(page, (box["x"] + 20, box["y"] - 60), (box["x"] + 20, y))
    assert control(page, "batch").input_value() == "5"
