"""The tier of object stores: S3 and compatible ones, Google Cloud Storage, Azure, and a directory.

Owns the search for records and their packs: blocks written together are one object, a block is a range of its bytes.
Expires nothing: that is for the bucket's lifecycle rules, and a record that they removed is a miss.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, compress, takewhile
from operator import not_
from typing import Final

from kvpact.tiers.base import HEADER_BYTES, leading
from kvpact.tiers.free_space import SLACK_SHARE, Unremovable
from kvpact.tiers.objects import BACKEND
from kvpact.tiers.objects.bucket import Bucket, ObjectBytes, ObjectChanged, open_bucket
from kvpact.tiers.objects.packs import (
    Pack,
    PackError,
    PackMemory,
    PackVersion,
    Span,
    decode_pack,
    encode_pack,
    spans,
    table_size,
)
from kvpact.tiers.record import GROUP_BYTES
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
from kvpact.tiers.urls import TierURL

logger = logging.getLogger(__name__)

FIRST_READ_BYTES: Final = 16 << 10
"""Bytes of an object's first read: a table of 200 blocks in one request."""

MAX_KEPT_BYTES: Final = 4 * GROUP_BYTES
"""Most bytes kept of an object when a record is removed or added: more than any of ours with several records has."""

CHANGE_REQUESTS: Final = 5
"""Requests to replace an object: one or two for its table, one or two for its records, one to write it."""

TRIES: Final = 8
"""A write is given up after this many concurrent changes of its object."""


