"""Whatever fails inside kvpact costs a hit: every hook of vLLM's real scheduler and runner order survives it (H13)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm.forward_context import ForwardContext

from kvpact.cache import idle_steps
from kvpact.contract import LoadJob, SaveJob, StepWork
from kvpact.errors import ConfigError
from kvpact.tiers.disk.inspection import verify_slab
from kvpact.vllm.messages import PactHandshake, PactMetadata, PactWorkerMetadata
from kvpact.wire import StepMessage
from kvpact_testkit.vllm.faulty_copies import FaultyEngine
from polling import until
from vllm_played_engine import (
    BLOCK,
    PlayedEngine,
    PlayedRequest,
    answer,
    flush,
    make_prompt,
    wait_before_loads,
)

SYNCHRONOUS, ASYNCHRONOUS = {"sync_load_budget": "1GiB"}, {"sync_load_budget": 0}
STORED, FRESH, LATER = make_prompt(1, 6), make_prompt(2, 5), make_prompt(3, 7)
"""Prompts of several blocks: one that is in the cache before anything fails, one that is not, one that comes after."""


class Broken(RuntimeError):
    """What a test puts where kvpact's own code should be."""


class Fault:
    """A method that raises `times` times, instead of doing its work."""

    def __init__(self, owner: Any, name: str, times: int) -> None:
        self.raised = 0
        self.times = times
        self._method = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.raised < self.times:
            self.raised += 1
            raise Broken("injected")
        return self._method(*args, **kwargs)

    def end(self) -> None:
        self.times = 0


def part(engine: PlayedEngine, name: str) -> Any:
    """The object of kvpact that `name` begins with."""
    side = engine.connector.scheduler_side
    worker = engine.worker.cache_worker
    parts = {
        "scheduler": side,
        "cache": side.cache,
        "worker": worker,
        "jobs": worker.jobs,
        "transfer": worker.transfers,
    }
    return parts[name]


def assert_right(engine: PlayedEngine, prompt: list[int], cached_blocks: int | None = None) -> None:
    played = engine.generate(prompt)
    assert played.said == answer(prompt, 3)
    assert played.finish_reason == "length"
    if cached_blocks is not None:
        assert played.cached_tokens == cached_blocks * BLOCK


def stored(start: Callable[..., PlayedEngine], **settings: Any) -> PlayedEngine:
    """An engine that has computed and saved `STORED`, and has nothing of it itself."""
    engine = start(**settings)
    assert_right(engine, STORED, 0)
    engine.forget()
    return engine


def test_a_worker_of_another_install_stops_the_start(start: Callable[..., PlayedEngine]) -> None:
    engine = start()
    hello = engine.worker.get_handshake_metadata()
    assert isinstance(hello, PactHandshake)
    other = PactHandshake(hello.payload.replace(b", messages ", b".dev1, messages ", 1))
    with pytest.raises(ConfigError, match=r"a worker's handshake comes from kvpact .*dev1, messages"):
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): other})


