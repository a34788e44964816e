"""The memory tier's storage: fixed-size slots in anonymous shared memory, one segment per worker rank.

Owns the segments, their sizes and the rules for mapping them; does not know the slots' content. A segment is a memfd:
it has no name, so a killed process leaves nothing behind and the size of /dev/shm does not matter; the scheduler's
process maps it through /proc/<pid>/fd.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvpact.errors import ConfigError, KvpactError, PactViolation
from kvpact.memory import numa
from kvpact.memory.limits import available_memory_bytes, promised_elsewhere
from kvpact.memory.mapping import boot_id, map_aligned, pid_namespace
from kvpact.memory.prefault import HUGE_BYTES, PageTaker
from kvpact.units import format_size

logger = logging.getLogger(__name__)

MEMFD = "kvpact-arena"
"""The name that arenas have in /proc."""

MANY_ENGINES = 64
"""Arenas of which this many would fit are made without a look at those of other engines, which takes 20 ms."""

PAGE_BYTES = 4096
"""Alignment of every slot piece, in bytes: O_DIRECT and page mapping need it."""

NOTICE_BYTES = PAGE_BYTES
"""The end of each segment, after all slots: what a rank reports of its weights (`kvpact.identity.notices`)."""

USABLE_BYTES = 8
"""The end of that page: the number of slots that are usable now, plus 1; 0 if all are and always were."""

MINIMUM_SLOTS = 2
"""One block being served and one being saved; with fewer, no block can be stored."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of one rank's piece of a slot: layer by layer, in the order of registration, in bytes."""

    layer_page_bytes: tuple[int, ...]

    @property
    def rank_slot_bytes(self) -> int:
        """Bytes of one rank's piece, rounded up to whole memory pages."""
        return -(-sum(self.layer_page_bytes) // PAGE_BYTES) * PAGE_BYTES

    @property
    def layer_offsets(self) -> tuple[int, ...]:
        """The offset of each layer's page in the piece."""
        return tuple(accumulate(self.layer_page_bytes, initial=0))[:-1]


@dataclass(frozen=True, slots=True)
class SlotClass:
    """A segment's slots of one size, one behind the other: a slot's number says which class it belongs to.

    Classes follow each other in a segment, by number and by place. There is one today; a model whose blocks come in
    several sizes has one for each size.
    """

    slots: range
    """The numbers; no other class of the segment has them."""
    slot_bytes: int
    """Of one rank's piece: whole memory pages."""
    offset: int = 0
    """Where in the segment the first slot begins, in bytes."""

    @property
    def end(self) -> int:
        """Where in the segment the last slot ends."""
        return self.offset + len(self.slots) * self.slot_bytes

    def start_of(self, slot: int) -> int:
        """Where in the segment a slot of this class begins."""
        return self.offset + (slot - self.slots.start) * self.slot_bytes


@dataclass(frozen=True, slots=True)
class SegmentAddress:
    """The address of a segment, as plain values to send to the scheduler's process."""

    pid: int
    descriptor: int
    num_slots: int
    rank_slot_bytes: int
    device: int
    inode: int
    boot_id: str
    pid_namespace: str

    @property
    def classes(self) -> tuple[SlotClass, ...]:
        """The segment's slot classes, lowest numbers first."""
        return (SlotClass(range(self.num_slots), self.rank_slot_bytes),)


class ArenaSegment:
    """One rank's memory: its piece of each slot, class by class. Made by `create` or `attach`."""

    def __init__(self, descriptor: int, classes: Sequence[SlotClass]) -> None:
        self.classes = tuple(classes)
        """Of all its slots, lowest numbers first."""
        self.descriptor = descriptor
        """Of the memfd; open until `close`."""
        self._closed = False
        ends = [one.end for one in self.classes]
        size = ends[-1]
        self._mapping, start = map_aligned(descriptor, size)
        self.memory = memoryview(self._mapping)[start : start + size]
        """All slots, one behind the other, writable."""
        self.notice = memoryview(self._mapping)[size + HUGE_BYTES - NOTICE_BYTES : size + HUGE_BYTES - USABLE_BYTES]
        """The file's last page, which no slot reaches, but its last bytes; zeros at first."""
        self._usable = memoryview(self._mapping)[size + HUGE_BYTES - USABLE_BYTES :].cast("Q")
        self.mapped_at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        """The address of the first slot in this process."""
        self.pages = PageTaker(descriptor, self.mapped_at, ends)
        """Takes the slots' memory from the machine."""
        self._advise(mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP)  # prompts do not belong into core dumps

    @classmethod
    def create(cls, num_slots: int, rank_slot_bytes: int, ranks_on_host: int = 1) -> ArenaSegment:
        """New memory with one class of slots, in the worker.

        Pages are taken from the machine at first use or by `pages`. Raises ConfigError if `ranks_on_host`
        segments of this size are more than the machine can give now, besides what it owes to other engines' arenas.
        """
        if num_slots < 1 or rank_slot_bytes < 1 or rank_slot_bytes % PAGE_BYTES:
            raise PactViolation(
                f"a segment needs slots of whole {PAGE_BYTES}-byte pages, not {num_slots} of {rank_slot_bytes} bytes"
            )
        if not hasattr(os, "memfd_create"):
            raise ConfigError("the memory tier needs memfd_create (Linux 3.17, glibc 2.27), which this Python lacks")
        size = num_slots * rank_slot_bytes
        descriptor = os.memfd_create(MEMFD, os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)  # it is made readable for all users, and can be opened through /proc only
            os.ftruncate(descriptor, size + HUGE_BYTES)
            _require_available(descriptor, num_slots, rank_slot_bytes, ranks_on_host)
            return cls(descriptor, (SlotClass(range(num_slots), rank_slot_bytes),))
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
        """Map a segment that a worker on this host, or this process, has made.

        Raises KvpactError if the worker is gone, on another host or in another pid namespace.
        """
        where = f"the arena of worker process {address.pid}"
        if address.boot_id != boot_id() or address.pid_namespace != pid_namespace():
            raise KvpactError(
                f"{where} is on another host or in another pid namespace; all ranks must share this one's"
            )
        try:
            descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise KvpactError(
                f"{where} cannot be opened ({error.strerror}): the worker must be alive and run as the same user"
            ) from error
        try:
            found = os.fstat(descriptor)
            expected = (address.device, address.inode, address.classes[-1].end + HUGE_BYTES)
            if (found.st_dev, found.st_ino, found.st_size) != expected:
                raise KvpactError(
                    f"{where} is not what descriptor {address.descriptor} shows now (device, inode, bytes): expected "
                    f"{expected}, found {(found.st_dev, found.st_ino, found.st_size)}; the worker has closed it"
                )
            return cls(descriptor, address.classes)
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def num_slots(self) -> int:
        """The slots of all classes."""
        return self.classes[-1].slots.stop

    @property
    def usable_slots(self) -> int:
        """Slots, from number 0 on, that this rank can copy now; a device may pin them one after the other."""
        return self._usable[0] - 1 if self._usable[0] else self.num_slots

    @usable_slots.setter
    def usable_slots(self, count: int) -> None:
        self._usable[0] = count + 1

    @property
    def rank_slot_bytes(self) -> int:
        """Of this rank's piece of the largest slot."""
        return max(one.slot_bytes for one in self.classes)

    def address(self) -> SegmentAddress:
        """What another process of this host needs to attach; valid as long as this segment is open."""
        found = os.fstat(self.descriptor)
        (only,) = self.classes  # an address has room for one
        return SegmentAddress(
            pid=os.getpid(),
            descriptor=self.descriptor,
            num_slots=len(only.slots),
            rank_slot_bytes=only.slot_bytes,
            device=found.st_dev,
            inode=found.st_ino,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
        )

    def class_of(self, slot: int) -> SlotClass:
        """Raises PactViolation for a slot that is not there."""
        for one in self.classes:
            if slot in one.slots:
                return one
        raise PactViolation(f"slot {slot} is outside the arena's {self.num_slots} slots")

    def slot_view(self, slot: int) -> memoryview:
        """The piece of `slot`, writable and page aligned. Raises PactViolation for a slot that is not there."""
        slot_class = self.class_of(slot)
        start = slot_class.start_of(slot)
        return self.memory[start : start + slot_class.slot_bytes]

    def class_view(self, slot_class: SlotClass) -> memoryview:
        """All slots of a class, one behind the other, writable."""
        return self.memory[slot_class.offset : slot_class.end]

    def address_of(self, slot_class: SlotClass) -> int:
        """Where this process has the first slot of the class, in bytes."""
        return self.mapped_at + slot_class.offset

    def use(self, slots: Sequence[int]) -> None:
        """These slots are in use, or about to be: have the pages of the ones after them ready."""
        for one in self.classes:
            last = max((slot for slot in slots if slot in one.slots), default=None)
            if last is not None:
                self.pages.use(one.start_of(last + 1))

    def place_pages(self, *, huge: bool, node: int | None = None) -> None:
        """Before any page is taken: they are to be huge ones, and to come from this node, if the kernel has them."""
        if node is not None:
            try:
                numa.prefer(node, self.mapped_at, len(self.memory))
            except OSError as error:
                logger.info("arena: its memory may lie on any node, not only on the device's, %d: %s", node, error)
        self.pages.huge = huge
        if not huge:
            self._advise(mmap.MADV_NOHUGEPAGE)

    def _advise(self, *advices: int) -> None:
        for advice in advices:
            with contextlib.suppress(OSError):  # the kernel does not know it
                self._mapping.madvise(advice)

    def close(self) -> None:
        """Free the memory. Exported views keep the mapping alive until the last of them is released."""
        if self._closed:
            return
        self._closed = True
        self.pages.close()
        with contextlib.suppress(BufferError):
            self.memory.release()
            self.notice.release()
            self._usable.release()
            self._mapping.close()
        os.close(self.descriptor)


class Arena:
    """All ranks' segments, in rank order: a slot is one piece of each. The scheduler's process works on this.

    Raises PactViolation without a rank, and if a slot is of one class on one rank and of another on the next.
    """

    def __init__(self, segments: Sequence[ArenaSegment]) -> None:
        if not segments:
            raise PactViolation("an arena needs the segment of at least one rank")
        self.segments = tuple(segments)
        self.slots = _slots_of_all(self.segments)
        """The numbers of each class's slots of which every rank has its piece."""
        self.num_slots = self.slots[-1].stop
        """All slots have lower numbers."""
        self.slot_bytes = sum(segment.rank_slot_bytes for segment in segments)
        """Of the largest slot, over all ranks."""
        self.rank_slot_bytes = max(segment.rank_slot_bytes for segment in segments)
        """Of the largest slot, on the rank that has most of it."""
        self._growing = any(segment.usable_slots < segment.num_slots for segment in segments)

    @property
    def usable_slots(self) -> int:
        """Slots, from number 0 on, that all ranks can copy now; only grows, and costs nothing once all are usable."""
        if not self._growing:
            return self.num_slots
        usable = min(segment.usable_slots for segment in self.segments)
        self._growing = usable < self.num_slots
        return min(usable, self.num_slots)

    def slot_views(self, slot: int) -> list[memoryview]:
        """One writable, page-aligned view per rank; their concatenation is the slot's payload."""
        return [segment.slot_view(slot) for segment in self.segments]

    def close(self) -> None:
        """Close every segment."""
        for segment in self.segments:
            segment.close()


def _slots_of_all(segments: Sequence[ArenaSegment]) -> tuple[range, ...]:
    if len({tuple(one.slots.start for one in segment.classes) for segment in segments}) > 1:
        raise PactViolation("the ranks number their slot classes differently")
    classes = zip(*(segment.classes for segment in segments), strict=True)
    return tuple(range(ones[0].slots.start, min(one.slots.stop for one in ones)) for ones in classes)


def _require_available(descriptor: int, num_slots: int, rank_slot_bytes: int, ranks_on_host: int) -> None:
    """Raise ConfigError if the machine cannot give so many arenas of this size, and all that other engines may take."""
    wanted, available = num_slots * rank_slot_bytes * ranks_on_host, available_memory_bytes()
    count, promised = 0, 0
    if wanted * MANY_ENGINES > available:
        count, promised = promised_elsewhere(MEMFD, os.fstat(descriptor), by_siblings=ranks_on_host == 1)
    if wanted + promised > available:
        others = f", other engines here ({count} arenas) may take {format_size(promised)} more" if promised else ""
        raise ConfigError(
            f"memory: the arena wants {format_size(wanted)} ({ranks_on_host} x {num_slots} blocks of "
            f"{format_size(rank_slot_bytes)}){others}, this machine or its container has {format_size(available)} "
            f"available; set `memory` below {'that, for each engine' if promised else 'that'}"
        )


def slots_for(memory_bytes: int, rank_slot_bytes: int, world_size: int) -> int:
    """The number of slots in `memory_bytes`, the sum over all ranks. Raises ConfigError below `MINIMUM_SLOTS`."""
    slot_bytes = rank_slot_bytes * world_size
    slots = memory_bytes // slot_bytes
    if slots < MINIMUM_SLOTS:
        raise ConfigError(
            f"memory: {format_size(memory_bytes)} holds {slots} blocks of {format_size(slot_bytes)} each (all layers, "
            f"{world_size} ranks); the least that works is {format_size(MINIMUM_SLOTS * slot_bytes)}, a useful cache "
            "has room for the blocks of several prompts"
        )
    return slots
