"""Records in Redis or Valkey: one server, a Cluster, or the master that Sentinels name.

Owns the translation of records to keys and values. Never retries a call that failed, trusts nothing that it reads, and
unpickles nothing.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import Final

from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.redis import BACKEND
from kvpact.tiers.redis.batches import Batches
from kvpact.tiers.redis.connections import Address, Connection, ErrorReply, length_of
from kvpact.tiers.redis.parts import SPLIT_BYTES, SPLIT_MAGIC, Part, SplitHead, cut_into_parts, without_missing
from kvpact.tiers.shared.store import RecordBuffer, RecordPieces, RecordStore, StoredRecord, StoreUsage, copy_into

ORPHAN_SECONDS: Final = 600
"""Parts that no record names expire after this time: their writer died."""

_PREFIX: Final = b"kvpact:"


class RedisStore(RecordStore):
    """Records in Redis. Keys are `kvpact:<name>`, values are records; those larger than `part_bytes` are split.

    With `expiry` a record expires this many seconds after its last write or read. A record that the server evicted or
    that lost one of its parts is not there. Each call ends at most `timeout` seconds after it began.
    """

    kind = BACKEND.label

    def __init__(self, batches: Batches, *, part_bytes: int, expiry: float | None) -> None:
        """Takes over `batches`."""
        self._batches = batches
        self._part_bytes = part_bytes
        self._lifetime = None if expiry is None else b"%d" % max(1, round(expiry * 1000))

    # What stores do

    def exists(self, names: Sequence[str]) -> list[bool]:
        with self._batches.call() as deadline:
            return [size is not None for size in self._sizes(_keys(names), deadline)]

    def size(self, name: str) -> int | None:
        with self._batches.call() as deadline:
            return self._sizes(_keys([name]), deadline)[0]

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        found = [False] * len(names)
        heads: dict[int, SplitHead] = {}

        def send(connection: Connection, index: int) -> None:
            # One byte more than needed, so that a longer record is recognized without being sent whole.
            end = max(length_of(buffers[index]), SPLIT_BYTES)
            connection.send(b"GETRANGE", keys[index], b"0", b"%d" % end)
            self._prolong(connection, keys[index])

        def receive(connection: Connection, index: int) -> None:
            value = connection.value_into(buffers[index], apart=SPLIT_BYTES)
            self._prolonged(connection)
            if isinstance(value, bool):
                found[index] = value
            elif (head := SplitHead.decode(value)) is not None:
                heads[index] = head
            elif value:
                found[index] = copy_into(value, buffers[index])

        with self._batches.call() as deadline:
            keys = _keys(names)
            self._batches.each(keys, send, receive, deadline, lambda index: length_of(buffers[index]))
            whole = {index: head for index, head in heads.items() if head.nbytes == length_of(buffers[index])}
            for index in self._read_parts(keys, buffers, whole, deadline):
                found[index] = True
        return found

    def _read_parts(
        self, keys: Sequence[bytes], buffers: Sequence[RecordBuffer], heads: dict[int, SplitHead], deadline: float
    ) -> Collection[int]:
        """Read split records; returns those that were there in full."""
        pieces = {index: cut_into_parts(buffers[index], head.part_bytes) for index, head in heads.items()}

        def read(parts: Sequence[Part]) -> set[int]:
            missing: set[int] = set()

            def send(connection: Connection, at: int) -> None:
                connection.send(b"GETRANGE", parts[at].key, b"0", b"%d" % parts[at].nbytes)
                self._prolong(connection, parts[at].key)

            def receive(connection: Connection, at: int) -> None:
                value = connection.value_into(pieces[parts[at].record][parts[at].number])
                self._prolonged(connection)
                if not value:
                    missing.add(parts[at].record)

            part_keys = [part.key for part in parts]
            self._batches.each(part_keys, send, receive, deadline, lambda at: parts[at].nbytes)
            return missing

        return without_missing(keys, heads, read)

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        with self._batches.call() as deadline:
            keys = _keys(names)
            heads = {index: head for index, record in enumerate(records) if (head := self._split(record)) is not None}
            parts = [
                (head.part(index, keys[index], number).key, pieces)
                for index, head in heads.items()
                for number, pieces in enumerate(cut_into_parts(records[index], head.part_bytes))
            ]
            part_keys = [key for key, _ in parts]

            def send(connection: Connection, at: int) -> None:
                connection.send(b"SET", *parts[at], b"EX", b"%d" % ORPHAN_SECONDS)

            self._batches.each(part_keys, send, lambda connection, at: connection.reply(), deadline)
            outdated = self._write_heads(keys, records, heads, deadline)
            # Parts that a record names are no longer orphans.
            kept = (b"PEXPIRE", self._lifetime) if self._lifetime else (b"PERSIST",)
            self._batches.replies(part_keys, *kept, deadline=deadline)
            self._unlink_parts(keys, outdated, deadline)

    def _split(self, record: RecordPieces) -> SplitHead | None:
        nbytes = length_of(record)
        first = b"".join(record[:1])[:HEADER_BYTES]
        if nbytes <= self._part_bytes and not first.startswith(SPLIT_MAGIC):
            return None
        if len(first) < min(nbytes, HEADER_BYTES):
            first = b"".join(record)[:HEADER_BYTES]
        return SplitHead(os.urandom(16), nbytes, self._part_bytes, first)

    def _write_heads(
        self,
        keys: Sequence[bytes],
        records: Sequence[RecordPieces],
        heads: dict[int, SplitHead],
        deadline: float,
    ) -> dict[int, SplitHead]:
        """Write the values under the records' own names; return the heads that were there before."""
        outdated: dict[int, SplitHead] = {}
        expire = (b"PX", self._lifetime) if self._lifetime else ()

        def send(connection: Connection, index: int) -> None:
            head = heads.get(index)
            if head is None:
                connection.send(b"SET", keys[index], records[index], *expire)
            else:
                connection.send(b"SET", keys[index], head.encode(), *expire, b"GET")

        def receive(connection: Connection, index: int) -> None:
            reply = connection.reply()
            old = SplitHead.decode(reply) if index in heads and isinstance(reply, bytes) else None
            if old is not None and old.nonce != heads[index].nonce:  # a repeated command finds our own head
                outdated[index] = old

        self._batches.each(keys, send, receive, deadline)
        return outdated

    def remove(self, names: Sequence[str]) -> int:
        removed = 0
        heads: dict[int, SplitHead] = {}

        def send(connection: Connection, index: int) -> None:
            connection.send(b"GETRANGE", keys[index], b"0", b"%d" % SPLIT_BYTES)
            connection.send(b"UNLINK", keys[index])

        def receive(connection: Connection, index: int) -> None:
            nonlocal removed
            head = connection.reply(lenient=True)
            removed += connection.reply() == 1
            if isinstance(head, bytes) and (split := SplitHead.decode(head)) is not None:
                heads[index] = split

        with self._batches.call() as deadline:
            keys = _keys(names)
            self._batches.each(keys, send, receive, deadline)
            self._unlink_parts(keys, heads, deadline)
        return removed

    def _unlink_parts(self, keys: Sequence[bytes], heads: dict[int, SplitHead], deadline: float) -> None:
        """Remove the parts of records, some at a time, until there are none."""

        def unlink(parts: Sequence[Part]) -> set[int]:
            replies = self._batches.replies([part.key for part in parts], b"UNLINK", deadline=deadline)
            return {part.record for part in parts} - {
                part.record for part, reply in zip(parts, replies, strict=True) if reply == 1
            }

        without_missing(keys, heads, unlink)

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        with self._batches.call() as deadline:
            return [
                head.first if (head := SplitHead.decode(raw or b"")) is not None else raw and raw[:HEADER_BYTES]
                for raw in self._beginnings(_keys(names), deadline)
            ]

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        pattern = _PREFIX + (f"{group}/*".encode() if group else b"*")
        seen: set[bytes] = set()  # SCAN may return a key twice
        with self._batches.call() as deadline:
            servers = self._batches.servers.all(deadline)
        for server in servers:
            cursor = b"0"
            while True:
                with self._batches.call() as deadline:
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
        match self._batches.pool.ask(server, deadline, b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"1000"):
            case [bytes(after), list(page)]:
                return after, [key for key in page if isinstance(key, bytes)]
            case _:
                raise ErrorReply("SCAN answers nothing that could be understood")

    def usage(self) -> StoreUsage:
        used: list[int] = []
        capacity: list[int] = []
        with self._batches.call() as deadline:
            for server in self._batches.servers.all(deadline):
                reply = self._batches.pool.ask(server, deadline, b"INFO", b"memory")
                lines = reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else []
                info = dict(line.split(":", 1) for line in lines if ":" in line)
                used.append(int(info.get("used_memory", 0)))
                capacity.append(int(info.get("maxmemory", 0)))
        return StoreUsage(sum(used), sum(capacity) if all(capacity) else 0)

    def close(self) -> None:
        self._batches.pool.close()

    @property
    def place(self) -> str:
        return self._batches.place

    # Within

    def _sizes(self, keys: Sequence[bytes], deadline: float) -> list[int | None]:
        """Each record's length; None where it is not there in full.

        0 for a key of another type. It counts as there, so that the read that cannot get it removes it.
        """
        lengths = self._batches.replies(keys, b"STRLEN", deadline=deadline, lenient=True)
        sizes = [(length or None) if isinstance(length, int) else 0 for length in lengths]
        perhaps = [index for index, size in enumerate(sizes) if size == SPLIT_BYTES]
        heads: dict[int, SplitHead] = {}
        for index, raw in zip(perhaps, self._beginnings([keys[index] for index in perhaps], deadline), strict=True):
            if len(raw or b"") != SPLIT_BYTES:
                sizes[index] = None  # removed or replaced since by another writer, not truncated
            elif (head := SplitHead.decode(raw or b"")) is not None:
                heads[index] = head

        def in_part(parts: Sequence[Part]) -> set[int]:
            found = self._batches.replies([part.key for part in parts], b"STRLEN", deadline=deadline, lenient=True)
            return {part.record for part, length in zip(parts, found, strict=True) if length != part.nbytes}

        # A head of too great a length is reported with the length that it claims; its parts are not asked for.
        most = self.record_bytes or inf
        asked = {index: head for index, head in heads.items() if head.nbytes <= most}
        whole = without_missing(keys, asked, in_part)
        for index, head in heads.items():
            sizes[index] = None if index in asked and index not in whole else head.nbytes
        return sizes

    def _beginnings(self, keys: Sequence[bytes], deadline: float) -> list[bytes | None]:
        """The first bytes of each key's value, enough to recognize a split head; None where there is no value."""
        upto = b"%d" % SPLIT_BYTES
        replies = self._batches.replies(keys, b"GETRANGE", b"0", upto, deadline=deadline, lenient=True)
        return [(reply or None) if isinstance(reply, bytes) else b"" for reply in replies]

    def _prolong(self, connection: Connection, key: bytes) -> None:
        if self._lifetime:
            connection.send(b"PEXPIRE", key, self._lifetime)

    def _prolonged(self, connection: Connection) -> None:
        if self._lifetime:
            connection.reply()


def _keys(names: Sequence[str]) -> list[bytes]:
    return [_PREFIX + name.encode() for name in names]
