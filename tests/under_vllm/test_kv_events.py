"""KV events of kvpact under vLLM's real scheduler: equal to those of vLLM's own pool, and true at every step."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams, envs
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvpact.cache.tier_set import TierContents
from kvpact.events.queue import MEMORY_PLACE, PlaceEvents
from kvpact.identity.groups import one_group
from kvpact.index.announced import Prompt
from kvpact.index.block_index import BlockIndex
from kvpact.index.key_table import Names
from kvpact.metrics import Metrics
from kvpact.vllm.kv_events import KVEvents
from vllm_played_engine import BLOCK, PlayedEngine, flush, make_prompt

OURS = {"medium", "locality", "ownership", "session_id"}
"""Fields in which our events differ from those of vLLM's pool."""

Make = Callable[..., PlayedEngine]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    engines: list[PlayedEngine] = []

    def new(**settings: Any) -> PlayedEngine:
        engines.append(PlayedEngine(tmp_path / f"engine {len(engines)}", **{"has_events": True, **settings}))
        return engines[-1]

    yield new
    for engine in engines:
        engine.close()


class Router:
    """What a router believes: it does not count, needs each block's parent, and forgets all at `AllBlocksCleared`."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[str, str | None], set[Any]] = defaultdict(set)
        self.faults: list[str] = []
        self._taken = 0

    def take(self, engine: PlayedEngine) -> Router:
        for event in engine.published[self._taken :]:
            self._take(event)
        self._taken = len(engine.published)
        return self

    def _take(self, event: Any) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            return
        known = self.blocks[event.medium, event.locality]
        if isinstance(event, BlockRemoved):
            if event.medium != "GPU":
                self.faults += [f"{each} is removed and unknown" for each in event.block_hashes if each not in known]
            known.difference_update(event.block_hashes)
            return
        if event.medium == "GPU":
            known.update(event.block_hashes)
            return
        if event.parent_block_hash is not None and event.parent_block_hash not in known:
            self.faults.append(f"the parent of {event.block_hashes[0]} is unknown")
        for each in event.block_hashes:
            if each in known:
                self.faults.append(f"{each} is stored twice")
            known.add(each)


def index_of(engine: PlayedEngine) -> BlockIndex:
    cache = engine.cache
    return cache.index


def of(engine: PlayedEngine, medium: str) -> list[Any]:
    return [event for event in engine.published if isinstance(event, BlockStored) and event.medium == medium]


def by_block(events: list[BlockStored]) -> dict[Any, dict[str, Any]]:
    """Each block's own part of the events, by hash."""
    found: dict[Any, dict[str, Any]] = {}
    for event in events:
        fields = {name: getattr(event, name) for name in event.__struct_fields__ if name not in OURS}
        parent = event.parent_block_hash
        for at, name in enumerate(event.block_hashes):
            size = event.block_size
            assert event.extra_keys is not None
            found[name] = fields | {
                "block_hashes": name,
                "parent_block_hash": parent,
                "token_ids": [*event.token_ids[at * size : (at + 1) * size]],
                "extra_keys": event.extra_keys[at],
            }
            parent = name
    return found


@pytest.mark.parametrize("as_integers", [True, False])
def test_events_are_those_of_vllms_own_pool_but_for_the_place(
    make: Make, as_integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(as_integers)))
    assert bool(envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES) is as_integers
    engine = make()
    stem = make_prompt(1, 6, tail=0)
    engine.generate(make_prompt(1, 6, tail=5, stem=stem), max_tokens=40)
    engine.generate(make_prompt(2, 9, stem=stem), cache_salt="tenant")
    engine.generate(make_prompt(3, 9, stem=stem))
    own, theirs = by_block(of(engine, "CPU")), by_block(of(engine, "GPU"))
    assert own
    assert own == theirs
    assert isinstance(next(iter(own)), int if as_integers else bytes)
    assert {event.locality for event in of(engine, "CPU")} == {"LOCAL"}
    assert len(of(engine, "CPU")) < len(own)  # runs, not blocks


def test_h133_memory_announces_a_block_once_until_it_is_gone(make: Make) -> None:
    engine = make(memory="256KiB")  # 32 blocks
    router = Router()
    for turn in range(3):
        for seed in range(6):
            engine.generate(make_prompt(seed, 7))
            held = router.take(engine).blocks["CPU", "LOCAL"]
            index = index_of(engine)
            assert len(held) == index.announced_count == index.held_count, (turn, seed)
    assert router.faults == []
    assert any(isinstance(event, BlockRemoved) and event.medium == "CPU" for event in engine.published)
    assert engine.counts["events_sent"] == sum(
        len(event.block_hashes) for event in engine.published if event.medium != "GPU"
    )


def test_without_events_the_connector_has_no_hook_for_them(make: Make) -> None:
    engine = make(has_events=False)
    engine.generate(make_prompt(1, 6))
    assert engine.published == []
    assert "take_events" not in vars(engine.connector)
    assert engine.cache.announcements is None


