"""Order of eviction by what is known of clients: blocks that their hints retain or release, turns that they expect, and
shares of tenants.

Owns the retained chains of memory's index, the owners and sole users of its blocks, sessions, and expected turns; time
comes from the cache's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvpact.cache.expected import ExpectedTurns
from kvpact.cache.finder import Finder
from kvpact.cache.request import Requests, RequestState
from kvpact.cache.sessions import Sessions
from kvpact.cache.waiting import Queue
from kvpact.hints.schema import Hints
from kvpact.identity.keys import BlockKey
from kvpact.identity.tenants import Tenants
from kvpact.index.block_index import BlockIndex
from kvpact.index.retained_chains import RetainedChains


class TenantBlocks(StrEnum):
    """Kinds of a tenant's blocks in memory."""

    HELD = "held"
    SHARE = "share"
    RETAINED = "retained"


@dataclass(eq=False)
class Retaining:
    """Blocks in memory by what clients say of them, and by tenant, in one arena whose slots are all of one class."""

    finder: Finder
    requests: Requests
    queue: Queue
    clock: Callable[[], float]
    tenants: Tenants | None
    """Clients that have a share of the arena; None: it is not divided."""
    sessions: Sessions = field(default_factory=Sessions, init=False)
    index: BlockIndex = field(init=False)
    chains: RetainedChains = field(init=False)
    expected: ExpectedTurns = field(init=False)

    def __post_init__(self) -> None:
        self.index = self.finder.index
        self.chains = self.index.retained_chains(self.tenants.shares if self.tenants is not None else ())
        self.expected = ExpectedTurns(self.finder, self.queue, self.chains, self.clock)

    def note_hints(self, state: RequestState, hints: Hints) -> None:
        """Note the session of a new request, which begins or goes on with it."""
        if not hints.session:
            return
        if state.identity is None:
            for name in ("session", "release", "expect_in"):
                hints.refuse(name, "the request's inputs have no digest yet, or none at all")
            return
        known = self.sessions.last
        state.session = self.sessions.enter(state.identity.salt, hints.session)
        if hints.release and state.session > known:
            hints.clip("release", "the session is new, or was forgotten: blocks of this request alone")
        self.expected.begin_turn(state.session)

    def note_saving(self, request_id: str, slots: Sequence[int]) -> None:
        """Note the session of a live request whose new blocks are saved in these slots."""
        state = self.requests.live.get(request_id)
        if state is not None and state.session:
            self.chains.users.saved(slots, state.session)

    def end_step(self, now: float) -> None:
        """End retentions whose time has passed, and bring blocks of expected turns."""
        self.chains.end_expired(now)
        self.expected.end_step(now)

    def forget(self) -> None:
        """A new epoch begins: no request asks for the blocks of the old one."""
        self.chains.end_all()
        self.expected.forget()

    def request_finished(self, state: RequestState) -> None:
        """Act on the hints of a request that has ended: on the blocks of it that are in memory."""
        keys = state.keys.keys if state.keys is not None else ()
        known = keys[: self.index.known_prefix(keys)]
        if known:
            self.chains.users.used(known[-1], state.session)
        if state.session:
            self.expected.end_turn(state)
        hints = state.hints
        if hints is None:
            return
        if hints.retain_seconds:
            kept = self.chains.retain(known, self.clock() + hints.retain_seconds)
            if kept < len(keys) or not kept:
                hints.clip("retain", self._why_fewer(kept, len(known), len(keys), state.owner))
        if hints.expect_seconds:
            self._expect(state, hints, keys[: state.stored_end])
        if hints.release:
            self._release(state, hints)
        state.note_outcomes(hints)

    def _why_fewer(self, kept: int, known: int, blocks: int, owner: int) -> str:
        """Reason, in words, why fewer than all blocks of a request are retained."""
        if kept or not known:
            return f"{kept:,} of {blocks:,} blocks" if kept else "no block of it is in memory"
        return f"the share of {self.tenants.labels[owner]} retains none" if self.tenants is not None else "no room"

    def _expect(self, state: RequestState, hints: Hints, keys: Sequence[BlockKey]) -> None:
        """Expect the next turn of the session of a request that has ended, if there is a tier to bring it from."""
        if not self.expected.can_read:
            hints.refuse("expect_in", "there is no tier below memory")
            return
        expected = self.expected.expect(state, keys, hints.expect_seconds)
        if expected < len(keys) or not keys:
            hints.clip("expect_in", f"{expected:,} of {len(keys):,} blocks")

    def _release(self, state: RequestState, hints: Hints) -> None:
        """End the session of a request that has ended: its own blocks go first from now on."""
        live = self.requests.live.values()
        others = (each.keys.keys for each in live if each.keys is not None and each.session != state.session)
        given_up = self.chains.users.give_up(state.session, others)
        if state.identity is not None:
            self.sessions.leave(state.identity.salt, hints.session)
        if not given_up:
            hints.clip("release", "no block of the session alone is in memory")

    def by_tenant(self) -> Iterator[tuple[str, str, int]]:
        """Blocks of each tenant, by their kind and its name; none without tenants. Safe on any thread."""
        if self.tenants is not None and self.chains.shares is not None:
            for owner, name in enumerate(self.tenants.labels):
                yield TenantBlocks.HELD, name, self.chains.shares.blocks[owner]
                yield TenantBlocks.SHARE, name, self.chains.shares.shares[owner]
                yield TenantBlocks.RETAINED, name, self.chains.blocks_of(owner)
