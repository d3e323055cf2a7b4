"""The sharding widget's traits, numbers and words."""

import ast
import inspect
import json
import re
from itertools import product
from xml.etree import ElementTree

import pytest
import sharding_cases as cases
import torch

from membudget import sharding
from membudget.ledger import PRESETS, RECIPES, bytes_per_parameter
from membudget.widgets import Sharding
from membudget.widgets import sharding as module
from membudget.widgets.sharding import CARDS, MODELS, PARTS, STAGE_NAMES

GIB = 2**30


@pytest.fixture
def widget():
    return Sharding()


# Traits --------------------------------------------------------------------


def test_defaults(widget):
    assert (widget.model, widget.ranks, widget.stage) == (
        "7.5 B",
        64,
        "zero-3",
    )
    assert (widget.recipe, widget.accumulation_steps) == ("master", 1)
    assert (widget.synchronise_last, widget.card) == (False, "none")


def test_names_are_the_rooms():
    assert list(STAGE_NAMES) == list(sharding.STAGES)
    for name, count in MODELS.items():
        assert name not in PRESETS or PRESETS[name].parameters == count
    assert MODELS["Llama 3 8B"] == 8_030_261_248
    assert MODELS["Llama 3 70B"] == 70_553_706_496
    assert MODELS["GPT-2 124M"] == 124_439_808


@pytest.mark.parametrize("name", list(CARDS)[1:])
def test_a_card_has_the_decimal_gigabytes_of_its_name(name):
    size, words = CARDS[name]
    assert size == int(name.split()[0]) * 10**9
    assert words.startswith(name)


def test_what_the_browser_sends(widget):
    widget.set_state({"model": 12345, "ranks": 8, "card": "24 GB"})
    assert (widget.parameters, widget.ranks) == (12345, 8)
    widget.set_state({"model": "1.3 B"})
    assert widget.parameters == 1_300_000_000


# Numbers -------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_are_the_rooms(widget, recipe):
    """Bytes, and what is sent, of every stage."""
    widget.recipe = recipe
    each = bytes_per_parameter(recipe)
    sweep = product(("7.5 B", 1001), (1, 8, 1024), (1, 4, 16), (False, True))
    for widget.model, widget.ranks, steps, last in sweep:
        widget.accumulation_steps, widget.synchronise_last = steps, last
        n = widget.numbers()
        psi = n["parameters"]
        assert psi == {"7.5 B": 7_500_000_000}.get(widget.model, 1001)
        assert list(n["stages"]) == list(sharding.STAGES)
        for stage, of in n["stages"].items():
            waiting = last and steps > 1
            states = sharding.zero_states(
                psi, widget.ranks, stage, recipe, waiting=waiting
            )
            shard = sharding.zero_states(psi, widget.ranks, stage, recipe)
            split = of["split"]
            assert list(split) == list(PARTS)
            assert of["bytes"] == states.total == sum(split.values())
            assert split["parameters"] == states.parameters
            assert split["gradients"] == shard.gradients
            both = split["gradients"] + split["waiting"]
            assert both == states.gradients
            assert split["optimizer"] == states.optimizer
            when = {"accumulation_steps": steps, "synchronise_last": last}
            assert of["sent"] == sharding.zero_traffic(
                psi, stage, recipe, ranks=widget.ranks, **when
            )
            size = of["gathered"] * each.parameters
            size += of["reduced"] * each.gradients
            assert psi * size == sharding.zero_traffic(
                psi, stage, recipe, **when
            )
            assert (of["fits"], of["fewest"]) == (None, None)


def test_the_papers_example():
    """Figure 1 of Rajbhandari et al. (2020): 7.5 B on 64 ranks, in GB."""
    stages = Sharding("7.5 B", 64).numbers()["stages"]
    sizes = [round(of["bytes"] / 1e9, 1) for of in stages.values()]
    assert sizes == [120.0, 31.4, 16.6, 1.9]
    times = [(of["gathered"], of["reduced"]) for of in stages.values()]
    assert times == [(0, 2), (1, 1), (1, 1), (2, 1)]


