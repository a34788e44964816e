"""What one step waits for: its synchronous loads never exceed the budget, and nobody keeps bytes that are not used."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact.cache.load_budget import STEP_COPIES, LoadBudget
from kvpact.contract import ExternalKVMatch, LoadJob, StepWork
from kvpact.errors import PactViolation
from kvpact.memory.arena import Arena, ArenaSegment
from scenes import BLOCK_SIZE, PAGE, Scene, SceneRequest, tokens

BUDGET = 6
"""Blocks that a step waits for in these scenes."""


@dataclass
class Steps:
    """A cache that holds a prompt of each length from 1 to 8 blocks, and requests for them."""

    scene: Scene
    made: int = 0

    def request(self, blocks: int) -> SceneRequest:
        """A new request for the prompt of this length, of which memory holds all blocks."""
        self.made += 1
        return SceneRequest(f"r{self.made}", tokens(blocks * BLOCK_SIZE + 1, seed=blocks))

    def ask(self, request: SceneRequest) -> ExternalKVMatch:
        """A prepare: the whole prompt is promised, in whichever way it is loaded."""
        match = self.scene.cache.prepare_external_match(request, 0)
        assert match is not None
        assert match.num_tokens == len(request.token_ids) - 1
        return match

    def waits_for(self, blocks: int) -> bool:
        """Whether the step waits for a new request's load of that many blocks."""
        return not self.ask(self.request(blocks)).load_kv_async

    def commit(self, request: SceneRequest, match: ExternalKVMatch, blocks: int) -> None:
        """The engine takes the first `blocks` blocks of a match."""
        self.scene.cache.commit_external_match(request, match, blocks * BLOCK_SIZE, self.scene.allocate(request))

    def take(self, blocks: int) -> bool:
        """Ask and commit, as vLLM does; whether the step waits for it."""
        request = self.request(blocks)
        match = self.ask(request)
        self.commit(request, match, blocks)
        return not match.load_kv_async

    def end(self) -> tuple[LoadJob, ...]:
        """End the step; returns its loads, which all ranks have carried out."""
        work = self.scene.cache.end_step()
        self.scene.report(work)
        self.scene.cache.check()
        return work.loads

    def compute(self, request: SceneRequest) -> None:
        """The running step computes a token of the request."""
        table = self.scene.allocate(request)
        self.scene.cache.note_computed(request, 1, lambda: table)


def filled(ranks: int = 1, budget: int = BUDGET * PAGE, copies_per_block: int = 0) -> Steps:
    """Prompts of 1 to 8 blocks in memory."""
    scene = Scene(slots=40, ranks=ranks, sync_load_budget=budget, copies_per_block=copies_per_block)
    for blocks in range(1, 9):
        scene.run_cold(SceneRequest(f"cold{blocks}", tokens(blocks * BLOCK_SIZE, seed=blocks)))
    return Steps(scene)


@pytest.fixture
def steps() -> Steps:
    """One rank; a step waits for six blocks."""
    return filled()


def synchronous(loads: tuple[LoadJob, ...]) -> list[int]:
    """The blocks of each load that the step waits for."""
    return [len(job.slots) for job in loads if job.synchronous]


def test_what_does_not_fit_is_asynchronous_and_smaller_loads_still_fit(steps: Steps) -> None:
    assert [steps.take(blocks) for blocks in (4, 3, 2, 1)] == [True, False, True, False]
    loads = steps.end()
    assert synchronous(loads) == [4, 2]
    assert len(loads) == 4, "what is asynchronous is ordered all the same"


def test_a_load_beyond_the_whole_budget_is_always_asynchronous(steps: Steps) -> None:
    for _ in range(3):
        assert [steps.take(blocks) for blocks in (7, 6)] == [False, True]
        assert synchronous(steps.end()) == [6]


def test_two_requests_asked_about_before_their_commits_are_not_promised_the_same_bytes(steps: Steps) -> None:
    first, second = steps.request(4), steps.request(3)
    matches = [steps.ask(first), steps.ask(second)]
    assert [match.load_kv_async for match in matches] == [False, True]
    steps.commit(second, matches[1], 3)
    steps.commit(first, matches[0], 4)
    assert synchronous(steps.end()) == [4]


