"""A store of named records that other engines read and write too, and the form of a record's name.

Owns the interface `RecordStore`, which knows names and bytes, but no blocks or prefixes. Never does I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np

from kvpact.errors import KvpactError
from kvpact.identity.keys import KEY_BYTES, BlockKey, Namespace
from kvpact.tiers.base import RecordMac

RecordBuffer: TypeAlias = Sequence[memoryview]
"""Memory for one record: a view of `HEADER_BYTES` for its header, then the pieces of its payload in rank order."""

RecordPieces: TypeAlias = Sequence[bytes | memoryview]
"""One record to be stored: its header, then the pieces of its payload in rank order."""

NAMESPACE_RECORD: Final = "namespace"
"""The record with a namespace's fields, as `Namespace.describe` writes them, for people and tools."""

_BATCH: Final = 512
"""Records in one call of a store when a whole group is processed."""


class StoreError(KvpactError):
    """An operation of a store failed or timed out. The message is one line without credentials."""


class StoreFull(StoreError):
    """There is no room for more, although the store may have it: a full disk, a quota."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """An entry of a store's listing: a record's name and its size in bytes with framing, 0 if unknown."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Usage and capacity of a store in bytes; 0 where unknown."""

    used_bytes: int = 0
    capacity_bytes: int = 0


class RecordStore(ABC):
    """Named records in a place that several engines use. Blocking and thread-safe; each call ends in bounded time.

    A name is `<group>/<rest>` of hex digits, "-" and letters, see `record_name`; the group is a namespace's. Each
    record is found by its own name; a store that has a better way to keep a prompt's blocks also has the methods of
    `SupportsPacks`. Batches that are blocks of a prompt are in its order. Every method raises `StoreError` if the store
    fails; a missing record is no failure. After a method has returned or raised, nothing uses its buffers.
    """

    kind: str
    """The tier's name in metrics: "redis"."""

    evicted: int = 0
    """Records that it evicted since it was opened; 0 where a server evicts by itself."""

    record_bytes: int | None = None
    """Length of the longest record of a block, framing included; the tier that uses the store sets it. None: any.

    A longer record counts as there, so that it can be removed, but is never asked for or read (P14).
    """

    tears_reads: bool = False
    """True if a record that is removed during its read may arrive in part, or as another record in its place."""

    @abstractmethod
    def exists(self, names: Sequence[str]) -> list[bool]:
        """True for each record that is there in full. One round trip for a batch if the store allows it."""

    @abstractmethod
    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        """Read record `names[i]` into `buffers[i]`; returns whether each was there with exactly that length.

        Where that is False the buffer's content is undefined.
        """

    @abstractmethod
    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        """Store each record under its own name, in this order; an existing one is replaced. No reader sees part of one.

        After a StoreError some may be stored.
        """

    @abstractmethod
    def remove(self, names: Sequence[str]) -> int:
        """Remove records; returns the number that were there."""

    @abstractmethod
    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        """The first `HEADER_BYTES` of each record, None for a missing one."""

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        """Every record of a group, or of all, in no order. A store that cannot list overrides `size`, and no tool looks
        into it."""
        raise StoreError(f"{self.place} cannot list its records")

    def clear(self, group: str) -> None:
        """Remove every record of a group."""
        remove_all(self, [record.name for record in self.names(group)])

    def size(self, name: str) -> int | None:
        """The record's length in bytes, None if it is not there."""
        return next((record.nbytes for record in self.names(name.partition("/")[0]) if record.name == name), None)

    def make_room(self, nbytes: int) -> int:
        """Evict least recently used records after a StoreFull: `nbytes` and a part of all; returns their number.

        0 where that is the server's to do, or nothing can go.
        """
        return 0

    @property
    @abstractmethod
    def place(self) -> str:
        """The store's address for messages, without credentials: "redis://cache:6379/0"."""

    def usage(self) -> StoreUsage:
        """Usage; by default unknown."""
        return StoreUsage()

    def unfinished(self) -> StoreUsage:
        """Bytes of files that are being written, or that killed writers left and no engine has removed yet."""
        return StoreUsage()

    def lost(self) -> str:
        """Reason why the open store is not at its place any more, as in `Tier`; by default it cannot be taken away."""
        return ""

    def close(self) -> None:  # a store without connections has none to close
        """Close connections. Never raises; idempotent; no call is under way."""


@runtime_checkable
class SupportsPacks(Protocol):
    """A store that keeps records of blocks that follow one another together, and finds each through those before it.

    The names of `leading` and `locate` are a prompt's from its first block on, or from one that is found by its own
    name. All but `known` raise StoreError.
    """

    def leading(self, names: Sequence[str]) -> int:
        """Number of the records, from the first on, that are there now."""

    def locate(self, names: Sequence[str]) -> None:
        """Look for the records' places, up to the first that is missing, unless all are known."""

    def known(self, names: Sequence[str]) -> list[str]:
        """Names of the records whose place the store knows, without a look."""

    def write_pack(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        """Store records of blocks that follow one another, together; one that exists may stay as it is."""


def group_name(namespace: Namespace, seal: RecordMac) -> str:
    """The first part of the names of a namespace's records; it also depends on the record key."""
    return f"{namespace.name}-{seal.name}" if seal.name else namespace.name


def record_name(group: str, key: BlockKey) -> str:
    """The name of a block's record."""
    return f"{group}/{key.hex()}"


def key_of(name: str) -> BlockKey | None:
    """The block key in a record's name; None if the record is no block."""
    with suppress(ValueError):
        key = bytes.fromhex(name.partition("/")[2])
        return key if len(key) == KEY_BYTES else None
    return None


def headers_of(store: RecordStore, names: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
    """Each record's name and its first `HEADER_BYTES`, None for a missing one. Raises StoreError."""
    for first in range(0, len(names), _BATCH):
        batch = names[first : first + _BATCH]
        yield from zip(batch, store.heads(batch), strict=True)


def remove_all(store: RecordStore, names: Iterable[str]) -> int:
    """Remove any number of records; returns how many were there. Raises StoreError."""
    left = iter(names)
    removed = 0
    while batch := list(islice(left, _BATCH)):
        removed += store.remove(batch)
    return removed


def copy_into(value: Any, buffer: RecordBuffer) -> bool:
    """Copy a record's bytes into `buffer` if the lengths agree. Runs without the interpreter's lock."""
    source = np.frombuffer(value, np.uint8)
    if source.nbytes != sum(piece.nbytes for piece in buffer):
        return False
    at = 0
    for piece in buffer:
        np.copyto(np.frombuffer(piece, np.uint8), source[at : at + piece.nbytes])
        at += piece.nbytes
    return True
