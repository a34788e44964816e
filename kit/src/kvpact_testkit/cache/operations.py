"""Plays: repeatable lists of calls that drive an engine and its cache through faults.

Owns the calls (arrivals, cancellations, faults of ranks and tiers, resets, restarts), and the verification after each
step. Any list of calls is legal: a call that finds nothing to act on does nothing.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvpact.identity.keys import RequestIdentity
from kvpact.ranges import BlockRange, RangeSet
from kvpact_testkit.cache.engine_harness import HarnessSettings, Others
from kvpact_testkit.cache.group_blocks import StoredBlock
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.cache.job_monitor import EverStored
from kvpact_testkit.cache.subjects import CacheFactory
from kvpact_testkit.engine import JobBehavior, Request, StepClock
from kvpact_testkit.engine.config import NO_EXTRAS
from kvpact_testkit.faults import Crash, Fault, Operation
from kvpact_testkit.results import Broken, NotObservable
from kvpact_testkit.trace import TRACE_LINES, Trace

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"identity": RequestIdentity(salt="tenant")},
    {"identity": RequestIdentity(adapter="weights-of-an-adapter")},
    {"identity": None},
    {"may_load": False},
    {"ready_in": 6},
    {"encoder_tokens": 5},
    {"encoder_ready_in": 6},
)
"""Kinds of requests; a number beyond these is a request without extras."""

PREFIXES = 3
"""Documents with which prompts begin."""

TIER_FAULTS = (Fault.ERROR, Fault.PARTIAL, Fault.DAMAGE)
TIER_OPERATIONS = (Operation.GET, Operation.PUT)
MAX_ALIVE = 12
"""Requests alive at once; while there are as many, no further one arrives."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a script: a method of `Operations` or its scene, and its arguments."""

    name: str
    arguments: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, name: str, **arguments: int) -> Call:
        """`Call.of("step", times=3)`."""
        return cls(name, tuple(arguments.items()))

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in self.arguments)})"


@dataclass(slots=True)
class Figures:
    """Figures of plays: engine steps, calls, and counts of events."""

    steps: int = 0
    calls: int = 0
    plays: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: Figures) -> None:
        """Add the figures of another play."""
        self.steps += other.steps
        self.calls += other.calls
        self.plays += other.plays
        self.counts.update(other.counts)


class BrokenPlay(Broken):
    """A broken play, and how to repeat it: `perform(factory, settings, calls)`."""

    def __init__(self, broken: Broken, settings: HarnessSettings, calls: Sequence[Call]) -> None:
        super().__init__(broken.explanation, broken.script, broken.protects)
        self.settings, self.calls = settings, tuple(calls)


