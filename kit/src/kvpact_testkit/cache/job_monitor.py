"""The jobs of ranks and their reports, compared with what was committed and what is settled.

Owns the jobs and the blocks that they stored, independently of the cache's own records. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvpact.contract import EngineRequest, JobOutcome, LoadJob, LoadSettlement, SaveJob, SchedulerContext
from kvpact.identity.groups import GroupKind, LooseBlock, OffersStates
from kvpact.identity.keys import BlockKey, BlockKeys
from kvpact.ranges import BlockRange
from kvpact_testkit.cache.group_blocks import GroupBlocks, StoredBlock
from kvpact_testkit.results import Broken, require

MONITOR_NAMESPACE = bytes(32)

EverStored = dict[str, dict[StoredBlock, int]]
"""Word of the epoch ("" for the first) -> blocks that caches over one store have stored, and in which save."""


@dataclass(slots=True)
class Job:
    """One job and each rank's report of it: blocks done, blocks failed."""

    job: LoadJob | SaveJob
    contents: tuple[StoredBlock | None, ...]
    said: dict[int, tuple[set[int], set[int]]] = field(default_factory=dict)
    taken_back: dict[int, set[int]] = field(default_factory=dict)
    """Blocks that a rank reports as failed now and reported as done before: either may count in this report."""
    void: bool = False

    def hear(self, rank: int, outcome: JobOutcome) -> None:
        """A failed block stays failed; blocks of other jobs are ignored."""
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
    """An open match: tokens after the `computed` ones, and the copies that existed when it was first made."""

    computed: int
    num_tokens: int
    copies: dict[StoredBlock, int]


@dataclass(slots=True)
class Commit:
    """A committed match: the tokens from `start` to `end` of its request, in the rows `blocks`; `block_ids` has one
    sequence per KV cache group."""

    start: int
    end: int
    blocks: BlockRange
    asynchronous: bool
    block_ids: tuple[tuple[int, ...], ...]
    keys: list[BlockKey]
    copies: dict[StoredBlock, int]
    jobs: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class Known:
    """The monitor's record of one live request."""

    keys: BlockKeys | None
    computed: int = 0
    noted: tuple[int, ...] = ()
    """The engine's blocks that were full when the request was last computed."""
    unnamed: dict[tuple[int, int], int] = field(default_factory=dict)
    """Group and number of a block that is full before its last token is known to the scheduler -> the engine's."""
    failed_from: int | None = None
    asked_since: float | None = None


