"""A right connector whose loads end inside blocks, wherever a piece of four tokens ends; and one that rounds up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpact_testkit.vllm.simple_connector import SimpleConnector

PIECE = 4
"""Tokens that are kept and promised together."""


@dataclass(frozen=True, slots=True)
class PieceView:
    """A layer's tensor, `[blocks, heads, tokens, elements]`, piece by piece of its blocks."""

    tensor: Any

    def _part(self, piece: int) -> Any:
        block, number = divmod(piece, self.tensor.shape[2] // PIECE)
        return self.tensor[block, :, number * PIECE : (number + 1) * PIECE]

    def __getitem__(self, piece: int) -> Any:
        return self._part(piece)

    def __setitem__(self, piece: int, content: Any) -> None:
        self._part(piece)[:] = content


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a request's blocks, as vLLM tells blocks."""

    block_ids: Sequence[int]
    in_block: int

    def get_block_ids(self) -> tuple[list[int]]:
        return ([block * self.in_block + piece for block in self.block_ids for piece in range(self.in_block)],)


@dataclass(frozen=True, slots=True)
class PieceTables:
    """The same of each request."""

    manager: Any
    in_block: int

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        (block_ids,) = self.manager.get_block_ids(request_id)
        return Pieces(block_ids, self.in_block).get_block_ids()


class PartialConnector(SimpleConnector):
    """`SimpleConnector`, whose blocks are pieces of vLLM's. `"only"`: promises to requests of such names alone."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.only = str(vllm_config.kv_transfer_config.get_from_extra_config("only", ""))
        self.in_block = self.block_size // PIECE
        self.block_size = PIECE

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.tables = PieceTables(kv_cache_manager, self.in_block)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return answer if request.request_id.startswith(self.only) else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        (block_ids,) = blocks.get_block_ids()
        super().update_state_after_alloc(request, Pieces(block_ids, self.in_block), num_external_tokens)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches({name: PieceView(tensor) for name, tensor in kv_caches.items()})


class RoundsUp(PartialConnector):
    """H30: what follows the last loaded token in its block counts as loaded too."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        block = self.in_block * PIECE
        whole = -(-(num_computed_tokens + (tokens or 0)) // block) * block
        return min(whole, request.num_tokens - 1) - num_computed_tokens if tokens else 0, later

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        held = len([key for key in self.keys(request) if key in self.saved]) * PIECE
        missing = max(0, self.asked[request.request_id] + num_external_tokens - held)
        super().update_state_after_alloc(request, blocks, max(0, num_external_tokens - missing))
