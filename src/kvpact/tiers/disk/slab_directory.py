"""The slabs that share one directory, and the bytes that each may take of the directory's capacity.

Owns the rule of room: a slab in use may grow to what it claimed; unused slabs are kept until their room is needed, and
removed oldest first. Never reads a block.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpact.errors import TierError
from kvpact.identity.keys import Namespace
from kvpact.own_files import OWN_FOLDER, PRIVATE, Access, NotOurs, OwnFolder, closing, open_own
from kvpact.tiers.disk.slab import SLAB_SUFFIX, Slab, Superblock, SuperblockError, is_locked, lock_file

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
"""A file beside the slabs; a process that opens, grows or removes a slab locks it."""

LOCK_TIMEOUT_S: Final = 2.0
"""Seconds to wait for a lock: the threads of a process that was just killed may hold it for a moment."""

_RETRY_S = 0.02
_OPEN_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another slab file in the directory. `superblock` is None if it cannot be read, and the file is then kept."""

    path: Path
    superblock: Superblock | None
    in_use: bool
    file_bytes: int
    modified: float

    @property
    def claim_bytes(self) -> int:
        """The size to which it may grow while in use."""
        return max(self.file_bytes, self.superblock.claim_bytes if self.superblock else 0)


class SlabDirectory:
    """The slabs in kvpact's folder inside a directory that a user named, at most `capacity_bytes` together."""

    def __init__(self, named: Path, capacity_bytes: int = 0, access: Access = PRIVATE) -> None:
        self.named = named
        self.path = named / OWN_FOLDER
        self.capacity_bytes = capacity_bytes
        self.access = access

    @classmethod
    def prepare(cls, named: Path, capacity_bytes: int, access: Access = PRIVATE) -> SlabDirectory:
        """Check that the directory can be used; make it if only the last part of its path is missing.

        Raises:
            TierError: with the reason.
        """
        try:
            OwnFolder.make(named, access).close()
        except NotOurs as error:
            raise TierError(f"disk tier: {error}") from None
        if any(named.glob(f"*{SLAB_SUFFIX}")):
            logger.warning(
                "disk tier: slabs right in %s are of an older kvpact; nobody reads them and no capacity counts them: "
                "remove them (slabs are in %s now)", named, named / OWN_FOLDER,
            )  # fmt: skip
        return cls(named, capacity_bytes, access)

    @classmethod
    def look(cls, named: Path) -> SlabDirectory:
        """The slabs in the directory, for a tool; creates nothing. Raises NotOurs for another user's, or a link."""
        with OwnFolder.look(named) as folder:
            folder.require_ours()
            return cls(named, access=folder.access)

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Within the context no other process opens, grows or removes a slab here.

        Raises TierError after `timeout` seconds, or if the folder is no longer ours, and OSError.
        """
        with OwnFolder.again(self.named, self.access) as folder:
            descriptor = self.access.open(folder.held / LOCK_FILE, os.O_RDWR)
        with closing(descriptor):
            deadline = time.monotonic() + timeout
            while not lock_file(descriptor):
                if time.monotonic() >= deadline:
                    raise TierError(f"disk tier: another process has held {self.path} locked for {timeout:g} s")
                time.sleep(_RETRY_S)
            yield

    def slab_paths(self) -> list[Path]:
        """Every slab file, by name."""
        return sorted(self.path.glob(f"*{SLAB_SUFFIX}"))

    def neighbours(self, own: Path) -> list[Neighbour]:
        """All slabs except `own`, least recently used first. The directory must be locked."""
        found = [look_at(path) for path in self.slab_paths() if path != own]
        return sorted((item for item in found if item is not None), key=lambda item: item.modified)

    def room(self, own: Path) -> int:
        """The size to which `own` may grow: what slabs in use and unknown files leave. Must be locked."""
        return self.capacity_bytes - sum(
            item.claim_bytes for item in self.neighbours(own) if item.in_use or item.superblock is None
        )

    def make_room(self, own: Path, file_bytes: int) -> list[Neighbour]:
        """Remove idle slabs until `own` may have `file_bytes`; return what was removed. Must be locked.

        Raises:
            TierError: there would still be no room; then nothing is removed.
        """
        neighbours = self.neighbours(own)
        excess = file_bytes - self.capacity_bytes
        excess += sum(item.claim_bytes if item.in_use else item.file_bytes for item in neighbours)
        removable: list[Neighbour] = []
        for item in neighbours:
            if excess > 0 and not item.in_use and item.superblock is not None:
                removable.append(item)
                excess -= item.file_bytes
        if excess > 0:
            raise TierError(f"other slabs leave {excess} bytes too little of the directory's {self.capacity_bytes}")
        for item in removable:
            item.path.unlink(missing_ok=True)
        return removable

    def grow(self, slab: Slab, needed: int, generous: int, timeout: float) -> None:
        """Make a slab large enough for `needed` slots, or for `generous` ones if the disk has room for them.

        Idle slabs are removed for that. Raises TierError and OSError.
        """
        with self.locked(timeout):
            for removed in self.make_room(slab.path, slab.superblock.file_bytes(generous)):
                logger.info("disk tier: removed %s, unused, to make room", removed.path)
            try:
                slab.grow(generous)
            except OSError as error:
                if error.errno != errno.ENOSPC or generous == needed:
                    raise
                slab.grow(needed)


def look_at(path: Path) -> Neighbour | None:
    """A description of a slab file, which is not opened for use; None if it is gone. The directory should be locked."""
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except OSError:
        return None
    with closing(descriptor):
        status = os.fstat(descriptor)
        superblock = None
        with suppress(TierError, OSError):
            superblock = Superblock.read(descriptor, path)
        return Neighbour(path, superblock, is_locked(descriptor), status.st_size, status.st_mtime)


def open_slab(room: SlabDirectory, namespace: Namespace, slot_bytes: int, timeout: float) -> Slab:
    """The namespace's slab, created if missing; waits up to `timeout` seconds until another process closes it.

    Raises:
        TierError: with one message for people.
    """
    path = room.path / f"{namespace.name}{SLAB_SUFFIX}"
    deadline = time.monotonic() + timeout
    try:
        while True:
            with room.locked(timeout):
                opened = _open_or_make(room, path, namespace, slot_bytes)
            if isinstance(opened, Slab):
                return opened
            if time.monotonic() >= deadline:
                raise TierError(f"disk tier: {path} is in use by pid {opened}; give each engine its own directory")
            time.sleep(_OPEN_RETRY_S)
    except OSError as error:
        raise TierError(f"disk tier: cannot use {path}: {error.strerror}") from None


def _open_or_make(room: SlabDirectory, path: Path, namespace: Namespace, slot_bytes: int) -> Slab | int:
    """The slab at `path`, created if need be, with a claim on the room there is; or the pid of the process that has it.

    The directory must be locked. Raises TierError and OSError.
    """
    room_bytes = room.room(path)
    ideal = Superblock.for_capacity(namespace, slot_bytes, room_bytes)
    if not ideal.slots_in(room_bytes):
        taken = room.capacity_bytes - room_bytes
        raise TierError(
            f"disk tier: no room for one block in {room.path}: capacity {room.capacity_bytes} bytes, "
            f"{taken} claimed by other slabs, {ideal.file_bytes(1)} needed for a slab of one block of {slot_bytes}"
        )
    found = _existing(path, namespace, slot_bytes, room.access)
    if isinstance(found, int):
        return found
    if found is not None and (
        found.superblock.table_slots < ideal.slots_in(room_bytes) or not found.superblock.slots_in(room_bytes)
    ):
        logger.warning("disk tier: %s was made for another capacity; starting an empty one", path)
        found.close()
        found = None
    slab = found or Slab.create(path, ideal, room.access)
    limit = slab.superblock.slots_in(room_bytes)
    try:
        slab.claim(slab.superblock.file_bytes(limit), os.getpid())
    except BaseException:
        slab.close()
        raise
    return slab


def _existing(path: Path, namespace: Namespace, slot_bytes: int, access: Access) -> Slab | int | None:
    """The slab at `path`; the pid of the process that has it; None if there is none, or none that can be read."""
    try:
        descriptor = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        _require_ours(os.fstat(descriptor), path, access)
        if not lock_file(descriptor):
            return _owner(descriptor, path)
        superblock = Superblock.read(descriptor, path)
        if superblock.namespace.digest != namespace.digest:
            differences = "; ".join(superblock.namespace.differences(namespace))
            raise TierError(f"disk tier: {path} belongs to another model ({differences}); move it away")
        if superblock.slot_bytes != slot_bytes:
            raise TierError(
                f"disk tier: {path} has slots of {superblock.slot_bytes} bytes, the engine's blocks have {slot_bytes}; "
                f"delete the file to start an empty cache"
            )
        slab = Slab(path, descriptor, superblock)
        descriptor = -1
        return slab
    except SuperblockError as error:
        logger.warning("disk tier: %s; starting an empty one", error)
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _require_ours(found: os.stat_result, path: Path, access: Access) -> None:
    """Raise TierError for a slab that neither the folder's owner nor a member of its group created."""
    if found.st_uid != os.stat(path.parent).st_uid and (access.group is None or found.st_gid != access.group):
        raise TierError(f"disk tier: {path} belongs to user {found.st_uid}; move it away")


def _owner(descriptor: int, path: Path) -> int:
    """The pid that a locked slab names; 0 if it cannot be read."""
    try:
        return Superblock.read(descriptor, path).pid
    except TierError:
        return 0
