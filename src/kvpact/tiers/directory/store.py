"""A tier in a directory that many hosts mount (NFS, Lustre, CephFS), written and bounded by all of them together.

Owns one file a record, the ledger of bytes that keeps all writers within the capacity, and the collector that any of
them may run. Never locks a record, and never waits for another writer longer than `PATIENCE_SECONDS`.

A call that hangs in a hard-mounted file system cannot be given up from user space: it ends when the server is back, on
the tier's own threads. Mount with `soft,timeo=...` where it must end sooner.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import re
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from kvpact.errors import TierError
from kvpact.own_files import PRIVATE, Access, NotOurs, OwnFolder, open_own, replace_own, sync_folder
from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.shared.store import (
    RecordBuffer,
    RecordPieces,
    RecordStore,
    StoredRecord,
    StoreError,
    StoreUsage,
    key_of,
    record_name,
)
from kvpact.tiers.urls import TierURL

logger = logging.getLogger(__name__)

CONTROL: Final = ".kvpact"
"""Beside the groups: what the writers know of each other, and records that are being written."""

CONTROL_BYTES: Final = 4096
"""What the files of the ledger are taken to need; they are part of the capacity."""

TOUCH_SECONDS: Final = 60.0
"""A record that is used gets a new time at most so often."""

TOUCH_SHARE: Final = 8
"""...or, where records live shorter than some minutes, once in this part of such a life, so that order means use."""

LEASE_SECONDS: Final = 10.0
"""A collector that has not moved its lock for so long is taken for dead by whoever watched it."""

PATIENCE_SECONDS: Final = 2.0
"""How long a write waits for another writer's collector before it is dropped."""

SLACK_SHARE: Final = 16
"""A collector frees this part of the capacity more than is needed, so that not every write needs one."""

ABANDONED_SECONDS: Final = 3600.0
"""What a writer on another host has not changed for so long is taken to be left behind by a dead one."""

_STEP_NS: Final = 1_000
"""How much older than its parent a record looks at least: the finest step that all file systems with more than whole
seconds keep."""

_NEVER_NS: Final = 2**63
_PARENT: Final = struct.Struct("112x32s")
"""Where a record's header has the key of the block before it."""

_COUNTER: Final = struct.Struct("<QQ")
_MAX_SNAPSHOT: Final = 4 << 20
"""Bytes of a stocktaking with 40,000 writers; one that is larger is none."""
_LONGEST_NAME: Final = 4096
_RETRY_SECONDS: Final = 0.02
_RENEW_SECONDS: Final = 1.0
_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_WRITER: Final = re.compile(r"(?P<host>.+\+\d+)\+(?P<pid>\d+)\+[0-9a-f]{8}")


class UsageSnapshot(msgspec.Struct, frozen=True):
    """What the last collector found and left."""

    used_bytes: int
    settled: dict[str, int]
    """How many of each writer's bytes the collector may have seen: what that writer had settled before."""
    life_seconds: float
    """How long the record that was evicted last had not been used; a lower bound of how long records live."""


