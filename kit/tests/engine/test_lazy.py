"""Lazy saving: what the engine is about to evict is saved, nothing else, whatever happens to its free queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pact import pact_engine

from kvpact.cache.cache import PactCache
from kvpact.cache.jobs import TransferJobs
from kvpact.cache.lazy_offload import SAVES_PER_STEP, VIEWS_PER_STEP, LazyOffload
from kvpact.cache.needs.engine_groups import EngineGroups
from kvpact.cache.needs.owed import Owed
from kvpact.cache.needs.runs import Run
from kvpact.contract import KVCacheBlockView
from kvpact.errors import NAME_CHARS
from kvpact.identity.groups import one_group
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import BlockTags
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks, Request

BLOCK, TAG = 4, 1
PROMPT = 8
"""Blocks of a prompt."""


def prompt(seed: int, blocks: int = PROMPT) -> list[int]:
    return [1_000 * (seed + 1) + place for place in range(blocks * BLOCK + 1)]


def lazy_engine(num_blocks: int = 64, num_slots: int = 64, quirks: EngineQuirks | None = None, **more: Any) -> Engine:
    return pact_engine(
        EngineConfig(num_blocks=num_blocks, block_size=BLOCK), quirks, num_slots=num_slots, **{"save": "lazy", **more}
    )


def cache_of(engine: Engine) -> PactCache:
    return cast(PactCache, engine.cache)


def saved(engine: Engine) -> float:
    return cache_of(engine).observe()["saved_blocks"]


def memo_of(engine: Engine) -> LazyOffload:
    memo = cache_of(engine).saves.lazy
    assert memo is not None
    return memo


def run(engine: Engine, *seeds: int) -> list[Request]:
    requests = [Request(f"{engine.counts.steps}-{seed}", prompt(seed), 2) for seed in seeds]
    for request in requests:
        engine.run([request])
    return requests


MODES = ["native", "vllm-0.32"]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_saved_while_there_is_room(mode: str) -> None:
    engine = lazy_engine(quirks=EngineQuirks.presets()[mode])
    run(engine, 0, 1, 2, 0, 1, 2)
    assert saved(engine) == 0
    assert engine.counts.local_hits == 3 * PROMPT * BLOCK


@pytest.mark.parametrize("mode", MODES)
def test_what_is_evicted_was_saved_before(mode: str) -> None:
    engine = lazy_engine(quirks=EngineQuirks.presets()[mode])
    seeds = range(20)  # 160 blocks through 63
    run(engine, *seeds)
    evicted = engine.scheduler.kv.pool.evictions
    assert evicted > 60
    assert evicted <= saved(engine) < 20 * PROMPT, "all of what was evicted, and not what is still there"
    computed = engine.counts.computed
    run(engine, *reversed(range(14, 20)))
    assert engine.counts.computed - computed < 6 * 3 * BLOCK, "the last ones come from the engine or from the cache"
    engine.check_nothing_held()


def test_a_saved_block_is_evicted_first_and_the_others_keep_their_turn() -> None:
    """What was saved is at the head of the queue again: saving what is next never makes something else next."""
    engine = lazy_engine()
    run(engine, *range(7))
    steps = engine.counts.steps
    before = saved(engine)
    assert 0 < before <= 3 * PROMPT, "16 blocks are looked after, and a chain is saved whole; 56 are in the engine"
    while engine.has_work:
        engine.step()
    for _ in range(200):
        engine.step()
    assert engine.counts.steps > steps
    assert saved(engine) == before, "an idle engine saves what is next once, not its whole pool in turn"
    head = [view.block_id for view in engine.context.iter_free_blocks()][:8]
    assert all(
        (entry := memo_of(engine).content_of(block)) is None or entry.key in cache_of(engine).index for block in head
    )


def test_a_chain_is_saved_up_to_the_block_that_leaves() -> None:
    """A shared head is in use by others and far from eviction; the end behind it is saved with it."""
    engine = lazy_engine(num_blocks=40)
    stem = prompt(0, 4)[:-1]
    run_of = [Request(f"r{n}", [*stem, *prompt(n, 4)], 1) for n in range(6)]
    for request in run_of:
        engine.run([request])
    index = cache_of(engine).index
    index.check()
    assert 0 < index.held_count == len(index)
    assert engine.counts.local_hits >= 5 * 4 * BLOCK, "the shared head was never evicted"


@pytest.mark.parametrize("mode", EngineQuirks.presets())
def test_h57_the_memo_is_bounded_by_the_engines_blocks(mode: str) -> None:
    engine = lazy_engine(num_blocks=24, num_slots=8, quirks=EngineQuirks.presets()[mode])
    for seed in range(40):
        engine.add_request(Request(f"r{seed}", prompt(seed, 1 + seed % 9), 1 + seed % 5))
        engine.step()
        if seed % 7 == 0:
            engine.cancel(f"r{seed}")
        assert len(memo_of(engine)) <= 23
        memo_of(engine).check()
    engine.run()
    assert len(memo_of(engine)) <= 23
    assert not memo_of(engine).known_requests, "nothing is kept of requests that have ended"


@pytest.mark.parametrize("mode", EngineQuirks.presets())
def test_h30_a_block_that_is_not_full_is_not_saved(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts end inside a block, and outputs fill it or do not: only whole blocks are ever named."""
    engine = lazy_engine(num_blocks=32, quirks=EngineQuirks.presets()[mode])
    named: list[Owed] = []
    due = memo_of(engine).due

    def noted(taken: int) -> Iterator[Owed]:
        for chain in due(taken):
            named.append(chain)
            yield chain

    monkeypatch.setattr(memo_of(engine), "due", noted)
    prompts = {f"r{n}": [1_000 * (n + 1) + place for place in range(14 + n % 4)] for n in range(24)}
    outputs = {name: 1 + len(tokens) % 3 for name, tokens in prompts.items()}
    for name, tokens in prompts.items():
        engine.run([Request(name, tokens, outputs[name])])
    assert named
    for chain in named:
        full = (len(prompts[chain.request_id]) + outputs[chain.request_id] - 1) // BLOCK
        assert chain.run.start + len(chain.run.keys) <= full
    engine.check_nothing_held()


