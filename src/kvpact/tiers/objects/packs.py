"""Packs: several blocks in one object, after a table of their names and lengths.

Owns the format of an object, and remembers which pack holds which record. Never does I/O.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import xxhash

from kvpact.errors import DataError, PactViolation
from kvpact.tiers.shared.store import RecordPieces

PACK_MAGIC: Final = b"kvpactPK"
PACK_FORMAT: Final = 1
"""Incremented when the format changes; a pack of another format counts as empty."""

_HEAD: Final = struct.Struct("<8sIIQ")
_CHECKSUM: Final = struct.Struct("<Q")
HEAD_BYTES: Final = _HEAD.size + _CHECKSUM.size
_ENTRY: Final = struct.Struct("<HQ")
_LONGEST_NAME: Final = 255
"""Maximum bytes of a record's name after its group; a block's has 64."""

LITTLE_BYTES: Final = 16 << 10
"""A table of 200 blocks."""

GAP_BYTES: Final = 128 << 10
"""Unneeded bytes that one request may read to save another: a request takes as long as some megabytes."""

REMEMBERED_RECORDS: Final = 65_536
"""Most records whose places are remembered: 20 MB for tens of gigabytes of blocks. No pack has more."""


PackVersion: TypeAlias = Mapping[str, str]
"""A store's id of one version of an object, its "e_tag" and "version", to read or replace only that version."""


class PackError(DataError):
    """An object is no pack of this format, or its table is damaged: it counts as empty."""


@dataclass(frozen=True, slots=True)
class Pack:
    """Records of one object: (offset in the object, length) by name, in the order of the object.

    An object is: magic, format, number of entries, bytes of the table, xxh3-64 of all that and the table; the table,
    with each record's name after the group and its length; and the records, one after another.
    """

    name: str
    """The object's name: that of the first record it was written with, which may have been removed."""
    records: Mapping[str, tuple[int, int]]
    version: PackVersion = field(default_factory=dict)
    nbytes: int = 0
    """The size of the object."""


def encode_pack(records: Mapping[str, RecordPieces]) -> bytes:
    """The object with these records, all of one group."""
    pieces: list[bytes | memoryview] = [b""]
    table = bytearray()
    for name, record in records.items():
        rest = name.partition("/")[2].encode()
        pieces.extend(record)
        table += _ENTRY.pack(len(rest), sum(map(len, record))) + rest
    head = _HEAD.pack(PACK_MAGIC, PACK_FORMAT, len(records), len(table))
    pieces[0] = head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head + table)) + table
    return b"".join(pieces)


def table_size(start: bytes | memoryview) -> tuple[int, int]:
    """The number of records that an object claims in its `start`, and the end of its table. Raises PackError."""
    if len(start) < HEAD_BYTES:
        raise PackError(f"{len(start)} bytes, less than a pack's head")
    magic, version, count, table_bytes = _HEAD.unpack_from(start)
    if magic != PACK_MAGIC or version != PACK_FORMAT:
        raise PackError(f"no pack of format {PACK_FORMAT}: it starts with {bytes(start[:12])!r}")
    if count > REMEMBERED_RECORDS or table_bytes > count * (_ENTRY.size + _LONGEST_NAME):
        raise PackError(f"a table of {table_bytes} bytes for {count} records is none of ours")
    return count, HEAD_BYTES + table_bytes


def decode_pack(name: str, start: bytes | memoryview, object_bytes: int, version: PackVersion) -> Pack:
    """Decode the table (`start` holds all of it). A truncated object has the records that are whole.

    Raises PackError.
    """
    count, end = table_size(start)
    if len(start) < end:
        raise PackError(f"cut off in its table, at byte {len(start)} of {end}")
    table = bytes(start[HEAD_BYTES:end])
    checksum = xxhash.xxh3_64_intdigest(bytes(start[: _HEAD.size]) + table)
    if checksum != _CHECKSUM.unpack_from(start, _HEAD.size)[0]:
        raise PackError("its table does not match its checksum")
    group = name.partition("/")[0]
    records: dict[str, tuple[int, int]] = {}
    at = 0
    offset = end
    try:
        while at < len(table) and len(records) < count:
            name_bytes, length = _ENTRY.unpack_from(table, at)
            at += _ENTRY.size + name_bytes
            if offset + length > object_bytes:
                break
            records[f"{group}/{table[at - name_bytes : at].decode('ascii')}"] = offset, length
            offset += length
    except (struct.error, UnicodeDecodeError):  # a forged object may have a valid checksum
        raise PackError("its table is none") from None
    return Pack(name, records, version, object_bytes)


