"""Which weights an adapter's name stands for in the engine, by the content of its files.

Owns the digests of adapters and the rule when a file's content is what the engine computes with. Files are looked at
and read on a thread of its own, never on the caller's. Floor 3.

The rule: **an adapter counts only if nothing about its files has changed since this engine started.** vLLM reads them
at moments that nobody tells the scheduler's process: ahead (`add_lora`, `/v1/load_lora_adapter`, `--lora-modules`),
when the first request with the id runs, and again after its own cache of `max_cpu_loras` has dropped the id. In between
it computes with what it read, whatever the files have become. If the files are as they were before the engine could
read any, each of these readings gave the bytes that are digested here. Else any of them may have given other bytes,
and the requests are neither stored nor served. What says when a file changed is its ctime, which no program can set
back: `mtime` goes with a copy. A file server's clock may be behind this machine's; what is found otherwise than at an
earlier request has changed, whatever the clocks say.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvpact.vllm.digest_thread import DigestThread, Pending
from kvpact.weights import adapter_digest

logger = logging.getLogger(__name__)

MOST_ADAPTERS = 256
"""Adapters that are remembered, beyond those that vLLM keeps loaded: the least recently used one is forgotten."""

RETRY_SECONDS = 10.0
"""Files that could not be read are read again for a request that comes so much later."""


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """An adapter's files as they were found: which they are, and when anything about them changed the last time."""

    stamps: tuple[tuple[str, int, int, int, int, int], ...]
    """Name, device, inode, size, mtime and ctime of each, links on the way included."""
    changed_ns: int
    """In the clock of `time.time_ns`."""


@dataclass(frozen=True, slots=True)
class AdapterSeen:
    """What came of digesting an adapter's files; `digest` is None if they could not be read, at `at` (monotonic)."""

    files: FilesSeen | None
    digest: str | None
    at: float


class AdapterUse:
    """What an engine calls by one adapter id. `is_disputed` once two paths were given for it: see `AdapterDigests`."""

    __slots__ = ("is_disputed", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_disputed = False


class AdapterDigests:
    """Content digests of LoRA adapters, asked for with each request and looked at in the background."""

    def __init__(self, most: int = MOST_ADAPTERS) -> None:
        """To be made before the engine can load an adapter. `most` adapters are remembered."""
        self._began_ns = time.time_ns()
        self._most = most
        self._thread = DigestThread("kvpact-adapter")
        self._uses: OrderedDict[int, AdapterUse] = OrderedDict()
        self._seen: OrderedDict[str, AdapterSeen] = OrderedDict()
        """By path; the thread's own."""
        self.disputes = 0
        """Ids found to stand for two paths so far."""

    def __len__(self) -> int:
        return max(len(self._uses), len(self._seen))

    def ask(self, lora_request: Any) -> tuple[AdapterUse, Pending[str]]:
        """The digest of a request's adapter, as its files are now: no answer if it cannot be told.

        vLLM goes by the id alone once it is loaded. An id that came with another path before may stand for either, so
        neither path's requests are cached as long as the id is remembered.
        """
        path, number = str(lora_request.lora_path), int(lora_request.lora_int_id)
        use = self._uses.setdefault(number, AdapterUse(path))
        self._uses.move_to_end(number)
        if len(self._uses) > self._most:
            self._uses.popitem(last=False)
        if use.path != path and not use.is_disputed:
            use.is_disputed = True
            self.disputes += 1
        if lora_request.load_inplace or use.is_disputed:
            return use, Pending()  # in place: the weights behind the id may change with every request
        return use, self._thread.ask(partial(self._look, path))

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _look(self, path: str) -> str | None:
        known = self._seen.get(path)
        found = self._digest(path, known)
        self._seen[path] = found
        self._seen.move_to_end(path)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return found.digest

    def _digest(self, path: str, known: AdapterSeen | None) -> AdapterSeen:
        now = time.monotonic()
        try:
            files = look_at_files(Path(path).expanduser())
            if known is not None and known.files == files:
                return known
            was_seen = known is not None and known.files is not None
            if was_seen or files.changed_ns >= self._began_ns:
                logger.warning(
                    "kvpact: requests with the adapter at %s are not cached: its files have changed since this engine "
                    "started, so it cannot be told which state of them the engine has loaded; an engine that is "
                    "started after the change caches them",
                    path,
                )
                return AdapterSeen(files, None, now)
            if known is not None and known.files is None and now < known.at + RETRY_SECONDS:
                return known
            digest = adapter_digest(Path(path).expanduser())
            files_read = look_at_files(Path(path).expanduser())
            return AdapterSeen(files_read, digest if files_read == files else None, now)
        except OSError as error:
            if known is None or known.files is not None:
                logger.warning("kvpact: requests with the adapter at %s are not cached: %s", path, error)
        return AdapterSeen(None, None, now)


def look_at_files(directory: Path) -> FilesSeen:
    """An adapter's files as they are now, each link on the way to them included.

    A folder above that was renamed counts as changed as well: such a folder's ctime is later than its mtime. Raises
    OSError if the directory cannot be read.
    """
    stamps, changed_ns = [], 0
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
            continue  # what else lies in it is not the adapter's
        changed_ns = max(changed_ns, found.st_ctime_ns)
        stamps.append((str(place), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return FilesSeen(tuple(stamps), changed_ns)


def _places(path: Path, below: Path | None = None) -> Iterator[Path]:
    """The path, all folders above it (up to `below`), and the same of what each link on the way points to."""
    todo, done = [path.absolute()], set()
    while todo:
        way = todo.pop()
        for place in (way, *way.parents):
            if place == below or place in done:
                break
            done.add(place)
            yield place
            if place.is_symlink():
                todo.append(place.parent / os.readlink(place))
