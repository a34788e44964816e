"""What is wrong from outside gets one clear message: the engine serves on without that tier, or refuses to start."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.tiers.disk.inspection import verify_slab
from kvpact.vllm import checks
from kvpact.vllm.compat.platforms import KVPACT_WORKER, OUR_CLASSES, PACT_SCHEDULER
from kvpact.vllm.connector import PactConnector
from kvpact.vllm.plugin import register
from kvpact.vllm.scheduler import KvpactScheduler, pact_scheduler
from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt, vllm_config

WITHOUT = "kvpact: this engine was started without kvpact's "
"""Begins the line that says which promises fall without kvpact's classes."""

PROMPT = make_prompt(1, 6)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where nothing is yet; what a test mounts there is taken away."""
    yield tmp_path / "place"
    subprocess.run(["umount", "--lazy", tmp_path / "place"], check=False, capture_output=True)


def mount(place: Path, options: str) -> Path:
    """A small file system in memory, with these options."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode:
        pytest.skip("this machine or user mounts nothing")
    return place


def disk(path: Path, capacity: str = "1MiB") -> list[str]:
    return [f"disk://{path}?capacity={capacity}"]


def assert_serves(engine: PlayedEngine) -> None:
    """Right answers, and reuse from memory."""
    assert engine.generate(PROMPT).said == answer(PROMPT, 3)
    engine.forget()
    again = engine.generate(PROMPT)
    assert again.said == answer(PROMPT, 3)
    assert again.cached_tokens == 6 * BLOCK
    engine.assert_at_rest()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvpact warned of, beyond that these engines have vLLM's own classes."""
    return [line for line in warnings(caplog) if not line.startswith(WITHOUT)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvpact warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("kvpact") and record.levelno >= logging.WARNING
    ]


# The engine serves on without the tier


def no_directory(place: Path) -> Path:
    return place / "one" / "two"


def a_file(place: Path) -> Path:
    place.write_text("notes")
    return place


def a_full_disk(place: Path) -> Path:
    mount(place, "size=8k")
    (place / "full").write_bytes(bytes(8192))
    return place


@pytest.mark.parametrize(
    ("wrong", "capacity", "message"),
    [
        (no_directory, "1MiB", "does not exist; create it, or correct the path"),
        (a_file, "1MiB", "is not a directory; give the path of one"),
        (partial(mount, options="ro,size=1m"), "1MiB", f"cannot be written by user {os.geteuid()}; give this user the"),
        (a_full_disk, "1MiB", "No space left on device"),
        (Path, "8KiB", "no room for one block in .*capacity 8192 bytes"),
    ],
    ids=["no directory", "a file", "read-only", "full", "too small"],
)
def test_a_directory_that_cannot_be_used_costs_the_tier(
    start: Callable[..., PlayedEngine],
    place: Path,
    caplog: pytest.LogCaptureFixture,
    wrong: Callable[[Path], Path],
    capacity: str,
    message: str,
) -> None:
    assert_serves(start(tiers=disk(wrong(place), capacity)))
    said = [line for line in complaints(caplog) if "kvpact: serving without the tier disk://" in line]
    assert len(said) == 1
    assert re.search(message, said[0])


