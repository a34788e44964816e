"""An engine whose tier cannot be used when it starts: it serves from memory, and uses the tier once it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.cache import late_tiers
from kvpact.errors import ConfigError
from kvpact.identity import base_weights, weights
from kvpact.tiers import awaited
from kvpact.tiers.registry import open_tier
from polling import until
from servers.redis_server import free_ports, redis_server
from vllm_played_engine import BLOCK, PlayedEngine, answer, flush, make_prompt, step_until

PROMPTS = [make_prompt(seed, 6) for seed in range(2)]


class Late:
    """A place for a tier of some kind, where nothing is before `come`."""

    def __init__(self, kind: str, folder: Path, stack: ExitStack) -> None:
        self.mount, self._folder, self._stack = folder / "mounted", folder, stack
        self.port = free_ports(1)[0] if kind == "redis" else 0
        self.label = {"dir": "directory", "file": "object"}.get(kind, kind)
        self.url = {
            "redis": f"redis://127.0.0.1:{self.port}/0",
            "file": f"file://{self.mount}/cache",
        }.get(kind, f"{kind}://{self.mount}/cache?capacity=64MiB")

    def come(self) -> None:
        if self.port:
            self._stack.enter_context(redis_server(self._folder / "redis", port=self.port))
        else:
            self.mount.mkdir()


@pytest.fixture(params=["disk", "dir", "file", "redis"])
def late(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Late]:
    with ExitStack() as stack:
        yield Late(request.param, tmp_path, stack)


def assert_right(engine: PlayedEngine, prompt: list[int], cached_blocks: int) -> None:
    played = engine.generate(prompt)
    assert played.said == answer(prompt, 3)
    assert played.cached_tokens == cached_blocks * BLOCK


def test_h97_what_is_not_there_at_the_start_is_used_when_it_is(
    start: Callable[..., PlayedEngine], late: Late, caplog: pytest.LogCaptureFixture
) -> None:
    """With what memory held until then; the metrics tell of it, and the log once."""
    engine = start(late.url, memory="8MiB")
    assert_right(engine, PROMPTS[0], 0)
    assert engine.counts[f'tier_up{{tier="{late.label}"}}'] == 0
    late.come()
    step_until(engine, lambda: engine.counts[f'written_blocks{{tier="{late.label}"}}'] == 6)
    assert_right(engine, PROMPTS[1], 0)
    flush(engine)
    assert engine.counts[f'tier_up{{tier="{late.label}"}}'] == 1
    said = [record.getMessage() for record in caplog.records if late.url.partition("?")[0] in record.getMessage()]
    assert len([line for line in said if "serving without the tier" in line]) == 1
    assert len([line for line in said if line.endswith("is used from now on")]) == 1
    engine.close()

    again = start(late.url)
    for prompt in PROMPTS:
        assert_right(again, prompt, 6)


@pytest.mark.parametrize("late", ["disk", "dir", "file"], indirect=True)
def test_h122_what_is_removed_under_an_engine_costs_what_was_there_and_is_used_again(
    start: Callable[..., PlayedEngine], late: Late, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what memory holds is stored again; and while it cannot be opened, the metrics and the log say so."""
    monkeypatch.setattr(awaited, "LOOK_SECONDS", 0.01, raising=False)
    late.come()
    engine = start(late.url, memory="8MiB")
    assert_right(engine, PROMPTS[0], 0)
    flush(engine)
    late.mount.rename(late.mount.with_name("away"))
    step_until(engine, lambda: engine.counts[f'tier_up{{tier="{late.label}"}}'] == 0)
    step_until(engine, lambda: "serving without the tier" in caplog.text)
    assert caplog.text.count(f"{late.mount} does not exist; create it") == 1
    late.come()
    step_until(engine, lambda: engine.counts[f'written_blocks{{tier="{late.label}"}}'] == 12)
    assert_right(engine, PROMPTS[1], 0)
    flush(engine)
    assert engine.counts[f'tier_up{{tier="{late.label}"}}'] == 1
    engine.close()

    again = start(late.url)
    for prompt in PROMPTS:
        assert_right(again, prompt, 6)


def opening() -> list[str]:
    """The threads that still try to open a tier."""
    return [thread.name for thread in threading.enumerate() if thread.name == "kvpact-open-tier"]


def test_h97_workers_use_late_stores_too(start: Callable[..., PlayedEngine], tmp_path: Path) -> None:
    late = Late("dir", tmp_path, ExitStack())
    late.come()
    first = start(late.url)
    assert_right(first, PROMPTS[0], 0)
    flush(first)
    first.close()
    away = late.mount.rename(tmp_path / "away")
    engine = start(late.url, match_at="step", step_deadline="2s")
    assert_right(engine, PROMPTS[1], 0)
    assert len(opening()) == 2, "the scheduler's and the worker's"
    away.rename(late.mount)
    step_until(engine, lambda: not opening())
    assert engine.generate(PROMPTS[0]).said == answer(PROMPTS[0], 3)
    assert engine.counts["step_hits"] == 1


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("disk://{}/away/cache?capacity=64MiB", "away does not exist; create it"),
        ("redis://127.0.0.1:1/0", "Connection refused"),
        ("rediss://127.0.0.1:1/0?ca_file=/nowhere/ca", "there is no file /nowhere/ca"),
        ("az://container/x", "obstore does not take these options"),
    ],
)
def test_h97_required_tiers_refuse_the_start(
    start: Callable[..., PlayedEngine], tmp_path: Path, url: str, why: str
) -> None:
    """Whatever the reason, also of a kind that connects when it is used first."""
    good = f"disk://{tmp_path}/good?capacity=64MiB"
    with pytest.raises(ConfigError, match='"require_tiers": true') as error:
        start(good, url.format(tmp_path), require_tiers=True)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    engine = start(good, require_tiers=True)
    assert_right(engine, PROMPTS[0], 0)
    assert not opening()


def test_h97_weights_are_read_at_once_where_tiers_are_required(
    start: Callable[..., PlayedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_tiers, "READ_AT_ONCE_BYTES", 0)
    model = tmp_path / "engine" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"one")
    monkeypatch.setattr(base_weights, "process_start_ns", time.time_ns)
    monkeypatch.setattr(weights, "SETTLED_SECONDS", -1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings: dict[str, Any] = {"model_id": None, "require_tiers": True}
    with pytest.raises(ConfigError, match="away does not exist"):
        start(f"disk://{tmp_path}/away/cache?capacity=64MiB", **settings)


def test_h97_neither_a_start_nor_a_step_nor_an_end_waits_for_a_tier_that_hangs(
    start: Callable[..., PlayedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is opened on a thread of its own, which closes what comes too late."""
    go_on, opened = threading.Event(), []

    def hang(*arguments: Any) -> Any:
        opened.append(threading.current_thread().name)
        assert go_on.wait(20.0)
        return open_tier(*arguments)

    monkeypatch.setattr(awaited, "open_tier", hang)
    monkeypatch.setattr(late_tiers, "OPEN_SECONDS", 0.05)
    engine = start(f"disk://{tmp_path}/slabs?capacity=64MiB")
    assert_right(engine, PROMPTS[0], 0)
    engine.forget()
    assert_right(engine, PROMPTS[0], 6)
    engine.close()
    assert opened == ["kvpact-open-tier"]
    go_on.set()
    until(lambda: not opening())
    again = start(f"disk://{tmp_path}/slabs?capacity=64MiB", require_tiers=True)
    assert len(list((tmp_path / "slabs" / "kvpact").glob("*.slab"))) == 1, "the first engine's slab is free again"
    again.close()
