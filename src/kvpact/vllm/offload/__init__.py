"""kvpact's tiers inside vLLM's own OffloadingConnector, 0.32 and later: `PactTier` below its host memory.

`PactTieringSpec` is vLLM's `TieringOffloadingSpec`, after whose resets no request's older blocks are stored. The
imports are lazy: vLLM's plug-in names both, and reading `kvpact` must not load the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpact.vllm.offload.spec import PactTieringSpec
    from kvpact.vllm.offload.tier import PactTier

__all__ = ["PactTier", "PactTieringSpec"]


def __getattr__(name: str) -> object:
    if name == "PactTier":
        from kvpact.vllm.offload.tier import PactTier

        return PactTier
    if name == "PactTieringSpec":
        from kvpact.vllm.offload.spec import PactTieringSpec

        return PactTieringSpec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
