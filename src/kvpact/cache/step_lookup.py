"""Matches unknown when their request was scheduled: the workers look for them at the step's beginning.

Owns the lookups that travel with a step's saves, until every rank has reported what it loaded or the save has ended. A
lookup takes nothing of its own: it names a save that is ordered anyway, whose slots are reserved and whose blocks are
held. A rank that finds blocks in a tier loads them from those slots instead of saving them there; the save's report
completes the entries in both cases. No clock, no I/O: times are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvpact.cache.jobs import PactLedger
from kvpact.cache.request import Requests
from kvpact.cache.tier_set import TierSet
from kvpact.cache.totals import Sources
from kvpact.contract import LoadSettlement, SaveJob, StepLookup, StoreRead, WorkerReport, load_id
from kvpact.identity.keys import BlockKey
from kvpact.ranges import BlockRange, RangeSet


@dataclass(slots=True)
class _Open:
    """Lookup under way: the ranks that have loaded, and the number of blocks."""

    lookup: StepLookup
    job: SaveJob
    loaded_blocks: int = 0
    ranks: set[int] = field(default_factory=set)
    sources: set[tuple[int, str]] = field(default_factory=set)
    """Sources of its blocks, as a plan has them."""
    is_void: bool = False
    """True if the engine computes the found blocks all the same."""


@dataclass(eq=False)
class StepLookups:
    """All lookups under way on `ranks` ranks."""

    requests: Requests
    ledger: PactLedger
    tiers: TierSet
    ranks: int
    _open: dict[int, _Open] = field(default_factory=dict, init=False)
    _ordered: list[StepLookup] = field(default_factory=list, init=False)

    def order(self, job: SaveJob, computed_tokens: int, max_tokens: int, keys: Sequence[BlockKey]) -> None:
        """With this step, look for the blocks of `keys` from the start of `job` on."""
        lookup = StepLookup(job.job_id, job.request_id, computed_tokens, max_tokens, tuple(keys))
        self._open[job.job_id] = _Open(lookup, job)
        self._ordered.append(lookup)
        self.tiers.metrics.add("step_lookups")

    def end_step(self) -> tuple[StepLookup, ...]:
        """Lookups for the workers; the next step begins empty."""
        if not self._ordered:
            return ()
        ordered = tuple(self._ordered)
        self._ordered = []
        return ordered

    def abandon_step(self) -> None:
        """The running step's lookups never reach the workers."""
        for lookup in self.end_step():
            del self._open[lookup.job_id]

    def _note_reads(self, reads: Sequence[StoreRead]) -> None:
        """Note one rank's reads; reads of lookups that have ended are ignored."""
        for read in reads:
            if (task := self._open.get(read.job_id)) is not None:
                task.sources.add((read.blocks.end, self.tiers.written[read.tier].name))
                self.tiers.note_read_elsewhere(read.tier, task.lookup.keys[read.blocks.start : read.blocks.end])

    def distrust_blocks(self, block_ids: frozenset[int]) -> None:
        """The engine computes again what reached these of its blocks, or was computed after them."""
        for task in self._open.values():
            task.is_void |= not block_ids.isdisjoint(task.job.block_ids)

    def apply_report(self, report: WorkerReport, now: float) -> list[LoadSettlement]:
        """Count the ranks' loads; returns the lookups that this settles, with the tokens not computed.

        Blocks that failed on a rank are not looked up for the request again.
        """
        settled: list[LoadSettlement] = []
        if not self._open:
            return settled
        self._note_reads(report.reads)
        for rank, outcomes in report.ranks.items():
            for job_id, outcome in outcomes.items():
                task = self._open.get(load_id(job_id))
                if task is None:
                    continue
                task.ranks.add(rank)
                task.loaded_blocks = len(outcome.done)  # equal on all ranks: they agreed on it before the step
                if failed := outcome.failed.hull():
                    task.is_void = True
                    self.requests.not_again(task.job.request_id, failed.start)
                if len(task.ranks) == self.ranks:
                    if not task.is_void:
                        settled.append(self._settle(task, now))
                    del self._open[task.job.job_id]
        return settled

    def _settle(self, task: _Open, now: float) -> LoadSettlement:
        lookup = task.lookup
        job = task.job
        size = self.requests.block_size
        blocks = BlockRange(job.start_block, task.loaded_blocks)
        used = min(blocks.end * size - lookup.computed_tokens, lookup.max_tokens)
        self.ledger.note_step_match(
            job.request_id,
            blocks,
            BlockRange(lookup.computed_tokens, used),
            block_size=size,
            slots=(),
            now=now,
            request_finished=job.request_id not in self.requests.live,
            sources=Sources(tuple(sorted(task.sources))),
        )
        self.tiers.metrics.add("step_hits")
        return LoadSettlement(job.request_id, RangeSet.of(blocks), RangeSet(), asynchronous=False, skipped_tokens=used)

    def end_saves(self, is_under_way: Callable[[int], bool]) -> None:
        """Forget lookups whose saves have ended: nothing was found, or the report was lost."""
        for job_id in [job_id for job_id in self._open if not is_under_way(job_id)]:
            del self._open[job_id]
