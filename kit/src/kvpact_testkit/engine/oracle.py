"""The oracle: what every KV slot must hold, as a digest of exactly the tokens, position and prefix it belongs to.

Owns the digests and the description of a wrong one. Each token's digest covers all tokens before it, adapter, salt,
media and the weights; each rank, layer and group stores it under a mask of its own, so no two of them are
interchangeable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvpact.errors import PactViolation
from kvpact.identity.keys import RequestIdentity

Digests = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int64]

_TOKEN = np.uint64(0x9E3779B97F4A7C15)
_POSITION = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


class OracleViolation(PactViolation):
    """An attention read did not find the digest that belongs there."""


@dataclass(frozen=True, slots=True)
class WrongRead:
    """One slot that a request would have read: `position` is its token, `found` the digest without the slot's mask."""

    request_id: str
    row: int
    epoch: int
    position: int
    block_id: int
    group_id: int
    rank: int
    layer: int
    stored: int


def mix(values: Digests) -> Digests:
    """A bijection of 64-bit words that spreads every bit (the finaliser of splitmix64)."""
    values = (values ^ (values >> _SHIFT_1)) * _MIX_1
    values = (values ^ (values >> _SHIFT_2)) * _MIX_2
    return values ^ (values >> _SHIFT_3)


def word(*parts: object) -> int:
    """64 bits naming `parts`, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def root_of(identity: RequestIdentity | None, request_id: str, weights: int) -> np.uint64:
    """The state before a request's first token: adapter, salt, weights. A request of unknown identity shares no
    digest."""
    if identity is None:
        return np.uint64(word("unknown", request_id, weights))
    return np.uint64(word(identity.adapter, identity.salt, weights))


def position_extras(identity: RequestIdentity | None, length: int, block_size: int) -> Digests:
    """Content that replaces tokens, per position: media, prompt embeddings; 0 for a plain token."""
    extras = np.zeros(length, np.uint64)
    if identity is not None:
        for span in identity.media:
            end = min(length, span.start + span.count)
            extras[span.start : end] += np.uint64(word(span.content)) + np.arange(
                max(0, end - span.start), dtype=np.uint64
            )
        for block, content in identity.embeddings.items():
            extras[block * block_size : (block + 1) * block_size] += np.uint64(word(content))
    return extras


def contributions(tokens: Tokens, extras: Digests, positions: Tokens, root: Digests | np.uint64) -> Digests:
    """What each token adds to the digests of its own and all later positions; `extras` as of `position_extras`."""
    places = (positions.view(np.uint64) + np.uint64(1)) * _POSITION
    return mix(tokens.view(np.uint64) * _TOKEN + places + root + extras)


def digests_of(tokens: Tokens, extras: Digests, root: np.uint64, start: int = 0) -> tuple[Digests, np.uint64]:
    """The digest of every position of a sequence from `start` on, and the running sum for the next one."""
    positions = np.arange(start, start + len(tokens), dtype=np.int64)
    sums = np.cumsum(contributions(tokens, extras, positions, root), dtype=np.uint64)
    return mix(sums ^ root), sums[-1] if len(sums) else np.uint64(0)


def masks(num_ranks: int, num_layers: int, num_groups: int) -> Digests:
    """`[groups, ranks * layers]`: the mask added to a digest when it is stored."""
    table = [
        [word("mask", group, rank, layer) for rank in range(num_ranks) for layer in range(num_layers)]
        for group in range(num_groups)
    ]
    return np.array(table, np.uint64)


def describe(stored: int, mask_table: Digests, num_layers: int, known: Iterable[tuple[str, Digests]]) -> str:
    """Describe a stored word: never written, a request's token (perhaps of another rank or layer), or unknown."""
    if stored == 0:
        return "nothing: the slot was never written"
    candidates = np.uint64(stored) - mask_table
    for request_id, truth in known:
        for group, plane in np.argwhere(np.isin(candidates, truth)):
            position = int(np.flatnonzero(truth == candidates[group, plane])[0])
            rank, layer = divmod(int(plane), num_layers)
            return (
                f"token {position} of request {request_id} as group {group}, rank {rank}, layer {layer} would hold it"
            )
    return f"{stored:#018x}, which belongs to no request known here"
