"""Announcements of one place: the blocks of its index that others were told of, by the engine's names of them.

Owns a column over the index's rows. Tells a subscriber which blocks are there, each once, and which of them have left.
Knows no tokens: a prompt has the engine's names of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvpact.identity.keys import BlockKey
from kvpact.index.key_table import FEW, Names, RowArray, zeros
from kvpact.index.links import Links, selection


class Prompt(Protocol):
    """Blocks of a prompt, as their engine names them."""

    def names(self, first: int, end: int) -> Names:
        """The engine's names of the blocks [first, end), a row of 64-bit words each; fewer if the others have none."""
        ...


class Subscriber(Protocol):
    """Receiver of one place's announcements."""

    def stored(self, prompt: Prompt, first: int, names: Names) -> int:
        """Blocks of a prompt from its block `first` on are there, by these names; returns how many are announced."""
        ...

    def gone(self, names: Names) -> None:
        """Announced blocks are no longer there."""
        ...


class Announcing(Protocol):
    """A place whose blocks are announced."""

    @property
    def announced_count(self) -> int:
        """Blocks that are announced."""
        ...

    def announce_to(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of blocks from now on: those that `announce` names, and when they are there no longer."""
        ...

    def announce(self, keys: Sequence[BlockKey], end: int, prompt: Prompt) -> None:
        """Announce those of the first `end` blocks of the prompt with these keys that may be served and are not
        announced yet."""
        ...

    def withdraw(self, keys: Sequence[BlockKey] | None = None) -> None:
        """Announce that all blocks are gone, or these `keys` and all after them, although they are still there."""
        ...

    def forget_announced(self) -> None:
        """Others have forgotten all blocks: none is announced now."""
        ...


class Announced:
    """Column of the names under which rows were announced; zeros for the others.

    The rows of a chain are announced from the first one on: what comes before an announced row is announced. 8 bytes a
    row, or as many as a name has.
    """

    __slots__ = ("_links", "_marks", "_names", "_subscriber", "_words", "count")

    def __init__(self, links: Links, subscriber: Subscriber) -> None:
        self._links = links
        self._subscriber = subscriber
        self._use(1)
        self.count = 0
        """Rows that are announced."""

    def _use(self, words: int) -> None:
        """Make the column, for names of so many words."""
        self._words = words
        each, self._marks = zeros((self._links.root + 1) * words, "u8")
        self._names = each.reshape(-1, words)

    def announce(self, row: int, number: int, prompt: Prompt) -> None:
        """Announce the block in `row`, which is `number` of its prompt, counted from 0, and those before it that are
        not announced yet. All of them may be served."""
        parts = list[range]()
        first = number + 1
        marks = self._marks
        words = self._words
        while first and not marks[row * words]:
            top = self._links.start[row]
            if row > top and marks[(row - 1) * words]:
                top = row
            elif row > top:
                known = self._names[top : row + 1, 0].nonzero()[0]
                top += int(known[-1]) + 1 if len(known) else 0
            parts.append(range(top, row + 1))
            first -= row + 1 - top
            row = self._links.parent[top]
        if not parts:
            return
        names = prompt.names(first, number + 1)
        count = self._subscriber.stored(prompt, first, names) if len(names) else 0
        if not count:
            return
        if names.shape[1] != words:
            self._use(names.shape[1])
        at = 0
        for part in reversed(parts):
            end = min(at + len(part), count)
            self._names[part.start : part.start + end - at] = names[at:end]
            at = end
        self.count += count

    def leave(self, rows: Sequence[int] | RowArray) -> None:
        """Rows lose their keys: the announced ones are gone."""
        if not self.count or not len(rows):
            return
        if len(rows) < FEW:
            rows = [row for row in rows if self._marks[row * self._words]]
            if not rows:
                return
        at = selection(rows) if isinstance(rows, list | tuple | range) else rows
        names = self._names[at]
        names = names[names[:, 0] != 0]
        if len(names):
            self._names[at] = 0
            self.count -= len(names)
            self._subscriber.gone(names)

    def withdraw(self, rows: Sequence[int] | None = None) -> None:
        """All blocks are gone for others, or those in `rows` and all after them: nobody can ask for them under the
        names that were announced."""
        if rows is not None:
            for row in rows:
                self.leave(self._links.subtree(row)[::-1])
        elif self.count:
            self.leave(self._names[:, 0].nonzero()[0])

    def forget(self) -> None:
        """Others have forgotten all blocks: none is announced now."""
        if self.count:
            self._use(self._words)
            self.count = 0
