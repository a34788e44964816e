"""Blocks for checks: named chains of keys, and content derived from each key.

Owns what a block must hold, so that every served byte can be verified. Stores nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256, shake_128

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer

CANARY = 0xA5
"""The byte that fills fresh buffers and returned ones."""


@dataclass(frozen=True, slots=True, repr=False)
class Document:
    """A request's blocks. Scripts show `name`; `keys[i]` names block `i` and all blocks before it.

    If it is not `chained`, each of its blocks stands for itself.
    """

    name: str
    keys: tuple[BlockKey, ...]
    chained: bool = True

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self)} blocks>"

    def __len__(self) -> int:
        return len(self.keys)

    def branch(self, name: str, shared: int, length: int) -> Document:
        """Another document of `length` blocks that begins with the first `shared` blocks of this one."""
        return Document(name, _chain(name, length, self.keys[:shared]))


def document(name: str, length: int) -> Document:
    """A document of `length` blocks; the same name always gives the same keys."""
    return Document(name, _chain(name, length))


def _chain(name: str, length: int, stem: Sequence[BlockKey] = ()) -> tuple[BlockKey, ...]:
    keys = list(stem)
    while len(keys) < length:
        keys.append(sha256((keys[-1] if keys else b"") + name.encode()).digest())
    return tuple(keys)


DOCUMENT = document("document", 8)
BRANCH = DOCUMENT.branch("branch", 3, 6)
DOCUMENTS = (DOCUMENT, BRANCH, document("alone", 7), DOCUMENT.branch("twig", 6, 9))


def separate(name: str, length: int) -> Document:
    """Blocks without a parent; the same name always gives the same keys."""
    keys = tuple(document(f"{name} {number}", 1).keys[0] for number in range(length))
    return Document(name, keys, chained=False)


SEPARATE = separate("separate blocks", 6)
"""Blocks without a parent, of several sizes: see `size_of`."""

_QUARTERS = dict(zip(SEPARATE.keys, (4, 2, 0, 4, 1, 4), strict=True))


def size_of(key: BlockKey, slot_bytes: int) -> int:
    """Bytes of a sample block where the largest has `slot_bytes`."""
    return slot_bytes * _QUARTERS.get(key, 4) // 4


@lru_cache(maxsize=4096)
def content(key: BlockKey, nbytes: int) -> bytes:
    """The content of the block named `key`, `nbytes` long."""
    return shake_128(key).digest(nbytes)


def empty_buffers(count: int, nbytes: int, pieces: int = 1) -> list[BlockBuffer]:
    """Memory for `count` blocks of `nbytes`, each in `pieces` pieces. Every byte is `CANARY`.

    A piece starts at a page boundary where its size allows it."""
    sizes = [nbytes * (piece + 1) // pieces - nbytes * piece // pieces for piece in range(pieces)]
    segments = [memoryview(mmap.mmap(-1, max(1, count * size))) for size in sizes]
    for segment in segments:
        segment[:] = bytes([CANARY]) * segment.nbytes
    return [
        [segment[block * size : (block + 1) * size] for segment, size in zip(segments, sizes, strict=True)]
        for block in range(count)
    ]


def filled_buffers(keys: Sequence[BlockKey], nbytes: int, pieces: int = 1) -> list[BlockBuffer]:
    """Buffers that hold the content of `keys`."""
    buffers = empty_buffers(len(keys), nbytes, pieces)
    for key, buffer in zip(keys, buffers, strict=True):
        fill(buffer, content(key, nbytes))
    return buffers


def fill(buffer: BlockBuffer, data: bytes | bytearray) -> None:
    """Copy `data` into the pieces of a block."""
    at = 0
    for piece in buffer:
        piece[:] = data[at : at + piece.nbytes]
        at += piece.nbytes


def first_difference(buffer: BlockBuffer, wanted: bytes) -> str:
    """Describe the first difference between a block and `wanted`; "" if there is none."""
    found = b"".join(buffer)
    if found == wanted:
        return ""
    if found == bytes([CANARY]) * len(found):
        return "nothing was written to its buffer"
    at = next((index for index, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), len(found))
    return f"byte {at} of {len(wanted)} is {found[at]:#04x} and not {wanted[at]:#04x}"
