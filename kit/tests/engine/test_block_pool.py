"""The pool: eviction order, reference counts, the rule for a cursor, and misuse through a connector's context."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvpact.contract import SchedulerContext
from kvpact.errors import PactViolation
from kvpact_testkit.engine import BlockPool, Engine, EngineConfig, Request


def free_ids(pool: BlockPool, after: int | None = None) -> list[int]:
    return [view.block_id for view in pool.iter_free(after)]


def test_blocks_are_given_away_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(6)
    assert free_ids(pool) == [1, 2, 3, 4, 5]
    assert pool.allocate(3, 0) == [1, 2, 3]
    pool.free([3, 1])
    assert free_ids(pool) == [4, 5, 3, 1]
    assert free_ids(pool, after=5) == [3, 1]
    assert pool.allocate(4, 0) == [4, 5, 3, 1]
    with pytest.raises(PactViolation, match="1 blocks wanted, 0 are free"):
        pool.allocate(1, 0)


def test_the_hash_in_a_view_names_the_group() -> None:
    """As in vLLM: a connector's memo of one group's block is void once the block holds another group's."""
    pool = BlockPool(4, num_groups=2)
    blocks = [*pool.allocate(1, 0), *pool.allocate(1, 1)]
    assert [pool.view(block).block_hash for block in blocks] == [None, None]
    assert all(pool.publish(block, b"name") for block in blocks)
    first, second = (pool.view(block).block_hash for block in blocks)
    assert first is not None
    assert second is not None
    assert first != second


def test_a_published_block_is_found_until_it_is_given_away() -> None:
    pool = BlockPool(4, num_groups=2)
    (block,) = pool.allocate(1, 1)
    assert pool.publish(block, b"name")
    assert pool.find(b"name", 1) == block
    assert pool.find(b"name", 0) is None
    pool.free([block])
    assert pool.find(b"name", 1) == block
    pool.touch(block)
    pool.free([block])
    pool.allocate(3, 0)
    assert pool.find(b"name", 1) is None
    assert pool.evictions == 1


def test_the_second_block_of_one_content_stays_private() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2, 0)
    assert pool.publish(first, b"name")
    assert not pool.publish(second, b"name")
    with pytest.raises(PactViolation, match="different hashes"):
        pool.publish(first, b"other")
    pool.unpublish_all()
    assert pool.find(b"name", 0) is None
    pool.check({first: 1, second: 1})


def test_random_use_keeps_the_pool_sound() -> None:
    random = Random(1)
    pool = BlockPool(20)
    references: Counter[int] = Counter()
    for step in range(3000):
        action = random.randrange(4)
        held = list(references.elements())
        if action == 0 and pool.num_free:
            references.update(pool.allocate(random.randrange(1, pool.num_free + 1), 0))
        elif action == 1 and held:
            block = random.choice(held)
            pool.free([block])
            references -= Counter([block])
        elif action == 2:
            block = random.randrange(1, 20)
            pool.touch(block)
            references[block] += 1
        elif action == 3 and held:
            block = random.choice(held)
            if pool.block_hash[block] is None:
                pool.publish(block, str(step).encode())
        pool.check(references)


def test_check_finds_a_reference_that_nobody_has() -> None:
    pool = BlockPool(4)
    pool.allocate(1, 0)
    with pytest.raises(PactViolation, match="block 1 has 1 references, its holders account for 0"):
        pool.check({})


def test_a_block_freed_too_often_is_an_error() -> None:
    pool = BlockPool(4)
    with pytest.raises(PactViolation, match="nobody holds it"):
        pool.free([2])


class TestCursor:
    """`iter_free`: anything may move but the cursor."""

    def test_blocks_may_come_and_go_around_the_cursor(self) -> None:
        pool = BlockPool(8)
        (early,) = pool.allocate(1, 0)
        walk = pool.iter_free()
        assert next(walk).block_id == 2
        pool.touch(4)  # leaves ahead of the cursor
        pool.free([early])  # comes back at the tail
        assert [view.block_id for view in walk] == [3, 5, 6, 7, 1]

    def test_a_cursor_that_left_the_queue_is_an_error(self) -> None:
        pool = BlockPool(8)
        walk = pool.iter_free()
        cursor = next(walk).block_id
        pool.touch(cursor)
        with pytest.raises(PactViolation, match="block 1, left the free queue"):
            next(walk)

    def test_a_cursor_that_left_and_came_back_is_an_error_too(self) -> None:
        pool = BlockPool(8)
        walk = pool.iter_free()
        cursor = next(walk).block_id
        pool.touch(cursor)
        pool.free([cursor])
        with pytest.raises(PactViolation, match="start again"):
            next(walk)

    @pytest.mark.parametrize("block", [0, 1])
    def test_a_walk_cannot_start_behind_a_block_that_is_not_free(self, block: int) -> None:
        pool = BlockPool(8)
        pool.allocate(1, 0)
        with pytest.raises(PactViolation, match="not in the free queue"):
            pool.iter_free(after_block=block)


