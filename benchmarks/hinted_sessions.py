"""Coding sessions whose clients hint before their longest pauses, over HTTP: hits, and first tokens after the pauses.

The first requests of recorded sessions without sub-agents that have a pause of 5 to 60 min, each session begun a while
after the one before. Times, lengths and hints are divided by 64; a token stands for each 64. A request follows the
answer of the one before, at the time of the trace or later. Each kind of hint has a server of its own, with KV memory
for one prompt, memory for a third of all sessions, and a disk for all; the kinds take turns in each round.

Clients ask before the longest pauses, as many as fit a fifth of memory (`asking`): `retain` for the pause, `expect_in`
a second less, as its time counts from the answer's end. `paused_ms`: first tokens of the turns after those pauses.
`paused_hit`: percent of their prompts' tokens that was not computed; `others_hit`: of all others. `memory`, `disk` and
`device`: percent of all prompt tokens that came from there. `brought`: blocks read before they came, of all rounds;
`brought_unused`: percent of these that the next turn did not load.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.e2e import say
from benchmarks.e2e_engines import Run
from benchmarks.host_hits import DATA, coding_sessions, named_prompts
from benchmarks.needs import find_testbeds, require_known, require_vllm
from benchmarks.retained import MARGIN_SECONDS, Trace, Turn
from benchmarks.serving_engines import DISK_SHARE, Sizes, at_rest, run_of, started
from benchmarks.table import percentile, spread
from kvpact.config import load_config
from kvpact.hints.schema import KEY, MOST_SECONDS, Brought
from kvpact.metrics import series
from kvpact_testkit.compare.server import Answer, Server, ServerError
from kvpact_testkit.compare.visit import served, settled
from kvpact_testkit.demo.engine import EngineSettings
from kvpact_testkit.demo.phases import class_arguments

SCALE: Final = 64
ENGINE_BLOCK: Final = 32
MODEL_TOKENS: Final = 2048
FIRST_TOKEN: Final = 20
VOCABULARY: Final = 1500
"""Tokens that prompts are made of."""

STATS: Final = "stats.json"
MEMORY_SHARE: Final = 3
LEAST_SECONDS: Final = 300.0
"""Recorded seconds of the shortest pause before which a client hints."""

EARLIER_SECONDS: Final = 1.0

HINTS: Final = {
    "LRU": (),
    "retain": ("retain",),
    "expect_in": ("expect_in",),
    "both": ("retain", "expect_in"),
}
"""The word among `--hints` -> hints that clients send before their longest pauses."""


@dataclass(frozen=True, slots=True)
class Sessions:
    """Turns of all sessions by time, with the tokens of their answers, and who hints."""

    trace: Trace
    answers: Sequence[int]
    paused: Collection[int]
    pauses: Mapping[int, float]
    """Turn before a pause -> recorded seconds of it."""

    @property
    def tokens(self) -> int:
        """Tokens of all sessions at their longest."""
        longest: dict[int, int] = {}
        for turn, answer in zip(self.trace.turns, self.answers, strict=True):
            longest[turn.session] = max(longest.get(turn.session, 0), len(turn.names) + answer)
        return sum(longest.values())


def sessions_of(data: Path, sessions: int, requests: int, seconds: float, apart: float) -> Sessions:
    """The first `requests` requests of so many recorded sessions that take at most `seconds`, scaled, each begun
    `apart` seconds after the one before."""
    chosen: list[tuple[Turn, int]] = []
    begun = 0
    for recorded in coding_sessions(data):
        asked = recorded[:requests]
        times = [one["t"] for one in asked]
        pauses = [after - before for before, after in pairwise(times)]
        fits = max(one["in"] + one["out"] for one in asked) < (MODEL_TOKENS - ENGINE_BLOCK) * SCALE
        is_alone = not any(one["depth"] for one in asked)
        waits = any(LEAST_SECONDS <= pause < MOST_SECONDS - MARGIN_SECONDS for pause in pauses)
        if len(asked) == requests and fits and is_alone and waits and times[-1] < seconds * SCALE:
            chosen += _turns(asked, begun, begun * apart * SCALE)
            begun += 1
        if begun == sessions:
            break
    if begun < sessions:
        raise SystemExit(f"--sessions: the trace has {begun} of {requests} requests in {seconds:g} s, not {sessions}")
    chosen.sort(key=lambda pair: pair[0].at)
    last: dict[int, int] = {}
    turns: list[Turn] = []
    for number, (turn, _) in enumerate(chosen):
        turns.append(replace(turn, before=last.get(turn.session, -1)))
        last[turn.session] = number
    trace = Trace(turns, ENGINE_BLOCK)
    found = Sessions(trace, [answer for _, answer in chosen], (), {})
    trace.memory = found.tokens // ENGINE_BLOCK // MEMORY_SHARE
    paused, hints = trace.longest_pauses(LEAST_SECONDS)
    return replace(found, paused=paused, pauses={turn: kept - MARGIN_SECONDS for turn, kept in hints.items()})


def _turns(asked: Sequence[Mapping[str, Any]], session: int, begin: float) -> Iterator[tuple[Turn, int]]:
    for one, names in named_prompts(asked):
        turn = Turn(begin + one["t"], 0, session, tuple(names), -1, 0)
        yield turn, max(1, -(-one["out"] // SCALE))


def prompt_of(turn: Turn) -> list[int]:
    """A token for each name; sessions share nothing but by chance."""
    shift = 7919 * (turn.session + 1)
    return [FIRST_TOKEN + (name * 2654435761 + shift * (1 + name % 13)) % VOCABULARY for name in turn.names]


def hints_of(turn: Turn, pause: float | None, kinds: Collection[str]) -> dict[str, Any]:
    """What a client adds to a request before a pause of so many recorded seconds."""
    if pause is None or not kinds:
        return {}
    scaled = pause / SCALE
    times = {"retain": scaled + EARLIER_SECONDS, "expect_in": max(0.1, scaled - EARLIER_SECONDS)}
    given = {kind: round(times[kind], 2) for kind in kinds}
    return {"kv_transfer_params": {KEY: {"session": str(turn.session), **given}}}


@dataclass(slots=True)
class Played:
    """Answers of one server in one round, by turn, and where its prompts' tokens came from."""

    answers: dict[int, Answer] = field(default_factory=dict)
    failed: int = 0
    sources: Mapping[str, float] = field(default_factory=dict)
    brought: Sequence[float] = (0.0, 0.0)
    """Blocks that were brought before an expected turn: used and unused ones."""

    def hit(self, turns: Collection[int]) -> float:
        """Percent of these turns' prompt tokens that was not computed."""
        found = [self.answers[turn] for turn in turns if turn in self.answers]
        return 100 * sum(one.cached_tokens for one in found) / max(1, sum(one.prompt_tokens for one in found))


