"""Retention by clients' hints: the blocks of a request that has ended are evicted after others for a time.

Owns nothing but the retained chains of memory's index; time comes from the cache's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvpact.cache.request import RequestState
from kvpact.index.block_index import BlockIndex
from kvpact.index.retained_chains import RetainedChains


@dataclass(eq=False)
class Retaining:
    """Retained blocks of one arena whose slots are all of one class."""

    index: BlockIndex
    clock: Callable[[], float]
    chains: RetainedChains = field(init=False)

    def __post_init__(self) -> None:
        self.chains = self.index.retained_chains()

    def request_finished(self, state: RequestState) -> None:
        """Retain the blocks in memory of a request that has ended, if its client asked for it; note how many."""
        hints = state.hints
        if hints is None or not hints.retain_seconds:
            return
        keys = state.keys.keys if state.keys is not None else ()
        known = keys[: self.index.known_prefix(keys)]
        kept = self.chains.retain(known, self.clock() + hints.retain_seconds)
        if kept < len(keys) or not kept:
            hints.clip("retain", f"{kept:,} of {len(keys):,} blocks" if kept else "no block of it is in memory")
        state.note_outcomes(hints)
