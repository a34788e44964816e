"""Digests of the adapters that an engine computes with, by the content of their files.

Owns the digests of adapters and the rule when a file's content is the one that the engine computes with. A separate
thread examines and reads the files, never the caller's.

vLLM does not report to the scheduler's process when it reads an adapter's files: ahead (`add_lora`,
`/v1/load_lora_adapter`, `--lora-modules`), when the first request with the id runs, and again after its own cache of
`max_cpu_loras` has dropped the id. In between it computes with the bytes it read, even if the files have changed. So an
adapter counts in two cases only:

- **Its files have not changed since this engine started**, and no rank reports that it has loaded the id from files in
  another state. Each reading since the start gave the bytes that are digested here.
- **Every rank reports that it has loaded the id from the files in exactly the state in which they were digested here.**
  Ranks report this if their worker is `KvpactWorker` (`kvpact.vllm.adapter_watch`). The first request for which vLLM
  loads the adapter comes before the report; the requests after it are cached.

Otherwise the requests are neither stored nor served. A rank's report may change during a step that was ordered by the
earlier one. `look` returns this before the step's report is applied, so that no block of the step is stored, and
`CacheWorker` reports blocks as invalid that were loaded for an adapter which the step did not run with.

The time of a file's change is its ctime, which no program can set back; a copy keeps the `mtime`. A file server's clock
may be behind this machine's: files in another state than at an earlier request have changed, whatever the clocks show.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from kvpact.identity.adapter_files import FilesSeen, look_at_files, look_at_rest
from kvpact.identity.digest_thread import DigestThread, Pending
from kvpact.identity.loaded_adapters import LoadedAdapters
from kvpact.identity.weights import adapter_digest

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 256
"""Most adapters remembered, more than vLLM keeps loaded; the least recently used is forgotten first."""

RETRY_SECONDS = 10.0
"""Least seconds until a request has unreadable files read again."""


ANEW: Final = "every rank has loaded the files as they are now: unload the adapter and load it again"
RESTART: Final = "a restart; with --worker-cls kvpact.vllm.worker.KvpactWorker it is enough to load the adapter again"
"""End of the time without caching for a changed adapter, with reports of the ranks and without."""


@dataclass(frozen=True, slots=True)
class AdapterFound:
    """Content of an adapter: a digest of all its files, and the state of the files when they were digested."""

    digest: str
    stamp: bytes
    """Stamp of the files, as in `FilesSeen`."""
    is_unchanged: bool
    """True if the files have been in this state since the engine started."""


@dataclass(frozen=True, slots=True)
class AdapterSeen:
    """Result of digesting an adapter's files at `at` (monotonic, seconds); `found` is None if they were unreadable."""

    files: FilesSeen | None
    found: AdapterFound | None
    at: float
    is_unchanged: bool


@dataclass(eq=False, slots=True)
class AdapterUse:
    """Adapter id of the engine. `is_disputed` once two paths were given for it: see `AdapterDigests.ask`."""

    number: int
    path: str
    is_disputed: bool = False
    found: AdapterFound | None = None
    """Content that counts for the id now; None if there is none."""
    counted: set[str] = field(default_factory=set)
    """Names of adapters under which its requests were cached."""


