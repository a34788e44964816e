"""All slabs of one namespace in a directory that are not this engine's own, as one place to read from.

Owns the open ones, and the kinds under which their faults are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.disk.foreign_slab import ForeignSlab
from kvpact.tiers.disk.own_slab import OwnSlab
from kvpact.tiers.disk.reading import Reading
from kvpact.tiers.disk.slab_directory import SlabDirectory
from kvpact.tiers.disk.superblock import refuted_in


class ForeignSlabs:
    """`run` and `lookup` never wait; the other methods are for the tier's own threads, `look` one of them at a time."""

    def __init__(self, directory: SlabDirectory, namespace: Namespace, slot_bytes: int, accounts: Accounts) -> None:
        self._directory = directory
        self._namespace = namespace
        self._slot_bytes = slot_bytes
        self._accounts = accounts
        self._slabs: tuple[ForeignSlab, ...] = ()
        """Replaced as a whole."""
        self._refuted: frozenset[bytes] = frozenset()
        """Runs whose records are not served."""

    def look(self, own: OwnSlab | None, stopped: Callable[[], bool]) -> None:
        """Open new slabs, close those that are gone, and read changed records; ends early if `stopped`.

        All are opened anew after an engine has marked its own records as invalid.
        """
        self._accounts.note_works("look")
        refuted = refuted_in(self._directory.path)
        before = self._refuted
        self._refuted = refuted
        there = {
            path for path in self._directory.slabs_of(self._namespace).values() if own is None or path != own.slab.path
        }
        same = self._slabs if refuted == before else ()
        kept = [slab for slab in same if slab.path in there and _inode(slab.path) == slab.inode]
        new = [self._open(path) for path in sorted(there - {slab.path for slab in kept})]
        gone = self._slabs
        self._slabs = (*kept, *(slab for slab in new if slab is not None))
        for slab in gone:
            if slab not in kept:
                slab.close()
        for slab in self._slabs:
            with self._accounts.contained("look", f"cannot read {slab.path}"):
                slab.scan(stopped)

    def _open(self, path: Path) -> ForeignSlab | None:
        return ForeignSlab.open(
            path, self._namespace.digest, self._slot_bytes, self._directory.access, self._accounts, self._refuted
        )

    def __len__(self) -> int:
        """Records that may be served; those in several slabs count several times."""
        return sum(len(slab.records) for slab in self._slabs)

    def run(self, keys: Sequence[BlockKey], start: int) -> int:
        """Number of blocks in a row from `start` that the slab with most of them has. Never waits."""
        return max((slab.records.run(keys, start) for slab in self._slabs), default=0)

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """True for each block that a slab has. Never waits."""
        found = np.zeros(len(keys), np.bool_)
        for slab in self._slabs:
            found |= slab.records.lookup(keys)
        held: list[bool] = found.tolist()
        return held

    def get(self, reading: Reading) -> None:
        """Read those of the missing blocks that the slabs have."""
        for slab in self._slabs:
            slab.get(reading)

    def refuse(self, keys: Iterable[BlockKey]) -> int:
        """Refuse these blocks, and all after them, in every slab; returns the number of records refused."""
        doomed = list(keys)
        return sum([slab.records.refuse_after(doomed) for slab in self._slabs])

    def refuse_all(self) -> None:
        """Refuse all records known now, in every slab."""
        for slab in self._slabs:
            slab.records.refuse_all()

    def check(self) -> None:
        """Verify the knowledge of every slab, for tests. Raises PactViolation."""
        for slab in self._slabs:
            slab.records.check()

    def close(self) -> None:
        """Close all; reads under way end first."""
        before = self._slabs
        self._slabs = ()
        for slab in before:
            slab.close()


def _inode(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.stat(follow_symlinks=False)
        return found.st_dev, found.st_ino
    return None
