"""What a `SchedulerContext` promises, as checks that run on any engine: the embedded one and vLLM's real scheduler.

Owns the checks and what they ask of an engine (`ContextStage`). Starts no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from random import Random
from typing import Protocol, TypeAlias

from kvpact.contract import SchedulerContext
from kvpact.errors import PactViolation
from kvpact_testkit.results import require

BLOCKS = 12
"""Blocks of a stage's pool, the null block among them."""

BLOCK = 16
"""Tokens of each."""


class ContextStage(Protocol):
    """An engine with `BLOCKS` blocks of `BLOCK` tokens and the context over it; nothing else holds blocks."""

    @property
    def context(self) -> SchedulerContext:
        """What is checked."""

    def add(self, name: str, tokens: Sequence[int], outputs: int = 8, priority: int = 0) -> None:
        """A request arrives."""

    def cancel(self, name: str) -> None:
        """A request is cancelled."""

    def step(self, times: int = 1) -> None:
        """The engine steps."""

    def finish(self, name: str) -> None:
        """The engine steps until the request has ended."""


ContextCheck: TypeAlias = Callable[[ContextStage], None]
CHECKS: dict[str, ContextCheck] = {}
"""All checks by name. A check with "priority" in its name needs an engine that schedules by priority."""


def check(run: ContextCheck) -> ContextCheck:
    """Add a check."""
    CHECKS[run.__name__] = run
    return run


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Within, PactViolation must be raised with `what` in its message."""
    try:
        yield
    except PactViolation as error:
        require(what in str(error), f"the error says {str(error)!r}; it must speak of {what!r}")
    else:
        require(False, f"no PactViolation was raised; one that speaks of {what!r} is due")


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt; different seeds share no block."""
    return [1 + seed * 997 + place for place in range(count)]


def free_ids(stage: ContextStage, after: int | None = None) -> list[int]:
    """The ids in the free queue, from its head or from the block after `after`."""
    return [view.block_id for view in stage.context.iter_free_blocks(after)]


def started(stage: ContextStage, name: str, length: int, steps: int = 1) -> Sequence[int]:
    """A request for `length` tokens arrives and the engine steps: the request's blocks."""
    stage.add(name, tokens(length))
    stage.step(steps)
    return stage.context.get_block_ids(name)[0]


def ended(stage: ContextStage, name: str) -> None:
    """Cancel a request, and step so that the engine handles it."""
    stage.cancel(name)
    stage.step()


def published(stage: ContextStage, blocks: int) -> Sequence[int]:
    """Compute a prompt of `blocks` full blocks and end its request: returns those blocks, now free and published."""
    held = started(stage, "r", blocks * BLOCK + 5, steps=2)[:blocks]
    ended(stage, "r")
    return held


@check
def blocks_and_queues_are_shown(stage: ContextStage) -> None:
    """Shows a running request's blocks, a request that waits for room, and the null block."""
    context = stage.context
    require(isinstance(context, SchedulerContext), "it is a SchedulerContext")
    stage.add("r", tokens(2 * BLOCK + 8))
    stage.add("queued", tokens(9 * BLOCK - 4, seed=5))
    stage.step()
    (blocks,) = context.get_block_ids("r")
    views = [context.get_block(block) for block in blocks]
    require(len(blocks) == 3, f"40 tokens are in 3 blocks, not {len(blocks)}")
    require([view.block_id for view in views] == list(blocks), "a view has the id that was asked for")
    require([view.ref_cnt for view in views] == [1, 1, 1], "each is held once, by the request")
    require([view.block_hash is not None for view in views] == [True, True, False], "the full ones are published")
    require({view.group_id for view in views} == {0}, "there is one group")
    require(context.get_block(0).is_null and not views[0].is_null, "block 0 is the null block")
    require(list(context.waiting_requests()) == ["queued"], f"queued waits: {context.waiting_requests()}")
    require(context.get_block_ids("queued") == ((),), "who waits holds nothing")
    require(set(free_ids(stage)) == set(range(1, BLOCKS)) - set(blocks), "the others are in the free queue")


