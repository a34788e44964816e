"""Checks of a device's copies while they serve: blocks are read in another way and compared with their slots.

Owns the choice of jobs to check, the thread that checks them, and the rank's standing in the scheduler's process. Reads
blocks as the test at the start does: see `differences`. A check reads live memory: it gives no verdict on a save that
was cancelled, as the engine may have written to its blocks since (H116), nor does a check that fails (H117).
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
"""Right copies of each kind (loads, saves, synchronous loads) until which all of them are checked."""

ONE_IN: Final = 1000
"""Later copies of a kind for each one that is checked."""

LOAD: Final = "load"
SAVE: Final = "save"
STEP_LOAD: Final = "load of a step"


class WrongCopy(KvpactError):
    """Copy whose target differs from its source."""


class GivenUp(KvpactError):
    """Save that was cancelled, so that its blocks may have other content by now."""


class Verdict(Enum):
    """Result of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    """Bytes differ; no other fault counts as wrong."""
    CANNOT_SAY = "cannot say"
    """The check was not made, or not finished; it proves nothing."""


@dataclass(slots=True, eq=False)
class Check:
    """Check of one job."""

    job: Job
    fence: Event = None
    verdict: Verdict | None = None
    """Result, None until the check has ended; written last."""
    error: Exception | None = None
    """Difference, or reason why the check was not made; None for a cancelled save."""

    def end(self, verdict: Verdict, error: Exception | None = None) -> None:
        """End with this verdict."""
        self.error = error
        self.verdict = verdict


class Proof:
    """Checks of one rank. All but `_run` is for the computing thread."""

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
        """`stores` is false for a rank that makes no saves: its loads prove it. `model` names the model, for people."""
        self._segment = segment
        self._device = device
        self._first = first
        self._model = model
        self._needed = (LOAD, SAVE) if stores else (LOAD,)
        self._later = {kind: _sampled() for kind in (LOAD, SAVE, STEP_LOAD)}
        self._owed: Counter[str] = Counter()
        """Kind of job -> sampled jobs that could not be checked; as many of the next ones are checked instead."""
        self._said: set[UnmadeCheck] = set()
        """Reasons for skipped checks that the log has."""
        self._stream = device.create_stream()
        self._waiting: SimpleQueue[Check | None] = SimpleQueue()
        self._is_running = False
        self.begin_anew(paged)

    def begin_anew(self, paged: PagedKV) -> None:
        """Begin without any proven copy, because the KV memory lies here from now on."""
        self._paged = paged
        self._right = dict.fromkeys((LOAD, SAVE, STEP_LOAD), 0)
        """Kind of job -> number of jobs found right."""
        self._publish()

    def wants(self, job: Job) -> bool:
        """True if a job must be checked before it is reported; counts it."""
        kind = _kind_of(job)
        is_sampled = next(self._later[kind])  # by the job's number: no job's turn depends on other jobs' ends
        if is_sampled or self._right[kind] < self._first:
            return True
        is_owed = self._owed[kind] > 0
        self._owed[kind] -= is_owed
        return is_owed

    def owe(self, job: Job) -> None:
        """Check another job of this kind, because this one could not be checked."""
        self._owed[_kind_of(job)] += self._right[_kind_of(job)] >= self._first

    def begin(self, job: Job) -> Check:
        """Check a job whose copies are done, behind the computation so far, on a thread of its own."""
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
        """Check a job whose copies are done with the event, while the caller waits."""
        check = Check(job, event)
        self._carry_out(check)
        return check

    def take(self, check: Check) -> None:
        """Count a check that has ended, and set the segment's standing."""
        if check.verdict is Verdict.WRONG:
            self._segment.standing = Standing.REFUTED
        elif check.verdict is Verdict.RIGHT:
            self._right[_kind_of(check.job)] += 1
            self._publish()
        else:
            self.owe(check.job)
            self._count_unmade(check)

    @property
    def is_proven(self) -> bool:
        """True once enough copies were right; a later one that cannot be checked is trusted."""
        return all(self._right[kind] >= self._first for kind in self._needed)

    def _publish(self) -> None:
        if self._segment.standing is not Standing.REFUTED:
            self._segment.standing = Standing.PROVEN if self.is_proven else Standing.OPEN

    def _count_unmade(self, check: Check) -> None:
        """Count a skipped check. The log has the first one of each reason."""
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
                "cancelled for a reset" if reason is UnmadeCheck.GIVEN_UP else repr(check.error),
                "" if self.is_proven else f", and until {self._first} of each kind are right, tiers get no blocks",
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
        """Raise WrongCopy if the bytes of a block differ from its slot's. Raises GivenUp.

        Differences read before a save was cancelled count.
        """
        paged = self._paged
        group_id = job.group_id
        run = partial(self._device.run, self._stream)
        wrong = set[int]()
        for found in differences(paged, self._segment, group_id, job.block_ids, job.slots, run):
            if self._is_given_up(job):
                break
            wrong |= found
        if not wrong and self._is_given_up(job):
            raise GivenUp
        if wrong:
            layers = paged.cache_groups[group_id]
            size = sum(paged.layouts[group_id].layer_page_bytes)
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
