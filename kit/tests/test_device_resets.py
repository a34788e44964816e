"""Resets under load, forced and refused, on a simulated device whose copies are checked: no right copy is refuted."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.cache.jobs import LoadState, SaveState, TransferJobs
from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import Standing
from kvpact.worker.copy.base import Job
from kvpact.worker.device.proof import Check, Proof, Verdict, WrongCopy
from kvpact_testkit.device.played import EachJob, PlayedDevice
from kvpact_testkit.vllm.driver import VllmDriver
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, prompt
from rank_devices import Devices

FIRST = 4
"""Right copies of each kind that prove a rank in these runs, instead of 64."""

ACTIONS = 80
SCHEDULER = "kvpact.vllm.scheduler.pact_scheduler"
CONFIG = {"memory": "16MiB", "model_id": "testkit"}


@dataclass
class Found:
    """What became of a run's jobs, by their ids."""

    by_themselves: dict[type[Job], set[int]] = field(default_factory=lambda: {LoadJob: set(), SaveJob: set()})
    """Ended as a whole, on all ranks, and were not given up."""
    given_up: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)
    """Whose check found a difference."""
    unjudged: set[int] = field(default_factory=set)
    """Whose check could not say, on a rank at least: given up, or over blocks that the engine computed anew."""
    planted: set[int] = field(default_factory=set)
    """The job of which one byte is copied wrong, and those over the same slot that may be copied before it."""
    spoilt: bool = False
    """Whether that has happened."""
    resets: list[bool] = field(default_factory=list)
    """Whether each reset was done, or refused."""

    def ended(self, task: LoadState | SaveState) -> None:
        """The cache takes in that a job has ended on all ranks."""
        for part in task.parts:
            outcome = part.tally.saved() if isinstance(task, SaveState) else part.tally.loaded()
            if isinstance(task, SaveState) and not task.trusted:
                self.given_up.add(part.job.job_id)
            elif not outcome.failed.ranges:
                self.by_themselves[type(part.job)].add(part.job.job_id)

    def taken(self, check: Check) -> None:
        """A rank takes in what a check has found."""
        if isinstance(check.error, WrongCopy):
            self.wrong.add(check.job.job_id)
        elif check.verdict is Verdict.CANNOT_SAY:
            self.unjudged.add(check.job.job_id)


