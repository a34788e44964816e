"""Block keys and the time at which each was last reported by a tier, as many as there is room for.

Owns the seconds for which a report is believed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf

import numpy as np

from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Prompt, Subscriber
from kvpact.index.key_table import Names

ASK_AGAIN_SECONDS = 60.0
"""Seconds that a shared tier's answer is believed: others may evict, delete or restart it (H46)."""

REFUTED_SECONDS = 5.0
"""Seconds until a block is read again from a tier that claimed it and did not deliver: others may have it."""


class LRUKeySet:
    """Block keys and when each was last added; keeps at most the `most` newest."""

    __slots__ = ("_keys", "_most")

    def __init__(self, most: int) -> None:
        self._keys: OrderedDict[BlockKey, float] = OrderedDict()  # a plain dict removes its first in O(n)
        self._most = most

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._keys)

    def added_since(self, key: BlockKey, time: float) -> bool:
        """True if `key` was added at `time` or later."""
        return self._keys.get(key, -inf) >= time

    def add(self, keys: Sequence[BlockKey], now: float = 0.0) -> None:
        """Add these as the newest."""
        for key in keys:
            self._keys[key] = now
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove these."""
        for key in keys:
            self._keys.pop(key, None)

    def discard_older(self, time: float) -> None:
        """Remove keys added before `time`. O(removed keys)."""
        while self._keys and next(iter(self._keys.values())) < time:
            self._keys.popitem(last=False)

    def first_of(self, keys: Sequence[BlockKey], end: int) -> int:
        """Position of the first of `keys[:end]` that is in the set, else `end`."""
        return first_in(self._keys, keys, end)


class AnnouncedKeys(LRUKeySet):
    """Blocks of a shared store; those that this engine has stored are announced, as many as there is room for."""

    __slots__ = ("_names", "_room", "_subscriber")

    def __init__(self, most: int, subscriber: Subscriber) -> None:
        super().__init__(most)
        self._room = most
        self._subscriber = subscriber
        self._names: dict[BlockKey, Names] = {}
        """Announced blocks, the oldest first."""

    @property
    def announced_count(self) -> int:
        """Blocks that are announced."""
        return len(self._names)

    def announce(self, keys: Sequence[BlockKey], first: int, prompt: Prompt) -> None:
        """Announce those of a prompt's blocks from `first` on, which were stored, that are not announced yet."""
        end = first + len(keys)
        new = next((at for at, key in enumerate(keys, first) if key not in self._names), end)
        names = prompt.names(new, end)
        if not len(names):
            return
        self._lose(keys[new - first :])  # announced ones after the first new one: a run is announced as a whole
        count = self._subscriber.stored(prompt, new, names)
        self._names.update(zip(keys[new - first :], names[:count], strict=False))
        self._lose([*islice(self._names, max(0, len(self._names) - self._room))])

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove these; the announced ones are gone."""
        super().discard(keys)
        self._lose(keys)

    def _lose(self, keys: Sequence[BlockKey]) -> None:
        lost = [self._names.pop(key) for key in keys if key in self._names] if self._names else ()
        if lost:
            self._subscriber.gone(np.stack(lost))

    def withdraw(self) -> None:
        """Announce that all blocks are gone."""
        self._lose([*self._names])

    def forget_announced(self) -> None:
        """Others have forgotten all blocks: none is announced now."""
        self._names.clear()


def first_in(found: Mapping[BlockKey, object], keys: Sequence[BlockKey], end: int) -> int:
    """Position of the first of `keys[:end]` that is in `found`, else `end`."""
    return next((at for at in range(end) if keys[at] in found), end) if found else end
