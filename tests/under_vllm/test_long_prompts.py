"""What a long prompt costs the scheduler's thread in one step, in the real connector under vLLM's own scheduler."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hook_time import STEP_CPU_SECONDS

pytest.importorskip("vllm")

from benchmarks.lifecycle import hash_ms, random_prompts, started
from benchmarks.scheduler_halves import SchedulerHalf

TOKENS, BLOCK_SIZE, CHUNK = 131_072, 16, 8192
RUNS = 4
SHARED_CORE = 1.5
"""How much more may be measured while other processes use the same caches and the core's other half."""

HASH_SECONDS = 3e-3
"""What the keys of such a prompt cost alone on a quiet core. Where they cost more, the core is slower or shared,
and everything costs more."""


@pytest.fixture
def half() -> Iterator[SchedulerHalf]:
    """An engine without a model, whose steps compute 8,192 tokens."""
    logging.disable(logging.WARNING)
    try:
        with started(["kvpact"], RUNS + 1, tokens=TOKENS + 1, block_size=BLOCK_SIZE, chunk=CHUNK, requests=1) as halves:
            yield halves["kvpact"]
    finally:
        logging.disable(logging.NOTSET)


def test_no_step_of_a_prompt_of_128k_tokens_costs_the_scheduler_more_than_a_millisecond(half: SchedulerHalf) -> None:
    """P11 for 8,192 blocks, cold and hit. A step of one run may be unlucky, so the cheapest of some runs counts."""
    cold, hit, hashed = [], [], []
    for number in range(RUNS):
        (prompt,) = random_prompts(number, TOKENS, 1)
        cold.append(half.serve({f"cold{number}": prompt}).worst_step)
        half.forget()
        spent, found = half.computed_of_cache({f"hit{number}": list(prompt)})
        half.forget()
        assert found == TOKENS - BLOCK_SIZE
        hit.append(spent.worst_step)
        hashed.append(hash_ms(prompt, BLOCK_SIZE) * 1e-3)
        allowed = STEP_CPU_SECONDS * max(SHARED_CORE, min(hashed) / HASH_SECONDS)
        if max(min(cold), min(hit)) <= allowed:
            break
    assert max(min(cold), min(hit)) <= allowed, (cold, hit, hashed)
