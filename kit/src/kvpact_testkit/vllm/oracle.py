"""The right content of every slot of KV memory: a digest of all tokens up to its own, so that any wrong byte is found.

Owns the CPU tensors with the digests. Knows no request's state and no connector.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from ctypes import c_uint8
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact_testkit.engine.oracle import Digests, digests_of, mix, word

VOCABULARY = 30_000
"""Sampled tokens are below this number."""


@dataclass(frozen=True, slots=True)
class TokenChain:
    """A request's tokens, to be changed in place, and their digests. `identity` is what else decides the KV content."""

    identity: str
    tokens: list[int]

    def digests(self, start: int, end: int) -> Digests:
        """One digest for each of the tokens `start` to `end`, over all tokens up to and including it."""
        tokens = np.array(self.tokens[:end], dtype=np.int64)
        return digests_of(tokens, np.zeros(len(tokens), np.uint64), np.uint64(word(self.identity)))[0][start:]

    def next_token(self) -> int:
        """The token that the "model" samples after these: it depends on all of them."""
        return int(self.digests(len(self.tokens) - 1, len(self.tokens))[0]) % VOCABULARY


def continuation(identity: str, prompt: Sequence[int], length: int) -> list[int]:
    """The output of an engine without a cache."""
    chain = TokenChain(identity, list(prompt))
    for _ in range(length):
        chain.tokens.append(chain.next_token())
    return chain.tokens[len(prompt) :]


@dataclass(frozen=True, slots=True)
class WrongSlot:
    """A slot of KV memory with wrong content, which `found` describes."""

    request_id: str
    position: int
    block_id: int
    layer: str
    rank: int
    found: str

    def __str__(self) -> str:
        return (
            f"{self.request_id} reads token {self.position} in block {self.block_id} "
            f"({self.layer}, rank {self.rank}) and finds {self.found}"
        )


@dataclass(frozen=True, slots=True)
class PageShape:
    """The shape of one rank's KV memory in each layer: `[num_blocks, heads, block_size, row_bytes]`, in bytes."""

    num_blocks: int
    heads: int
    block_size: int
    row_bytes: int
    layout: str = ""
    """The order of layers (L), blocks, heads, tokens (N) and bytes (C) in one memory, such as "BLHNC"; "" means that
    each layer has a memory of its own, in the order of its axes."""
    latent: bool = False
    """Whether there are no heads: a tensor is `[blocks, block_size, elements]`, and equal on all ranks."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A layer's KV memory: what connectors get, and the same as an array `[blocks, tokens, ...]` of unsigned words."""

    given: Any
    place: NDArray[Any]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return int(self.place.shape[1])


