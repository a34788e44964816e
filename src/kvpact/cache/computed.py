"""What the engine computes: its blocks get their tags, and those that are not stored yet are saved.

Owns no state: how far a request has come is in its `RequestState`, what a block was filled with in `BlockTags`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpact.cache.offload import Offloader
from kvpact.cache.request import RequestState
from kvpact.cache.writeback import WriteBack
from kvpact.config import KvpactConfig
from kvpact.contract import EngineRequest
from kvpact.identity.tags import NO_TAG, BlockTags
from kvpact.index.block_index import BlockIndex


@dataclass(eq=False, slots=True)
class ComputedBlocks:
    """Takes in what steps compute."""

    config: KvpactConfig
    index: BlockIndex
    tags: BlockTags
    saves: Offloader
    writeback: WriteBack
    block_size: int
    clock: Callable[[], float]

    def note_probe(self, request_id: str, state: RequestState, computed_tokens: int) -> None:
        """The engine asks for a request of which it has so many tokens; which blocks they are in is not known."""
        state.computed, state.sound = computed_tokens, 0
        if self.saves.lazy is not None and state.offloaded_blocks:  # it was preempted: it gets other blocks
            state.offloaded_blocks = 0
            self.saves.lazy.rewind(request_id)

    def note(
        self, request: EngineRequest, state: RequestState, computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """After this step the first `computed_tokens` tokens are computed: full blocks are saved, as far as need be."""
        before, lazy, size = state.computed, self.saves.lazy, self.block_size
        state.advance(computed_tokens)
        if self.config.save == "off":
            return
        begun, filled = before // size, computed_tokens // size
        held = block_ids() if filled > begun else ()
        self._tag_filled(state, before, held[begun:filled])
        if state.keys is None:
            if lazy is not None:
                lazy.invalidate_blocks(held)
            return
        full = min(filled, len(request.token_ids) // size)
        if full <= state.offloaded_blocks:
            return
        first, state.offloaded_blocks = state.offloaded_blocks, full
        keys = state.keys.extend(request.token_ids)
        named = min(full, len(keys))
        known = min(named, self.index.known_prefix(keys))
        if known and (known == named or lazy is not None):
            self.index.touch(keys[known - 1])
            self.writeback.note_used(keys[:named])
        if lazy is None and known == named:
            return
        held = held or block_ids()
        sound = state.sound = self.tags.same_prefix(held[:named], min(state.sound, named), state.tag)
        if lazy is not None:
            lazy.invalidate_blocks(held[max(first, sound) : full])
            lazy.note(request.request_id, keys, first, max(first, sound), held)
        elif known < sound:
            self.saves.order(request.request_id, keys[:sound], known, held, self.clock())

    def _tag_filled(self, state: RequestState, before: int, filled: Sequence[int]) -> None:
        """The step computes the request's tokens from `before` on: the blocks that it fills get the request's tag.

        A block that other weights, or another adapter, began gets none.
        """
        in_block = before % self.block_size
        if filled:
            self.tags.fill(filled, state.tag)
            if in_block and state.tail_tag != state.tag:
                self.tags.fill(filled[:1], NO_TAG)
                state.sound = min(state.sound, before // self.block_size)
        if filled or not in_block:
            state.tail_tag = state.tag
