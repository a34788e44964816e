"""Content and damage of a shared store: for tools and people, beside running engines.

Owns reports and the removal of named records. Knows no engine, so it accepts records of any namespace and length.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvpact.errors import DataError
from kvpact.identity.keys import Namespace
from kvpact.tiers.base import HEADER_BYTES, RecordError, RecordHeader, RecordMac, written_in_older_format
from kvpact.tiers.shared.store import NAMESPACE_RECORD, RecordStore, StoredRecord, headers_of, key_of

_MAX_LENGTH = 1 << 30
"""Bytes above the payload of any model's block; a planted record may claim more."""

_MAX_FIELDS = 64 << 10
"""Bytes of a namespace's description, which has some 1,000."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """The records of one namespace, and of one record key if they are sealed. `bytes` are those of whole records.

    `fields` is empty where the store has no description of the namespace. Ages are seconds since a block was
    written, 0 if there is none.
    """

    group: str
    fields: Mapping[str, str]
    blocks: int
    bytes: int
    oldest_age: float
    newest_age: float

    @property
    def sealed(self) -> bool:
        """True if the records carry a seal, which only engines with its key can check."""
        return "-" in self.group


@dataclass(frozen=True, slots=True)
class UnsoundRecord:
    """A record that a read refuses, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoreReport:
    """The result of reading every record. `unsealed` ones need a record key to be judged."""

    place: str
    records: int = 0
    sound: int = 0
    gone: int = 0
    unsealed: int = 0
    damaged: list[UnsoundRecord] = field(default_factory=list)


def summarize(store: RecordStore) -> list[GroupSummary]:
    """A summary of every namespace in the store, by name. Reads names and headers. Raises StoreError."""
    groups: dict[str, list[StoredRecord]] = defaultdict(list)
    for record in store.names():
        if key_of(record.name):
            groups[record.name.partition("/")[0]].append(record)
    return [_summary(store, group, blocks) for group, blocks in sorted(groups.items())]


def _summary(store: RecordStore, group: str, blocks: Sequence[StoredRecord]) -> GroupSummary:
    now = time.time()
    written = []
    for _, raw in headers_of(store, [record.name for record in blocks]):
        with suppress(RecordError):
            # The checksum of a sealed record still shows damage; its writer does not matter here.
            written.append(_peek(raw or b"").written)
    return GroupSummary(
        group=group,
        fields=_fields(store, f"{group}/{NAMESPACE_RECORD}"),
        blocks=len(blocks),
        bytes=sum(record.nbytes for record in blocks),
        oldest_age=max(0.0, now - min(written, default=now)),
        newest_age=max(0.0, now - max(written, default=now)),
    )


def _peek(raw: bytes) -> RecordHeader:
    return RecordHeader.decode(raw, namespace=None, length=None, seal=None)


def _fields(store: RecordStore, name: str) -> Mapping[str, str]:
    size = store.size(name)
    if not size or size > _MAX_FIELDS:
        return {}
    raw = bytearray(size)
    if store.read([name], [[memoryview(raw)]]) != [True]:
        return {}
    with suppress(DataError):
        return Namespace.parse(bytes(raw)).fields
    return {}


def verify_store(store: RecordStore, seal: RecordMac, progress: Callable[[int, int], object]) -> StoreReport:
    """Read every record and check it as a read by its engine would. Raises StoreError.

    Records with another seal than `seal` are counted and not judged. `progress(done, total)` is called after each one.
    """
    names = [record.name for record in store.names() if key_of(record.name)]
    records = sound = gone = unsealed = 0
    damaged: list[UnsoundRecord] = []
    for records, (name, raw) in enumerate(headers_of(store, names), 1):
        if raw is None:
            gone += 1
        elif name.partition("/")[0].partition("-")[2] != seal.name:
            unsealed += 1
        elif reason := _wrong(store, name, raw, seal):
            damaged.append(UnsoundRecord(name, reason))
        else:
            sound += 1
        progress(records, len(names))
    return StoreReport(store.place, records, sound, gone, unsealed, damaged)


def _wrong(store: RecordStore, name: str, raw: bytes, seal: RecordMac) -> str:
    """Why a record would not be served; "" if it would."""
    try:
        header = RecordHeader.decode(raw, namespace=None, length=None, seal=seal)
    except RecordError as error:
        return str(error)
    if not header.namespace.hex().startswith(name.partition("/")[0].partition("-")[0]):
        return f"of namespace {header.namespace.hex()[:16]}"
    if header.key != key_of(name):
        return f"misplaced: it is block {header.key.hex()[:16]}"
    size = store.size(name)
    if header.length > _MAX_LENGTH or (size is not None and size < HEADER_BYTES + header.length):
        return f"a payload of {header.length} bytes in a record of {size}, or replaced meanwhile"
    again = bytearray(HEADER_BYTES)
    payload = bytearray(header.length)
    if store.read([name], [[memoryview(again), memoryview(payload)]]) != [True]:
        return "cut short, or replaced meanwhile"
    if again != raw:
        return ""  # rewritten by an engine meanwhile
    if seal.payload_digest([memoryview(payload)]) != header.digest:
        return "payload does not match its checksum"
    return ""


def older(store: RecordStore, written_before: float, group: str = "") -> Iterator[str]:
    """The names of records written before a time, in seconds since 1970. Raises StoreError.

    With `group` of all of its records; without, of those that no engine will ask for again: of older formats, and of
    epochs that an engine drew for itself and did not delete when it ended.
    """
    for name, raw in headers_of(store, [record.name for record in store.names(group) if key_of(record.name)]):
        written = _written_if_unwanted(raw or b"", any_wanted=not group)
        if written is not None and written < written_before:
            yield name


def _written_if_unwanted(raw: bytes, *, any_wanted: bool) -> float | None:
    """When a record was written; None if that is unknown or, with `any_wanted`, if an engine may ask for it."""
    try:
        header = _peek(raw)
    except RecordError:
        return written_in_older_format(raw)
    return None if any_wanted and not header.epoch.is_drawn else header.written
