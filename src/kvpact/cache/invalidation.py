"""Drops what is no longer trusted: blocks that failed to load, and blocks computed from garbage.

Tells every part that may have or get such blocks, in one place, and remembers only what it has told people.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvpact.cache.jobs import LoadState, TransferJobs
from kvpact.cache.offload import Offloader
from kvpact.cache.request import Requests
from kvpact.cache.tier_set import TierSet
from kvpact.identity.epochs import Epochs
from kvpact.identity.keys import BlockKey
from kvpact.identity.tags import NO_TAG, BlockTags, first_among
from kvpact.index.block_index import BlockIndex
from kvpact.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Invalidation:
    """Removes blocks from the index, the tiers, the jobs under way and the memo of lazy saves."""

    requests: Requests
    index: BlockIndex
    tiers: TierSet
    jobs: TransferJobs
    saves: Offloader
    tags: BlockTags
    epochs: Epochs
    block_size: int
    _told: LogOnce = field(default_factory=lambda: LogOnce(logger))

    def _invalidate_from(self, request_id: str, keys: Sequence[BlockKey], block: int) -> None:
        """Neither serve nor store the chain `keys` from `block` on: the one place that tells all parts."""
        gone = keys[block:]
        self.jobs.invalidate(request_id, gone[0], block)
        self.index.drop(gone[0])
        self.tiers.delete(gone)
        if self.saves.lazy is not None:
            self.saves.lazy.forget(gone)

    def load_failed(self, load: LoadState) -> None:
        """Blocks failed to load: drop them, and all of the chain after them, everywhere."""
        name, failed, hanging = load.job.request_id, load.chain_failed_from(), load.failed_keys()
        if failed is not None:
            text = "kvpact: blocks from %d on of request %s failed to load; dropped (later ones are counted)"
            self._told.log("chain", logging.WARNING, text, failed, name)
            self._invalidate_from(name, load.keys, failed)
        if hanging:
            text = "kvpact: %d blocks of side groups of request %s failed to load; dropped (later ones are counted)"
            self._told.log("side groups", logging.WARNING, text, len(hanging), name)
            for key in hanging:
                self.index.drop(key)
            self.tiers.delete(hanging)
            start = load.plan.blocks.start
            self.jobs.invalidate(name, load.keys[start], start)
            state = self.requests.live.get(name)
            if self.saves.lazy is not None:  # nor save what the engine computed from them
                keys = state.keys.keys if state is not None and state.keys is not None else load.keys
                self.saves.lazy.forget(keys[start:])

    def distrust_blocks(self, block_ids: Collection[int], tables: Mapping[str, Sequence[int]]) -> None:
        """Trust these blocks of the engine no more: neither they nor blocks computed after them are stored (H48).

        `tables` has the block table of each request that may have some of them. What is stored of these requests from
        the first such block on is dropped everywhere.
        """
        self.tags.fill(block_ids, NO_TAG)
        saving = first_among(block_ids, self.jobs.blocks_to_save())
        computed = first_among(block_ids, ((request_id, 0, table) for request_id, table in tables.items()))
        for request_id, first in computed.items():
            self.tags.fill(tables[request_id][first:], NO_TAG)
        for request_id in saving.keys() | computed.keys():
            self._distrust_from(request_id, min(each[request_id] for each in (saving, computed) if request_id in each))

    def _distrust_from(self, request_id: str, first: int) -> None:
        """The content of a request's blocks from `first` on is unknown. The request may have finished."""
        self.jobs.cut_put_off(request_id, first)
        chains: list[Sequence[BlockKey]] = [
            save.run.chain for save in self.jobs.saves.values() if save.job.request_id == request_id
        ]
        state = self.requests.live.get(request_id)
        if state is not None and state.keys is not None:
            state.go_back(first, self.block_size)
            chains.append(state.keys.keys)
        for keys in chains:
            if len(keys) > first:
                self._invalidate_from(request_id, keys, first)

    def distrust_adapter(self, adapter: str) -> None:
        """What the engine computed under `adapter`, as identities name it, may be another adapter's.

        None of it that is not saved yet is saved. Blocks that were reported as saved before are right.
        """
        tag = self.tags.withdraw(adapter)
        for save in self.jobs.saves.values():
            save.trusted &= tag != NO_TAG and not self.tags.same_prefix(save.job.block_ids, 0, tag)
        for waiting in self.jobs.put_off:
            waiting.trusted &= waiting.tag != tag
        if self.saves.lazy is not None:
            if tag == NO_TAG:
                self.saves.lazy.clear()
            else:
                self.saves.lazy.invalidate_blocks(self.tags.blocks_with(tag))
        for state in self.requests.live.values():
            if state.identity is not None and state.identity.adapter == adapter:
                state.tag, state.sound = self.tags.tag_of(self.epochs.generation, adapter), 0