def test_a_request_that_is_never_admitted_keeps_no_bytes_in_later_steps(steps: Steps) -> None:
    blocked = steps.request(6)
    assert not steps.ask(blocked).load_kv_async
    assert not steps.waits_for(1)
    for _ in range(2):
        steps.end()
        assert steps.take(6)
        assert steps.ask(blocked).load_kv_async, "the step has no bytes left for it"
    steps.end()
    match = steps.ask(blocked)
    assert not match.load_kv_async
    steps.commit(blocked, match, 6)
    assert synchronous(steps.end()) == [6]


@pytest.mark.parametrize("ending", ["declined", "aborted", "finished", "asked again", "no time to ask"])
def test_bytes_that_are_not_used_are_free_in_the_same_step(steps: Steps, ending: str) -> None:
    request, cache = steps.request(6), steps.scene.cache
    match = steps.ask(request)
    assert not steps.waits_for(1)
    if ending == "declined":
        steps.commit(request, match, 0)
    elif ending == "aborted":
        cache.abort_external_match(request.request_id, match, "declined")
    elif ending == "finished":
        cache.request_finished(request.request_id)
    elif ending == "asked again":
        assert cache.prepare_external_match(request, 6 * BLOCK_SIZE) == ExternalKVMatch(0)
    else:
        cache.decline_external_match(request, 0)
    assert steps.waits_for(6)


def test_a_shorter_commit_leaves_the_rest_to_others(steps: Steps) -> None:
    request = steps.request(6)
    steps.commit(request, steps.ask(request), 2)
    assert [steps.take(blocks) for blocks in (5, 4)] == [False, True]
    assert synchronous(steps.end()) == [2, 4]


def test_p3_asked_again_the_plan_is_the_same_and_only_the_way_to_load_it_follows_the_step(steps: Steps) -> None:
    request = steps.request(5)
    first = steps.ask(request)
    assert steps.ask(request) == first, "its own bytes are no obstacle"
    steps.end()
    assert steps.take(2)
    second = steps.ask(request)
    assert second == ExternalKVMatch(first.num_tokens, True, first.query_result)
    steps.commit(request, second, 5)
    assert synchronous(steps.end()) == [2]


@pytest.mark.parametrize("kept", [0, 1], ids=["synchronous", "asynchronous"])
def test_p5_the_ranks_load_in_the_way_of_the_answer_that_the_engine_commits(steps: Steps, kept: int) -> None:
    request = steps.request(5)
    matches = [steps.ask(request)]
    steps.end()
    assert steps.take(2)
    matches.append(steps.ask(request))
    steps.commit(request, matches[kept], 5)
    assert [job.synchronous for job in steps.end()] == [True, not kept]


def test_an_answer_of_an_earlier_step_is_kept_and_counts_in_the_step_that_commits_it(steps: Steps) -> None:
    request = steps.request(5)
    match = steps.ask(request)
    steps.end()
    steps.commit(request, match, 5)
    assert [steps.take(blocks) for blocks in (2, 1)] == [False, True]
    assert synchronous(steps.end()) == [5, 1]


def test_a_step_that_is_abandoned_keeps_no_bytes() -> None:
    steps = filled()
    assert steps.take(6)
    steps.scene.cache.abandon_step(1)
    assert steps.take(5)
    assert synchronous(steps.end()) == [5]


def test_zero_makes_every_load_asynchronous() -> None:
    steps = filled(budget=0)
    assert not any(steps.take(blocks) for blocks in (1, 2, 8))
    assert synchronous(steps.end()) == []


def test_the_bytes_are_those_of_one_rank() -> None:
    steps = filled(ranks=2)
    assert [steps.take(blocks) for blocks in (7, 6, 1)] == [False, True, False]
    assert synchronous(steps.end()) == [6]


def test_with_unequal_ranks_the_largest_part_of_a_block_counts() -> None:
    arena = Arena([ArenaSegment.create(4, PAGE), ArenaSegment.create(4, 3 * PAGE)])
    assert (arena.rank_slot_bytes, arena.slot_bytes) == (3 * PAGE, 4 * PAGE)
    arena.close()


