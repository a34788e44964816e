"""Describes one kind of tier: its URLs, their options, its label in metrics, and the function that opens it.

Each kind is one folder, whose `__init__` defines its `BACKEND` and imports nothing else of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias
from urllib.parse import unquote, urlsplit

from kvpact.own_files import group_number
from kvpact.units import format_size, parse_duration, parse_size

Option: TypeAlias = Callable[[str], object]
"""Parses an option's value. Raises ValueError."""


def whole_number(text: str) -> int:
    """A number of 1 or more."""
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise ValueError("a whole number of 1 or more is needed, such as 4")
    return int(text)


def some_time(text: str) -> float:
    """Seconds, more than 0."""
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError('a time must be more than 0, such as "2s"; leave the option out for its default')
    return seconds


def some_size(text: str) -> int:
    """Bytes, more than 0."""
    num_bytes = parse_size(text)
    if not num_bytes:
        raise ValueError('a size must be more than 0, such as "4MiB"; leave the option out for its default')
    return num_bytes


def size_between(least: int, most: int) -> Option:
    """An option that is a size of `least` to `most` bytes."""

    def judged(text: str) -> int:
        with suppress(ValueError):
            if least <= parse_size(text) <= most:
                return parse_size(text)
        raise ValueError(
            f'a size from {format_size(least)} to {format_size(most)} is needed, such as "{format_size(most)}"'
        )

    return judged


def some_port(text: str) -> int:
    """The number of a port."""
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 1 << 16:
        raise ValueError("a port from 1 to 65535 is needed, such as 9003")
    return int(text)


def address_in(text: str, port: int) -> tuple[str, int]:
    """The host and port of "host:port", by default `port`. Raises ValueError if that is no address."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname or parts.port == 0:
        raise ValueError("no host, or no port")
    return unquote(parts.hostname), parts.port or port


def some_file(text: str) -> str:
    """The path of a file; nobody fills in "~" there."""
    if not text or text.startswith("~"):
        raise ValueError('the whole path of a file is needed, such as "/run/secrets/tier"')
    return text


def some_text(text: str) -> str:
    """Any text but the empty one."""
    if not text:
        raise ValueError("a value is needed; leave the option out for its default")
    return text


def yes_or_no(text: str) -> bool:
    """ "true" or "false"."""
    if text not in ("true", "false"):
        raise ValueError('"true" or "false" is needed')
    return text == "true"


STORE_OPTIONS: Final[Mapping[str, Option]] = {"timeout": some_time}
"""The options of every store that is reached over a network."""

DIRECTORY_OPTIONS: Final[Mapping[str, Option]] = {"capacity": parse_size, "group": group_number}
"""The options of every tier in a bounded directory."""


def _any(options: Mapping[str, str]) -> None:
    """Rule that accepts any value."""


@dataclass(frozen=True, slots=True)
class UrlRules:
    """Form of the URLs of one kind of tier."""

    example: str
    options: Mapping[str, Option]
    """Option name -> the function that parses its value and raises ValueError."""
    directory: bool = False
    """True if they name a local directory: no host, an absolute path other than "/", a capacity."""
    port: int = 0
    """Port of a server for which a URL names none; 0: its URLs name no servers."""
    one: str = ""
    """Reason why a URL cannot name several servers; empty if it can."""
    path: tuple[str, str] = (".*", "")
    """A regular expression for the path, and what is needed where it does not fit."""
    default_path: str = ""
    """Another way to write an empty path."""
    together: Callable[[Mapping[str, str]], None] = _any
    """Judges options, each right alone, that must fit together. Raises ValueError."""


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
    """True for a store of records that several engines share."""
