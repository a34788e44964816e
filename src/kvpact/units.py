"""Sizes and durations as text: "4GiB", "500MB", "50ms"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

POWERS: Final = tuple(enumerate("KMGTP", start=1))
"""Powers of 1024 or 1000, and the first letters of their units."""

_BYTES_PER_UNIT: Final = {"b": Fraction(1)} | {
    f"{letter.lower()}{suffix}": Fraction(base**power)
    for power, letter in POWERS
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SECONDS_PER_UNIT: Final = {
    "us": Fraction(1, 1_000_000),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes of a size: an int, or text such as "4GiB" (1024-based), "500MB" (1000-based), "4096".

    Raises:
        ValueError: not a size; "4G" is refused because tools disagree on what it means.
    """
    right = 'a size such as "4GiB", "500MB" or a number of bytes is needed'
    if isinstance(value, float) and not value.is_integer():  # JSON and TOML may write 4e9
        raise ValueError(right)
    return int(_parse(value, _BYTES_PER_UNIT, "b", right))


def parse_age(value: str) -> float:
    """Seconds of a time with its unit, where a wrong one could cost data: "7" is refused.

    Raises:
        ValueError: no unit, or as `parse_duration`.
    """
    if value.strip().replace(".", "", 1).isdecimal():
        raise ValueError(f'say in which unit: "{value}d" for days, "{value}h" for hours, "{value}s" for seconds')
    return float(_parse(value, _SECONDS_PER_UNIT, "", 'a time with its unit is needed, such as "7d", "12h" or "30m"'))


def parse_duration(value: object) -> float:
    """Seconds of a time: a number, or text such as "2s", "50ms", "1m", "0.5h", "7d".

    Raises:
        ValueError: not a finite time of 0 or more.
    """
    right = 'a time such as "2s", "50ms", "1m" or a number of seconds is needed'
    return float(_parse(value, _SECONDS_PER_UNIT, "s", right))


def _parse(value: object, units: Mapping[str, Fraction], base: str, right: str) -> Fraction:
    """The quantity in `base` units; ValueError, which says what is `right`, for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return Fraction(value)
    match = _QUANTITY.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = (match[2].lower() or base) if match else ""
    if match and f"{unit}b" in units:
        size = f"{match[1]}{unit[0].upper()}"
        raise ValueError(f'write "{size}iB" (1024-based) or "{size}B" (1000-based)')
    if match is None or unit not in units:
        raise ValueError(right)
    return Fraction(match[1]) * units[unit]


def format_size(num_bytes: int) -> str:
    """A size for a person to read, about three digits: 1536 is "1.5KiB"."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 5)
    return f"{num_bytes / 1024**power:.4g}{('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def format_age(seconds: float) -> str:
    """A time for a person to read, in its largest unit: 5400 is "1.5 h"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
