"""Hits of engines that share a host: private memories, memories that neighbours load from, and one pool of all.

Both traces of `data` through production indexes, without an engine: each prompt is looked up, its missing blocks are
found in neighbours' tables under their leases, and all its blocks are saved in its own engine's memory, least recently
used first out. "random" and "skewed" routing (78 % of prompts or sessions to one engine; 11 % would be even beside it)
know nothing; "prefix" sends a prompt to the engine that holds most of it, of those that were not asked for a tenth more
blocks than the others on average. `hit_percent` is of all blocks of prompts,
`neighbours_percent` the part of it that neighbours gave, `of_pool` the ratio to one pool of the same size. Blocks have
512 tokens (mooncake) and 1,024 (coding).
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, Final

from benchmarks.needs import require_known
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact.index.claims import Claims
from kvpact.index.column_file import ColumnFile
from kvpact.index.neighbour import Lease, Neighbour
from kvpact.index.row_locks import LockFile
from kvpact.index.slot_space import PlainSlots

DATA: Final = Path(__file__).parents[2] / "shared" / "data"
TRACES: Final = ("mooncake", "coding")
ROUTING: Final = ("random", "skewed", "prefix")
BLOCKS: Final = {"mooncake": (10_000, 30_000), "coding": (8_000, 12_000, 24_000)}
"""Blocks of all engines' memories together."""

UNIT: Final = 16
"""Recorded blocks of 64 tokens in one of a coding session's blocks."""

SKEW: Final = 0.78
MOST_LOAD: Final = 1.1

Prompt = tuple[int, Sequence[BlockKey]]
"""Conversation or session, which a router may know, and the keys of the prompt's blocks."""


def key(parent: BlockKey, content: object) -> BlockKey:
    """Key of a block after another one."""
    return blake2b(parent + repr(content).encode(), digest_size=32).digest()


def chat_prompts(data: Path, requests: int) -> Iterator[Prompt]:
    """The first requests of Mooncake's trace, each for itself: nothing but its blocks says whose it is."""
    with (data / "mooncake_conversation.jsonl").open() as lines:
        for number, line in zip(range(requests), lines, strict=False):
            parent = ROOT
            keys = [parent := key(parent, block) for block in json.loads(line)["hash_ids"]]
            yield number, keys


def coding_sessions(data: Path) -> list[list[dict[str, Any]]]:
    """Requests of each coding session, as they were recorded."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    with gzip.open(data / "coding_sessions_delta.jsonl.gz", "rt") as lines:
        for one in map(json.loads, lines):
            sessions.setdefault(one["trace"], []).append(one)
    return [*sessions.values()]


def named_prompts(asked: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], list[int]]]:
    """Each request of a recorded session, with the names of its prompt's blocks."""
    names: list[int] = []
    for one in asked:
        names = names[: one["keep"]] + [first + at for first, count in one["runs"] for at in range(count)]
        yield one, names


def coding_prompts(data: Path, requests: int, at_once: int) -> Iterator[Prompt]:
    """The first requests of coding sessions, so many sessions at once, by time; where one ends the next begins."""
    waiting = enumerate(coding_sessions(data))
    running = [(0.0, number, 0.0, _session(number, asked)) for number, asked in (next(waiting) for _ in range(at_once))]
    heapify(running)
    for _ in range(requests):
        if not running:
            return
        now, number, began, prompts = heappop(running)
        at, keys = next(prompts, (None, ()))
        if at is None:
            following = next(waiting, None)
            if following is not None:
                heappush(running, (now, following[0], now, _session(*following)))
            continue
        yield number, keys
        heappush(running, (began + at, number, began, prompts))


