"""A tier in a Mooncake store: memory that several hosts lend to a pool, which one `mooncake_master` manages.

Owns the translation of records to Mooncake's objects, and the time limit of its calls: each runs on a background thread
and is given up after the limit. Native code never sees memory of a caller.
"""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpact.errors import NoSuchTier, TierError
from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.daemon_pool import DaemonPool
from kvpact.tiers.mooncake import BACKEND
from kvpact.tiers.shared.store import (
    NAMESPACE_RECORD,
    RecordBuffer,
    RecordPieces,
    RecordStore,
    StoredRecord,
    StoreError,
    StoreUsage,
    copy_into,
    key_of,
)
from kvpact.tiers.urls import TierURL, host_and_port

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

METRICS_PORT: Final = 9003
"""The default port of `mooncake_master` for metrics."""

SEGMENT_BYTES: Final = 1 << 30
"""Memory that this engine lends to the pool, unless the URL sets it; records there are lost with the engine."""

BUFFER_BYTES: Final = 256 << 20
"""Bytes of memory for the records that the client moves: several groups of `GROUP_BYTES` at once."""

TIMEOUT_SECONDS: Final = 2.0

GIVEN_UP_CALLS: Final = 8
"""Maximum number of running calls, given up or not; while there are as many, no other one begins."""

_NOT_THERE: Final = -704
_NOT_READY: Final = -703
"""The master's code for an object whose write is under way: it can be neither read nor removed yet."""

_REASONS: Final = {
    -900: "the master does not answer",
    -901: "the master does not answer in time",
    -600: "the record is larger than the client's buffer; give the URL a larger buffer",
    -200: "no room in the pool",
    _NOT_READY: "a record is being written",
}


