"""Copies prove themselves: a wrong one is found before it is reported, and then nothing is copied any more."""

from __future__ import annotations

import ctypes
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_beds import BLOCKS, HYBRIDS, LAYOUTS, SIZED, SLOTS, Bed, memory_of, segment_for
from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import Arena, Standing
from kvpact.metrics import UnmadeCheck
from kvpact.worker import round_trip
from kvpact.worker.copy.base import Job, group_classes
from kvpact.worker.device import proof as proof_module
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.device.proof import FIRST, ONE_IN, Proof, Verdict

torch = pytest.importorskip("torch")

FAULTS = ("one byte", "another block", "late", "another slot", "never")
KINDS = ("load", "save", "load of a step")


class Plain:
    """A device whose copies are done when their call returns, but those of a kind that `is_faulty(number)`."""

    name, pinned = "a plain device", True

    def __init__(self, kind: str, fault: str, is_faulty: Callable[[int], bool]) -> None:
        self.kind, self.fault, self.is_faulty = kind, fault, is_faulty
        self.late: list[tuple[int, int, int]] = []
        self.faults = 0
        self._streams = itertools.count()
        self._numbers: dict[int, Iterator[int]] = {}

    def create_stream(self) -> int:
        return next(self._streams)

    def load(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        self._numbers.setdefault(stream, itertools.count(1))
        wrong = ("", "load of a step", "load", "save", "load")[stream] == self.kind and self.is_faulty(
            next(self._numbers[stream])
        )
        entries = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        if wrong:
            self.faults += 1
            if self.fault == "another block":
                entries = [(one[0], other[1], one[2]) for one, other in zip(entries, entries[::-1], strict=True)]
            elif self.fault == "another slot":
                entries = [
                    (target, source + (4096 if source < sources.max() else -4096), size)
                    for target, source, size in entries
                ]
            elif self.fault in ("late", "never"):
                *entries, last = entries
                self.late += [last] if self.fault == "late" else []
        for target, source, size in entries:
            ctypes.memmove(target, source, size)
        if wrong and self.fault == "one byte":
            ctypes.memset(entries[-1][0] + 3, ctypes.string_at(entries[-1][0] + 3, 1)[0] ^ 1, 1)

    save = load

    def is_done(self, event: Any) -> bool:
        return True

    def run(self, stream: int, work: Callable[[], Any]) -> Any:
        return work()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1


class Engine:
    """Saves and loads of random blocks, and what of it was reported as done and was not right."""

    def __init__(self, device: Any, layout: str = "inside blocks", seed: int = 1, first: int = FIRST) -> None:
        self.device, self._random = device, random.Random(seed)
        self.tensors, self.paged = memory_of(layout)
        self.segment = segment_for(layout, self.paged)
        self.proof = Proof(self.paged, self.segment, device, stores=True, first=first, model="Llama-3-8B")
        self.engine = DeviceTransferEngine(self.paged, self.segment, device, 1 << 40)
        self.engine.proof = self.proof
        for layer in self.paged.layers:
            view = layer.view()
            view[:] = np.random.default_rng(seed).integers(0, 256, view.shape, np.uint8)
        self.jobs = self.wrong = 0
        """Reported as done, and not right though."""
        self.arena = Arena([self.segment])
        self.failed = 0
        """Reported as failed."""
        self.before_check: Callable[[int], object] = str
        """Called with each job's number when its copies are done, before it is asked whether it has ended."""

    def standing(self) -> Standing:
        return self.segment.standing

    def _slots(self, group_id: int) -> list[int]:
        return list(
            itertools.islice(group_classes(self.paged, self.segment.classes)[group_id].numbers(range(SLOTS)), 6)
        )

    def run(self, kind: str) -> None:
        """One job of this kind, to its end."""
        group_id = self._random.choice([one for one, group in enumerate(self.paged.cache_groups) if group])
        blocks, slots = (tuple(self._random.sample(some, 2)) for some in (range(BLOCKS), self._slots(group_id)))
        job: Job
        if kind == "save":
            job = SaveJob(self.jobs + 1, "r", 0, slots, blocks, group_id)
        else:
            for slot in slots:
                view = np.frombuffer(self.segment.slot_view(slot), np.uint8)
                view[:] = np.frombuffer(self._random.randbytes(len(view)), np.uint8)
            job = LoadJob(1, "r", 0, slots, blocks, kind != "load", group_id)
        (transfer,) = self.engine.save([job]) if isinstance(job, SaveJob) else self.engine.load([job])
        until = time.monotonic() + 10
        self.engine.submit_all()
        self.before_check(self.jobs + 1)
        while not transfer.ended:
            assert time.monotonic() < until
        self.jobs += 1
        self.failed += bool(transfer.failed)
        size = sum(self.paged.layouts[group_id].layer_page_bytes)
        held = [bytes(self.segment.slot_view(slot)[:size]) for slot in slots]
        right = [page.tobytes() for page in self._pages(group_id, blocks)] == held
        self.wrong += not right and not transfer.failed

    def _pages(self, group_id: int, blocks: Sequence[int]) -> Any:
        group = self.paged.cache_groups[group_id]
        pages = [
            one.view()[list(blocks)].reshape(len(blocks), -1) for one in self.paged.layers[group.start : group.stop]
        ]
        return np.concatenate(pages, axis=1)

    def close(self) -> None:
        assert self.engine.close(5)
        self.segment.close()


@pytest.mark.parametrize("layout", [*LAYOUTS, *HYBRIDS, *SIZED])
def test_64_loads_and_64_saves_prove_a_rank_and_a_return_of_its_memory_begins_anew(layout: str) -> None:
    one = Engine(Plain("", "", lambda number: False), layout)
    for number in range(FIRST):
        assert one.standing() is Standing.OPEN, number
        one.run("load")
        one.run("save")
    assert one.standing() is Standing.PROVEN
    one.engine.rebind(one.paged)
    assert one.standing() is Standing.OPEN
    assert (one.jobs, one.wrong) == (2 * FIRST, 0)
    one.close()


def test_a_rank_that_stores_nothing_is_proven_by_its_loads() -> None:
    one = Engine(Plain("", "", lambda number: False), first=2)
    one.engine.proof = Proof(one.paged, one.segment, one.device, stores=False, first=2)
    one.run("load")
    assert one.standing() is Standing.OPEN
    one.run("load")
    assert one.standing() is Standing.PROVEN
    one.close()


@pytest.mark.parametrize("at", [1, 60])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_copy_among_the_first_is_not_reported_as_done_and_ends_all(
    kind: str, fault: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    one = Engine(Plain(kind, fault, lambda number: number == at))
    for _ in range(at):
        assert one.standing() is not Standing.REFUTED
        one.run(kind)
    assert (one.device.faults, one.wrong, one.jobs) == (1, 0, at)
    assert one.standing() is Standing.REFUTED
    for later in KINDS:
        one.run(later)
    assert one.wrong == 0
    assert "a plain device" in str(one.engine.error)
    (said,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "stops loading and saving in this process" in said.getMessage()
    shape = f"a {kind} of 2 blocks of Llama-3-8B, KV cache group 0, 6 layers, 49152 bytes a block"
    assert shape in said.getMessage()
    assert "torch.uint8 [24, 8192], 1 runs of 8192 bytes a block, block stride 49152" in said.getMessage()
    one.engine.rebind(one.paged)
    assert one.standing() is Standing.REFUTED, "for good"
    one.close()


class OutOfMemory(RuntimeError):
    """What a device raises that has no room to read blocks back."""


def refusing(device: Any, calls: Sequence[int], call: str = "run") -> None:
    """Have the device raise in these of its next calls of this name, counted from 0."""
    numbers, real = itertools.count(), getattr(device, call)

    def refused(*arguments: Any) -> Any:
        if next(numbers) in calls:
            raise OutOfMemory("CUDA out of memory. Tried to allocate 4.00 MiB")
        return real(*arguments)

    setattr(device, call, refused)


@pytest.mark.parametrize(
    ("kind", "call", "number"),
    [*((kind, "run", 0) for kind in KINDS), ("load", "record", 2), ("save", "stream_wait", 1), ("save", "attach", 0)],
)
def test_h117_a_check_that_cannot_be_made_refutes_nothing_and_is_made_later(
    kind: str, call: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    one = Engine(Plain("", "", lambda number: False), first=3)
    refusing(one.device, [number], call)
    one.run(kind)
    assert (one.standing(), one.engine.error) == (Standing.OPEN, None)
    assert (one.failed, one.wrong) == (1, 0), "nothing that was not checked is used before the rank is proven"
    assert one.arena.unmade_checks == {UnmadeCheck.GIVEN_UP: 0, UnmadeCheck.FAILED: 1}
    (said,) = [record.getMessage() for record in caplog.records if record.name == proof_module.__name__]
    assert "CUDA out of memory" in said
    assert "until 3 of each kind are right, tiers get no blocks" in said
    for _ in range(3):
        one.run("load")
        one.run("save")
    assert (one.standing(), one.failed, one.wrong) == (Standing.PROVEN, 1, 0)
    one.close()


def test_h117_a_thread_that_cannot_be_started_refutes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Engine(Plain("", "", lambda number: False), first=2)
    with monkeypatch.context() as refused:
        refused.setattr(proof_module, "start_background", lambda *_: next(iter(())))
        one.run("load")
    assert (one.standing(), one.engine.error, one.failed) == (Standing.OPEN, None, 1)
    for _ in range(2):
        one.run("load")
        one.run("save")
    assert one.standing() is Standing.PROVEN
    one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_h117_of_a_proven_rank_a_copy_that_cannot_be_checked_is_used_and_the_next_one_is_checked(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_module, "ONE_IN", 1 << 40)
    one = Engine(Plain(kind, "one byte", lambda number: number == 6), first=2)
    for _ in range(2):
        for each in KINDS:
            one.run(each)
    one.proof.owe(LoadJob(1, "r", 0, (), (), kind != "load") if kind != "save" else SaveJob(1, "r", 0, (), ()))
    refusing(one.device, [0, 1])
    one.run(kind)
    one.run(kind)
    assert (one.standing(), one.failed) == (Standing.PROVEN, 0)
    assert one.arena.unmade_checks[UnmadeCheck.FAILED] == 2, "it stays owed until it is made"
    one.run(kind)
    one.run(kind)
    assert (one.standing(), one.wrong) == (Standing.PROVEN, 1), "the sixth is not among those that are checked"
    one.close()


def test_h116_a_save_that_was_given_up_is_not_judged_and_what_was_found_before_counts() -> None:
    """Its blocks have other content by the time of the check."""

    def give_up_and_write(number: int) -> None:
        one.arena.judge_from(number + 1)
        for layer in one.paged.layers:
            layer.view()[:] = 0

    one = Engine(Plain("save", "one byte", lambda number: number == 6), first=3)
    one.before_check = give_up_and_write
    for _ in range(2):
        one.run("save")
    assert (one.standing(), one.engine.error, one.failed) == (Standing.OPEN, None, 2)
    assert one.arena.unmade_checks == {UnmadeCheck.GIVEN_UP: 2, UnmadeCheck.FAILED: 0}
    one.before_check = str
    for _ in range(3):
        one.run("load")
        one.run("save")
    assert one.standing() is Standing.PROVEN
    monkey = one.proof.begin

    def begin_and_give_up(job: Job) -> Any:
        check = monkey(job)
        while check.verdict is None:
            time.sleep(0)
        give_up_and_write(job.job_id)
        return check

    one.proof.wants = lambda job: True  # type: ignore[method-assign]
    one.proof.begin = begin_and_give_up  # type: ignore[method-assign]
    one.run("save")
    assert one.standing() is Standing.REFUTED
    one.close()


@pytest.mark.parametrize("found", [False, True])
def test_h116_a_save_given_up_during_its_check_is_judged_by_what_was_read_before(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first block is read, then it is given up and its second one written."""
    monkeypatch.setattr(round_trip, "PIECE_BYTES", 1)
    one = Engine(Plain("save", "another block" if found else "", lambda number: True), first=3)
    reads = itertools.count()

    def run(stream: int, work: Callable[[], Any]) -> Any:
        if next(reads):
            one.arena.judge_from(one.jobs + 2)
            for layer in one.paged.layers:
                layer.view()[:] = 0
        return work()

    one.device.run = run
    one.run("save")
    assert one.standing() is (Standing.REFUTED if found else Standing.OPEN)
    assert one.arena.unmade_checks[UnmadeCheck.GIVEN_UP] == (not found)
    one.close()


@given(
    st.lists(st.sampled_from(["ends", "given up", "cannot be checked"]), min_size=1, max_size=120),
    st.integers(0, 1 << 30),
)
def test_h116_no_job_that_ends_by_itself_is_checked_later_than_without_resets(ends: list[str], seed: int) -> None:
    """Each one that would have been checked is, and for each check that was not made another job is."""

    def checked(ends: Sequence[str]) -> list[int]:
        random.seed(seed)
        proof = Proof(one.paged, one.segment, one.device, stores=True, first=3)
        made: list[int] = []
        owed = 0
        for number, end in enumerate(ends, 1):
            job = SaveJob(number, "r", 0, (), ())
            if not proof.wants(job):
                assert not owed, "the next one would have been checked instead"
                continue
            owed -= owed > 0
            check = proof_module.Check(job)
            check.end(
                Verdict.RIGHT if end == "ends" else Verdict.CANNOT_SAY,
                None if end != "cannot be checked" else OutOfMemory(),
            )
            proof.take(check)
            owed += end != "ends" and len(made) >= 3
            made += [number] if end == "ends" else []
        return made

    one = Engine(Plain("", "", lambda number: False))
    with pytest.MonkeyPatch.context() as few:
        few.setattr(proof_module, "ONE_IN", 10)
        by_themselves = {number for number, end in enumerate(ends, 1) if end == "ends"}
        assert by_themselves.intersection(checked(["ends"] * len(ends))) <= set(checked(ends))
    one.close()


def later_fault(kind: str, seed: int, begins: int) -> tuple[int, int]:
    """Jobs of which each is wrong from `begins` on, until it is found: how many, and how many were reported as done."""
    random.seed(seed)
    one = Engine(Plain(kind, FAULTS[seed % len(FAULTS)], lambda number: number >= begins), seed=seed)
    while one.standing() is not Standing.REFUTED:
        one.run(kind)
        assert one.jobs < 3 * begins, "found by then"
    found = one.jobs - begins, one.wrong
    one.close()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_begins_later_is_found_and_its_cost_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_module, "ONE_IN", 50)
    for seed in range(2):
        jobs, served = later_fault(kind, seed, 250)
        assert served <= jobs < 2 * 50


@pytest.mark.parametrize("seeds", [pytest.param(2, marks=pytest.mark.proof), pytest.param(20, marks=pytest.mark.soak)])
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_from_the_5000th_job_on_is_found_within_5000_more(kind: str, seeds: int) -> None:
    for seed in range(seeds):
        jobs, served = later_fault(kind, seed, 5000)
        print(f"{kind}, {FAULTS[seed % len(FAULTS)]}, seed {seed}: found after {jobs} jobs, {served} served before")
        assert jobs < 2 * ONE_IN


class Noting(Proof):
    """Notes the jobs that it has checked."""

    checked: set[int]

    def _compare(self, job: Job) -> None:
        super()._compare(job)
        self.checked.add(job.job_id)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("layout", [*LAYOUTS, *HYBRIDS, *SIZED])
def test_every_job_is_checked_whenever_it_arrives_and_right_copies_pass(layout: str, seed: int) -> None:
    """The checks read in the order of streams, on a thread of their own, and nothing is reported before."""
    bed = Bed(layout, seed)
    assert bed.device is not None
    proof = bed.engine.proof = Noting(bed.paged, bed.segment, bed.device, stores=True, first=1 << 30)
    proof.checked, ordered = set[int](), set[int]()

    def noted(order: Callable[[Sequence[Job]], Any]) -> Callable[[Sequence[Job]], Any]:
        def note(jobs: Sequence[Job]) -> Any:
            ordered.update(job.job_id for job in jobs)
            return order(jobs)

        return note

    bed.engine.load, bed.engine.save = noted(bed.engine.load), noted(bed.engine.save)
    assert bed.play(seed, steps=20) == []
    assert proof.checked == ordered
    assert bed.segment.standing is Standing.OPEN
    assert bed.engine.error is None
    bed.close()
