"""A tier in a directory that many hosts mount (NFS, Lustre, CephFS), written and bounded by all of them together.

Owns one file a record, and when each was used last. Never locks a record; see `quota` for how all writers together
keep within the capacity.

A call that hangs in a hard-mounted file system cannot be given up from user space: it ends when the server is back, on
the tier's own threads. Mount with `soft,timeo=...` where it must end sooner.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import numpy as np

from kvpact.errors import TierError
from kvpact.own_files import Access, NotOurs, OwnFolder
from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.directory import BACKEND, files
from kvpact.tiers.directory.quota import CONTROL, Quota
from kvpact.tiers.free_space import FULL, warn_if_scarce
from kvpact.tiers.record import FIELDS
from kvpact.tiers.shared.store import (
    RecordBuffer,
    RecordPieces,
    RecordStore,
    StoredRecord,
    StoreError,
    StoreFull,
    StoreUsage,
    key_of,
    record_name,
)
from kvpact.tiers.urls import TierURL
from kvpact.tiers.use_clock import STEP_NS

logger = logging.getLogger(__name__)

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class DirectoryStore(RecordStore):
    """Records as files `<group>/<first 2 digits>/<digits>` in our folder, visible once complete.

    **Bound.** Before it writes, a writer reserves the bytes in its own counter and then reads all others'; it writes
    only if everything that was found, written since or reserved fits. So `capacity_bytes` is never exceeded, temporary
    files included, where writers see each other's files at once. On file systems that cache attributes (NFS: up to
    `acdirmax`, 60 s) it may be exceeded by what writers that began within that time write.

    **Eviction.** Whoever finds too little room becomes the evictor and removes what was used least recently until a
    sixteenth of the capacity is free; this takes some 30 us a record on a local disk. A record's time is its file's
    mtime, by `SharedClock`: set when it is written or looked up, always a little before that of the block before it, so
    that tails go before heads; files of the same time (Lustre keeps whole seconds) go in the reverse order of writing.
    A write never evicts what was used after it. Where the file system has less room than the capacity, that is as good.

    **Death.** A process killed at any time leaves temporary files and a counter. The next store that is opened or
    evicts on that host removes them, and counts as used what the counter said; elsewhere this takes an hour. The lock
    of an evictor that died on another host is broken by whoever saw it unmoved for `LEASE_SECONDS`; should two evict
    at once, they remove more than needed.

    Engines that share the directory run as one user or as members of one group that the URL names, with one capacity
    (each keeps to its own). Their clocks need not agree: all go on from the time of whoever is ahead, by a file.
    """

    kind = BACKEND.label

    def __init__(self, folder: OwnFolder, capacity_bytes: int, *, for_tool: bool = False) -> None:
        """Takes over `folder`, and with `for_tool` leaves it as it is. Raises StoreError if it cannot be used."""
        self._for_tool = for_tool
        self._folder = folder
        self._access = folder.access
        self.root = folder.held
        self.quota = Quota(folder.held, folder.access, capacity_bytes)
        if not for_tool:
            with self._reported("open"):
                try:
                    self.quota.recover()
                except OSError as error:
                    if error.errno not in FULL or not self.quota.make_room(0):
                        raise
                    self.quota.recover()
                warn_if_scarce(logger, "dir tier", folder.path, capacity_bytes, (self.quota.used_bytes(),))
        self.evicted = self.quota.evicted

    @property
    def place(self) -> str:
        return f"dir://{self._folder.path.parent}"

    # Records

    def exists(self, names: Sequence[str]) -> list[bool]:
        """True for each record that is there, which counts as used, a little before the one that is named before it."""
        found: list[bool] = []
        latest: int | None = None
        with self._reported("read"):
            for name in names:
                status = files.status(self.path_of(name))
                found.append(status is not None and status.st_size > 0)
                if status and found[-1] and not self._for_tool:
                    latest = self._touch(name, status.st_mtime_ns, latest)
        return found

    def _touch(self, name: str, used_ns: int, latest_ns: int | None) -> int:
        """Note that a record is used, as recently as `latest_ns` at most; what the next one's time may be at most.

        Without `latest_ns` a record of long ago gets the time of now, or a step before that of its parent.
        """
        long_ago = self.quota.clock.local.now() - used_ns > self.quota.touch_seconds * 1e9
        if latest_ns is None and long_ago:
            now = self.quota.clock.now()
            latest_ns = min(now, self._before(name, self._beginning(name), {}, now))
        elif latest_ns is None:
            latest_ns = used_ns
        if used_ns > latest_ns or (used_ns < latest_ns and long_ago):
            used_ns = latest_ns
            with suppress(OSError):  # evicted meanwhile, or another user's: it ages as if it were not used
                os.utime(self.path_of(name), ns=(used_ns, used_ns))
        return used_ns - STEP_NS

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        with self._reported("read"):
            return [files.read_record(self.path_of(name), buffer) for name, buffer in zip(names, buffers, strict=True)]

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        sizes = [self.quota.taken(sum(len(memoryview(piece).cast("B")) for piece in pieces)) for pieces in records]
        with self._reported("write"):
            times = self._times(names, records)
            granted = self.quota.reserve(sizes, min(times, default=0))
            try:
                for name, pieces, used_ns in zip(names[:granted], records, times, strict=False):
                    self._write_record(self.path_of(name), pieces, used_ns)
            finally:
                self.evicted = self.quota.evicted
                self.quota.settle(sum(sizes[:granted]))
        if granted < len(names):
            why = self.quota.unremovable.log() or "give it a larger capacity"
            raise StoreError(
                f"{self.place} has no room for {len(names) - granted} of {len(names)} records: its "
                f"{self.quota.capacity_bytes} bytes hold more recently used records; {why}"
            )

    def make_room(self, nbytes: int) -> int:
        with self._reported("write"):
            freed = self.quota.make_room(nbytes)
            self.evicted = self.quota.evicted
        return freed

    def _times(self, names: Sequence[str], records: Sequence[RecordPieces]) -> list[int]:
        """Each record's time: now, but a step before that of its parent; the deeper, the older without a parent."""
        now = self.quota.clock.now()
        times: dict[str, int] = {}
        for name, pieces in zip(names, records, strict=True):
            times[name] = min(now, self._before(name, pieces[0], times, now))
        return [times[name] for name in names]

    def _before(self, name: str, header: bytes | memoryview | None, times: Mapping[str, int], now: int) -> int:
        """A time for a record with this `header`, which is a step before that of its parent.

        A parent's time is one of `times`, or that of its file. Without a parent it is `now`, less a step of each depth.
        """
        if key_of(name) is None or header is None or memoryview(header).nbytes != HEADER_BYTES:
            return now
        (fields,) = np.frombuffer(header, FIELDS)
        parent = record_name(name.partition("/")[0], fields["parent"].tobytes())
        if parent in times:
            return times[parent] - STEP_NS
        if fields["parent"].any() and (status := files.status(self.path_of(parent))):
            return status.st_mtime_ns - STEP_NS
        return now - int(fields["depth"]) * STEP_NS

    def _beginning(self, name: str) -> bytes | None:
        return files.beginning(self.path_of(name), HEADER_BYTES)

    def _write_record(self, path: Path, pieces: RecordPieces, used_ns: int) -> None:
        temporary = self.quota.new_file()
        try:
            files.write_new(temporary, pieces, used_ns)
            if self._access.group is not None:
                self._access.settle(temporary, self._access.file_mode)
            try:
                files.publish(temporary, path)
            except FileNotFoundError:
                self._access.make_parents(path, self.root)
                files.publish(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self, names: Sequence[str]) -> int:
        removed = 0
        failed = list[OSError]()
        with self._reported("remove"):
            for name in names:
                try:
                    removed += files.remove(self.path_of(name))
                except OSError as error:  # the others go all the same
                    failed.append(error)
            if failed:
                raise failed[0]
        return removed

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        with self._reported("read"):
            return [self._beginning(name) for name in names]

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        with self._reported("list"):
            for name, entry in files.records(self.root, group):
                with suppress(FileNotFoundError):
                    yield StoredRecord(name, entry.stat().st_size)

    def size(self, name: str) -> int | None:
        with self._reported("read"):
            status = files.status(self.path_of(name))
            return status.st_size if status else None

    def usage(self) -> StoreUsage:
        with self._reported("read"):
            capacity = self.quota.capacity_bytes
            if self._for_tool and self.quota.snapshot() is None:  # no engine was here yet
                return StoreUsage(0, capacity)
            used = self.quota.used_bytes()
            return StoreUsage(min(used, capacity or used), capacity)

    def unfinished(self) -> StoreUsage:
        with suppress(OSError):
            return StoreUsage(sum(self.quota.unfinished()))
        return StoreUsage()

    def lost(self) -> str:
        return self._folder.lost() or self.quota.lost()

    def close(self) -> None:
        with suppress(OSError):
            self.quota.close()
        self._folder.close()

    def path_of(self, name: str) -> Path:
        """The file of a record."""
        return files.path_of(self.root, name)

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            right = ""
            if error.errno in FULL:
                right = (
                    f"; make room there, or lower the capacity of {self.quota.capacity_bytes} bytes below what there is"
                )
            elif error.errno in _DENIED:
                right = f"; give user {os.geteuid()} the right to write there, and run all its engines as this user"
            kind = StoreFull if error.errno in FULL else StoreError
            raise kind(f"cannot {what} in {self.place}: {error.strerror or error}{right}") from None


def open_directory(url: TierURL, *, for_tool: bool = False) -> DirectoryStore:
    """The store at a `dir://` URL; its directory is made if only the last part of the path is missing.

    `for_tool`: nothing is made, evicted or marked as used; what is not there is an empty store.

    Raises:
        TierError: saying what is in the way.
    """
    path = Path(url.path)
    try:
        if for_tool:
            return DirectoryStore(OwnFolder.look(path), url.capacity, for_tool=True)
        folder = OwnFolder.make(path, Access.of(url.options.get("group")))
        if (path / CONTROL).exists():
            logger.warning(
                "dir tier: the records right in %s, and its %s, are of an older kvpact; nobody reads them and no "
                "capacity counts them: remove them (records are in %s now)", path, CONTROL, folder.path,
            )  # fmt: skip
        return DirectoryStore(folder, url.capacity)
    except (NotOurs, StoreError) as error:
        raise TierError(f"dir tier: {error}") from None
