"""A worker's watch over the adapters that vLLM loads: the state of their files, reported before a step uses them.

Owns the wrapper around vLLM's loading; `kvpact.vllm.worker` installs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

from kvpact.identity.adapter_files import FilesSeen, look_at_rest
from kvpact.identity.loaded_adapters import NO_STAMP, LoadedAdaptersWriter
from kvpact.tiers.log_once import LogOnce
from kvpact.vllm.compat.objects import is_tensorized, wrap_adapter_loader

logger = logging.getLogger(__name__)


def watch_adapters(manager: Any, table: LoadedAdaptersWriter) -> bool:
    """Make `manager`, vLLM's `WorkerLoRAManager`, record in `table` what it loads; returns whether that is possible."""
    return wrap_adapter_loader(manager, partial(_saying_so, table))


def _saying_so(table: LoadedAdaptersWriter, load: Callable[..., Any]) -> Callable[..., Any]:
    told = LogOnce(logger)  # an adapter may be loaded for each request

    @wraps(load)
    def load_adapter(lora_request: Any, *arguments: Any, **named: Any) -> Any:
        before = _look(lora_request)
        stamp = NO_STAMP
        try:
            answer = load(lora_request, *arguments, **named)
            if before is not None and _look(lora_request) == before:
                stamp = before.stamp
            else:
                text = "kvpact: %s is not cached: it was not loaded from local files that stay as they are"
                told.log(str(lora_request.lora_path), logging.WARNING, text, lora_request.lora_path)
            return answer
        finally:
            _say(table, lora_request, stamp)

    return load_adapter


def _say(table: LoadedAdaptersWriter, lora_request: Any, stamp: bytes) -> None:
    try:
        table.loaded(int(lora_request.lora_int_id), stamp)
    except Exception:
        logger.exception("kvpact: the loading of the adapter %s could not be recorded", lora_request)


def _look(lora_request: Any) -> FilesSeen | None:
    """The state of the adapter's files now; None if a later change may look the same."""
    if is_tensorized(lora_request):
        return None
    try:
        return look_at_rest(Path(lora_request.lora_path).expanduser())
    except (OSError, ValueError, RuntimeError):
        return None