def play(server: Server, sessions: Sessions, kinds: Collection[str]) -> Played:
    """All sessions, each with a client of its own."""
    played, lock = Played(), threading.Lock()
    begin = time.monotonic()

    def client(numbers: Sequence[int]) -> None:
        for number in numbers:
            turn = sessions.trace.turns[number]
            time.sleep(max(0.0, begin + turn.at / SCALE - time.monotonic()))
            fields = hints_of(turn, sessions.pauses.get(number), kinds)
            try:
                answer = server.ask(prompt_of(turn), sessions.answers[number], fields=fields)
            except ServerError:
                with lock:
                    played.failed += 1
                continue
            with lock:
                played.answers[number] = answer

    by_session: dict[int, list[int]] = {}
    for number, turn in enumerate(sessions.trace.turns):
        by_session.setdefault(turn.session, []).append(number)
    before = settled(server)
    with ThreadPoolExecutor(len(by_session)) as clients:
        for done in [clients.submit(client, numbers) for numbers in by_session.values()]:
            done.result()
    after = settled(server)
    played.sources = served(before, after)
    return played


def _settings(run: Run, memory: int, folder: Path) -> EngineSettings:
    disk = f"disk://{folder / 'disk'}?capacity={DISK_SHARE * run.all_bytes}B"
    settings = {
        "memory": f"{memory}B", "tiers": [disk], "hints": "clients", "recompute_if_faster": False,
        "stats_file": str(folder / STATS),
    }  # fmt: skip
    found = run.settings(load_config(settings, {}).kv_transfer_config())
    return replace(found, arguments={**found.arguments, **class_arguments()})


