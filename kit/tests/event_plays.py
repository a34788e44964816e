"""Random plays of one place's index whose blocks are announced, with a router that listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from kvpact.events import queue
from kvpact.events.queue import EventQueue, Gone, PlaceEvents, Stored
from kvpact.identity.keys import BlockKey
from kvpact.index.block_index import BlockIndex, Pin
from kvpact.index.key_table import Names
from kvpact.metrics import Metrics
from kvpact_testkit.results import Broken
from kvpact_testkit.router import LOCAL, Hash, Place, RouterModel, Told

BLOCK = 2
"""Tokens of a block."""
LONG = 9
"""Blocks of a letter, in plays of long chains, which an index handles in runs."""
MEMORY = Place("CPU", LOCAL)
DISK = Place("STORAGE", LOCAL)
IMAGES = "IJ"
DEPTH = 6
SLOTS = 9
STEPS = 30
"""Calls of one play."""

METRICS = Metrics()

Choose = Callable[[int], int]
"""A number below the given one: by dice, or by hypothesis."""


@dataclass
class BlockStored:
    """vLLM's event, as its release 0.33 has it."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    __struct_fields__: ClassVar[tuple[str, ...]]


BlockStored.__struct_fields__ = tuple(BlockStored.__dataclass_fields__)


@dataclass
class BlockRemoved:
    """vLLM's event."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = 0
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared:
    """vLLM's event."""


def name_of(told: Told) -> Hash:
    """The engine's hash of a block, of all that an event says of it."""
    content = told["parent_block_hash"], tuple(told["tokens"]), told.get("extra_keys")
    return int.from_bytes(sha256(repr(content).encode()).digest()[:8], "big")


class Prompt(NamedTuple):
    """Blocks of one letter each. I and J are images, which have the same tokens."""

    letters: str
    salt: str = ""
    adapter: str = ""

    @property
    def tokens(self) -> list[int]:
        return [0 if letter in IMAGES else ord(letter) for letter in self.letters for _ in range(BLOCK)]

    def extra_keys(self, number: int) -> tuple[Any, ...] | None:
        image = [(self.letters[number], 0)] * (self.letters[number] in IMAGES)
        return (
            *([self.adapter] * bool(self.adapter)),
            *image,
            *([self.salt] * (bool(self.salt) and not number)),
        ) or None

    def names(self, first: int, end: int) -> Names:
        """Its names, as kvpact's index takes them."""
        return np.array(names_of(self)[first:end], np.uint64).reshape(-1, 1)


@lru_cache(maxsize=100_000)
def names_of(prompt: Prompt) -> list[Hash]:
    """vLLM's hashes of a prompt's blocks."""
    names: list[Hash] = []
    for number in range(len(prompt.letters)):
        tokens = prompt.tokens[number * BLOCK : (number + 1) * BLOCK]
        parent = names[-1] if names else None
        names.append(name_of({"parent_block_hash": parent, "tokens": tokens, "extra_keys": prompt.extra_keys(number)}))
    return names


@lru_cache(maxsize=100_000)
def keys_of(prompt: Prompt, epoch: int) -> list[BlockKey]:
    """kvpact's keys of a prompt's blocks, which the weights' epoch is part of."""
    return [sha256(repr((epoch, prompt.salt, prompt.adapter, name)).encode()).digest() for name in names_of(prompt)]


def stored(prompt: Prompt, start: int, end: int, place: Place, **others: Any) -> BlockStored:
    """The event of a prompt's blocks `start` to `end`."""
    event = BlockStored(
        names_of(prompt)[start:end],
        names_of(prompt)[start - 1] if start else None,
        prompt.tokens[start * BLOCK : end * BLOCK],
        BLOCK,
        1 if prompt.adapter else None,
        place.medium,
        prompt.adapter or None,
        [prompt.extra_keys(number) for number in range(start, end)],
        locality=place.locality,
        ownership=place.ownership,
    )
    return replace(event, **others)


class Sender(Protocol):
    """Announcer of the blocks of one index."""

    def ask(self, prompt: Prompt, epoch: int) -> None:
        """The prompt is asked for, or blocks of it were saved: its tokens are known."""

    def forget(self) -> None:
        """All routers have forgotten everything."""

    def reset(self) -> None:
        """A new epoch: no block of an earlier one can be asked for."""

    def take(self) -> list[Any]:
        """All events since the last call."""


