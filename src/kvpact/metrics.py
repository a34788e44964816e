"""kvpact's metrics: one table of counters, gauges and histograms, with labels from small fixed sets.

Owns the numbers and their meaning. A cache fixes the set of series when it knows its tiers, so it does not grow with
requests, keys or time. Decides nothing. A wrong count never reaches an exporter: it is refused, and `check` reports it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from threading import Lock
from typing import Final, Literal, TypeAlias

from kvpact.contract import ExternalMatchExit
from kvpact.errors import PactViolation
from kvpact.hints.schema import Brought, HintResult
from kvpact.tiers.backends import MEMORY as MEMORY
from kvpact.tiers.backends import NEIGHBOURS

Snapshot: TypeAlias = dict[str, float]
"""Series name to value, as `series` writes it; plain numbers, so any encoder takes it. Counts of things are `int`."""


class EndReason(StrEnum):
    """Reason why a plan ended. The first two are settlements, the others reasons of an abort.

    From `NO_BLOCKS` on, and `DECLINED`: the exits that an engine names, as in `contract.ExternalMatchExit`.
    """

    LOADED = "loaded"
    SHORT = "short"
    DECLINED = ExternalMatchExit.DECLINED.value
    SUPERSEDED = ExternalMatchExit.SUPERSEDED.value
    NOT_RENEWED = ExternalMatchExit.NOT_RENEWED.value
    REQUEST_FINISHED = "request_finished"
    DEADLINE = "deadline"
    TIER_FAILED = "tier_failed"
    YIELDED = "yielded"
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
    """Reason why a lookup promised nothing."""

    NOT_STORED = "not_stored"
    TOO_SHORT = "too_short"
    UNKNOWN_IDENTITY = "unknown_identity"
    DISABLED = "disabled"
    MUST_COMPUTE = "must_compute"
    UNALIGNED = "unaligned"
    FAILED_BEFORE = "failed_before"
    NO_ROOM = "no_room"
    DEADLINE = "deadline"
    RECOMPUTE_FASTER = "recompute_faster"
    CROWDED = "crowded"
    ASKED_AT_STEP = "asked_at_step"
    OVERDUE = "overdue"
    TIER_DOWN = "tier_down"
    NOT_DELIVERED = "not_delivered"
    STATE_MISSING = "state_missing"


class UnmadeCheck(StrEnum):
    """Reason why a due check of a copy was not made, so that the copy counts as neither right nor wrong (H117)."""

    GIVEN_UP = "given_up"
    FAILED = "failed"


MISS_HINTS: Mapping[MissReason, str] = {
    MissReason.NOT_STORED: "the prompt's first block is not stored",
    MissReason.TOO_SHORT: "no whole block before the prompts' last token, or fewer than `min_match_blocks`, can match",
    MissReason.UNKNOWN_IDENTITY: "the requests have inputs without a content digest, which kvpact never stores",
    MissReason.DISABLED: "the cache is switched off; the log has the reason, at the start or at an error",
    MissReason.MUST_COMPUTE: "the requests must compute their prompts, for example for prompt log-probabilities",
    MissReason.UNALIGNED: "the engine itself had part of a block, and a match begins at whole blocks of each KV group",
    MissReason.FAILED_BEFORE: "a load of the same request failed, so it gets no other match; see damaged_records",
    MissReason.NO_ROOM: "no memory slot was free to stage the blocks; raise `memory`",
    MissReason.CROWDED: "requests are preempted repeatedly before they use the loaded blocks: too few KV blocks",
    MissReason.RECOMPUTE_FASTER: "the engine computes faster than the tier below memory delivers; see prefill_speed",
    MissReason.ASKED_AT_STEP: "the workers ask shared tiers when the step begins; see step_lookups and step_hits",
    MissReason.OVERDUE: "a copy into the engine's memory did not end by `load_deadline`; nothing is loaded after it",
    MissReason.TIER_DOWN: "a tier that may hold the blocks failed, is paused, or is not reachable; see tier_up",
    MissReason.NOT_DELIVERED: "a tier reported the blocks and did not deliver them; see tier_failures",
    MissReason.STATE_MISSING: "attention blocks are stored, no state at their end; a step now ends there, to leave one",
    MissReason.DEADLINE: "`prepare_deadline` passed before a tier, a digest or the engine's steps were ready",
}


@dataclass(frozen=True, slots=True)
class StartVerdict:
    """Limits of the cache found at the start; they hold until the engine ends, and the log has them once."""

    unserved: str = ""
    """Reason why no request can be cached, and the remedy; "" if some can."""
    notes: tuple[str, ...] = ()
    """Other limits: classes, statistics, sizes of blocks."""


Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `meaning` is a sentence that names the unit.

    `labels` is the closed set of values of the label `label`; the labels of tiers are known later. A gauge with
    `info_labels` is there once it is set: to 1 if those labels are its information, or by tenant. A metric is 0 from
    the start, unless it exists only `when_known`, because a 0 would be a statement.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    label: str = ""
    labels: Iterable[str] = ()
    info_labels: tuple[str, ...] = ()
    when_known: bool = False

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels."""
        return self.info_labels or ((self.label,) if self.label else ())

    def label_values(self, tiers: Sequence[str]) -> tuple[str, ...]:
        """Every value of the label, with these tiers; one empty string for a metric without a label."""
        if self.info_labels:
            return ()
        return (*(tiers if self.label == "tier" else ()), *self.labels) or ("",)