class MooncakeStore(RecordStore):
    """Records in a Mooncake pool: one object `<prefix>/<name>` each, with the master's default number of replicas.

    **Time.** Mooncake limits its calls itself, but late: to 4 s if the master is dead, 15 to 30 s if stuck. So each
    call runs on a background thread and is given up after `timeout`; data goes through memory that belongs to the call,
    and only the caller copies it to its own. While `GIVEN_UP_CALLS` are running, no other one begins.

    **Leases.** Mooncake keeps an object for 10 s after a read by default. Nothing relies on that: `remove` ignores
    leases, and the memory may hold another record before a read has ended.

    **Listing.** Clients cannot list objects; the master's metrics port can (`metrics`, 9003 by default). Without it
    `names` fails, `usage` is unknown, and all else works, `clear` included.
    """

    kind = BACKEND.label
    tears_reads = True

    def __init__(
        self,
        client: Any,
        master: tuple[str, int],
        *,
        prefix: str = "",
        timeout: float = TIMEOUT_SECONDS,
        metrics_port: int = METRICS_PORT,
    ) -> None:
        """`client` is a `MooncakeDistributedStore` that has been set up; it is closed with the store."""
        self.client = client
        """Mooncake's client."""
        self.master = master
        self._prefix = f"{prefix}/" if prefix else ""
        self._timeout = timeout
        self.metrics_port = metrics_port
        self._closed = False
        self._pool = DaemonPool("kvpact-mooncake-call", GIVEN_UP_CALLS)

    @property
    def place(self) -> str:
        return f"mooncake://{host_and_port(*self.master)}/{self._prefix}".rstrip("/")

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [code == 1 for code in self._look(self._keys(names))]

    def _look(self, keys: list[str]) -> list[int]:
        codes: list[int] = self.call("look up", lambda: self.client.batch_is_exist(keys)) if keys else []
        self._require("look up", codes)
        return codes

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        lengths = [sum(piece.nbytes for piece in buffer) for buffer in buffers]
        sizes = self._sizes(self._keys(names))
        # Objects of another length are not read: the client copies a whole object into its memory (P14).
        fitting = [at for at, (size, length) in enumerate(zip(sizes, lengths, strict=True)) if size == length]
        keys = self._keys([names[at] for at in fitting])
        objects = self.call("read", lambda: self.client.batch_get_buffer(keys)) if keys else []
        found = [False] * len(names)
        for at, arrived in zip(fitting, objects, strict=True):
            found[at] = arrived is not None and copy_into(arrived, buffers[at])
        # The client returns None for any error; only the master knows which of them are no failure.
        missing = [key for key, arrived in zip(keys, objects, strict=True) if arrived is None]
        if all(self._look(missing)) and missing and len(missing) == len(names):
            raise StoreError(
                f"cannot read in {self.place}: {len(missing)} records are there and do not arrive; their host is gone, "
                f"or the client's buffer is too small for them"
            )
        return found

    def _sizes(self, keys: list[str]) -> list[int]:
        """Each object's length in bytes; below 0 for one that is not there."""
        sizes: list[int] = self.call("look up", lambda: [self.client.get_size(key) for key in keys]) if keys else []
        self._require("look up", [size for size in sizes if size not in (_NOT_THERE, _NOT_READY)])
        return sizes

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        keys = self._keys(names)
        values = [_joined(pieces) for pieces in records]  # copies, because the call may outlast the caller's timeout
        # A put of an existing object changes nothing and reports success.
        there = [key for key, code in zip(keys, self._look(keys), strict=True) if code == 1]
        if there:
            self._drop(there)
        if keys:
            self._require("write", [self.call("write", lambda: self.client.put_batch(keys, values))])

    def remove(self, names: Sequence[str]) -> int:
        return self._drop(self._keys(names)) if names else 0

    def _drop(self, keys: list[str]) -> int:
        codes = self.call("remove", lambda: self.client.batch_remove(keys, True))
        self._require("remove", [code for code in codes if code != _NOT_THERE])
        return sum(code == 0 for code in codes)

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        """Headers of records. Reads each record in full, one after another: for tools, not for engines.

        Returns b"" without a read for a record that is longer than `record_bytes`.
        """
        keys = self._keys(names)
        return [self._head(key, size) for key, size in zip(keys, self._sizes(keys), strict=True)]

    def _head(self, key: str, size: int) -> bytes | None:
        if size < 0:
            return None
        if self.record_bytes is not None and size > self.record_bytes:
            return b""
        found = self.call("read", lambda: self.client.get_buffer(key))
        if found is None:
            self._look([key])
            return None
        return bytes(memoryview(found)[:HEADER_BYTES])

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        """Records of unknown size. Raises StoreError if the master's metrics port does not answer."""
        prefix = f"{self._prefix}{group}/" if group else self._prefix
        for key in self.ask_master("/get_all_keys").splitlines():
            name = key[len(self._prefix) :]
            if key.startswith(prefix) and (key_of(name) or name.endswith(f"/{NAMESPACE_RECORD}")):
                yield StoredRecord(name, 0)

    def clear(self, group: str) -> None:
        pattern = f"^{self._prefix}{group}/"
        self._require("clear", [self.call("clear", lambda: self.client.remove_by_regex(pattern, True))])

    def size(self, name: str) -> int | None:
        (size,) = self._sizes(self._keys([name]))
        return None if size < 0 else size

    def usage(self) -> StoreUsage:
        """Usage of the whole pool by all its users."""
        with suppress(StoreError, LookupError, ValueError, ArithmeticError):
            numbers = dict(line.rsplit(" ", 1) for line in self.ask_master("/metrics").splitlines() if " " in line)
            used = numbers["master_allocated_bytes"]
            return StoreUsage(int(float(used)), int(float(numbers["master_total_capacity_bytes"])))
        return StoreUsage()

    def close(self) -> None:
        """Close the client, on a background thread that waits for given-up calls first.

        That holds the interpreter's lock for a second.
        """
        if not self._closed:
            self._closed = True
            closing = threading.Thread(target=self._close_client, name="kvpact-mooncake-close", daemon=True)
            closing.start()
            closing.join(self._timeout)

    def _close_client(self) -> None:
        self._pool.close()
        self._pool.wait_closed()
        with suppress(Exception):
            self.client.close()

    # Within

    def _keys(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names]

    def call(self, what: str, function: Callable[[], Result]) -> Result:
        """Result of `function`. Raises StoreError if it raises, or does not return in time, while it runs on."""
        try:
            answer = self._pool.submit(function)
            return answer.result(self._timeout)
        except TimeoutError:
            never_began = answer.cancel()
            too_many = f"{GIVEN_UP_CALLS} calls have not ended; is the master well?"
            reason = too_many if never_began else f"no answer within {self._timeout:g} s"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        raise StoreError(f"cannot {what} in {self.place}: {reason}")

    def _require(self, what: str, codes: Sequence[int]) -> None:
        worst = min(codes, default=0)
        if worst < 0:
            raise StoreError(f"cannot {what} in {self.place}: {_REASONS.get(worst, f'Mooncake says {worst}')}")

    def ask_master(self, path: str) -> str:
        """The answer of the master's metrics port at `path`. Raises StoreError."""
        connection = http.client.HTTPConnection(self.master[0], self.metrics_port, timeout=self._timeout)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
            if response.status != http.client.OK:
                raise StoreError(f"cannot list {self.place}: its master answers {response.status} to {path}")
            return text
        except (OSError, http.client.HTTPException) as error:
            where = host_and_port(self.master[0], self.metrics_port)
            raise StoreError(
                f"cannot list {self.place}: the master's metrics port {where} does not answer "
                f"({error}); name the right one with ?metrics=PORT"
            ) from None
        finally:
            connection.close()