class Operations:
    """One play. Every method is a call of a script; arguments are small numbers, taken modulo the valid range."""

    def __init__(self, factory: CacheFactory, settings: HarnessSettings, parent: Path | None = None) -> None:
        self.factory, self.settings = factory, settings
        self.figures = Figures(plays=1)
        self._folder = tempfile.TemporaryDirectory(prefix="kvpact-play-", dir=parent, ignore_cleanup_errors=True)
        self._stored: dict[StoredBlock, int] = {}
        self._ever_stored: EverStored = {}
        self._clock = StepClock()
        self._names = 0
        self._alive: list[Request] = []
        self._script = Trace(TRACE_LINES)
        self.scene = self._open()

    def _open(self) -> CacheHarness:
        """The engine and a new cache; of a cache that knows no groups, an engine with one of full attention."""
        try:
            return self._opened()
        except NotObservable:
            self.settings = replace(self.settings, groups=())
            return self._opened()

    def _opened(self) -> CacheHarness:
        return CacheHarness(
            self.factory,
            Path(self._folder.name),
            self.settings,
            self._script,
            others=Others(self._stored, self._ever_stored, clock=self._clock),
        )

    @contextmanager
    def _scripted(self) -> Iterator[None]:
        """Within, `Broken` is raised with the whole play's script."""
        try:
            yield
        except Broken as broken:
            names = broken.protects or ("P2",)  # the oracle found that a promise was not what was read
            raise Broken(broken.explanation, tuple(self._script), names) from broken

    def do(self, call: Call) -> None:
        """Carry out one call, of a method of this class or of the scene. Raises Broken, with the script so far."""
        self.figures.calls += 1
        with self._scripted():
            getattr(self if hasattr(self, call.name) else self.scene, call.name)(**dict(call.arguments))

    # Requests

    def _live(self) -> list[Request]:
        self._alive = [request for request in self._alive if not request.has_ended]
        return self._alive

    def arrive(
        self, prefix: int = 0, shared: int = 0, tail: int = 1, outputs: int = 1, kind: int = 0, priority: int = 0
    ) -> None:
        """Add a request: `shared` tokens of document `prefix`, then `tail` of its own; with drafts it gets longer
        answers."""
        if len(self._live()) >= MAX_ALIVE:
            return
        self._names += 1
        blocks = self.settings.num_blocks - 1 - self.scene.quirks.keeps_free_blocks
        room = self.scene.engine.config.tokens_in(blocks)
        shared = min(shared, room // 2)
        tail = 1 + tail % max(1, room // 4)
        outputs = 1 + outputs * (1 + 3 * self.settings.draft_tokens) % max(1, room // 4 - 1)
        document = 1000 * (prefix % PREFIXES)
        own = 10**6 + 1000 * self._names
        tokens = [*range(document, document + shared), *range(own, own + tail)]
        extras = KINDS[kind] if kind < len(KINDS) else {"identity": NO_EXTRAS}
        self._alive.append(self.scene.request(f"r{self._names}", tokens, outputs, priority=priority, **extras))
        self.figures.counts["requests"] += 1

    def cancel(self, which: int = 0) -> None:
        """Cancel one of the live requests, whatever its state."""
        if live := self._live():
            request = live[which % len(live)]
            self.figures.counts[f"cancelled while {request.status.value.replace('_', ' ')}"] += 1
            self.scene.cancel(request.request_id)

    def step(self, times: int = 1) -> None:
        """Step the engine, and verify all invariants after each step."""
        self.scene.say(f"{times} step{'s' if times > 1 else ''}")
        for _ in range(times):
            try:
                self.figures.steps += 1
                self.scene.step()
            except Crash:
                self.restart(crash=1)
                return

    # Trouble in the engine

    def squeeze(self, leave: int = 0) -> None:
        """Make free blocks scarce until `release`."""
        self.scene.release()
        self.scene.squeeze(leave)
        self.figures.counts["squeezes"] += 1

    def reset(self) -> None:
        """Reset the prefix caches."""
        self.figures.counts["resets"] += self.scene.reset()

    def reset_connector(self) -> None:
        """Reset the external cache while requests continue."""
        self.scene.reset_connector()
        self.figures.counts["resets while requests run on"] += 1

    def update_weights(self, to: int = 1, clear: int = 1) -> None:
        """Put other weights in place, perhaps earlier ones."""
        clear = clear or not self.scene.engine.config.keeps_everything  # else the oracle would need a value for each
        if self.scene.update_weights(to, clear_cache=bool(clear)):
            self.figures.counts["weight updates" if clear else "weight updates while requests run on"] += 1

    def weights_version(self) -> None:
        """Set the version word of the weights in place."""
        if self.scene.monitor.knows_words:
            believed = self.scene.weights_version(f"v{self.scene.engine.runner.weights}")
            self.figures.counts["words" if believed else "words refused"] += 1

    def wait(self, tenths: int = 1) -> None:
        """Let time pass without steps."""
        self.scene.pass_time(tenths / 10)

    # Trouble with ranks

    def misbehave(
        self,
        rank: int = 0,
        copy_after: int = 0,
        report_after: int = 0,
        reports: int = 1,
        pieces: int = 0,
        fail_at: int = 0,
        fail_count: int = 0,
        load: int = 0,
    ) -> None:
        """How a rank treats its next job, or load: late, lost (0 reports), repeated, in pieces; which blocks fail."""
        rank %= self.settings.ranks
        failed = RangeSet.of(BlockRange(fail_at, fail_count))
        conduct = JobBehavior(copy_after, report_after, failed, reports, bool(pieces))
        what, conducts = ("load", self.scene.load_conducts) if load else ("job", self.scene.conducts)
        self.scene.say(f"rank {rank} and its next {what}: {described(conduct) or 'nothing is wrong'}")
        conducts[rank].append(conduct)
        for name, happens in (
            ("late copies", copy_after),
            ("late reports", report_after),
            ("lost reports", reports == 0),
            ("repeated reports", reports > 1),
            ("reports in pieces", pieces),
            ("failing jobs", fail_count),
        ):
            self.figures.counts[name] += bool(happens)

    def silence(self, rank: int = 0, steps: int = 1) -> None:
        """A rank reports nothing for `steps` steps; its reports come afterwards."""
        if self.scene.workers:
            self.scene.silence(rank % self.settings.ranks, steps)
            self.figures.counts["silent ranks"] += 1

    def rank_restarts(self, rank: int = 0) -> None:
        """A rank loses its jobs and its unsent reports."""
        if self.scene.workers:
            self.scene.forget_jobs(rank % self.settings.ranks)
            self.figures.counts["rank failures"] += 1

    # Trouble with tiers

    def stall(self, steps: int = 1) -> None:
        """Stall the tiers for `steps` steps."""
        self.scene.stall_tiers(steps)
        self.figures.counts["stalled tiers"] += len(self.scene.place.queues)

    def tier_fault(self, operation: int = 0, fault: int = 0) -> None:
        """Make the tiers' next operation of a kind fail."""
        if self.scene.place.queues:
            what, how = TIER_OPERATIONS[operation % len(TIER_OPERATIONS)], TIER_FAULTS[fault % len(TIER_FAULTS)]
            self.scene.say(f"the tier's next {what} meets: {how}")
            self.scene.place.faults.arm(what, how)
            self.figures.counts["tier faults"] += 1

    def tier_crash(self, after: int = 0) -> None:
        """The process dies in a write of the tiers, after `after` of them have succeeded."""
        if self.scene.place.queues:
            self.scene.say(f"the process is to die in the tier's write after {after} more")
            self.scene.place.faults.arm(Operation.PUT, Fault.CRASH, after=after)

    def damage(self, at: int = 0) -> None:
        """Flip a byte in each of the tiers' files, at `at` thousandths of the file."""
        for path in sorted(Path(self._folder.name).rglob("*")):
            if path.is_file() and path.stat().st_size:
                with path.open("r+b") as file:
                    file.seek(path.stat().st_size * (at % 1000) // 1000)
                    byte = file.read(1)
                    file.seek(-1, 1)
                    file.write(bytes([byte[0] ^ 0x20]))
                self.scene.say(f"a byte of {path.name} is flipped at {at % 1000} thousandths")
                self.figures.counts["flipped bytes"] += 1

    def restart(self, crash: int = 0) -> None:
        """End the engine's process, with or without a shutdown, and start another one over its files and stores."""
        self.scene.say("the process dies and starts again" if crash else "the engine is shut down and starts again")
        self._count()
        self.scene.place.faults.revive()
        if crash:
            for queue in self.scene.place.queues:
                queue.drop()
            self.scene.close()
            self._stored = self._ever_stored[""]
        else:
            self.scene.release()
            stalled = any(queue.stalled_steps for queue in self.scene.place.queues)
            self.scene.shut_down()
            # A tier that hangs to the end never deletes what was dropped: the result is as after a crash. So it is
            # after a reset, which deletes nothing: a restarted engine has the weights and the epoch of its files.
            as_after_a_crash = stalled or self.scene.monitor.resets > 0
            self._stored = self._ever_stored[""] if as_after_a_crash else self.scene.monitor.stored
        self.figures.counts["crashes" if crash else "shutdowns"] += 1
        self.scene.say("it is back")
        self._alive = []
        self.scene = self._open()

    # The end

    def finish(self) -> None:
        """Run all requests to their end. Raises Broken unless then nothing is held, and the cache has all its room."""
        steps = self.scene.engine.counts.steps
        with self._scripted():
            self.scene.as_good_as_new()
        self.figures.steps += self.scene.engine.counts.steps - steps

    def _count(self) -> None:
        counts, engine = self.figures.counts, self.scene.engine.counts
        counts["finished"] += engine.finished
        counts["preemptions"] += engine.preemptions
        counts["drafts"] += engine.drafted
        counts["drafts accepted"] += engine.accepted
        counts["states offered"] += engine.offered_states
        counts["states offered inside accepted drafts"] += engine.states_in_drafts
        counts["loads"] += engine.commits
        counts["loads that failed"] += engine.failed_loads
        counts["tokens promised"] += engine.promised
        counts["tokens loaded"] += engine.loaded
        counts["tokens used"] += engine.external_hits
        counts["promises not used"] += engine.declined.total()
        counts["promises behind 'ask again later'"] += engine.pending_probes

    def close(self) -> None:
        """Release everything, whatever happened."""
        self._count()
        self.scene.close()
        self._folder.cleanup()


def described(conduct: JobBehavior) -> str:
    """How a rank treats a job, for the script; "" if faithfully."""
    ways = {
        f"fails blocks {sorted(conduct.failed_blocks.blocks())}": conduct.failed_blocks.ranges,
        f"copies {conduct.copy_after_steps} steps late": conduct.copy_after_steps,
        "never reports": conduct.times_reported == 0,
        f"reports {conduct.report_after_steps} steps late": conduct.report_after_steps and conduct.times_reported,
        "reports twice": conduct.times_reported > 1,
        "reports block by block": conduct.block_by_block,
    }
    return ", ".join(way for way, is_taken in ways.items() if is_taken)


def perform(
    factory: CacheFactory,
    settings: HarnessSettings,
    calls: Iterable[Call],
    parent: Path | None = None,
    figures: Figures | None = None,
) -> Broken | None:
    """Play `calls` to the end; returns what was broken, or None. Adds to `figures`."""
    play = Operations(factory, settings, parent)
    try:
        for call in calls:
            play.do(call)
        play.finish()
    except Broken as broken:
        return broken
    finally:
        play.close()
        if figures is not None:
            figures.add(play.figures)
    return None
