"""Real engines for a third of a start's CPU time: their processes are forked, where on CPUs vLLM spawns them.

vLLM forks its engine core and its workers where it may, such as on GPUs. The processes are the same, say the same and
answer the same bit by bit; only they need not load all of vLLM again. Where a test is about the start itself it takes
`EngineProcess`, and so does the demonstration.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvpact_testkit.demo.engine import EngineProcess, EngineSettings


class ForkedEngine(EngineProcess):
    """One engine, each rank of which has one core."""

    HOST = (str(Path(__file__).with_name("forking_host.py")),)

    def __init__(self, settings: EngineSettings, log: Path, *, held: bool = False) -> None:
        one_thread = {"OMP_NUM_THREADS": "1", **settings.environment}  # OpenMP reads it when it is loaded, once
        super().__init__(replace(settings, environment=one_thread), log, held=held)
