"""Framing of one stored block, and verification of records.

Owns the 256-byte header that goes before (or, in a slab, beside) every stored payload. Never does I/O.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from kvpact.errors import DataError, PactViolation
from kvpact.identity.epochs import FIRST_EPOCH, Epoch
from kvpact.identity.keys import KEY_BYTES, BlockKey

BlockBuffer: TypeAlias = Sequence[memoryview]
"""The memory of one block: a contiguous byte view for each rank, in rank order; together the block's size."""

RECORD_MAGIC = b"kvpactRC"
RECORD_FORMAT = 3
"""Raised when the header or the meaning of the payload changes; records of another format are never served."""

HEADER_BYTES = 256
NO_SLOT = 2**64 - 1
"""The position of a record that has none, because its store finds it by key."""

_FIELDS = struct.Struct("<8sIIQQdd32s32s32s16s16s16s")
FIELDS = np.dtype(
    [
        ("magic", "<u8"), ("version", "<u4"), ("depth", "<u4"), ("slot", "<u8"), ("length", "<u8"), ("written", "<f8"),
        ("used", "<f8"), ("namespace", "<u8", 4), ("key", "<u8", 4), ("parent", "<u8", 4), ("digest", "V16"),
        ("epoch", "V16"), ("run", "<u8", 2), ("seal", "<u8", 4), ("unused", "V24"), ("checksum", "<u8"),
    ]
)  # fmt: skip
"""A header as `RecordHeader.encode` writes it, for arrays of them; keys as four numbers, no parent as zeros."""

_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size
GROUP_BYTES = 16 << 20
"""Payload of one call of a store, or of one turn of a thread that reads or writes a slab: large enough for a store's
batches, small enough to end early at a deadline. Headers do not count, so that a read of as many bytes into the arena
is one call. On two cores with ten busy threads, groups of 8, 16 and 32 MiB reached 0.80, 0.89 and 0.86 of the speed of
one plain read of 128 MiB from a slab."""

_AT_ONCE = 1024
"""Headers whose checksums are computed together: as many as stay in the processor's cache."""

_checksum_of = xxhash.xxh3_64_intdigest

_EMPTY = bytes(HEADER_BYTES)
_ROOT_PARENT = bytes(KEY_BYTES)

RUN_BYTES = 16
NO_RUN = bytes(RUN_BYTES)
"""The run of a record that no engine wrote: one that a test or a tool made."""

_SEAL_BYTES = 32
_SEAL_AT = _FIELDS.size
_RUN_AT = _SEAL_AT - RUN_BYTES
_NO_SEAL = bytes(_SEAL_BYTES)


def new_run() -> bytes:
    """Name of all records that one engine writes to a tier from its opening on, so that they can be refused later."""
    return os.urandom(RUN_BYTES)


class RecordError(DataError):
    """Stored bytes are not the expected record; the message says why. Always a miss, never served."""


class RecordMac:
    """The checksum of a record and, with a key, the proof that an engine with the key wrote it.

    Without a key payloads carry xxh3-128, which finds damage but no forgery. With one, payloads and headers carry keyed
    BLAKE3, so a writer without the key cannot plant a record (H80).
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None = None) -> None:
        """`key` has 32 bytes."""
        self._key = key

    @classmethod
    def from_secret(cls, secret: bytes) -> RecordMac:
        """With a key derived from the content of a key file. Raises ValueError for less than 16 bytes."""
        if len(secret) < 16:
            raise ValueError(f"a record key has 16 bytes or more, not {len(secret)}")
        return cls(blake3(secret, derive_key_context="kvpact 2026-11 record seal").digest())

    @property
    def name(self) -> str:
        """ "" without a key, else 8 hex digits that tell keys apart and say nothing of them."""
        return blake3(b"name", key=self._key).hexdigest()[:8] if self._key else ""

    def payload_digest(self, buffer: BlockBuffer) -> bytes:
        """16 bytes over a block's bytes, its pieces taken in rank order. Runs without the interpreter's lock."""
        if self._key is None:
            return payload_digest(buffer)
        state = blake3(key=self._key)
        for piece in buffer:
            state.update(piece)
        return state.digest(16)

    def of_header(self, fields: bytes | memoryview) -> bytes:
        """32 bytes over a header's fields; zeros without a key."""
        return blake3(fields, key=self._key).digest() if self._key else _NO_SEAL


