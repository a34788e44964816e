"""vLLM's hooks for a worker's KV memory: allocated, unmapped for a sleep, mapped again.

Owns the layout that was registered first: what is stored has the bytes of that one. vLLM 0.33 calls all of the hooks,
earlier releases the first; there `kvpact.vllm.worker.KvpactWorker` calls the others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpact.errors import ConfigError
from kvpact.vllm.compat.objects import layers_without_hook
from kvpact.vllm.worker_identity import layer_pages

if TYPE_CHECKING:
    import torch

    from kvpact.vllm.groups import EngineGroups
    from kvpact.worker.worker import CacheWorker

logger = logging.getLogger(__name__)


class KVMemoryHooks:
    """The hooks. None of them is guarded: without what they do, an engine must not go on."""

    _pages: Mapping[str, str]
    """Layer -> where a block's bytes lie in it."""
    _groups: EngineGroups
    _vllm_config: Any
    _has_layers_without_hook = False
    """True if some layer does not wait for its load."""
    _is_refused = False
    """True if the KV memory came back in a layout that is not used."""
    _worker: CacheWorker | None

    @property
    def cache_worker(self) -> CacheWorker:
        """The rank's half: `kvpact.vllm.worker` records changes of weights and adapters in it."""
        if self._worker is None:
            raise ConfigError("a worker's hook was called on the scheduler's half of the connector")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV memory is there, or has moved. Raises ConfigError if the configuration does not fit the machine."""
        if not self._groups.are_served:
            return
        kv_caches = self._without_guests(kv_caches)
        if self.cache_worker.memory is None:
            self.cache_worker.register_kv_caches(kv_caches)
            self._pages = self._pages_of(kv_caches)
            self._has_layers_without_hook = bool(layers_without_hook(self._vllm_config, kv_caches))
        else:
            self.unregister_kv_caches()
            self._is_refused = False
            self._bring_back(kv_caches)

    def unregister_kv_caches(self) -> None:
        """End the copies before vLLM unmaps the KV memory. Idempotent.

        Raises KvpactError if they do not end: vLLM then does not take the memory away.
        """
        self.cache_worker.suspend()

    def restore_kv_caches(self) -> None:
        """The KV memory is there again, perhaps at other addresses. Idempotent.

        In another layout it is not used: one error is logged, and the engine serves without a cache.
        """
        memory = self.cache_worker.memory
        if memory is not None and not memory.is_there and not self._is_refused:
            self._bring_back(memory.kv_caches)

    def _bring_back(self, kv_caches: Mapping[str, Any]) -> None:
        """KV memory that went away is there again, in these tensors."""
        memory = self.cache_worker.memory
        assert memory is not None, "it was registered"
        try:
            pages = self._pages_of(kv_caches)
            for name in sorted(pages.keys() | self._pages.keys()):
                before = self._pages.get(name, "nothing")
                now = pages.get(name, "nothing")
                if before != now:
                    raise ConfigError(f"the KV memory of {name} came back as {now}, and had been {before}")
            memory.resume(kv_caches)
        except ConfigError as error:
            self._is_refused = True
            logger.error("kvpact: %s. This engine goes on without a cache", error)
            if self.cache_worker.notices is not None:
                self.cache_worker.notices.weights_change()  # what is stored is promised to nobody

    def _without_guests(self, kv_caches: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The layers of the KV cache groups: without those that read and write another layer's memory."""
        named = {name for group in self.cache_worker.place.groups for name in group}
        owned = {id(tensor) for name, tensor in kv_caches.items() if name in named}
        return {name: tensor for name, tensor in kv_caches.items() if name in named or id(tensor) not in owned}

    def _pages_of(self, kv_caches: Mapping[str, Any]) -> Mapping[str, str]:
        return layer_pages(kv_caches, self.cache_worker.place.num_blocks)
