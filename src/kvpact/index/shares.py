"""Eviction policy of a place that owners share: an owner above its share loses its own blocks first.

Owns the owner of each row, the number of each owner's blocks, and whose blocks room is being made for. The order among
an owner's blocks is that of `lru.py`, where each owner is a class with a queue of its own. Knows no names and no salts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvpact.identity.tenants import WHOLE
from kvpact.index.key_table import FloatArray, RowArray
from kvpact.index.lru import NEVER, LeastRecentlyUsed
from kvpact.index.policy import Rows
from kvpact.index.retention import Retention
from kvpact.index.slot_space import SlotSpace, kept_free


class OwnerShares:
    """Order of eviction in a place with one slot class, whose chains each belong to one owner.

    Owner 0 has what the shares of the others leave. Room that an owner does not use is lent: any other may fill it, and
    gives it back block by block when it is needed. While room is made for an owner, the blocks that it will get count
    as its own. Leaves are taken, as long as there are any:

    1. from owners above their share, the least recently used first, down to their share;
    2. from these, the ends of retained chains, whose retention ends: no lock;
    3. from all owners, in the same two steps: all that owners above their share have is pinned then.

    The shares leave out the slots that are kept free, so that making room ahead takes nothing within a share: a share
    would shrink with each such slot, and lend it out for good.
    """

    __slots__ = (
        "_coming", "_coming_of", "_order", "_owner_each", "_parts", "_shares", "_space", "_usable", "blocks",
        "owner_of",
    )  # fmt: skip

    def __init__(self, num_rows: int, space: SlotSpace, parts: Sequence[int]) -> None:
        """`parts` of `WHOLE` are the shares of the owners from 1 on, of the usable slots of `space`."""
        self._space = space
        self._parts = parts
        self._usable = -1
        self._shares: list[int] = []
        """Per owner the blocks of its share, of so many usable slots."""
        self._order = LeastRecentlyUsed(num_rows, 1 + len(parts))
        self.owner_of = bytearray(num_rows)
        """Per row the owner of the block that it has, or had last. For reading only."""
        self._owner_each = np.frombuffer(self.owner_of, np.uint8)
        self.blocks = [0] * (1 + len(parts))
        """Per owner its blocks. For reading only."""
        self._coming_of = 0
        self._coming = 0
        """Blocks that are about to be inserted, of the owner `_coming_of`."""

    @property
    def now(self) -> int:
        """Tick of the newest use."""
        return self._order.now

    @property
    def shares(self) -> Sequence[int]:
        """Per owner the blocks that are its share of the place now, but for the slots that are kept free."""
        usable = self._space.usable
        if usable != self._usable:
            room = usable - kept_free(usable)
            shares = [room * part // WHOLE for part in self._parts]
            self._shares = [room - sum(shares), *shares]
            self._usable = usable
        return self._shares

    def most(self, owner: int) -> int:
        """Blocks that this owner may have without room that another uses and has by its share: never less than its own
        share."""
        shares = self.shares
        unused = sum(shares) - sum(map(min, self.blocks, shares))
        return unused + min(self.blocks[owner], shares[owner])

    def expect(self, owner: int, blocks: int) -> None:
        """Note that so many blocks of this owner are inserted next, and that room is made for them until then."""
        self._coming_of = owner
        self._coming = blocks

    def spare(self, retention: Retention) -> None:
        """See `EvictionPolicy`: each owner's retained chains are spared within its own queue."""
        self._order.spare(retention)

    def inserted(self, rows: slice | RowArray, slot_class: int, depth: int, left: int) -> None:
        """See `EvictionPolicy`: the blocks are those that were expected."""
        owner = self._coming_of
        self._coming = 0
        self._owner_each[rows] = owner
        self.blocks[owner] += rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        self._order.inserted(rows, owner, depth, left)

    def attached(self, rows: slice | RowArray, slot_class: int, parents: Sequence[int]) -> None:
        """See `EvictionPolicy`: the blocks are those that were expected."""
        self.inserted(rows, slot_class, 0, 0)

    def used(self, rows: Sequence[int]) -> None:
        """See `EvictionPolicy`: whoever uses a block, its owner stays."""
        self._order.used(rows)

    def outdated(self, rows: Sequence[int], parent: int) -> None:
        """See `EvictionPolicy`: they go first among their owner's."""
        self._order.outdated(rows, parent)

    def offered(self, row: int, slot_class: int) -> None:
        """See `EvictionPolicy`: a leaf stands in its owner's queue."""
        self._order.offered(row, self.owner_of[row])

    def next(self, rows: Rows, slot_class: int) -> int | None:
        """See `EvictionPolicy`. A step for each owner above its share, or else for each owner."""
        oldest = self._oldest(rows, self._above()) or self._oldest(rows, range(len(self.blocks)))
        return self._order.next(rows, oldest[0][1]) if oldest else None

    def take(self, rows: Rows, slot_class: int, most: int) -> range | None:
        """See `EvictionPolicy`, and this class. Neighbours go together while no other owner's leaf would go before."""
        above = self._above()
        groups: tuple[Collection[int], ...] = (above, range(len(self.blocks)))
        for owners in groups:
            oldest = self._oldest(rows, owners)
            if oldest:
                owner = oldest[0][1]
                before = oldest[1][0] if len(oldest) > 1 else NEVER
                return self._order.take(rows, owner, min(most, above.get(owner, most)), before)
            for owner in owners:
                taken = self._order.take(rows, owner, 1)
                if taken is not None:
                    return taken
        return None

    def _above(self) -> dict[int, int]:
        """Owners above their share, each with the blocks that it has beyond; the one with the most of them first."""
        shares = self.shares
        beyond = [(blocks - shares[owner], owner) for owner, blocks in enumerate(self.blocks)]
        blocks, owner = beyond[self._coming_of]
        beyond[self._coming_of] = blocks + self._coming, owner
        return {owner: blocks for blocks, owner in sorted(beyond, reverse=True) if blocks > 0}

    def _oldest(self, rows: Rows, owners: Collection[int]) -> list[tuple[int, int]]:
        """Time of the last use of each owner's next leaf, with the owner, in this order; none where it has none."""
        leaves = ((self._order.next(rows, owner), owner) for owner in owners)
        return sorted((self._order.last_use((leaf,)), owner) for leaf, owner in leaves if leaf is not None)

    def gone(self, rows: Sequence[int], parent: int) -> None:
        """See `EvictionPolicy`: a subtree has one owner."""
        self.blocks[self.owner_of[rows[0]]] -= len(rows)
        self._order.gone(rows, parent)

    def last_use(self, rows: Sequence[int]) -> int:
        """Tick of the latest use among these rows."""
        return self._order.last_use(rows)

    def restored(self, rows: RowArray, times: FloatArray) -> None:
        """See `EvictionPolicy`: blocks of a table have no owner but 0."""
        self._order.restored(rows, times)

    def ranked(self, rows: RowArray) -> RowArray:
        """Rows in the order of their times."""
        return self._order.ranked(rows)

    def begin(self, rows: RowArray, leaves: RowArray) -> None:
        """See `EvictionPolicy`: all are blocks of owner 0."""
        self.blocks[0] = len(rows)
        self._order.begin(rows, leaves)

    def check(self, leaves: Sequence[int]) -> None:
        """See `EvictionPolicy`: each owner's queue is checked; the table's verification counts the blocks."""
        self._order.check(leaves)