def _by_tier(name: str, kind: Kind, unit: str, meaning: str, *more: str) -> Metric:
    return Metric(name, kind, unit, meaning, "tier", more)


def _info(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, meaning, info_labels=labels)


STEP_SECONDS = "step_seconds"
STEP_BOUNDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
"""Upper bounds of the buckets, in seconds: from 10 us, not noticeable, to 100 ms, far above what P11 allows."""

WAIT_BOUNDS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Upper bounds, in seconds, of requests' waits: from a look-up in a near store to `load_deadline`."""

MOST_SAMPLES = 32
"""Times of one series that are kept for another process until `collect_samples`; all are in the buckets."""

METRICS: tuple[Metric, ...] = (
    Metric("promised_tokens", "counter", "tokens", "Tokens promised to the engine, once per plan."),
    Metric("committed_tokens", "counter", "tokens", "Promised tokens that the engine decided to load."),
    Metric("withdrawn_tokens", "counter", "tokens", "Promised tokens that were not committed."),
    Metric("loaded_tokens", "counter", "tokens", "Committed tokens whose keys and values arrived."),
    Metric("failed_tokens", "counter", "tokens", "Committed tokens that did not arrive, so the engine computed them."),
    Metric("used_tokens", "counter", "tokens", "Tokens that kvpact saved the engine computing, each position once."),
    _by_tier("used_tokens_from", "counter", "tokens", "Used tokens by tier, by the bytes found in each.", NEIGHBOURS),
    Metric("used_again_tokens", "counter", "tokens", "Tokens skipped again by the same request, after a preemption."),
    Metric("spared_prefill_seconds", "counter", "seconds", "Seconds of prefill saved, at the speed measured then."),
    Metric("overdue_loads", "counter", "loads", "Loads not ended by their deadline; the engine computed all tokens."),
    Metric("plans_opened", "counter", "plans", "Plans opened, each of which ends exactly once."),
    Metric("plans_ended", "counter", "plans", "Plans ended, by reason.", "reason", EndReason),
    Metric("lookups", "counter", "lookups", "Lookups of prompts; repeats with the same result do not count."),
    Metric("hits", "counter", "lookups", "Lookups that promised tokens."),
    Metric("misses", "counter", "lookups", "Lookups that promised nothing, by reason.", "reason", MissReason),
    Metric("lost_answer_tokens", "counter", "tokens", "Tokens of answers in later prompts that lacked a state to hit."),
    Metric("spared_lookups", "counter", "prompts", "Prompts not looked up: the engine itself had all loadable blocks."),
    Metric("step_lookups", "counter", "lookups", "Lookups by workers at a step's beginning; `misses` may count them."),
    Metric("step_hits", "counter", "lookups", "Lookups at a step's beginning that supplied tokens."),
    Metric("declined_blocks", "counter", "blocks", "Blocks in a tier that were not loaded: computing them is faster."),
    Metric("saved_blocks", "counter", "blocks", "Blocks computed by the engine, copied out and reported by all ranks."),
    Metric(
        "dropped_blocks",
        "counter",
        "blocks",
        "Blocks computed and not saved: no free slot, a failed or cancelled copy, an earlier block lost.",
    ),
    _by_tier("evicted_blocks", "counter", "blocks", "Blocks evicted to make room."),
    _by_tier("read_blocks", "counter", "blocks", "Blocks read from the tier, verified."),
    _by_tier("read_bytes", "counter", "bytes", "Bytes read from the tier."),
    _by_tier("written_blocks", "counter", "blocks", "Blocks written to the tier."),
    _by_tier("written_bytes", "counter", "bytes", "Bytes written to the tier."),
    _by_tier("damaged_records", "counter", "records", "Records with a wrong checksum or header; none was served."),
    _by_tier("dropped_writes", "counter", "blocks", "Blocks not written: queue full, a failure, or no room in memory."),
    _by_tier("skipped_lookups", "counter", "lookups", "Lookups skipped because the tier was paused or too slow."),
    _by_tier("tier_failures", "counter", "operations", "Operations of the tier that failed or did not end in time."),
    Metric("events_sent", "counter", "blocks", "Blocks in KV events sent, stored and removed ones."),
    Metric("events_late", "counter", "blocks", "Stored blocks not announced, as too many waited; later requests do."),
    Metric("hints", "counter", "hints", "Hints of clients, by outcome; see docs/hints.md.", "outcome", HintResult),
    Metric("brought_blocks", "counter", "blocks", "Blocks read before an expected turn, by use.", "use", Brought),
    Metric("resets", "counter", "resets", "Resets; blocks stored before one are not served after it."),
    Metric("refuted_copies", "counter", "engines", "Engines that found a wrong device copy and stopped copying."),
    Metric("unproven_copies", "gauge", "engines", "Engines that still check every device copy: tiers get no blocks."),
    Metric("unmade_checks", "counter", "checks", "Checks of copies not made, by reason.", "reason", UnmadeCheck),
    Metric("hook_errors", "counter", "errors", "Errors caught in an engine's hook; each costs at most a hit."),
    Metric("refused_counts", "counter", "errors", "Errors of counting: a counter would have decreased."),
    Metric("unnamed_weights", "gauge", "engines", "Engines that share nothing since a reset; set `weights_version`."),
    Metric("open_plans", "gauge", "plans", "Plans prepared, committed or loading now."),
    Metric("leases_held", "gauge", "leases", "Leases that open plans hold now."),
    Metric(
        "tier_up",
        "gauge",
        "tiers",
        "Tiers in use: 1, or 0 if not reachable yet or paused after failures; absent until the tier was asked.",
        "tier",
        when_known=True,
    ),
    _by_tier("held_blocks", "gauge", "blocks", "Blocks that the tier holds now."),
    Metric("retained_blocks", "gauge", "blocks", "Blocks in memory that clients' hints retain now, a fifth at most."),
    _info("tenant_blocks", "blocks", "Blocks of memory by tenant: held, its share, retained.", "kind", "tenant"),
    _by_tier("capacity_blocks", "gauge", "blocks", "Blocks that the tier can hold."),
    _by_tier("used_bytes", "gauge", "bytes", "Bytes that the tier's store reports, other writers' included."),
    _by_tier("queued_write_bytes", "gauge", "bytes", "Bytes that wait to be written to the tier now."),
    _by_tier("slow_tiers", "gauge", "tiers", "Tiers not asked lately because computing is faster: 1 or 0."),
    _by_tier("read_bytes_per_second", "gauge", "bytes per second", "Bytes per second arriving from the tier, lately."),
    Metric("prefill_speed", "gauge", "tokens per second", "Tokens per second of prompts computed, lately."),
    _info("tier_info", "tiers", "Tiers, each with its URL without secrets; always 1.", "tier", "url"),
    _info("info", "engines", "Engines as they were started; always 1.", "version", "block_size", "ranks"),
    _by_tier("lookup_seconds", "histogram", "seconds", "Seconds that the tier took to look up a prompt's blocks."),
    Metric("load_seconds", "histogram", "seconds", "Seconds from a plan's commit to its load's last report."),
    Metric("save_seconds", "histogram", "seconds", "Seconds from the order of a save to its last report."),
    Metric(STEP_SECONDS, "histogram", "seconds", "Seconds spent by kvpact in the scheduler's process in one step."),
)

