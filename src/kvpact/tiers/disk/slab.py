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
import re
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from kvpact.errors import DataError, TierError
from kvpact.identity.keys import Namespace
from kvpact.own_files import PRIVATE, UNABLE, Access, lost_from, replace_own, sync_file, sync_folder
from kvpact.tiers.base import HEADER_BYTES, BlockBuffer, RecordHeader
from kvpact.tiers.disk.file_lock import lock_file
from kvpact.tiers.record import RUN_BYTES, bytes_of
from kvpact.tiers.vectored import VectoredCall, completely

PAGE_BYTES = 4096
"""The alignment of memory, offsets and lengths that O_DIRECT needs on every file system in use."""

SLAB_MAGIC = b"kvpactSL"
SLAB_FORMAT = 1
"""Incremented when the layout changes; a slab of another format is not touched."""

SLAB_SUFFIX = ".slab"
_UNFINISHED_SUFFIX = ".new"
_REFUTED_SUFFIX = ".refuted"

_TABLE_ROOM = 4
"""A new table has room for this many times the slots, so that the capacity can grow without loss of blocks. The room is
a hole in the file, but counts as if it were filled: 1 KiB for each slot, which usually has a MiB."""

_libc = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of its fallocate, which Python's has not

_FIXED = struct.Struct("<8sIIQQ32s")
_CHECKSUM = struct.Struct("<Q")
_OWNER = struct.Struct("<QQ")
_OWNER_AT = PAGE_BYTES - _OWNER.size
_CHECKSUM_AT = _OWNER_AT - _CHECKSUM.size


