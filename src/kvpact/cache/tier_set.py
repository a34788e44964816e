"""Tiers below one arena, in the user's order: their results, the beliefs about them, and their counts.

Owns the operations under way in them until each has ended, and the part of a step that takes in their results. The
caller that begins an operation decides what it is for. Runs on the scheduler's thread and only submits work to the
tiers' own threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import Any

from kvpact.cache.budget import StepBudget
from kvpact.identity.epochs import Epoch
from kvpact.identity.keys import BlockKey
from kvpact.index.announced import Subscriber
from kvpact.memory.arena import Arena
from kvpact.metrics import Metrics
from kvpact.tiers.client import Deleted, LentSlots, TierClient, observe_tier
from kvpact.tiers.executor import OpId, TierExecutor
from kvpact.tiers.known_keys import ASK_AGAIN_SECONDS, REFUTED_SECONDS, AnnouncedKeys, LRUKeySet
from kvpact.tiers.urls import distinct

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2e-3
"""Seconds of a scheduler step that may be spent on results of the tiers; a step gets 1 ms in all (P11)."""

KNOWN_SHARE = 2
"""Blocks remembered per slot of the arena as stored in a shared tier, or as seen once: what is written comes from the
arena."""


class TierContents:
    """Beliefs about one tier's blocks; at most `most` of each kind."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.being_written: set[BlockKey] = set()
        self.unshareable = LRUKeySet(most)
        """Blocks written to a shared tier under a drawn epoch; deleted when the engine ends."""
        self.announced: AnnouncedKeys | None = None
        """The blocks `found` of a shared tier, if routers hear of them."""
        self.forget()

    def forget(self) -> None:
        """The tier is another one now: nothing is known of what it holds."""
        self.found = LRUKeySet(self._most)
        """Blocks found in a shared tier, with the time. If it has evicted one since, the next lookup says so."""
        self.refuted = LRUKeySet(self._most)
        """Blocks that the tier claimed to hold and did not deliver; see `REFUTED_SECONDS`."""
        if self.announced is not None:
            self.announced.withdraw()
            self.found = self.announced
        self.offered_again = LRUKeySet(self._most)
        """Last keys of chains that were offered to the tier once more; see `WriteBack.note_used`."""

    def announce_to(self, subscriber: Subscriber) -> None:
        """Tell `subscriber` of blocks that this engine has stored in a shared tier, and of those that it finds lost."""
        self.found = self.announced = AnnouncedKeys(self._most, subscriber)

    def note_found(self, keys: Sequence[BlockKey], held: int, now: float) -> None:
        """The tier holds the first `held` of `keys`, and not the others."""
        self.found.add(keys[:held], now)
        self.found.discard(keys[held:])

    def believes(self, key: BlockKey, now: float) -> bool:
        """True if this block was found in the shared tier within `ASK_AGAIN_SECONDS`."""
        return self.found.added_since(key, now - ASK_AGAIN_SECONDS)

    def without_refuted(self, count: Callable[[Sequence[BlockKey]], int], now: float, keys: Sequence[BlockKey]) -> int:
        """Number of the first of `keys`, of which the tier has so many as `count` says, before one that was refuted."""
        self.refuted.discard_older(now - REFUTED_SECONDS)
        return self.refuted.first_of(keys, count(keys))


