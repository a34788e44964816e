"""Copies and loads of one rank that a `kvpact.events.timeline` follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from kvpact.contract import LoadJob
from kvpact.events.timeline import Timeline
from kvpact.worker.device.base import Device
from kvpact.worker.transfer import RankTransfers


def follow_copies(timeline: Timeline, device: Device) -> None:
    """Follow a device's copies: "submit" is a call of the thread that computes, "copy" lasts until the device is asked.

    Its `seconds` are the device's own. An engine keeps the device's methods: called before it is made.
    """
    under_way: deque[tuple[float, Any, Any]] = deque()
    is_done = device.is_done

    def between_events(call: Callable[..., None], targets: Any, sources: Any, sizes: Any, stream: Any) -> None:
        begin = device.record(stream)
        call(targets, sources, sizes, stream)
        under_way.append((monotonic(), begin, device.record(stream)))

    def is_done_now(event: Any) -> bool:
        done = is_done(event)
        while done and under_way and is_done(under_way[0][2]):
            given_at, begin, end = under_way.popleft()
            timeline.write("copy", given_at, monotonic(), {"seconds": device.seconds_between(begin, end)})
        return done

    for kind in ("load", "save"):
        vars(device)[kind] = partial(between_events, getattr(device, kind))
        timeline.follow(device, kind, "submit", partial(_submitted, kind))
    vars(device)["is_done"] = is_done_now


def _submitted(kind: str, _: None, targets: Any, sources: Any, sizes: Any, stream: Any) -> Mapping[str, object]:
    return {"kind": kind, "copies": len(sizes), "bytes": int(sizes.sum())}


def follow_loads(timeline: Timeline, transfers: RankTransfers) -> None:
    """Follow a rank's loads, "begin", until the rank reports that they ended, "seen"."""
    timeline.follow(transfers, "start_loads", "begin", _begun)
    timeline.follow(transfers, "poll", "seen", lambda ended: {"jobs": [*ended]} if ended else None)


def _begun(_: None, loads: Sequence[LoadJob]) -> Mapping[str, object]:
    return {"loads": [(job.job_id, job.request_id, len(job.slots), job.synchronous) for job in loads]}
