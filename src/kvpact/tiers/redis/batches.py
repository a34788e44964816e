"""Batches of commands, each sent to the server that has its key, and the deadline of a store's call.

Owns the spread of keys over servers and the error of a failed call. Retries only keys that moved to another server.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

from kvpact.errors import reason_of
from kvpact.tiers.redis.connections import Address, Connection, Moved, Pool, Reply
from kvpact.tiers.redis.servers import Servers
from kvpact.tiers.shared.store import StoreError

WINDOW_BYTES: Final = 4 << 20
"""No further value is asked for on a connection while this many bytes are to come, and two values at least: a server
copies each value that it was asked for into memory of its own, and memory that it takes anew costs it more than the
value's way through the socket. Two at a time, 32 values of 4 MiB took 57 ms, all at once 157 ms."""

_AHEAD: Final = 2
"""Values that are asked for in any case: one arrives while the server has the next one ready."""


class Batches:
    """Sends a store's commands to its servers. Thread-safe."""

    def __init__(self, servers: Servers, pool: Pool, place: str, timeout: float) -> None:
        """Takes over `pool`. `place` is for messages; a call ends at most `timeout` seconds after it began."""
        self.servers = servers
        self.pool = pool
        self._timeout = timeout
        self.place = place

    def each(
        self,
        keys: Sequence[bytes],
        send: Callable[[Connection, int], None],
        receive: Callable[[Connection, int], object],
        deadline: float,
        value_bytes: Callable[[int], int] | None = None,
    ) -> None:
        """Call `send` for each key, with a connection to its server, then `receive` for the replies.

        All commands are sent first, or, with the `value_bytes` of each key's replies, as many as `WINDOW_BYTES` allows.
        Repeats this once for keys that have moved to other servers.
        """

        def moved_of(indexes: Iterable[int]) -> list[int]:
            of_server: dict[Address, list[int]] = defaultdict(list)
            for index in indexes:
                of_server[self.servers.of(keys[index], deadline)].append(index)
            with ExitStack() as connections:
                asked = []
                for server, its_indexes in of_server.items():
                    connection = connections.enter_context(self.pool.connection(server, deadline))
                    asked.append(_Exchange(connection, its_indexes, send, value_bytes))
                return [index for exchange in asked for index in exchange.receive(receive)]

        if moved := moved_of(range(len(keys))):
            self.servers.forget()
            if moved_of(moved):
                raise StoreError("keys move from server to server")

    def replies(
        self, keys: Sequence[bytes], command: bytes, *arguments: bytes, deadline: float, lenient: bool = False
    ) -> list[Reply]:
        """The reply to `command key *arguments` for each key; with `lenient` None for one that holds no string."""
        replies: list[Reply] = [None] * len(keys)

        def receive(connection: Connection, at: int) -> None:
            replies[at] = connection.reply(lenient=lenient)

        self.each(keys, lambda connection, at: connection.send(command, keys[at], *arguments), receive, deadline)
        return replies

    @contextmanager
    def call(self) -> Iterator[float]:
        """The context of one call: gives its deadline, and turns its errors into a StoreError."""
        try:
            yield time.monotonic() + self._timeout
        except Exception as error:
            self.servers.forget()
            message = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else reason_of(error)
            if "OOM " in message:
                message += "; set its maxmemory-policy to allkeys-lru"
            if "NOPERM " in message:
                command = re.search(r"'([\w|-]+)' command", message)
                message += f"; allow it, like ACL SETUSER name {f'+{command[1]}' if command else '~*'}"
            raise StoreError(f"{self.place}: {message}") from None


class _Exchange:
    """The commands for some keys of one server, as many for each, and their replies."""

    def __init__(
        self,
        connection: Connection,
        indexes: Sequence[int],
        send: Callable[[Connection, int], None],
        value_bytes: Callable[[int], int] | None,
    ) -> None:
        """Send the first commands."""
        self._connection = connection
        self._unsent = deque(indexes)
        self._unanswered = deque[int]()
        self._send = send
        self._value_bytes = value_bytes
        self._coming = 0
        """Bytes of the values that were asked for and have not come."""
        self._ask()
        self._commands = connection.unanswered // len(self._unanswered)

    def _ask(self) -> None:
        """Send the commands of further keys."""
        while self._unsent and (self._coming < WINDOW_BYTES or len(self._unanswered) < _AHEAD):
            index = self._unsent.popleft()
            self._send(self._connection, index)
            self._unanswered.append(index)
            self._coming += self._bytes_of(index)
        self._connection.flush()

    def _bytes_of(self, index: int) -> int:
        return self._value_bytes(index) if self._value_bytes is not None else 0

    def receive(self, receive: Callable[[Connection, int], object]) -> Iterator[int]:
        """Let `receive` read each key's replies; yields the keys that have moved to another server."""
        while self._unanswered:
            index = self._unanswered.popleft()
            try:
                receive(self._connection, index)
            except Moved:
                yield index
                self._connection.pass_over(self._connection.unanswered - self._commands * len(self._unanswered))
            self._coming -= self._bytes_of(index)
            self._ask()
