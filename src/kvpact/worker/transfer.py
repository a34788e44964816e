"""One rank's copies from order to outcome: waits for synchronous loads, and reports each job's outcome once.

Jobs name their slots and blocks; nothing is chosen here. Knows no threads and no device: see `TransferEngine`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from kvpact.contract import JobOutcome, LoadJob, SaveJob
from kvpact.ranges import BlockRange, RangeSet
from kvpact.worker.copy.base import Job, Transfer, TransferEngine
from kvpact.worker.paged import PagedKV

logger = logging.getLogger(__name__)


class RankTransfers:
    """One rank's jobs under way. All methods are for the computing thread.

    No method raises because of a job: blocks that cannot be copied are reported as failed. With `layerwise`, and where
    the engine can, synchronous loads run beside the forward pass; otherwise `start_loads` orders the next computation
    behind them. A step waits for them at most `timeout` seconds (None: no limit); afterwards they are cancelled, and
    end as failed when the copy ends.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layer_index: Mapping[str, int],
        rank: int,
        clock: Callable[[], float],
        *,
        layerwise: bool,
        timeout: float | None = None,
        cache_groups: Sequence[range] = (),
    ) -> None:
        """`layer_index`: layer name -> number; `cache_groups`: the numbers of each KV cache group's layers."""
        self.engine = engine
        self._layer_index = layer_index
        self._groups_until = self._groups_of_layers()
        several = cache_groups if len(cache_groups) > 1 else ()
        owners = {layer: number for number, group in enumerate(several) for layer in group}
        self._cache_group_of = {name: owners[layer] for name, layer in layer_index.items() if owners}
        """Layer name -> its KV cache group; empty with a single one."""
        self._rank = rank
        self._clock = clock
        self._layerwise = layerwise and engine.layerwise
        self._timeout = timeout
        self._asked_for = 0
        """Number of groups of layers that the running step has waited for, one by one."""
        self._leave_at = 0.0
        self._open: dict[int, tuple[Job, Transfer]] = {}
        """Job id -> job and transfer, until polled."""
        self._synchronous: dict[int, Transfer] = {}
        """Job id -> load that the step waits for."""
        self._ordered: set[int] = set()
        """Synchronous loads that the next computation is ordered behind; a device may still be copying them."""
        self._logged: set[str] = set()

    def _groups_of_layers(self) -> dict[str, int]:
        until = {layer: number for number, group in enumerate(self.engine.groups, start=1) for layer in group}
        return {name: until[layer] for name, layer in self._layer_index.items()}

    def rebind(self, paged: PagedKV) -> None:
        """See `TransferEngine`. Layers find their groups anew."""
        self.engine.rebind(paged)
        self._groups_until = self._groups_of_layers()

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Begin loads: the synchronous ones first and at once, the others in the background."""
        if not jobs:
            return
        self.wait_for_loads()
        self._asked_for = 0
        self._leave_at = self._clock() + (self._timeout or 0.0)
        transfers = self._opened(jobs, self.engine.load(jobs))
        self._synchronous = {
            job.job_id: transfer for job, transfer in zip(jobs, transfers, strict=True) if job.synchronous
        }
        if not self._layerwise:
            self.wait_for_loads()

    def wait_for_layer(self, layer_name: str) -> None:
        """Return when this layer of all synchronous loads has arrived; an unknown name waits for all layers."""
        if self._synchronous:
            loads = self._loads_of(layer_name) if self._cache_group_of else self._synchronous.values()
            groups = self._groups_until.get(layer_name, len(self.engine.groups))
            self._asked_for = max(self._asked_for, groups)
            self._wait(groups, loads)

    def not_asked_for(self) -> set[int]:
        """Synchronous loads of the past step for which a layer did not wait (H113).

        Later ones are no longer loaded layer by layer.
        """
        if not self._synchronous or self._asked_for == len(self.engine.groups):
            return set()
        self._layerwise = False
        logger.error(
            "rank %d: the model's layers waited for %d of %d groups of loaded layers, so the others may have read "
            "blocks before they arrived: they are computed again, and from now on loads end before the forward pass",
            self._rank, self._asked_for, len(self.engine.groups),
        )  # fmt: skip
        return set(self._synchronous)

    def _loads_of(self, layer_name: str) -> Collection[Transfer]:
        """Synchronous loads under way that have this layer; all of them for an unknown name."""
        cache_group = self._cache_group_of.get(layer_name)
        open_loads = [(self._open[job_id][0], one) for job_id, one in self._synchronous.items() if job_id in self._open]
        return [one for job, one in open_loads if cache_group in (None, job.group_id)]

    def wait_for_loads(self) -> None:
        """Order the next computation behind all synchronous loads, or cancel them after the timeout."""
        if self._synchronous:
            if self._wait(len(self.engine.groups), self._synchronous.values()):
                self._ordered |= self._synchronous.keys() & self._open.keys()
            self._synchronous = {}

    def is_ordered(self, job_id: int) -> bool:
        """True if the next computation is ordered behind this synchronous load, and it has had no error so far.

        On a device it may not have ended: there, only the loss of the device can still make it fail.
        """
        return job_id in self._ordered and self._open[job_id][1].error is None

    def _wait(self, groups: int, transfers: Collection[Transfer]) -> bool:
        """Wait for layers of these synchronous loads; cancel all such loads after the timeout, and return False."""
        for transfer in transfers:
            seconds = None if self._timeout is None else max(0.0, self._leave_at - self._clock())
            if not transfer.wait(groups, seconds):
                for left in self._synchronous.values():
                    left.cancel()
                self._synchronous = {}
                return False
        return True

    def leave(self, job_ids: Collection[int]) -> None:
        """Cancel asynchronous loads that the engine no longer waits for: they end as failed, at once unless being
        copied.

        A load that is being copied ends when the current copy call returns, which may be never.
        """
        for job_id in job_ids:
            job, transfer = self._open.get(job_id, (None, None))
            if transfer is not None and isinstance(job, LoadJob) and not job.synchronous:
                transfer.cancel()

    @property
    def under_way(self) -> bool:
        """True while any job has begun and its outcome was not polled."""
        return bool(self._open)

    def cancel_all(self) -> None:
        """Cancel every job: each ends at once, or when the current copy call returns."""
        for _, transfer in self._open.values():
            transfer.cancel()

    def start_saves(self, jobs: Sequence[SaveJob]) -> None:
        """Begin saves in the background, behind the caller's computation. They pause for synchronous loads."""
        self._opened(jobs, self.engine.save(jobs))

    def submit(self, max_copies: int | None = None, max_load_bytes: int | None = None, *, computes: bool) -> None:
        """Go on with copies in the background as a step begins: within the limits if it `computes`, else with all."""
        if computes:
            self.engine.submit_some(max_copies, max_load_bytes)
        else:
            self.engine.submit_all()

    def poll(self) -> dict[int, JobOutcome]:
        """Job id -> outcome of the jobs that ended since the last call; done and failed are the whole job."""
        ended = [(job, transfer) for job, transfer in self._open.values() if transfer.ended]
        for job, transfer in ended:
            del self._open[job.job_id]
            self._ordered.discard(job.job_id)
            self._log(job, transfer.error)
        return {job.job_id: _outcome(job, transfer) for job, transfer in ended}

    def is_open(self, job_id: int) -> bool:
        """True while this job has begun and its outcome was not polled."""
        return job_id in self._open

    def drain(self, seconds: float) -> bool:
        """Wait at most `seconds` until every job has ended; returns whether all have."""
        end = self._clock() + seconds
        everything = len(self.engine.groups)
        return all(transfer.wait(everything, max(0.0, end - self._clock())) for _, transfer in self._open.values())

    def shutdown(self, seconds: float) -> bool:
        """End all copies within `seconds`; unfinished jobs fail. Returns whether all have ended. Idempotent."""
        return self.engine.close(seconds)

    def _opened(self, jobs: Sequence[Job], transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        self._open.update((job.job_id, (job, transfer)) for job, transfer in zip(jobs, transfers, strict=True))
        return transfers

    def _log(self, job: Job, error: Exception | None) -> None:
        """Log the first failure of each kind with its traceback; outcomes report the later ones."""
        kind = "a save" if isinstance(job, SaveJob) else "a synchronous load" if job.synchronous else "a load"
        if error is not None and kind not in self._logged:
            self._logged.add(kind)
            logger.warning("rank %d: %s failed; such blocks are computed instead", self._rank, kind, exc_info=error)


def _outcome(job: Job, transfer: Transfer) -> JobOutcome:
    failed = RangeSet.of(*(BlockRange(job.start_block + block, 1) for block in transfer.failed))
    return JobOutcome(RangeSet.of(job.blocks).difference(failed), failed)
