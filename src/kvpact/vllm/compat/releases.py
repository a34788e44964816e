"""The releases of vLLM that kvpact is written for and tested on, and what each offers. Imports nothing of vLLM.

At run time this table decides only whether a release is known: the other modules of this folder inspect vLLM's own
objects, so that a release between two of these is served too. Tests compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpact.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a release offers."""

    block_tables: bool = True
    """Connectors get the KV cache manager (`bind_kv_cache_manager`), not the block pool alone."""
    failed_requests: bool = True
    """A connector can report that a request's load failed as a whole; else it names blocks."""
    block_layouts: bool = True
    """A connector can ask for a layout with all layers of a block side by side."""
    counts_held_blocks: bool = False
    """A block used as often as there are running requests counts as one that all of them share."""
    tells_of_sleep: bool = False
    """A worker's connector is told before KV memory goes away for a sleep, and when it is there again."""
    loads_after_forward: bool = True
    """`start_load_kv` comes after the forward pass, unless the step has a load that it waits for."""
    pins_host_memory: bool = True
    """vLLM has a function that pins host memory for its own offloading."""
    hits_by_source: bool = True
    """The statistics of the prefix cache name the source of a hit's tokens."""


_OF_0_28 = Release(
    block_tables=False,
    failed_requests=False,
    block_layouts=False,
    counts_held_blocks=True,
    loads_after_forward=False,
    pins_host_memory=False,
    hits_by_source=False,
)
_OF_0_29 = replace(_OF_0_28, block_layouts=True, loads_after_forward=True)
_OF_0_30 = Release(counts_held_blocks=True, pins_host_memory=False, hits_by_source=False)

RELEASES = {
    "0.28.0": _OF_0_28,
    "0.29.0": _OF_0_29,
    "0.30.0": _OF_0_30,
    "0.31.0": _OF_0_30,
    "0.32.0": Release(),
    "0.33.0": Release(tells_of_sleep=True),
}
"""The last six minor releases -> what each offers. The tests drive the scheduler of each, and start engines of 0.28,
0.30 and 0.32."""

SERIES = tuple(version.rpartition(".")[0] for version in RELEASES)
"""The known releases without the patch number: "0.28"."""


def is_known(version: str) -> bool:
    """Whether a version such as "0.32.1+cpu" belongs to one of the releases."""
    return ".".join(version.split(".")[:2]) in SERIES


def refuse_older(version: str) -> None:
    """Raise ConfigError for a release before all of the table. A build of vLLM's own sources ("dev") may be of any."""
    series = version.split(".")[:2]
    if "dev" in version or not all(number.isdecimal() for number in series):
        return
    if [int(number) for number in series] < [int(number) for number in SERIES[0].split(".")]:
        raise ConfigError(
            f"vLLM {version} is installed, and kvpact serves {SERIES[0]} and later: install one of {SERIES[0]} to "
            f"{SERIES[-1]}, which are tested"
        )
