"""What the cache knows of one live request.

Owns nothing else: what is promised to the request is the ledger's, what is copied for it the jobs'.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.cache.jobs import PactPlan
from kvpact.cache.prefetch import TierLookup
from kvpact.identity.keys import BlockKeys, RequestIdentity
from kvpact.identity.tags import NO_TAG, Tag


@dataclass(frozen=True, slots=True)
class Waiting:
    """What "ask again later" was answered to."""

    computed_tokens: int
    completions: int
    """As `TierSet` counts."""
    plan: PactPlan | None

    def still(self, computed_tokens: int, completions: int, plan: PactPlan | None) -> bool:
        """Whether nothing has changed."""
        return self.completions == completions and self.computed_tokens == computed_tokens and self.plan is plan


@dataclass(slots=True)
class RequestState:
    """What the cache knows of one live request. Without `keys` (its identity is unknown) it is not cached."""

    keys: BlockKeys | None = None
    identity: RequestIdentity | None = None
    """What `keys` were made with."""
    generation: int = 0
    """The epoch that `keys` were made in, as `Epochs` counts."""
    tag: Tag = NO_TAG
    """What the engine's blocks are tagged with that the request fills now."""
    tail_tag: Tag = NO_TAG
    """What the request's last block, filled in part, was begun with."""
    sound: int = 0
    """So many of its blocks have its tag, from the first on."""
    offloaded_blocks: int = 0
    """Blocks that need not be offered for saving again."""
    invalid_from: int | None = None
    """The first block that once failed to load: neither it nor what follows is promised to this request again (H09)."""
    waits_until: float | None = None
    """When "ask again later" ends for this request, however often its range changes meanwhile (P11)."""
    put_off: bool = False
    """Whether the running probe is put off to the next step because this one has cost enough."""
    was_put_off: bool = False
    """Whether the last probe was: no two in a row are."""
    waits_at: Waiting | None = None
    """When it was told so the last time. Until any of this changes, the answer stays."""
    last_lookup: int = -1
    """Where the last counted lookup began, in blocks; a blocked request that asks each step is counted once (H02)."""
    found: bool | None = None
    """Whether that lookup promised anything; None while a tier is waited for, whose answer may change it."""
    spared_at: int = -1
    """Where, in blocks, the engine last had all that could be loaded."""
    tier_lookup: TierLookup | None = None
    """What the shared tiers were asked for this request, once."""
    computed: int = 0
    """Tokens that the engine has, or is loading: what it computes beyond them is its own work."""
    max_computed: int = 0
    """Tokens that the engine had when it was farthest with the request."""
    loads_without_progress: int = 0
    """Loads since then: it was preempted before it got any farther."""

    def go_back(self, first: int, block_size: int) -> None:
        """The engine computes the request's blocks from `first` on anew; until then they hold nothing to be saved."""
        self.sound = min(self.sound, first)
        self.offloaded_blocks = min(self.offloaded_blocks, first)
        self.computed = min(self.computed, first * block_size)
