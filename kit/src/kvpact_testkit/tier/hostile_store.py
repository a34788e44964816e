"""A store that is in trouble for a while: slow, gone, replaced, full, read-only, unremovable.

Owns the table of troubles: each says what its store does meanwhile, and what people must be told of it. A cache above
it has to use it again within `AGAIN_SECONDS` of its end, with prompts coming.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from kvpact.tiers.shared.store import RecordBuffer, RecordPieces, StoredRecord, StoreError, StoreFull
from kvpact_testkit.tier.dictionary_store import DictionaryStore
from kvpact_testkit.tier.stepped_executor import INSTANT_S, SteppedExecutor

AGAIN_SECONDS: Final = 30.0
"""Seconds of the scene's clock after the end of a trouble by which the store is used again."""


class Call(Enum):
    """What a store is asked to do."""

    READ = "read"
    WRITE = "write"
    REMOVE = "remove"


class Trouble(NamedTuple):
    """A kind of trouble. `told` is a regular expression for what is said of the tier or the miss while it lasts."""

    name: str
    told: str
    refused: Mapping[Call, StoreError] = {}
    seconds: float = INSTANT_S
    """Seconds of each operation, as they are reported."""
    loses_all: bool = False
    """Whether it is empty afterwards."""


_GONE: Final = StoreError("nobody answers at the store's address")
_REPLACED: Final = StoreError("another store is in its place")
_READ_ONLY: Final = StoreError("the store is read-only")

TROUBLES: Final = (
    Trouble("slow", r"takes 1,500 ms, and the engine computes such prompts sooner", seconds=1.5),
    Trouble("gone", str(_GONE), dict.fromkeys(Call, _GONE)),
    Trouble("replaced", str(_REPLACED), dict.fromkeys(Call, _REPLACED), loses_all=True),
    Trouble("full", "no space left", {Call.WRITE: StoreFull("no space left")}),
    Trouble("read-only", str(_READ_ONLY), {Call.WRITE: _READ_ONLY, Call.REMOVE: _READ_ONLY}),
    Trouble("unremovable", r"\d+ blocks wait for their deletion", {Call.REMOVE: StoreError("you may not delete")}),
)


class HostileStore(DictionaryStore):
    """See `RecordStore`; what is `refused` raises, and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: Mapping[Call, StoreError] = {}

    def _meet(self, call: Call) -> None:
        if call in self.refused:
            raise self.refused[call]

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._meet(Call.READ)
        return super().exists(names)

    def read(self, names: Sequence[str], buffers: Sequence[RecordBuffer]) -> list[bool]:
        self._meet(Call.READ)
        return super().read(names, buffers)

    def heads(self, names: Sequence[str]) -> list[bytes | None]:
        self._meet(Call.READ)
        return super().heads(names)

    def names(self, group: str = "") -> Iterator[StoredRecord]:
        self._meet(Call.READ)
        return super().names(group)

    def size(self, name: str) -> int | None:
        self._meet(Call.READ)
        return super().size(name)

    def write(self, names: Sequence[str], records: Sequence[RecordPieces]) -> None:
        self._meet(Call.WRITE)
        super().write(names, records)

    def remove(self, names: Sequence[str]) -> int:
        self._meet(Call.REMOVE)
        return super().remove(names)


@dataclass
class HostilePlace:
    """A store, and the queue of the tier above it, which a trouble may reach as well."""

    queue: SteppedExecutor
    store: HostileStore = field(default_factory=HostileStore)

    def begin(self, trouble: Trouble) -> None:
        """The trouble begins."""
        self.store.refused = trouble.refused
        self.queue.seconds = trouble.seconds
        if trouble.loses_all:
            self.store.records.clear()

    def end(self) -> None:
        """All is well again."""
        self.store.refused = {}
        self.queue.seconds = INSTANT_S
