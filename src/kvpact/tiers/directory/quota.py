"""How many bytes all writers of a shared directory may keep there together: the ledger, and eviction.

Owns the writers' counters, the snapshot of what was found last, and the evictor that any of them may become. Never
locks a record, and never waits for another writer longer than `EVICTOR_TIMEOUT_SECONDS`.
"""

from __future__ import annotations

import heapq
import os
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from kvpact.own_files import Access, closing, replace_own, sync_folder
from kvpact.tiers.directory import files
from kvpact.tiers.directory.evictor_lock import EvictorLock, died_here, new_writer
from kvpact.tiers.shared.store import key_of

CONTROL: Final = ".kvpact"
"""Beside the groups: what the writers know of each other, and records that are being written."""

CONTROL_BYTES: Final = 4096
"""What the files of the ledger are taken to need; they are part of the capacity."""

TOUCH_SECONDS: Final = 60.0
"""A record that is used gets a new time at most so often."""

TOUCH_SHARE: Final = 8
"""...or, where records live shorter than some minutes, once in this part of such a life, so that order means use."""

EVICTOR_TIMEOUT_SECONDS: Final = 2.0
"""How long a write waits for another writer's evictor before it is dropped."""

SLACK_SHARE: Final = 16
"""An evictor frees this part of the capacity more than is needed, so that not every write needs one."""

ABANDONED_SECONDS: Final = 3600.0
"""What a writer on another host has not changed for so long is taken to be left behind by a dead one."""

_COUNTER: Final = struct.Struct("<QQ")
_MAX_SNAPSHOT: Final = 4 << 20
"""Bytes of a snapshot with 40,000 writers; one that is larger is none."""
_RETRY_SECONDS: Final = 0.02


class UsageSnapshot(msgspec.Struct, frozen=True):
    """What the last evictor found and left."""

    used_bytes: int
    settled: dict[str, int]
    """How many of each writer's bytes the evictor may have seen: what that writer had settled before."""
    life_seconds: float
    """How long the record that was evicted last had not been used; a lower bound of how long records live."""


