"""Queue of announcements: a prompt's blocks that a place has got, and those that it has lost, in the order of changes.

Owns what waits for the engine to take it. Removals come from any thread, all else happens on the scheduler's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvpact.index.announced import Prompt
from kvpact.index.key_table import Names
from kvpact.metrics import Metrics

MOST_BLOCKS = 4096
"""Blocks of events that one step sends; the rest waits for the next one (P11)."""

MOST_ENTRIES = 1024
"""Events that one step sends, beside vLLM's own: routers refuse a message of more than 4,096."""

MOST_WAITING = 16 * MOST_BLOCKS
"""Stored blocks that wait to be sent; those that come then are announced when a request asks for them again."""


class EnginePrompt(Prompt, Protocol):
    """Prompt of an engine's request."""

    def end(self) -> None:
        """The request has ended: keep nothing of it but what its blocks' announcements need."""
        ...


class Announcer(Protocol):
    """One engine's announcements, as its adapter sees them."""

    def forget(self) -> None:
        """Routers have forgotten all blocks of this engine."""
        ...

    def withdraw(self) -> None:
        """The engine's names of blocks may stand for other content now."""
        ...


class Place(NamedTuple):
    """A place of blocks, as routers distinguish them."""

    medium: str
    locality: str
    owner: str | None = None
    """The tier's label, if it is shared: routers refuse a block that is local and has an owner."""


MEMORY_PLACE = Place("CPU", "LOCAL")
DISK_PLACE = Place("STORAGE", "LOCAL")


def store_place(label: str) -> Place:
    """The place of a shared tier's blocks."""
    return Place("STORAGE", "REMOTE", label)


class Stored(NamedTuple):
    """A prompt's blocks from `first` on are in a place."""

    place: Place
    names: Names
    prompt: Prompt
    first: int

    def split(self, count: int) -> tuple[Stored, Stored]:
        """The first blocks, and the others."""
        tail = self._replace(names=self.names[count:], first=self.first + count)
        return self._replace(names=self.names[:count]), tail


class Gone(NamedTuple):
    """Blocks have left a place."""

    place: Place
    names: Names

    def split(self, count: int) -> tuple[Gone, Gone]:
        """The first blocks, and the others."""
        return self._replace(names=self.names[:count]), self._replace(names=self.names[count:])


@dataclass(eq=False)
class EventQueue:
    """Announcements that wait. One order for all places: the removal of a block follows its announcement."""

    metrics: Metrics
    _entries: deque[Stored | Gone] = field(default_factory=deque, init=False)
    _stored: int = field(default=0, init=False)
    """Stored blocks that wait."""

    def __len__(self) -> int:
        """Entries that wait."""
        return len(self._entries)

    def stored(self, entry: Stored) -> int:
        """Add blocks, as many as there is room for; returns how many."""
        room = MOST_WAITING - self._stored
        count = len(entry.names)
        if count > room:
            self.metrics.add("events_late", count - room)
            entry, _ = entry.split(room)
            count = room
        if count:
            self._stored += count
            self._entries.append(entry)
        return count

    def gone(self, entry: Gone) -> None:
        """Add blocks that are gone, however many wait."""
        self._entries.append(entry)

    def take(self) -> list[Stored | Gone]:
        """Remove and return the oldest entries, of `MOST_BLOCKS` blocks at most."""
        taken = list[Stored | Gone]()
        room = MOST_BLOCKS
        entries = self._entries
        while room and entries and len(taken) < MOST_ENTRIES:
            entry = entries.popleft()
            if len(entry.names) > room:
                entry, rest = entry.split(room)
                entries.appendleft(rest)
            room -= len(entry.names)
            if isinstance(entry, Stored):
                self._stored -= len(entry.names)
            taken.append(entry)
        if taken:
            self.metrics.add("events_sent", MOST_BLOCKS - room)
        return taken

    def clear(self) -> None:
        """Drop all that waits: others have forgotten all blocks."""
        self._entries.clear()
        self._stored = 0


@dataclass(eq=False, slots=True)
class PlaceEvents:
    """Subscriber of one place's index."""

    queue: EventQueue
    place: Place

    def stored(self, prompt: Prompt, first: int, names: Names) -> int:
        """Queue blocks that are there, as many as there is room for; returns how many."""
        return self.queue.stored(Stored(self.place, names, prompt, first))

    def gone(self, names: Names) -> None:
        """Queue blocks that are gone."""
        self.queue.gone(Gone(self.place, names))
