"""`examples/leasing_connector.py` on vLLM's real scheduler: what it promised is there until the match ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt

EXAMPLES = Path(__file__).parents[2] / "examples"
STORED = 6
"""Blocks that the connector keeps."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
    """10 blocks, of which one is vLLM's own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sys.modules.pop("leasing_connector", None)
    transfer = {
        "kv_connector": "LeasingConnector",
        "kv_connector_module_path": "leasing_connector",
        "kv_connector_extra_config": {"blocks": STORED},
    }
    settings = EngineSettings(num_blocks=10, block_size=BLOCK, scheduler="kvpact.vllm.scheduler.pact_scheduler")
    engine = VllmEngine(settings, transfer, lambda line: None)
    yield engine
    engine.close()


def store(engine: VllmEngine, name: str, seed: int, blocks: int) -> None:
    """A request's blocks, which vLLM itself then forgets."""
    engine.add(name, prompt(seed, blocks, tail=1), max_tokens=1)
    assert engine.finish(name)
    assert engine.drain()
    assert engine.forget_computed()


def test_the_oldest_blocks_make_room_for_others(engine: VllmEngine) -> None:
    for number in range(3):
        store(engine, f"first{number}", number, 3)
    assert len(engine.connector.stored) == len(engine.ranks[0].connector.blocks) == STORED
    engine.add("again", prompt(2, 3, tail=1))
    assert engine.finish("again")
    assert engine.observed.outputs["again"] == engine.expected("again")
    assert engine.ranks[0].connector.blocks.keys() == engine.connector.stored.keys()


def test_leased_blocks_are_not_dropped_for_others(engine: VllmEngine) -> None:
    store(engine, "old", 1, 4)
    engine.add("wall", prompt(2, 6), max_tokens=2)
    engine.add("waits", prompt(1, 4, tail=1))
    engine.step()
    (promised,) = engine.connector.plans.values()
    assert len(promised) == 4
    engine.finish("wall")  # its 6 blocks want to be stored, and there is room for 2
    assert engine.connector.stored.keys() >= {*promised}
    assert len(engine.connector.stored) == STORED
    assert engine.finish("waits")
    assert engine.observed.outputs["waits"] == engine.expected("waits")
    assert engine.drain()
    assert not engine.connector.leases
    assert not engine.connector.plans


def test_a_reset_of_the_connector_forgets_all(engine: VllmEngine) -> None:
    store(engine, "old", 1, 4)
    assert engine.reset(running=False, connector=True)
    engine.add("again", prompt(1, 4, tail=1))
    assert engine.finish("again")
    assert engine.observed.outputs["again"] == engine.expected("again")
    assert engine.drain()
    assert engine.ranks[0].connector.blocks.keys() == engine.connector.stored.keys()
