"""Real engines on one host that load from each other's memory, without a server, a tier or a setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from model_families import deepseek_like, gemma_like, llama4_like, qwen3_next_like
from trainer import ARGUMENTS as TRAINED
from trainer import ENVIRONMENT, Trainer

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, leases_when, prompt
from forked_engine import ForkedEngine
from kvpact.metrics import series
from kvpact_testkit.demo.engine import CORES, EngineSettings, one_core_each
from polling import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BLOCKS = 6
ALL = BLOCKS * BLOCK
TWO_RANKS = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 1 << 27}
TWO_CORES = {CORES: one_core_each(2)}
LATENT = {**TWO_RANKS, "max_model_len": 1024, "max_num_batched_tokens": 1024}
STATES = {"enable_prefix_caching": True, "mamba_cache_mode": "align"}


@pytest.fixture
def start_two(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., list[ForkedEngine]]]:
    """Starts two engines of one model, which have met."""
    with ExitStack() as stack:

        def start(
            make: Callable[[Path, Path], Path] | None = None,
            arguments: Mapping[str, Any] = BLOCK_BY_BLOCK,
            environment: Mapping[str, str] | None = None,
        ) -> list[ForkedEngine]:
            model = make(tmp_path / "model", tiny_model) if make is not None else tiny_model
            engines = []
            for number in range(2):
                transfer = kvpact_transfer_config(memory="64MiB", stats_file=str(tmp_path / f"{number}.json"))
                settings = EngineSettings(model, transfer, arguments, environment or {})
                engines.append(stack.enter_context(ForkedEngine(settings, tmp_path / f"engine-{number}.log")))
            for engine in engines:
                engine.wait_ready()
            until(lambda: all("1 neighbour," in engine.log.read_text() for engine in engines), every=0.1)
            return engines

        yield start


@pytest.mark.parametrize(
    ("make", "arguments", "environment"),
    [
        pytest.param(None, BLOCK_BY_BLOCK, {}, marks=pytest.mark.proof, id="one rank"),
        pytest.param(None, {**BLOCK_BY_BLOCK, **TWO_RANKS}, TWO_CORES, marks=pytest.mark.soak, id="two ranks"),
        pytest.param(deepseek_like, LATENT, TWO_CORES, marks=pytest.mark.soak, id="two ranks with equal bytes"),
        pytest.param(gemma_like, BLOCK_BY_BLOCK, {}, marks=pytest.mark.soak, id="windows"),
        pytest.param(
            llama4_like,
            BLOCK_BY_BLOCK,
            {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"},
            marks=pytest.mark.soak,
            id="chunks",
        ),
        pytest.param(qwen3_next_like, {**BLOCK_BY_BLOCK, **STATES}, {}, marks=pytest.mark.soak, id="states"),
    ],
)
def test_a_prompt_that_one_engine_computed_is_loaded_by_the_other_at_once(
    start_two: Callable[..., list[ForkedEngine]],
    make: Callable[[Path, Path], Path] | None,
    arguments: Mapping[str, Any],
    environment: Mapping[str, str],
) -> None:
    """Tokens and log-probabilities are those of a local prefix hit."""
    one, other = start_two(make, arguments, environment)
    asked = prompt(130, BLOCKS)
    (computed,) = one.generate([asked], max_tokens=8)
    (local,) = one.generate([asked], max_tokens=8)
    (loaded,) = other.generate([asked], max_tokens=8)
    assert computed.cached_tokens == 0
    assert loaded.same_answer(local)
    assert loaded.cached_tokens == local.cached_tokens >= ALL
    assert leases_when(other, series("used_tokens_from", "neighbours"), loaded.cached_tokens) == 0


@pytest.mark.proof
def test_engines_that_have_other_weights_by_now_load_only_what_the_old_ones_computed(
    start_two: Callable[..., list[ForkedEngine]],
) -> None:
    """One engine's weights are overwritten without a word; later the other one's."""
    one, other = engines = start_two(None, TRAINED, ENVIRONMENT)
    asked = [prompt(140 + number, BLOCKS) for number in range(4)]
    old, new = asked[:2], asked[2:]
    before = [one.generate([tokens], max_tokens=8)[0] for tokens in old]
    Trainer(one).overwrite(1)
    one.reset_prefix_cache()
    after = [one.generate([tokens], max_tokens=8)[0] for tokens in asked]
    assert [output.cached_tokens for output in after] == [0] * 4, "its own are of the old weights"
    assert not any(output.same_answer(then) for output, then in zip(after, before, strict=False))
    there = [other.generate([tokens], max_tokens=8)[0] for tokens in asked]
    assert [output.cached_tokens for output in there] == [ALL, ALL, 0, 0], (
        "it has the old ones, which no other asks for"
    )
    assert all(output.same_answer(then) for output, then in zip(there, before, strict=False))
    Trainer(other).overwrite(1)
    other.reset_prefix_cache()
    again = [other.generate([tokens], max_tokens=8)[0] for tokens in new]
    assert [output.cached_tokens for output in again] == [0] * 2, "nobody has said that they are the same"
    assert all(output.same_answer(there) for output, there in zip(again, after[2:], strict=True))
    assert [leases_when(engine, "lookups", lookups) for engine, lookups in zip(engines, (6, 6), strict=True)] == [0, 0]
