"""`retain` of a client's hint: its blocks outlive others in memory for a time, and no request lacks room for them."""

from __future__ import annotations

import random

import pytest

from group_scenes import GroupScene, asked, full, window
from kvpact.contract import WorkerReport
from kvpact.hints.schema import KEY, Hints, parse_hints
from scenes import BLOCK_SIZE, Scene, SceneRequest, failed, tokens

SLOTS = 40
BLOCKS = 4
FLOOD = range(100, 100 + 2 * SLOTS // BLOCKS)


def request(name: str, seed: int, blocks: int = BLOCKS) -> SceneRequest:
    return SceneRequest(name, tokens(blocks * BLOCK_SIZE + 1, seed))


def hinted(scene: Scene, asking: SceneRequest, **wanted: object) -> Hints:
    """The request arrives with these hints."""
    hints = parse_hints({KEY: wanted or {"retain": "5m"}})
    assert hints is not None
    scene.cache.note_hints(asking, hints)
    return hints


def run(scene: Scene, seed: int, blocks: int = BLOCKS, **wanted: object) -> dict[str, str]:
    """A request with these hints is computed, saved, and ends; returns the outcomes."""
    asking = request(f"hinted {seed}", seed, blocks)
    hints = hinted(scene, asking, **wanted)
    scene.run_cold(asking)
    return hints.described()


def flood(scene: Scene, seeds: range = FLOOD) -> None:
    """Prompts that nobody asks again, twice what memory holds."""
    for seed in seeds:
        asking = request(f"flood {seed}", seed)
        scene.cache.on_new_request(asking)
        scene.run_cold(asking)
        scene.cache.check()


def in_memory(scene: Scene, seed: int, blocks: int = BLOCKS) -> int:
    """Blocks of this prompt that a request is promised."""
    asking = request("asking", seed, blocks)
    found = scene.prepare(asking).num_tokens // BLOCK_SIZE
    scene.cache.request_finished("asking")
    return found


def retained(scene: Scene) -> float:
    return scene.cache.observe()["retained_blocks"]


@pytest.fixture
def scene() -> Scene:
    return Scene(SLOTS, hints="clients")


def test_retained_blocks_outlive_a_flood_until_their_time_is_over(scene: Scene) -> None:
    assert run(scene, 1) == {"retain": "accepted"}
    run(scene, 2, store="prompt")
    assert retained(scene) == BLOCKS
    flood(scene)
    assert in_memory(scene, 2) == 0
    scene.now = 299.0
    flood(scene)
    assert in_memory(scene, 1) == BLOCKS
    scene.now = 300.0
    flood(scene)
    assert retained(scene) == in_memory(scene, 1) == 0


def test_an_expired_hint_does_not_act_in_the_first_step_after_a_pause(scene: Scene) -> None:
    """The engine was idle when the time passed: a flood of one request drives the blocks out, the oldest of all."""
    run(scene, 1)
    for seed in range(100, 100 + SLOTS // BLOCKS - 1):
        scene.run_cold(request(str(seed), seed))
    scene.now = 301.0
    asking = request("next", 500)
    scene.cache.on_new_request(asking)
    scene.step_computing(asking)
    assert not retained(scene)
    assert in_memory(scene, 1) == 0
    assert in_memory(scene, 100) == BLOCKS


def test_at_most_a_fifth_is_retained_and_the_oldest_gives_way(scene: Scene) -> None:
    """The newest long prompt keeps its beginning; that is said."""
    for seed in (1, 2, 3):
        run(scene, seed, retain="1h")
    assert retained(scene) == 2 * BLOCKS == SLOTS // 5
    flood(scene)
    assert [in_memory(scene, seed) for seed in (1, 2, 3)] == [0, BLOCKS, BLOCKS]
    assert run(scene, 4, blocks=12, retain="2h") == {"retain": "clipped: to 1 h; 8 of 12 blocks"}
    flood(scene)
    assert [in_memory(scene, seed) for seed in (2, 3)] == [0, 0]
    assert in_memory(scene, 4, blocks=12) == SLOTS // 5


def test_a_request_that_needs_all_memory_gets_it(scene: Scene) -> None:
    run(scene, 1)
    run(scene, 2)
    whole = request("whole", 9, SLOTS)
    scene.run_cold(whole)
    scene.cache.check()
    assert in_memory(scene, 9, SLOTS) == SLOTS
    assert (retained(scene), scene.cache.observe()["dropped_blocks"]) == (0, 0)


def test_p2_a_promise_of_retained_blocks_holds_whatever_gives_way(scene: Scene) -> None:
    run(scene, 1)
    again = request("again", 1)
    match = scene.prepare(again)
    for seed in (2, 3, 4):
        run(scene, seed, blocks=8)
    flood(scene)
    scene.load(again, match)
    assert scene.holds_content(again, range(BLOCKS))


def test_p13_after_a_reset_nothing_is_retained(scene: Scene) -> None:
    run(scene, 1)
    scene.cache.reset()
    assert retained(scene) == 0
    flood(scene)
    scene.cache.check()


def test_what_fails_to_load_is_retained_no_longer(scene: Scene) -> None:
    run(scene, 1)
    again = request("again", 1)
    match = scene.prepare(again)
    scene.cache.commit_external_match(again, match, match.num_tokens, scene.allocate(again))
    (job,) = scene.cache.end_step().loads
    scene.cache.apply_report(WorkerReport({0: {job.job_id: failed(job, 1)}}))
    scene.cache.check()
    assert retained(scene) == 0
    scene.cache.request_finished("again")


def test_another_salt_retains_nothing_of_the_same_prompt(scene: Scene) -> None:
    scene.run_cold(request("plain", 1))
    asking = request("hinted", 1)
    asking.identity = type(asking.identity)(salt="another")  # type: ignore[misc]
    hinted(scene, asking)
    scene.run_cold(asking)
    flood(scene)
    assert in_memory(scene, 1) == 0
    assert retained(scene) == BLOCKS


def test_what_is_not_stored_is_not_retained(scene: Scene) -> None:
    assert run(scene, 1, store="none", retain=60) == {
        "store": "accepted",
        "retain": "clipped: no block of it is in memory",
    }
    assert retained(scene) == 0


def test_several_groups_retain_nothing_and_say_so() -> None:
    scene = GroupScene([full(), window(2)], [4096, 4096], hints="clients")
    asking = asked("hinted", 4)
    hints = hinted(scene, asking, retain="1m", store="prompt")
    scene.run_cold(asking)
    assert hints.described() == {
        "retain": "rejected: not for models with several KV cache groups",
        "store": "accepted",
    }


@pytest.mark.parametrize("seed", range(6))
def test_random_hints_leave_every_invariant_true(seed: int) -> None:
    """Hints on everything, clocks that jump, loads, cancelled requests and resets: P1, P2, P7 and P12."""
    rng = random.Random(seed)
    scene = Scene(rng.choice([8, 20, 40]), hints="clients")
    for number in range(200):
        asking = request(str(number), rng.randrange(12), rng.randrange(1, 7))
        scene.cache.on_new_request(asking)
        if rng.random() < 0.8:
            wanted = {"retain": rng.choice(["1s", 30, "2h", -1, "soon", 10**400])}
            hinted(scene, asking, **wanted, **({"store": rng.choice(["none", "prompt"])} if rng.random() < 0.2 else {}))
        match = scene.prepare(asking)
        if match.num_tokens and rng.random() < 0.8:
            scene.load(asking, match)
            assert scene.holds_content(asking, range(match.num_tokens // BLOCK_SIZE))
        if rng.random() < 0.8:
            scene.report(scene.step_computing(asking))
        scene.cache.request_finished(asking.request_id)
        scene.now += rng.choice([0.0, 1.0, 60.0, 1e6])
        if rng.random() < 0.03:
            scene.cache.reset()
        scene.cache.check()
        assert retained(scene) <= scene.cache.observe()['capacity_blocks{tier="memory"}'] // 5
    shot = scene.cache.observe()
    assert (shot["leases_held"], shot["open_plans"]) == (0, 0)
    assert shot["loaded_tokens"] + shot["failed_tokens"] == shot["committed_tokens"]
