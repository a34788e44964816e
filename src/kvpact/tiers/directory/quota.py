"""Bytes that all writers of a shared directory may keep there together: the ledger, and eviction.

Owns the writers' counters, the last snapshot of usage, and the evictor that any writer may become. Never locks a
record, and waits for another writer for at most `EVICTOR_TIMEOUT_SECONDS`.
"""

from __future__ import annotations

import heapq
import logging
import os
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, count
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from kvpact.own_files import Access, closing, replace_own, sync_file, sync_folder
from kvpact.tiers.directory import files
from kvpact.tiers.directory.evictor_lock import EvictorLock, died_here, new_writer
from kvpact.tiers.free_space import SLACK_SHARE, Unremovable, taken
from kvpact.tiers.shared.store import key_of
from kvpact.tiers.use_clock import SharedClock

logger = logging.getLogger(__name__)

CONTROL: Final = ".kvpact"
"""The folder beside the groups for the writers' counters and for records that are being written."""

CONTROL_BYTES: Final = 4096
"""Assumed size of the ledger's files, which are part of the capacity."""

TOUCH_SECONDS: Final = 60.0
"""A used record gets a new time at most once in this many seconds."""

TOUCH_SHARE: Final = 8
"""Where records live only minutes, at most once in this part of their life, so that the order still shows use."""

EVICTOR_TIMEOUT_SECONDS: Final = 2.0
"""A write waits this many seconds for another writer's evictor, then it is dropped."""

_COUNTER: Final = struct.Struct("<QQ")
_MAX_SNAPSHOT: Final = 4 << 20
"""Bytes of a snapshot with 40,000 writers; a larger file is not read."""
_RETRY_SECONDS: Final = 0.02


