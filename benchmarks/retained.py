"""Hits of clients that ask `retain` before their longest pauses, on real traces, and what a flood takes from them.

Both traces of `data` through production caches, without an engine, at the traces' own times; a prompt is looked up,
loaded, computed, saved and ended at once. `chat`: blocks of 512 tokens, memory for 10 % of all prompts' blocks;
`coding`: blocks of 1,024, 50 sessions at once, memory for a third of their prompts. A client asks before the longest
pauses, of 1 min to 1 h, as many as fit a fifth of memory. `paused_hit`: percent hit of the turns after those.
`lost_back`: percent kept of what least-recently-used lost of those. `others_fall`: points that others lose. `unused`:
percent of retained blocks that the next turn did not use. Flood: another tenant with ten times the load, without shares
of tenants, and with a share of 2 % of memory; its copies of the trace have salts of their own, all of them its.

Over a disk that holds all: least-recently-used, and `expect_in` instead of `retain` by the same clients, without the
last block of a `chat` prompt, which is partly filled. `paused_in_memory`: percent of the turns after those pauses whose
blocks need no read when they come, by their blocks. `brought`: blocks that were read before they came;
`brought_unused`: percent of these that the next turn did not load.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.groups import Request, obey
from benchmarks.host_hits import DATA, UNIT, coding_sessions
from benchmarks.needs import require_known
from kvpact import EngineKV, Namespace, PactCache, RequestIdentity, load_config
from kvpact.hints.schema import KEY, MOST_SECONDS, Brought, parse_hints
from kvpact.identity.groups import one_group
from kvpact.identity.tenants import WHOLE, Tenants
from kvpact.index.retained_chains import SHARE
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.metrics import series
from kvpact.tiers.disk.tier import DiskTier
from kvpact_testkit.tier.stepped_executor import SteppedExecutor

AT_ONCE: Final = 50
COPIES: Final = 11
LEAST_SECONDS: Final = 60.0
MARGIN_SECONDS: Final = 1.0
STEP_SECONDS: Final = 0.25
"""An engine steps so long before a prompt comes, at the latest."""
PAGE: Final = 4096
FLOOD_PARTS: Final = WHOLE // 50
"""Share of the flood's tenant."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a trace's copy, its session's turn before it (-1: none), and the names that both begin with."""

    at: float
    copy: int
    session: int
    names: Sequence[int]
    before: int
    shared: int

    @property
    def salt(self) -> str:
        """Salt of its copy and session, which share no block with others."""
        return f"{self.copy} {self.session}"


def chat_turns(data: Path, copy: int) -> Iterator[Turn]:
    """Mooncake's chat by time; each copy begins at another request. The trace names no conversations: a turn is the
    next of one whose whole blocks it begins with, at least two, if it is the first such turn."""
    lines = [*map(json.loads, (data / "mooncake_conversation.jsonl").read_text().splitlines())]
    first = copy * len(lines) // COPIES
    ends: dict[int, int] = {}
    for number, line in enumerate(lines[first:] + lines[:first]):
        names = line["hash_ids"]
        shared = next((end for end in range(len(names), 1, -1) if names[end - 1] in ends), 0)
        before = ends.pop(names[shared - 1]) if shared else -1
        ends[names[-2]] = number
        at = (line["timestamp"] - lines[first]["timestamp"]) % (lines[-1]["timestamp"] + 1)
        yield Turn(at / 1e3, copy, 0, names, before, shared)


def coding_turns(data: Path, copy: int) -> Iterator[Turn]:
    """Coding sessions by time, `AT_ONCE` of them; each copy begins with another session."""
    sessions = coding_sessions(data)
    first = copy * len(sessions) // COPIES
    ends = [0.0] * AT_ONCE
    asked: list[tuple[float, int, dict[str, Any]]] = []
    for session, requests in enumerate(sessions[first:] + sessions[:first]):
        at = began = heappop(ends)
        for one in requests:
            at = max(at, began + one["t"])  # a sub-agent's prompts stand after what they began beside
            asked.append((at, session, one))
        heappush(ends, at)
    last: dict[int, tuple[int, array[int]]] = {}
    for number, (at, session, one) in enumerate(sorted(asked, key=lambda turn: turn[:2])):
        before, previous = last.get(session, (-1, array("I")))
        names = previous[: one["keep"]]
        names.extend(start + at for start, count in one["runs"] for at in range(count))
        last[session] = number, names
        yield Turn(at, copy, session, names, before, min(one["keep"], len(previous)))


TRACES: Final = {"chat": (chat_turns, 1), "coding": (coding_turns, UNIT)}


