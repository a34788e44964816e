"""One rank's way into the shared tiers: its part of each block, in the order of tiers, within the deadline."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

from at_the_end import at_the_end
from kvpact.config import load_config
from kvpact.contract import StoreRead
from kvpact.identity.keys import BlockKeys, Namespace, RequestIdentity
from kvpact.ranges import BlockRange
from kvpact.tiers import awaited
from kvpact.tiers.base import chained
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import OpId
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.wire import SharedTierConfig
from kvpact.worker.step_reader import StepReader, Wanted

NAMESPACE = Namespace({"engine": "test"})
PART = 4096
RANKS = (PART, 2 * PART)
"""Bytes of each rank's part of a block."""
KEYS = list(BlockKeys(NAMESPACE.digest, 16, RequestIdentity()).extend(list(range(1, 161))))
"""Ten blocks of one request."""
ALL = 100
"""Blocks: more than any of these steps wants."""


def part_of(block: int, rank: int) -> bytes:
    return bytes([block + 1, rank + 1]) * (RANKS[rank] // 2)


class Store:
    """Shared directories, each with the first so many of the blocks, and readers of them."""

    def __init__(self, folder: Path, *held: int, deadline: str = "20s") -> None:
        urls = []
        for number in range(len(held)):
            (folder / str(number)).mkdir()
            urls.append(f"dir://{folder}/{number}?capacity=1GiB")
        self.config = load_config({"tiers": urls, "match_at": "step", "step_deadline": deadline}, {})
        for url, blocks in zip(self.config.tiers, held, strict=True):
            tier = open_tier(url, TierContext(NAMESPACE, sum(RANKS)))
            buffers = [[memoryview(part_of(block, rank)) for rank in (0, 1)] for block in range(blocks)]
            assert all(tier.put(chained(KEYS[:blocks], buffers)))
            tier.close()
        # The scheduler's half counts its tiers from 5 here, so that the two numbers cannot be mixed up.
        tiers = tuple((5 + number, number) for number in range(len(held)))
        self.address = SharedTierConfig(NAMESPACE.describe(), 16, RANKS, tiers)

    def reader(self, rank: int) -> tuple[StepReader, dict[int, bytes]]:
        slots: dict[int, bytes] = {}
        reader = StepReader(self.config, rank, lambda slot, part: slots.update({slot: bytes(part)}))
        at_the_end(reader.close, 5.0)
        return reader, slots


def opened_tiers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tiers that readers open from now on, in the order of their numbers."""
    opened: list[Any] = []

    def open_and_note(*arguments: Any, **options: Any) -> Any:
        tier = open_tier(*arguments, **options)
        opened.append(tier)
        opened.sort(key=lambda tier: tier.store.place)
        return tier

    monkeypatch.setattr(awaited, "open_tier", open_and_note)
    return opened


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_keeps_its_own_part_of_blocks_from_the_first_tier_that_has_them(tmp_path: Path, rank: int) -> None:
    store = Store(tmp_path, 2, 5)
    reader, slots = store.reader(rank)
    wanted = [Wanted(7, KEYS[:8], 0, list(range(20, 28))), Wanted(8, KEYS[:4], 3, [40])]
    found, reads = reader.read(store.address, wanted, ALL)
    assert found == {7: 5, 8: 1}
    assert slots == {20 + block: part_of(block, rank) for block in range(5)} | {40: part_of(3, rank)}
    assert sorted(reads, key=repr) == [
        StoreRead(7, 5, BlockRange(0, 2)),
        StoreRead(7, 6, BlockRange(2, 3)),
        StoreRead(8, 6, BlockRange(3, 1)),
    ]


def test_nothing_is_waited_for_beyond_the_deadline_and_nothing_late_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, tiers = Store(tmp_path, 4, deadline="300ms"), opened_tiers(monkeypatch)
    reader, slots = store.reader(0)
    assert reader.read(store.address, [Wanted(1, KEYS[:4], 0, [0, 1, 2, 3])], ALL)[0] == {1: 4}
    slots.clear()
    get, go_on, ended = tiers[0].get, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(20.0)
        found = get(*arguments, **options)
        ended.set()
        return found

    monkeypatch.setattr(tiers[0], "get", slow)
    began = time.monotonic()
    assert reader.read(store.address, [Wanted(2, KEYS[:4], 0, [4, 5, 6, 7])], ALL) == ({2: 0}, ())
    assert time.monotonic() - began >= 0.3
    go_on.set()
    assert ended.wait(20.0)
    assert reader.read(store.address, [Wanted(3, KEYS[:1], 1, [])], ALL) == ({3: 0}, ()), "nothing is wanted"
    assert slots == {}


def test_reading_ends_when_the_step_may_load_no_more_and_no_tier_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request's read does not end: it is given up as soon as the first one's blocks fill the step."""
    store, tiers = Store(tmp_path, 4), opened_tiers(monkeypatch)
    reader, _ = store.reader(0)
    assert reader.read(store.address, [Wanted(0, KEYS[:4], 0, [0, 1, 2, 3])], ALL)[0] == {0: 4}
    get, go_on = tiers[0].get, threading.Event()

    def hang(keys: Any, *arguments: Any, **options: Any) -> Any:
        assert len(keys) == 4 or go_on.wait(20.0)
        return get(keys, *arguments, **options)

    monkeypatch.setattr(tiers[0], "get", hang)
    give_up, late = TierClient.give_up, []

    def note(client: TierClient, op_id: OpId, **options: bool) -> None:
        late.append(options["late"])
        give_up(client, op_id, **options)

    monkeypatch.setattr(TierClient, "give_up", note)
    wanted = [Wanted(1, KEYS[:4], 0, [0, 1, 2, 3]), Wanted(2, KEYS[:3], 0, [4, 5, 6])]
    began = time.monotonic()
    assert reader.read(store.address, wanted, 4)[0] == {1: 4, 2: 0}
    assert time.monotonic() - began < 10.0, "the deadline is 20 s"
    assert late == [False]
    go_on.set()
    assert reader.read(store.address, wanted[1:], ALL)[0] == {2: 3}


def test_a_tier_that_cannot_be_opened_is_left_out(tmp_path: Path) -> None:
    store = Store(tmp_path, 0, 3)
    (tmp_path / "0").rename(tmp_path / "away")
    (tmp_path / "0").write_text("no directory")
    reader, slots = store.reader(0)
    found, reads = reader.read(store.address, [Wanted(1, KEYS[:4], 0, [0, 1, 2, 3])], ALL)
    assert found == {1: 3}
    assert len(slots) == 3
    assert [read.tier for read in reads] == [6]


def test_h61_a_rank_leaves_a_tier_alone_in_which_all_its_threads_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The healthy tier beside it keeps its hits; steps wait for the sick one only until both its threads are stuck."""
    store, tiers = Store(tmp_path, 4, 4, deadline="100ms"), opened_tiers(monkeypatch)
    reader, _ = store.reader(0)
    assert reader.read(store.address, [Wanted(0, KEYS[:4], 0, [0, 1, 2, 3])], ALL)[0] == {0: 4}
    sick, calls, go_on = tiers[0], [], threading.Event()
    get = sick.get

    def hang(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        assert go_on.wait(20.0)
        return get(*arguments, **options)

    monkeypatch.setattr(sick, "get", hang)
    found = [
        reader.read(store.address, [Wanted(step, KEYS[:4], 0, [0, 1, 2, 3])], ALL)[0][step] for step in range(1, 9)
    ]
    assert len(calls) == 2, "each thread is stuck once"
    assert found[:2] == [0, 0]
    assert found[2:] == [4] * 6, "the third step sees it"
    go_on.set()