@dataclass(eq=False)
class TierSet:
    """The clients of all tiers below one arena.

    `budget` is the time of the running step. An operation that takes longer than `timeout` seconds has failed. With
    `share_drawn_epochs`, shared tiers are also written under epochs that no other engine can have, until `close`.
    """

    arena: Arena
    metrics: Metrics
    clock: Callable[[], float]
    budget: StepBudget
    timeout: float
    share_drawn_epochs: bool = False
    clients: list[TierClient] = field(default_factory=list, init=False)
    """All clients, in the order in which blocks are looked for."""
    written: list[TierClient] = field(default_factory=list, init=False)
    """Clients of the user's tiers, in the user's order."""
    beside: list[TierClient] = field(default_factory=list, init=False)
    """Clients that read and never write; they come before those of all tiers."""
    shared: list[TierClient] = field(default_factory=list, init=False)  # they must be asked what they hold
    contents: dict[TierClient, TierContents] = field(default_factory=dict, init=False)
    completions: int = field(default=0, init=False)
    """Operations that were taken in so far: while it is equal, nothing new was found or has arrived."""
    _polled: float = field(default=0.0, init=False)
    """Seconds of the running step that `poll` has taken."""
    _op_ids: Iterator[OpId] = field(default_factory=partial(count, 1), init=False)
    under_way: dict[OpId, Callable[[Any, float], None]] = field(default_factory=dict, init=False)
    """For each operation that has not ended, the call at its end."""
    _lent: LentSlots = field(init=False)

    def __post_init__(self) -> None:
        self._lent = LentSlots(self.arena.least_slots)

    @property
    def most_known(self) -> int:
        """Blocks that are remembered per tier, of each kind."""
        return KNOWN_SHARE * self.arena.num_slots * max(1, *self.arena.places)

    def open(self, executors: Sequence[TierExecutor]) -> None:
        """Use these tiers below the arena from now on, in the user's order. Called once."""
        labels = distinct([""] * len(executors), [executor.label for executor in executors])
        self.metrics.use_tiers(labels)
        for executor, label in zip(executors, labels, strict=True):
            executor.label = label
            client = self._client_of(executor)
            self.clients.append(client)
            self.written.append(client)
            if client.shared:
                self.shared.append(client)

    def open_beside(self, executor: TierExecutor) -> TierClient:
        """Read from this tier, too, from now on, before all others; nothing is written to it."""
        self.metrics.use_tiers((executor.label,))
        client = self._client_of(executor)
        self.beside.append(client)
        self.clients.insert(0, client)
        return client

    def _client_of(self, executor: TierExecutor) -> TierClient:
        client = TierClient(
            executor,
            self._lent,
            timeout=self.timeout,
            clock=self.clock,
            metrics=self.metrics,
            max_deleted_keys=2 * self.most_known,
        )
        self.contents[client] = TierContents(self.most_known)
        return client

    def use_what_is_there(self) -> bool:
        """Use each awaited tier that is there now, and none that is lost, of which nothing is known any more.

        Returns whether one came.
        """
        came = False
        for client in self.written:
            if client.use_what_is_there():
                self.contents[client].forget()
                came |= not client.health.is_awaited
        return came

    def may_share(self, epoch: Epoch) -> bool:
        """True if shared tiers may hold blocks of this epoch: of a drawn one only if that is configured."""
        return self.share_drawn_epochs or not epoch.is_drawn

    # Operations

    def begin(self, end: Callable[[Any, float], None]) -> OpId:
        """The id of an operation to submit; `end(result, now)` is called when it has ended."""
        op_id = next(self._op_ids)
        self.under_way[op_id] = end
        return op_id

    def withdraw(self, op_id: OpId) -> None:
        """Forget an operation that was refused."""
        del self.under_way[op_id]

    @property
    def pending(self) -> int:
        """Number of lookups, reads and writes that have not ended."""
        pending = len(self.under_way)
        for client in self.clients:
            pending += len(client.probes)
        return pending

    @property
    def has_overdue(self) -> bool:
        """True if a tier has an overdue operation."""
        return any(client.health.has_overdue for client in self.clients)

    @property
    def has_completions(self) -> bool:
        """True if `poll` would take in a result now."""
        return self._polled < POLL_SECONDS and any(client.executor.has_completions for client in self.clients)

    def end_step(self) -> None:
        """End the scheduler's step: the next one takes in what this one had no time for."""
        self._polled = 0.0

    def poll(self, limit: float = POLL_SECONDS) -> None:
        """Take in the results of the tiers' threads, for at most `limit` seconds of a step."""
        if self._polled >= limit:
            return
        began = now = self.clock()
        finished = [(client, client.poll()) for client in self.clients if client.executor.has_completions]
        while finished and self._polled + now - began < limit:
            client, its = finished.pop(0)  # each tier in its turn, so that none waits for ever
            if (done := next(its, None)) is not None:
                finished.append((client, its))
                self.completions += 1
                if isinstance(done, Deleted):
                    self.contents[client].found.discard(done.keys)
                else:
                    self.under_way.pop(done.op_id)(done, now)
                now = self.clock()
        for client in self.clients:
            client.check(now)
        self._polled += now - began

    # Losing

    def delete(self, keys: Sequence[BlockKey]) -> None:
        """Have every tier drop these blocks and all that need them, because a load of them failed."""
        for client in self.written:
            self.contents[client].found.discard(keys)
            client.delete(keys)
        for client in self.beside:
            client.tier.delete(keys)  # it waits for nothing, and asks its owners for nothing

    # Reads by the workers themselves

    @property
    def shared_tiers(self) -> list[int]:
        """Positions of the shared tiers among those that were opened."""
        return [at for at, client in enumerate(self.written) if client.shared]

    def readable_elsewhere(self, keys: Sequence[BlockKey]) -> int:
        """Number of `keys` in a row that workers may read themselves: a tier may still have blocks it should delete."""
        return min((client.readable_elsewhere(keys) for client in self.shared), default=0)

    def note_read_elsewhere(self, tier: int, keys: Sequence[BlockKey]) -> None:
        """A worker has read blocks from the tier at this position: count them, and do not write them again."""
        client = self.written[tier]
        self.contents[client].found.add(keys, self.clock())
        self.count_read(client, len(keys), len(keys) * self.arena.slot_bytes)  # of the model's only KV cache group

    # Counting

    def count_read(self, client: TierClient, blocks: int, nbytes: int) -> None:
        """Count `blocks` blocks of `nbytes` bytes in all, read from a tier."""
        self.metrics.add("read_blocks", blocks, client.name)
        self.metrics.add("read_bytes", nbytes, client.name)

    def observe(self) -> None:
        """Update the tiers' gauges and totals."""
        for client in self.clients:
            observe_tier(self.metrics, client, self.arena.slot_bytes)

    def close(self, timeout: float) -> bool:
        """Flush the queues in at most `timeout` seconds over all tiers, and close them; True if all was flushed."""
        share = timeout / max(1, len(self.clients))
        flushed = [client.close(share) for client in self.clients]
        self.poll(inf)
        for client in self.clients:
            if undeleted := len(client.deletions):
                logger.warning("kvpact: %d blocks are still in the %s tier that it should drop", undeleted, client.name)
        return all(flushed)
