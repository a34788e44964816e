"""The slabs that share one directory, and the bytes that each may take of the directory's capacity.

Owns the rule of room: engines that use the directory have equal shares of it, idle slabs are kept until their room is
needed and removed oldest first, and files grow under the directory's lock only, so that all together never exceed the
capacity. Never reads a block.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpact.errors import TierError, printable
from kvpact.identity.keys import Namespace
from kvpact.index.row_locks import close_in_children
from kvpact.own_files import OWN_FOLDER, PRIVATE, Access, NotOurs, OwnFolder, closing, open_own, replace_own
from kvpact.tiers.disk.file_lock import is_locked, lock_file, unlock_file
from kvpact.tiers.disk.slab import SLAB_SUFFIX, Slab
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.free_space import Unremovable, warn_if_scarce

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
"""A file beside the slabs; a process that opens, grows or removes a slab locks it."""

LOCK_TIMEOUT_S: Final = 2.0
"""Seconds to wait for a lock: the threads of a process that was just killed may hold it for a moment."""

ABSENT_S: Final = 600.0
"""Seconds after its last use for which an idle slab of the same namespace keeps its share: its engine may restart."""

_RETRY_S = 0.02
_NEWCOMER_SUFFIX: Final = ".newcomer"
_MODEL_SUFFIX: Final = ".model"

MODEL_BYTES: Final = 1024
"""Bytes of a model's name that are noted."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another slab file in the directory. `superblock` is None if it cannot be read, and the file is then kept.

    `file_bytes` is what the file takes of the directory's capacity: without its holes.
    """

    path: Path
    superblock: Superblock | None
    in_use: bool
    file_bytes: int
    modified: float


class DirectoryBusy(TierError):
    """Another process has held the directory's lock for too long."""


class NoRoomYet(TierError):
    """The files of other engines leave too little room now; they shrink to their shares within seconds."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a directory that one of `members` engines may take.

    `share` is its fair part of the capacity. `growth` is the size up to which it may grow: a smaller part while engines
    are absent that may come back, and not more than the files of the others leave now. `absent` is what those engines'
    slabs take.
    """

    share: int
    growth: int
    members: int
    absent: int = 0

    def file_bytes(self, present: int) -> int:
        """The size that a file of `present` bytes may have now."""
        return min(self.share, max(self.growth, present))


