"""What a user can get wrong: a real engine refuses to start with one clear message, or serves on without the tier."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faulty_engine import FaultyEngine

from engines import BLOCK, IN_ONE_PROCESS, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineError, EngineProcess, EngineSettings

pytestmark = pytest.mark.engine


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a slab's table and hardly a block."""
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_an_engine_refuses_to_start_with_a_wrong_configuration_and_says_why(tiny_model: Path, tmp_path: Path) -> None:
    """All other ways to be wrong are tried in test_engine_configuration.py, without an engine's start for each."""
    message = 'kv_role is "kv_producer"; a cache both stores and loads'
    transfer = kvpact_transfer_config() | {"kv_role": "kv_producer"}
    log = tmp_path / "engine.log"
    settings = EngineSettings(tiny_model, transfer, environment=IN_ONE_PROCESS)
    with pytest.raises(EngineError), ForkedEngine(settings, log) as engine:
        engine.wait_ready()
    assert message in log.read_text()
    assert "load model" not in log.read_text().lower(), "it is said before the weights are loaded"


@pytest.mark.proof
def test_an_engine_serves_on_without_the_tiers_that_cannot_be_used(
    start_engine: Callable[..., EngineProcess], faulty_engine: FaultyEngine, tmp_path: Path, full_disk: Path
) -> None:
    """A file, no directory, a capacity for no block, and a full disk; a directory of another engine's can be used."""
    faulty_engine.ask(prompt(204, 2))
    (theirs,) = faulty_engine.slabs.glob("kvpact/*.slab")
    a_file = tmp_path / "a-file"
    a_file.write_text("not a directory")
    orphan = tmp_path / "missing" / "parent" / "slabs"
    settings = {
        "memory": "64MiB",
        "stats_file": str(tmp_path / "stats.json"),
        "tiers": [
            f"disk://{a_file}?capacity=1GiB",
            f"disk://{orphan}?capacity=1GiB",
            f"disk://{tmp_path}/tiny?capacity=64KiB",
            f"disk://{faulty_engine.slabs}?capacity=128MiB",
            f"disk://{full_disk}?capacity=1GiB",
        ],
    }
    config = kvpact_transfer_config(**settings) | {"kv_load_failure_policy": "fail"}
    engine = start_engine(config, environment=IN_ONE_PROCESS)
    asked = [prompt(seed, 5) for seed in range(200, 204)]
    engine.generate(asked)
    local = engine.generate(asked)
    engine.reset_prefix_cache()
    warm = engine.generate(asked)
    assert [output.cached_tokens for output in warm] == [5 * BLOCK] * 4
    assert all(one.same_answer(other) for one, other in zip(warm, local, strict=True))
    log = engine.log.read_text()
    assert {theirs} < set(faulty_engine.slabs.glob("kvpact/*.slab"))
    for path in (a_file, orphan, tmp_path / "tiny"):
        lines = [line for line in log.splitlines() if str(path) in line and "serving without" in line]
        assert len(lines) == 1, path
    assert len([line for line in log.splitlines() if str(full_disk) in line and "cannot" in line]) == 1
    assert 'kv_load_failure_policy is "fail"' in log
    assert log.count("this engine was started without kvpact's --worker-cls and --scheduler-cls") == 1
    assert "Traceback" not in log
