"""Limit on the steps of an engine without requests, which it takes for the cache's operations under way.

Owns the time during which nothing ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

VAIN_SECONDS = 5.0
"""Seconds that the engine steps on while nothing ends. A stepping engine takes a core; a process that waits on the same
core by `sched_yield`, as vLLM's workers do, may get nothing of it."""

LONGEST_STEP_SECONDS = 0.1
"""A longer step counts as this many seconds: the process was stopped, and so was what it waits for."""

PAUSE_SECONDS = 1.0
"""An engine that asks again this many seconds after a refusal has done something else meanwhile, or needs what is held:
it may be asked to reset its prefix cache until it can."""

AGAIN_SECONDS = 0.5
"""Seconds that it steps then: a report of a copy that ended long ago takes a few steps."""


@dataclass(eq=False, slots=True)
class IdleSteps:
    """Keeps an idle engine stepping while something ends now and then. Times by `clock`, in seconds."""

    clock: Callable[[], float]
    _asked: float = field(default=0.0, init=False)
    _seen: tuple[int, int] = field(default=(0, 0), init=False)
    _in_vain: float = field(default=0.0, init=False)
    _refused: float = field(default=0.0, init=False)

    def wait_for(self, under_way: int, begun: int = 0) -> bool:
        """Decide between an idle engine's steps: True to step again for `under_way` operations that have not ended.

        `begun` grows with each operation that begins, which distinguishes an equal number of other ones.
        """
        now = self.clock()
        since = now - self._asked
        self._asked = now
        if (under_way, begun) != self._seen:
            self._seen = (under_way, begun)
            self._in_vain = 0.0
        elif self._in_vain < VAIN_SECONDS:
            self._in_vain += min(since, LONGEST_STEP_SECONDS)
            if self._in_vain >= VAIN_SECONDS:
                self._refused = now
        elif now - self._refused >= PAUSE_SECONDS:
            self._in_vain = VAIN_SECONDS - AGAIN_SECONDS
        return under_way > 0 and self._in_vain < VAIN_SECONDS