class SuperblockError(TierError, DataError):
    """The file begins as a slab of this format, but its superblock is damaged."""


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of a slab. `claim_bytes` is the size to which its present or last owner, `pid`, may let it grow.

    A larger file has holes, and takes no more than that of the disk. Both change with every opening and lie outside the
    checksum; only messages and the rule of room depend on them. `refuted` are the runs whose records are not served, by
    the files beside the slab.
    """

    slot_bytes: int
    table_slots: int
    namespace: Namespace
    claim_bytes: int = 0
    pid: int = 0
    refuted: frozenset[bytes] = frozenset()

    @property
    def table_bytes(self) -> int:
        """Bytes of the header table, up to the page where slot 0 starts."""
        return -(-self.table_slots * HEADER_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def payload_at(self) -> int:
        """Where slot 0 starts in the file."""
        return PAGE_BYTES + self.table_bytes

    def file_bytes(self, slots: int) -> int:
        """The size of the file with this many slots."""
        return self.payload_at + slots * self.slot_bytes

    def taken_bytes(self, status: os.stat_result) -> int:
        """What the file takes of its directory's capacity: what is or may be filled of it."""
        return min(status.st_size, max(self.payload_at, self.claim_bytes, 512 * status.st_blocks))

    def slots_in(self, file_bytes: int) -> int:
        """Number of whole slots in a file of this size."""
        return min(self.table_slots, max(0, file_bytes - self.payload_at) // self.slot_bytes)

    @classmethod
    def for_capacity(
        cls, namespace: Namespace, slot_bytes: int, capacity_bytes: int, table_slots: int = 1
    ) -> Superblock:
        """The layout of a new slab of at most `capacity_bytes`, with as many slots as fit. May have room for none.

        Its table has room for `table_slots` slots or more.
        """
        slots = max(0, capacity_bytes - PAGE_BYTES) // (slot_bytes + _TABLE_ROOM * HEADER_BYTES)
        while True:
            layout = cls(slot_bytes, max(table_slots, _TABLE_ROOM * slots), namespace)
            if not slots or layout.file_bytes(slots) <= capacity_bytes:
                return layout
            slots -= 1

    def header(self, slot: int, raw: bytes | memoryview) -> RecordHeader:
        """The header in `raw`, of the record in `slot`. Raises RecordError."""
        return RecordHeader.decode(
            raw,
            namespace=self.namespace.digest,
            length=None,
            max_length=self.slot_bytes,
            slot=slot,
            refuted=self.refuted,
        )

    def encode(self) -> bytes:
        """One page. Raises TierError if the namespace's description does not fit."""
        text = self.namespace.describe().encode()
        if (room := _CHECKSUM_AT - _FIXED.size - 4) < len(text):
            raise TierError(f"the namespace's description has {len(text)} bytes; a slab has room for {room}")
        fixed = _FIXED.pack(SLAB_MAGIC, SLAB_FORMAT, 0, self.slot_bytes, self.table_slots, self.namespace.digest)
        checked = (fixed + len(text).to_bytes(4, "little") + text).ljust(_CHECKSUM_AT, b"\0")
        return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked)) + _OWNER.pack(self.claim_bytes, self.pid)

    @classmethod
    def decode(cls, raw: bytes, path: Path) -> Superblock:
        """The superblock in `raw`.

        Raises:
            SuperblockError: the file is one of our slabs, without contents to lose.
            TierError: the file is no slab, or one of another format.
        """
        if not raw.strip(b"\0"):
            raise SuperblockError(f"{path} has an empty superblock")
        if raw[: len(SLAB_MAGIC)] != SLAB_MAGIC[: len(raw)]:
            raise TierError(f"{path} is not a kvpact slab: it starts with {raw[:8]!r}; move it away")
        if len(raw) < PAGE_BYTES:
            raise SuperblockError(f"{path} is cut off after {len(raw)} bytes, inside its superblock")
        _, version, _, slot_bytes, table_slots, digest = _FIXED.unpack_from(raw)
        if version != SLAB_FORMAT:
            raise TierError(
                f"{path} is a slab of format {version}; this release reads format {SLAB_FORMAT}. "
                f"Delete the file to start an empty cache, or use the release that wrote it"
            )
        if xxhash.xxh3_64_intdigest(raw[:_CHECKSUM_AT]) != _CHECKSUM.unpack_from(raw, _CHECKSUM_AT)[0]:
            raise SuperblockError(f"{path} has a damaged superblock: its checksum does not match")
        size = int.from_bytes(raw[_FIXED.size : _FIXED.size + 4], "little")
        try:
            namespace = Namespace.parse(raw[_FIXED.size + 4 : _FIXED.size + 4 + size])
        except DataError as error:
            raise SuperblockError(f"{path} has a superblock without a namespace: {error}") from None
        if namespace.digest != digest:
            raise SuperblockError(f"{path} names its namespace {digest.hex()[:16]} but describes {namespace.name}")
        return cls(slot_bytes, table_slots, namespace, *_OWNER.unpack_from(raw, _OWNER_AT))

    @classmethod
    def read(cls, descriptor: int, path: Path, refuted: frozenset[bytes] = frozenset()) -> Superblock:
        """The superblock of an open file, which serves no record of a `refuted` run: see `refuted_in`.

        Raises as `decode` does; a file without room for its table is damaged.
        """
        found = cls.decode(os.pread(descriptor, PAGE_BYTES, 0), path)
        file_bytes = os.fstat(descriptor).st_size
        if found.slot_bytes < 1 or found.payload_at > file_bytes:
            raise SuperblockError(
                f"{path} has {file_bytes} bytes and claims a table of {found.table_slots} slots of {found.slot_bytes} "
                "bytes: it is damaged"
            )
        return replace(found, refuted=refuted)


def refuted_in(folder: Path) -> frozenset[bytes]:
    """The runs whose records in the slabs of a folder are not served: each has left an empty file there."""
    found = (path.stem for path in folder.glob(f"*{_REFUTED_SUFFIX}"))
    return frozenset(bytes.fromhex(name) for name in found if re.fullmatch(f"[0-9a-f]{{{2 * RUN_BYTES}}}", name))


