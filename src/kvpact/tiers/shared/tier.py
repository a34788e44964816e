"""The tier over any shared store: blocks as records that other engines read and write too.

Owns what is asked, read and written of the store at once, and the consequences of its failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import Final, TypeAlias, TypeVar

from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import (
    HEADER_BYTES,
    ROOT,
    UNSEALED,
    BlockBuffer,
    Entry,
    Progress,
    RecordError,
    RecordHeader,
    RecordMac,
    Tier,
    TierCapacity,
    TierCounts,
    TierHealth,
    leading,
)
from kvpact.tiers.record import bytes_of, require_at_most
from kvpact.tiers.shared.accounts import Accounts
from kvpact.tiers.shared.reader import RecordReader
from kvpact.tiers.shared.refuted import RefutedRuns
from kvpact.tiers.shared.store import (
    NAMESPACE_RECORD,
    RecordPieces,
    RecordStore,
    StoreError,
    StoreUsage,
    SupportsPacks,
    group_name,
    headers_of,
    key_of,
    record_name,
)
from kvpact.tiers.use_count import UseCount

logger = logging.getLogger(__name__)

GROUP_BYTES: Final = 16 << 20
"""Payload of one call of a store: large enough for its batches, small enough to end early at a deadline. Headers do not
count, so that a read of as many bytes into the arena is one call."""

Answer = TypeVar("Answer")
_Write: TypeAlias = Callable[[Sequence[str], Sequence[RecordPieces]], None]

USAGE_SECONDS: Final = 30.0
"""Maximum age of the known usage while blocks are written."""


class SharedTier(Tier):
    """See `Tier`. Blocks in a `RecordStore`, verified one by one; every call may wait for the store.

    Other engines store, evict and delete here, so only the store knows what it holds: a hole is a miss, and `delete`
    drops only the named blocks; a prompt's blocks after them are not found until they are stored again.
    """

    exclusive = False

    def __init__(
        self, store: RecordStore, namespace: Namespace, slot_bytes: int, *, seal: RecordMac = UNSEALED
    ) -> None:
        """`slot_bytes` is the largest block's size over all ranks. Takes over `store`, which it closes."""
        self.name = store.kind
        self.store = store
        store.record_bytes = HEADER_BYTES + slot_bytes
        self._namespace = namespace
        self._digest = namespace.digest
        self._group = group_name(namespace, seal)
        self._slot_bytes = slot_bytes
        self._seal = seal
        self._accounts = Accounts(logger, f"{self.name} tier at {store.place}")
        self._refuted = RefutedRuns(store, self._group)
        self._reader = RecordReader(store, self._digest, self._group, seal, slot_bytes, self._accounts, self._refuted)
        self._packs = store if isinstance(store, SupportsPacks) else None
        self._prompt = _Prompt()
        self._usage = StoreUsage()
        self._usage_at = float("-inf")
        self._described = False
        self._uses = UseCount(store.close)

    # Lookups and reads

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask(self.store.exists, keys, [False] * len(keys))

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """See `SupportsPrefix`."""
        return leading(self.lookup(keys)) if self._packs is None else self._ask(self._packs.leading, keys, 0)

    put_start = leading

    def _ask(self, question: Callable[[Sequence[str]], Answer], keys: Sequence[BlockKey], otherwise: Answer) -> Answer:
        with self._uses.one() as running, self._accounts.noting("read"):
            if running and keys:
                answer = question(self._names(keys))
                self._accounts.last_errors.clear("read")
                return answer
        return otherwise

    def locate(self, keys: Sequence[BlockKey]) -> None:
        """See `SupportsLocate`. The store is asked when this thread reads or writes the last of these blocks."""
        if self._packs is not None:
            self._prompt.names = self._names(keys)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        self._require_sizes(buffers)
        arrived = [False] * len(keys)
        with self._uses.one() as running, self._accounts.noting("read"):
            wanted = self._readable(keys) if running and keys else ()
            for first, end in _batches([buffers[at] for at in wanted]):
                part = wanted[first:end]
                sound = list(self._reader.read([keys[at] for at in part], [buffers[at] for at in part]))
                for at, is_sound in zip(part, sound, strict=False):
                    arrived[at] = is_sound
                more = on_progress is None or on_progress(leading(arrived))
                if len(sound) < len(part) or not more:
                    break
        return arrived

    def _readable(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Which of these blocks to read: of a prompt's those whose place is known, of others all."""
        if self._packs is not None:
            names = self._names(keys)
            if (prompt := self._prompt.take(names)) is not None:
                self._packs.locate(prompt)
                known = {*self._packs.known(names)}
                return [at for at, name in enumerate(names) if name in known]
        return range(len(keys))

    # Writes

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        self._require_sizes([entry.buffer for entry in entries])
        with self._uses.one() as running:
            if not running or not entries:
                return [False] * len(entries)
            runs = _runs(entries)
            prompt = self._prompt.take(self._names([entry.key for entry in entries])) if self._packs else None
            try:
                held = self._held(runs, prompt)
                if wanted := _storable(runs, held):
                    self._describe()
                    self._store(wanted, held)
                    self._accounts.last_errors.clear("write")
                    self._note_usage()
                    held.update(entry.key for run in wanted for entry in run.entries)
                return [entry.key in held for entry in entries]
            except StoreError as error:
                self._accounts.note_failed("write", error)
            stored = [False] * len(entries)
            with self._accounts.noting("read"):
                held = self._held(runs, prompt)
                stored = [entry.key in held for entry in entries]
                self._accounts.last_errors.clear("read")
            self._accounts.note_dropped(stored.count(False))
            return stored

    def _held(self, runs: Sequence[_Run], prompt: Sequence[str] | None) -> set[BlockKey]:
        """The keys that the store has, of the blocks of the runs and of those before each run.

        `prompt` has the names of all blocks up to the last of the run, if there is one run and they are known.
        """
        held: set[BlockKey] = set()
        alone: dict[BlockKey, None] = {}
        for run in runs:
            if self._packs is not None and run.follow:
                names = prompt if prompt is not None and len(runs) == 1 else self._names(run.keys)
                held.update(run.keys[: max(0, self._packs.leading(names) - len(names) + len(run.keys))])
            else:
                alone |= dict.fromkeys(run.keys)
        if alone:
            held.update(compress(alone, self.store.exists(self._names(alone))))
        return held

    def _store(self, runs: Sequence[_Run], held: Container[BlockKey]) -> None:
        """Store the blocks of these runs that are not `held`."""
        alone: list[Entry] = []
        writes: list[tuple[_Write, Sequence[Entry]]] = [(self.store.write, alone)]
        for run in runs:
            missing = [entry for entry in run.entries if entry.key not in held]
            if self._packs is not None and run.follow:
                writes.append((self._packs.write_pack, missing))
            else:
                alone += missing
        for write, entries in writes:
            self._write(entries, write)

    def _write(self, missing: Sequence[Entry], write: _Write) -> None:
        now = time.time()
        for first, end in _batches([entry.buffer for entry in missing]):
            batch = missing[first:end]
            write(self._names([entry.key for entry in batch]), [self._record(entry, now) for entry in batch])

    def _record(self, entry: Entry, now: float) -> RecordPieces:
        header = RecordHeader(
            self._digest,
            entry.key,
            entry.parent,
            entry.depth,
            bytes_of(entry.buffer),
            self._seal.payload_digest(entry.buffer),
            now,
            now,
            epoch=entry.epoch,
            run=self._refuted.own,
        )
        return [header.encode(self._seal), *entry.buffer]

    def _describe(self) -> None:
        """Store the namespace's fields beside the records, once."""
        if not self._described:
            self.store.write([f"{self._group}/{NAMESPACE_RECORD}"], [[self._namespace.describe().encode()]])
            self._described = True

    # Removal

    def delete(self, keys: Iterable[BlockKey]) -> int:
        names = self._names(list(keys))
        with self._uses.one() as running, self._accounts.noting("write", "delete"):
            return self.store.remove(names) if running and names else 0

    def clear(self) -> None:
        with self._uses.one() as running, self._accounts.noting("write", "clear"):
            if running:
                self.store.clear(self._group)
                self._described = False

    def refute_run(self) -> None:
        with self._uses.one() as running, self._accounts.noting("write", "refute"):
            if running:
                self._refuted.refute()

    # Counts

    def capacity(self) -> TierCapacity:
        return TierCapacity(self._usage.used_bytes, self._usage.capacity_bytes, 0)

    def _note_usage(self) -> None:
        if (now := time.monotonic()) >= self._usage_at + USAGE_SECONDS:
            self._usage_at = now
            self._usage = self.store.usage()

    def counts(self) -> TierCounts:
        return replace(self._accounts.counts(), evicted=self.store.evicted)

    def scan(self) -> Iterator[RecordHeader]:
        """See `SupportsScan`."""
        with self._uses.one() as running, self._accounts.noting("read"):
            names = [record.name for record in self.store.names(self._group) if key_of(record.name)] if running else []
            for name, raw in headers_of(self.store, names):
                with suppress(RecordError):
                    if (header := self._reader.header_in(raw or b"")).key == key_of(name):
                        yield header

    def health(self) -> TierHealth:
        return self._accounts.last_errors.health()

    def close(self) -> None:
        with self._uses.the_last():
            pass

    # Within

    def _names(self, keys: Iterable[BlockKey]) -> list[str]:
        return [record_name(self._group, key) for key in keys]

    def _require_sizes(self, buffers: Sequence[BlockBuffer]) -> None:
        require_at_most(buffers, self._slot_bytes, f"the largest block of {self.store.place} has")


class _Prompt(threading.local):
    """The names of a prompt's records that a thread was told of and has not read or written yet."""

    names: Sequence[str] = ()

    def take(self, names: Sequence[str]) -> Sequence[str] | None:
        """The prompt's names up to the last of these, if they are its last ones. Forgets them."""
        prompt, self.names = self.names, ()
        return prompt if prompt and prompt[-len(names) :] == names else None


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks to be stored, each of which follows the one before it."""

    entries: Sequence[Entry]

    @property
    def parent(self) -> BlockKey:
        return self.entries[0].parent

    @property
    def follow(self) -> bool:
        """Whether any of them follows another block; else it is one that stands for itself."""
        return self.parent != ROOT or len(self.entries) > 1

    @property
    def keys(self) -> list[BlockKey]:
        """The key of the block before the first one, if there is one, and their own."""
        return [*filter(None, [self.parent]), *(entry.key for entry in self.entries)]


def _runs(entries: Sequence[Entry]) -> list[_Run]:
    """The entries as runs, in which each one's parent is the one before it."""
    starts = [at for at, entry in enumerate(entries) if not at or entry.parent != entries[at - 1].key]
    return [_Run(entries[first:end]) for first, end in pairwise([*starts, len(entries)])]


def _storable(runs: Iterable[_Run], held: AbstractSet[BlockKey]) -> list[_Run]:
    """The runs whose parent is held or among the blocks of a run before."""
    storable: list[_Run] = []
    there = {ROOT, *held}
    for run in runs:
        if run.parent in there:
            storable.append(run)
            there.update(entry.key for entry in run.entries)
    return storable


def _batches(buffers: Sequence[BlockBuffer]) -> Iterator[tuple[int, int]]:
    """`buffers` as ranges (first, end) for one call of a store each: at most `GROUP_BYTES`, or one block."""
    first = nbytes = 0
    for index, buffer in enumerate(buffers):
        size = max(HEADER_BYTES, bytes_of(buffer))
        if nbytes and nbytes + size > GROUP_BYTES:
            yield first, index
            first, nbytes = index, 0
        nbytes += size
    if nbytes:
        yield first, len(buffers)
