"""`--scheduler-cls kvpact.vllm.scheduler.pact_scheduler`: vLLM's own scheduler, speaking the pact with its connector.

A match that a step does not take is said to the connector, with the reason, in that step; a smaller commit is
honoured; and `vllm:external_prefix_cache_hits` counts only tokens that were not computed. Without these classes all
works as well, but aborts are inferred from silence. Owns no decision: every method does what vLLM's own does, and notes
what it sees. Connectors without the pact see nothing new.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvpact.contract import ExternalMatchExit
from kvpact.vllm.compat.matches import diffusion_scheduler, step_hits
from kvpact.vllm.compat.objects import set_hit_sources
from kvpact.vllm.compat.restarts import Restarts
from kvpact.vllm.exits import EngineExits


class _CountsWhatWasUsed:
    """Adds a connector's `take_hit_corrections() -> (tokens, tokens after a preemption)` to the statistics.

    A load's tokens are subtracted in the step that admits it and added again as they are used, so that no step's count
    is negative.
    """

    connector: Any

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of a step, corrected."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        take = getattr(self.connector, "take_hit_corrections", None)
        if take is not None and stats is not None and stats.connector_prefix_cache_stats is not None:
            counted = stats.connector_prefix_cache_stats
            hits, again = take()
            counted.hits += hits
            counted.preempted_hits += again
            set_hit_sources(counted, partial(self.connector.get_external_cache_hit_sources, None))
        return stats


class _BeginsAgain(_CountsWhatWasUsed):
    """Begins requests again whose steps relied on blocks that were not loaded, for a connector that takes part."""

    restarts: Restarts | None = None

    def _update_after_schedule(self, *args: Any, **kwargs: Any) -> None:
        super()._update_after_schedule(*args, **kwargs)  # type: ignore[misc]
        if self.restarts is not None:
            self.restarts.step_begins()

    def _free_request_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self.restarts is not None:
            self.restarts.note_left(request.request_id)
        return super()._free_request_blocks(request, *args, **kwargs)  # type: ignore[misc]

    def _handle_invalid_blocks(self, invalid_block_ids: Any, *args: Any, **kwargs: Any) -> Any:
        again = self.restarts.begin_again(invalid_block_ids) if self.restarts is not None else set()
        if self.restarts is not None and self.restarts.several:
            return again
        return again | super()._handle_invalid_blocks(invalid_block_ids, *args, **kwargs)  # type: ignore[misc]


class _SpeaksThePact(_BeginsAgain):
    """vLLM's scheduler with `EngineExits`, which is None where no connector speaks the pact."""

    exits: EngineExits | None = None
    max_num_scheduled_tokens: int
    _step_hits = 0
    _spare_room = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector is not None:
            exits = EngineExits(self)
            self.exits = exits if exits.trackers else None
            self.restarts = Restarts(self)
            room: int = self.scheduler_config.max_num_batched_tokens  # type: ignore[attr-defined]
            self._spare_room = max(0, room - self.max_num_scheduled_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Decide the next step."""
        if self.exits is not None:
            self.exits.throttled = True in args or True in kwargs.values()
        if self._spare_room:
            return self._schedule_more(*args, **kwargs)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _schedule_more(self, *args: Any, **kwargs: Any) -> Any:
        """Tokens that the last step did not compute may be more tokens in this one, as far as workers have room: where
        `--max-num-scheduled-tokens` is lower than `--max-num-batched-tokens`."""
        usual, found = self.max_num_scheduled_tokens, step_hits(self.connector)
        spared, self._step_hits = found - self._step_hits, found
        self.max_num_scheduled_tokens = usual + min(spared, self._spare_room)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = usual

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        if self.exits is not None:
            self.exits.end_step(scheduler_output)
        return super()._build_kv_connector_meta(connector, scheduler_output)  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Take in what the workers did. Releases from 0.33 on may commit loads here."""
        results = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if self.restarts is not None:
            self.restarts.step_ends()
        if self.exits is not None:
            self.exits.apply_shortfalls()
        return results

    def _try_schedule_encoder_inputs(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = super()._try_schedule_encoder_inputs(request, *args, **kwargs)  # type: ignore[misc]
        if self.exits is not None and found[1] == 0:
            self.exits.note(request, ExternalMatchExit.ENCODER)
        return found

    def _ec_transfer_pending(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        pending = super()._ec_transfer_pending(request, *args, **kwargs)  # type: ignore[misc]
        if pending and self.exits is not None:
            self.exits.note(request, ExternalMatchExit.ENCODER)
        return pending

    def finish_requests(self, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """End requests from outside."""
        if self.exits is not None:
            request_ids = request_ids if request_ids is None or isinstance(request_ids, str) else [*request_ids]
            self.exits.finish(request_ids)
        return super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Drop what vLLM holds published."""
        if self.exits is not None:
            self.exits.reset()
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def set_pause_state(self, *args: Any, **kwargs: Any) -> Any:
        """Pause or go on."""
        result = super().set_pause_state(*args, **kwargs)  # type: ignore[misc]
        if self.exits is not None:
            self.exits.pause_changed()
        return result


class KvpactScheduler(_SpeaksThePact, Scheduler):
    """For engines without asynchronous scheduling, as on CPUs."""


class KvpactAsyncScheduler(_SpeaksThePact, AsyncScheduler):
    """For engines with asynchronous scheduling, which is vLLM's default on GPUs."""


def pact_scheduler(*args: Any, vllm_config: Any, **kwargs: Any) -> Any:
    """The scheduler for an engine's configuration: of the two above, or vLLM's own for diffusion models."""
    own = diffusion_scheduler(vllm_config)
    chosen = own or (KvpactAsyncScheduler if vllm_config.scheduler_config.async_scheduling else KvpactScheduler)
    return chosen(*args, vllm_config=vllm_config, **kwargs)


__all__ = ["KvpactAsyncScheduler", "KvpactScheduler", "pact_scheduler"]
