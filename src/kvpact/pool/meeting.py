"""Meetings of the engines of one user on a host: each asks the others for their memory, through their status sockets.

Owns the connections, and a thread that makes them. Nobody waits for anybody: an engine asks and goes on; the other
answers when it can, and from then on the connection is the neighbour: it ends with the process at either end. What is
asked asks back, so each two engines have two connections, and neither is in the other's way.

    asks    MeetingQuestion ->
            <- MeetingOffer with descriptors, or REFUSAL; then NUMBERs of neighbours

A reset ends the connections of those that asked; they ask again. So does one that was stopped and has left so many
numbers unread that the next finds no room: it learns the last one from the answer. An engine that is alone does nothing
after its start.
Where an engine has no descriptor or memory left for a meeting, it ends the connection without a word: both try again.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from errno import EMFILE
from functools import partial
from math import inf
from pathlib import Path
from typing import Final, NoReturn

from kvpact.errors import DataError, KvpactError, is_passing, reason_of
from kvpact.index.neighbour import Neighbour
from kvpact.index.row_locks import close_in_children
from kvpact.memory.arena import SegmentAddress
from kvpact.memory.mapping import boot_id, pid_namespace
from kvpact.pool.neighbours import Neighbours, OtherEngine
from kvpact.pool.own_memory import OwnMemory, form_of
from kvpact.threads import give_way, start_background
from kvpact.tiers.log_once import LogOnce
from kvpact.units import format_size
from kvpact.wire import NUMBER, MeetingOffer, MeetingQuestion, decode, encode

logger = logging.getLogger(__name__)

REFUSAL: Final = b"no"
"""Answer to engines whose blocks are others."""

MOST_BYTES: Final = 1 << 18
"""Most bytes of a message."""

MOST_DESCRIPTORS: Final = 253
"""Descriptors that the kernel sends at once."""

RETRY_SECONDS: Final = 0.3
"""Seconds until an engine is asked again whose connection has ended or could not be made."""

SETTLED_SECONDS: Final = 1.0
"""Seconds without a change until the log says how many neighbours there are."""

CLOSE_SECONDS: Final = 1.0
"""Seconds that a shutdown waits at most for the thread."""

ALONE: Final = "kvpact: pool: this engine's memory is its own alone: %s"

LATER: Final = "kvpact: pool: this engine cannot meet another one now, and tries again until it can: %s"

NO_TABLE: Final = "kvpact: pool: no other engine loads from this one's memory until it can make a table anew: %s"

UNREAD: Final = "kvpact: pool: engine %s has read none of many messages; it is met anew once it runs again"

FAULTS: Final = (KvpactError, OSError, MemoryError)
"""Errors that keep an engine from being a neighbour, for good or for now."""

_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group of a peer."""


class _Held:
    """Descriptors of another engine, and its table: closed together, and in each forked child."""

    def __init__(self, index: Neighbour, segments: Iterable[int]) -> None:
        self._index = index
        self._segments = [*segments]
        close_in_children(self)

    def close(self) -> None:
        """Close them; idempotent."""
        self._index.close()
        while self._segments:
            os.close(self._segments.pop())


@dataclass(eq=False)
class _Asked:
    """Another engine, and the connection on which it was asked."""

    name: str
    connection: socket.socket
    engine: OtherEngine | None = None
    """None until it has answered."""


