"""The adapters widget: tiles that are the ledger's, and how they move."""

import json
from itertools import product

import kind_adapters as kind
import pytest
from widget_pages import control, fits_a_screen, texts, unfold

from membudget.ledger.walk import kept
from membudget.widgets import Adapters
from membudget.widgets import adapters_rows as rows

LORA = "LoRA, all layers"
QV = "LoRA, query and value"
STATES = list(rows.states())
named = pytest.mark.parametrize("switches", STATES, ids=str)


def tiles(train, at, **on):
    """The tiles named x of these boxes: who saves them, width and bytes."""
    found = rows.tiles(rows.Switches(train, **on))
    return [
        (boxes, *size)
        for boxes, name, *size in found
        if name == "x" and set(boxes.split()) & set(at.split())
    ]


@named
def test_the_blocks_and_the_rest_are_all_that_is_kept(switches):
    """To the byte: what is no block's is the norm's, the head's, the loss."""
    paper = rows.written(switches)
    names = [f"blocks.{i}" for i in range(rows.SHAPE.depth)]
    blocks = [
        rows.TOKENS * sum(n * b for *_, n, b in rows.tiles(switches, number))
        for number in range(len(names))
    ]
    assert blocks == [kind.of_block(switches, i) for i in range(len(names))]
    assert len(set(blocks[1:])) == 1
    assert blocks[0] <= blocks[1]
    rest = sum(
        tensor.bytes
        for tensor, savers in kept(paper)
        if len({row.name.split(" ")[0][:8] for row in plain(savers)}) > 1
        or not plain(savers)[0].name.startswith("blocks")
    )
    loss = paper.rows[-1].makes[0].bytes
    assert sum(blocks) + rest + loss == kind.step(switches).saved


def plain(savers):
    """Rows, of a checkpoint the first."""
    return [getattr(row, "rows", [row])[0] for row in savers]


def test_one_x_becomes_three():
    three = "query key value"
    assert tiles("all weights", three) == [(three, 256, 2)]
    assert tiles(LORA, three) == [(n, 256, 4) for n in three.split()]
    assert tiles(LORA, three, bf16=True) == [(three, 256, 2)]
    assert tiles(QV, three, bf16=True) == [("query value", 256, 2)]
    assert tiles("the embedding", three) == []
    assert tiles(LORA, "block", checkpointed=True) == [("block", 256, 2)]


@pytest.mark.parametrize("bf16", [False, True])
def test_dropout_keeps_a_mask_and_a_copy_for_each(bf16):
    found = rows.tiles(rows.Switches(LORA, bf16=bf16, dropout=True))
    size = 2 if bf16 else 4
    for name in ("query", "key", "value", "out", "gate", "up", "down"):
        width = 704 if name == "down" else 256
        own = [rest for boxes, *rest in found if boxes == name]
        assert own == [
            ["mask", width, size],
            ["x", width, size],
            ["A x", 8, size],
        ]


def test_pale_tiles_are_those_of_a_frozen_block():
    account = Adapters().account
    frozen = Adapters("the embedding").step["tiles"]
    assert all(tile[4] for tile in account["tiles"][frozen])
    bright = [t for t in account["tiles"][0] if not t[4]]
    assert {tile[1] for tile in bright} == {"x", "normalised"}
    for own in account["tiles"]:
        names = {box.split(" ")[0] for box, *_, anyway in own if not anyway}
        assert not names & {"attention", "product"}


def test_the_file_is_what_python_computes():
    """`python -m membudget.widgets.adapters_rows` writes it."""
    assert json.loads(rows.FILE.read_text()) == json.loads(
        json.dumps(rows.account())
    )


def test_without_an_adapter_its_switches_change_nothing():
    plain = Adapters()
    switched = Adapters(bf16=True, dropout=True, four_bits=True)
    assert plain.step == switched.step
    assert plain.sentence() == switched.sentence()


def test_four_bits_change_no_tile():
    """But the weights, and so the peak."""
    for bf16, dropout in product((False, True), (False, True)):
        plain, packed = (
            Adapters(LORA, bf16=bf16, dropout=dropout, four_bits=on)
            for on in (False, True)
        )
        for key in ("tiles", "saved", "large_saved"):
            assert plain.step[key] == packed.step[key]
        for key in ("peak", "large_peak"):
            assert plain.step[key][0] > 2 * packed.step[key][0]
            assert plain.step[key][1:4] == packed.step[key][1:4]


