"""The format of a large record in Redis: a head under its name, and parts under names of their own.

Trusts no head: it names only a few parts at a time. Never does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.redis import MAX_PART, MIN_PART

_PART_PREFIX: Final = b"kvpact-part:"
_MAX_PARTS: Final = 1 << 16

_FIRST_PARTS: Final = 16
"""Parts of a record that are asked for first; if all exist, four times as many next. So a head that claims parts which
do not exist costs no more than a record with a few (P14)."""

_SPLIT: Final = struct.Struct("<8s16sQQ")
SPLIT_MAGIC: Final = b"kvpactSP"
SPLIT_BYTES: Final = _SPLIT.size + HEADER_BYTES


class Part(NamedTuple):
    """Part `number` of the record at index `record` of a batch: the part's key and its length."""

    record: int
    number: int
    key: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class SplitHead:
    """The value under the name of a split record: where its parts are, and the record's first bytes.

    No other writer uses the names of the parts, and they are written before the head, so a record is visible as a whole
    or not at all.
    """

    nonce: bytes
    nbytes: int
    part_bytes: int
    first: bytes

    @classmethod
    def decode(cls, raw: bytes) -> SplitHead | None:
        """The head in `raw`; None if it is no head."""
        if len(raw) != SPLIT_BYTES or not raw.startswith(SPLIT_MAGIC):
            return None
        _, nonce, nbytes, part_bytes = _SPLIT.unpack_from(raw)
        if not MIN_PART <= part_bytes <= MAX_PART or nbytes > part_bytes * _MAX_PARTS:
            return None
        return cls(nonce, nbytes, part_bytes, raw[_SPLIT.size :][:nbytes])

    def encode(self) -> bytes:
        head = _SPLIT.pack(SPLIT_MAGIC, self.nonce, self.nbytes, self.part_bytes) + self.first
        return head.ljust(SPLIT_BYTES, b"\0")

    def part(self, record: int, key: bytes, number: int) -> Part:
        """A part of the record under `key`."""
        its_key = b"%b%b:%b:%d" % (_PART_PREFIX, key, self.nonce.hex().encode(), number)
        return Part(record, number, its_key, min(self.part_bytes, self.nbytes - number * self.part_bytes))


def without_missing(
    keys: Sequence[bytes], heads: Mapping[int, SplitHead], missing: Callable[[list[Part]], Iterable[int]]
) -> Collection[int]:
    """The records without a part in what `missing` returns. It gets a few parts of each record first, then more."""
    left = dict(heads)
    first = 0
    count = _FIRST_PARTS
    while parts := [
        head.part(record, keys[record], number)
        for record, head in left.items()
        for number in range(first, min(first + count, -(-head.nbytes // head.part_bytes)))
    ]:  # fmt: skip
        for record in missing(parts):
            left.pop(record, None)
        first += count
        count *= 4
    return left.keys()


def cut_into_parts(pieces: Iterable[bytes | memoryview], nbytes: int) -> list[list[memoryview]]:
    """Cut memory into parts of `nbytes`; the last part has the rest."""
    parts: list[list[memoryview]] = []
    room = 0
    for piece in (memoryview(piece) for piece in pieces):
        at = 0
        while at < len(piece):
            if not room:
                parts.append([])
                room = nbytes
            parts[-1].append(piece[at : at + room])
            at += len(parts[-1][-1])
            room -= len(parts[-1][-1])
    return parts
