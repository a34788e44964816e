"""The ranks' reports after each step: loads and saves that ended, blocks that were not loaded.

Owns the reports that an exception has kept from the cache, and the blocks of requests that begin again until the report
of the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvpact.contract import ExternalCache, WorkerReport
from kvpact.errors import PactViolation
from kvpact.vllm.context import VllmContext
from kvpact.vllm.loads import CommittedLoads
from kvpact.vllm.requests import EngineRequests


class Reports:
    """Settles the reports of one engine's ranks."""

    def __init__(self, requests: EngineRequests, loads: CommittedLoads) -> None:
        self._requests = requests
        self._loads = loads
        self._unsettled: WorkerReport | None = None
        self._invalid: set[int] = set()

    def begin_again(self, cache: ExternalCache | None, invalid: set[int], tables: Mapping[str, Sequence[int]]) -> None:
        """Requests with these tables begin again, over `invalid` blocks; the report of the same step comes next."""
        self._invalid |= invalid
        if cache is not None:
            cache.distrust_blocks(invalid, tables)

    def receive(
        self,
        context: VllmContext | None,
        report: WorkerReport,
        invalid: set[int],
        lost: Collection[str],
        *,
        overdue: bool,
    ) -> bool:
        """Take in the ranks' reports; returns whether the cache has to settle anything, be it `overdue` loads.

        Nothing was loaded for the `lost` requests. Blocks that a synchronous load left `invalid` are in the engine's
        prefix cache already, and so are blocks computed from them. All are removed: the request that would recompute
        them may be gone before it does (H28).
        """
        if self._unsettled is not None:
            report = self._unsettled.aggregate(report)
        if not (report.says_something or invalid or lost or overdue):
            return False
        self._unsettled = report
        for request_id in lost:
            self._loads.lost(request_id)
        if invalid:
            spread = self._loads.invalid_with(invalid | self._invalid)
            self._invalid = set()
            if context is not None:
                context.evict_published(sorted(spread))
        return True

    def settle(self, cache: ExternalCache, epochs: int, context: VllmContext | None, invalid: set[int]) -> None:
        """Have the cache settle the reports received. `epochs` is `WeightsWatch.epochs`."""
        if invalid and context is not None:
            tables = {request_id: _chain(context, request_id) for request_id in self._requests.ids}
            cache.distrust_blocks(invalid, tables)
        settlements = cache.apply_report(self._unsettled or WorkerReport({}))
        self._unsettled = None
        for settlement in settlements:
            if not settlement.skipped_tokens:  # what a step skipped the engine's scheduler class counts
                alive = settlement.request_id in self._requests.ids
                self._loads.settle(settlement, epochs, is_alive=alive)


def _chain(context: VllmContext, request_id: str) -> Sequence[int]:
    """A request's blocks, of the first group; none if it has none, or has ended."""
    try:
        return context.get_block_ids(request_id)[0]
    except (PactViolation, KeyError, ValueError):
        return ()