def open_mooncake(url: TierURL, *, for_tool: bool = False) -> MooncakeStore:
    """The pool of the master at a `mooncake://` URL, with this process as one of its members, which lends memory.

    With `for_tool` it lends none, so that no record is stored here and lost with the tool.

    The URL's path, if any, is the prefix of all names, so that a pool can be shared. The client's set-up holds the
    interpreter's lock for some 50 ms.

    Raises:
        NoSuchTier: the package is missing, or the URL is impossible.
        TierError: there is no master, or its client cannot be set up.
    """
    [(host, port)] = url.addresses
    prefix = url.path.strip("/")
    library = _library()
    master = host_and_port(host, port)
    timeout = url.seconds("timeout", TIMEOUT_SECONDS)
    try:
        # Checked first, because `setup` would try for 90 s with the interpreter's lock held.
        with socket.create_connection((host, port), timeout=timeout) as connection:
            own_host = connection.getsockname()[0]
    except OSError as error:
        raise TierError(
            f"mooncake tier: no master answers at {master} ({error.strerror or error}); start mooncake_master "
            f"there, or correct the URL"
        ) from None
    client = library.MooncakeDistributedStore()
    code = client.setup(
        url.options.get("hostname", own_host),
        url.options.get("metadata_server", "P2PHANDSHAKE"),
        0 if for_tool else url.size("segment", SEGMENT_BYTES),
        url.size("buffer", BUFFER_BYTES),
        url.options.get("protocol", "tcp"),
        url.options.get("device", ""),
        master,
    )
    if code:
        raise TierError(
            f"mooncake tier: the client of {master} cannot be set up ({code}; why stands on standard error): is "
            f"there memory for segment and buffer, and are protocol and device right?"
        )
    logger.warning(
        "kvpact: Mooncake's client takes connections on all interfaces of this host, without authentication, and no "
        "setting changes that: let a firewall admit the pool's hosts only; a record_key_file keeps out planted KV"
    )
    metrics_port = int(url.options.get("metrics", METRICS_PORT))
    return MooncakeStore(client, (host, port), prefix=prefix, timeout=timeout, metrics_port=metrics_port)


def _library() -> Any:
    try:
        return import_module("mooncake.store")
    except ModuleNotFoundError:
        raise NoSuchTier(
            "mooncake tier: the package is not installed: pip install 'kvpact[mooncake]', or mooncake-transfer-engine "
            "on a machine with CUDA"
        ) from None
    except ImportError as error:
        raise NoSuchTier(
            f"mooncake tier: its library cannot be loaded: {error}; on Debian, apt-get install libibverbs1"
        ) from None


def _joined(pieces: RecordPieces) -> NDArray[np.uint8]:
    """A copy of a record in one piece. Made without the interpreter's lock, which `bytes.join` would hold."""
    sources = [np.frombuffer(piece, np.uint8) for piece in pieces]
    copied = np.empty(sum(source.nbytes for source in sources), np.uint8)
    np.concatenate(sources, out=copied)
    return copied
