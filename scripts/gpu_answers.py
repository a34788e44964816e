"""Whether vLLM answers with kvpact as it answers without it: python scripts/gpu_answers.py --output FILE

On a tiny Llama with random weights, made on the spot: nothing is downloaded. Two engines stand side by side, one with
kvpact and one without it: eager and, on a GPU, with full graphs, captured while memory is pinned, and with vLLM's
default ones; on models like Gemma 3, with groups of windows, and like Qwen3-Next, with states. A hit from kvpact is
compared with a hit in the other engine's own prefix cache, asked alone and while others decode. Runs on a CPU, too,
where vLLM does. FILE has what was found after each comparison. The exit status is 0 if all is good.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvpact.config import load_config
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.gpu import cuda_devices
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.model import TINY_SHAPE, ensure_model
from kvpact_testkit.demo.phases import GPU_SHARE, class_arguments, settle

ROOT = Path(__file__).resolve().parents[1]

Found = dict[str, Any]

TEXT = "A prompt prefix is never computed twice: it is promised, committed, loaded and used.\n" * 50

TOKENS = 657
"""In a prompt that is asked again: five blocks of a CPU engine and a part of one."""

FIRST_COPIES = 70
"""Prompts before all others: on a GPU 64 saves, 64 loads and 64 loads that a step waits for are checked. Only then do
streams alone order a load."""

STEP_TOKENS = 512
"""That an engine computes in a step at most, so that long prompts end their prefill, and their answers, in turns."""

TOLERANCE = 0.0625
"""Of log-probabilities, where the engine differs from itself by less: two steps of bfloat16 between 4 and 8."""

SCENES: dict[str, Found] = {
    "eager": {"enforce_eager": True},
    "groups": {"enforce_eager": True},
    "states": {"enforce_eager": True},
    "full graphs": {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    "graphs": {"enforce_eager": False},
}
"""Name -> arguments for `vllm.LLM`, by worth. "full graphs" are of whole forward passes, and torch compiles nothing."""

FAMILIES = {"groups": "gemma_like", "states": "qwen3_next_like"}
"""Scene -> its model in tests/under_vllm/model_families.py; elsewhere the tiny Llama."""

STATE_TOKENS = 2 * TOKENS
"""In a prompt of a model with states, which are kept at every few hundred tokens."""

COUNTS = (
    "loaded_tokens",
    "failed_tokens",
    "used_tokens",
    "saved_blocks",
    "refuted_copies",
    "hook_errors",
    "leases_held",
)


def prompt(seed: int, tokens: int = TOKENS) -> list[int]:
    """Prompts of different seeds differ from the first token on."""
    source = random.Random(seed)
    return [source.randrange(1, TINY_SHAPE.vocabulary) for _ in range(tokens)]


def difference(one: Output, other: Output) -> float:
    """The largest difference of the log-probabilities of a token that both name, up to where their tokens differ.

    Infinite where they name no token together, or one has no answer.
    """
    if "abort" in (one.finish_reason, other.finish_reason) or not one.logprobs or not other.logprobs:
        return math.inf
    largest = 0.0
    for number, (ours, theirs) in enumerate(zip(one.logprobs, other.logprobs, strict=False)):
        here, there = dict(ours), dict(theirs)
        both = here.keys() & there.keys()
        largest = max([largest, *(abs(here[token] - there[token]) for token in both)] if both else [math.inf])
        if one.tokens[number] != other.tokens[number]:
            break
    return largest


def compare(ours: Sequence[Output], theirs: Sequence[Output]) -> Found:
    """What two engines said to the same prompts."""
    pairs = list(zip(ours, theirs, strict=True))
    return {
        "answers": len(pairs),
        "bit for bit": sum(one.same_answer(other) for one, other in pairs),
        "same tokens": sum(one.tokens == other.tokens for one, other in pairs),
        "largest log-probability difference": max(difference(one, other) for one, other in pairs),
        "cached tokens": [one.cached_tokens for one in ours],
    }


class Scene:
    """Two engines on the same model: `plain`, and `pact` with kvpact."""

    def __init__(self, name: str, model: Path, work: Path, gpu: bool, engines: ExitStack) -> None:
        self.gpu, graphs = gpu, "graphs" in name
        self.tokens = STATE_TOKENS if name == "states" else TOKENS
        self.has_states = name == "states"
        memory = f"{min(32, _ram_gib() // 4)}GiB" if gpu and graphs else "256MiB"
        settings = {"memory": memory, "kv_layout": "auto" if graphs else "engine", "recompute_if_faster": False}
        config = load_config(
            settings | {"stats_file": str(work / f"{name.replace(' ', '-')}-stats.json")}, {}
        ).kv_transfer_config()
        arguments: Found = {**SCENES[name], "max_num_batched_tokens": STEP_TOKENS}
        arguments |= {"gpu_memory_utilization": GPU_SHARE} if gpu else {"max_num_seqs": 8}
        began = time.monotonic()
        self.log = work / f"{name.replace(' ', '-')}-kvpact.log"
        self.plain = EngineProcess(EngineSettings(model, None, arguments), work / f"{name.replace(' ', '-')}-plain.log")
        engines.callback(self.plain.kill)
        self.pact = EngineProcess(EngineSettings(model, config, {**arguments, **class_arguments()}), self.log)
        engines.callback(self.pact.kill)
        self.block = self.plain.wait_ready().block_size
        self.pact.wait_ready()
        self.start: Found = {"memory": memory, "seconds to start both": round(time.monotonic() - began, 1)}
        if gpu and graphs:
            self.start["pinning ended after the capture of graphs began"] = pinning_went_on(self.log.read_text())
        self.own = 0.0
        """The largest difference of the engine without kvpact from itself."""

    def compared(self, ours: Sequence[Output], theirs: Sequence[Output], cached: int) -> Found:
        """Good if the answers differ as little as the engine from itself, and this many of ours had a hit."""
        found = compare(ours, theirs)
        limit = max(self.own, TOLERANCE)
        full = (self.tokens - 1) // self.block * self.block
        hits = sum(output.cached_tokens == full or (self.has_states and output.cached_tokens > 0) for output in ours)
        good = found["largest log-probability difference"] <= limit and hits == cached
        return found | {"hits": hits, "hits expected": cached, "limit": limit, "good": good}

    def play(self, tell: Callable[[str, Found], None]) -> None:
        """Ask; `tell(what, found)` after each comparison."""
        plain, pact = self.plain, self.pact
        first = [prompt(1000 + number, self.tokens) for number in range(FIRST_COPIES if self.gpu else 4)]
        for together in (True, True, False):  # saves, loads beside steps, and loads that a step waits for
            pact.generate(first, max_tokens=1, together=together)
            settle(pact)
            pact.reset_prefix_cache()
        asked = [prompt(number, self.tokens) for number in range(8)]
        cold, local = (plain.generate(asked, max_tokens=8) for _ in range(2))
        self.own = compare(cold, local)["largest log-probability difference"]
        tell("cold", self.compared(pact.generate(asked, max_tokens=8), cold, 0))
        settle(pact)
        pact.reset_prefix_cache()
        tell("hits, alone", self.compared(pact.generate(asked, max_tokens=8), local, len(asked)))
        long = [prompt(100 + number, 600 + 400 * number) for number in range(3)]
        pact.reset_prefix_cache()
        crowds = [engine.crowd([*long, *asked], max_tokens=24, at_once=4) for engine in (plain, pact)]
        alone = plain.generate(asked, max_tokens=24)
        self.own = max(self.own, compare(crowds[0][len(long) :], alone)["largest log-probability difference"])
        tell("hits while others decode", self.compared(crowds[1], crowds[0], len(asked)))
        counts = {name: settle(pact).get(name, 0) for name in COUNTS}
        wrong = any(counts[name] for name in ("failed_tokens", "refuted_copies", "hook_errors", "leases_held"))
        tell("counts", counts | {"good": not wrong and counts["loaded_tokens"] > 0})


def pinning_went_on(log: str) -> bool | None:
    """Whether memory was still being pinned when vLLM began to capture graphs; None if the log does not say."""
    pinned, capture = re.search(r"arena: .* pinned", log), re.search(r"Capturing CUDA graph", log)
    if capture is None:
        return None
    return pinned is None or pinned.start() > capture.start()


def family(name: str, tiny: Path, work: Path) -> Path:
    """The model of a scene."""
    if name not in FAMILIES:
        return tiny
    sys.path[:0] = [
        str(ROOT / folder) for folder in ("tests/under_vllm", "tests", "testbeds") if (ROOT / folder).exists()
    ]
    import model_families

    made: Path = getattr(model_families, FAMILIES[name])(work / name, tiny)
    time.sleep(0.2)  # an engine that begins within a tick of the clock after its files changed cannot trust them
    return made


def _ram_gib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30


def run(scenes: Sequence[str], gpu: bool, file: Path, work: Path) -> bool:
    """Play the scenes; a scene that fails is told with its error, and the next one is played."""
    found: Found = {"gpu": gpu, "scenes": {}}
    model = ensure_model(work, TINY_SHAPE, TEXT)

    def write() -> None:
        beside = file.with_name(f".{file.name}")
        beside.write_text(json.dumps(found, indent=1))
        beside.replace(file)

    for name in scenes:
        scene: dict[str, Found] = found["scenes"].setdefault(name, {})

        def tell(what: str, figures: Found, scene: dict[str, Found] = scene, name: str = name) -> None:
            scene[what] = figures
            print(f"{name}, {what}: {json.dumps(figures)}", flush=True)
            write()

        try:
            with ExitStack() as engines:
                made = Scene(name, family(name, model, work), work, gpu, engines)
                tell("start", made.start)
                made.play(tell)
        except Exception as error:
            tell("failed", {"error": str(error)[-4000:], "good": False})
    return all(figures.get("good", True) for scene in found["scenes"].values() for figures in scene.values())


def main(arguments: list[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="Whether vLLM answers with kvpact as it answers without it.")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", action="append", choices=list(SCENES), help="by default all; eager alone on a CPU")
    given = parser.parse_args(arguments)
    gpu = bool(cuda_devices())
    scenes = given.only or ([*SCENES] if gpu else ["eager"])
    with tempfile.TemporaryDirectory(prefix="kvpact-answers-") as directory:
        return 0 if run(scenes, gpu, given.output, Path(directory)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
