"""States that the engine offers: each is saved once its row has a key, and its block is held until then.

The engine is played by hand: it says which states it offers in a step and which tokens it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from group_scenes import BLOCK, GroupPool, GroupScene, states
from kvpact.contract import KVCacheBlockView, StepWork
from kvpact.identity.groups import GroupKind, KVCacheGroup
from scenes import SceneRequest, tokens

STATE_GROUP = 1

DRAFTED = KVCacheGroup(GroupKind.FULL, BLOCK, drops_last=True)
"""A draft model's layers: a key covers the token after its row."""


class Offering(GroupPool):
    """An engine that offers states by name, counts the holds on its blocks, and names a block by `hashes`."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.offers: list[tuple[int, int, int]] = []
        self.held: dict[int, int] = {}
        self.hashes: dict[int, bytes] = {}
        self.waiting: list[str] = []

    def get_block(self, block_id: int) -> KVCacheBlockView:
        return KVCacheBlockView(block_id, 1, block_id == 0, self.hashes.get(block_id, b"as it was"), 0)

    def touch(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.held[block_id] = self.held.get(block_id, 0) + 1

    def free_blocks(self, block_ids: Sequence[int], *, evict_first: bool = False) -> None:
        for block_id in block_ids:
            self.held[block_id] -= 1
            if not self.held[block_id]:
                del self.held[block_id]

    def get_block_ids(self, request_id: str) -> Sequence[Sequence[int]]:
        chain, table = self.tables[request_id]
        return chain, [0] * len(table)  # a state is saved from the block that is offered alone

    def offered_states(self, request_id: str) -> Sequence[tuple[int, int, int]]:
        return self.offers

    def waiting_requests(self) -> Sequence[str]:
        return self.waiting


class Drafting(GroupScene):
    """A request of four units of 16 tokens, then of answers; keys cover the next token."""

    def __init__(self, **settings: Any) -> None:
        super().__init__((DRAFTED, states()), (4096, 4096), **settings)
        self.engine = Offering(self.groups)
        self.cache.bind_scheduler_context(self.engine)
        self.all_tokens = tokens(8 * BLOCK)
        self.request = SceneRequest("a", self.all_tokens[:BLOCK])

    def step(self, known: int, computed: int, offered: int | None = None, block_id: int = 99) -> StepWork:
        """The engine knows so many tokens and computes up to `computed`; it offers the state at the end of a unit."""
        self.request.token_ids = self.all_tokens[:known]
        chain = [*range(1, 1 + 8)]
        self.engine.tables["a"] = (chain, [*range(11, 19)])
        self.engine.offers = [(STATE_GROUP, offered, block_id)] if offered is not None else []
        self.cache.note_computed(self.request, computed, lambda: chain)
        work = self.cache.end_step()
        self.cache.check()
        return work

    def saved_states(self, *works: StepWork) -> list[tuple[int, int]]:
        """Unit and engine's block of each state that these steps save."""
        for work in works:
            self.report(work)
        jobs = [job for work in works for job in work.saves if job.group_id == STATE_GROUP]
        return [(job.start_block + at, block) for job in jobs for at, block in enumerate(job.block_ids)]


@pytest.fixture
def scene() -> Drafting:
    return Drafting()


def test_a_state_is_saved_wherever_its_step_ends(scene: Drafting) -> None:
    """Drafts were accepted beyond the boundary: the step after them offers the state, and knows its key."""
    first = scene.step(known=15, computed=18)
    second = scene.step(known=19, computed=22, offered=0)
    assert scene.saved_states(first, second) == [(0, 99)]
    assert not scene.engine.held
    assert scene.cache.observe()["dropped_blocks"] == 0


def test_a_state_is_held_until_the_next_token_is_known(scene: Drafting) -> None:
    """The boundary lies at the last token that is known, which the key does not cover alone."""
    first = scene.step(known=16, computed=19, offered=0)
    assert scene.saved_states(first) == []
    assert scene.engine.held == {99: 1}
    second = scene.step(known=18, computed=21)
    assert scene.saved_states(second) == [(0, 99)]
    assert not scene.engine.held
    again = SceneRequest("b", scene.all_tokens[:18])
    assert scene.prepare(again).num_tokens == 16


def test_a_state_that_comes_after_its_row_was_saved_is_saved(scene: Drafting) -> None:
    """After a preemption the engine stops at another boundary than before."""
    first = scene.step(known=40, computed=40)
    assert scene.saved_states(first) == []
    second = scene.step(known=40, computed=40, offered=0)
    assert scene.saved_states(second) == [(0, 99)]


def test_one_block_is_held_for_a_request_and_group(scene: Drafting) -> None:
    """Tokens that vLLM withdraws: the engine offers the next boundary's state before the first one's key is known."""
    scene.step(known=16, computed=16, offered=0, block_id=98)
    scene.step(known=16, computed=16, offered=0, block_id=99)
    assert scene.engine.held == {99: 1}
    assert scene.saved_states(scene.step(known=18, computed=18)) == [(0, 99)]
    assert scene.cache.observe()["dropped_blocks"] == 1


@pytest.mark.parametrize("why", ["renamed", "reset", "distrusted", "preempted", "ended", "given up"])
def test_a_held_state_is_dropped(scene: Drafting, why: str) -> None:
    """The engine gave the block another name, the weights changed, its rows are garbage, or nobody will name it."""
    scene.step(known=16, computed=16, offered=0)
    assert scene.engine.held == {99: 1}
    match why:
        case "renamed":
            scene.engine.hashes[99] = b"of something else"
        case "reset":
            scene.cache.reset()
            assert not scene.engine.held
        case "distrusted":
            scene.cache.distrust_blocks([1], {"a": [1]})
        case "preempted":
            scene.engine.waiting.append("a")
            scene.cache.end_step()
            assert not scene.engine.held, "the engine needs the room"
        case "ended":
            scene.cache.request_finished("a")
        case "given up":
            scene.cache.give_up_saves()
    if why != "ended":
        assert scene.saved_states(scene.step(known=18, computed=18)) == []
    assert not scene.engine.held
    scene.cache.check()
    assert scene.cache.observe()["dropped_blocks"] >= 1


def test_a_request_that_is_in_no_step_keeps_its_hold(scene: Drafting) -> None:
    """A step may have no room for all running requests."""
    scene.step(known=16, computed=16, offered=0)
    scene.cache.end_step()
    assert scene.engine.held == {99: 1}
    assert scene.saved_states(scene.step(known=18, computed=18)) == [(0, 99)]


def test_a_state_of_rows_that_wait_for_their_save_is_saved_behind_them() -> None:
    """A prompt is saved in pieces: the state's row has no place in memory yet."""
    scene = Drafting()
    scene.cache.saves.put_off.piece_blocks = 1
    scene.cache.end_step()
    works = [scene.step(known=70, computed=70), scene.step(known=70, computed=70, offered=3)]
    while scene.cache.has_pending_work:
        for work in works:
            scene.report(work)
        works.append(scene.cache.end_step())
        if not works[-1].saves and not scene.cache.under_way["saves"]:
            break
    assert scene.saved_states(*works) == [(3, 99)]
    assert not scene.engine.held
    assert scene.prepare(SceneRequest("b", scene.all_tokens[:70])).num_tokens == 64
