"""One sick tier costs its own hits: it takes neither the arena's slots nor a request's time, and forgets in the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dictionary_tier import DictionaryTier
from kvpact.contract import WorkerReport
from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.metrics import series
from kvpact.tiers import deletions
from kvpact.tiers.base import BlockBuffer, Progress, TierCapacity, TierCounts, TierHealth
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.deletions import REPEAT_SECONDS
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.shared.store import RecordBuffer, StoreError
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from scenes import BLOCK_SIZE, NAMESPACE, PAGE, Scene, SceneRequest, failed, open_disk, tokens

SLOTS = 32
BLOCKS = 4
"""Of each prompt here."""
PATIENCE = 20.0


def request(name: str, seed: int) -> SceneRequest:
    return SceneRequest(name, tokens(BLOCKS * BLOCK_SIZE + 1, seed))


class Gate:
    """Calls wait here while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.shut, self.open = self._open.clear, self._open.set

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, once the gate is open."""

        def slow(*arguments: Any) -> Any:
            assert self._open.wait(PATIENCE)
            return call(*arguments)

        return slow


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Stands before every read of a slab's payloads, like a file system whose server is gone."""
    gate = Gate()
    monkeypatch.setattr(Slab, "read_payloads", gate.before(Slab.read_payloads))
    yield gate
    gate.open()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The same for writes."""
    gate = Gate()
    monkeypatch.setattr(Slab, "write_payloads", gate.before(Slab.write_payloads))
    yield gate
    gate.open()


def healthy_store(*requests: SceneRequest) -> SharedTier:
    """A shared tier in which another engine has stored these."""
    records = DictionaryStore()
    other = Scene(tiers=[SharedTier(records, NAMESPACE, PAGE)])
    for each in requests:
        other.run_cold(each)
        other.settle_tiers()
    other.close()
    return SharedTier(DictionaryStore(records.records), NAMESPACE, PAGE)


def steps_told_to_wait(scene: Scene, asked: SceneRequest) -> int:
    """Steps of 20 ms, by the engine's clock and by ours, until the request has its answer."""
    waited = 0
    while scene.cache.prepare_external_match(asked, 0) is None:
        scene.cache.end_step()
        scene.now += 0.02
        time.sleep(0.02)
        waited += 1
    scene.cache.request_finished(asked.request_id)
    return waited


def hang_in_reads(scene: Scene, reads: Gate, prompts: int) -> list[int]:
    """Prompts that only the disk holds are asked for one after another while its reads hang: steps each waited."""
    for seed in range(prompts):
        scene.run_cold(request(f"stored-{seed}", seed))
        scene.settle_tiers()
    scene.forget_memory()
    reads.shut()
    return [steps_told_to_wait(scene, request(f"asked-{seed}", seed)) for seed in range(prompts)]


def test_h61_a_disk_that_hangs_is_left_alone_and_leaves_the_arena_to_others(tmp_path: Path, reads: Gate) -> None:
    elsewhere = request("elsewhere", 100)
    scene = Scene(
        SLOTS,
        tiers=[open_disk(tmp_path), healthy_store(elsewhere)],
        prepare_deadline="100ms",
        recompute_if_faster=False,
    )
    waited = hang_in_reads(scene, reads, prompts=10)
    assert sum(steps >= 5 for steps in waited) <= 3, f"so many wait their whole deadline of 5 steps: {waited}"
    assert scene.room() >= SLOTS // 2
    shot = scene.cache.observe()
    assert shot[series("tier_up", "disk")] == 0
    assert shot[series("tier_up", "dictionary")] == 1
    assert scene.prepare(elsewhere).num_tokens == BLOCKS * BLOCK_SIZE, "the healthy tier keeps its hits"
    scene.run_cold(request("mine", 200))
    assert scene.prepare(request("again", 200)).num_tokens == BLOCKS * BLOCK_SIZE, "so does the arena"
    reads.open()
    scene.settle_tiers()
    scene.now += 10.0
    scene.forget_memory()
    assert scene.prepare(request("back", 9)).num_tokens == BLOCKS * BLOCK_SIZE
    assert scene.cache.observe()[series("tier_up", "disk")] == 1


