"""One request of the embedded engine: its tokens, its blocks, and how far it has come.

Owns the counts of a request, each with one meaning; the scheduler moves them. Implements `contract.EngineRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from kvpact.engine.config import NO_EXTRAS
from kvpact.errors import ConfigError
from kvpact.identity.keys import RequestIdentity


class RequestStatus(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    WAITING_FOR_LOAD = "waiting_for_load"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDED = frozenset({RequestStatus.FINISHED, RequestStatus.CANCELLED, RequestStatus.FAILED})


class Request:
    """A prompt and what has become of it.

    `identity` None means that something about the request is unknown: no cache may store or serve it, and the engine
    does not share its blocks. `ready_step` is the first step in which it may be admitted (a grammar is compiled until
    then); `encoder_tokens` must fit into one step's encoder budget, from `encoder_ready_step` on.
    """

    __slots__ = (
        "arrival",
        "arrival_step",
        "block_hashes",
        "block_ids",
        "capacity",
        "encoder_ready_step",
        "encoder_tokens",
        "epoch",
        "identity",
        "loaded_ahead",
        "max_output_tokens",
        "may_load",
        "num_computed_tokens",
        "num_expected_tokens",
        "num_inflight_external_tokens",
        "num_own_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_scheduled_tokens",
        "priority",
        "probe_is_open",
        "publish_at",
        "ready_step",
        "request_id",
        "row",
        "status",
        "stop_at",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        max_output_tokens: int = 1,
        *,
        priority: int = 0,
        identity: RequestIdentity | None = NO_EXTRAS,
        arrival_step: int = 0,
        may_load: bool = True,
        ready_step: int = 0,
        encoder_tokens: int = 0,
        encoder_ready_step: int = 0,
    ) -> None:
        if not prompt_token_ids or max_output_tokens < 1:
            raise ConfigError(f"request {request_id} needs at least 1 prompt token and 1 output token")
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_output_tokens = max_output_tokens
        self.stop_at = self.num_prompt_tokens + max_output_tokens
        self.priority = priority
        self.identity = identity
        self.arrival_step = arrival_step
        self.arrival = 0
        """Order of arrival among all requests of the engine."""
        self.may_load = may_load
        self.ready_step = ready_step
        self.encoder_tokens = encoder_tokens
        self.encoder_ready_step = encoder_ready_step

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in the request's blocks, on all ranks."""
        self.num_inflight_external_tokens = 0
        """Tokens behind the computed ones that a load is bringing; they count as nothing else meanwhile."""
        self.num_own_tokens = 0
        """Tokens at the start that the engine's own prefix cache had when the request was admitted: not loaded ones."""
        self.num_scheduled_tokens = 0
        """How far the steps handed out reach; differs from computed only while one is being executed."""
        self.num_expected_tokens = self.num_prompt_tokens
        """Tokens known when all steps handed out are done; more than `token_ids` while one is being executed."""
        self.loaded_ahead: list[tuple[int, int]] = []
        """Token ranges behind a failed one that did arrive, ascending: skipped once the hole is computed."""
        self.epoch = 0
        """Raised when work handed out for the request becomes void: results of an older epoch are dropped."""
        self.block_ids: list[list[int]] = []
        """One list a KV cache group; empty if the request holds nothing."""
        self.capacity = 0
        """Tokens that the blocks have room for."""
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0
        self.publish_at = 0
        """The number of computed tokens at which the next block is complete."""
        self.row = -1
        """Where the model runner keeps the request; -1 for nowhere."""
        self.probe_is_open = False
        """Whether the cache answered "ask again later" last."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs known so far."""
        return len(self.token_ids)

    @property
    def has_ended(self) -> bool:
        """Whether the request is finished, cancelled or failed."""
        return self.status in ENDED

    def rewind(self, num_computed_tokens: int) -> None:
        """Void all work handed out; go on from `num_computed_tokens`."""
        self.epoch += 1
        self.num_computed_tokens = num_computed_tokens
        self.num_scheduled_tokens = num_computed_tokens
        self.num_expected_tokens = len(self.token_ids)
        self.num_inflight_external_tokens = 0
        self.loaded_ahead = []

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status}, {self.num_computed_tokens}/{len(self.token_ids)} computed)"
