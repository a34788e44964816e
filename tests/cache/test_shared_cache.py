"""The cache above stores that other engines use too: asked without waiting, trusted in nothing, never in the way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hook_time import LONG, LONG_BLOCKS, PREFILL_SECONDS, HookTime, assert_all_steps_cost, assert_no_step_is_slow
from kvpact.cache.prepare import KEY_PIECE_TOKENS
from kvpact.cache.tier_set import POLL_SECONDS
from kvpact.contract import ExternalKVMatch
from kvpact.identity.keys import Namespace, RequestIdentity
from kvpact.metrics import MissReason, series
from kvpact.tiers.base import UNSEALED, RecordMac
from kvpact.tiers.shared.store import RecordBuffer, RecordPieces, StoreError, key_of
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from polling import until
from scenes import NAMESPACE, PAGE, Scene, SceneRequest

PATIENCE = 10.0
SHARED = "dictionary"
"""A dictionary is no kind that kvpact brings."""


class TrialStore(DictionaryStore):
    """A store in memory that can hang, be slow and fail, and that writes down what it was asked and by which thread."""

    def __init__(self, other: TrialStore | None = None) -> None:
        super().__init__(other.records if other else None)
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[str] = []
        self.names_met: set[str] = set()
        self.threads: set[int] = set()
        self.fails = False

    def _meet(self, call: str, names: Sequence[str]) -> None:
        self.calls.append(f"{call} {len(names)}")
        self.names_met.update(names)
        self.threads.add(threading.get_ident())
        assert self.gate.wait(PATIENCE)
        if self.fails:
            raise StoreError("the store is down")

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._meet("exists", names)
        return super().exists(names)

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        self._meet("read", names)
        return super().read(names, buffers)

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        self._meet("write", names)
        super().write(names, records)


def tokens(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1, 1000) for _ in range(length)]


def tier(store: TrialStore, seal: RecordMac = UNSEALED, ranks: int = 1, namespace: Namespace = NAMESPACE) -> SharedTier:
    return SharedTier(store, namespace, PAGE * ranks, seal=seal)


@pytest.fixture
def make_scene() -> Iterator[Callable[..., Scene]]:
    """Scenes that are closed with the test."""
    scenes: list[Scene] = []

    def make(*stores: TrialStore, **settings: Any) -> Scene:
        namespace = settings.get("namespace", NAMESPACE)
        tiers = [tier(store, ranks=settings.get("ranks", 1), namespace=namespace) for store in stores]
        scenes.append(Scene(tiers=tiers, **{"recompute_if_faster": False, **settings}))
        return scenes[-1]

    yield make
    for scene in scenes:
        for queue in scene.queues:
            assert isinstance(queue.tier, SharedTier)
            assert isinstance(queue.tier.store, TrialStore)
            queue.tier.store.gate.set()
        scene.close()


def computed_elsewhere(make_scene: Callable[..., Scene], *lengths: int, **settings: Any) -> TrialStore:
    """A store with what another engine computed: for each length, a prompt with the seed of its place."""
    store = TrialStore()
    other = make_scene(store, **settings)
    for seed, length in enumerate(lengths):
        other.run_cold(SceneRequest(f"there-{seed}", tokens(length, seed)))
        other.settle_tiers()
    return store


def count(scene: Scene, name: str, label: str = "") -> float:
    return scene.cache.observe()[series(name, label)]


def test_what_one_engine_computed_another_one_loads(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    assert scene.cache.prepare_external_match(request, 0) is None, "prepare does not wait for the store"
    scene.assert_loads(request, 32)
    assert count(scene, "read_blocks", SHARED) == 8


def test_h02_a_request_is_looked_up_once_however_often_it_is_asked_about(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    store.gate.clear()
    for _ in range(200):
        assert scene.cache.prepare_external_match(request, 0) is None
        scene.cache.end_step()
    store.gate.set()
    assert scene.prepare(request).num_tokens == 32
    for _ in range(200):
        scene.prepare(request)
    assert [call for call in store.calls if call.startswith("exists 8")] == ["exists 8"]
    assert count(scene, "lookups") == 1


def test_a_request_is_looked_up_when_it_arrives_before_there_is_room_for_it(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    scene.cache.on_new_request(request)
    until(lambda: store.calls == ["exists 8"])
    assert scene.prepare(request).num_tokens == 32
    assert store.calls.count("exists 8") == 1


def test_one_read_a_block_however_many_requests_wait_for_it(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene = make_scene(store)
    requests = [SceneRequest(f"here-{number}", [*tokens(33), number]) for number in range(5)]
    waiting = set(range(5))
    while waiting:
        for number in [*waiting]:
            match = scene.cache.prepare_external_match(requests[number], 0)
            if match is not None:
                assert match.num_tokens == 32
                waiting.discard(number)
        scene.cache.end_step()
    assert count(scene, "read_blocks", SHARED) == 8


def test_answers_from_memory_ask_no_store(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore()
    scene = make_scene(store)
    scene.run_cold(SceneRequest("first", tokens(33)))
    scene.settle_tiers()
    store.calls.clear()
    match = scene.cache.prepare_external_match(SceneRequest("second", tokens(33)), 0)
    assert match is not None
    assert match.num_tokens == 32
    assert store.calls == []


def test_h10_a_store_that_hangs_costs_a_deadline_and_is_left_alone(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33, 33, 33, 33, 33))
    scene = make_scene(store, prepare_deadline="2s")
    store.gate.clear()
    for seed in range(3):
        request = SceneRequest(f"here-{seed}", tokens(33, seed))
        answers = []
        for _ in range(5):
            answers.append(scene.cache.prepare_external_match(request, 0))
            scene.cache.end_step()
            scene.now += 0.5
        assert answers == [None] * 4 + [ExternalKVMatch(0)]
        scene.cache.request_finished(request.request_id)
    assert count(scene, "tier_up", SHARED) == 0, "three deadlines in a row were missed"
    asked = SceneRequest("not delayed", tokens(33, 3))
    assert scene.cache.prepare_external_match(asked, 0) == ExternalKVMatch(0), "an ill store is not asked"
    assert count(scene, "skipped_lookups", SHARED) == 1
    store.gate.set()
    scene.now += 10.0
    tries = SceneRequest("tries", tokens(33, 4))
    assert scene.cache.prepare_external_match(tries, 0) == ExternalKVMatch(0), "no request waits for the probe"
    scene.settle_tiers()
    assert scene.prepare(SceneRequest("back", tokens(33, 4))).num_tokens == 32
    assert count(scene, "tier_up", SHARED) == 1


@pytest.mark.parametrize("hangs", [True, False], ids=["it hangs", "it answers"])
def test_h58_no_step_does_a_stores_work_or_waits_for_it(make_scene: Callable[..., Scene], *, hangs: bool) -> None:
    elsewhere = computed_elsewhere(make_scene, LONG, LONG, LONG, slots=4 * LONG_BLOCKS)

    def play() -> HookTime:
        store = TrialStore(elsewhere)
        scene = make_scene(store, slots=4 * LONG_BLOCKS, engine_blocks=1024, prepare_deadline="2s")
        hooks = HookTime(scene.cache)
        if hangs:
            store.gate.clear()
        for seed in range(3):
            there, own = (SceneRequest(name, tokens(LONG, number)) for name, number in (("there", seed), ("own", 9)))
            scene.cache.on_new_request(there)
            scene.cache.end_step()
            until(lambda: bool(store.threads) if hangs else scene.queues[0].under_way == 0)
            answers: list[ExternalKVMatch | None] = []
            for _ in range(5):
                answers.append(scene.cache.prepare_external_match(there, 0))
                scene.cache.end_step()
                until(lambda: hangs or scene.queues[0].under_way == 0)
                scene.now += 0.5
            if not hangs:
                assert [answer is not None for answer in answers] == [False, True, True, True, True]
                assert answers[-1] is not None
                scene.load(there, answers[-1])
            elif not seed:
                scene.run_cold(own)
            scene.cache.request_finished("there")
        assert (count(scene, "loaded_tokens") > 0) == (not hangs)
        assert threading.get_ident() not in store.threads != set(), "a hook called the store itself"
        store.gate.set()
        return hooks

    assert_no_step_is_slow(play)


def test_writes_that_take_long_are_nobodys_wait_and_no_reason_to_leave_a_store_alone(
    make_scene: Callable[..., Scene],
) -> None:
    store = TrialStore()
    scene = make_scene(store, prepare_deadline="20ms")
    for seed in range(4):
        store.gate.clear()
        scene.run_cold(SceneRequest(f"here-{seed}", tokens(33, seed)))
        until(lambda: store.calls[-1:] != [] and store.calls[-1].startswith(("exists", "write")))
        time.sleep(0.05)
        scene.cache.end_step()
        store.gate.set()
        scene.settle_tiers()
    assert count(scene, "tier_failures", SHARED) == 0
    assert count(scene, "tier_up", SHARED) == 1
    assert count(scene, "written_blocks", SHARED) == 32
    assert count(scene, "dropped_writes", SHARED) == 0


def test_a_store_that_fails_is_left_alone_and_used_again_when_it_is_back(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 17, 17, 17, 17, 17, 17))
    scene = make_scene(store)
    store.fails = True
    for seed in range(3):
        assert scene.prepare(SceneRequest(f"here-{seed}", tokens(17, seed))).num_tokens == 0
    asked = len(store.calls)
    scene.run_cold(SceneRequest("computed meanwhile", tokens(17, 99)))
    assert scene.prepare(SceneRequest("not asked", tokens(17, 3))).num_tokens == 0
    assert len(store.calls) == asked, "neither look-ups nor writes go to a store that is ill"
    assert count(scene, "dropped_writes", SHARED) == 4
    store.fails = False
    scene.now += 10.0
    assert scene.prepare(SceneRequest("tries", tokens(17, 4))).num_tokens == 0, "no request waits for the probe"
    scene.settle_tiers()
    assert scene.prepare(SceneRequest("back", tokens(17, 4))).num_tokens == 16
    assert count(scene, "misses", MissReason.TIER_DOWN) == 5
    assert count(scene, "misses", MissReason.NOT_STORED) == 0, "which nobody knows"


def test_h21_reads_of_a_hung_store_leave_half_of_the_memory_to_others(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 65, 65))
    scene = make_scene(store, slots=16, prepare_deadline="2s")
    request = SceneRequest("here", tokens(65))
    scene.cache.on_new_request(request)
    until(lambda: "exists 16" in store.calls and scene.queues[0].under_way == 0)
    store.gate.clear()
    assert scene.cache.prepare_external_match(request, 0) is None
    until(lambda: any(call.startswith("read") for call in store.calls))
    scene.now += 3.0
    assert scene.cache.prepare_external_match(request, 0) == ExternalKVMatch(0)
    scene.run_cold(SceneRequest("other", tokens(33, 7)))
    match = scene.cache.prepare_external_match(SceneRequest("again", tokens(33, 7)), 0)
    assert match is not None
    assert match.num_tokens == 32, "the slots that the store may still write to are nobody's, the others are free"
    reading = SceneRequest("checked", tokens(33, 7))
    scene.load(reading, scene.prepare(reading))
    store.gate.set()
    scene.settle_tiers()
    assert scene.holds_content(reading, range(8))


def test_h11_what_the_store_evicts_between_look_up_and_read_is_a_shorter_match(
    make_scene: Callable[..., Scene],
) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    scene.cache.on_new_request(request)
    until(lambda: scene.queues[0].under_way == 0)
    names = [name for name in store.records if not name.endswith("namespace")]
    del store.records[names[5]]
    scene.assert_loads(request, 20)
    assert count(scene, "failed_tokens") == 0


def test_h22_damage_is_a_miss_counted_and_mended_by_the_next_write(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    names = [name for name in store.records if not name.endswith("namespace")]
    store.records[names[3]] = store.records[names[3]][:-1] + b"?"
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    match = scene.prepare(request)
    assert match.num_tokens == 12
    scene.load(request, match)
    scene.compute(request, 3)
    scene.cache.note_computed(request, 33, lambda: scene.tables["here"])
    scene.report(scene.cache.end_step())
    scene.settle_tiers()
    assert count(scene, "damaged_records", SHARED) == 1
    third = make_scene(TrialStore(store))
    assert third.prepare(SceneRequest("there", tokens(33))).num_tokens == 32


def test_h80_a_record_that_somebody_else_planted_is_not_served() -> None:
    ours, theirs = RecordMac.from_secret(b"our own secret!!"), RecordMac.from_secret(b"another secret!!")
    store = TrialStore()
    for seal in (UNSEALED, theirs):
        forger = Scene(tiers=[tier(TrialStore(store), seal)])
        forger.run_cold(SceneRequest("planted", tokens(33)))
        forger.settle_tiers()
        forger.close()
    engine = Scene(tiers=[tier(TrialStore(store), ours)])
    assert engine.prepare(SceneRequest("first", tokens(33))).num_tokens == 0
    engine.close()
    # Somebody who can write to the store puts them where ours would be looked for.
    group = next(iter(store.records)).partition("/")[0].partition("-")[0]
    for name in [*store.records]:
        store.records[f"{group}-{ours.name}/{name.partition('/')[2]}"] = store.records[name]
    engine = Scene(tiers=[tier(TrialStore(store), ours)])
    assert engine.prepare(SceneRequest("second", tokens(33))).num_tokens == 0
    assert count(engine, "damaged_records", SHARED) >= 1
    engine.close()


def test_what_the_store_has_is_not_written_again(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene = make_scene(store, prepare_deadline=0)  # computes all by itself
    scene.run_cold(SceneRequest("here", tokens(49)[:33]))
    scene.settle_tiers()
    assert not [call for call in store.calls if call.startswith("write") and call != "write 1"]
    store.calls.clear()
    scene.run_cold(SceneRequest("again", tokens(33)))
    scene.settle_tiers()
    assert store.calls == [], "and what it was found to have is not asked about again"


def test_blocks_come_from_the_first_tier_that_has_them(make_scene: Callable[..., Scene]) -> None:
    near, far, stem = TrialStore(), TrialStore(computed_elsewhere(make_scene, 33)), tokens(33)
    first = make_scene(near)
    first.run_cold(SceneRequest("stem", stem[:17]))
    first.settle_tiers()
    scene = make_scene(near, far)
    near.calls.clear()
    assert scene.prepare(SceneRequest("here", stem)).num_tokens == 32
    assert [call for call in near.calls if call.startswith("read")] == ["read 4"]
    assert [call for call in far.calls if call.startswith("read")] == ["read 4"]


def test_with_second_use_a_block_is_written_when_it_is_needed_again(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore()
    scene = make_scene(store, admit="second-use")
    scene.run_cold(SceneRequest("first", tokens(33)))
    scene.run_cold(SceneRequest("never again", tokens(33, 5)))
    scene.settle_tiers()
    assert store.records == {}
    request = SceneRequest("second", tokens(33))
    scene.load(request, scene.prepare(request))
    scene.settle_tiers()
    assert count(scene, "written_blocks", SHARED) == 8
    third = make_scene(TrialStore(store))
    assert third.prepare(SceneRequest("there", tokens(33))).num_tokens == 32


def test_h60_what_is_computed_sooner_than_it_arrives_is_not_waited_for(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33, 33))
    scene = make_scene(store, recompute_if_faster=True)
    (client,) = scene.cache.tiers.clients
    assert scene.prepare(SceneRequest("measured", tokens(33))).num_tokens == 32
    client.costs.latency.add(1e9, 1.0)  # quick to say what it has,
    client.costs.note_read(1, 100.0)  # slow to give it
    fast = SceneRequest("computes", tokens(65, 9))
    for step in range(3):  # a fast engine
        fast.request_id = f"computes-{step}"
        scene.cache.prepare_external_match(fast, 0)
        scene.cache.note_computed(fast, 64, lambda: scene.allocate(fast))
        scene.cache.end_step()
        scene.now += 10.0
    assert scene.prepare(SceneRequest("computed", tokens(33, 1))).num_tokens == 0
    assert count(scene, "misses", MissReason.RECOMPUTE_FASTER) == 1
    assert count(scene, "declined_blocks") == 8
    scene.settle_tiers()
    scene.now += 60.0
    assert scene.prepare(SceneRequest("tried again", tokens(33, 1))).num_tokens == 32


@pytest.mark.parametrize("stored", [True, False], ids=["a store is asked", "memory only"])
def test_h60_a_miss_costs_one_question_and_less_than_a_thirtieth_of_computing(
    make_scene: Callable[..., Scene], *, stored: bool
) -> None:
    """What missing costs the scheduler's thread in all hooks of a request's life: to ask, to wait and to save."""

    def play() -> HookTime:
        stores = [TrialStore()] if stored else []
        scene = make_scene(*stores, slots=2 * LONG_BLOCKS)
        request = SceneRequest("new", tokens(LONG))
        scene.compute(request)
        hooks = HookTime(scene.cache)
        scene.cache.on_new_request(request)
        answers: list[ExternalKVMatch | None] = []
        while not answers or answers[-1] is None:
            until(lambda: not any(queue.under_way for queue in scene.queues))
            answers.append(scene.cache.prepare_external_match(request, 0))
        assert answers == [ExternalKVMatch(0)], "of what nobody has, the first answer is the last"
        assert [call for store in stores for call in store.calls] == [f"exists {LONG_BLOCKS}"] * stored
        scene.run_cold(request)
        until(lambda: not any(queue.under_way for queue in scene.queues))
        scene.cache.end_step()
        assert not scene.cache.tiers.pending
        assert count(scene, "lookups") == count(scene, "misses", MissReason.NOT_STORED) == 1
        return hooks

    assert_all_steps_cost(play, PREFILL_SECONDS / 30)


def test_h83_what_another_tenant_asked_is_not_found_by_its_time(make_scene: Callable[..., Scene]) -> None:
    """With a salt of his own a tenant looks only for his own blocks: he sees and causes the same, whoever else asked.

    Where no name that is stored for another is asked for, and the calls are as many and as large, no time can tell.
    """
    store = TrialStore()
    scene = make_scene(store)
    scene.run_cold(SceneRequest("a", tokens(33), RequestIdentity(salt="a")))
    scene.settle_tiers()
    theirs, elsewhere = set(store.records), TrialStore()
    elsewhere.records.update(store.records)

    def course(scene: Scene, store: TrialStore, seed: int) -> list[object]:
        """All that tenant b sees and causes with a prompt, probe by probe."""
        request = SceneRequest(f"b {seed}", tokens(33, seed), RequestIdentity(salt="b"))
        store.calls.clear()
        store.names_met.clear()
        scene.cache.on_new_request(request)
        course: list[object] = []
        for _ in range(3):
            until(lambda: scene.queues[0].under_way == 0)
            course += [scene.cache.prepare_external_match(request, 0), [*store.calls]]
            scene.report(scene.cache.end_step())
        scene.run_cold(request)
        scene.settle_tiers()
        assert not {name for name in store.names_met if key_of(name)} & theirs
        return [*course, [*store.calls], len(store.names_met)]

    for there in ((make_scene(elsewhere), elsewhere), (scene, store)):
        _first, nobodys, asked_by_a = (course(*there, seed) for seed in (2, 1, 0))
        assert nobodys[0] == ExternalKVMatch(0)
        assert asked_by_a == nobodys
    assert scene.prepare(SceneRequest("a again", tokens(33), RequestIdentity(salt="a"))).num_tokens == 32


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": Namespace({**NAMESPACE.fields, "weights": "others"})},
        {"namespace": Namespace({**NAMESPACE.fields, "dtype": "float16"})},
        {"namespace": Namespace({**NAMESPACE.fields, "ranks": "2"}), "ranks": 2},
        {"ranks": 2},
    ],
    ids=["weights", "dtype", "ranks", "ranks that are in no namespace"],
)
def test_h23_engines_that_are_not_alike_hit_nothing_of_each_other(
    make_scene: Callable[..., Scene], other: dict[str, Any]
) -> None:
    """Nor do they take each other's blocks for damaged ones; each finds its own beside the other's."""
    store, request = TrialStore(), SceneRequest("the same", tokens(33))
    unlike: list[dict[str, Any]] = [{}, other]
    for settings in unlike:
        scene = make_scene(TrialStore(store), **settings)
        assert scene.prepare(request).num_tokens == 0
        scene.run_cold(request)
        scene.settle_tiers()
    for settings in unlike if "namespace" in other else []:
        scene = make_scene(TrialStore(store), **settings)
        scene.assert_loads(request, 32)
        assert count(scene, "damaged_records", SHARED) == 0


class SlowScene(Scene):
    """Each look at the clock takes a tenth of a millisecond, so that what the scheduler's thread does takes time."""

    @property
    def now(self) -> float:
        self._now += 1e-4
        return self._now

    @now.setter
    def now(self, value: float) -> None:
        self._now = value


