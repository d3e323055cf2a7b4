"""Bytes as people read them."""

from decimal import ROUND_HALF_UP, Decimal


def format_bytes(count: int) -> str:
    """Bytes in binary units, three digits: ``2.96 MiB``; as ``base.mjs``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    power = 0
    while count >= 1024 ** (power + 1) and power + 1 < len(units):
        power += 1
    value = Decimal(count) / 1024**power
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{round_half_up(value, digits)} {units[power]}"


def round_half_up(value: Decimal, digits: int) -> Decimal:
    """Round a half up, as JavaScript's ``toFixed`` does."""
    return value.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
