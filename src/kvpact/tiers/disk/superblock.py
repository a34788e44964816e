"""The first page of a slab: what the file is, for whom, and who has it open.

Owns its layout and checksum, and the marks beside the slabs for runs whose records are not served.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from kvpact.errors import DataError, TierError
from kvpact.identity.keys import Namespace
from kvpact.own_files import Access, replace_own
from kvpact.tiers.base import HEADER_BYTES, RecordHeader
from kvpact.tiers.record import RUN_BYTES

PAGE_BYTES = 4096
"""The alignment of memory, offsets and lengths that O_DIRECT needs on every file system in use."""

SLAB_MAGIC = b"kvpactSL"
SLAB_FORMAT = 1
"""Incremented when the layout changes; a slab of another format is not touched."""

_REFUTED_SUFFIX = ".refuted"

_TABLE_ROOM = 4
"""A new table has room for this many times the slots, so that the capacity can grow without loss of blocks. The room is
a hole in the file, but counts as if it were filled: 1 KiB for each slot, which usually has a MiB."""

_FIXED = struct.Struct("<8sIIQQ32s")
_CHECKSUM = struct.Struct("<Q")
_OWNER = struct.Struct("<QQ")
OWNER_AT = PAGE_BYTES - _OWNER.size
"""Offset of the part that changes with every opening."""

_CHECKSUM_AT = OWNER_AT - _CHECKSUM.size


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
        """Bytes charged against the directory's capacity: allocated, or still allowed to grow into."""
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
        return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked)) + self.encode_owner()

    def encode_owner(self) -> bytes:
        """The part at `OWNER_AT`: bytes claimed, and the owner's process id."""
        return _OWNER.pack(self.claim_bytes, self.pid)

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
        return cls(slot_bytes, table_slots, namespace, *_OWNER.unpack_from(raw, OWNER_AT))

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
    """Runs whose records in the slabs of a folder are not served: each has left an empty file there."""
    found = (path.stem for path in folder.glob(f"*{_REFUTED_SUFFIX}"))
    return frozenset(bytes.fromhex(name) for name in found if re.fullmatch(f"[0-9a-f]{{{2 * RUN_BYTES}}}", name))


def refute_in(folder: Path, run: bytes, access: Access) -> None:
    """Mark a run invalid in the slabs of a folder: engines that open or scan them afterwards serve none of it.

    Raises OSError.
    """
    replace_own(folder / f"{run.hex()}{_REFUTED_SUFFIX}", b"", access, durable=True)