class Meeting:
    """The meetings of one engine, from `begin` on: once its own socket is there."""

    def __init__(self, own: OwnMemory, neighbours: Neighbours) -> None:
        self._own = own
        self._neighbours = neighbours
        self._name = ""
        self._find: Callable[[], Iterable[Path]] = tuple
        self._weights = ""
        self._asked: dict[str, _Asked] = {}
        self._given: dict[str, socket.socket] = {}
        self._strangers: set[str] = set()
        self._heard: deque[tuple[socket.socket, bytes]] = deque()
        self._left: deque[_Held] = deque()
        self._is_reset = False
        self._told = LogOnce(logger)
        self._closed = threading.Event()
        self._look_at = 0.0
        self._say_at = inf
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.PollSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, partial(os.eventfd_read, self._wake))
        neighbours.on_reset(self.reset)

    # Any thread

    def begin(self, name: str, find: Callable[[], Iterable[Path]]) -> None:
        """Ask all engines whose sockets `find` finds; this one's own has that `name`. Once."""
        self._name = name
        self._find = find
        self._thread = start_background("kvpact-meeting", self._run)

    def hear(self, caller: socket.socket, question: bytes) -> None:
        """Take over a connection on which another engine has asked."""
        self._heard.append((caller, question))
        self._poke()
        if self._closed.is_set():
            self._refuse_heard()

    def reset(self) -> None:
        """Let no other engine use what it has found here; all meet anew. For the scheduler's thread."""
        self._neighbours.owes_reset = False
        try:
            self._is_reset |= self._own.reset()
        except OSError as error:
            self._neighbours.owes_reset = is_passing(error)
            if self._neighbours.owes_reset:
                self._told.log("reset", logging.WARNING, NO_TABLE, reason_of(error))
                return
            logger.warning(ALONE, reason_of(error))
            self.end()
        self._poke()

    def end(self) -> None:
        """End all connections, without a wait; nobody may use what is found here any more."""
        self._own.refuse()
        self._closed.set()
        self._poke()

    def close(self) -> None:
        """`end`, and a short wait for the thread."""
        self.end()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _poke(self) -> None:
        with suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _let_go(self, held: _Held) -> None:
        """Have the meeting's thread close descriptors that nothing needs any more: of a dead engine's memory they may
        be the last, with which the kernel frees its pages."""
        self._left.append(held)
        self._poke()
        if self._closed.is_set():
            self._close_left()

    # The thread

    def _run(self) -> None:
        give_way()
        try:
            while not self._closed.is_set():
                for key, _ in self._selector.select(self._rest()):
                    key.data()
                self._turn()
        finally:
            self._closed.set()
            for asked in [*self._asked.values()]:
                self._end_asked(asked)
            for name in [*self._given]:
                self._end_given(name)
            self._refuse_heard()
            self._close_left()

    def _rest(self) -> float | None:
        """Seconds until something is due."""
        due = min(self._look_at, self._say_at)
        return None if due == inf else max(0.0, due - time.monotonic())

    def _turn(self) -> None:
        if self._is_reset:
            self._is_reset = False
            for name in [*self._given]:
                self._end_given(name)
        while self._heard and not self._closed.is_set():
            self._answer(*self._heard.popleft())
        if self._look_at <= time.monotonic():
            self._look_at = inf
            self._look()
        if self._say_at <= time.monotonic():
            self._say_at = inf
            self._say()
        self._close_left()

    def _close_left(self) -> None:
        while self._left:
            self._left.popleft().close()

    def _say(self) -> None:
        met = self._neighbours.current()
        num_bytes = self._own.num_bytes + sum(engine.num_bytes for engine in met)
        count = f"{len(met)} neighbour{'' if len(met) == 1 else 's'}"
        logger.info("kvpact: pool: %s, %s in all", count, format_size(num_bytes))

    # Asking

    def _look(self) -> None:
        """Ask the engines that were not asked yet."""
        try:
            paths = {path.stem: path for path in self._find()}
        except OSError as error:
            self._put_off(error)
            return
        self._strangers &= paths.keys()
        for name in paths.keys() - self._asked.keys() - self._strangers - {self._name}:
            self._ask(name, paths[name])

    def _ask(self, name: str, path: Path) -> None:
        with ExitStack() as unmade:
            try:
                connection = unmade.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.setblocking(False)
                connection.connect(str(path))
                connection.send(encode(self._own.question(self._name)))
            except BlockingIOError:  # it has no place for one more caller now
                self._look_at = _in(RETRY_SECONDS)
                return
            except OSError as error:
                self._put_off(error)
                return
            unmade.pop_all()
        close_in_children(connection)
        asked = self._asked[name] = _Asked(name, connection)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._read, asked))

    def _read(self, asked: _Asked) -> None:
        """Take in an answer, or the number of neighbours."""
        said = b""
        descriptors: list[int] = []
        flags = 0
        with suppress(OSError):  # it has ended
            said, descriptors, flags, _ = socket.recv_fds(
                asked.connection, MOST_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        if not said:
            self._end_asked(asked)
        elif asked.engine is not None and not descriptors and not len(said) % NUMBER.size:
            (number,) = NUMBER.unpack(said[-NUMBER.size :])
            asked.engine.index.share_among(max(1, number))
        else:
            self._meet(asked, said, descriptors, is_whole=not flags & socket.MSG_CTRUNC)

    def _meet(self, asked: _Asked, said: bytes, descriptors: list[int], *, is_whole: bool) -> None:
        """Let an engine that has offered its memory be a neighbour, if it is one; if not all descriptors could be taken
        in, later."""
        try:
            if not is_whole:
                raise OSError(EMFILE, os.strerror(EMFILE))
            if said == REFUSAL or asked.engine is not None:
                raise DataError("its blocks are others")
            offer = decode(said, MeetingOffer)
            if offer.weights != self._identity():
                raise DataError("it has other weights")
            asked.engine = self._engine(asked.name, offer, descriptors)
        except FAULTS as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if not self._put_off(error):
                logger.debug("kvpact: pool: %s is no neighbour: %s", asked.name, reason_of(error))
                self._strangers.add(asked.name)
            self._end_asked(asked)
            return
        self._say_at = _in(SETTLED_SECONDS)

    def _engine(self, name: str, offer: MeetingOffer, descriptors: list[int]) -> OtherEngine:
        """The engine that made this offer; it closes the descriptors. Raises DataError, OSError, and closes none."""
        segments = descriptors[2:]
        if form_of(offer.segments) != self._own.form or len(segments) != len(offer.segments):
            raise DataError(f"it sent {len(segments)} segments, or ones of another form")
        there = [_address(*pair) for pair in zip(offer.segments, segments, strict=True)]
        of_ranks = tuple(there[place] for place in self._own.segment_of)
        index = Neighbour(descriptors[0], descriptors[1], max(1, offer.neighbours))  # from here on nothing fails
        held = _Held(index, segments)
        engine = OtherEngine(name, index, of_ranks, offer.node, offer.slots, offer.num_bytes)
        is_near = offer.node is not None and offer.node == self._own.node
        self._neighbours.enter(engine, partial(self._let_go, held), is_near=is_near)
        return engine

    def _end_asked(self, asked: _Asked) -> None:
        self._selector.unregister(asked.connection)
        asked.connection.close()
        del self._asked[asked.name]
        if asked.engine is not None:
            self._neighbours.leave(asked.engine)
            self._say_at = _in(SETTLED_SECONDS)
        self._look_at = _in(RETRY_SECONDS)

    # Answering

    def _answer(self, caller: socket.socket, question: bytes) -> None:
        """Offer this engine's memory to one that has asked, or refuse it."""
        try:
            caller.setblocking(False)
            name = self._offer(caller, question)
        except FAULTS as error:
            if self._put_off(error):
                caller.close()  # without a refusal: it asks again
                return
            logger.debug("kvpact: pool: refused: %s", reason_of(error))
            _refuse(caller)
            return
        self._end_given(name)
        close_in_children(caller)
        self._given[name] = caller
        self._selector.register(caller, selectors.EVENT_READ, partial(self._end_given, name))
        self._tell_number()
        self._look_at = 0.0  # it may be new

    def _offer(self, caller: socket.socket, question: bytes) -> str:
        """Send the descriptors; returns the caller's name. Raises KvpactError for no neighbour, OSError."""
        asked = decode(question, MeetingQuestion)
        if not self._own.fits(asked):
            raise DataError(f"{asked.name} has other blocks")
        if _user_of(caller) != os.geteuid():
            raise DataError(f"{asked.name} is another user's")
        offer = self._own.offer(self._identity(), len(self._given.keys() | {asked.name}))
        try:
            self._own.lend()
        except OSError as error:
            self._give_up(error)
        with ExitStack() as opened:
            socket.send_fds(caller, [encode(offer)], self._own.open_each(opened))
        return asked.name

    def _refuse_heard(self) -> None:
        with suppress(IndexError):  # both threads may be here
            while True:
                _refuse(self._heard.popleft()[0])

    def _end_given(self, name: str) -> None:
        """End the connection of an engine that has asked, if there is one."""
        connection = self._given.pop(name, None)
        if connection is not None:
            self._selector.unregister(connection)
            connection.close()
            self._tell_number()

    def _tell_number(self) -> None:
        """Tell those that have asked how many they are, and end the connections of those that cannot be told."""
        number = NUMBER.pack(len(self._given))
        for name in [name for name, connection in self._given.items() if not self._is_told(name, connection, number)]:
            self._end_given(name)  # and tell the others

    def _is_told(self, name: str, connection: socket.socket, number: bytes) -> bool:
        try:
            return connection.send(number) == len(number)
        except BlockingIOError:
            self._told.log("unread", logging.WARNING, UNREAD, name)
        except OSError:
            pass  # it has ended
        return False

    # Both

    def _identity(self) -> str:
        """Identity of the weights. Raises DataError if there is none, and no engine is a neighbour then."""
        if not self._weights:
            try:
                self._weights = self._own.weights(self._closed.is_set)
            except FAULTS as error:
                self._give_up(error)
        return self._weights

    def _put_off(self, error: Exception) -> bool:
        """Look again for engines that are to be asked, later, if this fault may have passed by then."""
        if is_passing(error):
            self._told.log("meeting", logging.WARNING, LATER, reason_of(error))
            self._look_at = min(self._look_at, _in(RETRY_SECONDS))
            return True
        return False

    def _give_up(self, error: Exception) -> NoReturn:
        if is_passing(error):
            raise error
        if not self._closed.is_set():
            logger.warning(ALONE, reason_of(error))
            self.end()
        raise DataError(reason_of(error)) from None


def _refuse(caller: socket.socket) -> None:
    with caller, suppress(OSError):
        caller.send(REFUSAL)


def _in(seconds: float) -> float:
    return time.monotonic() + seconds


def _user_of(caller: socket.socket) -> int:
    """User of the process that has connected."""
    user: int = _CREDENTIALS.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1]
    return user


def _address(there: SegmentAddress, descriptor: int) -> SegmentAddress:
    """Address of another engine's segment, at which this process's ranks open it."""
    found = os.fstat(descriptor)
    return replace(
        there,
        pid=os.getpid(),
        descriptor=descriptor,
        device=found.st_dev,
        inode=found.st_ino,
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
    )
