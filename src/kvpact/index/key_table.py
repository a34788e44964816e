"""Table of keys, for millions of rows: the keys in one buffer, found through a hash table of numbers.

Owns the keys' bytes and the table. Knows no chains and no states; its owner says which rows are in use.
"""

from __future__ import annotations

import mmap
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import PactViolation
from kvpact.identity.keys import KEY_BYTES, BlockKey

NONE: Final = -1

MAX_ROWS: Final = 1 << 30

FEW: Final = 8
"""Number of rows below which a loop is cheaper than calls of numpy."""

RowArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float64]
Names: TypeAlias = NDArray[np.uint64]
"""Keys as numbers, an array of shape (keys, 4)."""

_WORDS: Final = KEY_BYTES // 8
_WHOLE: Final = 0xFFFF_FFFF_FFFF_FFFF

_ONE_BY_ONE: Final = 24
"""Most keys that are followed through their lists one by one."""
_ENDS = struct.Struct(f"<Q{KEY_BYTES - 16}xQ").unpack


def zeros(rows: int, kind: str) -> tuple[NDArray[np.int_], memoryview]:
    """Zeros of a dtype for each row, as an array and as the memory of it, which is faster for single rows.

    The kernel gives their memory when they are first written.
    """
    each = np.zeros(rows, kind)
    return each, memoryview(each.data)


def hash_bits(num_rows: int) -> int:
    """Bits of the hash for a table of so many rows. Raises ValueError for too many."""
    if num_rows > MAX_ROWS:
        raise ValueError(f"an index has at most {MAX_ROWS} rows, not {num_rows}")
    return 1 + max(1, (num_rows - 1).bit_length())


