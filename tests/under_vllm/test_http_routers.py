"""KV events of two servers, read by a router's index that others wrote: its answer is what the engine then loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from benchmarks.routers import BLOCK, ENOUGH_SHARE, Place, Prompt, Sizes, compared, killed, read_prompts
from benchmarks.serving_engines import python_with

from servers.http_server import Server
from servers.router_server import REQUIREMENTS, Indexer, Overlap, Publisher, Tap, settled
from tiny_engine import TOKENIZER_TEXT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

EQUAL = 0.99
"""Least share of prompts of which the index says what is loaded."""


@dataclass
class Engine:
    """One server with its number in the index."""

    number: int
    server: Server
    publisher: Publisher
    tap: Tap

    def records(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """Records of the last requests, which were these, as `kvpact why` shows them."""
        folder = str(self.server.log.parent)
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder, "TMPDIR": folder}
        command = [str(Path(sys.executable).with_name("kvpact")), "why", "--json"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found: list[dict[str, Any]] = json.loads(said.stdout)["requests"][-len(prompts) :]
        assert [record["prompt_tokens"] for record in found] == [len(prompt.tokens) for prompt in prompts]
        return found


@dataclass(frozen=True)
class Compared:
    """One prompt: what the index said that its engine has, and what the engine did not compute."""

    at: int
    engine: Engine
    prompt: Prompt
    said: Overlap
    loaded: int

    @property
    def said_tokens(self) -> int:
        return min(self.said.disk, self.prompt.loadable)

    @property
    def is_equal(self) -> bool:
        return self.said_tokens == self.loaded

    @property
    def is_below_gpu(self) -> bool:
        """True if memory or the disk has more than the GPU, by the index."""
        return self.said.disk > self.said.gpu

    def agrees(self, record: Mapping[str, Any]) -> bool:
        """True if the index has placed in memory and on the disk what the engine found there when it was asked."""
        if (found := record["found"]) is None:
            return self.said.gpu >= self.prompt.loadable
        in_memory, (on_disk,), *_ = found
        memory, disk = (min(blocks * BLOCK, self.prompt.loadable) for blocks in (in_memory, on_disk))
        gpu, cpu, both = (min(tokens, self.prompt.loadable) for tokens in self.said)
        return (cpu, both) == (max(gpu, memory), max(gpu, memory, disk))

    def story(self) -> str:
        """The difference with its events."""
        first, last = sorted((self.said_tokens, self.loaded))
        lines = [f"request {self.at}, engine {self.engine.number}: {self.said}, loaded {self.loaded}"]
        for start in range(first, last, BLOCK):
            block = self.prompt.tokens[start : start + BLOCK]
            lines.append(f"  block {start // BLOCK}: {', '.join(self.engine.tap.of_block(block, BLOCK))}")
        return "\n".join(lines)


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    with Indexer(python_with(REQUIREMENTS), tmp_path / "indexer.log") as indexer:
        yield indexer


@dataclass
class Fleet:
    """Two servers that the index reads, with memory for a third of all blocks and disks for everything."""

    place: Place
    indexer: Indexer
    stack: ExitStack
    engines: list[Engine] = field(default_factory=list)

    def start(self, *numbers: int) -> list[Engine]:
        """Start servers, or those with these numbers again, and wait for them."""
        sizes = self.place.sizes
        engines = []
        for number in numbers:
            publisher = Publisher.at_free_ports()
            disk = ENOUGH_SHARE * sizes.distinct
            server = self.place.engine(f"engine-{number}", publisher, sizes.memory(1 / 3), disk)
            tap = self.stack.enter_context(Tap(publisher))
            engines.append(Engine(number, self.stack.enter_context(server), publisher, tap))
        for engine in engines:
            engine.server.wait_ready()
            self.indexer.register(engine.number, engine.publisher, BLOCK)
            engine.server.ask([1, 2, 3], max_tokens=1)
        return engines

    def ask_in_turn(self, engines: Sequence[Engine], prompts: Sequence[Prompt]) -> list[Compared]:
        """Each prompt asked of one engine, the next of the other; before it the index is asked, while all rest."""
        found = []
        for at, prompt in enumerate(prompts):
            engine = engines[at % len(engines)]
            said = settled(partial(self.indexer.query, engine.number, prompt.tokens))
            loaded = engine.server.ask(prompt.tokens, max_tokens=1).cached_tokens
            found.append(Compared(at, engine, prompt, said, loaded))
        print(*(each.story() for each in found if not each.is_equal), sep="\n")
        return found


def share(found: Sequence[Compared]) -> float:
    """The part of which the index knew what is loaded."""
    return sum(each.is_equal for each in found) / len(found)


@pytest.mark.parametrize(
    ("requests", "below"),
    [pytest.param(100, 40, marks=pytest.mark.proof), pytest.param(300, 150, marks=pytest.mark.soak)],
)
def test_h133_an_index_of_events_says_what_each_engine_loads(
    requests: int, below: int, indexer: Indexer, tmp_path: Path
) -> None:
    """At least `below` times memory or the disk has more than the GPU. A reset of vLLM's blocks and a restart make the
    index say less than there is, until a block is asked for, and never more."""
    prompts = read_prompts(requests)
    last = prompts[-20:]
    with ExitStack() as stack:
        fleet = Fleet(Place.made(tmp_path, Sizes.of(prompts), TOKENIZER_TEXT), indexer, stack)
        engines = fleet.start(1, 2)
        found = fleet.ask_in_turn(engines, prompts)
        below_gpu = [each for each in found if each.is_below_gpu]
        assert len(below_gpu) >= below
        assert min(share(found), share(below_gpu)) >= EQUAL
        for engine in engines:
            asked = [each for each in found if each.engine is engine]
            records = engine.records([each.prompt for each in asked])
            assert sum(map(Compared.agrees, asked, records)) >= EQUAL * len(asked)
        for engine in engines:
            engine.server.post("reset_prefix_cache")
        after_reset = fleet.ask_in_turn(engines, last)
        assert all(each.said_tokens <= each.loaded for each in after_reset)
        assert any(each.said_tokens < each.loaded for each in after_reset)
        assert share(fleet.ask_in_turn(engines, last)) >= EQUAL
        engines[1].server.kill()
        indexer.unregister(2)
        again = fleet.start(2)
        first = fleet.ask_in_turn(again, last)
        assert all(each.said_tokens <= each.loaded for each in first)
        assert first[0].said_tokens == 0 < first[0].loaded
        assert share(fleet.ask_in_turn(again, last)) == 1


@pytest.mark.soak
def test_a_router_that_reads_all_events_hits_more_than_one_that_reads_none_or_vllms_own(tmp_path: Path) -> None:
    prompts = read_prompts(300)
    place = Place.made(tmp_path, Sizes.of(prompts), TOKENIZER_TEXT)
    hits = {what: played.hits() for what, played in compared(place, python_with(REQUIREMENTS), prompts)}
    assert hits["all events"] >= 1.3 * hits["round robin"]
    assert hits["all events"] > hits["GPU's events"]


@pytest.mark.soak
def test_hits_come_back_after_an_engine_behind_a_router_was_killed(tmp_path: Path) -> None:
    prompts = read_prompts(300)
    place = Place.made(tmp_path, Sizes.of(prompts), TOKENIZER_TEXT)
    alive, again = (
        killed(place, python_with(REQUIREMENTS), prompts, is_killed=is_killed) for is_killed in (False, True)
    )
    assert again.hits(225) >= 0.9 * alive.hits(225)
    assert 0 < again.share < 1, "both are asked after the restart"
