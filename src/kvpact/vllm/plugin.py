"""vLLM's plug-in: registers kvpact's names, and checks configurations before the weights are loaded.

`"kv_connector": "PactConnector"` and a secondary tier of the `type` `PactTier` then need no module path. It refuses a
configuration that names the connector and cannot be served, or puts another one in its place.

Entry point `kvpact` of the group `vllm.general_plugins`, which vLLM calls in each of its processes, also those of
engines without kvpact. So it imports nothing: what it changes it changes when vLLM imports those modules itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

logger = logging.getLogger(__name__)

FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory"
"""The module with vLLM's list of connectors. By itself it would bring a web framework, in seconds."""

TIERS: Final = "vllm.v1.kv_offload.tiering.factory"
SPECS: Final = "vllm.v1.kv_offload.factory"
"""The modules with vLLM's lists of secondary tiers and of specs, in its own offloading."""

OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config"
"""The module that makes a spec's configuration of the engine's."""

CONFIG: Final = "vllm.config.vllm"
"""The module with `VllmConfig`, which may put another connector in the place of the one that a user named."""


def register() -> None:
    """Have vLLM know `PactConnector` by name, and leave it where it is named. Idempotent; never raises."""
    for name, change in _CHANGES.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)
    if not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport())


def _tell(module: Any) -> None:
    try:
        with suppress(ValueError):  # it is known already
            module.KVConnectorFactory.register_connector("PactConnector", "kvpact.vllm", "PactConnector")
    except Exception as error:  # an engine without kvpact must not feel it
        logger.warning(
            "kvpact: PactConnector could not be registered with vLLM (%r): add "
            '"kv_connector_module_path": "kvpact.vllm" to --kv-transfer-config',
            error,
        )


def _tell_tier(module: Any) -> None:
    with suppress(ValueError, AttributeError):  # it is known already; or this release has none
        module.SecondaryTierFactory.register_tier("PactTier", "kvpact.vllm.offload", "PactTier")


def _tell_spec(module: Any) -> None:
    with suppress(ValueError, AttributeError):
        module.OffloadingSpecFactory.register_spec("PactTieringSpec", "kvpact.vllm.offload", "PactTieringSpec")


def _keep_engine(module: Any) -> None:
    """Have a spec's configuration keep the engine's, in which alone weights and bytes of states are named."""
    with suppress(AttributeError):  # this release makes it elsewhere
        build = module.build_offloading_config
        if build.__module__ != __name__:
            module.build_offloading_config = _keeping(build)


def _keeping(build: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's function that makes a spec's configuration, which then has the engine's as `kvpact_engine`, and that of
    its KV cache as `kvpact_kv_cache`."""

    def build_and_keep(vllm_config: Any, kv_cache_config: Any) -> Any:
        config = build(vllm_config, kv_cache_config)
        with suppress(AttributeError):
            object.__setattr__(config, "kvpact_engine", vllm_config)  # it is frozen
            object.__setattr__(config, "kvpact_kv_cache", kv_cache_config)
        return config

    return build_and_keep


def _keep_named(module: Any) -> None:
    with suppress(AttributeError):  # vLLM decides elsewhere
        decide = module.VllmConfig._post_init_kv_transfer_config
        if decide.__module__ != __name__:
            module.VllmConfig._post_init_kv_transfer_config = _refusing(decide)


def _refusing(decide: Callable[[Any], None]) -> Callable[[Any], None]:
    """`VllmConfig`'s method that chooses the connector, its last but for some derived settings. It then refuses to
    replace PactConnector, and what `check_configuration` refuses."""

    def decide_or_refuse(self: Any) -> None:
        asked = self.kv_transfer_config
        named = asked.kv_connector if "PactConnector" in str(asked) else None
        decide(self)
        if named is not None and (chosen := self.kv_transfer_config.kv_connector) != named:
            from kvpact.errors import ConfigError

            raise ConfigError(
                f"kvpact: --kv-transfer-config names PactConnector, and --kv-offloading-size puts {chosen} "
                "in its place: leave one of them out"
            )
        if named is not None:
            _refuse_what_cannot_be_served(self)

    return decide_or_refuse


def _connector() -> type:
    from kvpact.vllm import PactConnector

    return PactConnector


def _of_each(vllm_config: Any) -> Iterator[Any]:
    """The configuration as vLLM gives it to each PactConnector, also to one that a MultiConnector names."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_connector == "PactConnector":
        yield vllm_config
    for child in transfer.kv_connector_extra_config.get("connectors", ()):
        if child.get("kv_connector") == "PactConnector":
            given = copy(vllm_config)
            given.kv_transfer_config = type(transfer)(**child)
            yield given


def _refuse_what_cannot_be_served(vllm_config: Any) -> None:
    from kvpact.errors import ConfigError

    try:
        from kvpact.vllm.checks import check_configuration, let_no_step_wait

        if vllm_config.kv_transfer_config.kv_connector == "MultiConnector":
            let_no_step_wait(vllm_config.kv_transfer_config.kv_connector_extra_config)
        for config in _of_each(vllm_config):
            check_configuration(config, _connector)
    except ConfigError as error:
        raise ConfigError(f"kvpact: {error}") from None
    except Exception as error:  # an unknown release: the connector will report the fault
        logger.debug("kvpact: the configuration cannot be checked before the weights are loaded: %r", error)


_CHANGES: Final = {
    FACTORY: _tell,
    CONFIG: _keep_named,
    TIERS: _tell_tier,
    SPECS: _tell_spec,
    OFFLOADING: _keep_engine,
}


class _AtImport(MetaPathFinder):
    """Makes its change once a module of `_CHANGES` has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (change := _CHANGES.get(fullname)) is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        with suppress(AttributeError):  # a loader that cannot be changed: vLLM then asks for the module path
            setattr(spec.loader, "exec_module", run_and_change)  # noqa: B010
        return spec
