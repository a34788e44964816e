"""Resets of vLLM's prefix cache while requests run: vLLM refuses them if a connector holds one block (H106).

Owns the reset that waits for loads under way, at most one. Saves are given up for it, loads are not: ranks may still
write to their blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Any

from kvpact.contract import ExternalMatchExit
from kvpact.vllm.compat.matches import is_paused
from kvpact.vllm.compat.objects import connectors_of
from kvpact.vllm.compat.restarts import LOADS
from kvpact.vllm.exits import EngineExits

REFUSAL = (
    "Failed to reset KV cache: loads are under way, and their blocks may still be written to; nothing was preempted. "
    "Reset again when they have ended, which takes `load_deadline` at most"
)


@dataclass(frozen=True, slots=True)
class _Waiting:
    answer: Future[bool]
    """EngineCore answers its client when this is done."""
    reset: Callable[[], bool]
    deadline: float


class Resets:
    """The resets of one scheduler, whose connector is there already."""

    def __init__(self, scheduler: Any, exits: EngineExits) -> None:
        self._scheduler = scheduler
        self._exits = exits
        self._waiting: _Waiting | None = None

    @property
    def waits(self) -> bool:
        """True if a reset waits for loads."""
        return self._waiting is not None

    def reset(self, reset: Callable[[], bool], *, by_force: bool, forget: bool) -> bool | Future[bool]:
        """Do vLLM's `reset`: `by_force` preempts running requests for it, `forget` empties the connector too.

        Saves under way are given up for either. With loads under way a reset by force is done when they have ended, at
        most `load_deadline` later, and no new one begins until then. Raises RuntimeError, and nothing was preempted, if
        they do not end, or if this engine cannot wait: it is paused, or steps in its caller's process.
        """
        seconds = self._give_up_saves() if by_force or forget else None
        if not by_force or seconds is None or not self._loads:
            return self._do(reset)
        if self.waits or is_paused(self._scheduler) or parent_process() is None:
            raise RuntimeError(REFUSAL)
        self._pause_matches(pausing=True)
        self._waiting = _Waiting(Future(), reset, time.monotonic() + seconds)
        return self._waiting.answer

    def step_ended(self) -> None:
        """Do the reset that waits if no load is under way any more, or refuse it if time is over."""
        waiting = self._waiting
        if waiting is None:
            return
        self._give_up_saves()
        if (loads := self._loads) and time.monotonic() < waiting.deadline:
            return
        self._waiting = None
        self._pause_matches(pausing=False)
        try:
            if loads:
                waiting.answer.set_exception(RuntimeError(REFUSAL))
            else:
                waiting.answer.set_result(self._do(waiting.reset))
        except Exception as error:
            waiting.answer.set_exception(error)

    def _do(self, reset: Callable[[], bool]) -> bool:
        for tracker in self._exits.trackers:
            tracker.drop_all(ExternalMatchExit.RESET)
        return reset()

    def _pause_matches(self, *, pausing: bool) -> None:
        for tracker in self._exits.trackers:
            tracker.pausing = pausing

    def _give_up_saves(self) -> float | None:
        """Most seconds until loads end; None if no connector knows: vLLM's own reset must do then."""
        connectors = connectors_of(self._scheduler.connector)
        return max((each.prepare_reset() for each in connectors if hasattr(each, "prepare_reset")), default=None)

    @property
    def _loads(self) -> bool:
        """True if a request waits for a load, or a step for one whose blocks are held. No block is held for a save."""
        contexts = (getattr(each, "scheduler_context", None) for each in connectors_of(self._scheduler.connector))
        if any(context is not None and context.touched_blocks for context in contexts):
            return True
        return any(request.status.name == LOADS for request in self._scheduler.requests.values())
