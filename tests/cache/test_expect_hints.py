"""`expect_in` of a client's hint: a session's blocks are in memory when its next turn is due, and nobody waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpact.cache.expected import LEAD_SECONDS, ExpectedTurn, ExpectedTurns
from kvpact.cache.status import EngineStatus, status_of
from kvpact.cli.status import status_lines
from kvpact.hints.schema import KEY, Brought, parse_hints
from kvpact.identity.keys import RequestIdentity
from kvpact.index.retained_chains import RetainedChains
from kvpact.metrics import MEMORY, series
from kvpact.tiers.base import UNSEALED, Tier
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.faults import Fault, Faults, FaultyTier, Operation
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, NAMESPACE, PAGE, Scene, SceneRequest, open_disk, tokens

SLOTS = 40
BLOCKS = 4


def request(name: str, seed: int, blocks: int = BLOCKS) -> SceneRequest:
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1, seed))


class Expecting(Scene):
    """A cache over a disk, whose reads and writes end when told to."""

    def __init__(self, place: Path, slots: int = SLOTS, tier: Tier | None = None, **settings: Any) -> None:
        self.faults = Faults()
        self.queue = SteppedExecutor(tier or FaultyTier(open_disk(place, 256), self.faults), 1 << 30)
        super().__init__(slots, tiers=[self.queue], hints="clients", **settings)
        assert self.cache.retaining is not None
        self.hinted = self.cache.retaining

    def turn(self, seed: int, blocks: int = BLOCKS, session: str = "s", **wanted: object) -> dict[str, str]:
        """A turn of a session is computed, stored everywhere, and ends; returns the outcomes."""
        asking = request(f"{session} {seed} {self.now}", seed, blocks)
        hints = parse_hints({KEY: {"session": session, **wanted}})
        assert hints is not None
        self.cache.note_hints(asking, hints)
        self.cache.on_new_request(asking)
        self.run_cold(asking)
        self.work()
        return hints.described()

    def flood(self, first: int) -> None:
        """Prompts that nobody asks again, twice what memory holds."""
        for seed in range(first, first + 2 * SLOTS // BLOCKS):
            self.run_cold(request(f"flood {seed}", seed))
            self.work(1)

    def work(self, steps: int = 3) -> None:
        """So many steps without a request."""
        for _ in range(steps):
            self.cache.end_step()
            self.queue.advance()
            self.cache.check()
        self.cache.end_step()

    def pass_until(self, now: float) -> None:
        self.now = now
        self.work()

    def resident(self, seed: int, blocks: int = BLOCKS) -> int:
        """Blocks of a prompt in memory, asked by nobody."""
        asking = request("peek", seed, blocks)
        keys = self.cache.requests.of(asking).keys
        self.cache.request_finished("peek")
        assert keys is not None
        return self.hinted.index.held_prefix(keys.extend(asking.token_ids, blocks))

    def expected(self) -> int:
        """Turns that are expected."""
        return len(self.hinted.expected)

    def brought(self) -> list[float]:
        """Blocks that were brought and used, and those that were not."""
        shot = self.cache.observe()
        return [shot[series("brought_blocks", use)] for use in Brought]


@pytest.fixture
def scene(tmp_path: Path) -> Expecting:
    return Expecting(tmp_path)


def test_the_blocks_of_an_expected_turn_are_there_before_it_and_not_earlier_than_needed(scene: Expecting) -> None:
    assert scene.turn(1, expect_in="60s") == {"session": "accepted", "expect_in": "accepted"}
    scene.forget_memory()
    scene.pass_until(50)
    assert (scene.resident(1), scene.expected()) == (0, 1)
    scene.pass_until(60 - LEAD_SECONDS)
    assert scene.resident(1) == BLOCKS
    scene.pass_until(61)
    again = request("again", 1)
    scene.load(again, scene.prepare(again))
    scene.cache.request_finished("again")
    assert scene.holds_content(again, range(BLOCKS))


def test_a_turn_that_comes_counts_what_it_loads_as_used(scene: Expecting) -> None:
    scene.turn(1, expect_in=60)
    scene.forget_memory()
    scene.pass_until(59)
    asking = request("again", 1)
    hints = parse_hints({KEY: {"session": "s"}})
    assert hints is not None
    scene.cache.note_hints(asking, hints)
    scene.load(asking, scene.prepare(asking))
    scene.cache.request_finished("again")
    assert scene.brought() == [BLOCKS, 0]
    assert scene.expected() == 0


@pytest.mark.parametrize("comes", [None, 9])
def test_a_turn_that_does_not_come_or_goes_another_way_used_nothing(scene: Expecting, comes: int | None) -> None:
    scene.turn(1, expect_in=60)
    scene.forget_memory()
    scene.pass_until(59)
    assert scene.cache.observe()["retained_blocks"] == BLOCKS
    if comes is not None:
        scene.turn(comes)
    scene.pass_until(1000)
    assert scene.brought() == [0, BLOCKS]
    shot = scene.cache.observe()
    assert (scene.expected(), shot["retained_blocks"]) == (0, 0)


def test_a_prefetch_counts_no_hit_and_opens_no_plan(scene: Expecting) -> None:
    scene.turn(1, expect_in=60)
    scene.forget_memory()
    before = scene.cache.observe()
    scene.pass_until(59)
    after = scene.cache.observe()
    changed = {name for name in after if after[name] != before.get(name)}
    reads = ("read_", "brought_", "retained_", "held_", "lookup_seconds", "used_bytes", "queued_")
    assert {name for name in changed if not name.startswith(reads)} == set()
    assert series("read_blocks", "disk") in changed


def test_only_a_fifth_of_memory_is_brought_and_no_other_retention_ends_for_it(scene: Expecting) -> None:
    for seed in (1, 2, 3):
        scene.turn(seed, session=str(seed), expect_in=60)
    assert scene.turn(4, 12, session="4", expect_in=60)["expect_in"] == "clipped: 8 of 12 blocks"
    scene.forget_memory()
    scene.pass_until(59)
    assert [scene.resident(seed) for seed in (1, 2, 3)] == [BLOCKS, BLOCKS, 0]
    assert scene.cache.observe()["retained_blocks"] == SLOTS // 5


def test_what_is_brought_outlives_a_flood_until_a_while_after_it_was_due(scene: Expecting) -> None:
    scene.turn(1, expect_in=60)
    scene.forget_memory()
    scene.pass_until(59)
    scene.flood(100)
    assert scene.resident(1) == BLOCKS
    scene.now = 100
    scene.flood(200)
    assert scene.resident(1) == 0


def test_a_promise_keeps_its_room_and_no_plan_ends_for_a_prefetch(tmp_path: Path) -> None:
    scene = Expecting(tmp_path, slots=10, plan_lifetime=100)
    scene.turn(1, 2, expect_in=60)
    scene.forget_memory()
    scene.run_cold(request("whole", 9, 10))
    whole = request("again", 9, 10)
    match = scene.prepare(whole)
    assert match.num_tokens == 10 * BLOCK_SIZE
    scene.pass_until(59)
    assert scene.resident(1, 2) == 0
    scene.load(whole, match)
    assert scene.holds_content(whole, range(10))
    scene.cache.request_finished("again")


def test_without_a_tier_nothing_is_expected() -> None:
    scene = Scene(SLOTS, hints="clients")
    asking = request("asking", 1)
    hints = parse_hints({KEY: {"session": "s", "expect_in": 5}})
    assert hints is not None
    scene.cache.note_hints(asking, hints)
    scene.run_cold(asking)
    assert hints.described()["expect_in"] == "rejected: there is no tier below memory"


def test_status_says_what_is_expected_and_how_much_was_used(scene: Expecting) -> None:
    scene.turn(1, session="one", expect_in=60)
    scene.turn(2, session="two", expect_in="1h")
    scene.forget_memory()
    scene.pass_until(59)
    scene.pass_until(1000)
    found = EngineStatus.parse(status_of(scene.cache, scene.cache.metrics, "m", BLOCK_SIZE).encoded())
    assert dict(status_lines(found))["expected"] == "turns: 1; blocks read before one: 0 used, 4 unused"


@pytest.mark.parametrize("forgets", [False, True])
def test_a_shared_store_is_asked_before_it_is_read(tmp_path: Path, forgets: bool) -> None:
    store = DictionaryStore()
    scene = Expecting(tmp_path, tier=SharedTier(store, NAMESPACE, PAGE, seal=UNSEALED))
    scene.turn(1, expect_in=60)
    scene.forget_memory()
    if forgets:
        store.records.clear()
    scene.pass_until(59)
    assert scene.resident(1) == (0 if forgets else BLOCKS)
    scene.pass_until(1000)
    assert scene.brought() == [0, 0 if forgets else BLOCKS]


def test_a_failed_read_costs_the_hint_alone(scene: Expecting) -> None:
    scene.turn(1, expect_in=60)
    scene.forget_memory()
    scene.faults.arm(Operation.GET, Fault.ERROR, times=10)
    scene.pass_until(59)
    assert scene.resident(1) == 0
    scene.pass_until(1000)
    assert scene.expected() == 0


def test_p13_after_a_reset_nothing_is_expected(scene: Expecting) -> None:
    scene.turn(1, expect_in=60)
    scene.cache.reset()
    scene.pass_until(59)
    assert scene.expected() == 0
    assert scene.cache.observe()[series("read_blocks", "disk")] == 0


def test_p12_expected_turns_have_no_more_blocks_than_memory(scene: Expecting) -> None:
    for seed in range(30):
        scene.turn(seed, session=str(seed), expect_in="1h")
    assert scene.hinted.expected.blocks == SLOTS
    assert scene.expected() == SLOTS // BLOCKS


def play(place: Path, seed: int) -> None:
    """Sessions that end, do not end and are named by others; hints of all kinds; clocks that jump; resets: P1, P2, P7
    and P12."""
    rng = random.Random(seed)
    scene = Expecting(place, rng.choice([10, 20, 40]))
    for number in range(80):
        asking = request(str(number), rng.randrange(10), rng.randrange(1, 7))
        asking.identity = RequestIdentity(salt=rng.choice(["", "", f"salt {number}"]))
        wanted: dict[str, object] = {
            "session": rng.choice(["a", "b", f"session {number}", "s" * 300, 7]),
            "expect_in": rng.choice(["1s", 30, "2h", -1, 5]),
            "retain": rng.choice(["1s", 30, None]),
            "release": rng.choice([True, None, None, 0]),
            "store": rng.choice(["none", "prompt", None, None, None]),
        }
        hints = parse_hints({KEY: {name: value for name, value in wanted.items() if rng.random() < 0.7}})
        if hints is not None:
            scene.cache.note_hints(asking, hints)
        scene.cache.on_new_request(asking)
        match = scene.cache.prepare_external_match(asking, 0)
        for _ in range(9):
            if match is None:
                scene.work(1)
                match = scene.cache.prepare_external_match(asking, 0)
        if match is not None and match.num_tokens and rng.random() < 0.8:
            scene.load(asking, match)
            assert scene.holds_content(asking, range(match.num_tokens // BLOCK_SIZE))
        if rng.random() < 0.8:
            scene.report(scene.step_computing(asking))
        scene.cache.request_finished(asking.request_id)
        if rng.random() < 0.1:
            scene.forget_memory()
        scene.now += rng.choice([0.0, 1.0, 4.0, 60.0, 1e6])
        if rng.random() < 0.03:
            scene.cache.reset()
        scene.work(rng.randrange(3))
        shot = scene.cache.observe()
        assert shot["retained_blocks"] <= shot[series("capacity_blocks", MEMORY)] // 5
        assert scene.hinted.expected.blocks <= shot[series("capacity_blocks", MEMORY)]
    scene.work()
    shot = scene.cache.observe()
    assert (shot["leases_held"], shot["open_plans"]) == (0, 0)
    assert shot["loaded_tokens"] + shot["failed_tokens"] == shot["committed_tokens"]


@pytest.mark.parametrize("seed", range(5))
def test_random_hints_of_all_kinds_leave_every_invariant_true(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


def counts_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefetch counts as a hit."""
    bring: Callable[..., bool] = getattr(ExpectedTurns, "_bring")  # noqa: B009

    def counting(self: ExpectedTurns, turn: ExpectedTurn, now: float) -> bool:
        for name in ("lookups", "hits"):
            self.finder.tiers.metrics.add(name)
        return bring(self, turn, now)

    monkeypatch.setattr(ExpectedTurns, "_bring", counting)


