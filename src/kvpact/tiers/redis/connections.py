"""Connections to Redis servers: how batches of commands travel, and how a server lets us in.

Owns the protocol (RESP2), connections and who keeps them; redis-py opens them and is imported for that alone. Never
retries, unpickles nothing, and shows no credential.
"""

from __future__ import annotations

import io
import select
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvpact.tiers.shared.store import RecordBuffer, RecordPieces, StoreError

_IDLE: Final = 16
"""Connections to one server that are kept while nobody uses them; a tier's queue has fewer threads."""

_RECEIVE_BYTES: Final = 16 << 10
_SMALL_BYTES: Final = 8 << 10
"""Pieces up to here are joined with what is sent before them: copying them costs less than a system call."""

_MAX_REPLY: Final = 1 << 20
"""No reply that is not read into buffers is longer; one that is comes from something else than we asked."""

_DEEPEST_REPLY: Final = 8
"""Lists within lists; CLUSTER SLOTS has four."""

Address: TypeAlias = tuple[str, int]
Words: TypeAlias = "bytes | RecordPieces"
Reply: TypeAlias = "int | bytes | list[Reply] | None"


class ErrorReply(Exception):
    """The server answered with an error, e.g. "OOM command not allowed"."""


class Moved(ErrorReply):
    """Another server of the Cluster has this key by now."""


