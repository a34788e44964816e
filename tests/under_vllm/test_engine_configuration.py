"""What is wrong from outside gets one clear message: the engine serves on without that tier, or refuses to start."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.inspection import verify_slab
from kvpact.tiers.disk.superblock import PAGE_BYTES
from kvpact.vllm import checks
from kvpact.vllm.compat.platforms import KVPACT_WORKER, OUR_CLASSES, PACT_SCHEDULER
from kvpact.vllm.connector import PactConnector
from kvpact.vllm.plugin import register
from kvpact.vllm.scheduler import KvpactScheduler, pact_scheduler
from scenes import until
from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt, vllm_config

WITHOUT = "kvpact: this engine was started without kvpact's "
"""Begins the line that says which promises fall without kvpact's classes."""

PROMPT = make_prompt(1, 6)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system in memory, with these options."""
    if os.geteuid():
        pytest.skip("only root may mount")
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount-{len(mounted)}"
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True).returncode:
            pytest.skip("this machine mounts nothing")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True)


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


def assert_one_complaint(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """There is one, and all these words are in it."""
    (complaint,) = complaints(caplog)
    missing = [word for word in words if word not in complaint]
    assert not missing, complaint


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvpact warned of."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("kvpact") and record.levelno >= logging.WARNING
    ]


def fill(start: Callable[..., PlayedEngine], directory: Path, **settings: Any) -> Path:
    """Have an engine store a prompt; the slab that it leaves."""
    engine = start(tiers=disk(directory), **settings)
    assert_serves(engine)
    engine.close()
    (slab,) = set(directory.glob("kvpact/*.slab"))
    assert verify_slab(slab).sound == 6
    return slab


# The engine serves on without the tier


def missing_directory(place: Path) -> tuple[Path, str]:
    return place / "one" / "two", "does not exist; create it, or correct the path"


def file_in_its_place(place: Path) -> tuple[Path, str]:
    place.write_text("notes")
    return place, "is not a directory; give the path of one"


@pytest.mark.parametrize("wrong", [missing_directory, file_in_its_place])
def test_a_directory_that_cannot_be_used_costs_the_tier(
    start: Callable[..., PlayedEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    wrong: Callable[[Path], tuple[Path, str]],
) -> None:
    directory, message = wrong(tmp_path / "place")
    assert_serves(start(tiers=disk(directory)))
    (complaint,) = complaints(caplog)
    assert complaint.startswith("kvpact: serving without the tier disk://")
    assert message in complaint


def test_a_directory_that_cannot_be_written_costs_the_tier(
    start: Callable[..., PlayedEngine], mount: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(start(tiers=disk(mount("ro,size=1m"))))
    assert_one_complaint(caplog, f"cannot be written by user {os.geteuid()}; give this user the right to")


def test_a_disk_without_room_for_a_slab_costs_the_tier(
    start: Callable[..., PlayedEngine], mount: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    place = mount("size=8k")
    (place / "full").write_bytes(bytes(8192))
    assert_serves(start(tiers=disk(place)))
    scarce, complaint = complaints(caplog)
    assert "a capacity of 1MiB is more than the 0B that" in scarce
    assert "serving without the tier" in complaint
    assert "No space left on device" in complaint
    assert {path.name for path in place.rglob("*")} == {"full", "kvpact", "lock"}, "no half slab is left"


def test_a_disk_that_gets_full_keeps_what_fits(
    start: Callable[..., PlayedEngine], mount: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    place = mount("size=40k")
    engine = start(tiers=disk(place))
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


def test_a_capacity_below_one_block_costs_the_tier(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(start(tiers=disk(tmp_path / "slabs", capacity="8KiB")))
    assert_one_complaint(caplog, "no room for one block", "capacity 8192 bytes")


def overwrite(slab: Path, offset: int, data: bytes) -> None:
    with slab.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_slab_of_another_format_is_left_alone(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slab = fill(start, tmp_path / "slabs")
    overwrite(slab, 8, (99).to_bytes(4, "little"))
    before = slab.read_bytes()
    assert_serves(start(tiers=disk(tmp_path / "slabs")))
    assert_one_complaint(
        caplog, "is a slab of format 99; this release reads format 1. Delete the file to start an empty cache"
    )
    assert slab.read_bytes() == before


def test_a_file_that_is_no_slab_is_left_alone(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slab = fill(start, tmp_path / "slabs")
    slab.write_bytes(b"notes, not blocks " * 1000)
    assert_serves(start(tiers=disk(tmp_path / "slabs")))
    assert_one_complaint(caplog, "is not a kvpact slab: it starts with b'notes, n'; move it away")
    assert slab.read_bytes().startswith(b"notes")


def test_h23_a_slab_of_another_model_under_our_name_is_left_alone(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = fill(start, tmp_path / "slabs"), fill(start, tmp_path / "other", model_id="another")
    theirs.replace(ours)
    assert_serves(start(tiers=disk(tmp_path / "slabs")))
    assert_one_complaint(caplog, "belongs to another model (weights: ", "move it away")


def test_h23_two_models_in_one_directory_keep_apart(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = disk(tmp_path / "slabs", "256MiB")  # slabs grow by 64 MiB
    for model_id in ("one", "another"):
        engine = start(tiers=tiers, model_id=model_id)
        assert engine.generate(PROMPT).cached_tokens == 0, "the same prompt, other weights"
        engine.close()
    for model_id in ("one", "another"):
        engine = start(tiers=tiers, model_id=model_id)
        assert engine.generate(PROMPT).cached_tokens == 6 * BLOCK
        engine.close()
    assert len(list((tmp_path / "slabs").glob("kvpact/*.slab"))) == 2
    assert complaints(caplog) == []


def test_h23_a_model_that_is_not_served_makes_room_for_one_that_is(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = fill(start, tmp_path / "slabs")  # has taken all of the directory's capacity
    theirs = fill(start, tmp_path / "slabs", model_id="another")
    assert [*ours.parent.glob("*.slab")] == [theirs] != [ours]
    assert complaints(caplog) == []


def test_engines_of_one_model_share_a_directory(
    start: Callable[..., PlayedEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_tier, "TEND_SECONDS", 0.02)
    first = start(tiers=disk(tmp_path / "slabs"))
    assert_serves(first)
    second = start(tiers=disk(tmp_path / "slabs"))
    time.sleep(0.5)
    assert second.generate(PROMPT).cached_tokens == 6 * BLOCK, "the first one has stored it"
    other = make_prompt(2, 6)
    second.generate(other)
    second.assert_at_rest()
    time.sleep(0.5)
    assert first.generate(other).cached_tokens == 6 * BLOCK
    assert [engine.counts['held_blocks{tier="disk"}'] for engine in (first, second)] == [6, 6]
    assert len(list((tmp_path / "slabs").glob("kvpact/*.slab"))) == 2
    assert complaints(caplog) == []


def test_engines_of_two_models_have_equal_shares_of_a_directory(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(tiers=disk(tmp_path / "slabs"))
    assert_serves(first)
    second = start(tiers=disk(tmp_path / "slabs"), model_id="another")
    assert_serves(second)
    assert_serves(first)
    assert [engine.counts['written_blocks{tier="disk"}'] for engine in (first, second)] == [6, 6]

    def taken() -> list[int]:
        return [512 * path.stat().st_blocks for path in (tmp_path / "slabs" / "kvpact").iterdir()]

    until(lambda: max(taken()) <= 1 << 19)  # the first one makes holes when it looks at the directory next
    assert sum(taken()) <= 1 << 20
    assert complaints(caplog) == []


def test_a_damaged_superblock_starts_an_empty_slab(
    start: Callable[..., PlayedEngine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slab = fill(start, tmp_path / "slabs")
    overwrite(slab, PAGE_BYTES // 2, b"damage")
    engine = start(tiers=disk(tmp_path / "slabs"))
    assert engine.generate(PROMPT).cached_tokens == 0
    assert_serves(engine)
    assert_one_complaint(caplog, "has a damaged superblock: its checksum does not match; starting an empty one")


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
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="set `memory` below that"):
        start(memory="64TiB")
    assert len(os.listdir("/proc/self/fd")) == open_files


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
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=["one"])])
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


def test_without_kvpacts_classes_one_line_says_which_promises_fall_and_what_to_add(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(start())
    [line] = warnings(caplog)
    assert line.startswith(f"{WITHOUT}--worker-cls and --scheduler-cls, so ")
    assert all(word in line for word in ("(P13)", "clear_cache=True", "WeightsExtension", "hits", "(exits)"))
    assert line.endswith(f": add --worker-cls {KVPACT_WORKER} --scheduler-cls {PACT_SCHEDULER}, as kvpact serve does")


@pytest.mark.parametrize("scheduler", [OwnScheduler, own_factory])
def test_without_the_worker_class_alone_the_line_says_nothing_of_the_scheduler(
    scheduler: Any, start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(start(scheduler_class=scheduler))
    [line] = warnings(caplog)
    assert line.startswith(f"{WITHOUT}--worker-cls, so ")
    assert line.endswith(f": add --worker-cls {KVPACT_WORKER}, as kvpact serve does")


@pytest.mark.usefixtures("reporting_worker")
def test_without_the_scheduler_class_alone_the_line_says_nothing_of_the_worker(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    assert_serves(start())
    [line] = warnings(caplog)
    assert line.startswith(f"{WITHOUT}--scheduler-cls, so ")
    assert line.endswith(f": add --scheduler-cls {PACT_SCHEDULER}, as kvpact serve does")


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
