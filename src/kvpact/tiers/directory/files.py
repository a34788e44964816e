"""Files of a directory that many hosts mount: read, written, renamed and removed, each possibly gone by then.

Owns the name of a record's file and the system calls that create, read and remove it. Knows no capacity.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpact.own_files import PRIVATE, closing, open_own, sync_file
from kvpact.tiers.shared.store import RecordBuffer, RecordPieces
from kvpact.tiers.vectored import completely

_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})
"""The errors of a name that is no file of ours: there is nothing, or what somebody else put there."""


class _Unless:
    """A context that ends early, without an error, at one of these errors of the file system; others are raised."""

    def __init__(self, *codes: int) -> None:
        self._codes = codes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, OSError) and error.errno in self._codes


_UNLESS_GONE: Final = _Unless(*_GONE)
_UNLESS_CLOSED: Final = _Unless(*_GONE, errno.EACCES)
"""Also for a file that another member of the group made so that we cannot read it."""


def path_of(root: Path, name: str) -> Path:
    """The path of a record's file."""
    group, _, rest = name.partition("/")
    return root / group / rest[:2] / rest


def records(root: Path, group: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Every file that is a record by its path; other files in the directory are ignored.

    Whoever asks for all groups is not stopped by a folder that cannot be read.
    """
    unless = _UNLESS_GONE if group else _UNLESS_CLOSED
    groups = [group] if group else [name for name in _list(root, _UNLESS_GONE) if not name.startswith(".")]
    for its_group in groups:
        for part in _list(root / its_group, unless):
            with unless, os.scandir(root / its_group / part) as files:
                for entry in files:
                    if entry.name[:2] == part and entry.is_file(follow_symlinks=False):
                        yield f"{its_group}/{entry.name}", entry


def status(path: Path) -> os.stat_result | None:
    """The file's status; None if there is no such file."""
    with _UNLESS_GONE:
        found = os.stat(path, follow_symlinks=False)
        return found if stat.S_ISREG(found.st_mode) else None
    return None


def read_record(path: Path, buffer: RecordBuffer) -> bool:
    """Read a file; returns whether it was there with exactly the buffer's length."""
    with _UNLESS_CLOSED, closing(open_own(path, os.O_RDONLY)) as descriptor:
        nbytes = sum(piece.nbytes for piece in buffer)
        views = [piece.cast("B") for piece in buffer]
        return os.fstat(descriptor).st_size == nbytes and completely(os.preadv, descriptor, views, 0) == nbytes
    return False


def beginning(path: Path, most: int) -> bytes | None:
    """Up to `most` bytes of a file, None if it is not there or cannot be read."""
    with _UNLESS_CLOSED, closing(open_own(path, os.O_RDONLY)) as descriptor:
        return os.pread(descriptor, most, 0)
    return None


def write_new(path: Path, pieces: RecordPieces, used_ns: int) -> None:
    """Create a file, last used at `used_ns`; it is on disk when this returns."""
    with closing(PRIVATE.create(path)) as descriptor:
        completely(os.pwritev, descriptor, [memoryview(piece).cast("B") for piece in pieces], 0)
        with suppress(OSError):  # a file system that sets no times: the order of writing must do
            os.utime(descriptor, ns=(used_ns, used_ns))
        sync_file(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Give a complete file its name. The directory is not synced: a power cut may lose the name, which is a miss."""
    os.rename(temporary, path)


def remove(path: Path | str) -> bool:
    """Remove a file; returns whether it was there."""
    with _UNLESS_GONE:
        os.unlink(path)
        return True
    return False


def _list(directory: Path, unless: _Unless) -> list[str]:
    with unless:
        return os.listdir(directory)
    return []
