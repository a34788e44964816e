"""A plan: one match from prepare to settlement, its states and their transitions.

TRANSITIONS is the whole lifecycle; `Ledger` alone changes a plan's state. What is not in the table raises
PactViolation. Owns no block and no bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import inf
from operator import attrgetter
from typing import Generic, TypeVar

from kvpact.cache.totals import NO_SOURCES, Sources
from kvpact.errors import PactViolation, kept_id
from kvpact.metrics import EndReason
from kvpact.ranges import NO_RANGES, BlockRange, RangeSet


class PlanState(StrEnum):
    """Where a plan is. NONE stands for a request without a plan."""

    NONE = "NONE"
    PENDING = "PENDING"
    PLANNED = "PLANNED"
    LOADING = "LOADING"
    LOADED = "LOADED"
    SHORT = "SHORT"
    ABORTED = "ABORTED"


class PlanEvent(StrEnum):
    """Events of a plan; the value is the arrow's text in docs/lifecycle.md."""

    PREPARE_LATER = "prepare, a tier answers later"
    PREPARE_READY = "prepare, all is held"
    RENEW = "prepare again"
    COMMIT = "commit, 0 < n ≤ promised"
    ABORT = "abort, or commit of 0"
    ARRIVED = "all committed tokens arrived"
    FELL_SHORT = "a named range did not arrive"


TRANSITIONS: dict[tuple[PlanState, PlanEvent], PlanState] = {
    (PlanState.NONE, PlanEvent.PREPARE_LATER): PlanState.PENDING,
    (PlanState.NONE, PlanEvent.PREPARE_READY): PlanState.PLANNED,
    (PlanState.PENDING, PlanEvent.PREPARE_READY): PlanState.PLANNED,
    (PlanState.PENDING, PlanEvent.RENEW): PlanState.PENDING,
    (PlanState.PENDING, PlanEvent.ABORT): PlanState.ABORTED,
    (PlanState.PLANNED, PlanEvent.RENEW): PlanState.PLANNED,
    (PlanState.PLANNED, PlanEvent.COMMIT): PlanState.LOADING,
    (PlanState.PLANNED, PlanEvent.ABORT): PlanState.ABORTED,
    (PlanState.LOADING, PlanEvent.ARRIVED): PlanState.LOADED,
    (PlanState.LOADING, PlanEvent.FELL_SHORT): PlanState.SHORT,
}

ENDINGS = frozenset({PlanState.LOADED, PlanState.SHORT, PlanState.ABORTED})
OPEN_STATES = frozenset({PlanState.PENDING, PlanState.PLANNED, PlanState.LOADING})

Lease = TypeVar("Lease", bound=Hashable)
"""A hold on stored blocks, opaque here. Two equal leases in one list are two holds."""
Slots = TypeVar("Slots")
"""Data of the cache to carry the plan out, opaque here."""


@dataclass(slots=True, eq=False, kw_only=True)
class Plan(Generic[Lease, Slots]):
    """The cache's record of one match. Only the ledger writes it, but for `slots` and `sources`, which are the cache's.

    `blocks` is the match in engine blocks; its last block may be covered in part. Times are seconds on the caller's
    clock, `renewed_at` and `renewed_step` those of the last prepare or commit. `deadline` bounds the load while
    LOADING. `postponed` is why the engine did not take the match, as it said after the last
    prepare; the state is as before, since the promise holds.
    """

    request_id: str
    blocks: BlockRange
    block_size: int
    slots: Slots
    renewed_at: float
    renewed_step: int
    sources: Sources = NO_SOURCES
    deadline: float = inf
    state: PlanState = PlanState.NONE
    promised_tokens: int = 0
    committed_tokens: int = 0
    loaded_tokens: int = 0
    used_tokens: int = 0
    used_again_tokens: int = 0
    leases: list[Lease] = field(default_factory=list)
    reason: EndReason | None = None
    postponed: EndReason | None = None
    failed: RangeSet = NO_RANGES
    request_finished: bool = False

    @property
    def is_open(self) -> bool:
        """True if the plan has not ended yet."""
        return self.state in OPEN_STATES

    @property
    def is_postponed(self) -> bool:
        """True if it promises what the engine did not take."""
        return self.state is PlanState.PLANNED and self.postponed is not None

    @property
    def committed_blocks(self) -> BlockRange:
        """The blocks that the committed tokens reach into; the last one may be covered in part."""
        return BlockRange(self.blocks.start, -(-self.committed_tokens // self.block_size))

    def committed_tokens_in(self, blocks: RangeSet) -> int:
        """Number of committed tokens in `blocks`, which must be committed ones."""
        committed = self.committed_blocks
        missing_in_last = committed.count * self.block_size - self.committed_tokens
        is_short = missing_in_last and committed.end - 1 in blocks
        return len(blocks) * self.block_size - (missing_in_last if is_short else 0)

    def refusal(self, event: PlanEvent) -> PactViolation:
        """An event that may not happen now, as an error."""
        allowed = [known.name for state, known in TRANSITIONS if state is self.state]
        return PactViolation(
            f"request {self.request_id}: {event.name} in state {self.state}; "
            f"allowed there: {', '.join(allowed) if allowed else 'nothing, the plan has ended'}"
        )

    def require_all(self, loaded: RangeSet, failed: RangeSet) -> None:
        """Raise PactViolation unless each committed block is in exactly one of the two sets."""
        committed = RangeSet.of(self.committed_blocks)
        if loaded == committed and not failed.ranges:
            return
        if loaded.union(failed) != committed or loaded.intersection(failed).ranges:
            raise PactViolation(
                f"request {self.request_id}: loaded {_spell(loaded)} and failed {_spell(failed)} do not make up "
                f"the committed {_spell(committed)}; every committed block is in exactly one of the two"
            )

    def record(self) -> PlanRecord:
        """The plan as the history keeps it."""
        return PlanRecord(kept_id(self.request_id), *_RECORDED(self))


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan as the history keeps it; times are seconds on the ledger's clock."""

    request_id: str
    state: PlanState
    reason: EndReason | None
    blocks: BlockRange
    failed: RangeSet
    promised_tokens: int
    committed_tokens: int
    loaded_tokens: int
    used_tokens: int
    used_again_tokens: int
    renewed_at: float


_RECORDED = attrgetter(*(item.name for item in fields(PlanRecord)[1:]))


def _spell(blocks: RangeSet) -> str:
    return "blocks " + (", ".join(f"{item.start}-{item.end - 1}" for item in blocks.ranges) or "none")
