"""Checks of a cache's bounds: room, time, memory, and counts that add up.

Part of `CacheConformance`.
"""

from __future__ import annotations

from kvpact_testkit.cache.engine_harness import prompt
from kvpact_testkit.cache.factory import (
    CacheSuite,
    HarnessFactory,
    kept_in_every_mode,
    promised,
    reachable_bytes,
    require_used,
    seen,
)
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.faults import Fault, Operation
from kvpact_testkit.results import NotObservable, observable_if, require
from kvpact_testkit.suite import protects

DOCUMENT = prompt(6)

PROMPTS = [prompt(8, seed=seed) for seed in range(6)]
"""More blocks than the cache has room for in memory."""

CHAIN = ("promised_tokens", "committed_tokens", "loaded_tokens", "used_tokens")
"""Counts of which each may be at most the one before it."""

MANY_REQUESTS = 300
"""Requests after which all bounded histories are full."""

GROWTH = 1.1
"""The largest ratio of memory in use after twice as many requests."""

HANGING_S = 0.2
"""Seconds of the engine's clock after which a request that waits for a tier counts as late; a step takes 10 ms."""

LONGEST_CALL_S = 1.0
"""Real seconds that a call may take at most, even on a busy machine."""


class BoundChecks(CacheSuite):
    """Properties that hold after many requests and in a full cache."""

    # Room

    @kept_in_every_mode("P12", "H57", as_new="P12", prefix_caching=False)
    def test_h57_promises_are_bounded_by_the_room_and_follow_what_is_held(self, scene: CacheHarness) -> None:
        """Twice as many prompts as fit: together they are promised at most what fits, and every promise loads."""
        slots, size = scene.settings.num_slots, scene.settings.block_size
        prompts = [prompt(4, seed=seed) for seed in range(slots // 2)]
        scene.serve("first", *prompts)
        asked = [scene.request(f"again-{n}", tokens, held=True) for n, tokens in enumerate(prompts)]
        matches = scene.probe_all(asked)
        total = sum(match.num_tokens for match in matches)
        observable_if(total, "the cache promises nothing of prompts that were computed before")
        least, most = slots * size // 2, slots * size
        require(total <= most, f"{total} tokens are promised at once; the cache has room for {most}")
        require(total >= least, f"of a full cache, with room for {most} tokens, {total} can be used")
        for request in asked:
            scene.let_go(request)
        scene.run(*asked)

    @kept_in_every_mode("H53", as_new="H53", prefix_caching=False)
    def test_h53_new_blocks_do_not_push_out_what_is_promised(self, scene: CacheHarness) -> None:
        """All room is promised and another prompt is saved: the promises hold, and their blocks stay."""
        whole = prompt(scene.settings.num_slots)
        scene.serve("first", whole)
        request, match = promised(scene, "promised", whole)
        scene.serve("other", prompt(6, seed=5))
        left = scene.probe(request).num_tokens
        require(left == match.num_tokens, f"of {match.num_tokens} promised tokens {left} are left")
        require_used(scene, request, match.num_tokens)
        scene.settle()
        after = seen(scene, whole)
        require(
            after >= match.num_tokens // 2,
            f"after one allocation while all was promised, {after} of {match.num_tokens} tokens are left",
        )

    @kept_in_every_mode("H54", as_new="H54", stored=DOCUMENT, prefix_caching=False)
    def test_h54_a_prompt_larger_than_the_room_keeps_its_head(self, scene: CacheHarness) -> None:
        """A prompt of twice the room is computed: its beginning can be used, not its unreachable end."""
        tokens = prompt(2 * scene.settings.num_slots)
        seen(scene, DOCUMENT)
        for turn in range(2):
            scene.serve(f"large-{turn}", tokens)
            usable = scene.promised_tokens(f"again-{turn}", tokens)
            most = scene.settings.num_slots * scene.settings.block_size
            require(usable >= most // 4, f"of a prompt larger than the cache {usable} tokens are usable")

    @protects("P12", "H51")
    def test_h51_memory_does_not_grow_with_the_requests_served(self, lab: HarnessFactory) -> None:
        """Serving as many requests again, half of them cancelled, needs no more memory than the first."""
        with lab.scene(self.modes[-1]) as scene:
            self._serve(scene, 0)
            before = reachable_bytes(scene)
            self._serve(scene, 1)
            after = reachable_bytes(scene)
            require(
                after <= before * GROWTH + 4096,
                f"the cache holds {before:,} bytes after {MANY_REQUESTS} requests and {after:,} after as many again",
            )

    def _serve(self, scene: CacheHarness, turn: int) -> None:
        for number in range(0, MANY_REQUESTS, 6):
            for each in range(number, number + 6):
                tokens = prompt(1 + each % 4, seed=1000 * turn + each // 2)
                scene.request(f"{turn}-{each}", tokens, 1 + each % 3)
            scene.step(2)
            for each in range(number, number + 6, 2):
                scene.cancel(f"{turn}-{each}")
            scene.step(3)
        scene.settle()
        scene.pass_time(scene.settings.timeout)
        scene.step(8)

    # Tiers

    @kept_in_every_mode("H52", as_new="H52", faulty="tiers", prefix_caching=False, write_queue_bytes=1)
    def test_h52_a_dropped_write_keeps_no_memory(self, scene: CacheHarness) -> None:
        """The queue to the tiers accepts nothing: all writes are dropped, and their memory is free again."""
        scene.serve("first", *PROMPTS)

    @kept_in_every_mode("P11", "H10", as_new="P11", faulty="tiers", prefix_caching=False)
    def test_p11_a_tier_that_hangs_delays_no_request_beyond_its_deadline(self, scene: CacheHarness) -> None:
        """Blocks are on a tier that stops answering: "ask again later" ends in time, and the request is computed."""
        scene.serve("first", *PROMPTS)
        scene.stall_tiers(scene.max_steps)
        requests = [scene.request(f"again-{number}", tokens) for number, tokens in enumerate(PROMPTS)]
        scene.run(*requests, steps=scene.max_steps)
        scene.stall_tiers(0)

    @kept_in_every_mode("H61", "P14", as_new="H61", faulty="tiers", prefix_caching=False)
    def test_h61_a_tier_that_hangs_costs_few_requests_and_leaves_room(self, scene: CacheHarness) -> None:
        """Prompts that only hanging tiers hold are requested one by one: most are computed at once."""
        prompts = [prompt(2, seed=seed) for seed in range(2 * scene.settings.num_slots)]
        scene.serve("first", *prompts)
        usual = self._seconds_of(scene, "usual", prompt(2, seed=900))
        scene.stall_tiers(scene.max_steps)
        asked = prompts[: scene.settings.num_slots]
        seconds = [self._seconds_of(scene, f"asked-{number}", tokens) for number, tokens in enumerate(asked)]
        late = sum(each > usual + HANGING_S for each in seconds)
        require(late <= len(asked) // 3, f"{late} of {len(asked)} requests waited for a tier that hangs")
        tokens = prompt(4, seed=901)
        scene.run(scene.request("new", tokens))
        scene.step(8)
        scene.forget_local()
        fits = scene.promised_tokens("new again", tokens) > 0
        require(fits, "with tiers that hang there is no room for a new prompt in memory")
        scene.stall_tiers(0)

    def _seconds_of(self, scene: CacheHarness, name: str, tokens: list[int]) -> float:
        """Seconds that a request takes, by the engine's clock."""
        began = scene.clock.now
        scene.run(scene.request(name, tokens), steps=scene.max_steps)
        return scene.clock.now - began

    @kept_in_every_mode("P2", "P9", as_new="P2", faulty="tiers", prefix_caching=False)
    def test_p2_tiers_that_fail_break_no_promise(self, scene: CacheHarness) -> None:
        """Reads fail, end early and find damage: every later promise loads."""
        scene.serve("first", *PROMPTS)
        for turn, fault in enumerate((Fault.PARTIAL, Fault.ERROR, Fault.DAMAGE)):
            for number, tokens in enumerate(PROMPTS):
                scene.place.faults.arm(Operation.GET, fault)
                scene.run(scene.request(f"again-{turn}-{number}", tokens))
                scene.place.faults.disarm()
            scene.settle()
        require(scene.engine.counts.failed == 0, "a load failed though the ranks copied everything")

    # Time

    @protects("P11", "H58")
    def test_h58_no_call_of_the_scheduler_waits(self, lab: HarnessFactory) -> None:
        """A call in which the thread sleeps waits for I/O or for another thread: a few are chance, most calls are
        design."""
        with lab.scene(self.modes[0], prefix_caching=False) as scene:
            for number in range(30):
                scene.request(f"r-{number}", prompt(6, seed=number % 3), 2)
                scene.step(2)
            scene.settle()
            for name, times in scene.monitor.times.items():
                require(
                    times.calls < 10 or times.slept * 2 < times.calls,
                    f"{times.slept} of {times.calls} calls of {name} put the scheduler's thread to sleep",
                )
                require(times.longest < LONGEST_CALL_S, f"a call of {name} took {times.longest:.2f} s")

    # Accounts

    @kept_in_every_mode("H70", "H71", stored=DOCUMENT, num_blocks=26)
    def test_h70_tokens_are_counted_when_used_and_once(self, scene: CacheHarness) -> None:
        """Promised, committed, loaded and used tokens agree with the engine's counts, and no total ever falls."""
        if scene.subject.counts is None:
            raise NotObservable("the cache shows no counts (CacheUnderTest.counts)")
        before = dict(scene.subject.counts())
        for number in range(6):
            scene.forget_local()
            scene.request(f"r-{number}", DOCUMENT + prompt(1, seed=20 + number), 12)
            scene.step(4)
            if number % 3 == 2:
                scene.cancel(f"r-{number}")
            now = dict(scene.subject.counts())
            fell = [name for name, value in before.items() if now.get(name, 0) < value]
            require(not fell, f"{', '.join(fell)} fell")
            before = now
        scene.rest()
        counts, engine = dict(scene.subject.counts()), scene.engine.counts
        for name, most in zip(CHAIN[1:], (engine.committed, engine.loaded, engine.external_hits), strict=True):
            count = counts.get(name, most)
            agrees = count <= most if name == "used_tokens" else count == most
            require(agrees, f"the cache counts {count:g} {name}, the engine {most}")
        chain = [counts[name] for name in CHAIN if name in counts]
        require(chain == sorted(chain, reverse=True), f"promised, committed, loaded, used: {chain} must not grow")
