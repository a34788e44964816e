"""An engine that has to read its model first, to tell its weights: it serves from memory, and its tiers come later."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.cache import late_tiers
from kvpact.errors import ConfigError
from kvpact.identity import base_weights, weights
from kvpact.threads import LOW_PRIORITY
from polling import until
from servers.redis_server import redis_server
from vllm_played_engine import BLOCK, PlayedEngine, answer, flush, make_prompt, step_until

PROMPTS = [make_prompt(seed, 6) for seed in range(3)]
HELD, ROOM = 'held_blocks{tier="disk"}', 'capacity_blocks{tier="disk"}'


class Reading:
    """The reading of the model's files, which lasts until `end`."""

    def __init__(self) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.files: list[str] = []
        self.priority = self.cpus = 0
        self.error: OSError | None = None

    def digest(self, path: Path, stopped: Callable[[], bool]) -> str:
        """In the place of `file_digest`."""
        self.files.append(path.name)
        self.priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.began.set()
        while not self.goes_on.wait(0.01):
            if stopped():
                raise weights.ReadingStopped("told to stop")
        if self.error is not None:
            raise self.error
        return sha256(path.read_bytes()).hexdigest()

    def end(self) -> None:
        self.goes_on.set()


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Reading]:
    """Every file takes long to read; the model's was there before the engine began."""
    reading = Reading()
    monkeypatch.setattr(weights, "file_digest", reading.digest)
    monkeypatch.setattr(weights, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(late_tiers, "READ_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(base_weights, "process_start_ns", time.time_ns)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_weights(tmp_path, b"one")
    yield reading
    reading.end()


def write_weights(directory: Path, content: bytes) -> Path:
    model = directory / "engine" / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "model.safetensors").write_bytes(content)
    return model / "model.safetensors"


@pytest.fixture
def start(start: Callable[..., PlayedEngine], tmp_path: Path) -> Callable[..., PlayedEngine]:
    """Starts an engine that knows of its weights what its files say, with a tier on disk that may take its time."""
    return partial(start, model_id=None, tiers=[f"disk://{tmp_path}/slabs?capacity=256MiB"], prepare_deadline="20s")


def assert_right(engine: PlayedEngine, prompts: list[list[int]], cached_blocks: int) -> None:
    for prompt in prompts:
        played = engine.generate(prompt)
        assert played.said == answer(prompt, 3)
        assert played.cached_tokens == cached_blocks * BLOCK


def has_room(engine: PlayedEngine) -> bool:
    return engine.counts[ROOM] > 0


def test_h39_until_the_weights_are_told_memory_serves_and_then_all_of_it_is_on_disk(
    start: Callable[..., PlayedEngine], reading: Reading, tmp_path: Path
) -> None:
    engine = start()
    assert reading.began.wait(10.0), "attach waited for nothing"
    assert_right(engine, PROMPTS[:2], 0)
    engine.forget()
    assert_right(engine, PROMPTS[:2], 6)
    assert reading.priority == LOW_PRIORITY
    assert not (tmp_path / "slabs").exists()
    reading.end()
    step_until(engine, lambda: engine.counts.get(HELD, 0) == 12)
    assert_right(engine, PROMPTS[2:], 0)
    flush(engine)
    engine.close()

    again = start()
    assert reading.files == ["model.safetensors"], "remembered"
    assert_right(again, PROMPTS, 6)


def test_h39_other_weights_find_nothing(start: Callable[..., PlayedEngine], reading: Reading, tmp_path: Path) -> None:
    """Keys of blocks are the same for both, and no tier is."""
    reading.end()
    for content in (b"one", b"two"):
        write_weights(tmp_path, content)
        engine = start()
        step_until(engine, partial(has_room, engine))
        assert_right(engine, PROMPTS, 0)
        flush(engine)
        engine.close()
    assert len(list((tmp_path / "slabs").glob("kvpact/*.slab"))) == 2


def test_workers_look_in_late_stores_too_when_a_step_begins(
    start: Callable[..., PlayedEngine], reading: Reading, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvpact")
    with redis_server(tmp_path / "redis") as server:
        settings = {"tiers": [f"redis://{server.address}/0?timeout=10s"], "match_at": "step", "step_deadline": "5s"}
        first = start(**settings)
        assert_right(first, PROMPTS[:1], 0)
        reading.end()
        step_until(first, lambda: first.counts.get('written_blocks{tier="redis"}', 0) == 6)
        first.close()
        reading.goes_on.clear()
        write_weights(tmp_path, b"one")  # at another time, so it is read again
        second = start(**settings)
        reading.end()
        step_until(second, lambda: caplog.text.count("from now on tiers below: redis, namespace") == 2)
        assert second.generate(PROMPTS[0]).said == answer(PROMPTS[0], 3)
        assert second.counts["step_hits"] == 1


def test_a_shutdown_does_not_wait_for_the_files(start: Callable[..., PlayedEngine], reading: Reading) -> None:
    engine = start()
    assert reading.began.wait(10.0)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 10.0
    assert "kvpact-weights" not in [thread.name for thread in threading.enumerate()]


def test_what_was_opened_at_the_end_is_closed(
    start: Callable[..., PlayedEngine], reading: Reading, tmp_path: Path
) -> None:
    """Another engine can have the slab at once."""
    engine = start()
    reading.end()
    until(lambda: list((tmp_path / "slabs").glob("kvpact/*.slab")))
    engine.close()
    assert_right(start(), PROMPTS, 0)


def test_h39_files_that_cannot_be_read_later_cost_the_tiers_and_one_message(
    start: Callable[..., PlayedEngine], reading: Reading, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start()
    reading.error = OSError(5, "Input/output error")
    reading.end()
    step_until(engine, lambda: "Input/output error" in caplog.text)
    assert_right(engine, PROMPTS, 0)
    engine.forget()
    assert_right(engine, PROMPTS, 6)
    (error,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "set `model_id` in kv_connector_extra_config" in error
    assert not (tmp_path / "slabs").exists()
    assert engine.counts['tier_up{tier="disk"}'] == 0, "it will not come"


def test_h39_files_that_change_after_the_start_cost_the_tiers_and_one_message(
    start: Callable[..., PlayedEngine],
    reading: Reading,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is there now is not what the engine has loaded."""
    began_ns = time.time_ns()
    monkeypatch.setattr(base_weights, "process_start_ns", lambda: began_ns)
    time.sleep(0.02)
    engine = start()
    write_weights(tmp_path, b"of the next checkpoint")
    reading.end()
    step_until(engine, lambda: "changed after the engine began to start" in caplog.text)
    assert_right(engine, PROMPTS, 0)
    (error,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "set `model_id` in kv_connector_extra_config" in error
    assert not (tmp_path / "slabs").exists()


def test_h39_files_that_cannot_be_read_at_the_start_stop_it(
    start: Callable[..., PlayedEngine], reading: Reading, tmp_path: Path
) -> None:
    path = write_weights(tmp_path, b"one")
    path.unlink()
    path.symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="set `model_id` in kv_connector_extra_config") as error:
        start()
    assert "\n" not in str(error.value)


def test_little_is_read_at_once(
    start: Callable[..., PlayedEngine], reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_tiers, "READ_AT_ONCE_BYTES", 3)
    reading.end()
    engine = start()
    assert reading.files == ["model.safetensors"]
    assert engine.counts[ROOM] > 0, "from the first step on"


def test_without_tiers_nothing_is_read(start: Callable[..., PlayedEngine], reading: Reading) -> None:
    assert_right(start(tiers=[]), PROMPTS, 0)
    assert reading.files == []
