"""Long runs: random plays until a number of engine steps is done or a play is broken.

Owns the figures. Writes only to the terminal; plays remove their folders.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from hypothesis import strategies as st

from kvpact_testkit.cache.operations import BrokenPlay, Figures
from kvpact_testkit.cache.random_plays import SIZES, STATES_AND_DRAFTS, random_play
from kvpact_testkit.cache.subjects import (
    DISK_SLOTS,
    CacheFactory,
    lazy_pact_cache,
    pact_cache,
    pact_cache_with_all,
    pact_cache_with_disk,
    pact_cache_with_shared,
    reference_cache,
)

CALLS = 400
"""The most calls of one play; about 650 engine steps."""

PLAYS = 4
"""Plays of one seed."""

SUBJECTS: Mapping[str, CacheFactory] = {
    "memory": pact_cache,
    "memory, asynchronous": partial(pact_cache, sync_load_budget=0),
    "memory, pieces of one block": partial(pact_cache, piece_blocks=1),
    "disk": pact_cache_with_disk,
    "disk, asynchronous": partial(pact_cache_with_disk, sync_load_budget=0),
    "disk, pieces of two blocks": partial(pact_cache_with_disk, piece_blocks=2, sync_load_budget=0),
    "shared": pact_cache_with_shared,
    "disk and shared, second use": partial(pact_cache_with_all, sync_load_budget=0, admit="second-use"),
    "lazy": lazy_pact_cache,
    "lazy, asynchronous, disk": partial(lazy_pact_cache, disk_slots=DISK_SLOTS, sync_load_budget=0),
    "reference": reference_cache,
    "reference, synchronous": partial(reference_cache, asynchronous=False),
}
"""Configurations of kvpact's own cache, and of the engine's; a soak uses them in turn. Lazy ones count every free block
as about to be evicted: with a small window, how much a prompt finds depends on what came before it."""


Sizes: TypeAlias = st.SearchStrategy[dict[str, Any]]


class SoakFailure(Exception):
    """A play broke something; `broken` has the calls that repeat it."""

    def __init__(self, subject: str, seed: int, broken: BrokenPlay) -> None:
        calls = "\n    ".join(str(call) for call in broken.calls)
        super().__init__(f"{subject}, seed {seed}: {broken}\nThe calls, on {broken.settings}:\n    {calls}")
        self.subject, self.seed, self.broken = subject, seed, broken


def soak(
    steps: int,
    subjects: Mapping[str, CacheFactory] = SUBJECTS,
    *,
    first_seed: int = 0,
    parent: Path | None = None,
    sizes: Sizes = SIZES,
    progress: Callable[[Figures], object] = lambda figures: None,
) -> Figures:
    """Play until at least `steps` engine steps are done. Raises SoakFailure with the shortest script found."""
    figures = Figures()
    names = [*subjects]
    seed = first_seed
    while figures.steps < steps:
        name = names[seed % len(names)]
        broken = random_play(subjects[name], seed, CALLS, plays=PLAYS, figures=figures, parent=parent, sizes=sizes)
        if broken is not None:
            raise SoakFailure(name, seed, broken)
        seed += 1
        progress(figures)
    return figures


def report(figures: Figures, seconds: float) -> str:
    """The figures as text."""
    lines = [
        f"{figures.steps:,} engine steps, each verified, in {figures.plays:,} plays of {figures.calls:,} calls",
        f"{seconds:,.0f} s, {figures.steps / max(seconds, 1e-9):,.0f} steps a second",
    ]
    return "\n".join([*lines, *(f"{number:>12,} {what}" for what, number in sorted(figures.counts.items()) if number)])


def main() -> None:
    """`python -m kvpact_testkit.cache.soak --steps 2000000`."""
    parser = argparse.ArgumentParser(prog="python -m kvpact_testkit.cache.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--states", action="store_true", help="models with states, with drafts, only")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # tens of thousands of injected faults would each be worth a line
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() else Path(tempfile.gettempdir())
    began = time.monotonic()

    def progress(figures: Figures) -> None:
        if sys.stderr.isatty():
            print(f"\r{figures.steps:,} steps", end="", file=sys.stderr, flush=True)

    try:
        sizes = STATES_AND_DRAFTS if options.states else SIZES
        figures = soak(options.steps, first_seed=options.first_seed, parent=parent, sizes=sizes, progress=progress)
    except SoakFailure as failure:
        print(failure)
        raise SystemExit(1) from None
    print(f"\n{report(figures, time.monotonic() - began)}\nnothing broken, nothing held at the end of any play")


if __name__ == "__main__":
    main()
