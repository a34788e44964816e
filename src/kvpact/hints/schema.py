"""Schema of clients' hints: version 1, the only place that knows their names, values and limits.

Owns the outcome of each hint. Trusts nothing: it reads a bounded number of values, follows none into its depth, and
whatever is wrong is an outcome and no error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, Protocol, runtime_checkable

from kvpact.contract import EngineRequest
from kvpact.errors import printable
from kvpact.units import parse_duration

KEY: Final = "kvpact"
"""The one key of a request's `kv_transfer_params` that has its hints, and of an answer's that has their outcomes."""

VERSION: Final = 1

OUTCOMES: Final = "outcomes"
"""Key of outcomes in an answer; a request that has it sends back an answer, and no hints."""

MOST_NAMES: Final = 16
"""Most names in one request's hints; with more none is read."""

MOST_CHARS: Final = 64
"""Most characters of a name in an outcome."""


MOST_SECONDS: Final = 3600.0
"""Longest retention, and the latest time of an expected turn, in seconds."""

MOST_NAME_BYTES: Final = 256
"""Most bytes of a session's name, in UTF-8."""


class HintResult(StrEnum):
    """Result of one hint; all but the first two reject it."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    UNKNOWN_NAME = "unknown_name"
    WRONG_VALUE = "wrong_value"
    WRONG_VERSION = "wrong_version"
    NOT_SUPPORTED = "not_supported"


class Brought(StrEnum):
    """Use of a block that was brought to memory before an expected turn."""

    USED = "used"
    UNUSED = "unused"


class Outcome(NamedTuple):
    """Result of one hint, and the reason in words unless it was accepted."""

    result: HintResult
    reason: str = ""

    @property
    def is_taken(self) -> bool:
        """True if the hint is acted on, all of it or less."""
        return self.result in (HintResult.ACCEPTED, HintResult.CLIPPED)

    def __str__(self) -> str:
        text = self.result.value if self.is_taken else "rejected"
        return f"{text}: {self.reason}" if self.reason else text


class Store(StrEnum):
    """Part of a request's blocks that is stored."""

    ALL = "all"
    PROMPT = "prompt"
    NONE = "none"


@dataclass(eq=False, slots=True)
class Hints:
    """Hints of one request as far as they were accepted, and the outcome of each by its name."""

    store: Store = Store.ALL
    retain_seconds: float = 0.0
    """Seconds from the request's end; 0: no retention."""
    session: str = ""
    """Name of the conversation to which the request belongs, among those of its salt; "": none."""
    expect_seconds: float = 0.0
    """Seconds from the request's end until the next turn of its session; 0: unknown."""
    release: bool = False
    """True if the session ends with the request."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def clip(self, name: str, reason: str) -> None:
        """Note that less of an accepted hint is done, with any earlier reason."""
        before = self.outcomes[name].reason
        self.outcomes[name] = Outcome(HintResult.CLIPPED, f"{before}; {reason}" if before else reason)

    def refuse(self, name: str, reason: str, result: HintResult = HintResult.NOT_SUPPORTED) -> None:
        """Reject a hint, also an accepted one."""
        setattr(self, *_NOTHING[name])
        if name in self.outcomes and self.outcomes[name].is_taken:
            self.outcomes[name] = Outcome(result, reason)

    def refuse_all(self, reason: str, but: str = "") -> None:
        """Reject also accepted hints, `but` one of this name: this cache cannot act on them."""
        for name in _NOTHING:
            if name != but:
                self.refuse(name, reason)

    def described(self) -> dict[str, str]:
        """Outcomes by name, for people and clients."""
        return {name: str(outcome) for name, outcome in self.outcomes.items()}

    def answer(self) -> dict[str, object]:
        """Answer to the client, for the response's `kv_transfer_params`."""
        return {KEY: {"version": VERSION, OUTCOMES: self.described()}}


@runtime_checkable
class SupportsHints(Protocol):
    """A cache that acts on clients' hints."""

    def note_hints(self, request: EngineRequest, hints: Hints) -> None:
        """Act on a new request's hints from now on; the cache may change outcomes until the request has ended."""


