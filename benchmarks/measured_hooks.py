"""A `PactConnector` that says what its hooks cost the engine's own threads: CPU seconds, in a file for each half.

The files are `scheduler` and `worker-<pid>` in the folder `$KVPACT_HOOK_TIMES`: the sum so far, eight bytes that change
in place. What `$KVPACT_LEAVE_OUT` names (see `SUSPECTS`) does not happen, to find out what it costs. Used by
`cold_overhead.py` and `e2e.py`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from pathlib import Path
from time import thread_time
from typing import Any

from benchmarks.cold_costs import FOLDER, SECONDS
from kvpact.memory.prefault import PageTaker
from kvpact.vllm import PactConnector
from kvpact.worker.transfer import RankTransfers

LEAVE_OUT = "KVPACT_LEAVE_OUT"

SUSPECTS: dict[str, str] = {
    "prefault": "no page of the arena is taken from the machine before its first use",
    "copy": "saves are reported as failed at once: nothing is copied, and nothing written to a tier",
}


class MeasuredPactConnector(PactConnector):
    """As its base, measured."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        left_out = os.environ.get(LEAVE_OUT)
        if left_out == "prefault":
            PageTaker.start = lambda self: None  # type: ignore[method-assign]
        elif left_out == "copy":
            RankTransfers.start_saves = _refuse  # type: ignore[method-assign]
        super().__init__(vllm_config, role, kv_cache_config)
        half = "scheduler" if self._scheduler is not None else f"worker-{os.getpid()}"
        path = Path(os.environ[FOLDER], half)
        path.write_bytes(SECONDS.pack(0.0))
        with path.open("r+b") as file:
            self._total = mmap.mmap(file.fileno(), SECONDS.size)
        self._seconds, self._depth = 0.0, 0
        ours = [kind for kind in PactConnector.__mro__ if kind.__module__.startswith("kvpact.")]
        for name in {name for kind in ours for name, hook in vars(kind).items() if isfunction(hook)}:
            if not name.startswith("_"):
                setattr(self, name, self._measured(getattr(self, name)))

    def _measured(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def measured(*arguments: Any, **named: Any) -> Any:
            if self._depth:  # called by another hook, which is measured
                return hook(*arguments, **named)
            self._depth, began = 1, thread_time()
            try:
                return hook(*arguments, **named)
            finally:
                self._seconds += thread_time() - began
                self._depth = 0
                SECONDS.pack_into(self._total, 0, self._seconds)

        return measured


def _refuse(self: RankTransfers, jobs: Any) -> None:
    raise RuntimeError("left out")
