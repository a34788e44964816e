"""P14 in one matrix: whatever falls ill costs its own hits only, and a healthy request beside it pays nothing.

Real tiers above real stores, real threads, the embedded engine. Each row has a patient and a healthy request, which
keeps its hits, its answer (the oracle compares every block that is read) and, in CPU time, its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from epoch_engine import BLOCK_SIZE, EpochEngine, disk, prompt, store
from hook_time import STEP_CPU_SECONDS, HookTime, StepTime
from kvpact.engine import RequestStatus
from kvpact.tiers.base import Tier
from object_server import CREDENTIALS, object_server
from servers import redis_server
from sick import Sickness, SickTier

BLOCKS = 8
STORED = BLOCKS * BLOCK_SIZE
SOON = 20
"""Requests after which an ill tier must have been left alone."""
AT_REST = 500
"""Steps in which the healthy tier has written what it was given, or its writes would hold the slots."""


class Ward(EpochEngine):
    """An engine whose steps are measured, and that knows prompts which only the healthy tier holds."""

    def __init__(self, ill: SickTier, healthy: Tier, **settings: object) -> None:
        super().__init__(ill, healthy, num_slots=96, **settings)
        self.ill = ill
        self.hooks = HookTime(self.cache)
        ill.is_empty = True
        self.below = [prompt(BLOCKS, 10 + number) for number in range(12)]
        self.store(*self.below)
        self.forget_memory(1)
        ill.is_empty = False
        assert self.serve(self.below.pop()) == STORED

    def slowest_step(self, tokens: Sequence[int]) -> float:
        """CPU seconds of the hooks in one step, while this is served from the healthy tier."""
        self.hooks.steps = [StepTime()]
        assert self.serve(tokens) == STORED, "from the healthy tier"
        return max(step.cpu for step in self.hooks.steps)

    def require_that_others_pay_nothing(self) -> None:
        """From memory, and from the healthy tier; one step in all may be unlucky, not one of each request."""
        tokens = prompt(BLOCKS, 90)
        self.serve(tokens)
        self.step(20)
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
        ward = Ward(ill, store(urls["dir"]()))
        ends.callback(ward.close)
        ends.callback(ill.cure)
        yield ward


@pytest.mark.parametrize("sickness", Sickness)
def test_p14_an_ill_tier_costs_its_own_hits_only(ward: Ward, sickness: Sickness) -> None:
    ward.ill.fall_ill(sickness)
    for number in range(SOON):
        ward.serve(prompt(BLOCKS, 200 + number))
    ward.step(AT_REST)
    ward.require_that_others_pay_nothing()
    ward.ill.cure()
    ward.skew += 120.0
    ward.settle()
    assert ward.cache.ledger.is_quiescent


UNKEYABLE = {
    "a negative token": lambda ward: ward.add([-1, *prompt(2, 7)]),
    "a token beyond 32 bits": lambda ward: ward.add([2**40, *prompt(2, 7)]),
}


@pytest.mark.parametrize("what", UNKEYABLE)
def test_p14_a_request_without_keys_costs_its_own_hits_only(ward: Ward, what: str) -> None:
    patients = [UNKEYABLE[what](ward) for _ in range(3)]
    ward.run(*patients)
    assert {patient.status for patient in patients} == {RequestStatus.FINISHED}
    ward.require_that_others_pay_nothing()
