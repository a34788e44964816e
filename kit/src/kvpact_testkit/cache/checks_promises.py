"""Checks of a cache's promises and holds without failures: probes, commits, aborts, and every way to end.

Part of `CacheConformance`.
"""

from __future__ import annotations

from kvpact.contract import DROPPED, ExternalKVMatch, ExternalMatchExit
from kvpact.identity.keys import RequestIdentity
from kvpact_testkit.cache.engine_harness import prompt
from kvpact_testkit.cache.factory import CacheSuite, kept_in_every_mode, promised, require_used, seen
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.engine import JobBehavior, Request, RequestStatus
from kvpact_testkit.results import NotObservable, observable_if, require

DOCUMENT = prompt(7)
LONGER = prompt(9)
FOREVER_S = 3600.0
A_FEW_STEPS = 64
"""Steps after which a cache must not hold a match any more that the engine postpones and never comes back for."""


class PromiseChecks(CacheSuite):
    """Properties that hold when nothing fails."""

    # Every plan ends once

    @kept_in_every_mode("P1", "H01", as_new="P1 H01", stored=DOCUMENT, num_blocks=24)
    def test_h01_promises_that_are_never_used_hold_nothing(self, scene: CacheHarness) -> None:
        """The requests of a blocked queue are promised tokens repeatedly and then cancelled: no block stays held."""
        seen(scene, DOCUMENT)
        scene.squeeze()
        names = [f"blocked-{number}" for number in range(8)]
        for number, name in enumerate(names):
            scene.request(name, DOCUMENT[:-1] + prompt(2, seed=50 + number))
        scene.step(6)
        for name in names:
            scene.cancel(name)
        scene.release()

    @kept_in_every_mode("P1", "H07", as_new="P1 H07", stored=DOCUMENT, num_blocks=40)
    def test_every_way_out_leaves_nothing_behind(self, scene: CacheHarness) -> None:
        """Requests end while promised, blocked, loading, running, preempted and reset: nothing is held afterwards."""
        promised(scene, "promised", DOCUMENT)
        scene.step(2)
        scene.cancel("promised")
        scene.squeeze()
        scene.request("blocked", DOCUMENT)
        scene.step(3)
        scene.cancel("blocked")
        scene.release()
        scene.conduct = lambda rank, job: JobBehavior(copy_after_steps=3)
        for steps in (1, 2, 4, 8):
            scene.forget_local()
            scene.request(f"cancelled-{steps}", DOCUMENT, 9)
            scene.step(steps)
            scene.cancel(f"cancelled-{steps}")
        running = scene.request("reset", DOCUMENT, 9)
        scene.step(8)
        while not scene.reset():
            scene.step()
        scene.run(running)

    @kept_in_every_mode("P1", "P9", stored=DOCUMENT, num_blocks=18, max_tokens_per_step=24)
    def test_preempted_requests_leave_nothing_behind(self, scene: CacheHarness) -> None:
        """Requests that outgrow the engine preempt each other, are promised tokens again, and all end."""
        for number in range(4):
            scene.forget_local()
            scene.request(f"growing-{number}", DOCUMENT + prompt(1, seed=20 + number), 24)
        scene.settle()
        observable_if(scene.engine.counts.preemptions, "this engine preempted nobody")

    @kept_in_every_mode("H07", "P1", faulty="ranks", stored=DOCUMENT, num_blocks=24)
    def test_h07_a_request_cancelled_during_its_load_keeps_its_blocks_until_all_ranks_are_done(
        self, scene: CacheHarness
    ) -> None:
        """Ranks copy late into the blocks of a cancelled request; others need blocks, and read only their own."""
        scene.conduct = lambda rank, job: JobBehavior(copy_after_steps=4 * rank + 2)
        request = scene.request("cancelled", DOCUMENT)
        for _ in range(20):
            scene.step()
            if request.status is RequestStatus.WAITING_FOR_LOAD or request.has_ended:
                break
        if request.status is not RequestStatus.WAITING_FOR_LOAD:
            raise NotObservable("the cache loads while the engine waits for it: there is no during")
        scene.cancel("cancelled")
        others = [scene.request(f"other-{number}", prompt(7, seed=30 + number), 5) for number in range(3)]
        scene.run(*others)

    # A promise holds

    @kept_in_every_mode("P2", "H11", stored=DOCUMENT)
    def test_p2_a_promise_outlives_eviction_and_time(self, scene: CacheHarness) -> None:
        """A promised request waits while three times the cache's room is computed, and an hour; all of it loads."""
        request, match = promised(scene, "waiting", DOCUMENT)
        for number in range(3):
            other = scene.request(f"other-{number}", prompt(scene.settings.num_slots, seed=30 + number), 2)
            while not other.has_ended:
                scene.step()
                again = scene.probe(request)
                require(again.num_tokens == match.num_tokens, f"the promise falls to {again.num_tokens} tokens")
        scene.pass_time(FOREVER_S)
        match = scene.probe(request)
        require(match.num_tokens > 0, f"after {FOREVER_S:g} s nothing is promised any more, though it was asked for")
        require_used(scene, request, match.num_tokens)

    # Exits

    @kept_in_every_mode("P1", "H01", as_new="P1 H01", stored=DOCUMENT)
    def test_h01_a_dropped_match_is_let_go_of_at_once(self, scene: CacheHarness) -> None:
        """Told that nobody will come back for a match, whatever the reason, the cache holds nothing after that step,
        and what the step saves gets the room."""
        room = scene.room()
        scene.serve("again", DOCUMENT)
        request, match = promised(scene, "dropped", DOCUMENT)
        for reason in sorted(DROPPED):
            drop(scene, request, match, reason)
            scene.step()
            scene.require_nothing_held(f"a match was dropped ({reason}) in the step before")
            match = scene.probe(request)
        drop(scene, request, match, ExternalMatchExit.OTHER_CONNECTOR)
        left = scene.room(seed=1)
        require(
            left >= room, f"a prompt that just fits is promised {room} tokens, and {left} after a match was dropped"
        )
        scene.cancel("dropped")

    @kept_in_every_mode("P2", as_new="P1 H01", stored=DOCUMENT)
    def test_p2_a_postponed_match_is_still_there_in_the_next_two_steps(self, scene: CacheHarness) -> None:
        """The engine cannot take a match for a step or two, and nobody else needs room: it is there, and is not read
        from a tier again."""
        request, match = promised(scene, "postponed", DOCUMENT)
        reads = sum(queue.reads for queue in scene.place.queues)
        for reason in ExternalMatchExit:
            for steps in () if reason.is_dropped else (1, 2):
                scene.postpone(request, reason, steps)
                again = scene.probe(request)
                require(
                    again.num_tokens == match.num_tokens,
                    f"after {steps} steps ({reason}) {again.num_tokens} of {match.num_tokens} tokens are promised",
                )
        more = sum(queue.reads for queue in scene.place.queues) - reads
        require(more == 0, f"a postponed match is read from the tiers {more} times more")
        require_used(scene, request, match.num_tokens)

    @kept_in_every_mode("P1", "H01", as_new="P1 H01", stored=DOCUMENT)
    def test_h01_a_postponed_match_does_not_hold_its_room_for_ever(self, scene: CacheHarness) -> None:
        """The engine postpones a match in each step and never comes back for it: others get its room."""
        room = scene.room()
        scene.serve("again", DOCUMENT)
        request, _ = promised(scene, "postponed", DOCUMENT)
        scene.pass_time(FOREVER_S)
        scene.postpone(request, ExternalMatchExit.LORA_LIMIT, A_FEW_STEPS)
        scene.require_nothing_held("nobody has come back for a postponed match")
        left = scene.room(seed=1)
        require(left >= room, f"a prompt that just fits is promised {room} tokens, and {left} beside a postponed match")
        require_used(scene, request, scene.probe(request).num_tokens)

    # Probes

    @kept_in_every_mode("P3", "H02", as_new="P3 H02", stored=DOCUMENT)
    def test_p3_probing_again_acquires_nothing(self, scene: CacheHarness) -> None:
        """Forty probes of one request return one plan, read no tier again, and leave nothing held."""
        request, match = promised(scene, "asked", DOCUMENT)
        reads = sum(queue.reads for queue in scene.place.queues)
        for _ in range(40):
            again = scene.probe(request)
            same = again.query_result is match.query_result or again.query_result == match.query_result
            require(same and again.num_tokens == match.num_tokens, "another plan is given for the same question")
            scene.step()
        more = sum(queue.reads for queue in scene.place.queues) - reads
        require(more == 0, f"40 probes of a promised request read the tiers {more} times")
        scene.cancel("asked")

    @kept_in_every_mode("H03", "P3", as_new="H03", stored=LONGER)
    def test_h03_the_range_changes_between_probe_and_commit(self, scene: CacheHarness) -> None:
        """The computed tokens grow and shrink between probes; the load follows the last probe."""
        size = scene.settings.block_size
        request, match = promised(scene, "changing", LONGER)
        for computed in (3 * size, size, 6 * size, 0, 4 * size):
            match = scene.probe(request, computed)
            scene.step()
        scene.run(scene.request("local", LONGER[: 2 * size + 1]))
        used = scene.use(request)
        wanted = 4 * size + match.num_tokens - 2 * size
        require(used == wanted, f"behind 8 computed tokens {wanted} can be had, and {used} were used")

    # Commits

    @kept_in_every_mode("P4", "H04", as_new="P4 H04", stored=DOCUMENT, quirks={"rounds_match_to_tokens": 16})
    def test_h04_a_commit_may_take_less(self, scene: CacheHarness) -> None:
        """The engine commits 16 of 28 tokens: those are loaded, and the rest is released at once."""
        commit_multiple_of(scene, "rounded", 16)

    @kept_in_every_mode(
        "P4", "H04", as_new="P4 H04", stored=DOCUMENT, quirks={"commits_zero": True, "local_tail_tokens": 1000}
    )
    def test_h04_a_commit_may_take_nothing(self, scene: CacheHarness) -> None:
        """The engine commits 0 tokens: nothing is loaded and nothing stays held."""
        request, _ = promised(scene, "none", DOCUMENT)
        require(scene.use(request) == 0, "tokens were used though none was committed")

    @kept_in_every_mode("P4", "H30", as_new="P4 H30", stored=DOCUMENT, quirks={"rounds_match_to_tokens": 5})
    def test_h30_a_commit_may_end_inside_a_block(self, scene: CacheHarness) -> None:
        """The engine commits 25 of 28 tokens: seven blocks are loaded, and the seventh is computed to its end."""
        commit_multiple_of(scene, "partial", 5)

    @kept_in_every_mode("P5", "H05")
    def test_h05_what_is_promised_is_loaded_whatever_its_size(self, scene: CacheHarness) -> None:
        """Matches of one to nine blocks: no rule about sizes may be applied after the promise."""
        total = 0
        for blocks in range(1, 10):
            tokens = prompt(blocks, seed=blocks)
            scene.serve(f"first-{blocks}", tokens)
            request = scene.request(f"again-{blocks}", tokens, held=True)
            match = scene.probe(request)
            require_used(scene, request, match.num_tokens)
            scene.forget_local()
            total += match.num_tokens
        observable_if(total, "the cache promises nothing of prompts that were computed before")

    @kept_in_every_mode("P5", stored=DOCUMENT)
    def test_p5_nothing_is_promised_to_a_request_that_must_compute_its_prompt(self, scene: CacheHarness) -> None:
        """`may_load` is respected before the promise: some engines load every promise."""
        seen(scene, DOCUMENT)
        scene.run(scene.request("unwilling", DOCUMENT, may_load=False))
        used = scene.engine.counts.external_hits
        require(used == 0, f"{used} tokens were loaded for a request that must compute its prompt itself")

    @kept_in_every_mode("P6", "H06", stored=LONGER)
    def test_h06_the_last_token_is_left_to_compute(self, scene: CacheHarness) -> None:
        """Prompts that end with a block, or are held completely: at least one token is left to compute."""
        size = scene.settings.block_size
        for blocks in range(1, 9):
            for tail in (0, 1, size - 1):
                length = blocks * size + tail
                for computed in range(0, length, size):
                    scene.promised_tokens(f"asked-{length}-{computed}", LONGER[:length], computed)
        for length in (1, size - 1, size, size + 1, 8 * size):
            scene.run(scene.request(f"run-{length}", LONGER[:length]))
            scene.forget_local()

    # Whose tokens

    @kept_in_every_mode("H24", stored=DOCUMENT)
    def test_h24_salt_and_adapter_and_what_is_unknown_are_kept_apart(self, scene: CacheHarness) -> None:
        """Equal tokens under another salt or adapter are other prompts; without an identity they are not shared."""
        identities = (
            RequestIdentity(salt="tenant"),
            RequestIdentity(adapter="digest-of-weights"),
            RequestIdentity(salt="digest-of-weights"),
            RequestIdentity(adapter="digest-of-weights", salt="tenant"),
            None,
            None,
        )
        for number, identity in enumerate(identities):
            scene.serve(f"other-{number}", DOCUMENT, times=2, identity=identity)

    @kept_in_every_mode("H32", as_new="H32", stored=DOCUMENT)
    def test_h32_nothing_is_served_after_the_weights_changed(self, scene: CacheHarness) -> None:
        """A reset drops all blocks, those being copied included; later blocks are cached again."""
        scene.run(scene.request("just-computed", LONGER))
        while not scene.update_weights():
            scene.step()
        scene.serve("after", LONGER, times=2)


def drop(scene: CacheHarness, request: Request, match: ExternalKVMatch, reason: ExternalMatchExit) -> None:
    """The engine will not come back for the match, and says so."""
    with scene.judged("P1", "H01"):
        scene.monitor.abort_external_match(request.request_id, match, reason)


def commit_multiple_of(scene: CacheHarness, name: str, tokens: int) -> None:
    """The engine commits a multiple of `tokens` of the promise. Raises Broken unless exactly that is used."""
    request, match = promised(scene, name, DOCUMENT)
    used = scene.use(request)
    wanted = match.num_tokens - match.num_tokens % tokens
    require(used == wanted, f"{wanted} of {match.num_tokens} tokens were committed and {used} used")
