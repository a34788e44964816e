"""The releases of vLLM that kvpact is written for and tested on. Imports nothing of vLLM.

This decides only whether a release is known: the other modules of this folder inspect vLLM's own objects, so that a
release between two of these is served too. `kvpact_testkit.vllm.releases` lists what each offers.
"""

from __future__ import annotations

from kvpact.errors import ConfigError

SERIES = ("0.30", "0.31", "0.32", "0.33")
"""The last four minor releases. The tests drive the scheduler of each, and start engines of 0.30, 0.32 and 0.33."""

LAST_COMMIT = "kvpact's commit b9a0c7b9 is the last one that serves 0.28 and 0.29"
"""Advice to users of a release that is too old."""


def is_known(version: str) -> bool:
    """True if a version such as "0.32.1+cpu" belongs to one of the releases."""
    return ".".join(version.split(".")[:2]) in SERIES


OFFLOADS_SINCE = "0.32"
"""The release whose own offloading takes a `PactTier`."""


def refuse_unread(version: str) -> None:
    """Raise ConfigError for a release on which the step hook is not known to be right.

    How a model runner takes in a step's numbers was read in each release of `SERIES`.
    """
    if not is_known(version):
        raise ConfigError(
            f"the step hook is not known to be right on vLLM {version}, only on {', '.join(SERIES)}: "
            "leave worker_cls out"
        )


def refuse_older(version: str, oldest: str = SERIES[0], who: str = "kvpact serves") -> None:
    """Raise ConfigError for a release before the oldest. A build of vLLM's own sources ("dev") is never refused."""
    series = version.split(".")[:2]
    if "dev" in version or not all(number.isdecimal() for number in series):
        return
    if [int(number) for number in series] < [int(number) for number in oldest.split(".")]:
        raise ConfigError(
            f"vLLM {version} is installed, and {who} {oldest} and later: install one of {oldest} to {SERIES[-1]}, "
            f"which are tested{f'; {LAST_COMMIT}' if oldest == SERIES[0] else ''}"
        )
