"""P14 in one matrix: whatever falls ill costs its own hits only, and a healthy request beside it pays nothing.

Real tiers above real stores, real threads, the embedded engine. Each row has a patient and a healthy request, which
keeps its hits, its answer (the oracle compares every block that is read) and, in CPU time, its steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from epoch_engine import BLOCK_SIZE, SETTLE_SECONDS, EpochEngine, disk, prompt, store
from hook_time import STEP_CPU_SECONDS, HookTime
from kvpact.contract import LoadJob
from kvpact.identity.keys import RequestIdentity
from kvpact.ranges import BlockRange, RangeSet
from kvpact.tiers.base import Tier
from kvpact_testkit.engine import JobBehavior, Request, RequestStatus, SimulatedWorker
from kvpact_testkit.engine.simulated_worker import NEVER, Job
from other_user import OTHER_USER, as_user, needs_root, open_place
from servers.object_server import CREDENTIALS, object_server
from servers.redis_server import redis_server
from sick import Sickness, SickTier

BLOCKS = 8
STORED = BLOCKS * BLOCK_SIZE
SOON = 20
"""Requests after which an ill tier must have been left alone."""
LOAD_DEADLINE_S = 60.0
TIMEOUT_S = 1.0
"""After which an ill tier has failed an operation; until then its writes may hold all slots."""


FAITHFUL = JobBehavior()


class Ward(EpochEngine):
    """An engine whose steps are measured, and that knows prompts which only the healthy tier holds."""

    def __init__(self, ill: SickTier, healthy: Tier, **settings: Any) -> None:
        super().__init__(ill, healthy, num_slots=96, conduct=self._conduct, **settings)
        self.ill = ill
        self.next_load = FAITHFUL
        """How the rank treats the next load; all others it carries out as it should."""
        self.hooks = HookTime(self.cache)
        ill.is_empty = True
        self.below = [prompt(BLOCKS, 10 + number) for number in range(12)]
        self.store(*self.below)
        self.forget_memory(1)
        ill.is_empty = False
        assert self.serve(self.below.pop()) == STORED

    def _conduct(self, rank: int, job: Job) -> JobBehavior:
        if not isinstance(job, LoadJob):
            return FAITHFUL
        conduct, self.next_load = self.next_load, FAITHFUL
        return conduct

    def until_written(self) -> None:
        """Until the healthy tier has written what it was given: writes hold slots, also where all are well."""
        until = time.monotonic() + SETTLE_SECONDS
        while self.queues[1].under_way:
            assert time.monotonic() < until, "the healthy tier writes for ever"
            self.step()

    def step_for(self, seconds: float) -> None:
        """As an idle engine does."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.step()

    def slowest_step(self, tokens: Sequence[int]) -> float:
        """CPU seconds of the hooks in one step, while this is served from the healthy tier."""
        self.hooks.begin()
        assert self.serve(tokens) == STORED, "from the healthy tier"
        return self.hooks.worst.cpu

    def require_that_others_pay_nothing(self) -> None:
        """From memory, and from the healthy tier; one step in all may be unlucky, not one of each request."""
        tokens = prompt(BLOCKS, 90)
        self.serve(tokens)
        self.until_written()
        assert self.serve(tokens) == STORED, "from memory"
        assert min(self.slowest_step(self.below.pop()) for _ in range(4)) <= STEP_CPU_SECONDS
        assert self.wrong == []


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Callable[[], str]]]:
    """Of a new, empty store of each kind."""
    with (
        redis_server(tmp_path_factory.mktemp("redis")) as redis,
        object_server() as objects,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)

        def new_redis() -> str:
            with redis.client() as client:
                client.flushall()
            return f"redis://{redis.address}?timeout=500ms"

        numbers = iter(range(1000))
        yield {
            "redis": new_redis,
            "s3": lambda: f"s3://bucket/{next(numbers)}?endpoint={objects.endpoint}&timeout=2s&allow_http=true",
            "dir": lambda: f"dir://{tmp_path_factory.mktemp('dir')}?capacity=64MiB",
        }


@pytest.fixture(params=["disk", "dir", "redis", "s3"])
def ill(request: pytest.FixtureRequest, urls: dict[str, Callable[[], str]], tmp_path: Path) -> SickTier:
    return SickTier(disk(tmp_path / "ill") if request.param == "disk" else store(urls[request.param]()))


@pytest.fixture
def ward(ill: SickTier, urls: dict[str, Callable[[], str]]) -> Iterator[Ward]:
    with ExitStack() as ends:
        ward = Ward(ill, store(urls["dir"]()), load_deadline=LOAD_DEADLINE_S, prepare_deadline=TIMEOUT_S)
        ends.callback(ward.close)
        ends.callback(ill.cure)
        yield ward


