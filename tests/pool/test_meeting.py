"""Engines of one host, as processes, find each other, and lose each other when one ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvpact.pool.meeting import RETRY_SECONDS
from kvpact.wire import MeetingQuestion, decode, encode
from meeting_engine import Host, MeetingEngine
from polling import until
from pool_engines import leases_on

Start: TypeAlias = Callable[..., MeetingEngine]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The process that starts engines."""
    with closing(Host(tmp_path_factory.mktemp("host"))) as found:
        yield found


@pytest.fixture
def start(host: Host, tmp_path: Path) -> Iterator[Start]:
    """Start an engine, on another `on`; all of a test share a folder."""
    started: list[MeetingEngine] = []

    def one(on: Host = host, **options: Any) -> MeetingEngine:
        started.append(MeetingEngine(on, tmp_path, **options))
        return started[-1]

    yield one
    for engine in started:
        engine.close()


def meet(*engines: MeetingEngine) -> None:
    """Wait until each of these has met all others, and no further one."""
    expected = [sorted(other.pid for other in engines if other is not engine) for engine in engines]
    until(lambda: [engine.ask("met") for engine in engines] == expected)


def alone(*engines: MeetingEngine) -> None:
    """Each of these has met nobody, although all have had the time for it."""
    until(lambda: all("kvpact-meeting" in engine.ask("threads") for engine in engines))
    time.sleep(0.5)
    assert [engine.ask("met") for engine in engines] == [[]] * len(engines)


def test_engines_that_start_together_meet_each_other_and_load_from_each_other(start: Start) -> None:
    engines = [start(slots=slots, ranks=2) for slots in (64, 200, 64)]
    meet(*engines)
    assert sorted(one["slots"] for one in engines[0].ask("facts")) == [64, 200]
    assert [one["bytes"] for one in engines[1].ask("facts")] == [64 * 2 * 4096] * 2
    for engine in engines:
        engine.ask("save", engine.pid, 5)
    for engine in engines:
        for other in engines:
            assert engine.ask("lease", other.pid, 7) == (5 if other is not engine else 0)


def test_one_line_says_how_many_neighbours_there_are_when_that_has_changed(start: Start) -> None:
    first, second, third = (start(slots=256) for _ in range(3))
    meet(first, second, third)
    until(lambda: "kvpact: pool: 2 neighbours, 3MiB in all" in first.log.read_text())
    third.kill()
    until(lambda: "kvpact: pool: 1 neighbour, 2MiB in all" in first.log.read_text())
    assert first.log.read_text().count("in all") <= 3


def test_an_engine_that_is_alone_has_sealed_and_lent_nothing(start: Start) -> None:
    engine = start()
    alone(engine)
    assert (engine.ask("is_sealed"), engine.ask("claims")) == (False, False)
    other = start()
    meet(engine, other)
    assert (engine.ask("is_sealed"), engine.ask("claims")) == (True, True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"model": "two"}, "has other blocks"),
        ({"ranks": 2}, "has other blocks"),
        ({"bytes": 8192}, "has other blocks"),
        ({"weights": "others"}, "it has other weights"),
    ],
    ids=["namespace", "ranks", "bytes", "weights"],
)
def test_engines_with_other_blocks_do_not_meet_and_the_log_says_why(
    start: Start, options: dict[str, Any], why: str
) -> None:
    one, other = start(), start(**options)
    alone(one, other)
    assert why in one.log.read_text() + other.log.read_text()


def test_one_sentence_says_that_weights_which_nobody_knows_are_shared_with_nobody(start: Start) -> None:
    engine = start(weights=None)
    alone(engine)
    assert engine.log.read_text() == ""
    start()
    said = "kvpact: pool: this engine's memory is its own alone: the weights come from anywhere"
    until(lambda: said in engine.log.read_text())
    assert engine.ask("met") == []
    assert engine.log.read_text().count(said) == 1


def test_an_engine_without_a_pool_refuses(start: Start) -> None:
    one, other = start(), start(pool=False)
    until(lambda: len([*(Path(one.log).parent / "run/kvpact").glob("*.sock")]) == 2)
    third = start()
    meet(one, third)
    assert other.ask("met") == []


