"""`--through offloading`: kvpact's tiers in vLLM's own OffloadingConnector, as a value of `--kv-transfer-config`.

Owns the places of kvpact's settings in it, and refuses those without a meaning there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from kvpact.config import KvpactConfig
from kvpact.errors import ConfigError
from kvpact.vllm.compat.platforms import OFFLOADING, PACT_SPEC
from kvpact.vllm.offload.settings import COUNTED

OF_VLLM: Final = frozenset({"memory", "tiers"})
"""Keys that vLLM itself reads there, under other names; a tier reads those of `COUNTED`."""


def offloading_json(config: KvpactConfig, variables: Mapping[str, str]) -> str:
    """Value as one line of JSON; `variables` is from `load_with_variables`.

    A tier whose URL holds a secret is given by its number among the tiers in vLLM's environment. Without
    `kv_load_failure_policy`: vLLM's offloading reports no failed load.

    Raises:
        ConfigError: there is no tier, or a setting has no meaning there.
    """
    if others := sorted(config.model_fields_set - COUNTED - OF_VLLM):
        raise ConfigError(
            f"{others[0]} ({variables[others[0]]}) has no meaning with --through {OFFLOADING}, where vLLM decides "
            "what is saved and how it is loaded: leave it out, or use --through connector"
        )
    if not config.tiers:
        raise ConfigError(
            f"--through {OFFLOADING} needs a --tier; host memory without tiers is vLLM's own: vllm serve MODEL "
            "--kv-offloading-size GIB"
        )
    counted = config.model_dump(mode="json", exclude_unset=True, include={*COUNTED})
    places = [{"number": at} if tier.holds_secret else {"url": tier.url} for at, tier in enumerate(config.tiers)]
    extra = {
        "spec_name": PACT_SPEC,
        "cpu_bytes_to_use": config.memory,
        "secondary_tiers": [{"type": "PactTier", **place, **counted} for place in places],
    }
    return json.dumps({"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})
