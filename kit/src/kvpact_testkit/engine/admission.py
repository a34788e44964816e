"""One admission: its outcomes, what stands in its way, the load that it begins, and what an engine makes of a match
before it commits it.

Owns no state of the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvpact.contract import ExternalKVMatch, ExternalMatchExit
from kvpact_testkit.engine.kv_cache import LocalHit
from kvpact_testkit.engine.quirks import EngineQuirks
from kvpact_testkit.engine.request import Request


@dataclass(slots=True)
class Load:
    """A committed match until its settlement: `num_tokens` after the request's first `start` tokens.

    `void` is set when the request no longer uses it (cancelled, preempted, reset): its blocks are then kept only until
    no rank writes to them any more.
    """

    request: Request
    start: int
    num_tokens: int
    asynchronous: bool
    void: bool = False
    spans_update: bool = False
    """Whether the weights changed since it was committed."""


class Admission(Enum):
    """The result of an attempt to admit a waiting request."""

    ADMITTED = auto()
    SKIPPED = auto()
    BLOCKED = auto()


def rewritten(
    quirks: EngineQuirks, request: Request, hit: LocalHit, match: ExternalKVMatch, *, shortens: bool
) -> tuple[LocalHit, int]:
    """The hit and the match as the engine uses them: some quirks change the number without telling the cache.

    Unless the engine `shortens` matches, it takes all of one or nothing: a shorter one needs other blocks.
    """
    external = match.num_tokens
    if not request.may_load and not quirks.loads_unwilling_requests:
        external = 0
    external -= external % quirks.rounds_match_to_tokens
    if external <= quirks.local_tail_tokens or (external < match.num_tokens and not shortens):
        external = 0
    if hit.num_tokens + external <= quirks.drops_hit_within_tokens:
        return LocalHit(0, tuple(() for _ in hit.blocks)), 0
    return hit, external


def obstacle(
    quirks: EngineQuirks, step: int, needs: tuple[int, int], budgets: tuple[int, int], chunked_prefill: bool
) -> ExternalMatchExit | None:
    """Why a request is not admitted that needs these tokens of the step's budget and of its encoder's; None if it is.

    With `chunked_prefill` a part of its prompt is enough.
    """
    (tokens, encoder_tokens), (budget, encoder_budget) = needs, budgets
    if not chunked_prefill and tokens > budget:
        return ExternalMatchExit.BUDGET
    if quirks.throttles_prefill_every and step % quirks.throttles_prefill_every == 0:
        return ExternalMatchExit.THROTTLED
    if quirks.decode_padding_tokens and tokens + quirks.decode_padding_tokens > budget:
        return ExternalMatchExit.BUDGET
    if quirks.encoder_tokens_per_step is not None and encoder_tokens > encoder_budget:
        return ExternalMatchExit.ENCODER
    return None


def too_many_adapters(running: Sequence[Request], limit: int | None, request: Request) -> bool:
    """Whether the request's adapter is one more than may be loaded."""
    if limit is None or request.identity is None or not request.identity.adapter:
        return False
    loaded = {other.identity.adapter for other in running if other.identity and other.identity.adapter}
    return request.identity.adapter not in loaded and len(loaded) >= limit
