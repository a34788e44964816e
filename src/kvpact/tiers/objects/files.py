"""Objects that are files of a folder: their last uses, and files that killed writers left unfinished.

Owns the clock of uses and the time of the next look for unfinished files. Never reads or writes an object.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpact.own_files import UNABLE, OwnFolder
from kvpact.tiers.free_space import taken
from kvpact.tiers.use_clock import STEP_NS, SharedClock

logger = logging.getLogger(__name__)

TIDY_SECONDS: Final = 600.0
"""Least seconds between two searches of one writer for unfinished files."""

_UNFINISHED: Final = re.compile(r"[0-9a-f]{16}(-[0-9a-f]+)?/([0-9a-f]{64}|namespace)#\d+")
"""Files that obstore makes for an object of ours: it writes NAME#1, and then gives it its name."""


class ObjectFiles:
    """The files of one folder that obstore reads and writes as objects."""

    def __init__(self, folder: OwnFolder, *, marks_uses: bool) -> None:
        """With `marks_uses` mark files when they are used, and remove abandoned ones; a tool does neither."""
        self.folder = folder
        self.has_links = True
        """True if a file can be given its name only while there is none of that name."""
        self._clock = SharedClock(folder.path / ".clock", folder.access) if marks_uses else None
        self._tidy_at = 0.0
        if self._clock is not None:
            self._clock.now()
            self.remove_abandoned()
            self.has_links = _can_link(self._clock.path)

    def path_of(self, name: str) -> Path:
        """The file of an object."""
        return self.folder.path / name

    def prepare(self, name: str) -> None:
        """Make the folders of an object that is about to be written. Raises OSError."""
        self.folder.access.make_parents(self.path_of(name), self.folder.path)

    def settle(self, name: str) -> None:
        """Give a written object its mode, and mark it as used. Raises OSError."""
        with suppress(FileNotFoundError):  # removed since
            self.folder.access.settle(self.path_of(name), self.folder.access.file_mode)
        self.note_used([name])

    def note_used(self, names: Sequence[str]) -> None:
        """Mark files as used now, each a little before the one that is named before it, by their time of access.

        The time of change is a part of an object's version.
        """
        if self._clock is not None and names:
            now = self._clock.now()
            for number, name in enumerate(names):
                path = self.path_of(name)
                with suppress(OSError):  # removed since, another user's, or a file system that sets no times
                    os.utime(path, ns=(now - number * STEP_NS, path.stat().st_mtime_ns))

    def by_use(self, names: Iterable[str]) -> list[tuple[int, int, str]]:
        """Time of last use in ns, bytes taken and name of each file, the oldest first."""
        found = list[tuple[int, int, str]]()
        for name in names:
            with suppress(OSError):
                status = os.stat(self.path_of(name))
                found.append((status.st_atime_ns, taken(status), name))
        return sorted(found)

    def unfinished(self) -> list[tuple[int, Path]]:
        """Bytes and path of each file that obstore writes before it gets an object's name: its listing has none."""
        found = list[tuple[int, Path]]()
        for path in self.folder.path.glob("*/*#*"):
            with suppress(OSError):
                status = path.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and _UNFINISHED.fullmatch(f"{path.parent.name}/{path.name}"):
                    found.append((taken(status), path))
        return found

    def tidy(self) -> None:
        """`remove_abandoned`, if the last search was `TIDY_SECONDS` ago."""
        if self._clock is not None and time.monotonic() > self._tidy_at:
            self._clock.now()
            self.remove_abandoned()

    def remove_abandoned(self) -> list[int]:
        """Remove unfinished files of killed writers; returns the bytes of each."""
        gone = list[int]()
        self._tidy_at = time.monotonic() + TIDY_SECONDS
        for size, path in self.unfinished() if self._clock is not None else ():
            with suppress(OSError):  # another engine was quicker, or it cannot be removed: it counts as before
                if self._clock is not None and self._clock.is_abandoned(path.stat(follow_symlinks=False)):
                    path.unlink()
                    gone.append(size)
        return gone


def _can_link(path: Path) -> bool:
    """True if a file can be given its name only while there is none of that name. Tries a second name of `path`."""
    trial = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        os.link(path, trial)
        trial.unlink()
    except OSError as error:
        if error.errno in UNABLE:
            logger.warning(
                "file tier: the file system of %s has no hard links: of engines that store the same block at the same "
                "time the last one wins", path.parent,
            )  # fmt: skip
            return False
    return True
