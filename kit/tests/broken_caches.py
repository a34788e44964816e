"""Caches broken on purpose, each in one way that was seen in public ones, and the name under which the kit must say so.

All are the engine's `ReferenceCache` with one method made wrong, but for one that lies in its counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpact.contract import (
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    ExternalMatchExit,
    JobOutcome,
    JobTally,
    LoadJob,
    LoadSettlement,
    SaveJob,
    StepWork,
    WorkerReport,
)
from kvpact.identity.groups import GroupKind, GroupSet
from kvpact.identity.keys import BlockKey, BlockKeys, RequestIdentity
from kvpact.ranges import BlockRange, RangeSet, hull, num_blocks_for
from kvpact_testkit.cache.conformance import CacheContext, CacheFactory, CacheUnderTest
from kvpact_testkit.cache.subjects import pact_cache
from kvpact_testkit.engine import ReferenceCache
from kvpact_testkit.engine.reference_blocks import Entry, EntryKey, Piece, ReferencePlan


class ForgetsAborts(ReferenceCache):
    """A plan that is not committed keeps its blocks pinned."""

    def _release(self, request_id: str) -> None:
        self.plans.pop(request_id, None)


class KeepsWhatIsDropped(ReferenceCache):
    """That nobody will come back for a match is heard when its plan is too old, or its request ends."""

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        pass


class GivesUpWhatIsPostponed(ReferenceCache):
    """A match that was not taken in its step is not offered again."""

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        self._release(request_id)
        self._failed_from[request_id] = 0


class KeepsWhatIsPostponed(ReferenceCache):
    """A match that the engine may come back for is held until its request ends."""

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        if request_id in self.plans:
            self.plans[request_id].seen = self._step


class PromisesWithoutHolding(ReferenceCache):
    """What is promised may be evicted before it is committed."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        known = self.plans.get(request.request_id)
        match = super().prepare_external_match(request, num_computed_tokens)
        plan = self.plans.get(request.request_id)
        if plan is not None and plan is not known:
            for piece in plan.pieces:
                piece.entry.holds -= 1
        return match

    def _release(self, request_id: str) -> None:
        self.plans.pop(request_id, None)

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        plan = self.plans.get(request.request_id)
        for piece in plan.pieces if plan is not None else ():
            piece.entry.holds += 1
        return super().commit_external_match(request, match, num_tokens, block_ids)


class AcquiresWithEveryProbe(ReferenceCache):
    """Every lookup takes one more hold."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        match = super().prepare_external_match(request, num_computed_tokens)
        plan = self.plans.get(request.request_id)
        if plan is not None:
            plan.pieces[0].entry.holds += 1
        return match


class PlansAnewWithEveryProbe(ReferenceCache):
    """Every lookup makes another plan; the engine holds one that is no longer good."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        self._release(request.request_id)
        return super().prepare_external_match(request, num_computed_tokens)


class LoadsAllThatWasPromised(ReferenceCache):
    """A smaller commit is not heard."""

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        super().commit_external_match(request, match, match.num_tokens if num_tokens else 0, block_ids)
        return num_tokens


class KeepsTheRest(ReferenceCache):
    """What was promised and not committed stays pinned."""

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        plan = self.plans.get(request.request_id)
        if plan is not None:
            del plan.pieces[num_blocks_for(num_tokens, self._block_size) :]
        return super().commit_external_match(request, match, num_tokens, block_ids)


class SkipsSmallLoads(ReferenceCache):
    """A minimum size is thought of after the promise; the engine is told that all went well."""

    def end_step(self) -> StepWork:
        work = super().end_step()
        return replace(work, loads=tuple(job for job in work.loads if len(job.blocks) > 2))

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        small = {
            job_id: JobOutcome(done=RangeSet.of(job.blocks))
            for plan in self.loading.values()
            for job_id, job in plan.jobs.items()
            if len(job.blocks) <= 2
        }
        return super().apply_report(
            report.aggregate(WorkerReport(dict.fromkeys(range(self._num_ranks), small))) if small else report
        )


class AcceptsLessThanWasCommitted(ReferenceCache):
    """One token less is accepted at commit, whether the engine listens or not."""

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        return max(0, super().commit_external_match(request, match, num_tokens, block_ids) - self._block_size)


