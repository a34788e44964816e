"""A device whose copies a timeline follows: what the thread gave, and the device's own time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="no engine is installed; `make setup` installs one")

from test_step_times import BLOCK_BYTES, BYTES_PER_BYTE, BYTES_PER_SECOND, COPY_SECONDS, LAYERS, memory_of

from kvpact.contract import LoadJob, SaveJob
from kvpact.events.timeline import Timeline
from kvpact.worker.device.engine import DeviceTransferEngine
from kvpact.worker.timed import follow_copies
from kvpact_testkit.device.clocked import ClockedDevice


def test_each_call_has_a_line_and_the_devices_own_time(tmp_path: Path) -> None:
    paged, segment = memory_of("layer by layer")
    device = ClockedDevice(BYTES_PER_SECOND, COPY_SECONDS, BYTES_PER_BYTE)
    follow_copies(Timeline(tmp_path), device)
    engine = DeviceTransferEngine(paged, segment, device, len(segment.memory))
    (load,) = engine.load([LoadJob(1, "r", 0, (0, 2), (5, 3), synchronous=True)])
    (save,) = engine.save([SaveJob(2, "r", 0, (4,), (1,))])
    engine.submit_all()
    device.synchronize()
    assert load.ended
    assert save.ended
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    given = [(line["kind"], line["copies"], line["bytes"]) for line in lines if line["span"] == "submit"]
    page = BLOCK_BYTES // LAYERS // BYTES_PER_BYTE
    assert given == [("load", 2 * LAYERS, 2 * LAYERS * page), ("save", LAYERS, LAYERS * page)]
    seconds = [line["seconds"] for line in lines if line["span"] == "copy"]
    assert seconds == pytest.approx(
        [blocks * (BLOCK_BYTES / BYTES_PER_SECOND + LAYERS * COPY_SECONDS) for blocks in (2, 1)]
    )
