"""Between an engine and a cache: every call and every answer is held against the pact, and its properties by name.

Owns what the ranks were told and what they said, apart from the cache's own books, so that the two can be compared.
Decides nothing for either side and changes no answer.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    JobOutcome,
    LoadJob,
    LoadSettlement,
    SaveJob,
    SchedulerContext,
    StepWork,
    WorkerReport,
    num_blocks_for,
)
from kvpact.errors import WeightsVersionRefused
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.testkit.results import Broken

WATCH_NAMESPACE = bytes(32)

StoredBlock = tuple[BlockKey, int]
"""A block's content, and the KV cache group it belongs to."""

EverStored = dict[str, dict[StoredBlock, int]]
"""What caches over one store have stored, in which save, by the word of the epoch; "" for the first one."""


@dataclass(slots=True)
class Job:
    """One job and what each rank said of it: blocks done, blocks failed."""

    job: LoadJob | SaveJob
    contents: tuple[StoredBlock, ...]
    said: dict[int, tuple[set[int], set[int]]] = field(default_factory=dict)
    taken_back: dict[int, set[int]] = field(default_factory=dict)
    """What a rank that forgot its jobs calls failed in this report and called done before: either may count in it."""
    void: bool = False

    def hear(self, rank: int, outcome: JobOutcome) -> None:
        """What failed once stays failed; blocks of other jobs are no news."""
        done, failed = self.said.setdefault(rank, (set(), set()))
        failed.update(block for block in outcome.failed.blocks() if block in self.job.blocks)
        self.taken_back[rank] = done & failed
        done.update(block for block in outcome.done.blocks() if block in self.job.blocks)
        done -= failed

    def all_said(self, num_ranks: int) -> bool:
        """Whether every rank has accounted for every block."""
        return all(sum(map(len, self.said.get(rank, _SILENT))) == len(self.job.blocks) for rank in range(num_ranks))


@dataclass(frozen=True, slots=True)
class Promise:
    """An open match: tokens behind the `computed` ones, and the copies that were there when it was first made."""

    computed: int
    num_tokens: int
    copies: dict[StoredBlock, int]


@dataclass(slots=True)
class Commit:
    """A match that the engine took: blocks from `start` on, into `block_ids`, one sequence a KV cache group."""

    start: int
    num_blocks: int
    asynchronous: bool
    block_ids: tuple[tuple[int, ...], ...]
    keys: list[BlockKey]
    copies: dict[StoredBlock, int]
    jobs: list[Job] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The block after the last one."""
        return self.start + self.num_blocks


@dataclass(slots=True)
class Known:
    """What is known of one live request."""

    keys: BlockKeys | None
    computed: int = 0
    noted: tuple[int, ...] = ()
    """The engine's blocks that were full when the request was last computed."""
    failed_from: int | None = None
    asked_since: float | None = None


@dataclass(slots=True)
class CallTimes:
    """How long one method took: calls, those in which the thread went to sleep, and the longest in seconds."""

    calls: int = 0
    slept: int = 0
    longest: float = 0.0


