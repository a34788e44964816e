"""kvpact under stock vLLM: name `PactConnector` with `"kv_connector_module_path": "kvpact.vllm"`.

The import is lazy: vLLM's front end imports this module too, and reading `kvpact` must not load the engine. Floor 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpact.vllm.connector import PactConnector

__all__ = ["PactConnector"]


def __getattr__(name: str) -> object:
    if name == "PactConnector":
        from kvpact.vllm.connector import PactConnector

        return PactConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