def test_beside_requests_that_run_copies_are_counted_too() -> None:
    """By a computing thread that gives 512 copies to a device, two blocks; the last step's requests are in this one."""
    steps = filled(copies_per_block=STEP_COPIES // 2)
    assert steps.take(6), "nothing else is computed"
    running = steps.request(1)
    steps.compute(running)
    assert synchronous(steps.end()) == [6]
    assert [steps.take(blocks) for blocks in (3, 1, 2, 1, 1)] == [False, True, False, True, False]
    steps.compute(running)
    assert synchronous(steps.end()) == [1, 1]
    assert not steps.take(3)
    steps.scene.cache.request_finished(running.request_id)
    assert steps.take(3), "it does not run any more"
    steps.end()


def test_a_step_in_which_only_loads_wait_counts_no_copies() -> None:
    steps = filled(copies_per_block=STEP_COPIES)
    running = steps.request(5)
    steps.compute(running)
    steps.end()
    assert not steps.waits_for(2)
    assert not steps.ask(running).load_kv_async, "it does not compute beside itself"
    steps.scene.cache.abort_external_match(running.request_id, None, "declined")
    steps.end()
    assert steps.take(6), "the last step has computed nothing"
    steps.end()


def test_where_no_thread_gives_copies_to_a_device_none_are_counted(steps: Steps) -> None:
    steps.compute(steps.request(1))
    steps.end()
    assert steps.take(6)


def decodes(steps: Steps, request: SceneRequest, seconds: float, count: int = 3) -> StepWork:
    """So many steps that compute a token of the request, each of which takes `seconds`; returns the last one's work."""
    for _ in range(count):
        steps.compute(request)
        work = steps.scene.cache.end_step()
        steps.scene.report(work)
        steps.scene.now += seconds
    return work


def test_beside_decodes_copies_follow_the_time_of_a_step() -> None:
    """Of 10 ms a tenth is 1,666 copies, and half of these are three blocks; of 1 ms not even one is."""
    steps = filled(copies_per_block=256)
    running = steps.request(1)
    decodes(steps, running, 10e-3)
    assert [steps.take(blocks) for blocks in (4, 3, 1)] == [False, True, False]
    steps.compute(running)
    work = steps.scene.cache.end_step()
    assert work.max_copies == 1666 - 3 * 256, "what the step waits for is part of it"
    assert work.max_load_bytes == pytest.approx(10e-3 * 55e9)
    steps.scene.report(work)
    decodes(steps, running, 1e-3)
    assert not steps.take(1)
    steps.compute(running)
    assert steps.scene.cache.end_step().max_copies == 166
    steps.scene.cache.abandon_step(1)


def test_a_step_without_copies_or_without_decodes_has_no_limits() -> None:
    steps = filled(copies_per_block=256)
    running = steps.request(1)
    work = decodes(steps, running, 10e-3, 5)
    assert (work.max_copies, work.max_load_bytes) == (None, None), "no copy is under way"
    steps.scene.cache.request_finished(running.request_id)
    assert steps.take(6), "nobody waits"
    work = steps.scene.cache.end_step()
    assert work.loads
    assert work.max_copies is None
    steps.scene.report(work)


def timed(*steps: tuple[float, int], block_bytes: int = 2 << 20) -> LoadBudget:
    """A budget after steps of one request, each with its seconds and its tokens, the first of which admits it."""
    budget = LoadBudget(256 << 20, block_bytes, 1)
    now = 0.0
    for seconds, tokens_computed in ((0.1, 4000), *steps, (0.0, 1)):
        budget.note_running(["r"])
        budget.end_step(now, tokens_computed)
        now += seconds
    return budget


def test_the_time_of_a_decode_step_is_that_of_steps_that_compute_no_prompt() -> None:
    assert timed().decode_seconds == 0.0, "a prompt alone"
    assert timed((0.01, 1), (0.2, 2000)).decode_seconds == pytest.approx(0.01)
    assert timed((0.01, 1), (0.3, 1), (0.02, 1)).decode_seconds == pytest.approx(0.02), "a pause is none"
    assert timed((0.01, 1), (0.02, 16), (0.03, 1), (0.04, 1)).decode_seconds == pytest.approx(0.03)


def test_after_a_time_without_requests_no_step_is_taken_for_a_long_one() -> None:
    budget = timed((0.01, 1))
    budget.request_finished("r")
    budget.note_running(["s"])
    budget.end_step(60.0, 1)
    assert budget.decode_seconds == pytest.approx(0.01)


def test_a_step_is_as_long_as_without_the_bytes_that_it_waits_for() -> None:
    """Else each step would wait for half of what the last one waited for, too."""
    budget = timed((0.01, 1))
    now = 0.011
    for _ in range(10):
        blocks = budget.blocks_beside_others
        assert blocks == 128, "275 MB are more than `sync_load_budget`" if now < 0.02 else "as before"
        assert budget.hold("new", blocks)
        budget.spend(blocks)
        budget.release("new")
        budget.note_running(["r"])
        budget.end_step(now, 1)
        now += 0.01 + blocks * (2 << 20) / 55e9
    assert budget.decode_seconds == pytest.approx(0.01)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.floats(1e-4, 0.1), st.integers(0, 400)), min_size=4, max_size=20),
    st.integers(1, 128),
    st.sampled_from([4096, 2 << 20, 1 << 28]),
)
def test_p11_no_step_beside_decodes_takes_more_than_its_shares_and_each_goes_on(
    played: list[tuple[float, int]], copies_per_block: int, block_bytes: int
) -> None:
    """Whatever is asked for, of steps of any time: a tenth for copies, half for bytes; one copy at least."""
    budget = LoadBudget(256 << 20, block_bytes, copies_per_block)
    now = 0.0
    recent: list[float] = []
    for number, (seconds, wanted) in enumerate(played):
        waits = len(recent) > 1 and budget.hold("new", wanted) and wanted
        budget.release("new")
        budget.spend(wanted if waits else 0)
        budget.note_running(["r"])
        limits = budget.end_step(now, 1, copies=True)
        awaited = wanted * block_bytes if waits else 0
        if limits is not None:
            copies = limits[0] + (wanted * copies_per_block if waits else 0)
            assert copies <= max(1, 0.1 * max(recent[-3:]) / 0.6e-6)
            assert limits[0] >= 1
            assert limits[1] <= max(recent[-3:]) * 55e9 * (1 + 1e-9)
            assert awaited <= min(256 << 20, 0.5 * max(recent[-3:]) * 55e9)
        else:
            assert number < 3, "a step of decodes was timed"
        if number:
            recent.append(seconds)
        now += seconds + awaited / 55e9


