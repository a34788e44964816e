"""Hit rates of a trace over sizes of memory and disk, without an engine: its blocks go through kvpact's own index.

One request after the other, and no time: where requests overlap in a real run, a later one may come too early to hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from kvpact.errors import ConfigError
from kvpact.identity.keys import KEY_BYTES, BlockKey
from kvpact.index.block_index import ROOT, BlockIndex
from kvpact_testkit.compare.load import blocks_of

SHARES = (0.0, 1 / 16, 1 / 4, 1.0)
"""Sizes of memory and disk, as shares of all different blocks; memory always has a size."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Keys of a prompt's full blocks, its tokens, and tokens of a block."""

    keys: Sequence[BlockKey]
    tokens: int
    block: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes in tokens; prompt tokens, and those served from memory and from disk."""

    memory: int
    disk: int
    tokens: int
    from_memory: int
    from_disk: int

    @property
    def served(self) -> float:
        """Share of prompt tokens."""
        return (self.from_memory + self.from_disk) / max(1, self.tokens)


@dataclass(slots=True)
class Pool:
    """A memory or a disk of so many blocks; 0 keeps nothing."""

    blocks: int
    _index: BlockIndex | None = field(init=False)

    def __post_init__(self) -> None:
        self._index = BlockIndex(self.blocks) if self.blocks else None

    def held(self, keys: Sequence[BlockKey]) -> int:
        """Blocks with which a prompt begins that are there."""
        return self._index.held_prefix(keys) if self._index is not None else 0

    def save(self, keys: Sequence[BlockKey]) -> None:
        """Use a prompt's blocks and keep those that are not there, as many as there is room for."""
        if self._index is None or not keys:
            return
        known = self._index.known_prefix(keys)
        parent = keys[known - 1] if known else ROOT
        if known:
            self._index.touch(parent)
        room = min(len(keys) - known, self._index.reservable(parent, len(keys) - known))
        if room > 0 and (reserved := self._index.reserve(keys, known, known + room)) is not None:
            self._index.complete(reserved.slots)


def chained(names: Iterable[object]) -> list[BlockKey]:
    """Keys of blocks, each of its name and all before it."""
    keys: list[BlockKey] = []
    before = b""
    for name in names:
        before = blake2b(before + repr(name).encode(), digest_size=KEY_BYTES).digest()
        keys.append(BlockKey(before))
    return keys


def prompt_of(tokens: Sequence[int], block: int) -> Prompt:
    """The prompt in blocks of so many tokens."""
    whole = len(tokens) // block
    return Prompt(chained(tuple(tokens[at * block : (at + 1) * block]) for at in range(whole)), len(tokens), block)


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Prompts of a trace in its own blocks. Raises ConfigError for one of messages, which only a model can count."""
    for _, names, block, line in blocks_of(path):
        if not block:
            raise ConfigError(f"{path} has chat requests, whose tokens a model must count: run kvpact compare --trace")
        tokens = int(line.get("input_length") or line["in"])
        yield Prompt(chained(names)[: tokens // block], tokens, block)


def estimated(prompts: Sequence[Prompt], memory_blocks: int, disk_blocks: int) -> Estimate:
    """Serve prompts one after the other; all that is computed goes into memory and to the disk."""
    memory = Pool(memory_blocks)
    disk = Pool(disk_blocks)
    from_memory = from_disk = 0
    for prompt in prompts:
        most = prompt.keys[: (prompt.tokens - 1) // prompt.block]
        held = memory.held(most)
        from_memory += held * prompt.block
        from_disk += max(0, disk.held(most) - held) * prompt.block
        memory.save(prompt.keys)
        disk.save(prompt.keys)
    block = prompts[0].block if prompts else 0
    tokens = sum(prompt.tokens for prompt in prompts)
    return Estimate(memory_blocks * block, disk_blocks * block, tokens, from_memory, from_disk)


def over_sizes(prompts: Sequence[Prompt]) -> Iterator[Estimate]:
    """An estimate for each size of memory with each size of disk that is larger, or with none."""
    blocks = len({key for prompt in prompts for key in prompt.keys})
    for memory in SHARES[1:]:
        for disk in SHARES:
            if disk == 0 or disk > memory:
                yield estimated(prompts, max(1, int(blocks * memory)), int(blocks * disk))
