"""What the embedded engine counts of its dealings with the cache. Owns numbers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineCounts:
    """Counts since the engine began; tokens unless a name says otherwise.

    `promised >= committed >= loaded` holds over all matches; `external_hits` are tokens that requests really skipped,
    those of the worker's hook included (P7).
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
    """Aborts told to the cache, by reason."""
    declined: Counter[str] = field(default_factory=Counter)
    """Matches that were not used, by what stood in their way, told to the cache or not."""
    hook_hits: int = 0
    preemptions: int = 0
    failed_loads: int = 0
    finished: int = 0
    cancelled: int = 0
    wrong_reads: int = 0
