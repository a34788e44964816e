"""Snapshot of the records in a slab that another engine writes, for millions of them, in arrays.

Owns the map from blocks to slots, and the blocks that must not be served. Reads no file: `ForeignSlab` passes it the
header table piece by piece.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.identity.keys import KEY_BYTES, BlockKey
from kvpact.index.key_table import MAX_ROWS, NONE, KeyTable, Names, RowArray
from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.disk.slab import digest_table
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.record import FIELDS, valid_in_slab

_NOTHING: Final = 0
"""The slot has no record, or none that can be used."""
_KNOWN: Final = 1
_REFUSED: Final = 2
"""The slot's record must not be served until another one is there."""

_FIRST_RUN: Final = 16
"""Keys that are looked up together at first; four times as many with each turn in which all are there."""

PART: Final = 1 << 16
"""Rows that are worked on at once where all rows are, so that what is computed of them stays small."""


class ForeignRecord(NamedTuple):
    """One record, as its header describes it."""

    key: BlockKey
    slot: int
    digest: bytes
    length: int
    written: float
    checksum: int
    """Checksum of the header, including the time of the block's last use."""


class ForeignRecords:
    """The records of one slab. 0.5 us of CPU time and 110 to 145 bytes of memory for each.

    `run` and `lookup` never wait. While records change they may miss a block, or still find one that is gone; what is
    read goes by `find`. Of two records of one block the one that was learned last counts.
    """

    def __init__(self, superblock: Superblock, slots: int) -> None:
        """Nothing is known of the `slots` that the file has now."""
        self._superblock = superblock
        self._lock = threading.Lock()
        rows = min(slots, MAX_ROWS - 1)
        self._table = KeyTable(rows + 1)
        self._state = np.zeros(rows, np.uint8)
        self._checksums = np.zeros(rows, np.uint64)
        """The checksum of each slot's header when it was learned last; 0 of an empty one."""
        self._parents = np.zeros((rows, KEY_BYTES // 8), np.uint64)
        self._digests = digest_table(rows)
        self._lengths = np.zeros(rows, np.uint32 if superblock.slot_bytes < 1 << 32 else np.uint64)
        self._written = np.zeros(rows, np.float64)

    def __len__(self) -> int:
        """Records that may be served."""
        return len(self._table)

    # Looking

    def run(self, keys: Sequence[BlockKey], start: int) -> int:
        """Number of blocks in a row from `start` that are known. 0.1 us for each."""
        table = self._table
        at = start
        count = _FIRST_RUN
        if start >= len(keys) or table.find(keys[start]) == NONE:
            return 0
        while at < len(keys):
            rows = table.find_each(table.names(keys[at : at + count]))
            if (unknown := rows < 0).any():
                return at + int(unknown.argmax()) - start
            at += len(rows)
            count *= 4
        return len(keys) - start

    def lookup(self, keys: Sequence[BlockKey]) -> NDArray[np.bool_]:
        """True for each block that is known."""
        return self._table.find_each(self._table.names(keys)) >= 0

    def find(self, keys: Sequence[BlockKey]) -> list[ForeignRecord | None]:
        """The record of each block; None where none is known."""
        with self._lock:
            return self._find(keys)

    def _find(self, keys: Sequence[BlockKey]) -> list[ForeignRecord | None]:
        rows = self._table.find_each(self._table.names(keys))
        known = rows[rows >= 0]
        records = map(
            ForeignRecord,
            self._table.keys(known),
            known.tolist(),
            self._digests[known].tolist(),
            self._lengths[known].tolist(),
            self._written[known].tolist(),
            self._checksums[known].tolist(),
        )
        return [next(records) if row >= 0 else None for row in rows.tolist()]

    # Learning, by one thread at a time

    def resize(self, slots: int) -> None:
        """The file has this many slots now: forget what is known of those after them."""
        with self._lock:
            if slots > len(self._state):
                self._grow(min(max(slots, 2 * len(self._state)), self._superblock.table_slots, MAX_ROWS - 1))
            beyond = slots + np.flatnonzero(self._state[slots:] == _KNOWN)
            self._forget(beyond)
            self._checksums[beyond] = 0

    def _grow(self, rows: int) -> None:
        def larger(before: np.ndarray) -> np.ndarray:
            after = np.zeros((rows, *before.shape[1:]), before.dtype)
            after[: len(before)] = before
            return after

        table = KeyTable(rows + 1)
        for first in range(0, len(self._state), PART):
            known = first + np.flatnonzero(self._state[first : first + PART] == _KNOWN)
            table.add_names(self._table.names_at(known), known)
        for name in ("_state", "_checksums", "_parents", "_digests", "_lengths", "_written"):
            setattr(self, name, larger(getattr(self, name)))
        self._table = table  # last: its rows are looked up in the others

    def learn(self, first: int, table: bytearray) -> None:
        """Record changes in the headers of neighbouring slots from `first` on.

        One that is being written at this moment, or is damaged, is no record, and looked at again the next time.
        """
        headers = np.frombuffer(table, FIELDS)[: max(0, len(self._state) - first)]
        changed = np.flatnonzero(headers["checksum"] != self._checksums[first : first + len(headers)])
        if not len(changed):
            return
        headers = headers[changed]
        slots = changed + first
        block = self._superblock
        valid = valid_in_slab(headers, block.namespace.digest, block.slot_bytes, slots, block.refuted)
        invalid = np.flatnonzero(~valid)
        is_empty = ~headers[invalid].view(np.uint64).reshape(-1, HEADER_BYTES // 8).any(axis=1)
        empty = slots[invalid[is_empty]]
        with self._lock:
            self._forget(slots)
            self._state[empty] = _NOTHING
            self._checksums[empty] = 0
            self._note(headers[valid], slots[valid])

    def _note(self, headers: np.ndarray, slots: RowArray) -> None:
        """Enter valid records into slots of which nothing is known; the lock is held."""
        self._checksums[slots] = headers["checksum"]
        if (same := self._still_refused(headers, slots)).any():
            headers = headers[~same]
            slots = slots[~same]
        keys = np.ascontiguousarray(headers["key"])
        if not (last := _last_of_each(keys)).all():
            headers = headers[last]
            slots = slots[last]
            keys = keys[last]
        elsewhere = self._table.find_each(keys)
        self._forget(elsewhere[elsewhere >= 0])
        self._parents[slots] = headers["parent"]
        self._digests[slots] = headers["digest"]
        self._lengths[slots] = headers["length"]
        self._written[slots] = headers["written"]
        self._table.add_names(keys, slots)
        self._state[slots] = _KNOWN

    def _still_refused(self, headers: np.ndarray, slots: RowArray) -> NDArray[np.bool_]:
        """True for each header of a refused record of which only the time of its last use has changed."""
        same: NDArray[np.bool_] = self._state[slots] == _REFUSED
        if same.any():
            for name, known in (("digest", self._digests), ("written", self._written), ("length", self._lengths)):
                same &= headers[name] == known[slots]
            same &= (headers["parent"] == self._parents[slots]).all(axis=1)
        return same

    def _forget(self, slots: RowArray) -> None:
        """Forget the records of slots; the lock is held."""
        known = slots[self._state[slots] == _KNOWN]
        self._table.remove_each(known.tolist())
        self._state[known] = _NOTHING

    # Refusing

    def refuse(self, record: ForeignRecord) -> None:
        """Refuse a record until its slot's header changes; one that has changed since is read by a later scan."""
        with self._lock:
            if self._find([record.key]) == [record]:
                self._refuse(np.array([record.slot]))

    def _refuse(self, slots: RowArray) -> None:
        self._forget(slots)
        self._state[slots] = _REFUSED

    def refuse_after(self, keys: Iterable[BlockKey]) -> int:
        """Refuse these blocks and all after them; return how many that were."""
        with self._lock:
            doomed = list(keys)
            if not doomed or not len(self._table):
                return 0
            is_doomed = np.zeros(len(self._state) + 1, np.bool_)
            rows = self._table.find_each(self._table.names(doomed))
            is_doomed[rows[rows >= 0]] = True
            is_doomed[self._children_of(doomed)] = True
            if not is_doomed.any():
                return 0
            before = self._rows_before()
            for _ in range(len(before).bit_length()):  # a circle, which no valid chain has, never ends
                if not (before >= 0).any():
                    break
                is_doomed |= is_doomed[before]
                before = before[before]  # twice as far with each turn
            slots = np.flatnonzero(is_doomed)
            self._refuse(slots)
            return len(slots)

    def _children_of(self, keys: Sequence[BlockKey]) -> RowArray:
        """The rows of known blocks that come next after these."""
        sought = set(keys)
        found = list[int]()
        firsts = np.sort(self._table.names(keys)[:, 0])
        for first in range(0, len(self._state), PART):
            words = self._parents[first : first + PART, 0]
            alike = firsts[np.minimum(np.searchsorted(firsts, words), len(firsts) - 1)] == words
            rows = first + np.flatnonzero(alike & (self._state[first : first + PART] == _KNOWN))
            found += [row for row in rows.tolist() if self._parents[row].tobytes() in sought]
        return np.array(found, np.int64)

    def _rows_before(self) -> NDArray[np.int32]:
        """Return per row the row of the block before it, NONE for no known one; and at the end NONE for NONE itself."""
        before = np.full(len(self._state) + 1, NONE, np.int32)
        for first in range(0, len(self._state), PART):
            known = first + np.flatnonzero(self._state[first : first + PART] == _KNOWN)
            before[known] = self._table.find_each(self._parents[known])
        return before

    def refuse_all(self) -> None:
        """Refuse all that is known."""
        with self._lock:
            self._state[self._state == _KNOWN] = _REFUSED
            self._table = KeyTable(len(self._state) + 1)

    def check(self) -> None:
        """Verify that the table has the known slots, each under its key. Raises PactViolation."""
        with self._lock:
            known = np.flatnonzero(self._state == _KNOWN)
            if len(known) != len(self._table) or sorted(self._table.lists()) != known.tolist():
                raise PactViolation(f"{len(known)} slots have known records, and the table has {len(self._table)}")
            if (self._table.find_each(self._table.names_at(known)) != known).any():
                raise PactViolation("a record is not found under its key")


def _last_of_each(keys: Names) -> NDArray[np.bool_]:
    """Index of each key's last occurrence. In a valid slab that is all."""
    words = np.sort(keys[:, 0])
    last = np.ones(len(keys), np.bool_)
    if (words[1:] == words[:-1]).any():
        place = {key.tobytes(): number for number, key in enumerate(keys)}
        last[:] = False
        last[list(place.values())] = True
    return last
