"""Hit rate and bytes of a hybrid model's cache on a conversation trace, at equal memory, for several policies.

Run: python research/hybrid_trace.py [--trace FILE] [--models gemma-3-27b,qwen3-next]. A simulation of policies in
plain Python, one prompt after another, without an engine: `testbeds/hybrid_replay.py` says what each of them does.
"Full attention" is what an engine keeps without its hybrid manager; "physical" is one block of its pool for each block,
as a copy of the pool in host memory keeps them; the others have a class of slots for each distinct payload. The last
one is no model but kvpact's `BlockIndex` with the slots of `ClassedSlots`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from hybrid_index import IndexCache
from hybrid_models import HybridModel, read_model
from hybrid_replay import Cache, PolicyCache, Save, full_shape, payload_shape, physical_shape, read_trace, replay

CUT = Path(__file__).parents[1] / "tests/data/conversation_trace_600.jsonl"
WHOLE = Path(__file__).parents[2] / "shared/data/mooncake_conversation.jsonl"
BUDGETS_GIB = (64, 256, 1024, 4096)
MODELS = "gemma-3-27b,qwen3-next,gpt-oss-20b,deepseek-v4"


def caches(model: HybridModel, budget: int) -> Iterator[tuple[str, Cache]]:
    """What is compared: names, and empty caches."""
    full, payload = full_shape(model), payload_shape(model)
    if full is not None:
        yield "full attention", PolicyCache(full, budget, Save.ALL)
    yield "all, physical", PolicyCache(physical_shape(model), budget, Save.ALL)
    for save in Save:
        yield save.value, PolicyCache(payload, budget, save)
    yield "tails, kvpact's index", IndexCache(payload, budget)


def main() -> None:
    """Print one line for each model, memory and policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=WHOLE if WHOLE.exists() else CUT)
    parser.add_argument("--models", default=MODELS)
    options = parser.parse_args()
    prompts = read_trace(options.trace)
    print(f"{options.trace.name}: {len(prompts)} prompts, {sum(tokens for tokens, _ in prompts):,} tokens")
    print("| model | memory GiB | policy | hit % | held GiB, mean | saved GiB | loaded GiB |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models.split(","):
        for budget in BUDGETS_GIB:
            for policy, cache in caches(read_model(name), budget << 30):
                found = replay(cache, prompts)
                held = found.held / found.prompts
                print(
                    f"| {name} | {budget} | {policy} | {100 * found.hit_tokens / found.tokens:.1f} |"
                    f" {held / 2**30:.0f} | {found.saved / 2**30:.0f} | {found.loaded / 2**30:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
