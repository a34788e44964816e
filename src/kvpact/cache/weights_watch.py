"""Watch of the scheduler half over the weights: it applies the ranks' notices before a hook asks the cache.

Owns the last notices of the ranks, and whether the cache may serve. `kvpact.vllm.worker` lets the ranks write notices.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvpact.contract import ExternalCache
from kvpact.errors import WeightsVersionRefused
from kvpact.identity.notices import Notice, NoticeReader

logger = logging.getLogger(__name__)


class WeightsWatch:
    """Begins a new epoch of `cache` whenever the weights may have changed.

    Every method may raise what the cache raises. If a reset raises, the cache may not be used until one succeeds.
    """

    def __init__(self, pages: Sequence[memoryview], cache: ExternalCache) -> None:
        self.epochs = 0
        """Number of epochs of the cache that have begun."""
        self._reader = NoticeReader(pages)
        self._cache = cache
        self._notices: tuple[Notice, ...] = self._reader.look() or ()
        self.changes: tuple[int, ...] = tuple(notice.changes for notice in self._notices)
        """Number of changes of each rank's weights, as of the last look."""
        self.serves = True
        """False after a reset that failed, until one works."""
        self._before_sleep: tuple[Notice, ...] | None = None
        """The ranks' notices at the engine's last reset, until the engine takes another step."""
        self._words: tuple[int, ...] = tuple(notice.words for notice in self._notices)
        """Number of versions that each rank had been given when the cache got the last one."""
        self._refused: set[str] = set()

    def look(self) -> bool:
        """Take in the ranks' notices; returns whether the cache may be asked."""
        notices = self._reader.look()
        if notices is not None:
            self._take(notices)
        return self.serves

    def reset(self) -> None:
        """The engine resets the cache: its weights will change, or have changed, or it goes to sleep."""
        try:
            self.look()
        finally:
            self._reset()
        self._before_sleep = self._notices

    def engine_computes(self) -> None:
        """The engine takes a step: a rank that wakes after it has not slept since the last reset."""
        self._before_sleep = None

    def close(self) -> None:
        """Release the ranks' pages."""
        self._reader.close()

    def _take(self, notices: tuple[Notice, ...]) -> None:
        before = self._notices
        self._notices = notices
        self.changes = tuple(notice.changes for notice in notices)
        if any(now.changes != then.changes for now, then in zip(notices, before, strict=True)):
            self._reset()
        word = notices[0].word
        words = tuple(notice.words for notice in notices)
        if word and words != self._words and all(notice.word == word for notice in notices):
            self._words = words
            self._before_sleep = None  # a new version does not mean the weights from before
            self._say(word)
        if self._before_sleep is not None:
            self._wake(self._before_sleep)

    def _reset(self) -> None:
        self._before_sleep = None
        self.serves = False
        self.epochs += 1
        self._cache.reset()
        self.serves = True

    def _wake(self, asleep: tuple[Notice, ...]) -> None:
        """If each rank woke once, and no step came since the reset, the weights are those from before it."""
        if all(now.wakes == then.wakes + 1 for now, then in zip(self._notices, asleep, strict=True)):
            self._before_sleep = None
            self.epochs += self._cache.take_back_reset()

    def _say(self, word: str) -> None:
        try:
            self._cache.set_weights_version(word)
            self.epochs += 1
        except WeightsVersionRefused as error:
            if word not in self._refused:
                self._refused.add(word)
                logger.error("kvpact: the weights version %r is refused: %s", word, error)
