"""What the scheduler's half makes of what the ranks say of their weights, on vLLM's real scheduler and alone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.cache.weights_watch import WeightsWatch
from kvpact.errors import WeightsVersionRefused
from kvpact.identity.notices import NoticeWriter
from kvpact.vllm.messages import PactHandshake, PactMetadata
from kvpact.wire import StepMessage
from vllm_played_engine import BLOCK, PlayedEngine, PlayedRequest, answer, make_prompt, wait_before_loads

BLOCKS = 6
STORED = make_prompt(1, BLOCKS)
EACH_WAY = pytest.mark.parametrize("sync_load_budget", ["1GiB", 0], ids=["sync", "async"])


# Alone


class Told:
    """What stands for the cache: notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses: set[str] = set()
        self.broken = False

    def reset(self) -> None:
        self.calls.append("reset")
        if self.broken:
            raise RuntimeError("injected")

    def set_weights_version(self, word: str) -> None:
        self.calls.append(word)
        if word in self.refuses:
            raise WeightsVersionRefused("it was in force before")

    def take_back_reset(self) -> bool:
        self.calls.append("back")
        return True

    def heard(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


class Ranks:
    """Two ranks and the watch over them."""

    def __init__(self) -> None:
        pages = [memoryview(bytearray(4096)) for _ in range(2)]
        self.writers = [NoticeWriter(page) for page in pages]
        self.cache = Told()
        cache: Any = self.cache
        self.watch = WeightsWatch(pages, cache)

    def all(self, method: str, *arguments: str) -> None:
        for writer in self.writers:
            getattr(writer, method)(*arguments)

    def heard(self) -> list[str]:
        """What the cache is told at the next look."""
        assert self.watch.look()
        return self.cache.heard()

    def sleep(self) -> None:
        """As vLLM does it: it resets, then the workers sleep, then they wake."""
        self.watch.reset()
        assert self.cache.heard() == ["reset"]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_h32_one_ranks_change_begins_an_epoch_and_so_does_the_others(ranks: Ranks) -> None:
    assert ranks.heard() == []
    ranks.writers[1].weights_change()
    assert ranks.heard() == ["reset"]
    assert ranks.heard() == []
    ranks.writers[0].weights_change()
    ranks.writers[0].weights_change()
    assert ranks.heard() == ["reset"]
    assert ranks.watch.changes == (2, 1)


def test_h37_a_word_counts_when_all_ranks_say_it_of_their_weights_as_they_are(ranks: Ranks) -> None:
    ranks.all("weights_change")
    ranks.writers[0].set_word("step 2")
    assert ranks.heard() == ["reset"]
    ranks.writers[1].set_word("step 3")
    assert ranks.heard() == []
    ranks.writers[1].set_word("step 2")
    assert ranks.heard() == ["step 2"]
    assert ranks.heard() == []
    ranks.all("weights_change")
    ranks.all("set_word", "step 4")
    assert ranks.heard() == ["reset", "step 4"]
    ranks.all("set_word", "step 5")
    ranks.writers[1].weights_change()
    assert ranks.heard() == ["reset"], "rank 1 has changed since"


def test_h37_a_word_that_is_refused_is_logged_once(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.cache.refuses = {"step 1"}
    for _ in range(3):
        ranks.all("set_word", "step 1")
        assert ranks.heard() == ["step 1"]
    assert [record.getMessage() for record in caplog.records] == [
        "kvpact: the weights version 'step 1' is refused: it was in force before"
    ]


def test_a_sleep_from_which_all_ranks_wake_equal_is_taken_back(ranks: Ranks) -> None:
    ranks.sleep()
    ranks.writers[0].woke_equal()
    assert ranks.heard() == []
    ranks.writers[1].woke_equal()
    assert ranks.heard() == ["back"]
    assert ranks.heard() == []


@pytest.mark.parametrize(
    "between",
    [
        lambda ranks: ranks.writers[1].weights_change(),
        lambda ranks: ranks.all("set_word", "step 1"),
        lambda ranks: ranks.watch.engine_computes(),
        lambda ranks: ranks.writers[0].woke_equal(),
    ],
    ids=["a change", "a word", "a step", "another wake"],
)
@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
def test_h32_a_sleep_is_not_taken_back_after(ranks: Ranks, between: Callable[[Ranks], None], *, seen: bool) -> None:
    ranks.sleep()
    between(ranks)
    if seen:
        ranks.watch.look()
    ranks.all("woke_equal")
    assert "back" not in ranks.heard()


def test_h32_a_wake_without_a_reset_before_it_takes_nothing_back(ranks: Ranks) -> None:
    ranks.all("woke_equal")
    assert ranks.heard() == []
    ranks.sleep()
    ranks.all("woke_equal")
    assert ranks.heard() == ["back"]
    ranks.all("woke_equal")
    assert ranks.heard() == [], "the reset before the last one stays"


def test_h35_of_two_resets_the_first_stays(ranks: Ranks) -> None:
    ranks.sleep()
    ranks.sleep()
    ranks.all("woke_equal")
    assert ranks.heard() == ["back"], "PactCache takes back the last one only"


def test_h32_while_a_reset_fails_the_cache_may_not_be_used(ranks: Ranks) -> None:
    ranks.cache.broken = True
    ranks.writers[0].weights_change()
    with pytest.raises(RuntimeError, match="injected"):
        ranks.watch.look()
    assert not ranks.watch.look()
    with pytest.raises(RuntimeError, match="injected"):
        ranks.watch.reset()
    assert not ranks.watch.look()
    ranks.cache.broken = False
    ranks.watch.reset()
    assert ranks.watch.look()


# On vLLM's scheduler


@pytest.fixture
def engine(tmp_path: Path, sync_load_budget: object) -> Iterator[PlayedEngine]:
    engine = PlayedEngine(tmp_path, sync_load_budget=sync_load_budget)
    yield engine
    engine.assert_at_rest()
    engine.close()


def notices(engine: PlayedEngine) -> NoticeWriter:
    found = engine.worker.cache_worker.notices
    assert found is not None
    return found


def ask(engine: PlayedEngine, prompt: list[int] = STORED) -> PlayedRequest:
    """Nothing of it comes from the engine's own prefix cache."""
    engine.forget()
    played = engine.generate(prompt)
    assert played.said == answer(prompt, 3)
    return played


def cached_blocks(engine: PlayedEngine) -> int:
    return ask(engine).cached_tokens // BLOCK


@EACH_WAY
def test_h32_blocks_from_before_a_change_are_not_served(engine: PlayedEngine) -> None:
    assert [cached_blocks(engine) for _ in range(2)] == [0, BLOCKS]
    notices(engine).weights_change()
    assert [cached_blocks(engine) for _ in range(2)] == [0, BLOCKS]


@EACH_WAY
def test_h32_a_change_between_a_match_and_its_commit_loads_nothing(engine: PlayedEngine) -> None:
    ask(engine)
    engine.forget()
    allocate = engine.scheduler.kv_cache_manager.allocate_slots

    def change(*arguments: Any, **named: Any) -> Any:
        engine.scheduler.kv_cache_manager.allocate_slots = allocate
        notices(engine).weights_change()
        return allocate(*arguments, **named)

    engine.scheduler.kv_cache_manager.allocate_slots = change
    computed = engine.computed_tokens
    assert engine.generate(STORED).said == answer(STORED, 3)
    assert engine.computed_tokens - computed >= len(STORED)
    assert cached_blocks(engine) == BLOCKS, "what was computed instead is of the new weights"


def change_in_next_step(engine: PlayedEngine) -> None:
    """The weights change when the engine has ordered a step and the worker has not begun it."""
    execute = engine.execute

    def change(scheduled: Any) -> Any:
        engine.execute = execute  # type: ignore[method-assign]
        notices(engine).weights_change()
        return execute(scheduled)

    engine.execute = change  # type: ignore[method-assign]


@EACH_WAY
def test_h32_a_worker_loads_nothing_that_was_ordered_for_other_weights(engine: PlayedEngine) -> None:
    ask(engine)
    engine.forget()
    change_in_next_step(engine)
    computed = engine.computed_tokens
    assert engine.generate(STORED).said == answer(STORED, 3)
    assert engine.computed_tokens - computed >= len(STORED)
    assert cached_blocks(engine) == BLOCKS, "what was computed instead is of the new weights"


@pytest.mark.parametrize("sync_load_budget", [0])
@pytest.mark.parametrize("when", ["while it copies", "when it has ended", "when the report is on its way"])
def test_p13_what_a_load_under_way_at_a_reset_brings_is_computed_again(engine: PlayedEngine, when: str) -> None:
    """A reset by the engine itself: the worker hears of it with the next step."""
    ask(engine)
    engine.forget()
    transfer = engine.worker.cache_worker.transfers
    assert transfer is not None
    goes_on = threading.Event()
    wait_before_loads(engine, goes_on)
    computed = engine.computed_tokens
    again = engine.add(STORED)
    if when == "when the report is on its way":
        goes_on.set()
        execute = engine.execute

        def execute_late(scheduled: Any) -> Any:
            engine.worker.cache_worker.start_loads(scheduled.kv_connector_metadata.message().work)
            assert transfer.drain(10.0)
            scheduled.kv_connector_metadata = PactMetadata.of(StepMessage())
            return execute(scheduled)

        engine.execute = execute_late  # type: ignore[method-assign]
        engine.step(before_update=engine.connector.reset_cache)
        engine.execute = execute  # type: ignore[method-assign]
    else:
        engine.step()
        if when == "when it has ended":
            goes_on.set()
            assert transfer.drain(10.0)
        engine.connector.reset_cache()
        goes_on.set()
    engine.run()
    assert again.said == answer(STORED, 3)
    assert engine.computed_tokens - computed >= len(STORED)
    assert [cached_blocks(engine) for _ in range(2)][-1] == BLOCKS


@EACH_WAY
def test_h32_a_worker_saves_nothing_that_was_ordered_for_other_weights(engine: PlayedEngine) -> None:
    change_in_next_step(engine)
    assert engine.generate(STORED).said == answer(STORED, 3)
    assert [cached_blocks(engine) for _ in range(2)] == [0, BLOCKS]


@EACH_WAY
def test_h37_a_word_is_taken_in_with_the_change_before_it(engine: PlayedEngine) -> None:
    ask(engine)
    for word, known in (("step 1", 0), ("step 2", 0), ("step 1", BLOCKS)):
        notices(engine).weights_change()
        notices(engine).set_word(word)
        assert cached_blocks(engine) == known


@EACH_WAY
def test_a_sleep_keeps_what_is_stored_if_the_same_weights_wake(engine: PlayedEngine) -> None:
    ask(engine)
    engine.forget()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    notices(engine).woke_equal()
    assert cached_blocks(engine) == BLOCKS
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert cached_blocks(engine) == 0


@pytest.mark.parametrize("sync_load_budget", ["1GiB"])
def test_attaching_the_same_memory_again_does_nothing(engine: PlayedEngine, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM 0.33 hands the handshake over at each wake."""
    ask(engine)
    cache = engine.connector.scheduler_side.cache
    handshake = engine.worker.get_handshake_metadata()
    assert isinstance(handshake, PactHandshake)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
    assert engine.connector.scheduler_side.cache is cache
    assert [record for record in caplog.records if record.name.startswith("kvpact")] == []
    assert cached_blocks(engine) == BLOCKS
