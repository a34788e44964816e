"""`before_update_states` on stock vLLM: which requests it may serve, how ranks agree, what that does to the step.

Owns the hook's rules for vLLM's own scheduler output, for any connector that has the hook. Never edits that output:
with one process it is the scheduler's own object, and a preempted request whose numbers were edited is never scheduled
again (H90). `kvpact.vllm.worker` calls this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvpact.errors import PactViolation
from kvpact.vllm.compat.objects import collects_outputs, connectors_inside, replays

logger = logging.getLogger(__name__)

Hits: TypeAlias = Mapping[str, int]
"""Request id -> tokens, counted from the first one that the step is to compute of the request."""

Minimum: TypeAlias = Callable[[Sequence[int]], Sequence[int]]
"""The smallest of each number over all ranks. A collective: every rank calls it, with equally many numbers."""


class StepHookConnector(Protocol):
    """A connector that supplies tokens when the step begins, on the worker.

    Three more members are used if they are there. `external_hits_applied(hits)`: what the step will really skip,
    perhaps nothing, on every rank; the connector loads it in this step's `start_load_kv`. Without this member the
    connector loads what it returned. An exception from it ends the engine, because other ranks skip these tokens
    already. `hits_agree_over_ranks`, a bool: every rank always finds the same, so no collective is needed.
    `step_hook_bound()`: called once at start, when it is certain that the hook will be called.
    """

    def before_update_states(self, scheduler_output: Any) -> Hits:
        """Before the model runner takes in the step: the tokens of each request that this rank can load.

        Nothing may be written into the engine's blocks yet: the state update zeroes new ones (H93).
        """


class Candidates:
    """Requests of a step that may be served; equal on all ranks, because all see the same steps.

    Never served: requests with media, prompt embeddings or prompt log-probabilities, pooling, and those that are to
    read no cache: all need the forward pass of every token. Not served in a step: requests with speculative tokens,
    and those with one token to compute. With `new_requests_only`, nor are running requests: vLLM's second model runner
    keeps their position on the device and does not read a change.
    """

    def __init__(self, *, new_requests_only: bool) -> None:
        self._new_requests_only = new_requests_only
        self._left_out: set[str] = set()

    def of_step(self, scheduler_output: Any) -> dict[str, int]:
        """Request id -> the largest number of tokens that can be skipped. Call it once for every step."""
        self._left_out -= scheduler_output.finished_req_ids
        for new in scheduler_output.scheduled_new_reqs:
            if _needs_every_token(new):
                self._left_out.add(new.req_id)
            else:
                self._left_out.discard(new.req_id)
        if collects_outputs(scheduler_output):
            return {}
        requests = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        if not self._new_requests_only:
            requests += scheduler_output.scheduled_cached_reqs.req_ids
        left_out = self._left_out.union(
            scheduler_output.scheduled_spec_decode_tokens, scheduler_output.scheduled_encoder_inputs
        )
        counts = scheduler_output.num_scheduled_tokens
        return {name: counts[name] - 1 for name in requests if counts[name] > 1 and name not in left_out}


def _needs_every_token(new: Any) -> bool:
    sampling = new.sampling_params
    return bool(
        new.mm_features
        or new.prompt_embeds is not None
        or new.pooling_params is not None
        or replays(new)
        or (sampling is not None and (sampling.prompt_logprobs is not None or sampling.skip_reading_prefix_cache))
    )


def apply_external_hits(scheduler_output: Any, hits: Hits) -> Any:
    """The step without the tokens in `hits`; `scheduler_output` is not changed, and is returned if there are no hits.

    Raises PactViolation if a request is not computed in this step, or if less than one token of it would be left.
    """
    if not hits:
        return scheduler_output
    counts = scheduler_output.num_scheduled_tokens
    for name, hit in hits.items():
        if not 0 < hit < counts.get(name, 0):
            raise PactViolation(f"{hit} tokens of {name} are to be skipped; the step computes {counts.get(name, 0)}")
    cached = scheduler_output.scheduled_cached_reqs
    if not hits.keys().isdisjoint(cached.req_ids):
        starts = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        known = zip(cached.req_ids, cached.new_token_ids, strict=False)  # none but for stages before the last one
        cached = replace(
            cached,
            num_computed_tokens=[start + hits.get(name, 0) for name, start in starts],
            new_token_ids=[tokens[hits.get(name, 0) :] for name, tokens in known],
        )
    changes: dict[str, Any] = {
        "scheduled_new_reqs": [
            replace(new, num_computed_tokens=new.num_computed_tokens + hits[new.req_id]) if new.req_id in hits else new
            for new in scheduler_output.scheduled_new_reqs
        ],
        "scheduled_cached_reqs": cached,
        "num_scheduled_tokens": {name: count - hits.get(name, 0) for name, count in counts.items()},
        "total_num_scheduled_tokens": scheduler_output.total_num_scheduled_tokens - sum(hits.values()),
    }
    # vLLM calls `start_load_kv` before the forward pass only for a step that waits for a load.
    return replace(scheduler_output, **changes, has_sync_kv_loads=True)


@dataclass
class ReportWithHits(KVConnectorWorkerMetadata):
    """A connector's report to the scheduler's process, and the tokens that the step skipped: the same on every rank."""

    report: Any
    """The connector's own report; None without one."""
    hits: Hits

    def aggregate(self, other: Any) -> ReportWithHits:
        """The ranks' own reports, combined as vLLM combines them."""
        if self.report is None:
            return ReportWithHits(other.report, self.hits)
        return ReportWithHits(self.report.aggregate(other.report), self.hits) if other.report else self