class Planting(PlayedDevice):
    """A device that copies one byte of one job wrong: of the `nth` of a kind that its rank is ordered."""

    kind, nth, proof = "save", 0, EachJob
    found = Found()

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._numbers = {"load": 0, "save": 0}
        self._slot = range(0)
        """Addresses of the job's first slot, until a byte of it is copied wrong."""
        self._number = 0
        self._loads: list[tuple[int, tuple[int, ...]]] = []

    def open(self, config: Any, paged: Any, segment: Any, rank: int) -> Any:
        """See `DeviceOpener`."""
        engine = super().open(config, paged, segment, rank)

        def ordered(kind: str, order: Callable[[Sequence[Job]], Any], jobs: Sequence[Job]) -> Any:
            for job in jobs:
                self._numbers[kind] += 1
                if (kind, self._numbers[kind]) == (self.kind, self.nth):
                    view = segment.slot_view(job.slots[0])
                    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
                    self._slot, self._number = range(start, start + len(view)), job.slots[0]
                    self.found.planted.update(number for number, slots in self._loads if self._number in slots)
                if kind == self.kind and self._slot and self._number in job.slots:
                    self.found.planted.add(job.job_id)
                if kind == self.kind == "load":  # several may read a slot, in any order
                    self._loads.append((job.job_id, job.slots))
            return order(jobs)

        if rank == 0:
            for kind in ("load", "save"):
                setattr(engine, kind, partial(ordered, kind, getattr(engine, kind)))
        return engine

    def _spoil(self, host: Any, targets: Any, sizes: Any, stream: int) -> None:
        for address, target, size in zip(host.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            if address < self._slot.stop and self._slot.start < address + size:
                self.driver.launch(partial(flip, target + max(0, self._slot.start - address)), stream)
                self._slot, self.found.spoilt = range(0), True

    def load(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        """See `Device`."""
        super().load(targets, sources, sizes, stream)
        if self.kind == "load":
            self._spoil(sources, targets, sizes, stream)

    def save(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        """See `Device`."""
        super().save(targets, sources, sizes, stream)
        if self.kind == "save":
            self._spoil(targets, targets, sizes, stream)


def flip(address: int) -> None:
    """Change one bit of the byte that lies there."""
    ctypes.memset(address, ctypes.string_at(address, 1)[0] ^ 1, 1)


@contextmanager
def noting(found: Found) -> Iterator[None]:
    """Within, note what becomes of all jobs."""
    with pytest.MonkeyPatch.context() as changed:
        end, take = TransferJobs.end, Proof.take

        def noted_end(jobs: TransferJobs, task: LoadState | SaveState) -> None:
            found.ended(task)
            end(jobs, task)

        def noted_take(proof: Proof, check: Check) -> Any:
            found.taken(check)
            return take(proof, check)

        changed.setattr(TransferJobs, "end", noted_end)
        changed.setattr(Proof, "take", noted_take)
        yield


def act(engine: VllmEngine, dice: random.Random, found: Found) -> None:
    """Do one action: a request, a reset that is done, one that vLLM refuses, or a step."""
    choice = dice.random()
    if choice < 0.3:
        tokens = prompt(dice.randrange(1, 3), dice.randrange(2, 8), tail=0) + prompt(dice.randrange(99), 0)
        engine.add(f"r{len(engine.requests)}", tokens, max_tokens=dice.randrange(1, 12))
    elif choice < 0.4:
        if dice.random() < 0.7:  # while saves are under way
            engine.add(f"r{len(engine.requests)}", prompt(dice.randrange(9), dice.randrange(2, 8)), max_tokens=9)
            engine.step(dice.randrange(1, 4))
        found.resets.append(engine.reset(running=True, connector=dice.random() < 0.05))
    elif choice < 0.44:
        found.resets.append(engine.reset(running=False, connector=dice.random() < 0.2))
    else:
        engine.step(dice.randrange(1, 4))


def play(seed: int, kind: type[PlayedDevice] = PlayedDevice) -> tuple[Found, set[Standing]]:
    """One run with resets, and what is known of each rank's copies at its end."""
    dice, found = random.Random(seed), Found()
    ranks, overlap, waits = dice.choice((1, 2)), dice.random() < 0.5, dice.random() < 0.5
    if kind is Planting:
        overlap = False  # the step after a wrong load reads its blocks, too, and counts for nothing
    with pytest.MonkeyPatch.context() as changed, noting(found):
        changed.setattr(Planting, "found", found)
        devices = Devices(changed, seed, kind, FIRST)

        standings: set[Standing] = set()

        def situation(harness: Harness) -> None:
            settings: dict[str, Any] = {"num_blocks": 22, "chunk": 5 * BLOCK, "max_num_seqs": 4}
            with harness.engine(ranks=ranks, overlap=overlap, device=devices.of_rank, **settings) as engine:
                for _ in range(ACTIONS):
                    act(engine, dice, found)
                harness.finish(engine)
                harness.rest(engine)
                standings.update(segment.standing for segment in devices.segments)

        config = {**CONFIG, "sync_load_budget": 0} if waits else CONFIG
        harness = Harness(VllmDriver("kvpact.vllm:PactConnector", config, scheduler=SCHEDULER).subject)
        harness.judge(situation)
        assert harness.violations == [], f"seed {seed}"
        assert devices.violations == [], f"seed {seed}"
    return found, standings


PLAYS = [20, pytest.param(1000, marks=pytest.mark.soak)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("plays", PLAYS)
def test_h116_resets_under_load_refute_no_right_copy_and_prove_the_engine_all_the_same(plays: int) -> None:
    proven = done = refused = given_up = 0
    for seed in range(plays):
        found, standings = play(seed)
        assert Standing.REFUTED not in standings, f"seed {seed}"
        if all(len(jobs) >= FIRST for jobs in found.by_themselves.values()):
            proven += 1
            assert standings == {Standing.PROVEN}, f"seed {seed}"
        done, refused = done + found.resets.count(True), refused + found.resets.count(False)
        given_up += len(found.given_up)
    print(f"{plays} runs: {done} resets done, {refused} refused, {given_up} saves given up, {proven} proven")
    assert proven > plays / 4
    assert given_up > plays
    assert min(done, refused) > plays


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.soak)])
def test_h116_each_wrong_copy_of_a_job_that_is_not_given_up_is_found_by_its_own_check(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught = runs = 0
    while caught < count:
        monkeypatch.setattr(Planting, "kind", ("save", "load")[runs % 2])
        monkeypatch.setattr(Planting, "nth", 1 + runs // 2 % 10)
        found, standings = play(10_000 + runs, Planting)
        runs += 1
        if found.wrong:
            caught += 1
            assert len(found.wrong) == 1, f"run {runs}"
            assert found.wrong <= found.planted, f"run {runs}"
            assert Standing.REFUTED in standings, f"run {runs}"
        else:
            without_verdict = found.given_up | found.unjudged
            assert not found.spoilt or found.planted & without_verdict, f"run {runs}: {found.planted} was believed"
    print(f"{caught} wrong copies found in {runs} runs, none by a later check than its own")
