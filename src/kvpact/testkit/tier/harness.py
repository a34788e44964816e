"""The scene of a tier's check: tiers in a place of their own, watched, with every step written down.

Owns the judgement of every byte that a tier serves and the script of what was asked of it. Decides no check.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar, overload

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey, Namespace
from kvpact.testkit.faults import Crash, Faults
from kvpact.testkit.results import Broken, NotObservable, require
from kvpact.testkit.sample_blocks import (
    CANARY,
    Document,
    content,
    empty_buffers,
    fill,
    filled_buffers,
    first_difference,
)
from kvpact.tiers.base import HEADER_BYTES, UNSEALED, BlockBuffer, Progress, RecordMac, Tier

if TYPE_CHECKING:
    from kvpact.testkit.tier.conformance import TierConformance

PATIENCE_S = 20.0
"""Real seconds after which something is taken to hang; a busy machine needs a fraction of it."""

SETTLE_S = 0.15
"""Real seconds in which a late write would show."""

NAMESPACE = Namespace({"model": "kvpact-testkit", "dtype": "bytes", "block_size": "16"})
FOREIGN = Namespace({"model": "kvpact-testkit-foreign", "dtype": "bytes", "block_size": "16"})

Result = TypeVar("Result")


class Damage(StrEnum):
    """What a bad disk, a torn write or another program does to a stored block."""

    FLIPPED = "one bit of its payload is flipped"
    GARBAGE = "its payload is other bytes, as many"
    TORN = "the second half of its payload is zeros"
    SHORT = "its record is cut off"
    HEADER = "one bit of what describes it is flipped"
    MISPLACED = "the record of another block lies in its place"
    GONE = "it is gone"

    def of(self, record: bytes, other: bytes) -> bytes:
        """What this makes of a whole record as shared stores keep it, header first; `other` is another block's.

        What GONE leaves is no record: it is given back as it is.
        """
        header, payload = record[:HEADER_BYTES], record[HEADER_BYTES:]
        half = len(payload) // 2
        return {
            Damage.FLIPPED: header + payload[:100] + bytes([payload[100] ^ 1]) + payload[101:],
            Damage.GARBAGE: header + b"?" * len(payload),
            Damage.TORN: header + payload[:half] + bytes(len(payload) - half),
            Damage.SHORT: record[:-1],
            Damage.HEADER: header[:120] + bytes([header[120] ^ 1]) + header[121:] + payload,
            Damage.MISPLACED: other,
            Damage.GONE: record,
        }[self]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tier is to be opened, and how large. Two tiers opened at one place see one store, others nothing of it.

    `directory` exists, and is empty before the first opening. `slot_bytes` is a block's size over all ranks. The tier
    must have room for `capacity_blocks` blocks and no more, if it has a bound of its own.
    """

    directory: Path
    namespace: Namespace
    slot_bytes: int
    capacity_blocks: int
    seal: RecordMac = UNSEALED
    """How the tier's records are sealed: what the suite says, for tiers that can seal."""

    @property
    def name(self) -> str:
        """32 characters of this place alone, for stores that have no directories: a key prefix, a bucket's name."""
        return sha256(str(self.directory).encode()).hexdigest()[:32]


class Background(Generic[Result]):
    """A call under way on a thread of its own."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._results: list[Result] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="kvpact-background", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._errors.append(error)

    def ended(self, timeout: float = 0.0) -> bool:
        """Whether it ends within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self, timeout: float = PATIENCE_S) -> Result:
        """What it returned or raised. Raises Broken if it does not end within `timeout` seconds."""
        require(self.ended(timeout), f"an operation has not ended after {timeout:g} s")
        if self._errors:
            raise self._errors[0]
        return self._results[0]


