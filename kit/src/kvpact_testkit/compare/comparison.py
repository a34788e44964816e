"""A comparison from the first start to the last row: who takes a turn when, over which sizes, and what is seen so far.

Owns the visits. The engine without a cache begins, because it judges the others and its speed chooses the sizes.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from kvpact_testkit.compare.estimate import estimated, prompt_of
from kvpact_testkit.compare.judge import Reference, Row, row
from kvpact_testkit.compare.load import Load, drawn
from kvpact_testkit.compare.server import Server, ServerError
from kvpact_testkit.compare.sizes import Speed
from kvpact_testkit.compare.subjects import NONE, Room, Subject
from kvpact_testkit.compare.visit import DECODED_TOKENS, DECODING, Step, Visit, Visitor

PROBE_TOKENS = 256
"""Tokens of the prompt that is timed."""

AVAILABLE = re.compile(r"Available KV cache memory: ([\d.]+) GiB")
"""Line of vLLM's log with the engine's KV memory."""

ALIGN = 1 << 20


@dataclass(slots=True)
class Comparison:
    """All visits of a run. `choose` makes the load when the first server has started; `on_load` hears of it.

    `room` has the engine's KV memory (0: vLLM's choice) and the memory of a cache (0: a quarter of all keys and values,
    as much as the engine's own where `sized` says so). No bits are flipped where that would end after `until`.
    """

    subjects: Sequence[Subject]
    rounds: int
    room: Room
    sized: bool
    choose: Callable[[Server, Speed], Load]
    on_load: Callable[[Load, Speed, Room], None]
    on_step: Callable[[Subject, Step], None]
    environment: Mapping[str, str]
    logs: Path
    until: float = inf
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    load: Load | None = None
    token_bytes: float = 0.0
    block_tokens: int = 0
    _reference: Reference = field(default_factory=Reference)

    def run(self) -> None:
        """Each subject once a round; one that failed is not asked again. Without the first one there is no load."""
        visitor = Visitor(self.environment, self.logs, self.on_step, self.until)
        others = [subject for subject in self.subjects if subject is not NONE]
        for number in range(self.rounds):
            at = number % len(others) if others else 0
            for subject in (NONE, *others[at:], *others[:at]):
                visits = self.visits.setdefault(subject.key, [])
                if any(seen.failure for seen in visits):
                    continue
                visits.append(Visit())
                self._visit(visitor, subject, visits[-1])
                if self.load is None:
                    return

    @property
    def rows(self) -> list[Row]:
        """Rows so far, in the order of the subjects."""
        self._refer()
        estimates = self.estimates
        return [
            row(
                one.key,
                one.name,
                visits,
                self._reference,
                estimate=estimates.get(one.key),
                block_tokens=self.block_tokens,
                judges=one is NONE,
            )
            for one in self.subjects
            if (visits := self.visits.get(one.key))
        ]

    @property
    def estimates(self) -> dict[str, float]:
        """Share of the load's prompt tokens that kvpact's index alone would serve, one request after the other."""
        if self.load is None or not self.block_tokens:
            return {}
        prompts = [*self.load.alone, *(request.prompt for request in self.load.requests)]
        named = [prompt_of(prompt, self.block_tokens) for prompt in prompts]
        asked = sum(prompt.tokens for prompt in named[len(self.load.alone) :])
        found = {}
        for key, (memory, disk) in {
            "memory": (self.room.all_memory, 0),
            "disk": (self.room.memory, self.room.disk_bound),
        }.items():
            blocks = [int(count / self.token_bytes / self.block_tokens) for count in (memory, disk)]
            guess = estimated(named, *blocks)
            found[key] = (guess.from_memory + guess.from_disk) / asked
        return found

    @property
    def unstable(self) -> int:
        """Prompts that are not judged."""
        return self._reference.unstable

    def _visit(self, visitor: Visitor, subject: Subject, seen: Visit) -> None:
        def load_for(server: Server) -> Load:
            if self.load is None:
                speed = measured(server, seen.start_s)
                self.load = self.choose(server, speed)
                self.room = self._sized_room(server)
                self.on_load(self.load, speed, self.room)
            return self.load

        try:
            visitor.visit(subject, self.room, seen, load_for)
        finally:
            shutil.rmtree(self.room.folder, ignore_errors=True)
            self.room.folder.mkdir(parents=True, exist_ok=True)
        self._refer()

    def _refer(self) -> None:
        """The first visit of the engine without a cache is what all others are compared with."""
        if not self._reference.alone and (visits := self.visits.get(NONE.key)):
            self._reference = Reference.of(visits[0])

    def _sized_room(self, server: Server) -> Room:
        """Room for others: the engine's KV memory for a quarter of all, and for all clients' longest prompts."""
        assert self.load is not None
        token = self.token_bytes = token_bytes(server, self.room.kv_bytes)
        self.block_tokens = int(server.metrics()["block_size"])
        everything = aligned(self.load.distinct_tokens * token)
        clients = len({request.client for request in self.load.requests})
        running = aligned((clients * self.load.longest + (DECODING + 1) * DECODED_TOKENS) * token)
        return replace(
            self.room,
            kv_bytes=max(everything // 4, running) if self.sized else self.room.kv_bytes,
            memory=self.room.memory or max(everything // 4, aligned(self.load.longest * token * 2)),
            all_bytes=everything,
        )


def aligned(count: float) -> int:
    """Bytes, rounded up to whole MiB."""
    return -(-int(count) // ALIGN) * ALIGN


def measured(server: Server, start_s: float) -> Speed:
    """Speeds of a server without a cache: of one prompt that it has not seen."""
    began = time.monotonic()
    answer = server.ask(drawn("how fast", PROBE_TOKENS), 9)
    ended = time.monotonic()
    first = answer.seconds[0]
    return Speed(start_s, PROBE_TOKENS / first, (ended - began - first) / 8)


def token_bytes(server: Server, kv_bytes: int) -> float:
    """Bytes of one token's keys and values: the engine's KV memory over the tokens that it has room for.

    Raises ServerError where the server says neither.
    """
    counts = server.metrics()
    tokens = counts.get("num_gpu_blocks", 0.0) * counts.get("block_size", 0.0)
    if not kv_bytes and (found := AVAILABLE.search(server.log.read_text(errors="replace"))):
        kv_bytes = int(float(found[1]) * (1 << 30))
    if not kv_bytes or not tokens:
        raise ServerError("the server does not say how large its KV memory is: give --kv-memory")
    return kv_bytes / tokens
