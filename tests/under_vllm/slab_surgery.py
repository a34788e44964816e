"""Damage to a slab file by somebody who knows the format: for tests that show that none of it is ever served."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engines import BLOCK
from kvpact.identity.keys import BlockKey, BlockKeys, Namespace, RequestIdentity
from kvpact.tiers.base import HEADER_BYTES, RecordError, RecordHeader
from kvpact.tiers.disk.superblock import PAGE_BYTES, Superblock


class SlabSurgery:
    """One slab, read whole; changes are written back by `write`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = bytearray(path.read_bytes())
        self._superblock = Superblock.decode(bytes(self._raw[:PAGE_BYTES]), path)
        self._slots = self._read_slots()

    def _read_slots(self) -> dict[BlockKey, int]:
        found = {}
        for slot in range(self._superblock.slots_in(len(self._raw))):
            at = PAGE_BYTES + slot * HEADER_BYTES
            try:
                header = RecordHeader.decode(
                    bytes(self._raw[at : at + HEADER_BYTES]),
                    namespace=self._superblock.namespace.digest,
                    length=self._superblock.slot_bytes,
                    slot=slot,
                )
            except RecordError:
                continue
            found[header.key] = slot
        return found

    @property
    def keys_namespace(self) -> bytes:
        """The namespace in the root of the block keys: without the weights, which may be told after the first keys."""
        fields = self._superblock.namespace.fields
        return Namespace({name: value for name, value in fields.items() if name != "weights"}).digest

    def payload(self, key: BlockKey) -> bytes | None:
        """A block's bytes, None if the slab does not hold it."""
        return bytes(self._raw[self._payload(self._slots[key])]) if key in self._slots else None

    def slot(self, tokens: Sequence[int], block: int) -> int:
        """Where block `block` of a prompt lies."""
        keys = BlockKeys(self.keys_namespace, BLOCK, RequestIdentity()).extend(tokens)
        return self._slots[keys[block]]

    def _payload(self, slot: int) -> slice:
        start = self._superblock.file_bytes(slot)
        return slice(start, start + self._superblock.slot_bytes)

    def flip_payload_bit(self, tokens: Sequence[int], block: int) -> None:
        """One bit in the middle of a block's bytes."""
        self._raw[self._payload(self.slot(tokens, block)).start + self._superblock.slot_bytes // 2] ^= 0x01

    def flip_bytes_of_all(self, count: int) -> int:
        """`count` bytes in the middle of each block; returns how many blocks there are."""
        for slot in self._slots.values():
            start = self._payload(slot).start + self._superblock.slot_bytes // 2
            self._raw[start : start + count] = bytes(byte ^ 0xFF for byte in self._raw[start : start + count])
        return len(self._slots)

    def flip_header_bit(self, tokens: Sequence[int], block: int) -> None:
        """One bit of the record that describes a block."""
        self._raw[PAGE_BYTES + self.slot(tokens, block) * HEADER_BYTES + 40] ^= 0x01

    def fill_with_garbage(self, tokens: Sequence[int], block: int) -> None:
        """Other bytes of the same size."""
        self._raw[self._payload(self.slot(tokens, block))] = os.urandom(self._superblock.slot_bytes)

    def swap_payloads(self, one: tuple[Sequence[int], int], other: tuple[Sequence[int], int]) -> None:
        """Each of two blocks in the other's place."""
        first, second = self._payload(self.slot(*one)), self._payload(self.slot(*other))
        self._raw[first], self._raw[second] = self._raw[second], self._raw[first]

    def cut_before(self, tokens: Sequence[int], block: int) -> set[BlockKey]:
        """End the file in the middle of a block; returns the keys of all blocks that are lost by it."""
        slot = self.slot(tokens, block)
        del self._raw[self._payload(slot).start + self._superblock.slot_bytes // 2 :]
        return {key for key, its_slot in self._slots.items() if its_slot >= slot}

    def prefix_without(self, tokens: Sequence[int], lost: set[BlockKey]) -> int:
        """How many blocks of a prompt come before the first one in `lost`, of those that the slab holds."""
        keys = BlockKeys(self.keys_namespace, BLOCK, RequestIdentity()).extend(tokens)
        return next((block for block, key in enumerate(keys) if key in lost or key not in self._slots), len(keys))

    def key(self, tokens: Sequence[int], block: int) -> BlockKey:
        """The key of a prompt's block."""
        return BlockKeys(self.keys_namespace, BLOCK, RequestIdentity()).extend(tokens)[block]

    def write(self) -> None:
        """Put the changed bytes on disk."""
        self._path.write_bytes(self._raw)
