"""Epoch of the weights that stored blocks belong to, beyond the files that the engine was started from.

Owns the beginning of epochs, their sharing among engines, and the acceptance of weights versions. Reads no clock, does
no I/O.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from kvpact.errors import WeightsVersionRefused

EPOCH_BYTES: Final = 16

_NAMED: Final = b"\1"
_DRAWN: Final = b"\2"


@dataclass(frozen=True, slots=True)
class Epoch:
    """Weights between two resets, as 16 bytes: zeros until the first reset, unless a weights version is set.

    It is part of the root of every block key and of every record, beside the identity of the weights' files.
    """

    value: bytes = bytes(EPOCH_BYTES)

    @classmethod
    def of_word(cls, word: str) -> Epoch:
        """Epoch of the weights version `word`; equal in every process."""
        digest = blake3(word.encode(errors="surrogatepass"), derive_key_context="kvpact 2026-11 weights version")
        return cls(_NAMED + digest.digest(EPOCH_BYTES - 1))

    @classmethod
    def draw(cls) -> Epoch:
        """Random epoch that no other engine has: after a reset the weights are unknown."""
        return cls(_DRAWN + os.urandom(EPOCH_BYTES - 1))

    @property
    def is_drawn(self) -> bool:
        """True if the epoch is random: no other engine can have it, nor can this one after a restart."""
        return self.value.startswith(_DRAWN)


FIRST_EPOCH: Final = Epoch()


class Epochs:
    """Sequence of epochs of one engine. `generation` distinguishes even equal ones within the engine."""

    def __init__(self, word: str | None = None) -> None:
        """`word` is the configured version of the engine's first weights."""
        self.current = Epoch.of_word(word) if word else FIRST_EPOCH
        self.generation = 1
        self._word = word
        self._refused: str | None = None
        """Version before the last reset: it cannot name the weights that came with that reset."""
        self._awaits_word = False
        self._before: tuple[Epoch, str | None, str | None, bool] | None = None

    def reset(self) -> None:
        """Begin a new epoch, because the weights may be others from now on."""
        self._before = (self.current, self._word, self._refused, self._awaits_word)
        self._refused = self._word or self._refused
        self._word = None
        self._awaits_word = True
        self.current = Epoch.draw()
        self.generation += 1

    def name(self, word: str) -> None:
        """Set the version of the weights that came with the last reset.

        Raises WeightsVersionRefused if there was no reset since the last version, or if `word` was the version before
        that reset.
        """
        if not word:
            raise WeightsVersionRefused("weights_version is empty; give a text that changes whenever the weights do")
        if not self._awaits_word:
            raise WeightsVersionRefused(
                f"weights_version {word!r} comes without a reset, and counts only after the reset for the new weights: "
                "reset first (pause with clear_cache=True), load the weights, then set the version"
            )
        if word == self._refused:
            raise WeightsVersionRefused(
                f"weights_version {word!r} was in force before the last reset, so it cannot name the new weights; "
                "set another one"
            )
        self._word = word
        self._awaits_word = False
        self._before = None
        self.current = Epoch.of_word(word)
        self.generation += 1

    def take_back_reset(self) -> bool:
        """Undo the last reset, because the weights did not change; returns whether it could be undone.

        Only the last reset can be, and only until a version is set.
        """
        if self._before is None:
            return False
        self.current, self._word, self._refused, self._awaits_word = self._before
        self._before = None
        self.generation += 1
        return True
