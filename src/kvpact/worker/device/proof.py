"""Whether a device's copies are right, asked again while they serve: blocks are read by another way and compared.

Owns which jobs are checked, the thread that checks them, and what the scheduler's process is told of it. Blocks are
read as in the trial at the start: see `differences`. A check reads memory that is alive: of a save that was given up it
says nothing, as the engine may have written to its blocks since (H116). A check that fails says nothing either (H117).
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from queue import SimpleQueue
from typing import Final

from kvpact.contract import SaveJob
from kvpact.errors import KvpactError
from kvpact.memory.arena import ArenaSegment, Standing
from kvpact.metrics import UnmadeCheck
from kvpact.threads import start_background
from kvpact.worker.copy.base import Job
from kvpact.worker.device.base import Device, Event
from kvpact.worker.paged import PagedKV
from kvpact.worker.round_trip import differences

logger = logging.getLogger(__name__)

FIRST: Final = 64
"""Loads, saves, and loads that a step waits for, all of which are checked."""

ONE_IN: Final = 1000
"""Later, of each kind."""

LOAD, SAVE, STEP_LOAD = "load", "save", "load of a step"


class WrongCopy(KvpactError):
    """A copy did not do what it said."""


class GivenUp(KvpactError):
    """A save's blocks may have other content by now."""


class Verdict(Enum):
    """The end of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    """Bytes differ: nothing else is wrong."""
    CANNOT_SAY = "cannot say"
    """The check was not made, or not to its end; it proves nothing."""


@dataclass(slots=True, eq=False)
class Check:
    """One job's."""

    job: Job
    fence: Event = None
    verdict: Verdict | None = None
    """None until it has ended; written last."""
    error: Exception | None = None
    """The difference, or why the check was not made; None of a save that was given up."""

    def end(self, verdict: Verdict, error: Exception | None = None) -> None:
        """End with this verdict."""
        self.error = error
        self.verdict = verdict


