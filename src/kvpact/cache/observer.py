"""Counts of a cache as they are now: the ledger's, the index's and the tiers', beside those that its parts add.

Owns the value of prefill that was saved. Changes nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpact.cache.jobs import PactLedger
from kvpact.cache.retaining import Retaining
from kvpact.cache.tier_set import TierSet
from kvpact.identity.epochs import Epochs
from kvpact.index.block_index import BlockIndex
from kvpact.memory.arena import Standing
from kvpact.metrics import MEMORY, Snapshot


@dataclass(eq=False)
class Observer:
    """Gauges and totals of one cache."""

    ledger: PactLedger
    index: BlockIndex
    tiers: TierSet
    epochs: Epochs
    retaining: Retaining | None
    _valued_tokens: int = field(default=0, init=False)
    """Used tokens whose prefill is counted as saved."""

    def observe(self, prefill_speed: float) -> Snapshot:
        """All counts, where the engine computes `prefill_speed` tokens of prompts a second; 0: unknown."""
        metrics = self.tiers.metrics
        arena = self.tiers.arena
        totals = self.ledger.totals
        metrics.set("unnamed_weights", int(self.epochs.current.is_drawn))
        metrics.set("unproven_copies", int(arena.standing is Standing.OPEN))
        for reason, checks in arena.unmade_checks.items():
            metrics.raise_to("unmade_checks", checks, reason)
        metrics.set("prefill_speed", prefill_speed)
        if prefill_speed:
            metrics.add("spared_prefill_seconds", (totals.used_tokens - self._valued_tokens) / prefill_speed)
            self._valued_tokens = totals.used_tokens
        for name, total, label in totals.counts():
            metrics.raise_to(name, total, label)
        metrics.set("open_plans", len(self.ledger.open_plans()))
        metrics.set("leases_held", totals.leases_held)
        metrics.set("held_blocks", self.index.held_count, MEMORY)
        if self.retaining is not None:
            metrics.set("retained_blocks", self.retaining.chains.blocks)
            for kind, tenant, blocks in self.retaining.by_tenant():
                metrics.set_info("tenant_blocks", kind, tenant, value=blocks)
        metrics.set("capacity_blocks", self.index.num_slots, MEMORY)
        self.tiers.observe()
        return metrics.snapshot()
