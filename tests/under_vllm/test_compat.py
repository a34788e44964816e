"""What `kvpact.vllm.compat` finds on a release is what its table of releases says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import kvpact
from kvpact.testkit.vllm.releases import fetch_release, installed_release
from kvpact.vllm.compat.releases import RELEASES, is_known

PROBE = """
import json
from dataclasses import fields
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.metrics.stats import PrefixCacheStats
from kvpact.vllm.compat import objects, scheduler

counted = PrefixCacheStats()
objects.set_hit_sources(counted, lambda hits: {"seen": hits})
print(json.dumps({
    "block_tables": hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"),
    "failed_requests": scheduler.TAKES_FAILED_REQUESTS,
    "counts_held_blocks": scheduler.COUNTS_HELD_BLOCKS,
    "hits_by_source": "seen" in getattr(counted, "hits_by_source", {}),
}))
"""


@pytest.mark.parametrize(
    "release",
    [pytest.param(one, marks=[] if one == installed_release() else pytest.mark.soak) for one in RELEASES],
)
@pytest.mark.timeout(300)
def test_the_table_says_what_each_release_offers(release: str, tmp_path: Path) -> None:
    path = [] if release == installed_release() else [str(fetch_release(release))]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, str(Path(kvpact.__file__).parents[1])]),
        "VLLM_CACHE_ROOT": str(tmp_path),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == asdict(RELEASES[release])


def test_a_release_is_known_by_its_series() -> None:
    assert all(is_known(version) for version in ("0.26.0", "0.32.0+cpu", "0.33.1"))
    assert not any(is_known(version) for version in ("0.19.1", "0.3.2", "0.260.0", "0.330.1", "1.0.0"))
