"""The tier over any shared store: blocks as records that other engines read and write too.

Owns the batches of look-ups, reads and writes, the consequences of a failing store, the verification of a block before
it is served, and the removal of invalid records.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import compress, pairwise
from typing import Final, TypeAlias, TypeVar

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.accounts import Accounts
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
from kvpact.tiers.record import bytes_of, groups_of, require_at_most, run_in
from kvpact.tiers.shared.refuted import RefutedRuns
from kvpact.tiers.shared.store import (
    NAMESPACE_RECORD,
    RecordPieces,
    RecordStore,
    StoreError,
    StoreFull,
    StoreUsage,
    SupportsPacks,
    group_name,
    headers_of,
    key_of,
    record_name,
)
from kvpact.tiers.use_count import UseCount

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_Write: TypeAlias = Callable[[Sequence[str], Sequence[RecordPieces]], None]
_Run: TypeAlias = Sequence[Entry]
"""Blocks to be stored, each of which follows the one before it."""

FULL_SECONDS: Final = 600.0
"""Seconds after a StoreFull in which a tier reports it, or evicts nothing more if an eviction did not help."""

USAGE_SECONDS: Final = 30.0
"""Maximum age of the known usage while blocks are written."""


class SharedTier(Tier):
    """Blocks in a `RecordStore`, verified one by one; every call may wait for the store.

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
        self._packs = store if isinstance(store, SupportsPacks) else None
        self._prompt = _Prompt()
        self._usage = StoreUsage()
        self._usage_at = float("-inf")
        self._described = False
        self._full_at = float("-inf")
        self._in_vain = False
        self._uses = UseCount(store.close)

    # Lookups and reads

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._ask(self.store.exists, keys, [False] * len(keys))

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """Number of leading `keys` that the store has: one request where it keeps packs."""
        return leading(self.lookup(keys)) if self._packs is None else self._ask(self._packs.leading, keys, 0)

    put_start = leading

    def _ask(self, question: Callable[[Sequence[str]], Answer], keys: Sequence[BlockKey], otherwise: Answer) -> Answer:
        with self._uses.one() as running, self._noting("read"):
            if running and keys:
                answer = question(self._names(keys))
                self._accounts.note_works("read")
                return answer
        return otherwise

    def locate(self, keys: Sequence[BlockKey]) -> None:
        """Name a prompt's blocks; the store is asked when this thread reads or writes the last of them."""
        if self._packs is not None:
            self._prompt.names = self._names(keys)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        self._require_sizes(buffers)
        arrived = [False] * len(keys)
        with self._uses.one() as running, self._noting("read"):
            wanted = self._readable(keys) if running and keys else ()
            for first, end in groups_of([buffers[at] for at in wanted]):
                part = wanted[first:end]
                valid = list(self._read([keys[at] for at in part], [buffers[at] for at in part]))
                for at, is_valid in zip(part, valid, strict=False):
                    arrived[at] = is_valid
                more = on_progress is None or on_progress(leading(arrived))
                if len(valid) < len(part) or not more:
                    break
        return arrived

    def _readable(self, keys: Sequence[BlockKey]) -> Sequence[int]:
        """Blocks to read: of a prompt's those whose place is known, of others all."""
        if self._packs is not None:
            names = self._names(keys)
            if (prompt := self._prompt.take(names)) is not None:
                self._packs.locate(prompt)
                known = {*self._packs.known(names)}
                return [at for at, name in enumerate(names) if name in known]
        return range(len(keys))

    def _read(self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer]) -> Iterator[bool]:
        """Read block `keys[i]` into `buffers[i]`, all at once; yields for each whether it is there and valid.

        Ends at once if the store fails.
        """
        names = self._names(keys)
        headers = [bytearray(HEADER_BYTES) for _ in keys]
        records = [[memoryview(header), *buffer] for header, buffer in zip(headers, buffers, strict=True)]
        found: Sequence[bool] = ()
        with self._noting("read"):
            arrived = self.store.read(names, records)
            runs = {name: run_in(head) for name, head, there in zip(names, headers, arrived, strict=True) if there}
            self._refuted.ask(runs.values())
            if wrong := [name for name, run in runs.items() if run in self._refuted]:
                self.store.remove(wrong)  # all at once, so that they can be stored again
            found = arrived
            self._accounts.note_works("read")
        blocks = list(zip(found, keys, names, headers, buffers, strict=False))
        self._end_unread({name: (key, bytes_of(buffer)) for there, key, name, _, buffer in blocks if not there})
        for there, key, name, header, buffer in blocks:
            yield there and self._is_valid(key, name, header, buffer)

    # Checks

    def _header_in(self, raw: bytes) -> RecordHeader:
        """The header of a block that an engine of this tier may have stored. Raises RecordError."""
        return RecordHeader.decode(
            raw,
            namespace=self._digest,
            length=None,
            max_length=self._slot_bytes,
            seal=self._seal,
            refuted=self._refuted,
        )

    def _is_valid(self, key: BlockKey, name: str, header: bytearray, buffer: BlockBuffer) -> bool:
        """True if a record that was read may be served. If not it is removed."""
        reason = self._wrong(key, header, buffer)
        if reason and self.store.tears_reads:  # perhaps it was replaced during the read
            there = False
            with self._noting("read"):
                (there,) = self.store.read([name], [[memoryview(header), *buffer]])
            if not there:
                return False
            reason = self._wrong(key, header, buffer)
        if reason:
            self._quarantine(key, name, reason)
        return not reason

    def _wrong(self, key: BlockKey, raw: bytearray, buffer: BlockBuffer) -> str:
        """Why a record must not be served; "" if it may."""
        try:
            header = self._header_in(bytes(raw))
        except RecordError as error:
            return str(error)
        if header.key != key:
            return f"misplaced: it is block {header.key.hex()[:16]}"
        if header.length != bytes_of(buffer):
            return f"payload of {header.length} bytes, not {bytes_of(buffer)}"
        if header.digest != self._seal.payload_digest(buffer):
            return "payload does not match its checksum"
        return ""

    def _end_unread(self, unread: Mapping[str, tuple[BlockKey, int]]) -> None:
        """Remove the records that are there and were not read, except whole ones of another size: those are misses.

        `unread` has the key and the size that was asked for by name.
        """
        names = [*unread] if self._packs is None else self._packs.known([*unread])
        with suppress(StoreError):
            for name, raw in zip(names, self.store.heads(names) if names else (), strict=True):
                # Compare the length: another engine may have stored it in full after the read.
                key, wanted = unread[name]
                size = None if raw is None else self.store.size(name)
                if raw is not None and size not in (None, HEADER_BYTES + wanted) and not self._is_whole(key, raw, size):
                    self._quarantine(key, name, "has another length than a block of this engine")

    def _is_whole(self, key: BlockKey, raw: bytes, size: int | None) -> bool:
        with suppress(RecordError):
            header = self._header_in(raw)
            return header.key == key and HEADER_BYTES + header.length == size
        return False

    def _quarantine(self, key: BlockKey, name: str, reason: str) -> None:
        """Remove a record that cannot be served, so that the next write replaces it (H22)."""
        self._accounts.note_damaged(reason, f"block {key.hex()[:16]} {reason}: removed, recomputed")
        with self._noting("write"):
            self.store.remove([name])

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
                    nbytes = sum(bytes_of(entry.buffer) for run in wanted for entry in run)
                    self._with_room(partial(self._store, wanted, held), nbytes)
                    self._accounts.note_works("write")
                    self._note_usage()
                    held.update(entry.key for run in wanted for entry in run)
                return [entry.key in held for entry in entries]
            except StoreError as error:
                self._accounts.note_failed("write", f"cannot write: {error}")
            stored = [False] * len(entries)
            with self._noting("read"):
                held = self._held(runs, prompt)
                stored = [entry.key in held for entry in entries]
                self._accounts.note_works("read")
            self._accounts.count(dropped_writes=stored.count(False))
            return stored

    def _held(self, runs: Sequence[_Run], prompt: Sequence[str] | None) -> set[BlockKey]:
        """The keys that the store has, of the blocks of the runs and of those before each run.

        `prompt` has the names of all blocks up to the last of the run, if there is one run and they are known.
        """
        held: set[BlockKey] = set()
        alone: dict[BlockKey, None] = {}
        for run in runs:
            keys = _with_parent(run)
            if self._packs is not None and len(keys) > 1:
                names = prompt if prompt is not None and len(runs) == 1 else self._names(keys)
                held.update(keys[: max(0, self._packs.leading(names) - len(names) + len(keys))])
            else:
                alone |= dict.fromkeys(keys)
        if alone:
            held.update(compress(alone, self.store.exists(self._names(alone))))
        return held

    def _store(self, runs: Sequence[_Run], held: Container[BlockKey]) -> None:
        """Store the blocks of these runs that are not `held`. Raises StoreError."""
        self._describe()
        alone: list[Entry] = []
        writes: list[tuple[_Write, Sequence[Entry]]] = [(self.store.write, alone)]
        for run in runs:
            missing = [entry for entry in run if entry.key not in held]
            if self._packs is not None and len(_with_parent(run)) > 1:
                writes.append((self._packs.write_pack, missing))
            else:
                alone += missing
        now = time.time()
        for write, entries in writes:
            for first, end in groups_of([entry.buffer for entry in entries]):
                batch = entries[first:end]
                write(self._names([entry.key for entry in batch]), [self._record(entry, now) for entry in batch])

    def _with_room(self, write: Callable[[], None], nbytes: int) -> None:
        """Call `write`, and again where the place is full, after an eviction of least recently used records.

        If that was in vain, as with a quota on others' files, no more goes for `FULL_SECONDS`. Raises StoreError.
        """
        late = time.monotonic() > self._full_at + FULL_SECONDS
        try:
            write()
        except StoreFull as full:
            if (self._in_vain and not late) or not self.store.make_room(nbytes):
                raise
            self._full_at = time.monotonic()
            self._in_vain = True
            late = False
            self._accounts.note_failed("room", f"{full}; the least recently used blocks are evicted")
            write()
        self._in_vain = False
        if late:
            self._accounts.note_works("room")

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
            self.store.write([f"{self._group}/{NAMESPACE_RECORD}"], [[self._namespace.for_people.describe().encode()]])
            self._described = True

    # Removal

    def delete(self, keys: Iterable[BlockKey]) -> int:
        names = self._names(list(keys))
        with self._uses.one() as running, self._noting("write", "delete"):
            return self.store.remove(names) if running and names else 0

    def clear(self) -> None:
        with self._uses.one() as running, self._noting("write", "clear"):
            if running:
                self.store.clear(self._group)
                self._described = False

    def refute_run(self) -> None:
        with self._uses.one() as running, self._noting("write", "refute"):
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
        return replace(self._accounts.counts, evicted=self.store.evicted)

    def scan(self) -> Iterator[RecordHeader]:
        """The header of every valid record of this namespace, in the order of the listing."""
        with self._uses.one() as running, self._noting("read"):
            names = [record.name for record in self.store.names(self._group) if key_of(record.name)] if running else []
            for name, raw in headers_of(self.store, names):
                with suppress(RecordError):
                    if (header := self._header_in(raw or b"")).key == key_of(name):
                        yield header

    def health(self) -> TierHealth:
        return self._accounts.health()

    def lost(self) -> str:
        with self._uses.one() as running:
            return self.store.lost() if running else ""

    @property
    def released(self) -> bool:
        return self._uses.released

    def close(self) -> None:
        self._uses.stop()

    # Within

    @contextmanager
    def _noting(self, what: str, refused: str = "") -> Iterator[None]:
        """A context that notes the store's failure and ends with it, or with a TierError if the caller must know."""
        try:
            yield
        except StoreError as error:
            self._accounts.note_failed(what, f"cannot {what}: {error}")
            if refused:
                raise TierError(f"cannot {refused}: {error}") from error

    def _names(self, keys: Iterable[BlockKey]) -> list[str]:
        return [record_name(self._group, key) for key in keys]

    def _require_sizes(self, buffers: Sequence[BlockBuffer]) -> None:
        require_at_most(buffers, self._slot_bytes, f"the largest block of {self.store.place} has")


