"""Announcements to routers of blocks that memory and the tiers hold: prompt by prompt, whenever a place may hold more.

Owns the prompts of live requests, and of ended ones whose blocks are still on their way. What a place loses its own
index announces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol, runtime_checkable

from kvpact.cache.needs.runs import Run
from kvpact.cache.request import Requests
from kvpact.cache.tier_set import TierContents, TierSet
from kvpact.contract import EngineRequest
from kvpact.events.queue import DISK_PLACE, MEMORY_PLACE, EnginePrompt, EventQueue, PlaceEvents, store_place
from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Announcing, Prompt
from kvpact.index.block_index import BlockIndex
from kvpact.tiers.base import leading
from kvpact.tiers.client import TierClient
from kvpact.tiers.known_keys import AnnouncedKeys

MOST_ENDED = 256
"""Ended requests whose prompts are kept until their blocks have arrived."""

MOST_ENDED_BLOCKS = 1 << 17
"""Blocks of these prompts."""


FEW = 8
"""A live request's new blocks are not announced by themselves if they are fewer: an event costs as 50 of them."""


@runtime_checkable
class AnnouncedRequest(Protocol):
    """An `EngineRequest` whose blocks the engine's routers know by names."""

    @property
    def prompt(self) -> EnginePrompt | None:
        """Names of the blocks of this request; None where it has none."""
        ...


@dataclass(eq=False)
class Announcements:
    """One engine's announcements: of each place each block once, until it is gone."""

    queue: EventQueue
    requests: Requests
    index: BlockIndex
    """Memory's."""
    _disk: TierClient | None = field(default=None, init=False)
    """The first tier that knows its losses, and no other: routers count a block once for all local tiers."""
    _store: TierContents | None = field(default=None, init=False)
    """The first shared tier."""
    _prompts: dict[str, EnginePrompt] = field(default_factory=dict, init=False)
    _ended: dict[str, tuple[EnginePrompt, Sequence[BlockKey]]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.index.announce_to(PlaceEvents(self.queue, MEMORY_PLACE))

    @property
    def count(self) -> int:
        """Announced blocks, of all places."""
        return sum(place.announced_count for place in self._places())

    def _places(self) -> Iterator[BlockIndex | Announcing | AnnouncedKeys]:
        yield self.index
        if self._disk is not None and self._disk.announcing is not None:
            yield self._disk.announcing
        if self._store is not None and self._store.announced is not None:
            yield self._store.announced

    def open(self, tiers: TierSet) -> None:
        """Announce the blocks of these tiers, too."""
        for client, contents in tiers.contents.items():
            if client.shared and self._store is None:
                self._store = contents
                contents.announce_to(PlaceEvents(self.queue, store_place(client.name)))
            elif self._disk is None and not client.shared:
                self._disk = client
                client.announce_to(PlaceEvents(self.queue, DISK_PLACE))

    # Prompts

    def asked(self, request: EngineRequest) -> None:
        """A request was looked up: announce its blocks that are there, such as those of an earlier run."""
        if isinstance(request, AnnouncedRequest) and request.prompt is not None:
            self._prompts[request.request_id] = request.prompt
            self._ended.pop(request.request_id, None)
            self._announce(request.prompt, self._keys_of(request.request_id))

    def _keys_of(self, request_id: str) -> Sequence[BlockKey]:
        state = self.requests.live.get(request_id)
        return state.keys.keys if state is not None and state.keys is not None else ()

    def ended(self, request_id: str, *, may_store: bool) -> None:
        """A request ends; its prompt is kept if blocks of it may still be stored somewhere."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None:
            return
        keys = self._keys_of(request_id)
        self._announce(prompt, keys)
        prompt.end()
        if not may_store:
            self._ended.clear()
            return
        self._ended[request_id] = prompt, keys  # a save that is still put off adds to this list
        while len(self._ended) > MOST_ENDED or sum(len(one) for _, one in self._ended.values()) > MOST_ENDED_BLOCKS:
            del self._ended[next(iter(self._ended))]

    def _prompt_of(self, run: Run, end: int) -> EnginePrompt | None:
        """The prompt of a run, or any that has its blocks: which became held through others', or of the same id."""
        name = run.request_id
        last = run.chain[end - 1]
        own = [(self._prompts[name], self._keys_of(name))] if name in self._prompts else []
        own += [self._ended[name]] if name in self._ended else []
        live = ((prompt, self._keys_of(each)) for each, prompt in self._prompts.items())
        for prompt, keys in chain(own, self._ended.values(), live):
            if len(keys) >= end and keys[end - 1] == last:
                return prompt
        return None

    # Places

    def _announce(self, prompt: Prompt, keys: Sequence[BlockKey]) -> None:
        if keys:
            self.index.announce(keys, len(keys), prompt)
            self._announce_on_disk(keys, len(keys), prompt)

    def _announce_on_disk(self, keys: Sequence[BlockKey], end: int, prompt: Prompt) -> None:
        client = self._disk
        if client is not None and client.announcing is not None:
            client.announcing.announce(keys, client.deletions.first_among(keys, end), prompt)

    def saved(self, run: Run, count: int) -> None:
        """Memory has got the first `count` blocks of a run.

        Few blocks of a live request, as of an answer, wait for its end: until then the engine itself has them.
        """
        if count < FEW and run.request_id in self._prompts:
            return
        end = run.start + count
        prompt = self._prompt_of(run, end) if run.is_linked else None
        if prompt is not None:
            self.index.announce(run.chain, end, prompt)

    def written(self, client: TierClient, contents: TierContents, run: Run, each: Sequence[bool]) -> None:
        """A tier has got the blocks of a run of which `each` is true; few of a live request wait as in memory."""
        if len(each) < FEW and client is self._disk and run.request_id in self._prompts:
            return
        count = leading(each)
        end = run.start + count
        prompt = self._prompt_of(run, end) if run.is_linked and count else None
        if prompt is None:
            return
        if client is self._disk:
            self._announce_on_disk(run.chain, end, prompt)
        elif contents is self._store and contents.announced is not None:
            self.index.announce(run.chain, end, prompt)  # what comes before them was perhaps stored by others
            contents.announced.announce(run.keys[:count], run.start, prompt)

    # All blocks

    def withdraw(self) -> None:
        """Weights, or an adapter's or an image's name, may stand for others now: no request can ask for what was
        announced. A live request is announced again when it is looked up again."""
        self._prompts.clear()
        self._ended.clear()
        for place in self._places():
            place.withdraw()

    def forget(self) -> None:
        """Routers have forgotten all blocks of this engine."""
        for place in self._places():
            place.forget_announced()
        self.queue.clear()
