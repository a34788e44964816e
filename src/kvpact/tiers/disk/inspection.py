"""Content and damage of a directory of slabs: for tools and people, beside a running engine.

Owns reports. Never writes and never waits for a lock, so an engine may use the directory meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

from kvpact.errors import TierError
from kvpact.own_files import OwnFolder, closing, open_own
from kvpact.tiers.base import HEADER_BYTES, RecordError, RecordHeader, is_empty_header
from kvpact.tiers.disk.header_table import occupied, pieces_of
from kvpact.tiers.disk.slab import SlabReader
from kvpact.tiers.disk.slab_directory import Neighbour, SlabDirectory, look_at, model_beside
from kvpact.tiers.disk.superblock import PAGE_BYTES, Superblock, refuted_in
from kvpact.tiers.record import GROUP_BYTES


@dataclass(frozen=True, slots=True)
class SlabSummary:
    """One slab as its superblock and header table describe it. `problem` is "" or says why it cannot be read.

    `slots` are those that it has or may have, `blocks` counts sound headers, `payload_bytes` is that of their payloads,
    `file_bytes` what the file takes of the directory's capacity, so holes do not count; ages are seconds since a block
    was written (0 if there is none). `in_use_by` is the pid of the engine that has it open, 0 if unknown, None if none.
    """

    path: Path
    namespace: str
    fields: Mapping[str, str]
    slot_bytes: int
    slots: int
    blocks: int
    payload_bytes: int
    file_bytes: int
    oldest_age: float
    newest_age: float
    in_use_by: int | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A record that a read refuses. `torn`: its header is sound, and its payload does not match the header.

    `key` is hexadecimal, "" where the header cannot be trusted to name it.
    """

    slot: int
    key: str
    reason: str
    torn: bool


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Findings of a read of every record of a slab.

    `records` have a header, `sound` ones are good in full, every read refuses `damaged` ones, so they are never served.
    `orphans` are sound records without the block before them: no lookup reaches them. An engine rewrote `changed` ones
    while they were read.
    """

    path: Path
    records: int = 0
    sound: int = 0
    orphans: int = 0
    changed: int = 0
    damaged: list[DamagedRecord] = field(default_factory=list)

    @property
    def torn(self) -> int:
        """Records with a valid header and a damaged payload; a power cut or a bad disk may leave one, a kill never."""
        return sum(record.torn for record in self.damaged)


def scan_directory(path: str | os.PathLike[str]) -> list[SlabSummary]:
    """A summary of every slab in a directory, by name. Reads header tables, no payload.

    Raises:
        TierError: the directory cannot be read.
    """
    try:
        os.listdir(path)
        with suppress(FileNotFoundError), OwnFolder.look(Path(path)) as folder:
            os.listdir(folder.held)
        slabs = [look_at(slab) for slab in SlabDirectory(Path(path)).slab_paths()]
        return [*filter(None, (_summary(slab) for slab in slabs if slab is not None))]
    except OSError as error:
        raise TierError(f"cannot read {path}: {error.strerror}; give the directory of a disk tier") from None


def verify_slab(path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read every record of a slab and check it as a read by the engine would.

    `progress(done, total)` is called after each record.

    Raises:
        TierError: the file cannot be read, or is not a slab of this release's format.
    """
    path = Path(path)
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as descriptor:
            return _verify(descriptor, path, progress)
    except OSError as error:
        raise TierError(f"cannot read {path}: {error.strerror}") from None


