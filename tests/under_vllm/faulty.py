"""`FaultyConnector`: kvpact in a real engine, with faults that a test turns on and off from outside the engine.

Name it by `kv_connector_module_path`. The environment variable FAULTY_CONTROL names a directory: the file `faults` in
it lists the methods that raise now, `raised` gets a line for each time, and `network` one for each use of the network
by kvpact.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import socket_watch
from kvpact.contract import LoadJob
from kvpact.vllm import PactConnector

CONTROL = Path(os.environ["FAULTY_CONTROL"])
socket_watch.watch(CONTROL / "network")


class Injected(RuntimeError):
    """What stands where kvpact's own code should be."""


def active() -> set[str]:
    """The faults that are on now."""
    try:
        return set((CONTROL / "faults").read_text().split())
    except FileNotFoundError:
        return set()


def strike(name: str) -> None:
    """Raise if the fault is on."""
    if name in active():
        with (CONTROL / "raised").open("a") as raised:
            raised.write(f"{name}\n")
        raise Injected(name)


def wrap(owner: Any, prefix: str, *names: str) -> None:
    """Let these methods of an object raise while their fault is on."""
    for name in names:
        setattr(owner, name, faulty(getattr(owner, name), f"{prefix}.{name}"))


def faulty(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The method, or its fault."""

    def call(*args: Any, **kwargs: Any) -> Any:
        strike(name)
        return method(*args, **kwargs)

    return call


class FaultyConnector(PactConnector):
    """kvpact, with faults. "transfer.fault.N" fails asynchronous loads from a request's block N on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._scheduler is not None:
            methods = "on_new_request probe end_step request_finished has_pending_work collect_stats"
            wrap(self._scheduler, "scheduler", *methods.split())
        if self._worker is not None:
            wrap(self._worker, "worker", "start_loads", "wait_for_layer_load", "start_saves", "poll", "report")

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The transfer threads are up."""
        super().register_kv_caches(kv_caches)
        transfer: Any = self._worker_side._transfer
        transfer._fault = self._fail_block
        wrap(transfer, "transfer", "start_loads", "wait_for_layer", "wait_for_loads", "start_saves", "poll")
        wrap(transfer._engine, "engine", "scatter", "gather")

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """The cache is up."""
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        methods = "prepare_external_match commit_external_match note_computed end_step apply_report request_finished"
        wrap(self._scheduler_side.cache, "cache", *methods.split())

    @staticmethod
    def _fail_block(job: LoadJob, block: int) -> None:
        for name in active():
            if name.startswith("transfer.fault.") and block >= int(name.rsplit(".", 1)[1]):
                strike(name)
