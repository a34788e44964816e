"""The memory tier's storage: fixed-size slots in anonymous shared memory, one segment per worker rank.

Owns the segments, their sizes and the rules for mapping them; does not read the slots' content. A segment is a memfd:
it has no name, so a killed process leaves nothing behind and the size of /dev/shm does not matter; the scheduler's
process maps it through /proc/<pid>/fd.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeVar

from kvpact.errors import ConfigError, KvpactError, PactViolation
from kvpact.identity.notices import JUDGED_FROM
from kvpact.index.classed_slots import ClassedSlots
from kvpact.index.column_file import SEALS
from kvpact.index.slot_space import CLASS_SHIFT, EXTENT_SHIFT, PlainSlots, SlotSpace
from kvpact.memory import numa
from kvpact.memory.extents import Extents
from kvpact.memory.layout import PAGE_BYTES
from kvpact.memory.limits import require_available
from kvpact.memory.mapping import boot_id, map_aligned, pid_namespace
from kvpact.memory.prefault import HUGE_BYTES, PageTaker
from kvpact.metrics import UnmadeCheck
from kvpact.units import format_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger(__name__)

MEMFD = "kvpact-arena"
"""Name of arenas in /proc."""

NOTICE_BYTES = PAGE_BYTES
"""Bytes at the end of each segment, after all slots, for a rank's reports (`kvpact.identity.notices`)."""

USABLE, STANDING, UNMADE = range(3)
"""Places of the numbers at the end of that page, 4 bytes each: usable slots, plus 1, or 0 if all are and always were;
the verdict on the rank's copies (`Standing`); the number of skipped checks of them, by reason."""

USABLE_BYTES = 16


class Standing(IntEnum):
    """Verdict on the copies between a rank's device and its slots; the greatest number counts for all ranks."""

    PROVEN = 0
    """All checked copies were right, or the copies are a CPU's."""
    OPEN = 1
    """Copies are still being checked, each before it is reported."""
    REFUTED = 2
    """A copy was wrong: none is used any more."""


STANDINGS: Final = tuple(Standing)
"""Members by number: a call of the class costs a microsecond, in each step."""

REASONS: Final = tuple(UnmadeCheck)

Numbers = TypeVar("Numbers", int, "npt.NDArray[np.int64]")

