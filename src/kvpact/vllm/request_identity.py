"""What decides the content of one request's KV blocks under vLLM, besides the engine's namespace and its tokens.

Owns the translation from vLLM's requests into `RequestIdentity`. What it does not know it refuses: such a request is
neither stored nor served. Floor 3.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvpact.background import start_background
from kvpact.blocks import MediaSpan, RequestIdentity
from kvpact.weights import adapter_digest

logger = logging.getLogger(__name__)


class VllmRequest:
    """A vLLM request as `EngineRequest`."""

    __slots__ = ("_adapters", "_block_size", "_identity", "load_broken", "request", "turn_by", "was_answered")

    def __init__(self, request: Any, adapters: AdapterDigests, block_size: int) -> None:
        self.request = request
        self.load_broken = False
        """Whether a match of this request could not be ordered; then it is not offered one again (H09)."""
        self.was_answered = False
        """See `Waiter`."""
        self.turn_by: float | None = None
        """See `Waiter`."""
        self._adapters = adapters
        self._block_size = block_size
        self._identity: RequestIdentity | None = None

    @property
    def request_id(self) -> str:
        """See `EngineRequest`."""
        return str(self.request.request_id)

    @property
    def token_ids(self) -> Sequence[int]:
        """See `EngineRequest`."""
        tokens: Sequence[int] = self.request.all_token_ids
        return tokens

    @property
    def identity(self) -> RequestIdentity | None:
        """See `EngineRequest`. Asked again while unknown: an adapter's digest comes from a thread."""
        if self._identity is None:
            self._identity = request_identity(self.request, self._adapters, self._block_size)
        return self._identity

    @property
    def may_load(self) -> bool:
        """See `EngineRequest`."""
        return not (self.request.skip_reading_prefix_cache or self.load_broken)


class AdapterDigests:
    """Content digests of LoRA adapters, computed once each on a thread of their own; unknown until then."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, str], str | None] = {}

    def find(self, lora_request: Any) -> str | None:
        """The adapter's digest, or None while it is not known (or can never be: its files are not here)."""
        if lora_request.load_inplace:
            return None  # the weights behind this id may change at any time
        name = (int(lora_request.lora_int_id), str(lora_request.lora_path))
        if name not in self._digests:
            self._digests[name] = None
            start_background("kvpact-adapter", partial(self._compute, name))
        return self._digests[name]

    def _compute(self, name: tuple[int, str]) -> None:
        try:
            self._digests[name] = adapter_digest(Path(name[1]))
        except OSError as error:
            logger.warning("kvpact: requests with the adapter at %s are not cached: %s", name[1], error)


def request_identity(request: Any, adapters: AdapterDigests, block_size: int) -> RequestIdentity | None:
    """What a vLLM request brings besides its tokens; None if any of it is unknown. `block_size` in tokens."""
    if request.pooling_params is not None:
        return None
    adapter = ""
    if request.lora_request is not None:
        found = adapters.find(request.lora_request)
        if found is None:
            return None
        adapter = found
    media = []
    for feature in request.mm_features:
        if not feature.identifier:
            return None
        place = feature.mm_position
        media.append(MediaSpan(place.offset, place.length, f"{feature.modality}:{feature.identifier}"))
    embeddings = {}
    if request.prompt_embeds is not None:
        embeddings = _embedding_digests(request.prompt_embeds, block_size)
    return RequestIdentity(adapter, request.cache_salt or "", tuple(media), embeddings)


def _embedding_digests(rows: Any, block_size: int) -> dict[int, bytes]:
    """Per block, a digest over the bytes of its rows; `rows` is a tensor [tokens, hidden]."""
    import torch

    digests = {}
    for block in range(-(-len(rows) // block_size)):
        part = rows[block * block_size : (block + 1) * block_size].detach().cpu().contiguous()
        digests[block] = blake3(part.view(torch.uint8).numpy().tobytes()).digest()
    return digests