def test_p11_what_many_reads_brought_is_taken_in_over_several_steps(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, *[17] * 8))
    scene = SlowScene(32, tiers=[tier(store)], recompute_if_faster=False)
    requests = [SceneRequest(f"here-{seed}", tokens(17, seed)) for seed in range(8)]
    store.gate.clear()
    for request in requests:
        scene.cache.on_new_request(request)
    scene.cache.end_step()
    store.gate.set()
    until(lambda: scene.queues[0].under_way == 0)
    taken: list[int] = []
    steps = 0
    while not taken or taken[-1] < 2 * len(requests):
        before = scene.cache.tiers.completions
        for request in requests:
            scene.cache.prepare_external_match(request, 0)
        scene.cache.end_step()
        taken.append(scene.cache.tiers.completions)
        assert taken[-1] - before <= round(POLL_SECONDS / 1e-4) + 1
        steps += 1
        until(lambda: scene.queues[0].under_way == 0)
    assert steps >= len(requests) / 2
    assert [scene.prepare(request).num_tokens for request in requests] == [16] * len(requests)


def test_p11_a_late_step_leaves_what_the_store_answered_to_the_next_one(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    scene.cache.on_new_request(request)
    until(lambda: scene.queues[0].under_way == 0)
    scene.cache.budget.limit = 0.0
    assert scene.cache.prepare_external_match(request, 0) is None
    assert scene.queues[0].under_way == 0, "the step was late, and began to read all the same"
    assert scene.cache.prepare_external_match(request, 0) is None
    until(lambda: scene.queues[0].under_way == 0)
    assert "read 8" in store.calls, "however late the next one is, it reads"
    assert scene.cache.prepare_external_match(request, 0) is None, "what was read is promised a step later"
    for _ in range(2):
        match = scene.cache.prepare_external_match(request, 0)
        assert match is not None, "who was answered is not put off again"
        assert match.num_tokens == 32


def test_p11_a_late_step_answers_a_long_prompt_whose_deadline_has_passed(make_scene: Callable[..., Scene]) -> None:
    scene, request = make_scene(TrialStore()), SceneRequest("long", tokens(3 * KEY_PIECE_TOKENS))
    scene.cache.budget.limit = 0.0
    scene.cache.put_off_external_match(request)
    scene.now += scene.config.prepare_deadline
    assert scene.cache.prepare_external_match(request, 0) == ExternalKVMatch(0), "its keys would take three steps"


def test_p11_a_request_for_which_there_is_no_time_is_a_miss_once(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    for _ in range(3):
        scene.cache.decline_external_match(request, 0)
    assert count(scene, "lookups") == count(scene, "misses", MissReason.DEADLINE) == 1
    match = scene.prepare(request)
    assert match.num_tokens == 32, "asked again with more time, it gets what is there"
    scene.cache.decline_external_match(request, 0)
    assert scene.cache.observe()["open_plans"] == 0, "a plan that the engine does not hear of is over"
    scene.cache.check()


def test_h02_a_request_that_waits_for_a_slow_store_keeps_its_plan_until_the_deadline(
    make_scene: Callable[..., Scene],
) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store, prepare_deadline="9s", plan_lifetime="2s"), SceneRequest("here", tokens(33))
    assert scene.cache.prepare_external_match(request, 0) is None
    until(lambda: scene.queues[0].under_way == 0)
    store.gate.clear()
    assert scene.cache.prepare_external_match(request, 0) is None, "it is found, and being read"
    plan = scene.cache.ledger.find("here")
    assert plan is not None
    for _ in range(8):
        scene.now += 1.0
        assert scene.cache.prepare_external_match(request, 0) is None
        scene.cache.end_step()
        assert scene.cache.ledger.find("here") is plan
    assert count(scene, "lookups") == 1
    scene.now += 1.0
    match = scene.cache.prepare_external_match(request, 0)
    assert match is not None
    assert match.num_tokens == 0
    assert count(scene, "misses", MissReason.DEADLINE) == 1


def test_a_waiting_request_is_answered_once_everything_is_forgotten(make_scene: Callable[..., Scene]) -> None:
    store = TrialStore(computed_elsewhere(make_scene, 33))
    scene, request = make_scene(store), SceneRequest("here", tokens(33))
    store.gate.clear()
    assert scene.cache.prepare_external_match(request, 0) is None
    assert scene.cache.prepare_external_match(request, 0) is None
    scene.cache.reset()
    match = scene.cache.prepare_external_match(request, 0)
    assert match is not None
    assert match.num_tokens == 0