_PLACE = (1 << EXTENT_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class SlotClass:
    """A segment's slots of one size. A slot's number contains its class.

    Slots of the only class are adjacent. Several classes share the segment's extents, each of which has slots of one
    class at a time (see `kvpact.index.classed_slots`); a slot's number is then
    `class << CLASS_SHIFT | extent << EXTENT_SHIFT | place`.
    """

    slots: range
    """Numbers of the class, and of no other class of the segment. Not all are slots if `extent_bytes` is set."""
    slot_bytes: int
    """Bytes of one rank's piece: whole memory pages. 0 for a class without layers on this rank."""
    offset: int = 0
    """Offset of the first slot in the segment, in bytes."""
    extent_bytes: int = 0
    """Bytes of an extent; 0 if the slots are adjacent."""

    @property
    def num_extents(self) -> int:
        """Number of extents; of slots if they are adjacent."""
        return len(self.slots) >> EXTENT_SHIFT if self.extent_bytes else len(self.slots)

    @property
    def places(self) -> int:
        """Slots in an extent; 0 for a class without bytes."""
        return self.extent_bytes // self.slot_bytes if self.extent_bytes and self.slot_bytes else bool(self.slot_bytes)

    @property
    def end(self) -> int:
        """Offset of the last slot's end in the segment, in bytes."""
        return self.offset + self.num_extents * (self.extent_bytes or self.slot_bytes)

    def has(self, slot: int) -> bool:
        """True if this is the number of one of its slots."""
        return slot in self.slots and (not self.extent_bytes or not self.places or slot & _PLACE < self.places)

    def numbers(self, pieces: Iterable[int]) -> Iterator[int]:
        """Numbers of the slots in these extents, or, without extents, of these slots, counted from 0."""
        for piece in pieces:
            first = self.slots.start + (piece << EXTENT_SHIFT if self.extent_bytes else piece)
            yield from range(first, first + self.places)

    def start_of(self, slot: Numbers) -> Numbers:
        """Offset of a slot of this class in the segment, in bytes; also for an array of numbers."""
        number = slot - self.slots.start
        if self.extent_bytes:
            return (number >> EXTENT_SHIFT) * self.extent_bytes + (number & _PLACE) * self.slot_bytes
        return self.offset + number * self.slot_bytes


def _classes_of(count: int, num_bytes: int, class_bytes: Sequence[int]) -> tuple[SlotClass, ...]:
    """Classes of `count` slots of `num_bytes` bytes, or of as many extents if there are several classes."""
    if not class_bytes:
        return (SlotClass(range(count), num_bytes),)
    starts = (number << CLASS_SHIFT for number in range(len(class_bytes)))
    return tuple(
        SlotClass(range(start, start + (count << EXTENT_SHIFT)), one, extent_bytes=num_bytes)
        for start, one in zip(starts, class_bytes, strict=True)
    )


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """Address of a segment, as plain values to send to the scheduler's process."""

    pid: int
    descriptor: int
    num_slots: int
    """Number of slots; of extents where there are several classes."""
    rank_slot_bytes: int
    """Bytes of one rank's piece of each slot; of each extent where there are several classes."""
    device: int
    inode: int
    boot_id: str
    pid_namespace: str
    class_bytes: tuple[int, ...] = ()
    """Bytes of this rank's piece of a slot, per class; empty if there is only one class."""

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        """Slot classes of the segment, lowest numbers first."""
        return _classes_of(self.num_slots, self.rank_slot_bytes, self.class_bytes)


class ArenaSegment:
    """Memory of one rank: its piece of each slot, class by class. Made by `create` or `attach`."""

    sharers = 1
    """Number of ranks that copy to these slots or from them, each through its own mapping."""

    def __init__(self, descriptor: int, classes: Sequence[SlotClass]) -> None:
        self.classes = tuple(classes)
        """Classes of all slots of the segment, lowest numbers first."""
        self.descriptor = descriptor
        """Descriptor of the memfd; open until `close`."""
        self._closed = False
        self.pieces = _pieces_of(self.classes)
        """Units of pinning and of `usable_slots`: slots; extents where there are several classes."""
        self.unit = "extent" if self.classes[0].extent_bytes else "slot"
        """Name of one of the pieces."""
        ends = [one.end for one in self.pieces]
        size = ends[-1]
        self._mapping, start = map_aligned(descriptor, size)
        self.memory = memoryview(self._mapping)[start : start + size]
        """All slots, adjacent and writable."""
        self.notice = memoryview(self._mapping)[size + HUGE_BYTES - NOTICE_BYTES : size + HUGE_BYTES - USABLE_BYTES]
        """Last page of the file, behind all slots, without its last bytes; zeros at first."""
        self._usable = memoryview(self._mapping)[size + HUGE_BYTES - USABLE_BYTES :].cast("I")
        self.mapped_at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        """Address of the first slot in this process."""
        self.pages = PageTaker(descriptor, self.mapped_at, ends)
        """Takes the slots' memory from the machine."""
        self._advise(mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP)  # prompts do not belong into core dumps

    @classmethod
    def create(cls, num_slots: int, rank_slot_bytes: int, ranks_on_host: int = 1) -> ArenaSegment:
        """Make memory with one class of slots, in the worker.

        Pages are taken from the machine at first use or by `pages`. Raises ConfigError if the machine has no memory now
        for `ranks_on_host` segments of this size beside the arenas of other engines.
        """
        return cls._create(num_slots, rank_slot_bytes, (), ranks_on_host)

    @classmethod
    def create_extents(cls, extents: Extents, ranks_on_host: int) -> ArenaSegment:
        """`create` for several classes of slots."""
        return cls._create(extents.count, extents.num_bytes, extents.class_bytes, ranks_on_host)

    @classmethod
    def _create(cls, count: int, num_bytes: int, class_bytes: tuple[int, ...], ranks_on_host: int) -> ArenaSegment:
        sizes = (num_bytes, *class_bytes)
        if count < 1 or num_bytes < 1 or any(one % PAGE_BYTES for one in sizes):
            raise PactViolation(f"a segment needs slots of whole {PAGE_BYTES}-byte pages, not {count} of {sizes} bytes")
        if not hasattr(os, "memfd_create"):
            raise ConfigError("the memory tier needs memfd_create (Linux 3.17, glibc 2.27), which this Python lacks")
        size = count * num_bytes
        descriptor = os.memfd_create(MEMFD, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)  # a memfd is readable for all users at first, through /proc
            os.ftruncate(descriptor, size + HUGE_BYTES)
            unit = "extents" if class_bytes else "blocks"
            require_available(MEMFD, descriptor, f"{count} {unit} of {format_size(num_bytes)}", size, ranks_on_host)
            return cls(descriptor, _classes_of(count, num_bytes, class_bytes))
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(
                f"memory: cannot map an arena of {format_size(size)}: {error.strerror}; set a smaller `memory`, or "
                "raise the limit on address space (ulimit -v)"
            ) from error
        except ConfigError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, address: SegmentAddress) -> ArenaSegment:
        """Map a segment made by a worker on this host, or by this process.

        Raises KvpactError if the worker is gone, on another host or in another pid namespace.
        """
        name = f"the arena of worker process {address.pid}"
        if address.boot_id != boot_id() or address.pid_namespace != pid_namespace():
            raise KvpactError(f"{name} is on another host or in another pid namespace; all ranks must share this one's")
        try:
            descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise KvpactError(
                f"{name} cannot be opened ({error.strerror}): the worker must be alive and run as the same user"
            ) from error
        try:
            found = os.fstat(descriptor)
            expected = (address.device, address.inode, _pieces_of(address.classes)[-1].end + HUGE_BYTES)
            if (found.st_dev, found.st_ino, found.st_size) != expected:
                raise KvpactError(
                    f"{name} is not behind descriptor {address.descriptor} any more (device, inode, bytes): expected "
                    f"{expected}, found {(found.st_dev, found.st_ino, found.st_size)}; the worker has closed it"
                )
            return cls(descriptor, address.classes)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def num_slots(self) -> int:
        """Number of slots of all classes; of extents where there are several classes."""
        return self.pieces[-1].slots.stop

    @property
    def usable_slots(self) -> int:
        """Number of slots, from number 0 on, that this rank can copy now; a device may pin them one by one."""
        return self._usable[USABLE] - 1 if self._usable[USABLE] else self.num_slots

    @usable_slots.setter
    def usable_slots(self, count: int) -> None:
        self._usable[USABLE] = count + 1

    @property
    def standing(self) -> Standing:
        """Verdict on this rank's copies."""
        return STANDINGS[self._usable[STANDING]]

    @standing.setter
    def standing(self, standing: Standing) -> None:
        self._usable[STANDING] = standing

    @property
    def judged_from(self) -> int:
        """Lowest number of a save whose blocks prove a copy; the engine may write to the blocks of earlier saves."""
        return self.notice.cast("Q")[JUDGED_FROM]

    def count_unmade(self, reason: UnmadeCheck) -> None:
        """Count a skipped check of this rank."""
        self._usable[UNMADE + REASONS.index(reason)] += 1

    @property
    def rank_slot_bytes(self) -> int:
        """Bytes of this rank's piece of the largest slot."""
        return max(one.slot_bytes for one in self.classes)

    def address(self) -> SegmentAddress:
        """Address for other processes of this host to attach by; valid as long as this segment is open."""
        found = os.fstat(self.descriptor)
        (pieces,) = self.pieces
        return SegmentAddress(
            pid=os.getpid(),
            descriptor=self.descriptor,
            num_slots=len(pieces.slots),
            rank_slot_bytes=pieces.slot_bytes,
            device=found.st_dev,
            inode=found.st_ino,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            class_bytes=tuple(one.slot_bytes for one in self.classes) if self.classes[0].extent_bytes else (),
        )

    def class_of(self, slot: int) -> SlotClass:
        """Class of a slot. Raises PactViolation for a slot that does not exist."""
        for one in self.classes:
            if slot in one.slots and (not one.extent_bytes or one.has(slot)):
                return one
        raise PactViolation(f"slot {slot} is outside the arena's {self.num_slots} {self.unit}s")

    def slot_view(self, slot: int) -> memoryview:
        """View of a slot's piece, writable and page aligned. Raises PactViolation for a slot that does not exist."""
        slot_class = self.class_of(slot)
        start = slot_class.start_of(slot)
        return self.memory[start : start + slot_class.slot_bytes]

    def use(self, slots: Sequence[int]) -> None:
        """Take the pages after these slots, which are in use, or about to be."""
        for one in self.classes:
            last = max((slot for slot in slots if slot in one.slots), default=None)
            if last is not None:
                self.pages.use(one.start_of(last) + one.slot_bytes)

    def place_pages(self, *, huge: bool, node: int | None = None) -> None:
        """Before any page is taken: ask the kernel for huge pages, and for pages from this node."""
        if node is not None:
            try:
                numa.prefer(node, self.mapped_at, len(self.memory))
            except OSError as error:
                logger.info("arena: its memory may be on any node, not only on the device's node %d: %s", node, error)
        self.pages.huge = huge
        if not huge:
            self._advise(mmap.MADV_NOHUGEPAGE)

    def _advise(self, *advices: int) -> None:
        for advice in advices:
            with contextlib.suppress(OSError):  # the kernel does not know it
                self._mapping.madvise(advice)

    def seal(self) -> None:
        """Let nobody map the memory for writing any more, or change its size; mappings that are there stay as they are.

        For the time when the scheduler's process and all ranks have mapped it. Raises OSError.
        """
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        """Free the memory. Exported views keep the mapping alive until the last of them is released."""
        if self._closed:
            return
        self._closed = True
        self.pages.close()
        with contextlib.suppress(BufferError):
            self.memory.release()
            self.notice.release()
            known = self._usable
            self._usable = memoryview(bytes(known)).cast("I")  # the last numbers can still be read
            known.release()
            self._mapping.close()
        os.close(self.descriptor)


