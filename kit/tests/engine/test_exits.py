"""Between a match and its commit: every exit and every rewrite, told to the cache or not, and what is held
afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
from workloads import outputs_of, prompt, waiting_for_load

from kvpact.contract import EngineRequest, ExternalKVMatch, ExternalMatchExit, StepWork
from kvpact.errors import PactViolation
from kvpact.identity.keys import RequestIdentity
from kvpact_testkit.engine import (
    ByteSegment,
    Engine,
    EngineConfig,
    EngineQuirks,
    JobBehavior,
    ReferenceCache,
    Request,
    RequestStatus,
    SimulatedWorker,
    reference_engine,
)

NO_REUSE = EngineConfig(num_blocks=60, prefix_caching=False)
SILENT = EngineQuirks(silent_aborts=True)
PREFIX = prompt(64, 42)


class Diary(ReferenceCache):
    """A reference cache that writes down what it is asked and told."""

    def __init__(self, *args: int, **settings: int) -> None:
        super().__init__(*args, **settings)  # type: ignore[arg-type]
        self.lines: list[tuple[object, ...]] = []
        self.answers_later = False
        self.accepts_less: int | None = None
        self.looks_at_may_load = True
        self.asks_again = True

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        if isinstance(request, Request) and not self.looks_at_may_load:
            request.may_load, willing = True, request.may_load
            match = super().prepare_external_match(request, num_computed_tokens)
            request.may_load = willing
        else:
            match = None if self.answers_later else super().prepare_external_match(request, num_computed_tokens)
        self.lines.append(("prepare", request.request_id, num_computed_tokens, match and match.num_tokens))
        return match

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        if self.accepts_less is not None:
            num_tokens = min(num_tokens, self.accepts_less)
        self.lines.append(("commit", request.request_id, num_tokens))
        return super().commit_external_match(request, match, num_tokens, block_ids)

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        self.lines.append(("abort", request_id, str(reason)))
        super().abort_external_match(request_id, match, reason)

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        self.lines.append(("postpone", request_id, str(reason)))
        super().postpone_external_match(request_id, reason)

    def request_finished(self, request_id: str) -> None:
        self.lines.append(("finished", request_id))
        super().request_finished(request_id)

    def end_step(self) -> StepWork:
        work = super().end_step()
        return work if self.asks_again else replace(work, inquiries=())

    @property
    def held(self) -> int:
        """Blocks that plans hold."""
        return sum(entry.holds for entry in self.entries.values())


def warm_engine(
    quirks: EngineQuirks | None = None,
    config: EngineConfig = NO_REUSE,
    *,
    asynchronous: bool = False,
    conduct: JobBehavior | None = None,
) -> tuple[Engine, Diary]:
    """An engine whose cache holds the 4 blocks of PREFIX; its diary is empty."""
    cache = Diary(16, 64, num_ranks=config.num_ranks, asynchronous=asynchronous)
    segments = [ByteSegment(64, 4096) for _ in range(config.num_ranks)]
    behaviour = (
        None if conduct is None else (lambda rank, job: conduct if hasattr(job, "synchronous") else JobBehavior())
    )
    workers = [SimulatedWorker(rank, segment.slot_view, behaviour) for rank, segment in enumerate(segments)]
    engine = Engine(config, quirks, cache, workers)
    engine.run([Request("cold", PREFIX, 1)])
    cache.lines.clear()
    return engine, cache


def warm_request(name: str = "r", outputs: int = 2, **settings: object) -> Request:
    """A request of 84 tokens, 64 of them stored."""
    return Request(name, [*PREFIX, *prompt(20, 7)], outputs, **settings)  # type: ignore[arg-type]


def correct_output(outputs: int = 2) -> list[int]:
    engine = Engine()
    engine.run([warm_request(outputs=outputs)])
    return engine.finished["r"].output_token_ids


def test_prepare_then_commit_then_settled() -> None:
    for asynchronous in (False, True):
        engine, cache = warm_engine(asynchronous=asynchronous)
        engine.run([warm_request()])
        assert cache.lines == [("prepare", "r", 0, 64), ("commit", "r", 64), ("finished", "r")]
        assert engine.finished["r"].output_token_ids == correct_output()
        assert engine.counts.computed == 64 + 20 + 1
        assert engine.counts.external_hits == 64


def assert_ends_right(engine: Engine) -> None:
    """Run to the end: request r got what it must."""
    engine.run()
    assert engine.finished["r"].output_token_ids == correct_output()


def blocker(engine: Engine, blocks: int) -> list[int]:
    """Take blocks away so that an admission finds no room; returns them for `pool.free`."""
    return engine.scheduler.kv.pool.allocate(blocks, 0)


@pytest.mark.parametrize("silent", [False, True])
def test_h01_no_room_postpones_the_match(silent: bool) -> None:
    engine, cache = warm_engine(SILENT if silent else None)
    taken = blocker(engine, 57)
    engine.add_request(warm_request())
    for _ in range(10):
        engine.step()
    assert engine.counts.declined[ExternalMatchExit.NO_BLOCKS] == 10
    assert cache.held == 4  # renewed by each probe, held once
    said = [] if silent else [("postpone", "r", "no_blocks")]
    assert cache.lines == [("prepare", "r", 0, 64), *said] * 10
    assert engine.counts.postponed == ({} if silent else {ExternalMatchExit.NO_BLOCKS: 10})
    engine.scheduler.kv.pool.free(taken)
    assert_ends_right(engine)
    engine.check_nothing_held()
    assert cache.held == 0


class Naive(ReferenceCache):
    """Counts the pins of a connector that pins at each lookup and lets go of what it loads; saves nothing."""

    pins = 0

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        match = super().prepare_external_match(request, num_computed_tokens)
        self.pins += match.num_tokens // 16 if match else 0
        return match

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        self.pins -= num_tokens // 16
        return super().commit_external_match(request, match, num_tokens, block_ids)


@pytest.mark.parametrize(
    ("blocks", "asynchronous", "steps", "preemptions", "probes", "pins_left"),
    [
        (400, False, 72, 0, 40, 0),
        (40, False, 418, 37, 178, 1380),
        (40, True, 430, 37, 192, 1520),
        (20, False, 960, 0, 976, 9360),
    ],
)
def test_h01_silent_aborts_cost_what_they_cost_on_the_real_scheduler(
    blocks: int, asynchronous: bool, steps: int, preemptions: int, probes: int, pins_left: int
) -> None:
    """40 requests of 192 tokens, 160 of them stored: the very figures measured on vLLM's scheduler, 0.30 to 0.33."""
    config = EngineConfig(num_blocks=blocks, max_running=16, max_tokens_per_step=8192)
    cache = Naive(16, 400, asynchronous=asynchronous)
    quirks = replace(EngineQuirks.vllm_0_32(), async_scheduling=False)
    engine = Engine(config, quirks, cache, [SimulatedWorker(0, ByteSegment(400, 128).slot_view)])
    stored = [prompt(160, seed) for seed in range(40)]
    for tokens in stored:
        engine.run([Request("cold", tokens, 1)])
    cache.note_computed = lambda *_: None  # type: ignore[method-assign]
    engine.scheduler.kv.pool.unpublish_all()
    before, cache.pins = replace(engine.counts), 0
    engine.run([Request(f"r{i}", [*tokens, *prompt(32, 100 + i)], 24) for i, tokens in enumerate(stored)])
    counts = engine.counts
    assert counts.steps - before.steps == steps
    assert counts.preemptions - before.preemptions == preemptions
    assert counts.positive_probes - before.positive_probes == probes
    assert counts.commits - before.commits == 40
    assert cache.pins == pins_left
    assert all(entry.holds == 0 for entry in cache.entries.values())  # what the reference cache really holds


