"""The scheduler: decides which request computes which tokens, and calls the cache.

Owns the queues, the step's budget and the exits between a match and its commit. `output_processor.py` applies a step's
results; `quirks.py` lists how an engine may differ from the contract.
"""

from __future__ import annotations

from kvpact.contract import ExternalCache, ExternalKVMatch, ExternalMatchExit
from kvpact.errors import ConfigError
from kvpact_testkit.engine.admission import Admission, Load, obstacle, rewritten, too_many_adapters
from kvpact_testkit.engine.commits import Commits
from kvpact_testkit.engine.config import EngineConfig
from kvpact_testkit.engine.counts import EngineCounts
from kvpact_testkit.engine.kv_cache import KVCacheManager, LocalHit
from kvpact_testkit.engine.open_matches import OpenMatches
from kvpact_testkit.engine.output import SchedulerOutput
from kvpact_testkit.engine.queues import Queues
from kvpact_testkit.engine.quirks import EngineQuirks
from kvpact_testkit.engine.request import Request, RequestStatus


class Scheduler:
    """One engine's queues over one block table. With `cache` None there is no external cache and no cost for one."""

    def __init__(
        self, config: EngineConfig, quirks: EngineQuirks, cache: ExternalCache | None, counts: EngineCounts
    ) -> None:
        self.config = config
        self.quirks = quirks
        self.cache = cache
        self.counts = counts
        self.kv = KVCacheManager(config)
        self.step = 0
        self.paused = False
        self.spared_tokens = 0
        """Tokens that were scheduled since the last `schedule` and not computed, as workers supplied them."""
        self.requests: dict[str, Request] = {}
        self.queues = Queues(by_priority=config.policy == "priority")
        self.running = self.queues.running
        self.waiting = self.queues.waiting
        self.matches = OpenMatches(cache, counts, self.kv, is_silent=quirks.silent_aborts)
        self.commits = Commits(cache, quirks, counts, self.matches, shortens=self.kv.reads_all)
        self.loads = self.commits.loads
        self._released_rows: list[int] = []
        self._aligns = self.kv.has_states and config.chunked_prefill
        self._encoder_budget = 0

    # Requests

    def add_request(self, request: Request) -> None:
        """Queue a request. Raises ConfigError if it could never run here, or if its id is in use."""
        self.config.check_fits(request.request_id, request.stop_at, self.quirks.keeps_free_blocks)
        if request.request_id in self.requests or request.request_id in self.loads:
            raise ConfigError(f"request id {request.request_id} is still in use")
        self.requests[request.request_id] = request
        self.queues.add(request)
        if self.cache is not None:
            self.cache.on_new_request(request)

    def cancel(self, request_id: str) -> bool:
        """End a request in any state; returns False if it has ended already."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self.end(request, RequestStatus.CANCELLED)
        self.counts.cancelled += 1
        return True

    def end(self, request: Request, status: RequestStatus) -> None:
        """Remove the request from its queue and free its blocks, unless a load still writes to them."""
        self.queues.remove(request)
        was, request.status = request.status, status
        self.release_row(request)
        self.matches.drop(request, ExternalMatchExit.CANCELLED)
        if self.cache is not None:
            self.cache.request_finished(request.request_id)  # which can still see and hold its blocks
        del self.requests[request.request_id]
        request.epoch += 1
        self.commits.void(request)
        if was is RequestStatus.RUNNING or request.request_id not in self.loads:
            self.kv.free(request)

    def reset(self) -> None:
        """Preempt all requests; nothing in their blocks counts as computed. Loads under way become void.

        Raises RuntimeError, as some releases do, if `reset_refuses_loading` and an asynchronous load is under way.
        """
        loading = [load.request.request_id for load in self.loads.values() if load.asynchronous]
        if loading and self.quirks.reset_refuses_loading:
            raise RuntimeError(f"cannot reset the prefix cache: requests {loading} wait for a load")
        for request in reversed(self.running):
            self.preempt(request)
        self.running.clear()
        for request in self.waiting:
            self.kv.free(request)
            request.rewind(0)
        self.matches.drop_all(ExternalMatchExit.RESET)
        for load in self.loads.values():
            load.void = True

    def keep_what_is_there(self) -> None:
        """Before a change of weights: requests keep what is in their blocks and what is being loaded.

        What arrived after a failed block is computed again: the failed block is computed by other weights.
        """
        for request in self.requests.values():
            request.loaded_ahead = []
            request.num_own_tokens = request.num_computed_tokens + request.num_inflight_external_tokens
        for load in self.loads.values():
            load.spans_update = True

    @property
    def has_work(self) -> bool:
        """Whether a further step can have any effect."""
        return bool(self.requests or self.loads)

    def release_row(self, request: Request) -> None:
        """Release the request's row on the ranks with the next step."""
        if request.row >= 0:
            self._released_rows.append(request.row)
            request.row = -1

    def preempt(self, request: Request) -> None:
        """Free a running request's blocks; it restarts from its first token. The caller removes it from `running`."""
        self.commits.void(request)
        request.rewind(0)
        self.release_row(request)
        self.kv.free(request)
        self.queues.resume(request, RequestStatus.PREEMPTED)
        self.counts.preemptions += 1

    # One step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step. The caller calls `cache.end_step`."""
        self.step += 1
        self.counts.steps += 1
        output = SchedulerOutput(self.step)
        budget = self._schedule_running(output, self._step_budget())
        left = ExternalMatchExit.PAUSED if self.paused else ExternalMatchExit.PREEMPTION
        if not output.preempted and not self.paused:
            left = self._schedule_waiting(output, budget)
        self.matches.end_step(left, self.loads)
        if self._released_rows:
            output.released_rows, self._released_rows = self._released_rows, []
        if self.quirks.publishes_when_scheduled:
            for request in output.requests:
                if request.num_scheduled_tokens >= request.publish_at:
                    self.kv.publish(request, min(request.num_scheduled_tokens, len(request.token_ids)))
        return output

    def _step_budget(self) -> int:
        """Tokens of this step, with those that an earlier one's hits spared and the ranks can take."""
        given_back = min(self.spared_tokens, self.config.max_tokens_of_ranks - self.config.max_tokens_per_step)
        self.counts.given_back += given_back
        self.spared_tokens = 0
        return self.config.max_tokens_per_step + given_back

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        running = self.running
        requests, starts, counts, epochs = output.requests, output.starts, output.counts, output.epochs
        index = 0
        while index < len(running):
            request = running[index]
            start = request.num_scheduled_tokens
            tokens = request.num_expected_tokens - start
            if request.loaded_ahead:
                tokens, skipped = request.up_to_loaded(tokens)
                self.counts.external_hits += skipped
                start = request.num_scheduled_tokens
            if tokens > budget:
                tokens = budget
            if tokens <= 0:
                index += 1
                continue
            if tokens > 1 and self._aligns:
                tokens = self.kv.aligned(start, tokens, len(request.token_ids))
            if self.config.draft_tokens and start >= len(request.token_ids) - 1 and not request.loaded_ahead:
                tokens += max(0, min(self.config.draft_tokens, budget - 1, request.stop_at - 2 - start))
            end = start + tokens
            if end > request.capacity:
                budget += self._make_room(request, end, output)
                if request.status is not RequestStatus.RUNNING:
                    break
                index = running.index(request) if output.preempted else index
                output.grown.append((request, start))
            requests.append(request)  # `output.add`, spelled out: this is the hottest line of the engine
            starts.append(start)
            counts.append(tokens)
            epochs.append(request.epoch)
            budget -= tokens
            request.num_scheduled_tokens = end
            if request.num_expected_tokens <= end < request.stop_at - 1:
                request.num_expected_tokens = end + 1
            index += 1
        return budget

    def _make_room(self, request: Request, num_tokens: int, output: SchedulerOutput) -> int:
        """Grow the request, preempting the least important running requests, possibly itself; returns budget freed."""
        given_back = 0
        while (new := self.kv.grow(request, request.num_scheduled_tokens, num_tokens)) is None:
            victim = self.queues.least_important()
            if victim is request and self._reclaim(request):
                continue
            self.running.remove(victim)
            given_back += output.remove(victim)
            output.grown = [entry for entry in output.grown if entry[0] is not victim]
            self.preempt(victim)
            output.preempted.append(victim)
            if victim is request:
                break
        output.new_block_ids += new or ()
        return given_back

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> ExternalMatchExit:
        """Returns why requests that are left in the queue were not looked at."""
        self._encoder_budget = self.quirks.encoder_tokens_per_step or 0
        position = 0
        while position < len(self.waiting):
            if budget <= 0 or len(self.running) >= self.config.max_running:
                return ExternalMatchExit.BUDGET if budget <= 0 else ExternalMatchExit.MAX_RUNNING
            request = self.waiting[position]
            verdict = self._admit(request, output, budget)
            if verdict is Admission.BLOCKED:
                break
            if verdict is Admission.SKIPPED:
                position += 1
                continue
            self.waiting.remove(request)
            if request.status is RequestStatus.RUNNING:
                budget -= output.counts[-1]
        return ExternalMatchExit.NOT_REACHED

    def _gate(self, request: Request) -> ExternalMatchExit | None:
        """Why the request is passed over without a look at its prefix."""
        if request.ready_step > self.step or self.commits.is_loading(request):
            return ExternalMatchExit.BLOCKED
        too_many = too_many_adapters(self.running, self.config.max_adapters, request)
        return ExternalMatchExit.LORA_LIMIT if too_many else None

    # One admission, from the match to the commit

    def _admit(self, request: Request, output: SchedulerOutput, budget: int) -> Admission:
        if (gate := self._gate(request)) is not None:
            self.matches.postpone(request, gate)
            return Admission.SKIPPED
        if request.block_ids:  # back from an asynchronous load
            return self._admit_loaded(request, output, budget)
        hit = self.kv.find_hit(request)
        local = hit.num_tokens
        match = self._probe(request, local)
        if match is None:
            return Admission.SKIPPED
        hit, external = rewritten(self.quirks, request, hit, match, shortens=self.kv.reads_all)
        local, asynchronous = hit.num_tokens, match.load_kv_async and external > 0
        known = len(request.token_ids)
        if request.encoder_ready_step > self.step:
            return self._decline(request, match, ExternalMatchExit.ENCODER, Admission.SKIPPED)
        tokens = 0
        if not asynchronous:
            tokens = self._part(local + external, known, budget)
            needs = known - local - external, request.encoder_tokens
            reason = obstacle(
                self.quirks, self.step, needs, (budget, self._encoder_budget), self.config.chunked_prefill
            )
            if reason is not None:
                skip = reason is ExternalMatchExit.ENCODER and self.quirks.skips_over_encoder
                return self._decline(request, match, reason, Admission.SKIPPED if skip else Admission.BLOCKED)
        new = self._allocate(request, hit, local + external + tokens, external)
        if new is None:
            return self._decline(request, match, ExternalMatchExit.NO_BLOCKS, Admission.BLOCKED)
        self._encoder_budget -= request.encoder_tokens
        taken = self.commits.commit(match, Load(request, local, external, asynchronous))
        if taken < external and not asynchronous:
            tokens = self._part(local + taken, known, budget)
        request.num_computed_tokens = local
        request.num_inflight_external_tokens = taken
        if asynchronous and taken:
            self._note_local_hit(request, local)
            output.new_block_ids += new
            request.num_scheduled_tokens = local
            request.status = RequestStatus.WAITING_FOR_LOAD
            return Admission.ADMITTED
        if asynchronous:
            tokens = min(self._part(local, known, budget), request.capacity - local)
        more: list[int] | None = []
        if taken < external:
            self.kv.note_rewound(request, local + taken)
            more = self.kv.grow(request, local + taken, local + taken + tokens)
        if more is None:  # no blocks to compute what was to be loaded
            self.kv.free(request)
            request.rewind(0)
            return Admission.BLOCKED
        self._note_local_hit(request, local)
        output.new_block_ids += new + more
        if self.quirks.trusts_sync_loads:
            request.num_computed_tokens = local + taken
            request.num_inflight_external_tokens = 0
        self._run(request, output, local + taken, tokens)
        return Admission.ADMITTED

    def _note_local_hit(self, request: Request, tokens: int) -> None:
        self.counts.local_hits += tokens
        request.note_hit(0, tokens)

    def _admit_loaded(self, request: Request, output: SchedulerOutput, budget: int) -> Admission:
        tokens = len(request.token_ids) - request.num_scheduled_tokens
        if request.loaded_ahead:
            tokens, skipped = request.up_to_loaded(tokens)
            self.counts.external_hits += skipped
        if not self.config.chunked_prefill and tokens > budget:
            return Admission.BLOCKED
        start = request.num_scheduled_tokens
        tokens = self._part(start, start + tokens, budget)
        keep_free = self.quirks.keeps_free_blocks if self.running else 0
        while (new := self.kv.grow(request, start, start + tokens, keep_free)) is None:
            if not self._reclaim(request):
                return Admission.BLOCKED
        output.new_block_ids += new
        self._run(request, output, start, tokens)
        return Admission.ADMITTED

    def _part(self, start: int, known: int, budget: int) -> int:
        """How many of a prompt's tokens from `start` on one step computes."""
        tokens = min(known - start, budget)
        return self.kv.aligned(start, tokens, known) if self._aligns else tokens

    def _run(self, request: Request, output: SchedulerOutput, start: int, tokens: int) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        output.started.append(request)
        output.add(request, start, tokens)
        request.num_scheduled_tokens = start + tokens
        if start + tokens == request.num_expected_tokens < request.stop_at - 1:
            request.num_expected_tokens += 1

    def _probe(self, request: Request, local: int) -> ExternalKVMatch | None:
        if not (request.may_load or self.quirks.probes_unwilling_requests):
            return ExternalKVMatch(0)
        return self.matches.prepare(request, local)

    def _allocate(self, request: Request, hit: LocalHit, end: int, external: int) -> list[int] | None:
        keep_free = self.quirks.keeps_free_blocks if self.running else 0
        if self.quirks.admits_only_whole_prompts:
            keep_free += self.config.blocks_for(len(request.token_ids)) - self.config.blocks_for(end)
        follows = self.quirks.windows_follow_loads
        while (new := self.kv.admit(request, hit, end, external, keep_free, follows_load=follows)) is None:
            if not self._reclaim(request):
                return None
        return new

    def _reclaim(self, wanting: Request) -> bool:
        """If no other request runs, free the loaded blocks of a queued request, so that no request waits forever."""
        holder = self.queues.last_holder(wanting)
        if holder is None:
            return False
        self.kv.free(holder)
        holder.rewind(0)
        return True

    def commit_late(self) -> None:
        """Make the delayed commits; a request whose load has become void waits anew."""
        for request in self.commits.commit_late():
            self.kv.free(request)
            if not request.has_ended:
                request.rewind(0)
                self.queues.resume(request)

    def _decline(
        self, request: Request, match: ExternalKVMatch, reason: ExternalMatchExit, verdict: Admission
    ) -> Admission:
        """Count the reason why the request is not admitted; its match may be prepared again."""
        if match.num_tokens:
            self.counts.declined[reason] += 1
            self.matches.postpone(request, reason)
        return verdict
