"""A step that changes nothing of a request but the number of its tokens: next to no cost, and nothing lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpact.contract import KVCacheBlockView, StepWork
from kvpact.identity.keys import RequestIdentity
from scenes import BLOCK_SIZE, Scene, SceneBlocks, SceneRequest, tokens

START = 2 * BLOCK_SIZE + 1
"""Tokens of a prompt that ends with the first token of a block."""


class Running:
    """Requests that run in one scene; with `in_bulk` the cache is asked first of which it must be told."""

    def __init__(self, *, in_bulk: bool = True, **settings: Any) -> None:
        self.scene, self.in_bulk = Scene(64, engine_blocks=4096, **settings), in_bulk
        self._block_ids = count(1000)
        self.requests: dict[str, SceneRequest] = {}
        self.computed: dict[str, int] = {}
        self.told: list[str] = []
        """Of which requests the cache was told in the last step."""

    def add(self, name: str, prompt: list[int]) -> None:
        """A request arrives, and the engine has nothing of it."""
        self.requests[name] = SceneRequest(name, [*prompt])
        self.ask(name)

    def ask(self, name: str) -> None:
        """The request is new, or was preempted: it is given what the cache has."""
        self.computed[name] = 0
        self.scene.tables.pop(name, None)
        match = self.scene.prepare(self.requests[name])
        if match.num_tokens:
            self.scene.load(self.requests[name], match)
            self.computed[name] = match.num_tokens

    def step(self, drafts: Mapping[str, tuple[int, int]], *, new_tokens: int = 1) -> StepWork:
        """The requests named are computed up to their last token, with so many drafts, of which so many are kept."""
        cache, scene = self.scene.cache, self.scene
        counts = {
            name: len(self.requests[name].token_ids) - self.computed[name] + more for name, (more, _) in drafts.items()
        }
        for name, new in counts.items():
            table = scene.tables.setdefault(name, [])
            while len(table) * BLOCK_SIZE < self.computed[name] + new:
                table.append(next(self._block_ids))
        self.told = [*counts]
        if self.in_bulk:
            self.told = [*cache.note_running([*counts], [self.computed[name] for name in counts], counts)]
        for name in self.told:
            table = scene.tables[name]
            cache.note_computed(self.requests[name], self.computed[name] + counts[name], partial(list, table))
        work = cache.end_step()
        for name, (more, kept) in drafts.items():
            self.computed[name] += counts[name] - more + kept
            known = self.requests[name].token_ids
            known += range(10**6 + len(known), 10**6 + len(known) + kept + new_tokens)
        scene.report(work)
        cache.check()
        return work

    def state(self, name: str) -> Any:
        """What the cache knows of a request."""
        return self.scene.cache.requests.live[name]


@pytest.fixture
def running() -> Iterator[Running]:
    """One request that is a token into its third block, and was noted so."""
    found = Running()
    found.add("a", tokens(START))
    found.step({"a": (0, 0)})
    yield found
    found.scene.close()


def told_in_next_step(running: Running, drafts: tuple[int, int] = (0, 0)) -> bool:
    """Whether the cache must be told of the request in the step that comes now."""
    running.step({"a": drafts})
    return bool(running.told)


def test_a_decode_within_a_block_is_not_told_and_one_that_fills_it_is(running: Running) -> None:
    told = []
    for _ in range(2 * BLOCK_SIZE):
        told.append(told_in_next_step(running))
        assert running.state("a").computed == running.computed["a"]
    assert told == [False, False, True, False] * 2


def test_a_new_epoch_is_told_and_a_block_begun_in_one_and_filled_in_another_is_never_saved(running: Running) -> None:
    assert not told_in_next_step(running)
    running.scene.cache.reset()
    assert told_in_next_step(running)
    saved = [save for _ in range(3 * BLOCK_SIZE) for save in running.step({"a": (0, 0)}).saves]
    assert not saved, "all that comes after such a block was computed from it"


def test_a_rejected_draft_is_told(running: Running) -> None:
    running.step({"a": (1, 0)})
    assert told_in_next_step(running)


def test_drafts_that_fill_a_block_are_told(running: Running) -> None:
    assert told_in_next_step(running, drafts=(2, 2))


def test_a_request_whose_full_block_has_no_key_yet_is_told() -> None:
    running = Running()
    running.add("a", tokens(START - 1))
    running.requests["a"].token_ids.pop()  # its last token is being sampled while the next step is decided
    running.step({"a": (1, 1)}, new_tokens=0)
    assert running.state("a").computed == START - 1
    running.requests["a"].token_ids += [1, 2]
    running.computed["a"] = START - 1
    assert told_in_next_step(running)
    running.scene.close()


def test_a_load_that_was_just_used_is_told() -> None:
    running = Running(sync_load_budget="0B")
    running.scene.run_cold(SceneRequest("first", tokens(START)))
    running.add("a", tokens(START))
    assert running.scene.cache.ledger.has_plan("a"), "it has arrived, and was not used"
    assert told_in_next_step(running)
    assert running.scene.cache.observe()["used_tokens"] == START - 1
    assert not told_in_next_step(running)
    running.scene.close()


def test_blocks_that_are_distrusted_are_told(running: Running) -> None:
    running.scene.cache.distrust_blocks({running.scene.tables["a"][1]}, {"a": running.scene.tables["a"]})
    running.computed["a"] = BLOCK_SIZE
    running.requests["a"].token_ids = running.requests["a"].token_ids[: BLOCK_SIZE + 1]
    assert told_in_next_step(running)


class ShownQueue(SceneBlocks):
    """A block pool with a free queue, which is empty."""

    def __init__(self, tables: Mapping[str, list[int]]) -> None:
        super().__init__()
        self._tables = tables

    def iter_free_blocks(self, after_block: int | None = None) -> Iterator[KVCacheBlockView]:
        """No block is free."""
        return iter(())

    def get_block_ids(self, request_id: str) -> list[list[int]]:
        """The one group's."""
        return [self._tables[request_id]]

    def waiting_requests(self) -> list[str]:
        """None waits."""
        return []


