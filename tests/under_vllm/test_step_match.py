"""`match_at` "step": shared tiers are asked by the workers when a step begins, and never by the scheduler's half.

The scheduler, both halves of the connector, the hook and the store are real; the model is played by an oracle that
answers wrong if one byte of what it attends to is wrong.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.errors import ConfigError
from kvpact.tiers.breaker import FIRST_PAUSE_S
from kvpact.tiers.shared.tier import SharedTier
from kvpact.vllm.connector import PactConnector
from kvpact.vllm.step_hook import StepHook
from polling import until
from vllm_played_engine import BLOCK, PlayedEngine, answer, flush, make_prompt

PROMPTS = [make_prompt(seed, 6) for seed in range(4)]
STEP: dict[str, Any] = {"match_at": "step", "step_deadline": "8s"}
"""A busy machine is no failure."""


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of an empty store."""
    (tmp_path / "shared").mkdir()
    return f"dir://{tmp_path}/shared?capacity=1GiB"


@pytest.fixture
def filled(start: Callable[..., PlayedEngine], store: str) -> str:
    """A store that holds all `PROMPTS`, written by another engine."""
    engine = start(store)
    for prompt in PROMPTS:
        assert engine.generate(prompt).said == answer(prompt, 3)
    flush(engine)
    return store


def computed_of(engine: PlayedEngine, prompt: list[int], **arguments: Any) -> int:
    """How many tokens of a prompt the engine computed for a right answer of one token."""
    before = engine.computed_tokens
    played = engine.generate(prompt, 1, **arguments)
    assert played.said == answer(prompt, 1)
    assert played.finish_reason == "length"
    return engine.computed_tokens - before


@pytest.mark.parametrize("zero", [False, True], ids=["", "zeroed"])
def test_h93_what_the_store_holds_is_found_at_the_step_and_counted_once(
    start: Callable[..., PlayedEngine], filled: str, zero: bool
) -> None:
    engine = start(filled, zero_new_blocks=zero, **STEP)
    for prompt in PROMPTS:
        assert computed_of(engine, prompt) == 5
        engine.forget()
    engine.assert_at_rest()
    counts = engine.counts
    tokens = 6 * BLOCK * len(PROMPTS)
    assert counts["used_tokens"] == counts["loaded_tokens"] == counts["promised_tokens"] == tokens
    assert counts["step_hits"] == counts["step_lookups"] == len(PROMPTS)
    assert counts['read_blocks{tier="directory"}'] == 6 * len(PROMPTS)
    assert counts['used_tokens_from{tier="directory"}'] == tokens
    assert counts["hook_errors"] == 0
    # The scheduler's half knows them from the reports: the next time memory answers, before the step.
    for prompt in PROMPTS:
        before = engine.computed_tokens
        played = engine.generate(prompt, 1)
        assert played.cached_tokens == 6 * BLOCK
        assert engine.computed_tokens - before == 5
        engine.forget()
    flush(engine)
    counts = engine.counts
    assert counts["step_lookups"] == len(PROMPTS), "memory needs no look-up"
    assert counts["used_tokens"] == 2 * tokens
    assert counts['used_tokens_from{tier="memory"}'] == counts['used_tokens_from{tier="directory"}'] == tokens
    assert counts['read_blocks{tier="directory"}'] == 6 * len(PROMPTS)
    assert counts['written_blocks{tier="directory"}'] == 0, "what came from the store is not written there again"


def test_h70_the_request_and_the_hits_of_all_are_told_once(start: Callable[..., PlayedEngine], filled: str) -> None:
    engine = start(filled, **STEP)
    played = engine.generate(PROMPTS[0])
    assert played.said == answer(PROMPTS[0], 3)
    assert played.cached_tokens == engine.counts["used_tokens"] == 6 * BLOCK
    assert engine.external_hits == engine.external_hits_by_source == 6 * BLOCK


