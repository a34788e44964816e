"""Records in Redis or Valkey: one server, a Cluster, or whatever master Sentinels name.

Owns how records become keys and values, and what a URL says of the servers. Never retries a call that failed, trusts
nothing that it reads, and unpickles nothing.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kvpact.errors import TierError
from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.redis.connections import Address, Connection, Credentials, ErrorReply, Moved, Pool, length_of
from kvpact.tiers.redis.parts import MAX_PART, MIN_PART, SPLIT_BYTES, SPLIT_MAGIC, SplitHead, cut_into_parts, stages
from kvpact.tiers.redis.servers import Cluster, OneServer, Sentinels, Servers
from kvpact.tiers.shared.store import RecordBuffer, RecordPieces, RecordStore, StoredRecord, StoreError, StoreUsage
from kvpact.tiers.urls import SCHEMES, TierURL
from kvpact.units import format_size

TIMEOUT_SECONDS: Final = 2.0
"""Until a call of the store has ended, if the URL has no `timeout`."""

PART_BYTES: Final = 64 << 20
"""Larger records are kept in parts of this size, if the URL has no `part`. A server does one thing at a time: a value
of 64 MiB keeps all others waiting for some 20 ms. The most that it takes is 512 MiB. Parts need Redis 6.2 or Valkey."""

ORPHAN_SECONDS: Final = 600
"""Parts that no record names are gone after this time: their writer died."""

_PREFIX: Final = b"kvpact:"


class RedisStore(RecordStore):
    """See `RecordStore`. Keys are `kvpact:<name>`, values are records; those larger than `part_bytes` are split.

    With `expiry` a record goes so many seconds after it was last written or read. What the server evicts or expires is
    not there, and a record that lost one of its parts neither. Each call ends `timeout` seconds after it began.
    """

    kind = "redis"

    def __init__(
        self, servers: Servers, pool: Pool, place: str, *, timeout: float, part_bytes: int, expiry: float | None
    ) -> None:
        self._servers = servers
        self._pool = pool
        self._place = place
        self._timeout = timeout
        self._part_bytes = part_bytes
        self._lifetime = None if expiry is None else b"%d" % max(1, round(expiry * 1000))

    # What stores do

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._call() as deadline:
            return [size is not None for size in self._sizes(_keys(names), deadline)]

    def size(self, name: str) -> int | None:
        with self._call() as deadline:
            return self._sizes(_keys([name]), deadline)[0]

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        found = [False] * len(names)
        heads: dict[int, SplitHead] = {}

        def ask(wire: Connection, index: int) -> None:
            # A byte more than is wanted, so that a longer record is told from one that fits without being sent whole.
            end = max(length_of(buffers[index]), SPLIT_BYTES)
            wire.send(b"GETRANGE", keys[index], b"0", b"%d" % end)
            self._prolong(wire, keys[index])

        def take(wire: Connection, index: int) -> None:
            value = wire.value_into(buffers[index], apart=SPLIT_BYTES)
            self._prolonged(wire)
            if isinstance(value, bool):
                found[index] = value
            elif (head := SplitHead.decode(value)) is not None:
                heads[index] = head
            elif len(value) == length_of(buffers[index]):
                found[index] = _copy(value, buffers[index])

        with self._call() as deadline:
            keys = _keys(names)
            self._each(keys, ask, take, deadline)
            whole = {index: head for index, head in heads.items() if head.nbytes == length_of(buffers[index])}
            for index in self._read_parts(keys, buffers, whole, deadline):
                found[index] = True
        return found

    def _read_parts(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], heads: dict[int, SplitHead], deadline: float
    ) -> set[int]:
        """Read split records; which of them were there in full."""
        whole = dict(heads)
        pieces = {index: cut_into_parts(buffers[index], head.part_bytes) for index, head in heads.items()}
        for stage in stages(whole):
            parts = [
                (index, heads[index].part(keys[index], number)[0], pieces[index][number]) for index, number in stage
            ]
            self._read_stage(parts, whole, deadline)
        return set(whole)

    def _read_stage(
        self, parts: Sequence[tuple[int, bytes, list[memoryview]]], whole: dict[int, SplitHead], deadline: float
    ) -> None:
        """Read some parts; records of which one is missing leave `whole`."""

        def ask(wire: Connection, at: int) -> None:
            _, key, pieces = parts[at]
            wire.send(b"GETRANGE", key, b"0", b"%d" % length_of(pieces))
            self._prolong(wire, key)

        def take(wire: Connection, at: int) -> None:
            index, _, pieces = parts[at]
            value = wire.value_into(pieces)
            self._prolonged(wire)
            if not value:
                whole.pop(index, None)

        self._each([key for _, key, _ in parts], ask, take, deadline)

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        with self._call() as deadline:
            keys = _keys(names)
            heads = {index: head for index, record in enumerate(records) if (head := self._split(record)) is not None}
            parts = [
                (head.part(keys[index], number)[0], pieces)
                for index, head in heads.items()
                for number, pieces in enumerate(cut_into_parts(records[index], head.part_bytes))
            ]
            self._write_parts(parts, deadline)
            outdated = self._write_heads(keys, records, heads, deadline)
            self._keep_parts([key for key, _ in parts], deadline)
            self._unlink_parts(keys, outdated, deadline)

    def _split(self, record: RecordPieces) -> SplitHead | None:
        nbytes = length_of(record)
        first = b"".join(record[:1])[:HEADER_BYTES]
        if nbytes <= self._part_bytes and not first.startswith(SPLIT_MAGIC):
            return None
        if len(first) < min(nbytes, HEADER_BYTES):
            first = b"".join(record)[:HEADER_BYTES]
        return SplitHead(os.urandom(16), nbytes, self._part_bytes, first)

    def _write_parts(self, parts: Sequence[tuple[bytes, RecordPieces]], deadline: float) -> None:
        def ask(wire: Connection, at: int) -> None:
            key, pieces = parts[at]
            wire.send(b"SET", key, pieces, b"EX", b"%d" % ORPHAN_SECONDS)

        self._each([key for key, _ in parts], ask, _take_reply, deadline)

    def _write_heads(
        self,
        keys: Sequence[bytes],
        records: Sequence[RecordPieces],
        heads: dict[int, SplitHead],
        deadline: float,
    ) -> dict[int, SplitHead]:
        """Write what stands under the records' own names; return the heads that stood there before."""
        outdated: dict[int, SplitHead] = {}
        expire = (b"PX", self._lifetime) if self._lifetime else ()

        def ask(wire: Connection, index: int) -> None:
            head = heads.get(index)
            if head is None:
                wire.send(b"SET", keys[index], records[index], *expire)
            else:
                wire.send(b"SET", keys[index], head.encode(), *expire, b"GET")

        def take(wire: Connection, index: int) -> None:
            reply = wire.reply()
            old = SplitHead.decode(reply) if index in heads and isinstance(reply, bytes) else None
            if old is not None and old.nonce != heads[index].nonce:  # asked once more, it is our own
                outdated[index] = old

        self._each(keys, ask, take, deadline)
        return outdated

    def _keep_parts(self, parts: Sequence[bytes], deadline: float) -> None:
        """Parts that a record names are no orphans any more."""

        def ask(wire: Connection, at: int) -> None:
            if self._lifetime:
                wire.send(b"PEXPIRE", parts[at], self._lifetime)
            else:
                wire.send(b"PERSIST", parts[at])

        self._each(parts, ask, _take_reply, deadline)

    def remove(self, names: Sequence[str]) -> int:
        removed = 0
        heads: dict[int, SplitHead] = {}

        def ask(wire: Connection, index: int) -> None:
            wire.send(b"GETRANGE", keys[index], b"0", b"%d" % SPLIT_BYTES)
            wire.send(b"UNLINK", keys[index])

        def take(wire: Connection, index: int) -> None:
            nonlocal removed
            head = wire.reply(lenient=True)
            removed += wire.reply() == 1
            if isinstance(head, bytes) and (split := SplitHead.decode(head)) is not None:
                heads[index] = split

        with self._call() as deadline:
            keys = _keys(names)
            self._each(keys, ask, take, deadline)
            self._unlink_parts(keys, heads, deadline)
        return removed

    def _unlink_parts(self, keys: Sequence[bytes], heads: dict[int, SplitHead], deadline: float) -> None:
        """Remove the parts of records, some at a time, as long as there are any."""
        left = dict(heads)
        for stage in stages(left):
            parts = [(index, heads[index].part(keys[index], number)[0]) for index, number in stage]
            for index in left.keys() - self._unlink(parts, deadline):
                del left[index]

    def _unlink(self, parts: Sequence[tuple[int, bytes]], deadline: float) -> set[int]:
        """Remove some parts; the records of which there were any."""
        found: set[int] = set()

        def take(wire: Connection, at: int) -> None:
            if wire.reply() == 1:
                found.add(parts[at][0])

        self._each([key for _, key in parts], lambda wire, at: wire.send(b"UNLINK", parts[at][1]), take, deadline)
        return found

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        with self._call() as deadline:
            return [
                head.first if (head := SplitHead.decode(raw or b"")) is not None else raw and raw[:HEADER_BYTES]
                for raw in self._beginnings(_keys(names), deadline)
            ]

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        pattern = _PREFIX + (f"{group}/*".encode() if group else b"*")
        seen: set[bytes] = set()  # SCAN may tell of a key twice
        with self._call() as deadline:
            servers = self._servers.all(deadline)
        for server in servers:
            cursor = b"0"
            while True:
                with self._call() as deadline:
                    cursor, page = self._scan(server, cursor, pattern, deadline)
                    keys = [key for key in page if key not in seen]
                    sizes = self._sizes(keys, deadline)
                seen.update(keys)
                for key, size in zip(keys, sizes, strict=True):
                    if size is not None:
                        yield StoredRecord(key.removeprefix(_PREFIX).decode(errors="replace"), size)
                if cursor == b"0":
                    break

    def _scan(self, server: Address, cursor: bytes, pattern: bytes, deadline: float) -> tuple[bytes, list[bytes]]:
        with self._pool.wire(server, deadline) as wire:
            wire.send(b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000")
            wire.flush()
            match wire.reply():
                case [bytes(after), list(page)]:
                    return after, [key for key in page if isinstance(key, bytes)]
                case _:
                    raise ErrorReply("SCAN answers nothing that could be understood")

    def usage(self) -> StoreUsage:
        used: list[int] = []
        capacity: list[int] = []
        with self._call() as deadline:
            for server in self._servers.all(deadline):
                with self._pool.wire(server, deadline) as wire:
                    wire.send(b"INFO", b"memory")
                    wire.flush()
                    reply = wire.reply()
                lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
                told = dict(line.split(":", 1) for line in lines if ":" in line)
                used.append(int(told.get("used_memory", 0)))
                capacity.append(int(told.get("maxmemory", 0)))
        return StoreUsage(sum(used), sum(capacity) if all(capacity) else 0)

    def close(self) -> None:
        self._pool.close()

    @property
    def place(self) -> str:
        return self._place

    # Within

    def _sizes(self, keys: Sequence[bytes], deadline: float) -> list[int | None]:
        """Each record's length; None where it is not there in full.

        0 where something of another type is. That counts as there, so that the read that does not get it removes it.
        """
        sizes: list[int | None] = [None] * len(keys)

        def take(wire: Connection, index: int) -> None:
            reply = wire.reply(lenient=True)
            sizes[index] = (reply or None) if isinstance(reply, int) else 0

        self._each(keys, lambda wire, index: wire.send(b"STRLEN", keys[index]), take, deadline)
        perhaps = [index for index, size in enumerate(sizes) if size == SPLIT_BYTES]
        heads: dict[int, SplitHead] = {}
        for index, raw in zip(perhaps, self._beginnings([keys[index] for index in perhaps], deadline), strict=True):
            if len(raw or b"") != SPLIT_BYTES:
                sizes[index] = None  # another has removed or replaced it since; it is not a record cut short
            elif (head := SplitHead.decode(raw or b"")) is not None:
                heads[index] = head
        for index, nbytes in self._split_sizes(keys, heads, deadline).items():
            sizes[index] = nbytes
        return sizes

    def _split_sizes(
        self, keys: Sequence[bytes], heads: dict[int, SplitHead], deadline: float
    ) -> dict[int, int | None]:
        """What is claimed; None where a part is missing. Nothing is asked of what is no record of this length."""
        sizes: dict[int, int | None] = {index: head.nbytes for index, head in heads.items()}
        asked = {index: head for index, head in heads.items() if self.record_bytes in (None, head.nbytes)}
        for stage in stages(asked):
            parts = [(index, *asked[index].part(keys[index], number)) for index, number in stage]
            for index in self._in_part(parts, deadline):
                sizes[index] = None
                del asked[index]
        return sizes

    def _in_part(self, parts: Sequence[tuple[int, bytes, int]], deadline: float) -> set[int]:
        """Which of the records are not there in full, by these parts."""
        missing: set[int] = set()

        def take(wire: Connection, at: int) -> None:
            index, _, nbytes = parts[at]
            if wire.reply(lenient=True) != nbytes:
                missing.add(index)

        self._each([key for _, key, _ in parts], lambda wire, at: wire.send(b"STRLEN", parts[at][1]), take, deadline)
        return missing

    def _beginnings(self, keys: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """The first bytes of what stands under each key, enough to know a split head; None where nothing is."""
        beginnings: list[bytes | None] = [None] * len(keys)

        def take(wire: Connection, index: int) -> None:
            reply = wire.reply(lenient=True)
            beginnings[index] = (reply or None) if isinstance(reply, bytes) else b""

        def ask(wire: Connection, index: int) -> None:
            wire.send(b"GETRANGE", keys[index], b"0", b"%d" % SPLIT_BYTES)

        self._each(keys, ask, take, deadline)
        return beginnings

    def _prolong(self, wire: Connection, key: bytes) -> None:
        if self._lifetime:
            wire.send(b"PEXPIRE", key, self._lifetime)

    def _prolonged(self, wire: Connection) -> None:
        if self._lifetime:
            wire.reply()

    def _each(
        self,
        keys: Sequence[bytes],
        ask: Callable[[Connection, int], None],
        take: Callable[[Connection, int], object],
        deadline: float,
    ) -> None:
        """Send what `ask` says for each key to the server that has it, then let `take` read the replies.

        Once more for keys that have moved to other servers in the meantime.
        """
        moved = self._each_once(range(len(keys)), keys, ask, take, deadline)
        if moved:
            self._servers.forget()
            if self._each_once(moved, keys, ask, take, deadline):
                raise StoreError("keys move from server to server")

    def _each_once(
        self,
        indexes: Iterable[int],
        keys: Sequence[bytes],
        ask: Callable[[Connection, int], None],
        take: Callable[[Connection, int], object],
        deadline: float,
    ) -> list[int]:
        """Which of the keys were not there any more."""
        of_server: dict[Address, list[int]] = defaultdict(list)
        for index in indexes:
            of_server[self._servers.of(keys[index], deadline)].append(index)
        moved = []
        with ExitStack() as wires:
            asked = []
            for server, its_indexes in of_server.items():
                wire = wires.enter_context(self._pool.wire(server, deadline))
                for index in its_indexes:
                    ask(wire, index)
                wire.flush()
                asked.append((wire, its_indexes, wire.unanswered // len(its_indexes)))
            for wire, its_indexes, commands in asked:
                for left in range(len(its_indexes) - 1, -1, -1):
                    try:
                        take(wire, its_indexes[-1 - left])
                    except Moved:
                        moved.append(its_indexes[-1 - left])
                        wire.pass_over(wire.unanswered - left * commands)
        return moved

    @contextmanager
    def _call(self) -> Iterator[float]:
        """The time at which a call has to have ended. What goes wrong in it becomes a StoreError."""
        try:
            yield time.monotonic() + self._timeout
        except Exception as error:
            self._servers.forget()
            match error:
                case StoreError():
                    message = str(error)
                case TimeoutError():
                    message = f"no answer within {self._timeout:g} s"
                case OSError() | ErrorReply() | ValueError():
                    message = str(error) or type(error).__name__
                case _:
                    raise
            raise StoreError(f"{self._place}: {message}") from None


def open_redis(url: TierURL, timeout: float = TIMEOUT_SECONDS, *, for_tool: bool = False) -> RedisStore:
    """The store that `url` names. Connects to nothing yet: a server that is down may be back by the first call.

    `for_tool`: reads prolong no record's life, and do not count as use where the server can be told so.

    Raises:
        TierError: redis-py is missing, or the URL says what cannot be.
    """
    try:
        import redis  # noqa: F401
    except ImportError:
        raise TierError(f"a {url.scheme} tier needs redis-py: pip install 'kvpact[redis]'") from None
    base, _, kind = url.scheme.partition("+")
    addresses = list(_addresses(url, 26379 if kind == "sentinel" else 6379))
    path = url.path.strip("/").split("/")
    service = path.pop(0) if kind == "sentinel" else ""
    database = "/".join(path) or "0"
    example = SCHEMES[url.scheme].example
    if (kind == "sentinel") != bool(service) or not (database.isascii() and database.isdecimal()):
        raise TierError(f"{url}: the path must be a database's number, like {example}")
    if kind == "cluster" and database != "0":
        raise TierError(f"{url}: a cluster has one database only, number 0; leave the path out")
    if not kind and len(addresses) > 1:
        raise TierError(f"{url}: one server, or {base}+cluster, or {base}+sentinel; like {example}")
    options = url.options
    if (ca_file := options.get("ca_file")) and not Path(ca_file).is_file():
        raise TierError(f"{url}: there is no file {ca_file}; ca_file names the certificates that sign the server's")
    if ca_file and base != "rediss":
        raise TierError(f"{url}: ca_file is for TLS; write rediss instead of redis")
    part_bytes = url.size("part", PART_BYTES)
    if not MIN_PART <= part_bytes <= MAX_PART:
        raise TierError(f"{url}: part must be from {format_size(MIN_PART)} to {format_size(MAX_PART)}")
    expiry = url.seconds("expiry", 0.0) if "expiry" in options else None
    timeout = url.seconds("timeout", timeout)
    if expiry == 0 or timeout == 0:
        raise TierError(f"{url}: a time must be more than 0; leave the option out for none")
    if for_tool:
        expiry = None
    user, _, password = url.host.rpartition("@")[0].partition(":")
    password_file = options.get("password_file", "")
    access = Credentials(unquote(user), unquote(password), password_file, base == "rediss", ca_file, int(database))
    pool = Pool(replace(access, looks_only=for_tool))
    servers: Servers
    if kind == "cluster":
        servers = Cluster(pool, addresses)
    elif kind == "sentinel":
        servers = Sentinels(pool, addresses, service)
    else:
        servers = OneServer(addresses[0])
    place = f"{url.scheme}://{url.host.rpartition('@')[2]}{url.path}"
    return RedisStore(servers, pool, place, timeout=timeout, part_bytes=part_bytes, expiry=expiry)


def _addresses(url: TierURL, port: int) -> Iterator[Address]:
    for text in url.host.rpartition("@")[2].split(","):
        try:
            parts = urlsplit(f"//{text}")
            host, its_port = parts.hostname, parts.port or port
        except ValueError:
            host = None
        if not host:
            raise TierError(f"{url}: a host and port like cache:{port} is needed")
        yield host, its_port


def _keys(names: Sequence[str]) -> list[bytes]:
    return [_PREFIX + name.encode() for name in names]


def _take_reply(wire: Connection, index: int) -> None:
    wire.reply()


def _copy(value: bytes, buffer: RecordBuffer) -> bool:
    """Copy a value into memory; whether it has that length."""
    if len(value) != length_of(buffer):
        return False
    at = 0
    for piece in buffer:
        piece[:] = value[at : at + len(piece)]
        at += len(piece)
    return True
