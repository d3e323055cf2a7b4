"""Bytes as people read them."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from membudget.measuring.units import (
    UNITS,
    format_bytes,
    parse_bytes,
    round_half_up,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1029, "1.00 KiB"),
        (1030, "1.01 KiB"),
        (1152, "1.13 KiB"),  # 1.125: a half goes up
        (100 * 1024 - 52, "99.9 KiB"),
        (100 * 1024, "100 KiB"),
        (2**20 - 1, "1024 KiB"),
        (2**40, "1.00 TiB"),
        (3 * 2**50, "3072 TiB"),
        (-1152, "-1.13 KiB"),
        (-(2**34), "-16.0 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@given(st.integers(-(2**60), 2**60))
def test_the_text_says_the_number_to_three_digits(count):
    number, unit = format_bytes(count).split(" ")
    power = UNITS.index(unit)
    size = 1024**power
    last = Decimal(1).scaleb(Decimal(number).as_tuple().exponent)
    assert abs(Decimal(number) * size - count) <= last * size / 2
    assert abs(count) >= size or power == 0
    assert abs(count) < 1024 * size or unit == "TiB"
    if abs(count) < 1000 * size:
        digits = number.lstrip("-").replace(".", "")
        assert len(digits) == 3 or power == 0 or digits == "1000"


@pytest.mark.parametrize(
    ("value", "digits", "rounded"),
    [
        ("0.5", 0, "1"),
        ("2.5", 0, "3"),
        ("2.675", 2, "2.68"),
        ("2.6749", 2, "2.67"),
        ("-2.5", 0, "-3"),
    ],
)
def test_a_half_goes_away_from_zero(value, digits, rounded):
    assert str(round_half_up(Decimal(value), digits)) == rounded


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2**31), (" 1.5 KiB ", 1536), ("7B", 7), ("0.5 TiB", 2**39)],
)
def test_bytes_that_a_person_wrote(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "2", "2GB", "-2GiB", "0B", "0.1B", "1e3B", "nanB", "²GiB"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="such as 2GiB"):
        parse_bytes(text)
