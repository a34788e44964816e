"""What a worker's process says of its weights, and what the scheduler's process makes of it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import timeit
from collections.abc import Iterator
from typing import Any

import pytest

from kvpact.identity.notices import MAX_WORD_BYTES, WORD_CHECK, Notice, NoticeReader, NoticeWriter
from kvpact.memory.arena import ArenaSegment, SegmentAddress

PIECE = 2 * 4096
MOST_CALLS = 40


class Calls:
    def nothing(self) -> None:
        """What a call takes."""


@pytest.fixture
def segments() -> Iterator[list[ArenaSegment]]:
    """Two ranks' memory."""
    made = [ArenaSegment.create(3, PIECE) for _ in range(2)]
    yield made
    for segment in made:
        segment.close()


def both(segments: list[ArenaSegment]) -> tuple[NoticeReader, list[NoticeWriter]]:
    pages = [segment.notice for segment in segments]
    return NoticeReader(pages), [NoticeWriter(page) for page in pages]


def test_the_notice_is_behind_all_slots(segments: list[ArenaSegment]) -> None:
    for slot in range(3):
        segments[0].slot_view(slot)[:] = b"\xff" * PIECE
    assert not any(segments[0].notice)
    segments[0].notice[:] = b"\xee" * len(segments[0].notice)
    assert all(bytes(segments[0].slot_view(slot)) == b"\xff" * PIECE for slot in range(3))


def test_only_what_is_new_is_told(segments: list[ArenaSegment]) -> None:
    reader, (first, second) = both(segments)
    assert reader.look() == (Notice(), Notice())
    assert reader.look() is None
    second.weights_change()
    assert reader.look() == (Notice(), Notice(changes=1))
    assert reader.look() is None
    first.woke_equal()
    assert reader.look() == (Notice(wakes=1), Notice(changes=1))
    reader.close()
    for writer in (first, second):
        writer.close()


def test_a_word_counts_until_the_weights_change(segments: list[ArenaSegment]) -> None:
    reader, (writer, _) = both(segments)
    longest = "ü" * (MAX_WORD_BYTES // 2)
    for number, word in enumerate(("step 12", longest, "7")):
        writer.set_word(word)
        assert reader.look() == (Notice(changes=number, words=number + 1, word=word), Notice())
        writer.weights_change()
        assert reader.look() == (Notice(changes=number + 1, words=number + 1), Notice())
    for wrong in ("", longest + "u"):
        with pytest.raises(ValueError, match="1 to 1024 bytes"):
            writer.set_word(wrong)
    assert reader.look() is None


def test_a_word_that_is_being_written_is_read_again(segments: list[ArenaSegment]) -> None:
    reader, (writer, _) = both(segments)
    writer.set_word("step 1")
    page = segments[0].notice
    check = page[:64].cast("Q")[WORD_CHECK]
    page[:64].cast("Q")[WORD_CHECK] = check ^ 1
    for _ in range(2):
        assert reader.look() == (Notice(words=1), Notice())
    page[:64].cast("Q")[WORD_CHECK] = check
    assert reader.look() == (Notice(words=1, word="step 1"), Notice())
    assert reader.look() is None


def rank(pipe: Any) -> None:
    """A worker's process: says what it is told to say, and answers."""
    segment = ArenaSegment.create(3, PIECE)
    writer = NoticeWriter(segment.notice)
    pipe.send(segment.address())
    while True:
        method, *arguments = pipe.recv()
        getattr(writer, method)(*arguments)
        pipe.send(writer.changes)


def test_another_process_hears_it_at_once_and_a_dead_one_has_said_it() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=rank, args=(there,), daemon=True)
    worker.start()
    address = here.recv()
    assert isinstance(address, SegmentAddress)
    segment = ArenaSegment.attach(address)
    reader = NoticeReader([segment.notice])
    assert reader.look() == (Notice(),)
    for changes in range(1, 50):
        here.send(("weights_change",))
        assert here.recv() == changes
        assert reader.look() == (Notice(changes=changes, words=changes - 1),)
        here.send(("set_word", f"step {changes}"))
        here.recv()
        assert reader.look() == (Notice(changes=changes, words=changes, word=f"step {changes}"),)
        assert reader.look() is None
    here.send(("weights_change",))
    here.recv()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert reader.look() == (Notice(changes=50, words=49),)
    reader.close()
    segment.close()


def test_nothing_new_is_found_in_the_time_of_a_few_calls(segments: list[ArenaSegment]) -> None:
    """Asked in every hook: 2 us where a call of a method takes 50 ns. The best of rounds: others compute here too."""
    reader, _ = both(segments)
    reader.look()
    calls = (reader.look, Calls().nothing)
    rounds = [[timeit.timeit(call, number=2000) for call in calls] for _ in range(20)]
    assert min(look / nothing for look, nothing in rounds) < MOST_CALLS
