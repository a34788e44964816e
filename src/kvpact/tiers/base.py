"""The `Tier` interface, implemented by every place that outlives memory, and protocols for abilities of some.

A tier speaks of keys: each block stands for itself, and who needs a prefix counts it (`leading`). The frame of a stored
block is `kvpact.tiers.record`'s; its names are public here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from operator import add
from typing import Protocol, TypeAlias, runtime_checkable

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Announcing
from kvpact.tiers.record import HEADER_BYTES as HEADER_BYTES
from kvpact.tiers.record import NO_SLOT as NO_SLOT
from kvpact.tiers.record import RECORD_FORMAT as RECORD_FORMAT
from kvpact.tiers.record import RECORD_MAGIC as RECORD_MAGIC
from kvpact.tiers.record import UNSEALED as UNSEALED
from kvpact.tiers.record import BlockBuffer as BlockBuffer
from kvpact.tiers.record import RecordError as RecordError
from kvpact.tiers.record import RecordHeader as RecordHeader
from kvpact.tiers.record import RecordMac as RecordMac
from kvpact.tiers.record import is_empty_header as is_empty_header
from kvpact.tiers.record import payload_digest as payload_digest
from kvpact.tiers.record import written_in_older_format as written_in_older_format

Progress: TypeAlias = Callable[[int], bool]
"""Called with the number of blocks that have arrived in a row from the first; returns False to end the read early."""

ROOT: BlockKey = b""
"""The parent of a block that needs none before it."""


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """Usage and bound of a tier, in bytes of payload and framing. `capacity_bytes` is 0 where unknown."""

    used_bytes: int
    capacity_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TierHealth:
    """State of a tier's last operations; `reason` is one line for a failure. A full tier may still be `readable`."""

    ok: bool
    reason: str = ""
    readable: bool = True


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Counts of a tier since it was opened. `damaged` counts unusable records, each of them a miss."""

    damaged: int = 0
    dropped_writes: int = 0
    evicted: int = 0
    failed_reads: int = 0

    def __add__(self, other: TierCounts) -> TierCounts:
        """Sum of both, count by count."""
        return TierCounts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Entry:
    """A block to be stored, from `buffer`.

    `parent` is the key of the block without which it is of no use, `ROOT` if none is known or there is none. `depth` is
    its number in its prompt: with a parent the parent's and one more, without one it says which blocks to keep longer.
    `epoch` is written beside it, so that tools can find blocks that no engine will ask for again.
    """

    key: BlockKey
    buffer: BlockBuffer
    parent: BlockKey = ROOT
    depth: int = 0
    epoch: Epoch = FIRST_EPOCH


def chained(
    keys: Sequence[BlockKey],
    buffers: Sequence[BlockBuffer],
    before: Sequence[BlockKey] = (),
    epoch: Epoch = FIRST_EPOCH,
) -> list[Entry]:
    """Blocks of a prompt that follow one another, after those named `before`, which begin with its first."""
    parents = [before[-1] if before else ROOT, *keys]
    return [
        Entry(key, buffer, parent, depth, epoch)
        for depth, (key, buffer, parent) in enumerate(zip(keys, buffers, parents, strict=False), len(before))
    ]


def leading(found: Sequence[bool]) -> int:
    """Number of leading True values."""
    try:
        return found.index(False)
    except ValueError:
        return len(found)


class Tier(ABC):
    """A place where blocks outlive memory. Blocking and thread-safe; the scheduler's thread asks an exclusive tier only
    `lookup` and `SupportsPrefix.leading`.

    Keys are in any order, each once. A buffer has any size up to the largest that the tier was opened for; its size is
    what is stored, 0 bytes included, and a record of another size is a miss. No method raises for a store's failure (an
    I/O error, a full disk, damage): it is a miss, or a block not stored. Only `delete` and `clear` raise TierError if
    the store did not do all of it; their caller repeats them.

    What a place can do better, it says by having a method of `SupportsPrefix`, `SupportsLocate` or `SupportsScan`.
    """

    name: str
    """Short, for logs and metrics: "disk"."""

    exclusive: bool
    """True if all content is this engine's: `lookup` answers from memory in microseconds, and `clear` harms nobody."""

    @property
    def others_evict(self) -> bool:
        """True if others may evict what `lookup` names: a read of which nothing arrives is then no failure."""
        return False

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """True for each of these blocks that is held. No promise: they may be evicted at once."""

    @abstractmethod
    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        """Read block `keys[i]` into `buffers[i]`; return whether each arrived, verified.

        Where that is False the buffer's content is undefined, and a damaged block is dropped. After `get` has returned
        nothing writes to the buffers. `on_progress` is called on this thread as blocks arrive.
        """

    @abstractmethod
    def put(self, entries: Sequence[Entry]) -> list[bool]:
        """Store these blocks, a parent before what needs it; return whether each is held afterwards.

        A tier that keeps chains stores no block whose parent it lacks. Of blocks without a parent the deepest go first
        when room is needed, if they were used at the same time. Blocks that are held already are not written again. The
        buffers must not change until `put` returns. A block is visible only when it is stored in full.
        """

    @abstractmethod
    def delete(self, keys: Iterable[BlockKey]) -> int:
        """Drop these blocks for good, and all that need them where that is known; return how many. Raises TierError."""

    @abstractmethod
    def clear(self) -> None:
        """Drop every block of this namespace for good: none returns after a restart. Raises TierError."""

    def refute_run(self) -> None:
        """Mark all that was written through this object as invalid: no engine is given it, not even after a kill.

        Nothing is read or written through it any more. Raises TierError. Where no record says whose it is, all go.
        """
        self.clear()

    @abstractmethod
    def capacity(self) -> TierCapacity:
        """Usage and bound."""

    def counts(self) -> TierCounts:
        """Damage and evictions since the tier was opened; zeros if it does not count."""
        return TierCounts()

    @abstractmethod
    def health(self) -> TierHealth:
        """State of the last operations."""

    def lost(self) -> str:
        """Why its place is not the one that was opened, such as a removed folder; "" if it is. May wait for I/O.

        Asked every few seconds, never on the scheduler's thread. A tier that is lost is closed, and opened anew.
        """
        return ""

    @property
    def released(self) -> bool:
        """True once nothing is open after `close`: an operation that does not return keeps the store open."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Close the store. Operations that still run on other threads end as misses. Never raises; idempotent."""


@runtime_checkable
class SupportsPrefix(Protocol):
    """A place that finds at once how much of a prompt it holds. An exclusive one holds a block only with its parent."""

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading `keys` of a prompt that are held. An exclusive tier answers from memory."""

    def put_start(self, keys: Sequence[BlockKey]) -> int:
        """Index of the first of these `keys` that `put` should be given; their number if it needs none.

        It may hold those after it where it cannot write to them.
        """


@runtime_checkable
class SupportsEvents(Protocol):
    """A place that knows when it loses a block: its content is announced to routers."""

    events: Announcing
    """Announcements of blocks that it has stored itself, from any thread."""


@runtime_checkable
class SupportsLocate(Protocol):
    """A place that finds a block through those before it."""

    def locate(self, keys: Sequence[BlockKey]) -> None:
        """Called before some of a prompt's `keys`, which begin with its first block, are read or written."""


@runtime_checkable
class SupportsScan(Protocol):
    """A place whose content can be listed."""

    def scan(self) -> Iterator[RecordHeader]:
        """The header of every valid record, in no order. Reads no payload."""
