"""A user's own ways to change the weights of a running engine, of which neither vLLM nor kvpact knows.

Also a weight-transfer backend for vLLM's own way, because none of those that vLLM brings runs on a CPU. The trainer is
a random generator: equal seeds are equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

ORIGINALS: dict[str, torch.Tensor] = {}
"""The parameters as they were before the first change, in the worker's process."""


def trained(name: str, original: torch.Tensor, seed: int) -> torch.Tensor:
    """The tensor after training: the same for the same seed, the original for seed 0."""
    if not seed:
        return original
    source = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
    return original * (1 + torch.rand(original.shape, generator=source)).to(original.dtype)


def remember(model: Any) -> None:
    """Keep the parameters as they are, if it is the first time."""
    for name, parameter in model.named_parameters():
        ORIGINALS.setdefault(name, parameter.data.clone())


def overwrite_model(model: Any, seed: int = 1000, part: int = 0, parts: int = 1) -> None:
    """Put weights into the model in place that are the same for the same seed; those from its files for seed 0."""
    remember(model)
    for name, parameter in list(model.named_parameters())[part::parts]:
        parameter.data.copy_(trained(name, ORIGINALS[name], seed))


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

    def assert_computing(self, tokens: int) -> None:
        """Only reads. Raises LookupError unless `tokens` of a prompt, and not all, have been computed at least."""
        requests = self.model_runner.requests.values()  # type: ignore[attr-defined]
        computed = [(request.num_computed_tokens, len(request.prompt_token_ids)) for request in requests]
        if not any(tokens <= done < length for done, length in computed):
            raise LookupError(f"computed tokens and prompts' lengths are {computed}, not from {tokens} on")


@dataclass
class Connection(WeightTransferInitInfo):
    """The `form` in which the trainer's weights are put into the model.

    "layerwise": as by vLLM's NCCL backend, by the model's `load_weights` in a reload during which it cannot compute;
    "in place": written into the parameters. (`load_weights` without a reload fails on CPUs, whose linear layers keep
    their weights packed elsewhere.)
    """

    form: str


@dataclass
class Delivery(WeightTransferUpdateInfo):
    """One of several parts of the weights; with `fails`, the trainer dies when it has sent them."""

    seed: int
    part: int = 0
    parts: int = 1
    fails: bool = False


class SeededTransfer(WeightTransferEngine[Connection, Delivery]):
    """The backend, `weight_transfer_config={"backend": "seeded"}`."""

    init_info_cls = Connection
    update_info_cls = Delivery

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._form = ""
        remember(model)

    def init_transfer_engine(self, init_info: Connection) -> None:
        """See `Connection`."""
        self._form = init_info.form

    def start_weight_update(self) -> None:
        """From here on a layerwise reload leaves parameters without values."""
        if self._form == "layerwise":
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, which ends with waiting for an accelerator and fails where there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Delivery) -> None:
        """Make this part of the weights, and load it."""
        if self._form == "in place":
            overwrite_model(self.model, update_info.seed, update_info.part, update_info.parts)
        else:
            self.model.load_weights(self._checkpoint(update_info))
        if update_info.fails:
            raise ConnectionError("the trainer is gone")

    def _checkpoint(self, update_info: Delivery) -> list[tuple[str, torch.Tensor]]:
        originals: dict[str, torch.Tensor] = {}
        for file in Path(self.model_config.model).glob("*.safetensors"):
            originals |= load_file(file)
        names = sorted(originals)[update_info.part :: update_info.parts]
        return [(name, trained(name, originals[name], update_info.seed)) for name in names]

    def finish_weight_update(self) -> None:
        """See `start_weight_update`."""
        if self._form == "layerwise":
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """There is nothing to release."""


WeightTransferEngineFactory.register_engine("seeded", SeededTransfer)
