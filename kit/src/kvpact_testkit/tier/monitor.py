"""A monitored tier under test: each call is noted in the script, and each served block is verified.

Owns the verification of every byte that a tier serves. Decides no check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import (
    ROOT,
    BlockBuffer,
    Entry,
    Progress,
    RecordHeader,
    SupportsLocate,
    SupportsPrefix,
    SupportsScan,
    Tier,
    chained,
    leading,
)
from kvpact_testkit.faults import Crash
from kvpact_testkit.results import require
from kvpact_testkit.sample_blocks import (
    SEPARATE,
    Document,
    content,
    empty_buffers,
    filled_buffers,
    first_difference,
    size_of,
)
from kvpact_testkit.tier.context import StoreContext, TierOptions
from kvpact_testkit.trace import Trace

Result = TypeVar("Result")


class MonitoredTier:
    """A tier under test. Each call is a step of the script; each served block is compared with its content.

    Blocks are named by their numbers in a document; without numbers all of them are meant.
    """

    def __init__(self, tier: Tier, place: StoreContext, suite: TierOptions, trace: Trace, label: str = "") -> None:
        self.tier = tier
        self.place = place
        self._ranks = suite.ranks
        self._one_size = suite.one_size
        self._trace = trace
        self._label = f"{label}: " if label else ""
        self.keeps_chains = tier.exclusive and isinstance(tier, SupportsPrefix)
        """Whether it holds a block only with its parent."""
        self.has_counts = type(tier).counts is not Tier.counts
        """Whether it counts what goes wrong."""
        self.deletes, self.clears = suite.deletes, suite.clears
        """Whether `delete` and `clear` do something."""
        self.refused = False
        """Whether the tier refused the last `delete` or `clear`."""

    def say(self, step: str) -> None:
        """Add a step to the script."""
        self._trace.note(self._label + step)

    def lookup(self, wanted: Document, blocks: Sequence[int] | None = None) -> set[int]:
        """The blocks that `Tier.lookup` names. Raises Broken if `SupportsPrefix.leading` says otherwise of them all."""
        blocks = range(len(wanted)) if blocks is None else blocks
        held = self._answer("lookup", wanted, blocks, self.tier.lookup([wanted.keys[block] for block in blocks]))
        if isinstance(self.tier, SupportsPrefix) and wanted.chained and blocks == range(len(wanted)):
            row = self.tier.leading(wanted.keys)
            right = leading([block in held for block in blocks])
            require(row == right, f"leading says {row} of {wanted.name}, lookup names {right} blocks in a row")
        return held

    def put(
        self,
        wanted: Document,
        blocks: Sequence[int] | None = None,
        *,
        buffers: Sequence[BlockBuffer] | None = None,
        pieces: int | None = None,
    ) -> set[int]:
        """The blocks that `Tier.put` says are held; with their own content if no `buffers` are given.

        Those of a chain follow one another. A block without a parent has its number as depth.
        """
        blocks = range(len(wanted)) if blocks is None else blocks
        keys = [wanted.keys[block] for block in blocks]
        buffers = buffers or self.filled(keys, pieces)
        if wanted.chained:
            self._locate(wanted, blocks)
            entries = chained(keys, buffers, wanted.keys[: min(blocks, default=0)])
        else:
            entries = [Entry(*each) for each in zip(keys, buffers, [ROOT] * len(keys), blocks, strict=True)]
        try:
            return self._answer("put", wanted, blocks, self.tier.put(entries))
        except Crash:
            self.say(f"put({wanted.name}, blocks {numbers(blocks)}): the process died")
            raise

    def get(
        self,
        wanted: Document,
        blocks: Sequence[int] | None = None,
        *,
        buffers: Sequence[BlockBuffer] | None = None,
        pieces: int | None = None,
        on_progress: Progress | None = None,
    ) -> set[int]:
        """The blocks that `Tier.get` says have arrived. Raises Broken if one of them has other content."""
        blocks = range(len(wanted)) if blocks is None else blocks
        keys = [wanted.keys[block] for block in blocks]
        buffers = buffers or self.empty(keys, pieces)
        self._locate(wanted, blocks)
        arrived = self._answer("get", wanted, blocks, self.tier.get(keys, buffers, on_progress))
        for block, key, buffer in zip(blocks, keys, buffers, strict=True):
            wrong = first_difference(buffer, content(key, self.size(key))) if block in arrived else ""
            require(not wrong, f"block {block} of {wanted.name} was served and is not what was stored: {wrong}")
        return arrived

    def _locate(self, wanted: Document, blocks: Sequence[int]) -> None:
        if wanted.chained and blocks and isinstance(self.tier, SupportsLocate):
            self.tier.locate(wanted.keys[: max(blocks) + 1])

    def _answer(self, call: str, wanted: Document, blocks: Sequence[int], each: Sequence[bool]) -> set[int]:
        there = {block for block, is_there in zip(blocks, each, strict=False) if is_there}
        self.say(f"{call}({wanted.name}, blocks {numbers(blocks)}) -> {numbers(there)}")
        require(len(each) == len(blocks), f"{call}, asked about {len(blocks)} blocks, answers about {len(each)}")
        return there

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

    def held(self, wanted: Document) -> set[int]:
        """Blocks that `lookup` names and `get` serves. Raises Broken if those are not the same."""
        held, arrived = self.lookup(wanted), self.get(wanted)
        said = f"lookup says that blocks {numbers(held)} of {wanted.name} are held, get serves {numbers(arrived)}"
        require(arrived == held, said)
        return held

    def held_keys(self, documents: Iterable[Document]) -> set[BlockKey]:
        """The keys of all blocks that are held and served, see `held`."""
        return {wanted.keys[block] for wanted in documents for block in self.held(wanted)}

    def named_keys(self, documents: Iterable[Document]) -> set[BlockKey]:
        """The keys of all blocks that can be looked up."""
        return {wanted.keys[block] for wanted in documents for block in self.lookup(wanted)}

    def require_undamaged(self, when: str) -> None:
        """Raises Broken if the tier has counted a damaged block; `when` completes the message."""
        damaged = self.tier.counts().damaged
        require(damaged == 0, f"{damaged} blocks are damaged {when}")

    def empty(self, keys: Sequence[BlockKey], pieces: int | None = None) -> list[BlockBuffer]:
        """Fresh buffers for `keys`, each of its block's size."""
        return [empty_buffers(1, self.size(key), pieces or self._ranks)[0] for key in keys]

    def filled(self, keys: Sequence[BlockKey], pieces: int | None = None) -> list[BlockBuffer]:
        """Buffers with the content of `keys`, each of its block's size."""
        return [filled_buffers([key], self.size(key), pieces or self._ranks)[0] for key in keys]

    def size(self, key: BlockKey) -> int:
        """Bytes of a sample block in this tier."""
        return self.place.slot_bytes if self._one_size else size_of(key, self.place.slot_bytes)

    def check_accounts(self, *documents: Document) -> None:
        """Raises Broken unless the tier's own figures agree with what it holds of `documents` and `SEPARATE`, all that
        was stored."""
        held = self.named_keys([*documents, SEPARATE])
        capacity = self.tier.capacity()
        say = f"{len(held)} blocks can be looked up"
        if self.tier.exclusive:
            require(capacity.blocks == len(held), f"{say}, capacity() counts {capacity.blocks}")
            least = sum(map(self.size, held))
            said = f"{say}, that is {least} bytes; capacity() says {capacity.used_bytes}"
            require(capacity.used_bytes >= least, said)
        bound = capacity.capacity_bytes or capacity.used_bytes
        require(capacity.used_bytes <= bound, f"{capacity.used_bytes} bytes are used of {bound}")
        if isinstance(self.tier, SupportsScan):
            headers = {header.key: header for header in self.tier.scan()}
            named = headers.keys() & held
            require(named == held, f"{say}, of which scan names {len(named)}")
            require(not self.tier.exclusive or named == headers.keys(), f"{say}, scan names {len(headers)}")
            for wanted in (*documents, SEPARATE):
                self._check_headers(headers, wanted)

    def _check_headers(self, headers: Mapping[BlockKey, RecordHeader], wanted: Document) -> None:
        for block, key in enumerate(wanted.keys):
            if (header := headers.get(key)) is None:
                continue
            right = {
                "namespace": self.place.namespace.digest,
                "parent": wanted.keys[block - 1] if wanted.chained and block else ROOT,
                "depth": block,
                "length": self.size(key),
                "digest": self.place.seal.payload_digest([memoryview(content(key, self.size(key)))]),
            }
            found = {name: getattr(header, name) for name in right}
            wrong = [
                f"{name} is {found[name]!r} and not {right[name]!r}" for name in right if found[name] != right[name]
            ]
            require(not wrong, f"scan's header of block {block} of {wanted.name}: {'; '.join(wrong)}")


def numbers(blocks: Iterable[int]) -> str:
    """Block numbers for people: "0 to 3, 6"."""
    rows: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if rows and rows[-1][1] == block - 1:
            rows[-1] = (rows[-1][0], block)
        else:
            rows.append((block, block))
    return ", ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in rows) or "none"


def expect(what: str, found: int | set[int], right: int | Iterable[int]) -> None:
    """Raise Broken, naming both numbers or both sets of blocks, unless they are equal."""
    if isinstance(found, int):
        require(found == right, f"{what}: {found}, not {right}")
    elif not isinstance(right, int):
        require(found == set(right), f"{what}: {numbers(found)}, not {numbers(right)}")


def store(tier: MonitoredTier, *documents: Document, end: int | None = None) -> None:
    """Put the first `end` blocks, by default all. Raises Broken unless the tier says that all of them are held."""
    for wanted in documents:
        blocks = range(len(wanted) if end is None else end)
        expect(f"put of blocks {numbers(blocks)} of {wanted.name} stores", tier.put(wanted, blocks), blocks)
