"""The cache, scheduler side: the contract kept with a ledger, an index, an arena and the tiers below it.

Owns what is known of each live request and the copies that workers were told to make. Decides and accounts; bytes are
moved by workers (`transfer.py`) and by the tiers' own threads (`staging.py`), and no method here waits for either.
Floor 2.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvpact.arena import Arena
from kvpact.blocks import BlockKey, BlockKeys, BlockRange, RangeSet, RequestIdentity
from kvpact.config import KvpactConfig
from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    LoadJob,
    LoadSettlement,
    StepWork,
    WorkerReport,
    blocks_touched,
)
from kvpact.copies import Copies, Load, PactPlan, Slots
from kvpact.costs import Prefill
from kvpact.epochs import Epoch, Epochs
from kvpact.errors import PactViolation
from kvpact.idle_steps import IdleSteps
from kvpact.index import BlockIndex, Pin
from kvpact.lazy import LEAST_WINDOW
from kvpact.ledger import Ledger, State
from kvpact.metrics import EndReason, Metrics, MissReason, Snapshot, TierName
from kvpact.overdue import OverdueLoads
from kvpact.saves import Saves
from kvpact.staging import Inquest, Staging
from kvpact.step_match import StepLookup, StepMatches, StepRead
from kvpact.tags import NO_TAG, BlockTags, Tag, first_among
from kvpact.tiers.queue import TierQueue

logger = logging.getLogger(__name__)

NO_MATCH = ExternalKVMatch(0)

MOST_IDLE_LOADS = 3
"""After so many loads that all ended in a preemption and got it no farther, a request computes its prompt itself.

Two requests that load at once can hold so many of the engine's blocks that neither finds another one to run with; each
is preempted, loads again, and keeps the other from running, for ever (P11).
"""

MOST_UNWRITTEN = 64
"""So many saved chains may wait until a step has time to offer them to the tiers (P12)."""


BACKLOG_SLOTS = 64
"""Slots in which one step looks for blocks that tiers which were opened late lack (P11)."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What "ask again later" was answered to."""

    computed_tokens: int
    news: int
    """As `Staging.news` counts."""
    plan: PactPlan | None

    def still(self, computed_tokens: int, news: int, plan: PactPlan | None) -> bool:
        """Whether nothing has changed."""
        return self.news == news and self.computed_tokens == computed_tokens and self.plan is plan


@dataclass(slots=True)
class RequestRecord:
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
    offered: int = 0
    """Blocks that need not be offered for saving again."""
    failed_from: int | None = None
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
    inquest: Inquest | None = None
    """What the shared tiers were asked for this request, once."""
    computed: int = 0
    """Tokens that the engine has, or is loading: what it computes beyond them is its own work."""
    farthest: int = 0
    """Tokens that the engine had when it was farthest with the request."""
    idle_loads: int = 0
    """Loads since then: it was preempted before it got any farther."""

    def go_back(self, first: int, block_size: int) -> None:
        """The engine computes the request's blocks from `first` on anew; until then they hold nothing to be saved."""
        self.sound, self.offered = min(self.sound, first), min(self.offered, first)
        self.computed = min(self.computed, first * block_size)


class _Once:
    """Asks the engine for a request's blocks when they are needed, and once in a step."""

    __slots__ = ("_answer", "_ask")

    def __init__(self, ask: Callable[[], Sequence[int]]) -> None:
        self._ask = ask
        self._answer: Sequence[int] | None = None

    def __call__(self) -> Sequence[int]:
        if self._answer is None:
            self._answer = self._ask()
        return self._answer


