"""What an engine with wrong copies wrote is given to nobody: by files beside slabs, by records of a shared store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dictionary_tier import DictionaryTier
from kvpact.errors import TierError
from kvpact.identity.keys import Namespace
from kvpact.own_files import PRIVATE
from kvpact.tiers import deletions
from kvpact.tiers.base import RecordHeader, chained, leading
from kvpact.tiers.client import LentSlots, TierClient
from kvpact.tiers.disk import tier as disk_tier
from kvpact.tiers.disk.inspection import verify_slab
from kvpact.tiers.disk.superblock import refute_in
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.executor import TierExecutor
from kvpact.tiers.record import RecordMac
from kvpact.tiers.shared import refuted
from kvpact.tiers.shared.store import StoreError
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.sample_blocks import BRANCH, DOCUMENT, empty_buffers, filled_buffers
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from slab_scenes import SLOT, chain, open_tier, served, store

KEYS, MORE = chain("document", 8), chain("other", 4)


@pytest.fixture
def open_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], DiskTier]:
    """Opens engines' tiers on one directory; they look at each other when told to."""
    monkeypatch.setattr(disk_tier, "start_background", lambda *_: None)
    tiers: list[DiskTier] = []

    def open_one() -> DiskTier:
        tiers.append(open_tier(tmp_path, 40))
        for _ in range(2):
            for tier in tiers:
                tier.tend()
        return tiers[-1]

    return open_one


def run_of(tier: DiskTier | SharedTier) -> bytes:
    (run,) = {header.run for header in tier.scan()}
    return run


def test_a_slab_keeps_what_other_runs_have_written(open_disk: Callable[[], DiskTier]) -> None:
    before = open_disk()
    store(before, MORE)
    before.close()
    tier = open_disk()
    store(tier, KEYS)
    assert len({header.run for header in tier.scan()}) == 2
    tier.refute_run()
    assert (served(tier, KEYS), served(tier, MORE)) == (0, 4)


def test_a_kill_between_the_mark_and_the_end_of_the_records_gives_nobody_any(
    open_disk: Callable[[], DiskTier], tmp_path: Path
) -> None:
    """The mark is left, as `refute_run` does first, and the engine dies: no running engine reads, nor the next."""
    first, second = open_disk(), open_disk()
    store(first, KEYS)
    second.tend()
    assert served(second, KEYS) == 8
    refute_in(tmp_path / "kvpact", run_of(first), PRIVATE)
    report = verify_slab(first.slab.path)
    assert (report.sound, len(report.damaged)) == (0, 8), "tools say so, too"
    assert "found its copies of KV to be wrong" in report.damaged[0].reason
    second.tend()
    assert (second.leading(KEYS), served(second, KEYS)) == (0, 0)
    path = first.slab.path
    first.close()
    third = open_disk()
    assert third.slab.path == path
    assert (third.leading(KEYS), served(third, KEYS)) == (0, 0)
    assert store(third, KEYS) == 8
    second.tend()
    assert served(second, KEYS) == 8, "what the next run wrote is good"


def shared_tier(records: DictionaryStore, seal: RecordMac | None = None) -> SharedTier:
    return SharedTier(records, Namespace({"test": "refuted"}), SLOT, **({"seal": seal} if seal else {}))


def put(tier: SharedTier, document: Any) -> None:
    assert all(tier.put(chained(document.keys, filled_buffers(document.keys, SLOT))))


def got(tier: SharedTier, document: Any) -> int:
    return leading(tier.get(document.keys, empty_buffers(len(document), SLOT)))