@dataclass(kw_only=True, eq=False, repr=False)
class JobMonitor:
    """The jobs of one cache. All caches ever made for its place share `ever_stored`."""

    kinds: GroupBlocks
    num_ranks: int
    own_workers: bool = False
    """Whether the cache brings its own workers, whose reports the kit does not judge."""
    stored: dict[StoredBlock, int] = field(default_factory=dict)
    """Blocks from earlier caches of its place and saved in this epoch, and in which save; without dropped ones."""
    ever_stored: EverStored = field(default_factory=dict)
    """Also the dropped ones: a process that dies before its tiers delete them finds them again."""
    say: Callable[[str], None] = lambda words: None
    """Called with a line for the script on important calls."""
    commits: dict[str, Commit] = field(default_factory=dict)
    loads_failed_by_ranks: int = 0
    given_up: bool = False
    """Saves were given up since the last step: one that was noted between steps before that may copy anything."""
    _requests: dict[str, Known] = field(default_factory=dict)
    _jobs: dict[int, Job] = field(default_factory=dict)
    _late: list[Job] = field(default_factory=list)
    """Loads settled as late, until no rank can write to their blocks."""
    _context: SchedulerContext | None = None
    _contents: dict[int, StoredBlock] = field(default_factory=dict)
    """The engine's block -> its last computed content, also for requests that have ended."""

    def __post_init__(self) -> None:
        self.stored = dict(self.stored)
        self._of_epoch = self.ever_stored.setdefault("", dict(self.stored))
        self._saves = max((save for stored in self.ever_stored.values() for save in stored.values()), default=0)

    def _tables(self, request_id: str) -> tuple[tuple[int, ...], ...]:
        if self._context is not None and request_id in self._requests:
            return tuple(tuple(blocks) for blocks in self._context.get_block_ids(request_id))
        return ()

    def _note_groups(self, request: EngineRequest, keys: list[BlockKey], computed: int) -> None:
        name = request.request_id
        known = self._requests[name]
        before, known.unnamed = known.unnamed, {}
        context: object = self._context
        states: Sequence[LooseBlock] | None = None
        if isinstance(context, OffersStates):  # which block has which state, the tables do not say
            states = context.offered_states(name)
            computed = min(computed, len(request.token_ids))
        held: Mapping[int, int] = getattr(context, "held", {})
        for group, table in enumerate(self._tables(name)):
            full, others = self.kinds.full(group, table, computed)
            for block in others:
                self._contents.pop(table[block], None)
            there = {block: table[block] for block in full}
            offers = states is not None and self.kinds.groups[group].kind is GroupKind.STATE
            size = self.kinds.groups[group].block_size
            if states is not None and offers:
                there = {block: block_id for of, block, block_id in states if of == group}
            late = {
                block: block_id
                for (of, block), block_id in before.items()
                if of == group and ([block_id] == [*table[block:][:1]] or (offers and held.get(block_id)))
                if (block + 1) * size <= computed  # else the request began again
            }
            for block in (late.keys() | there.keys()).difference(others):
                content = self.kinds.content(keys, group, block)
                block_id = there.get(block) or late[block]
                if content is None:
                    known.unnamed[group, block] = block_id
                else:
                    self._contents[block_id] = content

    def _take_load(self, job: LoadJob) -> None:
        name = job.request_id
        commit = self.commits.get(name)
        if commit is None:
            raise Broken(f"a load is ordered for {name}, for which nothing is committed", protects=("P1", "P4"))
        blocks = job.blocks
        allowed = self.kinds.within(min(job.group_id, len(self.kinds.groups) - 1), commit.start, commit.end)
        require(
            allowed.start <= blocks.start and blocks.end <= allowed.end,
            f"a load of {_named(blocks)}{_of(job)} is ordered for {name}; {_named(allowed)} were committed",
            "P4 H04 H03",
        )
        if job.group_id < len(commit.block_ids):
            wanted = commit.block_ids[job.group_id][blocks.start : blocks.end]
            require(
                job.block_ids == wanted,
                f"a load of {_named(blocks)} of {name} is to go into the engine's blocks "
                f"{job.block_ids}; its own are {wanted}",
                "P4 H03",
            )
        require(all(job.block_ids), f"a load of {_named(blocks)}{_of(job)} of {name} goes into the null block", "P4")
        require(
            job.synchronous is not commit.asynchronous,
            f"the load of {name} was promised as {'a' if commit.asynchronous else ''}synchronous and ordered otherwise",
            "P5",
        )
        contents = tuple(self.kinds.content(commit.keys, job.group_id, block) for block in blocks)
        entry = self._jobs[job.job_id] = Job(job, contents)
        commit.jobs.append(entry)

    def _take_save(self, job: SaveJob) -> None:
        known = self._requests.get(job.request_id)
        keys = known.keys.keys if known is not None and known.keys is not None else []
        content = [self._contents.get(block_id) for block_id in job.block_ids]
        if not self.kinds.keeps_everything:
            self._take_group_save(job, content, [self.kinds.content(keys, job.group_id, i) for i in job.blocks])
            return
        computed = min((known.computed if known is not None else 0) // self.kinds.row_size, len(keys))
        if job.blocks.end > computed and len(content) == len(job.blocks) and (known is None or content == [
            (key, 0) for key in keys[job.blocks.start : job.blocks.end]
        ]):  # fmt: skip
            # Blocks of a request that has ended or was preempted: saved late, by their content.
            self._jobs[job.job_id] = Job(job, tuple(content) if None not in content else ())
            return
        require(
            job.blocks.end <= computed or not len(job.blocks) or known is None,
            f"a save of {_named(job.blocks)} of {job.request_id} is ordered, "
            f"of which {known.computed if known is not None else 0} tokens are computed",
            "P8 H29 H30",
        )
        contents = tuple((keys[block], job.group_id) for block in job.blocks) if known is not None else ()
        self._jobs[job.job_id] = Job(job, contents)

    def _take_group_save(
        self, job: SaveJob, there: list[StoredBlock | None], named: list[StoredBlock | None]
    ) -> None:  # fmt: skip
        """Take a save of a model of several groups: the engine's blocks must hold what their numbers say."""
        wrong = [
            block
            for block, content, name in zip(job.blocks, there, named, strict=True)
            if content is None or (content != name and job.request_id in self._requests)
        ]
        if wrong and self.given_up and job.request_id not in self._requests:
            self._jobs[job.job_id] = Job(job, ())
            return
        require(
            not wrong,
            f"a save of {_named(job.blocks)}{_of(job)} of {job.request_id} is ordered; the engine's blocks do not hold "
            f"what belongs into {wrong}: it is not computed, of another group, or a state of another boundary",
            "P8 H29 H30",
        )
        self._jobs[job.job_id] = Job(job, tuple(there))

    def _require_covered(self, name: str, commit: Commit, when: str) -> None:
        for group, table in enumerate(commit.block_ids):
            covered = {block for entry in commit.jobs if entry.job.group_id == group for block in entry.job.blocks}
            missing = [b for b in self.kinds.promised(group, commit.start, commit.end) if table[b] and b not in covered]
            require(
                not missing,
                f"{_named(commit.blocks)} were committed for {name}; no load of block "
                f"{missing[:1]} of group {group} is ordered in {when}",
                "P5 H05",
            )

    def _require_held(self) -> None:
        """The cache must hold the blocks to which a load settled as late may still write."""
        for entry in [entry for entry in self._late if entry.all_said(self.num_ranks)]:
            self._late.remove(entry)
            self._jobs.pop(entry.job.job_id, None)
        held = getattr(self._context, "held", None)
        if held is None:
            return
        for entry in self._late:
            free = [block for block in entry.job.block_ids if not held.get(block)]
            require(
                not free,
                f"the load of {entry.job.request_id} was settled as late, and may still write to the engine's blocks "
                f"{free}, which the cache does not hold",
                "H07",
            )

    def _note_saved(self, entry: Job) -> None:
        if isinstance(entry.job, LoadJob) or entry.void:
            return
        for block, content in zip(entry.job.blocks, entry.contents, strict=False):
            if content and all(block in entry.said.get(rank, _SILENT)[0] for rank in range(self.num_ranks)):
                self._saves += 1
                self.stored[content] = self._of_epoch[content] = self._saves

    def _settle(self, settlement: LoadSettlement) -> None:
        name = settlement.request_id
        commit = self.commits.pop(name, None)
        if commit is None:
            raise Broken(f"a load of {name} is settled that is not under way, or twice", protects=("P1", "H08"))
        if not self.own_workers:
            self._require_covered(name, commit, "all the steps before it was settled")
        loaded, failed = set(settlement.loaded.blocks()), set(settlement.failed.blocks())
        committed = set(commit.blocks)
        require(
            loaded | failed == committed and not loaded & failed,
            f"{_named(commit.blocks)} were committed for {name}; loaded {sorted(loaded)} and failed "
            f"{sorted(failed)} must name each of them once",
            "P7",
        )
        require(
            settlement.asynchronous is commit.asynchronous, f"the load of {name} is settled as of another kind", "P5"
        )
        named = {block for entry in commit.jobs for _, said in entry.said.values() for block in said}
        self.loads_failed_by_ranks += bool(named)
        for entry in commit.jobs:
            if settlement.late:
                self._late.append(entry)
                continue
            here = self.kinds.arrived(entry.job.group_id, entry.job.blocks, committed, loaded)
            self._judge(name, entry, here)
            self._contents.update(
                (block_id, content)
                for block, block_id, content in zip(entry.job.blocks, entry.job.block_ids, entry.contents, strict=True)
                if block in here and content is not None and not self.kinds.keeps_everything
            )
            self._jobs.pop(entry.job.job_id, None)
        require(
            not (settlement.late and loaded), f"blocks {sorted(loaded)} of {name} are settled as loaded, and late", "P7"
        )
        hull = set(range(min(named), max(named) + 1)) if named else set()
        if not self.kinds.keeps_everything:  # one failed block of any group fails the whole match
            hull = committed if named else set()
        lost = [b for b in sorted(failed - hull) if self._all_said(commit, b) and not self.own_workers]
        require(
            not lost or settlement.late,
            f"the load of blocks {lost} of {name} is settled as failed; every rank reported them as arrived",
            "P2 P9",
        )
        if failed:
            self.say(f"the load of {name} is settled; blocks {sorted(failed)} failed")
            known = self._requests.get(name)
            if known is not None:
                known.failed_from = min(failed) if known.failed_from is None else min(known.failed_from, min(failed))
            for content in () if settlement.late else self._lost(commit, min(failed)):
                save = commit.copies.get(content)
                if save is not None and self.stored.get(content) == save:  # else it was saved again meanwhile
                    del self.stored[content]

    def _lost(self, commit: Commit, first_failed: int) -> set[StoredBlock]:
        """What may not be promised again: all from the first failed block on; of several groups, what ranks named."""
        if self.kinds.keeps_everything:
            return {(key, 0) for key in commit.keys[first_failed:]}
        return {
            content
            for entry in commit.jobs
            for block, content in zip(entry.job.blocks, entry.contents, strict=True)
            if content is not None and any(block in failed for _, failed in entry.said.values())
        }

    def _all_said(self, commit: Commit, block: int) -> bool:
        if not self.kinds.keeps_everything:
            return all(entry.all_said(self.num_ranks) for entry in commit.jobs)
        return all(
            block in entry.said.get(rank, _SILENT)[0]
            for entry in commit.jobs
            if block in entry.job.blocks
            for rank in range(self.num_ranks)
        )

    def _judge(self, name: str, entry: Job, loaded: set[int]) -> None:
        """Every rank must have reported every block, and every loaded block must have arrived on all ranks."""
        blocks = set(entry.job.blocks)
        for rank in range(self.num_ranks):
            done, failed = entry.said.get(rank, _SILENT)
            silent = sorted(blocks - done - failed)
            require(
                not loaded.intersection(silent),
                f"rank {rank} has not said what became of blocks {silent} of {name}; they are settled as loaded",
                "P10 H40 H31",
            )
            require(
                not silent,
                f"rank {rank} may still write to blocks {silent} of {name}; they are settled as failed, and given away",
                "P10 H07",
            )
            failed = failed - entry.taken_back.get(rank, set())
            require(
                not loaded & failed,
                f"rank {rank} said that blocks {sorted(loaded & failed)} of {name} failed; they are settled as loaded",
                "P10 H41",
            )


def _named(blocks: BlockRange) -> str:
    return f"blocks {blocks.start} to {blocks.end - 1}"


def _of(job: LoadJob | SaveJob) -> str:
    return f" of group {job.group_id}" if job.group_id else ""


_SILENT: tuple[set[int], set[int]] = (set(), set())
