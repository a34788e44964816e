"""The disk tier: blocks in slab files of one namespace, found again after a restart, shared by the engines of one host.

Owns an engine's use of the slabs: it writes one of them, reads all, and takes its share of the directory's capacity.
Lookups are answered from memory.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from operator import or_
from pathlib import Path
from typing import Final

from kvpact.errors import NoSuchTier, TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.own_files import PRIVATE, Access
from kvpact.threads import give_way, start_background
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.base import BlockBuffer, Entry, Progress, RecordHeader, Tier, TierCapacity, TierCounts, TierHealth
from kvpact.tiers.disk import BACKEND
from kvpact.tiers.disk.foreign_slabs import ForeignSlabs
from kvpact.tiers.disk.own_slab import OwnSlab
from kvpact.tiers.disk.reading import Reading
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.slab_directory import ABSENT_S, LOCK_TIMEOUT_S, DirectoryBusy, NoRoomYet, Room, SlabDirectory
from kvpact.tiers.disk.slab_events import SlabEvents
from kvpact.tiers.disk.slab_opening import SlabOpener
from kvpact.tiers.disk.superblock import PAGE_BYTES
from kvpact.tiers.record import require_at_most
from kvpact.tiers.registry import TierContext
from kvpact.tiers.urls import TierURL
from kvpact.tiers.use_count import UseCount
from kvpact.units import format_size

logger = logging.getLogger(__name__)

TEND_SECONDS: Final = 1.0
"""Seconds between two looks at the other engines of the directory."""

TEND_SHARE: Final = 0.01
"""Share of one core that these looks take at most, on average; a pause for that lasts at most `LONGEST_PAUSE_S`."""

LONGEST_PAUSE_S: Final = 10.0

FIRST_LOOK_S: Final = 0.2
"""Most seconds that opening the tier reads other writers' blocks, some 300,000 blocks; the rest follows."""

_TEND_LOCK_S: Final = 0.2
_CLOSE_S: Final = 2.0


MAX_DOOMED: Final = 1 << 16
"""Blocks whose deletion is remembered while there is no own slab; after more, one that is taken over is emptied."""


