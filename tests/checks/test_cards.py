"""The table of cards."""

import re
from itertools import pairwise

from membudget.cards import CARDS, KEPT


def test_cards_ascend_and_leave_room_for_cuda():
    usable = [card.usable for card in CARDS.values()]
    capacities = [card.capacity for card in CARDS.values()]
    assert all(a <= b + 2**28 for a, b in pairwise(capacities))
    assert [c - KEPT for c in capacities] == usable
    assert min(usable) > 0


def test_a_driver_reports_about_what_a_card_is_sold_as():
    """Between the name's GB and as many GiB."""
    for name, card in CARDS.items():
        if sold := re.search(r"(\d+) GB", name):
            size = int(sold[1])
            assert 0.98 * size * 2**30 < card.capacity < size * 2**30


def test_each_card_says_where_its_figure_is_from():
    for card in CARDS.values():
        assert re.fullmatch(r"https://github\.com/\S+/issues/\d+", card.source)
        assert re.fullmatch(r"20\d\d-[01]\d", card.date)
        assert re.search(r", 20\d\d\b", card.sheet)


def test_a_card_reaches_the_host_over_pcie():
    """No other card is further away: where there is no NVLink, that is it."""
    for card in CARDS.values():
        assert card.host_link in (16e9, 32e9, 64e9)
        assert card.link == card.host_link or card.link >= 300e9
    generations = {"T4": 16e9, "RTX 5090": 64e9, "H100 80 GB": 64e9}
    for name, card in CARDS.items():
        assert card.host_link == generations.get(name, 32e9)
