"""kvpact under stock vLLM: name `PactConnector` with `"kv_connector_module_path": "kvpact.vllm"`.

`scheduler_context` is for other connectors. The imports are lazy: vLLM's front end imports this module too, and reading
`kvpact` must not load the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpact.vllm.connector import PactConnector
    from kvpact.vllm.context import scheduler_context

__all__ = ["PactConnector", "scheduler_context"]


def __getattr__(name: str) -> object:
    if name in __all__:
        import vllm

        from kvpact.vllm.compat.releases import refuse_older

        refuse_older(str(vllm.__version__))
    if name == "PactConnector":
        try:
            from kvpact.vllm.connector import PactConnector
        except ImportError as error:
            from kvpact.vllm.compat.shape import refuse_unknown

            refuse_unknown(error)
            raise

        return PactConnector
    if name == "scheduler_context":
        from kvpact.vllm.context import scheduler_context

        return scheduler_context
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
