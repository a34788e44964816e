"""A value for every key that a user may set, for the tests that follow the keys into an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SECRET = "hunter2"
BLOCK_BYTES = 512 << 10
"""Of the tiny model."""


def settings_of_a_user(directory: Path, redis: str) -> dict[str, Any]:
    """A value for every key, none of them the default but for `save`, which excludes `match_at = "step"`."""
    return {
        "memory": 96 * BLOCK_BYTES,
        "tiers": [f"disk://{directory}/slabs?capacity=64MiB", f"redis://:{SECRET}@{redis}/0?timeout=10s"],
        "prepare_deadline": "40s",
        "plan_lifetime": "50s",
        "load_deadline": "45s",
        "write_queue": "96MiB",
        "shutdown_timeout": "9s",
        "sync_load_budget": "512KiB",
        "min_match_blocks": 2,
        "pool": "engine",
        "save": "eager",
        "admit": "second-use",
        "tenants": {"alice": {"salt_file": f"{directory}/alice", "memory": "25%"}},
        "hints": "clients",
        "match_at": "step",
        "require": "all",
        "require_tiers": True,
        "step_deadline": "5s",
        "recompute_if_faster": False,
        "record_key_file": f"{directory}/record-key",
        "model_id": "tiny@2026-01",
        "weights_version": "step-1200",
        "share_drawn_epochs": True,
        "io_threads": 3,
        "gpu": "off",
        "kv_layout": "blocks",
        "huge_pages": "off",
        "layerwise": False,
        "stats_file": f"{directory}/stats.json",
        "timeline": f"{directory}/timeline",
    }


ALONE = "cache"
"""The key that excludes tiers; test_other_caches.py and test_engine_other_caches.py use it."""