@dataclass(frozen=True, slots=True)
class KeyColumns:
    """Memory of a key table: zeros at first."""

    keys: mmap.mmap
    """Keys of all rows from its start on; it may be longer."""
    heads: tuple[NDArray[np.int_], memoryview]
    """First row of each list, plus 1; 0 for none."""
    next: tuple[NDArray[np.int_], memoryview]
    """Row after each row in its list, plus 1; 0 for none."""

    @classmethod
    def private(cls, num_rows: int) -> KeyColumns:
        """Memory of this process."""
        heads = 1 << hash_bits(num_rows)
        keys = mmap.mmap(-1, num_rows * KEY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(keys, zeros(heads, "i4"), zeros(num_rows, "i4"))


class KeyTable:
    """Keys of rows. 44 to 52 bytes a row: a key, a link, and a table of two to four entries a row.

    Clients choose what a key is the digest of, and may try out many (H110). So the hash has a secret: the first word
    XOR the last one, times an odd number that each table draws and nobody stores, and of that the top bits. Whichever
    two keys somebody chose, they have one hash with a probability of at most 2 in the number of lists (multiply-shift
    hashing, Dietzfelbinger 1997), unless all 64 bits of that XOR agree, which takes 2^32 tries for each pair and 2^57
    for a list of ten. A key's complement, the hidden key, has its hash.

    Keys with one hash form a list that starts in the table and goes on from row to row. A row leaves its list at once,
    so that nothing is left behind to be cleared up, however often rows change their keys. Where keys have one hash, a
    lookup compares all of them. Every key has 32 bytes.
    """

    __slots__ = ("_bytes", "_count", "_heads", "_heads_each", "_next", "_next_each", "_records",
                 "_shift", "_words", "_words_each", "factor")  # fmt: skip

    def __init__(self, num_rows: int, columns: KeyColumns | None = None) -> None:
        """Make a table without keys; the last row must never get one. Raises ValueError for too many rows."""
        self._shift = 64 - hash_bits(num_rows)
        self.factor: Final = secrets.randbits(64) | 1
        """Secret of the hash."""
        self._count = 0
        self._use(num_rows, columns or KeyColumns.private(num_rows))

    def _use(self, num_rows: int, columns: KeyColumns) -> None:
        self._bytes = columns.keys
        self._words: Names = np.frombuffer(self._bytes, np.uint64, num_rows * _WORDS).reshape(num_rows, _WORDS)
        self._words_each = memoryview(self._bytes)[: num_rows * KEY_BYTES].cast("Q")
        self._records = np.frombuffer(self._bytes, f"V{KEY_BYTES}", num_rows)
        self._heads_each, self._heads = columns.heads
        self._next_each, self._next = columns.next

    def move(self, columns: KeyColumns) -> None:
        """Copy the table to other memory, and use that from now on."""
        words = self._words
        heads = self._heads_each
        following = self._next_each
        self._use(len(words), columns)
        self._words[:] = words
        self._heads_each[:] = heads
        self._next_each[:] = following

    def __len__(self) -> int:
        """Rows that have a key."""
        return self._count

    # One key

    def find(self, key: BlockKey) -> int:
        """Row of a key; NONE if it is unknown, or empty: the root's."""
        if not key:
            return NONE
        first, last = _ENDS(key)
        row: int = self._heads[((first ^ last) * self.factor & _WHOLE) >> self._shift] - 1
        stored = self._bytes
        following = self._next
        while row >= 0:
            at = row * KEY_BYTES
            if stored[at : at + KEY_BYTES] == key:
                return row
            row = following[row] - 1
        return NONE

    def key(self, row: int) -> BlockKey:
        """Key of a row that has one."""
        at = row * KEY_BYTES
        return self._bytes[at : at + KEY_BYTES]

    def add(self, key: BlockKey, row: int) -> None:
        """Give an unknown key to a row without one."""
        at = row * KEY_BYTES
        self._bytes[at : at + KEY_BYTES] = key
        first, last = _ENDS(key)
        bucket = ((first ^ last) * self.factor & _WHOLE) >> self._shift
        self._next[row] = self._heads[bucket]
        self._heads[bucket] = row + 1
        self._count += 1

    def remove(self, row: int) -> None:
        """Take a row's key away."""
        self._unlist(row, self._bucket(row))
        self._count -= 1

    def _unlist(self, row: int, bucket: int) -> None:
        heads = self._heads
        following = self._next
        link = heads[bucket]
        if link == row + 1:
            heads[bucket] = following[row]
            return
        while (after := following[link - 1]) != row + 1:
            link = after
        following[link - 1] = following[row]

    def _bucket(self, row: int) -> int:
        at = row * _WORDS
        words = self._words_each
        return ((words[at] ^ words[at + _WORDS - 1]) * self.factor & _WHOLE) >> self._shift

    # Many keys

    def names(self, keys: Sequence[BlockKey]) -> Names:
        """Keys as numbers, for the other methods."""
        return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, _WORDS)

    def find_each(self, names: Names) -> RowArray:
        """Row of each key; NONE for the unknown ones."""
        wanted = names[:, 0]
        words = self._words[:, 0]
        rows = self._heads_each[self._buckets(names)].astype(np.int64)
        rows -= 1
        (left,) = ((words[rows] != wanted) & (rows >= 0)).nonzero()
        while len(left) > _ONE_BY_ONE:
            step = self._next_each[rows[left]].astype(np.int64)
            step -= 1
            rows[left] = step
            left = left[(step >= 0) & (words[step] != wanted[left])]
        for index in left.tolist():
            rows[index] = self._find_after(self._next[int(rows[index])] - 1, names[index].tobytes())
        if (there := self._words.take(rows, 0, mode="wrap").tobytes()) != (sought := names.tobytes()):
            self._tell_apart(rows, there, sought)
        return rows

    def _buckets(self, names: Names) -> RowArray:
        buckets = names[:, 0] ^ names[:, -1]
        buckets *= np.uint64(self.factor)
        buckets >>= np.uint64(self._shift)
        return buckets.view(np.int64)

    def _tell_apart(self, rows: RowArray, there: bytes, sought: bytes) -> None:
        """Replace, in `rows`, rows whose keys share only the first word with the sought ones."""
        pairs = (np.frombuffer(each, np.uint64).reshape(-1, _WORDS) for each in (there, sought))
        for index in ((rows >= 0) & np.not_equal(*pairs).any(axis=1)).nonzero()[0].tolist():
            rows[index] = self._find_after(int(rows[index]), sought[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def _find_after(self, row: int, name: bytes) -> int:
        while row >= 0 and self._bytes[row * KEY_BYTES : (row + 1) * KEY_BYTES] != name:
            row = self._next[row] - 1
        return row

    def keys(self, rows: slice | RowArray) -> list[BlockKey]:
        """Keys of rows that have one."""
        keys: list[BlockKey] = self._records[rows].tolist()
        return keys

    def add_each(self, keys: Sequence[BlockKey], rows: Sequence[int], at: slice | RowArray) -> None:
        """Give unknown keys, no two of them the same, to `rows` without one, which `at` selects."""
        if len(rows) < FEW:
            for key, row in zip(keys, rows, strict=True):
                self.add(key, row)
        else:
            self.add_names(self.names(keys), at)

    def add_names(self, names: Names, rows: slice | RowArray) -> None:
        """Give unknown keys, no two of them the same, to rows without one."""
        self._words[rows] = names
        numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        self._count += len(numbers)
        self._enlist(self._buckets(names), numbers)

    def _enlist(self, buckets: RowArray, rows: RowArray) -> None:
        """Enter rows into their lists; of several in one list the last one comes in at each turn."""
        heads = self._heads_each
        following = self._next_each
        while True:
            following[rows] = heads[buckets]
            heads[buckets] = rows + 1
            late = heads[buckets] != rows + 1
            if not late.any():
                return
            buckets = buckets[late]
            rows = rows[late]

    # Hidden keys, which only these methods find: they belong to rows whose chain is not known to be whole yet

    def find_either(self, names: Names) -> RowArray:
        """Row of each key, also of hidden ones; NONE for the unknown ones."""
        wanted = names[:, 0]
        words = self._words[:, 0]
        rows = self._heads_each[self._buckets(names)].astype(np.int64)
        rows -= 1
        left = np.flatnonzero(rows >= 0)
        left = left[_differ(words[rows[left]], wanted[left])]
        while len(left):
            step = self._next_each[rows[left]].astype(np.int64)
            step -= 1
            rows[left] = step
            left = left[step >= 0]
            step = step[step >= 0]
            left = left[_differ(words[step], wanted[left])]
        found = np.flatnonzero(rows >= 0)
        there = self._words[rows[found]]
        sought = names[found]
        for index in found[((there != sought).any(axis=1) & (there != ~sought).any(axis=1))].tolist():
            name = names[index].tobytes()
            hidden = (~names[index]).tobytes()
            row = int(rows[index])
            while row >= 0 and self._bytes[row * KEY_BYTES : (row + 1) * KEY_BYTES] not in (name, hidden):
                row = self._next[row] - 1
            rows[index] = row
        return rows

    def add_hidden(self, names: Names, rows: RowArray) -> None:
        """Give keys, hidden ones, to rows without one; neither they nor their open forms are in the table."""
        self._words[rows] = ~names
        self._enlist(self._buckets(names), rows)

    def show(self, rows: RowArray) -> None:
        """Turn the hidden keys of rows into keys."""
        self._words[rows] = ~self._words[rows]
        self._count += len(rows)

    def hide(self, rows: RowArray) -> None:
        """Turn the keys of rows into hidden ones."""
        self._words[rows] = ~self._words[rows]
        self._count -= len(rows)

    def names_at(self, rows: RowArray) -> Names:
        """Keys of rows, as numbers."""
        return self._words[rows]

    def remove_each(self, rows: Sequence[int] | RowArray) -> None:
        """Take the keys of rows away, each once."""
        self._count -= len(rows)
        if len(rows) < FEW:
            for row in rows:
                self._unlist(row, self._bucket(row))
            return
        numbers = np.array(rows, np.int64)
        buckets = self._buckets(self._words.take(numbers, 0))
        later = self._heads_each[buckets] != numbers + 1
        first = ~later
        self._heads_each[buckets[first]] = self._next_each[numbers[first]]
        for row, bucket in zip(numbers[later].tolist(), buckets[later].tolist(), strict=True):
            self._unlist(row, bucket)

    def lists(self) -> Iterator[int]:
        """Rows that have a key, in the table's order, for checks.

        Raises PactViolation for a row in a wrong list.
        """
        for bucket in np.flatnonzero(self._heads_each).tolist():
            link = self._heads[bucket]
            while link:
                if self._bucket(link - 1) != bucket:
                    raise PactViolation(f"row {link - 1} is listed as {bucket}, and its key has another hash")
                yield link - 1
                link = self._next[link - 1]


def _differ(words: Names, wanted: Names) -> NDArray[np.bool_]:
    """Mask of the words that are neither the wanted one nor, as in a hidden key, its complement."""
    return (words ^ wanted) + np.uint64(1) > 1
