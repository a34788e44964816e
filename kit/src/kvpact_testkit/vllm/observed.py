"""The calls and answers between vLLM's scheduler and a connector, recorded for scenarios. Judges nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from kvpact_testkit.vllm.oracle import WrongSlot


@dataclass(frozen=True, slots=True)
class Probe:
    """One `get_num_new_matched_tokens`: the question and the answer (None: ask again later)."""

    step: int
    request_id: str
    num_tokens: int
    """Tokens of the request at the time of the probe."""
    computed: int
    answer: int | None
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class Commit:
    """One `update_state_after_alloc` with external tokens."""

    step: int
    request_id: str
    num_tokens: int
    block_ids: tuple[int, ...]
    """Blocks of the first KV cache group."""


@dataclass(slots=True)
class Observed:
    """The record of one engine and its connector."""

    probes: list[Probe] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    received: Counter[str] = field(default_factory=Counter)
    """How often each request's asynchronous load was reported finished to the scheduler."""
    invalid_blocks: list[set[int]] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Output tokens of each request that its user got."""
    finished: dict[str, str] = field(default_factory=dict)
    """Request -> vLLM's reason for its end."""
    wrong_slots: list[WrongSlot] = field(default_factory=list)
    wrong_offers: list[str] = field(default_factory=list)
    """Blocks that vLLM offered for the state at a boundary, and that did not hold it when the step had ended."""
    offered: list[tuple[str, int, int, int]] = field(default_factory=list)
    """What the last step offered of that: request, group, block, tokens."""
    offers: int = 0
    """How much all steps offered."""
    drafted: int = 0
    """Drafts that steps verified."""
    accepted: int = 0
    """How many of them were right."""
    events: list[Any] = field(default_factory=list)
    """KV events, those of the engine and the connector, in vLLM's order."""
    preemptions: int = 0
    copies: int = 0
    """Blocks that vLLM copied, to write behind a hit that ends inside one."""
    steps: int = 0

    def probes_of(self, request_id: str) -> list[Probe]:
        """Return the request's probes."""
        return [probe for probe in self.probes if probe.request_id == request_id]

    def committed_tokens(self, request_id: str) -> int:
        """Tokens committed for this request, all its commits together."""
        return sum(commit.num_tokens for commit in self.commits if commit.request_id == request_id)

    def listen(self, connector: Any, journal: Callable[[str], None], taken: Callable[[str, int], int]) -> None:
        """Record from now on the scheduler's calls of `connector` and their answers.

        Instead of a positive answer the scheduler gets `taken(request, answer)` tokens.
        """
        probe, commit = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        plan = connector.build_connector_meta
        said: dict[str, tuple[int, str]] = {}

        @wraps(probe)
        def noted_probe(request: Any, computed: int) -> Any:
            given = probe(request, computed)
            if not isinstance(given, tuple) or len(given) != 2:
                return given  # in a form that some schedulers take: it is not judged
            answer, asynchronous = given
            name = request.request_id
            self.probes.append(Probe(self.steps, name, request.num_tokens, computed, answer, asynchronous))
            words = f"{answer} tokens{' later' if asynchronous else ''}" if answer is not None else "'ask again later'"
            if said.get(name) != (computed, words):
                said[name] = (computed, words)
                journal(f"    asked for {name} behind {computed} tokens, the connector promises {words}")
            answer = taken(name, answer) if answer else answer
            return answer, asynchronous and bool(answer)

        @wraps(commit)
        def noted_commit(request: Any, blocks: Any, num_tokens: int, *query_result: Any) -> None:
            if num_tokens:
                journal(f"    vLLM takes {num_tokens} tokens for {request.request_id}")
                block_ids, *_ = blocks.get_block_ids()
                self.commits.append(Commit(self.steps, request.request_id, num_tokens, tuple(block_ids)))
            commit(request, blocks, num_tokens, *query_result)

        @wraps(plan)
        def noted_plan(output: Any) -> Any:
            state = output.kv_connector_block_state  # gone when the step begins
            offered = state.boundary_state_offloads if state is not None else {}
            self.offered = [(name, *one) for name, states in offered.items() for one in states]
            self.offers += len(self.offered)
            return plan(output)

        connector.build_connector_meta = noted_plan
        connector.get_num_new_matched_tokens = noted_probe
        connector.update_state_after_alloc = noted_commit
