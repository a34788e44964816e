"""The interface between the kit and a tier's author: where a tier is opened, and what the author shows of it.

Owns the methods that an author may override. Runs nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import HEADER_BYTES, UNSEALED, RecordMac, Tier
from kvpact_testkit.faults import Crash, Faults


class Damage(StrEnum):
    """Ways in which a bad disk, a torn write or another program damages a stored block."""

    FLIPPED = "one bit of its payload is flipped"
    GARBAGE = "its payload is other bytes, as many"
    TORN = "the second half of its payload is zeros"
    SHORT = "its record is cut off"
    HEADER = "one bit of what describes it is flipped"
    MISPLACED = "the record of another block lies in its place"
    GONE = "it is gone"

    def of(self, record: bytes, other: bytes) -> bytes:
        """The damaged form of a whole record of a shared store, header first; `other` is another block's record.

        GONE leaves no record: for it `record` is returned unchanged.
        """
        header, payload = record[:HEADER_BYTES], record[HEADER_BYTES:]
        half = len(payload) // 2
        return {
            Damage.FLIPPED: header + payload[:100] + bytes([payload[100] ^ 1]) + payload[101:],
            Damage.GARBAGE: header + b"?" * len(payload),
            Damage.TORN: header + payload[:half] + bytes(len(payload) - half),
            Damage.SHORT: record[:-1],
            Damage.HEADER: header[:120] + bytes([header[120] ^ 1]) + header[121:] + payload,
            Damage.MISPLACED: other,
            Damage.GONE: record,
        }[self]


@dataclass(frozen=True, slots=True)
class StoreContext:
    """Where to open a tier, and how large. Two tiers opened at one place share one store; others see nothing of it.

    `directory` exists, and is empty before the first opening. `slot_bytes` is a block's size over all ranks. The tier
    must have room for `capacity_blocks` blocks and no more, if it has a bound of its own.
    """

    directory: Path
    namespace: Namespace
    slot_bytes: int
    capacity_blocks: int
    seal: RecordMac = UNSEALED
    """How the tier's records are sealed, as the suite declares; for tiers that can seal."""

    @property
    def name(self) -> str:
        """32 characters unique to this place, for stores without directories: a key prefix or a bucket's name."""
        return sha256(str(self.directory).encode()).hexdigest()[:32]


class TierOptions:
    """What a suite declares of its tier."""

    slot_bytes = 8192
    ranks = 2
    reopens = False
    bounded = True
    several_writers = False
    one_size = False
    """Every block has `slot_bytes`: the tier keeps no other sizes."""
    deletes = True
    """The tier can be told to drop single blocks."""
    clears = True
    """The tier can be told to drop all of its namespace."""
    seal: ClassVar[RecordMac] = UNSEALED

    gives_up_after = 0.5
    """Real seconds after which the tier gives up a hanging call of its store, if it does."""

    def open_tier(self, place: StoreContext) -> Tier:
        """Your tier, opened at `place`: again what is there, if it was opened there before. May raise TierError."""
        raise NotImplementedError(f"{type(self).__name__} must say in `open_tier` how the tier is opened")

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        """Optional: change what the store holds of block `key`, past the tier, which may be open; False if you cannot.

        The tier need not notice, but must never serve the damaged bytes.
        """
        return False

    def store_calls(self, faults: Faults) -> AbstractContextManager[None]:
        """Optional: within, each of the tier's reads of its store is announced with `faults.before_read()`, each write
        with `faults.before_write()`, before it is made.

        Those wait, or raise OSError or `Crash`; translate OSError to what your store's client raises. Announce, do not
        replace: what does not raise is to be done. Entered before `open_tier`, and left after the tiers are closed.
        """
        return nullcontext()

    def bury(self, tier: Tier) -> None:
        """Optional: end `tier` as the death of its process would: locks and descriptors go, nothing is flushed.

        By default it is closed, and each of its writes raises `Crash`.
        """
        with suppress(Crash):
            tier.close()

    @property
    def shows_store_calls(self) -> bool:
        return type(self).store_calls is not TierOptions.store_calls
