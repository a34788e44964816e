"""Modules under their old names: importing one warns and returns the module of the new name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "kvpact.blocks": "kvpact.identity.keys",
    "kvpact.epochs": "kvpact.identity.epochs",
    "kvpact.ledger": "kvpact.cache.ledger",
    "kvpact.tier_urls": "kvpact.tiers.urls",
    "kvpact.transfer": "kvpact.worker.transfer",
    "kvpact.tiers.kinds": "kvpact.tiers.registry",
    "kvpact.testkit.conformance": "kvpact.testkit.cache.conformance",
    "kvpact.testkit.findings": "kvpact.testkit.results",
    "kvpact.testkit.machine": "kvpact.testkit.cache.machine",
    "kvpact.testkit.report": "kvpact.testkit.results",
    "kvpact.testkit.simple_connector": "kvpact.testkit.vllm.simple_connector",
    "kvpact.testkit.soak": "kvpact.testkit.cache.soak",
    "kvpact.testkit.subjects": "kvpact.testkit.cache.subjects",
    "kvpact.testkit.verdict": "kvpact.testkit.results",
    "kvpact.testkit.vllm_adapters": "kvpact.testkit.vllm.adapters",
    "kvpact.testkit.vllm_driver": "kvpact.testkit.vllm.driver",
    "kvpact.testkit.vllm_engine": "kvpact.testkit.vllm.engine",
    "kvpact.testkit.vllm_lab": "kvpact.testkit.vllm.harness",
    "kvpact.testkit.vllm_scenarios": "kvpact.testkit.vllm.scenarios",
    "kvpact.testkit.vllm_releases": "kvpact.testkit.vllm.releases",
    "kvpact.testkit.vllm_seams": "kvpact.testkit.vllm.compat",
}
"""Old name -> new name of modules that the documentation named. Kept until 1.0."""


class _Redirect(MetaPathFinder, Loader):
    """Finds the modules in `MOVED`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name into `sys.modules`, from where the import system returns it."""
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is {new} now", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


def moved_names(package: str, home: str, *names: str) -> Callable[[str], object]:
    """A `__getattr__` for a package that was a module with these names, which are in `home` now."""
    return _found_elsewhere(package, {name: f"{home}.{name}" for name in names})


def renamed(module: str, **names: str) -> Callable[[str], object]:
    """A `__getattr__` for a module in which names changed: old name -> new name."""
    return _found_elsewhere(module, {old: f"{module}.{new}" for old, new in names.items()})


def _found_elsewhere(module: str, places: Mapping[str, str]) -> Callable[[str], object]:
    def find(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = places[name].rpartition(".")
        shown = new if home == module else places[name]
        warnings.warn(f"{module}.{name} is {shown} now", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), new)

    return find


def redirect() -> None:
    """Start redirecting imports of old names. A second call does nothing."""
    if not any(isinstance(finder, _Redirect) for finder in sys.meta_path):
        sys.meta_path.append(_Redirect())