def payload_places(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """Offset and length in the file of the payload of each record whose header is sound; for tests that damage them.

    Raises:
        TierError: the file cannot be read, or is not a slab of this release's format.
    """
    path = Path(path)
    try:
        with closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as descriptor:
            superblock = Superblock.read(descriptor, path)
            found = []
            for slot, raw in _occupied(descriptor, path, superblock):
                with suppress(RecordError):
                    found.append((superblock.file_bytes(slot), superblock.header(slot, raw).length))
            return found
    except OSError as error:
        raise TierError(f"cannot read {path}: {error.strerror}") from None


def _verify(descriptor: int, path: Path, progress: Callable[[int, int], None] | None) -> VerifyReport:
    superblock = Superblock.read(descriptor, path, refuted_in(path.parent))
    slots = [slot for slot, _ in _occupied(descriptor, path, superblock)]
    sound: dict[bytes, bytes] = {}
    damaged: list[DamagedRecord] = []
    changed = 0
    for done, slot in enumerate(slots, 1):
        found = _read_record(descriptor, superblock, slot)
        if isinstance(found, RecordHeader):
            sound[found.key] = found.parent
        elif found is not None:
            damaged.append(found)
        else:
            changed += 1
        if progress is not None:
            progress(done, len(slots))
    return VerifyReport(path, len(slots), len(sound), _orphans(sound), changed, damaged)


def _read_record(descriptor: int, superblock: Superblock, slot: int) -> RecordHeader | DamagedRecord | None:
    """The sound record in `slot`, or its damage; None if it was rewritten meanwhile."""
    raw = _raw_header(descriptor, slot)
    if is_empty_header(raw):
        return None
    key = ""
    torn = False
    try:
        header = superblock.header(slot, raw)
        key = header.key.hex()
        torn = True
        at = superblock.file_bytes(slot)
        there = os.fstat(descriptor).st_size
        if at + header.length <= there and _digest(descriptor, at, header.length) == header.digest:
            return header
        ends = at + header.length > there
        reason = f"payload ends after {max(0, there - at)}" if ends else "payload does not match its checksum"
    except RecordError as error:
        reason = str(error)
    return DamagedRecord(slot, key, reason, torn) if _raw_header(descriptor, slot) == raw else None


def _orphans(parents: Mapping[bytes, bytes]) -> int:
    """Number of keys that do not reach the root through their parents."""
    reaches = {b"": True}
    for key in parents:
        walk: list[bytes] = []
        while key not in reaches and key in parents:
            walk.append(key)
            reaches[key] = False
            key = parents[key]
        reaches.update(dict.fromkeys(walk, reaches.get(key, False)))
    return list(reaches.values()).count(False)


def _summary(item: Neighbour) -> SlabSummary | None:
    """None if the slab is gone by now."""
    path = item.path
    headers: list[RecordHeader] = []
    try:
        with closing(open_own(path, os.O_RDONLY)) as descriptor:
            superblock = Superblock.read(descriptor, path, refuted_in(path.parent))
            for slot, raw in _occupied(descriptor, path, superblock):
                with suppress(RecordError):
                    headers.append(superblock.header(slot, raw))
    except FileNotFoundError:
        return None
    except TierError as error:
        pid = 0 if item.in_use else None
        return SlabSummary(path, path.stem, {}, 0, 0, 0, 0, item.file_bytes, 0.0, 0.0, pid, str(error))
    now = time.time()
    written = [header.written for header in headers]
    return SlabSummary(
        path=path,
        namespace=superblock.namespace.name,
        fields=replace(superblock.namespace, model=model_beside(path)).for_people.fields,
        slot_bytes=superblock.slot_bytes,
        slots=superblock.slots_in(superblock.claim_bytes),
        blocks=len(written),
        payload_bytes=sum(header.length for header in headers),
        file_bytes=item.file_bytes,
        oldest_age=max(0.0, now - min(written, default=now)),
        newest_age=max(0.0, now - max(written, default=now)),
        in_use_by=superblock.pid if item.in_use else None,
    )


def _occupied(descriptor: int, path: Path, superblock: Superblock) -> Iterator[tuple[int, memoryview]]:
    """(slot, raw header) of every slot with a header; piece by piece, however large a table the file claims."""
    with contextlib.closing(SlabReader(path, os.dup(descriptor), superblock)) as reader:
        for first, headers in pieces_of(reader):
            yield from occupied(headers, first)


def _digest(descriptor: int, at: int, length: int) -> bytes:
    """The digest of the bytes from `at` on; piece by piece, however large a payload a header claims."""
    state = xxhash.xxh3_128()
    for start in range(at, at + length, GROUP_BYTES):
        state.update(os.pread(descriptor, min(GROUP_BYTES, at + length - start), start))
        with contextlib.suppress(OSError):  # no more than advice
            os.posix_fadvise(descriptor, start, GROUP_BYTES, os.POSIX_FADV_DONTNEED)
    return state.digest()


def _raw_header(descriptor: int, slot: int) -> bytes:
    return os.pread(descriptor, HEADER_BYTES, PAGE_BYTES + slot * HEADER_BYTES)
