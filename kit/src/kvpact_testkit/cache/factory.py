"""What the checks of a cache share: scenes in every mode of the engine, and small helpers for them.

Owns the repetition of a check over modes. Decides no check.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpact.contract import ExternalCache, ExternalKVMatch
from kvpact.errors import PactViolation
from kvpact_testkit.cache.engine_harness import HarnessSettings
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.cache.subjects import CacheContext, CacheUnderTest
from kvpact_testkit.engine import Engine, EngineConfig, EngineContext, EngineQuirks, Request
from kvpact_testkit.results import NotObservable, observable_if, require
from kvpact_testkit.suite import Suite, protects
from kvpact_testkit.trace import TRACE_LINES, Trace


class HarnessFactory:
    """Makes the scenes of one check; `script` has the steps of the last one."""

    def __init__(self, suite: CacheSuite, directory: Path) -> None:
        self.suite = suite
        self._directory = directory
        self.script = Trace(TRACE_LINES)
        self._opened = 0

    def scene(self, mode: str, quirks: dict[str, Any] | None = None, **settings: Any) -> closing[CacheHarness]:
        """A new scene; `quirks` changes the mode's `EngineQuirks`, `settings` are those of `HarnessSettings`."""
        suite = self.suite
        wanted = HarnessSettings(mode, ranks=suite.ranks, num_slots=suite.num_slots, timeout=suite.timeout)
        if quirks:
            wanted = replace(wanted, quirks=replace(EngineQuirks.presets()[mode], **quirks))
        self.script.clear()
        self._opened += 1
        directory = self._directory / f"scene-{self._opened}"
        directory.mkdir(parents=True)
        return closing(CacheHarness(suite.make_cache, directory, replace(wanted, **settings), self.script))


class CacheSuite(Suite[HarnessFactory]):
    """A suite of checks of a cache, and what an author defines for it."""

    modes: tuple[str, ...] = tuple(EngineQuirks.presets())
    ranks = 2
    num_slots = 16
    timeout = 60.0
    plays = 4
    """Random plays in each mode."""
    calls = 120
    """Calls in each random play."""

    def make_cache(self, place: CacheContext) -> ExternalCache | CacheUnderTest:
        """Your cache, made for `place`; as a `CacheUnderTest` if it shows more of itself."""
        raise NotImplementedError(f"{type(self).__name__} must say in `make_cache` how the cache is made")

    @contextmanager
    def scene(self, directory: Path) -> Iterator[HarnessFactory]:
        yield HarnessFactory(self, directory)


Check = Callable[[Any, CacheHarness], None]


def kept_in_every_mode(
    *names: str,
    as_new: str = "",
    faulty: str = "",
    stored: Sequence[int] = (),
    quirks: dict[str, Any] | None = None,
    **settings: Any,
) -> Callable[[Check], Callable[[Any, Path], None]]:
    """Make a method `(self, scene)` a check of `names` that runs in a new scene for each mode of the suite.

    `faulty` is what the kit must be able to make fail: "ranks", "tiers" or nothing. The prompt `stored` is computed and
    saved first; after the check nothing may be held. With `as_new` the cache must then have the room of a new one; else
    these ids, with spaces between them, are broken. The check is not observable if it is so in every mode.
    """

    def decorate(method: Check) -> Callable[[Any, Path], None]:
        @functools.wraps(method)
        def run(self: Any, lab: HarnessFactory) -> None:
            reasons = []
            for mode in self.modes:
                try:
                    with lab.scene(mode, quirks, **settings) as scene:
                        scene.require_faulty(faulty)
                        if stored:
                            scene.serve("first", stored)
                        method(self, scene)
                        if as_new:
                            scene.as_good_as_new(*as_new.split())
                        scene.rest()
                except NotObservable as reason:
                    reasons.append(str(reason))
            if len(reasons) == len(self.modes):
                raise NotObservable(reasons[0])

        return protects(*names)(run)

    return decorate


def promised(
    scene: CacheHarness, name: str, tokens: Sequence[int], computed: int = 0, **settings: Any
) -> tuple[Request, ExternalKVMatch]:
    """A held request and its match. Raises NotObservable if the match is empty."""
    request = scene.request(name, tokens, held=True, **settings)
    match = scene.probe(request, computed)
    observable_if(match.num_tokens, "the cache promises nothing of a prompt that was computed before and offered to it")
    return request, match


def seen(scene: CacheHarness, tokens: Sequence[int]) -> int:
    """Tokens that a request for `tokens` is promised; it is then cancelled. Raises NotObservable if there are none."""
    request, match = promised(scene, "seen", tokens)
    scene.cancel(request.request_id)
    return match.num_tokens


def require_used(scene: CacheHarness, request: Request, wanted: int) -> None:
    """Let go of a held request; raises Broken unless `wanted` tokens of the external cache are used for it."""
    used = scene.use(request)
    require(used == wanted, f"{wanted} tokens were promised and {used} came")


def require_right_outputs(scene: CacheHarness, *requests: Request) -> None:
    """Raises Broken unless each request generated the tokens that an engine without a cache generates."""
    size = scene.settings.block_size
    for request in requests:
        length = len(request.token_ids) + request.max_output_tokens
        engine = Engine(EngineConfig(num_blocks=length // size + 4, block_size=size, max_model_len=length + size))
        engine.runner.weights = scene.engine.runner.weights
        prompt = request.token_ids[: request.num_prompt_tokens]
        alone = Request("alone", prompt, request.max_output_tokens, identity=request.identity)
        wanted = engine.run([alone])["alone"].output_token_ids
        require(
            request.output_token_ids == wanted,
            f"{request.request_id} generates {request.output_token_ids}; without a cache it generates {wanted}",
        )


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
