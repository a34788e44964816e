"""How a scenario is written down: a function that creates a situation, and what it protects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpact.testkit.vllm.factory import Lab


@dataclass(frozen=True, slots=True)
class Scenario:
    """A situation, what it protects, and how to bring it about."""

    name: str
    protects: tuple[str, ...]
    meaning: str
    run: Callable[[Lab], None]


class Scenarios(list[Scenario]):
    """Scenarios in the order in which they run. Calling it makes the decorator that adds one."""

    def __call__(self, *protects: str) -> Callable[[Callable[[Lab], None]], Callable[[Lab], None]]:
        """Add a function as a scenario for these properties and hazards; its docstring says what it shows."""

        def add(run: Callable[[Lab], None]) -> Callable[[Lab], None]:
            self.append(Scenario(run.__name__, protects, " ".join((run.__doc__ or "").split()), run))
            return run

        return add