@pytest.mark.parametrize("match_at", ["schedule", "step"])
@pytest.mark.parametrize("below", ["", "disk", "shared", "disk shared", "shared disk"])
def test_h70_what_is_told_is_what_was_not_computed_whatever_is_below_memory(
    start: Callable[..., PlayedEngine], filled: str, tmp_path: Path, below: str, match_at: str
) -> None:
    """Three rounds over prompts that memory holds half of; from the second on a disk has them too."""
    urls = {"disk": f"disk://{tmp_path}/slab?capacity=4MiB", "shared": filled}
    settings = {"step_deadline": "8s", "prepare_deadline": "8s", "match_at": match_at}
    engine = start(*(urls[kind] for kind in below.split()), memory="128KiB", num_batched_tokens=64, **settings)
    whole = len(PROMPTS[0])
    skipped = 0
    for each_round in range(3):
        for prompt in PROMPTS:
            before = engine.computed_tokens
            played = engine.generate(prompt, 1)
            assert played.said == answer(prompt, 1)
            here = whole - (engine.computed_tokens - before)
            assert played.cached_tokens == here
            skipped += here
            flush(engine)
            engine.forget()
        if each_round == 0:
            assert (skipped > 0) == ("shared" in below)
    counts = engine.counts
    assert counts["used_tokens"] + counts["used_again_tokens"] == skipped == engine.external_hits
    assert engine.external_queries == 3 * len(PROMPTS) * whole
    assert skipped > 0 or not below, "memory alone is too small for all of them and forgets them in turn"
    if match_at == "step" and below == "shared":
        assert counts["step_hits"] > 0
        assert skipped > 2 * len(PROMPTS) * whole
    assert counts["hook_errors"] == 0