class _WholePrompt:
    def __init__(self, request: EngineRequest) -> None:
        self.request_id, self.identity, self.may_load = request.request_id, request.identity, request.may_load
        self.token_ids = [*request.token_ids, 0]


class PromisesTheWholePrompt(ReferenceCache):
    """The last token is promised too."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        return super().prepare_external_match(_WholePrompt(request), num_computed_tokens)


class NamesAllButTheLastBlock(ReferenceCache):
    """A settlement leaves a block out."""

    def _settle(self, request_id: str, plan: ReferencePlan) -> LoadSettlement:
        settlement = super()._settle(request_id, plan)
        named = RangeSet.span(plan.start, plan.start + max(1, plan.num_blocks - 1))
        return replace(settlement, loaded=settlement.loaded.intersection(named))


class SettlesTwice(ReferenceCache):
    """An ended load is reported once more with the next report."""

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        again = getattr(self, "_again", [])
        self._again = super().apply_report(report)
        return again + self._again


class ShowsBlocksAtOnce(ReferenceCache):
    """A block counts as stored when its copy is ordered."""

    def end_step(self) -> StepWork:
        for _, _, saved in self._saves.by_id.values():
            for _, entry in saved:
                entry.stored = True
        return super().end_step()


class ShowsFailedSaves(ReferenceCache):
    """A save that ended counts as stored, however it ended."""

    def _settle_save(self, job: SaveJob, tally: JobTally, saved: list[tuple[EntryKey, Entry]]) -> None:
        good = JobTally(job.blocks, 1)
        good.add(0, JobOutcome(done=RangeSet.of(job.blocks)))
        super()._settle_save(job, good, saved)


class SavesHalfComputedBlocks(ReferenceCache):
    """A block is saved when its first token is computed."""

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        rounded = num_blocks_for(num_computed_tokens, self._block_size) * self._block_size
        super().note_computed(request, rounded, block_ids)


class KeepsWhatFailed(ReferenceCache):
    """Entries whose load failed stay visible to others."""

    def _forget(self, key: EntryKey, entry: Entry) -> None:
        if not entry.stored:
            super()._forget(key, entry)


class PromisesAgainWhatFailed(KeepsWhatFailed):
    """A load that failed is promised to the same request again."""

    def _settle(self, request_id: str, plan: ReferencePlan) -> LoadSettlement:
        settlement = super()._settle(request_id, plan)
        self._failed_from.pop(request_id, None)
        return settlement


class LosesGoodBlocksToo(ReferenceCache):
    """One failed block fails the whole load, though the others arrived: more is recomputed than was lost."""

    def _settle(self, request_id: str, plan: ReferencePlan) -> LoadSettlement:
        settlement = super()._settle(request_id, plan)
        everything = settlement.loaded.union(settlement.failed)
        return replace(settlement, loaded=RangeSet(), failed=everything) if settlement.failed.ranges else settlement


class TrustsTheFirstRank(ReferenceCache):
    """A job is done when one rank has said so."""

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        first = {rank: jobs for rank, jobs in report.ranks.items() if rank == 0}
        return super().apply_report(WorkerReport({rank: first.get(0, {}) for rank in range(self._num_ranks)}))


class KeepsOneRanksFailures(ReferenceCache):
    """Of the failed ranges of several ranks that of the first rank that failed is kept."""

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        failed: set[int] = set()
        ranks: dict[int, dict[int, JobOutcome]] = {}
        for rank, jobs in report.ranks.items():
            ranks[rank] = {}
            for job_id, outcome in jobs.items():
                everything = JobOutcome(done=outcome.done.union(outcome.failed))
                ranks[rank][job_id] = everything if job_id in failed else outcome
                failed |= {job_id} if outcome.failed.ranges else set()
        return super().apply_report(WorkerReport(ranks))


class SavesAsOneRange(ReferenceCache):
    """What was saved is kept as a start and an end, gaps included."""

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        def closed(job_id: int, outcome: JobOutcome) -> JobOutcome:
            if job_id not in self._saves.by_id:
                return outcome
            done = hull([outcome.done])
            return JobOutcome(done, outcome.failed.difference(done))

        ranks = {
            rank: {job_id: closed(job_id, outcome) for job_id, outcome in jobs.items()}
            for rank, jobs in report.ranks.items()
        }
        return super().apply_report(WorkerReport(ranks))


class CountsReports(ReferenceCache):
    """As many reports as ranks make a job done, whoever sent them."""

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        self._counted: dict[int, list[JobOutcome]] = getattr(self, "_counted", {})
        complete: dict[int, JobOutcome] = {}
        for jobs in report.ranks.values():
            for job_id, outcome in jobs.items():
                heard = self._counted.setdefault(job_id, [])
                heard.append(outcome)
                if len(heard) == self._num_ranks:
                    complete[job_id] = heard[-1]
        return super().apply_report(WorkerReport(dict.fromkeys(range(self._num_ranks), complete)))


class CommitsTheOldRange(ReferenceCache):
    """A plan is found by its request alone, whatever the engine has computed meanwhile."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        plan = self.plans.get(request.request_id)
        if plan is None:
            return super().prepare_external_match(request, num_computed_tokens)
        plan.seen = self._step
        room = len(request.token_ids) - 1 - num_computed_tokens
        tokens = min(plan.num_tokens, room - room % self._block_size)
        return ExternalKVMatch(tokens, self._asynchronous, plan)


