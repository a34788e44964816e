"""Where the checks of a cache work: scenes on demand in every mode of the engine, and small questions put to them.

Owns how a check is repeated over modes and what it may ask of a scene. Decides no check.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from kvpact.contract import ExternalKVMatch
from kvpact.engine import Engine, EngineConfig, EngineContext, EngineQuirks, Request
from kvpact.errors import PactViolation
from kvpact.testkit.cache.engine_harness import HarnessSettings
from kvpact.testkit.cache.harness import CacheHarness
from kvpact.testkit.cache.subjects import CacheFactory
from kvpact.testkit.results import NotObservable
from kvpact.testkit.trace import TRACE_LINES, Trace


class SaysHowCachesAreMade(Protocol):
    """What a lab asks of a suite."""

    ranks: int
    num_slots: int
    timeout: float

    @property
    def make_cache(self) -> CacheFactory:
        """Makes the cache for a place."""


class HarnessFactory:
    """One check's workplace; `script` are the steps of its last scene."""

    def __init__(self, suite: SaysHowCachesAreMade, directory: Path) -> None:
        self.suite = suite
        self._directory = directory
        self.script = Trace(TRACE_LINES)
        self._opened = 0

    @contextmanager
    def scene(self, mode: str, quirks: dict[str, Any] | None = None, **settings: Any) -> Iterator[CacheHarness]:
        """A new scene; `quirks` changes the mode's `EngineQuirks`, `settings` are those of `HarnessSettings`."""
        suite = self.suite
        wanted = HarnessSettings(mode, ranks=suite.ranks, num_slots=suite.num_slots, timeout=suite.timeout)
        if quirks:
            wanted = replace(wanted, quirks=replace(EngineQuirks.presets()[mode], **quirks))
        self.script.clear()
        self._opened += 1
        directory = self._directory / f"scene-{self._opened}"
        directory.mkdir(parents=True)
        scene = CacheHarness(suite.make_cache, directory, replace(wanted, **settings), self.script)
        try:
            yield scene
        finally:
            scene.close()


Check = Callable[[Any, CacheHarness], None]


def in_every_mode(quirks: dict[str, Any] | None = None, **settings: Any) -> Callable[[Check], Callable[..., None]]:
    """Make a method `(self, scene)` one `(self, lab)` that runs it in a new scene for each mode of the suite.

    It is not observable if it is so in every mode.
    """

    def decorate(method: Check) -> Callable[[Any, HarnessFactory], None]:
        @functools.wraps(method)
        def run(self: Any, lab: HarnessFactory) -> None:
            reasons = []
            for mode in self.modes:
                try:
                    with lab.scene(mode, quirks, **settings) as scene:
                        method(self, scene)
                except NotObservable as reason:
                    reasons.append(str(reason))
            if len(reasons) == len(self.modes):
                raise NotObservable(reasons[0])

        return run

    return decorate


def promised(
    scene: CacheHarness, name: str, tokens: Sequence[int], computed: int = 0, **settings: Any
) -> tuple[Request, ExternalKVMatch]:
    """A held request and what it is promised. Raises NotObservable if that is nothing."""
    request = scene.request(name, tokens, held=True, **settings)
    match = scene.probe(request, computed)
    if not match.num_tokens:
        raise NotObservable("the cache promises nothing of a prompt that was computed before and offered to it")
    return request, match


def expected_outputs(scene: CacheHarness, request: Request) -> list[int]:
    """What the request generates on an engine without a cache."""
    size = scene.settings.block_size
    length = len(request.token_ids) + request.max_output_tokens
    engine = Engine(EngineConfig(num_blocks=length // size + 4, block_size=size, max_model_len=length + size))
    engine.runner.weights = scene.engine.runner.weights
    prompt = request.token_ids[: request.num_prompt_tokens]
    alone = Request("alone", prompt, request.max_output_tokens, identity=request.identity)
    return engine.run([alone])["alone"].output_token_ids


_ELSEWHERE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, EngineContext, PactViolation)


def reachable_bytes(scene: CacheHarness) -> int:
    """Bytes of all objects that the cache can reach, without the engine and the kit."""
    own = (scene.clock, scene.place, scene.place.faults, *scene.workers)
    kit = {id(thing) for thing in own}
    seen: set[int] = set()
    left: list[object] = [scene.subject.cache]
    total = 0
    while left:
        thing = left.pop()
        if id(thing) in seen or id(thing) in kit or isinstance(thing, _ELSEWHERE):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        left.extend(gc.get_referents(thing))
    return total
