"""The example `simple_cpu_offload` on a real engine: what it loads is what the engine had computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import BLOCK, BLOCK_BY_BLOCK, prompt
from kvpact_testkit.demo.engine import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "lazy",
    [pytest.param(False, marks=pytest.mark.soak, id="eager"), pytest.param(True, marks=pytest.mark.proof, id="lazy")],
)
def test_a_second_request_loads_what_the_first_computed_and_gets_the_same_tokens(
    lazy: bool, start_engine: Callable[..., EngineProcess]
) -> None:
    transfer: dict[str, Any] = {
        "kv_connector": "SimpleCPUOffload",
        "kv_connector_module_path": "simple_cpu_offload",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lazy_offload": lazy, "num_cpu_blocks": 64},
    }
    engine = start_engine(
        transfer,
        arguments={**BLOCK_BY_BLOCK, "max_model_len": 1024, "num_gpu_blocks_override": 17},
        environment={"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])},
    )
    prompts = [prompt(951 + number, 3) for number in range(8)]
    first = [engine.generate([tokens])[0] for tokens in prompts]
    engine.reset_prefix_cache()
    again = [engine.generate([tokens])[0] for tokens in prompts]
    assert [output.cached_tokens for output in first] == [0] * 8
    # Saved lazily is what the engine was about to reuse: it has room for five prompts.
    loaded = [output.cached_tokens for output in again]
    assert loaded[:2] == [3 * BLOCK] * 2
    assert lazy or loaded == [3 * BLOCK] * 8
    for computed, hit in zip(first, again, strict=True):
        assert hit.same_answer(computed)
