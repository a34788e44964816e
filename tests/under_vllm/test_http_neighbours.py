"""Servers with one configuration, as a user starts them: each loads what any of them has computed, at once, from its
memory; and their answers stay right while each is killed and started again."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise, permutations
from pathlib import Path
from typing import Any, TypeAlias

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import openai

from engines import BLOCK, prompt
from kvpact.index.row_locks import MEMFD
from kvpact_command import kvpact, own_sockets
from kvpact_testkit.demo.engine import CORES, one_core_each, session_members
from polling import until
from pool_engines import leases_on
from servers.http_server import Answer, Server, tiny_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

BLOCKS = 3
PROMPTS = [prompt(5_400 + number, BLOCKS) for number in range(32)]
"""96 blocks; the memory of each server has room for 64, and the engine's own cache for 16."""

BLOCK_BY_BLOCK = (f"--max-num-batched-tokens={BLOCK}", "--max-num-seqs=6", "--kv-cache-memory-bytes=16777216")
"""Each block is computed in a step of its own, so that answers are bit-identical while one at a time is asked."""

NEAR = 1e-3
"""Log-probabilities of requests that were computed beside others differ by less; of other prompts, by more."""

Ask: TypeAlias = Callable[[list[int]], Answer]

PAUSE_S = 0.5
"""Between two requests of a client, so that a server that starts has time, too."""


@dataclass
class Fleet:
    """The servers that are there; of the one that is being killed nobody expects an answer."""

    model: Path
    directory: Path
    stack: ExitStack
    alive: list[Server] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    inside: tuple[str, ...] = ()
    """A command that starts each server's."""

    def start(self, servers: int) -> None:
        """Start so many at once, and wait until each has met all others."""
        started = [self._start() for _ in range(servers)]
        others = len(self.alive) + servers - 1
        for server in started:
            server.wait_ready()
            until(lambda: f"pool: {others} neighbour" in server.log.read_text(), every=0.1)  # noqa: B023
        self.alive += started

    def _start(self, *options: str, **environment: str) -> Server:
        log = self.directory / f"server-{next(self.numbers)}.log"
        options = ("--memory=64MiB", *BLOCK_BY_BLOCK, *options)
        environment["KVPACT_RECOMPUTE_IF_FASTER"] = "false"
        return self.stack.enter_context(tiny_server(self.model, log, *options, inside=self.inside, **environment))

    def start_replicas(self) -> Server:
        """Start one server with two data-parallel engines, which have met."""
        cores = {CORES: one_core_each(2)}
        server = self._start("--data-parallel-size=2", **cores).wait_ready()
        until(lambda: server.log.read_text().count("pool: 1 neighbour") == 2, every=0.1)
        return server

    def status(self) -> list[dict[str, Any]]:
        """What `kvpact status --leases` says of each engine."""
        engines: list[dict[str, Any]] = json.loads(kvpact("status", "--leases", "--json").stdout)["engines"]
        return engines

    def from_neighbours(self) -> int:
        """Prompt tokens that were loaded from neighbours, of the engines that live."""
        return sum(engine["tokens_by_source"].get("neighbours", 0) for engine in self.status())

    def is_at_rest(self) -> bool:
        """True if no plan holds blocks, and the kernel has no lock on a row of any of them."""
        files = [
            descriptor.stat().st_ino
            for server in self.alive
            for pid in session_members(server.process.pid)
            for descriptor in Path(f"/proc/{pid}/fd").iterdir()
            if f":{MEMFD} " in os.readlink(descriptor)
        ]
        status = self.status()
        assert len(set(files)) == len(status)
        return not leases_on(set(files)) and not any(engine["leases"] for engine in status)


