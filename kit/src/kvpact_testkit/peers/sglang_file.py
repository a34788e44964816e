"""SGLang's `HiCacheFile` behind `Tier`. For SGLang 0.5.23.

Owns the tensors over the adapter's rows. SGLang imports kernels at its top, which the storage's own modules do not
need: its packages are entered without their `__init__`. The storage itself is as it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from kvpact.errors import TierError
from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import Tier
from kvpact_testkit.faults import Faults
from kvpact_testkit.peers.tier import PeerSuite, PeerTier
from kvpact_testkit.tier.conformance import StoreContext

PACKAGES = ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.storage")


def _hicache_storage() -> Any:
    """SGLang's module of that name, imported without what runs models."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    for name in PACKAGES:
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(Path(found.origin).parents[1].joinpath(*name.split(".")))]
            sys.modules[name] = package
    return importlib.import_module("sglang.srt.mem_cache.hicache_storage")


hicache_storage = _hicache_storage()


class HiCacheFileTier(PeerTier):
    """The storage of one rank of one, over `place`; `extra_config` is what its user sets."""

    def __init__(self, place: StoreContext, faults: Faults, extra_config: dict[str, Any]) -> None:
        super().__init__("SGLang's HiCacheFile", place.slot_bytes, faults)
        config = hicache_storage.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name=place.namespace.fields["model"],
            extra_config={"file_storage_path": str(place.directory), **extra_config},
        )
        self._storage = hicache_storage.HiCacheFile(config)

    def exists(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [self._storage.exists(key.hex()) for key in keys]

    def load(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        pages = self._storage.batch_get([key.hex() for key in keys], [self._tensor(row) for row in rows])
        return [page is not None for page in pages]

    def save(self, keys: Sequence[BlockKey], rows: Sequence[int]) -> list[bool]:
        return [self._storage.set(key.hex(), self._tensor(row)) for key, row in zip(keys, rows, strict=True)]

    def clear(self) -> None:
        if not self._storage.clear():
            raise TierError("HiCacheFile.clear returned False")

    def end(self) -> None:
        """Nothing is open."""

    def _tensor(self, row: int) -> Any:
        return torch.frombuffer(self.rows.view(row), dtype=torch.uint8)


class HiCacheFileSuite(PeerSuite):
    """The storage with a bound, `max_size`, so that its eviction is seen; everything else by default."""

    bounded = True
    clears = True

    # SGLang does not tell its storage where in a prompt a page is.
    test_the_deepest_of_blocks_without_a_parent_go_first = None  # type: ignore[assignment]

    def open_tier(self, place: StoreContext) -> Tier:
        bound = place.capacity_blocks * place.slot_bytes
        return HiCacheFileTier(place, self.faults, {"max_size": bound})

    def file_of(self, place: StoreContext, key: BlockKey) -> Path:
        return next(place.directory.glob(f"{key.hex()}*.bin"))

    @contextmanager
    def store_calls(self, faults: Faults) -> Iterator[None]:
        """The calls that fail are the opening of a file that is read, and the renaming of one that is written."""
        self.faults = faults
        rename = os.replace

        def announced_open(path: str, mode: str, **rest: Any) -> Any:
            faults.before_read()
            return open(path, mode, **rest)

        def announced_rename(source: str, target: str) -> None:
            faults.before_write()
            rename(source, target)

        with (
            mock.patch.object(hicache_storage, "open", announced_open, create=True),
            mock.patch.object(os, "replace", announced_rename),
        ):
            yield
