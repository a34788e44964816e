"""What is known of another engine's slab, in arrays, is what reading it record by record into a dictionary says."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import HEADER_BYTES, RecordError, RecordHeader, is_empty_header
from kvpact.tiers.disk import foreign_records
from kvpact.tiers.disk.foreign_records import ForeignRecord, ForeignRecords
from kvpact.tiers.disk.superblock import Superblock
from kvpact.tiers.record import FIELDS, RecordMac
from slab_scenes import NAMESPACE, OTHER, SLOT, chain
from slab_tables import chain_keys, headers_of, sealed, write_slab

TRUNK = chain("trunk", 3)
CHAINS = [TRUNK, chain("branch", 4, TRUNK[:2]), chain("alone", 1)]
BLOCKS = {key: (keys[depth - 1] if depth else b"", depth) for keys in CHAINS for depth, key in enumerate(keys)}
"""Key -> the key before it and its place."""
SUPERBLOCK = Superblock(SLOT, 8, NAMESPACE)
FIRST_SLOTS = 4


def same_block(one: ForeignRecord, other: ForeignRecord) -> bool:
    """Whether both describe one write of one block: all but the last use is equal."""
    return one[1:-1] == other[1:-1]


def with_parent(raw: bytes, slot: int) -> tuple[ForeignRecord, BlockKey]:
    """What a sound header says, and the key of the block before it. Raises RecordError."""
    header = SUPERBLOCK.header(slot, raw)
    checksum = int.from_bytes(raw[-8:], "little")
    record = ForeignRecord(header.key, slot, header.digest, header.length, header.written, checksum)
    return record, header.parent


class OneByOne:
    """The meaning: each header that has changed is decoded alone, and entered into a dictionary."""

    def __init__(self) -> None:
        self.records: dict[BlockKey, ForeignRecord] = {}
        self.seen: dict[int, bytes] = {}
        self.parents: dict[int, BlockKey] = {}
        self.refused: dict[int, tuple[ForeignRecord, BlockKey]] = {}

    def resize(self, slots: int) -> None:
        for key, record in list(self.records.items()):
            if record.slot >= slots:
                del self.records[key]
                del self.seen[record.slot]

    def learn(self, table: bytes) -> None:
        changed = {}
        for slot in range(len(table) // HEADER_BYTES):
            raw = table[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]
            if raw[-8:] != self.seen.get(slot, bytes(8)):
                changed[slot] = raw
        for slot, raw in changed.items():
            for key in [key for key, record in self.records.items() if record.slot == slot]:
                del self.records[key]
            if is_empty_header(raw):
                self.refused.pop(slot, None)
                self.seen[slot] = bytes(8)
                continue
            try:
                record, parent = with_parent(raw, slot)
            except RecordError:
                continue
            self.seen[slot] = raw[-8:]
            if slot in self.refused and same_block(record, self.refused[slot][0]) and parent == self.refused[slot][1]:
                continue
            self.refused.pop(slot, None)
            self.records[record.key], self.parents[slot] = record, parent

    def refuse_after(self, keys: Iterable[BlockKey]) -> int:
        doomed = list(keys)
        for key in doomed:
            after = [each for each, record in self.records.items() if self.parents[record.slot] == key]
            doomed += [each for each in after if each not in doomed]
        refused = self.records.keys() & set(doomed)
        for key in refused:
            self.refuse(key)
        return len(refused)

    def refuse(self, key: BlockKey) -> None:
        record = self.records.pop(key)
        self.refused[record.slot] = record, self.parents[record.slot]


slots = st.integers(0, SUPERBLOCK.table_slots - 1)
keys_there = st.sampled_from(sorted(BLOCKS))


class ForeignRecordsMachine(RuleBasedStateMachine):
    """A table that its writer, bad disks and other releases change, read at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.table = bytearray(SUPERBLOCK.table_slots * HEADER_BYTES)
        self.slots = FIRST_SLOTS
        self.cleared: dict[int, bytes] = {}
        self.clock = 1.0
        self.known, self.meaning = ForeignRecords(SUPERBLOCK, FIRST_SLOTS), OneByOne()

    def put(self, slot: int, raw: bytes) -> None:
        self.table[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES] = raw

    def header(self, slot: int) -> bytes:
        return bytes(self.table[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES])

    @rule(
        slot=slots,
        key=keys_there,
        length=st.sampled_from([100, SLOT, SLOT, SLOT + 1]),
        place=st.sampled_from([0, 0, 0, 1]),
        scan=st.booleans(),
    )
    def write(self, slot: int, key: BlockKey, length: int, place: int, scan: bool) -> None:
        """A block is stored, also one that lies elsewhere too; too long, or for another slot, it is unusable."""
        self.clock += 1
        parent, depth = BLOCKS[key]
        self.put(slot, self.made(key, parent, depth, slot + place, length).encode())
        if scan:
            self.scan()

    def made(self, key: BlockKey, parent: BlockKey, depth: int, slot: int, length: int) -> RecordHeader:
        digest = key[:16]  # the same content at each writing
        return RecordHeader(NAMESPACE.digest, key, parent, depth, length, digest, self.clock, self.clock, slot)

    @rule(slot=slots, key=keys_there, before=keys_there)
    def write_elsewhere_in_a_chain(self, slot: int, key: BlockKey, before: BlockKey) -> None:
        """Only a damaged file has such a place, or a circle of blocks."""
        self.put(slot, self.made(key, before, 1, slot, SLOT).encode())

    @rule(slot=slots, key=keys_there, kind=st.sampled_from(["namespace", "seal", "format", "depth"]))
    def write_what_is_not_ours(self, slot: int, key: BlockKey, kind: str) -> None:
        header = self.made(key, *BLOCKS[key], slot, SLOT)
        if kind == "namespace":
            self.put(slot, replace(header, namespace=OTHER.digest).encode())
        elif kind == "seal":
            self.put(slot, header.encode(RecordMac.from_secret(b"sixteen bytes and more")))
        else:
            raw = np.frombuffer(bytearray(header.encode()), FIELDS)
            if kind == "format":
                raw["version"] += 1
            else:
                raw["depth"] = 0 if header.parent else 7  # with a parent none has depth 0; without one any will do
            sealed(raw)
            self.put(slot, raw.tobytes())

    @rule(slot=slots, scan=st.booleans())
    def clear(self, slot: int, scan: bool) -> None:
        self.cleared[slot] = self.header(slot)
        self.put(slot, bytes(HEADER_BYTES))
        if scan:
            self.scan()

    @precondition(lambda self: self.cleared)
    @rule()
    def bring_back(self) -> None:
        """As a power cut does with what was not on the disk yet."""
        slot, raw = self.cleared.popitem()
        self.put(slot, raw)
        self.scan()

    @rule(slot=slots, scan=st.booleans())
    def use(self, slot: int, scan: bool) -> None:
        """The writer notes when a block was last used."""
        self.clock += 1
        try:
            header = SUPERBLOCK.header(slot, self.header(slot))
        except RecordError:
            return
        self.put(slot, replace(header, used=self.clock).encode())
        if scan:
            self.scan()

    @rule(slot=slots, at=st.integers(0, HEADER_BYTES - 1))
    def damage(self, slot: int, at: int) -> None:
        self.table[slot * HEADER_BYTES + at] ^= 0x41

    @rule(count=st.integers(1, SUPERBLOCK.table_slots))
    def resize(self, count: int) -> None:
        self.slots = count

    @rule(cut=slots, torn=st.integers(0, HEADER_BYTES))
    def scan_while_the_writer_goes_on(self, cut: int, torn: int) -> None:
        """The read has a part of one header only, which the next one finds as it is."""
        whole, cut = bytes(self.table), min(cut, self.slots - 1)
        self.put(cut, self.header(cut)[:torn].ljust(HEADER_BYTES, b"\0"))
        self.scan()
        self.table[:] = whole

    @rule()
    def scan(self) -> None:
        self.known.resize(self.slots)
        self.meaning.resize(self.slots)
        self.learn()

    def learn(self) -> None:
        """In pieces of three slots: within one and between two, blocks may change places."""
        for first in range(0, self.slots, 3):
            end = min(first + 3, self.slots)
            self.known.learn(first, bytearray(self.table[first * HEADER_BYTES : end * HEADER_BYTES]))
        self.meaning.learn(bytes(self.table[: self.slots * HEADER_BYTES]))

    @rule(keys=st.lists(keys_there, max_size=3))
    def refuse_after(self, keys: list[BlockKey]) -> None:
        assert self.known.refuse_after(keys) == self.meaning.refuse_after(keys)

    @rule()
    def refuse_all(self) -> None:
        self.known.refuse_all()
        self.meaning.refuse_after(list(self.meaning.records))

    @precondition(lambda self: self.meaning.records)
    @rule(data=st.data())
    def refuse(self, data: Any) -> None:
        """One whose payload was not what its header says; a record that has changed meanwhile is another."""
        record = self.meaning.records[data.draw(st.sampled_from(sorted(self.meaning.records)))]
        self.known.refuse(record._replace(checksum=record.checksum ^ 1))
        assert self.known.find([record.key]) == [record]
        self.known.refuse(record)
        self.meaning.refuse(record.key)

    @invariant()
    def both_know_the_same(self) -> None:
        self.known.check()
        records = self.meaning.records
        assert len(self.known) == len(records)
        assert self.known.find(list(BLOCKS)) == [records.get(key) for key in BLOCKS]
        for keys in CHAINS:
            for start in range(len(keys) + 1):
                there = [key in records for key in keys[start:]]
                assert self.known.run(keys, start) == [*there, False].index(False)
        assert self.known.lookup(list(BLOCKS)).tolist() == [key in records for key in BLOCKS]