class DirectoryStore(RecordStore):
    """See `RecordStore`. Records are files `<group>/<first 2 digits>/<digits>` in our folder, visible once complete.

    **Bound.** Before it writes, a writer reserves the bytes in its own counter and then reads all others'; it writes
    only if everything that was found, written since or reserved fits. So `capacity_bytes` is never exceeded, temporary
    files included, where writers see each other's files at once. On file systems that cache attributes (NFS: up to
    `acdirmax`, 60 s) it may be exceeded by what writers that began within that time write.

    **Eviction.** Whoever finds too little room becomes the collector and removes what was used least recently until a
    sixteenth of the capacity is free; this takes some 30 us a record on a local disk. A record's time is its file's
    mtime: set when it is written or looked up, always a little before the time of the block before it, so that tails go
    before heads; files of the same time (Lustre keeps whole seconds) go in the reverse order of writing. A write never
    evicts what was used after it.

    **Death.** A process killed at any time leaves temporary files and a counter. The next store that is opened or
    collects on that host removes them, and counts as used what the counter said; elsewhere this takes an hour. The lock
    of a collector that died on another host is broken by whoever saw it unmoved for `LEASE_SECONDS`; should two collect
    at once, they evict more than needed.

    Engines that share the directory run as one user or as members of one group that the URL names, with one capacity
    (each keeps to its own), on clocks that agree within seconds: a skew makes records look more or less used and harms
    nothing else.
    """

    kind = "directory"

    def __init__(self, folder: OwnFolder, capacity_bytes: int, *, for_tool: bool = False) -> None:
        """Takes over `folder`, and with `for_tool` leaves it as it is. Raises StoreError if it cannot be used."""
        self._for_tool = for_tool
        self._folder = folder
        self._access = folder.access
        self.root = root = folder.held
        self.capacity_bytes = capacity_bytes
        self.evicted = 0
        """Records that this store's collector removed to make room."""
        self._lock = threading.Lock()
        self._control = root / CONTROL
        self._temporaries = self._control / "new"
        self._counters = self._control / "writers"
        self._stocktaking_path = self._control / "stocktaking"
        self._collector_path = self._control / "collector"
        self._name = f"{_host()}+{os.getpid()}+{os.urandom(4).hex()}"
        self._numbers = count()
        self._reserved = 0
        self._settled = 0
        self._touch_seconds = TOUCH_SECONDS
        self._watched: tuple[int, int] | None = None
        self._watched_since = 0.0
        self._renewed = 0.0
        if for_tool:
            return
        with self._reported("open"):
            for directory in (self._control, self._temporaries, self._counters):
                self._access.make_folder(directory)
            self._remove_all(self._abandoned(self._temporaries))
            if self._stocktaking() is None:
                self._collect(0, time.time_ns())
            else:
                self._fold_dead_writers()

    @property
    def place(self) -> str:
        return f"dir://{self._folder.path.parent}"

    # Records

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See `RecordStore`. The unbroken run from the first name counts as used."""
        found: list[bool] = []
        latest = None if self._for_tool else time.time_ns()
        with self._reported("read"):
            for name in names:
                status = self._status(self._path(name))
                found.append(status is not None and status.st_size > 0)
                if latest is not None:
                    latest = self._touch(name, status.st_mtime_ns, latest) if status and found[-1] else None
        return found

    def _touch(self, name: str, used_ns: int, latest_ns: int) -> int:
        """Note that a record is used, as recently as `latest_ns` at most; what the next one's time may be at most."""
        if used_ns > latest_ns or (used_ns < latest_ns and time.time_ns() - used_ns > self._touch_seconds * 1e9):
            used_ns = latest_ns
            with suppress(OSError):  # evicted meanwhile, or another user's: it ages as if it were not used
                os.utime(self._path(name), ns=(used_ns, used_ns))
        return used_ns - _STEP_NS

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        with self._reported("read"):
            return [self._read_record(self._path(name), buffer) for name, buffer in zip(names, buffers, strict=True)]

    def _read_record(self, path: Path, buffer: RecordBuffer) -> bool:
        descriptor = _open_if_there(path)
        if descriptor is None:
            return False
        try:
            nbytes = sum(piece.nbytes for piece in buffer)
            return os.fstat(descriptor).st_size == nbytes and _read_into(descriptor, buffer) == nbytes
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        finally:
            os.close(descriptor)

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        sizes = [sum(len(memoryview(piece).cast("B")) for piece in pieces) for pieces in records]
        with self._reported("write"):
            times = self._times(names, records)
            granted = self._reserve(sizes, times[0] if times else 0)
            try:
                for name, pieces, used_ns in zip(names[:granted], records, times, strict=False):
                    self._write_record(self._path(name), pieces, used_ns)
            finally:
                self._settle(sum(sizes[:granted]))
        if granted < len(names):
            raise StoreError(
                f"{self.place} has no room for {len(names) - granted} of {len(names)} records: its "
                f"{self.capacity_bytes} bytes hold what was used later; give it a larger capacity"
            )

    def _times(self, names: Sequence[str], records: Sequence[RecordPieces]) -> list[int]:
        """Each record's time: now, but a step before that of the block before it."""
        now = time.time_ns()
        times: dict[str, int] = {}
        for name, pieces in zip(names, records, strict=True):
            times[name] = min(now, self._parent_time(name, pieces, times) - _STEP_NS) if len(pieces) > 1 else now
        return [times[name] for name in names]

    def _parent_time(self, name: str, pieces: RecordPieces, times: dict[str, int]) -> int:
        """The time of the block before a record; of one that has none, the end of all times."""
        header = memoryview(pieces[0])
        if header.nbytes != HEADER_BYTES:
            return _NEVER_NS
        parent = record_name(name.partition("/")[0], _PARENT.unpack_from(header)[0])
        if parent not in times and (status := self._status(self._path(parent))):
            return status.st_mtime_ns
        return times.get(parent, _NEVER_NS)

    def _write_record(self, path: Path, pieces: RecordPieces, used_ns: int) -> None:
        temporary = self._temporaries / f"{self._name}.{next(self._numbers)}"
        try:
            self._write_temporary(temporary, pieces, used_ns)
            if self._access.group is not None:
                self._access.settle(temporary, self._access.file_mode)
            try:
                self._publish(temporary, path)
            except FileNotFoundError:
                self._access.make_parents(path, self.root)
                self._publish(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @staticmethod
    def _write_temporary(path: Path, pieces: RecordPieces, used_ns: int) -> None:
        descriptor = PRIVATE.create(path)
        try:
            rest = [memoryview(piece).cast("B") for piece in pieces]
            while rest:
                rest = _behind(rest, os.writev(descriptor, rest))
            os.utime(descriptor, ns=(used_ns, used_ns))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _publish(temporary: Path, path: Path) -> None:
        # The directory is not synced: a name lost with the power is a block that is not there, and no damage.
        os.rename(temporary, path)

    def remove(self, names: Sequence[str]) -> int:
        with self._reported("remove"):
            return sum(self._remove(self._path(name)) for name in names)

    @staticmethod
    def _remove(path: Path | str) -> bool:
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return False
        return True

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        with self._reported("read"):
            return [self._head(self._path(name)) for name in names]

    def _head(self, path: Path) -> bytes | None:
        header = bytearray(HEADER_BYTES)
        descriptor = _open_if_there(path)
        if descriptor is None:
            return None
        try:
            return bytes(header[: _read_into(descriptor, [memoryview(header)])])
        finally:
            os.close(descriptor)

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        with self._reported("list"):
            for name, entry in self._records(group):
                with suppress(FileNotFoundError):
                    yield StoredRecord(name, entry.stat().st_size)

    def size(self, name: str) -> int | None:
        with self._reported("read"):
            status = self._status(self._path(name))
            return status.st_size if status else None

    def usage(self) -> StoreUsage:
        with self._reported("read"):
            if self._for_tool and self._stocktaking() is None:  # no engine was here yet
                return StoreUsage(0, self.capacity_bytes)
            return StoreUsage(min(self._estimate(), self.capacity_bytes), self.capacity_bytes)

    def close(self) -> None:
        with suppress(OSError), self._lock:
            if self._reserved == self._settled:
                self._remove_counter_if_counted()
        self._folder.close()

    # The ledger: what all writers together have written and reserved

    def _reserve(self, sizes: Sequence[int], time_ns: int) -> int:
        """Reserve room for the first of these records, for as many as there is room for; how many."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        granted, hopeless = len(sizes), False
        while granted:
            wanted = sum(sizes[:granted])
            room = self._try_reserve(wanted)
            if room >= wanted:
                break
            if hopeless:
                while granted and sum(sizes[:granted]) > room:
                    granted -= 1
            else:
                freed = self._collect(wanted, time_ns)
                hopeless = freed == 0 or (freed is None and time.monotonic() >= deadline)
                if freed is None:
                    time.sleep(_RETRY_SECONDS)
        return granted

    def _try_reserve(self, nbytes: int) -> int:
        """Reserve so much, if there is room; how much room there is for it."""
        # First said, then asked: of two writers that do so at once, one at least sees the other.
        self._count(reserved=nbytes)
        room = 0
        try:
            room = self.capacity_bytes - self._estimate() + nbytes
        finally:
            if room < nbytes:
                self._count(reserved=-nbytes)
        return room

    def _settle(self, nbytes: int) -> None:
        """What was reserved is written, or never will be: the next collector sees what there is of it."""
        self._count(settled=nbytes)

    def _count(self, *, reserved: int = 0, settled: int = 0) -> None:
        with self._lock:
            # What cannot be written down is not reserved, and given back all the same: the next call writes it.
            self._settled += settled
            self._reserved += min(reserved, 0)
            counter = _COUNTER.pack(self._reserved + max(reserved, 0), self._settled)
            # Opened anew each time: closing is what makes a file's content visible to the other hosts of an NFS.
            descriptor = self._access.open(self._counters / self._name, os.O_WRONLY)
            try:
                os.pwrite(descriptor, counter, 0)
                if reserved > 0:  # what is written now counts, also after a power cut
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if reserved > 0 and not self._reserved:
                sync_folder(self._counters)
            self._reserved += max(reserved, 0)

    def _counted(self) -> dict[str, tuple[int, int]]:
        """Every writer's bytes reserved and settled since it was opened."""
        counted: dict[str, tuple[int, int]] = {}
        for name in os.listdir(self._counters):
            raw = _beginning(self._counters / name, _COUNTER.size + 1)
            if len(raw) == _COUNTER.size:
                counted[name] = _COUNTER.unpack(raw)
        return counted

    def _stocktaking(self) -> UsageSnapshot | None:
        try:
            return msgspec.json.decode(_beginning(self._stocktaking_path, _MAX_SNAPSHOT), type=UsageSnapshot)
        except msgspec.DecodeError:
            return None

    def _estimate(self) -> int:
        """Bytes that are used or reserved; more than there are, never less."""
        # Counters first: one that is removed in between is part of what is found then.
        counted = self._counted()
        found = self._stocktaking()
        if found is None:
            return self.capacity_bytes + 1
        self._touch_seconds = min(TOUCH_SECONDS, found.life_seconds / TOUCH_SHARE)
        return found.used_bytes + _since(counted, found.settled)

    def _fold_dead_writers(self) -> None:
        """Count what dead writers have reserved as used, and remove their counters.

        Nothing if somebody collects: whoever opens the directory next does it. A kill at any moment, and a power cut,
        leave each byte counted once at least.
        """
        dead = self._abandoned(self._counters)
        if not dead or not self._lock_collector():
            return
        try:
            counted, known = self._counted(), self._stocktaking()
            if known is not None:
                folded = {path.name: counted[path.name] for path in dead if path.name in counted}
                used = known.used_bytes + _since(folded, known.settled)
                # Until they are removed, their counters say nothing new.
                settled = {name: known.settled.get(name, 0) for name in counted}
                settled |= {name: reserved for name, (reserved, _) in folded.items()}
                self._write_stocktaking(UsageSnapshot(used, settled, known.life_seconds))
                self._remove_all(dead)
                sync_folder(self._counters)
        finally:
            self._collector_path.unlink(missing_ok=True)

    # The collector

    def _collect(self, wanted: int, before_ns: int) -> int | None:
        """Take stock and evict until there are `wanted` bytes, nothing used after `before_ns`; how many records went.

        None if somebody else is at it.
        """
        if not self._lock_collector():
            return None
        try:
            self._remove_all(self._abandoned(self._temporaries))
            # Their files are found below; only then, once that is written down, may their counters go.
            abandoned = self._abandoned(self._counters)
            known = self._stocktaking()
            settled = {name: done for name, (_, done) in self._counted().items()}
            gone = {path.name for path in abandoned}
            # What is to be freed is known in the end, and not more than what the ledger says: the oldest files worth
            # that many bytes are candidates, so that not every name is kept.
            target = self.capacity_bytes - min(wanted, self.capacity_bytes) - self.capacity_bytes // SLACK_SHARE
            counted = self._counted()
            most = known.used_bytes + _since(counted, known.settled) - target if known else self.capacity_bytes
            used, candidates = self._oldest(before_ns, most)
            counted = {name: numbers for name, numbers in self._counted().items() if name not in gone}
            excess = used + _since(counted, settled) - target if wanted else used - self.capacity_bytes
            evicted = 0
            life = known.life_seconds if known else TOUCH_SECONDS * TOUCH_SHARE
            for negative_ns, _, size, path in candidates:
                if excess <= 0:
                    break
                self._renew()
                if self._remove(path):
                    evicted += 1
                    life = max(0.0, time.time() + negative_ns / 1e9)
                excess -= size
                used -= size
            self._write_stocktaking(UsageSnapshot(used, settled, life))
            self._remove_all(abandoned)
            with self._lock:
                self.evicted += evicted
            return evicted
        finally:
            self._collector_path.unlink(missing_ok=True)

    def _oldest(self, before_ns: int, nbytes: int) -> tuple[int, list[tuple[int, int, int, str]]]:
        """Bytes in use, and the records to be evicted first: at least `nbytes` of them, if there are so many."""
        used = CONTROL_BYTES
        heap: list[tuple[int, int, int, str]] = []  # the most recently used first; of the same time, the first made
        held = 0
        for name, entry in self._records():
            self._renew()
            with suppress(FileNotFoundError):
                status = entry.stat()
                used += status.st_size
                if status.st_mtime_ns < before_ns and key_of(name):
                    heapq.heappush(heap, (-status.st_mtime_ns, status.st_ino, status.st_size, entry.path))
                    held += status.st_size
                    while heap and held - heap[0][2] >= nbytes:
                        held -= heapq.heappop(heap)[2]
        for name in os.listdir(self._temporaries):
            status_or_none = self._status(self._temporaries / name)
            used += status_or_none.st_size if status_or_none else 0
        return used, sorted(heap, reverse=True)

    def _write_stocktaking(self, found: UsageSnapshot) -> None:
        beside = self._temporaries / f"{self._name}.{next(self._numbers)}"
        content = msgspec.json.encode(found)
        replace_own(self._stocktaking_path, content, self._access, beside=beside, durable=True)

    def _lock_collector(self) -> bool:
        for _ in range(2):
            try:
                descriptor = self._access.create(self._collector_path)
            except FileExistsError:
                if not self._collector_is_dead():
                    return False
                self._collector_path.unlink(missing_ok=True)
            else:
                try:
                    os.write(descriptor, self._name.encode())
                finally:
                    os.close(descriptor)
                self._renewed = time.monotonic()
                return True
        return False

    def _collector_is_dead(self) -> bool:
        """Whether it died on this host, or its lock has not moved for a lease by this host's clock alone."""
        try:
            status = os.stat(self._collector_path)
            name = _beginning(self._collector_path, _LONGEST_NAME).decode(errors="replace")
        except FileNotFoundError:
            return False
        if _died_here(name):
            return True
        seen = (status.st_ino, status.st_mtime_ns)
        if seen != self._watched:
            self._watched, self._watched_since = seen, time.monotonic()
        return time.monotonic() - self._watched_since > LEASE_SECONDS

    def _renew(self) -> None:
        if time.monotonic() - self._renewed > _RENEW_SECONDS:
            self._renewed = time.monotonic()
            with suppress(FileNotFoundError):  # somebody took this collector for dead; two of them do no harm
                os.utime(self._collector_path)

    def _abandoned(self, directory: Path) -> list[Path]:
        """What dead writers left behind there: records that they were writing, or their counters."""
        paths = [directory / name for name in os.listdir(directory) if not name.startswith(self._name)]
        return [path for path in paths if self._is_abandoned(path)]

    def _is_abandoned(self, path: Path) -> bool:
        if _died_here(path.name):
            return True
        # Also of a writer on this host: a process may have got the number of a dead one.
        status = self._status(path)
        return status is not None and time.time() - status.st_ctime > ABANDONED_SECONDS

    @staticmethod
    def _remove_all(paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    def _remove_counter_if_counted(self) -> None:
        """Leave no counter behind, unless the ledger still needs it."""
        found = self._stocktaking()
        if found is not None and found.settled.get(self._name, 0) == self._settled:
            (self._counters / self._name).unlink(missing_ok=True)

    # Within

    def _path(self, name: str) -> Path:
        group, _, rest = name.partition("/")
        return self.root / group / rest[:2] / rest

    @staticmethod
    def _status(path: Path) -> os.stat_result | None:
        try:
            return os.stat(path)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return None

    def _records(self, group: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Every file that is a record by its place and name; whatever else lies in the directory is left alone."""
        groups = [group] if group else [name for name in _list(self.root) if not name.startswith(".")]
        for its_group in groups:
            for part in _list(self.root / its_group):
                with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root / its_group / part) as files:
                    for entry in files:
                        if entry.name[:2] == part and entry.is_file(follow_symlinks=False):
                            yield f"{its_group}/{entry.name}", entry

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            number = error.errno or 0
            right = ""
            if number in _FULL:
                right = f"; make room there, or lower the capacity of {self.capacity_bytes} bytes below what there is"
            elif number in _DENIED:
                right = f"; give user {os.geteuid()} the right to write there, and run all its engines as this user"
            raise StoreError(f"cannot {what} in {self.place}: {error.strerror or error}{right}") from None


def open_directory(url: TierURL, *, for_tool: bool = False) -> DirectoryStore:
    """The store at a `dir://` URL; its directory is made if only the last part of the path is missing.

    `for_tool`: nothing is made, collected or marked as used; what is not there is an empty store.

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


def _since(counted: Mapping[str, tuple[int, int]], settled: Mapping[str, int]) -> int:
    """Bytes that writers have reserved since these were settled; what was settled later is none of them."""
    return sum(max(0, reserved - settled.get(name, 0)) for name, (reserved, _) in counted.items())


def _beginning(path: Path, most: int) -> bytes:
    """Up to `most` bytes of a file of the ledger; none if it is not there."""
    descriptor = _open_if_there(path)
    if descriptor is None:
        return b""
    try:
        return os.pread(descriptor, most, 0)
    finally:
        os.close(descriptor)


def _host() -> str:
    """This host and, because containers may share its name, this space of process ids."""
    with suppress(OSError):
        return f"{os.uname().nodename}+{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{os.uname().nodename}+0"


def _died_here(writer: str) -> bool:
    """Whether a writer's process ran on this host and is dead."""
    match = _WRITER.match(writer)
    return match is not None and match["host"] == _host() and not Path(f"/proc/{match['pid']}").exists()


def _list(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _open_if_there(path: Path) -> int | None:
    try:
        return open_own(path, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None


def _read_into(descriptor: int, buffer: RecordBuffer) -> int:
    """Fill the pieces in order; how many bytes there were."""
    rest = [piece.cast("B") for piece in buffer]
    at = 0
    while rest and (arrived := os.preadv(descriptor, rest, at)):
        at += arrived
        rest = _behind(rest, arrived)
    return at


def _behind(pieces: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the pieces behind their first `nbytes`."""
    for index, piece in enumerate(pieces):
        if nbytes < piece.nbytes:
            return [piece[nbytes:], *pieces[index + 1 :]]
        nbytes -= piece.nbytes
    return []
