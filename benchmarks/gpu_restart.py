"""On a GPU: time to first token from a disk of kvpact, also below vLLM's offloading, in a new process.

A first process computes the prompts and stops; a second one reads them, past the page cache. `over_local` is the time
over the second process's own local hit of the same prompt. Runs on a CPU, too, to try it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.gpu_engines import THROUGH, Bench
from benchmarks.gpu_first_token import first_token, row_of
from benchmarks.needs import require_known
from kvpact_testkit.demo.phases import drop_page_cache


def rows(
    tokens: tuple[int, ...] = (2048, 8192, 32768), readings: int = 3, through: str = "connector"
) -> Iterator[dict[str, Any]]:
    """A row of each length from the disk, and of its local hit; `through` is that of `kvpact serve`."""
    require_known("--through", (through,), ("connector", "offloading"))
    subject = "kvpact" if through == "connector" else THROUGH
    longest = max(tokens)
    with tempfile.TemporaryDirectory(prefix="kvpact-gpu-") as name:
        bench = Bench.at(Path(name))
        disk = bench.folder / "disk"
        disk.mkdir()
        kept = (sum(tokens) * readings + 2 * longest) * bench.token_bytes
        tiers = (f"disk://{quote(str(disk))}?capacity={2 * kept}B",)
        asked = {length: bench.prompts(length, readings, length) for length in tokens}
        room = (longest + 64, longest + 8192, 2 * longest)
        with bench.engine(subject, "first", *room, tiers=tiers) as engine:
            bench.warm(engine, longest)  # nothing is written to a tier before copies have proven themselves
            for prompts in asked.values():
                engine.generate(prompts, max_tokens=1)
            bench.forget(engine)
        drop_page_cache(disk)
        with bench.engine(subject, "second", *room, tiers=tiers) as engine:
            bench.warm(engine, longest)
            for length, prompts in asked.items():
                disk_hits, local = [], []
                for prompt in prompts:
                    disk_hits.append(first_token(engine, prompt))
                    local.append(first_token(engine, prompt))
                    bench.forget(engine)
                yield row_of(length, "local hit", local)
                yield row_of(length, f"{subject}, disk, new process", disk_hits, over_local=local)