class PactCache(ExternalCache):
    """One engine's cache. `namespace` is 32 bytes, `block_size` in tokens, `clock` gives seconds that never go back."""

    def __init__(
        self,
        config: KvpactConfig,
        *,
        namespace: bytes,
        block_size: int,
        arena: Arena,
        tiers: Sequence[TierQueue] = (),
        clock: Callable[[], float],
        metrics: Metrics | None = None,
        lazy_window: int = LEAST_WINDOW,
    ) -> None:
        """With `"save": "lazy"`, `lazy_window` blocks next to be evicted are always looked after."""
        self.metrics = metrics or Metrics()
        self.index = BlockIndex(arena.num_slots)
        self.ledger: Ledger[Pin, Slots] = Ledger(self.index.unpin, plan_lifetime_seconds=config.plan_lifetime)
        self.staging = Staging(
            self.index,
            arena,
            tiers,
            self.metrics,
            clock=clock,
            patience=config.prepare_deadline or config.load_deadline,
            second_use=config.admit == "second-use",
            share_drawn_epochs=config.share_drawn_epochs,
        )
        self._epochs = Epochs(config.weights_version)
        self._tags = BlockTags()
        self._stale_loads: list[LoadJob] = []
        self._backlog = range(0)
        """Slots of which is still to be told whether tiers that came late lack what lies there."""
        self._prefill = Prefill(2 * block_size)
        self._computing = 0
        self._loading = 0
        """Blocks that matches were committed into in this step."""
        self._config = config
        self._namespace = namespace
        self._block_size = block_size
        self._arena = arena
        self._clock = clock
        self._lazy_window = lazy_window
        self._requests: dict[str, RequestRecord] = {}
        self._copies = Copies(len(arena.segments), config.load_deadline / 3)  # time to ask twice before the deadline
        self.saves = Saves(self.index, self._copies, self.metrics)
        self._overdue = OverdueLoads(self._copies, self.metrics)
        self._steps = StepMatches(
            self.ledger, self.staging, self.metrics, block_size=block_size, ranks=len(arena.segments)
        )
        self._step_hits: Counter[str] = Counter()
        self._idle_steps = IdleSteps(clock)
        self.is_late: Callable[[], bool] = lambda: False
        """Whether the running step has cost enough, so that what can wait is left to the next one."""
        self._writes_first = False
        """Of what can wait, a late step does one thing: it takes in what tiers have done, or offers them a chain."""
        self._unwritten: deque[Sequence[BlockKey]] = deque()
        """Chains of this epoch that were saved and not offered to the tiers yet."""

    def open_tiers(self, tiers: Sequence[TierQueue]) -> None:
        """The tiers, if they were not there from the beginning. What memory holds is written to them bit by bit."""
        self.staging.open(tiers)
        if self._epochs.generation == 1:  # later, memory has blocks of other epochs as well, and does not say which
            self._backlog = range(self.index.num_slots)

    # Prepare

    @property
    def asks_shared(self) -> bool:
        """Whether `prepare_external_match` asks tiers that only they themselves can answer for."""
        return self._config.match_at == "schedule" and self._config.prepare_deadline > 0 and self._may_be_shared

    @property
    def _looks_up_at_step(self) -> bool:
        return self._config.match_at == "step" and self._may_be_shared

    @property
    def _may_be_shared(self) -> bool:
        """Whether shared tiers may hold blocks of this epoch."""
        return self.staging.has_shared and self.staging.shares(self._epochs.current)

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """Blocks are held through `context` while ranks copy them; its free queue says when to save lazily."""
        self._overdue.bind(context)
        self.saves.bind(context, lazy_window=self._lazy_window if self._config.save == "lazy" else None)

    def on_new_request(self, request: EngineRequest) -> None:
        """See `ExternalCache`: the shared tiers are asked before the engine has room for the request.

        A step that has cost enough leaves that to the first probe; what the request is, is asked now in any case.
        """
        record = self._record(request)
        if record.keys is not None and request.may_load and self.asks_shared and not self.is_late():
            self._ask(record, self._usable_keys(request, record))

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`. Touches memory only; what a lower tier holds is fetched behind "ask again later"."""
        record = self._record(request)
        if self.still_waits(request.request_id, num_computed_tokens):
            return None
        record.was_put_off, record.put_off = record.put_off, False
        match = self._prepare(request, record, num_computed_tokens)
        record.waits_at = None
        if match is None and not record.put_off:
            record.waits_at = Waiting(num_computed_tokens, self.staging.news, self.ledger.find(request.request_id))
        return match

    def decline_external_match(self, request: EngineRequest, num_computed_tokens: int) -> None:
        """Instead of `prepare_external_match`, where the engine has no time for it: the request is a miss."""
        record = self._record(request)
        self._begin_probe(request.request_id, record, num_computed_tokens)
        record.waits_at, record.put_off = None, False
        start = num_computed_tokens // self._block_size
        if self._engine_has_all(request, start):
            self._spare(request.request_id, record, start)
        else:
            self._miss(request.request_id, record, start, MissReason.DEADLINE)

    def still_waits(self, request_id: str, num_computed_tokens: int) -> bool:
        """Whether a request was told "ask again later" and nothing has changed; its plan is renewed then.

        Engines ask for each waiting request in each step: this costs next to nothing.
        """
        record = self._requests.get(request_id)
        if record is None or record.waits_at is None or self.staging.has_news:
            return False
        plan, now = self.ledger.find(request_id), self._clock()
        if not record.waits_at.still(num_computed_tokens, self.staging.news, plan):
            return False
        if record.waits_until is None or now >= record.waits_until:
            return False
        if plan is not None:
            self.ledger.renew(plan, now)
        return True

    def _prepare(
        self, request: EngineRequest, record: RequestRecord, num_computed_tokens: int
    ) -> ExternalKVMatch | None:
        self._begin_probe(request.request_id, record, num_computed_tokens)
        start = num_computed_tokens // self._block_size
        if self._engine_has_all(request, start):
            return self._spare(request.request_id, record, start)
        if record.keys is None:
            return self._miss(request.request_id, record, start, MissReason.UNKNOWN_IDENTITY)
        if not request.may_load or num_computed_tokens % self._block_size:
            return self._miss(request.request_id, record, start, MissReason.DISABLED)
        if record.idle_loads >= MOST_IDLE_LOADS:
            return self._miss(request.request_id, record, start, MissReason.CROWDED)
        if self._overdue.is_stuck:
            return self._miss(request.request_id, record, start, MissReason.OVERDUE)
        keys = self._usable_keys(request, record)
        plan = self.ledger.find(request.request_id)
        if plan is not None and plan.state is State.LOADING:
            return NO_MATCH  # preempted before the workers reported; its blocks may still be written
        now = self._clock()
        if plan is not None and plan.blocks.start == start and plan.blocks.end <= len(keys):
            if plan.state is State.PLANNED:
                self.ledger.renew(plan, now)
                return self._match(plan)
            return self._wait(plan, record, keys, now)
        return self._plan(request.request_id, record, keys, start, now)

    def _begin_probe(self, request_id: str, record: RequestRecord, num_computed_tokens: int) -> None:
        record.computed = num_computed_tokens
        record.sound = 0
        if self.saves.lazy is not None and record.offered:  # it was preempted: it gets other blocks
            record.offered = 0
            self.saves.lazy.rewind(request_id)

    def _usable_keys(self, request: EngineRequest, record: RequestRecord) -> Sequence[BlockKey]:
        """The keys of the blocks that may be promised: not the last token's (P6), and none that failed before (H09)."""
        if record.keys is None:
            return ()
        end = self._loadable_blocks(request)
        if record.failed_from is not None:
            end = min(end, record.failed_from)
        return record.keys.extend(request.token_ids)[:end]

    def _loadable_blocks(self, request: EngineRequest) -> int:
        return (len(request.token_ids) - 1) // self._block_size

    def _engine_has_all(self, request: EngineRequest, start: int) -> bool:
        """Whether the request has whole blocks that could be loaded, and the engine has computed all of them itself."""
        return 0 < self._loadable_blocks(request) <= start

    def _plan(
        self, request_id: str, record: RequestRecord, keys: Sequence[BlockKey], start: int, now: float
    ) -> ExternalKVMatch | None:
        if len(keys) - start < self._config.min_match_blocks:
            return self._miss(request_id, record, start, self._why_so_few(record, len(keys)))
        held = self.index.held_prefix(keys)
        reason = MissReason.ASKED_AT_STEP if self._looks_up_at_step else MissReason.NOT_STORED
        if self._config.prepare_deadline > 0 and (record.waits_until is None or now < record.waits_until):
            is_new = record.last_lookup < 0
            if self._is_asking(record, keys) or (is_new and record.inquest is not None and self._puts_off(record)):
                self._end_plan(request_id, EndReason.SUPERSEDED)
                record.waits_until = record.waits_until or now + self._config.prepare_deadline
                return None
            held = self.index.held_prefix(keys)
            stored = self.staging.find(keys, record.inquest)
            first = max(held, start)
            if stored > held and stored - start >= self._config.min_match_blocks:
                if self._computes_faster(record, keys, first, stored):
                    if record.last_lookup != start:
                        self.metrics.add("declined_blocks", stored - first)
                    reason = MissReason.RECOMPUTE_FASTER
                else:
                    reach = self.staging.fetch(keys, stored, record.inquest)
                    if reach > start and reach > held and self.staging.is_arriving(keys[held]):
                        blocks = BlockRange(start, reach - start)
                        self._open(request_id, record, blocks, keys, now, promised=False)
                        return None
                    reason = MissReason.NO_ROOM
        elif record.inquest is not None:
            if not record.inquest.answered:
                reason = MissReason.DEADLINE
            self.staging.give_up(record.inquest, late=True)
        if held - start < self._config.min_match_blocks:
            return self._miss(request_id, record, start, reason)
        return self._match(self._open(request_id, record, BlockRange(start, held - start), keys, now, promised=True))

    @staticmethod
    def _why_so_few(record: RequestRecord, keys: int) -> MissReason:
        """Why no more than so many blocks of a request may be promised."""
        if record.failed_from == keys:
            return MissReason.FAILED_BEFORE
        ended = record.keys is not None and record.keys.ended
        return MissReason.UNKNOWN_IDENTITY if ended else MissReason.TOO_SHORT

    def _is_asking(self, record: RequestRecord, keys: Sequence[BlockKey]) -> bool:
        """Whether an answer of the shared tiers is still to come; the first time, they are asked."""
        if self.asks_shared:
            self._ask(record, keys)
        if record.inquest is None or record.inquest.answered:
            return False
        self.staging.poll()
        return not record.inquest.answered

    def _puts_off(self, record: RequestRecord) -> bool:
        """Whether what tiers have told for this request is used in the next step, because this one has cost enough."""
        record.put_off = not record.was_put_off and self.is_late()
        return record.put_off

    def _ask(self, record: RequestRecord, keys: Sequence[BlockKey]) -> None:
        """Ask the shared tiers, once for each request, if they might hold what is worth the question."""
        if record.inquest is not None or self._config.prepare_deadline <= 0:
            return
        missing = len(keys) - max(self.index.held_prefix(keys), self.staging.find(keys))
        tokens, seconds = missing * self._block_size, self.staging.lookup_seconds
        if missing and not (self._config.recompute_if_faster and self._prefill.is_faster(tokens, seconds or None)):
            record.inquest = self.staging.ask(keys)

    def _computes_faster(self, record: RequestRecord, keys: Sequence[BlockKey], start: int, end: int) -> bool:
        """Whether the engine should have computed blocks [start, end) before the tiers could deliver them."""
        if not self._config.recompute_if_faster:
            return False
        seconds = self.staging.seconds_to_load(keys, start, end, record.inquest)
        return self._prefill.is_faster((end - start) * self._block_size, seconds)

    def _open(
        self,
        request_id: str,
        record: RequestRecord,
        blocks: BlockRange,
        keys: Sequence[BlockKey],
        now: float,
        *,
        promised: bool,
    ) -> PactPlan:
        self._count_lookup(record, blocks.start, True if promised else None)
        if not promised and record.waits_until is None:
            record.waits_until = now + self._config.prepare_deadline
        self.index.touch(keys[blocks.end - 1])
        return self.ledger.open_plan(
            request_id,
            blocks,
            block_size=self._block_size,
            intent=self._slots(keys, blocks) if promised else (),
            now=now,
            leases=[self.index.pin(keys[blocks.end - 1])],
            promised_tokens=blocks.count * self._block_size if promised else 0,
            asynchronous=self._is_asynchronous(blocks.count),
            deadline=inf if promised or record.waits_until is None else record.waits_until,
        )

    def _wait(
        self, plan: PactPlan, record: RequestRecord, keys: Sequence[BlockKey], now: float
    ) -> ExternalKVMatch | None:
        news = self.staging.news
        self.staging.poll()
        late = now >= plan.deadline
        if self.staging.news > news and not late and self._puts_off(record):
            self.ledger.renew(plan, now)
            return None
        held = self.index.held_prefix(keys[: plan.blocks.end])
        if held < plan.blocks.end and not late and self.staging.is_arriving(keys[held]):
            self.ledger.renew(plan, now)
            return None
        may_go_on = not late and (held == plan.blocks.end or self.staging.has_others)
        if may_go_on and self.staging.find(keys, record.inquest) > held:
            # there may be room for more now, or another tier has what the first one did not deliver
            return self._plan(plan.request_id, record, keys, plan.blocks.start, now)
        blocks = BlockRange(plan.blocks.start, max(0, held - plan.blocks.start))
        if held < plan.blocks.end:
            record.waits_until = now  # the tiers had their chance; a blocked request does not ask them every step (H02)
        if blocks.count < self._config.min_match_blocks:
            self.ledger.abort(plan, EndReason.DEADLINE if late else EndReason.TIER_FAILED)
            reason = MissReason.DEADLINE if late else MissReason.NOT_STORED
            self._count_lookup(record, plan.blocks.start, False, reason)
            return NO_MATCH
        self.ledger.ready(
            plan,
            promised_tokens=blocks.count * self._block_size,
            leases=[self.index.pin(keys[blocks.end - 1])],
            now=now,
            blocks=blocks,
            asynchronous=self._is_asynchronous(blocks.count),
        )
        plan.intent = self._slots(keys, blocks)
        self._count_lookup(record, blocks.start, True)
        return self._match(plan)

    def _slots(self, keys: Sequence[BlockKey], blocks: BlockRange) -> Slots:
        return tuple(self.index.slots_of(keys[blocks.start : blocks.end]))

    def _match(self, plan: PactPlan) -> ExternalKVMatch:
        return ExternalKVMatch(plan.promised_tokens, plan.asynchronous, plan)

    def _spare(self, request_id: str, record: RequestRecord, start: int) -> ExternalKVMatch:
        """The engine has all that could be loaded: neither a look-up nor a miss."""
        self._end_plan(request_id, EndReason.SUPERSEDED)
        if record.spared_at != start:
            self.metrics.add("spared_lookups")
        record.spared_at = start
        return NO_MATCH

    def _miss(self, request_id: str, record: RequestRecord, start: int, reason: MissReason) -> ExternalKVMatch:
        self._end_plan(request_id, EndReason.SUPERSEDED)
        self._count_lookup(record, start, False, reason)
        return NO_MATCH

    def _count_lookup(
        self, record: RequestRecord, start: int, found: bool | None, reason: MissReason = MissReason.NOT_STORED
    ) -> None:
        """Count what a look-up from block `start` on found, once: the same again is no other look-up (H02).

        One that ended differently before is: a blocked request may miss first, and find what others saved meanwhile.
        """
        if record.last_lookup != start or (found is not None and record.found is not None and found != record.found):
            self.metrics.add("lookups")
            record.found = None
        record.last_lookup = start
        if found is not None and record.found is None:
            record.found = found
            if not found:
                self.metrics.add("misses", label=reason)

    def _end_plan(self, request_id: str, reason: EndReason) -> None:
        """The request's plan ends, if it has one that is not being loaded."""
        plan = self.ledger.find(request_id)
        if plan is not None and plan.state is not State.LOADING:
            self.ledger.abort(plan, reason)

    def _is_asynchronous(self, blocks: int) -> bool:
        return blocks * self._arena.slot_bytes > self._config.sync_load_limit

    # Commit and abort

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`; always accepts `num_tokens`."""
        plan = self.ledger.find(request.request_id)
        if plan is None or plan is not match.query_result:
            raise PactViolation(f"request {request.request_id} commits a match that is not its open plan")
        now = self._clock()
        if num_tokens == 0:
            self.ledger.abort(plan, EndReason.DECLINED)
            return 0
        blocks = BlockRange(plan.blocks.start, blocks_touched(num_tokens, self._block_size))
        if num_tokens > plan.promised_tokens or blocks.end > len(block_ids):
            raise PactViolation(
                f"request {request.request_id} commits {num_tokens} tokens into {len(block_ids)} blocks; "
                f"{plan.promised_tokens} were promised, from block {plan.blocks.start} on"
            )
        record = self._requests[request.request_id]
        keys = record.keys.keys if record.keys is not None else []
        record.waits_until = None
        record.computed += num_tokens
        self._loading += blocks.count
        record.idle_loads += 1
        self._write_used(keys[: blocks.end])
        self._tags.fill(block_ids[blocks.start : blocks.end], record.tag)
        record.tail_tag = record.tag
        keep = self._leases_on(plan, blocks, keys)
        self.ledger.commit(plan, num_tokens, now=now, keep=keep, deadline=now + self._config.load_deadline)
        self._overdue.begin(self._copies.order_load(plan, blocks, keys, block_ids, now))
        return num_tokens

    def _leases_on(self, plan: PactPlan, blocks: BlockRange, keys: Sequence[BlockKey]) -> list[Pin]:
        """What must be held to load `blocks` of a plan: less than the plan holds, if the engine takes less.

        If a failed load has dropped the entry meanwhile, only the plan's own pin keeps its slots, all or none of them.
        """
        last = keys[blocks.end - 1]
        dropped = last not in self.index or self.index.slot(last) != plan.intent[blocks.count - 1]
        return [*plan.leases] if blocks == plan.blocks or dropped else [self.index.pin(last)]

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`. `reason` is one of `EndReason`, anything else counts as an error."""
        plan = self.ledger.find(request_id)
        if plan is None or plan.state is State.LOADING or (match is not None and match.query_result is not plan):
            return
        known = reason in EndReason.__members__.values()
        self.ledger.abort(plan, EndReason(reason) if known else EndReason.ERROR)

    # Saves

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`: orders copies of full blocks that are not stored yet, as far as there is room."""
        self._note_resumed(request.request_id)
        record, lazy = self._record(request), self.saves.lazy
        before, record.computed = record.computed, num_computed_tokens
        held = _Once(block_ids)
        self._tag_filled(record, before, num_computed_tokens, held)
        self._computing += max(0, num_computed_tokens - before)
        if num_computed_tokens > record.farthest:
            record.farthest, record.idle_loads = num_computed_tokens, 0
        full = min(num_computed_tokens, len(request.token_ids)) // self._block_size
        if record.keys is None:
            if lazy is not None and full > before // self._block_size:
                lazy.disown(held())
            return
        if full <= record.offered or self._config.save == "off":
            return
        first, record.offered = record.offered, full
        keys = record.keys.extend(request.token_ids)
        named = min(full, len(keys))
        known = self.index.known_prefix(keys[:named])
        if known and (known == named or lazy is not None):
            self.index.touch(keys[known - 1])
            self._write_used(keys[:named])
        if lazy is None and known == named:
            return
        sound = record.sound = self._tags.same_prefix(held()[:named], min(record.sound, named), record.tag)
        if lazy is not None:
            lazy.disown(held()[max(first, sound) : full])
            lazy.note(request.request_id, keys, first, max(first, sound), held())
        elif known < sound:
            self.saves.order(request.request_id, keys[:sound], known, held, self._clock())

    def _tag_filled(
        self, record: RequestRecord, before: int, computed: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """The step computes the request's tokens [before, computed): the blocks that it fills get the request's tag.

        A block that other weights, or another adapter, began gets none.
        """
        if self._config.save == "off":
            return
        first, full = before // self._block_size, computed // self._block_size
        if full > first:
            filled = block_ids()[first:full]
            self._tags.fill(filled, record.tag)
            if before % self._block_size and record.tail_tag != record.tag:
                self._tags.fill(filled[:1], NO_TAG)
                record.sound = min(record.sound, first)
        if full > first or not before % self._block_size:
            record.tail_tag = record.tag

    def _write_used(self, keys: Sequence[BlockKey]) -> None:
        """Blocks of the arena are used: tiers that get what is used twice, or may have lost them, are offered them."""
        if self._config.admit == "second-use":
            self._offer(keys)
        elif (held := self.index.held_prefix(keys)) and self.staging.lacks(keys[:held], self._epochs.current):
            self._unwritten.append(keys[:held])  # which waits for a step that has time

    def look_up_at_step(self, request: EngineRequest, computed_tokens: int, most_tokens: int) -> None:
        """Have the workers look in the shared tiers, when the running step begins, for what it computes and saves.

        To be called behind `note_computed`. Of the request the engine has `computed_tokens`; at most the `most_tokens`
        behind them can be skipped. Blocks that another request is saving already are not looked for.
        """
        save = self._copies.save_ordered_now(request.request_id)
        start = computed_tokens // self._block_size
        if not self._looks_up_at_step or not request.may_load or save is None or save.job.start_block != start:
            return
        keys = self._usable_keys(request, self._record(request))[: save.job.blocks.end]
        keys = keys[: self.staging.readable_elsewhere(keys)]
        if len(keys) - start >= self._config.min_match_blocks:
            self._steps.order(save.job, computed_tokens, most_tokens, keys)

    def take_step_hits(self) -> Mapping[str, int]:
        """By request, the tokens that workers supplied at a step's beginning, by the reports since the last call."""
        hits, self._step_hits = self._step_hits, Counter()
        return hits

    def take_step_lookups(self) -> tuple[StepLookup, ...]:
        """What the workers are to look for with the step that ends; to be sent beside its `StepWork`."""
        return self._steps.end_step()

    def _note_resumed(self, request_id: str) -> None:
        """The engine computes the request: what an asynchronous load brought, up to its first hole, is used now."""
        plan = self.ledger.find_settled(request_id)
        if plan is not None:
            arrived = RangeSet.of(plan.committed_blocks).difference(plan.failed)
            blocks = arrived.prefix_from(plan.blocks.start)
            self.ledger.use(plan, min(blocks * self._block_size, plan.loaded_tokens))

    # Step and reports

    def end_step(self) -> StepWork:
        """See `ExternalCache`: takes in what the tiers did, lets plans expire, and hands out the step's copies."""
        now = self._clock()
        self._writes_first = not self._writes_first
        if not (self._writes_first and self.is_late()):
            self.staging.poll()
        if self._writes_first or not self.is_late():
            self._write_behind()
        if self._backlog:
            self._write_backlog()
        self.staging.end_step()
        self._prefill.note_step(max(0, self._computing), now)
        taken = self._loading + blocks_touched(max(0, self._computing), self._block_size)
        self.saves.order_what_is_leaving(taken, now)
        self._computing = self._loading = 0
        self.ledger.expire(now)
        self._overdue.end_step(now)
        return self._copies.end_step(now)

    def _write_behind(self) -> None:
        """Offer saved chains to the tiers, the oldest first; a block that memory has dropped since is not.

        One is offered in any case, and all but `MOST_UNWRITTEN`; the others while the step is not late.
        """
        while self._unwritten:
            self._offer(self._unwritten.popleft())
            if len(self._unwritten) <= MOST_UNWRITTEN and self.is_late():
                break

    def _offer(self, keys: Sequence[BlockKey]) -> None:
        """Have the tiers store what they lack of a chain of this epoch, as far as memory holds it."""
        self.staging.write_behind(keys, self.index.held_prefix(keys), self._epochs.current)

    def _write_backlog(self) -> None:
        """Offer some more of what memory held when tiers were opened late, while they have room for it."""
        for slot in self._backlog[:BACKLOG_SLOTS]:
            if self.is_late() or not self.staging.has_room:
                break
            self._backlog = self._backlog[1:]
            key = self.index.key_at(slot)
            if key is not None and self.index.is_last(key):
                self._offer(self.index.chain(key))

    def abandon_step(self) -> None:
        """What was to be ordered with the running step never reaches the workers: it ends as if all had failed it."""
        self._steps.abandon_step()
        self.apply_report(self._copies.abandon_step())

    def note_step_reads(self, reads: Sequence[StepRead]) -> None:
        """What one rank has read from shared tiers by itself; to be told before the report that names the loads."""
        self._steps.note_reads(reads)

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`."""
        skipped = self._steps.apply_report(report, self._clock(), self._requests.__contains__)
        self._computing -= sum(skipped.values())
        self._step_hits.update(skipped)
        # Loads first: what a request saved from a failed load on is not to be trusted.
        settlements = [settled for load in self._copies.take_loads(report) if (settled := self._settle_load(load))]
        self._overdue.give_up(self._clock())
        settlements += [self._settle_late(load) for load in self._overdue.take_late()]
        for save in self._copies.take_saves():
            self._unwritten.append(save.keys[: self.saves.settle(save)])
        if not self.is_late():
            self._write_behind()
        self._steps.end_saves(self._copies.saves.__contains__)
        return settlements

    def _settle_late(self, load: Load) -> LoadSettlement:
        """The engine goes on without a load that ranks may still carry out; nothing of what is stored is at fault."""
        job = load.job
        self._overdue.failed()
        self._not_again(job.request_id, job.start_block)
        if job.synchronous:
            self._copies.distrust(job.request_id, load.keys[job.start_block], job.start_block)
        else:
            self._tags.fill(job.block_ids, NO_TAG)
        return LoadSettlement(job.request_id, RangeSet(), RangeSet.of(job.blocks), not job.synchronous, late=True)

    def _settle_load(self, load: Load) -> LoadSettlement | None:
        """No rank can write the load's blocks any more; None if the engine was told before."""
        self._overdue.end(load)
        if load.told:
            self.ledger.settle(load.plan, loaded=RangeSet(), failed=RangeSet.of(load.job.blocks), used_tokens=0)
            self._drop_if_gone(load.job.request_id)
            return None
        outcome = load.tally.loaded()
        plan, failed = load.plan, outcome.failed.hull()
        used, late = None, False
        if load.job.synchronous:
            used = min(outcome.done.prefix_from(plan.blocks.start) * self._block_size, plan.committed_tokens)
        self.ledger.settle(plan, loaded=outcome.done, failed=outcome.failed, used_tokens=used)
        if failed is not None:
            self._not_again(load.job.request_id, failed.start)
            record = self._requests.get(load.job.request_id)
            if record is not None:
                record.go_back(failed.start, self._block_size)
            self._tags.fill(load.job.block_ids[failed.start - load.job.start_block :], NO_TAG)
        if load.recalled:  # whether it failed or not says nothing of what is stored
            if outcome.done.ranges and not load.job.synchronous:
                self._stale_loads.append(load.job)
        elif failed is not None and (late := load.given_up and not outcome.done.ranges):
            self._overdue.failed()
        elif failed is not None:
            self._forget(load, failed.start)
        self._drop_if_gone(load.job.request_id)
        return LoadSettlement(load.job.request_id, outcome.done, outcome.failed, not load.job.synchronous, late)

    def _forget(self, load: Load, first: int) -> None:
        """A load failed from block `first` on: the entry and all behind it go everywhere."""
        logger.warning("kvpact: blocks from %d on of request %s failed to load; dropped", first, load.job.request_id)
        self._drop_stored(load.keys[first:])
        self._copies.distrust(load.job.request_id, load.keys[first], first)

    def _not_again(self, request_id: str, first: int) -> None:
        """A load failed the request from block `first` on, whatever the reason: it is not promised that again (H09).

        Nor in another epoch, where these blocks have other keys.
        """
        record = self._requests.get(request_id)
        if record is not None:
            record.failed_from = min(first, record.failed_from if record.failed_from is not None else first)
            record.offered = min(record.offered, first)

    def _drop_stored(self, keys: Sequence[BlockKey]) -> None:
        """Blocks go everywhere, with all behind them."""
        self.index.drop(keys[0])
        self.staging.delete(keys)
        if self.saves.lazy is not None:
            self.saves.lazy.forget(keys)

    # Requests

    def _record(self, request: EngineRequest) -> RequestRecord:
        record = self._requests.get(request.request_id)
        if record is None:
            record = self._requests[request.request_id] = RequestRecord()
        identity = request.identity
        if identity is not record.identity or record.generation != self._epochs.generation:
            self._identify(request.request_id, record, identity)
        return record

    def _identify(self, request_id: str, record: RequestRecord, identity: RequestIdentity | None) -> None:
        """The request is new, or has grown, or the epoch is another one: its blocks have other keys from some on."""
        epoch, before, kept = self._epochs, record.identity, 0
        same_epoch = record.generation == epoch.generation
        record.identity, record.generation = identity, epoch.generation
        record.tag = self._tags.tag_of(epoch.generation, identity.adapter) if identity is not None else NO_TAG
        if identity is None:
            record.keys = None
        elif same_epoch and record.keys is not None and before is not None and before.same_root(identity):
            kept = record.keys.renew(identity)
        else:
            record.keys = BlockKeys(self._namespace, self._block_size, identity, epoch.current)
        plan = self.ledger.find(request_id)
        if plan is not None and plan.state is not State.LOADING and plan.blocks.end > kept:
            self.ledger.abort(plan, EndReason.SUPERSEDED)
        record.offered, record.sound = min(record.offered, kept), min(record.sound, kept)
        record.waits_at = None
        if record.inquest is not None:
            self.staging.give_up(record.inquest, late=False)
            record.inquest = None

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`. Copies under way keep what they need until all ranks have reported."""
        self.ledger.finish_request(request_id)
        if self.saves.lazy is not None:
            self.saves.lazy.request_finished(request_id)
        record = self._requests.pop(request_id, None)
        if record is not None and record.inquest is not None:
            self.staging.give_up(record.inquest, late=False)

    def _drop_if_gone(self, request_id: str) -> None:
        if request_id not in self._requests:
            self.ledger.finish_request(request_id)

    # Whole cache

    @property
    def has_pending_work(self) -> bool:
        """Whether copies or writes are under way: the engine must step to take in the reports.

        Not for ever: a tier may hang, and a hook or a worker may fail in every step. What is left then is taken in with
        the next request's steps.
        """
        stirred = self.saves.lazy is not None and self.saves.lazy.stirred
        unwritten = len(self._unwritten) + len(self._backlog)
        under_way = len(self._copies) + unwritten + self.staging.pending + stirred
        return self._idle_steps.wait_for(under_way, self._copies.ordered)

    @property
    def epoch(self) -> Epoch:
        """Of which weights the blocks are that are stored and served now."""
        return self._epochs.current

    def reset(self) -> None:
        """See `ExternalCache`.

        Blocks of other epochs stay where they lie until their room is needed: nobody can ask for them, so they are the
        least recently used ones from now on.
        """
        self._epochs.reset()
        self.metrics.add("resets")
        self._begin_epoch()

    def set_weights_version(self, version: str) -> None:
        """See `ExternalCache`."""
        self._epochs.name(version)
        self._begin_epoch()

    def take_back_reset(self) -> bool:
        """The weights are those from before the last reset after all: back to their epoch; whether that was possible.

        Not once a word was said. What was computed or stored since the reset is not used any more.
        """
        taken_back = self._epochs.take_back_reset()
        if taken_back:
            self._begin_epoch()
        return taken_back

    def _begin_epoch(self) -> None:
        """The weights may be others than those before: whatever is under way belongs to the old ones."""
        for plan in self.ledger.open_plans():
            if plan.state is not State.LOADING:
                self.ledger.abort(plan, EndReason.CACHE_RESET)
        self._copies.recall()
        if self.saves.lazy is not None:
            self.saves.lazy.clear()
        self._unwritten.clear()
        self._backlog = range(0)

    @property
    def has_overdue_loads(self) -> bool:
        """Whether a load's deadline has passed and ranks may still write to its blocks."""
        return self._overdue.is_stuck

    def loads_under_way(self, job_ids: Iterable[int]) -> list[LoadJob]:
        """Those of these jobs that are not settled, and for which the engine waits."""
        loads = (self._copies.loads.get(job_id) for job_id in job_ids)
        return [load.job for load in loads if load is not None and not load.job.synchronous and not load.told]

    def take_stale_loads(self) -> list[LoadJob]:
        """Loads that arrived although they had been recalled: what they brought must be computed again."""
        stale, self._stale_loads = self._stale_loads, []
        return stale

    def distrust_blocks(self, block_ids: Collection[int], tables: Mapping[str, Sequence[int]]) -> None:
        """These blocks of the engine hold garbage: nothing of them, or computed behind them, is stored (H48).

        `tables` has the blocks of each request that may have some of them. What is stored of these requests already,
        from the first of these blocks on, is dropped everywhere.
        """
        self._tags.fill(block_ids, NO_TAG)
        saves = (save.job for save in self._copies.saves.values())
        saving = first_among(block_ids, ((job.request_id, job.start_block, job.block_ids) for job in saves))
        computed = first_among(block_ids, ((request_id, 0, table) for request_id, table in tables.items()))
        for request_id, first in computed.items():
            self._tags.fill(tables[request_id][first:], NO_TAG)
        for request_id in saving.keys() | computed.keys():
            self._distrust_from(request_id, min(each[request_id] for each in (saving, computed) if request_id in each))

    def _distrust_from(self, request_id: str, first: int) -> None:
        """Nobody knows what a request's blocks from `first` on hold. It may have ended."""
        for save in self._copies.saves.values():
            if save.job.request_id == request_id:
                save.garbage_from = min(save.garbage_from, first)
                if len(save.keys) > first:
                    self._drop_stored(save.keys[first:])
        record = self._requests.get(request_id)
        if record is not None and record.keys is not None:
            record.go_back(first, self._block_size)
            if len(record.keys.keys) > first:
                self._drop_stored(record.keys.keys[first:])

    def distrust_adapter(self, adapter: str) -> None:
        """What the engine computed under `adapter`, as identities name it, may be another's.

        None of it that is not saved yet is saved. What was reported as saved before is the adapter's.
        """
        tag = self._tags.withdraw(adapter)
        for save in self._copies.saves.values():
            save.trusted &= tag != NO_TAG and not self._tags.same_prefix(save.job.block_ids, 0, tag)
        if self.saves.lazy is not None:
            if tag == NO_TAG:
                self.saves.lazy.clear()
            else:
                self.saves.lazy.disown(self._tags.blocks_with(tag))
        for record in self._requests.values():
            if record.identity is not None and record.identity.adapter == adapter:
                record.tag, record.sound = self._tags.tag_of(self._epochs.generation, adapter), 0

    def observe(self) -> Snapshot:
        """All counts as they are now, the ledger's and the tiers' included."""
        for name, total, label in self.ledger.totals.counts():
            self.metrics.raise_to(name, total, label)
        self.metrics.set("unnamed_weights", int(self.epoch.is_drawn))
        self.metrics.set("open_plans", len(self.ledger.open_plans()))
        self.metrics.set("leases_held", self.ledger.leases_held)
        self.metrics.set("prefill_speed", self._prefill.tokens_per_second)
        self.metrics.set("held_blocks", self.index.held_count, TierName.MEMORY)
        self.metrics.set("capacity_blocks", self.index.num_slots, TierName.MEMORY)
        self.staging.observe()
        return self.metrics.snapshot()

    def check(self) -> None:
        """Verify the invariants of everything below; raises PactViolation."""
        self.ledger.check()
        self.index.check()
        if self.saves.lazy is not None:
            self.saves.lazy.check()
        self.metrics.check()

    def shutdown(self) -> None:
        """End all plans, flush the tiers for at most `shutdown_timeout` seconds, and close the arena."""
        for plan in self.ledger.open_plans():
            if plan.state is not State.LOADING:
                self.ledger.abort(plan, EndReason.SHUTDOWN)
        self.is_late = lambda: False
        while self._unwritten:
            self._write_behind()
        while self._backlog and self.staging.has_room:
            self._write_backlog()
        if not self.staging.close(self._config.shutdown_timeout):
            logger.warning(
                "kvpact: some writes did not finish within %.0f s at shutdown", self._config.shutdown_timeout
            )
        self._arena.close()