def test_a_disk_that_gets_full_keeps_what_fits(
    start: Callable[..., PlayedEngine], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start(tiers=disk(mount(place, "size=40k")))
    assert_serves(engine)
    scarce, complaint = complaints(caplog)
    assert "a capacity of 1MiB is more than the 40KiB that" in scarce
    assert "No space left on device; it keeps its present size" in complaint
    counts = engine.counts
    assert counts['written_blocks{tier="disk"}'] + counts['dropped_writes{tier="disk"}'] >= 6
    assert counts['dropped_writes{tier="disk"}'] > 0
    assert counts['queued_write_bytes{tier="disk"}'] == 0, "H52: what could not be written holds nothing"
    engine.close()
    (slab,) = place.glob("kvpact/*.slab")
    report = verify_slab(slab)
    assert not report.damaged
    assert report.sound == counts['held_blocks{tier="disk"}']


# The engine refuses to start


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memroy": "4GiB"}, 'unknown key "memroy" in kv_connector_extra_config; did you mean "memory"?'),
        ({"memory": "4G"}, 'memory="4G" in kv_connector_extra_config: write "4GiB" (1024-based) or "4GB"'),
        ({"memory": -1}, "memory=-1 in kv_connector_extra_config: a size such as"),
        ({"prepare_deadline": "soon"}, 'prepare_deadline="soon" in kv_connector_extra_config: a time such as'),
        ({"tiers": ["disc:///var/cache?capacity=1GiB"]}, 'unknown kind of tier "disc"; did you mean "disk"?'),
        ({"tiers": ["disk:///var/cache"]}, 'a disk tier needs a limit: add "?capacity=200GiB"'),
        ({"memory": "64TiB"}, "memory: the arena wants 64TiB"),
        ({"memory": "10KiB"}, "memory: 10KiB holds 1 blocks of 8KiB each (all layers, 1 ranks)"),
        ({"transfer": {"kv_role": "kv_consumer"}}, 'kv_role is "kv_consumer"; a cache both stores and loads'),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_configuration_that_cannot_be_right_stops_the_start(
    start: Callable[..., PlayedEngine], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        start(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_machine_without_memory_stops_the_start_and_leaves_nothing(
    start: Callable[..., PlayedEngine],
) -> None:
    gc.collect()  # what engines of earlier tests have left
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="set `memory` below that"):
        start(memory="64TiB")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= open_files


def test_a_failure_policy_that_fails_requests_is_warned_about(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(start(transfer={"kv_load_failure_policy": "fail"}))
    assert complaints(caplog)
    assert all("kv_load_failure_policy" in complaint for complaint in complaints(caplog))
    assert 'set "kv_load_failure_policy": "recompute"' in complaints(caplog)[0]


def test_launch_helpers_recompute_what_fails_to_load() -> None:
    assert load_config({}, {}).kv_transfer_config()["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_h72_that_a_pooling_model_is_never_cached_is_known_at_the_start(runner: str, tmp_path: Path) -> None:
    """Who says so, and that nothing is opened then: test_start_verdict.py."""
    config = vllm_config(tmp_path / "model", {}, 4096, {})
    config.model_config.runner_type = runner
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["one"], spec)])
    why = "requests of a pooling model are never cached: start it with vllm serve, without kvpact"
    assert checks.check_engine(config, groups).unserved == (why if runner == "pooling" else "")


# kvpact's classes in the place of vLLM's


class OwnScheduler(KvpactScheduler):
    """A user's."""


def own_factory(*arguments: Any, **named: Any) -> Any:
    """A user's."""
    return pact_scheduler(*arguments, **named)


@pytest.fixture
def reporting_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The played worker says of itself what `KvpactWorker`, and a class that inherits from it, says."""
    register = PactConnector.register_kv_caches

    def register_and_watch(self: PactConnector, kv_caches: dict[str, Any]) -> None:
        register(self, kv_caches)
        self.cache_worker.watches_weights = True

    monkeypatch.setattr(PactConnector, "register_kv_caches", register_and_watch)


def without(*names: str) -> tuple[str, str]:
    """How the line about these options begins, and how it ends."""
    added = " ".join(f"{name} {OUR_CLASSES[name]}" for name in names)
    return f"{WITHOUT}{' and '.join(names)}, so ", f": add {added}, as kvpact serve does"


def test_without_kvpacts_classes_one_line_says_which_promises_fall_and_what_to_add(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    start()
    start(scheduler_class=OwnScheduler)
    start(scheduler_class=own_factory)
    request.getfixturevalue("reporting_worker")
    start()
    lines = warnings(caplog)
    both, worker, scheduler = without(*OUR_CLASSES), without("--worker-cls"), without("--scheduler-cls")
    assert [
        line.startswith(begin) and line.endswith(end)
        for line, (begin, end) in zip(lines, (both, worker, worker, scheduler), strict=True)
    ] == [True] * 4, lines
    assert all(word in lines[0] for word in ("(P13)", "clear_cache=True", "WeightsExtension", "hits", "(exits)"))


@pytest.mark.usefixtures("reporting_worker")
@pytest.mark.parametrize("scheduler", [pact_scheduler, OwnScheduler, own_factory])
def test_with_both_classes_or_heirs_of_them_there_is_no_such_line(
    scheduler: Any, start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(start(scheduler_class=scheduler, require="all"))
    assert warnings(caplog) == []


def test_where_kvpact_has_no_class_the_line_names_none(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "classes_for", lambda platform, release: {})
    start()
    [line] = warnings(caplog)
    assert line.endswith(": kvpact has none for this platform and release of vLLM")


def test_an_engine_that_requires_kvpacts_classes_does_not_start_without_them(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    assert OUR_CLASSES == {"--worker-cls": KVPACT_WORKER, "--scheduler-cls": PACT_SCHEDULER}
    for settings in ({}, {"scheduler_class": KvpactScheduler}):
        with pytest.raises(ConfigError, match=f'--worker-cls {KVPACT_WORKER}.*, or leave out "require": "all"$'):
            start(require="all", **settings)
    assert warnings(caplog) == []


PACT = {"kv_connector": "PactConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    "transfer",
    [
        PACT,
        {**PACT, "kv_connector_module_path": "kvpact.vllm"},
        {**PACT, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [PACT]}},
    ],
    ids=["short", "with its module", "among others"],
)
def test_h103_vllms_own_offloading_beside_kvpact_is_refused(
    transfer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would put its own connector in the place of the named one, without a word."""
    from vllm.config import CacheConfig, KVTransferConfig, VllmConfig

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    decides = "_post_init_kv_transfer_config"
    monkeypatch.setattr(VllmConfig, decides, getattr(VllmConfig, decides))
    register()
    with pytest.raises(ValueError, match="names PactConnector, and --kv-offloading-size puts OffloadingConnector in"):
        VllmConfig(kv_transfer_config=KVTransferConfig(**transfer), cache_config=CacheConfig(kv_offloading_size=1))
    alone = VllmConfig(kv_transfer_config=KVTransferConfig(**transfer))
    assert alone.kv_transfer_config.kv_connector == transfer["kv_connector"]
