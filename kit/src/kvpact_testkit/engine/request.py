"""One request of the embedded engine: its tokens, its blocks and its progress.

Owns the counts of a request, each with one meaning; the scheduler moves them. Implements `contract.EngineRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from kvpact.errors import ConfigError
from kvpact.identity.keys import RequestIdentity
from kvpact.ranges import RangeSet
from kvpact_testkit.engine.config import NO_EXTRAS


class RequestStatus(StrEnum):
    """The state of a request."""

    WAITING = "waiting"
    WAITING_FOR_LOAD = "waiting_for_load"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = frozenset({RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED})


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt, its outputs and its state in the engine.

    With `identity` None, something about the request is unknown: no cache may store or serve it, and the engine does
    not share its blocks. `ready_step` is the first step in which it may be admitted (until then a grammar is compiled);
    `encoder_tokens` must fit into one step's encoder budget, from `encoder_ready_step` on.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    max_output_tokens: int = 1
    _: KW_ONLY
    priority: int = 0
    identity: RequestIdentity | None = NO_EXTRAS
    arrival_step: int = 0
    may_load: bool = True
    ready_step: int = 0
    encoder_tokens: int = 0
    encoder_ready_step: int = 0

    token_ids: list[int] = field(init=False)
    """Prompt and outputs known so far."""
    num_prompt_tokens: int = field(init=False)
    stop_at: int = field(init=False)
    """Prompt and output tokens at which the request is finished."""
    arrival: int = field(default=0, init=False)
    """Order of arrival among all requests of the engine."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose keys and values are in the request's blocks, on all ranks."""
    num_inflight_external_tokens: int = field(default=0, init=False)
    """Tokens after the computed ones that a load is to supply; they are not computed until it has."""
    num_own_tokens: int = field(default=0, init=False)
    """Tokens at the start that the engine's own prefix cache supplied at admission, without loaded ones."""
    num_scheduled_tokens: int = field(default=0, init=False)
    """Tokens covered by the steps scheduled so far; more than computed only while a step is executed."""
    num_expected_tokens: int = field(init=False)
    """Tokens known once all scheduled steps have run; more than `token_ids` only while a step is executed."""
    loaded_ahead: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Token ranges after a failed range that arrived, ascending: they are skipped once the failed range is computed."""
    noted_as: object = field(default=False, init=False)
    """The identity that it had when the cache was last told what is computed of it; False before."""
    epoch: int = field(default=0, init=False)
    """Incremented when scheduled work becomes void: results of an older epoch are dropped."""
    block_ids: list[list[int]] = field(default_factory=list, init=False)
    """One list per KV cache group; empty if the request has no blocks."""
    capacity: int = field(default=0, init=False)
    """Tokens that the blocks have room for."""
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    num_published_blocks: list[int] = field(default_factory=list, init=False)
    """For each KV cache group, how many of its first blocks were published where they could be."""
    first_kept_blocks: list[int] = field(default_factory=list, init=False)
    """For each KV cache group, its first block that was not freed as one that is not read any more."""
    publish_at: int = field(default=0, init=False)
    """The number of computed tokens from which on the next block may be complete."""
    num_accepted_drafts: int = field(default=0, init=False)
    """Drafts that the last step of the request accepted."""
    num_offered_tokens: int = field(default=0, init=False)
    """Tokens up to which the request's states were offered to the cache."""
    row: int = field(default=-1, init=False)
    """The request's row in the model runner; -1 for none."""
    hits: RangeSet = field(default_factory=RangeSet, init=False)
    """Token positions that are not computed in the request's present run: local and external hits that are there."""
    computed_before: RangeSet = field(default_factory=RangeSet, init=False)
    """Token positions that were computed before the request was last taken back."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids or self.max_output_tokens < 1:
            raise ConfigError(f"request {self.request_id} needs at least 1 prompt token and 1 output token")
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = self.num_expected_tokens = len(self.token_ids)
        self.stop_at = self.num_prompt_tokens + self.max_output_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The outputs so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs known so far."""
        return len(self.token_ids)

    @property
    def has_ended(self) -> bool:
        """Whether the request is finished, cancelled or failed."""
        return self.status in ENDED

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were never computed for this request: its own hits and external ones.

        A load counts when it has arrived, and only what arrived. What was computed before a preemption never counts.
        """
        return len(self.hits.difference(self.computed_before).intersection(RangeSet.span(0, self.num_prompt_tokens)))

    def note_hit(self, start: int, end: int) -> None:
        """The tokens from `start` to before `end` are there and are not computed."""
        if end > start:
            self.hits = self.hits.union(RangeSet.span(start, end))

    def rewind(self, num_computed_tokens: int) -> None:
        """Void all scheduled work; continue from `num_computed_tokens`."""
        if self.num_computed_tokens:
            computed = RangeSet.span(0, self.num_computed_tokens).difference(self.hits)
            self.computed_before = self.computed_before.union(computed)
        self.hits = self.hits.intersection(RangeSet.span(0, num_computed_tokens))
        self.epoch += 1
        self.num_computed_tokens = num_computed_tokens
        self.num_scheduled_tokens = num_computed_tokens
        self.num_expected_tokens = len(self.token_ids)
        self.num_inflight_external_tokens = 0
        self.num_accepted_drafts = self.num_offered_tokens = 0
        self.loaded_ahead = []

    def note_drafts(self, accepted: list[int], rejected: int) -> None:
        """A step verified drafts; what was scheduled behind it counted on all of them."""
        self.token_ids.extend(accepted)
        self.num_accepted_drafts = len(accepted)
        if rejected:
            self.num_scheduled_tokens -= rejected
            self.num_expected_tokens = min(self.num_scheduled_tokens + 1, self.stop_at - 1)

    def up_to_loaded(self, tokens: int) -> tuple[int, int]:
        """Skip ranges that arrived after a failed one once that is computed; until then never compute them.

        Returns which part of the next `tokens` is to be computed, and the number of tokens skipped.
        """
        start = self.num_scheduled_tokens
        skipped = 0
        while self.loaded_ahead and self.loaded_ahead[0][0] <= start:
            if self.num_computed_tokens < start:
                return 0, skipped  # the failed range is being computed
            end = min(self.loaded_ahead.pop(0)[1], len(self.token_ids) - 1)
            if end > start:
                skipped += end - start
                self.note_hit(start, end)
                start = self.num_scheduled_tokens = self.num_computed_tokens = end
        tokens -= skipped
        if self.loaded_ahead:
            tokens = min(tokens, self.loaded_ahead[0][0] - start)
        return tokens, skipped

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status}, {self.num_computed_tokens}/{len(self.token_ids)} computed)"
