"""Counts of a `PactTier` in the statistics of vLLM's offloading: kvpact's own metrics, under their own names.

Owns the choice of metrics; each is reported when it changes, once a second at most.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvpact.metrics import METRICS, PREFIX, Metric, Metrics, series
from kvpact.tiers.client import TierClient, observe_tier

NAMES: Final = frozenset(
    {
        "capacity_blocks",
        "damaged_records",
        "dropped_writes",
        "evicted_blocks",
        "held_blocks",
        "queued_write_bytes",
        "read_blocks",
        "read_bytes",
        "tier_failures",
        "tier_up",
        "used_bytes",
        "written_blocks",
        "written_bytes",
    }
)
TOLD: Final[tuple[Metric, ...]] = tuple(metric for metric in METRICS if metric.name in NAMES)

INTERVAL_SECONDS: Final = 1.0


def metric_definitions() -> dict[str, Any]:
    """The metrics of all `PactTier`s, each by tier."""
    kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
    return {f"{PREFIX}{metric.name}": kinds[metric.kind](metric.meaning, metric.label_names) for metric in TOLD}


class TierStats:
    """Counts of one tier since the last report."""

    def __init__(self, metrics: Metrics, client: TierClient, row_bytes: int) -> None:
        self._metrics = metrics
        self._client = client
        self._row_bytes = row_bytes
        self._due_at = 0.0
        self._last = dict[str, float]()
        metrics.use_tiers((client.name,))

    def changes(self, now: float) -> OffloadingConnectorStats | None:
        """Counts that changed since the last call; None if it is not due yet."""
        if now < self._due_at:
            return None
        self._due_at = now + INTERVAL_SECONDS
        observe_tier(self._metrics, self._client, self._row_bytes)
        label = self._client.name
        shot = self._metrics.snapshot()
        stats = OffloadingConnectorStats()
        for metric in TOLD:
            name = series(metric.name, label)
            if name not in shot or shot[name] == self._last.get(name, None if metric.when_known else 0):
                continue
            value = shot[name]
            full = f"{PREFIX}{metric.name}"
            if metric.kind == "gauge":
                stats.set_gauge(full, value, (label,))
            else:
                stats.increase_counter(full, value - self._last.get(name, 0), (label,))
            self._last[name] = value
        return stats
