"""Engines that `restart.py` compares, each with its own store in each of its lives, and what is done to the stores.

Owns the stores' folders: what they hold, their flipped bits, and how a store hangs. Measures no time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from msgspec import ValidationError

from benchmarks.e2e_engines import (
    GIB,
    NO_CACHE,
    Configure,
    LMCache,
    Mooncake,
    Run,
    Subject,
    is_there,
)
from benchmarks.e2e_runs import WAKE_UP, Prompt
from kvpact.config import load_config
from kvpact_testkit.compare.stores import disk_bytes, files_of, flip_bit
from kvpact_testkit.demo.engine import EngineProcess, EngineSettings
from kvpact_testkit.demo.messages import Output
from kvpact_testkit.demo.phases import class_arguments

QUIET_SECONDS, WRITTEN_SECONDS = 2.0, 60.0
"""A store that has not grown for so long is written; until when one waits for that."""


@dataclass(frozen=True, slots=True)
class Life:
    """`first`: with host memory for all prompts, else for the longest. `alone`: nothing makes it stand still, so that
    a peer's own time limits hold."""

    first: bool = False
    alone: bool = False


def folder_of(run: Run, peer: str) -> Path:
    """Where the peer's store is, in all of its lives."""
    return run.folder.parent / f"store-{peer}"


def bound_bytes(run: Run) -> int:
    """What a store that has a bound may take: half of all prompts and the two longest."""
    return run.all_bytes // 2 + 2 * run.longest_bytes


def _kvpact(life: Life) -> Configure:
    def configure(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        store = folder_of(run, "kvpact")
        store.mkdir(exist_ok=True)
        settings: dict[str, Any] = {
            "memory": f"{run.all_bytes + run.longest_bytes if life.first else run.longest_bytes}B",
            "tiers": [f"disk://{quote(str(store))}?capacity={bound_bytes(run)}B"],
            "stats_file": str(folder / "stats.json"),
        }
        found = run.settings(load_config(settings, {}).kv_transfer_config())
        return replace(found, arguments={**found.arguments, **class_arguments()})

    return configure


def _example(life: Life) -> Configure:
    def configure(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        extra = {"shared_storage_path": str(folder_of(run, "example"))}
        named = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        return run.settings({**named, "kv_connector_extra_config": extra})

    return configure


def _lmcache(life: Life) -> Configure:
    return _lmcache_over(life, lambda run: {"type": "fs", "base_path": str(folder_of(run, "lmcache"))})


def _nixl(life: Life) -> Configure:
    def adapter(run: Run) -> dict[str, Any]:
        store = folder_of(run, "nixl")
        store.mkdir(exist_ok=True)
        size = str(bound_bytes(run) / GIB)
        parameters = {"file_path": str(store), "use_direct_io": "true", "max_capacity_gb": size}
        return {"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": parameters}

    return _lmcache_over(life, adapter)


def _lmcache_over(life: Life, adapter_of: Callable[[Run], dict[str, Any]]) -> Configure:
    def configure(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        adapter = json.dumps(adapter_of(run))
        size = 2 * (run.all_bytes if life.first else run.longest_bytes) / GIB
        more = ("--l1-size-gb", size, "--l2-adapter", adapter)
        server = LMCache("lmcache_driven", more, {}) if life.alone else LMCache("lmcache_driven", more)
        return server(run, stack, folder)

    return configure


def _offloading(life: Life) -> Configure:
    def configure(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        from benchmarks.offloading import Offloading

        files = {"type": "fs", "root_dir": str(folder_of(run, "fs"))}
        return Offloading("fs", "TimedTieringSpec", files, life.first)(run, stack, folder)

    return configure


def _mooncake(life: Life) -> Configure:
    def configure(run: Run, stack: ExitStack, folder: Path) -> EngineSettings:
        store = folder_of(run, "mooncake")
        store.mkdir(exist_ok=True)
        return Mooncake("standalone-store", store)(run, stack, folder)

    return configure


STORES = {
    "kvpact": ("kvpact, disk", _kvpact),
    "example": ("ExampleConnector", _example),
    "lmcache": ("LMCache, fs", _lmcache),
    "nixl": ("LMCache, nixl_store_dynamic", _nixl),
    "fs": ("vLLM's offloading, fs", _offloading),
    "mooncake": ("Mooncake, SSD", _mooncake),
}
"""The word among `--peers` -> the name in the rows, and how it is started."""

PEERS = tuple(STORES)
HAVE_SERVERS = ("lmcache", "nixl", "mooncake")
"""These hang as their servers stop; the others, as their disk does."""

BOUNDED = ("kvpact", "nixl")
"""Their stores are told `bound_bytes`; the others have no setting for it."""

NOT_FORKED = ("lmcache", "nixl")
"""See `Subject.forks`."""


def subjects(peers: Iterable[str], life: Life) -> list[Subject]:
    """The engine without a cache, and these."""
    ours = "memory" if life.first else "disk"
    return [
        NO_CACHE,
        *(
            Subject(STORES[peer][0], peer, STORES[peer][1](life), ours * (peer == "kvpact"), peer not in NOT_FORKED)
            for peer in peers
        ),
    ]


def absent(peers: Iterable[str], python: str) -> list[str]:
    """Those whose packages are not here."""
    return [peer for peer in peers if not is_there(peer, python)]


def answer(engine: EngineProcess, prompt: Prompt, patience: float = 180.0) -> Output | None:
    """None if its log-probabilities are no numbers."""
    try:
        (output,) = engine.generate([prompt.ids], timeout=patience)
    except ValidationError:
        return None
    return output


def wait_written(engine: EngineProcess, store: Path) -> None:
    """Until the store has not grown for a while; the engine takes steps meanwhile, in which some write."""
    until = time.monotonic() + WRITTEN_SECONDS
    size, since = -1, time.monotonic()
    while time.monotonic() < min(until, since + QUIET_SECONDS):
        if (now := disk_bytes(store)) != size:
            size, since = now, time.monotonic()
        time.sleep(0.2)
        with suppress(ValidationError):  # what flipped bits leave in an engine's memory may spoil other prompts too
            engine.generate([WAKE_UP], max_tokens=1)


def flip_bits(store: Path, share: float, seed: int = 0) -> int:
    """Flip this share of all bits of the store's files, each at a random place; return how many that were."""
    files, choose = files_of(store), random.Random(seed)
    sizes = [path.stat().st_size for path in files]
    flips = round(sum(sizes) * 8 * share)
    for path in choose.choices(files, sizes, k=flips) if flips else ():
        flip_bit(path, choose.randrange(path.stat().st_size), choose.randrange(8))
    return flips


def children() -> set[int]:
    """Processes that this one has started."""
    texts = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return {int(word) for text in texts for word in text.split()}


def can_hang(peer: str) -> bool:
    """Whether its store can be made to hang on this machine."""
    from stalled_disk import can_stall

    return peer in HAVE_SERVERS or can_stall()


@contextmanager
def hanging(peer: str, store: Path, engine: EngineProcess, servers: set[int]) -> Iterator[None]:
    """Meanwhile the store answers nothing."""
    from stalled_disk import stalled_disk

    if peer not in HAVE_SERVERS:
        with stalled_disk(store, engine.processes()):
            yield
        return
    for pid in servers:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in servers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