class WatchedTier:
    """A tier under test. Each call is a step of the script; each block that is served is compared with its content."""

    def __init__(self, tier: Tier, place: Place, ranks: int, script: list[str], label: str = "") -> None:
        self.tier = tier
        self.place = place
        self._ranks = ranks
        self._script = script
        self._label = f"{label}: " if label else ""
        self.refused = False
        """Whether the last `delete` or `clear` was."""

    def say(self, step: str) -> None:
        """Write a step into the script."""
        self._script.append(self._label + step)

    def lookup(self, wanted: Document) -> int:
        """`Tier.lookup`, of all blocks."""
        held = self.tier.lookup(wanted.keys)
        self.say(f"lookup({wanted.name}) -> {held}")
        require(0 <= held <= len(wanted), f"lookup says {held} of {len(wanted)} blocks are held")
        return held

    def put(
        self,
        wanted: Document,
        start: int = 0,
        end: int | None = None,
        *,
        buffers: Sequence[BlockBuffer] | None = None,
        pieces: int | None = None,
    ) -> int:
        """`Tier.put` of blocks [start, end), by default all, with their proper content if no `buffers` are given."""
        end = len(wanted) if end is None else end
        buffers = buffers or self.filled(wanted.keys[start:end], pieces)
        try:
            stored = self.tier.put(wanted.keys[:end], start, buffers)
        except Crash:
            self.say(f"put({wanted.name}, blocks {start} to {end - 1}): the process died")
            raise
        self.say(f"put({wanted.name}, blocks {start} to {end - 1}) -> {stored}")
        require(0 <= stored <= end - start, f"put says it stored {stored} of {end - start} blocks")
        return stored

    def get(
        self,
        wanted: Document,
        start: int = 0,
        end: int | None = None,
        *,
        buffers: Sequence[BlockBuffer] | None = None,
        pieces: int | None = None,
        on_progress: Progress | None = None,
    ) -> int:
        """`Tier.get` of blocks [start, end), by default all. Raises Broken if a block that arrived is not itself."""
        end = len(wanted) if end is None else end
        buffers = buffers or self.empty(end - start, pieces)
        arrived = self.tier.get(wanted.keys[:end], start, buffers, on_progress)
        self.say(f"get({wanted.name}, blocks {start} to {end - 1}) -> {arrived}")
        require(0 <= arrived <= end - start, f"get says that {arrived} of {end - start} blocks arrived")
        for block, buffer in enumerate(buffers[:arrived], start):
            wrong = first_difference(buffer, content(wanted.keys[block], self.place.slot_bytes))
            require(not wrong, f"block {block} of {wanted.name} was served and is not what was stored: {wrong}")
        return arrived

    def delete(self, wanted: Document, *blocks: int) -> int:
        """`Tier.delete` of some blocks; 0 if it is refused."""
        words = f"delete({wanted.name}, {', '.join(f'block {block}' for block in blocks)})"
        return self._unless_refused(words, lambda: self.tier.delete([wanted.keys[block] for block in blocks])) or 0

    def clear(self) -> None:
        """`Tier.clear`, which may be refused."""
        self._unless_refused("clear()", self.tier.clear)

    def _unless_refused(self, words: str, call: Callable[[], Result]) -> Result | None:
        self.refused = True
        try:
            answer = call()
        except TierError as error:
            self.say(f"{words} is refused: {error}")
            return None
        self.refused = False
        self.say(f"{words} -> {answer}")
        return answer

    def close(self) -> None:
        """`Tier.close`."""
        self.say("close()")
        self.tier.close()

    def held(self, wanted: Document) -> int:
        """How many blocks are held and really served. Raises Broken if these are not the same."""
        held = self.lookup(wanted)
        arrived = self.get(wanted)
        require(arrived == held, f"lookup says that {held} blocks of {wanted.name} are held, get serves {arrived}")
        return held

    def empty(self, count: int, pieces: int | None = None) -> list[BlockBuffer]:
        """Fresh buffers for `count` blocks."""
        return empty_buffers(count, self.place.slot_bytes, pieces or self._ranks)

    def filled(self, keys: Sequence[BlockKey], pieces: int | None = None) -> list[BlockBuffer]:
        """Buffers with the content of `keys`."""
        return filled_buffers(keys, self.place.slot_bytes, pieces or self._ranks)

    def check_accounts(self, *documents: Document) -> None:
        """What the tier says of itself must agree with what it serves of `documents`, which are all that was stored."""
        held = {key for wanted in documents for key in wanted.keys[: self.tier.lookup(wanted.keys)]}
        headers = {header.key: header for header in self.tier.scan()}
        capacity = self.tier.capacity()
        say = f"{len(held)} blocks can be looked up"
        named = headers.keys() & held
        require(named == held, f"{say}, of which scan names {len(named)}")
        if self.tier.exclusive:  # in a shared store there may be blocks whose chain somebody else has dropped
            require(headers.keys() == held, f"{say}, scan names {len(headers)}")
            require(capacity.blocks == len(held), f"{say}, capacity() counts {capacity.blocks}")
            least = len(held) * self.place.slot_bytes
            require(
                capacity.used_bytes >= least, f"{say}, that is {least} bytes; capacity() says {capacity.used_bytes}"
            )
        bound = capacity.capacity_bytes or capacity.used_bytes
        require(capacity.used_bytes <= bound, f"{capacity.used_bytes} bytes are used of {bound}")
        for wanted in documents:
            for block, key in enumerate(wanted.keys[: self.tier.lookup(wanted.keys)]):
                header = headers[key]
                parent = wanted.keys[block - 1] if block else b""
                digest = self.place.seal.payload_digest([memoryview(content(key, self.place.slot_bytes))])
                wrong = [
                    f"{name} is {found!r} and not {right!r}"
                    for name, found, right in (
                        ("namespace", header.namespace, self.place.namespace.digest),
                        ("parent", header.parent, parent),
                        ("depth", header.depth, block),
                        ("length", header.length, self.place.slot_bytes),
                        ("digest", header.digest, digest),
                    )
                    if found != right
                ]
                require(not wrong, f"scan's header of block {block} of {wanted.name}: {'; '.join(wrong)}")


