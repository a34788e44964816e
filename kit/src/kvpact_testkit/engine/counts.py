"""What the embedded engine counts of its dealings with the cache. Owns numbers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounts:
    """Counts since the engine was made, in tokens unless the name has another unit.

    `promised >= committed >= loaded` holds over all matches (P7). `external_hits` are tokens that requests skipped,
    those that workers supplied in `before_update_states` included.
    """

    steps: int = 0
    computed: int = 0
    local_hits: int = 0
    external_hits: int = 0
    probes: int = 0
    positive_probes: int = 0
    pending_probes: int = 0
    promised: int = 0
    commits: int = 0
    committed: int = 0
    loaded: int = 0
    failed: int = 0
    aborts: Counter[str] = field(default_factory=Counter)
    """Calls of `abort_external_match`, by exit."""
    postponed: Counter[str] = field(default_factory=Counter)
    """Calls of `postpone_external_match`, by exit."""
    declined: Counter[str] = field(default_factory=Counter)
    """Matches that were prepared and not used in the same step, by exit, whether or not the cache was told."""
    given_back: int = 0
    """Tokens that steps could schedule because an earlier step's hits in `before_update_states` had spared them."""
    hook_hits: int = 0
    preemptions: int = 0
    failed_loads: int = 0
    finished: int = 0
    cancelled: int = 0
    wrong_reads: int = 0
    drafted: int = 0
    accepted: int = 0
    """Drafts that steps verified and that were right."""
    offered_states: int = 0
    """States that were offered to the cache."""
    states_in_drafts: int = 0
    """Offered states whose boundary lay before the last of a step's accepted drafts."""
