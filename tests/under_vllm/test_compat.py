"""What `kvpact.vllm.compat` finds on a release is what the table of releases says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import kvpact
from kvpact.errors import ConfigError
from kvpact.vllm.compat import layouts
from kvpact.vllm.compat.objects import replays_full_graph
from kvpact.vllm.compat.releases import SERIES, is_known, refuse_older
from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release

PROBE = """
import json
from importlib.util import find_spec
from vllm.v1.metrics.stats import PrefixCacheStats
from kvpact.vllm import PactConnector
from kvpact.vllm.compat import objects, scheduler
from kvpact.vllm.compat.shape import what_is_missing

counted = PrefixCacheStats()
objects.correct_hit_sources(counted, {"seen": 1})
print(json.dumps([one.what for one in what_is_missing(None, None, PactConnector)]))  # of every configuration
print(json.dumps({
    "pins_host_memory": find_spec("vllm.v1.kv_offload.cpu.host_register") is not None,
    "tells_of_sleep": scheduler.TELLS_OF_SLEEP,
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
    missing, offers = map(json.loads, done.stdout.splitlines()[-2:])
    assert offers == asdict(RELEASES[release])
    assert missing == [] or release < "0.32"


def test_a_release_is_known_by_its_series() -> None:
    assert tuple(version.rpartition(".")[0] for version in RELEASES) == SERIES
    assert all(is_known(version) for version in ("0.30.0", "0.32.0+cpu", "0.33.1"))
    assert not any(is_known(version) for version in ("0.29.0", "0.3.2", "0.300.0", "0.330.1", "1.0.0"))


def test_older_releases_are_refused_in_one_line_and_no_others() -> None:
    assert len(RELEASES) == 4
    for version in ("0.30.0rc1", "0.33.1+cu129", "0.34.0", "1.0", "0.1.dev1+g123abc", "dev", ""):
        refuse_older(version)
    for version in ("0.19.1", "0.29.0+cpu", "0.3.2"):
        with pytest.raises(ConfigError) as refused:
            refuse_older(version)
        assert str(refused.value) == (
            f"vLLM {version} is installed, and kvpact serves 0.30 and later: install one of 0.30 to 0.33, which are "
            "tested; kvpact's commit b9a0c7b9 is the last one that serves 0.28 and 0.29"
        )


def test_blocks_asks_for_a_layout_and_auto_does_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [layouts.wanted_layout(kv_layout) for kv_layout in ("auto", "engine", "blocks")] == [None, None, "BLHNC"]
    monkeypatch.setattr(layouts, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert [layouts.wanted_layout(kv_layout) for kv_layout in ("auto", "engine")] == ["BLHNC", None]


@pytest.mark.parametrize(
    ("mode", "metadata", "full"),
    [("NONE", {}, False), ("PIECEWISE", {}, False), ("FULL", {}, True), ("NONE", None, True), (None, {}, False)],
)
def test_a_forward_pass_without_the_layers_hooks_is_known(mode: str | None, metadata: object, full: bool) -> None:
    """Metadata is None where a model runner replays a full graph without a context."""
    runtime_mode = SimpleNamespace(name=mode) if mode is not None else None
    context = SimpleNamespace(cudagraph_runtime_mode=runtime_mode, attn_metadata=metadata)
    assert replays_full_graph(context) is full