class OracleMemory:
    """One rank's KV memory: the layers in forward order, all zeros. `number` is the rank's, if ranks differ."""

    def __init__(
        self, layers: Mapping[str, LayerMemory], number: int, allocations: Sequence[NDArray[np.uint8]] = ()
    ) -> None:
        self._allocations = allocations
        self.tensors: dict[str, Any] = {name: layer.given for name, layer in layers.items()}
        self._layers = dict(layers)
        self._patterns: dict[str, NDArray[np.uint64]] = {}
        for index, (name, layer) in enumerate(layers.items()):
            lanes = np.arange(-(-_row_bytes(layer.place) // 8), dtype=np.uint64)
            self._patterns[name] = mix(lanes + np.uint64((index * 64 + number) << 32))

    @classmethod
    def of(cls, layers: Sequence[str], shape: PageShape, rank: int) -> OracleMemory:
        """Layers of one shape, of two-byte elements."""
        import torch

        made = {}
        for layer, raw in zip(layers, _memory(len(layers), shape), strict=True):
            tensor = torch.from_numpy(raw[:, 0] if shape.latent else raw).view(torch.float16)
            made[layer] = LayerMemory(tensor, raw.swapaxes(1, 2))
        return cls(made, 0 if shape.latent else rank)

    def follow(self) -> None:
        """Look for the layers where their tensors lie now: a connector may have moved them to memory of its own."""
        for name, layer in self._layers.items():
            shape, strides = layer.place.shape, layer.place.strides
            span = sum((count - 1) * step for count, step in zip(shape, strides, strict=True)) + layer.place.itemsize
            moved = (c_uint8 * span).from_address(layer.given.data_ptr())
            self._layers[name] = LayerMemory(layer.given, np.ndarray(shape, layer.place.dtype, moved, 0, strides))

    def write(self, block_ids: Sequence[int], start: int, digests: Digests, layer: str) -> None:
        """Write a forward pass's content of `layer` for the tokens from `start` on of a request with these blocks."""
        where = self._where(block_ids, start, len(digests), layer)
        self._layers[layer].place[where] = self._rows(digests, layer)

    def first_wrong(self, block_ids: Sequence[int], digests: Digests, layer: str, start: int = 0) -> int | None:
        """The first token from `start` on whose slot in `layer` does not match `digests`, or None."""
        where = self._where(block_ids, start, len(digests), layer)
        right = _equal(self._layers[layer].place[where], self._rows(digests, layer))
        return None if right.all() else start + int(np.argmin(right))

    def copy_state(self, source: int, behind_it: int, target: int, behind: int, windows: int, layer: str) -> None:
        """Copy a state behind `behind` accepted drafts to block `target`: of `source` the windows, in its first slots,
        as far as they go, of `behind_it` the rest."""
        place = self._layers[layer].place
        place[target, windows:] = place[behind_it, windows:]
        place[target, : windows - behind] = place[source, behind:windows].copy()

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of all layers."""
        for layer in self._layers.values():
            layer.place[target] = layer.place[source]

    def block_size(self, layer: str) -> int:
        """Slots of a block."""
        return self._layers[layer].block_size

    def describe(self, block_id: int, offset: int, layer: str, chains: Iterator[tuple[str, TokenChain]]) -> str:
        """Describe the content of one slot: nothing, a token of one of `chains`, or unknown bytes."""
        found = self._layers[layer].place[block_id, offset]
        if not found.any():
            return "zeros: nothing was ever written there"
        for request_id, chain in chains:
            matches = _equal(self._rows(chain.digests(0, len(chain.tokens)), layer), found)
            if matches.any():
                return f"token {int(np.argmax(matches))} of {request_id}"
        return "bytes that no request ever wrote"

    def copied(self) -> list[NDArray[np.uint8]]:
        """All bytes of all allocations."""
        return [bytes_of.copy() for bytes_of in self._allocations]

    def changed_outside(self, before: Sequence[NDArray[np.uint8]], pages: Mapping[str, Collection[int]]) -> int:
        """Bytes that differ from `before` and are in none of these blocks of these layers."""
        changed = 0
        for old, now in zip(before, self._allocations, strict=True):
            allowed = np.zeros(len(now), np.bool_)
            for layer, blocks in pages.items():
                _same_place(self._layers[layer].place, now, allowed)[list(blocks)] = True
            changed += int(np.count_nonzero((old != now) & ~allowed))
        return changed

    def _where(
        self, block_ids: Sequence[int], start: int, count: int, layer: str
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(start, start + count)
        table, size = np.array(block_ids, dtype=np.int64), self._layers[layer].block_size
        return table[positions // size], positions % size

    def _rows(self, digests: Digests, layer: str) -> NDArray[Any]:
        """What these tokens' slots hold."""
        place = self._layers[layer].place
        rows = mix(digests[:, None] ^ self._patterns[layer]).view(np.uint8)[:, : _row_bytes(place)]
        return np.ascontiguousarray(rows).view(place.dtype).reshape(len(digests), *place.shape[2:])


def _same_place(place: NDArray[Any], allocation: NDArray[Any], marks: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What `place` sees of an allocation, of as many marks: for each word its bytes; nothing if it lies elsewhere."""
    start = place.ctypes.data - allocation.ctypes.data
    if not 0 <= start < len(allocation):
        return np.zeros(place.shape, np.bool_)
    strides = (*place.strides, 1)
    return np.lib.stride_tricks.as_strided(marks[start:], (*place.shape, place.itemsize), strides)


def _row_bytes(place: NDArray[Any]) -> int:
    """Bytes of one slot."""
    return int(np.prod(place.shape[2:])) * place.itemsize


def _equal(rows: NDArray[Any], others: NDArray[Any]) -> NDArray[np.bool_]:
    """For each slot, whether both hold the same."""
    same = np.equal(rows, others)
    all_same: NDArray[np.bool_] = same.all(axis=tuple(range(1, same.ndim)))
    return all_same


def _memory(layers: int, shape: PageShape) -> list[NDArray[np.uint8]]:
    """Each layer's bytes, `[blocks, heads, block_size, row_bytes]`, all zeros."""
    sizes = {"B": shape.num_blocks, "H": shape.heads, "N": shape.block_size, "C": shape.row_bytes}
    if not shape.layout:
        return [np.zeros(tuple(sizes.values()), np.uint8) for _ in range(layers)]
    memory = np.zeros([{**sizes, "L": layers}[axis] for axis in shape.layout], np.uint8)
    return list(memory.transpose([shape.layout.index(axis) for axis in "LBHNC"]))
