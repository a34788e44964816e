"""Connectors that say they keep several KV cache groups, over vLLM's scheduler without a device, with their servers.

Owns the servers, which end with the context, and what a process without CUDA lacks of their clients.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.request import Request, urlopen

from servers.mooncake_server import free_port, mooncake_pool

VLLM = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING = f"{VLLM}.offloading_connector:OffloadingConnector"
MEMORY = 1 << 22
"""Bytes, more than a scenario stores."""
ON_A_SIMULATED_DEVICE: Mapping[str, Any] = {
    "spec_module_path": "kvpact_testkit.vllm.offloading",
    "seed": 1,
    "log": "{folder}",
}
LMCACHE = "placed_lmcache:PlacedLMCacheMPConnector"
ANSWERS_TOO = {"lmcache.mp.save_decode_cache": True}
TIER = {"type": "PactTier", "model_id": "w", "url": "disk://{folder}/kv?capacity=64MiB"}
CONNECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "kvpact": ("kvpact.vllm:PactConnector", {"memory": f"{MEMORY}B", "model_id": "w"}),
    "PactTier": (
        OFFLOADING,
        # Room for 32 blocks: the rest comes from the tier.
        {
            "spec_name": "PlayedPactTieringSpec",
            "cpu_bytes_to_use": 1 << 17,
            "secondary_tiers": [TIER],
            **ON_A_SIMULATED_DEVICE,
        },
    ),
    "offloading": (
        OFFLOADING,
        {
            "spec_name": "PlayedTieringSpec",
            "cpu_bytes_to_use": MEMORY,
            "secondary_tiers": [],
            **ON_A_SIMULATED_DEVICE,
        },
    ),
    "simple": (
        "kvpact_testkit.vllm.simple_offloading:MemcpySimpleCPUOffloadConnector",
        {"cpu_bytes_to_use": MEMORY},
    ),
    "mooncake": (f"{VLLM}.mooncake.store.connector:MooncakeStoreConnector", {"save_decode_cache": True}),
    "lmcache": (LMCACHE, {**ANSWERS_TOO, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}),
    "lmcache, one object": (LMCACHE, {**ANSWERS_TOO, "lmcache.mp.mp_transfer_mode": "lmcache_driven"}),
    "lmcache, engine_driven": (LMCACHE, {**ANSWERS_TOO, "lmcache.mp.mp_transfer_mode": "engine_driven"}),
}
"""Name -> connector and its configuration. Mooncake and LMCache save answers, too, which is off by
default; LMCache's server splits objects by group, as is meant for such models, where the name says nothing else."""

START_SECONDS = 300.0


class NoEvent:
    """`torch.cuda.Event` of a process whose steps have computed all when they return, as vLLM's CPU worker has it."""

    def record(self, stream: object = None) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing is under way."""


@contextmanager
def configured(name: str, folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The connector of this name and its configuration, beside a server of its own where it needs one."""
    connector, config = CONNECTORS[name]
    if name == "mooncake":
        import torch

        with (
            mooncake_pool(folder, 64) as pool,
            patch.dict("os.environ", MOONCAKE_CONFIG_PATH=str(folder / "mooncake.json")),
            patch.object(torch.cuda, "Event", NoEvent),
        ):
            settings = {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{pool.port}",
                "protocol": "tcp",
                "device_name": "",
                "mode": "embedded",
                "global_segment_size": 1 << 26,
                "local_buffer_size": "64mb",
            }
            (folder / "mooncake.json").write_text(json.dumps(settings))
            yield connector, config
    elif name.startswith("lmcache"):
        with lmcache_server(folder, separate=not name.endswith("one object")) as port:
            yield connector, {**config, "lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port}
    else:
        yield connector, config


_lmcache: dict[bool, tuple[subprocess.Popen[bytes], int, int]] = {}
"""The servers that run, by whether they split objects, with their two ports; they end with this process."""


@contextmanager
def lmcache_server(folder: Path, *, separate: bool) -> Iterator[int]:
    """An `lmcache server`, which takes seconds to start and is cleared for each scenario; its port."""
    program = Path(sys.executable).with_name("lmcache")
    if not program.exists():
        raise ModuleNotFoundError("No module named 'lmcache'", name="lmcache==0.5.6")
    if separate not in _lmcache:
        ports = [free_port() for _ in range(3)]
        named: dict[str, object] = dict(zip(("--port", "--http-port", "--prometheus-port"), ports, strict=True))
        named |= {"--host": "localhost", "--l1-size-gb": 1, "--eviction-policy": "LRU", "--chunk-size": 16}
        named |= {"--max-workers": 1, "--supported-transfer-mode": "auto", "--worker-reap-timeout-seconds": 3600}
        arguments = [str(word) for pair in named.items() for word in pair]
        process = subprocess.Popen(
            [program, "server", *arguments, f"--{'' if separate else 'no-'}separate-object-groups"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _lmcache[separate] = process, ports[0], ports[1]
    _, port, http = _lmcache[separate]
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urlopen(Request(f"http://localhost:{http}/cache/clear", method="POST"), timeout=10):
                break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    yield port


def end_servers() -> None:
    """End the servers that were started."""
    while _lmcache:
        _, (process, *_) = _lmcache.popitem()
        process.terminate()
        process.wait(20)
