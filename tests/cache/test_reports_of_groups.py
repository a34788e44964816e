"""P10 with several KV cache groups: what ranks report of each group's blocks, in any order, against a model.

A save holds what every rank has saved; a load lacks the hull of what failed on any rank, and all of the match if a
group beside the chain lacks a block; a rank that says nothing agrees to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, cast

import pytest

from kvpact.cache.jobs import LoadState, PactPlan, SaveState, TransferJobs
from kvpact.cache.needs.owed import Owed
from kvpact.cache.needs.runs import Run
from kvpact.contract import JobOutcome, WorkerReport
from kvpact.index.block_index import Pin
from kvpact.ranges import BlockRange, RangeSet

RANKS, GROUPS, CHAIN = 4, 3, 1


@dataclass
class Pact:
    """What a load needs of its plan."""

    committed_blocks: BlockRange
    request_id: str = "r"


@dataclass
class Model:
    """What each rank has said of each block of a job: whether it was copied; a block that failed once stays failed."""

    blocks: BlockRange
    said: list[dict[int, bool]] = field(default_factory=lambda: [{} for _ in range(RANKS)])

    def hear(self, rank: int, outcome: JobOutcome) -> None:
        for block in self.blocks:
            if block in outcome.failed:
                self.said[rank][block] = False
            elif block in outcome.done:
                self.said[rank].setdefault(block, True)

    @property
    def is_complete(self) -> bool:
        return all(len(of_rank) == self.blocks.count for of_rank in self.said)

    @property
    def saved(self) -> set[int]:
        return {block for block in self.blocks if all(of_rank.get(block) for of_rank in self.said)}

    @property
    def lost(self) -> set[int]:
        failed = {block for of_rank in self.said for block, copied in of_rank.items() if not copied}
        return set(range(min(failed), max(failed) + 1)) if failed else set()


def ids_of(task: LoadState | SaveState) -> list[int]:
    """The jobs of a load or a save."""
    return [part.job.job_id for part in task.parts]


def some(chance: Random, blocks: BlockRange) -> RangeSet:
    """Some of the blocks, with holes."""
    return RangeSet.of(*(BlockRange(block, 1) for block in blocks if chance.random() < 0.6))


def piece(chance: Random, blocks: BlockRange, failures: float) -> JobOutcome:
    """What a rank says of some of the blocks; a report may be repeated, and name blocks that are none of the job's."""
    named = some(chance, BlockRange(blocks.start, blocks.count + chance.randrange(2)))
    failed = some(chance, blocks).intersection(named) if chance.random() < failures else RangeSet()
    return JobOutcome(named.difference(failed), failed)


def play(seed: int) -> tuple[int, int]:
    """One load or save of several groups, until all ranks have spoken; returns how many blocks arrived and did not."""
    chance, jobs = Random(seed), TransferJobs(RANKS, 1.0)
    match = BlockRange(chance.randrange(3), chance.randint(1, 6))
    extents = [
        match if group == CHAIN else BlockRange(chance.randrange(4), chance.randint(1, 4)) for group in range(GROUPS)
    ]
    runs = [
        Run(
            group,
            blocks.start,
            [b"%d of %d" % (block, group) for block in blocks],
            (),
            tuple(blocks),
            is_linked=group == CHAIN,
            slots=tuple(blocks),
            block_ids=tuple(blocks),
        )
        for group, blocks in enumerate(extents)
        if group == CHAIN or chance.random() < 0.8
    ]
    tasks: list[LoadState | SaveState]
    if loads := chance.random() < 0.5:
        plan = cast(PactPlan, Pact(match))
        tasks = [jobs.order_load(plan, runs, 0.0, synchronous=False)]
    else:
        tasks = [jobs.order_save(Owed("r", run), Pin(run.keys[-1], 0), 0.0) for run in runs]
    parts: list[Any] = [part for task in tasks for part in task.parts]
    models = {part.job.job_id: Model(part.job.blocks) for part in parts}
    silent, failures, ended = chance.randrange(RANKS), chance.choice((0.0, 0.1, 0.5)), set[int]()
    for turn in count():
        ranks = [rank for rank in range(RANKS) if (rank != silent or turn > 6) and chance.random() < 0.7]
        said = {
            rank: {
                job_id: JobOutcome(RangeSet.of(model.blocks)) if turn > 14 else piece(chance, model.blocks, failures)
                for job_id, model in models.items()
                if job_id not in ended and chance.random() < 0.7
            }
            for rank in ranks
        }
        for rank, outcomes in said.items():
            for job_id, outcome in outcomes.items():
                models[job_id].hear(rank, outcome)
        for task in [each for kind in jobs.apply_report(WorkerReport(said)) for each in cast("list[Any]", kind)]:
            assert all(models[job_id].is_complete for job_id in ids_of(task)), "a rank that said nothing has agreed"
            ended.update(ids_of(task))
            jobs.end(task)
        waits = {task.job.job_id for task in tasks} - ended
        assert not any(
            all(models[job_id].is_complete for job_id in ids_of(task)) for task in tasks if task.job.job_id in waits
        )
        if not waits:
            break
    arrived = 0
    for task in tasks:
        if isinstance(task, SaveState):
            done = task.tally.saved().done
            assert set(done.blocks()) == models[task.job.job_id].saved
        else:
            beside = any(models[part.job.job_id].lost for part in task.parts if not part.run.is_linked)
            of_chain = {block for part in task.parts if part.run.is_linked for block in models[part.job.job_id].lost}
            done = task.outcome().done
            assert set(done.blocks()) == set(match) - (set(match) if beside else of_chain)
            assert done.union(task.outcome().failed) == RangeSet.of(match)
        arrived += len(done)
    assert len(jobs) == len(tasks) - len({task.job.job_id for task in tasks} & ended)
    return (
        (arrived, sum(part.job.blocks.count for part in parts) - arrived)
        if not loads
        else (arrived, match.count - arrived)
    )


@pytest.mark.parametrize("plays", [500, pytest.param(100_000, marks=pytest.mark.soak)])
def test_p10_ranges_of_several_groups_agree_with_a_model(plays: int) -> None:
    ends = [play(seed) for seed in range(plays)]
    whole, none = (sum(1 for end in ends if not end[at]) for at in (1, 0))
    assert min(whole, none) > plays / 50, f"of {plays} plays {whole} ended whole, and {none} with nothing"
    assert len(ends) - whole - none > plays / 10, "holes were reported"