SCHEDULER_METHODS = [
    "scheduler.on_new_request",
    "scheduler.prepare",
    "scheduler.end_step",
    "scheduler.request_finished",
    "scheduler.poll_idle",
    "scheduler.collect_stats",
    "cache.prepare_external_match",
    "cache.commit_external_match",
    "cache.note_running",
    "cache.note_computed",
    "cache.end_step",
    "cache.apply_report",
    "cache.request_finished",
]
WORKER_METHODS = [
    "worker.start_loads",
    "worker.wait_for_layer_load",
    "worker.start_saves",
    "worker.poll",
    "jobs.ended_loads",
    "worker.report",
    "jobs.report_broken",
    "transfer.start_loads",
    "transfer.wait_for_loads",
    "transfer.start_saves",
    "transfer.poll",
]


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS], ids=["sync", "async"])
@pytest.mark.parametrize("method", [*SCHEDULER_METHODS, *WORKER_METHODS])
def test_h13_an_exception_in_any_hook_costs_a_hit_never_the_engine(
    start: Callable[..., PlayedEngine], method: str, settings: dict[str, Any]
) -> None:
    engine = start(**settings)
    assert_right(engine, STORED, 0)
    owner, _, name = method.partition(".")
    raised = 0
    for prompt in (STORED, FRESH):  # one that is loaded, one that is saved
        for times in (1, 3, 8):
            engine.forget()
            fault = Fault(part(engine, owner), name, times)
            assert_right(engine, prompt)
            fault.end()
            raised += fault.raised
    unused = settings is ASYNCHRONOUS and method in ("worker.wait_for_layer_load", "transfer.wait_for_loads")
    assert raised or unused, f"{method} was never called"
    half = engine.connector if owner in ("scheduler", "cache") else engine.worker
    assert half.metrics.snapshot()["hook_errors"] == raised
    for prompt in (STORED, FRESH, LATER):
        engine.forget()
        assert_right(engine, prompt)
    for prompt in (STORED, FRESH, LATER):
        engine.forget()
        assert_right(engine, prompt, cached_blocks=len(prompt) // BLOCK)


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS], ids=["sync", "async"])
@pytest.mark.parametrize("method", [*SCHEDULER_METHODS, *WORKER_METHODS])
def test_h13_a_hook_that_always_fails_does_not_keep_an_engine_stepping_that_has_nothing_to_do(
    start: Callable[..., PlayedEngine], method: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(idle_steps, "VAIN_SECONDS", 0.05)
    engine = start(tiers=[f"disk://{tmp_path}/slabs?capacity=1MiB"], **settings)
    owner, _, name = method.partition(".")
    for stem, under_way in ((STORED, False), (FRESH, True)):
        played = engine.add(stem)
        while played.request.request_id in engine.scheduler.requests:
            engine.step()
        if not under_way:  # else what the request saved is not in the tier yet
            flush(engine)
        fault = Fault(part(engine, owner), name, 1_000_000)
        engine.run()
        if (
            name not in ("poll", "ended_loads") or settings is SYNCHRONOUS
        ):  # else nobody knows when a copy has ended: its request must wait
            for prompt in (stem, LATER):
                assert_right(engine, prompt)
        fault.end()
        for cached_blocks in (None, None, len(stem) // BLOCK):
            engine.forget()
            assert_right(engine, stem, cached_blocks)
    flush(engine)


def test_h32_after_a_reset_that_failed_nothing_is_served_or_stored_until_one_works(
    start: Callable[..., PlayedEngine],
) -> None:
    """The answer is "done" all the same: vLLM's sleep and pause would fail at "no", with the weights half updated."""
    engine = start()
    assert_right(engine, STORED, 0)
    Fault(part(engine, "cache"), "reset", 1)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    for _ in range(2):
        assert_right(engine, STORED, 0)
        engine.forget()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    for cached_blocks in (0, 6):
        assert_right(engine, STORED, cached_blocks)
        engine.forget()


# Failed loads

LONGER = make_prompt(4, 9, stem=STORED)
"""Begins with all of `STORED` and computes three blocks more."""


def break_copies(engine: PlayedEngine) -> Fault:
    """No page arrives any more, whoever loads it and however."""
    return Fault(part(engine, "transfer").engine.copier, "scatter", 1_000_000)


def break_commit(engine: PlayedEngine) -> Fault:
    return Fault(part(engine, "cache"), "commit_external_match", 1)


def break_step(engine: PlayedEngine) -> Fault:
    return Fault(part(engine, "cache"), "end_step", 1)


def break_orders(engine: PlayedEngine) -> Fault:
    return Fault(part(engine, "worker"), "start_loads", 1)


BREAKS = [break_copies, break_commit, break_step, break_orders]


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS], ids=["sync", "async"])
@pytest.mark.parametrize("cancelled", [False, True], ids=["recomputed", "cancelled"])
@pytest.mark.parametrize("broken", BREAKS)
def test_h28_nothing_of_a_failed_load_stays_in_the_engines_prefix_cache(
    start: Callable[..., PlayedEngine],
    broken: Callable[[PlayedEngine], Fault],
    cancelled: bool,
    settings: dict[str, Any],
) -> None:
    engine = stored(start, **settings)
    fault = broken(engine)
    victim = engine.add(LONGER)
    while not fault.raised:
        engine.step(lambda: engine.cancel(victim) if cancelled and fault.raised else None)
    fault.end()
    # Its blocks were published before they were loaded, and three more that were computed from nothing.
    for _ in range(3):
        assert_right(engine, LONGER)  # the second and third time from what the engine then has
    engine.run()
    assert cancelled or victim.said == answer(LONGER, 3)
    engine.forget()
    assert_right(engine, LONGER)


