"""What the start knew of an engine is said once in the log, and by `kvpact status` and `kvpact why` whenever asked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

import vllm_played_engine
from kvpact.cache.status_socket import answers
from kvpact.identity.adapter_digests import AdapterDigests
from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.identity.loaded_adapters import LoadedAdapters
from kvpact.vllm import checks, groups
from kvpact_command import kvpact, own_sockets, refusal
from kvpact_testkit.vllm import compat
from polling import until
from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt

PROMPT = make_prompt(1, 3)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PlayedEngine]]:
    """Starts engines whose model has these settings; their sockets are where `kvpact` looks for them."""
    own_sockets(tmp_path, monkeypatch)
    configure = vllm_played_engine.vllm_config
    with ExitStack() as engines:

        def begin(unit: int | None = None, **of_model: Any) -> PlayedEngine:
            def configured(*arguments: Any) -> Any:
                config = configure(*arguments)
                config.cache_config.prefix_match_unit = unit
                for name, value in of_model.items():
                    setattr(config.model_config, name, value)
                return config

            monkeypatch.setattr(vllm_played_engine, "vllm_config", configured)
            tiers = [f"disk://{tmp_path}/slabs?capacity=64MiB"]
            engine = PlayedEngine(tmp_path / "engine", tiers=tiers)
            engines.callback(engine.close)
            until(lambda: bool(answers()))
            return engine

        yield begin


def words(text: str) -> str:
    """The text in one line, as it was before it was wrapped."""
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("of_model", "why", "change"),
    [
        ({"runner_type": "pooling"}, "requests of a pooling model are never cached", "start it with vllm serve"),
        ({"max_model_len": BLOCK}, f"whole blocks of {BLOCK} tokens", "raise it, or set a smaller --block-size"),
    ],
)
def test_an_engine_that_can_cache_nothing_takes_no_memory_and_says_why_whenever_it_is_asked(
    start: Callable[..., PlayedEngine],
    of_model: dict[str, object],
    why: str,
    change: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = start(**of_model)
    assert engine.generate(PROMPT[:BLOCK], 1).said == answer(PROMPT[:BLOCK], 1)
    assert engine.worker.cache_worker.memory is None
    assert not (tmp_path / "slabs").exists()
    (line,) = [record.getMessage() for record in caplog.records if why in record.getMessage()]
    assert change in line
    told = kvpact("status")
    assert told.exit_code == 0
    assert f"cached nothing: {line.partition('without a cache: ')[2]}" in words(told.stdout)
    assert line.partition("without a cache: ")[2] in refusal("why", "request 0")
    assert line.partition("without a cache: ")[2] in kvpact("status", "--json").stdout


def test_a_model_one_token_longer_than_a_block_is_cached(start: Callable[..., PlayedEngine]) -> None:
    engine = start(max_model_len=BLOCK + 1)
    assert engine.worker.cache_worker.memory is not None
    assert "cached nothing" not in words(kvpact("status").stdout)


def test_missing_classes_are_named_as_long_as_the_engine_lives(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    engine.generate(PROMPT)
    note = "without kvpact's --worker-cls and --scheduler-cls: the log names what is lost, and what to add"
    assert f"start {note}" in words(kvpact("status").stdout)
    assert f"start {note}" in words(kvpact("why", "request 0").stdout)


def test_without_statistics_the_engine_says_where_counts_are_and_keeps_no_steps_for_them(
    start: Callable[..., PlayedEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = compat.make_scheduler
    monkeypatch.setattr(
        compat, "make_scheduler", lambda *arguments, **named: make(*arguments, **named | {"log_stats": False})
    )
    engine = start()
    assert not engine.scheduler.has_requests(), "nobody would hear what a step counts"
    engine.generate(PROMPT)
    note = "--disable-log-stats: vLLM's metrics page has nothing of kvpact; kvpact status on this machine has"
    assert [record.getMessage() for record in caplog.records].count(f"kvpact: {note}") == 1
    assert f"start {note}" in words(kvpact("status").stdout)


def test_groups_with_blocks_of_several_sizes_say_what_a_match_is_a_multiple_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = partial(FullAttentionSpec, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    members = [KVCacheGroupSpec([str(size)], spec(block_size=size)) for size in (16, 64)]
    model = SimpleNamespace(runner_type="generate", max_model_len=2048)
    config = SimpleNamespace(model_config=model, speculative_config=None)
    found = checks.start_verdict(
        groups.engine_groups(config, SimpleNamespace(kv_cache_groups=members)), [], has_statistics=True
    )
    assert not found.unserved
    (note,) = found.notes
    assert "blocks of 16, 64 tokens: a match is a multiple of 64" in note
    assert caplog.messages == [f"kvpact: {note}"]


@pytest.mark.parametrize(("unit", "said"), [(None, 0), (BLOCK, 0), (BLOCK // 2, 1)])
def test_hits_that_end_inside_a_block_are_said_at_the_start(
    unit: int | None, said: int, start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    start(unit=unit)
    lines = [line for line in caplog.messages if "--prefix-match-unit" in line]
    assert len(lines) == said
    assert all(f"inside {BLOCK} tokens nothing is loaded (`unaligned` among the misses)" in line for line in lines)


@pytest.mark.parametrize(
    ("believed", "interval", "unit", "remedies"),
    [
        (128, 384, 384, ["add --block-size 384"]),
        (384, 0, 384, ["add --prefix-cache-retention-interval 384"]),
        (128, 0, 384, ["add --block-size 384", "add --prefix-cache-retention-interval 384"]),
        (768, None, 384, []),
        (128, 0, 0, []),
    ],
)
def test_settings_that_lose_states_are_told_of_once_with_the_option(
    believed: int, interval: int | None, unit: int, remedies: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A scheduler that believes other blocks than those of states; answers without states. A unit of 0: no states."""
    full = KVCacheGroup(GroupKind.FULL, unit or 256)
    side = KVCacheGroup(GroupKind.STATE, unit) if unit else KVCacheGroup(GroupKind.WINDOW, 256, 512)
    members = groups.EngineGroups(GroupSet((full, side)), (("a",), ("b",)))
    settings = SimpleNamespace(block_size=believed, prefix_cache_retention_interval=interval)
    found = checks.state_limits(members, SimpleNamespace(cache_config=settings))
    assert [remedy for *_, remedy in found] == remedies
    assert caplog.messages == [f"kvpact: {limit}; {remedy}" for _, limit, remedy in found]
    if believed == 128 and remedies:
        assert f"blocks of 128 tokens, and the model's states are kept every {unit}" in caplog.messages[0]


@pytest.mark.parametrize(
    ("reported", "until_when"),
    [
        (True, "are not cached until every rank has loaded the files as they are now: unload the adapter and load it"),
        (False, "are not cached until a restart; with --worker-cls kvpact.vllm.worker.KvpactWorker"),
    ],
)
def test_what_to_do_about_an_adapter_whose_files_have_changed_fits_the_worker_class(
    reported: bool, until_when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = AdapterDigests()
    adapters.bind(LoadedAdapters([]), reported=reported)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"new")
    with caplog.at_level(logging.WARNING):
        _, pending = adapters.ask(1, str(tmp_path), loads_in_place=False)
        until(lambda: pending.is_done)
    (line,) = caplog.messages
    assert until_when in line
    assert ("--worker-cls" in line) is not reported
    adapters.close()
