"""The form of a scenario: a function that creates a situation, and the ids that it protects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpact_testkit.vllm.harness import Harness

Situation = TypeVar("Situation", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Scenario:
    """A situation, the ids that it protects, and the function that creates it."""

    name: str
    protects: tuple[str, ...]
    meaning: str
    run: Callable[[Harness], object]


class Scenarios(list[Scenario]):
    """Scenarios in the order in which they run. Its methods make decorators that add one.

    The decorated function's name is the scenario's, its docstring says what the scenario shows.
    """

    def __call__(self, *protects: str) -> Callable[[Situation], Situation]:
        """Add a function of the harness that starts its own engines, for these properties and hazards."""

        def add(situation: Situation) -> Situation:
            self._add(protects, situation, situation)
            return situation

        return add

    def on_engine(
        self, *protects: str, each: Sequence[Any] | None = None, **settings: Any
    ) -> Callable[[Situation], Situation]:
        """Add a function of the harness and an engine of these `EngineSettings`.

        With `each` it runs once per value, its third argument, on an engine of its own.
        """

        def add(situation: Situation) -> Situation:
            def run(harness: Harness) -> None:
                for value in [()] if each is None else [(one,) for one in each]:
                    harness.journal.clear()  # earlier runs have no effect on this one
                    with harness.engine(**settings) as engine:
                        situation(harness, engine, *value)

            self._add(protects, situation, run)
            return situation

        return add

    def _add(self, protects: tuple[str, ...], described: Callable[..., None], run: Callable[[Harness], None]) -> None:
        self.append(Scenario(described.__name__, protects, " ".join((described.__doc__ or "").split()), run))
