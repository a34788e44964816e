"""The KV cache groups of real models, as frozen in tests/data/models, and the memory that ways of keeping them take.

Content is what a match loads: of each group the blocks that `KVCacheGroup.needed` names, without padding. Waste is the
bytes that are reserved for it, over those of the content.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from kvpact.identity.groups import GroupKind, GroupSet, KVCacheGroup
from kvpact.identity.keys import Namespace
from kvpact.tiers.disk.superblock import Superblock

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "models"

PAGE_BYTES = 4096
SLOTS_PER_EXTENT = 16
"""Of the largest class, so that what an extent cannot give to a smaller one is less than 1/16 of it."""
FILL_BYTES = 16 << 30
"""Waste is that of a memory with so much content, at least of four prompts: extents are shared by prompts."""
CHUNK_TOKENS = 8192
"""vLLM keeps a state at the end of each step, of so many tokens at most, and at the prompt's last whole block."""


@dataclass(frozen=True)
class ModelGroup:
    """A group, and the bytes of one of its blocks on one rank: the content of its pages, without padding."""

    group: KVCacheGroup
    payload_bytes: int


@dataclass(frozen=True)
class HybridModel:
    """A model's groups on one rank, as vLLM numbers them."""

    name: str
    groups: tuple[ModelGroup, ...]
    physical_bytes: int
    """Of a block of vLLM's pool, which a block of any group may use."""
    without_hybrid_manager: tuple[int, int] | None
    """Tokens and bytes of a block if vLLM's hybrid manager is off; None: vLLM does not start."""

    @property
    def group_set(self) -> GroupSet:
        """The groups without their bytes."""
        return GroupSet(tuple(one.group for one in self.groups))

    def match(self, num_tokens: int) -> int:
        """The longest match within `num_tokens` tokens: a multiple of each group's blocks."""
        return num_tokens - num_tokens % self.group_set.alignment

    def needed(self, num_tokens: int) -> list[tuple[int, int]]:
        """For each group: the blocks that a match of `num_tokens` tokens loads, and the bytes of one."""
        return [(one.group.needed(num_tokens).count, one.payload_bytes) for one in self.groups]

    def computed(self, num_tokens: int) -> list[tuple[int, int]]:
        """The same for all blocks that the engine has while it computes these tokens."""
        states = ceil(num_tokens / CHUNK_TOKENS)
        return [
            (states if one.group.kind is GroupKind.STATE else ceil(num_tokens / one.group.block_size), size)
            for one, (_, size) in zip(self.groups, self.needed(num_tokens), strict=True)
        ]


def read_model(name: str, ranks: int = 1) -> HybridModel:
    """The model as frozen, on one of `ranks` (1 or 8) tensor-parallel ranks."""
    frozen = json.loads((FOLDER / f"{name}.json").read_text())
    made, off = frozen["ranks"][str(ranks)], frozen["hybrid_off"]
    return HybridModel(
        name,
        tuple(ModelGroup(read_group(group), group["payload_bytes"]) for group in made["groups"]),
        made["physical_bytes"],
        None if isinstance(off, str) else (off["groups"][0]["block_size"], off["physical_bytes"] // ranks),
    )


def read_group(group: dict[str, Any]) -> KVCacheGroup:
    """A group of a model's file."""
    return KVCacheGroup(GroupKind(group["kind"]), group["block_size"], group["span"])


def model_names() -> list[str]:
    """All frozen models."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def in_slots(blocks: Iterable[tuple[int, int]], slot_bytes: int) -> int:
    """Bytes of one slot for each block."""
    return sum(count * slot_bytes for count, _ in blocks)


def rounded(payload_bytes: int) -> int:
    """A slot's bytes: whole pages."""
    return ceil(payload_bytes / PAGE_BYTES) * PAGE_BYTES


def in_extents(blocks: Iterable[tuple[int, int]]) -> int:
    """Bytes of the extents that classes of slots take, one class for each distinct payload."""
    counts: Counter[int] = Counter()
    for count, payload_bytes in blocks:
        counts[rounded(payload_bytes)] += count
    extent_bytes = SLOTS_PER_EXTENT * max(counts)
    return sum(ceil(count / (extent_bytes // size)) * extent_bytes for size, count in counts.items())


@dataclass(frozen=True)
class Waste:
    """Bytes reserved over bytes of content, for prompts of one length, in each way of keeping them."""

    content_bytes: int
    """Of one prompt."""
    all_physical: float
    """Every block that the engine computed, each in a physical block: what a copy of its pool takes."""
    physical: float
    """A physical block for each block that a match needs."""
    largest_payload: float
    slab: float
    """The disk tier's file: slots of one size, the largest payload's, and a header each."""
    classes: float
    full_attention: float | None
    """Without the engine's hybrid manager, where it starts."""


def waste(model: HybridModel, num_tokens: int) -> Waste:
    """The waste of prompts of `num_tokens` tokens, of which a match is the whole blocks."""
    tokens = model.match(num_tokens)
    blocks = model.needed(tokens)
    content = sum(count * payload_bytes for count, payload_bytes in blocks)
    prompts = max(4, FILL_BYTES // content)
    slot_bytes = rounded(max(size for _, size in blocks))
    slab = Superblock.for_capacity(Namespace({}), slot_bytes, FILL_BYTES)
    num_slots = slab.slots_in(FILL_BYTES)
    off = model.without_hybrid_manager
    return Waste(
        content,
        in_slots(model.computed(tokens), model.physical_bytes) / content,
        in_slots(blocks, model.physical_bytes) / content,
        in_slots(blocks, slot_bytes) / content,
        slab.file_bytes(num_slots) / (num_slots * content / sum(count for count, _ in blocks)),
        in_extents((count * prompts, size) for count, size in blocks) / (prompts * content),
        off and ceil(tokens / off[0]) * off[1] / content,
    )
