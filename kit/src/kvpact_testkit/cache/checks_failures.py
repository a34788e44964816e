"""Checks of a cache whose ranks are late, silent, contradictory or broken.

Part of `CacheConformance`. The ranks are the kit's: a cache with its own workers is not checked here.
"""

from __future__ import annotations

from typing import Any

from kvpact.contract import LoadJob
from kvpact.identity.keys import RequestIdentity
from kvpact.ranges import BlockRange, RangeSet
from kvpact_testkit.cache.engine_harness import prompt
from kvpact_testkit.cache.factory import (
    CacheSuite,
    HarnessFactory,
    kept_in_every_mode,
    promised,
    require_right_outputs,
    seen,
)
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.engine import JobBehavior, Request
from kvpact_testkit.engine.simulated_worker import NEVER, Job
from kvpact_testkit.results import NotObservable, observable_if, require
from kvpact_testkit.suite import protects

DOCUMENT = prompt(8)


def failing(start: int, count: int) -> JobBehavior:
    """A job of which these blocks of the request fail."""
    return JobBehavior(failed_blocks=RangeSet.of(BlockRange(start, count)))


def several_ranks(scene: CacheHarness) -> None:
    """Raises NotObservable if there is only one rank."""
    observable_if(scene.settings.ranks >= 2, "there is one rank only")


def others(scene: CacheHarness, count: int, **settings: Any) -> list[Request]:
    """Requests that share nothing with `DOCUMENT` and need blocks."""
    return [scene.request(f"other-{number}", prompt(6, seed=30 + number), **settings) for number in range(count)]


def seen_failing(scene: CacheHarness) -> None:
    """Raises NotObservable if no load failed: the kit fails no synchronous load of an engine that trusts them."""
    if not scene.monitor.loads_failed_by_ranks:
        raise NotObservable("no load could be made to fail: this engine cannot take the failure of a synchronous one")


