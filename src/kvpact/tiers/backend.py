"""Describes one kind of tier: its URLs, their options, its label in metrics, and the function that opens it.

Each kind is one folder, whose `__init__` defines its `BACKEND` and imports nothing else of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvpact.units import parse_duration, parse_size

Option: TypeAlias = Callable[[str], object]
"""Parses an option's value. Raises ValueError."""


def whole_number(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number of 1 or more is needed")
    return int(text)


def some_text(text: str) -> str:
    """Any text but the empty one."""
    if not text:
        raise ValueError("a value is needed")
    return text


def yes_or_no(text: str) -> bool:
    """ "true" or "false"."""
    if text not in ("true", "false"):
        raise ValueError('"true" or "false" is needed')
    return text == "true"


STORE_OPTIONS: Final[Mapping[str, Option]] = {"timeout": parse_duration}
"""The options of every store that is reached over a network."""

DIRECTORY_OPTIONS: Final[Mapping[str, Option]] = {"capacity": parse_size, "group": some_text}
"""The options of every tier in a bounded directory."""


@dataclass(frozen=True, slots=True)
class UrlRules:
    """What the URLs of one kind of tier look like."""

    example: str
    options: Mapping[str, Option]
    """Option name -> the function that parses its value and raises ValueError."""
    directory: bool = False
    """Whether they name a local directory: no host, an absolute path other than "/", a capacity."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of tier. `opener` is "module:function", imported when one of its URLs is opened.

    The function is an `OpenStore` of `kvpact.tiers.registry`, or an `OpenTier` for a tier of one engine alone.
    """

    label: str
    """The label of its metrics, and the `name` of its tiers."""
    opener: str
    schemes: Mapping[str, UrlRules]
    shared: bool = True
    """Whether it is a store of records that several engines share."""
