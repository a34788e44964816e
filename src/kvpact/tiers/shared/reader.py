"""Reads records of a shared store and lets through those that are sound and what was asked for.

Owns the checks before a block is served, and the removal of records that cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import HEADER_BYTES, BlockBuffer, RecordError, RecordHeader, RecordMac
from kvpact.tiers.record import bytes_of, run_in
from kvpact.tiers.shared.accounts import Accounts
from kvpact.tiers.shared.refuted import RefutedRuns
from kvpact.tiers.shared.store import RecordStore, StoreError, SupportsPacks, record_name


class RecordReader:
    """Reads the records of one namespace and record key. Thread-safe."""

    def __init__(
        self,
        store: RecordStore,
        namespace: bytes,
        group: str,
        seal: RecordMac,
        max_length: int,
        accounts: Accounts,
        refuted: RefutedRuns,
    ) -> None:
        """No payload has more than `max_length` bytes. `group` is the first part of the records' names.

        Records of `refuted` runs are not served.
        """
        self._store = store
        self._packs = store if isinstance(store, SupportsPacks) else None
        self._namespace = namespace
        self._group = group
        self._seal = seal
        self._max_length = max_length
        self._accounts = accounts
        self._refuted = refuted

    def header_in(self, raw: bytes) -> RecordHeader:
        """The header of a block that an engine of this tier may have stored. Raises RecordError."""
        return RecordHeader.decode(
            raw,
            namespace=self._namespace,
            length=None,
            max_length=self._max_length,
            seal=self._seal,
            refuted=self._refuted,
        )

    def read(self, keys: Sequence[BlockKey], buffers: Sequence[BlockBuffer]) -> Iterator[bool]:
        """Read block `keys[i]` into `buffers[i]`, all at once; then say of each whether it is there and sound.

        Ends at once if the store fails.
        """
        names = [record_name(self._group, key) for key in keys]
        headers = [bytearray(HEADER_BYTES) for _ in keys]
        records = [[memoryview(header), *buffer] for header, buffer in zip(headers, buffers, strict=True)]
        found: Sequence[bool] = ()
        with self._accounts.noting("read"):
            arrived = self._store.read(names, records)
            runs = {name: run_in(head) for name, head, there in zip(names, headers, arrived, strict=True) if there}
            self._refuted.ask(runs.values())
            if wrong := [name for name, run in runs.items() if run in self._refuted]:
                self._store.remove(wrong)  # all at once, so that they can be stored again
            found = arrived
            self._accounts.last_errors.clear("read")
        blocks = list(zip(found, keys, names, headers, buffers, strict=False))
        self._end_unread({name: (key, bytes_of(buffer)) for there, key, name, _, buffer in blocks if not there})
        for there, key, name, header, buffer in blocks:
            yield there and self._is_sound(key, name, header, buffer)

    def _is_sound(self, key: BlockKey, name: str, header: bytearray, buffer: BlockBuffer) -> bool:
        """Whether a record that was read may be served. If not it is removed."""
        reason = self._wrong(key, header, buffer)
        if reason and self._store.tears_reads:  # perhaps it was replaced during the read
            there = False
            with self._accounts.noting("read"):
                (there,) = self._store.read([name], [[memoryview(header), *buffer]])
            if not there:
                return False
            reason = self._wrong(key, header, buffer)
        if reason:
            self._quarantine(key, name, reason)
        return not reason

    def _wrong(self, key: BlockKey, raw: bytearray, buffer: BlockBuffer) -> str:
        """Why a record must not be served; "" if it may."""
        try:
            header = self.header_in(bytes(raw))
        except RecordError as error:
            return str(error)
        if header.key != key:
            return f"misplaced: it is block {header.key.hex()[:16]}"
        if header.length != bytes_of(buffer):
            return f"payload of {header.length} bytes, not {bytes_of(buffer)}"
        if header.digest != self._seal.payload_digest(buffer):
            return "payload does not match its checksum"
        return ""

    def _end_unread(self, unread: Mapping[str, tuple[BlockKey, int]]) -> None:
        """Remove the records that are there and were not read, except whole ones of another size: those are misses.

        `unread` has the key and the size that was asked for by name.
        """
        names = [*unread] if self._packs is None else self._packs.known([*unread])
        with suppress(StoreError):
            for name, raw in zip(names, self._store.heads(names) if names else (), strict=True):
                # Compare the length: another engine may have stored it in full after the read.
                key, wanted = unread[name]
                size = None if raw is None else self._store.size(name)
                if raw is not None and size not in (None, HEADER_BYTES + wanted) and not self._is_whole(key, raw, size):
                    self._quarantine(key, name, "has another length than a block of this engine")

    def _is_whole(self, key: BlockKey, raw: bytes, size: int | None) -> bool:
        with suppress(RecordError):
            header = self.header_in(raw)
            return header.key == key and HEADER_BYTES + header.length == size
        return False

    def _quarantine(self, key: BlockKey, name: str, reason: str) -> None:
        """Remove a record that cannot be served, so that the next write replaces it (H22)."""
        self._accounts.note_damaged(reason, f"block {key.hex()[:16]} {reason}: removed, recomputed")
        with self._accounts.noting("write"):
            self._store.remove([name])
