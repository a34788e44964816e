"""Chains of an index that clients' hints retain, by their keys, and the owners to whom they belong.

Owns the share of the place that may be retained; `retention.py` has the chains, `shares.py` the owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpact.identity.keys import BlockKey
from kvpact.index.retention import Retention
from kvpact.index.shares import OwnerShares
from kvpact.index.sole_users import SoleUsers
from kvpact.index.table import Table

SHARE: Final = 5
"""At most one in so many usable slots is retained; of those that are an owner's share, where owners have shares."""


class RetainedChains:
    """Retained chains of a table with one class of slots. Time is an argument, in seconds."""

    def __init__(self, table: Table, parts: Sequence[int] = ()) -> None:
        """With `parts` the place is divided among owners: see `OwnerShares`. The table must be empty then."""
        self.shares: OwnerShares | None = table.divide(parts) if parts else None
        """Owners of the blocks, and their shares; None: the place is not divided."""
        self._table = table
        owners = self.shares.owner_of if self.shares is not None else ()
        self._retention = Retention(table.links, owners, 1 + len(parts))
        table.policy.spare(self._retention)
        self.users = SoleUsers(table, self._retention)

    @property
    def blocks(self) -> int:
        """Retained blocks."""
        return self._retention.rows

    def blocks_of(self, owner: int) -> int:
        """Retained blocks of an owner."""
        return self._retention.rows_of[owner]

    def most(self, owner: int) -> int:
        """Blocks of an owner that may be retained."""
        room = self.shares.shares[owner] if self.shares is not None else self._table.space.usable
        return room // SHARE

    def room_after(self, known: Sequence[BlockKey], owner: int) -> int:
        """Blocks of an owner that may be retained together with all known blocks of the chain `known`, before its
        oldest retention ends; below 0 if these are too many."""
        retention = self._retention
        rows = np.array([*map(self._table.keys.find, known)], np.int64)
        retained = int(np.count_nonzero(retention.counts_each[rows]))
        return self.most(owner) - retention.rows_of[owner] - (len(known) - retained)

    def retain(self, keys: Sequence[BlockKey], until: float) -> int:
        """Retain the first of the known blocks `keys`, a chain from its first block on, as many as the owner's share
        has room for; returns their number. The owner's older retentions end to make that room, the oldest first."""
        owner = self._retention.owner_of(self._table.keys.find(keys[0])) if keys else 0
        room = self.most(owner)
        most = min(len(keys), room)
        if most:
            row = self._table.keys.find(keys[most - 1])
            self._retention.retain(row, until)
            while self._retention.rows_of[owner] > room:
                self._offer(self._retention.end_oldest(owner))
        return most

    def end_expired(self, now: float) -> None:
        """End retentions whose time has passed, or some of many; others later."""
        for row in self._retention.end_expired(now):
            self._offer(row)

    def end_all(self) -> None:
        """End all retentions: nobody can ask for these blocks any more."""
        for owner in range(len(self._retention.rows_of)):
            while self._retention.rows_of[owner]:
                self._offer(self._retention.end_oldest(owner))

    def _offer(self, row: int | None) -> None:
        """Let the policy have the end of a chain again."""
        if row is not None and self._table.evictable_leaf(row):
            self._table.policy.offered(row, self._table.chain_class)
