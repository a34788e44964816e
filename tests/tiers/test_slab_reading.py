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

from kvpact.index.block_index import BlockIndex
from kvpact.index.key_table import RowArray
from kvpact.tiers.base import HEADER_BYTES, chained
from kvpact.tiers.disk import header_table, own_slab
from kvpact.tiers.disk.header_table import PIECE_SLOTS
from kvpact.tiers.disk.slab import PAGE_BYTES, Slab
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.record import sound_in_slab
from slab_scenes import NAMESPACE, filled
from slab_tables import chain_keys, write_slab

BLOCKS = 6 * PIECE_SLOTS
CHAIN = 256
PAGE = 4096


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads two pieces; the rest is read when a test says so."""
    monkeypatch.setattr(own_slab, "FIRST_READ_S", 0.0)
    monkeypatch.setattr(own_slab, "FIRST_PIECES", 1)
    monkeypatch.setattr("kvpact.tiers.disk.tier.start_background", lambda name, run: None)


def opened(directory: Path, capacity: int) -> DiskTier:
    return DiskTier.open(directory, NAMESPACE, PAGE, capacity)


def is_reading(tier: DiskTier) -> bool:
    """Whether a part of the own slab's header table is still to be read."""
    assert tier.own is not None
    return tier.own.content.reading


def chain_at(block: int) -> list[bytes]:
    return chain_keys(0, block, CHAIN)


@pytest.mark.usefixtures("small_pieces")
def test_h59_what_has_been_read_is_served_and_the_rest_comes_later(tmp_path: Path) -> None:
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    tier = opened(tmp_path, capacity)
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
    tier.close()


@pytest.mark.usefixtures("small_pieces")
def test_h59_nothing_is_stored_over_what_is_still_to_be_read(tmp_path: Path) -> None:
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    tier = opened(tmp_path, capacity)
    new = chain_keys(1, 0, 4)
    assert tier.put(chained(new, filled(new, PAGE))) == [False] * 4
    tier.tend()
    assert tier.capacity().blocks == BLOCKS, "nothing was evicted for it either"
    assert tier.put(chained(new, filled(new, PAGE))) == [True] * 4
    tier.close()


@pytest.mark.usefixtures("small_pieces")
def test_h36_what_is_deleted_while_the_table_is_read_stays_deleted(tmp_path: Path) -> None:
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    tier = opened(tmp_path, capacity)
    late, early = chain_at(BLOCKS - CHAIN), chain_at(0)
    tier.delete([late[100], early[7]])
    assert (tier.leading(early), tier.leading(late)) == (7, 0)
    tier.tend()
    assert (tier.leading(early), tier.leading(late)) == (7, 100)
    tier.check()
    tier.close()
    again = opened(tmp_path, capacity)
    again.tend()
    assert (again.leading(early), again.leading(late)) == (7, 100), "on disk as well"
    again.close()


@pytest.mark.usefixtures("small_pieces")
def test_clearing_clears_what_is_still_to_be_read(tmp_path: Path) -> None:
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    tier = opened(tmp_path, capacity)
    tier.clear()
    tier.tend()
    assert (tier.capacity().blocks, list(tier.scan())) == (0, [])
    tier.check()
    tier.close()


@pytest.mark.usefixtures("small_pieces")
def test_a_table_that_cannot_be_read_for_a_while_is_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    tier = opened(tmp_path, capacity)

    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Slab, "preadv", staticmethod(fail))
        tier.tend()
    assert is_reading(tier)
    assert "Input/output error" in tier.health().reason
    tier.tend()
    assert (is_reading(tier), tier.capacity().blocks) == (False, BLOCKS)
    tier.check()
    tier.close()


@pytest.mark.usefixtures("small_pieces")
def test_blocks_are_read_and_used_while_the_table_is_read(tmp_path: Path) -> None:
    """The pins of reads and the use of blocks outlive the end of the table."""
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    tier = opened(tmp_path, capacity)
    keys = chain_at(CHAIN)[:4]
    assert tier.get(keys, filled(keys, PAGE)) == [False] * 4, (
        "the payloads of this slab are holes: damaged, and dropped"
    )
    assert tier.leading(keys) == 0
    tier.tend()
    tier.check()
    assert tier.counts().damaged == 1
    tier.close()


def test_opening_reads_the_table_in_few_reads_and_skips_holes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations and bytes, not time: one read a piece of written headers, none of the room for more slots."""
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    sizes = list[int]()

    def counted(descriptor: int, views: list[memoryview], offset: int) -> int:
        sizes.append(sum(view.nbytes for view in views))
        return os.preadv(descriptor, views, offset)

    judged = list[int]()

    def judging(headers: NDArray[Any], *rest: Any) -> Any:
        judged.append(len(headers))
        return sound_in_slab(headers, *rest)

    monkeypatch.setattr(Slab, "preadv", staticmethod(counted))
    monkeypatch.setattr(header_table, "sound_in_slab", judging)
    tier = opened(tmp_path, capacity)
    tier.tend()
    assert tier.capacity().blocks == BLOCKS
    assert len(judged) <= BLOCKS // PIECE_SLOTS + 1
    assert sum(judged) <= BLOCKS + PAGE_BYTES // HEADER_BYTES
    assert len(sizes) <= 2 * (BLOCKS // PIECE_SLOTS + 1)
    tier.close()


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


@pytest.mark.usefixtures("small_pieces")
def test_h58_no_lookup_waits_for_the_reader_of_a_large_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, capacity = write_slab(tmp_path, NAMESPACE, BLOCKS, chain_blocks=CHAIN)
    tier = opened(tmp_path, capacity)
    at_its_end, goes_on, end_restore = threading.Event(), threading.Event(), BlockIndex.end_restore

    def slow(index: BlockIndex, order: RowArray) -> None:
        at_its_end.set()
        assert goes_on.wait(20)
        end_restore(index, order)

    monkeypatch.setattr(BlockIndex, "end_restore", slow)
    reader = threading.Thread(target=tier.tend)
    reader.start()
    assert at_its_end.wait(20)
    assert tier.leading(chain_at(0)) == 0 == sum(tier.lookup(chain_at(0)))
    goes_on.set()
    reader.join()
    assert tier.leading(chain_at(0)) == CHAIN
    tier.close()
