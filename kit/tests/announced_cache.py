"""kvpact's cache on the embedded engine, with a router that hears what it announces and is judged after each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from event_plays import DISK, MEMORY, METRICS, AllBlocksCleared, BlockRemoved, BlockStored, name_of
from kvpact.cache.cache import PactCache
from kvpact.contract import EngineRequest
from kvpact.events.queue import EventQueue, Gone, Stored
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.index.key_table import Names
from kvpact_testkit.cache.conformance import CacheContext, CacheUnderTest
from kvpact_testkit.cache.subjects import pact_cache
from kvpact_testkit.router import Hash, Place, RouterModel

CLEARS = 0.03
"""Chance that after a step vLLM's own prefix cache is reset, and routers are told to forget all."""


class PlayedPrompt:
    """A request of the embedded engine, with names for its blocks as an engine would make them."""

    def __init__(self, request: EngineRequest, block_size: int, ahead: int) -> None:
        self.request = request
        self.block_size = block_size
        self.ahead = ahead
        self.known: list[Hash] = []

    def tokens(self, first: int, end: int) -> list[int]:
        return list(self.request.token_ids[first * self.block_size : end * self.block_size])

    def extra_keys(self, number: int) -> tuple[Any, ...]:
        identity = self.request.identity
        assert identity is not None
        start, end = number * self.block_size, (number + 1) * self.block_size
        media = [span for span in identity.media if span.start < end and start < span.start + span.count]
        ahead = tuple(self.request.token_ids[end : end + self.ahead])
        return identity.adapter, identity.salt, *media, identity.embeddings.get(number), ahead

    def hashes(self, end: int) -> list[Hash]:
        """Of the first `end` blocks; fewer where the tokens after a block are not known."""
        whole = max(0, len(self.request.token_ids) - self.ahead) // self.block_size
        for number in range(len(self.known), min(end, whole)):
            told = {
                "parent_block_hash": self.known[-1] if self.known else None,
                "tokens": self.tokens(number, number + 1),
                "extra_keys": self.extra_keys(number),
            }
            self.known.append(name_of(told))
        return self.known[:end]

    def names(self, first: int, end: int) -> Names:
        return np.array(self.hashes(end)[first:], np.uint64).reshape(-1, 1)

    def end(self) -> None:
        pass


class View:
    """A request as a cache sees it that announces its blocks."""

    def __init__(self, request: EngineRequest, prompt: PlayedPrompt) -> None:
        self.request = request
        self.prompt = prompt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.request, name)