def test_what_the_page_says_of_llama_3():
    """LoRA keeps more, and yet its peak is lower: its states are."""
    full, lora = Adapters(), Adapters(LORA)
    assert lora.step["large_saved"] > 1.5 * full.step["large_saved"]
    assert sum(lora.step["large_peak"]) < 0.8 * sum(full.step["large_peak"])
    assert lora.step["saved"] > full.step["saved"]
    assert sum(lora.step["peak"]) > sum(full.step["peak"])


# In a browser ----------------------------------------------------------------

PLACES = """(part) => [...document.querySelectorAll(".mb-tile")]
  .map((tile) => [tile, tile.querySelector("title").textContent])
  .filter(([, words]) => words.startsWith(`${part}:`))
  .map(([tile]) => tile.querySelector("rect").getBBox())
  .map(({ x, y, width, height }) => [x, y, width, height])"""

MOVING = """() => document.getAnimations()
  .filter((one) => one.effect.getKeyframes()[0].x)
  .map((one) => one.effect.target.getAttribute("class"))"""


def test_one_tile_splits_into_three_that_are_twice_as_tall(show):
    page = show(Adapters(), width=760, reduced_motion="reduce")
    [[_, _, width, height]] = page.evaluate(PLACES, "x, for query, key, value")
    control(page, "train").nth(1).check()
    found = [
        *page.evaluate(PLACES, "x, for query"),
        *page.evaluate(PLACES, "x, for key"),
        *page.evaluate(PLACES, "x, for value"),
    ]
    assert [round(w / width, 3) for *_, w, _ in found] == [1, 1, 1]
    assert [round(h / height, 3) for *_, h in found] == [2, 2, 2]
    assert len({y for _, y, *_ in found}) == 1


def test_tiles_move_from_where_they_were(show):
    page = show(Adapters(), width=760)
    control(page, "train").nth(1).check()
    moving = page.evaluate(MOVING)
    assert moving.count("mb-fill-activations") >= 6  # three, two, and the bar
    page.wait_for_function("document.getAnimations().length === 0")
    control(page, "bf16").check()
    assert page.evaluate(MOVING).count("mb-fill-activations") >= 6


def test_less_motion_moves_nothing(show):
    page = show(Adapters(), reduced_motion="reduce")
    control(page, "train").nth(1).check()
    assert page.evaluate("document.getAnimations().length") == 0
    assert page.locator(".mb-ghost").count() == 1


def test_a_switch_of_adapters_says_why_it_cannot_be_used(show):
    page = show(Adapters())
    unfold(page)
    for key in ("bf16", "dropout", "four_bits"):
        assert control(page, key).is_disabled()
    assert page.get_by_text("needs LoRA").count() == 3
    control(page, "train").nth(2).check()
    for key in ("bf16", "dropout", "four_bits"):
        assert control(page, key).is_enabled()
    assert page.get_by_text("needs LoRA").count() == 0


def test_a_checkpoint_leaves_one_tile(show):
    """All others are made again, and drawn as outlines."""
    page = show(Adapters(LORA))
    count = page.locator(".mb-tile").count()
    assert page.locator(".mb-again").count() == 0
    control(page, "checkpointed").check()
    assert page.locator(".mb-again").count() == count
    assert page.locator(".mb-tile").count() == count + 1
    assert page.locator(".mb-tile .mb-fill-checkpoints").count() == 1
    assert "One block keeps 0.5 MiB" in texts(page)


def test_a_tile_says_what_it_is(show):
    page = show(Adapters(LORA))
    titles = page.locator(".mb-tile title").all_text_contents()
    assert (
        "x, for key: a token’s 256 numbers of 4 bytes; 1.00 MiB in all"
        in titles
    )


@pytest.mark.parametrize("width", [390, 1000])
def test_it_fits_a_screen(show, width):
    assert fits_a_screen(show(Adapters(LORA), width=width))
