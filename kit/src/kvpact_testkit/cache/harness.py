"""The harness of a cache's check: an engine around the cache, faults to inject, and the verification at rest.

Owns the rules at rest: nothing is held, and the cache has the room of a new one. Decides no check.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from kvpact.contract import ExternalMatchExit
from kvpact.errors import WeightsVersionRefused
from kvpact_testkit.cache.engine_harness import EngineHarness, Others
from kvpact_testkit.engine import Request
from kvpact_testkit.results import Broken, NotObservable, observable_if, require


class CacheHarness(EngineHarness):
    """An engine and a cache, with every fault that the kit can inject."""

    is_shut_down = False

    def squeeze(self, leave: int = 0) -> None:
        """Take all of the engine's free blocks except `leave`."""
        free = [view.block_id for view in self.engine.context.iter_free_blocks()]
        taken = free[: max(0, len(free) - leave)]
        if taken:
            self.say(f"{len(taken)} of the engine's free blocks are taken away")
            self.engine.context.touch(taken)
            self._squeezed += taken

    def release(self) -> None:
        """Free the blocks that `squeeze` took."""
        if self._squeezed:
            self.say("the blocks are given back")
            taken, self._squeezed = self._squeezed, []
            self.engine.context.free_blocks(taken)

    def reset(self) -> bool:
        """Reset the engine's prefix cache and the external one; False if this engine refuses it now."""
        return self._reset(self.engine.reset, "reset the prefix caches", clear_cache=True)

    def reset_connector(self) -> None:
        """Reset only the external cache: running requests continue with the content of their blocks."""
        self._reset(self.engine.reset_connector, "reset the external cache; requests run on", clear_cache=False)

    def update_weights(self, weights: int | None = None, *, clear_cache: bool = True) -> bool:
        """Put other weights in place, by default new ones; False if this engine refuses it now.

        Without `clear_cache` requests continue with the content of their blocks, and no engine refuses it.
        """
        weights = self.engine.runner.weights + 1 if weights is None else weights
        words = f"put weights {weights} in place{'' if clear_cache else '; requests run on'}"
        return self._reset(
            lambda: self.engine.update_weights(weights, clear_cache=clear_cache), words, clear_cache=clear_cache
        )

    def weights_version(self, version: str) -> bool:
        """Set the version word of the weights in place; False if the cache refuses it.

        Raises NotObservable if the cache accepts no words.
        """
        observable_if(self.monitor.knows_words, "the cache takes no word for its weights (`set_weights_version`)")
        self.say(f"the weights are called {version}")
        try:
            self.monitor.set_weights_version(version)
        except WeightsVersionRefused:
            self.say("    the word is refused")
            return False
        return True

    def _reset(self, reset: Callable[[], None], words: str, *, clear_cache: bool) -> bool:
        loading = any(load.asynchronous for load in self.engine.scheduler.loads.values())
        if clear_cache and loading and self.quirks.reset_refuses_loading:
            return False
        self.say(words)
        with self.judged():
            reset()
        return True

    @property
    def max_steps(self) -> int:
        """Steps that a request may wait for the cache, plus those that it needs itself."""
        return int(self.settings.timeout / self.clock.seconds_per_step) + 500

    def require_faulty(self, what: str) -> None:
        """Raises NotObservable if the kit cannot make the cache's "ranks" or "tiers" fail."""
        if what == "tiers" and not self.place.queues:
            raise NotObservable("the cache has no tier whose queue it made with `CacheContext.queue`")
        if what == "ranks" and not self.workers:
            raise NotObservable("the cache brings its own workers; the kit lets only its own ones fail")

    # Exits

    def postpone(self, request: Request, reason: ExternalMatchExit, steps: int = 1) -> None:
        """For some steps the engine cannot take the request's match, and says so in each of them."""
        for _ in range(steps):
            with self.judged("P2"):
                self.monitor.postpone_external_match(request.request_id, reason)
            self.step()

    # Faults

    def stall_tiers(self, steps: int) -> None:
        """Stall the tiers for `steps` steps; 0 ends a stall."""
        for queue in self.place.queues:
            self.say(f"tier {queue.tier.name} " + (f"does nothing for {steps} steps" if steps else "goes on"))
            queue.stalled_steps = steps

    def silence(self, rank: int, steps: int) -> None:
        """A rank reports nothing for `steps` steps; its reports come afterwards."""
        self.say(f"rank {rank} falls silent for {steps} steps")
        self.workers[rank].silent_steps = steps

    def forget_jobs(self, rank: int) -> None:
        """A rank loses its jobs and its unsent reports."""
        self.say(f"rank {rank} forgets its jobs")
        self.workers[rank].forget()

    # Judgement at the end

    def rest(self) -> None:
        """End all faults and let everything finish: then nothing may be held. Raises Broken (P1) with what is."""
        if self.is_shut_down:
            return
        self.release()
        self.place.faults.disarm()
        self.conduct = None
        for conducts in (*self.conducts.values(), *self.load_conducts.values()):
            conducts.clear()
        for worker in self.workers:
            worker.silent_steps = 0
        self.settle()
        self.pass_time(self.settings.timeout)  # plans that no engine ended expire
        self.step(8)
        self.settle()
        self.say("all is at rest")
        self.monitor.check_rest()
        with self.judged("P1"):
            self.engine.check_nothing_held()
        self.require_nothing_held("no request is alive")

    def require_nothing_held(self, when: str) -> None:
        """Raises Broken (P1) if the cache shows what it holds for requests, and that is more than nothing."""
        left = {name: number for name, number in self.subject.held().items() if number}
        require(not left, f"{when} and the cache still holds {left}", "P1 H01")

    def room(self, seed: int = 0) -> int:
        """Tokens that the cache promises of a new prompt that just fits; they become fewer if room is lost.

        Its blocks are offered to the cache in one step. Each `seed` is another prompt.
        """
        reserve = 1 + 2 * self.place.num_groups + self.quirks.keeps_free_blocks
        blocks = min(self.settings.num_slots, self.settings.num_blocks - reserve)
        whole = self.engine.config.tokens_in(blocks)
        whole -= whole % self.engine.scheduler.kv.group_set.alignment
        tokens = [7_000_000 + 10_007 * seed + position for position in range(whole + 1)]
        self.serve("room", tokens)
        promised = self.promised_tokens("room-probe", tokens)
        self.settle()
        return promised

    def as_good_as_new(self, *names: str) -> None:
        """At rest, the cache has as much room as a new one. Raises Broken by `names`, else P1 and H01."""
        self.rest()
        with self.twin() as fresh:
            fresh_room = fresh.room()
        room = self.room()
        if room < fresh_room:
            raise Broken(
                f"a prompt that just fits is promised {fresh_room} tokens by a new cache, and {room} by this one: "
                "the rest of its room is held for nobody",
                protects=names or ("P1", "H01"),
            )
        self.rest()

    def twin(self) -> closing[CacheHarness]:
        """A new scene with the same settings, in a place of its own."""
        directory = self.directory / "twin"
        directory.mkdir()
        return closing(CacheHarness(self.factory, directory, self.settings))

    def neighbour(self) -> closing[CacheHarness]:
        """Another engine, started from the same files: it shares the same stores."""
        self.say("another engine starts beside this one")
        directory = self.directory / f"neighbour-{len([*self.directory.glob('neighbour-*')])}"
        directory.mkdir()
        return self._another(directory)

    def restarted(self) -> closing[CacheHarness]:
        """After `shut_down`: the same engine, restarted from its files."""
        self.say("the engine starts again")
        return self._another(self.directory)

    def _another(self, directory: Path) -> closing[CacheHarness]:
        self.monitor.has_neighbours = True
        scene = CacheHarness(
            self.factory,
            directory,
            self.settings,
            self.script,
            weights=self.weights_of_files,
            others=Others(None, self.monitor.ever_stored, self.place.shared_directory, self.clock),
        )
        scene.monitor.has_neighbours = True
        return closing(scene)

    def shut_down(self) -> None:
        """Process the executed steps and end the cache, as an engine does. Raises Broken if that fails."""
        with self.judged():
            self.engine.shutdown()
        self.subject.close()
        self.is_shut_down = True
