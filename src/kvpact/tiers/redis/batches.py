"""Batches of commands, each sent to the server that has its key, and the deadline of a store's call.

Owns how keys are spread over servers and the error of a failed call. Retries only keys that moved to another server.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from kvpact.tiers.redis.connections import Address, Connection, ErrorReply, Moved, Pool, Reply
from kvpact.tiers.redis.servers import Servers
from kvpact.tiers.shared.store import StoreError


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
    ) -> None:
        """For each key let `send` send commands to the key's server, then let `receive` read the replies.

        Repeats this once for keys that have moved to other servers.
        """

        def moved_of(indexes: Iterable[int]) -> list[int]:
            of_server: dict[Address, list[int]] = defaultdict(list)
            for index in indexes:
                of_server[self.servers.of(keys[index], deadline)].append(index)
            moved = []
            with ExitStack() as connections:
                asked = []
                for server, its_indexes in of_server.items():
                    connection = connections.enter_context(self.pool.connection(server, deadline))
                    for index in its_indexes:
                        send(connection, index)
                    connection.flush()
                    asked.append((connection, its_indexes, connection.unanswered // len(its_indexes)))
                for connection, its_indexes, commands in asked:
                    for left, index in zip(reversed(range(len(its_indexes))), its_indexes, strict=True):
                        try:
                            receive(connection, index)
                        except Moved:
                            moved.append(index)
                            connection.pass_over(connection.unanswered - left * commands)
            return moved

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
            match error:
                case TimeoutError():
                    message = f"no answer within {self._timeout:g} s"
                case StoreError() | OSError() | ErrorReply() | ValueError():
                    message = str(error) or type(error).__name__
                case _:
                    raise
            raise StoreError(f"{self.place}: {message}") from None
