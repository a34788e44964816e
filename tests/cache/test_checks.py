"""What the cache's parts verify of themselves: each check fails where its invariant is broken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpact.cache.jobs import PactPlan, TransferJobs
from kvpact.cache.needs.owed import Owed
from kvpact.cache.needs.runs import Run
from kvpact.errors import PactViolation
from kvpact.index.block_index import BlockIndex, SlotState
from kvpact_testkit.tier.stepped_executor import SteppedExecutor
from scenes import BLOCK_SIZE, Scene, SceneBlocks, SceneRequest, open_disk, tokens

KEY = bytes(31) + b"k"


def test_a_job_kept_under_a_number_that_it_does_not_have() -> None:
    jobs, index = TransferJobs(1, 1.0), BlockIndex(4)
    reservation = index.reserve([KEY], 0, 1)
    assert reservation is not None
    run = Run(0, 0, [KEY], [KEY], [0], slots=reservation.slots, block_ids=(5,))
    jobs.order_save(Owed("r", run), index.pin(KEY), 0.0)
    jobs.check()
    jobs.saves[7] = jobs.saves.pop(1)
    with pytest.raises(PactViolation, match="job 7"):
        jobs.check()


def test_blocks_held_for_a_load_that_is_not_under_way() -> None:
    jobs, plan = TransferJobs(1, 9.0), cast("Any", SimpleNamespace(request_id="r", deadline=1.0))
    jobs.bind(SceneBlocks())
    jobs.order_load(plan, [Run(0, 0, [KEY], [KEY], [0], slots=[0], block_ids=[5])], 0.0, synchronous=True)
    late = [(jobs.end_step(now).overdue, bool(jobs.given_up)) for now in (0.0, 1.5)]
    assert late == [((), False), ((1,), True)]
    jobs.check()
    del jobs.loads[1]
    with pytest.raises(PactViolation, match=r"have ended: \[1\]"):
        jobs.check()


def test_a_slot_that_is_filled_from_a_tier_and_given_up(tmp_path: Path) -> None:
    queue = SteppedExecutor(open_disk(tmp_path), 1 << 30)
    scene = Scene(16, tiers=[queue])
    scene.run_cold(SceneRequest("first", tokens(3 * BLOCK_SIZE + 1)))
    queue.advance()
    scene.cache.end_step()
    index = scene.cache.index
    index.clear()
    assert scene.cache.prepare_external_match(SceneRequest("again", tokens(3 * BLOCK_SIZE + 1)), 0) is None
    scene.cache.check()
    index.abandon([slot for slot in range(index.num_slots) if index.state(slot) is SlotState.RESERVED])
    with pytest.raises(PactViolation, match="filled from a tier"):
        scene.cache.check()
    scene.is_open = False


def test_a_plan_that_is_kept_of_a_request_that_has_finished() -> None:
    scene = Scene(16)
    request = SceneRequest("gone", tokens(3 * BLOCK_SIZE + 1))
    scene.run_cold(request)
    match = scene.prepare(request)
    scene.cache.check()
    scene.cache.request_finished("gone")
    scene.cache.check()
    plan = cast("PactPlan", match.query_result)
    scene.cache.ledger.open_plan(
        "gone", plan.blocks, block_size=BLOCK_SIZE, slots=(), now=0.0, promised_tokens=match.num_tokens
    )
    with pytest.raises(PactViolation, match=r"finished: \['gone'\]"):
        scene.cache.check()
    scene.is_open = False
