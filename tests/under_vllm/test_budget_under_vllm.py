"""A step waits for what its budget allows, by the last answer before the commit; what it skips is budget of the next.

vLLM's schedulers are real. What a step skipped comes back only where the workers have room for more tokens than the
scheduler gives out: where `--max-num-scheduled-tokens` is lower than `--max-num-batched-tokens`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import step_connector
from hooked_engine import STORED, hooked_engine

from vllm_played_engine import BLOCK, PlayedEngine, answer, make_prompt

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


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "asynchronous scheduling"])
@pytest.mark.parametrize(("room", "more"), [(0, 0), (64, 0), (96, 32), (512, 48)])
def test_what_a_step_skipped_is_budget_once_where_workers_have_room(
    room: int, more: int, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connector counts nothing. With asynchronous scheduling the next step is scheduled before that is known."""
    monkeypatch.setattr(step_connector, "CONTROL", tmp_path)
    with hooked_engine(token_budget=64, workers_room=room, overlap=overlap, num_blocks=129) as hooked:
        hooked.engine.add("short", [*STORED[:48], 1])
        hooked.engine.add("long", make_prompt(9, 40))
        late = [64] if overlap else []
        assert [hooked.engine.step() for _ in range(4)] == [64, *late, 64 + more, 64, 64][:4]
        assert hooked.scheduler.max_num_scheduled_tokens == 64
        assert hooked.counted.hits == 48
