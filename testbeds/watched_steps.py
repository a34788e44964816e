"""A `PactConnector` that says of each slow scheduler step where its time went, as JSON lines in `$KVPACT_SLOW_STEPS`.

A step is slow because kvpact computed, because another thread of the engine had the interpreter's lock, or because
the machine gave the core to somebody else. The kernel knows: the thread's CPU time, how often it began to wait by
itself, and for how long it could have run while others had its core (the delay in /proc/thread-self/schedstat). When
the machine below a virtual one had the core is what is left. And there is a control: behind each step the same thread
computes something useless for as long as a step takes in the median. How often that is slow is what this machine does
to any code. Used by `store_failing`.
"""

from __future__ import annotations

import gc
import json
import os
import resource
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter, thread_time
from typing import Any

from kvpact.vllm import PactConnector

SLOW_S = 1e-3
HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "update_connector_output",
    "request_finished", "get_kv_connector_stats", "_end_step",
)  # fmt: skip
"""Those of a scheduler step, in the order in which they come after the end of the last one; `_end_step` is the part of
`build_connector_meta` that is a step's, before the tiers' threads are woken."""


def _waits_so_far() -> int:
    """How often this thread gave up its core to wait for something: a lock, the interpreter, a file."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Control:
    """A piece of Python that needs nothing of kvpact and takes as long as it is told."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, float]] = {}
        self._round_s = 1e-7

    def run(self, seconds: float) -> tuple[float, float]:
        """Compute for so many seconds of CPU time; how long it took by the clock, and of CPU time."""
        rounds = 1 + int(seconds / self._round_s)
        cpu, began = thread_time(), perf_counter()
        for number in range(rounds):
            self._kept[number & 1023] = (number, began)
        took = perf_counter() - began
        cpu = thread_time() - cpu
        self._round_s += 0.1 * (cpu / rounds - self._round_s)
        return took, cpu


class WatchedPactConnector(PactConnector):
    """As its base; its scheduler's hooks are timed a second time, with the kernel's figures."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._hooks: dict[str, float] = {}
        self._cpu, self._delay, self._waits = 0.0, 0.0, 0
        self._collecting, self._collected = 0.0, 0.0
        """When Python began to collect garbage, and how long that took in this step, inside hooks or not."""
        self._control = Control()
        self._lengths: deque[float] = deque(maxlen=201)
        """CPU time of the last steps."""
        self._schedule: int | None = None
        """The open file of the scheduler's thread, once that has called a hook."""
        self._file = os.environ.get("KVPACT_SLOW_STEPS")
        if self._scheduler is not None and self._file:
            gc.callbacks.append(self._note_collection)
            for name in HOOKS:
                setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            delay, waits, cpu, began = self._delay_so_far(), _waits_so_far(), thread_time(), perf_counter()
            try:
                return hook(*arguments, **named)
            finally:
                seconds = perf_counter() - began
                self._cpu += thread_time() - cpu
                self._waits += _waits_so_far() - waits
                self._delay += self._delay_so_far() - delay
                self._hooks[name] = self._hooks.get(name, 0.0) + seconds
                if name == "_end_step":
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
            self._say({
                "what": "step", "ms": seconds * 1e3, "delay_ms": self._delay * 1e3, "cpu_ms": self._cpu * 1e3,
                "waits": self._waits, "collected_ms": self._collected * 1e3,
                "hooks_ms": {name: round(value * 1e3, 3) for name, value in self._hooks.items()},
            })  # fmt: skip
        self._lengths.append(self._cpu)
        self._hooks.clear()
        self._cpu = self._delay = self._collected = 0.0
        self._waits = 0
        length = median(self._lengths)
        took, cpu = self._control.run(length)
        if took > SLOW_S:
            self._say({"what": "control", "ms": took * 1e3, "cpu_ms": cpu * 1e3, "length_ms": length * 1e3})

    def _say(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        with open(self._file, "a") as file:
            file.write(json.dumps(line) + "\n")