def test_lazy_saving_is_told_of_every_step() -> None:
    running = Running(save="lazy")
    running.scene.cache.bind_scheduler_context(ShownQueue(running.scene.tables))
    running.add("a", tokens(START))
    running.step({"a": (0, 0)})
    assert told_in_next_step(running)
    running.scene.close()


def test_a_preempted_request_is_told(running: Running) -> None:
    assert not told_in_next_step(running)
    running.ask("a")
    assert told_in_next_step(running)


def test_a_cache_that_saves_nothing_is_told_of_no_decode() -> None:
    running = Running(save="off")
    running.add("a", tokens(START))
    running.step({"a": (0, 0)})
    assert not told_in_next_step(running)
    running.scene.close()


def test_the_rate_of_prompts_counts_the_tokens_of_all() -> None:
    counted = {}
    for in_bulk in (True, False):
        running = Running(in_bulk=in_bulk)
        for number in range(3 * BLOCK_SIZE):
            running.add(f"{number}", tokens(START, number))
        for _ in range(3):
            running.step(dict.fromkeys(running.requests, (0, 0)))
            running.scene.now += 1.0
        counted[in_bulk] = running.scene.cache.observe()["prefill_speed"]
        running.scene.close()
    assert counted[True] == counted[False] > 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["", "", "", "", "reset", "preempt", "distrust", "identity", "version"]),
        st.dictionaries(
            st.sampled_from("abc"), st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=3
        ),
    ),
    max_size=30,
)


LOADED_UP_TO_WHERE_IT_WAS = [
    ("", {"c": (2, 2)}),
    ("", {"c": (2, 2)}),
    ("", {"c": (2, 2)}),
    ("", {"c": (2, 2)}),
    ("", {"c": (0, 0)}),
    ("", {"c": (1, 1)}),
    ("", {"c": (3, 0)}),
    ("preempt", {"c": (2, 2)}),
    ("", {"c": (0, 0)}),
]
"""The token after the last step is the first that the load has brought it further."""


@example(steps=LOADED_UP_TO_WHERE_IT_WAS, lengths=(1, 1, 4))
@given(steps=STEPS, lengths=st.tuples(*[st.integers(1, 4 * BLOCK_SIZE)] * 3))
def test_nothing_differs_from_a_cache_that_is_told_of_every_request_in_every_step(
    steps: list[tuple[str, dict[str, tuple[int, int]]]], lengths: tuple[int, int, int]
) -> None:
    both = [Running(in_bulk=True), Running(in_bulk=False)]
    for each in both:
        for name, length in zip("abc", lengths, strict=True):
            each.add(name, tokens(length, seed=length % 2))
    for number, (event, wanted) in enumerate(steps):
        drafts = {name: (more, min(more, kept)) for name, (more, kept) in wanted.items()}
        name = min(drafts)
        works = []
        for each in both:
            cache, table = each.scene.cache, each.scene.tables.get(name, [])
            if event == "reset":
                cache.reset()
            elif event == "version":
                cache.reset()
                cache.set_weights_version(f"v{number}")
            elif event == "preempt":
                each.ask(name)
            elif event == "distrust" and table:
                first = number % len(table)
                cache.distrust_blocks({table[first]}, {name: table})
                each.computed[name] = min(each.computed[name], first * BLOCK_SIZE)
            elif event == "identity":
                each.requests[name].identity = RequestIdentity(adapter=f"{number}")
                cache.note_computed(each.requests[name], each.computed[name], partial(list, table))
            works.append(each.step(drafts))
        assert works[0] == works[1]
        for request in "abc":
            states = [each.state(request) for each in both]
            for fact in ("computed", "sound", "offloaded_blocks", "tag", "tail_tag", "loads_without_progress"):
                assert len({getattr(state, fact) for state in states}) == 1, fact
    for each in both:
        each.scene.close()
