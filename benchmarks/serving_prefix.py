"""`vllm bench serve` with prefixes that come again, over servers with and without an external KV cache.

vLLM's own client, dataset prefix_repetition: `prompts` prompts, each one of `prefixes` prefixes and a suffix of its
own, at most `concurrency` at once. Columns: see `serving_engines`; all requests count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving_engines import COMMAND, MODEL, PEERS, Load, Sizes, compare, run_client

NAME = "bench_serve"


def load_of(found: Mapping[str, Any]) -> Load:
    """What vLLM's client has written about its requests."""
    times = [seconds * 1e3 for seconds, error in zip(found["ttfts"], found["errors"], strict=True) if not error]
    return Load(times, len(found["errors"]), found["duration"], len(found["errors"]) - len(times))


@dataclass(frozen=True, slots=True)
class BenchServe:
    """vLLM's own client, with these options of its dataset."""

    options: Mapping[str, object]

    def __call__(self, url: str, model: Path, folder: Path) -> Load:
        words: list[object] = [sys.executable, *COMMAND, "bench", "serve", "--backend", "openai", "--base-url", url]
        words += ["--model", MODEL, "--tokenizer", model, "--dataset-name", "prefix_repetition", "--seed", 1]
        words += ["--ignore-eos", "--save-result", "--save-detailed", "--result-filename", folder / "result.json"]
        words += [word for name, value in self.options.items() for word in (f"--{name}", value)]
        run_client(words, folder / "client.log")
        return load_of(json.loads((folder / "result.json").read_text()))


def rows(
    prompts: int = 160,
    prefixes: int = 16,
    prefix_tokens: int = 2048,
    suffix_tokens: int = 128,
    answer_tokens: int = 16,
    concurrency: int = 4,
    rounds: int = 2,
    peers: tuple[str, ...] = PEERS,
    peer_python: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """A row of each server. `peer_python` is an interpreter that has vLLM and the packages of peers, else this one."""
    if not prompts >= prefixes >= 1:
        raise SystemExit(f"--prefixes: 1 to --prompts, which is {prompts}, not {prefixes}")
    lengths = {"num-prefixes": prefixes, "prefix-len": prefix_tokens, "suffix-len": suffix_tokens}
    lengths |= {"output-len": answer_tokens}
    options = {"num-prompts": prompts, "max-concurrency": concurrency}
    options |= {f"prefix-repetition-{name}": value for name, value in lengths.items()}
    own = suffix_tokens + answer_tokens
    sizes = Sizes(prefixes * prefix_tokens + prompts * own, prefix_tokens + own + 256)
    yield from compare(sizes, rounds, peers, peer_python, BenchServe(options))
