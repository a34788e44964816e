"""vLLM's clients name their requests and tenants: what outlives a request is bounded in bytes (H118)."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from vllm_played_engine import PlayedEngine, make_prompt

LONG = 512 << 10
"""Characters of a request's id, and of a salt."""


def test_h118_under_vllm_nothing_keeps_the_long_names_of_requests_that_have_ended(
    start: Callable[..., PlayedEngine],
) -> None:
    """8 MiB go through the scheduler's process; 2 MiB are left at most."""
    engine, prompt = start(save="lazy"), make_prompt(1, 2)

    def serve(first: int, last: int) -> None:
        engine.numbers = (f"{number:04}" * (LONG // 4) for number in range(first, last))  # type: ignore[assignment]
        for number in range(first, last):
            engine.generate(prompt, max_tokens=1, cache_salt=f"{number:04}" * (LONG // 4))
            engine.requests.clear()
        gc.collect()

    serve(0, 1)
    tracemalloc.start()
    serve(1, 9)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 2 << 20
