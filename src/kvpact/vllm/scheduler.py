"""`--scheduler-cls kvpact.vllm.scheduler.pact_scheduler`: vLLM's own scheduler, speaking the pact with its connector.

A match that a step does not take is reported to the connector, with the reason, in that step; a smaller commit is
honoured; and `vllm:external_prefix_cache_hits` counts only tokens that were not computed. Without these classes all
works as well, but aborts are inferred from silence. Owns no decision: every method does what vLLM's own does, and notes
what it sees. Connectors without the pact see nothing new.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.contract import ExternalMatchExit
from kvpact.vllm.compat.matches import diffusion_scheduler
from kvpact.vllm.compat.objects import add_invalid_blocks, connectors_of, correct_hit_sources, invalid_blocks
from kvpact.vllm.compat.releases import refuse_older
from kvpact.vllm.compat.restarts import Restarts
from kvpact.vllm.exits import EngineExits
from kvpact.vllm.hit_accounting import StepHits
from kvpact.vllm.resets import Resets
from kvpact.vllm.step_hook import split_report


class _SpeaksThePact:
    """vLLM's scheduler with the ends of matches, and requests that begin again: both do nothing for other connectors.

    To the statistics it adds `take_hit_corrections() -> (tokens, tokens after a preemption, tokens by source)` of
    kvpact's connector: a load's tokens are subtracted in the step that admits it and added again as they are used, so
    that no step's count is negative.
    """

    connector: Any
    requests: Any
    connector_prefix_cache_stats: Any
    max_num_scheduled_tokens: int
    _spared = 0
    """Tokens that steps skipped since the last `schedule`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step_hits = StepHits()
        self.exits = EngineExits(self)
        self.restarts = Restarts(self)
        self.resets = Resets(self, self.exits)
        for each in connectors_of(self.connector):
            if (bound := getattr(each, "pact_scheduler_bound", None)) is not None:
                bound()
        room: int = self.scheduler_config.max_num_batched_tokens  # type: ignore[attr-defined]
        self._spare_room = max(0, room - self.max_num_scheduled_tokens)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of a step, corrected."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        take = getattr(self.connector, "take_hit_corrections", None)
        if take is not None and stats is not None and stats.connector_prefix_cache_stats is not None:
            counted = stats.connector_prefix_cache_stats
            hits, again, sources = take()
            counted.hits += hits
            counted.preempted_hits += again
            correct_hit_sources(counted, sources)
        return stats

    def _update_after_schedule(self, *args: Any, **kwargs: Any) -> None:
        super()._update_after_schedule(*args, **kwargs)  # type: ignore[misc]
        self.restarts.step_begins()

    def _free_request_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.restarts.note_left(request.request_id)
        return super()._free_request_blocks(request, *args, **kwargs)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Decide the next step."""
        self.exits.throttled = True in args or True in kwargs.values()
        if self._spare_room:
            return self._schedule_more(*args, **kwargs)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _schedule_more(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens that the last step did not compute may be more tokens in this one, as far as workers have room: where
        `--max-num-scheduled-tokens` is lower than `--max-num-batched-tokens`."""
        usual = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = usual + min(self._spared, self._spare_room)
        self._spared = 0
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = usual

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        self._step_hits.scheduled(scheduler_output, self.requests)
        self.exits.end_step(scheduler_output)
        return super()._build_kv_connector_meta(connector, scheduler_output)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in the step's output; first the tokens skipped, as a request's statistics leave with its first answer.

        Releases from 0.33 on may commit loads here.
        """
        self.restarts.refused = self.exits.refused_in(scheduler_output)
        if self.restarts.refused:
            add_invalid_blocks(model_runner_output, self.restarts.refused)
        hits = split_report(model_runner_output)
        self._spared += sum(hits.values())
        counted = self.connector_prefix_cache_stats
        connector = self.connector
        self._count_hits = partial(self._step_hits.count, scheduler_output, hits, counted, connector)
        if not invalid_blocks(model_runner_output):
            self._count_hits()
        results = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.restarts.step_ends()
        self.exits.step_ended(scheduler_output)
        self.resets.step_ended()
        return results

    def _handle_invalid_blocks(self, invalid_block_ids: Any, *args: Any, **kwargs: Any) -> Any:
        again = self.restarts.begin_again(invalid_block_ids)
        if not self.restarts.several:
            again |= super()._handle_invalid_blocks(invalid_block_ids, *args, **kwargs)  # type: ignore[misc]
        self._step_hits.begin_again(again)
        self._count_hits()
        return again

    def _try_schedule_encoder_inputs(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._try_schedule_encoder_inputs(request, *args, **kwargs)  # type: ignore[misc]
        if found[1] == 0:
            self.exits.note(request, ExternalMatchExit.ENCODER)
        return found

    def _ec_transfer_pending(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        pending = super()._ec_transfer_pending(request, *args, **kwargs)  # type: ignore[misc]
        if pending:
            self.exits.note(request, ExternalMatchExit.ENCODER)
        return pending

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside."""
        request_ids = request_ids if request_ids is None or isinstance(request_ids, str) else [*request_ids]
        self.exits.finish(request_ids)
        return super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> Any:
        """Empty vLLM's prefix cache; see `Resets`."""
        reset = partial(super().reset_prefix_cache, reset_running_requests, reset_connector)  # type: ignore[misc]
        return self.resets.reset(reset, by_force=reset_running_requests, forget=reset_connector)

    def has_requests(self) -> bool:
        """True if the engine must step: also while a reset waits."""
        return super().has_requests() or self.resets.waits  # type: ignore[misc]

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """The engine ends, for whatever reason."""
        self.exits.finish(None)
        return super().shutdown(*args, **kwargs)  # type: ignore[misc]

    def set_pause_state(self, *args: Any, **kwargs: Any) -> Any:
        """Pause or go on."""
        result = super().set_pause_state(*args, **kwargs)  # type: ignore[misc]
        self.exits.pause_changed()
        return result


class KvpactScheduler(_SpeaksThePact, Scheduler):
    """For engines without asynchronous scheduling, as on CPUs."""


class KvpactAsyncScheduler(_SpeaksThePact, AsyncScheduler):
    """For engines with asynchronous scheduling, which is vLLM's default on GPUs."""


def _class_for(vllm_config: Any) -> Any:
    own = diffusion_scheduler(vllm_config)
    return own or (KvpactAsyncScheduler if vllm_config.scheduler_config.async_scheduling else KvpactScheduler)


def pact_scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:
    """The scheduler for an engine's configuration: of the two above, or vLLM's own for diffusion models.

    Raises ConfigError on a release that is too old.
    """
    refuse_older(str(vllm.__version__))
    return _class_for(vllm_config)(*args, vllm_config=vllm_config, **kwargs)


def counts_step_hits(vllm_config: Any) -> bool:
    """True if the engine's scheduler counts what workers had when a step began: it is of a class of this module."""
    named = vllm_config.scheduler_config.get_scheduler_cls()
    chosen = _class_for(vllm_config) if named is pact_scheduler else named
    return isinstance(chosen, type) and issubclass(chosen, _SpeaksThePact)
