"""Who changes the weights of a real engine: the outside of `weights_extension`, by vLLM's own calls and by others."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines import BLOCK_BY_BLOCK
from kvpact_testkit.demo.engine import EngineError, EngineProcess

ARGUMENTS: Mapping[str, Any] = {
    **BLOCK_BY_BLOCK,
    "worker_cls": "kvpact.vllm.worker.KvpactWorker",
    "worker_extension_cls": "weights_extension.Overwrites",
    "weight_transfer_config": {"backend": "seeded"},
}
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
}


class Trainer:
    """The trainer of one engine."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process

    def rpc(self, method: str, *arguments: object) -> None:
        """A method of the worker."""
        self.process.call("collective_rpc", method, None, list(arguments))

    def wait_until_computing(self, tokens: int) -> None:
        """Until so many tokens of a prompt have been computed, but not all."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.rpc("assert_computing", tokens)
            except EngineError:
                assert time.monotonic() < deadline, "the engine does not compute the prompt"

    def overwrite(self, seed: int) -> None:
        """By a method that neither vLLM nor kvpact knows; back to the files' weights for seed 0."""
        self.rpc("overwrite_weights", seed)

    def say(self, word: str) -> None:
        """A word for the weights as they are."""
        self.rpc("kvpact_set_weights_version", word)

    def transfer(self, seed: int, form: str) -> None:
        """The whole of vLLM's own update, by methods of `vllm.LLM`; see `weights_extension.Connection`."""
        self.start_transfer(form)
        self.deliver(seed)
        self.finish_transfer()

    def start_transfer(self, form: str) -> None:
        """See `weights_extension.Connection`."""
        self.process.call("init_weight_transfer_engine", {"init_info": {"form": form}})
        self.process.call("start_weight_update")

    def deliver(self, seed: int, **part: object) -> None:
        """See `weights_extension.Delivery`."""
        self.process.call("update_weights", {"update_info": {"seed": seed, **part}})

    def finish_transfer(self) -> None:
        self.process.call("finish_weight_update")
