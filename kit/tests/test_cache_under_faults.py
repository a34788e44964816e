"""The cache stands every fault of the kit: what it serves is right, what it holds comes back, nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpact.metrics import series
from kvpact.tiers.executor import TierExecutor
from kvpact_testkit.cache.engine_harness import HarnessSettings, prompt
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.cache.subjects import pact_cache
from kvpact_testkit.engine import Engine, EngineConfig, Request
from kvpact_testkit.faults import Chances, Fault, FaultPlan, Faults, FaultyTier, Operation
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from polling import until
from rank_faults import RankFaultPlan, RankFaults
from scenes import Scene, SceneRequest, open_disk, tokens

DOCUMENTS = 40
LENGTH = 33


class FaultyDisk:
    """A scene above a disk with faults, which has documents that memory has not."""

    def __init__(self, path: Path, queue: type[TierExecutor] = SteppedExecutor, **settings: Any) -> None:
        self.faults = Faults(FaultPlan(seed=5))
        tier = FaultyTier(open_disk(path, slots=16 * DOCUMENTS), self.faults)
        self.queue = SteppedExecutor(tier, 1 << 30) if queue is SteppedExecutor else TierExecutor(tier, 2, 1 << 30)
        self.scene = Scene(24, tiers=[self.queue], recompute_if_faster=False, **settings)

    def store(self, seed: int) -> None:
        self.scene.run_cold(SceneRequest(f"first {seed}", tokens(LENGTH, seed)))
        self.settle()
        self.scene.forget_memory()

    def settle(self) -> None:
        self.scene.cache.end_step()
        self.advance()
        self.scene.cache.end_step()

    def advance(self) -> None:
        if isinstance(self.queue, SteppedExecutor):
            self.queue.advance()
        else:
            until(lambda: self.queue.under_way == 0)

    def load(self, name: str, seed: int) -> int:
        """Blocks that a request with this document loads, each of which must be its own."""
        scene, request = self.scene, SceneRequest(name, tokens(LENGTH, seed))
        while (match := scene.cache.prepare_external_match(request, 0)) is None:
            scene.cache.end_step()
            self.advance()
        if match.num_tokens:
            scene.load(request, match)
        scene.cache.request_finished(name)
        blocks = match.num_tokens // 4
        assert not blocks or scene.holds_content(request, range(blocks))
        return blocks

    def count(self, name: str, label: str = "") -> float:
        return self.scene.cache.observe()[series(name, label)]


@pytest.mark.parametrize("fault", [Fault.DAMAGE, Fault.PARTIAL, Fault.ERROR])
def test_h22_what_a_tier_damages_is_never_served_and_the_next_write_mends_it(tmp_path: Path, fault: Fault) -> None:
    disk = FaultyDisk(tmp_path)
    short = 0
    for seed in range(DOCUMENTS):
        disk.store(seed)
        disk.faults.arm(Operation.GET, fault)
        blocks = disk.load(f"damaged {seed}", seed)
        short += blocks < 8
        disk.store(seed)  # computed again, so what is lost is written again
        assert disk.load(f"mended {seed}", seed) == 8
    assert short >= DOCUMENTS / 2, "hardly anything was damaged"
    assert len(disk.faults.history) == DOCUMENTS
    assert (disk.count("leases_held"), disk.scene.room()) == (0, 24)


def test_h22_every_tenth_operation_of_a_tier_goes_wrong_and_what_is_served_is_right(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    some = {Fault.ERROR: 0.03, Fault.PARTIAL: 0.03, Fault.DAMAGE: 0.04}
    chances: Chances = {Operation.GET: some, Operation.PUT: {Fault.ERROR: 0.05, Fault.PARTIAL: 0.05}}
    disk.faults.plan = FaultPlan(seed=5, chances=chances)
    loaded = 0
    for turn in range(300):
        seed = turn % 10
        loaded += disk.load(f"turn {turn}", seed)
        disk.store(seed)
        disk.scene.now += 1.0
    assert len(disk.faults.history) > 20
    assert loaded > 0.7 * 8 * 300, "some faults cost more hits than their own"
    assert disk.count("leases_held") == 0


def test_h10_a_read_that_hangs_costs_its_request_a_deadline_and_others_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path, TierExecutor, prepare_deadline="2s")
    scene = disk.scene
    for seed in range(2):
        disk.store(seed)
    disk.faults.arm(Operation.GET, Fault.HANG)
    request = SceneRequest("hangs", tokens(LENGTH, 0))
    assert scene.cache.prepare_external_match(request, 0) is None
    scene.cache.end_step()
    assert disk.faults.until_waiting(1, 10)
    other = SceneRequest("beside it", tokens(LENGTH, 1))
    scene.load(other, scene.prepare(other))
    assert scene.holds_content(other, range(8)), "the other thread reads for others"
    scene.now += 1.9
    assert scene.cache.prepare_external_match(request, 0) is None
    scene.now += 0.2
    match = scene.cache.prepare_external_match(request, 0)
    assert match is not None
    assert match.num_tokens == 0
    for name in ("hangs", "beside it"):
        scene.cache.request_finished(name)
    assert disk.count("leases_held") == 0
    disk.faults.release()
    scene.settle_tiers()
    assert disk.load("later", 0) == 8, "what came late is there for whoever asks next"


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What an engine without a cache says to the requests of `requests`."""
    engine = Engine(EngineConfig(num_blocks=400, block_size=4))
    engine.run([*requests()])
    return {name: request.output_token_ids for name, request in engine.finished.items()}


def requests() -> Iterator[Request]:
    for seed in range(6):
        for again in range(4):
            yield Request(f"{seed}, {again}", [*prompt(6, seed=seed), again], 6)


@pytest.mark.parametrize("mode", ["native", "vllm-0.33", "vllm-0.30"])
@pytest.mark.parametrize(
    ("hazard", "plan"),
    [
        ("H40", RankFaultPlan(seed=1, lost=0.3)),
        ("H45", RankFaultPlan(seed=2, late=0.4, repeated=0.3, in_pieces=0.2)),
        ("H40 and H45", RankFaultPlan(seed=3, late=0.3, repeated=0.2, in_pieces=0.2, lost=0.1)),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_h40_h45_whatever_ranks_say_or_leave_unsaid_answers_are_right_and_nothing_stays_held(
    tmp_path: Path, expected: dict[str, list[int]], mode: str, hazard: str, plan: RankFaultPlan
) -> None:
    """The engine's oracle reads every block: one that counted before the last rank had copied it would be seen."""
    scene = CacheHarness(pact_cache, tmp_path, HarnessSettings(mode=mode, ranks=2, num_slots=64, num_blocks=64))
    faults = RankFaults(plan)
    scene.conduct = faults.conduct
    for again in range(4):
        asked = [request for request in requests() if request.request_id.endswith(f", {again}")]
        for request in asked:
            scene.engine.add_request(request)
        scene.run(*asked)
        scene.settle()
        scene.forget_local()
        for request in asked:
            assert scene.engine.finished[request.request_id].output_token_ids == expected[request.request_id], hazard
    assert len(faults.history) > 20
    assert scene.engine.counts.wrong_reads == 0
    assert scene.engine.counts.external_hits > 0.5 * 3 * 6 * 24, "faults of reports cost hits"
    scene.rest()
