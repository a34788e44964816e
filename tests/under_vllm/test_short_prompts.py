"""Under vLLM's scheduler the whole life of a short prompt costs few calls of Python."""

from __future__ import annotations

import logging

from benchmarks.lifecycle import random_prompts, started

TOKENS, BLOCK_SIZE, LIVES = 1024, 16, 3

COLD, HIT = 575, 690
"""Calls of all hooks from the arrival of a prompt of 64 blocks to its last report, in two steps. 64 are vLLM's own, one
for each block that it gets back."""

IDLE_STEP = 70
"""Calls of each further step, in which the engine waits for the report."""


def test_the_life_of_a_short_prompt_calls_few_functions() -> None:
    """Without the hook for statistics, which are collected once a second, however many prompts there are."""
    cold, hit = list[int](), list[int]()
    try:
        with started(("kvpact",), LIVES, None, 0, tokens=TOKENS, block_size=BLOCK_SIZE, chunk=0, requests=2) as halves:
            half = halves["kvpact"]
            half.connector.get_kv_connector_stats = lambda: None
            for number, prompt in enumerate(random_prompts(1, TOKENS, LIVES)):
                for calls, name in ((cold, f"cold{number}"), (hit, f"hit{number}")):
                    all_calls = half.calls_of({name: prompt})
                    calls.append(all_calls - IDLE_STEP * (half.spent.steps - 2))
                    half.forget()
    finally:
        logging.disable(logging.NOTSET)
    assert max(cold[1:]) <= COLD, cold
    assert max(hit[1:]) <= HIT, hit
