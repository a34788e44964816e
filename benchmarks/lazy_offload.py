"""Eager and lazy saving on a scaled-down conversation trace: bytes written, hit rate, time to first token.

    python benchmarks/lazy_offload.py [--trace FILE] [--first 2000] [--last 3000] [--blocks 48,320] [--rounds 3]

Two real vLLM engines on the CPU, one with `"save": "eager"` and one with `"save": "lazy"`, answer the same requests in
turn, so that what else the machine does hits both alike. The requests are all conversations of 2 to 8 turns that lie
within so many requests of the trace, in its order; each of its blocks of 512 tokens is one of the engine's of 128.
Between rounds both caches and both engines forget everything. `--blocks` are sizes of the engine's own KV memory: one
that is too small for the trace, and one that holds it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "testbeds"))

from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.model import TINY_SHAPE, ensure_model
from tiny_engine import BLOCK, TOKENIZER_TEXT, kvpact_transfer_config

TRACE = Path(__file__).parents[2] / "shared/data/mooncake_conversation.jsonl"
TRACE_BLOCK = 512
MAX_BLOCKS = 16
MAX_TURNS = 8
MEMORY = "512MiB"
"""Room for every block of the trace as it is scaled down: what is compared is what is written, not what is evicted."""

REST_SECONDS = 30.0
IDLE_SECONDS = 1.1
"""An engine without work polls for a second, on the core that the other one computes on."""


def conversations(trace: Path, first: int, last: int) -> list[list[int]]:
    """The prompts of the conversations that lie within requests [first, last) of the trace, as token ids."""
    requests = [json.loads(line) for line in trace.read_text().splitlines()]
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, request in enumerate(requests):
        ids = request["hash_ids"]
        groups[ids[1] if len(ids) > 1 else ("alone", place)].append(place)
    chosen = [
        place
        for places in groups.values()
        if 2 <= len(places) <= MAX_TURNS and first <= places[0] and places[-1] < last
        for place in places
        if all(len(requests[place]["hash_ids"]) <= MAX_BLOCKS for place in places)
    ]
    return [scaled(requests[place]) for place in sorted(chosen)]


def scaled(request: dict[str, Any]) -> list[int]:
    """A quarter of the request's tokens, equal where its blocks are."""
    tokens: list[int] = []
    for block in request["hash_ids"]:
        source = random.Random(block)
        tokens += [source.randrange(1, TINY_SHAPE.vocabulary) for _ in range(BLOCK)]
    return tokens[: max(2, request["input_length"] * BLOCK // TRACE_BLOCK)]


@dataclass(frozen=True, slots=True)
class Round:
    """What one engine did in one round."""

    saved_blocks: float
    loaded_tokens: float
    cached_tokens: int
    seconds: tuple[float, ...]
    """To the first token, by request."""


def counts(engine: EngineProcess) -> dict[str, float]:
    """kvpact's counts, once the engine is at rest."""
    end = time.monotonic() + REST_SECONDS
    before: dict[str, float] = {}
    while time.monotonic() < end:
        time.sleep(IDLE_SECONDS)
        now = {name: engine.stats().get(name, 0) for name in ("saved_blocks", "used_tokens", "leases_held")}
        if now == before:
            return now
        before = now
    return before


def play(engines: dict[str, EngineProcess], prompts: Sequence[Sequence[int]]) -> dict[str, Round]:
    """Both engines answer every prompt, taking turns in who goes first."""
    for engine in engines.values():
        engine.reset_prefix_cache(reset_connector=True)
    start = {name: counts(engine) for name, engine in engines.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    cached = dict.fromkeys(engines, 0)
    names = [*engines]
    for prompt in prompts:
        names.reverse()
        for name in names:
            (output,) = engines[name].generate([prompt], max_tokens=1)
            seconds[name].append(output.first_token_seconds)
            cached[name] += output.cached_tokens
    rounds = {}
    for name, engine in engines.items():
        end = counts(engine)
        assert end["leases_held"] == 0, f"{name} holds {end['leases_held']} leases at rest"
        gained = {key: end[key] - start[name][key] for key in end}
        rounds[name] = Round(gained["saved_blocks"], gained["used_tokens"], cached[name], tuple(seconds[name]))
    return rounds


def compare(model: Path, folder: Path, blocks: int, prompts: Sequence[Sequence[int]], rounds: int) -> dict[str, Any]:
    """Play so many rounds on engines with `blocks` KV blocks."""
    engines: dict[str, EngineProcess] = {}
    try:
        for save in ("eager", "lazy"):
            config = kvpact_transfer_config(memory=MEMORY, save=save, stats_file=str(folder / f"{save}-{blocks}.json"))
            arguments = {
                "num_gpu_blocks_override": blocks,
                "dtype": "float32",
                "max_num_batched_tokens": 2048,
                "max_model_len": 2 * MAX_BLOCKS * BLOCK,
            }
            settings = EngineSettings(model, config, arguments)
            engines[save] = EngineProcess(settings, folder / f"{save}-{blocks}.log")
        for engine in engines.values():
            engine.wait_ready()
            engine.generate([[1] * (2 * BLOCK)], max_tokens=1)
        played = [play(engines, prompts) for _ in range(rounds)]
    finally:
        for engine in engines.values():
            engine.stop()
    tokens = sum(len(prompt) for prompt in prompts)
    ratios = [
        median(lazy / eager for eager, lazy in zip(one["eager"].seconds, one["lazy"].seconds, strict=True))
        for one in played
    ]
    result: dict[str, Any] = {"blocks": blocks, "ttft lazy/eager, median of each round": [round(r, 3) for r in ratios]}
    for save in ("eager", "lazy"):
        ones = [one[save] for one in played]
        cuts = quantiles([second for one in ones for second in one.seconds], n=4)
        result[save] = {
            "saved_blocks": [one.saved_blocks for one in ones],
            "hit_rate": [round(one.cached_tokens / tokens, 4) for one in ones],
            "loaded_share": [round(one.loaded_tokens / tokens, 4) for one in ones],
            "ttft_ms_quartiles": [round(cut * 1e3) for cut in cuts],
        }
    return result


def main() -> None:
    """Print one line of JSON for each size of the engine's KV memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--first", type=int, default=2000)
    parser.add_argument("--last", type=int, default=3000)
    parser.add_argument("--blocks", default="48,320")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    prompts = conversations(options.trace, options.first, options.last)
    distinct = {tuple(prompt[: end * BLOCK]) for prompt in prompts for end in range(1, len(prompt) // BLOCK + 1)}
    print(
        f"{len(prompts)} requests, {sum(map(len, prompts)):,} tokens, {len(distinct)} distinct full blocks", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="kvpact-lazy-") as folder:
        model = ensure_model(Path(folder), TINY_SHAPE, TOKENIZER_TEXT)
        for blocks in (int(one) for one in options.blocks.split(",")):
            print(json.dumps(compare(model, Path(folder), blocks, prompts, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
