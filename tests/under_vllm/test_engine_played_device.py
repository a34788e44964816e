"""A real engine over a device that is played: what its late copies bring back is bit for bit the engine's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from references import References

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, prompt
from kvpact.demo.engine import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
BLOCKS = 3


class Played:
    """Starts such engines, one after the other, over the same disk."""

    def __init__(self, start: Callable[..., EngineProcess], directory: Path, ranks: int) -> None:
        self._start, self._directory, self._ranks = start, directory, ranks
        self.log = directory / "log"
        self.log.mkdir()

    def engine(self, seed: int) -> EngineProcess:
        settings = kvpact_transfer_config(
            memory="16MiB", tiers=[f"disk://{self._directory / 'slabs'}?capacity=64MiB"], sync_load_budget="16MiB"
        )
        path = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        return self._start(
            settings | {"kv_connector": "PlayedConnector", "kv_connector_module_path": "played"},
            arguments={**BLOCK_BY_BLOCK, "tensor_parallel_size": self._ranks},
            environment={"PLAYED_LOG": str(self.log), "PLAYED_SEED": str(seed), "PYTHONPATH": path},
        )

    def lines(self, file: str) -> list[str]:
        path = self.log / file
        return path.read_text().split("\n")[:-1] if path.exists() else []


def ask(engine: EngineProcess, references: References, numbers: range, cached: int) -> None:
    """What the engine says, with as much of each prompt from kvpact, is what it says with as much of its own."""
    for number in numbers:
        engine.reset_prefix_cache()
        (output,) = engine.generate([prompt(7000 + number, BLOCKS)], max_tokens=4)
        assert output.cached_tokens == cached
        assert references.agree(prompt(7000 + number, BLOCKS), output), number


def test_answers_from_memory_and_from_disk_are_the_engines_own(
    start_engine: Callable[..., EngineProcess], references: References, tmp_path: Path
) -> None:
    played = Played(start_engine, tmp_path, 1)
    engine = played.engine(1)
    ask(engine, references, range(6), 0)
    assert "save 1" in played.lines("jobs")
    assert (played.log / "standing").read_text() == "OPEN"
    ask(engine, references, range(6), BLOCKS * BLOCK)
    assert (played.log / "standing").read_text() == "PROVEN"
    loads = [line for line in played.lines("jobs") if line.startswith("load")]
    assert loads[:3] == ["load False 3"] * 3, "requests wait for the checks of the first loads"
    assert "load True 3" in loads, "and later steps for their own"
    ask(engine, references, range(6, 9), 0)
    engine.stop()
    ask(played.engine(2), references, range(9), BLOCKS * BLOCK)
    assert played.lines("wrong") == []


@pytest.mark.proof
def test_two_ranks_and_a_killed_engine(start_engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    played = Played(start_engine, tmp_path, 2)
    references = References(start_engine(arguments={**BLOCK_BY_BLOCK, "tensor_parallel_size": 2}))
    engine = played.engine(5)
    ask(engine, references, range(5), 0)
    ask(engine, references, range(5), BLOCKS * BLOCK)
    assert {"load False 3", "load True 3"} <= set(played.lines("jobs"))
    engine.kill()
    ask(played.engine(7), references, range(5), BLOCKS * BLOCK)
    assert played.lines("wrong") == []
