"""Keeps kvpact's mistakes away from the engine: an exception in a hook costs a hit, never the engine (H13).

Owns the count of errors and the set of those already logged; charges the time of hooks to the step's budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from kvpact.cache.budget import StepBudget
from kvpact.metrics import STEP_SECONDS, Metrics

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Guard:
    """Counts errors of hooks, and the seconds of the running scheduler step."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: set[tuple[str, type[BaseException]]] = set()
        self.budget = StepBudget()
        """The time budget of the running scheduler step."""

    def failed(self, hook: str, error: BaseException) -> None:
        """Count an error of a hook; log the first of its kind with the traceback."""
        self._metrics.add("hook_errors")
        kind = (hook, type(error))
        if kind not in self._seen:
            self._seen.add(kind)
            logger.error("kvpact: %s failed; the engine goes on without it (logged once)", hook, exc_info=error)

    def end_step(self) -> None:
        """The scheduler's step is over."""
        self._metrics.observe(STEP_SECONDS, self.budget.end_step())


class Guarded(Protocol):
    """An object that has hooks to guard."""

    @property
    def guard(self) -> Guard:
        """The guard that counts this object's errors and time."""


Owner = TypeVar("Owner", bound=Guarded)


def guarded(
    otherwise: Callable[[], Any], *, in_step: bool = True
) -> Callable[[Callable[Concatenate[Owner, Arguments], Answer]], Callable[Concatenate[Owner, Arguments], Answer]]:
    """Make a method a hook that never raises: on an exception it returns `otherwise()`.

    A hook that only an idle engine calls is not `in_step`: its time is charged to no step.
    """

    def decorate(
        method: Callable[Concatenate[Owner, Arguments], Answer],
    ) -> Callable[Concatenate[Owner, Arguments], Answer]:
        @wraps(method)
        def hook(self: Owner, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            budget = self.guard.budget
            began = budget.hook_began = budget.now()
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self.guard.failed(method.__name__, error)
                answer: Answer = otherwise()
                return answer
            finally:
                if in_step:
                    budget.charged += budget.now() - began

        return hook

    return decorate
