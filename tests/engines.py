"""Real vLLM engines for tests: a tiny model made once, and engines kept running for all tests that ask for the same.

Use the fixtures `tiny_model`, `engine_pool` and `start_engine`; `kvpact_testkit.demo.engine` says what an engine can
do.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.model import TINY_SHAPE, ensure_model
from tiny_engine import BLOCK, TOKENIZER_TEXT, kvpact_transfer_config, prompt

__all__ = ["BLOCK", "BLOCK_BY_BLOCK", "IN_ONE_PROCESS", "EnginePool", "kvpact_transfer_config", "leases_when", "prompt"]

BLOCK_BY_BLOCK: dict[str, Any] = {"max_num_batched_tokens": BLOCK, "max_num_seqs": 8}
"""Engine arguments with which every block is computed in a step of its own, whatever was there before.

What comes out of a matrix product can depend on its shape in the last bits, and does on processors without AVX-512. So
answers that reused different parts of a prompt are only equal bit by bit if all was computed in the same shapes.
"""

IN_ONE_PROCESS: Mapping[str, str] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""Environment of an engine whose scheduler and worker live in the process that is asked: three times as fast to start.

It steps only while it answers, and computes on any core; the answers are the same bit by bit.
"""

MAX_KEPT = 2
"""Engines kept running at once; each takes two gigabytes."""


def leases_when(engine: EngineProcess, name: str, value: float, seconds: float = 30.0) -> int:
    """Leases held when the idle engine has written this count to its `stats_file`, which it does once it is at rest."""
    until = time.monotonic() + seconds
    while (stats := engine.stats()).get(name) != value:
        assert time.monotonic() < until, f"{name} is {stats.get(name)}, not {value}"
        time.sleep(0.1)
    return int(stats["leases_held"])


class EnginePool:
    """Engines by their settings, started when first asked for; the least recently used one makes room."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._numbers = logs, count()
        self._engines: dict[str, EngineProcess] = {}

    def get(self, settings: EngineSettings) -> EngineProcess:
        """A ready engine with these settings. Its caches hold what earlier tests left: use prompts of your own."""
        key = json.dumps([settings.llm_arguments(), dict(settings.environment)], sort_keys=True)
        engine = self._engines.pop(key, None)
        if engine is None or not engine.processes():
            while len(self._engines) >= MAX_KEPT:
                self._engines.pop(next(iter(self._engines))).discard()
            engine = ForkedEngine(settings, self._logs / f"pool-{next(self._numbers)}.log")
        self._engines[key] = engine
        return engine.wait_ready()

    def close(self) -> None:
        """End all engines."""
        while self._engines:
            self._engines.popitem()[1].discard()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Llama with 4 layers and random weights: 4 KiB of keys and values per token and layer half."""
    pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")
    return ensure_model(tmp_path_factory.mktemp("model"), TINY_SHAPE, TOKENIZER_TEXT)


@pytest.fixture(scope="session")
def engine_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """Engines shared by all tests of the session, for tests that leave them alive and well."""
    pool = EnginePool(tmp_path_factory.mktemp("engine-logs"))
    yield pool
    pool.close()


@pytest.fixture
def start_engine(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts an engine on the tiny model for this test alone, ready to use; whatever is left of it is killed after."""
    numbers = count()
    with ExitStack() as started:

        def start(
            kv_transfer_config: Mapping[str, Any] | None = None,
            *,
            arguments: Mapping[str, Any] | None = None,
            environment: Mapping[str, str] | None = None,
        ) -> EngineProcess:
            settings = EngineSettings(tiny_model, kv_transfer_config, arguments or {}, environment or {})
            engine = ForkedEngine(settings, tmp_path / f"engine-{next(numbers)}.log")
            started.callback(engine.kill)
            return engine.wait_ready()

        yield start