class CountsHits(ReferenceCache):
    """Blocks that are held are counted, wherever they are in the prompt."""

    def _held(self, keys: list[BlockKey], computed: int) -> list[tuple[EntryKey, Entry]]:
        names = [EntryKey(key, 0) for key in keys[computed // self._block_size :]]
        return [(name, self.entries[name]) for name in names if name in self.entries and self.entries[name].stored]

    def _find(self, keys: list[BlockKey], computed: int, most: int) -> int:
        held = self._held(keys[: most // self._block_size], computed)
        return computed - computed % self._block_size + len(held) * self._block_size

    def _pieces(self, keys: list[BlockKey], computed: int, end: int) -> list[Piece]:
        held = self._held(keys[: end // self._block_size + 1], computed)
        first = computed // self._block_size
        return [Piece(0, first + i, name, entry) for i, (name, entry) in enumerate(held)][
            : end // self._block_size - first
        ]


class ForgetsLoadsOfEndedRequests(ReferenceCache):
    """When a request ends its load is forgotten: the engine waits for a settlement for ever."""

    def request_finished(self, request_id: str) -> None:
        super().request_finished(request_id)
        plan = self.loading.pop(request_id, None)
        if plan is not None:
            self._drop(plan.pieces)


class SettlesAtOnceWhenCancelled(ReferenceCache):
    """The load of an ended request counts as failed at once, while ranks still write."""

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        over = [request_id for request_id in self.loading if request_id not in self._keys]
        settled = super().apply_report(report)
        for request_id in over:
            plan = self.loading.get(request_id)
            if plan is not None:
                plan.outcomes.append((0, JobOutcome(failed=RangeSet.of(plan.blocks))))
                settled.append(self._settle(request_id, plan))
        return settled


class TakesSilenceForSuccess(ReferenceCache):
    """A load that is not reported within some steps counts as loaded."""

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        settled = super().apply_report(report)
        self._since: dict[str, int] = getattr(self, "_since", {})
        for request_id, plan in [*self.loading.items()]:
            if self._step - self._since.setdefault(request_id, self._step) > 8:
                plan.jobs.clear()
                settled.append(self._settle(request_id, plan))
        return settled


class NeverAsksAgain(ReferenceCache):
    """A lost report is waited for for ever."""

    def end_step(self) -> StepWork:
        return replace(super().end_step(), inquiries=())


class SaysLaterForEver(ReferenceCache):
    """A tier that holds the prompt is always about to answer."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        match = super().prepare_external_match(request, num_computed_tokens)
        return None if match is not None and match.num_tokens else match


class _Crowded(ReferenceCache):
    """Keeps some waiting who have a match. `living` are all requests that wait or run, in the order they came."""

    living: tuple[EngineRequest, ...] = ()

    def on_new_request(self, request: EngineRequest) -> None:
        self.living = (*self.living, request)

    def request_finished(self, request_id: str) -> None:
        self.living = tuple(each for each in self.living if each.request_id != request_id)
        super().request_finished(request_id)

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        match = super().prepare_external_match(request, num_computed_tokens)
        return None if match is not None and match.num_tokens and self.passes_over(request) else match

    def passes_over(self, request: EngineRequest) -> bool:
        return False


class ServesTheLastFirst(_Crowded):
    """Who came last gets room first: while others are there, the queue's head waits."""

    def passes_over(self, request: EngineRequest) -> bool:
        return request.request_id not in {each.request_id for each in self.living[-4:]}


class DropsSavesWhileOthersLoad(ReferenceCache):
    """What is loaded or promised takes all room: what requests compute meanwhile is not saved."""

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        if not self.loading and not self.plans:
            super().note_computed(request, num_computed_tokens, block_ids)


class ServesTheLargerTenantFirst(_Crowded):
    """While most requests are of one tenant, those of others wait."""

    def passes_over(self, request: EngineRequest) -> bool:
        return sum(other.identity == request.identity for other in self.living) * 2 < len(self.living)


class AsksItsStore(ReferenceCache):
    """Lookups go to a store over the network, on the scheduler's thread."""

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        time.sleep(0.001)
        return super().prepare_external_match(request, num_computed_tokens)


class RemembersEveryRequest(ReferenceCache):
    """Keys of requests are kept after their end."""

    def request_finished(self, request_id: str) -> None:
        self._release(request_id)


class IgnoresTheSalt(ReferenceCache):
    """Tenants share blocks."""

    def _keys_of(self, request: EngineRequest) -> list[BlockKey]:
        if request.request_id not in self._keys:
            self._keys[request.request_id] = BlockKeys(b"reference", self._block_size, RequestIdentity())
        return self._keys[request.request_id].extend(request.token_ids)


class SavesFreedBlocks(ReferenceCache):
    """The engine's blocks are not held while they are copied out."""

    def bind_scheduler_context(self, context: Any) -> None:
        class Loose:
            def __getattr__(self, name: str) -> Any:
                return getattr(context, name)

            def touch(self, block_ids: Sequence[int]) -> None:
                pass

            def free_blocks(self, block_ids: Sequence[int]) -> None:
                pass

        self._context = Loose()  # type: ignore[assignment]


class IgnoresResets(ReferenceCache):
    """Old weights' blocks are served after the weights changed."""

    def reset(self) -> None:
        for request_id in list(self.plans):
            self._release(request_id)


class EvictsHeadsFirst(ReferenceCache):
    """The oldest block goes first, which is a chain's head, even for its own tail."""

    def _take_slots(self, wanted: int, keep: set[EntryKey]) -> tuple[int, ...]:
        for key in reversed([key for key in self.entries if key in keep]):
            self.entries.move_to_end(key, last=False)
        heads_first = sorted(
            (key for key in self.entries if key in keep), key=lambda key: self.entries[key].slot, reverse=True
        )
        for key in heads_first:
            self.entries.move_to_end(key, last=False)
        return super()._take_slots(wanted, set())


class EvictsWhatIsHeld(ReferenceCache):
    """If nothing is free, what is pinned goes."""

    def _take_slots(self, wanted: int, keep: set[EntryKey]) -> tuple[int, ...]:
        taken = super()._take_slots(wanted, keep)
        more = [key for key, entry in self.entries.items() if entry.stored][: wanted - len(taken)]
        return taken + tuple(self.entries.pop(key).slot for key in more)


class DropsSavesOfEndedRequests(ReferenceCache):
    """What a request saved in its last step is lost."""

    def request_finished(self, request_id: str) -> None:
        super().request_finished(request_id)
        for job_id in [job_id for job_id, (job, _, _) in self._saves.by_id.items() if job.request_id == request_id]:
            job, _, saved = self._saves.by_id[job_id]
            lost = JobTally(job.blocks, 0)
            self._saves.by_id[job_id] = job, _LostTally(lost), saved  # type: ignore[assignment]


class _LostTally:
    def __init__(self, tally: JobTally) -> None:
        self._tally = tally

    def add(self, rank: int, outcome: JobOutcome) -> None:
        self.complete = True

    complete = False

    def saved(self) -> JobOutcome:
        return JobOutcome()


class SwitchesLoadsToAnotherBlock(ReferenceCache):
    """Loads are written one block off."""

    def end_step(self) -> StepWork:
        work = super().end_step()
        return replace(work, loads=tuple(_shifted(job) for job in work.loads))


def _shifted(job: LoadJob) -> LoadJob:
    return replace(job, block_ids=(*job.block_ids[1:], job.block_ids[0]))


def counts_promises_as_hits(place: CacheContext) -> CacheUnderTest:
    """kvpact's cache, whose counts say that all that was promised was used."""
    subject = pact_cache(place)

    def counts() -> Mapping[str, float]:
        assert subject.counts is not None
        shot = dict(subject.counts())
        return {**shot, "used_tokens": shot["promised_tokens"]}

    return replace(subject, counts=counts)


def made_of(kind: type[ReferenceCache], *, asynchronous: bool = True) -> CacheFactory:
    """A factory of one of the caches above, which shows nothing of itself."""

    def factory(place: CacheContext) -> ExternalCache:
        return kind(
            place.block_size,
            place.num_slots,
            num_ranks=place.num_ranks,
            groups=place.groups,
            asynchronous=asynchronous,
        )

    return factory


class NamesWhatHasNoName(ReferenceCache):
    """Token ids are written in 4 bytes, whatever a request brings."""

    def _keys_of(self, request: EngineRequest) -> list[BlockKey]:
        for token in request.token_ids:
            token.to_bytes(4, "little")
        return super()._keys_of(request)


class GivesLateBlocksAway(ReferenceCache):
    """The engine goes on without a load that hangs, and nobody holds the blocks that it may still write to."""

    def _overdue(self) -> tuple[int, ...]:
        overdue = super()._overdue()
        for plan in self.loading.values():
            if plan.held and self._context is not None:
                self._context.free_blocks(plan.held)
                plan.held = [-1]
        return overdue

    def _let_go_of(self, plan: ReferencePlan) -> None:
        plan.held = []
        super()._let_go_of(plan)


class WaitsForLoadsForEver(ReferenceCache):
    """A load has no deadline."""

    def _overdue(self) -> tuple[int, ...]:
        return ()


class LoadsOneBlockLessOfAWindow(ReferenceCache):
    """A window's first block, of which few tokens are read, is left out."""

    def _pieces(self, keys: list[BlockKey], computed: int, end: int) -> list[Piece]:
        first = {
            (number, group.needed(end).start)
            for number, group in enumerate(self._groups.groups)
            if group.kind is GroupKind.WINDOW
        }
        return [piece for piece in super()._pieces(keys, computed, end) if (piece.group, piece.block) not in first]


class ServesAnEarlierState(ReferenceCache):
    """Where no state is stored, the last one before it is good enough."""

    def _stored(self, name: EntryKey | None) -> Entry | None:
        entry = super()._stored(name)
        if entry is not None or name is None or self._groups.groups[name.group].kind is not GroupKind.STATE:
            return entry
        rows = next((keys for keys in map(self._rows, self._keys) if name.row in keys), [])
        earlier = [EntryKey(row, *name[1:]) for row in rows[: rows.index(name.row)]] if rows else []
        there = (self.entries[other] for other in reversed(earlier) if other in self.entries)
        return next((found for found in there if found.stored), None)

    def _rows(self, request_id: str) -> list[BlockKey]:
        return self._keys[request_id].keys


class MixesUpGroups(ReferenceCache):
    """A block is named by its tokens, whatever its group."""

    def _name(self, keys: list[BlockKey], group: int, block: int) -> EntryKey | None:
        name = super()._name(keys, group, block)
        return name and name._replace(group=0)


class AsksEveryGroupOnce(ReferenceCache):
    """The match is cut to what each group has, one after the other; what was cut is not asked about again."""

    def _find(self, keys: list[BlockKey], computed: int, most: int) -> int:
        for number, group in enumerate(self._groups.groups):

            def first_missing(
                _: int, blocks: BlockRange, number: int = number, size: int = group.block_size
            ) -> int | None:
                missing = (i for i in blocks if self._stored(self._name(keys, number, i)) is None)
                return next((i for i in missing if i >= computed // size), None)

            most = GroupSet((group,), self._groups.alignment).longest_match(most, first_missing)
        return most


class ServesVolatileBlocks(ReferenceCache):
    """Blocks of a draft model's layers are like others."""

    def __init__(self, *args: Any, groups: GroupSet | None = None, **settings: Any) -> None:
        super().__init__(*args, groups=groups, **settings)
        alike = tuple(replace(group, drops_last=False) for group in self._groups.groups)
        self._groups = replace(self._groups, groups=alike)


class OffersAGroupBeforeTheChain(ReferenceCache):
    """What is saved of a window makes a match, although the save of the chain that it needs is under way."""

    def _stored(self, name: EntryKey | None) -> Entry | None:
        entry = super()._stored(name)
        if entry is not None or name is None or self._groups.groups[name.group].kind is not GroupKind.FULL:
            return entry
        return self.entries.get(name) if len(self._groups.groups) > 1 else None


BROKEN_GROUPS: dict[type[ReferenceCache], str] = {
    LoadsOneBlockLessOfAWindow: "test_several_kv_cache_groups_are_loaded_together",
    ServesAnEarlierState: "test_a_state_is_served_at_its_own_boundary_only",
    MixesUpGroups: "test_groups_of_one_shape_keep_their_own_blocks",
    AsksEveryGroupOnce: "test_every_group_is_asked_again_about_a_shorter_match",
    ServesVolatileBlocks: "test_a_block_that_depends_on_the_next_token_is_not_the_last_of_a_match",
    OffersAGroupBeforeTheChain: "test_h112_what_is_saved_of_one_group_is_no_match_before_the_chain_is",
}
"""What each breaks, by the check that must find it."""


BROKEN: dict[type[ReferenceCache], str] = {
    ForgetsAborts: "P1 H01",
    KeepsWhatIsDropped: "P1 H01",
    GivesUpWhatIsPostponed: "P2",
    KeepsWhatIsPostponed: "P1 H01",
    PromisesWithoutHolding: "P2",
    AcquiresWithEveryProbe: "P3 H02",
    PlansAnewWithEveryProbe: "P3",
    LoadsAllThatWasPromised: "P4",
    KeepsTheRest: "P4 H04",
    SkipsSmallLoads: "P5 H05",
    AcceptsLessThanWasCommitted: "P5",
    PromisesTheWholePrompt: "P6 H06",
    NamesAllButTheLastBlock: "P7",
    SettlesTwice: "H08",
    ShowsBlocksAtOnce: "P8",
    ShowsFailedSaves: "H26",
    SavesHalfComputedBlocks: "H29",
    KeepsWhatFailed: "P9",
    PromisesAgainWhatFailed: "H09",
    LosesGoodBlocksToo: "P9",
    TrustsTheFirstRank: "P10 H40",
    KeepsOneRanksFailures: "P10 H41",
    SavesAsOneRange: "H42",
    CountsReports: "H45",
    CommitsTheOldRange: "H03",
    NamesWhatHasNoName: "H62",
    CountsHits: "H20",
    ForgetsLoadsOfEndedRequests: "H07",
    SettlesAtOnceWhenCancelled: "H07",
    TakesSilenceForSuccess: "H31",
    NeverAsksAgain: "P11",
    SaysLaterForEver: "P11 H10",
    AsksItsStore: "H58",
    RemembersEveryRequest: "P12 H51",
    IgnoresTheSalt: "H24",
    SavesFreedBlocks: "H27",
    IgnoresResets: "H32",
    EvictsHeadsFirst: "H54",
    EvictsWhatIsHeld: "H53",
    DropsSavesOfEndedRequests: "H44",
    SwitchesLoadsToAnotherBlock: "P4",
    GivesLateBlocksAway: "H07",
    WaitsForLoadsForEver: "P11 H10",
    ServesTheLastFirst: "P11",
    DropsSavesWhileOthersLoad: "P12",
    ServesTheLargerTenantFirst: "P14",
}
"""What each breaks, by every name under which the kit must report it."""
