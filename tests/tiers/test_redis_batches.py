"""How batches of commands go to Redis servers: how much is asked for at a time, and what becomes of keys that move."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, cast

import pytest

from kvpact.tiers.redis.batches import WINDOW_BYTES, Batches
from kvpact.tiers.redis.connections import Address, Connection, Moved
from kvpact.tiers.shared.store import StoreError

MIB = 1 << 20
HERE, THERE = ("here", 1), ("there", 2)


class Wire:
    """A connection that answers each command with its key; `moved` keys with an error, on the first of `replies`."""

    def __init__(self, moved: set[bytes]) -> None:
        self.moved = moved
        self.unanswered = 0
        self.most_unanswered = 0
        self._sent = deque[bytes]()
        self._flushed = 0

    def send(self, command: bytes, key: bytes) -> None:
        self._sent.append(key)
        self.unanswered += 1
        self.most_unanswered = max(self.most_unanswered, self.unanswered)

    def flush(self) -> None:
        self._flushed = len(self._sent)

    def reply(self) -> bytes:
        assert self._flushed, "a reply is waited for whose command was not sent"
        self.unanswered, self._flushed = self.unanswered - 1, self._flushed - 1
        key = self._sent.popleft()
        if key in self.moved:
            raise Moved("MOVED 1 there:2")
        return key

    def pass_over(self, replies: int) -> None:
        for _ in range(replies):
            with suppress(Moved):
                self.reply()


class Town:
    """Servers and the pool of their connections: `moved` keys are at HERE at first, and at THERE when asked again."""

    def __init__(self, moved: Sequence[bytes] = (), *, settled: bool = True) -> None:
        self.wires = {HERE: Wire(set(moved)), THERE: Wire(set() if settled else set(moved))}
        self._moved = set(moved)
        self._knows = False

    def of(self, key: bytes, deadline: float) -> Address:
        return THERE if self._knows and key in self._moved else HERE

    def forget(self) -> None:
        self._knows = True

    @contextmanager
    def connection(self, server: Address, deadline: float) -> Iterator[Wire]:
        yield self.wires[server]


def batches(town: Town) -> Batches:
    place: Any = town
    return Batches(place, place, "redis://here", 2.0)


def get(town: Town, keys: Sequence[bytes], nbytes: int | None, commands: int = 1) -> dict[int, bytes]:
    """The reply to the last command for each key; every key has values of `nbytes`, None: not known."""
    found: dict[int, bytes] = {}

    def send(connection: Connection, at: int) -> None:
        for _ in range(commands):
            cast(Wire, connection).send(b"GET", keys[at])

    def receive(connection: Connection, at: int) -> None:
        for _ in range(commands):
            found[at] = cast(Wire, connection).reply()

    batches(town).each(keys, send, receive, inf, None if nbytes is None else lambda at: nbytes)
    return found


KEYS = [b"%d" % number for number in range(20)]


@pytest.mark.parametrize(("nbytes", "at_once"), [(MIB, WINDOW_BYTES // MIB), (3 * MIB, 2), (64 * MIB, 2), (0, 20)])
def test_a_server_is_asked_for_a_window_of_values_at_a_time_and_two_at_least(nbytes: int, at_once: int) -> None:
    town = Town()
    assert get(town, KEYS, nbytes) == dict(enumerate(KEYS))
    assert town.wires[HERE].most_unanswered == at_once


def test_commands_without_values_go_out_together() -> None:
    town = Town()
    assert get(town, KEYS, None) == dict(enumerate(KEYS))
    assert town.wires[HERE].most_unanswered == len(KEYS)


@pytest.mark.parametrize("nbytes", [None, MIB, 64 * MIB])
@pytest.mark.parametrize("commands", [1, 2])
@pytest.mark.parametrize("moved", [[b"0"], [b"7", b"8"], [b"19"], KEYS])
def test_keys_that_moved_are_read_where_they_are_and_the_others_from_their_own_replies(
    nbytes: int | None, commands: int, moved: list[bytes]
) -> None:
    town = Town(moved)
    assert get(town, KEYS, nbytes, commands) == dict(enumerate(KEYS))
    assert [wire.unanswered for wire in town.wires.values()] == [0, 0]


def test_keys_that_move_again_and_again_are_an_error() -> None:
    with pytest.raises(StoreError, match="move from server to server"):
        get(Town([b"3"], settled=False), KEYS, MIB)
