"""State of each live request.

Owns nothing else: the ledger owns a request's plan, `jobs.py` its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import Final

from kvpact.cache.counted_lookups import CountedLookups
from kvpact.cache.records import Records, RequestRecord
from kvpact.cache.waiting import Reply, WaitEvent, Waiting
from kvpact.contract import EngineRequest
from kvpact.hints.schema import Hints, Store
from kvpact.identity.epochs import Epochs
from kvpact.identity.groups import GroupSet
from kvpact.identity.keys import BlockKey, BlockKeys, RequestIdentity
from kvpact.identity.tags import NO_TAG, BlockTags, Tag
from kvpact.identity.tenants import Tenants
from kvpact.metrics import MissReason
from kvpact.ranges import BlockRange
from kvpact.tiers.client import TierClient
from kvpact.tiers.executor import OpId

ALL_ROWS: Final = maxsize


@dataclass(eq=False, slots=True)
class TierLookup:
    """One request's question to the shared tiers: the number of `keys` that each holds in a row."""

    keys: Sequence[BlockKey]
    pending: dict[TierClient, OpId] = field(default_factory=dict)
    hits: dict[TierClient, int] = field(default_factory=dict)
    loose: dict[TierClient, dict[BlockKey, bool]] = field(default_factory=dict)
    """Loose blocks that each was asked for: True if it holds the block."""
    silent: dict[TierClient, MissReason] = field(default_factory=dict)
    """Tiers that say nothing of it, and why: they were not asked, or failed."""
    rounds: int = 0
    """Number of times that the tiers were asked for loose blocks."""
    late: bool = False
    """True if a tier did not answer in time."""

    @property
    def done(self) -> bool:
        """True once every tier that was asked has answered."""
        return not self.pending

    def give_up(self, *, late: bool) -> None:
        """Stop waiting for missing answers; if they are `late`, the tiers are at fault."""
        for client, op_id in self.pending.items():
            client.give_up(op_id, late=late)
            self.late |= late
        self.pending.clear()