def split_report(model_output: Any) -> Hits:
    """Tokens that the step skipped on all ranks; the connector's own report is left in the model runners' output."""
    connector_output = model_output.kv_connector_output
    both = connector_output.kv_connector_worker_meta if connector_output else None
    if not isinstance(both, ReportWithHits):
        return {}
    connector_output.kv_connector_worker_meta = both.report or None
    return both.hits


class ConnectorHook:
    """The hook of one connector. A mistake in its answer costs its hits, never the engine (H13)."""

    def __init__(self, connector: StepHookConnector) -> None:
        self._connector = connector
        self.agrees_over_ranks = bool(getattr(connector, "hits_agree_over_ranks", False))
        self._applied: Callable[[Hits], None] | None = getattr(connector, "external_hits_applied", None)
        self._failed = False

    def bound(self) -> list[str]:
        """Tell the connector that it will be asked; returns its name."""
        tell = getattr(self._connector, "step_hook_bound", None)
        if tell is not None:
            tell()
        return [type(self._connector).__name__]

    def ask(self, scheduler_output: Any) -> Hits:
        """The tokens that the connector can supply in this step."""
        try:
            return {str(name): int(hit) for name, hit in self._connector.before_update_states(scheduler_output).items()}
        except Exception:
            if not self._failed:
                logger.exception("kvpact: before_update_states failed; such steps are computed whole (logged once)")
            self._failed = True
            return {}

    def applied(self, hits: Hits) -> None:
        """Pass on the tokens that the step skips."""
        if self._applied is not None:
            self._applied(hits)


class HooksInside:
    """The hooks of the connectors inside a MultiConnector, each asked with metadata of its own.

    The first connector that has tokens for a request supplies them. Another may do so on another rank: each can supply
    the minimum.
    """

    def __init__(self, hooks: Mapping[int, ConnectorHook | HooksInside]) -> None:
        self._hooks = hooks
        self.agrees_over_ranks: bool = all(hook.agrees_over_ranks for hook in hooks.values())
        self._suppliers: dict[str, int] = {}

    def bound(self) -> list[str]:
        """Tell the connectors that they will be asked; returns their names."""
        return [name for hook in self._hooks.values() for name in hook.bound()]

    def ask(self, scheduler_output: Any) -> Hits:
        """The tokens that the connectors can supply in this step."""
        inside = scheduler_output.kv_connector_metadata.metadata
        self._suppliers = {}
        found: dict[str, int] = {}
        for number, hook in self._hooks.items():
            for name, hit in hook.ask(replace(scheduler_output, kv_connector_metadata=inside[number])).items():
                if hit > 0 and name not in found:
                    found[name] = hit
                    self._suppliers[name] = number
        return found

    def applied(self, hits: Hits) -> None:
        """Pass on to each connector the skipped tokens that it supplies."""
        for number, hook in self._hooks.items():
            hook.applied({name: hit for name, hit in hits.items() if self._suppliers[name] == number})


def hook_of(connector: Any) -> ConnectorHook | HooksInside | None:
    """The hook of a connector or of those inside it; None if none has one."""
    if getattr(connector, "before_update_states", None) is not None:
        return ConnectorHook(connector)
    hooks = {number: hook_of(one) for number, one in enumerate(connectors_inside(connector))}
    hooked = {number: hook for number, hook in hooks.items() if hook is not None}
    return HooksInside(hooked) if hooked else None


class StepHook:
    """Asks one rank's connector in each step, or those inside it. `minimum` is None for a single rank.

    Raises PactViolation if none of them has the hook.
    """

    def __init__(self, connector: Any, *, new_requests_only: bool, minimum: Minimum | None) -> None:
        hook = hook_of(connector)
        if hook is None:
            raise PactViolation(f"{type(connector).__name__} has no before_update_states")
        self._connector = connector
        self._hook = hook
        self._candidates = Candidates(new_requests_only=new_requests_only)
        self._minimum = None if hook.agrees_over_ranks else minimum
        self._hits: Hits = {}

    def bound(self) -> list[str]:
        """Tell the connectors that they will be asked; returns their names."""
        return self._hook.bound()

    def report_hits(self) -> None:
        """Add each step's skipped tokens to the reports of the rank's connector to the scheduler's process."""
        connector = self._connector
        build = connector.build_connector_worker_meta

        def build_with_hits() -> Any:
            report = build()
            hits = self._hits
            self._hits = {}
            return ReportWithHits(report, hits) if hits else report

        connector.build_connector_worker_meta = build_with_hits

    def apply(self, scheduler_output: Any) -> Any:
        """The step that is left to compute: the given output itself if nothing is skipped."""
        most = self._candidates.of_step(scheduler_output)
        found = self._hook.ask(scheduler_output)
        numbers: Sequence[int] = [min(max(0, found.get(name, 0)), limit) for name, limit in most.items()]
        if self._minimum is not None and numbers:
            numbers = self._minimum(numbers)  # also after an exception: a rank without it would stop all others (H43)
        self._hits = hits = {name: number for name, number in zip(most, numbers, strict=True) if number}
        self._hook.applied(hits)
        return apply_external_hits(scheduler_output, hits)
