"""Lookups of one request: counted once each, the last one in its record.

Owns which lookup of the request was counted last. A blocked request that asks in each step is counted once (H02).
"""

from __future__ import annotations

from kvpact.cache.records import RequestRecord
from kvpact.metrics import Metrics, MissReason


class CountedLookups:
    """One request's lookups. A new one costs no call of Python."""

    start = -1
    """First block of the last counted lookup; -1 before there is one."""
    found: bool | None = None
    """True if that promised tokens, False for a miss; None while it waits for a tier."""
    spared_at = -1
    """First block of the last probe at which the engine had all that could be loaded."""

    def note(
        self, start: int, found: bool | None, miss: MissReason | None, metrics: Metrics, record: RequestRecord
    ) -> None:
        """A lookup from block `start` on promises tokens, or nothing because of `miss`; None: it is under way.

        A repeated one counts no more. One with another result does: a blocked request may miss first, and find later
        what others have saved.
        """
        if self.start != start or (found is not None and self.found is not None and found != self.found):
            metrics.add("lookups")
            self.found = None
        self.start = record.looked_up_from = start
        if found is not None:
            record.miss = miss
        if found is not None and self.found is None:
            self.found = found
            if miss is None:
                metrics.add("hits")
            else:
                metrics.add("misses", label=miss)

    def note_spared(self, start: int, metrics: Metrics) -> None:
        """Count a probe at which the engine has all that could be loaded: neither a lookup nor a miss."""
        if self.spared_at != start:
            metrics.add("spared_lookups")
        self.spared_at = start
