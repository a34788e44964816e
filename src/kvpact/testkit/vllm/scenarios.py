"""How a scenario is written down: a function that creates a situation, and what it protects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpact.testkit.vllm.harness import Harness


@dataclass(frozen=True, slots=True)
class Scenario:
    """A situation, what it protects, and how to bring it about."""

    name: str
    protects: tuple[str, ...]
    meaning: str
    run: Callable[[Harness], None]


class Scenarios(list[Scenario]):
    """Scenarios in the order in which they run. Calling it makes the decorator that adds one."""

    def __call__(self, *protects: str) -> Callable[[Callable[[Harness], None]], Callable[[Harness], None]]:
        """Add a function as a scenario for these properties and hazards; its docstring says what it shows."""

        def add(run: Callable[[Harness], None]) -> Callable[[Harness], None]:
            self.append(Scenario(run.__name__, protects, " ".join((run.__doc__ or "").split()), run))
            return run

        return add
