"""What the cache knows of each live request.

Owns nothing else: what is promised to a request is the ledger's, what is copied for it the jobs'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpact.cache.jobs import PactPlan
from kvpact.cache.prefetch import TierLookup
from kvpact.contract import EngineRequest
from kvpact.identity.epochs import Epochs
from kvpact.identity.keys import BlockKeys, RequestIdentity
from kvpact.identity.tags import NO_TAG, BlockTags, Tag


class Waiting(NamedTuple):
    """What "ask again later" was answered to: while it stays equal, nothing has changed."""

    computed_tokens: int
    completions: int
    """As `TierSet` counts."""
    plan: PactPlan | None


@dataclass(slots=True)
class RequestState:
    """What the cache knows of one live request. Without `keys` (its identity is unknown) it is not cached."""

    keys: BlockKeys | None = None
    identity: RequestIdentity | None = None
    """What `keys` were made with."""
    generation: int = 0
    """The epoch that `keys` were made in, as `Epochs` counts."""
    tag: Tag = NO_TAG
    """What the engine's blocks are tagged with that the request fills now."""
    tail_tag: Tag = NO_TAG
    """What the request's last block, filled in part, was begun with."""
    sound: int = 0
    """So many of its blocks have its tag, from the first on."""
    offloaded_blocks: int = 0
    """Blocks that need not be offered for saving again."""
    invalid_from: int | None = None
    """The first block that once failed to load: neither it nor what follows is promised to this request again (H09)."""
    waits_until: float | None = None
    """When "ask again later" ends for this request, however often its range changes meanwhile (P11)."""
    put_off: bool = False
    """Whether the running probe is put off to the next step because this one has cost enough."""
    was_put_off: bool = False
    """Whether the last probe was: no two in a row are."""
    waits_at: Waiting | None = None
    """When it was told so the last time. Until any of this changes, the answer stays."""
    last_lookup: int = -1
    """Where the last counted lookup began, in blocks; a blocked request that asks each step is counted once (H02)."""
    found: bool | None = None
    """Whether that lookup promised anything; None while a tier is waited for, whose answer may change it."""
    spared_at: int = -1
    """Where, in blocks, the engine last had all that could be loaded."""
    tier_lookup: TierLookup | None = None
    """What the shared tiers were asked for this request, once."""
    computed: int = 0
    """Tokens that the engine has, or is loading: what it computes beyond them is its own work."""
    max_computed: int = 0
    """Tokens that the engine had when it was farthest with the request."""
    loads_without_progress: int = 0
    """Loads since then: it was preempted before it got any farther."""

    def advance(self, computed_tokens: int) -> None:
        """After this step the engine has so many tokens of the request."""
        self.computed = computed_tokens
        if computed_tokens > self.max_computed:
            self.max_computed, self.loads_without_progress = computed_tokens, 0

    def commit(self, num_tokens: int) -> None:
        """The engine takes so many more tokens from the cache."""
        self.waits_until, self.tail_tag = None, self.tag
        self.computed += num_tokens
        self.loads_without_progress += 1

    def drop_lookup(self) -> None:
        """Nobody asks the tiers for the request any more."""
        if self.tier_lookup is not None:
            self.tier_lookup.give_up(late=False)
            self.tier_lookup = None

    def go_back(self, first: int, block_size: int) -> None:
        """The engine computes the request's blocks from `first` on anew; until then they hold nothing to be saved."""
        self.sound = min(self.sound, first)
        self.offloaded_blocks = min(self.offloaded_blocks, first)
        self.computed = min(self.computed, first * block_size)


@dataclass(eq=False, slots=True)
class Requests:
    """All live requests, by id; their keys and tags are those of the current epoch of `epochs`."""

    namespace: bytes
    block_size: int
    epochs: Epochs
    tags: BlockTags
    renamed: Callable[[str, RequestState, int], None]
    """`renamed(request id, state, block)` is called when a request's blocks from `block` on get other keys."""
    live: dict[str, RequestState] = field(default_factory=dict, init=False)

    def of(self, request: EngineRequest) -> RequestState:
        """The request's state, which begins now if there is none."""
        state = self.live.get(request.request_id)
        if state is None:
            state = self.live[request.request_id] = RequestState()
        identity = request.identity
        if identity is not state.identity or state.generation != self.epochs.generation:
            self._identify(request.request_id, state, identity)
        return state

    def _identify(self, request_id: str, state: RequestState, identity: RequestIdentity | None) -> None:
        """The request is new, or has grown, or the epoch is another one: its blocks have other keys from some on."""
        epochs, before, kept = self.epochs, state.identity, 0
        same_epoch = state.generation == epochs.generation
        state.identity, state.generation = identity, epochs.generation
        state.tag = self.tags.tag_of(epochs.generation, identity.adapter) if identity is not None else NO_TAG
        if identity is None:
            state.keys = None
        elif same_epoch and state.keys is not None and before is not None and before.same_root(identity):
            kept = state.keys.renew(identity)
        else:
            state.keys = BlockKeys(self.namespace, self.block_size, identity, epochs.current)
        state.offloaded_blocks, state.sound = min(state.offloaded_blocks, kept), min(state.sound, kept)
        state.waits_at = None
        self.renamed(request_id, state, kept)

    def not_again(self, request_id: str, first: int) -> None:
        """A load failed the request from block `first` on, whatever the reason: it is not promised that again (H09).

        Nor in another epoch, where these blocks have other keys.
        """
        state = self.live.get(request_id)
        if state is not None:
            state.invalid_from = min(first, state.invalid_from if state.invalid_from is not None else first)
            state.offloaded_blocks = min(state.offloaded_blocks, first)
