"""Played engines of one host meet where their configuration lets them, and leave when their memory may not be used."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.cache import status_socket
from kvpact.cache.status import EngineStatus
from kvpact.cache.status_socket import answers
from kvpact.index.row_locks import MEMFD, LockFile, lease
from kvpact.memory.arena import Standing
from kvpact.metrics import series
from kvpact.pool.neighbours import OtherEngine
from kvpact.worker.copy.cpu import CpuTransferEngine
from kvpact.worker.neighbours import MappedNeighbours
from polling import until
from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines say that their copies are a device's, which no rank can make from another engine's memory."""
    monkeypatch.setattr(CpuTransferEngine, "copies_per_block", 1)
    monkeypatch.setattr(MappedNeighbours, "use", lambda self, addresses: pytest.fail("no rank is to map anything"))


@pytest.fixture
def start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., PlayedEngine]]:
    """Starts engines."""
    caplog.set_level(logging.DEBUG, "kvpact")
    with ExitStack() as engines:

        def begin(name: str, **settings: Any) -> PlayedEngine:
            engine = PlayedEngine(tmp_path / name, **{"pool": "host", **settings})
            engines.callback(engine.close)
            return engine

        yield begin


def met(engine: PlayedEngine) -> tuple[OtherEngine, ...]:
    """The neighbours of an engine."""
    neighbours = engine.cache.neighbours
    return neighbours.current() if neighbours is not None else ()


def test_engines_meet_unless_one_has_its_memory_for_itself(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    first = start("first")
    second = start("second", memory="8MiB")
    until(lambda: (len(met(first)), len(met(second))) == (1, 1))
    start("third", pool="engine")
    fourth = start("fourth")
    until(lambda: (len(met(first)), len(met(second)), len(met(fourth))) == (2, 2, 2))
    until(lambda: caplog.text.count("kvpact: pool: 2 neighbours, 16MiB in all") == 3)
    fourth.close()
    until(lambda: (len(met(first)), len(met(second))) == (1, 1))


def test_engines_with_other_weights_or_blocks_do_not_meet(
    start: Callable[..., PlayedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    engines = [start("first"), start("weights", model_id="another"), start("blocks", block_size=32)]
    until(lambda: caplog.text.count("it has other weights") >= 2 <= caplog.text.count("has other blocks"))
    assert [met(engine) for engine in engines] == [()] * 3


def test_an_engine_meets_anew_after_a_reset_and_nobody_after_a_wrong_copy(start: Callable[..., PlayedEngine]) -> None:
    first, second = start("first"), start("second")
    until(lambda: (len(met(first)), len(met(second))) == (1, 1))
    (before,) = met(second)
    first.connector.reset_cache()
    assert before.index.is_refused
    until(lambda: before.gone and len(met(second)) == 1)
    (anew,) = met(second)
    assert not anew.index.is_refused
    (segment,) = first.cache.tiers.arena.segments
    segment.standing = Standing.REFUTED
    first.generate(make_prompt(1, 3))
    until(lambda: anew.index.is_refused)
    until(lambda: (len(met(first)), len(met(second))) == (0, 0))


def lock_files() -> set[tuple[int, int]]:
    """Descriptors of this process, and the inodes, of files of locks: its own engines' and what others have of them."""
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.exists() and MEMFD in os.readlink(path)]
    return {(int(path.name), path.stat().st_ino) for path in paths}


def test_leases_of_neighbours_are_counted_for_people_who_ask_and_not_in_an_idle_step(
    start: Callable[..., PlayedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each count is at least one call of the kernel."""
    monkeypatch.setattr(status_socket, "places", lambda: [(tmp_path, "kvpact")])
    asked = list[str]()
    leased = LockFile.leased

    def counted(self: LockFile, rows: range) -> range | None:
        asked.append(threading.current_thread().name)
        return leased(self, rows)

    earlier = lock_files()
    first = start("first", stats_file=str(tmp_path / "stats.json"))
    second = start("second")
    until(lambda: (len(met(first)), len(met(second))) == (1, 1))
    descriptors = [each for each, _ in lock_files() - earlier]
    (theirs, *_) = [each for each in descriptors if not fcntl.fcntl(each, fcntl.F_GETFL) & os.O_ACCMODE]
    assert lease(theirs, range(3))
    monkeypatch.setattr(LockFile, "leased", counted)
    first.generate(make_prompt(1, 3))
    assert not first.connector.has_pending_push_work()
    until((tmp_path / "stats.json").exists)
    assert asked == []
    found = [EngineStatus.parse(said) for _, said in answers()]
    assert sorted(status.blocks_leased_to_others for status in found) == [0, 3]
    assert {*asked} == {"kvpact-status"}


@pytest.mark.usefixtures("on_a_device")
def test_engines_on_devices_read_from_each_others_memory_into_their_own(start: Callable[..., PlayedEngine]) -> None:
    first, second = start("first"), start("second")
    until(lambda: (len(met(first)), len(met(second))) == (1, 1))
    for number in range(8):
        prompt = make_prompt(number, 6)
        engines = (first, second) if number % 2 else (second, first)
        said = [engine.generate(prompt) for engine in engines]
        assert [one.said for one in said] == [answer(prompt, 3)] * 2
        assert [one.cached_tokens for one in said] == [0, 6 * BLOCK]
    for engine in (first, second):
        counts = engine.cache.observe()
        assert counts[series("used_tokens_from", "neighbours")] == 4 * 6 * BLOCK
        assert counts[series("read_blocks", "neighbours")] == 4 * 6
        assert [one.index.leased_rows for one in met(engine)] == [0]