def test_h61_a_disk_that_hangs_costs_hooks_no_time(tmp_path: Path, reads: Gate) -> None:
    scene = Scene(SLOTS, tiers=[open_disk(tmp_path)], prepare_deadline="50ms", recompute_if_faster=False)
    hang_in_reads(scene, reads, prompts=4)
    slept, began = 0, time.thread_time()
    for number in range(200):
        before = voluntary_switches()
        scene.cache.prepare_external_match(request("mine", 3), 0)
        scene.cache.end_step()
        slept += voluntary_switches() > before
        scene.now += 0.001 * (number % 2)
    assert (time.thread_time() - began) / 200 < 1e-3, "CPU time of a step's hooks"
    assert slept < 100, f"in {slept} of 200 steps the scheduler's thread was put to sleep"
    reads.open()
    scene.settle_tiers()


def voluntary_switches() -> int:
    status = Path("/proc/thread-self/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_h61_a_disk_whose_writes_hang_keeps_half_of_the_arena_at_most(tmp_path: Path, writes: Gate) -> None:
    scene = Scene(SLOTS, tiers=[open_disk(tmp_path)], prepare_deadline="50ms")
    writes.shut()
    for seed in range(SLOTS // BLOCKS):
        scene.run_cold(request(f"saved-{seed}", seed))
    time.sleep(0.1)
    for _ in range(3):
        scene.cache.end_step()
    assert scene.room() >= SLOTS // 2
    for seed in range(100, 108):
        scene.run_cold(request(f"saved-{seed}", seed))
        assert scene.prepare(request(f"again-{seed}", seed)).num_tokens == BLOCKS * BLOCK_SIZE
        scene.cache.request_finished(f"again-{seed}")
    assert scene.cache.observe()[series("dropped_writes", "disk")] > 0
    writes.open()
    scene.settle_tiers()
    scene.run_cold(request("afterwards", 300))
    scene.settle_tiers()
    scene.forget_memory()
    assert scene.prepare(request("from disk", 300)).num_tokens == BLOCKS * BLOCK_SIZE


class NamedTier(DictionaryTier):
    """A plug-in for one engine alone that raises what no tier may in the methods in `sick`, and can hang in `get`."""

    def __init__(self) -> None:
        super().__init__(NAMESPACE, PAGE, 64)
        self.sick: set[str] = set()
        self.calls: list[str] = []
        self.gate = Gate()

    def _meet(self, call: str) -> None:
        self.calls.append(call)
        if call in self.sick:
            raise ZeroDivisionError(f"{call} of somebody else's tier")

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        self._meet("lookup")
        return super().lookup(keys)

    def get(
        self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer], on_progress: Progress | None = None
    ) -> list[bool]:
        self.gate.before(self._meet)("get")
        return super().get(keys, buffers, on_progress)

    def delete(self, keys: Iterable[BlockKey]) -> int:
        self._meet("delete")
        return super().delete(keys)

    def clear(self) -> None:
        self._meet("clear")
        super().clear()

    def capacity(self) -> TierCapacity:
        self._meet("capacity")
        return super().capacity()

    def counts(self) -> TierCounts:
        self._meet("counts")
        return super().counts()

    def health(self) -> TierHealth:
        self._meet("health")
        return super().health()

    def close(self) -> None:
        self._meet("close")
        super().close()


def fail_a_load(scene: Scene, seed: int, name: str) -> None:
    """A worker cannot load the second block of a prompt: it, and what is behind it, is to go everywhere."""
    asked = request(name, seed)
    match = scene.prepare(asked)
    scene.cache.commit_external_match(asked, match, match.num_tokens, scene.allocate(asked))
    (job,) = scene.cache.end_step().loads
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, 1)}}))
    scene.cache.request_finished(name)


