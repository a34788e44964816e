"""vLLM's own multi-turn benchmark over servers with and without an external KV cache: users who come back.

`users` conversations at once, of `turns` requests each; a user reads an answer for `think` seconds on average (Poisson)
before the next question. Small KV memory, and kvpact's memory above its disk, are for a quarter of all conversations at
their full length. Columns: see `serving_engines`; times to the first token are of the later turns. The client is
benchmarks/multi_turn of vLLM's source distribution, which pip fetches, with pandas, to ~/.cache/kvpact at the first
run; `client` is a folder that has it already.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.needs import require_vllm
from benchmarks.serving_engines import MODEL, PEERS, Load, Sizes, cached, compare, pip, run_client
from kvpact.cli.vllm_command import answer_for_vllm
from kvpact_testkit.demo.text import corpus

NAME = "multi_turn"
SCRIPT = "benchmark_serving_multi_turn.py"
TO_BUILD = ("setuptools-rust", "setuptools-scm")
"""pip asks the source distribution for its metadata, whose script imports these."""

TO_RUN = ("pandas", "python-dateutil", "six", "tqdm")
"""The client's own, beside the engine's."""

ROLE_TOKENS = 16
"""What the chat template and the client's own words take of a turn, at most."""


def load_of(stats: Sequence[Mapping[str, Any]], log: str) -> Load:
    """What the client has written about each request, and its words about those that failed."""
    failed = sum(map(int, re.findall(r"num_failures=(\d+)", log)))
    first = min(one["start_time_ms"] for one in stats)
    last = max(one["start_time_ms"] + one["latency_ms"] for one in stats)
    later = [one["ttft_ms"] for one in stats if one["input_num_turns"] > 1]
    return Load(later, len(stats) + failed, (last - first) / 1e3, failed)


def conversations(
    users: int, turns: int, prefix_tokens: int, turn_tokens: int, answer_tokens: int, text: Path
) -> dict[str, Any]:
    """The client's input file."""

    def always(value: int) -> dict[str, Any]:
        return {"distribution": "constant", "value": value}

    asked = {"num_turns": always(2 * turns), "prefix_num_tokens": always(prefix_tokens)}
    return {
        "filetype": "generate_conversations",
        "num_conversations": users,
        "text_files": [str(text)],
        "prompt_input": {**asked, "num_tokens": always(turn_tokens)},
        "prompt_output": {"num_tokens": always(answer_tokens)},
    }


def fetched_client() -> Path:
    """The folder with vLLM's client and its packages, fetched by pip if it is not there yet."""
    answer_for_vllm()
    release = version("vllm").partition("+")[0]
    place = cached(f"multi-turn-{release}")
    if not place.joinpath(SCRIPT).exists():
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            tools, made = Path(folder, "tools"), Path(folder, "made")
            pip(sys.executable, "install", "--target", tools, *TO_BUILD)
            named = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": release, "PYTHONPATH": str(tools)}
            only = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
            pip(sys.executable, "download", *only, "--dest", folder, f"vllm=={release}", **named)
            with tarfile.open(next(Path(folder).glob("vllm-*.tar.gz"))) as archive:
                inside = [one for one in archive.getmembers() if "/benchmarks/multi_turn/" in one.name]
                archive.extractall(made, inside, filter="data")
            client = next(made.rglob(SCRIPT)).parent
            pip(sys.executable, "install", "--target", client, "--no-deps", *TO_RUN)
            client.rename(place)
    return place


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """vLLM's script in this folder, with the input file's content but for its text."""

    folder: Path
    users: int
    think: float
    lengths: Mapping[str, int]

    def __call__(self, url: str, model: Path, folder: Path) -> Load:
        text, asked, stats, log = (folder / name for name in ("text", "asked.json", "stats.json.out", "client.log"))
        text.write_text(corpus())
        asked.write_text(json.dumps(conversations(self.users, text=text, **self.lengths)))
        words: list[object] = [sys.executable, self.folder / SCRIPT, "--model", model, "--served-model-name", MODEL]
        words += ["--url", url, "--input-file", asked, "--stats-json-output", stats, "--no-early-stop", "--seed", 1]
        words += ["--num-clients", self.users, "--max-active-conversations", self.users]
        words += ["--request-rate", 1 / self.think if self.think else 0, "--request-timeout-sec", 600]
        beside = os.pathsep.join((str(self.folder), os.environ.get("PYTHONPATH", "")))
        said = run_client(words, log, PYTHONPATH=beside)
        return load_of(json.loads(stats.read_text()), said)


def rows(
    users: int = 16,
    turns: int = 20,
    prefix_tokens: int = 512,
    turn_tokens: int = 96,
    answer_tokens: int = 8,
    think: float = 5.0,
    rounds: int = 2,
    peers: tuple[str, ...] = PEERS,
    peer_python: Path | None = None,
    client: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """A row of each server. `peer_python` is an interpreter that has vLLM and the packages of peers, else this one."""
    if turns < 2:
        raise SystemExit(f"--turns: at least 2, so that there are later turns, not {turns}")
    if client is not None and not client.joinpath(SCRIPT).exists():
        raise SystemExit(f"--client: {client} has no {SCRIPT}; without --client pip fetches it")
    require_vllm()
    lengths = {"turns": turns, "prefix_tokens": prefix_tokens, "turn_tokens": turn_tokens}
    one = prefix_tokens + turns * (turn_tokens + 2 * answer_tokens + ROLE_TOKENS)
    played = MultiTurn(client or fetched_client(), users, think, lengths | {"answer_tokens": answer_tokens})
    yield from compare(Sizes(users * one, one + 512), rounds, peers, peer_python, played)
