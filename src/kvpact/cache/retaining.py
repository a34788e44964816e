"""Order of eviction by what is known of clients: blocks that their hints retain, and shares of tenants.

Owns nothing but the retained chains of memory's index, and the owners of its blocks; time comes from the cache's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from kvpact.cache.request import RequestState
from kvpact.identity.tenants import Tenants
from kvpact.index.block_index import BlockIndex
from kvpact.index.retained_chains import RetainedChains


class TenantBlocks(StrEnum):
    """Kinds of a tenant's blocks in memory."""

    HELD = "held"
    SHARE = "share"
    RETAINED = "retained"


@dataclass(eq=False)
class Retaining:
    """Retained blocks, and those of tenants, in one arena whose slots are all of one class."""

    index: BlockIndex
    clock: Callable[[], float]
    tenants: Tenants | None
    """Clients that have a share of the arena; None: it is not divided."""
    chains: RetainedChains = field(init=False)

    def __post_init__(self) -> None:
        self.chains = self.index.retained_chains(self.tenants.shares if self.tenants is not None else ())

    def request_finished(self, state: RequestState) -> None:
        """Retain the blocks in memory of a request that has ended, if its client asked for it; note how many."""
        hints = state.hints
        if hints is None or not hints.retain_seconds:
            return
        keys = state.keys.keys if state.keys is not None else ()
        known = keys[: self.index.known_prefix(keys)]
        kept = self.chains.retain(known, self.clock() + hints.retain_seconds)
        if kept < len(keys) or not kept:
            hints.clip("retain", self._why_fewer(kept, len(known), len(keys), state.owner))
        state.note_outcomes(hints)

    def _why_fewer(self, kept: int, known: int, blocks: int, owner: int) -> str:
        """Reason, in words, why fewer than all blocks of a request are retained."""
        if kept or not known:
            return f"{kept:,} of {blocks:,} blocks" if kept else "no block of it is in memory"
        return f"the share of {self.tenants.labels[owner]} retains none" if self.tenants is not None else "no room"

    def by_tenant(self) -> Iterator[tuple[str, str, int]]:
        """Blocks of each tenant, by their kind and its name; none without tenants. Safe on any thread."""
        if self.tenants is not None and self.chains.shares is not None:
            for owner, name in enumerate(self.tenants.labels):
                yield TenantBlocks.HELD, name, self.chains.shares.blocks[owner]
                yield TenantBlocks.SHARE, name, self.chains.shares.shares[owner]
                yield TenantBlocks.RETAINED, name, self.chains.blocks_of(owner)
