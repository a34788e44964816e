"""State of an adapter's files: their names and sizes, and the times of their last changes.

Owns the definition of an unchanged state; reads no file content. Used by scheduler and workers: no scheduler code.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from kvpact.identity.loaded_adapters import STAMP_BYTES

SECOND_NS = 1_000_000_000

REST_NS = 20_000_000
"""Nanoseconds after a change from which the next change gets another ctime: Linux's file clock lags at most 10 ms."""

COARSE_REST_NS = 2 * SECOND_NS
"""Nanoseconds instead of `REST_NS` on a file system with whole seconds only."""


@dataclass(frozen=True)
class FilesSeen:
    """State of an adapter's files: their names and sizes, and the times of their last changes."""

    stamps: tuple[tuple[str, int, int, int, int, int], ...]
    """Name, device, inode, size, mtime and ctime of each, links on the way included."""
    changed_ns: int
    """Time of the last change, in the clock of `time.time_ns`."""

    @cached_property
    def stamp(self) -> bytes:
        """Digest of `stamps`."""
        return blake3(repr(self.stamps).encode("utf-8", "surrogateescape")).digest(STAMP_BYTES)

    @property
    def at_rest_ns(self) -> int:
        """Time (`time.time_ns`) from which every change of the files changes their stamps."""
        is_coarse = self.changed_ns % SECOND_NS == 0
        return self.changed_ns + (COARSE_REST_NS if is_coarse else REST_NS)


def look_at_rest(directory: Path) -> FilesSeen | None:
    """State of an adapter's files, once every change of them would change their stamps.

    Waits for up to `REST_NS` if files have just been written; None if that is not enough. Raises OSError if the
    directory cannot be read.
    """
    files = look_at_files(directory)
    rest = files.at_rest_ns - time.time_ns()
    if 0 < rest <= REST_NS:
        time.sleep(rest / SECOND_NS)
        files = look_at_files(directory)
        rest = files.at_rest_ns - time.time_ns()
    return files if rest <= 0 else None


def look_at_files(directory: Path) -> FilesSeen:
    """State of an adapter's files now, including each link on the way to them.

    A renamed folder above them counts as changed too: such a folder's ctime is later than its mtime. Raises
    OSError if the directory cannot be read.
    """
    stamps = []
    changed_ns = 0
    resolved = directory.resolve(strict=True)
    places = [*_places(directory), resolved]
    for file in sorted(resolved.iterdir()):
        places += _places(file, below=resolved)
    for place in dict.fromkeys(places):
        found = os.lstat(place)
        is_above = stat.S_ISDIR(found.st_mode) and place != resolved
        if is_above:
            if found.st_ctime_ns > found.st_mtime_ns:
                changed_ns = max(changed_ns, found.st_ctime_ns)
            continue  # other files in that folder do not belong to the adapter
        changed_ns = max(changed_ns, found.st_ctime_ns)
        stamps.append((str(place), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return FilesSeen(tuple(stamps), changed_ns)


def _places(path: Path, below: Path | None = None) -> Iterator[Path]:
    """Path, with all folders above it (up to `below`), and the same for the target of each link on the way."""
    todo = [path.absolute()]
    done = set[Path]()
    while todo:
        way = todo.pop()
        for place in (way, *way.parents):
            if place == below or place in done:
                break
            done.add(place)
            yield place
            if place.is_symlink():
                todo.append(place.parent / os.readlink(place))
