"""One slab: a file of fixed-size slots with a table of record headers, locked by the process that writes it.

Owns the file's layout, its lock and all I/O on it. Never decides what is kept or where, and verifies no payload.

    0      superblock, 4,096 bytes: what the file is, for whom, and who has it open
    4096   header table, 256 bytes a slot, read at once on a restart
    ...    slots, `slot_bytes` each, page-aligned; a payload may be smaller, its header says how large

A slab that must shrink keeps its length and gets holes, where the blocks were that had not been used for longest.

The order of writes makes a kill at any moment harmless: the header of a slot is cleared before the slot is rewritten,
and written after its payload. The kernel keeps what a process wrote before its death, so the order suffices, and only
the superblock of a new slab is synced. A power cut may keep any part of the last writes; then the checksums find torn
records.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np

from kvpact.index.row_locks import close_in_children
from kvpact.own_files import PRIVATE, UNABLE, Access, lost_from, sync_file, sync_folder
from kvpact.tiers.base import HEADER_BYTES, BlockBuffer
from kvpact.tiers.disk.file_lock import lock_file
from kvpact.tiers.disk.superblock import OWNER_AT, PAGE_BYTES, Superblock
from kvpact.tiers.record import bytes_of
from kvpact.tiers.vectored import VectoredCall, completely

SLAB_SUFFIX = ".slab"
_UNFINISHED_SUFFIX = ".new"
_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE = 1  # flags of its fallocate, which Python's has not
_PUNCH_HOLE = 2


class SlabReader:
    """An open slab, to be read; another process may write it. Thread-safe; every method may raise OSError."""

    preadv = staticmethod(os.preadv)
    """Every read of the file goes through this; tests interrupt each one."""

    def __init__(self, path: Path, descriptor: int, superblock: Superblock, flags: int = os.O_RDONLY) -> None:
        """Take over the `descriptor` of the file at `path`, which was opened with `flags`."""
        self.path = path
        self.superblock = superblock
        self._buffered = descriptor
        self._direct = _open_direct(descriptor, flags)
        close_in_children(self)

    @property
    def direct(self) -> bool:
        """True if payloads bypass the page cache."""
        return self._direct is not None

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._buffered < 0

    def lost(self) -> str:
        """Reason why the open file is not what its path names now; "" if it is. Raises OSError."""
        return lost_from(self.path, self._buffered)

    def status(self) -> os.stat_result:
        """Return the status of the open file, which may have lost its name."""
        return os.fstat(self._buffered)

    def read_headers(self, first: int, count: int) -> bytearray:
        """The headers of `count` slots from `first` on, in one read; zeros beyond the end of the file."""
        table = bytearray(count * HEADER_BYTES)
        self._read(self._buffered, [memoryview(table)], PAGE_BYTES + first * HEADER_BYTES)
        return table

    def written_headers(self) -> Iterator[tuple[int, int]]:
        """[first, end) of the slots whose headers are not in a hole of the file, as far as the file system says."""
        slots = self.superblock.table_slots
        at = PAGE_BYTES
        while at < PAGE_BYTES + slots * HEADER_BYTES:
            try:
                data = os.lseek(self._buffered, at, os.SEEK_DATA)
                at = os.lseek(self._buffered, data, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole from there on
                    return
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                data = at
                at = PAGE_BYTES + slots * HEADER_BYTES
            first = (data - PAGE_BYTES) // HEADER_BYTES
            end = -(-(at - PAGE_BYTES) // HEADER_BYTES)
            if first < min(end, slots):
                yield first, min(end, slots)

    def read_ahead(self, first: int, count: int) -> None:
        """Advise the kernel to read the headers of `count` slots ahead."""
        offset = PAGE_BYTES + first * HEADER_BYTES
        with suppress(OSError):  # no more than advice
            os.posix_fadvise(self._buffered, offset, count * HEADER_BYTES, os.POSIX_FADV_WILLNEED)

    def read_header(self, slot: int) -> bytes:
        """The header of one slot as it is on disk."""
        return os.pread(self._buffered, HEADER_BYTES, PAGE_BYTES + slot * HEADER_BYTES)

    def read_payloads(self, slots: Sequence[int], buffers: Sequence[BlockBuffer]) -> int:
        """Fill `buffers[i]` from `slots[i]`; return the number of leading blocks that were there in full."""
        for first, count in self._runs(slots, buffers):
            wanted = buffers[first : first + count]
            got = self._transfer(self._read, wanted, self.superblock.file_bytes(slots[first]))
            if got < sum(map(bytes_of, wanted)):
                return first + got // self.superblock.slot_bytes
        return len(slots)

    def _runs(self, slots: Sequence[int], buffers: Sequence[BlockBuffer]) -> Iterator[tuple[int, int]]:
        """Yield the `runs` of these slots; a block that does not fill its slot is the last of its run."""
        return runs(slots, lambda index: bytes_of(buffers[index]) < self.superblock.slot_bytes)

    def close(self) -> None:
        """Close the file and release its lock. No other thread may be reading or writing."""
        for descriptor in (self._direct, self._buffered):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._direct = None
        self._buffered = -1

    def _transfer(self, call: VectoredCall, buffers: Sequence[BlockBuffer], offset: int) -> int:
        """Bypass the page cache if this memory allows it, else use it; the kernel keeps both coherent."""
        views = [piece for piece in chain.from_iterable(buffers) if piece.nbytes]
        if not views:
            return 0
        if self._direct is not None:
            try:
                return call(self._direct, list(views), offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return call(self._buffered, views, offset)

    def _read(self, descriptor: int, views: list[memoryview], offset: int) -> int:
        return completely(self.preadv, descriptor, views, offset)


class Slab(SlabReader):
    """An open, locked slab. Reads and writes are thread-safe as long as no two threads use one slot."""

    pwritev = staticmethod(os.pwritev)
    """Every write to the file goes through this; tests interrupt each one."""

    def __init__(self, path: Path, descriptor: int, superblock: Superblock) -> None:
        """Take over the locked `descriptor` of the file at `path`."""
        super().__init__(path, descriptor, superblock, os.O_RDWR)
        self.slots = superblock.slots_in(self.status().st_size)

    @classmethod
    def create(cls, path: Path, superblock: Superblock, access: Access = PRIVATE) -> Slab:
        """A new, empty slab at `path`, complete before it has its name. Replaces what is there.

        The directory must be locked: unfinished files of others are removed.
        """
        for left in path.parent.glob(f"*{_UNFINISHED_SUFFIX}"):
            with suppress(OSError):  # gone, or somebody else's, or what only has such a name
                left.unlink()
        unfinished = path.with_suffix(_UNFINISHED_SUFFIX)
        descriptor = access.create(unfinished, os.O_RDWR)
        try:
            lock_file(descriptor)
            os.pwrite(descriptor, superblock.encode(), 0)
            os.ftruncate(descriptor, superblock.payload_at)
            sync_file(descriptor)
            os.rename(unfinished, path)
            sync_folder(path.parent)
            return cls(path, descriptor, superblock)
        except BaseException:
            os.close(descriptor)
            unfinished.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """Close the file. One that has lost its name gives its bytes back, although others have it open."""
        with suppress(OSError):
            if not self.closed and not self.status().st_nlink:
                os.ftruncate(self._buffered, 0)
        super().close()

    def taken_bytes(self) -> int:
        """Bytes charged against the directory's capacity: less than its size, if it has holes."""
        return self.superblock.taken_bytes(self.status())

    def show_use(self, after: float) -> None:
        """Set the file's time, by which its engine counts as running, if it is more than `after` seconds old."""
        with suppress(OSError):  # a file system that sets no times
            if time.time() - self.status().st_mtime > after:
                os.utime(self._buffered)

    def claim(self, claim_bytes: int, pid: int) -> None:
        """Record the owner and how large the slab may grow."""
        self.superblock = replace(self.superblock, claim_bytes=claim_bytes, pid=pid)
        self._write(self._buffered, [memoryview(self.superblock.encode_owner())], OWNER_AT)

    def shrink(self, slots: int) -> None:
        """Give all slots from `slots` on back to the file system, with the records in them."""
        self.clear_headers(range(slots, self.slots))
        os.ftruncate(self._buffered, self.superblock.file_bytes(slots))
        self.slots = slots

    def grow(self, slots: int) -> None:
        """Allocate disk space for `slots` slots with their headers. Raises OSError; then there is no slot more."""
        start = self.superblock.file_bytes(self.slots)
        end = self.superblock.file_bytes(slots)
        headers = PAGE_BYTES + self.slots * HEADER_BYTES, (slots - self.slots) * HEADER_BYTES
        try:
            self._allocate(*headers)  # else a full disk has no room for them
            self._allocate(start, end - start)
        except OSError:
            os.ftruncate(self._buffered, start)
            raise
        self.slots = slots

    def _allocate(self, offset: int, length: int) -> None:
        """Allocate disk space for these bytes of the file, which are part of it afterwards.

        One that cannot shows by a failing write that it is full. Raises OSError.
        """
        try:
            os.posix_fallocate(self._buffered, offset, length)
        except OSError as error:
            if error.errno not in {*UNABLE, errno.EINVAL}:
                raise
            os.ftruncate(self._buffered, max(self.status().st_size, offset + length))

    def punch(self, first: int, count: int) -> None:
        """Give the room of neighbouring slots back to the file system. Their headers must be clear. Raises OSError."""
        place = ctypes.c_int64(self.superblock.file_bytes(first)), ctypes.c_int64(count * self.superblock.slot_bytes)
        if _libc.fallocate(self._buffered, _PUNCH_HOLE | _KEEP_SIZE, *place):
            raise OSError(number := ctypes.get_errno(), os.strerror(number))

    def fill(self, slots: Sequence[int]) -> None:
        """Allocate disk space for `slots`, in holes of the file. Raises OSError; then some of them have it."""
        for first, count in runs(slots):
            self._allocate(self.superblock.file_bytes(slots[first]), count * self.superblock.slot_bytes)

    def write_headers(self, slots: Sequence[int], headers: Sequence[bytes]) -> None:
        """Write the headers of the records in `slots`, which makes them visible."""
        for first, count in runs(slots):
            views = [memoryview(header) for header in headers[first : first + count]]
            self._write(self._buffered, views, PAGE_BYTES + slots[first] * HEADER_BYTES)

    def clear_headers(self, slots: Sequence[int]) -> None:
        """Clear the headers of `slots`, before their payloads may be overwritten."""
        self.write_headers(slots, [bytes(HEADER_BYTES)] * len(slots))

    def write_payloads(self, slots: Sequence[int], buffers: Sequence[BlockBuffer]) -> None:
        """Write `buffers[i]` to the start of `slots[i]`, whose headers must be clear."""
        for first, count in self._runs(slots, buffers):
            self._transfer(self._write, buffers[first : first + count], self.superblock.file_bytes(slots[first]))

    def _write(self, descriptor: int, views: list[memoryview], offset: int) -> int:
        return completely(self.pwritev, descriptor, views, offset)


def digest_table(slots: int) -> np.ndarray:
    """Room for the digest of each slot's payload, 16 bytes each."""
    return np.zeros(slots, "V16")


def runs(slots: Sequence[int], is_last: Callable[[int], bool] = lambda index: False) -> Iterator[tuple[int, int]]:
    """(index of the first, count) of each run of neighbouring slots, in order: each is one read or write.

    A run ends after an index that `is_last`.
    """
    first = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1 or is_last(index - 1):
            yield first, index - first
            first = index


def _open_direct(buffered: int, flags: int) -> int | None:
    """A second descriptor that bypasses the page cache; None where the file system refuses, now or at a first read."""
    try:
        descriptor = os.open(f"/proc/self/fd/{buffered}", flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            os.preadv(descriptor, [page], 0)
        except OSError:
            os.close(descriptor)
            return None
    return descriptor
