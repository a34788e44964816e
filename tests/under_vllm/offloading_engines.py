"""Real engines with vLLM's own OffloadingConnector, its own worker over a device that is played and copies late."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from references import References

from engines import BLOCK, BLOCK_BY_BLOCK, IN_ONE_PROCESS, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output

ENGINES = count()

WRITTEN_SECONDS = 30.0
"""Seconds within which what was computed is stored; it takes milliseconds, on a busy machine more."""


class Offloading:
    """Starts such engines, one after the other or side by side, with tiers below host memory."""

    def __init__(self, model: Path, folder: Path, started: ExitStack) -> None:
        self._model, self._folder, self._started, self._numbers = model, folder, started, count(1)
        self.log = folder / "log"
        self.log.mkdir()

    def engine(
        self,
        spec: str,
        tiers: Sequence[Mapping[str, Any]] = (),
        *,
        memory: int = 1 << 24,
        model: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> EngineProcess:
        """A ready engine with a seed of its own; what is left of it is killed after the test."""
        number = next(self._numbers)
        extra = {
            "spec_name": spec,
            "spec_module_path": "kvpact_testkit.vllm.offloading",
            "cpu_bytes_to_use": memory,
            "seed": number,
            "log": str(self.log),
        }
        if tiers:
            extra["secondary_tiers"] = [dict(tier) for tier in tiers]
        transfer = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": f"kvpact-test-{os.getpid()}-{next(ENGINES)}",
            "kv_connector_extra_config": extra,
        }
        settings = EngineSettings(
            model or self._model,
            transfer,
            {**BLOCK_BY_BLOCK, **arguments},
            IN_ONE_PROCESS if environment is None else environment,
        )
        engine = ForkedEngine(settings, self._folder / f"offloading-{number}.log")
        self._started.callback(_end, engine)
        return engine.wait_ready()

    def lines(self, file: str) -> list[str]:
        path = self.log / file
        return path.read_text().splitlines() if path.exists() else []

    def blocks(self, what: str) -> int:
        """How many were stored from the device, or loaded to it."""
        return sum(int(line.split()[1]) for line in self.lines("jobs") if line.startswith(what))


def _end(engine: EngineProcess) -> None:
    """Kill it, and remove what vLLM then leaves of its host memory."""
    engine.kill()
    assert engine.settings.kv_transfer_config is not None
    for path in Path("/dev/shm").glob(f"vllm_offload_{engine.settings.kv_transfer_config['engine_id']}*"):
        path.unlink()


def asked(engine: EngineProcess, number: int, blocks: int, **options: Any) -> Output:
    """The answer to a prompt, of which nothing is in the engine's own prefix cache."""
    engine.reset_prefix_cache()
    (output,) = engine.generate([prompt(number, blocks)], max_tokens=4, **options)
    return output


def ask(
    engine: EngineProcess, references: References, numbers: Sequence[int], blocks: int, cached: int | None = None
) -> list[int]:
    """How many tokens of each prompt were not computed: `cached` if that is given.

    Each answer is that of an engine with as much of its own cache.
    """
    found = []
    for number in numbers:
        output = asked(engine, number, blocks)
        assert cached is None or output.cached_tokens == cached, (number, output.cached_tokens)
        assert references.agree(prompt(number, blocks), output), f"another answer to prompt {number}"
        found.append(output.cached_tokens)
    return found


def metric(engine: EngineProcess, name: str) -> float:
    """A count of the one tier of kvpact's that an engine has."""
    counts = engine.metrics()
    return sum(value for label, value in counts.items() if label.startswith(f"vllm:kvpact_{name}{{"))


def failed_promotions(engine: EngineProcess) -> float:
    """Reads of a secondary tier by vLLM, not all blocks of which have come."""
    counts = engine.metrics()
    names = "vllm:kv_offload_tiering_promotion_job_failures"
    return sum(value for label, value in counts.items() if label.startswith(names))


def wait_until(engine: EngineProcess, name: str, value: float) -> None:
    """Wait until a count has come to this, which an engine tells with its steps, once a second."""
    until = time.monotonic() + WRITTEN_SECONDS
    while (now := metric(engine, name)) < value:
        assert time.monotonic() < until, f"{name} is {now}"
        time.sleep(0.5)
        engine.generate([prompt(999_999, 0)], max_tokens=1)
    assert now == value


def all_of(blocks: int) -> int:
    """The tokens of a prompt that can come from outside."""
    return blocks * BLOCK
