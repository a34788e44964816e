"""The engine without a cache: what it schedules, shares, preempts and gives back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from workloads import assert_answers_as_without_a_cache, outputs_of, prompt, workload

from kvpact.errors import ConfigError, PactViolation
from kvpact.identity.keys import MediaSpan, RequestIdentity
from kvpact_testkit.engine import Engine, EngineConfig, EngineQuirks, GroupKind, KVCacheGroup, Request, RequestStatus


def test_outputs_depend_on_the_whole_sequence_and_on_nothing_else() -> None:
    tokens = prompt(50)
    outputs = []
    for config in (EngineConfig(), EngineConfig(block_size=4, max_tokens_per_step=7, num_ranks=2, num_layers=3)):
        engine = Engine(config)
        engine.run([Request("a", tokens, 10), Request("b", [1, *tokens[1:]], 10)])
        outputs.append(outputs_of(engine))
    assert outputs[0] == outputs[1]
    assert outputs[0]["a"][0] != outputs[0]["b"][0]
    assert len(set(outputs[0]["a"])) > 5


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    engine = Engine(EngineConfig(max_tokens_per_step=32))
    engine.add_request(Request("long", prompt(100), 2))
    engine.add_request(Request("short", prompt(10, 1), 2))
    computed = []
    while engine.has_work:
        before = engine.counts.computed
        engine.step()
        computed.append(engine.counts.computed - before)
    assert computed == [32, 32, 32, 14, 2]
    assert engine.scheduler.step == 5


def test_a_shared_prefix_is_computed_once() -> None:
    engine = Engine()
    tokens = prompt(64)
    engine.run([Request("first", [*tokens, 1], 2)])
    engine.run([Request("second", [*tokens, 2], 2), Request("same", tokens, 2)])
    assert engine.counts.local_hits == 64 + 48  # of a whole prompt the last token is left
    engine.check_nothing_held()


@pytest.mark.parametrize(
    "other",
    [
        RequestIdentity(salt="tenant"),
        RequestIdentity(adapter="weights"),
        RequestIdentity(media=(MediaSpan(3, 4, "image"),)),
        RequestIdentity(embeddings={0: b"digest"}),
        None,
    ],
)
def test_requests_of_other_identity_share_no_blocks(other: RequestIdentity | None) -> None:
    engine = Engine()
    tokens = prompt(64)
    engine.run([Request("plain", tokens, 2)])
    engine.run([Request("other", tokens, 2, identity=other)])
    assert engine.counts.local_hits == 0
    assert engine.finished["plain"].output_token_ids != engine.finished["other"].output_token_ids


def test_media_are_shared_up_to_where_they_differ() -> None:
    engine = Engine()
    tokens = prompt(64)
    for content in ("image", "other"):
        identity = RequestIdentity(media=(MediaSpan(40, 8, content),))
        engine.run([Request(content, tokens, 6, identity=identity)])
    assert engine.counts.local_hits == 32


def test_the_youngest_is_preempted_and_ends_with_the_same_output() -> None:
    roomy, tight = Engine(), Engine(EngineConfig(num_blocks=9))
    for engine in (roomy, tight):
        for i in range(3):
            engine.add_request(Request(f"r{i}", prompt(30, i), 30))
        engine.run()
    assert tight.counts.preemptions > 0
    assert outputs_of(tight) == outputs_of(roomy)
    tight.check_nothing_held()


def test_priority_decides_who_runs_and_who_is_preempted() -> None:
    engine = Engine(EngineConfig(num_blocks=9, policy="priority"))
    engine.add_request(Request("low", prompt(30, 1), 40, priority=2))
    engine.step()
    engine.add_request(Request("high", prompt(60, 2), 40, priority=0))
    engine.add_request(Request("middle", prompt(30, 3), 4, priority=1))
    finished: list[str] = []
    while engine.has_work:
        finished += [request.request_id for request in engine.step()]
        engine.check()
    assert finished.index("high") < finished.index("low")
    assert engine.counts.preemptions >= 1
    assert finished.index("middle") < finished.index("low")


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "preempted"])
def test_a_request_can_be_cancelled_in_any_state(when: str) -> None:
    engine = Engine(EngineConfig(num_blocks=9, max_tokens_per_step=16 if when == "prefill" else 512))
    victim = engine.add_request(Request("victim", prompt(40, 1), 40))
    wanted = {"waiting": RequestStatus.WAITING, "preempted": RequestStatus.PREEMPTED}.get(when, RequestStatus.RUNNING)
    if when == "preempted":
        engine.cancel("victim")
        engine.add_request(Request("other", prompt(40, 2), 60))
        victim = engine.add_request(Request("victim", prompt(30, 1), 60))
    for _ in range(0 if when == "waiting" else 200):
        engine.step()
        if victim.status is wanted and (when != "decode" or victim.output_token_ids):
            break
    assert victim.status is wanted
    assert engine.cancel("victim")
    assert not engine.cancel("victim")
    engine.run()
    assert victim.status is RequestStatus.CANCELLED
    engine.check_nothing_held()


@pytest.mark.parametrize("preset", EngineQuirks.presets())
@pytest.mark.parametrize("groups", [(0, 20), (40, 0, 20), (24,)])
def test_groups_and_windows_change_no_output(preset: str, groups: tuple[int, ...]) -> None:
    chosen = tuple(KVCacheGroup(GroupKind.WINDOW if span else GroupKind.FULL, 16, span) for span in groups)
    config = EngineConfig(num_blocks=20 * len(groups), groups=chosen, max_tokens_per_step=64)
    engine = Engine(config, EngineQuirks.presets()[preset])
    assert_answers_as_without_a_cache(engine, 5)
    engine.check_nothing_held()


def test_a_window_gives_its_blocks_back_and_still_hits_at_its_end() -> None:
    config = EngineConfig(
        groups=(KVCacheGroup(GroupKind.FULL, 16), KVCacheGroup(GroupKind.WINDOW, 16, 20)), num_blocks=100
    )
    engine = Engine(config)
    tokens = prompt(160)
    engine.add_request(Request("first", tokens, 60))
    for _ in range(40):
        engine.step()
    full, window = engine.context.get_block_ids("first")
    assert sum(block != 0 for block in window) <= 3
    assert all(full)
    engine.run()
    engine.run([Request("again", [*tokens, *engine.finished["first"].output_token_ids[:40]], 4)])
    assert engine.counts.local_hits == 192
    engine.check_nothing_held()


def test_a_reset_forgets_and_preempts() -> None:
    engine = Engine()
    tokens = prompt(64)
    engine.run([Request("first", [*tokens, 1], 2)])
    running = engine.add_request(Request("running", [*tokens, 2], 30))
    engine.step()
    engine.reset()
    assert running.status is RequestStatus.PREEMPTED
    engine.run()
    assert engine.counts.local_hits == 64
    engine.check_nothing_held()


@pytest.mark.parametrize("layers", [1, 2])
def test_h32_blocks_computed_with_other_weights_are_never_read_again(layers: int) -> None:
    config = EngineConfig(num_layers=layers, max_tokens_per_step=32)
    fresh, engine = Engine(config), Engine(config)
    fresh.change_weights(1)
    fresh.run([Request("new", prompt(64), 8), Request("longer", prompt(100), 8)])
    engine.run([Request("old", prompt(64), 8)])
    running = engine.add_request(Request("running", prompt(100), 30))
    for _ in range(8):
        engine.step()
    assert (engine.counts.local_hits, running.num_computed_tokens > 64) == (64, True)
    said = [*running.output_token_ids]
    engine.update_weights()
    assert running.num_computed_tokens == 0, "what it has is of other weights"
    engine.run([Request("new", prompt(64), 8), Request("longer", prompt(100), 8)])
    for name in ("new", "longer"):
        assert engine.finished[name].output_token_ids == fresh.finished[name].output_token_ids
    assert engine.finished["old"].output_token_ids != fresh.finished["new"].output_token_ids
    again = Engine(config)
    again.change_weights(1)
    again.run([Request("running", [*prompt(100), *said], 30 - len(said))])
    assert engine.finished["running"].output_token_ids == said + again.finished["running"].output_token_ids


@pytest.mark.parametrize("asynchronous", [False, True])
def test_async_scheduling_changes_no_output(asynchronous: bool) -> None:
    plain = Engine(EngineConfig(num_blocks=400))
    plain.run(workload(9))
    engine = Engine(EngineConfig(num_blocks=24), replace(EngineQuirks(), async_scheduling=asynchronous))
    engine.run(workload(9))
    assert outputs_of(engine) == outputs_of(plain)


def test_a_paused_engine_admits_nobody() -> None:
    engine = Engine()
    engine.add_request(Request("r", prompt(20), 2))
    engine.pause()
    engine.step()
    assert engine.counts.computed == 0
    engine.unpause()
    assert engine.run()["r"].output_token_ids


def test_requests_that_cannot_run_are_refused() -> None:
    engine = Engine(EngineConfig(num_blocks=4))
    with pytest.raises(ConfigError, match="4 blocks"):
        engine.add_request(Request("big", prompt(60), 4))
    with pytest.raises(ConfigError, match="at least 1 prompt token"):
        Request("empty", [], 1)
    engine.add_request(Request("twice", prompt(5)))
    with pytest.raises(ConfigError, match="still in use"):
        engine.add_request(Request("twice", prompt(5)))
    with pytest.raises(ConfigError, match="at least"):
        EngineConfig(num_blocks=1)
    with pytest.raises(ConfigError, match="do not fit"):
        EngineConfig(groups=(KVCacheGroup(GroupKind.FULL, 24),))


def test_the_example_in_the_documentation_runs() -> None:
    text = (Path(__file__).parents[3] / "docs" / "internals" / "engine.md").read_text()
    exec(compile(text.split("```python")[1].split("```")[0], "engine.md", "exec"), {})


def test_a_run_that_does_not_end_is_an_error() -> None:
    engine = Engine()
    engine.add_request(Request("never", prompt(5), ready_step=10_000))
    with pytest.raises(PactViolation, match="P11"):
        engine.run(max_steps=50)
