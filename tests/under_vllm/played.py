"""`PlayedConnector`: kvpact in a real engine on the CPU whose KV memory counts as a device's, which copies late.

Name it by `kv_connector_module_path`. What computes is done when its call returns; so nothing may write to what a copy
reads or writes until it is done. The environment variable PLAYED_LOG names a directory: `wrong` gets a line for each
mistake, `jobs` one for each job that was ordered, `standing` what is known of a rank's copies, after each step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpact.contract import LoadJob, SaveJob
from kvpact.memory.arena import ArenaSegment
from kvpact.testkit.device.played import PlayedDevice
from kvpact.vllm import PactConnector
from kvpact.worker import worker
from kvpact.worker.device.engine import DeviceTransferEngine

LOG = Path(os.environ["PLAYED_LOG"])
FIRST = int(os.environ.get("PLAYED_FIRST", "3"))
"""See `PlayedDevice.checks_first`."""

SEGMENTS: list[ArenaSegment] = []
"""This rank's."""


def say(file: str, line: str) -> None:
    with (LOG / file).open("a") as log:
        log.write(f"{line}\n")


def opened(config: Any, paged: Any, segment: Any, rank: int, openers: Any) -> DeviceTransferEngine:
    """In the place of `transfer_engine_for`."""
    SEGMENTS.append(segment)
    segment.place_pages(huge=False)
    segment.pages.start()
    device = PlayedDevice(int(os.environ.get("PLAYED_SEED", "1")) + rank)
    device.write_mistakes_to(LOG / "wrong")
    device.computes_at_once()
    device.checks_first = FIRST
    engine = device.open(config, paged, segment, rank)
    load, save = engine.load, engine.save

    def noted_load(jobs: Sequence[LoadJob]) -> Any:
        for job in jobs:
            say("jobs", f"load {job.synchronous} {len(job.slots)}")
        return load(jobs)

    def noted_save(jobs: Sequence[SaveJob]) -> Any:
        for job in jobs:
            say("jobs", f"save {len(job.slots)}")
        return save(jobs)

    engine.load, engine.save = noted_load, noted_save  # type: ignore[method-assign]
    return engine


worker.transfer_engine_for = opened


class PlayedConnector(PactConnector):
    """See above."""

    def build_connector_worker_meta(self) -> Any:
        """The report at the end of each step."""
        (LOG / "standing").write_text(" ".join(segment.standing.name for segment in SEGMENTS))
        return super().build_connector_worker_meta()