UNSEALED = RecordMac()
"""Damage is found, forgery is not: for stores that nobody else writes to."""


def bytes_of(buffer: BlockBuffer) -> int:
    """The size of a block's buffer in bytes."""
    return sum(piece.nbytes for piece in buffer)


def groups_of(buffers: Sequence[BlockBuffer]) -> Iterator[tuple[int, int]]:
    """`buffers` as ranges (first, end), in order, of at most `GROUP_BYTES` or one block each."""
    first = nbytes = 0
    for index, buffer in enumerate(buffers):
        size = max(HEADER_BYTES, bytes_of(buffer))
        if nbytes and nbytes + size > GROUP_BYTES:
            yield first, index
            first = index
            nbytes = 0
        nbytes += size
    if nbytes:
        yield first, len(buffers)


def require_at_most(buffers: Sequence[BlockBuffer], nbytes: int, whose: str) -> None:
    """Raise PactViolation if a buffer has more than `nbytes`, the size of `whose`: "a slot of FILE has"."""
    for buffer in buffers:
        if (size := bytes_of(buffer)) > nbytes:
            raise PactViolation(f"a block's buffer has {size} bytes; {whose} {nbytes}")


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Description of one stored block, readable without its payload.

    `parent` is the key of the block without which it is of no use, b"" for none. `depth` is its number in its prompt,
    with a parent at least 1.
    `length` is the payload's size in bytes and `digest` 16 bytes over it, by the record's seal. Times are seconds since
    1970. `epoch` says of which weights the block is (`kvpact.identity.epochs`), as its key does, and `run` which
    opening of a tier wrote it. `slot` is the record's position in its slab, so that a header found at another position
    is known to be misplaced.
    """

    namespace: bytes
    key: BlockKey
    parent: BlockKey
    depth: int
    length: int
    digest: bytes
    written: float
    used: float
    slot: int = NO_SLOT
    epoch: Epoch = FIRST_EPOCH
    run: bytes = NO_RUN

    def encode(self, seal: RecordMac = UNSEALED) -> bytes:
        """The header as `HEADER_BYTES` bytes, little endian: fields, seal, and last the xxh3-64 of all before."""
        fields = _FIELDS.pack(
            RECORD_MAGIC,
            RECORD_FORMAT,
            self.depth,
            self.slot,
            self.length,
            self.written,
            self.used,
            self.namespace,
            self.key,
            self.parent or _ROOT_PARENT,
            self.digest,
            self.epoch.value,
            self.run,
        )
        fields = (fields + seal.of_header(fields)).ljust(_CHECKED_BYTES, b"\0")
        return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))

    @classmethod
    def decode(
        cls,
        raw: bytes | memoryview,
        *,
        namespace: bytes | None,
        length: int | None,
        max_length: int | None = None,
        slot: int = NO_SLOT,
        seal: RecordMac | None = UNSEALED,
        refuted: Container[bytes] = (),
    ) -> RecordHeader:
        """The header in `raw`, if it is valid and belongs to this `namespace`, payload `length`, `slot` and `seal`.

        None accepts any namespace, length or seal, for tools outside an engine. A payload has at most `max_length`
        bytes. Records of `refuted` runs are not accepted.

        Raises:
            RecordError: names the first field that is wrong.
        """
        if len(raw) != HEADER_BYTES:
            raise RecordError(f"a record header has {HEADER_BYTES} bytes, not {len(raw)}")
        magic, version, depth, its_slot, its_length, written, used, its_namespace, key, parent, digest, epoch, run = (
            _FIELDS.unpack_from(raw)
        )
        if magic != RECORD_MAGIC:
            raise RecordError(f"not a record: it starts with {magic!r}, not {RECORD_MAGIC!r}")
        if version != RECORD_FORMAT:
            raise RecordError(f"record format {version}; this release reads format {RECORD_FORMAT}")
        if xxhash.xxh3_64_intdigest(raw[:_CHECKED_BYTES]) != _CHECKSUM.unpack_from(raw, _CHECKED_BYTES)[0]:
            raise RecordError("header damaged: its checksum does not match")
        if seal is not None and raw[_SEAL_AT : _SEAL_AT + _SEAL_BYTES] != seal.of_header(raw[:_SEAL_AT]):
            raise RecordError("not sealed with this record key; give all engines of the store the same record_key_file")
        if namespace is not None and its_namespace != namespace:
            raise RecordError(f"of namespace {its_namespace.hex()[:16]}, not {namespace.hex()[:16]}")
        if its_slot != slot:
            raise RecordError(f"misplaced: written for slot {its_slot}, found in slot {slot}")
        if length is not None and its_length != length:
            raise RecordError(f"payload of {its_length} bytes, not {length}")
        if max_length is not None and its_length > max_length:
            raise RecordError(f"payload of {its_length} bytes; the largest has {max_length}")
        if run in refuted:
            raise RecordError("written by an engine that later found its copies of KV to be wrong")
        before = b"" if parent == _ROOT_PARENT else parent
        if before and depth == 0:
            raise RecordError(f"depth 0 does not fit its parent {parent.hex()[:16]}")
        return cls(its_namespace, key, before, depth, its_length, digest, written, used, its_slot, Epoch(epoch), run)


def valid_in_slab(
    headers: np.ndarray,
    namespace: bytes,
    max_length: int,
    slots: NDArray[np.int64],
    refuted: Collection[bytes] = (),
) -> NDArray[np.bool_]:
    """True for each of the `headers`, a contiguous array of `FIELDS` found in `slots`, that `RecordHeader.decode`
    accepts: without a seal, of this namespace, with a payload of at most `max_length` bytes, in its own slot, and of no
    `refuted` run. 0.25 us for each.
    """
    valid: NDArray[np.bool_] = (
        (headers["magic"] == np.frombuffer(RECORD_MAGIC, "<u8"))
        & (headers["version"] == RECORD_FORMAT)
        & (headers["slot"] == slots.astype(np.uint64))
        & (headers["length"] <= max_length)
        & (headers["namespace"] == np.frombuffer(namespace, "<u8")).all(axis=1)
        & ((headers["depth"] != 0) | ~headers["parent"].any(axis=1))
        & ~headers["seal"].any(axis=1)
    )
    for run in refuted:
        valid &= (headers["run"] != np.frombuffer(run, "<u8")).any(axis=1)
    if valid.any():
        checked = np.ndarray(len(headers), f"V{_CHECKED_BYTES}", headers, 0, (HEADER_BYTES,))
        for first in range(0, len(headers), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            pieces = checked[part].tolist()
            valid[part] &= headers["checksum"][part] == np.fromiter(map(_checksum_of, pieces), np.uint64, len(pieces))
    return valid


def written_in_older_format(raw: bytes | memoryview) -> float | None:
    """When a record of an older format was written, in seconds since 1970; None if `raw` is no header of one.

    No engine of this release or a later one asks for it. What a newer release wrote is not judged.
    """
    if (
        len(raw) != HEADER_BYTES
        or xxhash.xxh3_64_intdigest(raw[:_CHECKED_BYTES]) != _CHECKSUM.unpack_from(raw, _CHECKED_BYTES)[0]
    ):
        return None
    magic, version, _, _, _, written, *_ = _FIELDS.unpack_from(raw)  # at the same places in all formats up to this one
    return float(written) if magic == RECORD_MAGIC and version < RECORD_FORMAT else None


def run_in(raw: bytes | bytearray) -> bytes:
    """The run that wrote the record with this header. Nothing is verified."""
    return bytes(raw[_RUN_AT : _RUN_AT + RUN_BYTES])


def is_empty_header(raw: bytes | memoryview) -> bool:
    """True if `raw` is the header of a position that holds no record."""
    return raw == _EMPTY


def payload_digest(buffer: BlockBuffer) -> bytes:
    """The xxh3-128 of a block's bytes, its pieces taken in rank order. Runs without the interpreter's lock."""
    if len(buffer) == 1:
        return xxhash.xxh3_128_digest(buffer[0])
    state = xxhash.xxh3_128()
    for piece in buffer:
        state.update(piece)
    return state.digest()
