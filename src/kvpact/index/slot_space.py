"""Free rows of one place: the Protocol that an index uses, and the case of slots that all have one size.

A *row* is a slot by the number that a `BlockIndex` has for it. Knows no keys and no bytes; the index
decides what is evicted.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import numpy as np

from kvpact.errors import PactViolation
from kvpact.index.key_table import FEW, RowArray

EXTENT_SHIFT: Final = 24
"""Shift in the number of a slot, `class << CLASS_SHIFT | extent << EXTENT_SHIFT | place`, where there are classes."""

CLASS_SHIFT: Final = 48

AHEAD_SHARE: Final = 64
"""Share of the slots that a class could free and keeps free: at most one in so many."""

AHEAD_SLOTS: Final = 2048
"""Most slots that a class keeps free."""

GATHERED: Final = 4096
"""Number of free rows among which neighbours are looked for: less than a tenth of a millisecond."""


class Blocks(Protocol):
    """Questions of a space about the blocks in its rows, answered by the index."""

    @property
    def now(self) -> int:
        """Tick of the last use of any block."""

    def oldest(self, slot_class: int) -> int | None:
        """Row of this class that would be evicted next; None if all are free, or needed."""

    def is_needed(self, row: int) -> bool:
        """True if the row cannot be freed now: a pin, a writer, or a block after it that has one, needs it."""

    def last_use(self, row: int) -> int | None:
        """Tick of the last use of the row's block and all after it; 0 of a free row, None if it is needed.

        Asked of few rows, so that it may look at the whole chain after each of them.
        """

    def drop_rows(self, rows: Sequence[int]) -> None:
        """Forget the blocks in these rows, and all after them, and give the rows back before returning.

        Rows that neighbours lease are given back later.
        """


class SlotSpace(Protocol):
    """Rows of one place, in place of a list of free slots; `classed_slots` says how an index uses it."""

    num_rows: int
    """Number of rows: all have lower numbers."""
    slot_rows: int
    """Number of rows that are slots; those without payload come after them."""
    usable: int
    """Extents, from number 0 on, that are handed out. For reading only."""
    extent_rows: int
    """Rows of an extent; 0 if each row is a slot's number."""
    is_plain: bool
    """True if every row is a slot, so that a withdrawn one is nobody's."""

    @property
    def free(self) -> Sequence[Sequence[int]]:
        """Free rows of each class; the last one is taken next."""

    def take(self, count: int, slot_class: int = 0) -> Sequence[int]:
        """Take rows in the order of use, many neighbours as a range. Raises PactViolation if too few are free."""

    def give_back(self, row: int) -> None:
        """Return a row that nothing needs any more."""

    def give_back_each(self, rows: range) -> None:
        """Return rows, one after the other, as `give_back` does."""

    def class_of(self, row: int) -> int:
        """Class of a row that is in use, or free."""

    def number(self, row: int) -> int:
        """Number of the slot for those who copy; see `kvpact.memory.arena.SlotClass`."""

    def move_classes(self, memory: memoryview) -> None:
        """Keep the class of each extent in this memory, numbers of 2 bytes, from now on."""

    def use(self, usable: int, in_use: Callable[[int], bool]) -> None:
        """Hand out the first `usable` extents, never fewer than before. `in_use(row)`: it was taken, not given back."""

    def withdraw(self, usable: int) -> list[int]:
        """Hand out only the first `usable` extents; returns the rows of the others, whose blocks are to be dropped."""

    def obtain(self, slot_class: int, lacking: int, blocks: Blocks) -> int:
        """Give a class more extents for a reservation that finds `lacking` rows too few; return how many it got."""

    def restore(self, used: Mapping[int, Sequence[int] | RowArray]) -> None:
        """Start again: these rows (class -> rows) are in use, and no others."""

    def check(self) -> None:
        """Verify the invariants, for tests. Raises PactViolation."""


