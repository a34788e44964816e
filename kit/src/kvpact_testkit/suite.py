"""Suites of checks that an author inherits: pytest collects them, and `run_suite` runs them without pytest.

Owns how a check is run and how its outcome becomes a `Check`. Knows nothing of caches or tiers.
"""

from __future__ import annotations

import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from kvpact_testkit.background import Background
from kvpact_testkit.catalogue import TITLES
from kvpact_testkit.results import Broken, Check, NotObservable, Verdict, Violation, shortened

CHECK_SECONDS = 120.0
"""A check that runs longer than this hangs; none needs a tenth of it on an idle machine."""


class Harness(Protocol):
    """The argument of a check: the subject under test and its script."""

    @property
    def script(self) -> Sequence[str]:
        """The steps so far, one line each."""


HarnessType = TypeVar("HarnessType", bound=Harness)


class Suite(ABC, Generic[HarnessType]):
    """A class of checks: methods `test_...` with `@protects`, each of them run in a scene of its own."""

    @abstractmethod
    def scene(self, directory: Path) -> AbstractContextManager[HarnessType]:
        """A fresh scene, which may use the empty `directory` and leaves nothing running."""


def protects(
    *names: str, needs: Callable[[Any], None] = lambda scene: None
) -> Callable[[Callable[[Any, Any], None]], Callable[[Any, Path], None]]:
    """Make a method `(self, scene)` a check of the properties or hazards `names` (ids of `TITLES`).

    `needs(scene)` is called first, and raises NotObservable if the subject does not show what the check needs.
    Whatever it raises, except `NotObservable`, becomes `Broken` with those names and the scene's script.
    Raises KeyError for a name that `TITLES` does not have.
    """
    for name in names:
        TITLES[name]

    def decorate(method: Callable[[Any, Any], None]) -> Callable[[Any, Path], None]:
        def check(self: Suite[Any], tmp_path: Path) -> None:
            with self.scene(tmp_path) as scene:
                try:
                    needs(scene)
                    method(self, scene)
                except NotObservable:
                    raise
                except Broken as broken:
                    script, concerned = broken.script or scene.script, broken.protects or names
                    raise Broken(broken.explanation, script, concerned) from broken.__cause__
                except Exception as error:
                    raise Broken(f"{type(error).__name__}: {error}", scene.script, names) from error

        # Not functools.wraps: pytest would look through it, and take `scene` for a fixture.
        check.__name__, check.__qualname__, check.__doc__ = method.__name__, method.__qualname__, method.__doc__
        check.__module__ = method.__module__
        check.__dict__["protects"] = names
        return check

    return decorate


def checks_of(suite: type[Suite[Any]]) -> dict[str, tuple[str, ...]]:
    """Check -> the ids that it protects: the suite's own checks first, then the inherited ones."""
    names = [name for base in suite.__mro__ for name in vars(base) if name.startswith("test_")]
    return {name: getattr(getattr(suite, name), "protects", ()) for name in names if getattr(suite, name) is not None}


def run_suite(
    suite: type[Suite[Any]], only: str = "", timeout: float = CHECK_SECONDS, parent: Path | None = None
) -> Iterator[Check]:
    """Run each check of `suite` whose name matches the regular expression `only`; yield each result at once.

    A check that takes longer than `timeout` seconds is broken; its thread keeps running. Scenes get fresh directories
    under `parent`, by default the system's place for temporary files.
    """
    for name, names in checks_of(suite).items():
        if re.search(only, name):
            with tempfile.TemporaryDirectory(prefix="kvpact-", dir=parent, ignore_cleanup_errors=True) as directory:
                raised = _raised(partial(getattr(suite(), name), Path(directory)), timeout)
            yield _check(name, names, getattr(suite, name).__doc__ or "", raised)


def _raised(run: Callable[[], object], timeout: float) -> BaseException | None:
    running = Background(run)
    return running.raised() if running.ended(timeout) else Broken(f"still running after {timeout:g} s")


def _check(name: str, names: tuple[str, ...], meaning: str, raised: BaseException | None) -> Check:
    meaning = " ".join(meaning.split())
    if raised is None:
        return Check(name, names, meaning, Verdict.KEPT)
    if isinstance(raised, NotObservable):
        return Check(name, names, meaning, Verdict.NOT_OBSERVABLE, note=str(raised))
    broken = raised if isinstance(raised, Broken) else Broken(f"{type(raised).__name__}: {raised}")
    concerned = broken.protects if broken.protects not in ((), names) else (names or (name,))[:1]
    violations = tuple(Violation(one, broken.explanation) for one in concerned)
    return Check(name, names, meaning, Verdict.BROKEN, violations, script=shortened(broken.script))