class TestContext:
    """What a connector gets of the scheduler."""

    def scene(self) -> Engine:
        engine = Engine(EngineConfig(num_blocks=12))
        engine.add_request(Request("r", list(range(40)), 8))
        engine.add_request(Request("queued", list(range(500, 640)), 8))
        engine.step()
        return engine

    def test_it_is_a_scheduler_context(self) -> None:
        assert isinstance(self.scene().context, SchedulerContext)

    def test_blocks_and_queues_are_shown(self) -> None:
        engine = self.scene()
        (blocks,) = engine.context.get_block_ids("r")
        assert len(blocks) == 3
        views = [engine.context.get_block(block) for block in blocks]
        assert [view.ref_cnt for view in views] == [1, 1, 1]
        assert [view.block_hash is not None for view in views] == [True, True, False]
        assert engine.context.get_block(0).is_null
        assert engine.context.waiting_requests() == ("queued",)
        assert engine.context.get_block_ids("queued") == ((),)

    def test_a_touched_block_outlives_its_request_and_is_not_given_away(self) -> None:
        engine = self.scene()
        held = engine.context.get_block_ids("r")[0][:2]
        engine.context.touch(held)
        engine.cancel("r")
        engine.cancel("queued")
        engine.run([Request(f"n{i}", list(range(i * 100, i * 100 + 140)), 2) for i in range(4)])
        assert [engine.context.get_block(block).ref_cnt for block in held] == [1, 1]
        engine.check()
        with pytest.raises(PactViolation, match="still held at rest"):
            engine.check_nothing_held()
        engine.context.free_blocks(held)
        engine.check_nothing_held()

    def test_freeing_what_was_not_touched_is_an_error_and_frees_nothing(self) -> None:
        engine = self.scene()
        first, second = engine.context.get_block_ids("r")[0][:2]
        engine.context.touch([first])
        with pytest.raises(PactViolation, match=f"block {second} is freed 1 times, touched 0 times"):
            engine.context.free_blocks([first, second])
        with pytest.raises(PactViolation, match="freed 2 times, touched 1 times"):
            engine.context.free_blocks([first, first])
        assert engine.context.get_block(first).ref_cnt == 2
        engine.context.free_blocks([first])
        engine.check()

    @pytest.mark.parametrize("block", [-1, 12])
    def test_a_foreign_block_is_an_error(self, block: int) -> None:
        context = self.scene().context
        with pytest.raises(PactViolation, match="does not exist"):
            context.get_block(block)
        with pytest.raises(PactViolation, match="does not exist"):
            context.touch([1, block])
        assert not context.held

    def test_the_null_block_cannot_be_held(self) -> None:
        with pytest.raises(PactViolation, match="null block"):
            self.scene().context.touch([0])

    def test_blocks_of_an_unknown_request_are_an_error(self) -> None:
        with pytest.raises(PactViolation, match="no request nobody"):
            self.scene().context.get_block_ids("nobody")

    def test_lazy_offload_walks_the_queue_from_where_it_stopped(self) -> None:
        """What the cursor is for: look at what is evicted next, a few blocks a step."""
        engine = self.scene()
        engine.cancel("queued")
        engine.cancel("r")
        seen: list[int] = []
        cursor = None
        while True:
            walk = engine.context.iter_free_blocks(after_block=cursor)
            views = [view for view, _ in zip(walk, range(4), strict=False)]
            if not views:
                break
            seen += [view.block_id for view in views]
            cursor = seen[-1]
        assert sorted(seen) == list(range(1, 12))
        assert [engine.context.get_block(block).block_hash is not None for block in seen[-2:]] == [True, True]