def row(what: str, sessions: Sessions, rounds: Sequence[Played]) -> dict[str, Any]:
    """All rounds of one kind of hint."""
    others = {*range(len(sessions.trace.turns))} - {*sessions.paused}
    first = [one.answers[turn].first_token_ms for one in rounds for turn in sessions.paused if turn in one.answers]
    rest = [one.answers[turn].first_token_ms for one in rounds for turn in others if turn in one.answers]
    found: dict[str, Any] = {
        "what": what, "rounds": len(rounds), "requests": len(rounds) * len(sessions.trace.turns),
        "asking": len(sessions.paused), "failed": sum(one.failed for one in rounds),
        "paused_p50_ms": round(median(first), 1), "paused_p99_ms": round(percentile(first, 99), 1),
        "others_p50_ms": round(median(rest), 1),
    }  # fmt: skip
    found |= spread("paused_hit", [one.hit(sessions.paused) for one in rounds])
    found |= spread("others_hit", [one.hit(others) for one in rounds])
    total = sum(answer.prompt_tokens for one in rounds for answer in one.answers.values())
    for source in ("device", "memory", "disk"):
        found[source] = round(100 * sum(one.sources.get(source, 0.0) for one in rounds) / total, 2)
    used, unused = (sum(counts) for counts in zip(*(one.brought for one in rounds), strict=True))
    brought = used + unused
    return found | {"brought": int(brought), "brought_unused": round(100 * unused / max(1, brought), 2)}


def rows(
    sessions: int = 30,
    requests: int = 20,
    seconds: float = 100.0,
    apart: float = 3.0,
    rounds: int = 2,
    hints: tuple[str, ...] = tuple(HINTS),
    data: Path = DATA,
) -> Iterator[dict[str, Any]]:
    """A row of each kind of hint; see `sessions_of` for the sessions."""
    require_known("--hints", hints, HINTS)
    require_vllm()
    find_testbeds()
    chosen = sessions_of(data, sessions, requests, seconds, apart)
    if not chosen.paused:
        raise SystemExit("--sessions: a fifth of memory holds no session's prompt: ask for more")
    found: dict[str, list[Played]] = {what: [] for what in hints}
    with tempfile.TemporaryDirectory(prefix="kvpact-hinted-") as place:
        sizes = Sizes(chosen.tokens, MODEL_TOKENS, ENGINE_BLOCK)
        run, block_bytes = run_of(Path(place), sizes, sys.executable)
        for number in range(rounds):
            at = number % len(hints)
            for what in (*hints[at:], *hints[:at]):
                say(f"round {number + 1} of {rounds}: {what}")
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    settings = _settings(run, chosen.trace.memory * block_bytes, Path(folder))
                    room = MODEL_TOKENS // ENGINE_BLOCK * block_bytes
                    with started(settings, room, Path(folder), "--enable-prompt-tokens-details") as server:
                        played = play(server, chosen, HINTS[what])
                        counts = at_rest(server, Path(folder) / STATS)
                        played.brought = [counts.get(series("brought_blocks", use), 0.0) for use in Brought]
                        found[what].append(played)
    for what, of_rounds in found.items():
        yield row(what, chosen, of_rounds)
