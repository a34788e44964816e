"""Models with several KV cache groups on kvpact's own cache: from memory, under pressure, from disk after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from model_families import gemma_like, gpt_oss_like, llama4_like

from engines import BLOCK, BLOCK_BY_BLOCK, IN_ONE_PROCESS, kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineSettings
from kvpact_testkit.demo.messages import Output

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BLOCKS = 7
"""Of a prompt. Windows reach back two blocks; an odd number of blocks ends in the middle of a chunk of two."""

ARGUMENTS = {**BLOCK_BY_BLOCK, "kv_cache_memory_bytes": 1 << 28}
CHUNKS = {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"}
WRITTEN_S = 1.5
"""Seconds in which the last blocks reach the disk."""


def cached_blocks(outputs: list[Output]) -> list[int]:
    """Blocks of each prompt that were not computed."""
    return [output.cached_tokens // BLOCK for output in outputs]


def same_answers(outputs: list[Output], others: list[Output]) -> bool:
    """Whether tokens and log-probabilities are equal bit by bit."""
    return all(one.same_answer(other) for one, other in zip(outputs, others, strict=True))


@pytest.mark.soak
def test_windows_are_served_from_a_memory_that_is_too_small(tiny_model: Path, tmp_path: Path) -> None:
    """Six prompts of 13 blocks (7 of full attention, 2 of each of three windows) in 32 slots."""
    asked = [prompt(2_200 + seed, BLOCKS) for seed in range(6)]
    transfer = kvpact_transfer_config(memory="4MiB", stats_file=str(tmp_path / "stats.json"))
    model = gemma_like(tmp_path / "model", tiny_model)
    settings = EngineSettings(model, transfer, ARGUMENTS, IN_ONE_PROCESS)
    with ForkedEngine(settings, tmp_path / "engine.log") as engine:
        engine.wait_ready()
        engine.generate(asked)
        local = engine.generate(asked)
        engine.generate(asked[:1])
        engine.reset_prefix_cache()
        pressed = engine.generate(asked[::-1])[::-1]
        engine.reset_prefix_cache()
        before = engine.metrics()["vllm:external_prefix_cache_hits"]
        again = engine.generate(asked[:1])
        hits = engine.metrics()["vllm:external_prefix_cache_hits"] - before
    stats = engine.stats()
    assert cached_blocks(local) == [BLOCKS] * 6
    assert len({tuple(output.logprobs) for output in local}) == 6
    assert cached_blocks(again) == [BLOCKS], "the last prompt is there with all groups"
    assert hits == BLOCKS * BLOCK
    assert min(cached_blocks(pressed)) < BLOCKS
    assert same_answers(pressed, local)
    assert same_answers(again, local[:1])
    assert stats['evicted_blocks{tier="memory"}'] > 0
    assert stats["leases_held"] == stats["hook_errors"] == 0


@pytest.mark.parametrize(
    ("family", "side_blocks", "environment"),
    [
        pytest.param(gemma_like, 6, {}, marks=pytest.mark.soak, id="windows"),
        pytest.param(gpt_oss_like, 2, {}, marks=pytest.mark.soak, id="windows and sinks"),
        pytest.param(llama4_like, 3, CHUNKS, marks=pytest.mark.proof, id="chunks"),
    ],
)
def test_h59_all_groups_come_back_from_disk_after_a_kill(
    tiny_model: Path,
    tmp_path: Path,
    family: Callable[[Path, Path], Path],
    side_blocks: int,
    environment: dict[str, str],
) -> None:
    asked = [prompt(2_300 + seed, BLOCKS) for seed in range(2)]
    transfer = kvpact_transfer_config(
        memory="64MiB", tiers=[f"disk://{tmp_path}/slabs?capacity=64MiB"], stats_file=str(tmp_path / "stats.json")
    )
    model = family(tmp_path / "model", tiny_model)
    settings = EngineSettings(model, transfer, ARGUMENTS, {**IN_ONE_PROCESS, **environment})
    time.sleep(0.2)  # an engine that begins within a tick of the clock after its files changed cannot trust them
    first = ForkedEngine(settings, tmp_path / "first.log")
    second = ForkedEngine(settings, tmp_path / "second.log", held=True)
    try:
        first.wait_ready()
        computed = first.generate(asked)
        local = first.generate(asked)
        first.reset_prefix_cache()
        loaded = first.generate(asked)
        time.sleep(WRITTEN_S)
        first.kill()
        second.wait_ready()
        restarted = second.generate(asked)
        second.stop()
    finally:
        first.discard()
        second.discard()
    assert cached_blocks(computed) == [0, 0]
    assert local[0].logprobs != local[1].logprobs
    for outputs in (local, loaded, restarted):
        assert cached_blocks(outputs) == [BLOCKS] * 2
        assert same_answers(outputs, local)
    stats = second.stats()
    assert stats['read_blocks{tier="disk"}'] == 2 * (BLOCKS + side_blocks)
    assert stats["used_tokens"] == 2 * BLOCKS * BLOCK
    assert stats["leases_held"] == stats["hook_errors"] == 0