STEP_COUNTERS: Final = (
    Metric("steps", "counter", "steps", "Scheduler steps."),
    Metric("slow_steps", "counter", "steps", "Scheduler steps that spent more than 1 ms in kvpact."),
    Metric("spent_seconds", "counter", "seconds", "Seconds spent by kvpact in all scheduler steps."),
)
"""Counters of all steps on an engine's endpoint, beside the samples of the histogram."""

FAMILIES: Final = (*METRICS, *STEP_COUNTERS)
"""Every family on an engine's endpoint, where its name begins with `PREFIX`."""

PREFIX: Final = "vllm:kvpact_"

_BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def bounds_of(name: str) -> Sequence[float]:
    """Upper bounds of a histogram's buckets, in seconds."""
    return STEP_BOUNDS if name == STEP_SECONDS else WAIT_BOUNDS


def series(name: str, *labels: str) -> str:
    """Key of one series in a snapshot: `misses{reason="no_room"}`, or the bare name where there is no label."""
    named = zip(_BY_NAME[name].label_names, labels, strict=False)
    text = ",".join(f'{label}="{value}"' for label, value in named)
    return f"{name}{{{text}}}" if text else name


def tiers_in(snapshot: Iterable[str], metric: str = "capacity_blocks") -> list[str]:
    """Labels of the tiers for which a snapshot has this metric, memory first, then in the user's order."""
    head = f'{metric}{{tier="'
    return [name.removeprefix(head)[:-2] for name in snapshot if name.startswith(head)]


