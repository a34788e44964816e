"""Whether memory, leases and hook times stay flat while prompts come and go: one row for each part of the run.

vLLM's own scheduler and kvpact with memory for a tenth of the prompts and a disk below it. Batches of prompts of which
a half may have been seen before, for `--minutes`, by default 30. The last row's `growth_` columns are the last quarter
of the run over the second one: the first fills memory and disk.
"""

from __future__ import annotations

import logging
import random
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.index import resident_bytes
from benchmarks.lifecycle import transfer
from benchmarks.needs import require_vllm
from benchmarks.table import ratio, step_columns

BLOCK_SIZE = 16
TOKENS = 1024
KNOWN_PROMPTS = 400
BATCH = 16
PARTS = 20


def rows(minutes: float = 30.0) -> list[dict[str, Any]]:
    """One row for each twentieth of the run: MiB of the process's own memory, what is held at rest, CPU of steps."""
    require_vllm()
    logging.disable(logging.WARNING)
    from benchmarks.scheduler_halves import SchedulerHalf
    from kvpact_testkit.vllm.adapters import PactAdapter

    found: list[dict[str, Any]] = []
    source = random.Random(0)
    blocks = KNOWN_PROMPTS * (TOKENS // BLOCK_SIZE + 1)
    with tempfile.TemporaryDirectory(prefix="kvpact-churn-") as folder:
        fields = transfer("kvpact", blocks // 10, BLOCK_SIZE, Path(folder))
        shape = {"tokens": TOKENS, "block_size": BLOCK_SIZE, "chunk": 8192, "requests": BATCH}
        with closing(SchedulerHalf(fields, **shape)) as half:
            began, number = time.monotonic(), 0
            for part in range(1, PARTS + 1):
                steps: list[float] = []
                requests, loaded = 0, 0
                while not steps or time.monotonic() < began + minutes * 60 * part / PARTS:
                    prompts = {}
                    for _ in range(BATCH):
                        known = source.random() < 0.5
                        seed = source.randrange(KNOWN_PROMPTS) if known else KNOWN_PROMPTS + number
                        prompts[f"r{number}"] = random.Random(seed).choices(range(30_000), k=TOKENS)
                        number += 1
                    spent, tokens = half.computed_of_cache(prompts)
                    half.forget()
                    steps += spent.each_step
                    requests, loaded = requests + BATCH, loaded + tokens
                held = PactAdapter().held(half.connector)
                found.append(
                    {
                        "minute": round((time.monotonic() - began) / 60, 2),
                        "requests": requests,
                        "loaded_tokens": loaded,
                        "memory_mib": round(resident_bytes() / (1 << 20), 1),
                        "held": sum(held.values()),
                        **step_columns(steps),
                    }
                )
    quarter = PARTS // 4
    for column in ("memory_mib", "cpu_ms_step_median", "cpu_ms_step_p99"):
        early, late = (median(row[column] for row in part) for part in (found[quarter : 2 * quarter], found[-quarter:]))
        found[-1][f"growth_{column}"] = ratio(late, early)
    return found