@pytest.mark.parametrize("sickness", Sickness)
def test_p14_an_ill_tier_costs_its_own_hits_only(ward: Ward, sickness: Sickness) -> None:
    ward.ill.fall_ill(sickness)
    for number in range(SOON):
        ward.serve(prompt(BLOCKS, 200 + number))
    ward.step_for(1.2 * TIMEOUT_S)
    ward.until_written()
    ward.require_that_others_pay_nothing()
    ward.ill.cure()
    ward.skew += 120.0
    ward.settle()
    assert ward.cache.observe()["open_plans"] == 0


RANKS = {
    Sickness.HANG: JobBehavior(copy_after_steps=NEVER),
    Sickness.SLOW: JobBehavior(copy_after_steps=100),
    Sickness.LIE: JobBehavior(times_reported=2),
    Sickness.REFUSE: JobBehavior(failed_blocks=RangeSet.of(BlockRange(0, BLOCKS))),
    Sickness.RAISE: JobBehavior(times_reported=0),
}


@pytest.mark.parametrize("sickness", RANKS)
@pytest.mark.parametrize("ill", ["dir"], indirect=True)
def test_p14_a_load_that_a_rank_does_not_carry_out_costs_its_own_hits_only(ward: Ward, sickness: Sickness) -> None:
    ward.next_load = RANKS[sickness]
    ward.forget_local()
    patient = ward.add(ward.below.pop())
    while ward.next_load is not FAITHFUL:
        ward.step()
    ward.require_that_others_pay_nothing()
    ward.skew += 2 * LOAD_DEADLINE_S
    ward.run(patient)
    assert patient.status is RequestStatus.FINISHED
    for worker in ward.engine.workers:
        assert isinstance(worker, SimulatedWorker)
        worker.go_on()
    ward.settle()
    assert ward.cache.observe()["open_plans"] == 0
    assert ward.wrong == []


@pytest.mark.parametrize("ill", ["dir"], indirect=True)
def test_p14_blocks_that_another_connector_failed_to_load_cost_their_own_request_only(ward: Ward) -> None:
    """They are named in the middle of its life, when what was computed behind them is being saved."""
    patient = ward.add(prompt(BLOCKS, 300), outputs=40)
    while patient.num_computed_tokens < STORED:
        ward.step()
    (blocks,) = patient.block_ids
    ward.cache.distrust_blocks([blocks[2]], {patient.request_id: blocks})
    ward.require_that_others_pay_nothing()
    ward.skew += 2 * LOAD_DEADLINE_S
    ward.run(patient)
    ward.settle()
    assert ward.cache.observe()["open_plans"] == 0


SWAPS_THE_FOLDER = """
os.rename(place / "kvpact", place / "taken")
(place / "kvpact").mkdir()
(place / "kvpact" / "lock").touch()
print(json.dumps(attempt(os.listdir, place / "taken")))
"""


@needs_root
def test_p14_another_user_of_the_machine_costs_the_tier_that_he_reaches(urls: dict[str, Callable[[], str]]) -> None:
    """He may write to the directory that a disk tier was given, and puts a folder of his in the place of ours."""
    with open_place() as place, ExitStack() as ends:
        ward = Ward(SickTier(disk(place)), store(urls["dir"]()), prepare_deadline=TIMEOUT_S)
        ends.callback(ward.close)
        assert as_user(OTHER_USER, SWAPS_THE_FOLDER, place) == "Permission denied"
        for number in range(SOON):
            ward.serve(prompt(BLOCKS, 200 + number))
        ward.until_written()
        ward.require_that_others_pay_nothing()


UNKEYABLE = {
    "a negative token": ([-1, *prompt(2, 7)], RequestIdentity()),
    "a token beyond 32 bits": ([2**40, *prompt(2, 7)], RequestIdentity()),
    "a salt with half a character": (prompt(2, 7), RequestIdentity(salt="\ud800")),
}


@pytest.mark.parametrize("what", UNKEYABLE)
@pytest.mark.parametrize("ill", ["dir"], indirect=True)
def test_p14_a_request_without_keys_costs_its_own_hits_only(ward: Ward, what: str) -> None:
    tokens, identity = UNKEYABLE[what]
    patients = [ward.engine.add_request(Request(f"patient {n}", tokens, 2, identity=identity)) for n in range(3)]
    ward.run(*patients)
    assert {patient.status for patient in patients} == {RequestStatus.FINISHED}
    ward.require_that_others_pay_nothing()
