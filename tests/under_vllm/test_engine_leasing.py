"""The example `leasing_connector.py` on a real engine: what it loads is what the engine had computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engines import BLOCK, BLOCK_BY_BLOCK, prompt
from kvpact_testkit.demo.engine import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_second_request_loads_what_the_first_computed_and_gets_the_same_tokens(
    start_engine: Callable[..., EngineProcess],
) -> None:
    """Eight at a time, of which the engine has room for two: the others wait with what they were promised."""
    engine = start_engine(
        {
            "kv_connector": "LeasingConnector",
            "kv_connector_module_path": "leasing_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"blocks": 64},
        },
        arguments={
            **BLOCK_BY_BLOCK,
            "max_model_len": 1024,
            "num_gpu_blocks_override": 9,
            "scheduler_cls": "kvpact.vllm.scheduler.pact_scheduler",
        },
        environment={"PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])},
    )
    prompts = [prompt(751 + number, 3) for number in range(8)]
    first = [engine.generate([tokens])[0] for tokens in prompts]
    engine.reset_prefix_cache()
    again = engine.generate(prompts)
    assert [output.cached_tokens for output in first] == [0] * 8
    assert [output.cached_tokens for output in again] == [3 * BLOCK] * 8
    for computed, hit in zip(first, again, strict=True):
        assert hit.same_answer(computed)
