"""What all shared tiers do alike, shown over the simplest store: `SharedTier` passes the suite that authors of tiers
inherit, and serves nothing that a store, a neighbour or a forger made of a record."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from kvpact.errors import PactViolation, TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.tiers.base import HEADER_BYTES, UNSEALED, RecordHeader, RecordMac, SupportsScan, Tier, chained, leading
from kvpact.tiers.shared.store import RecordBuffer, RecordStore, StoreError, group_name, key_of, record_name
from kvpact.tiers.shared.tier import SharedTier
from kvpact_testkit.faults import Fault, Faults, Operation
from kvpact_testkit.sample_blocks import CANARY, content, document, empty_buffers, filled_buffers
from kvpact_testkit.tier.conformance import Damage, StoreContext, TierConformance
from kvpact_testkit.tier.dictionary_store import DictionaryStore, StoredBytes

SLOT = 4096
NAMESPACE = Namespace({"model": "kvpact-tests", "dtype": "bytes", "block_size": "16"})
OURS = RecordMac.from_secret(b"the key of our engines")
THEIRS = RecordMac.from_secret(b"the key of somebody else")
DOCUMENT = document("document", 8)


class UnlistedStore(DictionaryStore):
    names = RecordStore.names


class UnlistedTier(SharedTier):
    scan = None  # type: ignore[assignment]


def test_a_store_that_cannot_list_its_records_makes_a_tier_without_scan() -> None:
    tier: Tier = UnlistedTier(UnlistedStore(), NAMESPACE, SLOT)
    assert all(tier.put(chained(DOCUMENT.keys, filled_buffers(DOCUMENT.keys, SLOT, 1))))
    assert all(tier.lookup(DOCUMENT.keys))
    assert not isinstance(tier, SupportsScan)
    with pytest.raises(TierError, match="cannot clear: a dictionary cannot list its records"):
        tier.clear()
    tier.close()


class TestSharedTier(TierConformance):
    reopens = True
    bounded = False
    gives_up_after = 0.2
    seal = UNSEALED
    stores: ClassVar[dict[Path, StoredBytes]] = {}
    faults = Faults()

    def open_tier(self, place: StoreContext) -> Tier:
        store = DictionaryStore(self.stores.setdefault(place.directory, {}), self.faults)
        return SharedTier(store, place.namespace, place.slot_bytes, seal=place.seal)

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        self.faults = faults
        yield
        self.stores.clear()

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        records = self.stores[place.directory]
        name = record_name(group_name(place.namespace, self.seal), key)
        others = [other for other in records if key_of(other) and other != name]
        record = records.pop(name)
        if how is not Damage.GONE:
            records[name] = how.of(record, records[others[0]] if others else record)
        return True


class TestSealedSharedTier(TestSharedTier):
    seal = OURS


class Scene:
    """One store, and tiers of any record key over it."""

    def __init__(self) -> None:
        self.store = DictionaryStore()

    def tier(self, seal: RecordMac = UNSEALED, slot_bytes: int = SLOT) -> SharedTier:
        return SharedTier(self.store, NAMESPACE, slot_bytes, seal=seal)

    def name(self, block: int, seal: RecordMac = UNSEALED) -> str:
        return record_name(group_name(NAMESPACE, seal), DOCUMENT.keys[block])

    def forge(self, block: int, group: RecordMac, payload: bytes, seal: RecordMac = UNSEALED) -> None:
        """Plant a record of somebody who may write to the store, knows the format, and has the key of `seal`."""
        parent = DOCUMENT.keys[block - 1] if block else b""
        digest = seal.payload_digest([memoryview(payload)])
        header = RecordHeader(NAMESPACE.digest, DOCUMENT.keys[block], parent, block, len(payload), digest, 1.0, 1.0)
        self.store.write([self.name(block, group)], [[header.encode(seal), payload]])


@pytest.fixture
def scene() -> Scene:
    return Scene()


def put(tier: SharedTier, start: int, end: int) -> int:
    """How many of blocks [start, end) of the document are held after they were given, in a row from the first."""
    keys = DOCUMENT.keys[start:end]
    return leading(tier.put(chained(keys, filled_buffers(keys, SLOT, 2), DOCUMENT.keys[:start])))


def stored(tier: SharedTier, count: int = 8) -> SharedTier:
    assert put(tier, 0, count) == count
    return tier


def served(tier: SharedTier, count: int = 8) -> int:
    """How many blocks are served; each of them is itself."""
    buffers = empty_buffers(count, SLOT, 2)
    arrived = leading(tier.get(DOCUMENT.keys[:count], buffers))
    for key, buffer in zip(DOCUMENT.keys[:arrived], buffers, strict=False):
        assert b"".join(buffer) == content(key, SLOT)
    return arrived


def test_h20_a_hole_that_somebody_else_made_ends_the_prefix(scene: Scene) -> None:
    tier = stored(scene.tier())
    scene.store.remove([scene.name(3), scene.name(5)])
    assert (tier.leading(DOCUMENT.keys), served(tier)) == (3, 3)
    assert put(tier, 4, 8) == 1, "what is held is held, and no block is stored whose parent is not"
    assert scene.name(5) not in scene.store.records
    assert (put(tier, 3, 4), put(tier, 4, 8)) == (1, 4)
    assert (tier.leading(DOCUMENT.keys), served(tier)) == (8, 8)


def test_h22_a_record_of_another_length_is_removed_so_that_the_next_write_mends_it(scene: Scene) -> None:
    tier = stored(scene.tier())
    for wrong in (scene.store.records[scene.name(2)][:-1], scene.store.records[scene.name(2)] + b"x", b""):
        scene.store.records[scene.name(2)] = wrong
        before = tier.counts().damaged
        assert served(tier) == 2
        assert tier.counts().damaged == before + 1
        assert scene.name(2) not in scene.store.records
        assert (put(tier, 2, 3), served(tier)) == (1, 8)


def test_h22_a_block_that_was_never_stored_is_a_miss_and_no_damage(scene: Scene) -> None:
    tier = scene.tier()
    assert (tier.leading(DOCUMENT.keys), served(tier), tier.counts().damaged) == (0, 0, 0)


def test_h26_blocks_behind_a_failed_write_are_not_said_to_be_held(scene: Scene) -> None:
    tier = stored(scene.tier(), 2)
    scene.store.faults.arm(Operation.WRITE, Fault.ERROR, after=2)
    assert put(tier, 2, 8) == 2
    assert tier.counts().dropped_writes == 4
    assert not tier.health().ok
    assert (tier.leading(DOCUMENT.keys), served(tier)) == (4, 4)


def test_h31_a_failed_read_counts_no_block_whatever_its_buffers_hold(scene: Scene) -> None:
    class Fails(DictionaryStore):
        def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
            super().read(names, buffers)
            raise StoreError("the answer did not end")

    stored(scene.tier())
    tier = SharedTier(Fails(scene.store.records), NAMESPACE, SLOT)
    assert served(tier) == 0
    assert tier.counts().failed_reads == 1
    assert "the answer did not end" in tier.health().reason


def test_h31_a_store_that_says_yes_and_delivers_nothing_is_not_believed(scene: Scene) -> None:
    class Lies(DictionaryStore):
        def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
            return [True] * len(names)

    stored(scene.tier())
    assert served(SharedTier(Lies(scene.store.records), NAMESPACE, SLOT)) == 0


class Torn(DictionaryStore):
    """The first read of its second record returns zeros for its payload: it was removed under the read."""

    tears_reads = True
    reads = 0
    then: Callable[[Torn, str], object] = staticmethod(lambda store, name: None)

    def _read(self, name: str, buffer: RecordBuffer) -> bool:
        found = super()._read(name, buffer)
        self.reads += 1
        if self.reads == 2:
            buffer[1][:] = bytes(len(buffer[1]))
            self.then(self, name)
        return found


@pytest.mark.parametrize(
    ("then", "is_served", "damaged"),
    [
        (lambda store, name: None, 8, 0),
        (lambda store, name: store.records.pop(name), 1, 0),
        (lambda store, name: store.records.update({name: store.records[name][:-1] + b"?"}), 1, 1),
    ],
    ids=["and stored again", "and gone", "and damaged for good"],
)
def test_h22_a_record_that_is_removed_under_its_read_is_read_once_more(
    scene: Scene, then: Callable[[Torn, str], object], is_served: int, damaged: int
) -> None:
    """A sound record that somebody has put in its place must be neither called damaged nor removed."""
    stored(scene.tier())
    store = Torn(scene.store.records)
    store.then = then
    tier = SharedTier(store, NAMESPACE, SLOT)
    assert served(tier) == is_served
    assert tier.counts().damaged == damaged
    assert len(store.records) == 8 + 1 - (is_served < 8)


@pytest.mark.parametrize(
    "plant",
    [
        lambda scene, payload: scene.forge(0, OURS, payload),
        lambda scene, payload: scene.forge(0, OURS, payload, seal=THEIRS),
    ],
    ids=["without a key", "with another key"],
)
def test_h80_a_forged_record_is_never_served(scene: Scene, plant: Callable[[Scene, bytes], None]) -> None:
    tier = stored(scene.tier(OURS))
    plant(scene, bytes(SLOT))
    assert served(tier) == 0
    assert tier.counts().damaged == 1
    assert (stored(tier), served(tier)) == (tier, 8)


def test_h80_a_sealed_payload_under_another_header_is_never_served(scene: Scene) -> None:
    """Whoever cannot seal can still copy: of two sealed records, neither's payload is served for the other."""
    tier = stored(scene.tier(OURS))
    first, second = (scene.store.records[scene.name(block, OURS)] for block in (0, 1))
    scene.store.records[scene.name(0, OURS)] = first[:HEADER_BYTES] + second[HEADER_BYTES:]
    assert served(tier) == 0
    scene.store.records[scene.name(0, OURS)] = second
    assert served(tier) == 0