def test_what_was_computed_from_a_failed_load_is_not_saved() -> None:
    """Neither for the request that loaded, nor for one that saves the same chain lazily."""
    copies, index = TransferJobs(1, 1.0), BlockIndex(8)
    keys = [name.ljust(32) for name in (b"one", b"two", b"three")]
    slots = index.reserve(keys, 0, 3)
    assert slots is not None
    for request, start in (("loader", 0), ("lazy", 2), ("other", 0)):
        mine = keys if request != "other" else [keys[0], b"else".ljust(32), keys[2]]
        ids = (5, 6, 7)[start:]
        run = Run(0, start, mine[start:], mine, range(start, 3), slots=slots.slots[start:], block_ids=ids)
        copies.order_save(Owed(request, run), index.pin(keys[0]), 0.0)
    copies.invalidate("loader", keys[1], 1)
    assert {save.job.request_id: save.garbage_from == 1 for save in copies.saves.values()} == {
        "loader": True,
        "lazy": True,
        "other": False,
    }


def test_a_reset_forgets_what_the_engine_holds() -> None:
    engine = lazy_engine(num_blocks=40)
    run(engine, 0, 1, 2)
    engine.update_weights()
    assert len(memo_of(engine)) == 0
    before = saved(engine)
    run(engine, 3)
    run(engine, 0, 1)
    assert saved(engine) >= before
    engine.check_nothing_held()


def test_what_cannot_be_saved_does_not_keep_the_engine_stepping() -> None:
    """The arena has 4 slots and the window 16 blocks: some are lost, and the engine comes to rest."""
    engine = lazy_engine(num_blocks=24, num_slots=4)
    run(engine, *range(6))
    assert not engine.has_work
    assert saved(engine) < 6 * PROMPT, "chains do not push each other out of the arena again and again"


def test_h121_what_is_given_up_is_counted() -> None:
    """A chain of 120 blocks, of which memory takes 4: the others are dropped, and are not tried again and again."""
    engine = lazy_engine(num_blocks=140, num_slots=4)
    engine.run([Request("long", prompt(0, 120), 1)])
    run(engine, *range(1, 8))
    observed = cache_of(engine).observe()
    computed = 120 + 7 * PROMPT
    assert 120 - 4 <= observed["dropped_blocks"] < 2 * computed


