"""Bytes for people: everything else counts in plain bytes."""

import re
from decimal import ROUND_HALF_UP, Decimal

from membudget.checks import number

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MOST = 10**30


def format_bytes(count: float) -> str:
    """Bytes in binary units, three digits: ``2.96 MiB``; as ``base.mjs``.

    Differences may be negative: ``-1.50 KiB``. Of more than 10³⁰ bytes there
    is nothing to write down.
    """
    count = number(count, "the count of bytes", -MOST, MOST)
    power = 0
    while abs(count) >= 1024 ** (power + 1) and power + 1 < len(UNITS):
        power += 1
    value = Decimal(count) / 1024**power
    large = abs(value)
    digits = 0 if power == 0 or large >= 100 else 1 if large >= 10 else 2
    return f"{round_half_up(value, digits)} {UNITS[power]}"


def parse_bytes(text: str) -> int:
    """Bytes that a person wrote in binary units: ``1.5 GiB``, ``512MiB``.

    Raises:
        ValueError: it is no size of at least one byte, or of no unit.
    """
    found = re.fullmatch(r"(\d+\.?\d*) ?([KMGT]iB|B)", text.strip())
    count = 0
    if found:
        count = int(Decimal(found[1]) * 1024 ** UNITS.index(found[2]))
    if not 1 <= count <= MOST:
        raise ValueError(
            f"{text!r} is no size in bytes: write a number and one of "
            f"{', '.join(UNITS)}, such as 2GiB"
        )
    return count


def round_half_up(value: Decimal, digits: int) -> Decimal:
    """Round to ``digits`` decimals, a half away from zero."""
    return value.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
