"""The servers that the benchmarks over HTTP compare: how each is started, asked, looked at, and what its row has.

Each is a `vllm serve` process of its own, started anew for each round, one after the other; another subject begins each
round. The engine computes on the first core, its stores and the client are on the second. Columns of all rows: `what`;
`requests` and `failed` (of all rounds); `p50_ms`, `p90_ms`, `p99_ms`, of the time to the first token, `requests_per_s`,
and `hits` (cached tokens over prompt tokens, from the server's metrics page): the median of the rounds, with `_q1` and
`_q3` (the least and the most of fewer than four rounds); `p50_ratio`, `p90_ratio`, `p99_ratio`: over the engine with
enough KV memory in the same round, median. kvpact also has `leases_at_rest` (the most), `memory_bytes`, `disk_bytes`
and their bounds `memory_bound` and `disk_bound`. `state` and `note` are there where a subject is not there, or failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import e2e_engines
from benchmarks.e2e import NARROW, WIDE, say
from benchmarks.e2e_engines import LMCache, Mooncake, Run, Subject, last_line
from benchmarks.needs import find_testbeds, require_known, require_vllm
from benchmarks.table import percentile, spread
from kvpact.config import load_config
from kvpact.errors import KvpactError
from kvpact_testkit.compare.server import Server
from kvpact_testkit.compare.stores import disk_bytes
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings, counts_in
from kvpact_testkit.demo.model import ensure_model
from kvpact_testkit.demo.phases import Plan, class_arguments
from kvpact_testkit.demo.text import corpus

COMMAND = ("-P", "-m", "kvpact.cli.vllm_command")
"""vLLM's own command line, whichever distribution brings vLLM."""

MODEL = "random"
"""The name under which the servers answer."""

CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
PERCENTILES = (50, 90, 99)
REST_SECONDS = 20.0

CLIENT_SECONDS = 3600.0
"""After them a client that does not end has failed."""

FAILURES = (RuntimeError, KvpactError, OSError, ValueError, subprocess.TimeoutExpired)
"""Of a server that is gone, or of a client that has nothing to say."""

STEP_TOKENS = 2048
RUNNING = 8
"""What the engine computes in a step, and at once."""

CACHED, PROMPTS = "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total"

ENOUGH = Subject("vLLM, enough KV memory", "", e2e_engines.without_cache)


