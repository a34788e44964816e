"""Opening of an engine's own slab: it takes over an idle one of its namespace, or makes one.

Owns the choice among the namespace's slabs and the messages about files that are no such slab. Never reads a block.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

from kvpact.errors import TierError, reason_of
from kvpact.identity.keys import Namespace
from kvpact.own_files import Access, closing, open_own
from kvpact.tiers.disk.file_lock import lock_file
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.slab_directory import ABSENT_S, NoRoomYet, Room, SlabDirectory
from kvpact.tiers.disk.superblock import Superblock, SuperblockError, refuted_in
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

_RETRY_S: Final = 0.05
_LOCK_S: Final = 0.5
"""Seconds to wait for the directory's lock at least: other engines take it for a moment every second."""

# The index has a row for each slot of the file, also of one that is a hole.
MOST_TIMES: Final = 32  # a slab of more than so many times the slots that it may have is not taken over


@dataclass(frozen=True, slots=True)
class SlabOpener:
    """Opens a slab of one namespace in a directory, at most once."""

    directory: SlabDirectory
    namespace: Namespace
    slot_bytes: int
    warned: LogOnce = field(default_factory=lambda: LogOnce(logger))

    def open(self, timeout: float) -> Slab:
        """An idle slab of the namespace, the one that was used last, else a new one.

        While other engines use slabs of the namespace and none is idle, waits up to `timeout` seconds: one of them may
        be ending, and its slab then serves better than a new one.

        Raises:
            NoRoomYet: the others must make room first; they are asked to until `SlabDirectory.end_announcement`.
            TierError: with one message for people.
        """
        deadline = time.monotonic() + timeout
        try:
            while True:
                is_late = time.monotonic() >= deadline
                with self.directory.locked(max(timeout, _LOCK_S)):
                    slab = self._try(may_make_another=is_late)
                if slab is not None:
                    with suppress(OSError):
                        self.directory.note_model(self.namespace)
                    return slab
                time.sleep(_RETRY_S)
        except OSError as error:
            path = self.directory.slab_path(self.namespace, 0)
            raise TierError(f"disk tier: cannot use {path}: {error.strerror}") from None

    def _try(self, *, may_make_another: bool) -> Slab | None:
        """A slab that claims this engine's share; None if it is better to wait. The directory must be locked."""
        idle, in_use, others = self._existing()
        numbers = (self.directory.slab_path(self.namespace, number) for number in count())
        path = idle.path if idle is not None else next(path for path in numbers if path not in in_use | others)
        slab = idle
        try:
            room = self.directory.room(self.namespace, path)
            ideal = self._layout(room)
            if slab is not None and (
                slab.superblock.table_slots < ideal.slots_in(room.share)
                or not slab.slots <= MOST_TIMES * slab.superblock.slots_in(room.share) > 0
            ):
                logger.warning("disk tier: %s was made for another capacity; starting an empty one", path)
                slab.close()
                slab = None
            if slab is None and idle is None and in_use:
                self.directory.announce()
                if not may_make_another:
                    return None
            slab = slab or self._make(path, ideal, may_raise=may_make_another)
            if slab is not None:
                if not self._claim(slab, room) and room.members == 1:
                    text = "disk tier: nothing is stored in %s for %d min: slabs of engines that may come back fill it"
                    self.warned.log("room", logging.WARNING, text, self.directory.path, ABSENT_S // 60)
                self.directory.end_announcement()
            return slab
        except BaseException:
            if slab is not None:
                slab.close()
            raise

    def _layout(self, room: Room) -> Superblock:
        """The layout of a new slab. Raises TierError if the share is too small for one block."""
        whole = Superblock.for_capacity(self.namespace, self.slot_bytes, self.directory.capacity_bytes)
        table_slots = max(1, whole.slots_in(self.directory.capacity_bytes))  # if all other engines leave
        share = Superblock.for_capacity(self.namespace, self.slot_bytes, room.share, table_slots)
        share = share if share.slots_in(room.share) else replace(share, table_slots=1)
        if not share.slots_in(room.share):
            taken = self.directory.capacity_bytes - room.share
            raise TierError(
                f"disk tier: no room for one block in {self.directory.path}: capacity {self.directory.capacity_bytes} "
                f"bytes, {taken} claimed by other slabs, {share.file_bytes(1)} needed for a slab of one block of "
                f"{self.slot_bytes}"
            )
        return share

    def _make(self, path: Path, layout: Superblock, *, may_raise: bool) -> Slab | None:
        """A new slab without slots; while other engines leave no room for it, None, or NoRoomYet if it `may_raise`."""
        try:
            self.directory.make_room(self.namespace, path, layout.payload_at)
        except NoRoomYet:
            self.directory.announce()
            if may_raise:
                raise
            return None
        self.directory.remove(path)
        return Slab.create(path, layout, self.directory.access)

    def _claim(self, slab: Slab, room: Room) -> int:
        """Sign the slab, and let it grow to what it may have; returns how many slots that is.

        One with holes, or with more slots than it may have, claims what it takes until `SlabSize` has seen to that.
        """
        slots = slab.superblock.slots_in(room.file_bytes(slab.taken_bytes()))
        is_whole = slab.slots <= min(slots, slab.superblock.slots_in(slab.superblock.claim_bytes))
        slab.claim(slab.superblock.file_bytes(slots) if is_whole else slab.taken_bytes(), os.getpid())
        return slots

    def _existing(self) -> tuple[Slab | None, set[Path], set[Path]]:
        """The idle slab that was used last, the paths of those in use, and those of files that this engine cannot use.

        Raises OSError.
        """
        idle = list[Slab]()
        in_use = set[Path]()
        others = set[Path]()
        try:
            for path in self.directory.slabs_of(self.namespace).values():
                try:
                    idle.append(self._open_existing(path))
                except BlockingIOError:
                    in_use.add(path)
                except SuperblockError as error:
                    self.warned.log(str(path), logging.WARNING, "disk tier: %s; starting an empty one", error)
                except FileNotFoundError:
                    pass
                except (OSError, TierError) as error:
                    text = "disk tier: %s is skipped, another file is used: %s"
                    self.warned.log(str(path), logging.WARNING, text, path, reason_of(error))
                    others.add(path)
            idle.sort(key=lambda slab: slab.status().st_mtime_ns)
            return (idle.pop() if idle else None), in_use, others
        finally:
            for other in idle:
                other.close()

    def _open_existing(self, path: Path) -> Slab:
        """The slab at `path`, locked. Raises BlockingIOError if another process has it, else TierError and OSError."""
        with closing(open_own(path, os.O_RDWR)) as descriptor:
            require_ours(os.fstat(descriptor), path, self.directory.access)
            if not lock_file(descriptor):
                raise BlockingIOError
            superblock = Superblock.read(descriptor, path, refuted_in(path.parent))
            if superblock.namespace.digest != self.namespace.digest:
                differences = "; ".join(superblock.namespace.differences(self.namespace))
                raise TierError(f"it belongs to another model ({differences}); move it away")
            if superblock.slot_bytes != self.slot_bytes:
                raise TierError(
                    f"it has slots of {superblock.slot_bytes} bytes, the engine's blocks have {self.slot_bytes}; "
                    "delete the file"
                )
            return Slab(path, os.dup(descriptor), superblock)


def require_ours(found: os.stat_result, path: Path, access: Access) -> None:
    """Raise TierError for a slab that neither the folder's owner nor a member of its group created."""
    if found.st_uid != os.stat(path.parent).st_uid and (access.group is None or found.st_gid != access.group):
        raise TierError(f"disk tier: {path} belongs to user {found.st_uid}; move it away")