@dataclass(eq=False)
class PactSender:
    """kvpact's own announcements of one index."""

    index: BlockIndex
    place: Place
    queue: EventQueue = field(default_factory=lambda: EventQueue(METRICS))

    def __post_init__(self) -> None:
        self.index.announce_to(self.subscriber(self.queue, queue.Place(self.place.medium, LOCAL)))

    subscriber: ClassVar[type[PlaceEvents]] = PlaceEvents

    def ask(self, prompt: Prompt, epoch: int) -> None:
        keys = keys_of(prompt, epoch)
        self.index.announce(keys, len(keys), prompt)

    def forget(self) -> None:
        self.index.forget_announced()
        self.queue.clear()

    def reset(self) -> None:
        self.index.withdraw()

    def take(self) -> list[Any]:
        taken: list[Any] = []
        while entries := self.queue.take():
            taken += map(self.event_of, entries)
        return taken

    def event_of(self, entry: Stored | Gone) -> Any:
        """An entry of the queue, as an event."""
        place = Place(*entry.place)
        if isinstance(entry, Gone):
            names = entry.names[:, 0].tolist()
            return BlockRemoved(names, place.medium, locality=place.locality, ownership=place.ownership)
        assert isinstance(entry.prompt, Prompt)
        made = stored(entry.prompt, entry.first, entry.first + len(entry.names), place)
        return replace(made, block_hashes=entry.names[:, 0].tolist())


