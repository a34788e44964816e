"""Announcements of the blocks in this engine's own slab, once there is one.

Owns the subscriber until then. The blocks of other engines' slabs are announced by those engines.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Prompt, Subscriber
from kvpact.tiers.disk.slab_content import SlabContent


class SlabEvents:
    """An `Announcing` over the index of a slab, whose lock orders announcements and removals of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriber: Subscriber | None = None
        self._content: SlabContent | None = None

    def use(self, content: SlabContent) -> None:
        """Announce the blocks of this slab, which was opened on any thread."""
        with self._lock:
            self._content = content
            self._begin()

    def announce_to(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of blocks from now on: see `Announcing`."""
        with self._lock:
            self._subscriber = subscriber
            self._begin()

    def _begin(self) -> None:
        if self._content is not None and self._subscriber is not None:
            with self._content.lock:
                self._content.index.announce_to(self._subscriber)

    @property
    def announced_count(self) -> int:
        """Blocks that are announced."""
        return self._content.index.announced_count if self._content is not None else 0

    def announce(self, keys: Sequence[BlockKey], end: int, prompt: Prompt) -> None:
        """Announce blocks that it holds: see `Announcing`; none while the reader of the slab's table keeps the lock."""
        content = self._content
        if content is not None:
            content.look(lambda: content.index.announce(keys, end, prompt), None)

    def withdraw(self, keys: Sequence[BlockKey] | None = None) -> None:
        """Announce that blocks are gone: see `Announcing`."""
        if self._content is not None:
            with self._content.lock:
                self._content.index.withdraw(keys)

    def forget_announced(self) -> None:
        """Others have forgotten all blocks: see `Announcing`."""
        if self._content is not None:
            with self._content.lock:
                self._content.index.forget_announced()
