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


class _Once:
    """Asks the engine for a request's blocks when they are needed, and once in a step."""

    __slots__ = ("_answer", "_ask")

    def __init__(self, ask: Callable[[], Sequence[int]]) -> None:
        self._ask = ask
        self._answer: Sequence[int] | None = None

    def __call__(self) -> Sequence[int]:
        if self._answer is None:
            self._answer = self._ask()
        return self._answer


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

    def note(
        self, request: EngineRequest, state: RequestState, computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """After this step the first `computed_tokens` tokens are computed: full blocks are saved, as far as need be."""
        before, lazy, held = state.computed, self.saves.lazy, _Once(block_ids)
        state.advance(computed_tokens)
        self._tag_filled(state, before, computed_tokens, held)
        full = min(computed_tokens, len(request.token_ids)) // self.block_size
        if state.keys is None:
            if lazy is not None and full > before // self.block_size:
                lazy.invalidate_blocks(held())
            return
        if full <= state.offloaded_blocks or self.config.save == "off":
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
        sound = state.sound = self.tags.same_prefix(held()[:named], min(state.sound, named), state.tag)
        if lazy is not None:
            lazy.invalidate_blocks(held()[max(first, sound) : full])
            lazy.note(request.request_id, keys, first, max(first, sound), held())
        elif known < sound:
            self.saves.order(request.request_id, keys[:sound], known, held, self.clock())

    def _tag_filled(
        self, state: RequestState, before: int, computed: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """The step computes the request's tokens [before, computed): the blocks that it fills get the request's tag.

        A block that other weights, or another adapter, began gets none.
        """
        if self.config.save == "off":
            return
        first, full = before // self.block_size, computed // self.block_size
        if full > first:
            filled = block_ids()[first:full]
            self.tags.fill(filled, state.tag)
            if before % self.block_size and state.tail_tag != state.tag:
                self.tags.fill(filled[:1], NO_TAG)
                state.sound = min(state.sound, first)
        if full > first or not before % self.block_size:
            state.tail_tag = state.tag