@check
def a_touched_block_outlives_its_request(stage: ContextStage) -> None:
    """A cancelled request's touched block stays unchanged until it is freed, though others need all the room."""
    context = stage.context
    held = started(stage, "r", 2 * BLOCK + 8, steps=2)[:2]
    before = [context.get_block(block) for block in held]
    context.touch(held)
    require([context.get_block(block).ref_cnt for block in held] == [2, 2], "each is held twice")
    stage.cancel("r")
    for number in range(4):
        stage.add(f"n{number}", tokens(8 * BLOCK, seed=number + 1), outputs=1)
        stage.finish(f"n{number}")
    after = [context.get_block(block) for block in held]
    require([view.ref_cnt for view in after] == [1, 1], "the context alone holds them now")
    require([v.block_hash for v in after] == [v.block_hash for v in before], "they were not given away")
    require(not set(held) & set(free_ids(stage)), "what is held is not free")
    context.free_blocks(held[::-1])
    require(free_ids(stage)[-2:] == [*held[::-1]], "freed, they are evicted last, the first one first")


@check
def freeing_what_was_not_touched_frees_nothing(stage: ContextStage) -> None:
    """A call frees all its blocks or none, and the message names the wrong one."""
    context = stage.context
    first, second = started(stage, "r", 2 * BLOCK + 8)[:2]
    context.touch([first])
    with refused(f"block {second} is freed 1 times, touched 0 times"):
        context.free_blocks([first, second])
    with refused("freed 2 times, touched 1 times"):
        context.free_blocks([first, first])
    require(context.get_block(first).ref_cnt == 2, "nothing was freed")
    context.free_blocks([first])
    require(context.get_block(first).ref_cnt == 1, "the request still holds it")


@check
def foreign_and_null_blocks_are_refused(stage: ContextStage) -> None:
    """Every method refuses them, and holds no other block of the same call."""
    context = stage.context
    for block in (-1, BLOCKS):
        with refused("does not exist"):
            context.get_block(block)
        with refused("does not exist"):
            context.touch([1, block])
        with refused("does not exist"):
            context.iter_free_blocks(block)
    with refused("null block"):
        context.touch([1, 0])
    require(context.get_block(1).ref_cnt == 0, "nothing is held after an error")


@check
def unknown_requests_are_refused(stage: ContextStage) -> None:
    """A request that never arrived, and one that has ended."""
    with refused("no request nobody is alive"):
        stage.context.get_block_ids("nobody")
    started(stage, "r", 20)
    ended(stage, "r")
    with refused("no request r is alive"):
        stage.context.get_block_ids("r")
    require(stage.context.waiting_requests() == (), "nobody waits")


@check
def blocks_may_come_and_go_around_the_cursor(stage: ContextStage) -> None:
    """A block ahead of the cursor leaves the queue, and others return at its tail."""
    held = published(stage, 2)
    stage.context.touch(held)
    walk = stage.context.iter_free_blocks()
    first, second, third = (next(walk).block_id for _ in range(3))
    ahead = free_ids(stage)[4]
    stage.context.touch([ahead])
    stage.context.free_blocks(held)
    seen = [view.block_id for view in walk]
    require(ahead not in seen and not {first, second, third} & set(seen), "each is seen once, and only if it is free")
    require(seen[-2:] == [*held], "what came back at the tail is seen there")
    stage.context.free_blocks([ahead])


@check
def a_cursor_that_left_the_queue_is_refused(stage: ContextStage) -> None:
    """The block is refused while it is away, and after it is back."""
    for comes_back in (False, True):
        walk = stage.context.iter_free_blocks()
        cursor = next(walk).block_id
        stage.context.touch([cursor])
        if comes_back:
            stage.context.free_blocks([cursor])
        with refused(f"the cursor, block {cursor}, left the free queue"):
            next(walk)
        if not comes_back:
            with refused("not in the free queue"):
                stage.context.iter_free_blocks(after_block=cursor)
            stage.context.free_blocks([cursor])
    with refused("not in the free queue"):
        stage.context.iter_free_blocks(after_block=0)


@check
def a_cursor_that_the_engine_took_is_refused(stage: ContextStage) -> None:
    """A request hits the cursor's block and ends: the block is back at the tail, and the walk is refused."""
    held = published(stage, 2)
    walk = stage.context.iter_free_blocks()
    for view in walk:
        if view.block_id == held[1]:
            break
    again = started(stage, "again", 2 * BLOCK + 5)
    require(again[:2] == held, "the second request uses the first one's blocks")
    ended(stage, "again")
    with refused("left the free queue"):
        next(walk)