@pytest.mark.parametrize("seal", [None, RecordMac(bytes(32))], ids=["unsealed", "sealed"])
def test_a_running_engine_learns_of_a_mark_and_keeps_the_records_of_others(
    seal: RecordMac | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = DictionaryStore()
    wrong, reader = shared_tier(records, seal), shared_tier(DictionaryStore(records.records), seal)
    put(wrong, DOCUMENT)
    put(reader, BRANCH)
    assert got(reader, DOCUMENT) == len(DOCUMENT)
    wrong.refute_run()
    assert got(wrong, DOCUMENT) == 0
    monkeypatch.setattr(refuted, "BELIEVED_SECONDS", 0.0)
    assert got(reader, DOCUMENT) == 0
    fresh = shared_tier(DictionaryStore(records.records), seal)
    put(fresh, DOCUMENT)
    assert got(reader, DOCUMENT) == len(DOCUMENT)
    assert len({header.run for header in fresh.scan()}) == 2


def test_a_run_is_asked_about_once_in_ten_seconds_and_ones_own_never(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    now = [100.0]
    monkeypatch.setattr("kvpact.tiers.shared.refuted.time.monotonic", lambda: now[0])

    class Counted(DictionaryStore):
        def exists(self, names: Any) -> list[bool]:
            if "/refuted-" in names[0]:
                asked.append(len(names))
            return super().exists(names)

    records = DictionaryStore()
    writers = [shared_tier(DictionaryStore(records.records)) for _ in range(3)]
    for writer, document in zip(writers, (DOCUMENT, BRANCH, DOCUMENT), strict=True):
        put(writer, document)
    reader = shared_tier(Counted(records.records))
    for now[0] in (100.0, 105.0, 109.9):
        assert got(reader, DOCUMENT) == len(DOCUMENT)
    assert asked == [1], "the third has written nothing"
    now[0] = 110.0
    assert (got(reader, BRANCH), asked) == (len(BRANCH), [1, 2]), "its first blocks are the document's"
    own = shared_tier(Counted(records.records))
    own.clear()
    put(own, DOCUMENT)
    assert (got(own, DOCUMENT), asked) == (len(DOCUMENT), [1, 2])


def test_a_store_that_does_not_say_whether_there_is_a_mark_gives_nothing() -> None:
    class Silent(DictionaryStore):
        def exists(self, names: Any) -> list[bool]:
            raise StoreError("it does not answer")

    records = DictionaryStore()
    put(shared_tier(records), DOCUMENT)
    reader = shared_tier(Silent(records.records))
    assert got(reader, DOCUMENT) == 0
    assert not reader.health().ok
    assert got(shared_tier(records), DOCUMENT) == len(DOCUMENT), "and takes nothing away"


def test_a_tier_that_refuses_the_mark_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "REPEAT_SECONDS", 0.0)
    refusals = iter([True, True, False])

    class Refusing(DictionaryStore):
        def write(self, names: Any, records: Any) -> None:
            if "/refuted-" in names[0] and next(refusals):
                raise StoreError("it is full")
            super().write(names, records)

    records = Refusing()
    tier = shared_tier(records)
    put(tier, DOCUMENT)
    client = TierClient(TierExecutor(tier, 1, 1 << 20), LentSlots(8), timeout=5.0, clock=lambda: 0.0)
    client.deletions.refute_run()
    until = time.monotonic() + 10
    while not any("/refuted-" in name for name in [*records.records]):
        assert time.monotonic() < until
        client.check(0.0)
        list(client.poll())
    assert client.close(5.0)
    assert len(client.deletions) == 0
    assert got(shared_tier(DictionaryStore(records.records)), DOCUMENT) == 0


def test_a_tier_whose_records_do_not_say_who_wrote_them_is_emptied() -> None:
    tier = DictionaryTier(Namespace({"test": "refuted"}), SLOT, 20)
    tier.put(chained(DOCUMENT.keys, filled_buffers(DOCUMENT.keys, SLOT)))
    tier.refute_run()
    assert not any(tier.lookup(DOCUMENT.keys))


def test_a_disk_that_cannot_be_written_refuses_and_says_where(
    open_disk: Callable[[], DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk()
    store(tier, KEYS)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvpact.tiers.disk.own_slab.refute_in", full)
    with pytest.raises(TierError, match=r"cannot write in .*kvpact: No space left on device"):
        tier.refute_run()


def test_a_header_names_its_run() -> None:
    header = RecordHeader(bytes(32), KEYS[0], b"", 0, 5, bytes(16), 1.0, 2.0, run=b"r" * 16)
    assert RecordHeader.decode(header.encode(), namespace=None, length=None) == header
