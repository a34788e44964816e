"""kvpact's own index on a cut of a real trace of prompts, as a hybrid model's blocks: beside a model of its policy."""

from __future__ import annotations

import pytest

from hybrid_index import IndexCache
from hybrid_models import FOLDER, read_model
from hybrid_replay import PolicyCache, Save, payload_shape, read_trace, replay

PROMPTS = read_trace(FOLDER.parent / "conversation_trace_600.jsonl")
GIB = 1 << 30


@pytest.mark.parametrize(("name", "gib"), [("gemma-3-27b", 256), ("qwen3-next", 64), ("deepseek-v4", 16)])
def test_the_index_hits_what_the_model_of_its_policy_hits(name: str, gib: int) -> None:
    """Within 5 % where memory is short: the model has one budget of bytes, the index extents of classes."""
    shape = payload_shape(read_model(name))
    cache = IndexCache(shape, gib * GIB)
    ours, model = replay(cache, PROMPTS), replay(PolicyCache(shape, gib * GIB, Save.TAILS), PROMPTS)
    cache.check()
    assert ours.hit_tokens > 0.95 * model.hit_tokens


def test_with_room_for_all_both_are_the_same() -> None:
    """Tokens, and bytes in each direction."""
    shape = payload_shape(read_model("gemma-3-27b"))
    ours = replay(IndexCache(shape, 1024 * GIB), PROMPTS)
    model = replay(PolicyCache(shape, 1024 * GIB, Save.TAILS), PROMPTS)
    assert (ours.hit_tokens, ours.saved, ours.loaded) == (model.hit_tokens, model.saved, model.loaded)