class ContractWatch(ExternalCache):
    """A cache as the engine sees it, watched. `stored` is what earlier caches of this place left to it, and
    `ever_stored` is shared by all that were ever made for it.

    `timeout` is how long, in seconds of `clock`, prepare may say "ask again later" for one request. With
    `whole_answers` the engine counts on every token that it commits. `say` is told the calls that matter.
    """

    def __init__(
        self,
        cache: ExternalCache,
        *,
        block_size: int,
        num_ranks: int,
        clock: Callable[[], float],
        timeout: float,
        whole_answers: bool,
        own_workers: bool = False,
        stored: dict[StoredBlock, int] | None = None,
        ever_stored: EverStored | None = None,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.cache = cache
        self.stored: dict[StoredBlock, int] = dict(stored or {})
        """What ranks saved in this epoch and was not dropped since, and in which save."""
        self.ever_stored: EverStored = {} if ever_stored is None else ever_stored
        """With what was dropped since: a process that dies before its tiers heard of it finds it again."""
        self.has_neighbours = False
        """Whether other engines store at the same place now: what they stored may be promised too."""
        self.resets = 0
        self._of_epoch = self.ever_stored.setdefault("", dict(self.stored))
        self._forgotten: set[StoredBlock] = set()
        """What was stored before the last reset, by this cache."""
        self._word, self._old_word, self._awaits_word = "", "", False
        self.times: dict[str, CallTimes] = {}
        self.promised_tokens = 0
        self._saves = max((save for stored in self.ever_stored.values() for save in stored.values()), default=0)
        self.loads_failed_by_ranks = 0
        self.open: dict[str, Promise] = {}
        self.commits: dict[str, Commit] = {}
        self._block_size, self._num_ranks = block_size, num_ranks
        self._clock, self._timeout, self._whole_answers = clock, timeout, whole_answers
        self._own_workers = own_workers
        self._say = say
        self._requests: dict[str, Known] = {}
        self._jobs: dict[int, Job] = {}
        self._new_sync: list[str] = []
        self._late: list[Job] = []
        """Loads that the engine went on without, until no rank can write to their blocks."""
        self._context: SchedulerContext | None = None
        self._contents: dict[int, BlockKey] = {}
        """The engine's block -> what was last computed into it, also for requests that have ended."""

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Count the call, and whether the thread gave up the processor in it: what waits for I/O does (P11)."""
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        began = time.perf_counter()
        yield
        times = self.times.setdefault(name, CallTimes())
        times.calls += 1
        times.longest = max(times.longest, time.perf_counter() - began)
        times.slept += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > switches

    def _require(self, holds: bool, names: str, explanation: str) -> None:
        if not holds:
            raise Broken(explanation, protects=names.split())

    def _know(self, request: EngineRequest) -> Known:
        known = self._requests.get(request.request_id)
        if known is None:
            known = self._requests[request.request_id] = Known(None)
        if known.keys is None and request.identity is not None:
            known.keys = BlockKeys(WATCH_NAMESPACE, self._block_size, request.identity)
        return known

    # Promises

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`. Every question is put twice: what was promised is promised again (P3)."""
        known = self._know(request)
        with self._timed("prepare_external_match"):
            match = self.cache.prepare_external_match(request, num_computed_tokens)
        again = self.cache.prepare_external_match(request, num_computed_tokens)
        name = request.request_id
        if match is None or match.num_tokens == 0:
            match = again  # nothing was promised, and more may be there now
        elif again is None or (match.num_tokens, match.load_kv_async) != (again.num_tokens, again.load_kv_async):
            raise Broken(
                f"request {name} is asked for behind {num_computed_tokens} computed tokens twice in a row; the answers "
                f"are {_answer(match)}, then {_answer(again)}; the second must be the first",
                protects=("P3",),
            )
        else:
            same = match.query_result is again.query_result or match.query_result == again.query_result
            self._require(same, "P3", f"request {name} gets another plan for the same question")
        if match is None:
            self._wait(name, known)
            return None
        known.asked_since = None
        if match.num_tokens:
            self._promise(request, known, num_computed_tokens, match)
        else:
            self.open.pop(name, None)
        return match

    def _wait(self, name: str, known: Known) -> None:
        now = self._clock()
        if known.asked_since is None:
            known.asked_since = now
            self._say(f"{name} is told to ask again later")
        self._require(
            now - known.asked_since <= self._timeout,
            "P11 H10",
            f"request {name} has been told to ask again later for {now - known.asked_since:.1f} s; "
            f"{self._timeout:g} s are the longest here",
        )

    def _promise(self, request: EngineRequest, known: Known, computed: int, match: ExternalKVMatch) -> None:
        name, tokens, size = request.request_id, match.num_tokens, self._block_size
        before = self.open.get(name)
        if before is not None and (before.computed, before.num_tokens) == (computed, tokens):
            return
        self._say(f"{name} is promised {tokens} tokens behind {computed}")
        length = len(request.token_ids)
        self._require(
            0 < tokens <= length - 1 - computed,
            "P6 H06",
            f"request {name} of {length} tokens, {computed} of them computed, was promised {tokens} more; "
            f"at most {length - 1 - computed} leave one to compute",
        )
        self._require(name not in self.commits, "P1", f"request {name} is promised tokens while its load is under way")
        self._require(request.may_load, "P5", f"request {name} must compute its prompt itself and is promised {tokens}")
        if known.keys is None:
            raise Broken(f"request {name} has an unknown identity and is promised {tokens} tokens", protects=("H24",))
        keys = known.keys.extend(request.token_ids)
        first, end = computed // size, num_blocks_for(computed + tokens, size)
        self._require(
            known.failed_from is None or end <= known.failed_from,
            "P9 H09",
            f"request {name} is promised blocks {first} to {end - 1}; its load of {known.failed_from} failed before",
        )
        groups = range(len(self._tables(name)) or 1) if self.cache.supports_kv_cache_groups else range(1)
        # Workers of the cache's own may have been told of saves in `StepWork.extra`: the oracle judges those.
        for block in range(first, min(end, len(keys))) if not self._own_workers else ():
            content = [(keys[block], group) for group in groups]
            if not any(self._is_stored(one) for one in content):
                self._require(
                    self._forgotten.isdisjoint(content),
                    "P13 H32",
                    f"request {name} is promised block {block}, which was stored before the last reset",
                )
                raise Broken(
                    f"request {name} is promised block {block}, which not all ranks have reported as saved "
                    "(or which was dropped since)",
                    protects=("P8", "H26"),
                )
        self.promised_tokens += tokens
        contents = [(key, group) for key in keys[:end] for group in groups]
        copies = {content: self.stored[content] for content in contents if content in self.stored}
        self.open[name] = Promise(computed, tokens, copies)

    def _is_stored(self, content: StoredBlock) -> bool:
        return content in self.stored or (self.has_neighbours and content in self._of_epoch)

    def _tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        if self._context is not None and request_id in self._requests:
            return tuple(tuple(blocks) for blocks in self._context.blocks_of(request_id))
        return ()

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`."""
        name = request.request_id
        promise = self.open.pop(name, None) or Promise(0, num_tokens, {})
        tables = self._tables(name) if self.cache.supports_kv_cache_groups else (tuple(block_ids),)
        with self._timed("commit_external_match"):
            accepted = self.cache.commit_external_match(request, match, num_tokens, block_ids)
        self._say(f"{num_tokens} of them are committed for {name}; the cache accepts {accepted}")
        self._require(
            accepted == num_tokens or (0 <= accepted < num_tokens and not self._whole_answers),
            "P5 H05",
            f"{num_tokens} tokens are committed for {name}, and the engine counts on them; the cache takes {accepted}",
        )
        known = self._know(request)
        if accepted and known.keys is not None:
            start = promise.computed // self._block_size
            end = num_blocks_for(promise.computed + accepted, self._block_size)
            keys = list(known.keys.extend(request.token_ids)[:end])
            self.commits[name] = Commit(start, end - start, match.load_kv_async, tables, keys, promise.copies)
            if not match.load_kv_async:
                self._new_sync.append(name)
        return accepted

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`."""
        if self.open.pop(request_id, None) is not None:
            self._say(f"the match of {request_id} is aborted: {reason}")
        with self._timed("abort_external_match"):
            self.cache.abort_external_match(request_id, match, reason)

    # Work

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`."""
        known = self._know(request)
        known.computed = num_computed_tokens
        if known.keys is not None:
            keys = known.keys.extend(request.token_ids)
            noted = tuple(block_ids()[: min(num_computed_tokens // self._block_size, len(keys))])
            if noted != known.noted:
                known.noted = noted
                self._contents.update(zip(noted, keys, strict=False))
        with self._timed("note_computed"):
            self.cache.note_computed(request, num_computed_tokens, block_ids)

    def end_step(self) -> StepWork:
        """See `ExternalCache`."""
        with self._timed("end_step"):
            work = self.cache.end_step()
        self._require_held()
        for job in work.loads:
            self._take_load(job)
        for save in work.saves:
            self._take_save(save)
        if not self._own_workers:
            for name in self._new_sync:
                if name in self.commits:
                    self._require_covered(name, self.commits[name], "the step in which it was committed")
        self._new_sync.clear()
        return work

    def _take_load(self, job: LoadJob) -> None:
        name = job.request_id
        commit = self.commits.get(name)
        if commit is None:
            raise Broken(f"a load is ordered for {name}, for which nothing is committed", protects=("P1", "P4"))
        blocks = job.blocks
        self._require(
            commit.start <= blocks.start and blocks.end <= commit.end,
            "P4 H04 H03",
            f"a load of blocks {blocks.start} to {blocks.end - 1} is ordered for {name}; "
            f"blocks {commit.start} to {commit.end - 1} were committed",
        )
        if job.group_id < len(commit.block_ids):
            wanted = commit.block_ids[job.group_id][blocks.start : blocks.end]
            self._require(
                job.block_ids == wanted,
                "P4 H03",
                f"a load of blocks {blocks.start} to {blocks.end - 1} of {name} is to go into the engine's blocks "
                f"{job.block_ids}; its own are {wanted}",
            )
        self._require(
            job.synchronous is not commit.asynchronous,
            "P5",
            f"the load of {name} was promised as {'a' if commit.asynchronous else ''}synchronous and ordered otherwise",
        )
        contents = tuple((commit.keys[block], job.group_id) for block in blocks)
        entry = self._jobs[job.job_id] = Job(job, contents)
        commit.jobs.append(entry)

    def _take_save(self, job: SaveJob) -> None:
        known = self._requests.get(job.request_id)
        keys = known.keys.keys if known is not None and known.keys is not None else []
        computed = min((known.computed if known is not None else 0) // self._block_size, len(keys))
        content = [self._contents.get(block_id) for block_id in job.block_ids] if not job.group_id else []
        if job.blocks.end > computed and len(content) == len(job.blocks) and (known is None or content == [
            *keys[job.blocks.start : job.blocks.end]
        ]):  # fmt: skip
            # Blocks that a request left behind when it ended or was preempted: saved late, as what they hold.
            contents = tuple((key, 0) for key in content if key is not None)
            self._jobs[job.job_id] = Job(job, contents if len(contents) == len(content) else ())
            return
        self._require(
            job.blocks.end <= computed or not len(job.blocks) or known is None,
            "P8 H29 H30",
            f"a save of blocks {job.blocks.start} to {job.blocks.end - 1} of {job.request_id} is ordered, "
            f"of which {known.computed if known is not None else 0} tokens are computed",
        )
        contents = tuple((keys[block], job.group_id) for block in job.blocks) if known is not None else ()
        self._jobs[job.job_id] = Job(job, contents)

    def _require_covered(self, name: str, commit: Commit, when: str) -> None:
        for group, table in enumerate(commit.block_ids):
            covered = {block for entry in commit.jobs if entry.job.group_id == group for block in entry.job.blocks}
            missing = [b for b in range(commit.start, commit.end) if table[b] and b not in covered]
            self._require(
                not missing,
                "P5 H05",
                f"blocks {commit.start} to {commit.end - 1} were committed for {name}; no load of block "
                f"{missing[:1]} is ordered in {when}",
            )

    # Reports

    def apply_report(self, report: WorkerReport) -> list[LoadSettlement]:
        """See `ExternalCache`."""
        heard = []
        for rank, jobs in report.ranks.items():
            for job_id, outcome in jobs.items():
                entry = self._jobs.get(job_id)
                if entry is not None:
                    entry.hear(rank, outcome)
                    heard.append(entry)
                    self._note_saved(entry)
        with self._timed("apply_report"):
            settlements = self.cache.apply_report(report)
        for settlement in settlements:
            self._settle(settlement)
        self._require_held()
        for entry in heard:
            entry.taken_back.clear()
            if isinstance(entry.job, SaveJob) and entry.all_said(self._num_ranks):
                self._jobs.pop(entry.job.job_id, None)
        return settlements

    def _require_held(self) -> None:
        """What a load may still write to, though the engine went on without it, is held by the cache."""
        for entry in [entry for entry in self._late if entry.all_said(self._num_ranks)]:
            self._late.remove(entry)
            self._jobs.pop(entry.job.job_id, None)
        held = getattr(self._context, "held", None)
        if held is None:
            return
        for entry in self._late:
            free = [block for block in entry.job.block_ids if not held.get(block)]
            self._require(
                not free,
                "H07",
                f"the load of {entry.job.request_id} was settled as late, and may still write to the engine's blocks "
                f"{free}, which the cache does not hold",
            )

    def _note_saved(self, entry: Job) -> None:
        if isinstance(entry.job, LoadJob) or entry.void:
            return
        for block, content in zip(entry.job.blocks, entry.contents, strict=False):
            if all(block in entry.said.get(rank, _SILENT)[0] for rank in range(self._num_ranks)):
                self._saves += 1
                self.stored[content] = self._of_epoch[content] = self._saves

    def _settle(self, settlement: LoadSettlement) -> None:
        name = settlement.request_id
        commit = self.commits.pop(name, None)
        if commit is None:
            raise Broken(f"a load of {name} is settled that is not under way, or twice", protects=("P1", "H08"))
        if not self._own_workers:
            self._require_covered(name, commit, "all the steps before it was settled")
        loaded, failed = set(settlement.loaded.blocks()), set(settlement.failed.blocks())
        committed = set(range(commit.start, commit.end))
        self._require(
            loaded | failed == committed and not loaded & failed,
            "P7",
            f"blocks {commit.start} to {commit.end - 1} were committed for {name}; loaded {sorted(loaded)} and failed "
            f"{sorted(failed)} must name each of them once",
        )
        self._require(
            settlement.asynchronous is commit.asynchronous, "P5", f"the load of {name} is settled as of another kind"
        )
        named = {block for entry in commit.jobs for _, said in entry.said.values() for block in said}
        self.loads_failed_by_ranks += bool(named)
        for entry in commit.jobs:
            if settlement.late:
                self._late.append(entry)
                continue
            self._judge(name, entry, loaded)
            self._jobs.pop(entry.job.job_id, None)
        self._require(
            not (settlement.late and loaded), "P7", f"blocks {sorted(loaded)} of {name} are settled as loaded, and late"
        )
        hull = set(range(min(named), max(named) + 1)) if named else set()
        lost = [b for b in sorted(failed - hull) if self._all_said(commit, b) and not self._own_workers]
        self._require(
            not lost or settlement.late,
            "P2 P9",
            f"the load of blocks {lost} of {name} is settled as failed; every rank reported them as arrived",
        )
        if failed:
            self._say(f"the load of {name} is settled; blocks {sorted(failed)} failed")
            known = self._requests.get(name)
            if known is not None:
                known.failed_from = min(failed) if known.failed_from is None else min(known.failed_from, min(failed))
            for content, save in commit.copies.items():  # what was saved anew meanwhile is another copy
                if (
                    not settlement.late
                    and content[0] in commit.keys[min(failed) :]
                    and self.stored.get(content) == save
                ):
                    del self.stored[content]

    def _all_said(self, commit: Commit, block: int) -> bool:
        return all(
            block in entry.said.get(rank, _SILENT)[0]
            for entry in commit.jobs
            if block in entry.job.blocks
            for rank in range(self._num_ranks)
        )

    def _judge(self, name: str, entry: Job, loaded: set[int]) -> None:
        """Every rank has said of every block what became of it, and what counts as loaded has arrived everywhere."""
        blocks = set(entry.job.blocks)
        for rank in range(self._num_ranks):
            done, failed = entry.said.get(rank, _SILENT)
            silent = sorted(blocks - done - failed)
            self._require(
                not loaded.intersection(silent),
                "P10 H40 H31",
                f"rank {rank} has not said what became of blocks {silent} of {name}; they are settled as loaded",
            )
            self._require(
                not silent,
                "P10 H07",
                f"rank {rank} may still write to blocks {silent} of {name}; they are settled as failed, and given away",
            )
            failed = failed - entry.taken_back.get(rank, set())
            self._require(
                not loaded & failed,
                "P10 H41",
                f"rank {rank} said that blocks {sorted(loaded & failed)} of {name} failed; they are settled as loaded",
            )

    # The rest

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`."""
        self.open.pop(request_id, None)
        self._requests.pop(request_id, None)
        with self._timed("request_finished"):
            self.cache.request_finished(request_id)

    def on_new_request(self, request: EngineRequest) -> None:
        """See `ExternalCache`."""
        with self._timed("on_new_request"):
            self.cache.on_new_request(request)

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """See `ExternalCache`."""
        self._context = context if isinstance(context, SchedulerContext) else None
        self.cache.bind_scheduler_context(context)

    def reset(self) -> None:
        """See `ExternalCache`: nothing stored up to now may be promised any more (P13, H32)."""
        self.resets += 1
        self._forgotten.update(self.stored, self._of_epoch)
        self.stored.clear()
        self._of_epoch = {}
        self._word, self._old_word, self._awaits_word = "", self._word or self._old_word, True
        self.open.clear()
        for entry in self._jobs.values():
            entry.void = True
        with self._timed("reset"):
            self.cache.reset()

    @property
    def knows_words(self) -> bool:
        """Whether the cache takes a word for its weights at all."""
        return type(self.cache).set_weights_version is not ExternalCache.set_weights_version

    def set_weights_version(self, version: str) -> None:
        """See `ExternalCache`: a word is believed after a reset, once, and not the one from before it (P13)."""
        why = "" if self._awaits_word else "no reset came since the last word"
        if version == self._old_word:
            why = "it is the word from before the last reset"
        try:
            with self._timed("set_weights_version"):
                self.cache.set_weights_version(version)
        except WeightsVersionRefused:
            self._require(bool(why), "P13", f"the word {version!r} is refused, though a reset came since the last one")
            raise
        self._require(not why, "P13", f"the word {version!r} is believed, though {why}")
        self._word, self._awaits_word = version, False
        self._of_epoch = self.ever_stored.setdefault(version, {})
        self.stored.update(self._of_epoch)
        self._forgotten.difference_update(self._of_epoch)

    @property
    def supports_kv_cache_groups(self) -> bool:
        """See `ExternalCache`."""
        return self.cache.supports_kv_cache_groups

    @property
    def has_pending_work(self) -> bool:
        """See `ExternalCache`."""
        return self.cache.has_pending_work

    def shutdown(self) -> None:
        """See `ExternalCache`."""
        self.cache.shutdown()

    def check_rest(self) -> None:
        """No request is alive: every committed match must have been settled. Raises Broken."""
        self._require(
            not self.commits, "P1 P7", f"no request is alive, and the loads of {[*self.commits]} were never settled"
        )


_SILENT: tuple[set[int], set[int]] = (set(), set())


def _answer(match: ExternalKVMatch | None) -> str:
    return "ask again later" if match is None else f"{match.num_tokens} tokens"


__all__ = ["CallTimes", "ContractWatch", "EverStored", "StoredBlock"]
