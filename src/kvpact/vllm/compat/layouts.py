"""The order in which vLLM lays out KV memory, as far as a connector may ask for one."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from vllm.platforms import current_platform

from kvpact.errors import ConfigError
from kvpact.vllm.compat.scheduler import TAKES_FAILED_REQUESTS

BLOCKS_TOGETHER: Final = "BLHNC"
"""All layers of a block side by side. Of the two such orders the one that FlashInfer takes on every GPU, too."""


def wanted_layout(kv_layout: str) -> str | None:
    """The name of the layout that vLLM is asked for; None leaves it to vLLM.

    "auto" asks on devices, from 0.30 on. Raises ConfigError for "blocks" on a release before 0.29, which has no such
    layout.
    """
    if kv_layout == "engine" or (kv_layout == "auto" and (current_platform.is_cpu() or not TAKES_FAILED_REQUESTS)):
        return None
    try:
        layouts: Any = import_module("vllm.v1.kv_cache_layout").KVCacheLayout
    except ImportError as error:
        raise ConfigError(
            'kv_layout="blocks": this release of vLLM has no such layout, 0.29 is the first; leave kv_layout out'
        ) from error
    return str(layouts[BLOCKS_TOGETHER].name)


__all__ = ["wanted_layout"]
