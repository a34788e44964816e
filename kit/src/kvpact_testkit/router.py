"""Model of a router: its belief about one engine, made of that engine's KV events, and what it may not be told.

Owns the rules of real indexers, the strictest of each (H133): places stand apart, nothing is counted, a block behind
one of which they never heard is lost, and an event that is not as it must be is lost with its batch. Knows no engine:
an event has the fields of vLLM's, and its kind is the name of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeAlias

from kvpact_testkit.results import Broken

Hash: TypeAlias = int | bytes
Told: TypeAlias = dict[str, Any]
"""Field -> value: all that an event says of one block, but for where it is and which session asked for it."""

ENGINE = "GPU"
"""Medium of the engine's own blocks. Their events are not judged: those of a connector must say the same."""

LOCAL = "LOCAL"
"""Locality of what no other engine can read. Routers refuse an event that names an owner of that."""
MEDIA = frozenset([ENGINE, "CPU", "STORAGE"])
"""The media that routers know."""
KINDS = frozenset([None, "full_attention", "mla_attention"])
"""Kinds of groups whose blocks routers index."""

_LISTS = ("extra_keys", "lookahead_token_ids")
"""Fields with one entry for each block, or None."""
_OF_THE_EVENT = frozenset(["block_hashes", "token_ids", "medium", "locality", "ownership", "session_id", *_LISTS])


class Place(NamedTuple):
    """Where blocks lie. A removal from one place says nothing of the others."""

    medium: str
    locality: str | None = None
    ownership: str | None = None


def _broken(what: str) -> NoReturn:
    raise Broken(what, protects=("H133",))


class RouterModel:
    """A router's belief about one engine, whose chains are of KV cache group `group`.

    Raises Broken for an event that a router cannot use, or would take for something else; with `name_of` also for a
    hash that is not the one of what is said of its block.
    """

    def __init__(self, group: int = 0, name_of: Callable[[Told], Hash] | None = None) -> None:
        self.believed: dict[Place, set[Hash]] = {}
        self.told: dict[Hash, Told] = {}
        """All blocks that were ever described, as they were at first."""
        self._seen: set[Hash] = set()
        """The blocks that were told of since all were cleared."""
        self.stored = 0
        self.removed = 0
        self._group = group
        self._name_of = name_of

    def apply(self, events: Iterable[Any]) -> None:
        """Take in events, in order."""
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.believed.clear()  # of every medium
                self._seen.clear()
                continue
            if kind not in ("BlockStored", "BlockRemoved") or event.medium not in MEDIA:
                _broken(f"a router would take this for an event of the engine's own blocks, or for none: {event}")
            if event.locality == LOCAL and event.ownership is not None:
                _broken(f"what is local has no owner: {event}")
            if event.group_idx != self._group:
                if event.medium != ENGINE:
                    _broken(f"an event is of group {event.group_idx}, not of the chain's: {event}")
                continue
            place = Place(event.medium, event.locality, event.ownership)
            if kind == "BlockStored":
                self._store(event, place)
            else:
                self.removed += len(event.block_hashes) if place.medium != ENGINE else 0
                self.believed.get(place, set()).difference_update(event.block_hashes)

    def _store(self, event: Any, place: Place) -> None:
        parent = event.parent_block_hash
        if parent is not None and parent not in self._seen:
            _broken(f"of the block before those of an event the router was never told: {event}")
        if event.kv_cache_spec_kind not in KINDS:
            _broken(f"routers do not index blocks of this kind: {event}")
        here = self.believed.setdefault(place, set())
        for name, told in blocks_of(event):
            if place.medium != ENGINE:
                self.stored += 1
                if name in here:
                    _broken(f"block {name!r} is stored in {place} a second time, and one removal will take both")
            first = self.told.setdefault(name, told)
            if first is told and self._name_of is not None and self._name_of(told) != name:
                _broken(f"{name!r} is not the hash of the block that is described with it: {told}")
            if differs := [field for field in {**first, **told} if first.get(field) != told.get(field)]:
                _broken(f"block {name!r} differs in {differs}: it was {first}, and is {told} in {place}")
            here.add(name)
            self._seen.add(name)

    # Judgement, once all events that are queued have been taken

    @property
    def places(self) -> dict[Place, set[Hash]]:
        """The blocks of each place but the engine's own."""
        return {place: blocks for place, blocks in self.believed.items() if place.medium != ENGINE}

    def require_true(self, loadable: Mapping[Place, Collection[Hash]]) -> None:
        """Raise Broken if the router believes that a block lies where it cannot be loaded from."""
        for place, blocks in self.places.items():
            if wrong := blocks.difference(loadable.get(place, ())):
                _broken(f"{len(wrong)} blocks cannot be loaded from {place}, as the router believes: {[*wrong][:4]}")

    def require_whole(self, announced: Mapping[Place, Collection[Hash]]) -> None:
        """Raise Broken if the router lacks blocks that had to be announced."""
        places = self.places
        for place, blocks in announced.items():
            if missing := set(blocks).difference(places.get(place, ())):
                _broken(f"the router was not told of {len(missing)} blocks in {place}: {[*missing][:4]}")

    def prefix(self, names: Iterable[Hash]) -> int:
        """Number of a prompt's blocks, from the first one on, that the router believes to be in any place."""
        count = 0
        for name in names:
            if not any(name in blocks for blocks in self.believed.values()):
                break
            count += 1
        return count


def blocks_of(event: Any) -> Iterator[tuple[Hash, Told]]:
    """Each block of a `BlockStored`, and all that it says of it. Raises Broken if it does not describe every block."""
    size, names, tokens = event.block_size, event.block_hashes, event.token_ids
    entries = {field: value for field in _LISTS if (value := getattr(event, field, None)) is not None}
    lengths = {len(tokens) / size, *map(len, entries.values())}
    if not names or lengths != {len(names)}:
        _broken(f"an event describes {lengths} blocks and names {len(names)}: {event}")
    common = {field: getattr(event, field) for field in event.__struct_fields__ if field not in _OF_THE_EVENT}
    for number, name in enumerate(names):
        own = {field: value[number] for field, value in entries.items()}
        yield name, {**common, "tokens": [*tokens[number * size : (number + 1) * size]], **own}
        common["parent_block_hash"] = name