class ObjectStore(RecordStore):
    """Records in packs of an object store. The records of one call of `write_pack` become one object, named after the
    first; those of `write` one object each, because no other record leads to them.

    A record inside a pack is found through the records before it, from a prompt's first: `locate` and `leading` read
    tables on the way and remember them. After a missing record only remembered ones are found, so a record that exists
    may be written a second time. A name implies the content: a record that exists is replaced only after its removal.
    """

    kind = BACKEND.label

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.memory = PackMemory()
        self._unremovable = Unremovable(logger, f"{bucket.place}")

    # Finding

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = self._look({pack: None for name in names for pack in self.memory.holders(name) or (name,)})
        self._note_used(names, found)
        return [name in found for name in names]

    def leading(self, names: Sequence[str]) -> int:
        """Number of leading records that are there now; their packs count as used."""
        found = self._find(names)
        self._note_used(names, found)
        return leading([name in found for name in names])

    def _note_used(self, names: Sequence[str], found: Mapping[str, Pack]) -> None:
        if self.bucket.files is not None:
            self.bucket.files.note_used([*dict.fromkeys(found[name].name for name in names if name in found)])

    def locate(self, names: Sequence[str]) -> None:
        """Read tables up to the first missing record; no request if the packs of all are remembered."""
        if len(self.memory.locate(names)) < len(names):
            self._find(names)

    def known(self, names: Sequence[str]) -> list[str]:
        """Names of the records whose packs are remembered."""
        return [*self.memory.locate(names)]

    def _look(self, packs: Collection[str]) -> dict[str, Pack]:
        """The records that are in objects of these names now; the first object counts that has one."""
        tables = reversed(self._tables([*packs]))
        return {record: pack for pack in tables if pack is not None for record in pack.records}

    def _find(self, names: Sequence[str], *, past_holes: bool = False) -> dict[str, Pack]:
        """The packs that hold these records now, up to the first missing one, or for all with `past_holes`.

        Each round asks for the pack that holds the next record, and in parallel for those expected after it: remembered
        packs, and packs that begin where one of the last pack's length would end.
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
                found = self._look(wanted) | found
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
        """The records of an object, none if it is damaged; None if there is no such object."""
        part = self.bucket.get(name, 0, FIRST_READ_BYTES)
        try:
            if part is not None and (end := self._table_end(part)) > FIRST_READ_BYTES:
                part = self.bucket.get(name, 0, end, part.version)
            if part is not None:
                pack = decode_pack(name, part.data, part.object_bytes, part.version)
                self.memory.learn(pack)
                return pack
        except ObjectChanged:
            part = None  # it was there a moment ago, so the next look finds it
        except PackError:
            pass
        self.memory.forget(name)
        return None if part is None else Pack(name, {}, part.version)

    def _table_end(self, part: ObjectBytes) -> int:
        """Offset of the end of an object's table. Raises PackError if that is too large or beyond the object."""
        count, end = table_size(part.data)
        least = HEADER_BYTES if self.record_bytes else 0
        if end > FIRST_READ_BYTES and end + count * least > part.object_bytes:
            raise PackError(f"{count} records do not fit into {part.object_bytes} bytes")
        return end

    # Reading

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        wanted = dict(zip(names, buffers, strict=True))

        def fits(name: str, pack: Pack) -> bool:
            return pack.records[name][1] == sum(piece.nbytes for piece in wanted[name])

        arrived = self._load(names, fits, head=None)
        return [name in arrived and copy_into(arrived[name], wanted[name]) for name in names]

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        arrived = self._load(names, lambda name, pack: True, head=HEADER_BYTES)
        return [bytes(arrived[name]) if name in arrived else None for name in names]

    def _load(
        self, names: Sequence[str], fits: Callable[[str, Pack], bool], *, head: int | None
    ) -> dict[str, memoryview]:
        """The records that exist and fit, or their first `head` bytes."""
        arrived: dict[str, memoryview] = {}
        if unknown := set(names).difference(self.memory.locate(names)):
            self._find([name for name in names if name in unknown], past_holes=True) if head else self._look(unknown)
        for _ in range(2):  # again for packs that changed since they were remembered
            found = self.memory.locate(name for name in names if name not in arrived)
            reads = spans({name: pack for name, pack in found.items() if fits(name, pack)}, head=head)
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
        """The bytes of a span; empty if the pack is gone or has changed."""
        start, end = (0, None) if span.is_almost_all else (span.start, span.end)
        with suppress(ObjectChanged):
            part = self.bucket.get(span.pack.name, start, end, span.pack.version)
            if part is not None:
                return part.data[span.start - start :]
        return memoryview(b"")

    # Writing

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        self._tidy()
        wanted = dict(zip(names, records, strict=True))
        packs = {name: encode_pack({name: record}) for name, record in wanted.items()}
        stored = self.bucket.each(lambda name: self._create(name, packs[name]), list(packs))
        for name in compress(packs, map(not_, stored)):
            self._join({name: wanted[name]})

    def write_pack(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        """Store records as one object, or in the object that has the first one's name already."""
        self._tidy()
        waiting = dict(zip(names, records, strict=True))
        while waiting:
            [stored] = self.bucket.each(partial(self._create, data=encode_pack(waiting)), [next(iter(waiting))])
            for name in [*waiting] if stored else self._join(waiting):
                del waiting[name]

    def _tidy(self) -> None:
        if self.bucket.files is not None:
            self.bucket.files.tidy()

    def _create(self, name: str, data: bytes, replaced: PackVersion | None = None) -> bool:
        """Store a new object, or replace that version; False if there is another one of this name."""
        version = self.bucket.put(name, data, replaced)
        if version is not None:
            self.memory.learn(decode_pack(name, data, len(data), version))
        return version is not None

    def _join(self, waiting: Mapping[str, RecordPieces]) -> list[str]:
        """Store records where an object has the first one's name; returns which of them are there afterwards.

        The object is of a prompt with the same beginning, and the common records exist. All are stored in it if its
        first record was removed or it is damaged.
        """
        first = next(iter(waiting))
        for _ in range(TRIES):
            [pack] = self._tables([first])
            if pack is not None and first in pack.records:
                return list(takewhile(pack.records.__contains__, waiting))
            if pack is None:  # removed since
                [stored] = self.bucket.each(partial(self._create, data=encode_pack(waiting)), [first])
                if stored:
                    return list(waiting)
                continue
            # The copy is for a thread that may outlast this call.
            ours: dict[str, RecordPieces] = {name: [b"".join(record)] for name, record in waiting.items()}
            self.bucket.each(partial(self._change, added=ours), [first], requests=CHANGE_REQUESTS)
        raise self._too_many_writers(first)

    def _change(
        self, name: str, *, doomed: Collection[str] = (), added: Mapping[str, RecordPieces] | None = None
    ) -> Collection[str]:
        """Replace an object by one without the `doomed` records, and with `added` ones before its own.

        An object that has the first of `added` is not changed. Returns the names that it had.
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
        """Read records of an object, except those that cannot be ours by their length. None if it has changed."""
        lengths = Counter(length for _, length in pack.records.values())
        longest = self.record_bytes or max(lengths, key=lengths.__getitem__, default=0)
        room = max(MAX_KEPT_BYTES, 4 * longest)
        kept: dict[str, Pack] = {}
        for name in filter(key_of, names):
            length = pack.records[name][1]
            if HEADER_BYTES <= length <= min(longest, room):
                kept[name] = pack
                room -= length
        left: dict[str, RecordPieces] = {}
        for span in spans(kept):
            data = self._read_span(span)
            if len(data) < span.end - span.start:
                return None
            for name in span.names:
                offset, length = pack.records[name]
                left[name] = [data[offset - span.start :][:length]]
        return left

    def _replace(self, pack: Pack, records: Mapping[str, RecordPieces]) -> bool:
        """Store an object with these records instead of a pack; returns whether the pack was still there."""
        if not records:
            self.bucket.delete(pack.name)
            self.memory.forget(pack.name)
            return True
        return self._create(pack.name, encode_pack(records), pack.version)

    def remove(self, names: Sequence[str]) -> int:
        """Remove records, by rewriting each pack without them.

        A record whose pack is unknown costs a look at all packs of its group.
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
                if not pack.records and key_of(pack.name):  # a damaged object, listed so that tools find it
                    yield StoredRecord(pack.name, 0)

    def size(self, name: str) -> int | None:
        pack = self._find([name]).get(name)
        return None if pack is None else pack.records[name][1]

    def make_room(self, nbytes: int) -> int:
        """Evict objects that are files; a bucket's lifecycle rules make room there."""
        files = self.bucket.files
        if files is None:
            return 0
        self._unremovable.forget()
        gone = files.remove_abandoned()
        unfinished = sum(size for size, _ in files.unfinished())
        by_use = files.by_use(chain.from_iterable(self.bucket.pages()))
        evicted = 0
        left = nbytes - sum(gone) + (unfinished + sum(size for _, size, _ in by_use)) // SLACK_SHARE
        for _, size, name in by_use:
            if left > 0 and key_of(name):
                try:
                    self.bucket.delete(name)
                except StoreError as error:
                    self._unremovable.note(name, error)
                    continue
                left -= size
                evicted += 1
        self._unremovable.log()
        self.evicted += evicted
        return evicted + len(gone)

    def usage(self) -> StoreUsage:
        """Unknown: a bucket has no bound, and its used bytes need a listing."""
        return StoreUsage()

    def unfinished(self) -> StoreUsage:
        files = self.bucket.files
        return StoreUsage(sum(size for size, _ in files.unfinished()) if files is not None else 0)

    def lost(self) -> str:
        return self.bucket.files.folder.lost() if self.bucket.files is not None else ""

    def close(self) -> None:
        self.bucket.close()

    @property
    def place(self) -> str:
        return self.bucket.place

    def _too_many_writers(self, name: str) -> StoreError:
        return StoreError(f"{self.place}: object {name[-16:]} keeps changing; given up after {TRIES} tries")


def open_objects(url: TierURL, *, for_tool: bool = False) -> ObjectStore:
    """The store at an `s3://`, `gs://`, `az://` or `file://` URL.

    Raises TierError for an error that a person must correct: no obstore, no such bucket, wrong credentials or options.
    """
    return ObjectStore(open_bucket(url, for_tool=for_tool))