def refute_in(folder: Path, run: bytes, access: Access) -> None:
    """Have no record of this run served from the slabs of a folder, by engines that open or look at them from now on.

    Raises OSError.
    """
    replace_own(folder / f"{run.hex()}{_REFUTED_SUFFIX}", b"", access, durable=True)


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
        """Whether payloads bypass the page cache."""
        return self._direct is not None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._buffered < 0

    def lost(self) -> str:
        """Why the open file is not what its path names now; "" if it is. Raises OSError."""
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
        slots, at = self.superblock.table_slots, PAGE_BYTES
        while at < PAGE_BYTES + slots * HEADER_BYTES:
            try:
                data = os.lseek(self._buffered, at, os.SEEK_DATA)
                at = os.lseek(self._buffered, data, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole from there on
                    return
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                data, at = at, PAGE_BYTES + slots * HEADER_BYTES
            first, end = (data - PAGE_BYTES) // HEADER_BYTES, -(-(at - PAGE_BYTES) // HEADER_BYTES)
            if first < min(end, slots):
                yield first, min(end, slots)

    def read_ahead(self, first: int, count: int) -> None:
        """Have the kernel read the headers of `count` slots meanwhile."""
        offset, length = PAGE_BYTES + first * HEADER_BYTES, count * HEADER_BYTES
        with suppress(OSError):  # no more than advice
            os.posix_fadvise(self._buffered, offset, length, os.POSIX_FADV_WILLNEED)

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
        """Close the file, which releases its lock. No other thread may be reading or writing."""
        for descriptor in (self._direct, self._buffered):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._direct, self._buffered = None, -1

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
        """See `SlabReader`. A file that has lost its name gives its bytes back, although others have it open."""
        with suppress(OSError):
            if not self.closed and not self.status().st_nlink:
                os.ftruncate(self._buffered, 0)
        super().close()

    def taken_bytes(self) -> int:
        """What the file takes of its directory's capacity: less than its size, if it has holes."""
        return self.superblock.taken_bytes(self.status())

    def show_use(self, after: float) -> None:
        """Have the file's time say that its engine runs, if that was said more than `after` seconds ago."""
        with suppress(OSError):  # a file system that sets no times
            if time.time() - self.status().st_mtime > after:
                os.utime(self._buffered)

    def claim(self, claim_bytes: int, pid: int) -> None:
        """Record the owner and how large the slab may grow."""
        self.superblock = replace(self.superblock, claim_bytes=claim_bytes, pid=pid)
        self._write(self._buffered, [memoryview(_OWNER.pack(claim_bytes, pid))], _OWNER_AT)

    def shrink(self, slots: int) -> None:
        """Give all slots from `slots` on back to the file system, with the records in them."""
        self.clear_headers(range(slots, self.slots))
        os.ftruncate(self._buffered, self.superblock.file_bytes(slots))
        self.slots = slots

    def grow(self, slots: int) -> None:
        """Have the file system allocate `slots` slots with their headers. Raises OSError; then it has no slot more."""
        start, end = self.superblock.file_bytes(self.slots), self.superblock.file_bytes(slots)
        headers = PAGE_BYTES + self.slots * HEADER_BYTES, (slots - self.slots) * HEADER_BYTES
        try:
            self._allocate(*headers)  # else a full disk has no room for them
            self._allocate(start, end - start)
        except OSError:
            os.ftruncate(self._buffered, start)
            raise
        self.slots = slots

    def _allocate(self, offset: int, length: int) -> None:
        """Have the file system keep room for these bytes of the file, which are part of it afterwards.

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
        """Have the file system allocate `slots`, in holes of the file. Raises OSError; then it has some of them."""
        size, slot_bytes = self.superblock.file_bytes, self.superblock.slot_bytes
        for first, count in runs(slots):
            self._allocate(size(slots[first]), count * slot_bytes)

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


class Closable(Protocol):
    """What has a `close`."""

    def close(self) -> None: ...


_left_to_parent: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(held: Closable) -> None:
    """Close `held` in every forked child, which would keep its lock after the parent was killed. `close` idempotent."""
    _left_to_parent.add(held)


def _let_go_in_child() -> None:
    for held in list(_left_to_parent):
        held.close()


os.register_at_fork(after_in_child=_let_go_in_child)
