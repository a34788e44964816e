"""kvpact's counts in vLLM's own metrics: the log line and the Prometheus endpoint.

Owns the translation of a `Metrics` snapshot into vLLM's connector statistics. Counts only what `kvpact.metrics` names.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.metrics import FAMILIES, MEMORY, MOST_SAMPLES, PREFIX, STEP_SECONDS, Snapshot, bounds_of, series
from kvpact.tiers.urls import tier_labels

INTERVAL_SECONDS = 1.0
"""vLLM gets counts at most this often, in seconds: collecting them takes time, and no scraper is faster."""

PATIENCE_SECONDS = 0.5
"""Seconds that due counts wait for a step with time to collect them."""

SLOW_STEP_SECONDS = 1e-3
"""A scheduler step should spend at most this many seconds in kvpact (P11)."""

_KINDS = {metric.name: metric.kind for metric in FAMILIES}


def _kind_of(name: str) -> str:
    """The kind of one series; "" for a part of a histogram in a snapshot."""
    return _KINDS.get(name.partition("{")[0], "")


_ONE_OF_SEVERAL_SERVERS = {"multiprocess_mode": "mostrecent"}
"""The page shows the last value of all API servers of an endpoint: each gets an engine's counts now and then."""


@dataclass
class PactStats(KVConnectorStats):
    """The counts since the last statistics; gauges as they are. `data` is series name -> value.

    A histogram's value is a list of times.
    """

    def reset(self) -> None:
        """Forget all counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add later counts; a gauge keeps its latest value, a histogram its latest times."""
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data[name] = [*self.data.get(name, ()), *value][-MOST_SAMPLES:]
            else:
                self.data[name] = value if _kind_of(name) == "gauge" else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values in the log line."""
        shown = ("lookups", "promised_tokens", "used_tokens", "failed_tokens", "saved_blocks", "leases_held")
        return {f"kvpact {name}": self.data.get(name, 0) for name in shown}

    def is_empty(self) -> bool:
        """True if nothing was counted."""
        return not self.data


class StatsCollector:
    """Takes the difference between two snapshots of the counts, at most once per interval.

    One scheduler step takes the snapshot and the next one the difference: both together would take a good part of a
    millisecond. Before the engine rests it makes one more step, which does both, whatever the interval says: until the
    next request nobody calls again.
    """

    def __init__(
        self,
        observe: Callable[[], Snapshot],
        clock: Callable[[], float] = time.monotonic,
        collect_samples: Callable[[], Mapping[str, Sequence[float]]] = dict,
    ) -> None:
        self._observe = observe
        self._collect_samples = collect_samples
        self._clock = clock
        self.due_at = 0.0  # when `collect` next has something to do, on `clock`
        self._shot: Snapshot | None = None
        self._last: Mapping[str, float] = {}
        self.is_behind = False
        """True if steps were made since the counts were taken last."""
        self._asked_at: float | None = None
        """Since when a last step is asked for."""

    @property
    def is_due(self) -> bool:
        """True if `collect` has something to do; if not, call it later, and note that counts are behind."""
        return self._asked_at is not None or self._clock() >= self.due_at

    def ask_for_step(self) -> bool:
        """Ask for one more step if counts are behind; returns True while an engine with nothing else to do must make
        it, which is not for longer than such a step takes."""
        now = self._clock()
        if self._asked_at is None and self.is_behind:
            self._asked_at = now
        return self._asked_at is not None and now < self._asked_at + PATIENCE_SECONDS

    @property
    def can_wait(self) -> bool:
        """True if a step without time may leave the next `collect` to a later step."""
        return self._asked_at is None and self._clock() < self.due_at + PATIENCE_SECONDS

    def collect(self) -> PactStats | None:
        """The difference from the last snapshot to the one that the call before this took; None at every other call.

        In a step that `ask_for_step` asked for, the difference to the counts as they are.
        """
        now = self._clock()
        is_last = self._asked_at is not None
        self._asked_at = None
        self.is_behind = not is_last
        if self._shot is None and not is_last:
            self._shot = self._observe() if now >= self.due_at else None
            return None
        self.due_at = now + INTERVAL_SECONDS
        shot = self._observe() if is_last or self._shot is None else self._shot
        self._shot = None
        steps = shot[f"{STEP_SECONDS}_count"]
        fast = shot[f'{STEP_SECONDS}_bucket{{le="{SLOW_STEP_SECONDS}"}}']
        shot |= {"steps": steps, "slow_steps": steps - fast, "spent_seconds": shot[f"{STEP_SECONDS}_sum"]}
        changed = {
            name: value if kind == "gauge" else value - self._last.get(name, 0)
            for name, value in shot.items()
            if value != self._last.get(name) and (kind := _kind_of(name))
        }
        self._last = shot
        return PactStats(data={**changed, **self._collect_samples()}) if changed else None


class PactPromMetrics(KVConnectorPromMetrics):
    """Every metric of `kvpact.metrics` as `vllm:kvpact_<name>`, one series per engine and label value.

    Those of configured tiers are there from the start; what an engine tells in labels, and what exists only
    `when_known`, comes with its first counts.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._engines = per_engine_labelvalues
        self._families: dict[str, Any] = {}
        self._record: dict[tuple[int, str], Callable[[float], None]] = {}
        tiers = _tiers_of(vllm_config)
        classes = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        for metric in FAMILIES:
            beside: Mapping[str, Mapping[str, object]] = {
                "gauge": _ONE_OF_SEVERAL_SERVERS,
                "histogram": {"buckets": bounds_of(metric.name)},
            }
            self._families[metric.name] = metric_types[classes[metric.kind]](
                name=f"{PREFIX}{metric.name}",
                documentation=metric.meaning,
                labelnames=[*labelnames, *metric.label_names],
                **beside.get(metric.kind, {}),
            )
            for engine in per_engine_labelvalues:
                for label in () if metric.when_known else metric.label_values(tiers):
                    self._recorder(engine, series(metric.name, label) if metric.label else metric.name)

    def _recorder(self, engine: int, name: str) -> Callable[[float], None] | None:
        """Recorder of a value of one series; None for one of another release."""
        if (engine, name) not in self._record:
            family = name.partition("{")[0]
            if family not in self._families or engine not in self._engines:
                return None
            labels = re.findall('="([^"]*)"', name)
            one = self._families[family].labels(*self._engines[engine], *labels)
            how = {"counter": "inc", "gauge": "set", "histogram": "observe"}[_KINDS[family]]
            self._record[engine, name] = getattr(one, how)
        return self._record[engine, name]

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one `PactStats`; a series of another release is ignored."""
        for name, value in transfer_stats_data.items():
            if (record := self._recorder(engine_idx, name)) is not None:
                for each in value if isinstance(value, list) else (value,):
                    record(each)


def _tiers_of(vllm_config: Any) -> tuple[str, ...]:
    """The labels of the configured tiers; without those below memory if the engine, too, cannot read its settings."""
    settings = vllm_config.kv_transfer_config.kv_connector_extra_config
    with suppress(ConfigError):
        return MEMORY, *tier_labels(load_config(settings, os.environ).tiers)
    return (MEMORY,)
