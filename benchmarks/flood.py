"""What 1,000 requests that arrive at once cost each step in kvpact's hooks, and whether any of them starves.

vLLM's own scheduler with a few seats and KV blocks for those alone. A third of the prompts was stored before and waits
for its turn with the others. CPU time of the scheduler's thread; where there is a disk, memory holds a quarter of what
is stored, so that most hits are read first. `overtaken` is the most requests, over all, that arrived after one and
ended in an earlier step.
"""

from __future__ import annotations

import logging
import random
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.lifecycle import random_prompts, transfer
from benchmarks.needs import require_vllm
from benchmarks.table import step_columns

BLOCK_SIZE = 16
BATCH = 8


def _measure(requests: int, tokens: int, seats: int, disk: bool, seed: int) -> dict[str, Any]:
    from benchmarks.scheduler_halves import SchedulerHalf

    stored = random_prompts(seed, tokens, requests // 3)
    prompts = [*stored, *random_prompts(seed + 1, tokens, requests - len(stored))]
    random.Random(seed).shuffle(prompts)
    blocks = requests * (tokens // BLOCK_SIZE + 2)
    with tempfile.TemporaryDirectory(prefix="kvpact-flood-") as folder:
        fields = transfer("kvpact", blocks // 12 if disk else 2 * blocks, BLOCK_SIZE, Path(folder) if disk else None)
        with closing(SchedulerHalf(fields, tokens=tokens, block_size=BLOCK_SIZE, chunk=8192, requests=seats)) as half:
            for first in range(0, len(stored), BATCH):  # few at once, so that the disk keeps up with all of them
                half.serve({f"stored{at}": stored[at] for at in range(first, min(first + BATCH, len(stored)))})
            half.forget()
            spent, found = half.computed_of_cache({f"flood{at}": prompt for at, prompt in enumerate(prompts)})
    ends = [spent.ended[f"flood{at}"] for at in range(requests)]
    overtaken = max(sum(later < end for later in ends[at + 1 :]) for at, end in enumerate(ends))
    return {
        "requests": requests,
        "tokens": tokens,
        "seats": seats,
        "tiers": "memory + disk" if disk else "memory",
        "steps": spent.steps,
        "cpu_ms": round(spent.total * 1e3 / requests, 4),
        **step_columns(spent.each_step),
        "hit_share": round(found / (len(stored) * ((tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)), 3),
        "unanswered": requests - len(spent.ended),
        "overtaken": overtaken,
    }


def rows(
    requests: tuple[int, ...] = (1000, 4000), tokens: int = 1024, seats: int = 32, disk: bool = True
) -> list[dict[str, Any]]:
    """One row for each number of requests, with memory alone and, unless `--no-disk`, with a disk below it."""
    require_vllm()
    logging.disable(logging.WARNING)
    places = (False, True) if disk else (False,)
    return [_measure(count, tokens, seats, place, 7) for count in requests for place in places]
