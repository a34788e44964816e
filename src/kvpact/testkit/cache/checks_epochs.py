"""Checks of what a reset means: nothing of other weights is served, whatever a store answers, and nobody else pays.

Part of `CacheConformance`. Weights are told apart by the engine's oracle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpact.engine import JobBehavior
from kvpact.testkit.cache.engine_harness import prompt
from kvpact.testkit.cache.factory import HarnessFactory, in_every_mode, promised
from kvpact.testkit.cache.harness import CacheHarness
from kvpact.testkit.faults import Fault, Operation
from kvpact.testkit.results import NotObservable, require
from kvpact.testkit.suite import Suite, protects

DOCUMENT = prompt(7)
LONGER = prompt(9)
OTHER = prompt(7, seed=40)

A_WHILE_S = 900.0
"""After so long a cache must have asked a store again what it believes it holds."""

STORE_FAULTS = (
    (Operation.READ, Operation.WRITE),
    (Operation.GET, Operation.PUT, Operation.DELETE, Operation.CLEAR),
)
"""What fails together: the store under a tier, or the tier as a whole."""

MANY = 1 << 20


class EpochChecks(Suite[HarnessFactory]):
    """What holds when weights change."""

    if TYPE_CHECKING:
        modes: tuple[str, ...]

    # A reset

    @protects("P13", "H32")
    @in_every_mode(prefix_caching=False)
    def test_p13_nothing_stored_before_a_reset_is_served_after_it(self, scene: CacheHarness) -> None:
        """The external cache is reset: no promise of before; what is computed afterwards is stored and served again."""
        scene.warm(DOCUMENT)
        promised(scene, "before", DOCUMENT)
        scene.update_weights(clear_cache=False)
        match = scene.probe(scene.engine.scheduler.requests["before"])
        require(not match.num_tokens, f"{match.num_tokens} tokens stored before the reset are promised after it")
        scene.cancel("before")
        for turn in range(3):
            scene.run(scene.request(f"after-{turn}", DOCUMENT, 3))
            scene.settle()
        request, match = promised(scene, "again", DOCUMENT)
        require(match.num_tokens > 0, "after a reset nothing is served any more")
        scene.let_go(request)
        scene.run(request)
        scene.as_good_as_new("P13")

    @protects("P13", "H35")
    @in_every_mode(prefix_caching=False)
    def test_h35_two_resets_in_a_row_and_something_is_stored_between_them(self, scene: CacheHarness) -> None:
        """What is stored between two resets is not served after the second, however slow the tiers were meanwhile."""
        scene.warm(DOCUMENT)
        promised(scene, "seen", DOCUMENT)
        scene.cancel("seen")
        for stalled in (0, 3, 12):
            self._stall(scene, stalled)
            scene.update_weights(clear_cache=False)
            scene.run(scene.request(f"between-{stalled}", OTHER))
            scene.step(2)
            scene.update_weights(clear_cache=False)
            for turn, tokens in enumerate((OTHER, DOCUMENT, OTHER)):
                scene.run(scene.request(f"after-{stalled}-{turn}", tokens, 2))
            scene.settle()
            scene.run(scene.request(f"again-{stalled}", OTHER, 2))
        scene.as_good_as_new("H35")

    @protects("P13", "H38")
    @in_every_mode(max_tokens_per_step=10)
    def test_h38_what_running_requests_computed_before_a_reset_is_never_served_to_others(
        self, scene: CacheHarness
    ) -> None:
        """Requests are half way through their prompts and outputs when the weights change, and run on."""
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
            scene.run(scene.request(f"after-{name}", [*tokens, 1], 2))
            scene.settle()
            scene.forget_local()
        scene.as_good_as_new("H38")

    @protects("P13", "H69")
    @in_every_mode(prefix_caching=False)
    def test_p13_a_reset_while_loads_saves_and_writes_are_under_way(self, scene: CacheHarness) -> None:
        """Ranks copy late and tiers are slow; the weights change meanwhile; what lands afterwards is nobody's."""
        scene.warm(DOCUMENT)
        promised(scene, "seen", DOCUMENT)
        scene.cancel("seen")
        for clear in (False, True):
            name = "cleared" if clear else "running-on"
            self._stall(scene, 10)
            if scene.workers:
                scene.conduct = lambda rank, job: JobBehavior(copy_after_steps=4, report_after_steps=rank)
            saving = scene.request(f"saving-{name}", prompt(8, seed=50 + clear))
            scene.step(2)
            loading = scene.request(f"loading-{name}", DOCUMENT, 3)
            scene.step(2)
            while not scene.update_weights(clear_cache=clear):
                scene.step()
            scene.step(2)
            scene.conduct = None
            after = scene.request(f"after-{name}", prompt(8, seed=50 + clear), 3)
            scene.run(saving, loading, after)
            scene.settle()
            for turn in range(2):
                scene.run(scene.request(f"again-{name}-{turn}", prompt(8, seed=50 + clear), 2))
                scene.run(scene.request(f"loaded-{name}-{turn}", DOCUMENT, 2))
                scene.settle()
        scene.as_good_as_new("P13")

    # Stores that fail

    @protects("P13", "H36")
    @in_every_mode(prefix_caching=False)
    def test_h36_a_store_that_refuses_or_hangs_during_a_reset_and_comes_back(self, scene: CacheHarness) -> None:
        """Everything that is asked of the tiers fails, or hangs, while the weights change: later on nothing old is
        served."""
        scene.tiers_possible()
        prompts = [DOCUMENT, prompt(8, seed=60), prompt(8, seed=61)]  # more than memory has room for
        for turn, operations in enumerate(STORE_FAULTS):
            scene.warm(*prompts, name=f"first-{turn}")
            for operation in operations:
                scene.place.faults.arm(operation, Fault.ERROR, times=MANY)
            scene.say(f"everything that is asked of the tiers fails: {', '.join(operations)}")
            scene.update_weights(clear_cache=False)
            scene.run(scene.request(f"meanwhile-{turn}", DOCUMENT, 2))
            self._stall(scene, 6)
            scene.step(3)
            scene.place.faults.disarm()
            scene.say("the tiers are back")
            for again in range(2):
                scene.pass_time(A_WHILE_S)
                for number, tokens in enumerate(prompts):
                    scene.run(scene.request(f"after-{turn}-{again}-{number}", tokens, 2))
                scene.settle()
        scene.as_good_as_new("H36")

    def _stall(self, scene: CacheHarness, steps: int) -> None:
        for queue in scene.place.queues:
            scene.say(f"tier {queue.tier.name} does nothing for {steps} steps")
            queue.stalled_steps = steps

    # Restarts

    @protects("P13", "H37")
    @in_every_mode(prefix_caching=False)
    def test_h37_what_was_stored_after_a_reset_is_not_served_after_a_restart(self, scene: CacheHarness) -> None:
        """The weights change in place, blocks are stored, and the engine starts again from its files."""
        scene.tiers_possible()
        scene.warm(DOCUMENT)
        scene.update_weights(clear_cache=False)
        scene.warm(DOCUMENT, OTHER, name="new")
        scene.shut_down()
        with scene.restarted() as restarted:
            for turn in range(2):
                for number, tokens in enumerate((OTHER, DOCUMENT)):
                    restarted.run(restarted.request(f"restarted-{turn}-{number}", tokens, 2))
                    restarted.settle()
            restarted.rest()

    # Words

    @protects("P13")
    @in_every_mode(prefix_caching=False)
    def test_p13_a_word_for_the_weights_is_believed_after_a_reset_and_once(self, scene: CacheHarness) -> None:
        """Without a reset a word is refused, and so is the one from before it; whatever is refused changes nothing."""
        require(not scene.weights_version("one"), "a word is believed though no reset came")
        scene.warm(DOCUMENT)
        promised(scene, "seen", DOCUMENT)
        scene.cancel("seen")
        scene.update_weights(clear_cache=False)
        require(scene.weights_version("one"), "after a reset a word is refused")
        require(not scene.weights_version("two"), "a second word is believed, and no reset came between")
        scene.warm(DOCUMENT, name="named")
        request, _ = promised(scene, "of-this-word", DOCUMENT)
        scene.let_go(request)
        scene.run(request)
        scene.update_weights(clear_cache=False)
        require(not scene.weights_version("one"), "the word from before the reset is believed")
        scene.run(scene.request("after", DOCUMENT, 2))
        require(scene.weights_version("two"), "after a reset a new word is refused")
        scene.run(scene.request("under-two", DOCUMENT, 2))
        scene.as_good_as_new("P13")

    @protects("P13")
    @in_every_mode(prefix_caching=False)
    def test_p13_two_engines_with_one_word_share_again(self, scene: CacheHarness) -> None:
        """A rolling update of two engines over one store: neither is served the other's blocks until both have said
        the same word, and then it is."""
        shared_place(scene)
        with scene.neighbour() as other:
            scene.update_weights(clear_cache=False)
            if not scene.weights_version("one"):
                return  # the check of words says so
            scene.warm(OTHER, name="new")
            other.run(other.request("old-meanwhile", OTHER, 2))
            other.settle()
            other.update_weights(scene.engine.runner.weights, clear_cache=False)
            other.run(other.request("no-word-yet", OTHER, 2))
            other.settle()
            scene.run(scene.request("named-meanwhile", OTHER, 2))
            other.weights_version("one")
            scene.warm(LONGER, name="for-both")
            request = other.request("shares", LONGER, held=True)
            match = other.probe(request)
            require(match.num_tokens > 0, "both engines said the same word; what one stored the other is not promised")
            other.let_go(request)
            other.run(request)
            other.rest()
        scene.rest()

    # Others

    @protects("H46")
    @in_every_mode(prefix_caching=False)
    def test_h46_one_engines_reset_takes_nothing_from_the_others(self, scene: CacheHarness) -> None:
        """Two engines over one store; one is reset: an engine that starts now is promised what was stored before."""
        shared_place(scene)
        scene.reset_connector()
        scene.step(4)
        scene.settle()
        with scene.neighbour() as third:
            request = third.request("third", DOCUMENT, held=True)
            match = third.probe(request)
            require(match.num_tokens > 0, "one engine's reset took from the store what others would be served")
            third.let_go(request)
            third.run(request)
            third.rest()

    @protects("H46")
    @in_every_mode(prefix_caching=False)
    def test_h46_a_store_that_lost_its_blocks_gets_them_again(self, scene: CacheHarness) -> None:
        """Somebody empties the store; the prompt comes again now and then: after a while the store has it again."""
        shared_place(scene)
        for queue in scene.place.queues:
            if not queue.tier.exclusive:
                queue.tier.clear()
        scene.say("somebody empties the shared stores")
        for turn in range(4):
            scene.pass_time(A_WHILE_S)
            scene.step(2)
            scene.run(scene.request(f"again-{turn}", DOCUMENT, 2))
            scene.settle()
        with scene.neighbour() as third:
            match = third.probe(third.request("third", DOCUMENT, held=True))
            require(match.num_tokens > 0, "four requests later the store still has nothing of what it lost")
            third.cancel("third")
            third.rest()


def shared_place(scene: CacheHarness) -> None:
    """DOCUMENT is stored, and another engine would be promised it. Raises NotObservable if nothing is shared."""
    scene.tiers_possible()
    scene.warm(DOCUMENT)
    with scene.neighbour() as other:
        match = other.probe(other.request("shared", DOCUMENT, held=True))
        other.cancel("shared")
        other.rest()
    if not match.num_tokens:
        raise NotObservable("another cache at the same place is promised nothing: no store is shared")


__all__ = ["EpochChecks"]
