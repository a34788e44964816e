"""Answer to a prepare: a pure function of the blocks present, the operations under way, and the time left to wait.

`TABLE` is drawn in docs/architecture.md, "How a prepare is answered". Its first row that applies gives the answer. No
clock, no I/O, no state: all facts are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from kvpact.errors import PactViolation
from kvpact.metrics import EndReason, MissReason


class Availability(NamedTuple):
    """Where a request's blocks are, determined once per prepare; numbers are blocks in a row from the first."""

    resident: int
    """Blocks that memory holds, or other engines' memory on this host."""
    by_tier: tuple[int, ...] = ()
    """Blocks that each tier can supply, in the user's order; of a shared tier what it has answered."""
    arriving: bool = False
    """True if the block after the resident ones is being read from a tier."""
    beside: int = 0
    """Resident blocks, the last ones, that memory has only together with other engines of this host."""

    @property
    def stored(self) -> int:
        """Blocks that the tier with most of them can supply."""
        return max(self.by_tier, default=0)


class Phase(StrEnum):
    """Operation under way for a request."""

    FREE = "nothing"
    ASKING = "a shared tier is asked"
    READING = "blocks are being read"


class Lookup(NamedTuple):
    """Request for blocks [start, end), by `deadline` in seconds; `end` is that of its read, if there is one."""

    phase: Phase
    start: int
    end: int
    deadline: float


class Limits(NamedTuple):
    """Limits set by the configuration and the running step."""

    min_blocks: int
    """Fewer blocks are no match."""
    puts_off: bool = False
    """True once the step has used its budget: the next step uses the tiers' answers of this one."""
    computes_faster: bool = False
    """True if the engine computes blocks sooner than tiers supply them."""
    not_found: MissReason = MissReason.NOT_STORED
    """Reason why no more was found: not stored only if every place was asked."""


class Promise(NamedTuple):
    """Promise of the blocks up to `end`, from memory; `reason` says why no more are."""

    end: int
    reason: MissReason
    tiers_done: bool = False
    """True if the request stops waiting for tiers."""


class Wait(NamedTuple):
    """ "Ask again later". With `put_off`, the next step answers in any case; with `no_room`, it depends on others."""

    put_off: bool = False
    no_room: bool = False


class Miss(NamedTuple):
    """Nothing is promised. The request's plan, if any, ends as `ends`."""

    reason: MissReason
    tiers_done: bool = False
    ends: EndReason = EndReason.SUPERSEDED


class Stage(NamedTuple):
    """Blocks up to `end` are read into memory first; "ask again later".

    Without room for them, and where it is not worth waiting for that: `otherwise`.
    """

    end: int
    otherwise: Promise | Miss


Decision = Promise | Stage | Wait | Miss


class Case:
    """The arguments of `decide`, with what the table's rows ask about them: attributes, as a row costs no call then."""

    def __init__(self, available: Availability, lookup: Lookup, limits: Limits, now: float) -> None:
        self.available = available
        self.lookup = lookup
        self.limits = limits
        resident = available.resident
        stored = available.stored
        is_reading = lookup.phase is Phase.READING
        self.is_over = now >= lookup.deadline
        self.is_short = resident < lookup.end
        """True if memory lacks wanted blocks."""
        self.tiers_have_more = stored > resident and stored - lookup.start >= limits.min_blocks
        """True if a tier can supply blocks after the resident ones, and enough for a match."""
        others = not self.is_short or len(available.by_tier) > 1
        # Whether a tier can supply what the read does not bring; after a short read, another tier.
        reads_more = others and stored > min(resident, lookup.end)
        self.read_is_over = is_reading and self.is_over
        self.read_is_put_off = is_reading and limits.puts_off
        self.read_goes_on = is_reading and self.is_short and available.arriving
        self.read_was_all = is_reading and not reads_more
        self.is_asking = lookup.phase is Phase.ASKING
        self.tiers_are_slower = self.tiers_have_more and limits.computes_faster

    def from_memory(self, reason: MissReason, *, tiers_done: bool = False) -> Promise | Miss:
        """Promise the blocks in memory, if they are enough for a match."""
        end = self.available.resident
        is_match = end - self.lookup.start >= self.limits.min_blocks
        return Promise(end, reason, tiers_done) if is_match else Miss(reason, tiers_done)

    def from_read(self, reason: MissReason, ends: EndReason) -> Promise | Miss:
        """Promise those of the read blocks that memory holds, if they are enough for a match."""
        end = min(self.available.resident, self.lookup.end)
        is_match = end - self.lookup.start >= self.limits.min_blocks
        return Promise(end, reason, self.is_short) if is_match else Miss(reason, self.is_short, ends)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: `when` and `then` are its text in the documents."""

    when: str
    then: str
    applies: Callable[[Case], bool]
    answer: Callable[[Case], Decision]


def _asked_in_vain(case: Case) -> MissReason:
    return MissReason.DEADLINE if case.lookup.phase is Phase.ASKING else case.limits.not_found


TABLE = (
    Row(
        "blocks are being read; the deadline has passed",
        "Promise, or Miss `deadline`",
        attrgetter("read_is_over"),
        lambda case: case.from_read(MissReason.DEADLINE, EndReason.DEADLINE),
    ),
    Row(
        "blocks are being read; some arrived in this step, which has cost enough",
        "Wait, for the next step",
        attrgetter("read_is_put_off"),
        lambda case: Wait(put_off=True),
    ),
    Row(
        "blocks are being read; the next one is on its way",
        "Wait",
        attrgetter("read_goes_on"),
        lambda case: Wait(),
    ),
    Row(
        "blocks were read; no tier can supply more",
        "Promise, or Miss `not_delivered` if too few have arrived",
        attrgetter("read_was_all"),
        lambda case: case.from_read(
            MissReason.NOT_DELIVERED if case.is_short else case.limits.not_found, EndReason.TIER_FAILED
        ),
    ),
    Row(
        "the deadline has passed, or nothing may be waited for",
        "Promise, or Miss `deadline` if a tier has not answered",
        attrgetter("is_over"),
        lambda case: case.from_memory(_asked_in_vain(case), tiers_done=True),
    ),
    Row(
        "a shared tier has not answered",
        "Wait",
        attrgetter("is_asking"),
        lambda case: Wait(),
    ),
    Row(
        "all have answered before the first prepare; this step has cost enough",
        "Wait, for the next step",
        attrgetter("limits.puts_off"),
        lambda case: Wait(put_off=True),
    ),
    Row(
        "a tier can supply more than memory holds; the engine computes that sooner",
        "Promise, or Miss `recompute_faster`",
        attrgetter("tiers_are_slower"),
        lambda case: case.from_memory(MissReason.RECOMPUTE_FASTER),
    ),
    Row(
        "a tier can supply more than memory holds",
        "Stage; without room Wait for it, or Promise, or Miss `no_room`",
        attrgetter("tiers_have_more"),
        lambda case: Stage(case.available.stored, case.from_memory(MissReason.NO_ROOM)),
    ),
    Row(
        "else",
        "Promise, or Miss",
        lambda case: True,
        lambda case: case.from_memory(case.limits.not_found),
    ),
)
"""The first row that applies counts. "Promise, or Miss": what memory holds is promised if it is enough for a match."""


def decide(available: Availability, lookup: Lookup, limits: Limits, now: float) -> Decision:
    """The answer of a prepare at `now` (on the clock of `lookup.deadline`)."""
    case = Case(available, lookup, limits, now)
    for row in TABLE:
        if row.applies(case):
            return row.answer(case)
    raise PactViolation(f"no row of the table speaks of {available}, {lookup}, {limits}")
