"""Sessions of clients: conversations whose requests come one after the other, told apart by salt and name.

Owns a number for each session that is known, and nothing else of it: neither its salt nor its name.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

MOST_SESSIONS: Final = 1 << 16
"""Most sessions that are known; beyond that the one whose last request came first is forgotten."""

MOST_BYTES: Final = 16 << 20
"""Bytes that so many sessions take at most."""

DIGEST_BYTES: Final = 16


class Sessions:
    """Known sessions of one engine, by a digest that nobody can compute who has not read this process's memory."""

    __slots__ = ("_numbers", "_secret", "last")

    def __init__(self) -> None:
        self._secret = os.urandom(DIGEST_BYTES)
        self._numbers = OrderedDict[bytes, int]()
        """Numbers by digest, the session of the oldest request first."""
        self.last = 0
        """Number of the newest session; none is used again. For reading only."""

    def __len__(self) -> int:
        return len(self._numbers)

    def enter(self, salt: str, name: str) -> int:
        """Number of the session to which a new request belongs, a new one if it is not known."""
        digest = self._digest(salt, name)
        number = self._numbers.pop(digest, 0)
        if not number:
            self.last += 1
            number = self.last
        self._numbers[digest] = number
        if len(self._numbers) > MOST_SESSIONS:
            self._numbers.popitem(last=False)
        return number

    def leave(self, salt: str, name: str) -> None:
        """Forget a session that has ended."""
        self._numbers.pop(self._digest(salt, name), None)

    def _digest(self, salt: str, name: str) -> bytes:
        digest = blake2b(key=self._secret, digest_size=DIGEST_BYTES)
        for part in (salt, name):
            text = part.encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        return digest.digest()
