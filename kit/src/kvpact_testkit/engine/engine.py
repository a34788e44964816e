"""The embedded engine: runs scheduler, ranks and cache step by step and checks every read with the oracle.

Owns the order of calls within a step and decides which wrong reads count. Takes no scheduling decision.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from kvpact.contract import ExternalCache, ExternalCacheWorker, WorkerReport
from kvpact.errors import ConfigError, PactViolation
from kvpact_testkit.engine.block_pool import NULL_BLOCK
from kvpact_testkit.engine.config import EngineConfig
from kvpact_testkit.engine.context import EngineContext, OfferingContext
from kvpact_testkit.engine.counts import EngineCounts
from kvpact_testkit.engine.oracle import Digests, OracleViolation, Tokens, WrongRead
from kvpact_testkit.engine.output import ModelOutput, SchedulerOutput
from kvpact_testkit.engine.output_processor import OutputProcessor
from kvpact_testkit.engine.quirks import EngineQuirks
from kvpact_testkit.engine.request import Request
from kvpact_testkit.engine.runner import ModelRunner
from kvpact_testkit.engine.scheduler import Scheduler
from kvpact_testkit.engine.step_hook import agree_on_hits, apply_external_hits

NO_REPORT = WorkerReport({})

Executed = tuple[SchedulerOutput, ModelOutput, WorkerReport, list[WrongRead]]


def _first_group(request: Request) -> Sequence[int]:
    return request.block_ids[0]


class StepClock:
    """Seconds that advance with the engine's steps only; pass the same object to a cache that needs a clock."""

    def __init__(self, seconds_per_step: float = 0.01) -> None:
        self.seconds_per_step = seconds_per_step
        self.now = 0.0

    def __call__(self) -> float:
        """The time now, in seconds."""
        return self.now


