"""One server's part of a comparison: each of its lives, the requests in them, and what was seen.

Asks and counts; judges nothing. What a visit has seen when its server fails stays in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median

from kvpact.errors import KvpactError
from kvpact_testkit.compare.load import Load, Request, drawn
from kvpact_testkit.compare.server import Answer, Server, ServerError
from kvpact_testkit.compare.stores import disk_bytes, flip_in_blocks
from kvpact_testkit.compare.subjects import NONE, Launch, Room, Subject
from kvpact_testkit.demo.phases import drop_page_cache

DECODING = 2
"""Clients that decode when the prompts of the load come."""

DECODED_TOKENS = 256
"""Tokens that such a client asks for at a time."""

QUIET_SECONDS = 2.0
WRITTEN_SECONDS = 60.0
"""A store that has not grown for the first is written; the second is the longest wait for that."""


class Step(StrEnum):
    """Steps of a visit, in order."""

    START = "starting"
    NEW = "new prompts, alone"
    LOAD = "load"
    LOAD_AGAIN = "load, once more"
    AGAIN = "the same prompts again, alone"
    START_AGAIN = "starting again"
    RESTARTED = "the same prompts after a restart"
    START_DAMAGED = "starting over flipped bits"
    DAMAGED = "the same prompts from damaged blocks"


LOOKS = 20
LOOK_SECONDS = 0.3
"""Looks at a metrics page until it has come to rest, at most, and seconds between them."""

SOURCES = "vllm:prompt_tokens_cached_by_source_total"
KVPACT_SOURCES = "vllm:kvpact_used_tokens_from_total"


@dataclass(slots=True)
class Visit:
    """Answers and counts of one subject in one round; lists are in the order of the load's prompts and requests.

    `before` and `after` are the load's prompts, asked alone; `local`: again at once, from the engine's own cache.
    `second` is the load once more. `gaps` are seconds between tokens of decoding clients while the load ran. `sources`:
    tokens of the load's prompts by where they came from. `damaged` follows `flips` flipped bits, one in each block.
    """

    start_s: float = 0.0
    empty_ms: float = 0.0
    before: list[Answer] = field(default_factory=list)
    load: list[Answer] = field(default_factory=list)
    load_s: float = 0.0
    second: list[Answer] = field(default_factory=list)
    after: list[Answer] = field(default_factory=list)
    local: list[Answer] = field(default_factory=list)
    restarted: list[Answer] = field(default_factory=list)
    damaged: list[Answer] = field(default_factory=list)
    flips: int = 0
    no_time: bool = False
    """Damage was left out, because it would have ended too late."""
    gaps: list[float] = field(default_factory=list)
    sources: dict[str, float] = field(default_factory=dict)
    disk: int | None = None
    """Most bytes that the store was seen to take."""
    bound: int | None = None
    failure: str = ""


class Visitor:
    """Visits subjects. `say` is called with what happens next; every server has ended when a visit has.

    Flipped bits are left out where they would end after `until`, by the monotonic clock.
    """

    def __init__(
        self, environment: Mapping[str, str], logs: Path, say: Callable[[Subject, Step], None], until: float = inf
    ) -> None:
        self._environment = environment
        self._logs = logs
        self._say = say
        self._until = until

    def visit(self, subject: Subject, room: Room, seen: Visit, load_for: Callable[[Server], Load]) -> None:
        """All lives of one subject; `load_for` chooses the requests when its server has started.

        What fails is `seen.failure`.
        """
        try:
            with ExitStack() as stack:
                launch = subject.configure(room, stack)
                seen.bound = launch.bound
                again = outlives(launch)
                with self._started(subject, launch, Step.START, seen, in_order=again) as server:
                    load = load_for(server)
                    self._first_life(subject, server, launch, seen, load)
                damaged = launch.store is not None and load.damages
                if again:
                    with self._started(subject, launch, Step.START_AGAIN, seen, in_order=damaged) as server:
                        self._say(subject, Step.RESTARTED)
                        alone(server, load, seen.restarted)
                computed_s = sum(answer.seconds[-1] for answer in seen.before)
                seen.no_time = damaged and time.monotonic() + seen.start_s + computed_s > self._until
                if launch.store is not None and damaged and not seen.no_time:
                    seen.flips = flip_in_blocks(launch.store)
                    with self._started(subject, launch, Step.START_DAMAGED, seen) as server:
                        self._say(subject, Step.DAMAGED)
                        alone(server, load, seen.damaged)
        except (KvpactError, OSError) as error:
            seen.failure = " ".join(str(error).split())

    @contextmanager
    def _started(
        self, subject: Subject, launch: Launch, step: Step, seen: Visit, *, in_order: bool = False
    ) -> Iterator[Server]:
        """A server that answers; before it, what its store has in the page cache is dropped.

        One that ends `in_order` has its time to write; others are killed, because vLLM takes ten seconds to end.
        """
        if launch.store is not None and launch.store.exists():
            drop_page_cache(launch.store)
        self._say(subject, step)
        began = time.monotonic()
        log = self._logs / f"{subject.key}-{step.name.lower()}.log"
        with Server(launch.command, log, {**self._environment, **launch.environment}) as server:
            server.wait_ready()
            seen.start_s = seen.start_s or time.monotonic() - began
            for length in (300, 300, 20):
                server.ask(drawn("to warm up", length), 2)
            yield server
            if launch.store is not None and in_order:
                wait_written(launch.store)
            note_disk(launch, seen)
            if in_order:
                server.stop()

    def _first_life(self, subject: Subject, server: Server, launch: Launch, seen: Visit, load: Load) -> None:
        self._say(subject, Step.NEW)
        alone(server, load, seen.before)
        self._say(subject, Step.LOAD)
        before = settled(server)
        seen.load_s = crowd(server, load.requests, seen.load, seen.gaps)
        seen.sources = served(before, settled(server))
        note_disk(launch, seen)
        if subject is NONE:
            self._say(subject, Step.LOAD_AGAIN)
            crowd(server, load.requests, seen.second, [])
        self._say(subject, Step.AGAIN)
        alone(server, load, seen.after, None if subject is NONE else seen.local)
        note_disk(launch, seen)
        seen.empty_ms = median(server.ask(drawn(f"short {number}", 2), 1).first_token_ms for number in range(5))


def outlives(launch: Launch) -> bool:
    """True if anything is left of the cache when its server has ended."""
    return launch.store is not None or launch.outlives


def alone(server: Server, load: Load, answers: list[Answer], again: list[Answer] | None = None) -> None:
    """Ask each prompt, one after the other; with `again`, each once more at once."""
    for prompt in load.alone:
        answers.append(server.ask(prompt, load.answer_tokens))
        if again is not None:
            again.append(server.ask(prompt, load.answer_tokens))


def crowd(server: Server, requests: Sequence[Request], answers: list[Answer], gaps: list[float]) -> float:
    """All clients at once, beside some that decode; seconds from the first request to the last answer."""
    found: dict[int, Answer] = {}
    failures: list[ServerError] = []
    over = threading.Event()

    def client(number: int) -> None:
        with reporting(failures, over):
            for at, request in enumerate(requests):
                if request.client == number and not over.is_set():
                    found[at] = server.ask(request.prompt, request.max_tokens)

    decoders = [Decoder(server, number, over, failures) for number in range(DECODING)]
    for decoder in decoders:
        decoder.begin()
    clients = [
        threading.Thread(target=client, args=(number,), daemon=True)
        for number in sorted({request.client for request in requests})
    ]
    began = time.monotonic()
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    ended = time.monotonic()
    over.set()
    for decoder in decoders:
        decoder.end()
        gaps += decoder.gaps(began, ended)
    answers += [found[at] for at in sorted(found)]
    if failures:
        raise failures[0]
    return ended - began


def note_disk(launch: Launch, seen: Visit) -> None:
    """Note what the store takes."""
    if launch.store is not None:
        seen.disk = max(seen.disk or 0, disk_bytes(launch.store))


@contextmanager
def reporting(failures: list[ServerError], over: threading.Event) -> Iterator[None]:
    """Note a failure, after which all clients end."""
    try:
        yield
    except ServerError as error:
        failures.append(error)
        over.set()


class Decoder:
    """A client that decodes one long answer after the other until `over` is set."""

    def __init__(self, server: Server, number: int, over: threading.Event, failures: list[ServerError]) -> None:
        self._server = server
        self._number = number
        self._over = over
        self._failures = failures
        self._decoding = threading.Event()
        self._answers: list[list[float]] = []
        self._thread = threading.Thread(target=self._decode, daemon=True)

    def begin(self) -> None:
        """Ask, and wait for the first tokens."""
        self._thread.start()
        while self._thread.is_alive() and not self._decoding.wait(0.1):
            continue

    def end(self) -> None:
        """Wait until the client has hung up."""
        self._thread.join()

    def gaps(self, began: float, ended: float) -> list[float]:
        """Seconds between two tokens of one answer, of gaps that end between these times."""
        pairs = [(one, other) for times in self._answers for one, other in pairwise(times)]
        return [other - one for one, other in pairs if began < other <= ended]

    def _decode(self) -> None:
        with reporting(self._failures, self._over):
            while not self._over.is_set():
                self._answers.append([])
                self._server.ask(drawn(f"decoding {self._number}", 16), DECODED_TOKENS, on_token=self._note)

    def _note(self, now: float) -> bool:
        self._answers[-1].append(now)
        if len(self._answers[-1]) > 1:
            self._decoding.set()
        return not self._over.is_set()


def served(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Prompt tokens that were not computed between two looks at a metrics page, by where they came from.

    kvpact's own names of tiers stand in the place of vLLM's word for all of them.
    """
    grown = {name: after[name] - before.get(name, 0.0) for name in after}

    def of(metric: str) -> dict[str, float]:
        labels = {name: name[len(metric) + 1 : -1] for name in grown if name.startswith(f"{metric}{{")}
        return {label: grown[name] for name, label in labels.items() if grown[name] > 0}

    ours = of(KVPACT_SOURCES)
    return {**{name: tokens for name, tokens in of(SOURCES).items() if name == "device" or not ours}, **ours}


def settled(server: Server) -> dict[str, float]:
    """The metrics page once it counts all tokens that were served: it changes with the engine's steps, and late."""
    counts: dict[str, float] = {}
    for _ in range(LOOKS):
        before = counts
        server.ask(drawn("to count", 2), 1)
        time.sleep(LOOK_SECONDS)
        page = server.metrics()
        counts = {name: page[name] for name in page if name.startswith((SOURCES, KVPACT_SOURCES))}
        if counts == before:
            break
    return page


def wait_written(store: Path) -> None:
    """Wait until a store has not grown for `QUIET_SECONDS`."""
    until = time.monotonic() + WRITTEN_SECONDS
    size, since = -1, time.monotonic()
    while time.monotonic() < min(until, since + QUIET_SECONDS):
        if (now := disk_bytes(store)) != size:
            size, since = now, time.monotonic()
        with suppress(InterruptedError):
            time.sleep(0.2)
