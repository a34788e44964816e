"""The example of docs/scheduler-context.md on vLLM's real scheduler: somebody else's connector over the context."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.contract import SchedulerContext
from kvpact_testkit.results import as_text
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt

EXAMPLES = str(Path(__file__).parents[2] / "examples")


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    sys.modules.pop("sticky_blocks", None)


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    """12 blocks, of which one is vLLM's own."""
    transfer = {
        "kv_connector": "StickyBlocks",
        "kv_connector_module_path": "sticky_blocks",
        "kv_connector_extra_config": {"steps": 40},
    }
    engine = VllmEngine(EngineSettings(num_blocks=12, block_size=BLOCK), transfer, lambda line: None)
    yield engine
    engine.close()


def test_what_a_request_computed_stays_while_others_come_and_go(engine: VllmEngine) -> None:
    context = engine.connector.scheduler_context
    assert isinstance(context, SchedulerContext)
    engine.add("turn-1", prompt(1, 3), salt="a")
    assert engine.finish("turn-1")
    (until, kept) = engine.connector.kept[0]
    assert len(kept) == 3
    for number in range(4):  # 28 blocks through the 8 that are left
        engine.add(f"other-{number}", prompt(10 + number, 6))
        assert engine.finish(f"other-{number}")
    assert engine.connector.step < until
    engine.add("turn-2", prompt(1, 3) + prompt(5, 1), salt="a")
    engine.step()
    assert list(context.get_block_ids("turn-2")[0][:3]) == kept[::-1], "the second turn finds the first one's blocks"


def test_blocks_are_given_back_in_time_and_at_once_if_somebody_waits(engine: VllmEngine) -> None:
    context = engine.connector.scheduler_context
    for number in range(2):
        engine.add(f"r{number}", prompt(number, 4), salt="a")
        assert engine.finish(f"r{number}")
    assert len(engine.connector.kept) == 2
    engine.add("large", prompt(7, 9))
    assert engine.finish("large"), "what is kept must not keep anybody waiting"
    assert engine.drain()
    assert not engine.connector.kept
    assert engine.held_blocks == 0
    assert all(context.get_block(block).ref_cnt == 0 for block in range(1, 12))


def test_the_example_breaks_nothing() -> None:
    report = VllmDriver("sticky_blocks:StickyBlocks", {"steps": 3}).run(
        ["stores_and_loads", "h01_lookups_that_are_not_committed", "context_who_waits_is_listed_by_priority"]
    )
    assert not report.broken, as_text(report)
