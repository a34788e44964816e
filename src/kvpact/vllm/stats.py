"""kvpact's counts in vLLM's own metrics: the log line and the Prometheus endpoint.

Owns the translation of a `Metrics` snapshot into vLLM's connector statistics. Counts only what `kvpact.metrics` names.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpact.metrics import METRICS, STEP_SECONDS, Metric, Snapshot, series

INTERVAL_SECONDS = 1.0
"""vLLM gets counts at most this often, in seconds: collecting them takes time, and no scraper is faster."""

PATIENCE_SECONDS = 0.5
"""Seconds for which counts that are due wait for a step that has time to collect them."""

SLOW_STEP_SECONDS = 1e-3
"""A scheduler step should spend at most this many seconds in kvpact (P11)."""

_GAUGES = frozenset(series(m.name, label) for m in METRICS if m.kind == "gauge" for label in m.label_values)


_ONE_OF_SEVERAL_SERVERS = {"multiprocess_mode": "mostrecent"}
"""The page shows the last value of all API servers that share an endpoint: each hears of an engine now and then."""


@dataclass
class PactStats(KVConnectorStats):
    """The counts since the last statistics; gauges as they are. `data` is series name -> value."""

    def reset(self) -> None:
        """Forget all counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add later counts; a gauge keeps its latest value."""
        for name, value in other.data.items():
            self.data[name] = value if name in _GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values in the log line."""
        shown = ("lookups", "promised_tokens", "used_tokens", "failed_tokens", "saved_blocks", "leases_held")
        return {f"kvpact {name}": self.data.get(name, 0) for name in shown}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class StatsCollector:
    """Takes the difference between two snapshots of the counts, at most once per interval.

    One scheduler step takes the snapshot and the next one the difference: both together would take a good part of a
    millisecond. Before the engine rests it makes one more step, which does both, whatever the interval says: until the
    next request nobody calls again.
    """

    def __init__(self, observe: Callable[[], Snapshot], clock: Callable[[], float] = time.monotonic) -> None:
        self._observe = observe
        self._clock = clock
        self.due_at = 0.0  # when `collect` next has something to do, on `clock`
        self._shot: Snapshot | None = None
        self._last: Mapping[str, float] = {}
        self.is_behind = False
        """Whether steps were made since the counts were taken last."""
        self._asked_at: float | None = None
        """Since when a last step is asked for."""

    @property
    def is_due(self) -> bool:
        """Whether `collect` has something to do; if not, call it later, and note that counts are behind."""
        return self._asked_at is not None or self._clock() >= self.due_at

    @property
    def wants_step(self) -> bool:
        """Whether an engine with nothing else to do must step once more. Not for longer than such a step takes."""
        now = self._clock()
        if self._asked_at is None and self.is_behind:
            self._asked_at = now
        return self._asked_at is not None and now < self._asked_at + PATIENCE_SECONDS

    @property
    def can_wait(self) -> bool:
        """Whether a step without time may leave the next `collect` to a later step."""
        return self._asked_at is None and self._clock() < self.due_at + PATIENCE_SECONDS

    def collect(self) -> PactStats | None:
        """The difference from the last snapshot to the one that the call before this took; None at every other call.

        In a step that `wants_step` asked for, the difference to the counts as they are.
        """
        now = self._clock()
        is_last, self._asked_at = self._asked_at is not None, None
        self.is_behind = not is_last
        if self._shot is None and not is_last:
            self._shot = self._observe() if now >= self.due_at else None
            return None
        self.due_at = now + INTERVAL_SECONDS
        shot, self._shot = self._observe() if is_last or self._shot is None else self._shot, None
        steps, fast = shot[f"{STEP_SECONDS}_count"], shot[f'{STEP_SECONDS}_bucket{{le="{SLOW_STEP_SECONDS}"}}']
        totals = {name: value for name, value in shot.items() if not name.startswith(STEP_SECONDS)}
        totals |= {"steps": steps, "slow_steps": steps - fast, "step_seconds": shot[f"{STEP_SECONDS}_sum"]}
        changed = {
            name: value if name in _GAUGES else value - self._last.get(name, 0)
            for name, value in totals.items()
            if value != self._last.get(name, 0)
        }
        self._last = totals
        return PactStats(data=changed) if changed else None


STEP_COUNTERS = (
    Metric("steps", "counter", "scheduler", "steps"),
    Metric("slow_steps", "counter", "scheduler", "steps that spent more than 1 ms in kvpact"),
    Metric("step_seconds", "counter", "seconds", "spent in kvpact in scheduler steps"),
)
"""The counts that vLLM gets instead of the histogram of steps."""


class PactPromMetrics(KVConnectorPromMetrics):
    """Every counter and gauge of `kvpact.metrics` as `vllm:kvpact_<name>`, one series per engine and label value."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._record: dict[tuple[int, str], Callable[[float], None]] = {}
        for metric in (*METRICS, *STEP_COUNTERS):
            if metric.kind == "histogram":
                continue
            extra = [metric.label] if metric.label else []
            family = metric_types[Gauge if metric.kind == "gauge" else Counter](
                name=f"vllm:kvpact_{metric.name}",
                documentation=f"{metric.unit} {metric.meaning}",
                labelnames=[*labelnames, *extra],
                **(_ONE_OF_SEVERAL_SERVERS if metric.kind == "gauge" else {}),
            )
            for engine, values in per_engine_labelvalues.items():
                for label in metric.label_values:
                    one = family.labels(*values, *([label] if extra else []))
                    name = series(metric.name, label) if extra else metric.name
                    self._record[engine, name] = one.set if metric.kind == "gauge" else one.inc

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one `PactStats`; a series of another release is ignored."""
        for name, value in transfer_stats_data.items():
            if (record := self._record.get((engine_idx, name))) is not None:
                record(value)
