"""A `PactConnector` that says of each slow scheduler step where its time went, as JSON lines in `$KVPACT_SLOW_STEPS`.

A step is slow because kvpact computed, because another thread of the engine had the interpreter's lock, or because
the machine gave the core to somebody else. The kernel knows: the thread's CPU time, and for how long it could have run
while others had its core (the delay in /proc/thread-self/schedstat). Used by `store_faults.py`.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

from kvpact.vllm import PactConnector

SLOW_S = 1e-3
HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "update_connector_output",
    "request_finished", "get_kv_connector_stats", "build_connector_meta",
)  # fmt: skip
"""Those of a scheduler step, in the order in which they come after the end of the last one."""


class WatchedPactConnector(PactConnector):
    """As its base; its scheduler's hooks are timed a second time, with the kernel's figures."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._hooks: dict[str, float] = {}
        self._cpu, self._delay = 0.0, 0.0
        self._collecting, self._collected = 0.0, 0.0
        """When Python began to collect garbage, and how long that took in this step, inside hooks or not."""
        self._schedule: int | None = None
        """The open file of the scheduler's thread, once that has called a hook."""
        self._file = os.environ.get("KVPACT_SLOW_STEPS")
        if self._scheduler is not None and self._file:
            gc.callbacks.append(self._note_collection)
            for name in HOOKS:
                setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            delay, cpu, began = self._delay_so_far(), thread_time(), perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                seconds = perf_counter() - began
                self._cpu += thread_time() - cpu
                self._delay += self._delay_so_far() - delay
                self._hooks[name] = self._hooks.get(name, 0.0) + seconds
                if name == "build_connector_meta":
                    self._judge_step()

        return timed

    def _delay_so_far(self) -> float:
        """Seconds for which this thread could have run and others had its core, since it began."""
        if self._schedule is None:
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        return int(os.pread(self._schedule, 100, 0).split()[1]) * 1e-9

    def _note_collection(self, phase: str, information: dict[str, int]) -> None:
        """Python collects garbage, perhaps in the middle of a hook."""
        if phase == "start":
            self._collecting = perf_counter()
        else:
            self._collected += perf_counter() - self._collecting

    def _judge_step(self) -> None:
        seconds = sum(self._hooks.values())
        if seconds > SLOW_S:
            line = {
                "ms": seconds * 1e3, "delay_ms": self._delay * 1e3, "cpu_ms": self._cpu * 1e3,
                "collected_ms": self._collected * 1e3,
                "hooks_ms": {name: round(value * 1e3, 3) for name, value in self._hooks.items()},
            }  # fmt: skip
            assert self._file is not None
            with open(self._file, "a") as file:
                file.write(json.dumps(line) + "\n")
        self._hooks.clear()
        self._cpu = self._delay = self._collected = 0.0