@dataclass(slots=True)
class _Times:
    """One series of a histogram: counts of times by bucket, their sum in seconds, and a few times, drawn evenly."""

    bounds: Sequence[float]
    keys: tuple[str, ...]
    """Names of its buckets, count and sum in a snapshot, made once: too slow for a scheduler's step."""
    counts: list[int]
    total: float = 0.0
    seen: int = 0
    """Times since the samples were taken."""
    samples: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, label: str) -> _Times:
        bounds = bounds_of(name)
        part = series(name, label).removeprefix(name)[1:-1]
        buckets = (f'{name}_bucket{{{part}{"," if part else ""}le="{bound}"}}' for bound in (*bounds, "+Inf"))
        ends = (f"{name}_{end}{{{part}}}" if part else f"{name}_{end}" for end in ("count", "sum"))
        return cls(bounds, (*buckets, *ends), [0] * (len(bounds) + 1))

    def values(self) -> list[float]:
        cumulative = list(accumulate(self.counts))
        return [*cumulative, cumulative[-1], self.total]


class Metrics:
    """Counts of one process. Safe to call from several threads; every call is O(1) but `snapshot`."""

    __slots__ = ("_draw", "_keys", "_lock", "_refused", "_times", "_values")

    def __init__(self) -> None:
        self._lock = Lock()
        self._values: Snapshot = {}
        self._keys: dict[Kind, dict[tuple[str, str], str]] = {"counter": {}, "gauge": {}}
        self._times: dict[tuple[str, str], _Times] = {}
        self._draw = 1
        self._refused: str | None = None
        self.use_tiers(())

    def use_tiers(self, labels: Sequence[str]) -> None:
        """Add series for these tiers; the existing series stay."""
        with self._lock:
            for metric in METRICS:
                for label in metric.label_values((MEMORY, *labels)):
                    key = metric.name, label
                    if metric.kind == "histogram":
                        self._times.setdefault(key, _Times.of(*key))
                    else:
                        name = self._keys[metric.kind][key] = series(*key)
                        if not metric.when_known:
                            self._values.setdefault(name, 0)

    def set_info(self, name: str, *labels: str, value: float = 1) -> None:
        """Set a gauge with these labels, which hold its information or are known late."""
        clean = (label.translate(_UNQUOTED) for label in labels)
        with self._lock:
            self._values[series(name, *clean)] = value

    def add(self, name: str, amount: float = 1, label: str = "") -> None:
        """Count `amount` more. A negative amount is refused (see `check`); an unknown series is a PactViolation."""
        key = self._keys["counter"].get((name, label)) or self._key("counter", name, label)
        with self._lock:
            if amount >= 0:
                self._values[key] += amount
            else:
                self._refuse(f"{series(name, label)} was to grow by {amount}; a counter grows by 0 or more")

    def raise_to(self, name: str, total: int, label: str = "") -> None:
        """Set a total counted by another part, for example the ledger. A total below the last one is refused."""
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

    def observe(self, name: str, seconds: float, label: str = "") -> None:
        """Count one time of a histogram; a negative one is refused."""
        times = self._times.get((name, label))
        if times is None:
            raise self._no_series("histogram", name, label)
        with self._lock:
            if not seconds >= 0:
                self._refuse(f"{series(name, label)} was to take {seconds}; a time is 0 seconds or more")
                return
            times.counts[bisect_left(times.bounds, seconds)] += 1
            times.total += seconds
            times.seen += 1
            if times.seen <= MOST_SAMPLES:
                times.samples.append(seconds)
                return
            self._draw = (self._draw * 1103515245 + 12345) & 0x7FFFFFFF
            at = (self._draw >> 8) % times.seen
            if at < MOST_SAMPLES:
                times.samples[at] = seconds

    def collect_samples(self) -> dict[str, list[float]]:
        """Up to `MOST_SAMPLES` times of each histogram's series since the last call, drawn evenly."""
        taken: dict[str, list[float]] = {}
        with self._lock:
            for key, times in self._times.items():
                if times.seen:
                    taken[series(*key)] = times.samples
                    times.samples = []
                    times.seen = 0
        return taken

    def snapshot(self) -> Snapshot:
        """All series now. A histogram appears as cumulative buckets by upper bound in seconds, a count and a sum."""
        with self._lock:
            shot = dict(self._values)
            for times in self._times.values():
                shot |= zip(times.keys, times.values(), strict=True)
        return shot

    def check(self) -> None:
        """Raise PactViolation if a count was refused, or if there are more hits and misses than lookups."""
        if self._refused is not None:
            raise PactViolation(self._refused)
        with self._lock:
            lookups = self._values["lookups"]
            hits = self._values["hits"]
            misses = sum(self._values[series("misses", reason)] for reason in MissReason)
        if hits + misses > lookups:
            raise PactViolation(f"{hits} lookups hit and {misses} missed of {lookups} made; each does one of the two")

    def _key(self, kind: Kind, name: str, label: str) -> str:
        key = self._keys[kind].get((name, label))
        if key is None:
            raise self._no_series(kind, name, label)
        return key

    def _no_series(self, kind: Kind, name: str, label: str) -> PactViolation:
        if name in _BY_NAME and _BY_NAME[name].kind != kind:
            return PactViolation(f"{name} is a {_BY_NAME[name].kind}, not a {kind}")
        return PactViolation(f"no metric {name!r} with label {label!r}; METRICS in kvpact.metrics lists them all")

    def _refuse(self, message: str) -> None:
        self._values["refused_counts"] += 1
        self._refused = self._refused or message


