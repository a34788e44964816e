"""A user's own ways to change the weights of a running engine, of which neither vLLM nor kvpact knows."""

from __future__ import annotations

from typing import Any

import torch

ORIGINALS: dict[str, torch.Tensor] = {}
"""The parameters as they were before the first change, in the worker's process."""


def overwrite_model(model: Any, seed: int = 1000) -> None:
    """Put weights into the model in place that are the same for the same seed; those from its files for seed 0."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            original = ORIGINALS.setdefault(name, parameter.data.clone())
            factors = 1 + torch.rand(original.shape, generator=source) if seed else torch.ones(original.shape)
            parameter.data.copy_(original * factors.to(original.dtype))


def overwrite_through_worker(worker: Any, seed: int) -> None:
    """For `collective_rpc`, which calls it with the worker."""
    overwrite_model(worker.model_runner.model, seed)


class Overwrites:
    """A `worker_extension_cls`."""

    def overwrite_weights(self, seed: int) -> None:
        """Load weights in a way of one's own."""
        overwrite_through_worker(self, seed)

    def overwrite_and_fail(self, seed: int) -> None:
        """Load weights and fail before the end."""
        overwrite_through_worker(self, seed)
        raise ConnectionError("the trainer is gone")

    def sum_of_weights(self) -> float:
        """Only reads them."""
        model = self.model_runner.model  # type: ignore[attr-defined]
        return sum(float(parameter.sum()) for parameter in model.parameters())
