"""Chains of an index that clients' hints retain, by their keys.

Owns the share of the place that may be retained; `retention.py` has the chains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvpact.identity.keys import BlockKey
from kvpact.index.retention import Retention
from kvpact.index.table import Table

SHARE: Final = 5
"""At most one in so many usable slots is retained."""


class RetainedChains:
    """Retained chains of a table with one class of slots. Time is an argument, in seconds."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._retention = Retention(table.links)
        table.policy.spare(self._retention)

    @property
    def blocks(self) -> int:
        """Retained blocks."""
        return self._retention.rows

    def retain(self, keys: Sequence[BlockKey], until: float) -> int:
        """Retain the first of the known blocks `keys`, a chain from its first block on, as many as the share has room
        for; returns their number. Older retentions end to make that room, the oldest first."""
        most = min(len(keys), self._table.space.usable // SHARE)
        if most:
            row = self._table.keys.find(keys[most - 1])
            self._retention.retain(row, until)
            while self._retention.rows > self._table.space.usable // SHARE:
                self._offer(self._retention.end_oldest())
        return most

    def end_expired(self, now: float) -> None:
        """End retentions whose time has passed, or some of many; others later."""
        for row in self._retention.end_expired(now):
            self._offer(row)

    def end_all(self) -> None:
        """End all retentions: nobody can ask for these blocks any more."""
        while self._retention.rows:
            self._offer(self._retention.end_oldest())

    def _offer(self, row: int | None) -> None:
        """Let the policy have the end of a chain again."""
        if row is not None and self._table.evictable_leaf(row):
            self._table.policy.offered(row, self._table.chain_class)