class Arena:
    """Segments with slots, in rank order: a slot is one piece of each. For the scheduler's process.

    `others` are the segments of ranks whose slots lie in one of `segments`: see `SharedSlots`. Raises PactViolation
    without a segment, and if a slot is of one class on one rank and of another on the next.
    """

    def __init__(self, segments: Sequence[ArenaSegment], others: Sequence[ArenaSegment] = ()) -> None:
        if not segments:
            raise PactViolation("an arena needs the segment of at least one rank")
        self.segments = tuple(segments)
        self._all = (*segments, *others)
        self.num_ranks = len(self._all)
        """Number of ranks that copy to slots or from them, and report each job."""
        self.slots = _slots_of_all(self.segments)
        """Numbers of each class's slots of which every rank has its piece."""
        ranks = [[one.places for one in segment.classes] for segment in segments]
        self.places = tuple(min(filter(None, places), default=0) for places in zip(*ranks, strict=True))
        """Slots in an extent of which each rank has its piece, per class; 0 if no rank has any bytes of it."""
        self.num_slots = min(segment.num_slots for segment in segments)
        """Number of slots of all classes; of extents where there are several classes."""
        sizes = [[one.slot_bytes for one in segment.classes] for segment in segments]
        self.class_bytes = tuple(map(sum, zip(*sizes, strict=True)))
        """Bytes of a slot over all ranks, per class."""
        self.slot_bytes = max(self.class_bytes)
        """Bytes of the largest slot, over all ranks."""
        self.rank_slot_bytes = max(segment.rank_slot_bytes for segment in segments)
        """Bytes of the largest slot, on the rank with the largest piece of it."""
        self._growing = any(segment.usable_slots < self.num_slots for segment in self._all)

    @property
    def least_slots(self) -> int:
        """Least number of slots: if all memory belongs to the class with the fewest slots in an extent."""
        return self.num_slots * min(filter(None, self.places), default=1)

    @property
    def usable_slots(self) -> int:
        """Number of slots, from number 0 on, that all ranks can copy now; only grows, and is free once complete."""
        if not self._growing:
            return self.num_slots
        usable = min(segment.usable_slots for segment in self._all)
        self._growing = usable < self.num_slots
        return min(usable, self.num_slots)

    @property
    def standing(self) -> Standing:
        """Worst verdict of all ranks."""
        worst = 0
        for segment in self._all:
            worst = max(worst, segment._usable[STANDING])
        return STANDINGS[worst]

    def judge_from(self, job_id: int) -> None:
        """Cancel the checks of saves before this job on all ranks (H116), at once, before any later step."""
        for segment in self._all:
            segment.notice.cast("Q")[JUDGED_FROM] = job_id

    @property
    def unmade_checks(self) -> Mapping[UnmadeCheck, int]:
        """Number of skipped checks of all ranks, by reason."""
        counts = zip(*(segment._usable[UNMADE:] for segment in self._all), strict=True)
        return dict(zip(REASONS, map(sum, counts), strict=True))

    def slot_space(self, rows_without_payload: int) -> SlotSpace:
        """Rows of this memory for an index, all free and the usable ones handed out, and `rows_without_payload` more,
        of a class of their own after all others."""
        rows = self.num_slots, self.usable_slots, rows_without_payload
        if self.segments[0].unit == "slot":
            return PlainSlots(*rows)
        return ClassedSlots(self.places + ((0,) if rows_without_payload else ()), *rows)

    def bytes_of(self, slots: Sequence[int]) -> list[int]:
        """Bytes of each of these slots, over all ranks."""
        if len(self.class_bytes) == 1:
            return [self.slot_bytes] * len(slots)
        return [self.class_bytes[slot >> CLASS_SHIFT] for slot in slots]

    def slot_views(self, slot: int) -> list[memoryview]:
        """Writable, page-aligned views of a slot, one per rank; their concatenation is the slot's payload."""
        return [segment.slot_view(slot) for segment in self.segments]

    def close(self) -> None:
        """Close every segment."""
        for segment in self._all:
            segment.close()


def _pieces_of(classes: Sequence[SlotClass]) -> tuple[SlotClass, ...]:
    """The classes, or the extents that they share as slots of one class."""
    first = classes[0]
    return (SlotClass(range(first.num_extents), first.extent_bytes),) if first.extent_bytes else tuple(classes)


def _slots_of_all(segments: Sequence[ArenaSegment]) -> tuple[range, ...]:
    if len({tuple(one.slots.start for one in segment.classes) for segment in segments}) > 1:
        raise PactViolation("the ranks number their slot classes differently")
    classes = zip(*(segment.classes for segment in segments), strict=True)
    return tuple(range(ones[0].slots.start, min(one.slots.stop for one in ones)) for ones in classes)