class FailureChecks(CacheSuite):
    """Properties that hold when ranks misbehave."""

    # Accounts

    @kept_in_every_mode("P7", "P9", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_p7_loaded_and_failed_make_up_what_was_committed(self, scene: CacheHarness) -> None:
        """Loads fail at the start, in the middle and at the end, on either rank: each committed block is named once."""
        for number, (rank, start, count) in enumerate(((0, 0, 1), (1, 3, 2), (0, 7, 1), (1, 0, 8), (0, 2, 1))):
            scene.conducts[rank % scene.settings.ranks].append(failing(start, count))
            scene.serve(f"again-{number}", DOCUMENT, outputs=3)
            for conducts in scene.conducts.values():
                conducts.clear()
            scene.serve(f"repair-{number}", DOCUMENT)
        scene.rest()
        counts = scene.engine.counts
        observable_if(counts.committed, "nothing was loaded")
        sums = (
            f"promised {counts.promised}, committed {counts.committed}, loaded {counts.loaded}, failed {counts.failed}"
        )
        require(counts.loaded + counts.failed == counts.committed <= counts.promised, sums)

    @kept_in_every_mode("P9", "H28", as_new="P9", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_p9_a_failed_range_is_computed_again_and_promised_to_nobody(self, scene: CacheHarness) -> None:
        """Blocks 3 and 4 of a load fail on one rank: outputs are those of an engine without a cache, and the next
        request is not promised what failed."""
        scene.conduct = lambda rank, job: failing(3, 2) if isinstance(job, LoadJob) and rank == 0 else JobBehavior()
        victim = scene.request("victim", DOCUMENT, 6)
        scene.step(2)
        second = scene.request("second", DOCUMENT, 6)
        scene.run(victim, second)
        require_right_outputs(scene, victim, second)
        seen_failing(scene)

    @kept_in_every_mode("H09", "P9", as_new="H09", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_h09_loads_that_always_fail_keep_no_request_from_its_end(self, scene: CacheHarness) -> None:
        """Every load fails as a whole: no request is promised the same blocks repeatedly, and all requests end."""
        scene.conduct = lambda rank, job: failing(0, 1 << 20) if isinstance(job, LoadJob) else JobBehavior()
        scene.run(*[scene.request(f"again-{number}", DOCUMENT, 3) for number in range(4)])
        seen_failing(scene)

    # Requests

    @kept_in_every_mode("H62", "P14", as_new="H62", stored=DOCUMENT, prefix_caching=False)
    def test_h62_a_request_without_names_costs_itself_its_hits(self, scene: CacheHarness) -> None:
        """Beside a prompt that is stored run requests with token ids below 0 and above 2^32, and a salt that is no
        Unicode: no call raises, all end, and the healthy one is promised what it was promised without them."""
        wanted = seen(scene, DOCUMENT)
        healthy = scene.request("healthy", DOCUMENT, 6, held=True)
        with scene.judged("H62"):
            sick = [scene.request(f"sick-{bad}", [*DOCUMENT[:6], bad, *DOCUMENT[7:]], 6) for bad in (-1, 2**32)]
            sick.append(scene.request("sick-salt", DOCUMENT, 6, identity=RequestIdentity(salt="\ud800")))
            scene.step(2)
            found = scene.probe(healthy).num_tokens
            scene.let_go(healthy)
            scene.run(healthy, *sick)
        require(found == wanted, f"{found} tokens are promised beside the others; {wanted} are without them")

    # Saves

    @kept_in_every_mode("P8", "H26", "H29", faulty="ranks", prefix_caching=False)
    def test_p8_a_block_is_visible_only_when_all_ranks_reported_it(self, scene: CacheHarness) -> None:
        """One rank copies ten steps late; meanwhile the same prompt is requested in every step."""
        scene.conduct = lambda rank, job: JobBehavior(copy_after_steps=10 * (rank == scene.settings.ranks - 1))
        scene.request("first", DOCUMENT)
        for number in range(12):
            scene.step()
            scene.request(f"meanwhile-{number}", DOCUMENT)
        scene.settle()
        scene.conduct = None
        request, _ = promised(scene, "afterwards", DOCUMENT)
        scene.use(request)

    @kept_in_every_mode("H29", "P8", max_tokens_per_step=10)
    def test_h29_a_block_is_saved_when_all_its_tokens_are_computed(self, scene: CacheHarness) -> None:
        """A prompt is computed ten tokens at a time, and its outputs singly: only whole blocks are saved."""
        (request,) = scene.serve("chunked", DOCUMENT, outputs=9)
        scene.run(scene.request("again", [*DOCUMENT, *request.output_token_ids[:4], 1, 2, 3]))

    @kept_in_every_mode("H26", "H42", "P8", as_new="H26", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_h26_what_failed_to_be_saved_is_never_promised(self, scene: CacheHarness) -> None:
        """Saves fail whole, at the end and at the start, on one rank: only blocks that all ranks saved are promised."""
        seen(scene, DOCUMENT)
        for number, (start, count) in enumerate(((0, 8), (5, 3), (0, 2))):
            tokens = prompt(8, seed=10 + number)
            scene.conducts[0].append(failing(start, count))
            scene.serve("first", tokens)
            scene.serve("again", tokens)

    @kept_in_every_mode("H20", "H42", "P8", as_new="H20", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_h20_only_the_unbroken_prefix_of_what_was_saved_is_promised(self, scene: CacheHarness) -> None:
        """A block in the middle, or the first, is not saved on one rank: the blocks after it are not promised."""
        seen(scene, DOCUMENT)
        for number, hole in enumerate((3, 0)):
            tokens = prompt(8, seed=10 + number)
            scene.conducts[scene.settings.ranks - 1].append(failing(hole, 1))
            scene.serve(f"holed-{number}", tokens)
            request = scene.request(f"again-{number}", tokens, held=True)
            most = hole * scene.settings.block_size
            match = scene.probe(request)
            require(match.num_tokens <= most, f"{match.num_tokens} tokens are promised; block {hole} was never saved")
            scene.use(request)
            scene.settle()

    @kept_in_every_mode("H27", faulty="ranks", num_blocks=24, prefix_caching=False)
    def test_h27_blocks_are_held_while_they_are_copied_out(self, scene: CacheHarness) -> None:
        """A request ends before its blocks are copied, and others need blocks: the saved content is right."""
        scene.conduct = lambda rank, job: JobBehavior(copy_after_steps=0 if isinstance(job, LoadJob) else 5)
        scene.run(scene.request("short", DOCUMENT))
        scene.run(*others(scene, 4, outputs=3, identity=None))
        scene.settle()
        scene.conduct = None
        scene.run(scene.request("again", DOCUMENT))

    @kept_in_every_mode("H44", prefix_caching=False)
    def test_h44_what_a_request_saved_in_its_last_step_is_kept(self, scene: CacheHarness) -> None:
        """A request of one output ends in the step that computes it; its blocks are promised to the next request."""
        scene.serve("first", prompt(8, seed=1))
        scene.serve("longer", DOCUMENT, outputs=12)
        seen(scene, DOCUMENT)
        short = prompt(8, seed=2)
        scene.serve("short", short)
        kept = scene.promised_tokens("again", short)
        require(kept > 0, "of a request that ended in the step of its save nothing is promised")

    # Several ranks

    @kept_in_every_mode("P10", "H40", faulty="ranks", prefix_caching=False)
    def test_h40_a_silent_rank_agrees_to_nothing(self, scene: CacheHarness) -> None:
        """One rank reports nothing about a save for 30 steps, another nothing about a load for 20."""
        several_ranks(scene)
        scene.silence(scene.settings.ranks - 1, 30)
        scene.run(scene.request("first", DOCUMENT))
        for number in range(3):
            scene.request(f"meanwhile-{number}", DOCUMENT)
            scene.step(3)
        scene.settle()
        request, _ = promised(scene, "loaded", DOCUMENT)
        scene.silence(0, 20)
        scene.use(request)

    @kept_in_every_mode("P10", "H41", as_new="H41", faulty="ranks", prefix_caching=False)
    def test_h41_failures_of_several_ranks_are_all_counted(self, scene: CacheHarness) -> None:
        """One rank fails blocks 4 and 5, another 1 and 2: all four are failed, in either order of reports."""
        several_ranks(scene)
        for number, (first, second) in enumerate((((4, 2), (1, 2)), ((1, 2), (4, 2)), ((0, 8), (3, 1)))):
            tokens = prompt(8, seed=10 + number)
            scene.serve(f"first-{number}", tokens)
            scene.conducts[0].append(failing(*first))
            scene.conducts[1].append(failing(*second))
            require_right_outputs(scene, *scene.serve(f"again-{number}", tokens, outputs=4))
        seen_failing(scene)

    @kept_in_every_mode("H43", "P10", "H07", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_h43_ranks_may_disagree_and_be_of_different_speed(self, scene: CacheHarness) -> None:
        """One rank fails at once, another copies eight steps later: no load is settled while a rank may still write."""

        def conduct(rank: int, job: Job) -> JobBehavior:
            if not isinstance(job, LoadJob):
                return JobBehavior()
            return failing(0, 1 << 20) if rank == 0 else JobBehavior(copy_after_steps=8)

        scene.conduct = conduct
        victim = scene.request("victim", DOCUMENT, 4)
        scene.run(victim, *others(scene, 3, outputs=4))
        require_right_outputs(scene, victim)

    @kept_in_every_mode("H45", "H08", as_new="H45", faulty="ranks", prefix_caching=False)
    def test_h45_reports_may_be_late_repeated_in_pieces_and_out_of_order(self, scene: CacheHarness) -> None:
        """Every report comes twice, in pieces, last block first, from ranks of different speed: no block is lost, and
        no load is settled twice."""
        scene.conduct = lambda rank, job: JobBehavior(
            report_after_steps=(3 * rank + job.job_id) % 5, times_reported=2, block_by_block=True
        )
        scene.serve("first", DOCUMENT)
        request, match = promised(scene, "again", DOCUMENT)
        require(match.num_tokens == len(DOCUMENT) - 1, f"{match.num_tokens} tokens of {len(DOCUMENT) - 1} were saved")
        scene.use(request)
        require(scene.engine.counts.failed == 0, "a load counts as failed though every block was reported as done")

    @kept_in_every_mode("P11", "H10", "H31", as_new="P11", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_h10_a_lost_report_is_asked_for_again(self, scene: CacheHarness) -> None:
        """Reports of saves and loads are lost: requests end nevertheless, and no unreported block counts as loaded."""
        lost = JobBehavior(times_reported=0)
        scene.conduct = lambda rank, job: lost if rank == scene.settings.ranks - 1 else JobBehavior()
        scene.run(scene.request("loses-its-load", DOCUMENT, 3), steps=scene.max_steps)
        scene.run(scene.request("loses-its-save", prompt(8, seed=3)))
        scene.settle(scene.max_steps)

    @kept_in_every_mode("P11", "H10", "H07", as_new="P11 H10", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_h10_a_load_that_hangs_costs_its_request_a_deadline(self, scene: CacheHarness) -> None:
        """One rank's copy hangs: its request and others end with right outputs, although the copy finally writes its
        blocks. Then nothing stays held."""
        hangs = JobBehavior(copy_after_steps=NEVER, failed_blocks=RangeSet.of(BlockRange(0, 1 << 20)))
        last = scene.settings.ranks - 1
        scene.conduct = lambda rank, job: hangs if isinstance(job, LoadJob) and rank == last else JobBehavior()
        victim, match = promised(scene, "victim", DOCUMENT, outputs=6)
        observable_if(match.load_kv_async, "loads run within the step; the kit's ranks carry those out at once")
        scene.use(victim, scene.max_steps)
        scene.conduct = None
        beside = others(scene, 4, outputs=12)
        scene.step(3)
        scene.say("the copy that hung writes, and ends")
        for worker in scene.workers:
            worker.go_on()
        scene.run(*beside)
        require_right_outputs(scene, victim)

    @kept_in_every_mode("P11", "P10", as_new="P11", faulty="ranks", stored=DOCUMENT, prefix_caching=False)
    def test_p11_a_rank_that_forgets_its_jobs_holds_nobody_up(self, scene: CacheHarness) -> None:
        """A rank restarts during a load and a save: both end as failed, and nothing stays held."""
        scene.conduct = lambda rank, job: JobBehavior(copy_after_steps=6)
        again = scene.request("again", DOCUMENT, 3)
        other = scene.request("other", prompt(8, seed=3))
        scene.step(4)
        scene.forget_jobs(0)
        scene.conduct = None
        scene.run(again, other, steps=scene.max_steps)
        scene.settle(scene.max_steps)

    # All at once

    @protects("P1")
    def test_random_plays(self, lab: HarnessFactory) -> None:
        """Random calls of every kind: a broken property is named, and its play is shrunk to the calls that it needs."""
        try:
            from kvpact_testkit.cache.random_plays import random_play
        except ImportError:
            raise NotObservable("hypothesis is not installed; pip install 'kvpact[testkit]'") from None
        for mode in self.modes:
            broken = random_play(lab.suite.make_cache, 0, self.calls, plays=self.plays, mode=mode)
            if broken is not None:
                raise broken