@pytest.fixture
def fleet(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Starts servers in a folder of their own; whatever is left of them is killed after the test."""
    own_sockets(tmp_path, monkeypatch)
    with ExitStack() as stack:
        yield Fleet(tiny_model, tmp_path, stack)


@dataclass
class Load:
    """Clients that ask prompts of servers at random, until `enough` is set."""

    fleet: Fleet
    expected: Sequence[Answer]
    answered: int = 0
    cached: int = 0
    lost: int = 0
    """Requests of servers that were killed meanwhile."""
    wrong: list[str] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_for(self, answers: int) -> None:
        """Wait for so many more answers."""
        enough = self.answered + answers
        until(lambda: self.answered >= enough, 600, f"{enough} answers, or a client has failed")

    def run(self, client: int) -> None:
        """One client; raises the error of a request that a living server failed."""
        chance = random.Random(client)
        while not self.enough.wait(PAUSE_S):
            server, number = chance.choice(self.fleet.alive), chance.randrange(len(PROMPTS))
            try:
                answer = server.ask(PROMPTS[number])
            except openai.OpenAIError:
                if server in self.fleet.alive:
                    raise
                self.lost += 1
                continue
            with self.lock:
                self.answered += 1
                self.cached += answer.cached_tokens
                if not is_near(answer, self.expected[number]):
                    self.wrong.append(f"{number}: {answer} is not {self.expected[number]}")


def is_near(answer: Answer, other: Answer) -> bool:
    """True for the same tokens, with nearly the same log-probabilities."""
    if (answer.text, answer.finish_reason) != (other.text, other.finish_reason):
        return False
    pairs = zip(answer.logprobs, other.logprobs, strict=True)
    return all(abs(one[token] - two[token]) < NEAR for one, two in pairs for token in one.keys() & two.keys())


def loaded_at_once(tokens: list[int], computing: Ask, *loading: Ask) -> None:
    """Compute a prompt of `BLOCKS` and load it by one engine; then each of the others loads it, and answers alike."""
    assert computing(tokens).cached_tokens == 0
    local = computing(tokens)
    loaded = [ask(tokens) for ask in loading]
    assert [answer.cached_tokens for answer in (local, *loaded)] == [BLOCKS * BLOCK] * (1 + len(loading))
    assert all(answer.same_as(local) for answer in loaded)


@pytest.mark.both_cores
@pytest.mark.parametrize(
    ("servers", "killed", "requests", "clients"),
    [
        pytest.param(2, 1, 60, 4, marks=pytest.mark.proof, id="two"),
        pytest.param(4, 4, 300, 8, marks=pytest.mark.soak, id="four"),
    ],
)
def test_what_one_server_computed_all_load_at_once_and_each_is_killed_under_load(
    servers: int, killed: int, requests: int, clients: int, fleet: Fleet
) -> None:
    """Tokens and log-probabilities are those of a local prefix hit; under load nearly, as prompts are computed beside
    each other."""
    fleet.start(servers)
    for number, server in enumerate(fleet.alive):
        loaded_at_once(prompt(5_300 + number, BLOCKS), server.ask, *(other.ask for other in fleet.alive))
    until(lambda: fleet.from_neighbours() == servers * (servers - 1) * BLOCKS * BLOCK)
    expected = [fleet.alive[number % servers].ask(tokens) for number, tokens in enumerate(PROMPTS)]
    assert [answer.cached_tokens for answer in expected] == [0] * len(PROMPTS), "each is computed"
    assert not any(is_near(one, other) for one, other in pairwise(expected))
    load = Load(fleet, expected)
    began = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(load.run, client) for client in range(clients)]
        try:
            load.wait_for(requests // (killed + 1))
            for _ in range(killed):
                fleet.alive.pop(0).kill()
                print(f"a server is killed after {load.answered} answers")
                fleet.start(1)
                load.wait_for(requests // (killed + 1))
        finally:
            load.enough.set()
    for client in running:
        client.result()
    seconds = time.monotonic() - began
    print(f"{load.answered} answers, {load.cached} tokens cached, {load.lost} lost, in {seconds:.0f} s")
    print(
        {
            server.log.name: engine["tokens_by_source"]
            for server, engine in zip(fleet.alive, fleet.status(), strict=True)
        }
    )
    assert load.wrong == []
    assert load.lost <= killed * clients
    assert fleet.from_neighbours() > 0
    until(fleet.is_at_rest)


@pytest.mark.soak
@pytest.mark.both_cores
def test_of_two_data_parallel_engines_each_loads_what_the_other_computed(fleet: Fleet) -> None:
    """As `kvpact serve MODEL --memory 64MiB --data-parallel-size 2`."""
    server = fleet.start_replicas()
    fleet.alive.append(server)
    engines = [partial(server.ask, engine=number) for number in range(2)]
    for number, (computing, loading) in enumerate(permutations(engines)):
        loaded_at_once(prompt(5_500 + number, BLOCKS), computing, loading)
    until(lambda: fleet.from_neighbours() == 2 * BLOCKS * BLOCK)
    until(fleet.is_at_rest)


@pytest.mark.soak
@pytest.mark.both_cores
def test_servers_in_two_pid_namespaces_load_from_each_other_until_one_is_killed(fleet: Fleet) -> None:
    """As two containers that share the folder of the sockets; each takes itself for process 1 or a few more."""
    fleet.inside = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    fleet.start(2)
    asked = [prompt(5_600 + number, BLOCKS) for number in range(2)]
    for tokens, (computing, loading) in zip(asked, permutations(fleet.alive), strict=True):
        loaded_at_once(tokens, computing.ask, loading.ask)
    until(lambda: fleet.from_neighbours() == 2 * BLOCKS * BLOCK)
    until(fleet.is_at_rest)
    fleet.alive.pop(0).kill()
    answer = fleet.alive[0].ask(asked[0])
    assert answer.cached_tokens == BLOCKS * BLOCK, "what was loaded is its own"
    until(fleet.is_at_rest)
