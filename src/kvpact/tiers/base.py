"""What a tier is: the `Tier` interface, which every place that outlives memory implements.

The frame of a stored block is `kvpact.tiers.record`'s; its names are public here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import BlockKey
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
"""Called with the number of blocks that have arrived and been verified; returns False to end the read early."""


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """What a tier holds and may hold, in bytes of payload and framing. `capacity_bytes` is 0 where unknown."""

    used_bytes: int
    capacity_bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class TierHealth:
    """Whether a tier works now; `reason` is one line that says why not. A full tier may still be `readable`."""

    ok: bool
    reason: str = ""
    readable: bool = True


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What a tier has counted since it was opened. `damaged` counts unusable records, each of them a miss."""

    damaged: int = 0
    dropped_writes: int = 0
    evicted: int = 0
    failed_reads: int = 0


def leading(found: Sequence[bool]) -> int:
    """Number of leading True values."""
    return next((index for index, there in enumerate(found) if not there), len(found))


class Tier(ABC):
    """A place where blocks outlive memory. Blocking and thread-safe; the scheduler's thread calls only `lookup`.

    `keys` of `lookup`, `get` and `put` is always a request's block keys from block 0, or a prefix of them, so that a
    key implies all before it. Blocks that form no chain, *loose* ones (tails of windows, states), have methods of their
    own: each stands for itself, and its key is no chain's. A buffer has any size up to the largest that the tier was
    opened for; its size is what is stored, 0 bytes included, and a record of another size is a miss.
    No method raises for a store's failure (an I/O error, a full disk, damage): it is a miss, or a block not stored.
    Only `delete` and `clear` raise TierError if the store did not do all of it; their caller repeats them.
    """

    name: str
    """Short, for logs and metrics: "disk"."""

    exclusive: bool
    """What is here is this engine's: `lookup` answers from memory in microseconds, and `clear` harms nobody."""

    @property
    def others_evict(self) -> bool:
        """Whether others may evict what `lookup` counts: a read of which nothing arrives is then no failure."""
        return False

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading `keys` whose blocks are held. No promise: they may be evicted at once."""

    def put_start(self, keys: Sequence[BlockKey]) -> int:
        """The block from which on `put` should be given `keys`, all of them if that is their number; as `lookup`."""
        return self.lookup(keys)

    @abstractmethod
    def get(
        self,
        keys: Sequence[BlockKey],
        start: int,
        buffers: Sequence[BlockBuffer],
        on_progress: Progress | None = None,
    ) -> int:
        """Read block `start + i` into `buffers[i]`; return how many arrived in a row from `start`, verified.

        This is not the number of hits: a block after a hole does not count, and the content of its buffer is undefined.
        After `get` has returned nothing writes to the buffers. Damaged blocks are dropped with all blocks after them.
        `on_progress` is called on this thread as blocks arrive.
        """

    @abstractmethod
    def put(
        self, keys: Sequence[BlockKey], start: int, buffers: Sequence[BlockBuffer], epoch: Epoch = FIRST_EPOCH
    ) -> int:
        """Store block `start + i` from `buffers[i]`; return how many are held in a row from `start` afterwards.

        `epoch` is written beside each block, so that tools can find blocks that no engine will ask for again. Blocks
        that are held already are not written again. All blocks before `start` must be held, else nothing is stored.
        The buffers must not change until `put` returns. A block is visible only when it is stored in full.
        """

    def lookup_each(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each of these loose blocks is held, as `lookup`."""
        return [self.lookup([key]) == 1 for key in keys]

    def get_each(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        """Read the loose block `keys[i]` into `buffers[i]`; return whether each arrived, verified. Otherwise as `get`.

        Where that is False the buffer's content is undefined; damaged blocks are dropped. `on_progress` is told how
        many have arrived in a row from the first.
        """
        arrived = [False] * len(keys)
        for index, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            arrived[index] = self.get([key], 0, [buffer]) == 1
            if on_progress is not None and not on_progress(leading(arrived)):
                break
        return arrived

    def put_each(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], epoch: Epoch = FIRST_EPOCH
    ) -> list[bool]:
        """Store the loose block `keys[i]` from `buffers[i]`; return whether each is held afterwards. As `put`.

        Its record has no parent, like that of a chain's first block.
        """
        return [self.put([key], 0, [buffer], epoch) == 1 for key, buffer in zip(keys, buffers, strict=True)]

    @abstractmethod
    def delete(self, keys: Iterable[BlockKey]) -> int:
        """Drop these blocks and all blocks after them for good; return how many were dropped. Raises TierError.

        Loose blocks are dropped when they are named themselves.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drop every block of this namespace for good: none returns after a restart. Raises TierError."""

    def refute_run(self) -> None:
        """What was written through this object is wrong: no engine is to be given it, not even after a kill.

        Nothing is read or written through it any more. Raises TierError. Where no record says whose it is, all go.
        """
        self.clear()

    @abstractmethod
    def capacity(self) -> TierCapacity:
        """What is held, and the bound."""

    @abstractmethod
    def counts(self) -> TierCounts:
        """What went wrong or was evicted since the tier was opened."""

    @abstractmethod
    def scan(self) -> Iterator[RecordHeader]:
        """The header of every sound record, in no order. Reads no payload."""

    @abstractmethod
    def health(self) -> TierHealth:
        """Whether the last operations worked."""

    @abstractmethod
    def close(self) -> None:
        """Close the store. Operations that still run on other threads end as misses. Never raises; idempotent."""
