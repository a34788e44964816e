"""vLLM's KV events, and where releases differ in them: extra keys are tagged from 0.31 on, and hashes look ahead from
0.33 on.

Owns the names of blocks as vLLM publishes them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm import envs
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core import kv_cache_utils

from kvpact.index.key_table import Names

WORD = 8
"""Bytes of a word of `Names`."""

_LOOKS_AHEAD = "lookahead_token_ids" in BlockStored.__struct_fields__


def hashes_at(request: Any, hash_block_size: int, block_size: int) -> Sequence[bytes]:
    """A request's hashes of blocks of `block_size` tokens, as they are when they are asked for."""
    found: Sequence[bytes] = kv_cache_utils.resolve_block_hashes(request.block_hashes, hash_block_size, block_size)
    return found


def names_of(hashes: Sequence[bytes]) -> Names:
    """Hashes as words: the last one alone, where vLLM publishes hashes as integers."""
    words = np.frombuffer(b"".join(hashes), np.uint64).reshape(len(hashes), -1)
    return words[:, -1:] if envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES else words


def published(names: Names) -> list[Any]:
    """Hashes as vLLM publishes them: integers of the last 8 bytes, or all bytes."""
    if names.shape[1] == 1:
        last = names[:, 0]
        numbers: list[Any] = (last.byteswap() if sys.byteorder == "little" else last).tolist()
        return numbers
    whole: list[Any] = np.frombuffer(names.tobytes(), f"V{WORD * names.shape[1]}").tolist()
    return whole


def tokens_ahead(pool: Any) -> int:
    """Tokens after a block that its hash covers."""
    return int(getattr(pool, "num_hash_lookahead_tokens", 0))


def extra_keys(request: Any, first: int, end: int, block_size: int, ahead: int) -> list[Any]:
    """Extra keys of a request's blocks [first, end), as vLLM computes them for its hashes."""
    found = []
    at = 0
    for start in range(first * block_size, end * block_size, block_size):
        stop = start + block_size
        if ahead:
            keys, at = kv_cache_utils.generate_lookahead_block_hash_extra_keys(request, start, stop, stop + ahead, at)
        else:
            keys, at = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, at)
        found.append(keys)
    to_event = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return found if to_event is None else list(to_event(found))


def stored(fields: dict[str, Any], ahead: list[list[int]] | None) -> Any:
    """An event of stored blocks; `ahead`: the tokens after each block that its hash covers."""
    return BlockStored(**fields, lookahead_token_ids=ahead) if _LOOKS_AHEAD else BlockStored(**fields)


def removed(**fields: Any) -> Any:
    """An event of removed blocks."""
    return BlockRemoved(**fields)
