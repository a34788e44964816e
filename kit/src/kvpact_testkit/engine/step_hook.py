"""Tokens that workers supply before a step's state update: how ranks agree, and how the step changes.

Owns the rules of `before_update_states`: the minimum over ranks counts, at least one token is left to compute, and the
output is never edited in place (an edited output made a preempted request vanish: H90).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvpact.errors import PactViolation
from kvpact_testkit.engine.output import SchedulerOutput


def agree_on_hits(hits_of_ranks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Request id -> tokens that every rank supplied; a rank that does not name a request supplied none."""
    if not hits_of_ranks or not all(hits_of_ranks):
        return {}
    first, *others = hits_of_ranks
    agreed = {
        request_id: min([hit, *(hits.get(request_id, 0) for hits in others)]) for request_id, hit in first.items()
    }
    return {request_id: hit for request_id, hit in agreed.items() if hit}


def apply_external_hits(scheduler_output: SchedulerOutput, hits: Mapping[str, int]) -> SchedulerOutput:
    """The step without the tokens in `hits`, which are the first ones of each request's part; the given output is not
    changed.

    Of every request at least one token is left. Without hits, returns the same object. Raises PactViolation for
    a request that the step does not compute, and for a negative number.
    """
    if not hits:
        return scheduler_output
    counts = scheduler_output.num_scheduled_tokens
    for request_id, hit in hits.items():
        if request_id not in counts or hit < 0:
            raise PactViolation(f"a worker supplied {hit} tokens of {request_id}; the step computes {sorted(counts)}")
    skipped = {request_id: min(hit, counts[request_id] - 1) for request_id, hit in hits.items()}
    skips = [skipped.get(request.request_id, 0) for request in scheduler_output.requests]
    return replace(
        scheduler_output,
        starts=[start + skip for start, skip in zip(scheduler_output.starts, skips, strict=True)],
        counts=[count - skip for count, skip in zip(scheduler_output.counts, skips, strict=True)],
        external_hits={request_id: skip for request_id, skip in skipped.items() if skip},
    )