def test_h80_sealed_and_unsealed_engines_see_nothing_of_each_other(scene: Scene) -> None:
    stored(scene.tier(OURS))
    for other in (UNSEALED, THEIRS):
        assert (scene.tier(other).leading(DOCUMENT.keys), served(scene.tier(other))) == (0, 0)
    stored(scene.tier())
    assert scene.tier(THEIRS).leading(DOCUMENT.keys) == 0


@pytest.mark.parametrize(("writer", "reader"), [(UNSEALED, OURS), (OURS, UNSEALED), (OURS, THEIRS)])
def test_h80_a_record_moved_to_the_names_of_another_key_is_never_served(
    scene: Scene, writer: RecordMac, reader: RecordMac
) -> None:
    stored(scene.tier(writer))
    for block in range(8):
        scene.store.records[scene.name(block, reader)] = scene.store.records[scene.name(block, writer)]
    tier = scene.tier(reader)
    assert (served(tier), tier.counts().damaged) == (0, 8)
    assert list(tier.scan()) == []


def test_h80_nothing_is_unpickled(scene: Scene, tmp_path: Path) -> None:
    class Opens:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(tmp_path / "executed"), "w")

    bomb = pickle.dumps(Opens())
    tier = stored(scene.tier())
    scene.store.records[scene.name(0)] = bomb.ljust(HEADER_BYTES + SLOT, b"\0")
    scene.store.records[scene.name(1)] = bomb
    tier.leading(DOCUMENT.keys), served(tier), list(tier.scan()), put(tier, 0, 8)
    assert not (tmp_path / "executed").exists()


def test_h21_a_buffer_larger_than_any_block_is_refused_before_the_store_is_asked(scene: Scene) -> None:
    tier = stored(scene.tier())
    buffers = empty_buffers(1, SLOT + 1)
    with pytest.raises(PactViolation, match=f"has {SLOT + 1} bytes"):
        tier.get(DOCUMENT.keys[:1], buffers)
    assert bytes(buffers[0][0]) == bytes([CANARY]) * (SLOT + 1)


def test_an_engine_with_other_block_sizes_is_served_nothing_and_takes_nothing_away(scene: Scene) -> None:
    tier, other = stored(scene.tier()), scene.tier(slot_bytes=2 * SLOT)
    assert not any(other.get(DOCUMENT.keys, empty_buffers(8, 2 * SLOT)))
    assert not any(tier.get(DOCUMENT.keys, empty_buffers(8, SLOT - 1)))
    assert (other.counts().damaged, tier.counts().damaged) == (0, 0)
    assert (tier.leading(DOCUMENT.keys), served(tier)) == (8, 8)
