"""What the tests on real engines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_engine import FaultyEngine
from references import References

from engines import BLOCK_BY_BLOCK, EnginePool
from kvpact.demo.engine import EngineSettings


@pytest.fixture(scope="session")
def references(tiny_model: Path, engine_pool: EnginePool) -> References:
    """An engine without kvpact."""
    return References(engine_pool.get(EngineSettings(tiny_model, arguments=BLOCK_BY_BLOCK)))


@pytest.fixture(scope="session")
def faulty_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyEngine]:
    """An engine whose kvpact fails on demand, shared; ask it prompts of your own, and leave no fault on."""
    engine = FaultyEngine(tiny_model, tmp_path_factory.mktemp("faulty"))
    with engine.process.wait_ready():
        yield engine
