"""What a rank reports of its weights in its segment's last page: that they change, their word, that it woke with them.

Owns the page's layout up to `WORD_END`. A worker writes it at any time; the scheduler's half compares one number per
rank in every hook, without a system call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

HEAD_BYTES = 64
"""A cache line."""

SAID, CHANGES, WAKES, WORDS, WORD_CHANGES, WORD_LENGTH, WORD_CHECK, JUDGED_FROM = range(8)
"""Places of the numbers in the head, 8 bytes each, in the machine's byte order.

The last one is the scheduler's word to the rank: see `kvpact.memory.arena.ArenaSegment.judged_from`.

`SAID` is the sum of the next three and is written last; if another processor sees it earlier, the sum is wrong until
the rest arrives.
"""

MAX_WORD_BYTES = 1024
"""A word for weights in UTF-8: a commit, a path, the name of a training run with its step."""

WORD_END = HEAD_BYTES + MAX_WORD_BYTES
"""The rest of the page belongs to `kvpact.identity.loaded_adapters`."""


NOT_SEEN = -1
"""No valid sum."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What one rank reports now."""

    changes: int = 0
    """Number of times that a change of the weights began or ended since the rank started."""
    wakes: int = 0
    """Number of times that the rank woke with exactly the weights with which it was put to sleep."""
    words: int = 0
    """Number of times that a word for the weights was set."""
    word: str = ""
    """The word for the current weights; empty if none was set since they changed."""


class NoticeWriter:
    """A rank's writer of its own page, the only one."""

    def __init__(self, page: memoryview) -> None:
        self._head = page[:HEAD_BYTES].cast("Q")
        self._text = page[HEAD_BYTES:WORD_END]
        self._lock = threading.Lock()

    @property
    def changes(self) -> int:
        """See `Notice`."""
        return self._head[CHANGES]

    @property
    def words(self) -> int:
        """See `Notice`."""
        return self._head[WORDS]

    def weights_change(self) -> None:
        """The weights are about to change, or have changed: their word is void."""
        with self._lock:
            self._head[CHANGES] += 1
            self._head[SAID] += 1

    def set_word(self, word: str) -> None:
        """The weights as they are now are `word`. Raises ValueError for an empty word and for one that is too long."""
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
        """The rank woke with the weights with which it was put to sleep."""
        with self._lock:
            self._head[WAKES] += 1
            self._head[SAID] += 1

    def close(self) -> None:
        """Release the page."""
        self._head.release()
        self._text.release()


class NoticeReader:
    """The scheduler half's view of all ranks' pages, in rank order."""

    def __init__(self, pages: Sequence[memoryview]) -> None:
        self._heads = [page[:HEAD_BYTES].cast("Q") for page in pages]
        self._texts = [page[HEAD_BYTES:WORD_END] for page in pages]
        self._seen = [NOT_SEEN] * len(pages)

    def look(self) -> tuple[Notice, ...] | None:
        """What all ranks report, if any of them has written since the last call; always at the first call."""
        for head, seen in zip(self._heads, self._seen, strict=True):
            if head[SAID] != seen:
                return tuple(self._read(rank) for rank in range(len(self._heads)))
        return None

    def close(self) -> None:
        """Release the pages."""
        for view in (*self._heads, *self._texts):
            view.release()

    def _read(self, rank: int) -> Notice:
        """A page that is being written at this moment is read again by the next call."""
        head = self._heads[rank].tolist()
        text = bytes(self._texts[rank][: min(head[WORD_LENGTH], MAX_WORD_BYTES)])
        whole = crc32(text) == head[WORD_CHECK]
        self._seen[rank] = head[SAID] if whole and head[SAID] == head[CHANGES] + head[WAKES] + head[WORDS] else NOT_SEEN
        counts = whole and head[WORDS] and head[WORD_CHANGES] == head[CHANGES]
        return Notice(head[CHANGES], head[WAKES], head[WORDS], text.decode(errors="replace") if counts else "")
