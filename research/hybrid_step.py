"""What the scheduler's thread spends in kvpact for prompts of models with several KV cache groups, in CPU time.

Run: python research/hybrid_step.py [--models gemma-3-27b,...] [--tokens 4096,32768,131072] [--prompts N]. Needs no
engine: `testbeds/played_engine.py` plays its scheduler, in steps of 8,192 tokens, over a memory that is full, so that
every save evicts. Each prompt is computed and saved, and then loaded with a few tokens more. Milliseconds of CPU time,
medians of the prompts: of each kind of call, "note" (`note_computed`) also of the step that saves most blocks, and of
the step that costs most.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from hybrid_models import HybridModel, read_model
from kvpact.memory.extents import slot_classes
from played_engine import Call, PlayedEngine, Prompt, Slots

MODELS = "deepseek-v3,gemma-3-27b,gpt-oss-20b,deepseek-v4,jamba,llama-4-scout"
TOKENS = "4096,32768,131072"
MORE_TOKENS = 100
"""Of the second request, after the first one's prompt."""


def engine_of(model: HybridModel, tokens: int) -> PlayedEngine:
    """An engine whose cache has room for about three prompts."""
    sizes = [one.payload_bytes for one in model.groups]
    classes, class_bytes = slot_classes(sizes, ranks_differ=False)
    extent_bytes = 8 * max(class_bytes)
    content = sum(count * size for count, size in model.needed(tokens))
    slots = Slots([extent_bytes // size for size in class_bytes], 3 * content // extent_bytes + 2 * len(class_bytes))
    return PlayedEngine([one.group for one in model.groups], slots, classes)


def cost(calls: Iterable[Call], *names: str) -> float:
    """Milliseconds of all calls of these names."""
    return 1e3 * sum(call.seconds for call in calls if call.name in names)


def measure(model: HybridModel, tokens: int, prompts: int) -> dict[str, float]:
    """Milliseconds of each kind of call, and of the step that costs most; blocks that the most saved saves."""
    engine, chance, found = engine_of(model, tokens), random.Random(1), list[dict[str, float]]()
    for number in range(prompts):
        content = [chance.randrange(1 << 17) for _ in range(tokens + MORE_TOKENS)]
        engine.serve(Prompt(f"{number}", content[:tokens]))
        calls = engine.calls
        ends = [0, *(at for at, call in enumerate(calls, 1) if call.name == "report")]
        steps = [calls[start:end] for start, end in pairwise(ends)]
        notes = [call.seconds for call in calls if call.name == "note"]
        most = max(steps, key=lambda step: step[-1].blocks)
        saving = {
            "miss": cost(calls, "prepare"),
            "note, first steps": 1e3 * median(notes[:-1] or notes),
            "note, most saved": cost(most, "note"),
            "end": cost(most, "end_step"),
            "report": cost(most, "report"),
            "worst step": max(cost(step, "prepare", "note", "end_step", "report") for step in steps),
            "saved": most[-1].blocks,
        }
        hit = engine.serve(Prompt(f"{number}, again", content))
        calls = engine.calls
        loading = {"hit": cost(calls, "prepare"), "commit": cost(calls, "commit"), "of": hit}
        loading["loaded"] = max(call.blocks for call in calls)
        found.append(saving | loading)
    half = found[len(found) // 2 :]
    return {name: median(one[name] for one in half) for name in found[0]}


def main() -> None:
    """Print one line for each model and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    columns = "model", "tokens", "prepare, miss", "note", "note most (saved)", "end_step", "report", "prepare, hit (of)"
    print("|", " | ".join((*columns, "commit (loaded)", "worst step")), "|")
    for name in options.models.split(","):
        for tokens in map(int, options.tokens.split(",")):
            one = measure(read_model(name), tokens, options.prompts)
            print(
                f"| {name} | {tokens:,} | {one['miss']:.2f} | {one['note, first steps']:.2f} |"
                f" {one['note, most saved']:.2f} ({one['saved']:.0f}) | {one['end']:.2f} | {one['report']:.2f} |"
                f" {one['hit']:.2f} ({one['of']:.0f}) | {one['commit']:.2f} ({one['loaded']:.0f}) |"
                f" {one['worst step']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