class _Prompt(threading.local):
    """The names of a prompt's records that a thread was told of and has not read or written yet."""

    names: Sequence[str] = ()

    def take(self, names: Sequence[str]) -> Sequence[str] | None:
        """The prompt's names up to the last of these, if they are its last ones. Forgets them."""
        prompt = self.names
        self.names = ()
        return prompt if prompt and prompt[-len(names) :] == names else None


def _with_parent(run: _Run) -> list[BlockKey]:
    """The key of the block before the first one, if there is one, and their own. One key: a block that stands alone."""
    return [*filter(None, [run[0].parent]), *(entry.key for entry in run)]


def _runs(entries: Sequence[Entry]) -> list[_Run]:
    """The entries as runs, in which each one's parent is the one before it."""
    starts = [at for at, entry in enumerate(entries) if not at or entry.parent != entries[at - 1].key]
    return [entries[first:end] for first, end in pairwise([*starts, len(entries)])]


def _storable(runs: Iterable[_Run], held: AbstractSet[BlockKey]) -> list[_Run]:
    """The runs whose parent is held or among the blocks of a run before."""
    storable: list[_Run] = []
    there = {ROOT, *held}
    for run in runs:
        if run[0].parent in there:
            storable.append(run)
            there.update(entry.key for entry in run)
    return storable
