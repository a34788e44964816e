"""What ranks say of the adapters that they have loaded, and what the scheduler's process makes of it."""

from __future__ import annotations

import multiprocessing
import struct
import timeit
from collections.abc import Iterator
from typing import Any

import pytest

from kvpact.identity.loaded_adapters import CHECK, NO_STAMP, LoadedAdapters, LoadedAdaptersWriter, max_entries
from kvpact.identity.notices import WORD_END, Notice, NoticeReader, NoticeWriter
from kvpact.memory.arena import ArenaSegment

PIECE = 2 * 4096
ONE, OTHER = b"1" * 16, b"2" * 16


class Ranks:
    """Two ranks' memory."""

    def __init__(self) -> None:
        self.segments = [ArenaSegment.create(3, PIECE) for _ in range(2)]
        self.writers = [LoadedAdaptersWriter(segment.notice) for segment in self.segments]
        self.loaded = LoadedAdapters([segment.notice for segment in self.segments])

    def all_load(self, number: int, stamp: bytes) -> None:
        for writer in self.writers:
            writer.loaded(number, stamp)

    def close(self) -> None:
        self.loaded.close()
        for writer, segment in zip(self.writers, self.segments, strict=True):
            writer.close()
            segment.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def test_an_adapter_is_loaded_once_all_ranks_say_so_of_the_same_files(ranks: Ranks) -> None:
    loaded, (first, second) = ranks.loaded, ranks.writers
    assert not loaded.look()
    assert not loaded.all_have(7, ONE)
    assert loaded.none_has_other(7, ONE)
    first.loaded(7, ONE)
    assert not loaded.all_have(7, ONE), "not before the next look"
    assert loaded.look()
    assert not loaded.look()
    assert not loaded.all_have(7, ONE)
    assert loaded.none_has_other(7, ONE)
    assert not loaded.none_has_other(7, OTHER)
    second.loaded(7, OTHER)
    assert loaded.look()
    assert not loaded.all_have(7, ONE)
    assert not loaded.none_has_other(7, ONE)
    second.loaded(7, ONE)
    assert loaded.look()
    assert loaded.all_have(7, ONE)
    assert not loaded.all_have(8, ONE)


def test_what_is_loaded_again_replaces_what_was_loaded_before(ranks: Ranks) -> None:
    for stamp, before in ((ONE, NO_STAMP), (OTHER, ONE), (ONE, OTHER)):
        ranks.all_load(7, stamp)
        assert ranks.loaded.look()
        assert ranks.loaded.all_have(7, stamp)
        assert not ranks.loaded.all_have(7, before)
        assert ranks.writers[0].stamp(7) == stamp
    ranks.all_load(7, NO_STAMP)
    ranks.loaded.look()
    assert not ranks.loaded.all_have(7, NO_STAMP), "nobody knows of which files it is"
    assert not ranks.loaded.none_has_other(7, ONE)


def test_a_full_table_forgets_what_was_loaded_the_longest_time_ago(ranks: Ranks) -> None:
    room = max_entries(4096)
    assert room >= 90
    for number in range(room):
        ranks.all_load(number, ONE)
    ranks.all_load(0, OTHER)
    ranks.all_load(room, ONE)
    ranks.loaded.look()
    assert ranks.loaded.all_have(0, OTHER)
    assert not ranks.loaded.all_have(1, ONE)
    assert ranks.writers[0].stamp(1) is None
    assert all(ranks.loaded.all_have(number, ONE) for number in range(2, room + 1))


def test_a_table_that_is_being_written_says_nothing_and_is_read_again(ranks: Ranks) -> None:
    ranks.all_load(7, ONE)
    head = ranks.segments[1].notice[WORD_END : WORD_END + 16].cast("Q")
    check = head[CHECK]
    head[CHECK] = check ^ 1
    for _ in range(2):
        assert ranks.loaded.look()
        assert not ranks.loaded.all_have(7, ONE)
        assert not ranks.loaded.none_has_other(7, ONE)
    head[CHECK] = check
    assert ranks.loaded.look()
    assert ranks.loaded.all_have(7, ONE)
    assert not ranks.loaded.look()
    head.release()


def test_an_id_that_has_no_place_changes_nothing(ranks: Ranks) -> None:
    ranks.all_load(7, ONE)
    with pytest.raises(struct.error):
        ranks.writers[0].loaded(1 << 64, ONE)
    ranks.loaded.look()
    assert ranks.loaded.all_have(7, ONE)


def test_what_is_said_of_the_weights_and_of_adapters_share_the_page(ranks: Ranks) -> None:
    pages = [segment.notice for segment in ranks.segments]
    reader, writer = NoticeReader(pages), NoticeWriter(pages[0])
    writer.set_word("u" * 1024)
    for number in range(2 * max_entries(4096)):
        ranks.all_load(number, ONE)
    assert reader.look() == (Notice(words=1, word="u" * 1024), Notice())
    ranks.loaded.look()
    assert ranks.loaded.all_have(number, ONE)
    reader.close()
    writer.close()


def rank(pipe: Any) -> None:
    """A worker's process: says what it is told to say, and answers."""
    segment = ArenaSegment.create(3, PIECE)
    writer = LoadedAdaptersWriter(segment.notice)
    pipe.send(segment.address())
    while True:
        writer.loaded(*pipe.recv())
        pipe.send(None)


def test_another_process_hears_it_at_once() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=rank, args=(there,), daemon=True)
    worker.start()
    segment = ArenaSegment.attach(here.recv())
    loaded = LoadedAdapters([segment.notice])
    for number in range(300):
        stamp = number.to_bytes(16, "little")
        here.send((number, stamp))
        here.recv()
        assert loaded.look()
        assert loaded.all_have(number, stamp) == (number > 0), "a stamp of zeros is none"
    worker.kill()
    worker.join()
    assert not loaded.look()
    assert loaded.all_have(299, (299).to_bytes(16, "little"))
    loaded.close()
    segment.close()


def test_nothing_new_is_found_within_a_microsecond(ranks: Ranks) -> None:
    """Asked in every hook of an engine with adapters. The best of several rounds: others compute here too."""
    ranks.all_load(7, ONE)
    ranks.loaded.look()
    assert min(timeit.repeat(ranks.loaded.look, number=2000, repeat=20)) / 2000 < 1e-6
