"""What a step costs the scheduler's thread inside the cache's hooks, and how long what has a time-out takes at least.

A step of one run may be unlucky (another process, a page that is touched first); what a hook really costs or waits for
comes back in every run. So a scene that costs too much is played again, and of each step the cheapest one counts.

A slow machine, or one whose caches others use too, is no cost of ours: after each step a fixed piece of work is timed
on the same thread, and what a step may cost is counted in it.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scenes import BLOCK_SIZE

STEP_CPU_SECONDS = 1e-3
"""What kvpact may cost in one step of prompts of up to 2,000 tokens (P11), where `fixed_work` takes `FIXED_SECONDS`."""
STEP_WAIT_SECONDS = 4e-3
"""What a step may sleep: for a lock, a store, another thread. The time in which a core was wanted does not count."""
LONG_BLOCKS = 125
"""Of a prompt of 2,000 tokens in blocks of 16, the usual size on a GPU."""
LONG = LONG_BLOCKS * BLOCK_SIZE + 1
"""Tokens of such a prompt in blocks of a scene's size, and one that is always computed."""
PREFILL_SECONDS = 0.2
"""In which 2,000 tokens are computed at 10,000 tokens a second."""
MAX_RUNS = 8

HOOKS = (
    "on_new_request",
    "prepare_external_match",
    "commit_external_match",
    "note_computed",
    "request_finished",
    "apply_report",
    "end_step",
)


FIXED_SECONDS = 100e-6
"""CPU seconds of `fixed_work` after a step, on a quiet machine: one on which `STEP_CPU_SECONDS` was chosen."""
_TABLE = {number.to_bytes(32, "big"): (number, number + 1) for number in range(1 << 15)}
_KEYS = random.Random(1).sample(sorted(_TABLE), 1 << 12)
_turns = itertools.count()


def fixed_work() -> float:
    """CPU seconds of looking up as many keys as a long prompt has, in a large table, and of noting what was found."""
    first = next(_turns) * LONG_BLOCKS % (len(_KEYS) - LONG_BLOCKS)
    began = time.thread_time()
    found = [_TABLE[key] for key in _KEYS[first : first + LONG_BLOCKS]]
    noted: dict[int, list[tuple[int, int]]] = {}
    for start, stop in sorted(found):
        noted.setdefault(start % 16, []).append((stop, start))
    return time.thread_time() - began


def slowness(samples: Sequence[float]) -> float:
    """How much slower than when the bounds were chosen the machine was while these were taken; at least 1."""
    return max(1.0, median(samples) / FIXED_SECONDS)


def waited_for_a_core() -> float:
    """Seconds in which this thread was ready to run and another had the core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@dataclass(slots=True)
class StepTime:
    """Seconds of one step, in all hooks together."""

    cpu: float = 0.0
    """As they would be on a quiet machine once the run is over: see `HookTime.over`."""
    slept: float = 0.0

    @property
    def within_bounds(self) -> bool:
        """Whether this is what a step may cost."""
        return self.cpu <= STEP_CPU_SECONDS and self.slept <= STEP_WAIT_SECONDS


class HookTime:
    """Measures hooks of a cache or a connector, on the thread that calls them; the last of them ends a step."""

    def __init__(self, owner: object, hooks: Sequence[str] = HOOKS) -> None:
        self.begin()
        for name in hooks:
            setattr(owner, name, self._measured(getattr(owner, name), ends_step=name == hooks[-1]))

    def begin(self) -> None:
        """Forget the steps until now."""
        self.steps = [StepTime()]
        self.fixed = [fixed_work()]

    def over(self) -> list[StepTime]:
        """The steps, with CPU seconds as they would be on a quiet machine."""
        times = slowness(self.fixed)
        return [StepTime(step.cpu / times, step.slept) for step in self.steps]

    @property
    def worst(self) -> StepTime:
        """The most of each."""
        steps = self.over()
        return StepTime(max(step.cpu for step in steps), max(step.slept for step in steps))

    def _measured(self, hook: Callable[..., Any], ends_step: bool) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            ready = waited_for_a_core()
            clock, cpu = time.monotonic(), time.thread_time()
            try:
                return hook(*args, **kwargs)
            finally:
                spent = time.thread_time() - cpu
                lasted = time.monotonic() - clock
                step = self.steps[-1]
                step.cpu += spent
                step.slept += max(0.0, lasted - spent - (waited_for_a_core() - ready))
                if ends_step:
                    self.fixed.append(fixed_work())
                    self.steps.append(StepTime())

        return measured


@contextmanager
def no_collections() -> Iterator[None]:
    """An engine freezes what it started with; here a test's neighbours would be walked through."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cheapest_steps(play: Callable[[], HookTime], is_enough: Callable[[list[StepTime]], bool]) -> list[StepTime]:
    """Play a scene, always with the same steps, until `is_enough` or `MAX_RUNS` times; what each step cost at best."""
    steps: list[StepTime] = []
    for _ in range(MAX_RUNS):
        with no_collections():
            run = play().over()
        steps = [
            StepTime(min(one.cpu, other.cpu), min(one.slept, other.slept))
            for one, other in zip(run, steps or run, strict=True)
        ]
        if is_enough(steps):
            break
    return steps


def assert_no_step_is_slow(play: Callable[[], HookTime]) -> None:
    """No step costs the scheduler's thread its millisecond, and none waits."""

    def none_is_slow(steps: list[StepTime]) -> bool:
        return all(step.within_bounds for step in steps)

    steps = cheapest_steps(play, none_is_slow)
    assert len(steps) > 2, "the scene has no steps"
    assert none_is_slow(steps), steps


def assert_all_steps_cost(play: Callable[[], HookTime], cpu_seconds: float) -> None:
    """All steps together cost the scheduler's thread at most this, on a quiet machine."""

    def cost(steps: list[StepTime]) -> float:
        return sum(step.cpu for step in steps)

    spent = cost(cheapest_steps(play, lambda steps: cost(steps) <= cpu_seconds))
    assert spent <= cpu_seconds, f"{spent * 1e3:.2f} ms, not {cpu_seconds * 1e3:.2f} ms"


def assert_ends_within(play: Callable[[], float], least: float, most: float) -> None:
    """What plays for so many seconds, as it says itself, takes no less, and at best no more than this."""
    seconds: list[float] = []
    while len(seconds) < MAX_RUNS and min(seconds, default=most + 1) > most:
        seconds.append(play())
    assert least <= min(seconds) <= most, seconds