@dataclass(frozen=True, slots=True)
class Pact:
    """kvpact with this part of the memory that all keys and values take, and a disk for all of them if it is less."""

    share: float

    def __call__(self, run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        memory = f"{int(run.all_bytes * self.share)}B"
        settings: dict[str, Any] = {"memory": memory, "stats_file": str(folder / "stats.json")}
        if self.share < 1:
            settings["tiers"] = [f"disk://{folder / 'disk'}?capacity={DISK_SHARE * run.all_bytes}B"]
        found = run.settings(load_config(settings, {}).kv_transfer_config())
        return replace(found, arguments={**found.arguments, **class_arguments()})


DISK_SHARE = 2
"""kvpact's disk has room for all keys and values so many times."""

CHUNK_BLOCKS = 2
"""LMCache keeps pieces of two blocks: its own default, 256 tokens, where a block has 128."""

SUBJECTS = (
    Subject("vLLM, small KV memory", "small", e2e_engines.without_cache),
    Subject("kvpact, memory for all", "kvpact", Pact(1.25)),
    Subject("kvpact, memory for a quarter, disk", "quarter", Pact(0.25)),
    Subject("Mooncake, embedded", "mooncake", Mooncake("embedded")),
    Subject("LMCache, server", "lmcache", LMCache("lmcache_driven")),
    Subject("ExampleConnector", "example", e2e_engines.example),
)
PEERS = tuple(subject.peer for subject in SUBJECTS)


@dataclass(frozen=True, slots=True)
class Load:
    """What a client has seen: the times to the first token, in ms, of the requests that count, and how many failed."""

    first_token_ms: Sequence[float]
    requests: int
    seconds: float
    failed: int


Client = Callable[[str, Path, Path], Load]
"""Asks the server at this URL about the model, with a folder for files. Raises RuntimeError if it fails."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one server did in one round, and what kvpact `held` afterwards, by column."""

    load: Load
    hits: float
    held: Mapping[str, float]

    def percentile(self, percent: int) -> float:
        """Milliseconds to the first token."""
        return percentile(self.load.first_token_ms, percent)


def run_client(command: Sequence[object], log: Path, **environment: str) -> str:
    """Run it on the storing core and return what it prints. Raises RuntimeError with its last line if it fails."""
    words, known = [str(word) for word in command], {**os.environ, **environment}
    with e2e_engines.on_core(e2e_engines.STORING_CORE), log.open("wb") as out:
        ended = subprocess.run(words, stdout=out, stderr=out, env=known, cwd=log.parent, timeout=CLIENT_SECONDS)
    text = log.read_text(errors="replace")
    if ended.returncode:
        raise RuntimeError(f"the client ended with {ended.returncode}: {last_line(text)}")
    return text


def cached(name: str) -> Path:
    """The place of something that is fetched once."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpact" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def python_with(requirements: Sequence[str]) -> Path:
    """The interpreter of an environment that has these packages alone; pip makes it at the first call."""
    place = cached("-".join(requirements).replace("==", "-"))
    python = place / "bin" / "python"
    if not (complete := place / "complete").exists():
        venv.create(place, clear=True, with_pip=True)
        pip(python, "install", *requirements)
        complete.touch()
    return python


def pip(python: Path | str, *words: object, **environment: str) -> None:
    """Run the pip of this interpreter. Ends the program with one line if it fails."""
    command = [str(python), "-m", "pip", *map(str, words), "--quiet"]
    ended = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"pip {' '.join(command[3:-1])}: {last_line(ended.stderr)}: give what is there by an option")


def serve_command(settings: EngineSettings, template: Path) -> list[str]:
    """What a user types for these settings, without the address."""
    words = [settings.python, *COMMAND, "serve", str(settings.model), "--served-model-name", MODEL]
    words += ["--chat-template", str(template), "--override-generation-config", '{"temperature": 0}']
    for name, value in settings.llm_arguments().items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value is not False and name != "model":
            words += [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]
    return words


def started(settings: EngineSettings, room: int, folder: Path, *options: str) -> Server:
    """A server that has answered, with so many bytes of KV memory beside what runs."""
    settings = replace(
        settings, arguments={**settings.arguments, "kv_cache_memory_bytes": room + e2e_engines.GIB // 16}
    )
    template = folder / "chat.jinja"
    template.write_text(CHAT)
    command = [*serve_command(settings, template), *options]
    server = Server(command, folder / "log", settings.process_environment(), MODEL)
    try:
        server.wait_ready()
        for length in (300, 300, 20):
            server.ask(range(20, 20 + length), 2)
    except BaseException:
        server.kill()
        raise
    return server


class Comparison:
    """All rounds of a run."""

    def __init__(self, run: Run, block_bytes: int, subjects: Sequence[Subject], client: Client) -> None:
        self._run, self._block_bytes, self._subjects, self._client = run, block_bytes, subjects, client
        self.rounds: dict[str, list[Round]] = {subject.name: [] for subject in subjects}
        self.failures: dict[str, str] = {}

    def play(self, rounds: int) -> None:
        """Each subject once a round; one that failed is not asked again."""
        for number in range(rounds):
            at = number % len(self._subjects)
            for subject in (*self._subjects[at:], *self._subjects[:at]):
                if subject.name not in self.failures:
                    say(f"round {number + 1} of {rounds}: {subject.name}")
                    self._play_one(subject, number)

    def _play_one(self, subject: Subject, number: int) -> None:
        place = tempfile.TemporaryDirectory(prefix=f"round-{number}-", dir=self._run.folder)
        try:
            with place as folder, ExitStack() as stack:
                found = self._asked(subject, Path(folder), stack)
        except FAILURES as error:
            self.failures[subject.name] = last_line(str(error)) or type(error).__name__
            say(f"{subject.name}: {error}")
            return
        self.rounds[subject.name].append(found)
        shown = ", ".join(f"p{percent} {found.percentile(percent):.0f} ms" for percent in PERCENTILES)
        say(f"  {shown}, {found.load.requests} requests in {found.load.seconds:.0f} s, hits {found.hits:.3f}")

    def _asked(self, subject: Subject, folder: Path, stack: ExitStack) -> Round:
        if e2e_engines.engines_with_room(self._run) < 1:
            raise RuntimeError("memory is free for no engine: ask for less")
        settings = subject.configure(self._run, stack, folder)
        room = self._run.all_bytes if subject is ENOUGH else self._run.longest_bytes
        server = stack.enter_context(started(settings, room, folder))
        before = server.metrics()
        load = self._client(f"http://127.0.0.1:{server.port}", self._run.model, folder)
        at_end = held(at_rest(server, folder / "stats.json"), folder, self._run, self._block_bytes)
        after = server.metrics()
        if not load.first_token_ms:
            raise RuntimeError(f"none of {load.requests} requests that count had an answer")
        hits, prompts = (after[name] - before[name] for name in (CACHED, PROMPTS))
        return Round(load, hits / prompts, at_end)


def at_rest(server: Server, stats_file: Path) -> dict[str, float]:
    """kvpact's stats when they have come to rest, or after `REST_SECONDS`; nothing of a server without kvpact."""
    deadline, stats = time.monotonic() + REST_SECONDS, dict[str, float]()
    while stats_file.exists() and time.monotonic() < deadline:
        server.ask([1, 2, 3], 1)
        time.sleep(1.5)  # the file is written once a second
        stats = counts_in(stats_file)
        if not any(value for name, value in stats.items() if name.startswith(("leases_held", "queued_write_bytes"))):
            break
    return stats


def held(stats: Mapping[str, float], folder: Path, run: Run, block_bytes: int) -> dict[str, float]:
    """What kvpact holds at rest, and its bounds; of the disk, what its files take."""
    if not stats:
        return {}
    blocks, bound = (stats[f'{name}_blocks{{tier="memory"}}'] for name in ("held", "capacity"))
    found = {"leases_at_rest": stats["leases_held"], "memory_bytes": blocks * block_bytes}
    found["memory_bound"] = bound * block_bytes
    disk = disk_bytes(folder / "disk")
    return found | ({"disk_bytes": disk, "disk_bound": DISK_SHARE * run.all_bytes} if disk else {})


def row(what: str, rounds: Sequence[Round], enough: Sequence[Round]) -> dict[str, Any]:
    """All rounds of one subject."""
    counts = {name: sum(getattr(one.load, name) for one in rounds) for name in ("requests", "failed")}
    found: dict[str, Any] = {"what": what, "rounds": len(rounds), **counts}
    for percent in PERCENTILES:
        found |= spread(f"p{percent}_ms", [one.percentile(percent) for one in rounds])
    for percent in PERCENTILES if enough else ():
        pairs = zip(rounds, enough, strict=False)  # one that failed has fewer
        ratios = [one.percentile(percent) / other.percentile(percent) for one, other in pairs]
        found[f"p{percent}_ratio"] = round(median(ratios), 3)
    found |= spread("requests_per_s", [(one.load.requests - one.load.failed) / one.load.seconds for one in rounds])
    found |= spread("hits", [one.hits for one in rounds])
    return found | {name: max(one.held[name] for one in rounds) for name in rounds[0].held}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The tokens of all prompts and answers together, of the longest, and those of a block."""

    all_tokens: int
    longest: int
    block: int = 128


def compare(
    sizes: Sizes, rounds: int, peers: Sequence[str], peer_python: Path | None, client: Client
) -> Iterator[dict[str, Any]]:
    """A row for each subject: the engine with enough KV memory first, then those of `peers`."""
    require_known("--peers", peers, PEERS)
    if rounds < 1:
        raise SystemExit(f"--rounds: at least 1, not {rounds}")
    require_vllm()
    find_testbeds()
    python = str(peer_python or sys.executable)
    absent = [peer for peer in peers if not e2e_engines.is_there(peer, python)]
    subjects = [ENOUGH, *(one for one in SUBJECTS if one.peer in peers and one.peer not in absent)]
    chunked = LMCache("lmcache_driven", ("--chunk-size", CHUNK_BLOCKS * sizes.block))
    subjects = [replace(one, configure=chunked) if one.peer == "lmcache" else one for one in subjects]
    with tempfile.TemporaryDirectory(prefix="kvpact-serving-") as folder:
        comparison = Comparison(*run_of(Path(folder), sizes, python), subjects, client)
        comparison.play(rounds)
    for what, found in comparison.rounds.items():
        if found:
            yield row(what, found, comparison.rounds[ENOUGH.name])
    for what, why in comparison.failures.items():
        yield {"what": what, "state": "failed", "note": why}
    for peer in absent:
        yield {"what": peer, "state": "not there", "note": e2e_engines.WAYS_TO_GET[peer]}


def run_of(folder: Path, sizes: Sizes, python: str) -> tuple[Run, int]:
    """What all servers share, and the bytes of a block; small KV memory is for a quarter of all tokens."""
    dtype = Plan.for_this_machine().dtype
    shape = WIDE if dtype == "bfloat16" else NARROW
    token = shape.token_bytes(dtype)
    lengths = {"max_model_len": sizes.longest, "max_num_batched_tokens": STEP_TOKENS, "block_size": sizes.block}
    arguments = {"dtype": dtype, "max_num_seqs": RUNNING, **lengths}
    model = ensure_model(folder, shape, corpus())
    everything = max(sizes.all_tokens, 4 * sizes.longest) * token
    return Run(folder, model, arguments, python, EngineProcess, everything // 4, everything), sizes.block * token
