"""Which weights an adapter's name stands for in the engine, by the content of its files.

Owns the digests of adapters and the rule when a file's content is what the engine computes with. Files are looked at
and read on a thread of its own, never on the caller's.

vLLM reads an adapter's files at moments that nobody tells the scheduler's process: ahead (`add_lora`,
`/v1/load_lora_adapter`, `--lora-modules`), when the first request with the id runs, and again after its own cache of
`max_cpu_loras` has dropped the id. In between it computes with what it read, whatever the files have become. So an
adapter counts in two cases only:

- **Nothing about its files has changed since this engine started**, and no rank says that it has loaded the id from
  files in another state. Each reading since the start gave the bytes that are digested here.
- **Every rank says that it has loaded the id from the files in the very state in which they were digested here.** The
  ranks say so if their worker is `KvpactWorker` (`kvpact.vllm.adapter_watch`). A request that is the first one to have
  vLLM load the adapter comes before that; those behind it are cached.

Else the requests are neither stored nor served. What a rank says may change when a step is under way that was ordered
for what it said before. `look` tells of it before the step's report is taken in, so that nothing the step computed is
stored, and `CacheWorker` calls blocks invalid that were loaded for an adapter which the step did not run with.

What says when a file changed is its ctime, which no program can set back: `mtime` goes with a copy. A file server's
clock may be behind this machine's; what is found otherwise than at an earlier request has changed, whatever the clocks
say.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvpact.identity.adapter_files import FilesSeen, look_at_files, look_at_rest
from kvpact.identity.digest_thread import DigestThread, Pending
from kvpact.identity.loaded_adapters import LoadedAdapters
from kvpact.identity.weights import adapter_digest

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 256
"""Adapters that are remembered, beyond those that vLLM keeps loaded: the least recently used one is forgotten."""

RETRY_SECONDS = 10.0
"""Files that could not be read are read again for a request that comes so much later."""


@dataclass(frozen=True, slots=True)
class AdapterFound:
    """An adapter's content: a digest of all its files, and in which state they had it."""

    digest: str
    stamp: bytes
    """See `FilesSeen`."""
    is_unchanged: bool
    """Whether the files have been in this state since the engine started."""


@dataclass(frozen=True, slots=True)
class AdapterSeen:
    """What came of digesting an adapter's files, at `at` (monotonic). `found` is None if they could not be read."""

    files: FilesSeen | None
    found: AdapterFound | None
    at: float
    is_unchanged: bool


@dataclass(eq=False, slots=True)
class AdapterUse:
    """What an engine calls by one adapter id. `is_disputed` once two paths were given for it: see `AdapterDigests`."""

    number: int
    path: str
    is_disputed: bool = False
    found: AdapterFound | None = None
    """What counts for the id now; None before anything does."""
    counted: set[str] = field(default_factory=set)
    """What requests with it were said to compute with."""


class AdapterDigests:
    """Content digests of LoRA adapters, asked for with each request and looked at in the background."""

    def __init__(self, most: int = MAX_ADAPTERS) -> None:
        """To be made before the engine can load an adapter. `most` adapters are remembered."""
        self._began_ns = time.time_ns()
        self._most = most
        self._thread = DigestThread("kvpact-adapter")
        self._uses: OrderedDict[int, AdapterUse] = OrderedDict()
        self._seen: OrderedDict[str, AdapterSeen] = OrderedDict()
        """By path; the thread's own."""
        self._loaded: LoadedAdapters | None = None
        self._withdrawn: set[str] = set()
        self.revision = 0
        """Goes up when what was said of an adapter before may be void, and when more may be said."""

    def __len__(self) -> int:
        return max(len(self._uses), len(self._seen))

    def bind(self, loaded: LoadedAdapters | None) -> None:
        """Where the ranks say what they have loaded; None once they are gone, with all that was cached."""
        if self._loaded is not None:
            self._loaded.close()
        self._loaded = loaded
        self.revision += 1
        for use in self._uses.values():
            use.found = None
            use.counted.clear()
        self._withdrawn.clear()

    def look(self) -> set[str]:
        """Take in what the ranks say; which of the `counted` names may stand for something else by now."""
        if self._uses and self._loaded is not None and self._loaded.look():
            self.revision += 1
            for use in self._uses.values():
                if use.found is not None and not self._holds(use.number, use.found):
                    self._withdraw(use)
        withdrawn, self._withdrawn = self._withdrawn, set()
        return withdrawn

    def ask(self, number: int, path: str, *, loads_in_place: bool) -> tuple[AdapterUse, Pending[AdapterFound]]:
        """What is in the files of a request's adapter, as they are now: no answer if it cannot be told.

        vLLM goes by the id, `number`, alone once it is loaded. An id that came with another path before may stand for
        either, so neither path's requests are cached as long as the id is remembered.
        """
        use = self._uses.setdefault(number, AdapterUse(number, path))
        self._uses.move_to_end(number)
        if len(self._uses) > self._most:
            self._withdraw(self._uses.popitem(last=False)[1])  # nobody would hear that it is loaded again
        if use.path != path and not use.is_disputed:
            use.is_disputed = True
            self.revision += 1
        if loads_in_place or use.is_disputed:
            return use, Pending()  # in place: the weights behind the id may change with every request
        return use, self._thread.ask(partial(self._look, path))

    def counts(self, use: AdapterUse, found: AdapterFound) -> bool:
        """Whether a request with this id computes with what was found, as far as the last `look` tells."""
        if use.is_disputed or self._uses.get(use.number) is not use or not self._holds(use.number, found):
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
        use.found, use.counted = None, set()
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
        now, directory = time.monotonic(), Path(path).expanduser()
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
                    "are cached once all workers say that they have loaded the files as they are; they say so with "
                    "--worker-cls kvpact.vllm.worker.KvpactWorker, and else an engine that is started after the change "
                    "caches them",
                    path,
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
