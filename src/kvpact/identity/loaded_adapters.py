"""Reports of a rank on its loaded adapters in its segment's last page: the state of their files, by id.

Owns the page after `notices.WORD_END`: one check over a table of entries of fixed size. The worker writes it when it
loads an adapter; the scheduler side reads it when it has requests with adapters. Does not interpret stamps.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from kvpact.identity.notices import WORD_END

STAMP_BYTES: Final = 16
"""Bytes of a stamp: a digest of the files' names, sizes and times."""

NO_STAMP: Final = bytes(STAMP_BYTES)
"""Stamp of an adapter whose files were in an unknown state when they were loaded."""

HEAD_BYTES: Final = 16
WRITES, CHECK = range(2)
"""Places of the numbers in the table's head, 8 bytes each: count of writes, and a checksum of the table."""

ENTRY = struct.Struct("<q16sQ")
"""Id, stamp, and 1 for an entry in use."""

NOT_SEEN = -1
"""Number that is no valid count of writes."""

TRIES = 8
"""Most reads of a table that is being written; a write takes some microseconds."""


def max_entries(page_bytes: int) -> int:
    """Most adapters of a page; with more, the one loaded first is dropped."""
    return (page_bytes - WORD_END - HEAD_BYTES) // ENTRY.size


def _check(table: bytes, writes: int) -> int:
    return crc32(table, writes & 0xFFFFFFFF)


class LoadedAdaptersWriter:
    """Only writer of a rank's table, in the rank."""

    def __init__(self, page: memoryview) -> None:
        self._head = page[WORD_END : WORD_END + HEAD_BYTES].cast("Q")
        self._table = page[WORD_END + HEAD_BYTES :]
        self._room = max_entries(len(page))
        self._stamps: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        """Id -> place in the table and stamp, in the order of loading."""
        self._lock = threading.Lock()

    def loaded(self, number: int, stamp: bytes) -> None:
        """Report that the rank computes requests with this id from files of this `stamp`, or `NO_STAMP`, from now on.

        Raises struct.error for an id that does not fit into 64 bits.
        """
        entry = ENTRY.pack(number, stamp, 1)
        with self._lock:
            place, _ = self._stamps.pop(number, (len(self._stamps), NO_STAMP))
            if place == self._room:
                _, (place, _) = self._stamps.popitem(last=False)
            self._stamps[number] = (place, stamp)
            self._table[place * ENTRY.size : (place + 1) * ENTRY.size] = entry
            writes = self._head[WRITES] + 1
            self._head[CHECK] = _check(bytes(self._table), writes)
            self._head[WRITES] = writes

    def stamp(self, number: int) -> bytes | None:
        """Last stamp of this id; None if there was none, or it was dropped."""
        with self._lock:
            entry = self._stamps.get(number)
        return entry[1] if entry is not None else None

    def close(self) -> None:
        """Release the page."""
        self._head.release()
        self._table.release()


class LoadedAdapters:
    """Reader of all ranks' tables on the scheduler side, in rank order, as they were at the last read."""

    def __init__(self, pages: Sequence[memoryview]) -> None:
        self._heads = [page[WORD_END : WORD_END + HEAD_BYTES].cast("Q") for page in pages]
        self._tables = [page[WORD_END + HEAD_BYTES :] for page in pages]
        self._seen = [0] * len(pages)
        self._stamps: list[dict[int, bytes] | None] = [{} for _ in pages]
        """Stamps by id, per rank; None for a rank that was writing at the last read, so that they are unknown."""

    def look(self) -> bool:
        """Read the tables; returns whether any rank has written since the last read."""
        if [head[WRITES] for head in self._heads] == self._seen:
            return False
        for rank in range(len(self._heads)):
            if not any(self._read(rank) for _ in range(TRIES)):
                self._seen[rank] = NOT_SEEN
                self._stamps[rank] = None
        return True

    def all_have(self, number: int, stamp: bytes) -> bool:
        """True if every rank has loaded the id from files of this stamp."""
        return stamp != NO_STAMP and all(stamps is not None and stamps.get(number) == stamp for stamps in self._stamps)

    def none_has_other(self, number: int, stamp: bytes) -> bool:
        """True if no rank has loaded the id from files of another stamp."""
        return all(stamps is not None and stamps.get(number, stamp) == stamp for stamps in self._stamps)

    def close(self) -> None:
        """Release the pages."""
        for view in (*self._heads, *self._tables):
            view.release()

    def _read(self, rank: int) -> bool:
        """Read a rank's table; False if it was being written."""
        writes, check = self._heads[rank].tolist()
        table = bytes(self._tables[rank])
        if writes and _check(table, writes) != check:
            return False
        self._seen[rank] = writes
        whole = table[: len(table) // ENTRY.size * ENTRY.size]
        self._stamps[rank] = {number: stamp for number, stamp, is_entry in ENTRY.iter_unpack(whole) if is_entry}
        return True
