"""KV events of one engine: announcements as vLLM's events, of blocks as vLLM's own pool describes them.

Owns the prompts' view of vLLM's requests, and notices that vLLM's pool has told routers to forget all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from kvpact.events.queue import Announcer, EventQueue, Gone, Place, Stored
from kvpact.identity.groups import GroupSet
from kvpact.index.key_table import Names
from kvpact.metrics import Metrics
from kvpact.vllm.compat import kv_events
from kvpact.vllm.compat.configuration import publishes_events
from kvpact.vllm.request_identity import RequestIdentities


@dataclass(eq=False, slots=True)
class BlockShape:
    """Blocks of the group whose blocks are announced: one with full attention, in which every token counts."""

    group: int
    block_size: int
    hash_block_size: int
    ahead: int
    """Tokens after a block that its hash covers."""
    kind: str
    window: int | None


class RequestPrompt:
    """A request of vLLM as an `EnginePrompt`. Keeps its tokens and hashes, and until its end the request."""

    __slots__ = ("_alike", "_extra", "_hashes", "_request", "_shape", "lora_id", "lora_name", "tokens")

    def __init__(self, request: Any, shape: BlockShape) -> None:
        self._request: Any = request
        self._shape = shape
        self._hashes = kv_events.hashes_at(request, shape.hash_block_size, shape.block_size)
        self.tokens: Sequence[int] = request.all_token_ids
        lora = request.lora_request
        self.lora_id: int | None = lora.adapter_id if lora else None
        self.lora_name: str | None = lora.name if lora else None
        self._alike: tuple[Any, Any] | None = None
        """The extra keys of the first block and of all others, where all others have the same."""
        self._extra: list[Any] = []

    def names(self, first: int, end: int) -> Names:
        """vLLM's hashes of the blocks [first, end), as far as they are known."""
        return kv_events.names_of(self._hashes[first:end])

    def extra_keys(self, first: int, end: int) -> list[Any]:
        """Extra keys of the blocks [first, end), as vLLM publishes them."""
        request = self._request
        shape = self._shape
        if request is not None and (request.mm_features or request.prompt_embeds is not None):
            return kv_events.extra_keys(request, first, end, shape.block_size, shape.ahead)
        if request is None and self._extra:
            return self._extra[first:end]
        if self._alike is None:
            head, rest = kv_events.extra_keys(request, 0, 2, shape.block_size, shape.ahead)
            self._alike = head, rest
        head, rest = self._alike
        return [rest if block else head for block in range(first, end)]

    def end(self) -> None:
        """The request has ended: keep no image of it."""
        keys = self.extra_keys(0, len(self._hashes))
        if self._alike is None:
            self._extra = keys
        self._request = None


class KVEvents:
    """Events of one engine: of its chain group, if the engine publishes events, and such a group has full attention."""

    def __init__(self, vllm_config: Any, groups: GroupSet, identities: RequestIdentities, metrics: Metrics) -> None:
        self._chain = groups.chain
        self._block_size = groups.block_size
        self._identities = identities
        are_on = self._chain is not None and publishes_events(vllm_config)
        self.queue = EventQueue(metrics) if are_on else None
        """None: there are no events."""
        self._shape: BlockShape | None = None
        """None until vLLM has offered its KV cache manager."""
        self._disputes = 0
        """Names of images that were found to stand for two contents, so far."""
        self._pool: Any = None
        self._published: Any = None
        """The pool's map of hashes, of which each reset makes a new one, and then lets routers forget all blocks."""

    def bind(self, manager: Any) -> None:
        """Describe blocks as this KV cache manager does."""
        if self.queue is None or self._chain is None:
            return
        pool = manager.block_pool
        kind, window = manager.kv_cache_event_metadata[self._chain]
        ahead = kv_events.tokens_ahead(pool)
        hash_block_size = int(pool.hash_block_size)
        self._shape = shape = BlockShape(self._chain, self._block_size, hash_block_size, ahead, kind, window)
        self._pool = pool
        self._published = pool.cached_block_hash_to_block
        self._identities.prompts = partial(RequestPrompt, shape=shape)

    def take(self, announcements: Announcer) -> list[Any]:
        """vLLM's events for all that has changed; those of vLLM's own pool were taken just before, and go first."""
        shape = self._shape
        if self.queue is None or shape is None:
            return []
        if self._pool.cached_block_hash_to_block is not self._published:
            self._published = self._pool.cached_block_hash_to_block
            announcements.forget()
        if self._identities.media.disputes != self._disputes:
            self._disputes = self._identities.media.disputes
            announcements.withdraw()
        events = list[Any]()
        for is_gone, entries in groupby(self.queue.take(), lambda entry: isinstance(entry, Gone)):
            if is_gone:
                events += self._removed([*entries], shape)
            else:
                events += [self._stored(entry, shape) for entry in entries if isinstance(entry, Stored)]
        return events

    def _stored(self, entry: Stored, shape: BlockShape) -> Any:
        prompt = entry.prompt
        assert isinstance(prompt, RequestPrompt)
        first = entry.first
        end = first + len(entry.names)
        size = shape.block_size
        ahead = None
        if shape.ahead:
            ends = range((first + 1) * size, (end + 1) * size, size)
            ahead = [[*prompt.tokens[at : at + shape.ahead]] for at in ends]
        fields = {
            "block_hashes": kv_events.published(entry.names),
            "parent_block_hash": kv_events.published(prompt.names(first - 1, first))[0] if first else None,
            "token_ids": prompt.tokens[first * size : end * size],
            "block_size": size,
            "lora_id": prompt.lora_id,
            "lora_name": prompt.lora_name,
            "extra_keys": prompt.extra_keys(first, end),
            "group_idx": shape.group,
            "kv_cache_spec_kind": shape.kind,
            "kv_cache_spec_sliding_window": shape.window,
            "medium": entry.place.medium,
            "locality": entry.place.locality,
            "ownership": entry.place.owner,
        }
        return kv_events.stored(fields, ahead)

    def _removed(self, entries: Sequence[Stored | Gone], shape: BlockShape) -> Iterator[Any]:
        """One event for each place."""
        by_place: dict[Place, list[Any]] = {}
        for entry in entries:
            by_place.setdefault(entry.place, []).extend(kv_events.published(entry.names))
        for (medium, locality, owner), hashes in by_place.items():
            yield kv_events.removed(
                block_hashes=hashes, medium=medium, group_idx=shape.group, locality=locality, ownership=owner
            )