def test_h118_blocks_that_outlive_their_request_keep_no_long_id() -> None:
    engine = lazy_engine()
    names = ["x" * 10_000 + end for end in "ab"]
    engine.run([Request(name, prompt(seed), 2) for seed, name in enumerate(names)])
    entries = [memo_of(engine).content_of(block) for block in range(64)]
    kept = {entry.request_id for entry in entries if entry is not None}
    assert len(kept) == len(names)
    assert max(map(len, kept)) <= NAME_CHARS
    run(engine, *range(2, 12))
    assert saved(engine) >= 2 * PROMPT, "they are saved under it all the same"


def test_without_a_free_queue_blocks_are_saved_as_they_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    class Holder:
        def get_block(self, block_id: int) -> KVCacheBlockView:
            return engine.context.get_block(block_id)

        def touch(self, block_ids: object) -> None:
            engine.context.touch(block_ids)  # type: ignore[arg-type]

        def free_blocks(self, block_ids: object, *, evict_first: bool = False) -> None:
            engine.context.free_blocks(block_ids)  # type: ignore[arg-type]

    engine = lazy_engine()
    cache_of(engine).bind_scheduler_context(Holder())
    assert "does not show its free queue" in caplog.text
    run(engine, 0)
    assert saved(engine) == PROMPT


# The cursor, on a queue that does what it likes


