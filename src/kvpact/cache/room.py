"""Room in the arena for blocks that are to be read or saved: free slots, evictable ones, and those of postponed plans.

Decides which promises end so that others get room. Owns no slot: the index does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpact.cache.jobs import PactPlan, PlanSlots
from kvpact.cache.ledger import Ledger
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex, Pin
from kvpact.metrics import EndReason


@dataclass(eq=False, slots=True)
class ArenaRoom:
    """The slots of one index, as far as the plans of one ledger leave them."""

    index: BlockIndex
    ledger: Ledger[Pin, PlanSlots]
    give_up: Callable[[PactPlan, EndReason], None]
    """Ends a postponed plan with its reason."""

    def reservable(self, parent: BlockKey = ROOT, wanted: int = 0, slot_class: int | None = None) -> int:
        """See `BlockIndex.reservable`. If that is fewer than `wanted`, postponed plans end, one by one, until it
        is not.

        A plan that was prepared in this step does not end. Engines ask for their queue's head first, so the head gets
        room from the requests queued after it and never the other way round: two requests do not evict each other in
        turn.
        """
        room = self.index.reservable(parent, wanted, slot_class)
        if room >= wanted:
            return room
        for plan, reason in self.ledger.postponed_plans():
            self.give_up(plan, reason)
            room = self.index.reservable(parent, wanted, slot_class)
            if room >= wanted:
                break
        return room
