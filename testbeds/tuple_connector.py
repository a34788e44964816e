"""A connector of the tuple API as its authors write them: it knows vLLM's hooks and nothing of the pact."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Key = tuple[Any, ...]


@dataclass
class Store:
    """What both halves of one connector share: block key -> rank and layer -> bytes."""

    blocks: dict[Key, dict[tuple[int, str], Any]] = field(default_factory=dict)
    num_planes: int = 1

    def holds(self, key: Key) -> bool:
        return len(self.blocks.get(key, ())) == self.num_planes


def key_of(request: Any, tokens: list[int], end: int) -> Key:
    adapter = request.lora_request.lora_path if request.lora_request else None
    return (request.cache_salt, adapter, *tokens[:end])


@dataclass
class Metadata:
    loads: list[tuple[str, list[Key], list[int]]] = field(default_factory=list)
    saves: list[tuple[Key, int]] = field(default_factory=list)


class TupleScheduler:
    """Stores full prompt blocks, promises what it finds."""

    def __init__(
        self, store: Store, block_size: int, *, asynchronous: bool = False, keeps_blocks: bool = False
    ) -> None:
        self.store, self.size = store, block_size
        self.asynchronous, self.keeps_blocks = asynchronous, keeps_blocks
        self.requests: dict[str, Any] = {}
        self.tables: dict[str, list[int]] = {}
        self.lookups = 0
        self.allocations: list[tuple[str, int]] = []
        self._loads: list[tuple[str, list[Key], list[int]]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.lookups += 1
        tokens = request.all_token_ids
        end = num_computed_tokens
        while end + self.size <= len(tokens) and self.store.holds(key_of(request, tokens, end + self.size)):
            end += self.size
        return end - num_computed_tokens, self.asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.requests[request.request_id] = request
        self.allocations.append((request.request_id, num_external_tokens))
        if num_external_tokens:
            start = request.num_computed_tokens
            ids = blocks.get_block_ids()[0]
            ends = range(start + self.size, start + num_external_tokens + self.size, self.size)
            keys = [key_of(request, request.all_token_ids, end) for end in ends]
            self._loads.append((request.request_id, keys, ids[start // self.size :][: len(keys)]))

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        metadata = Metadata(self._loads)
        self._loads = []
        steps = []
        for new in scheduler_output.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            steps.append((new.req_id, new.num_computed_tokens))
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if cached.new_block_ids[i] is not None:
                self.tables[request_id] += cached.new_block_ids[i][0]
            steps.append((request_id, cached.num_computed_tokens[i]))
        for request_id, computed in steps:
            request = self.requests[request_id]
            end = min(computed + scheduler_output.num_scheduled_tokens[request_id], request.num_prompt_tokens)
            for block in range(computed // self.size, end // self.size):
                key = key_of(request, request.prompt_token_ids, (block + 1) * self.size)
                metadata.saves.append((key, self.tables[request_id][block]))
        for request_id in scheduler_output.finished_req_ids:
            self.requests.pop(request_id, None)
            self.tables.pop(request_id, None)
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.keeps_blocks and request.request_id in self.tables, None


class TupleWorker:
    """Copies at once; asynchronous receives and sends are reported two steps later."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank = store, rank
        self.layers: dict[str, Any] = {}
        self.metadata: Metadata | None = None
        self.broken_blocks: set[int] = set()
        self._received: list[tuple[int, str]] = []
        self._sent: list[tuple[int, str]] = []
        self._errors: set[int] = set()
        self._step = 0
        self.asynchronous = False

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.layers = kv_caches

    def bind_connector_metadata(self, connector_metadata: Metadata) -> None:
        self._step += 1
        self.metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self.metadata = None

    def start_load_kv(self, forward_context: Any) -> None:
        assert self.metadata is not None
        for request_id, keys, blocks in self.metadata.loads:
            for key, block in zip(keys, blocks, strict=True):
                if block in self.broken_blocks:
                    self._errors.add(block)
                    continue
                for name, pages in self.layers.items():
                    pages[block] = self.store.blocks[key][self.rank, name]
            if self.asynchronous:
                self._received.append((self._step + 2, request_id))

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any) -> None:
        assert self.metadata is not None
        for key, block in self.metadata.saves:
            self.store.blocks.setdefault(key, {})[self.rank, layer_name] = np.array(kv_layer[block])

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._sent += [(self._step + 2, request_id) for request_id in sorted(finished_req_ids)]
        sent = {request_id for due, request_id in self._sent if due <= self._step}
        received = {request_id for due, request_id in self._received if due <= self._step}
        self._sent = [entry for entry in self._sent if entry[0] > self._step]
        self._received = [entry for entry in self._received if entry[0] > self._step]
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self._errors = self._errors, set()
        return errors