@dataclass
class Trace:
    """Turns of a trace, the names in a block, and the blocks of the memory that they are played with."""

    turns: Sequence[Turn]
    unit: int
    memory: int = 0

    def blocks(self, numbers: Iterable[int]) -> int:
        """Blocks of these turns' prompts."""
        return sum(len(self.turns[number].names) // self.unit for number in numbers)

    def play(self, retain: Mapping[int, float], tenants: Tenants | None = None) -> list[int]:
        """Serve all prompts and a token more, some retained for so many seconds; returns the blocks that each hit."""
        now = 0.0
        table = range(1, 2 + max(len(turn.names) for turn in self.turns) // self.unit)
        engine = EngineKV(Namespace({"model": "benchmark"}).digest, one_group(self.unit), tenants=tenants)
        arena = Arena([ArenaSegment.create(self.memory, 4096)])
        cache = PactCache(load_config({"hints": "clients"}, {}), engine, arena=arena, clock=lambda: now)
        found: list[int] = []
        for number, turn in enumerate(self.turns):
            now = turn.at
            request = Request(str(number), [*turn.names, 0], RequestIdentity(salt=turn.salt))
            if (hints := parse_hints({KEY: {"retain": retain[number]}} if number in retain else {})) is not None:
                cache.note_hints(request, hints)
            cache.on_new_request(request)
            match = cache.prepare_external_match(request, 0)
            assert match is not None, "memory answers at once"
            if match.num_tokens:
                cache.commit_external_match(request, match, match.num_tokens, table)
            cache.note_computed(request, len(request.token_ids), lambda: table)
            while cache.pending:
                cache.apply_report(obey(cache.end_step()))
            cache.request_finished(request.request_id)
            found.append(match.num_tokens // self.unit)
        cache.check()
        cache.shutdown()
        return found

    def play_over_disk(self, expect: Mapping[int, float], folder: Path) -> tuple[list[int], list[float]]:
        """Serve all prompts as `play`, over a disk that holds all; after some of them the next turn is expected in so
        many seconds. Returns the blocks of each prompt, where all that it hit was in memory, or 0, and the blocks that
        were brought before a turn: used and unused ones.
        """
        now = 0.0
        table = range(1, 2 + max(len(turn.names) for turn in self.turns) // self.unit)
        namespace = Namespace({"model": "benchmark"})
        room = 8 * PAGE + (2 * PAGE) * self.blocks(range(len(self.turns)))
        disk = SteppedExecutor(DiskTier.open(folder, namespace, PAGE, room), 1 << 30)
        arena = Arena([ArenaSegment.create(self.memory, PAGE)])
        config = load_config({"hints": "clients", "recompute_if_faster": False}, {})
        engine = EngineKV(namespace.digest, one_group(self.unit))
        cache = PactCache(config, engine, arena=arena, tiers=[disk], clock=lambda: now)

        def work() -> bool:
            cache.apply_report(obey(cache.end_step()))
            disk.advance()
            return cache.pending > 0

        sessions: list[int] = []
        at_once: list[int] = []
        for number, turn in enumerate(self.turns):
            now = max(now, turn.at - STEP_SECONDS)
            while work():
                pass
            now = turn.at
            sessions.append(sessions[turn.before] if turn.before >= 0 else number)
            names = turn.names[:-1] if self.unit == 1 else turn.names
            request = Request(str(number), [*names, 0], RequestIdentity(salt=turn.salt))
            wanted = {"expect_in": expect[number]} if number in expect else {}
            if (hints := parse_hints({KEY: {"session": str(sessions[-1]), **wanted}})) is not None:
                cache.note_hints(request, hints)
            cache.on_new_request(request)
            match = cache.prepare_external_match(request, 0)
            at_once.append(match.num_tokens // self.unit if match is not None else 0)
            while match is None:
                work()
                match = cache.prepare_external_match(request, 0)
            if match.num_tokens:
                cache.commit_external_match(request, match, match.num_tokens, table)
            cache.note_computed(request, len(request.token_ids), lambda: table)
            while work():
                pass
            cache.request_finished(request.request_id)
        now += MOST_SECONDS
        work()
        cache.check()
        brought = [cache.observe()[series("brought_blocks", use)] for use in Brought]
        cache.shutdown()
        return at_once, brought

    def hit(self, found: Sequence[int], numbers: Collection[int]) -> float:
        """Percent of these turns' blocks that were hit."""
        return round(100 * sum(found[number] for number in numbers) / max(1, self.blocks(numbers)), 2)

    def longest_pauses(self, least: float = LEAST_SECONDS) -> tuple[set[int], dict[int, float]]:
        """Turns after the longest pauses, of `least` seconds or more; and those before them, which ask `retain`, with
        the seconds of that."""
        times = np.array([turn.at for turn in self.turns])
        taken = np.zeros(len(times), np.int64)
        chosen: dict[int, float] = {}
        pauses = ((turn.at - times[turn.before], number) for number, turn in enumerate(self.turns) if turn.before >= 0)
        for pause, number in sorted(pauses, reverse=True):
            before = self.turns[number].before
            until = int(np.searchsorted(times, times[number] + MARGIN_SECONDS, "right"))
            wanted = taken[before:until] + self.blocks([before])
            if least <= pause < MOST_SECONDS - MARGIN_SECONDS and wanted.max() <= self.memory // SHARE:
                taken[before:until] = wanted
                chosen[before] = float(pause) + MARGIN_SECONDS
        return {number for number, turn in enumerate(self.turns) if turn.before in chosen}, chosen


def pause_rows(name: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """One row for least-recently-used, and one for `retain` before the longest pauses."""
    paused, hints = trace.longest_pauses()
    row = {"trace": name, "memory": trace.memory, "turns": len(trace.turns), "asking": len(paused)}
    others = {*range(len(trace.turns))} - paused
    plain, kept = trace.play({}), trace.play(hints)
    parts = {"all_hit": range(len(plain)), "paused_hit": paused, "others_hit": others}
    yield row | {"load": "LRU"} | {name: trace.hit(plain, of) for name, of in parts.items()}
    shared = np.array([trace.turns[number].shared // trace.unit for number in paused], np.int64)
    before, after = (np.minimum([found[number] for number in paused], shared) for found in (plain, kept))
    lost, back = int((shared - before).sum()), int(np.maximum(after - before, 0).sum())
    fall = trace.hit(plain, others) - trace.hit(kept, others)
    figures = {"lost_blocks": lost, "lost_back": 100 * back / max(1, lost), "others_fall": fall}
    figures["unused"] = 100 - 100 * int(after.sum()) / max(1, trace.blocks(hints))
    missed = [name for name, is_missed in (("lost_back", 2 * back < lost), ("others_fall", fall > 1)) if is_missed]
    row |= {"load": "retain"} | {name: trace.hit(kept, of) for name, of in parts.items()}
    yield row | {name: round(value, 2) for name, value in figures.items()} | {"missed": ", ".join(missed) or "none"}


def expect_rows(name: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """One row for least-recently-used over a disk, and one where the next turn is expected after the longest pauses."""
    paused, hints = trace.longest_pauses()
    row = {"trace": name, "memory": trace.memory, "turns": len(trace.turns), "asking": len(paused)}
    expected = {before: seconds - MARGIN_SECONDS for before, seconds in hints.items()}
    for load, expect in (("LRU over a disk", {}), ("expect_in over a disk", expected)):
        with TemporaryDirectory(prefix="kvpact-retained-") as folder:
            at_once, brought = trace.play_over_disk(expect, Path(folder))
        unused = round(100 * brought[1] / max(1, sum(brought)), 2)
        figures = {"paused_in_memory": trace.hit(at_once, paused), "brought": sum(brought), "brought_unused": unused}
        yield row | {"load": load} | figures | {"missed": "brought_unused" if unused > 10 else "none"}


def flood_rows(name: str, alone: Trace, copies: Iterable[Iterator[Turn]]) -> Iterator[dict[str, Any]]:
    """One row for the others alone, who ask as in `pause_rows`, and three beside a flood: without hints, with hints,
    and with hints and shares."""
    paused, hints = alone.longest_pauses()
    flood = [turn for copy in copies for turn in takewhile(lambda turn: turn.at <= alone.turns[-1].at, copy)]
    both = replace(alone, turns=sorted([*alone.turns, *flood], key=lambda turn: turn.at))
    others = [number for number, turn in enumerate(both.turns) if not turn.copy]
    beside = {others[number]: seconds for number, seconds in hints.items()}
    everything = {number: MOST_SECONDS for number, turn in enumerate(both.turns) if turn.copy}
    shares = Tenants(("flood",), (FLOOD_PARTS,), {turn.salt: 1 for turn in flood})
    plays: tuple[tuple[str, Trace, dict[int, float], Tenants | None], ...] = (
        ("no flood", alone, hints, None),
        ("flood, no shares", both, beside, None),
        ("flood with retain, no shares", both, beside | everything, None),
        ("flood with retain, shares", both, beside | everything, shares),
    )
    row: dict[str, Any] = {"trace": name, "memory": alone.memory, "turns": len(others)}
    for load, trace, retain, of_tenants in plays:
        mine = [hit for hit, turn in zip(trace.play(retain, of_tenants), trace.turns, strict=True) if not turn.copy]
        hit = alone.hit(mine, range(len(mine)))
        fall = round(row.setdefault("all_hit", hit) - hit, 2)
        yield row | {"load": load, "all_hit": hit, "paused_hit": alone.hit(mine, paused), "others_fall": fall}


def rows(
    traces: tuple[str, ...] = tuple(TRACES),
    requests: int = 60_000,
    flood_requests: int = 1_500,
    disk_requests: int = 6_000,
    data: Path = DATA,
) -> Iterator[dict[str, Any]]:
    """Rows of the pauses in so many requests, of a flood beside so many, and over a disk of so many; 0: of none."""
    require_known("--traces", traces, TRACES)
    for name in traces:
        read, unit = TRACES[name]
        trace = Trace([*islice(read(data, 0), requests)], unit)
        if name == "coding":
            trace.memory = AT_ONCE * trace.blocks(range(len(trace.turns))) // len(trace.turns) // 3
        else:
            trace.memory = len({block for turn in trace.turns for block in turn.names}) // 10
        yield from pause_rows(name, trace)
        if disk_requests:
            yield from expect_rows(name, replace(trace, turns=trace.turns[:disk_requests]))
        if flood_requests:
            alone = replace(trace, turns=trace.turns[:flood_requests])
            yield from flood_rows(name, alone, [read(data, copy) for copy in range(1, COPIES)])
