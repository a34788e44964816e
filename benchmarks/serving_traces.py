"""AIPerf replays cuts of recorded traces, scaled 1/64, over servers with and without an external KV cache.

Scaled, not a submission. `mooncake` (loader mooncake_trace): whole conversations of at least three requests, at their
recorded order in time, which is shortened to `seconds`. `weka` (loader weka_trace): coding sessions without sub-agents,
all at once. All lengths and blocks are divided by 64; the engine's block is 32 tokens. Columns: see `serving_engines`,
and `trace`. AIPerf has an environment of its own, made by pip in ~/.cache/kvpact at the first run; `aiperf_python` is
the interpreter of one that is there already.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.host_hits import named_prompts
from benchmarks.needs import require_known
from benchmarks.serving_engines import MODEL, PEERS, Load, Sizes, compare, python_with, run_client

NAME = "traces"
AIPERF = "aiperf==0.13.0"
SCALE = 64
SCALED = "1/64: scaled, not a submission"
BLOCK = 512 // SCALE
"""Tokens of a block of Mooncake's trace, scaled."""

WEKA_BLOCK = 64
"""Tokens of a block of a coding session, scaled: 64 recorded blocks."""

REVISION = "0" * 40
"""AIPerf takes a tokenizer from a cache of Hugging Face's hub only, not from a folder."""

ENGINE_BLOCK = 32
MODEL_TOKENS = 4096
TRACES = ("mooncake", "weka")
DATA = Path(__file__).parents[2] / "shared" / "data"

Request = dict[str, Any]


def mooncake_cut(lines: Sequence[Request], requests: int, seconds: float) -> list[Request]:
    """About so many requests of whole conversations, scaled; `timestamp` in ms."""
    conversations: dict[tuple[int, ...], list[Request]] = {}
    for line in lines:
        conversations.setdefault(tuple(line["hash_ids"][:2]), []).append(line)
    cut: list[Request] = []
    for conversation in conversations.values():
        if len(conversation) >= 3 and len(cut) < requests:
            cut += conversation
    cut.sort(key=lambda line: line["timestamp"])
    faster = (cut[-1]["timestamp"] - cut[0]["timestamp"]) / (seconds * 1e3) or 1
    return [{**line, **_scaled_line(line, cut[0]["timestamp"], faster)} for line in cut]


def _scaled_line(line: Request, begin: int, faster: float) -> Request:
    tokens = min(len(line["hash_ids"]) * BLOCK, _scaled(line["input_length"]))
    at = round((line["timestamp"] - begin) / faster)
    return {"timestamp": at, "input_length": tokens, "output_length": _scaled(line["output_length"])}


def weka_cut(lines: Sequence[Request], sessions: int, requests: int, seconds: float) -> list[Request]:
    """The first `requests` requests of so many sessions without sub-agents, as AIPerf's loader reads them.

    They take at most `seconds`, scaled, and their prompts fit the model.
    """
    found: dict[str, list[Request]] = {}
    for line in lines:
        found.setdefault(line["trace"], []).append(line)
    fit = [
        (_session(name, asked[:requests]), max(one["in"] for one in asked[:requests]))
        for name, asked in found.items()
        if len(asked) >= requests and not any(one["depth"] for one in asked)
    ]
    most = (MODEL_TOKENS - 512) * SCALE
    return [one for one, longest in fit if longest < most and one["requests"][-1]["t"] < seconds][:sessions]


def _session(name: str, asked: Sequence[Request]) -> Request:
    requests = []
    for one, ids in named_prompts(asked):
        lengths = {"in": _scaled(one["in"]), "out": _scaled(one["out"])}
        blocks = ids[WEKA_BLOCK - 1 :: WEKA_BLOCK]
        requests.append({"t": one["t"] / SCALE, "type": "s", "model": MODEL, **lengths, "hash_ids": blocks})
    return {"id": name, "models": [MODEL], "block_size": WEKA_BLOCK, "hash_id_scope": "local", "requests": requests}


def _scaled(tokens: int) -> int:
    return math.ceil(tokens / SCALE)


