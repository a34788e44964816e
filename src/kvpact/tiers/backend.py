"""What a kind of tier says of itself: its URLs, its options, its label in metrics, and what opens it.

Each kind is one folder, whose `__init__` has its `BACKEND`; nothing of the kind itself is imported there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvpact.units import parse_duration, parse_size

Option: TypeAlias = Callable[[str], object]
"""Reads an option's value, raising ValueError."""


def whole_number(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of 1 or more is needed")
    return int(text)


def some_text(text: str) -> str:
    """Anything but nothing."""
    if not text:
        raise ValueError("a value is needed")
    return text


def yes_or_no(text: str) -> bool:
    """ "true" or "false"."""
    if text not in ("true", "false"):
        raise ValueError('"true" or "false" is needed')
    return text == "true"


STORE_OPTIONS: Final[Mapping[str, Option]] = {"timeout": parse_duration}
"""Of every store that is reached over a network."""

DIRECTORY_OPTIONS: Final[Mapping[str, Option]] = {"capacity": parse_size, "group": some_text}
"""Of every tier in a directory that is bounded."""


@dataclass(frozen=True, slots=True)
class UrlRules:
    """What the URLs of one kind of tier look like."""

    example: str
    options: Mapping[str, Option]
    """Each option's name and what reads its value, raising ValueError."""
    directory: bool = False
    """It names a local directory: no host, an absolute path that is not "/", a capacity."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of tier. `opener` is "module:function", imported when one of its URLs is opened.

    The function is an `OpenStore` of `kvpact.tiers.registry`, or an `OpenTier` for a tier of one engine alone.
    """

    label: str
    """Of its series in the metrics, and the `name` of its tiers."""
    opener: str
    schemes: Mapping[str, UrlRules]
    shared: bool = True
    """Whether it is a store of records that several engines share."""