_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class UsageSnapshot(msgspec.Struct, frozen=True):
    """Usage as the last evictor left it."""

    used_bytes: _Count
    settled: dict[str, _Count]
    """Writer -> its settled bytes before the evictor looked, which the evictor may have seen."""
    life_seconds: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds since the last use of the record that was evicted last; a lower bound of the life of records."""


class Quota:
    """The bytes that all writers of a directory have written and reserved, kept within `capacity_bytes`.

    See `DirectoryStore` for its guarantees. Each store is one writer. Methods raise OSError.
    """

    def __init__(self, root: Path, access: Access, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.writer = new_writer()
        """The writer's name in the ledger."""
        self.evicted = 0
        """Records that this writer removed to make room."""
        self.touch_seconds = TOUCH_SECONDS
        """A used record gets a new time at most once in this many seconds."""
        self.unremovable = Unremovable(logger, "dir tier")
        """Files that the last eviction could not remove."""
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
        self.clock = SharedClock(control / "clock", access)
        """The times of uses."""
        self._block_bytes = CONTROL_BYTES

    def recover(self) -> None:
        """Create the ledger's folders; count and remove the files of dead writers."""
        for directory in (self._control, self._temporaries, self._counters):
            self._access.make_folder(directory)
        with suppress(OSError):  # a file system that does not say: whole pages
            self._block_bytes = os.statvfs(self._root).f_frsize or self._block_bytes
        self.clock.now()
        _remove_all(self._abandoned(self._temporaries))
        if self.snapshot() is None:
            self._evict(0, self.clock.now(), self.capacity_bytes)
        else:
            self._fold_dead_writers()

    def taken(self, nbytes: int) -> int:
        """Bytes that a file of this length takes of the file system, in whole blocks."""
        return -(-nbytes // self._block_bytes) * self._block_bytes

    def make_room(self, nbytes: int) -> int:
        """Evict for a write that did not fit, as if the present usage were the capacity."""
        for _ in range(2):  # the first look may find less there than the ledger says
            limit = min(self.capacity_bytes, self.used_bytes())  # with those `nbytes`, which were not written
            if freed := self._evict(max(1, 2 * nbytes), self.clock.now(), limit):
                return freed
        return 0

    def new_file(self) -> Path:
        """A path for a file that is being written; it is removed after this process has died."""
        return self._temporaries / f"{self.writer}.{next(self._numbers)}"

    # The ledger: what all writers together have written and reserved

    def reserve(self, sizes: Sequence[int], time_ns: int) -> int:
        """Reserve room for as many leading records as fit; returns their number."""
        deadline = time.monotonic() + EVICTOR_TIMEOUT_SECONDS
        granted = len(sizes)
        hopeless = False
        while granted:
            wanted = sum(sizes[:granted])
            room = self.try_reserve(wanted)
            if room >= wanted:
                break
            if hopeless:
                granted = sum(total <= room for total in accumulate(sizes[:granted]))
            else:
                freed = self._evict(wanted, time_ns, self.capacity_bytes)
                hopeless = freed == 0 or (freed is None and time.monotonic() >= deadline)
                if freed is None:
                    time.sleep(_RETRY_SECONDS)
        return granted

    def try_reserve(self, nbytes: int) -> int:
        """Reserve `nbytes` if there is room; returns the room there is."""
        # Write the own counter first, then read the others': of two concurrent writers at least one sees the other.
        self._count(reserved=nbytes)
        room = 0
        try:
            room = self.capacity_bytes - self.used_bytes() + nbytes
        finally:
            if room < nbytes:
                self._count(reserved=-nbytes)
        return room

    def settle(self, nbytes: int) -> None:
        """The reserved bytes are written or given up: from now on the next evictor can see them."""
        self._count(settled=nbytes)

    def _count(self, *, reserved: int = 0, settled: int = 0) -> None:
        with self._lock:
            # If the counter cannot be written, nothing is reserved; a release is kept and the next call writes it.
            self._settled += settled
            self._reserved += min(reserved, 0)
            counter = _COUNTER.pack(self._reserved + max(reserved, 0), self._settled)
            # Opened anew each time: closing is what makes a file's content visible to the other hosts of an NFS.
            with closing(self._access.open(self._counters / self.writer, os.O_WRONLY)) as descriptor:
                os.pwrite(descriptor, counter, 0)
                if reserved > 0:  # a reservation must survive a power cut
                    sync_file(descriptor)
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
        """The last snapshot; None, so that records are counted anew, if there is none, or one that cannot be true."""
        raw = files.beginning(self._snapshot_path, _MAX_SNAPSHOT) or b""
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            found = msgspec.json.decode(raw, type=UsageSnapshot)
            return found if found.settled.get(self.writer, 0) <= self._settled else None
        return None

    def used_bytes(self) -> int:
        """Upper bound of the bytes that are used or reserved."""
        # Counters first: one that is removed in between is part of the snapshot read after it.
        counted = self.counted()
        found = self.snapshot()
        if found is None:
            return self.capacity_bytes + 1
        self.touch_seconds = min(TOUCH_SECONDS, found.life_seconds / TOUCH_SHARE)
        return found.used_bytes + _since(counted, found.settled)

    def _fold_dead_writers(self) -> None:
        """Count reservations of dead writers as used, and remove their counters.

        Does nothing while a writer evicts; the next writer that opens the directory does it. After a kill at any moment
        or a power cut each byte is still counted at least once.
        """
        dead = self._abandoned(self._counters)
        if not dead or not self.lock.acquire():
            return
        try:
            counted = self.counted()
            known = self.snapshot()
            if known is not None:
                folded = {path.name: counted[path.name] for path in dead if path.name in counted}
                used = known.used_bytes + _since(folded, known.settled)
                # Until they are removed, their counters add nothing.
                settled = {name: known.settled.get(name, 0) for name in counted}
                settled |= {name: reserved for name, (reserved, _) in folded.items()}
                self._write_snapshot(UsageSnapshot(used, settled, known.life_seconds))
                _remove_all(dead)
                sync_folder(self._counters)
        finally:
            self.lock.release()

    # The evictor

    def _evict(self, wanted: int, before_ns: int, limit: int) -> int | None:
        """List all records and evict until `wanted` of `limit` bytes are free; returns the number evicted.

        Evicts nothing used after `before_ns`. None if another writer evicts.
        """
        if not self.lock.acquire():
            return None
        self.unremovable.forget()
        try:
            _remove_all(self._abandoned(self._temporaries))
            # Their files are counted below; their counters may be removed only after the snapshot is written.
            abandoned = self._abandoned(self._counters)
            known = self.snapshot()
            counted = self.counted()
            settled = {name: done for name, (_, done) in counted.items()}
            gone = {path.name for path in abandoned}
            # The bytes to free are known only after the listing, and at most what the ledger says: the oldest files of
            # that size together are candidates, so that not every name is kept.
            target = limit - min(wanted, limit) - limit // SLACK_SHARE
            most = known.used_bytes + _since(counted, known.settled) - target if known else limit
            evicted = 0
            excess = 1
            stuck = -1
            life = known.life_seconds if known else TOUCH_SECONDS * TOUCH_SHARE
            while excess > 0 and stuck < len(self.unremovable):  # again for others, where some could not be removed
                stuck = len(self.unremovable)
                used, candidates = self._oldest(before_ns, most)
                most *= 2
                counted = {name: numbers for name, numbers in self.counted().items() if name not in gone}
                excess = used + _since(counted, settled) - target if wanted else used - limit
                for negative_ns, _, size, path in candidates:
                    if excess <= 0:
                        break
                    self.lock.renew()
                    try:
                        removed = files.remove(path)
                    except OSError as error:
                        self.unremovable.note(path, error)
                        continue
                    if removed:
                        evicted += 1
                        life = max(0.0, (self.clock.local.now() + negative_ns) / 1e9)
                    excess -= size
                    used -= size
            self.unremovable.log()
            self._write_snapshot(UsageSnapshot(used, settled, life))
            _remove_all(abandoned)
            with self._lock:
                self.evicted += evicted
            return evicted
        finally:
            self.lock.release()

    def _oldest(self, before_ns: int, nbytes: int) -> tuple[int, list[tuple[int, int, int, str]]]:
        """Bytes in use, and the records to evict first: at least `nbytes` of them if there are that many."""
        used = CONTROL_BYTES
        heap: list[tuple[int, int, int, str]] = []  # most recently used first; at equal times the earliest created
        held = 0
        for name, entry in files.records(self._root):
            self.lock.renew()
            with suppress(FileNotFoundError):
                status = entry.stat()
                used += taken(status)
                if status.st_mtime_ns < before_ns and key_of(name) and entry.path not in self.unremovable:
                    heapq.heappush(heap, (-status.st_mtime_ns, status.st_ino, taken(status), entry.path))
                    held += taken(status)
                    while heap and held - heap[0][2] >= nbytes:
                        held -= heapq.heappop(heap)[2]
        return used + sum(self.unfinished()), sorted(heap, reverse=True)

    def unfinished(self) -> list[int]:
        """Bytes that each record takes that is being written, or whose writer died meanwhile."""
        found = map(files.status, map(self._temporaries.joinpath, os.listdir(self._temporaries)))
        return [taken(status) for status in found if status]

    def _write_snapshot(self, found: UsageSnapshot) -> None:
        content = msgspec.json.encode(found)
        replace_own(self._snapshot_path, content, self._access, beside=self.new_file(), durable=True)

    def _abandoned(self, directory: Path) -> list[Path]:
        """Files of dead writers there: unfinished records, or their counters."""
        paths = [directory / name for name in os.listdir(directory) if not name.startswith(self.writer)]
        return [path for path in paths if self._is_abandoned(path)]

    def _is_abandoned(self, path: Path) -> bool:
        if died_here(path.name):
            return True
        # Also for a writer on this host: a new process may have the pid of a dead one.
        status = files.status(path)
        return status is not None and self.clock.is_abandoned(status)

    def lost(self) -> str:
        """Why nothing can be written any more, whatever room there is; "" if nothing is missing."""
        gone = next((folder for folder in (self._temporaries, self._counters) if not folder.exists()), None)
        return f"the folder {gone.relative_to(self._root)} was removed" if gone else ""

    def close(self) -> None:
        """Remove this writer's counter, unless the ledger still needs it."""
        with self._lock:
            found = self.snapshot() if self._reserved == self._settled else None
            if found is not None and found.settled.get(self.writer, 0) == self._settled:
                (self._counters / self.writer).unlink(missing_ok=True)


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # it is gone, or nothing that can be removed: it counts as before
            path.unlink()


def _since(counted: Mapping[str, tuple[int, int]], settled: Mapping[str, int]) -> int:
    """Bytes that the writers in `counted` have reserved since `settled`."""
    return sum(max(0, reserved - settled.get(name, 0)) for name, (reserved, _) in counted.items())