TestForeignRecords = ForeignRecordsMachine.TestCase
TestForeignRecords.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("part", [7, 1 << 16])
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=20), doomed=st.lists(st.integers(0, 400), max_size=5))
def test_h36_all_that_comes_after_a_refused_block_is_refused(part: int, lengths: list[int], doomed: list[int]) -> None:
    """Long chains in slots of any order; worked on in parts of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign_records, "PART", part)
        count = sum(lengths)
        superblock = Superblock(SLOT, count, NAMESPACE)
        headers = np.zeros(count, FIELDS)
        order = np.random.default_rng(count).permutation(count)
        meaning, number = dict[int, int](), 0
        for length in lengths:
            headers[order[number : number + length]] = np.frombuffer(
                headers_of(superblock, 0, 0, length, length), FIELDS
            )
            for depth in range(length):
                headers["key"][order[number + depth]] = [1 + number + depth, 2, 3, 4]
                headers["parent"][order[number + depth]] = [number + depth, 2, 3, 4] if depth else [0] * 4
                meaning[number + depth] = number + length - depth
            headers["depth"][order[number : number + length]] = range(length)
            number += length
        headers["slot"] = np.arange(count)
        sealed(headers)
        known = ForeignRecords(superblock, count)
        known.learn(0, bytearray(headers.tobytes()))
        assert len(known) == count
        wanted = {each for each in doomed if each in meaning}
        keys = [np.array([1 + each, 2, 3, 4], np.uint64).tobytes() for each in doomed]
        ends = np.cumsum(lengths)
        gone = {each for first in wanted for each in range(first, int(ends[np.searchsorted(ends, first, "right")]))}
        assert known.refuse_after(keys) == len(gone)
        known.check()
        assert len(known) == count - len(gone)


def test_a_slab_that_grows_keeps_what_is_known() -> None:
    superblock = Superblock(SLOT, 4000, NAMESPACE)
    table = bytearray(headers_of(superblock, 0, 0, 4000, 100))
    known = ForeignRecords(superblock, 10)
    for count in (10, 11, 700, 3999, 4000):
        known.resize(count)
        known.learn(0, table[: count * HEADER_BYTES])
        known.check()
        assert len(known) == count
    assert known.run(chain_keys(0, 3900, 100), 0) == 100
    known.resize(50)
    assert (len(known), known.run(chain_keys(0, 0, 100), 0)) == (50, 50)


def test_lookups_go_on_while_records_change() -> None:
    """They neither wait nor fail, whatever is learned meanwhile, and in the end find what is there."""
    superblock = Superblock(SLOT, 2000, NAMESPACE)
    tables = [bytearray(headers_of(superblock, seed, 0, 2000, 100)) for seed in (0, 1)]
    keys = [chain_keys(seed, 501, 99) for seed in (0, 1)]
    known = ForeignRecords(superblock, 1)
    ended, failed, looked = threading.Event(), list[BaseException](), [0, 0]

    def look() -> None:
        try:
            while not ended.is_set():
                for number, chained in enumerate(keys):
                    looked[number] += 0 <= known.run(chained, 0) <= 99
                    known.lookup(chained)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for turn in range(60):
            known.resize(1 + turn * 33)
            for first in range(0, 1 + turn * 33, 64):
                known.learn(
                    first, tables[turn % 2][first * HEADER_BYTES : min(first + 64, 1 + turn * 33) * HEADER_BYTES]
                )
            if turn % 7 == 0:
                known.refuse_after(keys[turn % 2][50:51])
            if turn % 20 == 19:
                known.refuse_all()
    finally:
        ended.set()
        thread.join(20)
    assert not thread.is_alive()
    assert failed == []
    assert min(looked) > 0
    known.resize(2000)
    known.learn(0, bytearray(headers_of(superblock, 2, 0, 2000, 100)))
    known.check()
    assert [known.run(chain_keys(seed, 501, 99), 0) for seed in (0, 1, 2)] == [0, 0, 99]


def test_memory_of_another_engines_slab_is_at_most_150_bytes_a_block(tmp_path: Path) -> None:
    """What is resident, in a process of its own, because an earlier test leaves memory that can be used again."""
    paths = []
    for blocks in (1_000, 400_000):  # the first one pays for what is loaded once
        folder = tmp_path / str(blocks)
        folder.mkdir()
        paths.append(str(write_slab(folder, NAMESPACE, blocks)[0]))
    code = f"""
import logging, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from slab_scenes import NAMESPACE
from kvpact.own_files import PRIVATE
from kvpact.tiers.accounts import Accounts
from kvpact.tiers.disk.foreign_slab import ForeignSlab
def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
for path in {paths!r}:
    before = resident()
    slab = ForeignSlab.open(Path(path), NAMESPACE.digest, 4096, PRIVATE, Accounts(logging.getLogger(), "disk tier"))
    slab.scan(lambda: False)
    grown = resident() - before
print(len(slab.records), grown)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    blocks, grown = map(int, done.stdout.split())
    assert (blocks, grown <= 150 * blocks) == (400_000, True), f"{grown / blocks:.0f} bytes a block"
