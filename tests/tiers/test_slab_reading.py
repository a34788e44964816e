"""A large slab that is opened: what was read is served while the rest is read, and nothing is lost or overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from kvpact.index.key_table import RowArray
from kvpact.index.restoring import Restoring
from kvpact.tiers.base import HEADER_BYTES, chained
from kvpact.tiers.disk import header_table, own_slab
from kvpact.tiers.disk.header_table import PIECE_SLOTS
from kvpact.tiers.disk.slab import Slab
from kvpact.tiers.disk.superblock import PAGE_BYTES
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.record import valid_in_slab
from slab_scenes import NAMESPACE, filled, opened
from slab_tables import chain_keys, write_slab

BLOCKS = 6 * PIECE_SLOTS
CHAIN = 256
PAGE = 4096


@pytest.fixture
def capacity(tmp_path: Path) -> int:
    """Of a slab of `BLOCKS` blocks, which nobody has opened."""
    return write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)[1]


@pytest.fixture
def tier(tmp_path: Path, capacity: int, monkeypatch: pytest.MonkeyPatch) -> DiskTier:
    """The slab, opened: that reads two pieces; the rest is read when a test says so."""
    monkeypatch.setattr(own_slab, "FIRST_READ_S", 0.0)
    monkeypatch.setattr(own_slab, "FIRST_PIECES", 1)
    monkeypatch.setattr("kvpact.tiers.disk.tier.start_background", lambda name, run: None)
    return open_slab(tmp_path, capacity)


def open_slab(directory: Path, capacity: int) -> DiskTier:
    return opened(DiskTier.open(directory, NAMESPACE, PAGE, capacity))


def is_reading(tier: DiskTier) -> bool:
    """Whether a part of the own slab's header table is still to be read."""
    assert tier.own is not None
    return tier.own.content.reading


def chain_at(block: int) -> list[bytes]:
    return chain_keys(0, block, CHAIN)


def test_h59_what_has_been_read_is_served_and_the_rest_comes_later(tier: DiskTier) -> None:
    assert is_reading(tier)
    assert (tier.capacity().blocks, tier.leading(chain_at(0)), tier.leading(chain_at(BLOCKS - CHAIN))) == (
        2 * PIECE_SLOTS,
        CHAIN,
        0,
    )
    tier.tend()
    assert not is_reading(tier)
    assert (tier.capacity().blocks, tier.leading(chain_at(BLOCKS - CHAIN))) == (BLOCKS, CHAIN)
    assert tier.counts().damaged == 0


def test_h59_nothing_is_stored_over_what_is_still_to_be_read(tier: DiskTier) -> None:
    new = chain_keys(1, 0, 4)
    assert tier.put(chained(new, filled(new, PAGE))) == [False] * 4
    tier.tend()
    assert tier.capacity().blocks == BLOCKS, "nothing was evicted for it either"
    assert tier.put(chained(new, filled(new, PAGE))) == [True] * 4


def test_h36_what_is_deleted_while_the_table_is_read_stays_deleted(
    tier: DiskTier, tmp_path: Path, capacity: int
) -> None:
    late, early = chain_at(BLOCKS - CHAIN), chain_at(0)
    tier.delete([late[100], early[7]])
    assert (tier.leading(early), tier.leading(late)) == (7, 0)
    tier.tend()
    assert (tier.leading(early), tier.leading(late)) == (7, 100)
    tier.check()
    tier.close()
    again = open_slab(tmp_path, capacity)
    again.tend()
    assert (again.leading(early), again.leading(late)) == (7, 100), "on disk as well"


def test_clearing_clears_what_is_still_to_be_read(tier: DiskTier) -> None:
    tier.clear()
    tier.tend()
    assert (tier.capacity().blocks, list(tier.scan())) == (0, [])


def test_a_table_that_cannot_be_read_for_a_while_is_read_on(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Slab, "preadv", staticmethod(fail))
        tier.tend()
    assert is_reading(tier)
    assert "Input/output error" in tier.health().reason
    tier.tend()
    assert (is_reading(tier), tier.capacity().blocks) == (False, BLOCKS)


def test_blocks_are_read_and_used_while_the_table_is_read(tier: DiskTier) -> None:
    """The pins of reads and the use of blocks outlive the end of the table."""
    keys = chain_at(CHAIN)[:4]
    assert tier.get(keys, filled(keys, PAGE)) == [False] * 4, (
        "the payloads of this slab are holes: damaged, and dropped"
    )
    assert tier.leading(keys) == 0
    tier.tend()
    tier.check()
    assert tier.counts().damaged == 1


def test_opening_reads_the_table_in_few_reads_and_skips_holes(
    tmp_path: Path, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations and bytes, not time: one read a piece of written headers, none of the room for more slots."""
    sizes = list[int]()

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(sum(view.nbytes for view in views))
        return os.preadv(descriptor, views, offset)

    judged = list[int]()

    def judging(headers: NDArray[Any], *rest: Any) -> Any:
        judged.append(len(headers))
        return valid_in_slab(headers, *rest)

    monkeypatch.setattr(Slab, "preadv", staticmethod(counted))
    monkeypatch.setattr(header_table, "valid_in_slab", judging)
    tier = open_slab(tmp_path, capacity)
    tier.tend()
    assert tier.capacity().blocks == BLOCKS
    assert len(judged) <= BLOCKS // PIECE_SLOTS + 1
    assert sum(judged) <= BLOCKS + PAGE_BYTES // HEADER_BYTES
    assert len(sizes) <= 2 * (BLOCKS // PIECE_SLOTS + 1)


def test_memory_of_a_slab_that_is_open_is_at_most_150_bytes_a_block(tmp_path: Path) -> None:
    """What is resident, in a process of its own, because an earlier test leaves memory that can be used again.

    So many blocks that the 20 MB that malloc may keep of what a start has freed are few bytes for each.
    """
    folders = []
    for blocks in (1_000, 1_500_000):  # the first one pays for what is loaded once
        folder = tmp_path / str(blocks)
        folder.mkdir()
        folders.append((str(folder), write_slab(folder, NAMESPACE, blocks)[1]))
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from slab_scenes import NAMESPACE
from kvpact.tiers.disk.tier import DiskTier
def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
for directory, capacity in {folders!r}:
    before = resident()
    tier = DiskTier.open(directory, NAMESPACE, 4096, capacity)
    tier.tend()
    grown = resident() - before
print(tier.capacity().blocks, grown)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    blocks, grown = map(int, done.stdout.split())
    assert (blocks, grown <= 150 * blocks) == (1_500_000, True), f"{grown / blocks:.0f} bytes a block"


def test_h58_no_lookup_waits_for_the_reader_of_a_large_table(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    at_its_end, goes_on, end = threading.Event(), threading.Event(), Restoring.end

    def slow(restoring: Restoring, order: RowArray) -> None:
        at_its_end.set()
        assert goes_on.wait(20)
        end(restoring, order)

    monkeypatch.setattr(Restoring, "end", slow)
    reader = threading.Thread(target=tier.tend)
    reader.start()
    assert at_its_end.wait(20)
    assert tier.leading(chain_at(0)) == 0 == sum(tier.lookup(chain_at(0)))
    goes_on.set()
    reader.join()
    assert tier.leading(chain_at(0)) == CHAIN
