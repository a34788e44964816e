"""The exceptions that kvpact raises.

Every message names the mistake, the value seen and a right one, on one line of printable text: it may quote a store or
a file's name.
"""

from __future__ import annotations

import errno
from typing import Final

PASSING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.ETOOMANYREFS})
"""Errors of calls for which a process, its user or the machine had no descriptor or memory left."""


def printable(text: str) -> str:
    r"""Text with every character that a terminal would obey, or not show, as an escape such as `\x1b`.

    Those are the ones that Unicode does not count as printable: control characters with ESC, newline and tab, marks
    that turn the direction of writing, zero-width ones, halves of surrogate pairs (bytes of a file name not in UTF-8).
    """
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


NAME_CHARS: Final = 200
"""Most characters of a client's text, such as a request's id, kept after the request has ended (H118)."""


def kept_id(request_id: str) -> str:
    """A request's id as kept after the request has ended: of a long one the beginning and a hash."""
    if len(request_id) <= NAME_CHARS:
        return request_id
    return f"{request_id[: NAME_CHARS - 20]}#{hash(request_id):x}"


def is_passing(error: BaseException | None) -> bool:
    """True if the same call may succeed later: for want of a descriptor or memory, or of its cause."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in PASSING):
            return True
        error = error.__cause__ or error.__context__
    return False


class KvpactError(Exception):
    """Base of every error that kvpact raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(KvpactError, ValueError):
    """Wrong configuration by the user; the engine refuses to start with it."""


class TierError(KvpactError):
    """Unusable tier (missing directory, full disk, foreign data); the engine serves on without it."""


class DataError(KvpactError, ValueError):
    """Invalid bytes from a file, a store or a peer: they count as missing. All decoders raise this."""


class NoSuchTier(TierError):
    """No tier at this URL until the URL or this machine's packages are corrected: it is not tried again."""


class WeightsVersionRefused(KvpactError, ValueError):
    """Refused version of the weights; the engine keeps its current epoch."""


class PactViolation(KvpactError, AssertionError):
    """Breach of the contract by one side, or a broken invariant: a defect, never a user's mistake."""


def reason_of(error: BaseException) -> str:
    """Reason of a failure in words; with the error's type, unless it is kvpact's own or the operating system's."""
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror)
    return str(error) if isinstance(error, KvpactError) else printable(f"{type(error).__name__}: {error}")