class Quota:
    """What the writers of a directory have written and reserved, kept within `capacity_bytes`. Raises OSError.

    See `DirectoryStore` for what is promised. Each store is one of them.
    """

    def __init__(self, root: Path, access: Access, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.writer = new_writer()
        """This writer's name in the ledger."""
        self.evicted = 0
        """Records that this writer removed to make room."""
        self.touch_seconds = TOUCH_SECONDS
        """A record that is used gets a new time at most so often."""
        self._root = root
        self._access = access
        self._lock = threading.Lock()
        self._control = control = root / CONTROL
        self._temporaries = control / "new"
        self._counters = control / "writers"
        self._snapshot_path = control / "stocktaking"
        self.lock = EvictorLock(control / "collector", access, self.writer)
        self._numbers = count()
        self._reserved = 0
        self._settled = 0

    def recover(self) -> None:
        """Make the folders of the ledger, and count and remove what dead writers left."""
        for directory in (self._control, self._temporaries, self._counters):
            self._access.make_folder(directory)
        _remove_all(self._abandoned(self._temporaries))
        if self.snapshot() is None:
            self._evict(0, time.time_ns())
        else:
            self._fold_dead_writers()

    def new_file(self) -> Path:
        """A name for a file that is being written; it goes if this process dies."""
        return self._temporaries / f"{self.writer}.{next(self._numbers)}"

    # The ledger: what all writers together have written and reserved

    def reserve(self, sizes: Sequence[int], time_ns: int) -> int:
        """Reserve room for the first of these records, for as many as there is room for; how many."""
        deadline = time.monotonic() + EVICTOR_TIMEOUT_SECONDS
        granted, hopeless = len(sizes), False
        while granted:
            wanted = sum(sizes[:granted])
            room = self.try_reserve(wanted)
            if room >= wanted:
                break
            if hopeless:
                while granted and sum(sizes[:granted]) > room:
                    granted -= 1
            else:
                freed = self._evict(wanted, time_ns)
                hopeless = freed == 0 or (freed is None and time.monotonic() >= deadline)
                if freed is None:
                    time.sleep(_RETRY_SECONDS)
        return granted

    def try_reserve(self, nbytes: int) -> int:
        """Reserve so much, if there is room; how much room there is for it."""
        # First said, then asked: of two writers that do so at once, one at least sees the other.
        self._count(reserved=nbytes)
        room = 0
        try:
            room = self.capacity_bytes - self.used_bytes() + nbytes
        finally:
            if room < nbytes:
                self._count(reserved=-nbytes)
        return room

    def settle(self, nbytes: int) -> None:
        """What was reserved is written, or never will be: the next evictor sees what there is of it."""
        self._count(settled=nbytes)

    def _count(self, *, reserved: int = 0, settled: int = 0) -> None:
        with self._lock:
            # What cannot be written down is not reserved, and given back all the same: the next call writes it.
            self._settled += settled
            self._reserved += min(reserved, 0)
            counter = _COUNTER.pack(self._reserved + max(reserved, 0), self._settled)
            # Opened anew each time: closing is what makes a file's content visible to the other hosts of an NFS.
            with closing(self._access.open(self._counters / self.writer, os.O_WRONLY)) as descriptor:
                os.pwrite(descriptor, counter, 0)
                if reserved > 0:  # what is written now counts, also after a power cut
                    os.fsync(descriptor)
            if reserved > 0 and not self._reserved:
                sync_folder(self._counters)
            self._reserved += max(reserved, 0)

    def counted(self) -> dict[str, tuple[int, int]]:
        """Every writer's bytes reserved and settled since it was opened."""
        counted: dict[str, tuple[int, int]] = {}
        for name in os.listdir(self._counters):
            raw = files.beginning(self._counters / name, _COUNTER.size + 1)
            if raw is not None and len(raw) == _COUNTER.size:
                counted[name] = _COUNTER.unpack(raw)
        return counted

    def snapshot(self) -> UsageSnapshot | None:
        """What was found last; None if that is not to be read, or nobody was here yet."""
        try:
            return msgspec.json.decode(files.beginning(self._snapshot_path, _MAX_SNAPSHOT) or b"", type=UsageSnapshot)
        except msgspec.DecodeError:
            return None

    def used_bytes(self) -> int:
        """Bytes that are used or reserved; more than there are, never less."""
        # Counters first: one that is removed in between is part of what is found then.
        counted = self.counted()
        found = self.snapshot()
        if found is None:
            return self.capacity_bytes + 1
        self.touch_seconds = min(TOUCH_SECONDS, found.life_seconds / TOUCH_SHARE)
        return found.used_bytes + _since(counted, found.settled)

    def _fold_dead_writers(self) -> None:
        """Count what dead writers have reserved as used, and remove their counters.

        Nothing if somebody evicts: whoever opens the directory next does it. A kill at any moment, and a power cut,
        leave each byte counted once at least.
        """
        dead = self._abandoned(self._counters)
        if not dead or not self.lock.acquire():
            return
        try:
            counted, known = self.counted(), self.snapshot()
            if known is not None:
                folded = {path.name: counted[path.name] for path in dead if path.name in counted}
                used = known.used_bytes + _since(folded, known.settled)
                # Until they are removed, their counters say nothing new.
                settled = {name: known.settled.get(name, 0) for name in counted}
                settled |= {name: reserved for name, (reserved, _) in folded.items()}
                self._write_snapshot(UsageSnapshot(used, settled, known.life_seconds))
                _remove_all(dead)
                sync_folder(self._counters)
        finally:
            self.lock.release()

    # The evictor

    def _evict(self, wanted: int, before_ns: int) -> int | None:
        """Take stock and evict until there are `wanted` bytes, nothing used after `before_ns`; how many records went.

        None if somebody else is at it.
        """
        if not self.lock.acquire():
            return None
        try:
            _remove_all(self._abandoned(self._temporaries))
            # Their files are found below; only then, once that is written down, may their counters go.
            abandoned = self._abandoned(self._counters)
            known = self.snapshot()
            counted = self.counted()
            settled = {name: done for name, (_, done) in counted.items()}
            gone = {path.name for path in abandoned}
            # What is to be freed is known in the end, and not more than what the ledger says: the oldest files worth
            # that many bytes are candidates, so that not every name is kept.
            target = self.capacity_bytes - min(wanted, self.capacity_bytes) - self.capacity_bytes // SLACK_SHARE
            most = known.used_bytes + _since(counted, known.settled) - target if known else self.capacity_bytes
            used, candidates = self._oldest(before_ns, most)
            counted = {name: numbers for name, numbers in self.counted().items() if name not in gone}
            excess = used + _since(counted, settled) - target if wanted else used - self.capacity_bytes
            evicted = 0
            life = known.life_seconds if known else TOUCH_SECONDS * TOUCH_SHARE
            for negative_ns, _, size, path in candidates:
                if excess <= 0:
                    break
                self.lock.renew()
                if files.remove(path):
                    evicted += 1
                    life = max(0.0, time.time() + negative_ns / 1e9)
                excess -= size
                used -= size
            self._write_snapshot(UsageSnapshot(used, settled, life))
            _remove_all(abandoned)
            with self._lock:
                self.evicted += evicted
            return evicted
        finally:
            self.lock.release()

    def _oldest(self, before_ns: int, nbytes: int) -> tuple[int, list[tuple[int, int, int, str]]]:
        """Bytes in use, and the records to be evicted first: at least `nbytes` of them, if there are so many."""
        used = CONTROL_BYTES
        heap: list[tuple[int, int, int, str]] = []  # the most recently used first; of the same time, the first made
        held = 0
        for name, entry in files.records(self._root):
            self.lock.renew()
            with suppress(FileNotFoundError):
                status = entry.stat()
                used += status.st_size
                if status.st_mtime_ns < before_ns and key_of(name):
                    heapq.heappush(heap, (-status.st_mtime_ns, status.st_ino, status.st_size, entry.path))
                    held += status.st_size
                    while heap and held - heap[0][2] >= nbytes:
                        held -= heapq.heappop(heap)[2]
        for name in os.listdir(self._temporaries):
            status_or_none = files.status(self._temporaries / name)
            used += status_or_none.st_size if status_or_none else 0
        return used, sorted(heap, reverse=True)

    def _write_snapshot(self, found: UsageSnapshot) -> None:
        content = msgspec.json.encode(found)
        replace_own(self._snapshot_path, content, self._access, beside=self.new_file(), durable=True)

    def _abandoned(self, directory: Path) -> list[Path]:
        """What dead writers left behind there: records that they were writing, or their counters."""
        paths = [directory / name for name in os.listdir(directory) if not name.startswith(self.writer)]
        return [path for path in paths if self._is_abandoned(path)]

    def _is_abandoned(self, path: Path) -> bool:
        if died_here(path.name):
            return True
        # Also of a writer on this host: a process may have got the number of a dead one.
        status = files.status(path)
        return status is not None and time.time() - status.st_ctime > ABANDONED_SECONDS

    def close(self) -> None:
        """Leave no counter behind, unless the ledger still needs it. Raises OSError."""
        with self._lock:
            found = self.snapshot() if self._reserved == self._settled else None
            if found is not None and found.settled.get(self.writer, 0) == self._settled:
                (self._counters / self.writer).unlink(missing_ok=True)


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _since(counted: Mapping[str, tuple[int, int]], settled: Mapping[str, int]) -> int:
    """Bytes that writers have reserved since these were settled; what was settled later is none of them."""
    return sum(max(0, reserved - settled.get(name, 0)) for name, (reserved, _) in counted.items())
