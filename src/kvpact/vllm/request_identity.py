"""Identity of a vLLM request: all that decides its KV blocks' content besides namespace and tokens.

Owns the translation from vLLM's requests into `RequestIdentity`. It refuses what it does not know: such a request is
neither stored nor served. Nothing is digested on the caller's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvpact.contract import ExternalKVMatch
from kvpact.events.queue import EnginePrompt
from kvpact.hints.schema import Hints
from kvpact.identity.adapter_digests import MAX_ADAPTERS, AdapterDigests, AdapterFound, AdapterUse
from kvpact.identity.digest_thread import DigestThread, Pending
from kvpact.identity.keys import KnownRuns, MediaSpan, RequestIdentity
from kvpact.vllm.compat.configuration import encoder_cache_size, runs_encoder_with_adapters
from kvpact.vllm.content_digests import embedding_digests
from kvpact.vllm.media_contents import MIN_NAMES, MediaContent, MediaContents

logger = logging.getLogger(__name__)


class RequestIdentities:
    """The identities of one engine's requests, digested in the background. Make it before the engine loads adapters."""

    def __init__(self, vllm_config: Any) -> None:
        lora = vllm_config.lora_config
        self.block_size = int(vllm_config.cache_config.block_size)
        self.known: KnownRuns | None = None
        self.prompts: Callable[[Any], EnginePrompt] | None = None
        """Makes a request's prompt as KV events describe it; None without events."""
        self.contents = DigestThread("kvpact-content")
        self.adapters = AdapterDigests(MAX_ADAPTERS + (int(lora.max_cpu_loras or 0) if lora is not None else 0))
        self.media = MediaContents(self.contents, max(MIN_NAMES, encoder_cache_size(vllm_config)))
        self.adapter_kind = str(lora.lora_dtype) if lora is not None else ""
        """Settings for vLLM's transformation of an adapter's weights during loading."""
        self.media_come_from_elsewhere = vllm_config.ec_transfer_config is not None
        """True if another process encodes media: by identifier, whatever the features here are."""
        self.media_depend_on_adapters = runs_encoder_with_adapters(lora)
        """True if the encoder runs with the adapter; vLLM keeps its output by the adapter's name, not by its
        weights."""
        self._said: set[str] = set()

    @property
    def revision(self) -> int:
        """Counter that rises when known contents of a name may be void, or more may be known."""
        return self.adapters.revision + self.media.disputes

    def use_engine_hashes(self, cache_config: Any, block_size: int) -> None:
        """vLLM hashes blocks of so many tokens; an algorithm that lets two blocks have one hash is of no use."""
        if cache_config.prefix_caching_hash_algo in ("sha256", "sha256_cbor"):
            self.known = KnownRuns({}, block_size)

    def refuse(self, reason: str) -> None:
        """Log once why requests of a kind are not cached. `reason` completes a sentence and is one of a few."""
        if reason not in self._said:
            self._said.add(reason)
            logger.warning("kvpact: requests are not cached %s (said once)", reason)

    def close(self) -> None:
        """End the threads."""
        self.adapters.close()
        self.contents.close()


@dataclass(frozen=True, slots=True)
class OfferedMatch:
    """The answer to a request's last probe, and where the match began, in blocks."""

    match: ExternalKVMatch
    start_block: int