def until(scene: Scene, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        scene.cache.end_step()
        time.sleep(0.002)


def promised(scene: Scene, seed: int) -> int:
    """Blocks of a prompt that can be had, by nobody's doing but the tiers'."""
    scene.forget_memory()
    asked = request("promised", seed)
    blocks = scene.prepare(asked).num_tokens // BLOCK_SIZE
    scene.cache.request_finished("promised")
    return blocks


def test_h66_a_deletion_at_which_a_tier_raises_is_repeated_and_never_a_success() -> None:
    tier = NamedTier()
    scene = Scene(tiers=[tier], recompute_if_faster=False)
    for seed in (1, 2):
        scene.run_cold(request(f"stored-{seed}", seed))
    scene.settle_tiers()
    tier.sick.add("delete")
    fail_a_load(scene, 1, "failing")
    until(scene, lambda: "delete" in tier.calls and not scene.queues[0].under_way)
    assert promised(scene, 1) == 1, "what it was to forget, and has not, is not read from it"
    assert promised(scene, 2) == BLOCKS, "what it was not to forget is"
    tier.sick.clear()
    scene.now += REPEAT_SECONDS
    until(scene, lambda: tier.calls.count("delete") == 2 and not scene.queues[0].under_way)
    assert len(tier.records) == BLOCKS + 1, "it was asked again"
    scene.run_cold(request("stored again", 1))
    scene.settle_tiers()
    assert promised(scene, 1) == BLOCKS, "the tier is not off for ever"


def test_h66_what_a_tier_raises_on_the_schedulers_thread_costs_its_own_hits() -> None:
    tier, elsewhere = NamedTier(), request("elsewhere", 100)
    scene = Scene(tiers=[tier, healthy_store(elsewhere)], recompute_if_faster=False)
    scene.run_cold(request("stored", 1))
    scene.settle_tiers()
    tier.sick.update({"lookup", "capacity", "counts", "health", "close"})
    assert promised(scene, 1) == BLOCKS, "the other tier was written to as well"
    assert promised(scene, 100) == BLOCKS
    for _ in range(4):
        assert promised(scene, 2) == 0
    shot = scene.cache.observe()
    assert shot[series("tier_failures", "dictionary")] >= 3
    asked = tier.calls.count("lookup")
    assert promised(scene, 3) == 0
    assert tier.calls.count("lookup") == asked, "after some failures in a row it is left alone"


def a_client(tier: NamedTier | SharedTier, **settings: Any) -> TierClient:
    executor = TierExecutor(tier, 2, 1 << 30)
    return TierClient(executor, LentSlots(SLOTS), timeout=1.0, clock=time.monotonic, **settings)


def drained(one: TierClient) -> None:
    deadline = time.monotonic() + PATIENCE
    while one.executor.under_way:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    for _ in one.poll():
        pass


@pytest.mark.parametrize("shared", [False, True])
def test_h66_deletions_that_are_refused_for_long_are_bounded_and_lose_nothing(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many to remember: an exclusive tier is emptied, and used again; a shared one is left alone."""
    monkeypatch.setattr(deletions, "MIN_DELETED_KEYS", 100)
    tier = NamedTier()
    tier.exclusive = not shared
    tier.sick.update({"delete", "clear"})
    one = a_client(tier)
    for number in range(101):
        one.delete([number.to_bytes(32, "big")])
        drained(one)
    now = time.monotonic()
    assert not one.health.may_read
    assert not one.health.may_write
    assert len(one.deletions) <= 100
    tier.sick.clear()
    one.check(now + 2 * REPEAT_SECONDS)
    drained(one)
    assert (tier.calls.count("clear"), one.health.may_read) == ((0, False) if shared else (2, True))
    one.close(1.0)


def test_h36_a_block_that_is_to_be_dropped_twice_is_forgotten_once_it_is_dropped() -> None:
    tier = NamedTier()
    tier.sick.add("delete")
    one = a_client(tier)
    for _ in range(2):
        one.delete([bytes(32)])
        drained(one)
        one.deletions.check()
    tier.sick.clear()
    one.check(time.monotonic() + 2 * REPEAT_SECONDS)
    drained(one)
    one.deletions.check()
    assert len(one.deletions) == 0
    one.close(1.0)


def test_h66_a_tier_of_which_count_is_lost_twice_is_used_again_once_it_is_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deletions, "MIN_DELETED_KEYS", 100)
    one = a_client(NamedTier())
    for first in (0, 101):
        one.delete([number.to_bytes(32, "big") for number in range(first, first + 101)])
        one.deletions.check()
    may_write = one.health.may_write
    assert not may_write
    drained(one)
    one.deletions.check()
    assert one.health.may_write
    one.close(1.0)


class RefusingStore(DictionaryStore):
    """A store that can refuse to remove anything."""

    refuses = False

    def remove(self, names: Sequence[str]) -> int:
        if self.refuses:
            raise StoreError("the store is read-only")
        return super().remove(names)


def test_h36_a_deletion_that_a_store_refuses_is_repeated_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    store = RefusingStore()
    scene = Scene(tiers=[SharedTier(store, NAMESPACE, PAGE)], recompute_if_faster=False)
    scene.run_cold(request("stored", 1))
    scene.settle_tiers()
    records = len(store.records)
    store.refuses = True
    fail_a_load(scene, 1, "failing")
    until(scene, lambda: not scene.queues[0].under_way)
    assert len(store.records) == records
    for _ in range(3):
        assert promised(scene, 1) == 1, "a refusal is no success, also not the second one"
        scene.now += REPEAT_SECONDS
        until(scene, lambda: not scene.queues[0].under_way)
    store.refuses = False
    scene.now += REPEAT_SECONDS
    until(scene, lambda: len(store.records) < records)
    scene.run_cold(request("stored again", 1))
    scene.settle_tiers()
    assert promised(scene, 1) == BLOCKS
    store.refuses = True
    fail_a_load(scene, 1, "failing again")
    scene.close()
    assert f"{BLOCKS - 1} blocks are still in the dictionary tier that it should drop" in caplog.text


def test_h36_what_a_disk_could_not_forget_is_not_back_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk(tmp_path)
    scene = Scene(tiers=[tier])
    scene.run_cold(request("stored", 1))
    scene.settle_tiers()
    with monkeypatch.context() as broken:
        broken.setattr(Slab, "clear_headers", refuse)
        fail_a_load(scene, 1, "failing")
        until(scene, lambda: not scene.queues[0].under_way)
        with pytest.raises(TierError, match="cannot clear 3 headers"):
            tier.delete([])
    scene.now += REPEAT_SECONDS
    scene.cache.end_step()
    until(scene, lambda: not scene.queues[0].under_way)
    scene.close()
    again = open_disk(tmp_path)
    assert again.capacity().blocks == 1
    again.close()


def refuse(*arguments: object) -> None:
    raise OSError(30, "Read-only file system")


def test_h61_however_many_tiers_hang_some_slots_are_left() -> None:
    lent = LentSlots(SLOTS)
    tiers = [NamedTier() for _ in range(4)]
    clients = [TierClient(TierExecutor(tier, 1, 1 << 30), lent, timeout=1.0, clock=float) for tier in tiers]
    taken = []
    for tier, one in zip(tiers, clients, strict=True):
        tier.gate.shut()
        buffers = [[memoryview(bytearray(PAGE))] for _ in range(one.room)]
        assert one.submit_get("read", [bytes([number]) * 32 for number in range(len(buffers))], buffers)
        taken.append(len(buffers))
        assert one.room == 0
    assert taken == [16, 8, 4, 2]
    for tier in tiers:
        tier.gate.open()


class SilentStore(DictionaryStore):
    """A store that says what it has, and never delivers it."""

    def __init__(self, other: DictionaryStore) -> None:
        super().__init__(other.records)
        self.gate = Gate()

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        found: list[bool] = self.gate.before(super().read)(names, buffers)
        return found


def test_h61_a_store_that_answers_and_never_delivers_is_left_alone_too() -> None:
    prompts = [request(f"elsewhere-{seed}", seed) for seed in range(10)]
    healthy = healthy_store(*prompts).store
    assert isinstance(healthy, DictionaryStore)
    store = SilentStore(healthy)
    scene = Scene(
        SLOTS,
        tiers=[TierExecutor(SharedTier(store, NAMESPACE, PAGE), 16, 1 << 30)],
        prepare_deadline="100ms",
        recompute_if_faster=False,
    )
    store.gate.shut()
    waited = [steps_told_to_wait(scene, each) for each in prompts]

    assert sum(steps >= 5 for steps in waited) <= 3, f"so many wait their whole deadline of 5 steps: {waited}"
    assert scene.room() >= SLOTS // 2
    store.gate.open()
    scene.settle_tiers()
    scene.now += 10.0
    assert scene.prepare(prompts[8]).num_tokens == 0, "no request waits for the probe"
    scene.settle_tiers()
    assert scene.prepare(prompts[9]).num_tokens == BLOCKS * BLOCK_SIZE