class PackMemory:
    """The packs seen, and which of them holds a record: bounded, thread-safe, possibly out of date."""

    def __init__(self, limit: int = REMEMBERED_RECORDS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._packs: OrderedDict[str, Pack] = OrderedDict()
        self._holders: dict[str, tuple[str, ...]] = {}
        self._records = 0

    def learn(self, pack: Pack) -> None:
        """Remember a pack instead of the one of its name; forgets the least recently used packs above the bound."""
        with self._lock:
            self._forget(pack.name)
            self._packs[pack.name] = pack
            self._records += len(pack.records)
            for name in pack.records:
                self._holders[name] = (pack.name, *self._holders.get(name, ()))
            while self._records > self._limit and len(self._packs) > 1:
                self._forget(next(iter(self._packs)))

    def forget(self, pack: str) -> None:
        """Forget a pack that is gone or has changed."""
        with self._lock:
            self._forget(pack)

    def _forget(self, name: str) -> None:
        pack = self._packs.pop(name, None)
        if pack is None:
            return
        self._records -= len(pack.records)
        for record in pack.records:
            if others := tuple(holder for holder in self._holders[record] if holder != name):
                self._holders[record] = others
            else:
                del self._holders[record]

    def holders(self, name: str) -> tuple[str, ...]:
        """The known packs that hold a record, the last seen first."""
        with self._lock:
            return self._holders.get(name, ())

    def locate(self, names: Iterable[str]) -> dict[str, Pack]:
        """Map each of these records to a known pack that holds it."""
        with self._lock:
            found = {name: self._packs[self._holders[name][0]] for name in names if name in self._holders}
            for pack in {pack.name for pack in found.values()}:
                self._packs.move_to_end(pack)
            return found

    def __len__(self) -> int:
        return self._records

    def check(self) -> None:
        """Verify that packs and holders name the same records, for tests. Raises PactViolation."""
        with self._lock:
            held = {(record, pack.name) for pack in self._packs.values() for record in pack.records}
            listed = {(record, pack) for record, packs in self._holders.items() for pack in packs}
            if held != listed or len(held) != self._records:
                raise PactViolation(
                    f"{self._records} records counted, {len(held)} in packs, {len(listed)} with holders"
                )


@dataclass(slots=True)
class Span:
    """Adjacent bytes of one pack that one request reads, and the records in them."""

    pack: Pack
    start: int
    end: int
    names: list[str]

    @property
    def is_almost_all(self) -> bool:
        """True if the whole object may be read instead: it is known to end with the span and begin little before it.

        Some servers copy the bytes of a range.
        """
        pack = self.pack
        return "e_tag" in pack.version and self.end == pack.nbytes and self.start <= LITTLE_BYTES


def spans(wanted: Mapping[str, Pack], *, head: int | None = None) -> list[Span]:
    """The spans that hold these records, or the first `head` bytes of each; a span has holes of at most `GAP_BYTES`."""
    by_pack: dict[int, tuple[Pack, list[str]]] = {}
    for name, pack in wanted.items():  # by identity, not by name: two versions of a pack may have been seen
        by_pack.setdefault(id(pack), (pack, []))[1].append(name)
    found: list[Span] = []
    for pack, names in by_pack.values():
        last: Span | None = None
        for name in sorted(names, key=lambda name: pack.records[name][0]):
            offset, length = pack.records[name]
            if last is None or offset - last.end > GAP_BYTES:
                last = Span(pack, offset, offset, [])
                found.append(last)
            last.end = offset + (length if head is None else min(length, head))
            last.names.append(name)
    return found
