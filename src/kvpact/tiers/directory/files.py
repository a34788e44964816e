"""Files of a directory that many hosts mount: read, written, named and removed, where each may be gone by now.

Owns what a record's file is called and the system calls that make, read and remove it. Knows no capacity.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from kvpact.own_files import PRIVATE, open_own
from kvpact.tiers.shared.store import RecordBuffer, RecordPieces

Result = TypeVar("Result")

_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP})


def path_of(root: Path, name: str) -> Path:
    """Where a record is, by its name."""
    group, _, rest = name.partition("/")
    return root / group / rest[:2] / rest


def records(root: Path, group: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file that is a record by its place and name; whatever else lies in the directory is left alone."""
    groups = [group] if group else [name for name in _list(root) if not name.startswith(".")]
    for its_group in groups:
        for part in _list(root / its_group):
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / its_group / part) as files:
                for entry in files:
                    if entry.name[:2] == part and entry.is_file(follow_symlinks=False):
                        yield f"{its_group}/{entry.name}", entry


def status(path: Path) -> os.stat_result | None:
    """None if there is no such file."""
    return _if_there(os.stat, path)


def read_record(path: Path, buffer: RecordBuffer) -> bool:
    """Whether it was there and has exactly that length."""
    return _if_there(_read_record, path, buffer) or False


def _read_record(path: Path, buffer: RecordBuffer) -> bool:
    descriptor = open_own(path, os.O_RDONLY)
    try:
        nbytes = sum(piece.nbytes for piece in buffer)
        return os.fstat(descriptor).st_size == nbytes and _read_into(descriptor, buffer) == nbytes
    finally:
        os.close(descriptor)


def beginning(path: Path, most: int) -> bytes | None:
    """Up to `most` bytes of a file, None if it is not there."""
    descriptor = _if_there(open_own, path, os.O_RDONLY)
    if descriptor is None:
        return None
    try:
        return os.pread(descriptor, most, 0)
    finally:
        os.close(descriptor)


def write_new(path: Path, pieces: RecordPieces, used_ns: int) -> None:
    """A file that was not there, last used at `used_ns`, on disk when this returns."""
    descriptor = PRIVATE.create(path)
    try:
        rest = [memoryview(piece).cast("B") for piece in pieces]
        while rest:
            rest = _without_first(rest, os.writev(descriptor, rest))
        os.utime(descriptor, ns=(used_ns, used_ns))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Give a complete file its name. The directory is not synced: a name lost with the power is a block not there."""
    os.rename(temporary, path)


def remove(path: Path | str) -> bool:
    """Whether it was there."""

    def unlink() -> bool:
        os.unlink(path)
        return True

    return _if_there(unlink) or False


def _list(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _if_there(call: Callable[..., Result], *arguments: Any) -> Result | None:
    """What a call answers; None if the file that it is about is gone."""
    try:
        return call(*arguments)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return None


def _read_into(descriptor: int, buffer: RecordBuffer) -> int:
    """Fill the pieces in order; how many bytes there were."""
    rest = [piece.cast("B") for piece in buffer]
    at = 0
    while rest and (arrived := os.preadv(descriptor, rest, at)):
        at += arrived
        rest = _without_first(rest, arrived)
    return at


def _without_first(pieces: list[memoryview], nbytes: int) -> list[memoryview]:
    """What is left of the pieces without their first `nbytes`."""
    for index, piece in enumerate(pieces):
        if nbytes < piece.nbytes:
            return [piece[nbytes:], *pieces[index + 1 :]]
        nbytes -= piece.nbytes
    return []
