"""Digests of the tensors in vLLM's requests: features of media, masks, prompt embeddings.

Owns the encoding, in which equal content has equal digests in every process. Runs on background threads only, because
it reads every byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3


def features_digest(item: Mapping[str, Any]) -> str:
    """Hex digest of a `MultiModalKwargsItem`: field names and values, with type and shape, in any order.

    How vLLM batches a field (`elem.field`) is left out: it may depend on the other items of the request. Raises
    TypeError for a value whose content cannot be read.
    """
    digest = blake3()
    for name in sorted(item):
        _add(digest, b"field", name.encode())
        _add_value(digest, item[name].data)
    return digest.hexdigest()


def mask_digest(mask: torch.Tensor) -> str:
    """Hex digest of a mask, a tensor of bools [tokens]."""
    digest = blake3()
    _add_value(digest, mask)
    return digest.hexdigest()


def embedding_digests(rows: torch.Tensor, is_token: Sequence[bool] | None, block_size: int) -> dict[int, bytes]:
    """By block, a digest of the prompt embeddings in it: dtype, width, which positions have one, and those rows.

    `rows` is [tokens, hidden]; at positions where `is_token` holds, the engine takes the token and not the row. None:
    it takes every row. The last block may be partly filled: then the digest includes the number of positions.
    """
    kind = f"{rows.dtype} {tuple(rows.shape[1:])}".encode()
    rows = rows.detach().cpu()
    digests = {}
    for first in range(0, len(rows), block_size):
        part = rows[first : first + block_size]
        digest = blake3()
        _add(digest, b"kind", kind)
        if is_token is None:
            mask = bytes(len(part))
        else:
            mask = bytes(is_token[first : first + block_size])
            part = part[~torch.tensor(list(mask), dtype=torch.bool)]
        _add(digest, b"mask", mask)
        _add(digest, b"rows", _memory(part))
        digests[first // block_size] = digest.digest()
    return digests


def _add(digest: blake3, tag: bytes, *parts: bytes | memoryview) -> None:
    """Each part after its length, so that no two contents share an encoding."""
    for part in (tag, *parts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


def _add_value(digest: blake3, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _add(digest, b"tensor", f"{value.dtype} {tuple(value.shape)}".encode(), _memory(value))
    elif isinstance(value, np.ndarray):
        _add_value(digest, torch.from_numpy(value))
    elif isinstance(value, Mapping):
        _add(digest, b"mapping", len(value).to_bytes(8, "little"))
        for key, inner in sorted(value.items(), key=lambda pair: repr(pair[0])):
            _add_value(digest, key)
            _add_value(digest, inner)
    elif isinstance(value, (list, tuple)):
        _add(digest, b"list", len(value).to_bytes(8, "little"))
        for inner in value:
            _add_value(digest, inner)
    elif isinstance(value, (bytes, bytearray)):
        _add(digest, b"bytes", bytes(value))
    elif value is None or isinstance(value, (bool, int, float, str)):
        _add(digest, type(value).__name__.encode(), repr(value).encode(errors="surrogatepass"))
    else:
        raise TypeError(f"media features with a value of type {type(value).__name__} have no digest")


def _memory(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in order, as bytes; copied only if they are not contiguous."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())
