"""Content of a request's images, clips and videos, by their features and not by a client's names for them.

Owns the map from vLLM's identifiers to content. A background thread reads the features. An identifier is no content: it
may be the client's own string (`uuid`), with or without vLLM's hash over it. Features alone are no content either: vLLM
keeps its encoder's output under the identifier, and uses it for the next request that brings the same identifier with
other features. So an item has a content only while all that came under its identifier had the same features. Otherwise
either may be in a request's KV, and requests with it are neither stored nor served.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from blake3 import blake3

from kvpact.identity.digest_thread import DigestThread, Pending
from kvpact.vllm.content_digests import features_digest, mask_digest

MIN_NAMES = 8192
"""At least this many identifiers are remembered, and more if the encoder's cache can hold more embeddings: an
identifier is forgotten here only after vLLM has dropped its encoding."""


@dataclass(slots=True, eq=False)
class NamedContent:
    """The features that came under one identifier."""

    _item: weakref.ref[Any]
    pending: Pending[str]
    """The digest of the features that came first."""
    _rivals: list[tuple[weakref.ref[Any], Pending[str]]] = field(default_factory=list)
    """Features that came later, as other objects, and were not compared yet; the last one is digested last."""
    is_disputed: bool = False
    """True if other features came under the identifier."""

    def is_of(self, item: Any) -> bool:
        """True if the features that were digested are this same object."""
        return self._item() is item or any(known() is item for known, _ in self._rivals)

    def settle(self) -> bool:
        """Compare the features that have been digested by now; returns whether these are all."""
        if not self.pending.is_done:
            return False
        if any(not rival.is_done for _, rival in self._rivals):
            return False
        for item, rival in self._rivals:
            self._item = item  # vLLM may hand out this object from now on
            self.is_disputed |= rival.value is None or rival.value != self.pending.value
        self._rivals.clear()
        return True

    def add_rival(self, item: Any, pending: Pending[str]) -> None:
        """Features that may differ have come under the identifier."""
        self._rivals.append((weakref.ref(item), pending))


@dataclass(frozen=True, slots=True, eq=False)
class MediaContent:
    """One item of one request: its identifier, its features, and the positions that it takes."""

    _named: NamedContent
    _mask: Pending[str] | None

    @property
    def is_known(self) -> bool:
        """True if `digest` is final."""
        return self._named.settle() and (self._mask is None or self._mask.is_done)

    @property
    def digest(self) -> str | None:
        """The content; None while it is not known, and if it cannot be known."""
        if not self.is_known or self._named.is_disputed or self._named.pending.value is None:
            return None
        if self._mask is None:
            return self._named.pending.value
        return f"{self._named.pending.value}:{self._mask.value}" if self._mask.value is not None else None


class MediaContents:
    """The contents of all media items in one engine's requests."""

    def __init__(self, thread: DigestThread, most: int = MIN_NAMES) -> None:
        """`thread` digests features; at most `most` identifiers are remembered."""
        self._thread = thread
        self._most = most
        self._names: OrderedDict[bytes, NamedContent] = OrderedDict()
        self.disputes = 0
        """Number of times that features under a known identifier may have differed from earlier ones."""

    def __len__(self) -> int:
        return len(self._names)

    def ask(self, feature: Any) -> MediaContent | None:
        """The content of a `MultiModalFeatureSpec`; None if its features are not in this process.

        They are not with vLLM's cache in shared memory: then the request has only an address there.
        """
        item = feature.data
        if item is None or "address" in item or not feature.identifier:
            return None
        named = self._find(feature.identifier, item)
        mask = feature.mm_position.is_embed
        return MediaContent(named, None if mask is None else self._thread.ask(partial(mask_digest, mask)))

    def _find(self, identifier: str, item: Any) -> NamedContent:
        name = blake3(identifier.encode(errors="surrogatepass")).digest(length=16)
        named = self._names.get(name)
        if named is None:
            pending = self._thread.ask(partial(features_digest, item))
            named = self._names[name] = NamedContent(weakref.ref(item), pending)
            if len(self._names) > self._most:
                self._names.popitem(last=False)
            return named
        self._names.move_to_end(name)
        if not named.is_of(item) and not named.is_disputed:
            self.disputes += 1
            named.add_rival(item, self._thread.ask(partial(features_digest, item)))
        return named