class Queue:
    """A free queue of numbers with its views counted: blocks are published under the hash of what is in them."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))
        self.content: dict[int, bytes | None] = dict.fromkeys(range(num_blocks))
        self.held: list[int] = []
        self.views = 0
        self.walked: list[int] = []
        """The blocks of the last walk, in its order."""
        self.walked_after: int | None = None
        """The block after which it began; None if at the head."""

    def cursor(self) -> int | None:
        """The last block of the last walk that is still free: a walk that goes on does so after it."""
        return next((block_id for block_id in reversed(self.walked) if block_id in self.free), None)

    def get_block(self, block_id: int) -> KVCacheBlockView:
        self.views += 1
        return KVCacheBlockView(block_id, block_id not in self.free, block_id == 0, self.content[block_id], 0)

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        from kvpact.errors import PactViolation

        if after_block is not None and after_block not in self.free:
            raise PactViolation("not in the free queue")
        start = 0 if after_block is None else self.free.index(after_block) + 1
        self.walked, self.walked_after = [], after_block
        for block_id in self.free[start : start + VIEWS_PER_STEP]:
            self.walked.append(block_id)
            yield self.get_block(block_id)

    def get_block_ids(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        return ((),)

    def waiting_requests(self) -> tuple[str, ...]:
        return ()

    def touch(self, block_ids: object) -> None:
        raise NotImplementedError

    def free_blocks(self, block_ids: object, *, evict_first: bool = False) -> None:
        raise NotImplementedError


class Scene:
    """The memo and the cursor alone, over a queue; saves are done at once or later."""

    def __init__(self, num_blocks: int, window: int, num_slots: int = 4096) -> None:
        self.queue = Queue(num_blocks)
        self.index = BlockIndex(num_slots)
        self.tags = BlockTags()
        groups = EngineGroups(one_group(BLOCK))
        self.lazy = LazyOffload(self.queue, self.index, groups, self.tags, window)
        self.saving: list[tuple[Owed, Sequence[int]]] = []
        self.numbers = 0
        self.lost = 0
        self.refuses = ""
        """The request of whose chain nothing is saved."""
        self.dropped = 0
        self.left: list[int] = []
        """What the last walk has seen and left: due, and neither saved nor refused."""

    def compute(self, blocks: int) -> None:
        """A request takes blocks from the head, computes a chain of its own, and ends."""
        taken, self.queue.free = self.queue.free[:blocks], self.queue.free[blocks:]
        keys: list[BlockKey] = []
        for block in taken:
            entry = self.lazy.content_of(block)
            self.lost += entry is not None and self.queue.content[block] is not None and entry.key not in self.index
            self.numbers += 1
            keys.append((b"key%d" % self.numbers).ljust(32))
            self.queue.content[block] = keys[-1].replace(b"key", b"hash")
        run = Run(0, 0, keys, keys, range(len(keys)), block_ids=tuple(taken))
        self.tags.fill(taken, TAG)
        self.lazy.note(f"r{self.numbers}", run, TAG)
        self.queue.free += taken[::-1]
        self.lazy.request_finished(f"r{self.numbers}")

    def step(self, taken: int = 0) -> None:
        """One step: what is due is held; what it says must be true."""
        views, walked = self.queue.views, self.queue.walked
        blocks = 0
        for owed in self.lazy.due(taken):
            chain = owed.run
            assert len(chain.chain) == chain.start + len(chain.block_ids)
            for key, parent in zip(chain.chain, [ROOT, *chain.chain], strict=False):
                if key in self.index:
                    assert parent == ROOT or parent in self.index
            for key, block in zip(chain.keys, chain.block_ids, strict=True):
                assert self.queue.content[block] == key.replace(b"key", b"hash"), "the block holds something else"
            needed = chain.chain[chain.start - 1] if chain.start else ROOT
            room = min(len(chain.keys), self.index.reservable(needed, len(chain.keys)))
            room = 0 if owed.request_id == self.refuses else room
            self.dropped += len(chain.keys) - room
            if not room:
                continue
            reservation = self.index.reserve(chain.chain, chain.start, chain.start + room)
            assert reservation is not None
            owed = owed.part(room)
            chain = owed.run
            self.queue.free = [block for block in self.queue.free if block not in chain.block_ids]
            self.saving.append((owed, reservation.slots))
            self.lazy.saving(len(chain.block_ids))
            blocks += len(chain.block_ids)
        assert blocks <= SAVES_PER_STEP
        assert self.queue.views - views <= VIEWS_PER_STEP * 2 + SAVES_PER_STEP * 2, "P11: the work of a step is bounded"
        self.lazy.check()
        self.index.check()
        if self.queue.walked is not walked:
            after = self.queue.walked_after
            passed = walked[: walked.index(after) + 1] if after in walked else ()
            assert not {*self.left}.intersection(passed), "the cursor has passed what was not handled (H121)"
            self.left = self.unsaved(self.queue.walked)
            assert self.lazy.dirty or not self.left, "it rests, and what it has seen is not handled (H121)"

    def end_saves(self) -> None:
        """The copies are done."""
        for owed, slots in self.saving:
            self.index.complete(slots)
            last, first = owed.in_turn
            self.queue.free = [*first, *self.queue.free, *last]
            self.lazy.saved(len(owed.run.block_ids))
        self.saving.clear()

    def settle(self) -> None:
        """Step until nothing stirs."""
        for _ in range(400):
            self.step()
            self.end_saves()
            if not self.lazy.dirty:
                return
        raise AssertionError("the walk never ends")

    def unsaved_at_the_head(self, window: int) -> list[int]:
        """Known blocks near eviction, still valid, that are not stored although they could be."""
        return self.unsaved(self.queue.free[:window])

    def unsaved(self, blocks: Sequence[int]) -> list[int]:
        """Those of these blocks that are known, still valid, and not stored although they could be."""
        return [
            block
            for block in blocks
            if (entry := self.lazy.content_of(block)) is not None
            and entry.block_hash == self.queue.content[block]
            and entry.key not in self.index
            and not entry.offered
        ]


TROUBLE = st.sampled_from(["compute", "take out", "free again", "move", "reset", "step", "end saves", "reverse"])
CHAINS = st.lists(st.integers(1, 120), min_size=3, max_size=8)
"""Blocks of the chains with which a play begins: often more of them are due than one step may save."""
WINDOWS = st.sampled_from([8, 40, 300, 400])


def play(chains: list[int], trouble: list[tuple[str, int]], window: int) -> None:
    """Compute chains, do to the queue what is listed, and come to rest: then nothing that is due is left unsaved."""
    scene = Scene(500, window)
    out: list[int] = []
    for what, number in [*(("compute", blocks) for blocks in chains), *trouble]:
        free = scene.queue.free
        cursor = scene.queue.cursor()
        if what == "compute":
            scene.compute(1 + number % 120)
        elif what == "take out" and free:
            out.append(free.pop(free.index(cursor) if cursor in free else number % len(free)))
        elif what == "free again" and out:
            free.append(out.pop())
        elif what == "move" and cursor in free:
            free.remove(cursor)
            free.append(cursor)
        elif what == "reset":
            scene.queue.content = dict.fromkeys(scene.queue.content)
        elif what == "reverse":
            free.reverse()
        elif what == "end saves":
            scene.end_saves()
        else:
            scene.step(number % 20)
    scene.queue.free += out
    scene.lazy.dirty = True
    scene.settle()
    scene.lazy.dirty = True
    scene.settle()
    assert not scene.unsaved_at_the_head(window)
    assert len(scene.lazy) < 500


@pytest.mark.parametrize("examples", [50, pytest.param(10_000, marks=pytest.mark.soak)])
def test_h121_the_cursor_survives_whatever_happens_to_the_queue(examples: int) -> None:
    trouble = st.lists(st.tuples(TROUBLE, st.integers(0, 400)), max_size=40)
    settings(max_examples=examples)(given(CHAINS, trouble, WINDOWS)(play))()


def test_h121_what_one_look_finds_and_one_step_may_not_save_is_saved_by_the_next() -> None:
    """97 due blocks in one look of 128, of which a step saves 96: the last one is not left behind the cursor."""
    scene = Scene(500, 300)
    for blocks in (1, 1, 15, 40, 40):
        scene.compute(blocks)
    scene.step()
    scene.queue.free.reverse()
    for _ in range(2):
        scene.lazy.dirty = True
        scene.settle()
    assert not scene.unsaved_at_the_head(300)
    scene.compute(120)
    assert scene.lost == 0


@pytest.mark.parametrize(("blocks", "num_slots"), [(40, 4096), (300, 4096), (3000, 4096), (300, 200), (3000, 200)])
def test_h121_a_chain_that_can_never_be_saved_holds_nobody_up(blocks: int, num_slots: int) -> None:
    """There is no room for its head, or it is longer than memory: it is given up, and each of its blocks counted."""
    scene = Scene(blocks + 1, blocks + 50, num_slots)
    scene.compute(blocks)
    never, others = [*scene.queue.free], range(10_000, 10_050)
    scene.refuses = f"r{scene.numbers}" if num_slots > blocks else ""
    scene.queue.content |= dict.fromkeys(others)
    scene.queue.free = [*others, *never]
    scene.compute(len(others))
    scene.settle()
    keys = {block: entry.key for block in [*never, *others] if (entry := scene.lazy.content_of(block)) is not None}
    assert all(keys[block] in scene.index for block in others)
    assert not scene.unsaved(never)
    assert scene.dropped + scene.lazy.refused >= blocks - (0 if scene.refuses else num_slots)
    views = scene.queue.views
    scene.lazy.dirty = True
    scene.settle()
    assert scene.queue.views - views <= blocks + len(others), "who is given up is passed without another try"


def test_every_block_is_saved_in_time_at_a_steady_pace() -> None:
    scene = Scene(400, 16)
    for _ in range(100):
        scene.compute(10)
        scene.step(10)
        scene.end_saves()
    assert scene.lost == 0
    assert scene.numbers == 1000


def test_a_chain_longer_than_a_steps_work_is_saved_over_several_steps() -> None:
    scene = Scene(2300, 64)
    scene.compute(2100)
    del scene.queue.free[: 2300 - 2100 - 1]
    scene.lazy.dirty = True
    scene.settle()
    assert scene.index.held_count > 2000, "its end is next, so all that it needs is saved, its head first"


def test_a_long_chain_without_its_head_is_given_up_at_once() -> None:
    """P11: it is gone through once, not once for each of its blocks."""
    scene = Scene(1000, 300)
    scene.compute(900)
    del scene.queue.free[:99]
    head = scene.queue.free[-1]
    scene.lazy.invalidate_blocks([head])
    scene.queue.content[head] = None
    scene.step()
    assert len(scene.lazy) == 0
    assert len(scene.index) == 0


def test_what_stands_behind_a_lost_block_is_not_saved() -> None:
    scene = Scene(64, 64)
    scene.compute(10)
    scene.queue.content[scene.queue.free[-4]] = b"something else"
    scene.queue.free.reverse()
    scene.settle()
    assert scene.index.held_count == 3, "the chain is whole only as far as the block before the lost one"