class TierScene:
    """What a check of tiers is given: a place, faults for the tier's store, and tiers to open."""

    def __init__(self, suite: TierConformance, directory: Path, capacity_blocks: int) -> None:
        self.suite = suite
        self.faults = Faults()
        self.script: list[str] = []
        self.place = Place(directory / "place", NAMESPACE, suite.slot_bytes, capacity_blocks, suite.seal)
        self.place.directory.mkdir()
        self._directory = directory
        self._opened: list[Tier] = []

    def open(self, place: Place | None = None, label: str = "") -> WatchedTier:
        """A tier at `place`, by default the scene's own."""
        place = place or self.place
        tier = self.suite.open_tier(place)
        self._opened.append(tier)
        watched = WatchedTier(tier, place, self.suite.ranks, self.script, label)
        watched.say(f"open(room for {place.capacity_blocks} blocks)")
        return watched

    def open_or_none(self, place: Place, label: str = "") -> WatchedTier | None:
        """As `open`; None if the tier refuses with a TierError."""
        try:
            return self.open(place, label)
        except TierError as refused:
            self.script.append(f"open refused: {refused}")
            return None

    def other_place(self, name: str, capacity_blocks: int | None = None) -> Place:
        """A place that shares nothing with any other."""
        directory = self._directory / name
        directory.mkdir()
        return replace(self.place, directory=directory, capacity_blocks=capacity_blocks or self.place.capacity_blocks)

    def sized(self, capacity_blocks: int) -> Place:
        """The scene's place, with room for so many blocks."""
        return replace(self.place, capacity_blocks=capacity_blocks)

    def reopen(self, watched: WatchedTier) -> WatchedTier:
        """Close a tier and open another one at its place."""
        watched.close()
        return self.open(watched.place)

    def bury(self, watched: WatchedTier) -> WatchedTier:
        """After a crash: another process opens the place."""
        self.suite.bury(watched.tier)
        self._opened.remove(watched.tier)
        self.faults.revive()
        return self.open(watched.place)

    def damage(self, watched: WatchedTier, wanted: Document, block: int, how: Damage) -> bool:
        """Damage what the store holds of a block; False if the author of the suite cannot do it."""
        done = self.suite.damage(watched.place, wanted.keys[block], how)
        if done:
            self.script.append(f"the store's record of {wanted.name}, block {block}, is damaged: {how}")
        return done

    def require_store_calls(self) -> None:
        """Raises NotObservable if the suite does not show the tier's calls of its store."""
        if not self.suite.shows_store_calls:
            raise NotObservable("the suite does not override `store_calls`")

    def require_reopening(self) -> None:
        """Raises NotObservable if nothing outlives a tier."""
        if not self.suite.reopens:
            raise NotObservable("the suite says `reopens = False`: nothing outlives the tier")

    def end(self) -> None:
        """Let everything go that is still held up, and close all tiers."""
        self.faults.reset()
        for tier in self._opened:
            with suppress(Exception, Crash):
                tier.close()