def load_of(records: Sequence[Mapping[str, Any]]) -> Load:
    """What AIPerf has written about each request."""
    times = [one["metrics"]["time_to_first_token"]["value"] for one in records if not one.get("error")]
    begin = min(one["metadata"]["request_start_ns"] for one in records)
    end = max(one["metadata"]["request_end_ns"] for one in records)
    return Load(times, len(records), (end - begin) / 1e9, len(records) - len(times))


@dataclass(frozen=True, slots=True)
class Replay:
    """AIPerf with these options of its own, over this input file or folder."""

    python: Path
    given: Path
    options: Sequence[object]

    def __call__(self, url: str, model: Path, folder: Path) -> Load:
        words: list[object] = [self.python.with_name("aiperf"), "profile", "--model", MODEL]
        words += ["--tokenizer", "kvpact/random", "--tokenizer-revision", REVISION]
        words += ["--url", url, "--streaming", "--endpoint-type", "chat", "--input-file", self.given, *self.options]
        words += ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--random-seed", 1]
        words += ["--artifact-dir", folder / "aiperf", "--use-legacy-max-tokens", "--use-server-token-count"]
        snapshot = (hub := folder / "hub") / "models--kvpact--random" / "snapshots" / REVISION
        snapshot.parent.mkdir(parents=True)
        snapshot.symlink_to(model)
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        run_client(words, folder / "client.log", HF_HUB_CACHE=str(hub), PYTHONPATH="", **offline)
        (records,) = (folder / "aiperf").rglob("profile_export.jsonl")
        return load_of([json.loads(line) for line in records.read_text().splitlines()])


def _lines(path: Path) -> list[Request]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SystemExit(f"--data: {path}: {error.strerror}; it is a folder with the two traces") from None
    return [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]


def rows(
    requests: int = 320,
    seconds: float = 120.0,
    sessions: int = 16,
    session_requests: int = 20,
    traces: tuple[str, ...] = TRACES,
    rounds: int = 2,
    peers: tuple[str, ...] = PEERS,
    peer_python: Path | None = None,
    aiperf_python: Path | None = None,
    data: Path = DATA,
) -> Iterator[dict[str, Any]]:
    """For each trace a row of each server; `requests` are of mooncake, `sessions` of weka.

    `peer_python` is an interpreter that has vLLM and the packages of peers, by default this one.
    """
    require_known("--traces", traces, TRACES)
    python = aiperf_python or python_with([AIPERF])
    for trace in traces:
        with tempfile.TemporaryDirectory(prefix="kvpact-trace-") as folder:
            if trace == "mooncake":
                cut = mooncake_cut(_lines(data / "mooncake_conversation.jsonl"), requests, seconds)
                replay, tokens = _mooncake(python, Path(folder, "trace.jsonl"), cut)
            else:
                played = weka_cut(_lines(data / "coding_sessions_delta.jsonl.gz"), sessions, session_requests, seconds)
                replay, tokens = _weka(python, Path(folder), played)
            for row in compare(Sizes(tokens, MODEL_TOKENS, ENGINE_BLOCK), rounds, peers, peer_python, replay):
                yield {"trace": trace, "scale": SCALED, **row}


def _mooncake(python: Path, file: Path, cut: Sequence[Request]) -> tuple[Replay, int]:
    """The replay, and the tokens of all different blocks."""
    file.write_text("".join(f"{json.dumps(line)}\n" for line in cut))
    options = ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule", "--isl-block-size", BLOCK]
    blocks = {block for line in cut for block in line["hash_ids"]}
    return Replay(python, file, options), len(blocks) * BLOCK


def _weka(python: Path, folder: Path, played: Sequence[Request]) -> tuple[Replay, int]:
    """The replay, and the tokens of all sessions at their longest."""
    for session in played:
        folder.joinpath(f"{session['id']}.json").write_text(json.dumps(session))
    options = ["--custom-dataset-type", "weka_trace", "--concurrency", len(played)]
    options += ["--request-count", sum(len(session["requests"]) for session in played)]
    return Replay(python, folder, options), sum(max(one["in"] for one in session["requests"]) for session in played)
