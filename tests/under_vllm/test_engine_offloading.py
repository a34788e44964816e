"""vLLM's own OffloadingConnector in a real engine, its own worker over a device that is played and copies late."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from offloading_engines import Offloading, all_of, ask
from references import References

from engines import BLOCK_BY_BLOCK
from kvpact_testkit.demo.engine import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCKS = 3
PROMPTS = range(7100, 7106)


def files(folder: Path) -> dict[str, Any]:
    """vLLM's own tier of files."""
    return {"type": "fs", "root_dir": str(folder)}


def require_loaded(offloading: Offloading, ranks: int = 1) -> None:
    """Each rank has loaded all blocks of each prompt once, and no copy was a mistake."""
    assert offloading.blocks("load") == ranks * BLOCKS * len(PROMPTS)
    assert offloading.lines("mistakes") == []


@pytest.mark.soak
def test_answers_from_host_memory_are_the_engines_own(offloading: Offloading, references: References) -> None:
    engine = offloading.engine("PlayedSpec")
    ask(engine, references, PROMPTS, BLOCKS, 0)
    assert offloading.blocks("load") == 0
    ask(engine, references, PROMPTS, BLOCKS, all_of(BLOCKS))
    require_loaded(offloading)
    assert engine.metrics()["vllm:external_prefix_cache_hits"] == all_of(BLOCKS) * len(PROMPTS)


@pytest.mark.proof
def test_answers_from_files_after_a_restart_are_the_engines_own(
    offloading: Offloading, references: References, tmp_path: Path
) -> None:
    engine = offloading.engine("PlayedTieringSpec", [files(tmp_path / "files")])
    ask(engine, references, PROMPTS, BLOCKS, 0)
    engine.stop()
    ask(
        offloading.engine("PlayedTieringSpec", [files(tmp_path / "files")]),
        references, PROMPTS, BLOCKS, all_of(BLOCKS),
    )  # fmt: skip
    require_loaded(offloading)


@pytest.mark.soak
def test_answers_of_two_ranks_are_their_own(offloading: Offloading, start_engine: Callable[..., EngineProcess]) -> None:
    references = References(start_engine(arguments={**BLOCK_BY_BLOCK, "tensor_parallel_size": 2}))
    engine = offloading.engine("PlayedSpec", environment={}, tensor_parallel_size=2)
    ask(engine, references, PROMPTS, BLOCKS, 0)
    ask(engine, references, PROMPTS, BLOCKS, all_of(BLOCKS))
    require_loaded(offloading, ranks=2)
