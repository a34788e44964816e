"""Blocks that one tier must delete and has not been seen to delete yet.

Owns the deletions under way and the repetition of those that the tier refused; also of `Tier.refute_run`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from typing import Final

from kvpact.errors import PactViolation
from kvpact.identity.keys import BlockKey
from kvpact.tiers.executor import ControlDone, OpId, TierExecutor
from kvpact.tiers.known_keys import first_in

logger = logging.getLogger(__name__)

REPEAT_SECONDS: Final = 2.0
"""A refused deletion is repeated after this many seconds."""

MAX_DELETIONS: Final = 64
"""Deletions under way at once; further ones are combined into one (P12)."""

MIN_DELETED_KEYS: Final = 1 << 16
"""Least bound of blocks that wait for deletion: those of the longest prompt."""

_REFUTE: Final = "refute"


class Deletions:
    """Blocks that a tier must delete. Lives on the thread of the tier's user and never waits."""

    def __init__(self, executor: TierExecutor, name: str, clock: Callable[[], float], max_keys: int) -> None:
        """At most `max_keys` blocks, or `MIN_DELETED_KEYS` if that is more, are kept by key."""
        self._executor = executor
        self._name = name
        self._clock = clock
        self._max_keys = max(max_keys, MIN_DELETED_KEYS)
        self._tickets = count(1)
        self._under_way: dict[OpId, tuple[BlockKey, ...] | None] = {}
        """Deletion -> its blocks; None for all blocks of the tier."""
        self._keys: Counter[BlockKey] = Counter()
        """Blocks that the tier may still hold -> the number of deletions that name each."""
        self._refused: dict[BlockKey, None] = {}
        """Blocks whose deletion must be repeated."""
        self.lost_count = False
        """True if there were too many of them to keep: then nothing that the tier holds is used."""
        self._repeat_at = inf
        self._must_refute = False
        """True while the tier has not left the mark that it was asked for."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: BlockKey) -> bool:
        """True if the block waits for deletion."""
        return key in self._keys

    def first_among(self, keys: Sequence[BlockKey], held: int) -> int:
        """Index of the first of the first `held` keys that waits for deletion; `held` if none does."""
        return first_in(self._keys, keys, held)

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Order the deletion of these blocks."""
        self._keys.update(keys)
        if len(self._keys) > self._max_keys:
            self._lose_count()
        elif len(self._under_way) < MAX_DELETIONS:
            self._submit(tuple(keys))
        else:
            self._refuse(keys)

    def refute_run(self) -> None:
        """Order the tier to mark this engine's records invalid; repeated until it has."""
        self._must_refute = False
        self._executor.submit_control(_REFUTE, lambda tier: tier.refute_run())

    def _lose_count(self) -> None:
        """Too many blocks wait for deletion: the tier is not used until all are gone.

        An exclusive tier is emptied. A shared tier, whose blocks belong to others too, is never used again.
        """
        self._forget_all()
        if self._executor.tier.exclusive:
            self._submit(None)
        elif not self.lost_count:
            logger.error("kvpact: the %s tier cannot delete blocks; it is not used any more", self._name)
        self.lost_count = True

    def _forget_all(self) -> None:
        self._keys.clear()
        self._refused.clear()
        self._under_way = dict.fromkeys(self._under_way, ())

    def _submit(self, keys: tuple[BlockKey, ...] | None) -> None:
        op_id = ("delete", next(self._tickets))
        self._under_way[op_id] = keys
        self._executor.submit_control(op_id, lambda tier: tier.clear() if keys is None else tier.delete(keys))

    def _refuse(self, keys: Sequence[BlockKey]) -> None:
        """The tier may still hold these blocks: their deletion is repeated, once for each."""
        self._keys.subtract(key for key in keys if key in self._refused)
        self._refused.update(dict.fromkeys(keys))
        self._repeat_at = min(self._repeat_at, self._clock() + REPEAT_SECONDS)

    def repeat_if_due(self, now: float) -> None:
        """Repeat refused deletions after `REPEAT_SECONDS`."""
        if now >= self._repeat_at:
            self.repeat()

    def repeat(self) -> None:
        """Repeat refused deletions."""
        self._repeat_at = inf
        if self._must_refute:
            self.refute_run()
        exclusive = self._executor.tier.exclusive
        if self.lost_count and exclusive and None not in self._under_way.values():
            self._submit(None)
        elif self._refused:
            keys = tuple(self._refused)
            self._refused = {}
            self._submit(keys)

    def end(self, done: ControlDone) -> tuple[BlockKey, ...]:
        """End a deletion; returns the blocks that the tier no longer holds."""
        if done.op_id == _REFUTE:
            self._must_refute = not done.ok
            self._repeat_at = self._repeat_at if done.ok else self._clock() + REPEAT_SECONDS
            return ()
        keys = self._under_way.pop(done.op_id)
        if not done.ok:
            self._refuse(keys or ())
            return ()
        if keys is None:
            self.lost_count = False
            self._forget_all()
            return ()
        self._keys.subtract(keys)
        for key in keys:
            if self._keys[key] <= 0:
                del self._keys[key]
        return keys

    def check(self) -> None:
        """Verify the counts, for tests. Raises PactViolation."""
        named = Counter(key for keys in self._under_way.values() for key in keys or ())
        named.update(self._refused.keys())
        if named != self._keys:
            raise PactViolation(f"{len(self._keys)} blocks are to be deleted, and deletions name {len(named)}")