@pytest.mark.parametrize("first_failed", [0, 2, 5])
def test_h09_h28_a_failed_asynchronous_load_is_recomputed_from_there_and_not_tried_for_ever(
    start: Callable[..., PlayedEngine], first_failed: int, tmp_path: Path
) -> None:
    engine = stored(start, **ASYNCHRONOUS, tiers=[f"disk://{tmp_path}/slab?capacity=1MiB"])

    transfers = part(engine, "transfer")
    whole = transfers.engine
    transfers.engine = FaultyEngine(whole, lambda job, block: isinstance(job, LoadJob) and block >= first_failed)
    assert_right(engine, STORED)
    counts = engine.counts
    assert counts["failed_tokens"] == (6 - first_failed) * BLOCK
    assert counts["used_tokens"] == first_failed * BLOCK
    assert counts["promised_tokens"] == counts["committed_tokens"] == 6 * BLOCK
    assert counts["plans_opened"] == 1, "H09: what failed is not promised to the same request again"
    transfers.engine = whole
    engine.forget()
    assert_right(engine, STORED, cached_blocks=6)  # it was stored anew, in memory and on disk
    engine.run()
    (slab,) = (tmp_path / "slab").glob("kvpact/*.slab")
    assert verify_slab(slab).sound == 6


def test_h28_what_failed_to_load_is_gone_everywhere_until_it_is_computed_again(
    start: Callable[..., PlayedEngine], tmp_path: Path
) -> None:
    engine = stored(start, **ASYNCHRONOUS, tiers=[f"disk://{tmp_path}/slab?capacity=1MiB"])
    fault = break_copies(engine)
    victim = engine.add(STORED)
    while not fault.raised:
        engine.step()
    engine.cancel(victim)
    engine.run()
    fault.end()  # not before: what fails together is tried block by block
    assert engine.counts['held_blocks{tier="memory"}'] == 0
    until(lambda: not engine.counts['held_blocks{tier="disk"}'])  # the disk tier's thread drops them in its own time
    assert_right(engine, STORED, cached_blocks=0)


def test_h07_h08_a_load_of_a_cancelled_request_keeps_its_blocks_until_it_is_reported_once(
    start: Callable[..., PlayedEngine],
) -> None:
    engine = stored(start, **ASYNCHRONOUS)
    go_on, free = threading.Event(), engine.pool.get_num_free_blocks()
    wait_before_loads(engine, go_on)
    victim = engine.add(STORED)
    engine.step()
    engine.cancel(victim)
    for _ in range(20):
        engine.step()
    assert engine.pool.get_num_free_blocks() < free, "its blocks may still be written"
    assert_right_meanwhile(engine, FRESH)
    go_on.set()
    engine.run()
    assert engine.pool.get_num_free_blocks() == free
    assert_right(engine, STORED, cached_blocks=6)


def test_h07_h13_a_load_that_is_given_up_keeps_its_blocks_until_its_copy_ends(
    start: Callable[..., PlayedEngine],
) -> None:
    engine = stored(start, **ASYNCHRONOUS)
    go_on, free = threading.Event(), engine.pool.get_num_free_blocks()
    wait_before_loads(engine, go_on)
    fault = Fault(part(engine, "transfer"), "poll", 1)
    victim = engine.add(STORED)
    while not fault.raised:
        engine.step()
    engine.cancel(victim)
    for _ in range(5):
        engine.step()
    assert engine.pool.get_num_free_blocks() < free, "its blocks may still be written"
    go_on.set()
    engine.run()
    assert engine.pool.get_num_free_blocks() == free
    assert_right(engine, STORED)