def acts_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expired hint acts: what was brought for a turn that did not come is retained on and on."""
    expect = ExpectedTurns.expect
    monkeypatch.setattr(
        ExpectedTurns, "expect", lambda self, state, keys, seconds: expect(self, state, keys, seconds + 1e6)
    )


def brings_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is read at once, and lies in memory until it is due."""
    monkeypatch.setattr("kvpact.cache.expected.LEAD_SECONDS", 1e6)


def takes_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's expected turns end what another one retains."""
    monkeypatch.setattr(RetainedChains, "room_after", lambda self, known, owner: SLOTS)


@pytest.mark.parametrize("break_it", [counts_a_hit, acts_after_its_time, brings_too_early, takes_all_memory])
def test_the_scenes_catch_a_broken_prefetch(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_it(monkeypatch)
    caught = 0
    for number, check in enumerate(
        (
            test_the_blocks_of_an_expected_turn_are_there_before_it_and_not_earlier_than_needed,
            test_a_prefetch_counts_no_hit_and_opens_no_plan,
            test_what_is_brought_outlives_a_flood_until_a_while_after_it_was_due,
            test_only_a_fifth_of_memory_is_brought_and_no_other_retention_ends_for_it,
        )
    ):
        (tmp_path / str(number)).mkdir()
        try:
            check(Expecting(tmp_path / str(number)))
        except AssertionError:
            caught += 1
    assert caught, "nothing was wrong"
