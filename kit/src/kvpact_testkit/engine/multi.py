"""Several caches for one engine: the longest match is used, and the other caches' matches are aborted at once.

Owns the choice and the numbering of jobs over caches. Has no blocks and no plans: each cache keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalCacheWorker,
    ExternalKVMatch,
    ExternalMatchExit,
    JobOutcome,
    JobQuery,
    LoadJob,
    LoadSettlement,
    SaveJob,
    StepWork,
    WorkerReport,
)
from kvpact.errors import ConfigError, WeightsVersionRefused

AnyJob = TypeVar("AnyJob", LoadJob, SaveJob, JobQuery)


class MultiCache(ExternalCache):
    """The scheduler's half. A job of cache i is numbered so that `job_id % len(caches) == i`."""

    def __init__(self, caches: Sequence[ExternalCache]) -> None:
        if not caches:
            raise ConfigError("a MultiCache needs at least one cache")
        self.caches = tuple(caches)
        self._winners: dict[str, tuple[int, int]] = {}
        """Request id -> index of the cache whose match is open, and the token at which the match starts."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`. As long as one cache answers "ask again later", so does this one; the others
        keep their plans."""
        index, start = self._winners.get(request.request_id, (0, -1))
        if start == num_computed_tokens:
            match = self.caches[index].prepare_external_match(request, num_computed_tokens)
            if match is None or match.num_tokens:
                return self._of(index, match)
        self._winners.pop(request.request_id, None)
        ready: list[tuple[int, ExternalKVMatch]] = []
        for index, cache in enumerate(self.caches):
            match = cache.prepare_external_match(request, num_computed_tokens)
            if match is not None:
                ready.append((index, match))
        if len(ready) < len(self.caches):
            for index, match in ready:
                if match.num_tokens:
                    self.caches[index].postpone_external_match(
                        request.request_id, ExternalMatchExit.OTHER_CONNECTOR_WAITS
                    )
            return None
        winner, longest = max(ready, key=lambda answer: (answer[1].num_tokens, -answer[0]))
        for index, match in ready:
            if index != winner and match.num_tokens:
                self.caches[index].abort_external_match(request.request_id, match, ExternalMatchExit.OTHER_CONNECTOR)
        if longest.num_tokens:
            self._winners[request.request_id] = winner, num_computed_tokens
        return self._of(winner, longest)

    def _of(self, index: int, match: ExternalKVMatch | None) -> ExternalKVMatch | None:
        return match and replace(match, query_result=(index, match))

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`."""
        index, own = _choice(match)
        self._winners.pop(request.request_id, None)
        return self.caches[index].commit_external_match(request, own, num_tokens, block_ids)

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`."""
        self._winners.pop(request_id, None)
        if match is None:
            for cache in self.caches:
                cache.abort_external_match(request_id, None, reason)
        else:
            index, own = _choice(match)
            self.caches[index].abort_external_match(request_id, own, reason)

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        """See `ExternalCache`."""
        for cache in self.caches:
            cache.postpone_external_match(request_id, reason)

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`."""
        for cache in self.caches:
            cache.note_computed(request, num_computed_tokens, block_ids)

    def end_step(self) -> StepWork:
        """See `ExternalCache`."""
        works = [cache.end_step() for cache in self.caches]
        loads = tuple(self._numbered(job, i) for i, work in enumerate(works) for job in work.loads)
        saves = tuple(self._numbered(job, i) for i, work in enumerate(works) for job in work.saves)
        inquiries = tuple(self._numbered(inquiry, i) for i, work in enumerate(works) for inquiry in work.inquiries)
        recalls = tuple(job_id * len(works) + i for i, work in enumerate(works) for job_id in work.recalls)
        overdue = tuple(job_id * len(works) + i for i, work in enumerate(works) for job_id in work.overdue)
        return StepWork(loads, saves, inquiries, recalls, overdue, extra=tuple(work.extra for work in works))

    def _numbered(self, job: AnyJob, index: int) -> AnyJob:
        return replace(job, job_id=job.job_id * len(self.caches) + index)

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`."""
        count = len(self.caches)
        settlements = []
        for index, cache in enumerate(self.caches):
            mine = {
                rank: {job_id // count: outcome for job_id, outcome in jobs.items() if job_id % count == index}
                for rank, jobs in report.ranks.items()
            }
            settlements += cache.apply_report(WorkerReport(mine))
        return settlements

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`."""
        self._winners.pop(request_id, None)
        for cache in self.caches:
            cache.request_finished(request_id)

    def on_new_request(self, request: EngineRequest) -> None:
        """See `ExternalCache`."""
        for cache in self.caches:
            cache.on_new_request(request)

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """See `ExternalCache`."""
        for cache in self.caches:
            cache.bind_scheduler_context(context)

    def reset(self) -> None:
        """See `ExternalCache`."""
        self._winners.clear()
        for cache in self.caches:
            cache.reset()

    def set_weights_version(self, version: str) -> None:
        """See `ExternalCache`: refused if any cache refuses it, after all caches were called."""
        refused = None
        for cache in self.caches:
            try:
                cache.set_weights_version(version)
            except WeightsVersionRefused as error:
                refused = error
        if refused is not None:
            raise refused

    @property
    def supports_kv_cache_groups(self) -> bool:
        """Whether all caches do."""
        return all(cache.supports_kv_cache_groups for cache in self.caches)

    @property
    def has_pending_work(self) -> bool:
        """Whether a cache has."""
        return any(cache.has_pending_work for cache in self.caches)

    def shutdown(self) -> None:
        """See `ExternalCache`."""
        for cache in self.caches:
            cache.shutdown()


def _choice(match: ExternalKVMatch) -> tuple[int, ExternalKVMatch]:
    match match.query_result:
        case (int() as index, ExternalKVMatch() as own):
            return index, own
    raise ConfigError(f"this match is not of a MultiCache: {match}")


class MultiWorker(ExternalCacheWorker):
    """One rank's half: gives each worker its jobs, with the numbers that its cache assigned."""

    def __init__(self, workers: Sequence[ExternalCacheWorker]) -> None:
        self.workers = tuple(workers)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See `ExternalCacheWorker`."""
        for worker in self.workers:
            worker.register_kv_caches(kv_caches)

    def before_update_states(self, scheduler_output: object) -> Mapping[str, int]:
        """See `ExternalCacheWorker`; where several workers supply tokens of a request, the largest number."""
        hits: dict[str, int] = {}
        for worker in self.workers:
            for request_id, hit in worker.before_update_states(scheduler_output).items():
                hits[request_id] = max(hit, hits.get(request_id, 0))
        return hits

    def _part(self, work: StepWork, index: int) -> StepWork:
        count = len(self.workers)
        extras = work.extra if isinstance(work.extra, tuple) and work.extra else (None,) * count

        def own(jobs: Sequence[AnyJob]) -> tuple[AnyJob, ...]:
            return tuple(replace(job, job_id=job.job_id // count) for job in jobs if job.job_id % count == index)

        recalls, overdue = (
            tuple(job_id // count for job_id in jobs if job_id % count == index)
            for jobs in (work.recalls, work.overdue)
        )
        return StepWork(own(work.loads), own(work.saves), own(work.inquiries), recalls, overdue, extra=extras[index])

    def start_loads(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`."""
        for index, worker in enumerate(self.workers):
            worker.start_loads(self._part(work, index))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `ExternalCacheWorker`."""
        for worker in self.workers:
            worker.wait_for_layer_load(layer_name)

    def start_saves(self, work: StepWork) -> None:
        """See `ExternalCacheWorker`."""
        for index, worker in enumerate(self.workers):
            worker.start_saves(self._part(work, index))

    def report(self) -> WorkerReport:
        """See `ExternalCacheWorker`."""
        count = len(self.workers)
        ranks: dict[int, dict[int, JobOutcome]] = {}
        for index, worker in enumerate(self.workers):
            for rank, jobs in worker.report().ranks.items():
                renamed = {job_id * count + index: outcome for job_id, outcome in jobs.items()}
                ranks.setdefault(rank, {}).update(renamed)
        return WorkerReport(ranks)

    def shutdown(self) -> None:
        """See `ExternalCacheWorker`."""
        for worker in self.workers:
            worker.shutdown()
