"""Between an engine and a cache: verifies every call and every answer against the pact's properties.

Owns a record of jobs and reports that is independent of the cache's own, so that the two can be compared. Decides
nothing for either side and changes no answer.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from kvpact.contract import (
    BlockHolder,
    EngineRequest,
    ExternalCache,
    ExternalKVMatch,
    ExternalMatchExit,
    LoadSettlement,
    SaveJob,
    SchedulerContext,
    StepWork,
    WorkerReport,
)
from kvpact.errors import WeightsVersionRefused
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.ranges import BlockRange, num_blocks_for
from kvpact_testkit.cache.group_blocks import StoredBlock
from kvpact_testkit.cache.job_monitor import (
    MONITOR_NAMESPACE,
    Commit,
    JobMonitor,
    Known,
    Promise,
)
from kvpact_testkit.results import Broken, require

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(slots=True)
class CallTimes:
    """One method's durations: calls, calls in which the thread slept, and the longest in seconds."""

    calls: int = 0
    slept: int = 0
    longest: float = 0.0


@dataclass(kw_only=True, eq=False, repr=False)
class ContractMonitor(JobMonitor, ExternalCache):
    """A monitored cache as the engine sees it: every call is passed on, and no answer is changed."""

    cache: ExternalCache
    clock: Callable[[], float]
    timeout: float
    """Seconds of `clock` for which prepare may answer "ask again later" to one request."""
    whole_answers: bool
    """Whether the engine relies on every token that it commits."""
    has_neighbours: bool = False
    """Whether other engines store at the same place: their blocks may be promised too."""
    resets: int = 0
    times: dict[str, CallTimes] = field(default_factory=dict)
    open: dict[str, Promise] = field(default_factory=dict)
    _forgotten: set[StoredBlock] = field(default_factory=set)
    """Blocks that this cache stored before the last reset."""
    _word: str = ""
    _old_word: str = ""
    _awaits_word: bool = False
    _new_sync: list[str] = field(default_factory=list)

    def _timed(self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the cache, and count whether the thread yielded the processor, as a wait for I/O does (P11)."""
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        began = time.perf_counter()
        result = call(*args, **kwargs)
        times = self.times.setdefault(getattr(call, "__name__", str(call)), CallTimes())
        times.calls += 1
        times.longest = max(times.longest, time.perf_counter() - began)
        times.slept += resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw > switches
        return result

    def _know(self, request: EngineRequest) -> Known:
        known = self._requests.setdefault(request.request_id, Known(None))
        if known.keys is None and request.identity is not None:
            known.keys = BlockKeys(MONITOR_NAMESPACE, self.kinds.key_tokens, request.identity)
        return known

    # Promises

    def prepare_external_match(self, request: EngineRequest, num_computed_tokens: int) -> ExternalKVMatch | None:
        """See `ExternalCache`. Every probe is made twice: the second must repeat the first promise (P3)."""
        known = self._know(request)
        match = self._timed(self.cache.prepare_external_match, request, num_computed_tokens)
        again = self.cache.prepare_external_match(request, num_computed_tokens)
        name = request.request_id
        if match is None or match.num_tokens == 0:
            match = again  # nothing was promised, and more blocks may be there now
        elif again is None or (match.num_tokens, match.load_kv_async) != (again.num_tokens, again.load_kv_async):
            raise Broken(
                f"request {name} is asked for behind {num_computed_tokens} computed tokens twice in a row; the answers "
                f"are {_answer(match)}, then {_answer(again)}; the second must be the first",
                protects=("P3",),
            )
        else:
            same = match.query_result is again.query_result or match.query_result == again.query_result
            require(same, f"request {name} gets another plan for the same question", "P3")
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
        now = self.clock()
        if known.asked_since is None:
            known.asked_since = now
            self.say(f"{name} is told to ask again later")
        require(
            now - known.asked_since <= self.timeout,
            f"request {name} has been told to ask again later for {now - known.asked_since:.1f} s; "
            f"{self.timeout:g} s are the longest here",
            "P11 H10",
        )

    def _promise(self, request: EngineRequest, known: Known, computed: int, match: ExternalKVMatch) -> None:
        name, tokens, size = request.request_id, match.num_tokens, self.kinds.row_size
        before = self.open.get(name)
        if before is not None and (before.computed, before.num_tokens) == (computed, tokens):
            return
        self.say(f"{name} is promised {tokens} tokens behind {computed}")
        length = len(request.token_ids)
        require(
            0 < tokens <= length - 1 - computed,
            f"request {name} of {length} tokens, {computed} of them computed, was promised {tokens} more; "
            f"at most {length - 1 - computed} leave one to compute",
            "P6 H06",
        )
        require(name not in self.commits, f"request {name} is promised tokens while its load is under way", "P1")
        require(request.may_load, f"request {name} must compute its prompt itself and is promised {tokens}", "P5")
        if known.keys is None:
            raise Broken(f"request {name} has an unknown identity and is promised {tokens} tokens", protects=("H24",))
        keys = known.keys.extend(request.token_ids)
        first, end = computed // size, num_blocks_for(computed + tokens, size)
        require(
            known.failed_from is None or end <= known.failed_from,
            f"request {name} is promised blocks {first} to {end - 1}; its load of {known.failed_from} failed before",
            "P9 H09",
        )
        contents = []
        for group in range(len(self.kinds.groups)):
            blocks = self.kinds.promised(group, computed, computed + tokens)
            found = [(block, self.kinds.content(keys, group, block)) for block in blocks]
            contents += [content for _, content in found if content is not None]
            # The cache's own workers may learn of saves from `StepWork.extra`: the oracle verifies those.
            for block, content in found if not self.own_workers else ():
                self._require_stored(name, f"block {block}" + (f" of group {group}" if group else ""), content)
        copies = {content: self.stored[content] for content in contents if content in self.stored}
        self.open[name] = Promise(computed, tokens, copies)

    def _require_stored(self, name: str, block: str, content: StoredBlock | None) -> None:
        """A promised block must be stored; one that the request does not reach holds tokens that it does not have."""
        if content is None and self.kinds.keeps_everything:
            return
        require(
            content is not None,
            f"request {name} is promised {block}, whose last token depends on one that is not there",
            "P8",
        )
        if content is None or content in self.stored or (self.has_neighbours and content in self._of_epoch):
            return
        require(
            content not in self._forgotten,
            f"request {name} is promised {block}, which was stored before the last reset",
            "P13 H32",
        )
        raise Broken(
            f"request {name} is promised {block}, which not all ranks have reported as saved "
            "(or which was dropped since)",
            protects=("P8", "H26"),
        )

    def commit_external_match(
        self, request: EngineRequest, match: ExternalKVMatch, num_tokens: int, block_ids: Sequence[int]
    ) -> int:
        """See `ExternalCache`."""
        name = request.request_id
        promise = self.open.pop(name, None) or Promise(0, num_tokens, {})
        tables = self._tables(name) if self.cache.supports_kv_cache_groups else (tuple(block_ids),)
        accepted = self._timed(self.cache.commit_external_match, request, match, num_tokens, block_ids)
        self.say(f"{num_tokens} of them are committed for {name}; the cache accepts {accepted}")
        require(
            accepted == num_tokens or (0 <= accepted < num_tokens and not self.whole_answers),
            f"{num_tokens} tokens are committed for {name}, and the engine counts on them; the cache takes {accepted}",
            "P5 H05",
        )
        known = self._know(request)
        if accepted and known.keys is not None:
            tokens = promise.computed, promise.computed + accepted
            start, end = tokens[0] // self.kinds.row_size, num_blocks_for(tokens[1], self.kinds.row_size)
            keys = list(known.keys.extend(request.token_ids)[: end if self.kinds.keeps_everything else None])
            rows = BlockRange(start, end - start)
            self.commits[name] = Commit(*tokens, rows, match.load_kv_async, tables, keys, promise.copies)
            if not match.load_kv_async:
                self._new_sync.append(name)
        return accepted

    def abort_external_match(self, request_id: str, match: ExternalKVMatch | None, reason: str) -> None:
        """See `ExternalCache`."""
        if self.open.pop(request_id, None) is not None:
            self.say(f"the match of {request_id} is aborted: {reason}")
        self._timed(self.cache.abort_external_match, request_id, match, reason)

    def postpone_external_match(self, request_id: str, reason: ExternalMatchExit) -> None:
        """See `ExternalCache`. The promise may end when others need its room; the next one is verified anew."""
        if self.open.pop(request_id, None) is not None:
            self.say(f"the match of {request_id} is postponed: {reason}")
        self._timed(self.cache.postpone_external_match, request_id, reason)

    # Work

    def note_computed(
        self, request: EngineRequest, num_computed_tokens: int, block_ids: Callable[[], Sequence[int]]
    ) -> None:
        """See `ExternalCache`."""
        known = self._know(request)
        known.computed = num_computed_tokens
        if known.keys is not None:
            keys = known.keys.extend(request.token_ids)
            if not self.kinds.keeps_everything:
                self._note_groups(request, keys, num_computed_tokens)
            noted = tuple(block_ids()[: min(num_computed_tokens // self.kinds.row_size, len(keys))])
            if noted != known.noted and self.kinds.keeps_everything:
                known.noted = noted
                self._note_rows(noted, keys)
        self._timed(self.cache.note_computed, request, num_computed_tokens, block_ids)

    def _note_rows(self, block_ids: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """Note what rows blocks hold now; a request that had them and may get them back is noted anew then."""
        rows = {block_id: (key, 0) for block_id, key in zip(block_ids, keys, strict=False)}
        changed = {block_id for block_id, row in rows.items() if self._contents.get(block_id) != row}
        self._contents.update(rows)
        for other in self._requests.values():
            if not changed.isdisjoint(other.noted) and other.noted is not block_ids:
                other.noted = ()

    def note_running(
        self, request_ids: Sequence[str], computed: Sequence[int], step_tokens: Mapping[str, int]
    ) -> Sequence[str]:
        """See `ExternalCache`."""
        others = self._timed(self.cache.note_running, request_ids, computed, step_tokens)
        told = {*others}
        for request_id, before in zip(request_ids, computed, strict=True):
            if request_id not in told:
                self._requests[request_id].computed = before + step_tokens[request_id]
        return others

    def end_step(self) -> StepWork:
        """See `ExternalCache`."""
        work = self._timed(self.cache.end_step)
        self._require_held()
        for job in work.loads:
            self._take_load(job)
        for save in work.saves:
            self._take_save(save)
        if not self.own_workers:
            for name in self._new_sync:
                if name in self.commits:
                    self._require_covered(name, self.commits[name], "the step in which it was committed")
        self._new_sync.clear()
        self.given_up = False
        return work

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
        settlements = self._timed(self.cache.apply_report, report)
        for settlement in settlements:
            self._settle(settlement)
        self._require_held()
        for entry in heard:
            entry.taken_back.clear()
            if isinstance(entry.job, SaveJob) and entry.all_said(self.num_ranks):
                self._jobs.pop(entry.job.job_id, None)
        return settlements

    # The rest

    def request_finished(self, request_id: str) -> None:
        """See `ExternalCache`."""
        self.open.pop(request_id, None)
        self._requests.pop(request_id, None)
        self._timed(self.cache.request_finished, request_id)

    def on_new_request(self, request: EngineRequest) -> None:
        """See `ExternalCache`."""
        self._timed(self.cache.on_new_request, request)

    def bind_scheduler_context(self, context: BlockHolder) -> None:
        """See `ExternalCache`."""
        self._context = context if isinstance(context, SchedulerContext) else None
        self.cache.bind_scheduler_context(context)

    def reset(self) -> None:
        """See `ExternalCache`: no block stored until now may be promised any more (P13, H32)."""
        self.resets += 1
        self._forgotten.update(self.stored, self._of_epoch)
        self.stored.clear()
        self._of_epoch = {}
        self._word, self._old_word, self._awaits_word = "", self._word or self._old_word, True
        self.open.clear()
        for entry in self._jobs.values():
            entry.void = True
        self._timed(self.cache.reset)

    def give_up_saves(self) -> None:
        """See `ExternalCache`: what was being saved is never served, also if a rank says that it was stored."""
        self.given_up = True
        for entry in self._jobs.values():
            entry.void |= isinstance(entry.job, SaveJob)
        self._timed(self.cache.give_up_saves)

    @property
    def knows_words(self) -> bool:
        """Whether the cache accepts a version word for its weights."""
        return type(self.cache).set_weights_version is not ExternalCache.set_weights_version

    def set_weights_version(self, version: str) -> None:
        """See `ExternalCache`: a word is accepted once after a reset, and not the word from before it (P13)."""
        why = "" if self._awaits_word else "no reset came since the last word"
        if version == self._old_word:
            why = "it is the word from before the last reset"
        try:
            self._timed(self.cache.set_weights_version, version)
        except WeightsVersionRefused:
            require(bool(why), f"the word {version!r} is refused, though a reset came since the last one", "P13")
            raise
        require(not why, f"the word {version!r} is believed, though {why}", "P13")
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
        """Raises Broken unless every committed match has been settled; no request may be alive."""
        require(
            not self.commits, f"no request is alive, and the loads of {[*self.commits]} were never settled", "P1 P7"
        )


def _answer(match: ExternalKVMatch | None) -> str:
    return "ask again later" if match is None else f"{match.num_tokens} tokens"