class AdapterDigests:
    """Content digests of LoRA adapters, requested with each engine request and computed in the background."""

    def __init__(self, most: int = MAX_ADAPTERS) -> None:
        """Make it before the engine can load an adapter. At most `most` adapters are remembered."""
        self._began_ns = time.time_ns()
        self._most = most
        self._thread = DigestThread("kvpact-adapter")
        self.uses: OrderedDict[int, AdapterUse] = OrderedDict()
        """Uses by id; while there are none, `look` returns nothing."""
        self._seen: OrderedDict[str, AdapterSeen] = OrderedDict()
        """Results by path; for the thread only."""
        self._loaded: LoadedAdapters | None = None
        self._is_reported = True
        self._withdrawn: set[str] = set()
        self.revision = 0
        """Counter, raised when earlier answers about an adapter may be void, and when new answers are possible."""

    def __len__(self) -> int:
        return max(len(self.uses), len(self._seen))

    def bind(self, loaded: LoadedAdapters | None, *, reported: bool = True) -> None:
        """Set the ranks' reports of loaded adapters; None once the ranks have ended, and the cache with them.

        `reported`: the ranks make reports at all.
        """
        self._is_reported = reported
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = loaded
        self.revision += 1
        for use in self.uses.values():
            use.found = None
            use.counted.clear()
        self._withdrawn.clear()

    def look(self) -> set[str]:
        """Read the ranks' reports; returns the `counted` names that may have other content by now."""
        if self.uses and self._loaded is not None and self._loaded.look():
            self.revision += 1
            for use in self.uses.values():
                if use.found is not None and not self._holds(use.number, use.found):
                    self._withdraw(use)
        withdrawn = self._withdrawn
        self._withdrawn = set()
        return withdrawn

    def ask(self, number: int, path: str, *, loads_in_place: bool) -> tuple[AdapterUse, Pending[AdapterFound]]:
        """Ask for the content of a request's adapter files, as they are now; no answer if it cannot be determined.

        vLLM uses only the id, `number`, once the adapter is loaded. An id that came with another path before may mean
        either, so neither path's requests are cached as long as the id is remembered.
        """
        use = self.uses.setdefault(number, AdapterUse(number, path))
        self.uses.move_to_end(number)
        if len(self.uses) > self._most:
            self._withdraw(self.uses.popitem(last=False)[1])  # its reloads would not be noticed
        if use.path != path and not use.is_disputed:
            use.is_disputed = True
            self.revision += 1
        if loads_in_place or use.is_disputed:
            return use, Pending()  # in place: the weights behind the id may change with every request
        return use, self._thread.ask(partial(self._look, path))

    def admit(self, use: AdapterUse, found: AdapterFound) -> bool:
        """Note the content of a request's adapter; returns False if, by the last `look`, the request computes with
        another one."""
        if use.is_disputed or self.uses.get(use.number) is not use or not self._holds(use.number, found):
            return False
        if use.found is not None and use.found.stamp != found.stamp:
            self._withdraw(use)
        use.found = found
        return True

    def _holds(self, number: int, found: AdapterFound) -> bool:
        if self._loaded is None:
            return found.is_unchanged
        if found.is_unchanged:
            return self._loaded.none_has_other(number, found.stamp)
        return self._loaded.all_have(number, found.stamp)

    def _withdraw(self, use: AdapterUse) -> None:
        self._withdrawn |= use.counted
        use.found = None
        use.counted = set()
        self.revision += 1

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    def _look(self, path: str) -> AdapterFound | None:
        known = self._seen.get(path)
        seen = self._digest(path, known)
        self._seen[path] = seen
        self._seen.move_to_end(path)
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return seen.found

    def _digest(self, path: str, known: AdapterSeen | None) -> AdapterSeen:
        now = time.monotonic()
        directory = Path(path).expanduser()
        was_unchanged = known is None or known.is_unchanged
        try:
            files = look_at_files(directory)
            if known is not None and known.files == files and known.found is not None:
                return known
            if known is not None and known.files is None and now < known.at + RETRY_SECONDS:
                return known
            was_seen = known is not None and known.files not in (None, files)
            is_unchanged = was_unchanged and not was_seen and files.changed_ns < self._began_ns
            if was_unchanged and not is_unchanged:
                logger.warning(
                    "kvpact: the files of the adapter at %s have changed since this engine started. Requests with it "
                    "are not cached until %s",
                    path,
                    ANEW if self._is_reported else RESTART,
                )
            at_rest = look_at_rest(directory)
            digest = adapter_digest(directory) if at_rest == files else None
            is_whole = digest is not None and look_at_files(directory) == files
            found = AdapterFound(digest, files.stamp, is_unchanged) if digest is not None and is_whole else None
            return AdapterSeen(files, found, now, is_unchanged)
        except OSError as error:
            if known is None or known.files is not None:
                logger.warning("kvpact: requests with the adapter at %s are not cached: %s", path, error)
        return AdapterSeen(None, None, now, was_unchanged)
