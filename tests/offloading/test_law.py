"""The law of a copy that hides, and the two lanes."""

import random
from itertools import product

import pytest
import torch

from membudget.cards import CARDS
from membudget.ledger import Transformer, block_activations
from membudget.measuring import FlopCounter
from membudget.models import Block as OfGpt
from membudget.offloading import (
    CHECKPOINT,
    MACHINES,
    TAPE,
    Block,
    forward_flops,
    gpt_block,
    lanes,
    least_width,
    sustained,
)

KEPT = {False: TAPE, True: CHECKPOINT}

# The law -------------------------------------------------------------------


@pytest.mark.parametrize("width, tokens, batch", [(64, 32, 2), (128, 8, 1)])
def test_flops_are_those_that_torch_counts(width, tokens, batch):
    block = OfGpt(width, 4)
    with FlopCounter() as counter:
        block(torch.ones(batch, tokens, width))
    counted = batch * tokens * forward_flops(width, tokens)
    assert counter.total == counted


@pytest.mark.parametrize("width, tokens", [(768, 1024), (4096, 8192)])
def test_a_tape_is_what_the_ledger_counts(width, tokens):
    """But for the statistics, a few numbers for each token."""
    shape = Transformer(
        vocabulary=8, width=width, depth=1, heads=16, context=tokens
    )
    counted = block_activations(shape, 1, tokens, itemsize=2)
    kept = gpt_block(width, tokens, 1e12).kept
    assert kept <= counted <= kept + tokens * (8 + 4 * 16)


def test_a_checkpoint_and_what_is_made_again_are_the_tape():
    tape = gpt_block(64, 32, 1e12, 3)
    block = gpt_block(64, 32, 1e12, 3, checkpointed=True)
    assert (block.kept, block.again) == (2 * 64 * 96, 30 * 64 * 96)
    assert block.kept + block.again == tape.kept
    assert block.forward == tape.forward


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda: sustained("A3"), "no machine 'A3': use one of T4, RTX"),
        (lambda: sustained("T4", 1.01), "busy is 1.01: .* up to 1"),
        (lambda: sustained("T4", 1, 1.01), "full is 1.01: .* up to 1"),
        (lambda: sustained("T4", 0), "busy is 0: .* above 0"),
        (lambda: Block(0, 1), "forward is 0: .* above 0"),
        (lambda: Block(1, -1), "kept is -1"),
        (lambda: Block(1, 1, -1), "again is -1"),
        (lambda: lanes([]), "blocks is empty"),
        (lambda: lanes([Block(1, 1)], 0), "link is 0: .* above 0"),
        (lambda: least_width(0, 1, 1), "kept is 0: .* above 0"),
        (lambda: least_width(1, 1, 1, -1), "tokens is -1"),
        (lambda: forward_flops(0, 1), "width is 0"),
    ],
)
def test_what_cannot_be_is_refused(call, why):
    with pytest.raises(ValueError, match=why):
        call()


@pytest.mark.parametrize(
    "flops, link, tape, checkpoint",
    [
        (26e12, 12e9, 2889, 181),
        (82.5e12, 25e9, 4400, 275),
        (156e12, 25e9, 8320, 520),
        (395.6e12, 50e9, 10549, 659),
        (395.6e12, 400e9, 1319, 82),
    ],
)
def test_least_widths_by_hand(flops, link, tape, checkpoint):
    assert round(least_width(TAPE, flops, link)) == tape
    assert round(least_width(CHECKPOINT, flops, link)) == checkpoint


def test_8192_tokens_lower_it_by_1365_and_never_below_none():
    whole = least_width(TAPE, 156e12, 25e9)
    assert round(whole - least_width(TAPE, 156e12, 25e9, 8192)) == 1365
    assert least_width(CHECKPOINT, 156e12, 25e9, 8192) == 0


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [0, 4096])
def test_at_the_least_width_the_copy_takes_as_long_as_the_pass(
    machine, tokens
):
    flops, link = sustained(machine)
    width = round(least_width(TAPE, flops, link, tokens))
    copy = TAPE * width / link
    forward = forward_flops(width, tokens) / flops
    assert copy == pytest.approx(forward, rel=1e-3)


