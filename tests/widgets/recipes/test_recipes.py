"""The recipes widget: what it adds up, and its budget."""

from widget_pages import control, texts

from membudget import ledger
from membudget.cards import CARDS
from membudget.widgets import Recipes, format_bytes


def test_defaults():
    made = Recipes()
    assert (made.batch, made.card, made.checkpointed) == (8, "", False)
    assert made.account["batches"] == [1, 2, 4, 8, 16, 32]
    assert made.account["name"] == "GPT-2 124M, 1024 tokens"
    step = ledger.predict(ledger.GPT2, 8, 1024, lists="cuda", foreach=True)
    assert f"{format_bytes(step.peak)} in fp32" in made.sentence()


def test_a_card_that_is_too_small(show):
    """The verdict, how far, and a line that the batch does not move."""
    page = show(Recipes(card="T4", batch=16), width=760)
    step = ledger.predict(ledger.GPT2, 16, 1024, lists="cuda", foreach=True)
    over = step.peak - CARDS["T4"].usable
    assert f"{format_bytes(over)} too much" in texts(page)
    assert "fits" in texts(page)
    assert any("(use fp16: same bytes)" in words for words in texts(page))
    assert sum("bf16 emulated" in words for words in texts(page)) == 3
    assert "not measured on a GPU" in texts(page)
    limit = page.locator(".mb-limit")
    line = limit.get_attribute("x1")
    for key in ("Home", "End"):
        control(page, "batch").press(key)
        assert limit.get_attribute("x1") == line
        assert page.locator(".mb-ghost").count() == 5
    assert page.locator(".mb-beyond").count() > 0
    assert "fits" not in texts(page)[1:3]
    control(page, "card").select_option("RTX 4090")
    assert not any("emulated" in words for words in texts(page))
    control(page, "card").select_option("")
    assert limit.count() == 0