def test_a_neighbour_that_was_killed_is_gone_and_its_memory_stays_until_the_load_has_ended(start: Start) -> None:
    one, other = start(), start()
    meet(one, other)
    before = one.ask("descriptors")
    other.ask("save", "prompt", 6)
    assert one.ask("lease", "prompt", 6) == 6
    other.kill()
    until(lambda: one.ask("met") == [])
    assert one.ask("lease", "prompt", 6) == 0
    assert one.ask("compare", "prompt") == 6
    one.ask("release")
    third = start()
    meet(one, third)
    assert until(lambda: one.ask("descriptors") <= before)


def test_h131_a_killed_engine_leaves_no_lease_although_its_forked_child_lives(start: Start) -> None:
    one, other = start(), start()
    meet(one, other)
    one.ask("save", "prompt", 6)
    assert other.ask("lease", "prompt", 6) == 6
    one.ask("fill")
    assert one.ask("waiting") == 6
    child = other.ask("fork")
    try:
        other.kill()
        until(lambda: one.ask("met") == [])
        until(lambda: one.ask("waiting") == 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_engine_that_is_stopped_costs_the_others_nothing_but_its_own_hits(start: Start) -> None:
    one, other = start(), start()
    meet(one, other)
    one.ask("save", "prompt", 6)
    other.signal(signal.SIGSTOP)
    third = start()
    until(lambda: third.ask("met") == [one.pid])
    assert third.ask("lease", "prompt", 6) == 6
    until(lambda: one.ask("met") == sorted([other.pid, third.pid]))
    other.signal(signal.SIGCONT)
    meet(one, other, third)


def test_h130_a_reset_engine_is_met_anew_and_serves_nothing_that_it_had(start: Start) -> None:
    one, other, third = start(), start(), start()
    meet(one, other, third)
    one.ask("save", "prompt", 6)
    assert other.ask("lease", "prompt", 6) == 6
    one.ask("reset")
    assert third.ask("lease", "prompt", 6) == 0
    one.ask("save", "later", 6)
    until(lambda: third.ask("lease", "later", 6) == 6)
    meet(one, other, third)
    one.ask("fill")
    assert one.ask("waiting") == 12, "what is still read of the old table, and of the new one"
    other.ask("release")
    third.ask("release")
    until(lambda: one.ask("waiting") == 0)


def test_h130_all_neighbours_share_the_part_that_may_be_leased(start: Start) -> None:
    one, other = start(slots=240), start()
    meet(one, other)
    one.ask("save", "long", 240)
    assert other.ask("most") == 60
    third, fourth = start(), start()
    meet(one, other, third, fourth)
    until(lambda: other.ask("most") == 20)
    third.kill()
    fourth.kill()
    until(lambda: other.ask("most") == 60)


def test_h130_a_stopped_engine_that_missed_a_number_learns_it_when_it_runs_again(start: Start, tmp_path: Path) -> None:
    """Callers come and go while it is stopped, until its connection has no room for one more number; three stay."""
    one, other = start(slots=240), start()
    meet(one, other)
    one.ask("save", "long", 240)
    question = decode(bytes.fromhex(one.ask("question")), MeetingQuestion)
    (path,) = (tmp_path / "run/kvpact").glob(f"{one.pid}-*.sock")

    def call(number: int) -> socket.socket:
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(str(path))
        caller.send(encode(replace(question, name=f"caller-{number}")))
        caller.settimeout(10)
        _, descriptors, _, _ = socket.recv_fds(caller, 1 << 16, 8)
        for descriptor in descriptors:
            os.close(descriptor)
        assert descriptors
        return caller

    other.signal(signal.SIGSTOP)
    unread = f"kvpact: pool: engine {other.pid}-"
    for number in range(1000):
        call(number).close()
        if unread in one.log.read_text():
            break
    with ExitStack() as stay:
        for number in range(3):
            stay.enter_context(call(number))
        other.signal(signal.SIGCONT)
        until(lambda: other.ask("most") == 240 // 4 // 4)
    assert one.log.read_text().count(unread) == 1


def test_engines_in_two_namespaces_of_processes_meet_in_the_folder_that_they_share(
    start: Start, tmp_path: Path
) -> None:
    """As in two containers: each is process 1 of its own, which no look-up by process id would survive."""
    where = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    with closing(Host(tmp_path, where)) as here, closing(Host(tmp_path, where)) as there:
        one, other = start(here, ranks=2), start(there, ranks=2)
        assert one.pid == other.pid, "the first process after the host, of each"
        until(lambda: len(one.ask("met")) == len(other.ask("met")) == 1)
        one.ask("save", "prompt", 6)
        assert other.ask("lease", "prompt", 6) == 6


def test_a_want_of_descriptors_makes_no_stranger_and_leaves_none_open(host: Host, tmp_path: Path) -> None:
    """One engine of each pair may open so many, which some call of a meeting exceeds; then as many as it likes.

    The weights, too, are in a file that has to be opened; not those of one pair, so that there the next call fails.
    """
    (tmp_path / "weights").write_text("equal")
    with ExitStack() as stack:

        def start_in_each() -> list[MeetingEngine]:
            started = [MeetingEngine(host, folder, **options) for folder, (_, options) in folders.items()]
            for engine in started:
                stack.callback(engine.close)
            return started

        from_file = {"weights_file": str(tmp_path / "weights")}
        wanting = [*((spare, from_file) for spare in range(8)), (1, {}), (None, from_file)]
        folders = {tmp_path / f"pair-{number}": pair for number, pair in enumerate(wanting)}
        for folder in folders:
            folder.mkdir()
        ones = start_in_each()
        until(lambda: all("kvpact-meeting" in one.ask("threads") for one in ones))
        for one, (spare, _) in zip(ones, wanting, strict=True):
            one.allow(spare)
        others = start_in_each()
        pairs = [*zip(ones, others, strict=True)]
        meet(*pairs.pop())
        time.sleep(3 * RETRY_SECONDS)
        assert all(len(one.ask("met")) + len(other.ask("met")) < 2 for one, other in pairs), "each lacks one at least"
        for one, _ in pairs:
            one.allow(None)
        for pair in pairs:
            meet(*pair)
        expected = [ones[-1].ask("descriptors"), others[-1].ask("descriptors")]
        until(lambda: all([engine.ask("descriptors") for engine in pair] == expected for pair in pairs))
        for one, other in pairs:
            one.ask("save", "prompt", 6)
            assert other.ask("lease", "prompt", 6) == 6
        said = (
            "kvpact: pool: this engine cannot meet another one now, and tries again until it can: Too many open files"
        )
        assert [one.log.read_text().count(said) for one, _ in pairs] == [0, *[1] * 8]
        assert not any("cannot meet" in engine.log.read_text() for engine in (*others, ones[-1]))


def test_h130_a_reset_for_which_no_descriptor_is_left_is_made_later_and_until_then_nothing_is_served(
    start: Start,
) -> None:
    one, other = start(), start()
    meet(one, other)
    one.ask("save", "prompt", 6)
    one.allow(0)
    one.ask("reset")
    one.ask("end_step")
    assert (other.ask("lease", "prompt", 6), one.ask("lease", "prompt", 6)) == (0, 0)
    one.allow(None)
    one.ask("end_step")
    one.ask("save", "later", 6)
    until(lambda: other.ask("lease", "later", 6) == 6)
    assert one.log.read_text().count("until it can make a table anew: Too many open files") == 1


def test_an_engine_that_ends_takes_leave(start: Start) -> None:
    one, other = start(), start()
    meet(one, other)
    one.ask("save", "prompt", 6)
    one.ask("close")
    until(lambda: other.ask("met") == [])
    until(lambda: "kvpact-meeting" not in one.ask("threads"))
    assert other.ask("lease", "prompt", 6) == 0


def test_no_lock_of_the_kernel_is_left_when_all_have_released(start: Start) -> None:
    one, other = start(), start()
    meet(one, other)
    one.ask("save", "prompt", 6)
    files = {*one.ask("lock_files")}
    other.ask("lease", "prompt", 6)
    assert (len(files), len(leases_on(files))) == (2, 1)
    other.ask("release")
    assert leases_on(files) == []
