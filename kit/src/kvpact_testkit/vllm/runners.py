"""The orders in which vLLM's two model runners call a connector's worker half around a step.

Owns the calls. vLLM's own code makes all of them but those before the runner's bookkeeping; the second runner's are
those of the release.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class FirstRunner:
    """`vllm.v1.worker.gpu_model_runner`: with drafts, saves are ordered behind sampling and drafting."""

    def __init__(self, connector: Any, vllm_config: Any, tensors: Any, *, drafts: bool) -> None:
        self._connector = connector
        self._vllm_config = vllm_config
        self._drafts = drafts
        self._words: Any = None
        connector.register_kv_caches(tensors)

    def before_update(self, output: Any) -> None:
        """Begin a step, before the runner takes in its requests."""
        self._connector.handle_preemptions(output.kv_connector_metadata)

    def no_forward(self, output: Any) -> Any:
        """Make a step that computes nothing; returns its `KVConnectorOutput`."""
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Runner

        return Runner.kv_connector_no_forward(output, self._vllm_config).kv_connector_output

    def forward(self, output: Any, layers: list[str], compute: Callable[[], None]) -> None:
        """Compute the step's forward pass."""
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Runner

        around = Runner.maybe_get_kv_connector_output(output, defer_finalize=self._drafts)
        with forward_context(layers, self._vllm_config), around as self._words:
            compute()

    def sampled(self, finished: set[str]) -> None:
        """Go on behind the sampling; the states of accepted drafts are not in their blocks yet."""

    def end(self, finished: set[str]) -> Any:
        """End the step, states in their blocks; returns its `KVConnectorOutput`."""
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Runner

        if self._drafts:
            Runner.finalize_kv_connector()
        return self._words


class SecondRunner:
    """`vllm.v1.worker.gpu.model_runner`. From 0.33 on it asks for results before the states are copied, too."""

    def __init__(self, connector: Any, vllm_config: Any, tensors: Any, *, drafts: bool) -> None:
        from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

        self._vllm_config = vllm_config
        self._drafts = drafts
        self._words: Any = None
        self._calls: Any = ActiveKVConnector(vllm_config, tensors)
        self._asks_early = hasattr(self._calls, "finalize_step")

    def before_update(self, output: Any) -> None:
        """See `FirstRunner`."""

    def no_forward(self, output: Any) -> Any:
        """See `FirstRunner`."""
        return self._calls.no_forward(output).kv_connector_output

    def forward(self, output: Any, layers: list[str], compute: Callable[[], None]) -> None:
        """See `FirstRunner`."""
        with forward_context(layers, self._vllm_config):
            self._calls.pre_forward(output)
            compute()
        self._calls.finish_forward()

    def sampled(self, finished: set[str]) -> None:
        """See `FirstRunner`."""
        if self._asks_early:
            self._words = self._calls.post_forward(finished, defer_finalize=self._drafts)

    def end(self, finished: set[str]) -> Any:
        """See `FirstRunner`."""
        if not self._asks_early:
            return self._calls.post_forward(finished)
        if self._drafts:
            self._calls.finalize_step()
        return self._words


RUNNERS: dict[int, type[FirstRunner | SecondRunner]] = {1: FirstRunner, 2: SecondRunner}
"""By vLLM's number of them."""


def forward_context(layers: list[str], vllm_config: Any) -> Any:
    """vLLM's context of a forward pass of these layers."""
    from vllm.forward_context import set_forward_context

    metadata = {layer: SimpleNamespace(slot_mapping=None) for layer in layers}
    return set_forward_context(metadata, vllm_config, slot_mapping={})
