"""Slots of another engine's segment, for reading: one rank's, by the same rank of a neighbour.

Owns the mapping. Says nothing of the slots' content: `kvpact.index.neighbour` leases what may be read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec

from kvpact.errors import DataError, PactViolation
from kvpact.index.column_file import REFUSED, SEALS
from kvpact.index.slot_space import EXTENT_SHIFT
from kvpact.memory.arena import SlotClass


@dataclass(frozen=True, slots=True)
class NeighbourMemory:
    """Address of another engine's memory, whose slots have the classes and sizes of this engine's."""

    number: int
    """Number of the engine, as loads name it."""
    pid: int
    """Process that has the descriptors: that of the scheduler."""
    index: int
    """Descriptor of its index, whose head says whether its blocks may be used."""
    segments: tuple[tuple[int, int, int, int], ...]
    """For each rank the descriptor, device and inode of the segment with its slots, and the number of these; of extents
    where there are several classes."""


def encode_addresses(addresses: Sequence[NeighbourMemory]) -> bytes:
    """Encode the engines from which loads may come, all of them, as a step's `StepWork.extra`."""
    return msgspec.msgpack.encode(addresses)


def decode_addresses(extra: object) -> list[NeighbourMemory] | None:
    """Decode `StepWork.extra`; None if nothing has changed since the last step. Raises DataError."""
    if not isinstance(extra, bytes):
        return None
    try:
        return msgspec.msgpack.decode(extra, type=list[NeighbourMemory])
    except msgspec.MsgspecError as error:
        raise DataError(f"a step's list of other engines cannot be decoded: {error}") from None


class NeighbourSlots:
    """A sealed segment of another engine, mapped read-only."""

    def __init__(self, descriptor: int, classes: Sequence[SlotClass], index: int | None = None) -> None:
        """Map the segment, with slots of these classes, lowest numbers first, and the head of the `index` that says
        whether they may be used; the caller closes the descriptors.

        Raises DataError if it is not sealed, or smaller, OSError if it cannot be mapped.
        """
        size = classes[-1].end
        if SEALS & ~fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) or os.fstat(descriptor).st_size < size:
            raise DataError(f"a neighbour's memory is not sealed, or has less than {size} bytes")
        self.classes = tuple(classes)
        """Classes of all slots, lowest numbers first."""
        self._mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        self.memory = memoryview(self._mapping)
        """All slots, for reading; the mapping ends with the last view of it."""
        self._head = memoryview(b"\0" * mmap.PAGESIZE).cast("Q")
        if index is not None:
            at = os.fstat(index).st_size - mmap.PAGESIZE
            page = mmap.mmap(index, mmap.PAGESIZE, prot=mmap.PROT_READ, offset=at)
            self._head = memoryview(page).cast("Q")

    @staticmethod
    def attach(address: NeighbourMemory, rank: int, own: Sequence[SlotClass]) -> NeighbourSlots:
        """Map the segment of this rank's slots, which are of its `own` classes, by the descriptors of the scheduler's
        process. Raises like the constructor, and DataError if other files are behind them."""
        descriptor, device, inode, count = address.segments[rank]
        with _opened(address.pid, descriptor) as segment, _opened(address.pid, address.index) as index:
            found = os.fstat(segment)
            if (found.st_dev, found.st_ino) != (device, inode):
                raise DataError(f"a neighbour's memory is not behind descriptor {descriptor} any more")
            classes = [
                replace(one, slots=range(one.slots.start, one.slots.start + (count << _shift(one)))) for one in own
            ]
            return NeighbourSlots(segment, classes, index)

    @property
    def is_refused(self) -> bool:
        """True once nobody may use what these slots hold any more: to be read after each copy."""
        return bool(self._head[REFUSED])

    def slot_view(self, slot: int) -> memoryview:
        """View of a slot's piece, for reading. Raises PactViolation for a slot that does not exist."""
        for one in self.classes:
            if slot in one.slots and one.has(slot):
                start = one.start_of(slot)
                return self.memory[start : start + one.slot_bytes]
        raise PactViolation(f"a neighbour has no slot {slot}")

    def close(self) -> None:
        """Unmap the memory. Raises BufferError while a view is in use."""
        self.memory.release()
        self._mapping.close()


def _shift(slot_class: SlotClass) -> int:
    return EXTENT_SHIFT if slot_class.extent_bytes else 0


@contextmanager
def _opened(pid: int, descriptor: int) -> Iterator[int]:
    """A descriptor of another process, opened here for reading. Raises OSError."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)
