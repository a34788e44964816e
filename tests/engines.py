"""Real vLLM engines for tests: a tiny model made once, and engines kept running for all tests that ask for the same.

Use the fixtures `tiny_model`, `engine_pool` and `start_engine`; `kvpact.demo.engine` says what an engine can do.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvpact.config import load_config
from kvpact.demo.engine import EngineProcess, EngineSettings
from kvpact.demo.model import TINY_SHAPE, ensure_model

BLOCK = 128
"""Tokens in a block of the CPU engine."""

BLOCK_BY_BLOCK: dict[str, Any] = {"max_num_batched_tokens": BLOCK, "max_num_seqs": 8}
"""Engine arguments with which every block is computed in a step of its own, whatever was there before.

What comes out of a matrix product can depend on its shape in the last bits, and does on processors without AVX-512. So
answers that reused different parts of a prompt are only equal bit by bit if all was computed in the same shapes.
"""

TOKENIZER_TEXT = "A prompt prefix is never computed twice: it is promised, committed, loaded and used.\n" * 50
MAX_KEPT = 2
"""Engines kept running at once; each takes two gigabytes."""


def prompt(seed: int, blocks: int, tail: int = 17) -> list[int]:
    """A prompt of `blocks` full blocks and `tail` more tokens; different seeds differ from the first token on."""
    source = random.Random(seed)
    return [source.randrange(1, TINY_SHAPE.vocabulary) for _ in range(blocks * BLOCK + tail)]


def kvpact_transfer_config(**settings: object) -> dict[str, Any]:
    """The `kv_transfer_config` that turns kvpact on, with `settings` as its configuration.

    A tiny model on a busy machine may compute faster than it loads, so by default everything is loaded.
    """
    return load_config({"recompute_if_faster": False, **settings}, {}).kv_transfer_config()


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
                self._engines.pop(next(iter(self._engines))).stop()
            engine = EngineProcess(settings, self._logs / f"pool-{next(self._numbers)}.log")
        self._engines[key] = engine
        return engine.wait_ready()

    def close(self) -> None:
        """Stop all engines."""
        while self._engines:
            self._engines.popitem()[1].stop()


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
            engine = EngineProcess(settings, tmp_path / f"engine-{next(numbers)}.log")
            started.callback(engine.kill)
            return engine.wait_ready()

        yield start
