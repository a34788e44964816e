"""What the tests on real engines share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from faulty_engine import FaultyEngine
from offloading_engines import Offloading
from references import References

from engines import BLOCK_BY_BLOCK, IN_ONE_PROCESS, EnginePool
from kvpact_testkit.demo.engine import EngineSettings, one_core_each

if TYPE_CHECKING:
    from vllm_played_engine import PlayedEngine


@pytest.fixture(autouse=True)
def not_judged_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations of beds are refused by the connector alone, though some test has loaded vLLM's plug-in here."""
    if find_spec("vllm") is not None:
        checks = import_module("kvpact.vllm.checks")
        for judge in ("check_configuration", "let_no_step_wait"):
            monkeypatch.setattr(checks, judge, lambda *_: None)


@pytest.fixture(autouse=True)
def nobody_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step here answers all requests that memory alone can answer, however busy the machine is."""
    for name in ("CROWD_BUDGETS", "MAX_CROWD_BUDGETS"):
        monkeypatch.setattr(f"kvpact.cache.budget.{name}", 10**6)


@pytest.fixture(scope="session")
def references(tiny_model: Path, engine_pool: EnginePool) -> References:
    """An engine without kvpact, on the core that other engines' workers compute on."""
    engine = engine_pool.get(EngineSettings(tiny_model, arguments=BLOCK_BY_BLOCK, environment=IN_ONE_PROCESS))
    for thread in Path(f"/proc/{engine.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {int(one_core_each())})
    return References(engine)


@pytest.fixture(scope="session")
def faulty_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyEngine]:
    """An engine whose kvpact fails on demand, shared; ask it prompts of your own, and leave no fault on."""
    engine = FaultyEngine(tiny_model, tmp_path_factory.mktemp("faulty"))
    try:
        engine.process.wait_ready()
        yield engine
    finally:
        engine.process.discard()  # nothing of it is to be kept


@pytest.fixture
def offloading(tiny_model: Path, tmp_path: Path) -> Iterator[Offloading]:
    """Starts engines with vLLM's own offloading, for this test alone."""
    with ExitStack() as started:
        yield Offloading(tiny_model, tmp_path, started)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., PlayedEngine]]:
    """Starts a played engine with these tiers and settings; one that the test leaves open comes to rest."""
    from vllm_played_engine import PlayedEngine

    engines: list[PlayedEngine] = []

    def start(*tiers: str, **settings: Any) -> PlayedEngine:
        if tiers:
            settings["tiers"] = list(tiers)
        engines.append(PlayedEngine(tmp_path / "engine", **settings))
        return engines[-1]

    yield start
    for engine in engines:
        if engine.connector.scheduler_side.mounted is not None:
            engine.run()
            engine.assert_at_rest()
        engine.close()
