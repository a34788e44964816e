"""For how long an engine without requests is kept stepping for what the cache has under way.

Owns the time that it was waited in vain.
"""

from __future__ import annotations

from collections.abc import Callable

VAIN_SECONDS = 5.0
"""So long it goes on though nothing ends. An engine that steps takes a core; a process that waits on the same core by
`sched_yield`, as vLLM's workers do, may get nothing of it."""

LONGEST_STEP_SECONDS = 0.1
"""A step that takes longer counts as so long: the process was stopped, and so was what it waits for."""

PAUSE_SECONDS = 1.0
"""Who asks again after so long has done something else meanwhile, such as to drop its prefix cache, and tries again."""

AGAIN_SECONDS = 0.5
"""How long that is tried: it takes a few steps to hear of a copy that was long done."""


class IdleSteps:
    """Keeps an idle engine stepping while something ends now and then. Times by `clock`, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked = 0.0
        self._under_way = 0
        self._in_vain = 0.0

    def wait_for(self, under_way: int) -> bool:
        """Whether to step again for so many things that have not ended. Asked between the steps of an idle engine."""
        now = self._clock()
        since, self._asked = now - self._asked, now
        if under_way != self._under_way:
            self._under_way, self._in_vain = under_way, 0.0
        else:
            self._in_vain += min(since, LONGEST_STEP_SECONDS)
            if since >= PAUSE_SECONDS:
                self._in_vain = min(self._in_vain, VAIN_SECONDS - AGAIN_SECONDS)
        return under_way > 0 and self._in_vain < VAIN_SECONDS
