"""kvpact's metrics: one table of counters, gauges and one histogram, with labels from small fixed sets.

Owns the numbers and their meaning; the set of series is fixed at import, so it does not grow with requests, keys or
time. Decides nothing. A wrong count never reaches an exporter: it is refused, and `check` reports it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from threading import Lock
from typing import Final, Literal, TypeAlias

from kvpact.contract import ExternalMatchExit
from kvpact.errors import PactViolation
from kvpact.tiers.backends import BACKENDS, OTHER

Snapshot: TypeAlias = dict[str, float]
"""Series name to value, as `series` writes it; plain numbers, so any encoder takes it. Counts of things are `int`."""


MEMORY: Final = "memory"
"""The label of the memory tier, which is the arena and no backend."""

TIER_LABELS: Final = (MEMORY, *(backend.label for backend in BACKENDS), OTHER)
"""The kinds of tier. Two tiers of one kind share their series; all kinds that other packages add share one."""


class EndReason(StrEnum):
    """Why a plan ended. The first two are settlements, the others reasons of an abort.

    From `NO_BLOCKS` on, and `DECLINED`: the exits that an engine names, as `contract.ExternalMatchExit` has them.
    """

    LOADED = "loaded"
    SHORT = "short"
    DECLINED = ExternalMatchExit.DECLINED.value
    SUPERSEDED = ExternalMatchExit.SUPERSEDED.value
    NOT_RENEWED = ExternalMatchExit.NOT_RENEWED.value
    REQUEST_FINISHED = "request_finished"
    DEADLINE = "deadline"
    TIER_FAILED = "tier_failed"
    CACHE_RESET = "cache_reset"
    SHUTDOWN = "shutdown"
    ERROR = "error"
    NO_BLOCKS = ExternalMatchExit.NO_BLOCKS.value
    BUDGET = ExternalMatchExit.BUDGET.value
    THROTTLED = ExternalMatchExit.THROTTLED.value
    LORA_LIMIT = ExternalMatchExit.LORA_LIMIT.value
    MAX_RUNNING = ExternalMatchExit.MAX_RUNNING.value
    ENCODER = ExternalMatchExit.ENCODER.value
    BLOCKED = ExternalMatchExit.BLOCKED.value
    PREEMPTION = ExternalMatchExit.PREEMPTION.value
    NOT_REACHED = ExternalMatchExit.NOT_REACHED.value
    PAUSED = ExternalMatchExit.PAUSED.value
    OTHER_CONNECTOR_WAITS = ExternalMatchExit.OTHER_CONNECTOR_WAITS.value
    OTHER_CONNECTOR = ExternalMatchExit.OTHER_CONNECTOR.value
    REFUSED = ExternalMatchExit.REFUSED.value
    CANCELLED = ExternalMatchExit.CANCELLED.value
    RESET = ExternalMatchExit.RESET.value
    WITHDRAWN = ExternalMatchExit.WITHDRAWN.value


class MissReason(StrEnum):
    """Why a lookup promised nothing."""

    NOT_STORED = "not_stored"
    TOO_SHORT = "too_short"
    UNKNOWN_IDENTITY = "unknown_identity"
    DISABLED = "disabled"
    FAILED_BEFORE = "failed_before"
    NO_ROOM = "no_room"
    DEADLINE = "deadline"
    RECOMPUTE_FASTER = "recompute_faster"
    CROWDED = "crowded"
    ASKED_AT_STEP = "asked_at_step"
    OVERDUE = "overdue"


MISS_HINTS: Mapping[MissReason, str] = {
    MissReason.NOT_STORED: "the prompt's first block is not held",
    MissReason.TOO_SHORT: "the prompts have no whole block before their last token, or fewer than `min_match_blocks`",
    MissReason.UNKNOWN_IDENTITY: "the requests carry something that kvpact cannot name by content and so never stores",
    MissReason.DISABLED: "the cache is switched off; the log says why, at start-up or at the error that did it",
    MissReason.FAILED_BEFORE: "a load failed for the same request, which is not promised again; see damaged_records",
    MissReason.NO_ROOM: "no memory slot was free to stage the blocks in; raise `memory`",
    MissReason.CROWDED: "requests are preempted again and again before they use what was loaded: too few KV blocks",
    MissReason.RECOMPUTE_FASTER: "the engine computes faster than the tier below memory delivers; see prefill_speed",
    MissReason.ASKED_AT_STEP: "shared tiers are asked when the step begins; see step_lookups and step_hits",
    MissReason.OVERDUE: "a copy into the engine's memory did not end by `load_deadline`; nothing is loaded behind it",
    MissReason.DEADLINE: "the lower tier did not answer in time; it is too slow, or the deadline is too short",
}

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `labels` is the closed set of values that the label `label` takes, if there is one."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    label: str = ""
    labels: Iterable[str] = ()

    @property
    def label_values(self) -> tuple[str, ...]:
        """Every value of the label; one empty string for a metric without a label."""
        return tuple(self.labels) or ("",)


def _by_tier(name: str, kind: Kind, unit: str, meaning: str) -> Metric:
    return Metric(name, kind, unit, meaning, "tier", TIER_LABELS)


STEP_SECONDS = "step_seconds"
STEP_BOUNDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
"""Upper bounds of the buckets, in seconds: from 10 us, not noticeable, to 100 ms, far above what P11 allows."""

METRICS: tuple[Metric, ...] = (
    Metric("promised_tokens", "counter", "tokens", "promised to the engine; once per plan, never per probe"),
    Metric("committed_tokens", "counter", "tokens", "chosen by the engine out of the promised ones"),
    Metric("withdrawn_tokens", "counter", "tokens", "promised and then not committed"),
    Metric("loaded_tokens", "counter", "tokens", "committed ones whose keys and values arrived"),
    Metric("failed_tokens", "counter", "tokens", "committed ones that did not arrive and were recomputed"),
    Metric("used_tokens", "counter", "tokens", "really skipped by the engine; each position of a request once"),
    Metric("used_again_tokens", "counter", "tokens", "skipped a second time by the same request, after a preemption"),
    Metric("overdue_loads", "counter", "loads", "that had not ended by their deadline, so that all was computed"),
    Metric("plans_opened", "counter", "plans", "opened, each of which ends exactly once"),
    Metric("plans_ended", "counter", "plans", "ended, by reason", "reason", EndReason),
    Metric("lookups", "counter", "lookups", "prompts looked up; the same found again is not counted"),
    Metric(
        "spared_lookups", "counter", "prompts", "not looked up: the engine itself had every block that could be loaded"
    ),
    Metric("misses", "counter", "lookups", "lookups that promised nothing, by reason", "reason", MissReason),
    Metric(
        "step_lookups", "counter", "lookups", "left to the workers, when a step begins; `misses` may count them too"
    ),
    Metric("step_hits", "counter", "lookups", "of them that supplied tokens, which also count as promised and so on"),
    Metric("declined_blocks", "counter", "blocks", "held by a tier and not loaded: computing them is faster"),
    Metric("saved_blocks", "counter", "blocks", "computed by the engine, copied out and reported by all ranks"),
    Metric("dropped_blocks", "counter", "blocks", "computed and not saved: no slot was free, or the copy failed"),
    _by_tier("evicted_blocks", "counter", "blocks", "evicted to make room"),
    _by_tier("read_blocks", "counter", "blocks", "read from the tier, verified"),
    _by_tier("read_bytes", "counter", "bytes", "read from the tier"),
    _by_tier("written_blocks", "counter", "blocks", "written to the tier"),
    _by_tier("written_bytes", "counter", "bytes", "written to the tier"),
    _by_tier("damaged_records", "counter", "records", "whose checksum or header was wrong; quarantined, never served"),
    _by_tier("dropped_writes", "counter", "blocks", "not written: the queue was full, or the write failed"),
    _by_tier("skipped_lookups", "counter", "lookups", "not asked of the tier, because it was ill"),
    _by_tier("tier_failures", "counter", "operations", "that the tier failed, or did not end in time"),
    Metric("resets", "counter", "resets", "after which nothing stored before is served"),
    Metric("refuted_copies", "counter", "engines", "1 if a copy to or from a device was wrong: no more are made"),
    Metric("hook_errors", "counter", "errors", "exceptions caught in an engine's hook; each cost at most a hit"),
    Metric("refused_counts", "counter", "errors", "counts that would have made a counter go back, refused"),
    Metric("unnamed_weights", "gauge", "engines", "1 between a reset and the next word for the weights: nobody shares"),
    Metric("open_plans", "gauge", "plans", "prepared, committed or loading now"),
    Metric("leases_held", "gauge", "leases", "held by open plans now"),
    _by_tier("held_blocks", "gauge", "blocks", "held by the tier now"),
    _by_tier("capacity_blocks", "gauge", "blocks", "that the tier can hold"),
    _by_tier("used_bytes", "gauge", "bytes", "that the tier's store says it holds, others' included"),
    _by_tier("queued_write_bytes", "gauge", "bytes", "waiting to be written to the tier now"),
    _by_tier("open_breakers", "gauge", "tiers", "left alone now: they failed several times, or are not there yet"),
    _by_tier("lookup_seconds", "gauge", "seconds", "that the tier takes to say what it holds, lately"),
    _by_tier("read_bytes_per_second", "gauge", "bytes per second", "that arrive from the tier, lately"),
    Metric("prefill_speed", "gauge", "tokens per second", "that the engine computes of prompts, lately"),
    Metric(STEP_SECONDS, "histogram", "seconds", "spent by kvpact in the scheduler's process in one scheduler step"),
)

_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


_SERIES: Mapping[tuple[str, str], str] = {
    (metric.name, label): f'{metric.name}{{{metric.label}="{label}"}}' if metric.label else metric.name
    for metric in METRICS
    for label in metric.label_values
}
"""Computed once: building the text in a scheduler step would take too long."""

_KEYS: Mapping[Kind, Mapping[tuple[str, str], str]] = {
    kind: {key: text for key, text in _SERIES.items() if _BY_NAME[key[0]].kind == kind} for kind in ("counter", "gauge")
}

_BUCKETS = tuple(f'{STEP_SECONDS}_bucket{{le="{bound}"}}' for bound in (*STEP_BOUNDS, "+Inf"))


def series(name: str, label: str = "") -> str:
    """The key of one series in a snapshot: `misses{reason="no_room"}`, or the bare name where there is no label."""
    return _SERIES[name, label]


class Metrics:
    """The counts of one process. Safe to call from several threads; every call is O(1) but `snapshot`."""

    __slots__ = ("_buckets", "_lock", "_refused", "_seconds", "_values")

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: Snapshot = dict.fromkeys([*_KEYS["counter"].values(), *_KEYS["gauge"].values()], 0)
        self._buckets = [0] * (len(STEP_BOUNDS) + 1)
        self._seconds = 0.0
        self._refused: str | None = None

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Count `amount` more. A negative amount is refused (see `check`); an unknown series is a PactViolation."""
        key = _KEYS["counter"].get((name, label)) or self._key("counter", name, label)
        with self._lock:
            if amount >= 0:
                self._values[key] += amount
            else:
                self._refuse(f"{series(name, label)} was to grow by {amount}; a counter grows by 0 or more")

    def raise_to(self, name: str, total: int, label: str = "") -> None:
        """Set a total that is counted elsewhere, for example in the ledger. A total below the last one is refused."""
        key = self._key("counter", name, label)
        with self._lock:
            if total >= self._values[key]:
                self._values[key] = total
            else:
                self._refuse(f"{series(name, label)} was to fall from {self._values[key]} to {total}; a counter grows")

    def set(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge; a negative value is refused."""
        key = self._key("gauge", name, label)
        with self._lock:
            if value >= 0:
                self._values[key] = value
            else:
                self._refuse(f"{series(name, label)} was to be {value}; every gauge here is 0 or more")

    def observe_step(self, seconds: float) -> None:
        """Count one scheduler step that spent `seconds` in kvpact; a negative time is refused."""
        with self._lock:
            if seconds >= 0:
                self._buckets[bisect_left(STEP_BOUNDS, seconds)] += 1
                self._seconds += seconds
            else:
                self._refuse(f"{STEP_SECONDS} was to take {seconds}; a step takes 0 seconds or more")

    def snapshot(self) -> Snapshot:
        """All series now. The histogram appears as cumulative buckets by upper bound in seconds, a count and a sum."""
        with self._lock:
            shot, counts, seconds = dict(self._values), list(self._buckets), self._seconds
        shot |= zip(_BUCKETS, accumulate(counts), strict=True)
        shot[f"{STEP_SECONDS}_count"] = sum(counts)
        shot[f"{STEP_SECONDS}_sum"] = seconds
        return shot

    def check(self) -> None:
        """Raise PactViolation if a count was refused, or if more lookups missed than were made."""
        if self._refused is not None:
            raise PactViolation(self._refused)
        with self._lock:
            lookups = self._values["lookups"]
            misses = sum(self._values[series("misses", reason)] for reason in MissReason)
        if misses > lookups:
            raise PactViolation(f"{misses} lookups missed of {lookups} made; every miss is one of the lookups")

    def _key(self, kind: Kind, name: str, label: str) -> str:
        key = _KEYS[kind].get((name, label))
        if key is not None:
            return key
        if (name, label) in _SERIES:
            raise PactViolation(f"{name} is a {_BY_NAME[name].kind}, not a {kind}")
        raise PactViolation(f"no metric {name!r} with label {label!r}; METRICS in kvpact.metrics lists them all")

    def _refuse(self, message: str) -> None:
        self._values["refused_counts"] += 1
        self._refused = self._refused or message


def explain_misses(snapshot: Mapping[str, float]) -> str:
    """One readable line: how many lookups hit, and the most frequent reason of the misses."""
    lookups, spared = int(snapshot["lookups"]), int(snapshot["spared_lookups"])
    if not lookups + spared:
        return "no lookups yet: the engine has not asked; is the connector named in its --kv-transfer-config?"
    misses = {reason: int(snapshot[series("misses", reason)]) for reason in MissReason}
    missed = sum(misses.values())
    line = f"{lookups - missed:,} of {lookups:,} lookups hit"
    if spared:
        line += f" ({spared:,} more prompts needed none: the engine itself had every block that could be loaded)"
    if not missed:
        return line
    reason = max(misses, key=lambda each: misses[each])
    hint = MISS_HINTS[reason] + (_why_not_stored(snapshot) if reason is MissReason.NOT_STORED else "")
    return f"{line}; most misses ({misses[reason]:,} {reason}) because {hint}"


def _why_not_stored(snapshot: Mapping[str, float]) -> str:
    saved, dropped = int(snapshot["saved_blocks"]), int(snapshot["dropped_blocks"])
    evicted = int(sum(snapshot[series("evicted_blocks", tier)] for tier in TIER_LABELS))
    if not saved:
        dropped_too = f" ({dropped:,} blocks dropped)" if dropped else ""
        others = "what a store holds of another model, dtype, block size or layout does not fit, see `kvpact inspect`"
        return f"; nothing was saved yet{dropped_too}; {others}"
    if snapshot.get("unnamed_weights"):
        return (
            "; since the last reset the engine's weights have no name, so that it has what it stores for itself alone: "
            "say `kvpact_set_weights_version`, see docs/weights.md"
        )
    if evicted * 2 > saved:
        return f"; {evicted:,} of {saved:,} saved blocks were evicted, so more memory or a larger tier would help"
    return "; the prompts do not repeat, or differ early (a date, an id or a name in the first block is enough)"