class Proof:
    """One rank's. All but `_run` is for the computing thread."""

    def __init__(
        self,
        paged: PagedKV,
        segment: ArenaSegment,
        device: Device,
        *,
        stores: bool,
        first: int = FIRST,
        model: str = "a model",
    ) -> None:
        """`stores` is false of a rank that makes no saves: its loads prove it. `model` names it, for people."""
        self._paged, self._segment, self._device, self._first = paged, segment, device, first
        self._model = model
        self._needed = (LOAD, SAVE) if stores else (LOAD,)
        self._later = {kind: _sampled() for kind in (LOAD, SAVE, STEP_LOAD)}
        self._owed: Counter[str] = Counter()
        """Kind of job -> sampled jobs that could not be checked: as many of the next ones are."""
        self._said: set[UnmadeCheck] = set()
        """Reasons why a check was not made that the log has."""
        self._stream = device.create_stream()
        self._waiting: SimpleQueue[Check | None] = SimpleQueue()
        self._is_running = False
        self.begin_anew(paged)

    def begin_anew(self, paged: PagedKV) -> None:
        """The KV memory lies here, from now on: nothing is known of copies there."""
        self._paged = paged
        self._right = dict.fromkeys((LOAD, SAVE, STEP_LOAD), 0)
        """Kind of job -> jobs that were found to be right."""
        self._tell()

    def wants(self, job: Job) -> bool:
        """Whether a job is to be checked before it is reported."""
        kind = _kind_of(job)
        is_sampled = next(self._later[kind])  # by the job's number: no job's turn depends on how others ended
        if is_sampled or self._right[kind] < self._first:
            return True
        is_owed = self._owed[kind] > 0
        self._owed[kind] -= is_owed
        return is_owed

    def owe(self, job: Job) -> None:
        """A job that was to be checked was not: another one of its kind is."""
        self._owed[_kind_of(job)] += self._right[_kind_of(job)] >= self._first

    def begin(self, job: Job) -> Check:
        """Check a job whose copies are done, behind what was computed so far, on a thread of its own."""
        check = Check(job)
        if self._is_given_up(job):
            check.end(Verdict.CANNOT_SAY)
            return check
        try:
            check.fence = self._device.record(self._device.current_stream())
            if not self._is_running:
                start_background("kvpact-check", self._run)
                self._is_running = True
        except Exception as error:
            check.end(Verdict.CANNOT_SAY, error)
        else:
            self._waiting.put(check)
        return check

    def check_now(self, job: Job, event: Event) -> Check:
        """Check a job whose copies are done when the event is, while the caller waits."""
        check = Check(job, event)
        self._carry_out(check)
        return check

    def take(self, check: Check) -> None:
        """Count a check that has ended, and tell what follows from it."""
        if check.verdict is Verdict.WRONG:
            self._segment.standing = Standing.REFUTED
        elif check.verdict is Verdict.RIGHT:
            self._right[_kind_of(check.job)] += 1
            self._tell()
        else:
            self.owe(check.job)
            self._count_unmade(check)

    @property
    def is_proven(self) -> bool:
        """Whether as many copies were right as are needed: a later one that cannot be checked is trusted."""
        return all(self._right[kind] >= self._first for kind in self._needed)

    def _tell(self) -> None:
        if self._segment.standing is not Standing.REFUTED:
            self._segment.standing = Standing.PROVEN if self.is_proven else Standing.OPEN

    def _count_unmade(self, check: Check) -> None:
        """Count a check that was not made. The log has the first one of each reason."""
        reason = UnmadeCheck.FAILED if check.error is not None else UnmadeCheck.GIVEN_UP
        self._segment.count_unmade(reason)
        if reason not in self._said:
            self._said.add(reason)
            logger.log(
                logging.INFO if reason is UnmadeCheck.GIVEN_UP else logging.WARNING,
                "a %s on %s could not be checked (%s), which proves nothing: the next ones are checked%s "
                "(later ones are counted in unmade_checks)",
                _kind_of(check.job),
                self._device.name,
                "given up for a reset" if reason is UnmadeCheck.GIVEN_UP else repr(check.error),
                "" if self.is_proven else f", and until {self._first} of each kind are right, tiers get nothing",
            )

    def close(self) -> None:
        """End the thread, after the checks that wait."""
        self._waiting.put(None)

    def _run(self) -> None:
        is_attached = False
        while (check := self._waiting.get()) is not None:
            try:
                if not is_attached:
                    self._device.attach()
                is_attached = True
            except Exception as error:
                check.end(Verdict.CANNOT_SAY, error)
            else:
                self._carry_out(check)

    def _carry_out(self, check: Check) -> None:
        try:
            self._device.stream_wait(self._stream, check.fence)
            self._compare(check.job)
        except WrongCopy as error:
            check.end(Verdict.WRONG, error)
        except GivenUp:
            check.end(Verdict.CANNOT_SAY)
        except Exception as error:
            check.end(Verdict.CANNOT_SAY, error)
        else:
            check.end(Verdict.RIGHT)

    def _is_given_up(self, job: Job) -> bool:
        return isinstance(job, SaveJob) and job.job_id < self._segment.judged_from

    def _compare(self, job: Job) -> None:
        """Raise WrongCopy unless each block is what its slot is. Raises GivenUp.

        What was read before a save was given up counts, if it differs.
        """
        paged, group_id, run = self._paged, job.group_id, partial(self._device.run, self._stream)
        wrong = set[int]()
        for found in differences(paged, self._segment, group_id, job.block_ids, job.slots, run):
            if self._is_given_up(job):
                break
            wrong |= found
        if not wrong and self._is_given_up(job):
            raise GivenUp
        if wrong:
            layers, size = paged.cache_groups[group_id], sum(paged.layouts[group_id].layer_page_bytes)
            first = paged.layers[layers.start]
            raise WrongCopy(
                f"a {_kind_of(job)} of {len(job.slots)} blocks of {self._model}, KV cache group {group_id}, "
                f"{len(layers)} layers, {size} bytes a block (the first layer: {first.tensor.dtype} "
                f"{list(first.tensor.shape)}, {first.chunks} runs of {first.chunk_bytes} bytes a block, block stride "
                f"{first.block_stride}) on "
                f"{self._device.name}: {len(wrong)} blocks hold other bytes than their slots"
            )


def _sampled() -> Iterator[bool]:
    """True once in each `ONE_IN`, at random."""
    while True:
        chosen = random.randrange(ONE_IN)
        yield from (number == chosen for number in range(ONE_IN))


def _kind_of(job: Job) -> str:
    if isinstance(job, SaveJob):
        return SAVE
    return STEP_LOAD if job.synchronous else LOAD


__all__ = ["Check", "Proof", "Verdict", "WrongCopy"]
