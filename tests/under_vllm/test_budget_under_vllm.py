"""vLLM's real scheduler goes by the last answer before the commit: a step waits for what its budget allows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from kvpact.testkit.vllm.played_engine import BLOCK, PlayedEngine, answer, make_prompt

BLOCKS = 6
PROMPTS = [make_prompt(seed, BLOCKS) for seed in range(3)] + [make_prompt(3, 2)]


def test_of_requests_that_come_at_once_the_step_waits_for_those_that_fit(tmp_path: Path) -> None:
    """Eight blocks of 8 KiB: the first prompt's six are loaded in the step, and the two of the last, shorter one."""
    engine = PlayedEngine(tmp_path, sync_load_budget="64KiB")
    for prompt in PROMPTS:
        engine.generate(prompt)
    engine.forget()
    played = [engine.add(prompt) for prompt in PROMPTS]
    engine.step()
    assert [len(one.said) for one in played] == [1, 0, 0, 1]
    engine.run()
    for one, prompt in zip(played, PROMPTS, strict=True):
        assert one.said == answer(prompt, 3)
        assert one.cached_tokens == len(prompt) // BLOCK * BLOCK
    assert engine.counts["failed_tokens"] == 0
    engine.assert_at_rest()
    engine.close()
