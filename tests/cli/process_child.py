"""A process that uses one tier, which hangs, and comes to its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvpact.tiers.executor import Job, LookupDone, PutDone, TierExecutor
from kvpact.tiers.registry import open_store
from kvpact.tiers.shared.tier import SharedTier
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document, empty_buffers, filled_buffers
from kvpact_testkit.tier.harness import NAMESPACE

SLOT = 64 << 10
HANGS_AFTER = 0.3
CLOSING_SECONDS = 0.5


def hang_from(marker: Path) -> None:
    """Once `marker` is there no file opens any more: the call waits in the kernel, as for a server that is away."""
    really = os.open

    def opened(*arguments: Any, **named: Any) -> int:
        if marker.exists():
            os.read(os.pipe()[0], 1)
        return really(*arguments, **named)

    os.open = opened


def main(url: str, how: str) -> None:
    hang_from(Path(parse_tier_url(url).path) / "hang")
    tier = SharedTier(open_store(parse_tier_url(url)), NAMESPACE, SLOT)
    queue = TierExecutor(tier, 4, 1 << 30)
    print("open", flush=True)
    sys.stdin.readline()
    wanted = document("document", 4)
    for number in range(3):
        queue.submit(Job(("lookup", number), wanted.keys, before=(), kind=LookupDone))
        queue.submit(Job(("get", number), wanted.keys, empty_buffers(4, SLOT, 1), before=()))
        queue.submit(Job(("put", number), wanted.keys, filled_buffers(wanted.keys, SLOT, 1), (), 4 * SLOT, PutDone))
    time.sleep(HANGS_AFTER)
    print(f"hangs {queue.under_way}", flush=True)
    if how == "closed":
        threading.Thread(target=tier.close, daemon=True).start()
        queue.close(CLOSING_SECONDS)
    print("end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
