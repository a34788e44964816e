"""Taking in what a step brought: sampled tokens, and the settlement of loads, exact to the block.

Owns the rule that a token counts as computed only when its keys and values are there. After a load that did not arrive
in full, the valid prefix stays, results computed on top are void, and blocks that did not arrive are not published.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvpact.contract import LoadSettlement, WorkerReport
from kvpact.errors import PactViolation
from kvpact.ranges import BlockRange, RangeSet, num_blocks_for
from kvpact_testkit.engine.admission import Load
from kvpact_testkit.engine.output import ModelOutput, SchedulerOutput
from kvpact_testkit.engine.request import Request, RequestStatus
from kvpact_testkit.engine.scheduler import Scheduler


class OutputProcessor:
    """Applies each step's results to the scheduler's requests. `before_finish` is called before a request's blocks are
    freed."""

    def __init__(self, scheduler: Scheduler, before_finish: Callable[[Request], None] | None = None) -> None:
        self._scheduler = scheduler
        self._before_finish = before_finish

    def process(self, output: SchedulerOutput, results: ModelOutput, report: WorkerReport) -> list[Request]:
        """Apply one step; returns the requests that it finished."""
        scheduler = self._scheduler
        finished: list[Request] = []
        counts = scheduler.counts
        counts.computed += sum(output.counts)
        every = range(len(results.sampled))
        if output.external_hits:
            self._note_hook_hits(output)
        if scheduler.cache is None:
            self._apply(output, results, every, finished)
            return finished
        if scheduler.commits.late:
            scheduler.commit_late()
        certain: list[int] = []
        if scheduler.quirks.finishes_before_report:
            certain = [i for i, request in enumerate(output.requests) if request.request_id not in scheduler.loads]
        self._apply(output, results, certain, finished)
        for settlement in scheduler.cache.apply_report(report):
            self._settle(settlement)
        self._apply(output, results, sorted(set(every).difference(certain)), finished)
        return finished

    def _note_hook_hits(self, output: SchedulerOutput) -> None:
        counts, hits = self._scheduler.counts, output.external_hits
        counts.hook_hits += sum(hits.values())
        counts.external_hits += sum(hits.values())
        for request, start, epoch in zip(output.requests, output.starts, output.epochs, strict=True):
            if request.epoch == epoch:
                request.note_hit(start - hits.get(request.request_id, 0), start)

    def _apply(
        self, output: SchedulerOutput, results: ModelOutput, indices: range | list[int], finished: list[Request]
    ) -> None:
        scheduler = self._scheduler
        loads, publish = scheduler.loads, scheduler.kv.publish
        sampled, ends, verified = results.sampled, results.ends, results.verified
        requests, epochs = output.requests, output.epochs
        for i in indices:
            request = requests[i]
            if request.epoch != epochs[i]:
                continue
            if loads and request.request_id in loads and not self._goes_on(request):
                continue
            end = ends[i]
            request.num_computed_tokens = end
            if i in verified:
                self._note_drafts(request, *verified[i])
            else:
                request.num_accepted_drafts = 0
            if end >= request.publish_at:
                publish(request, end)
            token = sampled[i]
            if token >= 0:
                token_ids = request.token_ids
                token_ids.append(token)
                if len(token_ids) >= request.stop_at:
                    finished.append(request)
                    if self._before_finish is not None:
                        self._before_finish(request)
                    if scheduler.cache is not None and scheduler.config.draft_tokens:
                        scheduler.cache.note_computed(request, end, partial(request.block_ids.__getitem__, 0))
                    scheduler.end(request, RequestStatus.FINISHED)
                    scheduler.counts.finished += 1

    def _note_drafts(self, request: Request, accepted: list[int], rejected: int) -> None:
        self._scheduler.counts.accepted += len(accepted)
        self._scheduler.counts.drafted += len(accepted) + rejected
        request.note_drafts(accepted, rejected)

    def _goes_on(self, request: Request) -> bool:
        """Whether results on top of a synchronous load count before all ranks have reported it.

        In stock engines they do. By the contract they are void, and the request waits for the report as for an
        asynchronous load.
        """
        scheduler = self._scheduler
        load = scheduler.loads[request.request_id]
        if scheduler.quirks.trusts_sync_loads:
            del scheduler.loads[request.request_id]
            scheduler.counts.external_hits += load.num_tokens
            request.note_hit(load.start, load.start + load.num_tokens)
            return True
        load.asynchronous = True
        self._unlist(request)
        request.rewind(load.start)
        scheduler.kv.note_rewound(request, load.start)
        request.num_inflight_external_tokens = load.num_tokens
        request.status = RequestStatus.WAITING_FOR_LOAD
        return False

    # Loads

    def _settle(self, settlement: LoadSettlement) -> None:
        scheduler = self._scheduler
        load = scheduler.loads.pop(settlement.request_id, None)
        if load is None:
            if scheduler.quirks.trusts_sync_loads and not settlement.asynchronous:
                return
            raise PactViolation(
                f"request {settlement.request_id}: a load was settled that is not under way, or twice (H08)"
            )
        valid, arrived = self._account(load, settlement)
        request = load.request
        if load.void:
            self._let_go(request)
        elif valid == load.num_tokens:
            self._loaded(request, load)
        else:
            scheduler.counts.failed_loads += 1
            self._failed(request, load, valid, arrived, late=settlement.late)

    def _account(self, load: Load, settlement: LoadSettlement) -> tuple[int, list[tuple[int, int]]]:
        """Check that the settlement names every committed block once (P7); returns the valid prefix in tokens, and all
        token ranges that arrived."""
        scheduler = self._scheduler
        size = scheduler.config.block_size
        blocks = BlockRange(load.start // size, num_blocks_for(load.num_tokens, size))
        named = settlement.loaded.union(settlement.failed)
        if named != RangeSet.of(blocks) or len(settlement.loaded.intersection(settlement.failed)):
            raise PactViolation(
                f"P7: request {settlement.request_id} committed blocks {blocks.start} to {blocks.end - 1}; "
                f"loaded {settlement.loaded.ranges}, failed {settlement.failed.ranges} do not add up to them"
            )
        end = load.start + load.num_tokens
        arrived = [(run.start * size, min(run.end * size, end)) for run in settlement.loaded.ranges]
        loaded = sum(last - first for first, last in arrived)
        scheduler.counts.loaded += loaded
        scheduler.counts.failed += load.num_tokens - loaded
        valid = min(settlement.loaded.prefix_from(blocks.start) * size, load.num_tokens)
        return valid, arrived

    def _let_go(self, request: Request) -> None:
        """Free the blocks of a void load: no rank writes to them any more."""
        if request.has_ended or request.status is RequestStatus.WAITING_FOR_LOAD:
            self._scheduler.kv.free(request)
        if request.status is RequestStatus.WAITING_FOR_LOAD:
            request.rewind(0)
            self._scheduler.queues.resume(request)

    def _loaded(self, request: Request, load: Load) -> None:
        scheduler = self._scheduler
        scheduler.counts.external_hits += load.num_tokens
        if load.asynchronous:
            request.rewind(load.start + load.num_tokens)
            scheduler.kv.publish(request, request.num_computed_tokens)
            scheduler.queues.resume(request)
        request.note_hit(load.start, load.start + load.num_tokens)
        request.num_inflight_external_tokens = 0

    def _failed(self, request: Request, load: Load, valid: int, arrived: list[tuple[int, int]], *, late: bool) -> None:
        """Recompute what did not arrive; if the load may still write to its blocks, recompute all, into other
        blocks."""
        scheduler, quirks = self._scheduler, self._scheduler.quirks
        several_groups = len(scheduler.config.groups) > 1 or not scheduler.kv.reads_all
        trusted = quirks.trusts_sync_loads and not load.asynchronous
        if trusted and several_groups:
            return  # stock engines cannot handle this: the request continues with its blocks as they are
        if quirks.load_failure == "fail":
            scheduler.kv.unpublish_from(request, load.start + valid)
            scheduler.end(request, RequestStatus.FAILED)
            return
        if request.status is RequestStatus.RUNNING:
            self._unlist(request)
        whole = quirks.group_loads_fail_whole and several_groups
        if late or whole or (quirks.probes_after_failed_load and load.start + valid == 0):
            scheduler.kv.free(request)
            request.rewind(0)
        else:
            reads_all = scheduler.kv.reads_all
            valid = valid if reads_all else 0  # a shorter match needs blocks that were not loaded
            request.rewind(load.start + valid)
            scheduler.counts.external_hits += valid
            request.note_hit(load.start, load.start + valid)
            scheduler.kv.note_rewound(request, load.start)
            if reads_all and not (quirks.truncates_at_failure or load.spans_update):
                request.loaded_ahead = [run for run in arrived if run[0] > request.num_computed_tokens]
            scheduler.kv.publish(request, request.num_computed_tokens)
        scheduler.queues.resume(request)

    def _unlist(self, request: Request) -> None:
        """Remove the request from the running queue and the ranks; what was computed on top of the load is void."""
        self._scheduler.running.remove(request)
        self._scheduler.release_row(request)