def parse_hints(params: object, session: str = "") -> Hints | None:
    """Hints in a request's `kv_transfer_params`, of whatever form; None if it brings none.

    `session` is the name that the engine has for the request's session, which a hint may replace; "" without one.
    """
    given = params.get(KEY) if isinstance(params, dict) else None
    hints = Hints(session=session)
    if given is None or (isinstance(given, dict) and OUTCOMES in given):
        return hints if session else None
    if not isinstance(given, dict):
        right = f'an object is needed, such as {{"version": {VERSION}, "store": "none"}}'
        hints.outcomes[KEY] = Outcome(HintResult.WRONG_VALUE, right)
    elif len(given) > MOST_NAMES:
        hints.outcomes[KEY] = Outcome(HintResult.WRONG_VALUE, f"at most {MOST_NAMES} names are read")
    elif not _is_version(given.get("version", VERSION)):
        hints.outcomes["version"] = Outcome(HintResult.WRONG_VERSION, f"this release knows version {VERSION} alone")
    else:
        for name, value in given.items():
            if name != "version":
                read = _READERS.get(name) if isinstance(name, str) else None
                hints.outcomes[_shown(name)] = read(hints, value) if read is not None else _UNKNOWN
        _refuse_what_contradicts(hints)
    return hints


def _refuse_what_contradicts(hints: Hints) -> None:
    """Reject hints that need another one, or exclude each other."""
    if not hints.session:
        for name in ("release", "expect_in"):
            hints.refuse(name, "the request names no session", HintResult.WRONG_VALUE)
    if hints.release:
        for name in ("retain", "expect_in"):
            hints.refuse(name, "the session ends with this request", HintResult.WRONG_VALUE)


def _is_version(value: object) -> bool:
    return type(value) is int and value == VERSION


def _shown(name: object) -> str:
    """A client's name for a hint, bounded and printable."""
    return printable(name[:MOST_CHARS]) if isinstance(name, str) else "(no text)"


def _read_store(hints: Hints, value: object) -> Outcome:
    if value not in ("none", "prompt"):
        return Outcome(HintResult.WRONG_VALUE, '"none" or "prompt" is needed')
    hints.store = Store(str(value))
    return Outcome(HintResult.ACCEPTED)


def _seconds(value: object) -> float:
    """Seconds of a client's time; 0 for whatever is no time."""
    try:
        return parse_duration(value if not isinstance(value, str) else value[: MOST_CHARS + 1])
    except (ValueError, OverflowError):
        return 0.0


def _read_retain(hints: Hints, value: object) -> Outcome:
    seconds = _seconds(value)
    if not seconds:
        return Outcome(HintResult.WRONG_VALUE, 'a time such as "5m" or a number of seconds is needed')
    hints.retain_seconds = min(seconds, MOST_SECONDS)
    return Outcome(HintResult.CLIPPED, "to 1 h") if seconds > MOST_SECONDS else Outcome(HintResult.ACCEPTED)


def _read_expect(hints: Hints, value: object) -> Outcome:
    seconds = _seconds(value)
    if not 0 < seconds <= MOST_SECONDS:
        return Outcome(HintResult.WRONG_VALUE, 'a time such as "30s", up to "1h", or a number of seconds is needed')
    hints.expect_seconds = seconds
    return Outcome(HintResult.ACCEPTED)


def is_session_name(name: object) -> bool:
    """True for a text of 1 to `MOST_NAME_BYTES` bytes."""
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME_BYTES:
        return False
    return len(name.encode("utf-8", "surrogatepass")) <= MOST_NAME_BYTES


def _read_session(hints: Hints, value: object) -> Outcome:
    if not isinstance(value, str) or not is_session_name(value):
        return Outcome(HintResult.WRONG_VALUE, f"a name of 1 to {MOST_NAME_BYTES} bytes is needed")
    hints.session = value
    return Outcome(HintResult.ACCEPTED)


def _read_release(hints: Hints, value: object) -> Outcome:
    if value is not True:
        return Outcome(HintResult.WRONG_VALUE, "true is needed")
    hints.release = True
    return Outcome(HintResult.ACCEPTED)


_READERS: Final[dict[str, Callable[[Hints, object], Outcome]]] = {
    "store": _read_store,
    "retain": _read_retain,
    "session": _read_session,
    "expect_in": _read_expect,
    "release": _read_release,
}
_NOTHING: Final[dict[str, tuple[str, object]]] = {
    "store": ("store", Store.ALL),
    "retain": ("retain_seconds", 0.0),
    "session": ("session", ""),
    "expect_in": ("expect_seconds", 0.0),
    "release": ("release", False),
}
"""Field of each hint, and its value where the hint does not act."""
_UNKNOWN: Final = Outcome(HintResult.UNKNOWN_NAME, f"this release knows {', '.join(_READERS)}")