def test_h02_the_blocked_head_is_probed_each_step_and_nobody_behind_it() -> None:
    engine, cache = warm_engine(SILENT)
    taken = blocker(engine, 57)
    for name in ("head", "behind"):
        engine.add_request(warm_request(name))
    for _ in range(5):
        engine.step()
    assert [line[1] for line in cache.lines] == ["head"] * 5
    assert cache.held == 4
    engine.scheduler.kv.pool.free(taken)


def test_asked_to_come_back_later_everybody_is_probed() -> None:
    engine, cache = warm_engine()
    cache.answers_later = True
    for name in "abc":
        engine.add_request(warm_request(name))
    engine.step()
    engine.step()
    assert [line[1] for line in cache.lines] == list("abcabc")
    engine.cancel("b")
    assert cache.lines[-2:] == [("abort", "b", "cancelled"), ("finished", "b")]
    engine.reset()
    assert ("abort", "a", "reset") in cache.lines
    cache.answers_later = False
    engine.run()
    engine.check_nothing_held()


def test_h03_the_local_hit_changes_between_probes() -> None:
    engine, cache = warm_engine(SILENT, replace(NO_REUSE, prefix_caching=True))
    engine.scheduler.kv.pool.unpublish_all()
    taken = blocker(engine, 57)
    engine.add_request(warm_request())
    engine.step()
    assert cache.lines[-1] == ("prepare", "r", 0, 64)
    neighbour = Request("neighbour", PREFIX, 1)
    neighbour.block_ids = [taken[:2]]
    engine.runner.memory[:, taken[0] * 16 : taken[1] * 16 + 16] = (
        engine.runner.truth_of(neighbour)[:32] + engine.runner.masks[0][:, None]
    )
    engine.scheduler.kv.publish(neighbour, 32)  # somebody else computed two of the blocks meanwhile
    engine.step()
    assert cache.lines[-1] == ("prepare", "r", 32, 32)
    assert cache.held == 2
    engine.scheduler.kv.pool.free(taken)
    engine.run()
    assert ("commit", "r", 32) in cache.lines
    assert engine.finished["r"].output_token_ids == correct_output()
    assert cache.held == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("rewrite", "committed"),
    [
        (EngineQuirks(rounds_match_to_tokens=48, silent_aborts=True, commits_zero=True), 48),
        (EngineQuirks(local_tail_tokens=64, silent_aborts=True, commits_zero=True), 0),
        (EngineQuirks(drops_hit_within_tokens=64, silent_aborts=True, commits_zero=True), 0),
        (EngineQuirks(probes_unwilling_requests=True, silent_aborts=True, commits_zero=True), 0),
        (EngineQuirks(probes_unwilling_requests=True, loads_unwilling_requests=True), 64),
    ],
)
def test_h04_rewrites_commit_less_than_was_promised(rewrite: EngineQuirks, committed: int, asynchronous: bool) -> None:
    engine, cache = warm_engine(rewrite, asynchronous=asynchronous)
    cache.looks_at_may_load = False
    engine.run([warm_request(may_load=not rewrite.probes_unwilling_requests)])
    assert cache.lines == [("prepare", "r", 0, 64), ("commit", "r", committed), ("finished", "r")]
    assert engine.counts.external_hits == committed
    assert engine.finished["r"].output_token_ids == correct_output()
    assert cache.held == 0