def test_the_scheduler_asks_the_store_for_nothing(
    start: Callable[..., PlayedEngine], filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(filled, **STEP)

    def refuse(_: SharedTier, keys: Sequence[bytes]) -> list[bool]:
        if threading.current_thread().name != "kvpact-open-tier":  # the worker's, which asks a tier once
            pytest.fail("asked by the scheduler")
        return [False] * len(keys)

    for question in ("lookup", "leading"):
        monkeypatch.setattr(SharedTier, question, refuse)
    for prompt in PROMPTS:
        played = engine.add(prompt, 1)
        engine.step()
        assert played.said == answer(prompt, 1), "no step went by in waiting"
    engine.run()
    assert engine.counts["step_hits"] == len(PROMPTS)


@pytest.mark.parametrize("budget", [16, 40, 64, 100])
def test_prompts_that_are_computed_in_parts_are_found_part_by_part(
    start: Callable[..., PlayedEngine], filled: str, budget: int
) -> None:
    engine = start(filled, num_batched_tokens=budget, **STEP)
    whole = len(PROMPTS[0])
    for prompt in PROMPTS:
        assert computed_of(engine, prompt) < (whole if budget < 2 * BLOCK else whole // 2)
        engine.forget()
    counts = engine.counts
    assert counts["used_tokens"] == whole * len(PROMPTS) - engine.computed_tokens
    assert counts["loaded_tokens"] >= counts["used_tokens"]


def test_memory_and_store_and_what_is_computed_add_up(start: Callable[..., PlayedEngine], store: str) -> None:
    longer = make_prompt(9, 8, stem=PROMPTS[0][: 6 * BLOCK])
    other = start(store)
    other.generate(longer)
    flush(other)
    engine = start(store, **STEP, save="eager")
    assert computed_of(engine, PROMPTS[0][: 3 * BLOCK + 5]) == 5  # three blocks of it are in memory now
    engine.forget()
    longest = make_prompt(10, 10, stem=longer[: 8 * BLOCK])
    before = engine.computed_tokens
    played = engine.generate(longest, 1)
    assert played.said == answer(longest, 1)
    assert engine.computed_tokens - before == 2 * BLOCK + 5, "three blocks from memory and five from the store"
    assert played.cached_tokens == 8 * BLOCK
    engine.run()
    engine.forget()
    assert engine.generate(longest, 1).cached_tokens == 10 * BLOCK
    flush(engine)
    assert engine.counts['written_blocks{tier="directory"}'] == 2


def test_all_requests_of_a_step_together_are_given_at_most_its_budget(
    start: Callable[..., PlayedEngine], filled: str
) -> None:
    """Eight blocks of 8 KiB: the first prompt gets six of them, the second two; what is left over is computed."""
    engine = start(filled, sync_load_budget="64KiB", **STEP)
    played = [engine.add(prompt, 1) for prompt in PROMPTS[:3]]
    engine.step()
    for one, prompt in zip(played, PROMPTS, strict=False):
        assert one.said == answer(prompt, 1)
    assert [one.cached_tokens for one in played] == [6 * BLOCK, 2 * BLOCK, 0]
    assert engine.counts["loaded_tokens"] == 8 * BLOCK
    engine.run()
    engine.forget()
    assert computed_of(engine, PROMPTS[3]) == 5, "the next step has a budget of its own"
    engine.run()


def test_what_memory_supplies_leaves_less_of_the_step_to_the_store(
    start: Callable[..., PlayedEngine], filled: str
) -> None:
    engine = start(filled, sync_load_budget="40KiB", num_batched_tokens=512, **STEP)
    engine.generate(PROMPTS[0][: 3 * BLOCK + 5], 1)
    engine.forget()
    before = engine.computed_tokens
    played = engine.generate(PROMPTS[0], 1)
    assert played.said == answer(PROMPTS[0], 1)
    assert engine.computed_tokens - before == BLOCK + 5, "three blocks from memory, two of three from the store"


def test_what_may_not_be_loaded_is_not_looked_for(start: Callable[..., PlayedEngine], filled: str) -> None:
    engine = start(filled, **STEP)
    assert computed_of(engine, PROMPTS[0], cache_salt="another tenant") == len(PROMPTS[0])
    engine.forget()
    assert engine.counts["step_hits"] == 0
    assert computed_of(engine, PROMPTS[0]) == 5


def test_h61_prompts_that_a_store_does_not_hold_are_no_failures_of_the_store(
    start: Callable[..., PlayedEngine], filled: str
) -> None:
    """The step reads without a look-up before it: after some misses in a row the store was left alone for a while."""
    engine = start(filled, **STEP)
    for seed in range(100, 108):
        unknown = make_prompt(seed, 6)
        assert computed_of(engine, unknown) == len(unknown)
        engine.forget()
    for prompt in PROMPTS:
        assert computed_of(engine, prompt) == 5
        engine.forget()


def test_h32_nothing_is_looked_for_in_a_store_that_is_to_forget_it(
    start: Callable[..., PlayedEngine], filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(filled, **STEP)
    assert computed_of(engine, PROMPTS[0]) == 5
    clear, go_on = SharedTier.clear, threading.Event()

    def late(tier: SharedTier) -> None:
        go_on.wait(10.0)
        clear(tier)

    monkeypatch.setattr(SharedTier, "clear", late)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)  # the weights changed
    for prompt in PROMPTS[:2]:
        before = engine.computed_tokens
        played = engine.add(prompt, 1)
        engine.step()
        assert played.said == answer(prompt, 1)
        assert engine.computed_tokens - before == len(prompt), "the store still has it"
    go_on.set()
    assert engine.counts["step_hits"] == 1
    engine.run()


def test_a_store_that_is_slow_costs_its_deadline_and_then_nothing(
    start: Callable[..., PlayedEngine], filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(filled, match_at="step", step_deadline="50ms")
    get, go_on, asked, ended = SharedTier.get, threading.Event(), list[int](), list[int]()

    def slow(*arguments: Any, **options: Any) -> list[bool]:
        asked.append(1)
        assert go_on.wait(20.0)
        found = get(*arguments, **options)
        ended.append(1)
        return found

    monkeypatch.setattr(SharedTier, "get", slow)
    began = time.monotonic()
    for prompt in [*PROMPTS, *(make_prompt(seed, 4) for seed in range(20, 26))]:
        played = engine.add(prompt, 1)
        engine.step()
        assert played.said == answer(prompt, 1)
    engine.run()
    assert engine.counts["step_hits"] == 0
    tries = (time.monotonic() - began) / FIRST_PAUSE_S
    assert 1 <= len(asked) <= 3 + tries, "the breaker should have opened; a read that waits for a thread is late too"
    go_on.set()
    until(lambda: len(ended) == len(asked))
    engine.forget()
    engine.assert_at_rest()
    # What was read too late went into memory of its own: the slots hold what the engine saved meanwhile.
    for prompt in PROMPTS:
        played = engine.generate(prompt, 1)
        assert played.cached_tokens == 6 * BLOCK
        assert played.said == answer(prompt, 1)
        engine.forget()


def test_damaged_records_are_computed(start: Callable[..., PlayedEngine], filled: str, tmp_path: Path) -> None:
    records = [path for path in (tmp_path / "shared").rglob("*") if path.is_file() and path.stat().st_size > 8192]
    assert len(records) >= 6 * len(PROMPTS)
    for record in records[::2]:
        content = bytearray(record.read_bytes())
        content[-100:] = bytes(100)
        record.write_bytes(content)
    engine = start(filled, **STEP)
    assert sum(computed_of(engine, prompt) for prompt in PROMPTS) > 4 * 5
    engine.run()


def test_h13_a_failing_look_up_costs_its_hits(start: Callable[..., PlayedEngine], filled: str) -> None:
    engine = start(filled, **STEP)
    worker: Any = engine.worker.cache_worker
    worker.find_hits = lambda message: 1 / 0
    assert computed_of(engine, PROMPTS[0]) == len(PROMPTS[0])
    assert engine.worker.metrics.snapshot()["hook_errors"] > 0
    del worker.find_hits
    engine.run()
    assert computed_of(engine, PROMPTS[1]) == 5


def test_ranks_keep_their_own_part_and_load_what_all_have(
    filled: str, start: Callable[..., PlayedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank's hits are cut down, as by another rank that found less."""
    engine = start(filled, **STEP)
    engine.step_hook = StepHook(
        engine.worker,
        new_requests_only=False,
        minimum=lambda numbers: [min(number, 2 * BLOCK) for number in numbers],
    )
    assert computed_of(engine, PROMPTS[0]) == len(PROMPTS[0]) - 2 * BLOCK
    engine.run()
    engine.forget()
    assert engine.generate(PROMPTS[0], 1).cached_tokens == 6 * BLOCK


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(1, 3)),
        *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 12)),
    ],
)
def test_no_answer_is_wrong_in_a_crowded_engine(start: Callable[..., PlayedEngine], store: str, seed: int) -> None:
    choose = random.Random(seed)
    stems = [make_prompt(family, 4, tail=0) for family in range(3)]
    prompts = [make_prompt(100 + number, choose.randrange(5, 8), stem=choose.choice(stems)) for number in range(16)]
    settings = {"num_blocks": 40, "num_batched_tokens": choose.choice([48, 128, 512]), "memory": "256KiB"}
    engines = [start(store, **settings, **STEP), start(store, **settings, **STEP)]
    alive: list[tuple[PlayedEngine, Any, list[int]]] = []
    for _ in range(40):
        engine, prompt = choose.choice(engines), choose.choice(prompts)
        alive.append((engine, engine.add(prompt, choose.choice([1, 3, 20])), prompt))
        for one in engines:
            for _ in range(choose.randrange(6)):
                one.step()
        if choose.random() < 0.2:
            engine.cancel(alive.pop(choose.randrange(len(alive)))[1]) if alive[-1][0] is engine else None
        if choose.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
    for engine in engines:
        engine.run(30.0)
        counts = engine.counts
        assert counts["promised_tokens"] >= counts["committed_tokens"] >= counts["loaded_tokens"]
        assert counts["loaded_tokens"] >= counts["used_tokens"] + counts["used_again_tokens"]
        assert counts["hook_errors"] == 0
    for _, played, prompt in alive:
        if played.finish_reason == "length":
            assert played.said == answer(prompt, len(played.said))
    assert sum(engine.counts["step_hits"] for engine in engines) > 0


# What is refused


def test_settings_that_cannot_work_are_refused_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r'match_at="step" .*save="off".*set "save": "eager"'):
        PlayedEngine(tmp_path, match_at="step", save="off")
    monkeypatch.setattr(PactConnector, "step_hook_bound", lambda self: None)
    with pytest.raises(ConfigError, match=r"add --worker-cls kvpact\.vllm\.worker\.KvpactWorker"):
        PlayedEngine(tmp_path, match_at="step")


def test_a_step_that_may_wait_for_nothing_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'match_at="step" .*sync_load_budget=0 .*"match_at": "schedule"'):
        PlayedEngine(tmp_path, match_at="step", sync_load_budget=0)


def test_by_default_the_hook_is_off(start: Callable[..., PlayedEngine], filled: str) -> None:
    engine = start(filled)
    assert engine.worker.before_update_states is None
    assert engine.step_hook is None
    assert computed_of(engine, PROMPTS[0]) == 5
    assert engine.counts["step_lookups"] == 0
