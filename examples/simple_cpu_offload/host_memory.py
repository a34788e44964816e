"""A rank's host memory, and the copies between it and the engine's KV memory.

Owns the tensors. Copies are plain assignments: complete when the call returns on a CPU, in the order of the current
stream on a GPU. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kvpact import ConfigError
from kvpact.worker.paged import block_axis


class HostMemory:
    """As many bytes for each of the `host_blocks` as the engine has for one of its `num_blocks`, and a spare one:
    block 0 is nobody's."""

    def __init__(self, kv_caches: Iterable[Any], num_blocks: int, host_blocks: int) -> None:
        self._pairs: list[tuple[Any, Any]] = []
        seen = set()
        for tensor in kv_caches:
            axis = block_axis(tuple(tensor.shape), num_blocks) if isinstance(tensor, torch.Tensor) else None
            if axis is None or tensor.shape[axis] != num_blocks:
                raise ConfigError(
                    f"KV memory of shape {tuple(getattr(tensor, 'shape', ()))} has no axis for its {num_blocks} blocks"
                )
            pages = tensor.movedim(axis, 0)
            place = pages.data_ptr(), pages.shape, pages.stride()
            if place not in seen:  # layers of different groups may share their memory, block by block
                seen.add(place)
                self._pairs.append((pages, torch.zeros((host_blocks + 1, *pages.shape[1:]), dtype=pages.dtype)))

    def load(self, engine_blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """Copy to the engine."""
        into, out_of = [*engine_blocks], [*host_blocks]
        for pages, host in self._pairs:
            pages[into] = host[out_of].to(pages.device)

    def save(self, engine_blocks: Iterable[int], host_blocks: Iterable[int]) -> None:
        """Copy from the engine."""
        out_of, into = [*engine_blocks], [*host_blocks]
        for pages, host in self._pairs:
            host[into] = pages[out_of].to(host.device)
