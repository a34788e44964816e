"""The right content of every slot of KV memory: a digest of all tokens up to its own, so that any wrong byte is found.

Owns the CPU tensors with the digests. Knows no request's state and no connector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.engine.oracle import Digests, digests_of, mix, word

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


class OracleMemory:
    """One rank's KV memory: a tensor a layer, `[blocks, heads, block_size, elements]` of two bytes each, all zeros."""

    def __init__(self, layers: Sequence[str], shape: PageShape, rank: int) -> None:
        import torch

        self.shape = shape
        self.rank = rank
        self.tensors: dict[str, Any] = {}
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        self._patterns: dict[str, NDArray[np.uint64]] = {}
        lanes = np.arange(shape.heads * shape.row_bytes // 8, dtype=np.uint64).reshape(shape.heads, -1)
        for index, (layer, raw) in enumerate(zip(layers, _memory(len(layers), shape), strict=True)):
            self._bytes[layer] = raw
            self.tensors[layer] = torch.from_numpy(raw[:, 0] if shape.latent else raw).view(torch.float16)
            self._patterns[layer] = mix(lanes + np.uint64((index * 64 + (0 if shape.latent else rank)) << 32))

    def write(self, block_ids: Sequence[int], start: int, digests: Digests, layer: str) -> None:
        """Write a forward pass's content of `layer` for the tokens from `start` on of a request with these blocks."""
        blocks, offsets = self._places(block_ids, start, len(digests))
        self._bytes[layer][blocks, :, offsets] = self._rows(digests, layer)

    def first_wrong(self, block_ids: Sequence[int], digests: Digests, layer: str, start: int = 0) -> int | None:
        """The first token from `start` on whose slot in `layer` does not match `digests`, or None."""
        blocks, offsets = self._places(block_ids, start, len(digests))
        right = (self._bytes[layer][blocks, :, offsets] == self._rows(digests, layer)).all(axis=(1, 2))
        return None if right.all() else start + int(np.argmin(right))

    def describe(self, block_id: int, offset: int, layer: str, chains: Iterator[tuple[str, TokenChain]]) -> str:
        """Describe the content of one slot: nothing, a token of one of `chains`, or unknown bytes."""
        row = self._bytes[layer][block_id, :, offset]
        if not row.any():
            return "zeros: nothing was ever written there"
        for request_id, chain in chains:
            rows = self._rows(chain.digests(0, len(chain.tokens)), layer)
            matches = (rows == row).all(axis=(1, 2))
            if matches.any():
                return f"token {int(np.argmax(matches))} of {request_id}"
        return "bytes that no request ever wrote"

    def _places(self, block_ids: Sequence[int], start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        positions = np.arange(start, start + count)
        table = np.array(block_ids, dtype=np.int64)
        return table[positions // self.shape.block_size], positions % self.shape.block_size

    def _rows(self, digests: Digests, layer: str) -> NDArray[np.uint8]:
        """The bytes of these tokens' slots, `[tokens, heads, row_bytes]`."""
        rows = mix(digests[:, None, None] ^ self._patterns[layer])
        return rows.view(np.uint8).reshape(len(digests), self.shape.heads, self.shape.row_bytes)


def _memory(layers: int, shape: PageShape) -> list[NDArray[np.uint8]]:
    """Each layer's bytes, `[blocks, heads, block_size, row_bytes]`, all zeros."""
    sizes = {"B": shape.num_blocks, "H": shape.heads, "N": shape.block_size, "C": shape.row_bytes}
    if not shape.layout:
        return [np.zeros(tuple(sizes.values()), np.uint8) for _ in range(layers)]
    memory = np.zeros([{**sizes, "L": layers}[axis] for axis in shape.layout], np.uint8)
    return list(memory.transpose([shape.layout.index(axis) for axis in "LBHNC"]))