def test_h133_after_a_reset_of_vllms_cache_alone_blocks_are_announced_again_when_asked_for(make: Make) -> None:
    engine = make()
    router = Router()
    prompt = make_prompt(1, 6)
    engine.generate(prompt)
    before = set(router.take(engine).blocks["CPU", "LOCAL"])
    assert len(before) == 6
    engine.forget()
    engine.generate(make_prompt(2, 3))
    assert len(router.take(engine).blocks["CPU", "LOCAL"]) == 3
    assert index_of(engine).held_count == 9
    engine.generate(prompt)
    assert router.take(engine).blocks["CPU", "LOCAL"] > before
    assert router.faults == []


def test_h133_a_reset_takes_all_back(make: Make) -> None:
    engine = make()
    router = Router()
    engine.generate(make_prompt(1, 6))
    engine.connector.reset_cache()
    assert engine.scheduler.has_requests()  # else nobody takes the events
    engine.run()
    assert router.take(engine).blocks["CPU", "LOCAL"] == set()
    engine.forget()
    engine.generate(make_prompt(1, 6))
    assert router.take(engine).faults == []
    assert len(router.blocks["CPU", "LOCAL"]) == index_of(engine).announced_count == 6


def disk(folder: Path, size: str = "64MiB") -> dict[str, Any]:
    return {"tiers": [f"disk://{folder}?capacity={size}"]}


def announced_on_disk(engine: PlayedEngine) -> int:
    (client,) = engine.cache.tiers.clients
    assert client.announcing is not None
    return client.announcing.announced_count


def test_h133_disk_announces_what_it_was_given_and_what_it_evicts(make: Make, tmp_path: Path) -> None:
    engine = make(memory="512KiB", **disk(tmp_path / "disk", "2MiB"))
    router = Router()
    for seed in range(60):
        engine.generate(make_prompt(seed, 9))
        flush(engine)
        assert router.take(engine).faults == []
        on_disk = router.blocks["STORAGE", "LOCAL"]
        assert len(on_disk) == announced_on_disk(engine) == int(engine.counts['held_blocks{tier="disk"}'])
        assert len(router.blocks["CPU", "LOCAL"]) == index_of(engine).announced_count == index_of(engine).held_count
    removed = sum(
        len(event.block_hashes)
        for event in engine.published
        if isinstance(event, BlockRemoved) and event.medium == "STORAGE"
    )
    assert removed == engine.counts['evicted_blocks{tier="disk"}'] > 100
    assert {event.ownership for event in of(engine, "STORAGE")} == {None}
    own, theirs = by_block(of(engine, "STORAGE")), by_block(of(engine, "GPU"))
    assert own == {name: theirs[name] for name in own}


def test_after_a_restart_what_disk_holds_is_announced_when_it_is_asked_for_first(make: Make, tmp_path: Path) -> None:
    engine = make(**disk(tmp_path / "disk"))
    prompt = make_prompt(1, 9)
    engine.generate(prompt)
    flush(engine)
    engine.close()
    engine = make(**disk(tmp_path / "disk"))
    router = Router()
    engine.generate(make_prompt(2, 3))
    flush(engine)
    assert len(router.take(engine).blocks["STORAGE", "LOCAL"]) == 3
    engine.generate(prompt)
    flush(engine)
    assert len(router.take(engine).blocks["STORAGE", "LOCAL"]) == announced_on_disk(engine) == 12
    assert len(router.blocks["CPU", "LOCAL"]) == 12
    assert router.faults == []


def test_h133_a_reset_and_a_failed_load_take_back_what_disk_holds(make: Make, tmp_path: Path) -> None:
    engine = make(**disk(tmp_path / "disk"))
    router = Router()
    engine.generate(make_prompt(1, 9))
    flush(engine)
    assert len(router.take(engine).blocks["STORAGE", "LOCAL"]) == 9
    keys = map(index_of(engine).key_at, range(4, 9))
    engine.cache.tiers.delete([key for key in keys if key is not None])
    assert announced_on_disk(engine) == 4  # before the tier's thread has done anything
    engine.run()
    assert len(router.take(engine).blocks["STORAGE", "LOCAL"]) == 4
    engine.connector.reset_cache()
    engine.run()
    router.take(engine)
    assert router.blocks["STORAGE", "LOCAL"] == router.blocks["CPU", "LOCAL"] == set()
    assert router.faults == []


def test_a_store_is_announced_as_far_as_this_engine_has_stored_it(make: Make, tmp_path: Path) -> None:
    store = tmp_path / "store"
    settings = {"tiers": [f"dir://{store}?capacity=64MiB"], "share_drawn_epochs": True, "memory": "256KiB"}
    engine = make(**settings)
    router = Router()
    prompt = make_prompt(1, 9)
    engine.generate(prompt)
    flush(engine)
    assert len(router.take(engine).blocks["STORAGE", "REMOTE"]) == 9
    assert {event.ownership for event in of(engine, "STORAGE")} == {"directory"}
    other = make(**settings)
    beside = Router()
    other.generate(prompt)
    other.generate([*prompt[: 9 * 16], *make_prompt(5, 4)])
    flush(other)
    assert len(beside.take(other).blocks["CPU", "LOCAL"]) == 13
    assert len(beside.blocks["STORAGE", "REMOTE"]) == 4  # not what the first engine stored
    for seed in range(2, 8):  # memory forgets the prompt
        engine.generate(make_prompt(seed, 9))
        flush(engine)
    engine.forget()
    for file in store.rglob("*"):
        if file.is_file() and file.stat().st_size > 4096:
            file.unlink()
    engine.generate(make_prompt(11, 2))
    engine.generate(prompt)
    flush(engine)
    assert router.take(engine).faults == []
    (contents,) = engine.cache.tiers.contents.values()
    assert contents.announced is not None
    assert len(router.blocks["STORAGE", "REMOTE"]) == contents.announced.announced_count