def expect(what: str, found: int, right: int) -> None:
    """Raise Broken, naming both numbers, unless they are equal."""
    require(found == right, f"{what}: {found}, not {right}")


def store(tier: WatchedTier, wanted: Document, *, end: int | None = None) -> None:
    """Put the first `end` blocks, by default all, where nothing hinders it. Raises Broken if they do not stay."""
    end = len(wanted) if end is None else end
    expect(f"put of {end} blocks of {wanted.name} stores", tier.put(wanted, 0, end), end)


def give_back(buffers: Sequence[BlockBuffer]) -> None:
    """The buffers are used for something else from now on."""
    for buffer in buffers:
        fill(buffer, bytes([CANARY]) * sum(piece.nbytes for piece in buffer))


def require_untouched(buffers: Sequence[BlockBuffer], settle: float = SETTLE_S) -> None:
    """Raises Broken if somebody writes to buffers that were given back, within `settle` seconds."""
    deadline = time.monotonic() + settle
    while True:
        for block, buffer in enumerate(buffers):
            clean = bytes([CANARY]) * sum(piece.nbytes for piece in buffer)
            if b"".join(buffer) != clean:
                raise Broken(f"buffer {block} was written to after get had returned")
        if time.monotonic() >= deadline:
            return
        time.sleep(settle / 10)


class ToldBuffers(Sequence[BlockBuffer]):
    """Buffers that tell when the tier takes one of a block's pieces: `tell(block)`."""

    def __init__(self, buffers: Sequence[BlockBuffer], tell: Callable[[int], None], first: int = 0) -> None:
        self._buffers = buffers
        self._tell = tell
        self._blocks = range(first, first + len(buffers))

    def __len__(self) -> int:
        return len(self._buffers)

    @overload
    def __getitem__(self, index: int) -> BlockBuffer: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockBuffer]: ...
    def __getitem__(self, index: int | slice) -> BlockBuffer | Sequence[BlockBuffer]:
        if isinstance(index, slice):
            blocks = self._blocks[index]
            return ToldBuffers(self._buffers[index], self._tell, blocks.start)
        return _ToldBlock(self._buffers[index], self._tell, self._blocks[index])


class _ToldBlock(Sequence[memoryview]):
    def __init__(self, pieces: BlockBuffer, tell: Callable[[int], None], block: int) -> None:
        self._pieces = pieces
        self._tell = tell
        self._block = block

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | Sequence[memoryview]:
        piece = self._pieces[index]
        self._tell(self._block)
        return piece

    def __iter__(self) -> Iterator[memoryview]:
        return (self[index] for index in range(len(self)))
