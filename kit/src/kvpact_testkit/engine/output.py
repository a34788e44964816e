"""The scheduler's output for the ranks in one step. A hook works on copies, never on this object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpact.contract import StepWork
from kvpact_testkit.engine.request import Request


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The results of one step, request by request.

    `sampled` are next tokens, negative before a prompt's end; `ends` how many tokens are computed now. `verified` has
    for those with drafts the accepted drafts, and the number of others.
    """

    sampled: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    verified: Mapping[int, tuple[list[int], int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """Parallel lists: request i computes tokens `starts[i] <= token < starts[i] + counts[i]`.

    `epochs` are the requests' epochs when scheduled. `started` are requests new to the ranks (or back after
    preemption), `grown` those with new blocks and the first new block. `released_rows` are the rows of requests that
    are not running any more. `external_hits` are tokens per request id that a worker supplied in
    `before_update_states`; `starts` and `counts` are then without them.
    """

    step: int
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)
    grown: list[tuple[Request, int]] = field(default_factory=list)
    released_rows: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    external_hits: Mapping[str, int] = field(default_factory=dict)
    work: StepWork = field(default_factory=StepWork)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """Tokens to compute per request id."""
        return {request.request_id: count for request, count in zip(self.requests, self.counts, strict=True)}

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens to compute in the whole step."""
        return sum(self.counts)

    def add(self, request: Request, start: int, count: int) -> None:
        """Schedule tokens of a request."""
        self.requests.append(request)
        self.starts.append(start)
        self.counts.append(count)
        self.epochs.append(request.epoch)

    def remove(self, request: Request) -> int:
        """Unschedule a request that was preempted in the same step; returns its tokens (0 if it was not scheduled)."""
        if request not in self.requests:
            return 0
        index = self.requests.index(request)
        for column in (self.requests, self.starts, self.epochs):
            del column[index]
        return self.counts.pop(index)
