"""Quantisation of the weights by vLLM: method, settings and choice of kernels, as one field of the namespace.

The checkpoint's own settings are in the model's configuration or beside the weights, which are compared separately.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpact.identity.base_weights import cannot_tell
from kvpact.identity.weights import file_digest
from kvpact.vllm.compat.configuration import kernel_settings, kernel_variables, quantization_settings


def quantization(vllm_config: Any) -> str:
    """Settings that two engines must share to compute the same from the same quantised files; "None" if not quantised.

    Raises ConfigError if a file with settings that the user names cannot be read.
    """
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    if model.quantization is None:
        return "None"
    settings = quantization_settings(model)
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    told = {
        "method": str(model.quantization),
        "settings": settings if settings is None or isinstance(settings, dict) else asdict(settings),
        "file": _file(overrides.get("quantization_config_file")),
        "device": str(current_platform.get_device_capability()),  # the same method has other kernels on other devices
        "kernels": kernel_settings(vllm_config),
        "variables": kernel_variables(),
    }
    return json.dumps(told, sort_keys=True, default=str)


def _file(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return file_digest(Path(name))
    except OSError as error:
        raise cannot_tell(error) from None