class IndexPlay:
    """One play: calls of an index at random, each followed by what the router believes."""

    def __init__(
        self, choose: Choose, make: Callable[[BlockIndex, Place], Sender], place: Place = MEMORY, each: int = 1
    ) -> None:
        """Each letter of a prompt stands for `each` blocks."""
        self.choose = choose
        self.make = make
        self.place = place
        self.each = each
        self.slots = SLOTS * each
        self.index = BlockIndex(self.slots)
        self.sender = make(self.index, place)
        self.router = RouterModel(name_of=name_of)
        self.stored = self.removed = self.epoch = 0
        self.prompts: dict[Prompt, None] = {}
        """All that were ever asked for."""
        self.known: dict[Prompt, None] = {}
        """Those that were asked for, or saved, since all was cleared."""
        self.writers: list[tuple[Prompt, int, list[int]]] = []
        self.pins: list[Pin] = []

    def prompt(self) -> Prompt:
        letters = "".join(
            "abIJ"[self.choose(2 if depth < 2 else 4)] * self.each for depth in range(1 + self.choose(DEPTH))
        )
        kind = self.choose(8)
        return Prompt(letters, "tenant" if kind == 6 else "", "adapter" if kind == 7 else "")

    def old(self) -> Prompt:
        prompts = [*self.prompts]
        return prompts[self.choose(len(prompts))] if prompts else self.prompt()

    # Calls

    def reserve(self) -> None:
        prompt = self.prompt()
        keys = keys_of(prompt, self.epoch)
        self._ask(prompt)
        known = self.index.known_prefix(keys)
        reservation = self.index.reserve(keys, known, len(keys))
        if reservation is not None and reservation.slots:
            self.writers.append((prompt, self.epoch, list(reservation.slots)))

    def reserve_sides(self) -> None:
        """Blocks of another group, which no router may hear of."""
        keys = keys_of(self.old(), self.epoch)
        known = self.index.known_prefix(keys)
        sides = [sha256(b"side" + key).digest() for key in keys[:known]]
        new = [(side, key) for side, key in zip(sides, keys, strict=False) if side not in self.index]
        if new:
            reservation = self.index.reserve_sides([side for side, _ in new], [key for _, key in new])
            if reservation is not None:
                self.index.complete(reservation.slots)

    def end_writes(self) -> None:
        if self.writers:
            prompt, epoch, slots = self.writers.pop(self.choose(len(self.writers)))
            lost = self.choose(4 * len(slots))
            held = {*self.index.end_writes(slots, [at != lost for at in range(len(slots))])}
            # The owner of an index announces all that became held, not only what the writer was for.
            for other in [*self.known] if epoch == self.epoch else []:
                if other == prompt or not held.isdisjoint(keys_of(other, epoch)):
                    self._ask(other)

    def _ask(self, prompt: Prompt) -> None:
        self.sender.ask(prompt, self.epoch)
        self.prompts[prompt] = self.known[prompt] = None

    def ask(self) -> None:
        prompt = self.old()
        keys = keys_of(prompt, self.epoch)
        self._ask(prompt)
        if held := self.index.held_prefix(keys):
            self.index.touch(keys[held - 1])

    def pin(self) -> None:
        keys = keys_of(self.old(), self.epoch)
        if (held := self.index.held_prefix(keys)) and len(self.pins) < 2:
            self.pins.append(self.index.pin(keys[held - 1]))

    def unpin(self) -> None:
        if self.pins:
            self.index.unpin(self.pins.pop())

    def drop(self) -> None:
        keys = keys_of(self.old(), self.epoch)
        self.index.drop(keys[self.choose(len(keys))])

    def clear(self) -> None:
        self.index.clear()

    def make_room(self) -> None:
        self.index.make_room(1 + self.choose(self.slots))

    def resize(self) -> None:
        if self.index.usable_slots < self.slots:
            self.index.use_slots(self.slots)
        else:
            self.index.withdraw_slots(self.slots - 1 - self.choose(3 * self.each))

    def engine_clears(self) -> None:
        """vLLM's `reset_prefix_cache`: routers forget all, whatever this cache keeps."""
        self.router.apply([AllBlocksCleared()])
        self.known.clear()
        self.sender.forget()

    def new_epoch(self) -> None:
        """Other weights, or a reset of the cache: its blocks stay until they are evicted, and serve nobody."""
        self.epoch += 1
        self.sender.reset()

    def restart(self) -> None:
        """A disk's index after a restart: requests ask while its blocks are read, and one block is there twice."""
        table: dict[int, tuple[BlockKey, BlockKey]] = {}
        for prompt in self.prompts:
            keys = keys_of(prompt, self.epoch)
            table |= {
                self.index.slot(key): (key, parent)
                for key, parent in zip(keys, [bytes(32), *keys], strict=False)
                if self.index.is_held(key)
            }
        free = [slot for slot in range(self.slots) if slot not in table]
        if table and free:
            table[free[self.choose(len(free))]] = [*table.values()][self.choose(len(table))]
        self.index = BlockIndex(self.slots)
        self.sender = self.make(self.index, self.place)
        self.router = RouterModel(name_of=name_of)
        self.known.clear()
        self.writers.clear()
        self.pins.clear()
        restoring = self.index.begin_restore()
        cut = self.choose(self.slots)
        for piece in ([*range(cut)], [*range(cut, self.slots)]):
            slots = [slot for slot in piece if slot in table]
            named = [b"".join(table[slot][part] for slot in slots) for part in (0, 1)]
            names, parents = (np.frombuffer(each, np.uint64).reshape(-1, 4) for each in named)
            used = np.array([self.choose(9) for _ in slots], np.float64)
            restoring.add(np.array(slots, np.int64), names, parents, used)
            self._ask(self.old())
            self.known.clear()  # what is read later is announced when it is asked for again
            self.judge()
        restoring.settle()
        restoring.end(restoring.order_of_use())

    CALLS = (
        *(("reserve",) * 6), *(("end_writes",) * 7), *(("ask",) * 4), *(("reserve_sides",) * 2), "pin", "unpin", "drop",
        "drop", "make_room", "make_room", "resize", "clear", "engine_clears", "new_epoch",
        "restart",
    )  # fmt: skip

    # Judgement

    def serves(self, prompts: dict[Prompt, None]) -> set[Hash]:
        """The blocks of these prompts that can be loaded."""
        return {
            name
            for prompt in prompts
            for name, key in zip(names_of(prompt), keys_of(prompt, self.epoch), strict=True)
            if self.index.is_held(key)
        }

    def step(self) -> None:
        """One call, and all events that are there then."""
        getattr(self, self.CALLS[self.choose(len(self.CALLS))])()
        self.judge()

    def judge(self) -> None:
        """The router believes what can be loaded, and all of it that was asked for since it knows this engine."""
        events = self.sender.take()
        self.router.apply(events)
        for event in events:
            if isinstance(event, BlockStored):
                self.stored += len(event.block_hashes)
            else:
                self.removed += len(event.block_hashes)
        self.router.require_true({self.place: self.serves(self.prompts)})
        self.router.require_whole({self.place: self.serves(self.known)})

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            self.step()
        self.index.check()


def broken_play(plays: int, make: Callable[[BlockIndex, Place], Sender], dice: Choose) -> Broken | None:
    """What the first broken one of some plays has broken."""
    for _ in range(plays):
        try:
            IndexPlay(dice, make).run()
        except Broken as broken:
            return broken
    return None
