"""`PactMachine`: a hypothesis state machine over plays, for caches of any author.

Its one rule is a call of a play, so that hypothesis shrinks a script of calls. `operations.py` has the calls and the
verification, `random_plays.py` the chances of each call. Needs hypothesis.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvpact.contract import ExternalCache
from kvpact_testkit.cache.operations import Call, Figures, Operations
from kvpact_testkit.cache.random_plays import SIZES, engine_settings, random_call
from kvpact_testkit.cache.subjects import CacheContext, CacheUnderTest
from kvpact_testkit.engine import EngineQuirks


class PactMachine(RuleBasedStateMachine):
    """Inherit it, define how your cache is made, and give pytest its `TestCase`.

        class MyMachine(PactMachine):
            def make_cache(self, place: CacheContext) -> ExternalCache:
                return MyCache(place.block_size, place.num_slots, place.num_ranks)

        TestMyCache = MyMachine.TestCase

    `figures` of the class add up over all examples.
    """

    figures = Figures()
    modes: tuple[str, ...] = tuple(EngineQuirks.presets())

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.figures = Figures()

    def __init__(self) -> None:
        super().__init__()
        self.play: Operations | None = None
        self.failed = False

    def make_cache(self, place: CacheContext) -> ExternalCache | CacheUnderTest:
        """Your cache, made for `place`; as a `CacheUnderTest` if it shows more of itself."""
        raise NotImplementedError(f"{type(self).__name__} must say in `make_cache` how the cache is made")

    @initialize(mode=st.integers(0, 99), sizes=SIZES)
    def start(self, mode: int, sizes: dict[str, Any]) -> None:
        """Start a small engine of one of the modes, so that everything is scarce."""
        self.play = Operations(self.make_cache, engine_settings(self.modes[mode % len(self.modes)], sizes))

    @rule(call=random_call())
    def do(self, call: Call | None) -> None:
        """Carry out a call, with the chances of random plays."""
        if self.play is not None and call is not None:
            try:
                self.play.do(call)
            except BaseException:
                self.failed = True
                raise

    def teardown(self) -> None:
        """Let all requests end: nothing may be held."""
        if self.play is None:
            return
        try:
            if not self.failed:
                self.play.finish()
        finally:
            self.play.close()
            type(self).figures.add(self.play.figures)
