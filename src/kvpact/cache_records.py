"""What the cache writes down of each live request, and of each copy that workers were told to make.

Owns nothing but data; `cache.py` decides. Floor 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpact.blocks import BlockKey, BlockKeys
from kvpact.contract import Inquiry, JobTally, LoadJob, SaveJob, StepWork
from kvpact.index import Pin
from kvpact.ledger import Plan
from kvpact.staging import Inquest

Slots = tuple[int, ...]
PactPlan = Plan[Pin, Slots]
"""A plan's intent is the slots of its blocks: its pins keep them as they are, even if entries are dropped meanwhile."""


@dataclass(slots=True)
class RequestRecord:
    """What the cache knows of one live request. Without `keys` (its identity is unknown) it is not cached."""

    keys: BlockKeys | None
    offered: int = 0
    """Blocks that need not be offered for saving again."""
    failed_from: int | None = None
    """The first block that once failed to load: neither it nor what follows is promised to this request again (H09)."""
    waits_until: float | None = None
    """When "ask again later" ends for this request, however often its range changes meanwhile (P11)."""
    last_lookup: int = -1
    """Where the last counted lookup began, in blocks; a blocked request that asks each step is counted once (H02)."""
    missed: bool = False
    """Whether that lookup was counted as a miss; waiting for a tier may end in a second one, or in a hit."""
    inquest: Inquest | None = None
    """What the shared tiers were asked for this request, once."""
    computed: int = 0
    """Tokens that the engine has, or is loading: what it computes beyond them is its own work."""


@dataclass(slots=True)
class Load:
    """A committed match on its way into the engine's blocks."""

    job: LoadJob
    plan: PactPlan
    keys: tuple[BlockKey, ...]
    tally: JobTally
    ask_at: float


@dataclass(slots=True)
class Save:
    """Computed blocks on their way into the arena. `pin` keeps their chain; `trusted` falls if a load failed."""

    job: SaveJob
    keys: tuple[BlockKey, ...]
    pin: Pin
    tally: JobTally
    ask_at: float
    trusted: bool = True


@dataclass(slots=True)
class Outbox:
    """What the workers are told at the end of the running step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    inquiries: list[Inquiry] = field(default_factory=list)

    def take(self) -> StepWork:
        """All of it; the next step begins empty."""
        work = StepWork(tuple(self.loads), tuple(self.saves), tuple(self.inquiries))
        self.loads.clear()
        self.saves.clear()
        self.inquiries.clear()
        return work
