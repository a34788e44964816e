"""vLLM's own OffloadingConnector in a real engine, its own worker over a device that is played and copies late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from references import References

from engines import BLOCK, BLOCK_BY_BLOCK, prompt
from kvpact_testkit.demo.engine import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCKS = 3
PROMPTS = range(7100, 7106)


class Offloading:
    """Starts such engines, one after the other, over the same files."""

    def __init__(self, start: Callable[..., EngineProcess], folder: Path) -> None:
        self._start, self._folder = start, folder
        self.log = folder / "log"
        self.log.mkdir()

    def engine(self, spec: str, seed: int = 1, ranks: int = 1) -> EngineProcess:
        extra = {
            "spec_name": spec,
            "spec_module_path": "kvpact_testkit.vllm.offloading",
            "cpu_bytes_to_use": 1 << 24,
            "seed": seed,
            "log": str(self.log),
        }
        if spec == "PlayedTieringSpec":
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(self._folder / "files")}]
        transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return self._start(transfer, arguments={**BLOCK_BY_BLOCK, "tensor_parallel_size": ranks})

    def lines(self, file: str) -> list[str]:
        path = self.log / file
        return path.read_text().splitlines() if path.exists() else []

    def blocks(self, what: str) -> int:
        """How many were stored, or loaded."""
        return sum(int(line.split()[1]) for line in self.lines("jobs") if line.startswith(what))

    def require_loaded(self, ranks: int = 1) -> None:
        """Each rank has loaded all blocks of each prompt once, and no copy was a mistake."""
        assert self.blocks("load") == ranks * BLOCKS * len(PROMPTS)
        assert self.lines("mistakes") == []


def ask(engine: EngineProcess, references: References, cached: int) -> None:
    """With as much of each prompt from host memory, the answer is that of an engine with as much of its own cache."""
    for number in PROMPTS:
        engine.reset_prefix_cache()
        (output,) = engine.generate([prompt(number, BLOCKS)], max_tokens=4)
        assert output.cached_tokens == cached
        assert references.agree(prompt(number, BLOCKS), output), number


@pytest.mark.proof
def test_answers_from_host_memory_are_the_engines_own(
    start_engine: Callable[..., EngineProcess], references: References, tmp_path: Path
) -> None:
    offloading = Offloading(start_engine, tmp_path)
    engine = offloading.engine("PlayedSpec")
    ask(engine, references, 0)
    assert offloading.blocks("load") == 0
    ask(engine, references, BLOCKS * BLOCK)
    offloading.require_loaded()
    assert engine.metrics()["vllm:external_prefix_cache_hits"] == BLOCKS * BLOCK * len(PROMPTS)


@pytest.mark.proof
def test_answers_from_files_after_a_restart_are_the_engines_own(
    start_engine: Callable[..., EngineProcess], references: References, tmp_path: Path
) -> None:
    offloading = Offloading(start_engine, tmp_path)
    engine = offloading.engine("PlayedTieringSpec")
    ask(engine, references, 0)
    engine.stop()
    ask(offloading.engine("PlayedTieringSpec", seed=2), references, BLOCKS * BLOCK)
    offloading.require_loaded()


@pytest.mark.proof
def test_answers_of_two_ranks_are_their_own(start_engine: Callable[..., EngineProcess], tmp_path: Path) -> None:
    offloading = Offloading(start_engine, tmp_path)
    references = References(start_engine(arguments={**BLOCK_BY_BLOCK, "tensor_parallel_size": 2}))
    engine = offloading.engine("PlayedSpec", seed=3, ranks=2)
    ask(engine, references, 0)
    ask(engine, references, BLOCKS * BLOCK)
    offloading.require_loaded(ranks=2)