class DiskTier(Tier):
    """Slabs of one directory, one written by each engine and read by all. Open one with `DiskTier.open`.

    A block that another engine stored may be evicted at any time; reading it is then a miss. What this engine stored is
    in its own slab, so `delete` drops it for good. Blocks in slabs of others are only refused, until others are there.
    """

    name = BACKEND.label
    exclusive = True

    def __init__(self, opener: SlabOpener, slab: Slab | None) -> None:
        """Take over an open slab and read its header table, or wait for room for one. Raises OSError."""
        self._opener = opener
        self._directory = opener.directory
        self._slot_bytes = opener.slot_bytes
        self._accounts = Accounts(logger, "disk tier")
        self.events = SlabEvents()
        """Announcements of the own slab's blocks."""
        self.own = self._opened(slab) if slab is not None else None
        """Slab of this engine; None while there is no room for one."""
        self._doomed: set[BlockKey] = set()
        """Blocks deleted while there is no own slab: one that is taken over may have them (H36)."""
        self._all_doomed = False
        self._others = ForeignSlabs(self._directory, opener.namespace, opener.slot_bytes, self._accounts)
        self._tending = threading.Lock()
        self._stopped = threading.Event()
        self._uses = UseCount(self._close_files)
        late = time.monotonic() + FIRST_LOOK_S
        self._others.look(self.own, lambda: time.monotonic() > late)
        start_background("kvpact-disk-tend", partial(_tend_until_closed, weakref.ref(self), self._stopped))

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        namespace: Namespace,
        slot_bytes: int,
        capacity_bytes: int,
        *,
        access: Access = PRIVATE,
        timeout: float = LOCK_TIMEOUT_S,
    ) -> DiskTier:
        """Use the namespace's slabs in kvpact's folder inside `directory`, and write one that no other engine writes.

        All slabs there have at most `capacity_bytes` together: engines that use the directory have equal shares, idle
        slabs are removed when their room is needed. `slot_bytes` is the largest block's size over all ranks, a multiple
        of 4,096; a smaller block leaves the rest of its slot empty.
        If others use slabs of the namespace and none is idle, waits up to `timeout` seconds for one, then makes one
        more. If they leave no room for that yet, nothing is stored until they do.

        Raises:
            TierError: one line for people; the engine goes on without this tier.
        """
        if slot_bytes < 1 or slot_bytes % PAGE_BYTES:
            raise NoSuchTier(f"disk tier: a slot must be a multiple of {PAGE_BYTES} bytes, not {slot_bytes}")
        room = SlabDirectory.prepare(Path(directory), capacity_bytes, access)
        opener = SlabOpener(room, namespace, slot_bytes)
        slab = None
        try:
            try:
                slab = opener.open(timeout)
            except NoRoomYet:
                logger.info("disk tier: other engines use all of %s; this one gets its share when they can", room.path)
            return cls(opener, slab)
        except BaseException as error:
            room.end_announcement()
            if isinstance(error, OSError) and slab is not None:
                raise TierError(f"disk tier: cannot read {slab.path}: {error.strerror}") from None
            raise

    @property
    def slab(self) -> Slab:
        """The slab that this engine writes. Raises TierError while there is no room for one."""
        if self.own is None:
            raise TierError(f"disk tier: the other engines of {self._directory.path} leave no room for a slab yet")
        return self.own.slab

    # Lookups and reads

    def leading(self, keys: Sequence[BlockKey]) -> int:
        if self._uses.stopped:
            return 0
        held = self.own.content.leading(keys) if self.own is not None else 0
        while held < len(keys) and (more := self._others.run(keys, held)):
            held += more
        return held

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        if self._uses.stopped:
            return [False] * len(keys)
        held = self.own.content.lookup(keys) if self.own is not None else [False] * len(keys)
        if len(self._others) and not all(held):
            held = list(map(or_, held, self._others.lookup(keys)))
        return held

    def put_start(self, keys: Sequence[BlockKey]) -> int:
        own = self.own
        return held if (held := self.leading(keys)) == len(keys) or own is None else own.content.leading(keys)

    @property
    def others_evict(self) -> bool:
        return len(self._others) > 0

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        self._require_sizes(buffers)
        reading = Reading(keys, buffers, on_progress)
        with self._uses.one() as running:
            if running and self.own is not None:
                self.own.get(reading)
            if running and (left := len(reading.missing())):
                self._others.get(reading)
                if len(reading.missing()) < left:
                    self._accounts.note_works("read")
        return reading.arrived

    def _require_sizes(self, buffers: Sequence[BlockBuffer]) -> None:
        require_at_most(buffers, self._slot_bytes, f"a slot of {self._directory.path} has")

    # Writes

    def put(self, entries: Sequence[Entry]) -> list[bool]:
        self._require_sizes([entry.buffer for entry in entries])
        with self._uses.one() as running:
            if running and self.own is not None:
                self.own.put(self._without_spare(entries))
            return self.lookup([entry.key for entry in entries])

    def _without_spare(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Entries without blocks that another slab has already, and that none of `entries` needs in the own."""
        if not len(self._others):
            return entries
        parents = {entry.parent for entry in entries}
        alone = [entry.key for entry in entries if not entry.parent and entry.key not in parents]
        spare = {key for key, there in zip(alone, self._others.lookup(alone), strict=True) if there}
        return [entry for entry in entries if entry.key not in spare]

    def delete(self, keys: Iterable[BlockKey]) -> int:
        doomed = list(keys)
        if self.own is None:
            self._doomed.update(doomed)
            self._all_doomed |= len(self._doomed) > MAX_DOOMED
        with self._uses.one() as running:
            refused = self._others.refuse(doomed) if running else 0
            return refused + (self.own.delete(doomed) if running and self.own is not None else 0)

    def clear(self) -> None:
        with self._uses.one() as running:
            self._all_doomed |= self.own is None
            if running:
                self._others.refuse_all()
            if running and self.own is not None:
                self.own.clear()

    def refute_run(self) -> None:
        with self._uses.one() as running:
            if running and self.own is not None:
                self.own.refute_run()

    # Counts

    def capacity(self) -> TierCapacity:
        """Usage of this engine's own slab: the sum over engines is the directory's."""
        blocks = self.own.content.index.held_count if self.own is not None else 0
        return TierCapacity(blocks * self._slot_bytes, self._directory.capacity_bytes, blocks)

    def counts(self) -> TierCounts:
        return self._accounts.counts

    def scan(self) -> Iterator[RecordHeader]:
        """The headers of this engine's own slab."""
        with self._uses.one() as running:
            headers = list(self.own.content.scan()) if running and self.own is not None else []
        yield from headers

    def health(self) -> TierHealth:
        return self._accounts.health()

    def lost(self) -> str:
        with self._uses.one() as running:
            if not running or self._directory.folder is None:
                return ""
            return self._directory.folder.lost() or (self.own.slab.lost() if self.own is not None else "")

    @property
    def released(self) -> bool:
        return self._uses.released

    def check(self) -> None:
        """Verify the index's invariants, for tests. Raises PactViolation."""
        if self.own is not None:
            with self.own.content.lock:
                self.own.content.index.check()
        self._others.check()

    # The other engines

    def tend(self) -> None:
        """Look at the other engines of the directory: take the share that is due, and learn what they have stored.

        A thread calls this every `TEND_SECONDS`. Errors are noted in `health`.
        """
        with self._tending, self._uses.one() as running:
            if running and not self._stopped.is_set() and not (self.own is not None and self.own.slab.closed):
                with self._accounts.contained("share", f"cannot share {self._directory.path}"):
                    if self.own is not None:
                        self.own.content.read_on(self._stopped.is_set)
                        if self.own.content.reading:
                            return
                    with suppress(DirectoryBusy):  # another engine's file grows; the next look will do
                        self._take_share()
                        self._accounts.note_works("share")
                with self._accounts.contained("look", f"cannot look at the slabs in {self._directory.path}"):
                    self._others.look(self.own, self._stopped.is_set)

    def _opened(self, slab: Slab) -> OwnSlab:
        """Take over an open slab, which is closed if that fails. Raises OSError."""
        try:
            own = OwnSlab(slab, self._directory, self._accounts)
            self.events.use(own.content)
            return own
        except BaseException:
            slab.close()
            raise

    def _forget_doomed(self, own: OwnSlab) -> None:
        if self._all_doomed:
            own.clear()
        own.delete(self._doomed.copy())
        self._doomed.clear()
        self._all_doomed = False

    def _take_share(self) -> None:
        """Grow or shrink to this engine's share, or make a slab if there is room for one now."""
        own = self.own
        if own is None:
            with suppress(NoRoomYet):
                own = self._opened(self._opener.open(0.0))
                self._forget_doomed(own)
                self.own = own
                self._forget_doomed(own)  # what was deleted in between
            return
        with self._directory.locked(_TEND_LOCK_S):
            room = self._directory.room(self._opener.namespace, own.slab.path)
        limit = room.file_bytes(own.slab.taken_bytes())
        self._note_share(room, limit)
        own.slab.show_use(ABSENT_S / 2)
        own.size.limit(limit)

    def _note_share(self, room: Room, limit: int) -> None:
        """Tell, in the log once and in the health, of a slab that may take less than half of its share."""
        if room.absent and limit < room.share // 2:
            sizes = f"{format_size(limit)} of its share of {format_size(room.share)}"
            why = f"{format_size(room.absent)} are kept for engines that ended less than {ABSENT_S / 60:g} min ago"
            self._accounts.note_failed("absent", f"in {self._directory.path} this engine may take {sizes}: {why}")
        else:
            self._accounts.note_works("absent")

    def close(self) -> None:
        self._stopped.set()
        tending = self._tending.acquire(timeout=_CLOSE_S)
        try:
            with self._uses.one() as is_first:
                self._uses.stop()
                if is_first and self.own is not None:
                    self.own.content.persist_use()
                    self.own.slab.show_use(0.0)
        finally:
            if tending:
                self._tending.release()

    def _close_files(self) -> None:
        self._others.close()
        self._directory.end_announcement()
        if self.own is not None:
            self.own.slab.close()
        if self._directory.folder is not None:
            self._directory.folder.close()


def _tend_until_closed(tier: weakref.ref[DiskTier], stopped: threading.Event) -> None:
    """Call `tend` until the tier is closed or collected."""
    give_way()
    pause = 0.0
    while not stopped.wait(pause):
        if (open_tier := tier()) is None:
            return
        began = time.thread_time()
        open_tier.tend()
        del open_tier
        pause = min(LONGEST_PAUSE_S, max(TEND_SECONDS, (time.thread_time() - began) / TEND_SHARE))


def open_disk(url: TierURL, place: TierContext) -> DiskTier:
    """The tier at a `disk://` URL. Raises TierError."""
    access = Access.of(url.options.get("group"))
    return DiskTier.open(url.path, place.namespace, place.slot_bytes, url.capacity, access=access)
