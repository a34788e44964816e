"""Eviction policy: the calls by which an index tells it what happens to rows, and asks which of them go next.

A policy owns everything that its order depends on; nothing else of the index reads that. The table alone knows which
rows are held, so a policy asks it (`Rows`) before it gives a row up. `lru.py` has the order of use, `shares.py` that of
owners with shares, each with a queue of that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvpact.index.key_table import FloatArray, RowArray
from kvpact.index.retention import Retention


class Rows(Protocol):
    """Questions of a policy about rows, answered by the table."""

    def evictable_leaf(self, row: int) -> bool:
        """True if nothing holds the row's block, and no block of a chain follows it."""

    def evictable_from(self, leaf: int, most: int) -> int:
        """First of at most `most` neighbouring rows that can go together, each after the one before it, up to `leaf`.

        An evictable leaf with attached rows goes alone.
        """


class EvictionPolicy(Protocol):
    """Order of eviction in an index with several slot classes; each class is evicted for itself.

    Rows are given in the order of their use. Rows of one chain are neighbours, or come one after the other; an
    *attached* row belongs to a row of a chain and goes with it. A row that nobody offered is never taken.
    """

    @property
    def now(self) -> int:
        """Uses since the start: the time of the newest one."""

    def spare(self, retention: Retention) -> None:
        """Evict rows that are retained after all others from now on, and end the oldest retention where there are no
        others."""

    def inserted(self, rows: slice | RowArray, slot_class: int, depth: int, left: int) -> None:
        """Note blocks of a chain in rows that were unused; that counts as a use.

        `depth` blocks of the chain come before the first one, and `left` after the last one to the end of the prompt,
        as far as its keys are known.
        """

    def attached(self, rows: slice | RowArray, slot_class: int, parents: Sequence[int]) -> None:
        """Note blocks that were attached, each to one of the rows `parents`; that counts as a use of the block only."""

    def used(self, rows: Sequence[int]) -> None:
        """Note a use of blocks, each with all blocks before it; later ones in `rows` count as used later."""

    def outdated(self, rows: Sequence[int], parent: int) -> None:
        """Note blocks that go first from now on, until they are used. Their last use counts as one of `parent`."""

    def offered(self, row: int, slot_class: int) -> None:
        """Note that `row` became an evictable leaf: it stays offered until `take` returns it, or finds it held."""

    def next(self, rows: Rows, slot_class: int) -> int | None:
        """Row that `take` would return last; None if no row of this class can go, or only retained ones."""

    def take(self, rows: Rows, slot_class: int, most: int) -> range | None:
        """Neighbouring rows to evict now, at most `most`, an offered evictable leaf as the last; None if there is none.

        A policy may spare a leaf for another one as often as it wants, but not return None while it has one.
        """

    def gone(self, rows: Sequence[int], parent: int) -> None:
        """Forget blocks that were evicted or dropped: a subtree, its top first, that was linked to `parent`."""

    def last_use(self, rows: Sequence[int]) -> int:
        """Time of the last use of any of these rows, as `now` counts it; memory is divided among classes by it."""

    # After a restart: `restored` for each piece of a table of stored blocks, `ranked`, `begin`

    def restored(self, rows: RowArray, times: FloatArray) -> None:
        """Note blocks of the table, and the times of their last use: any numbers that grow, not negative.

        They count as used before all that is used from now on. No row is offered until `begin`.
        """

    def ranked(self, rows: RowArray) -> RowArray:
        """Restored rows, given in ascending order, in that of their use; of two used at one time the higher row first.

        Other calls may run beside this one.
        """

    def begin(self, rows: RowArray, leaves: RowArray) -> None:
        """Keep only the restored `rows`, ranked; offer the `leaves` among them, in the same order."""

    def check(self, leaves: Sequence[int]) -> None:
        """Verify the policy's invariants, and that all `leaves` are offered. Raises PactViolation."""
