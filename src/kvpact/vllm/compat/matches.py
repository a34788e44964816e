"""Where kvpact's scheduler class uses internals of vLLM's: which form a connector has, and why a request still waits.

Written for 0.30 to 0.33; if a release moves any of this, only this module changes.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from kvpact.contract import ExternalMatchExit
from kvpact.vllm.compat.objects import connectors_of

BLOCKED = "WAITING_FOR_"
"""Beginning of the status of a request that waits for something else than its turn."""


def leaves_of(connector: Any) -> list[Any]:
    """The connectors that have matches of their own: all but MultiConnector."""
    return [each for each in connectors_of(connector) if not hasattr(each, "_connectors")]


def chosen_connector(connector: Any, request_id: str) -> Any:
    """The connector whose match the request got last: of those inside MultiConnector, None if it has not chosen."""
    children = getattr(connector, "_connectors", None)
    if children is None:
        return connector
    chosen = connector._requests_to_connector.get(request_id)
    return None if chosen is None else chosen_connector(children[chosen], request_id)


def commits_later(scheduler: Any, request_id: str) -> bool:
    """True if the request's load begins with the running step's output, as on 0.33."""
    return request_id in getattr(scheduler, "deferred_loads", ())


def load_fewer(scheduler: Any, request: Any, missing: int, *, nothing: bool) -> None:
    """Take `missing` tokens off an asynchronous load admitted in this step, by vLLM's own failed-load path."""
    request.num_computed_tokens -= missing
    scheduler.failed_recving_kv_req_ids.add(request.request_id)
    if nothing:
        scheduler.finished_recving_kv_req_ids.add(request.request_id)


def blocks_behind(scheduler: Any, request: Any, missing: int) -> set[int]:
    """The blocks of a request that this step admits, from the one on that has the first of its last `missing` computed
    tokens; of several KV cache groups all."""
    tables = scheduler.kv_cache_manager.get_block_ids(request.request_id)
    first = (request.num_computed_tokens - missing) // scheduler.block_size if len(tables) == 1 else 0
    return set(chain.from_iterable(table[first:] for table in tables))


def why_not_asked(scheduler: Any, output: Any, request: Any) -> ExternalMatchExit:
    """Why the step did not ask for a request that has a match: the gates before vLLM's lookup, in their order."""
    if scheduler.requests.get(request.request_id) is not request:
        return ExternalMatchExit.CANCELLED
    if output.preempted_req_ids:
        return ExternalMatchExit.PREEMPTION
    if is_paused(scheduler):
        return ExternalMatchExit.PAUSED
    if request.status.name.startswith(BLOCKED):
        return ExternalMatchExit.BLOCKED
    if _adapters_full(scheduler, output, request):
        return ExternalMatchExit.LORA_LIMIT
    most = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    if len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= most:
        return ExternalMatchExit.MAX_RUNNING
    if output.total_num_scheduled_tokens >= scheduler.max_num_scheduled_tokens:
        return ExternalMatchExit.BUDGET
    return ExternalMatchExit.NOT_REACHED


def is_paused(scheduler: Any) -> bool:
    """True if the scheduler starts no request."""
    return bool(scheduler._pause_state.name != "UNPAUSED")


def _adapters_full(scheduler: Any, output: Any, request: Any) -> bool:
    if not scheduler.lora_config or not request.lora_request:
        return False
    used = {
        running.lora_request.lora_int_id
        for running in scheduler.running
        if running.lora_request and running.request_id in output.num_scheduled_tokens
    }
    return request.lora_request.lora_int_id not in used and len(used) >= scheduler.lora_config.max_loras


def diffusion_scheduler(vllm_config: Any) -> Any:
    """vLLM's own scheduler class for diffusion models; None for other models, and where the release has none."""
    if getattr(vllm_config, "diffusion_config", None) is None:
        return None
    from vllm.v1.core.sched import diffusion_scheduler as module

    asynchronous = getattr(module, "DiffusionAsyncScheduler", None)
    if vllm_config.scheduler_config.async_scheduling and asynchronous is not None:
        return asynchronous
    return module.DiffusionScheduler