class AnnouncedCache:
    """A cache and a router that hears it: calls of the engine, whose requests have names for their blocks."""

    def __init__(self, cache: PactCache, queue: EventQueue) -> None:
        assert cache.announcements is not None
        self.cache = cache
        self.queue = queue
        self.announcements = cache.announcements
        self.router = RouterModel(name_of=name_of)
        self.dice = random.Random(0)
        self.prompts: dict[str, PlayedPrompt] = {}
        self.ever_shared: set[Hash] = set()
        self.rests = 0
        """How often nothing was under way, so that all had to be announced."""
        self.live: set[str] = set()
        """Requests that were asked for since all was cleared or withdrawn."""
        self.wanted: dict[Place, dict[Hash, bool]] = {MEMORY: {}, DISK: {}}
        """The blocks that were asked for, or computed, since then -> whether they are there; none that is gone."""
        self.sees_disk = True
        """False after a write that failed, perhaps in part, until all is cleared."""
        self.keys: dict[tuple[str, bytes], BlockKeys] = {}
        self._prepare = cache.prepare_external_match
        self._decline = cache.decline_external_match
        self._finish = cache.request_finished
        for method in (self.prepare_external_match, self.decline_external_match, self.request_finished):
            setattr(cache, method.__name__, method)
        self._withdraw = cache.announcements.withdraw
        self._written = cache.announcements.written
        for listener in (self.withdraw, self.written):
            setattr(cache.announcements, listener.__name__, listener)

    def _forget(self) -> None:
        self.live.clear()
        self.wanted = {place: {} for place in self.wanted}
        self.sees_disk = True

    def withdraw(self) -> None:
        self._forget()
        self._withdraw()

    def written(self, client: Any, contents: Any, run: Any, each: Sequence[bool]) -> None:
        self.sees_disk &= all(each)
        self._written(client, contents, run, each)

    def prepare_external_match(self, request: Any, num_computed_tokens: int) -> Any:
        view = self._view(request)
        match = self._prepare(view, num_computed_tokens)
        if match is not None:
            self._asked(request)
        elif request.request_id in self.prompts:  # what is read for it is announced with the answer
            for name in self.prompts[request.request_id].hashes(len(request.token_ids)):
                if self.wanted[MEMORY].get(name) is False:
                    del self.wanted[MEMORY][name]
        return match

    def decline_external_match(self, request: Any, num_computed_tokens: int) -> None:
        self._decline(self._view(request), num_computed_tokens)
        self._asked(request)

    def request_finished(self, request_id: str) -> None:
        if request_id in self.live:
            self._want(self.prompts[request_id], len(self.prompts[request_id].request.token_ids))
        self._finish(request_id)

    def _view(self, request: Any) -> Any:
        if request.identity is None:
            return request
        groups = self.cache.requests.groups
        prompt = self.prompts.get(request.request_id)
        if prompt is None or prompt.request is not request:
            prompt = self.prompts[request.request_id] = PlayedPrompt(request, groups.block_size, groups.tokens_ahead)
        return View(request, prompt)

    def _asked(self, request: EngineRequest) -> None:
        if request.identity is not None:
            groups = self.cache.requests.groups
            longest = len(request.token_ids) - 1 if request.may_load else 0
            self.live.add(request.request_id)
            whole = longest // groups.alignment * groups.alignment
            self._want(self.prompts[request.request_id], whole // groups.block_size)

    def _want(self, prompt: PlayedPrompt, count: int) -> None:
        for wanted in self.wanted.values():
            for name in prompt.hashes(count):
                wanted.setdefault(name, False)

    # Judgement

    def chain(self, prompt: PlayedPrompt) -> Iterable[tuple[Hash, BlockKey]]:
        requests, request = self.cache.requests, prompt.request
        groups = requests.groups
        name = request.request_id, self.cache.epoch.value
        if name not in self.keys:
            assert request.identity is not None
            of_group = groups.chain_digest, groups.tokens_ahead
            self.keys[name] = BlockKeys(
                requests.namespace, groups.block_size, request.identity, self.cache.epoch, *of_group
            )
        keys = self.keys[name].extend(request.token_ids)
        return zip(prompt.hashes(len(keys)), keys, strict=True)

    def loadable(self) -> dict[Place, set[Hash]]:
        """The blocks that can be loaded, place by place."""
        chains = [[*self.chain(prompt)] for prompt in self.prompts.values()]
        found = {MEMORY: {name for chain in chains for name, key in chain if self.announcements.index.is_held(key)}}
        for client in self.cache.tiers.clients:
            disk: Any = getattr(client.tier, "tier", None)
            if client.shared:
                keys = {key: name for chain in chains for name, key in chain}
                there = zip(keys.values(), disk.lookup([*keys]), strict=True)
                # The store loses some without a word.
                self.ever_shared |= {name for name, is_there in there if is_there}
                found[Place("STORAGE", "REMOTE", client.name)] = self.ever_shared
            elif disk is not None and disk.own is not None:
                of_disk = found.setdefault(DISK, set())
                for chain in chains:
                    row = [key for _, key in chain]
                    held = min(disk.own.content.leading(row), client.deletions.first_among(row, len(row)))
                    of_disk.update(name for name, _ in chain[:held])
        return found

    def event_of(self, entry: Stored | Gone) -> Any:
        place, names = Place(*entry.place), entry.names[:, 0].tolist()
        if isinstance(entry, Gone):
            return BlockRemoved(names, place.medium, locality=place.locality, ownership=place.ownership)
        prompt, first, end = entry.prompt, entry.first, entry.first + len(names)
        assert isinstance(prompt, PlayedPrompt)
        return BlockStored(
            names,
            prompt.hashes(first)[-1] if first else None,
            prompt.tokens(first, end),
            prompt.block_size,
            None,
            place.medium,
            None,
            [prompt.extra_keys(number) for number in range(first, end)],
            locality=place.locality,
            ownership=place.ownership,
        )

    def judge(self) -> None:
        """After a step: all events that wait, and what the router believes then."""
        if self.dice.random() < CLEARS:
            self.announcements.forget()
            self.router.apply([AllBlocksCleared()])
            self._forget()
        while entries := self.queue.take():
            self.router.apply(map(self.event_of, entries))
        loadable = self.loadable()
        self.router.require_true(loadable)
        for place, wanted in self.wanted.items():
            if place == DISK and (self.cache.tiers.pending or not self.sees_disk):
                continue  # the scheduler does not know yet what is there
            there = loadable.get(place, set())
            self.wanted[place] = {name: name in there for name, was in wanted.items() if name in there or not was}
            if not (self.cache.live_requests or self.cache.pending):
                self.rests += 1
                self.router.require_whole({place: there.intersection(self.wanted[place])})


def announced(
    place: CacheContext, make: Callable[..., CacheUnderTest] = pact_cache, **settings: object
) -> CacheUnderTest:
    """What `make` makes, with a router."""
    queue = EventQueue(METRICS)
    under_test = make(place, events=queue, **settings)
    assert isinstance(under_test.cache, PactCache)
    if under_test.cache.requests.groups.chain is None:
        return make(place, **settings)  # no group is of full attention
    judged = AnnouncedCache(under_test.cache, queue)

    def check() -> None:
        under_test.check()
        judged.judge()

    return replace(under_test, check=check)
