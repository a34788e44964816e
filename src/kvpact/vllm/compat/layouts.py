"""The order of layers and blocks in vLLM's KV memory, as far as a connector may ask for one."""

from __future__ import annotations

from typing import Final

from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS_TOGETHER: Final = "BLHNC"
"""All layers of a block side by side. Of the two such orders the one that FlashInfer takes on every GPU, too."""


def wanted_layout(kv_layout: str) -> str | None:
    """The name of the layout that vLLM is asked for; None leaves it to vLLM. "auto" asks on devices only."""
    if kv_layout == "engine" or (kv_layout == "auto" and current_platform.is_cpu()):
        return None
    return str(KVCacheLayout[BLOCKS_TOGETHER].name)