@dataclass(slots=True)
class RequestState:
    """State of one live request. A request without `keys` (its identity is unknown) is not cached."""

    keys: BlockKeys | None = None
    identity: RequestIdentity | None = None
    """Identity that `keys` were made from."""
    generation: int = 0
    """The epoch of `keys`, as counted by `Epochs`."""
    tag: Tag = NO_TAG
    """The tag of blocks that the request fills now."""
    tail_tag: Tag = NO_TAG
    """Tag of the request's last, partly filled block, as of its first token."""
    sound: int = 0
    """Number of its rows, from the first on, whose blocks in all groups have its tag, as far as the engine has them."""
    offloaded_blocks: int = 0
    """Number of blocks that need not be offered for saving again."""
    invalid_from: int | None = None
    """The first block that failed to load: neither it nor later ones are promised to this request again (H09)."""
    waiting: Waiting = field(default_factory=Waiting)
    """Last reply to it, and the deadline of "ask again later"."""
    lookups: CountedLookups = field(default_factory=CountedLookups)
    """Counts of its lookups, each once."""
    tier_lookup: TierLookup | None = None
    """The request's only question to the shared tiers."""
    computed: int = 0
    """Tokens that the engine has or is loading; it computes those after them."""
    quiet_until: int = 0
    """While it has fewer tokens than these, another one changes nothing but their number; 0 if that is not so."""
    max_computed: int = 0
    """The most tokens of the request that the engine has had."""
    loads_without_progress: int = 0
    """Loads since then, each ended by a preemption."""
    loose_keys: dict[tuple[int, int], BlockKey] = field(default_factory=dict)
    """(KV cache group, block) -> the key of a loose block, as far as it was asked for."""
    staged: dict[BlockKey, str] = field(default_factory=dict)
    """The loose blocks that are read for the request's plan, each with the tier that has it."""
    branches: tuple[int, ...] = ()
    """Rows where another request may branch off this one: the end of the engine's own blocks, and that of the stored
    chain. The loose blocks that are lacking there are saved."""
    step_end: int = 0
    """Wanted end of a step, in tokens: the last look-up lacked the state there; 0 if it lacked none."""
    loaded_rows: int = 0
    """Rows up to the end of its last load: before the windows there, the side groups' blocks hold nothing."""
    record: RequestRecord = field(default_factory=RequestRecord)
    """Record of it for people."""
    hints: Hints | None = None
    """Hints of its client; None if it brought none."""
    stored_end: int = ALL_ROWS
    """First of its rows that are not stored, by its client's wish."""
    session: int = 0
    """Session of its client, as `Sessions` numbers them; 0 without one."""
    owner: int = 0
    """Tenant to whom its blocks belong in memory, as `Tenants` numbers them; 0 for others."""

    def note_hints(self, hints: Hints, block_size: int) -> None:
        """Note the hints of a new request."""
        self.hints = hints
        self.note_outcomes(hints)
        if hints.store is not Store.ALL:
            self.stored_end = self.record.prompt_tokens // block_size if hints.store is Store.PROMPT else 0

    def note_outcomes(self, hints: Hints) -> None:
        """Note the outcomes of its hints for people."""
        self.record.hints = hints.described()

    def note_sound(self, rows: int) -> None:
        """Note that its first `rows` rows have its tag."""
        self.sound = rows

    def note_offloaded(self, rows: int) -> None:
        """Note that its first `rows` rows need not be offered for saving again."""
        self.offloaded_blocks = rows

    def retag(self, tag: Tag) -> None:
        """Tag the blocks that it fills from now on; those it has filled have another tag."""
        self.tag = tag
        self.sound = 0

    def begin_lookup(self, lookup: TierLookup) -> None:
        """The tiers are asked for it, once."""
        self.tier_lookup = lookup

    def advance(self, computed: int, num_tokens: int, block_size: int, quiet_until: int) -> tuple[Tag, range]:
        """After this step the engine has the first `computed` of the request's tokens, and `sound` is known.

        Returns the tag of the blocks that the step fills, and the rows that are to be offered for saving, each once. If
        all full ones were, the request is quiet until it has so many tokens as `quiet_until`.
        """
        full = computed // block_size
        named = min(full, self.keys.count(num_tokens)) if self.keys is not None else 0
        tag = self._tag_of_filled(computed, block_size)
        rows = range(self.offloaded_blocks, named)
        if rows:
            self.offloaded_blocks = named
        self.computed = computed
        if computed > self.max_computed:
            self.max_computed = computed
            self.loads_without_progress = 0
        is_quiet = computed == self.max_computed and not self.loads_without_progress
        is_offered = self.keys is not None and self.offloaded_blocks >= full
        self.quiet_until = quiet_until if is_quiet and is_offered else 0
        return tag, rows

    def _tag_of_filled(self, computed: int, block_size: int) -> Tag:
        """The tag of the blocks that a step fills with the tokens up to `computed`.

        The rows that it fills are sound, if they have one. Blocks that are computed on top of a block of other weights
        or another adapter, or into one that they began, have none.
        """
        begun, in_block = divmod(self.computed, block_size)
        sound = self.sound >= begun and (not in_block or self.tail_tag == self.tag)
        if not in_block or computed // block_size > begun:
            self.tail_tag = self.tag
        if sound:
            if self.tag != NO_TAG:
                self.sound = max(self.sound, computed // block_size)
            return self.tag
        self.sound = min(self.sound, begun)
        return NO_TAG

    def commit(self, num_tokens: int, rows: BlockRange) -> None:
        """The engine takes `num_tokens` more from the cache, which reach into these rows."""
        self.waiting.note(WaitEvent.ANEW)
        self.tail_tag = self.tag
        self.quiet_until = 0
        self.computed += num_tokens
        self.loads_without_progress += 1
        end = rows.start + rows.count
        if rows.start <= self.sound < end:
            self.sound = end
        self.loaded_rows = end

    def drop_lookup(self) -> None:
        """Stop asking the tiers for the request."""
        if self.tier_lookup is not None:
            self.tier_lookup.give_up(late=False)
            self.tier_lookup = None

    def go_back(self, first: int, block_size: int) -> None:
        """The engine computes the request's blocks from `first` on again; until then they hold nothing to save."""
        self.quiet_until = 0
        self.sound = min(self.sound, first)
        self.offloaded_blocks = min(self.offloaded_blocks, first)
        self.loaded_rows = min(self.loaded_rows, first)
        self.computed = min(self.computed, first * block_size)


@dataclass(eq=False, slots=True)
class Requests:
    """All live requests, by id; their keys and tags are those of the current epoch of `epochs`."""

    namespace: bytes
    groups: GroupSet
    epochs: Epochs
    tags: BlockTags
    records: Records
    renamed: Callable[[str, RequestState, int], None]
    """Called as `renamed(request id, state, block)` when a request's blocks from `block` on get other keys."""
    block_size: int = field(init=False)
    _chain_digest: bytes = field(init=False)
    """Start of the keys of all chains, beside the namespace."""
    _tokens_ahead: int = field(init=False)
    live: dict[str, RequestState] = field(default_factory=dict, init=False)
    tenants: Tenants | None = None
    """Clients that have a share of memory; None: there are none."""

    def __post_init__(self) -> None:
        self.block_size = self.groups.block_size
        self._chain_digest = self.groups.chain_digest
        self._tokens_ahead = self.groups.tokens_ahead

    def of(self, request: EngineRequest) -> RequestState:
        """The request's state, a new one if there is none."""
        state = self.live.get(request.request_id)
        if state is None:
            record = self.records.begin(request.request_id, len(request.token_ids))
            state = self.live[request.request_id] = RequestState(record=record)
        identity = request.identity
        if identity is not state.identity or state.generation != self.epochs.generation:
            self._identify(request.request_id, state, identity)
        return state

    def probed(self, request: EngineRequest, computed_tokens: int) -> RequestState:
        """The state of a request for which the engine probes. It has `computed_tokens`; their blocks are unknown."""
        state = self.of(request)
        state.computed = computed_tokens
        state.sound = 0
        state.loaded_rows = 0
        state.quiet_until = 0
        if not state.max_computed:
            state.record.engine_tokens = computed_tokens
        return state

    def note_running(
        self, request_ids: Sequence[str], computed: Sequence[int], step_tokens: Mapping[str, int]
    ) -> tuple[list[str], int]:
        """Take note of the requests of which the step changes nothing but the number of their tokens.

        Returns the others, and how many tokens the step computes of those.
        """
        live = self.live
        generation = self.epochs.generation
        others = list[str]()
        tokens = 0
        for request_id, before in zip(request_ids, computed, strict=True):
            state = live.get(request_id)
            new = step_tokens[request_id]
            after = before + new
            if (
                state is not None
                and after < state.quiet_until
                and before == state.computed
                and state.generation == generation
            ):
                state.computed = state.max_computed = after
                tokens += new
            else:
                others.append(request_id)
        return others, tokens

    def _identify(self, request_id: str, state: RequestState, identity: RequestIdentity | None) -> None:
        """The request is new or has grown, or a new epoch began: its blocks have other keys from some block on."""
        epochs = self.epochs
        before = state.identity
        kept = 0
        is_new = state.keys is None
        same_epoch = state.generation == epochs.generation
        state.identity = identity
        state.generation = epochs.generation
        state.tag = self.tags.tag_of(epochs.generation, identity.adapter) if identity is not None else NO_TAG
        if self.tenants is not None and identity is not None:
            state.owner = self.tenants.owner_of(identity.salt)
        if identity is None:
            state.keys = None
        elif same_epoch and state.keys is not None and before is not None and before.same_root(identity):
            kept = state.keys.renew(identity)
        else:
            root = self.namespace, self.block_size, identity, epochs.current, self._chain_digest
            state.keys = BlockKeys(*root, ahead=self._tokens_ahead)
        state.offloaded_blocks = min(state.offloaded_blocks, kept)
        state.sound = min(state.sound, kept)
        state.loose_keys.clear()
        if state.waiting.reply in (Reply.LATER, Reply.NO_ROOM):
            state.waiting.note(WaitEvent.CHANGED)
        if not is_new:
            self.renamed(request_id, state, kept)

    def may_wait_anew(self, request_id: str) -> None:
        """It was the engine that kept the request waiting: it may wait for tiers once more (P11)."""
        state = self.live.get(request_id)
        if state is not None:
            state.waiting.note(WaitEvent.ANEW)

    def not_again(self, request_id: str, first: int) -> None:
        """A load failed from block `first` on, for whatever reason: do not promise that to the request again (H09).

        Nor in another epoch, where these blocks have other keys.
        """
        state = self.live.get(request_id)
        if state is not None:
            state.quiet_until = 0
            state.invalid_from = min(first, state.invalid_from if state.invalid_from is not None else first)
            state.offloaded_blocks = min(state.offloaded_blocks, first)
