"""A monitored tier under test: each call is noted in the script, and each served block is verified.

Owns the verification of every byte that a tier serves. Decides no check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import BlockBuffer, Progress, RecordHeader, Tier
from kvpact_testkit.faults import Crash
from kvpact_testkit.results import require
from kvpact_testkit.sample_blocks import (
    LOOSE,
    Document,
    content,
    empty_buffers,
    filled_buffers,
    first_difference,
    size_of,
)
from kvpact_testkit.tier.context import StoreContext
from kvpact_testkit.trace import Trace

Result = TypeVar("Result")


class MonitoredTier:
    """A tier under test. Each call is a step of the script; each served block is compared with its content."""

    def __init__(self, tier: Tier, place: StoreContext, ranks: int, trace: Trace, label: str = "") -> None:
        self.tier = tier
        self.place = place
        self._ranks = ranks
        self._trace = trace
        self._label = f"{label}: " if label else ""
        self.refused = False
        """Whether the tier refused the last `delete` or `clear`."""

    def say(self, step: str) -> None:
        """Add a step to the script."""
        self._trace.note(self._label + step)

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
        """`Tier.put` of blocks [start, end), by default all, with their own content if no `buffers` are given."""
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
        """`Tier.get` of blocks [start, end), by default all. Raises Broken if an arrived block has other content."""
        end = len(wanted) if end is None else end
        buffers = buffers or self.empty(end - start, pieces)
        arrived = self.tier.get(wanted.keys[:end], start, buffers, on_progress)
        self.say(f"get({wanted.name}, blocks {start} to {end - 1}) -> {arrived}")
        require(0 <= arrived <= end - start, f"get says that {arrived} of {end - start} blocks arrived")
        for block, buffer in enumerate(buffers[:arrived], start):
            wrong = first_difference(buffer, content(wanted.keys[block], self.place.slot_bytes))
            require(not wrong, f"block {block} of {wanted.name} was served and is not what was stored: {wrong}")
        return arrived

    def lookup_each(self, blocks: Sequence[int]) -> list[bool]:
        """`Tier.lookup_each`, of some of the `LOOSE` blocks."""
        held = self.tier.lookup_each([LOOSE.keys[block] for block in blocks])
        return self._answer(f"lookup_each({LOOSE.name} {_numbers(blocks)})", held, blocks)

    def put_each(self, blocks: Sequence[int]) -> list[bool]:
        """`Tier.put_each` of some of the `LOOSE` blocks, with their own content."""
        keys = [LOOSE.keys[block] for block in blocks]
        words = f"put_each({LOOSE.name} {_numbers(blocks)})"
        try:
            stored = self.tier.put_each(keys, [self.filled([key])[0] for key in keys])
        except Crash:
            self.say(f"{words}: the process died")
            raise
        return self._answer(words, stored, blocks)

    def get_each(
        self,
        blocks: Sequence[int],
        *,
        buffers: Sequence[BlockBuffer] | None = None,
        on_progress: Progress | None = None,
    ) -> list[bool]:
        """`Tier.get_each` of some of the `LOOSE` blocks. Raises Broken if an arrived block has other content."""
        keys = [LOOSE.keys[block] for block in blocks]
        buffers = buffers or [empty_buffers(1, self._size(key), self._ranks)[0] for key in keys]
        arrived = self.tier.get_each(keys, buffers, on_progress)
        self._answer(f"get_each({LOOSE.name} {_numbers(blocks)})", arrived, blocks)
        for there, block, key, buffer in zip(arrived, blocks, keys, buffers, strict=True):
            wrong = first_difference(buffer, content(key, self._size(key))) if there else ""
            require(not wrong, f"loose block {block} was served and is not what was stored: {wrong}")
        return arrived

    def _answer(self, words: str, each: list[bool], blocks: Sequence[int]) -> list[bool]:
        there = [block for block, is_there in zip(blocks, each, strict=False) if is_there]
        self.say(f"{words} -> {_numbers(there)}")
        require(len(each) == len(blocks), f"asked about {len(blocks)} loose blocks it answers about {len(each)}")
        return each

    def held_loose(self, blocks: Sequence[int] = range(len(LOOSE))) -> set[int]:
        """Loose blocks that `lookup_each` names and `get_each` serves. Raises Broken if those are not the same."""
        held = self.lookup_each(blocks)
        arrived = self.get_each(blocks)
        for block, said, came in zip(blocks, held, arrived, strict=True):
            require(said == came, f"lookup_each says {said} of loose block {block}, get_each {came}")
        return {block for block, there in zip(blocks, arrived, strict=True) if there}

    def delete(self, wanted: Document, *blocks: int) -> int:
        """`Tier.delete` of some blocks; 0 if the tier refuses."""
        words = f"delete({wanted.name}, {', '.join(f'block {block}' for block in blocks)})"
        return self._unless_refused(words, lambda: self.tier.delete([wanted.keys[block] for block in blocks])) or 0

    def clear(self) -> None:
        """`Tier.clear`, which the tier may refuse."""
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
        """Blocks that `lookup` counts and `get` serves. Raises Broken if the two numbers differ."""
        held = self.lookup(wanted)
        arrived = self.get(wanted)
        require(arrived == held, f"lookup says that {held} blocks of {wanted.name} are held, get serves {arrived}")
        return held

    def prefixes(self, documents: Iterable[Document]) -> set[bytes]:
        """The keys of all blocks that are held and served, as in `held`."""
        return {key for wanted in documents for key in wanted.keys[: self.held(wanted)]}

    def within_reach(self, documents: Iterable[Document]) -> set[bytes]:
        """The keys of all blocks that can be looked up."""
        return {key for wanted in documents for key in wanted.keys[: self.tier.lookup(wanted.keys)]}

    def require_undamaged(self, when: str) -> None:
        """Raises Broken if the tier has counted a damaged block; `when` completes the message."""
        damaged = self.tier.counts().damaged
        require(damaged == 0, f"{damaged} blocks are damaged {when}")

    def empty(self, count: int, pieces: int | None = None) -> list[BlockBuffer]:
        """Fresh buffers for `count` blocks."""
        return empty_buffers(count, self.place.slot_bytes, pieces or self._ranks)

    def filled(self, keys: Sequence[BlockKey], pieces: int | None = None) -> list[BlockBuffer]:
        """Buffers with the content of `keys`, each of its block's size."""
        return [filled_buffers([key], self._size(key), pieces or self._ranks)[0] for key in keys]

    def _size(self, key: BlockKey) -> int:
        return size_of(key, self.place.slot_bytes)

    def check_accounts(self, *documents: Document) -> None:
        """Raises Broken unless the tier's own figures agree with what it holds of `documents` and `LOOSE`, all that was
        stored."""
        loose = {key for key, there in zip(LOOSE.keys, self.tier.lookup_each(LOOSE.keys), strict=True) if there}
        held = self.within_reach(documents) | loose
        headers = {header.key: header for header in self.tier.scan()}
        capacity = self.tier.capacity()
        say = f"{len(held)} blocks can be looked up"
        named = headers.keys() & held
        require(named == held, f"{say}, of which scan names {len(named)}")
        if self.tier.exclusive:  # a shared store may have blocks whose chain another engine has dropped
            require(headers.keys() == held, f"{say}, scan names {len(headers)}")
            require(capacity.blocks == len(held), f"{say}, capacity() counts {capacity.blocks}")
            least = sum(map(self._size, held))
            require(
                capacity.used_bytes >= least, f"{say}, that is {least} bytes; capacity() says {capacity.used_bytes}"
            )
        bound = capacity.capacity_bytes or capacity.used_bytes
        require(capacity.used_bytes <= bound, f"{capacity.used_bytes} bytes are used of {bound}")
        for wanted in documents:
            for block in range(self.tier.lookup(wanted.keys)):
                self._check_header(headers, wanted, block, block, wanted.keys[block - 1] if block else b"")
        for block in range(len(LOOSE)):
            if LOOSE.keys[block] in loose:
                self._check_header(headers, LOOSE, block, 0, b"")

    def _check_header(
        self, headers: Mapping[BlockKey, RecordHeader], wanted: Document, block: int, depth: int, parent: BlockKey
    ) -> None:
        header = headers[key := wanted.keys[block]]
        right = {
            "namespace": self.place.namespace.digest,
            "parent": parent,
            "depth": depth,
            "length": self._size(key),
            "digest": self.place.seal.payload_digest([memoryview(content(key, self._size(key)))]),
        }
        found = {name: getattr(header, name) for name in right}
        wrong = [f"{name} is {found[name]!r} and not {right[name]!r}" for name in right if found[name] != right[name]]
        require(not wrong, f"scan's header of block {block} of {wanted.name}: {'; '.join(wrong)}")


def _numbers(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, blocks)) or "none"


def expect(what: str, found: int, right: int) -> None:
    """Raise Broken, naming both numbers, unless they are equal."""
    require(found == right, f"{what}: {found}, not {right}")


def store(tier: MonitoredTier, *documents: Document, end: int | None = None) -> None:
    """Put the first `end` blocks, by default all. Raises Broken unless the tier counts all of them as stored."""
    for wanted in documents:
        blocks = len(wanted) if end is None else end
        expect(f"put of {blocks} blocks of {wanted.name} stores", tier.put(wanted, 0, blocks), blocks)