_UNQUOTED: Final = {ord('"'): "%22", ord("\\"): "%5C", ord("\n"): "%0A"}
"""Escapes of the characters that a label may not hold as `series` writes it."""


def lost_blocks(snapshot: Mapping[str, float]) -> int:
    """Least number of saved blocks that no tier holds any more; never more than were saved.

    No more than memory and the tiers together lack, and no more than each of them did not get or has evicted.
    """
    saved = snapshot.get("saved_blocks", 0)
    lost = saved - sum(value for name, value in snapshot.items() if name.startswith("held_blocks{"))
    for tier in tiers_in(snapshot, "evicted_blocks"):
        given = saved if tier == MEMORY else snapshot.get(series("written_blocks", tier), 0)
        lost = min(lost, saved - given + snapshot[series("evicted_blocks", tier)])
    return int(max(0, lost))


def explain_misses(snapshot: Mapping[str, float]) -> str:
    """One line for people: the number of lookups that hit, and the most frequent reason of the misses."""
    lookups = int(snapshot["lookups"])
    spared = int(snapshot["spared_lookups"])
    if not lookups + spared:
        return "no lookups yet: the engine is starting, or has had no prompt"
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
    saved = int(snapshot["saved_blocks"])
    dropped = int(snapshot["dropped_blocks"])
    lost = lost_blocks(snapshot)
    if not saved:
        dropped_too = f" ({dropped:,} blocks dropped)" if dropped else ""
        others = "blocks of another model, dtype, block size or layout do not fit, see `kvpact inspect`"
        return f"; nothing was saved yet{dropped_too}; {others}"
    if snapshot.get("unnamed_weights"):
        remedy = "call `kvpact_set_weights_version`, see docs/weights.md"
        return f"; since the last reset the engine's weights have no version, so it shares nothing: {remedy}"
    if lost * 2 > saved:
        return f"; {lost:,} of {saved:,} saved blocks are stored nowhere now: more memory or a larger tier would help"
    return "; new prompts always miss the first time; a date or a name near the start makes every prompt new"