@check
def a_walk_goes_on_behind_a_free_block(stage: ContextStage) -> None:
    """A walk continues after the cursor's block: a few blocks at a time, each of them once."""
    published(stage, 3)
    seen: list[int] = []
    cursor = None
    while piece := [view.block_id for view in islice(stage.context.iter_free_blocks(after_block=cursor), 4)]:
        seen += piece
        cursor = piece[-1]
    require(seen == free_ids(stage), "in pieces or at once, the walk is the same")
    require(sorted(seen) == list(range(1, BLOCKS)), "each block is seen once")


@check
def what_is_freed_to_be_evicted_first_is(stage: ContextStage) -> None:
    """Blocks freed with `evict_first` go to the head in the order given; what a request still holds stays with it."""
    held = published(stage, 3)
    require(started(stage, "user", BLOCK + 5)[0] == held[0], "the first block has a user")
    stage.context.touch(held)
    stage.context.free_blocks(held[::-1], evict_first=True)
    require(free_ids(stage)[:2] == [held[2], held[1]], "those that are free are at the head, the first one first")
    require(stage.context.get_block(held[0]).ref_cnt == 1, "the user keeps its block")
    before = stage.context.get_block(held[2]).block_hash
    require(before is not None, "they stay published")
    stage.add("new", tokens(BLOCK, seed=7), outputs=1)
    stage.finish("new")
    require(stage.context.get_block(held[2]).block_hash != before, "the first one was given away first")
    stage.cancel("user")


@check
def who_waits_is_listed_in_order_of_arrival(stage: ContextStage) -> None:
    """The requests wait for one that takes all the room."""
    _wait_in_line(stage, ["first", "second", "third"])


@check
def who_waits_is_listed_by_priority(stage: ContextStage) -> None:
    """A lower priority goes first; among equals, the earlier request."""
    _wait_in_line(stage, ["third", "second", "first"])


def _wait_in_line(stage: ContextStage, expected: list[str]) -> None:
    stage.add("wall", tokens(9 * BLOCK), outputs=20, priority=-1)
    stage.step()
    for number, name in enumerate(("first", "second", "third")):
        stage.add(name, tokens(8 * BLOCK, seed=number + 1), outputs=2, priority=3 - number)
    waiting = [*stage.context.waiting_requests()]
    require(waiting == expected, f"{expected} wait in this order; listed are {waiting}")
    stage.step()
    require([*stage.context.waiting_requests()] == expected, "the same a step later")
    stage.cancel("wall")
    stage.finish(expected[0])
    require(expected[0] not in stage.context.waiting_requests(), "who has ended waits no more")


@check
def random_holds_keep_the_pool_sound(stage: ContextStage) -> None:
    """Touch and free at random while requests arrive and end: the free queue has the blocks without references."""
    random, held = Random(7), Counter[int]()
    context = stage.context
    alive: list[str] = []
    for number in range(120):
        action = random.randrange(5)
        if action == 0 and held:
            block = random.choice([*held])
            context.free_blocks([block], evict_first=random.random() < 0.5)
            held -= Counter([block])
        elif action == 1 and held.total() < 4:
            block = random.randrange(1, BLOCKS)
            context.touch([block])
            held[block] += 1
        elif action == 2 and len(alive) < 3:
            alive.append(f"r{number}")
            stage.add(alive[-1], tokens(random.randrange(5, 40), seed=random.randrange(3)), outputs=30)
        elif action == 3 and alive:
            stage.cancel(alive.pop(random.randrange(len(alive))))
        stage.step()
        used = Counter(block for name in alive for block in _blocks_of(context, name))
        walked = free_ids(stage)
        require(len(walked) == len({*walked}), f"the walk sees a block twice: {walked}")
        for block in range(1, BLOCKS):
            references = context.get_block(block).ref_cnt
            require(references == used[block] + held[block], f"block {block} has {references} references")
            require((references == 0) == (block in walked), f"block {block}: {references} references, free {walked}")
    for name in alive:
        stage.cancel(name)
    context.free_blocks([*held.elements()])


def _blocks_of(context: SchedulerContext, name: str) -> Sequence[int]:
    try:
        return context.get_block_ids(name)[0]
    except PactViolation:  # the request has ended
        return ()
