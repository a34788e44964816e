"""`PactMachine`: a hypothesis state machine over plays, for caches of any author.

Owns the translation of rules into the calls of a play, so that what hypothesis finds and shrinks is a script of calls.
Everything that is done or verified stands in `operations.py`. Needs hypothesis.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvpact.contract import ExternalCache
from kvpact.engine import EngineQuirks
from kvpact.testkit.cache.operations import Call, Figures, Operations
from kvpact.testkit.cache.random_plays import BOUNDS, SIZES, engine_settings
from kvpact.testkit.cache.subjects import CacheContext, CacheUnderTest


def _arguments(call: str) -> dict[str, Any]:
    return {name: st.integers(least, most) for name, (least, most) in BOUNDS[call].items()}


class PactMachine(RuleBasedStateMachine):
    """Inherit it, say how your cache is made, and give pytest its `TestCase`.

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
        """An engine of some mode, small, so that everything is scarce."""
        self.play = Operations(self.make_cache, engine_settings(self.modes[mode % len(self.modes)], sizes))

    def _do(self, call: str, **arguments: int) -> None:
        if self.play is not None:
            try:
                self.play.do(Call.of(call, **arguments))
            except BaseException:
                self.failed = True
                raise

    @rule(**_arguments("arrive"))
    def arrive(self, **arguments: int) -> None:
        """A request comes, perhaps with a known prefix."""
        self._do("arrive", **arguments)

    @rule(**_arguments("arrive"), times=st.integers(1, 12))
    def arrive_and_step(self, times: int, **arguments: int) -> None:
        """A request comes and the engine goes on."""
        self._do("arrive", **arguments)
        self._do("step", times=times)

    @rule(prefix=st.integers(0, 2), shared=st.integers(8, 60), outputs=st.integers(0, 6), times=st.integers(1, 12))
    def come_back(self, prefix: int, shared: int, outputs: int, times: int) -> None:
        """A document comes again that the engine itself has forgotten."""
        self._do("forget_local")
        self._do("arrive", prefix=prefix, shared=shared, outputs=outputs)
        self._do("step", times=times)

    @rule(times=st.integers(1, 16))
    def step(self, times: int) -> None:
        """The engine goes on."""
        self._do("step", times=times)

    @rule(**_arguments("cancel"))
    def cancel(self, **arguments: int) -> None:
        """A request is cancelled in whatever state it is."""
        self._do("cancel", **arguments)

    @rule(**_arguments("misbehave"))
    def misbehave(self, **arguments: int) -> None:
        """A rank treats its next job badly."""
        self._do("misbehave", **arguments)

    @rule(rank=st.integers(0, 2), steps=st.integers(0, 12))
    def rank_trouble(self, rank: int, steps: int) -> None:
        """A rank says nothing for some steps, or has forgotten its jobs."""
        if steps:
            self._do("silence", rank=rank, steps=steps)
        else:
            self._do("rank_restarts", rank=rank)

    @rule(leave=st.integers(0, 6), back=st.booleans())
    def scarcity(self, leave: int, back: bool) -> None:
        """Blocks become scarce, or are given back."""
        if back:
            self._do("release")
        else:
            self._do("squeeze", leave=leave)

    @rule(**_arguments("wait"))
    def wait(self, **arguments: int) -> None:
        """Time passes without steps."""
        self._do("wait", **arguments)

    @rule(steps=st.integers(0, 30), **_arguments("tier_fault"))
    def tier_trouble(self, steps: int, **arguments: int) -> None:
        """The tiers are slow, or fail."""
        if steps:
            self._do("stall", steps=steps)
        else:
            self._do("tier_fault", **arguments)

    @rule(clear=st.booleans())
    def reset(self, clear: bool) -> None:
        """Caches are reset, or the external one alone while requests run on."""
        self._do("reset" if clear else "reset_connector")

    @rule(word=st.booleans(), times=st.integers(0, 6), **_arguments("update_weights"))
    def update_weights(self, word: bool, times: int, **arguments: int) -> None:
        """Other weights are put in place; some steps later they may be called by their name."""
        self._do("update_weights", **arguments)
        if times:
            self._do("step", times=times)
        if word:
            self._do("weights_version")

    @rule()
    def weights_version(self) -> None:
        """A word for the weights comes at any time, with a reset before it or without."""
        self._do("weights_version")

    @rule(which=st.sampled_from(("restart", "tier_crash", "damage")), how=st.integers(0, 999))
    def disaster(self, which: str, how: int) -> None:
        """The process ends or dies, files are damaged."""
        arguments = {"restart": {"crash": how % 2}, "tier_crash": {"after": how % 4}, "damage": {"at": how}}
        self._do(which, **arguments.get(which, {}))

    def teardown(self) -> None:
        """All requests end; nothing may be held."""
        if self.play is None:
            return
        try:
            if not self.failed:
                self.play.finish()
        finally:
            self.play.close()
            type(self).figures.add(self.play.figures)
