"""Hooks of the connector that a `kvpact.events.timeline` follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpact.contract import ExternalKVMatch
from kvpact.events.timeline import Timeline
from kvpact.vllm.messages import PactMetadata


def follow_hooks(timeline: Timeline, connector: object, *, of_scheduler: bool) -> None:
    """Follow one half's hooks: of the scheduler's "look-up", "admission" and "order", with which a step's scheduling
    ends; of a worker's those "before" and "after" a forward pass."""
    if of_scheduler:
        timeline.follow(connector, "get_num_new_matched_tokens", "look-up", _found)
        timeline.follow(connector, "update_state_after_alloc", "admission", _admitted)
        timeline.follow(connector, "prepare_external_match", "look-up", _prepared)
        timeline.follow(connector, "commit_external_match", "admission", _committed)
        timeline.follow(connector, "build_connector_meta", "order", _ordered)
    else:
        timeline.follow(connector, "start_load_kv", "before", lambda *_: {})
        timeline.follow(connector, "wait_for_save", "after", lambda *_: {})


def _found(found: tuple[int | None, bool], request: Any, computed: int) -> Mapping[str, object]:
    return {"request": request.request_id, "tokens": found[0], "computed": computed}


def _admitted(_: None, request: Any, blocks: Any, tokens: int) -> Mapping[str, object]:
    return {"request": request.request_id, "tokens": tokens}


def _prepared(match: ExternalKVMatch | None, request: Any, computed: int) -> Mapping[str, object]:
    return {"request": request.request_id, "tokens": match and match.num_tokens, "computed": computed}


def _committed(taken: int, request: Any, *_: Any) -> Mapping[str, object]:
    return {"request": request.request_id, "tokens": taken}


def _ordered(metadata: PactMetadata, output: Any) -> Mapping[str, object] | None:
    """Loads ordered, as (request, blocks, whether the step waits), and requests that a step computes first."""
    loads = [(job.request_id, len(job.slots), job.synchronous) for job in metadata.message().work.loads]
    first = [new.req_id for new in output.scheduled_new_reqs]
    return {"loads": loads, "admits": first} if loads or first else None
