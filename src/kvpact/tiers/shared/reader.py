"""Reads records of a shared store and lets through those that are sound and what was asked for.

Owns the checks before a block is served, and the removal of records that cannot be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import HEADER_BYTES, BlockBuffer, RecordError, RecordHeader, RecordMac
from kvpact.tiers.record import Block, bytes_of, run_in
from kvpact.tiers.shared.accounts import Accounts
from kvpact.tiers.shared.refuted import RefutedRuns
from kvpact.tiers.shared.store import RecordStore, StoreError, record_name


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

    def read(self, blocks: Sequence[Block], buffers: Sequence[BlockBuffer]) -> Iterator[bool]:
        """Read `blocks[i]` into `buffers[i]`, all at once; then verify each when it is asked for: whether it is sound.

        Ends at once if the store fails.
        """
        names = [record_name(self._group, block.key) for block in blocks]
        headers = [bytearray(HEADER_BYTES) for _ in blocks]
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
        for there, block, name, header, buffer in zip(found, blocks, names, headers, buffers, strict=False):
            if there:
                yield self._is_sound(block, name, header, buffer)
            else:
                self._end_unread(block, name, buffer)
                yield False

    def _is_sound(self, block: Block, name: str, header: bytearray, buffer: BlockBuffer) -> bool:
        """Whether a record that was read may be served. If not it is removed."""
        reason = self._wrong(block, header, buffer)
        if reason and self._store.tears_reads:  # perhaps it was replaced during the read
            there = False
            with self._accounts.noting("read"):
                (there,) = self._store.read([name], [[memoryview(header), *buffer]])
            if not there:
                return False
            reason = self._wrong(block, header, buffer)
        if reason:
            self._quarantine(block.key, name, reason)
        return not reason

    def _wrong(self, block: Block, raw: bytearray, buffer: BlockBuffer) -> str:
        """Why a record must not be served; "" if it may."""
        try:
            header = self.header_in(bytes(raw))
        except RecordError as error:
            return str(error)
        if header.key != block.key:
            return f"misplaced: it is block {header.key.hex()[:16]}"
        if (header.parent, header.depth) != (block.parent, block.depth):
            return f"misplaced: it says that it is number {header.depth} of its chain, and is number {block.depth}"
        if header.length != bytes_of(buffer):
            return f"payload of {header.length} bytes, not {bytes_of(buffer)}"
        if header.digest != self._seal.payload_digest(buffer):
            return "payload does not match its checksum"
        return ""

    def _end_unread(self, block: Block, name: str, buffer: BlockBuffer) -> None:
        """Remove a record that is there and was not read, unless it is a whole one of another size: that is a miss."""
        with suppress(StoreError):
            (raw,) = self._store.heads([name])
            if raw is None:
                return
            # Compare the length: another engine may have stored it in full after the read.
            size = self._store.size(name)
            if size is not None and size != HEADER_BYTES + bytes_of(buffer) and not self._is_whole(block, raw, size):
                self._quarantine(block.key, name, "has another length than a block of this engine")

    def _is_whole(self, block: Block, raw: bytes, size: int) -> bool:
        with suppress(RecordError):
            header = self.header_in(raw)
            return header.key == block.key and HEADER_BYTES + header.length == size
        return False

    def _quarantine(self, key: BlockKey, name: str, reason: str) -> None:
        """Remove a record that cannot be served, so that the next write replaces it (H22)."""
        self._accounts.note_damaged(reason, f"block {key.hex()[:16]} {reason}: removed, recomputed")
        with self._accounts.noting("write"):
            self._store.remove([name])
