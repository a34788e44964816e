"""The tier of object stores: S3 and what speaks its language, Google Cloud Storage, Azure, and a directory.

Owns how records are found and kept in packs: blocks that are written together are one object, a block of it is a range
of bytes. Expires nothing: how long objects stay is for the bucket's own lifecycle rules, and what they took is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby, takewhile
from typing import Final

from kvpact.tiers.base import HEADER_BYTES
from kvpact.tiers.objects import BACKEND
from kvpact.tiers.objects.bucket import Bucket, ObjectChanged, Part, open_bucket
from kvpact.tiers.objects.packs import (
    Pack,
    PackError,
    PackMemory,
    Span,
    decode_pack,
    encode_pack,
    spans,
    table_size,
)
from kvpact.tiers.shared.store import (
    RecordBuffer,
    RecordPieces,
    RecordStore,
    StoredRecord,
    StoreError,
    StoreUsage,
    copy_into,
    key_of,
)
from kvpact.tiers.shared.tier import GROUP_BYTES
from kvpact.tiers.urls import TierURL

FIRST_READ_BYTES: Final = 16 << 10
"""Read of an object to learn what is in it: a table of 200 blocks, in one request."""

GAP_BYTES: Final = 128 << 10
"""Bytes that are read for nothing rather than asking again: a request takes as long as some megabytes do."""

MAX_KEPT_BYTES: Final = 4 * GROUP_BYTES
"""What is kept of an object when a record is taken out of it or added: more than any of ours has, if it has several."""

CHANGE_REQUESTS: Final = 5
"""To replace an object: its table, in one or two, what it keeps, in one or two, and the new one."""

TRIES: Final = 8
"""How often an object may change under our hands before a write is given up."""


class ObjectStore(RecordStore):
    """See `RecordStore`. Records that one call of `write` is given become one object, named after the first.

    A record inside a pack is found by the records before it, from a prompt's first: `locate` and `exists` read tables
    on the way, and what they saw is remembered. So behind a record that is missing others are found only as far as
    they are known, and one that is there may be written once more. A name stands for its content: a record that is
    there is not replaced but by one that was removed before.
    """

    kind = BACKEND.label

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.memory = PackMemory()

    # Finding

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = self._find(names)
        return [name in found for name in names]

    def locate(self, names: Sequence[str]) -> None:
        """Learn where records are: `names` are a prompt's, from its first block on."""
        if len(self.memory.locate(names)) < len(names):
            self._find(names)

    def _find(self, names: Sequence[str], *, past_holes: bool = False) -> dict[str, Pack]:
        """The packs that hold these records now, up to the first that is missing, or of all.

        Each round asks for the pack that holds the next record, and at once for those that should come after it: packs
        that are remembered, and those that begin where one of the last one's length would end.
        """
        found: dict[str, Pack] = {}
        asked: set[str] = set()
        length = 0
        for at, name in enumerate(names):
            if name in found:
                continue
            wanted = [pack for pack in (*self.memory.holders(name), name) if pack not in asked]
            if wanted:
                wanted = self._with_likely(wanted, names[at + 1 :], length, asked)
                asked.update(wanted)
                for pack in self._tables(wanted):
                    if pack is not None:
                        found |= {record: pack for record in pack.records if record not in found}
            if name in found:
                length = len(found[name].records)
            elif not past_holes:
                break
        return found

    def _with_likely(self, wanted: list[str], names: Sequence[str], length: int, asked: set[str]) -> list[str]:
        likely = dict.fromkeys(wanted)
        for behind, name in enumerate(names, start=1):
            if len(likely) >= self.bucket.concurrency:
                break
            if holders := self.memory.holders(name):
                likely.update(dict.fromkeys(holders[:1]))
            elif length and behind % length == 0:
                likely[name] = None
        return [pack for pack in likely if pack not in asked]

    def _tables(self, names: Sequence[str]) -> list[Pack | None]:
        return self.bucket.each(self._table, names, requests=2)

    def _table(self, name: str) -> Pack | None:
        """What an object holds: nothing, if it is damaged; None if there is no such object."""
        part = self.bucket.get(name, 0, FIRST_READ_BYTES)
        try:
            if part is not None and (end := self._table_end(part)) > FIRST_READ_BYTES:
                part = self.bucket.get(name, 0, end, part.version)
            if part is not None:
                pack = decode_pack(name, part.data, part.object_bytes, part.version)
                self.memory.learn(pack)
                return pack
        except ObjectChanged:
            part = None  # a moment ago it was there, so it is on the next look
        except PackError:
            pass
        self.memory.forget(name)
        return None if part is None else Pack(name, {}, part.version)

    def _table_end(self, part: Part) -> int:
        """Where the table of an object ends. Raises PackError for one that is large, and for more than there is."""
        count, end = table_size(part.data)
        if end > FIRST_READ_BYTES and end + count * (self.record_bytes or 0) > part.object_bytes:
            raise PackError(f"{count} records do not fit into {part.object_bytes} bytes")
        return end

    # Reading

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        wanted = dict(zip(names, buffers, strict=True))

        def fits(name: str, pack: Pack) -> bool:
            return pack.records[name][1] == sum(piece.nbytes for piece in wanted[name])

        arrived = self._load(names, fits, head=None, gap=GAP_BYTES)
        return [name in arrived and copy_into(arrived[name], wanted[name]) for name in names]

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        arrived = self._load(names, lambda name, pack: True, head=HEADER_BYTES, gap=GAP_BYTES)
        return [bytes(arrived[name]) if name in arrived else None for name in names]

    def _load(
        self, names: Sequence[str], fits: Callable[[str, Pack], bool], *, head: int | None, gap: int
    ) -> dict[str, memoryview]:
        """The records, or their first `head` bytes, of those that are there and fit."""
        arrived: dict[str, memoryview] = {}
        for _ in range(2):  # once more, where a pack is not any more what was remembered of it
            waiting = [name for name in names if name not in arrived]
            found = self.memory.locate(waiting)
            if missing := [name for name in waiting if name not in found]:
                fresh = self._find(missing, past_holes=head is not None)
                found |= {name: fresh[name] for name in missing if name in fresh}
            reads = spans({name: pack for name, pack in found.items() if fits(name, pack)}, gap=gap, head=head)
            stale: set[str] = set()
            for span, data in zip(reads, self.bucket.each(self._read_span, reads), strict=True):
                for name in span.names:
                    offset, length = span.pack.records[name]
                    length = length if head is None else min(length, head)
                    if offset + length - span.start <= len(data):
                        arrived[name] = data[offset - span.start :][:length]
                    else:
                        stale.add(span.pack.name)
            if not stale:
                break
            self._tables(list(stale))
        return arrived

    def _read_span(self, span: Span) -> memoryview:
        """Nothing if the pack is gone, or another one by now."""
        with suppress(ObjectChanged):
            part = self.bucket.get(span.pack.name, span.start, span.end, span.pack.version)
            if part is not None:
                return part.data
        return memoryview(b"")

    # Writing

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        batch = zip(names, records, strict=True)
        for _, records_of_group in groupby(batch, key=lambda record: record[0].partition("/")[0]):
            waiting = dict(records_of_group)
            while waiting:
                for name in self._write_pack(waiting):
                    del waiting[name]

    def _write_pack(self, waiting: Mapping[str, RecordPieces]) -> list[str]:
        """Store them as one object; which of them are there afterwards.

        If there is one of that name, somebody has stored a prompt that begins alike: what both share is there already.
        """
        first = next(iter(waiting))
        data = encode_pack(waiting)
        for _ in range(TRIES):
            [version] = self.bucket.each(lambda name: self.bucket.put(name, data), [first])
            if version is not None:
                self.memory.learn(decode_pack(first, data, len(data), version))
                return list(waiting)
            [pack] = self._tables([first])
            if pack is not None and first in pack.records:
                return list(takewhile(pack.records.__contains__, waiting))
            # Its first record was removed, or it is damaged. The copy is for a thread that may outlast this call.
            ours: dict[str, RecordPieces] = {name: [b"".join(record)] for name, record in waiting.items()}
            self.bucket.each(partial(self._change, added=ours), [first], requests=CHANGE_REQUESTS)
        raise self._too_many_writers(first)

    def _change(
        self, name: str, *, doomed: Collection[str] = (), added: Mapping[str, RecordPieces] | None = None
    ) -> Collection[str]:
        """Replace an object by one without the `doomed` records, and with `added` ones before those that it had.

        One that has the first of `added` stays as it is. Returns the names that it had.
        """
        added = added or {}
        for _ in range(TRIES):
            pack = self._table(name)
            if pack is None:
                return ()
            kept = [record for record in pack.records if record not in doomed]
            if next(iter(added)) in kept if added else kept == [*pack.records] != []:
                return kept
            left = self._read_kept(pack, kept)
            if left is not None and self._replace(pack, {**added, **left}):
                return pack.records.keys()
        raise self._too_many_writers(name)

    def _read_kept(self, pack: Pack, names: Sequence[str]) -> dict[str, RecordPieces] | None:
        """These records of an object, but none that is none of ours, for whatever it claims. None if it has changed."""
        kept: dict[str, Pack] = {}
        lengths = Counter(length for _, length in pack.records.values())
        usual = self.record_bytes or max(lengths, key=lengths.__getitem__, default=0)
        room = max(MAX_KEPT_BYTES, 4 * (self.record_bytes or 0))
        for name in names[: room // max(1, usual)]:
            if key_of(name) and pack.records[name][1] == usual:
                kept[name] = pack
        left: dict[str, RecordPieces] = {}
        for span in spans(kept, gap=GAP_BYTES):
            data = self._read_span(span)
            if len(data) < span.end - span.start:
                return None
            for name in span.names:
                offset, length = pack.records[name]
                left[name] = [data[offset - span.start :][:length]]
        return left

    def _replace(self, pack: Pack, records: Mapping[str, RecordPieces]) -> bool:
        """Store an object with these records instead of a pack; whether it was still there."""
        if not records:
            self.bucket.delete(pack.name)
            self.memory.forget(pack.name)
            return True
        data = encode_pack(records)
        version = self.bucket.put(pack.name, data, pack.version)
        if version is not None:
            self.memory.learn(decode_pack(pack.name, data, len(data), version))
        return version is not None

    def remove(self, names: Sequence[str]) -> int:
        """See `RecordStore`. What is behind a removed record stays in its pack; the rest is written anew.

        A record of which nobody knows where it is costs a look at all packs of its group.
        """
        doomed = set(names)
        packs: dict[str, None] = {}
        unknown = [name for name in names if not self.memory.holders(name)]
        found = self._find(unknown, past_holes=True)
        for group in {name.partition("/")[0] for name in unknown if name not in found}:
            for page in self.bucket.pages(group):
                packs |= {
                    pack.name: None
                    for pack in self._tables(page)
                    if pack is not None and (pack.name in doomed or doomed & pack.records.keys())
                }
        for name in names:
            packs |= dict.fromkeys(self.memory.holders(name))

        def take_out(pack: str) -> set[str]:
            return doomed.intersection(self._change(pack, doomed=doomed))

        return len(set[str]().union(*self.bucket.each(take_out, list(packs), requests=CHANGE_REQUESTS)))

    # Telling

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        for page in self.bucket.pages(group):
            for pack in self._tables(page):
                if pack is None:
                    continue
                for name, (_, length) in pack.records.items():
                    yield StoredRecord(name, length)
                if not pack.records and key_of(pack.name):  # damaged, and to be found by who cleans up
                    yield StoredRecord(pack.name, 0)

    def size(self, name: str) -> int | None:
        pack = self._find([name]).get(name)
        return None if pack is None else pack.records[name][1]

    def usage(self) -> StoreUsage:
        """Nothing: a bucket has no bound, and to add up its objects is to list them."""
        return StoreUsage()

    def close(self) -> None:
        self.bucket.close()

    @property
    def place(self) -> str:
        return self.bucket.place

    def _too_many_writers(self, name: str) -> StoreError:
        return StoreError(f"{self.place}: object {name[-16:]} keeps changing; given up after {TRIES} tries")


def open_objects(url: TierURL, *, for_tool: bool = False) -> ObjectStore:
    """The store at an `s3://`, `gs://`, `az://` or `file://` URL.

    Raises TierError for what somebody must mend: obstore is missing, no such bucket, wrong credentials or options.
    """
    return ObjectStore(open_bucket(url, for_tool=for_tool))