def _session(number: int, asked: Iterable[dict[str, Any]]) -> Iterator[tuple[float, Sequence[BlockKey]]]:
    keys: list[BlockKey] = []
    for one, names in named_prompts(asked):
        del keys[min(one["keep"], len(names)) // UNIT :]
        for end in range(UNIT * len(keys) + UNIT, len(names) + 1, UNIT):
            keys.append(key(keys[-1] if keys else ROOT, (number, names[end - UNIT : end])))
        yield one["t"], [*keys]


@dataclass
class Engine:
    """An engine's memory of so many blocks, and its view of its neighbours' ones."""

    blocks: int
    neighbours: list[Neighbour] = field(default_factory=list)
    asked: int = 0
    """Blocks of its prompts."""
    own: int = 0
    """Blocks of prompts that its memory had."""
    loaded: int = 0
    """Blocks of prompts that neighbours had."""

    def __post_init__(self) -> None:
        space = PlainSlots(self.blocks)
        self.locks = LockFile()
        self.index = BlockIndex(self.blocks, space=space, columns=ColumnFile(space, Claims(self.locks)))

    def view(self, neighbours: int) -> Neighbour:
        """This engine's table, for one of so many neighbours."""
        assert self.index.columns is not None
        return Neighbour(os.dup(self.index.columns.descriptor), self.locks.opened(), neighbours)

    def serve(self, keys: Sequence[BlockKey]) -> None:
        """Load what memories have of a prompt, and save all of it."""
        found = self.index.held_prefix(keys)
        self.asked += len(keys)
        self.own += found
        leases: list[tuple[Neighbour, Lease]] = []
        for neighbour in self.neighbours:
            lease = neighbour.lease(keys[found:])
            if lease is not None:
                leases.append((neighbour, lease))
                found += len(lease.slots)
                self.loaded += len(lease.slots)
        known = self.index.known_prefix(keys)
        parent = keys[known - 1] if known else ROOT
        room = min(len(keys) - known, self.index.reservable(parent, len(keys) - known))
        reservation = self.index.reserve(keys, known, known + room)
        if reservation is not None:
            self.index.complete(reservation.slots)
        last = self.index.known_prefix(keys)
        if last:
            self.index.touch(keys[last - 1])
        for neighbour, lease in leases:
            neighbour.release(lease)
        self.index.claim_again()


def engines_of(count: int, blocks: int, *, meet: bool) -> list[Engine]:
    """So many engines, with so many blocks together; each is the neighbour of all others if they meet."""
    engines = [Engine(blocks // count) for _ in range(count)]
    for engine in engines if meet else ():
        engine.neighbours = [other.view(count - 1) for other in engines if other is not engine]
    return engines


def choose(engines: Sequence[Engine], routing: str, prompt: Prompt, source: random.Random) -> Engine:
    """The engine that serves a prompt."""
    if routing == "prefix":
        even = sum(engine.asked for engine in engines) / len(engines)
        free = [engine for engine in engines if engine.asked <= MOST_LOAD * even]
        return max(free, key=lambda engine: (engine.index.held_prefix(prompt[1]), -engine.asked))
    if routing == "skewed" and source.random() < SKEW:
        return engines[0]
    return source.choice(engines[1:] if routing == "skewed" else engines)


def play(prompts: Iterable[Prompt], engines: Sequence[Engine], routing: str) -> dict[str, float]:
    """Serve all prompts, one after the other."""
    source = random.Random(54)
    for prompt in prompts:
        choose(engines, routing, prompt, source).serve(prompt[1])
    asked = sum(engine.asked for engine in engines)
    own = sum(engine.own for engine in engines)
    loaded = sum(engine.loaded for engine in engines)
    for engine in engines:
        engine.index.check()
        for neighbour in engine.neighbours:
            if neighbour.leased_rows:
                raise SystemExit(f"{neighbour.leased_rows} rows are leased at rest")
            neighbour.close()
    return {"hit_percent": 100 * (own + loaded) / asked, "neighbours_percent": 100 * loaded / asked}


def rows(
    traces: tuple[str, ...] = TRACES,
    routing: tuple[str, ...] = ROUTING,
    engines: int = 4,
    requests: int = 60_000,
    at_once: int = 50,
    blocks: Sequence[int] = (),
    data: Path = DATA,
) -> Iterator[dict[str, Any]]:
    """One row of each trace, size, way of routing, and kind of memory."""
    require_known("--traces", traces, TRACES)
    require_known("--routing", routing, ROUTING)
    if not data.is_dir():
        raise SystemExit(f"--data: {data} is no folder; it is the one with the two traces")
    for trace in traces:
        coding = trace == "coding"
        prompts = [*(coding_prompts(data, requests, at_once) if coding else chat_prompts(data, requests))]
        for count in blocks or BLOCKS[trace]:
            row: dict[str, Any] = {"trace": trace, "blocks": count, "prompts": len(prompts)}
            pool = play(prompts, engines_of(1, count, meet=False), "random")["hit_percent"]
            yield row | {"memory": "one pool", "routing": "-", "hit_percent": round(pool, 2), "of_pool": 1.0}
            for way in routing:
                for memory in ("private", "neighbours"):
                    found = play(prompts, engines_of(engines, count, meet=memory == "neighbours"), way)
                    yield row | {
                        "memory": memory,
                        "routing": way,
                        **{name: round(value, 2) for name, value in found.items()},
                        "of_pool": round(found["hit_percent"] / pool, 3),
                    }