def test_what_accumulation_sends(widget):
    widget.accumulation_steps = 4

    def times():
        stages = widget.numbers()["stages"].values()
        return [(of["gathered"], of["reduced"]) for of in stages]

    assert times() == [(0, 8), (1, 4), (1, 4), (8, 4)]
    widget.synchronise_last = True
    assert times() == [(0, 2), (1, 1), (1, 1), (8, 1)]


def test_what_waits(widget):
    """Only gradients that are split, and only with several micro-batches."""
    widget.synchronise_last = True
    for widget.accumulation_steps, waits in ((1, 0), (2, 1)):
        stages = widget.numbers()["stages"]
        found = [of["split"]["waiting"] for of in stages.values()]
        more = 2 * 7_500_000_000 * 63 // 64
        assert found == [0, 0, waits * more, waits * more]


@pytest.mark.parametrize("card", list(CARDS)[1:])
def test_the_fewest_ranks(widget, card):
    widget.card = card
    limit = CARDS[card][0]
    seen = set()
    models = (*MODELS, 2**40, limit // 16, limit // 16 + 1)
    for widget.model, last in product(models, (False, True)):
        widget.accumulation_steps, widget.synchronise_last = 2, last
        for stage, of in widget.numbers()["stages"].items():
            fewest = of["fewest"]
            seen.add(fewest)
            assert of["fits"] == (of["bytes"] <= limit)

            def fits(ranks, stage=stage, last=last):
                states = sharding.zero_states(
                    widget.parameters, ranks, stage, waiting=last
                )
                return states.total <= limit

            if fewest is None:
                assert not fits(2**45)
            else:
                assert fits(fewest)
                assert fewest == 1 or not fits(fewest // 2)
                assert of["fits"] == (widget.ranks >= fewest)
    assert {None, 1, 2} <= seen


# Words ---------------------------------------------------------------------

ON_TOP = "Activations, gathered parameters and buffers come on top."


def test_the_sentence(widget):
    assert widget.sentence() == (
        "ZeRO-3 on 64 ranks: 1.75 GiB of model states per rank, 64 times less "
        "than DDP; each rank sends 41.3 GiB per step, 1.5 times as much as "
        f"DDP. {ON_TOP}"
    )
    widget.stage = "zero-2"
    assert widget.sentence() == (
        "ZeRO-2 on 64 ranks: 15.5 GiB of model states per rank, 7.21 times "
        "less than DDP; each rank sends 27.5 GiB per step, as much as DDP. "
        "Activations and buffers come on top."
    )
    widget.accumulation_steps, widget.synchronise_last = 4, True
    assert (
        ": 29.2 GiB of model states per rank (13.8 GiB of them wait to "
        "be reduced), 3.82 times less than DDP; " in widget.sentence()
    )
    widget.stage = "ddp"
    assert widget.sentence() == (
        "DDP on 64 ranks: 112 GiB of model states per rank; each rank sends "
        "27.5 GiB per step. Activations and buffers come on top."
    )


def test_the_sentence_on_one_rank():
    assert Sharding(ranks=1).sentence() == (
        "ZeRO-3 on 1 rank: 112 GiB of model states per rank, as much as DDP; "
        f"nothing is sent. {ON_TOP}"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_sentence_explains_other_bytes_than_ddps(recipe):
    """2 Ψ are fewer bytes with ZeRO-2 where a parameter has fewer."""
    shown = Sharding(stage="zero-2", recipe=recipe)
    if recipe == "master-fp32-gradients":
        words = "0.75 times as much as DDP (a parameter has 2 bytes, "
        words += "a gradient 4). "
    else:
        words = "as much as DDP. "
    assert f" per step, {words}" in shown.sentence()
    for shown.stage, shown.ranks in (("ddp", 64), ("zero-2", 1)):
        assert "a gradient" not in shown.sentence()


def test_the_papers_zero_2_and_fsdps():
    """What the module's note says of K micro-batches."""
    units = sharding.units_of(torch.nn.Linear(8, 8, bias=False), [])
    for steps, last in product((1, 2, 16), (False, True)):
        when = {"accumulation_steps": steps, "synchronise_last": last}
        waiting = last and steps > 1
        of = Sharding(64, 4, "zero-2", "fp32", steps, synchronise_last=last)
        n = of.numbers()["stages"]["zero-2"]
        ours = 2 if waiting else steps + 1
        assert n["gathered"] + n["reduced"] == ours
        assert n["sent"] == ours * 64 * 4 * 3 // 4
        sent = sharding.fsdp_traffic(units, 4, "zero-2", **when).values()
        theirs = steps + 1 if waiting else 2 * steps
        assert sum(t.bytes for t in sent) == theirs * 64 * 4  # whole


@pytest.mark.parametrize(
    "traits, words",
    [
        (
            {"card": "24 GB"},
            "The states fit a card of 24 GB; of the powers of two, 8 ranks "
            "would be enough. ",
        ),
        ({"card": "24 GB", "ranks": 8}, "The states fit a card of 24 GB. "),
        (
            {"card": "24 GB", "ranks": 4},
            "The states do not fit a card of 24 GB; of the powers of two, "
            "8 ranks would be enough. ",
        ),
        (
            {"card": "141 GB"},
            "The states fit a card of 141 GB; 1 rank would be enough. ",
        ),
        (
            {"card": "80 GB", "ranks": 4},
            "The states fit a card of 80 GB; 2 ranks would be enough. ",
        ),
        (
            {"card": "80 GB", "stage": "ddp"},
            "The states do not fit a card of 80 GB; no number of ranks helps, "
            "as nothing is split.",
        ),
        (
            {"card": "24 GB", "stage": "zero-1"},
            "The states do not fit a card of 24 GB; no number of ranks "
            "helps, as too little is split.",
        ),
        (
            {"card": "16 GB", "model": 2**40},
            "of the powers of two, 2048 ranks would be enough.",
        ),
    ],
)
def test_whether_it_fits(traits, words):
    assert words in Sharding(**traits).sentence() + " "


def test_titles(widget):
    assert widget.titles() == (
        "Model states per rank: 7.5 B parameters, master, 64 ranks",
        "Sent by each rank per optimizer step: one micro-batch",
    )
    widget.model, widget.ranks, widget.accumulation_steps = 12345, 1, 8
    assert widget.titles() == (
        "Model states per rank: 12\u202f345 parameters, master, 1 rank",
        "Sent by each rank per optimizer step: 8 micro-batches",
    )
    widget.model, widget.synchronise_last = "Llama 3 8B", True
    assert widget.titles() == (
        "Model states per rank: Llama 3 8B, master, 1 rank",
        "Sent by each rank per optimizer step: 8 micro-batches, reduced once",
    )


# What is left behind -------------------------------------------------------


@pytest.mark.parametrize(
    "traits",
    [
        {"card": "24 GB"},
        {"model": "Llama 3 70B", "ranks": 1024, "card": "80 GB"},
        {"model": "GPT-2 124M", "ranks": 1, "card": "141 GB"},
        {"accumulation_steps": 4, "synchronise_last": True},
        {"model": 1, "ranks": 1024},
    ],
)
def test_the_picture(traits):
    for stage in STAGE_NAMES:
        shown = Sharding(**traits, stage=stage)
        root = ElementTree.fromstring(shown.picture())
        texts = [text.text for text in root.iter("text")]
        for title in shown.titles():
            assert set(title.split(": ")) <= set(texts)
        parts = set(PARTS.values())
        if not shown.waiting:
            parts -= {PARTS["waiting"]}
        assert parts == set(texts) & set(PARTS.values())
        bold = [t.text for t in root.iter("text") if t.get("font-weight")]
        assert [text.split(":")[0] for text in bold] == 2 * [
            STAGE_NAMES[stage]
        ]
        for box in root.iter("rect"):
            right = float(box.get("x")) + float(box.get("width"))
            assert 0 <= float(box.get("x")) <= right <= 400


@pytest.mark.parametrize(
    "card, words, drawn",
    [
        ("none", "GB", False),
        ("24 GB", "dashed: 24 GB = 22.4 GiB", True),
        ("141 GB", "card 141 GB = 131 GiB →", False),
    ],
)
def test_a_card_in_the_picture(card, words, drawn):
    picture = Sharding("1.3 B", 8, card=card).picture()
    assert (words in picture) == (card != "none")
    assert ("6 4" in picture) == drawn


def test_the_limit_of_the_picture_keeps_clear_of_words():
    """Those above the bars, and the initials in them."""
    beside = 0
    for model, ranks, card, steps in product(
        MODELS, (1, 2, 8, 64), list(CARDS)[1:], (1, 4)
    ):
        shown = Sharding(model, ranks, card=card, accumulation_steps=steps)
        shown.synchronise_last = True
        root = ElementTree.fromstring(shown.picture())
        dashed = [p for p in root.iter("path") if p.get("stroke-dasharray")]
        boxes = [
            [float(box.get(key)) for key in ("x", "y", "width")]
            for box in root.iter("rect")
        ]
        for line in dashed:
            starts = re.findall(r"M([\d.]+) (\d+)v16", line.get("d"))
            assert len(starts) == 4
            limit, tops = float(starts[0][0]), [int(y) for _, y in starts]
            for text in root.iter("text"):
                x, y = float(text.get("x")), float(text.get("y"))
                if text.get("font-size") != "11":
                    for top in tops:  # 12 pixels high, and what hangs below
                        assert y + 3 <= top - 2 or y - 12 >= top + 16 + 2
                elif y - 12 in tops:
                    assert abs(x - limit) > 8.9
                    beside += abs(x - limit) < 9.1
                    assert any(
                        left + 5.9 <= x <= left + wide - 5.9
                        for left, top, wide in boxes
                        if top == y - 12
                    )
    assert beside > 20


def test_bars_of_the_picture():
    """As long as their bytes, and the limit where the card's are."""
    shown = Sharding(ranks=8, card="24 GB")
    root = ElementTree.fromstring(shown.picture())
    of = shown.numbers()["stages"]["ddp"]
    boxes = [
        (float(box.get("x")), float(box.get("width")))
        for box in root.iter("rect")
        if box.get("y") == "56"
    ]
    each = 396 / 1.04 / of["bytes"]
    x = 2
    sizes = [size for size in of["split"].values() if size]
    for (left, wide), size in zip(boxes, sizes, strict=True):
        assert left == pytest.approx(x, abs=0.06)
        assert wide == pytest.approx(size * each, abs=0.06)
        x += size * each
    (line,) = (
        path.get("d")
        for path in root.iter("path")
        if path.get("stroke-dasharray")
    )
    at = 2 + 24e9 * each
    assert float(line[1:].split()[0]) == pytest.approx(at, abs=0.06)


def test_bars_of_what_is_sent():
    """Parameters before gradients, as long as the bytes of each."""
    shown = Sharding(recipe="master-fp32-gradients")
    root = ElementTree.fromstring(shown.picture())
    stages = shown.numbers()["stages"].values()
    each = 396 / 1.04 / max(of["sent"] for of in stages)
    for index, of in enumerate(stages):
        boxes = [
            float(box.get("width"))
            for box in root.iter("rect")
            if box.get("y") == str(318 + 34 * index)
            and box.get("fill") != "none"
        ]
        gathered, reduced = 2 * of["gathered"], 4 * of["reduced"]
        wanted = [
            part * each * of["sent"] / (gathered + reduced)
            for part in (gathered, reduced)
            if part
        ]
        assert boxes == pytest.approx(wanted, abs=0.06)


def test_the_same_every_time():
    one, two = Sharding(), Sharding()
    assert one._html() == two._html() == one._html()
    assert repr(one) == (
        "Sharding('7.5 B', ranks=64, stage='zero-3', recipe='master', "
        "accumulation_steps=1)"
    )
    assert len(json.dumps(one.state())) < 2_500


def test_the_grid_holds_every_place_of_every_control(widget):
    assert cases.GRID["ranks"] == tuple(2**i for i in range(11))
    assert len(list(cases.settings(cases.GRID))) == 66_000
    for key, places in cases.GRID.items():
        for place in places:
            setattr(widget, key, place)


def test_other_widgets_do_not_wait_for_fsdp():
    """PyTorch's takes most of a second: it is imported with the first one."""
    tree = ast.parse(inspect.getsource(module))
    at_once = [
        f"{getattr(node, 'module', None)} {name.name}"
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    ]
    assert len(at_once) > 5
    assert [text for text in at_once if "sharding" in text] == []
