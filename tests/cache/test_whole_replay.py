"""The whole `PactCache` on a cut of a real trace of prompts hits what its index alone does in `hybrid_trace.py`."""

from __future__ import annotations

import pytest

from hybrid_index import IndexCache
from hybrid_models import FOLDER, read_model
from hybrid_replay import ROW_TOKENS, payload_shape, read_trace, replay
from played_engine import PlayedEngine, Prompt, Slots

PROMPTS = read_trace(FOLDER.parent / "conversation_trace_600.jsonl")


@pytest.mark.parametrize(
    ("name", "gib", "least"), [("gemma-3-27b", 1024, 1), ("gemma-3-27b", 256, 0.95), ("deepseek-v4", 16, 0.95)]
)
def test_the_cache_hits_what_its_index_hits(name: str, gib: int, least: float) -> None:
    """Exactly with room for all; within 5 % where memory is short, where the order of saves decides what is evicted."""
    shape = payload_shape(read_model(name))
    index = IndexCache(shape, gib << 30)
    slots = Slots(index.space.places, index.space.num_rows // max(index.space.places))
    engine = PlayedEngine(shape.groups, slots, range(len(shape.groups)))
    hits = 0
    for number, (tokens, rows) in enumerate(PROMPTS):
        token_ids = [row for row in rows for _ in range(ROW_TOKENS)][:tokens]
        hits += engine.serve(Prompt(f"{number}", token_ids))
    engine.cache.check()
    wanted = replay(index, PROMPTS).hit_tokens
    print(f"{name}, {gib} GiB: {hits:,} tokens, its index alone {wanted:,}")
    assert least * wanted <= hits <= wanted / least