class _Newcomer:
    """The sign of an engine that has no slab yet: an empty, locked file, so that the others make room for it."""

    def __init__(self, directory: SlabDirectory) -> None:
        """Put up the sign. The directory must be locked. Raises OSError."""
        self.path = directory.path / f"{os.getpid()}-{secrets.token_hex(4)}{_NEWCOMER_SUFFIX}"
        self._descriptor = directory.access.create(self.path, os.O_RDWR)
        lock_file(self._descriptor)
        close_in_children(self)

    def close(self) -> None:
        """Release the lock: nobody counts the sign any more, and the next engine that sees it removes it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def remove(self) -> None:
        """Remove the sign."""
        with suppress(OSError):
            self.path.unlink()
        self.close()


class SlabDirectory:
    """The slabs in kvpact's folder inside a directory that a user named, at most `capacity_bytes` together."""

    def __init__(
        self, named: Path, capacity_bytes: int = 0, access: Access = PRIVATE, folder: OwnFolder | None = None
    ) -> None:
        self.named = named
        self.path = named / OWN_FOLDER
        self.capacity_bytes = capacity_bytes
        self.access = access
        self.folder = folder
        """The folder, held open by an engine that uses it."""
        self._newcomer: _Newcomer | None = None
        self._opened_at = time.monotonic()
        self._seen_in_use: dict[Path, float] = {}
        self._unremovable = Unremovable(logger, "disk tier")
        """Idle slabs that were in the way, and stay."""

    @classmethod
    def prepare(cls, named: Path, capacity_bytes: int, access: Access = PRIVATE) -> SlabDirectory:
        """Check that the directory can be used; make it if only the last part of its path is missing.

        Raises:
            TierError: with the reason.
        """
        try:
            folder = OwnFolder.make(named, access)
        except NotOurs as error:
            raise TierError(f"disk tier: {error}") from None
        if any(named.glob(f"*{SLAB_SUFFIX}")):
            logger.warning(
                "disk tier: slabs right in %s are of an older kvpact; nobody reads them and no capacity counts them: "
                "remove them (slabs are in %s now)", named, named / OWN_FOLDER,
            )  # fmt: skip
        directory = cls(named, capacity_bytes, access, folder)
        held = (512 * path.stat().st_blocks for path in directory.slab_paths())
        warn_if_scarce(logger, "disk tier", directory.path, capacity_bytes, held)
        return directory

    @classmethod
    def look(cls, named: Path) -> SlabDirectory:
        """The slabs in the directory, for a tool; creates nothing. Raises NotOurs for another user's, or a link."""
        with OwnFolder.look(named) as folder:
            folder.require_ours()
            return cls(named, access=folder.access)

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Within the context no other process opens, grows or removes a slab here.

        Raises DirectoryBusy after `timeout` seconds, TierError if the folder is no longer ours, and OSError.
        """
        with OwnFolder.again(self.named, self.access) as folder:
            descriptor = self.access.open(folder.held / LOCK_FILE, os.O_RDWR)
        with closing(descriptor):
            deadline = time.monotonic() + timeout
            while not lock_file(descriptor):
                if time.monotonic() >= deadline:
                    raise DirectoryBusy(f"disk tier: another process has held {self.path} locked for {timeout:g} s")
                time.sleep(_RETRY_S)
            try:
                yield
            finally:
                unlock_file(descriptor)

    def slab_paths(self) -> list[Path]:
        """Every slab file, by name."""
        return sorted(self.path.glob(f"*{SLAB_SUFFIX}"))

    def slabs_of(self, namespace: Namespace) -> dict[int, Path]:
        """The namespace's slab files, by number."""
        named = re.compile(rf"{re.escape(namespace.name)}(?:-([1-9][0-9]*))?{re.escape(SLAB_SUFFIX)}")
        found = ((named.fullmatch(path.name), path) for path in self.slab_paths())
        return {int(match[1] or 0): path for match, path in found if match is not None}

    def slab_path(self, namespace: Namespace, number: int) -> Path:
        """The file of the namespace's slab of this number, from 0 on."""
        return self.path / f"{namespace.name}{f'-{number}' if number else ''}{SLAB_SUFFIX}"

    def note_model(self, namespace: Namespace) -> None:
        """Write the model's name beside the namespace's slabs, for people; names without a slab go. Raises OSError."""
        for path in self.path.glob(f"*{_MODEL_SUFFIX}"):
            if not any(self.path.glob(f"{path.stem}*{SLAB_SUFFIX}")):
                with suppress(OSError):
                    path.unlink()
        if namespace.model and model_beside(self.slab_path(namespace, 0)) != namespace.model:
            name = f"{namespace.name}{_MODEL_SUFFIX}"
            replace_own(self.path / name, namespace.model.encode(errors="replace")[:MODEL_BYTES], self.access)

    def neighbours(self, own: Path | None) -> list[Neighbour]:
        """All slabs except `own`, least recently used first. The directory must be locked."""
        found = [look_at(path) for path in self.slab_paths() if path != own]
        return sorted((item for item in found if item is not None), key=lambda item: item.modified)

    def room(self, namespace: Namespace, own: Path | None) -> Room:
        """Bytes that an engine of this namespace may take, whose slab is `own`. The directory must be locked."""
        neighbours = self.neighbours(own)
        unknown = sum(item.file_bytes for item in neighbours if item.superblock is None)
        engines = sum(item.in_use for item in neighbours if item.superblock is not None) + self._count_newcomers()
        absent = [item for item in neighbours if self._is_absent(item, namespace)]
        capacity = max(0, self.capacity_bytes - unknown)
        members = 1 + engines
        kept = sum(item.file_bytes for item in neighbours if self._stays(item, namespace))
        left = max(0, self.capacity_bytes - kept)
        growth = min(capacity // (members + len(absent)), left)
        return Room(capacity // members, growth, members, sum(item.file_bytes for item in absent))

    def _stays(self, item: Neighbour, namespace: Namespace) -> bool:
        """True if a slab is not removed for room: it is used, may be soon, is none of ours, or cannot be removed."""
        cannot = str(item.path) in self._unremovable
        return item.in_use or item.superblock is None or cannot or self._is_absent(item, namespace)

    def _is_absent(self, item: Neighbour, namespace: Namespace) -> bool:
        """True if a slab is idle for so short a time that its engine may come back."""
        if item.superblock is None or item.superblock.namespace.digest != namespace.digest:
            return False
        now = time.monotonic()
        if item.in_use:
            self._seen_in_use[item.path] = now
        seen = self._seen_in_use.get(item.path)
        if seen is None and time.time() - item.modified > ABSENT_S:  # by the file's time, as nobody saw its engine
            return False
        return not item.in_use and now < (self._opened_at if seen is None else seen) + ABSENT_S

    def announce(self) -> None:
        """Ask other engines to make room for this one, until `end_announcement`. Must be locked. Raises OSError."""
        self._newcomer = self._newcomer or _Newcomer(self)

    def end_announcement(self) -> None:
        """Withdraw the announcement: this engine has a slab, or does without."""
        if self._newcomer is not None:
            self._newcomer.remove()
            self._newcomer = None

    def _count_newcomers(self) -> int:
        """Engines that wait for a slab, without the caller. Signs of dead ones are removed."""
        waiting = 0
        for path in self.path.glob(f"*{_NEWCOMER_SUFFIX}"):
            if self._newcomer is not None and path == self._newcomer.path:
                continue
            with suppress(OSError), closing(open_own(path, os.O_RDONLY)) as descriptor:
                if is_locked(descriptor):
                    waiting += 1
                else:
                    path.unlink()
        return waiting

    def make_room(self, namespace: Namespace, own: Path, file_bytes: int) -> None:
        """Remove idle slabs until `own` may have `file_bytes`. The directory must be locked.

        Raises:
            NoRoomYet: there would still be no room; then nothing is removed, unless something cannot be.
        """
        neighbours = self.neighbours(own)
        excess = file_bytes - self.capacity_bytes + sum(item.file_bytes for item in neighbours)
        self._unremovable.forget()
        removable = [item for item in neighbours if not self._stays(item, namespace)]
        if excess <= sum(item.file_bytes for item in removable):
            for item in removable:
                if excess > 0 and self._remove_unused(item.path):
                    excess -= item.file_bytes
        said = self._unremovable.log()
        if excess > 0:
            raise NoRoomYet(
                f"other slabs leave {excess} bytes too little of the directory's {self.capacity_bytes}"
                f"{'; ' if said else ''}{said}"
            )

    def _remove_unused(self, path: Path) -> bool:
        """Remove an idle slab to make room; whether it is gone."""
        try:
            self.remove(path)
        except OSError as error:
            self._unremovable.note(str(path), error)
            return False
        logger.info("disk tier: removed %s, unused, to make room", printable(str(path)))
        return True

    def remove(self, path: Path) -> None:
        """Remove an idle slab, and free its blocks on the disk at once although other engines may have it open.

        The directory must be locked. Raises OSError, unless there is none.
        """
        with suppress(FileNotFoundError), closing(open_own(path, os.O_RDWR)) as descriptor:
            path.unlink()
            os.ftruncate(descriptor, 0)

    def grow(self, slab: Slab, needed: int, generous: int, timeout: float, grow: Callable[[int], None]) -> None:
        """Grow a slab by `grow` to `needed` slots, or to `generous` ones if the disk has room for them.

        Idle slabs are removed for that. Raises TierError and OSError.
        """
        with self.locked(timeout):
            room = self.room(slab.superblock.namespace, slab.path)
            allowed = slab.superblock.slots_in(room.file_bytes(slab.taken_bytes()))
            if needed > allowed:
                raise NoRoomYet(f"its share, one of {room.members}, has room for {allowed} blocks")
            generous = min(generous, allowed)
            self.make_room(slab.superblock.namespace, slab.path, slab.superblock.file_bytes(generous))
            try:
                grow(generous)
            except OSError:
                if generous == needed:
                    raise
                grow(needed)


def model_beside(slab: Path) -> str:
    """Model name of a slab, for people; "" if nobody has noted it."""
    name = slab.stem.partition("-")[0] + _MODEL_SUFFIX
    with suppress(OSError), open(open_own(slab.with_name(name), os.O_RDONLY), "rb") as file:
        return file.read(MODEL_BYTES).decode(errors="replace")
    return ""


def look_at(path: Path) -> Neighbour | None:
    """A description of a slab file, which is not opened for use; None if it is gone. The directory should be locked."""
    with suppress(OSError), closing(open_own(path, os.O_RDONLY)) as descriptor:
        status = os.fstat(descriptor)
        superblock = None
        with suppress(TierError, OSError):
            superblock = Superblock.read(descriptor, path)
        # Of a file that is no slab only what it takes of the disk: anybody can make a hole of any size.
        size = superblock.taken_bytes(status) if superblock else min(status.st_size, 512 * status.st_blocks)
        return Neighbour(path, superblock, is_locked(descriptor), size, status.st_mtime)
    return None
