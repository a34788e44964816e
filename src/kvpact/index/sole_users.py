"""Blocks of a table that one user alone has used, and their release: they are evicted before all others.

Decides which blocks are whose; `retention.py` has the user of each row. Knows no names: a user is a number from 1 on,
such as that of a client's session.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvpact.identity.keys import BlockKey
from kvpact.index.key_table import RowArray
from kvpact.index.links import selection
from kvpact.index.retention import NOBODY, Retention
from kvpact.index.table import HELD, NONE, RESERVED, SAVED, Table

MOST_BRANCHES: Final = 64
"""Most branches of a user's blocks with which the live requests are compared; those of others are not given up."""


class SoleUsers:
    """Users of the rows of one table, 8 bytes a row. A block that comes from a tier has an unknown user."""

    __slots__ = ("_each", "_table")

    def __init__(self, table: Table, retention: Retention) -> None:
        self._table = table
        self._each = retention.users

    def saved(self, rows: Sequence[int], user: int) -> None:
        """Note the user that has computed the blocks in these rows, which were inserted just now."""
        self._each[selection(rows)] = user

    def used(self, end: BlockKey, user: int) -> None:
        """Note a use of the chain up to the known block `end`: blocks of other users are nobody's own from now on."""
        links = self._table.links
        row = self._table.keys.find(end)
        while row != self._table.root:
            first = links.start[row]
            part = self._each[first : row + 1]
            part[part != user] = NOBODY
            row = links.parent[first]

    def give_up(self, user: int, live: Iterable[Sequence[BlockKey]]) -> int:
        """Evict a user's own blocks before all others from now on, until they are used; returns their number.

        Those in the chains `live` become nobody's own. What is pinned stays until its pins end: only the order changes.
        """
        tops = self._tops(self._rows_of(user), user)
        if tops:
            for keys in live:
                if any(len(keys) >= depth and keys[depth - 1] == key for depth, key in tops):
                    self._share(keys)
        mine = self._rows_of(user)
        if len(mine):
            self._outdate(mine, user)
            self._each[mine] = NOBODY
        return len(mine)

    def _rows_of(self, user: int) -> RowArray:
        """Rows with known blocks of this user."""
        mine = np.flatnonzero(self._each == user)
        return mine[np.isin(self._table.state_each[mine], (RESERVED, SAVED, HELD))]

    def _tops(self, mine: RowArray, user: int) -> list[tuple[int, BlockKey]]:
        """Depth and key of each first block of the user's own in its chain; other branches become nobody's own."""
        table = self._table
        tops: RowArray = mine[self._each[table.links.parent_each[mine]] != user]
        for row in tops[MOST_BRANCHES:].tolist():
            self._each[table.links.subtree(row)] = NOBODY
        return [(self._depth(row), table.keys.key(row)) for row in tops[:MOST_BRANCHES].tolist()]

    def _depth(self, row: int) -> int:
        """Blocks of the chain up to `row`."""
        links = self._table.links
        depth = 0
        while row != self._table.root:
            first = links.start[row]
            depth += row + 1 - first
            row = links.parent[first]
        return depth

    def _share(self, keys: Sequence[BlockKey]) -> None:
        """Let the known part of a chain be nobody's own."""
        for key in keys:
            row = self._table.keys.find(key)
            if row == NONE:
                return
            self._each[row] = NOBODY

    def _outdate(self, mine: RowArray, user: int) -> None:
        """Let these rows go first, in pieces of neighbours; the chain before a piece keeps the time of its last use."""
        table = self._table
        parents = table.links.parent_each[mine]
        begins = np.flatnonzero((parents != mine - 1) | (np.diff(mine, prepend=-2) != 1))
        firsts = mine[begins]
        lasts = mine[np.append(begins[1:], len(mine)) - 1]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            parent = table.links.parent[first]
            while self._each[parent] == user:
                parent = table.links.parent[int(firsts[np.searchsorted(firsts, parent, "right") - 1])]
            table.policy.outdated(range(first, last + 1), parent)
            if table.evictable_leaf(last):
                table.policy.offered(last, table.chain_class)
