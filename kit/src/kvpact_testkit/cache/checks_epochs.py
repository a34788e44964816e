"""Checks of resets: no block of other weights is served, whatever a store answers, at no cost to other engines.

Part of `CacheConformance`. The engine's oracle distinguishes weights.
"""

from __future__ import annotations

from kvpact_testkit.cache.engine_harness import prompt
from kvpact_testkit.cache.factory import CacheSuite, kept_in_every_mode, promised, seen
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.engine import JobBehavior
from kvpact_testkit.faults import Fault, Operation
from kvpact_testkit.results import observable_if, require

DOCUMENT = prompt(7)
LONGER = prompt(9)
OTHER = prompt(7, seed=40)

A_WHILE_S = 900.0
"""Seconds after which a cache must have asked a store again which blocks it holds."""

STORE_FAULTS = (
    (Operation.READ, Operation.WRITE),
    (Operation.GET, Operation.PUT, Operation.DELETE, Operation.CLEAR),
)
"""Operations that fail together: those of a tier's store, or of the tier as a whole."""

MANY = 1 << 20


class EpochChecks(CacheSuite):
    """Properties that hold when weights change."""

    # A reset

    @kept_in_every_mode("P13", "H32", as_new="P13", stored=DOCUMENT, prefix_caching=False)
    def test_p13_nothing_stored_before_a_reset_is_served_after_it(self, scene: CacheHarness) -> None:
        """After a reset of the external cache no earlier promise holds; later blocks are stored and served again."""
        promised(scene, "before", DOCUMENT)
        scene.update_weights(clear_cache=False)
        match = scene.probe(scene.engine.scheduler.requests["before"])
        require(not match.num_tokens, f"{match.num_tokens} tokens stored before the reset are promised after it")
        scene.cancel("before")
        scene.serve("after", DOCUMENT, times=3, outputs=3)
        request, match = promised(scene, "again", DOCUMENT)
        require(match.num_tokens > 0, "after a reset nothing is served any more")
        scene.use(request)

    @kept_in_every_mode("P13", "H35", as_new="H35", stored=DOCUMENT, prefix_caching=False)
    def test_h35_two_resets_in_a_row_and_something_is_stored_between_them(self, scene: CacheHarness) -> None:
        """Blocks stored between two resets are not served after the second, however slow the tiers are."""
        seen(scene, DOCUMENT)
        for stalled in (0, 3, 12):
            scene.stall_tiers(stalled)
            scene.update_weights(clear_cache=False)
            scene.run(scene.request(f"between-{stalled}", OTHER))
            scene.step(2)
            scene.update_weights(clear_cache=False)
            for turn, tokens in enumerate((OTHER, DOCUMENT, OTHER)):
                scene.run(scene.request(f"after-{stalled}-{turn}", tokens, 2))
            scene.settle()
            scene.run(scene.request(f"again-{stalled}", OTHER, 2))

    @kept_in_every_mode("P13", "H38", as_new="H38", max_tokens_per_step=10)
    def test_h38_what_running_requests_computed_before_a_reset_is_never_served_to_others(
        self, scene: CacheHarness
    ) -> None:
        """The weights change while requests are halfway through their prompts and outputs; the requests continue."""
        half = scene.request("half", LONGER, 5)
        scene.step(2)
        scene.run(scene.request("short", DOCUMENT))
        writing = scene.request("writing", OTHER, 14)
        while not writing.output_token_ids:
            scene.step()
        scene.update_weights(clear_cache=False)
        on_top = scene.request("on-top", [*LONGER[:-1], 1, 2, 3, 4, 5, 6, 7, 8, 9], 3)
        scene.run(half, writing, on_top)
        scene.settle()
        everything = [(one.request_id, list(one.token_ids)) for one in (half, writing, on_top)]
        scene.forget_local()
        for name, tokens in everything:
            scene.serve(f"after-{name}", [*tokens, 1], outputs=2)

    @kept_in_every_mode("P13", "H69", as_new="P13", stored=DOCUMENT, prefix_caching=False)
    def test_p13_a_reset_while_loads_saves_and_writes_are_under_way(self, scene: CacheHarness) -> None:
        """Ranks copy late, tiers are slow, and the weights change: blocks that arrive later are not served."""
        seen(scene, DOCUMENT)
        for clear in (False, True):
            name = "cleared" if clear else "running-on"
            scene.stall_tiers(10)
            if scene.workers:
                scene.conduct = lambda rank, job: JobBehavior(copy_after_steps=4, report_after_steps=rank)
            saved = prompt(8, seed=50 + clear)
            saving = scene.request(f"saving-{name}", saved)
            scene.step(2)
            loading = scene.request(f"loading-{name}", DOCUMENT, 3)
            scene.step(2)
            while not scene.update_weights(clear_cache=clear):
                scene.step()
            scene.step(2)
            scene.conduct = None
            scene.run(saving, loading, scene.request(f"after-{name}", saved, 3))
            scene.settle()
            scene.serve(f"again-{name}", saved, DOCUMENT, times=2, outputs=2)

    # Stores that fail

    @kept_in_every_mode("P13", "H36", as_new="H36", faulty="tiers", prefix_caching=False)
    def test_h36_a_store_that_refuses_or_hangs_during_a_reset_and_comes_back(self, scene: CacheHarness) -> None:
        """Every operation of the tiers fails, or hangs, while the weights change: no old block is served
        later."""
        prompts = [DOCUMENT, prompt(8, seed=60), prompt(8, seed=61)]  # more blocks than memory has room for
        for turn, operations in enumerate(STORE_FAULTS):
            scene.serve(f"first-{turn}", *prompts)
            for operation in operations:
                scene.place.faults.arm(operation, Fault.ERROR, times=MANY)
            scene.say(f"everything that is asked of the tiers fails: {', '.join(operations)}")
            scene.update_weights(clear_cache=False)
            scene.run(scene.request(f"meanwhile-{turn}", DOCUMENT, 2))
            scene.stall_tiers(6)
            scene.step(3)
            scene.place.faults.disarm()
            scene.say("the tiers are back")
            scene.serve(f"after-{turn}", *prompts, times=2, apart=A_WHILE_S, outputs=2)

    # Restarts

    @kept_in_every_mode("P13", "H37", faulty="tiers", stored=DOCUMENT, prefix_caching=False)
    def test_h37_what_was_stored_after_a_reset_is_not_served_after_a_restart(self, scene: CacheHarness) -> None:
        """The weights change in place, blocks are stored, and the engine restarts from its files."""
        scene.update_weights(clear_cache=False)
        scene.serve("new", DOCUMENT, OTHER)
        scene.shut_down()
        with scene.restarted() as restarted:
            restarted.serve("restarted", OTHER, DOCUMENT, times=2, outputs=2)
            restarted.rest()

    # Words

    @kept_in_every_mode("P13", as_new="P13", prefix_caching=False)
    def test_p13_a_word_for_the_weights_is_believed_after_a_reset_and_once(self, scene: CacheHarness) -> None:
        """A word is refused without a reset, and so is the word from before the reset; a refusal changes nothing."""
        require(not scene.weights_version("one"), "a word is believed though no reset came")
        scene.serve("first", DOCUMENT)
        seen(scene, DOCUMENT)
        scene.update_weights(clear_cache=False)
        require(scene.weights_version("one"), "after a reset a word is refused")
        require(not scene.weights_version("two"), "a second word is believed, and no reset came between")
        scene.serve("named", DOCUMENT)
        request, _ = promised(scene, "of-this-word", DOCUMENT)
        scene.use(request)
        scene.update_weights(clear_cache=False)
        require(not scene.weights_version("one"), "the word from before the reset is believed")
        scene.run(scene.request("after", DOCUMENT, 2))
        require(scene.weights_version("two"), "after a reset a new word is refused")
        scene.run(scene.request("under-two", DOCUMENT, 2))

    @kept_in_every_mode("P13", faulty="tiers", stored=DOCUMENT, prefix_caching=False)
    def test_p13_two_engines_with_one_word_share_again(self, scene: CacheHarness) -> None:
        """A rolling update of two engines over one store: each is served the other's blocks only after both have set
        the same word."""
        shared_place(scene)
        with scene.neighbour() as other:
            scene.update_weights(clear_cache=False)
            if not scene.weights_version("one"):
                return  # the check of words reports it
            scene.serve("new", OTHER)
            other.serve("old-meanwhile", OTHER, outputs=2)
            other.update_weights(scene.engine.runner.weights, clear_cache=False)
            other.serve("no-word-yet", OTHER, outputs=2)
            scene.run(scene.request("named-meanwhile", OTHER, 2))
            other.weights_version("one")
            scene.serve("for-both", LONGER)
            request = other.request("shares", LONGER, held=True)
            match = other.probe(request)
            require(match.num_tokens > 0, "both engines said the same word; what one stored the other is not promised")
            other.use(request)
            other.rest()

    # Others

    @kept_in_every_mode("H46", faulty="tiers", stored=DOCUMENT, prefix_caching=False)
    def test_h46_one_engines_reset_takes_nothing_from_the_others(self, scene: CacheHarness) -> None:
        """One of two engines over one store is reset: an engine that starts now is promised the earlier blocks."""
        shared_place(scene)
        scene.reset_connector()
        scene.step(4)
        scene.settle()
        with scene.neighbour() as third:
            request = third.request("third", DOCUMENT, held=True)
            match = third.probe(request)
            require(match.num_tokens > 0, "one engine's reset took from the store what others would be served")
            third.use(request)
            third.rest()

    @kept_in_every_mode("H46", faulty="tiers", stored=DOCUMENT, prefix_caching=False)
    def test_h46_a_store_that_lost_its_blocks_gets_them_again(self, scene: CacheHarness) -> None:
        """The store is emptied, and the prompt requested repeatedly: after a while the store has it again."""
        shared_place(scene)
        for queue in scene.place.queues:
            if not queue.tier.exclusive:
                queue.tier.clear()
        scene.say("somebody empties the shared stores")
        scene.serve("again", DOCUMENT, times=4, apart=A_WHILE_S, outputs=2)
        require(promised_to_another(scene) > 0, "four requests later the store still has nothing of what it lost")


def promised_to_another(scene: CacheHarness) -> int:
    """Tokens of DOCUMENT that a new engine beside this one is promised."""
    with scene.neighbour() as other:
        promised_tokens = other.promised_tokens("shared", DOCUMENT)
        other.rest()
    return promised_tokens


def shared_place(scene: CacheHarness) -> None:
    """Raises NotObservable unless another engine is promised tokens of DOCUMENT, which is stored."""
    observable_if(promised_to_another(scene), "another cache at the same place is promised nothing: no store is shared")
