"""A router's index that others wrote, fed by vLLM's real scheduler: hash by hash what memory and disk hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from benchmarks.serving_engines import python_with
from vllm.distributed.kv_events import BlockRemoved, KVEventBatch, ZmqEventPublisher
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvpact.cache.announcements import Announcements
from kvpact.identity.keys import BlockKey
from servers.router_server import REQUIREMENTS, Indexer, Publisher, settled
from vllm_played_engine import BLOCK, PlayedEngine, flush, make_prompt

STEMS = 12
STEM = 3
LENGTH = 7
"""Blocks of what prompts share, and of a prompt."""

PROMPTS = 40
MEMORY = "256KiB"
DISK = "1MiB"
"""Room for 32 blocks, and for some more than 100."""

NOTHING: dict[str, set[Any]] = {"CPU": set(), "STORAGE": set()}
ENGINE = 1
"""Number of the engine in the index."""


class Publishing:
    """Publishes over ZMQ as vLLM does, and counts the blocks that were removed, by medium."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.removed = Counter[str]()
        self._zmq = ZmqEventPublisher(0, f"tcp://*:{publisher.port}", f"tcp://*:{publisher.replay_port}")

    def publish(self, batch: KVEventBatch) -> None:
        """As vLLM's publishers."""
        for event in batch.events:
            if isinstance(event, BlockRemoved):
                self.removed[event.medium] += len(event.block_hashes)
        self._zmq.publish(batch)

    def shutdown(self) -> None:
        """As vLLM's publishers."""
        self._zmq.shutdown()


@dataclass
class Watched:
    """An engine that publishes, and of each prompt the hashes by which vLLM names its blocks and kvpact's keys."""

    engine: PlayedEngine
    publishing: Publishing
    prompts: dict[tuple[int, ...], tuple[list[Any], Sequence[BlockKey]]] = field(default_factory=dict)

    @property
    def announcements(self) -> Announcements:
        found = self.engine.cache.announcements
        assert found is not None
        return found

    def ask(self, prompt: list[int]) -> None:
        """Answer a prompt of full blocks."""
        played = self.engine.add(prompt, 2)
        self.engine.step()
        live = self.announcements.requests.live[played.request.request_id]
        assert live.keys is not None
        hashes = [maybe_convert_block_hash(each) for each in played.request.block_hashes[: len(prompt) // BLOCK]]
        self.prompts[tuple(prompt)] = hashes, live.keys.keys[: len(hashes)]
        self.engine.run()

    def ask_all(self) -> None:
        """Ask all prompts again."""
        for prompt in [*self.prompts]:
            self.ask([*prompt])

    def held(self) -> dict[str, set[Any]]:
        """The hashes of all blocks that memory and the disk may serve, by medium."""
        index = self.announcements.index
        (client,) = self.engine.cache.tiers.clients
        found: dict[str, set[Any]] = {"CPU": set(), "STORAGE": set()}
        for hashes, keys in self.prompts.values():
            found["CPU"].update(hashes[: index.held_prefix(keys)])
            found["STORAGE"].update(each for each, has in zip(hashes, client.tier.lookup(keys), strict=True) if has)
        return found


Start = Callable[[], Watched]


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    with Indexer(python_with(REQUIREMENTS), tmp_path / "indexer.log") as indexer:
        yield indexer


@pytest.fixture
def start(indexer: Indexer, tmp_path: Path) -> Iterator[Start]:
    """Starts the engine, for the index one like a restarted one, on the same disk."""
    with ExitStack() as stack:

        def started() -> Watched:
            publisher = Publisher.at_free_ports()
            tiers = [f"disk://{tmp_path / 'disk'}?capacity={DISK}"]
            engine = PlayedEngine(tmp_path, has_events=True, memory=MEMORY, tiers=tiers)
            stack.callback(engine.close)
            publishing = Publishing(publisher)
            stack.callback(publishing.shutdown)
            engine.scheduler.kv_event_publisher = publishing
            indexer.register(ENGINE, publisher, BLOCK)
            return Watched(engine, publishing)

        yield started


def assert_same(indexer: Indexer, watched: Watched, held: Mapping[str, set[Any]]) -> None:
    """The index has these blocks of memory and the disk, which are all that are announced."""
    flush(watched.engine)
    blocks = settled(lambda: indexer.blocks(ENGINE))
    for medium, hashes in held.items():
        assert blocks[medium] == hashes, medium
    assert sum(len(blocks[medium]) for medium in held) == watched.announcements.count


@pytest.mark.parametrize(
    "evictions", [pytest.param(400, marks=pytest.mark.proof), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_h133_at_rest_the_index_has_the_blocks_of_memory_and_disk_hash_by_hash(
    evictions: int, start: Start, indexer: Indexer
) -> None:
    watched = start()
    source = random.Random(evictions)

    def play(until: int) -> None:
        while watched.publishing.removed["CPU"] < until:
            stem = make_prompt(source.randrange(STEMS), STEM, tail=0)
            watched.ask(make_prompt(source.randrange(PROMPTS), LENGTH, tail=1, stem=stem))

    play(evictions // 2)
    assert_same(indexer, watched, watched.held())
    watched.engine.forget()
    watched.engine.generate([1, 2, 3])  # vLLM sends it in a step
    assert all(watched.held().values())
    assert_same(indexer, watched, NOTHING)  # vLLM has cleared all
    play(evictions)
    assert watched.publishing.removed["STORAGE"] > evictions // 10
    watched.ask_all()
    assert_same(indexer, watched, watched.held())
    prompts = watched.prompts
    watched.engine.close()
    indexer.unregister(ENGINE)
    watched = start()
    watched.ask(make_prompt(0, LENGTH, tail=1))
    assert_same(indexer, watched, watched.held())  # of this prompt alone
    watched.prompts = prompts
    watched.ask_all()
    assert_same(indexer, watched, watched.held())
    watched.engine.connector.reset_cache()
    watched.engine.run()
    assert_same(indexer, watched, NOTHING)