def test_h133_a_lost_block_of_a_store_is_taken_back_when_a_read_or_a_question_shows_it() -> None:
    told: list[tuple[str, int]] = []

    class Listener:
        def stored(self, prompt: Prompt, first: int, names: Names) -> int:
            told.append(("stored", len(names)))
            return len(names)

        def gone(self, names: Names) -> None:
            told.append(("gone", len(names)))

    class Numbers:
        def names(self, first: int, end: int) -> Names:
            return np.arange(1 + first, 1 + end, dtype=np.uint64).reshape(-1, 1)

    contents = TierContents(8)
    contents.announce_to(Listener())
    announced = contents.announced
    assert announced is not None
    keys = [bytes([number]) * 32 for number in range(12)]
    announced.announce(keys[:6], 0, Numbers())
    announced.announce(keys[:8], 0, Numbers())
    contents.note_found(keys[:8], 5, 1.0)
    assert told == [("stored", 6), ("stored", 2), ("gone", 3)]
    announced.announce(keys[5:], 5, Numbers())
    assert told[3:] == [("stored", 7), ("gone", 4)]  # the oldest, of 12 where 8 have room
    contents.forget()
    assert told[5:] == [("gone", 8)]
    assert announced.announced_count == 0


def described(**arguments: Any) -> Request:
    sampling = SamplingParams(max_tokens=1)
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request("r", make_prompt(1, 9), sampling, None, block_hasher=hasher, **arguments)


def picture(name: str, at: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(at, length), mm_hash=name)


ADAPTER = LoRARequest("tuned", 3, "/adapters/tuned")
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"cache_salt": "tenant"},
    "adapter": {"lora_request": ADAPTER},
    "adapter and salt": {"lora_request": ADAPTER, "cache_salt": "tenant"},
    "images": {"mm_features": [picture("cat", 20, 30), picture("dog", 60, 40)]},
    "all": {"mm_features": [picture("cat", 3, 90)], "lora_request": ADAPTER, "cache_salt": "tenant"},
}


@pytest.mark.parametrize("has_ended", [False, True])
@pytest.mark.parametrize(("first", "end"), [(0, 9), (0, 1), (1, 4), (5, 9)])
@pytest.mark.parametrize("name", REQUESTS)
def test_each_request_is_described_as_vllms_pool_describes_it(name: str, first: int, end: int, has_ended: bool) -> None:
    init_none_hash(sha256)
    request = described(**REQUESTS[name])
    pool = BlockPool(32, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    manager = SimpleNamespace(block_pool=pool, kv_cache_event_metadata=(("full_attention", None),))
    config: Any = SimpleNamespace(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    identities: Any = SimpleNamespace(media=SimpleNamespace(disputes=0), prompts=None)
    events = KVEvents(config, one_group(BLOCK), identities, Metrics())
    events.bind(manager)
    assert events.queue is not None
    prompt = identities.prompts(request)
    if has_ended:
        prompt.end()
        request.mm_features = []
    PlaceEvents(events.queue, MEMORY_PLACE).stored(prompt, first, prompt.names(first, end))
    (own,) = events.take(SimpleNamespace())
    request = described(**REQUESTS[name])
    blocks = pool.get_new_blocks(9)
    pool.cache_full_blocks(request, blocks, 0, first, BLOCK, 0)
    pool.take_events()
    pool.cache_full_blocks(request, blocks, first, end, BLOCK, 0)
    (theirs,) = pool.take_events()
    same = {field: getattr(theirs, field) for field in theirs.__struct_fields__ if field not in OURS}
    same |= {"kv_cache_spec_kind": "full_attention"}  # which vLLM's manager adds
    assert {field: getattr(own, field) for field in same} == same
    sent = msgspec.msgpack.encode(own)
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(sent, type=BlockStored)) == sent


def test_without_events_a_step_runs_nothing_of_theirs(make: Make) -> None:
    engine = make(has_events=False)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(Path(frame.f_code.co_filename).name)

    sys.setprofile(note)
    try:
        engine.generate(make_prompt(1, 9))
    finally:
        sys.setprofile(None)
    assert "saves.py" in files
    assert files.isdisjoint({"announcements.py", "announced.py", "queue.py", "kv_events.py"} - STDLIB)


STDLIB = {"queue.py"}
"""Python's own module has this name, too."""
