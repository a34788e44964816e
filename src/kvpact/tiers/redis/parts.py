"""How a large record is kept in parts in Redis: what stands under its name, and under which names its parts lie.

Owns that format. Believes nothing that a head claims: parts are named a few at a time. Never does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpact.tiers.base import HEADER_BYTES

_PART_PREFIX: Final = b"kvpact-part:"
MAX_PART: Final = 512 << 20
MIN_PART: Final = 4 << 10
_MAX_PARTS: Final = 1 << 16

_FIRST_PARTS: Final = 16
"""So many parts of a record are asked for at once; if all are there, four times as many: what claims to have parts and
has none costs no more than one that has a few (P14)."""

_SPLIT: Final = struct.Struct("<8s16sQQ")
SPLIT_MAGIC: Final = b"kvpactSP"
SPLIT_BYTES: Final = _SPLIT.size + HEADER_BYTES


class Part(NamedTuple):
    """Part `number` of a record, which is named by its place in a batch: the part's key and its length."""

    record: int
    number: int
    key: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class SplitHead:
    """What stands under the name of a record that is kept in parts: where these are, and the record's first bytes.

    The parts lie under names that nobody else ever writes, and are there before the head: a record is seen whole or not
    at all.
    """

    nonce: bytes
    nbytes: int
    part_bytes: int
    first: bytes

    @classmethod
    def decode(cls, raw: bytes) -> SplitHead | None:
        """None for what is no such head."""
        if len(raw) != SPLIT_BYTES or not raw.startswith(SPLIT_MAGIC):
            return None
        _, nonce, nbytes, part_bytes = _SPLIT.unpack_from(raw)
        if not MIN_PART <= part_bytes <= MAX_PART or nbytes > part_bytes * _MAX_PARTS:
            return None
        return cls(nonce, nbytes, part_bytes, raw[_SPLIT.size :][:nbytes])

    def encode(self) -> bytes:
        head = _SPLIT.pack(SPLIT_MAGIC, self.nonce, self.nbytes, self.part_bytes) + self.first
        return head.ljust(SPLIT_BYTES, b"\0")

    @property
    def part_count(self) -> int:
        """How many parts there are."""
        return -(-self.nbytes // self.part_bytes)

    def part(self, record: int, key: bytes, number: int) -> Part:
        """A part of the record under `key`."""
        its_key = b"%b%b:%b:%d" % (_PART_PREFIX, key, self.nonce.hex().encode(), number)
        return Part(record, number, its_key, min(self.part_bytes, self.nbytes - number * self.part_bytes))


def without_missing(
    keys: Sequence[bytes], heads: Mapping[int, SplitHead], missing: Callable[[list[Part]], Iterable[int]]
) -> Collection[int]:
    """The records of which `missing` names none. It is given a few parts of each record at first, then more."""
    left = dict(heads)
    first, count = 0, _FIRST_PARTS
    while parts := [
        head.part(record, keys[record], number)
        for record, head in left.items()
        for number in range(first, min(first + count, head.part_count))
    ]:  # fmt: skip
        for record in missing(parts):
            left.pop(record, None)
        first, count = first + count, 4 * count
    return left.keys()


def cut_into_parts(pieces: Iterable[bytes | memoryview], nbytes: int) -> list[list[memoryview]]:
    """The same memory in parts of `nbytes`, the last with what is left."""
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
