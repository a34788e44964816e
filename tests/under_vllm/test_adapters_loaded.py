"""Adapters that are written, loaded, overwritten and loaded again while an engine runs: what is cached is theirs."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager

from kvpact.identity.adapter_files import look_at_files, look_at_rest
from kvpact.identity.loaded_adapters import NO_STAMP, LoadedAdapters, LoadedAdaptersWriter
from kvpact.vllm import worker as worker_module
from kvpact.vllm.adapter_watch import watch_adapters
from kvpact.vllm.compat.objects import LOAD_ADAPTER
from kvpact.vllm.worker import KvpactWorker
from vllm_played_engine import BLOCK, PlayedEngine, PlayedRequest, answer, make_prompt

BLOCKS = 6
PROMPT = make_prompt(1, BLOCKS)
OLD, NEW = b"old weights", b"new weights"
WEIGHTS = "adapter_model.safetensors"


def write_adapter(folder: Path, weights: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def lora(folder: Path, number: int = 1) -> LoRARequest:
    return LoRARequest(f"style {number}", number, str(folder))


class Manager:
    """vLLM's, as far as it is watched: reads an adapter's files once, and again when it has dropped it."""

    def __init__(self) -> None:
        self.loaded: OrderedDict[int, bytes] = OrderedDict()
        self.while_loading: Callable[[], object] = lambda: None

    def add_adapter(self, request: LoRARequest) -> None:
        if request.lora_int_id not in self.loaded:
            self.loaded[request.lora_int_id] = self._load_adapter(request)

    def _load_adapter(self, request: LoRARequest) -> bytes:
        weights = (Path(request.lora_path) / WEIGHTS).read_bytes()
        self.while_loading()
        return weights


# The worker's half


@pytest.fixture
def page() -> memoryview:
    return memoryview(bytearray(4096))


def watched(page: memoryview) -> tuple[Manager, LoadedAdaptersWriter]:
    manager, table = Manager(), LoadedAdaptersWriter(page)
    assert watch_adapters(manager, table)
    return manager, table


def test_vllm_loads_adapters_with_the_method_that_is_watched() -> None:
    assert LOAD_ADAPTER in vars(WorkerLoRAManager)
    assert LRUCacheWorkerLoRAManager.add_adapter.__code__.co_names.count(LOAD_ADAPTER) == 1


def test_what_was_loaded_is_said_with_the_state_of_its_files(page: memoryview, tmp_path: Path) -> None:
    manager, table = watched(page)
    path = write_adapter(tmp_path / "one", OLD)
    manager.add_adapter(lora(path))
    assert manager.loaded[1] == OLD
    stamp = table.stamp(1)
    assert stamp == look_at_files(path).stamp
    write_adapter(path, NEW)
    assert table.stamp(1) == stamp, "the engine computes with what it has loaded"
    manager.loaded.clear()
    manager.add_adapter(lora(path))
    assert table.stamp(1) == look_at_files(path).stamp != stamp


def test_files_that_change_while_they_are_loaded_are_unknown(page: memoryview, tmp_path: Path) -> None:
    manager, table = watched(page)
    path = write_adapter(tmp_path / "one", OLD)
    manager.add_adapter(lora(path))
    manager.loaded.clear()
    manager.while_loading = lambda: (path / WEIGHTS).write_bytes(NEW)
    manager.add_adapter(lora(path))
    assert table.stamp(1) == NO_STAMP


def test_a_load_that_fails_fails_and_leaves_an_unknown_adapter(page: memoryview, tmp_path: Path) -> None:
    manager, table = watched(page)
    path = write_adapter(tmp_path / "one", OLD)
    manager.add_adapter(lora(path))
    manager.loaded.clear()
    (path / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError):
        manager.add_adapter(lora(path))
    assert table.stamp(1) == NO_STAMP


def test_saying_so_never_costs_the_load(page: memoryview, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager, table = watched(page)
    table.close()
    manager.add_adapter(lora(write_adapter(tmp_path / "one", OLD)))
    assert manager.loaded[1] == OLD
    assert "could not be recorded" in caplog.text


def test_files_that_a_change_could_leave_as_they_look_are_not_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock for files that knows whole seconds, or is ahead of this machine's."""
    path = write_adapter(tmp_path / "one", OLD)
    files = look_at_rest(path)
    assert files is not None
    changed_ns = files.changed_ns
    for now, is_at_rest in ((changed_ns + 10**8, True), (changed_ns - 10**9, False)):
        monkeypatch.setattr("kvpact.identity.adapter_files.time.time_ns", lambda now=now: now)
        assert (look_at_rest(path) is not None) == is_at_rest
    real = os.lstat

    def whole_seconds(place: Any) -> Any:
        found = real(place)
        names = ("st_mode", "st_dev", "st_ino", "st_size", "st_mtime_ns")
        coarse = found.st_ctime_ns // 10**9 * 10**9
        return SimpleNamespace(**{name: getattr(found, name) for name in names}, st_ctime_ns=coarse)

    monkeypatch.setattr("kvpact.identity.adapter_files.os.lstat", whole_seconds)
    coarse_ns = changed_ns // 10**9 * 10**9
    for now, is_at_rest in ((coarse_ns + 19 * 10**8, False), (coarse_ns + 2 * 10**9, True)):
        monkeypatch.setattr("kvpact.identity.adapter_files.time.time_ns", lambda now=now: now)
        assert (look_at_rest(path) is not None) == is_at_rest


