"""Reports of a rank on its weights in its segment's last page: changes, their version, and waking with the same ones.

Owns the page's layout up to `WORD_END`. A worker writes it at any time; the scheduler side compares one number per rank
in every hook, without a system call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

HEAD_BYTES = 64
"""Bytes of the head: a cache line."""

SAID, CHANGES, WAKES, WORDS, WORD_CHANGES, WORD_LENGTH, WORD_CHECK, JUDGED_FROM = range(8)
"""Places of the numbers in the head, 8 bytes each, in the machine's byte order.

The scheduler writes the last one: see `kvpact.memory.arena.ArenaSegment.judged_from`.

`SAID` is the sum of the next three and is written last; if another processor sees it earlier, the sum is wrong until
the rest arrives.
"""

MAX_WORD_BYTES = 1024
"""Most bytes of a weights version in UTF-8: a commit, a path, the name of a training run with its step."""

WORD_END = HEAD_BYTES + MAX_WORD_BYTES
"""Offset of the rest of the page, which belongs to `kvpact.identity.loaded_adapters`."""


NOT_SEEN = -1
"""Number that is no valid sum."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Report of one rank now."""

    changes: int = 0
    """Number of times that a change of the weights began or ended since the rank started."""
    wakes: int = 0
    """Number of times that the rank woke with exactly the weights with which it went to sleep."""
    words: int = 0
    """Number of times that a weights version was set."""
    word: str = ""
    """Version of the current weights; empty if none was set since they changed."""


class NoticeWriter:
    """Only writer of a rank's page, in the rank."""

    def __init__(self, page: memoryview) -> None:
        self._head = page[:HEAD_BYTES].cast("Q")
        self._text = page[HEAD_BYTES:WORD_END]
        self._lock = threading.Lock()

    @property
    def changes(self) -> int:
        """Number of changes of the weights so far."""
        return self._head[CHANGES]

    @property
    def words(self) -> int:
        """Number of versions given so far."""
        return self._head[WORDS]

    def weights_change(self) -> None:
        """Report that the weights are about to change, or have changed: their version is void."""
        with self._lock:
            self._head[CHANGES] += 1
            self._head[SAID] += 1

    def set_word(self, word: str) -> None:
        """Report `word` as the version of the current weights. Raises ValueError for an empty or too long one."""
        text = word.encode()
        if not 0 < len(text) <= MAX_WORD_BYTES:
            raise ValueError(f"a weights version has 1 to {MAX_WORD_BYTES} bytes of UTF-8, not {len(text)}")
        with self._lock:
            self._text[: len(text)] = text
            self._head[WORD_LENGTH] = len(text)
            self._head[WORD_CHECK] = crc32(text)
            self._head[WORD_CHANGES] = self._head[CHANGES]
            self._head[WORDS] += 1
            self._head[SAID] += 1

    def woke_equal(self) -> None:
        """Report that the rank woke with the weights with which it went to sleep."""
        with self._lock:
            self._head[WAKES] += 1
            self._head[SAID] += 1

    def close(self) -> None:
        """Release the page."""
        self._head.release()
        self._text.release()


class NoticeReader:
    """Reader of all ranks' pages on the scheduler side, in rank order."""

    def __init__(self, pages: Sequence[memoryview]) -> None:
        self._heads = [page[:HEAD_BYTES].cast("Q") for page in pages]
        self._texts = [page[HEAD_BYTES:WORD_END] for page in pages]
        self._seen = [NOT_SEEN] * len(pages)

    def look(self) -> tuple[Notice, ...] | None:
        """Reports of all ranks, if any of them has written since the last call; always at the first call."""
        for head, seen in zip(self._heads, self._seen, strict=True):
            if head[SAID] != seen:
                return tuple(self._read(rank) for rank in range(len(self._heads)))
        return None

    def close(self) -> None:
        """Release the pages."""
        for view in (*self._heads, *self._texts):
            view.release()

    def _read(self, rank: int) -> Notice:
        """Read a rank's page; if it is being written at this moment, the next call reads it again."""
        head = self._heads[rank].tolist()
        text = bytes(self._texts[rank][: min(head[WORD_LENGTH], MAX_WORD_BYTES)])
        whole = crc32(text) == head[WORD_CHECK]
        self._seen[rank] = head[SAID] if whole and head[SAID] == head[CHANGES] + head[WAKES] + head[WORDS] else NOT_SEEN
        counts = whole and head[WORDS] and head[WORD_CHANGES] == head[CHANGES]
        return Notice(head[CHANGES], head[WAKES], head[WORDS], text.decode(errors="replace") if counts else "")