class Engine:
    """Requests in, tokens out, one `step` at a time. `workers` are the cache's, one per rank, in rank order."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        quirks: EngineQuirks | None = None,
        cache: ExternalCache | None = None,
        workers: Sequence[ExternalCacheWorker] = (),
        clock: StepClock | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.quirks = quirks or EngineQuirks.native()
        self.cache = cache
        self.workers = tuple(workers)
        self.clock = clock or StepClock()
        self.counts = EngineCounts()
        self.scheduler = Scheduler(self.config, self.quirks, cache, self.counts)
        self.runner = ModelRunner(self.config)
        offers = self.config.draft_tokens and self.scheduler.kv.has_states
        self.context = (OfferingContext if offers else EngineContext)(self.scheduler)
        self.finished: dict[str, Request] = {}
        self.recorded: list[str] = []
        """Descriptions of wrong reads, with `on_violation` "record"."""
        incremental = self.config.oracle == "incremental"
        self._processor = OutputProcessor(self.scheduler, self._check_whole if incremental else None)
        self._executed: deque[Executed] = deque()
        self._arrivals: list[tuple[int, int, Request]] = []
        self._added = 0
        if cache is not None:
            if len(workers) != self.config.num_ranks:
                raise ConfigError(f"a cache needs one worker a rank: {self.config.num_ranks}, not {len(workers)}")
            if not (self.config.keeps_everything or cache.supports_kv_cache_groups):
                raise ConfigError(f"{type(cache).__name__} knows one KV cache group, of full attention, and no more")
            for rank, worker in enumerate(self.workers):
                worker.register_kv_caches(self.runner.pages(rank))
            cache.bind_scheduler_context(self.context)

    # Requests

    def add_request(self, request: Request) -> Request:
        """Queue a request now, or in step `arrival_step`."""
        if request.arrival_step > self.scheduler.step:
            heapq.heappush(self._arrivals, (request.arrival_step, self._added, request))
            self._added += 1
        else:
            self.scheduler.add_request(request)
        return request

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; returns False if no such request is alive."""
        return self.scheduler.cancel(request_id)

    def reset(self) -> None:
        """Reset all prefix caches, the external one too; running requests restart. See `Scheduler.reset`."""
        self.reset_prefix_cache(reset_connector=True, reset_running_requests=True)

    def reset_prefix_cache(self, *, reset_connector: bool = False, reset_running_requests: bool = False) -> bool:
        """Unpublish the engine's blocks like vLLM, unless a block is in use; return whether they were unpublished.

        With `reset_connector` the external cache is reset in either case; running requests continue with the content of
        their blocks. With `reset_running_requests` they are preempted and restart, and all blocks are unpublished.
        """
        if reset_running_requests:
            self._drain()
            if self.cache is not None:
                self.cache.give_up_saves()
        pool = self.scheduler.kv.pool
        emptied = reset_running_requests or pool.num_free == self.config.num_blocks - 1
        if reset_running_requests:
            self.scheduler.reset()
        if emptied:
            pool.unpublish_all()
            self.runner.carries_over = False
        if reset_connector:
            self.reset_connector()
        return emptied

    def reset_connector(self) -> None:
        """Reset the external cache only: the engine's blocks and requests stay as they are."""
        if self.scheduler.commits.late:
            self._drain()  # commit a match before the cache that promised it is reset
        if self.cache is not None:
            self.cache.reset()

    def update_weights(self, weights: int | None = None, *, clear_cache: bool = True) -> None:
        """Install other weights between two steps, by default weights never used before, and reset the external cache.

        From now on nothing computed before may come from the external cache (H32). Without `clear_cache` running
        requests keep the keys and values in their blocks, and the engine's own prefix cache stays. With several KV
        cache groups, or another kind than full attention, that raises ConfigError: their blocks may be of different
        weights, and the oracle knows one value for each token.
        """
        if not (clear_cache or self.config.keeps_everything):
            raise ConfigError("several KV cache groups, or windows: weights change with cleared caches only")
        if clear_cache:
            self.reset()
        self.change_weights(self.runner.weights + 1 if weights is None else weights)
        if not clear_cache:
            self.reset_connector()

    def change_weights(self, weights: int) -> None:
        """Install other weights between two steps without notifying the cache."""
        self.scheduler.keep_what_is_there()
        self.runner.change_weights(weights)

    def pause(self) -> None:
        """Admit no requests until `unpause`."""
        self.scheduler.paused = True

    def unpause(self) -> None:
        """Admit requests again."""
        self.scheduler.paused = False

    @property
    def has_work(self) -> bool:
        """Whether a request is alive or expected, a load is under way, or the cache needs another step."""
        pending = self.cache is not None and self.cache.has_pending_work
        return bool(self.scheduler.has_work or self._arrivals or pending or self.has_executed)

    @property
    def has_executed(self) -> bool:
        """Whether a step with requests was executed and its results are not applied yet."""
        return any(step[0].requests for step in self._executed)

    # Steps

    def step(self) -> list[Request]:
        """Schedule and execute one step and apply its results (with asynchronous scheduling: those of the step before);
        returns the requests that finished.

        Raises OracleViolation for a wrong read whose result would have counted, PactViolation for a broken contract.
        """
        self.clock.now += self.clock.seconds_per_step
        scheduler = self.scheduler
        while self._arrivals and self._arrivals[0][0] <= scheduler.step + 1:
            scheduler.add_request(heapq.heappop(self._arrivals)[2])
        output = scheduler.schedule()
        if self.cache is not None:
            self._tell_cache(self.cache, output)
        self._executed.append(self._execute(output))
        finished: list[Request] = []
        if len(self._executed) > self.quirks.async_scheduling:
            finished = self._process()
        return finished

    def run(self, requests: Iterable[Request] = (), max_steps: int = 10_000) -> dict[str, Request]:
        """Step until no work is left; returns all finished requests by id. Raises PactViolation after `max_steps`
        steps."""
        for request in requests:
            self.add_request(request)
        for _ in range(max_steps):
            if not self.has_work:
                return self.finished
            self.step()
        if self.has_work:
            alive = [*self.scheduler.requests.values()][:4]
            raise PactViolation(f"P11: after {max_steps} steps there is still work to do, for example {alive}")
        return self.finished

    def _tell_cache(self, cache: ExternalCache, output: SchedulerOutput) -> None:
        requests = {request.request_id: request for request in output.requests}
        if isinstance(self.context, OfferingContext):
            self.context.begin_step(output)
        starts, counts = (
            dict(zip(requests, output.starts, strict=True)),
            dict(zip(requests, output.counts, strict=True)),
        )
        same = [name for name, request in requests.items() if request.noted_as is request.identity]
        quiet = {*same}.difference(cache.note_running(same, [starts[name] for name in same], counts))
        if isinstance(self.context, OfferingContext):
            quiet.difference_update(self.context.requests_with_states)
        for name, request in requests.items():
            if name not in quiet:
                request.noted_as = request.identity
                cache.note_computed(request, starts[name] + counts[name], partial(_first_group, request))
        if isinstance(self.context, OfferingContext):
            self.context.end_step()
        output.work = cache.end_step()

    def _execute(self, output: SchedulerOutput) -> Executed:
        runner, workers = self.runner, self.workers
        zero = self.config.zero_new_blocks
        if zero and not self.quirks.zeroes_after_hook:
            runner.zero(output.new_block_ids)
        if workers:
            hits = agree_on_hits([worker.before_update_states(output) for worker in workers])
            output = apply_external_hits(output, hits)
            self.scheduler.spared_tokens += sum(output.external_hits.values())
        if zero and self.quirks.zeroes_after_hook:
            runner.zero(output.new_block_ids)
        runner.update_states(output)
        for worker in workers:
            worker.start_loads(output.work)
        for worker in workers:
            for layer in range(self.config.num_layers):
                worker.wait_for_layer_load(f"layer.{layer}")
        sampled = runner.execute(output)
        wrong_reads, runner.wrong_reads = runner.wrong_reads, []
        report = NO_REPORT
        for worker in workers:
            worker.start_saves(output.work)
        for worker in workers:
            report = report.aggregate(worker.report())
        return output, sampled, report, wrong_reads

    def _process(self) -> list[Request]:
        output, sampled, report, wrong_reads = self._executed.popleft()
        finished = self._processor.process(output, sampled, report)
        for request in finished:
            self.finished[request.request_id] = request
        if wrong_reads or self.runner.wrong_reads:
            self._judge(wrong_reads)
        return finished

    def _drain(self) -> None:
        while self._executed:
            self._process()

    # The oracle

    def _check_whole(self, request: Request) -> None:
        rows, ends = np.array([request.row]), np.array([request.num_computed_tokens])
        self.runner.check_rows(rows, ends - 1, ends)

    def _judge(self, wrong_reads: list[WrongRead]) -> None:
        """Raise or record wrong reads. One does not count if the report named its load as failed: its result is
        void."""
        wrong_reads += self.runner.wrong_reads
        self.runner.wrong_reads = []
        for wrong in wrong_reads:
            request = self.scheduler.requests.get(wrong.request_id)
            counts = wrong.request_id in self.finished if request is None else request.epoch == wrong.epoch
            if not counts:
                continue
            self.counts.wrong_reads += 1
            message = self.runner.explain(wrong)
            if self.config.on_violation == "raise":
                raise OracleViolation(message)
            self.recorded.append(message)

    # Invariants

    def check(self) -> None:
        """Verify queues, block pool and every published block on every rank; raises PactViolation or
        OracleViolation."""
        scheduler = self.scheduler
        references: Counter[int] = Counter(self.context.held)
        holders = {id(request): request for request in scheduler.requests.values()}
        holders.update({id(load.request): load.request for load in scheduler.loads.values()})
        for request in holders.values():
            for blocks in request.block_ids:
                references.update(block for block in blocks if block != NULL_BLOCK)
        scheduler.kv.pool.check(references)
        queued = [*scheduler.running, *scheduler.waiting]
        for request in scheduler.requests.values():
            places = queued.count(request) + (request.status == "waiting_for_load")
            if places != 1:
                raise PactViolation(f"{request} stands in {places} places instead of one")
            if request.status == "waiting_for_load" and request.request_id not in scheduler.loads:
                raise PactViolation(f"{request} waits for a load that is not under way")
        self._check_published()

    def _check_published(self) -> None:
        """P8: every published block is valid on all ranks."""
        runner, layout = self.runner, self.runner.layout
        truths: dict[int, tuple[Digests, Tokens]] = {}
        for group, published in enumerate(self.scheduler.kv.pool.published):
            for block_id in published.values():
                request, index = self.scheduler.kv.publishers[block_id]
                stored = runner.memory[:, layout.span(group, block_id)]
                if runner.carries_over:
                    expected = stored[0] - runner.masks[group][0]
                else:
                    if id(request) not in truths:
                        truths[id(request)] = runner.truth_of(request), np.array(request.token_ids, np.int64)
                    expected = layout.expected(group, index, *truths[id(request)])
                wrong = stored != expected + runner.masks[group][:, None]
                if wrong.any():
                    plane, offset = (int(index) for index in np.argwhere(wrong)[0])
                    rank, layer = divmod(plane, self.config.num_layers)
                    read = WrongRead(
                        request.request_id, request.row, 0, layout.first_token(group, index) + offset, block_id, group,
                        rank, layer, int(stored[plane, offset]),
                    )  # fmt: skip
                    raise OracleViolation(f"P8: a published block is not valid: {runner.explain(read)}")
        if runner.memory[:, : self.config.page_words].any():
            raise PactViolation("P4: the null block was written")

    def check_nothing_held(self) -> None:
        """P1 at rest: no request, no load, no reference, all blocks free. Raises PactViolation naming what is left."""
        left = [*self.scheduler.requests, *self.scheduler.loads]
        if left or self.context.held or self.scheduler.kv.pool.num_free != self.config.num_blocks - 1:
            raise PactViolation(
                f"P1: still held at rest: requests {left}, blocks held by the cache {dict(self.context.held)}, "
                f"{self.config.num_blocks - 1 - self.scheduler.kv.pool.num_free} blocks in all"
            )
        self.check()

    def shutdown(self) -> None:
        """Apply the results of executed steps, and shut down the cache and its workers."""
        self._drain()
        for worker in self.workers:
            worker.shutdown()
        if self.cache is not None:
            self.cache.shutdown()