def test_machines_are_the_cards_by_their_data_sheets():
    for name, (flops, link) in MACHINES.items():
        assert sustained(name, 1, 1) == (flops, link)
        assert sustained(name, 0.5, 0.25) == (flops / 2, link / 4)
        if name in CARDS:
            card = CARDS[name]
            assert (card.half_flops, card.host_link) == (flops, link)
    assert set(MACHINES) - set(CARDS) == {"GH200"}


# The lanes, by hand ---------------------------------------------------------

NAMES = {"F": "forward", "R": "recomputation", "B": "backward"}


def written(pieces):
    """As "F0 0-1", one after the other."""
    return ", ".join(
        f"{kind if kind in ('out', 'back') else kind[0].upper()}{block} "
        f"{start:g}-{end:g}"
        for block, kind, start, end in pieces
    )


def test_copies_that_hide():
    """Each takes half as long as a forward pass."""
    run = lanes([Block(2, 10)] * 3, 10)
    assert written(run.compute) == "F0 0-2, F1 2-4, F2 4-6, B2 6-10, " + (
        "B1 10-14, B0 14-18"
    )
    assert written(run.link) == ("out0 2-3, out1 4-5, back1 6-7, back0 10-11")
    assert run.on_card == (
        *((0, 10), (2, 20), (3, 10), (4, 20), (5, 10), (6, 20)),
        *((10, 20), (14, 10), (18, 0)),
    )
    assert (run.time, run.waited, run.peak) == (18, 0, 20)


def test_copies_that_stick_out():
    """Each takes twice as long as a forward pass."""
    run = lanes([Block(1, 10)] * 4, 5)
    assert written(run.compute) == (
        "F0 0-1, F1 1-2, F2 3-4, F3 5-6, B3 6-8, B2 9-11, B1 11-13, B0 13-15"
    )
    assert written(run.link) == (
        "out0 1-3, out1 3-5, out2 5-7, back2 7-9, back1 9-11, back0 11-13"
    )
    assert (run.time, run.waited, run.peak) == (15, 3, 20)


def test_checkpoints_come_back_before_a_second_run():
    run = lanes([Block(1, 2, 30)] * 3, 2)
    assert written(run.compute) == (
        "F0 0-1, F1 1-2, F2 2-3, R2 3-4, B2 4-6, R1 6-7, B1 7-9, "
        "R0 9-10, B0 10-12"
    )
    assert written(run.link) == ("out0 1-2, out1 2-3, back1 3-4, back0 6-7")
    assert (run.time, run.waited, run.peak) == (12, 0, 34)


def test_without_a_link_everything_stays():
    run = lanes([Block(1, 10)] * 5)
    assert (run.link, run.time, run.waited) == ((), 15, 0)
    assert run.peak == 50
    run = lanes([Block(1, 10, 30)] * 5)
    assert (run.time, run.peak) == (20, 80)


def test_a_single_block_copies_nothing():
    assert lanes([Block(1, 10)], 1) == lanes([Block(1, 10)])


# The lanes, simulated --------------------------------------------------------


def simulated(blocks, link):
    """The same, by two workers who look at what is done."""
    last = len(blocks) - 1
    backward = [
        (place, kind)
        for place in reversed(range(len(blocks)))
        for kind in ["recomputation", "backward"][not blocks[place].again :]
    ]
    jobs = {
        "compute": [(i, "forward") for i in range(last + 1)] + backward,
        "link": [(i, "out") for i in range(last)]
        + [(i, "back") for i in reversed(range(last))],
    }
    takes = {
        "forward": lambda b: b.forward,
        "recomputation": lambda b: b.forward,
        "backward": lambda b: 2 * b.forward,
        "out": lambda b: b.kept / link,
        "back": lambda b: b.kept / link,
    }
    begun, done, pieces = set(), set(), {"compute": [], "link": []}
    at_work, now, sizes = {}, 0, []

    def ready(place, kind):
        first = "recomputation" if blocks[-1].again else "backward"
        return {
            "forward": place < 2 or (place - 2, "out") in done,
            "recomputation": place == last or (place, "back") in done,
            "backward": place == last or (place, "back") in done,
            "out": (place, "forward") in done,
            "back": (place + 1, first) in begun,
        }[kind]

    while jobs["compute"] or at_work:
        for lane in ("compute", "link"):
            queue = jobs[lane]
            if lane not in at_work and queue and ready(*queue[0]):
                job = queue.pop(0)
                begun.add(job)
                end = now + takes[job[1]](blocks[job[0]])
                at_work[lane] = (end, job)
                pieces[lane].append((*job, now, end))
        sizes.append((now, on_card(blocks, begun, done)))
        now = min(end for end, _ in at_work.values())
        for lane, (end, _) in list(at_work.items()):
            if end == now:
                done.add(at_work.pop(lane)[1])
    return pieces["compute"], pieces["link"], sizes, now