def test_an_account_in_disorder_is_found() -> None:
    budget = LoadBudget(6 * PAGE, PAGE)
    assert budget.hold("a", 2)
    budget.check()
    budget.spend(-3)
    with pytest.raises(PactViolation, match="of 6 blocks that a step waits for 7 are left"):
        budget.check()


ASK, COMMIT, PART, DECLINE, ABORT, FINISH, END = range(7)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=4),
    st.lists(
        st.tuples(st.sampled_from([ASK, ASK, ASK, COMMIT, COMMIT, *range(PART, END + 1)]), st.integers(0, 3)),
        min_size=4,
    ),
)
def test_no_step_waits_for_more_than_its_budget_whatever_is_asked_committed_and_dropped(
    lengths: list[int], moves: list[tuple[int, int]]
) -> None:
    """And a request is told to load asynchronously only for what others were told, or have committed, in this step."""
    steps = filled()
    requests = [steps.request(blocks) for blocks in lengths]
    told: dict[int, ExternalKVMatch] = {}
    used = 0

    def end() -> None:
        assert sum(synchronous(steps.end())) == used <= BUDGET

    for move, number in moves:
        at = number % len(lengths)
        held = sum(lengths[other] for other, match in told.items() if other != at and not match.load_kv_async)
        request, match = requests[at], told.pop(at, None)
        if move == END:
            end()
            told, used = {}, 0
        elif move == ASK:
            told[at] = steps.ask(request)
            assert told[at].load_kv_async == (lengths[at] > BUDGET - held - used)
        elif move == FINISH:
            steps.scene.cache.request_finished(request.request_id)
            requests[at] = steps.request(lengths[at])
        elif match is not None and move == ABORT:
            steps.scene.cache.abort_external_match(request.request_id, match, "declined")
        elif match is not None:
            blocks = {COMMIT: lengths[at], PART: 1 + number % lengths[at], DECLINE: 0}[move]
            steps.commit(request, match, blocks)
            used += 0 if match.load_kv_async else blocks
            if blocks:
                requests[at] = steps.request(lengths[at])
    end()
    steps.scene.close()
