"""What is built on the scheduler context, on vLLM's real scheduler: blocks stay while they are copied; lazy saving."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec

from kvpact.config import load_config
from kvpact.errors import ConfigError
from kvpact.vllm import checks
from kvpact.vllm.compat.scheduler import COUNTS_HELD_BLOCKS
from vllm_played_engine import BLOCK, HeldCopies, PlayedEngine, PlayedRequest, answer, make_prompt, vllm_config


def end_cancelled(engine: PlayedEngine, victim: PlayedRequest) -> None:
    engine.cancel(victim)


def end_finished(engine: PlayedEngine, victim: PlayedRequest) -> None:
    while not victim.finish_reason:
        engine.step()


def end_preempted(engine: PlayedEngine, victim: PlayedRequest) -> None:
    """An older request grows into the room of this one, which is then cancelled before it runs again."""
    while victim.request.status.name != "PREEMPTED":
        engine.step()
    engine.cancel(victim)


@pytest.mark.parametrize("end", [end_cancelled, end_finished, end_preempted])
def test_h07_h27_blocks_stay_while_they_are_saved_however_their_request_ends(
    start: Callable[..., PlayedEngine], end: Callable[[PlayedEngine, PlayedRequest], None]
) -> None:
    engine = start(num_blocks=24)
    saves = HeldCopies(engine, "gather")
    older = engine.add(make_prompt(1, 6), 400 if end is end_preempted else 3)
    engine.step()
    prompt = make_prompt(2, 8)
    victim = engine.add(prompt, 300 if end is end_preempted else 3)
    engine.step()
    context = engine.connector.scheduler_context
    assert context is not None
    (blocks,) = context.get_block_ids(victim.request.request_id)
    copied = blocks[:8]
    before = [engine.kv[name][list(copied)].clone() for name in engine.kv]
    end(engine, victim)
    engine.cancel(older)
    for number in range(6):  # others want all the room there is
        played = engine.add(make_prompt(10 + number, 5))
        for _ in range(8):
            engine.step()
        engine.cancel(played)
    assert all(context.get_block(block).ref_cnt == 1 for block in copied), "the copy holds them"
    after = [engine.kv[name][list(copied)] for name in engine.kv]
    assert all(bool((one == two).all()) for one, two in zip(before, after, strict=True)), "nobody wrote into them"
    saves.go_on.set()
    engine.run()
    engine.forget()
    played = engine.generate(prompt)
    assert played.said == answer(prompt, 3)
    assert played.cached_tokens == 8 * BLOCK, "what was saved meanwhile is whole"


# Lazy saving


def saved_blocks(engine: PlayedEngine) -> int:
    return int(engine.counts["saved_blocks"])


def test_lazy_saves_nothing_while_the_engine_has_room(start: Callable[..., PlayedEngine]) -> None:
    engine = start(save="lazy")
    prompts = [make_prompt(number, 8) for number in range(5)]
    for tokens in (*prompts, *prompts):
        assert engine.generate(tokens).said == answer(tokens, 3)
    assert saved_blocks(engine) == 0


@pytest.mark.parametrize("settings", [{}, {"sync_load_budget": 0}], ids=["sync", "async"])
def test_lazy_saves_what_is_evicted_before_it_is(start: Callable[..., PlayedEngine], settings: dict[str, Any]) -> None:
    engine = start(save="lazy", num_blocks=64, **settings)
    prompts = [make_prompt(number, 8) for number in range(16)]  # 128 blocks and more through 63
    for tokens in prompts:
        assert engine.generate(tokens).said == answer(tokens, 3)
    assert 0 < saved_blocks(engine) < 16 * 8, "what is still in the engine was not saved"
    reused = 0
    for tokens in prompts[4:]:
        played = engine.generate(tokens)
        assert played.said == answer(tokens, 3)
        reused += played.cached_tokens // BLOCK
    assert reused >= 12 * 7, "what the engine has not any more comes from the cache"
    assert engine.counts["used_tokens"] > 0


def test_lazy_saves_no_block_that_holds_something_else(start: Callable[..., PlayedEngine]) -> None:
    """Crowds, cancellations, resets of the engine's own cache: what is loaded later is always right."""
    engine = start(save="lazy", num_blocks=40, num_batched_tokens=64, memory="1MiB")
    alive: list[tuple[PlayedRequest, list[int]]] = []
    for number in range(80):
        stem = make_prompt(number % 5, 3, tail=0)
        tokens = make_prompt(number, 3 + number % 5, 5, stem=stem)
        alive.append((engine.add(tokens), tokens))
        for _ in range(3):
            if not engine.step():
                time.sleep(0.001)
        if number % 9 == 0:
            engine.cancel(alive.pop()[0])
        if number % 20 == 7:
            engine.scheduler.reset_prefix_cache()
    engine.run(seconds=60.0)
    for played, tokens in alive:
        assert played.said == answer(tokens, 3)
    assert engine.counts["used_tokens"] > 0


@pytest.mark.parametrize(
    ("settings", "prefix_caching", "message"),
    [
        ({"save": "lazy"}, False, "enable-prefix-caching"),
        ({"save": "lazy", "match_at": "step"}, True, "through the slots of saves"),
    ],
)
def test_lazy_is_refused_where_it_cannot_work(
    tmp_path: Path, settings: dict[str, object], prefix_caching: bool, message: str
) -> None:
    """Without the engine's prefix cache no block has a hash, so nobody could say what is in it."""
    config = vllm_config(tmp_path / "model", {}, 64, {})
    config.cache_config.enable_prefix_caching = prefix_caching
    with pytest.raises(ConfigError, match=message):
        checks.check_settings(load_config(settings, {}), config)


@pytest.mark.parametrize(("counts", "disabled"), [(True, False), (True, True), (False, False)])
def test_h94_cascade_attention_is_refused_where_a_held_block_counts_as_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool, disabled: bool
) -> None:
    config = vllm_config(tmp_path / "model", {}, 4096, {})
    config.model_config.disable_cascade_attn = disabled
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=16, dtype=torch.bfloat16)
    groups = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["one"], spec)])
    monkeypatch.setattr(checks, "COUNTS_HELD_BLOCKS", counts)
    if counts and not disabled:
        with pytest.raises(ConfigError, match="leave --no-disable-cascade-attn out"):
            checks.check_engine(config, groups)
    else:
        checks.check_engine(config, groups)


def test_h94_a_held_block_counts_as_shared_in_no_step_of_this_release(
    start: Callable[..., PlayedEngine],
) -> None:
    """Two requests, of which one has its blocks held: a common prefix that is none."""
    engine = start()
    slow = HeldCopies(engine, "gather")
    for seed in (1, 2):
        engine.add(make_prompt(seed, 4), max_tokens=8)
    engine.step()
    scheduled = engine.scheduler.schedule()
    assert engine.connector.scheduler_context is not None
    assert engine.connector.scheduler_context.touched_blocks
    assert any(scheduled.num_common_prefix_blocks) <= COUNTS_HELD_BLOCKS
    engine.scheduler.update_from_output(scheduled, engine.execute(scheduled))
    slow.go_on.set()
    engine.run()