def on_card(blocks, begun, done):
    """What is made and has not left, or is back and still needed."""
    size = 0
    for place, block in enumerate(blocks):
        made = (place, "forward") in begun and (place, "out") not in done
        back = (place, "back") in begun
        used = (place, "backward") in done
        size += block.kept * ((made or back) and not used)
        again = (place, "recomputation") in begun and not used
        size += block.again * again
    return size


@pytest.mark.parametrize("seed", range(60))
def test_the_lanes_are_those_of_a_simulation(seed):
    rng = random.Random(seed)
    again = rng.choice([0, 7])
    blocks = [
        Block(rng.randint(1, 4), rng.randint(0, 9), again)
        for _ in range(rng.randint(2, 9))
    ]
    run = lanes(blocks, 1)
    compute, link, sizes, end = simulated(blocks, 1)
    assert (list(run.compute), list(run.link)) == (compute, link)
    assert run.time == end
    assert run.peak == max(size for _, size in sizes)
    last = dict(sizes)  # what is on the card when a moment's changes are done
    for moment, size in run.on_card[:-1]:
        assert last[moment] == size
    assert run.on_card[-1] == (end, 0)


# The lanes and the law -------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_copies_hide_where_the_law_says_so(machine, checkpointed):
    flops, link = sustained(machine)
    answers = set()
    for tokens, count in product((16, 512, 8192), (3, 8)):
        least = least_width(KEPT[checkpointed], flops, link, tokens)
        around = (round(least * share) for share in (0.5, 0.99, 1.01, 2))
        for width in filter(None, [16, *around]):
            block = gpt_block(width, tokens, flops, 2, checkpointed)
            run = lanes([block] * count, link)
            assert (run.waited == 0) == (width >= least)
            assert run.peak <= 2 * block.kept + block.again
            answers.add(run.waited == 0)
    assert answers == {True, False}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("tokens", [16, 2048])
def test_a_tape_is_better_moved_than_made_again_from_half_of_a_on(
    machine, tokens
):
    flops, link = sustained(machine)
    even = least_width(TAPE / 2, flops, link, tokens)
    for share, moved_is_quicker in ((0.9, False), (1.1, True)):
        row = [
            gpt_block(round(share * even), tokens, flops, 1, checkpointed)
            for checkpointed in (False, True)
        ]
        moved, again = (lanes([block] * 200, link) for block in row)
        assert (moved.time < again.time) == moved_is_quicker


@pytest.mark.parametrize("count", [3, 5, 8])
def test_what_sticks_out_a_little_waits_once_for_each_block(count):
    """All but two: (L − 2)·(copy − forward), while a copy takes at most half
    as long again as the pass.
    """
    for copy in (10, 11, 13, 15):
        run = lanes([Block(10, copy)] * count, 1)
        assert run.waited == (count - 2) * (copy - 10)
    assert lanes([Block(10, 16)] * count, 1).waited > (count - 2) * 6


def test_time_is_work_and_waiting():
    for kept, again in product((0, 10, 35, 90), (0, 5)):
        run = lanes([Block(10, kept, again)] * 6, 1)
        assert run.time == 6 * (40 if again else 30) + run.waited
