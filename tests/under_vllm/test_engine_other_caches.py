"""A real engine in its separate processes with another author's cache: `examples/minimal_cache.py`, as it stands."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import BLOCK, BLOCK_BY_BLOCK, kvpact_transfer_config, prompt
from kvpact_testkit.demo.engine import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS = 5


def test_a_cache_of_another_author_serves_a_real_engine(start_engine: Callable[..., EngineProcess]) -> None:
    paths = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    config = kvpact_transfer_config(cache="minimal_cache:MinimalCache", memory="256MiB")
    engine = start_engine(config, arguments=BLOCK_BY_BLOCK, environment={"PYTHONPATH": paths})
    asked = [prompt(seed, BLOCKS) for seed in range(3)]
    computed = engine.generate(asked)
    assert [one.cached_tokens for one in computed] == [0, 0, 0]
    engine.reset_prefix_cache()
    loaded = engine.generate(asked)
    assert [one.cached_tokens for one in loaded] == [BLOCKS * BLOCK] * 3
    assert all(one.same_answer(other) for one, other in zip(loaded, computed, strict=True))
    assert engine.metrics()["vllm:external_prefix_cache_hits"] == 3 * BLOCKS * BLOCK
    engine.reset_prefix_cache(reset_connector=True)
    anew = engine.generate(asked)
    assert [one.cached_tokens for one in anew] == [0, 0, 0], "a reset ends what was stored"
    assert all(one.same_answer(other) for one, other in zip(anew, computed, strict=True))
