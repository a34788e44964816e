"""How long a scheduler step is inside kvpact while its tiers are busy: prepare, commit, save, report under write load.

    python benchmarks/step_time.py [--steps N] [--directory DIR]

One process plays the scheduler: every 8th step a new prompt of 32 blocks x 4 MiB is saved (and written behind to disk
by the tier's threads) and an old one is loaded, the other steps decode 64 requests. Prints the median, the 99th and the
99.9th percentile of the time spent in the cache per step, against the same steps without a disk tier.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from kvpact.cache.cache import PactCache
from kvpact.cache.memory import EngineKV
from kvpact.config import load_config
from kvpact.contract import JobOutcome, LoadJob, SaveJob, StepWork, WorkerReport
from kvpact.identity.groups import one_group
from kvpact.identity.keys import Namespace, RequestIdentity
from kvpact.memory.arena import Arena, ArenaSegment
from kvpact.ranges import RangeSet
from kvpact.tiers.disk.tier import DiskTier
from kvpact.tiers.executor import TierExecutor

BLOCK_SIZE = 128
SLOT_BYTES = 4 << 20
PROMPT_BLOCKS = 32
SLOTS = 256
DECODING = 64


class Request:
    """A request as the cache sees it."""

    def __init__(self, name: str, length: int) -> None:
        self.request_id = name
        seed = hash(name) & 0xFFFF
        self.token_ids = [seed + position for position in range(length)]
        self.identity = RequestIdentity()
        self.may_load = True


def obey(work: StepWork) -> WorkerReport:
    """Workers that have copied everything at once: their time is not the scheduler's."""
    jobs: list[LoadJob | SaveJob] = [*work.loads, *work.saves]
    return WorkerReport({0: {job.job_id: JobOutcome(RangeSet.of(job.blocks)) for job in jobs}})


def run(steps: int, directory: Path | None) -> list[float]:
    """Seconds in the cache for each step."""
    segment = ArenaSegment.create(SLOTS, SLOT_BYTES)
    segment.pages.take_all()
    namespace = Namespace({"benchmark": "step_time"})
    tiers = []
    if directory is not None:
        tiers = [TierExecutor(DiskTier.open(directory, namespace, SLOT_BYTES, 4 << 30), 2, 1 << 30)]
    cache = PactCache(
        load_config({"shutdown_timeout": "30s"}, {}),
        EngineKV(namespace.digest, one_group(BLOCK_SIZE)),
        arena=Arena([segment]),
        tiers=tiers,
        clock=time.monotonic,
    )
    table = list(range(1, PROMPT_BLOCKS + 2))
    decoding = [Request(f"d{number}", 40) for number in range(DECODING)]
    taken: list[float] = []
    for step in range(steps):
        prompt = Request(f"p{step // 8}", PROMPT_BLOCKS * BLOCK_SIZE + 10)
        old = Request(f"p{max(0, step // 8 - 3)}", PROMPT_BLOCKS * BLOCK_SIZE + 10)
        old.request_id += "-again"
        spent = 0.0

        def timed(began: float) -> float:
            return time.perf_counter() - began

        if step % 8 == 0:
            began = time.perf_counter()
            cache.prepare_external_match(prompt, 0)
            cache.note_computed(prompt, len(prompt.token_ids), lambda: table)
            match = cache.prepare_external_match(old, 0)
            if match is not None and match.num_tokens:
                cache.commit_external_match(old, match, match.num_tokens, table)
            spent += timed(began)
        began = time.perf_counter()
        for request in decoding:
            cache.note_computed(request, 40, lambda: table)
        work = cache.end_step()
        spent += timed(began)
        report = obey(work)
        began = time.perf_counter()
        cache.apply_report(report)
        if step % 8 == 0:
            cache.request_finished(prompt.request_id)
            cache.request_finished(old.request_id)
        spent += timed(began)
        taken.append(spent)
        time.sleep(0.005)  # the forward pass
    cache.shutdown()
    segment.close()
    return taken


def main() -> None:
    """Print both distributions and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        for name, place in (("memory", None), ("memory + disk, writing", Path(directory))):
            taken = run(arguments.steps, place)
            cuts = quantiles(taken, n=1000)
            figures[name] = (median(taken), cuts[989], cuts[998], max(taken))
            shown = "  ".join(f"{value * 1e3:8.3f}" for value in figures[name])
            print(f"{name:24} median, p99, p99.9, max [ms]: {shown}")
    ratio = figures["memory + disk, writing"][2] / figures["memory"][2]
    print(f"p99.9 with the disk tier over without: {ratio:.2f}")


if __name__ == "__main__":
    main()