def test_a_request_that_must_not_load_is_not_even_probed_natively() -> None:
    engine, cache = warm_engine()
    engine.run([warm_request(may_load=False)])
    assert cache.lines == [("finished", "r")]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accepted", [0, 10, 32, 63])
def test_the_cache_may_accept_less_and_the_rest_is_computed(accepted: int, asynchronous: bool) -> None:
    engine, cache = warm_engine(asynchronous=asynchronous)
    cache.accepts_less = accepted
    engine.run([warm_request()])
    assert engine.counts.external_hits == engine.counts.committed == accepted
    assert engine.finished["r"].output_token_ids == correct_output()
    engine.check_nothing_held()
    assert cache.held == 0


OBSTACLES = {
    ExternalMatchExit.THROTTLED: EngineQuirks(throttles_prefill_every=1),
    ExternalMatchExit.BUDGET: EngineQuirks(decode_padding_tokens=500),
    ExternalMatchExit.ENCODER: EngineQuirks(encoder_tokens_per_step=10),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("silent", [False, True])
def test_obstacles_behind_the_probe_postpone_the_match(obstacle: ExternalMatchExit, silent: bool) -> None:
    engine, cache = warm_engine(SILENT if silent else None)
    engine.scheduler.quirks = OBSTACLES[obstacle]
    engine.add_request(warm_request(encoder_tokens=50))
    engine.step()
    engine.step()
    assert engine.counts.declined[obstacle] == 2
    assert engine.counts.postponed == ({} if silent else {obstacle: 2})
    assert cache.held == 4
    assert not engine.counts.aborts
    engine.scheduler.quirks = EngineQuirks()
    assert_ends_right(engine)
    assert cache.held == 0


def test_a_request_short_of_encoder_budget_stops_the_queue_or_not() -> None:
    for skips in (False, True):
        engine, cache = warm_engine()
        engine.scheduler.quirks = EngineQuirks(encoder_tokens_per_step=10, skips_over_encoder=skips)
        engine.add_request(warm_request("image", encoder_tokens=50))
        engine.add_request(warm_request("text"))
        engine.step()
        assert ("commit", "text", 64) in cache.lines if skips else cache.lines[-1][1] == "image"


def test_an_encoder_transfer_is_waited_for_and_probed_each_step() -> None:
    engine, cache = warm_engine()
    engine.run([warm_request(encoder_ready_step=engine.scheduler.step + 4)])
    assert engine.counts.declined == engine.counts.postponed == {ExternalMatchExit.ENCODER: 3}
    assert cache.held == 0


def test_a_whole_prompt_over_budget_is_declined_without_chunked_prefill() -> None:
    config = replace(NO_REUSE, chunked_prefill=False, max_tokens_per_step=128, max_model_len=128)
    engine, cache = warm_engine(config=config)
    engine.add_request(Request("first", prompt(120, 9), 2))
    engine.add_request(warm_request())
    engine.step()
    assert engine.counts.declined == {ExternalMatchExit.BUDGET: 1}
    assert ("postpone", "r", "budget") in cache.lines
    assert_ends_right(engine)


def test_room_for_the_whole_prompt_or_a_watermark_may_be_asked() -> None:
    for quirks in (EngineQuirks(admits_only_whole_prompts=True), EngineQuirks(keeps_free_blocks=5)):
        config = replace(NO_REUSE, max_tokens_per_step=16, num_blocks=20)
        engine, _ = warm_engine(quirks, config)
        engine.add_request(Request("other", prompt(16, 3), 30))
        engine.step()
        taken = blocker(engine, 13)
        engine.add_request(warm_request())
        engine.step()
        assert engine.counts.declined == {ExternalMatchExit.NO_BLOCKS: 1}
        engine.scheduler.kv.pool.free(taken)
        engine.run()


def test_gates_before_the_probe_leave_the_cache_alone() -> None:
    adapters = [RequestIdentity(adapter=name) for name in ("one", "two")]
    engine, cache = warm_engine(config=replace(NO_REUSE, max_adapters=1, max_running=2))
    engine.add_request(Request("one", prompt(20, 1), 8, identity=adapters[0]))
    engine.add_request(Request("two", prompt(20, 2), 8, identity=adapters[1]))
    engine.add_request(Request("grammar", prompt(20, 3), 8, ready_step=engine.scheduler.step + 4))
    engine.step()
    assert [line[1] for line in cache.lines] == ["one"]
    for _ in range(3):
        engine.step()
    engine.add_request(warm_request("crowd"))
    engine.step()
    assert [line[1] for line in cache.lines] == ["one", "grammar"]
    engine.pause()
    engine.cancel("one")
    engine.step()
    assert [line[1] for line in cache.lines] == ["one", "grammar", "one"]
    engine.unpause()
    engine.run()
    engine.check_nothing_held()


def test_a_planned_request_that_is_overtaken_goes_silent_and_its_plan_ends() -> None:
    engine, cache = warm_engine(SILENT, replace(NO_REUSE, policy="priority", num_blocks=30))
    taken = blocker(engine, 27)
    engine.add_request(warm_request("planned", priority=1))
    engine.step()
    assert cache.held == 4
    engine.add_request(Request("urgent", prompt(84, 5), 2, priority=0))
    for _ in range(8):
        engine.step()
    assert {line[1] for line in cache.lines[1:]} == {"urgent"}
    assert cache.held == 0
    engine.scheduler.kv.pool.free(taken)
    engine.run()
    assert engine.counts.external_hits == 64


def test_h06_a_match_of_the_whole_prompt_is_refused() -> None:
    class Greedy(Diary):
        def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
            return ExternalKVMatch(len(request.token_ids) - num_computed_tokens)

    engine = Engine(NO_REUSE, cache=Greedy(16, 4), workers=[SimulatedWorker(0, ByteSegment(4, 4096).slot_view)])
    with pytest.raises(PactViolation, match="P6: request r of 32 tokens, 0 of them computed, was promised 32 more"):
        engine.run([Request("r", prompt(32))])


@pytest.mark.parametrize("preset", EngineQuirks.presets())
def test_h07_blocks_of_a_request_cancelled_in_its_load_stay_until_the_report(preset: str) -> None:
    quirks = EngineQuirks.presets()[preset]
    engine, cache = warm_engine(quirks, asynchronous=True, conduct=JobBehavior(copy_after_steps=6))
    request = engine.add_request(warm_request())
    for _ in range(3):
        engine.step()
    assert waiting_for_load(engine) == [request]
    blocks = request.block_ids[0][:4]
    engine.cancel("r")
    assert cache.lines[-1] == ("finished", "r")
    others = [Request(f"o{i}", prompt(80, 50 + i), 4) for i in range(11)]
    for other in others:
        engine.add_request(other)
    for _ in range(2):
        engine.step()
        engine.check()
        assert not {block for other in others for ids in other.block_ids for block in ids} & set(blocks)
    engine.run()
    engine.check_nothing_held()
    assert cache.held == 0
    assert engine.counts.external_hits == 0


def test_h08_a_load_settled_twice_is_an_error_and_repeated_reports_are_not() -> None:
    engine, cache = warm_engine(asynchronous=True, conduct=JobBehavior(times_reported=3, block_by_block=True))
    engine.run([warm_request()])
    assert engine.finished["r"].output_token_ids == correct_output()

    class Twice(Diary):
        def apply_report(self, report):  # type: ignore[no-untyped-def]
            return [settlement for settlement in super().apply_report(report) for _ in range(2)]

    cache = Twice(16, 64)
    engine = Engine(NO_REUSE, cache=cache, workers=[SimulatedWorker(0, ByteSegment(64, 4096).slot_view)])
    engine.run([Request("cold", PREFIX, 1)])
    with pytest.raises(PactViolation, match="settled that is not under way, or twice"):
        engine.run([warm_request()])


def test_h10_a_load_without_end_is_reported_with_the_request_that_waits() -> None:
    engine, cache = warm_engine(asynchronous=True, conduct=JobBehavior(times_reported=0))
    engine.run([warm_request()])  # the cache asks again about what is overdue
    assert engine.finished["r"].output_token_ids == correct_output()

    engine, cache = warm_engine(asynchronous=True, conduct=JobBehavior(times_reported=0))
    cache.asks_again = False
    engine.add_request(warm_request())
    with pytest.raises(PactViolation, match=r"P11: after 100 steps .*Request\(r, waiting_for_load"):
        engine.run(max_steps=100)


@pytest.mark.parametrize("late", [False, True])
def test_an_asynchronous_commit_may_come_when_the_results_are_taken_in(late: bool) -> None:
    quirks = EngineQuirks(commits_async_late=late, silent_aborts=True)
    engine, cache = warm_engine(quirks, asynchronous=True)
    engine.add_request(warm_request())
    engine.scheduler.schedule()
    assert (("commit", "r", 64) in cache.lines) is not late
    engine.step()
    assert ("commit", "r", 64) in cache.lines
    assert_ends_right(engine)
    assert cache.held == 0


@pytest.mark.parametrize("preset", EngineQuirks.presets())
def test_a_reset_while_loading_voids_the_load_or_is_refused(preset: str) -> None:
    quirks = EngineQuirks.presets()[preset]
    engine, cache = warm_engine(quirks, asynchronous=True, conduct=JobBehavior(copy_after_steps=3))
    request = engine.add_request(warm_request())
    engine.step()
    engine.step()
    if quirks.reset_refuses_loading:
        with pytest.raises(RuntimeError, match="wait for a load"):
            engine.reset()
    else:
        engine.update_weights()
        assert request.status is RequestStatus.WAITING_FOR_LOAD
        assert not cache.entries
    engine.run()
    engine.check_nothing_held()
    assert (engine.counts.external_hits == 0) is not quirks.reset_refuses_loading


def test_h44_the_report_of_a_request_that_finishes_in_the_same_step_counts() -> None:
    """Stock engines tell the end first: the blocks saved in the last step are stored all the same."""
    for preset in EngineQuirks.presets().values():
        engine = reference_engine(NO_REUSE, preset)
        engine.run([Request("only", prompt(64), 1)])
        assert len(cast(ReferenceCache, engine.cache).entries) == 4
        engine.run([Request("again", prompt(64), 1)])
        assert engine.counts.external_hits == 48
        assert outputs_of(engine)["only"] == outputs_of(engine)["again"]