class PlainSlots:
    """Slots of one class: a row is the slot's number, an extent is one slot, and nothing ever moves.

    With `names` a second class of so many rows that take no memory, after all slots: names of a chain.
    """

    __slots__ = (
        "_names", "_num_slots", "_stack", "extent_rows", "free", "is_plain", "num_rows", "parked", "slot_rows",
        "usable",
    )  # fmt: skip

    def __init__(self, num_slots: int, usable: int | None = None, names: int = 0) -> None:
        """Hand out only the first `usable` slots, until `use` says otherwise; None: all."""
        self._num_slots = self.slot_rows = num_slots
        self.num_rows = num_slots + names
        self.extent_rows = 0
        self.is_plain = not names
        self.usable = num_slots if usable is None else usable
        self._stack = _without(range(self.usable), ())  # the first reservations get neighbouring slots
        self._names = _without(range(num_slots, self.num_rows), ())
        self.free: tuple[array[int], ...] = (self._stack, self._names) if names else (self._stack,)
        self.parked = array("i")  # free slots that are not handed out, in the order in which they were parked

    def take(self, count: int, slot_class: int = 0) -> Sequence[int]:
        """See `SlotSpace`. Names come from a stack of their own."""
        return popped(self.free[slot_class], count)

    def give_back(self, row: int) -> None:
        """See `SlotSpace`. A withdrawn row is nobody's."""
        if row < self.usable:
            self._stack.append(row)
        elif row >= self._num_slots:
            self._names.append(row)

    def give_back_each(self, rows: range) -> None:
        """See `SlotSpace`. Many rows are copied at once."""
        if len(rows) < FEW or max(rows[0], rows[-1]) >= self.usable:
            for row in rows:
                self.give_back(row)
        else:
            self._stack.frombytes(np.arange(rows.start, rows.stop, rows.step, dtype=np.int32).tobytes())

    def class_of(self, row: int) -> int:
        """0 for a slot, 1 for a name."""
        return int(row >= self._num_slots)

    def number(self, row: int) -> int:
        """See `SlotSpace`. Of a name: -1."""
        return row if row < self._num_slots else -1

    def move_classes(self, memory: memoryview) -> None:
        """See `SlotSpace`. There are no extents."""

    def use(self, usable: int, in_use: Callable[[int], bool]) -> None:
        """See `SlotSpace`. The new ones are handed out after all others."""
        new = range(self.usable, min(usable, self._num_slots))
        self._stack[:0] = array("i", (row for row in reversed(new) if not in_use(row)))
        self.usable += len(new)

    def withdraw(self, usable: int) -> list[int]:
        """See `SlotSpace`. Rows in use are returned too."""
        withdrawn = range(usable, self.usable)
        self.usable -= len(withdrawn)
        self._stack[:] = array("i", (row for row in self._stack if row < self.usable))
        return list(withdrawn)

    def park(self, count: int) -> Sequence[int]:
        """Hand out `count` of the free slots no more, or all; returns them, in ascending order."""
        rows = array("i", sorted(self.take(min(count, len(self._stack)))))
        self.parked += rows
        return rows

    def unpark(self, count: int) -> None:
        """Hand out the slots that were parked last again, after all others."""
        self._stack[:0] = self.parked[-count:][::-1]
        del self.parked[-count:]

    def obtain(self, slot_class: int, lacking: int, blocks: Blocks) -> int:
        """0: a single class has no extents to get."""
        return 0

    def restore(self, used: Mapping[int, Sequence[int] | RowArray]) -> None:
        """See `SlotSpace`. Class 1 has the names."""
        self._stack[:] = _without(range(self.usable), used.get(0, ()))
        self._names[:] = _without(range(self._num_slots, self.num_rows), used.get(1, ()))

    def check(self) -> None:
        """Verify that no row is free twice or beyond the usable ones. Raises PactViolation."""
        free = self._stack + self.parked, self._names
        require(all(len(set(rows)) == len(rows) for rows in free), "a row is free twice")
        require(all(0 <= row < self.usable for row in free[0]), "a row is free that is not usable")


def kept_free(slots: int) -> int:
    """Slots that are kept free, while nothing needs them, of so many that a class could free."""
    kept = min(slots // AHEAD_SHARE, AHEAD_SLOTS)
    return kept if kept >= FEW else 0


def popped(stack: list[int] | array[int], count: int) -> Sequence[int]:
    """Take `count` off the end, the last one first; many neighbours as a range.

    Of many the longest runs are taken first. Raises PactViolation if there are fewer.
    """
    left = len(stack) - count
    if left < 0:
        raise PactViolation(f"{count} rows were asked for, {len(stack)} are free")
    if count >= FEW and left and not _descend(stack[left:]):
        _gather(stack, max(0, len(stack) - max(GATHERED, count)))
    rows = stack[left:]
    del stack[left:]
    if count >= FEW and _descend(rows):
        return range(rows[-1], rows[0] + 1)
    return rows[::-1].tolist() if isinstance(rows, array) else rows[::-1]


def _gather(stack: list[int] | array[int], first: int) -> None:
    """Put neighbours of the rows from the place `first` on together, and the longest runs last."""
    rows = np.sort(np.array(stack[first:], np.int32))[::-1]
    starts = np.append(0, np.flatnonzero(rows[1:] != rows[:-1] - 1) + 1)
    lengths = np.diff(starts, append=len(rows))
    rows = rows[np.repeat(lengths, lengths).argsort(kind="stable")]
    del stack[first:]
    stack.extend(array("i", rows.tobytes()))


def _descend(rows: list[int] | array[int]) -> bool:
    """True if each row is the neighbour of the one before it."""
    if rows[0] - rows[-1] != len(rows) - 1:
        return False
    numbers = np.frombuffer(rows, np.int32) if isinstance(rows, array) else np.array(rows)
    return bool((numbers[1:] == numbers[:-1] - 1).all())


def _without(rows: range, used: Sequence[int] | RowArray) -> array[int]:
    """Rows without the used ones, the last one first."""
    free = np.ones(len(rows), np.bool_)
    numbers = np.asarray(used, np.int64) - rows.start
    free[numbers[(numbers >= 0) & (numbers < len(rows))]] = False
    left = array("i")
    left.frombytes((np.flatnonzero(free)[::-1] + rows.start).astype(np.int32).tobytes())
    return left


def require(condition: bool, what: str) -> None:
    """Raise PactViolation unless the condition holds."""
    if not condition:
        raise PactViolation(f"the slot space lost an invariant: {what}")
