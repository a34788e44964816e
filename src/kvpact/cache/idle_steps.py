"""For how long an engine without requests is kept stepping for what the cache has under way.

Owns the time that it was waited in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

VAIN_SECONDS = 5.0
"""So long it goes on though nothing ends. An engine that steps takes a core; a process that waits on the same core by
`sched_yield`, as vLLM's workers do, may get nothing of it."""

LONGEST_STEP_SECONDS = 0.1
"""A step that takes longer counts as so long: the process was stopped, and so was what it waits for."""

PAUSE_SECONDS = 1.0
"""Who asks again so long after a refusal has done something else meanwhile, or asks for what those things hold, as who
resets the prefix cache until it is granted."""

AGAIN_SECONDS = 0.5
"""How long it is tried then: it takes a few steps to hear of a copy that was long done."""


@dataclass(eq=False, slots=True)
class IdleSteps:
    """Keeps an idle engine stepping while something ends now and then. Times by `clock`, in seconds."""

    clock: Callable[[], float]
    _asked: float = field(default=0.0, init=False)
    _seen: tuple[int, int] = field(default=(0, 0), init=False)
    _in_vain: float = field(default=0.0, init=False)
    _refused: float = field(default=0.0, init=False)

    def wait_for(self, under_way: int, begun: int = 0) -> bool:
        """Whether to step again for so many things that have not ended. Asked between the steps of an idle engine.

        `begun` grows whenever one begins: as many as before are not the same ones.
        """
        now = self.clock()
        since, self._asked = now - self._asked, now
        if (under_way, begun) != self._seen:
            self._seen, self._in_vain = (under_way, begun), 0.0
        elif self._in_vain < VAIN_SECONDS:
            self._in_vain += min(since, LONGEST_STEP_SECONDS)
            if self._in_vain >= VAIN_SECONDS:
                self._refused = now
        elif now - self._refused >= PAUSE_SECONDS:
            self._in_vain = VAIN_SECONDS - AGAIN_SECONDS
        return under_way > 0 and self._in_vain < VAIN_SECONDS
