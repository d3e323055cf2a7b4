"""The sharding widget's traits, numbers and static picture."""

import ast
import inspect
from itertools import product
from xml.etree import ElementTree

import pytest
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
    sweep = product((7_500_000_000, 1001), (1, 8), (1, 4), (False, True))
    for psi, widget.ranks, steps, last in sweep:
        widget.model = psi
        when = {"accumulation_steps": steps, "synchronise_last": last}
        widget.accumulation_steps, widget.synchronise_last = steps, last
        for stage, of in widget.numbers()["stages"].items():
            given = psi, widget.ranks, stage, recipe
            states = sharding.zero_states(*given, waiting=last and steps > 1)
            shard = sharding.zero_states(*given)
            split = of["split"]
            assert list(split) == list(PARTS)
            assert list(split.values()) == [
                states.parameters,
                shard.gradients,
                states.gradients - shard.gradients,
                states.optimizer,
            ]
            assert of["bytes"] == states.total
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


def test_the_fewest_ranks_by_trying(widget):
    widget.card, limit = "24 GB", CARDS["24 GB"][0]
    assert limit == 24 * 10**9
    widget.accumulation_steps = 2
    models = (*MODELS, 2**40, limit // 16, limit // 16 + 1)
    for model, last in product(models, (False, True)):
        widget.model, widget.synchronise_last = model, last
        for stage, of in widget.numbers()["stages"].items():
            fits = [
                2**i
                for i in range(46)
                if sharding.zero_states(
                    widget.parameters, 2**i, stage, waiting=last
                ).total
                <= limit
            ]
            assert of["fewest"] == (fits[0] if fits else None)
            assert of["fits"] == (widget.ranks in fits)


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


# What is left behind -------------------------------------------------------


@pytest.mark.parametrize(
    "traits",
    [
        {"model": "GPT-2 124M", "ranks": 1, "card": "141 GB"},
        {"accumulation_steps": 4, "synchronise_last": True},
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
