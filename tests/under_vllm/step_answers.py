"""What scenes with the step hook saw, for tests that import no engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Of three requests: one that computes a prompt, one that is given it, and one that is preempted in between."""

    scheduler: str
    """The name of its class."""
    told: list[int]
    """Each request's `num_cached_tokens`."""
    hits: int
    """What vLLM added to its counter of external hits, in tokens."""
    hits_by_source: dict[str, int]
    hits_again: int
    """What vLLM counted apart: hits of requests that were preempted before."""
    steps: list[int]
    """Tokens that the scheduler gave out, step by step."""
    wanted: int
    """All of them."""
    computed: int
    """Tokens that the model computed."""
    answers: list[tuple[int, ...]]
