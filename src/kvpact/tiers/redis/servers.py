"""Map from a key to its Redis server: the only one, the master that Sentinels name, or one of a Cluster's.

Owns the map and its queries. Never moves data between servers.
"""

from __future__ import annotations

import binascii
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from kvpact.tiers.redis.connections import Address, ErrorReply, Pool, Reply
from kvpact.tiers.shared.store import StoreError

_SLOTS: Final = 16384


class Servers(ABC):
    """Map from a key to its server. A failed call drops it, and the next call asks again."""

    @abstractmethod
    def of(self, key: bytes, deadline: float) -> Address:
        """The server that has `key`."""

    def all(self, deadline: float) -> list[Address]:
        """Every server that has keys."""
        return [self.of(b"", deadline)]

    def forget(self) -> None:
        """Drop the map: it may be wrong."""


class OneServer(Servers):
    def __init__(self, address: Address) -> None:
        self._address = address

    def of(self, key: bytes, deadline: float) -> Address:
        return self._address


class _SeedNodes:
    """Servers that know the others' addresses; one that does not answer takes only its share of the time."""

    def __init__(self, pool: Pool, addresses: Sequence[Address]) -> None:
        self._pool = pool
        self._addresses = list(addresses)

    def ask(self, *words: bytes, deadline: float) -> tuple[Address, Reply]:
        """The first answer and its server, which is asked first the next time."""
        failed: Exception = TimeoutError()
        for asked, address in enumerate(addresses := list(self._addresses)):
            now = time.monotonic()
            share = now + (deadline - now) / (len(addresses) - asked)
            try:
                if (reply := self._pool.ask(address, share, *words)) is not None:
                    self._addresses = [address, *(other for other in addresses if other != address)]
                    return address, reply
            except (OSError, StoreError, ErrorReply) as error:
                failed = error
        raise failed


class Sentinels(Servers):
    """The master of one name, whose address Sentinels know. They have a `pool`, and so credentials, of their own."""

    def __init__(self, pool: Pool, addresses: Sequence[Address], name: str) -> None:
        self._seed_nodes = _SeedNodes(pool, addresses)
        self._name = name.encode()
        self._master: Address | None = None

    def of(self, key: bytes, deadline: float) -> Address:
        if (master := self._master) is None:
            try:
                _, reply = self._seed_nodes.ask(b"SENTINEL", b"get-master-addr-by-name", self._name, deadline=deadline)
            except ErrorReply as error:
                raise StoreError(f"a Sentinel says {error}; its password is sentinel_password_file's") from None
            master = self._master = _address(reply)
        return master

    def forget(self) -> None:
        self._master = None


class Cluster(Servers):
    """Masters that share the 16384 hash slots among them."""

    def __init__(self, pool: Pool, addresses: Sequence[Address]) -> None:
        self._seed_nodes = _SeedNodes(pool, addresses)
        self._slots: list[Address | None] | None = None

    def of(self, key: bytes, deadline: float) -> Address:
        address = self._table(deadline)[binascii.crc_hqx(key, 0) % _SLOTS]  # our names hold no "{": no hash tags
        if address is None:
            raise StoreError("the cluster is down: nobody serves some of its slots")
        return address

    def all(self, deadline: float) -> list[Address]:
        return sorted({address for address in self._table(deadline) if address is not None})

    def _table(self, deadline: float) -> list[Address | None]:
        if (slots := self._slots) is None:
            slots = [None] * _SLOTS
            asked, reply = self._seed_nodes.ask(b"CLUSTER", b"SLOTS", deadline=deadline)
            for entry in reply if isinstance(reply, list) else ():
                match entry:
                    case [int(first), int(last), master, *_] if 0 <= first <= last < _SLOTS:
                        host, port = _address(master)
                        slots[first : last + 1] = [(host or asked[0], port)] * (last + 1 - first)
            self._slots = slots
        return slots

    def forget(self) -> None:
        self._slots = None


def _address(reply: Reply) -> Address:
    """The address in a reply: host, port, and more."""
    match reply:
        case [bytes(host), int() | bytes() as port, *_]:
            return host.decode(errors="replace"), int(port)
        case [None, int(port), *_]:
            return "", port
        case _:
            raise ErrorReply("a server's address cannot be understood")