def assert_right_meanwhile(engine: PlayedEngine, prompt: list[int]) -> None:
    """Like `assert_right`, without waiting for what else is under way."""
    played = engine.add(prompt)
    while not played.finish_reason:
        engine.step()
    assert played.said == answer(prompt, 3)


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS], ids=["sync", "async"])
@pytest.mark.parametrize("broken", BREAKS)
def test_h09_a_load_that_fails_every_time_is_tried_once_a_request(
    start: Callable[..., PlayedEngine], broken: Callable[[PlayedEngine], Fault], settings: dict[str, Any]
) -> None:
    engine = stored(start, **settings)
    fault = broken(engine)
    fault.times = 1_000_000
    assert_right(engine, LONGER)
    assert engine.counts["plans_opened"] <= 2  # a broken step may lose one plan that it never came to order
    fault.end()
    engine.run()
    engine.forget()
    assert_right(engine, LONGER)


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS], ids=["sync", "async"])
def test_h13_orders_that_cannot_be_encoded_are_a_broken_step_and_hold_nothing(
    start: Callable[..., PlayedEngine], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stored(start, **settings, load_deadline="300ms")
    encode, refused = PactMetadata.of, 0

    def refuse_loads(message: StepMessage) -> PactMetadata:
        nonlocal refused
        if message.work.loads:
            refused += 1
            raise Broken("injected")
        return encode(message)

    monkeypatch.setattr(PactMetadata, "of", refuse_loads)
    assert_right(engine, LONGER)
    monkeypatch.undo()
    assert refused == engine.counts["hook_errors"] == 1
    engine.run()
    for _ in range(2):
        engine.forget()
        assert_right(engine, LONGER)


@pytest.mark.parametrize("asks_for_saves", [True, False], ids=["0.31", "0.30"])
def test_h44_a_save_of_a_step_that_computes_nothing_is_made_and_reported_once(
    start: Callable[..., PlayedEngine], asks_for_saves: bool
) -> None:
    """vLLM 0.30 calls no `wait_for_save` there: the save was never reported, and its block held for ever."""
    engine = stored(start, **SYNCHRONOUS)
    worker = engine.worker
    job = SaveJob(1000, "r", 0, slots=(0,), block_ids=(1,))
    worker.bind_connector_metadata(PactMetadata.of(StepMessage(StepWork(saves=(job,)), computes=False)))
    worker.start_load_kv(ForwardContext({}, {}, {}))
    if asks_for_saves:
        worker.wait_for_save()
    worker.get_transfer_results(set())
    assert part(engine, "transfer").drain(10.0)
    worker.bind_connector_metadata(PactMetadata.of(StepMessage(computes=False)))
    worker.get_transfer_results(set())
    report = worker.build_connector_worker_meta()
    assert isinstance(report, PactWorkerMetadata)
    assert [*report.message().ranks[0]] == [1000]


# Everything at once

LAST_WORDS = {"jobs.report_broken", "jobs.ended_loads"}
"""These only name what failed. Should they fail beside another fault, nothing is left to say so."""
NAMES = sorted({*SCHEDULER_METHODS, *WORKER_METHODS, "engine.scatter", "engine.gather"} - LAST_WORDS)


def live_through_faults(engine: PlayedEngine, seed: int, requests: int) -> None:
    """Requests that share stems come, are preempted and cancelled in an engine too small for them; anything fails."""
    choose = random.Random(seed)
    stems = [make_prompt(family, 4, tail=0) for family in range(3)]
    alive: list[tuple[PlayedRequest, list[int], int]] = []
    faults: list[Fault] = []
    for _ in range(requests):
        while len(alive) > 6:
            alive = walk_on(engine, choose, alive)
        if choose.random() < 0.3:
            owner, _, name = choose.choice(NAMES).partition(".")
            owner_object = part(engine, "transfer").engine.copier if owner == "engine" else part(engine, owner)
            faults.append(Fault(owner_object, name, choose.choice([1, 1, 2, 5])))
        if choose.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
        prompt = make_prompt(choose.randrange(12), choose.randrange(1, 9), choose.randrange(1, 16))
        if choose.random() < 0.8:
            prompt = make_prompt(choose.randrange(12), choose.randrange(4, 9), 5, stem=choose.choice(stems))
        max_tokens = choose.choice([1, 3, 20])
        alive.append((engine.add(prompt, max_tokens), prompt, max_tokens))
        alive = walk_on(engine, choose, alive)
    for fault in faults:
        fault.end()
    while alive:
        alive = walk_on(engine, choose, alive, cancel=False)
    engine.run(seconds=30.0)
    for _ in range(20):  # a plan whose request's end was lost is not renewed, and expires
        time.sleep(0.02)
        engine.step()


def walk_on(
    engine: PlayedEngine, choose: random.Random, alive: list[Any], cancel: bool = True
) -> list[tuple[PlayedRequest, list[int], int]]:
    """One step, in which a request may be cancelled; the answers that it completes must be right."""
    victim = choose.choice(alive) if cancel and choose.random() < 0.03 else None

    def strike() -> None:
        if victim is not None:
            engine.cancel(victim[0])

    if not engine.step(strike):
        time.sleep(0.001)
    left = []
    for played, prompt, max_tokens in alive:
        if played.finish_reason == "length":
            assert played.said == answer(prompt, max_tokens)
        elif victim is None or played is not victim[0]:
            assert not played.finish_reason
            left.append((played, prompt, max_tokens))
    return left


@pytest.mark.parametrize("seed", range(4))
def test_h13_h27_no_answer_is_ever_wrong_whatever_fails_whenever(
    start: Callable[..., PlayedEngine], tmp_path: Path, seed: int
) -> None:
    engine = start(
        num_blocks=40,
        num_batched_tokens=128,
        memory="256KiB",
        sync_load_budget=[0, "32KiB", "1GiB"][seed % 3],
        load_deadline="1s",
        plan_lifetime="200ms",
        tiers=[f"disk://{tmp_path}/slab?capacity=512KiB"],
    )
    live_through_faults(engine, seed, requests=150)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(102, marks=[pytest.mark.proof]),
        *(pytest.param(seed, marks=[pytest.mark.soak]) for seed in range(100, 160) if seed != 102),
    ],
)
def test_h13_h27_no_answer_is_ever_wrong_in_a_long_life(
    start: Callable[..., PlayedEngine], tmp_path: Path, seed: int
) -> None:
    engine = start(
        num_blocks=random.Random(seed).choice([24, 40, 100]),
        num_batched_tokens=random.Random(seed).choice([32, 128, 2048]),
        memory="256KiB",
        sync_load_budget=[0, "32KiB", "1GiB"][seed % 3],
        load_deadline="1s",
        plan_lifetime="200ms",
        tiers=[f"disk://{tmp_path}/slab?capacity=512KiB"],
    )
    live_through_faults(engine, seed, requests=500)


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS], ids=["sync", "async"])
@pytest.mark.parametrize("same", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK - 1])
def test_h30_what_follows_the_last_whole_block_of_a_load_is_computed(
    start: Callable[..., PlayedEngine], settings: dict[str, Any], same: int
) -> None:
    """Prompts part inside a block that is stored whole, for one of them: its end is nobody else's."""
    engine = stored(start, **settings)
    for tail in (1, BLOCK - same % BLOCK, BLOCK):
        engine.forget()
        prompt = make_prompt(50 + tail, 0, same + tail, stem=STORED[:same])
        assert_right(engine, prompt, cached_blocks=same // BLOCK)
    engine.forget()
    assert_right(engine, STORED, 6)


@pytest.mark.parametrize("settings", [SYNCHRONOUS, ASYNCHRONOUS], ids=["sync", "async"])
def test_h44_what_a_step_reports_that_ends_its_request_is_stored(
    start: Callable[..., PlayedEngine], settings: dict[str, Any]
) -> None:
    engine = start(**settings)
    transfers, save = part(engine, "transfer"), engine.worker.wait_for_save

    def save_at_once() -> None:
        save()
        assert transfers.drain(10.0)

    engine.worker.wait_for_save = save_at_once  # type: ignore[method-assign]
    played = engine.add(STORED, max_tokens=1)
    engine.step()
    assert (played.finish_reason, played.said) == ("length", answer(STORED, 1)), "it ended in the step that reported"
    assert engine.counts["saved_blocks"] == 6
    engine.run()
    engine.forget()
    assert_right(engine, STORED, 6)