class _Stream(io.RawIOBase):
    """A socket of which every call ends at `deadline`."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, memory: Any) -> int:
        self.socket.settimeout(seconds_until(self.deadline))
        received: int = self.socket.recv_into(memory)
        if not received:
            raise ConnectionError("the server ended the connection")
        return received

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.socket.settimeout(seconds_until(self.deadline))
        self.socket.sendall(data)


class Connection:
    """One connection: requests go out together, replies are read in order, and all of it ends at `deadline`.

    It speaks RESP2 itself: from and into the caller's memory, that moves values of 1 and 4 MiB about twice as fast as
    redis-py with hiredis, which joins and copies them, and takes a third of the processor's time.
    """

    def __init__(self, connection: Any) -> None:
        self.stream = _Stream(connection._sock)  # redis-py has no public name for it
        self.unanswered = 0
        """Commands that were sent, and whose replies nobody has read yet."""
        self._connection = connection
        self._out = bytearray()
        self._in = io.BufferedReader(self.stream, _RECEIVE_BYTES)

    def is_usable(self) -> bool:
        """Whether it is as quiet as it was left: a server that went away has ended it, or will say so."""
        poll = select.poll()
        poll.register(self.stream.socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        with suppress(Exception):
            self._connection.disconnect()

    # Out

    def send(self, *words: Words) -> None:
        """Add one command; `flush` sees to it that it is sent."""
        self.unanswered += 1
        self._out += b"*%d\r\n" % len(words)
        for word in words:
            pieces = [word] if isinstance(word, bytes) else word
            self._out += b"$%d\r\n" % length_of(pieces)
            for piece in pieces:
                if len(piece) > _SMALL_BYTES:
                    self.flush()
                    self.stream.send_all(piece)
                else:
                    self._out += piece
            self._out += b"\r\n"

    def flush(self) -> None:
        if self._out:
            self.stream.send_all(self._out)
            self._out = bytearray()

    # In

    def reply(self, *, lenient: bool = False) -> Reply:
        """The next reply; with `lenient` None for a key that holds no string. Raises ErrorReply for other errors."""
        self.unanswered -= 1
        return self._reply(lenient=lenient)

    def _reply(self, *, lenient: bool, depth: int = 0) -> Reply:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._bulk(int(rest))
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        if kind == b"*":
            if depth == _DEEPEST_REPLY:
                raise ErrorReply("no Redis server: its answer has no end")
            return [self._reply(lenient=lenient, depth=depth + 1) for _ in range(int(rest))]
        if kind == b"-":
            if lenient and rest.startswith(b"WRONGTYPE"):
                return None
            raise (Moved if rest.startswith(b"MOVED ") else ErrorReply)(rest.decode(errors="replace"))
        raise ErrorReply(f"no Redis server: it answers {line[:20]!r}")

    def value_into(self, buffer: RecordBuffer, apart: int = -1) -> bool | bytes:
        """The next reply into `buffer`: whether it was a value of that length. One of `apart` bytes is returned."""
        self.unanswered -= 1
        line = self._line()
        if line[:1] != b"$":
            if line.startswith(b"-WRONGTYPE"):
                return False
            raise (Moved if line.startswith(b"-MOVED ") else ErrorReply)(line[1:].decode(errors="replace"))
        nbytes = int(line[1:])
        if nbytes == apart:
            return self._bulk(nbytes) or b""
        if nbytes != length_of(buffer):
            self._skip(nbytes + 2 if nbytes >= 0 else 0)
            return False
        for piece in buffer:
            self._in.readinto(piece)
        self._skip(2)
        return True

    def pass_over(self, replies: int) -> None:
        """Read replies that nobody wants to know."""
        for _ in range(replies):
            with suppress(ErrorReply):
                self.reply()

    def _bulk(self, nbytes: int) -> bytes | None:
        if nbytes < 0:
            return None
        if nbytes > _MAX_REPLY:
            self._skip(nbytes + 2)
            return b""
        value = self._in.read(nbytes)
        self._skip(2)
        return value

    def _line(self) -> bytes:
        line = self._in.readline(_RECEIVE_BYTES)
        if not line.endswith(b"\r\n"):
            raise ErrorReply("no Redis server: its answer has no end")
        return line[:-2]

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= len(self._in.read(min(nbytes, _RECEIVE_BYTES)))


@dataclass(frozen=True, slots=True)
class Credentials:
    """How servers are reached: by whom, and over what. Its credentials are in no message, nor in its own text."""

    user: str = field(repr=False)
    password: str = field(repr=False)
    password_file: str
    tls: bool
    ca_file: str | None
    database: int
    looks_only: bool = False
    """Reads are to leave no trace: those of Redis 7.2, Valkey and later then do not count as use."""

    def connect(self, address: Address, seconds: float, *, known: bool = True) -> Connection:
        """A new connection, as our user if we are to be `known`; the password file is read again for each.

        Raises StoreError, which repeats nothing that a server makes of a password.
        """
        import redis
        from redis import RedisError
        from redis.backoff import NoBackoff
        from redis.exceptions import AuthenticationError, ResponseError
        from redis.retry import Retry

        options: dict[str, Any] = {
            "host": address[0], "port": address[1], "protocol": 2, "retry": Retry(NoBackoff(), 0),
            "socket_timeout": seconds, "socket_connect_timeout": seconds, "socket_keepalive": True,
        }  # fmt: skip
        password = self._password() if known else ""
        if password:
            options |= {"username": self.user or None, "password": password}
        if known:
            options["db"] = self.database
        if self.tls:
            options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, "ssl_ca_certs": self.ca_file}
        connection: Any = (redis.SSLConnection if self.tls else redis.Connection)(**options)
        where = f"{address[0]}:{address[1]}"
        try:
            connection.connect()
            if self.looks_only and known:
                with suppress(ResponseError):  # an older server
                    connection.send_command("CLIENT", "NO-TOUCH", "ON")
                    connection.read_response()
        except AuthenticationError:
            raise StoreError(f"{where} refuses the user or the password") from None
        except (RedisError, OSError) as error:
            message = str(error) or type(error).__name__
            for secret in filter(None, (password, self.user)):
                message = message.replace(secret, "***")
            raise StoreError(f"cannot connect to {where}: {message}") from None
        return Connection(connection)

    def _password(self) -> str:
        if not self.password_file:
            return self.password
        try:
            return Path(self.password_file).read_text().strip("\r\n")
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read the password file {self.password_file}: {type(error).__name__}") from None


class Pool:
    """Connections that are kept for the next call."""

    def __init__(self, access: Credentials) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._idle: dict[Address, list[Connection]] = defaultdict(list)
        self._closed = False

    @contextmanager
    def connection(self, address: Address, deadline: float, *, known: bool = True) -> Iterator[Connection]:
        """A connection for one batch; after an error it is ended, since nobody knows what is still to come from it."""
        connection = self._idle_one(address) if known else None
        if connection is None:
            connection = self._access.connect(address, seconds_until(deadline), known=known)
        connection.stream.deadline = deadline
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            kept = known and not self._closed and len(self._idle[address]) < _IDLE
            if kept:
                self._idle[address].append(connection)
        if not kept:
            connection.close()

    def ask(self, address: Address, deadline: float, *words: bytes, known: bool = True) -> Reply:
        """The server's reply to one command."""
        with self.connection(address, deadline, known=known) as connection:
            connection.send(*words)
            connection.flush()
            return connection.reply()

    def _idle_one(self, address: Address) -> Connection | None:
        while True:
            with self._lock:
                connection = self._idle[address].pop() if self._idle[address] else None
            if connection is None or connection.is_usable():
                return connection
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = [connection for idle in self._idle.values() for connection in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()


def seconds_until(deadline: float) -> float:
    """Raises TimeoutError if there are none left."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def length_of(pieces: Iterable[bytes | memoryview]) -> int:
    return sum(map(len, pieces))