def test_the_worker_watches_the_manager_of_its_model_runner_once(
    page: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without adapters, and on a release that keeps them elsewhere, nothing is said."""
    table = LoadedAdaptersWriter(page)
    connector = SimpleNamespace(cache_worker=SimpleNamespace(notices=None, adapters=table))
    monkeypatch.setattr(worker_module, "_connector", lambda: connector)
    base = KvpactWorker.__bases__[0]
    managers = [None, SimpleNamespace(), Manager(), Manager()]
    runner = SimpleNamespace(get_model=lambda: None, get_draft_model=lambda: None)

    def load_model(self: Any) -> None:
        self.model_runner = runner

    monkeypatch.setattr(base, "load_model", load_model)
    worker = KvpactWorker.__new__(KvpactWorker)
    path = write_adapter(tmp_path / "one", OLD)
    for number, manager in enumerate(managers):
        runner.lora_manager = manager
        for _ in range(2):
            worker.load_model()
        if isinstance(manager, Manager):
            said: list[int] = []
            monkeypatch.setattr(table, "loaded", lambda number, stamp, said=said: said.append(number))
            manager.add_adapter(lora(path, number))
            assert said == [number], "once"


# Both halves


class AdapterEngine(PlayedEngine):
    """A played engine that computes with adapters: their weights are in each slot."""

    def __init__(self, directory: Path, *, watched: bool = True, **settings: Any) -> None:
        super().__init__(directory, **settings)
        self.manager = Manager()
        self.before_loading: Callable[[], None] = lambda: None
        if watched:
            table = self.worker.cache_worker.adapters
            assert table is not None
            watch_adapters(self.manager, table)

    def execute(self, scheduled: Any) -> Any:
        if scheduled.num_scheduled_tokens:
            before, self.before_loading = self.before_loading, lambda: None
            before()
        for request_id in scheduled.num_scheduled_tokens:
            if (request := self.scheduler.requests[request_id].lora_request) is not None:
                self.manager.add_adapter(request)
        return super().execute(scheduled)

    def adapter_of(self, request_id: str) -> bytes:
        request = self.scheduler.requests[request_id].lora_request
        return self.manager.loaded[request.lora_int_id] if request is not None else b""

    def ask(self, request: LoRARequest, weights: bytes) -> int:
        """Blocks that a request had from kvpact; what it says is what these weights say."""
        self.forget()
        played: PlayedRequest = self.generate(PROMPT, lora_request=request)
        assert played.said == answer(PROMPT, 3, weights)
        return played.cached_tokens // BLOCK


@pytest.fixture(params=["sync", "async"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AdapterEngine]:
    write_adapter(tmp_path / "known", OLD)
    limit = "1GiB" if request.param == "sync" else 0
    made = AdapterEngine(tmp_path / "engine", sync_load_budget=limit, prepare_deadline=5.0)
    yield made
    made.assert_at_rest()
    made.close()


def test_h47_an_adapter_written_under_the_engine_is_cached_behind_its_first_request(
    engine: AdapterEngine, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "later", NEW)
    assert [engine.ask(lora(path), NEW) for _ in range(3)] == [0, 0, BLOCKS]


def test_h47_an_adapter_that_is_loaded_ahead_is_cached_from_its_first_request_on(
    engine: AdapterEngine, tmp_path: Path
) -> None:
    for number, weights in ((1, b"step 1"), (2, b"step 2"), (3, b"step 1")):
        path = write_adapter(tmp_path / str(number), weights)
        engine.manager.add_adapter(lora(path, number))
        known = BLOCKS if number == 3 else 0
        assert [engine.ask(lora(path, number), weights) for _ in range(2)] == [known, BLOCKS]


def test_h47_an_adapter_that_was_overwritten_after_it_was_loaded_is_not_cached(
    engine: AdapterEngine, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "later", OLD)
    engine.manager.add_adapter(lora(path))
    write_adapter(path, NEW)
    assert [engine.ask(lora(path), OLD) for _ in range(3)] == [0, 0, 0]
    assert engine.counts["saved_blocks"] == 0
    engine.manager.loaded.clear()
    assert [engine.ask(lora(path), NEW) for _ in range(3)] == [0, 0, BLOCKS]


def test_h47_without_the_worker_class_only_what_is_older_than_the_engine_is_cached(tmp_path: Path) -> None:
    known = write_adapter(tmp_path / "known", OLD)
    os.utime(known)
    engine = AdapterEngine(tmp_path / "engine", watched=False, prepare_deadline=5.0)
    later = write_adapter(tmp_path / "later", NEW)
    for _ in range(2):
        assert engine.ask(lora(later, 2), NEW) == 0
    engine.close()


def reload_with(engine: AdapterEngine, change: Callable[[], object]) -> None:
    """With the next step that computes, which is ordered by then, vLLM loads the adapter again."""

    def before_loading() -> None:
        engine.manager.loaded.clear()
        change()

    engine.before_loading = before_loading


@pytest.mark.parametrize("which", ["known", "later"])
def test_h47_what_a_step_computes_that_loads_other_files_is_not_stored_under_the_old_ones(
    engine: AdapterEngine, which: str, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / which, OLD) if which == "later" else tmp_path / which
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    engine.manager.add_adapter(lora(path))
    reload_with(engine, lambda: write_adapter(path, NEW))
    assert engine.ask(lora(path), NEW) == 0
    engine.manager.add_adapter(lora(copy, 2))
    assert [engine.ask(lora(copy, 2), OLD) for _ in range(2)] == [0, BLOCKS]
    assert [engine.ask(lora(path), NEW) for _ in range(2)] == [0, BLOCKS]


@pytest.mark.parametrize("which", ["known", "later"])
def test_h47_what_was_loaded_for_the_old_files_is_computed_again_if_the_step_loads_others(
    engine: AdapterEngine, which: str, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / which, OLD) if which == "later" else tmp_path / which
    engine.manager.add_adapter(lora(path))
    assert [engine.ask(lora(path), OLD) for _ in range(2)] == [0, BLOCKS]
    reload_with(engine, lambda: write_adapter(path, NEW))
    engine.ask(lora(path), NEW)
    assert [engine.ask(lora(path), NEW) for _ in range(2)] == [0, BLOCKS]


@pytest.mark.parametrize("reloads", [True, False])
def test_h47_what_is_saved_lazily_is_not_stored_under_the_old_files(tmp_path: Path, *, reloads: bool) -> None:
    path, copy = (write_adapter(tmp_path / name, OLD) for name in ("known", "copy"))
    engine = AdapterEngine(tmp_path / "engine", num_blocks=24, save="lazy", prepare_deadline=5.0)
    engine.manager.add_adapter(lora(path))
    if reloads:
        reload_with(engine, lambda: write_adapter(path, NEW))
    assert engine.ask(lora(path), NEW if reloads else OLD) == 0
    for seed in range(2, 12):
        engine.generate(make_prompt(seed, BLOCKS))
    assert engine.ask(lora(copy, 2), OLD) == (0 if reloads else BLOCKS)
    engine.close()


def test_the_same_files_loaded_again_cost_nothing(engine: AdapterEngine, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "later", OLD)
    engine.manager.add_adapter(lora(path))
    reload_with(engine, lambda: None)
    assert engine.ask(lora(path), OLD) == 0
    reload_with(engine, lambda: None)
    assert engine.ask(lora(path), OLD) == BLOCKS


def test_ranks_that_loaded_different_states_are_not_cached(tmp_path: Path) -> None:
    """Two pages, one view: as an engine of two ranks has it."""
    pages = [memoryview(bytearray(4096)) for _ in range(2)]
    managers = [watched(page)[0] for page in pages]
    path = write_adapter(tmp_path / "later", OLD)
    managers[0].add_adapter(lora(path))
    write_adapter(path, NEW)
    managers[1].add_adapter(lora(path))
    loaded = LoadedAdapters(pages)
    loaded.look()
    stamp = look_at_files(path).stamp
    assert not loaded.all_have(1, stamp)
    managers[0].loaded.clear()
    managers[0].add_adapter(lora(path))
    loaded.look()
    assert loaded.all_have(1, stamp)