@dataclass(slots=True, eq=False)
class VllmRequest:
    """A vLLM request as `EngineRequest`."""

    request: Any
    _identities: RequestIdentities
    request_id: str = field(init=False)  # see `EngineRequest`
    answer: OfferedMatch | None = None
    """The match that the engine may commit."""
    hints: Hints | None = None
    """Hints of its client; None if it brings none, or the configuration allows none."""
    load_broken: bool = False
    """True if a match of this request could not be ordered; then the request is offered none again (H09)."""
    _identity: RequestIdentity | None = None
    _is_open: bool = True
    """True if a digest on which the identity depends is still under way."""
    _read_at: tuple[int, int, int] = (-1, -1, -1)
    """The number of media items, and both parts of the revision of what is known, when the identity was read."""
    _known_end: int | None = None
    """Tokens before the first new media item that is not in `_identity`."""
    _adapter: tuple[AdapterUse, Pending[AdapterFound]] | None = None
    _media: list[MediaContent | None] = field(default_factory=list)
    _embeddings: Pending[dict[int, bytes]] | None = None
    _prompt: EnginePrompt | None = None

    def __post_init__(self) -> None:
        self.request_id = str(self.request.request_id)

    @property
    def token_ids(self) -> Sequence[int]:
        """See `EngineRequest`: tokens before the first new media item that `identity` does not have yet."""
        if len(self.request.mm_features) != self._read_at[0]:
            self._renew()
        tokens: Sequence[int] = self.request.all_token_ids
        return tokens if self._known_end is None else tokens[: self._known_end]

    @property
    def prompt(self) -> EnginePrompt | None:
        """View of the blocks as vLLM names them; None if there are no KV events."""
        if self._prompt is None and self._identities.prompts is not None:
            self._prompt = self._identities.prompts(self.request)
        return self._prompt

    @property
    def identity(self) -> RequestIdentity | None:
        """See `EngineRequest`: the same object while nothing changes.

        It is None at first where digests come from a thread. It is another object once the request has more media (a
        streaming session) and their digests are there; until then the blocks before them keep their identity. It may
        become None again: when one of its names turns out to stand for two contents, or for other weights than were
        read.
        """
        known = self._identities
        at = len(self.request.mm_features), known.adapters.revision, known.media.disputes
        if self._is_open or self._read_at != at:
            self._renew()
        return self._identity

    def _renew(self) -> None:
        known = self._identities
        self._read_at = len(self.request.mm_features), known.adapters.revision, known.media.disputes
        self._known_end = None
        identity = self._read()
        if identity is None and (before := self._identity) is not None and self._has_grown(before):
            later = self.request.mm_features[len(before.media) :]
            self._known_end = min(feature.mm_position.offset for feature in later)
        elif identity != self._identity:
            self._identity = identity

    def _has_grown(self, known: RequestIdentity) -> bool:
        """True if all is as in `known`, except media after its own."""
        if len(self.request.mm_features) <= len(known.media) or known.adapter != self._read_adapter():
            return False
        return self._known_media()[: len(known.media)] == list(known.media)

    @property
    def awaits_identity(self) -> bool:
        """True if a digest is under way that is worth waiting for: what the engine computes meanwhile has no identity.

        A request that could not be served anything, such as a prompt of one block, does not wait.
        """
        if self.identity is not None or not self._is_open or not self.may_load:
            return False
        return len(self.token_ids) > self._identities.block_size

    @property
    def may_load(self) -> bool:
        """False if the request skips the prefix cache, or a load of it is broken."""
        return not (self.request.skip_reading_prefix_cache or self.load_broken)

    def release(self) -> None:
        """The request is gone: cancel digests that only it needs."""
        if self._adapter is not None:
            self._adapter[1].give_up()
        if self._embeddings is not None:
            self._embeddings.give_up()

    def _read(self) -> RequestIdentity | None:
        """The identity as known by now; None if any part of it is unknown. Sets `_is_open`."""
        request = self.request
        self._is_open = False
        if request.pooling_params is not None or not self._can_be_told():
            return None
        adapter = self._read_adapter()
        media = self._read_media()
        embeddings = self._read_embeddings()
        if adapter is None or media is None or embeddings is None:
            return None
        return RequestIdentity(adapter, request.cache_salt or "", media, embeddings, self._known_runs())

    def _known_runs(self) -> KnownRuns | None:
        """Keys that are known by vLLM's hashes; None where hashes distinguish less than keys.

        An adapter and a salt of one name give one hash (up to 0.30), and when the last token of a session is replaced
        the hash stays (up to 0.31).
        """
        request = self.request
        known = self._identities.known
        others = request.lora_request, request.prompt_embeds, request.streaming_queue
        if known is None or request.mm_features or request.resumable or any(one is not None for one in others):
            return None
        return KnownRuns(known.runs, known.block_size, request.block_hashes)

    def _can_be_told(self) -> bool:
        request = self.request
        identities = self._identities
        # The workers know a request by its id.
        for name, text in (("cache_salt", request.cache_salt), ("request_id", request.request_id)):
            if text and not (text.isascii() or _is_unicode(text)):
                identities.refuse(f"whose {name} is no Unicode text")
                return False
        if request.mm_features and identities.media_come_from_elsewhere:
            identities.refuse("that have media, because ec_transfer_config lets another process encode them by name")
            return False
        if request.mm_features and request.lora_request is not None and identities.media_depend_on_adapters:
            identities.refuse("that have media and an adapter, with enable_tower_connector_lora")
            return False
        return True

    def _read_adapter(self) -> str | None:
        lora = self.request.lora_request
        if lora is None:
            return ""
        if self._adapter is None:
            self._adapter = self._identities.adapters.ask(
                int(lora.lora_int_id), str(lora.lora_path), loads_in_place=bool(lora.load_inplace)
            )
        use, pending = self._adapter
        self._is_open |= not pending.is_done
        if pending.value is None or not self._identities.adapters.admit(use, pending.value):
            return None
        layout = ":3d" if lora.is_3d_lora_weight else ""
        name = f"{pending.value.digest}:{self._identities.adapter_kind}{layout}"
        use.counted.add(name)
        return name

    @property
    def adapter_in_use(self) -> tuple[int, bytes] | None:
        """The id of its adapter, and the stamp of the files from which `identity` was made; None without an adapter."""
        if self._adapter is None or (found := self._adapter[1].value) is None:
            return None
        return self._adapter[0].number, found.stamp

    def _read_media(self) -> tuple[MediaSpan, ...] | None:
        if not self.request.mm_features and not self._media:
            return ()
        spans = self._known_media()
        return tuple(spans) if len(spans) == len(self.request.mm_features) else None

    def _known_media(self) -> list[MediaSpan]:
        """The media up to the first whose content is unknown."""
        features = self.request.mm_features
        identities = self._identities
        spans = []
        del self._media[len(features) :]
        self._media += [identities.media.ask(feature) for feature in features[len(self._media) :]]
        is_gapless = True
        for feature, content in zip(features, self._media, strict=True):
            digest = None
            if content is None:
                identities.refuse("whose media are not in the scheduler's process (mm_processor_cache_type=shm)")
            else:
                self._is_open |= not content.is_known
                digest = content.digest
            is_gapless &= digest is not None
            if is_gapless:
                place = feature.mm_position
                spans.append(MediaSpan(place.offset, place.length, f"{feature.modality}:{place.length}:{digest}"))
        return spans

    def _read_embeddings(self) -> dict[int, bytes] | None:
        request = self.request
        if request.prompt_embeds is None:
            return {}
        if self._embeddings is None:
            is_token = request.prompt_is_token_ids
            rows = request.prompt_embeds
            block_size = self._identities.block_size
            self._embeddings = self._identities.contents.ask(partial(embedding_digests, rows, is_token, block_size))
        self._is_open |= not self._embeddings.is_done
        return self._embeddings.value


def _is_unicode(text: str) -> bool:
    """True if a string can be encoded: it has no lone surrogate."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False
