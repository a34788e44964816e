"""The exceptions that kvpact raises.

Every message says what was wrong, the value seen, and what would be right, on one line of printable text: it may repeat
what a store or a name of a file said.
"""

from __future__ import annotations

from typing import Final


def printable(text: str) -> str:
    r"""The text with everything that a terminal would obey, or not show, written as an escape such as `\x1b`.

    That is what Unicode does not count as printable: control characters with ESC, newline and tab, marks that turn the
    direction of writing, what has no width, halves of surrogate pairs (bytes of a file name that are no UTF-8).
    """
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


NAME_CHARS: Final = 200
"""Characters at most of a text that a client has chosen, such as a request's id, that outlive the request (H118)."""


def kept_id(request_id: str) -> str:
    """A request's id as it is kept when the request has ended: a long one is its beginning and a hash."""
    if len(request_id) <= NAME_CHARS:
        return request_id
    return f"{request_id[: NAME_CHARS - 20]}#{hash(request_id):x}"


class KvpactError(Exception):
    """Base of every error that kvpact raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(KvpactError, ValueError):
    """The user's configuration is wrong; the engine refuses to start with it."""


class TierError(KvpactError):
    """A tier cannot be used (missing directory, full disk, foreign data); the engine serves on without it."""


class DataError(KvpactError, ValueError):
    """What a file, a store or a peer sent is not what it should be: it counts as not there. All decoders raise this."""


class NoSuchTier(TierError):
    """There is no tier at this URL before the URL or this machine's packages are corrected: it is not tried again."""


class WeightsVersionRefused(KvpactError, ValueError):
    """A word for the weights that is refused; the engine keeps its current epoch."""


class PactViolation(KvpactError, AssertionError):
    """A side broke the contract or a structure lost an invariant: a defect, never a user's mistake."""


def reason_of(error: BaseException) -> str:
    """Why something failed, for people; the type of an error that nobody meant for them stands before its text."""
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror)
    return str(error) if isinstance(error, KvpactError) else printable(f"{type(error).__name__}: {error}")
