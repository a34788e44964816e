"""The published flood: ten prompts, five hundred others, the ten again; vLLM's own hit counters say what was reused.

On vLLM's real scheduler with a played model, a hundred others instead of five hundred, for time, and as many on real
engines in `make proofs`; `make soak` runs the whole flood on both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import engines
from engines import kvpact_transfer_config, prompt
from forked_engine import ForkedEngine
from kvpact_testkit.demo.engine import EngineSettings
from kvpact_testkit.demo.phases import settle
from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt

FLOOD, SHORT_FLOOD = 500, 100
REFERENCES = 10
BLOCKS = 4
REUSABLE = REFERENCES * BLOCKS * BLOCK

ROOMY, SMALL = "24MiB", "512KiB"
"""Memory for 3,072 blocks, more than all prompts have, and for 64, which the last sixteen fill."""


@pytest.mark.parametrize("flood", [SHORT_FLOOD, pytest.param(FLOOD, marks=[pytest.mark.soak])])
@pytest.mark.parametrize(
    ("memory", "shared", "reused"),
    [(ROOMY, False, REUSABLE), (SMALL, False, 0), (ROOMY, True, REUSABLE), (SMALL, True, REUSABLE)],
    ids=["memory", "small memory", "memory and shared", "small memory and shared"],
)
def test_h57_h70_after_a_flood_the_hit_counter_says_exactly_what_was_reused(
    start: Callable[..., PlayedEngine], tmp_path: Path, memory: str, shared: bool, reused: int, flood: int
) -> None:
    (tmp_path / "store").mkdir()
    tiers = [f"dir://{tmp_path}/store?capacity=64MiB"] if shared else []
    engine = start(memory=memory, tiers=tiers)
    references = [make_prompt(seed, BLOCKS) for seed in range(REFERENCES)]
    for tokens in (*references, *(make_prompt(1000 + number, BLOCKS) for number in range(flood))):
        assert engine.generate(tokens, max_tokens=1).cached_tokens == 0
    assert engine.external_hits == 0, "prompts that nobody asked before hit nothing"
    queries, computed = engine.external_queries, engine.computed_tokens
    again = [engine.generate(tokens, max_tokens=1) for tokens in references]
    assert [played.said for played in again] == [answer(tokens, 1) for tokens in references]
    asked = sum(map(len, references))
    assert engine.external_hits == reused
    assert engine.external_queries - queries == asked
    assert engine.computed_tokens - computed == asked - reused, "what counts as hit was not computed"
    assert engine.counts["used_tokens"] == sum(played.cached_tokens for played in again) == reused


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("flood", "shared"),
    [
        pytest.param(SHORT_FLOOD, True, marks=[pytest.mark.proof], id="short, memory and shared"),
        pytest.param(FLOOD, False, marks=[pytest.mark.soak], id="memory"),
        pytest.param(FLOOD, True, marks=[pytest.mark.soak], id="memory and shared"),
    ],
)
def test_h57_h70_the_flood_on_a_real_engine(tiny_model: Path, tmp_path: Path, flood: int, shared: bool) -> None:
    """With 24 KV blocks, so that nothing is left in the engine's own prefix cache; blocks of 32 tokens."""
    block, blocks = 32, 4
    (tmp_path / "store").mkdir()
    transfer = kvpact_transfer_config(
        memory="64MiB" if shared else "1GiB",
        tiers=[f"dir://{tmp_path}/store?capacity=1GiB"] if shared else [],
        stats_file=str(tmp_path / "stats.json"),
        prepare_deadline="5s",
    )
    arguments = {
        "block_size": block,
        "num_gpu_blocks_override": 24,
        "max_model_len": 8 * block,
        "max_num_batched_tokens": 256,
        "dtype": "float32",
    }
    references = [prompt(seed, 1, tail=9) for seed in range(REFERENCES)]
    assert all(len(tokens) == engines.BLOCK + 9 for tokens in references)
    with ForkedEngine(EngineSettings(tiny_model, transfer, arguments), tmp_path / "engine.log").wait_ready() as engine:
        first = engine.generate(references)
        for start in range(0, flood, 20):
            engine.generate([prompt(1000 + number, 1, tail=9) for number in range(start, start + 20)], max_tokens=1)
            settle(engine)
        before = engine.metrics()
        again = engine.generate(references)
        counted = engine.metrics()
        hits = counted["vllm:external_prefix_cache_hits"] - before["vllm:external_prefix_cache_hits"]
        assert hits == sum(output.cached_tokens for output in again) == REFERENCES * blocks * block
        assert before["vllm:external_prefix_cache_hits"] == 0
        stats = settle(engine)
        assert stats["used_tokens"] == hits
        assert stats["leases_held"] == stats["hook_errors"] == 0
        assert [output.tokens for output in again] == [output.tokens for output in first]
        print(f"\nflood, {'memory and shared' if shared else 'memory'}: {hits:g} of {hits:g} reusable tokens hit")
