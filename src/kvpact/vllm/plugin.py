"""vLLM's plug-in: tells it the connector's name, so that `"kv_connector": "PactConnector"` needs no module path.

Entry point `kvpact` of the group `vllm.general_plugins`, which vLLM calls in each of its processes, also those of
engines without kvpact. So it imports nothing: vLLM is told when it imports its list of connectors itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

logger = logging.getLogger(__name__)

FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory"
"""The module with vLLM's list of connectors. By itself it would bring a web framework, in seconds."""


def register() -> None:
    """Have vLLM know `PactConnector` by name. Idempotent; never raises."""
    if (module := sys.modules.get(FACTORY)) is not None:
        _tell(module)
    elif not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport())


def _tell(module: Any) -> None:
    try:
        with suppress(ValueError):  # it is known already
            module.KVConnectorFactory.register_connector("PactConnector", "kvpact.vllm", "PactConnector")
    except Exception as error:  # an engine without kvpact must not feel it
        logger.warning(
            "kvpact: vLLM cannot be told of PactConnector by its name (%r): add "
            '"kv_connector_module_path": "kvpact.vllm" to --kv-transfer-config',
            error,
        )


class _AtImport(MetaPathFinder):
    """Runs `_tell` once the module has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != FACTORY:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            _tell(module)

        with suppress(AttributeError):  # a loader that cannot be changed: vLLM then asks for the module path
            setattr(spec.loader, "exec_module", run_and_tell)  # noqa: B010
        return spec


__all__ = ["register"]
